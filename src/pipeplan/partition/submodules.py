"""Placement of models with several submodules, such as a tower for images and one for texts.

Each submodule has devices of its own and a strategy for them (FlexPipe, section 4.1: one configuration per modality;
DistMM, NSDI'24). What comes after all of them, such as the loss, stands where the last of their stages do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from pipeplan.costs import group_costs
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.files import PlacedStage, Placement, Profile
from pipeplan.partition.placement import Cut, in_topological_order, place
from pipeplan.partition.strategies import STRATEGIES


@dataclass(frozen=True, slots=True)
class Submodule:
    """The blocks whose names match ``blocks`` (a pattern such as ``image.*``), placed by a strategy of their own.

    ``positions`` are the first of its positions, and the one after the last; None is as many as its work asks for.
    """

    blocks: str
    strategy: str = "one-to-one"
    chunks: int | None = None
    positions: tuple[int, int] | None = None


def place_submodules(
    profile: Profile,
    submodules: Sequence[Submodule],
    num_devices: int,
    *,
    microbatch_size: int,
    memory_bytes: Sequence[int | None] | None = None,
    recompute: bool = False,
    replicas: int = 1,
    cut: Cut | None = None,
) -> Placement:
    """Place every submodule as :func:`~pipeplan.partition.placement.place` does a chain, on its own devices.

    A *position* is a device, or ``replicas`` neighbouring ones that share every micro-batch. Blocks of no submodule
    come after all of them, as one stage split over the positions that feed it if the profile has costs for that (and
    there are no replicas), else on the last of them alone. ``cut`` cuts each chain otherwise.

    Raises:
        UsageError: a pattern matches no block or one that another has, devices that are not there or not enough, a
            strategy with two routes, or a block of no submodule before one of theirs.
        InfeasibleError: some device cannot hold what it must.
    """
    if num_devices % replicas:
        raise UsageError(f"{num_devices} devices cannot be shared by {replicas} replicas; choose --replicas to divide")
    parts = _parts(profile, submodules)
    rest = _rest(profile, parts)
    ranges = _ranges(profile, submodules, parts, num_devices // replicas, microbatch_size // replicas)
    memory = list(memory_bytes or [None] * num_devices)
    stages: list[PlacedStage] = []
    for submodule, part, (first, end) in zip(submodules, parts, ranges, strict=True):
        try:
            placed = place(
                _profile_of(profile, part),
                submodule.strategy,
                (end - first) * replicas,
                chunks=submodule.chunks,
                microbatch_size=microbatch_size,
                memory_bytes=memory[first * replicas : end * replicas],
                recompute=recompute,
                replicas=replicas,
                cut=cut,
            )
        except (InfeasibleError, UsageError) as error:
            where = f"of submodule {submodule.blocks!r}, whose device 0 is device {first * replicas}"
            raise type(error)(f"{error} ({where})") from None
        stages += [_moved(stage, first * replicas) for stage in placed.stages]
    if rest:
        stages.append(_after_all(profile, rest, stages, replicas))
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
                f"block {edge.source!r} is in no submodule, but {edge.target!r} of one needs it; take it into one, too"
            )
    return [block for block in profile.topological_order() if block not in owned]


def _ranges(
    profile: Profile, submodules: Sequence[Submodule], parts: Sequence[Sequence[str]], positions: int, size: int
) -> list[tuple[int, int]]:
    """[submodule] its first position and the one after its last.

    Where none says, each gets one, and the others go one by one to whoever then has most work per position; that makes
    the most work per position the least.
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
    costs = group_costs(profile, parts, size)
    work = [cost.forward_ns + cost.backward_ns for cost in costs]
    counts = [1] * len(parts)
    for _ in range(positions - len(parts)):
        counts[max(range(len(parts)), key=lambda part: work[part] / counts[part])] += 1
    ends = [sum(counts[: part + 1]) for part in range(len(parts))]
    return [(end - count, end) for count, end in zip(counts, ends, strict=True)]


def _profile_of(profile: Profile, part: Sequence[str]) -> Profile:
    """The part of a profile with these blocks."""
    inside = set(part)
    return Profile(
        name=profile.name,
        source=profile.source,
        blocks=tuple(block for block in profile.blocks if block.id in inside),
        edges=tuple(edge for edge in profile.edges if {edge.source, edge.target} <= inside),
    )


def _moved(stage: PlacedStage, first: int) -> PlacedStage:
    return stage.model_copy(update={"devices": tuple(first + device for device in stage.devices)})


def _after_all(profile: Profile, rest: Sequence[str], stages: Sequence[PlacedStage], replicas: int) -> PlacedStage:
    """The stage of what comes after all submodules."""
    stage_of = {block: stage for stage in stages for block in stage.blocks}
    feeding = {
        stage_of[edge.source].devices for edge in profile.edges if edge.target in rest and edge.source in stage_of
    }
    groups = sorted(feeding) or [stages[-1].devices]
    everyone = tuple(sorted(device for group in groups for device in group))
    by_id = {block.id: block for block in profile.blocks}
    splits = all(len(everyone) in {row.shards for row in by_id[block].costs} for block in rest)
    if replicas == 1 and splits:
        return PlacedStage(blocks=tuple(rest), devices=everyone, shards=len(everyone))
    return PlacedStage(blocks=tuple(rest), devices=groups[-1], replicas=replicas)
