"""The scheduler of rules (FlexPipe, section 5 and Algorithm 1): every free device picks among its ready actions.

The instruction pool is the task graph: each action counts what it still waits for. An action with nothing left to wait
for goes into the ready queue of its operation, from where the devices that may choose it take it, lowest micro-batch
first. All devices that are free at a moment choose by what was known before it, and only then start what they
chose: nobody sees what others do in the same step (the local buffers). On unit steps every action lasts one step and
messages none; on true time both last as long as they do.

An action of several devices is called for by a device that chooses it. All its devices then join in as soon as they
have ended what they are running, and it starts on all of them together. Only neighbours call: devices where a stage
before it in the graph has run the micro-batch, or, if none is among its own, where a stage after it will.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeplan.errors import InfeasibleError, PipeplanError, UsageError
from pipeplan.graphs import find_cycle, in_circle
from pipeplan.schedule.rules.choosing import Chooser, Obstacle
from pipeplan.schedule.rules.given_order import orders_of
from pipeplan.schedule.rules.language import ReadyAction, Rules, answer_of, name_of, naming
from pipeplan.schedule.rules.separation import Joined, separate
from pipeplan.schedule.rules.settings import Resolved
from pipeplan.search_constants import STUCK_STEPS
from pipeplan.time_limit import checked, checkpoint
from pipeplan.workload.engine import Engine
from pipeplan.workload.kinds import BACKWARD_ROLES, Role
from pipeplan.workload.memory import MemoryState, capacities
from pipeplan.workload.task_graph import TaskGraph


class FullError(InfeasibleError):
    """What rules start does not fit into memory, as is known before their run has ended."""


def schedule_by_rules(graph: TaskGraph, rules: Rules, *, until_full: bool = False) -> list[list[int]]:
    """[device] its actions in the order in which the rules start them.

    Cost is linear in actions and dependencies, times the stages of a device, and a logarithm. A run ``until_full`` ends
    as soon as a device has no room for what it starts, where its order tells what it holds, and nothing is separated.

    Raises:
        FullError: so it ended.
        UsageError: the rules do not apply to the workload, or actions wait for each other in a circle; the text names
            the rules, too.
        InfeasibleError: limits, checks or memory block every action that is ready; the text names them.
    """
    if not rules.separate:
        return unseparated(graph, rules, until_full=until_full)
    joined = Joined.of(graph)
    return separate(graph, joined.apart(unseparated(joined.graph, rules)))


def unseparated(graph: TaskGraph, rules: Rules, *, until_full: bool = False) -> list[list[int]]:
    """The same without separation, whatever the rules say."""
    with naming(rules):
        if rules.order:
            return orders_of(graph, rules.order)
        run = RulesRun(graph, rules, until_full=until_full)
        run.run()
    return run.device_orders


@dataclass(slots=True)
class _Call:
    """An action of several devices, and how many of them are still running something else."""

    task: int
    missing: int


class RulesRun(Engine):
    """One run of the rules in steps, or in time. It is the :class:`State` that user functions see."""

    def __init__(self, graph: TaskGraph, rules: Rules, *, until_full: bool = False) -> None:
        super().__init__(graph, unit_steps=rules.time == "unit")
        operations, workload = graph.workload.operations, graph.workload
        self._resolved = Resolved(workload, rules)
        self._limits = self._resolved.in_flight
        self._device_limits = [settings.limit for settings in self._resolved.devices]
        self._checks = rules.checks
        self._memory = MemoryState(graph) if rules.fit_memory else None
        limited = until_full and workload.order_tells_memory and any(room is not None for room in capacities(workload))
        self._room = MemoryState(graph) if limited else None
        self._together = [len(devices) > 1 for devices in workload.resources]
        self._stage = [operation.stage for operation in operations]
        self._role = [operation.role for operation in operations]
        self._is_forward = [role is Role.FORWARD for role in self._role]
        self._flight = [1 if role is Role.FORWARD else -1 if role in BACKWARD_ROLES else 0 for role in self._role]
        offsets = zip(graph.offsets, workload.slots, strict=False)
        self._parts_end = [first + 2 * slots.num_parted for first, slots in offsets]
        self._own = [not shared for shared in self._resolved.is_shared]
        self._begun: list[int | None] = [None] * graph.num_actions
        self._in_flight = [0] * len(workload.stages)
        self._num_devices = len(workload.devices)
        self._on_device = [0] * self._num_devices
        self._left = graph.num_actions
        self._calls: list[_Call | None] = [None] * self._num_devices
        self._startable: list[_Call] = []
        self._woken = set(range(self._num_devices))
        self._every = [self._resolved.every[o.stage].get(o.role, 0) for o in operations]
        self._earliest = [0] * len(operations)
        self._arriving: dict[int, list[int]] = {}  # {time: actions that are ready then}
        self._chooser = Chooser(graph, rules, self._resolved, self.obstacle, self)
        self._shared_first = rules.shared_first
        self._asking: dict[int, list[int]] = {}
        if rules.shared_first:
            self._asking = self._askers()
        self._attentive = self._chooser.has_functions or bool(rules.checks)
        self._watchers = [self._callers_kept_by(device) for device in range(self._num_devices)]

    # what user functions see (language.State)

    @property
    def num_devices(self) -> int:
        """As :class:`State` says."""
        return self._num_devices

    @property
    def num_microbatches(self) -> int:
        """As :class:`State` says."""
        return self.graph.workload.num_microbatches

    def steps(self, device: int) -> int:
        """Actions that a device has started."""
        return len(self.orders[device])

    def step_of(self, kind: str, stage: int, microbatch: int) -> int | None:
        """When an action started; None if it has not."""
        x = self._chooser.operation(kind, stage)
        task = -1 if x is None else self.graph.offsets[x] + microbatch
        return self._begun[task] if x is not None and task < self.graph.offsets[x + 1] else None

    def in_flight(self, stage: int) -> int:
        """Micro-batches of a stage between the starts of their forward and backward."""
        return self._in_flight[stage]

    def stages_on(self, device: int) -> Sequence[int]:
        """The stages of a device, in order."""
        return [number for number, stage in enumerate(self.graph.workload.stages) if device in stage.devices]

    def ready(self, device: int, kind: str) -> Sequence[ReadyAction]:
        """The next ready action of one kind of each of the device's stages."""
        return self._chooser.ready(device, kind)

    # the run

    def run(self) -> None:
        """Go from moment to moment until everything has started.

        An event is a device that is free, or (the number after the devices) actions that are ready, or after that an
        operation that may start again.
        """
        for task, count in enumerate(self.waiting[: self.graph.num_actions]):
            if count == 0:
                self._woken.update(self._chooser.add(task))
        self.events.clear()
        self._choose()
        moments = 0
        while self._left:
            moments += 1
            if not moments % 8:
                checkpoint()
            if self.events:
                self._advance()
                self._choose()
            elif not self._stir():
                raise stuck_error(self.graph, self.waiting, self._begun, self.obstacle)

    def _advance(self) -> None:
        """Go on to the next moment at which something ends or arrives, and take all in that does."""
        events, num_devices = self.events, self._num_devices
        self.now = now = events[0][0]
        while events and events[0][0] == now:
            number = heapq.heappop(events)[1]
            if number < num_devices:
                self._end(number)
            elif number > num_devices:
                self._woken.update(self._chooser.callers_of(number - num_devices - 1))
        for task in sorted(self._arriving.pop(now, ())):
            self._woken.update(self._chooser.add(task))

    def _end(self, device: int) -> None:
        """A device is free, or has come to what it is called for."""
        call = self._calls[device]
        if call is None:
            self._woken.add(device)
            return
        call.missing -= 1
        if call.missing == 0:
            self._startable.append(call)

    def arrived(self, task: int) -> None:
        """Nobody sees an action before it is ready."""
        time = self.ready_at[task]
        if time in self._arriving:
            self._arriving[time].append(task)
        else:
            self._arriving[time] = [task]
            heapq.heappush(self.events, (time, self._num_devices))

    def choose(self, device: int) -> int | None:
        """The action that a device would start now, perhaps together with others, which it then calls."""
        return self._chooser.choose(device)

    def _choose(self) -> None:
        """All free devices choose; then they start what they chose, calls for several devices first."""
        asked: Iterable[int] = range(self._num_devices) if self._attentive else sorted(self._woken)
        free, now = self.free, self.now
        idle = [device for device in asked if free[device] <= now and self._calls[device] is None]
        picks = [(device, task) for device in idle if (task := self.choose(device)) is not None]
        self._woken.clear()
        for call in self._startable:
            self.start(call.task)
        self._startable.clear()
        together = [pick for pick in picks if self._together[self._operation_of[pick[1]]]]
        for device, task in sorted(together, key=self._calling_order):
            self._call(device, task)
        for device, task in picks:
            alone = not self._together[self._operation_of[task]]
            if alone and self._calls[device] is None and free[device] <= now:
                self.start(self._chooser.take(task))

    def _calling_order(self, pick: tuple[int, int]) -> tuple[int, int]:
        if self._shared_first:
            return self._chooser.calling_order(pick[1])
        return self._role[self._operation_of[pick[1]]] not in BACKWARD_ROLES, pick[0]

    def _call(self, device: int, task: int) -> None:
        """Call all devices of an action together, unless another call came before that it cannot be beside."""
        devices, now = self.graph.devices_of(task), self.now
        busy = self.free[device] > now or any(self._calls[other] for other in devices)
        if busy or self.obstacle(task) is not None:
            self._woken.add(device)
            return
        call = _Call(self._chooser.take(task), sum(self.free[other] > now for other in devices))
        for other in devices:
            self._calls[other] = call
        if call.missing == 0:
            self.start(task)

    def start(self, task: int) -> None:
        """Start it, and note what that means for limits, memory and those who watch them."""
        super().start(task)
        x = self._operation_of[task]
        self._left -= 1
        self._begun[task] = self.now
        self._chooser.started(task)
        if self._memory is not None:
            self._memory.run(task)
        if self._room is not None:
            full = self._room.full(task)
            if full is not None:
                raise FullError(f"device {full} has no room for {self.graph.label(task)}")
            self._room.run(task)
        for device in self._resources[x]:
            self._calls[device] = None
            if self._watchers[device]:
                self._woken.update(self._watchers[device])
        self._fly(x, task)
        if self._every[x]:
            self._earliest[x] = self.now + self._every[x]
            heapq.heappush(self.events, (self._earliest[x], self._num_devices + 1 + x))

    def _fly(self, x: int, task: int) -> None:
        """A forward brings a micro-batch into flight, its second part no other; a backward takes one out."""
        change = self._flight[x]
        if not change or (change > 0 and self._is_second_part(x, task)):
            return
        stage = self._stage[x]
        self._in_flight[stage] += change
        if self._own[stage]:
            for device in self._resources[x]:
                self._on_device[device] += change

    def _is_second_part(self, x: int, task: int) -> bool:
        return task < self._parts_end[x] and (task - self.graph.offsets[x]) % 2 == 1

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
                allows = answer_of("check", check, self, candidate)
                if allows is None:
                    raise UsageError(f"the check {name_of(check)} returns nothing; let it return True or False")
                if not allows:
                    return Obstacle("check", number=0, name=name_of(check))
        return None

    def _askers(self) -> dict[int, list[int]]:
        """{forward on several devices that waits for nothing: forwards after it on one device}"""
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
        there = {x for x in self.graph.workload.on_resource[device] if x < len(self._role)}
        kept = {x for x, followers in self._asking.items() if there.intersection(followers)}
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
        for _ in range(STUCK_STEPS if self._attentive else 0):
            self.now += 1
            self._choose()
            if self.events:
                return True
        self._woken.update(range(self._num_devices))
        with self._chooser.pressed():
            self._choose()
        return bool(self.events)


