"""Rules about sharded state that actions of programs exchange: UNSHARD, RESHARD, REDUCE_GRAD.

They have no start times in a plan: what stands in the programs, and when compute starts, says when each runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeplan.checker.facts import Facts, Findings
from pipeplan.checker.programs import Entry, Programs
from pipeplan.time_limit import checked
from pipeplan.workload.action import StateAction
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

Span = tuple[int, int, MemoryKind, int]
"""From when to when, in ns, a device has something whole, of which kind, and how many bytes."""


@dataclass(slots=True)
class StateExchanges:
    """When exchanges let actions start, what devices have whole meanwhile, until when their networks are busy.

    ``least`` has for actions that wait for exchanges when they may start, in ns. ``spans`` and ``busy`` are [device],
    and so are ``sums``: from when to when gradients are reduced that are so once an iteration.
    """

    least: dict[Entry, int]
    spans: list[list[Span]]
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
        lines = [_line(programs, device) for device in stage.devices]
        other = next((n for n, line in enumerate(lines) if _named(line) != _named(lines[0])), None)
        if other is not None:
            text = f"differs from programs[{stage.devices[0]}], which exchanges the same state: both must do it in turn"
            findings.add("exchanges", f"programs[{stage.devices[other]}]", text)
            continue
        follower = _Follower(facts, stage.devices[0], findings)
        for each in checked(lines[0], 1024):
            follower.follow(*each)
        follower.end()
        found.least.update(follower.least)
        for device in stage.devices:
            found.spans[device], found.busy[device] = follower.spans, follower.free + facts.skipped_ns
            found.sums[device] = [(begin + facts.skipped_ns, end + facts.skipped_ns) for begin, end in follower.sums]
    return found


def _line(programs: Programs, device: int) -> list[tuple[int, Entry | StateAction]]:
    """(place in the program, what stands there) of what computes and what exchanges on a device."""
    actions = programs.actions[device]
    places = programs.places[device][programs.ids[device] < programs.firsts[programs.num_operations]]
    own = zip(places.tolist(), programs.named(actions), strict=True)
    return sorted([*own, *programs.states[device]], key=lambda each: each[0])


def _named(line: Sequence[tuple[int, Entry | StateAction]]) -> list[Entry | StateAction]:
    return [each for _, each in line]


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
class _Follower:
    """Goes through what one device of a group of alike ones does, in the order of its program."""

    facts: Facts
    device: int
    findings: Findings
    least: dict[Entry, int] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    sums: list[tuple[int, int]] = field(default_factory=list)
    free: int = 0
    _begun: int = 0
    _ended: int = 0
    _last: Entry | None = None
    _groups: dict[int, list[_Followed]] = field(default_factory=dict)
    _uses: dict[int, int] = field(default_factory=dict)  # since the last UNSHARD
    _added: dict[int, int] = field(default_factory=dict)  # since the last REDUCE_GRAD
    _left: dict[tuple[int, bool], int] = field(default_factory=dict)
    _courses: dict[tuple[int, Role], list[tuple[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan, own = self.facts.plan, self.facts.on_device[self.device]
        for number in sorted({plan.operations[operation].stage for operation in own}):
            if groups := plan.stages[number].block_groups:
                self._groups[number] = [_Followed() for _ in groups]
                for adds, roles in enumerate((PARAMETER_ROLES, GRADIENT_ROLES)):
                    self._left[number, bool(adds)] = sum(
                        self.facts.counts[operation]
                        for operation in own
                        if plan.operations[operation].stage == number and plan.operations[operation].role in roles
                    )

    def follow(self, index: int, each: Entry | StateAction) -> None:
        """Take the next one."""
        if isinstance(each, StateAction):
            self._exchange(index, each)
        else:
            self._compute(each)

    def end(self) -> None:
        """Nothing more comes: everything is given up and reduced."""
        for number, groups in self._groups.items():
            for place, group in enumerate(groups):
                if group.gathered is not None:
                    self._add(f"programs[{self.device}]", f"{self._text(number, 'RESHARD', place)} is missing")
                if group.adding is not None:
                    self._add(f"programs[{self.device}]", f"{self._text(number, 'REDUCE_GRAD', place)} is missing")

    def then(self) -> StateThen:
        """What there is now, but for what is exchanged once an iteration."""
        times, opened, counts = [self.free], dict[tuple[int, int, str], int](), dict[tuple[int, str], int]()
        for number, groups in self._groups.items():
            stage = self.facts.plan.stages[number]
            if any(group.gathered is not None for group in groups) and stage.unshard_every != ONCE:
                counts[number, "uses"] = self._uses.get(number, 0)
            if any(group.adding is not None for group in groups) and stage.reduce_every != ONCE:
                counts[number, "added"] = self._added.get(number, 0)
            for place, group in enumerate(groups):
                if group.gathered is not None and stage.unshard_every != ONCE:
                    opened[number, place, "gathered"] = group.gathered
                if group.adding is not None and stage.reduce_every != ONCE:
                    opened[number, place, "adding"] = group.adding
                waits = group.adding is not None and self._added.get(number) == stage.reduce_every
                times += [group.given_up, group.reduced, group.ready if waits else 0]
        return StateThen((self._begun, *(max(self._begun, time) for time in times)), opened, counts)

    def _exchange(self, place: int, action: StateAction) -> None:
        groups = self._groups.get(action.stage)
        if groups is None:
            self._wrong(place, action, f"stage {action.stage} here has no block_groups to exchange")
            return
        if (action.group is None) != (len(groups) == 1) or (action.group or 0) >= len(groups):
            self._wrong(
                place, action, f"stage {action.stage} has {len(groups)} groups of blocks; name one, if they are several"
            )
            return
        stage, number = self.facts.plan.stages[action.stage], action.group or 0
        group, size = groups[number], stage.block_groups[number]
        if action.kind == REDUCE_GRAD:
            wanted = min(stage.reduce_every or 0, self._added.get(action.stage, 0) + self._left[action.stage, True])
            if group.adding is None or self._added.get(action.stage, 0) != wanted:
                had = self._added.get(action.stage, 0) if group.adding is not None else 0
                self._wrong(place, action, f"comes after {had} actions that add to its gradients, not after {wanted}")
            else:
                begin = max(self.free, self._begun, group.ready)
                self.free = group.reduced = begin + size.reduce_ns
                if stage.reduce_every == ONCE:
                    self.sums.append((begin, self.free))
                self.spans.append((group.adding, group.reduced, GRADIENTS, size.reduced_bytes))
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
            self._uses[action.stage] = 0
        else:
            self._give_up(place, action, stage, number)

    def _give_up(self, place: int, action: StateAction, stage: Stage, which: int) -> None:
        """A RESHARD follows directly after the last action that its group was gathered for."""
        number = action.stage
        group, uses = self._groups[number][which], self._uses.get(number, 0)
        wanted = min(stage.unshard_every or 0, uses + self._left[number, False])
        if group.gathered is None:
            self._wrong(place, action, "is not gathered; an UNSHARD is missing before")
            return
        last = self._last
        if uses != wanted or last is None or self.facts.plan.operations[last[0]].stage != number:
            self._wrong(
                place, action, f"comes after {uses} actions of what it was gathered for, must right after {wanted}"
            )
        else:
            operation = self.facts.plan.operations[last[0]]
            group.given_up = self._begun + self._moments(number, operation.role)[which][1]
            self.spans.append((group.gathered, group.given_up, PARAMETERS, stage.block_groups[which].gathered_bytes))
        group.gathered = None

    def _compute(self, entry: Entry) -> None:
        """An action needs what is gathered, and room to add to; it starts no earlier than both let it."""
        operation, number = self.facts.plan.operations[entry[0]], entry[1]
        start, stage = self.facts.starts[entry[0]][number], self.facts.plan.stages[operation.stage]
        groups = self._groups.get(operation.stage, [])
        gathers = stage.unshard_every is not None and operation.role in PARAMETER_ROLES
        adds = operation.role in GRADIENT_ROLES
        moments, least = self._moments(operation.stage, operation.role), 0
        if gathers and groups:
            self._uses[operation.stage] = self._uses.get(operation.stage, 0) + 1
            self._left[operation.stage, False] -= 1
        if adds and groups:
            done = all(group.adding is None for group in groups)
            if not done and self._added.get(operation.stage, 0) >= (stage.reduce_every or 0):
                self._add(self._at(entry), f"adds to gradients before {operation.stage}REDUCE_GRAD of those before")
            self._added[operation.stage] = 1 if done else self._added.get(operation.stage, 0) + 1
            self._left[operation.stage, True] -= 1
        for place, (group, (begin, end)) in enumerate(zip(groups, moments, strict=False)):
            if gathers and group.gathered is None:
                text = f"computes with parameters that are not gathered; {self._text(operation.stage, UNSHARD, place)}"
                self._add(self._at(entry), f"{text} is missing before")
            elif gathers and self._uses[operation.stage] > (stage.unshard_every or 0):
                text = f"parameters stay gathered for {stage.unshard_every} actions; a RESHARD is missing before"
                self._add(self._at(entry), text)
            if gathers:
                least = max(least, group.arrives - begin)
            if adds:
                least = max(least, group.reduced - begin)
                group.adding = start + begin if group.adding is None else group.adding
                group.ready = start + end
        if start < least:
            text = f"starts at {start} ns; what it needs is gathered, and what it adds to reduced, for {least} ns"
            self._add(self._at(entry), text)
        self.least[entry] = least
        self._begun, self._ended, self._last = start, start + operation.duration_ns, entry

    def _moments(self, stage: int, role: Role) -> list[tuple[int, int]]:
        """Those of a stage, which are the same for all actions of a role."""
        found = self._courses.get((stage, role))
        if found is None:
            found = self._courses[stage, role] = _moments(self.facts.plan.stages[stage], role)
        return found

    def _wrong(self, place: int, action: StateAction, text: str) -> None:
        self._add(f"programs[{self.device}][{place}] ({action})", text)

    def _at(self, entry: Entry) -> str:
        return f"starts_ns[{self.facts.ids[entry[0]]}][{entry[1]}]"

    def _text(self, stage: int, kind: str, group: int) -> str:
        several = len(self._groups[stage]) > 1
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
    for index, each in _line(programs, device):
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
