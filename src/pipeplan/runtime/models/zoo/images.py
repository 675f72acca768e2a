"""VGG (Simonyan and Zisserman 2015) and wide ResNets (Zagoruyko and Komodakis 2016), a block for each operator.

Each can be split in a way of its own, by samples and channels, as TensorOpt does. Between blocks images are [samples,
rows of pixels, columns, channels]; none is split by pixels. No dropout; batch norms have the statistics of the
micro-batch, also in evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from pipeplan.runtime.models.spec import BlockSpec, Model, stacked
from pipeplan.runtime.models.zoo.gpt import AddOperator, loss_by_operator, product_by_operator
from pipeplan.runtime.models.zoo.layers import ZooSize, num_targets, small
from pipeplan.runtime.parallel.batch_norms import normed_over_samples
from pipeplan.runtime.parallel.sharding import WHOLE, Cut, Shards, Split
from pipeplan.runtime.parallel.split_layers import FEATURES, Tile, draw

_COLORS = 3
_EPSILON = 1e-5


class ConvolutionTile(nn.Module):
    """A square, padded convolution, of whose weight devices have tiles as of that of :class:`Tile`."""

    bias: nn.Parameter | None

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, biased: bool, shards: Shards = WHOLE
    ) -> None:
        super().__init__()
        self.rows, self.columns = (shards.along.get(name, WHOLE) for name in ("rows", "columns"))
        own = outputs // self.columns.count
        self.stride, self.padding = stride, kernel // 2
        self.weight = nn.Parameter(torch.empty(own, inputs // self.rows.count, kernel, kernel))
        draw(self.weight, math.sqrt(2 / (kernel * kernel * inputs)))
        self.register_parameter("bias", nn.Parameter(torch.zeros(own)) if biased else None)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, side, side, inputs of this device] to [samples, side, side, outputs of this device]."""
        taken = self.columns.shared(x).permute(0, 3, 1, 2)
        part = F.conv2d(taken, self.weight, stride=self.stride, padding=self.padding).permute(0, 2, 3, 1).contiguous()
        made = self.rows.summed(part)
        return made if self.bias is None else made + self.bias


class BatchNormOperator(nn.Module):
    """A norm of each channel over all pixels of the micro-batch, also where devices share its samples."""

    def __init__(self, channels: int, shards: Shards = WHOLE) -> None:
        super().__init__()
        own = channels // shards.along.get(FEATURES, WHOLE).count
        self.weight, self.bias = nn.Parameter(torch.ones(own)), nn.Parameter(torch.zeros(own))

    def forward(self, x: Tensor) -> Tensor:
        """[samples, side, side, channels of this device] to the same."""
        return normed_over_samples(x, self.weight, self.bias, _EPSILON)


class ReluOperator(nn.Module):
    """What is positive, and 0."""

    def forward(self, x: Tensor) -> Tensor:
        """[...] to the same."""
        return F.relu(x)


