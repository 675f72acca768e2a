"""Actions that gather and reduce sharded state: where they stand, when they run, what is held meanwhile."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from builders.sharded import assembled, chain_of, exchanging, pairs, placed, random_plan, sharded_plan
from pipeplan.checker import check
from pipeplan.costs import build_workload
from pipeplan.costs.late_inputs import with_late_inputs
from pipeplan.errors import FileError, InvalidPlanError
from pipeplan.files import Plan, parse, to_json
from pipeplan.planning.build_plan import assemble
from pipeplan.planning.request import Request
from pipeplan.planning.steps import search_plan
from pipeplan.reporting.terminal import zero_words
from pipeplan.reporting.timeline import trace_text
from pipeplan.schedule.search import plain_look
from pipeplan.simulator.recost import recosted
from pipeplan.simulator.simulation import orders_of, simulate
from pipeplan.workload.action import Action, StateAction
from pipeplan.workload.bounds import weak_iteration_bound
from pipeplan.workload.elements import ONCE
from pipeplan.workload.kinds import REDUCE_GRAD, RESHARD, UNSHARD, Role
from pipeplan.workload.task_graph import earliest_starts, task_graph
from support.marks import always, one_in, slow_but


def replayed(plan: Plan) -> tuple[dict[str, int], list[tuple[int, int, int, str, int]], int]:
    """{action: start}, (device, begin, end, kind, bytes) of what is whole for a time, when the last exchange ends.

    By the programs' texts alone: all that must come before something else is written down, and moments move later
    until nothing is too early.
    """
    times: dict[object, int] = defaultdict(int)
    least: list[tuple[object, object, int]] = []  # (earlier, later, ns between their begins at least)
    spans: list[tuple[int, Since, object, int, str, int]] = []
    ends: list[tuple[object, int]] = []
    for device, program in enumerate(plan.programs):
        follow(plan, device, program, least, spans, ends)
    for dependency in plan.dependencies:
        for number in range(plan.num_microbatches):
            source, target = plan.operation(dependency.source), plan.operation(dependency.target)
            between = source.duration_ns - source.left_ns(dependency.source_part) + dependency.lag_ns
            between -= target.begin_ns(dependency.target_part)
            least.append((f"{dependency.source}{number}", f"{dependency.target}{number}", between))
    moved = True
    while moved:
        moved = False
        for earlier, later, between in least:
            if times[later] < times[earlier] + between:
                times[later], moved = times[earlier] + between, True
    starts = {f"{id_}{n}": times[f"{id_}{n}"] for id_ in plan.starts_ns for n in range(plan.num_microbatches)}
    held = [(device, since(times), times[end] + more, kind, size) for device, since, end, more, kind, size in spans]
    return starts, held, max(times[each] + time for each, time in ends)


Since = Callable[[Mapping[object, int]], int]
"""Of moments, since when something is held."""


def held_since(moment: object | None, over: Sequence[tuple[object, int]]) -> Since:
    """When all of some is over (some ns after its moment), or at another moment if that comes first."""

    def since(times: Mapping[object, int]) -> int:
        own = max((times[each] + after for each, after in over), default=0)
        return own if moment is None else min(times[moment], own)

    return since


def follow(
    plan: Plan,
    device: int,
    program: tuple[str, ...],
    least: list[tuple[object, object, int]],
    spans: list[Any],
    ends: list[Any],
) -> None:
    """Write down what one program says. An exchange has one moment for all devices of its stage: its how-manieth."""
    last: str | None = None  # the action before
    network: tuple[object, int] | None = None  # the exchange before, and what it takes
    counts: dict[tuple[int, str, int], int] = defaultdict(int)
    gathered: dict[tuple[int, int], object] = {}
    issued: dict[tuple[int, int], list[tuple[object, int]]] = {}  # what is over when the program comes to an UNSHARD
    given_up: dict[tuple[int, int], tuple[str, int]] = {}
    adding: dict[tuple[int, int], list[tuple[str, Role]]] = defaultdict(list)
    reduced: dict[tuple[int, int], tuple[object, int]] = {}

    def before_and_after(stage: int, role: Role, group: int) -> tuple[int, int]:
        groups = plan.stages[stage].block_groups
        order = [*range(len(groups))] if role is Role.FORWARD else [*range(len(groups))][::-1]
        begin = sum(groups[n].time_in(role) for n in order[: order.index(group)])
        return begin, begin + groups[group].time_in(role)

    for text in program:
        state = StateAction.read(text)
        if state is not None:
            key = state.stage, state.group or 0
            blocks = plan.stages[key[0]].block_groups[key[1]]
            if state.kind == RESHARD:
                assert last is not None
                after = before_and_after(key[0], Action.parse(last).role, key[1])[1]
                given_up[key] = last, after
                since = held_since(gathered.pop(key), issued.pop(key))
                spans.append((device, since, last, after, "parameters", blocks.gathered_bytes))
                continue
            counts[key[0], state.kind, key[1]] += 1
            moment = state.stage, state.kind, key[1], counts[key[0], state.kind, key[1]]
            takes = blocks.unshard_ns if state.kind == UNSHARD else blocks.reduce_ns
            least += [(last, moment, 0)] if last else []
            least += [(network[0], moment, network[1])] if network else []
            if state.kind == UNSHARD:
                least += [(given_up[key][0], moment, given_up[key][1])] if key in given_up else []
                gathered[key] = moment
                issued[key] = [(last, plan.operation(Action.parse(last).operation).duration_ns)] if last else []
                issued[key] += [given_up[key]] if key in given_up else []
            else:
                for action, role in adding[key]:
                    least.append((action, moment, before_and_after(key[0], role, key[1])[1]))
                first, role = adding[key][0]
                begin = before_and_after(key[0], role, key[1])[0]
                since = held_since(None, [(first, begin)])
                spans.append((device, since, moment, takes, "gradients", blocks.reduced_bytes))
                reduced[key], adding[key] = (moment, takes), []
            network = moment, takes
            ends.append((moment, takes))
        elif "_" not in text:
            action = Action.parse(text)
            for group in range(len(plan.stages[action.stage].block_groups)):
                key, begin = (action.stage, group), before_and_after(action.stage, action.role, group)[0]
                if action.role is not Role.WEIGHT_GRAD and key in gathered:
                    takes = plan.stages[action.stage].block_groups[group].unshard_ns
                    least.append((gathered[key], text, takes - begin))
                if action.role in (Role.BACKWARD, Role.WEIGHT_GRAD):
                    least += [(reduced[key][0], text, reduced[key][1] - begin)] if key in reduced else []
                    adding[key].append((text, action.role))
            least += [(last, text, plan.operation(Action.parse(last).operation).duration_ns)] if last else []
            last = text
    assert not gathered, "all is given up"
    assert not any(adding.values()), "all is reduced"


def held_at_most(plan: Plan, spans: list[tuple[int, int, int, str, int]], device: int) -> int:
    """Of a device, all that it holds at each moment at which something begins."""
    taken = [(begin, end, size) for own, begin, end, _, size in spans if own == device]
    for id_, starts in plan.starts_ns.items():
        operation = plan.operation(id_)
        if device in plan.stages[operation.stage].devices:
            for start in starts:
                end = start + operation.duration_ns
                taken += [(start, end, operation.workspace_bytes), (start, 10**18, operation.acquire_bytes)]
                taken.append((end, 10**18, -operation.release_bytes))
    state = sum(stage.state.total for stage in plan.stages if device in stage.devices)
    moments = {begin for begin, _, _ in taken}
    return state + max(sum(size for begin, end, size in taken if begin <= each < end) for each in moments)


@one_in(2, "seed, late", [*((seed, False) for seed in range(40)), *((n, True) for n in range(25))], first=1)
def test_plans_exchange_when_their_programs_say_and_hold_what_that_takes(seed: int, late: bool) -> None:
    """Starts, the end of the last exchange and peaks of memory by programs alone; check finds them right, too.

    Also where actions wait inside for late inputs.
    """
    plan, profile = random_plan(seed, 0.5 * (seed % 2), late=late)
    cluster = pairs(len(plan.devices), 0.5 * (seed % 2))
    report = check(plan, profile, cluster)
    assert report.valid, report.problems[:3]
    starts, spans, ended = replayed(plan)
    assert starts == {f"{id_}{n}": start for id_, own in plan.starts_ns.items() for n, start in enumerate(own)}
    gathered = report.recomputed.exposed_gather_ns  # by level 2 once, after the step
    assert plan.predicted.iteration_ns - gathered == max(ended, plan.predicted.makespan_ns)
    peaks = [held_at_most(plan, spans, device) for device in range(len(plan.devices))]
    assert [each.peak_bytes for each in plan.predicted.memory] == peaks
    simulation = simulate(plan)
    assert simulation.iteration_ns == plan.predicted.iteration_ns
    assert [each.peak_bytes for each in simulation.memory] == peaks
    assert weak_iteration_bound(plan.workload) <= plan.predicted.iteration_ns
    assert parse(to_json(plan), Plan) == plan
    assert recosted(plan, profile, cluster) == plan.workload


@one_in(2, "seed, late", [*((seed, False) for seed in range(30)), *((n, True) for n in range(10))])
def test_stated_starts_are_those_of_a_replay_or_passed_over(seed: int, late: bool) -> None:
    """With the same exchanges; starts of which one is later than it must be are not taken."""
    plan, _ = random_plan(seed, late=late)
    graph, again = task_graph(plan.workload), task_graph(plan.workload)
    orders = orders_of(plan, graph)
    stated = [start for operation in plan.workload.operations for start in plan.starts_ns[operation.id]]
    replayed = earliest_starts(again, orders)
    assert earliest_starts(graph, orders, stated) == replayed == stated
    assert graph.num_actions == len(stated)
    for wrong in range(len(stated)):
        late_starts = [start + (task == wrong) for task, start in enumerate(stated)]
        assert earliest_starts(graph, orders, late_starts) == stated
    networks = [(own.runs, own.held, own.free) for _, own in graph.networks_at(stated)]
    assert networks == [(own.runs, own.held, own.free) for _, own in again.networks_at(stated)]


def test_programs_say_it_in_torchs_words() -> None:
    """Groups are named where a stage has several; torch's own pattern reads the others."""
    plan = sharded_plan()
    groups = [len(stage.block_groups) for stage in plan.stages]
    assert groups == [3, 2]
    said = [text for text in plan.programs[0] if StateAction.read(text)]
    assert said[:3] == ["0UNSHARD.0", "0UNSHARD.1", "0UNSHARD.2"]
    assert StateAction.read("3REDUCE_GRAD") == StateAction(3, REDUCE_GRAD)
    assert [StateAction.read(text) for text in ("3UNSHARD.01", "3F0", "UNSHARD", "3RESHARD0")] == [None] * 4
    with pytest.raises(ValueError, match="is not an action"):
        Action.parse("3UNSHARD4")


