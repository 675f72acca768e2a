"""Solvers that do not hear: a search goes on without them, and the process does not end before they have."""

from __future__ import annotations

import os
import subprocess
import sys

from support.paths import ROOT

LEFT_ALONE = """
import sys, threading
from ortools.sat.python import cp_model
from pipeplan.schedule.cpsat import solver
from pipeplan.time_limit import Limit, TimeUpError

solver._LEAVING_SECONDS = 1e9
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
    script = LEFT_ALONE.replace("_LEAVING_SECONDS = 1e9", "_LEAVING_SECONDS = 0.2")
    assert script != LEFT_ALONE
    assert left_alone(script, 1_000_000) == (7, "left to itself\n", "")
