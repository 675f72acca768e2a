"""Rules about programs: every action and message once, on its devices, in orders that cannot deadlock."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np

from pipeplan.checker.facts import Facts, Findings
from pipeplan.graphs import in_circle, short_cycle
from pipeplan.time_limit import checked, checkpoint
from pipeplan.workload.action import Action, StateAction
from pipeplan.workload.columns import IntArray, counted, distinct, sharing, spread
from pipeplan.workload.elements import Dependency, Hop
from pipeplan.workload.samples import Slots

Entry = tuple[int, int]
"""An operation, or a hop (numbered after all operations), and the number of one of its actions or messages."""

_AMBIGUOUS = -1

_ENTRY = re.compile("([0-9]+[A-Z_]+)([0-9]+)(?:[.]([01]))?(.*)")
"""The text before the micro-batch, the micro-batch, its part, and the text after, of an action's name."""


@dataclass(frozen=True, slots=True)
class Messages:
    """The hops of all dependencies in a row, and what a transfer's text may call them.

    ``slots`` [hop] say which samples each message is about, ``firsts`` [hop] is its first one, numbered on from the
    actions, and in the end the number of both. ``sends`` and ``receives`` map (stage, payload, device,
    other stage or None, other device or None) to the number of the only hop that fits, or to -1 where several do.
    """

    hops: list[tuple[int, int, Dependency, Hop]]
    slots: list[Slots]
    firsts: IntArray
    sends: dict[tuple[int, str, int, int | None, int | None], int]
    receives: dict[tuple[int, str, int, int | None, int | None], int]

    @classmethod
    def of(cls, facts: Facts) -> Messages:
        """Number the hops."""
        hops: list[tuple[int, int, Dependency, Hop]] = []
        sends: dict[tuple[int, str, int, int | None, int | None], int] = {}
        receives: dict[tuple[int, str, int, int | None, int | None], int] = {}
        for number, dependency in enumerate(facts.plan.dependencies):
            source, target = dependency.source_stage, dependency.target_stage
            for index, hop in enumerate(dependency.hops):
                payload = dependency.payload
                for names, stage, device, peer_stage, peer_device in (
                    (sends, source, hop.source_device, target, hop.target_device),
                    (receives, target, hop.target_device, source, hop.source_device),
                ):
                    for said_stage in (None, peer_stage):
                        for said_device in (None, peer_device):
                            key = (stage, payload, device, said_stage, said_device)
                            names[key] = _AMBIGUOUS if key in names else len(hops)
                hops.append((number, index, dependency, hop))
        slots = [facts.messages(dependency, hop) for _, _, dependency, hop in hops]
        firsts = np.array([*accumulate(map(len, slots), initial=sum(facts.counts))])
        return cls(hops, slots, firsts, sends, receives)

    def text(self, number: int, message: int, *, send: bool) -> str:
        """The transfer's full text."""
        _, _, dependency, hop = self.hops[number]
        microbatch, part = self.slots[number].name(message)
        source, target = dependency.source_stage, dependency.target_stage
        payload = dependency.payload
        if send:
            return str(Action(source, f"SEND_{payload}", microbatch, target, hop.target_device, part))
        return str(Action(target, f"RECV_{payload}", microbatch, source, hop.source_device, part))

    def place(self, number: int) -> str:
        """The path of the hop in the file."""
        dependency, index, _, _ = self.hops[number]
        return f"dependencies[{dependency}].hops[{index}]"


