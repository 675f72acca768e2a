"""List scheduling: every device, whenever it is free, takes one of its ready actions by fixed rules.

The rules are those of the zero-bubble papers' automatic schedules (Qi et al., ICLR'24, section 3.1, and NeurIPS'24),
said for any placement of single-device stages, with true durations, latencies and memory: backward before forward,
forward while memory lasts, weight gradients where a device would wait otherwise. A few switches decide the doubtful
cases; :func:`policies` lists the combinations worth trying.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from pipeplan.workload.kinds import Role
from pipeplan.workload.one_microbatch import OneMicrobatch

__all__ = ["Effect", "Policy", "PolicySearch", "in_flight_limits", "list_schedule", "policies", "still_needed"]


@dataclass(frozen=True, slots=True)
class Effect:
    """What an operation does to the memory of each of its devices, in bytes: taken at its start, while, at its end."""

    role: Role
    acquire: int
    workspace: int
    release: int


def still_needed(effects: Sequence[Effect]) -> list[int]:
    """[operations done] bytes that one micro-batch still takes, at most, until it has given everything back.

    ``effects`` are those of a device's operations in order. Weight gradients only give back, at the end; they need
    nothing but their workspace, and are not counted as done.
    """
    others = [effect for effect in effects if effect.role is not Role.WEIGHT_GRAD]
    at_end = max((effect.workspace for effect in effects if effect.role is Role.WEIGHT_GRAD), default=0)
    needs = [at_end] * (len(others) + 1)
    for done in reversed(range(len(others))):
        effect = others[done]
        after = needs[done + 1] - effect.release
        needs[done] = effect.acquire + max(effect.workspace, after, 0)
    return needs


_NEVER = 2**62


@dataclass(frozen=True, slots=True)
class Policy:
    """How a device chooses.

    ``patience``: a weight gradient runs if nothing else can start within this share of its duration.
    ``wait_for_backward``: no forward starts if a backward arrives within this share of the forward's duration.
    ``deep_first``: among forwards the later stage goes first, else the earlier one.
    ``alternate``: after a forward a backward goes first and the other way round, else backward always.
    ``in_flight`` [device] bounds the micro-batches between the forward and the backward (B or I) of the device's first
    stage; None is no bound beside memory.
    """

    patience: float = 1.0
    wait_for_backward: float = 0.0
    deep_first: bool = True
    alternate: bool = False
    in_flight: tuple[int, ...] | None = None


def policies(limits: Sequence[tuple[int, ...] | None] = (None,)) -> Iterator[Policy]:
    """The settings of the switches worth trying, under each of the limits of micro-batches in flight."""
    for patience, wait, alternate, limit in itertools.product((1.0, 0.5), (0.0, 0.5, 1.0), (True, False), limits):
        yield Policy(patience, wait, alternate=alternate, in_flight=limit)


def in_flight_limits(problem: OneMicrobatch) -> list[tuple[int, ...]]:
    """Limits of micro-batches in flight worth trying [device]: from a first one, falling from device to device.

    The first is what memory has room for, or the number of devices, or twice that less one as ZB-H2 and ZB-V have
    it. It falls by 0 (memory alone), 1/2, 1 (1F1B) or 2 (ZB-H2) per device.
    """
    devices, count = range(problem.num_devices), problem.num_microbatches
    room = min((_room(problem, device) for device in devices), default=count)
    firsts = dict.fromkeys(min(first, count) for first in (room, room + 1, 2 * room - 1, 2 * room, len(devices)))
    return list(
        dict.fromkeys(
            tuple(max(1, int(first - slope * device)) for device in devices)
            for first in firsts
            for slope in (0.0, 0.5, 1.0, 2.0)
        )
    )


def _room(problem: OneMicrobatch, device: int) -> int:
    """Micro-batches whose activations fit on a device at once; all of them without a limit."""
    capacity = problem.capacity[device]
    each = sum(problem.acquire[x] for x in problem.on_device[device])
    if capacity is None or each == 0:
        return problem.num_microbatches
    return max(1, min(problem.num_microbatches, capacity // each))


def list_schedule(problem: OneMicrobatch, policy: Policy) -> list[list[int]] | None:
    """Every device's order under a policy; None where it gets stuck for memory or a stage has several devices."""
    if any(len(devices) != 1 for devices in problem.devices):
        return None
    return _Listing(problem, policy).run()


