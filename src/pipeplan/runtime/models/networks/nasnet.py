"""NASNet-A (Zoph et al. 2018, section 3 and figure 4): cells that were found by a search.

A cell takes the two results before it, brings both to its width, and combines pairs of what it has. Sums that no other
pair works on are its result, side by side.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = tuple[tuple[str, int], tuple[str, int]]
"""Two operations, each with the number of what it takes: 0 the last result, 1 the one before, then the pairs' sums."""

NORMAL: tuple[Pair, ...] = (
    (("separable5", 0), ("separable3", 1)),
    (("separable5", 1), ("separable3", 1)),
    (("mean", 0), ("same", 1)),
    (("mean", 1), ("mean", 1)),
    (("separable3", 0), ("same", 0)),
)
REDUCTION: tuple[Pair, ...] = (
    (("separable5", 0), ("separable7", 1)),
    (("most", 0), ("separable7", 1)),
    (("mean", 0), ("separable5", 1)),
    (("same", 3), ("mean", 2)),
    (("separable3", 2), ("most", 0)),
)
NORMAL_GIVES, REDUCTION_GIVES = (1, 2, 3, 4, 5, 6), (3, 4, 5, 6)
"""Which of these are the result, side by side."""


def _norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-3)


class Separable(nn.Module):
    """Twice: a ReLU, a convolution of each channel, one of all channels of a place, and a norm."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = self._half(inputs, outputs, size, stride), self._half(outputs, outputs, size, 1)

    @staticmethod
    def _half(inputs: int, outputs: int, size: int, stride: int) -> nn.Sequential:
        alone = nn.Conv2d(inputs, inputs, size, stride, size // 2, groups=inputs, bias=False)
        return nn.Sequential(nn.ReLU(), alone, nn.Conv2d(inputs, outputs, 1, bias=False), _norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[samples, channels, height, width]."""
        result: Tensor = self.second(self.first(x))
        return result


class Squeezed(nn.Sequential):
    """A ReLU, a convolution to some width, and a norm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.ReLU(), nn.Conv2d(inputs, outputs, 1, bias=False), _norm(outputs))


class Halved(nn.Module):
    """To half the height and width by places of even and of odd numbers, side by side, and to some width."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.active, self.norm = nn.ReLU(), _norm(outputs)
        self.even = nn.Conv2d(inputs, outputs // 2, 1, bias=False)
        self.odd = nn.Conv2d(inputs, outputs // 2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, channels, height, width]."""
        x = self.active(x)
        shifted = F.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        both = [self.even(F.avg_pool2d(x, 1, 2)), self.odd(F.avg_pool2d(shifted, 1, 2))]
        result: Tensor = self.norm(torch.cat(both, 1))
        return result


def _operation(kind: str, inputs: int, outputs: int, stride: int) -> nn.Module:
    if kind.startswith("separable"):
        return Separable(inputs, outputs, int(kind.removeprefix("separable")), stride)
    made: dict[str, Any] = {
        "mean": lambda: nn.AvgPool2d(3, stride, 1, count_include_pad=False),
        "most": lambda: nn.MaxPool2d(3, stride, 1),
        "same": nn.Identity,
    }
    found: nn.Module = made[kind]()
    return found


class NasCell(nn.Module):
    """A cell of some width; ``last`` and ``before`` are the channels of what it takes.

    A reduction cell halves height and width. Where ``before`` is None there is only one result yet, and it is taken as
    it is in place of the other; ``halves``: that one is twice as high and wide.
    """

    def __init__(
        self, width: int, last: int, before: int | None, *, reduces: bool = False, halves: bool = False
    ) -> None:
        super().__init__()
        self.pairs = REDUCTION if reduces else NORMAL
        self.squeeze = Squeezed(last, width)
        self.adjust: nn.Module | None = None
        if before is not None:
            self.adjust = Halved(before, width) if halves else Squeezed(before, width) if before != width else None
        widths = [width, last if before is None else width]
        made = [
            _operation(kind, widths[number] if number < 2 else width, width, 2 if reduces and number < 2 else 1)
            for pair in self.pairs
            for kind, number in pair
        ]
        self.operations = nn.ModuleList(made)
        self.given = REDUCTION_GIVES if reduces else NORMAL_GIVES
        self.width = width * len(self.given)

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        """[samples, channels, height, width] each."""
        found = [self.squeeze(last), before if self.adjust is None else self.adjust(before)]
        for number, ((_, left), (_, right)) in enumerate(self.pairs):
            first, second = self.operations[2 * number], self.operations[2 * number + 1]
            found.append(first(found[left]) + second(found[right]))
        return torch.cat([found[number] for number in self.given], 1)


class NasNet(nn.Module):
    """A stem of a convolution and two reduction cells, three rows of cells, and classes.

    ``width`` is that of the first row's cells, and doubles from row to row; the first cell behind a reduction takes
    what was two results before it, as the large network does.
    """

    def __init__(self, width: int = 168, cells: int = 6, stem: int = 96, classes: int = 1000) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, stem, 3, 2, bias=False), _norm(stem)
        made = [NasCell(width // 4, stem, None, reduces=True)]
        made.append(NasCell(width // 2, made[0].width, stem, reduces=True, halves=True))
        skipped: list[int] = []
        for row in range(3):
            own, old = width << row, made[-2].width
            if row:
                skipped.append(len(made))
                made.append(NasCell(own, made[-1].width, old, reduces=True))
            for number in range(cells):
                before = made[-2].width if number else old
                made.append(NasCell(own, made[-1].width, before, halves=not number))
        self.cells, self.skipped = nn.ModuleList(made), frozenset(skipped)
        self.active, self.classes = nn.ReLU(), nn.Linear(made[-1].width, classes)

    def forward(self, input: Tensor) -> Tensor:
        """[samples, 3, height, width] to [samples, classes]."""
        last = before = self.stem_norm(self.stem(input))
        for number, cell in enumerate(self.cells):
            made = cell(last, before)
            last, before = made, before if number in self.skipped else last
        result: Tensor = self.classes(self.active(last).mean((2, 3)))
        return result
