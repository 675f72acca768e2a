"""Context parallelism: what exchanging keys and values adds to attention, gathered, or sent around a ring beside it.

*Gathered*: the core waits until a device has the keys and values of the whole sequence; backward gathers them again,
and scatters the sums of their gradients. Both are whole while it runs.

*Ring*: each device computes with the piece that it has while the next one comes, and merges what it finds. Causal work
is balanced, so that every step is an equal part of the core. Backward begins with the piece that forward ended with: a
device's own comes last, and its gradients are at home then. Megatron-LM does so by default (``--cp-comm-type p2p``).

Every number may be an array, as in :mod:`pipeplan.costs.uniform`. Which of the two the stages of a plan have is chosen
before these are, for each number of shards and of devices that share sequences (:func:`with_exchanges`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from pipeplan.errors import UsageError
from pipeplan.files import Block, CostRow, PlacedStage, Profile, sha256_of
from pipeplan.workload.elements import RING, ContextExchange, Stage

Number: TypeAlias = Any
"""A number, or a numpy array of them."""

MERGED = 3
"""Times that a merge moves what it merges: both are read, the result is written."""


class Added(NamedTuple):
    """What one way adds to a block's F and to its I, in ns, and to what it holds while it runs, in bytes."""

    forward_ns: Number
    input_grad_ns: Number
    workspace_bytes: Number


class SharedCore(NamedTuple):
    """The core of a block for one of ``parts`` of each sequence, and what devices exchange for it.

    ``core_ns`` and ``core_grad_ns`` are all of its computing, ``gather_ns`` an all-gather of keys and values, whose
    whole sequence takes ``shared_bytes``. ``merge_ns`` and ``merge_grad_ns`` are once to add to what a piece gave: the
    mixture of ``mixed_bytes``, and in backward the gradients of queries and of a piece of keys and values.
    """

    parts: Number
    core_ns: Number
    core_grad_ns: Number
    gather_ns: Number
    shared_bytes: Number
    mixed_bytes: Number
    merge_ns: Number
    merge_grad_ns: Number

    @property
    def gathered(self) -> Added:
        """Nothing runs beside the gathers."""
        return Added(self.gather_ns, 2 * self.gather_ns, 2 * self.shared_bytes * (self.parts > 1))

    @property
    def ring(self) -> Added:
        """What a hop takes longer than a step of the core, and merging.

        A forward may merge while it waits. In backward the first step has a piece's hop beside it, the last one that of
        gradients, all others both; gradients of a piece add to those that come.
        """
        others = self.parts - 1
        inner = np.maximum(others - 1, 0)
        hop = self.gather_ns / np.maximum(others, 1)
        forward, backward = self.core_ns / self.parts, self.core_grad_ns / self.parts
        ahead = np.maximum(0, hop - forward) + inner * np.maximum(self.merge_ns, hop - forward) + self.merge_ns
        one, both = np.maximum(0, hop - backward), np.maximum(0, 2 * hop - backward)
        back = 2 * one + inner * both + others * self.merge_grad_ns
        # two pieces on their way and their gradients, and what one step gave
        held = (4 * self.shared_bytes / self.parts + self.mixed_bytes) * (others > 0)
        return Added(ahead * (others > 0), back * (others > 0), held)


Split = tuple[int, int]
"""Shards, and devices (or groups of shards) that share sequences."""


def with_exchanges(
    profile: Profile, asked: ContextExchange | None = None, stages: Iterable[PlacedStage | Stage] = ()
) -> Profile:
    """The profile whose rows are those of gathered keys and values, or of a ring, as ``asked``; None: the quicker.

    ``stages`` that say which have that. It is still the file that it was read from, whose fingerprint it has.

    Raises:
        UsageError: a ring is asked for and there are no costs of it; stages say both of one split, or another than
            asked.
    """
    said, known = _said(stages), _with_rings(profile)
    for (shards, context), own in said.items():
        if asked not in (None, own):
            raise UsageError(
                f"--cp-exchange {asked}: stages with context {context} on {shards} shards say context_exchange {own}; "
                "leave --cp-exchange out"
            )
    if asked == RING and not known and not profile.rings:
        raise UsageError(_no_ring(profile, f"--cp-exchange {RING}"))
    open_ = {split: RING for split in known - said.keys() if asked == RING or (not asked and _quicker(profile, split))}
    return _as_said(profile, known, open_ | said)


