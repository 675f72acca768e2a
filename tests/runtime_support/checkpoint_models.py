"""Models that a checkpoint of gpt2-tiny does not fit, and an optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.models.zoo.gpt import GPTSize

TINY = GPTSize(layers=4, hidden=32, heads=2, vocabulary=64, positions=16, sequence=16)


def wider() -> Model:
    return replace(TINY, positions=20).model("gpt2-tiny")


class Counting(torch.optim.Optimizer):
    """Steps that get shorter, by a count of its own that is no tensor."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    count = self.state[parameter].get("count", 0) + 1
                    self.state[parameter]["count"] = count
                    parameter -= group["lr"] / count * parameter.grad
