"""Putting a model together from blocks whose costs are closed forms: transformer halves, embeddings, heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from pipeplan.costs.blocks import state_recipe
from pipeplan.costs.communication import Prices
from pipeplan.costs.devices import DevicePreset
from pipeplan.costs.operators import Operator, activation, concatenate, cost_row, linear, sequence_of
from pipeplan.errors import UsageError
from pipeplan.examples.parts import (
    WIDTH,
    Part,
    Stack,
    convolved,
    dense,
    exchanged,
    gathered_linear,
    share,
    table_rows,
    whole,
)
from pipeplan.files import Block, Edge
from pipeplan.workload.kinds import PARAMETERS

RECIPE = "mixed-precision-adam"
"""What training holds of every parameter, a recipe of the catalog."""


class ModelLayout:
    """Collects blocks and edges in topological order, with a cost row per number of shards and micro-batch size."""

    def __init__(
        self,
        device: DevicePreset,
        microbatch_sizes: Sequence[int],
        *,
        shards: Sequence[int] = (1,),
        prices: Prices | None = None,
    ) -> None:
        self.device, self.microbatch_sizes, self.shards, self.prices = device, microbatch_sizes, shards, prices
        self.recipe = state_recipe(RECIPE)
        self.blocks: list[Block] = []
        self.edges: list[Edge] = []

    def add(
        self,
        id_: str,
        operator: str,
        part: Part,
        *,
        after: Sequence[tuple[str, int]] = (),
        dimensions: dict[str, int],
        shared: bool = False,
        tied: str | None = None,
    ) -> str:
        """A block with the costs of ``part``, fed by ``after``: blocks and the bytes per sample that come from them.

        Raises:
            UsageError: its heads do not divide by the shards.
        """
        parameters = part(1, 1).parameters
        state = self.recipe.state(parameters, WIDTH * parameters)
        self._require_divisible(id_, dimensions.get("heads"))
        block = Block(
            id=id_,
            operator=operator,
            dimensions=dimensions,
            **Block.kept(state[PARAMETERS], state),
            shared=shared,
            tied=tied,
            costs=tuple(
                cost_row(part(size, shards), size, self.device, shards=shards, prices=self.prices)
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
        """Token embedding, with learned positions and token types if there are any, and a norm if ``normed``."""

        def part(samples: int, shards: int) -> Operator:
            rows = table_rows(
                samples, shards, stack.sequence, vocabulary, stack.hidden, positions=positions, types=types
            )
            return sequence_of(rows, *([stack.norm(samples * stack.sequence)] if normed else []))

        sizes = stack.sizes | {"vocabulary": vocabulary}
        return self.add(id_, "embedding", part, dimensions=sizes, shared=shared, tied=tied)

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
        return self.add("head", "head", part, after=feeds, dimensions=sizes, shared=shared, tied=tied)

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
