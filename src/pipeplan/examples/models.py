"""The papers' models as profiles: blocks and edges as the papers' tables have them, costs by closed forms.

A family of models is a class whose fields are the dimensions of a size; the sizes are data (``catalog/models``). Where
a paper does not say something, the value is ours, and the model's notes say so; ``docs/models.md`` compares parameters
with the papers'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from pipeplan.catalog import ModelSize, model_sizes, require_known
from pipeplan.costs.communication import prices_in
from pipeplan.costs.devices import device_preset
from pipeplan.costs.forwards import as_inference
from pipeplan.costs.operators import Operator, activation, linear, norm, sequence_of
from pipeplan.errors import UsageError, choose_from
from pipeplan.examples.layout import (
    WIDTH,
    ModelLayout,
    Part,
    Stack,
    bottleneck,
    class_loss,
    gathered_linear,
    image_stem,
    long_memory,
    table_rows,
    whole,
)
from pipeplan.files import Cluster, Profile, Source

_STRICT = ConfigDict(extra="forbid")
_TIED = "token-embedding"


class Family(Protocol):
    """A model's dimensions."""

    def build(self, layout: ModelLayout) -> None:
        """Lays its blocks and edges out."""


@dataclass(config=_STRICT, frozen=True, slots=True)
class _Layers:
    """Transformer layers over a ``sequence`` of tokens."""

    layers: int
    hidden: int
    heads: int
    sequence: int

    def stack(self, *, causal: bool = False, biased: bool = True) -> Stack:
        """The layers."""
        return Stack(self.layers, self.hidden, self.heads, self.sequence, causal=causal, biased=biased)


@dataclass(config=_STRICT, frozen=True, slots=True)
class Decoder(_Layers):
    """GPT with learned positions; the head shares the token embedding's weight if ``tied``.

    With ``shared`` all devices share embedding and head.
    """

    vocabulary: int
    tied: bool = True
    shared: bool = False

    def build(self, layout: ModelLayout) -> None:
        """Embedding, layers, head."""
        stack, group = self.stack(causal=True), _TIED if self.tied else None
        tokens = layout.tokens(
            "embedding", stack, self.vocabulary, positions=self.sequence, shared=self.shared, tied=group
        )
        last = layout.layers("layer", stack, [(tokens, stack.sample_bytes)])
        layout.vocabulary_head(stack, self.vocabulary, last, shared=self.shared, tied=group)


@dataclass(config=_STRICT, frozen=True, slots=True)
class Encoder(_Layers):
    """BERT: learned positions, two token types; the head has BERT's transform and an output bias."""

    vocabulary: int

    def build(self, layout: ModelLayout) -> None:
        """Embedding, layers, head."""
        stack = self.stack()
        tokens = layout.tokens(
            "embedding", stack, self.vocabulary, positions=self.sequence, types=2, normed=True, tied=_TIED
        )
        last = layout.layers("layer", stack, [(tokens, stack.sample_bytes)])
        layout.vocabulary_head(stack, self.vocabulary, last, before=self._transform, bias=True, tied=_TIED)

    def _transform(self, samples: int, shards: int) -> Operator:
        tokens = samples * self.sequence
        dense = gathered_linear(tokens, shards, self.hidden, self.hidden)
        return sequence_of(dense, activation(tokens * self.hidden, WIDTH), norm(tokens, self.hidden, WIDTH))


