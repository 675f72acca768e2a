"""Rules about the loop: the round is where the plan says, and running it again only changes numbers.

All other rules are about what is written, in which the round runs once. Cut at both of its ends, programs fall into
what is before it, the round, and what is after it. Three things carry over to any number of copies:

* *Order.* Nothing waits for a later part, in the programs or by what it needs. So no part makes another one deadlock,
  and in itself each is what was checked.
* *Time.* What is after a cut depends on what is before it by the state there: when devices and links are free, and when
  what later actions need has ended, or arrived. At the round's end this is what it was at its beginning, ``round_ns``
  later. Starts are the earliest, a recurrence in (max, +), so equal states with equal work give equal times.
* *Memory.* A round gives back what it takes, since it has every operation for equally many samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeplan.checker.facts import Facts, Findings
from pipeplan.checker.programs import Entry, Messages, Programs
from pipeplan.checker.timeline import Links
from pipeplan.time_limit import checked
from pipeplan.workload.elements import Loop
from pipeplan.workload.samples import Slots


@dataclass(slots=True)
class _Round:
    """The loop of a plan: ``begins`` {operation or hop: actions or messages before the round}, ``counts`` in it."""

    facts: Facts
    messages: Messages
    loop: Loop
    findings: Findings
    begins: dict[int, int]
    counts: dict[int, int]

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
    found = _Round(facts, messages, loop, findings, {}, {})
    if _counted(found) and _cut(found, programs) and _in_order(found):
        _check_state(found, programs, links)


def _counted(found: _Round) -> bool:
    """How often everything is in the round; nothing that counts actions, or keeps memory from device to device."""
    plan, samples = found.facts.plan, found.loop.microbatches * found.facts.plan.microbatch_size
    for number, dependency in enumerate(plan.dependencies):
        if dependency.needs is not None:
            text = "counts actions; a loop is of actions that depend on each other by the samples they hold"
            found.add(f"dependencies[{number}].needs", text)
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


def _cut(found: _Round, programs: Programs) -> bool:
    """Every device's program falls into what is before the round, the round, and what is after it."""
    loop = found.loop
    for device, entries in checked(enumerate(programs.entries), 1):
        begin, end = loop.begins[device], loop.ends[device]
        first: dict[int, int] = {}
        for item, number in entries[begin:end]:
            first[item] = min(number, first.get(item, number))
        for item, number in first.items():
            if found.begins.setdefault(item, number) != number:
                text = f"has {found.label(item, number)} first, another device {found.label(item, found.begins[item])}"
                found.add(f"loop.begins[{device}]", text)
        for index, (item, number) in enumerate(entries):
            low = first.get(item, 0)
            part = "before" if number < low else "in" if number < low + found.counts[item] else "after"
            stands = "before" if index < begin else "in" if index < end else "after"
            if part != stands:
                text = (
                    f"stands {stands} the round, entries {begin} to {end - 1}, but belongs {part} it: the round has "
                    f"{found.counts[item]} of these, from {found.label(item, low)} on"
                )
                found.add(f"programs[{device}][{index}] ({found.label(item, number)})", text)
                break
    for item, number in found.begins.items():
        if number < 2 * found.slots(item).num_parted:
            found.add("loop", f"has {found.label(item, number)}, which runs a part; a round is of whole micro-batches")
    return not found.findings.has("loop")


def _in_order(found: _Round) -> bool:
    """Nothing in the round or before it waits for what is after it, nor anything before it for what is in it."""
    facts, own = found.facts, len(found.facts.ids)
    pairs = [(wait.source, target) for target, waits in enumerate(facts.waits) for wait in waits if wait.needs is None]
    for number, (_, _, dependency, _) in enumerate(found.messages.hops):
        source, target = facts.position[dependency.source], facts.position[dependency.target]
        pairs += [(source, own + number), (own + number, target)]
    for source, target in pairs:
        last = found.begins[target] + found.counts[target] - 1
        sources = found.slots(source).sharing(found.slots(target).samples(last))
        if sources and sources[-1] >= found.begins[source] + found.counts[source]:
            text = (
                f"has {found.label(target, last)}, which waits for {found.label(source, sources[-1])}: a copy of the "
                "round would wait for a later one"
            )
            found.add("loop", text)
    return not found.findings.has("loop")


def _check_state(found: _Round, programs: Programs, links: Links) -> None:
    """At the round's end everything that counts is ``round_ns`` later than at its beginning."""
    facts, own = found.facts, len(found.facts.ids)
    for device, entries in checked(enumerate(programs.compute), 1):
        what = f"device {device}"
        _compare_free(found, what, [(entry, facts.starts[entry[0]][entry[1]], facts.end(*entry)) for entry in entries])
    for (source, target), sent in links.orders.items():
        what = f"the link from device {source} to {target}"
        times = ((number, message, links.begins[number, message]) for number, message in sent)
        _compare_free(
            found, what, [((own + n, m), begin, begin + links.hop(n, m).occupancy_ns) for n, m, begin in times]
        )
    for target, waits in checked(enumerate(facts.waits), 4):
        for wait in waits:
            for number in _waited_for(found, wait.source, target):
                later = number + found.counts[wait.source]
                what = f"{facts.label(wait.source, number)}, which {facts.ids[target]} waits for, ends"
                _compare(found, what, facts.end(wait.source, number), facts.end(wait.source, later))
    for number, (_, target) in links.ends.items():
        for message in _waited_for(found, own + number, target):
            later = message + found.counts[own + number]
            what = f"{found.label(own + number, message)} arrives"
            _compare(found, what, links.arrival(number, message), links.arrival(number, later))


def _compare_free(found: _Round, what: str, entries: list[tuple[Entry, int, int]]) -> None:
    """When a device or link is free; ``entries`` are all that it runs, in order, with starts and ends in ns.

    What it runs first in the round may start later than it is free, for another reason. Then that reason, which is
    looked at, too, also lets the next copy's start, if the device is free by then.
    """
    before, after, first = 0, 0, -1
    for (item, number), start, end in entries:
        if number < found.begins[item]:
            before = end
        elif number < found.begins[item] + found.counts[item]:
            first, after = start if first < 0 else first, end
    if first > before and after - first <= found.loop.round_ns:
        return
    if first >= 0:
        _compare(found, f"{what} is free", before, after)


def _compare(found: _Round, what: str, before: int, after: int) -> None:
    if after - before != found.loop.round_ns:
        text = (
            f"{what} at {before} ns before the round and at {after} ns at its end: {after - before} ns later, not "
            f"round_ns, {found.loop.round_ns}"
        )
        found.add("loop", text)


def _waited_for(found: _Round, source: int, target: int) -> Iterator[int]:
    """What is before the round of a source, and waited for in the round, or after it, by a target."""
    needed = found.slots(source).sharing(found.slots(target).samples(found.begins[target]))
    parts = 2 * found.slots(source).num_parted
    if needed.start < min(found.begins[source], parts):
        text = f"waits for {found.label(source, needed.start)}, which runs a part; only whole micro-batches repeat"
        found.add(f"loop ({found.label(target, found.begins[target])})", text)
        return
    yield from range(needed.start, found.begins[source])
