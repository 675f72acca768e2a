"""Models for the runtime's tests: graphs other than chains, and blocks that fail on purpose."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.runtime.loading import load_model
from pipeplan.runtime.model import BlockSpec, Model

WIDTH = 8


class Mix(nn.Module):
    """Adds up its inputs behind a linear layer each."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_inputs))

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.tanh(sum(layer(x) for layer, x in zip(self.layers, inputs, strict=True)))


class SquaredError(nn.Module):
    """A loss with a parameter: the summed squared distance to the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(x * self.scale, targets, reduction="sum")


class Break(nn.Module):
    """Passes its input on, and does something on the n-th forward of this process."""

    def __init__(self, act: Callable[[], None], at: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.act, self.at, self.calls = act, at, 0

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "meta":
            if self.calls == self.at:
                self.act()
            self.calls += 1
        result: Tensor = self.layer(x)
        return result


def vectors(num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
    rows = [torch.Generator().manual_seed(seed * 7919 + step * 104729 + i) for i in range(num_samples)]
    both = torch.stack([torch.randn(2, WIDTH, dtype=torch.float64, generator=generator) for generator in rows])
    return {"x": both[:, 0].contiguous(), "targets": both[:, 1].contiguous()}


def branches() -> Model:
    """Two branches with a skip around them and two losses; one weight is tied over three blocks."""
    weight = ("a", "layers.0.weight")
    return Model(
        "branches",
        (
            BlockSpec("a", "mix", lambda: Mix(1), samples=("x",)),
            BlockSpec("left", "mix", lambda: Mix(1), sources=("a",)),
            BlockSpec("right", "mix", lambda: Mix(1), sources=("a",)),
            BlockSpec("right2", "mix", lambda: Mix(2), sources=("right", "a")),
            BlockSpec("join", "mix", lambda: Mix(3), sources=("left", "right2", "a")),
            BlockSpec("side", "loss", SquaredError, sources=("right2",), samples=("targets",), loss=True),
            BlockSpec("end", "loss", SquaredError, sources=("join",), samples=("targets",), loss=True),
        ),
        vectors,
        lambda batch: batch["targets"].numel(),
        tied=((weight, ("right2", "layers.1.weight"), ("join", "layers.2.weight")),),
    )


class Spare(Mix):
    """Has a parameter that nothing depends on: no gradient, and so no update."""

    def __init__(self) -> None:
        super().__init__(1)
        self.spare = nn.Parameter(torch.ones(2))


def chain() -> Model:
    """Five blocks one after another, then a loss; the first and the last block share a weight."""
    names = [f"b{index}" for index in range(5)]
    blocks = [
        BlockSpec(name, "mix", Spare, sources=(names[i - 1],) if i else (), samples=() if i else ("x",))
        for i, name in enumerate(names)
    ]
    loss = BlockSpec("end", "loss", SquaredError, sources=("b4",), samples=("targets",), loss=True)
    tied = ((("b0", "layers.0.weight"), ("b4", "layers.0.weight")),)
    return Model("chain", (*blocks, loss), vectors, lambda batch: batch["targets"].numel(), tied=tied)


def breaking(act: Callable[[], None], at: int = 5) -> Model:
    """A chain of four blocks and a loss, the third of which breaks."""
    names = ["b0", "b1", "b2", "b3"]
    builders: dict[str, Callable[[], nn.Module]] = {name: lambda: Mix(1) for name in names}
    builders["b2"] = lambda: Break(act, at)
    chain = [
        BlockSpec(name, "mix", builders[name], sources=(names[i - 1],) if i else (), samples=() if i else ("x",))
        for i, name in enumerate(names)
    ]
    loss = BlockSpec("end", "loss", SquaredError, sources=("b3",), samples=("targets",), loss=True)
    return Model("breaking", (*chain, loss), vectors, lambda batch: batch["targets"].numel())


def killed() -> Model:
    return breaking(lambda: os.kill(os.getpid(), signal.SIGKILL))


def stopped() -> Model:
    return breaking(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def sleeping() -> Model:
    return breaking(lambda: time.sleep(600))


def raising() -> Model:
    def act() -> None:
        raise ValueError("boom")

    return breaking(act)


def talking() -> Model:
    """The smallest model of the zoo; prints, as user code does."""
    print("a word from the model")
    return load_model("gpt2-tiny")


def lying() -> Model:
    """Makes another number format than it declares."""

    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.device.type == "meta" else x.to(torch.float16)

    model = breaking(lambda: None)
    blocks = [
        block if block.id != "b1" else BlockSpec("b1", "half", Half, sources=("b0",), samples=())
        for block in model.blocks
    ]
    return Model("lying", tuple(blocks), vectors, model.predictions)


def odd(rank: int) -> Model:
    """Declares another number format on rank 1 than on the others."""

    class Declared(Mix):
        def forward(self, *inputs: Tensor) -> Tensor:
            made = super().forward(*inputs)
            return made.to(torch.float16) if made.device.type == "meta" and rank == 1 else made

    model = breaking(lambda: None)
    blocks = [
        block if block.id != "b1" else BlockSpec("b1", "mix", lambda: Declared(1), sources=("b0",))
        for block in model.blocks
    ]
    return Model("odd", tuple(blocks), vectors, model.predictions)


def unlike(rank: int, *, wider: bool) -> Model:
    """The chain; on rank 2 a block starts with other numbers, or is wider inside."""

    def build() -> nn.Module:
        module = Spare()
        if rank == 2:
            module.spare.data = torch.ones(3) if wider else torch.zeros(2)
        return module

    model = chain()
    blocks = [replace(block, build=build) if block.id == "b2" else block for block in model.blocks]
    return replace(model, blocks=tuple(blocks))