@dataclass(frozen=True)
class Programs:
    """What the programs mean.

    ``ids`` [device] are its actions and messages in order, numbered through: operation after operation, then hop after
    hop, whose first ones are ``firsts``; ``places`` [device] are their positions in the program. ``states`` [device]
    are the actions that exchange state, after their positions. The first ``num_operations`` are operations.
    """

    firsts: IntArray
    num_operations: int
    ids: list[IntArray]
    places: list[IntArray]
    states: list[list[tuple[int, StateAction]]] = field(default_factory=list)

    @cached_property
    def actions(self) -> list[IntArray]:
        """[device] its actions in order."""
        return [own[own < self.firsts[self.num_operations]] for own in self.ids]

    @cached_property
    def items(self) -> IntArray:
        """[id] its operation or hop."""
        return np.repeat(np.arange(len(self.firsts) - 1), np.diff(self.firsts))

    @cached_property
    def entries(self) -> list[list[Entry]]:
        """[device] actions and messages by operation or hop, numbered on from these, and their own number there."""
        return [*map(self.named, self.ids)]

    @cached_property
    def compute(self) -> list[list[Entry]]:
        """[device] the actions alone."""
        return [*map(self.named, self.actions)]

    @cached_property
    def where(self) -> list[dict[Entry, int]]:
        """[device] {entry: its position in the program}."""
        own = zip(self.entries, self.places, strict=True)
        return [dict(zip(entries, places.tolist(), strict=True)) for entries, places in own]

    def named(self, ids: IntArray) -> list[Entry]:
        """Actions and messages by operation or hop, and their own number there."""
        items = self.items[ids]
        return list(zip(items.tolist(), (ids - self.firsts[items]).tolist(), strict=True))

    def all_places(self, devices: IntArray, items: IntArray) -> IntArray:
        """:meth:`places_of` of many devices, and of an operation or hop of each, one after the other."""
        every = int(self.firsts[-1])
        ids, places = (np.concatenate(each) for each in zip(*self._sorted, strict=True))
        ids += np.repeat(np.arange(len(self.ids)) * every, [len(own) for own in self.ids])
        begins = np.searchsorted(ids, devices * every + self.firsts[items])
        counts = self.firsts[items + 1] - self.firsts[items]
        inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        found: IntArray = places[np.repeat(begins, counts) + inside]
        return found

    @cached_property
    def _sorted(self) -> list[tuple[IntArray, IntArray]]:
        """[device] ids in order of their numbers, and their places."""
        orders = [np.argsort(own) for own in self.ids]
        return [(own[by], at[by]) for own, at, by in zip(self.ids, self.places, orders, strict=True)]

    def places_of(self, device: int, item: int) -> IntArray:
        """[action or message] of an operation, or a hop, where it stands on a device, which has all of them."""
        ids, places = self._sorted[device]
        begin = int(np.searchsorted(ids, self.firsts[item]))
        return places[begin : begin + int(self.firsts[item + 1] - self.firsts[item])]


def read_programs(facts: Facts, messages: Messages | None, findings: Findings) -> Programs:
    """Require every action once on each device of its stage and every message once on both ends, nothing else.

    Without ``messages`` transfers are passed over.
    """
    firsts = facts.columns.firsts if messages is None else np.concatenate((facts.columns.firsts[:-1], messages.firsts))
    programs, columns = (
        Programs(firsts, len(facts.ids), [], []),
        _SpelledEntries(max(each.count for each in facts.slots)),
    )
    for device, program in checked(enumerate(facts.plan.programs), 1):
        reader = _Reader(facts, messages, device, findings)
        ids, places = reader.at_once(program, columns, firsts) or reader.one_by_one(program, firsts)
        programs.ids.append(ids)
        programs.places.append(places)
        programs.states.append(reader.states)
    present = _present(programs)
    _require_all_actions(facts, programs, present, findings)
    if messages is not None:
        _require_all_messages(facts, messages, programs, present, findings)
    return programs


