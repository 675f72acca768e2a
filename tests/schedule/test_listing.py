"""List scheduling: complete and within memory whenever it answers, and never stuck on a chain."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.chains import chain_workload, with_devices_memory
from builders.problems import problems
from builders.shapes import shape_workload, unit_problem
from pipeplan.examples import ShapeCosts
from pipeplan.schedule.list_scheduling import Policy, PolicySearch, in_flight_limits, list_schedule, policies
from pipeplan.schedule.steps import ListScheduling
from pipeplan.workload.bounds import strong_iteration_bound
from pipeplan.workload.memory import fits
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import TaskGraph, earliest_starts, task_graph
from support.marks import one_in, some_of

STEP = ListScheduling()
SETTINGS = STEP.swept, STEP.kept, STEP.shares
times = st.integers(1, 9)
shares = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5])


@st.composite
def rules(draw: st.DrawFn, num_devices: int) -> Policy:
    """Any setting of the switches, with or without limits of micro-batches in flight."""
    limits = st.lists(st.integers(1, 8), min_size=num_devices, max_size=num_devices).map(tuple)
    return Policy(draw(shares), draw(shares), draw(st.booleans()), draw(st.booleans()), draw(st.none() | limits))


@st.composite
def chains(draw: st.DrawFn, placements: tuple[str, ...] = ("one", "circular", "v-shape", "waves")) -> OneMicrobatch:
    """A chain of equal stages on up to four devices, one to four per device, with from just enough memory to much."""
    num_devices = draw(st.integers(1, 4))
    down = list(range(num_devices))
    groups = {"one": down, "circular": 2 * down, "v-shape": down + down[::-1], "waves": 2 * (down + down[::-1])}
    split = draw(st.none() | st.tuples(times, times))
    workload = chain_workload(
        num_devices,
        draw(st.integers(1, 9)),
        devices=[(device,) for device in groups[draw(st.sampled_from(placements))]],
        forward=draw(times),
        backward=draw(times),
        split=split,
        lag=draw(st.integers(0, 3)),
        activation_bytes=draw(st.integers(0, 3)),
        weight_grad_bytes=draw(st.integers(0, 4)) if split else 0,
        workspace_bytes=draw(st.integers(0, 2)),
    )
    free = OneMicrobatch.of(workload)
    spare = draw(st.none() | st.integers(0, 12))
    if spare is None:
        return free
    return OneMicrobatch.of(
        with_devices_memory(workload, max(free.needed_bytes(device) for device in range(free.num_devices)) + spare)
    )


def require_whole(problem: OneMicrobatch, orders: list[list[int]]) -> None:
    """Every action once, on its device, in an order that runs to its end and stays within memory."""
    count = problem.num_microbatches
    for order, operations in zip(orders, problem.on_device, strict=True):
        assert sorted(order) == [x * count + m for x in operations for m in range(count)]
    graph = task_graph(problem.workload)
    earliest_starts(graph, orders)
    assert fits(graph, orders)


@settings(max_examples=some_of(150))
@given(st.data())
def test_what_is_returned_is_complete_and_within_memory(data: st.DataObject) -> None:
    problem = data.draw(st.one_of(chains(), problems()))
    orders = list_schedule(problem, task_graph(problem.workload), data.draw(rules(problem.num_devices)))
    if orders is not None:
        require_whole(problem, orders)


@settings(max_examples=some_of(150))
@given(st.data())
def test_never_stuck_on_a_chain_that_one_micro_batch_fits(data: st.DataObject) -> None:
    """One stage per device: wherever one micro-batch after another fits, every policy finds an order."""
    problem = data.draw(chains(("one",)))
    orders = list_schedule(problem, task_graph(problem.workload), data.draw(rules(problem.num_devices)))
    assert orders is not None
    require_whole(problem, orders)


@settings(max_examples=some_of(100))
@given(st.data())
def test_never_stuck_without_limits(data: st.DataObject) -> None:
    """Several stages per device, any memory that holds everything."""
    tight = data.draw(chains())
    problem = replace(tight, capacity=(None,) * tight.num_devices)
    assert list_schedule(problem, task_graph(problem.workload), data.draw(rules(problem.num_devices))) is not None


@settings(max_examples=some_of(100))
@given(st.data())
def test_kinds_stay_in_the_order_of_micro_batches(data: st.DataObject) -> None:
    problem = data.draw(chains())
    orders = list_schedule(problem, task_graph(problem.workload), data.draw(rules(problem.num_devices))) or []
    for order, x in ((order, x) for order in orders for x in range(problem.num_operations)):
        done = [task for task in order if task // problem.num_microbatches == x]
        assert done == sorted(done)


def chain(num_devices: int = 4, num_microbatches: int = 8, *, room: int | None = None) -> OneMicrobatch:
    """F = I = W = 10; each micro-batch holds 2 bytes on each device, 1 after I."""
    return OneMicrobatch.of(
        chain_workload(
            num_devices,
            num_microbatches,
            forward=10,
            split=(10, 10),
            activation_bytes=2,
            weight_grad_bytes=1,
            memory_bytes=None if room is None else 2 * room,
        )
    )


def labels(problem: OneMicrobatch, orders: list[list[int]]) -> list[str]:
    graph = task_graph(problem.workload)
    return [" ".join(graph.label(task) for task in order) for order in orders]


class TestPolicy:
    """What each switch does, on one device of a chain."""

    def orders(self, policy: Policy, problem: OneMicrobatch | None = None) -> list[str]:
        problem = problem or chain(2, 3)
        found = list_schedule(problem, task_graph(problem.workload), policy)
        assert found is not None
        return labels(problem, found)

    def test_backward_goes_before_forward(self) -> None:
        assert self.orders(Policy())[1].startswith("1F0 1I0 1F1 1I1 1F2 1I2")

    def test_in_flight_bounds_the_forwards_ahead(self) -> None:
        assert self.orders(Policy(in_flight=(1, 1)))[0] == "0F0 0I0 0F1 0W0 0I1 0F2 0W1 0I2 0W2"

    def test_patience_decides_when_weight_gradients_fill_a_gap(self) -> None:
        """After I0 device 0 has 10 until I1 arrives: enough for W of 15 with patience 0.5, not with 1."""
        problem = OneMicrobatch.of(chain_workload(2, 2, forward=10, split=(10, 15), lag=20))
        found = [self.orders(Policy(patience=share), problem)[0] for share in (1.0, 0.5)]
        assert found == ["0F0 0F1 0I0 0I1 0W0 0W1", "0F0 0F1 0I0 0W0 0I1 0W1"]

    def test_weight_gradients_need_room_for_their_workspace(self) -> None:
        """Two micro-batches' activations fill the memory; then there were none left for any weight gradient."""
        workload = chain_workload(1, 2, split=(10, 10), activation_bytes=2, weight_grad_bytes=2, memory_bytes=4)
        *others, weight = workload.operations
        problem = OneMicrobatch.of(replace(workload, operations=(*others, replace(weight, workspace_bytes=1))))
        assert self.orders(Policy(), problem) == ["0F0 0I0 0W0 0F1 0I1 0W1"]

    @pytest.mark.parametrize("room", [1, 2, 3, 4])
    def test_memory_bounds_the_forwards_ahead(self, room: int) -> None:
        first = self.orders(Policy(), chain(4, 8, room=room))[0].split()
        assert first.index("0I0") <= room

    def test_what_several_devices_run_together_starts_once_all_are_free(self) -> None:
        problem = OneMicrobatch.of(chain_workload(2, 2, devices=[(0, 1), (0,)]))
        orders = list_schedule(problem, task_graph(problem.workload), Policy())
        assert orders is not None
        require_whole(problem, orders)


