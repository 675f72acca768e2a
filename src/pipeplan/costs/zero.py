"""Sharded state (ZeRO, FSDP): what replicas of a stage divide of what training keeps, and what they exchange for it.

Replicas of a *group*, by default all of a stage's, have one copy of what they divide together (ZeRO, SC'20, section 5;
with groups smaller than all replicas: PyTorch FSDP, VLDB'23, section 3.2.2). Each has an equal part, rounded up; what
torch's own rules add to that is in :mod:`pipeplan.costs.torch_parts`.

From level 2 on groups exchange in the middle of an iteration, block by block, as FSDP does that wraps each layer: what
a weight gradient made is reduced and scattered with each micro-batch, and by level 3 parameters are gathered before a
block's forward and before its backward, and given back after each. The network runs beside compute, one block apart: a
copy is gathered while the block before it runs, a gradient reduced while the block after it does (VLDB'23, sections
3.3.1 and 3.3.2). So a block takes the longer of its compute and its own exchanges, and what has no neighbour is left
over: the first gather before the first forward and the last reduction after the last backward. Compute may be slower
meanwhile (a cluster's ``contention``).

Or actions of programs exchange (:mod:`pipeplan.workload.exchanges`), as torch's pipelining does: a whole stage, in
groups of its blocks, at times that the plan says, and not with each micro-batch if it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain
from typing import Any, Literal, NamedTuple

from pipeplan.costs.communication import (
    Exchange,
    Same,
    alike_every,
    contention_among,
    price_of_groups,
    time_of_groups,
)
from pipeplan.costs.recipes import bytes_per_parameter, copy_held, expert_state_of, running_bytes, state_over
from pipeplan.files import Block, Cluster, CostRow, Recipe
from pipeplan.files.placement import PlacedStage
from pipeplan.workload.elements import Stage
from pipeplan.workload.kinds import GRADIENTS, MASTER, OPTIMIZER, PARAMETERS, STATE_KINDS, MemoryBytes, MemoryKind

_DIVIDED = ((), (OPTIMIZER, MASTER), (OPTIMIZER, MASTER, GRADIENTS), STATE_KINDS)
"""[level] the kinds of state that it divides."""

IN_ACTIONS, GATHERED = 2, 3
"""The levels from which on gradients are reduced with each micro-batch, and parameters gathered for each use."""


class Zero(NamedTuple):
    """A level, and how many replicas share one copy of what it divides; at level 0 nothing is divided."""

    level: int = 0
    group: int = 1

    @classmethod
    def of(cls, stage: Stage | PlacedStage) -> Zero:
        """The level and group of a stage; a group of one shards nothing."""
        group = stage.zero_group or stage.copies
        return cls(stage.zero, group) if stage.zero and group > 1 else WHOLE

    def keys(self, replicas: int) -> dict[str, Any]:
        """What a stage with this many replicas says of it: nothing if state is not sharded."""
        if self == WHOLE or replicas == 1:
            return {}
        return {"zero": self.level} | ({"zero_group": self.group} if self.group < replicas else {})


AUTO: Literal["auto"] = "auto"
"""Requests whichever level is better."""

WHOLE = Zero()
"""Every replica keeps all of its state."""


class Experts(NamedTuple):
    """How many devices share experts, and what those that have the same divide of what is kept of them.

    Each ``split`` neighbours of these devices have parts of the same experts.
    """

    size: int = 1
    zero: Zero = WHOLE
    split: int = 1

    @classmethod
    def of(cls, stage: Stage | PlacedStage) -> Experts:
        """Those of a stage."""
        state = stage.copies, stage.zero, stage.zero_group
        return cls.among(stage.expert, stage.shards, *state, split=stage.expert_shards or 1)

    @classmethod
    def among(
        cls, size: int, shards: int, copies: int, level: int = 0, group: int | None = None, *, split: int = 1
    ) -> Experts:
        """Of a stage with so many ``shards`` and ``copies`` of all else, of which each ``group`` divides its state.

        Devices of such a group that have the same experts divide what is kept of these; there may be one alone.
        """
        if size == 1:
            return TOGETHER
        sharers = (group or copies) * shards // size
        return cls(size, Zero(level, sharers) if level and sharers > 1 else WHOLE, split)


TOGETHER = Experts()
"""Experts are split as all else of their blocks."""


@cache
def cuts(recipe: Recipe, zero: Zero, parts: int = 1) -> Mapping[MemoryKind, int]:
    """{kind of state: equal parts} of which a device has one: of its replica's ``parts``, and of what replicas divide.

    Where parameters are cast at each use, what is kept of them is the master copy, which is divided as they are.
    """
    whole = copy_held(recipe) if zero.level < GATHERED else None
    return {
        kind: parts * (zero.group if kind in _DIVIDED[zero.level] and kind is not whole else 1) for kind in STATE_KINDS
    }


class Exchanged(NamedTuple):
    """Of a block, on each device of a replica: bytes of the copy that is gathered, of the gradients that are reduced.

    ``running`` bytes of that copy are counted by the block's own workspace, as they are cast at each use. Of both
    ``expert_gathered`` and ``expert_reduced`` are of experts that devices share, which have groups of their own.
    """

    gathered: int = 0
    reduced: int = 0
    running: int = 0
    expert_gathered: int = 0
    expert_reduced: int = 0

    @classmethod
    def of(cls, block: Block, recipe: Recipe, zero: Zero, shards: int, experts: Experts = TOGETHER) -> Exchanged:
        """What a level exchanges with each micro-batch: nothing below the second."""
        if max(zero.level, experts.zero.level) < IN_ACTIONS:
            return cls()
        state, running = state_over(block, recipe, shards), running_bytes(block, recipe, shards)
        if experts.size == 1 or not block.expert_parameters:
            return cls(*_exchanged(state, running, zero, shards))
        own = expert_state_of(block, recipe)
        cast = running_bytes(block, recipe) * block.expert_parameters // (block.parameters + block.frozen_parameters)
        rest = _exchanged(state - own, running - cast, zero, shards)
        gathered, reduced, cast = _exchanged(own, cast, experts.zero, experts.size)
        return cls(rest[0] + gathered, rest[1] + reduced, rest[2] + cast, gathered, reduced)

    @property
    def workspace_bytes(self) -> int:
        """What is there whole while the block runs: its own, and as much of the block that is a neighbour in time."""
        return 2 * self.gathered - self.running + 2 * self.reduced


def _exchanged(state: MemoryBytes, running: int, zero: Zero, parts: int) -> tuple[int, int, int]:
    """Bytes of the copy that is gathered, of gradients, and of what of the former is cast at each use."""
    if zero.level < IN_ACTIONS:
        return 0, 0, 0
    share, cast, gathers = state.share(parts), -(-running // parts), zero.level >= GATHERED
    return (cast or share[PARAMETERS]) * gathers, share[GRADIENTS], cast * gathers


class Exchanging(NamedTuple):
    """The groups of a stage, shard by shard, on links where these are known, and those of devices with equal experts.

    ``every`` is for how many of its actions it gathers, and after how many micro-batches it reduces, where actions of
    programs do; None where each block exchanges inside of actions.
    """

    cluster: Cluster | None = None
    groups: tuple[tuple[int, ...], ...] = ()
    every: tuple[int | None, int] | None = None
    expert_groups: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, stage: Stage, cluster: Cluster | None) -> Exchanging:
        """Those of a stage."""
        zero, experts = Zero.of(stage), Experts.of(stage)
        if max(zero.level, experts.zero.level) < IN_ACTIONS:
            return cls()
        every = None if stage.reduce_every is None else (stage.unshard_every, stage.reduce_every)
        if cluster is None:
            return cls(every=every)
        apart = _exchanging(stage.devices, experts.size, experts.zero)
        return cls(cluster, _exchanging(stage.devices, stage.shards, zero), every, apart)

    @classmethod
    def on_first(
        cls, cluster: Cluster | None, shards: int, copies: int, zero: Zero, experts: Experts = TOGETHER
    ) -> Exchanging:
        """Those of some copies on a cluster's first devices, where their groups are as close together as anywhere."""
        if cluster is None:
            return cls()
        devices = range(shards * copies)
        apart = _exchanging(devices, experts.size, experts.zero)
        return cls(cluster, _exchanging(devices, shards, zero), expert_groups=apart)

    @property
    def contention(self) -> float:
        """By what part of its speed a device computes less meanwhile."""
        return contention_among(self.cluster, (*self.groups, *self.expert_groups))

    def times(self, block: Exchanged) -> tuple[int, int]:
        """Ns to gather a block's parameters, and to reduce and scatter its gradients, in all groups at once.

        Those of experts come after the others.
        """
        rest = block.gathered - block.expert_gathered, block.reduced - block.expert_reduced
        gathered = reduced = 0
        for groups, (copy, gradients) in (
            (self.groups, rest),
            (self.expert_groups, (block.expert_gathered, block.expert_reduced)),
        ):
            if groups:
                gathered += round(time_of_groups(self.cluster, Exchange("all_gather", copy), groups))
                reduced += round(time_of_groups(self.cluster, Exchange("reduce_scatter", gradients), groups))
        return gathered, reduced