@dataclass(config=_STRICT, frozen=True, slots=True)
class EncoderDecoder(_Layers):
    """Encoder and decoder of ``layers`` each; both embeddings and the head share one weight.

    Linear layers and norms have biases if ``biased``. With ``shared`` all devices share embeddings and head.
    """

    vocabulary: int
    biased: bool
    shared: bool

    def build(self, layout: ModelLayout) -> None:
        """Encoder with a norm at its end, decoder, head."""
        encoder, decoder = self.stack(biased=self.biased), self.stack(causal=True, biased=self.biased)
        tokens = layout.tokens("encoder.embedding", encoder, self.vocabulary, shared=self.shared, tied=_TIED)
        last = layout.layers("encoder.layer", encoder, [(tokens, encoder.sample_bytes)])
        encoded = layout.add(
            "encoder.norm",
            "norm",
            whole(lambda samples: encoder.norm(samples * self.sequence)),
            after=[(last, encoder.sample_bytes)],
            dimensions=encoder.sizes,
        )
        tokens = layout.tokens("decoder.embedding", decoder, self.vocabulary, shared=self.shared, tied=_TIED)
        feeds = [(tokens, decoder.sample_bytes), (encoded, encoder.sample_bytes)]
        last = layout.layers("decoder.layer", decoder, feeds, memory=self.sequence)
        layout.vocabulary_head(decoder, self.vocabulary, last, shared=self.shared, tied=_TIED)


@dataclass(config=_STRICT, frozen=True, slots=True)
class Tower(_Layers):
    """One branch of CLIP: a ``sequence`` of tokens of a ``vocabulary``, or without one of patches of ``patch`` numbers.

    Text is read with a causal mask, as CLIP does.
    """

    name: str
    vocabulary: int = 0
    patch: int = 0

    def build(self, layout: ModelLayout) -> tuple[str, Stack]:
        """Embedding and layers; returns the last block's id, and the layers."""
        stack, id_ = self.stack(causal=bool(self.vocabulary)), f"{self.name}.embedding"
        if self.vocabulary:
            first = layout.tokens(id_, stack, self.vocabulary, positions=self.sequence)
        else:
            first = layout.patches(id_, stack, self.patch)
        return layout.layers(f"{self.name}.layer", stack, [(first, stack.sample_bytes)]), stack


@dataclass(config=_STRICT, frozen=True, slots=True)
class Contrastive:
    """CLIP: towers, each pooled to a vector of ``outputs`` per sample, and a contrastive loss that joins them."""

    towers: tuple[Tower, ...]
    outputs: int

    def build(self, layout: ModelLayout) -> None:
        """Towers with a pool each, and the loss."""
        feeds = []
        for tower in self.towers:
            last, stack = tower.build(layout)
            feeds.append((layout.pool(f"{tower.name}.pool", stack, self.outputs, last), self.outputs * WIDTH))
        layout.add("contrast", "contrastive-loss", whole(self._loss), after=feeds, dimensions={"outputs": self.outputs})

    def _loss(self, samples: int) -> Operator:
        similarity = linear(samples, self.outputs, samples, WIDTH, bias=False)
        vectors = len(self.towers) * self.outputs
        return Operator(
            forward=similarity.forward,
            input_grad=2 * similarity.input_grad,
            saved_bytes=vectors * samples * WIDTH,
            gradient_bytes=(vectors + samples) * samples * WIDTH,
        )


@dataclass(config=_STRICT, frozen=True, slots=True)
class CrossEncoder(_Layers):
    """Flava: a tower for text, one for images, and as many layers over the tokens of both, shared by all devices."""

    vocabulary: int
    tokens: int
    patch: int

    def build(self, layout: ModelLayout) -> None:
        """Both towers, the cross-encoder, a pool."""
        size = self.layers, self.hidden, self.heads
        text = Tower(*size, self.sequence, "text", vocabulary=self.vocabulary)
        image = Tower(*size, self.tokens, "image", patch=self.patch)
        feeds = [(last, stack.sample_bytes) for last, stack in (text.build(layout), image.build(layout))]
        cross = Stack(*size, self.sequence + self.tokens)
        last = layout.layers("cross.layer", cross, feeds, shared=True)
        layout.pool("cross.pool", cross, self.hidden, last, shared=True)