Data = dict[str, Any]


def without(text: str, device: int = 0, nth: int = 0) -> Callable[[Data], None]:
    def damage(data: Data) -> None:
        for each in (device, device + 1):
            places = [n for n, own in enumerate(data["programs"][each]) if own == text]
            del data["programs"][each][places[nth]]

    return damage


def later(text: str, device: int = 0, nth: int = 0, by: int = 1) -> Callable[[Data], None]:
    """Behind so many actions that compute."""

    def damage(data: Data) -> None:
        for each in (device, device + 1):
            program = data["programs"][each]
            place = [n for n, own in enumerate(program) if own == text][nth]
            rest = range(place + 1, len(program))
            computing = [n for n in rest if "_" not in program[n] and not StateAction.read(program[n])]
            to = computing[by - 1]
            program.insert(to + 1, text)
            del program[place]

    return damage


def keys(**changes: Any) -> Callable[[Data], None]:
    def damage(data: Data) -> None:
        for name, value in changes.items():
            data["stages"][0]["block_groups"][0][name] = value

    return damage


@pytest.mark.parametrize(
    ("damage", "rule", "message"),
    [
        (without("0UNSHARD.1"), "exchanges", "0UNSHARD.1 is missing before"),
        (without("0RESHARD.1"), "exchanges", "a RESHARD is missing before"),
        (without("0RESHARD.1", nth=-1), "exchanges", "0RESHARD.1 is missing"),
        (without("0REDUCE_GRAD.0"), "exchanges", "adds to gradients before 0REDUCE_GRAD"),
        (without("0REDUCE_GRAD.0", nth=-1), "exchanges", "0REDUCE_GRAD.0 is missing"),
        (later("0UNSHARD.2"), "exchanges", "0UNSHARD.2 is missing before"),
        (later("0RESHARD.2"), "exchanges", "of what it was gathered for"),
        (later("1REDUCE_GRAD.0", device=2, by=2), "exchanges", "adds to gradients before 1REDUCE_GRAD"),
        (lambda data: data["programs"][1].remove("0UNSHARD.0"), "exchanges", "exchanges the same state"),
        (lambda data: data["programs"][0].insert(0, "1UNSHARD.0"), "exchanges", "exchanges the same state"),
        (lambda data: [data["programs"][n].insert(0, "1UNSHARD.0") for n in (0, 1)], "exchanges", "no block_groups"),
        (lambda data: [data["programs"][n].insert(0, "0UNSHARD") for n in (0, 1)], "exchanges", "3 groups of blocks"),
        (keys(unshard_ns=100_000), "exchanges", "what it needs is gathered"),
        (keys(unshard_ns=0), "earliest", "its devices are free"),
        (keys(reduce_ns=100_000), "exchanges", "what it adds to reduced"),
        (keys(gathered_bytes=10**6), "figures", "the programs give"),
        (keys(reduced_bytes=10**6), "figures", "the programs give"),
    ],
)
def test_check_refuses_missing_late_and_wrong_exchanges(
    damage: Callable[[Data], None], rule: str, message: str
) -> None:
    data = json.loads(to_json(sharded_plan()))
    damage(data)
    plan = parse(json.dumps(data), Plan)
    found = [problem for problem in check(plan).problems if problem.rule == rule]
    assert any(message in problem.message for problem in found), check(plan).problems[:5]


