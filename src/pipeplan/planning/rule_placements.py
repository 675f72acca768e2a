"""Where rules place a model, as a whole or with several submodules."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from pipeplan.errors import UsageError
from pipeplan.files import PlacedStage, Placement, Profile
from pipeplan.partition import STRATEGIES, Submodule, place_submodules
from pipeplan.partition.placement import Cut, follows
from pipeplan.schedule.rules import Rules, SubmoduleRules
from pipeplan.schedule.rules.values import evaluate

__all__ = ["SUBMODULES", "follows_rules", "place_by_rules", "strategy_of"]

SUBMODULES = "submodules"
"""What stands for a strategy where the rules place each submodule by one of its own."""


def strategy_of(rules: Rules | None) -> str | None:
    """The strategy that rules name, :data:`SUBMODULES` where they have one for each submodule, None without any.

    Raises:
        UsageError: it is not known; they place the whole model and submodules, or not all submodules.
    """
    if rules is None or _places_submodules(rules):
        return None if rules is None else SUBMODULES
    if rules.placement not in (None, *STRATEGIES):
        raise UsageError(f"rules {rules.name!r}: placement is {rules.placement!r}; choose from {', '.join(STRATEGIES)}")
    return rules.placement


def follows_rules(profile: Profile, placement: Placement, rules: Rules) -> bool:
    """Whether a placement is one that rules ask for, wherever it cuts the model."""
    if not _places_submodules(rules):
        return rules.placement is None or follows(profile, placement.stages, rules.placement, rules.chunks)
    taken: set[int] = set()
    for submodule in rules.submodules:
        there = [
            number
            for number, stage in enumerate(placement.stages)
            if number not in taken and fnmatchcase(stage.blocks[0], submodule.blocks)
        ]
        taken.update(there)
        stages = [placement.stages[number] for number in there]
        if not _follows(profile, submodule, stages, placement.num_devices):
            return False
    return True


def _follows(profile: Profile, rules: SubmoduleRules, stages: Sequence[PlacedStage], num_devices: int) -> bool:
    asked = _submodule(rules, num_devices)
    first, end = asked.positions or (0, num_devices)
    inside = all(first <= device < end for stage in stages for device in stage.devices)
    return inside and follows(profile, stages, asked.strategy, asked.chunks)


def _places_submodules(rules: Rules) -> bool:
    if not any(submodule.placement for submodule in rules.submodules):
        return False
    if rules.placement is not None:
        raise UsageError(f"rules {rules.name!r} place the model as {rules.placement} and by submodules; choose one")
    unplaced = next((submodule.blocks for submodule in rules.submodules if submodule.placement is None), None)
    if unplaced is not None:
        raise UsageError(f"rules {rules.name!r}: submodule {unplaced!r} has no placement, but others do; give it one")
    return True


def place_by_rules(
    rules: Rules,
    profile: Profile,
    num_devices: int,
    *,
    microbatch_size: int,
    memory_bytes: Sequence[int | None] | None = None,
    recompute: bool = False,
    replicas: int = 1,
    cut: Cut | None = None,
) -> Placement:
    """Every submodule placed as its rules say, each on devices of its own.

    In their ``devices`` D is the number of all positions: devices, or groups of ``replicas``.

    Raises:
        UsageError: the rules do not apply to the profile or its devices.
        InfeasibleError: some device cannot hold what it must.
    """
    return place_submodules(
        profile,
        [_submodule(submodule, num_devices // replicas) for submodule in rules.submodules],
        num_devices,
        microbatch_size=microbatch_size,
        memory_bytes=memory_bytes,
        recompute=recompute,
        replicas=replicas,
        cut=cut,
    )


def _submodule(rules: SubmoduleRules, positions: int) -> Submodule:
    assert rules.placement is not None  # _places_submodules
    ends = [evaluate("devices", number, {"D": positions}, least=0) for number in rules.devices or ()]
    return Submodule(rules.blocks, rules.placement, rules.chunks, (ends[0], ends[1]) if ends else None)
