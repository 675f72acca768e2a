"""Decode rows of caches in pieces, measured as a run has them; what is asked of them that makes no sense."""

from __future__ import annotations

from typing import Any

import pytest

import pipeplan as face
from pipeplan import UsageError
from pipeplan.files import Plan, Profile, parse, to_json

LLAMA = (
    "LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8, "
    "num_key_value_heads=4, vocab_size=50, max_position_embeddings=64)"
)


def profiled(**asked: Any) -> Profile:
    few: dict[str, Any] = {"inference": True, "batch": "1,2", "repeats": 1, "warmup": 0, "threads": 1}
    return face.profile(LLAMA, **(few | asked))


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


def test_processes_load_the_model_by_its_name() -> None:
    with pytest.raises(UsageError, match="load the model themselves; give its name"):
        face.profile(lambda: None, inference=True, processes=2)


@pytest.mark.slow
def test_processes_measure_at_once() -> None:
    profile = profiled(context=8, dcp=2, processes=2)
    assert "Measured by 2 processes of one machine at once." in profile.source.notes
    assert {row.dcp for block in profile.blocks for row in block.phases} == {1, 2}