ALONE = Exchanging()
"""What nothing exchanges, or where nobody asks how long that takes."""


def with_exchanges(row: CostRow, block: Exchanged, times: tuple[int, int], contention: float = 0.0) -> CostRow:
    """A block's costs with the ``times`` of what it exchanges beside its compute, and with what is whole meanwhile.

    By ``contention`` compute is slower for as long as exchanges last, so that it has that part of them to make up for.
    """
    gather, reduce = times
    beside = {"forward_ns": gather, "backward_ns": gather + reduce, "input_grad_ns": gather, "weight_grad_ns": reduce}
    alone = {"backward_ns": row.whole_backward_ns} | {
        name: time for name in beside if (time := getattr(row, name)) is not None
    }
    longer = {name: max(beside[name], time + round(contention * beside[name])) for name, time in alone.items()}
    return row.model_copy(update=longer | {"workspace_bytes": row.workspace_bytes + block.workspace_bytes})


def beside_exchanges(
    row: CostRow, block: Exchanged, times: tuple[int, int], every: tuple[int | None, int], contention: float
) -> CostRow:
    """A block's costs where actions of programs exchange its state: only compute, and slower by contention.

    An exchange for several actions (``every``, as :class:`Exchanging` has it) slows all of them alike. What is gathered
    is no workspace.
    """
    uses, additions = every
    gather, reduce = times[0] / (uses or 1), times[1] / additions
    beside = {"forward_ns": gather, "backward_ns": gather + reduce, "input_grad_ns": gather, "weight_grad_ns": reduce}
    alone = {"backward_ns": row.whole_backward_ns} | {
        name: time for name in beside if (time := getattr(row, name)) is not None
    }
    slowed = {name: time + round(contention * beside[name]) for name, time in alone.items()}
    return row.model_copy(update=slowed | {"workspace_bytes": max(0, row.workspace_bytes - block.running)})


