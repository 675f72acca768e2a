"""Models built from parts with closed-form costs: transformer halves, embeddings, convolutions, heads.

A part is a function of the samples and of the devices that split it. What is split is one device's share, as
Megatron-LM (Shoeybi et al. 2019) has it: layers alternate between a share of the outputs and a share of the inputs, so
that one all-reduce in forward and one in backward do. What does not divide is rounded up: the largest share counts.
Norms, residuals and what travels between blocks are whole on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pipeplan.costs.communication import Prices
from pipeplan.costs.devices import DevicePreset
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
from pipeplan.files import Block, Edge, Recipe, TiedParameter
from pipeplan.files.row_messages import Combining

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

    def part(samples: int, shards: int) -> Operator:
        return in_full(costs(samples))

    return part


def in_full(operator: Operator) -> Operator:
    """An operator whose parameters each device of a group has whole."""
    return replace(operator, whole_parameters=operator.parameters)


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
        """Bytes of the tensor between two blocks, for one sample."""
        return self.sequence * self.hidden * WIDTH

    @property
    def sizes(self) -> dict[str, int]:
        """The dimensions that all its blocks have."""
        return {"sequence": self.sequence, "hidden": self.hidden}

    def norm(self, tokens: int) -> Operator:
        """A norm over the hidden dimension."""
        return norm(tokens, self.hidden, WIDTH, bias=self.biased)

    def linear(self, tokens: int, inputs: int, outputs: int) -> Operator:
        """A linear layer; a share has some of the outputs."""
        return linear(tokens, inputs, outputs, WIDTH, bias=self.biased)

    def by_inputs(self, tokens: int, own: int) -> Operator:
        """A linear layer to the hidden dimension; a share has some of the inputs, and all of the bias."""
        return replace(self.linear(tokens, own, self.hidden), whole_parameters=self.hidden * self.biased)

    def attention(self, samples: int, shards: int = 1) -> Operator:
        """Self-attention with its norm and residual; a share has some of the heads."""
        tokens, own = samples * self.sequence, self.hidden // shards
        return self._residual(
            tokens,
            shards,
            self.norm(tokens),
            self.linear(tokens, self.hidden, 3 * own),
            self._core(samples, self.sequence, shards, causal=self.causal),
            self.by_inputs(tokens, own),
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
            self.by_inputs(tokens, own),
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
            self.by_inputs(tokens, own),
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
            aside = (short, *ends, in_full(batch_norm(samples, after, outputs, WIDTH)))
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
            in_full(batch_norm(samples, after, outputs, WIDTH)),
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


def recipe_of(device: DevicePreset) -> Recipe:
    """What training is taken to keep: a float32 copy and Adam's moments beside gradients in the device's 16 bits."""
    if device.dtype == "float16":
        return Recipe(name="fp16-mixed")
    return Recipe(name="bf16-mixed", gradient_dtype="bf16")


class ModelLayout:
    """Collects blocks and edges in topological order, with a cost row per number of shards and micro-batch size.

    ``forward_flops`` are those of one sample's products in all blocks.
    """

    def __init__(
        self,
        device: DevicePreset,
        microbatch_sizes: Sequence[int],
        *,
        shards: Sequence[int] = (1,),
        prices: Prices | None = None,
    ) -> None:
        self.device, self.microbatch_sizes, self.shards, self.prices = device, microbatch_sizes, shards, prices
        self.recipe = recipe_of(device)
        self.forward_flops = 0
        self.blocks: list[Block] = []
        self.edges: list[Edge] = []
        self._tables: dict[str, tuple[int, list[str]]] = {}

    @property
    def tied(self) -> tuple[TiedParameter, ...]:
        """The tables that several blocks share."""
        return tuple(
            TiedParameter(name=name, blocks=tuple(blocks), parameters=count)
            for name, (count, blocks) in self._tables.items()
        )

    def _tie(self, name: str | None, id_: str, stack: Stack, vocabulary: int) -> str:
        """The block uses the table of this name, if that is one."""
        if name is not None:
            self._tables.setdefault(name, (vocabulary * stack.hidden, []))[1].append(id_)
        return id_

    def add(
        self,
        id_: str,
        operator: str,
        part: Part,
        *,
        after: Sequence[tuple[str, int]] = (),
        dimensions: dict[str, int],
        shared: bool = False,
    ) -> str:
        """A block with the costs of ``part``, fed by ``after``: blocks and the bytes per sample that come from them.

        Raises:
            UsageError: its heads do not divide by the shards, or its costs are more than a profile may state.
        """
        of_sample = part(1, 1)
        self.forward_flops += of_sample.product_flops
        self._require_divisible(id_, dimensions.get("heads"))
        block = Block(
            id=id_,
            operator=operator,
            dimensions=dimensions,
            parameters=of_sample.parameters,
            whole_parameters=of_sample.whole_parameters if max(self.shards) > 1 else 0,
            shared=shared,
            costs=tuple(
                cost_row(
                    part(size, shards), size, self.device, shards=shards, prices=self.prices, where=f"block {id_!r}"
                )
                for shards in self.shards
                for size in self.microbatch_sizes
            ),
        )
        self.blocks.append(block)
        self.edges += [Edge(source=source, target=id_, bytes_per_sample=size) for source, size in after]
        return id_

    def _require_divisible(self, id_: str, heads: int | None) -> None:
        uneven = [shards for shards in self.shards if heads is not None and heads % shards]
        if uneven:
            raise UsageError(
                f"--shards {uneven[0]} does not divide the {heads} heads of block {id_!r}; choose divisors of {heads}"
            )

    def tokens(
        self,
        id_: str,
        stack: Stack,
        vocabulary: int,
        *,
        positions: int = 0,
        types: int = 0,
        normed: bool = False,
        shared: bool = False,
        tied: str | None = None,
    ) -> str:
        """Token embedding, with learned positions and token types if there are any, and a norm if ``normed``.

        ``tied`` names the table, where other blocks use it, too.
        """

        def part(samples: int, shards: int) -> Operator:
            rows = table_rows(
                samples, shards, stack.sequence, vocabulary, stack.hidden, positions=positions, types=types
            )
            return sequence_of(rows, *([stack.norm(samples * stack.sequence)] if normed else []))

        sizes = stack.sizes | {"vocabulary": vocabulary}
        self.add(id_, "embedding", part, dimensions=sizes, shared=shared)
        return self._tie(tied, id_, stack, vocabulary)

    def patches(self, id_: str, stack: Stack, patch: int) -> str:
        """Patches of ``patch`` numbers each to the hidden size by a linear layer; inputs get no gradient."""

        def part(samples: int, shards: int) -> Operator:
            tokens = samples * stack.sequence
            layer = replace(stack.linear(tokens, patch, share(stack.hidden, shards)), input_grad=())
            return sequence_of(layer, *exchanged(tokens * stack.hidden, shards, forward="all_gather"))

        return self.add(id_, "patch-embedding", part, dimensions=stack.sizes | {"patch": patch})

    def layers(
        self, prefix: str, stack: Stack, after: Sequence[tuple[str, int]], *, memory: int = 0, shared: bool = False
    ) -> str:
        """The layers of a stack as halves; returns the last block's id.

        With ``memory`` tokens of an encoder a layer has cross-attention between its halves, and the encoder's output
        travels from block to block beside the stack's own tensor, up to the last that needs it.
        """
        feeds = after
        carried = stack.sample_bytes + memory * stack.hidden * WIDTH
        for layer in range(stack.layers):
            halves: list[tuple[str, Part, dict[str, int]]] = [
                ("attention", stack.attention, {"heads": stack.heads}),
                ("ffn", stack.feed_forward, {"ffn": 4 * stack.hidden}),
            ]
            if memory:
                cross = {"heads": stack.heads, "memory": memory}
                halves.insert(1, ("cross-attention", partial(_crossed, stack, memory), cross))
            for operator, part, split in halves:
                id_ = f"{prefix}{layer}.{operator}"
                self.add(id_, operator, part, after=feeds, dimensions=stack.sizes | split, shared=shared)
                done = layer == stack.layers - 1 and operator != "attention"
                feeds = [(id_, stack.sample_bytes if done else carried)]
        return feeds[0][0]

    def vocabulary_head(
        self,
        stack: Stack,
        vocabulary: int,
        after: str,
        *,
        before: Part | None = None,
        bias: bool = False,
        shared: bool = False,
        tied: str | None = None,
    ) -> str:
        """Final norm, output layer and cross-entropy over all tokens; ``before`` replaces the norm."""

        def part(samples: int, shards: int) -> Operator:
            first = before(samples, shards) if before is not None else None
            return stack.vocabulary_head(samples, shards, vocabulary, bias=bias, before=first)

        sizes = stack.sizes | {"vocabulary": vocabulary}
        feeds = [(after, stack.sample_bytes)]
        self.add("head", "head", part, after=feeds, dimensions=sizes, shared=shared)
        return self._tie(tied, "head", stack, vocabulary)

    def pool(self, id_: str, stack: Stack, outputs: int, after: str, *, shared: bool = False) -> str:
        """Final norm, then one token of each sample by a linear layer to ``outputs`` numbers."""

        def part(samples: int, shards: int) -> Operator:
            tokens = stack.norm(samples * stack.sequence)
            return sequence_of(tokens, gathered_linear(samples, shards, stack.hidden, outputs))

        sizes = stack.sizes | {"outputs": outputs}
        return self.add(id_, "pool", part, after=[(after, stack.sample_bytes)], dimensions=sizes, shared=shared)

    def perceptron(
        self, prefix: str, layers: int, inputs: int, hidden: int, after: Sequence[tuple[str, int]] = ()
    ) -> str:
        """Linear layers with a ReLU each, a block apiece; the first takes ``inputs`` numbers."""
        feeds = after
        for layer in range(layers):
            taken = inputs if layer == 0 else hidden
            sizes = {"inputs": taken, "outputs": hidden}
            part = dense(taken, hidden, first=not feeds)
            id_ = self.add(f"{prefix}{layer}", "linear", part, after=feeds, dimensions=sizes)
            feeds = [(id_, hidden * WIDTH)]
        return feeds[0][0]

    def joined(self, id_: str, feeds: Sequence[tuple[str, int]]) -> str:
        """The concatenation of what several blocks give."""
        numbers = sum(size for _, size in feeds) // WIDTH
        part = whole(lambda samples: concatenate(samples * numbers, WIDTH))
        return self.add(id_, "concatenation", part, after=feeds, dimensions={"outputs": numbers})

    def convolutions(self, prefix: str, side: int, inputs: int, outputs: Sequence[int], after: str | None) -> str:
        """Convolutions with a ReLU each, a block apiece, on images of this side; the last halves it by pooling."""
        for index, given in enumerate(outputs):
            last = index == len(outputs) - 1
            part = convolved(side, inputs, given, first=after is None, pooled=last)
            feeds = [] if after is None else [(after, side * side * inputs * WIDTH)]
            sizes = {"side": side, "inputs": inputs, "outputs": given}
            after = self.add(f"{prefix}{index}", "convolution", part, after=feeds, dimensions=sizes)
            inputs = given
        assert after is not None
        return after

    def value_head(self, after: str, inputs: int, rows: int = 1) -> str:
        """A linear layer to one number for each of a sample's ``rows``, and its loss."""

        def costs(samples: int) -> Operator:
            loss = activation(samples * rows, WIDTH)  # element by element, keeping its input
            return sequence_of(linear(samples * rows, inputs, 1, WIDTH), loss)

        feeds = [(after, rows * inputs * WIDTH)]
        return self.add("head", "head", whole(costs), after=feeds, dimensions={"inputs": inputs, "outputs": 1})


def _crossed(stack: Stack, memory: int, samples: int, shards: int) -> Operator:
    return stack.cross_attention(samples, memory, shards)
