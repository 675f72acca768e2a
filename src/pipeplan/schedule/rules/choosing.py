"""What a device takes next: the step function (FlexPipe, Algorithm 1) over its ready queues.

A *lane* of a device holds the ready queues of its stages for one sort of action: forwards, backwards (B and I), or a
kind of instruction. Weight gradients wait in one queue per device, oldest first.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from pipeplan.errors import UsageError
from pipeplan.schedule.rules.language import ReadyAction, Rules, State, TypeOrder, answer_of, name_of
from pipeplan.schedule.rules.settings import DeviceSettings, Resolved, Traversal
from pipeplan.texts import shown
from pipeplan.workload.kinds import BACKWARD_ROLES, Role, role_of
from pipeplan.workload.task_graph import TaskGraph


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What keeps a ready action from starting: a key of the rules, the stage or device it is about, and its limit."""

    key: str
    number: int
    limit: int = 0
    name: str = ""

    def __str__(self) -> str:
        match self.key:
            case "in_flight":
                return f"stage {self.number} has its {self.limit} micro-batches in flight (in_flight)"
            case "in_flight_device":
                return f"device {self.number} has its {self.limit} micro-batches in flight (in_flight_device)"
            case "every":
                return f"stage {self.number} starts one in {self.limit} steps (every)"
            case "shared_first":
                return f"stage {self.number} goes no further ahead than what follows it asks for (shared_first)"
            case "memory":
                return f"device {self.number} has no room for it besides its oldest micro-batch (fit_memory)"
            case _:
                return f"the check {self.name} refuses it"


_FORWARD, _BACKWARD = _IN_TURN = "forward", "backward"
"""The lanes of forwards and of backwards, whole or of inputs; every other kind has a lane with its own name."""

_SHARED = "shared"
"""The lane of stages on several devices where they go first. No kind is written as any of these three."""


_SERIES = (str, list, tuple)
"""What a function may name kinds in; a text is one of letters."""


def _lane_of(kind: str) -> str:
    """The name of the lane in which actions of a kind wait."""
    role = role_of(kind)
    if role is Role.FORWARD:
        return _FORWARD
    return _BACKWARD if role in BACKWARD_ROLES else kind


@dataclass(slots=True)
class _Lane:
    """The operations of a device for one sort of action, in the order of preference.

    With an interval ``turn`` is the place of the operation whose turn it is, ``count`` how many actions it has had. The
    first turn is that of the first operation that waits for no other one of the lane.
    """

    name: str
    operations: list[int]
    traversal: Traversal
    interval: int | None
    turn: int = -1
    count: int = 0

    def turns(self, left: Sequence[int]) -> Iterator[int]:
        """The operations that have actions left, from the one whose turn it is."""
        first = self.turn if self.turn >= 0 and self.count != self.interval else self.turn + 1
        for x in (*self.operations[first:], *self.operations[:first]):
            if left[x]:
                yield x

    def started(self, x: int) -> None:
        """An action of one of the operations starts."""
        if self.interval is None:
            return
        place = self.operations.index(x)
        fresh = place != self.turn or self.count == self.interval
        self.turn, self.count = place, 1 if fresh else self.count + 1


@dataclass(slots=True)
class _DeviceLanes:
    """One device's lanes and what its last actions were."""

    settings: DeviceSettings
    lanes: dict[str, _Lane]
    backward_first: list[_Lane]  # all lanes in the order in which they are tried
    forward_first: list[_Lane]
    left: int  # actions other than weight gradients that have not started
    owed: deque[int] = field(default_factory=deque)  # weight gradients that could start
    last: str | None = None  # the lane of the last forward or backward
    run: int = 0  # how many of them in a row

    def ordered(self) -> list[_Lane]:
        """The lanes in the order in which they are tried now."""
        return self.backward_first if self._backward_goes_first() else self.forward_first

    def _backward_goes_first(self) -> bool:
        settings, first = self.settings, self.settings.types.first
        if first == "interleaved":
            return self.run >= settings.forward_unit if self.last != _BACKWARD else self.run < settings.backward_unit
        if first == "bwd-first":
            return self.last != _FORWARD or self.run % settings.forward_unit == 0
        return self.last == _BACKWARD and self.run % settings.backward_unit != 0


