"""Figures of a timeline, and the critical path that sets its makespan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeplan.workload.columns import IntArray, Lines, column, samples
from pipeplan.workload.engine import with_links
from pipeplan.workload.held import held_until
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
    def of(cls, rates: Rates, steady_ns: float | None, workload: Workload) -> IdleShares:
        """Shares of an iteration whose micro-batches take ``steady_ns`` at the pace of the steady state."""
        count, makespan, most = workload.num_devices, rates.makespan_ns, max(rates.busy_ns)
        unused = sum(workload.playing_each[program] for program in workload.idle_programs)
        used = count - unused
        steady = most if steady_ns is None else min(max(most, steady_ns), makespan)
        total, tail = count * rates.iteration_ns or 1, rates.tail
        return cls(
            unused / count,
            (used * most - workload.of_all(rates.busy_ns)) / total,
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
    lines = Lines.of(graph.on_devices(orders))
    skipped = [0] * len(lines) if loop is None else _skipped_work(graph.workload, loop)
    later = 0 if loop is None else loop.skipped_ns
    work = np.concatenate((np.zeros(1, graph.times.dtype), np.cumsum(graph.times[lines.tasks])))[lines.begins]
    busy = tuple(each + more for each, more in zip(np.diff(work).tolist(), skipped, strict=True))
    ends = [(lines.tasks[begin], lines.tasks[end - 1]) if end > begin else None for begin, end in lines.bounds]
    first = tuple(0 if both is None else starts[both[0]] for both in ends)
    last = tuple(0 if both is None else starts[both[1]] + graph.durations[both[1]] + later for both in ends)
    makespan = max(last)
    spans = [end - start for start, end in zip(first, last, strict=True)]
    longest = spans.index(max(spans))  # ties: the smallest device
    return Rates(
        makespan_ns=makespan,
        busy_ns=busy,
        first_start_ns=first,
        last_end_ns=last,
        bubble_rate=_share_idle(graph.workload.of_all(busy), graph.workload.num_devices * makespan),
        bubble_rate_span=_share_idle(busy[longest], spans[longest]),
        tail=tail_of(graph.workload, graph.last_ends(starts, later), exchanged=graph.exchanged(starts, later)),
    )


def _skipped_work(workload: Workload, loop: LoopCut) -> list[int]:
    """[device] ns of what a loop runs beside what is there."""
    each = [loop.skipped_of(item) * time for item, time in enumerate(workload.durations)]
    return [sum(each[item] for item in items) for items in workload.on_resource[: len(workload.devices)]]


def in_flight(
    graph: TaskGraph, orders: Orders, loop: LoopCut | None = None, starts: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The most micro-batches whose activations (or deferred weight gradients) each device holds at once.

    On a device whose stages have micro-batches of unequal sizes, they are counted in units of the greatest
    common divisor of the sizes. With a ``loop`` it is of all that it runs. ``starts`` [task] are the earliest, where
    they are known.
    """
    if graph.workload.is_inference:
        return _given(graph, earliest_starts(graph, with_links(graph, orders)) if starts is None else starts)
    lines, devices, places = Lines.of(graph.on_devices(orders)).once(graph.workload.leaders)
    while_running, after, pieces = _holding(graph, lines, devices)
    if loop is not None and len(loop.moments) > 1:
        cuts = [slice(begin, end) for begin, end in pairwise(lines.begins.tolist())]
        written = ((lines.tasks[cut].tolist(), while_running[cut].tolist(), after[cut].tolist()) for cut in cuts)
        numbers = (in_all_copies(graph, *each, loop)[1] for each in written)
        most = [max(each, default=0) for each in numbers]
    else:
        most = [0 if place is None else int(while_running[place]) for place in lines.highest(while_running)]
    counts = [-(-each // number) for each, number in zip(most, pieces, strict=True)]
    return tuple(counts[place] for place in places)


def _holding(graph: TaskGraph, lines: Lines, of: Sequence[int]) -> tuple[IntArray, IntArray, list[int]]:
    """[place] units of samples on whose behalf a device holds bytes while an action runs, and after it.

    In any of its stages. And [line] how many units a micro-batch has, of those that units are counted by. Lines are
    those ``of`` some devices.
    """
    workload = graph.workload
    units, pieces = [], []
    sizes: list[set[tuple[int, bool]]] = [set() for _ in workload.devices]
    for stage in workload.stages:
        for device in stage.devices:
            sizes[device].add((stage.microbatch_size, stage.num_parted > 0))
    for own in (sizes[device] for device in of):
        pieces.append(2 if any(parted for _, parted in own) else 1)
        units.append((math.gcd(*(size for size, _ in own)) or 1) // pieces[-1])
    devices, items = lines.numbers, graph.items[lines.tasks]
    begins, ends = _samples(graph)
    unit = np.array(units)[devices]
    first = begins[lines.tasks] // unit
    count = ends[lines.tasks] // unit - first
    places = np.repeat(np.arange(len(count)), count)
    sample = np.arange(len(places)) - np.repeat(np.cumsum(count) - count - first, count)
    # what a device does for a unit, one thing after another
    order = np.argsort(devices[places] * (workload.mini_batch + 1) + sample, kind="stable")
    at, key = places[order], sample[order]
    effects = ([op.acquire_bytes for op in workload.operations], [op.release_bytes for op in workload.operations])
    acquired, released = (column([*each, *[0] * len(workload.transfers)], len(at))[items[at]] for each in effects)
    changes = np.flatnonzero((np.diff(key) != 0) | (np.diff(devices[at]) != 0)) + 1
    while_it_runs = Lines(at, np.concatenate(([0], changes, [len(at)]))).running(acquired - released) + released
    begun = (while_it_runs == acquired) & (acquired > 0)
    ended = (while_it_runs > 0) & (while_it_runs <= released)
    started, over = (np.bincount(at[each], minlength=len(count)) for each in (begun, ended))
    after = lines.running(started - over)
    return after + over, after, pieces


def _samples(graph: TaskGraph) -> tuple[IntArray, IntArray]:
    """[action] its first sample, and the one after its last."""
    both = [samples(slots) for slots in graph.workload.slots[: len(graph.workload.operations)]]
    return np.concatenate([begins for begins, _ in both]), np.concatenate([ends for _, ends in both])


def _given(graph: TaskGraph, starts: Sequence[int]) -> tuple[int, ...]:
    """[device] of forwards alone, which hold what they give until the last that takes it has ended."""
    workload, begun = graph.workload, column(starts, 4)
    ends, rows = begun + graph.times, list[tuple[IntArray, IntArray, IntArray, IntArray]]()
    for hold in workload.holds:
        cut = slice(graph.offsets[hold.source], graph.offsets[hold.source + 1])
        first, devices = samples(workload.slots[hold.source])[0], workload.holders[hold.source]
        for moments, change in ((begun[cut], 1), (held_until(graph, hold, ends)[0], -1)):
            of = np.repeat(np.array(devices), len(first))
            rows.append((of, np.tile(first, len(devices)), np.tile(moments, len(devices)), np.full(len(of), change)))
    if not rows:
        return (0,) * len(workload.devices)
    device, sample, times, changed = (np.concatenate(each) for each in zip(*rows, strict=True))
    order = np.lexsort((times, sample, device))
    held = np.cumsum(changed[order])  # whatever begins also ends: 0 at the end of each device and sample
    places = _last_of_each(device[order], sample[order], times[order])
    last, there = order[places], (held[places] > 0).astype(int)
    same = np.append(False, (device[last][1:] == device[last][:-1]) & (sample[last][1:] == sample[last][:-1]))
    changes = there - np.where(same, np.append(0, there[:-1]), 0)
    order = np.lexsort((times[last], device[last]))
    own = device[last][order]
    kept = _last_of_each(own, times[last][order])
    numbers, found = np.cumsum(changes[order])[kept], np.zeros(len(workload.devices), np.int64)
    np.maximum.at(found, own[kept], numbers)
    return tuple(found.tolist())


def _last_of_each(*columns: IntArray) -> IntArray:
    """The last places of equal neighbours, in all of the columns."""
    differs = np.zeros(max(0, len(columns[0]) - 1), bool)
    for each in columns:
        differs |= each[1:] != each[:-1]
    return np.flatnonzero(np.append(differs, np.ones(min(1, len(columns[0])), bool)))


def _share_idle(busy: int, available: int) -> float:
    return (available - busy) / available if available else 0.0


Reason = Literal["start", "device", "link", "dependency", "transfer", "exchange"]


class CriticalStep(NamedTuple):
    """An action of the path and what it waited for: the iteration's start, or the action before it on the path.

    ``device``: that action was on the same device until then. ``dependency``: it made the input. ``transfer``: it
    made the input, which was on the way for ``lag_ns``. A message that may have to wait for its link is a step of
    its own; ``link``: the message before it was on the link until then. ``exchange``: that action was on the same
    device, and the network then exchanged state for ``lag_ns`` more.
    """

    task: int
    reason: Reason
    lag_ns: int = 0


def critical_path(
    graph: TaskGraph, orders: Orders, starts: Sequence[int], waited: Waited | None = None
) -> list[CriticalStep]:
    """From time 0 to the last end, found backwards from the last end (the first such task).

    ``starts`` [task] are the earliest for these orders, so that every action begins at 0 or right when something
    ends or arrives. Where several things let it, the device (or link) goes before inputs. What tasks ``waited`` for may
    be known.
    """
    before = StepsBefore(graph, orders, starts, waited)
    task = int(np.argmax(before.ends))
    steps: list[CriticalStep] = []
    while (found := before.of(task)) is not None:
        step, task = found
        steps.append(step)
    steps.append(CriticalStep(task, "start"))
    return steps[::-1]


_INPUT, _DEVICE, _EXCHANGE = 1, 2, 3


class StepsBefore:
    """Looks up what let a task start when it did; orders and starts as for :func:`critical_path`."""

    def __init__(self, graph: TaskGraph, orders: Orders, starts: Sequence[int], waited: Waited | None = None) -> None:
        self._graph, self._waited = graph, waited or Waited.of(graph, orders, starts)
        self._starts, self.ends = starts, self._waited.ends
        reasons, others, lags = self._found()
        self._reasons: list[int] = reasons.tolist()
        self._others: list[int] = others.tolist()
        self._lags: list[int] = lags.tolist()

    def _found(self) -> tuple[IntArray, IntArray, IntArray]:
        """[task] what let it start: how, which other, and how long after that one's end."""
        waited = self._waited
        reasons, others = np.zeros((2, len(waited.starts)), np.int64)
        lags = np.zeros_like(waited.starts)
        if self._graph.workload.exchanges:
            latest = np.zeros_like(waited.starts)
            np.maximum.at(latest, waited.behind, waited.ends[waited.before])
            last = waited.ends[waited.before] == latest[waited.behind]
            _note(reasons, waited.behind[last], _EXCHANGE)
            _note(others, waited.behind[last], waited.before[last])
            lags[waited.behind] = (waited.starts - latest)[waited.behind]
        pairs, tight = self._graph.pairs, waited.tight_inputs
        for column_, values in ((reasons, _INPUT), (others, pairs.sources[tight]), (lags, pairs.lags[tight])):
            _note(column_, pairs.targets[tight], values)
        tight = waited.tight_lines
        for column_, values in ((reasons, _DEVICE), (others, waited.before[tight]), (lags, 0)):
            _note(column_, waited.behind[tight], values)
        return reasons, others, lags

    def of(self, task: int) -> tuple[CriticalStep, int] | None:
        """The step of a task and the task it waited for; None at the iteration's start, or after only an exchange."""
        if self._starts[task] <= 0:
            return None
        reason, lag = self._reasons[task], self._lags[task]
        if reason == _DEVICE:
            return CriticalStep(task, "device" if task < self._graph.num_actions else "link"), self._others[task]
        if reason == _INPUT:
            return CriticalStep(task, "transfer" if lag > 0 else "dependency", lag), self._others[task]
        if reason == _EXCHANGE:
            return CriticalStep(task, "exchange", lag), self._others[task]
        if self._graph.workload.exchanges:
            return None
        raise AssertionError(f"{self._graph.label(task)} starts at {self._starts[task]} and nothing let it start then")

    def on_device(self, task: int) -> int | None:
        """The action whose end on its device a task waited for; None where it waited for something else."""
        busy = self._starts[task] > 0 and self._reasons[task] == _DEVICE
        return self._others[task] if busy else None

    def times_of(self, tasks: Sequence[int]) -> tuple[IntArray, IntArray]:
        """Starts and ends of tasks."""
        own = np.array(tasks, np.int64)
        return self._waited.starts[own], self._waited.ends[own]

    def maker(self, task: int) -> int | None:
        """The task that made the last of a task's inputs; None where it has none."""
        found = self._makers[task]
        return None if found < 0 else found

    @cached_property
    def _makers(self) -> list[int]:
        """[task] of those that made the last the one with the largest number; -1 where it has none."""
        pairs, makers = self._graph.pairs, np.full(len(self._waited.starts), -1)
        order = np.lexsort((pairs.sources, self._waited.arrivals))
        makers[pairs.targets[order]] = pairs.sources[order]
        return list(makers.tolist())

    def ready_ns(self, task: int) -> int:
        """When the last of a task's inputs is there."""
        return self._ready[task]

    @cached_property
    def _ready(self) -> list[int]:
        ready = np.zeros_like(self._waited.starts)
        np.maximum.at(ready, self._graph.pairs.targets, self._waited.arrivals)
        return list(ready.tolist())


def _note(column_: IntArray, tasks: IntArray, values: IntArray | int) -> None:
    """Enter values for tasks; of several for one it is the first."""
    column_[tasks[::-1]] = values if isinstance(values, int) else values[::-1]


@dataclass(frozen=True, slots=True)
class Waited:
    """What tasks waited for: [pair] when the inputs of ``graph.pairs`` arrive; tasks ``behind`` others on a line.

    Of the lines of one task those are first that are first in :meth:`~.TaskGraph.devices_of`.
    """

    graph: TaskGraph
    starts: IntArray
    ends: IntArray
    arrivals: IntArray
    before: IntArray
    behind: IntArray

    @classmethod
    def of(cls, graph: TaskGraph, orders: Orders, starts: Sequence[int]) -> Waited:
        """All of them."""
        lines, begun = Lines.of(orders), column(starts, 4)
        ends, places, resources = begun + graph.times, lines.followers, graph.workload.resources
        if any(list(own) != sorted(own) for own in resources):
            rank = {(item, line): place for item, own in enumerate(resources) for place, line in enumerate(own)}
            named = zip(graph.items[lines.tasks[places]].tolist(), lines.numbers[places].tolist(), strict=True)
            places = places[np.argsort([rank[each] for each in named], kind="stable")]
        arrivals = ends[graph.pairs.sources] + graph.pairs.lags
        return cls(graph, begun, ends, arrivals, lines.tasks[places - 1], lines.tasks[places])

    @property
    def tight_inputs(self) -> NDArray[np.bool_]:
        """[pair] whether the input arrives when its task starts."""
        return np.asarray(self.arrivals == self.starts[self.graph.pairs.targets])

    @property
    def tight_lines(self) -> NDArray[np.bool_]:
        """[neighbour] whether the one before ends when the one behind starts."""
        return np.asarray(self.ends[self.before] == self.starts[self.behind])
