"""List scheduling: every device, whenever it is free, takes one of its ready actions by fixed rules.

The rules are those of the zero-bubble papers' automatic schedules (Qi et al., ICLR'24, section 3.1, and NeurIPS'24),
said for any placement, with true durations, latencies and memory: backward before forward, forward while memory lasts,
weight gradients where a device would wait otherwise. A few switches decide the doubtful cases; :func:`policies` lists
the combinations worth trying. What several devices run together starts as soon as all of them are free; since it waits
for the last of them, a policy may have time in *slots*, at whose ends no device is inside of an action.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from random import Random

from pipeplan.search_constants import (
    CLOCKED_FROM,
    CLOCKED_SLOTS,
    FALL_TIGHT,
    FALLING_WAIT,
    FALLS,
    MEETING_MOST,
    PACED_SLOTS,
    PACES,
    POLICIES_FORWARDS,
    POLICIES_GROUPS,
    POLICIES_LONG_RUNS,
    POLICIES_PATIENCES,
    POLICIES_REGROUPED,
    POLICIES_REPACED,
    POLICIES_RESLOTTED,
    POLICIES_REWAITED,
    POLICIES_RUNS,
    POLICIES_SLOPES,
    POLICIES_SPACED,
    POLICIES_SWITCHED,
    REPACED,
    TIGHT,
)
from pipeplan.workload.bounds import period_bound
from pipeplan.workload.engine import Engine
from pipeplan.workload.kinds import Role
from pipeplan.workload.memory import MemoryState, num_that_fit
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.shared_time import WithoutSharedTime
from pipeplan.workload.task_graph import NEVER, TaskGraph


@dataclass(frozen=True, slots=True)
class Policy:
    """How a device chooses.

    ``patience``: a weight gradient runs if nothing else can start within this share of its duration.
    ``wait_for_backward``: no forward starts if a backward arrives within this share of the forward's duration.
    ``deep_first``: among forwards the later stage goes first, else the earlier one.
    ``alternate``: after a forward a backward goes first and the other way round, else backward always.
    ``in_flight`` [device] bounds the micro-batches between the forward and the backward (B or I) of the device's first
    stage; None is no bound beside memory.
    ``slot`` ns, if not 0: an action of one device that would not end with the slot waits for the next; slots are
    counted from the last action of all devices.
    ``group`` and ``pace``: of so many micro-batches only the first enters before that many ns, not counting the time of
    actions of all devices; and each enters at least ``within`` ns after the one before, counted alike.
    ``close``, if not 0: the last of so many enters as soon as a slot after the one before all the same.
    ``clock`` ns, if not 0: an action starts only where one micro-batch alone has it, but for multiples of that many ns;
    neither those nor slots, of two such times at least, count the time of actions of all devices.
    ``expects`` ns, if not 0: once what an action of all devices waits for runs, no other action goes on beyond the
    moment at which it is to start: as soon as all devices can, or up to so much later if less waits then. And where a
    forward and a backward meet on a device, that one goes first for which the other waits less.
    """

    patience: float = 1.0
    wait_for_backward: float = 0.0
    deep_first: bool = True
    alternate: bool = False
    in_flight: tuple[int, ...] | None = None
    slot: int = 0
    group: int = 1
    pace: int = 0
    within: int = 0
    close: int = 0
    clock: int = 0
    expects: int = 0


def policies(limits: Sequence[tuple[int, ...] | None] = (None,)) -> Iterator[Policy]:
    """The settings of the switches worth trying, under each of the limits of micro-batches in flight."""
    for patience, wait, alternate, limit in itertools.product(
        POLICIES_PATIENCES, POLICIES_FORWARDS, (True, False), limits
    ):
        yield Policy(patience, wait, alternate=alternate, in_flight=limit)


def in_flight_limits(problem: OneMicrobatch) -> list[tuple[int, ...]]:
    """Limits of micro-batches in flight worth trying [device]: from a first one, falling from device to device.

    The first is what memory has room for, or the number of devices, or twice that less one as ZB-H2 and ZB-V have
    it. It falls by 0 (memory alone), 1/2, 1 (1F1B) or 2 (ZB-H2) per device.
    """
    devices, count, room = range(problem.num_devices), problem.num_microbatches, min(rooms(problem))
    firsts = dict.fromkeys(min(first, count) for first in (room, room + 1, 2 * room - 1, 2 * room, len(devices)))
    return list(
        dict.fromkeys(
            tuple(max(1, int(first - slope * device)) for device in devices)
            for first in firsts
            for slope in POLICIES_SLOPES
        )
    )


def rooms(problem: OneMicrobatch) -> list[int]:
    """[device] micro-batches that it has room for at once, at most all."""
    each = [sum(problem.acquire[x] for x in problem.on_device[device]) for device in range(problem.num_devices)]
    return [int(min(problem.num_microbatches, most)) for most in map(num_that_fit, problem.capacity, each)]


def list_schedule(problem: OneMicrobatch, graph: TaskGraph, policy: Policy) -> list[list[int]] | None:
    """Every device's order under a policy; None where it gets stuck for memory.

    ``graph`` is that of the problem's workload.
    """
    listing = _Listing(problem, graph, policy)
    listing.run()
    return listing.orders if listing.is_complete else None


class _Listing(Engine):
    """The policy as a chooser. Operations keep their micro-batches in order, so each has one next action."""

    def __init__(self, problem: OneMicrobatch, graph: TaskGraph, policy: Policy) -> None:
        super().__init__(graph, links_choose=True)
        self._problem, self._policy = problem, policy
        self._durations = problem.durations
        self._forward = [role is Role.FORWARD for role in problem.roles]
        self._weight = [role is Role.WEIGHT_GRAD for role in problem.roles]
        self._next, self._ends = graph.offsets[:-1], graph.offsets[1:]
        self._memory = MemoryState(graph, problem.capacity)
        self._alone = [[x for x in there if len(problem.devices[x]) == 1] for there in problem.on_device]
        self._enter = [next((x for x in there if self._forward[x]), -1) for there in self._alone]
        self._leave = [next((x for x in there[::-1] if not self._weight[x]), -1) for there in self._alone]
        self._after_forward = [False] * len(problem.on_device)
        together = [x for x in problem.order[::-1] if len(problem.devices[x]) > 1]
        self._together = [(x, problem.devices[x]) for x in together]
        self._of_all = {x for x in together if len(problem.devices[x]) == problem.num_devices}
        self._slots_from = self._cut = 0
        self._expected: int | None = None
        self._moment = NEVER
        self._enters = {*_entries(problem)} if policy.expects else set()
        self._entered: dict[int, list[int]] = {}
        if policy.pace or policy.within or policy.close:
            self._entered = {x: [] for x in _entries(problem)}
        self._beside = max((problem.acquire[x] for x in self._of_all), default=0) if policy.clock and policy.slot else 0
        self._moments = _moments(problem) if policy.clock else []
        self._rank = self._ranks()

    @property
    def is_complete(self) -> bool:
        """Whether everything has run."""
        return self._next == self._ends

    def _ranks(self) -> list[tuple[int, ...]]:
        """[device] its operations in the order in which they are considered: backward, forward, weight gradients."""
        sign = -1 if self._policy.deep_first else 1

        def key(x: int) -> tuple[int, int]:
            return (1, sign * x) if self._forward[x] else (2, x) if self._weight[x] else (0, x)

        return [tuple(sorted(operations, key=key)) for operations in self._alone]

    def start(self, task: int) -> None:
        super().start(task)
        x = self._operation_of[task]
        self._next[x] = task + 1
        self._memory.run(task)
        if not self._weight[x]:
            self._after_forward[self._resources[x][0]] = self._forward[x]
        if x in self._of_all:
            if task == self._expected:
                self._expected, self._moment = None, NEVER
            self._slots_from = self.now + self.durations[task]
            self._cut += self.durations[task]
        if x in self._entered:
            self._entered[x].append(self.now - self._cut)

    def choose(self, device: int) -> int | None:
        """What the device starts now; None to wait, with an event at the moment to ask again."""
        durations, policy, now = self._durations, self._policy, self.now
        backward = forward = weight = -1
        backward_at = forward_at = NEVER
        blocked = False
        longest = 0
        together = self._ready_together() if self._together else None
        if together is not None:
            return together
        until = now + policy.slot - (now - self._slots_from) % policy.slot if policy.slot else NEVER
        if policy.expects and self._of_all:
            self._expect(device)
            until = min(until, self._moment)
        for x in self._rank[device]:
            task = self._next[x]
            if task == self._ends[x] or self.waiting[task]:
                continue
            begin = max(self.ready_at[task], now)
            if self._entered and x in self._entered:
                begin = max(begin, self._may_enter(x))
            if policy.clock and not self._weight[x]:
                begin = self._by_clock(x, begin)
            elif begin + durations[x] > until:
                begin = max(begin, until)
            if self._weight[x]:
                if begin == now and durations[x] > longest and self._memory.full(task) is None:
                    weight, longest = task, durations[x]
            elif self._forward[x]:
                if not self._has_room(x, task, device):
                    blocked = True
                elif begin < forward_at:
                    forward, forward_at = task, begin
            elif begin < backward_at and self._has_room(x, task, device):
                backward, backward_at = task, begin
        if policy.expects and forward >= 0 and backward >= 0 and self._operation_of[forward] not in self._enters:
            forward_waits = backward_at + self.durations[backward] - forward_at
            backward_waits = forward_at + self.durations[forward] - backward_at
            first, at = (forward, forward_at) if backward_waits < forward_waits else (backward, backward_at)
            if at <= now:
                return first
            if min(backward_waits, forward_waits) > 0:
                heapq.heappush(self.events, (at, device))
                return None
        turn = policy.alternate and not self._after_forward[device] and forward_at <= now
        if backward_at <= now and not turn:
            return backward
        if forward_at <= now and (
            turn
            or backward_at - now >= policy.wait_for_backward * self.durations[forward]
            or policy.wait_for_backward == 0.0
        ):
            return forward
        soon = min(backward_at, forward_at if forward_at > now else NEVER)
        if weight >= 0 and (blocked or soon - now >= policy.patience * longest):
            return weight
        if soon < NEVER:
            heapq.heappush(self.events, (soon, device))
        return None

    def _by_clock(self, x: int, begin: int) -> int:
        """The first moment from ``begin`` on at which the clock has the operation, and no slot ends inside of it."""
        clock, slot = self._policy.clock, self._policy.slot
        begin += (self._moments[x] + self._cut - begin) % clock
        if slot and (begin - self._cut) % slot + self._durations[x] > slot:
            begin += clock
        return begin

    def _expect(self, device: int) -> None:
        """Know when what all devices run next is to start, once what it waits for runs; a device asks again then."""
        if self._expected is not None and self._moment > self.now:
            return
        self._expected, self._moment = None, NEVER
        for x, devices in self._together:
            task = self._next[x]
            if x not in self._of_all or task == self._ends[x] or self.waiting[task] or not self._problem.outgoing[x]:
                continue
            if self._memory.missing(task) is None:
                soon = max(self.now, self.ready_at[task], *(self.free[each] for each in devices))
                if soon < self._moment:
                    self._expected, self._moment = task, soon
        if self._expected is not None:
            self._moment = self._with_fewest_waits(self._moment)
            heapq.heappush(self.events, (self._moment, device))

    def _with_fewest_waits(self, soon: int) -> int:
        """The moment up to which devices wait least in ns in all, from ``soon`` on, if no other action goes on beyond.

        A device with a backward that is ready waits until it, or from the end of that if it ends before.
        """
        rising, changes = 1, list[tuple[int, int, int]]()
        for device, there in enumerate(self._alone):
            for x in there:
                task = self._next[x]
                if self._forward[x] or self._weight[x] or task == self._ends[x] or self.waiting[task]:
                    continue
                begin = max(self.ready_at[task], self.free[device], self.now)
                if begin <= soon:
                    rising += 1
                else:
                    changes.append((begin, 1, 0))
                if begin + self._durations[x] > soon:
                    changes.append((begin + self._durations[x], 0, self._durations[x]))
        best, least, waits, before = soon, 0, 0, soon
        for moment, more, ended in sorted(changes):
            if moment > soon + self._policy.expects:
                break
            waits += rising * (moment - before) - ended
            rising, before = rising + more, moment
            if waits < least:
                best, least = moment, waits
        return best

    def _ready_together(self) -> int | None:
        """What several devices may start together now, the latest in a micro-batch first."""
        for x, devices in self._together:
            task = self._next[x]
            if (
                task != self._ends[x]
                and not self.waiting[task]
                and self.ready_at[task] <= self.now
                and all(self.free[device] <= self.now for device in devices)
                and self._memory.missing(task) is None
            ):
                return task
        return None

    def _may_enter(self, x: int) -> int:
        """When the next micro-batch may at the policy's pace."""
        entered, policy = self._entered[x], self._policy
        if not entered:
            return 0
        if policy.close and len(entered) % policy.close == policy.close - 1:
            return self._cut + entered[-1] + policy.slot
        paced = entered[-policy.group] + policy.pace if len(entered) >= policy.group else 0
        return self._cut + max(paced, entered[-1] + policy.within)

    def _has_room(self, x: int, task: int, device: int) -> bool:
        """Whether an action fits now, within the policy's limit, and its device's oldest micro-batch can finish."""
        limits, offsets = self._policy.in_flight, self.graph.offsets
        if limits is not None and x == self._enter[device]:
            leave = self._leave[device]
            if task - offsets[x] - self._next[leave] + offsets[leave] >= limits[device]:
                return False
        if self._expected is not None and (room := self._problem.capacity[device]) is not None:
            own, beside = (self._problem.acquire[each] for each in (x, self._operation_of[self._expected]))
            if own and beside and self._memory.held[device] + own + beside > room:
                return False
        if self._beside and (room := self._problem.capacity[device]) is not None:
            held = self._memory.held[device] + self._problem.acquire[x]
            if held + self._beside > room and not self._leaves_with_the_slot(device):
                return False
        return self._memory.missing(task) is None

    def _leaves_with_the_slot(self, device: int) -> bool:
        """Whether the next micro-batch to leave the device may have done so when the slot ends, without waiting."""
        x, now = self._leave[device], self.now
        number, takes = self._next[x] - self.graph.offsets[x], self._durations[x]
        while self.waiting[task := self.graph.offsets[x] + number]:
            alone = (y for y, _ in self._problem.incoming[x] if len(self._problem.devices[y]) == 1)
            x = next((y for y in alone if not self._forward[y]), -1)
            if x < 0:
                return False
            takes += self._durations[x]
        return max(self.ready_at[task], now) + takes <= now + (self._cut - now) % self._policy.slot


