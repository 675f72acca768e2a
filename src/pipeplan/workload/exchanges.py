"""When a stage's sharded state is gathered and reduced by actions of programs, beside compute.

Here: the one rule by which UNSHARD, RESHARD and REDUCE_GRAD (torch's words) stand among a device's actions, and when
they run. Not here: what they cost (:mod:`pipeplan.costs`), and sums and gathers after the actions (``tail``).

The devices of a stage whose state actions exchange have the same stages, and one network together, which runs one
exchange at a time, in the order of the programs, beside compute.

* UNSHARD stands right before the first action that needs a stage's parameters after a RESHARD, RESHARD right after the
  last one that they stay gathered for. A group of blocks is gathered as soon as its last copy was given up; the action
  starts when each group will be there before it comes to the group's blocks. There is memory for all groups from when
  the action before has ended, when whoever runs the program comes to their UNSHARD, be it that the network starts with
  some of them later; for those that it starts with earlier from then on.
* REDUCE_GRAD of a group may run as soon as the last action that adds to what it reduces has come to the group's end. An
  action that adds to gradients comes to a group only when the group's last gradients were reduced: there is one buffer
  for each.
* No exchange begins before the action begins that stands last before it in the programs: whoever runs them one after
  another issues it then. Of those that are to be placed the network takes first what is ready first, of equals UNSHARD.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from math import gcd, lcm
from typing import Protocol

from pipeplan.workload.action import StateAction
from pipeplan.workload.elements import ONCE, BlockGroup, Stage
from pipeplan.workload.kinds import (
    GRADIENT_ROLES,
    GRADIENTS,
    PARAMETER_ROLES,
    PARAMETERS,
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
    MemoryKind,
    Role,
)
from pipeplan.workload.workload import Workload


class Numbered(Protocol):
    """What is needed of a graph of tasks: its workload, and where each operation's actions begin among the tasks."""

    @property
    def workload(self) -> Workload:
        """What it is of."""

    @property
    def offsets(self) -> list[int]:
        """[operation] its first task."""

    @property
    def operation_of(self) -> list[int]:
        """[task] its operation."""


_Asked = tuple[int, bool, int, int, int]
"""An exchange that may run: ready in ns, whether it reduces, a number among equals, stage and group."""


StateRun = tuple[str, int, int, int, int, int | None, bool]
"""A run of an UNSHARD, RESHARD or REDUCE_GRAD: kind, stage, group of its blocks, start and end in ns, task, after.

A RESHARD takes no time. It stands right ``after`` or before the task in the programs of its devices; None is at their
end. A tuple of numbers and texts, as there are several for each action, and nothing that collects garbage has to look
at such.
"""

WholeState = tuple[MemoryKind, int, int, int, int, int]
"""Bytes of a group of blocks that each device of a stage holds for a time: kind, stage, group, size, begin, end in ns.

Gathered parameters, or whole gradients.
"""


def passes(groups: Sequence[BlockGroup], role: Role) -> list[tuple[int, int, int]]:
    """(group, begin, end) in ns since an action's start, in the order in which it comes to the groups."""
    order = range(len(groups)) if role is Role.FORWARD else range(len(groups) - 1, -1, -1)
    ends = list(accumulate(groups[number].time_in(role) for number in order))
    return [(number, begin, end) for number, begin, end in zip(order, [0, *ends], ends, strict=False)]


@dataclass(frozen=True, slots=True)
class _StateUse:
    """What all actions of an operation come to: of which stage they are, what they need of it and add to, and when.

    ``course`` is that of :func:`passes`; ``state`` is None where the stage exchanges nothing by actions.
    """

    number: int
    stage: Stage
    duration_ns: int
    state: _StageState | None
    needs: bool
    adds: bool
    course: Sequence[tuple[int, int, int]]

    @classmethod
    def of(cls, workload: Workload, item: int, states: Mapping[int, _StageState]) -> _StateUse:
        operation = workload.operations[item]
        stage, role, state = workload.stages[operation.stage], operation.role, states.get(operation.stage)
        needs = stage.unshard_every is not None and role in PARAMETER_ROLES
        course = [] if state is None else passes(stage.block_groups, role)
        return cls(operation.stage, stage, operation.duration_ns, state, needs, role in GRADIENT_ROLES, course)


