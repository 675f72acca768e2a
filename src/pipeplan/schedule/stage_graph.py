"""Schedules of stage graphs whose stages have micro-batch sizes of their own (GraphPipe, thesis 3.6 and 3.10).

*kFkB*: how many forwards a stage starts with follows from the stages after it (Table 3.2); then k backwards and k
forwards in turn. *Greedy* (3.10.1): backwards as soon as their gradients are there, and no more samples in flight than
the iteration time needs. Algorithm 4 as printed falls short of its own Fig. 3.5; what is different here and why is said
in ``docs/algorithms/graph-schedules.md``.

Here: only orders of the devices. Not here: which blocks form the stages (partition.graph).

*Samples in flight* of a stage are those between the start of their forward and the end of their backward (of W, where
it is split).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import groupby

from pipeplan.errors import UsageError
from pipeplan.partition.graph.in_flight import KFKB, kfkb_word, samples_in_flight
from pipeplan.search_constants import KFKB_CHOICES, MOST_STARTS, ROOM_QUARTERS
from pipeplan.time_limit import checked, checkpoint
from pipeplan.workload.engine import with_links
from pipeplan.workload.kinds import BACKWARD_ROLES, Role
from pipeplan.workload.memory import capacities, fits, num_that_fit
from pipeplan.workload.task_graph import NEVER, Orders, TaskGraph, earliest_starts
from pipeplan.workload.workload import Workload

_RANKS = {Role.FORWARD: 2, Role.WEIGHT_GRAD: 3}
"""What goes first where several could run; all other roles, which are backwards, have rank 1."""


@dataclass
class Stages:
    """Facts about the stages of a task graph, in samples and micro-batches; and how much trials started.

    ``num_starts`` counts an action once on each of its devices, all of which are asked for it.
    """

    graph: TaskGraph
    num_starts: int = 0

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.graph.workload.stages)

    @cached_property
    def sizes(self) -> list[int]:
        """[stage] samples in a micro-batch."""
        return [stage.microbatch_size for stage in self.graph.workload.stages]

    @cached_property
    def counts(self) -> list[int]:
        """[stage] micro-batches in an iteration."""
        workload = self.graph.workload
        return [workload.mini_batch // (size * workload.num_routes) for size in self.sizes]

    @cached_property
    def roles(self) -> list[Role]:
        """[operation]"""
        return [operation.role for operation in self.graph.workload.operations]

    @cached_property
    def stage_of(self) -> list[int]:
        """[operation]"""
        return [operation.stage for operation in self.graph.workload.operations]

    @cached_property
    def operation_of(self) -> dict[tuple[int, Role], int]:
        """{(stage, role): operation}"""
        return {pair: x for x, pair in enumerate(zip(self.stage_of, self.roles, strict=True))}

    @cached_property
    def on_device(self) -> list[list[int]]:
        """[device] its operations."""
        devices = range(len(self.graph.workload.devices))
        return [[x for x, there in enumerate(self.graph.workload.resources) if device in there] for device in devices]

    @cached_property
    def after(self) -> list[list[int]]:
        """[stage] the stages its outputs go to."""
        edges = self.graph.workload.stage_edges
        return [sorted({target for source, target in edges if source == stage}) for stage in range(self.count)]

    @cached_property
    def totals(self) -> list[int]:
        """[stage] samples in an iteration."""
        return [size * count for size, count in zip(self.sizes, self.counts, strict=True)]

    @cached_property
    def room(self) -> list[int]:
        """[stage] samples that its devices could hold the activations of if they held no other stage's."""
        capacity = capacities(self.graph.workload)
        return [self._room(stage, capacity) for stage in range(self.count)]

    def _room(self, stage: int, capacity: Sequence[int | None]) -> int:
        workload, own = self.graph.workload, [x for x, other in enumerate(self.stage_of) if other == stage]
        each = sum(workload.effects[x].acquire for x in own)
        workspace = max(workload.effects[x].workspace for x in own)
        limits = (capacity[device] for device in workload.stages[stage].devices)
        fitting = min(num_that_fit(None if limit is None else limit - workspace, each) for limit in limits)
        return int(min(self.counts[stage], fitting)) * self.sizes[stage]

    @cached_property
    def taken(self) -> list[int]:
        """[action] samples that it brings into flight."""
        return list(self._samples(Role.FORWARD))

    @cached_property
    def given(self) -> list[int]:
        """[action] samples that are no longer in flight after it."""
        return list(self._samples(Role.BACKWARD, Role.WEIGHT_GRAD))

    @cached_property
    def needs(self) -> list[int]:
        """[action, message] ns from its start to the end of the iteration, at the least.

        What its operation has left, what depends on it; and for a forward all that its stage has left, since that ends
        with a backward (or I).
        """
        graph, workload = self.graph, self.graph.workload
        needs = [0] * graph.num_tasks
        for item in checked(reversed(workload.items_in_order), 4):
            after = left = 0
            is_forward = item < len(self.roles) and self.roles[item] is Role.FORWARD
            for task in reversed(range(*graph.offsets[item : item + 2])):
                ways = [lag + needs[other] for other, lag in graph.successors[task]]
                left += graph.durations[task]
                needs[task] = graph.durations[task] + max([after, *ways])
                if is_forward:
                    needs[task] = max(needs[task], left + self._backwards_left(item, task, needs))
                after = needs[task]
        return needs

    def _backwards_left(self, forward: int, task: int, needs: Sequence[int]) -> int:
        """Ns of the backwards that come after a forward, and of the way of the last one's gradients."""
        stage, graph = self.stage_of[forward], self.graph
        backward = next((x for role in BACKWARD_ROLES if (x := self.operation_of.get((stage, role))) is not None), 0)
        microbatch, _ = graph.workload.slots[forward].name(task - graph.offsets[forward])
        last = graph.offsets[backward + 1] - 1
        return (self.counts[stage] - microbatch - 1) * graph.durations[last] + needs[last]

    def _samples(self, *roles: Role) -> Iterator[int]:
        for role, slots in zip(self.roles, self.graph.workload.slots, strict=False):
            for number in range(len(slots)):
                begin, end = slots.samples(number)
                yield end - begin if role in roles else 0

    def needed(self, stage: int, k: int, ks: Sequence[int], held: Sequence[int]) -> int:
        """Samples in flight of a stage by Table 3.2, given those of the stages after it."""
        own = KFKB(k, self.sizes[stage])
        after = ((KFKB(ks[other], self.sizes[other]), held[other]) for other in self.after[stage])
        return min(self.totals[stage], max((samples_in_flight(own, *flow) for flow in after), default=own.samples))

    def tasks(self, stage: int, word: Iterable[Role]) -> Iterator[int]:
        """The actions of a stage in the order of forwards and backwards, which mean whole micro-batches."""
        back = (*BACKWARD_ROLES, Role.WEIGHT_GRAD)
        forward = iter(self._by_microbatch(stage, Role.FORWARD))
        backwards = [iter(self._by_microbatch(stage, role)) for role in back if (stage, role) in self.operation_of]
        for turn in word:
            for tasks in [forward] if turn is Role.FORWARD else backwards:
                yield from next(tasks)

    def _by_microbatch(self, stage: int, role: Role) -> list[list[int]]:
        """[micro-batch] its actions of this role: one, or two parts."""
        operation = self.operation_of[stage, role]
        slots, first = self.graph.workload.slots[operation], self.graph.offsets[operation]
        numbers = groupby(range(len(slots)), key=lambda number: slots.name(number)[0])
        return [[first + number for number in group] for _, group in numbers]


