"""All benches of a measurement, which take turns: each runs once per round, and results are saved to a file."""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from pipeplan.errors import FileError, InfeasibleError, UsageError
from pipeplan.files import File, parse, write_elsewhere, write_text
from pipeplan.files.base import CurrentVersion, current_version
from pipeplan.files.read_write import read_bytes
from pipeplan.runtime.models.shapes import outputs_of
from pipeplan.runtime.profiling.benches import Bench, KeptRow, RowKey
from pipeplan.runtime.profiling.build_profile import BlockNode, Kind, ModelShare, kinds_of
from pipeplan.runtime.profiling.instruments import Meter, blamed, meter_for
from pipeplan.workload.elements import Items, Name, Text

Progress = Callable[[int, int, str], None]
"""Called before each run with the runs done, all runs, and what runs now."""

_ADAPTIVE = 5
"""At most this multiple of the runs asked for, where times are unsteady."""


@dataclass(frozen=True, slots=True)
class RunCounts:
    """Timed runs of each bench, runs to warm up before, and the spread above which more are made, if any."""

    repeats: int
    warmup: int
    max_spread: float | None = None


@dataclass(slots=True)
class RunCounter:
    """Counts the runs, for progress callbacks."""

    progress: Progress | None
    total: int
    done: int = 0

    def begin(self, what: str) -> None:
        """Note a run before it begins."""
        if self.progress is not None:
            self.progress(self.done, max(self.total, self.done + 1), what)
        self.done += 1


