"""The papers' models as profiles: blocks and edges as the papers' tables have them, costs by closed forms.

The tables are in :mod:`pipeplan.examples.tables`; ``docs/models.md`` compares parameters with the papers' and says
what they leave open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pipeplan.costs.operators import Operator, activation, embedding, linear, norm, sequence_of
from pipeplan.costs.presets import device_preset
from pipeplan.errors import UsageError
from pipeplan.examples.layout import WIDTH, Layout, Stack
from pipeplan.examples.tables import (
    BERT_LARGE,
    CLIP,
    FLAVA,
    GPT2,
    MT5,
    TESSEL_GPT,
    VGG16,
    Language,
    Tower,
    flexpipe_gpt,
)
from pipeplan.model import Profile, Source

__all__ = ["MODELS", "PaperModel", "model"]

_MOST_SAMPLES = 65_536
_CLIP_OUTPUTS = 1024

_ESTIMATE = (
    "Estimated by closed forms, not measured. Parameters, gradients and activations in 16 bits, statistics and loss in "
    "float32; optimizer state of mixed-precision Adam, 12 bytes per parameter. Times by a roofline whose efficiency "
    "grows with a kernel's size up to 70 % of the peak FLOP/s and 85 % of the bandwidth, both assumed; causal masks "
    "halve attention, no dropout, fused attention."
)


@dataclass(frozen=True, slots=True)
class PaperModel:
    """A model of a paper: how to lay it out, where its dimensions stand, what we had to choose, sizes to write."""

    build: Callable[[Layout], None]
    reference: str
    notes: str = ""
    microbatch_sizes: tuple[int, ...] = (1, 2, 4)


def model(name: str, *, device: str = "a100-80gb", microbatch_sizes: Sequence[int] | None = None) -> Profile:
    """The profile of a paper's model, for a device preset, with a cost row per micro-batch size.

    Raises:
        UsageError: an unknown model or device, or no or unusable micro-batch sizes.
    """
    if name not in MODELS:
        raise UsageError(f"there is no model {name!r}; choose from {', '.join(MODELS)}")
    paper, preset = MODELS[name], device_preset(device)
    sizes = sorted(set(paper.microbatch_sizes if microbatch_sizes is None else microbatch_sizes))
    if not sizes or sizes[0] < 1 or sizes[-1] > _MOST_SAMPLES:
        raise UsageError(f"--microbatch must be sizes from 1 to {_MOST_SAMPLES}, not {sizes}")
    layout = Layout(preset, sizes)
    paper.build(layout)
    return Profile(
        name=name,
        source=Source(
            method="estimated",
            device=preset.title,
            dtype=preset.dtype,
            reference=paper.reference,
            notes=" ".join(filter(None, [_ESTIMATE, f"Device: {preset.source}.", paper.notes])),
        ),
        blocks=tuple(layout.blocks),
        edges=tuple(layout.edges),
    )


def _gpt(layout: Layout, table: Language, *, tied: bool = True, shared: bool = False) -> None:
    """Decoder with learned positions; the head shares the token embedding's weight if ``tied``."""
    stack, group = table.stack(causal=True), "token-embedding" if tied else None
    tokens = layout.tokens("embedding", stack, table.vocabulary, positions=table.sequence, shared=shared, tied=group)
    last = layout.layers("layer", stack, [(tokens, stack.sample_bytes)])
    layout.vocabulary_head(stack, table.vocabulary, last, shared=shared, tied=group)


def _bert(layout: Layout, table: Language) -> None:
    """Encoder with learned positions and two token types; the head has BERT's transform and an output bias."""
    stack, group = table.stack(), "token-embedding"

    def transform(samples: int) -> Operator:
        tokens, hidden = samples * table.sequence, table.hidden
        dense = linear(tokens, hidden, hidden, WIDTH)
        return sequence_of(dense, activation(tokens * hidden, WIDTH), norm(tokens, hidden, WIDTH))

    tokens = layout.tokens(
        "embedding", stack, table.vocabulary, positions=table.sequence, types=2, normed=True, tied=group
    )
    last = layout.layers("layer", stack, [(tokens, stack.sample_bytes)])
    layout.vocabulary_head(stack, table.vocabulary, last, before=transform, bias=True, tied=group)


def _mt5(layout: Layout, table: Language) -> None:
    """Encoder and decoder of as many layers; both embeddings and the head share one weight."""
    group = "token-embedding"
    encoder, decoder = table.stack(biased=False), table.stack(causal=True, biased=False)
    tokens = layout.tokens("encoder.embedding", encoder, table.vocabulary, shared=True, tied=group)
    last = layout.layers("encoder.layer", encoder, [(tokens, encoder.sample_bytes)])
    encoded = layout.add(
        "encoder.norm",
        "norm",
        lambda samples: encoder.norm(samples * table.sequence),
        after=[(last, encoder.sample_bytes)],
        dimensions=encoder.sizes,
    )
    tokens = layout.tokens("decoder.embedding", decoder, table.vocabulary, shared=True, tied=group)
    feeds = [(tokens, decoder.sample_bytes), (encoded, encoder.sample_bytes)]
    last = layout.layers("decoder.layer", decoder, feeds, memory=table.sequence)
    layout.vocabulary_head(decoder, table.vocabulary, last, shared=True, tied=group)


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

    layout.add("contrast", "contrastive-loss", loss, after=feeds, dimensions={"outputs": _CLIP_OUTPUTS})


