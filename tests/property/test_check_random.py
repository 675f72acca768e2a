"""Check against other ways to the same answer, on random plans: replays, long repetitions, explicit cycles."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import networkx as nx
from helpers import (
    Orders,
    chain_workload,
    extended,
    gpipe_orders,
    one_f_one_b,
    one_f_one_b_repetend,
    plan_of,
    replay,
    serial_orders,
    shared_workload,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeplan.check import check
from pipeplan.model import Action, Plan, Repetend
from pipeplan.model.workload import Workload

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def chains(draw: st.DrawFn) -> Workload:
    """Chains with unequal stages on few devices, some split, with lags and memory effects."""
    num_devices = draw(st.integers(2, 4))
    times = st.integers(1, 12)
    workload = chain_workload(
        num_devices,
        draw(st.integers(num_devices, 7)),
        split=draw(st.none() | st.tuples(times, times)),
        lag=draw(st.integers(0, 9)),
        weight_grad_bytes=draw(st.sampled_from([0, 400, 1300])),
        workspace_bytes=draw(st.sampled_from([0, 70])),
    )
    operations = tuple(operation.model_copy(update={"duration_ns": draw(times)}) for operation in workload.operations)
    return replace(workload, operations=operations)


def orders_of(workload: Workload, schedule: str) -> Orders:
    return {"1f1b": one_f_one_b, "gpipe": gpipe_orders, "serial": serial_orders}[schedule](workload)


@SETTINGS
@given(workload=chains(), schedule=st.sampled_from(["1f1b", "gpipe", "serial"]), full_names=st.booleans())
def test_what_is_replayed_is_valid(workload: Workload, schedule: str, full_names: bool) -> None:
    assert check(plan_of(workload, orders_of(workload, schedule), full_names=full_names)).problems == ()


@SETTINGS
@given(
    workload=chains() | st.builds(shared_workload, st.integers(2, 3), st.integers(3, 4), lag=st.integers(0, 5)),
    ns=st.integers(-40, 40).filter(bool),
    data=st.data(),
)
def test_no_other_start_is_accepted(workload: Workload, ns: int, data: st.DataObject) -> None:
    """Start times are the only ones for the programs: any change of any of them is a problem."""
    plan = plan_of(workload, serial_orders(workload))
    id_ = data.draw(st.sampled_from([operation.id for operation in workload.operations]))
    m = data.draw(st.integers(0, workload.num_microbatches - 1))
    starts = list(plan.starts_ns[id_])
    assume(starts[m] + ns >= 0)
    starts[m] += ns
    assert not check(plan.model_copy(update={"starts_ns": {**plan.starts_ns, id_: tuple(starts)}})).valid


@SETTINGS
@given(workload=chains(), unroll=st.integers(1, 2))
def test_time_of_a_repetition_is_that_of_many(workload: Workload, unroll: int) -> None:
    """The exact rate lies within what a hundred copies more show, and no other rate is accepted."""
    first = one_f_one_b_repetend(workload)
    assume(workload.num_microbatches >= max(first.values()) + unroll)
    orders = one_f_one_b(workload)
    ends = []
    for copies in (60, 160):
        larger = workload.with_microbatches(workload.num_microbatches + copies * unroll)
        ends.append(max(end for _, end in replay(larger, extended(workload, orders, first, unroll, copies)).values()))
    shown = Fraction(ends[1] - ends[0], 100)
    plan = plan_of(workload, orders)
    found = []
    for repetend_ns in range(int(shown), int(shown) + 2):
        repetend = Repetend(unroll=unroll, repetend_ns=repetend_ns, first=first)
        report = check(plan.model_copy(update={"repetend": repetend}))
        assert report.figures.period_ns is not None
        assert abs(report.figures.period_ns * unroll - shown) <= Fraction(max(workload_times(workload)), 20)
        if not any(problem.rule == "repetend" for problem in report.problems):
            found.append(repetend_ns)
    exact = report.figures.period_ns * unroll
    assert found == ([round(exact)] if abs(exact - round(exact)) < 1e-9 else [])


def workload_times(workload: Workload) -> list[int]:
    return [operation.duration_ns for operation in workload.operations]


def test_deadlock_is_a_cycle_in_the_joint_orders() -> None:
    """Programs shuffled a little: check says deadlock exactly if an explicit graph has a cycle."""
    rng = random.Random(7)
    answers = set()
    for _ in range(150):
        plan = _shuffled(plan_of(*rng.choice(PREPARED), full_names=True), rng)
        graph = nx.DiGraph()
        for device, program in enumerate(plan.programs):
            graph.add_edges_from(pairwise(_joint(Action.parse(text), device) for text in program))
        expected = not nx.is_directed_acyclic_graph(graph)
        assert any(problem.rule == "deadlock" for problem in check(plan).problems) == expected
        answers.add(expected)
    assert answers == {True, False}


def _prepared() -> list[tuple[Workload, Orders]]:
    chain = chain_workload(4, 6, lag=3)
    shared = shared_workload(3, 4)
    return [(chain, one_f_one_b(chain)), (chain, gpipe_orders(chain)), (shared, serial_orders(shared))]


PREPARED = _prepared()


def _shuffled(plan: Plan, rng: random.Random) -> Plan:
    programs = [list(program) for program in plan.programs]
    for _ in range(rng.randint(1, 3)):
        program = rng.choice(programs)
        one = rng.randrange(len(program) - 2)
        other = one + rng.randint(1, 2)
        program[one], program[other] = program[other], program[one]
    return plan.model_copy(update={"programs": tuple(tuple(program) for program in programs)})


def _joint(action: Action, device: int) -> tuple[object, ...]:
    """What takes part together: a SEND and its RECV, an action on all its devices."""
    if action.is_compute:
        return (action.stage, action.kind, action.microbatch)
    here, there = (action.stage, device), (action.peer_stage, action.peer_device)
    ends = (here, there) if action.kind.startswith("SEND") else (there, here)
    return (*ends, action.payload, action.microbatch)
