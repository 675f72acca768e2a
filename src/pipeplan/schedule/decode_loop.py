"""The schedule of a decoding loop: orders whose repetend, one step of every group, is as short as can be.

A repetend takes at least the busiest device's work in it, and at least a group's way round the stages and back, since
its next step begins with its token (:func:`~pipeplan.workload.bounds.period_bound`). Where every device has one stage,
groups one after another take no longer than the greater of the two, which is proved by that. Elsewhere devices choose
between stages: by rules, of which one has no group wait on its way, and where these stay above the bound by patterns
(:mod:`.cpsat.repetend`), first of a single micro-batch, then of all groups, which proves what is least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from heapq import heappush
from math import ceil

from pipeplan.errors import InfeasibleError, SearchTimeoutError
from pipeplan.schedule.cpsat.repetend import least_period, shortest_way_through
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.pattern import Pattern, compose, microbatch_by_microbatch
from pipeplan.schedule.search import timed
from pipeplan.schedule.state import Schedule
from pipeplan.search_constants import DECODE_INSTANCES, DECODE_SHORTEST_SHARE
from pipeplan.units import format_bytes, rounded_up
from pipeplan.workload.bounds import period_bound
from pipeplan.workload.engine import Engine
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.slices import repetend_of
from pipeplan.workload.task_graph import Orders, TaskGraph, task_graph
from pipeplan.workload.workload import Workload


def decode_schedule(workload: Workload, budget: Budget) -> Schedule:
    """The schedule with the least time from token to token that is found, and what is proved of that.

    Its ``period_bound_ns`` is per micro-batch, of every schedule that repeats after a step of every group.

    Raises:
        InfeasibleError: memory has no room for a step.
        SearchTimeoutError: time ran out before one that repeats was found.
    """
    problem, given, groups = OneMicrobatch.of(workload), task_graph(workload), workload.step_microbatches
    bound = period_bound(problem)
    best: tuple[Fraction, int, Schedule] | None = None
    for name, orders in _known(problem, ceil(bound * groups)):
        found = _repeated(problem, given, orders, name)
        if found is not None and (best is None or found[:2] < best[:2]):
            best = found
        if best is not None and best[0] * groups == ceil(bound * groups):
            break
    for unroll in dict.fromkeys((1, groups)):
        if best is not None and best[0] * groups == ceil(bound * groups):
            break
        proved, found = _solved(problem, given, budget, unroll, None if best is None else best[0], bound)
        best, bound = best if found is None else found, max(bound, proved)
    if best is None:
        if not budget.expired:
            raise InfeasibleError(
                "no order was found in which what a step of every group gives fits into the devices' memory beside "
                f"the cache; raise --memory to {format_bytes(max(enough_bytes(workload)))}, which is enough"
            )
        raise SearchTimeoutError(f"no loop was found in {budget.elapsed:.1f} s; raise --time-limit")
    return replace(best[2], period_bound_ns=min(best[0], bound), seconds=budget.elapsed)


def enough_bytes(workload: Workload) -> list[int]:
    """[device] bytes with which any order fits: no group has more than one result of a stage that is not taken yet."""
    found = [workload.static_bytes(device) for device in range(len(workload.devices))]
    for device in range(len(found)):
        here = [each for each in workload.operations if device in workload.stages[each.stage].devices]
        found[device] += workload.step_microbatches * sum(each.acquire_bytes for each in here)
        found[device] += max((each.workspace_bytes for each in here), default=0)
    return [rounded_up(size) for size in found]


def _known(problem: OneMicrobatch, repetend_ns: int) -> Iterator[tuple[str, Orders]]:
    """Orders that are quick to make: group after group, without waiting where a repetend has so many ns, and what came
    first or is nearest to its end."""
    yield "in turn", microbatch_by_microbatch(problem)
    if (pattern := without_waiting(problem, repetend_ns)) is not None:
        yield "without waiting", compose(problem, pattern)
    graph = task_graph(problem.workload)
    keys: list[tuple[str, Callable[[_FirstOf, int], tuple[int, ...]]]] = [
        ("first come", lambda run, task: (run.ready_at[task], run.microbatch(task), task)),
        ("steps first", lambda run, task: (run.is_chunk(task), run.ready_at[task], run.microbatch(task), task)),
        ("nearest to the end", lambda run, task: (-graph.operation_of[task], task)),
    ]
    for name, key in keys:
        run = _FirstOf(graph, key)
        run.run()
        yield name, run.device_orders


def without_waiting(problem: OneMicrobatch, repetend_ns: int) -> Pattern | None:
    """The pattern in which each group runs through all stages and waits nowhere, as soon after the one before it as
    devices are free in every repetition; None where the last would begin after a repetend, or a group takes longer."""
    begins = [0] * problem.num_operations
    for i in problem.order:
        for source, target, lag, *_ in problem.edges:
            if target == i:
                begins[i] = max(begins[i], begins[source] + problem.durations[source] + lag)
    for source, target, lag, _ in problem.returns:
        if begins[source] + problem.durations[source] + lag > begins[target] + repetend_ns:
            return None
    busy: list[list[tuple[int, int]]] = [[] for _ in problem.on_device]
    shifts, shift = list[int](), 0
    for _ in range(problem.workload.step_microbatches):
        while (later := _room_after(problem, begins, busy, shift, repetend_ns)) is not None:
            shift = later
            if shift >= repetend_ns:
                return None
        shifts.append(shift)
        for i, begin in enumerate(begins):
            for device in problem.devices[i]:
                busy[device].append(((begin + shift) % repetend_ns, problem.durations[i]))
    return Pattern(len(shifts), repetend_ns, tuple(tuple(begin + each for each in shifts) for begin in begins))


def _room_after(
    problem: OneMicrobatch, begins: Sequence[int], busy: Sequence[Sequence[tuple[int, int]]], shift: int, period: int
) -> int | None:
    """The earliest shift of a group's starts at which what stands in its way has ended; None where nothing does.

    Of a group's own operations on a device each stands in the way of the others at every shift.
    """
    for device, operations in enumerate(problem.on_device):
        own: list[tuple[int, int]] = []
        for i in operations:
            start, duration = (begins[i] + shift) % period, problem.durations[i]
            for number, (other, length) in enumerate((*own, *busy[device])):
                if (start - other) % period < length or (other - start) % period < duration:
                    return period if number < len(own) else shift + (other + length - start) % period
            own.append((start, duration))
    return None


def _repeated(
    problem: OneMicrobatch, given: TaskGraph, orders: Orders, name: str
) -> tuple[Fraction, int, Schedule] | None:
    """Period, bytes and schedule of the given workload by a problem's orders; None if it fits or repeats not."""
    found = timed(problem, given, orders, name)
    repetend = None if found is None else repetend_of(found.graph, found.orders)
    if found is None or repetend is None:
        return None
    begins = tuple(repetend.first[operation.id] for operation in given.workload.operations)
    return repetend.period, found.most_bytes, replace(found, repetend=(begins, repetend.unroll))


