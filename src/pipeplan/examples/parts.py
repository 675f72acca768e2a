"""Parts of models by closed forms, each as a function of the samples and of the devices that split it.

A split part is one device's share, as Megatron-LM (Shoeybi et al. 2019) has it: layers alternate between a share of
the outputs and a share of the inputs, so that one all-reduce in forward and one in backward do. What does not divide
is rounded up: the largest share counts. Norms, residuals and what travels between blocks are whole on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeplan.costs.communication import Combining
from pipeplan.costs.operators import (
    Operator,
    activation,
    add,
    attention_core,
    average_pool,
    batch_norm,
    convolution,
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

WIDTH = 2
"""Bytes of a number in the 16-bit formats."""

_FLOAT32 = 4

Part = Callable[[int, int], Operator]
"""(samples, shards) to the costs on each device."""


def share(count: int, shards: int) -> int:
    """The largest of as equal shares as can be."""
    return -(-count // shards)


def whole(costs: Callable[[int], Operator]) -> Part:
    """A part that every device of a group does in full."""
    return lambda samples, shards: costs(samples)


def exchanged(
    numbers: int, shards: int, *, forward: Combining | None = None, input_grad: Combining | None = None
) -> tuple[Operator, ...]:
    """Collectives over an array of ``numbers`` 16-bit elements; none where nothing is split."""
    return (exchange(numbers * WIDTH, forward=forward, input_grad=input_grad),) if shards > 1 else ()


@dataclass(frozen=True, slots=True)
class Stack:
    """Equal transformer layers. ``biased``: layer norms and linear layers with biases; else neither has one."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    causal: bool = False
    biased: bool = True

    @property
    def sample_bytes(self) -> int:
        """Of the tensor between two blocks, for one sample."""
        return self.sequence * self.hidden * WIDTH

    @property
    def sizes(self) -> dict[str, int]:
        """The dimensions that all its blocks have."""
        return {"sequence": self.sequence, "hidden": self.hidden}

    def norm(self, tokens: int) -> Operator:
        """A norm over the hidden dimension."""
        return norm(tokens, self.hidden, WIDTH, bias=self.biased)

    def linear(self, tokens: int, inputs: int, outputs: int) -> Operator:
        """A linear layer."""
        return linear(tokens, inputs, outputs, WIDTH, bias=self.biased)

    def attention(self, samples: int, shards: int = 1) -> Operator:
        """Self-attention with its norm and residual; a share has some of the heads."""
        tokens, own = samples * self.sequence, self.hidden // shards
        return self._residual(
            tokens,
            shards,
            self.norm(tokens),
            self.linear(tokens, self.hidden, 3 * own),
            self._core(samples, self.sequence, shards, causal=self.causal),
            self.linear(tokens, own, self.hidden),
        )

    def cross_attention(self, samples: int, memory: int, shards: int = 1) -> Operator:
        """Attention to ``memory`` tokens of an encoder as wide, with its norm and residual."""
        tokens, own = samples * self.sequence, self.hidden // shards
        return self._residual(
            tokens,
            shards,
            self.norm(tokens),
            self.linear(tokens, self.hidden, own),
            self.linear(samples * memory, self.hidden, 2 * own),
            self._core(samples, memory, shards),
            self.linear(tokens, own, self.hidden),
            *exchanged(samples * memory * self.hidden, shards, input_grad="all_reduce"),
        )

    def feed_forward(self, samples: int, shards: int = 1) -> Operator:
        """Two linear layers, four times as wide between them, with their norm and residual."""
        tokens, own = samples * self.sequence, share(4 * self.hidden, shards)
        return self._residual(
            tokens,
            shards,
            self.norm(tokens),
            self.linear(tokens, self.hidden, own),
            activation(tokens * own, WIDTH),
            self.linear(tokens, own, self.hidden),
        )

    def vocabulary_head(
        self, samples: int, shards: int, vocabulary: int, *, bias: bool, before: Operator | None
    ) -> Operator:
        """Norm (or what stands ``before``), output layer and cross-entropy over a share of the vocabulary.

        Shares combine a maximum, a sum and the target's logit of every token, in float32.
        """
        tokens, own = samples * self.sequence, share(vocabulary, shards)
        return sequence_of(
            before if before is not None else self.norm(tokens),
            *exchanged(tokens * self.hidden, shards, input_grad="all_reduce"),
            linear(tokens, self.hidden, own, WIDTH, bias=bias),
            vocabulary_loss(tokens, own, WIDTH),
            *exchanged(3 * tokens * _FLOAT32 // WIDTH, shards, forward="all_reduce"),
        )

    def _core(self, samples: int, keys: int, shards: int, *, causal: bool = False) -> Operator:
        heads, size = self.heads // shards, self.hidden // self.heads
        return attention_core(samples, self.sequence, keys, heads, size, WIDTH, causal=causal)

    def _residual(self, tokens: int, shards: int, *operators: Operator) -> Operator:
        numbers = tokens * self.hidden
        both = exchanged(numbers, shards, forward="all_reduce", input_grad="all_reduce")
        return sequence_of(*operators, *both, add(numbers, WIDTH), residual_bytes=numbers * WIDTH)


def table_rows(
    samples: int, shards: int, lookups: int, vocabulary: int, hidden: int, *, positions: int = 0, types: int = 0
) -> Operator:
    """Embedding; a share has some of the table's rows, and those found are summed over the devices."""
    table = embedding(samples, lookups, share(vocabulary, shards), hidden, WIDTH, positions=positions, types=types)
    return sequence_of(table, *exchanged(samples * lookups * hidden, shards, forward="all_reduce"))


def gathered_linear(tokens: int, shards: int, inputs: int, outputs: int, *, first: bool = False) -> Operator:
    """A linear layer, a share with some of the outputs, which are gathered; the ``first`` gives no input gradient."""
    layer = linear(tokens, inputs, share(outputs, shards), WIDTH)
    if first:
        return sequence_of(replace(layer, input_grad=()), *exchanged(tokens * outputs, shards, forward="all_gather"))
    return sequence_of(
        *exchanged(tokens * inputs, shards, input_grad="all_reduce"),
        layer,
        *exchanged(tokens * outputs, shards, forward="all_gather"),
    )


def dense(inputs: int, outputs: int, *, first: bool) -> Part:
    """A linear layer with a ReLU, which ends the block; the outputs are gathered after it."""

    def costs(samples: int, shards: int) -> Operator:
        layer = gathered_linear(samples, shards, inputs, outputs, first=first)
        return sequence_of(layer, relu(samples * share(outputs, shards), WIDTH, ends=True))

    return costs


def convolved(side: int, inputs: int, outputs: int, *, first: bool, pooled: bool) -> Part:
    """A convolution with a ReLU and maybe pooling; a share has some of the output channels, which are gathered."""

    def costs(samples: int, shards: int) -> Operator:
        own, pixels = share(outputs, shards), samples * side * side
        layer = convolution(samples, side, inputs, own, WIDTH)
        given = pixels * outputs // (4 if pooled else 1)
        returned = () if first else exchanged(pixels * inputs, shards, input_grad="all_reduce")
        return sequence_of(
            *returned,
            replace(layer, input_grad=layer.input_grad[1:]) if first else layer,
            relu(pixels * own, WIDTH, ends=not pooled),
            *([max_pool(samples, side, own, WIDTH)] if pooled else []),
            *exchanged(given, shards, forward="all_gather"),
        )

    return costs


def image_stem(side: int, channels: int) -> Part:
    """The start of a residual network: a 7 x 7 convolution with stride, batch norm, ReLU, pooling. Not split."""

    def costs(samples: int) -> Operator:
        layer = convolution(samples, side, 3, channels, WIDTH, kernel=7, stride=2, bias=False)
        return sequence_of(
            replace(layer, input_grad=layer.input_grad[1:]),
            batch_norm(samples, side // 2, channels, WIDTH),
            relu(samples * (side // 2) ** 2 * channels, WIDTH),
            max_pool(samples, side // 2, channels, WIDTH),
        )

    return whole(costs)


def bottleneck(side: int, inputs: int, inner: int, outputs: int, *, stride: int = 1) -> Part:
    """Convolutions of 1, 3 and 1 around ``inner`` channels with batch norms, a residual, and a ReLU that ends it.

    Where channels or stride change, the residual goes through a convolution of 1 with a batch norm. A share has some
    of the inner channels, which are gathered before the middle convolution and summed by the last.
    """

    def costs(samples: int, shards: int) -> Operator:
        own, after = share(inner, shards), side // stride
        before, pixels = samples * side * side, samples * after * after
        ends = exchanged(pixels * outputs, shards, forward="all_reduce")
        aside: tuple[Operator, ...] = ()
        if inputs != outputs or stride > 1:
            taken = share(inputs, shards)
            short = convolution(samples, side, taken, outputs, WIDTH, kernel=1, stride=stride, bias=False)
            short = replace(short, saved_bytes=0)  # its input is that of the first convolution
            aside = (short, *ends, batch_norm(samples, after, outputs, WIDTH))
        return sequence_of(
            *exchanged(before * inputs, shards, input_grad="all_reduce"),
            convolution(samples, side, inputs, own, WIDTH, kernel=1, bias=False),
            batch_norm(samples, side, own, WIDTH),
            relu(before * own, WIDTH),
            *exchanged(before * inner, shards, forward="all_gather", input_grad="reduce_scatter"),
            convolution(samples, side, inner, own, WIDTH, stride=stride, bias=False),
            batch_norm(samples, after, own, WIDTH),
            relu(pixels * own, WIDTH),
            convolution(samples, after, own, outputs, WIDTH, kernel=1, bias=False),
            *ends,
            batch_norm(samples, after, outputs, WIDTH),
            *aside,
            add(pixels * outputs, WIDTH),
            relu(pixels * outputs, WIDTH, ends=True),
            residual_bytes=pixels * outputs * WIDTH,
        )

    return costs


def long_memory(steps: int, inputs: int, cells: int, *, first: bool) -> Part:
    """An LSTM layer; a share has some of the cells. The first of a model has no input that gets a gradient."""

    def costs(samples: int, shards: int) -> Operator:
        layer = recurrent(samples, steps, inputs, cells, WIDTH, shards=shards, first=first)
        returned = () if first else exchanged(samples * steps * inputs, shards, input_grad="all_reduce")
        return sequence_of(*returned, layer)

    return costs


def class_loss(rows: int, inputs: int, classes: int, *, pooled_side: int = 0) -> Part:
    """A linear layer to one number per class for each of a sample's rows, and cross-entropy, over a share of classes.

    ``pooled_side``: the input is an image with sides of this many pixels, and its mean is taken first.
    """

    def costs(samples: int, shards: int) -> Operator:
        tokens, own = samples * rows, share(classes, shards)
        return sequence_of(
            *([average_pool(samples, pooled_side, inputs, WIDTH)] if pooled_side else []),
            *exchanged(tokens * inputs, shards, input_grad="all_reduce"),
            linear(tokens, inputs, own, WIDTH),
            vocabulary_loss(tokens, own, WIDTH),
            *exchanged(3 * tokens * _FLOAT32 // WIDTH, shards, forward="all_reduce"),
        )

    return costs