def _entries(problem: OneMicrobatch) -> list[int]:
    """Operations of one device that come before all others of one device."""
    later, found = set[int](), list[int]()
    for x in problem.order:
        if any(y in later for y, _ in problem.incoming[x]):
            later.add(x)
        elif len(problem.devices[x]) == 1:
            later.add(x)
            found.append(x)
    return found


def _clock(problem: OneMicrobatch) -> int:
    """The least clock in ns by which no two actions of a device ever meet; 0 if none, or nothing of all in the middle.

    Looked for where each device has one forward and one backward. The earlier a device comes in a chain, the more time
    is between its two: the work of the next one, and the way there and back. By that clock all devices are alike.
    """
    moments, durations = _moments(problem), problem.durations
    if not any(
        problem.roles[x] is Role.FORWARD and any(len(problem.devices[y]) == 1 for y, _ in problem.incoming[x])
        for x in range(problem.num_operations)
        if len(problem.devices[x]) == problem.num_devices
    ):
        return 0
    between = list[tuple[int, int, int]]()
    for there in problem.on_device[: problem.num_devices]:
        alone = [x for x in there if len(problem.devices[x]) == 1]
        if [problem.roles[x] for x in alone] not in _BOTH:
            return 0
        first, second = sorted(alone, key=moments.__getitem__)
        between.append((moments[second] - moments[first], durations[first], durations[second]))
    gaps = sorted({gap for gap, _, _ in between})
    for clock in sorted({after - before for before, after in itertools.pairwise(gaps)}):
        if all(took <= gap % clock <= clock - takes for gap, took, takes in between):
            return clock
    return 0


