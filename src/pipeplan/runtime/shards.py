"""Blocks split over devices: which part of each parameter a device has, and what the devices tell each other.

What enters a split block, and what leaves it, is whole on each of its devices, and so are the gradients of both.
Between, each device works on its share, as in Megatron-LM (Shoeybi et al. 2019): :meth:`Shards.shared` stands where a
whole tensor enters split work, and its gradient is the sum of the shares'; :meth:`Shards.summed` where split work
makes parts of a sum, :meth:`Shards.gathered` where it makes slices. Loss over a split vocabulary is that of Megatron,
with one exchange of a few numbers per token instead of three (:mod:`pipeplan.runtime.split_layers`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.cuts import Cut, Part, Slice, range_of

__all__ = ["WHOLE", "Collectives", "Cut", "Part", "Shards", "Slice", "Split", "share_of"]


class Collectives(Protocol):
    """What the devices that split a block can do together; all of them call the same in the same order."""

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the devices, as a tensor of its own."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all devices, of one shape, in the order of their shares."""

    def exchange(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Give each device its piece, and get theirs for this one; all are of one shape, in the order of the shares."""


@dataclass(frozen=True, slots=True)
class _Alone:
    """One device by itself, for measuring a share: nothing comes from others."""

    count: int

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor] * self.count

    def exchange(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        return list(pieces)


@dataclass(frozen=True, slots=True)
class Shards:
    """The place of one device among ``count`` that split a block: it has share number ``index``.

    Without ``collectives`` it works by itself, as if the others added nothing; so shares are measured. Where a block is
    split along several axes of a mesh, ``along`` has its place on each of them.
    """

    count: int = 1
    index: int = 0
    collectives: Collectives | None = None
    along: Mapping[str, Shards] = field(default_factory=dict)

    def range(self, total: int) -> tuple[int, int]:
        """This device's of so many rows: first, and behind the last. Shares differ by one at most."""
        return range_of(total, self.count, self.index)

    def shared(self, whole: Tensor) -> Tensor:
        """A whole tensor on its way into split work: its gradient is the sum of what the devices find."""
        return whole if self.count == 1 else _shared(whole, self._collectives)

    def summed(self, part: Tensor) -> Tensor:
        """The sum of the devices' parts, whole on each of them."""
        return part if self.count == 1 else _summed(part, self._collectives)

    def gathered(self, share: Tensor, dimension: int = -1) -> Tensor:
        """The devices' slices side by side, whole on each of them; all are of one size."""
        return share if self.count == 1 else _gathered(share, self._collectives, self.index, dimension)

    def sliced(self, whole: Tensor, dimension: int = -1) -> Tensor:
        """This device's slice of what is whole on each; all are of one size. Gradients of slices make up the whole's.

        Raises:
            UsageError: the slices would not be of one size.
        """
        if self.count == 1:
            return whole
        self._require_cut(whole, dimension)
        return _sliced(whole, self._collectives, self.count, self.index, dimension)

    def exchanged(self, share: Tensor, taken: int, given: int) -> Tensor:
        """A slice along dimension ``given`` becomes one along ``taken``: what gathering and slicing would make.

        Raises:
            UsageError: as :meth:`sliced`.
        """
        self._require_cut(share, taken)
        return _exchanged(share, self._collectives, self.count, taken, given)

    def _require_cut(self, whole: Tensor, dimension: int) -> None:
        if whole.shape[dimension] % self.count:
            raise UsageError(
                f"dimension {dimension} of a tensor of shape {list(whole.shape)} cannot be cut into {self.count}"
            )

    @property
    def _collectives(self) -> Collectives:
        return self.collectives or _Alone(self.count)


WHOLE = Shards()
"""A device that has all of a block."""


@dataclass(frozen=True, slots=True)
class Split:
    """How a block is split over devices.

    ``build(shards)`` makes the module of one device. It is called with the same inputs as the whole block and returns
    the same outputs, whole on every device. Its parameters have the whole block's names; ``cuts`` says of which it has
    shares. All others are whole on every device, and so must be their gradients. Values are copied from the whole
    block.

    With ``takes`` its inputs are slices along their last dimension, with ``gives`` its output is one. Of the axis
    ``places`` inputs and outputs always are slices along their second dimension, and parameters whole.
    """

    build: Callable[[Shards], nn.Module]
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    takes: bool = False
    gives: bool = False


def share_of(whole: nn.Module, made: nn.Module, part_of: Callable[[str], Part]) -> nn.Module:
    """The module ``made`` for one device, with its parts of the whole block's parameters, by name.

    Raises:
        UsageError: a parameter cannot be split so, or the module's parameters are not such parts.
    """
    names = {name for name, _ in whole.named_parameters()}
    if unlike := names ^ {name for name, _ in made.named_parameters()}:
        raise UsageError(f"its share has other parameters than the whole block, such as {min(unlike)!r}")
    for name, parameter in made.named_parameters():
        try:
            value = part_of(name).within(whole.get_parameter(name).detach())
        except UsageError as error:
            raise UsageError(f"parameter {name!r} of {error}") from None
        if value.shape != parameter.shape:
            raise UsageError(
                f"parameter {name!r} of a share has shape {list(parameter.shape)}, and its cut is {list(value.shape)}"
            )
        with torch.no_grad():
            parameter.copy_(value)
    return made


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, collectives: Collectives) -> Tensor:
        ctx.collectives = collectives
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        collectives: Collectives = ctx.collectives
        return collectives.sum(gradients[0]), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, collectives: Collectives) -> Tensor:
        return collectives.sum(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, collectives: Collectives, index: int, dimension: int) -> Tensor:
        ctx.place = dimension, index * share.shape[dimension], share.shape[dimension]
        return torch.cat(collectives.gather(share), dimension)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].narrow(*ctx.place), None, None, None


class _Sliced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, collectives: Collectives, count: int, index: int, dimension: int) -> Tensor:
        ctx.collectives, ctx.dimension = collectives, dimension
        size = whole.shape[dimension] // count
        return whole.narrow(dimension, index * size, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        collectives: Collectives = ctx.collectives
        return torch.cat(collectives.gather(gradients[0]), ctx.dimension), None, None, None, None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, collectives: Collectives, count: int, taken: int, given: int) -> Tensor:
        ctx.place = collectives, count, taken, given
        return torch.cat(collectives.exchange(share.chunk(count, taken)), given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        collectives, count, taken, given = ctx.place
        return torch.cat(collectives.exchange(gradients[0].chunk(count, given)), taken), None, None, None, None


_shared: Callable[..., Tensor] = _Shared.apply
_summed: Callable[..., Tensor] = _Summed.apply
_gathered: Callable[..., Tensor] = _Gathered.apply
_sliced: Callable[..., Tensor] = _Sliced.apply
_exchanged: Callable[..., Tensor] = _Exchanged.apply
