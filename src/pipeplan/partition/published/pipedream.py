"""PipeDream's planner (Narayanan et al. 2019, 3.1): contiguous stages of the linearised graph, each replicated.

Its dynamic programme finds the split and replication with the least slowest stage, synchronisation included. Memory
is that of the later versions, which limit what is in flight by 1F1B. All samples go through stages in a line, even
where the graph has branches.
"""

from __future__ import annotations

import numpy as np

from pipeplan.errors import InfeasibleError
from pipeplan.partition.published.costs import Question
from pipeplan.partition.published.stages import PublishedPlan, least_bottleneck

__all__ = ["pipedream"]


def pipedream(question: Question) -> PublishedPlan:
    """The contiguous partition with the least slowest stage, on at most the devices there are.

    Raises:
        InfeasibleError: no partition fits into memory.
    """
    count = len(question.names)
    plan = least_bottleneck(question, np.tri(count + 1, count, -1, dtype=np.bool_))
    if plan is None:
        raise InfeasibleError(
            f"no split of {count} blocks into stages in a line fits {question.num_devices} devices of "
            f"{question.memory_bytes} bytes; raise --memory or --devices, or lower --microbatch-size"
        )
    return plan