def updated_bytes(stage: Stage, recipe: Recipe) -> int:
    """Bytes of the parameters of a stage that a step changes, as each device of a replica has them whole.

    With a recipe of the catalog these are in proportion to gradients, which frozen parameters do not have.
    """
    gradients = stage.state[GRADIENTS] * cuts(recipe, Zero.of(stage))[GRADIENTS]
    if recipe.is_custom:
        return stage.state[PARAMETERS] if gradients else 0
    each = bytes_per_parameter(recipe)
    return gradients * each[copy_held(recipe)] // each[GRADIENTS]


def price_of_exchange(
    cluster: Cluster | None, stage: Stage, sharing: Sequence[Stage]
) -> Callable[[int, int, int], tuple[int, int]]:
    """Ns to sum bytes of gradients over all that hold them, and to gather what a step has updated, of any bytes.

    Of the former some may be of what each shard has whole, and sums with the others', too.

    Of buckets by the thousand, which devices exchange is looked up once.

    Each group reduces and scatters, so that a device has the sum of its part; parts are summed over the groups, also
    of the other stages that are ``sharing`` blocks, on other routes. After the step each group gathers the parameters.
    Groups run at the same time, on links that they may share. From level 2 on a device has a part from the beginning,
    whose ``size`` it is, and from level 3 on parameters are gathered when they are used.
    """
    every = dict.fromkeys((each.devices, each.shards) for each in (stage, *sharing))
    unit = 1 if cluster is None else alike_every(cluster)
    begin = min(min(devices) for devices, _ in every) // unit * unit
    alike = tuple((tuple([device - begin for device in devices]), shards) for devices, shards in every)
    return _price_of_exchange(Same(cluster), Zero.of(stage), alike)


@lru_cache(maxsize=64)
def _price_of_exchange(
    same: Same[Cluster | None], zero: Zero, stages: tuple[tuple[tuple[int, ...], int], ...]
) -> Callable[[int, int, int], tuple[int, int]]:
    """The same for the devices and shards of stages, of which the first asks: once for all that stand alike."""
    cluster, (own_devices, own_shards) = same.thing, stages[0]
    groups = [group for devices, shards in stages for group in state_groups(devices, shards, zero.group)]
    own = state_groups(own_devices, own_shards, zero.group)
    inside, across = price_of_groups(cluster, own), price_of_groups(None, own)
    if len(groups) > own_shards:  # else each part is on one device alone, of thousands
        places = chain.from_iterable(zip(*groups[shard::own_shards], strict=True) for shard in range(own_shards))
        across = price_of_groups(cluster, [sorted(set(place)) for place in places])

    @cache
    def everywhere() -> Callable[[Exchange], float]:
        return price_of_groups(cluster, [sorted(set(place)) for place in zip(*groups, strict=True)])

    @lru_cache(maxsize=1024)
    def price(size: int, whole: int, updated: int) -> tuple[int, int]:
        cut = 1 if zero.level >= IN_ACTIONS else zero.group
        scattered = 0.0 if zero.level >= IN_ACTIONS else inside(Exchange("reduce_scatter", size))
        gathered = 0.0 if zero.level >= GATHERED else inside(Exchange("all_gather", updated))
        summed = round(scattered) + round(across(Exchange("all_reduce", -(-(size - whole) // cut))))
        if whole:
            summed += round(everywhere()(Exchange("all_reduce", -(-whole // cut))))
        return summed, round(gathered)

    return price


def _exchanging(devices: Sequence[int], parts: int, zero: Zero) -> tuple[tuple[int, ...], ...]:
    """The groups that exchange in the middle of an iteration; none below the second level."""
    return tuple(map(tuple, state_groups(devices, parts, zero.group))) if zero.level >= IN_ACTIONS else ()


def state_groups(devices: Sequence[int], shards: int, group: int) -> list[list[int]]:
    """The devices of each group: those with the same shard, of neighbouring replicas; shards in turn."""
    size = group * shards
    return [
        list(devices[begin + shard : begin + size : shards])
        for begin in range(0, len(devices), size)
        for shard in range(shards)
    ]
