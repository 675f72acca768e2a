"""The chain kernel against every cut; running sums against single blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate, combinations, pairwise
from operator import add

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from builders.states import training_state
from pipeplan.costs import UNLIMITED, StageCost
from pipeplan.partition.chain.costs import ChainCosts
from pipeplan.partition.chain.kernel import Programme, ShortestStages, shortest_first
from support.marks import some_of

TIMES = st.sampled_from([0, 1, 1, 2, 3, 5, 8, 30, 10**15])
SIZES = st.integers(0, 9)
COSTS = st.builds(
    StageCost,
    forward_ns=st.integers(0, 9),
    backward_ns=st.integers(0, 9),
    activation_bytes=SIZES,
    workspace_bytes=SIZES,
    state=st.builds(training_state, SIZES, SIZES),
)


def cuts(num_blocks: int, num_stages: int) -> list[tuple[int, ...]]:
    """Every cut of blocks into stages: the bounds of these."""
    inner = combinations(range(1, num_blocks), num_stages - 1)
    return [(0, *each, num_blocks) for each in inner]


@given(st.lists(COSTS, min_size=1, max_size=12), st.integers(0, 4), st.integers(0, 120))
def test_a_range_costs_what_its_blocks_cost_together(costs: list[StageCost], in_flight: int, limit: int) -> None:
    chain = ChainCosts.of(costs)
    begins, ends = np.triu_indices(len(costs) + 1, 1)
    stages = [reduce(add, costs[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    assert chain.time(begins, ends).tolist() == [stage.compute_ns for stage in stages]
    assert chain.activation(begins, ends).tolist() == [stage.activation_bytes for stage in stages]
    assert chain.workspace(begins, ends).tolist() == [stage.workspace_bytes for stage in stages]
    memory = chain.memory(begins, ends, in_flight).tolist()
    assert memory == [stage.memory_bytes(in_flight) for stage in stages]
    room = chain.most_in_flight(begins, ends, limit).tolist()
    assert room == [stage.most_in_flight(limit) for stage in stages]
    assert all((each >= in_flight) == (needed <= limit) for each, needed in zip(room, memory, strict=True))
    assert int(chain.memory(0, len(costs), in_flight)) == stages[len(costs) - 1].memory_bytes(in_flight)


@given(
    st.lists(COSTS, min_size=2, max_size=8),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 3)), max_size=4),
)
def test_what_several_blocks_take_is_held_once(costs: list[StageCost], drawn: Sequence[tuple[int, int, int]]) -> None:
    repeats = [(first, second, size) for first, second, size in drawn if first < second < len(costs)]
    chain = ChainCosts.of(costs, repeats)
    for begin, end in combinations(range(len(costs) + 1), 2):
        held = sum(cost.activation_bytes for cost in costs[begin:end])
        held -= sum(size for first, second, size in repeats if begin <= first and second < end)
        assert int(chain.activation(begin, end)) == max(0, held)


@settings(max_examples=some_of(200))
@given(st.lists(TIMES, min_size=1, max_size=7), st.integers(1, 7))
def test_autopipes_table_has_the_least_longest_stage_and_of_equal_splits_long_later_stages(
    times: list[int], num_stages: int
) -> None:
    assume(num_stages <= len(times))
    table = ShortestStages.of(np.array([0, *accumulate(times)]), num_stages)
    for end in range(num_stages, len(times) + 1):
        longest = {
            bounds: max(sum(times[low:high]) for low, high in pairwise(bounds)) for bounds in cuts(end, num_stages)
        }
        assert table.longest[num_stages - 1][end] == min(longest.values())
        best = min(bounds[-2] for bounds, value in longest.items() if value == min(longest.values()))
        assert table.lasts[num_stages - 1][end] == best


@settings(max_examples=some_of(150))
@given(st.data(), st.integers(1, 6), st.integers(1, 5), st.booleans())
def test_stages_on_several_devices_are_those_of_every_cut_in_every_way(
    data: st.DataObject, num_blocks: int, num_devices: int, by_way: bool
) -> None:
    """A layer per stage; any price of a range and a way, and of equal ones the first: nearest begin, or first way."""
    devices = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    draw = st.integers(0, 3)
    prices = {
        (begin, end, way): data.draw(draw)
        for begin, end in combinations(range(num_blocks + 1), 2)
        for way in range(len(devices))
    }
    table = np.zeros((len(devices), num_blocks + 1, num_blocks + 1), dtype=np.int64)
    for (begin, end, way), price in prices.items():
        table[way, begin, end] = price
    programme = Programme(num_blocks + 1, UNLIMITED, np.maximum, devices, num_devices, by_way)
    candidates = shortest_first(np.zeros(num_blocks + 1, dtype=np.int64))
    layers = [programme.start()]
    best = {(0, 0): (0, ())}
    for _ in range(num_blocks):
        layers.append(programme.extended(layers[-1], lambda begins, ends: table[:, begins, ends], candidates))
        following: dict[tuple[int, int], tuple[int, tuple[tuple[int, int, int], ...]]] = {}
        for (begin, used), (value, stages) in best.items():
            for end in range(begin + 1, num_blocks + 1):
                for way, count in enumerate(devices):
                    now, stage = max(value, prices[begin, end, way]), (begin, end, way)
                    kept = following.get((end, used + count))
                    order = (now, way, -begin) if by_way else (now, -begin, way)
                    if kept is not None:
                        last = kept[1][-1]
                        other = (kept[0], last[2], -last[0]) if by_way else (kept[0], -last[0], last[2])
                    if used + count <= num_devices and (kept is None or order < other):
                        following[end, used + count] = (now, (*stages, stage))
        best = following
        value, stages = best.get((num_blocks, num_devices), (UNLIMITED, ()))
        assert layers[-1].values[num_devices, num_blocks] == value
        if stages:
            assert tuple(programme.traced(layers[1:], num_blocks))[::-1] == stages
