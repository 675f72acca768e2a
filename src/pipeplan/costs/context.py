"""Context parallelism: what exchanging keys and values adds to attention, gathered, or sent around a ring beside it.

*Gathered*: the core waits until a device has the keys and values of the whole sequence; backward gathers them again,
and scatters the sums of their gradients. Both are whole while it runs.

*Ring*: each device computes with the piece that it has while the next one comes, and merges what it finds. Causal work
is balanced, so that every step is an equal part of the core. Backward begins with the piece that forward ended with: a
device's own comes last, and its gradients are at home then. Megatron-LM does so by default (``--cp-comm-type p2p``).

Every number may be an array, as in :mod:`pipeplan.costs.uniform`. All stages of a plan that are split alike exchange
alike. Where one of the two is no slower than the other and holds no more, that is chosen before stages are, for each
number of shards and of devices that share sequences (:func:`with_exchanges`); else both are open, and the search weighs
time against memory (:func:`open_exchanges`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from pipeplan.errors import UsageError
from pipeplan.files import Block, CostRow, PlacedStage, Profile, RingCosts, sha256_of
from pipeplan.workload.elements import GATHERED_CONTEXT, RING, ContextExchange, Stage

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
    mixture of ``mixed_bytes``, and in backward the gradients of queries and of a piece of keys and values. All hops of
    a ring take ``hops_ns``; None: as long as the gather, as inside of a node, where neither has several links at once.
    """

    parts: Number
    core_ns: Number
    core_grad_ns: Number
    gather_ns: Number
    shared_bytes: Number
    mixed_bytes: Number
    merge_ns: Number
    merge_grad_ns: Number
    hops_ns: Number | None = None

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
        hop = (self.gather_ns if self.hops_ns is None else self.hops_ns) / np.maximum(others, 1)
        forward, backward = self.core_ns / self.parts, self.core_grad_ns / self.parts
        ahead = np.maximum(0, hop - forward) + inner * np.maximum(self.merge_ns, hop - forward) + self.merge_ns
        one, both = np.maximum(0, hop - backward), np.maximum(0, 2 * hop - backward)
        back = 2 * one + inner * both + others * self.merge_grad_ns
        piece = self.shared_bytes / self.parts
        # backward: two pieces on their way, two sums of gradients, and what one step gave of a piece and of queries;
        # forward: two pieces, what one step gave, and the sum of all so far in twice as many bytes
        held = np.maximum(5 * piece + self.mixed_bytes, 2 * piece + 3 * self.mixed_bytes)
        return Added(ahead * (others > 0), back * (others > 0), held * (others > 0))


Split = tuple[int, int]
"""Shards, and devices (or groups of shards) that share sequences."""


def with_exchanges(
    profile: Profile, asked: ContextExchange | None = None, stages: Iterable[PlacedStage | Stage] = ()
) -> Profile:
    """The profile whose rows are those of gathered keys and values, or of a ring, as ``asked``; None: the quicker.

    Where that holds more than the other one, rows keep what the other one changes (:func:`open_exchanges`). ``stages``
    that say which have that. It is still the file that it was read from, whose fingerprint it has.

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
    _require_rings(profile, known, said)
    settled = {split: said.get(split, asked) for split in known}
    chosen = {split: own or _quicker(profile, split) for split, own in settled.items()}
    left = {split for split, own in settled.items() if own is None and _is_open(profile, split)}
    return _taken(profile, chosen, left)


def open_exchanges(profile: Profile) -> Mapping[Split, ContextExchange]:
    """{split: the other one of the two}, where neither beats the other in time and in what it holds, nor is settled."""

    def found() -> dict[Split, ContextExchange]:
        return {split: _other(exchange_on(profile, *split)) for split in sorted(_with_rings(profile))}

    known: dict[Split, ContextExchange] = profile.once("open exchanges", found)
    return known


def exchanged_as(profile: Profile, split: Split, exchange: ContextExchange | None) -> Profile:
    """The profile with rows of this one of the two for this split; None: as they are, as where the other is settled."""
    if exchange is None or exchange == exchange_on(profile, *split) or split not in open_exchanges(profile):
        return profile
    return profile.once(("exchange", split), lambda: _taken(profile, {split: exchange}, _with_rings(profile)))


def of_stages(profile: Profile, stages: Iterable[PlacedStage | Stage]) -> Profile:
    """The profile with rows of what stages say, and all others as they are. Raises UsageError."""
    known = [each for each in stages if each.context > 1 and each.context_exchange is not None]
    if not known:
        return profile
    said = _said(known)
    _require_rings(profile, set(open_exchanges(profile)), said)
    for split, exchange in said.items():
        profile = exchanged_as(profile, split, exchange)
    return profile


def exchange_on(profile: Profile, shards: int, context: int) -> ContextExchange:
    """Which of the two a profile's rows for this split are of."""
    return RING if (shards, context) in profile.rings else GATHERED_CONTEXT


