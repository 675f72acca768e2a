"""What recipes say of Hugging Face's models, and the tensors that a plain torch loop has of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from pipeplan.costs.inspection import kept_state
from pipeplan.costs.recipes import RECIPES, checked_recipe, computing_dtype, with_recipe
from pipeplan.files import CostRow, Profile, Recipe, Source
from pipeplan.runtime.models.huggingface import load
from pipeplan.runtime.profiling.build_profile import block_graph_of, profile_of
from pipeplan.workload.kinds import GRADIENTS, MASTER, OPTIMIZER, PARAMETERS, MemoryBytes
from runtime_support.hugging_face import SEQUENCE, captured, text

SIX = ("gpt2", "llama", "mixtral", "bert", "t5", "clip")


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def own(module: nn.Module) -> list[nn.Parameter]:
    """Parameters, each once where modules share it."""
    return list(module.parameters())


def held(parameters: Sequence[nn.Parameter], recipe: Recipe) -> MemoryBytes:
    """Bytes of the tensors of a plain loop after a step: it trains by hand what torch has no name for.

    Mixed recipes add gradients up beside parameters, and update float32 copies; under autocast the parameters
    themselves are float32, and the copies that compute are gone after each use.
    """
    trained = [each for each in parameters if each.requires_grad]
    format_: torch.dtype = getattr(torch, computing_dtype(recipe) or "")
    if recipe.name == "bf16-autocast":
        format_ = torch.float32
    compute = [each.detach().to(format_) for each in parameters]
    learned = [copy for copy, each in zip(compute, parameters, strict=True) if each.requires_grad]
    adds_in = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: format_}
    sums = {"bf16-mixed": torch.float32, "fp8-mixed": torch.float32}.get(recipe.name, format_)
    kind = sums if recipe.gradient_dtype is None else adds_in[recipe.gradient_dtype]
    gradients = [torch.ones_like(each, dtype=kind) for each in learned]
    mixed = recipe.name.endswith("-mixed")
    updated = [nn.Parameter(each.float() if mixed else each) for each in learned]
    optimizers: dict[str, Optimizer] = {
        "adamw": AdamW(updated),
        "momentum": SGD(updated, lr=0.1, momentum=0.9),
        "sgd": SGD(updated, lr=0.1),
    }
    chosen = optimizers[recipe.optimizer]
    for parameter, gradient in zip(updated, gradients, strict=True):
        parameter.grad = gradient.to(parameter.dtype)
    chosen.step()
    state = [
        value for each in chosen.state.values() for key, value in each.items() if key != "step" and value is not None
    ]
    kept = {
        PARAMETERS: bytes_of(compute),
        GRADIENTS: bytes_of(gradients),
        MASTER: bytes_of(updated) if mixed else 0,
        OPTIMIZER: bytes_of(state),  # beside the count of steps
    }
    if recipe.name == "bf16-autocast":  # what is there of trained parameters is what is updated
        kept[MASTER] = bytes_of(learned)
        kept[PARAMETERS] -= kept[MASTER]
    assert len(trained) == len(gradients)
    return MemoryBytes(kept)


@pytest.fixture(scope="module", params=SIX)
def loaded(request: pytest.FixtureRequest) -> tuple[Profile, list[nn.Parameter]]:
    """A model's profile without times, and the parameters of its module as transformers makes it."""
    model = captured(request.param, "half")
    graph = block_graph_of(model, torch.float32)
    rows = {block.spec.id: [CostRow(microbatch_size=1, forward_ns=1, backward_ns=2)] for block in graph.blocks}
    profile = profile_of(model, graph, rows, Source(method="estimated", dtype="float32"), Recipe(name="fp32"))
    return profile, own(load(text(request.param), sequence=SEQUENCE).module)


@pytest.mark.parametrize("name", RECIPES)
def test_state_is_that_of_a_plain_loop(name: str, loaded: tuple[Profile, list[nn.Parameter]]) -> None:
    """With every optimizer, and gradients in each format that the recipe may have."""
    profile, parameters = loaded
    for recipe in (
        checked_recipe(name),
        checked_recipe(name, optimizer="momentum"),
        checked_recipe(name, optimizer="sgd"),
        checked_recipe(name, gradient_dtype="fp32"),
    ):
        assert kept_state(with_recipe(profile, recipe)) == held(parameters, recipe), recipe


@pytest.mark.parametrize("name", RECIPES)
def test_frozen_parameters_are_only_held(name: str, loaded: tuple[Profile, list[nn.Parameter]]) -> None:
    """A whole model that is frozen, as a tower may be, has nothing to train."""
    profile, parameters = loaded
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
    numbers = sum(each.numel() for each in parameters) + again
    state = kept_state(with_recipe(frozen, checked_recipe(name)))
    width = {"fp32": 4, "bf16-autocast": 4}.get(name, 2)
    assert state == MemoryBytes({PARAMETERS: width * numbers})
