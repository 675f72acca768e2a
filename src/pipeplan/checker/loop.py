"""Rules about the loop: the round is where the plan says, and running it again only changes numbers.

All other rules are about what is written, in which the round runs once. Cut at both of its ends, programs fall into
what is before it, the round, and what is after it; at those of several rounds, of which each has other operations, into
so many parts more. Three things carry over to any number of copies:

* *Order.* Nothing waits for a later part, in the programs or by what it needs. So no part makes another one deadlock,
  and in itself each is what was checked.
* *Time.* What is after a cut depends on what is before it by the state there: when devices and links are free, and when
  what later actions need has ended, or arrived. At the round's end this is what it was at its beginning, ``round_ns``
  later. Starts are the earliest, a recurrence in (max, +), so equal states with equal work give equal times.
  What waits for something of an earlier round is on the same devices, which have run all of that before.
* *Memory.* A round gives back what it takes, since it has every operation for equally many samples. Of several rounds
  all together do, and what one takes adds up over its copies (:func:`pipeplan.checker.timeline.check_memory`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from pipeplan.checker.exchanges import state_before
from pipeplan.checker.facts import Facts, Findings
from pipeplan.checker.programs import Entry, Messages, Programs
from pipeplan.checker.timeline import Links
from pipeplan.time_limit import checked
from pipeplan.workload.elements import ONCE, Loop, Round
from pipeplan.workload.kinds import GRADIENT_ROLES, PARAMETER_ROLES
from pipeplan.workload.samples import Slots


@dataclass(slots=True)
class _RoundsOfPlan:
    """The loop of a plan: ``begins`` {operation or hop: actions or messages before its round}, ``counts`` in it.

    ``own`` {operation or hop: the number of its round}.
    """

    facts: Facts
    messages: Messages
    loop: Loop
    findings: Findings
    begins: dict[int, int]
    counts: dict[int, int]
    own: dict[int, int]

    def part(self, entry: Entry, number: int) -> str:
        """Where an entry belongs: before, in or after a round."""
        item, its = entry
        if self.own[item] != number:
            return "after" if self.own[item] > number else "before"
        begin = self.begins[item]
        return "before" if its < begin else "in" if its < begin + self.counts[item] else "after"

    def slots(self, item: int) -> Slots:
        """The actions of an operation, or the messages of a hop."""
        own = len(self.facts.ids)
        return self.facts.slots[item] if item < own else self.messages.slots[item - own]

    def label(self, item: int, number: int) -> str:
        """An action or a message as text."""
        own = len(self.facts.ids)
        if item < own:
            return self.facts.label(item, number)
        return self.messages.text(item - own, number, send=True)

    def add(self, place: str, text: str) -> None:
        """Note a problem."""
        self.findings.add("loop", place, text)


def check_loop(facts: Facts, messages: Messages, programs: Programs, links: Links, findings: Findings) -> None:
    """Check the plan's loop. ``facts`` are of what is written; call it where that is right."""
    loop = facts.loop
    assert loop is not None
    found = _RoundsOfPlan(facts, messages, loop, findings, {}, {}, {})
    if _counted(found) and _cut(found, programs) and _in_order(found):
        for number in range(len(loop.rounds)):
            _check_state(found, number, programs, links)
        if any(stage.block_groups for stage in facts.plan.stages):
            _check_exchanges(found, programs)


def _counted(found: _RoundsOfPlan) -> bool:
    """How often everything is in the round; nothing that counts actions, or keeps memory from device to device."""
    plan, samples = found.facts.plan, found.loop.microbatches * found.facts.plan.microbatch_size
    for number, dependency in enumerate(plan.dependencies):
        if dependency.needs is not None:
            text = "counts actions; a loop is of actions that depend on each other by the samples they hold"
            found.add(f"dependencies[{number}].needs", text)
        if dependency.later:
            text = "is of a later micro-batch; what returns is written for all steps, or repeats with the repetend"
            found.add(f"dependencies[{number}].later", text)
    for number, stage in enumerate(plan.stages):
        if stage.kept.total:
            found.add(f"stages[{number}]", "keeps memory from one action to another; a loop is for stages that do not")
    for item in range(len(found.facts.ids) + len(found.messages.hops)):
        slots = found.slots(item)
        count, rest = divmod(samples, slots.stride)
        whole = slots.run == slots.every
        if rest or (not whole and count % slots.every):
            text = f"is {found.loop.microbatches}, after which not everything begins anew together"
            found.add("loop.microbatches", text)
        found.counts[item] = count if whole else count // slots.every * slots.run
    return not found.findings.has("loop")


