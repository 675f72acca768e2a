"""What devices hold, by MemoryState, beside the checker's own account and sums over all moments."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from random import Random

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from builders.chains import chain_workload
from builders.drawn import placed, placed_chains, workloads
from builders.orders import random_orders
from pipeplan.checker.facts import Facts, Findings
from pipeplan.checker.programs import Programs
from pipeplan.checker.timeline import check_memory
from pipeplan.errors import InvalidPlanError
from pipeplan.planning.build_plan import assemble
from pipeplan.time_limit import Limit
from pipeplan.workload import held
from pipeplan.workload.held import peaks_in_time
from pipeplan.workload.kinds import ACTIVATIONS, WORKSPACE, MemoryBytes, MemoryKind
from pipeplan.workload.memory import memory_levels, peak_memory
from pipeplan.workload.task_graph import Orders, TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Hold, Workload
from references.memory import followed
from support.marks import some_of

SEEDS = st.integers(0, 2**32)
ORDERS = 50
"""Of each workload; of 200 workloads they are 10,000."""


def checked(facts: Facts, orders: Orders) -> tuple[int, ...]:
    """[device] peak by the checker, in bytes."""
    ids = [np.array(order, np.int64) for order in orders]
    return check_memory(facts, Programs(facts.columns.firsts, len(facts.ids), ids, ids), Findings())


def test_what_gives_back_more_than_is_held_is_said() -> None:
    workload = chain_workload(2, 3)
    operations = tuple(
        replace(each, release_bytes=each.release_bytes + 7) if each.id == "1B" else each for each in workload.operations
    )
    with pytest.raises(InvalidPlanError, match=r"^1B gives back 7 bytes more than stage 1 has taken.*release_bytes"):
        peak_memory(task_graph(replace(workload, operations=operations)), [[], []])


def test_what_is_never_given_back_stays_held() -> None:
    workload = chain_workload(2, 3)
    kept = tuple(replace(each, acquire_bytes=5, release_bytes=0) for each in workload.operations)
    graph = task_graph(replace(workload, operations=kept))
    orders = [[task for task in range(graph.num_tasks) if device in graph.devices_of(task)] for device in range(2)]
    assert [memory.activation_bytes for memory in peak_memory(graph, orders)] == [5 * 2 * 3] * 2


@settings(max_examples=some_of(80))
@given(workloads() | (placed() | placed_chains()).map(lambda drawn: drawn.workload), SEEDS)
def test_peaks_are_the_checkers(workload: Workload, seed: int) -> None:
    assume(not workload.is_inference)  # whose memory goes by time: test_forwards_alone.py
    graph, random = task_graph(workload), Random(seed)
    facts = Facts.of(assemble(graph, random_orders(graph, random), 1, Fraction(1), "random"))
    for _ in range(ORDERS):
        orders = random_orders(graph, random)
        state = followed(graph, earliest_starts(graph, orders))
        expected = checked(facts, graph.on_devices(orders))
        for device, (peak, memory) in enumerate(zip(expected, peak_memory(graph, orders), strict=True)):
            assert state.held[device] == 0
            assert workload.static_bytes(device) + state.peak[device] == memory.peak_bytes == peak
            assert workload.states[device] + state.at_peak[device] == memory.parts
            assert state.peak[device] == max(memory_levels(graph, orders[device]), default=0)
    assert peaks_in_time(graph, earliest_starts(graph, orders)) == [*zip(state.at_peak, state.peak_task, strict=True)]


# Holds that overlap in time -----------------------------------------------------------------------------------


def with_holds(workload: Workload, random: Random) -> Workload:
    """Drawn anew: of several targets, on other stages, too, which all come after the source."""
    follows: nx.DiGraph[int] = nx.DiGraph((source, target) for source, target, _ in workload.lags)
    holds = []
    for source in follows:
        later = sorted(nx.descendants(follows, source)) or [source]
        for _ in range(random.randint(0, 2)):
            targets = tuple(random.sample(later, random.randint(1, min(3, len(later)))))
            holds.append(Hold(random.choice([ACTIVATIONS, WORKSPACE]), random.randint(1, 9), source, targets))
    changed = workload.with_microbatches(workload.num_microbatches)
    vars(changed)["holds"] = tuple(holds)
    return changed


def loose_starts(graph: TaskGraph, random: Random) -> list[int]:
    """Each action some time after what it depends on, whatever else its devices do then."""
    starts = [random.randint(0, 9) for _ in range(graph.num_tasks)]
    for task in nx.topological_sort(nx.DiGraph(_edges(graph))):
        end = starts[task] + graph.durations[task]
        for other, _ in graph.successors[task]:
            starts[other] = max(starts[other], end + random.randint(0, 9))
    return starts


def _edges(graph: TaskGraph) -> list[tuple[int, int]]:
    return [(task, other) for task, successors in enumerate(graph.successors) for other, _ in successors]


def held_at(graph: TaskGraph, starts: list[int], moment: int) -> list[Counter[MemoryKind]]:
    """[device] {kind: bytes} at a moment: what is held for each micro-batch, and the workspace of what runs."""
    workload = graph.workload
    held: list[Counter[MemoryKind]] = [Counter() for _ in workload.devices]
    ends = [start + duration for start, duration in zip(starts, graph.durations, strict=True)]

    def add(x: int, kind: MemoryKind, size: int, begin: int, end: int) -> None:
        for device in workload.resources[x] if begin <= moment < end else ():
            held[device][kind] += size

    for m in range(workload.num_microbatches):
        for hold in workload.holds:
            until = max(ends[graph.offsets[x] + m] for x in hold.targets)
            add(hold.source, hold.kind, hold.size, starts[graph.offsets[hold.source] + m], until)
        for x, operation in enumerate(workload.operations):
            task = graph.offsets[x] + m
            add(x, WORKSPACE, operation.workspace_bytes, starts[task], ends[task])
    return held


@settings(max_examples=some_of(100))
@given(workloads(unequal=False), SEEDS)
def test_holds_that_overlap_in_time_add_up(workload: Workload, seed: int) -> None:
    """Several actions of a device at once, as on its compute and its network; holds of several kinds and targets."""
    random = Random(seed)
    graph = task_graph(with_holds(workload.with_microbatches(3), random))
    starts = loose_starts(graph, random)
    state = followed(graph, starts)
    moments = [held_at(graph, starts, moment) for moment in sorted(set(starts))]
    for device in range(len(workload.devices)):
        sums = [sum(held[device].values()) for held in moments]
        assert state.held[device] == 0
        assert state.peak[device] == max(sums)
        assert state.at_peak[device] == MemoryBytes(moments[sums.index(max(sums))][device])
    assert peaks_in_time(graph, starts) == [*zip(state.at_peak, state.peak_task, strict=True)]


def test_peaks_in_time_ask_for_the_time_whatever_number_of_devices_they_are_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only once for all of them: of 1,024 devices they were millions of changes."""
    monkeypatch.setattr(held, "_AT_ONCE", 100)

    def questions(num_devices: int) -> int:
        graph, asked = task_graph(chain_workload(num_devices, 60)), [0]

        def clock() -> float:
            asked[0] += 1
            return 0.0

        with Limit(1.0, clock=clock).enforced():
            peaks_in_time(graph, [0] * graph.num_tasks)
        return asked[0]

    assert questions(32) >= 3 * questions(8) > 12
