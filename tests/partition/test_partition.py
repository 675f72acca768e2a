"""Balanced cuts: exact against trying every cut, under memory, and what is said when none fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, combinations_with_replacement

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from builders import profiles
from builders.states import training_state
from pipeplan.costs import StageCost
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.files import Block, CostRow, Placement, Profile, Source
from pipeplan.partition.chain import kernel as chain_kernel
from pipeplan.partition.chain import rebalance
from pipeplan.partition.chain.costs import Chain, Held
from pipeplan.partition.chain.kernel import balanced_split, least_split
from pipeplan.partition.chain.rebalance import least_short, levelled, shortest_run
from pipeplan.partition.placement import place
from pipeplan.partition.strategies import STRATEGIES
from references.split import slow_split
from support.marks import slow_but, some_of

TIMES = st.sampled_from([0, 1, 1, 2, 3, 5, 8, 30])
SIZES = st.integers(0, 6)
CROWDED = [("v-shape", 2, 2), ("v-shape", 3, 2), ("v-shape", 2, 3), ("circular", 2, 2), ("circular", 3, 2)]


def profile_of(
    times: Sequence[int],
    *,
    parameters: Sequence[int] | None = None,
    activations: Sequence[int] | None = None,
    workspaces: Sequence[int] | None = None,
    edges: Sequence[tuple[int, int]] | None = None,
) -> Profile:
    """Blocks b0, b1, ... with these forward times; a chain unless edges are given."""
    zeros = [0] * len(times)
    rows = [
        CostRow(microbatch_size=1, forward_ns=time, backward_ns=0, activation_bytes=held, workspace_bytes=workspace)
        for time, held, workspace in zip(times, activations or zeros, workspaces or zeros, strict=True)
    ]
    return profiles.profile_of(rows, edges, parameters=parameters)


def chain_of(
    blocks: Sequence[tuple[int, int, int, int]], devices: Sequence[int], memory: Sequence[int | None]
) -> Chain:
    """Blocks as (time, parameters, activations, workspace)."""
    costs = [StageCost(time, 0, None, None, held, 0, work, training_state(size)) for time, size, held, work in blocks]
    return Chain.of(costs, devices, memory)


def cuts(num_blocks: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, num_blocks), num_stages - 1):
        yield (0, *inner)


def pieces(values: Sequence[int], begins: Sequence[int]) -> list[Sequence[int]]:
    return [values[begin:end] for begin, end in zip(begins, [*begins[1:], len(values)], strict=True)]


def device_loads(times: Sequence[int], begins: Sequence[int], devices: Sequence[int]) -> list[int]:
    loads = [0] * (max(devices) + 1)
    for part, device in zip(pieces(times, begins), devices, strict=True):
        loads[device] += sum(part)
    return loads


def time_of_run(times: Sequence[int], begins: Sequence[int], devices: Sequence[int]) -> int:
    """Of four micro-batches for each of many devices, divided by the devices."""
    return 4 * max(device_loads(times, begins, devices)) + max(sum(part) for part in pieces(times, begins))


def device_bytes(
    blocks: Sequence[tuple[int, int, int, int]], begins: Sequence[int], devices: Sequence[int], device: int
) -> int:
    """Peak of a device when one micro-batch goes through, action by action."""
    mine = [part for part, where in zip(pieces(range(len(blocks)), begins), devices, strict=True) if where == device]
    static = sum(2 * blocks[index][1] for part in mine for index in part)
    held = peak = 0
    for part in mine:
        held += sum(blocks[index][2] for index in part)
        peak = max(peak, held + max(blocks[index][3] for index in part))
    return static + peak


# The split ---------------------------------------------------------------------------------------------------------


@given(st.lists(TIMES, min_size=1, max_size=10), st.integers(1, 5))
def test_split_is_exact(times: list[int], num_stages: int) -> None:
    assume(num_stages <= len(times))
    begins = balanced_split(times, num_stages)
    assert begins is not None
    assert begins in set(cuts(len(times), num_stages))

    def value(each: Sequence[int]) -> tuple[int, int]:
        sums = [sum(part) for part in pieces(times, each)]
        return max(sums), sum(time * time for time in sums)

    assert value(begins) == min(value(each) for each in cuts(len(times), num_stages))


@given(st.lists(st.tuples(TIMES, SIZES), min_size=1, max_size=9), st.lists(st.integers(0, 12), min_size=1, max_size=4))
def test_split_under_memory_is_exact(blocks: list[tuple[int, int]], limits: list[int]) -> None:
    assume(len(limits) <= len(blocks))
    times, sizes = [time for time, _ in blocks], [size for _, size in blocks]
    sums, held = (np.array([0, *accumulate(values)]) for values in (times, sizes))
    begins = least_split(
        lambda stage, begins, ends: sums[ends] - sums[begins],
        len(blocks),
        range(len(limits)),
        lambda stage, begins, ends: held[ends] - held[begins] <= limits[stage],
    )
    fitting = [
        [sum(part) for part in pieces(times, each)]
        for each in cuts(len(times), len(limits))
        if all(sum(part) <= limit for part, limit in zip(pieces(sizes, each), limits, strict=True))
    ]
    if not fitting:
        assert begins is None
        return
    assert begins is not None
    assert all(sum(part) <= limit for part, limit in zip(pieces(sizes, begins), limits, strict=True))
    found = [sum(part) for part in pieces(times, begins)]
    assert (max(found), sum(time * time for time in found)) == min(
        (max(each), sum(time * time for time in each)) for each in fitting
    )


def test_no_split_into_more_stages_than_blocks() -> None:
    assert balanced_split([1, 2], 3) is None


def test_squares_larger_than_a_float_stay_exact() -> None:
    """Both cuts of the first three blocks are under the longest stage; their squares differ by 4 in 10^30."""
    big = 10**15
    times = [big, 1, big - 2, 2 * big]
    squares = [sum(sum(part) ** 2 for part in pieces(times, each)) for each in ((0, 1, 3), (0, 2, 3))]
    assert squares[1] - squares[0] > 0
    assert float(squares[0]) == float(squares[1])
    assert balanced_split(times, 3) == (0, 1, 3)
    assert balanced_split([big - 2, 1, big, 2 * big], 3) == (0, 2, 3)


def test_least_split_takes_any_cost() -> None:
    """Two blocks cost more together than the sum; the heavier stage index is dearer."""
    begins = least_split(lambda stage, begin, end: (stage + 1) * (end - begin) ** 2, 6, range(2))
    assert begins == (0, 4)  # 16 and 8; (0, 3) costs 9 and 18


@given(
    st.lists(st.tuples(TIMES, SIZES, SIZES, SIZES), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 2), st.integers(5, 90)), min_size=1, max_size=5),
    st.integers(0, 30),
)
def test_split_is_that_of_the_plain_programme(
    blocks: list[tuple[int, int, int, int]], devices: list[tuple[int, int]], least: int
) -> None:
    """Also which of equal ones; whatever stages cost apart from their blocks, and whichever are of one kind."""
    chain = chain_of(blocks, [0] * len(devices), [None])
    kinds = list(dict.fromkeys(devices))

    def cost(stage: int, begin: int, end: int) -> int:
        return max(least, devices[stage][0] + chain.time(begin, end))

    def fits(stage: int, begin: int, end: int) -> bool:
        return chain.bytes_of([(begin, end)]) <= devices[stage][1]

    found = least_split(
        lambda kind, begins, ends: np.maximum(least, kinds[kind][0] + chain.costs.time(begins, ends)),
        len(blocks),
        [kinds.index(device) for device in devices],
        lambda kind, begins, ends: chain.bytes_between(Held(), begins, ends, Held()) <= kinds[kind][1],
    )
    assert found == slow_split(cost, len(blocks), len(devices), fits)


def test_ranges_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [100 + 37 * index % 61 for index in range(50)]
    whole = balanced_split(times, 6)
    monkeypatch.setattr(chain_kernel, "MOST_RANGES", 100)
    assert balanced_split(times, 6) == whole


@given(
    st.lists(st.tuples(TIMES, SIZES, SIZES, SIZES), min_size=3, max_size=12),
    st.lists(st.integers(0, 12), min_size=6, max_size=6),
)
def test_bytes_of_many_ranges_are_those_of_each(blocks: list[tuple[int, int, int, int]], drawn: list[int]) -> None:
    """Between stages of the same device before and after, or without any."""
    chain = chain_of(blocks, [0], [None])
    bounds = sorted(bound % (len(blocks) + 1) for bound in drawn)
    before, own, after = zip(bounds[::2], bounds[1::2], strict=True)
    assume(own[0] < own[1])
    others = [[each] if each[0] < each[1] else [] for each in (before, after)]
    many = chain.bytes_between(chain.held(others[0]), np.array(own[:1]), np.array(own[1:]), chain.held(others[1]))
    assert many.tolist() == [chain.bytes_of([*others[0], own, *others[1]])]


def test_four_hundred_blocks_in_32_stages() -> None:
    times = [100 + 37 * index % 61 for index in range(400)]
    begins = balanced_split(times, 32)
    assert begins is not None
    longest = max(sum(part) for part in pieces(times, begins))
    assert -(-sum(times) // 32) <= longest <= -(-sum(times) // 32) + max(times)


# Devices with several stages ---------------------------------------------------------------------------------------


@slow_but("strategy, num_devices, chunks", CROWDED, lambda case: case != ("circular", 3, 2))
@given(times=st.lists(TIMES, min_size=6, max_size=10))
@settings(max_examples=some_of(20))
def test_run_is_shortest(strategy: str, num_devices: int, chunks: int, times: list[int]) -> None:
    devices = STRATEGIES[strategy].routes(num_devices, chunks)[0]
    assume(len(times) >= len(devices))
    placed = place(profile_of(times), strategy, num_devices, chunks=chunks, microbatch_size=1)
    least = min(time_of_run(times, each, devices) for each in cuts(len(times), len(devices)))
    assert time_of_run(times, begins_of(placed), devices) == least


@slow_but("strategy, num_devices, chunks", CROWDED, lambda case: case != ("circular", 3, 2))
@given(
    blocks=st.lists(st.tuples(TIMES, SIZES, SIZES, SIZES), min_size=6, max_size=9),
    limits=st.lists(st.integers(5, 80) | st.none(), min_size=3, max_size=3),
)
@settings(max_examples=some_of(20))
def test_run_is_shortest_under_memory(
    strategy: str,
    num_devices: int,
    chunks: int,
    blocks: list[tuple[int, int, int, int]],
    limits: list[int | None],
) -> None:
    devices, memory = STRATEGIES[strategy].routes(num_devices, chunks)[0], limits[:num_devices]
    assume(len(blocks) >= len(devices))
    times, parameters, activations, workspaces = ([block[part] for block in blocks] for part in range(4))
    profile = profile_of(times, parameters=parameters, activations=activations, workspaces=workspaces)

    def fits(begins: Sequence[int]) -> bool:
        return all(
            limit is None or device_bytes(blocks, begins, devices, device) <= limit
            for device, limit in enumerate(memory)
        )

    fitting = [time_of_run(times, each, devices) for each in cuts(len(times), len(devices)) if fits(each)]
    try:
        placed = place(profile, strategy, num_devices, chunks=chunks, microbatch_size=1, memory_bytes=memory)
    except InfeasibleError:
        assert not fitting
        return
    assert fits(begins_of(placed))
    assert time_of_run(times, begins_of(placed), devices) == min(fitting)


@slow_but("strategy, num_devices, chunks", CROWDED, lambda case: case != ("circular", 3, 2))
@given(times=st.lists(TIMES, min_size=6, max_size=14))
@settings(max_examples=some_of(15))
def test_levelling_never_makes_a_run_longer(strategy: str, num_devices: int, chunks: int, times: list[int]) -> None:
    devices = STRATEGIES[strategy].routes(num_devices, chunks)[0]
    assume(len(times) >= len(devices))
    begins = balanced_split(times, len(devices))
    assert begins is not None
    after = levelled(chain_of([(time, 0, 0, 0) for time in times], devices, [None] * num_devices), begins)
    assert time_of_run(times, after, devices) <= time_of_run(times, begins, devices)
    assert after in set(cuts(len(times), len(devices)))


def test_the_exact_search_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = chain_of(
        [(5 + index % 7, 0, 0, 0) for index in range(24)], STRATEGIES["v-shape"].routes(4, 2)[0], [None] * 4
    )
    assert shortest_run(chain, 10**6) is not None
    monkeypatch.setattr(rebalance, "MAX_REBALANCED", 10)
    assert shortest_run(chain, 10**6) is None


@pytest.mark.parametrize("at_once", [1, 100])
def test_few_choices_at_once_find_the_same(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of many states are made a part at a time; where those of a single one are too many it gives up."""
    devices, costs = STRATEGIES["circular"].routes(3, 3)[0], [(5 + index % 7, 0, 9, 0) for index in range(16)]
    chain = chain_of(costs, devices, [60, None, 60])
    found = shortest_run(chain, 10**6)
    assert found is not None
    monkeypatch.setattr(rebalance, "CHOICES_AT_ONCE", at_once)
    assert shortest_run(chain, 10**6) == (None if at_once == 1 else found)


