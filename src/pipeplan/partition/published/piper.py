"""Piper's planner (Tarnawski et al. 2021): a dynamic programme over the downsets of the graph.

A downset has with every block all blocks before it. A partition is a chain of downsets, each stage the difference of
two: so stages are convex, but need not be contiguous in any given order. Every stage chooses its replicas and whether
it recomputes, under the memory that the number of stages after it leaves. Like PipeDream's, its stages run one after
another, whatever the graph; splitting blocks over devices is left out here, as our stages have no such choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeplan.errors import UsageError
from pipeplan.partition.chain_costs import Array, ChainCosts, Place
from pipeplan.partition.problem import Partition, PartitionProblem, Way
from pipeplan.partition.published.stages import Mask, Stages, for_each_size, least_bottleneck

__all__ = ["MAX_DOWNSETS", "downsets", "piper"]

MAX_DOWNSETS = 3_000
"""With more of them the pairs, each of which is a possible stage, become too many: millions."""


def piper(problem: PartitionProblem, max_downsets: int = MAX_DOWNSETS) -> Iterator[Partition]:
    """The chain of downsets with the least slowest stage, on at most the devices there are, for each size.

    Raises:
        UsageError: the graph has more downsets than ``max_downsets``.
        InfeasibleError: no partition fits into memory.
    """
    order, cuts = problem.order, downsets(problem, max_downsets)
    sums = _NestedCosts.over(problem.chain(order), cuts)
    begins, ends = _nested(cuts)

    def planned(ways: Sequence[Way]) -> Partition | None:
        found = least_bottleneck(problem, Stages.of(problem, ways, sums, begins, ends))
        if found is None:
            return None
        stages = [(np.flatnonzero(cuts[end] & ~cuts[begin]), way) for begin, end, way in found[1]]
        placed = problem.placed([([order[block] for block in blocks], way) for blocks, way in stages])
        return Partition(placed, found[0], optimal=True)

    return for_each_size(problem, planned, f"no partition of {len(order)} blocks along downsets fits")


def downsets(problem: PartitionProblem, most: int = MAX_DOWNSETS) -> Mask:
    """[downset, block] all downsets of the graph, by size; those of equal size in a fixed order.

    Raises:
        UsageError: there are more than ``most``.
    """
    order, count = problem.order, len(problem.costs)
    place = {block: index for index, block in enumerate(order)}
    before = [0] * count
    for source, target in problem.edges:
        before[place[target]] |= 1 << place[source]
    layer, found = {0}, [0]
    for _ in range(count):
        layer = {
            downset | 1 << block
            for downset in layer
            for block in range(count)
            if not downset >> block & 1 and before[block] & ~downset == 0
        }
        found += sorted(layer)
        if len(found) > most:
            raise UsageError(
                f"Piper's planner does not finish on this graph: it has more than {most} downsets of {count} blocks; "
                "group blocks, or choose another planner"
            )
    return np.array([[downset >> block & 1 for block in range(count)] for downset in found], dtype=np.bool_)


def _nested(cuts: Mask) -> tuple[Array, Array]:
    """Every downset with each that contains it."""
    found = [np.flatnonzero((cuts[begin + 1 :] | ~cuts[begin]).all(axis=1)) + begin + 1 for begin in range(len(cuts))]
    return np.repeat(np.arange(len(cuts)), [len(ends) for ends in found]), np.concatenate(found)


@dataclass(frozen=True, slots=True)
class _NestedCosts(ChainCosts):
    """Sums [row, cut] over sets of blocks instead of the first blocks: a stage has those of one set without another's.

    ``members`` [cut, block] are the sets, ``workspaces`` [row, block] those of blocks.
    """

    members: Mask = field(kw_only=True)
    workspaces: Array = field(kw_only=True)

    @classmethod
    def over(cls, chain: ChainCosts, members: Mask) -> _NestedCosts:
        """Of the blocks of a chain."""

        def over(sums: Array) -> Array:
            values: Array = np.diff(sums) @ members.T.astype(np.int64)
            return values

        return cls(
            over(chain.forward),
            over(chain.compute),
            over(chain.activations),
            over(chain.parameters),
            over(chain.static),
            chain.widest,
            members=members,
            workspaces=chain.widest[:, 0],
        )

    def workspace(self, begins: Place, ends: Place) -> Array:
        """The largest of the blocks between two sets, block after block so that memory does for millions of pairs."""
        largest = np.zeros((len(self.workspaces), *np.shape(begins)), dtype=np.int64)
        for sizes, inside in zip(self.workspaces.T, self.members.T, strict=True):
            np.maximum(largest, sizes[:, None] * (inside[ends] & ~inside[begins]), out=largest)
        return largest