class _SpelledEntries(dict[str, int]):
    """{entry: its number}: those that differ in their micro-batch alone follow each other, ``count`` of each.

    All are entered when one is asked for that is not there yet, so that it is read once, and the rest is looked up.
    ``spelled`` are those that were read.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.spelled: list[Action | StateAction] = []
        self._numbers = tuple(map(str, range(count)))
        self._last: tuple[Sequence[str], tuple[IntArray, IntArray] | None] = (), None

    def read(self, program: Sequence[str]) -> tuple[IntArray, IntArray] | None:
        """The spelling of each entry, and its micro-batch; None where there is one that no action can have.

        Replicas often have one program, and stand side by side.
        """
        if program != self._last[0]:
            self.clear()  # programs of several devices together are looked up more slowly than each by itself
            self.spelled = []
            numbers = np.fromiter(map(self.__getitem__, program), np.int64, len(program))
            found = None if numbers.min(initial=0) < 0 else np.divmod(numbers, len(self._numbers))
            self._last = program, found
        return self._last[1]

    def __missing__(self, text: str) -> int:
        begin, match = len(self.spelled) * len(self._numbers), _ENTRY.fullmatch(text)
        state = StateAction.read(text)
        if state is not None:
            self.spelled.append(state)
            self[text] = begin
            return begin
        if match is None or int(match[2]) >= len(self._numbers):
            return -1
        after = f"{'' if match[3] is None else f'.{match[3]}'}{match[4]}"
        self.spelled.append(Action.parse(text))
        texts = map(match[1].__add__, self._numbers)
        self.update(zip([each + after for each in texts] if after else texts, itertools.count(begin)))
        return begin + int(match[2])


@lru_cache(maxsize=64)
def _numbers_of(slots: Slots, part: int | None) -> IntArray:
    """[micro-batch] the action that runs it, or a part of it; -1 where none does."""
    if slots.plain and part is None:
        return np.arange(slots.count)
    found = [slots.number(microbatch, part) for microbatch in range(slots.count)]
    return np.array([-1 if number is None else number for number in found])


@dataclass(slots=True)
class _Reader:
    """Reads one device's program."""

    facts: Facts
    messages: Messages | None
    device: int
    findings: Findings
    where: dict[Entry, int] = field(default_factory=dict)
    states: list[tuple[int, StateAction]] = field(default_factory=list)
    _named: dict[tuple[str, str], tuple[int, Slots] | str] = field(default_factory=dict)

    def at_once(
        self, program: Sequence[str], columns: _SpelledEntries, firsts: IntArray
    ) -> tuple[IntArray, IntArray] | None:
        """Ids and places of all entries, by what is spelled alike; None where something is wrong with one."""
        found = columns.read(program)
        if found is None:
            return None
        spelled, microbatches = found
        ids, states = np.full(len(program), -1), list[tuple[int, StateAction]]()
        for which in np.flatnonzero(np.bincount(spelled)).tolist():
            own, action = np.flatnonzero(spelled == which), columns.spelled[which]
            if isinstance(action, StateAction):
                states.extend((index, action) for index in own.tolist())
                continue
            if not action.is_compute and self.messages is None:
                return None
            item = self._operation(action) if action.is_compute else self._message(action)
            if isinstance(item, str):
                return None
            numbers, asked = _numbers_of(item[1], action.part), microbatches[own]
            if asked.max() >= len(numbers) or (numbers[asked] < 0).any():
                return None
            ids[own] = firsts[item[0]] + numbers[asked]
        places = np.flatnonzero(ids >= 0)
        ids = ids[places]
        if not distinct(ids):
            return None
        self.states.extend(sorted(states, key=lambda each: each[0]))
        return ids, places

    def one_by_one(self, program: Sequence[str], firsts: IntArray) -> tuple[IntArray, IntArray]:
        """Ids and places of the entries that are right, with all that is wrong noted."""
        for index, text in checked(enumerate(program), 1024):
            self.read(index, text)
        ids = [int(firsts[item]) + number for item, number in self.where]
        return np.array(ids, np.int64), np.array([*self.where.values()], np.int64)

    def read(self, index: int, text: str) -> None:
        """Take one entry, or say what is wrong with it."""
        state = StateAction.read(text)
        if state is not None:
            self.states.append((index, state))
            return
        match = _ENTRY.fullmatch(text)
        assert match is not None  # as files and plans require
        before, microbatch, part, after = match.groups()
        if "_" in before and self.messages is None:
            return
        rule = "transfers" if "_" in before else "actions"
        named = before, after
        if named not in self._named:
            action = Action.parse(text)
            self._named[named] = self._operation(action) if action.is_compute else self._message(action)
        found = self._named[named]
        if isinstance(found, str):
            self.findings.add(rule, self._place(index, text), found)
            return
        number, slots = found
        place: int | None = int(microbatch)
        if part is not None or not slots.plain or int(microbatch) >= slots.count:
            place = slots.number(int(microbatch), None if part is None else int(part))
        if place is None:
            action = Action.parse(text)
            self.findings.add(rule, self._place(index, text), _not_there(action, slots))
            return
        entry = (number, place)
        if entry in self.where:
            first = self._place(self.where[entry], self.facts.plan.programs[self.device][self.where[entry]])
            self.findings.add(rule, self._place(index, text), f"is already there as {first}")
        else:
            self.where[entry] = index

    def _place(self, index: int, text: str) -> str:
        return f"programs[{self.device}][{index}] ({text})"

    def _operation(self, action: Action) -> tuple[int, Slots] | str:
        """Number and actions of a compute action's operation, or what is wrong."""
        number = self.facts.position.get(action.operation)
        if number is None:
            return f"{action.operation} is not an operation of the plan"
        if self.device not in self.facts.groups[number]:
            return f"stage {action.stage} stands on devices {list(self.facts.devices[number])}, not here"
        return number, self.facts.slots[number]

    def _message(self, action: Action) -> tuple[int, Slots] | str:
        """Number and messages of a transfer's hop, or what is wrong."""
        assert self.messages is not None
        names = self.messages.sends if action.sends else self.messages.receives
        key = (action.stage, action.payload, self.device, action.peer_stage, action.peer_device)
        number = names.get(key)
        if number is None:
            return "no dependency has this hop from or to this device"
        if number == _AMBIGUOUS:
            return "several hops fit; name the stage and the device on the other end, as 1SEND_F0>3@2"
        return len(self.facts.ids) + number, self.messages.slots[number]


