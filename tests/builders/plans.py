"""Valid plans made by hand, with no planner: a workload and orders, lowered, with all figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from builders.orders import Entry, Orders, actions_of, holders_of, messages_of, num_parted
from pipeplan.files import Plan, Predicted, Provenance
from pipeplan.workload.action import operation_of
from pipeplan.workload.elements import DeviceMemory, Repetend
from pipeplan.workload.kinds import ACTIVATIONS, WORKSPACE, MemoryBytes
from pipeplan.workload.workload import Workload
from references.replay import Span, durations_of, left_ns, period_of, replay
from references.tails import iteration_by_hand


def plan_of(
    workload: Workload,
    orders: Orders,
    *,
    first: Mapping[str, int] | None = None,
    unroll: int = 1,
    lower_bound_ns: int | None = None,
    full_names: bool = False,
    provenance: Provenance | None = None,
) -> Plan:
    """The plan of a workload in these orders, with messages when their producers end and all figures.

    With ``first`` it states the repetend. ``full_names`` writes stage and device of the other end on every
    transfer; otherwise only where they are needed.
    """
    done = replay(workload, orders)
    makespan = max(end for _, end in done.values())
    bound = makespan if lower_bound_ns is None else lower_bound_ns
    repetend = None
    if first is not None:
        repetend = Repetend(unroll=unroll, repetend_ns=period_of(workload, orders, first, unroll), first=dict(first))
    durations = durations_of(workload)
    whole = {operation.id: operation.duration_ns for operation in workload.operations}
    work = [sum(whole[id_] for id_ in {id_ for id_, _ in order}) for order in orders]
    busy = [sum(durations[entry] for entry in order) for order in orders]
    last_ends: dict[str, int] = {}
    for (id_, _), (_, end) in done.items():
        last_ends[id_] = max(last_ends.get(id_, 0), end)
    iteration = iteration_by_hand(workload, last_ends)
    spans = [_span([done[entry] for entry in order]) for order in orders]
    longest = max(range(len(spans)), key=lambda device: (spans[device], -device))
    num_devices = len(workload.devices)
    return Plan.of_workload(
        workload,
        starts_ns={
            operation.id: tuple(done[operation.id, n][0] for n in range(len(actions_of(workload, operation.id))))
            for operation in workload.operations
        },
        programs=lowered(workload, orders, done, full_names=full_names),
        repetend=repetend,
        predicted=Predicted(
            makespan_ns=makespan,
            lower_bound_ns=bound,
            gap=iteration / bound - 1,
            iteration_ns=iteration,
            period_ns=repetend.repetend_ns / unroll if repetend else None,
            period_lower_bound_ns=float(max(work)) if repetend else 0.0,
            bubble_rate=1 - sum(busy) / (num_devices * makespan),
            bubble_rate_span=1 - busy[longest] / spans[longest],
            bubble_rate_steady=1 - sum(work) * unroll / (num_devices * repetend.repetend_ns) if repetend else None,
            memory=tuple(_memory(workload, device, order) for device, order in enumerate(orders)),
        ),
        provenance=provenance or Provenance(scheduler="by-hand"),
    )


def lowered(
    workload: Workload, orders: Orders, done: Mapping[Entry, Span], *, full_names: bool = False
) -> tuple[tuple[str, ...], ...]:
    """Programs: each message on both ends at the time its producer ends, before what starts then."""
    actions = {operation.id: actions_of(workload, operation.id) for operation in workload.operations}
    events: list[list[tuple[int, int, int, str]]] = [
        [(done[id_, n][0], 1, 0, id_ + actions[id_][n][0]) for id_, n in order] for order in orders
    ]
    ends = [
        (operation_of(dependency.source)[0], dependency.payload, operation_of(dependency.target)[0], hop)
        for dependency in workload.dependencies
        for hop in dependency.hops
    ]
    senders = Counter((source, payload, hop.source_device) for source, payload, _, hop in ends)
    receivers = Counter((target, payload, hop.target_device) for _, payload, target, hop in ends)
    number = 0
    for dependency in workload.dependencies:
        source, target = operation_of(dependency.source)[0], operation_of(dependency.target)[0]
        payload = dependency.payload
        holder = holders_of(workload, dependency.source)
        for hop in dependency.hops:
            sends = full_names or senders[source, payload, hop.source_device] > 1
            receives = full_names or receivers[target, payload, hop.target_device] > 1
            to = f">{target}@{hop.target_device}" if sends else ""
            of = f">{source}@{hop.source_device}" if receives else ""
            for message in messages_of(workload, dependency, hop):
                end = max(done[dependency.source, holder[sample]][1] for sample in message[1])
                end -= left_ns(workload, dependency)
                events[hop.source_device].append((end, 0, number, f"{source}SEND_{payload}{message[0]}{to}"))
                events[hop.target_device].append((end, 0, number, f"{target}RECV_{payload}{message[0]}{of}"))
                number += 1
    return tuple(tuple(text for *_, text in sorted(device)) for device in events)


def _span(spans: Sequence[Span]) -> int:
    return max((end for _, end in spans), default=0) - min((start for start, _ in spans), default=0)


def _memory(workload: Workload, device: int, order: Sequence[Entry]) -> DeviceMemory:
    operations = {operation.id: operation for operation in workload.operations}
    held, peak, parts = 0, 0, (0, 0)
    for id_, number in order:
        operation = operations[id_]
        taken = operation.acquire_bytes
        if number < 2 * num_parted(workload, id_):  # half; the first part the larger one
            taken = taken // 2 if number % 2 else -(-taken // 2)
        held += taken
        if held + operation.workspace_bytes > peak:
            peak, parts = held + operation.workspace_bytes, (held, operation.workspace_bytes)
        held -= operation.release_bytes
    state = sum((stage.state for stage in workload.stages if device in stage.devices), MemoryBytes())
    for tied in workload.tied:
        here = sum(device in devices for devices in tied.devices)
        state -= tied.state * max(0, here - 1)
    return DeviceMemory.of(state + MemoryBytes({ACTIVATIONS: parts[0], WORKSPACE: parts[1]}))