@settings(max_examples=some_of(60), deadline=None)
@given(st.data())
def test_blocks_of_all_devices_in_slots_and_at_a_pace(data: st.DataObject) -> None:
    """Complete and within memory, whatever the policy."""
    name = data.draw(st.sampled_from(["m", "mllm", "nn", "k"]))
    problem = unit_problem(name, 4, data.draw(st.integers(1, 6)), data.draw(st.integers(2, 8)))
    slot, group, pace = (
        data.draw(st.sampled_from([0, 3, 4])),
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(0, 20)),
    )
    within, expects = data.draw(st.sampled_from([0, 1, 5])), data.draw(st.sampled_from([0, 1, 3, 7]))
    policy = replace(
        data.draw(rules(problem.num_devices)),
        slot=slot,
        group=group,
        pace=pace,
        within=within,
        close=data.draw(st.sampled_from([0, 1, 2, 5])),
        expects=expects,
    )
    graph = task_graph(problem.workload)
    orders = list_schedule(problem, graph, policy)
    assert orders is not None
    require_whole(problem, orders)


def test_slots_keep_devices_in_step() -> None:
    """NN on 8 devices with room for half of the span: without slots the blocks of all devices wait for the last."""
    problem = unit_problem("nn", 8, 24, 6)
    graph = task_graph(problem.workload)

    def makespan(policy: Policy) -> int:
        orders = list_schedule(problem, graph, policy)
        assert orders is not None
        return graph.makespan(earliest_starts(graph, orders))

    policy = Policy(alternate=True)
    assert strong_iteration_bound(problem) <= makespan(replace(policy, slot=3)) <= 287 < 320 <= makespan(policy)


def length_by(problem: OneMicrobatch, graph: TaskGraph, policy: Policy) -> int:
    """The makespan by a policy, whose schedule is whole."""
    orders = list_schedule(problem, graph, policy)
    assert orders is not None
    require_whole(problem, orders)
    return graph.makespan(earliest_starts(graph, orders))