def _flava(layout: Layout, towers: Sequence[Tower]) -> None:
    """A branch for text, one for images, and a cross-encoder over the tokens of both, shared by all devices."""
    feeds = [(_tower(layout, tower), tower.stack().sample_bytes) for tower in towers]
    first = towers[0]
    cross = Stack(first.layers, first.hidden, first.heads, sum(tower.sequence for tower in towers))
    last = layout.layers("cross.layer", cross, feeds, shared=True)
    layout.pool("cross.pool", cross, first.hidden, last, shared=True)


def _mmt(layout: Layout) -> None:
    """Four branches of eight layers, their outputs concatenated per token."""
    stack = Stack(8, 1024, 16, 256)
    ends = []
    for branch in range(4):
        first = layout.patches(f"branch{branch}.embedding", stack, 1024)
        ends.append(layout.layers(f"branch{branch}.layer", stack, [(first, stack.sample_bytes)]))
    joined = layout.joined("concatenation", [(end, stack.sample_bytes) for end in ends])
    layout.value_head(joined, 4 * stack.hidden, rows=stack.sequence)


def _dlrm(layout: Layout) -> None:
    """Seven branches of dense and seven of sparse features, concatenated, and four layers after that."""
    feeds = [(layout.perceptron(f"dense{branch}.layer", 4, 4096, 4096), 4096 * WIDTH) for branch in range(7)]
    feeds += [(_embedding_bag(layout, f"sparse{branch}.embedding"), 100 * 64 * WIDTH) for branch in range(7)]
    joined = layout.joined("interaction", feeds, kept=7 * 4096)
    numbers = sum(size for _, size in feeds)
    last = layout.perceptron("top.layer", 4, numbers // WIDTH, 4096, [(joined, numbers)])
    layout.value_head(last, 4096)


def _embedding_bag(layout: Layout, id_: str) -> str:
    """100 rows of 64 numbers from a million, concatenated."""
    return layout.add(
        id_,
        "embedding",
        lambda samples: embedding(samples, 100, 1_000_000, 64, WIDTH),
        dimensions={"lookups": 100, "hidden": 64, "vocabulary": 1_000_000},
    )


def _candle_uno(layout: Layout) -> None:
    """Seven branches of four layers, concatenated."""
    feeds = [(layout.perceptron(f"branch{branch}.layer", 4, 4096, 4096), 4096 * WIDTH) for branch in range(7)]
    layout.value_head(layout.joined("concatenation", feeds, kept=7 * 4096), 7 * 4096)


def _vgg16(layout: Layout) -> None:
    """Thirteen convolutions in five groups, each halving the image, and three linear layers."""
    after, side, inputs = None, 224, 3
    for group, outputs in enumerate(VGG16):
        after = layout.convolutions(f"group{group}.convolution", side, inputs, outputs, after)
        side, inputs = side // 2, outputs[-1]
    numbers = side * side * inputs
    assert after is not None
    last = layout.perceptron("linear", 2, numbers, 4096, [(after, numbers * WIDTH)])
    layout.class_head(last, 4096, 1000)


_AUTOPIPE = "AutoPipe, Table I"
_TESSEL = "Tessel (HPCA'24), Table III"
_FLEXPIPE = "FlexPipe, Table 3, whose headings of attention heads and hidden size are swapped"
_GRAPHPIPE = "GraphPipe (thesis, chapter 3), section 3.10.3"

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
_FLEXPIPE_NOTE = "Embedding and head apart, not tied: with that the table's totals come out."
_CLIP_NOTE = (
    "Ours: patches of 588 numbers for image, video and audio, vocabulary of 49408, and 1024 numbers per sample to the "
    "contrastive loss."
)
_MMT_NOTE = "Ours: inputs of 1024 numbers per token by a linear layer, and a head of one number per token."
_DLRM_NOTE = "Ours: dense features of 4096 numbers, four layers after the interaction, a head of one number."
_UNO_NOTE = "Ours: inputs of 4096 numbers per branch, and a head of one number after the concatenation."
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
    **{f"tessel-mt5-{size}": PaperModel(partial(_mt5, table=table), _TESSEL, _MT5_NOTE) for size, table in MT5.items()},
    "tessel-flava": PaperModel(partial(_flava, towers=FLAVA), "Tessel (HPCA'24), Fig. 15", _FLAVA_NOTE),
    **{
        f"flexpipe-gpt-{size}": PaperModel(partial(_gpt, table=table, tied=False), _FLEXPIPE, _FLEXPIPE_NOTE)
        for size, table in flexpipe_gpt().items()
    },
    **{
        f"flexpipe-clip-{size}": PaperModel(partial(_clip, towers=towers), "FlexPipe, Table 4", _CLIP_NOTE)
        for size, towers in CLIP.items()
    },
    "mmt": PaperModel(_mmt, _GRAPHPIPE, _MMT_NOTE),
    "dlrm": PaperModel(_dlrm, _GRAPHPIPE, _DLRM_NOTE, (16, 32, 64, 128)),
    "candle-uno": PaperModel(_candle_uno, _GRAPHPIPE, _UNO_NOTE, (256, 512, 1024, 2048)),
    "tensoropt-vgg16": PaperModel(_vgg16, "TensorOpt, Table 1", _VGG_NOTE, (8, 16, 32)),
}
"""Every model by name."""
