"""Rules about start times: inputs are there, devices do one thing at a time, and nothing waits longer than it must."""

from __future__ import annotations

from pipeplan.check.facts import Facts
from pipeplan.check.links import Links
from pipeplan.check.programs import Entry, Programs
from pipeplan.check.report import Findings

__all__ = ["check_inputs", "check_timeline"]


def check_inputs(facts: Facts, findings: Findings) -> None:
    """Every action starts when all actions that hold its samples have ended and their slowest hop has arrived.

    ``start(target) >= end(source) + lag`` for each dependency, and each action of the source that shares samples.
    """
    for target, starts in enumerate(facts.starts):
        for number, start in enumerate(starts):
            for wait, n, lag in facts.inputs(target, number):
                if start < facts.end(wait.source, n) + lag:
                    _add_too_early(facts, findings, (target, number), (wait.source, n), lag, wait.dependency)


def _add_too_early(facts: Facts, findings: Findings, target: Entry, source: Entry, lag: int, dependency: int) -> None:
    end = facts.end(*source)
    travels = f" and takes {lag} ns to arrive" if lag else ""
    text = (
        f"starts at {facts.starts[target[0]][target[1]]} ns, but {facts.label(*source)} ends at {end} ns{travels}: "
        f"not before {end + lag} ns (dependencies[{dependency}])"
    )
    findings.add("inputs", _place(facts, *target), text)


def check_timeline(facts: Facts, programs: Programs, links: Links | None, findings: Findings) -> None:
    """Devices run one action at a time, in program order, and each action starts as soon as it can.

    The last holds if every start equals the latest of its device's previous ends and its inputs' arrivals: such
    times are unique, so replaying the programs gives just these. Call it with complete programs only; without
    ``links`` the last is passed over where messages occupy links.
    """
    free: dict[Entry, int] = {}  # when the devices of an action have ended what they run before
    for device, entries in enumerate(programs.compute):
        _check_device(facts, device, entries, findings)
        before: Entry | None = None
        for entry in entries:
            ready = 0 if before is None else facts.end(*before)
            free[entry] = max(free.get(entry, 0), ready)
            before = entry
    occupied = any(hop.occupancy_ns for dependency in facts.plan.dependencies for hop in dependency.hops)
    if not findings.has("inputs", "links", "exclusive", "order") and (links is not None or not occupied):
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
        for number, start in enumerate(starts):
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
