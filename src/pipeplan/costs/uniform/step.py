"""The time of one iteration of a uniform layout, part by part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeplan.costs.communication import Exchange, beside_products
from pipeplan.costs.uniform.choices import choices
from pipeplan.costs.uniform.layer import (
    WIDTH,
    LayerCosts,
    collective_ns,
    head_of,
    layer_of,
    moving_ns,
    tokens_of,
)
from pipeplan.costs.uniform.state import parameter_bytes
from pipeplan.costs.uniform.words import Machine, Number, Transformer, UniformLayout


@dataclass(frozen=True, slots=True)
class StepTime:
    """An iteration in ns. What is exposed is what compute waits for.

    ``forward_ns``, ``input_grad_ns`` and ``weight_grad_ns`` are of one layer and micro-batch with their messages,
    ``head_ns`` of the head. ``stages_ns`` is m micro-batches on the slowest stage, ``bubble_ns`` what it waits.
    """

    forward_ns: Number
    input_grad_ns: Number
    weight_grad_ns: Number
    head_ns: Number
    message_ns: Number
    waits_for_messages: Number
    stages_ns: Number
    bubble_ns: Number
    reduction_ns: Number
    optimizer_ns: Number
    iteration_ns: Number


def step_time(model: Transformer, layout: UniformLayout, machine: Machine) -> StepTime:
    """Closed forms of a uniform layout's iteration."""
    layer, head = layer_of(model, layout, machine), head_of(model, layout, machine)
    forward, input_grad, weight_grad = _layer_times(layer, model, layout, machine)
    each = forward + input_grad + weight_grad
    head_ns = head.forward_ns + head.backward_ns
    count = layout.microbatches
    middle, first, last = layers_of_stages(model, layout)
    alone = layout.pipeline == 1
    most = np.where((layout.pipeline > 2) | (layout.schedule == "zb-v"), middle, first)  # of two none is in the middle
    slowest = np.where(alone, model.layers * each + head_ns, np.maximum(most * each, last * each + head_ns))
    total = model.layers * each + head_ns
    message = _message_ns(model, layout, machine)
    ramps = np.maximum(0, total - slowest) / layout.chunks
    ramps = ramps - _shorter(model, layout) * middle * each / layout.chunks
    bubble = ramps - _filled(layout, middle * forward, middle * weight_grad)
    bubble = (np.maximum(0, bubble) + (layout.pipeline - 1) * 2 * message) * (1 - alone)
    waits = (layout.schedule == "1f1b") & (layout.chunks == 1)
    waited = np.where(waits & (layout.pipeline > 1), _loop_ns(layout, each, (first, middle, last), head_ns, message), 0)
    stages = count * np.maximum(slowest, waited)
    # of the first device, which ends its backward last: it has the table of words; where it is alone or has both ends
    # of the model, also that of the head, if it is another
    both = alone | (layout.schedule == "zb-v")
    dense = layer.whole.parameters - layer.experts.parameters
    held = first * dense + (1 + both * (model.tied == 0)) * head.parameters
    of_experts = first * layer.experts.parameters
    reduction = _reduction_ns(layout, machine, held, of_experts, first * forward, first * (input_grad + weight_grad))
    optimizer = np.maximum(
        _optimizer_ns(layout, machine, held, of_experts),
        _optimizer_ns(layout, machine, middle * dense, middle * layer.experts.parameters) * (layout.pipeline > 2),
    )
    return StepTime(
        forward,
        input_grad,
        weight_grad,
        head_ns,
        message,
        waits,
        stages,
        bubble,
        reduction,
        optimizer,
        stages + bubble + (reduction + optimizer) * (model.vocabulary > 0),
    )


def layers_of_stages(model: Transformer, layout: UniformLayout) -> tuple[Number, Number, Number]:
    """Layers of a middle, the first and the last stage.

    Even where chunks divide the layers; else with two more places, the first and the last chunk having one layer
    less; else with one more, the last having less; else the most layers are those of even stages, rounded up. ZB-V
    has the first and the last chunk on the first device.
    """
    layers, places = model.layers, layout.pipeline * layout.chunks
    two, one, even = (layers + 2) % places == 0, (layers + 1) % places == 0, layers % places == 0
    rounded = np.where(even, layers, np.where(two, layers + 2, np.where(one, layers + 1, 0)))
    middle = np.where(rounded > 0, rounded / layout.pipeline, np.ceil(layers / layout.pipeline))
    at_last = 1 - even
    at_first = at_last * (two | (rounded == 0))
    v_shape = layout.schedule == "zb-v"
    first = middle - at_first - v_shape * at_last
    return middle, first, np.where(v_shape, first, middle - at_last)


