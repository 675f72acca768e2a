"""AutoPipe: Algorithm 1 against all cuts, its simulator against ours, the search against both, the slicer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from builders.chains import chain_workload
from builders.orders import one_f_one_b
from builders.plans import plan_of
from builders.states import training_state
from pipeplan.costs import StageCost, stage_costs
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.files import Block, CostRow, Edge, Profile, Source
from pipeplan.partition.baselines import num_to_split, sliced
from pipeplan.partition.chain.autopipe import Cuts, autopipe, measured, plan_chain, timeline
from pipeplan.partition.chain.costs import Array, ChainCosts, Fitting, StageTimes
from pipeplan.partition.chain.kernel import ShortestStages
from pipeplan.partition.problem import PartitionProblem, Pricing, Way, free
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.workload import Workload
from references.replay import replay
from support.marks import some_of

TIMES = st.integers(1, 12)
BLOCKS = st.lists(st.tuples(TIMES, TIMES), min_size=2, max_size=9)
STAGES = st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=5)
TRANSFER = st.sampled_from([0, 0, 1, 3])


def chain_of(blocks: Sequence[tuple[int, int]], transfer: int = 0) -> ChainCosts:
    """Blocks of a byte each."""
    costs = [StageCost(forward, backward, state=training_state(0, 1)) for forward, backward in blocks]
    return ChainCosts.of(costs, transfer_ns=transfer)


def at_most(blocks: int, chain: ChainCosts) -> Fitting:
    """Room for so many blocks in a stage."""
    return Fitting(chain, blocks, 1)


def problem_of(
    costs: Sequence[StageCost],
    num_devices: int,
    num_microbatches: int,
    memory: int | None = None,
    all_reduce: Callable[[int, int], int] = free,
) -> PartitionProblem:
    """A chain with every number of replicas; each takes one of the micro-batches in turn, of a sample each."""
    names = [f"b{index}" for index in range(len(costs))]
    ways = [Way(count, count, 0) for count in range(1, num_devices + 1) if num_microbatches % count == 0]
    rows = {name: (cost,) for name, cost in zip(names, costs, strict=True)}
    edges = tuple(pairwise(names))
    return PartitionProblem(rows, edges, num_devices, num_microbatches, (Pricing(1),), tuple(ways), memory, all_reduce)


def stages_of(times: Sequence[tuple[int, int]], transfer: int = 0) -> StageTimes:
    return StageTimes(tuple(f for f, _ in times), tuple(b for _, b in times), transfer)


def cuts(num_blocks: int, num_stages: int) -> Iterator[Cuts]:
    for inner in combinations(range(1, num_blocks), num_stages - 1):
        yield (0, *inner)


def longest(sums: Array, begins: Cuts, num_blocks: int) -> int:
    return max(sums[end] - sums[begin] for begin, end in pairwise((*begins, num_blocks)))


def workload_of(stages: StageTimes, num_microbatches: int) -> Workload:
    """A chain with one stage per device and these times."""
    workload = chain_workload(stages.num_stages, num_microbatches, lag=stages.transfer_ns)
    times = {"F": stages.forwards, "B": stages.backwards}
    operations = tuple(replace(each, duration_ns=times[each.kind][each.stage]) for each in workload.operations)
    return replace(workload, operations=operations)


# Algorithm 1 -------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 5))
def test_balance_is_exact_for_every_prefix(times: list[int], num_stages: int) -> None:
    sums = chain_of([(time, 0) for time in times]).compute
    balance = ShortestStages.of(sums, num_stages)
    for blocks in range(1, len(times) + 1):
        for stages in range(1, min(num_stages, blocks) + 1):
            begins = balance.begins_of(blocks, stages)
            assert begins in set(cuts(blocks, stages))
            least = min(longest(sums, each, blocks) for each in cuts(blocks, stages))
            assert longest(sums, begins, blocks) == least == balance.longest[stages - 1][blocks]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 5))
def test_balance_takes_the_split_that_the_printed_loop_takes(times: list[int], num_stages: int) -> None:
    """Lines 8 to 14, with ``k`` going up and only what is better replacing what is there."""
    assume(num_stages <= len(times))
    sums, far = chain_of([(time, 0) for time in times]).compute, 10**9
    table = [[0] + [far] * num_stages, *([far] * (num_stages + 1) for _ in times)]
    chosen: dict[tuple[int, int], int] = {}
    for i in range(1, len(times) + 1):
        for j in range(1, min(num_stages, i) + 1):
            for k in range(i):
                value = max(table[k][j - 1], sums[i] - sums[k])
                if value < table[i][j]:
                    table[i][j], chosen[i, j] = value, k
    begins, end = [], len(times)
    for stages in range(num_stages, 0, -1):
        end = chosen[end, stages]
        begins.append(end)
    assert ShortestStages.of(sums, num_stages).begins_of(len(times), num_stages) == tuple(reversed(begins))


# The simulator -----------------------------------------------------------------------------------------------------


@given(STAGES, TRANSFER, st.integers(1, 9))
def test_simulator_agrees_with_simulating_the_plan(
    times: list[tuple[int, int]], transfer: int, num_microbatches: int
) -> None:
    found = timeline(stages_of(times, transfer), num_microbatches)
    workload = workload_of(found.stages, num_microbatches)
    orders = one_f_one_b(workload)
    spans = {entry: end for entry, (_, end) in replay(workload, orders).items()}
    assert {(f"{stage}{kind}", index): end for (kind, stage, index), end in found.ends.items()} == spans
    assert simulate(plan_of(workload, orders)).rates.makespan_ns == found.iteration_ns


@given(STAGES, TRANSFER, st.integers(1, 9))
def test_critical_path_is_one_without_gaps(times: list[tuple[int, int]], transfer: int, num_microbatches: int) -> None:
    """From time 0 to the end, each step starting when the one before ends, or a transfer later on another stage."""
    stages = stages_of(times, transfer)
    found = timeline(stages, num_microbatches)
    path = found.critical_path()
    lasting = {"F": stages.forwards, "B": stages.backwards}
    assert found.ends[path[0]] == lasting["F"][0]
    assert found.ends[path[-1]] == found.iteration_ns
    for (_, before, _), (kind, stage, _), first, second in zip(path, path[1:], path, path[1:], strict=False):
        waiting = transfer if before != stage else 0
        assert found.ends[second] == found.ends[first] + waiting + lasting[kind][stage]
    assert found.master_stage() in {stage for _, stage, _ in path}


def test_master_stage_is_the_heaviest_and_of_equals_the_last() -> None:
    assert timeline(stages_of([(1, 2), (2, 4), (1, 2), (1, 2)]), 8).master_stage() == 1
    assert timeline(stages_of([(1, 2)] * 4), 8).master_stage() == 3


def test_iteration_is_shorter_the_earlier_the_master_is() -> None:
    """Fig. 7(a) and (b): the same loads, but for two that change places."""
    light, heavy = (2, 4), (3, 6)
    times = [
        timeline(stages_of([heavy if stage == master else light for stage in range(4)]), 8).iteration_ns
        for master in range(4)
    ]
    assert times == sorted(times)
    assert times[0] < times[3]


@settings(max_examples=some_of(300))
@given(STAGES, TRANSFER, st.integers(1, 90))
def test_a_steady_phase_that_repeats_itself_need_not_be_run(
    times: list[tuple[int, int]], transfer: int, num_microbatches: int
) -> None:
    stages = stages_of(times, transfer)
    found, whole = measured(stages, num_microbatches), timeline(stages, num_microbatches)
    assert found.iteration_ns == whole.iteration_ns
    if not transfer:
        assert found.master_stage == whole.master_stage()


def test_many_micro_batches_take_no_more_steps_than_some() -> None:
    stages = stages_of([(3, 5), (4, 7), (2, 9), (1, 3)])
    assert measured(stages, 10**6).num_steps == measured(stages, 100).num_steps < 1_000
    assert measured(stages, 10**6).iteration_ns - measured(stages, 10**6 - 1).iteration_ns == 11


# The search --------------------------------------------------------------------------------------------------------


@given(BLOCKS, st.integers(1, 4), st.integers(1, 8), TRANSFER)
def test_search_lies_between_the_best_cut_and_its_start(
    blocks: list[tuple[int, int]], num_stages: int, num_microbatches: int, transfer: int
) -> None:
    assume(num_stages <= len(blocks))
    loads = chain_of(blocks, transfer)
    times = {each: timeline(loads.stages(each), num_microbatches) for each in cuts(len(blocks), num_stages)}
    start = ShortestStages.of(loads.compute, num_stages).begins_of(len(blocks), num_stages)
    found = plan_chain(loads, num_stages, num_microbatches)
    assert found.start_ns == times[start].iteration_ns
    assert min(each.iteration_ns for each in times.values()) <= found.iteration_ns <= found.start_ns
    assert found.iteration_ns == times[found.begins].iteration_ns
    assert found.master_stage == times[found.begins].master_stage()


@given(BLOCKS, st.integers(2, 4), st.integers(1, 8), st.integers(2, 9))
def test_no_single_border_can_be_moved_for_the_better(
    blocks: list[tuple[int, int]], num_stages: int, num_microbatches: int, most: int
) -> None:
    """What the paper's search leaves is polished away, as far as it fits."""
    assume(num_stages <= len(blocks) <= num_stages * most)
    loads, count = chain_of(blocks), len(blocks)
    found = plan_chain(loads, num_stages, num_microbatches, at_most(most, loads))
    for each in cuts(count, num_stages):
        moved = sum(abs(there - here) for there, here in zip(each, found.begins, strict=True))
        if moved == 1 and max(end - begin for begin, end in pairwise((*each, count))) <= most:
            assert timeline(loads.stages(each), num_microbatches).iteration_ns >= found.iteration_ns


