"""Every layout of a small chain whose stages have devices of their own, by enumeration, each run with 1F1B."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache

from pipeplan.costs import StageCost, stage_costs
from pipeplan.costs.zero import WHOLE, Zero
from pipeplan.errors import UsageError
from pipeplan.files import Profile


def every_width(
    profile: Profile, num_devices: int, mini_batch: int, memory: int | None, *, recompute: bool, zero: bool
) -> Iterator[int]:
    """Ns of each layout that fits: all cuts, micro-batch sizes, and shards x replicas of every stage.

    Where ``recompute``, each block may be; where ``zero``, replicas of every stage divide optimizer state.
    """
    ids = [block.id for block in profile.blocks]
    ways = [
        (shards, replicas) for shards in range(1, num_devices + 1) for replicas in range(1, num_devices // shards + 1)
    ]

    @cache
    def fitting(begin: int, end: int, samples: int, shards: int, replicas: int, in_flight: int) -> StageCost | None:
        found = []
        for again in itertools.product((False, True) if recompute else (False,), repeat=end - begin):
            sharing = Zero(1, replicas) if zero and replicas > 1 else WHOLE
            try:
                cost = stage_costs(profile, ids[begin:end], samples, shards, recompute=again, zero=sharing)
            except UsageError:  # no costs
                return None
            held = cost.static_bytes + in_flight * cost.activation_bytes + cost.workspace_bytes
            if memory is None or held <= memory:
                found.append(cost)
        return min(found, key=lambda cost: cost.forward_ns + cost.backward_ns, default=None)

    for size in range(1, mini_batch + 1):
        if mini_batch % size:
            continue
        count = mini_batch // size
        for stages in range(1, min(len(ids), num_devices) + 1):
            for widths in itertools.product([way for way in ways if size % way[1] == 0], repeat=stages):
                if sum(shards * replicas for shards, replicas in widths) > num_devices:
                    continue
                for cuts in itertools.combinations(range(1, len(ids)), stages - 1):
                    ranges = itertools.pairwise([0, *cuts, len(ids)])
                    costs = [
                        fitting(begin, end, size // replicas, shards, replicas, min(count, stages - place))
                        for place, ((begin, end), (shards, replicas)) in enumerate(zip(ranges, widths, strict=True))
                    ]
                    known = [cost for cost in costs if cost is not None]
                    if len(known) == stages:
                        yield one_f_one_b([cost.forward_ns for cost in known], [x.backward_ns for x in known], count)


def one_f_one_b(forwards: Sequence[int], backwards: Sequence[int], count: int) -> int:
    """Ns of 1F1B where each stage has devices of its own and messages take no time."""
    stages = len(forwards)
    orders = []
    for stage in range(stages):
        warmup = min(count, stages - 1 - stage)
        order = [("F", index) for index in range(warmup)]
        for index in range(count):
            order += [("F", index + warmup)] if index + warmup < count else []
            order.append(("B", index))
        orders.append(order)
    ends: dict[tuple[str, int, int], int] = {}
    done, free = [0] * stages, [0] * stages
    while any(done[stage] < 2 * count for stage in range(stages)):
        for stage in range(stages):
            while done[stage] < 2 * count:
                kind, index = orders[stage][done[stage]]
                if kind == "F":
                    needed = ("F", stage - 1, index) if stage else None
                else:
                    needed = ("B", stage + 1, index) if stage < stages - 1 else ("F", stage, index)
                if needed is not None and needed not in ends:
                    break
                ready = 0 if needed is None else ends[needed]
                free[stage] = max(free[stage], ready) + (forwards if kind == "F" else backwards)[stage]
                ends[kind, stage, index] = free[stage]
                done[stage] += 1
    return max(free)