def stuck_error(
    graph: TaskGraph,
    waiting: Sequence[int],
    begun: Sequence[int | None],
    obstacle: Callable[[int], Obstacle | None],
) -> PipeplanError:
    """The error that names the stuck actions, what each waits for, and what to change."""
    stuck = [task for task in range(graph.num_actions) if begun[task] is None]
    unmet = _unmet(graph, waiting, begun)
    obstacles = {task: found for task in stuck if waiting[task] == 0 and (found := obstacle(task)) is not None}
    lines = list(_lines(graph, stuck, unmet, obstacles))
    head = f"stuck with {len(stuck)} of {graph.num_actions} actions left"
    cycle = find_cycle((task, source) for task, sources in unmet.items() for source in sources)
    if cycle is not None:
        circle = in_circle([graph.label(task) for task in cycle])
        return UsageError(f"{head}: {circle} wait for each other in a circle; take one of these dependencies out")
    never = [task for task in stuck if waiting[task] > 0 and not unmet[task]]
    if never:
        names = ", ".join(graph.label(task) for task in never[:_NAMED])
        return UsageError(
            f"{head}: {names} can never become ready: all that could come before has run, and it still waits; "
            "let its readiness rule ask for no more than there is"
        )
    remedies = dict.fromkeys(_REMEDIES[found.key] for found in obstacles.values())
    return InfeasibleError("\n  ".join([f"{head}; {' or '.join(remedies) or 'change the rules'}:", *lines]))


