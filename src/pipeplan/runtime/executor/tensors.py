"""A rank's tensors: divided among the devices of a stage, and kept by sample between stages.

A block of a configuration takes its inputs cut along an axis of its mesh, or whole on every device, and gives its
output so. Where the next block takes it otherwise, what differs is gathered over the devices, and cut again, which
costs nothing (TensorOpt section 4.2). Gradients are cut as their tensors are.

torch's DTensor changes layouts, too, at some eight times the processor time for small tensors, apart from what is sent
(``benchmarks/torch_sharding.py``).

Stages may have micro-batches of different sizes, in parts, or shared by replicas. So tensors between stages are
addressed by message and sample, and are cut and joined only where one action's samples are not another's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from pipeplan.errors import UsageError
from pipeplan.runtime.executor.message_graph import Message, Numbers, Slices, TensorKey
from pipeplan.runtime.executor.rank_program import StagePart
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.parallel.context import by_device, in_order, own_pieces
from pipeplan.runtime.parallel.sharding import WHOLE, Shards, slice_of
from pipeplan.workload.kinds import Role, role_of
from pipeplan.workload.mesh import PLACES, SHARDS, MeshAxis

Shape = tuple[int, ...]

Received = Mapping[Numbers, Sequence[tuple[TensorKey, Tensor]]]
"""[samples] what an action takes, by block; a block whose output goes to several stages has several gradients."""

Produced = Mapping[Numbers, Mapping[TensorKey, Tensor]]
"""[samples][block] what an action gives."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and number format of a block's output; its gradient has the same.

    ``shape`` is that for one sample. Dimension ``axis`` is as many times longer as there are samples; None where the
    output is of one size for any number of samples. In the second dimension are so many ``streams``, each of which a
    slice has a part of.
    """

    shape: Shape
    dtype: torch.dtype
    axis: int | None = 0
    streams: int = 1

    @classmethod
    def between(cls, name: str, once: Shape, twice: Shape, num_samples: int, dtype: torch.dtype) -> TensorSpec:
        """An output of which two shapes are known. Raises UsageError unless it grows in only one dimension."""
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

    def with_streams(self, count: int) -> TensorSpec:
        """The same with so many sequences, one behind the other."""
        return self if count == 1 else replace(self, streams=count)

    def cut(self, count: int) -> TensorSpec:
        """That of one of so many slices of the sequence, which is the second dimension."""
        return replace(self, shape=(self.shape[0], self.shape[1] // count, *self.shape[2:])) if count > 1 else self

    def rows(self, tensor: Tensor, begin: int, end: int) -> Tensor:
        """The part of a tensor that is of its samples from the ``begin``-th up to the ``end``-th."""
        assert self.axis is not None, "what is of one size has no rows"
        each = self.shape[self.axis]
        return tensor.narrow(self.axis, begin * each, (end - begin) * each)

    def text(self, num_samples: int) -> str:
        """Format and shape for a number of samples, for errors."""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.of(num_samples))}"


def spec_of(specs: Mapping[str, TensorSpec], key: TensorKey) -> TensorSpec:
    """Shape and format of a tensor, or of a slice."""
    return specs[key] if isinstance(key, str) else specs[key[0]].cut(key[1])


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
    afterwards. ``parts`` [run] is how much of its slot a run is, ``pieces`` [run][tensor] which part of the sequence in
    it is taken, and of how many.
    """

    message: Message
    specs: Sequence[TensorSpec]
    runs: tuple[_Run, ...]
    parts: tuple[float, ...]
    pieces: tuple[tuple[tuple[int, int], ...], ...]
    is_whole: bool
    frees: list[int] = field(default_factory=list)

    def later(self, by: int) -> Taking:
        """The same of slots that were given that many later."""
        runs = tuple((slot + by, begin, end) for slot, begin, end in self.runs)
        return replace(self, runs=runs, frees=[slot + by for slot in self.frees])

    def of(self, here: Callable[[int], Made]) -> Made:
        """The tensors: as they are in their slot, else cut and joined. ``here`` gives what is in a slot."""
        if self.is_whole:
            return here(self.runs[0][0])
        whole = [here(slot).tensors for slot, _, _ in self.runs]
        return Made([self._joined(n, spec, [each[n] for each in whole]) for n, spec in enumerate(self.specs)])

    def _joined(self, number: int, spec: TensorSpec, found: Sequence[Tensor]) -> Tensor:
        """One tensor of what is in the runs' slots."""
        if spec.axis is None:
            if role_of(self.message.payload) is Role.FORWARD:
                return found[0]
            return torch.stack([tensor * part for tensor, part in zip(found, self.parts, strict=True)]).sum(0)
        rows = [spec.rows(each, begin, end) for each, (_, begin, end) in zip(found, self.runs, strict=True)]
        pieces = (own[number] for own in self.pieces)
        rows = [
            slice_of(each, count, place, parts=spec.streams) if count > 1 else each
            for each, (place, count) in zip(rows, pieces, strict=True)
        ]
        return rows[0] if len(rows) == 1 else torch.cat(rows, spec.axis)


