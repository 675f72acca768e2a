"""The repetend as one modulo-scheduling problem (design of Tessel III-C and IV-B, solved as software pipelining).

For a repetend time T and unroll U there is one instance x = (operation i, u) per operation and u in 0..U-1.
Instance x runs at ``s_x`` in its devices' windows and belongs to ``k_x`` repetitions ago, so that its absolute
start is ``a_x = s_x + T*k_x`` and repetition n of the pattern runs it at ``a_x + T*n`` on micro-batch ``U*n + u``.

* dependence i -> j with lag c: ``a_j >= a_i + t_i + c`` and ``k_j >= k_i`` (Tessel's Property 4.2; but not where j may
  start before i, as it first needs it in a later part: ``t_i + c < 0``);
* what returns from i to j of a micro-batch d later, as in a decoding loop, likewise: of instance u it is for instance
  ``(u + d) mod U``, ``(u + d) div U`` repetitions later;
* a device runs one thing at a time modulo T: no overlap of ``[s, s+t)`` and ``[s+T, s+T+t)`` over its instances;
* memory at the start of every x on a device:
  ``acquire_x + workspace_x + sum over y on the device of net_y * ([y before x] - k_y) <= capacity``; and for what y
  holds there until others' actions z have ended, of which order says nothing (what forwards alone give), as many more
  as there are repetitions between: ``floor((a_x - a_y) / T) - min over z of floor((a_x - a_z - t_z) / T)``;
* ``k`` is bounded by the longest path, each edge reaching over at most ``1 + ceil((t_i + c) / T)`` repetitions,
  so that infeasible is a proof. Feasibility is monotone in T.

Instances of one operation run in micro-batch order (Property 4.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from pipeplan.graphs import longest_paths
from pipeplan.schedule.cpsat.solver import Answer, Budget, load_solver, solve
from pipeplan.schedule.modulo import modulo_schedule
from pipeplan.schedule.pattern import Pattern, one_after_another, sequential_time
from pipeplan.search_constants import DECISION_PART, FARTHEST, MOST_PERIODS
from pipeplan.time_limit import checked
from pipeplan.workload.bounds import memory_recurrences, period_bound
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.workload import Hold

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


@dataclass(frozen=True, slots=True)
class LeastPeriod:
    """The best pattern found and what is proved: no pattern of this unroll has a repetend time below ``bound_ns``."""

    pattern: Pattern | None
    bound_ns: int
    seconds: float

    @property
    def proved(self) -> bool:
        """Whether the pattern's repetend time is the least possible for its unroll."""
        return self.pattern is not None and self.pattern.repetend_ns == self.bound_ns


