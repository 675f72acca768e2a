"""From a profile and a placement to a workload: what each stage costs and what it sends to whom."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cache, partial
from itertools import chain, pairwise
from typing import Any

from pipeplan.costs.blocks import StageCost, TiedShare, asked_again, block_costs, places_divided
from pipeplan.costs.buckets import gathered_beside, with_buckets
from pipeplan.costs.columns import MANY, Columns
from pipeplan.costs.communication import contention_of_sums, time_on_curve
from pipeplan.costs.context import exchange_on, of_stages
from pipeplan.costs.experts import ExpertState, kept_of
from pipeplan.costs.forwards import held_by_forward
from pipeplan.costs.held_once import counted_again, loose_edges
from pipeplan.costs.kinds import kinds_on, on_kinds
from pipeplan.costs.messages import Crossings, dependencies, edge_bytes, with_gathers
from pipeplan.costs.recipes import state_of, states_of, step_ns
from pipeplan.costs.segments import require_plain, with_segments
from pipeplan.costs.shared import SharedState, with_syncs
from pipeplan.costs.speeds import at_speed
from pipeplan.costs.states import States
from pipeplan.costs.trees import linked_alike
from pipeplan.costs.wide_groups import where_it_stands
from pipeplan.costs.zero import (
    ALONE,
    IN_ACTIONS,
    TOGETHER,
    WHOLE,
    Exchanged,
    Exchanging,
    Experts,
    Zero,
    beside_exchanges,
    cuts,
    with_exchanges,
)
from pipeplan.errors import UsageError
from pipeplan.files import Block, Cluster, CostRow, PlacedStage, Placement, Profile, Recipe, TiedParameter
from pipeplan.time_limit import checked
from pipeplan.units import MAX_BYTES, MAX_NS, MAX_TOTAL, require_sum
from pipeplan.workload.elements import (
    MAX_COUNT,
    Again,
    BlockGroup,
    Device,
    Operation,
    Recompute,
    Stage,
    TiedState,
    recompute_of,
)
from pipeplan.workload.folding import Fold, ways_to_fold
from pipeplan.workload.kinds import STATE_KINDS, MemoryBytes, MemoryKind, Role
from pipeplan.workload.workload import Workload


def can_split(profile: Profile) -> bool:
    """Whether some block has input and weight gradients apart, so that a plan can split backward there."""
    rows = (row for block in profile.kinds for row in block.costs)
    return profile.once("can_split", lambda: any(row.input_grad_ns is not None for row in rows))


def stage_costs(
    profile: Profile,
    blocks: Iterable[str],
    microbatch_size: int,
    shards: int = 1,
    *,
    context: int = 1,
    recompute: Recompute = False,
    zero: Zero = WHOLE,
    exchanging: Exchanging = ALONE,
    experts: Experts = TOGETHER,
    speed: float = 1.0,
) -> StageCost:
    """Costs of blocks that run one after another on each device of a group.

    Times, activations and parameters add up; tensors between the blocks are held as :mod:`pipeplan.costs.held_once`
    says, and parameters that they share once. Workspace is the largest, since only one block runs at a time. Of what
    replicas divide by ``zero`` there is one part, and what they exchange of each block takes its time where they are
    ``exchanging``; by default that is left out. A device has one of ``context`` parts of each sequence, and what
    ``experts`` says of those of its blocks; it has this ``speed``.

    Raises:
        UsageError: a block has no costs for this micro-batch size or shard count, or shares what it would gather.
    """
    how: dict[str, Any] = {"context": context, "recompute": recompute, "zero": zero, "exchanging": exchanging}
    how |= {"experts": experts, "speed": speed}
    (cost,) = group_costs(profile, [tuple(blocks)], microbatch_size, shards, **how)
    return cost


def group_costs(
    profile: Profile,
    groups: Iterable[Sequence[str]],
    microbatch_size: int,
    shards: int = 1,
    *,
    context: int = 1,
    recompute: Recompute = False,
    zero: Zero = WHOLE,
    exchanging: Exchanging = ALONE,
    experts: Experts = TOGETHER,
    speed: float = 1.0,
) -> list[StageCost]:
    """:func:`stage_costs` of every group of blocks: the profile is looked through once for all.

    Raises:
        UsageError: a block has no costs for this micro-batch size or shard count, or shares what it would gather.
    """
    how: dict[str, Any] = {"context": context, "zero": zero, "exchanging": exchanging, "experts": experts}
    how["speed"] = speed
    return _costs_of_groups(profile, [(group, recompute) for group in groups], microbatch_size, shards, **how)


def _costs_of_groups(
    profile: Profile,
    groups: Sequence[tuple[Sequence[str], Recompute]],
    microbatch_size: int,
    shards: int,
    *,
    context: int,
    zero: Zero,
    exchanging: Exchanging,
    experts: Experts,
    speed: float,
) -> list[StageCost]:
    """The same of groups that each say what they compute again."""
    by_id, into, alike = profile.by_id, profile.edges_into, profile.alike
    recipe, cut = profile.recipe, cuts(profile.recipe, zero, shards)
    if zero.level >= IN_ACTIONS:
        require_apart(profile, zero.level, set(chain.from_iterable(blocks for blocks, _ in groups)))
    kept = cache(lambda first: kept_of(by_id[first], recipe, shards, zero, experts))
    times, contention = cache(exchanging.times), exchanging.contention
    rows: dict[tuple[str, Again, int], CostRow] = {}
    how: dict[str, Any] = {"context": context, "recipe": recipe, "speed": speed}
    how |= {"expert": experts.size, "expert_shards": experts.split}

    def exchanged(block: Block, row: CostRow) -> CostRow:
        own = Exchanged.of(block, recipe, zero, shards, experts)
        if exchanging.every is not None:
            return beside_exchanges(row, own, times(own), exchanging.every, contention)
        return with_exchanges(row, own, times(own), contention) if any(own) else row

    def row_of(block: Block, again: Again, taken: int) -> CostRow:
        """Of blocks that are alike worked out for one; where it has none, that one is named."""
        key = alike[block.id], again, taken
        if key not in rows:
            own = block_costs(block, microbatch_size, shards, recompute=again, input_bytes=taken, **how)
            rows[key] = exchanged(block, own)
        return rows[key]

    parts, tied = _parts_in(profile, shards, context), _tied_in(profile, shards, cut)
    is_loose = bool(loose_edges(profile))

    def taken_by(id_: str) -> int:
        return sum(edge_bytes(edge, microbatch_size, parts(alike[id_])) for edge in into.get(id_, ()))

    def too_often(blocks: Sequence[str], recompute: Recompute) -> int:
        again = asked_again([by_id[id_] for id_ in blocks], recompute) if is_loose else ()
        return counted_again(profile, blocks, again, microbatch_size, lambda id_: parts(alike[id_]))

    def shared(blocks: Sequence[str]) -> Mapping[TiedShare, int]:
        return Counter(each for id_ in blocks for each in tied.get(id_, ())) if tied else {}

    def summed(blocks: Sequence[str], recompute: Recompute) -> StageCost:
        chosen = [by_id[id_] for id_ in blocks]
        taken = map(taken_by, blocks)
        own = [row_of(*each) for each in zip(chosen, asked_again(chosen, recompute), taken, strict=True)]
        state = sum((kept(alike[id_]) for id_ in blocks), MemoryBytes())
        if not profile.is_inference:
            return _summed(own, state, too_often(blocks, recompute), shared(blocks))
        held = held_by_forward(profile, blocks, own)
        cost = _summed(own, state, 0, shared(blocks))
        return replace(cost, activation_bytes=held.given, workspace_bytes=held.inner)

    kept_so: dict[str, Any] = {"zero": zero, "exchanging": exchanging, "experts": experts}
    same = profile, groups, microbatch_size, shards
    if (columns := _columns_of(*same, context=context, speed=speed, **kept_so)) is not None:
        sizes = [len(blocks) for blocks, _ in groups]
        twice = [too_often(*group) for group in groups]
        return list(columns.stages(sizes, twice, [shared(blocks) for blocks, _ in groups]))
    return [summed(*group) for group in checked(groups, 64)]


def block_columns(
    profile: Profile,
    blocks: Sequence[str],
    microbatch_size: int,
    shards: int = 1,
    *,
    context: int = 1,
    recompute: Recompute = False,
    zero: Zero = WHOLE,
    exchanging: Exchanging = ALONE,
    experts: Experts = TOGETHER,
    speed: float = 1.0,
) -> Columns:
    """:func:`stage_costs` of each of some blocks alone, as columns; what several of them share is there with each.

    Raises:
        UsageError: a block has no costs for this micro-batch size or shard count, or shares what it would gather.
    """
    if zero.level >= IN_ACTIONS:
        require_apart(profile, zero.level, set(blocks))
    how: dict[str, Any] = {"context": context, "zero": zero, "exchanging": exchanging, "experts": experts}
    given = profile, [((block,), recompute) for block in blocks], microbatch_size, shards
    known = _columns_of(*given, **how, speed=speed)
    return Columns.of_costs(_costs_of_groups(*given, **how, speed=speed)) if known is None else known


def _columns_of(
    profile: Profile,
    groups: Sequence[tuple[Sequence[str], Recompute]],
    microbatch_size: int,
    shards: int,
    *,
    context: int,
    zero: Zero,
    exchanging: Exchanging,
    experts: Experts,
    speed: float,
) -> Columns | None:
    """[block] what each block of the groups costs; None of few, of inference, and where rows must say what is wrong."""
    ids = list(chain.from_iterable(blocks for blocks, _ in groups))
    if len(ids) < MANY or profile.is_inference:
        return None
    by_id, into, alike = profile.by_id, profile.edges_into, profile.alike
    parts, chosen = _parts_in(profile, shards, context), [by_id[id_] for id_ in ids]
    if len({recompute for _, recompute in groups}) == 1 and not isinstance(groups[0][1], tuple):
        again = asked_again(chosen, groups[0][1])
    else:
        each = (asked_again([by_id[id_] for id_ in blocks], recompute) for blocks, recompute in groups)
        again = tuple(chain.from_iterable(each))
    taken = [
        sum(edge_bytes(edge, microbatch_size, parts(alike[id_])) for edge in into.get(id_, ())) if each is True else 0
        for id_, each in zip(ids, again, strict=True)
    ]
    states, place_of = profile.once("columns", lambda: (States.of(profile.blocks, profile.recipe), _places(profile)))
    numbers: dict[tuple[str, Again, int], int] = {}
    runs = zip(ids, again, taken, strict=True)
    kinds = [numbers.setdefault((alike[id_], each, held), len(numbers)) for id_, each, held in runs]
    firsts = [by_id[id_] for id_, _, _ in numbers]
    how: dict[str, Any] = {"zero": zero, "exchanging": exchanging, "experts": experts, "speed": speed}
    how["states"] = states.of_some([place_of[id_] for id_, _, _ in numbers])
    own = [each for _, each, _ in numbers], [each for _, _, each in numbers]
    found = Columns.of(firsts, *own, microbatch_size, shards, context=context, **how)
    return None if found is None else found.of_some(kinds)


def _places(profile: Profile) -> dict[str, int]:
    """{block: its place in the file}"""
    return {block.id: place for place, block in enumerate(profile.blocks)}


def _parts_in(profile: Profile, shards: int, context: int) -> Callable[[str], int]:
    """Into how many parts devices divide the sequences that a block takes."""
    by_id = profile.by_id
    return cache(lambda id_: context * places_divided(by_id[id_], shards))


def require_apart(profile: Profile, level: int, blocks: Set[str]) -> None:
    """Refuse to exchange what some blocks share: it is gathered and reduced block by block, and would be with each.

    Raises:
        UsageError: one of the blocks shares parameters with others.
    """
    tied = next((each for each in shared_in(profile) if not blocks.isdisjoint(each.blocks)), None)
    if tied is not None:
        raise UsageError(
            f"zero {level} exchanges state block by block, and blocks {' and '.join(map(repr, tied.blocks))} share "
            f"{tied.name!r}, which none of them can gather or reduce for the others; give --zero 1, or 0"
        )


def shared_in(profile: Profile) -> list[TiedParameter]:
    """The parameters that several blocks have, as far as training keeps something of them."""
    return [each for each in profile.tied if state_of(each, profile.recipe).total]


def _tied_in(profile: Profile, shards: int, cut: Mapping[MemoryKind, int]) -> dict[str, list[TiedShare]]:
    """{block: what each of the devices that split it shares with other blocks}"""
    found: dict[str, list[TiedShare]] = defaultdict(list)
    for each in profile.tied:
        share = TiedShare(each.name, shards, state_of(each, profile.recipe) // cut)
        for block in each.blocks:
            found[block].append(share)
    return found


def _summed(rows: Sequence[CostRow], state: MemoryBytes, too_often: int, shared: Mapping[TiedShare, int]) -> StageCost:
    """Costs of blocks with these rows, the ``state`` of all, and how often they have what some share.

    ``too_often`` are the bytes by which their activations are more than they hold together.
    """
    split = all(row.input_grad_ns is not None for row in rows)
    return StageCost(
        forward_ns=sum(row.forward_ns for row in rows),
        backward_ns=sum(row.whole_backward_ns for row in rows),
        input_grad_ns=sum(row.input_grad_ns or 0 for row in rows) if split else None,
        weight_grad_ns=sum(row.weight_grad_ns or 0 for row in rows) if split else None,
        activation_bytes=max(0, sum(row.activation_bytes for row in rows) - too_often),
        weight_grad_bytes=sum(row.weight_grad_bytes for row in rows),
        workspace_bytes=max(row.workspace_bytes for row in rows),
        state=state - _again(shared),
        tied=frozenset(shared),
    )


def _again(shared: Mapping[TiedShare, int]) -> MemoryBytes:
    """What several blocks each count of what they share, beyond the first time."""
    return sum((each.state * (count - 1) for each, count in shared.items()), MemoryBytes())


FOLD_FROM = 64
"""Workloads on more devices have programs that several devices play, where these are alike."""

FOLD_LEAST = 4
"""Players of each program, at least: fewer are not worth it."""


def build_workload(
    profile: Profile,
    placement: Placement,
    *,
    num_microbatches: int,
    microbatch_size: int,
    split_backward: bool = False,
    split_overhead_ns: int = 0,
    recompute: Recompute = False,
    cluster: Cluster | None = None,
    memory_bytes: Sequence[int | None] | None = None,
    reserve_bytes: Sequence[int] | None = None,
    given: Mapping[int, StageCost] | None = None,
    speeds: Sequence[float] | None = None,
    names: Sequence[str] | None = None,
    whole_messages: bool = False,
    fold_least: int = FOLD_LEAST,
) -> Workload:
    """Everything one iteration runs under a placement, with its costs.

    ``microbatch_size`` and ``recompute`` are those of stages that do not say their own. ``memory_bytes`` has one entry
    per device and goes before the cluster's, and so has ``reserve_bytes``, by default 0 with it. With
    ``split_backward`` every stage whose blocks allow it runs I and W instead of B, each ``split_overhead_ns`` longer
    than the profile says: a split backward is two launches. ``given`` are costs of actions of stages, by number, that
    are not the profile's: of those whose blocks have configurations. ``whole_messages``: no message is a slice of its
    sequence, for instructions are to see all of it. ``speeds`` and ``names`` of kinds [device] go before the cluster's.
    On more than :data:`FOLD_FROM` devices it is folded, where each program has ``fold_least`` players (0: it is not).

    Raises:
        UsageError: a missing cost row, a stage with configurations whose costs are not given, a mini-batch that stages
            cannot share out, or a cluster with fewer devices than the placement.
    """
    if cluster is not None and cluster.num_devices < placement.num_devices:
        raise UsageError(
            f"cluster {cluster.name!r} has {cluster.num_devices} devices, the placement needs {placement.num_devices}; "
            "lower --devices or give a larger --cluster"
        )
    mini_batch = num_microbatches * microbatch_size
    profile = of_stages(profile, placement.stages)
    blocks = profile.by_id
    speeds = speeds or ((1.0,) * placement.num_devices if cluster is None else cluster.speeds)
    names = names or (() if cluster is None else cluster.names)
    placed = [
        _settled(profile, stage, blocks, microbatch_size, recompute, speeds) for stage in checked(placement.stages, 64)
    ]
    if profile.of_kinds:
        placed = [replace(each, kinds=kinds_on(profile, (names[d] for d in each.devices))) for each in placed]
    for stage in placed:
        _require_shared_out(stage, mini_batch, placement.num_routes)
    _require_one_size(placed, placement.num_routes)
    _require_alike(placed)
    costs = _costs_of(profile, placed, given or {}, cluster)
    for number, stage in enumerate(placed):
        if stage.segments:
            require_plain(profile, number, stage)
            costs[number] = with_segments(profile, stage, costs[number])
    costs = with_gathers(Crossings(profile, placed, whole_messages), costs, given or {}, cluster)
    operations = _forwards(costs) if profile.is_inference else _operations(costs, split_backward, split_overhead_ns)
    stages, tied = _with_shared(profile, placed, costs, operations, given or {}, cluster)
    operations = _with_parts(profile, stages, operations, cluster)
    own: dict[int, list[Operation]] = defaultdict(list)
    for each in operations:
        own[each.stage].append(each)
    stages = [
        replace(stage, block_groups=_block_groups(profile, stage, own[number], cluster))
        if stage.reduce_every is not None
        else stage
        for number, stage in enumerate(stages)
    ]
    memory = memory_bytes or (cluster.memory_bytes if cluster is not None else (None,) * placement.num_devices)
    known = cluster.reserve_bytes if cluster is not None and memory_bytes is None else (0,) * placement.num_devices
    reserve = known if reserve_bytes is None else reserve_bytes
    called = () if cluster is None else cluster.names
    all_alike = len(set(memory)) == len(set(reserve)) == 1 and len(set(called)) <= 1
    contention = contention_of_sums(cluster, stages)

    @cache
    def of_kind(name: str, size: int | None, kept: int) -> Device:
        return Device(name=name, memory_bytes=size, reserve_bytes=kept, contention=contention)

    def device(number: int) -> Device:
        return of_kind(called[number] if called else "device", memory[number], reserve[number])

    said: dict[str, Any] = {
        "name": profile.name,
        "placement": placement.strategy,
        "num_microbatches": num_microbatches,
        "microbatch_size": microbatch_size,
        "operations": operations,
        "num_routes": placement.num_routes,
    }
    joined = partial(dependencies, placement=placement, operations=operations, cluster=cluster)
    foldable = placement.num_devices > FOLD_FROM and not (profile.is_inference or whole_messages)
    least = fold_least if foldable else 0
    for count in ways_to_fold(stages) if least else ():
        fold = Fold.of(stages, count, placement.num_devices) if count >= least else None
        on_programs = None if fold is None else _on_programs(fold, stages, tied, device, all_alike=all_alike)
        if fold is None or on_programs is None:
            continue
        waits = joined(Crossings(profile, on_programs["stages"], whole_messages), fold=fold)
        pairs = ((hop.source_device, hop.target_device) for each in waits for hop in each.hops)
        if cluster is None or linked_alike(fold, pairs, cluster):
            workload = Workload(**said, **on_programs, dependencies=waits)
            _require_sums(profile.where, workload)
            return workload
    workload = Workload(
        **said,
        devices=tuple(map(device, range(placement.num_devices))),
        stages=tuple(stages),
        dependencies=joined(Crossings(profile, stages, whole_messages)),
        tied=tuple(tied),
    )
    _require_sums(profile.where, workload)
    return workload


def _on_programs(
    fold: Fold,
    stages: Sequence[Stage],
    tied: Sequence[TiedState],
    device: Callable[[int], Device],
    *,
    all_alike: bool,
) -> dict[str, Any] | None:
    """Devices, stages and what these share on programs; None where players of one program are not alike.

    Where ``all_alike``, devices need not be looked at one by one.
    """
    found = [fold.tied(each) for each in tied]
    devices = [device(own.first) for own in fold.players]
    played = () if all_alike else fold.programs.items()
    each = ((device(number), devices[program]) for number, program in played)
    if None in found or any(own is not first and own != first for own, first in each):
        return None
    on = tuple(map(fold.stage, stages))
    return {"devices": tuple(devices), "stages": on, "tied": tuple(found), "players": fold.players}


def _with_shared(
    profile: Profile,
    placed: Sequence[Stage],
    costs: Sequence[StageCost],
    operations: Sequence[Operation],
    given: Collection[int],
    cluster: Cluster | None,
) -> tuple[list[Stage], list[TiedState]]:
    """Stages with what each keeps and how long it sums gradients, and what they share."""
    shared = SharedState(profile)
    stages = [
        shared.with_whole(stage.with_state(shared.of_configured(stage) if number in given else cost.state))
        for number, (stage, cost) in enumerate(zip(placed, costs, strict=True))
    ]
    tied = shared.tied(stages)
    at_once = {*given, *(number for number, stage in enumerate(stages) if stage.segments)}
    if cluster is not None:
        stages = with_buckets(shared, stages, tied, operations, at_once, cluster.overlap)
    experts = [ExpertState.of(stage, shared.blocks, profile.recipe) for stage in stages]
    stages, tied = with_syncs(stages, tied, profile.recipe, cluster, experts)
    stages = [_with_first_and_last(shared.blocks[stage.blocks[0]], stage, profile.recipe, cluster) for stage in stages]
    for number, stage in enumerate(stages):
        if stage.configurations:
            apart = {each.name for each in tied if number in each.stages}
            inner = shared.inner_sums_ns(stage, apart, cluster)
            stages[number] = replace(stage, sync_ns=stage.sync_ns + inner)
    if cluster is not None and cluster.overlap == "all":
        stages = gathered_beside(stages, operations, contention_of_sums(cluster, stages))
    return with_steps(profile, stages, tied), tied


def _with_first_and_last(first: Block, stage: Stage, recipe: Recipe, cluster: Cluster | None) -> Stage:
    """A stage with the exchanges that no block of its own is beside, both of its ``first`` block.

    The last reduction comes after the last backward; the gather before the first forward, after the step before.
    """
    if stage.reduce_every is not None or (stage.zero < IN_ACTIONS and stage.expert == 1):  # actions do all, or nothing
        return stage
    exchanged = Exchanged.of(first, recipe, Zero.of(stage), stage.shards, Experts.of(stage))
    gather, reduce = Exchanging.of(stage, cluster).times(exchanged)
    buckets = (*stage.buckets[:-1], *(replace(each, sync_ns=each.sync_ns + reduce) for each in stage.buckets[-1:]))
    return replace(stage, sync_ns=stage.sync_ns + reduce, gather_ns=stage.gather_ns + gather, buckets=buckets)


def with_steps(profile: Profile, stages: Sequence[Stage], tied: Sequence[TiedState]) -> list[Stage]:
    """Stages with the time of the optimizer's step of what each keeps; 0 where the profile does not say it.

    A stage leaves out what is tied if each of its devices steps that with another stage, which has it before; one
    whose blocks have configurations does not.
    """
    rates = [on_kinds(profile, stage.kinds).step_bytes_per_s for stage in stages]
    if not any(rates):
        return [*stages]
    stepped, again = [stage.state for stage in stages], defaultdict[tuple[str, int], set[int]](set)
    for each in tied:
        before = set[int]()
        for number, devices in zip(each.stages, each.devices, strict=True):
            had = again[each.name, number]
            known = len(had)
            had.update(before.intersection(devices))
            if known < len(had) == len(stages[number].devices) and not stages[number].configurations:
                stepped[number] -= each.state
            before.update(devices)
    return [
        stage if rate is None else replace(stage, step_ns=at_speed(step_ns(state, profile.recipe, rate), stage.speed))
        for stage, state, rate in zip(stages, stepped, rates, strict=True)
    ]


_LARGEST = {"ns": (MAX_NS, "have more devices share the work"), "bytes": (MAX_BYTES, "have more devices share them")}


def _require_sums(where: str, workload: Workload) -> None:
    """What adds up over blocks, samples and edges is still a number that a plan may have. Raises UsageError."""
    sizes = [(f"samples in a micro-batch of stages[{n}]", s.microbatch_size) for n, s in enumerate(workload.stages)]
    for what, count in (("micro-batches", workload.num_microbatches), *sizes):
        if count > MAX_COUNT:
            raise UsageError(f"{where}: {count} {what} are more than the {MAX_COUNT} of a plan; choose fewer")
    for place, names, element in _sums_of(workload):
        for name in names:
            unit = name.rpartition("_")[2]
            if (value := getattr(element, name)) > _LARGEST[unit][0]:
                require_sum(where, f"{name} of {place}", value, unit, *_LARGEST[unit])


_STATE = ("sync_ns", "step_ns", "gather_ns", *(kind.key for kind in STATE_KINDS))
_WORK = ("duration_ns", "acquire_bytes", "release_bytes", "workspace_bytes")
_SENT = ("bytes", "latency_ns", "occupancy_ns")


def _sums_of(workload: Workload) -> Iterator[tuple[str, Sequence[str], object]]:
    """What has numbers that are sums: where it is, the names of these, and itself."""
    for number, stage in enumerate(workload.stages):
        yield f"stages[{number}]{_named(stage)}", _STATE, stage
    for operation in workload.operations:
        yield f"{operation.id} on stages[{operation.stage}]{_named(workload.stages[operation.stage])}", _WORK, operation
    for dependency in workload.dependencies:
        for hop in dependency.hops:
            yield f"a message from {dependency.source} to {dependency.target}", _SENT, hop


def _named(stage: Stage) -> str:
    """The first and the last block of a stage."""
    ends = dict.fromkeys((stage.blocks[0], stage.blocks[-1])) if stage.blocks else {}
    return f" ({' to '.join(map(repr, ends))})" if ends else ""


def require_totals(profile: Profile, num_microbatches: int, microbatch_size: int, cluster: Cluster | None) -> None:
    """Refuse what cannot be added up in 64 bits: an iteration on one device, all messages over the slowest link.

    Raises:
        UsageError: it comes to more; the text names the profile's file and the sum.
    """

    def iteration(of_row: Callable[[CostRow], int]) -> int:
        """What the blocks come to, each by the row that says most for an iteration."""
        mini_batch, counts = num_microbatches * microbatch_size, Counter(profile.alike.values())
        return sum(
            counts[block.id] * max(of_row(row) * -(-mini_batch // row.microbatch_size) for row in block.costs)
            for block in checked(profile.kinds, 1000)
        )

    sent = sum(edge.bytes_per_sample for edge in profile.edges) * microbatch_size * num_microbatches
    state = sum(each.total for each in states_of(profile).values())
    fixed = sum(edge.transfer_ns or 0 for edge in profile.edges) * num_microbatches
    for level in cluster.levels if cluster is not None else ():
        waits = level.latency_ns * (len(profile.edges) * num_microbatches + len(profile.blocks))
        fixed = max(fixed, waits + 10**9 * (sent + state) // level.bandwidth_bytes_per_s)
    sizes = Counter(edge.bytes_per_sample * microbatch_size for edge in profile.edges)
    for curve in cluster.measured if cluster is not None else ():
        once = sum(count * time_on_curve(curve.points, size) for size, count in sizes.items())
        fixed = max(fixed, once * num_microbatches + len(profile.blocks) * time_on_curve(curve.points, state))
    totals = {
        "forward_ns and backward_ns of all blocks": (
            iteration(lambda row: row.forward_ns + max(row.whole_backward_ns, _split_ns(row))),
            "ns",
        ),
        "activation_bytes, weight_grad_bytes and workspace_bytes of all blocks": (
            iteration(lambda row: row.activation_bytes + row.weight_grad_bytes + row.workspace_bytes),
            "bytes",
        ),
        f"{', '.join(kind.key for kind in STATE_KINDS)} of all blocks": (state, "bytes"),
        "bytes_per_sample of all edges": (sent, "bytes"),
        "times on links of all edges": (fixed, "ns"),
    }
    cut = f"in {num_microbatches} micro-batches of {microbatch_size}"
    for what, (value, unit) in totals.items():
        require_sum(profile.where, f"{what}, {cut},", value, unit, MAX_TOTAL, "choose fewer or smaller micro-batches")


def _split_ns(row: CostRow) -> int:
    return (row.input_grad_ns or 0) + (row.weight_grad_ns or 0)


def _costs_of(
    profile: Profile, stages: Sequence[Stage], given: Mapping[int, StageCost], cluster: Cluster | None
) -> list[StageCost]:
    """[stage] what is given, else as the profile says: it is looked through once for all stages that are alike."""
    found = {number: _at_speed_of(stages[number], cost) for number, cost in given.items()}
    alike = defaultdict[
        tuple[int, int, int, Experts, Zero, float, tuple[str, ...], Exchanging, int], list[tuple[int, Recompute]]
    ](list)
    profiles = dict[int, Profile]()
    for number, stage in enumerate(stages):
        if number in given:
            continue
        if stage.configurations:
            raise UsageError(
                f"stages[{number}] of the placement splits each block in its own way ({stage.configurations[0]}, ...), "
                "and a profile does not say what that costs; plans with these stages come from pipeplan frontier"
            )
        again = stage.again if stage.recompute is True else stage.recompute  # the ends of a model, too, where so said
        samples, exchanging = stage.microbatch_size // stage.replicas, Exchanging.of(stage, cluster)
        how_shared = stage.shards, stage.context, Experts.of(stage), Zero.of(stage), stage.speed, stage.kinds
        own = where_it_stands(profile, stage, cluster)
        profiles[id(own)] = own
        alike[samples, *how_shared, exchanging._replace(cluster=None), id(own)].append((number, again))
    for (samples, shards, context, experts, zero, speed, kinds, exchanging, which), those in alike.items():
        how: dict[str, Any] = {"context": context, "zero": zero, "experts": experts, "speed": speed}
        how["exchanging"] = exchanging._replace(cluster=cluster)
        groups = [(stages[number].blocks, again) for number, again in those]
        costs = _costs_of_groups(on_kinds(profiles[which], kinds), groups, samples, shards, **how)
        found.update(zip((number for number, _ in those), costs, strict=True))
    return [found[number] for number in range(len(stages))]


def _at_speed_of(stage: Stage, cost: StageCost) -> StageCost:
    """What a stage costs whose costs are ``given`` at speed 1."""
    if stage.speed == 1:
        return cost
    split = cost.input_grad_ns is not None and cost.weight_grad_ns is not None
    return replace(
        cost,
        forward_ns=at_speed(cost.forward_ns, stage.speed),
        backward_ns=at_speed(cost.backward_ns, stage.speed),
        input_grad_ns=at_speed(cost.input_grad_ns or 0, stage.speed) if split else None,
        weight_grad_ns=at_speed(cost.weight_grad_ns or 0, stage.speed) if split else None,
    )


def _settled(
    profile: Profile,
    placed: PlacedStage,
    blocks: Mapping[str, Block],
    microbatch_size: int,
    recompute: Recompute,
    speeds: Sequence[float],
) -> Stage:
    """A stage as placed, with what it does not say itself; what it keeps comes later.

    It is as fast as its slowest device, of [device] ``speeds``: the others wait for that one. What is computed again is
    said of each block where those at a model's ends are not.
    """
    said: dict[str, Any] = {name: getattr(placed, name) for name in PlacedStage.model_fields}
    own = {name: value for name, value in said.items() if value is not None}
    own["speed"] = min(map(speeds.__getitem__, placed.devices))
    own["expert_shards"] = profile.expert_shards_on(placed.expert, placed.expert_shards)
    if not placed.configurations:
        own["context_exchange"] = exchange_on(profile, placed.shards, placed.context)
    own = {"microbatch_size": microbatch_size, "recompute": recompute} | own
    again = asked_again([blocks[id_] for id_ in own["blocks"]], own["recompute"])
    return Stage(**own | {"recompute": recompute_of(again)})


def _require_shared_out(stage: Stage, mini_batch: int, num_routes: int) -> None:
    """Replicas share a stage's micro-batches, and these the mini-batch, evenly."""
    size = stage.microbatch_size
    if size % (stage.replicas * (2 if stage.num_parted else 1)):
        parts = " in two parts" if stage.num_parted else ""
        raise UsageError(
            f"a stage with {stage.replicas} replicas cannot split micro-batches of {size} samples{parts} evenly; "
            f"choose a --microbatch-size that is a multiple of {stage.replicas * (2 if stage.num_parted else 1)}"
        )
    if mini_batch % (size * num_routes):
        routes = f" along {num_routes} routes" if num_routes > 1 else ""
        raise UsageError(
            f"a mini-batch of {mini_batch} samples cannot be cut into micro-batches of {size}{routes}; choose a "
            f"--mini-batch that is a multiple of {size * num_routes}"
        )


