"""What a block takes where devices share its decode step by requests, heads or the cache: times, bytes, volumes."""

from __future__ import annotations

from typing import Any

import pytest

from builders.clusters import cluster_of
from builders.decoders import HEAD_BYTES, HEADS, drawn_decoder, with_pieces
from pipeplan import UsageError
from pipeplan.costs.cache_volumes import AttentionShape, Kept, step_volume
from pipeplan.costs.communication import Exchange, all_gather_time, time_of_groups
from pipeplan.costs.decode_splits import DecodeAt, StageLinks, StepWay, gathered, step_cost, ways_of
from pipeplan.costs.decoding import phase_costs

PROFILE = drawn_decoder(0)
ATTENTION, FFN = PROFILE.by_id["layer0.attention"], PROFILE.by_id["layer0.ffn"]
FREE = StageLinks(PROFILE, None)
AT = DecodeAt.of(8, 1, 400)
PLAIN: dict[Kept, StepWay] = {
    "dp": StepWay(samples=4),
    "tp": StepWay(shards=4),
    "cp": StepWay(cache=4),
    "cp-q": StepWay(cache=4, by_queries=True),
}


def row(batch: int, context: int, shards: int = 1) -> Any:
    return phase_costs(ATTENTION, "decode", batch, context, shards=shards)


