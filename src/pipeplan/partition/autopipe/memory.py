"""Whether the stages of a cut fit, each with the micro-batches that 1F1B holds there."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs import StageCost
from pipeplan.model import Edge, Profile
from pipeplan.partition.autopipe.loads import Cuts, line_costs
from pipeplan.units import format_bytes

__all__ = ["Fitting", "Repeat"]

Repeat = tuple[int, int, int]
"""Two blocks, in the order of the line, that take the same tensor, and its bytes: a stage with both holds it once."""


class Fitting:
    """Tells of blocks with these ``costs`` [block] whether some of them fit into ``memory_bytes`` as a stage.

    A stage holds parameters, gradients, optimizer state, the activations of one micro-batch for itself and one for
    every stage after it, at most of all there are, and the largest workspace. Splitting forwards changes none of it.
    With ``num_devices`` the micro-batches are shared out to as many replicas of the whole pipeline as these allow,
    as ``plan_depths`` does. ``repeats`` are not counted twice.
    """

    def __init__(
        self,
        costs: Sequence[StageCost],
        memory_bytes: int,
        num_microbatches: int,
        *,
        num_devices: int | None = None,
        repeats: Iterable[Repeat] = (),
    ) -> None:
        self._statics = [0, *accumulate(2 * each.parameter_bytes + each.optimizer_bytes for each in costs)]
        self._activations = [0, *accumulate(each.activation_bytes for each in costs)]
        self._workspaces = [each.workspace_bytes for each in costs]
        self._repeated = _sums_inside(list(repeats), len(costs))
        self._memory, self._num_microbatches, self._num_devices = memory_bytes, num_microbatches, num_devices

    @classmethod
    def of_profile(
        cls,
        profile: Profile,
        microbatch_size: int,
        memory_bytes: int,
        num_microbatches: int,
        *,
        recompute: bool = False,
        num_devices: int | None = None,
    ) -> Fitting:
        """The blocks of a profile in topological order, with what several of them take held once.

        Raises:
            UsageError: the profile has no costs for this micro-batch size.
        """
        return cls(
            line_costs(profile, microbatch_size, recompute=recompute),
            memory_bytes,
            num_microbatches,
            num_devices=num_devices,
            repeats=_repeats_of(profile, microbatch_size),
        )

    def __call__(self, num_stages: int, stage: int, begin: int, end: int) -> bool:
        """Whether blocks begin..end-1 fit as that of so many stages."""
        return self.needs(num_stages, stage, begin, end) <= self._memory

    def needs(self, num_stages: int, stage: int, begin: int, end: int) -> int:
        """Bytes of blocks begin..end-1 as that of so many stages."""
        return (
            self._statics[end]
            - self._statics[begin]
            + self._in_flight(num_stages, stage) * self._held(begin, end)
            + max(self._workspaces[begin:end])
        )

    def any_cut(self, num_stages: int) -> bool:
        """Whether some cut into so many stages fits."""
        return self._greedy(num_stages, self._memory) is not None

    def least_bytes(self, num_stages: int) -> tuple[int, int]:
        """The least memory that every device must have for some cut into so many stages, and the stage that needs it.

        At most as many stages as blocks.
        """
        count = len(self._workspaces)
        most = max(self.needs(num_stages, stage, 0, count) for stage in range(num_stages))
        least = bisect_left(range(most), True, key=lambda limit: self._greedy(num_stages, limit) is not None)
        ranges = list(pairwise((*(self._greedy(num_stages, least) or ()), count)))
        return least, max(range(num_stages), key=lambda stage: self.needs(num_stages, stage, *ranges[stage]))

    def shortfall(self, num_stages: int) -> str:
        """What is missing for so many stages, in words."""
        least, stage = self.least_bytes(num_stages)
        return (
            f"at a depth of {num_stages} stage {stage} needs {format_bytes(least)} at least, "
            f"{format_bytes(max(0, least - self._memory))} more than the {format_bytes(self._memory)} there are"
        )

    def _in_flight(self, num_stages: int, stage: int) -> int:
        replicas = 1 if self._num_devices is None else max(1, self._num_devices // num_stages)
        return min(self._num_microbatches // replicas, num_stages - stage)

    def _held(self, begin: int, end: int) -> int:
        """Activations of one micro-batch."""
        return max(0, self._activations[end] - self._activations[begin] - int(self._repeated[begin, end]))

    def _greedy(self, num_stages: int, limit: int) -> Cuts | None:
        """The cut whose stages, first to last, take as much as fits into ``limit``; None if blocks are left over.

        More blocks never need less, so if any cut fits this one does.
        """
        begins: list[int] = []
        begin, count = 0, len(self._workspaces)
        for stage in range(num_stages):
            ends = range(begin + 1, count - (num_stages - stage - 1) + 1)
            fitting = bisect_right(ends, limit, key=partial(self.needs, num_stages, stage, begin))
            if not fitting:
                return None
            begins.append(begin)
            begin = ends[fitting - 1]
        return tuple(begins) if begin == count else None


def _repeats_of(profile: Profile, microbatch_size: int) -> Iterator[Repeat]:
    """Each block that takes a tensor and gives a gradient for it, with the next one that does.

    What one block counts for a tensor is its own, so a range that has n of them counts it n - 1 times too often.
    """
    place = {block: index for index, block in enumerate(profile.topological_order())}
    takers: dict[tuple[str, str], list[Edge]] = defaultdict(list)
    for edge in profile.edges:
        if edge.tensor is not None and edge.gradient:
            takers[edge.source, edge.tensor].append(edge)
    for edges in takers.values():
        size = edges[0].bytes_per_sample * (1 if edges[0].broadcast else microbatch_size)
        for first, second in pairwise(sorted(place[edge.target] for edge in edges)):
            yield first, second, size


def _sums_inside(repeats: Sequence[Repeat], count: int) -> NDArray[np.int64]:
    """[begin, end] bytes of the repeats whose two blocks both are among blocks begin .. end-1."""
    table = np.zeros((count + 1, count + 1), dtype=np.int64)
    for first, second, size in repeats:
        table[first, second + 1] += size
    return np.cumsum(np.cumsum(table[::-1], axis=0)[::-1], axis=1)
