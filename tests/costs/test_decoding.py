"""Rows of prefill and decode are read between those of a profile, and caches are counted."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pipeplan.costs.decoding import bytes_between, cached_bytes, phase_costs
from pipeplan.costs.devices import Kernel
from pipeplan.costs.quantized import WEIGHTS, with_weights
from pipeplan.costs.uniform.traced import of_few_rows
from pipeplan.errors import UsageError
from pipeplan.files import Block, CostRow, Edge, PhaseRow, Profile, Source


def block(**keys: object) -> Block:
    """Decode takes 1000 ns, 10 a request and 3 for each token and request, of which the last are the core's."""
    phases = [
        PhaseRow(
            phase="decode",
            microbatch_size=batch,
            context_tokens=context,
            shards=shards,
            forward_ns=(1000 + 10 * batch + 3 * batch * context) // shards,
            core_ns=3 * batch * context // shards,
            activation_bytes=64 * batch,
        )
        for batch in (1, 8, 32)
        for context in (1000, 8000, 32000)
        for shards in (1, 2)
    ]
    row = CostRow(microbatch_size=1, forward_ns=5)
    said: dict[str, Any] = {"id": "a", "operator": "attention", "costs": (row,), "phases": tuple(phases)}
    return Block(**{**said, **keys})


@pytest.mark.parametrize(("batch", "context"), [(1, 1000), (8, 20_000), (4, 1000), (20, 12_345), (32, 32_000)])
def test_between_rows_costs_are_on_the_plane_through_them(batch: int, context: int) -> None:
    found = phase_costs(block(), "decode", batch, context)
    assert found.forward_ns == pytest.approx(1000 + 10 * batch + 3 * batch * context, abs=2)
    assert found.core_ns == pytest.approx(3 * batch * context, abs=2)
    assert (found.microbatch_size, found.context_tokens, found.activation_bytes) == (batch, context, 64 * batch)


@pytest.mark.parametrize(
    ("batch", "context", "shards", "text"),
    [
        (33, 1000, 1, "batches of 1, 8, 32, not of 33; choose from 1 to 32, or profile it with --batch 33"),
        (1, 999, 1, "contexts of 1000, 8000, 32000, not of 999"),
        (1, 40_000, 1, "--context 40000"),
        (1, 1000, 4, "no decode rows for 4 shards, only for 1 shards, 2 shards; profile it with --shards 4"),
    ],
)
def test_outside_of_its_rows_nothing_is_guessed(batch: int, context: int, shards: int, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        phase_costs(block(), "decode", batch, context, shards=shards)


def test_a_block_without_prefill_says_how_to_get_it() -> None:
    with pytest.raises(UsageError, match="no prefill rows for 1 shards; profile it with --context"):
        phase_costs(block(), "prefill", 1, 1000)


def test_heads_of_the_cache_are_split_and_at_least_one_is_kept() -> None:
    grouped = block(cache_bytes_per_token=4096, cache_heads=8)
    assert [cached_bytes(grouped, 100, shards) for shards in (1, 2, 8, 16)] == [409600, 204800, 51200, 51200]
    latent = block(cache_bytes_per_token=1152)
    assert cached_bytes(latent, 100, 1) == cached_bytes(latent, 100, 8) == 115200
    assert cached_bytes(block(cache_bytes_per_token=10, cache_window_tokens=64), 100) == 640


def test_between_blocks_travel_the_tokens_of_a_step() -> None:
    edge = Edge(source="a", target="b", bytes_per_sample=1024 * 8192, gradient=False)
    profile = Profile.of("m", [block(), block(id="b")], edges=[edge], mode="inference")
    assert bytes_between(profile.model_copy(update={"tokens_per_sample": 1024}), edge, 1) == 8192
    with pytest.raises(UsageError, match="tokens_per_sample"):
        bytes_between(profile, edge, 1)


def test_phases_are_of_inference_each_case_once_and_of_a_core_inside_of_them() -> None:
    row = PhaseRow(phase="decode", microbatch_size=1, context_tokens=8, forward_ns=5)
    with pytest.raises(ValidationError, match=r"phases\[1\] is for the same case as phases\[0\]: decode of 1 requests"):
        block(phases=(row, row))
    with pytest.raises(ValidationError, match="core_ns 6 is part of forward_ns"):
        PhaseRow(phase="decode", microbatch_size=1, context_tokens=8, forward_ns=5, core_ns=6)
    trained = CostRow(microbatch_size=1, forward_ns=5, backward_ns=5)
    with pytest.raises(ValidationError, match=r"blocks\[0\] states phases, which only the mode 'inference' has"):
        Profile(name="m", source=Source(method="estimated"), blocks=(block(costs=(trained,)),))


def test_products_read_weights_in_their_format() -> None:
    product = Kernel(2 * 4 * 256 * 512, 2 * (4 * 256 + 256 * 512 + 4 * 512), True, True, (4, 256, 512, 1))
    read = product.moved_bytes - 2 * 256 * 512
    assert with_weights(product, WEIGHTS["int8"], 2).moved_bytes == read + 256 * 512 + 2 * 512
    assert with_weights(product, WEIGHTS["int4"], 2).moved_bytes == read + 256 * 512 // 2 + 2 * 2 * 512
    assert with_weights(product, WEIGHTS["fp8"], 2).moved_bytes == read + 256 * 512 + 4 * 512
    core = Kernel(100, 100, True, form="attention")
    assert with_weights(core, WEIGHTS["int4"], 2) == core


def test_products_of_few_rows_compute_whole_instructions_and_no_tile() -> None:
    product = Kernel(2 * 4 * 256 * 512, 1000, True, True, (4, 256, 512, 1))
    assert of_few_rows(product).product is None
    assert of_few_rows(product).flops == 2 * 16 * 256 * 512
    many = Kernel(2 * 128 * 256 * 512, 1000, True, True, (128, 256, 512, 1))
    assert of_few_rows(many) == many