class _Listing:
    """One run of the rules in time. Operations keep their micro-batches in order, so each has one next action."""

    def __init__(self, problem: OneMicrobatch, policy: Policy) -> None:
        self._problem, self._policy = problem, policy
        self._count = problem.num_microbatches
        self._device = [devices[0] for devices in problem.devices]
        self._followers = problem.outgoing
        self._forward = [role is Role.FORWARD for role in problem.roles]
        self._weight = [role is Role.WEIGHT_GRAD for role in problem.roles]
        self._missing = [[len(sources)] * self._count for sources in problem.incoming]
        self._arrival = [[0] * self._count for _ in problem.durations]
        self._next = [0] * problem.num_operations
        self._free = [0] * len(problem.on_device)
        self._held = [0] * len(problem.on_device)
        self._enter = [next((x for x in there if self._forward[x]), -1) for there in problem.on_device]
        self._leave = [next((x for x in there[::-1] if not self._weight[x]), -1) for there in problem.on_device]
        self._after_forward = [False] * len(problem.on_device)
        self._orders: list[list[int]] = [[] for _ in problem.on_device]
        self._rank = self._ranks()
        self._needs = [_needs(problem, device) for device in range(len(problem.on_device))]
        self._events = [(0, device) for device in range(len(problem.on_device))]

    def _ranks(self) -> list[tuple[int, ...]]:
        """[device] its operations in the order in which they are considered: backward, forward, weight gradients."""
        sign = -1 if self._policy.deep_first else 1

        def key(x: int) -> tuple[int, int]:
            return (1, sign * x) if self._forward[x] else (2, x) if self._weight[x] else (0, x)

        return [tuple(sorted(operations, key=key)) for operations in self._problem.on_device]

    def run(self) -> list[list[int]] | None:
        """Go through the moments at which a device is free, in time."""
        left = self._problem.num_operations * self._count
        events = self._events
        heapq.heapify(events)
        while events:
            now, device = heapq.heappop(events)
            if now < self._free[device]:
                continue
            chosen = self._choose(device, now)
            if chosen is None:
                continue
            self._start(chosen, device, now)
            left -= 1
        return self._orders if left == 0 else None

    def _start(self, x: int, device: int, now: int) -> None:
        m = self._next[x]
        self._next[x] = m + 1
        end = now + self._problem.durations[x]
        self._orders[device].append(x * self._count + m)
        self._free[device] = end
        self._held[device] += self._problem.acquire[x] - self._problem.release[x]
        if not self._weight[x]:
            self._after_forward[device] = self._forward[x]
        heapq.heappush(self._events, (end, device))
        for target, lag in self._followers[x]:
            arrival = self._arrival[target]
            arrival[m] = max(arrival[m], end + lag)
            self._missing[target][m] -= 1
            if self._missing[target][m] == 0:
                heapq.heappush(self._events, (max(arrival[m], self._free[self._device[target]]), self._device[target]))

    def _choose(self, device: int, now: int) -> int | None:
        """What the device starts now; None to wait, with an event at the moment to ask again."""
        durations, policy = self._problem.durations, self._policy
        backward = forward = weight = -1
        backward_at = forward_at = _NEVER
        blocked = False
        for x in self._rank[device]:
            m = self._next[x]
            if m == self._count or self._missing[x][m]:
                continue
            arrival = self._arrival[x][m]
            if self._weight[x]:
                longest = weight < 0 or durations[x] > durations[weight]
                if arrival <= now and longest and self._fits(x, device):
                    weight = x
            elif self._forward[x]:
                if not self._has_room(x, m, device):
                    blocked = True
                elif max(arrival, now) < forward_at:
                    forward, forward_at = x, max(arrival, now)
            elif max(arrival, now) < backward_at and self._has_room(x, m, device):
                backward, backward_at = x, max(arrival, now)
        turn = policy.alternate and not self._after_forward[device] and forward_at <= now
        if backward_at <= now and not turn:
            return backward
        if forward_at <= now and (
            turn
            or backward_at - now >= policy.wait_for_backward * durations[forward]
            or policy.wait_for_backward == 0.0
        ):
            return forward
        soon = min(backward_at, forward_at if forward_at > now else _NEVER)
        if weight >= 0 and (blocked or soon - now >= policy.patience * durations[weight]):
            return weight
        if soon < _NEVER:
            heapq.heappush(self._events, (soon, device))
        return None

    def _has_room(self, x: int, m: int, device: int) -> bool:
        """Whether x fits now, and leaves the device's oldest micro-batch room to run to its end."""
        problem, policy = self._problem, self._policy
        limit = None if policy.in_flight is None or x != self._enter[device] else policy.in_flight[device]
        if limit is not None and m - self._next[self._leave[device]] >= limit:
            return False
        capacity = problem.capacity[device]
        if capacity is None or not problem.acquire[x] + problem.workspace[x]:
            return True
        if not self._fits(x, device):
            return False
        held = self._held[device] + problem.acquire[x] - problem.release[x]
        oldest = min(self._next[y] for y in problem.on_device[device] if not self._weight[y])
        done = sum(self._next[y] > oldest for y in problem.on_device[device] if not self._weight[y]) + (m == oldest)
        return held + self._needs[device][done] <= capacity

    def _fits(self, x: int, device: int) -> bool:
        """Whether x has room to run now."""
        problem, capacity = self._problem, self._problem.capacity[device]
        return capacity is None or self._held[device] + problem.acquire[x] + problem.workspace[x] <= capacity


