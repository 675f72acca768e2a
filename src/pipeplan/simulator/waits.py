"""What each device waits for while it idles: every moment of its idle time has one cause, and mostly another device.

A device that idles before an action waits for what that action waits for: a message on its way to it, or an action
that another device runs; or, where that action had not begun yet, for what let it begin, and so on back to the moment.
After its last action it waits in the same way for the action that ends last of all. So each idle moment has one thing
that was waited for just then, and a cause:

* ``message``: a message was on its way or waited for its link, or a network exchanged state.
* ``warmup``: another device computed, and this one was filling (it had run no backward yet) or draining (it had no
  forward left to run).
* ``memory``: another device computed, in between, and this one had an action whose inputs were there and that did not
  fit into its memory beside what it held.
* ``order``: the same, and that action did fit: the schedule has it later all the same.
* ``imbalance``: another device computed, in between, and there was nothing else to do. While filling or draining it is
  imbalance, too, where the other device ran action after action of one operation without a pause: with stages of equal
  work it would have been as quick as this one.

The causes of a device add up to its idle time, to the nanosecond.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import numpy as np

from pipeplan.simulator.metrics import StepsBefore
from pipeplan.workload.kinds import BACKWARD_ROLES, Role
from pipeplan.workload.memory import capacities, held_after, memory_curves
from pipeplan.workload.steady_state.loop import LoopCut, longer
from pipeplan.workload.task_graph import TaskGraph, earliest_starts
from pipeplan.workload.workload import Workload

Cause = Literal["warmup", "message", "memory", "order", "imbalance"]

CAUSES: dict[Cause, str] = {
    "warmup": "filling and draining the pipeline",
    "message": "messages and exchanges of state",
    "memory": "memory that is full",
    "order": "the order of its actions",
    "imbalance": "devices with more work",
}
"""Every cause, and what is waited for in words."""


class Replayed(Protocol):
    """What is needed of a :class:`~pipeplan.simulator.simulation.Simulation`."""

    @property
    def workload(self) -> Workload:
        """Of all that runs."""

    @property
    def graph(self) -> TaskGraph:
        """Of what is written."""

    @property
    def orders(self) -> list[list[int]]:
        """[device] its tasks."""

    @property
    def starts(self) -> list[int]:
        """[task] ns."""

    @property
    def loop(self) -> LoopCut | None:
        """What runs more often than it is written."""

    @property
    def written_ns(self) -> int:
        """When the last of what is written ends."""


class IdlePart(NamedTuple):
    """Idle time of a device from ``begin_ns`` to ``end_ns``, of what is written, and the device that it waits for.

    None: for no other device, such as for an exchange of state, or for a message of its own on its way to another.
    """

    begin_ns: int
    end_ns: int
    cause: Cause
    whom: int | None


@dataclass(frozen=True, slots=True)
class Waits:
    """Idle ns of one device, [cause] and [device that is waited for]; its waits in time, as written."""

    by_cause: dict[Cause, int]
    by_device: dict[int, int]
    waits: tuple[IdlePart, ...]

    @property
    def longest(self) -> tuple[int, int] | None:
        """(device, ns) that it waits for longest, the first of equals; None if it waits for none."""
        return max(self.by_device.items(), key=lambda each: (each[1], -each[0]), default=None)


def waits_of(simulation: Replayed) -> tuple[Waits, ...]:
    """[device] what it waits for; devices with the same stages wait alike, and are looked at once.

    Sums are of all that runs, waits in time of what is written.
    """
    found: dict[int, Waits] = {}
    written = _Looking(simulation)
    whole, weighted = (written, ()) if simulation.loop is None else _written_out(simulation, simulation.loop)
    for device, leader in enumerate(simulation.workload.leaders):
        if leader not in found:
            own = tuple(written.told(device))
            found[leader] = _summed(own, own if whole is written else whole.told(device), weighted)
    return tuple(found[leader] for leader in simulation.workload.leaders)


_Weighted = tuple[tuple[int, int, int], ...]
"""(begin, end, how often more it runs than it is there) of what repeats."""


def _written_out(simulation: Replayed, loop: LoopCut) -> tuple[_Looking, _Weighted]:
    """The same with up to three copies of every round: the one in the middle begins and ends as all others do.

    The first begins with what ran before the loop, and not with what a copy leaves to the next.
    """
    copies = min(loop.copies, 3)
    orders = [*simulation.orders, *in_time(simulation)]
    graph, longer_orders = longer(simulation.graph, orders, loop.begins, loop.microbatches, copies - 1, loop.rounds)
    starts = earliest_starts(graph, longer_orders)
    weighted, later = [], 0
    for begin, time in loop.moments:
        weighted.append((begin + later + time, begin + later + 2 * time, loop.copies - copies))
        later += (copies - 1) * time
    devices = longer_orders[: len(simulation.orders)]
    until = simulation.written_ns + later
    return _Looking(_WrittenOut(graph.workload, graph, devices, starts, until)), tuple(weighted)


@dataclass(frozen=True, slots=True)
class _WrittenOut:
    """What runs, without a loop."""

    workload: Workload
    graph: TaskGraph
    orders: list[list[int]]
    starts: list[int]
    written_ns: int
    loop: LoopCut | None = None


def _summed(waits: tuple[IdlePart, ...], counted: Iterable[IdlePart], weighted: _Weighted) -> Waits:
    """Sums, in which waits in a round count as often as it runs."""
    by_cause: dict[Cause, int] = dict.fromkeys(CAUSES, 0)
    by_device: Counter[int] = Counter()
    for wait in counted:
        time = wait.end_ns - wait.begin_ns
        for begin, end, more in weighted:
            time += more * max(0, min(wait.end_ns, end) - max(wait.begin_ns, begin))
        by_cause[wait.cause] += time
        if wait.whom is not None:
            by_device[wait.whom] += time
    return Waits(by_cause, dict(sorted(by_device.items())), waits)


_Part = tuple[int, int, bool, int | None, int | None]
"""Begin and end in ns, whether messages are waited for, the device that is waited for, and the action it runs."""


class _Looking:
    """Looks for what idle devices wait for."""

    def __init__(self, simulation: Replayed) -> None:
        self._simulation, self._graph, self._starts = simulation, simulation.graph, simulation.starts
        orders = [*simulation.orders, *in_time(simulation)]
        self._orders, self._steps = orders, StepsBefore(self._graph, orders, self._starts)
        self._capacities = capacities(self._graph.workload)
        ends: list[int] = self._steps.ends.tolist()
        self._ends = ends
        self._last = max(range(self._graph.num_actions), key=lambda task: (ends[task], -task))

    @cached_property
    def _curves(self) -> list[list[tuple[int, int]]]:
        """[device] pairs (ns, bytes that it holds beyond the static ones from then on) for times in which it idles."""
        if not self._graph.workload.order_tells_memory:
            return memory_curves(self._graph, self._starts)
        orders = self._graph.on_devices(self._orders)
        ends = ([self._ends[task] for task in order] for order in orders)
        held = held_after(self._graph, orders)
        return [[(0, 0), *zip(each, own, strict=True)] for each, own in zip(ends, held, strict=True)]

    def told(self, device: int) -> Iterator[IdlePart]:
        """All of a device's, in time; what it waits for of its own is for no other."""
        return (wait._replace(whom=None) if wait.whom == device else wait for wait in self.waits(device))

    def waits(self, device: int) -> Iterator[IdlePart]:
        """All of a device's, in time."""
        order = self._simulation.orders[device]
        first, last = self._ramps(order)
        later = _Later(self, device, order)
        times = self._steps.times_of(order)
        for place in np.flatnonzero(times[0] > np.append(0, times[1][:-1])[: len(order)]).tolist():
            until = self._ends[order[place - 1]] if place else 0
            parts = [*self._parts(order[place], until, self._starts[order[place]])][::-1]
            for part in parts:
                yield from self._wait(part, ramp=place <= first or place > last, later=later, place=place)
        until = self._ends[order[-1]] if order else 0
        if until < self._simulation.written_ns:
            for part in [*self._parts_at_end(until)][::-1]:
                yield from self._wait(part, ramp=bool(order), later=None, place=len(order))

    def _ramps(self, order: Sequence[int]) -> tuple[int, int]:
        """The place up to which a device fills, and the one after which it drains."""
        workload = self._graph.workload
        roles = [operation.role for operation in workload.operations] + [None] * len(workload.transfers)
        role = np.array([(2 if each is Role.FORWARD else each in BACKWARD_ROLES) for each in roles], int)
        own = role[self._graph.items[np.array(order, np.int64)]]
        backwards, forwards = np.flatnonzero(own == 1), np.flatnonzero(own == 2)
        return int(backwards[0]) if len(backwards) else 0, int(forwards[-1]) if len(forwards) else len(own)

    def _parts(self, task: int, begin_ns: int, end_ns: int) -> Iterator[_Part]:
        """What a task that starts at ``end_ns`` waits for since ``begin_ns``, from its start back."""
        while end_ns > begin_ns:
            found = self._steps.of(task)
            if found is None:  # only an exchange of state, before all else
                yield begin_ns, end_ns, True, None, None
                return
            step, other = found
            ended = self._ends[other]
            if ended < end_ns:
                whom = None if step.reason == "exchange" else self._device_of(other)
                yield max(begin_ns, ended), end_ns, True, whom, None
            yield from self._running(other, begin_ns, min(ended, end_ns))
            task, end_ns = other, self._starts[other]

    def _parts_at_end(self, begin_ns: int) -> Iterator[_Part]:
        """What a device waits for that has nothing more to do."""
        yield from self._running(self._last, begin_ns, self._ends[self._last])
        yield from self._parts(self._last, begin_ns, self._starts[self._last])

    def _running(self, task: int, begin_ns: int, end_ns: int) -> Iterator[_Part]:
        """The time in which a task runs."""
        begin_ns = max(begin_ns, self._starts[task])
        if begin_ns < end_ns:
            on_link = task >= self._graph.num_actions
            yield begin_ns, end_ns, on_link, self._device_of(task), None if on_link else task

    def _device_of(self, task: int) -> int:
        """The first device that runs an action, or that sends a message."""
        workload, item = self._graph.workload, self._graph.operation_of[task]
        if task < self._graph.num_actions:
            return workload.holders[item][0]
        return workload.links[workload.transfers[item - len(workload.operations)].link][0]

    def _wait(self, part: _Part, *, ramp: bool, later: _Later | None, place: int) -> Iterator[IdlePart]:
        """A part of an idle time with its cause, or with two, one after the other."""
        begin, end, message, whom, task = part
        if message or task is None:
            yield IdlePart(begin, end, "message", whom)
        elif later is None and not ramp:  # it runs nothing at all
            yield IdlePart(begin, end, "imbalance", whom)
        elif ramp or later is None:
            yield IdlePart(begin, end, "imbalance" if self._at_full_pace(task) else "warmup", whom)
        else:
            ready, fitting = later.ready_ns(place, begin, end)
            bounds = (begin, min(max(ready, begin), end), min(max(fitting, begin), end), end)
            for cause, since, until in zip(_IN_BETWEEN, bounds, bounds[1:], strict=False):
                if since < until:
                    yield IdlePart(since, until, cause, whom)

    def _at_full_pace(self, task: int) -> bool:
        """Whether it began when its device had just run the same for another micro-batch."""
        found = self._steps.of(task)
        if found is None or found[0].reason != "device":
            return False
        return self._graph.operation_of[found[1]] == self._graph.operation_of[task]

    def fits(self, device: int, task: int, at_ns: int) -> bool:
        """Whether a device could run an action beside what it holds at a time."""
        capacity = self._capacities[device]
        if capacity is None:
            return True
        curve = self._curves[device]
        held = curve[bisect_right(curve, at_ns, key=lambda each: each[0]) - 1][1]
        effect = self._graph.workload.effects[self._graph.operation_of[task]]
        return held + effect.acquire + effect.workspace <= capacity

    def inputs_ns(self, task: int) -> int:
        """When all its inputs are there."""
        return self._steps.ready_ns(task)

    def operations_of(self, tasks: Sequence[int]) -> Iterable[int]:
        """The numbers of their operations."""
        return map(self._graph.operation_of.__getitem__, tasks)


