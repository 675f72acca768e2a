"""Repetends between the actions of all devices, of several micro-batches, where memory leaves little time to wait.

Without the time of what all devices run together (:mod:`pipeplan.workload.shared_time`) such an action is a moment at
which no device may be inside of another. A repetend of one micro-batch seldom has room for such moments; of two or
three there are many, most of which hold too much for too long. By Little's law what a device holds, over a repetend, is
bytes times time: what the ways through the pipeline take of its room without any waiting is known, and the rest is an
account of what may be waited. So a search that places actions from where the pipeline turns outwards, each as near to
what it is joined to as it may be, and books each wait, is through with a repetend time soon: where there are phases in
which forwards and backwards pass each other they go on for any number of devices. A solver finds that out again for
every order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from random import Random

from pipeplan.schedule.pattern import Pattern, compose, device_has_room, middle_repetition
from pipeplan.schedule.state import ScheduleStep, SearchState
from pipeplan.search_constants import (
    BETWEEN_FRUITLESS,
    BETWEEN_KNOWN,
    BETWEEN_NEAR,
    BETWEEN_OPERATIONS,
    BETWEEN_PLACED,
    BETWEEN_SHARE,
    BETWEEN_SLACK,
    BETWEEN_STEPS,
    BETWEEN_SWAPPED,
    BETWEEN_UNROLL,
    SECONDS_PER_LOOK,
    SECONDS_PER_PLACED,
)
from pipeplan.workload.bounds import period_bound
from pipeplan.workload.kinds import Role
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.shared_time import WithoutSharedTime
from pipeplan.workload.task_graph import NEVER

_Account = tuple[tuple[int, int], ...]
"""Devices, and the bytes that each holds longer while something waits."""


@dataclass(frozen=True, slots=True)
class _PlacedOperation:
    """An operation, joined to those that were placed before it.

    ``after`` and ``before`` are the placed ones that it waits for, and that wait for it, each with the account of a
    wait between. ``completes`` are the devices of which nothing is left to be placed then. ``twin`` is one that is
    placed already and that it is like in all it is joined to: what runs at the same moments there may do so here.
    """

    operation: int
    steps: int
    devices: tuple[int, ...]
    after: tuple[tuple[int, _Account], ...]
    before: tuple[tuple[int, _Account], ...]
    completes: tuple[int, ...]
    twin: int | None = None


@dataclass(frozen=True, slots=True)
class _LevelOfStages:
    """What later places depend on, once all before ``begin`` are placed.

    ``joined`` are placed operations next to what is not, of which moments in a repetend count; ``open_`` those on
    devices that are not complete; ``waiting`` the devices whose account may still be charged; ``moments``: whether
    there are actions of all devices to come.
    """

    begin: int
    joined: tuple[int, ...]
    open_: tuple[int, ...]
    devices: tuple[int, ...]
    waiting: tuple[int, ...]
    moments: bool


@dataclass(frozen=True, slots=True)
class Outwards:
    """The operations of a problem from where its pipeline turns outwards, level by level, in steps of ``unit`` ns.

    ``needed`` [device] are byte-steps that a micro-batch takes there if nothing waits.
    """

    problem: OneMicrobatch
    unit: int
    places: tuple[_PlacedOperation, ...]
    levels: tuple[_LevelOfStages, ...]
    steps: tuple[int, ...]
    needed: tuple[int, ...]

    @classmethod
    def of(cls, problem: OneMicrobatch, most_steps: int = BETWEEN_STEPS) -> Outwards | None:
        """None where messages take time, or an action without time is of some devices only, or holds are apart.

        The longest action has at most about ``most_steps``: others are rounded up, which keeps patterns valid.
        """
        everywhere = {device for devices in problem.devices for device in devices}
        moments = all(
            duration or len(devices) == len(everywhere)
            for duration, devices in zip(problem.durations, problem.devices, strict=True)
        )
        lags = problem.returns or any(lag for *_, lag in problem.edges)
        apart = any(problem.apart_on(device) for device in range(problem.num_devices))
        levels = None if lags or apart or not moments or not any(problem.durations) else _levels(problem)
        if levels is None:
            return None
        unit = max(problem.time_unit, -(-max(problem.durations) // most_steps))
        steps = tuple(-(-duration // unit) for duration in problem.durations)
        edges = _joining(problem)
        accounts, needed = _accounts(problem, edges, steps)
        order = [x for level in levels for x in level]
        when = {x: place for place, x in enumerate(order)}
        own = [x for x in order if steps[x] or problem.acquire[x] or problem.release[x] or problem.workspace[x]]
        last, charged = [-1] * problem.num_devices, [-1] * problem.num_devices
        for x in own:
            for device in problem.devices[x]:
                last[device] = when[x]
        after: dict[int, list[tuple[int, _Account]]] = {x: [] for x in order}
        before: dict[int, list[tuple[int, _Account]]] = {x: [] for x in order}
        for source, target in edges:
            account = accounts[source, target]
            if when[source] < when[target]:
                after[target].append((source, account))
            else:
                before[source].append((target, account))
            for device, _ in account:
                charged[device] = max(charged[device], when[source], when[target])
        twins = _twins(problem, edges, levels)
        places = tuple(
            _PlacedOperation(
                x,
                steps[x],
                problem.devices[x],
                tuple(after[x]),
                tuple(before[x]),
                tuple(device for device in problem.devices[x] if last[device] == when[x]),
                twins.get(x),
            )
            for x in order
        )
        ahead = tuple(
            _LevelOfStages(
                begin,
                tuple(sorted({y for e in edges for y, z in (e, e[::-1]) if when[y] < begin <= when[z]})),
                tuple(x for x in own if when[x] < begin and any(last[each] >= begin for each in problem.devices[x])),
                tuple(device for device, end in enumerate(last) if end >= begin),
                tuple(device for device, end in enumerate(charged) if end >= begin),
                any(not steps[x] for x in order[begin:]),
            )
            for begin in accumulate(map(len, levels[:-1]))
        )
        return cls(problem, unit, places, ahead, steps, tuple(needed))


def _levels(problem: OneMicrobatch) -> list[list[int]] | None:
    """Operations by how far their stage is from a last one; None where they are in several parts."""
    operations, roles = problem.workload.operations, problem.roles
    beside: list[set[int]] = [set() for _ in problem.workload.stages]
    further = set[int]()
    for source, target, _ in problem.edges:
        ends = operations[source].stage, operations[target].stage
        beside[ends[0]].add(ends[1])
        beside[ends[1]].add(ends[0])
        if roles[source] is roles[target] is Role.FORWARD:
            further.add(ends[0])
    turn = next(stage for stage in range(len(beside)) if stage not in further)
    seen, stages, levels = {turn}, [turn], list[list[int]]()
    placed = set[int]()
    neighbours: dict[int, set[int]] = {x: set() for x in problem.order}
    for source, target in _joining(problem):
        neighbours[source].add(target)
        neighbours[target].add(source)
    left = [[x for x in problem.order if operations[x].stage == stage] for stage in range(len(beside))]
    while stages:
        level = list[int]()
        for stage in stages:
            for x in left[stage]:
                if placed and not neighbours[x] & placed:
                    return None
                placed.add(x)
                level.append(x)
        levels.append(level)
        stages = sorted({other for stage in stages for other in beside[stage]} - seen)
        seen.update(stages)
    return levels if len(placed) == problem.num_operations else None


def _twins(problem: OneMicrobatch, edges: Sequence[tuple[int, int]], levels: Sequence[Sequence[int]]) -> dict[int, int]:
    """{operation: one of another device before it in its level that is like it}: branches that are alike run alike.

    Like each other are those that take and hold as much, and so do all that are joined to them or on their devices.
    """
    if all(len({problem.devices[x] for x in level}) == 1 for level in levels):
        return {}
    beside: list[list[tuple[int, int]]] = [[] for _ in problem.order]
    for source, target in edges:
        beside[source].append((1, target))
        beside[target].append((2, source))
    for there in problem.on_device:
        for x in there:
            beside[x] += [(3, y) for y in there if y != x]
    looks: list[object] = [
        (
            problem.roles[x],
            problem.durations[x],
            problem.acquire[x],
            problem.release[x],
            problem.workspace[x],
            *{problem.capacity[device] for device in problem.devices[x]},
        )
        for x in range(problem.num_operations)
    ]
    found = 0
    while True:
        numbers = {look: number for number, look in enumerate(dict.fromkeys(looks))}
        kinds = [numbers[look] for look in looks]
        if len(numbers) == found:
            break
        found = len(numbers)
        looks = [(kind, *sorted((way, kinds[y]) for way, y in beside[x])) for x, kind in enumerate(kinds)]
    firsts: dict[int, int] = {}
    for level in levels:
        for x in level:
            firsts.setdefault(kinds[x], x)
    own = {x: firsts[kinds[x]] for x in problem.order}
    return {x: y for x, y in own.items() if x != y and not set(problem.devices[x]) & set(problem.devices[y])}


def _joining(problem: OneMicrobatch) -> list[tuple[int, int]]:
    """What waits for what, without that of which other ways say as much."""
    outgoing = problem.outgoing
    return [
        (source, target)
        for source, target, _ in problem.edges
        if not any(other != target and problem.path(other, target) >= 0 for other, _ in outgoing[source])
    ]


def _accounts(
    problem: OneMicrobatch, edges: Sequence[tuple[int, int]], steps: Sequence[int]
) -> tuple[dict[tuple[int, int], _Account], list[int]]:
    """[edge] the account of a wait there; [device] byte-steps of a micro-batch without waits.

    A hold lasts as long as the actions and the waits on any way from its source to its target do.
    """
    behind: dict[int, list[int]] = {}
    for source, target in edges:
        behind.setdefault(source, []).append(target)
    sizes: dict[tuple[int, int], dict[int, int]] = {edge: {} for edge in edges}
    needed = [0] * problem.num_devices
    ways: dict[tuple[int, int], list[int]] = {}
    for device in range(problem.num_devices):
        if problem.capacity[device] is None:
            continue
        for hold in problem.holds_on(device):
            ends = hold.source, hold.target
            if ends not in ways:
                ways[ends] = _way(behind, *ends)
            way = ways[ends]
            needed[device] += hold.size * sum(steps[x] for x in way)
            for edge in zip(way, way[1:], strict=False):
                sizes[edge][device] = sizes[edge].get(device, 0) + hold.size
    return {edge: tuple((d, size) for d, size in own.items() if size) for edge, own in sizes.items()}, needed


def _way(behind: dict[int, list[int]], source: int, target: int) -> list[int]:
    """Operations on one way from one to another, both included; none without one."""
    before = {source: source}
    here = [source]
    while here and target not in before:
        x = here.pop()
        for y in behind.get(x, ()):
            if y not in before:
                before[y] = x
                here.append(y)
    if target not in before:
        return []
    way = [target]
    while way[-1] != source:
        way.append(before[way[-1]])
    return way[::-1]


class TightRepetends:
    """All repetends of one time and so many micro-batches, looked for again and again, in other orders.

    What leads to nothing is known to later tries. ``exhausted``: there are none, or none more, of whole steps in which
    nothing waits for as long as the repetend. Branches that are alike run alike.
    """

    def __init__(self, outwards: Outwards, length: int, unroll: int) -> None:
        self._outwards, self._length, self._unroll = outwards, length, unroll
        problem = outwards.problem
        self._slack = [
            NEVER if room is None else room * length - unroll * needed
            for room, needed in zip(problem.capacity, outwards.needed, strict=False)
        ]
        self._starts = [[0] * unroll for _ in problem.order]
        self._taken = [0] * problem.num_devices
        self._inside, self._moments = [0], [0]
        self._charged: list[_Account] = []
        self._levels = {level.begin * unroll: level for level in outwards.levels}
        self._fruitless: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
        self._keys: list[tuple[tuple[object, ...], tuple[int, ...]] | None] = []
        self._random: Random | None = None
        self._masks = {
            steps: [_masks(steps, at, length) for at in range(length)]
            for steps in {*outwards.steps} - {0}
            if steps <= length
        }
        work = max(sum(outwards.steps[x] for x in there) for there in problem.on_device)
        self.period = Fraction(length * outwards.unit, unroll)
        self.exhausted = min(self._slack) < 0 or unroll * work > length
        self.placed = 0

    def find(self, most: int, random: Random | None = None) -> Pattern | None:
        """A pattern; None if there is none, or after about ``most`` more were placed.

        With ``random`` now and then a later moment is tried first; without it always the nearest.
        """
        if self.exhausted:
            return None
        self._random = random
        until = self.placed + most
        count = len(self._outwards.places) * self._unroll
        options = [self._options(0)]
        self._keys = [None]
        found = None
        while options:
            start = next(options[-1], None)
            if start is None:
                self._remember(self._keys.pop())
                options.pop()
                if options:
                    self._take_back(len(options) - 1)
                continue
            if self.placed >= until:
                break
            self.placed += 1
            if not self._put(len(options) - 1, start):
                continue
            if len(options) == count:
                found = self._pattern()
                self._take_back(count - 1)
                break
            key = self._key(len(options))
            if key is not None and self._leads_nowhere(*key):
                self._take_back(len(options) - 1)
                continue
            options.append(self._options(len(options)))
            self._keys.append(key)
        self.exhausted = not options
        for number in range(len(options) - 2, -1, -1):
            self._take_back(number)
        return found

    def _options(self, number: int) -> Iterator[int]:
        """Starts to try of one instance, nearest to what it is joined to first."""
        index, u = divmod(number, self._unroll)
        place, length, slack = self._outwards.places[index], self._length, self._slack
        if place.twin is not None:
            return iter((self._starts[place.twin][u],))
        own = self._starts[place.operation]
        if not place.after and not place.before:
            return self._turning(own, place.steps, u)
        first = own[u - 1] + place.steps if u else -NEVER
        last = own[0] + length - place.steps if u else NEVER
        for other, account in place.after:
            near = self._starts[other][u] + self._outwards.steps[other]
            first, last = max(first, near), min(last, near + length - 1)
            for device, size in account:
                last = min(last, near + slack[device] // size)
        for other, account in place.before:
            near = self._starts[other][u] - place.steps
            first, last = max(first, near - length + 1), min(last, near)
            for device, size in account:
                first = max(first, near - slack[device] // size)
        starts = [*range(first, last + 1)]
        if not place.after:
            starts.reverse()
        if self._random is not None and len(starts) > 1 and self._random.random() < BETWEEN_SWAPPED:
            chosen = self._random.randrange(1, min(BETWEEN_NEAR, len(starts)))
            starts[0], starts[chosen] = starts[chosen], starts[0]
        return iter(starts)

    def _turning(self, own: Sequence[int], steps: int, u: int) -> Iterator[int]:
        """Of the first operation: the first two micro-batches are as near as any two."""
        if u == 0:
            return iter((0,))
        apart = own[1] if u > 1 else steps
        last = self._length // self._unroll if u == 1 else self._length - apart * (self._unroll - u)
        starts = [*range(own[u - 1] + apart, last + 1)]
        if self._random is not None:
            self._random.shuffle(starts)
        return iter(starts)

    def _put(self, number: int, start: int) -> bool:
        """Place an instance; whether it may be there."""
        index, u = divmod(number, self._unroll)
        place, slack = self._outwards.places[index], self._slack
        at = start % self._length
        inside, moments, taking = self._inside[-1], self._moments[-1], 0
        if place.steps:
            taking, within = self._masks[place.steps][at]
            if within & moments or any(taking & self._taken[device] for device in place.devices):
                return False
            inside |= within
        else:
            if inside >> at & 1:
                return False
            moments |= 1 << at
        charged = self._waits(place, u, start)
        for device, amount in charged:
            slack[device] -= amount
        self._starts[place.operation][u] = start
        full = any(slack[device] < 0 for device, _ in charged) or (
            u == self._unroll - 1 and not all(map(self._has_room, place.completes))
        )
        if full:
            for device, amount in charged:
                slack[device] += amount
            return False
        for device in place.devices:
            self._taken[device] |= taking
        self._inside.append(inside)
        self._moments.append(moments)
        self._charged.append(charged)
        return True

    def _waits(self, place: _PlacedOperation, u: int, start: int) -> _Account:
        """What the waits beside an instance that starts then are charged."""
        found: list[tuple[int, int]] = []
        for other, account in place.after:
            waited = start - self._starts[other][u] - self._outwards.steps[other]
            found += [(device, size * waited) for device, size in account if waited]
        for other, account in place.before:
            waited = self._starts[other][u] - place.steps - start
            found += [(device, size * waited) for device, size in account if waited]
        return tuple(found)

    def _take_back(self, number: int) -> None:
        """The instance that was placed last."""
        index, u = divmod(number, self._unroll)
        place = self._outwards.places[index]
        for device, amount in self._charged.pop():
            self._slack[device] += amount
        self._inside.pop()
        self._moments.pop()
        if place.steps:
            taking, _ = self._masks[place.steps][self._starts[place.operation][u] % self._length]
            for device in place.devices:
                self._taken[device] ^= taking

    def _has_room(self, device: int) -> bool:
        return device_has_room(self._outwards.problem, device, self._starts, self._length)

    def _key(self, number: int) -> tuple[tuple[object, ...], tuple[int, ...]] | None:
        """Where a level begins: all that what follows depends on, but for what may still be waited; and that."""
        level = self._levels.get(number)
        if level is None:
            return None
        starts, length = self._starts, self._length
        joined = tuple(
            (own[0] % length, *(start - own[0] for start in own[1:])) for own in map(starts.__getitem__, level.joined)
        )
        key = (
            number,
            joined,
            tuple(tuple(starts[x]) for x in level.open_),
            tuple(self._taken[device] for device in level.devices),
            self._moments[-1],
            self._inside[-1] if level.moments else 0,
        )
        return key, tuple(self._slack[device] for device in level.waiting)

    def _leads_nowhere(self, key: tuple[object, ...], slack: tuple[int, ...]) -> bool:
        """Whether it is known of as much to wait or more."""
        return any(
            all(mine <= known for mine, known in zip(slack, each, strict=True)) for each in self._fruitless.get(key, ())
        )

    def _remember(self, known: tuple[tuple[object, ...], tuple[int, ...]] | None) -> None:
        """That all options of a level led nowhere."""
        if known is not None and len(self._fruitless) < BETWEEN_KNOWN:
            self._fruitless.setdefault(known[0], []).append(known[1])

    def _pattern(self) -> Pattern:
        first = min(map(min, self._starts))
        unit = self._outwards.unit
        rows = tuple(tuple((start - first) * unit for start in row) for row in self._starts)
        return Pattern(self._unroll, self._length * unit, rows)


def _masks(steps: int, at: int, length: int) -> tuple[int, int]:
    """Bits of the steps of a repetend that an action takes which starts at a moment, and of those inside of it."""
    taking, within = (mask << at for mask in ((1 << steps) - 1, (1 << steps) - 2))
    whole = (1 << length) - 1
    return (taking | taking >> length) & whole, (within | within >> length) & whole


def tries(
    outwards: Outwards, random: Random, most_unroll: int = BETWEEN_UNROLL, slack: float = BETWEEN_SLACK
) -> Iterator[tuple[int, Pattern | None]]:
    """How many were placed, and a pattern: again and again, of periods up to the least for which there is one.

    They are from the least period of all unrolls up to ``slack`` times that.
    """
    least = period_bound(outwards.problem) / outwards.unit
    sizes = [
        (length, unroll)
        for unroll in range(1, most_unroll + 1)
        for length in range(math.ceil(least * unroll), math.floor(least * unroll * Fraction(slack)) + 1)
        if 2 * unroll <= outwards.problem.num_microbatches
    ]
    open_ = [TightRepetends(outwards, *size) for size in sorted(sizes, key=lambda size: (Fraction(*size), size))]
    best: Fraction | None = None
    chance = None
    while open_:
        for search in open_:
            before = search.placed
            pattern = search.find(BETWEEN_PLACED, chance)
            yield search.placed - before, pattern
            if pattern is not None:
                best = pattern.period if best is None else min(best, pattern.period)
                break
        open_ = [each for each in open_ if not each.exhausted and (best is None or each.period <= best)]
        chance = random


@dataclass(frozen=True)
class RepetendBetweenBlocks(ScheduleStep):
    """Repetends of up to ``unroll`` micro-batches, found without the time of actions on all devices.

    Any order of what is left is one of the whole. Many repetends have the same time, and fill and drain it differently;
    the step ends after ``fruitless`` tries without improvement.
    """

    share: float = BETWEEN_SHARE
    most_operations: int = BETWEEN_OPERATIONS
    unroll: int = BETWEEN_UNROLL
    fruitless: int = BETWEEN_FRUITLESS
    name = "repetend between blocks"
    when = (
        "nothing proved best; blocks on all devices, a device's memory is limited; unroll and span are open; at most "
        "{most_operations} operations of a micro-batch"
    )

    def applies(self, state: SearchState) -> bool:
        problem = state.problem
        limited = any(room is not None for room in problem.capacity[: problem.num_devices])
        opened = limited and state.unroll is state.max_span is None and not state.finished
        return opened and problem.num_operations <= self.most_operations and self._outwards(problem) is not None

    @staticmethod
    def _outwards(problem: OneMicrobatch) -> Outwards | None:
        left = WithoutSharedTime.of(problem)
        return None if left is None else Outwards.of(left.problem)

    def run(self, state: SearchState) -> None:
        outwards, budget = self._outwards(state.problem), state.budget
        assert outwards is not None
        problem, fruitless = outwards.problem, 0
        limit = budget.used + budget.seconds * self.share
        known = set[Pattern]()
        for placed, pattern in tries(outwards, Random(budget.seed), self.unroll):
            budget.charge(placed * SECONDS_PER_PLACED)
            fruitless += 1
            if pattern is not None and pattern not in known:
                known.add(pattern)
                orders, middle = compose(problem, pattern), middle_repetition(problem, pattern)
                budget.charge(state.graph.num_tasks * SECONDS_PER_LOOK)
                found = state.candidate(orders[: problem.num_devices], "repetend", middle)
                fruitless = 0 if state.offer(found) else fruitless
            if state.finished or budget.used > limit or fruitless > self.fruitless:
                return
