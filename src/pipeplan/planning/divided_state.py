"""Replicas that divide what they keep (ZeRO, FSDP) where nobody has said so: after all that keep it whole.

Dividing state takes messages, and brings time only by the memory that it frees: replicas where only longer pipelines
fitted, larger micro-batches, less computed again. So every choice comes whole first. What may then be shorter by its
bound is looked at as it is best by the closed forms of uniform layouts, and stays a candidate if it is shorter. Not
here: requests that ask for a level, or for all; tables of layouts, in which levels are choices like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from pipeplan.files import Placement
from pipeplan.planning.candidates import has_table, uniform_layouts
from pipeplan.planning.planners import AUTO_PLANNER
from pipeplan.planning.request import SUBMODULES, Request
from pipeplan.planning.trials import PlanSearch, PlanStep
from pipeplan.planning.uniform_space import BoundedChoice
from pipeplan.search_constants import DIVIDED_AFTER, DIVIDED_MARGIN, DIVIDED_MOST, DIVIDED_SHARE
from pipeplan.time_limit import checkpoint


def divides_by_default(request: Request) -> bool:
    """Whether levels are tried that nobody asked for: where messages take time, and the profile's recipe says what a
    parameter takes, which blocks with bytes of their own (as papers print them) do not.

    Not of stages that are given or a planner's, of submodules, or for forwards in parts.
    """
    if request.zero is not None or request.num_devices < 2 or request.replicas == 1:
        return False
    given = isinstance(request.placement, Placement) or request.placement == SUBMODULES
    own = given or request.planner != AUTO_PLANNER or request.tunes or request.num_parted or request.spread
    return request.knows_links and not request.profile.recipe.is_custom and not own and not has_table(request)


@dataclass(frozen=True)
class DivideState(PlanStep):
    """Uniform layouts whose replicas divide state, once all else has been looked at, or half of the time is over.

    Up to ``most`` that may be shorter than the best plan by their bound, and by the closed forms are no longer but for
    a ``margin``: the likeliest first, in a ``share`` of the time that is left.
    """

    most: int = DIVIDED_MOST
    margin: float = DIVIDED_MARGIN
    share: float = DIVIDED_SHARE
    name = "divide state"
    when = (
        "in turn with the search, once all else is looked at or half the time is over; --zero is open, "
        "links known, state by a recipe; no table of layouts; up to {most} that may be shorter than the best plan"
    )
    of = "what is left"
    in_turn = True

    def run(self, search: PlanSearch) -> None:
        """Look at them; what is shorter is a trial like others."""
        early = not search.all_seen and search.budget.used < DIVIDED_AFTER * search.budget.seconds
        if early or search.best is None or not divides_by_default(search.request):
            return
        with search.budget.share(self.share * search.budget.remaining) as share, share.ended():
            for each in islice(self._shorter(search), self.most):
                checkpoint()
                if share.expired:
                    return
                search.try_row(each, share)

    def _shorter(self, search: PlanSearch) -> Iterator[BoundedChoice]:
        for each in uniform_layouts(search.request):
            value = 0 if search.best is None else search.best.value_ns or 0
            if each.choice.zero.level and each.least_ns < value and each.usual_ns < (1 + self.margin) * value:
                yield each