class TensorSlots:
    """Where the rows are that one rank makes or is sent and has not used yet, in the order of its program.

    Whatever is made or sent has a slot of its own; it may be taken several times, or by nobody. An output of one size
    for any number of samples is the same for all of them; of its gradient each has an equal part.
    """

    def __init__(
        self,
        tensors: Mapping[Message, tuple[str, ...]],
        specs: Mapping[str, TensorSpec],
        slices: Mapping[Message, Slices] | None = None,
    ) -> None:
        self._tensors, self._slices, self._made = tensors, slices or {}, set[int]()
        self._specs = {message: tuple(specs[name] for name in names) for message, names in tensors.items()}
        self._places: dict[tuple[Message, int, int], tuple[int, int]] = {}
        self._sizes: list[int] = []
        self._last: dict[int, Taking] = {}

    @property
    def count(self) -> int:
        """How many things have been put."""
        return len(self._sizes)

    def put(self, message: Message, samples: Numbers, *, made: bool = False, piece: int = 0) -> int:
        """The slot for what a message brings for these samples; or for what it is made of, on a rank that makes it.

        Of sequences that devices share it is one ``piece``: a rank may make one, and be sent another.
        """
        slot = self.count
        self._made |= {slot} if made and message in self._slices else set()
        self._sizes.append(len(samples))
        self._places.update({(message, sample, piece): (slot, place) for place, sample in enumerate(samples)})
        return slot

    def take(self, message: Message, samples: Numbers, rank: int = 0, piece: int = 0) -> Taking:
        """How to get at the tensors of a message for these samples and the rank that is to have them, or its piece.

        Raises UsageError where some are not there.
        """
        missing = next((sample for sample in samples if (message, sample, piece) not in self._places), None)
        if missing is not None:
            raise UsageError(
                f"stage {message.target} takes what stage {message.source} makes of sample {missing}, which is not "
                "there by then; instructions bring what their devices have when they run: change their devices, or "
                "needs"
            )
        runs = tuple(_runs([self._places[message, sample, piece] for sample in samples]))
        parts = tuple((end - begin) / self._sizes[slot] for slot, begin, end in runs)
        pieces = tuple(self._pieces(message, slot, rank) for slot, _, _ in runs)
        is_whole = parts == (1.0,) and all(count == 1 for _, count in pieces[0])
        taking = Taking(message, self._specs[message], runs, parts, pieces, is_whole)
        for slot in dict.fromkeys(slot for slot, _, _ in runs):
            if slot in self._last:
                self._last[slot].frees.remove(slot)
            self._last[slot] = taking
            taking.frees.append(slot)
        return taking

    def _pieces(self, message: Message, slot: int, rank: int) -> tuple[tuple[int, int], ...]:
        """[tensor] which part of the sequence in a slot a rank is to have, and of how many."""
        if slot not in self._made:
            return ((0, 1),) * len(self._tensors[message])
        return tuple(self._slices[message].piece(name, rank) for name in self._tensors[message])

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