def _not_there(action: Action, slots: Slots) -> str:
    """Why an operation does not have the action, or a hop the message."""
    if action.microbatch >= slots.count:
        return f"there are only {slots.count} micro-batches"
    if slots.every > 1 and not slots.first <= action.microbatch % slots.every < slots.first + slots.run:
        return f"of every {slots.every} micro-batches only {slots.run} go there, from number {slots.first} on"
    if action.microbatch < slots.num_parted:
        return f"the micro-batch runs in two parts, {action.microbatch}.0 and {action.microbatch}.1"
    return f"the micro-batch is not in parts here; the first {slots.num_parted} are"


def _present(programs: Programs) -> list[dict[int, int]]:
    """[device] {operation or hop: how many of its actions or messages are there}."""
    found = (counted(programs.items[own]) for own in programs.ids)
    return [dict(zip(items.tolist(), counts.tolist(), strict=True)) for items, counts in found]


_Present = Sequence[Mapping[int, int]]


def _require_all_actions(facts: Facts, programs: Programs, present: _Present, findings: Findings) -> None:
    for operation, devices in enumerate(facts.devices):
        for device in devices:
            missing = facts.counts[operation] - present[device].get(operation, 0)
            if missing:
                first = next(m for m in itertools.count() if (operation, m) not in programs.where[device])
                text = f"{facts.label(operation, first)} is missing{_and_more(missing)}"
                findings.add("actions", f"programs[{device}]", text)