@pytest.mark.parametrize("name", ["gathered_bytes", "reduced_bytes", "unshard_ns", "reduce_ns"])
def test_check_computes_groups_anew_from_the_profile(name: str) -> None:
    plan, profile = sharded_plan(), chain_of([100] * 5)
    stage = plan.stages[0]
    first = replace(stage.block_groups[0], **{name: getattr(stage.block_groups[0], name) + 1})
    stages = (replace(stage, block_groups=(first, *stage.block_groups[1:])), *plan.stages[1:])
    problems = check(plan.model_copy(update={"stages": stages}), profile, pairs(4)).problems
    assert any(problem.place == f"stages[0].block_groups[0].{name}" for problem in problems)


def test_simulate_refuses_exchanges_that_stand_elsewhere_by_name() -> None:
    data = json.loads(to_json(sharded_plan()))
    for program in data["programs"][:2]:
        place = program.index("0UNSHARD.0")
        program[place], program[place + 1] = program[place + 1], program[place]
    with pytest.raises(InvalidPlanError, match=r"has 0UNSHARD\.1 where state is exchanged by 0UNSHARD\.0"):
        simulate(parse(json.dumps(data), Plan))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unshard_every": None}, "reduce_every stands with zero 2 alone"),
        ({"reduce_every": None}, "reduce_every stands with zero 2 alone"),
        ({"zero": 1}, "stages whose replicas divide gradients"),
        ({"block_groups": []}, "block_groups are for stages with reduce_every"),
    ],
)
def test_files_say_how_often_only_where_it_makes_sense(changes: Data, message: str) -> None:
    data = json.loads(to_json(sharded_plan()))
    data["stages"][0] |= changes
    with pytest.raises(FileError, match=message):
        parse(json.dumps(data), Plan)


