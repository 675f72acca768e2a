"""Checkpoints: everything that training resumes from, in a form that does not depend on the plan.

Tensors are kept by ``torch.distributed.checkpoint`` under names of the model: ``parameters/BLOCK.NAME``,
``optimizer/BLOCK.NAME/STATE``, ``buffers/BLOCK.NAME``; tied parameters have the first of their names. What ranks have
copies of is written once, and shares of split parameters as those pieces of the whole that they are.
The rest (steps done, learning rates, what the training is) is one small file that rank 0 writes; another has checksums.
Where all this lies, and how it is read, is in :mod:`~pipeplan.runtime.training.checkpoint_folder`.

torch's own planners take whole tensors, or pieces that are DTensors, which ours are not (see
:mod:`~pipeplan.runtime.parallel.sharding`): the two planners here say which pieces there are, and the rest is torch's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipeplan.errors import UsageError
from pipeplan.runtime.executor.process_groups import AllRanks
from pipeplan.runtime.launch.status import Cause, Phase, Progress, RankError, lost_others, tell
from pipeplan.runtime.parallel.sharding import ParameterPart
from pipeplan.runtime.training.checkpoint_folder import (
    REST,
    CheckpointFolder,
    DamagedFileError,
    PlainReader,
    digests_of,
    metadata_of,
    require_checksums,
    rest_of,
    undamaged,
    unusable,
    write_checksums,
)
from pipeplan.runtime.training.compatibility import require_identity
from pipeplan.runtime.training.master_copies import LossScale

_PARAMETERS, _OPTIMIZER, _BUFFERS = "parameters/", "optimizer/", "buffers/"


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What one rank trains; ``buffers`` are by ``BLOCK.NAME``, ``identity`` is what the training is.

    A rank without parameters has neither optimizer nor schedule.
    """

    parameters: Sequence[OwnedParameter]
    buffers: Mapping[str, Tensor]
    optimizer: Optimizer | None
    schedule: LRScheduler | None
    identity: Mapping[str, object]
    scale: LossScale | None = None