@given(BLOCKS, st.integers(2, 4), st.integers(1, 8), st.integers(1, 5))
def test_search_keeps_to_what_fits(
    blocks: list[tuple[int, int]], num_stages: int, num_microbatches: int, most: int
) -> None:
    assume(num_stages <= len(blocks))
    loads = chain_of(blocks)
    fits = at_most(most, loads)
    if num_stages * most < len(blocks):
        with pytest.raises(InfeasibleError, match="no cut of"):
            plan_chain(loads, num_stages, num_microbatches, fits)
    else:
        found = plan_chain(loads, num_stages, num_microbatches, fits)
        assert all(end - begin <= most for begin, end in pairwise((*found.begins, len(blocks))))


def test_search_moves_load_forward() -> None:
    """The balanced split leaves the heavy stage last; a cut with an earlier master ends sooner."""
    loads = chain_of([(2, 4)] * 9)
    found = plan_chain(loads, 4, 8)
    sizes = [end - begin for begin, end in pairwise((*found.begins, 9))]
    assert found.iteration_ns < found.start_ns
    assert sizes == [3, 2, 2, 2]


def test_depth_with_little_work_to_share_is_one() -> None:
    """With many micro-batches and room for everything, replicas have no bubbles: the paper's Table III."""
    costs = [StageCost(2, 4, state=training_state(1))] * 8

    def depth(memory: int | None = None, all_reduce: Callable[[int, int], int] = free) -> tuple[int, int, int]:
        found = next(autopipe(problem_of(costs, 4, 16, memory, all_reduce)))
        return len(found.placement.stages), found.placement.stages[0].replicas, found.value_ns

    assert depth() == (1, 4, 4 * 48)
    assert depth(memory=8)[:2] == (2, 2)
    assert depth(all_reduce=lambda size, replicas: 10_000)[:2] == (4, 1)
    with pytest.raises(InfeasibleError, match="pipeline depth"):
        depth(memory=0)


