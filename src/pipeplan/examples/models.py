"""The papers' models as profiles: blocks and edges as the papers' tables have them, costs by closed forms.

The tables are in :mod:`pipeplan.examples.tables`; ``docs/models.md`` compares parameters with the papers' and says
what they leave open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pipeplan.costs.collectives import prices_in
from pipeplan.costs.operators import Operator, activation, linear, norm, sequence_of
from pipeplan.costs.presets import device_preset
from pipeplan.errors import UsageError
from pipeplan.examples.layout import Layout
from pipeplan.examples.parts import (
    WIDTH,
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
from pipeplan.examples.tables import (
    BERT_LARGE,
    CLIP,
    FLAVA,
    GPT2,
    MT5,
    TESSEL_GPT,
    TRANSLATION,
    VGG16,
    Language,
    Residual,
    Speech,
    Tower,
    flexpipe_gpt,
)
from pipeplan.model import Cluster, Profile, Source

__all__ = ["MODELS", "PaperModel", "model"]

_MOST_SAMPLES = 65_536
_MOST_SHARDS = 1024
_CLIP_OUTPUTS = 1024

_ESTIMATE = (
    "Estimated by closed forms, not measured. Parameters, gradients and activations in 16 bits, statistics and loss in "
    "float32; optimizer state of mixed-precision Adam, 12 bytes per parameter. Times by a roofline whose efficiency "
    "grows with a kernel's size up to 70 % of the peak FLOP/s and 85 % of the bandwidth, both assumed; causal masks "
    "halve attention, no dropout, fused attention."
)

_SPLIT = (
    "Rows for several shards are of one device's share as Megatron-LM splits it, with all-reduce, all-gather and "
    "reduce-scatter in their times: rings over the links of {}. Norms, poolings and concatenations are whole on every "
    "device, whose parameters a stage nevertheless divides by its shards."
)


@dataclass(frozen=True, slots=True)
class PaperModel:
    """A model of a paper: how to lay it out, where its dimensions stand, what we had to choose, sizes to write."""

    build: Callable[[Layout], None]
    reference: str
    notes: str = ""
    microbatch_sizes: tuple[int, ...] = (1, 2, 4)


def model(
    name: str,
    *,
    device: str = "a100-80gb",
    microbatch_sizes: Sequence[int] | None = None,
    shards: Sequence[int] = (1,),
    cluster: Cluster | None = None,
) -> Profile:
    """The profile of a paper's model, for a device preset, with a cost row per number of shards and micro-batch size.

    ``shards`` are how many devices split a block; a row's collectives are in its times, over the device's own links
    or among the first devices of ``cluster``.

    Raises:
        UsageError: an unknown model or device, no or unusable micro-batch sizes or shards, or too small a cluster.
    """
    if name not in MODELS:
        raise UsageError(f"there is no model {name!r}; choose from {', '.join(MODELS)}")
    paper, preset = MODELS[name], device_preset(device)
    sizes = sorted(set(paper.microbatch_sizes if microbatch_sizes is None else microbatch_sizes))
    if not sizes or sizes[0] < 1 or sizes[-1] > _MOST_SAMPLES:
        raise UsageError(f"--microbatch must be sizes from 1 to {_MOST_SAMPLES}, not {sizes}")
    groups = _usable(shards, cluster)
    layout = Layout(preset, sizes, shards=groups, prices=None if cluster is None else prices_in(cluster))
    paper.build(layout)
    split = _SPLIT.format(cluster.name if cluster is not None else preset.title) if groups[-1] > 1 else ""
    return Profile(
        name=name,
        source=Source(
            method="estimated",
            device=preset.title,
            dtype=preset.dtype,
            reference=paper.reference,
            notes=" ".join(filter(None, [_ESTIMATE, split, f"Device: {preset.source}.", paper.notes])),
        ),
        blocks=tuple(layout.blocks),
        edges=tuple(layout.edges),
    )


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


def _gpt(layout: Layout, table: Language, *, tied: bool = True, shared: bool = False) -> None:
    """Decoder with learned positions; the head shares the token embedding's weight if ``tied``."""
    stack, group = table.stack(causal=True), "token-embedding" if tied else None
    tokens = layout.tokens("embedding", stack, table.vocabulary, positions=table.sequence, shared=shared, tied=group)
    last = layout.layers("layer", stack, [(tokens, stack.sample_bytes)])
    layout.vocabulary_head(stack, table.vocabulary, last, shared=shared, tied=group)


