"""Uniform layouts as plans: closed forms beside what their profile, placement and cluster come to."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

import pipeplan
from pipeplan.checker import check
from pipeplan.costs.uniform.as_profile import cluster_of, placement_of
from pipeplan.costs.uniform.judging import Judged
from pipeplan.costs.uniform.memory import memory
from pipeplan.costs.uniform.published import PublishedRun
from pipeplan.costs.uniform.step import step_time
from pipeplan.costs.uniform.words import Machine, Transformer, UniformLayout
from pipeplan.errors import UsageError
from pipeplan.planning.uniform import judged_by_plans, planned
from pipeplan.search_constants import MOST_LAYERS

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
def test_every_figure_is_as_the_checker_counts_it(model: Transformer, changes: dict[str, Any]) -> None:
    found = planned("layout", model, replace(ONE, **changes), A100S)
    assert check(found.plan(), found.profile, found.cluster).valid


@pytest.mark.parametrize("zero", [1, 3])
def test_what_overlaps_is_the_clusters(zero: int) -> None:
    """The same layout takes longer where less is beside compute, and no plan is right on the other clusters."""
    layout = replace(ONE, data=16, global_batch=16, zero=zero, zero_group=8)
    found = planned("layout", GPT, layout, A100S)
    placement = placement_of(GPT, layout)
    plans = {}
    for overlap in ("all", "sums", "none"):
        cluster = found.cluster.model_copy(update={"overlap": overlap})
        how: dict[str, Any] = {"placement": placement, "cluster": cluster, "mini_batch": 16, "microbatch_size": 16}
        how |= {"scheduler": "1f1b", "zero_exchange": "inside", "deterministic": True, "time_limit": 2}
        plans[overlap] = pipeplan.search(found.profile, **how).plan
        assert check(plans[overlap], found.profile, cluster).valid
        with_cluster = pipeplan.simulate(plans[overlap], profile=found.profile, cluster=cluster)
        assert with_cluster.iteration_ns == plans[overlap].predicted.iteration_ns
    times = [plans[overlap].predicted.iteration_ns for overlap in ("all", "sums", "none")]
    assert times[0] == found.iteration_ns
    assert times[0] < times[1] <= times[2]
    assert (times[1] < times[2]) == (zero == 1)  # divided gradients are summed beside backward by "all" alone
    shorter = plans["all"].stages[0].gather_ns
    elsewhere = found.cluster.model_copy(update={"overlap": "sums"})
    assert shorter < plans["sums"].stages[0].gather_ns or zero == 3
    assert not check(plans["all"], found.profile, elsewhere).valid


def test_blocks_exchange_inside_of_actions_where_asked_for() -> None:
    layout = replace(ONE, data=16, global_batch=64, zero=3, zero_group=16, gradient_bytes=2)
    found = planned("layout", GPT, layout, A100S)
    how: dict[str, Any] = {"cluster": found.cluster, "memory": "1TB", "mini_batch": 64, "microbatch_size": 16}
    how |= {"tp": 1, "pp": 1, "dp": 16, "zero": 3, "deterministic": True, "time_limit": 0.5, "recompute": "none"}
    inside = pipeplan.search(found.profile, zero_exchange="inside", **how).plan
    chosen = pipeplan.search(found.profile, **how).plan
    assert all(stage.unshard_every is None and stage.reduce_every is None for stage in inside.stages)
    assert any(stage.unshard_every is not None for stage in chosen.stages)
    assert chosen.predicted.iteration_ns < inside.predicted.iteration_ns
    assert inside.predicted.iteration_ns == pytest.approx(found.iteration_ns, rel=1e-3)


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
