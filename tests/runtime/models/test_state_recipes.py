"""What recipes say of Hugging Face's models, and the tensors that a plain torch loop has of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from transformers.pytorch_utils import Conv1D

from pipeplan.costs.inspection import kept_state
from pipeplan.costs.recipes import RECIPES, checked_recipe, with_recipe
from pipeplan.files import CostRow, Profile, Recipe, Source
from pipeplan.runtime.models.huggingface import LoadedModel, load
from pipeplan.runtime.profiling.build_profile import block_graph_of, profile_of
from pipeplan.workload.kinds import GRADIENTS, MASTER, OPTIMIZER, PARAMETERS, MemoryBytes
from runtime_support.hugging_face import SEQUENCE, captured, text

SIX = ("gpt2", "llama", "mixtral", "bert", "t5", "clip")


@dataclass(frozen=True, slots=True)
class Loop:
    """A training loop as people write it: formats of parameters and of the sums of gradients, and what is beside them.

    Where gradients add up in the parameters' own format, autograd adds them up; else the loop does, as Megatron-LM.
    """

    parameters: torch.dtype
    sums: torch.dtype
    master: bool = False
    autocast: bool = False
    scale: float = 1.0
    rounds: bool = False


LOOPS = {
    "fp32": Loop(torch.float32, torch.float32),
    "bf16": Loop(torch.bfloat16, torch.bfloat16),
    "bf16-mixed": Loop(torch.bfloat16, torch.float32, master=True),
    "bf16-autocast": Loop(torch.float32, torch.float32, autocast=True),
    "fp16-mixed": Loop(torch.float16, torch.float16, master=True, scale=8.0),
    "fp8-mixed": Loop(torch.bfloat16, torch.float32, master=True, rounds=True),
}
SUMS = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter]], Optimizer]] = {
    "adamw": lambda parameters: AdamW(parameters, lr=0.01),
    "momentum": lambda parameters: SGD(parameters, lr=0.01, momentum=0.9),
    "sgd": lambda parameters: SGD(parameters, lr=0.01),
}


class InEightBits(torch.autograd.Function):
    """What goes into a layer's product, and the gradient of it, rounded to FP8 and back, which CPUs can multiply."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.to(torch.float8_e4m3fn).to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].to(torch.float8_e5m2).to(gradients[0].dtype)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of every memory once, which several tensors may share."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def held(found: LoadedModel, recipe: Recipe) -> MemoryBytes:
    """Bytes of the tensors that are there after a step of two micro-batches, from forward to the optimizer's step."""
    loop = LOOPS[recipe.name]
    if recipe.gradient_dtype is not None:
        loop = replace(loop, sums=SUMS[recipe.gradient_dtype])
    module = deepcopy(found.module).to(loop.parameters).train()
    parameters = list(module.parameters())
    before = [each.detach().float().clone() for each in parameters]
    sums = sums_of(parameters, loop.sums)
    if loop.rounds:
        for layer in module.modules():
            if isinstance(layer, (nn.Linear, Conv1D)):
                layer.register_forward_pre_hook(lambda _, inputs: (InEightBits.apply(inputs[0]), *inputs[1:]))
    updated = [nn.Parameter(each.detach().float()) for each in parameters] if loop.master else parameters
    optimizer = OPTIMIZERS[recipe.optimizer](updated)

    for first_sample in (0, 2):
        batch = found.batch(2, 0, first_sample)
        batch = {key: each.to(loop.parameters) if each.is_floating_point() else each for key, each in batch.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=loop.autocast):
            loss = module(**batch)
        (loss * loop.scale).backward()

    gradients = sums or [each.grad for each in parameters if each.grad is not None]
    assert len(gradients) == len(parameters)
    assert all(each.dtype == loop.sums for each in gradients)
    if updated[0].grad is None:
        for each, gradient in zip(updated, gradients, strict=True):
            each.grad = gradient.to(each.dtype) / loop.scale
    optimizer.step()
    if loop.master:
        with torch.no_grad():
            for copy, each in zip(parameters, updated, strict=True):
                copy.copy_(each)
    if gradients[0] is not updated[0].grad:
        optimizer.zero_grad()  # what the step took
    changed = [not torch.equal(old, new.float()) for old, new in zip(before, updated, strict=True)]
    assert loss.isfinite()
    assert all(each.isfinite().all() for each in parameters)
    assert sum(changed) > len(changed) / 2

    state = [
        value
        for each in optimizer.state.values()
        for key, value in each.items()
        if key != "step" and value is not None  # beside the count of steps
    ]
    left = [each.grad for each in (*parameters, *updated) if each.grad is not None]
    return MemoryBytes(
        {
            PARAMETERS: 0 if loop.autocast else bytes_of(parameters),  # the casts are gone after each use
            GRADIENTS: bytes_of([*gradients, *left]),
            MASTER: bytes_of(updated) if loop.master or loop.autocast else 0,
            OPTIMIZER: bytes_of(state),
        }
    )


