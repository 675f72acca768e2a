"""Rules: what each of them does to small orders that are written out, and how wrong ones are refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from builders.chains import chain_workload, shared_workload
from builders.shapes import shape_workload
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.schedule.classic import CLASSIC, makespan
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.rules import (
    Check,
    DeviceRules,
    ReadyAction,
    Rules,
    StageTraversal,
    State,
    SubmoduleRules,
    TypeTraversal,
)
from pipeplan.schedule.rules.engine import schedule_by_rules
from pipeplan.schedule.rules.language import named_rules
from pipeplan.schedule.rules.sweep import built_in_rules, run_rules, schedule_of_rules
from pipeplan.schedule.rules.values import evaluate
from pipeplan.workload.bounds import strong_iteration_bound
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import task_graph
from pipeplan.workload.workload import Workload
from support.marks import one_in


def texts(workload: Workload, rules: Rules) -> list[str]:
    """Every device's order as text."""
    graph = task_graph(workload)
    return [" ".join(map(graph.label, order)) for order in schedule_by_rules(graph, rules)]


# The language --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [(7, 7), ("D - d", 3), ("2 * (D - d) - 1", 5), ("min(D, N) // 2", 2), ("max(1, -D + 2)", 1), ("N % 4", 2)],
)
def test_numbers(text: int | str, value: int) -> None:
    assert evaluate("in_flight", text, {"D": 4, "d": 1, "N": 6}) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("D - e", "'e' is not known"),
        ("__import__('os').system('true')", "is not understood"),
        ("D.__class__", "is not understood"),
        ("2 ** 99", "is not understood"),
        ("(1).bit_length()", "is not understood"),
        ("D //", "invalid syntax"),
        ("D // 0", "by zero"),
        ("True", "only integers"),
        ("9" * 20, "too large"),
        ("1+" * 200 + "1", "longer than 200"),
        ("d - 1", "is 0 where d = 1"),
    ],
)
def test_what_is_no_number_is_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=r"^in_flight (is|=) ") as error:
        evaluate("in_flight", text, {"D": 4, "d": 1})
    assert why in str(error.value)


def test_wrong_values_are_refused_with_their_key() -> None:
    with pytest.raises(UsageError, match="in_flight is -1; it must be at least 0"):
        Rules(in_flight=-1)
    with pytest.raises(UsageError, match=r"in_flight\[1\] is -2"):
        Rules(in_flight=(1, -2))
    with pytest.raises(UsageError, match="interval is 0"):
        StageTraversal(interval=0)
    with pytest.raises(UsageError, match="forward_unit is True"):
        TypeTraversal(forward_unit=True)
    with pytest.raises(UsageError, match="first is 'first'; choose from 'bwd-first'"):
        TypeTraversal("first")  # type: ignore[arg-type]  # what the test is about
    with pytest.raises(UsageError, match="devices is empty"):
        DeviceRules()


def test_rules_for_what_is_not_there_are_refused() -> None:
    with pytest.raises(UsageError, match="device 7, but there are devices 0 to 1"):
        texts(chain_workload(2, 2), Rules(devices=(DeviceRules(devices=(7,), in_flight=1),)))
    with pytest.raises(UsageError, match=r"'text\.\*' matches no stage.* begin with block0, block1"):
        texts(chain_workload(2, 2), Rules(submodules=(SubmoduleRules(blocks="text.*"),)))
    with pytest.raises(UsageError, match="in_flight has 1 numbers for 2 stages;"):
        texts(chain_workload(2, 2), Rules(in_flight=(1,)))


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        (Rules(in_flight=0), "in_flight is 0; it must be at least 1; 0F0 could"),
        (Rules(in_flight=(2, 0)), r"in_flight\[1\] is 0; it must be at least 1; 1F0 could"),
        (
            Rules(in_flight="D - s - 1"),
            "in_flight = 'D - s - 1' is 0 where D = 2, s = 1; it must be at least 1; 1F0 could",
        ),
        (Rules(in_flight_device=(1, 0)), r"in_flight_device\[1\] is 0; it must be at least 1; 1F0 could"),
    ],
)
def test_limits_that_let_nothing_start_name_what_they_stop(rules: Rules, why: str) -> None:
    with pytest.raises(UsageError, match=rf"^rules 'mine': {why} never start"):
        texts(chain_workload(2, 2), rules.but(name="mine"))


def test_nothing_is_said_twice() -> None:
    with pytest.raises(UsageError, match="device: there are rules for 0 twice"):
        Rules(devices=(DeviceRules(devices=(0,), in_flight=1), DeviceRules(devices=(1, 0), in_flight=2)))
    with pytest.raises(UsageError, match=r"submodule: there are rules for 'text\.\*' twice"):
        Rules(submodules=(SubmoduleRules(blocks="text.*"), SubmoduleRules(blocks="text.*", in_flight=2)))


