"""Made-up batches: texts that count up, noise for images. Sample i is the same however many samples there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeplan.runtime.batches import next_tokens, stacked, token_batch
from pipeplan.runtime.model import Texts

__all__ = ["Contents", "batch_of", "texts_of"]

_IGNORED = -100
_MASKED_EVERY = 7  # BERT masks 15 % of the words


@dataclass(frozen=True, slots=True)
class Contents:
    """What a family's samples are made of.

    ``kind`` is causal, masked, translated, paired or captioned; ``image`` (channels, height, width); ``special`` the
    token that a masked word, the decoder's first or a text's last has.
    """

    kind: str
    vocabulary: int
    sequence: int
    special: int = 0
    image: tuple[int, int, int] | None = None


def batch_of(contents: Contents) -> Callable[[int, int, int], dict[str, Tensor]]:
    """The function of samples, step and seed that makes a batch of named tensors."""
    make = _MAKERS[contents.kind]

    def batch(num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
        made = make(contents, token_batch(contents.vocabulary, contents.sequence, num_samples, step, seed))
        if contents.image is not None:
            made["pixels"] = _images(contents.image, num_samples, step, seed)
        return made

    return batch


def texts_of(contents: Contents) -> Texts | None:
    """How samples are made of texts; None for those that have images, too."""
    make = _MAKERS[contents.kind]

    def batch(windows: Tensor) -> dict[str, Tensor]:
        return make(contents, next_tokens(windows))

    return None if contents.image is not None else Texts(contents.vocabulary, contents.sequence + 1, batch)


def _causal(contents: Contents, text: dict[str, Tensor]) -> dict[str, Tensor]:
    return text


def _masked(contents: Contents, text: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every seventh word hidden, from one that the text decides on; the hidden words are the targets."""
    words = text["tokens"]
    first = words[:, :1] % min(_MASKED_EVERY, contents.sequence)
    hidden = (torch.arange(contents.sequence) - first) % _MASKED_EVERY == 0
    return {"tokens": words.masked_fill(hidden, _special(contents)), "targets": words.masked_fill(~hidden, _IGNORED)}


def _translated(contents: Contents, text: dict[str, Tensor]) -> dict[str, Tensor]:
    """The decoder continues the encoder's text."""
    start = torch.full_like(text["targets"][:, :1], _special(contents))
    shifted = torch.cat([start, text["targets"][:, :-1]], dim=1)
    return {"tokens": text["tokens"], "decoder_tokens": shifted, "targets": text["targets"]}


def _paired(contents: Contents, text: dict[str, Tensor]) -> dict[str, Tensor]:
    end = torch.full_like(text["tokens"][:, :1], _special(contents))
    return {"tokens": torch.cat([text["tokens"][:, 1:], end], dim=1)}


_MAKERS: dict[str, Callable[[Contents, dict[str, Tensor]], dict[str, Tensor]]] = {
    "causal": _causal,
    "masked": _masked,
    "translated": _translated,
    "paired": _paired,
    "captioned": _masked,
}


def _special(contents: Contents) -> int:
    """The special token, or the last one of a vocabulary that is too small for it."""
    return min(contents.special, contents.vocabulary - 1)


def _images(shape: tuple[int, int, int], num_samples: int, step: int, seed: int) -> Tensor:
    """[num_samples, channels, height, width], standard normal."""
    return stacked(lambda generator: {"": torch.randn(shape, generator=generator)}, num_samples, step, seed)[""]
