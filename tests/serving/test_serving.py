"""Serving simulated: as token by token, within the cache, and in the order in which requests came."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from statistics import mean
from typing import Any

import pytest

import pipeplan
from pipeplan.catalog import read_table
from pipeplan.costs.cache_volumes import KEPT, Kept
from pipeplan.costs.communication import LAUNCH_NS, LINK_CEILING, STEP_NS, Exchange, prices_of
from pipeplan.costs.devices import device_preset
from pipeplan.costs.uniform.shares import shares_reached
from pipeplan.errors import InfeasibleError
from pipeplan.serving.course import MovedCache, ServingResult
from pipeplan.serving.engine import course, serve
from pipeplan.serving.paged_cache import PagedCache, blocks_of
from pipeplan.serving.requests import ServedRequest, about, always, between, drawn
from pipeplan.serving.steps import ServedLayer, StepCosts, engine_constants, share_at
from references.serving import token_by_token
from support.paths import ROOT

CONSTANTS = engine_constants()
LAYER = ServedLayer(hidden=4096, heads=32, kv_heads=32, feed_forward=11008)
DEVICE = device_preset("a5000-24gb")


def with_blocks(kept: Kept, devices: int, blocks: int) -> StepCosts:
    """Costs where each device's cache has so many blocks."""
    costs = StepCosts(kept, LAYER, devices, DEVICE, CONSTANTS)
    own = blocks * CONSTANTS.block_tokens * costs.token_bytes
    memory = DEVICE.reserve_bytes + LAYER.weight_bytes // costs.shards + own
    return replace(costs, device=replace(DEVICE, memory_bytes=memory))


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("seed", range(4))
def test_many_steps_at_once_are_as_token_by_token(kept: Kept, seed: int) -> None:
    """The same steps, tokens and evictions, in the same order; times to within what lengths grow meanwhile."""
    draw = random.Random(f"{kept} {seed}")
    devices, blocks = (1 if kept == "dp" else draw.choice([2, 4])), draw.randint(12, 60)
    costs = with_blocks(kept, devices, blocks)
    room = blocks * CONSTANTS.block_tokens * costs.pieces
    requests = [*drawn(draw.randint(3, 12), between(1, room // 3), between(1, room // 3), seed=seed)]
    most = draw.randint(1, 6)
    found, expected = serve(costs, requests, most), token_by_token(costs, requests, most, blocks)
    assert expected.most_blocks <= blocks
    assert expected.began == sorted(expected.began)
    assert (found.steps, found.tokens, found.evictions) == (expected.steps, expected.tokens, expected.evictions)
    assert found.tokens == sum(each.new_tokens for each in requests)
    assert found.end_ns == pytest.approx(expected.now, rel=0.01)


def test_some_of_these_cases_evict() -> None:
    costs = with_blocks("cp", 4, 20)
    requests = [*drawn(6, always(300), always(600), seed=1)]
    found = serve(costs, requests, 6)
    assert found.evictions == token_by_token(costs, requests, 6, 20).evictions > 0
    assert found.moved_ns > 0
    moves = [each for each in course(costs, requests, 6).events if isinstance(each, MovedCache)]
    out, back = (sorted(each.tokens for each in moves if each.evicted == evicted) for evicted in (True, False))
    assert out == back
    assert min(out) > 300


def test_the_page_has_the_speed_that_its_figures_are_of() -> None:
    """A device's share is fitted anew from time to time, and then the page's benchmarks are run again."""
    page = (ROOT / "docs" / "papers" / "cache-parallelism.md").read_text()
    assert f"at {100 * shares_reached(DEVICE).bandwidth:.1f} % of the memory's bandwidth" in page


def test_requests_that_come_later_wait_for_nobody() -> None:
    """Where there is room each takes as long as alone, from when it comes."""
    alone = serve(with_blocks("tp", 2, 100), [ServedRequest(0.0, 100, 50)], 4)
    later = [ServedRequest(0.0, 100, 50), ServedRequest(1e12, 100, 50)]
    found = serve(with_blocks("tp", 2, 100), later, 4)
    assert found.end_ns == pytest.approx(1e12 + alone.end_ns)
    assert found.waited_ns == pytest.approx(1e12 - alone.end_ns)


def test_devices_in_step_wait_for_the_slowest() -> None:
    """One long request on one of two devices: by themselves the other is done sooner, in step it is as slow."""
    costs = StepCosts("dp", LAYER, 2, DEVICE, CONSTANTS)
    requests = [ServedRequest(0.0, 60_000, 40), ServedRequest(0.0, 100, 40)]
    apart, together = (serve(costs, requests, 2, together=each) for each in (False, True))
    assert apart.end_ns == pytest.approx(together.end_ns, rel=1e-3)
    assert apart.waited_ns == pytest.approx(together.waited_ns, rel=1e-3)
    long, short = (serve(replace(costs, devices=1), [each], 2) for each in requests)
    assert long.end_ns > short.end_ns
    for found in (apart, together):  # an engine in the mean, and not the one that is done last
        assert found.busy.total_ns == pytest.approx((long.end_ns + short.end_ns) / 2, rel=1e-3)
        assert found.busy.total_ns + found.moved_ns + found.waited_ns == pytest.approx(found.end_ns)
        assert found.steps == (long.steps + short.steps) / 2
    two = [*requests, ServedRequest(0.0, 100, 40), ServedRequest(0.0, 60_000, 40)]
    apart, together = (serve(costs, two, 2, together=each) for each in (False, True))
    assert apart.end_ns < together.end_ns
    assert apart.tokens == together.tokens


@pytest.mark.parametrize("kept", KEPT)
def test_a_step_takes_what_its_parts_do(kept: Kept) -> None:
    costs = StepCosts(kept, LAYER, 4, DEVICE, CONSTANTS)
    short, long = costs.step([1000] * 8), costs.step([64_000] * 8)
    assert short.compute_ns < long.compute_ns
    assert short.host_ns < long.host_ns
    assert short.communication_ns == long.communication_ns
    assert (short.communication_ns == 0) == (kept == "dp")
    read = 2 * 8 * 64_000 * 4096 * 2 / (1 if kept == "dp" else 4)
    assert long.compute_ns > 1e9 * read / DEVICE.bandwidth_bytes_per_s


def test_cache_and_weights_of_a_whole_model() -> None:
    """Llama-7B has 13.5 GB of weights: whole on every device, or a quarter of them on each of four."""
    model = replace(LAYER, layers=32, beside_bytes=2 * 2 * 32000 * 4096)
    assert model.weight_bytes == pytest.approx(13.5e9, rel=0.01)
    whole, split = (StepCosts(kept, model, 4, DEVICE, CONSTANTS) for kept in ("cp", "tp"))
    assert split.cache_bytes - whole.cache_bytes == model.weight_bytes - model.weight_bytes // 4
    assert split.token_bytes * 4 == whole.token_bytes == 524_288


def test_what_cannot_be_served_is_said() -> None:
    with pytest.raises(InfeasibleError, match=r"weights of 67.19GB leave no memory for a cache on RTX-A5000-24GB"):
        serve(StepCosts("dp", replace(LAYER, layers=1_000 // 6), 1, DEVICE, CONSTANTS), [ServedRequest(0, 1, 1)], 1)
    with pytest.raises(
        InfeasibleError, match="a request of 321 tokens does not fit into the cache, which has room for"
    ):
        serve(with_blocks("tp", 2, 20), [ServedRequest(0.0, 300, 21)], 1)
    with pytest.raises(ValueError, match="nothing to serve on 4 engines"):
        serve(StepCosts("dp", LAYER, 4, DEVICE, CONSTANTS), [ServedRequest(0.0, 1, 1)], 3)
    with pytest.raises(ValueError, match="is no request"):
        ServedRequest(0.0, 0, 1)


def test_blocks_are_those_of_the_longest_piece() -> None:
    assert [blocks_of(tokens, 4, 16) for tokens in (1, 64, 65, 68, 128, 129)] == [1, 1, 2, 2, 2, 3]
    cache = PagedCache(10, 16)
    assert cache.take(100)
    assert not cache.take(50)
    assert cache.take(48)
    assert cache.steps_within([100, 48], 1000) == 0
    cache.give_back(100)
    assert cache.steps_within([48], 1000) == 112


def test_lengths_are_as_asked_and_repeat() -> None:
    found = [*drawn(4000, between(10, 20), about(200), per_second=50, seed=3)]
    assert found == [*drawn(4000, between(10, 20), about(200), per_second=50, seed=3)]
    assert {each.prefix_tokens for each in found} == set(range(10, 21))
    assert mean(each.new_tokens for each in found) == pytest.approx(200, rel=0.1)
    assert found[-1].arrival_ns / 4000 == pytest.approx(2e7, rel=0.1)
    assert {each.arrival_ns for each in drawn(3, always(5), always(5))} == {0.0}
    assert {about(1)(random.Random(1))} == {1}


def test_every_constant_has_its_source() -> None:
    table = read_table("serving", "vllm")
    assert {
        name for name in table if not name.endswith(("_source", "_factors")) and f"{name}_source" not in table
    } == set()
    assert share_at(CONSTANTS.attention, 1) == CONSTANTS.attention[0][1]
    assert share_at(CONSTANTS.attention, math.inf) == CONSTANTS.attention[-1][1]
    halfway = share_at(CONSTANTS.attention, 2048 * math.sqrt(2))
    assert halfway == pytest.approx((0.96 + 0.99) / 2)
    assert (CONSTANTS.launch_ns, CONSTANTS.step_ns) == (LAUNCH_NS, STEP_NS)


@pytest.mark.parametrize(("kept", "shards"), [("dp", 1), ("tp", 4)])
@pytest.mark.parametrize("tokens", [1024, 8192])
def test_steps_are_as_quick_as_in_estimated_profiles(kept: Kept, shards: int, tokens: int) -> None:
    """Of the same layer and device, without what profiles do not have: shares of attention, the host, collectives."""
    even = replace(CONSTANTS, attention=((1, 1.0), (2, 1.0)), heads=((1, 1.0), (2, 1.0)))
    found = StepCosts(kept, LAYER, shards, DEVICE, even).step([tokens] * 32)
    rows = [row for block in estimated_layer().blocks if block.id.startswith("layers.") for row in block.phases]
    estimated = sum(row.forward_ns for row in rows if (row.shards, row.context_tokens) == (shards, tokens))
    share = shares_reached(DEVICE).bandwidth / LINK_CEILING
    device = replace(DEVICE, link_bytes_per_s=round(DEVICE.link_bytes_per_s * share))
    summed = prices_of(device)(Exchange("all_reduce", 32 * 4096 * 2), shards) if shards > 1 else 0
    small = 25_000  # kernels of few bytes that the simulation leaves out: positions, and what is written to the cache
    assert found.compute_ns <= estimated - 2 * summed <= 1.01 * found.compute_ns + small


@cache
def estimated_layer() -> pipeplan.Profile:
    """Decode steps of 32 requests."""
    model = (
        "LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=1, num_attention_heads=32, "
        "vocab_size=64, max_position_embeddings=8192)"
    )
    sizes: dict[str, Any] = {"batch": (32,), "context": (1024, 8192), "shards": (1, 4)}
    found = pipeplan.estimate(model, device=DEVICE.name, inference=True, **sizes)
    decode = [
        block.model_copy(update={"phases": tuple(row for row in block.phases if row.phase == "decode")})
        for block in found.blocks
    ]
    return found.model_copy(update={"blocks": tuple(decode)})


def test_results_say_what_they_mean() -> None:
    found = serve(with_blocks("tp", 2, 100), [ServedRequest(0.0, 100, 50)], 1)
    assert isinstance(found, ServingResult)
    assert found.tokens_per_s * found.step_ns == pytest.approx(1e9)
    assert found.busy.total_ns == pytest.approx(found.end_ns)


@pytest.mark.parametrize("kept", KEPT)
def test_a_course_takes_as_long_as_served_anew(kept: Kept) -> None:
    """With other constants, where all come at once: by themselves and in step, with evictions."""
    costs = with_blocks(kept, 2, 40)
    requests = [*drawn(12, between(1, 300), between(1, 300), seed=2)]
    other = replace(CONSTANTS, table_ns=9e5, attention=((64, 0.1), (512, 1.0)), host_bytes_per_s=1e7)
    for together in (False, True):
        found = course(costs, requests, 8, together=together)
        assert found.timed().evictions > 0
        assert found.timed(other) == serve(replace(costs, constants=other), requests, 8, together=together)


def test_a_course_of_requests_that_come_later_is_of_its_constants() -> None:
    requests = [ServedRequest(0.0, 100, 50), ServedRequest(1e9, 100, 50)]
    found = course(with_blocks("tp", 2, 100), requests, 4)
    assert found.timed() == found.timed(CONSTANTS)
    with pytest.raises(ValueError, match="serve them anew"):
        found.timed(replace(CONSTANTS, table_ns=1.0))
    at_once = course(with_blocks("tp", 2, 100), requests[:1], 4)
    with pytest.raises(ValueError, match="other blocks"):
        at_once.timed(replace(CONSTANTS, block_tokens=32))