class Checkpoints:
    """Writes and reads one rank's part of checkpoints, which lie in one folder for all ranks; both are collective."""

    def __init__(self, folder: CheckpointFolder, held: TrainingState, all_ranks: AllRanks, progress: Progress) -> None:
        self._folder, self._held, self._all_ranks, self._progress = folder, held, all_ranks, progress

    def begin(self, resume: bool) -> int:
        """Resume from the last complete checkpoint, if there is one; the number of steps done. Raises UsageError."""
        self._progress.begin(Phase.RESUMING)
        refused, last = self._all_ranks.gather(self._taken() if self._progress.rank == 0 else ("", None))[0]
        if refused:
            raise UsageError(refused)
        if resume and last is None:
            raise UsageError(f"--resume: {self._folder.path} has no whole checkpoint; leave --resume out to start")
        if not resume and last is not None:
            raise UsageError(f"{self._folder.path} has {self._folder.of(last).name}; give --resume, or another folder")
        return 0 if last is None else self._load(last)

    def _taken(self) -> tuple[str, int | None]:
        """Why the folder cannot be had for this training, or nothing; and the last whole checkpoint there."""
        try:
            self._folder.make()
            self._folder.lock()
        except UsageError as error:
            return str(error), None
        return "", max(self._folder.whole(), default=None)

    def close(self) -> None:
        """Let others train into the folder."""
        self._folder.unlock()

    def save(self, step: int) -> None:
        """Write the state after a number of steps; when this returns, it is on the disk. Raises RankError."""
        self._progress.begin(Phase.SAVING)
        states = self._optimizer_states()
        pieces, numbers = self._pieces(states, all_held=False), self._numbers(states)
        with self._written(step):
            if self._progress.rank == 0:
                self._folder.begin(step)
            gathered = self._all_ranks.gather((self._schedule(), numbers))
            with lost_others(self._progress):
                writer = FileSystemWriter(self._folder.part(step))
                save(_first_of(pieces), storage_writer=writer, planner=ChunkSavePlanner(pieces))
            part = self._folder.part(step)
            own = digests_of(part, [each.name for each in part.glob(f"__{self._progress.rank}_*")])
            digests = self._all_ranks.gather(own)
            if self._progress.rank == 0:
                self._write_rest(step, gathered)
                write_checksums(part, {name: each for found in digests for name, each in found.items()})
                self._folder.publish(step)
                tell(f"checkpoint {self._folder.of(step)} written")
            with lost_others(self._progress):
                dist.barrier()

    @contextmanager
    def _written(self, step: int) -> Iterator[None]:
        """Say who could not write what."""
        where = f"could not write {self._folder.of(step)}"
        try:
            yield
        except CheckpointException as error:
            rank, (reason, _) = min(error.failures.items())
            raise RankError(Cause.RAISED, f"rank {rank} {where}: {type(reason).__name__}: {reason}") from error
        except OSError as error:
            raise RankError(Cause.RAISED, f"rank {self._progress.rank} {where}: {error}") from error

    def _pieces(self, states: Sequence[Mapping[str, Any]], *, all_held: bool) -> dict[str, list[ParameterChunk]]:
        """Where tensors lie, or go: of buffers, parameters and optimizer ``states``; all, or those this rank stores."""
        pieces = {_BUFFERS + name: [whole_chunk(buffer)] for name, buffer in self._held.buffers.items()}
        for owned, state in zip(self._held.parameters, states, strict=True):
            if owned.stored or all_held:
                named = {f"{_OPTIMIZER}{owned.name}/{key}": value for key, value in state.items()}
                for name, value in {_PARAMETERS + owned.name: owned.parameter.detach(), **named}.items():
                    if isinstance(value, Tensor) and (found := owned.pieces(value)):
                        pieces.setdefault(name, []).extend(found)
        return pieces

    def _numbers(self, states: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """What optimizers keep of this rank's parameters beside tensors."""
        return {
            owned.name: {key: value for key, value in state.items() if not isinstance(value, Tensor)}
            for owned, state in zip(self._held.parameters, states, strict=True)
            if owned.stored
        }

    def _optimizer_states(self) -> list[dict[str, Any]]:
        """What the optimizer keeps of each parameter."""
        optimizer = self._held.optimizer
        states = {} if optimizer is None else optimizer.state
        return [states.get(owned.parameter, {}) for owned in self._held.parameters]

    def _schedule(self) -> tuple[list[dict[str, Any]], dict[str, Any]] | None:
        """What every rank's optimizer is set to, and where its schedule is; None on a rank that has none."""
        optimizer, schedule = self._held.optimizer, self._held.schedule
        if optimizer is None or schedule is None:
            return None
        groups = optimizer.state_dict()["param_groups"]
        return [{k: v for k, v in group.items() if k != "params"} for group in groups], schedule.state_dict()

    def _write_rest(self, step: int, gathered: list[tuple[Any, dict[str, dict[str, Any]]]]) -> None:
        schedule = next((each for each, _ in gathered if each is not None), None)
        numbers = {name: state for _, states in gathered for name, state in states.items()}
        rest = {"step": step, "identity": dict(self._held.identity), "schedule": schedule, "numbers": numbers}
        rest |= {"checksums": True, "scale": None if self._held.scale is None else self._held.scale.state()}
        with (self._folder.part(step) / REST).open("wb") as file:
            torch.save(rest, file)
            file.flush()
            os.fsync(file.fileno())

    def _load(self, step: int) -> int:
        path = self._folder.of(step)
        self._require_unchanged(step)
        with undamaged(self._folder, step):
            rest, metadata = rest_of(path, REST, step), metadata_of(path)
        require_identity(path, rest["identity"], self._held.identity)
        kept = {
            name: tensor
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        self._require_same(path, kept)
        states = [self._room(owned, kept) for owned in self._held.parameters]
        pieces = self._pieces(states, all_held=True)
        with undamaged(self._folder, step), lost_others(self._progress):
            load(_first_of(pieces), storage_reader=PlainReader(path), planner=ChunkLoadPlanner(pieces))
        try:
            self._restore(path, rest, states)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:  # of facts that are others
            first = f"{type(error).__name__}: {error}".partition("\n")[0]
            what = f"{REST}: optimizer and schedule cannot be put where it says: {first}"
            raise UsageError(unusable(self._folder, step, what)) from error
        return step

    def _require_unchanged(self, step: int) -> None:
        """Have the ranks read all files between them, and compare them with their checksums. Raises UsageError."""
        changed = ""
        try:
            require_checksums(self._folder.of(step), self._progress.rank, dist.get_world_size())
        except DamagedFileError as error:
            changed = str(error)
        if found := next(filter(None, self._all_ranks.gather(changed)), None):
            raise UsageError(unusable(self._folder, step, found))

    def _require_same(self, path: Path, kept: Mapping[str, TensorStorageMetadata]) -> None:
        """Refuse a checkpoint of other parameters than all ranks have together."""
        held = self._held
        own = {_PARAMETERS + each.name: _text(each.whole, each.parameter.dtype) for each in held.parameters}
        own |= {_BUFFERS + name: _text(buffer.shape, buffer.dtype) for name, buffer in held.buffers.items()}
        model = {name: text for each in self._all_ranks.gather(own) for name, text in each.items()}
        saved = {name: _text(each.size, each.properties.dtype) for name, each in kept.items()}
        for name in sorted({*saved, *model}):
            if saved.get(name) != model.get(name) and not name.startswith(_OPTIMIZER):
                raise UsageError(
                    f"{path}: {name} is {saved.get(name, 'not there')}, and in the model "
                    f"{model.get(name, 'not there')}; resume with the model it was trained with"
                )

    def _room(self, owned: OwnedParameter, kept: Mapping[str, TensorStorageMetadata]) -> dict[str, Tensor]:
        """Tensors for what the optimizer kept of a parameter."""
        prefix = f"{_OPTIMIZER}{owned.name}/"
        return {
            name.removeprefix(prefix): owned.room(each.size, each.properties.dtype)
            for name, each in kept.items()
            if name.startswith(prefix)
        }

    def _restore(self, path: Path, rest: Mapping[str, Any], states: Sequence[Mapping[str, Tensor]]) -> None:
        """Put optimizer and schedule where they were; torch's optimizers move states to their parameters' device."""
        if self._held.scale is not None:
            self._held.scale.load(rest.get("scale"))
        optimizer, schedule = self._held.optimizer, self._held.schedule
        if optimizer is None or schedule is None:
            return
        groups, of_schedule = rest["schedule"]
        own = optimizer.state_dict()["param_groups"]
        if len(own) != len(groups):
            raise UsageError(f"{path}: the optimizer had {len(groups)} parameter groups, and now has {len(own)}")
        found = {
            id(owned.parameter): {**state, **rest["numbers"].get(owned.name, {})}
            for owned, state in zip(self._held.parameters, states, strict=True)
        }
        order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        optimizer.load_state_dict(
            {
                "state": {index: found[id(each)] for index, each in enumerate(order) if found[id(each)]},
                "param_groups": [{**new, "params": old["params"]} for new, old in zip(groups, own, strict=True)],
            }
        )
        schedule.load_state_dict(of_schedule)


def _first_of(pieces: Mapping[str, Sequence[ParameterChunk]]) -> dict[str, Any]:
    """What torch sees as a state; the planners know that its names are those of pieces."""
    return {name: found[0].tensor for name, found in pieces.items()}


def _text(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


@dataclass(frozen=True, slots=True)
class ParameterChunk:
    """A part of a tensor of shape ``size``, from ``offsets`` on; ``tensor`` may be a view."""

    size: torch.Size
    offsets: torch.Size
    tensor: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Where it lies."""
        return ChunkStorageMetadata(self.offsets, self.tensor.size())


def whole_chunk(tensor: Tensor) -> ParameterChunk:
    """All of a tensor."""
    return ParameterChunk(tensor.size(), torch.Size([0] * tensor.dim()), tensor)


@dataclass(frozen=True, slots=True)
class OwnedParameter:
    """A rank's part of a parameter of shape ``whole``; ``stored`` if this rank is the one to store it.

    ``holder`` is the first block that has it, and its name there. Where replicas divide the part, ``rows`` are the
    first of this rank's, and the part's shape.
    """

    holder: tuple[str, str]
    parameter: nn.Parameter
    whole: torch.Size
    part: ParameterPart
    stored: bool
    rows: tuple[int, torch.Size] | None = None

    @property
    def name(self) -> str:
        """``BLOCK.NAME``."""
        return ".".join(self.holder)

    def pieces(self, tensor: Tensor) -> list[ParameterChunk]:
        """Where the parameter, or an optimizer's state for it, lies; anything else is whole."""
        if tensor.shape != self.parameter.shape:
            return [whole_chunk(tensor)]
        if self.rows is None:
            places = self.part.places(tensor, self.whole)
        else:
            begin, shape = self.rows
            places = list(_rows_of(tensor, begin, self.part.places(torch.empty(shape, device="meta"), self.whole)))
        return [ParameterChunk(self.whole, torch.Size(offsets), each) for offsets, each in places]

    def room(self, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor for this rank's part of what an optimizer kept of the parameter."""
        return torch.empty(self.parameter.shape if size == self.whole else size, dtype=dtype)


def _rows_of(
    rows: Tensor, begin: int, places: Sequence[tuple[list[int], Tensor]]
) -> Iterator[tuple[list[int], Tensor]]:
    """Views of a part's ``rows``, from ``begin`` on, with their offsets in the whole; ``places`` are of all rows."""
    for offsets, view in places:
        width = rows.stride(0)
        row, inner = divmod(int(view.storage_offset()), width)
        first, end = max(begin, row), min(begin + len(rows), row + len(view))
        if first < end:
            at = (first - begin) * width + inner + rows.storage_offset()
            piece = rows.as_strided((end - first, *view.shape[1:]), view.stride(), at)
            yield [offsets[0] + first - row, *offsets[1:]], piece


Pieces = Mapping[str, Sequence[ParameterChunk]]
"""What one rank has, by name."""


class ChunkSavePlanner(DefaultSavePlanner):
    """Writes the pieces that the ranks have; of those that several have, one."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._at = {(name, piece.offsets): piece for name, found in pieces.items() for piece in found}

    def create_local_plan(self) -> SavePlan:
        """What this rank has to write."""
        self.plan = SavePlan([_written(name, piece) for (name, _), piece in self._at.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """A piece's tensor."""
        assert index.offset is not None, "pieces have offsets"
        return self._at[index.fqn, index.offset].tensor


class ChunkLoadPlanner(DefaultLoadPlanner):
    """Reads into the pieces of a rank, however the pieces in the file were cut."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def create_local_plan(self) -> LoadPlan:
        """What this rank has to read."""
        assert self.metadata is not None, "set up by load"
        items = []
        for name, found in self._pieces.items():
            kept = self.metadata.state_dict_metadata[name]
            assert isinstance(kept, TensorStorageMetadata), "only tensors are written"
            items += create_read_items_for_chunk_list(name, kept, [piece.chunk for piece in found])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Where a piece goes."""
        assert index.index is not None, "pieces are numbered"
        return self._pieces[index.fqn][index.index].tensor


def _written(name: str, piece: ParameterChunk) -> WriteItem:
    properties = TensorProperties.create_from_tensor(piece.tensor)
    return WriteItem(
        index=MetadataIndex(name, piece.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(piece.chunk, properties, piece.size),
    )
