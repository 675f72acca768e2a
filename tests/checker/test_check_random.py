"""Check against other ways to the same answer, on random plans: replays, long repetitions, explicit cycles."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import networkx as nx
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from builders.chains import chain_workload, shared_workload
from builders.drawn import Placed, placed, placed_chains
from builders.orders import (
    Orders,
    actions_of,
    gpipe_orders,
    one_f_one_b,
    one_f_one_b_repetend,
    random_orders,
    serial_orders,
)
from builders.plans import plan_of
from pipeplan.checker import check
from pipeplan.files import Plan
from pipeplan.planning.build_plan import assemble
from pipeplan.workload.action import Action
from pipeplan.workload.elements import Repetend
from pipeplan.workload.task_graph import task_graph
from pipeplan.workload.workload import Workload
from references.replay import extended, replay
from support.marks import some_of

SETTINGS = settings(max_examples=some_of(60))


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
    operations = tuple(replace(operation, duration_ns=draw(times)) for operation in workload.operations)
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
        assert report.recomputed.period_ns is not None
        assert abs(report.recomputed.period_ns * unroll - shown) <= Fraction(max(workload_times(workload)), 20)
        if not any(problem.rule == "repetend" for problem in report.problems):
            found.append(repetend_ns)
    exact = report.recomputed.period_ns * unroll
    assert found == ([round(exact)] if abs(exact - round(exact)) < 1e-9 else [])


@st.composite
def assembled(draw: st.DrawFn, links: bool = True) -> tuple[Plan, Placed]:
    """Plans of several routes, sizes, replicas or parts in any order that works, and what they are made from."""
    drawn = draw(placed(links=links and draw(st.booleans())))
    graph = task_graph(drawn.workload)
    orders = random_orders(graph, random.Random(draw(st.integers(0, 2**20))))
    first_come = draw(st.booleans())
    return assemble(graph, graph.on_devices(orders) if first_come else orders, 1, Fraction(0), "random"), drawn


@settings(max_examples=some_of(150))
@given(assembled())
def test_plans_of_all_kinds_of_stages_are_valid(case: tuple[Plan, Placed]) -> None:
    plan, drawn = case
    report = check(plan, drawn.profile, drawn.cluster)
    assert report.problems == ()
    assert report.recomputed.iteration_ns == plan.predicted.iteration_ns >= plan.predicted.makespan_ns


@st.composite
def sliced(draw: st.DrawFn) -> tuple[Plan, Placed]:
    """1F1B on a chain with some more edges, leading forwards in parts, over links that are busy at times."""
    drawn = draw(placed_chains())
    graph = task_graph(drawn.workload)
    position = {operation.id: index for index, operation in enumerate(drawn.workload.operations)}
    orders = [[graph.offsets[position[id_]] + m for id_, m in order] for order in one_f_one_b(drawn.workload)]
    return assemble(graph, orders, 1, Fraction(0), "1f1b"), drawn


@SETTINGS
@given(sliced())
def test_repetends_behind_parts_and_over_busy_links_are_valid(case: tuple[Plan, Placed]) -> None:
    plan, drawn = case
    assert check(plan, drawn.profile, drawn.cluster).problems == ()
    if plan.repetend is not None:
        repetend = replace(plan.repetend, repetend_ns=plan.repetend.repetend_ns + 1)
        assert not check(plan.model_copy(update={"repetend": repetend})).valid


@SETTINGS
@given(assembled(links=False), st.booleans())
def test_plans_of_all_kinds_made_by_hand_are_the_same(case: tuple[Plan, Placed], full_names: bool) -> None:
    plan, drawn = case
    numbers = {
        operation.id + name: (operation.id, number)
        for operation in plan.operations
        for number, (name, _) in enumerate(actions_of(drawn.workload, operation.id))
    }
    orders = [[numbers[text] for text in program if text in numbers] for program in plan.programs]
    by_hand = plan_of(drawn.workload, orders, full_names=full_names, lower_bound_ns=1)
    assert check(by_hand, drawn.profile).problems == ()
    assert by_hand.starts_ns == plan.starts_ns
    assert by_hand.predicted.memory == plan.predicted.memory
    assert by_hand.predicted.iteration_ns == plan.predicted.iteration_ns


@SETTINGS
@given(assembled(), st.sampled_from(["every", "source_device", "target_device", "gone", "twice"]), st.data())
def test_no_other_messages_are_accepted(case: tuple[Plan, Placed], what: str, data: st.DataObject) -> None:
    """A hop that brings samples elsewhere, from elsewhere, of other micro-batches, not at all, or again."""
    plan, _ = case
    joined = [number for number, dependency in enumerate(plan.dependencies) if dependency.hops]
    assume(joined)
    number = data.draw(st.sampled_from(joined))
    dependency = plan.dependencies[number]
    hops = list(dependency.hops)
    index = data.draw(st.integers(0, len(hops) - 1))
    hop = hops.pop(index)
    if what == "every":
        hops.append(replace(hop, every=hop.every + 1))
    elif what == "twice":
        hops += [hop, hop]
    elif what != "gone":
        id_ = dependency.source if what == "source_device" else dependency.target
        others = [device for device in plan.devices_of(id_) if device != getattr(hop, what)]
        assume(others and plan.stage_of(id_).shards == 1)
        hops.append(replace(hop, **{what: data.draw(st.sampled_from(others))}))
    dependencies = list(plan.dependencies)
    dependencies[number] = replace(dependency, hops=tuple(hops))
    problems = check(plan.model_copy(update={"dependencies": tuple(dependencies)})).problems
    assert any(problem.rule == "hops" and f"dependencies[{number}]" in problem.place for problem in problems)


@SETTINGS
@given(assembled(), st.integers(-9, 9).filter(bool), st.data())
def test_no_other_start_of_any_kind_is_accepted(case: tuple[Plan, Placed], ns: int, data: st.DataObject) -> None:
    plan, _ = case
    id_ = data.draw(st.sampled_from(sorted(plan.starts_ns)))
    starts = list(plan.starts_ns[id_])
    number = data.draw(st.integers(0, len(starts) - 1))
    assume(starts[number] + ns >= 0)
    starts[number] += ns
    assert not check(plan.model_copy(update={"starts_ns": {**plan.starts_ns, id_: tuple(starts)}})).valid


def workload_times(workload: Workload) -> list[int]:
    return [operation.duration_ns for operation in workload.operations]


def test_deadlock_is_a_cycle_in_the_joint_orders_or_of_actions() -> None:
    """Programs shuffled a little: check says deadlock exactly if one of two explicit graphs has a cycle."""
    rng = random.Random(7)
    answers = set()
    for _ in range(150):
        plan = _shuffled(plan_of(*rng.choice(PREPARED), full_names=True), rng)
        graph = nx.DiGraph()
        for device, program in enumerate(plan.programs):
            graph.add_edges_from(pairwise(_joint(Action.parse(text), device) for text in program))
        actions = nx.DiGraph()
        for program in plan.programs:
            actions.add_edges_from(pairwise(text for text in program if "_" not in text))
        for each in plan.dependencies:
            actions.add_edges_from((f"{each.source}{m}", f"{each.target}{m}") for m in range(plan.num_microbatches))
        expected = not nx.is_directed_acyclic_graph(graph), not nx.is_directed_acyclic_graph(actions)
        assert any(problem.rule == "deadlock" for problem in check(plan).problems) == any(expected)
        answers.add(expected)
    assert answers >= {(True, False), (False, True), (False, False)}


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
