"""A plain replay: what orders of a workload take, device by device, and how long their repetend is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from builders.orders import Entry, Orders, actions_of, holders_of, is_part, num_parted
from pipeplan.workload.action import operation_of
from pipeplan.workload.elements import Dependency
from pipeplan.workload.workload import Workload

Span = tuple[int, int]  # start, end


def replay(workload: Workload, orders: Orders) -> dict[Entry, Span]:
    """Start and end of every action: devices take their next action in turn, as soon as it can start."""
    waits, durations = waits_of(workload), durations_of(workload)
    done: dict[Entry, Span] = {}
    at = [0] * len(orders)
    free = [0] * len(orders)
    while any(position < len(order) for position, order in zip(at, orders, strict=True)):
        before = len(done)
        for device, order in enumerate(orders):
            while at[device] < len(order):
                entry = order[at[device]]
                group = workload.stages[operation_of(entry[0])[0]].devices
                at_front = all(at[d] < len(orders[d]) and orders[d][at[d]] == entry for d in group)
                if not at_front or any(other not in done for other, _ in waits[entry]):
                    break
                start = max([free[d] for d in group] + [done[other][1] + lag for other, lag in waits[entry]])
                done[entry] = (start, start + durations[entry])
                for d in group:
                    free[d], at[d] = done[entry][1], at[d] + 1
        assert len(done) > before, "the orders deadlock"
    return done


def waits_of(workload: Workload) -> dict[Entry, list[tuple[Entry, int]]]:
    """{action: what it waits for, and for how long after its end}: all with a sample of it, or the first so many."""
    found: dict[Entry, list[tuple[Entry, int]]] = defaultdict(list)
    actions = {operation.id: actions_of(workload, operation.id) for operation in workload.operations}
    for dependency in workload.dependencies:
        part_ns = max((hop.part.duration_ns for hop in dependency.hops), default=0)
        before = left_ns(workload, dependency) + begun_ns(workload, dependency)
        holder = holders_of(workload, dependency.source)
        for number, action in enumerate(actions[dependency.target]):
            own = {holder[sample] for sample in action[1] if sample in holder}
            for n in sorted(own if dependency.needs is None else range(dependency.needs[number])):
                both_parts = is_part(action) and is_part(actions[dependency.source][n])
                lag = part_ns if both_parts else dependency.lag_ns - before
                found[dependency.target, number].append(((dependency.source, n), lag))
    return found


def left_ns(workload: Workload, dependency: Dependency) -> int:
    """How long its source goes on after the part that makes what it brings."""
    (source,) = [each for each in workload.operations if each.id == dependency.source]
    return 0 if dependency.source_part is None else sum(source.parts_ns[dependency.source_part + 1 :])


def begun_ns(workload: Workload, dependency: Dependency) -> int:
    """How long its target runs before the part that needs what it brings."""
    (target,) = [each for each in workload.operations if each.id == dependency.target]
    return sum(target.parts_ns[: dependency.target_part])


def durations_of(workload: Workload) -> dict[Entry, int]:
    """{action: how long it takes, in ns}."""
    return {
        (operation.id, number): operation.part_ns or 0 if is_part(action) else operation.duration_ns
        for operation in workload.operations
        for number, action in enumerate(actions_of(workload, operation.id))
    }


def extended(workload: Workload, orders: Orders, first: Mapping[str, int], unroll: int, copies: int) -> Orders:
    """Orders with ``copies`` more of the repetend: prefix, copies, shifted suffix."""
    found = []
    for order in orders:
        ids = {id_ for id_, _ in order}
        begin = sum(first[id_] + num_parted(workload, id_) for id_ in ids)
        end = begin + unroll * len(ids)
        longer = order[:begin]
        for k in range(copies + 1):
            longer += [(id_, m + k * unroll) for id_, m in order[begin:end]]
        found.append(longer + [(id_, m + copies * unroll) for id_, m in order[end:]])
    return found


def period_of(workload: Workload, orders: Orders, first: Mapping[str, int], unroll: int = 1) -> int:
    """How much each copy adds to the makespan once it adds always the same."""
    spans = []
    for copies in range(24, 36):
        larger = workload.with_microbatches(workload.num_microbatches + copies * unroll)
        done = replay(larger, extended(workload, orders, first, unroll, copies))
        spans.append(max(end for _, end in done.values()))
    steps = {after - before for before, after in zip(spans, spans[1:], strict=False)}
    assert len(steps) == 1, f"copies are not at equal distances: {sorted(steps)}"
    return steps.pop()
