"""Greedy: backwards as soon as they can run, no more samples in flight than the iteration time needs (3.10.1)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from pipeplan.model.workload import Workload
from pipeplan.schedule.stage_graph.run import Rule, Run
from pipeplan.schedule.stage_graph.stages import NEVER, Stages
from pipeplan.simulate.timing import Orders, TaskGraph

__all__ = ["greedy_orders"]


def greedy_orders(workload: Workload, graph: TaskGraph) -> Orders:
    """Backwards as soon as they can run, and as few samples in flight as the iteration time allows (3.10.1).

    The iteration time is the least that is found with what fits in memory, where devices have one stage each.
    Stage after stage from the last to the first, the samples it may have in flight are lowered as far as the whole
    iteration gets no longer. Each trial runs all devices in time, O(actions log actions), and ends as soon as it is
    late; after ``_MOST_STARTS`` actions in all trials the stages that are left stay as they are. Devices may have
    several stages and stages several devices; of several actions that can run, that of the deeper stage goes first.
    """
    stages = Stages(graph)
    best = _first_run(stages)
    for stage in reversed(range(stages.count)):
        best = _tightened(stages, best, stage)
    assert len(best.orders) == len(workload.devices)
    return best.orders


_MOST_STARTS = 500_000


def _first_run(stages: Stages) -> Run:
    """With as many samples in flight as there is room for, or as short with as many as 1F1B has, or somewhat more.

    Where that leaves too few for a stage with larger micro-batches, memory is not looked at.
    """
    best = min((_fullest(stages, stages.room, first) for first in (False, True)), key=lambda run: run.makespan)
    if best.makespan == NEVER:
        best = min((_fullest(stages, stages.totals, first) for first in (False, True)), key=lambda run: run.makespan)
    ones, held = [1] * stages.count, [0] * stages.count
    for stage in reversed(range(stages.count)):
        held[stage] = stages.needed(stage, 1, ones, held)
    for quarters in (4, 5, 6, 8, 12):
        some = [min(rule.samples, samples * quarters // 4) for rule, samples in zip(best.rules, held, strict=True)]
        run = Run(stages, list(map(Rule, some)), best.makespan)
        if run.makespan <= best.makespan:
            return run
    return best


def _fullest(stages: Stages, samples: Sequence[int], forward_first: bool) -> Run:
    return Run(stages, [Rule(most, forward_first) for most in samples])


def _tightened(stages: Stages, best: Run, stage: int) -> Run:
    """As short a run with the fewest samples of a stage in flight; backwards first, if that is as short."""
    found: dict[int, Run] = {}
    size, most = stages.sizes[stage], best.most_held
    guess = stages.needed(stage, 1, [1] * stages.count, most) // size

    def is_as_short(count: int) -> bool:
        for forward_first in (False, True):
            if stages.num_starts > _MOST_STARTS:
                return False
            rules = best.rules.copy()
            rules[stage] = Rule(count * size, forward_first)
            run = Run(stages, rules, best.makespan)
            if run.makespan <= best.makespan:
                found[count] = run
                return True
        return False

    high = -(-most[stage] // size)
    least = _least(is_as_short, min(guess, high) - 1, high)
    if least == high and best.rules[stage].forward_first:
        is_as_short(high)
    return found.get(least, best)


def _least(is_good: Callable[[int], bool], guess: int, high: int) -> int:
    """The least number from 1 on that is good, looked for from ``guess`` on; ``high`` is good, as are all above one."""
    low, step = 0, 1
    if guess < 1 or not is_good(guess):
        low = max(0, guess)
        while low + step < high and not is_good(low + step):
            low, step = low + step, 2 * step
        high = min(high, low + step)
    else:
        high = guess
        while high > step and is_good(high - step):
            high, step = high - step, 2 * step
        low = max(0, high - step)
    return low + 1 + bisect_left(range(low + 1, high), True, key=is_good)