def _lines(
    graph: TaskGraph, stuck: Sequence[int], unmet: Mapping[int, list[int]], obstacles: Mapping[int, Obstacle]
) -> Iterator[str]:
    """What the first stuck actions wait for, one of each operation, those that are ready first."""
    first = {graph.operation_of[task]: task for task in sorted(stuck, key=lambda task: (task in obstacles, -task))}
    for task in sorted(first.values(), key=lambda task: (task not in obstacles, task))[:_NAMED]:
        if task in obstacles:
            yield f"{graph.label(task)} is ready, but {obstacles[task]}"
        else:
            sources = ", ".join(graph.label(source) for source in unmet[task][:_NAMED])
            yield f"{graph.label(task)} waits for {sources or 'its turn'}"


def _unmet(graph: TaskGraph, waiting: Sequence[int], begun: Sequence[int | None]) -> defaultdict[int, list[int]]:
    """{task: the tasks it waits for that have not run}"""
    unmet: defaultdict[int, list[int]] = defaultdict(list)
    for source in checked(range(graph.num_tasks), 1024):
        done = begun[source] is not None if source < graph.num_actions else waiting[source] == 0
        if not done:
            for target, _ in graph.successors[source]:
                unmet[target].append(source)
    return unmet


_REMEDIES = {
    "in_flight": "raise in_flight",
    "in_flight_device": "raise in_flight_device",
    "every": "lower every",
    "shared_first": "leave out shared_first",
    "memory": "raise --memory, or lower in_flight",
    "check": "let the check allow one of them",
}

_NAMED = 5
"""Stuck actions that are named, each with what it waits for."""
