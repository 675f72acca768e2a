"""Solvers that do not hear: a search goes on without them, and the process does not end before they have."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ortools.sat.python import cp_model

from pipeplan.schedule.cpsat import solver
from pipeplan.time_limit import WorkClock
from support.paths import ROOT

LEFT_ALONE = """
import sys, threading
from ortools.sat.python import cp_model
from pipeplan.schedule.cpsat import solver
from pipeplan.time_limit import Limit, TimeUpError

solver.SOLVER_LEAVING_SECONDS = 1e9
heard = threading.Semaphore(0)

def deaf(self, *_):
    for _ in range(int(sys.argv[1])):
        heard.acquire()
    print("the solver has ended", flush=True)
    return cp_model.UNKNOWN

cp_model.CpSolver.solve = deaf
cp_model.CpSolver.stop_search = lambda self: heard.release()
up = Limit(0.0)
try:
    with up.enforced():
        solver.solve(cp_model.CpModel(), solver.Budget(1e9), 1e9)
except TimeUpError:
    print("left to itself", flush=True)
sys.exit(7)
"""
"""It hears so many requests to stop, of which the search makes five."""


def left_alone(script: str, requests: int) -> tuple[int, str, str]:
    """Exit code and outputs; that the process does not end is told after minutes."""
    done = subprocess.run(
        [sys.executable, "-c", script, str(requests)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_solver_that_is_left_to_itself_has_ended_before_the_process_does() -> None:
    assert left_alone(LEFT_ALONE, 8) == (7, "left to itself\nthe solver has ended\n", "")


def test_the_end_waits_for_no_solver_for_ever() -> None:
    script = LEFT_ALONE.replace("SOLVER_LEAVING_SECONDS = 1e9", "SOLVER_LEAVING_SECONDS = 0.2")
    assert script != LEFT_ALONE
    assert left_alone(script, 1_000_000) == (7, "left to itself\n", "")


@pytest.mark.parametrize("sampled", [False, True])
def test_a_limit_of_work_is_the_solvers_too(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not so many seconds of the wall, in which two workers work twice as long: whatever tells the work, it is asked.

    The process works as many seconds as the solver is looked at, and the wall's clock would let it go on for an hour.
    """
    worked, asked, heard = [0.0], list[float](), threading.Event()

    def slow(self: Any, *_: object) -> int:
        asked.append(self.parameters.max_time_in_seconds)
        heard.wait(30)
        return 0

    def works() -> float:
        worked[0] += 1.0
        return worked[0]

    monkeypatch.setattr(cp_model.CpSolver, "solve", slow)
    monkeypatch.setattr(cp_model.CpSolver, "stop_search", lambda self: heard.set())
    monkeypatch.setattr(cp_model.CpSolver, "response_proto", SimpleNamespace(deterministic_time=0.0))
    monkeypatch.setattr(cp_model.CpSolver, "best_objective_bound", 0.0)
    monkeypatch.setattr(time, "process_time", works)
    monkeypatch.setattr(solver, "SOLVER_POLL_SECONDS", 0.003)
    monkeypatch.setattr("pipeplan.time_limit._SAMPLED_S", 0.0)
    budget = solver.Budget(30.0, clock=WorkClock() if sampled else works)
    answer = solver.solve(cp_model.CpModel(), budget, 20.0)
    assert answer.feasible is None
    assert asked == [math.inf]
    assert 20.0 <= worked[0] <= 60.0
