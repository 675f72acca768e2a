"""Which models there are, by name: those of the catalog whose family runs, as ``pipeplan example`` has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from pipeplan.catalog import model_sizes
from pipeplan.errors import UsageError
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.models.zoo.encoder_decoder import TranslationSize
from pipeplan.runtime.models.zoo.gpt import GPTSize
from pipeplan.runtime.models.zoo.multi_branch import CaptionsSize, MultiModalSize, RecommendationSize, ResponseSize

__all__ = ["ZOO", "Size", "zoo_model"]


class Size(Protocol):
    """Dimensions of a model. ``longest`` is the longest sequence it takes, 0 where samples are no sequences."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def longest(self) -> int:
        """The longest sequence."""

    def model(self, name: str) -> Model:
        """The model of this size."""


def _learned(size: Callable[..., Size]) -> Callable[..., Size]:
    """A family that learns a position for each place of its longest sequence, which is the one of its batches."""
    return lambda *, sequence, **others: size(sequence=sequence, positions=sequence, **others)


_FAMILIES: dict[str, Callable[..., Size]] = {
    "gpt": _learned(GPTSize),
    "encoder-decoder": TranslationSize,
    "flava": _learned(CaptionsSize),
    "mmt": MultiModalSize,
    "dlrm": RecommendationSize,
    "candle-uno": ResponseSize,
}
"""Families that run, as the catalog names them."""

ZOO: Mapping[str, Size] = {
    name: _FAMILIES[size.family](**size.dimensions) for name, size in model_sizes().items() if size.family in _FAMILIES
}
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