@given(BLOCKS, st.sampled_from([1, 2, 3, 4, 6, 8]), st.sampled_from([4, 12, 24, 48]), st.integers(1, 9))
def test_depths_left_out_are_no_better(
    blocks: list[tuple[int, int]], num_devices: int, num_microbatches: int, most: int
) -> None:
    costs = [StageCost(forward, backward, state=training_state(0, 1)) for forward, backward in blocks]
    loads, found = ChainCosts.of(costs), []
    for stages in range(1, min(num_devices, len(blocks)) + 1):
        replicas = num_devices // stages
        if num_devices % stages or num_microbatches % replicas or stages * most < len(blocks):
            continue
        each = plan_chain(loads, stages, num_microbatches // replicas, at_most(most, loads))
        found.append((each.iteration_ns + 5 * (replicas - 1), stages, each.begins))
    if found:
        problem = problem_of(costs, num_devices, num_microbatches, most, lambda size, replicas: 5 * (replicas - 1))
        planned = next(autopipe(problem))
        begins = tuple(int(stage.blocks[0][1:]) for stage in planned.placement.stages)
        assert (planned.value_ns, len(begins), begins) == min(found)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(0, 1), (3, 1), (1, 0)])
def test_questions_that_make_no_sense_are_refused(num_stages: int, num_microbatches: int) -> None:
    with pytest.raises(UsageError, match="cannot be cut"):
        plan_chain(chain_of([(1, 1)] * 2), num_stages, num_microbatches)