def test_devices_that_expect_what_all_of_them_run() -> None:
    """MLLM on 32 devices with room for half of the span: without it the shortest policy has 798, the best known 792."""
    problem = unit_problem("mllm", 32, 64, 24)
    graph, tuning = task_graph(problem.workload), PolicySearch(problem, 0, *SETTINGS)
    policy = next(policy for policy in (tuning.propose() for _ in range(8)) if policy.expects)
    lengths = [length_by(problem, graph, each) for each in (policy, replace(policy, expects=0))]
    assert lengths[0] <= 786 < 798 < lengths[1]


def test_micro_batches_that_never_meet_but_for_a_few_that_enter_close() -> None:
    """K on 32 devices, a quarter of the span: 12 apart is what four and three divide, memory says 10.67."""
    problem = unit_problem("k", 32, 64, 6)
    graph = task_graph(problem.workload)
    policy = PolicySearch(problem, 0, *SETTINGS, many=True).propose()
    assert (policy.within, policy.close) == (12, 8)
    lengths = [length_by(problem, graph, each) for each in (policy, replace(policy, close=0))]
    assert strong_iteration_bound(problem) <= lengths[0] <= 942 < 945 < lengths[1]
    planned = PolicySearch(problem, 0, *SETTINGS)
    assert policy in [planned.propose() for _ in range(30)]
    for room in (3, 12, None):  # 16.0 and 5.33, as far apart as they are anyway, or much less
        other = unit_problem("k", 32, 64, room)
        assert PolicySearch(other, 0, *SETTINGS, many=True).propose().close == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "room", "others", "known"), [("k", 24, 1269, 1201), ("mllm", 48, 1594, 1541)])
def test_all_by_the_clock_and_blocks_together(name: str, room: int, others: int, known: int) -> None:
    """On 64 devices with room for half of the span, the first few policies, and what was found without them."""
    problem = unit_problem(name, 64, 128, room)
    graph, tuning = task_graph(problem.workload), PolicySearch(problem, 0, *SETTINGS)
    lengths = []
    for _ in range(2):
        policy = tuning.propose()
        assert policy.clock == 4
        lengths.append(length_by(problem, graph, policy))
    assert strong_iteration_bound(problem) <= min(lengths) <= known < others


@pytest.mark.parametrize(("forward", "backward", "comm", "clock"), [(10, 30, 0, 40), (10, 30, 1, 42), (20, 20, 3, 46)])
def test_a_clock_is_the_work_of_a_device_and_a_message_there_and_back(
    forward: int, backward: int, comm: int, clock: int
) -> None:
    costs = ShapeCosts(forward, backward, shared_forward_ns=10, shared_backward_ns=10, comm_ns=comm, activation_bytes=1)
    problem = OneMicrobatch.of(shape_workload("mllm", 64, 48, costs=costs, memory=48))
    policy = PolicySearch(problem, 0, *SETTINGS).propose()
    assert policy.clock == clock
    orders = list_schedule(problem, task_graph(problem.workload), policy)
    assert orders is not None
    require_whole(problem, orders)


@pytest.mark.parametrize(
    ("name", "devices", "room"), [("k", 64, 12), ("k", 64, 48), ("k", 64, None), ("m", 64, 48), ("k", 32, 12)]
)
def test_no_clock_without_some_time_over_and_blocks_in_the_middle(name: str, devices: int, room: int | None) -> None:
    """A quarter and all of the span, and any memory; nor with blocks at the beginning alone, or on few devices."""
    tuning = PolicySearch(unit_problem(name, devices, 2 * devices, room), 0, *SETTINGS)
    assert not any(tuning.propose().clock for _ in range(8))


def test_a_pace_holds_micro_batches_back() -> None:
    """K on 16 devices with room for a quarter of the span, 32 micro-batches as far apart as memory says."""
    problem = unit_problem("k", 16, 32, 3)
    graph, tuning = task_graph(problem.workload), PolicySearch(problem, 0, *SETTINGS)
    found = []
    for _ in range(6):
        orders = list_schedule(problem, graph, tuning.propose())
        assert orders is not None
        found.append(graph.makespan(earliest_starts(graph, orders)))
    assert min(found) < found[0]


@one_in(2, "name, room, known", [("mllm", 12, 1089), ("nn", 12, 1098), ("nn", 24, 804)], first=1)
def test_in_flight_limits_that_fall_to_the_last_device(name: str, room: int, known: int) -> None:
    """On 32 devices the first few policies are shorter than what was known of these cells."""
    problem = unit_problem(name, 32, 64, room)
    graph, tuning = task_graph(problem.workload), PolicySearch(problem, 0, *SETTINGS)
    orders = [list_schedule(problem, graph, tuning.propose()) for _ in range(5)]
    found = [graph.makespan(earliest_starts(graph, each)) for each in orders if each is not None]
    assert min(found) < known


