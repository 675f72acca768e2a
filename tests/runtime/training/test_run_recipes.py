"""By which recipe a run trains: the plan's, or what its own flags say; what it cannot follow is refused by name."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from builders.chains import chain_plan
from pipeplan.cli.run_verb import run_command
from pipeplan.errors import UsageError
from pipeplan.files import Plan, Recipe
from pipeplan.runtime.training.options import RUNNABLE, TrainOptions
from pipeplan.runtime.training.trainer import Updater


def plan_by(recipe: Recipe | None) -> Plan:
    return chain_plan(2, 2).model_copy(update={"recipe": recipe})


@pytest.mark.parametrize(
    ("recipe", "asked", "found"),
    [
        (None, {}, ("float32", None, "adamw")),
        (Recipe(), {}, ("float32", None, "adamw")),
        (Recipe(name="bf16", optimizer="sgd"), {}, ("bfloat16", None, "sgd")),
        (Recipe(name="bf16-autocast", optimizer="momentum"), {}, ("float32", "bfloat16", "momentum")),
        (Recipe(name="bf16-mixed"), {"precision": "bf16-autocast"}, ("float32", "bfloat16", "adamw")),
        (Recipe(name="fp16-mixed"), {"dtype": "float64"}, ("float64", None, "adamw")),
        (Recipe(name="fp32", optimizer="sgd"), {"optimizer": "adam"}, ("float32", None, "adam")),
    ],
)
def test_what_the_flags_leave_open_is_the_plans(
    recipe: Recipe | None, asked: dict[str, str], found: tuple[str, str | None, str]
) -> None:
    options = TrainOptions("gpt2-tiny", **asked).by_plan(plan_by(recipe))
    assert (options.dtype, options.autocast, options.optimizer) == found
    assert options.by_plan(plan_by(Recipe(name="fp8-mixed"))) == options, "it says all"


@pytest.mark.parametrize("name", ["bf16-mixed", "fp16-mixed", "fp8-mixed"])
def test_a_recipe_that_no_run_can_follow_is_refused_by_name(name: str) -> None:
    message = f"the plan was made for the recipe {name}: .* cannot train with {name} yet; give --precision fp32,"
    with pytest.raises(UsageError, match=message):
        TrainOptions("gpt2-tiny").by_plan(plan_by(Recipe(name=name)))
    with pytest.raises(UsageError, match=f"--precision {name}: run keeps no master weights"):
        TrainOptions("gpt2-tiny", precision=name).by_plan(plan_by(None))


def test_gradients_in_another_format_are_refused() -> None:
    with pytest.raises(UsageError, match="made for the recipe bf16-autocast, gradients in bf16"):
        TrainOptions("gpt2-tiny").by_plan(plan_by(Recipe(name="bf16-autocast", gradient_dtype="bf16")))


def test_autocast_is_a_spelling_of_a_recipe() -> None:
    asked = ["plan.json", "--model", "gpt2-tiny", "--local", "--autocast", "bfloat16", "--precision", "bf16"]
    result = CliRunner().invoke(run_command, asked)
    assert isinstance(result.exception, UsageError)
    assert "--autocast is --precision bf16-autocast; leave it or --precision bf16 out" in str(result.exception)


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_run_keeps_what_its_recipe_says(name: str) -> None:
    """Of AdamW's tensors; parameters and gradients are torch's own."""
    options = TrainOptions("gpt2-tiny", precision=name).by_plan(plan_by(None))
    weight = torch.nn.Parameter(torch.ones(8, dtype=getattr(torch, options.number_format)))
    weight.grad = torch.ones_like(weight)
    updater = Updater([weight], options)
    updater.step()
    assert updater.optimizer is not None
    (state,) = updater.optimizer.state.values()
    expected = {"fp32": 16, "bf16": 8, "bf16-autocast": 16}[name]
    kept = sum(each.nbytes for key, each in state.items() if key != "step") + weight.nbytes + weight.grad.nbytes
    assert kept == 8 * expected


def test_momentum_is_kept() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    updater = Updater([weight], TrainOptions("gpt2-tiny", optimizer="momentum").by_plan(plan_by(None)))
    updater.step()
    assert updater.optimizer is not None
    (state,) = updater.optimizer.state.values()
    assert state["momentum_buffer"].nbytes == 12
