"""Valid plans made by hand, with no planner: workloads, orders, and a plain replay of what they take.

Written for tests of what reads plans. An *order* is, per device, the list of its compute actions as
(operation id, micro-batch).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pipeplan.costs import build_workload
from pipeplan.examples import ShapeCosts, shape
from pipeplan.model import (
    Block,
    CostRow,
    Dependency,
    Device,
    DeviceMemory,
    Edge,
    Hop,
    Operation,
    PlacedStage,
    Placement,
    Plan,
    Predicted,
    Profile,
    Provenance,
    Repetend,
    Source,
    Stage,
)
from pipeplan.model.workload import Workload
from pipeplan.schedule.problem import Problem

Entry = tuple[str, int]
Orders = list[list[Entry]]
Span = tuple[int, int]  # start, end


# Workloads -----------------------------------------------------------------------------------------------------


def chain_workload(
    num_devices: int = 4,
    num_microbatches: int = 8,
    *,
    forward: int = 10,
    backward: int = 20,
    split: tuple[int, int] | None = None,
    lag: int = 0,
    activation_bytes: int = 1000,
    weight_grad_bytes: int = 0,
    workspace_bytes: int = 0,
    parameter_bytes: int = 0,
    memory_bytes: int | None = None,
    devices: Sequence[Sequence[int]] | None = None,
    sizes: Sequence[int] | None = None,
) -> Workload:
    """A chain of stages, by default one per device; ``split`` gives the times of I and W instead of B.

    ``devices`` [stage] places the stages elsewhere (``num_devices`` stays the number of devices) and ``sizes``
    [stage] gives their micro-batch sizes, for a mini-batch of ``num_microbatches`` samples.
    """
    groups = [tuple(group) for group in devices] if devices else [(device,) for device in range(num_devices)]
    stages = tuple(
        Stage(
            blocks=(f"block{s}",),
            devices=group,
            shards=len(group),
            microbatch_size=sizes[s] if sizes else 1,
            parameter_bytes=parameter_bytes,
            gradient_bytes=parameter_bytes,
            optimizer_bytes=2 * parameter_bytes,
        )
        for s, group in enumerate(groups)
    )
    operations = [
        Operation(
            kind="F", stage=s, duration_ns=forward, acquire_bytes=activation_bytes, workspace_bytes=workspace_bytes
        )
        for s in range(len(stages))
    ]
    back = "I" if split else "B"
    for s in reversed(range(len(stages))):
        operations += _backward(s, backward, split, activation_bytes, weight_grad_bytes, workspace_bytes)
    dependencies = [Dependency(source=f"{s}F", target=f"{s}{back}") for s in range(len(stages))]
    if split:
        dependencies += [Dependency(source=f"{s}I", target=f"{s}W") for s in range(len(stages))]
    for s, (group, following) in enumerate(zip(groups, groups[1:], strict=False)):
        down, up = hops(group, following, lag), hops(following, group, lag)
        dependencies.append(Dependency(source=f"{s}F", target=f"{s + 1}F", hops=down))
        dependencies.append(Dependency(source=f"{s + 1}{back}", target=f"{s}{back}", hops=up))
    return Workload(
        name="chain",
        placement="one-to-one",
        num_microbatches=num_microbatches,
        microbatch_size=1,
        devices=tuple(Device(memory_bytes=memory_bytes) for _ in range(num_devices)),
        stages=stages,
        operations=tuple(operations),
        dependencies=tuple(dependencies),
    )


def _backward(
    stage: int, backward: int, split: tuple[int, int] | None, held: int, deferred: int, workspace: int
) -> list[Operation]:
    if split is None:
        return [Operation(kind="B", stage=stage, duration_ns=backward, release_bytes=held, workspace_bytes=workspace)]
    return [
        Operation(
            kind="I",
            stage=stage,
            duration_ns=split[0],
            acquire_bytes=max(0, deferred - held),
            release_bytes=max(0, held - deferred),
            workspace_bytes=workspace,
        ),
        Operation(kind="W", stage=stage, duration_ns=split[1], release_bytes=deferred, workspace_bytes=workspace),
    ]


def hops(source: Sequence[int], target: Sequence[int], lag: int = 0, size: int = 64) -> tuple[Hop, ...]:
    """A message to every target device outside the source's group; senders take turns."""
    return tuple(
        Hop(source_device=source[index % len(source)], target_device=device, bytes=size, latency_ns=lag)
        for index, device in enumerate(target)
        if device not in source
    )