def _require_all_messages(
    facts: Facts, messages: Messages, programs: Programs, present: _Present, findings: Findings
) -> None:
    base = len(facts.ids)
    for number, (*_, hop) in enumerate(messages.hops):
        count = len(messages.slots[number])
        for device, send in ((hop.source_device, True), (hop.target_device, False)):
            missing = count - present[device].get(base + number, 0)
            if missing:
                first = next(m for m in itertools.count() if (base + number, m) not in programs.where[device])
                text = f"{messages.text(number, first, send=send)} is missing{_and_more(missing)}"
                findings.add("transfers", f"programs[{device}]", f"{text}; {messages.place(number)} says it")


def _and_more(missing: int) -> str:
    return f" and {missing - 1} more like it" if missing > 1 else ""


SentOnLinks = tuple[Iterable[tuple[IntArray, IntArray]], Mapping[int, IntArray]]
"""For each link that messages occupy (hops, numbers of their messages) in order; {hop: when each takes its link}."""


def check_messages(facts: Facts, messages: Messages, programs: Programs, sent: SentOnLinks, findings: Findings) -> None:
    """SEND after its producer, RECV before its consumers, first in first out, and no deadlock.

    Call it with complete programs only.
    """
    inside = _Inside.of(facts, messages, programs)
    _check_sides(facts, messages, programs, inside, findings)
    _check_inside(facts, messages, programs, inside, findings)
    _check_fifo(facts, messages, programs, findings)
    _check_deadlock(facts, messages, programs, inside, sent, findings)


def check_waits(facts: Facts, programs: Programs, findings: Findings) -> None:
    """No circle of actions that wait for what others make, or for what stands before them on their device.

    Wherever SENDs and RECVs stand, which need not be moved then. Call it with complete programs only.
    """
    following: dict[Entry, list[Entry]] = {entry: [] for entries in programs.compute for entry in entries}
    for target, number in following:
        for wait, n, _ in facts.inputs(target, number):
            following[wait.source, n].append((target, number))
    for entries in programs.compute:
        for before, after in itertools.pairwise(entries):
            following[before].append(after)
    cycle = short_cycle(following)
    if cycle:
        places = {
            entry: (device, index) for device, where in enumerate(programs.where) for entry, index in where.items()
        }
        named = [f"{facts.label(*entry)} on device {places[entry][0]}" for entry in cycle]
        text = f"deadlock: actions wait for each other, each for the one before it: {in_circle(named, ', then ')}"
        findings.add("deadlock", _place(facts, *places[cycle[0]]), text)


def _check_sides(facts: Facts, messages: Messages, programs: Programs, inside: _Inside, findings: Findings) -> None:
    base, right = len(facts.ids), _between_alike(facts, messages, programs)
    for number, (_, _, dependency, hop) in enumerate(messages.hops):
        if number in right:
            continue
        source, target = facts.position[dependency.source], facts.position[dependency.target]
        if _is_between(facts, messages, programs, number, (source, target)):
            continue
        sender, receiver = programs.where[hop.source_device], programs.where[hop.target_device]
        for message in checked(range(len(messages.slots[number])), 1024):
            samples = messages.slots[number].samples(message)
            sent, received = sender[base + number, message], receiver[base + number, message]
            for n in facts.slots[source].sharing(samples):
                if sent < sender[source, n]:
                    place = _place(facts, hop.source_device, sent)
                    text = f"sends what {facts.label(source, n)} makes only afterwards, at [{sender[source, n]}]"
                    findings.add("transfer-order", place, text)
            takers = facts.slots[target].sharing(samples)
            if dependency.later:
                takers = range(message + dependency.later, message + dependency.later + 1)
            for n in takers:
                if receiver[target, n] < received and not inside.may_wait(
                    hop.target_device, (target, n), number, received
                ):
                    place = _place(facts, hop.target_device, received)
                    text = f"{facts.label(target, n)} needs it before, at [{receiver[target, n]}]"
                    findings.add("transfer-order", place, text)