_ALONE = MeshAxis(1, 1)


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The devices among which a tensor's dimensions are cut: samples first, features last, places second of three.

    Along ``pieces`` each device has an early and a late piece of the sequence, which places may cut again.
    """

    samples: MeshAxis = _ALONE
    features: MeshAxis = _ALONE
    places: MeshAxis = _ALONE
    pieces: MeshAxis = _ALONE

    @property
    def axes(self) -> tuple[tuple[str, MeshAxis], ...]:
        """What cuts it, with the axis of the mesh."""
        return tuple((name, getattr(self, name)) for name in _DIMENSION)


_DIMENSION = {"samples": 0, "pieces": 1, "places": 1, "features": -1}

WHOLE_TENSOR = TensorLayout()
"""On every device."""


def _nobody(axis: MeshAxis) -> Shards:
    """The place of a device that is alone on every axis."""
    return Shards()


@dataclass(frozen=True, slots=True)
class StageLayouts:
    """How the blocks of a stage take and give tensors on one rank; those that are not named, whole.

    ``place`` is that of this rank among those that stand along an axis, with which it can exchange; ``divided`` are
    blocks that take slices of the sequence of other blocks, but what they take of the mini-batch whole; ``streams`` are
    how many sequences a block's output has, one behind the other. Of every sequence of the mini-batch this rank has the
    pieces that ``context`` says, and all that blocks give each other is of these.
    """

    taken: Mapping[str, TensorLayout] = field(default_factory=dict)
    given: Mapping[str, TensorLayout] = field(default_factory=dict)
    divided: frozenset[str] = frozenset()
    place: Callable[[MeshAxis], Shards] = _nobody
    streams: Callable[[str], int] = lambda _: 1
    context: Shards = WHOLE

    @classmethod
    def of(cls, part: StagePart, model: Model, along: Callable[[tuple[int, ...]], Shards]) -> StageLayouts:
        """As the meshes of the stage's blocks say; ``along`` is the place of this rank in a line of ranks."""
        taken, given, divided = {}, {}, set[str]()
        for block, share, mesh in zip(part.blocks, part.shares, part.meshes, strict=True):
            places = mesh.axis(PLACES)
            places, pieces = (_ALONE, places) if model.in_pieces(block, mesh) else (places, _ALONE)
            if model.divides(share):
                places = mesh.axis(SHARDS)
                divided.add(block)
            takes, gives = (_ALONE if name is None else mesh.axis(name) for name in model.slices_of(share))
            taken[block] = TensorLayout(mesh.of_samples, takes, places, pieces)
            is_loss = block in divided and model.block(block).loss  # which is the same on all of them
            given[block] = TensorLayout(mesh.of_samples, gives, _ALONE if is_loss else places, pieces)
        context = along(part.context) if part.context else WHOLE
        return cls(taken, given, frozenset(divided), lambda axis: along(part.line(axis)), model.streams_of, context)

    def in_slices(self, count: int, shards: int) -> TensorLayout:
        """A tensor of whose slices each of so many shards has one: neighbours the same, if there are fewer."""
        return replace(WHOLE_TENSOR, places=MeshAxis(count, shards // count)) if count > 1 else WHOLE_TENSOR

    def entering(self, takers: Sequence[str]) -> TensorLayout:
        """How a tensor that enters the stage is kept for these blocks: divided along the sequence if all take it so."""
        found = {self.taken[block] if block in self.divided else WHOLE_TENSOR for block in takers}
        (only,) = found if len(found) == 1 else (WHOLE_TENSOR,)
        return only if only.samples.size == only.pieces.size == 1 else WHOLE_TENSOR

    def sharers(self, block: str) -> Shards:
        """This rank's place among those that share the samples that the block runs on."""
        samples = self.taken.get(block, WHOLE_TENSOR).samples
        return WHOLE if samples.size == 1 else self.place(samples)

    def rows(self, block: str, own: Numbers) -> Numbers:
        """Those of a micro-batch's samples that this rank runs the block on."""
        samples = self.taken.get(block, WHOLE_TENSOR).samples
        if samples.size == 1:
            return own
        begin, end = self.place(samples).range(len(own))
        return own[begin:end]

    def sample(self, block: str, rows: Tensor) -> Tensor:
        """What a block takes of a tensor of the mini-batch, whose rows are this rank's; indices have no features."""
        layout, rows = self.taken.get(block, WHOLE_TENSOR), own_pieces(rows, self.context)
        if layout == WHOLE_TENSOR:
            return rows
        rows = own_pieces(rows, self.place(layout.pieces))
        divides = layout.places.size > 1 and block not in self.divided
        mine = self.place(layout.places).sliced(rows, 1) if divides else rows
        return self.place(layout.features).sliced(mine) if rows.is_floating_point() else mine

    def summed(self, block: str, loss: Tensor) -> Tensor:
        """The loss of all samples and places, of the losses of each device's."""
        layout = self.given.get(block, WHOLE_TENSOR)
        if layout == WHOLE_TENSOR:
            return loss
        for axis in (layout.samples, layout.pieces, layout.places):
            loss = self.place(axis).summed(loss)
        return loss

    def converted(
        self, block: str, tensor: Tensor, source: TensorLayout, target: TensorLayout, num_samples: int
    ) -> Tensor:
        """A block's output, or its gradient, in another layout: of what differs, slices are exchanged for others, or
        gathered, and cut.

        ``num_samples`` are those of all the replica. What is of one size for any number of samples is not cut among
        those who have some each: its gradient is the sum of theirs.
        """
        if source == target:
            return tensor
        if (
            source.pieces != target.pieces and source.places.size * target.places.size > 1
        ):  # places are cut inside pieces
            ways = source, replace(source, places=_ALONE), replace(target, places=_ALONE), target
            for before, after in pairwise(ways):
                tensor = self.converted(block, tensor, before, after, num_samples)
            return tensor
        ends = zip(source.axes, target.axes, strict=True)
        pairs = [(name, old, new, old.shared(new)) for (name, old), (_, new) in ends]
        given = {name: old.without(kept) for name, old, _, kept in pairs if old.size > kept}
        taken = {name: new.without(kept) for name, _, new, kept in pairs if new.size > kept}
        for_all = source.samples.size == 1 and (not tensor.ndim or tensor.shape[0] != num_samples)
        if for_all and "samples" in taken:
            tensor = self.place(taken.pop("samples")).shared(tensor)
        streams = self.streams(block)
        for gone, come in _exchanges(given, taken) if streams == 1 else ():
            axis = given.pop(gone)
            found = self.place(axis).exchanged(_towards(come, tensor, axis), _DIMENSION[come], _DIMENSION[gone])
            tensor = _from(gone, found, axis)
            del taken[come]
        for name, axis in given.items():
            parts = streams if name == "places" else 1
            tensor = _from(name, self.place(axis).gathered(tensor, _DIMENSION[name], parts), axis)
        for name, axis in taken.items():
            parts = streams if name == "places" else 1
            tensor = self.place(axis).sliced(_towards(name, tensor, axis), _DIMENSION[name], parts)
        return tensor


def _towards(name: str, tensor: Tensor, axis: MeshAxis) -> Tensor:
    """What is about to be cut, with what each device gets behind what the one before it does."""
    return by_device(tensor, axis.size) if name == "pieces" else tensor


def _from(name: str, tensor: Tensor, axis: MeshAxis) -> Tensor:
    """What has come of devices, one's behind another's, in its order."""
    return in_order(tensor, axis.size) if name == "pieces" else tensor


def _exchanges(given: Mapping[str, MeshAxis], taken: Mapping[str, MeshAxis]) -> list[tuple[str, str]]:
    """What gives up the axis that something else is to be cut along, where nothing else happens to both."""
    return [
        (gone, come)
        for gone, old in given.items()
        for come, new in taken.items()
        if old == new and gone not in taken and come not in given
    ]
