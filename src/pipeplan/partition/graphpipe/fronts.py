"""Solutions that no other beats in devices and in both numbers of their need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipeplan.partition.graphpipe.needs import Integers, Need
from pipeplan.partition.graphpipe.shapes import Group
from pipeplan.partition.problem import Way

__all__ = ["Candidates", "Entry", "Front", "Trace"]

_CHUNK = 256


class Entry(NamedTuple):
    """A stage of children begin..end-1 of a series, or of a group of branches; or, without a choice, parts inside.

    A stage of a series with a ``group`` has also the children of that branch of child begin-1 from ``kept`` on;
    ``inside`` are then the stages of what is left of child begin-1.
    """

    begin: int
    end: int
    group: Group
    choice: Way | None
    inside: Trace | None
    kept: int = 0


class Trace(NamedTuple):
    """Entries, the last added first."""

    entry: Entry
    rest: Trace | None


@dataclass(frozen=True, slots=True)
class Candidates:
    """Solutions before any is left out: devices and needs, and how the one with a number came about."""

    devices: Integers
    totals: Integers
    differences: Integers
    trace: Callable[[int], Trace | None]


@dataclass(frozen=True, slots=True)
class Front:
    """Solutions, by devices: what each takes, what it needs of the stages before it, and how."""

    devices: Integers
    totals: Integers
    differences: Integers
    traces: list[Trace | None]

    @classmethod
    def start(cls, need: Need) -> Front:
        """Nothing, before what needs that."""
        return cls(np.array([0]), np.array([need.total]), np.array([need.difference]), [None])

    @classmethod
    def best(cls, candidates: Iterable[Candidates]) -> Front:
        """Those that no other beats; of equals one."""
        parts = [part for part in candidates if len(part.devices)]
        if not parts:
            return cls(*(np.zeros(0, dtype=np.int64),) * 3, [])
        devices = np.concatenate([part.devices for part in parts])
        totals = np.concatenate([part.totals for part in parts])
        differences = np.concatenate([part.differences for part in parts])
        kept = _unbeaten(devices, totals, differences)
        starts = np.cumsum([0, *(len(part.devices) for part in parts)])
        owners = np.searchsorted(starts, kept, side="right") - 1
        within = kept - starts[owners]
        traces = [parts[owner].trace(index) for owner, index in zip(owners.tolist(), within.tolist(), strict=True)]
        return cls(devices[kept], totals[kept], differences[kept], traces)

    def need(self, index: int) -> Need:
        """What one of them needs."""
        return Need(int(self.totals[index]), int(self.differences[index]))


def _unbeaten(devices: Integers, totals: Integers, differences: Integers) -> Integers:
    """Numbers of the solutions that are left, by devices.

    In this order a solution is only beaten by one before it, so chunk after chunk is compared with what is left.
    """
    order = np.lexsort((differences, totals, devices))
    left = np.zeros(0, dtype=np.int64)
    for start in range(0, len(order), _CHUNK):
        chunk = order[start : start + _CHUNK]
        if len(left):
            chunk = chunk[~_covered(chunk, left, totals, differences).any(axis=1)]
        inside = np.tril(_covered(chunk, chunk, totals, differences), -1)
        left = np.concatenate((left, chunk[~inside.any(axis=1)]))
    return left


def _covered(some: Integers, others: Integers, totals: Integers, differences: Integers) -> np.ndarray:
    """[some, other] whether the other needs no more."""
    no_more = totals[others] <= totals[some][:, None]
    no_more &= differences[others] <= differences[some][:, None]
    return no_more
