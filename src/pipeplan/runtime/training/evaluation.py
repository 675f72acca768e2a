"""Evaluation passes: forwards of the plan's stages alone, in the plan's order, on mini-batches that are not trained on.

Modules are in evaluation mode meanwhile: nothing is dropped, and BatchNorm takes its running statistics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from pipeplan.errors import UsageError
from pipeplan.runtime.executor.interpreter import Executor
from pipeplan.runtime.executor.process_groups import AllRanks
from pipeplan.runtime.executor.stage import MiniBatch, StageRunner
from pipeplan.runtime.launch.job import Evaluated


@dataclass(frozen=True, slots=True)
class Drawn:
    """A mini-batch as one rank has it: ``None`` is what only ranks know whose blocks take samples or have the loss.

    ``digest`` is what ranks compare of it, if each has it from a loader of its own.
    """

    samples: MiniBatch
    num_predictions: float | None = None
    digest: int | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One rank's part of evaluations: ``draw`` gives mini-batch n of ``num_batches``, ``executor`` runs forwards."""

    draw: Callable[[int], Drawn]
    num_batches: int
    executor: Executor
    stages: Mapping[int, StageRunner]
    modules: Sequence[nn.Module]
    all_ranks: AllRanks

    def run(self, step: int) -> Evaluated:
        """The mean loss per prediction after a step. Collective. Raises RankError, and UsageError as ranks compare."""
        begin, total, count, digests = time.monotonic_ns(), 0.0, 0.0, list[int | None]()
        with evaluating(self.stages.values(), self.modules):
            for number in range(self.num_batches):
                drawn = self.draw(number)
                self.executor.run(drawn.samples)
                losses = [loss for loss in (stage.take_loss() for stage in self.stages.values()) if loss is not None]
                total += float(sum(loss.double() for loss in losses)) * (drawn.num_predictions or 0.0)
                count += drawn.num_predictions or 0.0
                digests.append(drawn.digest)
        found = self.all_ranks.gather((total, count, digests))
        for number, own in enumerate(zip(*(each for *_, each in found), strict=True)):
            require_same(own, f"evaluation mini-batch {number}")
        counts = max(own for _, own, _ in found)
        loss = sum(own for own, *_ in found) / counts if counts else 0.0
        return Evaluated(step, loss, self.num_batches, time.monotonic_ns() - begin)


@contextmanager
def evaluating(stages: Iterable[StageRunner], modules: Iterable[nn.Module]) -> Iterator[None]:
    """Keep nothing for a backward, and have modules in evaluation mode, each then in the mode it was in."""
    training = [each for module in modules for each in module.modules() if each.training]
    runners = list(stages)
    for each in training:
        each.training = False
    for runner in runners:
        runner.evaluating = True
    try:
        with torch.no_grad():
            yield
    finally:
        for each in training:
            each.training = True
        for runner in runners:
            runner.evaluating = False


def require_same(digests: Sequence[int | None], what: str) -> None:
    """Refuse mini-batches that differ between ranks, by their ``digests`` [rank]. Raises UsageError, the same on each.

    That is after the step: what it made of the parameters is not kept.
    """
    known = {rank: digest for rank, digest in enumerate(digests) if digest is not None}
    first = next(iter(known), 0)
    for rank, digest in known.items():
        if digest != known[first]:
            raise UsageError(
                f"ranks {first} and {rank} have got different samples for {what}: the loader must give the same on "
                "every rank, and the run divides them; leave DistributedSampler out, and draw random numbers with torch"
            )