def _cut(found: _RoundsOfPlan, programs: Programs) -> bool:
    """Every device's program falls into what is before a round, the round, and what is after it."""
    for device, entries in checked(enumerate(programs.entries), 1):
        cuts = [_ends_among(programs, device, each) for each in found.loop.rounds]
        for number, (begin, end) in enumerate(cuts):
            _read_round(found, number, device, entries[begin:end])
        last: dict[int, int] = {}
        for item, number in entries:
            if item not in found.own:
                found.add("loop", f"has no {found.label(item, number)}, nor others like it, in any round")
                return False
            if len(found.loop.rounds) > 1 and number < last.get(item, 0):
                text = f"has {found.label(item, number)} after later ones; with several rounds they run in turn"
                found.add(f"programs[{device}]", text)
            last[item] = number
        for number, (begin, end) in enumerate(cuts):
            here = any(item < len(found.facts.ids) for item, _ in entries[begin:end])
            if programs.compute[device] and not here:
                found.add(f"loop.rounds[{number}]", f"has no action of device {device}, which runs some")
            for index, entry in enumerate(entries):
                part, stands = (
                    found.part(entry, number),
                    "before" if index < begin else "in" if index < end else "after",
                )
                if part != stands:
                    item, first = entry[0], found.begins[entry[0]]
                    text = (
                        f"stands {stands} the round, entries {begin} to {end - 1}, but belongs {part} it: "
                        f"{'the round' if found.own[item] == number else f'rounds[{found.own[item]}]'} has "
                        f"{found.counts[item]} of these, from {found.label(item, first)} on"
                    )
                    found.add(f"programs[{device}][{index}] ({found.label(*entry)})", text)
                    break
    for item, number in found.begins.items():
        if number < 2 * found.slots(item).num_parted:
            found.add("loop", f"has {found.label(item, number)}, which runs a part; a round is of whole micro-batches")
    return not found.findings.has("loop")


def _ends_among(programs: Programs, device: int, each: Round) -> tuple[int, int]:
    """Where a round begins and ends among the actions and messages of a device: exchanges of state are none."""
    states = [place for place, _ in programs.states[device]] if programs.states else []
    begin, end = each.begins[device], each.ends[device]
    return begin - bisect_left(states, begin), end - bisect_left(states, end)


def _read_round(found: _RoundsOfPlan, number: int, device: int, entries: list[Entry]) -> None:
    """What a round has of a device's program: of which operations and hops, from where on."""
    first: dict[int, int] = {}
    for item, its in entries:
        first[item] = min(its, first.get(item, its))
    for item, its in first.items():
        if found.own.setdefault(item, number) != number:
            text = f"has {found.label(item, its)}, which rounds[{found.own[item]}] has, too"
            found.add(f"loop.rounds[{number}]", text)
        elif found.begins.setdefault(item, its) != its:
            text = f"has {found.label(item, its)} first, another device {found.label(item, found.begins[item])}"
            found.add(f"loop.rounds[{number}].begins[{device}]", text)


def _in_order(found: _RoundsOfPlan) -> bool:
    """Nothing in a round or before it waits for what is after it, nor anything before it for what is in it.

    Between rounds there are only waits that the order of devices brings about.
    """
    facts, own = found.facts, len(found.facts.ids)
    pairs = [(wait.source, target) for target, waits in enumerate(facts.waits) for wait in waits if wait.needs is None]
    for number, (_, _, dependency, _) in enumerate(found.messages.hops):
        source, target = facts.position[dependency.source], facts.position[dependency.target]
        pairs += [(source, own + number), (own + number, target)]
    for target, waits in enumerate(facts.waits):
        for wait in waits:
            if found.own[wait.source] != found.own[target] and (
                facts.groups[wait.source] != facts.groups[target] or wait.lag_ns
            ):
                text = (
                    f"has {facts.ids[wait.source]} and {facts.ids[target]}, which waits for it elsewhere, in two rounds"
                )
                found.add("loop", text)
    for source, target in pairs:
        if found.own[source] != found.own[target]:
            continue
        last = found.begins[target] + found.counts[target] - 1
        sources = found.slots(source).sharing(found.slots(target).samples(last))
        if sources and sources[-1] >= found.begins[source] + found.counts[source]:
            text = (
                f"has {found.label(target, last)}, which waits for {found.label(source, sources[-1])}: a copy of the "
                "round would wait for a later one"
            )
            found.add("loop", text)
    return not found.findings.has("loop")