# The slicer --------------------------------------------------------------------------------------------------------


@given(STAGES, TRANSFER, st.integers(1, 9))
def test_nothing_sliced_is_1f1b(times: list[tuple[int, int]], transfer: int, num_microbatches: int) -> None:
    stages = stages_of(times, transfer)
    found, whole = sliced(stages, num_microbatches, 0), timeline(stages, num_microbatches)
    assert (found.ends, found.startup_ns, found.iteration_ns) == (whole.ends, whole.startup_ns, whole.iteration_ns)


EVEN_STAGES = st.lists(st.tuples(TIMES.map(lambda time: 2 * time), TIMES), min_size=2, max_size=6)


@given(EVEN_STAGES, st.sampled_from([0, 2]), st.integers(1, 9))
def test_startup_is_that_of_micro_batches_of_half_the_size(
    times: list[tuple[int, int]], transfer: int, num_microbatches: int
) -> None:
    """Until the last stage starts, a sliced pipeline is one of half micro-batches; so it starts in half the time."""
    stages = stages_of(times, transfer)
    found = sliced(stages, num_microbatches, num_to_split(stages))
    half = StageTimes(tuple(forward // 2 for forward in stages.forwards), stages.backwards, transfer // 2)
    workload = workload_of(half, 2 * num_microbatches)
    spans = replay(workload, one_f_one_b(workload))
    assert found.startup_ns == spans[f"{stages.num_stages - 1}F", 0][0]
    assert 2 * found.startup_ns == timeline(stages, num_microbatches).startup_ns


@given(EVEN_STAGES, st.sampled_from([0, 2]), st.integers(1, 9))
def test_splitting_never_takes_longer(times: list[tuple[int, int]], transfer: int, num_microbatches: int) -> None:
    """With transfers that take no stage's time; nor does a stage start anything later that it did before."""
    stages = stages_of(times, transfer)
    before = sliced(stages, num_microbatches, 0)
    for num_split in range(1, stages.num_stages + 1):
        found = sliced(stages, num_microbatches, num_split)
        assert all(found.ends[step] <= before.ends[step] for step in before.ends)
        before = found


@pytest.mark.parametrize("transfer", [0, 2])
@pytest.mark.parametrize("num_stages", range(2, 17))
def test_algorithm_2_splits_just_enough_on_balanced_stages(num_stages: int, transfer: int) -> None:
    """One less takes longer, one more no less time: what the printed stop test, taken by its word, does not give."""
    stages = stages_of([(20, 40)] * num_stages, transfer)
    enough = num_to_split(stages)
    times = [sliced(stages, 2 * num_stages, split).iteration_ns for split in range(num_stages + 1)]
    assert times[enough] == min(times)
    assert times[enough - 1] > times[enough]


def test_a_single_stage_has_nothing_to_split() -> None:
    assert num_to_split(stages_of([(2, 4)])) == 0


BALANCED = st.integers(2, 7).flatmap(
    lambda count: st.lists(st.tuples(st.integers(8, 12), st.integers(-1, 3)), min_size=count, max_size=count)
)


@settings(max_examples=some_of(200))
@given(BALANCED, st.integers(0, 4), st.integers(0, 2))
def test_algorithm_2_is_near_the_best_on_nearly_balanced_stages(
    times: list[tuple[int, int]], more: int, transfer: int
) -> None:
    """It looks at one micro-batch, not at all that follow: what it leaves is less than one half forward."""
    stages = stages_of([(forward, 2 * forward + extra) for forward, extra in times], transfer)
    number = stages.num_stages + more
    found = [sliced(stages, number, split).iteration_ns for split in range(stages.num_stages + 1)]
    assert found[num_to_split(stages)] <= min(found) + max(stages.forwards) // 2


# Memory ------------------------------------------------------------------------------------------------------------


def test_first_stages_hold_more_micro_batches() -> None:
    """Of four equal stages the first holds four micro-batches and the last one, but never more than there are."""
    costs = [StageCost(1, 1, None, None, 10, 0, 3, training_state(7, 14))] * 4
    chain = ChainCosts.of(costs)
    needs = Fitting(chain, 71, 8).needs
    assert [needs(4, stage, stage, stage + 1) for stage in range(4)] == [71, 61, 51, 41]
    assert Fitting(chain, 71, 2).needs(4, 0, 0, 1) == 51
    assert Fitting(chain, 71, 8).fits(4, 0, 0, 1)
    assert not Fitting(chain, 70, 8).fits(4, 0, 0, 1)


def branching(sizes: Sequence[tuple[int, int]]) -> Profile:
    """Blocks of these (activations beyond the inputs, workspace), all of which take what the first sends; its gradient
    only every second one gives."""
    blocks = tuple(
        Block(
            id=f"b{index}",
            operator="x",
            parameter_bytes=index,
            optimizer_bytes=3,
            costs=(
                CostRow(
                    microbatch_size=2,
                    forward_ns=1,
                    backward_ns=2,
                    activation_bytes=40 + activation,
                    workspace_bytes=workspace,
                ),
            ),
        )
        for index, (activation, workspace) in enumerate(sizes)
    )
    chain = [Edge(source=f"b{end - 1}", target=f"b{end}", bytes_per_sample=5) for end in range(1, len(blocks))]
    fan = [
        Edge(source="b0", target=f"b{end}", bytes_per_sample=7, tensor="t", gradient=end % 2 == 0)
        for end in range(2, len(blocks))
    ]
    return Profile(name="p", source=Source(method="literature"), blocks=blocks, edges=(*chain, *fan))


def chain_of_profile(profile: Profile, recompute: bool = False) -> ChainCosts:
    """In micro-batches of two samples."""
    problem = PartitionProblem.of(profile, 1, 2, microbatch_sizes=[2], recompute=[recompute])
    return ChainCosts.of([problem.costs[block][0] for block in problem.order], problem.repeats[0])


SIZES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30)), min_size=2, max_size=8)


