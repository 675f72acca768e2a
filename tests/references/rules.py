"""FlexPipe's Algorithm 1 read plainly: at every moment everything is found by going through all actions again.

Slow on purpose, and with no state but what ran when and who chose it. Messages that wait for a link are left out in
true time; user functions, checks and memory, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from pipeplan.schedule.rules import Rules
from pipeplan.schedule.rules.settings import Resolved
from pipeplan.workload.kinds import role_of
from pipeplan.workload.task_graph import TaskGraph

LANE = {"I": "B"}


class Reference:
    def __init__(self, graph: TaskGraph, rules: Rules) -> None:
        assert rules.time == "unit" or not graph.workload.links
        self.graph, self.unit = graph, rules.time == "unit"
        self.resolved, self.shared_first = Resolved(graph.workload, rules), rules.shared_first
        self.begun: dict[int, int] = {}
        self.called: dict[int, list[int]] = {}  # action of several devices: those that have not joined
        self.orders: list[list[int]] = [[] for _ in graph.workload.devices]
        self.now, self.pressed = 0, False
        self.sources: list[list[tuple[int, int]]] = [[] for _ in graph.durations]
        for source, targets in enumerate(graph.successors):
            for target, lag in targets:
                self.sources[target].append((source, 0 if self.unit else lag))

    def run(self) -> list[list[int]] | None:
        """Every device's order; None where nothing can start any more."""
        while len(self.begun) < self.graph.num_actions:
            self.step()
            later = [time for task in range(self.graph.num_tasks) if (time := self.arrival(task)) is not None]
            later = [t for t in (*later, *map(self.end, self.begun), *map(self.next, self.begun)) if t > self.now]
            if not later:
                self.pressed, before = True, len(self.begun)
                self.step()
                self.pressed = False
                if len(self.begun) == before:
                    return None
                later = [self.now + self.duration(task) for task in self.begun if self.end(task) > self.now]
            self.now = min(later)
        return self.orders

    def step(self) -> None:
        reserved = {device for devices in self.called.values() for device in devices}
        free = [d for d in range(len(self.orders)) if self.is_free(d) and d not in reserved]
        picks = [(device, task) for device in free if (task := self.choose(device)) is not None]
        for task, devices in list(self.called.items()):
            if all(self.is_free(device) for device in devices):
                self.start(task)
        shared = [pick for pick in picks if len(self.graph.devices_of(pick[1])) > 1]
        in_turn = self.waited if self.shared_first else lambda pick: (self.kind(pick[1]) not in "BI", pick[0])
        for device, task in sorted(shared, key=in_turn):
            devices = list(self.graph.devices_of(task))
            taken = {other for others in self.called.values() for other in others}
            if self.is_free(device) and not taken & set(devices) and task not in self.begun and self.may(task):
                self.called[task] = devices
                if all(self.is_free(other) for other in devices):
                    self.start(task)
        taken = {other for others in self.called.values() for other in others}
        for device, task in picks:
            if (device, task) not in shared and self.is_free(device) and device not in taken:
                self.start(task)

    def start(self, task: int) -> None:
        self.begun[task] = self.now
        self.called.pop(task, None)
        for device in self.graph.devices_of(task):
            self.orders[device].append(task)

    def choose(self, device: int) -> int | None:
        settings = self.resolved.devices[device]
        owed = sorted(self.ready(device, "W"), key=lambda task: (self.arrival(task), task))
        if len(owed) > settings.weights_late:
            return owed[0]
        together = [task for lane in "FB" for task in self.ready(device, lane) if self.goes_first(task)]
        allowed = [task for task in together if self.is_next(task) and self.may(task)]
        if allowed:
            return min(allowed, key=lambda task: self.waited((device, task)))
        backward = self.backward_first(device)
        for lane in "BF" if backward else "FB":
            task, waits = self.pick(device, lane)
            if task is not None:
                return task
            if waits and settings.types.wait and not self.pressed:
                break
        mine = [t for t in range(self.graph.num_actions) if device in self.graph.devices_of(t)]
        done = all(task in self.begun for task in mine if self.kind(task) != "W")
        return owed[0] if owed and (settings.weights_fill or done or self.pressed) else None

    def backward_first(self, device: int) -> bool:
        settings = self.resolved.devices[device]
        lanes = [self.lane(task) for task in self.chosen(device) if self.lane(task) in "FB"]
        last = lanes[-1] if lanes else "B"
        run = next((n for n, lane in enumerate(reversed(lanes)) if lane != last), len(lanes))
        unit = settings.forward_unit if last == "F" else settings.backward_unit
        match settings.types.first:
            case "bwd-first":
                return last == "B" or run % unit == 0
            case "fwd-first":
                return last == "B" and run % unit != 0
            case _:
                return (run < unit and bool(lanes)) if last == "B" else run >= unit

    def pick(self, device: int, lane: str) -> tuple[int | None, bool]:
        """What the device takes of a lane, and whether nothing but time keeps it from taking something."""
        settings = self.resolved.devices[device]
        traversal = settings.forward if lane == "F" else settings.backward
        ready = [task for task in self.ready(device, lane) if not self.goes_first(task)]
        mine = [task for task in self.of_lane(device, lane) if not self.goes_first(task)]
        stages = sorted(
            {self.stage(task) for task in mine},
            key=lambda stage: (self.place(stage), stage),
            reverse=traversal.rules.direction == "depth-first",
        )
        left = [s for s in stages if any(self.stage(t) == s and t not in self.begun for t in mine)]
        turn, count = self.turn(device, lane, traversal.interval)
        if traversal.interval is not None and stages:
            if turn is None:
                first = stages.index(next(s for s in stages if self.waits_for_none(s, stages, lane)))
            else:
                first = stages.index(turn) + (count == traversal.interval)
            left = [s for s in (*stages[first:], *stages[:first]) if s in left]
        for stage in left:
            heads = [task for task in ready if self.stage(task) == stage]
            if heads and self.may(min(heads)):
                return min(heads), False
            if not heads and traversal.interval is not None and not self.pressed:
                break
        awaited = left[:1] if traversal.interval is not None else left
        coming = [min(t for t in mine if self.stage(t) == s and t not in self.begun) for s in awaited]
        some = any(self.may(task) for task in coming)
        return None, some and not any(self.stage(task) in awaited for task in ready)

    def waits_for_none(self, stage: int, stages: list[int], lane: str) -> bool:
        """Whether no way leads to a stage's actions of a lane from those of the others."""
        operations = self.graph.workload.operations
        at = {operation.id: (operation.stage, LANE.get(operation.kind, operation.kind)) for operation in operations}
        before, found = {(stage, lane)}, 0
        while found < len(before):
            found = len(before)
            before |= {at[d.source] for d in self.graph.workload.dependencies if at[d.target] in before}
        return not any((other, lane) in before for other in stages if other != stage)

    def turn(self, device: int, lane: str, interval: int | None) -> tuple[int | None, int]:
        """The stage that had the last turn, and how many actions of it."""
        stage, count = None, 0
        for task in self.chosen(device):
            if self.lane(task) == lane:
                fresh = self.stage(task) != stage or count == interval
                stage, count = self.stage(task), 1 if fresh else count + 1
        return stage, count

    def chosen(self, device: int) -> list[int]:
        """The device's own choices so far."""
        return [task for task in self.orders[device] if self.calls(device, task) and not self.goes_first(task)]

    def goes_first(self, task: int) -> bool:
        return self.shared_first and len(self.graph.devices_of(task)) > 1 and self.lane(task) in "FB"

    def is_next(self, task: int) -> bool:
        alike = [
            t for t in range(self.graph.num_actions) if self.graph.operation_of[t] == self.graph.operation_of[task]
        ]
        return task == min(t for t in alike if t not in self.begun)

    def waited(self, pick: tuple[int, int]) -> tuple[int, int]:
        """When a shared action was there: now, if it waits for nothing; then the number of its operation."""
        task = pick[1]
        return (self.arrival(task) or 0) if self.sources[task] else self.now, self.graph.operation_of[task]

    def is_asked_for(self, task: int) -> bool:
        """Whether a first action of several devices is just what the forward behind it could take now."""
        behind = [t for t, _ in self.graph.successors[task] if t < self.graph.num_actions and self.kind(t) == "F"]
        alone = [t for t in behind if len(self.graph.devices_of(t)) == 1]
        if self.sources[task] or not self.goes_first(task) or self.kind(task) != "F":
            return True
        counted = [t for t in alone if self.count(t) == self.count(task)]
        return not counted or any(self.is_next(t) and self.has_room(t) for t in counted)

    def count(self, task: int) -> int:
        return self.graph.operation_of.count(self.graph.operation_of[task])

    def has_room(self, task: int) -> bool:
        most = self.resolved.in_flight[self.stage(task)]
        return most is None or self.in_flight([self.stage(task)]) < most

    def next(self, task: int) -> int:
        """When the operation of an action that has begun may start the next one."""
        return self.begun[task] + self.resolved.every[self.stage(task)].get(role_of(self.kind(task)), 0)

    def may(self, task: int) -> bool:
        if not self.is_asked_for(task):
            return False
        alike = [t for t in self.begun if self.graph.operation_of[t] == self.graph.operation_of[task]]
        if any(self.next(other) > self.now for other in alike):
            return False
        if self.kind(task) != "F":
            return True
        stage, limits = self.stage(task), self.resolved
        most = limits.in_flight[stage]
        if most is not None and self.in_flight([stage]) >= most:
            return False
        for device in self.graph.devices_of(task):
            most, stages = limits.devices[device].limit, self.graph.workload.stages
            own = [s for s, there in enumerate(stages) if device in there.devices and not limits.is_shared[s]]
            if most is not None and not limits.is_shared[stage] and self.in_flight(own) >= most:
                return False
        return True

    def in_flight(self, stages: list[int]) -> int:
        kinds = [self.kind(task) for task in self.begun if self.stage(task) in stages]
        return kinds.count("F") - kinds.count("B") - kinds.count("I")

    def ready(self, device: int, lane: str) -> list[int]:
        tasks = [t for t in self.of_lane(device, lane) if t not in self.begun and t not in self.called]
        return [task for task in tasks if (time := self.arrival(task)) is not None and time <= self.now]

    @cache  # noqa: B019  the only thing that is kept: it is slow, and never changes
    def of_lane(self, device: int, lane: str) -> list[int]:
        return [t for t in range(self.graph.num_actions) if self.lane(t) == lane and self.calls(device, t)]

    def calls(self, device: int, task: int) -> bool:
        """Whether a device may choose an action: of several, those where its neighbours before, or after it, run."""
        graph, devices = self.graph, self.graph.devices_of(task)
        if len(devices) == 1:
            return device in devices
        operation = graph.workload.operations[graph.operation_of[task]]
        dependencies = [(d.source, d.target) for d in graph.workload.dependencies]
        before = [source for source, target in dependencies if target == operation.id]
        after = [target for source, target in dependencies if source == operation.id]
        for ids in (before, after):
            stages = [other.stage for other in graph.workload.operations if other.id in ids]
            near = {d for s in stages if s != operation.stage for d in graph.workload.stages[s].devices}
            if near & set(devices):
                return device in near & set(devices)
        return device in devices

    def arrival(self, task: int) -> int | None:
        """When all that a task waits for is there; None if that is not known yet."""
        times = list(self.arrivals(task))
        return None if None in times else max((time for time in times if time is not None), default=0)

    def arrivals(self, task: int) -> Iterator[int | None]:
        for source, lag in self.sources[task]:
            if source >= self.graph.num_actions:
                yield self.arrival(source)
            else:
                yield self.end(source) + lag if source in self.begun else None

    def is_free(self, device: int) -> bool:
        return not self.orders[device] or self.end(self.orders[device][-1]) <= self.now

    def end(self, task: int) -> int:
        return self.begun[task] + self.duration(task)

    def duration(self, task: int) -> int:
        return 1 if self.unit else self.graph.durations[task]

    def kind(self, task: int) -> str:
        return self.graph.workload.operations[self.graph.operation_of[task]].kind

    def place(self, stage: int) -> int:
        """How many stages come before that a stage is connected with, none on devices of one that stands on fewer."""
        stages, connected = self.graph.workload.stages, {stage}
        while True:
            ends = [(int(d.source[:-1]), int(d.target[:-1])) for d in self.graph.workload.dependencies]
            more = {s for end in ends for s in end if connected & set(end)} | connected
            if more == connected:
                break
            connected = more
        groups = [set(stages[other].devices) for other in connected]
        own = {s: set(stages[s].devices) for s in connected}
        shared = {s for s in connected if any(group & own[s] and len(group) < len(own[s]) for group in groups)}
        return sum(other < stage and other not in shared for other in connected)

    def lane(self, task: int) -> str:
        return LANE.get(self.kind(task), self.kind(task))

    def stage(self, task: int) -> int:
        return self.graph.workload.operations[self.graph.operation_of[task]].stage