def _check_exchanges(found: _RoundsOfPlan, programs: Programs) -> None:
    """Exchanges come out with the round, and at its end all that decides when later ones run is as at its beginning.

    On every device the same, but for what is exchanged once an iteration, of which a round has nothing.
    """
    plan, (each,) = found.facts.plan, found.loop.rounds
    for number, stage in enumerate(plan.stages):
        for name, roles in (("unshard_every", PARAMETER_ROLES), ("reduce_every", GRADIENT_ROLES)):
            own = [n for n, it in enumerate(plan.operations) if it.stage == number and it.role in roles]
            count, every = sum(found.counts[n] for n in own), getattr(stage, name)
            if stage.block_groups and every not in (None, ONCE) and count % every:
                text = f"is {every}, and a round has {count} such actions of the stage, which is no multiple"
                found.add(f"stages[{number}].{name}", text)
    for device in range(len(plan.devices)):
        if programs.states[device]:
            before, after = (
                state_before(found.facts, programs, device, places[device]) for places in (each.begins, each.ends)
            )
            if after.earlier(each.round_ns) != before:
                text = f"exchanges of state stand otherwise at the end of the round than {each.round_ns} ns before"
                found.add(f"loop.rounds[0].ends[{device}]", text)


def _check_state(found: _RoundsOfPlan, number: int, programs: Programs, links: Links) -> None:
    """At a round's end everything that counts is its time later than at its beginning."""
    compare = _Compared(found, number, found.loop.rounds[number].round_ns)
    facts, own = found.facts, len(found.facts.ids)
    for device, entries in checked(enumerate(programs.compute), 1):
        what = f"device {device}"
        compare.free(what, [(entry, facts.starts[entry[0]][entry[1]], facts.end(*entry)) for entry in entries])
    for (source, target), sent in links.orders.items():
        what = f"the link from device {source} to {target}"
        times = ((hop, message, int(links.begins[hop][message])) for hop, message in sent)
        compare.free(what, [((own + n, m), begin, begin + links.hop(n, m).occupancy_ns) for n, m, begin in times])
    for target, waits in checked(enumerate(facts.waits), 4):
        for wait in waits if found.own[target] == number else ():
            for its in _waited_for(found, wait.source, target, wait.later):
                later = its + found.counts[wait.source]
                what = f"{facts.label(wait.source, its)}, which {facts.ids[target]} waits for, ends"
                compare.times(what, facts.end(wait.source, its), facts.end(wait.source, later))
    for hop, (_, target) in links.ends.items():
        for message in _waited_for(found, own + hop, target) if found.own[target] == number else ():
            later = message + found.counts[own + hop]
            what = f"{found.label(own + hop, message)} arrives"
            compare.times(what, links.arrival(hop, message), links.arrival(hop, later))


@dataclass(frozen=True, slots=True)
class _Compared:
    """A round of a loop, at whose end everything is ``round_ns`` later."""

    found: _RoundsOfPlan
    number: int
    round_ns: int

    def free(self, what: str, entries: list[tuple[Entry, int, int]]) -> None:
        """When a device or link is free; ``entries`` are all that it runs, in order, with starts and ends in ns.

        What it runs first in the round may start later than it is free, for another reason. Then that reason, which is
        looked at, too, also lets the next copy's start, if the device is free by then.
        """
        before, after, first, left = 0, 0, -1, False
        for entry, start, end in entries:
            part = self.found.part(entry, self.number)
            if part == "before":
                before = end
            elif part == "in":
                first, after = start if first < 0 else first, end
            left |= part == "after"
        if first < 0 and before and left:
            text = f"has nothing of {what}, which is used before and after it"
            self.found.add(f"loop.rounds[{self.number}]", text)
        if first > before and after - first <= self.round_ns:
            return
        if first >= 0:
            self.times(f"{what} is free", before, after)

    def times(self, what: str, before: int, after: int) -> None:
        """Note a problem if something is not as much later."""
        if after - before != self.round_ns:
            text = (
                f"{what} at {before} ns before the round and at {after} ns at its end: {after - before} ns later, not "
                f"round_ns, {self.round_ns}"
            )
            self.found.add("loop", text)


def _waited_for(found: _RoundsOfPlan, source: int, target: int, later: int = 0) -> Iterator[int]:
    """What is before the round of a source, and waited for in the round, or after it, by a target of that round.

    What keeps a pace waits for its own action before, which is one ``later``.
    """
    if found.own[source] != found.own[target]:
        return
    if later:
        if found.begins[source] < later:
            text = f"begins with {found.label(target, 0)}, which no action before it keeps to a pace as those after it"
            found.add("loop", text)
        yield from range(max(0, found.begins[source] - later), found.begins[source])
        return
    needed = found.slots(source).sharing(found.slots(target).samples(found.begins[target]))
    parts = 2 * found.slots(source).num_parted
    if needed.start < min(found.begins[source], parts):
        text = f"waits for {found.label(source, needed.start)}, which runs a part; only whole micro-batches repeat"
        found.add(f"loop ({found.label(target, found.begins[target])})", text)
        return
    yield from range(needed.start, found.begins[source])
