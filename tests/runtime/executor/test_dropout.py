"""Random numbers in blocks: the same under every plan with micro-batches of one size, and when a block runs again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from pipeplan.runtime.executor.stage import MiniBatch
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


@pytest.mark.parametrize("split", [False, True])
def test_losses_and_gradients_do_not_depend_on_the_plan(split: bool) -> None:
    model = dropping()
    whole = run_in_threads(model_plan(model, [0]), model, 3)
    assert whole.loss != run_in_threads(model_plan(model, [0], num_microbatches=3, microbatch_size=4), model, 3).loss
    for devices, recompute in [([0, 1, 2, 3], False), ([0, 1, 2, 3], True), ([1, 0], True)]:
        outcome = run_in_threads(model_plan(model, devices, split=split, recompute=recompute), model, 3)
        assert outcome.loss == pytest.approx(whole.loss, abs=1e-12)
        for name, gradient in outcome.gradients.items():
            assert torch.allclose(gradient, whole.gradients[name], rtol=0, atol=1e-12), name


def test_seeds_differ_by_mini_batch_block_and_samples() -> None:
    seeds = [
        MiniBatch({}, 1, draw).seed_of(block, samples)
        for draw in ((0, 0), (0, 1), (1, 0), (2**31, 7))
        for block in ("b0", "b1", "layer10.ffn")
        for samples in ((0, 1), (2, 3), (1,))
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