class MaxPoolOperator(nn.Module):
    """The largest of so many pixels in each direction, around every second one of every second row."""

    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        """[samples, side, side, channels] to [samples, side / 2, side / 2, channels]."""
        made = F.max_pool2d(x.permute(0, 3, 1, 2), self.kernel, 2, (self.kernel - 1) // 2)
        return made.permute(0, 2, 3, 1).contiguous()


class MeanPoolOperator(nn.Module):
    """The mean of all pixels."""

    def forward(self, x: Tensor) -> Tensor:
        """[samples, side, side, channels] to [samples, channels]."""
        return x.mean((1, 2))


class ImageTile(nn.Module):
    """A linear layer with a ReLU of all numbers of an image, channel by channel, of whose weight devices have tiles."""

    def __init__(self, inputs: int, outputs: int, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.layer = small(Tile(inputs, outputs, shards), math.sqrt(2 / inputs))

    def forward(self, x: Tensor) -> Tensor:
        """[samples, ..., channels of this device] to [samples, outputs of this device]."""
        return F.relu(self.layer(x.movedim(-1, 1).flatten(1)))


@dataclass(slots=True)
class _ImageLayers:
    """The blocks of a network one after another; the next takes what the ``last`` gives, of this side and channels."""

    side: int
    channels: int = _COLORS
    last: str = ""
    blocks: list[BlockSpec] = field(default_factory=list)

    def convolution(self, id_: str, outputs: int, *, kernel: int = 3, stride: int = 1, biased: bool = False) -> None:
        """To so many channels."""
        self.side //= stride
        build = partial(ConvolutionTile, self.channels, outputs, kernel, stride, biased)
        sizes = {"inputs": self.channels, "outputs": outputs, "side": self.side, "kernel": kernel, "stride": stride}
        self._add(id_, "convolution", build, sizes, Tile.ways(build, bias=biased))
        self.channels = outputs

    def norm(self, id_: str) -> None:
        """Over the batch."""
        build = partial(BatchNormOperator, self.channels)
        self._each(id_, "batch-norm", build, {name: Cut() for name in ("weight", "bias")})

    def relu(self, id_: str) -> None:
        """Of each number."""
        self._each(id_, "relu", _anywhere(ReluOperator))

    def add(self, id_: str, other: str) -> None:
        """To what another block gives."""
        self._each(id_, "add", _anywhere(AddOperator), others=(other,))

    def max_pool(self, id_: str, kernel: int) -> None:
        """Halves the side."""
        self.side //= 2
        self._each(id_, "max-pool", _anywhere(partial(MaxPoolOperator, kernel)))

    def mean(self, id_: str) -> None:
        """One number per channel."""
        self._each(id_, "mean", _anywhere(MeanPoolOperator))
        self.side = 1

    def dense(self, id_: str, outputs: int) -> None:
        """A linear layer with a ReLU of all numbers of a sample."""
        numbers = self.side * self.side * self.channels
        build = partial(ImageTile, numbers, outputs)
        sizes = {"channels": self.channels, "inputs": numbers, "outputs": outputs}
        self._add(id_, "linear", build, sizes, Tile.ways(build, "layer"))
        self.side, self.channels = 1, outputs

    def classes(self, count: int) -> None:
        """An output layer, and the loss."""
        std = 1 / math.sqrt(self.channels)
        self.blocks.append(product_by_operator("head.output", 1, self.last, self.channels, count, std=std))
        self.blocks.append(loss_by_operator("head.output", 1, count))

    def _each(
        self,
        id_: str,
        operator: str,
        build: Callable[[Shards], nn.Module],
        cuts: dict[str, Cut] | None = None,
        others: tuple[str, ...] = (),
    ) -> None:
        """What does with each channel the same; ``side`` is that of what it gives, but of a mean."""
        sizes = {"hidden": self.channels, "side": self.side}
        splits = {FEATURES: Split(build, cuts or {}, takes=True, gives=True)}
        self._add(id_, operator, build, sizes, splits, others)

    def _add(
        self,
        id_: str,
        operator: str,
        build: Callable[..., nn.Module],
        sizes: dict[str, int],
        splits: dict[str, Split],
        others: tuple[str, ...] = (),
    ) -> None:
        sources, samples = ((self.last, *others), ()) if self.last else ((), ("images",))
        self.blocks.append(BlockSpec(id_, operator, build, sources, samples, dimensions=sizes, splits=splits))
        self.last = id_

    def model(self, name: str, side: int, classes: int) -> Model:
        """These blocks, with random images of that side."""
        return Model(name, tuple(self.blocks), partial(stacked, partial(_sample, side, classes)), num_targets)


def _anywhere(module: Callable[[], nn.Module]) -> Callable[..., nn.Module]:
    """A module that computes the same for any of the channels."""
    return partial(_alike, module)


def _alike(module: Callable[[], nn.Module], shards: Shards = WHOLE) -> nn.Module:
    return module()


def _sample(side: int, classes: int, generator: Generator) -> dict[str, Tensor]:
    """A random image, brighter in one color, from which its class follows."""
    target = torch.randint(classes, (), generator=generator)
    image = torch.randn(side, side, _COLORS, generator=generator)
    image[..., 0] += target / classes
    return {"images": image, "targets": target}


@dataclass(frozen=True, slots=True)
class ImageSize(ZooSize):
    """Images of so many pixels in each direction, of so many classes."""

    side: int
    classes: int

    def model(self, name: str) -> Model:
        """The model of this size; nothing is known of shares."""
        return self._model(name, WHOLE)


@dataclass(frozen=True, slots=True)
class ConvolutionsSize(ImageSize):
    """VGG: groups of convolutions with these channels, each halving the image, and two linear layers of ``hidden``."""

    channels: tuple[tuple[int, ...], ...]
    hidden: int

    def _model(self, name: str, shards: Shards) -> Model:
        layers = _ImageLayers(self.side)
        for group, channels in enumerate(self.channels):
            for number, outputs in enumerate(channels):
                prefix = f"group{group}.convolution{number}"
                layers.convolution(prefix, outputs, biased=True)
                layers.relu(f"{prefix}.relu")
            layers.max_pool(f"group{group}.pool", 2)
        for number in range(2):
            layers.dense(f"linear{number}", self.hidden)
        layers.classes(self.classes)
        return layers.model(name, self.side, self.classes)


@dataclass(frozen=True, slots=True)
class ResidualSize(ImageSize):
    """Stages of ``blocks`` bottlenecks, each of which doubles the channels: first ``inner`` and ``ends``.

    Before them ``stem`` channels are made.
    """

    blocks: tuple[int, ...]
    inner: int
    ends: int
    stem: int = 64

    def _model(self, name: str, shards: Shards) -> Model:
        layers = _ImageLayers(self.side)
        layers.convolution("stem.convolution", self.stem, kernel=7, stride=2)
        layers.norm("stem.norm")
        layers.relu("stem.relu")
        layers.max_pool("stem.pool", 3)
        for stage, blocks in enumerate(self.blocks):
            for number in range(blocks):
                self._bottleneck(layers, f"stage{stage}.block{number}", stage, 2 if stage and not number else 1)
        layers.mean("head.pool")
        layers.classes(self.classes)
        return replace(layers.model(name, self.side, self.classes), loss_of="micro-batches")

    def _bottleneck(self, layers: _ImageLayers, prefix: str, stage: int, stride: int) -> None:
        """Convolutions of 1, 3 and 1 around the inner channels, and the residual, of as many channels as they give."""
        inner, outputs = self.inner * 2**stage, self.ends * 2**stage
        entry, side, channels = layers.last, layers.side, layers.channels
        aside = entry
        if channels != outputs or stride > 1:
            layers.convolution(f"{prefix}.aside", outputs, kernel=1, stride=stride)
            layers.norm(f"{prefix}.aside-norm")
            aside, layers.last, layers.side, layers.channels = layers.last, entry, side, channels
        for name, given, kernel, by in (("first", inner, 1, 1), ("second", inner, 3, stride), ("third", outputs, 1, 1)):
            layers.convolution(f"{prefix}.{name}", given, kernel=kernel, stride=by)
            layers.norm(f"{prefix}.{name}-norm")
            if name != "third":
                layers.relu(f"{prefix}.{name}-relu")
        layers.add(f"{prefix}.add", aside)
        layers.relu(f"{prefix}.relu")