def shared_workload(num_devices: int = 4, num_microbatches: int = 6, *, lag: int = 0) -> Workload:
    """A stage on all devices before and after a chain with one stage per device: operations of several devices."""
    everywhere = list(range(num_devices))
    groups = [everywhere, *([device] for device in everywhere), everywhere]
    return chain_workload(num_devices, num_microbatches, devices=groups, lag=lag)


# Orders --------------------------------------------------------------------------------------------------------


def gpipe_orders(workload: Workload) -> Orders:
    """Operation after operation, each for all its micro-batches; valid for every workload."""
    return _by_key(workload, lambda position, first_sample: (position, first_sample))


def serial_orders(workload: Workload) -> Orders:
    """Micro-batch after micro-batch; valid where all stages have one micro-batch size."""
    return _by_key(workload, lambda position, first_sample: (first_sample, position))


def _by_key(workload: Workload, key: Callable[[int, int], tuple[int, int]]) -> Orders:
    found: list[list[tuple[tuple[int, int], Entry]]] = [[] for _ in workload.devices]
    for position, operation in enumerate(workload.operations):
        stage = workload.stages[operation.stage]
        for m in range(workload.num_instances(operation)):
            for device in stage.devices:
                found[device].append((key(position, m * stage.microbatch_size), (operation.id, m)))
    return [[entry for _, entry in sorted(order)] for order in found]


def one_f_one_b(workload: Workload) -> Orders:
    """1F1B for a chain with stage s on device s: D-1-s forwards, then forward and backward in turn. W follows I."""
    split = any(operation.kind == "I" for operation in workload.operations)
    number, depth = workload.num_microbatches, len(workload.stages)
    orders: Orders = []
    for s in range(depth):
        ahead = min(depth - 1 - s, number)
        order: list[Entry] = [(f"{s}F", m) for m in range(ahead)]
        for m in range(number):
            if m + ahead < number:
                order.append((f"{s}F", m + ahead))
            order += [(f"{s}I", m), (f"{s}W", m)] if split else [(f"{s}B", m)]
        orders.append(order)
    return orders


def one_f_one_b_repetend(workload: Workload) -> dict[str, int]:
    """``first`` of the copy that 1F1B repeats: forwards run ahead by the stages still to come."""
    depth = len(workload.stages)
    return {
        operation.id: depth - 1 - operation.stage if operation.kind == "F" else 0 for operation in workload.operations
    }


# Replay --------------------------------------------------------------------------------------------------------


def replay(workload: Workload, orders: Orders) -> dict[Entry, Span]:
    """Start and end of every action: devices take their next action in turn, as soon as it can start."""
    operations = {operation.id: operation for operation in workload.operations}
    incoming: dict[str, list[Dependency]] = defaultdict(list)
    for dependency in workload.dependencies:
        incoming[dependency.target].append(dependency)
    done: dict[Entry, Span] = {}
    at = [0] * len(orders)
    free = [0] * len(orders)
    while any(position < len(order) for position, order in zip(at, orders, strict=True)):
        before = len(done)
        for device, order in enumerate(orders):
            while at[device] < len(order):
                id_, m = order[at[device]]
                group = workload.stages[operations[id_].stage].devices
                waits = _waits(workload, operations, incoming[id_], id_, m)
                at_front = all(at[d] < len(orders[d]) and orders[d][at[d]] == (id_, m) for d in group)
                if not at_front or any(entry not in done for entry, _ in waits):
                    break
                start = max([free[d] for d in group] + [done[entry][1] + lag for entry, lag in waits])
                done[id_, m] = (start, start + operations[id_].duration_ns)
                for d in group:
                    free[d], at[d] = done[id_, m][1], at[d] + 1
        assert len(done) > before, "the orders deadlock"
    return done


