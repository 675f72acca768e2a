"""Piper's planner (Tarnawski et al. 2021): a dynamic programme over the downsets of the graph.

A downset has with every block all blocks before it. A partition is a chain of downsets, each stage the difference of
two: so stages are convex, but need not be contiguous in any given order. Every stage chooses its replicas and whether
it recomputes, under the memory that the number of stages after it leaves. Like PipeDream's, its stages run one after
another, whatever the graph; splitting blocks over devices is left out here, as our stages have no such choice.
"""

from __future__ import annotations

import numpy as np

from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.partition.published.costs import Mask, Question
from pipeplan.partition.published.stages import PublishedPlan, least_bottleneck

__all__ = ["MAX_DOWNSETS", "downsets", "piper"]

MAX_DOWNSETS = 3_000
"""With more of them the pairs, each of which is a possible stage, become too many: millions."""


def piper(question: Question, max_downsets: int = MAX_DOWNSETS) -> PublishedPlan:
    """The chain of downsets with the least slowest stage, on at most the devices there are.

    Raises:
        UsageError: the graph has more downsets than ``max_downsets``.
        InfeasibleError: no partition fits into memory.
    """
    plan = least_bottleneck(question, downsets(question, max_downsets))
    if plan is None:
        raise InfeasibleError(
            f"no partition of {len(question.names)} blocks along downsets fits {question.num_devices} devices of "
            f"{question.memory_bytes} bytes; raise --memory or --devices, or lower --microbatch-size"
        )
    return plan


def downsets(question: Question, most: int = MAX_DOWNSETS) -> Mask:
    """[downset, block] all downsets of the graph, by size; those of equal size in a fixed order.

    Raises:
        UsageError: there are more than ``most``.
    """
    count = len(question.names)
    before = [sum(1 << source for source, target in set(question.edges) if target == block) for block in range(count)]
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