@given(SIZES, st.booleans())
def test_what_several_blocks_of_a_stage_take_counts_once(sizes: list[tuple[int, int]], recompute: bool) -> None:
    profile = branching(sizes)
    order = profile.topological_order()
    needs = Fitting(chain_of_profile(profile, recompute), 0, 8).needs
    for begin in range(len(order)):
        for end in range(begin + 1, len(order) + 1):
            cost = stage_costs(profile, order[begin:end], 2, recompute=recompute)
            static = cost.static_bytes
            for stage in range(3):
                held = (3 - stage) * cost.activation_bytes
                assert needs(3, stage, begin, end) == static + held + cost.workspace_bytes


@given(SIZES, st.integers(1, 4), st.integers(1, 8))
def test_least_memory_is_that_of_the_roomiest_cut(
    sizes: list[tuple[int, int]], num_stages: int, num_microbatches: int
) -> None:
    assume(num_stages <= len(sizes))
    profile, count = branching(sizes), len(sizes)
    loads = chain_of_profile(profile)
    needs = Fitting(loads, 0, num_microbatches).needs
    least = min(
        max(needs(num_stages, stage, *each) for stage, each in enumerate(pairwise((*begins, count))))
        for begins in cuts(count, num_stages)
    )
    assert Fitting(loads, least, num_microbatches).any_cut(num_stages)
    assert plan_chain(loads, num_stages, 4, Fitting(loads, least, num_microbatches)).begins
    with pytest.raises(InfeasibleError, match="no cut of"):
        plan_chain(loads, num_stages, 4, Fitting(loads, least - 1, num_microbatches))


def test_no_depth_fits_into_less_than_the_deepest_needs() -> None:
    """Eight micro-batches on four devices: of one stage each replica has two, of two it has four."""
    costs = [StageCost(1, 1, None, None, 10, 0, 0, training_state(7, 14))] * 4
    assert len(next(autopipe(problem_of(costs, 4, 8, 68))).placement.stages) == 4
    with pytest.raises(InfeasibleError, match="pipeline depth"):
        next(autopipe(problem_of(costs, 4, 8, 67)))
