"""What devices hold besides state while actions run, and whether there is room for more.

An action allocates its holds when it starts; each is freed when the last of its targets ends. Workspace is held while
the action runs. :class:`MemoryState` follows starts and ends in time. Where all that holds memory on a device runs
on its compute, one after another, order alone says it all: an action's start and end are then one step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from math import inf

import numpy as np

from pipeplan.time_limit import checked, checkpoint
from pipeplan.units import format_bytes
from pipeplan.workload.columns import IntArray, Lines, column
from pipeplan.workload.elements import DeviceMemory
from pipeplan.workload.engine import with_links
from pipeplan.workload.exchanges import WholeState
from pipeplan.workload.held import Peak, peaks_in_time
from pipeplan.workload.kinds import ACTIVATIONS, WORKSPACE, MemoryBytes, MemoryKind, Role
from pipeplan.workload.samples import Slots
from pipeplan.workload.steady_state.loop import LoopCut
from pipeplan.workload.task_graph import Orders, TaskGraph, earliest_starts
from pipeplan.workload.workload import Hold, Workload


@dataclass(frozen=True, slots=True)
class _Place:
    """One route on a limited device: its operations, weight gradients left out, and what a micro-batch still needs.

    ``needs`` [operations done] bytes that one micro-batch still takes, at most, until it has given everything back.
    """

    device: int
    capacity: int
    operations: tuple[int, ...]
    needs: tuple[int, ...]


class MemoryState:
    """What every device holds at a moment, and whether it has room for an action.

    ``held`` [device] bytes beyond the static ones. ``capacity`` [device] is what it may hold of them, None without
    limit; by default what its memory leaves.

    In time, every action has its :meth:`start` and its :meth:`end`, which come in order, ends before starts of the same
    moment; ``peak`` [device] and ``at_peak`` [device] are then of the first moment at which it held most, and
    ``peak_task`` [device] is what started then. :meth:`run` is both in one step, for those who only know the order; it
    leaves out the peak, and what other devices' actions give back is free as soon as these run.
    """

    def __init__(self, graph: TaskGraph, capacity: Sequence[int | None] | None = None) -> None:
        workload = graph.workload
        self.held = [0] * workload.num_resources
        self.peak = self.held.copy()
        self.at_peak = [MemoryBytes()] * len(self.held)
        self.peak_task: list[int | None] = [None] * len(self.held)
        self._capacity = capacities(workload) if capacity is None else capacity
        self._graph, self._operation_of, self._holders = graph, graph.operation_of, workload.holders
        self._effects = workload.effects
        self._begins_of = [_begins(slots, workload.mini_batch) for slots in workload.slots]
        self._begins = [begins[0] for begins in self._begins_of]
        self._places: list[list[_Place]] = [[] for _ in workload.holders]  # [operation] on its limited devices
        self._by_kind: list[Counter[MemoryKind]] = [Counter() for _ in self.held]
        self._targets_left: dict[tuple[int, int], int] = {}  # {(hold, micro-batch): targets that have not ended}
        for device, limit in checked(enumerate(self._capacity[: len(workload.devices)]), 4):
            if limit is not None:
                self._add_places(device, limit)

    def full(self, task: int) -> int | None:
        """The first device that has no room for an action while it runs; None if all have."""
        for place in self._places[self._operation_of[task]]:
            if self.levels(place.device, task)[0] > place.capacity:
                return place.device
        return None

    def missing(self, task: int) -> int | None:
        """Like :meth:`full`, but also the first device that could then no longer finish its oldest samples.

        None for an action that allocates nothing.
        """
        x = self._operation_of[task]
        places = self._places[x]
        if not places:
            return None
        acquired, workspace, release, num_parts = self._effects[x]
        if acquired + workspace == 0:
            return None
        if num_parts:
            acquired = self.acquired(task)
        for place in places:
            held = self.held[place.device] + acquired
            if held + workspace > place.capacity:
                return place.device
            if held - release + self._oldest_needs(place, x) > place.capacity:
                return place.device
        return None

    def levels(self, device: int, task: int) -> tuple[int, int]:
        """Bytes that a device would hold while an action runs, and after it."""
        _, workspace, release, _ = self._effects[self._operation_of[task]]
        held = self.held[device] + self.acquired(task)
        return held + workspace, held - release

    def acquired(self, task: int) -> int:
        """What an action takes at its start; of a micro-batch in two parts the second takes what is left of it."""
        x = self._operation_of[task]
        acquired, _, _, num_parts = self._effects[x]
        number = task - self._graph.offsets[x]
        return acquired if number >= num_parts else _part_of(acquired, number)

    def run(self, task: int) -> None:
        """An action runs; what it gives back is free before its devices start anything else."""
        x = self._operation_of[task]
        change = self.acquired(task) - self._effects[x].release
        for device in self._holders[x]:
            self.held[device] += change
        for hold, size in self._ended(x, task, self._given_apart[x]):
            for device in self._holders[hold.source]:
                self.held[device] -= size
        begins = self._begins_of[x][task + 1 - self._graph.offsets[x]]
        if self._begins[x] < begins:
            self._begins[x] = begins

    def start(self, task: int) -> None:
        """An action starts, and takes what it acquires and its workspace."""
        x = self._operation_of[task]
        number = task - self._graph.offsets[x]
        for kind, size in self._taken[x].items():
            self._change(
                self._holders[x], kind, _part_of(size, number) if number < self._effects[x].num_parts else size
            )
        self._change(self._holders[x], WORKSPACE, self._effects[x].workspace)
        self._note_peaks(self._holders[x], task)

    def exchange(self, devices: Sequence[int], kind: MemoryKind, size: int) -> None:
        """Devices start to hold this many bytes of something gathered; or stop, if the number is negative."""
        self._change(devices, kind, size)
        self._note_peaks(devices, None)

    def _note_peaks(self, devices: Sequence[int], task: int | None) -> None:
        for device in devices:
            if self.held[device] > self.peak[device]:
                self.peak[device], self.peak_task[device] = self.held[device], task
                self.at_peak[device] = MemoryBytes(self._by_kind[device])

    def end(self, task: int) -> None:
        """An action has ended, and gives back its workspace and what it is the last target of."""
        x = self._operation_of[task]
        self._change(self._holders[x], WORKSPACE, -self._effects[x].workspace)
        for hold, size in self._ended(x, task, self._given[x]):
            self._change(self._holders[hold.source], hold.kind, -size)

    def _ended(self, x: int, task: int, holds: Sequence[tuple[int, Hold]]) -> Iterator[tuple[Hold, int]]:
        """Those of the holds, and bytes, for each action whose last target is this one of operation ``x``."""
        slots = self._graph.workload.slots
        for number, hold in holds:
            own, action = slots[hold.source], task - self._graph.offsets[x]
            alike = all(slots[target] == own for target in hold.targets)
            for held in (action,) if alike else own.sharing(slots[x].samples(action)):
                left = self._targets_left.get((number, held))
                if left is None:
                    samples = None if alike else own.samples(held)
                    left = sum(1 if samples is None else len(slots[y].sharing(samples)) for y in hold.targets)
                self._targets_left[number, held] = left - 1
                if left == 1:
                    parts = 0 if alike else self._effects[hold.source].num_parts
                    yield hold, _part_of(hold.size, held) if held < parts else hold.size

    def _change(self, devices: Sequence[int], kind: MemoryKind, size: int) -> None:
        for device in devices:
            self.held[device] += size
            self._by_kind[device][kind] += size

    @cached_property
    def _taken(self) -> list[Counter[MemoryKind]]:
        """[operation] {kind: bytes} that it takes at its start, beside its workspace."""
        taken: list[Counter[MemoryKind]] = [Counter() for _ in self._holders]
        for hold in self._graph.workload.holds:
            taken[hold.source][hold.kind] += hold.size
        return taken

    @cached_property
    def _given(self) -> list[list[tuple[int, Hold]]]:
        """[operation] the holds, with their numbers, of which it is a target."""
        given: list[list[tuple[int, Hold]]] = [[] for _ in self._holders]
        for number, hold in enumerate(self._graph.workload.holds):
            for x in hold.targets:
                given[x].append((number, hold))
        return given

    @cached_property
    def _given_apart(self) -> list[list[tuple[int, Hold]]]:
        """The same of those that are not in the effects of actions."""
        return [[each for each in own if not self._graph.workload.is_local(each[1])] for own in self._given]

    def _add_places(self, device: int, capacity: int) -> None:
        """Note a limited device for each of its operations."""
        workload = self._graph.workload
        there = [x for x, operation in enumerate(workload.operations) if device in self._holders[x]]
        for route in sorted({workload.stages[workload.operations[x].stage].route for x in there}):
            mine = [x for x in there if workload.stages[workload.operations[x].stage].route == route]
            others = tuple(x for x in mine if workload.operations[x].role is not Role.WEIGHT_GRAD)
            place = _Place(device, capacity, others, self._needs(mine))
            for x in mine:
                self._places[x].append(place)

    def _needs(self, operations: Sequence[int]) -> tuple[int, ...]:
        """[operations done] of a device's operations in order: see :class:`_Place`.

        Weight gradients only give back, at the end; they need nothing but their workspace, and are not counted as done.
        """
        roles = {x: self._graph.workload.operations[x].role for x in operations}
        others = [x for x in operations if roles[x] is not Role.WEIGHT_GRAD]
        weights = [self._effects[x].workspace for x in operations if roles[x] is Role.WEIGHT_GRAD]
        needs = [max(weights, default=0)]
        for x in reversed(others):
            acquired, workspace, release, _ = self._effects[x]
            needs.append(acquired + max(workspace, needs[-1] - release, 0))
        return tuple(reversed(needs))

    def _oldest_needs(self, place: _Place, x: int) -> int:
        """Bytes that the oldest samples on a device and route still take after an action of an operation."""
        begins = [self._begins[y] for y in place.operations]
        oldest = min(begins)
        done = len(begins) - begins.count(oldest)
        return place.needs[done + (self._begins[x] == oldest and x in place.operations)]


@lru_cache(maxsize=4096)
def _begins(slots: Slots, mini_batch: int) -> tuple[int, ...]:
    """[action] its first sample; after the last action, the end of the mini-batch."""
    return (*(slots.samples(number)[0] for number in range(len(slots))), mini_batch)


def _part_of(size: int, number: int) -> int:
    """What the first or second of two parts takes."""
    return size // 2 if number % 2 else size - size // 2


def num_that_fit(capacity: int | None, each: int) -> float:
    """How many micro-batches of these bytes each a device has room for at once: at least one; inf without limit."""
    return inf if capacity is None or each == 0 else max(1, capacity // each)


def capacities(workload: Workload) -> list[int | None]:
    """[device] bytes that its memory leaves beside the static ones, and those that actions exchange; None: no limit."""
    exchanged = workload.exchanged_bytes
    return [
        None if (usable := device.usable_bytes) is None else usable - workload.static_bytes(index) - exchanged[index]
        for index, device in enumerate(workload.devices)
    ]


@dataclass(frozen=True, slots=True)
class Overflow:
    """A device that needs more memory than it has: its peak, and the action at which it is first reached."""

    device: int
    action: str
    peak_bytes: int
    limit_bytes: int

    @property
    def over_bytes(self) -> int:
        """How much is missing."""
        return self.peak_bytes - self.limit_bytes

    def __str__(self) -> str:
        at = f" at {self.action}" if self.action else ""
        return (
            f"device {self.device} needs {format_bytes(self.peak_bytes)}{at}, "
            f"{format_bytes(self.over_bytes)} more than its {format_bytes(self.limit_bytes)}"
        )


def peak_memory(
    graph: TaskGraph, orders: Orders, loop: LoopCut | None = None, starts: Sequence[int] | None = None
) -> tuple[DeviceMemory, ...]:
    """What each device holds of every kind at the first moment of its peak; without actions it is its state.

    With a ``loop`` of all that it runs. ``starts`` [task] are the earliest, where they are known.
    """
    peaks = zip(graph.workload.states, _peaks(graph, orders, loop, starts), strict=True)
    return tuple(DeviceMemory.of(state + taken) for state, (taken, _) in peaks)


def memory_levels(graph: TaskGraph, order: Sequence[int]) -> list[int]:
    """Bytes beyond the static ones that a device holds while each action of its order runs [action]."""
    found: list[int] = _levels(graph, Lines.of([order]))[0].tolist()
    return found


def held_after(graph: TaskGraph, orders: Orders) -> list[list[int]]:
    """[device][action of its order] bytes beyond the static ones that it holds after it, if orders tell memory."""
    lines = Lines.of(graph.on_devices(orders))
    after = _levels(graph, lines)[1].tolist()
    return [after[begin:end] for begin, end in pairwise(lines.begins.tolist())]


def _levels(graph: TaskGraph, lines: Lines) -> tuple[IntArray, IntArray]:
    """[place] bytes beyond the static ones that a device holds while an action of its line runs, and after it."""
    effects, items = graph.workload.effects, graph.items[lines.tasks]
    acquired, workspace, release, num_parts = (column(each, len(items))[items] for each in zip(*effects, strict=True))
    if num_parts.any():
        numbers = graph.numbers[lines.tasks]
        halves = np.where(numbers % 2, acquired // 2, acquired - acquired // 2)
        acquired = np.where(numbers < num_parts, halves, acquired)
    after = lines.running(acquired - release)
    return after + release + workspace, after


def fits(graph: TaskGraph, orders: Orders, loop: LoopCut | None = None) -> bool:
    """Whether every device stays within its memory, with all that a ``loop`` runs."""
    return overflow(graph, orders, loop=loop) is None


def overflow(
    graph: TaskGraph,
    orders: Orders,
    limits: Sequence[int | None] | None = None,
    loop: LoopCut | None = None,
    starts: Sequence[int] | None = None,
) -> Overflow | None:
    """The device that exceeds its memory by most, or None if all stay within; ties go to the first.

    ``limits`` [device] are what the devices have, None without limit; by default those of the workload. With a ``loop``
    it is of all that it runs; the action is that of the round that is there. ``starts`` as for :func:`peak_memory`.
    """
    worst: Overflow | None = None
    known = [device.usable_bytes for device in graph.workload.devices] if limits is None else limits
    if all(limit is None for limit in known):
        return None
    for index, (limit, (taken, task)) in enumerate(zip(known, _peaks(graph, orders, loop, starts), strict=True)):
        if limit is None:
            continue
        needed = graph.workload.static_bytes(index) + taken.total
        if needed - limit > (worst.over_bytes if worst is not None else 0):
            action = graph.label(task) if task is not None else ""
            worst = Overflow(index, action, needed, limit)
    return worst


_AT_ONCE = 2**18
"""Actions whose memory is added up between two looks at the time."""


def _peaks(graph: TaskGraph, orders: Orders, loop: LoopCut | None, starts: Sequence[int] | None = None) -> list[Peak]:
    """[device] its peak."""
    if graph.workload.order_tells_memory:
        return _peaks_by_order(graph, graph.on_devices(orders), loop)
    if starts is None:
        starts = earliest_starts(graph, with_links(graph, orders))
    return peaks_in_time(graph, starts, _exchanged(graph, starts) if graph.workload.exchanges else ())


def _peaks_by_order(graph: TaskGraph, orders: Orders, loop: LoopCut | None) -> list[Peak]:
    """The same of devices whose orders say what they hold; of so many devices at once as take a moment."""
    lines, _, places = Lines.of(orders).once(graph.workload.leaders)
    ends = (np.cumsum(lines.counts) - 1) // _AT_ONCE
    cuts = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(lines)]
    found = list[Peak]()
    for begin, end in pairwise(cuts):
        if len(cuts) > 2:
            checkpoint()
        found += _peaks_of_lines(graph, lines[begin:end], loop)
    return [found[place] for place in places]


def _peaks_of_lines(graph: TaskGraph, lines: Lines, loop: LoopCut | None) -> Iterator[Peak]:
    levels, held = _levels(graph, lines)
    if loop is not None and len(loop.moments) > 1:
        cuts = [slice(begin, end) for begin, end in pairwise(lines.begins.tolist())]
        written = ((lines.tasks[cut].tolist(), levels[cut].tolist(), held[cut].tolist()) for cut in cuts)
        copies = [in_all_copies(graph, *each, loop) for each in written]
        lines = Lines.of([order for order, _ in copies])
        levels = column([*chain.from_iterable(own for _, own in copies)])
    for place in lines.highest(levels):
        highest = 0 if place is None else int(levels[place])
        if place is None or not highest:
            yield MemoryBytes(), None
            continue
        task = int(lines.tasks[place])
        workspace = graph.workload.effects[graph.operation_of[task]].workspace
        yield MemoryBytes({ACTIVATIONS: highest - workspace, WORKSPACE: workspace}), task


def in_all_copies(
    graph: TaskGraph, order: Sequence[int], levels: Sequence[int], held: Sequence[int], loop: LoopCut | None
) -> tuple[list[int], list[int]]:
    """A device's order and levels [action] with the first and the last copy of each of a loop's rounds.

    ``held`` [action] is the level after it. What one round takes, and another gives back, adds up over its copies, so
    that between the two shown levels only rise or only fall; the only round of a loop changes none.
    """
    if loop is None or len(loop.moments) == 1:
        return [*order], [*levels]
    items = [(graph.operation_of[task], task - graph.offsets[graph.operation_of[task]]) for task in order]
    found, raised = list[int](), list[int]()
    read = later = 0
    for number in range(len(loop.moments)):
        its = [at for at, (x, m) in enumerate(items) if loop.rounds[x] == number and m >= loop.begins[x]]
        its = [at for at in its if not loop.is_after(*items[at])]
        if its:
            change = (loop.copies - 1) * (held[its[-1]] - (held[its[0] - 1] if its[0] else 0))
            for part, by in ((range(read, its[-1] + 1), later), (its, later + change)):
                found += [order[at] for at in part]
                raised += [levels[at] + by for at in part]
            read, later = its[-1] + 1, later + change
    rest = range(read, len(order))
    return [*found, *(order[at] for at in rest)], [*raised, *(levels[at] + later for at in rest)]


def memory_curves(graph: TaskGraph, starts: Sequence[int], orders: Orders | None = None) -> list[list[tuple[int, int]]]:
    """[device] pairs (time in ns, bytes that it holds beyond the static ones from then on), the first at 0.

    Of what happens at one moment there is what is held after it, but where something is held for no time at all.
    ``orders`` are those that have these starts, by which it is found sooner where they tell memory.
    """
    times = graph.durations[: graph.num_actions]
    if orders is not None and graph.workload.order_tells_memory and min(times, default=0) > 0:
        return [*_curves_by_order(graph, starts, orders)]
    state = MemoryState(graph)
    curves: list[list[tuple[int, int]]] = [[(0, 0)] for _ in graph.workload.devices]
    for time, devices in changes_of(graph, starts, state):
        for device in devices:
            _go_on(curves[device], time, state.held[device])
    return curves


def _go_on(curve: list[tuple[int, int]], time: int, held: int) -> None:
    """A device holds so much from a time on."""
    before = curve[-1]
    if time == before[0]:
        curve[-1] = time, held
    elif held != before[1]:
        curve.append((time, held))


def _curves_by_order(graph: TaskGraph, starts: Sequence[int], orders: Orders) -> Iterator[list[tuple[int, int]]]:
    """The same for devices whose order tells what they hold, by which each action ends before the next one starts."""
    lines = Lines.of(graph.on_devices(orders))
    while_running, after = (each.tolist() for each in _levels(graph, lines))
    for device, (begin, end) in checked(enumerate(pairwise(lines.begins.tolist())), 1):
        curve = [(0, 0)]
        held = zip(orders[device], while_running[begin:end], after[begin:end], strict=True)
        for task, running, left in held:
            start = starts[task]
            _go_on(curve, start, running)
            _go_on(curve, start + graph.durations[task], left)
        yield curve


def changes_of(graph: TaskGraph, starts: Sequence[int], state: MemoryState) -> Iterator[tuple[int, Sequence[int]]]:
    """Let everything happen to a state, in time: (ns, devices concerned) after each start and end."""
    events: list[tuple[int, int, int, int]] = []  # time, 0 for ends and 1 for starts, what it is of, which of these
    for task in range(graph.num_actions):
        events += (starts[task], 1, 0, task), (starts[task] + graph.durations[task], 0, 0, task)
    held = _exchanged(graph, starts) if graph.workload.exchanges else []
    for number, (_, (*_, begin, end)) in enumerate(held):
        events += (begin, 1, 1, number), (end, 0, 1, number)
    for time, is_start, of, number in checked(sorted(events), 1024):
        if of:
            devices, (kind, _, _, size, _, _) = held[number]
            state.exchange(devices, kind, size if is_start else -size)
        else:
            devices = graph.workload.holders[graph.operation_of[number]]
            (state.start if is_start else state.end)(number)
        yield time, devices


def _exchanged(graph: TaskGraph, starts: Sequence[int]) -> list[tuple[tuple[int, ...], WholeState]]:
    """(devices, what each of them has whole for a time)."""
    return [
        (devices, each)
        for devices, network in graph.networks_at(starts)
        for each in network.held
        if each[3] and each[4] < each[5]
    ]
