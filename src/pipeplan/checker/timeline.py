"""Rules about links, start times and memory: what happens on devices and links as time passes."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan.checker.exchanges import Spans
from pipeplan.checker.facts import Facts, Findings, overlap
from pipeplan.checker.programs import Entry, Messages, Programs
from pipeplan.time_limit import checked
from pipeplan.workload.columns import IntArray, column, counted, microbatches, sharing, spread
from pipeplan.workload.elements import DeviceMemory, Hop, Loop
from pipeplan.workload.kinds import ACTIVATIONS, WORKSPACE, MemoryBytes, MemoryKind

Sent = tuple[int, int]
"""A message: the number of its hop, and its own among those of the hop."""


@dataclass(frozen=True)
class Links:
    """The messages that occupy links, and when they do.

    ``on`` has for each link (source device, target device) its messages in the order of the SENDs, by hop and number.
    All messages are numbered through, hop after hop. ``made`` [message] is when everything that it carries is made, and
    ``begun`` [message] when it takes its link, in ns: as soon as it is made and those before it are through. ``takes``
    [message] is how long it occupies the link, a part of a micro-batch half as long, and ``arrivals`` [message] when it
    is there; none of that is of hops that occupy none. ``ends`` {hop: (source operation, target operation)} has those
    that do. ``comings`` are (action, message that it waits for, how long the action runs before it needs that, in ns).
    """

    messages: Messages
    on: dict[tuple[int, int], tuple[IntArray, IntArray]]
    made: IntArray
    begun: IntArray
    takes: IntArray
    arrivals: IntArray
    ends: dict[int, tuple[int, int]]
    comings: tuple[IntArray, IntArray, IntArray]

    @classmethod
    def of(cls, facts: Facts, messages: Messages, programs: Programs) -> Links:
        """Go through the programs, which are complete."""
        ends = {
            number: (facts.position[dependency.source], facts.position[dependency.target])
            for number, (_, _, dependency, hop) in enumerate(messages.hops)
            if hop.occupancy_ns
        }
        counts = np.diff(messages.firsts)
        takes = np.repeat([hop.occupancy_ns for *_, hop in messages.hops] or np.zeros(0, np.int64), counts)
        for number, slots in enumerate(messages.slots):
            if slots.num_parted:
                begin = int(messages.firsts[number] - messages.firsts[0])
                takes[begin : begin + 2 * slots.num_parted] = messages.hops[number][3].part.occupancy_ns
        inside = {number: overlap(facts.plan, messages.hops[number][2]) for number in ends}
        made = _made(facts, messages, ends, inside)
        on, begun = _sent(messages, programs, ends, made, takes)
        latency = np.repeat([hop.latency_ns for *_, hop in messages.hops] or np.zeros(0, np.int64), counts)
        arrivals = begun + takes + latency
        return cls(messages, on, made, begun, takes, arrivals, ends, _comings(facts, messages, ends, inside))

    @cached_property
    def orders(self) -> dict[tuple[int, int], list[Sent]]:
        """{link: its messages in the order of the SENDs}."""
        return {link: list(zip(*(each.tolist() for each in own), strict=True)) for link, own in self.on.items()}

    @cached_property
    def begins(self) -> dict[int, IntArray]:
        """{hop: [its message] when each takes its link, in ns}."""
        firsts = self.messages.firsts - self.messages.firsts[0]
        return {number: self.begun[firsts[number] : firsts[number + 1]] for number in self.ends}

    def hop(self, number: int, message: int) -> Hop:
        """What a message takes, as a hop: a part of a micro-batch occupies the link half as long."""
        hop = self.messages.hops[number][3]
        return hop.part if message < 2 * self.messages.slots[number].num_parted else hop

    def arrival(self, number: int, message: int) -> int:
        """When a message is there, in ns."""
        return int(self.begins[number][message]) + self.hop(number, message).duration_ns

    @property
    def allowed(self) -> IntArray:
        """[coming] when the message lets the action start, in ns: the part that needs it comes after the start."""
        _, sent, begun = self.comings
        return self.arrivals[sent] - begun

    @cached_property
    def _num_parted(self) -> IntArray:
        """[hop] how many of its micro-batches go in parts."""
        return np.array([slots.num_parted for slots in self.messages.slots])

    def copy(self, link: tuple[int, int], begins: list[int], unroll: int) -> dict[Sent, int] | None:
        """The link's part of a repetend that has its operations from micro-batches ``begins`` [operation] on.

        That is a contiguous run of its messages, in which each hop occurs ``unroll`` times; the last such run
        in which no message is before what makes it, or after what waits for it. {(hop, micro-batch): the
        micro-batch's number in the run, by hop}, in order; None if there is none.
        """
        hops, messages = self.on[link]
        parted = self._num_parted[hops]
        if parted.any():
            whole = (messages >= 2 * parted) | (messages % 2 == 0)  # parts are before it
            hops, messages = hops[whole], messages[whole]
        own, _ = counted(hops)
        index, numbers = np.searchsorted(own, hops), messages.copy()
        for place, number in enumerate(own.tolist()):
            if not self.messages.slots[number].plain:
                numbers[index == place] = microbatches(self.messages.slots[number])[messages[index == place]]
        low, high = (np.array([begins[self.ends[number][side]] for number in own.tolist()]) for side in (1, 0))
        for at in reversed(range(int(low.sum()), int(high.sum()) + 1)):
            before = np.bincount(index[:at], minlength=len(own))
            run = slice(at, at + unroll * len(own))
            later = numbers[run] - before[index[run]]
            if (
                (low <= before).all()
                and (before <= high).all()
                and (numbers[:at] < before[index[:at]]).all()
                and {*zip(index[run].tolist(), later.tolist(), strict=True)}
                == {(place, u) for place in range(len(own)) for u in range(unroll)}
            ):
                sent = zip(hops[run].tolist(), numbers[run].tolist(), strict=True)
                return dict(zip(sent, later.tolist(), strict=True))
        return None


_Ends = Mapping[int, tuple[int, int]]
"""{hop that occupies a link: two numbers that it has}"""


def _made(facts: Facts, messages: Messages, ends: _Ends, inside: _Ends) -> IntArray:
    """[message] when everything that it carries is made, in ns; nothing of hops that occupy no link."""
    its, firsts = facts.columns, messages.firsts - messages.firsts[0]
    made = np.zeros(int(firsts[-1]), its.ends.dtype)
    for number, (source, _) in checked(ends.items(), 1024):
        slots, ended = messages.slots[number], its.ends[its.firsts[source] : its.firsts[source + 1]]
        own = made[firsts[number] : firsts[number + 1]]
        if slots == facts.slots[source]:
            own[:] = ended
        else:
            at, makers = spread(*sharing(slots, facts.slots[source]))
            np.maximum.at(own, at, ended[makers])
        if inside[number][0]:
            own -= inside[number][0]
    return made


def _comings(facts: Facts, messages: Messages, ends: _Ends, inside: _Ends) -> tuple[IntArray, IntArray, IntArray]:
    """Actions, messages that come to them, and how long each action runs before it needs that, in ns."""
    its, firsts = facts.columns, messages.firsts - messages.firsts[0]
    alike = np.zeros(len(messages.hops), bool)
    targets = np.zeros(len(messages.hops), np.int64)
    actions, sent, begun = list[IntArray](), list[IntArray](), list[IntArray]()
    for number, (_, target) in checked(ends.items(), 1024):
        slots = messages.slots[number]
        if slots == facts.slots[target] and not inside[number][1]:
            alike[number], targets[number] = True, its.firsts[target]
            continue
        takers, those = spread(*sharing(facts.slots[target], slots))
        actions.append(takers + its.firsts[target])
        sent.append(those + firsts[number])
        begun.append(np.full(len(those), inside[number][1]))
    counts = np.diff(firsts)
    those = np.flatnonzero(np.repeat(alike, counts))
    actions.append(np.repeat(targets - firsts[:-1], counts)[those] + those)
    return (
        np.concatenate(actions),
        np.concatenate([*sent, those]),
        np.concatenate([*begun, np.zeros(len(those), np.int64)]),
    )


def _sent(
    messages: Messages, programs: Programs, ends: _Ends, made: IntArray, takes: IntArray
) -> tuple[dict[tuple[int, int], tuple[IntArray, IntArray]], IntArray]:
    """The messages of each link in the order of the SENDs, by hop and number; [message] when it takes its link."""
    first, begun = int(messages.firsts[0]), np.zeros_like(made)
    pairs = {(messages.hops[number][3].source_device, messages.hops[number][3].target_device): None for number in ends}
    links = {pair: index for index, pair in enumerate(sorted(pairs, key=lambda pair: pair[0]))}
    link_of = np.full(len(messages.hops), -1)
    sender_of = np.full(len(messages.hops), -1)
    for number in ends:
        hop = messages.hops[number][3]
        link_of[number], sender_of[number] = links[hop.source_device, hop.target_device], hop.source_device
    hop_of = programs.items[first:] - programs.num_operations
    found = [np.zeros(0, np.int64)]
    for device, ids in checked(enumerate(programs.ids if links else []), 8):
        own = ids[ids >= first] - first
        found.append(own[sender_of[hop_of[own]] == device])
    sent = np.concatenate(found)
    line = sent[np.argsort(link_of[hop_of[sent]], kind="stable")]
    hops = hop_of[line]
    numbers, bounds = line + first - messages.firsts[hops], np.searchsorted(link_of[hops], np.arange(len(links) + 1))
    before = np.cumsum(takes[line]) - takes[line]
    on = dict[tuple[int, int], tuple[IntArray, IntArray]]()
    for link, index in checked(links.items(), 1024):
        these = slice(int(bounds[index]), int(bounds[index + 1]))
        if these.start == these.stop:
            continue
        waited = before[these] - before[these][:1]
        begun[line[these]] = np.maximum.accumulate(np.maximum(made[line[these]] - waited, 0)) + waited
        on[link] = hops[these], numbers[these]
    return on, begun


def check_links(facts: Facts, links: Links, findings: Findings) -> None:
    """No action starts before a message is there that had to wait for its link.

    Whether it would be there over a free link is another rule's (inputs).
    """
    actions, sent, _ = links.comings
    waited = links.begun[sent] - links.made[sent]
    starts, allowed = facts.columns.starts[actions], links.allowed
    late = np.flatnonzero((allowed - waited <= starts) & (starts < allowed))
    wrong = list[tuple[int, int, int]]()
    for action, each in zip(actions[late].tolist(), sent[late].tolist(), strict=True):
        number = int(np.searchsorted(links.messages.firsts, each + links.messages.firsts[0], side="right")) - 1
        wrong.append((action, number, each + int(links.messages.firsts[0] - links.messages.firsts[number])))
    for action, number, message in sorted(wrong):
        hop = links.hop(number, message)
        target, own = facts.columns.entry(action)
        text = (
            f"starts at {facts.starts[target][own]} ns, but {links.messages.text(number, message, send=True)} gets the "
            f"link from device {hop.source_device} to {hop.target_device} at {links.begins[number][message]} ns, after "
            f"others, and arrives at {links.arrival(number, message)} ns ({links.messages.place(number)})"
        )
        findings.add("links", f"starts_ns[{facts.ids[target]}][{own}]", text)


def check_inputs(facts: Facts, findings: Findings) -> None:
    """Every action starts when all actions that hold its samples have ended and their slowest hop has arrived.

    ``start(target) >= end(source) + lag`` for each dependency, and each action of the source that shares samples.
    """
    its = facts.columns
    early = np.flatnonzero(its.starts[its.targets] < its.arrivals)
    for pair in early[np.lexsort((early, its.targets[early]))].tolist():
        target, number = its.entry(int(its.targets[pair]))
        wait = facts.waits[target][int(its.waits[pair])]
        source = its.entry(int(its.sources[pair]))
        _add_too_early(facts, findings, (target, number), source, int(its.lags[pair]), wait.dependency)


def _add_too_early(
    facts: Facts, findings: Findings, target: Entry, source: Entry, lag: int, dependency: int | None
) -> None:
    end = facts.end(*source)
    says = f"operations[{target[0]}].pace_ns" if dependency is None else f"dependencies[{dependency}]"
    travels = f" and takes {lag} ns to arrive" if lag > 0 else ""
    if lag < 0:
        travels = f", {-lag} ns after what is needed of it is there, or before that is needed"
    text = (
        f"starts at {facts.starts[target[0]][target[1]]} ns, but {facts.label(*source)} ends at {end} ns{travels}: "
        f"not before {end + lag} ns ({says})"
    )
    findings.add("inputs", _place(facts, *target), text)


def check_timeline(
    facts: Facts, programs: Programs, links: Links | None, least: dict[Entry, int], findings: Findings
) -> None:
    """Devices run one action at a time, in program order, and each action starts as soon as it can.

    The last holds if every start equals the latest of its device's previous ends, its inputs' arrivals, and of what
    exchanges of state let it start at ``least``: such times are unique, so replaying the programs gives just these.
    Call it with complete programs only; without ``links`` the last is passed over where messages occupy links.
    """
    its = facts.columns
    free = np.zeros_like(its.starts)  # when the devices of an action have ended what they run before
    for entry, moment in least.items():
        free[its.firsts[entry[0]] + entry[1]] = moment
    for device, actions in checked(enumerate(programs.actions), 1):
        _check_device(facts, device, actions, findings)
        np.maximum.at(free, actions[1:], its.ends[actions[:-1]])
    occupied = any(hop.occupancy_ns for dependency in facts.plan.dependencies for hop in dependency.hops)
    if not findings.has("inputs", "links", "exclusive", "order", "exchanges") and (links is not None or not occupied):
        _check_earliest(facts, free, links, findings)


def _check_device(facts: Facts, device: int, actions: IntArray, findings: Findings) -> None:
    """Starts in the order of the program, and no action before the one that started before it has ended."""
    its = facts.columns
    starts = its.starts[actions]
    for at in np.flatnonzero(starts[1:] < starts[:-1]).tolist():
        before, after = its.entry(int(actions[at])), its.entry(int(actions[at + 1]))
        text = (
            f"starts at {starts[at + 1]} ns, before {facts.label(*before)} at {starts[at]} ns, which stands before it "
            f"in programs[{device}]"
        )
        findings.add("order", _place(facts, *after), text)
    in_time = actions[np.argsort(starts, kind="stable")]
    starts, ends = its.starts[in_time], its.ends[in_time]
    for at in np.flatnonzero(starts[1:] < ends[:-1]).tolist():
        before, after = its.entry(int(in_time[at])), its.entry(int(in_time[at + 1]))
        text = f"starts at {starts[at + 1]} ns, while device {device} runs {facts.label(*before)} until {ends[at]} ns"
        findings.add("exclusive", _place(facts, *after), text)


def _check_earliest(facts: Facts, free: IntArray, links: Links | None, findings: Findings) -> None:
    its = facts.columns
    ready = free.copy()
    np.maximum.at(ready, its.targets, its.arrivals)
    if links is not None:
        np.maximum.at(ready, links.comings[0], links.allowed)
    for action in np.flatnonzero(its.starts != ready).tolist():
        start, free_at = its.starts[action], ready[action]
        text = f"starts at {start} ns, but its devices are free and its inputs are there at {free_at} ns"
        findings.add("earliest", _place(facts, *its.entry(action)), text)


def _place(facts: Facts, operation: int, number: int) -> str:
    return f"starts_ns[{facts.ids[operation]}][{number}]"


def check_memory(
    facts: Facts, programs: Programs, findings: Findings, spans: Sequence[Sequence[Spans]] = ()
) -> tuple[int, ...]:
    """Every device stays within its memory and its predicted parts are right; returns the peaks [device] in bytes.

    Of inference what forwards give is among the ``spans``, and they give back nothing themselves.

    An action takes ``acquire_bytes`` at its start and gives ``release_bytes`` back at its end, a part of a forward
    takes half; workspace is held while it runs. A device runs one action at a time, so all follows from its order, but
    for what stages keep for each micro-batch. Call it with complete programs only.
    """
    state, effects = _state(facts), _Effects.of(facts, programs)
    keeping = [number for number, stage in enumerate(facts.plan.stages) if stage.kept.total]
    peaks: list[int] = []
    for device, actions in checked(enumerate(programs.actions), 1):
        if facts.plan.is_inference or (spans and spans[device]):
            peaks.append(_peak_in_time(facts, programs, effects, device, state[device], spans[device], findings))
            continue
        kept = _kept(facts, device, actions, keeping)
        levels = effects.levels(programs, actions)
        if keeping:
            levels = levels + column([each.total for each in kept], 2)
        if facts.loop is not None and len(facts.loop.rounds) > 1:
            where, entries = programs.where[device], programs.compute[device]
            copies = _in_all_copies(facts, facts.loop, device, [(entry, where[entry]) for entry in entries])
            levels = column([int(levels[index]) + more for index, more in copies])
            actions, kept = actions[[index for index, _ in copies]], [kept[index] for index, _ in copies]
        highest, workspace, beside = int(levels.max(initial=0)), 0, MemoryBytes()
        _check_limit(facts, programs, device, actions, levels, state[device].total, findings)
        if highest > 0:
            index = int(np.argmax(levels))  # the first moment of the peak
            operation, _ = facts.columns.entry(int(actions[index]))
            workspace, beside = facts.plan.operations[operation].workspace_bytes, kept[index]
        taken = MemoryBytes({ACTIVATIONS: highest - workspace - beside.total, WORKSPACE: workspace})
        parts = state[device] + beside + taken
        _check_parts(device, facts.plan.predicted.memory[device], parts, findings)
        peaks.append(parts.total)
    return tuple(peaks)


def _peak_in_time(
    facts: Facts,
    programs: Programs,
    effects: _Effects,
    device: int,
    state: MemoryBytes,
    spans: Sequence[Spans],
    findings: Findings,
) -> int:
    """The same of a device that has state whole for some time: all that it holds at each moment at which that grows."""
    its, actions = facts.columns, programs.actions[device]
    workspace = effects.workspace[programs.items[actions]]
    starts, ends = its.starts[actions], its.ends[actions]
    changes = [(WORKSPACE, starts, workspace), (WORKSPACE, ends, -workspace)]
    if not facts.plan.is_inference:
        taken, given = effects.taken(programs, actions)
        changes += [(ACTIVATIONS, starts, taken), (ACTIVATIONS, ends, -given)]
    for each in spans:
        changes += [(each.kind, each.begins, each.sizes), (each.kind, each.ends, -each.sizes)]
    times, sizes = (np.concatenate([change[place] for change in changes]) for place in (1, 2))
    order = np.argsort(times, kind="stable")
    times, levels = times[order], np.cumsum(sizes[order])
    last = np.flatnonzero(np.append(times[1:] != times[:-1], np.ones(min(1, len(times)), bool)))
    highest, at = MemoryBytes(), 0
    if len(last) and levels[last].max() > 0:
        at = int(times[last[np.argmax(levels[last])]])
        held_then = Counter[MemoryKind]()
        for kind, moments, amounts in changes:
            held_then[kind] += int(amounts[moments <= at].sum())
        highest = MemoryBytes(held_then)
    parts = state + highest
    limit = facts.plan.devices[device].usable_bytes
    if limit is not None and parts.total > limit:
        text = f"device {device} holds {parts.total} bytes at {at} ns, {parts.total - limit} more than its {limit}"
        findings.add("memory", f"programs[{device}]", text)
    _check_parts(device, facts.plan.predicted.memory[device], parts, findings)
    return parts.total


def _state(facts: Facts) -> list[MemoryBytes]:
    """What the stages on a device keep throughout [device]."""
    state = [MemoryBytes()] * len(facts.plan.devices)
    for stage in facts.plan.stages:
        for device in stage.devices:
            state[device] += stage.state + stage.cached
    for each in facts.plan.tied:
        seen: set[int] = set()
        for device in itertools.chain.from_iterable(each.devices):
            if device in seen:
                state[device] -= each.state
            seen.add(device)
    return state


@dataclass(frozen=True, slots=True)
class _Effects:
    """[operation] bytes that an action takes at its start and gives back at its end, and those it has while it runs.

    ``parts`` [operation] says how many of its actions run a part of a micro-batch.
    """

    acquired: IntArray
    released: IntArray
    workspace: IntArray
    parts: IntArray

    @classmethod
    def of(cls, facts: Facts, programs: Programs) -> _Effects:
        """Of a plan, for sums over any of its programs."""
        operations, times = facts.plan.operations, 2 + max(map(len, programs.actions), default=0)
        return cls(
            column([each.acquire_bytes for each in operations], times),
            column([each.release_bytes for each in operations], times),
            column([each.workspace_bytes for each in operations], times),
            np.array([2 * slots.num_parted for slots in facts.slots]),
        )

    def levels(self, programs: Programs, actions: IntArray) -> IntArray:
        """Activations and workspace while each action runs [action], in bytes."""
        taken, given = self.taken(programs, actions)
        return np.cumsum(taken - given) + given + self.workspace[programs.items[actions]]

    def taken(self, programs: Programs, actions: IntArray) -> tuple[IntArray, IntArray]:
        """Activations that each action takes at its start, and gives back at its end [action], in bytes."""
        operations = programs.items[actions]
        taken, parts = self.acquired[operations], self.parts[operations]
        if parts.any():
            numbers = actions - programs.firsts[operations]
            taken = np.where(numbers < parts, np.where(numbers % 2, taken // 2, taken - taken // 2), taken)
        return taken, self.released[operations]


def _in_all_copies(facts: Facts, loop: Loop, device: int, entries: list[tuple[Entry, int]]) -> list[tuple[int, int]]:
    """What a device runs, as the index of an entry and the bytes that it then holds more than is written.

    Of each round it is the first copy and the last one: between these levels only rise or only fall, as what one round
    takes, and another gives back, adds up. ``entries`` have their places in the program.
    """
    found: list[tuple[int, int]] = []
    more, read = 0, 0
    for each in loop.rounds:
        its = [index for index, (_, at) in enumerate(entries) if each.begins[device] <= at < each.ends[device]]
        if its:
            taken = sum(facts.acquired(*entries[index][0]) for index in its)
            given = sum(facts.plan.operations[entries[index][0][0]].release_bytes for index in its)
            found += [(index, more) for index in range(read, its[-1] + 1)]
            more += (loop.copies - 1) * (taken - given)
            found += [(index, more) for index in its]
            read = its[-1] + 1
    return [*found, *((index, more) for index in range(read, len(entries)))]


def _kept(facts: Facts, device: int, actions: IntArray, keeping: Sequence[int]) -> list[MemoryBytes]:
    """What the stages ``keeping`` something keep on a device for micro-batches while each action runs [action]."""
    kept = [MemoryBytes()] * len(actions)
    starts = facts.columns.starts[actions].tolist() if keeping else []
    for number in keeping:
        stage = facts.plan.stages[number]
        if device in stage.devices:
            for begin, end in _kept_times(facts, number):
                for index in range(bisect_left(starts, begin), bisect_left(starts, end)):
                    kept[index] += stage.kept
    return kept


def _kept_times(facts: Facts, stage: int) -> Iterator[tuple[int, int]]:
    """For each micro-batch of a stage, from its first action there to the end of its last on the stage's devices."""
    devices = facts.plan.stages[stage].devices
    own = [x for x, operation in enumerate(facts.plan.operations) if operation.stage == stage]
    there = [x for x, group in enumerate(facts.groups) if not group.isdisjoint(devices)]
    for number, begin in enumerate(facts.starts[own[0]] if own else ()):
        yield begin, max(facts.end(x, n) for x in there for n in facts.sharing(own[0], number, x))


def _check_limit(
    facts: Facts, programs: Programs, device: int, actions: IntArray, levels: IntArray, base: int, findings: Findings
) -> None:
    limit, reserve = facts.plan.devices[device].usable_bytes, facts.plan.devices[device].reserve_bytes
    if limit is None:
        return
    over = np.flatnonzero(levels > limit - base)
    if len(over):
        entry, needed = facts.columns.entry(int(actions[over[0]])), base + int(levels[over[0]])
        place = f"programs[{device}][{programs.where[device][entry]}] ({facts.label(*entry)})"
        beside = f" beside its reserve of {reserve}" if reserve else ""
        text = (
            f"device {device} holds {needed} bytes, {needed - limit} more than its "
            f"{limit}{beside} (peak {base + int(levels.max())}, {len(over)} actions above)"
        )
        findings.add("memory", place, text)


def _check_parts(device: int, stated: DeviceMemory, parts: MemoryBytes, findings: Findings) -> None:
    for part, value in (parts.keyed() | {"peak_bytes": parts.total}).items():
        if getattr(stated, part) != value:
            text = f"is {getattr(stated, part)}, the programs give {value}"
            findings.add("figures", f"predicted.memory[{device}].{part}", text)