@given(st.lists(st.integers(0, 9), min_size=4, max_size=30), st.integers(1, 600), st.integers(1, 200))
def test_longest_stages_to_try_are_times_of_stages_however_many_ranges_there_are(
    times: list[int], below: int, most: int
) -> None:
    """All of them where there are few; of more only some, but never what a stage cannot take."""
    chain = chain_of([(time, 0, 0, 0) for time in times], STRATEGIES["v-shape"].routes(2, 2)[0], [None] * 2)
    even = balanced_split(times, 4)
    assert even is not None
    sums, limit = [0, *accumulate(times)], below - rebalance.PER_DEVICE * -(-sum(times) // 2)
    possible = {high - low for low, high in combinations_with_replacement(sums, 2)}
    possible = {time for time in possible if chain.longest(even) <= time < limit}
    every = rebalance._lengths(chain, below)
    assert every == sorted(every, reverse=True)
    assert set(every) == possible if len(possible) <= rebalance.MOST_LENGTHS else set(every) < possible
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rebalance, "MOST_LENGTH_RANGES", most)
        assert set(rebalance._lengths(chain, below)) <= possible


def test_nothing_is_below_the_average() -> None:
    """Two devices of two stages, each of two blocks of 3 ns: 12 for a device, 6 for a stage."""
    chain = chain_of([(3, 0, 0, 0)] * 8, STRATEGIES["v-shape"].routes(2, 2)[0], [None] * 2)
    assert shortest_run(chain, 4 * 12 + 6 + 1) == (0, 2, 4, 6)
    assert shortest_run(chain, 4 * 12 + 6) is None


