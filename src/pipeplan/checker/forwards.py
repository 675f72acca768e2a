"""What devices hold in a plan of forwards alone: what a forward gives, until the last that takes it has ended."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeplan.checker.exchanges import Spans
from pipeplan.checker.facts import Facts, Findings
from pipeplan.checker.segments import runs_of
from pipeplan.files import CostRow, Plan, Profile
from pipeplan.workload.columns import column, sharing, spread
from pipeplan.workload.elements import Operation, Stage
from pipeplan.workload.kinds import ACTIVATIONS


def given_spans(facts: Facts) -> list[list[Spans]]:
    """[device] from the start of every forward to the end of the last action that waits for it, or to its own end."""
    spans: list[list[Spans]] = [[] for _ in facts.plan.devices]
    takers: dict[str, list[int]] = {}
    its = facts.columns
    for dependency in facts.plan.dependencies:
        if dependency.later:  # a token, of which nobody counts the bytes
            continue
        takers.setdefault(dependency.source, []).append(facts.ids.index(dependency.target))
    for operation, own in enumerate(facts.plan.operations):
        if not own.acquire_bytes:
            continue
        begins, ends = (each[its.firsts[operation] : its.firsts[operation + 1]] for each in (its.starts, its.ends))
        until = ends.copy()
        for taker in takers.get(own.id, ()):
            at, others = spread(*sharing(facts.slots[operation], facts.slots[taker]))
            np.maximum.at(until, at, its.ends[others + its.firsts[taker]])
        sizes = np.broadcast_to(column([own.acquire_bytes], 2 + len(its.starts)), begins.shape)
        for device in facts.devices[operation]:
            spans[device].append(Spans(ACTIVATIONS, begins, until, sizes))
    return spans


def check_gives_back(plan: Plan, findings: Findings) -> None:
    """Forwards alone say what they take; when they give it back is when it has been taken."""
    for operation in plan.operations:
        if operation.release_bytes:
            text = f"is {operation.release_bytes}; what a plan of inference holds is free once the last has taken it"
            findings.add("balance", f"operations[{operation.id}].release_bytes", text)


def held_bytes(profile: Profile, stage: Stage, rows: Sequence[CostRow]) -> tuple[int, int]:
    """What a stage's forward gives to others, and the most that it has beside while it runs, block after block.

    Or segment after segment: ``rows`` are those of what runs at once.
    """
    unit_of = {block: number for number, unit in enumerate(runs_of(stage)) for block in unit}
    given = most = now = 0
    left: dict[int, int] = {}  # those that are to take it, of each block whose output is there
    size = [row.activation_bytes for row in rows]
    for own, (unit, row) in enumerate(zip(runs_of(stage), rows, strict=True)):
        leaving = {edge.target for block in unit for edge in profile.edges_from.get(block, ())}.difference(unit)
        takers = {unit_of.get(target) for target in leaving}
        if takers and None not in takers:
            left[own], now = len(takers), now + size[own]
        else:
            given += size[own]
        most = max(most, row.workspace_bytes + now)
        entering = {edge.source for block in unit for edge in profile.edges_into.get(block, ())}.difference(unit)
        for source in {unit_of[each] for each in entering if each in unit_of} & left.keys():
            left[source] -= 1
            if not left[source]:
                now -= size[source]
    return given, most


def check_forward(
    profile: Profile,
    stage: Stage,
    operation: Operation,
    rows: Sequence[CostRow],
    gather: int | None,
    findings: Findings,
) -> None:
    """Its time adds up over the blocks, with what it takes to gather what leaves the stage, and so do its bytes.

    Times are not compared where ``gather`` is not known.
    """
    given, most = held_bytes(profile, stage, rows)
    expected = {"acquire_bytes": given, "release_bytes": 0, "workspace_bytes": most}
    if gather is not None:
        expected["duration_ns"] = max(1, sum(row.forward_ns for row in rows) + gather)
    for key, value in expected.items():
        if (said := getattr(operation, key)) != value:
            text = f"is {said}, the profile gives {value}"
            findings.add("profile", f"operations[{operation.id}].{key}", text)
