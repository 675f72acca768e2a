"""GraphPipe's schedules of stage graphs: kFkB and greedy.

Greedy: backwards as soon as they can run, no more samples in flight than the iteration time needs (3.10.1).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from pipeplan.errors import UsageError
from pipeplan.partition.graph.in_flight import KFKB, kfkb_word, samples_in_flight
from pipeplan.schedule.stage_graph.stages import NEVER, Rule, Stages, TrialRun
from pipeplan.workload.kinds import Role
from pipeplan.workload.memory import fits
from pipeplan.workload.task_graph import Orders, TaskGraph, earliest_starts, with_links
from pipeplan.workload.workload import Workload

__all__ = ["best_kfkb_orders", "greedy_orders", "kfkb_orders", "least_ks"]


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


def _words(stages: Stages, ks: Sequence[int]) -> list[list[Role]]:
    """[stage] forwards and backwards in the order of its kFkB schedule."""
    words: list[list[Role]] = [[] for _ in ks]
    held = [0] * stages.count
    for stage in reversed(range(stages.count)):
        size, samples = stages.sizes[stage], stages.totals[stage]
        needed = [size * _least_start(stages, stage, ks[stage], other, words[other]) for other in stages.after[stage]]
        held[stage] = min(samples, max([stages.needed(stage, ks[stage], ks, held), *needed]))
        words[stage] = list(kfkb_word(KFKB(ks[stage], size), held[stage], samples))
    return words


def _least_start(stages: Stages, stage: int, k: int, after: int, word: Sequence[Role]) -> int:
    """Forwards a stage must start with, or its backwards would wait for ones that wait for its forwards.

    Before its backward number j it has done k forwards more for every k backwards; ``word`` says how many the stage
    after it runs before the backward whose gradients backward j waits for.
    """
    size, other = stages.sizes[stage], stages.sizes[after]
    forwards = [index - count for count, index in enumerate(i for i, role in enumerate(word) if role is Role.BACKWARD)]
    return max(
        -(-forwards[((j + 1) * size - 1) // other] * other // size) - j // k * k for j in range(stages.counts[stage])
    )


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


def _first_run(stages: Stages) -> TrialRun:
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
        run = TrialRun(stages, list(map(Rule, some)), best.makespan)
        if run.makespan <= best.makespan:
            return run
    return best


def _fullest(stages: Stages, samples: Sequence[int], forward_first: bool) -> TrialRun:
    return TrialRun(stages, [Rule(most, forward_first) for most in samples])


def _tightened(stages: Stages, best: TrialRun, stage: int) -> TrialRun:
    """As short a run with the fewest samples of a stage in flight; backwards first, if that is as short."""
    found: dict[int, TrialRun] = {}
    size, most = stages.sizes[stage], best.most_held
    guess = stages.needed(stage, 1, [1] * stages.count, most) // size

    def is_as_short(count: int) -> bool:
        for forward_first in (False, True):
            if stages.num_starts > _MOST_STARTS:
                return False
            rules = best.rules.copy()
            rules[stage] = Rule(count * size, forward_first)
            run = TrialRun(stages, rules, best.makespan)
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