def _solved(
    problem: OneMicrobatch, given: TaskGraph, budget: Budget, unroll: int, below: Fraction | None, bound: Fraction
) -> tuple[Fraction, tuple[Fraction, int, Schedule] | None]:
    """What is proved of the period, and a schedule that is better: by a pattern of so many groups that all repeat."""
    groups = problem.workload.step_microbatches
    if problem.num_operations * unroll > DECODE_INSTANCES and below is not None:
        return bound, None
    limit = budget.remaining / (2 if unroll < groups else 1)
    least = least_period(problem, budget, limit, unroll=unroll, below=below, known=bound)
    proved = Fraction(least.bound_ns, groups) if unroll == groups else bound
    if least.pattern is None:
        return proved, None
    # in the shortest way through few steps have it
    pattern, _ = shortest_way_through(problem, least.pattern, budget, DECODE_SHORTEST_SHARE * budget.remaining)
    found = _repeated(problem, given, compose(problem, pattern), "repetend")
    return proved, found if found is not None and (below is None or found[0] < below) else None


class _FirstOf(Engine):
    """Every device runs the ready action with the least key, as soon as all of its devices are free.

    Every operation runs its micro-batches in turn, and chunks of prompts are no further than the steps beside them:
    nothing else holds them back.
    """

    def __init__(self, graph: TaskGraph, key: Callable[[_FirstOf, int], tuple[int, ...]]) -> None:
        super().__init__(graph)
        self._key = key
        self._ready: list[set[int]] = [set() for _ in self.free]
        self._begun = [0] * len(graph.workload.operations)
        stages = [each.stage for each in graph.workload.operations]
        count = sum(bool(stage.blocks) for stage in graph.workload.stages)
        self._beside = [stages.index(stage - count) if stage >= count else None for stage in stages]
        for task in range(graph.num_actions):
            if not self.waiting[task]:
                self._add(task)

    def microbatch(self, task: int) -> int:
        """The micro-batch of an action."""
        return task - self.graph.offsets[self.graph.operation_of[task]]

    def is_chunk(self, task: int) -> bool:
        """Whether it is of a prompt."""
        return self._beside[self.graph.operation_of[task]] is not None

    def _add(self, task: int) -> None:
        for device in self.graph.devices_of(task):
            self._ready[device].add(task)

    def arrived(self, task: int) -> None:
        self._add(task)
        super().arrived(task)

    def _may_start(self, task: int) -> bool:
        x, m = self.graph.operation_of[task], self.microbatch(task)
        beside = self._beside[x]
        free = all(self.free[device] <= self.now for device in self.graph.devices_of(task))
        return (
            free
            and self.ready_at[task] <= self.now
            and self._begun[x] == m
            and (beside is None or m < self._begun[beside])
        )

    def choose(self, device: int) -> int | None:
        task = min(filter(self._may_start, self._ready[device]), key=lambda task: self._key(self, task), default=None)
        if task is not None:
            self._begun[self.graph.operation_of[task]] += 1
            for each in self.graph.devices_of(task):
                self._ready[each].discard(task)
                heappush(self.events, (self.now + self.durations[task], each))
        return task
