"""Parts of a schedule that may change while the rest stays: the neighbourhoods of large-neighbourhood search.

Windows in time let everything in them change places. Longer stretches, up to the whole run, are possible where only
some actions may: those of a few devices next to each other, of a few micro-batches, of some kinds, or any at random;
the others keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from pipeplan.schedule.problem import Problem

__all__ = ["WINDOW_TASKS", "Neighbourhood", "random_neighbourhood"]

WINDOW_TASKS = (40, 80, 160, 320)
"""Sizes of windows in which everything may change: what CP-SAT decides in about a second, and less."""


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """What starts from ``begin_ns`` on and before ``end_ns``; of that ``free`` changes places, all if None."""

    begin_ns: int
    end_ns: int
    free: Callable[[int], bool] | None = None


def random_neighbourhood(problem: Problem, starts: Sequence[int], random: Random) -> Neighbourhood:
    """One of random kind, place and size in a schedule that starts its tasks at ``starts``."""
    moments = sorted(starts)
    kind = random.choice(("window", "window", "devices", "microbatches", "weights", "chain", "any"))
    share = {"window": 0.0, "devices": 0.33, "weights": 0.33, "chain": 0.33}.get(kind, 1.0)
    size = random.choice(WINDOW_TASKS) if kind == "window" else max(WINDOW_TASKS[0], int(share * len(moments)))
    first = random.randrange(max(1, len(moments) - size // 2)) if size < len(moments) else 0
    end = moments[first + size] if first + size < len(moments) else moments[-1] + 1
    return Neighbourhood(moments[first], end, _free(problem, kind, random))


def _free(problem: Problem, kind: str, random: Random) -> Callable[[int], bool] | None:
    """What may change places in a neighbourhood of some kind."""
    count, kinds, devices = problem.num_microbatches, problem.kinds, problem.devices
    if kind == "devices":
        few = min(problem.num_devices, random.randint(2, 4))
        lowest = random.randrange(problem.num_devices - few + 1)
        chosen = set(range(lowest, lowest + few))
        chosen.update(
            problem.num_devices + number
            for number, link in enumerate(problem.workload.links)
            if not chosen.isdisjoint(link)
        )
        return lambda task: not chosen.isdisjoint(devices[task // count])
    if kind == "microbatches":
        few = min(count, random.randint(2, 4))
        lowest = random.randrange(count - few + 1)
        return lambda task: lowest <= task % count < lowest + few
    if kind == "weights":
        return lambda task: kinds[task // count] == "W"
    if kind == "chain":
        return lambda task: kinds[task // count] != "W"
    if kind == "any":
        some = frozenset(task for task in range(problem.num_operations * count) if random.random() < 0.15)
        return lambda task: task in some
    return None
