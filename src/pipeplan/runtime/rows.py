"""Rows of tensors by sample: what one stage makes for some samples, another takes for others.

Stages may have micro-batches of different sizes, in parts, or shared by replicas. So tensors between stages are
addressed by message and sample, and are cut and joined only where one action's samples are not another's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeplan.errors import UsageError
from pipeplan.runtime.program import Message, Numbers

__all__ = ["Made", "Rows", "TensorSpec"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and number format of a block's output; its gradient has the same.

    ``shape`` is that for one sample. Dimension ``axis`` is as many times longer as there are samples; None where the
    output is of one size for any number of samples.
    """

    shape: Shape
    dtype: torch.dtype
    axis: int | None = 0

    @classmethod
    def between(cls, name: str, once: Shape, twice: Shape, num_samples: int, dtype: torch.dtype) -> TensorSpec:
        """What an output is like whose shapes for ``num_samples`` and for twice as many are known.

        Raises:
            UsageError: it grows in another way than in one dimension, with the samples.
        """
        grown = [axis for axis, (a, b) in enumerate(zip(once, twice, strict=False)) if a != b]
        if not grown and len(once) == len(twice):
            return cls(once, dtype, None)
        axis = grown[0] if grown else 0
        doubled = (*once[:axis], 2 * once[axis], *once[axis + 1 :]) if once else ()
        if doubled != twice or once[axis] % num_samples:
            raise UsageError(
                f"block {name!r} makes {list(once)} of {num_samples} samples and {list(twice)} of {2 * num_samples}; "
                "only outputs with samples in one dimension can go from stage to stage"
            )
        return cls((*once[:axis], once[axis] // num_samples, *once[axis + 1 :]), dtype, axis)

    def of(self, num_samples: int) -> Shape:
        """The shape for so many samples."""
        if self.axis is None:
            return self.shape
        return (*self.shape[: self.axis], num_samples * self.shape[self.axis], *self.shape[self.axis + 1 :])

    def rows(self, tensor: Tensor, begin: int, end: int) -> Tensor:
        """The part of a tensor that is of its samples from the ``begin``-th up to the ``end``-th."""
        assert self.axis is not None, "run refuses plans that would cut this"
        each = self.shape[self.axis]
        return tensor.narrow(self.axis, begin * each, (end - begin) * each)

    def text(self, num_samples: int) -> str:
        """Format and shape for so many samples, for errors."""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.of(num_samples))}"


@dataclass(frozen=True, slots=True)
class Made:
    """A message's tensors, one per block, and when they are ready: None if nobody has noted it."""

    tensors: Sequence[Tensor]
    at: torch.cuda.Event | None = None


@dataclass(slots=True, eq=False)
class _Piece:
    """The tensors of a message for some samples; those on their way are waited for when they are first needed."""

    samples: Numbers
    arrive: Callable[[], Made]
    made: Made | None = None

    @property
    def here(self) -> Made:
        if self.made is None:
            self.made = self.arrive()
        return self.made


_Place = tuple[_Piece, int]
"""A sample's piece, and which of the piece's samples it is."""


class Rows:
    """What one rank has made or been sent and not used yet. Each row is taken once.

    Args:
        tensors: the blocks whose outputs, or gradients, a message carries.
        specs: of every such block.
    """

    def __init__(self, tensors: Mapping[Message, tuple[str, ...]], specs: Mapping[str, TensorSpec]) -> None:
        self._specs = {message: [specs[name] for name in names] for message, names in tensors.items()}
        self._pieces: dict[Message, dict[int, _Place]] = defaultdict(dict)

    def put(self, message: Message, samples: Numbers, arrive: Callable[[], Made]) -> None:
        """Keep what a message brings for these samples; ``arrive`` is called when some of it is taken first."""
        piece = _Piece(samples, arrive)
        self._pieces[message].update((sample, (piece, place)) for place, sample in enumerate(samples))

    def take(self, message: Message, samples: Numbers) -> Made:
        """The tensors of a message for these samples: as they came where these are the same, else cut and joined."""
        pieces = self._pieces[message]
        runs = list(_runs([pieces.pop(sample) for sample in samples]))
        if len(runs) == 1 and runs[0][0].samples == samples:
            return runs[0][0].here
        whole = [piece.here.tensors for piece, _, _ in runs]
        return Made(
            [
                _joined([spec.rows(whole[r][number], begin, end) for r, (_, begin, end) in enumerate(runs)], spec)
                for number, spec in enumerate(self._specs[message])
            ]
        )

    @property
    def empty(self) -> bool:
        """Whether every row has been taken."""
        return not any(self._pieces.values())


def _joined(parts: list[Tensor], spec: TensorSpec) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=spec.axis or 0)


def _runs(found: Sequence[_Place]) -> Iterator[tuple[_Piece, int, int]]:
    """Neighbours that are neighbours in one piece, too: (piece, place of the first, behind that of the last)."""
    begin = 0
    for end in range(1, len(found) + 1):
        piece, place = found[end - 1]
        if end == len(found) or found[end] != (piece, place + 1):
            yield piece, found[begin][1], place + 1
            begin = end
