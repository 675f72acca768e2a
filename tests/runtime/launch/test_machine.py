"""Whether others use the machine while something runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeplan.runtime.launch import machine
from pipeplan.runtime.launch.machine import OthersUse

TICKS = os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("own", "seconds", "cores"),
    [((0.5, 0.25, 1.0, 0.0), 2.0, 1.375), ((9.0, 0.0, 0.0, 0.0), 2.0, 0.0), ((0.0, 0.0, 0.0, 0.0), 0.1, None)],
    ids=["others", "all its own", "too short"],
)
def test_what_others_use_is_what_is_left(
    own: tuple[float, ...], seconds: float, cores: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4.5 s of work on all cores, none of which is idling or waiting for a disk."""
    lines = iter([[0] * 7, [3 * TICKS, TICKS // 2, TICKS // 2, 77 * TICKS, 99 * TICKS, TICKS // 4, TICKS // 4]])
    text = "cpu {}\ncpu0 1 2 3 4 5 6 7\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text.format(" ".join(map(str, next(lines)))))
    times = iter([(0.0,) * 4, own])
    monkeypatch.setattr(os, "times", lambda: next(times))
    clock = iter([5.0, 5.0 + seconds])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    assert OthersUse().cores() == cores


def test_a_system_that_does_not_say_is_not_guessed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "Path", lambda _: Path("/nowhere/at/all"))
    assert OthersUse().cores() is None


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [(1, [[2, 3, 5, 7, 9]]), (2, [[2, 3], [5, 7, 9]]), (5, [[2], [3], [5], [7], [9]]), (6, [])],
)
def test_ranks_divide_the_cores_where_each_gets_one(
    ranks: int, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those that this process may use; with more ranks than cores the system does it."""
    kept: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {9, 2, 7, 3, 5})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: kept.append(cores))
    for rank in range(ranks):
        machine.keep_to_own_cores(rank, ranks)
    assert kept == expected


def test_what_a_larger_parent_held_is_not_a_child_s() -> None:
    """As getrusage has it; the parent holds 200 MB when it starts the child."""
    child = "from pipeplan.runtime.launch.machine import most_resident_bytes; print(most_resident_bytes())"
    parent = f"import subprocess, sys; held = bytearray(200_000_000); subprocess.run([sys.executable, '-c', {child!r}])"
    said = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True).stdout
    assert 1_000_000 < int(said) < 150_000_000
    assert machine.most_resident_bytes() > 1_000_000
