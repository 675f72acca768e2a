"""A rank that replays a plan with the executor alone: what it must not need cannot be imported."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.files import Plan, parse
from runtime_support import rooms

COMMAND = (sys.executable, __file__)
WIDTH, SEED = 5, 3
CPU = torch.device("cpu")
NEEDLESS = {"training", "profiling", "models"}


class Blocker(MetaPathFinder):
    """Finds no module of the rooms that replaying must do without."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Nothing, or an error."""
        needless = fullname.startswith(f"{rooms.RUNTIME}.") and rooms.room_of(fullname) in NEEDLESS
        if needless and not f"{rooms.SPEC}.".startswith(f"{fullname}."):
            raise ModuleNotFoundError(f"{fullname} is not for replaying a plan")
        return None


class End(nn.Module):
    """The sum of the squared distances from targets."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs - targets) ** 2).sum()


def chain() -> Any:
    """Three linear layers, of which the first and the last share their weight, and a loss."""
    from pipeplan.runtime.models.spec import BlockSpec, Model

    def batch(num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
        values = torch.arange(num_samples * WIDTH, dtype=torch.float64).reshape(num_samples, WIDTH)
        return {"x": torch.sin(values + step), "targets": torch.cos(values + seed)}

    linear = partial(nn.Linear, WIDTH, WIDTH)
    blocks = (
        BlockSpec("b0", "linear", linear, samples=("x",)),
        BlockSpec("b1", "linear", linear, ("b0",)),
        BlockSpec("b2", "linear", linear, ("b1",)),
        BlockSpec("end", "loss", End, ("b2",), ("targets",), loss=True),
    )
    tied = ((("b0", "weight"), ("b2", "weight")),)
    return Model("chain", blocks, batch, lambda made: made["targets"].numel(), tied)


def replay(job: Mapping[str, Any], context: Any) -> None:
    """Run the plan's program on one mini-batch, and report how far gradients are from those of an unsplit run."""
    from pipeplan.runtime.executor.channels import Channels
    from pipeplan.runtime.executor.interpreter import Executor
    from pipeplan.runtime.executor.process_groups import AllRanks, ProcessGroups
    from pipeplan.runtime.executor.rank_program import programs_of
    from pipeplan.runtime.executor.shared_parameters import SharedParameters
    from pipeplan.runtime.executor.stage import MiniBatch, StageRunner
    from pipeplan.runtime.executor.tensors import StageLayouts, TensorSpec

    plan, model, timeout = parse(job["plan"], Plan), chain(), timedelta(seconds=60)
    program = programs_of(plan, [block.id for block in model.blocks], model.edges, model.name)[context.rank]
    context.progress.board.programs = plan.programs
    groups, all_ranks = ProcessGroups(program.lines, context.progress), AllRanks(CPU, context.progress, timeout)
    modules = {
        share: model.build_share(share, SEED, groups.shards(share), dtype=torch.float64)
        for share in dict.fromkeys(share for part in program.stages.values() for share in part.shares)
    }
    groups.connect("gloo", timeout)
    shared = SharedParameters(model, program.holders, modules, context.rank, "gloo", timeout)
    specs = {name: TensorSpec((1, WIDTH), torch.float64) for names in program.tensors.values() for name in names}
    stages = {
        index: StageRunner(
            part,
            {share.block: modules[share] for share in part.shares},
            {block: model.block(block) for block in part.blocks},
            layouts=StageLayouts.of(part, model, groups.along),
        )
        for index, part in program.stages.items()
    }
    channels = Channels(program, specs, CPU, "gloo", timeout)
    executor = Executor(program, stages, channels, specs, context.progress, all_ranks.clock)
    batch = model.mini_batch(plan.mini_batch, 0, SEED, dtype=torch.float64)
    executor.run(MiniBatch(batch, model.predictions(batch)))
    shared.sum_gradients()
    own = {f"{share}.{name}": each for share, module in modules.items() for name, each in module.named_parameters()}
    expected_loss, expected = unsplit(model, batch)
    distances = [float((each.grad - expected[name]).abs().max()) for name, each in own.items()]
    losses = [loss for loss in (stage.take_loss() for stage in stages.values()) if loss is not None]
    context.report(
        {
            "event": "replayed",
            "distance": max(distances),
            "num_gradients": len(distances),
            "loss": float(sum(losses)),
            "expected_loss": expected_loss,
        }
    )
    for made in (channels, shared, groups, all_ranks):
        made.close()


def unsplit(model: Any, batch: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The loss and all gradients of the whole mini-batch in this process, by torch's own backward."""
    modules = {block.id: model.build(block.id, SEED, dtype=torch.float64) for block in model.blocks}
    modules["b2"].weight = modules["b0"].weight
    values: dict[str, Tensor] = {}
    for block in model.blocks:
        inputs = [values[source] for source in block.sources] + [batch[name] for name in block.samples]
        values[block.id] = modules[block.id](*inputs)
    loss = values["end"] / model.predictions(batch)
    loss.backward()
    gradients = {
        f"{id_}.{name}": parameter.grad
        for id_, module in modules.items()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    return float(loss), gradients


if __name__ == "__main__":
    sys.meta_path.insert(0, Blocker())
    from pipeplan.runtime.launch.__main__ import main

    main()
