"""Rows of tensors by sample: what one stage makes for some samples, another takes for others.

Stages may have micro-batches of different sizes, in parts, or shared by replicas. So tensors between stages are
addressed by message and sample, and are cut and joined only where one action's samples are not another's. Which
tensors an action takes follows from the program alone, and is looked up before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeplan.errors import UsageError
from pipeplan.runtime.executor.message_graph import Message
from pipeplan.runtime.executor.sample_ownership import Numbers
from pipeplan.workload.kinds import Role, role_of

__all__ = ["Made", "Produced", "Received", "Taking", "TensorSlots", "TensorSpec"]

Shape = tuple[int, ...]

Received = Mapping[Numbers, Sequence[tuple[str, Tensor]]]
"""[samples] what an action takes, by block; a block whose output goes to several stages has several gradients."""

Produced = Mapping[Numbers, Mapping[str, Tensor]]
"""[samples][block] what an action gives."""


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
        """The shape for a number of samples."""
        if self.axis is None:
            return self.shape
        return (*self.shape[: self.axis], num_samples * self.shape[self.axis], *self.shape[self.axis + 1 :])

    def rows(self, tensor: Tensor, begin: int, end: int) -> Tensor:
        """The part of a tensor that is of its samples from the ``begin``-th up to the ``end``-th."""
        assert self.axis is not None, "what is of one size has no rows"
        each = self.shape[self.axis]
        return tensor.narrow(self.axis, begin * each, (end - begin) * each)

    def text(self, num_samples: int) -> str:
        """Format and shape for a number of samples, for errors."""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.of(num_samples))}"


@dataclass(frozen=True, slots=True)
class Made:
    """A message's tensors, one per block, and when they are ready: None if nobody has noted it."""

    tensors: Sequence[Tensor]
    at: torch.cuda.Event | None = None


_Run = tuple[int, int, int]
"""A slot, the place of the first row taken from it, and the one after the last."""


@dataclass(slots=True)
class Taking:
    """Where an action finds the tensors of a message.

    ``is_whole`` is whether it takes what is in one slot as it is, ``frees`` are the slots of which nothing is needed
    afterwards. ``parts`` [run] is how much of its slot a run is.
    """

    message: Message
    specs: Sequence[TensorSpec]
    runs: tuple[_Run, ...]
    parts: tuple[float, ...]
    is_whole: bool
    frees: list[int] = field(default_factory=list)

    def of(self, here: Callable[[int], Made]) -> Made:
        """The tensors: as they are in their slot, else cut and joined. ``here`` gives what is in a slot."""
        if self.is_whole:
            return here(self.runs[0][0])
        whole = [here(slot).tensors for slot, _, _ in self.runs]
        return Made([self._joined(spec, [each[n] for each in whole]) for n, spec in enumerate(self.specs)])

    def _joined(self, spec: TensorSpec, found: Sequence[Tensor]) -> Tensor:
        """One tensor of what is in the runs' slots."""
        if spec.axis is None:
            if role_of(self.message.payload) is Role.FORWARD:
                return found[0]
            return torch.stack([tensor * part for tensor, part in zip(found, self.parts, strict=True)]).sum(0)
        rows = [spec.rows(each, begin, end) for each, (_, begin, end) in zip(found, self.runs, strict=True)]
        return rows[0] if len(rows) == 1 else torch.cat(rows, spec.axis)


class TensorSlots:
    """Where the rows are that one rank makes or is sent and has not used yet, in the order of its program.

    Whatever is made or sent has a slot of its own. Of ranks that split a block all make its output, and one sends it:
    then what the others make is taken by nobody, or it is taken several times. An output of one size for any number
    of samples is the same for all of them; of its gradient each has an equal part.

    Args:
        tensors: the blocks whose outputs, or gradients, a message carries.
        specs: of every such block.
    """

    def __init__(self, tensors: Mapping[Message, tuple[str, ...]], specs: Mapping[str, TensorSpec]) -> None:
        self._specs = {message: tuple(specs[name] for name in names) for message, names in tensors.items()}
        self._places: dict[tuple[Message, int], tuple[int, int]] = {}
        self._sizes: list[int] = []
        self._last: dict[int, Taking] = {}

    @property
    def count(self) -> int:
        """How many things have been put."""
        return len(self._sizes)

    def put(self, message: Message, samples: Numbers) -> int:
        """The slot for what a message brings for these samples."""
        slot = self.count
        self._sizes.append(len(samples))
        self._places.update({(message, sample): (slot, place) for place, sample in enumerate(samples)})
        return slot

    def take(self, message: Message, samples: Numbers) -> Taking:
        """How to get at the tensors of a message for these samples. Raises UsageError where some are not there."""
        missing = next((sample for sample in samples if (message, sample) not in self._places), None)
        if missing is not None:
            raise UsageError(
                f"stage {message.target} takes what stage {message.source} makes of sample {missing}, which is not "
                "there by then; instructions bring what their devices have when they run: change their devices, or "
                "needs"
            )
        runs = tuple(_runs([self._places[message, sample] for sample in samples]))
        parts = tuple((end - begin) / self._sizes[slot] for slot, begin, end in runs)
        taking = Taking(message, self._specs[message], runs, parts, parts == (1.0,))
        for slot in dict.fromkeys(slot for slot, _, _ in runs):
            if slot in self._last:
                self._last[slot].frees.remove(slot)
            self._last[slot] = taking
            taking.frees.append(slot)
        return taking

    @property
    def taken(self) -> frozenset[int]:
        """Slots of which something is taken."""
        return frozenset(self._last)


def _runs(found: Sequence[tuple[int, int]]) -> Iterator[_Run]:
    """Neighbours that are neighbours in one slot, too."""
    begin = 0
    for end in range(1, len(found) + 1):
        slot, place = found[end - 1]
        if end == len(found) or found[end] != (slot, place + 1):
            yield slot, found[begin][1], place + 1
            begin = end
