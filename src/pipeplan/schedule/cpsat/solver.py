"""Running CP-SAT: one place for time, seeds, workers, determinism and Ctrl-C."""

from __future__ import annotations

import atexit
import importlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeplan.search_constants import (
    DETERMINISTIC_PER_SECOND,
    SOLVE_SECONDS,
    SOLVER_LEAVING_SECONDS,
    SOLVER_POLL_SECONDS,
    SOLVER_STOP_SECONDS,
)
from pipeplan.time_limit import CountedClock, Limit, TimeUpError, checkpoint, shielded, time_is_up, time_left

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


# What work outside the solver counts per action when seconds are deterministic:


@dataclass(slots=True, eq=False)
class Budget(Limit):
    """Time for a whole search, shared by everything in it, and how the solver spends it.

    With ``deterministic`` one worker runs and the limit counts the solver's deterministic time, in units that are
    about a second, instead of the clock: the same seed gives the same plan on any machine.
    """

    seed: int = 0
    deterministic: bool = False
    workers: int = 2
    spent: float = field(default=0.0, init=False)

    @property
    def used(self) -> float:
        """What counts against the limit: seconds by the clock, or deterministic ones."""
        return self.spent if self.deterministic else self.elapsed

    def charge(self, seconds: float) -> None:
        """Count work done outside the solver, where seconds are deterministic."""
        if self.deterministic:
            self.spent += seconds

    def left(self, patience: float = 0.0) -> float:
        """Seconds left, as of any limit; deterministic ones are no part of anything the clock measures."""
        return self.seconds + patience - self.used if self.deterministic else Limit.left(self, patience)

    @property
    def over(self) -> bool:
        """Whether work under this limit ends; deterministic work never ends by the clock."""
        return self.interrupted or (not self.deterministic and self.late)

    @contextmanager
    def share(self, seconds: float) -> Iterator[Budget]:
        """A part of the time for a part of the work; what it spends, and its interruption, are the whole's."""
        part = Budget(seconds, self.seed, self.deterministic, self.workers, clock=self.clock, whole=self)
        try:
            yield part
        finally:
            self.spent += part.spent

    @contextmanager
    def moment(self, seconds: float) -> Iterator[None]:
        """What comes after all else ends after so many seconds, whatever is left; what follows goes on without it.

        Where work is counted only an interruption begins them.
        """
        if self.deterministic:
            with suppress(TimeUpError), self.finishing(seconds):
                yield
        else:
            with shielded(), Limit(seconds, clock=self.clock).ended():
                yield


@dataclass(frozen=True, slots=True)
class Answer:
    """What a solve ended with.

    ``feasible``: True with ``value`` to read solutions from, False if proved infeasible, None if time ran out first.
    ``bound`` is of the model's own objective, None without one.
    """

    feasible: bool | None
    optimal: bool
    value: Callable[[cp_model.LinearExprT], int]
    bound: int | None


def load_solver() -> None:
    """Import CP-SAT, which takes up to half a second, in parts: between them there is a checkpoint. Raises TimeUpError.

    After it an import of ``cp_model`` takes nothing.
    """
    for name in ("numpy", "pandas", "ortools.sat.python.cp_model_helper", "ortools.sat.python.cp_model"):
        if name not in sys.modules:
            checkpoint()
            importlib.import_module(name)


