"""What a search for a schedule tries, in order: simple schedules, the repetend, then parts of the schedule again.

A step is a frozen dataclass whose fields are its constants; :data:`STEPS` is the order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import permutations

from pipeplan.errors import InfeasibleError, SearchTimeoutError
from pipeplan.schedule.between_blocks import RepetendBetweenBlocks
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.cpsat.repetend import least_period, shortest_way_through, solve_pattern
from pipeplan.schedule.cpsat.windows import Ramps, SlidingWindows, WholeHorizon
from pipeplan.schedule.few_devices import ProvingByDevices, ScheduleOfAllDevices
from pipeplan.schedule.hoisting import Hoisted
from pipeplan.schedule.list_scheduling import PolicySearch, list_schedule
from pipeplan.schedule.longer import ShorterRun
from pipeplan.schedule.pattern import (
    Pattern,
    compose,
    memory_in_turn,
    microbatch_by_microbatch,
    middle_repetition,
    pattern_of,
    sequential_time,
    whole_repetitions,
)
from pipeplan.schedule.rules.sweep import built_in_rules, sweeping
from pipeplan.schedule.state import ScheduleCandidate, ScheduleStep, SearchState, SearchStep, origin_of
from pipeplan.search_constants import (
    CLASSIC_TASKS,
    HOISTED_POLICIES_SHARE,
    LAST_ORDERS,
    MOST_SWEPT,
    PATTERN_SHARE,
    POLICIES_FRUITLESS,
    POLICIES_KEPT,
    POLICIES_MANY,
    POLICIES_SHARE,
    POLICIES_SWEPT,
    POLICIES_WAITS,
    PROVING_SHARE_FIRST,
    PROVING_SHARE_LAST,
    PROVING_SHARE_SECOND,
    REPETEND_SHARE,
    REPETEND_SHARE_ASKED,
    RULES_SHARE,
    RULES_TASKS,
    SECONDS_PER_LOOK,
    SECONDS_PER_POLICY,
    SECONDS_PER_SWEEP,
    UNROLLED_MOST,
    UNROLLED_SHARE,
)
from pipeplan.units import format_bytes
from pipeplan.workload.kinds import Role
from pipeplan.workload.memory import peak_memory
from pipeplan.workload.steady_state.rate import CutOrders
from pipeplan.workload.steady_state.repetend import find_repetend
from pipeplan.workload.tail import best_tail
from pipeplan.workload.task_graph import TaskGraph


@dataclass(frozen=True)
class KnownSchedule(ScheduleStep):
    """A known schedule of the same workload; what is found is at least as short."""

    name = "known schedule"
    when = "auto; the search goes on from a schedule that is written out"

    def applies(self, state: SearchState) -> bool:
        known = state.known
        return state.scheduler == "auto" and known is not None and known.loop is None  # which is not of all actions

    def run(self, state: SearchState) -> None:
        assert state.known is not None
        orders, reduction = state.known.graph.on_devices(state.known.orders), state.problem.reduction
        own = [list(order) for order in orders] if reduction is None else reduction.to_reduced(orders)
        state.offer(state.candidate(own, state.known.scheduler))


@dataclass(frozen=True)
class FirstSchedule(ScheduleStep):
    """A valid schedule right away: one micro-batch after another, or where that does not fit, the slowest pattern.

    A micro-batch alone needs the least memory, and the pattern may run its branches in any order.
    """

    name = "first schedule"
    when = "always"
    needed = True

    def applies(self, state: SearchState) -> bool:
        return True

    def run(self, state: SearchState) -> None:
        problem = state.problem
        if state.offer(state.candidate(microbatch_by_microbatch(problem), "sequential")):
            return
        budget, span = state.budget, state.max_span
        feasible, pattern, _ = solve_pattern(problem, sequential_time(problem), budget, budget.remaining, max_span=span)
        if pattern is not None:
            state.offer(state.candidate(compose(problem, pattern), "repetend"))
            if state.best is not None:  # this, or a known one that is better
                return
            raise InfeasibleError(
                "devices whose forwards are quicker than those after them run ahead, and what they give then waits in "
                f"their memory; raise --memory to {format_bytes(memory_in_turn(problem))}, or lower --microbatches"
            )
        if feasible is False:
            raise InfeasibleError(
                "no order of one micro-batch's operations fits into the devices' memory, although each of them alone "
                f"does; raise --memory to {format_bytes(memory_in_turn(problem))}"
            )
        else:
            raise SearchTimeoutError(
                f"no schedule that fits was found in {state.budget.elapsed:.1f} s; raise --time-limit, or --memory to "
                f"{format_bytes(memory_in_turn(problem))}"
            )


@dataclass(frozen=True)
class QuickClassics(ScheduleStep):
    """The classic schedules that take milliseconds, where there are few actions.

    They are looked at even if no time is left, so that the result is never worse, and also beside a best one, since
    they may need less memory.
    """

    most_tasks: int = CLASSIC_TASKS
    name = "classic schedules"
    when = "auto; at most {most_tasks} actions"

    def applies(self, state: SearchState) -> bool:
        return state.scheduler == "auto" and state.graph.num_tasks <= self.most_tasks

    def run(self, state: SearchState) -> None:
        _offer_classics(state, quick=True)


@dataclass(frozen=True)
class SlowClassics(ScheduleStep):
    """Those that are made by trying many orders, as long as there is time, and all others if they were not tried.

    Where the best is proved, those for which there are many actions are left out.
    """

    few_tasks: int = CLASSIC_TASKS
    name = "slow classic schedules"
    when = "auto; at most {few_tasks} actions, or nothing proved best"

    def applies(self, state: SearchState) -> bool:
        return state.scheduler == "auto" and (state.graph.num_tasks <= self.few_tasks or not state.proved)

    def run(self, state: SearchState) -> None:
        with state.budget.ended():
            _offer_classics(state, quick=False)
        if state.graph.num_tasks > self.few_tasks and not state.proved:
            _offer_classics(state, quick=True)


def _offer_classics(state: SearchState, *, quick: bool) -> None:
    tasks = state.graph.num_tasks
    for name, classic in CLASSIC.items():
        late = state.budget.interrupted if quick else state.budget.expired
        useless = not quick and state.proved and not classic.automatic
        if classic.is_quick(tasks) != quick or late or useless or classic.applies(state.problem) is not None:
            continue
        orders = classic.fitting_orders(state.problem, state.graph)
        if orders is not None:
            state.offer(state.candidate(orders, name))
        state.budget.charge(0.0 if quick else classic.seconds(tasks))


@dataclass(frozen=True)
class RepetendSearch(ScheduleStep):
    """The best pattern of unroll 1, or of the one that is asked for, as it is and with its shortest way through."""

    share: float = REPETEND_SHARE
    share_of_asked: float = REPETEND_SHARE_ASKED
    name = "repetend"
    when = "always"

    def applies(self, state: SearchState) -> bool:
        return True

    def run(self, state: SearchState) -> None:
        seconds = state.budget.seconds * (self.share if state.unroll is None else self.share_of_asked)
        least = least_period(
            state.problem,
            state.budget,
            seconds,
            unroll=state.unroll or 1,
            max_span=state.max_span,
            on_pattern=lambda pattern: _offer_pattern(state, pattern),
            known=state.least_period,
        )
        state.repetend_seconds = state.budget.elapsed
        state.period_proved = max(state.least_period, Fraction(least.bound_ns, state.unroll or 1))
        if least.pattern is not None:
            _take_pattern(state, least.pattern, seconds)


def _take_pattern(state: SearchState, pattern: Pattern, seconds: float) -> None:
    """Replay a pattern better than what is known, as it is and with its shortest way through."""
    _offer_pattern(state, pattern)
    limit = PATTERN_SHARE * seconds if state.finished else seconds
    state.pattern, _ = shortest_way_through(state.problem, pattern, state.budget, limit, state.max_span)
    _offer_pattern(state, state.pattern)


def _offer_pattern(state: SearchState, pattern: Pattern) -> None:
    middle = middle_repetition(state.problem, pattern)
    kept = whole_repetitions(state.problem, pattern) if middle and pattern.begins else frozenset[int]()
    state.offer(state.candidate(compose(state.problem, pattern), "repetend", middle, kept))


@dataclass(frozen=True)
class BuiltInRules(ScheduleStep):
    """The built-in rules (FlexPipe, section 6): as many as have about ``tasks`` actions in all."""

    share: float = RULES_SHARE
    tasks: int = RULES_TASKS
    name = "built-in rules"
    when = "auto; nothing proved best"

    def applies(self, state: SearchState) -> bool:
        return state.scheduler == "auto" and not state.finished

    def run(self, state: SearchState) -> None:
        graph, budget = state.graph, state.budget
        limit = budget.used + budget.seconds * self.share
        rules = built_in_rules(state.problem.workload)
        swept = sweeping(graph, rules[:: 1 + len(rules) * graph.num_tasks // self.tasks])
        while not state.finished and budget.used <= limit and (found := next(swept, None)) is not None:
            state.offer(state.candidate(found.orders, f"rules: {found.rules}"))
            budget.charge(graph.num_tasks * SECONDS_PER_SWEEP)


@dataclass(frozen=True)
class ListScheduling(ScheduleStep):
    """Local search over list-scheduling policies, given up after ``fruitless`` changes without improvement.

    All settings of the switches are tried with ``swept`` of the best limits of micro-batches in flight; ``kept``
    policies are changed further, to ``shares`` of durations to wait. Of more than ``many`` actions each takes
    seconds; if ``expecting``, one that expects what all devices run together may then come first.
    """

    share: float = POLICIES_SHARE
    fruitless: int = POLICIES_FRUITLESS
    swept: int = POLICIES_SWEPT
    kept: int = POLICIES_KEPT
    shares: tuple[float, ...] = POLICIES_WAITS
    many: int = POLICIES_MANY
    expecting: bool = False
    name = "list scheduling"
    when = "auto; nothing proved best; every stage on one device, or on all"

    def applies(self, state: SearchState) -> bool:
        widths = {len(devices) for devices in state.problem.devices}
        return state.scheduler == "auto" and widths <= {1, state.problem.num_devices} and not state.finished

    def run(self, state: SearchState) -> None:
        problem, budget = state.problem, state.budget
        many = state.graph.num_tasks > self.many
        policies = PolicySearch(
            problem, budget.seed, self.swept, self.kept, self.shares, many=many, expecting=self.expecting
        )
        limit = budget.used + budget.seconds * self.share
        while not state.finished and budget.used < limit and policies.fruitless < self.fruitless:
            policy = policies.propose()
            orders = list_schedule(problem, state.graph, policy)
            candidate = None if orders is None else state.candidate(orders, "rules")
            policies.learn(policy, None if candidate is None else candidate.iteration)
            state.offer(candidate)
            budget.charge(state.graph.num_tasks * SECONDS_PER_POLICY)


@dataclass(frozen=True)
class AdoptedRepetitions(ScheduleStep):
    """If a good schedule repeats with a shorter period than the pattern, its repetition becomes the pattern."""

    most_unroll: int = ShorterRun.most_unroll
    many: int = MOST_SWEPT
    name = "adopted repetitions"
    when = (
        "unroll and span are open; at least 2 micro-batches; beyond {many} actions not where both the best, which "
        "repeats, and its period are proved"
    )

    def applies(self, state: SearchState) -> bool:
        if state.unroll is not None or state.max_span is not None or state.problem.num_microbatches < 2:
            return False
        best, pattern = state.best, state.pattern
        if state.graph.num_tasks <= self.many:  # it takes a moment, and what is as short may be simpler
            return True
        if best is None or pattern is None or not best.frozen or not state.proved:
            return True
        return pattern.period > max(state.period_proved, state.least_period)

    def run(self, state: SearchState) -> None:
        for candidate in state.others:
            if candidate.frozen or state.budget.expired:
                continue
            repetend = find_repetend(state.graph, candidate.orders, candidate.starts, self.most_unroll)
            if repetend is None:
                continue
            cut = CutOrders.of(state.graph.workload, candidate.orders, repetend.first, repetend.unroll)
            state.offer(replace(candidate, frozen=cut.tasks))
            pattern = pattern_of(state.problem, candidate.orders, repetend)
            if pattern is not None and (state.pattern is None or pattern.period < state.pattern.period):
                state.pattern, state.period_proved = pattern, state.least_period
                state.repetend_seconds = state.budget.elapsed


@dataclass(frozen=True)
class UnrolledRepetends(ScheduleStep):
    """Several micro-batches per repetend, where one rounds the period up: only for less than what is known."""

    share: float = UNROLLED_SHARE
    most_unroll: int = UNROLLED_MOST
    name = "unrolled repetends"
    when = "--scheduler repetend; the unroll is open"

    def applies(self, state: SearchState) -> bool:
        return state.unroll is None and state.scheduler == "repetend"

    def run(self, state: SearchState) -> None:
        problem, budget = state.problem, state.budget
        bound = state.least_period
        limit = budget.used + budget.seconds * self.share
        for unroll in range(2, self.most_unroll + 1):
            reached = state.pattern.period if state.pattern is not None else None
            seconds = (limit - budget.used) / (self.most_unroll + 1 - unroll)
            if reached == bound or unroll > problem.num_microbatches // 2 or seconds <= 0 or budget.expired:
                return
            least = least_period(
                problem, budget, seconds, unroll=unroll, max_span=state.max_span, below=reached, known=bound
            )
            found = least.pattern
            if found is not None and (reached is None or found.period < reached):
                state.period_proved = max(bound, Fraction(least.bound_ns, unroll))
                state.repetend_seconds = budget.elapsed
                _take_pattern(state, found, seconds)


@dataclass(frozen=True)
class LessMemory(ScheduleStep):
    """Where the best schedule is proved and cannot be repeated: search for one as short that can, with no more memory.

    Without a cap, patterns with many micro-batches in flight are as good as any to the solver; with one it finds
    those that fill and drain sooner.
    """

    repetend: RepetendSearch = field(default_factory=RepetendSearch)
    ramps: Ramps = field(default_factory=Ramps)
    name = "less memory"
    when = "the best schedule is proved and cannot be repeated, another one can; time is left"

    def applies(self, state: SearchState) -> bool:
        assert state.best is not None
        return state.proved and not state.best.frozen and state.steady is not None and not state.budget.expired

    def run(self, state: SearchState) -> None:
        assert state.best is not None
        static = state.problem.workload.static_bytes
        peaks = peak_memory(state.graph, state.best.orders)
        most = max(memory.peak_bytes - static(device) for device, memory in enumerate(peaks))
        limits = tuple(most if capacity is None else min(most, capacity) for capacity in state.problem.capacity)
        problem = replace(state.problem, capacity=limits)
        other = replace(state, problem=problem, unroll=None, best=None, steady=None, progress=None)
        self.repetend.run(other)
        self.ramps.run(other)
        state.offer(other.steady)


@dataclass(frozen=True)
class LastWeightGradients(ScheduleStep):
    """Which stage's last weight gradients a device runs first, so that its gradient sums overlap with the others.

    What a device runs at its end and is nothing but weight gradients is sorted by stage, in each of up to ``most``
    orders of its stages; of more stages those are tried that begin with another one. Devices take turns as long as one
    ends sooner for it.
    """

    most: int = LAST_ORDERS
    name = "last weight gradients"
    when = "auto; backward is split, and gradients are summed, stepped or gathered; a device has several stages"

    def applies(self, state: SearchState) -> bool:
        workload = state.problem.workload
        return state.scheduler == "auto" and workload.has_tail and workload.splits_backward and not state.finished

    def run(self, state: SearchState) -> None:
        assert state.best is not None
        scheduler, graph = f"{origin_of(state.best.scheduler)}+weights", state.graph
        chosen, better = state.best, True
        least = self._ends(graph, chosen)
        while better and not state.finished:
            better = False
            for device in range(state.problem.num_devices):
                for order in self._orders(state, chosen.orders[device]):
                    own = chosen.orders[: state.problem.num_devices]
                    found = state.candidate([*own[:device], order, *own[device + 1 :]], scheduler)
                    state.budget.charge(graph.num_tasks * SECONDS_PER_LOOK)
                    if found is not None and self._ends(graph, found) < least:
                        chosen, least, better = found, self._ends(graph, found), True
                        state.offer(found)

    @staticmethod
    def _ends(graph: TaskGraph, candidate: ScheduleCandidate) -> tuple[int, int]:
        """The end of the last device, and the sum over all, which tells whether one that is not the last improves."""
        _, tail = best_tail(graph.workload, graph.last_ends(candidate.starts), graph.exchanged(candidate.starts))
        return tail.iteration_ns, sum(tail.ended_ns)

    def _orders(self, state: SearchState, order: Sequence[int]) -> Iterator[list[int]]:
        """A device's order with the weight gradients at its end by stage, in each order of their stages."""
        operations, of = state.problem.workload.operations, state.graph.operation_of
        begin = len(order)
        while begin and operations[of[order[begin - 1]]].role is Role.WEIGHT_GRAD:
            begin -= 1
        stages = [*dict.fromkeys(of[task] for task in order[begin:])]
        if len(stages) < 2:
            return
        few = math.factorial(len(stages)) <= self.most
        firsts = permutations(stages) if few else ((each, *(o for o in stages if o != each)) for each in stages)
        for items in firsts:
            place = {item: number for number, item in enumerate(items)}
            yield [*order[:begin], *sorted(order[begin:], key=lambda task: (place[of[task]], task))]


STEPS: tuple[SearchStep, ...] = (
    ShorterRun(),
    KnownSchedule(),
    FirstSchedule(),
    QuickClassics(),
    ProvingByDevices(share=PROVING_SHARE_FIRST, share_of_few=0.0),
    Hoisted(
        steps=(
            FirstSchedule(),
            QuickClassics(),
            ProvingByDevices(share=PROVING_SHARE_FIRST, share_of_few=0.0),
            ListScheduling(share=HOISTED_POLICIES_SHARE),
            SlowClassics(),
            BuiltInRules(),
        )
    ),
    RepetendSearch(),
    ListScheduling(expecting=True),
    ProvingByDevices(share=PROVING_SHARE_SECOND),
    RepetendBetweenBlocks(),
    SlowClassics(),
    BuiltInRules(),
    AdoptedRepetitions(),
    LastWeightGradients(),
    UnrolledRepetends(),
    Ramps(),
    ScheduleOfAllDevices(),
    WholeHorizon(),
    SlidingWindows(),
    WholeHorizon(),
    ProvingByDevices(share=PROVING_SHARE_LAST),
    ScheduleOfAllDevices(),
    LessMemory(),
)
"""After the first valid schedule the most valuable comes first, as long as there is time."""
