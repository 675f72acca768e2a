"""Every layout of a small chain whose stages have devices of their own, by enumeration, each run with 1F1B."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from pipeplan.costs import StageCost, stage_costs
from pipeplan.costs.zero import WHOLE, Experts, Zero
from pipeplan.errors import UsageError
from pipeplan.files import Profile

_Way = tuple[tuple[int, ...], int]
"""Shards, parts of sequences, devices that share experts, how many of these split each; and replicas."""


def every_width(
    profile: Profile,
    num_devices: int,
    mini_batch: int,
    memory: int | None,
    *,
    recompute: bool,
    levels: Sequence[int],
    hop_ns: int = 0,
    sums_ns: Callable[[int, int], int] = lambda size, copies: 0,
) -> Iterator[int]:
    """Ns of each layout that fits and may be the quickest so far: all cuts, micro-batch sizes, and ways of every stage.

    Each has shards, devices that share its experts, replicas and one of the ``levels`` of ZeRO of its own, and all as
    many parts of sequences, which one hands to the next. Where ``recompute``, each block may be. A message to the next
    stage takes ``hop_ns``; ``sums_ns`` are of so many bytes of gradients over so many copies, after a stage's last
    action.
    """
    ids = [block.id for block in profile.blocks]
    rows = {row.key[1:5] for block in profile.blocks for row in block.costs}
    of_contexts = {context: sorted(each for each in _splits(rows) if each[1] == context) for _, context, *_ in rows}

    @cache
    def fitting(
        begin: int, end: int, samples: int, split: tuple[int, ...], replicas: int, in_flight: int
    ) -> StageCost | None:
        shards, context, expert, expert_shards = split
        found, copies = [], replicas * context
        for level, again in itertools.product(
            levels, itertools.product((False, True) if recompute else (False,), repeat=end - begin)
        ):
            zero = Zero(level, copies) if level and copies > 1 else WHOLE
            experts = Experts.among(expert, shards, copies, zero.level, zero.group, split=expert_shards)
            how: dict[str, Any] = {"context": context, "zero": zero, "experts": experts}
            try:
                cost = stage_costs(profile, ids[begin:end], samples, shards, recompute=again, **how)
            except UsageError:  # no costs
                return None
            held = cost.static_bytes + in_flight * cost.activation_bytes + cost.workspace_bytes
            if memory is None or held <= memory:
                found.append(cost)
        return min(found, key=lambda cost: cost.forward_ns + cost.backward_ns, default=None)

    best = math.inf
    for size, splits in itertools.product(range(1, mini_batch + 1), of_contexts.values()):
        if mini_batch % size:
            continue
        count = mini_batch // size
        ways = [
            (split, replicas)
            for split in splits
            for replicas in range(1, num_devices // (split[0] * split[1]) + 1)
            if size % replicas == 0 and split[0] * split[1] * replicas % split[2] == 0
        ]
        for stages in range(1, min(len(ids), num_devices) + 1):
            for widths in _within(ways, stages, num_devices):
                for cuts in itertools.combinations(range(1, len(ids)), stages - 1):
                    times, ends = [], []
                    for place, (begin, end) in enumerate(itertools.pairwise([0, *cuts, len(ids)])):
                        split, replicas = widths[place]
                        own = fitting(begin, end, size // replicas, split, replicas, min(count, stages - place))
                        if own is None or count * (own.forward_ns + own.backward_ns) >= best:
                            break  # its devices work so long
                        times.append((own.forward_ns, own.backward_ns))
                        ends.append(sums_ns(own.gradient_bytes, replicas * split[1]))
                    else:
                        found = one_f_one_b(*zip(*times, strict=True), count, hop_ns, ends)
                        best = min(best, found)
                        yield found


def _splits(rows: Iterable[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Shards, parts of sequences, devices that share experts, and how many of these split each, as blocks have rows.

    What of these blocks without experts have they have with any number that shares others' experts.
    """
    known = set(rows)
    return {(*plain[:2], *own[2:]) for plain in known for own in known}


def _within(ways: Sequence[_Way], stages: int, num_devices: int) -> Iterator[tuple[_Way, ...]]:
    """[stage] its way, so that there are devices for all."""
    if not stages:
        yield ()
        return
    for way in ways:
        (shards, context, *_), replicas = way
        left = num_devices - shards * context * replicas
        if left >= stages - 1:
            for others in _within(ways, stages - 1, left):
                yield (way, *others)


def one_f_one_b(
    forwards: Sequence[int], backwards: Sequence[int], count: int, hop_ns: int = 0, ends: Sequence[int] = ()
) -> int:
    """Ns of 1F1B where each stage has devices of its own; a message to the next takes ``hop_ns`` and no link, and a
    stage is not done before what comes at its end."""
    stages = len(forwards)
    orders = []
    for stage in range(stages):
        warmup = min(count, stages - 1 - stage)
        order = [("F", index) for index in range(warmup)]
        for index in range(count):
            order += [("F", index + warmup)] if index + warmup < count else []
            order.append(("B", index))
        orders.append(order)
    ended: dict[tuple[str, int, int], int] = {}
    done, free = [0] * stages, [0] * stages
    while any(done[stage] < 2 * count for stage in range(stages)):
        for stage in range(stages):
            while done[stage] < 2 * count:
                kind, index = orders[stage][done[stage]]
                if kind == "F":
                    needed = ("F", stage - 1, index) if stage else None
                else:
                    needed = ("B", stage + 1, index) if stage < stages - 1 else ("F", stage, index)
                if needed is not None and needed not in ended:
                    break
                ready = 0 if needed is None else ended[needed] + hop_ns * (needed[1] != stage)
                free[stage] = max(free[stage], ready) + (forwards if kind == "F" else backwards)[stage]
                ended[kind, stage, index] = free[stage]
                done[stage] += 1
    return max(map(sum, itertools.zip_longest(free, ends, fillvalue=0)))
