"""How much memory tensors hold, and how much is in use at most while something runs."""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Meter", "SavedTensors", "Usage", "meter_for", "storages"]


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of every storage behind the tensors, each once, by its identity. Views count for the whole they show."""
    found = (tensor.untyped_storage() for tensor in tensors)  # fake tensors have storages, too, but no addresses
    return {storage._cdata: storage.nbytes() for storage in found if storage.nbytes() > 0}


class SavedTensors:
    """Notes what autograd saves while active; :meth:`alive` are those that it still holds."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[Tensor]] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._note, _as_it_is)

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def alive(self) -> list[Tensor]:
        """What waits for its backward now."""
        return [tensor for reference in self._seen if (tensor := reference()) is not None]

    def _note(self, tensor: Tensor) -> Tensor:
        alias = tensor.detach()  # an output that its own graph holds on to would never be let go of
        self._seen.append(weakref.ref(alias))
        return alias


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop to count."""

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Name what runs inside."""


def meter_for(device: torch.device) -> Meter:
    """A meter of the allocator of a device."""
    return _CudaMeter(device) if device.type == "cuda" else _CpuMeter()


class _CpuMeter:
    """Reads allocations from torch's profiler, whose trace has one event for each and one for each release.

    So it sees what operators take for themselves, which no view of their inputs and outputs does. What is
    allocated inside must also be released inside: the profiler does not know the size of what it did not see made.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profiler.__exit__(kind, error, trace)
        if error is None:
            self.usage = self._read()

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Name what runs inside."""
        return torch.profiler.record_function(self._PREFIX + name)

    def _read(self) -> dict[str, Usage]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]" and _is_cpu(e["args"])]
        changes.sort(key=lambda change: change[0])
        return {
            event["name"].removeprefix(self._PREFIX): _between(changes, event["ts"], event["ts"] + event["dur"])
            for event in events
            if event["name"].startswith(self._PREFIX)
        }


def _is_cpu(event: Mapping[str, Any]) -> bool:
    return bool(event["Device Type"] == 0)


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


class _CudaMeter:
    """Reads the statistics of the caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.usage: dict[str, Usage] = {}
        self._base = 0

    def __enter__(self) -> Meter:
        torch.cuda.synchronize(self.device)
        self._base = torch.cuda.memory_allocated(self.device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

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
