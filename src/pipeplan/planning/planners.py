"""Published planners by name: each alone, with exactly its own algorithm and objective.

``auto`` is ours, which tries what all of them choose and more. A planner chooses stages, devices and the sizes of
micro-batches; schedules are searched on these stages as on any others, or are what ``--scheduler`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipeplan.errors import UsageError, choose_from
from pipeplan.files import Placement
from pipeplan.planning.candidates import Proposal, StageGraphs
from pipeplan.planning.request import Request

AUTO_PLANNER = "auto"


@dataclass(frozen=True, slots=True)
class NamedPlanner:
    """A planner as its paper has it.

    ``proposals`` are what it chooses for a request: one placement for each way of asking it. ``objective`` says what
    is least of that, and where the paper says so.
    """

    proposals: Callable[[Request], Iterator[Proposal]]
    objective: str


PLANNERS: dict[str, NamedPlanner] = {
    "graphpipe": NamedPlanner(
        lambda request: StageGraphs().alone(request),
        "time per sample of the slowest stage, each stage with a size of its own (GraphPipe, 3.3 and Algorithm 2)",
    ),
}
"""Every planner by the name ``--planner`` takes."""


def require_planner(request: Request) -> None:
    """Require a planner that there is, and that is asked what it can answer.

    Raises:
        UsageError: the name is unknown, or something else says where stages stand or how blocks are split.
    """
    name = request.planner
    if name == AUTO_PLANNER:
        return
    if name not in PLANNERS:
        raise UsageError(f"--planner {name!r} is not known; {choose_from(name, [AUTO_PLANNER, *PLANNERS])}")
    said = {
        "--scheduler rules without --rules": request.tunes,
        "--placement": request.placement != "auto",
        "--tp": request.shards not in (None, 1),
        "--cp": request.context not in (None, 1),
        "--pp": request.positions is not None,
        "--chunks": request.chunks is not None,
        "--slices": bool(request.num_parted),
        "--shard-shared": bool(request.spread),
    }
    beside = [flag for flag, given in said.items() if given]
    if beside:
        own = isinstance(request.placement, Placement) and beside[0] == "--placement"
        what = "the placement that is given" if own else beside[0]
        remedy = "give --placement all" if own else "leave one of them out"
        raise UsageError(f"--planner {name} chooses the stages and where they stand, which {what} says, too; {remedy}")