def _needs(problem: OneMicrobatch, device: int) -> list[int]:
    effects = zip(problem.roles, problem.acquire, problem.workspace, problem.release, strict=True)
    each = [Effect(*effect) for effect in effects]
    return still_needed([each[x] for x in problem.on_device[device]])


class PolicySearch:
    """Local search over policies: which to try next, given what the ones before were worth.

    First every limit of :func:`in_flight_limits` with a few settings of the switches, then all settings with the best
    limits, then changes of the best few: a switch, or the limits of some neighbouring devices by one.
    """

    def __init__(self, problem: OneMicrobatch, seed: int) -> None:
        self._count, self._random = problem.num_microbatches, Random(seed)
        limits = in_flight_limits(problem)
        self._planned = [replace(rules, in_flight=limit) for limit in limits for rules in _FIRST_RULES]
        self._known: dict[Policy, int] = {}
        self._best: list[Policy] = []
        self._swept = False
        self.fruitless = 0

    def propose(self) -> Policy:
        """The policy to try next."""
        if not self._planned and not self._swept:
            self._swept = True
            self._planned = [
                policy
                for policy in policies([policy.in_flight for policy in self._best[:_SWEPT]])
                if policy not in self._known
            ]
        return self._planned.pop(0) if self._planned else self._changed(self._random.choice(self._best))

    def learn(self, policy: Policy, makespan: int | None) -> None:
        """Take in what a policy was worth, in ns; None if it got stuck."""
        value = _NEVER if makespan is None else makespan
        better = not self._best or value < self._known[self._best[0]]
        self.fruitless = 0 if better or self._planned else self.fruitless + 1
        if policy not in self._known:
            self._known[policy] = value
            self._best = sorted([*self._best, policy], key=self._known.__getitem__)[:_KEPT]

    def _changed(self, policy: Policy) -> Policy:
        random = self._random
        assert policy.in_flight is not None
        limits = list(policy.in_flight)
        for _ in range(random.choice((0, 1, 1, 2, 3))):
            first = random.randrange(len(limits))
            last = random.randrange(first, len(limits)) if random.random() < 0.5 else first
            change = random.choice((-1, 1))
            for device in range(first, last + 1):
                limits[device] = max(1, min(self._count, limits[device] + change))
        return Policy(
            random.choice(_SHARES) if random.random() < 0.3 else policy.patience,
            random.choice(_SHARES) if random.random() < 0.3 else policy.wait_for_backward,
            policy.deep_first != (random.random() < 0.1),
            policy.alternate != (random.random() < 0.1),
            tuple(limits),
        )


_FIRST_RULES = (Policy(), Policy(alternate=True), Policy(1.0, 0.5, alternate=True), Policy(0.5, 1.0, alternate=True))

_SWEPT = 2
"""With so many of the best limits all settings of the switches are tried."""

_KEPT = 8
"""So many policies are changed further."""

_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.5)
"""Values of ``patience`` and ``wait_for_backward``."""
