"""Putting a model together from blocks whose costs are closed forms: transformer halves, embeddings, heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pipeplan.costs.operators import (
    Operator,
    activation,
    add,
    attention_core,
    concatenate,
    convolution,
    cost_row,
    embedding,
    linear,
    max_pool,
    norm,
    relu,
    sequence_of,
    vocabulary_loss,
)
from pipeplan.costs.presets import DevicePreset
from pipeplan.model import Block, Edge

__all__ = ["WIDTH", "Layout", "Stack"]

WIDTH = 2
"""Bytes of a number in the 16-bit formats."""

_OPTIMIZER_BYTES = 12
"""Mixed-precision Adam, per parameter: a float32 copy and two float32 moments (ZeRO, SC'20, section 3.1)."""


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

    def attention(self, samples: int) -> Operator:
        """Self-attention with its norm and residual."""
        tokens = samples * self.sequence
        return self._residual(
            tokens,
            self.norm(tokens),
            self.linear(tokens, self.hidden, 3 * self.hidden),
            self._core(samples, self.sequence, causal=self.causal),
            self.linear(tokens, self.hidden, self.hidden),
        )

    def cross_attention(self, samples: int, memory: int) -> Operator:
        """Attention to ``memory`` tokens of an encoder as wide, with its norm and residual."""
        tokens = samples * self.sequence
        return self._residual(
            tokens,
            self.norm(tokens),
            self.linear(tokens, self.hidden, self.hidden),
            self.linear(samples * memory, self.hidden, 2 * self.hidden),
            self._core(samples, memory),
            self.linear(tokens, self.hidden, self.hidden),
        )

    def feed_forward(self, samples: int) -> Operator:
        """Two linear layers, four times as wide between them, with their norm and residual."""
        tokens = samples * self.sequence
        return self._residual(
            tokens,
            self.norm(tokens),
            self.linear(tokens, self.hidden, 4 * self.hidden),
            activation(4 * tokens * self.hidden, WIDTH),
            self.linear(tokens, 4 * self.hidden, self.hidden),
        )

    def _core(self, samples: int, keys: int, *, causal: bool = False) -> Operator:
        return attention_core(samples, self.sequence, keys, self.heads, self.hidden // self.heads, WIDTH, causal=causal)

    def _residual(self, tokens: int, *operators: Operator) -> Operator:
        numbers = tokens * self.hidden
        return sequence_of(*operators, add(numbers, WIDTH), residual_bytes=numbers * WIDTH)


class Layout:
    """Collects blocks and edges in topological order, with a cost row per micro-batch size."""

    def __init__(self, device: DevicePreset, microbatch_sizes: Sequence[int]) -> None:
        self.device, self.microbatch_sizes = device, microbatch_sizes
        self.blocks: list[Block] = []
        self.edges: list[Edge] = []

    def add(
        self,
        id_: str,
        operator: str,
        costs: Callable[[int], Operator],
        *,
        after: Sequence[tuple[str, int]] = (),
        dimensions: dict[str, int],
        shared: bool = False,
        tied: str | None = None,
    ) -> str:
        """A block with ``costs`` (samples), fed by ``after``: blocks and the bytes per sample that come from them."""
        parameters = costs(1).parameters
        block = Block(
            id=id_,
            operator=operator,
            dimensions=dimensions,
            parameter_bytes=WIDTH * parameters,
            optimizer_bytes=_OPTIMIZER_BYTES * parameters,
            shared=shared,
            tied=tied,
            costs=tuple(cost_row(costs(size), size, self.device) for size in self.microbatch_sizes),
        )
        self.blocks.append(block)
        self.edges += [Edge(source=source, target=id_, bytes_per_sample=size) for source, size in after]
        return id_

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
        """Token embedding, with learned positions and token types if there are any, and a norm if ``normed``."""

        def costs(samples: int) -> Operator:
            table = embedding(
                samples, stack.sequence, vocabulary, stack.hidden, WIDTH, positions=positions, types=types
            )
            return sequence_of(table, *([stack.norm(samples * stack.sequence)] if normed else []))

        sizes = stack.sizes | {"vocabulary": vocabulary}
        return self.add(id_, "embedding", costs, dimensions=sizes, shared=shared, tied=tied)

    def patches(self, id_: str, stack: Stack, patch: int) -> str:
        """Patches of ``patch`` numbers each to the hidden size by a linear layer; inputs get no gradient."""

        def costs(samples: int) -> Operator:
            return replace(stack.linear(samples * stack.sequence, patch, stack.hidden), input_grad=())

        return self.add(id_, "patch-embedding", costs, dimensions=stack.sizes | {"patch": patch})

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
            halves: list[tuple[str, Callable[[int], Operator], dict[str, int]]] = [
                ("attention", stack.attention, {"heads": stack.heads}),
                ("ffn", stack.feed_forward, {"ffn": 4 * stack.hidden}),
            ]
            if memory:
                cross = {"heads": stack.heads, "memory": memory}
                halves.insert(1, ("cross-attention", lambda samples: stack.cross_attention(samples, memory), cross))
            for operator, costs, split in halves:
                id_ = f"{prefix}{layer}.{operator}"
                self.add(id_, operator, costs, after=feeds, dimensions=stack.sizes | split, shared=shared)
                done = layer == stack.layers - 1 and operator != "attention"
                feeds = [(id_, stack.sample_bytes if done else carried)]
        return feeds[0][0]

    def vocabulary_head(
        self,
        stack: Stack,
        vocabulary: int,
        after: str,
        *,
        before: Callable[[int], Operator] | None = None,
        bias: bool = False,
        shared: bool = False,
        tied: str | None = None,
    ) -> str:
        """Final norm, output layer and cross-entropy over all tokens; ``before`` (samples) replaces the norm."""

        def costs(samples: int) -> Operator:
            tokens = samples * stack.sequence
            return sequence_of(
                before(samples) if before is not None else stack.norm(tokens),
                linear(tokens, stack.hidden, vocabulary, WIDTH, bias=bias),
                vocabulary_loss(tokens, vocabulary, WIDTH),
            )

        sizes = stack.sizes | {"vocabulary": vocabulary}
        feeds = [(after, stack.sample_bytes)]
        return self.add("head", "head", costs, after=feeds, dimensions=sizes, shared=shared, tied=tied)

    def pool(self, id_: str, stack: Stack, outputs: int, after: str, *, shared: bool = False) -> str:
        """Final norm, then one token of each sample by a linear layer to ``outputs`` numbers."""

        def costs(samples: int) -> Operator:
            return sequence_of(stack.norm(samples * stack.sequence), stack.linear(samples, stack.hidden, outputs))

        sizes = stack.sizes | {"outputs": outputs}
        return self.add(id_, "pool", costs, after=[(after, stack.sample_bytes)], dimensions=sizes, shared=shared)

    def perceptron(
        self, prefix: str, layers: int, inputs: int, hidden: int, after: Sequence[tuple[str, int]] = ()
    ) -> str:
        """Linear layers with a ReLU each, a block apiece; the first takes ``inputs`` numbers."""
        feeds = after
        for layer in range(layers):
            taken = inputs if layer == 0 else hidden
            costs = _dense(taken, hidden, first=not feeds)
            id_ = self.add(
                f"{prefix}{layer}", "linear", costs, after=feeds, dimensions={"inputs": taken, "outputs": hidden}
            )
            feeds = [(id_, hidden * WIDTH)]
        return feeds[0][0]

    def joined(self, id_: str, feeds: Sequence[tuple[str, int]], *, kept: int = 0) -> str:
        """The concatenation of what several blocks give; ``kept`` numbers of it they need themselves for backward."""
        numbers = sum(size for _, size in feeds) // WIDTH
        return self.add(
            id_,
            "concatenation",
            lambda samples: concatenate(samples * numbers, WIDTH, kept=samples * kept),
            after=feeds,
            dimensions={"outputs": numbers},
        )

    def convolutions(self, prefix: str, side: int, inputs: int, outputs: Sequence[int], after: str | None) -> str:
        """Convolutions with a ReLU each, a block apiece, on images of this side; the last halves it by pooling."""
        for index, given in enumerate(outputs):
            last = index == len(outputs) - 1
            costs = _convolved(side, inputs, given, first=after is None, pooled=last)
            feeds = [] if after is None else [(after, side * side * inputs * WIDTH)]
            sizes = {"side": side, "inputs": inputs, "outputs": given}
            after = self.add(f"{prefix}{index}", "convolution", costs, after=feeds, dimensions=sizes)
            inputs = given
        assert after is not None
        return after

    def class_head(self, after: str, inputs: int, classes: int) -> str:
        """A linear layer to one number per class, and cross-entropy."""

        def costs(samples: int) -> Operator:
            return sequence_of(linear(samples, inputs, classes, WIDTH), vocabulary_loss(samples, classes, WIDTH))

        sizes = {"inputs": inputs, "vocabulary": classes}
        return self.add("head", "head", costs, after=[(after, inputs * WIDTH)], dimensions=sizes)

    def value_head(self, after: str, inputs: int, rows: int = 1) -> str:
        """A linear layer to one number for each of a sample's ``rows``, and its loss."""

        def costs(samples: int) -> Operator:
            loss = activation(samples * rows, WIDTH)  # element by element, keeping its input
            return sequence_of(linear(samples * rows, inputs, 1, WIDTH), loss)

        feeds = [(after, rows * inputs * WIDTH)]
        return self.add("head", "head", costs, after=feeds, dimensions={"inputs": inputs, "outputs": 1})


def _dense(inputs: int, outputs: int, *, first: bool) -> Callable[[int], Operator]:
    """A linear layer with a ReLU; the first of a model has no input that gets a gradient."""

    def costs(samples: int) -> Operator:
        layer = linear(samples, inputs, outputs, WIDTH)
        return sequence_of(replace(layer, input_grad=()) if first else layer, relu(samples * outputs, WIDTH))

    return costs


def _convolved(side: int, inputs: int, outputs: int, *, first: bool, pooled: bool) -> Callable[[int], Operator]:
    """A convolution with a ReLU and maybe pooling; the first of a model has no input that gets a gradient."""

    def costs(samples: int) -> Operator:
        layer = convolution(samples, side, inputs, outputs, WIDTH)
        return sequence_of(
            replace(layer, input_grad=layer.input_grad[1:]) if first else layer,
            relu(samples * side * side * outputs, WIDTH),
            *([max_pool(samples, side, outputs, WIDTH)] if pooled else []),
        )

    return costs