def test_chunks_stay_even_where_hardly_anything_is_gained() -> None:
    """A small block before many equal ones: a chunk of it alone would level devices, and make the pipeline's ramp long.

    So with the 9.7B CLIP model of FlexPipe on few devices.
    """
    times = [36, *[826, 1551] * 32, 67]
    for num_devices in (3, 6, 7):
        begins = begins_of(place(profile_of(times), "circular", num_devices, microbatch_size=1))
        stages = [sum(part) for part in pieces(times, begins)]
        even = balanced_split(times, 2 * num_devices)
        assert even is not None
        assert max(stages) <= max(sum(part) for part in pieces(times, even)) + 67
        loads = device_loads(times, begins, STRATEGIES["circular"].routes(num_devices, 2)[0])
        assert max(loads) < 1.03 * sum(times) / num_devices


@given(
    st.lists(st.tuples(st.just(0), SIZES, SIZES, SIZES), min_size=3, max_size=9),
    st.lists(st.integers(0, 40), min_size=3, max_size=3),
)
def test_roomiest_misses_least(blocks: list[tuple[int, int, int, int]], limits: list[int]) -> None:
    chain = chain_of(blocks, [0, 1, 2], limits)

    def shortage(begins: Sequence[int]) -> int:
        return max(device_bytes(blocks, begins, [0, 1, 2], device) - limits[device] for device in range(3))

    assert shortage(least_short(chain)) == min(shortage(each) for each in cuts(len(blocks), 3))


