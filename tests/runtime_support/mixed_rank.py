"""A rank of the tests of mixed precision: trains beside ``fully_shard`` with torch's own mixed precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from pipeplan.files import Plan, parse
from pipeplan.runtime.launch.__main__ import main
from pipeplan.runtime.launch.job import RankContext
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.runtime.training.trainer import Trainer, dtype_of, model_of
from runtime_support.known import known_once
from runtime_support.plans import Unsplit

SCALE = 2.0**16


class OfTorch:
    """All blocks in one process, each under ``fully_shard`` of a group of one, micro-batches one after another."""

    def __init__(self, model: Model, options: TrainOptions, mesh: DeviceMesh) -> None:
        self.model, self.options, self.dtype = model, options, dtype_of(options)
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        self.modules: dict[str, Any] = {block.id: model.build(block.id, options.seed) for block in model.blocks}
        for module in self.modules.values():
            fully_shard(module, mesh=mesh, mp_policy=policy)
        own = [each for module in self.modules.values() for each in module.parameters()]
        self.optimizer = torch.optim.AdamW(own, lr=options.learning_rate or 0.0, weight_decay=0.1)

    def step(self, step: int, num_samples: int, size: int) -> float:
        """The loss of a mini-batch in micro-batches of a size; gradients add up in float32."""
        batch = self.model.mini_batch(num_samples, step, self.options.seed, dtype=self.dtype)
        count, total = self.model.predictions(batch), 0.0
        self.optimizer.zero_grad()
        for begin in range(0, num_samples, size):
            values: dict[str, Tensor] = {}
            for block in self.model.blocks:
                inputs = [values[source] for source, _ in block.inputs]
                inputs += [batch[name][begin : begin + size] for name in block.samples]
                values[block.id] = self.modules[block.id](*inputs)
            loss = torch.stack([values[block.id].float() for block in self.model.blocks if block.loss]).sum() / count
            (loss * SCALE).backward()  # type: ignore[no-untyped-call]  # torch has it without types
            total += float(loss.detach())
        for each in self.parameters().values():
            assert isinstance(each.grad, DTensor)
            each.grad._local_tensor.div_(SCALE)
        self.optimizer.step()
        return total

    def parameters(self) -> dict[str, nn.Parameter]:
        """As ``block.name``."""
        return {
            f"{id_}.{name}": each for id_, module in self.modules.items() for name, each in module.named_parameters()
        }


def compare(job: Mapping[str, Any], context: RankContext) -> None:
    """Report losses of both, and how far this rank's master copies are from torch's parameters after all steps."""
    torch.set_num_threads(1)
    ranks = DeviceMesh("cpu", torch.arange(4).reshape(4, 1), mesh_dim_names=("ranks", "alone"))
    with known_once():
        for name, case in job["cases"].items():
            plan, options = parse(case["plan"], Plan), TrainOptions(**case["options"])
            context.progress.board.programs = plan.programs
            told = (gradients_of_both if "shards" in name else train_both)(name, plan, options, context, ranks["alone"])
            context.report({"event": "case", "name": name, **told})
            dist.barrier()


def train_both(name: str, plan: Plan, options: TrainOptions, context: RankContext, mesh: DeviceMesh) -> dict[str, Any]:
    """Where gradients are to overflow first, that step leaves everything as it was."""
    model = model_of(options)
    trainer = Trainer(plan, model, options, context.progress)
    theirs = OfTorch(model, trainer.options, mesh)
    size = plan.microbatch_size // max(stage.replicas for stage in plan.stages)
    losses, others, gradients = [], [], list[int]()

    def watched(reduce: Callable[[], None]) -> None:
        gradients.append(_bytes(each.grad for each in _all_of(trainer)))
        reduce()
        gradients.append(_bytes(each.grad for each in _all_of(trainer)))

    once = [unit for unit in trainer.sharded.units if unit.level == 1]
    for each in (trainer.sharded, *once):
        each.reduce = partial(watched, each.reduce)  # type: ignore[method-assign]
    if name.startswith("overflow"):
        assert trainer.scale is not None
        trainer.scale.value = 2.0**40
        trainer.step(0)
        assert trainer.scale.value == 2.0**39
        trainer.scale.value = SCALE
    first = trainer.resume()
    for step in range(options.num_steps):
        losses += [trainer.step(step)[0].loss] if step >= first else []
        others += [theirs.step(step, plan.mini_batch, size)][: step >= first]
    if options.checkpoint is not None:
        trainer.save()
    if options.export_weights is not None:
        assert not trainer.write_weights(options.export_weights)
    expected, distance, formats = theirs.parameters(), 0.0, set[str]()
    for share, module in trainer.modules.items():
        for own_name, parameter in module.named_parameters():
            own = trainer.sharded.own(parameter)
            whole = expected[f"{share.block}.{own_name}"]
            assert isinstance(whole, DTensor)
            found = trainer.sharded.rows.get(id(parameter))
            rows = slice(None) if found is None else slice(found.begin, found.begin + len(own))
            apart = trainer.masters.of(own).detach() - whole._local_tensor[rows].detach()
            distance = max(distance, float(apart.abs().max()))
            formats |= {str(parameter.dtype), str(own.grad_dtype)}
    held = _held(trainer, max([*gradients, 0]))
    trainer.close()
    return {
        "losses": losses,
        "others": others,
        "distance": distance,
        "formats": sorted(formats),
        "held": held,
    }


def gradients_of_both(
    name: str, plan: Plan, options: TrainOptions, context: RankContext, mesh: DeviceMesh
) -> dict[str, Any]:
    """Losses of both, and how far gradients of the first step are from those in float64, of the whole model."""
    model = model_of(options)
    trainer = Trainer(plan, model, options, context.progress)
    theirs = OfTorch(model, trainer.options, mesh)
    exact = Unsplit(model, replace(options, dtype="float64", precision=None))
    size = plan.microbatch_size // max(stage.replicas for stage in plan.stages)
    losses = [trainer.step(0, update=False)[0].loss]
    others = [theirs.step(0, plan.mini_batch, size)]
    exact.step(0, plan.mini_batch)
    others_own, wholes = theirs.parameters(), exact.parameters()
    counted = {id(each) for each in trainer.shared.counted(trainer.unique_parameters())}
    errors = [0.0, 0.0]
    for share, module in trainer.modules.items():
        for own_name, parameter in module.named_parameters():
            own, part = trainer.sharded.own(parameter), model.part_of(share, own_name)
            found, key = trainer.sharded.rows.get(id(parameter)), f"{share.block}.{own_name}"
            gradient, whole = others_own[key].grad, wholes[key].grad
            mine = trainer.masters.of(own).grad
            if id(own) not in counted or mine is None:
                continue
            assert isinstance(gradient, DTensor)
            assert whole is not None
            counted.discard(id(own))
            rows = slice(None) if found is None else slice(found.begin, found.begin + len(own))
            expected = part.within(whole)[rows]
            for number, each in enumerate((mine, part.within(gradient._local_tensor)[rows])):
                errors[number] += float((each.double() - expected).square().sum())
    norms = [math.sqrt(trainer.all_ranks.sum(each)) for each in errors]
    for step in (0, 1, 2):
        losses.append(trainer.step(step)[0].loss)
        others += [theirs.step(step, plan.mini_batch, size)] if step else []
    held = _held(trainer, 0)
    trainer.close()
    return {"losses": losses[1:], "others": others, "errors": norms, "norm": exact.norm, "held": held}


def _all_of(trainer: Trainer) -> list[nn.Parameter]:
    return [*trainer.parameters().values(), *trainer.unique_parameters()]


def _held(trainer: Trainer, gradients: int) -> dict[str, int]:
    """Bytes of what is kept between steps; of gradients the most before and after they are reduced."""
    assert trainer.updater.optimizer is not None
    states = trainer.updater.optimizer.state.values()
    return {
        "parameter_bytes": _bytes(_all_of(trainer)),
        "gradient_bytes": gradients,
        "master_bytes": _bytes(trainer.stepped()),
        "optimizer_bytes": _bytes(each for state in states for each in state.values() if each.dim()),
    }


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    """Of their storages, each once."""
    storages = (each.untyped_storage() for each in tensors if each is not None)
    return sum({each.data_ptr(): each.nbytes() for each in storages if each.nbytes()}.values())


if __name__ == "__main__":
    main()
