"""Profiles of inference: caches as transformers holds them, work as torch counts it, and what cannot be."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import pipeplan
from pipeplan.cli.main import cli
from pipeplan.costs.decoding import cached_bytes, phase_costs
from pipeplan.costs.devices import Kernel, device_preset
from pipeplan.costs.quantized import Weights
from pipeplan.errors import UsageError
from pipeplan.files import PhaseRow, Profile, read_profile
from pipeplan.runtime.models.huggingface import LoadedModel, load, load_configuration
from pipeplan.runtime.models.spec import BlockSpec, Model
from pipeplan.runtime.models.zoo import zoo_model
from pipeplan.runtime.profiling.build_profile import kinds_of, splits_of
from pipeplan.runtime.profiling.caches import CachedAttention, CachedCase
from pipeplan.runtime.profiling.forwards import CountedForward, case_of, counted_forwards
from pipeplan.runtime.profiling.inference import InferenceRequest, _chosen, estimate_inference
from runtime_support.hugging_face import text

FLOAT = torch.float32


@cache
def model_of(name: str) -> Model:
    return load_configuration(text(name), sequence=8, meta=True)


@cache
def estimated(
    name: str, *, weights: Weights | None = None, cache_bytes: int | None = None, shards: tuple[int, ...] = (1,)
) -> Profile:
    asked = InferenceRequest((4,), (12,), shards, weights, cache_bytes)
    return estimate_inference(model_of(name), asked, device=device_preset("a5000-24gb"), dtype=torch.bfloat16)


@cache
def loaded(name: str) -> LoadedModel:
    return load(text(name), sequence=8)


def transformers_cache(name: str, tokens: int, samples: int) -> Any:
    """A transformers cache after a prompt of so many tokens."""
    from transformers import DynamicCache

    whole = loaded(name)
    held, model = DynamicCache(config=whole.config), cast(Any, whole.module.model)
    with torch.no_grad():
        model(torch.ones(samples, tokens, dtype=torch.long), cache=held, use_cache=True)
    return held


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v3",)),
        *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.long]) for name in ("gpt2", "qwen2", "deepseek_v2")),
    ],
)
def test_a_cache_takes_what_that_of_transformers_holds(name: str) -> None:
    held = transformers_cache(name, tokens := 8, samples := 3)
    found = sum(each.numel() for layer in held.layers for each in (layer.keys, layer.values))
    profile = estimated(name)
    assert found * 2 == samples * sum(cached_bytes(block, tokens) for block in profile.blocks)
    assert sum(block.cache_bytes_per_token > 0 for block in profile.blocks) == len(held.layers)


@pytest.mark.slow
def test_the_zoo_s_gpt_caches_what_gpt2_of_its_sizes_does() -> None:
    model = zoo_model("gpt2-tiny")
    asked = InferenceRequest((1,), (4,))
    profile = estimate_inference(model, asked, device=device_preset("cpu"), dtype=FLOAT)
    attentions = [block for block in profile.blocks if block.operator == "attention"]
    assert attentions
    for block in attentions:
        hidden = block.dimensions["hidden"]
        assert (block.cache_bytes_per_token, block.cache_heads) == (2 * hidden * 4, block.dimensions["heads"])


@pytest.mark.slow
def test_a_window_ends_what_is_cached() -> None:
    blocks = {block.id: block for block in estimated("mistral").blocks}
    assert blocks["layers.0.attention"].cache_window_tokens == 5
    held = transformers_cache("mistral", 12, 1)
    kept = held.layers[0].keys.shape[2]
    assert kept == 5 - 1  # without that of the next step, which looks back at 5 with its own
    own = blocks["layers.0.attention"]
    assert cached_bytes(own, 12) == 5 * own.cache_bytes_per_token


def counted_flops(name: str, batch: int, tokens: int) -> int:
    """Floating-point operations of all products of a decode step, as an estimate counts them."""
    model = model_of(name)
    assert model.decoder is not None
    splits = splits_of(model.decoder.at(1), (1,), FLOAT, None)
    case = case_of(CountedForward, "decode", tokens, model.decoder, 4)
    of_kind = {
        bench.key.kind: sum(kernel.flops for kernel in bench.kernels if kernel.matrix)
        for bench in counted_forwards(splits, (batch,), FLOAT, case, fused=False)
    }
    kinds = kinds_of(splits)
    return sum(of_kind[kinds[block.likeness]] for block in splits[0].graph.blocks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_the_work_of_a_step_is_what_torch_counts(name: str) -> None:
    batch, tokens = 3, 8
    held = transformers_cache(name, tokens - 1, batch)
    model: Any = loaded(name).module.model
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.ones(batch, 1, dtype=torch.long), cache=held, use_cache=True)
    finally:
        model.set_attn_implementation(before)
    rotary = [each for each in model.modules() if type(each).__name__.endswith("RotaryEmbedding")]
    turned = sum(2 * each.inv_freq.numel() for each in rotary)  # angles are a product there, of one position
    assert counter.get_total_flops() - counted_flops(name, batch, tokens) in (0, turned, batch * turned)


@pytest.mark.slow
def test_a_step_with_latents_is_the_absorbed_product() -> None:
    """Beside projections of one token: queries into latents, scores, mixture of latents, and out of them."""
    batch, few, many = 3, 4, 8
    heads, rank, rotated = 4, 8, 4
    queries, latents = (
        torch.randn(batch * heads, 1, rank + rotated),
        torch.randn(batch * heads, many - few, rank + rotated),
    )
    with FlopCounterMode(display=False) as counter:
        scores = torch.bmm(queries, latents.transpose(1, 2))
        torch.bmm(scores, latents[..., :rank])
    layers = 2
    assert counted_flops("deepseek_v3", batch, many) - counted_flops("deepseek_v3", batch, few) == (
        layers * counter.get_total_flops()
    )


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_a_step_attends_to_the_cache_with_its_own_key_as_the_last(key_heads: int) -> None:
    samples, heads, tokens, size = 2, 4, 6, 8
    query, own_key, own_value = torch.randn(3, samples, heads, 1, size, dtype=torch.float64)
    key, value = (each[:, :key_heads].repeat_interleave(heads // key_heads, 1) for each in (own_key, own_value))
    mode = CachedAttention(CachedCase("decode", tokens, key_heads, width=8))
    with mode:
        found = F.scaled_dot_product_attention(query, key, value)
    keys, values = (each.repeat_interleave(heads // key_heads, 1) for each in mode._caches[0])
    assert torch.equal(keys[:, :, -1:], key)
    assert torch.allclose(found, F.scaled_dot_product_attention(query, keys, values), rtol=1e-12)
    (sizes,) = mode.found
    assert sizes.kernel(mode.case).flops == 2 * samples * heads * tokens * 2 * size


@pytest.mark.slow
def test_weights_and_caches_of_fewer_bits_take_fewer_bytes() -> None:
    whole = estimated("llama")
    for name, low, high in (("int8", 0.5, 0.6), ("fp8", 0.5, 0.65), ("int4", 0.25, 0.4)):
        small = estimated("llama", weights=name)
        for one, other in zip(whole.blocks, small.blocks, strict=True):
            bytes_ = 2 * (one.parameters + one.frozen_parameters)
            share = other.parameter_bytes / bytes_
            assert share == 1 if one.operator in ("embedding", "head") else low < share < high
    cached = estimated("llama", cache_bytes=1)
    assert [2 * block.cache_bytes_per_token for block in cached.blocks] == [
        block.cache_bytes_per_token for block in whole.blocks
    ]


WIDE = (
    "LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=1, num_attention_heads=32, "
    "vocab_size=320, max_position_embeddings=8192)"
)
"""A layer that reads for longer than kernels take to start."""


@cache
def wide(weights: Weights | None = None, cache_bytes: int | None = None) -> dict[str, PhaseRow]:
    """{kind of block: a decode step of 8 requests of 8,192 tokens}"""
    model = load_configuration(WIDE, sequence=8, meta=True)
    asked = InferenceRequest((8,), (8192,), (1,), weights, cache_bytes)
    profile = estimate_inference(model, asked, device=device_preset("a5000-24gb"), dtype=torch.bfloat16)
    return {block.operator: phase_costs(block, "decode", 8, 8192) for block in profile.blocks}


@pytest.mark.slow
def test_steps_take_less_time_with_fewer_bits() -> None:
    """What reads weights does with 8 bits and again with 4, and attention to the cache in half the time with 8."""
    whole, eight, four = wide(), wide("int8"), wide("int4")
    for kind in {"attention", "ffn"} & whole.keys():
        assert four[kind].forward_ns < eight[kind].forward_ns < whole[kind].forward_ns
        assert eight[kind].core_ns == whole[kind].core_ns
    assert eight["ffn"].forward_ns < 0.6 * whole["ffn"].forward_ns
    assert four["ffn"].forward_ns < 0.35 * whole["ffn"].forward_ns
    assert wide("fp8")["ffn"].forward_ns < whole["ffn"].forward_ns
    cached = wide(cache_bytes=1)
    assert cached["attention"].core_ns < 0.55 * whole["attention"].core_ns
    saved = whole["attention"].core_ns - cached["attention"].core_ns
    assert cached["attention"].forward_ns == whole["attention"].forward_ns - saved
    assert cached["ffn"] == whole["ffn"]


@pytest.mark.slow
def test_products_run_in_fp8_where_a_device_has_it() -> None:
    """A prompt of 8,192 tokens computes for longer than it reads: with integers as long as without, with fp8 in half
    the time on an H100 and no sooner on an A5000; attention and the head stay in 16 bits."""
    model = load_configuration(WIDE, sequence=8, meta=True)

    def prompt(device: str, weights: Weights | None) -> dict[str, PhaseRow]:
        asked = InferenceRequest((1,), (8192,), (1,), weights)
        profile = estimate_inference(model, asked, device=device_preset(device), dtype=torch.bfloat16)
        return {block.operator: phase_costs(block, "prefill", 1, 8192) for block in profile.blocks}

    for device, share in (("h100-80gb", 0.5), ("a5000-24gb", 1.0)):
        whole, fp8, int8 = (prompt(device, weights) for weights in (None, "fp8", "int8"))
        products = [found["ffn"].forward_ns / whole["ffn"].forward_ns for found in (fp8, int8)]
        assert products[0] == pytest.approx(share, rel=0.15), device
        assert products[1] == pytest.approx(1, rel=0.05), device
        assert fp8["attention"].core_ns == whole["attention"].core_ns
        assert fp8["head"] == whole["head"]


@pytest.mark.slow
def test_shares_of_prefill_and_decode_have_their_heads() -> None:
    profile = estimated("llama", shards=(1, 2))
    attention = next(block for block in profile.blocks if block.operator == "attention")
    assert {(row.phase, row.context_tokens, row.microbatch_size, row.shards) for row in attention.phases} == {
        (phase, context, batch, shards)
        for phase in ("prefill", "decode")
        for context in (12,)
        for batch in (4,)
        for shards in (1, 2)
    }
    assert (attention.cache_heads, cached_bytes(attention, 10, 2)) == (2, cached_bytes(attention, 10) // 2)


@pytest.mark.parametrize(("tokens", "share"), [(1, 1 / 4), (2, 7 / 16), (100, 1)])
def test_experts_that_no_token_chooses_are_not_read(tokens: int, share: float) -> None:
    """Two of eight for each token, of a product whose weights are all but 100 of its bytes."""
    spec = BlockSpec("moe", "moe", nn.Identity, dimensions={"experts": 8, "experts_per_token": 2})
    whole = Kernel(16, 900, matrix=True, form="grouped", expert_bytes=800, product=(2, 4, 4, 8))
    read = _chosen(whole, spec, tokens, tokens)
    assert (read.expert_bytes, read.moved_bytes) == (round(800 * share), 100 + round(800 * share))


@pytest.mark.slow
def test_experts_over_devices_have_rows_of_their_own() -> None:
    asked = InferenceRequest((1,), (4,))
    device = device_preset("a5000-24gb")
    profile = estimate_inference(model_of("qwen3_moe"), asked, device=device, dtype=torch.bfloat16, expert=(2,))
    experts = next(block for block in profile.blocks if block.operator == "moe")
    assert {row.expert for row in experts.phases} == {1, 2}
    assert phase_costs(experts, "decode", 1, 4, expert=2).forward_ns > 0
    attention = next(block for block in profile.blocks if block.operator == "attention")
    assert phase_costs(attention, "decode", 1, 4, expert=2) == phase_costs(attention, "decode", 1, 4)


def test_gpt2_is_measured_with_a_cache(tmp_path: Path) -> None:
    profile = pipeplan.profile("gpt2-tiny", inference=True, batch=[1, 2], context="4,16", repeats=1, warmup=0)
    assert profile.is_inference
    assert profile.microbatch_sizes == (1, 2)
    for block in profile.blocks:
        assert len(block.phases) == 8
        assert all(row.forward_ns > 0 and row.repeats == 1 for row in block.phases)
        assert all((row.core_ns > 0) == (block.operator == "attention") for row in block.phases)
        gives = {(row.phase, row.context_tokens, row.microbatch_size): row.activation_bytes for row in block.phases}
        if block.operator == "attention":
            assert gives["prefill", 16, 2] == 16 * gives["decode", 16, 2]
    path = tmp_path / "profile.json"
    pipeplan.write(profile, path)
    assert read_profile(str(path)) == profile


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--inference --context 17", "--context 17: gpt2-tiny takes texts of at most 16 tokens"),
        ("--inference --microbatch 2", "--inference give --batch"),
        ("--batch 2", "--batch is of --inference"),
        ("--inference --weights int4", "--weights and --kv-cache-dtype are of estimates"),
        ("--context 3", "gpt2-tiny has sequences of 16, which 3 devices cannot share evenly"),
        ("--inference --recompute", "--recompute is of backward"),
        ("--inference --estimate --device h100-80gb --expert 2", "gpt2-tiny has no experts"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: str, said: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["profile", "gpt2-tiny", *arguments.split(), "-o", str(tmp_path / "p.json")])
    assert isinstance(result.exception, UsageError)
    assert said in str(result.exception)


def test_only_what_writes_on_has_a_cache() -> None:
    model = zoo_model("tessel-mt5-tiny")
    with pytest.raises(UsageError, match="is not known to generate text token by token"):
        InferenceRequest((1,), (8,)).decoder_of(model)


@pytest.mark.slow
def test_lengths_are_given_in_thousands() -> None:
    profile = pipeplan.estimate(
        "LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=63)",
        device="h100-80gb",
        inference=True,
        context="1k,2k",
        sequence=8,
    )
    assert {row.context_tokens for row in profile.blocks[0].phases} == {1024, 2048}
