"""Closed forms of uniform layouts against cases computed by hand."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from pipeplan.costs.communication import Exchange
from pipeplan.costs.recipes import OPTIMIZERS, RECIPES, bytes_per_parameter, step_bytes
from pipeplan.costs.uniform.layer import collective_ns, layer_of, product_ns, ring_rate
from pipeplan.costs.uniform.memory import memory, microbatches_in_flight
from pipeplan.costs.uniform.state import parameter_bytes
from pipeplan.costs.uniform.step import chunk_layers, layers_of_stages, step_time
from pipeplan.costs.uniform.words import Machine, Transformer, UniformLayout, stacked
from pipeplan.files import Recipe

GPT = Transformer(
    layers=8,
    hidden=1024,
    heads=8,
    kv_heads=8,
    head_size=128,
    ffn=4096,
    gated=0,
    vocabulary=0,
    tied=0,
    sequence=1024,
)
ONE = UniformLayout(tensor=1, pipeline=1, chunks=1, context=1, data=1, microbatch=1, global_batch=1)
UNBOUNDED = Machine(  # links and memory take no time
    matrix_flops_per_s=1e14,
    fp8_flops_per_s=0,
    multiprocessors=100,
    bandwidth_bytes_per_s=1e30,
    memory_bytes=80e9,
    node=8,
    link_bytes_per_s=1e30,
    adapter_bytes_per_s=1e30,
    matrix_share=0.5,
    bandwidth_share=1.0,
    attention_forward=0.5,
    attention_backward=0.25,
)
LINKED = replace(UNBOUNDED, link_bytes_per_s=3e11, adapter_bytes_per_s=2.5e10, bandwidth_share=0.8)


@pytest.mark.parametrize(
    ("rows", "columns", "copies", "waves"),
    [
        (128 * 10, 256 * 10, 1, 1.0),  # 100 large tiles on 100 multiprocessors: one full wave
        (256 * 10, 128 * 10, 1, 1.0),  # the other way round
        (128 * 9 + 1, 256 * 10, 1, 1.0),  # a tile that is not full takes as long
        (128 * 10 + 1, 256 * 10, 1, 3 / 2 / 0.9),  # 110 would be two waves; 220 of half the size are three, at 0.9
        (128, 256, 1, 1 / 2 / 0.9),  # two small tiles: 98 multiprocessors have nothing
        (128, 256, 150, 3 / 2 / 0.9),  # of many products at once: 300 small tiles
    ],
)
def test_products_run_in_waves_of_tiles(rows: int, columns: int, copies: int, waves: float) -> None:
    inner = 512
    one_tile_ns = 1e9 * 2 * 128 * 256 * inner / (1e14 * 0.5 / 100)
    assert product_ns(UNBOUNDED, 1e14, rows, inner, columns, copies) == pytest.approx(waves * one_tile_ns)


def test_products_are_no_quicker_than_their_bytes() -> None:
    slow = replace(UNBOUNDED, bandwidth_bytes_per_s=1e9, bandwidth_share=0.5)
    assert product_ns(slow, 1e14, 64, 32, 16) == pytest.approx(1e9 * 2 * (64 * 32 + 32 * 16 + 64 * 16) / 5e8)


@pytest.mark.parametrize(
    ("devices", "stride", "rate"),
    [
        (8, 1, 3e11),  # in the node
        (4, 2, 3e11),
        (16, 1, 2e11),  # eight of the ring in each node, each with its adapter
        (4, 4, 5e10),  # two in each
        (4, 8, 2.5e10),  # one
        (3, 64, 2.5e10),
    ],
)
def test_rings_go_at_what_the_adapters_of_a_node_carry(devices: int, stride: int, rate: float) -> None:
    assert ring_rate(LINKED, devices, stride) == pytest.approx(0.8 * rate)


def test_collectives_are_rings() -> None:
    exchange = Exchange("all_reduce", 8_000_000)
    assert collective_ns(LINKED, exchange, 8, 1) == pytest.approx(14 * (2_000 + 1e9 * 1e6 / 2.4e11))
    assert collective_ns(LINKED, exchange, 1, 1) == 0


def test_a_layer_is_its_products_and_attention() -> None:
    layer, tokens, hidden = layer_of(GPT, ONE, UNBOUNDED), 1024, 1024
    assert layer.products.parameters == 12 * hidden * hidden
    assert layer.core.forward_ns == pytest.approx(1e9 * 2 * tokens * tokens * hidden / (1e14 * 0.5))  # causal: half
    assert layer.core.backward_ns == pytest.approx(1e9 * 5 * tokens * tokens * hidden / (1e14 * 0.25))


def test_a_gated_layer_with_grouped_heads_has_fewer_keys_and_one_product_more() -> None:
    model = replace(GPT, kv_heads=2, gated=1, ffn=2048)
    assert layer_of(model, ONE, UNBOUNDED).products.parameters == 1024 * 1024 * (1 + 2 / 4 + 1 + 3 * 2)


def test_experts_are_on_their_devices_and_see_their_tokens() -> None:
    model = replace(GPT, experts=16, top_k=2, moe_ffn=512, gated=1, shared_ffn=256)
    layout = replace(ONE, data=8, expert=8, global_batch=8)
    layer = layer_of(model, layout, UNBOUNDED)
    assert layer.experts.parameters == 2 * 3 * 1024 * 512
    assert layer.products.parameters == 4 * 1024 * 1024 + 3 * 1024 * 256 + 1024 * 16
    # each expert gets 8 devices' 1,024 tokens x 2 of 16 experts: 1,024 rows
    flops = 2 * 2 * 1024 * 1024 * 3 * 512
    assert layer.experts.forward_ns >= 1e9 * flops / (1e14 * 0.5)


def test_a_token_goes_once_to_each_node_of_its_experts() -> None:
    model = replace(GPT, experts=16, top_k=4, moe_ffn=512)
    layout = replace(ONE, data=16, expert=16, global_batch=16)
    machine = replace(LINKED, link_bytes_per_s=1e30)
    reached = 2 * (1 - 0.5**4) * 0.5  # of two nodes, and of these not its own
    assert layer_of(model, layout, machine).expert_ns == pytest.approx(
        2 * 1e9 * 2 * 1024 * 1024 * reached / (2.5e10 * 0.8)
    )


def test_latent_attention_has_products_down_and_up() -> None:
    model = replace(GPT, query_rank=256, latent_rank=128, rotary_size=32, head_size=64, value_size=64)
    layer = layer_of(model, ONE, UNBOUNDED)
    assert layer.up.parameters == 256 * 8 * (64 + 32) + 128 * 8 * (64 + 64)
    attention = 1024 * 256 + 1024 * (128 + 32) + 8 * 64 * 1024
    assert layer.products.parameters == attention + 2 * 1024 * 4096


def test_in_fp8_products_with_weights_are_quicker_and_attention_is_not() -> None:
    able = replace(UNBOUNDED, fp8_flops_per_s=2e14)
    wide, eight = (layer_of(GPT, replace(ONE, recipe=each), able) for each in ("bf16-mixed", "fp8-mixed"))
    assert eight.products.forward_ns == pytest.approx(wide.products.forward_ns / 2)
    assert eight.core == wide.core
    apart = [
        layer_of(GPT, replace(ONE, recipe=each, attention="unfused"), able).core for each in ("bf16-mixed", "fp8-mixed")
    ]
    assert apart[0] == apart[1]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_step_moves_what_recipe_and_optimizer_keep(name: str, optimizer: str) -> None:
    layout, recipe = replace(ONE, recipe=name, optimizer=optimizer), Recipe(name=name, optimizer=optimizer)
    moved, kept = step_bytes(bytes_per_parameter(recipe), recipe), bytes_per_parameter(recipe)
    model, slow = replace(GPT, vocabulary=50_000, tied=1), replace(UNBOUNDED, bandwidth_bytes_per_s=1e12)
    parameters = 8 * layer_of(model, layout, slow).whole.parameters + 1024 * 50_000
    assert step_time(model, layout, slow).optimizer_ns == pytest.approx(moved * parameters / 1e3)
    assert memory(model, layout, slow).state_bytes == kept.total * parameters
    both = parameter_bytes(stacked([layout, replace(ONE, recipe="bf16")]))
    assert both.step.tolist() == [moved, step_bytes(bytes_per_parameter(Recipe(name="bf16")), Recipe(name="bf16"))]


def test_unfused_attention_computes_the_whole_square_and_moves_scores() -> None:
    slow = replace(UNBOUNDED, bandwidth_bytes_per_s=1e12)
    fused, apart = (layer_of(GPT, replace(ONE, attention=each), slow).core for each in ("flash-2", "unfused"))
    scores = 8 * 1024 * 1024
    assert apart.forward_ns > 1e9 * 8 * scores / 1e12 > fused.forward_ns
    assert apart.saved_bytes - fused.saved_bytes == pytest.approx(5 * scores, rel=1e-6)


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "schedule", "chunk_by_chunk"),
    [
        (8, 4, 1, "1f1b", [2, 2, 2, 2]),
        (30, 8, 1, "1f1b", [3, 4, 4, 4, 4, 4, 4, 3]),
        (7, 4, 1, "1f1b", [2, 2, 2, 1]),
        (9, 5, 1, "1f1b", [2, 2, 2, 2, 1]),
        (27, 8, 1, "1f1b", [3, 3, 4, 4, 4, 3, 3, 3]),
        (13, 4, 2, "1f1b", [1, 2, 2, 2, 2, 2, 1, 1]),
        (6, 4, 1, "1f1b", [1, 2, 2, 1]),
        (30, 8, 2, "zb-v", [1, *14 * [2], 1]),
    ],
)
def test_layers_of_stages(layers: int, stages: int, chunks: int, schedule: str, chunk_by_chunk: list[int]) -> None:
    assert chunk_layers(layers, stages, chunks) == chunk_by_chunk
    v_shape = schedule == "zb-v"
    devices = [min(place, 2 * stages - 1 - place) if v_shape else place % stages for place in range(stages * chunks)]
    held = [0] * stages
    for device, number in zip(devices, chunk_by_chunk, strict=True):
        held[device] += number
    middle, first, last = layers_of_stages(
        replace(GPT, layers=layers), replace(ONE, pipeline=stages, chunks=chunks, schedule=schedule)
    )
    assert (middle, first, last) == (max(held), held[0], held[devices[-1]])


def _stage_ns(time: object) -> float:
    return sum(float(getattr(time, each)) for each in ("forward_ns", "input_grad_ns", "weight_grad_ns"))


def test_bubbles_of_the_schedules() -> None:
    layout = replace(ONE, pipeline=4, global_batch=16)
    plain = step_time(GPT, layout, UNBOUNDED)
    each, weight = 2 * _stage_ns(plain), 2 * float(plain.weight_grad_ns)
    assert plain.iteration_ns == pytest.approx((16 + 3) * each)
    interleaved = step_time(GPT, replace(layout, chunks=2), UNBOUNDED)
    assert interleaved.iteration_ns == pytest.approx((16 + 3 / 2) * each)
    for schedule, count in (("zb-1p", 2), ("zb-2p", 3)):
        time = step_time(GPT, replace(layout, schedule=schedule), UNBOUNDED)
        assert time.bubble_ns == pytest.approx(max(0, 3 * (each - count * weight)))
    both = step_time(GPT, replace(layout, schedule="zb-v", chunks=2), UNBOUNDED)
    assert both.bubble_ns == pytest.approx(3 * both.input_grad_ns)  # of a chunk, which has one of two layers
    few = step_time(GPT, replace(layout, schedule="zb-2p", global_batch=2), UNBOUNDED)
    assert few.bubble_ns == pytest.approx(3 * each - (3 + 1) * weight)


def test_recomputation_runs_the_forward_again() -> None:
    none = step_time(GPT, ONE, UNBOUNDED)
    again = dict.fromkeys(("again_core", "again_up", "again_products", "again_elementwise"), 1.0)
    full = step_time(GPT, replace(ONE, **again), UNBOUNDED)
    core = step_time(GPT, replace(ONE, again_core=1.0), UNBOUNDED)
    assert full.iteration_ns - none.iteration_ns == pytest.approx(8 * none.forward_ns)
    layer = layer_of(GPT, ONE, UNBOUNDED)
    assert core.iteration_ns - none.iteration_ns == pytest.approx(8 * layer.core.forward_ns)


def test_tensor_parallelism_adds_two_all_reduces_each_way() -> None:
    layout = replace(ONE, tensor=8, sequence_parallel=0)
    machine = replace(LINKED, bandwidth_bytes_per_s=1e30)
    linked, free = step_time(GPT, layout, machine), step_time(GPT, layout, UNBOUNDED)
    ring = collective_ns(machine, Exchange("all_reduce", 2 * 1024 * 1024), 8, 1)
    start = 14 * 2_000  # steps of a ring take time with unbounded links, too
    assert linked.forward_ns - free.forward_ns == pytest.approx(2 * (ring - start))
    assert linked.input_grad_ns - free.input_grad_ns == pytest.approx(2 * (ring - start))
    hidden = step_time(GPT, replace(layout, overlap_tensor=1), machine)
    assert hidden.forward_ns < linked.forward_ns


def test_sharded_parameters_are_gathered_beside_compute() -> None:
    layout = replace(ONE, data=16, zero=3, zero_group=16, global_batch=16)
    machine = replace(LINKED, adapter_bytes_per_s=1e9, bandwidth_bytes_per_s=1e30)
    layer, plain = layer_of(GPT, layout, machine), step_time(GPT, replace(layout, zero=0, zero_group=1), machine)
    gather = 15 * (2_000 + 1e9 * 2 * float(layer.products.parameters) / 16 / (8e9 * 0.8))
    sharded = step_time(GPT, layout, machine)
    assert sharded.forward_ns - plain.forward_ns >= gather - plain.forward_ns > 0


def test_gradients_hide_behind_the_last_backward() -> None:
    model = replace(GPT, vocabulary=1024)
    layout = replace(ONE, data=8, global_batch=8)
    beside, after = (step_time(model, replace(layout, overlap_data=each), LINKED).reduction_ns for each in (1, 0))
    assert 0 < beside < after
    alone = step_time(model, replace(ONE, global_batch=8), LINKED)
    assert alone.reduction_ns == 0 < alone.optimizer_ns


def test_a_table_of_layouts_says_what_each_says() -> None:
    models = [
        replace(GPT, vocabulary=32_000),
        replace(GPT, experts=8, top_k=2, moe_ffn=1024),
        replace(GPT, layers=30, tied=1),
    ]
    layouts = [
        replace(ONE, tensor=2, pipeline=2, chunks=2, data=4, global_batch=32, zero=1, zero_group=4),
        replace(ONE, data=8, expert=8, global_batch=16, attention="unfused"),
        replace(ONE, pipeline=8, schedule="zb-v", chunks=2, global_batch=64, recipe="fp16-mixed", again_core=1.0),
    ]
    machines = [LINKED, replace(LINKED, node=4), replace(UNBOUNDED, matrix_share=0.7)]
    table = step_time(stacked(models), stacked(layouts), stacked(machines))
    sizes = memory(stacked(models), stacked(layouts), stacked(machines))
    for place, said in enumerate(zip(models, layouts, machines, strict=True)):
        one, size = step_time(*said), memory(*said)
        for each in fields(one):
            whole = np.broadcast_to(getattr(table, each.name), 3)
            assert float(whole[place]) == pytest.approx(float(getattr(one, each.name)))
        assert float(sizes.peak_bytes[place]) == pytest.approx(float(size.peak_bytes))


def test_memory_by_hand() -> None:
    parameters = 8 * (12 * 1024 * 1024 + 2 * 2 * 1024)
    found = memory(GPT, ONE, UNBOUNDED)
    assert float(found.state_bytes) == 18 * parameters
    for level, bytes_ in ((1, 2 + 4 + 12 / 4), (2, 2 + 4 / 4 + 12 / 4), (3, 18 / 4)):
        sharded = memory(GPT, replace(ONE, data=4, global_batch=4, zero=level, zero_group=4), UNBOUNDED)
        assert float(sharded.state_bytes) == pytest.approx(bytes_ * parameters)
    # Korthikanti et al., equation 1, has 34 s b h with masks and outputs that we count elsewhere or not at all
    a_layer = float(found.activation_bytes) / 8 / (1024 * 1024)
    assert 28 <= a_layer <= 36
    full = dict.fromkeys(("again_core", "again_up", "again_products", "again_elementwise"), 1.0)
    kept = memory(GPT, replace(ONE, **full), UNBOUNDED)
    assert float(kept.activation_bytes) == 8 * 2 * 1024 * 1024
    assert float(kept.workspace_bytes) == pytest.approx(float(found.activation_bytes) / 8 - 2 * 1024 * 1024)


def test_micro_batches_in_flight() -> None:
    layout = replace(ONE, pipeline=8, global_batch=64)
    assert microbatches_in_flight(layout) == 8
    assert microbatches_in_flight(layout, 3) == 5
    assert microbatches_in_flight(replace(layout, chunks=2)) == 8 + 7 / 2
    assert microbatches_in_flight(replace(layout, schedule="zb-2p")) == 15
    assert microbatches_in_flight(replace(layout, global_batch=4)) == 4


def test_groups_that_divide_state_sum_between_each_other() -> None:
    """Inside a group gradients are scattered and parameters gathered, and all groups sum a part of both halves."""
    model = replace(GPT, vocabulary=1024)
    layout = replace(ONE, data=32, global_batch=32, overlap_data=0, zero=1, zero_group=8)
    ring = replace(LINKED, bandwidth_share=1.0)
    of_layer = float(layer_of(model, layout, ring).whole.parameters)
    parameters = 8 * of_layer + 2 * 1024 * 1024
    inside = [collective_ns(ring, Exchange(what, size * parameters), 8, 1) for what, size in SCATTERED]
    across = collective_ns(ring, Exchange("all_reduce", 4 * parameters / 8), 4, 8)
    assert step_time(model, layout, ring).reduction_ns == pytest.approx(sum(inside) + across)
    whole = collective_ns(ring, Exchange("all_reduce", 4 * parameters), 32, 1)
    assert step_time(model, replace(layout, zero=0, zero_group=1), ring).reduction_ns == pytest.approx(whole)


SCATTERED = (("reduce_scatter", 4), ("all_gather", 2))
