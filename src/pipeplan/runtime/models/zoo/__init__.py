"""The zoo: models in plain PyTorch, cut into blocks, by their names in the catalog.

Here: families of models and their layers. Not here: their sizes (catalog), their estimated profiles (examples).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeplan.catalog import ModelSize, model_sizes, require_known
from pipeplan.errors import UsageError
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.models.zoo.encoder_decoder import TranslationSize
from pipeplan.runtime.models.zoo.gpt import GPTSize
from pipeplan.runtime.models.zoo.images import ConvolutionsSize, ResidualSize
from pipeplan.runtime.models.zoo.layers import ZooSize
from pipeplan.runtime.models.zoo.mixture import GPTExpertsSize
from pipeplan.runtime.models.zoo.multi_branch import CaptionsSize, MultiModalSize, RecommendationSize, ResponseSize
from pipeplan.runtime.models.zoo.recurrent import RecurrentSize

__all__ = ["ZOO", "zoo_model"]


_FAMILIES: dict[str, type[ZooSize]] = {
    "gpt": GPTSize,
    "gpt-experts": GPTExpertsSize,
    "encoder-decoder": TranslationSize,
    "flava": CaptionsSize,
    "mmt": MultiModalSize,
    "dlrm": RecommendationSize,
    "candle-uno": ResponseSize,
    "vgg-operators": ConvolutionsSize,
    "wide-resnet-operators": ResidualSize,
    "lstm-operators": RecurrentSize,
}
"""Families that run, as the catalog names them."""

_LEARNED = ("gpt", "gpt-experts", "flava")
"""Those that learn a place in the sequence each."""


def _size(known: ModelSize) -> ZooSize:
    kind, keys = _FAMILIES[known.family], dict(known.dimensions)
    if known.family in _LEARNED:
        keys |= {"positions": keys["sequence"]}
    require_known(keys, kind, f"model {known.name!r} of family {known.family}")
    return kind(**keys)


ZOO: Mapping[str, ZooSize] = {name: _size(size) for name, size in model_sizes().items() if size.family in _FAMILIES}
"""Sizes of models by name."""


def zoo_model(name: str, *, sequence: int | None = None, planned: int | None = None) -> Model:
    """A model of the zoo, with shorter sequences if asked, or else ``planned`` where it takes those.

    Raises UsageError for a ``sequence`` that it does not take.
    """
    if sequence is None and planned is not None and planned <= ZOO[name].longest:
        sequence = planned
    model = _model(name, sequence)
    return replace(model, loss_of=model.loss_of or "samples", made_up=True)


def _model(name: str, sequence: int | None) -> Model:
    size: Any = ZOO[name]
    if sequence is None:
        return ZOO[name].model(name)
    if size.longest == 0:
        raise UsageError(f"--sequence {sequence}: samples of {name} are not sequences; leave it out")
    if not 1 <= sequence <= size.longest:
        raise UsageError(f"--sequence {sequence}: {name} takes sequences of 1 to {size.longest}")
    shorter: ZooSize = replace(size, sequence=sequence)
    return shorter.model(name)