def sums_of(parameters: Sequence[nn.Parameter], format_: torch.dtype) -> list[Tensor]:
    """Sums in a format that is not the parameters', to which every gradient is added at once; none if it is theirs."""
    if parameters[0].dtype == format_:
        return []
    sums = [torch.zeros_like(each, dtype=format_) for each in parameters]
    of = {id(each): total for each, total in zip(parameters, sums, strict=True)}

    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        of[id(parameter)].add_(parameter.grad)
        parameter.grad = None

    for each in parameters:
        each.register_post_accumulate_grad_hook(add)
    return sums


SLOW, LONG = [pytest.mark.slow], [pytest.mark.slow, pytest.mark.long]
MARKS = {"mixtral": SLOW, "t5": SLOW, "bert": LONG, "clip": LONG}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=MARKS.get(name, ())) for name in SIX])
def loaded(request: pytest.FixtureRequest) -> tuple[Profile, LoadedModel]:
    """A model's profile without times, and the module as transformers makes it."""
    model = captured(request.param, "half")
    graph = block_graph_of(model, torch.float32)
    rows = {block.spec.id: [CostRow(microbatch_size=1, forward_ns=1, backward_ns=2)] for block in graph.blocks}
    profile = profile_of(model, graph, rows, Source(method="estimated", dtype="float32"), Recipe(name="fp32"))
    return profile, load(text(request.param), sequence=SEQUENCE)


@pytest.mark.parametrize("name", RECIPES)
def test_state_is_that_of_a_plain_loop(name: str, loaded: tuple[Profile, LoadedModel]) -> None:
    """With every optimizer, and gradients in each format that the recipe may have."""
    profile, found = loaded
    for recipe in (
        checked_recipe(name),
        checked_recipe(name, optimizer="momentum"),
        checked_recipe(name, optimizer="sgd"),
        checked_recipe(name, gradient_dtype="fp32"),
    ):
        assert kept_state(with_recipe(profile, recipe)) == held(found, recipe), recipe


@pytest.mark.parametrize("name", RECIPES)
def test_frozen_parameters_are_only_held(name: str, loaded: tuple[Profile, LoadedModel]) -> None:
    """A whole model that is frozen, as a tower may be, has nothing to train."""
    profile, found = loaded
    frozen = profile.model_copy(
        update={
            "blocks": tuple(
                each.model_copy(update={"parameters": 0, "frozen_parameters": each.parameters})
                for each in profile.blocks
            ),
            "tied": (),
        }
    )
    again = sum(each.parameters * (len(each.blocks) - 1) for each in profile.tied)
    numbers = sum(each.numel() for each in found.module.parameters()) + again
    state = kept_state(with_recipe(frozen, checked_recipe(name)))
    width = {"fp32": 4, "bf16-autocast": 4}.get(name, 2)
    assert state == MemoryBytes({PARAMETERS: width * numbers})