_IN_BETWEEN: tuple[Cause, ...] = ("imbalance", "memory", "order")
"""While nothing else is ready, while something is that does not fit, and while something is that fits."""


class _Later:
    """What a device has still to run: of each operation the next action, other than the one that it runs next."""

    def __init__(self, looking: _Looking, device: int, order: Sequence[int]) -> None:
        self._looking, self._device, self._order = looking, device, order
        self._places: dict[int, list[int]] = {}
        for place, operation in enumerate(looking.operations_of(order)):
            self._places.setdefault(operation, []).append(place)

    def ready_ns(self, place: int, begin_ns: int, end_ns: int) -> tuple[int, int]:
        """Since when something else was ready in a time, and since when something that fits; its end if none was.

        The device runs what stands at ``place`` next.
        """
        ready, fitting = end_ns, end_ns
        for places in self._places.values():
            at = bisect_left(places, place)
            at += at < len(places) and places[at] == place
            if at == len(places):
                continue
            task = self._order[places[at]]
            since = self._looking.inputs_ns(task)
            if since < end_ns:
                ready = min(ready, since)
                if self._looking.fits(self._device, task, max(since, begin_ns)):
                    fitting = min(fitting, since)
        return ready, fitting


def in_time(simulation: Replayed) -> Iterator[list[int]]:
    """The messages of every link, and what runs on networks, in time."""
    graph = simulation.graph
    count = len(graph.workload.devices)
    orders: list[list[int]] = [[] for _ in range(graph.workload.num_resources - count)]
    for item, resources in enumerate(graph.workload.resources):
        for resource in resources:
            if resource >= count:
                orders[resource - count] += range(graph.offsets[item], graph.offsets[item + 1])
    for order in orders:
        yield sorted(order, key=simulation.starts.__getitem__)