def test_the_bound_is_the_one_of_other_searches() -> None:
    """Shared stages make the first and last micro-batches wait, which work and dependencies alone do not say."""
    workload = shape_workload("mllm")
    found = schedule_of_rules(workload, named_rules("1f1b+"), Budget(1.0, 0, deterministic=True))
    assert found.bound_ns == strong_iteration_bound(OneMicrobatch.of(workload)) == 76_000_000


# What each rule does -------------------------------------------------------------------------------------------


def test_computation_types() -> None:
    workload = chain_workload(2, 4)
    assert texts(workload, Rules(types=TypeTraversal("fwd-first")))[1] == "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"
    assert texts(workload, Rules())[1] == "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
    # two steps until the first B is back; the device then takes turns with what has come in meanwhile
    assert texts(workload, Rules())[0] == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"


def test_units_are_run_in_a_row() -> None:
    one = chain_workload(1, 4)
    assert texts(one, Rules(types=TypeTraversal("interleaved", 2, 2))) == ["0F0 0F1 0B0 0B1 0F2 0F3 0B2 0B3"]
    assert texts(one, Rules(types=TypeTraversal("interleaved", 2, 1))) == ["0F0 0F1 0B0 0F2 0F3 0B1 0B2 0B3"]
    assert texts(one, Rules(types=TypeTraversal("bwd-first", 2, 1))) == ["0F0 0F1 0B0 0B1 0F2 0F3 0B2 0B3"]
    assert texts(one, Rules(types=TypeTraversal("fwd-first", 1, 2))) == ["0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"]


def test_stage_traversal_and_intervals() -> None:
    two = chain_workload(1, 4, devices=[(0,), (0,)])
    forwards = TypeTraversal("fwd-first")
    front = texts(two, Rules(types=forwards))
    assert front == ["0F0 0F1 0F2 0F3 1F0 1F1 1F2 1F3 1B0 0B0 1B1 0B1 1B2 0B2 1B3 0B3"]
    deep = Rules(types=forwards, forward=StageTraversal("depth-first"), backward=StageTraversal("depth-first"))
    assert texts(two, deep) == ["0F0 1F0 0F1 1F1 0F2 1F2 0F3 1F3 1B0 1B1 1B2 1B3 0B0 0B1 0B2 0B3"]
    turns = Rules(types=forwards, forward=StageTraversal(interval=2), backward=StageTraversal("depth-first", 2))
    assert texts(two, turns) == ["0F0 0F1 1F0 1F1 0F2 0F3 1F2 1F3 1B0 1B1 0B0 0B1 1B2 1B3 0B2 0B3"]


def test_a_turn_that_can_never_come_gives_way() -> None:
    two = chain_workload(1, 3, devices=[(0,), (0,)])
    rules = Rules(forward=StageTraversal(interval=3), in_flight=2)
    # stage 1 has the turn when only stage 0 can go on
    assert texts(two, rules) == ["0F0 0F1 1F0 1B0 0B0 1F1 1B1 0B1 0F2 1F2 1B2 0B2"]


def test_limits_per_stage_and_per_device() -> None:
    assert texts(chain_workload(2, 4), Rules(in_flight="D - d"))[0] == "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"
    assert texts(chain_workload(2, 3), Rules(in_flight=(1, 3)))[0] == "0F0 0B0 0F1 0B1 0F2 0B2"
    two = chain_workload(1, 3, devices=[(0,), (0,)])
    rules = Rules(in_flight_device=2, forward=StageTraversal("depth-first"))
    assert texts(two, rules) == ["0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1 0F2 1F2 1B2 0B2"]


def test_settings_of_devices_and_submodules() -> None:
    workload = chain_workload(2, 3)
    base = Rules(types=TypeTraversal("fwd-first"))
    gentle = DeviceRules(devices=(1,), types=TypeTraversal("bwd-first"))
    assert texts(workload, base.but(devices=(gentle,)))[1] == "1F0 1B0 1F1 1B1 1F2 1B2"
    back = SubmoduleRules(blocks="block1", types=TypeTraversal("bwd-first"))
    assert texts(workload, base.but(submodules=(back,)))[1] == "1F0 1B0 1F1 1B1 1F2 1B2"
    assert texts(workload, base)[1] == "1F0 1F1 1F2 1B0 1B1 1B2"


def test_weight_gradients_follow_late_or_fill() -> None:
    workload = chain_workload(2, 3, split=(10, 10))
    assert texts(workload, Rules(in_flight="D - d"))[1] == "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2"
    late = texts(workload, Rules(types=TypeTraversal("fwd-first", wait=True), in_flight="D - d", weights_late="d"))
    assert late[1] == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    assert texts(workload, Rules(weights_late=9, weights_fill=False))[1] == "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"


