"""The loop of rules as it was before the engine."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeplan.schedule.rules.choosing import Chooser, Obstacle
from pipeplan.schedule.rules.engine import stuck_error
from pipeplan.schedule.rules.language import ReadyAction, Rules
from pipeplan.schedule.rules.settings import Resolved
from pipeplan.workload.kinds import BACKWARD_ROLES, Role
from pipeplan.workload.task_graph import TaskGraph
from references.loops.room import Memory

__all__ = ["RulesRun"]

_PATIENCE = 100
"""Steps without any action after which user functions that still refuse everything are taken to refuse it for good."""


@dataclass(slots=True)
class _Call:
    """An action of several devices, and how many of them are still running something else."""

    task: int
    missing: int


class RulesRun:
    """One run of the rules in steps, or in time. It is the :class:`State` that user functions see."""

    def __init__(self, graph: TaskGraph, rules: Rules) -> None:
        self.graph = graph
        self.now = 0
        operations, workload = graph.workload.operations, graph.workload
        self._unit = rules.time == "unit"
        self._resolved = Resolved(workload, rules)
        self._limits = self._resolved.in_flight
        self._device_limits = [settings.limit for settings in self._resolved.devices]
        self._checks = rules.checks
        self._memory = Memory(graph) if rules.fit_memory else None
        self._devices = workload.resources
        self._together = [len(devices) > 1 for devices in workload.resources]
        self._stage = [operation.stage for operation in operations]
        self._role = [operation.role for operation in operations]
        self._is_forward = [role is Role.FORWARD for role in self._role]
        self._own = [not shared for shared in self._resolved.is_shared]
        self._waiting = graph.num_predecessors.copy()
        self._arrival = [0] * graph.num_tasks
        self._begun: list[int | None] = [None] * graph.num_actions
        self._in_flight = [0] * len(workload.stages)
        self._on_device = [0] * len(workload.devices)
        self._left = self._num_actions = graph.num_actions
        self._link_free = [0] * len(workload.links)
        self._busy = [False] * len(workload.devices)
        self._calls: list[_Call | None] = [None] * len(workload.devices)
        self._startable: list[_Call] = []
        self._woken = set(range(len(workload.devices)))
        self._every = [self._resolved.every[o.stage].get(o.role, 0) for o in operations]
        self._earliest = [0] * len(operations)
        self._events: list[tuple[int, int]] = []  # (time, task) ends; behind num_tasks arrivals, twice that operations
        self.orders: list[list[int]] = [[] for _ in workload.devices]
        self._chooser = Chooser(graph, rules, self._resolved, self.obstacle, self)
        self._shared_first = rules.shared_first
        self._asking: dict[int, list[int]] = {}
        if rules.shared_first:
            self._asking = self._askers()
        self._attentive = self._chooser.has_functions or bool(rules.checks)
        self._watchers = [self._callers_kept_by(device) for device in range(len(workload.devices))]

    # what user functions see (language.State)

    def steps(self, device: int) -> int:
        return len(self.orders[device])

    def step_of(self, kind: str, stage: int, microbatch: int) -> int | None:
        x = self._chooser.operation(kind, stage)
        task = -1 if x is None else self.graph.offsets[x] + microbatch
        return self._begun[task] if x is not None and task < self.graph.offsets[x + 1] else None

    def in_flight(self, stage: int) -> int:
        return self._in_flight[stage]

    def stages_on(self, device: int) -> Sequence[int]:
        return [number for number, stage in enumerate(self.graph.workload.stages) if device in stage.devices]

    def ready(self, device: int, kind: str) -> Sequence[ReadyAction]:
        return self._chooser.ready(device, kind)

    # the run

    def run(self) -> list[list[int]]:
        """Every device's order."""
        for task, count in enumerate(self._waiting):
            if count == 0:
                self._arrive(task)
        self._choose()
        while self._left:
            if self._events:
                self._advance()
                self._choose()
            elif not self._stir():
                raise stuck_error(self.graph, self._waiting, self._begun, self.obstacle)
        return self.orders

    def _advance(self) -> None:
        """Go on to the next moment at which something ends or arrives, and take all in that does."""
        events, graph = self._events, self.graph
        self.now = now = events[0][0]
        while events and events[0][0] == now:
            task = heapq.heappop(events)[1]
            if task >= 2 * graph.num_tasks:
                self._woken.update(self._chooser.callers_of(task - 2 * graph.num_tasks))
            elif task >= graph.num_tasks:
                self._arrive(task - graph.num_tasks)
            else:
                self._end(task)

    def _end(self, task: int) -> None:
        """Its devices are free, and what depends on it waits for one thing less."""
        for device in self._devices[self.graph.operation_of[task]]:
            self._busy[device] = False
            call = self._calls[device]
            if call is None:
                self._woken.add(device)
                continue
            call.missing -= 1
            if call.missing == 0:
                self._startable.append(call)
        self._resolve(task, self.now)

    def _resolve(self, task: int, end: int) -> None:
        """The dependency resolver: an action, or a message, has ended."""
        waiting, unit = self._waiting, self._unit
        for other, lag in self.graph.successors[task]:
            waiting[other] -= 1
            if unit:
                if waiting[other] == 0:
                    self._arrive(other)
                continue
            time = self._arrival[other] = max(self._arrival[other], end + lag)
            if waiting[other] == 0:
                if time > self.now and other < self._num_actions:
                    heapq.heappush(self._events, (time, other + self.graph.num_tasks))
                else:
                    self._arrive(other)

    def _arrive(self, task: int) -> None:
        """All that a task waits for is there: an action is ready, a message takes its link as soon as that is free."""
        graph = self.graph
        if task < self._num_actions:
            self._woken.update(self._chooser.add(task))
            return
        end = self.now
        if not self._unit:
            link = graph.devices_of(task)[0] - len(self._busy)
            end = self._link_free[link] = max(self._link_free[link], self.now) + graph.durations[task]
        self._resolve(task, end)

    def _choose(self) -> None:
        """All free devices choose; then they start what they chose, calls for several devices first."""
        asked: Iterable[int] = range(len(self._busy)) if self._attentive else sorted(self._woken)
        free = [device for device in asked if not self._busy[device] and self._calls[device] is None]
        picks = [(device, task) for device in free if (task := self._chooser.choose(device)) is not None]
        self._woken.clear()
        for call in self._startable:
            self._start(call.task)
        self._startable.clear()
        together = [pick for pick in picks if self._together[self.graph.operation_of[pick[1]]]]
        for device, task in sorted(together, key=self._calling_order):
            self._call(device, task)
        for device, task in picks:
            alone = not self._together[self.graph.operation_of[task]]
            if alone and self._calls[device] is None and not self._busy[device]:
                self._start(self._chooser.take(task))

    def _calling_order(self, pick: tuple[int, int]) -> tuple[int, int]:
        if self._shared_first:
            return self._chooser.calling_order(pick[1])
        return self._role[self.graph.operation_of[pick[1]]] not in BACKWARD_ROLES, pick[0]

    def _call(self, device: int, task: int) -> None:
        """Call all devices of an action together, unless another call came before that it cannot be beside."""
        devices = self.graph.devices_of(task)
        if self._busy[device] or any(self._calls[other] for other in devices) or self.obstacle(task) is not None:
            self._woken.add(device)
            return
        call = _Call(self._chooser.take(task), sum(self._busy[other] for other in devices))
        for other in devices:
            self._calls[other] = call
        if call.missing == 0:
            self._start(task)

    def _start(self, task: int) -> None:
        graph, x = self.graph, self.graph.operation_of[task]
        devices, stage = self._devices[x], self._stage[x]
        self._left -= 1
        self._begun[task] = self.now
        self._chooser.started(task)
        if self._memory is not None:
            self._memory.start(task)
        change = self._flight_change(x, task)
        self._in_flight[stage] += change
        for device in devices:
            self.orders[device].append(task)
            self._busy[device] = True
            self._calls[device] = None
            self._woken.update(self._watchers[device])
            if self._own[stage]:
                self._on_device[device] += change
        heapq.heappush(self._events, (self.now + (1 if self._unit else graph.durations[task]), task))
        if self._every[x]:
            self._earliest[x] = self.now + self._every[x]
            heapq.heappush(self._events, (self._earliest[x], 2 * graph.num_tasks + x))

    def _flight_change(self, x: int, task: int) -> int:
        """+1 where an action brings a micro-batch into flight, -1 where it takes one out."""
        if self._is_forward[x]:
            return int(not self._is_second_part(x, task))
        return -1 if self._role[x] in BACKWARD_ROLES else 0

    def _is_second_part(self, x: int, task: int) -> bool:
        number = task - self.graph.offsets[x]
        return number % 2 == 1 and number < 2 * self.graph.workload.slots[x].num_parted

    def obstacle(self, task: int) -> Obstacle | None:
        """What keeps a ready action from starting by the rules; None if nothing does."""
        x = self.graph.operation_of[task]
        stage = self._stage[x]
        if self.now < self._earliest[x]:
            return Obstacle("every", stage, self._every[x])
        if x in self._asking and not any(self._asks(x, y) for y in self._asking[x]):
            return Obstacle("shared_first", stage)
        if self._is_forward[x] and not self._is_second_part(x, task):
            limit = self._limits[stage]
            if limit is not None and self._in_flight[stage] >= limit:
                return Obstacle("in_flight", stage, limit)
            for device in self.graph.devices_of(task) if self._own[stage] else ():
                most = self._device_limits[device]
                if most is not None and self._on_device[device] >= most:
                    return Obstacle("in_flight_device", device, most)
        if self._memory is not None and (full := self._memory.missing(task)) is not None:
            return Obstacle("memory", full)
        if self._checks:
            candidate = self._chooser.candidate(self.graph.devices_of(task)[0], task)
            for check in self._checks:
                if not check(self, candidate):
                    return Obstacle("check", number=0, name=getattr(check, "__name__", repr(check)))
        return None

    def _askers(self) -> dict[int, list[int]]:
        """{forward on several devices that waits for nothing: forwards behind it on one device}"""
        lags, forward = self.graph.workload.lags, self._is_forward
        first = set(range(len(forward))) - {target for _, target, _ in lags}
        asking: dict[int, list[int]] = {}
        for x, y, _ in lags:
            alike = self._chooser.left(x) == self._chooser.left(y)
            if x in first and forward[x] and forward[y] and self._together[x] and not self._together[y] and alike:
                asking.setdefault(x, []).append(y)
        return asking

    def _callers_kept_by(self, device: int) -> set[int]:
        """The devices that may choose actions which what this device starts can allow: by its limits, or as it asks."""
        there = {x for x, devices in enumerate(self._devices[: len(self._role)]) if device in devices}
        kept = {x for x, behind in self._asking.items() if there.intersection(behind)}
        if self._device_limits[device] is not None or self._memory is not None:
            kept |= {x for x in there if self._together[x]}
        return {caller for x in kept for caller in self._chooser.callers_of(x)} - {device}

    def _asks(self, x: int, y: int) -> bool:
        """Whether y has run all that x has made for it, and its limit lets it run more."""
        limit = self._limits[self._stage[y]]
        room = limit is None or self._in_flight[self._stage[y]] < limit
        return room and self._chooser.left(x) == self._chooser.left(y)

    def _stir(self) -> bool:
        """Nothing runs: let time pass for user functions, then let strict turns give way. False if nothing helps."""
        for _ in range(_PATIENCE if self._attentive else 0):
            self.now += 1
            self._choose()
            if self._events:
                return True
        self._woken.update(range(len(self._busy)))
        with self._chooser.pressed():
            self._choose()
        return bool(self._events)