def _between_alike(facts: Facts, messages: Messages, programs: Programs) -> set[int]:
    """The hops that are right as :func:`_is_between` says, of those between operations with the same samples as they
    have; all at once."""
    numbers, rows = list[int](), list[tuple[int, int, int, int]]()
    for number, (_, _, dependency, hop) in enumerate(messages.hops):
        ends = facts.position[dependency.source], facts.position[dependency.target]
        if not dependency.later and all(messages.slots[number] == facts.slots[own] for own in ends):
            numbers.append(number)
            rows.append((hop.source_device, hop.target_device, *ends))
    if not rows:
        return set()
    hops, (senders, receivers, sources, targets) = np.array(numbers), np.array(rows).T
    items = len(facts.ids) + hops
    wrong = programs.all_places(senders, items) < programs.all_places(senders, sources)
    wrong |= programs.all_places(receivers, targets) < programs.all_places(receivers, items)
    counts = np.diff(programs.firsts)[items]
    return set(hops.tolist()) - set(np.repeat(hops, counts)[wrong].tolist())


def _is_between(facts: Facts, messages: Messages, programs: Programs, number: int, ends: tuple[int, int]) -> bool:
    """Whether all messages of a hop are sent after what makes them, and received before what needs them."""
    _, _, dependency, hop = messages.hops[number]
    slots, item = messages.slots[number], len(facts.ids) + number
    sent, received = (programs.places_of(device, item) for device in (hop.source_device, hop.target_device))
    for side, (device, own) in enumerate(zip((hop.source_device, hop.target_device), ends, strict=True)):
        places = programs.places_of(device, own)
        if side and dependency.later:
            wrong = places[dependency.later :] < received
        elif slots == facts.slots[own]:
            wrong = places < received if side else sent < places
        else:
            at, others = spread(*sharing(slots, facts.slots[own]))
            wrong = places[others] < received[at] if side else sent[at] < places[others]
        if wrong.any():
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Inside:
    """What stands in programs between an action in parts and the next action: it runs while that one does.

    There its parts wait for messages, and send. ``until`` [device] is where the next action stands; an action has no
    entry where it has but one part. ``late`` [hop] is the part that waits for its messages, ``made`` [hop] the one that
    makes them.
    """

    until: list[dict[Entry, int]]
    late: list[int]
    made: list[int]

    @classmethod
    def of(cls, facts: Facts, messages: Messages, programs: Programs) -> _Inside:
        """Look through the programs, if any action has parts."""
        parts = [len(operation.parts_ns) for operation in facts.plan.operations]
        until: list[dict[Entry, int]] = [{} for _ in programs.ids]
        if any(parts):
            for device, compute in enumerate(programs.compute):
                where, length = programs.where[device], len(facts.plan.programs[device])
                for entry, after in itertools.pairwise((*compute, None)):
                    if entry is not None and parts[entry[0]]:
                        until[device][entry] = length if after is None else where[after]
        last = [max(0, count - 1) for count in parts]
        made = [
            last[facts.position[each.source]] if each.source_part is None else each.source_part
            for _, _, each, _ in messages.hops
        ]
        return cls(until, [each.target_part for _, _, each, _ in messages.hops], made)

    def may_wait(self, device: int, action: Entry, number: int, received: int) -> bool:
        """Whether a message of a hop may be received only there, after its action: while that runs."""
        return self.late[number] > 0 and received < self.until[device].get(action, 0)

    def in_parts(self, facts: Facts, messages: Messages, programs: Programs, device: int) -> list[tuple[int, ...]]:
        """A device's entries, and among them the later parts of its actions, (operation, number, part).

        Each stands where it is first needed: before the SEND of what it makes, or before the next action.
        """
        base, entries = len(facts.ids), programs.entries[device]
        found: list[tuple[int, ...]] = []
        running: Entry | None = None
        begun = 0

        def run(until: int) -> int:
            if running is not None:
                found.extend((*running, part) for part in range(begun, until))
            return max(begun, until)

        for entry in entries:
            number = entry[0] - base
            if number < 0:
                begun = run(len(facts.plan.operations[running[0]].parts_ns)) if running is not None else 0
                running, begun = (entry if entry in self.until[device] else None), 1
            elif running is not None and self._sends(facts, messages, device, running, number, entry[1]):
                begun = run(self.made[number] + 1)
            found.append(entry)
        if running is not None:
            run(len(facts.plan.operations[running[0]].parts_ns))
        return found

    @staticmethod
    def _sends(facts: Facts, messages: Messages, device: int, action: Entry, number: int, message: int) -> bool:
        """Whether a message of a hop leaves this device with what an action made."""
        _, _, dependency, hop = messages.hops[number]
        if hop.source_device != device or facts.position[dependency.source] != action[0]:
            return False
        return action[1] in facts.slots[action[0]].sharing(messages.slots[number].samples(message))