def test_micro_batches_enter_apart() -> None:
    """Where nothing else holds them back, each so long after the one before, beside the time of shared blocks."""
    problem = unit_problem("mllm", 4, 6)
    graph = task_graph(problem.workload)
    first = next(x for x in problem.order if len(problem.devices[x]) == 1)
    last = []
    for within in (0, 7):
        orders = list_schedule(problem, graph, Policy(within=within))
        assert orders is not None
        starts = earliest_starts(graph, orders)
        last.append(max(starts[task] for task in range(graph.num_tasks) if graph.operation_of[task] == first))
    assert last[0] < 5 * 7 <= last[1]


class TestPolicies:
    def test_all_settings_under_each_limit_and_no_two_alike(self) -> None:
        found = list(policies([None, (2, 1), (3, 2)]))
        assert len(set(found)) == len(found)
        assert {
            limit: len(list(group))
            for limit, group in itertools.groupby(
                sorted(found, key=lambda policy: str(policy.in_flight)), key=lambda policy: policy.in_flight
            )
        } == dict.fromkeys([None, (2, 1), (3, 2)], len(list(policies())))

    @given(chains())
    def test_limits_are_between_one_and_all_micro_batches(self, problem: OneMicrobatch) -> None:
        limits = in_flight_limits(problem)
        assert len(set(limits)) == len(limits) > 0
        for limit in limits:
            assert len(limit) == problem.num_devices
            assert all(
                1 <= later <= earlier <= problem.num_microbatches for earlier, later in itertools.pairwise(limit)
            )


def proposed(problem: OneMicrobatch, seed: int, tries: int) -> list[tuple[Policy, int | None]]:
    """The policies that are tried, with the makespan of each."""
    tuning, graph, found = PolicySearch(problem, seed, *SETTINGS), task_graph(problem.workload), []
    for _ in range(tries):
        policy = tuning.propose()
        orders = list_schedule(problem, task_graph(problem.workload), policy)
        length = (
            None if orders is None else max(map(sum, zip(earliest_starts(graph, orders), graph.durations, strict=True)))
        )
        tuning.learn(policy, length)
        found.append((policy, length))
    return found


class TestTuning:
    @pytest.mark.slow
    def test_a_seed_gives_the_same_sequence(self) -> None:
        problem = chain(4, 8, room=3)
        assert proposed(problem, 7, 100) == proposed(problem, 7, 100)

    def test_another_seed_gives_another_once_it_changes_the_best(self) -> None:
        problem = chain(4, 8, room=3)
        assert proposed(problem, 1, 100) != proposed(problem, 2, 100)

    def test_every_limit_is_tried_first(self) -> None:
        problem = chain(4, 8, room=3)
        limits = in_flight_limits(problem)
        tried = [policy.in_flight for policy, _ in proposed(problem, 0, 4 * len(limits))]
        assert list(dict.fromkeys(tried)) == limits

    def test_changed_limits_stay_between_one_and_all_micro_batches(self) -> None:
        for policy, _ in proposed(chain(3, 4, room=2), 3, 400):
            assert policy.in_flight is not None
            assert all(1 <= limit <= 4 for limit in policy.in_flight)

    def test_fruitless_counts_what_was_tried_since_the_best(self) -> None:
        tuning, seen = PolicySearch(chain(4, 8), 0, *SETTINGS), set()
        for _ in range(400):
            seen.add(policy := tuning.propose())
            tuning.learn(policy, 1000)
        before = tuning.fruitless
        for _ in range(10):
            seen.add(policy := tuning.propose())
            tuning.learn(policy, None)
        assert tuning.fruitless == before + 10 > 10
        unseen = next(policy for policy in iter(tuning.propose, None) if policy not in seen)
        tuning.learn(unseen, 999)
        assert tuning.fruitless == 0


@pytest.mark.parametrize(
    ("name", "room", "policy"),
    [
        ("mllm", 6, "falls"),
        ("mllm", 12, "falls, or expects"),
        ("k", 3, "pace 1"),
        ("k", 6, "pace 9"),
    ],
)
def test_of_very_many_actions_the_best_on_fewer_devices_comes_first(name: str, room: int, policy: str) -> None:
    problem = unit_problem(name, 16, 32, memory=room)
    firsts = []
    for expecting in (False, True):
        first = PolicySearch(problem, 0, 4, 8, (0.5, 1.0), many=True, expecting=expecting).propose()
        firsts.append("falls" if first.in_flight else "expects" if first.expects else f"pace {first.group}")
    assert ", or ".join(dict.fromkeys(firsts)) == policy
