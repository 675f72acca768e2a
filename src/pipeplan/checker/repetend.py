"""Rules about the repetend (Tessel III-C): the programs contain it, and repeating it takes the time it states.

Copies repeated without end form a graph of tasks (one copy) whose edges say "starts this long after the start of
that, some copies back": device order, the device's last action before the first of the next copy, the same for the
messages of a link, and dependencies. When everything starts as soon as it can, a copy follows the other, on average,
after the largest ratio of a cycle's time to the copies it goes back. That ratio is found exactly: from the ratio of
some cycle on, a longest-path search either converges, and the ratio is the largest, or finds a cycle with a larger
one.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from pipeplan.checker.facts import Facts, Findings, overlap
from pipeplan.checker.programs import Programs
from pipeplan.checker.timeline import Links, Sent
from pipeplan.time_limit import checked
from pipeplan.workload.columns import IntArray, counted
from pipeplan.workload.elements import Repetend

MAX_STEPS = 30_000_000
"""Edges looked at before giving up; real plans need a few for each edge."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """One copy: task ``operation * unroll + u`` is that operation's (first + u)-th action; messages come after.

    ``edges`` are (source, target, time in ns from start to start, copies back), ``starts`` [task] in ns as the
    plan has them, ``rate`` the largest busy time of a device, a first guess for the time between copies.
    """

    edges: list[tuple[int, int, int, int]]
    starts: list[int]
    rate: int


def check_repetend(facts: Facts, programs: Programs, links: Links | None, findings: Findings) -> Fraction | None:
    """Check the plan's repetend; returns ns from one copy to the next, None if it cannot be determined.

    Call it with complete programs and right start times only; without ``links`` as if all were free.
    """
    repetend = facts.plan.repetend
    assert repetend is not None
    if _cannot_repeat(facts, repetend, findings):
        return None
    begins = (
        np.array([repetend.first[id_] for id_ in facts.ids]),
        np.array([slots.num_parted for slots in facts.slots]),
    )
    orders = [
        _copy_order(facts, programs, repetend, begins, device, findings)
        for device in checked(range(len(programs.ids)), 1)
    ]
    runs = {} if links is None else _link_runs(facts, links, repetend, findings)
    if findings.has("repetend"):
        return None
    copy = _copy(facts, repetend, [order for order in orders if order])
    for run in runs.values():
        assert links is not None
        _add_link(facts, repetend, links, run, copy)
    copy.edges.sort(key=lambda edge: (copy.starts[edge[1]], edge[3]))  # within a copy, final on the first pass
    rate = _rate(copy)
    if rate is None:
        findings.add("repetend", "repetend", "is too tangled to verify how long a repetition takes")
    elif rate != repetend.repetend_ns:
        shown = str(rate) if rate.denominator == 1 else f"{float(rate):.9g}"
        text = f"is {repetend.repetend_ns}, but repeating the copies takes {shown} ns each"
        findings.add("repetend", "repetend.repetend_ns", text)
    return rate


def _cannot_repeat(facts: Facts, repetend: Repetend, findings: Findings) -> bool:
    """Micro-batches of one size on one route, enough of them, none in parts, and no copy that waits for a later one."""
    if facts.plan.num_routes > 1:
        text = f"are {facts.plan.num_routes}; only plans with one route have a repetend"
        findings.add("repetend", "num_routes", text)
    for number, stage in enumerate(facts.plan.stages):
        if stage.microbatch_size != facts.plan.microbatch_size:
            text = (
                f"is {stage.microbatch_size} and the plan's {facts.plan.microbatch_size}; only stages with equal "
                "micro-batches have a repetend"
            )
            findings.add("repetend", f"stages[{number}].microbatch_size", text)
    for id_, begin in repetend.first.items():
        if begin + repetend.unroll > facts.plan.num_microbatches:
            text = f"micro-batches {begin} to {begin + repetend.unroll - 1} are more than there are"
            findings.add("repetend", f"repetend.first[{id_}]", text)
        parted = facts.slots[facts.position[id_]].num_parted
        if begin < parted:
            text = f"is {begin}, but micro-batches up to {parted - 1} run in parts; a repetend is of whole ones"
            findings.add("repetend", f"repetend.first[{id_}]", text)
    for number, dependency in enumerate(facts.plan.dependencies):
        if dependency.needs is not None:
            text = "counts actions; a repetend is of actions that depend on each other by the samples they hold"
            findings.add("repetend", f"dependencies[{number}].needs", text)
        source, target = repetend.first[dependency.source], repetend.first[dependency.target]
        if source + dependency.later < target:
            text = (
                f"is {source}, less than {target - dependency.later} of {dependency.target}, which waits for it "
                f"(dependencies[{number}]): a copy would wait for a later one"
            )
            findings.add("repetend", f"repetend.first[{dependency.source}]", text)
    return findings.has("repetend")


def _copy_order(
    facts: Facts,
    programs: Programs,
    repetend: Repetend,
    begins: tuple[IntArray, IntArray],
    device: int,
    findings: Findings,
) -> list[tuple[int, int]]:
    """The device's copy as (operation, u) in order; each operation ``unroll`` times, in one contiguous run.

    ``begins`` are [operation] the copy's first micro-batch, and how many run in parts.
    """
    actions, (first, parted) = programs.actions[device], begins
    operations = programs.items[actions]
    numbers = actions - programs.firsts[operations]
    microbatches = np.where(numbers < 2 * parted[operations], numbers // 2, numbers - parted[operations])
    own, _ = counted(operations)
    begin = int((first + parted)[own].sum())
    end = begin + repetend.unroll * len(own)
    later, places = microbatches - first[operations], np.arange(len(actions))
    part = (later >= 0).astype(int) + (later >= repetend.unroll)
    stands = (places >= begin).astype(int) + (places >= end)
    wrong = np.flatnonzero(part != stands)
    if len(wrong):
        names, index = ("before", "in", "after"), int(wrong[0])
        operation, number = int(operations[index]), int(numbers[index])
        at = programs.where[device][operation, number]
        text = (
            f"stands {names[stands[index]]} the device's repetend, compute actions {begin} to {end - 1}, but belongs "
            f"{names[part[index]]} it: {facts.ids[operation]} has its micro-batches from {first[operation]} on"
        )
        findings.add("repetend", f"programs[{device}][{at}] ({facts.label(operation, number)})", text)
        return []
    return list(zip(operations[begin:end].tolist(), later[begin:end].tolist(), strict=True))


def _copy(facts: Facts, repetend: Repetend, orders: list[list[tuple[int, int]]]) -> _Copy:
    unroll = repetend.unroll
    first = [repetend.first[id_] for id_ in facts.ids]
    edges: list[tuple[int, int, int, int]] = []
    for order in orders:
        tasks = [operation * unroll + u for operation, u in order]
        for before, after in zip(tasks, [*tasks[1:], tasks[0]], strict=True):
            edges.append((before, after, facts.durations[before // unroll], int(after == tasks[0])))
    for target, waits in enumerate(facts.waits):
        for wait in waits:
            source, time = wait.source, facts.durations[wait.source] + wait.lag_ns
            for u in range(unroll):
                # micro-batch first[target] + u is the source's u' in an earlier copy, or in this one
                back, other = divmod(first[target] + u - wait.later - first[source], unroll)
                edges.append((source * unroll + other, target * unroll + u, time, -back))
    begins = [begin + slots.num_parted for begin, slots in zip(first, facts.slots, strict=True)]
    starts = [starts[begin + u] for starts, begin in zip(facts.starts, begins, strict=True) for u in range(unroll)]
    busy = [sum(facts.durations[operation] for operation, _ in order) for order in orders]
    return _Copy(edges, starts, max(busy))


def _link_runs(
    facts: Facts, links: Links, repetend: Repetend, findings: Findings
) -> dict[tuple[int, int], dict[Sent, int]]:
    """For each link the messages of its copy, in order, with their numbers by hop."""
    begins = [repetend.first[id_] for id_ in facts.ids]
    runs = {link: links.copy(link, begins, repetend.unroll) for link in links.orders}
    for (source, target), run in runs.items():
        if run is None:
            text = f"the order in which device {source} sends to device {target} has no part that repeats with it"
            findings.add("repetend", "repetend", text)
    return {link: run for link, run in runs.items() if run is not None}


def _add_link(facts: Facts, repetend: Repetend, links: Links, run: dict[Sent, int], copy: _Copy) -> None:
    """The messages of a link as tasks: after what makes each, after each other, and before what waits for each."""
    unroll = repetend.unroll
    tasks = dict(zip(run, range(len(copy.starts), len(copy.starts) + len(run)), strict=True))
    copy.starts.extend(int(links.begins[number][m + links.messages.slots[number].num_parted]) for number, m in run)
    for number, m in run:
        hop = links.messages.hops[number][3]
        source, target = links.ends[number]
        back, other = divmod(m - repetend.first[facts.ids[source]], unroll)
        left, begun = overlap(facts.plan, links.messages.hops[number][2])
        copy.edges.append((source * unroll + other, tasks[number, m], facts.durations[source] - left, -back))
        ahead, other = divmod(m - repetend.first[facts.ids[target]], unroll)
        copy.edges.append((tasks[number, m], target * unroll + other, hop.duration_ns - begun, ahead))
    sent = list(run)
    for before, after in zip(sent, [*sent[1:], sent[0]], strict=True):
        occupied = links.messages.hops[before[0]][3].occupancy_ns
        copy.edges.append((tasks[before], tasks[after], occupied, int(after == sent[0])))


def _rate(copy: _Copy) -> Fraction | None:
    """The largest ratio of time to copies over all cycles; None after too many steps."""
    rate = Fraction(copy.rate)  # of the cycle through one device's copies
    steps = MAX_STEPS
    while True:
        cycle, steps = _longer_cycle(copy, rate, steps)
        if steps <= 0:
            return None
        if cycle is None:
            return rate
        copies = sum(edge[3] for edge in cycle)
        assert copies > 0, "start times are right, so no copy waits for itself"
        rate = Fraction(sum(edge[2] for edge in cycle), copies)


def _longer_cycle(copy: _Copy, rate: Fraction, steps: int) -> tuple[list[tuple[int, int, int, int]] | None, int]:
    """A cycle whose ratio exceeds ``rate``, None if there is none; and the steps left (Bellman and Ford)."""
    scale, per_copy = rate.denominator, rate.numerator
    weighted = [
        (number, source, target, time * scale - back * per_copy)
        for number, (source, target, time, back) in enumerate(copy.edges)
    ]
    latest = [start * scale for start in copy.starts]
    cause = [-1] * len(latest)
    while steps > 0:
        changed = False
        for number, source, target, weight in checked(weighted, 16_384):
            if latest[source] + weight > latest[target]:
                latest[target] = latest[source] + weight
                cause[target] = number
                changed = True
        steps -= len(weighted)
        if not changed:
            return None, steps
        cycle = _cycle_of(copy, cause)
        if cycle:
            return cycle, steps
    return None, 0


def _cycle_of(copy: _Copy, cause: list[int]) -> list[tuple[int, int, int, int]]:
    """A cycle among the edges that last moved their targets; empty if there is none."""
    visited = [-1] * len(cause)
    for start in range(len(cause)):
        task = start
        while visited[task] < 0 and cause[task] >= 0:
            visited[task] = start
            task = copy.edges[cause[task]][0]
        if visited[task] == start and cause[task] >= 0:
            cycle = [copy.edges[cause[task]]]
            while cycle[-1][0] != task:
                cycle.append(copy.edges[cause[cycle[-1][0]]])
            return cycle
    return []
