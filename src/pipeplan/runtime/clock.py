"""When actions began and ended: the host's clock on CPU, events of the stream that computes on CUDA."""

from __future__ import annotations

import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["Clock", "Mark", "offset_ns"]

Mark = int | torch.cuda.Event
"""A moment: nanoseconds of the host's clock, or an event that has still to be resolved."""

_ROUNDS = 9


@dataclass(frozen=True, slots=True)
class Clock:
    """Takes marks and turns them into ns of ``time.monotonic_ns`` less ``offset_ns``, one clock for all ranks."""

    device: torch.device
    offset_ns: int = 0

    def mark(self) -> Mark:
        """Now, on the stream that computes."""
        if self.device.type != "cuda":
            return time.monotonic_ns()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has it without types
        event.record(torch.cuda.current_stream(self.device))
        return event

    def anchor(self) -> tuple[Mark, int]:
        """A mark and its time by the host's clock, for :meth:`resolve`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.mark(), time.monotonic_ns()

    def resolve(self, mark: Mark, anchor: tuple[Mark, int]) -> int:
        """The moment of a mark in ns; on CUDA the stream must have passed it."""
        if isinstance(mark, int):
            return mark - self.offset_ns
        first, at_ns = anchor
        assert isinstance(first, torch.cuda.Event)
        passed_ms: float = first.elapsed_time(mark)
        return at_ns + round(passed_ms * 1e6) - self.offset_ns


def offset_ns(rank: int, world_size: int) -> int:
    """How far this rank's host clock is ahead of rank 0's: 0 on the same machine, else from when barriers end.

    A collective of all ranks.
    """
    stamps = []
    for _ in range(_ROUNDS):
        dist.barrier()
        stamps.append(time.monotonic_ns())
    found: list[tuple[str, list[int]]] = [("", [])] * world_size
    dist.all_gather_object(found, (_machine(), stamps))
    if found[rank][0] == found[0][0]:
        return 0
    return round(statistics.median(own - first for own, first in zip(stamps, found[0][1], strict=True)))


def _machine() -> str:
    """Names the machine since its start: within it, all processes share the monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return platform.node()
