"""What devices hold when something is held for a time that their own orders do not tell: peaks by the starts.

What is kept from one action to others, what forwards give on, what is gathered and reduced. The definition is that of
:class:`~pipeplan.workload.memory.MemoryState`, which follows starts and ends one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from pipeplan.time_limit import checked, checked_by
from pipeplan.workload.columns import IntArray, column, sharing, spread
from pipeplan.workload.exchanges import WholeState
from pipeplan.workload.kinds import WORKSPACE, MemoryBytes, MemoryKind
from pipeplan.workload.task_graph import TaskGraph
from pipeplan.workload.workload import Hold

Peak = tuple[MemoryBytes, int | None]
"""What a device holds beyond its state at the first moment of its peak, and the action that starts then."""


@dataclass(frozen=True, slots=True)
class _HeldChanges:
    """[change] from ``times`` on, in ns, ``devices`` hold ``sizes`` [kind] bytes more; what ends does before starts.

    ``task`` is the first of those that start, one after another; None of what is exchanged, and of ends.
    """

    devices: Sequence[int]
    times: IntArray
    sizes: Mapping[MemoryKind, IntArray]
    starts: bool
    task: int | None = None


def peaks_in_time(
    graph: TaskGraph, starts: Sequence[int], exchanged: Sequence[tuple[tuple[int, ...], WholeState]] = ()
) -> list[Peak]:
    """[device] its peak when actions start at ``starts`` [task], in ns, and what is ``exchanged`` is held meanwhile.

    Raises TimeUpError.
    """
    changes = [*checked(_of_actions(graph, column(starts, 4))), *_of_exchanges(graph, exchanged)]
    own: list[list[int]] = [[] for _ in graph.workload.devices]
    for number, change in enumerate(changes):
        for device in change.devices:
            own[device].append(number)
    alike = {numbers: [changes[number] for number in numbers] for numbers in map(tuple, own)}
    sized = checked_by(alike.items(), lambda each: sum(len(change.times) for change in each[1]), _AT_ONCE)
    found = {numbers: _peak(held) for numbers, held in sized}
    return [found[tuple(numbers)] for numbers in own]


_AT_ONCE = 2**17
"""Changes that are looked through between two looks at the time."""


def _peak(changes: Sequence[_HeldChanges]) -> Peak:
    """That of devices with these changes, of which those that start are in the order of their tasks.

    Each is nearly in order of time, in which sorting takes time in proportion to their number.
    """
    counts = [len(each.times) for each in changes]
    if not sum(counts):
        return MemoryBytes(), None
    order = np.argsort(np.concatenate([each.times * 2 + each.starts for each in changes]), kind="stable")
    levels = np.cumsum(np.concatenate([sum(each.sizes.values()) for each in changes])[order])
    place = int(np.argmax(levels))  # where something starts, as only that raises it
    if levels[place] <= 0:
        return MemoryBytes(), None
    there = np.zeros(len(order), bool)
    there[order[: place + 1]] = True
    held: defaultdict[MemoryKind, int] = defaultdict(int)
    task, highest = None, int(order[place])
    for each, begin, count in zip(changes, accumulate(counts, initial=0), counts, strict=False):
        for kind, sizes in each.sizes.items():
            held[kind] += int(sizes[there[begin : begin + count]].sum())
        if each.task is not None and begin <= highest < begin + count:
            task = each.task + highest - begin
    return MemoryBytes(held), task


def _of_actions(graph: TaskGraph, starts: IntArray) -> Iterator[_HeldChanges]:
    """Workspace while actions run, and what they hold from their start on to the end of the last that needs it."""
    workload, ends = graph.workload, starts + graph.times
    taken: list[dict[MemoryKind, int]] = [{} for _ in workload.operations]
    for hold in workload.holds:
        taken[hold.source][hold.kind] = taken[hold.source].get(hold.kind, 0) + hold.size
        if hold.targets:
            until, alike = held_until(graph, hold, ends)
            parts = 0 if alike else workload.effects[hold.source].num_parts
            given = {hold.kind: -_sizes(graph, hold.size, len(until), parts)}
            yield _HeldChanges(workload.holders[hold.source], until, given, starts=False)
    for item, (operation, kept) in enumerate(zip(workload.operations, taken, strict=True)):
        cut = slice(graph.offsets[item], graph.offsets[item + 1])
        count, devices = cut.stop - cut.start, workload.holders[item]
        sizes = {kind: _sizes(graph, size, count, workload.effects[item].num_parts) for kind, size in kept.items()}
        if operation.workspace_bytes:
            workspace = _sizes(graph, operation.workspace_bytes, count)
            yield _HeldChanges(devices, ends[cut], {WORKSPACE: -workspace}, starts=False)
            sizes[WORKSPACE] = sizes.get(WORKSPACE, 0) + workspace
        if sizes:
            yield _HeldChanges(devices, starts[cut], sizes, starts=True, task=cut.start)


def _sizes(graph: TaskGraph, whole: int, count: int, num_parts: int = 0) -> IntArray:
    """[action] bytes of so many: of two parts of a micro-batch each has a half, the first the larger one."""
    size = column([whole], 4 + graph.num_tasks)
    if not num_parts:
        return np.broadcast_to(size, (count,))
    numbers = np.arange(count)
    return np.where(numbers < num_parts, np.where(numbers % 2, size // 2, size - size // 2), size)


def held_until(graph: TaskGraph, hold: Hold, ends: IntArray) -> tuple[IntArray, bool]:
    """[action of its source] when the last target of a hold has ended; whether all have the same micro-batches."""
    slots = graph.workload.slots
    alike = all(slots[target] == slots[hold.source] for target in hold.targets)
    found = np.zeros(len(slots[hold.source]), ends.dtype)
    for target in hold.targets:
        own = ends[graph.offsets[target] : graph.offsets[target + 1]]
        if alike:
            found = np.maximum(found, own)
        else:
            at, others = spread(*sharing(slots[hold.source], slots[target]))
            np.maximum.at(found, at, own[others])
    return found, alike


def _of_exchanges(graph: TaskGraph, exchanged: Sequence[tuple[tuple[int, ...], WholeState]]) -> Iterator[_HeldChanges]:
    """What devices have whole for a time."""
    alike: defaultdict[tuple[tuple[int, ...], MemoryKind], list[tuple[int, int, int]]] = defaultdict(list)
    for devices, (kind, _, _, size, begin, end) in exchanged:
        alike[devices, kind].append((begin, end, size))
    for (devices, kind), own in alike.items():
        begins, ends, sizes = (column(each, 4 + len(exchanged)) for each in zip(*own, strict=True))
        yield _HeldChanges(devices, begins, {kind: sizes}, starts=True)
        yield _HeldChanges(devices, ends, {kind: -sizes}, starts=False)