@dataclass(frozen=True, slots=True)
class Rule:
    """When a stage may run a forward: if it then has few enough samples in flight.

    With ``forward_first`` a forward goes before a backward that could run as well.
    """

    samples: int
    forward_first: bool = False


class TrialRun:
    """All devices in time. Whatever of its actions can run first by the rules, a device runs as soon as it is free.

    ``device_orders``; ``makespan`` in ns, very large where it would be over ``limit`` or where the rules leave too few
    samples for a stage with larger micro-batches; ``most_held`` [stage] samples. Of several devices' action each waits
    for the others. Links carry first come, first served.
    """

    def __init__(self, stages: Stages, rules: list[Rule], limit: int = NEVER) -> None:
        self.rules = rules
        self.makespan = 0
        self.most_held = [0] * stages.count
        self.device_orders: list[list[int]] = [[] for _ in stages.on_device]
        self._stages, self._waited = stages, False
        started, running = self._run(limit)
        stages.num_starts += sum(map(len, self.device_orders)) - running
        if self.makespan > limit or started < stages.graph.num_actions:
            self.makespan = NEVER

    def _rank(self, operation: int) -> tuple[int, int, int]:
        """Sort key of what goes first: backwards, forwards, weight gradients; then by depth."""
        stage, rank = self._stages.stage_of[operation], _RANKS.get(self._stages.roles[operation], 1)
        if rank == _RANKS[Role.FORWARD] and self.rules[stage].forward_first:
            rank = 0
        return rank, -self._stages.graph.workload.stage_depths[stage], operation

    def is_with(self, rules: list[Rule]) -> bool:
        """Whether it has run as it would with these rules, which ask for less that it never made use of."""
        return not self._waited and all(
            held <= other.samples <= own.samples and other.forward_first == own.forward_first
            for held, own, other in zip(self.most_held, self.rules, rules, strict=True)
        )

    def _run(self, limit: int) -> tuple[int, int]:
        """Run until all has run, or it is late: how many actions started, and how many devices still run one.

        These are the :class:`~pipeplan.workload.engine.Engine`'s events, in its order, in one loop: a look at a layout
        of a hundred devices runs a hundred thousand actions some seven times.
        """
        stages, graph, rules = self._stages, self._stages.graph, self.rules
        resources, operation_of, successors = graph.workload.resources, graph.operation_of, graph.successors
        durations, num_actions, orders = graph.durations, graph.num_actions, self.device_orders
        taken, given, needs = stages.taken, stages.given, stages.needs
        ends, following, waiting = graph.offsets[1:], graph.offsets[:-1], graph.num_predecessors.copy()
        ready_at, free = [0] * graph.num_tasks, [0] * graph.workload.num_resources
        held, most_held, room = [0] * stages.count, self.most_held, [rule.samples for rule in rules]
        ranked = [
            [(x, stages.stage_of[x], resources[x], len(resources[x]) > 1) for x in sorted(there, key=self._rank)]
            for there in stages.on_device
        ]
        num_devices, latest, started, asked = len(orders), 0, 0, 0
        events = [*range(num_devices)]  # a moment in ns x devices + the device that is to be asked then

        def hand_on(task: int, end: int, now: int) -> None:
            for other, lag in successors[task]:
                time = end + lag
                if lag < 0 and time < now:  # nothing starts before it is known that it may
                    time = now
                if ready_at[other] < time:
                    ready_at[other] = time
                left = waiting[other] = waiting[other] - 1
                if left:
                    continue
                ready, there = ready_at[other], resources[operation_of[other]]
                if other < num_actions:
                    for each in there:
                        if free[each] <= ready:
                            heappush(events, ready * num_devices + each)
                else:
                    (link,) = there
                    begin = free[link]
                    over = free[link] = (begin if begin > ready else ready) + durations[other]
                    hand_on(other, over, now)

        now = 0
        while events:
            asked += 1
            if not asked % 1024:
                checkpoint()
            now, device = divmod(heappop(events), num_devices)
            if free[device] > now:
                continue
            for x, stage, devices, together in ranked[device]:
                task = following[x]
                if task == ends[x] or waiting[task] or ready_at[task] > now:
                    continue
                takes = taken[task]
                holds = held[stage] + takes
                if takes and holds > room[stage]:
                    continue
                if together and any(free[other] > now for other in devices):
                    self._waited = True
                    break
                following[x] = task + 1
                started += 1
                held[stage] = holds - given[task]
                if most_held[stage] < holds:
                    most_held[stage] = holds
                end = now + durations[task]
                for each in devices:
                    free[each] = end
                    orders[each].append(task)
                    heappush(events, end * num_devices + each)
                hand_on(task, end, now)
                if latest < now + needs[task]:
                    latest = now + needs[task]
                    if latest > limit:
                        events.clear()
                break
        self.makespan = latest
        return started, sum(each > now for each in free[:num_devices])


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
    for stage, word in checked(enumerate(_words(stages, ks)), 1):
        order = list(stages.tasks(stage, word))
        for device in workload.stages[stage].devices:
            orders[device] += order
    return orders