def test_a_group_that_is_there_lets_its_action_begin_while_the_next_is_gathered() -> None:
    """Three groups of 405 ns each: forward needs the last only after two thirds of its 600 ns."""
    profile = chain_of([200] * 3)
    placement = placed(exchanging([0, 1, 2], (100, 100), (0, 1)))
    workload = build_workload(profile, placement, num_microbatches=1, microbatch_size=2, cluster=pairs(2))
    graph = task_graph(workload)
    groups = workload.stages[0].block_groups
    gather, reduce = groups[0].unshard_ns, groups[0].reduce_ns
    starts = earliest_starts(graph, [[0, 1], [0, 1]])
    assert starts == [3 * gather - 2 * groups[0].forward_ns, 3 * gather + groups[0].forward_ns]
    ready = starts[1] + groups[0].backward_ns
    assert graph.iteration(starts) == max(ready + 3 * reduce, starts[1] + 3 * groups[0].backward_ns + reduce)


def test_simulations_and_traces_show_exchanges() -> None:
    """On the network of each device, one after another."""
    plan = sharded_plan()
    simulation = simulate(plan)
    said = [text for text in plan.programs[0] if StateAction.read(text) and RESHARD not in text]
    shown = sorted((begin, text) for text, devices, begin, _, _ in simulation.exchanges if 0 in devices)
    assert [text for _, text in shown] == said
    figures: Any = simulation.figures()["devices"]
    blocks = plan.stages[0].block_groups[0]
    assert figures[0]["exchange_ns"] == 3 * 3 * blocks.unshard_ns + 3 * 2 * blocks.reduce_ns
    events = json.loads(trace_text(simulation))["traceEvents"]
    drawn = [each for each in events if each["ph"] == "X" and each["args"]["device"] == 0 and "RED" in each["name"]]
    assert {each["tid"] for each in drawn} == {1}, "they are communication"
    assert zero_words(plan.stages) == (
        "ZeRO 3 over 2 replicas (gathered every 1-2 actions, reduced every 1-2 micro-batches)"
    )


