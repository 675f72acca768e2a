"""Rules about sharded state that actions of programs exchange: UNSHARD, RESHARD, REDUCE_GRAD.

They have no start times in a plan: what stands in the programs, and when compute starts, says when each runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeplan.checker.facts import Facts, Findings
from pipeplan.checker.programs import Entry, Programs
from pipeplan.time_limit import checked
from pipeplan.workload.action import StateAction
from pipeplan.workload.columns import IntArray, column
from pipeplan.workload.elements import ONCE, Stage
from pipeplan.workload.kinds import (
    GRADIENT_ROLES,
    GRADIENTS,
    PARAMETER_ROLES,
    PARAMETERS,
    REDUCE_GRAD,
    UNSHARD,
    MemoryKind,
    Role,
)


@dataclass(frozen=True, slots=True)
class Spans:
    """[of some] from when to when, in ns, a device has something of one kind whole, and how many bytes."""

    kind: MemoryKind
    begins: IntArray
    ends: IntArray
    sizes: IntArray

    @classmethod
    def of(cls, kind: MemoryKind, each: Sequence[tuple[int, int, int]]) -> Spans:
        """Those of (begin, end, bytes)."""
        begins, ends, sizes = zip(*each, strict=True)
        return cls(kind, column(begins), column(ends), column(sizes, 2 + len(sizes)))


@dataclass(slots=True)
class StateExchanges:
    """When exchanges let actions start, what devices have whole meanwhile, until when their networks are busy.

    ``least`` has for actions that wait for exchanges when they may start, in ns. ``spans`` and ``busy`` are [device],
    and so are ``sums``: from when to when gradients are reduced that are so once an iteration.
    """

    least: dict[Entry, int]
    spans: list[list[Spans]]
    busy: list[int]
    sums: list[list[tuple[int, int]]]


def check_exchanges(facts: Facts, programs: Programs, findings: Findings) -> StateExchanges:
    """Follow the exchanges of all devices. Call it with complete programs only."""
    found = StateExchanges(
        {}, [[] for _ in facts.plan.devices], [0] * len(facts.plan.devices), [[] for _ in facts.plan.devices]
    )
    seen = set[frozenset[int]]()
    for stage in facts.plan.stages:
        devices = frozenset(stage.devices)
        if devices in seen or (not any(programs.states[device] for device in devices) and not stage.block_groups):
            continue
        seen.add(devices)
        lines = [_StateLine.of(programs, device) for device in stage.devices]
        other = next((n for n, line in enumerate(lines) if not line.says(lines[0])), None)
        if other is not None:
            text = f"differs from programs[{stage.devices[0]}], which exchanges the same state: both must do it in turn"
            findings.add("exchanges", f"programs[{stage.devices[other]}]", text)
            continue
        follower = _Follower(facts, stage.devices[0], findings)
        for each in checked(lines[0].entries(programs), 1024):
            follower.follow(*each)
        follower.end()
        spans = [Spans.of(kind, each) for kind, each in follower.spans.items() if each]
        found.least.update(follower.least)
        for device in stage.devices:
            found.spans[device], found.busy[device] = spans, follower.free + facts.skipped_ns
            found.sums[device] = [(begin + facts.skipped_ns, end + facts.skipped_ns) for begin, end in follower.sums]
    return found


@dataclass(frozen=True, slots=True)
class _StateLine:
    """What computes and what exchanges on a device: its ``actions``, then its ``states``.

    ``places`` are those in its program of all of these, ``order`` the one in which they stand there.
    """

    actions: IntArray
    states: list[StateAction]
    places: IntArray
    order: IntArray

    @classmethod
    def of(cls, programs: Programs, device: int) -> _StateLine:
        """That of a device."""
        own = programs.places[device][programs.ids[device] < programs.firsts[programs.num_operations]]
        stated, states = zip(*programs.states[device], strict=True) if programs.states[device] else ((), ())
        places = np.concatenate([own, np.array(stated, np.int64)])
        return cls(programs.actions[device], [*states], places, np.argsort(places, kind="stable"))

    def says(self, other: _StateLine) -> bool:
        """Whether the other's program has the same one after the other, wherever messages stand between them."""
        same = np.array_equal(self.actions, other.actions) and np.array_equal(self.order, other.order)
        return same and self.states == other.states

    def entries(self, programs: Programs) -> Iterator[tuple[int, Entry | StateAction]]:
        """(place in the program, what stands there), one after the other."""
        named: list[Entry | StateAction] = [*programs.named(self.actions), *self.states]
        return zip(self.places[self.order].tolist(), map(named.__getitem__, self.order.tolist()), strict=True)


