"""Where rules place a model with several submodules."""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan.errors import UsageError
from pipeplan.model import Placement, Profile
from pipeplan.partition import Submodule, place_submodules
from pipeplan.partition.strategies import Cut
from pipeplan.schedule.rules import Rules, SubmoduleRules
from pipeplan.schedule.rules.numbers import evaluate

__all__ = ["SUBMODULES", "place_by_rules", "places_submodules"]

SUBMODULES = "submodules"
"""What stands for a strategy where the rules place each submodule by one of its own."""


def places_submodules(rules: Rules | None) -> bool:
    """Whether rules say where submodules stand.

    Raises:
        UsageError: they place the whole model, too, or not all submodules.
    """
    if rules is None or not any(submodule.placement for submodule in rules.submodules):
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
    assert rules.placement is not None  # places_submodules
    ends = [evaluate("devices", number, {"D": positions}, least=0) for number in rules.devices or ()]
    return Submodule(rules.blocks, rules.placement, rules.chunks, (ends[0], ends[1]) if ends else None)
