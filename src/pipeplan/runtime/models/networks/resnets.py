"""ResNets of bottlenecks: ResNeXt-50 (Xie et al. 2017) and ResNet-50 over space and time (Hara et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

_LAYERS = (3, 4, 6, 3)
_EXPANSION = 4


@dataclass(frozen=True, slots=True)
class ResNetKind:
    """In how many dimensions a network convolves, in how many ``groups`` of how many channels at the first width."""

    dimensions: int
    groups: int = 1
    group_width: int = 64

    def convolution(
        self, inputs: int, outputs: int, size: int, stride: int | Sequence[int] = 1, groups: int = 1
    ) -> Any:
        """Without a bias, as a norm follows; as wide as before, but for the stride."""
        kind: Any = (nn.Conv2d, nn.Conv3d)[self.dimensions - 2]
        return kind(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)

    def norm(self, width: int) -> Any:
        """Over the batch."""
        kind: Any = (nn.BatchNorm2d, nn.BatchNorm3d)[self.dimensions - 2]
        return kind(width)

    def inner(self, width: int) -> int:
        """The channels inside of a bottleneck of a layer of that width."""
        return width * self.group_width * self.groups // 64


class ResidualBottleneck(nn.Module):
    """Fewer channels, a convolution of three, and more channels again, beside a shortcut."""

    def __init__(self, kind: ResNetKind, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        inner, outputs = kind.inner(width), _EXPANSION * width
        self.reduce, self.reduce_norm = kind.convolution(inputs, inner, 1), kind.norm(inner)
        self.mix, self.mix_norm = kind.convolution(inner, inner, 3, stride, kind.groups), kind.norm(inner)
        self.expand, self.expand_norm = kind.convolution(inner, outputs, 1), kind.norm(outputs)
        changes = stride > 1 or inputs != outputs
        self.shortcut = (
            nn.Sequential(kind.convolution(inputs, outputs, 1, stride), kind.norm(outputs)) if changes else None
        )
        self.active = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """[samples, channels, ...] to four times the width."""
        made = self.active(self.reduce_norm(self.reduce(x)))
        made = self.active(self.mix_norm(self.mix(made)))
        made = self.expand_norm(self.expand(made))
        result: Tensor = self.active(made + (x if self.shortcut is None else self.shortcut(x)))
        return result


class ResNet(nn.Module):
    """A stem, four layers of bottlenecks, and classes by a mean over all places."""

    def __init__(self, kind: ResNetKind, classes: int, stem_stride: int | Sequence[int] = 2) -> None:
        super().__init__()
        pool: Any = (nn.MaxPool2d, nn.MaxPool3d)[kind.dimensions - 2]
        self.stem, self.stem_norm = kind.convolution(3, 64, 7, stem_stride), kind.norm(64)
        self.active, self.pool = nn.ReLU(), pool(3, 2, 1)
        blocks: list[ResidualBottleneck] = []
        inputs = 64
        for number, count in enumerate(_LAYERS):
            width = 64 << number
            for block in range(count):
                blocks.append(ResidualBottleneck(kind, inputs, width, 2 if number and not block else 1))
                inputs = _EXPANSION * width
        self.blocks = nn.ModuleList(blocks)
        self.classes = nn.Linear(inputs, classes)

    def forward(self, input: Tensor) -> Tensor:
        """[samples, 3, ...] to [samples, classes]."""
        x = self.pool(self.active(self.stem_norm(self.stem(input))))
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.classes(x.flatten(2).mean(2))
        return result


def resnext50() -> ResNet:
    """32 groups of four channels, on images of 1,000 classes."""
    return ResNet(ResNetKind(2, groups=32, group_width=4), 1000)


def resnet50_3d() -> ResNet:
    """On films of 400 classes; the stem halves height and width alone."""
    return ResNet(ResNetKind(3), 400, (1, 2, 2))
