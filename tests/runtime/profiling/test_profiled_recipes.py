"""The recipes of new profiles: what is measured and estimated without a flag, and with one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeplan import _api
from pipeplan.costs.devices import Kernel, Work, device_preset
from pipeplan.costs.inspection import counts, kept_state
from pipeplan.costs.uniform.shares import catalog_shares, shares_for
from pipeplan.costs.uniform.traced import FusedRates
from pipeplan.errors import UsageError
from pipeplan.files import CostRow, Profile, Recipe
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.profiling.build_profile import splits_of
from pipeplan.runtime.profiling.counting import counted
from pipeplan.runtime.profiling.estimate import _on_device, kernel_ns_of

CHAIN = "runtime_support.models:chain"


def estimated(**how: Any) -> Profile:
    return _api.estimate(load_model(CHAIN), (1,), **how)


@pytest.mark.parametrize(
    ("device", "asked", "recipe", "dtype", "each"),
    [
        ("a100-80gb", {}, Recipe(name="bf16-mixed"), "bfloat16", 18),
        ("v100-32gb", {}, Recipe(name="fp16-mixed", gradient_dtype="fp32"), "float16", 18),
        ("v100-32gb", {"gradient_dtype": "fp16"}, Recipe(name="fp16-mixed"), "float16", 16),
        ("a100-80gb", {"dtype": "float32"}, Recipe(name="fp32"), "float32", 16),
        ("a100-80gb", {"gradient_dtype": "bf16"}, Recipe(name="bf16-mixed", gradient_dtype="bf16"), "bfloat16", 16),
        ("a100-80gb", {"precision": "bf16", "optimizer": "sgd"}, Recipe(name="bf16", optimizer="sgd"), "bfloat16", 4),
        ("h100-80gb", {"precision": "fp8-mixed"}, Recipe(name="fp8-mixed"), "bfloat16", 18),
        ("a100-80gb", {"dtype": "float64"}, Recipe(), "float64", 32),
    ],
)
def test_estimates_have_the_usual_recipe_or_the_one_asked_for(
    device: str, asked: dict[str, str], recipe: Recipe, dtype: str, each: int
) -> None:
    found = estimated(device=device, **asked)
    assert (found.recipe, found.source.dtype) == (recipe, dtype)
    assert kept_state(found).total == each * counts(found)["parameters"] > 0


@pytest.mark.parametrize("fused", [False, True])
def test_only_products_with_weights_compute_in_fp8(*, fused: bool) -> None:
    """At twice the rate of 16 bits on an H100; attention's own products, and all else, as before."""
    device = device_preset("h100-80gb")
    rates = FusedRates.of(device, shares_for(device.name, catalog_shares())) if fused else device
    row = CostRow(microbatch_size=1, forward_ns=1, backward_ns=2)
    product = (10_000, 5_000, 10_000, 1)
    of_weights, others = (
        Kernel(10**12, 10**6, matrix=True, weights=weights, product=product) for weights in (True, False)
    )
    work: Work = {"forward_ns": [of_weights], "input_grad_ns": [others], "weight_grad_ns": [Kernel(10**6, 10**6)]}
    slow, quick = (_on_device(row, work, kernel_ns_of(rates, fp8=fp8)) for fp8 in (False, True))
    assert quick.forward_ns == pytest.approx(slow.forward_ns / 2, rel=0.01)
    assert (quick.input_grad_ns, quick.weight_grad_ns) == (slow.input_grad_ns, slow.weight_grad_ns)


def test_products_with_weights_are_told_from_others() -> None:
    model = load_model("gpt2-tiny")
    works = counted(splits_of(model, (1,), torch.bfloat16, None), [1], torch.bfloat16)
    products = {
        each.key.block: [kernel.weights for kernel in each.work["forward_ns"] if kernel.matrix] for each in works
    }
    assert sorted(products["layer0.attention"]) == [False, True, True], "the core, and its two layers"
    assert set(products["layer0.ffn"]) == {True}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"device": "a100-80gb", "precision": "fp8-mixed"},
            "a100-80gb has no FP8 peak, by which --precision",
        ),
        (
            {"device": "h100-80gb", "precision": "fp32", "dtype": "bfloat16"},
            "fp32 computes in float32; leave --dtype",
        ),
        (
            {"device": "h100-80gb", "dtype": "float64", "optimizer": "sgd"},
            "there is none for float64; give --prec",
        ),
    ],
)
def test_recipes_that_an_estimate_cannot_have(asked: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        estimated(**asked)


@pytest.mark.parametrize("name", ["bf16-autocast", "fp8-mixed"])
def test_recipes_that_cannot_be_measured(name: str) -> None:
    with pytest.raises(UsageError, match=f"--precision {name}: blocks are measured with parameters in the format"):
        _api.profile(load_model(CHAIN), (1,), precision=name)


def test_a_measured_profile_says_what_was_measured() -> None:
    found = _api.profile(load_model(CHAIN), (1,), precision="bf16-mixed", optimizer="momentum", repeats=1, warmup=0)
    assert (found.recipe, found.source.dtype) == (Recipe(name="bf16-mixed", optimizer="momentum"), "bfloat16")