class Chooser:
    """The ready queues of all operations, and the choice of every device."""

    def __init__(
        self,
        graph: TaskGraph,
        rules: Rules,
        resolved: Resolved,
        obstacle: Callable[[int], Obstacle | None],
        state: State,
    ) -> None:
        operations = graph.workload.operations
        self._graph, self._obstacle, self._state = graph, obstacle, state
        self._kind: list[str] = [operation.kind for operation in operations]
        self._defers = [operation.role is Role.WEIGHT_GRAD for operation in operations]
        self._stage = [operation.stage for operation in operations]
        self._number: dict[tuple[str, int], int] = {
            (operation.kind, operation.stage): x for x, operation in enumerate(operations)
        }
        self._queues: list[list[int]] = [[] for _ in operations]
        self._left = [graph.offsets[x + 1] - graph.offsets[x] for x in range(len(operations))]
        self._callers = [callers(graph, x) for x in range(len(operations))]
        self._last = {instruction.kind for instruction in rules.instructions if instruction.last}
        self._pressed = False
        self._lane_of = [_lane_of(kind) for kind in self._kind]
        self._several = {x for x, devices in enumerate(graph.workload.resources[: len(operations)]) if len(devices) > 1}
        if rules.shared_first:
            lanes = enumerate(self._lane_of)
            self._lane_of = [_SHARED if x in self._several and name in _IN_TURN else name for x, name in lanes]
        waiting = {target for _, target, _ in graph.workload.lags}
        self._is_first = [x not in waiting for x in range(len(operations))]
        self._since: dict[int, int] = {}  # [action of several devices] when it became ready
        self._devices = [
            self._device(device, settings, resolved.depths) for device, settings in enumerate(resolved.devices)
        ]

    @property
    def has_functions(self) -> bool:
        """Whether any device chooses by a user's function."""
        return any(
            callable(what)
            for device in self._devices
            for what in (
                device.settings.types.first,
                device.settings.forward.rules.direction,
                device.settings.backward.rules.direction,
            )
        )

    @contextmanager
    def pressed(self) -> Iterator[None]:
        """Nothing can start: for once turns are not waited for, and weight gradients run as soon as they can."""
        self._pressed = True
        try:
            yield
        finally:
            self._pressed = False

    def operation(self, kind: str, stage: int) -> int | None:
        """The operation of a kind and stage; None if there is none."""
        return self._number.get((kind, stage))

    def left(self, x: int) -> int:
        """How many actions of an operation have not started."""
        return self._left[x]

    def callers_of(self, x: int) -> tuple[int, ...]:
        """The devices that may choose an operation's actions."""
        return self._callers[x]

    def ready(self, device: int, kind: str) -> list[ReadyAction]:
        """The next ready action of each of a device's stages for one kind."""
        heads = (self._queues[x][0] for x in sorted(self._operations(device, kind)) if self._queues[x])
        return [self.candidate(device, task) for task in heads]

    def candidate(self, device: int, task: int) -> ReadyAction:
        """An action as user functions see it."""
        x = self._graph.operation_of[task]
        return ReadyAction(device, self._kind[x], self._stage[x], task - self._graph.offsets[x], task)

    def add(self, task: int) -> Sequence[int]:
        """Put an action into its ready queue; the devices that may choose it."""
        x = self._graph.operation_of[task]
        heapq.heappush(self._queues[x], task)
        if x in self._several:
            self._since[task] = self._state.now
        if self._defers[x]:
            for device in self._callers[x]:
                self._devices[device].owed.append(task)
        return self._callers[x]

    def calling_order(self, task: int) -> tuple[int, int]:
        """Sort key of shared actions that go first: what became ready first; what waits for nothing does so now."""
        x = self._graph.operation_of[task]
        return (self._state.now if self._is_first[x] else self._since[task]), x

    def take(self, task: int) -> int:
        """Take an action out of its ready queue."""
        x = self._graph.operation_of[task]
        if self._queues[x][0] == task:
            heapq.heappop(self._queues[x])
        else:
            self._queues[x].remove(task)
            heapq.heapify(self._queues[x])
        if self._defers[x]:
            for device in self._callers[x]:
                self._devices[device].owed.remove(task)
        return task

    def started(self, task: int) -> None:
        """Count an action that starts; turns and units go on where it was the devices' own choice."""
        x = self._graph.operation_of[task]
        self._left[x] -= 1
        if self._defers[x]:
            return
        for device in self._graph.devices_of(task):
            self._devices[device].left -= 1
        name = self._lane_of[x]
        for device in self._callers[x]:
            mine = self._devices[device]
            mine.lanes[name].started(x)
            if name in _IN_TURN:
                mine.run = mine.run + 1 if mine.last == name else 1
                mine.last = name

    def choose(self, device: int) -> int | None:
        """The action a device would start now; None if there is none it may."""
        mine = self._devices[device]
        types = mine.settings.types
        kinds = None if isinstance(types.first, str) else self._kinds(types.first, device)
        if self._is_too_late(mine, kinds or ()):
            return mine.owed[0]
        if kinds is not None:
            return self._by_function(device, kinds)
        for lane in mine.ordered():
            task = self._pick(device, lane)
            if task is not None:
                return task
            if types.wait and lane.name in _IN_TURN and self._is_waited_for(lane):
                break
        return self._filling(mine)

    def _is_too_late(self, mine: _DeviceLanes, kinds: Sequence[str]) -> bool:
        """Whether more weight gradients are owed than may be, and the oldest may start.

        A function that names their kind decides when they run, unless the rules say how late they may be.
        """
        if not mine.settings.says_late and any(role_of(kind) is Role.WEIGHT_GRAD for kind in kinds):
            return False
        return len(mine.owed) > mine.settings.weights_late and self._obstacle(mine.owed[0]) is None

    def _is_waited_for(self, lane: _Lane) -> bool:
        """Whether nothing but time keeps all actions of a lane that are left, and one would be allowed."""
        left = list(lane.turns(self._left))
        if lane.interval is not None:
            left = left[:1]
        if self._pressed or any(self._queues[x] for x in left):
            return False
        return any(self._obstacle(self._graph.offsets[x + 1] - self._left[x]) is None for x in left)

    def _kinds(self, order: TypeOrder, device: int) -> Sequence[str]:
        """The kinds that a user's function has a device try, first to last."""
        kinds = answer_of("order of kinds", order, self._state, device)
        if not isinstance(kinds, _SERIES) or not all(isinstance(kind, str) for kind in kinds):
            raise UsageError(
                f"the order of kinds {name_of(order)} returns {shown(kinds)}; let it return kinds such as 'BF' or "
                "['B', 'F']"
            )
        return kinds

    def _by_function(self, device: int, kinds: Sequence[str]) -> int | None:
        mine = self._devices[device]
        for kind in (_SHARED, *kinds):
            if role_of(kind) is Role.WEIGHT_GRAD:
                task = next((owed for owed in mine.owed if self._obstacle(owed) is None), None)
            else:
                lane = mine.lanes.get(_lane_of(kind))
                task = None if lane is None else self._pick(device, lane)
            if task is not None:
                return task
        return self._filling(mine)

    def _filling(self, mine: _DeviceLanes) -> int | None:
        """A weight gradient for a device that has nothing else to do."""
        if not mine.owed or not (mine.settings.weights_fill or mine.left == 0 or self._pressed):
            return None
        return mine.owed[0] if self._obstacle(mine.owed[0]) is None else None

    def _pick(self, device: int, lane: _Lane) -> int | None:
        """The action of a lane whose turn it is, or the first one in the order of preference that may start."""
        direction = lane.traversal.rules.direction
        if not isinstance(direction, str):
            heads = [self._queues[x][0] for x in lane.operations if self._queues[x]]
            allowed = [self.candidate(device, task) for task in heads if self._obstacle(task) is None]
            chosen = answer_of("order of stages", direction, self._state, allowed) if allowed else None
            if chosen is not None and chosen not in allowed:
                raise UsageError(
                    f"the order of stages {name_of(direction)} chose {shown(chosen)} on device {device}, which is none "
                    "of those it was given; let it return one of them, or None"
                )
            return None if chosen is None else chosen.task
        if lane.name == _SHARED:
            ready = [self._queues[x][0] for x in lane.operations if self._queues[x]]
            return min((task for task in ready if not self._obstacle(task)), key=self.calling_order, default=None)
        waits = lane.interval is not None and not self._pressed
        for x in lane.operations if lane.interval is None else lane.turns(self._left):
            queue = self._queues[x]
            if queue and self._obstacle(queue[0]) is None:
                return queue[0]
            if waits and not queue:
                return None  # its turn
        return None

    def _operations(self, device: int, kind: str) -> list[int]:
        if role_of(kind) is Role.WEIGHT_GRAD:
            return [x for x, callers in enumerate(self._callers) if self._kind[x] == kind and device in callers]
        lane = self._devices[device].lanes.get(_lane_of(kind))
        return [] if lane is None else [x for x in lane.operations if self._kind[x] == kind]

    def _first_turn(self, operations: Sequence[int]) -> int:
        """The position of the first operation that does not wait for any other, directly or indirectly."""
        others = sum(1 << x for x in operations)
        return next(place for place, x in enumerate(operations) if not self._before[x] & others)

    @cached_property
    def _before(self) -> list[int]:
        """[operation] a bit for each one that it waits for, at any remove."""
        workload = self._graph.workload
        before = [0] * len(workload.operations)
        for source, target, _ in sorted(workload.lags):
            before[target] |= before[source] | 1 << source
        return before

    @cached_property
    def _chosen_by(self) -> list[list[int]]:
        """[device] the operations whose actions it may choose."""
        found: list[list[int]] = [[] for _ in self._graph.workload.devices]
        for x, callers in enumerate(self._callers):
            for device in callers:
                found[device].append(x)
        return found

    def _device(self, device: int, settings: DeviceSettings, depths: Sequence[tuple[int, int]]) -> _DeviceLanes:
        lanes: dict[str, _Lane] = {}
        for x in self._chosen_by[device]:
            if not self._defers[x]:
                name = self._lane_of[x]
                traversal = settings.backward if name == _BACKWARD else settings.forward
                lanes.setdefault(name, _Lane(name, [], traversal, traversal.interval)).operations.append(x)
        for lane in lanes.values():
            lane.operations.sort(
                key=lambda x: depths[self._stage[x]], reverse=lane.traversal.rules.direction == "depth-first"
            )
            if lane.interval is not None:
                lane.turn, lane.count = self._first_turn(lane.operations) - 1, lane.interval
        others = sorted(lanes.keys() - set(_IN_TURN))

        def ordered(*between: str) -> list[_Lane]:
            names = [name for name in others if name not in self._last]
            names += [*between, *(name for name in others if name in self._last)]
            return [lanes[name] for name in names if name in lanes]

        there = (x for x in self._graph.workload.on_resource[device] if x < len(self._kind))
        return _DeviceLanes(
            settings,
            lanes,
            ordered(_BACKWARD, _FORWARD),
            ordered(_FORWARD, _BACKWARD),
            sum(self._left[x] for x in there if not self._defers[x]),
        )


def callers(graph: TaskGraph, x: int) -> tuple[int, ...]:
    """The devices that may choose an operation's actions: all, or of several those that are its neighbours'."""
    workload = graph.workload
    devices, stage = workload.resources[x], workload.operations[x].stage
    if len(devices) == 1:
        return devices
    before = [source for source, target, _ in workload.lags if target == x]
    after = [target for source, target, _ in workload.lags if source == x]
    for neighbours in (before, after):
        there = {
            device for y in neighbours if workload.operations[y].stage != stage for device in workload.resources[y]
        }
        if there & set(devices):
            return tuple(device for device in devices if device in there)
    return devices
