"""The layout of the best plan of a large request in every other usual schedule.

Rows of the table of layouts are looked at by what their closed forms say, of which there is no time for all. What the
form of one schedule leaves out is not what another's does, so that rows of one layout, which share everything else, may
be thousands apart. What rows of other layouts took is not asked: that puts off whole schedules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeplan.planning.candidates import has_table, is_large, kept_choice, likely_choices
from pipeplan.planning.trials import PlanSearch, PlanStep
from pipeplan.planning.uniform_space import BoundedChoice, Choice
from pipeplan.search_constants import LARGE, OTHER_SCHEDULES_SHARE
from pipeplan.time_limit import checkpoint


@dataclass(frozen=True)
class OtherSchedules(PlanStep):
    """Once for each layout that is the best when its turn comes, its rows of the table, as they should be quickest.

    In a ``share`` of the time that is left.
    """

    share: float = OTHER_SCHEDULES_SHARE
    name = "other schedules"
    when = (
        f"in turn with the search; more than {LARGE} blocks x devices, with a table of layouts; each layout that is "
        "the best, once; --scheduler auto"
    )
    of = "what is left, each turn"
    in_turn = True

    def run(self, search: PlanSearch) -> None:
        """Look at them; what is shorter is a trial like others."""
        best, request = search.best, search.request
        if best is None or request.scheduler != "auto" or not is_large(request) or not has_table(request):
            return
        choice = kept_choice(best.candidate)
        if choice is None or not search.is_first(("other schedules", choice.layout)):
            return
        with search.budget.share(self.share * search.budget.remaining) as share, share.ended():
            for row in _alike(search, choice):
                checkpoint()
                if share.expired:
                    return
                search.try_row(row, share)


def _alike(search: PlanSearch, choice: Choice) -> Iterator[BoundedChoice]:
    """Rows of the same layout that may be shorter than the best."""
    layout = choice.layout
    for row in likely_choices(search.request):
        best = search.best
        shorter = best is None or row.least_ns < (best.value_ns or 0)
        if shorter and row.choice.layout == layout:
            yield row
