"""The loop of list scheduling as it was before the engine, in operations and micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.schedule.list_scheduling import Policy
from pipeplan.workload.kinds import Role
from pipeplan.workload.one_microbatch import OneMicrobatch

__all__ = ["Effect", "list_schedule", "still_needed"]


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
