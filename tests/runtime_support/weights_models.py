"""Modules of one's own whose weights go out and in."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn


def sequential() -> tuple[nn.Sequential, Tensor, Tensor]:
    """Children by name, of which some have no parameters, and two have one weight."""
    words, head = nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)
    head.weight = words.weight
    children = OrderedDict[str, nn.Module](
        words=words, drop=nn.Identity(), first=nn.Linear(6, 6), act=nn.Tanh(), norm=nn.LayerNorm(6), head=head
    )
    return nn.Sequential(children), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in range(2))
        self.again = self.layers[0]
        self.register_buffer("scale", torch.full((6,), 0.5))
        self.register_buffer("kept_nowhere", torch.ones(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x) * self.scale * self.kept_nowhere
        return (x * x).sum()


def captured() -> tuple[nn.Module, dict[str, Tensor]]:
    """A module with a buffer that it keeps and one that it does not, and with two names for a layer."""
    return _Tower(), {"x": torch.zeros(2, 4)}
