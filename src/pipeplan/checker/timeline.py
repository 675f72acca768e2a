"""Rules about links, start times and memory: what happens on devices and links as time passes."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeplan.checker.exchanges import Span
from pipeplan.checker.facts import Facts, Findings, overlap
from pipeplan.checker.programs import Entry, Messages, Programs
from pipeplan.time_limit import checked
from pipeplan.workload.elements import DeviceMemory, Hop, Loop
from pipeplan.workload.kinds import ACTIVATIONS, WORKSPACE, MemoryBytes, MemoryKind

Sent = tuple[int, int]
"""A message: the number of its hop, and its own among those of the hop."""


@dataclass(frozen=True, slots=True)
class Links:
    """The messages that occupy links, and when they do.

    ``orders`` has for each link (source device, target device) its messages in the order of the SENDs. ``begins`` has
    when each takes its link, in ns: as soon as it is made and those before it are through. ``hops`` [operation] are the
    numbers of such hops that bring it something, ``ends`` {hop: (source operation, target operation)}.
    """

    messages: Messages
    orders: dict[tuple[int, int], list[Sent]]
    begins: dict[Sent, int]
    hops: list[list[int]]
    ends: dict[int, tuple[int, int]]

    @classmethod
    def of(cls, facts: Facts, messages: Messages, programs: Programs) -> Links:
        """Go through the programs, which are complete."""
        links = cls(messages, defaultdict(list), {}, [[] for _ in facts.ids], {})
        for number, (_, _, dependency, hop) in enumerate(messages.hops):
            if hop.occupancy_ns:
                links.ends[number] = facts.position[dependency.source], facts.position[dependency.target]
                links.hops[facts.position[dependency.target]].append(number)
        for device, entries in enumerate(programs.entries if links.ends else []):
            links._send(facts, device, entries)
        return links

    def _send(self, facts: Facts, device: int, entries: list[Sent]) -> None:
        """Take the SENDs of one device."""
        free: defaultdict[int, int] = defaultdict(int)
        for entry, message in checked(entries, 1024):
            number = entry - len(facts.ids)
            if number not in self.ends or self.messages.hops[number][3].source_device != device:
                continue
            hop = self.hop(number, message)
            self.orders[device, hop.target_device].append((number, message))
            self.begins[number, message] = max(free[hop.target_device], self.made(facts, number, message))
            free[hop.target_device] = self.begins[number, message] + hop.occupancy_ns

    def hop(self, number: int, message: int) -> Hop:
        """What a message takes, as a hop: a part of a micro-batch occupies the link half as long."""
        hop = self.messages.hops[number][3]
        return hop.part if message < 2 * self.messages.slots[number].num_parted else hop

    def made(self, facts: Facts, number: int, message: int) -> int:
        """When everything that a message carries is made, in ns."""
        source = self.ends[number][0]
        samples = self.messages.slots[number].samples(message)
        left, _ = overlap(facts.plan, self.messages.hops[number][2])
        return max(facts.end(source, n) for n in facts.slots[source].sharing(samples)) - left

    def arrival(self, number: int, message: int) -> int:
        """When a message is there, in ns."""
        return self.begins[number, message] + self.hop(number, message).duration_ns

    def incoming(self, facts: Facts, target: int, action: int) -> Iterator[Sent]:
        """The messages that come to an action over these links."""
        samples = facts.slots[target].samples(action)
        for number in self.hops[target]:
            for message in self.messages.slots[number].sharing(samples):
                yield number, message

    def last_arrival(self, facts: Facts, target: int, action: int) -> int:
        """The earliest start of an action, in ns, given what arrives over these links; 0 if nothing does."""
        return max((self.allows(facts, *sent) for sent in self.incoming(facts, target, action)), default=0)

    def allows(self, facts: Facts, number: int, message: int) -> int:
        """From when on the action that a message comes to may start, in ns: the part that needs it comes after it."""
        return self.arrival(number, message) - overlap(facts.plan, self.messages.hops[number][2])[1]

    def copy(self, link: tuple[int, int], begins: list[int], unroll: int) -> dict[Sent, int] | None:
        """The link's part of a repetend that has its operations from micro-batches ``begins`` [operation] on.

        That is a contiguous run of its messages, in which each hop occurs ``unroll`` times; the last such run
        in which no message is before what makes it, or after what waits for it. {(hop, micro-batch): the
        micro-batch's number in the run, by hop}, in order; None if there is none.
        """
        named = [(number, self.messages.slots[number].name(message)) for number, message in self.orders[link]]
        order = [(number, microbatch) for number, (microbatch, part) in named if part != 1]  # parts are before it
        low = {number: begins[self.ends[number][1]] for number, _ in order}
        high = {number: begins[self.ends[number][0]] for number, _ in order}
        for at in reversed(range(sum(low.values()), sum(high.values()) + 1)):
            before = Counter(number for number, _ in order[:at])
            run = order[at : at + unroll * len(low)]
            if (
                all(low[number] <= before[number] <= high[number] for number in low)
                and all(m < before[number] for number, m in order[:at])
                and set(run) == {(number, before[number] + u) for number in low for u in range(unroll)}
            ):
                return {(number, m): m - before[number] for number, m in run}
        return None


def check_links(facts: Facts, links: Links, findings: Findings) -> None:
    """No action starts before a message is there that had to wait for its link.

    Whether it would be there over a free link is another rule's (inputs).
    """
    for target, starts in enumerate(facts.starts if links.ends else []):
        for action, start in checked(enumerate(starts), 1024):
            for sent in links.incoming(facts, target, action):
                number, hop = sent[0], links.hop(*sent)
                begun = links.arrival(*sent) - links.allows(facts, *sent)
                if links.made(facts, *sent) + hop.duration_ns - begun <= start < links.allows(facts, *sent):
                    text = (
                        f"starts at {start} ns, but {links.messages.text(*sent, send=True)} gets the link from "
                        f"device {hop.source_device} to {hop.target_device} at {links.begins[sent]} ns, after "
                        f"others, and arrives at {links.arrival(*sent)} ns ({links.messages.place(number)})"
                    )
                    findings.add("links", f"starts_ns[{facts.ids[target]}][{action}]", text)


def check_inputs(facts: Facts, findings: Findings) -> None:
    """Every action starts when all actions that hold its samples have ended and their slowest hop has arrived.

    ``start(target) >= end(source) + lag`` for each dependency, and each action of the source that shares samples.
    """
    for target, starts in enumerate(facts.starts):
        for number, start in checked(enumerate(starts), 1024):
            for wait, n, lag in facts.inputs(target, number):
                if start < facts.end(wait.source, n) + lag:
                    _add_too_early(facts, findings, (target, number), (wait.source, n), lag, wait.dependency)


def _add_too_early(facts: Facts, findings: Findings, target: Entry, source: Entry, lag: int, dependency: int) -> None:
    end = facts.end(*source)
    travels = f" and takes {lag} ns to arrive" if lag > 0 else ""
    if lag < 0:
        travels = f", {-lag} ns after what is needed of it is there, or before that is needed"
    text = (
        f"starts at {facts.starts[target[0]][target[1]]} ns, but {facts.label(*source)} ends at {end} ns{travels}: "
        f"not before {end + lag} ns (dependencies[{dependency}])"
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
    free = dict(least)  # when the devices of an action have ended what they run before
    for device, entries in enumerate(programs.compute):
        _check_device(facts, device, entries, findings)
        before: Entry | None = None
        for entry in checked(entries, 1024):
            ready = 0 if before is None else facts.end(*before)
            free[entry] = max(free.get(entry, 0), ready)
            before = entry
    occupied = any(hop.occupancy_ns for dependency in facts.plan.dependencies for hop in dependency.hops)
    if not findings.has("inputs", "links", "exclusive", "order", "exchanges") and (links is not None or not occupied):
        _check_earliest(facts, free, links, findings)


def _check_device(facts: Facts, device: int, entries: list[Entry], findings: Findings) -> None:
    """Starts in the order of the program, and no action before the one that started before it has ended."""
    for before, after in zip(entries, entries[1:], strict=False):
        first, second = facts.starts[before[0]][before[1]], facts.starts[after[0]][after[1]]
        if second < first:
            text = (
                f"starts at {second} ns, before {facts.label(*before)} at {first} ns, which stands before it in "
                f"programs[{device}]"
            )
            findings.add("order", _place(facts, *after), text)
    by_start = sorted(entries, key=lambda entry: facts.starts[entry[0]][entry[1]])
    for before, after in zip(by_start, by_start[1:], strict=False):
        start, end = facts.starts[after[0]][after[1]], facts.end(*before)
        if start < end:
            text = f"starts at {start} ns, while device {device} runs {facts.label(*before)} until {end} ns"
            findings.add("exclusive", _place(facts, *after), text)


def _check_earliest(facts: Facts, free: dict[Entry, int], links: Links | None, findings: Findings) -> None:
    for target, starts in enumerate(facts.starts):
        for number, start in checked(enumerate(starts), 1024):
            ready = free[target, number]
            if links is not None:
                ready = max(ready, links.last_arrival(facts, target, number))
            for wait, n, lag in facts.inputs(target, number):
                ready = max(ready, facts.end(wait.source, n) + lag)
            if start != ready:
                text = f"starts at {start} ns, but its devices are free and its inputs are there at {ready} ns"
                findings.add("earliest", _place(facts, target, number), text)


def _place(facts: Facts, operation: int, number: int) -> str:
    return f"starts_ns[{facts.ids[operation]}][{number}]"


def check_memory(
    facts: Facts, programs: Programs, findings: Findings, spans: Sequence[Sequence[Span]] = ()
) -> tuple[int, ...]:
    """Every device stays within its memory and its predicted parts are right; returns the peaks [device] in bytes.

    Of inference what forwards give is among the ``spans``, and they give back nothing themselves.

    An action takes ``acquire_bytes`` at its start and gives ``release_bytes`` back at its end, a part of a forward
    takes half; workspace is held while it runs. A device runs one action at a time, so all follows from its order, but
    for what stages keep for each micro-batch. Call it with complete programs only.
    """
    state = _state(facts)
    keeping = [number for number, stage in enumerate(facts.plan.stages) if stage.kept.total]
    peaks: list[int] = []
    for device, entries in checked(enumerate(programs.compute), 1):
        if facts.plan.is_inference or (spans and spans[device]):
            peaks.append(_peak_in_time(facts, device, entries, state[device], spans[device], findings))
            continue
        kept = _kept(facts, device, entries, keeping)
        levels = [level + each.total for level, each in zip(_levels(facts, entries), kept, strict=True)]
        if facts.loop is not None and len(facts.loop.rounds) > 1:
            where = programs.where[device]
            copies = _in_all_copies(facts, facts.loop, device, [(entry, where[entry]) for entry in entries])
            levels = [levels[index] + more for index, more in copies]
            entries, kept = [entries[index] for index, _ in copies], [kept[index] for index, _ in copies]
        highest, workspace, beside = max(levels, default=0), 0, MemoryBytes()
        _check_limit(facts, programs, device, state[device].total, levels, findings)
        if highest > 0:
            index = levels.index(highest)  # the first moment of the peak
            workspace, beside = facts.plan.operations[entries[index][0]].workspace_bytes, kept[index]
        taken = MemoryBytes({ACTIVATIONS: highest - workspace - beside.total, WORKSPACE: workspace})
        parts = state[device] + beside + taken
        _check_parts(device, facts.plan.predicted.memory[device], parts, findings)
        peaks.append(parts.total)
    return tuple(peaks)


def _peak_in_time(
    facts: Facts, device: int, entries: list[Entry], state: MemoryBytes, spans: Sequence[Span], findings: Findings
) -> int:
    """The same of a device that has state whole for some time: all that it holds at each moment at which that grows."""
    changes: dict[int, Counter[MemoryKind]] = defaultdict(Counter)
    for operation, number in entries:
        start, end = facts.starts[operation][number], facts.end(operation, number)
        effect = facts.plan.operations[operation]
        if not facts.plan.is_inference:
            changes[start][ACTIVATIONS] += facts.acquired(operation, number)
            changes[end][ACTIVATIONS] -= effect.release_bytes
        changes[start][WORKSPACE] += effect.workspace_bytes
        changes[end][WORKSPACE] -= effect.workspace_bytes
    for begin, end, kind, size in spans:
        changes[begin][kind] += size
        changes[end][kind] -= size
    held, highest, at = Counter[MemoryKind](), MemoryBytes(), 0
    for moment in sorted(changes):
        for kind, change in changes[moment].items():
            held[kind] += change
        if sum(held.values()) > highest.total:
            highest, at = MemoryBytes(held), moment
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


def _levels(facts: Facts, entries: list[Entry]) -> list[int]:
    """Activations and workspace while each action runs [action], in bytes."""
    held, levels = 0, []
    for operation, number in entries:
        effect = facts.plan.operations[operation]
        held += facts.acquired(operation, number)
        levels.append(held + effect.workspace_bytes)
        held -= effect.release_bytes
    return levels


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


def _kept(facts: Facts, device: int, entries: list[Entry], keeping: Sequence[int]) -> list[MemoryBytes]:
    """What the stages ``keeping`` something keep on a device for micro-batches while each action runs [action]."""
    kept = [MemoryBytes()] * len(entries)
    starts = [facts.starts[operation][number] for operation, number in entries]
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
    facts: Facts, programs: Programs, device: int, base: int, levels: list[int], findings: Findings
) -> None:
    limit, reserve = facts.plan.devices[device].usable_bytes, facts.plan.devices[device].reserve_bytes
    if limit is None:
        return
    over = [index for index, level in enumerate(levels) if base + level > limit]
    if over:
        entry = programs.compute[device][over[0]]
        place = f"programs[{device}][{programs.where[device][entry]}] ({facts.label(*entry)})"
        beside = f" beside its reserve of {reserve}" if reserve else ""
        text = (
            f"device {device} holds {base + levels[over[0]]} bytes, {base + levels[over[0]] - limit} more than its "
            f"{limit}{beside} (peak {base + max(levels)}, {len(over)} actions above)"
        )
        findings.add("memory", place, text)


def _check_parts(device: int, stated: DeviceMemory, parts: MemoryBytes, findings: Findings) -> None:
    for part, value in (parts.keyed() | {"peak_bytes": parts.total}).items():
        if getattr(stated, part) != value:
            text = f"is {getattr(stated, part)}, the programs give {value}"
            findings.add("figures", f"predicted.memory[{device}].{part}", text)