def least_ks(graph: TaskGraph, choices: Sequence[int] = KFKB_CHOICES) -> list[int]:
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
                for before in range(stages.count)
                if stage in stages.after[before]
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
    return min((orders for orders in tried if fits(graph, orders)), key=lambda o: makespan(graph, o), default=least)


def makespan(graph: TaskGraph, orders: Orders) -> int:
    """Length of the orders in ns when every action starts as soon as it can."""
    return graph.makespan(earliest_starts(graph, with_links(graph, orders)))


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
        checkpoint()
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


def greedy_orders(workload: Workload, graph: TaskGraph, most_starts: int = MOST_STARTS) -> Orders:
    """Backwards as soon as they can run, and as few samples in flight as the iteration time allows (3.10.1).

    The iteration time is the least that is found with what fits in memory, where devices have one stage each.
    Stage after stage from the last to the first, the samples it may have in flight are lowered as far as the whole
    iteration gets no longer. Each trial runs all devices in time, O(actions log actions), and ends as soon as it is
    late; after ``most_starts`` actions in all trials the stages that are left stay as they are. Devices may have
    several stages and stages several devices; of several actions that can run, that of the deeper stage goes first.
    """
    stages = Stages(graph)
    best = _first_run(stages)
    for stage in reversed(range(stages.count)):
        best = _tightened(stages, best, stage, most_starts)
    return best.device_orders


