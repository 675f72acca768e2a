"""Decode rows of caches in pieces, measured as a run has them; what is asked of them that makes no sense."""

from __future__ import annotations

from typing import Any

import pytest

import pipeplan as face
from builders.clusters import cluster_of
from builders.decoders import drawn_decoder
from pipeplan import UsageError
from pipeplan.files import MeasuredCurve, Plan, Profile, parse, to_json
from pipeplan.runtime.decoding.lockstep import steps_of

LLAMA = (
    "LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8, "
    "num_key_value_heads=4, vocab_size=50, max_position_embeddings=64)"
)

DEEPSEEK = (
    "DeepseekV3Config(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, "
    "num_key_value_heads=4, vocab_size=50, q_lora_rank=16, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, "
    "v_head_dim=8, first_k_dense_replace=2, max_position_embeddings=64)"
)


def profiled(**asked: Any) -> Profile:
    few: dict[str, Any] = {"inference": True, "batch": "1,2", "repeats": 1, "warmup": 0, "threads": 1}
    return face.profile(LLAMA, **(few | asked))


@pytest.mark.slow
def test_blocks_with_a_cache_have_rows_of_pieces_that_searches_take() -> None:
    profile = profiled(context="16", dcp="1,2")
    assert parse(to_json(profile), Profile) == profile
    for block in profile.blocks:
        found = {row.key[1:3] + row.key[5:]: row for row in block.phases if row.dcp > 1}
        wanted = {(tokens, batch, 2, by) for tokens in (16,) for batch in (1, 2) for by in (False, True)}
        assert set(found) == (wanted if block.cache_bytes_per_token else set())
        assert all((row.repeats, row.core_ns) == (1, 0) and row.forward_ns > 0 for row in found.values())
    kinds = {block.id: [row for row in block.phases if row.dcp > 1] for block in profile.blocks}
    assert kinds["layers.0.attention"] == kinds["layers.1.attention"]
    for kv, by_queries in (("cp", False), ("cp-q", True)):
        plan = _plan(profile, kv)
        case = 16, plan.microbatch_size // 2, by_queries
        own = (row for row in kinds["layers.0.attention"] if (*row.key[1:3], row.by_queries) == case)
        assert plan.operations[0].duration_ns > 2 * next(own).forward_ns
        assert face.check(plan, profile=profile).valid


def _plan(profile: Profile, kv: Any) -> Plan:
    return face.search(profile, devices=2, kv=kv, batch=4, context=16, deterministic=True, time_limit=5.0).plan


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"dcp": 2}, "dcp is of decode steps; give context"),
        ({"inference": False, "batch": 1, "dcp": 2}, "dcp is of a profile of inference here; add inference"),
        ({"inference": False, "batch": 1, "processes": 2}, "processes is of a profile of inference here"),
        ({"context": 8, "dcp": 2, "device": "cuda"}, "dcp measures decode steps as run makes them, on CPUs only"),
    ],
)
def test_what_makes_no_sense_is_said(asked: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        profiled(**asked)


@pytest.mark.slow
def test_steps_with_latents_are_measured() -> None:
    """Alone, by heads, and in pieces, whose caches hold latents: what rows of pieces keep is what a run keeps."""
    asked: dict[str, Any] = {"inference": True, "batch": "1,2", "repeats": 2, "warmup": 1, "threads": 1}
    profile = face.profile(DEEPSEEK, context="16", dcp="1,2", shards="1,2", **asked)
    attention = profile.by_id["layers.0.attention"]
    assert attention.cache_bytes_per_token == (8 + 4) * 4
    found = [row.key[1:] for row in attention.phases if row.phase == "decode"]
    assert len(found) == len(set(found)) == 2 * (2 + 2)  # requests; shards, forms of pieces
    assert all(row.forward_ns >= row.core_ns >= 0 and row.forward_ns > 0 for row in attention.phases)
    for kv in ("dp", "tp", "cp", "cp-q"):
        plan = _plan(profile, kv)
        assert face.check(plan, profile=profile).valid, kv


def test_processes_load_the_model_by_its_name() -> None:
    with pytest.raises(UsageError, match="load the model themselves; give its name"):
        face.profile(lambda: None, inference=True, processes=2)


def test_steps_that_so_many_devices_share_are_those_of_rows() -> None:
    """By heads with as many requests as rows are of, by pieces with as many on each device, in both forms."""
    profile = drawn_decoder(1)
    rows = [row for row in profile.blocks[1].phases if row.phase == "decode" and row.shards == 1]
    sizes, tokens = ({getattr(row, name) for row in rows} for name in ("microbatch_size", "context_tokens"))
    found = [*steps_of(profile, 2, pieces=True)]
    assert {(str(each.way.mesh), each.requests, each.context) for each in found} == {
        *(("shards2", size, context) for size in sizes for context in tokens),
        *((f"cache{q}2", 2 * size, context) for q in ("", "q") for size in sizes for context in tokens),
    }
    assert len(found) == 3 * len(sizes) * len(tokens)
    assert {str(each.way.mesh) for each in steps_of(profile, 4, pieces=False)} == {"shards4"}
    attention = next(each for each in profile.blocks if each.cache_bytes_per_token)
    step = next(each for each in found if each.way.cache > 1)
    assert (step.configuration(attention), step.configuration(profile.blocks[-1])) == ("cache2", "samples2")
    assert step.own == step.requests // 2


@pytest.mark.slow
@pytest.mark.long
def test_processes_measure_at_once_and_in_step_with_each_other() -> None:
    """What links are said to take is left out of rows of pieces, to which searches add it; those of heads have all."""
    endless = MeasuredCurve(operation="all_to_all", level="wire", num_devices=2, points=((1, 10**9),))
    cluster = cluster_of(2).model_copy(update={"measured": (endless,)})
    profile = profiled(context=8, dcp="2,4", shards="1,2", processes=2, repeats=2, cluster=cluster)
    assert "Measured by 2 processes of one machine at once." in profile.source.notes
    assert {row.dcp for block in profile.blocks for row in block.phases} == {1, 2, 4}
    for block in profile.kinds:
        for row in (each for each in block.phases if each.phase == "decode"):
            assert row.repeats == 2
            assert (row.forward_ns == 1) == (row.dcp == 2), row  # a block of these takes longer than 1 ns
