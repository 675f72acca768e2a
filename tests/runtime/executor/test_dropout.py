"""Random numbers in blocks: the same under every plan with micro-batches of one size, and when a block runs again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from pipeplan.runtime.executor.stage import MiniBatch
from pipeplan.runtime.models.capture import capture
from pipeplan.runtime.models.sequential import sequential_model
from pipeplan.runtime.models.spec import BlockSpec, Model
from runtime_support import models as runtime_models
from runtime_support.models import Mix
from runtime_support.plans import model_plan
from runtime_support.threads import run_in_threads


class Dropping(nn.Module):
    """A layer behind dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.mix = nn.Dropout(0.5), Mix(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.mix(self.drop(x))
        return result


def dropping() -> Model:
    model = runtime_models.breaking(lambda: None)
    blocks = [
        BlockSpec(block.id, "drop", Dropping, block.sources, block.samples) if block.id in ("b1", "b3") else block
        for block in model.blocks
    ]
    return replace(model, blocks=tuple(blocks))


class Captured(nn.Module):
    """Layers behind dropout, and attention that drops."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 8, 0.5, batch_first=True, dtype=torch.float64) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def captured() -> Model:
    torch.manual_seed(0)
    return capture(Captured(), {"x": torch.randn(2, 3, 8)}, name="captured", grain="layer")


@pytest.mark.parametrize("make", [dropping, captured])
@pytest.mark.parametrize("split", [False, True])
def test_losses_and_gradients_do_not_depend_on_the_plan(split: bool, make: Callable[[], Model]) -> None:
    model = make()
    whole = run_in_threads(model_plan(model, [0]), model, 3)
    assert whole.loss != run_in_threads(model_plan(model, [0], num_microbatches=3, microbatch_size=4), model, 3).loss
    for devices, recompute in [([0, 1, 2, 3], False), ([0, 1, 2, 3], True), ([1, 0], True)]:
        outcome = run_in_threads(model_plan(model, devices, split=split, recompute=recompute), model, 3)
        assert outcome.loss == pytest.approx(whole.loss, abs=1e-12)
        for name, gradient in outcome.gradients.items():
            assert torch.allclose(gradient, whole.gradients[name], rtol=0, atol=1e-12), name


class Normalised(nn.Module):
    """Two layers, each normalised by what stands in the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.layers(input).pow(3).sum()


def normalised(as_children: bool) -> Model:
    torch.manual_seed(0)
    module, example = Normalised(), torch.randn(2, 4)
    if as_children:
        return sequential_model("children", nn.Sequential(*module.layers, Cubed()), example)
    return capture(module, {"input": example}, name="captured", grain="layer")


class Cubed(nn.Module):
    """The loss of the other one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.pow(3).sum()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("as_children", [False, True])
def test_batch_norms_are_those_of_one_micro_batch_after_another(as_children: bool, recompute: bool) -> None:
    """Gradients and running statistics are those of torch, also where forwards run again."""
    model = normalised(as_children)
    torch.manual_seed(0)
    whole = Normalised().double()
    batch = model.mini_batch(12, 0, 3, dtype=torch.float64)
    for rows in range(0, 12, 2):
        (whole(batch["input"][rows : rows + 2]) / 12).backward()
    outcome = run_in_threads(model_plan(model, [0, 1], recompute=recompute), model, 3)
    found = sorted(float(gradient.sum()) for gradient in outcome.gradients.values())
    expected = sorted(float(each.grad.sum()) for each in whole.parameters() if each.grad is not None)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    kept = [each for each in outcome.buffers if each.shape == (4,)]
    own = [each for each in whole.buffers() if each.shape == (4,)]
    assert sorted(float(each.sum()) for each in kept) == pytest.approx(sorted(float(each.sum()) for each in own))


def test_seeds_differ_by_mini_batch_block_and_samples() -> None:
    seeds = [
        MiniBatch({}, 1, draw).seed_of(block, samples)
        for draw in ((0, 0), (0, 1), (1, 0), (2**31, 7))
        for block in ("b0", "b1", "layer10.ffn")
        for samples in ((0, 1), (2, 3), (1,))
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
