"""Tessel (HPCA'24) on z3, as its paper describes it: what pipeplan's search is measured against.

* Repetends are enumerated as micro-batch indices that never rise along a dependency (Property 4.2), for spans 1, 2, ...
  (N_R); each is solved for its least period. Both ways of Fig. 6 are one model: on every device a repetend takes at
  most a period, and an action waits for what it depends on in its own or an earlier repetend.
* The enumeration ends at the lower bound, the work of the busiest device (Algorithm 1), or where memory has no room
  for more micro-batches in flight.
* Lazy search (section V): a better repetend needs only some warmup and cooldown that fit; the shortest ones are
  searched once, for the last repetend.
* z3 decides whether an objective can be reached, and binary search does the rest (section V).

Three choices are there to favour Tessel: a repetend is first asked to beat the best one, and only then searched for its
least period; memory is counted at the starts of actions instead of in every time slot; and where memory has no limit
all constraints are differences of two times, for which z3 has a solver of its own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import z3

from pipeplan.workload.one_microbatch import OneMicrobatch

__all__ = ["Found", "Planner", "Repetend", "indices_of"]

Action = tuple[int, int]
"""An operation and a micro-batch."""

Starts = dict[Action, int]
"""When actions start, in the problem's time units."""


class _OutOfTimeError(Exception):
    """The limit is over before z3 knew."""


@dataclass(frozen=True, slots=True)
class Repetend:
    """When one action of every operation starts, in time units, and after how many the next repetend does."""

    starts: Starts
    period: int

    @property
    def span(self) -> int:
        """Micro-batches it reaches over: the paper's N_R."""
        return 1 + max(index for _, index in self.starts)


@dataclass(frozen=True, slots=True)
class _Part:
    """Actions to be scheduled together, and the bytes held on each device before any of them runs."""

    actions: list[Action]
    held: list[int]


@dataclass(frozen=True, slots=True)
class Found:
    """The orders Tessel ends with, None if it has none, and how it got there.

    ``solved`` repetends took ``repetend_seconds``, warmup and cooldown ``completion_seconds``, of which
    ``proof_seconds`` into answers that something shorter does not exist; ``finished`` says that the limit cut off
    nothing.
    """

    orders: list[list[int]] | None
    repetend: Repetend | None
    solved: int
    repetend_seconds: float
    completion_seconds: float
    proof_seconds: float
    finished: bool

    @property
    def seconds(self) -> float:
        """The whole search."""
        return self.repetend_seconds + self.completion_seconds


