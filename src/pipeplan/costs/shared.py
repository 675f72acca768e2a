"""What stages keep of shared parameters, and how long their gradients are summed: inside stages and between them.

On a device sums run one after another, as the executor runs them. Of a tied parameter that stages share, devices with
equal parts sum these; where some stages split it otherwise than others, all sum the whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

from pipeplan.costs.blocks import block_costs, held_part, places_divided
from pipeplan.costs.communication import Exchange, Same, all_reduce_time, price_of_groups, time_of_groups
from pipeplan.costs.experts import ExpertState, exchanged_apart, kept_of
from pipeplan.costs.kinds import on_kinds
from pipeplan.costs.recipes import expert_state_of, state_of, states_of, whole_state_of
from pipeplan.costs.zero import WHOLE, Experts, Zero, cuts, price_of_exchange, state_groups, updated_bytes
from pipeplan.files import Block, Cluster, CostRow, Profile, Recipe, TiedParameter
from pipeplan.time_limit import checked
from pipeplan.workload.elements import Again, Stage, TiedState
from pipeplan.workload.kinds import GRADIENTS, STATE_KINDS, MemoryBytes, MemoryKind
from pipeplan.workload.mesh import EXPERTS, PLACES, SAMPLES, SHARDS, HeldPart, Mesh

if TYPE_CHECKING:
    from pipeplan.costs.resharding import Resharding

Parts = tuple[HeldPart, ...]
"""What each device of a replica has of a parameter."""


@dataclass(slots=True)
class SharedState:
    """What stages of a profile keep of parameters that blocks share, and what summing their gradients takes."""

    profile: Profile
    blocks: Mapping[str, Block] = field(init=False)
    kept: Mapping[str, MemoryBytes] = field(init=False)
    kept_tied: Mapping[str, MemoryBytes] = field(init=False)
    _rows: dict[tuple[object, ...], CostRow] = field(init=False, default_factory=dict)
    _shares: dict[tuple[object, ...], MemoryBytes] = field(init=False, default_factory=dict)
    _wholes: dict[tuple[object, ...], int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        recipe = self.profile.recipe
        self.blocks = self.profile.by_id
        self.kept = states_of(self.profile)
        self.kept_tied = {each.name: state_of(each, recipe) for each in self.profile.tied}

    def row(self, id_: str, samples: int, stage: Stage, again: Again) -> CostRow:
        """What a block of a stage costs, but for its inputs' part, worked out once for all blocks that are alike."""
        profile = on_kinds(self.profile, stage.kinds)
        split = stage.shards, stage.context, stage.expert, stage.expert_shards
        key = profile.alike[id_], samples, *split, again, stage.speed, stage.kinds
        if key not in self._rows:
            how: dict[str, Any] = {"context": stage.context, "recompute": again, "speed": stage.speed}
            how |= {"expert": stage.expert, "expert_shards": stage.expert_shards}
            self._rows[key] = block_costs(profile.by_id[id_], samples, stage.shards, **how)
        return self._rows[key]

    def kept_on(self, id_: str, shards: int, zero: Zero, experts: Experts) -> MemoryBytes:
        """What a device keeps of a block, worked out once for all blocks that are alike."""
        key = self.profile.alike[id_], shards, zero, experts
        if key not in self._shares:
            self._shares[key] = kept_of(self.blocks[id_], self.profile.recipe, shards, zero, experts)
        return self._shares[key]

    def whole_gradients(self, stage: Stage) -> list[int]:
        """[block] bytes of gradients that each shard has whole, and makes a part of, as :data:`WHOLE_GRADIENTS`.

        Shards that do not divide sequences each make all of them. Of blocks with configurations they are among what is
        summed inside of replicas.
        """
        if stage.shards == 1 or stage.configurations:
            return [0] * len(stage.blocks)
        zero, recipe = Zero.of(stage), self.profile.recipe

        def of_block(id_: str) -> int:
            key = self.profile.alike[id_], stage.shards, zero
            if key not in self._wholes:
                block = self.blocks[id_]
                makes_part = block.whole_parameters and places_divided(block, stage.shards) > 1
                size = whole_state_of(block, recipe)[GRADIENTS] if makes_part else 0
                self._wholes[key] = -(-size // cuts(recipe, zero)[GRADIENTS])
            return self._wholes[key]

        return [of_block(id_) for id_ in stage.blocks]

    def with_whole(self, stage: Stage) -> Stage:
        """A stage that says of how many of its gradients each shard makes a part."""
        whole = sum(self.whole_gradients(stage))
        return replace(stage, whole_gradient_bytes=min(whole, stage.state[GRADIENTS])) if whole else stage

    def of_configured(self, stage: Stage) -> MemoryBytes:
        """What a device keeps of a stage whose blocks have configurations: tied parts once for each way to split."""
        state = MemoryBytes()
        for index in range(len(stage.blocks)):
            kept, apart = self._over(stage, index), self._apart(stage, index)
            if apart.total:
                kept -= apart
                state += apart.share(self._cut(stage, stage.mesh_of(index).size_of(EXPERTS)))
            state += kept.share(self._cut(stage, self._parts(stage, index)[0].num_parts))
        for tied in self.profile.tied:
            ways = self.ways(stage, tied.blocks)
            for parts, users in ways.items():
                state -= self.kept_tied[tied.name] // self._cut(stage, parts[0].num_parts) * (len(users) - 1)
        return state

    def _over(self, stage: Stage, index: int) -> MemoryBytes:
        """What the devices of a replica keep together of a block with a configuration, for each of its parts."""
        block = self.blocks[stage.blocks[index]]
        again = whole_state_of(block, self.profile.recipe) * (stage.mesh_of(index).size_of(SHARDS) - 1)
        return self.kept[block.id] + again

    def _apart(self, stage: Stage, index: int) -> MemoryBytes:
        """What they keep together of the experts of a block with a configuration that shares these; else nothing."""
        if stage.mesh_of(index).size_of(EXPERTS) == 1:
            return MemoryBytes()
        return expert_state_of(self.blocks[stage.blocks[index]], self.profile.recipe)

    def _cut(self, stage: Stage, parts: int) -> Mapping[MemoryKind, int]:
        """Into how many parts a stage cuts what it keeps of blocks of which each device has one of ``parts``."""
        return cuts(self.profile.recipe, Zero.of(stage), parts)

    def ways(self, stage: Stage, blocks: Collection[str]) -> dict[Parts, list[int]]:
        """The ways in which a stage splits a parameter of some blocks, and by place the blocks that do."""
        found: dict[Parts, list[int]] = defaultdict(list)
        for index, block in enumerate(stage.blocks):
            if block in blocks:
                found[self._parts(stage, index)].append(index)
        return found

    def _parts(self, stage: Stage, index: int) -> Parts:
        mesh, block = stage.mesh_of(index), self.blocks[stage.blocks[index]]
        return tuple(held_part(block, mesh, place) for place in range(stage.shards))

    def tied(self, stages: Sequence[Stage]) -> list[TiedState]:
        """What stages share, without the times of sums; of no bytes it is not known."""
        return [
            entry
            for each in self.profile.tied
            if self.kept_tied[each.name].total
            for entry in self._entries(each, stages)
        ]

    def _entries(self, tied: TiedParameter, stages: Sequence[Stage]) -> Iterator[TiedState]:
        """One for each part, and one for the sum of the whole where the parts are unlike; none of one stage alone."""
        holders: dict[HeldPart, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
        users = [n for n, stage in enumerate(stages) if not set(tied.blocks).isdisjoint(stage.blocks)]
        for number in users if len(users) > 1 else ():
            stage = stages[number]
            for parts in self.ways(stage, tied.blocks):
                places: dict[HeldPart, list[int]] = defaultdict(list)
                for index, device in enumerate(stage.devices):
                    places[parts[index % stage.shards]].append(device)
                for part, own in places.items():
                    holders[part].append((number, tuple(own)))
        for part, those in holders.items():
            numbers, devices = zip(*those, strict=True)
            cut = [self._cut(stages[number], part.num_parts) for number in numbers]
            kept = self.kept_tied[tied.name] // cut[0]
            alike = {kind.key: kept[kind] for kind in STATE_KINDS if len({each[kind] for each in cut}) == 1}
            yield TiedState(name=tied.name, stages=numbers, devices=devices, parts=part.num_parts, **alike)
        if len({part.kind for part in holders}) > 1:
            yield TiedState(name=tied.name, stages=tuple(users), devices=tuple(stages[n].devices for n in users))

    def inner_sums_ns(self, stage: Stage, apart: Collection[str], cluster: Cluster | None) -> int:
        """Ns in which devices of a replica with configurations sum gradients, but for tied parameters that are apart.

        What its blocks alone share is summed with the first one's where all split it alike, else whole (TensorOpt
        section 4.2: along all that parameters do not have). What each shard has whole is summed over shards, too.
        """
        if cluster is None:
            return 0
        before = [0] * len(stage.blocks)
        cuts = [self._parts(stage, index)[0].num_parts for index in range(len(stage.blocks))]
        apart_of = [self._apart(stage, index)[GRADIENTS] for index in range(len(cuts))]
        sizes = [-(-(self._over(stage, n)[GRADIENTS] - apart_of[n]) // cut) for n, cut in enumerate(cuts)]

        def spent(index: int) -> int:
            size, mesh = sizes[index] - before[index] // cuts[index], stage.mesh_of(index)
            return _summed_ns(cluster, stage.shards, mesh, size, -(-apart_of[index] // mesh.size_of(EXPERTS)))

        for tied in self.profile.tied:
            if tied.name in apart:
                for index, block in enumerate(stage.blocks):
                    before[index] += self.kept_tied[tied.name][GRADIENTS] * (block in tied.blocks)
        total = sum(spent(index) + self._whole_ns(stage, index, cluster) for index in range(len(stage.blocks)))
        for names, users, size in self._tables(stage.blocks):
            if not names.isdisjoint(apart):
                continue
            times = []
            for index in users:
                with_it = spent(index)
                before[index] += size
                times.append(with_it - spent(index))
            alike = len({self._parts(stage, index) for index in users}) == 1
            whole = sum_time(cluster, stage.shards, Mesh(((SAMPLES, stage.shards),)), size)
            total -= sum(times) - (min(times[0], whole) if alike else whole)
        return total

    def _whole_ns(self, stage: Stage, index: int, cluster: Cluster) -> int:
        """Ns in which shards of a block with a configuration sum what each has whole and makes a part of."""
        block, mesh = self.blocks[stage.blocks[index]], stage.mesh_of(index)
        shards = mesh.size_of(SHARDS)
        if shards == 1 or places_divided(block, shards) == 1:
            return 0
        size = whole_state_of(block, self.profile.recipe)[GRADIENTS]
        return sum_time(cluster, stage.shards, mesh, size, along=(SHARDS,))

    def _tables(self, blocks: Sequence[str]) -> list[tuple[set[str], list[int], int]]:
        """What some blocks of a stage share, the most first: names, the places of the blocks, and bytes of gradients.

        What the same blocks share is one.
        """
        found: dict[tuple[str, ...], list[TiedParameter]] = defaultdict(list)
        for each in sorted(self.profile.tied, key=lambda tied: -self.kept_tied[tied.name].total):
            if self.kept_tied[each.name].total:
                found[each.blocks].append(each)
        tables = []
        for users, those in found.items():
            places = [blocks.index(block) for block in users if block in blocks]
            if len(places) > 1:
                size = sum(self.kept_tied[each.name][GRADIENTS] for each in those)
                tables.append(({each.name for each in those}, places, size))
        return tables


def _summed_ns(cluster: Cluster, devices: int, mesh: Mesh, size: int, experts: int) -> int:
    """Ns to sum what devices of a mesh have of gradients: of ``size`` bytes with all, of ``experts`` but with some.

    Those that share experts have other ones each.
    """
    axes: list[tuple[int, Collection[str]]] = [(size + experts, (SAMPLES, PLACES)), (size, (EXPERTS,))]
    return sum(sum_time(cluster, devices, mesh, each, along=along) for each, along in axes)


def sum_time(
    cluster: Cluster | None, devices: int, mesh: Mesh, size: int, *, along: Collection[str] = (SAMPLES, PLACES)
) -> int:
    """Ns in which devices of a mesh, the first of a cluster, sum ``size`` bytes each over samples and places.

    Or ``along`` other axes; along each in the cheapest way from a sum to a whole tensor.
    """
    axes = [axis for name, axis in mesh.named if name in along and axis.size > 1]
    if cluster is None or not size or not axes:
        return 0
    from pipeplan.costs.layouts import MeshSplit
    from pipeplan.costs.resharding import sum_ns

    moves = _moves(Same(cluster), devices)
    return round(sum(sum_ns(size, MeshSplit(axis.size, axis.stride), moves) for axis in axes))


@lru_cache(maxsize=16)
def _moves(same: Same[Cluster], devices: int) -> Resharding:
    from pipeplan.costs.resharding import Resharding

    return Resharding(same.thing, devices)


def with_syncs(
    stages: Sequence[Stage],
    tied: Sequence[TiedState],
    recipe: Recipe,
    cluster: Cluster | None,
    experts: Sequence[ExpertState | None] | None = None,
) -> tuple[list[Stage], list[TiedState]]:
    """Stages and what they share with the times of summing their gradients over a cluster's links.

    Of stages whose replicas divide what they keep, by a ``recipe``, also of gathering what a step has changed. Sums
    inside a replica, of blocks with configurations, are not among them. Buckets that stages have get their times.
    ``experts`` [stage] are what stages keep of experts that devices share, whose gradients others sum.
    """
    apart = [0] * len(stages)
    for each in tied:
        for number, devices in zip(each.stages, each.devices, strict=True):
            apart[number] += each.state[GRADIENTS] * (stages[number].devices[0] in devices)
    stages_with: dict[str, list[int]] = defaultdict(list)
    for number, stage in enumerate(stages):
        for block in stage.blocks:
            stages_with[block].append(number)
    sharing = ({other for block in stage.blocks for other in stages_with[block]} for stage in stages)
    sums = cache(partial(_price_of_sums, cluster))
    return (
        [
            replace(
                stage,
                **_exchanges(stage, [stages[n] for n in others], less, recipe, cluster, own, sums),
            )
            for stage, others, less, own in checked(
                zip(stages, sharing, apart, experts or [None] * len(stages), strict=True), 64
            )
        ],
        [replace(each, sync_ns=_tied_sync(each, tied, stages, cluster)) for each in tied],
    )


def _exchanges(
    stage: Stage,
    sharing: Sequence[Stage],
    less: int,
    recipe: Recipe,
    cluster: Cluster | None,
    experts: ExpertState | None,
    sums: Callable[[tuple[int, ...], int], Callable[[int], int]],
) -> dict[str, Any]:
    """Ns to sum gradients of a stage over its replicas, and over the other routes' stages with some of its blocks.

    Each shard sums its part, but for bytes that are summed elsewhere, with the shards that hold the same, what it has
    whole with all; and each device that shares experts its own with the devices that have the same.
    """
    others, (side, sides) = (stage, (stage, [])) if experts is None else exchanged_apart(stage, sharing, experts)
    in_buckets = experts.buckets if experts else (0,) * len(stage.buckets)

    rest = _exchange(others, sharing, recipe, cluster, sums)
    apart = None if experts is None else _exchange(side, sides, recipe, cluster, sums)

    def both(size: int, whole: int, of_experts: int) -> tuple[int, int]:
        all_else = rest(size - of_experts, min(whole, size - of_experts))  # what is whole may be summed elsewhere
        own = apart(of_experts, 0) if apart is not None and of_experts else (0, 0)
        return all_else[0] + own[0], all_else[1] + own[1]

    size = stage.state[GRADIENTS] - less
    sync_ns, gather_ns = both(size, stage.whole_gradient_bytes, experts.state[GRADIENTS] if experts else 0)
    buckets = tuple(
        replace(each, sync_ns=both(each.bytes, each.whole_bytes, own)[0])
        for each, own in zip(stage.buckets, in_buckets, strict=True)
        if sync_ns
    )
    return {"sync_ns": sync_ns, "gather_ns": gather_ns, "buckets": buckets}


def _exchange(
    stage: Stage,
    sharing: Sequence[Stage],
    recipe: Recipe,
    cluster: Cluster | None,
    sums: Callable[[tuple[int, ...], int], Callable[[int], int]],
) -> Callable[[int, int], tuple[int, int]]:
    """Ns to sum so many bytes of gradients, of which some over shards, too, and to gather what a step has changed.

    ``sums`` are those of holders and shards, as :func:`_price_of_sums`.
    """
    if Zero.of(stage) != WHOLE:
        updated, price = updated_bytes(stage, recipe), price_of_exchange(cluster, stage, sharing)
        return lambda size, whole: price(size, whole, updated)
    holders = tuple(sorted({device for other in (stage, *sharing) for device in other.devices}))
    sum_ns = sums(holders, stage.shards)
    return lambda size, whole: (sum_ns(size - whole) + (sums(holders, 1)(whole) if whole else 0), 0)


def _price_of_sums(cluster: Cluster | None, holders: tuple[int, ...], shards: int) -> Callable[[int], int]:
    """Ns to sum so many bytes over holders, each shard with those that have the same."""
    price = price_of_groups(cluster, [holders[shard::shards] for shard in range(shards)])
    return cache(lambda size: round(price(Exchange("all_reduce", size))))


def _tied_sync(entry: TiedState, tied: Iterable[TiedState], stages: Sequence[Stage], cluster: Cluster | None) -> int:
    """Ns to sum a part over all devices that have it; where parts are unlike, the whole over all, and nothing else.

    Where replicas of all its stages divide it alike, groups of them reduce and scatter it, and those with the same rows
    sum these. From level 2 on nothing is tied.
    """
    family = [each for each in tied if each.name == entry.name]
    if entry.is_sum != any(each.is_sum for each in family):
        return 0
    if entry.is_sum:
        return all_reduce_time(
            cluster, sorted(entry.all_devices), max(each.state[GRADIENTS] * each.parts for each in family)
        )
    size, zero = entry.state[GRADIENTS], _divided_alike(entry, stages)
    if zero == WHOLE:
        return all_reduce_time(cluster, sorted(entry.all_devices), size)
    groups = [
        group
        for number, devices in zip(entry.stages, entry.devices, strict=True)
        for group in state_groups(devices, len(devices) // stages[number].copies, zero.group)  # shards that have it
    ]
    rows = [sorted(place) for place in zip(*groups, strict=True)]
    scattered = round(time_of_groups(cluster, Exchange("reduce_scatter", size), groups))
    return scattered + round(time_of_groups(cluster, Exchange("all_reduce", -(-size // zero.group)), rows))


def _divided_alike(entry: TiedState, stages: Sequence[Stage]) -> Zero:
    """How all that have a part divide it; not at all where stages do otherwise, or a device is of two of them."""
    ways = {WHOLE if (stage := stages[number]).configurations else Zero.of(stage) for number in entry.stages}
    return ways.pop() if len(ways) == 1 and len(entry.all_devices) == sum(map(len, entry.devices)) else WHOLE