def of_stages(profile: Profile, stages: Iterable[PlacedStage | Stage]) -> Profile:
    """The profile with rows of rings where stages say so, and all others as they are. Raises UsageError."""
    known = [each for each in stages if each.context > 1]
    if all(each.context_exchange != RING or (each.shards, each.context) in profile.rings for each in known):
        return profile
    return _as_said(profile, _with_rings(profile), _said(known))


def exchange_on(profile: Profile, shards: int, context: int) -> ContextExchange:
    """Which of the two a profile's rows for this split are of."""
    return RING if (shards, context) in profile.rings else "gathered"


def _said(stages: Iterable[PlacedStage | Stage]) -> dict[Split, ContextExchange]:
    """What stages say of splits."""
    found: dict[Split, ContextExchange] = {}
    for number, stage in enumerate(stages):
        if stage.context == 1 or stage.context_exchange is None:
            continue
        split, own = (stage.shards, stage.context), stage.context_exchange
        if found.setdefault(split, own) != own:
            raise UsageError(
                f"stages[{number}].context_exchange is {own}, and another stage with context {stage.context} on "
                f"{stage.shards} shards has {found[split]}; give both the same"
            )
    return found


def _with_rings(profile: Profile) -> set[Split]:
    """Splits with rows that say what a ring changes."""
    return {(row.shards, row.context) for block in profile.kinds for row in block.costs if row.ring is not None}


def _as_said(profile: Profile, known: set[Split], said: Mapping[Split, ContextExchange]) -> Profile:
    """With rows of rings where that is said, and of gathered keys and values elsewhere."""
    rings = {split for split, own in said.items() if own == RING}
    if lacking := sorted(rings - known - profile.rings):
        raise UsageError(_no_ring(profile, f"context_exchange {RING}", lacking[0]))
    return _around(profile, rings & known) if known else profile


def _no_ring(profile: Profile, what: str, split: Split | None = None) -> str:
    where = "" if split is None else f" with context {split[1]} on {split[0]} shards"
    return (
        f"{what}: {profile.where} has no costs of keys and values that go around a ring{where}; profile the model with "
        "--estimate --context, or have them gathered"
    )


def _quicker(profile: Profile, split: Split) -> bool:
    """Whether F and B of all blocks, of a sample, are together shorter around a ring; of equals what holds less."""
    time, held = Fraction(0), 0
    counts = Counter(profile.alike.values())
    for block in profile.kinds:
        for row in block.costs:
            if row.ring is not None and (row.shards, row.context) == split and not row.recompute:
                more = counts[block.id] * (row.ring.forward_ns + row.ring.input_grad_ns)
                time += Fraction(more, row.microbatch_size)
                held += row.ring.workspace_bytes
    return (time, held) < (0, 0)


def _around(profile: Profile, rings: set[Split]) -> Profile:
    """The profile with the rows of rings of these splits, which no row says any more."""

    def chosen(row: CostRow) -> CostRow:
        if row.ring is None:
            return row
        own = row.taking(row.ring) if (row.shards, row.context) in rings else row
        return own.model_copy(update={"ring": None})

    made = {block.id: tuple(map(chosen, block.costs)) for block in profile.kinds}

    def with_rows(block: Block) -> Block:
        return block.model_copy(update={"costs": made[profile.alike[block.id]]})

    changed = profile.model_copy(update={"blocks": tuple(map(with_rows, profile.blocks))})
    others = {kind: _around(own, rings) for kind, own in profile.of_kinds.items()}
    return changed.read_as(sha256_of(profile)).with_rings(profile.rings | rings).with_kinds(others)