def indices_of(problem: OneMicrobatch, span: int) -> Iterator[tuple[int, ...]]:
    """[operation] indices of all repetends that reach over ``span`` micro-batches, and no fewer (Property 4.2)."""
    before: list[list[int]] = [[] for _ in problem.durations]
    for source, target, _ in problem.edges:
        before[target].append(source)

    def extend(indices: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(indices) == problem.num_operations:
            if min(indices) == 0 and max(indices) == span - 1:
                yield indices
            return
        most = min((indices[source] for source in before[len(indices)]), default=span - 1)
        for index in range(most, -1, -1):
            yield from extend((*indices, index))

    return extend(())


@dataclass
class Planner:
    """Algorithm 1 for one problem, within ``limit`` seconds from now on."""

    problem: OneMicrobatch
    limit: float
    begun: float = field(default_factory=time.perf_counter)
    solved: int = 0
    proof_seconds: float = 0.0

    def __post_init__(self) -> None:
        problem, unit = self.problem, self.problem.time_unit
        self._durations = [duration // unit for duration in problem.durations]
        self._edges = [(source, target, lag // unit) for source, target, lag in problem.edges]
        self._net = [taken - given for taken, given in zip(problem.acquire, problem.release, strict=True)]

    def search(self) -> Found:
        """The best repetend, then the shortest warmup and cooldown for it."""
        best, finished = self._best_repetend()
        middle, orders = time.perf_counter(), None
        if best is not None:
            repetend, ends = best
            shortest = [self._shortest(part, some) for part, some in zip(self._ends(repetend), ends, strict=True)]
            finished = finished and all(proved for _, proved in shortest)
            orders = self._composed(repetend, *(starts for starts, _ in shortest))
        completion = time.perf_counter() - middle
        return Found(
            orders, best and best[0], self.solved, middle - self.begun, completion, self.proof_seconds, finished
        )

    def _best_repetend(self) -> tuple[tuple[Repetend, list[Starts]] | None, bool]:
        """The loop of Algorithm 1: a repetend with some warmup and cooldown; and whether the loop came to its end."""
        lower_bound, most = max(self.problem.work) // self.problem.time_unit, sum(self._durations)
        best: tuple[Repetend, list[Starts]] | None = None
        try:
            for indices in itertools.chain.from_iterable(indices_of(self.problem, span) for span in self._spans()):
                found = self._repetend(indices, lower_bound, most)
                ends = [self._within(part, self._longest(part)) for part in self._ends(found)] if found else []
                fitting = [end for end in ends if end is not None]
                if found is not None and len(fitting) == len(ends):
                    best, most = (found, fitting), found.period - 1
                if most < lower_bound:
                    break
        except _OutOfTimeError:
            return best, False
        return best, True

    def _spans(self) -> range:
        """Up to as many micro-batches as some device has room for, or as there are (CalMaxInflight)."""
        return range(1, 1 + min(self.problem.num_microbatches, max(map(self._room, range(self.problem.num_devices)))))

    def _room(self, device: int) -> int:
        """Micro-batches of which the device can hold one activation each."""
        capacity = self.problem.capacity[device]
        sizes = [self.problem.acquire[x] for x in self.problem.on_device[device] if self.problem.acquire[x]]
        return self.problem.num_microbatches if capacity is None or not sizes else capacity // min(sizes)

    # One repetend ----------------------------------------------------------------------------------------------

    def _repetend(self, indices: tuple[int, ...], lower_bound: int, most: int) -> Repetend | None:
        """The repetend of these indices with its least period, None if that is above ``most``."""
        self.solved += 1
        starts = self._repeated(indices, most)
        if starts is None:
            return None
        low, high = lower_bound, most - 1
        while low <= high:
            middle = (low + high) // 2
            found = self._repeated(indices, middle)
            if found is None:
                low = middle + 1
            else:
                starts, high = found, middle - 1
        return Repetend(starts, high + 1)

    def _repeated(self, indices: tuple[int, ...], period: int) -> Starts | None:
        """Starts with which these actions can run once per period, None if they cannot."""
        part = _Part(list(enumerate(indices)), self._held_after(indices))
        solver, start = self._solver(part)
        for a, b in self._pairs(part.actions):
            for x, y in ((a, b), (b, a)):
                solver.add(start[x] - start[y] <= period - self._durations[x[0]])
        for source, target, lag in self._edges:
            x, y = (source, indices[source]), (target, indices[target])
            solver.add(start[y] - start[x] >= self._durations[source] + lag - period * (x[1] - y[1]))
        return self._check(solver, start)

    def _held_after(self, counts: Sequence[int]) -> list[int]:
        """[device] bytes held when each operation has run for so many micro-batches."""
        return [sum(self._net[x] * counts[x] for x in operations) for operations in self.problem.on_device]

    # Warmup and cooldown ---------------------------------------------------------------------------------------

    def _ends(self, repetend: Repetend) -> tuple[_Part, _Part]:
        """What is left before and after repetends (equations 5 and 6), numbered as if there were only one."""
        indices = [index for _, index in sorted(repetend.starts)]
        before = [(x, m) for x, index in enumerate(indices) for m in range(index)]
        after = [(x, m) for x, index in enumerate(indices) for m in range(index + 1, repetend.span)]
        return _Part(before, [0] * self.problem.num_devices), _Part(after, self._held_after(indices))

    def _shortest(self, part: _Part, best: Starts) -> tuple[Starts, bool]:
        """A time-optimal schedule, from any on; and whether the limit left time to prove it."""
        low = self._least_time(part)
        try:
            while low < self._end(best):
                begun, middle = time.perf_counter(), (low + self._end(best)) // 2
                found = self._within(part, middle)
                if found is None:
                    self.proof_seconds += time.perf_counter() - begun
                    low = middle + 1
                else:
                    best = found
        except _OutOfTimeError:
            return best, False
        return best, True

    def _within(self, part: _Part, horizon: int) -> Starts | None:
        """A schedule that ends in time, None if there is none."""
        solver, start = self._solver(part)
        for (x, m), variable in start.items():
            solver.add(variable >= 0, variable <= horizon - self._durations[x])
            if (x, m + 1) in start:  # Property 4.1
                solver.add(start[x, m + 1] - variable >= self._durations[x])
        for source, target, lag in self._edges:
            for x, m in part.actions:
                if x == source and (target, m) in start:
                    solver.add(start[target, m] - start[x, m] >= self._durations[x] + lag)
        return self._check(solver, start)

    def _longest(self, part: _Part) -> int:
        """One action after another, with every lag waited for."""
        return sum(self._durations[x] for x, _ in part.actions) + len(part.actions) * max(
            (lag for *_, lag in self._edges), default=0
        )

    def _least_time(self, part: _Part) -> int:
        """The work of the busiest device."""
        return max(
            sum(self._durations[x] for x, _ in part.actions if x in operations) for operations in self.problem.on_device
        )

    def _end(self, starts: Starts) -> int:
        return max((start + self._durations[x] for (x, _), start in starts.items()), default=0)

    # z3 --------------------------------------------------------------------------------------------------------

    def _solver(self, part: _Part) -> tuple[z3.Solver, dict[Action, z3.ArithRef]]:
        """A solver with a start for every action, devices that run one at a time, and their memory."""
        limited = any(capacity is not None for capacity in self.problem.capacity)
        solver = z3.Solver() if limited else z3.SolverFor("QF_IDL")
        start = {action: z3.Int(f"s{action}") for action in part.actions}
        for a, b in self._pairs(part.actions):
            solver.add(
                z3.Or(
                    start[b] - start[a] >= self._durations[a[0]],
                    start[a] - start[b] >= self._durations[b[0]],
                )
            )
        for device, capacity in enumerate(self.problem.capacity):
            if capacity is not None:
                self._memory(solver, start, device, capacity - part.held[device])
        return solver, start

    def _pairs(self, actions: Iterable[Action]) -> set[tuple[Action, Action]]:
        """Pairs of actions that share a device."""
        return {
            pair
            for operations in self.problem.on_device
            for pair in itertools.combinations([action for action in actions if action[0] in operations], 2)
        }

    def _memory(self, solver: z3.Solver, start: dict[Action, z3.ArithRef], device: int, left: int) -> None:
        """At every start ``left`` bytes are enough for what the part's actions hold by then and the action takes."""
        problem = self.problem
        here = [action for action in start if device in problem.devices[action[0]]]
        for x in here:
            ran = [z3.If(start[y] < start[x], self._net[y[0]], 0) for y in here if y != x and self._net[y[0]]]
            solver.add(z3.Sum(ran) <= left - problem.acquire[x[0]] - problem.workspace[x[0]])

    def _check(self, solver: z3.Solver, start: dict[Action, z3.ArithRef]) -> Starts | None:
        left = self.limit - (time.perf_counter() - self.begun)
        solver.set("timeout", max(1, int(left * 1000)))
        answer = solver.check() if left > 0 else z3.unknown
        if answer == z3.unknown:
            raise _OutOfTimeError
        if answer == z3.unsat:
            return None
        model = solver.model()
        return {action: model.eval(variable, model_completion=True).as_long() for action, variable in start.items()}

    # The whole -------------------------------------------------------------------------------------------------

    def _composed(self, repetend: Repetend, warmup: Starts, cooldown: Starts) -> list[list[int]]:
        """Orders: warmup, repetend after repetend, cooldown; the gaps close when they are timed."""
        problem = self.problem
        copies = problem.num_microbatches - repetend.span + 1
        orders: list[list[int]] = [[] for _ in problem.capacity]
        parts = [(warmup, 0), *((repetend.starts, copy) for copy in range(copies)), (cooldown, copies - 1)]
        for starts, shift in parts:
            for x, m in sorted(starts, key=starts.__getitem__):
                for device in problem.devices[x]:
                    orders[device].append(x * problem.num_microbatches + m + shift)
        return orders