def test_weight_gradients_beside_a_function_for_kinds() -> None:
    """They follow late where the function does not name them, and where the rules say it."""
    workload = chain_workload(1, 3, split=(1, 1))

    def row(kinds: str, late: int | None) -> str:
        return texts(workload, Rules(types=TypeTraversal(lambda state, device: kinds), weights_late=late))[0]

    assert row("BF", None) == row("BF", 0) == "0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2"
    assert row("BF", 1) == "0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2"
    assert row("FIW", 1) == "0F0 0F1 0F2 0I0 0I1 0W0 0I2 0W1 0W2"
    assert row("FIW", None) == "0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2"
    assert row("WBF", None) == row("BF", 0)


def test_shared_actions_are_called_for() -> None:
    rules = Rules(forward=StageTraversal("depth-first"))
    for time in ("unit", "true"):
        orders = texts(shared_workload(2, 4, lag=3), rules.but(time=time))
        shared = [[action for action in order.split() if action[0] in "03"] for order in orders]
        assert shared[0] == shared[1]  # everybody joins, in one order
    orders = texts(shared_workload(2, 4), rules)
    assert orders[0].startswith("0F0 1F0 0F1")  # device 1 is no neighbour of 0F1 and does not call for it
    assert orders[1].startswith("0F0 0F1 2F0 0F2 3F0 3B0")  # it may call for 3F0; of two calls device 0's goes first


def test_calls_go_before_what_devices_chose_for_themselves() -> None:
    workload = chain_workload(2, 2, devices=[(0,), (1,), (0, 1)])
    zero, one = texts(workload, Rules(time="true"))
    assert one == "1F0 1F1 2F0 2B0 1B0 2F1 2B1 1B1"
    assert zero == "0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1"  # 0B0 is ready when device 1 calls for 2F1


# In Python: checks and priorities of one's own -------------------------------------------------------------------


def loading(limits: Sequence[Sequence[int]]) -> Check:
    """Fig. 7 (i): a device takes no more than all its stages may have in flight together."""

    def check_loading(state: State, candidate: ReadyAction) -> bool:
        held = sum(state.in_flight(stage) for stage in state.stages_on(candidate.device))
        return candidate.kind != "F" or sum(limits[candidate.device]) > held

    return check_loading


def test_figure_7_i_a_check_of_the_loading() -> None:
    workload = chain_workload(2, 8, devices=[(0,), (1,), (0,), (1,)])
    deep = Rules(forward=StageTraversal("depth-first"))
    checked = texts(workload, deep.but(checks=(loading([[2, 1], [2, 2]]),)))
    assert checked == texts(workload, deep.but(in_flight_device=(3, 4)))
    assert checked != texts(workload, deep)


def test_figure_7_ii_a_check_of_step_numbers() -> None:
    def valid_schedule(state: State, candidate: ReadyAction) -> bool:
        """The neighbour's action was in an earlier step."""
        before = {"F": candidate.stage - 1, "B": candidate.stage + 1}[candidate.kind]
        if before not in range(2):
            return True
        step = state.step_of(candidate.kind, before, candidate.microbatch)
        return step is not None and state.now > step

    workload = chain_workload(2, 4)
    assert texts(workload, Rules(checks=(valid_schedule,))) == texts(workload, Rules())


@pytest.mark.parametrize(("devices", "microbatches"), [(2, 3), (4, 6)])
def test_functions_know_how_many_devices_and_microbatches_there_are(devices: int, microbatches: int) -> None:
    """So that one says the same as the expression of a file, for any number of them."""

    def held(state: State, action: ReadyAction) -> bool:
        assert (state.num_devices, state.num_microbatches) == (devices, microbatches)
        return action.kind != "F" or state.in_flight(action.stage) < state.num_devices - action.device

    workload = chain_workload(devices, microbatches)
    first = Rules(types=TypeTraversal("fwd-first"))
    assert texts(workload, first.but(checks=(held,))) == texts(workload, first.but(in_flight="D - d"))


def test_figure_7_iii_priorities_of_ones_own() -> None:
    def by_turns(state: State, device: int) -> Sequence[str]:
        return "BF" if state.steps(device) % 2 else "FB"

    def newest(state: State, candidates: Sequence[ReadyAction]) -> ReadyAction:
        return candidates[-1]

    one = chain_workload(1, 3)

    def as_many_as_there_are(state: State, device: int) -> Sequence[str]:
        """All forwards that are ready at the start, the backwards, then what is left: W last."""
        assert all(each.kind == "I" for each in state.ready(device, "I"))
        return "FIW" if state.now == 0 or state.ready(device, "F") else "IW"

    assert texts(one, Rules(types=TypeTraversal(by_turns))) == ["0F0 0B0 0F1 0B1 0F2 0B2"]
    split = chain_workload(1, 2, split=(10, 10))
    assert texts(split, Rules(types=TypeTraversal(as_many_as_there_are))) == ["0F0 0F1 0I0 0I1 0W0 0W1"]
    two = chain_workload(1, 2, devices=[(0,), (0,)])
    rules = Rules(types=TypeTraversal("fwd-first"), forward=StageTraversal(newest))
    assert texts(two, rules) == texts(two, rules.but(forward=StageTraversal("depth-first")))