def _waits(
    workload: Workload, operations: Mapping[str, Operation], incoming: Sequence[Dependency], id_: str, m: int
) -> list[tuple[Entry, int]]:
    size = workload.stages[operations[id_].stage].microbatch_size
    found = []
    for dependency in incoming:
        source_size = workload.stages[operations[dependency.source].stage].microbatch_size
        held = {sample // source_size for sample in range(m * size, (m + 1) * size)}
        found += [((dependency.source, n), dependency.lag_ns) for n in held]
    return found


def extended(workload: Workload, orders: Orders, first: Mapping[str, int], unroll: int, copies: int) -> Orders:
    """Orders with ``copies`` more of the repetend: prefix, copies, shifted suffix."""
    found = []
    for order in orders:
        ids = {id_ for id_, _ in order}
        begin = sum(first[id_] for id_ in ids)
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


# Plans ---------------------------------------------------------------------------------------------------------


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
    work = [_work(workload, [(id_, 0) for id_ in {id_ for id_, _ in order}]) for order in orders]
    busy = [_work(workload, order) for order in orders]
    spans = [_span([done[entry] for entry in order]) for order in orders]
    longest = max(range(len(spans)), key=lambda device: (spans[device], -device))
    num_devices = len(workload.devices)
    return Plan(
        name=workload.name,
        placement=workload.placement,
        num_microbatches=workload.num_microbatches,
        microbatch_size=workload.microbatch_size,
        devices=workload.devices,
        stages=workload.stages,
        operations=workload.operations,
        dependencies=workload.dependencies,
        starts_ns={
            operation.id: tuple(done[operation.id, m][0] for m in range(workload.num_instances(operation)))
            for operation in workload.operations
        },
        programs=lowered(workload, orders, done, full_names=full_names),
        repetend=repetend,
        predicted=Predicted(
            makespan_ns=makespan,
            lower_bound_ns=bound,
            gap=makespan / bound - 1,
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
    events: list[list[tuple[int, int, int, str]]] = [
        [(done[id_, m][0], 1, 0, f"{id_}{m}") for id_, m in order] for order in orders
    ]
    ends = [
        (int(dependency.source[:-1]), "F" if dependency.source[-1] == "F" else "B", int(dependency.target[:-1]), hop)
        for dependency in workload.dependencies
        for hop in dependency.hops
    ]
    senders = Counter((source, payload, hop.source_device) for source, payload, _, hop in ends)
    receivers = Counter((target, payload, hop.target_device) for _, payload, target, hop in ends)
    number = 0
    for dependency in workload.dependencies:
        source, target = int(dependency.source[:-1]), int(dependency.target[:-1])
        payload = "F" if dependency.source[-1] == "F" else "B"
        for hop in dependency.hops:
            sends = full_names or senders[source, payload, hop.source_device] > 1
            receives = full_names or receivers[target, payload, hop.target_device] > 1
            to = f">{target}@{hop.target_device}" if sends else ""
            of = f">{source}@{hop.source_device}" if receives else ""
            operation = next(operation for operation in workload.operations if operation.id == dependency.source)
            for m in range(workload.num_instances(operation)):
                end = done[dependency.source, m][1]
                events[hop.source_device].append((end, 0, number, f"{source}SEND_{payload}{m}{to}"))
                events[hop.target_device].append((end, 0, number, f"{target}RECV_{payload}{m}{of}"))
                number += 1
    return tuple(tuple(text for *_, text in sorted(device)) for device in events)


def _work(workload: Workload, order: Sequence[Entry]) -> int:
    durations = {operation.id: operation.duration_ns for operation in workload.operations}
    return sum(durations[id_] for id_, _ in order)


def _span(spans: Sequence[Span]) -> int:
    return max((end for _, end in spans), default=0) - min((start for start, _ in spans), default=0)


def _memory(workload: Workload, device: int, order: Sequence[Entry]) -> DeviceMemory:
    operations = {operation.id: operation for operation in workload.operations}
    held, peak, parts = 0, 0, (0, 0)
    for id_, _ in order:
        operation = operations[id_]
        held += operation.acquire_bytes
        if held + operation.workspace_bytes > peak:
            peak, parts = held + operation.workspace_bytes, (held, operation.workspace_bytes)
        held -= operation.release_bytes
    stages = [stage for stage in workload.stages if device in stage.devices]
    return DeviceMemory(
        parameter_bytes=sum(stage.parameter_bytes for stage in stages),
        gradient_bytes=sum(stage.gradient_bytes for stage in stages),
        optimizer_bytes=sum(stage.optimizer_bytes for stage in stages),
        activation_bytes=parts[0],
        workspace_bytes=parts[1],
        peak_bytes=workload.static_bytes(device) + peak,
    )


def chain_plan(
    num_devices: int = 4,
    num_microbatches: int = 8,
    *,
    forward: int = 10,
    backward: int = 20,
    split: tuple[int, int] | None = None,
    lag: int = 0,
    schedule: str = "1f1b",
    repetend: bool = False,
    unroll: int = 1,
    full_names: bool = False,
    activation_bytes: int = 1000,
    weight_grad_bytes: int = 0,
    workspace_bytes: int = 0,
    parameter_bytes: int = 0,
    memory_bytes: int | None = None,
    provenance: Provenance | None = None,
) -> Plan:
    """A valid plan of a chain with one stage per device; ``schedule`` is ``1f1b`` or ``gpipe``.

    ``repetend`` (1F1B with enough micro-batches) states the part that repeats, with ``unroll`` of each operation.
    """
    workload = chain_workload(
        num_devices,
        num_microbatches,
        forward=forward,
        backward=backward,
        split=split,
        lag=lag,
        activation_bytes=activation_bytes,
        weight_grad_bytes=weight_grad_bytes,
        workspace_bytes=workspace_bytes,
        parameter_bytes=parameter_bytes,
        memory_bytes=memory_bytes,
    )
    orders = one_f_one_b(workload) if schedule == "1f1b" else gpipe_orders(workload)
    first = one_f_one_b_repetend(workload) if repetend else None
    return plan_of(workload, orders, first=first, unroll=unroll, full_names=full_names, provenance=provenance)


def chain_profile(
    num_blocks: int = 4,
    *,
    forward: int = 10,
    backward: int = 20,
    split: tuple[int, int] | None = None,
    lag: int = 0,
    activation_bytes: int = 1000,
    weight_grad_bytes: int = 0,
    workspace_bytes: int = 0,
    parameter_bytes: int = 0,
    placed: bool = True,
) -> Profile:
    """The profile of which :func:`chain_plan`, with the same numbers, is a plan."""
    row = CostRow(
        microbatch_size=1,
        forward_ns=forward,
        backward_ns=None if split else backward,
        input_grad_ns=split[0] if split else None,
        weight_grad_ns=split[1] if split else None,
        activation_bytes=activation_bytes,
        weight_grad_bytes=weight_grad_bytes,
        workspace_bytes=workspace_bytes,
    )
    blocks = tuple(
        Block(
            id=f"block{index}",
            operator="block",
            parameter_bytes=parameter_bytes,
            optimizer_bytes=2 * parameter_bytes,
            costs=(row,),
        )
        for index in range(num_blocks)
    )
    edges = tuple(
        Edge(source=f"block{index}", target=f"block{index + 1}", bytes_per_sample=64, transfer_ns=lag)
        for index in range(num_blocks - 1)
    )
    placement = Placement(
        strategy="one-to-one",
        num_devices=num_blocks,
        stages=tuple(PlacedStage(blocks=(block.id,), devices=(index,)) for index, block in enumerate(blocks)),
    )
    return Profile(
        name="chain",
        source=Source(method="literature", reference="a chain of equal blocks"),
        blocks=blocks,
        edges=edges,
        placement=placement if placed else None,
    )


def with_devices_memory(workload: Workload, memory_bytes: int | None) -> Workload:
    """The same workload on devices with this memory."""
    return replace(workload, devices=tuple(Device(memory_bytes=memory_bytes) for _ in workload.devices))


def zero_bubble(name: str, num_devices: int, num_microbatches: int, memory: float) -> Problem:
    """Forward, input and weight gradient 100 each per device, communication 10, ``memory`` in multiples of p."""
    costs = ShapeCosts(100, None, 100, 100, comm_ns=10, activation_bytes=2 * 10**9, weight_grad_bytes=10**9)
    profile = shape(name, num_devices, costs=costs)
    assert profile.placement is not None
    return Problem.of(
        build_workload(
            profile,
            profile.placement,
            num_microbatches=num_microbatches,
            microbatch_size=1,
            split_backward=True,
            memory_bytes=[int(memory * 2 * num_devices * 10**9)] * num_devices,
        )
    )