def _require_one_size(stages: Sequence[Stage], num_routes: int) -> None:
    """Micro-batches take routes in turn, so that only those of one size hold the same samples on all stages."""
    sizes = sorted({stage.microbatch_size for stage in stages})
    if num_routes > 1 and len(sizes) > 1:
        raise UsageError(
            f"a placement with {num_routes} routes needs one micro-batch size for all stages, not {sizes[0]} and "
            f"{sizes[-1]}; leave microbatch_size out of its stages"
        )


def _require_alike(stages: Sequence[Stage]) -> None:
    """Stages of several routes that have the same blocks sum parts of gradients, which must be the same parts."""
    first: dict[str, int] = {}
    for number, stage in enumerate(stages):
        others = {first.setdefault(block, number) for block in stage.blocks}
        unlike = next((other for other in sorted(others) if _divided(stages[other]) != _divided(stage)), None)
        if unlike is not None:
            raise UsageError(
                f"stages[{unlike}] and stages[{number}] have some of the same blocks, on different routes, and their "
                "replicas divide state unlike; give both the same zero, zero_group, expert and expert_shards"
            )


def _divided(stage: Stage) -> tuple[Zero, Experts]:
    """What copies of a stage divide of what they keep, and of experts."""
    return Zero.of(stage), Experts.of(stage)


