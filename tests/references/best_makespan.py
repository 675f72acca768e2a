"""The shortest schedule of a tiny problem, by trying every sequence in which its actions could start."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pipeplan.workload.one_microbatch import OneMicrobatch

__all__ = ["best_makespan"]


def best_makespan(
    problem: OneMicrobatch, below: float = math.inf, value: Callable[[Sequence[int]], int] = max
) -> int | None:
    """The least makespan in ns, each action starting as soon as it then can; None if there is none ``below`` that.

    Or the least ``value`` of the last ends [operation], where that is no less and never less for later ends. Each
    operation runs its micro-batches in order: they are alike, so that the n-th to run may be called the n-th.
    """
    count, best = problem.num_microbatches, below
    sources = [[(s, lag) for s, t, lag in problem.edges if t == target] for target in range(problem.num_operations)]
    targets = [[(t, lag) for s, t, lag in problem.edges if s == source] for source in range(problem.num_operations)]
    tails = [_after(problem, targets, x) for x in range(problem.num_operations)]
    ends: dict[tuple[int, int], int] = {}
    free, held = [0] * len(problem.work), [0] * len(problem.work)
    left = [count * work for work in problem.work]
    seen: dict[tuple[int, ...], list[tuple[int, ...]]] = {}

    def extend(done: tuple[int, ...]) -> None:
        """``done`` [operation] micro-batches have run."""
        nonlocal best
        if len(ends) == problem.num_operations * count:
            best = min(best, value([ends[x, count - 1] for x in range(problem.num_operations)]))
            return
        open_ends = [end for (x, m), end in sorted(ends.items()) if any(done[t] <= m for t, _ in targets[x])]
        last = [ends[x, count - 1] if m == count else 0 for x, m in enumerate(done)] if value is not max else []
        state = (*free, *open_ends, max(ends.values(), default=0), *last)
        if any(all(a <= b for a, b in zip(other, state, strict=True)) for other in seen.setdefault(done, [])):
            return  # the same has been done, and no part of it later
        seen[done].append(state)
        for x, m in zip(range(problem.num_operations), done, strict=True):
            if m == count or any((s, m) not in ends for s, _ in sources[x]):
                continue
            devices = problem.devices[x]
            if any(_too_much(problem, device, x, held[device]) for device in devices):
                continue
            begin = max([free[d] for d in devices] + [ends[s, m] + lag for s, lag in sources[x]])
            end, net = begin + problem.durations[x], problem.acquire[x] - problem.release[x]
            if end + tails[x] >= best or any(begin + left[d] >= best for d in devices):
                continue
            before = [free[d] for d in devices]
            ends[x, m] = end
            for d in devices:
                free[d], held[d], left[d] = end, held[d] + net, left[d] - problem.durations[x]
            extend((*done[:x], m + 1, *done[x + 1 :]))
            del ends[x, m]
            for d, time in zip(devices, before, strict=True):
                free[d], held[d], left[d] = time, held[d] - net, left[d] + problem.durations[x]

    extend((0,) * problem.num_operations)
    return None if best == below else int(best)


def _after(problem: OneMicrobatch, targets: list[list[tuple[int, int]]], operation: int) -> int:
    """The longest way in ns from an operation's end to its micro-batch's."""
    return max(
        (lag + problem.durations[t] + _after(problem, targets, t) for t, lag in targets[operation]),
        default=0,
    )


def _too_much(problem: OneMicrobatch, device: int, operation: int, held: int) -> bool:
    capacity = problem.capacity[device]
    return capacity is not None and held + problem.acquire[operation] + problem.workspace[operation] > capacity
