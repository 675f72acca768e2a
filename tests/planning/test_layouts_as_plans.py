"""Uniform layouts as plans: closed forms beside what their profile, placement and cluster come to."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from pipeplan.checker import check
from pipeplan.costs.uniform.as_profile import cluster_of, placement_of
from pipeplan.costs.uniform.judging import Judged
from pipeplan.costs.uniform.memory import memory
from pipeplan.costs.uniform.published import PublishedRun
from pipeplan.costs.uniform.step import step_time
from pipeplan.costs.uniform.words import Machine, Transformer, UniformLayout
from pipeplan.errors import UsageError
from pipeplan.planning.uniform import MOST_LAYERS, judged_by_plans, planned

GPT = Transformer(
    layers=16,
    hidden=4096,
    heads=32,
    kv_heads=32,
    head_size=128,
    ffn=16384,
    gated=0,
    vocabulary=50_304,
    tied=0,
    sequence=2048,
)
EXPERTS = replace(GPT, experts=16, top_k=2, moe_ffn=4096, gated=1)
ONE = UniformLayout(tensor=1, pipeline=1, chunks=1, context=1, data=1, microbatch=1, global_batch=16)
A100S = Machine(
    matrix_flops_per_s=3.12e14,
    fp8_flops_per_s=0,
    multiprocessors=108,
    bandwidth_bytes_per_s=2e12,
    memory_bytes=80e9,
    node=8,
    link_bytes_per_s=3e11,
    adapter_bytes_per_s=2.5e10,
    matrix_share=0.7,
    bandwidth_share=0.8,
    attention_forward=0.6,
    attention_backward=0.5,
)
AGAIN = dict.fromkeys(("again_core", "again_up", "again_products", "again_elementwise"), 1.0)
CASES: list[tuple[Transformer, dict[str, Any]]] = [
    (GPT, {}),
    (GPT, {"data": 16, "global_batch": 128}),
    (GPT, {"data": 16, "global_batch": 128, "overlap_data": 0}),
    (GPT, {"data": 16, "global_batch": 64, "zero": 1, "zero_group": 16}),
    (GPT, {"data": 16, "global_batch": 64, "zero": 1, "zero_group": 4}),
    (GPT, {"data": 32, "global_batch": 128, "microbatch": 2, "zero": 3, "zero_group": 32, "gradient_bytes": 2}),
    (GPT, {"data": 32, "global_batch": 128, "microbatch": 4, "zero": 3, "zero_group": 8, "gradient_bytes": 2}),
    (GPT, {"tensor": 8, "sequence_parallel": 0}),
    (GPT, {"tensor": 4, "overlap_tensor": 1, "context": 2}),
    (GPT, {"tensor": 2, "context": 4, "ring": 1, "data": 2, "zero": 1, "zero_group": 8}),
    (GPT, {"pipeline": 4, "global_batch": 32}),
    (GPT, {"pipeline": 4, "tensor": 2, "data": 4, "global_batch": 64, "chunks": 2, "zero": 1, "zero_group": 4}),
    (GPT, {"pipeline": 8, "tensor": 4, "sequence_parallel": 0, "global_batch": 64}),
    (replace(GPT, layers=30), {"pipeline": 8, "global_batch": 64}),
    (replace(GPT, tied=1), {"pipeline": 4, "global_batch": 32, "data": 2}),
    (replace(GPT, tied=1), {"data": 8, "zero": 3, "zero_group": 8, "gradient_bytes": 2}),
    (GPT, {"pipeline": 4, "schedule": "zb-1p", "global_batch": 32}),
    (GPT, {"pipeline": 4, "schedule": "zb-2p", "global_batch": 32}),
    (GPT, {"pipeline": 4, "schedule": "zb-v", "chunks": 2, "global_batch": 32}),
    (GPT, {"pipeline": 2, **AGAIN}),
    (GPT, {"pipeline": 2, "again_core": 1.0, "attention": "unfused"}),
    (GPT, {"again_core": 0.5, "again_up": 0.5, "again_products": 0.5, "again_elementwise": 0.5}),
    (GPT, {"again_elementwise": 1.0}),
    (EXPERTS, {"data": 16, "expert": 8, "global_batch": 64, "zero": 1, "zero_group": 16}),
    (EXPERTS, {"tensor": 2, "data": 8, "expert": 4, "expert_tensor": 2, "global_batch": 32}),
    (EXPERTS, {"tensor": 4, "data": 2, "expert_tensor": 4}),
    (EXPERTS, {"pipeline": 2, "data": 8, "expert": 8, "zero": 3, "zero_group": 8, "gradient_bytes": 2}),
]


@pytest.mark.parametrize(("model", "changes"), CASES)
def test_plans_take_what_closed_forms_say(model: Transformer, changes: dict[str, Any]) -> None:
    layout = replace(ONE, **changes)
    found = planned("layout", model, layout, A100S)
    assert float(step_time(model, layout, A100S).iteration_ns) == pytest.approx(found.iteration_ns, rel=0.03)
    if layout.schedule == "1f1b" and layout.zero < 3:
        assert float(memory(model, layout, A100S).peak_bytes) == pytest.approx(found.peak_bytes, rel=0.06)
    plan = found.plan()
    assert plan.predicted is not None
    assert plan.predicted.iteration_ns == found.iteration_ns
    assert check(plan).valid


@pytest.mark.parametrize(("model", "changes"), CASES)
def test_what_other_plans_have_too_is_as_the_checker_counts_it(model: Transformer, changes: dict[str, Any]) -> None:
    """But for what is gathered beside the next forward, and sums that wait for everything."""
    layout = replace(ONE, **changes)
    found = planned("layout", model, layout, A100S)
    verdict = check(found.plan(), found.profile, found.cluster)
    beside = {"gather_ns", "buckets"} | ({"sync_ns", "bytes"} if layout.zero > 1 else set())
    assert {problem.place.rpartition(".")[2] for problem in verdict.problems} <= beside
    if layout.data * layout.context == 1:
        assert verdict.valid


def test_random_layouts() -> None:
    draw = random.Random(5)
    for _ in range(12):
        tensor, pipeline, data = (draw.choice([1, 2, 4]) for _ in range(3))
        zero = draw.choice([0, 1]) if data > 1 else 0
        layout = replace(
            ONE,
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            zero=zero,
            zero_group=data if zero else 1,
            microbatch=draw.choice([1, 2]),
            global_batch=64 * data,
            sequence_parallel=int(tensor > 1) * draw.choice([0, 1]),
            overlap_tensor=draw.choice([0, 1]),
            again_core=draw.choice([0.0, 1.0]),
        )
        model = replace(GPT, layers=draw.choice([16, 18, 22]), tied=draw.choice([0, 1]))
        found = planned("layout", model, layout, A100S)
        closed = float(step_time(model, layout, A100S).iteration_ns)
        assert closed == pytest.approx(found.iteration_ns, rel=0.04), (model.layers, layout)


def test_no_stage_is_on_two_domains_where_it_fits_into_one() -> None:
    layout = replace(ONE, tensor=4, data=16, pipeline=4, global_batch=16 * 8)
    assert cluster_of("domains", layout, replace(A100S, node=72)).levels[0].group_size == 64
    placement = placement_of(GPT, layout)
    assert [stage.devices[0] for stage in placement.stages] == [0, 64, 128, 192]


def test_too_many_layers_or_devices_keep_their_closed_forms() -> None:
    large = replace(GPT, layers=MOST_LAYERS + 1)
    with pytest.raises(UsageError, match="too many to be planned"):
        planned("large", large, ONE, A100S)
    run = PublishedRun(large, ONE, A100S, "a100-80gb", ())
    judged = Judged("large", "", 1.0, None, run, 2.0, 3.0, closed_form_s=2.0)
    assert judged_by_plans([judged]) == [judged]
