"""Valid plans made by hand, with no planner: workloads, orders, and a plain replay of what they take.

Written for tests of what reads plans. An *order* is, per device, the list of its compute actions as
(operation id, number): an operation's actions are numbered by their samples, which is by micro-batch unless some
run in parts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from hypothesis import strategies as st

from pipeplan.costs import build_workload
from pipeplan.examples import ShapeCosts, shape
from pipeplan.model import (
    Block,
    Cluster,
    CostRow,
    Dependency,
    Device,
    DeviceKind,
    DeviceMemory,
    Edge,
    Hop,
    LinkLevel,
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
    operation_of,
)
from pipeplan.model.workload import Workload
from pipeplan.schedule.problem import Problem
from pipeplan.simulate.timing import TaskGraph

Entry = tuple[str, int]
Orders = list[list[Entry]]
Span = tuple[int, int]  # start, end
Held = tuple[str, range]  # what stands behind stage and kind in the text, such as 3 or 0.1, and the samples


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


# Samples -------------------------------------------------------------------------------------------------------


def actions_of(workload: Workload, id_: str) -> list[Held]:
    """The actions of an operation in the order of their numbers."""
    stage = workload.stages[operation_of(id_)[0]]
    count = workload.mini_batch // (stage.microbatch_size * workload.num_routes)
    return _held(workload, stage, range(count), _num_parted(workload, id_))


def messages_of(workload: Workload, dependency: Dependency, hop: Hop) -> list[Held]:
    """The messages of a hop: one per micro-batch of its source that goes there, two where both ends run it in parts."""
    source = workload.stages[operation_of(dependency.source)[0]]
    parted = min(_num_parted(workload, id_) for id_ in (dependency.source, dependency.target))
    count = workload.mini_batch // (source.microbatch_size * workload.num_routes)
    going = [m for m in range(count) if hop.first <= m % hop.every < hop.first + hop.run]
    return _held(workload, source, going, parted)


def _held(workload: Workload, stage: Stage, microbatches: Iterable[int], num_parted: int) -> list[Held]:
    size, found = stage.microbatch_size, []
    for m in microbatches:
        begin = (m * workload.num_routes + stage.route) * size
        if m < num_parted:
            found.append((f"{m}.0", range(begin, begin + size // 2)))
            found.append((f"{m}.1", range(begin + size // 2, begin + size)))
        else:
            found.append((str(m), range(begin, begin + size)))
    return found


def holders_of(workload: Workload, id_: str) -> dict[int, int]:
    """{sample: number of the operation's action that holds it}."""
    return {sample: n for n, (_, samples) in enumerate(actions_of(workload, id_)) for sample in samples}


def is_part(held: Held) -> bool:
    """Whether it is a part of a micro-batch."""
    return "." in held[0]


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
        for number, (_, samples) in enumerate(actions_of(workload, operation.id)):
            for device in workload.stages[operation.stage].devices:
                found[device].append((key(position, samples[0]), (operation.id, number)))
    return [[entry for _, entry in sorted(order)] for order in found]


def random_orders(graph: TaskGraph, choose: Random) -> list[list[int]]:
    """Orders of devices and links that cannot block each other: tasks taken at random, after what they wait for."""
    waiting = list(graph.num_predecessors)
    ready = [task for task, count in enumerate(waiting) if count == 0]
    orders: list[list[int]] = [[] for _ in range(graph.workload.num_resources)]
    while ready:
        task = ready.pop(choose.randrange(len(ready)))
        for device in graph.devices_of(task):
            orders[device].append(task)
        for other, _ in graph.successors[task]:
            waiting[other] -= 1
            if waiting[other] == 0:
                ready.append(other)
    return orders


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
        orders.append([entry for id_, m in order for entry in _entries_of(workload, id_, m)])
    return orders


def _entries_of(workload: Workload, id_: str, microbatch: int) -> list[Entry]:
    """The actions that run a micro-batch, or its parts."""
    names = [name for name, _ in actions_of(workload, id_)]
    return [(id_, number) for number, name in enumerate(names) if name.split(".")[0] == str(microbatch)]


def one_f_one_b_repetend(workload: Workload) -> dict[str, int]:
    """``first`` of the copy that 1F1B repeats: forwards run ahead by the stages still to come."""
    depth = len(workload.stages)
    return {
        operation.id: depth - 1 - operation.stage if operation.kind == "F" else 0 for operation in workload.operations
    }


# Replay --------------------------------------------------------------------------------------------------------


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
        holder = holders_of(workload, dependency.source)
        for number, action in enumerate(actions[dependency.target]):
            own = {holder[sample] for sample in action[1] if sample in holder}
            for n in sorted(own if dependency.needs is None else range(dependency.needs[number])):
                both_parts = is_part(action) and is_part(actions[dependency.source][n])
                lag = part_ns if both_parts else dependency.lag_ns
                found[dependency.target, number].append(((dependency.source, n), lag))
    return found


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
        begin = sum(first[id_] + _num_parted(workload, id_) for id_ in ids)
        end = begin + unroll * len(ids)
        longer = order[:begin]
        for k in range(copies + 1):
            longer += [(id_, m + k * unroll) for id_, m in order[begin:end]]
        found.append(longer + [(id_, m + copies * unroll) for id_, m in order[end:]])
    return found


def _num_parted(workload: Workload, id_: str) -> int:
    return workload.stages[operation_of(id_)[0]].num_parted if operation_of(id_)[1] == "F" else 0


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


# Placements of all kinds ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placed:
    """What a workload of several routes, sizes, replicas or parts is made from, and the workload."""

    profile: Profile
    cluster: Cluster | None
    workload: Workload


@st.composite
def placed(draw: st.DrawFn, *, links: bool = False, parts: bool | None = None) -> Placed:
    """Any forward edges between up to four blocks, on up to four devices; one of routes, parts or unequal sizes.

    With ``links`` on a cluster of nodes of two devices, whose links are slow enough to be busy. ``parts`` requires or
    refuses leading forwards in parts.
    """
    blocks = tuple(_drawn_block(draw, index) for index in range(draw(st.integers(1, 4))))
    num_routes = 1 if parts else draw(st.sampled_from([1, 1, 2]))
    num_devices = draw(st.integers(2, 4))
    in_parts = num_routes == 1 and (parts or (parts is None and draw(st.booleans())))
    sizes = [4] if in_parts else [draw(st.sampled_from([2, 4]))] if num_routes > 1 else [1, 2, 4]
    stages = tuple(
        _drawn_stage(draw, block.id, route, num_devices, sizes, in_parts)
        for route in range(num_routes)
        for block in blocks
    )
    edges = tuple(
        Edge(
            source=f"block{a}",
            target=f"block{b}",
            bytes_per_sample=draw(st.sampled_from([0, 10, 30])),
            transfer_ns=draw(st.sampled_from([None, 3])),
            gradient=draw(st.integers(0, 3)) > 0,
        )
        for b in range(len(blocks))
        for a in range(b)
        if a == b - 1 or draw(st.booleans())
    )
    profile = Profile(name="drawn", source=Source(method="literature"), blocks=blocks, edges=edges)
    placement = Placement(strategy="drawn", num_devices=num_devices, num_routes=num_routes, stages=stages)
    cluster = _drawn_cluster(draw) if links else None
    workload = build_workload(
        profile,
        placement,
        num_microbatches=4,
        microbatch_size=4,
        split_backward=draw(st.booleans()),
        cluster=cluster,
    )
    return Placed(profile, cluster, workload)


@st.composite
def placed_chains(draw: st.DrawFn) -> Placed:
    """Stages one behind the other on a device each, fewer in parts from stage to stage, over links that may be busy."""
    depth = draw(st.integers(2, 4))
    blocks = tuple(_drawn_block(draw, index) for index in range(depth))
    edges = tuple(
        Edge(source=f"block{a}", target=f"block{b}", bytes_per_sample=draw(st.sampled_from([5, 20])))
        for b in range(depth)
        for a in range(b)
        if a == b - 1 or draw(st.booleans())
    )
    stages = tuple(
        PlacedStage(blocks=(block.id,), devices=(s,), num_parted=draw(st.integers(0, depth - 1 - s)))
        for s, block in enumerate(blocks)
    )
    profile = Profile(name="drawn", source=Source(method="literature"), blocks=blocks, edges=edges)
    placement = Placement(strategy="one-to-one", num_devices=depth, stages=stages)
    cluster = _drawn_cluster(draw)
    number = draw(st.integers(depth + 1, 9))
    workload = build_workload(profile, placement, num_microbatches=number, microbatch_size=2, cluster=cluster)
    return Placed(profile, cluster, workload)


def _drawn_block(draw: st.DrawFn, index: int) -> Block:
    """Costs that are not proportional to the samples."""
    number = st.integers(1, 9)
    forward, extra, split = draw(number), draw(st.integers(0, 2)), draw(st.booleans())
    rows = tuple(
        CostRow(
            microbatch_size=size,
            shards=shards,
            forward_ns=forward * size + extra,
            backward_ns=2 * forward * size,
            input_grad_ns=forward * size if split else None,
            weight_grad_ns=forward * size if split else None,
            activation_bytes=3 * size + extra,
            weight_grad_bytes=2 * size if split else 0,
            workspace_bytes=extra,
        )
        for size in (1, 2, 4)
        for shards in (1, 2)
    )
    return Block(id=f"block{index}", operator="block", parameter_bytes=100 * draw(number), costs=rows)


def _drawn_stage(
    draw: st.DrawFn, block: str, route: int, num_devices: int, sizes: Sequence[int], in_parts: bool
) -> PlacedStage:
    number, size = draw(st.sampled_from([1, 2])), draw(st.sampled_from(sizes))
    replicas = draw(st.sampled_from([1, number])) if size % number == 0 else 1
    return PlacedStage(
        blocks=(block,),
        devices=tuple(draw(st.permutations(range(num_devices)))[:number]),
        shards=number // replicas,
        replicas=replicas,
        microbatch_size=size,
        recompute=draw(st.sampled_from([None, False, True])),
        route=route,
        num_parted=draw(st.integers(0, 3)) if in_parts else 0,
    )


def _drawn_cluster(draw: st.DrawFn) -> Cluster:
    rate = draw(st.sampled_from([1, 5])) * 10**9
    outer = LinkLevel(name="network", group_size=4, latency_ns=3, bandwidth_bytes_per_s=rate)
    return Cluster(
        name="nodes",
        source=Source(method="estimated"),
        devices=(DeviceKind(name="device", count=4),),
        levels=(LinkLevel(name="node", group_size=2, latency_ns=1, bandwidth_bytes_per_s=10 * 10**9), outer),
    )


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
    durations = durations_of(workload)
    whole = {operation.id: operation.duration_ns for operation in workload.operations}
    work = [sum(whole[id_] for id_ in {id_ for id_, _ in order}) for order in orders]
    busy = [sum(durations[entry] for entry in order) for order in orders]
    ends = [max((done[entry][1] for entry in order), default=0) for order in orders]
    syncs = [sum(stage.sync_ns for stage in workload.stages if device in stage.devices) for device in range(len(ends))]
    spans = [_span([done[entry] for entry in order]) for order in orders]
    longest = max(range(len(spans)), key=lambda device: (spans[device], -device))
    num_devices = len(workload.devices)
    return Plan(
        name=workload.name,
        placement=workload.placement,
        num_microbatches=workload.num_microbatches,
        microbatch_size=workload.microbatch_size,
        num_routes=workload.num_routes,
        devices=workload.devices,
        stages=workload.stages,
        operations=workload.operations,
        dependencies=workload.dependencies,
        starts_ns={
            operation.id: tuple(done[operation.id, n][0] for n in range(len(actions_of(workload, operation.id))))
            for operation in workload.operations
        },
        programs=lowered(workload, orders, done, full_names=full_names),
        repetend=repetend,
        predicted=Predicted(
            makespan_ns=makespan,
            lower_bound_ns=bound,
            gap=makespan / bound - 1,
            iteration_ns=max(map(sum, zip(ends, syncs, strict=True))),
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
        if number < 2 * _num_parted(workload, id_):  # half; the first part the larger one
            taken = taken // 2 if number % 2 else -(-taken // 2)
        held += taken
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