@dataclass(slots=True)
class _StageState:
    """Of a stage: actions left that need parameters, and that add to gradients; for how many more it is gathered.

    ``given_up`` and ``reduced`` [group] say when its last copy was given up, its last gradients reduced. ``added``
    counts the micro-batches whose gradients wait to be reduced. ``gathered_at`` [group] is when its gathering began,
    ``held_at`` and ``added_at`` since when it holds the bytes.
    """

    groups: Sequence[BlockGroup]
    uses: int
    additions: int
    left: int = 0
    added: int = 0
    given_up: list[int] = field(default_factory=list)
    reduced: list[int] = field(default_factory=list)
    gathered_at: list[int] = field(default_factory=list)
    held_at: list[int] = field(default_factory=list)
    added_at: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a network between two actions, in ns of the iteration: two are alike if all that comes after is.

    ``waiting`` are (ready, stage, group, since when it adds up) of what is to be reduced. ``states`` [stage] say for
    how many actions it is gathered and since when, how many were added and since when, each where that ends before the
    iteration does; and when its groups were given up and reduced.
    """

    free_ns: int
    floor_ns: int
    waiting: tuple[tuple[int, int, int, int], ...]
    states: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]

    def since(self, moment_ns: int) -> object:
        """The same in ns since a moment; what is over when the last action began does not matter."""
        floor = self.floor_ns

        def over(*times: int) -> tuple[int, ...]:
            return tuple(max(floor, time) - moment_ns for time in times)

        states = [
            (
                (left[:1], [at - moment_ns for at in left[1:]]),
                (added[:1], [at - moment_ns for at in added[1:]]),
                over(*past),
            )
            for left, added, past in self.states
        ]
        waiting = [(over(ready), stage, group, added - moment_ns) for ready, stage, group, added in self.waiting]
        return over(self.free_ns, floor), waiting, states


class Network:
    """The network of the devices that have some stages, as their actions start one after another."""

    def __init__(self, graph: Numbered, stages: Sequence[int]) -> None:
        self._graph = graph
        workload = graph.workload
        self.devices = workload.stages[stages[0]].devices
        self.free = 0
        self.runs: list[StateRun] = []
        self.held: list[WholeState] = []
        self._floor = self._ended = 0  # when the action begins, and ends, that stands last in the programs so far
        self._waiting: list[_Asked] = []  # REDUCE_GRADs
        self._states = dict[int, _StageState]()
        self._uses = dict[int, _StateUse]()  # [operation]
        for number in stages:
            groups = workload.stages[number].block_groups
            counts = [
                sum(
                    len(slots)
                    for each, slots in zip(workload.operations, workload.slots, strict=False)
                    if each.stage == number and each.role in roles
                )
                for roles in (PARAMETER_ROLES, GRADIENT_ROLES)
            ]
            if groups:
                uses, additions = counts
                self._states[number] = _StageState(
                    groups, uses, additions, 0, 0, *([0] * len(groups) for _ in range(5))
                )

    def start(self, task: int, ready_ns: int) -> int:
        """When an action starts that could start at ``ready_ns``: the next one of these devices."""
        item = self._graph.operation_of[task]
        coming = self._uses.get(item)
        if coming is None:
            coming = self._uses[item] = _StateUse.of(self._graph.workload, item, self._states)
        state, start = coming.state, ready_ns
        if state is not None:
            start = self._after_exchanges(task, coming, state, start)
        if self._waiting and self._waiting[0][0] < start:
            self._run([each for each in self._waiting if each[0] < start], task)
        self._floor, self._ended = start, start + coming.duration_ns
        if state is not None:
            self._use(task, coming, state, start)
        return start

    @property
    def snapshot(self) -> Snapshot:
        """What decides when later exchanges run."""
        states = (
            (
                (state.left, *state.held_at) if state.left and not self._is_once(number) else (),
                (state.added, *state.added_at) if state.added and not self._is_once(number, adds=True) else (),
                (*state.given_up, *state.reduced),
            )
            for number, state in self._states.items()
        )
        waiting = [
            (ready, number, group, self._states[number].added_at[group]) for ready, *_, number, group in self._waiting
        ]
        return Snapshot(self.free, self._floor, tuple(waiting), tuple(states))

    def _is_once(self, number: int, *, adds: bool = False) -> bool:
        stage = self._graph.workload.stages[number]
        return (stage.reduce_every if adds else stage.unshard_every) == ONCE

    def finish(self) -> None:
        """Nothing more starts: run what waits."""
        self._run(self._waiting, None)

    def _after_exchanges(self, task: int, coming: _StateUse, state: _StageState, start: int) -> int:
        """Run what must be done before an action: gather what it needs, reduce what it would add to."""
        number, groups = coming.number, state.groups
        gathers = coming.needs and not state.left
        asked: list[_Asked] = []
        last = 0
        if gathers:
            for place, (group, *_) in enumerate(coming.course):
                last = max(last, state.given_up[group])
                asked.append((last, False, place, number, group))
        if self._waiting:
            owed = [each[0] for each in self._waiting if each[3] == number] if coming.adds and not state.added else []
            if gathers or owed:
                last = max([last, *owed])
                # what is ready no later than the last of these goes with them, so that none is overtaken
                asked += [each for each in self._waiting if each[0] <= last]
                asked.sort()
        if asked:
            self._run(asked, task)
        if gathers:
            for group, begin, _ in coming.course:
                start = max(start, state.gathered_at[group] + groups[group].unshard_ns - begin)
        if coming.adds:
            for group, begin, _ in coming.course:
                start = max(start, state.reduced[group] - begin)
        if gathers:
            assert coming.stage.unshard_every is not None
            state.left = min(coming.stage.unshard_every, state.uses)
            issued = [max(self._ended, given_up) for given_up in state.given_up]
            state.held_at = [min(each) for each in zip(state.gathered_at, issued, strict=True)]
        return start

    def _use(self, task: int, coming: _StateUse, state: _StageState, start: int) -> None:
        """An action runs: afterwards parameters may be given up, and gradients be ready."""
        number, stage, course = coming.number, coming.stage, coming.course
        if coming.needs:
            state.left, state.uses = state.left - 1, state.uses - 1
            if not state.left:
                for group, _, end in course:
                    state.given_up[group] = start + end
                    size = state.groups[group].gathered_bytes
                    self.held.append((PARAMETERS, number, group, size, state.held_at[group], start + end))
                    self.runs.append((RESHARD, number, group, start + end, start + end, task, True))
        if not coming.adds:
            return
        if not state.added:
            for group, begin, _ in course:
                state.added_at[group] = start + begin
        state.added, state.additions = state.added + 1, state.additions - 1
        if state.added == stage.reduce_every or not state.additions:
            state.added = 0
            for group, _, end in course:
                self._waiting.append((start + end, True, len(self.runs) + len(self._waiting), number, group))
            self._waiting.sort()

    def _run(self, asked: Sequence[_Asked], task: int | None) -> None:
        """Run exchanges one after another, in this order."""
        for ready, reduces, _, number, group in asked:
            state = self._states[number]
            blocks = state.groups[group]
            start = max(self.free, self._floor, ready)
            self.free = end = start + (blocks.reduce_ns if reduces else blocks.unshard_ns)
            self.runs.append((REDUCE_GRAD if reduces else UNSHARD, number, group, start, end, task, False))
            if reduces:
                state.reduced[group] = end
                size = blocks.reduced_bytes
                self.held.append((GRADIENTS, number, group, size, state.added_at[group], end))
            else:
                state.gathered_at[group] = start
        if self._waiting:
            done = {(each[3], each[4]) for each in asked if each[1]}
            self._waiting = [each for each in self._waiting if (each[3], each[4]) not in done]


def networks_of(graph: Numbered) -> list[Network | None]:
    """[operation] the network of its devices; None where nothing is exchanged by actions."""
    workload = graph.workload
    by_devices: dict[frozenset[int], list[int]] = {}
    for number, stage in enumerate(workload.stages):
        by_devices.setdefault(frozenset(stage.devices), []).append(number)
    found: dict[int, Network] = {}
    for numbers in by_devices.values():
        if any(workload.stages[number].block_groups for number in numbers):
            network = Network(graph, numbers)
            found |= dict.fromkeys(numbers, network)
    return [found.get(operation.stage) for operation in workload.operations]


def snapshots(graph: Numbered, starts: Sequence[int]) -> list[tuple[list[int], list[Snapshot]]]:
    """[network] when its devices' actions start, in ns, ascending, and its state right after each of these starts."""
    found = []
    for own, network in _tasks_of(graph).items():
        tasks = sorted(network, key=starts.__getitem__)
        states = []
        for task in tasks:
            own.start(task, starts[task])
            states.append(own.snapshot)
        found.append(([starts[task] for task in tasks], states))
    return found


