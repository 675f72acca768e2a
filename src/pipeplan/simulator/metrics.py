"""Figures of a timeline, and the critical path that sets its makespan."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add
from typing import Literal

from pipeplan.time_limit import checked
from pipeplan.workload.engine import with_links
from pipeplan.workload.kinds import Role
from pipeplan.workload.memory import in_all_copies
from pipeplan.workload.steady_state.loop import LoopCut
from pipeplan.workload.tail import Tail, tail_of
from pipeplan.workload.task_graph import Orders, TaskGraph, earliest_starts
from pipeplan.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class Rates:
    """Figures of one iteration; times in ns, the iteration begins at 0.

    ``busy_ns`` [device]; ``first_start_ns`` and ``last_end_ns`` [device], both 0 for a device without actions;
    ``tail`` is what follows the actions.
    ``bubble_rate`` is of the iteration, ``1 - sum of busy / (D * makespan)``. ``bubble_rate_span`` is
    ``1 - busy/span`` of the device with the longest time from its first start to its last end.
    """

    makespan_ns: int
    busy_ns: tuple[int, ...]
    first_start_ns: tuple[int, ...]
    last_end_ns: tuple[int, ...]
    bubble_rate: float
    bubble_rate_span: float
    tail: Tail

    @property
    def iteration_ns(self) -> int:
        """The end of everything."""
        return self.tail.iteration_ns

    @property
    def span_ns(self) -> tuple[int, ...]:
        """Time from the first start to the last end [device]."""
        return tuple(last - first for first, last in zip(self.first_start_ns, self.last_end_ns, strict=True))

    @property
    def idle_ns(self) -> tuple[int, ...]:
        """Time of the iteration in which nothing runs [device]."""
        return tuple(self.makespan_ns - busy for busy in self.busy_ns)


@dataclass(frozen=True, slots=True)
class IdleShares:
    """Why devices do not compute, as shares of all device time in an iteration.

    ``unused``: devices that run nothing. ``uneven``: the others have less work than the busiest device. The rest is
    what the busiest device idles, too: ``waiting`` for inputs in the steady state, None where there is none,
    ``ramps`` before and after it; after the last action of all ``summing`` gradients, ``stepping`` and ``gathering``
    parameters.
    """

    unused: float
    uneven: float
    waiting: float | None
    ramps: float
    summing: float
    stepping: float
    gathering: float

    @classmethod
    def of(cls, rates: Rates, steady_ns: float | None, unused: Collection[int]) -> IdleShares:
        """Shares of an iteration whose micro-batches take ``steady_ns`` at the pace of the steady state."""
        count, makespan, most = len(rates.busy_ns), rates.makespan_ns, max(rates.busy_ns)
        used = count - len(unused)
        steady = most if steady_ns is None else min(max(most, steady_ns), makespan)
        total, tail = count * rates.iteration_ns or 1, rates.tail
        return cls(
            len(unused) / count,
            (used * most - sum(rates.busy_ns)) / total,
            None if steady_ns is None else used * (steady - most) / total,
            used * (makespan - steady) / total,
            *(used * ns / total for ns in (tail.exposed_reduction_ns, tail.exposed_step_ns, tail.exposed_gather_ns)),
        )

    @property
    def total(self) -> float:
        """All of them."""
        after = self.summing + self.stepping + self.gathering
        return self.unused + self.uneven + (self.waiting or 0.0) + self.ramps + after


def puts_off_weight_grads(graph: TaskGraph, orders: Orders) -> bool:
    """Whether a weight gradient runs later than right after its input gradient, on any device."""
    operations = graph.workload.operations
    return any(
        operations[graph.operation_of[task]].role is Role.WEIGHT_GRAD and not _makes_input_grad_of(graph, before, task)
        for order in graph.on_devices(orders)
        for before, task in pairwise(order)
    )


def _makes_input_grad_of(graph: TaskGraph, before: int, task: int) -> bool:
    """Whether an action is the input gradient of the stage and the micro-batch of a weight gradient."""
    item, other = graph.operation_of[before], graph.operation_of[task]
    one, two = graph.workload.operations[item], graph.workload.operations[other]
    same = before - graph.offsets[item] == task - graph.offsets[other]
    return one.role is Role.INPUT_GRAD and one.stage == two.stage and same


def rates(graph: TaskGraph, orders: Orders, starts: Sequence[int], loop: LoopCut | None = None) -> Rates:
    """Figures of the timeline in which each task begins at ``starts`` [task], in ns; links count for nothing.

    With a ``loop`` its round runs more often, and what is after it is as much later.
    """
    durations = graph.durations
    orders = graph.on_devices(orders)
    skipped = [0] * len(orders) if loop is None else _skipped_work(graph.workload, loop)
    later = 0 if loop is None else loop.skipped_ns
    own = checked(zip(orders, skipped, strict=True), 16)
    busy = tuple(sum(map(durations.__getitem__, order)) + more for order, more in own)
    first = tuple(starts[order[0]] if order else 0 for order in orders)
    last = tuple(starts[order[-1]] + durations[order[-1]] + later if order else 0 for order in orders)
    makespan = max(last)
    spans = [end - start for start, end in zip(first, last, strict=True)]
    longest = spans.index(max(spans))  # ties: the smallest device
    return Rates(
        makespan_ns=makespan,
        busy_ns=busy,
        first_start_ns=first,
        last_end_ns=last,
        bubble_rate=_share_idle(sum(busy), len(busy) * makespan),
        bubble_rate_span=_share_idle(busy[longest], spans[longest]),
        tail=tail_of(graph.workload, graph.last_ends(starts, later), exchanged=graph.exchanged(starts, later)),
    )


def _skipped_work(workload: Workload, loop: LoopCut) -> list[int]:
    """[device] ns of what a loop runs beside what is there."""
    each = [loop.skipped_of(item) * time for item, time in enumerate(workload.durations)]
    return [sum(each[item] for item in items) for items in workload.on_resource[: len(workload.devices)]]


def in_flight(graph: TaskGraph, orders: Orders, loop: LoopCut | None = None) -> tuple[int, ...]:
    """The most micro-batches whose activations (or deferred weight gradients) each device holds at once.

    On a device whose stages have micro-batches of unequal sizes, they are counted in units of the greatest
    common divisor of the sizes. With a ``loop`` it is of all that it runs.
    """
    if graph.workload.is_inference:
        return _given(graph, orders)
    whole = enumerate(graph.on_devices(orders))
    return tuple(_in_flight(graph, device, order, loop) for device, order in whole)


def _given(graph: TaskGraph, orders: Orders) -> tuple[int, ...]:
    """[device] of forwards alone, which hold what they give until the last that takes it has ended."""
    workload, starts = graph.workload, earliest_starts(graph, with_links(graph, orders))
    changes: list[dict[int, Counter[int]]] = [defaultdict(Counter) for _ in workload.devices]
    for hold in workload.holds:
        own = workload.slots[hold.source]
        for number in checked(range(len(own)), 1024):
            samples = own.samples(number)
            begin = starts[graph.offsets[hold.source] + number]
            takers = [graph.offsets[x] + n for x in hold.targets for n in workload.slots[x].sharing(samples)]
            end = max(starts[task] + graph.durations[task] for task in takers)
            for device in workload.holders[hold.source]:
                changes[device][begin][samples[0]] += 1
                changes[device][end][samples[0]] -= 1
    found = [0] * len(changes)
    for device, moments in enumerate(changes):
        held = Counter[int]()
        for moment in sorted(moments):
            for sample, change in moments[moment].items():
                held[sample] += change
                if not held[sample]:
                    del held[sample]
            found[device] = max(found[device], len(held))
    return tuple(found)


def _in_flight(graph: TaskGraph, device: int, order: Sequence[int], loop: LoopCut | None) -> int:
    """A unit of samples is in flight while the device holds bytes on its behalf, in any of its stages."""
    workload, operation_of, offsets = graph.workload, graph.operation_of, graph.offsets
    stages = [stage for stage in workload.stages if device in stage.devices]
    pieces = 2 if any(stage.num_parted for stage in stages) else 1
    unit = (math.gcd(*(stage.microbatch_size for stage in stages)) or 1) // pieces
    effects = [(op.acquire_bytes, op.release_bytes) for op in workload.operations]
    held = [0] * (workload.mini_batch // unit)
    holding, while_running, after = 0, list[int](), list[int]()
    for task in order:
        operation = operation_of[task]
        acquire, release = effects[operation]
        begin, end = workload.slots[operation].samples(task - offsets[operation])
        units = range(begin // unit, end // unit)
        if acquire:
            for sample in units:
                holding += not held[sample]
                held[sample] += acquire
        while_running.append(holding)
        if release:
            for sample in units:
                holding -= 0 < held[sample] <= release
                held[sample] -= release
        after.append(holding)
    _, numbers = in_all_copies(graph, order, while_running, after, loop)
    return -(-max(numbers, default=0) // pieces)


def _share_idle(busy: int, available: int) -> float:
    return (available - busy) / available if available else 0.0


Reason = Literal["start", "device", "link", "dependency", "transfer", "exchange"]


@dataclass(frozen=True, slots=True)
class CriticalStep:
    """An action of the path and what it waited for: the iteration's start, or the action before it on the path.

    ``device``: that action was on the same device until then. ``dependency``: it made the input. ``transfer``: it
    made the input, which was on the way for ``lag_ns``. A message that may have to wait for its link is a step of
    its own; ``link``: the message before it was on the link until then. ``exchange``: that action was on the same
    device, and the network then exchanged state for ``lag_ns`` more.
    """

    task: int
    reason: Reason
    lag_ns: int = 0


def critical_path(graph: TaskGraph, orders: Orders, starts: Sequence[int]) -> list[CriticalStep]:
    """From time 0 to the last end, found backwards from the last end (the first such task).

    ``starts`` [task] are the earliest for these orders, so that every action begins at 0 or right when something
    ends or arrives. Where several things let it, the device (or link) goes before inputs.
    """
    ends = [*map(add, starts, graph.durations)]
    task = ends.index(max(ends))
    before = StepsBefore(graph, orders, starts)
    steps: list[CriticalStep] = []
    while (found := before.of(task)) is not None:
        step, task = found
        steps.append(step)
    steps.append(CriticalStep(task, "start"))
    return steps[::-1]


class StepsBefore:
    """Looks up what let a task start when it did; orders and starts as for :func:`critical_path`."""

    def __init__(self, graph: TaskGraph, orders: Orders, starts: Sequence[int]) -> None:
        self._graph, self._orders, self._starts, self._inputs = graph, orders, starts, Inputs(graph.workload)
        self._known: dict[int, tuple[CriticalStep, int] | None] = {}

    def of(self, task: int) -> tuple[CriticalStep, int] | None:
        """The step of a task and the task it waited for; None at the iteration's start, or after only an exchange."""
        if self._starts[task] <= 0:
            return None
        if task not in self._known:
            before = tasks_before(self._graph, self._orders, self._starts, task)
            self._known[task] = _step(self._graph, self._starts, task, before, self._inputs.of(self._graph, task))
        return self._known[task]

    def maker(self, task: int) -> int | None:
        """The task that made the last of a task's inputs; None where it has none."""
        inputs = self._inputs.of(self._graph, task)
        ends = [(self._starts[other] + self._graph.durations[other] + lag, other) for other, lag in inputs]
        return max(ends)[1] if ends else None

    def ready_ns(self, task: int) -> int:
        """When the last of a task's inputs is there."""
        ends = (
            self._starts[other] + self._graph.durations[other] + lag
            for other, lag in self._inputs.of(self._graph, task)
        )
        return max(ends, default=0)


