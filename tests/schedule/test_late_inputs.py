"""Actions in parts, which wait inside for messages: times, searches and bounds, by plain second versions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from builders.orders import actions_of, holders_of
from pipeplan.checker import check
from pipeplan.costs import build_workload
from pipeplan.costs.late_inputs import with_late_inputs
from pipeplan.files import Block, CostRow, Edge, Placement, Profile, Source
from pipeplan.planning.request import Request
from pipeplan.planning.steps import search_plan
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.cpsat.windows import reschedule
from pipeplan.workload.bounds import strong_iteration_bound, weak_iteration_bound
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import earliest_starts, task_graph
from pipeplan.workload.workload import Workload
from support.marks import some_of


def two_branches(times: Sequence[int], transfer_ns: int = 0) -> Profile:
    """Blocks a; b, c; and c takes the output of a last: (forward ns of each; backward is twice as long)."""
    names = ("a", "b", "c")
    rows = {
        name: CostRow(microbatch_size=1, forward_ns=ns, backward_ns=2 * ns, activation_bytes=1)
        for name, ns in zip(names, times, strict=True)
    }
    return Profile(
        name="two branches",
        source=Source(method="estimated"),
        blocks=tuple(Block(id=name, operator="layer", costs=(row,)) for name, row in rows.items()),
        edges=(Edge(source="a", target="c", transfer_ns=transfer_ns), Edge(source="b", target="c")),
    )


def placed(profile: Profile, stages: Sequence[Sequence[str]], count: int) -> Workload:
    placement = Placement.of(stages)
    return build_workload(profile, placement, num_microbatches=count, microbatch_size=1)


Entry = tuple[str, int]


def ends_by_parts(workload: Workload, orders: Sequence[Sequence[Entry]]) -> dict[Entry, int] | None:
    """When actions end if each begins as soon as its first part can, and waits inside before the others.

    None where devices wait for each other.
    """
    by_id = {each.id: each for each in workload.operations}
    ends: dict[tuple[str, int, int], int] = {}
    holders = {id_: holders_of(workload, id_) for id_ in by_id}
    at, free = [0] * len(orders), [0] * len(orders)

    def parts(id_: str) -> Sequence[int]:
        return by_id[id_].parts_ns or (by_id[id_].duration_ns,)

    def arrivals(id_: str, number: int, part: int) -> list[int] | None:
        """When what a part needs is there; None if that is not known yet."""
        found: list[int] = []
        samples = actions_of(workload, id_)[number][1]
        for each in workload.dependencies:
            if each.target == id_ and each.target_part == part:
                made = len(parts(each.source)) - 1 if each.source_part is None else each.source_part
                for other in {holders[each.source][sample] for sample in samples}:
                    if (each.source, other, made) not in ends:
                        return None
                    found.append(ends[each.source, other, made] + each.lag_ns)
        return found

    moved = True
    while moved:
        moved = False
        for device, order in enumerate(orders):
            while at[device] < len(order):
                id_, number = order[at[device]]
                for part, ns in enumerate(parts(id_)):
                    if (id_, number, part) in ends:
                        continue
                    there = arrivals(id_, number, part)
                    if there is None:
                        break
                    free[device] = ends[id_, number, part] = max([free[device], *there]) + ns
                    moved = True
                else:
                    at[device] += 1
                    continue
                break
    if [*map(len, orders)] != at:
        return None
    return {(id_, number): ends[id_, number, len(parts(id_)) - 1] for order in orders for id_, number in order}


def every_order(workload: Workload) -> list[list[list[Entry]]]:
    """All orders of each device, micro-batches in turn and backward after forward."""
    count = workload.num_microbatches

    def interleaved(stage: int) -> list[list[Entry]]:
        found = [[]] if not count else []
        left: list[tuple[list[Entry], int, int]] = [([], 0, 0)]
        while left:
            order, forwards, backwards = left.pop()
            if backwards == count:
                found.append(order)
            if forwards < count:
                left.append(([*order, (f"{stage}F", forwards)], forwards + 1, backwards))
            if backwards < forwards:
                left.append(([*order, (f"{stage}B", backwards)], forwards, backwards + 1))
        return found

    return [list(each) for each in product(*map(interleaved, range(len(workload.stages))))]


def tasks_of(workload: Workload, orders: Sequence[Sequence[Entry]]) -> list[list[int]]:
    offsets = {each.id: index * workload.num_microbatches for index, each in enumerate(workload.operations)}
    return [[offsets[id_] + number for id_, number in order] for order in orders]


@settings(max_examples=some_of(60))
@given(st.tuples(*[st.integers(1, 9)] * 3), st.integers(0, 5), st.integers(1, 2))
def test_an_action_that_begins_at_once_and_waits_inside_ends_no_later(
    times: tuple[int, int, int], transfer_ns: int, count: int
) -> None:
    """In any order; here nothing leaves before a wait, so that both end at the same time."""
    profile = two_branches(times, transfer_ns)
    workload = with_late_inputs(profile, placed(profile, ["a", "bc"], count))
    graph = task_graph(workload)
    assert workload.has_parts
    for orders in every_order(workload):
        by_parts = ends_by_parts(workload, orders)
        if by_parts is None:
            continue
        tasks = tasks_of(workload, orders)
        starts = earliest_starts(graph, tasks)
        for line, order in zip(tasks, orders, strict=True):
            for task, entry in zip(line, order, strict=True):
                assert starts[task] + graph.durations[task] == by_parts[entry]


@settings(max_examples=12, deadline=None)
@given(st.tuples(*[st.integers(1, 9)] * 3), st.integers(0, 5), st.integers(1, 3))
def test_searches_find_the_shortest_of_all_orders(times: tuple[int, int, int], transfer_ns: int, count: int) -> None:
    profile = two_branches(times, transfer_ns)
    late = with_late_inputs(profile, placed(profile, ["a", "bc"], count))
    best = min(max(ends.values()) for orders in every_order(late) if (ends := ends_by_parts(late, orders)))
    problem = OneMicrobatch.of(late)
    assert weak_iteration_bound(late) <= strong_iteration_bound(problem) <= best
    found = search_plan(request(profile, count, late_inputs=True))
    assert found.plan.predicted.makespan_ns == best
    assert found.placement_lower_bound_ns <= best
    either = search_plan(request(profile, count))
    whole = search_plan(request(profile, count, late_inputs=False))
    assert either.plan.predicted.makespan_ns == min(best, whole.plan.predicted.makespan_ns)
    for each in (found, either, whole):
        assert check(each.plan, profile).valid


def request(profile: Profile, count: int, **how: Any) -> Request:
    asked: dict[str, Any] = {"num_microbatches": count, "deterministic": True, "time_limit": 1.0, **how}
    return Request.of(profile, placement=Placement.of(["a", "bc"]), **asked)


@settings(max_examples=some_of(40), deadline=None)
@given(st.tuples(*[st.integers(1, 9)] * 3), st.integers(0, 5), st.integers(2, 3), st.integers(0, 60))
def test_windows_are_cut_where_an_action_begins_before_what_it_waits_for_inside(
    times: tuple[int, int, int], transfer_ns: int, count: int, begin: int
) -> None:
    """A window from any time on leaves an order that is as short or shorter, and its bound is not above any."""
    profile = two_branches(times, transfer_ns)
    workload = with_late_inputs(profile, placed(profile, ["a", "bc"], count))
    graph, problem = task_graph(workload), OneMicrobatch.of(workload)
    orders = tasks_of(workload, next(each for each in every_order(workload) if ends_by_parts(workload, each)))
    starts = earliest_starts(graph, orders)
    for end in (None, begin + 5, begin + 20):
        found = reschedule(
            problem, graph, orders, starts, Budget(1, deterministic=True), 1.0, begin_ns=begin, end_ns=end
        )
        if found.orders is not None:
            assert graph.iteration(earliest_starts(graph, found.orders)) <= graph.iteration(starts)
