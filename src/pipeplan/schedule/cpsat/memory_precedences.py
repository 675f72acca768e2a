"""What memory says about order: an operation of micro-batch m waits for another one of micro-batch m - distance.

When (x, m) starts on a device, everything that x depends on has begun for micro-batches 0..m, since operations run
micro-batches in order. What these hold and what has been given back must fit. Let ``e_z`` be how many instances of z
have ended by then. It is at most m where z follows x, at most m + 1 elsewhere (among the instances that count), and at
most ``e_y`` where z follows y. So for each z on the device there is a least ``e_z``, and it grows with m one by one:
``e_z >= m + 1 - distance``. Then (z, m - distance) ends before (x, m) starts.

For a chain whose forward holds one unit until its backward and K units of memory this says: forward m comes after
backward m - K.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.workload.one_microbatch import Hold, OneMicrobatch

__all__ = ["Recurrence", "memory_recurrences"]


@dataclass(frozen=True, slots=True)
class Recurrence:
    """(target, m) starts after (source, m - distance) has ended, for every m >= distance."""

    source: int
    target: int
    distance: int


def memory_recurrences(problem: OneMicrobatch) -> list[Recurrence]:
    """All of them that memory implies and that are not implied by another one of the same pair."""
    found: dict[tuple[int, int], int] = {}
    for device, capacity in enumerate(problem.capacity):
        if capacity is None:
            continue
        holds = [hold for hold in problem.holds if device in problem.devices[hold.source]]
        for target in problem.on_device[device]:
            begun = [hold for hold in holds if problem.path(hold.source, target) >= 0]
            room = capacity - problem.workspace[target]
            if problem.acquire[target] + problem.workspace[target] == 0:
                continue
            for source in dict.fromkeys(hold.target for hold in begun):
                distance = _distance(problem, begun, target, source, room)
                if distance is not None:
                    pair = source, target
                    found[pair] = min(found.get(pair, distance), distance)
    return [Recurrence(source, target, distance) for (source, target), distance in sorted(found.items())]


def _distance(problem: OneMicrobatch, begun: list[Hold], target: int, source: int, room: int) -> int | None:
    """The largest d with which ``e_source = m + 1 - d`` still fits; None if no value of ``e_source`` is too small.

    Held then: ``sum(size * (m + 1 - e))``, where ``m + 1 - e`` is at least 1 for what follows the target, at least d
    for what follows the source, else 0. Only d >= 1 makes sense where the source follows the target.
    """
    least = [1 if problem.path(target, hold.target) >= 0 else 0 for hold in begun]
    after = [problem.path(source, hold.target) >= 0 for hold in begun]
    fixed = sum(hold.size * few for hold, few, late in zip(begun, least, after, strict=True) if not late)
    growing = [(hold.size, few) for hold, few, late in zip(begun, least, after, strict=True) if late]
    per_one = sum(size for size, _ in growing)
    if per_one == 0:
        return None
    distance = (room - fixed) // per_one
    return max(distance, max(few for _, few in growing))
