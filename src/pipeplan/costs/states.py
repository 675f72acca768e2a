"""What training keeps of many blocks, and what copies exchange of it, as arrays: closed forms of many layouts at once.

As :func:`pipeplan.costs.experts.kept_of`, :meth:`pipeplan.costs.zero.Exchanged.of` and
:meth:`pipeplan.costs.zero.Exchanging.times` have it block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs.communication import Exchange, price_of_groups
from pipeplan.costs.recipes import (
    expert_state_of,
    running_bytes,
    running_per_parameter,
    state_table,
    whole_state_of,
)
from pipeplan.costs.zero import GATHERED, IN_ACTIONS, Exchanging, Experts, Zero, cuts
from pipeplan.files import Block, Recipe
from pipeplan.files.row_messages import Combining
from pipeplan.workload.kinds import GRADIENTS, PARAMETERS, STATE_KINDS

Bytes = NDArray[np.int64]

_PLACES = {kind: place for place, kind in enumerate(STATE_KINDS)}


@dataclass(frozen=True, slots=True)
class States:
    """The unsplit state of blocks: bytes [block, kind of state], of these their experts', and of what is cast.

    ``running`` [block] are bytes of the copy that is there only while a block runs, ``running_experts`` of these what
    is of experts. ``repeated`` and ``running_repeated`` are what each shard has whole of both.
    """

    recipe: Recipe
    whole: Bytes
    experts: Bytes
    repeated: Bytes
    running: Bytes
    running_experts: Bytes
    running_repeated: Bytes

    @classmethod
    def of(cls, blocks: Sequence[Block], recipe: Recipe) -> States:
        """Of these blocks. Raises UsageError if the catalog has no such recipe."""
        whole = state_table(blocks, recipe)
        running = running_per_parameter(recipe) * np.array(
            [each.parameters + each.frozen_parameters for each in blocks]
        )
        own, cast = np.zeros_like(whole), np.zeros_like(running)
        for place, block in [(place, block) for place, block in enumerate(blocks) if block.expert_parameters]:
            own[place] = [expert_state_of(block, recipe)[kind] for kind in STATE_KINDS]
            cast[place] = (
                running_bytes(block, recipe) * block.expert_parameters // (block.parameters + block.frozen_parameters)
            )
        again, cast_again = np.zeros_like(whole), np.zeros_like(running)
        for place, block in enumerate(blocks):
            if block.whole_parameters + block.whole_frozen_parameters:
                state = whole_state_of(block, recipe)
                again[place] = [state[kind] for kind in STATE_KINDS]
                cast_again[place] = running_bytes(block, recipe, 2) - running[place]
        return cls(recipe, whole, own, again, running, cast, cast_again)

    def of_some(self, places: Sequence[int]) -> States:
        """Of the blocks at these places."""
        state = self.whole, self.experts, self.repeated
        columns = (each[places] for each in (*state, self.running, self.running_experts, self.running_repeated))
        return States(self.recipe, *columns)

    def over(self, shards: int) -> tuple[Bytes, Bytes]:
        """What so many shards keep together, each an equal part of it, and what they have together as they run."""
        return self.whole + (shards - 1) * self.repeated, self.running + (shards - 1) * self.running_repeated

    def cast(self, shards: int, experts: Experts) -> Bytes:
        """[block] bytes of the copy on each device that is there only while the block runs."""
        _, running = self.over(shards)
        if experts.size == 1:
            return _share(running, shards)
        return _share(running - self.running_experts, shards) + _share(self.running_experts, experts.size)

    def kept(self, shards: int, zero: Zero, experts: Experts) -> Bytes:
        """[block, kind of state] bytes that each device keeps."""
        whole, _ = self.over(shards)
        if experts.size == 1:
            return _share(whole, self._cut(zero, shards))
        rest = _share(whole - self.experts, self._cut(zero, shards))
        return rest + _share(self.experts, self._cut(experts.zero, experts.size))

    def _cut(self, zero: Zero, shards: int) -> Bytes:
        """[kind of state] into how many parts it is cut."""
        cut = cuts(self.recipe, zero, shards)
        return np.array([cut[kind] for kind in STATE_KINDS], dtype=np.int64)

    def exchanged(self, shards: int, zero: Zero, experts: Experts) -> AllExchanged:
        """What copies exchange of each block with each micro-batch."""
        whole, running = self.over(shards)
        if experts.size == 1:
            gathered, reduced, cast = _exchanged(whole, running, zero, shards)
            return AllExchanged(gathered, reduced, cast, 0 * gathered, 0 * reduced)
        rest = _exchanged(whole - self.experts, running - self.running_experts, zero, shards)
        own = _exchanged(self.experts, self.running_experts, experts.zero, experts.size)
        return AllExchanged(rest[0] + own[0], rest[1] + own[1], rest[2] + own[2], own[0], own[1])


@dataclass(frozen=True, slots=True)
class AllExchanged:
    """[block] each as :class:`pipeplan.costs.zero.Exchanged` has it."""

    gathered: Bytes
    reduced: Bytes
    running: Bytes
    expert_gathered: Bytes
    expert_reduced: Bytes

    @property
    def any(self) -> NDArray[np.bool_]:
        """[block] whether something of it is exchanged."""
        found: NDArray[np.bool_] = (self.gathered + self.reduced + self.running) > 0
        return found

    @property
    def workspace_bytes(self) -> Bytes:
        """[block] what is there whole while it runs."""
        return 2 * self.gathered - self.running + 2 * self.reduced

    def times(self, exchanging: Exchanging) -> tuple[Bytes, Bytes]:
        """[block] ns to gather its parameters, and to reduce and scatter its gradients, in all groups at once."""
        gather, reduce = np.zeros_like(self.gathered), np.zeros_like(self.reduced)
        sides = (
            (exchanging.groups, self.gathered - self.expert_gathered, self.reduced - self.expert_reduced),
            (exchanging.expert_groups, self.expert_gathered, self.expert_reduced),
        )
        for groups, copies, gradients in sides:
            if groups:
                price = price_of_groups(exchanging.cluster, groups)
                gather += _each(copies, "all_gather", price)
                reduce += _each(gradients, "reduce_scatter", price)
        return gather, reduce


def _each(sizes: Bytes, operation: Combining, price: Callable[[Exchange], float]) -> Bytes:
    """[block] ns of an exchange of so many bytes, asked once for each number of them."""
    different, where = np.unique(sizes, return_inverse=True)
    found: Bytes = np.array([round(price(Exchange(operation, size))) for size in different.tolist()], dtype=np.int64)[
        where
    ]
    return found


def _share(sizes: Bytes, parts: Bytes | int) -> Bytes:
    """The largest of as equal parts as can be."""
    return -(-sizes // parts)


def _exchanged(state: Bytes, running: Bytes, zero: Zero, parts: int) -> tuple[Bytes, Bytes, Bytes]:
    """[block] bytes of the copy that is gathered, of gradients, and of what of the former is cast at each use."""
    none = np.zeros_like(running)
    if zero.level < IN_ACTIONS:
        return none, none, none
    copies, gradients = (_share(state[:, _PLACES[kind]], parts) for kind in (PARAMETERS, GRADIENTS))
    if zero.level < GATHERED:
        return none, gradients, none
    cast = _share(running, parts)
    return np.where(cast > 0, cast, copies), gradients, cast
