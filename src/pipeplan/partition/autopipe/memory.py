"""Whether the stages of a cut fit, each with the micro-batches that 1F1B holds there."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeplan.partition.chain_costs import Array, ChainCosts, Place
from pipeplan.units import format_bytes

__all__ = ["Fitting"]


@dataclass(frozen=True, slots=True)
class Fitting:
    """Tells of a chain's blocks whether some of them fit into ``memory_bytes`` as a stage.

    A stage holds parameters, gradients, optimizer state, the activations of one micro-batch for itself and one for
    every stage after it, at most of all there are, and the largest workspace. Splitting forwards changes none of it.
    """

    costs: ChainCosts
    memory_bytes: int
    num_microbatches: int

    def needs(self, num_stages: int, stages: Place, begins: Place, ends: Place) -> Array:
        """Bytes of blocks begin..end-1 as that of so many stages."""
        in_flight = np.minimum(self.num_microbatches, num_stages - stages)
        return self.costs.memory(begins, ends, in_flight)

    def fits(self, num_stages: int, stages: Place, begins: Place, ends: Place) -> np.ndarray:
        """Whether blocks begin..end-1 fit as that of so many stages."""
        return self.needs(num_stages, stages, begins, ends) <= self.memory_bytes

    def all_fit(self, begins: Sequence[int]) -> bool:
        """Whether every stage of a cut does."""
        return bool((self._needs_of(begins) <= self.memory_bytes).all())

    def any_cut(self, num_stages: int) -> bool:
        """Whether some cut into so many stages fits."""
        return self._greedy(num_stages, self.memory_bytes) is not None

    def least_bytes(self, num_stages: int) -> tuple[int, int]:
        """The least memory that every device must have for some cut into so many stages, and the stage that needs it.

        At most as many stages as blocks.
        """
        most = int(self.needs(num_stages, 0, 0, self.costs.num_blocks))
        least = bisect_left(range(most), True, key=lambda limit: self._greedy(num_stages, limit) is not None)
        cut = self._greedy(num_stages, least)
        assert cut is not None  # no stage of any cut needs more than all blocks together
        return least, int(self._needs_of(cut).argmax())

    def shortfall(self, num_stages: int) -> str:
        """What is missing for so many stages, in words."""
        (least, stage), most = self.least_bytes(num_stages), self.memory_bytes
        return (
            f"at a depth of {num_stages} stage {stage} needs {format_bytes(least)} at least, "
            f"{format_bytes(max(0, least - most))} more than the {format_bytes(most)} there are"
        )

    def _needs_of(self, begins: Sequence[int]) -> Array:
        """[stage] bytes."""
        bounds = np.array((*begins, self.costs.num_blocks))
        return self.needs(len(begins), np.arange(len(begins)), bounds[:-1], bounds[1:])

    def _greedy(self, num_stages: int, limit: int) -> tuple[int, ...] | None:
        """The cut whose stages, first to last, take as much as fits into ``limit``; None if blocks are left over.

        More blocks never need less, so if any cut fits this one does.
        """
        begins: list[int] = []
        begin, count = 0, self.costs.num_blocks
        for stage in range(num_stages):
            ends = np.arange(begin + 1, count - (num_stages - stage - 1) + 1)
            fitting = int(np.searchsorted(self.needs(num_stages, stage, begin, ends), limit, side="right"))
            if not fitting:
                return None
            begins.append(begin)
            begin = int(ends[fitting - 1])
        return tuple(begins) if begin == count else None