@dataclass(config=_STRICT, frozen=True, slots=True)
class MultiModal(_Layers):
    """MMT: branches of equal layers, their outputs concatenated per token."""

    branches: int
    patch: int

    def build(self, layout: ModelLayout) -> None:
        """Branches, concatenation, a head with a number per token."""
        stack = self.stack()
        ends = []
        for branch in range(self.branches):
            first = layout.patches(f"branch{branch}.embedding", stack, self.patch)
            ends.append(layout.layers(f"branch{branch}.layer", stack, [(first, stack.sample_bytes)]))
        joined = layout.joined("concatenation", [(end, stack.sample_bytes) for end in ends])
        layout.value_head(joined, self.branches * stack.hidden, rows=stack.sequence)


@dataclass(config=_STRICT, frozen=True, slots=True)
class TwoBranch(_Layers):
    """GraphPipe's case study: branches of equal layers and nothing else, their outputs concatenated per token."""

    branches: int

    def build(self, layout: ModelLayout) -> None:
        """Branches, concatenation."""
        stack = self.stack()
        ends = [layout.layers(f"branch{branch}.layer", stack, []) for branch in range(self.branches)]
        layout.joined("concatenation", [(end, stack.sample_bytes) for end in ends])


@dataclass(config=_STRICT, frozen=True, slots=True)
class Recommendation:
    """DLRM: as many branches of dense as of sparse features, concatenated, and as many layers after that as before.

    A sparse branch concatenates ``lookups`` rows of ``width`` numbers from a table of ``vocabulary``.
    """

    branches: int
    layers: int
    hidden: int
    lookups: int
    vocabulary: int
    width: int

    def build(self, layout: ModelLayout) -> None:
        """Dense and sparse branches, interaction, layers, a head with one number."""
        dense = (f"dense{branch}.layer" for branch in range(self.branches))
        feeds = [
            (layout.perceptron(prefix, self.layers, self.hidden, self.hidden), self.hidden * WIDTH) for prefix in dense
        ]
        feeds += [
            (self._table(layout, f"sparse{branch}"), self.lookups * self.width * WIDTH)
            for branch in range(self.branches)
        ]
        joined = layout.joined("interaction", feeds)
        numbers = sum(size for _, size in feeds)
        last = layout.perceptron("top.layer", self.layers, numbers // WIDTH, self.hidden, [(joined, numbers)])
        layout.value_head(last, self.hidden)

    def _table(self, layout: ModelLayout, branch: str) -> str:
        return layout.add(
            f"{branch}.embedding",
            "embedding",
            lambda samples, shards: table_rows(samples, shards, self.lookups, self.vocabulary, self.width),
            dimensions={"lookups": self.lookups, "hidden": self.width, "vocabulary": self.vocabulary},
        )


@dataclass(config=_STRICT, frozen=True, slots=True)
class Response:
    """CANDLE-Uno: branches of linear layers, concatenated."""

    branches: int
    layers: int
    hidden: int

    def build(self, layout: ModelLayout) -> None:
        """Branches, concatenation, a head with one number."""
        prefixes = [f"branch{branch}.layer" for branch in range(self.branches)]
        ends = [layout.perceptron(prefix, self.layers, self.hidden, self.hidden) for prefix in prefixes]
        joined = layout.joined("concatenation", [(end, self.hidden * WIDTH) for end in ends])
        layout.value_head(joined, self.branches * self.hidden)


@dataclass(config=_STRICT, frozen=True, slots=True)
class Convolutions:
    """VGG: groups of convolutions with these channels, each halving the image, and three linear layers."""

    channels: tuple[tuple[int, ...], ...]
    hidden: int
    side: int
    classes: int

    def build(self, layout: ModelLayout) -> None:
        """Convolutions, two linear layers, a class per image."""
        after, side, inputs = None, self.side, 3
        for group, outputs in enumerate(self.channels):
            after = layout.convolutions(f"group{group}.convolution", side, inputs, outputs, after)
            side, inputs = side // 2, outputs[-1]
        numbers = side * side * inputs
        assert after is not None
        last = layout.perceptron("linear", 2, numbers, self.hidden, [(after, numbers * WIDTH)])
        sizes = {"inputs": self.hidden, "vocabulary": self.classes}
        _class_head(layout, last, self.hidden * WIDTH, class_loss(1, self.hidden, self.classes), sizes)


@dataclass(config=_STRICT, frozen=True, slots=True)
class Residual:
    """A stem and stages of ``blocks`` bottlenecks, each of which doubles the channels: first ``inner`` and ``ends``."""

    blocks: tuple[int, ...]
    inner: int
    ends: int
    side: int
    classes: int

    def build(self, layout: ModelLayout) -> None:
        """Stem, bottlenecks, a class per image."""
        side, channels = self.side // 4, 64
        after = layout.add("stem", "stem", image_stem(self.side, channels), dimensions={"side": self.side})
        for stage, blocks in enumerate(self.blocks):
            inner, outputs = self.inner * 2**stage, self.ends * 2**stage
            for index in range(blocks):
                stride = 2 if stage and not index else 1
                after = layout.add(
                    f"stage{stage}.block{index}",
                    "bottleneck",
                    bottleneck(side, channels, inner, outputs, stride=stride),
                    after=[(after, side * side * channels * WIDTH)],
                    dimensions={"side": side, "inputs": channels, "inner": inner, "outputs": outputs},
                )
                side, channels = side // stride, outputs
        head = class_loss(1, channels, self.classes, pooled_side=side)
        sizes = {"inputs": channels, "vocabulary": self.classes}
        _class_head(layout, after, side * side * channels * WIDTH, head, sizes)


@dataclass(config=_STRICT, frozen=True, slots=True)
class RecurrentModel:
    """LSTM layers over the frames of an utterance, each of ``frame`` numbers, and one of ``states`` for every frame."""

    layers: int
    cells: int
    frame: int
    steps: int
    states: int

    def build(self, layout: ModelLayout) -> None:
        """Layers, a state per frame."""
        after: list[tuple[str, int]] = []
        for layer in range(self.layers):
            inputs = self.cells if layer else self.frame
            part = long_memory(self.steps, inputs, self.cells, first=not layer)
            sizes = {"sequence": self.steps, "inputs": inputs, "cells": self.cells}
            id_ = layout.add(f"layer{layer}", "lstm", part, after=after, dimensions=sizes)
            after = [(id_, self.steps * self.cells * WIDTH)]
        head = class_loss(self.steps, self.cells, self.states)
        sizes = {"sequence": self.steps, "inputs": self.cells, "vocabulary": self.states}
        _class_head(layout, *after[0], head, sizes)


def _class_head(layout: ModelLayout, after: str, sample_bytes: int, part: Part, dimensions: dict[str, int]) -> None:
    layout.add("head", "head", part, after=[(after, sample_bytes)], dimensions=dimensions)


FAMILIES: dict[str, Callable[..., Family]] = {
    "gpt": Decoder,
    "bert": Encoder,
    "encoder-decoder": EncoderDecoder,
    "clip": Contrastive,
    "flava": CrossEncoder,
    "mmt": MultiModal,
    "two-branch": TwoBranch,
    "dlrm": Recommendation,
    "candle-uno": Response,
    "vgg": Convolutions,
    "wide-resnet": Residual,
    "lstm": RecurrentModel,
}
"""Families as the catalog names them."""


MODELS: Mapping[str, ModelSize] = {name: size for name, size in model_sizes().items() if size.reference}
"""Every model of a paper by name."""

_MOST_SAMPLES = 65_536
_MOST_SHARDS = 1024

_TIMES = (
    "Times by a roofline whose efficiency grows with a kernel's size up to 70 % of the peak FLOP/s and 85 % of the "
    "bandwidth, both assumed; causal masks halve attention, no dropout, fused attention."
)
_ESTIMATE = (
    "Estimated by closed forms, not measured. Parameters, gradients and activations in 16 bits, statistics and loss in "
    f"float32; a float32 copy and Adam's moments, 12 bytes per parameter. {_TIMES}"
)
_FORWARDS = (
    "Estimated by closed forms, not measured. Forwards alone, with parameters and activations in 16 bits; heads "
    f"compute the loss of training, too. {_TIMES}"
)

_SPLIT = (
    "Rows for several shards are of one device's share as Megatron-LM splits it, with all-reduce, all-gather and "
    "reduce-scatter in their times: rings over the links of {}. Norms, poolings and concatenations are whole on every "
    "device."
)


def family_of(name: str) -> Family:
    """The dimensions of a paper's model, which lay it out; ``name`` is one of ``MODELS``."""
    return _family_of(MODELS[name])


def _family_of(size: ModelSize) -> Family:
    require_known(size.dimensions, FAMILIES[size.family], f"model {size.name!r} of family {size.family}")
    return FAMILIES[size.family](**size.dimensions)


def model(
    name: str | ModelSize,
    *,
    device: str | None = None,
    microbatch_sizes: Sequence[int] | None = None,
    shards: Sequence[int] = (1,),
    cluster: Cluster | None = None,
    inference: bool = False,
) -> Profile:
    """The profile of a paper's model, or of one with such dimensions: a row per number of shards and micro-batch size.

    Costs are for a ``device`` preset, by default the one that the catalog says. Of ``inference`` they are of forwards
    alone (:func:`pipeplan.costs.forwards.as_inference`).

    ``shards`` are how many devices split a block; a row's collectives are in its times, over the device's own links
    or among the first devices of ``cluster``.

    Raises:
        UsageError: an unknown model or device, no or unusable micro-batch sizes or shards, or too small a cluster.
    """
    if isinstance(name, str) and name not in MODELS:
        raise UsageError(f"there is no model {name!r}; {choose_from(name, list(MODELS))}")
    paper = MODELS[name] if isinstance(name, str) else name
    preset = device_preset(device or paper.device)
    sizes = sorted(set(paper.microbatch_sizes if microbatch_sizes is None else microbatch_sizes))
    if not sizes or sizes[0] < 1 or sizes[-1] > _MOST_SAMPLES:
        raise UsageError(f"--microbatch must be sizes from 1 to {_MOST_SAMPLES}, not {sizes}")
    groups = _usable(shards, cluster)
    layout = ModelLayout(preset, sizes, shards=groups, prices=None if cluster is None else prices_in(cluster))
    dimensions = _family_of(paper)
    dimensions.build(layout)
    source = f"Device: {preset.source}."
    split = _SPLIT.format(cluster.name if cluster is not None else preset.title) if groups[-1] > 1 else ""
    found = Profile(
        name=paper.name,
        source=Source(
            method="estimated",
            device=preset.title,
            dtype=preset.dtype,
            reference=paper.reference,
            notes=" ".join(filter(None, [_FORWARDS if inference else _ESTIMATE, split, source, paper.notes])),
        ),
        tokens_per_sample=dimensions.sequence if isinstance(dimensions, Decoder | Encoder) else None,
        forward_flops_per_sample=layout.forward_flops or None,
        recipe=layout.recipe,
        blocks=tuple(layout.blocks),
        edges=tuple(layout.edges),
        tied=layout.tied,
    )
    return as_inference(found) if inference else found


def _usable(shards: Sequence[int], cluster: Cluster | None) -> list[int]:
    groups = sorted(set(shards))
    if not groups or groups[0] < 1 or groups[-1] > _MOST_SHARDS:
        raise UsageError(f"--shards must be numbers of devices from 1 to {_MOST_SHARDS}, not {groups}")
    if cluster is not None and groups[-1] > cluster.num_devices:
        raise UsageError(
            f"--shards {groups[-1]} is more than the {cluster.num_devices} devices of cluster {cluster.name!r}; "
            "leave it out or give a larger --cluster"
        )
    return groups