def _check_inside(facts: Facts, messages: Messages, programs: Programs, inside: _Inside, findings: Findings) -> None:
    """What a part waits for is received before anything is sent that this part, or a later one, makes."""
    base = len(facts.ids)
    for device, until in enumerate(inside.until):
        if not until:
            continue
        order = {entry: at for at, entry in enumerate(inside.in_parts(facts, messages, programs, device))}
        for number, (_, _, dependency, hop) in enumerate(messages.hops):
            part, target = inside.late[number], facts.position[dependency.target]
            if hop.target_device != device or not part:
                continue
            for message in range(len(messages.slots[number])):
                for n in facts.slots[target].sharing(messages.slots[number].samples(message)):
                    if order[base + number, message] > order.get((target, n, part), 0):
                        place = _place(facts, device, programs.where[device][base + number, message])
                        text = f"part {part} of {facts.label(target, n)} needs it before, and is sent on before it"
                        findings.add("transfer-order", place, text)


def _check_fifo(facts: Facts, messages: Messages, programs: Programs, findings: Findings) -> None:
    """NCCL matches messages between two devices first in, first out."""
    ends = [(hop.source_device, hop.target_device) for *_, hop in messages.hops]
    links = {link: number for number, link in enumerate(dict.fromkeys(ends))}
    link_of = np.array([*(-1 for _ in facts.ids), *(links[each] for each in ends)])[programs.items]
    sender_of = np.array([*(-1 for _ in facts.ids), *(source for source, _ in ends)])[programs.items]
    own = [ids[ids >= messages.firsts[0]] for ids in programs.ids]
    sent = np.concatenate([ids[sender_of[ids] == device] for device, ids in enumerate(own)])
    received = np.concatenate([ids[sender_of[ids] != device] for device, ids in enumerate(own)])
    by_device = sent
    sent, received = (ids[np.argsort(link_of[ids], kind="stable")] for ids in (sent, received))
    if np.array_equal(sent, received):
        return
    in_turn = dict.fromkeys(link_of[by_device].tolist())
    differs = {*link_of[sent[sent != received]].tolist()}
    for link in (link for link in in_turn if link in differs):
        at = int(np.flatnonzero((link_of[sent] == link) & (sent != received))[0])
        ours, theirs = programs.named(np.array([sent[at], received[at]]))
        source, target = [*links][link]
        place = _place(facts, target, programs.where[target][theirs])
        sent_text = messages.text(ours[0] - len(facts.ids), ours[1], send=True)
        text = f"takes another message than device {source} sends, {sent_text}"
        findings.add("fifo", place, f"{text} at [{programs.where[source][ours]}]: orders must be equal")