def _bert(layout: Layout, table: Language) -> None:
    """Encoder with learned positions and two token types; the head has BERT's transform and an output bias."""
    stack, group = table.stack(), "token-embedding"

    def transform(samples: int, shards: int) -> Operator:
        tokens, hidden = samples * table.sequence, table.hidden
        dense = gathered_linear(tokens, shards, hidden, hidden)
        return sequence_of(dense, activation(tokens * hidden, WIDTH), norm(tokens, hidden, WIDTH))

    tokens = layout.tokens(
        "embedding", stack, table.vocabulary, positions=table.sequence, types=2, normed=True, tied=group
    )
    last = layout.layers("layer", stack, [(tokens, stack.sample_bytes)])
    layout.vocabulary_head(stack, table.vocabulary, last, before=transform, bias=True, tied=group)


def _translation(layout: Layout, table: Language, *, biased: bool, shared: bool) -> None:
    """Encoder and decoder of as many layers; both embeddings and the head share one weight."""
    group = "token-embedding"
    encoder, decoder = table.stack(biased=biased), table.stack(causal=True, biased=biased)
    tokens = layout.tokens("encoder.embedding", encoder, table.vocabulary, shared=shared, tied=group)
    last = layout.layers("encoder.layer", encoder, [(tokens, encoder.sample_bytes)])
    encoded = layout.add(
        "encoder.norm",
        "norm",
        whole(lambda samples: encoder.norm(samples * table.sequence)),
        after=[(last, encoder.sample_bytes)],
        dimensions=encoder.sizes,
    )
    tokens = layout.tokens("decoder.embedding", decoder, table.vocabulary, shared=shared, tied=group)
    feeds = [(tokens, decoder.sample_bytes), (encoded, encoder.sample_bytes)]
    last = layout.layers("decoder.layer", decoder, feeds, memory=table.sequence)
    layout.vocabulary_head(decoder, table.vocabulary, last, shared=shared, tied=group)


def _tower(layout: Layout, tower: Tower) -> str:
    """Embedding and layers of one branch; returns the last block's id."""
    stack, id_ = tower.stack(), f"{tower.name}.embedding"
    if tower.vocabulary:
        first = layout.tokens(id_, stack, tower.vocabulary, positions=tower.sequence)
    else:
        first = layout.patches(id_, stack, tower.patch)
    return layout.layers(f"{tower.name}.layer", stack, [(first, stack.sample_bytes)])


def _clip(layout: Layout, towers: Sequence[Tower]) -> None:
    """Branches, each pooled to one vector per sample, and a contrastive loss that joins them."""
    ends = [layout.pool(f"{t.name}.pool", t.stack(), _CLIP_OUTPUTS, _tower(layout, t)) for t in towers]
    feeds = [(end, _CLIP_OUTPUTS * WIDTH) for end in ends]

    def loss(samples: int) -> Operator:
        similarity = linear(samples, _CLIP_OUTPUTS, samples, WIDTH, bias=False)
        return Operator(
            forward=similarity.forward,
            input_grad=2 * similarity.input_grad,
            saved_bytes=len(towers) * samples * _CLIP_OUTPUTS * WIDTH,
            gradient_bytes=(len(towers) * _CLIP_OUTPUTS + samples) * samples * WIDTH,
        )

    layout.add("contrast", "contrastive-loss", whole(loss), after=feeds, dimensions={"outputs": _CLIP_OUTPUTS})


