"""The zoo: models in plain PyTorch, cut into blocks, by name: those of the catalog whose family runs.

Here: families of models and their layers. Not here: their sizes (catalog), their estimated profiles (examples).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pipeplan.catalog import model_sizes
from pipeplan.errors import UsageError
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.models.zoo.encoder_decoder import TranslationSize
from pipeplan.runtime.models.zoo.gpt import GPTSize
from pipeplan.runtime.models.zoo.layers import ZooSize
from pipeplan.runtime.models.zoo.multi_branch import CaptionsSize, MultiModalSize, RecommendationSize, ResponseSize

__all__ = ["ZOO", "zoo_model"]


def _learned(size: Callable[..., ZooSize]) -> Callable[..., ZooSize]:
    """A family that learns a position for each place of its longest sequence, which is the one of its batches."""
    return lambda *, sequence, **others: size(sequence=sequence, positions=sequence, **others)


_FAMILIES: dict[str, Callable[..., ZooSize]] = {
    "gpt": _learned(GPTSize),
    "encoder-decoder": TranslationSize,
    "flava": _learned(CaptionsSize),
    "mmt": MultiModalSize,
    "dlrm": RecommendationSize,
    "candle-uno": ResponseSize,
}
"""Families that run, as the catalog names them."""

ZOO: Mapping[str, ZooSize] = {
    name: _FAMILIES[size.family](**size.dimensions) for name, size in model_sizes().items() if size.family in _FAMILIES
}
"""Sizes of models by name."""


def zoo_model(name: str, *, sequence: int | None = None) -> Model:
    """A model of the zoo, with shorter sequences if asked. Raises UsageError for a length it does not take."""
    return replace(_model(name, sequence), loss_of="samples")


def _model(name: str, sequence: int | None) -> Model:
    size: Any = ZOO[name]
    if sequence is None:
        return ZOO[name].model(name)
    if size.longest == 0:
        raise UsageError(f"--sequence {sequence}: samples of {name} are no sequences; leave it out")
    if not 1 <= sequence <= size.longest:
        raise UsageError(f"--sequence {sequence}: {name} takes sequences of 1 to {size.longest}")
    shorter: ZooSize = replace(size, sequence=sequence)
    return shorter.model(name)