@dataclass(slots=True)
class Benches:
    """All that is measured: a bench per kind and size, also recomputed if asked. ``beside`` are called once a round."""

    splits: Sequence[ModelShare]
    recompute: bool
    dtype: torch.dtype
    device: torch.device
    seed: int
    partial: UnfinishedProfile
    beside: Sequence[Callable[[bool], None]] = ()
    meter: Callable[[torch.device], Meter] = meter_for
    bench: Callable[..., Bench] = Bench
    all: list[Bench] = field(default_factory=list)
    kinds: Mapping[Hashable, Kind] = field(init=False)
    _modules: dict[Kind, nn.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kinds = kinds_of(self.splits)

    @property
    def num_of_size(self) -> int:
        """How many there are of each size."""
        measured = {
            self.kinds[block.likeness]
            for split in self.splits
            for block in split.graph.blocks
            if self._is_measured(split, block)
        }
        return len(measured) * (1 + self.recompute)

    @staticmethod
    def _is_measured(split: ModelShare, block: BlockNode) -> bool:
        """Of a model with some of the experts only blocks that have some: the others are there for what these take."""
        return split.expert == 1 or block.experts > 0

    def fill(self, sizes: Sequence[int], rounds: RunCounter) -> str | None:
        """Build a bench for every kind and size and measure its memory. Returns why sizes are missing, if some are."""
        for size in sizes:
            rows: list[Bench] = []
            try:
                for bench in self._of_size(size):
                    rounds.begin(bench.key.label)
                    self._measure_memory(bench)
                    rows.append(bench)
            except InfeasibleError as error:
                if not self.all:
                    raise
                return str(error)
            self.all += rows
        return None

    def _measure_memory(self, bench: Bench) -> None:
        """Measure and keep a bench's memory, or take memory and times from what was kept."""
        kept = self.partial.row(bench.key)
        if kept is None:
            bench.measure_memory()
            self.partial.put(bench.kept())
        else:
            bench.take_up(kept)

    def time(self, runs: RunCounts, rounds: RunCounter) -> str | None:
        """Run all benches in turns until each has its times. Returns why sizes are missing, if some are."""
        missing = None
        plans = {id(bench): bench.runs_left(runs.repeats, runs.warmup) for bench in self.all}
        for count in range(max(plans.values(), default=0)):
            turn = [bench for bench in self.all if count < plans[id(bench)]]
            missing = self._round(turn, rounds, keep=count >= runs.warmup) or missing
        for _ in range((_ADAPTIVE - 1) * runs.repeats if runs.max_spread is not None else 0):
            turn = [bench for bench in self.all if bench.is_unsteady(runs.max_spread or 0.0)]
            if not turn:
                break
            missing = self._round(turn, rounds, keep=True) or missing
        return missing

    def _round(self, turn: Sequence[Bench], rounds: RunCounter, *, keep: bool) -> str | None:
        missing = None
        gc.collect()
        for take_turn in self.beside:
            take_turn(keep)
        for bench in turn:
            if bench in self.all:
                rounds.begin(bench.key.label)
                missing = self._time(bench, keep=keep) or missing
        if self.partial.is_due:
            self.keep()
            self.partial.save()
        return missing

    def _time(self, bench: Bench, *, keep: bool) -> str | None:
        try:
            bench.time(keep=keep)
        except InfeasibleError as error:
            fitting = [other for other in self.all if other.key.size < bench.key.size]
            if not fitting:
                raise
            self.all = fitting
            return str(error)
        return None

    def keep(self) -> None:
        """Pass what all benches have measured so far to the partial profile."""
        for bench in self.all:
            self.partial.put(bench.kept())

    def _of_size(self, size: int) -> Iterator[Bench]:
        """Run the kinds one after another, each on what those before it made, for inputs as they really are."""
        outputs: dict[Kind, tuple[Tensor, ...]] = {}
        for split in self.splits:
            batch = split.model.mini_batch(size, 0, self.seed, dtype=self.dtype, device=self.device)
            kind_of = {block.spec.id: self.kinds[block.likeness] for block in split.graph.blocks}
            for block in split.graph.blocks:
                kind = (split.shards, split.context, split.expert, block.spec.id)
                if kind_of[block.spec.id] != kind:
                    continue
                key = RowKey(block.spec.id, size, split.shards, context=split.context, expert=split.expert)
                with blamed(key.label):
                    inputs = _inputs(block, outputs, kind_of)
                    samples = tuple(batch[name] for name in block.spec.samples)
                    outputs[kind] = self._outputs(split, block, (*inputs, *samples))
                    gradients = self._gradients(block, outputs[kind])
                if not self._is_measured(split, block):
                    continue
                own = (inputs, block.input_needs_grad, samples, gradients, self.device, self.meter)
                for each in (key, replace(key, recompute=True))[: 1 + self.recompute]:
                    yield self.bench(each, self._modules[kind], *own)

    def _outputs(self, split: ModelShare, block: BlockNode, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        kind, id_ = (split.shards, split.context, split.expert, block.spec.id), block.spec.id
        if kind not in self._modules:
            self._modules[kind] = split.model.build(id_, self.seed, dtype=self.dtype, device=self.device)
        with torch.no_grad():
            made = outputs_of(self._modules[kind](*arguments))
        if made is None:
            raise TypeError("it returned neither a tensor nor a tuple of tensors, unlike on the meta device")
        return made

    def _gradients(self, block: BlockNode, outputs: Sequence[Tensor]) -> tuple[tuple[int, Tensor], ...]:
        """What backward starts from: ones for a loss, or noise, since numbers close to zero can be slow."""
        return tuple(
            (index, torch.ones_like(outputs[index]) if block.spec.loss else self._noise(outputs[index]))
            for index in block.roots
            if outputs[index].is_floating_point()
        )

    def _noise(self, output: Tensor) -> Tensor:
        if output.is_meta:
            return torch.empty_like(output)
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(output.shape, generator=generator).to(output.device, output.dtype)


def _inputs(
    block: BlockNode, outputs: Mapping[Kind, Sequence[Tensor]], kind_of: Mapping[str, Kind]
) -> tuple[Tensor, ...]:
    """What the block takes of its sources: tensors of their own, though blocks that are alike are run once."""
    found: dict[tuple[str, int], Tensor] = {}
    for source, index in block.spec.inputs:
        tensor = outputs[kind_of[source]][index]
        is_taken = any(tensor is other for name, other in found.items() if name != (source, index))
        found.setdefault((source, index), tensor.clone() if is_taken else tensor)
    return tuple(found[each] for each in block.spec.inputs)


_SAVE_EVERY_S = 5.0
"""A crash loses no more than this; writing more often would disturb what is measured."""


class _UnfinishedFile(File):
    """The file: what was asked for, and the rows so far."""

    schema_version: Annotated[int, CurrentVersion("partial-profile")] = current_version("partial-profile")
    kind: Literal["partial-profile"] = "partial-profile"
    question: dict[Name, Text]
    rows: Items[KeptRow] = ()


class UnfinishedProfile:
    """The rows so far, by what was measured; without a path they are in no file.

    ``path`` is where they are: ``asked``, or a temporary file once that can no longer be written.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = self.asked = None if path is None else Path(path)
        self._question: dict[str, str] = {}
        self._rows: dict[RowKey, KeptRow] = {}
        self._saved_s = time.monotonic()

    def open(self, question: Mapping[str, str]) -> None:
        """Load what the file has, if there is one; ``question`` names everything the measurements depend on.

        Raises UsageError where the file is of another question, and FileError.
        """
        self._question = dict(question)
        if self.path is None or not self.path.exists():
            return
        found = self._read(self.path)
        for name in dict.fromkeys([*question, *found.question]):
            before, now = found.question.get(name, "nothing"), question.get(name, "nothing")
            if before != now:
                raise UsageError(
                    f"{self.path} has a measurement that has not ended, with {name} {before}, and now it is {now}; "
                    "ask for the same to go on with it, delete it to start anew, or choose another file with -o"
                )
        self._rows = {row.key: row for row in found.rows}

    @staticmethod
    def _read(path: Path) -> _UnfinishedFile:
        content = read_bytes(str(path))
        try:
            return parse(content, _UnfinishedFile, str(path))
        except FileError as error:
            raise FileError(f"{path}: not what an interrupted measurement keeps; delete it", error.problems) from None

    def row(self, key: RowKey) -> KeptRow | None:
        """What is kept of it."""
        return self._rows.get(key)

    def put(self, row: KeptRow) -> None:
        """Keep a row in place of the one before of the same key."""
        self._rows[row.key] = row

    @property
    def is_due(self) -> bool:
        """Whether the file is to be written again while measuring."""
        return self.path is not None and time.monotonic() - self._saved_s >= _SAVE_EVERY_S

    def save(self) -> None:
        """Write the file atomically, if there is something to keep; elsewhere, with a warning, where that fails."""
        if self.path is not None and self._rows:
            file = _UnfinishedFile(question=self._question, rows=tuple(self._rows.values()))
            text = file.model_dump_json() + "\n"
            try:
                write_text(text, str(self.path))
            except FileError as error:
                kept = write_elsewhere(text, str(self.asked))
                self.path = Path(kept) if kept else self.path
                warnings.warn(f"{error}; what is measured is kept in {kept or 'no file'} from now on", stacklevel=2)
        self._saved_s = time.monotonic()

    def remove(self) -> None:
        """Delete the file: the profile has been written."""
        for path in filter(None, {self.asked, self.path}):
            with contextlib.suppress(OSError):
                path.unlink()
