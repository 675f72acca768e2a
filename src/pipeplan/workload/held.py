"""What devices hold when something is held for a time that their own orders do not tell: peaks by the starts.

What is kept from one action to others, what forwards give on, what is gathered and reduced. The definition is that of
:class:`~pipeplan.workload.memory.MemoryState`, which follows starts and ends one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipeplan.workload.columns import IntArray, Lines, column, sharing, spread
from pipeplan.workload.exchanges import WholeState
from pipeplan.workload.kinds import WORKSPACE, MemoryBytes, MemoryKind
from pipeplan.workload.task_graph import TaskGraph
from pipeplan.workload.workload import Hold

Peak = tuple[MemoryBytes, int | None]
"""What a device holds beyond its state at the first moment of its peak, and the action that starts then."""


@dataclass(frozen=True, slots=True)
class _HeldChanges:
    """[change] from ``times`` on, in ns, a device holds ``sizes`` bytes more; what ends does before what starts.

    ``tasks`` are those that start, or an exchange's number after them; changes of one start come together.
    """

    kind: MemoryKind
    devices: IntArray
    times: IntArray
    sizes: IntArray
    starts: bool
    tasks: IntArray


def peaks_in_time(
    graph: TaskGraph, starts: Sequence[int], exchanged: Sequence[tuple[tuple[int, ...], WholeState]] = ()
) -> list[Peak]:
    """[device] its peak when actions start at ``starts`` [task], in ns, and what is ``exchanged`` is held meanwhile."""
    changes = [*_of_actions(graph, column(starts, 4)), *_of_exchanges(graph, exchanged)]
    if not changes:
        return [(MemoryBytes(), None)] * len(graph.workload.devices)
    columns = [(each.devices, each.times, each.sizes, each.tasks) for each in changes]
    devices, times, sizes, tasks = (np.concatenate(each) for each in zip(*columns, strict=True))
    counts = [len(each.devices) for each in changes]
    begins = np.repeat([each.starts for each in changes], counts)
    order = np.lexsort((tasks, begins, times, devices))
    devices, times, tasks, begins = devices[order], times[order], tasks[order], begins[order]
    lines = Lines(order, np.searchsorted(devices, np.arange(len(graph.workload.devices) + 1)))
    levels = lines.running(sizes[order])
    same = (devices[1:] == devices[:-1]) & (times[1:] == times[:-1]) & (begins[1:] == begins[:-1])
    whole = np.append(~(same & (tasks[1:] == tasks[:-1])), np.ones(min(1, len(order)), bool))
    noted = np.where(begins & whole, levels, 0)
    names = [*dict.fromkeys(each.kind for each in changes)]
    kinds = np.repeat([names.index(each.kind) for each in changes], counts)[order]
    found = list[Peak]()
    for device, place in enumerate(lines.highest(noted)):
        if place is None or noted[place] <= 0:
            found.append((MemoryBytes(), None))
            continue
        until = slice(int(lines.begins[device]), place + 1)
        changed, own = sizes[order[until]], kinds[until]
        held = {kind: int(changed[own == number].sum()) for number, kind in enumerate(names)}
        task = int(tasks[place])
        found.append((MemoryBytes(held), task if task < graph.num_tasks else None))
    return found


def _of_actions(graph: TaskGraph, starts: IntArray) -> Iterator[_HeldChanges]:
    """Workspace while actions run, and what they hold from their start on to the end of the last that needs it."""
    workload, ends = graph.workload, starts + graph.times
    for item, operation in enumerate(workload.operations):
        if operation.workspace_bytes:
            tasks = np.arange(graph.offsets[item], graph.offsets[item + 1])
            size = column([operation.workspace_bytes], 4 + graph.num_tasks)
            yield _change(WORKSPACE, workload.holders[item], starts[tasks], size, tasks)
            yield _change(WORKSPACE, workload.holders[item], ends[tasks], -size)
    taken: defaultdict[tuple[int, MemoryKind], int] = defaultdict(int)
    for hold in workload.holds:
        taken[hold.source, hold.kind] += hold.size
        if hold.targets:
            until, alike = held_until(graph, hold, ends)
            parts = 0 if alike else workload.effects[hold.source].num_parts
            yield _change(hold.kind, workload.holders[hold.source], until, -_sizes(hold.size, len(until), parts))
    for (item, kind), whole in taken.items():
        tasks = np.arange(graph.offsets[item], graph.offsets[item + 1])
        sizes = _sizes(whole, len(tasks), workload.effects[item].num_parts)
        yield _change(kind, workload.holders[item], starts[tasks], sizes, tasks)


def _sizes(whole: int, count: int, num_parts: int) -> IntArray:
    """[action] bytes of so many: of two parts of a micro-batch each has a half, the first the larger one."""
    size, numbers = column([whole], 4 + count), np.arange(count)
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
    alike: defaultdict[tuple[tuple[int, ...], MemoryKind], list[tuple[int, int, int, int]]] = defaultdict(list)
    for number, (devices, each) in enumerate(exchanged, graph.num_tasks):
        alike[devices, each.kind].append((number, each.begin_ns, each.end_ns, each.size))
    for (devices, kind), own in alike.items():
        numbers, begins, ends, sizes = (column(each, 4 + len(exchanged)) for each in zip(*own, strict=True))
        yield _change(kind, devices, begins, sizes, numbers)
        yield _change(kind, devices, ends, -sizes)


def _change(
    kind: MemoryKind, devices: Sequence[int], times: IntArray, sizes: IntArray, tasks: IntArray | None = None
) -> _HeldChanges:
    """The same on every device, at each of the times: the start of a task, or an end."""
    count = len(times)
    of = np.repeat(np.array(devices, np.int64), count)
    numbers = np.zeros(count, np.int64) if tasks is None else tasks
    sizes = np.broadcast_to(sizes, (count,))
    tiled = (np.tile(each, len(devices)) for each in (times, sizes, numbers))
    at, size, task = tiled
    return _HeldChanges(kind, of, at, size, tasks is not None, task)