def _first_run(stages: Stages) -> TrialRun:
    """With as many samples in flight as there is room for, or as short with as many as 1F1B has, or somewhat more.

    Where that leaves too few for a stage with larger micro-batches, memory is not looked at.
    """
    best, other = _fullest(stages, stages.room)
    if best.makespan == NEVER:
        best, other = _fullest(stages, stages.totals)
    ones, held = [1] * stages.count, [0] * stages.count
    for stage in reversed(range(stages.count)):
        held[stage] = stages.needed(stage, 1, ones, held)
    longer = [other]
    for quarters in ROOM_QUARTERS:
        some = [Rule(min(rule.samples, each * quarters // 4)) for rule, each in zip(best.rules, held, strict=True)]
        if any(run.is_with(some) for run in longer):
            continue
        run = TrialRun(stages, some, best.makespan)
        if run.makespan <= best.makespan:
            return run
        longer.append(run)
    return best


def _fullest(stages: Stages, samples: Sequence[int]) -> tuple[TrialRun, TrialRun]:
    """Two runs with so many samples in flight, the shorter first: backwards go first, where it is no longer.

    Forwards first is tried first, mostly the shorter where there are many: the other one ends as soon as it is late.
    """
    forwards, backwards = ([Rule(most, first) for most in samples] for first in (True, False))
    best = TrialRun(stages, forwards)
    other = TrialRun(stages, backwards, best.makespan)
    return (other, best) if other.makespan <= best.makespan else (best, other)


def _tightened(stages: Stages, best: TrialRun, stage: int, most_starts: int) -> TrialRun:
    """As short a run with the fewest samples of a stage in flight; backwards first, if that is as short."""
    found: dict[int, TrialRun] = {}
    size, most = stages.sizes[stage], best.most_held
    guess = stages.needed(stage, 1, [1] * stages.count, most) // size

    def is_as_short(count: int) -> bool:
        for forward_first in checked((False, True), 1):
            if stages.num_starts > most_starts:
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