def solve(
    model: cp_model.CpModel,
    budget: Budget,
    limit: float,
    *,
    on_solution: Callable[[int, int], None] | None = None,
    linear: bool = False,
) -> Answer:
    """Solve within ``limit`` seconds of the budget.

    ``linear``: one worker, which relaxes all constraints to linear ones. That proves models whose objective is a sum of
    costs of choices, for which the workers that are there otherwise may find no bound at all.

    The solver runs on a thread of its own, so that Ctrl-C reaches us: it stops the solver, marks the budget as
    interrupted and returns the best found so far. ``on_solution`` gets (objective, bound) as the solver improves.

    Raises:
        TimeUpError: the time of a limit that is enforced was up, and the solver did not stop: it is left to itself.
    """
    load_solver()
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    parameters = solver.parameters
    limit = min(limit, budget.remaining)
    by_work = budget.of_work and not budget.deterministic
    if budget.counted and not budget.deterministic:
        limit = min(limit, time_left())
    parameters.random_seed = budget.seed
    parameters.catch_sigint_signal = False
    if any(each.has_cumulative() for each in model.proto.constraints):
        parameters.cp_model_probing_level = 0  # there a minute of it counts, and finds, as good as nothing
    if budget.deterministic or budget.counted:
        parameters.num_workers = 1
        parameters.max_deterministic_time = limit * DETERMINISTIC_PER_SECOND
    else:
        parameters.num_workers = budget.workers
        parameters.max_time_in_seconds = math.inf if by_work else limit
    if linear:
        parameters.num_workers, parameters.linearization_level = 1, 2
    if limit <= 0.0:
        return Answer(None, False, solver.value, None)
    working = Limit(limit, clock=budget.clock) if by_work else None
    status = _run(solver, model, budget, working, _callback(on_solution) if on_solution is not None else None)
    worked = solver.response_proto.deterministic_time / DETERMINISTIC_PER_SECOND + SOLVE_SECONDS
    budget.spent += worked
    if isinstance(budget.clock, CountedClock):
        budget.clock.charge(worked)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    bound = round(solver.best_objective_bound) if model.has_objective() else None
    feasible = True if found else False if status == cp_model.INFEASIBLE else None
    return Answer(feasible, status == cp_model.OPTIMAL, solver.value, bound)


def _run(
    solver: cp_model.CpSolver,
    model: cp_model.CpModel,
    budget: Budget,
    working: Limit | None,
    callback: cp_model.CpSolverSolutionCallback | None,
) -> int:
    """The solver's status, once it is done or ``working`` is over: the solver does not measure what a process works."""
    result: list[int] = []
    failure: list[BaseException] = []
    done = threading.Event()
    asked = 0

    def work() -> None:
        try:
            result.append(int(solver.solve(model, callback)))
        except BaseException as error:  # handed to the caller's thread
            failure.append(error)
        finally:
            done.set()
            _running.pop(threading.current_thread(), None)

    # Waiting on an event, not on the thread: an interrupted Thread.join takes the thread for finished.
    thread = threading.Thread(target=work, name="cp-sat", daemon=True)
    _running[thread] = solver
    thread.start()
    while not done.is_set():
        try:
            done.wait(SOLVER_POLL_SECONDS)
            over = budget.interrupted or (not budget.counted and time_is_up())  # counted, it ends by itself
            if over or (working is not None and working.expired):
                solver.stop_search()  # again and again: a solve that had not begun hears no first one
                asked += over
            if asked * SOLVER_POLL_SECONDS > SOLVER_STOP_SECONDS:
                checkpoint()
        except KeyboardInterrupt:
            budget.interrupt()
    if failure:
        raise failure[0]
    return result[0]


_running: dict[threading.Thread, cp_model.CpSolver] = {}


@atexit.register
def _end_all() -> None:
    """End the solvers that were left to themselves before the process ends, as far as they hear of it.

    A thread that comes back from the solver while Python ends is ended in the middle of C++, which aborts the process
    ("terminate called without an active exception"), with the exit code of that.
    """
    begun = time.monotonic()
    for thread, solver in list(_running.items()):
        while thread.is_alive() and time.monotonic() < begun + SOLVER_LEAVING_SECONDS:
            solver.stop_search()
            thread.join(SOLVER_POLL_SECONDS)


def _callback(on_solution: Callable[[int, int], None]) -> cp_model.CpSolverSolutionCallback:
    from ortools.sat.python import cp_model

    class Report(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            on_solution(round(self.objective_value), round(self.best_objective_bound))

    return Report()
