"""A rank of the tests of held bytes: what it keeps of micro-batches after each action of a step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan.files import Plan, parse
from pipeplan.runtime.executor.interpreter import Runner
from pipeplan.runtime.executor.rank_program import ProgramStep
from pipeplan.runtime.executor.stage import MiniBatch
from pipeplan.runtime.executor.tensors import Produced, Received
from pipeplan.runtime.launch.job import RankContext
from pipeplan.runtime.profiling.instruments import saved_tensors, storages
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.runtime.training.trainer import Trainer, model_of


def count(job: Mapping[str, Any], context: RankContext) -> None:
    """Report, per case, ``held`` [action] after each of this rank's computing actions: its text and bytes."""
    torch.set_num_threads(1)
    for name, case in job["cases"].items():
        plan, options = parse(case["plan"], Plan), TrainOptions(**case["options"])
        context.progress.board.programs = plan.programs
        trainer = Trainer(plan, model_of(options), options, context.progress)
        found = list[tuple[str, int]]()
        gc.freeze()  # what is there already is no part of a step
        with saved_tensors() as saved:
            runners = {
                index: _Watched(runner, trainer, saved, found) for index, runner in trainer.executor.runners.items()
            }
            trainer.executor.runners = runners
            trainer.step(0)
        trainer.close()
        context.report({"event": "case", "name": name, "held": found})
        dist.barrier()


@dataclass(slots=True)
class _Watched:
    """A stage, after each of whose actions the bytes are ``found`` that the rank's stages keep."""

    runner: Runner
    trainer: Trainer
    saved: Callable[[], list[Tensor]]
    found: list[tuple[str, int]]

    @property
    def idle(self) -> bool:
        return self.runner.idle

    def run(self, step: ProgramStep, inputs: Received, samples: MiniBatch) -> Produced:
        made = self.runner.run(step, inputs, samples)
        gc.collect()
        self.found.append((str(step.action), self._held(samples.tensors.values())))
        return made

    def _held(self, samples: Iterable[Tensor]) -> int:
        """Saved tensors, what has come for forwards, and what waits for W; less the model's own.

        Rows of samples count by themselves.
        """
        stages = self.trainer.stages.values()
        entered = [tensor for stage in stages for held in stage._held.values() for tensor in held.inputs.values()]
        waiting = [tensor for stage in stages for queue in stage._queues.values() for tensor in queue.held]
        kept = [*self.saved(), *entered, *waiting]
        modules = self.trainer.modules.values()
        own = storages(each for module in modules for each in (*module.parameters(), *module.buffers()))
        drawn = storages(samples)
        rows = {
            (each.untyped_storage()._cdata, each.storage_offset()): each.nbytes
            for each in kept
            if each.untyped_storage()._cdata in drawn
        }
        others = {key: size for key, size in storages(kept).items() if key not in own and key not in drawn}
        return sum(others.values()) + sum(rows.values())