def _shorter(model: Transformer, layout: UniformLayout) -> Number:
    """Devices at the end that interleaving leaves with fewer layers than others: they wait, and nobody for them."""
    places = layout.pipeline * layout.chunks
    fewer = -model.layers % places
    return np.where((layout.chunks > 1) & (fewer > 2) & (fewer < layout.pipeline), np.ceil(fewer / 2), 0)


def _loop_ns(
    layout: UniformLayout, each_ns: Number, layers: tuple[Number, Number, Number], head_ns: Number, message_ns: Number
) -> Number:
    """What 1F1B takes for a micro-batch at least where messages are waited for.

    From a stage n before the end, n micro-batches are on their way to the last stage and back: the mean work of these
    stages, and a message each way between them. The longest loops count, with the first stage and without it.
    """
    first, middle, last = (number * each_ns for number in layers)
    stages = layout.pipeline
    inner = np.maximum(stages - 1, 1)
    without = (middle * (stages - 2) + last + head_ns + 2 * (stages - 2) * message_ns) / inner
    whole = (first + middle * (stages - 2) + last + head_ns + 2 * (stages - 1) * message_ns) / stages
    return np.maximum(without, whole)


def chunk_layers(layers: int, stages: int, chunks: int) -> list[int]:
    """Layers of each chunk, in the order they run; where nothing else divides, chunks at the ends have one less."""
    places = stages * chunks
    if layers % places == 0:
        return [layers // places] * places
    each = (layers + 2) // places
    if (layers + 2) % places == 0:
        return [each - 1, *[each] * (places - 2), each - 1]
    if (layers + 1) % places == 0:
        return [*[(layers + 1) // places] * (places - 1), (layers + 1) // places - 1]
    fewer = places - layers % places
    at_end = -(-fewer // 2)  # the last chunk first, which has the head
    each = layers // places + 1
    return [each - (place < fewer - at_end or place >= places - at_end) for place in range(places)]


def again_ns(layer: LayerCosts, layout: UniformLayout, *, whole: bool = False) -> Number:
    """What backward computes again of a layer's forward, with its messages; of all of it, where it is ``whole``."""
    core, up, products, elementwise = (
        1 if whole else share
        for share in (layout.again_core, layout.again_up, layout.again_products, layout.again_elementwise)
    )
    return (
        core * (layer.core.forward_ns + layer.context.forward_ns)
        + up * layer.up.forward_ns
        + products * (layer.products.forward_ns + layer.experts.forward_ns + layer.expert_ns + _exposed(layer, layout))
        + elementwise * layer.elementwise.forward_ns
    )


def layer_ns(layer: LayerCosts, layout: UniformLayout) -> tuple[Number, Number, Number]:
    """Forward, input gradient and weight gradient, with what they wait for, and nothing computed again."""
    whole, exposed = layer.whole, _exposed(layer, layout)
    forward = whole.forward_ns + exposed + layer.context.forward_ns + layer.expert_ns
    input_grad = whole.input_grad_ns + exposed + layer.context.input_grad_ns + layer.expert_ns
    return forward, input_grad, whole.weight_grad_ns


def _exposed(layer: LayerCosts, layout: UniformLayout) -> Number:
    """What a layer waits for messages of devices that share its products, each way.

    Those of attention overlap its own products, as they are what gives them or takes them, and so do the others.
    """
    each, own = layer.tensor_ns / layer.halves, layer.attention_ns
    others = layer.products.forward_ns + layer.up.forward_ns - own
    hidden = beside_products(each, own, layout.tensor)
    hidden = hidden + (layer.halves > 1) * beside_products(each, others, layout.tensor)
    return np.where(layout.overlap_tensor > 0, hidden, layer.tensor_ns)


def _layer_times(
    layer: LayerCosts, model: Transformer, layout: UniformLayout, machine: Machine
) -> tuple[Number, Number, Number]:
    """Forward, input gradient with what is computed again, and weight gradient, with what they wait for."""
    whole = layer.whole
    forward, input_grad, weight_grad = layer_ns(layer, layout)
    input_grad = input_grad + again_ns(layer, layout)

    # Sharded parameters: gathered before forward and backward, gradients summed after it, beside compute
    sharded, parts = layout.zero == 3, layout.expert * layout.expert_tensor
    of_each = np.maximum(layout.zero_group * layout.tensor / parts, 1)
    copies = [
        (WIDTH * (whole.parameters - layer.experts.parameters), layout.zero_group, layout.tensor),
        (WIDTH * layer.experts.parameters, of_each, parts),
    ]
    gather = sum(collective_ns(machine, Exchange("all_gather", size), *among) * (size > 0) for size, *among in copies)
    moved = sum(size * (1 - 1 / group) for size, group, _ in copies)
    slowed = choices().contention * 1e9 * moved / (machine.link_bytes_per_s * machine.bandwidth_share)
    forward_wait = np.maximum(0, gather - forward) + slowed
    backward_wait = np.maximum(0, 2 * gather - input_grad - weight_grad) + 2 * slowed
    return forward + sharded * forward_wait, input_grad + sharded * backward_wait, weight_grad


def _filled(layout: UniformLayout, forward_ns: Number, weight_grad_ns: Number) -> Number:
    """What a schedule with weight gradients apart fills of 1F1B's bubble, until the last device has ended.

    Zero Bubble Pipeline Parallelism, table 1: (p - 1)(F + B - W) of ZB-H1, (p - 1)(F + B - 2 W) of ZB-H2. ZB-V has no
    bubble between a device's first and last action, where all three take as long; the last device ends (p - 1) input
    gradients of a chunk after the first.
    """
    schedule, others = layout.schedule, layout.pipeline - 1
    weights_apart = np.where(schedule == "zb-1p", 2, np.where(schedule == "zb-2p", 3, 0))
    there = others + layout.microbatches - 1  # fewer micro-batches leave less to fill with
    of_one_way = np.minimum(weights_apart * others, there) * weight_grad_ns * (weights_apart > 0)
    both_ways = np.minimum(others, there) * (forward_ns + weight_grad_ns) / layout.chunks
    return np.where(schedule == "zb-v", both_ways, of_one_way)


def _message_ns(model: Transformer, layout: UniformLayout, machine: Machine) -> Number:
    """A micro-batch from one stage to the next, on average: devices of a tensor group each send their part.

    Without sequence parallelism the parts are gathered again.
    """
    size = WIDTH * tokens_of(model, layout) * model.hidden
    across = np.minimum(1, layout.tensor * layout.context * layout.data / machine.node)
    slow, quick = machine.adapter_bytes_per_s, machine.link_bytes_per_s
    sent = 1e9 * size / layout.tensor * (across / slow + (1 - across) / quick) / machine.bandwidth_share
    return sent + gathered_message_ns(model, layout, machine)


def gathered_message_ns(model: Transformer, layout: UniformLayout, machine: Machine) -> Number:
    """What devices of a tensor group take to have all of a message: nothing where each keeps its part."""
    size = WIDTH * tokens_of(model, layout) * model.hidden
    gathered = collective_ns(machine, Exchange("all_gather", size), layout.tensor, 1)
    return np.where(layout.sequence_parallel > 0, 0, gathered)


def _reduction_ns(
    layout: UniformLayout,
    machine: Machine,
    parameters: Number,
    of_experts: Number,
    forward_ns: Number,
    backward_ns: Number,
) -> Number:
    """What is exposed of summing gradients and gathering parameters once per iteration."""
    dense = layout.data * layout.context
    parts = layout.expert * layout.expert_tensor
    of_each = np.maximum(dense * layout.tensor / parts, 1)
    level = layout.zero
    group = np.where(level > 0, layout.zero_group, 1)
    group_of_each = np.clip(group * layout.tensor / parts, 1, of_each)

    def summed(count: Number, devices: Number, stride: Number, own: Number) -> Number:
        size = count * layout.gradient_bytes
        scattered = collective_ns(machine, Exchange("reduce_scatter", size), own, stride)
        across = collective_ns(machine, Exchange("all_reduce", size / own), devices / own, stride * own)
        return (scattered * (level < 3) + across) * (count > 0)  # by level 3 scattered with each micro-batch

    def gathered(count: Number, stride: Number, own: Number) -> Number:
        return collective_ns(machine, Exchange("all_gather", count * WIDTH), own, stride) * (level < 3) * (count > 0)

    sums = summed(parameters, dense, layout.tensor, group) + summed(of_experts, of_each, parts, group_of_each)
    gathers = gathered(parameters, layout.tensor, group) + gathered(of_experts, parts, group_of_each)
    hidden = np.minimum(sums, backward_ns) + np.minimum(gathers, forward_ns)
    beside = np.maximum(0, sums - backward_ns) + np.maximum(0, gathers - forward_ns)
    moved = (parameters + of_experts) * (layout.gradient_bytes + WIDTH) / np.where(level == 3, group, 1) * (dense > 1)
    slowed = choices().contention * 1e9 * moved / (machine.link_bytes_per_s * machine.bandwidth_share)
    slowed = np.where(sums + gathers > 0, slowed * hidden / np.maximum(sums + gathers, 1e-9), 0)
    return np.where(layout.overlap_data > 0, beside + slowed, sums + gathers)


def _optimizer_ns(layout: UniformLayout, machine: Machine, parameters: Number, of_experts: Number) -> Number:
    """State through memory, of the parameters whose optimizer a device holds."""
    shards = np.where(layout.zero > 0, layout.zero_group, 1)
    expert_shards = np.clip(shards * layout.tensor / (layout.expert * layout.expert_tensor), 1, shards)
    held = parameters / shards + of_experts / expert_shards
    return moving_ns(machine, parameter_bytes(layout).step * held)