def test_plain_ways_take_what_rows_say() -> None:
    own = {kept: step_cost(PROFILE, ATTENTION, way, AT, FREE) for kept, way in PLAIN.items()}
    assert own["dp"].step_ns == row(2, 400).forward_ns
    assert own["tp"].step_ns == row(8, 400, 4).forward_ns
    rest = row(2, 400).forward_ns - row(2, 400).core_ns
    assert own["cp"].step_ns == own["cp-q"].step_ns == rest + row(8, 100).core_ns
    token, weights = 2 * HEADS * HEAD_BYTES, ATTENTION.parameter_bytes
    assert own["dp"].kept_bytes == weights + 2 * 400 * token
    assert own["tp"].kept_bytes == -(-weights // 4) + 8 * 400 * token // 4
    assert own["cp"].kept_bytes == own["cp-q"].kept_bytes == weights + 8 * 100 * token


@pytest.mark.parametrize("kept", ["cp", "cp-q"])
@pytest.mark.parametrize("shards", [1, 2])
def test_what_is_sent_is_what_the_volumes_count(kept: Kept, shards: int) -> None:
    """As the formulas have it, whose every message a test of theirs counts; with shards of each device's heads."""
    way = StepWay(cache=4, shards=shards, by_queries=kept == "cp-q")
    sent = step_cost(PROFILE, ATTENTION, way, AT, FREE).sent_bytes
    heads = HEADS // shards
    numbers = heads * HEAD_BYTES // 2
    shape = AttentionShape(0, numbers, 2 * numbers, numbers, heads)
    assert sent == step_volume(kept, shape, 8, 4, statistics=1).bytes(2)


def test_a_mixture_has_shares_of_both() -> None:
    way = StepWay(samples=2, cache=2)
    own = step_cost(PROFILE, ATTENTION, way, AT, FREE)
    assert own.step_ns == row(2, 400).forward_ns - row(2, 400).core_ns + row(4, 200).core_ns
    assert own.cache_bytes == 4 * 200 * 2 * HEADS * HEAD_BYTES
    assert str(way.mesh) == "samples2-cache2"
    split = StepWay(cache=2, shards=2)
    both = step_cost(PROFILE, ATTENTION, split, AT, FREE)
    assert both.step_ns == row(4, 400, 2).forward_ns - row(4, 400, 2).core_ns + row(8, 200, 2).core_ns
    assert both.cache_bytes == 8 * 200 * HEADS * HEAD_BYTES
    assert str(split.mesh) == "cache2-shards2"


def test_requests_and_tokens_that_do_not_divide_count_the_fullest_device() -> None:
    at = DecodeAt.of(7, 2, 399)  # groups of 3 and 4
    assert at.sizes == (3, 4)
    dp, cp = (step_cost(PROFILE, ATTENTION, PLAIN[kept], at, FREE) for kept in ("dp", "cp"))
    token = 2 * HEADS * HEAD_BYTES
    assert dp.cache_bytes == (1 + 1) * 399 * token
    assert cp.cache_bytes == 7 * 100 * token
    assert cp.step_ns == row(1, 399).forward_ns - row(1, 399).core_ns + row(4, 100).core_ns


def test_of_a_window_each_device_has_a_piece() -> None:
    near = ATTENTION.model_copy(update={"cache_window_tokens": 80})
    own = step_cost(PROFILE, near, StepWay(cache=4), AT, FREE)
    assert own.cache_bytes == 8 * 20 * 2 * HEADS * HEAD_BYTES


def test_exchanges_take_the_links_of_the_cluster_else_of_the_device() -> None:
    cluster = cluster_of(4)
    way = StepWay(cache=4)
    own = step_cost(PROFILE, ATTENTION, way, AT, StageLinks(PROFILE, cluster))
    hidden, both = HEADS * HEAD_BYTES, 2 * HEADS * HEAD_BYTES
    arrays = Exchange("all_to_all", 8 * (hidden + both)), Exchange("all_to_all", 8 * (hidden + 4 * HEADS))
    assert own.exchange_ns == round(sum(time_of_groups(cluster, each, [range(4)]) for each in arrays)) > 0
    known = StageLinks(drawn_decoder(0, device="RTX-A5000-24GB"), None)
    assert known.known
    assert step_cost(PROFILE, ATTENTION, way, AT, known).exchange_ns > 0
    assert not FREE.known


def test_steps_that_were_measured_with_pieces_are_taken_as_they_are() -> None:
    """Of as many devices, by queries or not; exchanges come on top, and other ways stay sums of rows."""
    measured = with_pieces(PROFILE, 2).by_id[ATTENTION.id]
    for by_queries in (False, True):
        for way in (StepWay(cache=2, by_queries=by_queries), StepWay(2, 2, by_queries=by_queries)):
            own = -(-8 // way.owners)
            found = step_cost(PROFILE, measured, way, AT, FREE)
            assert found.step_ns == row(own, 400).forward_ns + 7 + by_queries
            assert found.cache_bytes == step_cost(PROFILE, ATTENTION, way, AT, FREE).cache_bytes
    for way in (StepWay(cache=4), StepWay(cache=2, shards=2), StepWay(samples=2), StepWay(shards=2)):
        assert step_cost(PROFILE, measured, way, AT, FREE) == step_cost(PROFILE, ATTENTION, way, AT, FREE)


def test_ways_are_all_meshes_that_rows_know() -> None:
    meshes = {str(way.mesh) for way in ways_of(ATTENTION, 4)}
    plain = {"samples4", "shards4", "samples2-shards2", "copies4"}
    assert meshes == plain | {
        *(f"{name}{axis}" for axis in ("4", "2-shards2") for name in ("cache", "cacheq")),
        *("samples2-cache2", "samples2-cacheq2"),
    }
    assert {str(way.mesh) for way in ways_of(FFN, 4)} == plain
    assert {str(way.mesh) for way in ways_of(FFN, 3)} == {"samples3", "copies3"}
    assert [str(way.mesh) for way in ways_of(FFN, 1)] == ["shards1"]
    for kept, way in PLAIN.items():
        assert way.form == kept


@pytest.mark.parametrize("requests", [1, 3, 8])
def test_pieces_of_fewer_tokens_than_profiled_read_as_many_of_fewer_requests(requests: int) -> None:
    """Of 30 tokens each device has 8, and the least that is profiled are 10; the core here grows with all tokens."""
    own = step_cost(PROFILE, ATTENTION, PLAIN["cp"], DecodeAt.of(requests, 1, 30), FREE)
    few = row(-(-requests // 4), 30)
    core = own.step_ns - (few.forward_ns - few.core_ns)
    assert core == pytest.approx(row(requests, 10).core_ns * 8 / 10, abs=1, rel=1e-3)


@pytest.mark.parametrize(("context", "kept", "text"), [(9, "cp", "not of 9"), (500, "dp", "not of 500")])
def test_what_is_not_profiled_is_said(context: int, kept: Kept, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        step_cost(PROFILE, ATTENTION, PLAIN[kept], DecodeAt.of(8, 1, context), FREE)


def test_owners_gather_among_neighbours() -> None:
    assert gathered(4, 2, 8) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert gathered(4, 1, 4) == ((0, 1, 2, 3),)
    assert gathered(2, 4, 4) == gathered(3, 2, 3) == ()
    assert all_gather_time(cluster_of(2), [0, 1], 100) > 0