def test_a_stage_order_that_chooses_something_else_is_refused() -> None:
    def another(state: State, candidates: Sequence[ReadyAction]) -> ReadyAction:
        return ReadyAction(0, "F", 0, 7, 7)

    with pytest.raises(
        UsageError, match=r"another chose ReadyAction.* on device 0, which is none of those it was given"
    ):
        texts(chain_workload(1, 2), Rules(forward=StageTraversal(another)))


# Shapes with shared stages ---------------------------------------------------------------------------------------


@one_in(2, "name", ["m", "mllm", "nn", "k"], first=1)
def test_shared_stages_neither_stop_nor_drift(name: str) -> None:
    """No built-in rules get stuck; the best ones' period is 1F1B+'s or less, however many micro-batches there are."""
    spans, plus = [], []
    for count in (16, 24):
        workload = shape_workload(name, 4, count)
        graph, problem = task_graph(workload), OneMicrobatch.of(workload)
        spans.append(min(run_rules(graph, rules).iteration_ns for rules in built_in_rules(workload)))
        if CLASSIC["1f1b+"].applies(problem) is None:
            plus.append(makespan(graph, CLASSIC["1f1b+"].orders(problem, graph)))
    assert spans[1] - spans[0] <= (plus[1] - plus[0] if plus else 8 * 6_000_000)


# Bad rules -----------------------------------------------------------------------------------------------------


def test_a_check_that_refuses_everything_is_named() -> None:
    def never(state: State, candidate: ReadyAction) -> bool:
        return candidate.microbatch < 1 or candidate.stage == 0

    with pytest.raises(InfeasibleError, match=r"stuck with 6 of 12 actions left; let the check") as error:
        texts(chain_workload(2, 3), Rules(checks=(never,)))
    assert "1F1 is ready, but the check never refuses it" in str(error.value)
    assert "0B1 waits for 1B1" in str(error.value)


def test_limits_that_block_everything_are_named() -> None:
    two = chain_workload(1, 3, devices=[(0,), (0,)])
    with pytest.raises(InfeasibleError, match=r"stuck with 10 of 12 actions left; raise in_flight_device:") as error:
        texts(two, Rules(in_flight_device=2))
    assert "1F0 is ready, but device 0 has its 2 micro-batches in flight" in str(error.value)
    assert "1B0 waits for 1F0" in str(error.value)


def test_a_cycle_is_named() -> None:
    workload = chain_workload(2, 2)
    graph = task_graph(workload)
    first, second = graph.offsets[0], graph.offsets[1]  # 0F0 and 1F0: now each waits for the other
    graph.successors[second].append((first, 0))
    graph.num_predecessors[first] += 1
    with pytest.raises(
        UsageError, match=r"0F0 -> 1F0 -> 0F0 wait for each other|1F0 -> 0F0 -> 1F0 wait for each other"
    ):
        schedule_by_rules(graph, Rules())


def test_an_action_that_never_becomes_ready_is_named() -> None:
    graph = task_graph(chain_workload(2, 2))
    graph.num_predecessors[graph.offsets[1] + 1] += 1  # a readiness rule that asks for more than there is
    with pytest.raises(UsageError, match="1F1 can never become ready"):
        schedule_by_rules(graph, Rules())


def test_memory_is_kept_and_its_lack_named() -> None:
    room = Rules(types=TypeTraversal("fwd-first"), fit_memory=True)
    assert texts(chain_workload(2, 4, memory_bytes=2000), room)[0] == "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"
    with pytest.raises(InfeasibleError, match=r"raise --memory.*\n.*0F0 is ready, but device 0 has no room"):
        texts(chain_workload(2, 4, memory_bytes=900), room)


def test_a_stage_keeps_its_pace() -> None:
    """One forward in two steps on device 0, so on device 1, too; backwards fill what is between."""
    paced = Rules(forward=StageTraversal(every=2))
    assert texts(chain_workload(2, 3), paced) == [
        "0F0 0F1 0B0 0F2 0B1 0B2",
        "1F0 1B0 1F1 1B1 1F2 1B2",
    ]


def test_a_pace_counts_steps() -> None:
    with pytest.raises(UsageError, match="every counts steps"):
        Rules(time="true", forward=StageTraversal(every=2))
