"""Which models there are, by name. Sizes of papers are those of ``pipeplan example`` (docs/models.md)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Protocol

from pipeplan.errors import UsageError
from pipeplan.runtime.model import Model
from pipeplan.runtime.zoo.branches import MultiModalSize, RecommendationSize, ResponseSize
from pipeplan.runtime.zoo.captions import CaptionsSize
from pipeplan.runtime.zoo.gpt import GPTSize
from pipeplan.runtime.zoo.translation import TranslationSize

__all__ = ["ZOO", "Size", "zoo_model"]

_MILLION = 1_000_000


class Size(Protocol):
    """Dimensions of a model. ``longest`` is the longest sequence it takes, 0 where samples are no sequences."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def longest(self) -> int:
        """The longest sequence."""

    def model(self, name: str) -> Model:
        """The model of this size."""


_GPT2: dict[str, Size] = {
    "gpt2-tiny": GPTSize(layers=4, hidden=32, heads=2, vocabulary=64, positions=16, sequence=16),
    "gpt2-124m": GPTSize(layers=12, hidden=768, heads=12),
    "gpt2-tiny-operators": GPTSize(2, 32, 4, 64, positions=16, sequence=16, by_operator=True),
    "gpt2-124m-operators": GPTSize(layers=12, hidden=768, heads=12, by_operator=True),
    "gpt2-345m": GPTSize(layers=24, hidden=1024, heads=16),
    "gpt2-762m": GPTSize(layers=36, hidden=1280, heads=20),
    "gpt2-1.3b": GPTSize(layers=24, hidden=2048, heads=16),
}

_TESSEL: dict[str, Size] = {
    "tessel-gpt-tiny": GPTSize(2, 32, 4, 64, positions=16, sequence=16, shared=True),
    "tessel-gpt-11b": GPTSize(32, 4096, 32, _MILLION, shared=True),
    "tessel-gpt-24b": GPTSize(40, 6144, 48, _MILLION, shared=True),
    "tessel-gpt-47b": GPTSize(48, 8192, 64, _MILLION, shared=True),
    "tessel-gpt-77b": GPTSize(80, 8192, 64, 1_500_000, shared=True),
    "tessel-mt5-tiny": TranslationSize(2, 32, 4, 64, sequence=8),
    "tessel-mt5-1.8b": TranslationSize(24, 1024, 16, 512_000),
    "tessel-mt5-9.5b": TranslationSize(24, 3072, 24, _MILLION),
    "tessel-mt5-43b": TranslationSize(32, 6144, 48, 1_500_000),
    "tessel-mt5-88b": TranslationSize(40, 8192, 64, 1_500_000),
    "tessel-flava-tiny": CaptionsSize(2, 16, 2, 64, positions=6, sequence=6, tokens=9, patch=12),
    "tessel-flava": CaptionsSize(),
}

_FLEXPIPE: dict[str, Size] = {
    f"flexpipe-gpt-{size}-{name}": GPTSize(
        layers, hidden, heads, vocabulary, sequence, sequence, tied=False, shared=True
    )
    for size, layers, hidden, heads, sequence, vocabularies in (
        ("5b", 64, 2560, 64, 512, {"64k": 64_000, "128k": 128_000, "256k": 256_000, "512k": 512_000, "1m": _MILLION}),
        ("16b", 80, 4096, 32, 1024, {"256k": 256_000, "512k": 512_000, "1m": _MILLION}),
        ("16b", 80, 4096, 32, 1024, {"1.1m": 1_100_000, "1.2m": 1_200_000}),
    )
    for name, vocabulary in vocabularies.items()
}

_GRAPHPIPE: dict[str, Size] = {
    "mmt-tiny": MultiModalSize(branches=2, layers=2, hidden=32, heads=2, patch=12, sequence=16),
    "mmt-2": MultiModalSize(branches=2),
    "mmt": MultiModalSize(),
    "dlrm-tiny": RecommendationSize(branches=2, layers=2, hidden=16, lookups=3, vocabulary=20, width=4),
    "dlrm-8": RecommendationSize(branches=4),
    "dlrm": RecommendationSize(),
    "candle-uno-tiny": ResponseSize(branches=3, layers=2, hidden=16),
    "candle-uno-8": ResponseSize(branches=8),
    "candle-uno": ResponseSize(),
}

_TENSOROPT: dict[str, Size] = {
    "tensoropt-transformer": TranslationSize(6, 3840, 60, 32_000, sequence=64, biased=True, shared=False)
}

ZOO: dict[str, Size] = {**_GPT2, **_TESSEL, **_FLEXPIPE, **_GRAPHPIPE, **_TENSOROPT}
"""Sizes of models by name."""


def zoo_model(name: str, *, sequence: int | None = None) -> Model:
    """A model of the zoo, with shorter sequences if asked; its parameters are the same for all lengths.

    Raises:
        UsageError: the sequence is empty, longer than the model takes, or it takes none.
    """
    size = ZOO[name]
    if sequence is None:
        return size.model(name)
    if size.longest == 0:
        raise UsageError(f"--sequence {sequence}: samples of {name} are no sequences; leave it out")
    if not 1 <= sequence <= size.longest:
        raise UsageError(f"--sequence {sequence}: {name} takes sequences of 1 to {size.longest}")
    return replace(size, sequence=sequence).model(name)