def _step(
    graph: TaskGraph, starts: Sequence[int], task: int, before: Sequence[int], inputs: Sequence[tuple[int, int]]
) -> tuple[CriticalStep, int] | None:
    """The step of a task that started after 0, and the task it waited for; None where that was only an exchange."""
    for other in before:
        if starts[other] + graph.durations[other] == starts[task]:
            return CriticalStep(task, "device" if task < graph.num_actions else "link"), other
    for other, lag in inputs:
        if starts[other] + graph.durations[other] + lag == starts[task]:
            return CriticalStep(task, "transfer" if lag > 0 else "dependency", lag), other
    if graph.workload.exchanges:
        if not before:
            return None
        ends = [starts[other] + graph.durations[other] for other in before]
        return CriticalStep(task, "exchange", starts[task] - max(ends)), before[ends.index(max(ends))]
    raise AssertionError(f"{graph.label(task)} starts at {starts[task]} and nothing let it start then")


def tasks_before(graph: TaskGraph, orders: Orders, starts: Sequence[int], task: int) -> list[int]:
    """The tasks right before a task, one for each of its devices where there is one; orders are in time."""
    places = (
        (orders[device], bisect_left(orders[device], starts[task], key=starts.__getitem__))
        for device in graph.devices_of(task)
    )
    return [order[place - 1] for order, place in places if place]


class Inputs:
    """Looks up the tasks whose results a task needs, with their lags."""

    def __init__(self, workload: Workload) -> None:
        self._workload, self._slots, self._part_lags = workload, workload.slots, workload.part_lags
        self._sources: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for source, target, lag in workload.edges:
            self._sources[target].append((source, lag))
        self._returns: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for source, target, lag, later in workload.returns:
            self._returns[target].append((source, lag, later))

    def of(self, graph: TaskGraph, task: int) -> list[tuple[int, int]]:
        """Pairs (task, lag in ns)."""
        target = graph.operation_of[task]
        slots, number = self._slots[target], task - graph.offsets[target]
        found: list[tuple[int, int]] = []
        for source, lag in self._sources[target]:
            parts = 2 * min(slots.num_parted, self._slots[source].num_parted)
            lag = self._part_lags.get((source, target), lag) if number < parts else lag
            found.extend((graph.offsets[source] + m, lag) for m in self._workload.inputs_of(source, target, number))
        found += [
            (graph.offsets[source] + number - later, lag)
            for source, lag, later in self._returns[target]
            if number >= later
        ]
        return found