# Placements --------------------------------------------------------------------------------------------------------


def begins_of(placed: Placement) -> tuple[int, ...]:
    """First block of each stage, after the blocks turned out to be all in order."""
    order = [block for stage in placed.stages for block in stage.blocks]
    assert order == [f"b{index}" for index in range(len(order))]
    return tuple(order.index(stage.blocks[0]) for stage in placed.stages)


def test_stages_of_the_strategies() -> None:
    profile = profile_of([1] * 12)
    expected = {
        ("one-to-one", None): [0, 1, 2],
        ("circular", None): [0, 1, 2, 0, 1, 2],
        ("circular", 3): [0, 1, 2] * 3,
        ("circular", 1): [0, 1, 2],
        ("v-shape", None): [0, 1, 2, 2, 1, 0],
        ("v-shape", 3): [0, 1, 2, 2, 1, 0, 0, 1, 2],
        ("v-shape", 1): [0, 1, 2],
    }
    for (strategy, chunks), devices in expected.items():
        placed = place(profile, strategy, 3, chunks=chunks, microbatch_size=1)
        profile.check_placement(placed)
        assert (placed.strategy, placed.num_devices) == (strategy, 3)
        assert [stage.devices for stage in placed.stages] == [(device,) for device in devices]
        assert device_loads([1] * 12, begins_of(placed), devices) == [4, 4, 4]