class _Variables:
    """Integer variables of one model; times in units of ``unit`` ns."""

    def __init__(
        self,
        model: cp_model.CpModel,
        problem: OneMicrobatch,
        period: int,
        unroll: int,
        unit: Fraction,
        max_span: int | None,
    ) -> None:
        self.durations = [int(duration / unit) for duration in problem.durations]
        self.lags = [int(lag / unit) for _, _, lag in problem.edges]
        self.period, self.unroll, self.unit = period, unroll, unit
        self.instances = [(i, u) for i in range(problem.num_operations) for u in range(unroll)]
        reach = _reach(problem, self.durations, self.lags, period)
        most = reach + 1 if max_span is None else min(reach + 1, -(-max_span // unroll))
        self.repetition = {x: model.new_int_var(0, most, f"k{x}") for x in self.instances}
        self.start, self.offset = {}, {}
        if max_span is None:
            for x in self.instances:
                self.start[x] = model.new_int_var(0, period - 1, f"s{x}")
        else:  # each device repeats in a window of its own: Tessel's compact repetends, Fig. 6 (b)
            far = (reach + 2) * period
            self.offset = {d: model.new_int_var(-far, far, f"o{d}") for d in range(len(problem.on_device))}
            for x in self.instances:
                self.start[x] = model.new_int_var(-far, far + period, f"s{x}")
        self.absolute = {x: self.start[x] + period * self.repetition[x] for x in self.instances}
        if max_span is not None:  # of micro-batches u - U k, from one to the other
            last = model.new_int_var(0, unroll - 1, "last")
            for i, u in self.instances:
                model.add(u - unroll * self.repetition[i, u] <= last)
                model.add(u - unroll * self.repetition[i, u] >= last - max_span + 1)


def _reach(problem: OneMicrobatch, durations: Sequence[int], lags: Sequence[int], period: int) -> int:
    """Most repetitions between the first and the last operation of a micro-batch that are ever needed.

    The longest path, if nothing has several last forwards; else what no chain of dependencies followed either way
    exceeds. The proof is in docs/algorithms/repetend.md.
    """
    steps = [
        (source, target, 1 + math.ceil((durations[source] + lag) / period))
        for (source, target, _), lag in zip(problem.edges, lags, strict=True)
    ]
    # what may start before what it needs may be that many repetitions before it
    before = sum(max(0, 1 - step) for _, _, step in steps)
    if problem.returns:  # these join parts of a micro-batch that nothing else does
        unit = Fraction(problem.durations[0], durations[0])
        back = (1 + math.ceil((durations[x] + math.ceil(lag / unit)) / period) for x, _, lag, _ in problem.returns)
        return sum(step for _, _, step in steps) + sum(back) + before
    if problem.one_last_forward:
        return max(longest_paths(problem.order, steps).values()) + before
    most: dict[int, int] = {}
    for _, target, step in steps:
        most[target] = max(most.get(target, 0), step)
    return sum(most.values()) + before


class _Constraints:
    """The families of constraints of the module's docstring, each a method; the order does not matter."""

    def __init__(self, model: cp_model.CpModel, problem: OneMicrobatch, variables: _Variables) -> None:
        self._model, self._problem, self._variables = model, problem, variables
        self._before: dict[tuple[tuple[int, int], tuple[int, int]], Any] = {}

    def anchor(self) -> None:
        """Patterns can be shifted in time: the first operation starts the window."""
        if not self._variables.offset:
            self._model.add(self._variables.start[0, 0] == 0)
        else:
            self._model.add(self._variables.offset[self._problem.devices[0][0]] == 0)

    def windows(self) -> None:
        """Every instance is in the window of each of its devices."""
        v = self._variables
        for device, offset in v.offset.items():
            for i in self._problem.on_device[device]:
                for u in range(v.unroll):
                    self._model.add(v.start[i, u] >= offset)
                    self._model.add(v.start[i, u] <= offset + v.period - 1)

    def dependencies(self) -> None:
        """``a_j >= a_i + t_i + c`` and ``k_j >= k_i``."""
        v = self._variables
        for (i, j, _), lag in checked(zip(self._problem.edges, v.lags, strict=True), 64):
            for u in range(v.unroll):
                self._model.add(v.absolute[j, u] >= v.absolute[i, u] + v.durations[i] + lag)
                if v.durations[i] + lag >= 0 or v.offset:
                    self._model.add(v.repetition[j, u] >= v.repetition[i, u])
        for i, j, lag_ns, later in self._problem.returns:
            for u in range(v.unroll):
                ahead, other = divmod(u + later, v.unroll)
                lag = int(lag_ns / v.unit)
                self._model.add(v.absolute[j, other] + ahead * v.period >= v.absolute[i, u] + v.durations[i] + lag)

    def microbatch_order(self) -> None:
        """Instances of one operation in the order of their micro-batches (Property 4.1)."""
        v = self._variables
        for i in range(self._problem.num_operations):
            for u in range(1, v.unroll):
                self._model.add(v.absolute[i, u] >= v.absolute[i, u - 1] + v.durations[i])
            if v.unroll > 1:
                self._model.add(v.absolute[i, 0] + v.period >= v.absolute[i, v.unroll - 1] + v.durations[i])

    def recurrences(self) -> None:
        """What memory says about order: ``a_x >= a_z + t_z - q T`` for (z, m - distance) before (x, m).

        Memory has constraints of its own; these only help.
        """
        v = self._variables
        for recurrence in memory_recurrences(self._problem):
            z, x = recurrence.source, recurrence.target
            if recurrence.distance > FARTHEST:
                continue
            for u in range(v.unroll):
                back, other = divmod(u - recurrence.distance, v.unroll)
                self._model.add(v.absolute[x, u] >= v.absolute[z, other] + v.durations[z] + back * v.period)

    def exclusive_devices(self) -> None:
        """No two instances of a device overlap, modulo the period."""
        v = self._variables
        here, next_ = {}, {}
        for i, u in checked(v.instances, 64):
            start, duration = v.start[i, u], v.durations[i]
            here[i, u] = self._model.new_fixed_size_interval_var(start, duration, f"x{i},{u}")
            next_[i, u] = self._model.new_fixed_size_interval_var(start + v.period, duration, f"y{i},{u}")
        for operations in self._problem.on_device:
            instances = [(i, u) for i in operations for u in range(v.unroll)]
            self._model.add_no_overlap([here[x] for x in instances] + [next_[x] for x in instances])

    def memory(self) -> None:
        """Room at the start of every instance, on every device with a cap that could be reached."""
        problem, v = self._problem, self._variables
        for device, capacity in enumerate(problem.capacity):
            operations = problem.on_device[device]
            if capacity is None or not operations:
                continue
            net = {i: problem.acquire[i] - problem.release[i] for i in operations}
            apart = problem.apart_on(device)
            sizes = (hold.size for hold in apart)
            unit = math.gcd(*net.values(), *(problem.acquire[i] for i in operations), *sizes) or 1
            instances = [(i, u) for i in operations for u in range(v.unroll)]
            for x in checked(instances, 1):
                taken = problem.acquire[x[0]]
                room = (capacity - problem.workspace[x[0]] - taken) // unit
                held: list[cp_model.LinearExprT] = [
                    (net[y[0]] // unit) * (self._is_before(y, x) - v.repetition[y])
                    for y in instances
                    if net[y[0]] and y != x
                ]
                held += [hold.size // unit * self._held_apart(hold, u, x) for hold in apart for u in range(v.unroll)]
                own = -(net[x[0]] // unit) * v.repetition[x]
                self._model.add(sum(held, own) <= room)

    def _held_apart(self, hold: Hold, u: int, x: tuple[int, int]) -> Any:
        """How many of a hold there are when x starts, of instance ``u`` of what it is of."""
        v = self._variables
        begun = self._repetitions(v.absolute[x] - v.absolute[hold.source, u])
        ended = [self._repetitions(v.absolute[x] - v.absolute[y, u] - v.durations[y]) for y in hold.targets]
        if len(ended) == 1:
            return begun - ended[0]
        held = self._model.new_int_var(0, 2 * FARTHEST, "")
        for each in ended:
            self._model.add(held >= begun - each)
        return held

    def _repetitions(self, time: Any) -> Any:
        """``floor(time / T)``"""
        whole = self._model.new_int_var(-FARTHEST, FARTHEST, "")
        rest = self._model.new_int_var(0, self._variables.period - 1, "")
        self._model.add(self._variables.period * whole + rest == time)
        return whole

    def _is_before(self, y: tuple[int, int], x: tuple[int, int]) -> Any:
        """Literal: y starts before x in the window of a device they share."""
        if (y, x) not in self._before:
            v = self._variables
            literal: Any = self._model.new_bool_var(f"b{y},{x}")
            self._model.add(v.start[y] + v.durations[y[0]] <= v.start[x]).only_enforce_if(literal)
            self._model.add(v.start[x] + v.durations[x[0]] <= v.start[y]).only_enforce_if(~literal)
            self._before[y, x], self._before[x, y] = literal, ~literal
        return self._before[y, x]


def solve_pattern(
    problem: OneMicrobatch,
    repetend: Fraction | int,
    budget: Budget,
    limit: float,
    *,
    unroll: int = 1,
    max_span: int | None = None,
    hint: Pattern | None = None,
    shortest: bool = False,
) -> tuple[bool | None, Pattern | None, int | None]:
    """A pattern of this repetend time (ns, rounded up in the pattern): (feasible, pattern, least latency proved).

    ``feasible`` is None when the limit (seconds) ran out first. With ``shortest`` the latency is minimised and the
    last entry is a proved lower bound of it in ns. ``max_span`` bounds how many micro-batches the repetend reaches
    over (Tessel's N_R), each device having a window of its own.
    """
    load_solver()
    from ortools.sat.python import cp_model

    if max(*problem.durations, unroll * max(problem.work)) > repetend or (max_span or unroll) < unroll:
        return False, None, None
    unit = _common_unit(problem.time_unit, Fraction(repetend))
    model = cp_model.CpModel()
    variables = _Variables(model, problem, int(repetend / unit), unroll, unit, max_span)
    constraints = _Constraints(model, problem, variables)
    constraints.anchor()
    constraints.windows()
    constraints.dependencies()
    constraints.microbatch_order()
    constraints.recurrences()
    constraints.exclusive_devices()
    constraints.memory()
    if shortest:
        model.minimize(_latency(model, problem, variables))
    if hint is not None:
        _add_hint(model, variables, hint, unit)
    answer = solve(model, budget, limit)
    if not answer.feasible:
        return answer.feasible, None, None
    bound = None if answer.bound is None else math.ceil(answer.bound * unit)
    return True, _pattern(problem, variables, answer, unit), bound


def _common_unit(unit: int, repetend: Fraction) -> Fraction:
    """Greatest unit of which both are multiples."""
    return Fraction(math.gcd(unit * repetend.denominator, repetend.numerator), repetend.denominator)


def _pattern(problem: OneMicrobatch, v: _Variables, answer: Answer, unit: Fraction) -> Pattern:
    """The solution in whole ns. Rounding starts down and the repetend up keeps every constraint: none subtracts T."""
    repetend = math.ceil(v.period * unit)
    starts = [
        [
            math.floor(answer.value(v.start[i, u]) * unit) + answer.value(v.repetition[i, u]) * repetend
            for u in range(v.unroll)
        ]
        for i in range(problem.num_operations)
    ]
    first = min(map(min, starts))
    begins = tuple(
        min(u - v.unroll * answer.value(v.repetition[i, u]) for u in range(v.unroll))
        for i in range(problem.num_operations if v.offset else 0)
    )
    return Pattern(v.unroll, repetend, tuple(tuple(start - first for start in row) for row in starts), begins)


def _latency(model: cp_model.CpModel, problem: OneMicrobatch, v: _Variables) -> cp_model.IntVar:
    """A variable at least as large as every micro-batch's latency."""
    horizon = v.period * (_reach(problem, v.durations, v.lags, v.period) + 3) + max(v.durations)
    latency = model.new_int_var(0, 2 * horizon, "latency")
    sources = set(range(problem.num_operations)) - {target for _, target, _ in problem.edges}
    sinks = set(range(problem.num_operations)) - {source for source, _, _ in problem.edges}
    for u in range(v.unroll):
        for i in sources:
            for j in sinks:
                if problem.path(i, j) >= 0 or len(sources) > 1:
                    model.add(latency >= v.absolute[j, u] + v.durations[j] - v.absolute[i, u])
    return latency


def _add_hint(model: cp_model.CpModel, v: _Variables, hint: Pattern, unit: Fraction) -> None:
    for i, u in v.instances:
        repetition, start = divmod(math.floor(hint.starts[i][u] / unit), v.period)
        if not v.offset:
            model.add_hint(v.start[i, u], start)
            model.add_hint(v.repetition[i, u], repetition)


def least_period(
    problem: OneMicrobatch,
    budget: Budget,
    limit: float,
    *,
    unroll: int = 1,
    max_span: int | None = None,
    below: Fraction | None = None,
    on_pattern: Callable[[Pattern], None] | None = None,
    known: Fraction = Fraction(0),
) -> LeastPeriod:
    """The least repetend time for this unroll: the bound first, then bisection between proof and pattern.

    Feasibility is monotone in T, so a T that is proved infeasible is a lower bound. With the order on every
    device and all k given, the least T is a ratio p/q: p sums durations and lags along a cycle that meets every
    instance at most once, and q counts the repetitions the cycle reaches over. So it is enough to ask about
    multiples of ``unit / q`` with q <= (all durations and lags) / T. The solver is asked where
    :func:`~pipeplan.schedule.modulo.modulo_schedule` finds nothing. ``limit`` in seconds; ``on_pattern`` hears
    of every improvement. If the solver finds none in time, the pattern is one micro-batch after another, where
    that fits. With ``below`` only periods (ns per micro-batch) less than that are of interest, and none may be
    found. None is below the ``known`` one.
    """
    begun, used = budget.elapsed, budget.used
    low = max(max(known, period_bound(problem)) * unroll, Fraction(max(problem.durations)))
    search = _Bisection(problem, unroll, low, None if below is None else below * unroll)
    while (candidate := search.next_candidate()) is not None and not budget.expired:
        left = limit - (budget.used - used)
        if left <= 0:
            break
        plain = unroll == 1 and max_span is None
        pattern = modulo_schedule(problem, math.ceil(candidate)) if plain else None
        feasible: bool | None = True
        if pattern is None:
            feasible, pattern, _ = solve_pattern(
                problem, candidate, budget, left / DECISION_PART, unroll=unroll, max_span=max_span, hint=search.best
            )
        search.learn(candidate, feasible, pattern)
        if pattern is not None and on_pattern is not None:
            on_pattern(pattern)
    best = search.best
    if best is None and below is None and (max_span or unroll) >= unroll:  # hard proofs took all the time
        best = one_after_another(problem, unroll)
    return LeastPeriod(best, search.bound_ns, budget.elapsed - begun)


class _Bisection:
    """Which repetend time to ask about next, and what the answers so far prove."""

    def __init__(self, problem: OneMicrobatch, unroll: int, low: Fraction, high: Fraction | None = None) -> None:
        self._unit = problem.time_unit
        lags = (abs(lag) for _, _, lag, *_ in (*problem.edges, *problem.returns))
        self._total = unroll * (sum(problem.durations) + sum(lags))
        self._sequential = sequential_time(problem) * unroll
        self._asked_low = False
        self._low = low  # nothing below is possible
        self._open = True  # ... and _low itself is not excluded
        self._unknown = low  # up to here the time ran out without an answer
        self._base = low
        self._high = high
        self.best: Pattern | None = None

    @property
    def bound_ns(self) -> int:
        """No repetend time below this is possible."""
        if self.best is not None and self._unknown <= self._low and not self._candidates():
            return self.best.repetend_ns
        return math.ceil(self._low) if self._open else math.floor(self._low) + 1

    def next_candidate(self) -> Fraction | None:
        """A repetend time in ns, or None when there is nothing left to ask."""
        if not self._asked_low:
            self._asked_low = True
            return self._low if self._high is None or self._low < self._high else None
        if self._high is None:
            return self._further()
        candidates = self._candidates()
        if not candidates:
            return None
        if len(candidates) == 1 or (candidates[-1].denominator > 1 and self._high - candidates[0] < self._unit):
            return candidates[-1]  # within the last unit usually nothing is possible: one proof says so
        return candidates[len(candidates) // 2]

    def _further(self) -> Fraction:
        """Without a pattern yet: multiples of the unit at doubling distance, up to one that always works."""
        low = math.floor(self._base / self._unit)
        asked = math.floor(max(self._low, self._unknown) / self._unit)
        step = max(1, 2 * (asked - low))
        return Fraction(min(low + step, max(asked + 1, -(-self._sequential // self._unit))) * self._unit)

    def learn(self, candidate: Fraction, feasible: bool | None, pattern: Pattern | None) -> None:
        """Take in the answer about a candidate."""
        if pattern is not None:
            self.best, self._high = pattern, candidate
        elif feasible is False:
            self._low, self._open = max(self._low, candidate), False
            self._unknown = max(self._unknown, candidate)
        else:
            self._unknown = max(self._unknown, candidate)

    def _candidates(self) -> list[Fraction]:
        """Repetend times above what is excluded or unknown and below the best, multiples of the unit first."""
        if self._high is None:
            return []
        low, high, unit = max(self._low, self._unknown), self._high, self._unit
        first, last = math.floor(low / unit) + 1, math.ceil(high / unit) - 1
        if first <= last:
            step = max(1, (last - first) // MOST_PERIODS)
            return [Fraction(multiple * unit) for multiple in range(first, last + 1, step)]
        most = self._total // max(1, math.floor(low))
        if unit < most * most:  # finer than ns: no plan could say
            return [Fraction(ns) for ns in range(math.floor(low) + 1, math.ceil(high))][:MOST_PERIODS]
        found = {
            Fraction(p * unit, q)
            for q in range(2, most + 1)
            for p in range(math.floor(low * q / unit), math.ceil(high * q / unit) + 1)
        }
        return sorted(ratio for ratio in found if low < ratio < high)


def shortest_way_through(
    problem: OneMicrobatch, pattern: Pattern, budget: Budget, limit: float, max_span: int | None = None
) -> tuple[Pattern, bool]:
    """The pattern of the same repetend time with the least latency found, and whether it is proved least."""
    _, better, bound = solve_pattern(
        problem,
        pattern.repetend_ns,
        budget,
        limit,
        unroll=pattern.unroll,
        max_span=max_span,
        hint=pattern,
        shortest=True,
    )
    if better is None or better.latency(problem) > pattern.latency(problem):
        return pattern, False
    return better, bound is not None and better.latency(problem) <= bound