@dataclass(slots=True)
class _Followed:
    """A stage's group of blocks: since when it is gathered, or adds gradients (None: not), when the last ended.

    ``gathered`` is since when there is memory for it: since the program came to its UNSHARD, after the action before,
    or since the network began.
    """

    gathered: int | None = None
    arrives: int = 0
    given_up: int = 0
    adding: int | None = None
    ready: int = 0
    reduced: int = 0


@dataclass(slots=True)
class _FollowedStage:
    """A stage: its groups of blocks; the actions left that need parameters, and that add to gradients.

    ``uses`` and ``added`` count those since its last UNSHARD and REDUCE_GRAD.
    """

    stage: Stage
    groups: list[_Followed]
    left_uses: int
    left_adds: int
    uses: int = 0
    added: int = 0


@dataclass(frozen=True, slots=True)
class _FollowedOperation:
    """What all actions of an operation do: of which stage, when they start, whether they need parameters or add.

    ``moments`` are those of :func:`_moments`; ``own`` is None where the stage exchanges nothing by actions.
    """

    stage: int
    starts: Sequence[int]
    duration_ns: int
    own: _FollowedStage | None
    gathers: bool
    adds: bool
    moments: list[tuple[int, int]]


@dataclass(slots=True)
class _Follower:
    """Goes through what one device of a group of alike ones does, in the order of its program."""

    facts: Facts
    device: int
    findings: Findings
    least: dict[Entry, int] = field(default_factory=dict)
    spans: dict[MemoryKind, list[tuple[int, int, int]]] = field(default_factory=lambda: {PARAMETERS: [], GRADIENTS: []})
    sums: list[tuple[int, int]] = field(default_factory=list)
    free: int = 0
    _begun: int = 0
    _ended: int = 0
    _last: _FollowedOperation | None = None
    _stages: dict[int, _FollowedStage] = field(default_factory=dict)
    _operations: dict[int, _FollowedOperation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan, own = self.facts.plan, self.facts.on_device[self.device]
        for number in sorted({plan.operations[operation].stage for operation in own}):
            if groups := plan.stages[number].block_groups:
                left = [
                    sum(
                        self.facts.counts[operation]
                        for operation in own
                        if plan.operations[operation].stage == number and plan.operations[operation].role in roles
                    )
                    for roles in (PARAMETER_ROLES, GRADIENT_ROLES)
                ]
                self._stages[number] = _FollowedStage(plan.stages[number], [_Followed() for _ in groups], *left)

    def follow(self, index: int, each: Entry | StateAction) -> None:
        """Take the next one."""
        if isinstance(each, StateAction):
            self._exchange(index, each)
        else:
            self._compute(each)

    def end(self) -> None:
        """Nothing more comes: everything is given up and reduced."""
        for number, own in self._stages.items():
            for place, group in enumerate(own.groups):
                if group.gathered is not None:
                    self._add(f"programs[{self.device}]", f"{self._text(number, 'RESHARD', place)} is missing")
                if group.adding is not None:
                    self._add(f"programs[{self.device}]", f"{self._text(number, 'REDUCE_GRAD', place)} is missing")

    def then(self) -> StateThen:
        """What there is now, but for what is exchanged once an iteration."""
        times, opened, counts = [self.free], dict[tuple[int, int, str], int](), dict[tuple[int, str], int]()
        for number, own in self._stages.items():
            stage, groups = own.stage, own.groups
            if any(group.gathered is not None for group in groups) and stage.unshard_every != ONCE:
                counts[number, "uses"] = own.uses
            if any(group.adding is not None for group in groups) and stage.reduce_every != ONCE:
                counts[number, "added"] = own.added
            for place, group in enumerate(groups):
                if group.gathered is not None and stage.unshard_every != ONCE:
                    opened[number, place, "gathered"] = group.gathered
                if group.adding is not None and stage.reduce_every != ONCE:
                    opened[number, place, "adding"] = group.adding
                waits = group.adding is not None and own.added == stage.reduce_every
                times += [group.given_up, group.reduced, group.ready if waits else 0]
        return StateThen((self._begun, *(max(self._begun, time) for time in times)), opened, counts)

    def _exchange(self, place: int, action: StateAction) -> None:
        own = self._stages.get(action.stage)
        if own is None:
            self._wrong(place, action, f"stage {action.stage} here has no block_groups to exchange")
            return
        stage, number, count = own.stage, action.group or 0, len(own.groups)
        if (action.group is None) != (count == 1) or number >= count:
            self._wrong(
                place, action, f"stage {action.stage} has {count} groups of blocks; name one, if they are several"
            )
            return
        group, size = own.groups[number], stage.block_groups[number]
        if action.kind == REDUCE_GRAD:
            wanted = min(stage.reduce_every or 0, own.added + own.left_adds)
            if group.adding is None or own.added != wanted:
                had = own.added if group.adding is not None else 0
                self._wrong(place, action, f"comes after {had} actions that add to its gradients, not after {wanted}")
            else:
                begin = max(self.free, self._begun, group.ready)
                self.free = group.reduced = begin + size.reduce_ns
                if stage.reduce_every == ONCE:
                    self.sums.append((begin, self.free))
                self.spans[GRADIENTS].append((group.adding, group.reduced, size.reduced_bytes))
                group.adding = None
        elif stage.unshard_every is None:
            self._wrong(
                place, action, f"stage {action.stage} does not divide its parameters, or gathers them inside of actions"
            )
        elif action.kind == UNSHARD:
            if group.gathered is not None:
                self._wrong(place, action, "is gathered already; a RESHARD is missing before")
                return
            begin = max(self.free, self._begun, group.given_up)
            group.gathered = min(begin, max(self._ended, group.given_up))
            self.free = group.arrives = begin + size.unshard_ns
            own.uses = 0
        else:
            self._give_up(place, action, own, number)

    def _give_up(self, place: int, action: StateAction, own: _FollowedStage, which: int) -> None:
        """A RESHARD follows directly after the last action that its group was gathered for."""
        group, last = own.groups[which], self._last
        wanted = min(own.stage.unshard_every or 0, own.uses + own.left_uses)
        if group.gathered is None:
            self._wrong(place, action, "is not gathered; an UNSHARD is missing before")
            return
        if own.uses != wanted or last is None or last.stage != action.stage:
            self._wrong(
                place, action, f"comes after {own.uses} actions of what it was gathered for, must right after {wanted}"
            )
        else:
            group.given_up = self._begun + last.moments[which][1]
            size = own.stage.block_groups[which].gathered_bytes
            self.spans[PARAMETERS].append((group.gathered, group.given_up, size))
        group.gathered = None

    def _compute(self, entry: Entry) -> None:
        """An action needs what is gathered, and room to add to; it starts no earlier than both let it."""
        doing = self._operations.get(entry[0])
        if doing is None:
            doing = self._operations[entry[0]] = self._doing(entry[0])
        start, least = doing.starts[entry[1]], 0
        if doing.own is not None:
            least = self._in_turn(entry, doing, doing.own, start)
        if start < least:
            text = f"starts at {start} ns; what it needs is gathered, and what it adds to reduced, for {least} ns"
            self._add(self._at(entry), text)
        self.least[entry] = least
        self._begun, self._ended, self._last = start, start + doing.duration_ns, doing

    def _in_turn(self, entry: Entry, doing: _FollowedOperation, own: _FollowedStage, start: int) -> int:
        """When its stage's exchanges let the next action start, in ns, which starts then or later."""
        stage, least = own.stage, 0
        if doing.gathers:
            own.uses, own.left_uses = own.uses + 1, own.left_uses - 1
        if doing.adds:
            done = all(group.adding is None for group in own.groups)
            if not done and own.added >= (stage.reduce_every or 0):
                self._add(self._at(entry), f"adds to gradients before {doing.stage}REDUCE_GRAD of those before")
            own.added, own.left_adds = 1 if done else own.added + 1, own.left_adds - 1
        for place, (group, (begin, end)) in enumerate(zip(own.groups, doing.moments, strict=True)):
            if doing.gathers:
                if group.gathered is None:
                    text = f"computes with parameters that are not gathered; {self._text(doing.stage, UNSHARD, place)}"
                    self._add(self._at(entry), f"{text} is missing before")
                elif own.uses > (stage.unshard_every or 0):
                    text = f"parameters stay gathered for {stage.unshard_every} actions; a RESHARD is missing before"
                    self._add(self._at(entry), text)
                least = max(least, group.arrives - begin)
            if doing.adds:
                least = max(least, group.reduced - begin)
                group.adding = start + begin if group.adding is None else group.adding
                group.ready = start + end
        return least

    def _doing(self, item: int) -> _FollowedOperation:
        """What all actions of an operation do."""
        operation = self.facts.plan.operations[item]
        stage, role = self.facts.plan.stages[operation.stage], operation.role
        return _FollowedOperation(
            operation.stage,
            self.facts.starts[item],
            operation.duration_ns,
            self._stages.get(operation.stage),
            gathers=stage.unshard_every is not None and role in PARAMETER_ROLES,
            adds=role in GRADIENT_ROLES,
            moments=_moments(stage, role),
        )

    def _wrong(self, place: int, action: StateAction, text: str) -> None:
        self._add(f"programs[{self.device}][{place}] ({action})", text)

    def _at(self, entry: Entry) -> str:
        return f"starts_ns[{self.facts.ids[entry[0]]}][{entry[1]}]"

    def _text(self, stage: int, kind: str, group: int) -> str:
        several = len(self._stages[stage].groups) > 1
        return str(StateAction(stage, kind, group if several else None))

    def _add(self, place: str, text: str) -> None:
        self.findings.add("exchanges", place, text)


@dataclass(frozen=True, slots=True)
class StateThen:
    """Of a device at a place in its program: when things were done that decide when later exchanges run, in ns.

    ``times`` are of what was over or began, none of them before the last action began; ``open`` {(stage, group, what):
    since when}; ``counts`` {(stage, what): since the last exchange}.
    """

    times: tuple[int, ...]
    open: dict[tuple[int, int, str], int]
    counts: dict[tuple[int, str], int]

    def earlier(self, by_ns: int) -> StateThen:
        """The same so much earlier."""
        opened = {key: time - by_ns for key, time in self.open.items()}
        return StateThen(tuple(time - by_ns for time in self.times), opened, self.counts)


def state_before(facts: Facts, programs: Programs, device: int, place: int) -> StateThen:
    """Follow a device's program up to a place."""
    follower = _Follower(facts, device, Findings())
    for index, each in _StateLine.of(programs, device).entries(programs):
        if index < place:
            follower.follow(index, each)
    return follower.then()


def _moments(stage: Stage, role: Role) -> list[tuple[int, int]]:
    """[group] when an action comes to its blocks, and has done with them, in ns since its start.

    A forward takes the groups in their order, all else from the last to the first.
    """
    times = [group.time_in(role) for group in stage.block_groups]
    before = [sum(times[:n] if role is Role.FORWARD else times[n + 1 :]) for n in range(len(times))]
    return [(begin, begin + time) for begin, time in zip(before, times, strict=True)]