@slow_but(
    "first, second, split, late",
    [
        ((1, 1), (1, 1), False, False),
        ((2, 2), (1, 1), False, False),
        ((4, 1), (2, 4), False, False),
        ((ONCE, ONCE), (2, 1), False, False),
        ((None, 2), (ONCE, ONCE), False, False),
        ((1, 1), (2, 2), True, False),
        ((2, 1), (1, 2), False, True),
        ((1, 2), (4, 1), True, True),
    ],
    lambda case: case[:2] in [((4, 1), (2, 4)), ((ONCE, ONCE), (2, 1)), ((1, 2), (4, 1))],
    always,
)
def test_long_runs_repeat_a_round_with_its_exchanges(first: Any, second: Any, split: bool, late: bool) -> None:
    """1F1B of 480 micro-batches as a loop is what it is written out: starts, programs, iteration, memory, checks.

    Also where the last of three stages has a block that takes the second's output, and before it one that does not.
    """
    profile = chain_of([100, 100, 50, 20], split=split, edges=[(0, 1), (0, 2), (1, 3), (2, 3)] if late else None)
    ends = (
        [exchanging([0], first, (4, 5)), exchanging([1], first, (0, 1))]
        if late
        else [exchanging([0, 1], first, (0, 1))]
    )
    placement, cluster = placed(*ends, exchanging([2, 3], second, (2, 3))), pairs(6 if late else 4)
    workload = build_workload(
        profile, placement, num_microbatches=480, microbatch_size=2, split_backward=split, cluster=cluster
    )
    if late:
        workload = with_late_inputs(profile, workload, cluster)
        assert workload.has_parts
    found = plain_look(workload, 1000)
    assert found is not None
    assert found.loop is not None
    bound = weak_iteration_bound(workload)
    plan = assemble(found.graph, found.orders, bound, Fraction(0), "1f1b", loop=found.loop, recipe=profile.recipe)
    report = check(plan, profile, cluster)
    assert report.valid, report.problems[:3]
    assert len(plan.programs[0]) < 0.4 * len(plan.whole_programs[0])
    whole = plan.unrolled()
    report = check(whole, profile, cluster)
    assert report.valid, report.problems[:3]
    again = simulate(whole)
    assert again.iteration_ns == plan.predicted.iteration_ns == simulate(plan).iteration_ns
    assert again.memory == plan.predicted.memory
    assert parse(to_json(plan), Plan) == plan
    data = json.loads(to_json(plan))
    data["stages"][1] |= {"reduce_every": 7}
    assert not check(parse(json.dumps(data), Plan)).valid
    longer = simulate(plan, 480 + 8 * plan.loop.microbatches) if plan.loop is not None else again
    assert longer.loop is not None
    assert longer.iteration_ns > plan.predicted.iteration_ns


