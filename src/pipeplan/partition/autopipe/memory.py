"""Whether the stages of a cut fit, each with the micro-batches that 1F1B holds there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from pipeplan.costs import StageCosts

__all__ = ["Fitting"]


class Fitting:
    """Tells of blocks with these ``costs`` [block] whether some of them fit into ``memory_bytes`` as a stage.

    A stage holds parameters, gradients, optimizer state, the activations of one micro-batch for itself and one for
    every stage after it, at most of all there are, and the largest workspace. Splitting forwards changes none of it.
    """

    def __init__(self, costs: Sequence[StageCosts], memory_bytes: int, num_microbatches: int) -> None:
        self._statics = [0, *accumulate(2 * each.parameter_bytes + each.optimizer_bytes for each in costs)]
        self._activations = [0, *accumulate(each.activation_bytes for each in costs)]
        self._workspaces = [each.workspace_bytes for each in costs]
        self._memory, self._num_microbatches = memory_bytes, num_microbatches

    def __call__(self, num_stages: int, stage: int, begin: int, end: int) -> bool:
        """Whether blocks begin..end-1 fit as that of so many stages."""
        return self.needs(num_stages, stage, begin, end) <= self._memory

    def needs(self, num_stages: int, stage: int, begin: int, end: int) -> int:
        """Bytes of blocks begin..end-1 as that of so many stages."""
        held = min(self._num_microbatches, num_stages - stage)
        return (
            self._statics[end]
            - self._statics[begin]
            + held * (self._activations[end] - self._activations[begin])
            + max(self._workspaces[begin:end])
        )
