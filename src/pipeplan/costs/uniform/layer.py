"""One layer on one device of a uniform layout: products, attention, what is element-wise, and its messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pipeplan.costs.communication import Exchange, places_reached, places_taken, ring_ns
from pipeplan.costs.context import MERGED, Added, SharedCore
from pipeplan.costs.operators import (
    Operator,
    activation,
    add,
    attention_core,
    concatenate,
    linear,
    norm,
    vocabulary_loss,
)
from pipeplan.costs.uniform.choices import choices
from pipeplan.costs.uniform.words import Machine, Number, Transformer, UniformLayout

WIDTH = 2
"""Bytes of a number that products take and give."""

_SCORE_BYTES = 5
"""Kept of a score: softmax, mask, what dropout left (Korthikanti et al., section 4.1)."""


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Times in ns of one micro-batch, bytes held for backward, and a number of parameters; parts add up."""

    forward_ns: Number = 0.0
    input_grad_ns: Number = 0.0
    weight_grad_ns: Number = 0.0
    saved_bytes: Number = 0.0
    parameters: Number = 0.0

    def __add__(self, other: LayerPart) -> LayerPart:
        return LayerPart(
            self.forward_ns + other.forward_ns,
            self.input_grad_ns + other.input_grad_ns,
            self.weight_grad_ns + other.weight_grad_ns,
            self.saved_bytes + other.saved_bytes,
            self.parameters + other.parameters,
        )

    @property
    def backward_ns(self) -> Number:
        """Both gradients."""
        return self.input_grad_ns + self.weight_grad_ns


def peak_flops_per_s(machine: Machine, layout: UniformLayout) -> Number:
    """Peak rate of matrix products in the layout's number format."""
    eight = (layout.recipe == "fp8-mixed") & (machine.fp8_flops_per_s > 0)
    return np.where(eight, machine.fp8_flops_per_s, machine.matrix_flops_per_s)


def product_ns(
    machine: Machine, peak: Number, rows: Number, inner: Number, columns: Number, copies: Number = 1
) -> Number:
    """Matrix products of [rows, inner] and [inner, columns] in waves of tiles, one to a multiprocessor at a time.

    Of each product at most as quick as its operands and its result are moved.
    """
    count = machine.multiprocessors
    best = np.inf
    for height, width, share in choices().tiles:
        tiles = copies * np.ceil(rows / height) * np.ceil(columns / width)
        best = np.minimum(best, np.ceil(tiles / count) * height * width / share)
    computing = 2e9 * inner * best * count / (peak * machine.matrix_share)
    moved = WIDTH * copies * (rows * inner + inner * columns + rows * columns)
    return np.maximum(computing, moving_ns(machine, moved)) * ((rows > 0) & (inner > 0) & (columns > 0))


def attention_ns(machine: Machine, peak: Number, flops: Number, head_size: Number, *, backward: bool) -> Number:
    """Fused attention, at its kernel's share of the peak, or less of it where heads are narrow."""
    share = machine.attention_backward if backward else machine.attention_forward
    return 1e9 * flops / peak / share / np.minimum(1.0, head_size / choices().full_head)


def moving_ns(machine: Machine, size: Number) -> Number:
    """Bytes through memory."""
    return 1e9 * size / (machine.bandwidth_bytes_per_s * machine.bandwidth_share)


def weights(
    machine: Machine,
    peak: Number,
    tokens: Number,
    inputs: Number,
    outputs: Number,
    copies: Number = 1,
    *,
    kept: Number = 1.0,
) -> LayerPart:
    """A product with weights and both of its gradients; of its input a share is ``kept`` here."""
    operator = linear(tokens, inputs, outputs, WIDTH, bias=False)
    return LayerPart(
        product_ns(machine, peak, tokens, inputs, outputs, copies),
        product_ns(machine, peak, tokens, outputs, inputs, copies),
        product_ns(machine, peak, inputs, tokens, outputs, copies),
        kept * copies * operator.saved_bytes * (outputs > 0),
        copies * operator.parameters,
    )


def _elementwise(machine: Machine, operators: Iterable[Operator]) -> LayerPart:
    total = LayerPart()
    for each in operators:
        total += LayerPart(
            sum(moving_ns(machine, kernel.moved_bytes) for kernel in each.forward),
            sum(moving_ns(machine, kernel.moved_bytes) for kernel in each.input_grad),
            0.0,
            each.saved_bytes,
            each.parameters,
        )
    return total