@pytest.mark.parametrize("contention", [0.0, 0.5])
def test_what_is_reduced_once_an_iteration_slows_what_is_computed_beside_it(contention: float) -> None:
    """The last stage's gradients are reduced while its devices run the first stage's backward."""
    profile = chain_of([1, 100])
    stages = [exchanging([0], (None, ONCE), (0, 1)), exchanging([1], (None, ONCE), (0, 1))]
    cluster = pairs(2, contention)
    workload = build_workload(profile, placed(*stages), num_microbatches=2, microbatch_size=2, cluster=cluster)
    workload = replace(workload, stages=tuple(replace(stage, gather_ns=0) for stage in workload.stages))
    graph = task_graph(workload)
    order = sorted(
        range(graph.num_actions), key=lambda task: "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1".index(graph.label(task))
    )
    plan = assembled(graph, [order, order], profile)
    simulation = simulate(plan)
    reduced = [(begin, begin + took) for _, devices, begin, took, _ in simulation.exchanges if 0 in devices]
    acted = plan.predicted.makespan_ns
    beside = sum(max(0, min(end, acted) - begin) for begin, end in reduced)
    assert acted + round(0.5 * beside) > max(end for _, end in reduced)
    assert plan.predicted.iteration_ns == max(acted + round(contention * beside), *(end for _, end in reduced))
    assert check(plan).problems == ()
    assert simulation.iteration_ns == plan.predicted.iteration_ns


@pytest.mark.slow
def test_searches_have_late_inputs_beside_exchanges() -> None:
    """The last stage waits inside for the second's output: shorter, and chosen where both ways are open."""
    profile = chain_of([20] * 4, edges=[(0, 1), (0, 2), (1, 3), (2, 3)])
    stages = [exchanging([0], (1, 1), (0, 1)), exchanging([1], (2, 1), (2, 3)), exchanging([2, 3], (1, 2), (4, 5))]
    asked: dict[str, Any] = {"placement": placed(*stages), "cluster": pairs(6), "deterministic": True}
    asked |= {"num_microbatches": 4, "microbatch_size": 2, "time_limit": 0.2, "deterministic": True}
    found = {late: search_plan(Request.of(profile, late_inputs=late, **asked)).plan for late in (True, False, None)}
    for late, plan in found.items():
        assert check(plan, profile, pairs(6)).valid
        assert plan.workload.has_parts == (late is not False)
        assert "2UNSHARD.1" in plan.programs[4]
    whole, either = found[False].predicted.iteration_ns, found[None].predicted.iteration_ns
    assert found[True].predicted.iteration_ns < whole
    assert either < whole


def test_check_refuses_a_round_after_which_exchanges_stand_otherwise() -> None:
    profile = chain_of([100, 100, 50, 20])
    placement = placed(exchanging([0, 1], (2, 1), (0, 1)), exchanging([2, 3], (2, 1), (2, 3)))
    workload = build_workload(profile, placement, num_microbatches=480, microbatch_size=2, cluster=pairs(4))
    found = plain_look(workload, 1000)
    assert found is not None
    plan = assemble(found.graph, found.orders, 1, Fraction(0), "1f1b", loop=found.loop, recipe=profile.recipe)
    data = json.loads(to_json(plan))
    data["loop"]["rounds"][0]["round_ns"] += 1
    assert any("exchanges of state" in each.message for each in check(parse(json.dumps(data), Plan)).problems)
