"""By which recipe a run trains: the plan's, or what its own flags say; what it cannot follow is refused by name."""

from __future__ import annotations

import re

import pytest
import torch
from click.testing import CliRunner

import pipeplan
from builders.chains import chain_plan
from pipeplan.cli.run_verb import run_command
from pipeplan.costs.recipes import bytes_per_parameter, checked_recipe
from pipeplan.errors import UsageError
from pipeplan.files import Plan, Recipe
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.training.compatibility import warning_of_format
from pipeplan.runtime.training.master_copies import MasterCopies
from pipeplan.runtime.training.options import RUNNABLE, TrainOptions
from pipeplan.runtime.training.trainer import Updater
from runtime_support.lone_rank import lone_rank
from runtime_support.plans import model_plan


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
        (Recipe(name="bf16-mixed", optimizer="sgd"), {}, ("bfloat16", None, "sgd")),
        (Recipe(name="fp16-mixed"), {}, ("float16", None, "adamw")),
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


def test_a_recipe_that_no_run_can_follow_is_refused_by_name() -> None:
    message = "the plan was made for the recipe fp8-mixed: .* cannot train with fp8-mixed yet; give --precision fp32,"
    with pytest.raises(UsageError, match=message):
        TrainOptions("gpt2-tiny").by_plan(plan_by(Recipe(name="fp8-mixed")))
    with pytest.raises(UsageError, match="--precision fp8-mixed: run has no products in FP8"):
        TrainOptions("gpt2-tiny", precision="fp8-mixed").by_plan(plan_by(None))


@pytest.mark.parametrize(
    ("recipe", "asked", "found"),
    [
        (Recipe(name="bf16-mixed"), {}, "float32"),
        (Recipe(name="bf16-mixed", gradient_dtype="bf16"), {}, "bfloat16"),
        (Recipe(name="fp16-mixed"), {}, "float16"),
        (Recipe(name="fp16-mixed", gradient_dtype="fp32"), {}, "float32"),
        (Recipe(name="bf16-mixed", gradient_dtype="bf16"), {"precision": "fp16-mixed"}, "float32"),
        (Recipe(name="bf16"), {"precision": "bf16-mixed"}, "float32"),
        (Recipe(name="bf16-mixed"), {"dtype": "float64"}, None),
        (None, {"precision": "bf16-mixed"}, "float32"),
        (None, {"precision": "fp16-mixed"}, "float32"),
    ],
)
def test_gradients_add_up_as_the_recipe_says(recipe: Recipe | None, asked: dict[str, str], found: str | None) -> None:
    assert TrainOptions("gpt2-tiny", **asked).by_plan(plan_by(recipe)).gradients == found


@pytest.mark.parametrize(
    ("recipe", "asked", "told"),
    [
        ("bf16-mixed", {}, None),
        (
            "bf16-mixed",
            {"dtype": "float64"},
            "for the recipe bf16-mixed and the run is in float64: .*leave --dtype out",
        ),
        ("bf16-mixed", {"dtype": "bfloat16"}, "for the recipe bf16-mixed and the run is in bfloat16: .*memory"),
        ("bf16-mixed", {"precision": "bf16-autocast"}, "the run is in bf16-autocast: .*leave --precision out"),
        ("fp16-mixed", {"dtype": "float32"}, "the run is in float32"),
        ("fp32", {"precision": "bf16-mixed"}, "for the recipe fp32 and the run is in bf16-mixed"),
        ("fp32", {}, None),
        (
            "fp32",
            {"dtype": "float64"},
            "the recipe fp32 and the run is in float64: parameters are in float64 instead",
        ),
        (
            "fp32",
            {"precision": "bf16-autocast"},
            "in bf16-autocast: activations and messages are in bfloat16 instead of float32, .*leave --precision",
        ),
        ("bf16-autocast", {}, None),
        (
            "bf16-autocast",
            {"dtype": "float32"},
            "recipe bf16-autocast and the run is in float32: activations .* float32 instead of bfloat16, .*--dtype out",
        ),
        ("bf16-autocast", {"precision": "fp32"}, "the run is in fp32: activations and messages are in float32"),
        ("fp8-mixed", {"dtype": "float32"}, "for the recipe fp8-mixed and the run is in float32: "),
        ("bf16", {"precision": "bf16-mixed"}, "for the recipe bf16 and the run is in bf16-mixed"),
    ],
)
def test_bytes_that_are_not_the_plans_are_said(recipe: str, asked: dict[str, str], told: str | None) -> None:
    plan = plan_by(Recipe(name=recipe))
    said = warning_of_format(plan, TrainOptions("gpt2-tiny", **asked).by_plan(plan))
    assert said is None if told is None else re.search(told, said or "")


@pytest.mark.parametrize(
    ("recipe", "asked", "told"),
    [
        ("bf16-autocast", {"dtype": "float32"}, "recipe bf16-autocast and the run is in float32: activations and"),
        ("fp32", {"autocast": "bfloat16"}, "for the recipe fp32 and the run is in bf16-autocast: activations and"),
        ("fp32", {}, ""),
    ],
)
def test_a_run_says_that_bytes_are_not_the_plans(
    recipe: str, asked: dict[str, str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = model_plan(load_model("gpt2-tiny"), [0], num_microbatches=2)
    with lone_rank():
        pipeplan.run(plan.model_copy(update={"recipe": Recipe(name=recipe)}), "gpt2-tiny", steps=1, **asked)
    said = capsys.readouterr().err
    assert told in said
    assert ("warning: the plan is for" in said) == bool(told), said


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
    masters = MasterCopies([weight], (lambda each: each.detach().float()) if options.keeps_masters else None)
    gradient_bytes = 8 * getattr(torch, options.gradients or options.number_format).itemsize
    masters.take_gradients(1.0)
    master = masters.of(weight)
    updater = Updater([master], options)
    updater.step()
    assert updater.optimizer is not None
    (state,) = updater.optimizer.state.values()
    held = sum(each.nbytes for each in {id(each): each for each in (weight, master)}.values())
    kept = sum(each.nbytes for key, each in state.items() if key != "step") + held + gradient_bytes
    assert kept == 8 * sum(size for _, size in bytes_per_parameter(checked_recipe(name)).items())


def test_momentum_is_kept() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    updater = Updater([weight], TrainOptions("gpt2-tiny", optimizer="momentum").by_plan(plan_by(None)))
    updater.step()
    assert updater.optimizer is not None
    (state,) = updater.optimizer.state.values()
    assert state["momentum_buffer"].nbytes == 12
