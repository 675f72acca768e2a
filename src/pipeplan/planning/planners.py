"""Published planners by name: each alone, by its own algorithm and objective.

``auto`` is ours: it tries what GraphPipe's and AutoPipe's choose, what the others do where messages take no time and
blocks are whole, and more. A planner chooses stages, devices and the sizes of micro-batches; schedules are searched on
these stages as on any others, or are what ``--scheduler`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from pipeplan.errors import UsageError, choose_from
from pipeplan.files import Placement
from pipeplan.partition.chain.autopipe import autopipe
from pipeplan.partition.dapple import dapple
from pipeplan.partition.pipedream import pipedream
from pipeplan.planning.candidates import Proposal, StageGraphs, not_joined, piper_alone, published_alone
from pipeplan.planning.request import Request

AUTO_PLANNER = "auto"

EVERY_PLANNER = "all"
"""What compares them all."""


@dataclass(frozen=True, slots=True)
class NamedPlanner:
    """A planner as its paper has it.

    ``proposals`` are what it chooses for a request: one placement for each way of asking it. ``objective`` says what
    is least of that, and where the paper says so. One that ``needs_chain`` has blocks that each feed the next.
    """

    proposals: Callable[[Request], Iterator[Proposal]]
    objective: str
    needs_chain: bool = False


PLANNERS: dict[str, NamedPlanner] = {
    "graphpipe": NamedPlanner(
        lambda request: StageGraphs().alone(request),
        "time per sample of the slowest stage, each stage with a size of its own (GraphPipe, 3.3 and Algorithm 2)",
    ),
    "autopipe": NamedPlanner(
        lambda request: published_alone(request, "AutoPipe", partial(autopipe, polish=False)),
        "simulated iteration of 1F1B on as many replicas of every stage (AutoPipe, III-B and IV-D), without our polish",
        needs_chain=True,
    ),
    "pipedream": NamedPlanner(
        lambda request: published_alone(request, "PipeDream", pipedream, places=True),
        "the longest of contiguous stages' compute, sums of gradients and messages between them, level by level of the "
        "cluster's links (PipeDream, 3.1)",
    ),
    "piper": NamedPlanner(
        piper_alone,
        "compute, messages and sums of the busiest stage between downsets, each with its degrees of data and tensor "
        "parallelism, and blocks that it recomputes (Piper, 3 and 4)",
    ),
    "dapple": NamedPlanner(
        lambda request: published_alone(request, "DAPPLE", dapple, places=True),
        "latency of the pipeline along its pivot stage, sending counted as stages, on devices by policies (DAPPLE, 4)",
    ),
}
"""Every planner by the name ``--planner`` takes."""


def require_planner(request: Request) -> None:
    """Require a planner that there is, and that is asked what it can answer.

    Raises:
        UsageError: the name is unknown, something else says where stages stand or how blocks are split, or it plans
            only lines of blocks and these are none.
    """
    name = request.planner
    if name == AUTO_PLANNER:
        return
    if name == EVERY_PLANNER:
        raise UsageError(f"--planner {name} is for compare; choose one of {', '.join([AUTO_PLANNER, *PLANNERS])}")
    if name not in PLANNERS:
        raise UsageError(f"--planner {name!r} is not known; {choose_from(name, [AUTO_PLANNER, *PLANNERS])}")
    said = {
        "--scheduler rules without --rules": request.tunes,
        "--placement": request.placement != "auto",
        "--tp": request.shards not in (None, 1),
        "--cp": request.context not in (None, 1),
        "--pp": request.positions is not None,
        "--chunks": request.chunks is not None,
        "--slices": bool(request.num_parted) and name != "autopipe",
        "--shard-shared": bool(request.spread),
    }
    beside = [flag for flag, given in said.items() if given]
    if beside:
        own = isinstance(request.placement, Placement) and beside[0] == "--placement"
        what = "the placement that is given" if own else beside[0]
        remedy = "give --placement all" if own else "leave one of them out"
        raise UsageError(f"--planner {name} chooses the stages and where they stand, which {what} says, too; {remedy}")
    if PLANNERS[name].needs_chain and (apart := not_joined(request.profile)) is not None:
        raise UsageError(
            f"--planner {name} plans blocks in a line, each of which feeds the next, but of profile "
            f"{request.profile.name!r} block {apart[0]!r} does not feed {apart[1]!r}; choose --planner graphpipe or "
            "piper, which plan graphs, or pipedream or dapple, which put the blocks in a line"
        )
