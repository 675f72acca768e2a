"""The cores of this machine: each rank's own, and what other processes use of them while something runs here."""

from __future__ import annotations

import os
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

_BUSY = (0, 1, 2, 5, 6)
"""Fields of /proc/stat's first line in which cores work: user, nice, system, interrupts and soft interrupts."""


@dataclass(frozen=True, slots=True)
class OthersUse:
    """Counts from when it is made. Whoever is to be left out has ended by the end: children that were waited for."""

    _busy: float | None = field(default_factory=lambda: _busy_seconds())
    _own: float = field(default_factory=lambda: _own_seconds())
    _since: float = field(default_factory=lambda: time.monotonic())

    def cores(self) -> float | None:
        """Cores that others kept busy on average; None where the system does not say, or too little time is over."""
        busy, seconds = _busy_seconds(), time.monotonic() - self._since
        if busy is None or self._busy is None or seconds < _LEAST_SECONDS:
            return None
        return max(0.0, (busy - self._busy - (_own_seconds() - self._own)) / seconds)


def keep_to_own_cores(rank: int, world_size: int) -> None:
    """Keep this process, and all threads that it will start, on its share of the cores; where each rank gets one.

    Else a thread that has heard of a message waits, where another rank computes on the core that it was woken on, until
    that one's turn is over: milliseconds.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= world_size:
            os.sched_setaffinity(0, cores[rank * len(cores) // world_size : (rank + 1) * len(cores) // world_size])


def most_resident_bytes() -> int:
    """The most memory that this process has had resident.

    Not what getrusage says where the system has better: what was resident in a larger parent counts there, too, as the
    process is that one's copy until it starts its own program.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):  # not Linux
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


_LEAST_SECONDS = 0.2
"""The system counts in hundredths of a second."""


def _busy_seconds() -> float | None:
    """Busy time of all cores since the machine started."""
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:  # not Linux
        return None
    return sum(float(first[1 + each]) for each in _BUSY) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])
