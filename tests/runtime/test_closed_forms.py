"""Closed forms of what backward keeps, against what autograd saves: unique storages less parameters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.costs.operators import (
    Operator,
    activation,
    add,
    attention_core,
    convolution,
    embedding,
    linear,
    max_pool,
    norm,
    relu,
    sequence_of,
    vocabulary_loss,
)
from pipeplan.runtime.footprint import SavedTensors, storages

WIDTH = 4  # float32


def kept(module: nn.Module, *inputs: Tensor) -> int:
    """Bytes that autograd holds after a forward."""
    with SavedTensors() as saved:
        output = module(*inputs)
        own = storages(module.parameters())
        held = storages(saved.alive())
        assert output.requires_grad
    return sum(size for address, size in held.items() if address not in own)


def image(samples: int, channels: int, side: int) -> Tensor:
    return torch.randn(samples, channels, side, side, requires_grad=True)


class CrossAttention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(hidden)
        self.query = nn.Linear(hidden, hidden)
        self.memory = nn.Linear(hidden, 2 * hidden)
        self.project = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        samples, tokens, hidden = x.shape
        query = self.query(self.norm(x)).view(samples, tokens, self.heads, -1).transpose(1, 2)
        both = self.memory(memory).view(samples, memory.shape[1], 2, self.heads, -1)
        key, value = both.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        result: Tensor = x + self.project(mixed.transpose(1, 2).reshape(samples, tokens, hidden))
        return result


def test_convolutions() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    )
    form = sequence_of(
        convolution(2, 32, 3, 8, WIDTH),
        relu(2 * 32 * 32 * 8, WIDTH),
        convolution(2, 32, 8, 16, WIDTH),
        relu(2 * 32 * 32 * 16, WIDTH),
        max_pool(2, 32, 16, WIDTH),
    )
    assert form.saved_bytes == kept(module, image(2, 3, 32))
    assert form.parameters == sum(parameter.numel() for parameter in module.parameters())


def test_perceptron() -> None:
    module = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
    form = sequence_of(
        *(linear(5, 24, 40, WIDTH), relu(5 * 40, WIDTH), linear(5, 40, 40, WIDTH), relu(5 * 40, WIDTH)),
        linear(5, 40, 1, WIDTH),
    )
    assert form.saved_bytes == kept(module, torch.randn(5, 24, requires_grad=True))


def test_cross_attention() -> None:
    samples, tokens, memory, hidden, heads = 2, 48, 80, 64, 4
    form = sequence_of(
        norm(samples * tokens, hidden, WIDTH),
        linear(samples * tokens, hidden, hidden, WIDTH),
        linear(samples * memory, hidden, 2 * hidden, WIDTH),
        attention_core(samples, tokens, memory, heads, hidden // heads, WIDTH),
        linear(samples * tokens, hidden, hidden, WIDTH),
        add(samples * tokens * hidden, WIDTH),
    )
    x = torch.randn(samples, tokens, hidden, requires_grad=True)
    encoded = torch.randn(samples, memory, hidden, requires_grad=True)
    module = CrossAttention(hidden, heads)
    assert form.saved_bytes == pytest.approx(kept(module, x, encoded), rel=0.01)
    assert form.parameters == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("module", "form"),
    [
        (nn.GELU(), activation(6 * 32, WIDTH)),
        (nn.LayerNorm(32), norm(6, 32, WIDTH)),
        (nn.Linear(32, 7), linear(6, 32, 7, WIDTH)),
    ],
)
def test_single_operators(module: nn.Module, form: Operator) -> None:
    assert form.saved_bytes == kept(module, torch.randn(6, 32, requires_grad=True))


class Loss(nn.Module):
    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, reduction="sum")


def test_loss_and_embedding() -> None:
    logits, targets = torch.randn(64, 50, requires_grad=True), torch.randint(50, (64,))
    held = kept(Loss(), logits, targets)
    assert vocabulary_loss(64, 50, WIDTH).saved_bytes == pytest.approx(held, abs=16)  # a scalar or two beside
    table = nn.Embedding(50, 16)
    assert embedding(4, 16, 50, 16, WIDTH).saved_bytes == kept(table, torch.randint(50, (4, 16)))
