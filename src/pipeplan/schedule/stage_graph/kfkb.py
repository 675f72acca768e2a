"""kFkB: how many forwards a stage starts with, by Table 3.2, then k backwards and k forwards in turn."""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan.errors import UsageError
from pipeplan.model.workload import Workload
from pipeplan.partition.in_flight import KFKB, kfkb_word, samples_in_flight
from pipeplan.schedule.stage_graph.stages import Stages
from pipeplan.simulate.memory import fits
from pipeplan.simulate.timing import Orders, TaskGraph, earliest_starts, with_links

__all__ = ["best_kfkb_orders", "kfkb_orders", "least_ks"]


def kfkb_orders(workload: Workload, graph: TaskGraph, k: int | Sequence[int] = 1) -> Orders:
    """kFkB with the samples in flight of Table 3.2, rounded up to micro-batches; W follows its I at once.

    ``k`` is that of all stages or [stage]. Equal to 1F1B on chains of one size. Table 3.2 lets some stages wait for
    each other where neither ``k * microbatch_size`` divides the other's; then a stage starts with as many more as it
    needs.

    Raises:
        UsageError: a device has several stages.
    """
    stages = Stages(graph)
    _require_one_stage_each(workload)
    ks = [k] * stages.count if isinstance(k, int) else k
    orders: list[list[int]] = [[] for _ in workload.devices]
    for stage, word in enumerate(_words(stages, ks)):
        order = list(stages.tasks(stage, word))
        for device in workload.stages[stage].devices:
            orders[device] += order
    return orders


def least_ks(graph: TaskGraph, choices: Sequence[int] = (1, 2, 4, 8)) -> list[int]:
    """[stage] the k with which fewest samples are in flight (3.10.2); of equals what asks least of stages before it.

    Of those the first of ``choices``, of which the first is always possible.
    """
    stages = Stages(graph)
    found = [choices[0]] * stages.count
    held = [0] * stages.count
    for stage in reversed(range(stages.count)):

        def costs(k: int, stage: int = stage) -> tuple[int, int]:
            own = stages.needed(stage, k, found, held)
            flow = KFKB(k, stages.sizes[stage])
            asked = (
                min(samples_in_flight(KFKB(other, stages.sizes[before]), flow, own) for other in choices)
                for before in stages.before[stage]
            )
            return own, max(asked, default=0)

        possible = [k for k in choices if k <= stages.counts[stage]] or choices[:1]
        found[stage] = min(possible, key=costs)
        held[stage] = stages.needed(stage, found[stage], found, held)
    return found


def best_kfkb_orders(workload: Workload, graph: TaskGraph) -> Orders:
    """The shortest kFkB that fits in memory: with one k for all stages, 1, 2, 4, ..., or with :func:`least_ks`.

    Of equals the first; without memory for any, the one with :func:`least_ks`.

    Raises:
        UsageError: a device has several stages.
    """
    most = max(Stages(graph).counts)
    least = kfkb_orders(workload, graph, least_ks(graph))
    tried = [least, *(kfkb_orders(workload, graph, 1 << power) for power in range(most.bit_length()))]
    return min((orders for orders in tried if fits(graph, orders)), key=lambda o: _makespan(graph, o), default=least)


def _makespan(graph: TaskGraph, orders: Orders) -> int:
    starts = earliest_starts(graph, with_links(graph, orders))
    return max(map(int.__add__, starts, graph.durations))


def _require_one_stage_each(workload: Workload) -> None:
    seen: dict[int, int] = {}
    for index, stage in enumerate(workload.stages):
        for device in stage.devices:
            if device in seen:
                raise UsageError(
                    f"kFkB has one stage per device; device {device} has stages {seen[device]} and {index}; choose "
                    "another --scheduler, or --placement one-to-one"
                )
            seen[device] = index


def _words(stages: Stages, ks: Sequence[int]) -> list[list[str]]:
    """[stage] ``"F"`` and ``"B"`` in the order of its kFkB schedule."""
    words: list[list[str]] = [[] for _ in ks]
    held = [0] * stages.count
    for stage in reversed(range(stages.count)):
        size, samples = stages.sizes[stage], stages.totals[stage]
        needed = [size * _least_start(stages, stage, ks[stage], other, words[other]) for other in stages.after[stage]]
        held[stage] = min(samples, max([stages.needed(stage, ks[stage], ks, held), *needed]))
        words[stage] = list(kfkb_word(KFKB(ks[stage], size), held[stage], samples))
    return words


def _least_start(stages: Stages, stage: int, k: int, after: int, word: Sequence[str]) -> int:
    """Forwards a stage must start with, or its backwards would wait for ones that wait for its forwards.

    Before its backward number j it has done k forwards more for every k backwards; ``word`` says how many the stage
    after it runs before the backward whose gradients backward j waits for.
    """
    size, other = stages.sizes[stage], stages.sizes[after]
    forwards = [index - count for count, index in enumerate(i for i, kind in enumerate(word) if kind == "B")]
    return max(
        -(-forwards[((j + 1) * size - 1) // other] * other // size) - j // k * k for j in range(stages.counts[stage])
    )