BOTH_WAYS = {
    ("bidirectional", None): ([0, 1, 2, 3], [3, 2, 1, 0]),
    ("bidirectional-v-shape", None): ([0, 1, 2, 3, 3, 2, 1, 0], [3, 2, 1, 0, 0, 1, 2, 3]),
    ("bidirectional-v-shape", 3): ([0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3], [3, 2, 1, 0, 0, 1, 2, 3, 3, 2, 1, 0]),
}
"""Stages' devices: Chimera (SC'21), Fig. 2; and BitPipe (2024), Fig. 4, with V-shaped chunks."""


@pytest.mark.parametrize(("strategy", "chunks"), BOTH_WAYS)
def test_two_ways_have_a_copy_of_every_block_each(strategy: str, chunks: int | None) -> None:
    profile = profile_of([1] * 12)
    placed = place(profile, strategy, 4, chunks=chunks, microbatch_size=1)
    profile.check_placement(placed)
    assert placed.num_routes == 2
    for route, devices in enumerate(BOTH_WAYS[strategy, chunks]):
        stages = [stage for stage in placed.stages if stage.route == route]
        assert [stage.devices for stage in stages] == [(device,) for device in devices]


def test_a_heavy_head_is_balanced_over_devices() -> None:
    """The last block, on device 0 of a v-shape, is as long as four others, so device 0 gets little besides."""
    placed = place(profile_of([1] * 12 + [4]), "v-shape", 4, microbatch_size=1)
    devices = [stage.devices[0] for stage in placed.stages]
    assert sorted(device_loads([1] * 12 + [4], begins_of(placed), devices)) == [3, 4, 4, 5]


def test_the_turn_of_a_v_shape_is_in_the_middle() -> None:
    """Where the cut between two stages of one device changes no device's work, the stages become equal."""
    placed = place(profile_of([1] * 16), "v-shape", 1, microbatch_size=1)
    assert [len(stage.blocks) for stage in placed.stages] == [8, 8]


def test_a_graph_is_put_in_topological_order() -> None:
    profile = profile_of([1] * 4, edges=[(0, 3), (3, 1), (0, 2)])
    placed = place(profile, "one-to-one", 2, microbatch_size=1)
    profile.check_placement(placed)
    assert [stage.blocks for stage in placed.stages] == [("b0", "b2"), ("b3", "b1")]


def test_the_microbatch_size_weighs_the_blocks() -> None:
    """Block b0 grows with the micro-batch, the others do not."""
    rows = [[(1, 1), (4, 40)], [(1, 10), (4, 10)], [(1, 10), (4, 10)], [(1, 10), (4, 10)]]
    blocks = tuple(
        Block(
            id=f"b{index}",
            operator="layer",
            costs=tuple(CostRow(microbatch_size=size, forward_ns=time, backward_ns=0) for size, time in each),
        )
        for index, each in enumerate(rows)
    )
    profile = Profile(name="grows", source=Source(method="estimated"), blocks=blocks)
    for size, begins in ((1, (0, 2)), (4, (0, 1)), (2, (0, 2))):
        assert begins_of(place(profile, "one-to-one", 2, microbatch_size=size)) == begins
    with pytest.raises(UsageError, match="--microbatch-size"):
        place(profile, "one-to-one", 2, microbatch_size=8)


