"""Every layout of a small chain on devices of several kinds, by enumeration, each run with 1F1B."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from pipeplan.costs import stage_costs
from pipeplan.errors import UsageError
from pipeplan.files import CostRow, Profile
from references.every_width import one_f_one_b


class Kind(NamedTuple):
    """So many equal devices; of no ``memory`` without a limit; with a ``profile`` of their own, or that of all."""

    count: int
    speed: str
    memory: int | None
    profile: Profile | None = None


def every_layout(profile: Profile, kinds: Sequence[Kind], mini_batch: int, *, recompute: bool) -> Iterator[int]:
    """Ns of each that fits: all cuts, micro-batch sizes, shards x replicas of a stage and the kinds of its devices.

    Where ``recompute``, all blocks of a stage may be, each by itself.
    """
    ids = [block.id for block in profile.blocks]
    groups = [each for each in itertools.product(*(range(kind.count + 1) for kind in kinds)) if any(each)]
    sizes = [size for size in range(1, mini_batch + 1) if mini_batch % size == 0]
    for size, stages in itertools.product(sizes, range(1, len(ids) + 1)):
        count = mini_batch // size
        for own in itertools.product(groups, repeat=stages):
            if any(sum(taken) > kind.count for taken, kind in zip(zip(*own, strict=True), kinds, strict=True)):
                continue
            for cuts in itertools.combinations(range(1, len(ids)), stages - 1):
                ranges = list(itertools.pairwise([0, *cuts, len(ids)]))
                each = [
                    list(_ways(profile, ids[begin:end], group, kinds, size, min(count, stages - at), recompute))
                    for at, ((begin, end), group) in enumerate(zip(ranges, own, strict=True))
                ]
                for ways in itertools.product(*each):
                    yield one_f_one_b([forward for forward, _ in ways], [backward for _, backward in ways], count)


def _ways(
    profile: Profile,
    blocks: Sequence[str],
    group: Sequence[int],
    kinds: Sequence[Kind],
    size: int,
    in_flight: int,
    recompute: bool,
) -> Iterator[tuple[int, int]]:
    """Ns of forward and backward of a stage on so many devices of each kind, for every way to run it there."""
    here = [kind for number, kind in zip(group, kinds, strict=True) if number]
    speed = min(Fraction(kind.speed) for kind in here)
    room = min((kind.memory for kind in here if kind.memory is not None), default=None)
    profile = _joined([kind.profile or profile for kind in here])
    for shards in range(1, sum(group) + 1):
        replicas, rest = divmod(sum(group), shards)
        if rest or size % replicas:
            continue
        for again in itertools.product((False, True) if recompute else (False,), repeat=len(blocks)):
            try:
                cost = stage_costs(profile, blocks, size // replicas, shards, recompute=again)
            except UsageError:  # no such rows
                continue
            held = cost.static_bytes + in_flight * cost.activation_bytes + cost.workspace_bytes
            if room is not None and held > room:
                continue
            times = [
                _times(profile, id_, size // replicas, shards, own) for id_, own in zip(blocks, again, strict=True)
            ]
            yield tuple(sum(-(-ns // speed) for ns in column) for column in zip(*times, strict=True))


def _times(profile: Profile, id_: str, samples: int, shards: int, again: bool) -> tuple[int, int]:
    (block,) = (block for block in profile.blocks if block.id == id_)
    row = next(_rows(block.costs, samples, shards))
    assert row.backward_ns is not None
    return row.forward_ns, row.backward_ns + again * row.forward_ns


def _rows(rows: Sequence[CostRow], samples: int, shards: int) -> Iterator[CostRow]:
    return (row for row in rows if (row.microbatch_size, row.shards) == (samples, shards))


_NUMBERS = ("forward_ns", "backward_ns", "activation_bytes", "workspace_bytes")


def _joined(profiles: Sequence[Profile]) -> Profile:
    """The same blocks with the most of each number."""
    blocks = []
    for own in zip(*(profile.blocks for profile in profiles), strict=True):
        each = (sorted(block.costs, key=lambda row: (row.microbatch_size, row.shards)) for block in own)
        rows = []
        for same in zip(*each, strict=True):
            assert len({(row.microbatch_size, row.shards) for row in same}) == 1
            rows.append(same[0].model_copy(update={key: max(getattr(row, key) for row in same) for key in _NUMBERS}))
        blocks.append(own[0].model_copy(update={"costs": tuple(rows)}))
    return profiles[0].model_copy(update={"blocks": tuple(blocks)})
