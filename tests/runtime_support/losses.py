"""Models whose losses are means, and such as depend on what samples stand beside each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.runtime.models.sequential import sequential_model
from pipeplan.runtime.models.spec import BlockSpec, Model, batch_like

WORDS, WIDTH, LENGTH, SAMPLES = 11, 8, 4, 40


class Language(nn.Module):
    """Words of any number to a loss; behind two layers with dropout."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.3)) for _ in range(4)
        )
        self.output, self.loss = nn.Linear(WIDTH, WORDS), loss

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.loss(self.output(x).flatten(0, 1), targets.flatten())


def language() -> tuple[nn.Module, dict[str, Tensor]]:
    """Its loss is what everyone writes."""
    words = torch.arange(2 * LENGTH).reshape(2, LENGTH) % WORDS
    return Language(), {"tokens": words, "targets": words.clone()}


def evaluated() -> tuple[nn.Module, dict[str, Tensor]]:
    """The same in evaluation mode."""
    module, inputs = language()
    return module.eval(), inputs


class Texts:
    """A dataset of which every third sample predicts all words, and others some or none."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < SAMPLES:
            raise IndexError(index)
        tokens = torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        shown = index % 3 * 2
        targets = torch.where(torch.arange(LENGTH) < shown, -100, (tokens * 3 + 1) % WORDS)
        return {"tokens": tokens, "targets": targets}


def chain(loss: object = None, *layers: nn.Module, labels: Tensor | None = None) -> Model:
    """A Sequential, with a layer more in the middle, and a loss over three classes."""
    torch.manual_seed(0)
    modules = nn.Sequential(nn.Linear(4, 6), *layers, nn.Tanh(), nn.Linear(6, 3))
    targets = torch.tensor([0, 2]) if labels is None else labels
    return sequential_model("chain", modules, torch.randn(2, 4), targets, loss)  # type: ignore[arg-type]


def normalised() -> Model:
    """With statistics of the micro-batch."""
    return chain(None, nn.BatchNorm1d(6))


class WeightedMean(nn.Module):
    """The mean over what a mask says, as many write it."""

    def forward(self, output: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        losses = (output - targets).square().mean(-1)
        return (losses * mask).sum() / mask.sum()


def masked(loss: type[nn.Module] = WeightedMean, **more: Tensor) -> Model:
    """One layer, and a loss that takes a mask."""
    examples = {"x": torch.randn(2, 4), "targets": torch.randn(2, 4), **more}
    return Model(
        "masked",
        (
            BlockSpec("layer", "linear", partial(nn.Linear, 4, 4), samples=("x",)),
            BlockSpec("loss", "loss", loss, ("layer",), ("targets", *more), loss=True),
        ),
        partial(batch_like, examples),
        lambda batch: len(batch["x"]),
    )


class Contrast(nn.Module):
    """Which target is whose output."""

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output @ targets.t(), torch.arange(len(output), device=output.device), reduction="sum")


def contrast() -> Model:
    """Whose loss compares samples."""
    return masked(Contrast)
