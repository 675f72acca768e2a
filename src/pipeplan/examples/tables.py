"""Dimensions of the papers' models, as their tables have them. K and M are decimal: with them the sums come out.

Where a table does not say something, the value is ours, and the model's notes say so (``docs/models.md``).
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.examples.parts import Stack

__all__ = [
    "CLIP",
    "FLAVA",
    "GPT2",
    "MT5",
    "TESSEL_GPT",
    "TRANSLATION",
    "VGG16",
    "Language",
    "Residual",
    "Speech",
    "Tower",
    "flexpipe_gpt",
]

GPT2_VOCABULARY = 50_257
WORDPIECE_VOCABULARY = 30_522
CLIP_VOCABULARY = 49_408


@dataclass(frozen=True, slots=True)
class Language:
    """A language model: layers (of the encoder and of the decoder each, where there are both), tokens, vocabulary."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int = 1024

    def stack(self, *, causal: bool = False, biased: bool = True) -> Stack:
        """Its layers."""
        return Stack(self.layers, self.hidden, self.heads, self.sequence, causal=causal, biased=biased)


@dataclass(frozen=True, slots=True)
class Tower:
    """One branch of a CLIP-like model: tokens of a ``vocabulary``, or without one patches of so many numbers."""

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int = 0
    patch: int = 14 * 14 * 3

    def stack(self) -> Stack:
        """Its layers; text is read with a causal mask, as CLIP does."""
        return Stack(self.layers, self.hidden, self.heads, self.sequence, causal=bool(self.vocabulary))


GPT2 = {
    "gpt2-124m": Language(12, 768, 12, GPT2_VOCABULARY),
    "gpt2-345m": Language(24, 1024, 16, GPT2_VOCABULARY),
    "gpt2-762m": Language(36, 1280, 20, GPT2_VOCABULARY),
    "gpt2-1.3b": Language(24, 2048, 16, GPT2_VOCABULARY),
}

BERT_LARGE = Language(24, 1024, 16, WORDPIECE_VOCABULARY, sequence=512)

TESSEL_GPT = {
    "11b": Language(32, 4096, 32, 1_000_000),
    "24b": Language(40, 6144, 48, 1_000_000),
    "47b": Language(48, 8192, 64, 1_000_000),
    "77b": Language(80, 8192, 64, 1_500_000),
}

MT5 = {
    "1.8b": Language(24, 1024, 16, 512_000, sequence=512),
    "9.5b": Language(24, 3072, 24, 1_000_000, sequence=512),
    "43b": Language(32, 6144, 48, 1_500_000, sequence=512),
    "88b": Language(40, 8192, 64, 1_500_000, sequence=512),
}
"""Half of the table's layers: so many are in the encoder, and as many in the decoder."""

_FLEXPIPE = {"5b": Language(64, 2560, 64, 1, sequence=512), "16b": Language(80, 4096, 32, 1, sequence=1024)}

_VOCABULARIES = {
    "5b": {"64k": 64_000, "128k": 128_000, "256k": 256_000, "512k": 512_000, "1m": 1_000_000},
    "16b": {"256k": 256_000, "512k": 512_000, "1m": 1_000_000, "1.1m": 1_100_000, "1.2m": 1_200_000},
}


def flexpipe_gpt() -> dict[str, Language]:
    """FlexPipe, Table 3, by size and vocabulary; its headings of attention heads and hidden size are swapped."""
    return {
        f"{size}-{name}": Language(model.layers, model.hidden, model.heads, vocabulary, model.sequence)
        for size, model in _FLEXPIPE.items()
        for name, vocabulary in _VOCABULARIES[size].items()
    }


CLIP = {
    "4.7b": (Tower("audio", 240, 1024, 16, 264), Tower("text", 240, 768, 16, 77, CLIP_VOCABULARY)),
    "8.2b": (Tower("video", 440, 1024, 16, 264), Tower("text", 216, 1024, 16, 77, CLIP_VOCABULARY)),
    "9.7b": (Tower("image", 32, 4096, 64, 264), Tower("text", 40, 2560, 40, 77, CLIP_VOCABULARY)),
}

FLAVA = (Tower("text", 24, 4096, 32, 77, WORDPIECE_VOCABULARY), Tower("image", 24, 4096, 32, 197, patch=16 * 16 * 3))

VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Channels of the convolutions, by group (VGG, ICLR'15, Table 1, column D)."""

TRANSLATION = Language(6, 3840, 60, 32_000, sequence=64)
"""Vaswani et al. (2017): 6 + 6 layers, heads of 64, 32,000 word pieces (English-French). Enlarged: the width."""


@dataclass(frozen=True, slots=True)
class Residual:
    """A residual network of bottlenecks: blocks per stage, channels of the first stage inside and at its ends."""

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    inner: int = 816
    ends: int = 256
    side: int = 224
    classes: int = 1000


@dataclass(frozen=True, slots=True)
class Speech:
    """LSTM layers over frames of an utterance, and a class per frame."""

    layers: int = 4
    cells: int = 31_936
    frame: int = 40
    steps: int = 20
    states: int = 14_247