@pytest.mark.parametrize(
    ("strategy", "num_devices", "chunks", "words"),
    [
        ("one-to-one", 5, None, r"needs 5 stages, but profile 'test' has only 4 blocks; lower --devices to 4$"),
        (
            "circular",
            2,
            3,
            r"circular on 2 devices needs 6 stages, .* only 4 blocks; lower --devices to 1 or --chunks to 2",
        ),
        ("v-shape", 3, None, "v-shape on 3 devices needs 6 stages"),
        ("one-to-one", 2, 2, "--chunks 2 does not apply to one-to-one"),
        ("circular", 2, 0, "--chunks must be at least 1, not 0"),
        ("one-to-one", 0, None, "--devices must be at least 1"),
        ("zigzag", 2, None, "'zigzag' is not known; choose from auto, one-to-one, circular, v-shape"),
    ],
)
def test_what_does_not_apply(strategy: str, num_devices: int, chunks: int | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        place(profile_of([1] * 4), strategy, num_devices, chunks=chunks, microbatch_size=1)


def test_too_little_memory_names_device_stage_and_bytes() -> None:
    """b3 alone needs 2 x 500 B of parameters and gradients, 30 held and 7 of workspace."""
    profile = profile_of([1] * 4, parameters=[1, 1, 1, 500], activations=[30, 30, 30, 30], workspaces=[7, 7, 7, 7])
    with pytest.raises(InfeasibleError) as error:
        place(profile, "one-to-one", 2, microbatch_size=1, memory_bytes=[1000, 1000])
    words = "device 1 has 1kB and needs 1.037kB for stage 1 (b3): 37B too much"
    assert words in str(error.value)
    assert "raise --memory to 1.04kB" in str(error.value)
    place(profile, "one-to-one", 2, microbatch_size=1, memory_bytes=[1000, 1037])


def test_too_little_memory_for_two_stages_of_a_device() -> None:
    """Every stage fits alone; together the two of device 0 do not, whatever the cut."""
    profile = profile_of([1] * 4, activations=[60, 10, 10, 60])
    with pytest.raises(InfeasibleError, match=r"device 0 has 100B and needs 120B for stage 0 \(b0\), stage 3 \(b3\)"):
        place(profile, "v-shape", 2, microbatch_size=1, memory_bytes=[100, 100])
    placed = place(profile, "circular", 2, microbatch_size=1, memory_bytes=[100, 100])
    assert [stage.blocks for stage in placed.stages] == [("b0",), ("b1",), ("b2",), ("b3",)]


def test_memory_moves_the_cut() -> None:
    profile = profile_of([1, 1, 1, 1], parameters=[50, 50, 0, 0])
    free = place(profile, "one-to-one", 2, microbatch_size=1)
    tight = place(profile, "one-to-one", 2, microbatch_size=1, memory_bytes=[100, None])
    assert (begins_of(free), begins_of(tight)) == ((0, 2), (0, 1))


@slow_but("strategy", ["circular", "v-shape"], "v-shape".__eq__)
def test_many_blocks_on_many_devices(strategy: str) -> None:
    times = [100 + 37 * index % 61 for index in range(400)]
    devices = STRATEGIES[strategy].routes(16, 2)[0]
    placed = place(profile_of(times), strategy, 16, microbatch_size=1, memory_bytes=[10**9] * 16)
    assert max(device_loads(times, begins_of(placed), devices)) <= sum(times) / 16 + max(times)


# ---------------------------------------------------------------- routes, replicas, shared blocks


@settings(max_examples=some_of(60))
@given(
    st.lists(st.integers(1, 50), min_size=4, max_size=12),
    st.sampled_from(list(STRATEGIES)),
    st.sampled_from([(2, 1), (4, 2), (2, 2), (6, 3)]),
)
def test_every_route_has_every_block_once_and_groups_are_neighbours(
    times: list[int], strategy: str, sizes: tuple[int, int]
) -> None:
    num_devices, replicas = sizes
    profile = profile_of(times)
    placed = place(profile, strategy, num_devices, microbatch_size=replicas, replicas=replicas)
    profile.check_placement(placed)
    assert placed.num_routes == (2 if strategy.startswith("bidirectional") else 1)
    for route in range(placed.num_routes):
        stages = [stage for stage in placed.stages if stage.route == route]
        assert [block for stage in stages for block in stage.blocks] == [block.id for block in profile.blocks]
    assert {stage.replicas for stage in placed.stages} == {replicas}
    groups = {stage.devices for stage in placed.stages}
    assert all(group == tuple(range(group[0], group[0] + replicas)) for group in groups)
    assert sorted(device for group in groups for device in group) == list(range(num_devices))


def test_bidirectional_leaves_each_route_its_part_of_the_memory() -> None:
    profile = profile_of([1] * 4, parameters=[10, 10, 10, 10])
    placed = place(profile, "bidirectional", 2, microbatch_size=1, memory_bytes=[80, 80])
    assert [stage.devices for stage in placed.stages] == [(0,), (1,), (1,), (0,)]
    with pytest.raises(InfeasibleError):
        place(profile, "bidirectional", 2, microbatch_size=1, memory_bytes=[79, 79])
    place(profile, "one-to-one", 2, microbatch_size=1, memory_bytes=[40, 40])


def shared_profile(shared: Sequence[int], count: int = 8) -> Profile:
    """A chain of blocks, those of ``shared`` with costs for two devices as well."""
    profile = profile_of([2] * count)
    blocks = [
        block.model_copy(
            update={
                "shared": index in shared,
                "costs": (*block.costs, *(row.model_copy(update={"shards": 2}) for row in block.costs)),
            }
        )
        for index, block in enumerate(profile.blocks)
    ]
    return profile.model_copy(update={"blocks": tuple(blocks)})


@pytest.mark.parametrize("shared", [(0,), (0, 7), (3,), (0, 4), (7,)])
def test_shared_blocks_stand_on_all_devices(shared: tuple[int, ...]) -> None:
    profile = shared_profile(shared)
    placed = place(profile, "one-to-one", 2, microbatch_size=1, spread=True)
    profile.check_placement(placed)
    wide = [stage for stage in placed.stages if stage.devices == (0, 1)]
    assert [stage.blocks for stage in wide] == [(f"b{index}",) for index in shared]
    assert {stage.shards for stage in wide} == {2}
    assert len(placed.stages) == 2 + len(shared)


def test_no_stage_goes_around_a_shared_block() -> None:
    """Of two stages one ends where the shared block is, however unequal that makes them."""
    placed = place(shared_profile((2,)), "one-to-one", 2, microbatch_size=1, spread=True)
    assert placed.stages[0].blocks == ("b0", "b1")
    with pytest.raises(UsageError, match="between the shared blocks"):
        place(shared_profile((2, 4)), "one-to-one", 2, microbatch_size=1, spread=True)


@pytest.mark.parametrize(("strategy", "replicas"), [("one-to-one", 2), ("circular", 3), ("bidirectional", 2)])
def test_shared_blocks_stand_on_all_devices_of_each_copy(strategy: str, replicas: int) -> None:
    """Each copy of the pipeline splits the shared block over its own devices, which are neighbours."""
    profile = shared_profile((0,))
    placed = place(profile, strategy, 2 * replicas, microbatch_size=replicas, replicas=replicas, spread=True)
    profile.check_placement(placed)
    wide = [stage for stage in placed.stages if stage.blocks == ("b0",)]
    assert {(stage.devices, stage.shards, stage.replicas) for stage in wide} == {
        (tuple(range(2 * replicas)), 2, replicas)
    }
    assert sorted(stage.route for stage in wide) == list(range(placed.num_routes))
    others = {stage.devices for stage in placed.stages if stage not in wide}
    assert others == {tuple(range(first, 2 * replicas, 2)) for first in (0, 1)}
