"""Sharded state (ZeRO, FSDP): what replicas of a stage divide of what training keeps, and what they exchange for it.

Replicas of a *group*, by default all of a stage's, have one copy of what they divide together (ZeRO, SC'20, section 5;
with groups smaller than all replicas: PyTorch FSDP, VLDB'23, section 3.2.2). Each has an equal part, rounded up; what
torch's own rules add to that is in :mod:`pipeplan.costs.torch_parts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

from pipeplan.costs.communication import Exchange, time_of_groups
from pipeplan.costs.recipes import bytes_per_parameter, copy_held
from pipeplan.files import Cluster, Recipe
from pipeplan.files.placement import PlacedStage
from pipeplan.workload.elements import Stage
from pipeplan.workload.kinds import GRADIENTS, MASTER, OPTIMIZER, PARAMETERS, STATE_KINDS, MemoryKind

_DIVIDED = (OPTIMIZER, MASTER)
"""The kinds of state that level 1 divides."""


class Zero(NamedTuple):
    """A level, and how many replicas share one copy of what it divides; at level 0 nothing is divided."""

    level: int = 0
    group: int = 1

    @classmethod
    def of(cls, stage: Stage | PlacedStage) -> Zero:
        """That of a stage; nothing is divided by one."""
        group = stage.zero_group or stage.replicas
        return cls(stage.zero, group) if stage.zero and group > 1 else WHOLE

    def keys(self, replicas: int) -> dict[str, Any]:
        """What a stage with so many replicas says of it: nothing where it is not divided."""
        if self == WHOLE or replicas == 1:
            return {}
        return {"zero": self.level} | ({"zero_group": self.group} if self.group < replicas else {})


AUTO: Literal["auto"] = "auto"
"""Asks for whatever level is better."""

WHOLE = Zero()
"""Every replica keeps all of its state."""


@cache
def cuts(recipe: Recipe, zero: Zero, parts: int = 1) -> Mapping[MemoryKind, int]:
    """{kind of state: equal parts} of which a device has one: of its replica's ``parts``, and of what replicas divide.

    Where parameters are cast at each use, what is kept of them is the master copy, which is divided as they are.
    """
    held = copy_held(recipe)
    return {
        kind: parts * (zero.group if zero.level and kind in _DIVIDED and kind is not held else 1)
        for kind in STATE_KINDS
    }


def updated_bytes(stage: Stage, recipe: Recipe) -> int:
    """Bytes of the parameters of a stage that a step changes, as each device of a replica has them whole.

    With a recipe of the catalog these are in proportion to gradients, which frozen parameters do not have.
    """
    gradients = stage.state[GRADIENTS] * cuts(recipe, Zero.of(stage))[GRADIENTS]
    if recipe.is_custom:
        return stage.state[PARAMETERS] if gradients else 0
    each = bytes_per_parameter(recipe)
    return gradients * each[copy_held(recipe)] // each[GRADIENTS]


def exchange_ns(
    cluster: Cluster | None, stage: Stage, sharing: Sequence[Stage], size: int, updated: int
) -> tuple[int, int]:
    """Ns to sum ``size`` bytes of gradients over all that hold them, and to gather ``updated`` bytes after the step.

    Each group reduces and scatters, so that a device has the sum of its part; parts are summed over the groups, also
    of the other stages that are ``sharing`` blocks, on other routes. After the step each group gathers the parameters.
    Groups run at the same time, on links that they may share.
    """
    zero = Zero.of(stage)
    groups = [group for each in {stage: None, **dict.fromkeys(sharing)} for group in _groups(each, zero.group)]
    own = _groups(stage, zero.group)
    across = [
        list(place) for shard in range(stage.shards) for place in zip(*groups[shard :: stage.shards], strict=True)
    ]
    part = -(-size // zero.group)
    scattered = time_of_groups(cluster, Exchange("reduce_scatter", size), own)
    summed = time_of_groups(cluster, Exchange("all_reduce", part), [sorted(set(place)) for place in across])
    gathered = time_of_groups(cluster, Exchange("all_gather", updated), own)
    return round(scattered) + round(summed), round(gathered)


def _groups(stage: Stage, group: int) -> list[list[int]]:
    """The devices of each group: those with the same shard, of neighbouring replicas; shards in turn."""
    size = group * stage.shards
    return [
        list(stage.devices[begin + shard : begin + size : stage.shards])
        for begin in range(0, len(stage.devices), size)
        for shard in range(stage.shards)
    ]