def microbatches_alike(workload: Workload) -> int:
    """After how many micro-batches at least exchanges of all stages begin anew together."""
    found = 1
    for number, stage in enumerate(workload.stages):
        for every, roles in ((stage.unshard_every, PARAMETER_ROLES), (stage.reduce_every, GRADIENT_ROLES)):
            if stage.block_groups and every not in (None, ONCE):
                assert every is not None
                each = sum(operation.stage == number and operation.role in roles for operation in workload.operations)
                found = lcm(found, every // gcd(every, max(1, each)))
    return found


def exchange_work(workload: Workload, number: int) -> int:
    """Ns that a stage's network exchanges state in an iteration: gathered and reduced as often as the stage says."""
    stage, counts = workload.stages[number], []
    for roles in (PARAMETER_ROLES, GRADIENT_ROLES):
        own = (item for item, each in enumerate(workload.operations) if each.stage == number and each.role in roles)
        counts.append(sum(len(workload.slots[item]) for item in own))
    gathers = -(-counts[0] // stage.unshard_every) if stage.unshard_every else 0
    reduces = -(-counts[1] // stage.reduce_every) if stage.reduce_every else 0
    return sum(each.unshard_ns * gathers + each.reduce_ns * reduces for each in stage.block_groups)


def exchanges_come_out(workload: Workload, counts: Sequence[int]) -> bool:
    """Whether exchanges begin anew after ``counts`` [operation] actions, but for those once an iteration."""
    for number, stage in enumerate(workload.stages):
        for every, roles in ((stage.unshard_every, PARAMETER_ROLES), (stage.reduce_every, GRADIENT_ROLES)):
            own = zip(workload.operations, counts, strict=False)
            each = sum(count for operation, count in own if operation.stage == number and operation.role in roles)
            if stage.block_groups and every not in (None, ONCE) and each % (every or 1):
                return False
    return True


def _tasks_of(graph: Numbered) -> dict[Network, list[int]]:
    """{network: the tasks of its devices}"""
    found: dict[Network, list[int]] = {}
    for item, network in enumerate(networks_of(graph)):
        if network is not None:
            found.setdefault(network, []).extend(range(graph.offsets[item], graph.offsets[item + 1]))
    return found


Networks = Sequence[tuple[tuple[int, ...], Network]]
"""(devices, their network) after all actions have started; only where state is exchanged."""


def networks_at(graph: Numbered, starts: Sequence[int]) -> Networks:
    """Those of actions that start at ``starts`` [task]; a graph of tasks remembers its last ones."""
    tasks = _tasks_of(graph)
    for network, own in tasks.items():
        for task in sorted(own, key=starts.__getitem__):
            network.start(task, starts[task])
    return finished(tasks)


def networks_if(graph: Numbered, starts: Sequence[int], ready: Sequence[int]) -> Networks | None:
    """The same if that is when actions start that could at ``ready`` [task]; None where one would not."""
    tasks = _tasks_of(graph)
    exchanging = set(chain.from_iterable(tasks.values()))
    if any(ready[task] != start and task not in exchanging for task, start in enumerate(starts)):
        return None
    for network, own in tasks.items():
        for task in sorted(own, key=starts.__getitem__):
            if network.start(task, ready[task]) != starts[task]:
                return None
    return finished(tasks)


def finished(networks: Iterable[Network | None]) -> Networks:
    """Each once, after its last action."""
    found = [each for each in dict.fromkeys(networks) if each is not None]
    for each in found:
        each.finish()
    return [(each.devices, each) for each in found]


Around = list[dict[int | None, list[str]]]
"""[device] {task: texts of what exchanges state there}; None is the end of its program."""


class StateTexts(dict[tuple[int, str, int], str]):
    """{(stage, kind, group of blocks): how programs say that it is exchanged}; made as it is asked for."""

    def __init__(self, workload: Workload) -> None:
        self._stages = workload.stages

    def __missing__(self, key: tuple[int, str, int]) -> str:
        number, kind, group = key
        several = len(self._stages[number].block_groups) > 1
        found = self[key] = str(StateAction(number, kind, group if several else None))
        return found

    def of(self, run: StateRun) -> str:
        """How programs say it."""
        kind, stage, group, *_ = run
        return self[stage, kind, group]


def texts_around(workload: Workload, networks: Networks) -> tuple[Around, Around]:
    """What stands right before and right after each action in the programs of its devices."""
    before: Around = [{} for _ in workload.devices]
    after: Around = [{} for _ in workload.devices]
    texts = StateTexts(workload)
    for devices, network in networks:
        around = defaultdict[int | None, list[str]](list), defaultdict[int | None, list[str]](list)
        for kind, stage, group, _, _, task, behind in network.runs:
            around[behind][task].append(texts[stage, kind, group])
        for device in devices:  # a device that has a network has only this one
            before[device], after[device] = around
    return before, after
