"""Layouts, and the cheapest way from one to another: against arrays that are moved, and against all sequences."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from pipeplan.costs.clusters import named_cluster
from pipeplan.costs.communication import Exchange, send_time, time_of_groups
from pipeplan.costs.layouts import (
    Layout,
    MeshSplit,
    Move,
    Tensor,
    all_layouts,
    groups_along,
)
from pipeplan.costs.resharding import Resharding
from pipeplan.files import Cluster, DeviceKind, LinkLevel, MeasuredCurve, Source
from pipeplan.sharding.operators import factorizations, mesh_name, splits_of, ways_to_split
from references.moved_arrays import cut, held_after, senders


def two_nodes(devices: int, *, measured: tuple[MeasuredCurve, ...] = ()) -> Cluster:
    """Two nodes, fast links within and slow ones between."""
    levels = [LinkLevel(name="outer", group_size=devices, latency_ns=10_000, bandwidth_bytes_per_s=10**10)]
    if devices > 2:
        inner = LinkLevel(name="inner", group_size=devices // 2, latency_ns=1000, bandwidth_bytes_per_s=10**11)
        levels.insert(0, inner)
    return Cluster(
        name="two",
        source=Source(method="estimated"),
        devices=(DeviceKind(name="device", count=devices),),
        levels=tuple(levels),
        measured=measured,
    )


def test_meshes_are_ordered_factors() -> None:
    assert set(factorizations(16)) == {(16,), (2, 8), (4, 4), (8, 2), (2, 2, 4), (2, 4, 2), (4, 2, 2)}
    assert splits_of((2, 8)) == (MeshSplit(2, 8), MeshSplit(8, 1))
    assert mesh_name([("columns", MeshSplit(2, 1)), ("batch", MeshSplit(2, 8))], 16) == "batch2-copies4-columns2"


@pytest.mark.parametrize(("axes", "ways"), [(1, 11), (2, 45), (3, 121), (4, 257)])
def test_number_of_ways_on_16_devices(axes: int, ways: int) -> None:
    """Runs of the four factors 2: one, two or three dimensions, each for an axis of its own or for copies."""
    assert len(ways_to_split(16, [1024] * axes)) == ways


def test_splits_divide_their_axes() -> None:
    found = ways_to_split(12, [4, 9])
    assert found
    for batch, columns in found:
        assert 4 % (batch.extent if batch else 1) == 0
        assert 9 % (columns.extent if columns else 1) == 0
    assert (MeshSplit(4, 3), MeshSplit(3, 1)) in found
    assert (MeshSplit(3, 4), None) not in found


@pytest.mark.parametrize("devices", [2, 4, 6, 8])
def test_every_move_leads_to_the_layout_it_names(devices: int) -> None:
    """Carried out on arrays, a move leaves every device with its piece; what is still a sum adds up to it."""
    rng = np.random.default_rng(devices)
    size = 8 if devices != 6 else 36
    whole = rng.integers(0, 1000, (size, size, size))
    for move in Resharding(None, devices).every_move():
        held = held_after(move, cut(whole, move.source, devices), devices)
        added = held
        if move.target.partial:
            added = list(held)
            for group in groups_along([move.target.partial], devices):
                total = np.sum([held[device] for device in group], axis=0)
                for device in group:
                    added[device] = total
        expected = cut(whole, move.target._replace(partial=None), devices)
        for device in range(devices):
            assert np.array_equal(added[device], expected[device]), (move, device)


@pytest.mark.parametrize("devices", [2, 4, 6])
@pytest.mark.parametrize("num_bytes", [1000, 10**7])
def test_shortest_paths_are_the_best_of_all_sequences(devices: int, num_bytes: int) -> None:
    """Against every sequence of up to four moves: no worse than any, and where four are enough equal to the best."""
    resharding = Resharding(two_nodes(devices), devices)
    tensor = Tensor((4, 4, 36), num_bytes)
    layouts = all_layouts(devices)
    leaving: dict[Layout, list[Move]] = {layout: [] for layout in layouts}
    for move in resharding.every_move():
        leaving[move.source].append(move)
    times = resharding.times(tensor, layouts, layouts)
    for row, start in enumerate(layouts):
        best = {start: 0.0} if tensor.fits(start) else {}
        reached = dict(best)
        for _ in range(4):
            longer: dict[Layout, float] = {}
            for layout, time in reached.items():
                for move in leaving[layout]:
                    total = time + resharding.move_ns(tensor, move)
                    longer[move.target] = min(longer.get(move.target, np.inf), total)
            reached = longer
            for layout, time in reached.items():
                best[layout] = min(best.get(layout, np.inf), time)
        for column, end in enumerate(layouts):
            told, known = times[row, column], best.get(end, np.inf)
            assert told <= known * (1 + 1e-12)
            if told < np.inf and len(resharding.path(tensor, start, end)) <= 4:
                assert told == pytest.approx(known)


@pytest.mark.parametrize(("devices", "node"), [(4, 2), (6, 3), (6, 2), (8, 4), (8, 2)])
@pytest.mark.parametrize("shared", [None, 2 * 10**10])
def test_moves_take_what_their_groups_and_pairs_take(devices: int, node: int, shared: int | None) -> None:
    """Of sends that is found for all at once: by the outermost link and by how many leave the busiest node."""
    cluster = two_nodes(devices)
    inner, outer = cluster.levels
    inner = inner.model_copy(update={"group_size": node})
    outer = outer.model_copy(update={"node_bandwidth_bytes_per_s": shared})
    resharding = Resharding(cluster.model_copy(update={"levels": (inner, outer)}), devices)
    tensor = Tensor((8, 12, 36), 10**7)
    known = resharding._weights_of(tensor)
    how: dict[str, int] = {}
    for move, weight in zip(resharding.every_move(), known.tolist(), strict=True):
        assert weight == resharding.move_ns(tensor, move)
        if np.isfinite(weight) and move.how == "send":
            pairs = senders(move.source, move.target, devices)
            assert weight == send_time(resharding.cluster, pairs, tensor.local_bytes(move.source))
        how[move.how] = how.get(move.how, 0) + 1
    assert how.keys() == {"gather", "slice", "exchange", "sum", "scatter", "send"}
    assert len(set(known.tolist())) > 10


def test_what_is_made_whole_takes_as_long_backward_as_forward() -> None:
    resharding, tensor = Resharding(named_cluster("tensoropt"), 16), Tensor((256, 64, 3840), 10**9)
    some = resharding.layouts[::37]
    forward = resharding.times(tensor, some, [Layout()])[:, 0]
    assert [resharding.whole_ns(tensor, each) for each in some] == pytest.approx(forward.tolist())


def test_paths_join_up_and_cost_what_is_said() -> None:
    resharding = Resharding(named_cluster("tensoropt"), 16)
    tensor = Tensor((256, 64, 3840), 256 * 64 * 3840 * 2)
    layouts = [layout for layout in resharding.layouts if tensor.fits(layout)][::29]
    times = resharding.times(tensor, layouts, layouts)
    for row, source in enumerate(layouts):
        for column, target in enumerate(layouts):
            if not np.isfinite(times[row, column]):
                continue
            path = resharding.path(tensor, source, target)
            assert sum(resharding.move_ns(tensor, move) for move in path) == pytest.approx(times[row, column])
            at = [source, *(move.target for move in path)]
            assert [move.source for move in path] == at[:-1]
            assert at[-1] == target


def test_only_sums_stand_between_layouts() -> None:
    """Any layout can be reached from any other, but none becomes a sum again."""
    resharding = Resharding(two_nodes(8), 8)
    tensor = Tensor((8, 8, 8), 4096)
    for source, row in zip(
        resharding.layouts, resharding.times(tensor, resharding.layouts, resharding.layouts), strict=True
    ):
        for target, time in zip(resharding.layouts, row, strict=True):
            made = target.partial is not None and source.partial is None
            assert np.isfinite(time) or made or target.partial is not None
            assert not (made and np.isfinite(time))


def test_a_sum_over_two_nodes_is_taken_within_them_first() -> None:
    """Only an eighth of the tensor per device crosses the slow link, as in a hierarchical all-reduce."""
    resharding = Resharding(named_cluster("tensoropt"), 16)
    tensor = Tensor((256, 1, 4096), 2**27)
    path = resharding.path(tensor, Layout(partial=MeshSplit(16, 1)), Layout())
    assert (path[0].how, path[-1].how) == ("scatter", "gather")
    crossing = [move for move in path if move.along and move.along.reach == 16]
    assert [tensor.local_bytes(move.source) for move in crossing] == [2**24]


def test_groups_share_the_link_between_nodes() -> None:
    cluster = two_nodes(16)
    exchange = Exchange("all_gather", 10**8)
    within = time_of_groups(cluster, exchange, groups_along([MeshSplit(8, 1)], 16))
    assert within == pytest.approx(7 * (1000 + 1e9 * 10**8 / 8 / 10**11))
    across = time_of_groups(cluster, exchange, groups_along([MeshSplit(2, 8)], 16))
    assert across == pytest.approx(10_000 + 8 * 1e9 * 10**8 / 2 / 10**10)
    whole = time_of_groups(cluster, exchange, [list(range(16))])
    assert whole == pytest.approx(14 * 1000 + 10_000 + 15 * 1e9 * 10**8 / 16 / 10**10)
    each = time_of_groups(cluster, Exchange("all_to_all", 10**8), [list(range(16))])
    assert each == pytest.approx(15 * 10_000 + 1e9 * 8 * 10**8 / 2 / 10**10)  # 8 devices, half of each array leaves
    assert send_time(cluster, [(0, 8), (1, 9), (2, 3)], 10**7) == 10_000 + 2 * 10**6
    assert time_of_groups(None, exchange, [[0, 1]]) == 0


def test_times_lie_between_measured_numbers_of_devices() -> None:
    curves = tuple(
        MeasuredCurve(
            operation="all_gather", level="inner", num_devices=count, points=((1, count * 1000), (10**6, count * 10**6))
        )
        for count in (2, 8)
    )
    cluster = two_nodes(16, measured=curves)
    few, some, many = (
        time_of_groups(cluster, Exchange("all_gather", 10**6), groups_along([MeshSplit(count, 1)], 16))
        for count in (2, 4, 8)
    )
    assert (few, many) == (2 * 10**6, 8 * 10**6)
    assert some == pytest.approx(4 * 10**6)


def test_larger_tensors_never_take_less() -> None:
    resharding = Resharding(two_nodes(8), 8)
    layouts = resharding.layouts[::5]
    tables = [resharding.times(Tensor((8, 8, 8), 10**power), layouts, layouts) for power in range(3, 10)]
    for smaller, larger in pairwise(tables):
        assert (smaller <= larger).all()
