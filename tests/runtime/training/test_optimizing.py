"""Optimizers, learning rates and formats: what the command line asks for is what torch would do."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler

import pipeplan
from builders.chains import chain_plan
from pipeplan.errors import UsageError
from pipeplan.runtime.executor.rank_program import StagePart
from pipeplan.runtime.executor.stage import MiniBatch, StageRunner
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.shapes import output_shapes
from pipeplan.runtime.parallel.device import Autocast
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.runtime.training.trainer import Updater, autocast_of, factor_at
from runtime_support import models as runtime_models
from runtime_support.lone_rank import lone_rank
from runtime_support.plans import model_plan

HERE = "test_optimizing"


def two_rates(parameters: Iterable[nn.Parameter], lr: float = 1.0) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.SGD([{"params": [first], "lr": lr / 2}, {"params": others}], lr=lr)


def halving(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return ExponentialLR(optimizer, 0.5)


RESTS_S = 0.5


class Resting(torch.optim.SGD):
    """Its steps last."""

    def step(self, closure: Any = None) -> Any:
        """Rest, then step."""
        time.sleep(RESTS_S)
        return super().step(closure)


def failing(parameters: object) -> object:
    raise KeyError("weights")


def updated(num_steps: int, **options: Any) -> list[torch.Tensor]:
    """Two parameters after steps along gradients of ones."""
    parameters = [nn.Parameter(torch.zeros(2, dtype=torch.float64)), nn.Parameter(torch.zeros(1, dtype=torch.float64))]
    updater = Updater(parameters, TrainOptions("gpt2-tiny", **options))
    for _ in range(num_steps):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        updater.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize(("name", "class_"), [("adamw", "AdamW"), ("adam", "Adam"), ("sgd", "SGD")])
def test_names_are_torchs_optimizers(name: str, class_: str) -> None:
    parameter = nn.Parameter(torch.ones(1))
    for options, given in [({}, {}), ({"learning_rate": 0.5, "weight_decay": 0.25}, {"lr": 0.5, "weight_decay": 0.25})]:
        made = Updater([parameter], TrainOptions("gpt2-tiny", optimizer=name, **options)).optimizer
        expected = getattr(torch.optim, class_)([parameter], **given)
        assert type(made) is type(expected)
        assert {k: v for k, v in made.param_groups[0].items() if k != "initial_lr"} == expected.param_groups[0]


def test_factories() -> None:
    first, second = updated(2, optimizer=f"{HERE}:two_rates", learning_rate=3.0, lr_schedule=f"{HERE}:halving")
    assert first.tolist() == [-(1.5 + 0.75)] * 2
    assert second.tolist() == [-(3.0 + 1.5)]


def test_an_iteration_ends_with_the_last_update() -> None:
    plan = model_plan(load_model("gpt2-tiny"), [0], num_microbatches=2)
    with lone_rank():
        found = pipeplan.run(plan, "gpt2-tiny", steps=1, optimizer=f"{HERE}:Resting")
    (step,) = found.result.steps
    assert step.iteration_ns > step.update_ns >= RESTS_S * 1e9


def test_a_rank_without_parameters_has_nothing_to_step() -> None:
    updater = Updater([], TrainOptions("gpt2-tiny", optimizer=f"{HERE}:failing"))
    updater.step()
    assert updater.optimizer is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"optimizer": "adamww"}, "--optimizer 'adamww' cannot be imported"),
        ({"optimizer": f"{HERE}:failing"}, "--optimizer .*: the factory failed: KeyError: 'weights'"),
        ({"optimizer": f"{HERE}:failing", "learning_rate": 1.0}, "TypeError: .* unexpected keyword argument 'lr'"),
        ({"optimizer": "builtins:list"}, "returned list, not a torch.optim.Optimizer"),
        ({"lr_schedule": f"{HERE}:nothing"}, "--lr-schedule .* cannot be imported: AttributeError"),
        ({"lr_schedule": "builtins:id"}, "returned int, not a torch.optim LRScheduler"),
        ({"lr_schedule": f"{HERE}:halving", "warmup_steps": 2}, "--warmup-steps 2: --lr-schedule .* of its own"),
    ],
)
def test_refusals(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        updated(1, **options)


def test_learning_rates_step_by_step() -> None:
    rates = {"lr": 1.0, "weight_decay": 0.0}
    options = {"learning_rate": rates["lr"], "weight_decay": 0.0, "optimizer": "sgd", "warmup_steps": 2, "lr_steps": 6}
    for shape, expected in {
        "constant": [0.5, 1, 1, 1, 1, 1],
        "linear": [0.5, 1, 1, 0.75, 0.5, 0.25],
        "cosine": [0.5, 1, 1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2],
    }.items():
        places = [-float(updated(n, lr_schedule=shape, **options)[1]) for n in range(7)]
        assert [b - a for a, b in zip(places, places[1:], strict=False)] == pytest.approx(expected)


def test_factors_stay_between_nothing_and_all() -> None:
    for shape in ("constant", "linear", "cosine"):
        for num_warmup, num_steps in [(0, 1), (3, 3), (5, 2), (0, 7)]:
            factors = [factor_at(shape, num_warmup, num_steps, step) for step in range(12)]
            assert all(0 <= factor <= 1 for factor in factors)
            assert factors[num_warmup] == 1, "the learning rate itself, behind the warmup"
            assert all(factor > 0 for factor in factors[:num_steps]), "no step of the run is idle"


def test_autocast_is_for_float32() -> None:
    assert autocast_of(TrainOptions("gpt2-tiny")) is None
    assert autocast_of(TrainOptions("gpt2-tiny", precision="bf16-autocast")) == Autocast("cpu", torch.bfloat16)
    with pytest.raises(UsageError, match="bf16-autocast trains parameters in float32; leave --dtype float64"):
        TrainOptions("gpt2-tiny", precision="bf16-autocast", dtype="float64").by_plan(chain_plan(2, 2))


@pytest.mark.parametrize("name", ["gpt2-tiny", "mmt-tiny", "branches"])
@pytest.mark.parametrize("recompute", [False, True])
def test_what_autocast_makes_is_known_before(name: str, recompute: bool) -> None:
    """Stages run one block each; gradients come in the format of what was sent, those of parameters in float32."""
    model = runtime_models.branches() if name == "branches" else load_model(name)
    autocast = Autocast("cpu", torch.bfloat16)
    specs = output_shapes(model, 2, torch.float32, autocast)
    assert set(specs) == {block.id for block in model.blocks}
    batch = model.mini_batch(2, 0, 0)
    values: dict[str, torch.Tensor] = {}
    for block in model.blocks:
        module = model.build(block.id, 0)
        sources = {source: (source,) for source, _ in block.inputs}
        numbers = {source: index for index, source in enumerate(sources)}
        ends = {} if block.loss else {99: (block.id,)}
        part = StagePart(
            100,
            (block.id,),
            (recompute,),
            False,
            {numbers[source]: names for source, names in sources.items()},
            ends,
            frozenset(numbers.values()),
            frozenset(ends),
        )
        stage = StageRunner(part, {block.id: module}, {block.id: block}, autocast)
        made = stage.forward((0, 1), {source: values[source] for source in sources}, MiniBatch(batch, 1))
        for output in made.values():
            assert (tuple(output.shape), output.dtype) == specs[block.id]
        given = [(block.id, torch.ones_like(output)) for output in made.values()]
        back = stage.backward(0, {(0, 1): given})[0, 1]
        assert {source: gradient.dtype for source, gradient in back.items()} == {s: specs[s][1] for s in sources}
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())
        loss = stage.take_loss()
        assert loss is None or loss.dtype == torch.float32
        values |= made
    formats = {dtype for _, dtype in specs.values()}
    assert formats == ({torch.float32, torch.bfloat16} if name == "branches" else {torch.float32})
