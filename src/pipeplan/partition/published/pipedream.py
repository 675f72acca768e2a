"""PipeDream's planner (Narayanan et al. 2019, 3.1): contiguous stages of the linearised graph, each replicated.

Its dynamic programme finds the split and replication with the least slowest stage, synchronisation included. Memory
is that of the later versions, which limit what is in flight by 1F1B. All samples go through stages in a line, even
where the graph has branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeplan.partition.problem import Partition, PartitionProblem, Way
from pipeplan.partition.published.stages import Stages, for_each_size, least_bottleneck

__all__ = ["pipedream"]


def pipedream(problem: PartitionProblem) -> Iterator[Partition]:
    """The contiguous partition with the least slowest stage, on at most the devices there are, for each size.

    Raises:
        InfeasibleError: no partition fits into memory.
    """
    order = problem.order

    def planned(ways: Sequence[Way]) -> Partition | None:
        found = least_bottleneck(problem, Stages.of_chain(problem, ways, order))
        if found is None:
            return None
        placed = problem.placed([(order[begin:end], way) for begin, end, way in found[1]])
        return Partition(placed, found[0], optimal=True)

    return for_each_size(problem, planned, f"no split of {len(order)} blocks into stages in a line fits")