def _check_deadlock(
    facts: Facts, messages: Messages, programs: Programs, inside: _Inside, sent: SentOnLinks, findings: Findings
) -> None:
    """Run the programs with everything joint done together: SEND with RECV, an action on all its devices.

    That this comes to the end is the same as that the union of the program orders has no cycle, and then no
    interleaving deadlocks, even with blocking sends. Later parts of an action are run, on all its devices, where they
    are first needed.
    """
    if not any(inside.until) and _go_on_in_time(facts, messages, programs, sent):
        return
    entries: list[list[tuple[int, ...]]] = [
        inside.in_parts(facts, messages, programs, device) if until else [*programs.entries[device]]
        for device, until in enumerate(inside.until)
    ]
    members = [*facts.devices, *((hop.source_device, hop.target_device) for *_, hop in messages.hops)]
    at = [0] * len(entries)
    arrived: defaultdict[tuple[int, ...], int] = defaultdict(int)
    moved = list(range(len(at)))
    for asked in itertools.count():
        if not moved:
            break
        if not asked % 1024:
            checkpoint()
        device = moved.pop()
        if at[device] == len(entries[device]):
            continue
        entry = entries[device][at[device]]
        arrived[entry] += 1
        if arrived[entry] == len(members[entry[0]]):
            del arrived[entry]
            for member in members[entry[0]]:
                at[member] += 1
                moved.append(member)
    if arrived:
        cycle = _cycle(entries, members, at)
        device = cycle[0]
        where = {d: programs.where[d][entries[d][at[d]][0], entries[d][at[d]][1]] for d in cycle}
        waits = [f"device {d} is at {_place(facts, d, where[d])}" for d in cycle]
        shown = ", which waits for ".join([*waits[:8], *(["..."] if len(waits) > 8 else [])])
        place = _place(facts, device, where[device])
        text = f"deadlock: {shown}, which waits for device {device} again"
        findings.add("deadlock", place, text)


def _go_on_in_time(facts: Facts, messages: Messages, programs: Programs, sent: SentOnLinks) -> bool:
    """Whether there is an order of everything in which all programs go on, so that nothing waits in a circle.

    One is tried: by the time at which an action starts, or a message is made, those of a link not before what was sent
    there earlier; messages before actions, and by when they leave; all else by number. False says nothing.
    """
    on_links, begins = sent
    its = facts.columns
    times = np.concatenate((its.starts, np.zeros(int(programs.firsts[-1]) - len(its.starts), its.starts.dtype)))
    for number, (_, _, dependency, _) in enumerate(messages.hops):
        source, slots = facts.position[dependency.source], messages.slots[number]
        ends, made = its.ends[its.firsts[source] : its.firsts[source + 1]], times[slice(*messages.firsts[number:][:2])]
        if slots == facts.slots[source]:
            made[:] = ends
        else:
            at, makers = spread(*sharing(slots, facts.slots[source]))
            np.maximum.at(made, at, ends[makers])
    leaves = times.copy()
    for hops, numbers in on_links:
        own = messages.firsts[hops] + numbers
        times[own] = np.maximum.accumulate(times[own])
    for number, begin in begins.items():
        leaves[slice(*messages.firsts[number:][:2])] = begin
    place = np.empty(len(times), np.int64)
    place[np.lexsort((leaves, np.arange(len(times)) < len(its.starts), times))] = np.arange(len(times))
    return all((np.diff(place[own]) > 0).all() for own in programs.ids)


def _cycle(entries: list[list[tuple[int, ...]]], members: list[tuple[int, ...]], at: list[int]) -> list[int]:
    """Devices of which each waits for the next, and the last for the first."""
    device = next(d for d in range(len(at)) if at[d] < len(entries[d]))
    order: dict[int, int] = {}
    while device not in order:
        order[device] = len(order)
        entry = entries[device][at[device]]
        device = next(d for d in members[entry[0]] if entries[d][at[d]] != entry)
    return [d for d, index in order.items() if index >= order[device]]


def _place(facts: Facts, device: int, index: int) -> str:
    return f"programs[{device}][{index}] ({facts.plan.programs[device][index]})"