def ring_rate(machine: Machine, devices: Number, stride: Number, *, one_by_one: bool = False) -> Number:
    """Bytes per second of a ring over devices that stand ``stride`` apart.

    Inside a node its links; across nodes what the adapters of the ring's devices in a node carry, at most that: one
    adapter where pieces are messages ``one_by_one``.
    """
    inside = 1 if one_by_one else np.clip(machine.node // stride, 1, devices)
    adapters = np.minimum(machine.link_bytes_per_s, inside * machine.adapter_bytes_per_s)
    rate = np.where(devices * stride <= machine.node, machine.link_bytes_per_s, adapters)
    return machine.bandwidth_share * rate


def collective_ns(machine: Machine, exchange: Exchange, devices: Number, stride: Number) -> Number:
    """A collective over a ring of devices; nothing for one."""
    return ring_ns(exchange, devices, ring_rate(machine, devices, stride), choices().ring_step_ns)


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """A layer's parts, and its messages in ns, each way: ``tensor`` between devices that share its products.

    ``attention_ns`` is what products with weights of attention take forward, whose messages are half of the layer's or,
    where all else are experts, all of them: of ``halves``. ``context`` is what its core waits for where devices share
    sequences.
    """

    core: LayerPart
    up: LayerPart
    products: LayerPart
    experts: LayerPart
    elementwise: LayerPart
    tensor_ns: Number
    halves: Number
    attention_ns: Number
    context: Added
    expert_ns: Number

    @property
    def whole(self) -> LayerPart:
        """All that is computed."""
        return self.core + self.up + self.products + self.experts + self.elementwise


def tokens_of(model: Transformer, layout: UniformLayout) -> Number:
    """Tokens of a micro-batch on one device, before tensor parallelism."""
    return layout.microbatch * model.sequence / layout.context


def layer_of(model: Transformer, layout: UniformLayout, machine: Machine) -> LayerCosts:
    """A layer for one micro-batch."""
    peak = peak_flops_per_s(machine, layout)
    tokens, hidden, split = tokens_of(model, layout), model.hidden, layout.tensor
    near = np.where(layout.sequence_parallel > 0, 1 / split, 1.0)
    heads, kv_heads = model.heads / split, np.maximum(model.kv_heads / split, 1)
    latent, sparse = model.latent_rank > 0, model.experts > 0
    wide = model.head_size + model.rotary_size
    value = np.where(latent, model.value_size, model.head_size)

    # Attention
    queries, keys = (np.where(latent, 0, count * model.head_size) for count in (heads, kv_heads))
    from_queries = np.where(model.query_rank > 0, model.query_rank, hidden)
    products = weights(machine, peak, tokens, hidden, queries, kept=near)
    products += weights(machine, peak, tokens, hidden, keys, kept=0)
    products += weights(machine, peak, tokens, hidden, keys, kept=0)
    products += weights(machine, peak, tokens, hidden, model.query_rank, kept=near)
    products += weights(
        machine, peak, tokens, hidden, np.where(latent, model.latent_rank + model.rotary_size, 0), kept=near
    )
    products += weights(machine, peak, tokens, heads * value, hidden)
    up = weights(machine, peak, tokens, from_queries, np.where(latent, heads * wide, 0))
    up += weights(machine, peak, tokens, model.latent_rank, np.where(latent, heads * (model.head_size + value), 0))
    # no product with weights, so in 16 bits whatever these are in
    core = _attention(model, layout, machine, machine.matrix_flops_per_s, heads, kv_heads, (wide + value) / 2)

    attention_products = products.forward_ns + up.forward_ns

    # Feed-forward: the dense part is what every token goes to
    ffn = np.where(sparse, model.shared_ffn, model.ffn) / split
    products += weights(machine, peak, tokens, hidden, ffn, kept=near)
    products += weights(machine, peak, tokens, hidden, model.gated * ffn, kept=0)
    products += weights(machine, peak, tokens, ffn, hidden)
    products += weights(machine, peak, tokens, hidden, model.experts, kept=near)
    copies = model.experts / np.maximum(layout.expert, 1)
    routed = tokens * model.top_k * layout.expert_tensor / split  # rows that a device computes
    rows = routed / np.maximum(copies, 1)
    own = model.moe_ffn / layout.expert_tensor
    slower = peak * np.where(copies > 1, choices().grouped, 1.0)
    experts = weights(machine, slower, rows, hidden, (1 + model.gated) * own, copies)
    experts += weights(machine, slower, rows, own, hidden, copies)

    # What is element-wise: norms and residuals are divided by sequence parallelism alone
    own_tokens = tokens * near
    acted = tokens * ffn + routed * own
    of_gated, of_plain = (
        activation(acted * model.gated, WIDTH, gated=True),
        activation(acted * (1 - model.gated), WIDTH),
    )
    elementwise = _elementwise(
        machine,
        [
            *2 * [norm(own_tokens, hidden, WIDTH), add(own_tokens * hidden, WIDTH)],
            of_gated,
            of_plain,
            *choices().sortings * [_copy(routed * hidden * (layout.fused_dispatch == 0))],
        ],
    )

    exchange, halves = Exchange("all_reduce", WIDTH * tokens * hidden), np.where(sparse & (model.shared_ffn == 0), 1, 2)
    return LayerCosts(
        core,
        up,
        products,
        experts,
        elementwise,
        halves * collective_ns(machine, exchange, split, 1),
        halves,
        attention_products,
        _context(model, layout, machine, core, heads * value, kv_heads),
        _experts_ns(model, layout, machine, tokens),
    )


def _copy(numbers: Number) -> Operator:
    """A copy in another order, and of its gradient."""
    kernels = concatenate(numbers, WIDTH).forward
    return Operator(forward=kernels, input_grad=kernels)


def _attention(
    model: Transformer,
    layout: UniformLayout,
    machine: Machine,
    peak: Number,
    heads: Number,
    kv_heads: Number,
    size: Number,
) -> LayerPart:
    """The core; context parallelism divides a causal square evenly, an early and a late piece to each device."""
    samples, sequence = layout.microbatch, model.sequence
    fused = attention_core(samples, sequence / layout.context, sequence, heads, size, WIDTH, causal=True)
    forward, backward = (
        sum(attention_ns(machine, peak, kernel.flops, size, backward=back) for kernel in kernels)
        for kernels, back in ((fused.forward, False), (fused.input_grad, True))
    )
    grouped = (size * WIDTH * tokens_of(model, layout)) * (heads + 2 * kv_heads)  # what queries, keys and values take
    once = LayerPart(forward, backward, 0.0, np.where(model.latent_rank > 0, fused.saved_bytes, grouped), 0.0)

    scores = samples * heads * sequence * sequence / layout.context
    slower = np.where(model.head_size % 8 > 0, choices().unaligned, 1.0)
    count = samples * heads
    given = product_ns(machine, peak * slower, sequence / layout.context, size, sequence, count)
    taken = product_ns(machine, peak * slower, sequence / layout.context, sequence, size, count)
    ahead, back = (moving_ns(machine, scores * each) for each in choices().softmax_bytes)
    apart = LayerPart(given + taken + ahead, 2 * (given + taken) + back, 0.0, grouped + _SCORE_BYTES * scores, 0.0)

    unfused = layout.attention == "unfused"
    return LayerPart(
        np.where(unfused, apart.forward_ns, once.forward_ns),
        np.where(unfused, apart.input_grad_ns, once.input_grad_ns),
        0.0,
        np.where(unfused, apart.saved_bytes, once.saved_bytes),
        0.0,
    )


def _context(
    model: Transformer, layout: UniformLayout, machine: Machine, core: LayerPart, mixed: Number, kv_heads: Number
) -> Added:
    """Keys and values of the whole sequence, gathered or sent around a ring; the core's mixture is ``mixed`` wide."""
    shared = 2 * WIDTH * layout.microbatch * model.sequence * kv_heads * model.head_size
    gather = collective_ns(machine, Exchange("all_gather", shared), layout.context, layout.tensor)
    alone = ring_rate(machine, layout.context, layout.tensor, one_by_one=True)
    hops = ring_ns(Exchange("all_gather", shared), layout.context, alone, choices().ring_step_ns)
    out = WIDTH * tokens_of(model, layout) * mixed
    merge, merge_grad = (moving_ns(machine, MERGED * size) for size in (out, out + shared / layout.context))
    takes = core.forward_ns, core.input_grad_ns, gather
    both = SharedCore(layout.context, *takes, shared, out, merge, merge_grad, hops)
    return Added(*(np.where(layout.ring > 0, *each) for each in zip(both.ring, both.gathered, strict=True)))


def _experts_ns(model: Transformer, layout: UniformLayout, machine: Machine, tokens: Number) -> Number:
    """Two all-to-alls, to the experts and back: a token goes once to each node of its experts, there once to each rank.

    Which experts a token goes to is taken as even and independent. A tensor group has its tokens divided; devices that
    split experts gather what came to all of them, a token once however many of their experts it is for.
    """
    ranks, width = np.maximum(layout.expert, 1), layout.expert_tensor
    nodes = np.maximum(ranks * width / machine.node, 1)
    sent = WIDTH * model.hidden * tokens / layout.tensor
    across = sent * places_reached(nodes, model.top_k) / machine.adapter_bytes_per_s
    inside = sent * places_reached(ranks, model.top_k) / machine.link_bytes_per_s
    both = 2e9 * np.maximum(across, inside) / machine.bandwidth_share
    split = Exchange("all_reduce", sent * width * places_taken(ranks, model.top_k))
    return (both + collective_ns(machine, split, width, 1)) * (model.experts > 0)


def head_of(model: Transformer, layout: UniformLayout, machine: Machine) -> LayerPart:
    """Product with the vocabulary and its loss, which devices of a tensor group share."""
    peak, tokens, own = peak_flops_per_s(machine, layout), tokens_of(model, layout), model.vocabulary / layout.tensor
    return weights(machine, peak, tokens, model.hidden, own) + _elementwise(
        machine, [vocabulary_loss(tokens, own, WIDTH)]
    )
