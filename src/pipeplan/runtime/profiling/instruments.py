"""Instruments: how long some work takes undisturbed, and how much memory tensors hold while it runs."""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from pipeplan.errors import ExecutionError, FileError, InfeasibleError
from pipeplan.runtime.parallel.device import Clock

T = TypeVar("T")

_FEW = 6
"""With fewer runs than this, drift and outliers cannot be seen."""
_FAR = 3.0
"""Tukey's fences for what is far out: interquartile ranges beyond the quartiles."""


def timed(work: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """What some work returns, and how long it takes in ns: by the processor's clock, or by events on the device."""
    clock = Clock(device)
    began = clock.anchor()
    result = work()
    end = clock.mark()
    clock.anchor()  # waits until the stream has passed the mark
    return result, clock.resolve(end, began) - began[1]


def spread_of(values: Sequence[int]) -> float:
    """Interquartile range divided by the median; 0 for a single value."""
    median = statistics.median(values)
    if len(values) < 2 or median == 0:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return round((high - low) / median, 4)


def mean_of_middle(values: Sequence[float]) -> float:
    """The mean without the lowest and the highest quarter: of times that add up, but for what disturbed a few."""
    left_out = len(values) // 4
    return statistics.fmean(sorted(values)[left_out : len(values) - left_out])


def drift_of(values: Sequence[int]) -> float:
    """How much the median of the second half is above that of the first, relative to it; 0 for few values."""
    if len(values) < _FEW:
        return 0.0
    half = len(values) // 2
    before, after = statistics.median(values[:half]), statistics.median(values[-half:])
    return after / before - 1 if before > 0 else 0.0


def num_outliers(values: Sequence[int]) -> int:
    """How many values are far above the others; 0 for few values."""
    if len(values) < _FEW:
        return 0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return sum(value > high + _FAR * (high - low) for value in values)


_IS_STEADY: ContextVar[bool] = ContextVar("_IS_STEADY", default=False)


@contextmanager
def steady(device: torch.device) -> Iterator[None]:
    """No garbage collection but between rounds, and only of what came since, or since the caller's own freeze."""
    inside = _IS_STEADY.get()  # then the count is not asked for, which goes through all that is frozen
    was_enabled, was_frozen = gc.isenabled(), inside or gc.get_freeze_count() > 0
    gc.collect()
    if not was_frozen:
        gc.freeze()
    gc.disable()
    token = _IS_STEADY.set(True)
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield
    finally:
        _IS_STEADY.reset(token)
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """Say what failed, by block and size. Raises InfeasibleError where memory ran out, else ExecutionError."""
    try:
        yield
    except FileError:  # the disk, not the block
        raise
    except Exception as error:
        if _is_out_of_memory(error):
            raise InfeasibleError(
                f"memory ran out for {what}: {error}; leave the size out of --microbatch, or lower --sequence"
            ) from error
        remedy = (
            "change the block, or leave the size out of --microbatch (batch normalisation, for one, needs 2 samples or "
            "more)"
        )
        if "dtype" in str(error):
            remedy = (
                "change the block; or, of --granularity operator, whose operators convert to float32 where the "
                "captured model does, give --dtype float32, or --granularity half or layer"
            )
        raise ExecutionError(f"{what} failed: {type(error).__name__}: {error}; it would again: {remedy}") from error


def _is_out_of_memory(error: Exception) -> bool:
    """CUDA has an error of its own; the CPU allocator raises a RuntimeError like any other."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of every storage of the tensors, each once, by its identity. Views count for the whole they show."""
    found = (tensor.untyped_storage() for tensor in tensors)  # fake tensors have storages, too, but no addresses
    return {storage._cdata: storage.nbytes() for storage in found if storage.nbytes() > 0}


@contextmanager
def saved_tensors() -> Iterator[Callable[[], list[Tensor]]]:
    """Note what autograd saves inside; gives a function that lists what of it still waits for its backward."""
    seen: list[weakref.ref[Tensor]] = []

    def note(tensor: Tensor) -> Tensor:
        alias = tensor.detach()  # an output that its own graph holds on to would never be let go of
        seen.append(weakref.ref(alias))
        return alias

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield lambda: [tensor for reference in seen if (tensor := reference()) is not None]


@dataclass(frozen=True, slots=True)
class Usage:
    """Allocated bytes when a phase began and at most until it ended, counted from when the meter was entered."""

    start: int
    peak: int


class Meter(Protocol):
    """Watches an allocator while it is entered; ``usage`` [phase] is there after it is left."""

    usage: dict[str, Usage]

    def __enter__(self) -> Meter:
        """Begin to count."""
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop counting."""
        return

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Name what runs inside."""


def meter_for(device: torch.device) -> Meter:
    """A meter of the allocator of a device."""
    return _CudaMeter(device) if device.type == "cuda" else _CpuMeter()


_ON_CPU = 0


class _CpuMeter:
    """Reads allocations from the trace of torch's profiler, so that it sees what operators take for themselves.

    What is allocated inside must also be released inside: the profiler knows no sizes of what it did not see made.
    """

    _PREFIX = "pipeplan:"

    def __init__(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes to stderr at start and stop otherwise
        self._profiler: Any = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )
        self.usage: dict[str, Usage] = {}

    def __enter__(self) -> Meter:
        self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profiler.__exit__(*error)
        if error[1] is None:
            self.usage = self._read()

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Name what runs inside."""
        return torch.profiler.record_function(self._PREFIX + name)

    def _read(self) -> dict[str, Usage]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            try:
                self._profiler.export_chrome_trace(str(path))
                events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
            except (OSError, ValueError) as error:  # torch says nothing where it cannot write, or not all of it
                raise FileError(
                    f"{path.parent.parent}: what torch's profiler saw cannot be written there; make room, or name "
                    "another folder with TMPDIR"
                ) from error
        memory = [event for event in events if event["name"] == "[memory]" and event["args"]["Device Type"] == _ON_CPU]
        changes = sorted(((event["ts"], event["args"]["Bytes"]) for event in memory), key=lambda change: change[0])
        return {
            event["name"].removeprefix(self._PREFIX): _between(changes, event["ts"], event["ts"] + event["dur"])
            for event in events
            if event["name"].startswith(self._PREFIX)
        }


def _between(changes: Iterable[tuple[float, int]], begin: float, end: float) -> Usage:
    """Bytes in use from one time to another, from changes in the order of time."""
    in_use, start, peak = 0, 0, 0
    for at, change in changes:
        if at > end:
            break
        in_use += change
        if at < begin:
            start = peak = in_use
        peak = max(peak, in_use)
    return Usage(start, peak)


class _CudaMeter(Meter):
    """Reads the statistics of the caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.usage: dict[str, Usage] = {}
        torch.cuda.synchronize(device)
        self._base = torch.cuda.memory_allocated(device)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what runs inside."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        start = torch.cuda.memory_allocated(self.device)
        yield
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        self.usage[name] = Usage(start - self._base, peak - self._base)