def _other(exchange: ContextExchange) -> ContextExchange:
    return GATHERED_CONTEXT if exchange == RING else RING


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


def _require_rings(profile: Profile, known: Set[Split], said: Mapping[Split, ContextExchange]) -> None:
    rings = {split for split, own in said.items() if own == RING}
    if lacking := sorted(rings - known - profile.rings):
        raise UsageError(_no_ring(profile, f"context_exchange {RING}", lacking[0]))


def _no_ring(profile: Profile, what: str, split: Split | None = None) -> str:
    where = "" if split is None else f" with context {split[1]} on {split[0]} shards"
    return (
        f"{what}: {profile.where} has no costs of keys and values that go around a ring{where}; profile the model with "
        "--estimate --context, or have them gathered"
    )


def _changes(profile: Profile, split: Split) -> Iterator[tuple[Block, CostRow, RingCosts]]:
    """What a ring changes, row by row, of which that says those that compute nothing again."""
    for block in profile.kinds:
        for row in block.costs:
            if row.ring is not None and (row.shards, row.context) == split and not row.recompute:
                yield block, row, row.ring


def _quicker(profile: Profile, split: Split) -> ContextExchange:
    """The one with which F and B of all blocks, of a sample, are together shorter; of equals what holds less."""
    time, held = Fraction(0), 0
    counts = Counter(profile.alike.values())
    for block, row, ring in _changes(profile, split):
        more = counts[block.id] * (ring.forward_ns + ring.input_grad_ns)
        time += Fraction(more, row.microbatch_size)
        held += ring.workspace_bytes
    return RING if (time, held) < (0, 0) else GATHERED_CONTEXT


def _is_open(profile: Profile, split: Split) -> bool:
    """Whether a ring is worse in some row and better in some, in time or in what it holds."""
    changes = [
        figure
        for _, _, ring in _changes(profile, split)
        for figure in (ring.forward_ns + ring.input_grad_ns, ring.workspace_bytes)
    ]
    return min(changes, default=0) < 0 < max(changes, default=0)


def _taken(profile: Profile, chosen: Mapping[Split, ContextExchange], left: Set[Split]) -> Profile:
    """The profile with rows as ``chosen``, of which those of splits that are ``left`` open say what a ring changes."""
    known, before = _with_rings(profile), profile.rings
    turned = {split for split, own in chosen.items() if (own == RING) != (split in before)}
    if not turned and known == left:
        return profile

    def taken(row: CostRow) -> CostRow:
        if row.ring is None:
            return row
        split = row.shards, row.context
        if split in turned:
            row = row.taking(-row.ring if split in before else row.ring)
        return row if split in left else row.model_copy(update={"ring": None})

    made = {block.id: tuple(map(taken, block.costs)) for block in profile.kinds}

    def with_rows(block: Block) -> Block:
        return block.model_copy(update={"costs": made[profile.alike[block.id]]})

    changed = profile.model_copy(update={"blocks": tuple(map(with_rows, profile.blocks))})
    others = {kind: _taken(own, chosen, left) for kind, own in profile.of_kinds.items()}
    return changed.read_as(sha256_of(profile)).with_rings(before ^ turned).with_kinds(others)