def _with_parts(
    profile: Profile, stages: Sequence[Stage], operations: Sequence[Operation], cluster: Cluster | None
) -> tuple[Operation, ...]:
    """Forwards that run some micro-batches in two parts say how long one takes."""
    parted = [number for number, stage in enumerate(stages) if stage.num_parted]
    if any(stages[number].configurations for number in parted):
        raise UsageError(
            "a stage that splits each block in its own way cannot run forwards in two parts; leave out its num_parted"
        )
    halves = [
        replace(stages[n], microbatch_size=stages[n].microbatch_size // stages[n].replicas // 2 * stages[n].replicas)
        for n in parted
    ]
    costs = dict(zip(parted, _costs_of(profile, halves, {}, cluster), strict=True))
    return tuple(
        replace(each, part_ns=max(1, costs[each.stage].forward_ns))
        if each.stage in costs and each.role is Role.FORWARD
        else each
        for each in operations
    )


MOST_GROUPS = 4
"""Of blocks of a stage: an action begins when the first of them is gathered, and the last is reduced after it."""


def _block_groups(
    profile: Profile, stage: Stage, operations: Sequence[Operation], cluster: Cluster | None
) -> tuple[BlockGroup, ...]:
    """As equally many blocks in each as can be, with what they exchange and their parts of the stage's operations.

    What an operation takes beside its blocks is at its end: what leaves the stage is made whole there.
    """
    number = min(MOST_GROUPS, len(stage.blocks))
    ends = [len(stage.blocks) * (place + 1) // number for place in range(number)]
    parts = [stage.blocks[begin:end] for begin, end in pairwise([0, *ends])]
    zero, experts, exchanging = Zero.of(stage), Experts.of(stage), Exchanging.of(stage, cluster)
    again, own = stage.again, on_kinds(where_it_stands(profile, stage, cluster), stage.kinds)
    by_id = profile.by_id
    found = list[BlockGroup]()
    for blocks, begin in zip(parts, [0, *ends], strict=False):
        cost = stage_costs(
            own,
            blocks,
            stage.microbatch_size // stage.replicas,
            stage.shards,
            context=stage.context,
            recompute=again[begin : begin + len(blocks)],
            zero=zero,
            exchanging=exchanging,
            experts=experts,
            speed=stage.speed,
        )
        each = [Exchanged.of(by_id[id_], profile.recipe, zero, stage.shards, experts) for id_ in blocks]
        whole = Exchanged(*map(sum, zip(*each, strict=True)))
        gather, reduce = exchanging.times(whole)
        split = any(each.role is Role.WEIGHT_GRAD for each in operations)
        found.append(
            BlockGroup(
                blocks=len(blocks),
                gathered_bytes=whole.gathered,
                reduced_bytes=whole.reduced,
                unshard_ns=gather,
                reduce_ns=reduce,
                forward_ns=cost.forward_ns,
                backward_ns=(cost.input_grad_ns or 0) if split else cost.backward_ns,
                weight_grad_ns=(cost.weight_grad_ns or 0) if split else 0,
            )
        )
    for operation in operations:
        rest = operation.duration_ns - sum(each.time_in(operation.role) for each in found)
        place, key = (-1, "forward_ns") if operation.role is Role.FORWARD else (0, "backward_ns")
        key = "weight_grad_ns" if operation.role is Role.WEIGHT_GRAD else key
        change: dict[str, Any] = {key: getattr(found[place], key) + rest}
        found[place] = replace(found[place], **change)
    return tuple(found)


def _forwards(costs: Sequence[StageCost]) -> tuple[Operation, ...]:
    """Forwards alone, in stage order: what each acquires is given back when the last that waits for it has run."""
    return tuple(
        _operation("F", stage, cost, cost.forward_ns, acquire_bytes=cost.activation_bytes)
        for stage, cost in enumerate(costs)
    )


def _operations(costs: Sequence[StageCost], split_backward: bool, overhead_ns: int) -> tuple[Operation, ...]:
    """Forwards in stage order, then backwards in reverse, so that dependencies point forward.

    What W needs beyond what F held is taken when I starts, since I makes it while it runs.
    """
    backwards: list[Operation] = []
    for stage, cost in reversed(list(enumerate(costs))):
        held, deferred = cost.activation_bytes, cost.weight_grad_bytes
        if split_backward and cost.input_grad_ns is not None and cost.weight_grad_ns is not None:
            more, less = max(0, deferred - held), max(0, held - deferred)
            times = cost.input_grad_ns + overhead_ns, cost.weight_grad_ns + overhead_ns
            backwards.append(_operation("I", stage, cost, times[0], acquire_bytes=more, release_bytes=less))
            backwards.append(_operation("W", stage, cost, times[1], release_bytes=deferred))
        else:
            backwards.append(_operation("B", stage, cost, cost.backward_ns, release_bytes=held))
    return (*_forwards(costs), *backwards)


def _operation(
    kind: str, stage: int, cost: StageCost, time_ns: int, *, acquire_bytes: int = 0, release_bytes: int = 0
) -> Operation:
    return Operation(
        kind=kind,
        stage=stage,
        duration_ns=max(1, time_ns),
        acquire_bytes=acquire_bytes,
        release_bytes=release_bytes,
        workspace_bytes=cost.workspace_bytes,
    )
