"""Placement strategies: which device runs which stage of a chain, or of several submodules, and where it is cut.

A graph that is not a chain is put in a line first: in topological order, keeping the file's order where it can.
Submodules, such as a tower for images and one for texts, have devices and a strategy of their own each (FlexPipe,
section 4.1: one configuration per modality; DistMM, NSDI'24). What comes after all of them, such as the loss, stands
where the last of their stages do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs import StageCost, TiedShare, group_costs
from pipeplan.costs.blocks import splitting_remedy
from pipeplan.costs.zero import WHOLE, Experts, Zero
from pipeplan.errors import InfeasibleError, UsageError, choose_from
from pipeplan.files import PlacedStage, Placement, Profile
from pipeplan.graphs import before_and_after, connected_parts, topological_order
from pipeplan.partition.chain.costs import Array, Chain
from pipeplan.partition.chain.rebalance import Allowed, evenest, least_short, levelled
from pipeplan.partition.problem import Pricing
from pipeplan.partition.strategies import STRATEGIES, Positions
from pipeplan.units import format_bytes, rounded_up
from pipeplan.workload.elements import Again, ContextExchange

Cut = Callable[[Chain], tuple[int, ...]]
"""Chooses the first block of each stage."""


def place(
    profile: Profile,
    strategy: str,
    num_devices: int,
    *,
    chunks: int | None = None,
    microbatch_size: int,
    memory_bytes: Sequence[int | None] | None = None,
    recompute: Again = False,
    replicas: int = 1,
    context: int = 1,
    exchange: ContextExchange | None = None,
    expert: int = 1,
    expert_shards: int = 1,
    zero: Zero = WHOLE,
    spread: bool = False,
    wide: Sequence[tuple[int, ...]] = (),
    cut: Cut | None = None,
    speeds: Sequence[float] | None = None,
) -> Placement:
    """Cut the profile's chain into balanced stages and put them on devices.

    With one stage per device the cut minimises the longest stage's forward + backward time, then the sum of squares,
    exactly. Where a device runs ``chunks`` stages (2 by default) it starts from that cut and levels the devices' sums
    (:mod:`pipeplan.partition.chain.rebalance`). ``memory_bytes`` [device] holds for one micro-batch in flight; None is
    no limit.

    ``replicas`` neighbouring devices run each stage and share the ``microbatch_size`` samples of its micro-batches;
    they divide what they keep by ``zero``. With ``spread`` every shared block is a stage of its own on each route,
    split over all devices of a pipeline, which are then neighbours (Tessel's M and NN shapes). ``wide`` are groups of
    equally many devices, each of which stands for one device: in ``context`` parts, each of which has one part of every
    sequence, it splits every block (tensor parallelism); the devices of none are left idle. Of a stage's devices each
    ``expert`` share experts, of which ``expert_shards`` split each; parts of sequences ``exchange`` keys and values so,
    by default as the profile has it. ``cut`` cuts the chain otherwise. Of [device]
    ``speeds``, by default all 1, a stage has the lowest of its devices.

    Raises:
        UsageError: an unknown strategy, devices, chunks or replicas that do not apply, or fewer blocks than stages.
        InfeasibleError: some device cannot hold what it must.
    """
    units = wide or [(device,) for device in range(num_devices)]
    routes = _routes(strategy, len(units), chunks, replicas)
    positions, shards = len(units) // replicas, len(units[0]) // context
    shared = _spread(profile, positions) if spread else ()
    order = [block for block in profile.topological_order() if block not in shared]
    _require_blocks(profile, strategy, len(units), replicas, order, routes)
    experts = Experts.among(expert, shards, replicas * context, zero.level, zero.group, split=expert_shards)
    pricing = Pricing(microbatch_size // replicas, recompute, shards, zero, context, experts, exchange=exchange)
    costs = pricing.costs(profile, order)
    everywhere = pricing._replace(shards=positions).costs(profile, shared * len(routes))
    groups = _groups(positions, replicas, units, strided=bool(shared))
    limits = _limits(memory_bytes or [None] * num_devices, groups, everywhere)
    slowest = [min((speeds or [1.0] * num_devices)[device] for device in group) for group in groups]
    each = [None if limit is None else limit // len(routes) for limit in limits]
    chain = Chain.of(costs, routes[0], each, slowest if set(slowest) != {1.0} else ())
    allowed = _not_around(profile, order, shared)
    begins = _cut(chain, allowed) if cut is None else cut(chain)
    if not allowed(np.array(begins), np.array([*begins[1:], chain.num_blocks])).all():
        raise UsageError(
            f"{len(routes[0])} stages between the shared blocks of {profile.name!r} were not found; leave out "
            "--shard-shared"
        )
    missing = chain.missing(begins)
    if any(missing) and any(_missing(chain, begins, routes, limits)):
        raise _too_big(chain, begins, order, missing.index(max(missing)), len(routes), _held_by(everywhere))
    stages = [
        PlacedStage(
            blocks=tuple(order[begin:end]),
            devices=groups[position],
            shards=shards,
            replicas=replicas,
            context=context,
            context_exchange=exchange,
            expert=expert,
            expert_shards=expert_shards if expert > 1 else None,
            route=route,
            **zero.keys(replicas * context),
        )
        for route, positions in enumerate(routes)
        for (begin, end), position in zip(chain.ranges(begins), positions, strict=True)
    ]
    everyone = tuple(range(num_devices))
    stages += [
        PlacedStage(
            blocks=(block,),
            devices=everyone,
            shards=positions,
            replicas=replicas,
            route=route,
            **zero.keys(replicas),
        )
        for route in range(len(routes))
        for block in shared
    ]
    return Placement(
        strategy=strategy if not shared else f"{strategy}, shared blocks spread",
        num_devices=num_devices,
        num_routes=len(routes),
        stages=tuple(in_topological_order(profile, stages)) if shared else tuple(stages),
    )


def follows(profile: Profile, stages: Sequence[PlacedStage], strategy: str, chunks: int | None = None) -> bool:
    """Whether stages stand as a strategy has them, wherever they are cut and in whatever order devices are numbered.

    Stages on all the devices are not counted. ``chunks`` None is any number that the strategy is for. Two ways may be
    two routes, or two models side by side.
    """
    count = len({device for stage in stages for device in stage.devices})
    own = [stage for stage in stages if len(stage.devices) < count] or list(stages)
    groups = list(dict.fromkeys(stage.devices for stage in own))
    if not groups or len({device for group in groups for device in group}) < sum(map(len, groups)):
        return False
    wanted = STRATEGIES[strategy]
    if len(groups) == len(own):  # whatever graph they are
        return not wanted.chunked and not wanted.two_ways
    chains: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    parts = _connected(profile)
    for stage in own:
        chains.setdefault((stage.route, parts[stage.blocks[0]]), []).append(stage.devices)
    routes = list(chains.values())
    number = len(routes[0]) // len(groups)
    if number < 1 + (wanted.chunked and chunks is None) or chunks not in (None, number):
        return False
    return routes == [[groups[position] for position in route] for route in wanted.routes(len(groups), number)]


def _connected(profile: Profile) -> dict[str, int]:
    """{block: number of the connected part of the model that it belongs to}"""
    edges = ((edge.source, edge.target) for edge in profile.edges)
    parts = connected_parts([block.id for block in profile.blocks], edges)
    return {block: number for number, part in enumerate(parts) for block in part}


def can_spread(profile: Profile, shards: int) -> bool:
    """Whether there are shared blocks, and all have costs for being split over ``shards`` devices."""
    shared = [block for block in profile.blocks if block.shared]
    return shards > 1 and bool(shared) and all(shards in {row.shards for row in block.rows()} for block in shared)


def _groups(positions: int, replicas: int, units: Sequence[tuple[int, ...]], *, strided: bool) -> list[tuple[int, ...]]:
    """[position] its devices: those of neighbouring units, or, ``strided``, of one in each copy of the pipeline."""
    if strided:
        own = [range(position, positions * replicas, positions) for position in range(positions)]
    else:
        own = [range(position * replicas, (position + 1) * replicas) for position in range(positions)]
    return [tuple(device for unit in each for device in units[unit]) for each in own]


def undivided(num_devices: int, replicas: int) -> UsageError:
    """The error for replicas that cannot have equally many of the devices."""
    able = ", ".join(str(count) for count in range(1, num_devices + 1) if num_devices % count == 0)
    return UsageError(f"{num_devices} devices cannot be shared by {replicas} replicas; choose --replicas of {able}")


def not_chunked(strategy: str, chunks: int | None) -> UsageError:
    """The error of so many stages per device where a strategy has one on each route."""
    chunked = ", ".join(name for name, other in STRATEGIES.items() if other.chunked)
    return UsageError(f"--chunks {chunks} does not apply to {strategy}; choose a --placement of {chunked}")


def _routes(strategy: str, num_devices: int, chunks: int | None, replicas: int) -> Positions:
    if strategy not in STRATEGIES:
        meant = choose_from(strategy, ("auto", *STRATEGIES))
        raise UsageError(f"--placement {strategy!r} is not known; {meant}")
    if num_devices < 1:
        raise UsageError(f"{num_devices} devices cannot hold a pipeline; --devices must be at least 1")
    if num_devices % replicas:
        raise undivided(num_devices, replicas)
    if not STRATEGIES[strategy].chunked and chunks not in (None, 1):
        raise not_chunked(strategy, chunks)
    if chunks is not None and chunks < 1:
        raise UsageError(f"--chunks must be at least 1, not {chunks}")
    return STRATEGIES[strategy].routes(num_devices // replicas, 2 if chunks is None else chunks)


def _spread(profile: Profile, positions: int) -> tuple[str, ...]:
    """The shared blocks. Raises UsageError where they cannot be split over a pipeline's devices."""
    if not can_spread(profile, positions):
        ways = ("leave out --shard-shared", splitting_remedy(profile, [positions]))
        raise UsageError(
            f"profile {profile.name!r} has no shared blocks with costs for {positions} shards; "
            + ", or ".join(filter(None, ways))
        )
    shared = {block.id for block in profile.blocks if block.shared}
    return tuple(block for block in profile.topological_order() if block in shared)


def _require_blocks(
    profile: Profile, strategy: str, num_devices: int, replicas: int, order: Sequence[str], routes: Positions
) -> None:
    count = len(routes[0])
    if len(order) < count:
        copies = f" with {replicas} replicas" if replicas > 1 else ""
        positions = num_devices // replicas
        remedies = [
            f"{flag} to {most}"
            for flag, most in (
                ("--devices", len(order) // (count // positions) * replicas),
                ("--chunks", len(order) // positions if count > positions else 0),
            )
            if most
        ]
        raise UsageError(
            f"{strategy} on {num_devices} devices{copies} needs {count} stages, but profile {profile.name!r} has only "
            f"{len(order)} blocks; lower {' or '.join(remedies)}"
        )


def _limits(
    memory: Sequence[int | None], groups: Sequence[Sequence[int]], everywhere: Sequence[StageCost]
) -> list[int | None]:
    """[position] what its devices all have beside the blocks that stand everywhere."""
    taken = _held_by(everywhere)
    known = [[limit for device in group if (limit := memory[device]) is not None] for group in groups]
    return [max(0, min(limits) - taken) if limits else None for limits in known]


def _held_by(everywhere: Sequence[StageCost]) -> int:
    """Bytes that blocks on all devices take on each of them."""
    together = reduce(add, everywhere, StageCost(0, 0))
    return together.static_bytes + together.activation_bytes


def _missing(chain: Chain, begins: Sequence[int], routes: Positions, limits: Sequence[int | None]) -> list[int]:
    """[position] bytes by which it is too small for its stages of all routes, of which each may take more than half.

    What stages of several routes share is there once.
    """
    needed, tied = [0] * len(limits), [frozenset[TiedShare]() for _ in limits]
    for positions in routes:
        for position in set(positions):
            ranges = [each for each, where in zip(chain.ranges(begins), positions, strict=True) if where == position]
            held = chain.held(ranges)
            needed[position] += held.peak + held.statics - sum(each.state.total for each in tied[position] & held.tied)
            tied[position] |= held.tied
    return [0 if limit is None else max(0, need - limit) for need, limit in zip(needed, limits, strict=True)]


def _not_around(profile: Profile, order: Sequence[str], shared: Sequence[str]) -> Allowed:
    """(begins, ends) -> whether a stage of these blocks has none before and after a shared block: it could not run."""
    edges = [(edge.source, edge.target) for edge in profile.edges]
    place_of = {block: index for index, block in enumerate(order)}
    around = [
        [
            np.array(sorted(place_of[other] for other in some if other in place_of), dtype=np.int64)
            for some in before_and_after(block, edges)
        ]
        for block in shared
    ]

    def contains(places: Array, begins: Array, ends: Array) -> NDArray[np.bool_]:
        return np.searchsorted(places, begins) < np.searchsorted(places, ends)

    def allowed(begins: Array, ends: Array) -> NDArray[np.bool_]:
        fine = np.ones(begins.shape, dtype=bool)
        for before, after in around:
            fine &= ~(contains(before, begins, ends) & contains(after, begins, ends))
        return fine

    return allowed


def in_topological_order(profile: Profile, stages: Sequence[PlacedStage]) -> list[PlacedStage]:
    """The stages such that every edge points forward."""
    stage_of = {(stage.route, block): index for index, stage in enumerate(stages) for block in stage.blocks}
    first = {block: index for index, block in enumerate(profile.topological_order())}
    routes = {stage.route for stage in stages}
    crossing = (
        (stage_of[route, edge.source], stage_of[route, edge.target]) for edge in profile.edges for route in routes
    )
    order = topological_order(
        range(len(stages)),
        [(source, target) for source, target in crossing if source != target],
        key=lambda stage: (stages[stage].route, first[stages[stage].blocks[0]]),
    )
    return [stages[index] for index in order]


def _cut(chain: Chain, allowed: Allowed) -> tuple[int, ...]:
    """The best cut, or one that comes near to fitting where none is found that fits."""
    crowded = chain.num_stages > len(chain.memory)
    begins = None if chain.hopeless else evenest(chain, allowed)
    if begins is not None and crowded:
        begins = levelled(chain, begins)
    if begins is None or any(chain.missing(begins)):
        begins = least_short(chain)
        if crowded and not any(chain.missing(begins)):
            begins = levelled(chain, begins)
    return begins


def _too_big(
    chain: Chain, begins: Sequence[int], order: Sequence[str], device: int, num_routes: int, beside: int
) -> InfeasibleError:
    """The error for the device that lacks most; ``beside`` is what blocks on all devices take."""
    stages = [stage for stage, where in enumerate(chain.devices) if where == device]
    held = [
        f"stage {stage} ({order[begin]}{f' .. {order[end - 1]}' if end - begin > 1 else ''})"
        for stage, (begin, end) in enumerate(chain.ranges(begins))
        if stage in stages
    ]
    limit, needed = chain.memory[device] or 0, chain.bytes_of(chain.ranges_on(device, begins))
    enough = rounded_up(beside + needed * num_routes)
    return InfeasibleError(
        f"no cut into {chain.num_stages} stages was found that fits; in the one that comes nearest, device {device} "
        f"has {format_bytes(limit)}{f' for each of {num_routes} routes' if num_routes > 1 else ''} and needs "
        f"{format_bytes(needed)} for {', '.join(held)}: "
        f"{format_bytes(needed - limit)} too much, with parameters, gradients, optimizer state, workspace and the "
        f"activations of a single micro-batch; raise --memory to {format_bytes(enough)}",
        enough,
    )


@dataclass(frozen=True, slots=True)
class Submodule:
    """The blocks whose names match ``blocks`` (a pattern such as ``image.*``), placed by a strategy of their own.

    ``positions`` are the first of its positions, and the one after the last; None is as many as its work asks for.
    ``microbatch_size`` are the samples of each of its micro-batches, over all replicas; None is the plan's.
    """

    blocks: str
    strategy: str = "one-to-one"
    chunks: int | None = None
    positions: tuple[int, int] | None = None
    microbatch_size: int | None = None


def place_submodules(
    profile: Profile,
    submodules: Sequence[Submodule],
    num_devices: int,
    *,
    microbatch_size: int,
    memory_bytes: Sequence[int | None] | None = None,
    recompute: Again = False,
    replicas: int = 1,
    zero: Zero = WHOLE,
    cut: Cut | None = None,
    speeds: Sequence[float] | None = None,
) -> Placement:
    """Place every submodule as :func:`~pipeplan.partition.placement.place` does a chain, on its own devices.

    A *position* is a device, or ``replicas`` neighbouring ones that share every micro-batch. Blocks of no submodule
    come after all of them, as one stage split over the positions that feed it if the profile has costs for that (and
    there are no replicas), else on the last of them alone; their micro-batches have the plan's ``microbatch_size``, and
    wait for those of every submodule that have their samples. ``cut`` cuts each chain otherwise; ``speeds`` [device].

    Raises:
        UsageError: a pattern matches no block or one that another has, devices that are not there or not enough, a
            strategy with two routes, a block of no submodule before one of theirs, or a size that replicas cannot
            share.
        InfeasibleError: some device cannot hold what it must.
    """
    if num_devices % replicas:
        raise undivided(num_devices, replicas)
    for submodule in submodules:
        if (submodule.microbatch_size or microbatch_size) % replicas:
            raise UsageError(
                f"submodule {submodule.blocks!r}: micro-batches of {submodule.microbatch_size} samples cannot be "
                f"shared by {replicas} replicas; choose a microbatch_size of a multiple, or other --replicas"
            )
    parts = _parts(profile, submodules)
    rest = _rest(profile, parts)
    ranges = _ranges(profile, submodules, parts, num_devices // replicas, microbatch_size // replicas, replicas)
    memory = list(memory_bytes or [None] * num_devices)
    stages: list[PlacedStage] = []
    for submodule, part, (first, end) in zip(submodules, parts, ranges, strict=True):
        try:
            placed = place(
                _profile_of(profile, part),
                submodule.strategy,
                (end - first) * replicas,
                chunks=submodule.chunks,
                microbatch_size=submodule.microbatch_size or microbatch_size,
                memory_bytes=memory[first * replicas : end * replicas],
                recompute=recompute,
                replicas=replicas,
                zero=zero,
                cut=cut,
                speeds=None if speeds is None else speeds[first * replicas : end * replicas],
            )
        except (InfeasibleError, UsageError) as error:
            where = f"of submodule {submodule.blocks!r}, whose device 0 is device {first * replicas}"
            raise type(error)(f"{error} ({where})") from None
        for stage in placed.stages:
            devices = tuple(first * replicas + device for device in stage.devices)
            stages.append(stage.model_copy(update={"devices": devices, "microbatch_size": submodule.microbatch_size}))
    if rest:
        stages.append(_after_all(profile, rest, stages, replicas, zero))
    return Placement(
        strategy=" + ".join(submodule.strategy for submodule in submodules),
        num_devices=num_devices,
        stages=tuple(in_topological_order(profile, stages)),
    )


def _parts(profile: Profile, submodules: Sequence[Submodule]) -> list[list[str]]:
    """[submodule] its blocks."""
    owner: dict[str, str] = {}
    parts = []
    for submodule in submodules:
        if submodule.strategy in STRATEGIES and STRATEGIES[submodule.strategy].two_ways:
            raise UsageError(
                f"submodule {submodule.blocks!r} cannot be {submodule.strategy}: submodules have one route; choose "
                "another placement for it"
            )
        part = [block.id for block in profile.blocks if fnmatchcase(block.id, submodule.blocks)]
        if not part:
            some = ", ".join(block.id for block in profile.blocks[:4])
            raise UsageError(
                f"submodule {submodule.blocks!r} matches no block of profile {profile.name!r}, which has {some}, ..."
            )
        twice = next((block for block in part if block in owner), None)
        if twice is not None:
            raise UsageError(f"block {twice!r} is in submodules {owner[twice]!r} and {submodule.blocks!r}; choose one")
        owner.update(dict.fromkeys(part, submodule.blocks))
        parts.append(part)
    return parts


def _rest(profile: Profile, parts: Sequence[Sequence[str]]) -> list[str]:
    """Blocks of no submodule, which feed none either."""
    owned = {block for part in parts for block in part}
    for edge in profile.edges:
        if edge.source not in owned and edge.target in owned:
            raise UsageError(
                f"block {edge.source!r} is in no submodule, and {edge.target!r} of one needs it; add it to one"
            )
    return [block for block in profile.topological_order() if block not in owned]


def _ranges(
    profile: Profile,
    submodules: Sequence[Submodule],
    parts: Sequence[Sequence[str]],
    positions: int,
    size: int,
    replicas: int,
) -> list[tuple[int, int]]:
    """[submodule] its first position and the one after its last.

    Where none says, each gets one, and the others go one by one to whoever then has most work per position, for as many
    samples; that makes the most work per position the least. ``size`` is that of each replica, by default.
    """
    given = [submodule.positions for submodule in submodules]
    known = [each for each in given if each is not None]
    if len(known) == len(given):
        for submodule, (first, end) in zip(submodules, known, strict=True):
            if not 0 <= first < end <= positions:
                raise UsageError(
                    f"submodule {submodule.blocks!r} is to stand on positions {first} to {end - 1}, but there are "
                    f"{positions}; change its devices or --devices"
                )
        return known
    if known:
        raise UsageError("either all submodules say their devices or none does")
    if positions < len(parts):
        raise UsageError(f"{len(parts)} submodules need as many devices (times replicas), not {positions}")
    sizes = [own if (own := submodule.microbatch_size) is not None else size * replicas for submodule in submodules]
    whole, work = math.lcm(*sizes), []
    for part, own in zip(parts, sizes, strict=True):
        cost = group_costs(profile, [part], own // replicas)[0]
        work.append((cost.forward_ns + cost.backward_ns) * (whole // own))
    counts = [1] * len(parts)
    for _ in range(positions - len(parts)):
        counts[max(range(len(parts)), key=lambda part: work[part] / counts[part])] += 1
    ends = [sum(counts[: part + 1]) for part in range(len(parts))]
    return [(end - count, end) for count, end in zip(counts, ends, strict=True)]


def _profile_of(profile: Profile, part: Sequence[str]) -> Profile:
    """The part of a profile with these blocks."""
    inside = set(part)
    own = [(each, tuple(block for block in each.blocks if block in inside)) for each in profile.tied]
    return Profile(
        name=profile.name,
        source=profile.source,
        recipe=profile.recipe,
        blocks=tuple(block for block in profile.blocks if block.id in inside),
        edges=tuple(edge for edge in profile.edges if {edge.source, edge.target} <= inside),
        tied=tuple(each.model_copy(update={"blocks": blocks}) for each, blocks in own if len(blocks) > 1),
    )


def _after_all(
    profile: Profile, rest: Sequence[str], stages: Sequence[PlacedStage], replicas: int, zero: Zero
) -> PlacedStage:
    """The stage of what comes after all submodules."""
    stage_of = {block: stage for stage in stages for block in stage.blocks}
    feeding = {
        stage_of[edge.source].devices for edge in profile.edges if edge.target in rest and edge.source in stage_of
    }
    groups = sorted(feeding) or [stages[-1].devices]
    everyone = tuple(sorted(device for group in groups for device in group))
    by_id = profile.by_id
    splits = all(len(everyone) in {row.shards for row in by_id[block].rows()} for block in rest)
    if replicas == 1 and splits:
        return PlacedStage(blocks=tuple(rest), devices=everyone, shards=len(everyone))
    return PlacedStage(blocks=tuple(rest), devices=groups[-1], replicas=replicas, **zero.keys(replicas))