def _flava(layout: Layout, towers: Sequence[Tower]) -> None:
    """A branch for text, one for images, and a cross-encoder over the tokens of both, shared by all devices."""
    feeds = [(_tower(layout, tower), tower.stack().sample_bytes) for tower in towers]
    first = towers[0]
    cross = Stack(first.layers, first.hidden, first.heads, sum(tower.sequence for tower in towers))
    last = layout.layers("cross.layer", cross, feeds, shared=True)
    layout.pool("cross.pool", cross, first.hidden, last, shared=True)


def _mmt(layout: Layout, branches: int) -> None:
    """Branches of eight layers, their outputs concatenated per token."""
    stack = Stack(8, 1024, 16, 256)
    ends = []
    for branch in range(branches):
        first = layout.patches(f"branch{branch}.embedding", stack, 1024)
        ends.append(layout.layers(f"branch{branch}.layer", stack, [(first, stack.sample_bytes)]))
    joined = layout.joined("concatenation", [(end, stack.sample_bytes) for end in ends])
    layout.value_head(joined, branches * stack.hidden, rows=stack.sequence)


def _dlrm(layout: Layout, branches: int) -> None:
    """As many branches of dense as of sparse features, concatenated, and four layers after that."""
    feeds = [(layout.perceptron(f"dense{branch}.layer", 4, 4096, 4096), 4096 * WIDTH) for branch in range(branches)]
    feeds += [(_embedding_bag(layout, f"sparse{branch}.embedding"), 100 * 64 * WIDTH) for branch in range(branches)]
    joined = layout.joined("interaction", feeds)
    numbers = sum(size for _, size in feeds)
    last = layout.perceptron("top.layer", 4, numbers // WIDTH, 4096, [(joined, numbers)])
    layout.value_head(last, 4096)


def _embedding_bag(layout: Layout, id_: str) -> str:
    """100 rows of 64 numbers from a million, concatenated."""
    return layout.add(
        id_,
        "embedding",
        lambda samples, shards: table_rows(samples, shards, 100, 1_000_000, 64),
        dimensions={"lookups": 100, "hidden": 64, "vocabulary": 1_000_000},
    )


def _candle_uno(layout: Layout, branches: int) -> None:
    """Branches of four layers, concatenated."""
    feeds = [(layout.perceptron(f"branch{branch}.layer", 4, 4096, 4096), 4096 * WIDTH) for branch in range(branches)]
    layout.value_head(layout.joined("concatenation", feeds), branches * 4096)


def _vgg16(layout: Layout) -> None:
    """Thirteen convolutions in five groups, each halving the image, and three linear layers."""
    after, side, inputs = None, 224, 3
    for group, outputs in enumerate(VGG16):
        after = layout.convolutions(f"group{group}.convolution", side, inputs, outputs, after)
        side, inputs = side // 2, outputs[-1]
    numbers = side * side * inputs
    assert after is not None
    last = layout.perceptron("linear", 2, numbers, 4096, [(after, numbers * WIDTH)])
    _class_head(layout, last, 4096 * WIDTH, class_loss(1, 4096, 1000), {"inputs": 4096, "vocabulary": 1000})


def _wide_resnet(layout: Layout, table: Residual) -> None:
    """A stem, four stages of bottlenecks of which each doubles the channels, and a class per image."""
    side, channels = table.side // 4, 64
    after = layout.add("stem", "stem", image_stem(table.side, channels), dimensions={"side": table.side})
    for stage, blocks in enumerate(table.blocks):
        inner, outputs = table.inner * 2**stage, table.ends * 2**stage
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
    head = class_loss(1, channels, table.classes, pooled_side=side)
    sizes = {"inputs": channels, "vocabulary": table.classes}
    _class_head(layout, after, side * side * channels * WIDTH, head, sizes)


def _speech(layout: Layout, table: Speech) -> None:
    """LSTM layers, and a state for every frame."""
    after: list[tuple[str, int]] = []
    for layer in range(table.layers):
        inputs = table.cells if layer else table.frame
        part = long_memory(table.steps, inputs, table.cells, first=not layer)
        sizes = {"sequence": table.steps, "inputs": inputs, "cells": table.cells}
        after = [
            (
                layout.add(f"layer{layer}", "lstm", part, after=after, dimensions=sizes),
                table.steps * table.cells * WIDTH,
            )
        ]
    head = class_loss(table.steps, table.cells, table.states)
    sizes = {"sequence": table.steps, "inputs": table.cells, "vocabulary": table.states}
    _class_head(layout, *after[0], head, sizes)


def _class_head(layout: Layout, after: str, sample_bytes: int, part: Part, dimensions: dict[str, int]) -> None:
    layout.add("head", "head", part, after=[(after, sample_bytes)], dimensions=dimensions)


_AUTOPIPE = "AutoPipe, Table I"
_TESSEL = "Tessel (HPCA'24), Table III"
_FLEXPIPE = "FlexPipe, Table 3, whose headings of attention heads and hidden size are swapped"
_GRAPHPIPE = "GraphPipe (thesis, chapter 3), section 3.10.3"

_SEARCHED = "GraphPipe (thesis, chapter 3), section 3.7.2, with the sizes of 3.10.3"
_TENSOROPT = "TensorOpt, Table 1"
_IMAGES = (8, 16, 32)

_GPT2_NOTE = "Tied embedding; heads, sequence of 1024 and vocabulary of 50257 are GPT-2's, the table has none."
_BERT_NOTE = (
    "Sequence of 512 and vocabulary of 30522 are BERT's, the table has none; the head is that for masked words, over "
    "all tokens."
)
_TESSEL_GPT_NOTE = "Tied embedding and head, shared by all devices; the sequence of 1024 is ours, the paper has none."
_MT5_NOTE = (
    "Half of the layers encode, half decode; embeddings and head are tied and shared by all devices. Ours, since the "
    "paper is silent: sequences of 512, feed-forward of 4 x hidden without gate, no relative position biases. The "
    "encoder's output travels with the decoder's tensor from layer to layer."
)
_FLAVA_NOTE = (
    "24 layers of 4096 with 32 heads (section VI-D, Fig. 15), taken for each of the three encoders; the cross-encoder "
    "is shared by all devices. Ours: 197 image and 77 text tokens, vocabulary of 30522. The paper ran inference only."
)
_FLEXPIPE_NOTE = (
    "Embedding and head apart, not tied: with that the table's totals come out. Both may be spread over the devices of "
    "a pipeline (section 7.1): write rows for as many --shards."
)
_CLIP_NOTE = (
    "Ours: patches of 588 numbers for image, video and audio, vocabulary of 49408, and 1024 numbers per sample to the "
    "contrastive loss."
)
_MMT_NOTE = "Ours: inputs of 1024 numbers per token by a linear layer, and a head of one number per token."
_DLRM_NOTE = "Ours: dense features of 4096 numbers, four layers after the interaction, a head of one number."
_UNO_NOTE = "Ours: inputs of 4096 numbers per branch, and a head of one number after the concatenation."
_EIGHT_NOTE = "Four branches of each kind are the eight of 3.7.2."
_RNN_NOTE = (
    "LSTM of Sak, Senior and Beaufays (2014), which the paper cites: frames of 40 numbers, 14247 states. Ours: four "
    "layers of 31936 cells without projection, which meet the table's 108 GB in float32; a sample is 20 frames. Weight "
    "gradients of an LSTM are made with the input gradient."
)
_WIDE_NOTE = (
    "ResNet-50 of Zagoruyko and Komodakis (2016), which the paper cites: the inner channels of the bottlenecks are "
    "widened. Ours: by 12.75, to 816 in the first stage, which meets the table's 7.3 GB in float32; images of "
    "224 x 224, 1000 classes. Weight gradients of convolutions are made with the input gradient."
)
_TRANSLATION_NOTE = (
    "Encoder and decoder of Vaswani et al. (2017), which the paper cites: six layers each, heads of 64, 32000 word "
    "pieces in one table for both embeddings and the output. Ours: a width of 3840, which meets the table's 9.7 GB in "
    "float32; sentences of 64 tokens; norms before each half of a layer and after the last."
)
_VGG_NOTE = (
    "Layers of VGG (ICLR'15), configuration D, which the paper cites; images of 224 x 224, 1000 classes, no dropout. "
    "Weight gradients of convolutions are made with the input gradient."
)

MODELS: dict[str, PaperModel] = {
    **{name: PaperModel(partial(_gpt, table=table), _AUTOPIPE, _GPT2_NOTE) for name, table in GPT2.items()},
    "gpt2-124m": PaperModel(
        partial(_gpt, table=GPT2["gpt2-124m"]), "GPT-2 (Radford et al. 2019), Table 2", "Tied embedding."
    ),
    "bert-large": PaperModel(partial(_bert, table=BERT_LARGE), _AUTOPIPE, _BERT_NOTE),
    **{
        f"tessel-gpt-{size}": PaperModel(partial(_gpt, table=table, shared=True), _TESSEL, _TESSEL_GPT_NOTE)
        for size, table in TESSEL_GPT.items()
    },
    **{
        f"tessel-mt5-{size}": PaperModel(
            partial(_translation, table=table, biased=False, shared=True), _TESSEL, _MT5_NOTE
        )
        for size, table in MT5.items()
    },
    "tessel-flava": PaperModel(partial(_flava, towers=FLAVA), "Tessel (HPCA'24), Fig. 15", _FLAVA_NOTE),
    **{
        f"flexpipe-gpt-{size}": PaperModel(
            partial(_gpt, table=table, tied=False, shared=True), _FLEXPIPE, _FLEXPIPE_NOTE
        )
        for size, table in flexpipe_gpt().items()
    },
    **{
        f"flexpipe-clip-{size}": PaperModel(partial(_clip, towers=towers), "FlexPipe, Table 4", _CLIP_NOTE)
        for size, towers in CLIP.items()
    },
    "mmt": PaperModel(partial(_mmt, branches=4), _GRAPHPIPE, _MMT_NOTE),
    "dlrm": PaperModel(partial(_dlrm, branches=7), _GRAPHPIPE, _DLRM_NOTE, (16, 32, 64, 128)),
    "candle-uno": PaperModel(partial(_candle_uno, branches=7), _GRAPHPIPE, _UNO_NOTE, (256, 512, 1024, 2048)),
    "mmt-2": PaperModel(partial(_mmt, branches=2), _SEARCHED, _MMT_NOTE),
    "dlrm-8": PaperModel(partial(_dlrm, branches=4), _SEARCHED, f"{_DLRM_NOTE} {_EIGHT_NOTE}", (16, 32, 64, 128)),
    "candle-uno-8": PaperModel(partial(_candle_uno, branches=8), _SEARCHED, _UNO_NOTE, (256, 512, 1024, 2048)),
    "tensoropt-rnn": PaperModel(partial(_speech, table=Speech()), _TENSOROPT, _RNN_NOTE, _IMAGES),
    "tensoropt-wideresnet": PaperModel(partial(_wide_resnet, table=Residual()), _TENSOROPT, _WIDE_NOTE, _IMAGES),
    "tensoropt-transformer": PaperModel(
        partial(_translation, table=TRANSLATION, biased=True, shared=False), _TENSOROPT, _TRANSLATION_NOTE, _IMAGES
    ),
    "tensoropt-vgg16": PaperModel(_vgg16, _TENSOROPT, _VGG_NOTE, _IMAGES),
}
"""Every model by name."""
