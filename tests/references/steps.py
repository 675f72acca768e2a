"""What let a task start when it did, looked up task by task; and what forwards alone hold, moment by moment."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from pipeplan.simulator.metrics import CriticalStep
from pipeplan.workload.task_graph import TaskGraph


def step_before(
    graph: TaskGraph, orders: Sequence[Sequence[int]], starts: Sequence[int], task: int
) -> tuple[CriticalStep, int] | None:
    """The step of a task, and the task that it waited for; None at the iteration's start."""
    if starts[task] <= 0:
        return None
    for line in graph.devices_of(task):
        place = bisect_left(orders[line], starts[task], key=starts.__getitem__)
        other = orders[line][place - 1]
        if place and starts[other] + graph.durations[other] == starts[task]:
            return CriticalStep(task, "device" if task < graph.num_actions else "link"), other
    for other, lag in inputs_of(graph, task):
        if starts[other] + graph.durations[other] + lag == starts[task]:
            return CriticalStep(task, "transfer" if lag > 0 else "dependency", lag), other
    raise AssertionError(f"nothing let {graph.label(task)} start")


def inputs_of(graph: TaskGraph, task: int) -> Iterator[tuple[int, int]]:
    """What a task waits for, with lags in ns: edge by edge."""
    workload, target = graph.workload, graph.operation_of[task]
    slots, number = workload.slots[target], task - graph.offsets[target]
    for source, to, lag in workload.edges:
        if to == target:
            parts = 2 * min(slots.num_parted, workload.slots[source].num_parted)
            own = workload.part_lags.get((source, target), lag) if number < parts else lag
            yield from ((graph.offsets[source] + m, own) for m in workload.inputs_of(source, target, number))
    for source, to, lag, later in workload.returns:
        if to == target and number >= later:
            yield graph.offsets[source] + number - later, lag


def most_given(graph: TaskGraph, starts: Sequence[int]) -> tuple[int, ...]:
    """[device] of forwards alone, the most micro-batches of which it holds something at once."""
    workload = graph.workload
    changes: list[dict[int, Counter[int]]] = [defaultdict(Counter) for _ in workload.devices]
    for hold in workload.holds:
        own = workload.slots[hold.source]
        for number in range(len(own)):
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
            held.update(moments[moment])
            found[device] = max(found[device], sum(count > 0 for count in held.values()))
    return tuple(found)