def _moments(problem: OneMicrobatch) -> list[int]:
    """[operation] ns after which it starts in one micro-batch alone, actions of all devices taking no time."""
    moments = [0] * problem.num_operations
    for x in problem.order:
        for y, lag_ns in problem.incoming[x]:
            took = problem.durations[y] if len(problem.devices[y]) == 1 else 0
            moments[x] = max(moments[x], moments[y] + took + lag_ns)
    return moments


class PolicySearch:
    """Local search over policies: which to try next, given what the ones before were worth.

    First every limit of :func:`in_flight_limits` with a few settings of the switches, then all settings with the best
    limits, then changes of the best few: a switch, or the limits of some neighbouring devices by one. ``swept``,
    ``kept`` and ``shares`` are those of the step (:class:`pipeplan.schedule.steps.ListScheduling`), and so is
    ``expecting``; ``many`` says that there are so many actions that few policies can be tried.
    """

    def __init__(
        self,
        problem: OneMicrobatch,
        seed: int,
        swept: int,
        kept: int,
        shares: Sequence[float],
        *,
        many: bool = False,
        expecting: bool = False,
    ) -> None:
        self._count, self._random = problem.num_microbatches, Random(seed)
        self._num_swept, self._num_kept, self._shares = swept, kept, shares
        limits = in_flight_limits(problem)
        self._many, self._expecting = many, expecting
        self._period = _period_apart(problem)
        most = [max((problem.acquire[x] for x in there), default=0) for there in problem.on_device]
        self._room = int(min(problem.num_microbatches, *map(num_that_fit, problem.capacity, most)))
        self._num_devices = problem.num_devices
        if self._period:
            alone = [x for x in range(problem.num_operations) if len(problem.devices[x]) == 1]
            self._slot = max(problem.durations[x] for x in alone)
            forward = min((problem.durations[x] for x in alone if problem.roles[x] is Role.FORWARD), default=self._slot)
            self._in_slot = max(1, self._slot // forward)
            self._work = max(
                sum(problem.durations[x] for x in there if len(problem.devices[x]) == 1) for there in problem.on_device
            )
            self._together_takes = any(problem.acquire[x] for x in range(problem.num_operations) if x not in alone)
            self._clock, self._longest = _clock(problem), len({*_moments_of_forwards(problem)})
            self._apart = tuple(dict.fromkeys((0, forward, 2 * forward, self._slot)))
            self._planned = list(dict.fromkeys(self._paced()))
            self._swept = True
        else:
            self._planned = [replace(rules, in_flight=limit) for limit in limits for rules in _FIRST_RULES]
            self._swept = False
        self._known: dict[Policy, int] = {}
        self._best: list[Policy] = []
        self.fruitless = 0

    def propose(self) -> Policy:
        """The policy to try next."""
        if not self._planned and not self._swept:
            self._swept = True
            self._planned = [
                policy
                for policy in policies([policy.in_flight for policy in self._best[: self._num_swept]])
                if policy not in self._known
            ]
        return self._planned.pop(0) if self._planned else self._changed(self._random.choice(self._best))

    def learn(self, policy: Policy, makespan: int | None) -> None:
        """Take in what a policy was worth, in ns; None if it got stuck."""
        value = NEVER if makespan is None else makespan
        better = not self._best or value < self._known[self._best[0]]
        self.fruitless = 0 if better or self._planned else self.fruitless + 1
        if policy not in self._known:
            self._known[policy] = value
            self._best = sorted([*self._best, policy], key=self._known.__getitem__)[: self._num_kept]

    def _paced(self) -> Iterator[Policy]:
        """Of a problem with actions of all devices: groups of micro-batches as far apart as their memory says.

        The first ones enter as soon as there is room, or within limits that fall from device to device; with another
        policy all devices expect what they run together. Of very many actions few can be tried, and that comes first
        which is best on fewer devices with as little room for their work.
        """
        assert self._period is not None
        apart = self._never_meeting()
        if self._num_devices >= CLOCKED_FROM:
            yield from self._clocked()
            if apart is not None:
                yield apart
        if self._many:
            yield self._first_of_many() if apart is None else apart
        yield Policy(1.0, 1.0, alternate=True, slot=self._slot)
        in_slot = self._in_slot
        groups = dict.fromkeys((1, in_slot, PACED_SLOTS * in_slot, self._room))
        yield self._at_pace(PACES[0], PACED_SLOTS * in_slot, self._slot, self._apart[-2])
        expecting = [self._expects(), *([] if apart is None else [apart])]
        others = iter((*map(self._falling, FALLS[:2]), *expecting, *map(self._falling, FALLS[2:])))
        for slot, share, group in itertools.product((self._slot, 0), PACES, groups):
            yield from itertools.islice(others, 1)
            yield self._at_pace(share, group, slot, 0)

    def _first_of_many(self) -> Policy:
        """A pace where what all devices run together takes memory, else limits that fall, by how tight that is.

        Or one that expects, where memory is not so tight and it is asked for.
        """
        assert self._period is not None
        tight = self._period >= TIGHT * self._work
        if self._together_takes:
            return self._at_pace(PACES[0], 1 if tight else PACED_SLOTS * self._in_slot, self._slot, 0)
        if self._expecting and not tight:
            return self._expects()
        return self._falling(FALL_TIGHT if tight else FALLS[0])

    def _never_meeting(self) -> Policy | None:
        """Entries so far apart that no action there meets one back, or an end of a slot, inside, but for one of a few.

        Those are all multiples of what a device works and of a slot. One entry closer than that makes each backward
        that meets it wait once, after which it meets no other; so many are close that there is no more room left over.
        None unless that is a little more than the least period: much more costs more than waiting does.
        """
        assert self._period is not None
        within = math.lcm(self._work, self._slot)
        if not self._together_takes or not self._period < within <= MEETING_MOST * self._period:
            return None
        close = 1 + math.ceil((within - self._slot) / (within - self._period))
        return Policy(1.0, 1.0, alternate=True, slot=self._slot, within=within, close=close)

    def _clocked(self) -> list[Policy]:
        """All by the clock, blocks of all devices together at the ends of slots of several lengths.

        Only where memory makes the period longer than the clock, but not much: some cycles must be left over.
        """
        assert self._period is not None
        clock = self._clock
        if not clock or not clock < self._period < TIGHT * clock:
            return []
        chain = math.sqrt(self._longest)
        slots = dict.fromkeys(max(2, round(share * chain)) for share in CLOCKED_SLOTS)
        return [Policy(slot=times * clock, clock=clock) for times in slots]

    def _expects(self) -> Policy:
        """All devices expect what they run together."""
        return Policy(within=self._slot, expects=self._slot)

    def _falling(self, share: float) -> Policy:
        """Limits that fall from device to device, by a share of what there is room for in all."""
        slope = share * self._room / self._num_devices
        limits = tuple(max(1, int(self._room + 1 - slope * device)) for device in range(self._num_devices))
        return Policy(1.0, FALLING_WAIT, slot=self._slot, in_flight=limits)

    def _at_pace(self, share: float, group: int, slot: int, within: int) -> Policy:
        """Groups that enter at a share of the least period."""
        assert self._period is not None
        pace = round(share * group * self._period)
        return Policy(1.0, 1.0, alternate=True, slot=slot, group=group, pace=pace, within=within)

    def _repaced(self, policy: Policy) -> Policy:
        """Another slot or pace."""
        assert self._period is not None
        random = self._random
        if random.random() < POLICIES_RESLOTTED:
            return replace(policy, slot=0 if policy.slot else self._slot)
        if random.random() < POLICIES_SPACED:
            return replace(policy, within=random.choice(self._apart))
        if random.random() < POLICIES_REGROUPED:
            group = random.choice((*POLICIES_GROUPS, self._room, max(1, policy.group - 1), policy.group + 1))
            pace = policy.pace / policy.group or self._period
            return replace(policy, group=group, pace=round(group * pace))
        return replace(policy, pace=round((policy.pace or policy.group * self._period) * random.choice(REPACED)))

    def _changed(self, policy: Policy) -> Policy:
        random = self._random
        if self._period and random.random() < POLICIES_REPACED:
            return self._repaced(policy)
        limits = list(policy.in_flight or (self._room,) * self._num_devices)
        for _ in range(random.choice(POLICIES_RUNS)):
            first = random.randrange(len(limits))
            last = random.randrange(first, len(limits)) if random.random() < POLICIES_LONG_RUNS else first
            change = random.choice((-1, 1))
            for device in range(first, last + 1):
                limits[device] = max(1, min(self._count, limits[device] + change))
        return replace(
            policy,
            patience=random.choice(self._shares) if random.random() < POLICIES_REWAITED else policy.patience,
            wait_for_backward=random.choice(self._shares)
            if random.random() < POLICIES_REWAITED
            else policy.wait_for_backward,
            deep_first=policy.deep_first != (random.random() < POLICIES_SWITCHED),
            alternate=policy.alternate != (random.random() < POLICIES_SWITCHED),
            in_flight=tuple(limits),
        )


def _moments_of_forwards(problem: OneMicrobatch) -> Iterator[int]:
    """When forwards of one device start in one micro-batch alone, in ns."""
    for x, moment in enumerate(_moments(problem)):
        if problem.roles[x] is Role.FORWARD and len(problem.devices[x]) == 1:
            yield moment


def _period_apart(problem: OneMicrobatch) -> Fraction | None:
    """Least period in ns beside actions of all devices; None where there are none, or nothing else."""
    left = WithoutSharedTime.of(problem)
    return period_bound(left.problem) if left is not None and max(left.problem.durations) else None


_BOTH = ([Role.FORWARD, Role.BACKWARD], [Role.BACKWARD, Role.FORWARD])
_FIRST_RULES = (Policy(), Policy(alternate=True), Policy(1.0, 0.5, alternate=True), Policy(0.5, 1.0, alternate=True))
