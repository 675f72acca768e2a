"""Checkpoints: everything that training goes on from, in a form that knows nothing of the plan.

Tensors are kept by ``torch.distributed.checkpoint`` under names of the model: ``parameters/BLOCK.NAME``,
``optimizer/BLOCK.NAME/STATE``, ``buffers/BLOCK.NAME``. What ranks have copies of has one name and is written once.
The rest (steps done, learning rates, what the training is) is one small file that rank 0 writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from pipeplan.errors import UsageError
from pipeplan.runtime.checkpoint_files import CheckpointFolder
from pipeplan.runtime.failures import Cause, RankError, lost_others
from pipeplan.runtime.optimizing import Updater
from pipeplan.runtime.progress import Phase, Progress
from pipeplan.runtime.together import Together

__all__ = ["Checkpoints", "Held"]

_REST = "rest.pt"
_PARAMETERS, _OPTIMIZER, _BUFFERS = "parameters/", "optimizer/", "buffers/"


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank trains: ``parameters`` and ``buffers`` by ``BLOCK.NAME``, tied ones by the first of their names.

    ``identity`` is what the training is, by the flag that says so: only an equal one can go on from a checkpoint.
    """

    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    updater: Updater
    identity: Mapping[str, object]


class Checkpoints:
    """Writes and reads one rank's part of checkpoints; both are collective.

    Args:
        folder: where they lie, the same for all ranks.
        held: of this rank.
        together: this rank's connection with all others.
        progress: this rank's record.
    """

    def __init__(self, folder: CheckpointFolder, held: Held, together: Together, progress: Progress) -> None:
        self._folder, self._held, self._together, self._progress = folder, held, together, progress

    def begin(self, resume: bool) -> int:
        """Go on from the last whole checkpoint, or start where there is none. Returns the number of steps done.

        Raises:
            UsageError: there is none to go on from, or one that this run would mix with; or it does not fit.
        """
        self._progress.begin(Phase.RESUMING)
        if self._progress.rank == 0:
            self._folder.make()
        last = self._together.everyones(max(self._folder.whole(), default=None))[0]
        if resume and last is None:
            raise UsageError(f"--resume: {self._folder.path} has no whole checkpoint; leave --resume out to start")
        if not resume and last is not None:
            raise UsageError(f"{self._folder.path} has {self._folder.of(last).name}; give --resume, or another folder")
        return 0 if last is None else self._load(last)

    def save(self, step: int) -> None:
        """Write the state behind so many steps; when this returns, it is on the disk.

        Raises:
            RankError: a rank could not write, or is gone.
        """
        self._progress.begin(Phase.SAVING)
        tensors, numbers = self._state()
        with self._written(step):
            if self._progress.rank == 0:
                self._folder.begin(step)
            told = self._together.everyones((self._schedule(), numbers))
            with lost_others(self._progress):
                save(tensors, storage_writer=FileSystemWriter(self._folder.part(step)))
            if self._progress.rank == 0:
                self._write_rest(step, told)
                self._folder.publish(step)
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

    def _state(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        """Tensors by their names, and what optimizers keep of parameters beside tensors."""
        held = self._held
        tensors = {_PARAMETERS + name: parameter.detach() for name, parameter in held.parameters.items()}
        tensors |= {_BUFFERS + name: buffer for name, buffer in held.buffers.items()}
        numbers: dict[str, dict[str, Any]] = {}
        for name, state in self._optimizer_states():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"{_OPTIMIZER}{name}/{key}"] = value
                else:
                    numbers.setdefault(name, {})[key] = value
        return tensors, numbers

    def _optimizer_states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._held.updater.optimizer is not None:
            states = self._held.updater.optimizer.state_dict()["state"]
            names = self._order()
            yield from ((names[index], state) for index, state in states.items())

    def _order(self) -> list[str]:
        """Names of the parameters as the optimizer numbers them."""
        assert self._held.updater.optimizer is not None
        names = {id(parameter): name for name, parameter in self._held.parameters.items()}
        return [names[id(each)] for group in self._held.updater.optimizer.param_groups for each in group["params"]]

    def _schedule(self) -> tuple[list[dict[str, Any]], dict[str, Any]] | None:
        """What every rank's optimizer is set to, and where its schedule is; None on a rank that has none."""
        updater = self._held.updater
        if updater.optimizer is None or updater.schedule is None:
            return None
        groups = updater.optimizer.state_dict()["param_groups"]
        return [{k: v for k, v in group.items() if k != "params"} for group in groups], updater.schedule.state_dict()

    def _write_rest(self, step: int, told: list[tuple[Any, dict[str, dict[str, Any]]]]) -> None:
        schedule = next((each for each, _ in told if each is not None), None)
        numbers = {name: state for _, states in told for name, state in states.items()}
        rest = {"step": step, "identity": dict(self._held.identity), "schedule": schedule, "numbers": numbers}
        with (self._folder.part(step) / _REST).open("wb") as file:
            torch.save(rest, file)
            file.flush()
            os.fsync(file.fileno())

    def _load(self, step: int) -> int:
        path = self._folder.of(step)
        rest = torch.load(path / _REST, weights_only=True)
        _require_identity(path, rest["identity"], self._held.identity)
        reader = FileSystemReader(path)
        kept = {
            name: tensor
            for name, tensor in reader.read_metadata().state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        state = self._targets(path, kept)
        with lost_others(self._progress):
            load(state, storage_reader=reader)
        self._restore(path, rest, state)
        return int(rest["step"])

    def _targets(self, path: Path, kept: Mapping[str, TensorStorageMetadata]) -> dict[str, Tensor]:
        """Where tensors go: parameters and buffers as they stand, and room for what the optimizer keeps of them."""
        held = self._held
        found = {_PARAMETERS + name: parameter.detach() for name, parameter in held.parameters.items()}
        found |= {_BUFFERS + name: buffer for name, buffer in held.buffers.items()}
        own = {name: _text(tensor.shape, tensor.dtype) for name, tensor in found.items()}
        _require_same(path, kept, {k: v for each in self._together.everyones(own) for k, v in each.items()})
        for name, each in kept.items():
            if name.startswith(_OPTIMIZER) and name.removeprefix(_OPTIMIZER).rpartition("/")[0] in held.parameters:
                found[name] = torch.empty(each.size, dtype=each.properties.dtype)
        return found

    def _restore(self, path: Path, rest: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
        """Put optimizer and schedule where they were; torch's optimizers move states to their parameters' device."""
        optimizer, schedule = self._held.updater.optimizer, self._held.updater.schedule
        if optimizer is None or schedule is None:
            return
        groups, of_schedule = rest["schedule"]
        own = optimizer.state_dict()["param_groups"]
        if len(own) != len(groups):
            raise UsageError(f"{path}: the optimizer had {len(groups)} parameter groups, and now has {len(own)}")
        states = {index: self._state_of(name, rest, state) for index, name in enumerate(self._order())}
        optimizer.load_state_dict(
            {
                "state": {index: each for index, each in states.items() if each},
                "param_groups": [{**new, "params": old["params"]} for new, old in zip(groups, own, strict=True)],
            }
        )
        schedule.load_state_dict(of_schedule)

    def _state_of(self, name: str, rest: Mapping[str, Any], state: Mapping[str, Tensor]) -> dict[str, Any]:
        prefix = f"{_OPTIMIZER}{name}/"
        tensors = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        return {**tensors, **rest["numbers"].get(name, {})}


def _require_identity(path: Path, saved: Mapping[str, object], own: Mapping[str, object]) -> None:
    for flag in own:
        if saved.get(flag) != own[flag]:
            raise UsageError(
                f"{path} was trained with {flag} {saved.get(flag)}, and this run has {flag} {own[flag]}; "
                "resume with the same, or start anew in another folder"
            )


def _require_same(path: Path, kept: Mapping[str, TensorStorageMetadata], model: Mapping[str, str]) -> None:
    """The checkpoint has all that the ranks' blocks have together, in the same shapes and formats, and no more."""
    saved = {
        name: _text(each.size, each.properties.dtype) for name, each in kept.items() if not name.startswith(_OPTIMIZER)
    }
    for name in sorted({*saved, *model}):
        if saved.get(name) != model.get(name):
            raise UsageError(
                f"{path}: {name} is {saved.get(name, 'not there')}, and in the model {model.get(name, 'not there')}; "
                "resume with the model it was trained with"
            )


def _text(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
