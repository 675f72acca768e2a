"""Closed forms per operator: against hand counts, against what was measured, and how their times behave."""

from __future__ import annotations

import pytest

from pipeplan.costs.communication import Exchange, prices_in, prices_of, ring_ns
from pipeplan.costs.devices import PRESETS, Kernel, device_preset
from pipeplan.costs.operators import (
    Operator,
    activation,
    add,
    attention_core,
    average_pool,
    batch_norm,
    concatenate,
    convolution,
    cost_row,
    embedding,
    exchange,
    linear,
    max_pool,
    norm,
    recurrent,
    relu,
    sequence_of,
    vocabulary_loss,
)
from pipeplan.errors import UsageError
from pipeplan.files import Cluster, Profile, Source, read_profile
from pipeplan.files.cluster import DeviceKind, LinkLevel, MeasuredCurve
from support.paths import ROOT

SEQUENCE, VOCABULARY = 1024, 50257
MEASURED = [("gpt2-124m-cpu", 768, 12), ("gpt2-345m-cpu", 1024, 16)]


def attention(samples: int, hidden: int, heads: int, width: int) -> Operator:
    tokens = samples * SEQUENCE
    return sequence_of(
        norm(tokens, hidden, width),
        linear(tokens, hidden, 3 * hidden, width),
        attention_core(samples, SEQUENCE, SEQUENCE, heads, hidden // heads, width, causal=True),
        linear(tokens, hidden, hidden, width),
        add(tokens * hidden, width),
        residual_bytes=tokens * hidden * width,
    )


def feed_forward(samples: int, hidden: int, width: int) -> Operator:
    tokens = samples * SEQUENCE
    return sequence_of(
        norm(tokens, hidden, width),
        linear(tokens, hidden, 4 * hidden, width),
        activation(4 * tokens * hidden, width),
        linear(tokens, 4 * hidden, hidden, width),
        add(tokens * hidden, width),
        residual_bytes=tokens * hidden * width,
    )


def head(samples: int, hidden: int, width: int) -> Operator:
    tokens = samples * SEQUENCE
    return sequence_of(
        norm(tokens, hidden, width),
        linear(tokens, hidden, VOCABULARY, width, bias=False),
        vocabulary_loss(tokens, VOCABULARY, width),
    )


def gpt2(samples: int, hidden: int, heads: int, width: int) -> dict[str, Operator]:
    return {
        "embedding": embedding(samples, SEQUENCE, VOCABULARY, hidden, width, positions=SEQUENCE),
        "layer0.attention": attention(samples, hidden, heads, width),
        "layer0.ffn": feed_forward(samples, hidden, width),
        "head": head(samples, hidden, width),
    }


def test_parameters_of_one_layer_of_gpt2_by_hand() -> None:
    halves = gpt2(1, 768, 12, 2)
    assert halves["layer0.attention"].parameters == 2 * 768 + (768 * 2304 + 2304) + (768 * 768 + 768) == 2_363_904
    assert halves["layer0.ffn"].parameters == 2 * 768 + (768 * 3072 + 3072) + (3072 * 768 + 768) == 4_723_968
    total = halves["embedding"].parameters + 12 * (2_363_904 + 4_723_968) + 2 * 768
    assert total == 124_439_808
    assert halves["head"].parameters == 2 * 768 + VOCABULARY * 768


def test_activation_bytes_of_a_layer_by_hand() -> None:
    """In units of one [tokens, hidden] tensor attention keeps 1 + 1 + 3 + 1, feed-forward 1 + 1 + 4 + 4."""
    unit = 2 * SEQUENCE * 768 * 2
    statistics = 2 * SEQUENCE * 8
    halves = gpt2(2, 768, 12, 2)
    assert halves["layer0.attention"].saved_bytes == 6 * unit + statistics + 2 * SEQUENCE * 12 * 4
    assert halves["layer0.ffn"].saved_bytes == 10 * unit + statistics
    assert halves["layer0.attention"].deferred_bytes == (1 + 3 + 1 + 1) * unit
    assert halves["layer0.ffn"].deferred_bytes == (1 + 4 + 4 + 1) * unit


def test_flops_of_a_layer_by_hand() -> None:
    """Megatron-LM (SC'21), appendix: 24 b s h^2 and 4 b s^2 h for the matrix products of a layer's forward."""
    samples, hidden = 2, 768
    halves = (attention(samples, hidden, 12, 2), feed_forward(samples, hidden, 2))
    matrix = sum(kernel.flops for half in halves for kernel in half.forward if kernel.matrix)
    masked = 4 * samples * SEQUENCE**2 * hidden // 2
    assert matrix == 24 * samples * SEQUENCE * hidden**2 + masked


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize(("name", "hidden", "heads"), MEASURED)
def test_bytes_are_those_measured(name: str, hidden: int, heads: int, samples: int) -> None:
    """The shipped profiles were measured in float32 with torch: 4 bytes per number."""
    profile: Profile = read_profile(str(ROOT / "profiles" / f"{name}.json"))
    blocks = {block.id: block for block in profile.blocks}
    for id_, operator in gpt2(samples, hidden, heads, 4).items():
        (row,) = [each for each in blocks[id_].costs if each.microbatch_size == samples]
        assert operator.parameters == blocks[id_].parameters
        assert operator.saved_bytes == pytest.approx(row.activation_bytes, rel=1e-3)
        assert operator.deferred_bytes == pytest.approx(row.weight_grad_bytes, rel=1e-3)
        workspace = max(operator.gradient_bytes, operator.update_bytes)
        assert workspace == pytest.approx(row.workspace_bytes, rel=0.07)  # the CPU's attention has a buffer of its own


def test_cross_attention_and_masks() -> None:
    whole = attention_core(3, 100, 70, 8, 64, 2)
    assert whole.flops == 4 * 3 * 8 * 100 * 70 * 64
    assert whole.saved_bytes == 3 * 8 * (64 * (100 + 2 * 70) * 2 + 100 * 4)
    masked = attention_core(3, 100, 100, 8, 64, 2, causal=True)
    assert 2 * masked.flops == attention_core(3, 100, 100, 8, 64, 2).flops
    assert sum(k.flops for k in whole.input_grad) * 2 == 5 * whole.flops


def test_gates_and_plain_tables() -> None:
    assert activation(10, 2, gated=True).saved_bytes == 2 * activation(10, 2).saved_bytes
    table = embedding(2, 100, 1000, 64, 2)
    assert (table.parameters, table.saved_bytes, table.input_grad) == (64_000, 8 * 200, ())
    assert embedding(1, 8, 1000, 64, 2, positions=8, types=2).parameters == 1010 * 64
    assert norm(5, 64, 2, bias=False).parameters == 64
    assert concatenate(10, 2).saved_bytes == 0
    assert (relu(10, 2).saved_bytes, relu(10, 2, ends=True).saved_bytes) == (0, 20)


def test_convolution_by_hand() -> None:
    """VGG's second convolution: 64 to 64 channels of 224 x 224 pixels, 1.85 billion multiply-adds."""
    layer = convolution(1, 224, 64, 64, 2)
    assert layer.parameters == 3 * 3 * 64 * 64 + 64 == 36_928
    assert layer.flops == 2 * 1_849_688_064
    assert layer.saved_bytes == 2 * 64 * 224 * 224
    assert (layer.weight_grad, layer.deferred_bytes) == ((), 0)  # made with I
    pool = max_pool(1, 224, 64, 2)
    assert pool.saved_bytes == 2 * 64 * 224 * 224 + 8 * 64 * 112 * 112


def test_strides_norms_and_means_by_hand() -> None:
    """ResNet-50's stem: 118 million multiply-adds on an image of 224 x 224."""
    stem = convolution(1, 224, 3, 64, 2, kernel=7, stride=2, bias=False)
    assert (stem.parameters, stem.flops) == (9_408, 2 * 118_013_952)
    assert batch_norm(4, 7, 64, 2).saved_bytes == 4 * 7 * 7 * 64 * 2 + 64 * 8
    assert batch_norm(4, 7, 64, 2).parameters == 128
    assert (average_pool(4, 7, 64, 2).saved_bytes, average_pool(4, 7, 64, 2).parameters) == (0, 0)


def test_a_recurrent_layer_by_hand() -> None:
    """An LSTM of 10 inputs and 16 cells: 4 gates with a bias each; per step 1 input, 1 output and 6 x 16 are kept."""
    layer = recurrent(3, 5, 10, 16, 2)
    assert layer.parameters == 4 * 16 * (10 + 16 + 1)
    assert layer.saved_bytes == 3 * 5 * (10 + 16 + 6 * 16) * 2
    assert sum(kernel.flops for kernel in layer.forward if kernel.matrix) == 2 * 3 * 5 * 4 * 16 * (10 + 16)
    share = recurrent(3, 5, 10, 16, 2, shards=4)
    assert [each.operation for each in share.forward_exchanges] == 5 * ["all_gather"]
    assert {each.array_bytes for each in share.input_grad_exchanges} == {3 * 16 * 2}


def test_rings_move_what_they_must() -> None:
    """All-reduce sends 2 (n - 1) / n of the array from every device, the others half of that."""
    for devices in (2, 4, 8):
        both, one = (ring_ns(Exchange(name, 8 * 10**6), devices, 1e9, 0) for name in ("all_reduce", "all_gather"))
        assert both == pytest.approx(2 * one)
        assert both == pytest.approx(8e6 * 2 * (devices - 1) / devices)
        assert ring_ns(Exchange("all_gather", 0), devices, 1e9, 7) == 7 * (devices - 1)


def test_exchanges_are_in_the_times_of_a_row() -> None:
    device = device_preset("v100-16gb")
    plain = linear(64, 128, 128, 2)
    both = sequence_of(plain, exchange(64 * 128 * 2, forward="all_reduce", input_grad="reduce_scatter"))
    alone = cost_row(plain, 1, device)
    row = cost_row(both, 1, device, shards=2, prices=lambda each, devices: 100.0 * devices + len(each.operation))
    assert row.forward_ns == alone.forward_ns + 210
    assert row.input_grad_ns == (alone.input_grad_ns or 0) + 214
    assert (row.weight_grad_ns, row.activation_bytes) == (alone.weight_grad_ns, alone.activation_bytes)
    slow, fast = (
        prices_of(device_preset(name))(Exchange("all_reduce", 10**8), 4) for name in ("v100-16gb", "h100-80gb")
    )
    assert fast < slow < 2 * 10**8 / device.link_bytes_per_s * 1e9


def test_measured_collectives_go_before_rings() -> None:
    points = ((1000, 50_000), (10**6, 90_000))
    curve = MeasuredCurve(operation="all_reduce", level="node", num_devices=4, points=points)
    level = LinkLevel(name="node", group_size=4, latency_ns=1000, bandwidth_bytes_per_s=10**9)
    kind = DeviceKind(name="device", count=4)
    cluster = Cluster(name="c", source=Source(method="literature"), devices=(kind,), levels=(level,), measured=(curve,))
    price = prices_in(cluster)
    assert price(Exchange("all_reduce", 10**6), 4) == 90_000
    assert price(Exchange("all_reduce", 10**6), 2) == 2 * (1000 + 500_000)
    assert price(Exchange("all_gather", 10**6), 4) == 3 * (1000 + 250_000)
    assert prices_in(cluster.model_copy(update={"levels": (), "measured": ()}))(Exchange("all_gather", 10**6), 4) == 0


def test_a_row_is_input_and_weight_gradients_in_one_backward() -> None:
    row = cost_row(feed_forward(1, 768, 2), 1, device_preset("a100-80gb"))
    assert row.backward_ns == (row.input_grad_ns or 0) + (row.weight_grad_ns or 0)
    assert 1.5 < row.backward_ns / row.forward_ns < 3


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_consistent(name: str) -> None:
    preset = device_preset(name)
    assert preset.name == name
    assert name == "cpu" or f"{preset.memory_bytes // 10**9}gb" == name.split("-")[-1]
    assert preset.matrix_flops_per_s > preset.float32_flops_per_s > 10**10
    assert preset.source
    assert 10**9 < preset.link_bytes_per_s < preset.bandwidth_bytes_per_s
    assert preset.dtype == ({"v100": "float16", "cpu": "float32"}.get(name.partition("-")[0], "bfloat16"))
    assert preset.efficiency_source


@pytest.mark.parametrize("name", PRESETS)
def test_efficiency_grows_with_size_up_to_the_last_point(name: str) -> None:
    preset = device_preset(name)
    for curve in (preset.matrix_efficiency, preset.memory_efficiency):
        works, shares = zip(*curve, strict=True)
        assert list(works) == sorted(set(works))
        assert list(shares) == sorted(shares)
        assert 0 < shares[0] < shares[-1] < 1
    flops = [round(10 ** (step / 4)) for step in range(16, 64)]
    times = [preset.kernel_ns(each, 0, matrix=True) for each in flops]
    assert times == sorted(times)
    reached = [1e9 * each / time / preset.matrix_flops_per_s for each, time in zip(flops, times, strict=True)]
    assert reached == pytest.approx(sorted(reached))
    assert reached[-1] == pytest.approx(preset.matrix_efficiency[-1][1])


@pytest.mark.parametrize("name", PRESETS)
def test_points_of_a_curve_are_met(name: str) -> None:
    preset = device_preset(name)
    for moved, share in preset.memory_efficiency:
        expected = 1e9 * moved / preset.bandwidth_bytes_per_s / share
        assert preset.kernel_ns(0, moved, matrix=False) == pytest.approx(expected)


def test_small_products_are_limited_by_memory() -> None:
    preset = device_preset("h100-80gb")
    thin = linear(1, 8192, 8192, 2).forward[0]
    assert preset.kernel_ns(thin.flops, thin.moved_bytes, matrix=True) == preset.kernel_ns(
        0, thin.moved_bytes, matrix=False
    )


def test_sequences_add_what_is_kept_and_take_the_largest_workspace() -> None:
    one = Operator(1, (Kernel(1, 2),), (Kernel(3, 4),), (), 5, 6, 7, 8)
    two = Operator(10, (Kernel(9, 9),), (Kernel(8, 8),), (Kernel(7, 7),), 50, 60, 3, 20)
    both = sequence_of(one, two, residual_bytes=100)
    assert (both.parameters, both.saved_bytes, both.deferred_bytes) == (11, 55, 66)
    assert (both.gradient_bytes, both.update_bytes) == (107, 20)
    assert both.input_grad == (Kernel(8, 8), Kernel(3, 4))  # backward goes from the last to the first


def test_an_unknown_preset_is_refused_with_the_choice() -> None:
    with pytest.raises(UsageError, match=r"--device 'gaudi' is not a preset; choose from a100-40gb, .*v100-32gb"):
        device_preset("gaudi")
