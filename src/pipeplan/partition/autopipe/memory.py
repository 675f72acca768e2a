"""Whether the stages of a cut fit, each with the micro-batches that 1F1B holds there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from pipeplan.costs import StageCosts
from pipeplan.partition.autopipe.loads import Cuts

__all__ = ["Fitting"]


class Fitting:
    """Tells of cuts of blocks with these ``costs`` [block] whether each stage fits into ``memory_bytes``.

    A stage holds parameters, gradients, optimizer state, the activations of one micro-batch for itself and one for
    every stage after it, at most of all there are, and the largest workspace. Splitting forwards changes none of it.
    """

    def __init__(self, costs: Sequence[StageCosts], memory_bytes: int, num_microbatches: int) -> None:
        self._statics = [0, *accumulate(2 * each.parameter_bytes + each.optimizer_bytes for each in costs)]
        self._activations = [0, *accumulate(each.activation_bytes for each in costs)]
        self._workspaces = [each.workspace_bytes for each in costs]
        self._memory, self._num_microbatches = memory_bytes, num_microbatches

    def __call__(self, begins: Cuts) -> bool:
        """Whether every stage fits."""
        return max(self.needs(begins)) <= self._memory

    def needs(self, begins: Cuts) -> list[int]:
        """[stage] bytes."""
        return [
            self._statics[end]
            - self._statics[begin]
            + min(self._num_microbatches, len(begins) - stage) * (self._activations[end] - self._activations[begin])
            + max(self._workspaces[begin:end])
            for stage, (begin, end) in enumerate(pairwise((*begins, len(self._workspaces))))
        ]
