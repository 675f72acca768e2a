"""From a configuration to a module with a loss, its example inputs and its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.models.huggingface import attention_patches as functions
from pipeplan.runtime.models.huggingface.adapters import batch_of, texts_of
from pipeplan.runtime.models.huggingface.configuration import configuration, describe
from pipeplan.runtime.models.huggingface.families import ModelFamily, family_of
from pipeplan.runtime.models.huggingface.sharding import WORDS, require_divisible, share_of, split_weights
from pipeplan.runtime.models.spec import Batch, Texts

__all__ = ["LoadedModel", "load"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A module and all that capturing it needs.

    Attributes:
        name: the family's, and what sets this model apart.
        module: its forward takes the tensors of a batch by name and returns the summed loss; no dropout, no cache.
        inputs: a batch of two samples, on the module's device.
        batch: makes the named tensors of a mini-batch from samples, step and seed.
        predictions: what the summed loss of a batch is divided by.
        sharded: the same for the share that one of so many devices has; raises UsageError if it cannot be split so.
        ways: how each parameter is split, by its name: "colwise", "packed_colwise", "rowwise" or "words".
        tokens: positions per sample by the beginning of parameters' names, the longest that fits.
        loss: whether the module returns a loss.
        texts: how it takes texts, if it does.
        settings: all of the configuration, but the version of transformers that reads it.
    """

    name: str
    module: nn.Module
    inputs: Mapping[str, Tensor]
    batch: Callable[[int, int, int], dict[str, Tensor]]
    predictions: Callable[[Batch], int]
    sharded: Callable[[int], LoadedModel]
    ways: Mapping[str, str]
    tokens: Mapping[str, int]
    loss: bool = True
    texts: Texts | None = None
    settings: Mapping[str, object] = field(default_factory=dict)


def load(text_or_path: str, *, sequence: int | None = None, meta: bool = False, seed: int = 0) -> LoadedModel:
    """The model of a Hugging Face configuration. Nothing is downloaded; parameters are random.

    Args:
        text_or_path: path of a ``config.json``, or text such as ``LlamaConfig(hidden_size=512)``: arguments that are
            left out have transformers' defaults.
        sequence: tokens per text; without it 1024 for causal models, 512 for BERT and T5, 77 for texts of images, or
            the configuration's maximum if that is shorter.
        meta: parameters have shapes but no data.
        seed: of the parameters.

    Raises:
        UsageError: no such file, an unknown family, a mistaken argument or a sequence too long.
    """
    name, keywords, strict = describe(text_or_path)
    family = family_of(name)
    with _quiet():
        config = _configuration(family, keywords, strict, text_or_path)
        length = _sequence(family, config, sequence, text_or_path)
        module = _module(family, config, text_or_path, meta, seed)
    name = f"{config.model_type}-{_signature(module)}"
    ways = split_weights(module, _plan(family, config))
    return _whole(name, family, config, module, length, ways)


def _whole(
    name: str,
    family: ModelFamily,
    config: Any,
    module: nn.Module,
    sequence: int,
    ways: Mapping[str, str],
    devices: int = 1,
) -> LoadedModel:
    words = -(-family.words(config) // devices)
    contents = family.contents(config, words, sequence)
    batch = batch_of(contents)
    device = next(module.parameters()).device

    def sharded(num_devices: int) -> LoadedModel:
        require_divisible(_counts(config), num_devices, name)
        return _whole(name, family, config, share_of(module, ways, num_devices), sequence, ways, num_devices)

    return LoadedModel(
        name=name,
        module=module,
        inputs={key: tensor.to(device) for key, tensor in batch(2, 0, 0).items()},
        batch=batch,
        predictions=_predictions,
        sharded=sharded,
        ways=ways,
        tokens=family.tokens(config, sequence),
        texts=texts_of(contents),
        settings=_settings(config),
    )


def _configuration(family: ModelFamily, keywords: Mapping[str, Any], strict: bool, where: str) -> Any:
    cls = getattr(_transformers(), family.config)
    config = configuration(cls, keywords, strict, where)
    config._attn_implementation = functions.NAME
    config._experts_implementation = functions.NAME
    return config


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"Hugging Face configurations need transformers: pip install '.[huggingface]' ({error})"
        ) from error
    return transformers


def _sequence(family: ModelFamily, config: Any, asked: int | None, where: str) -> int:
    maximum = family.maximum(config)
    if asked is None:
        return family.longest if maximum is None else min(family.longest, maximum)
    if asked < 1 or (maximum is not None and asked > maximum):
        raise UsageError(f"--sequence {asked}: {where} takes sequences of 1 to {maximum or 'any length'}")
    return asked


def _module(family: ModelFamily, config: Any, where: str, meta: bool, seed: int) -> nn.Module:
    """The wrapped model with the same random numbers for a seed, in evaluation mode, where dropout does nothing."""
    functions.register()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta" if meta else "cpu"):
            torch.manual_seed(seed)
            made = getattr(_transformers(), family.model)(config)
            return family.module(made, config).eval()
    except Exception as error:  # whatever transformers makes of a configuration that does not fit together
        raise UsageError(
            f"configuration {where}: {family.model} cannot be built from it: {type(error).__name__}: {error}"
        ) from error


def _plan(family: ModelFamily, config: Any) -> dict[str, str]:
    """Patterns of names inside the wrapper and the way each is split."""
    plan = family.plan
    if plan is None:  # of the model without its output layer
        plan = {f"model.model.{pattern}": way for pattern, way in config.base_model_tp_plan.items()}
    return {**plan, **dict.fromkeys(family.vocabulary, WORDS)}


def _counts(config: Any) -> dict[str, int]:
    """What must divide by the number of devices, of a configuration and those nested in it: heads."""
    names = {"num_attention_heads": "heads", "num_key_value_heads": "key-value heads"}
    found = {}
    for each in (config, *(getattr(config, key, None) for key in config.sub_configs)):
        for key, what in names.items():
            if isinstance(count := getattr(each, key, None), int):
                found[f"{what} in {type(each).__name__}"] = count
    return found


def _settings(config: Any) -> dict[str, object]:
    found: dict[str, object] = config.to_dict()
    return {key: value for key, value in found.items() if key != "transformers_version"}


def _predictions(batch: Batch) -> int:
    """Words that are predicted; samples, where the loss is one of whole samples."""
    targets = batch.get("targets")
    return int((targets >= 0).sum()) if targets is not None else next(iter(batch.values())).shape[0]


def _signature(module: nn.Module) -> str:
    """Parameters in millions or billions."""
    count = sum(parameter.numel() for parameter in module.parameters())
    for unit, size in (("b", 10**9), ("m", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' remarks about token ids and the like."""
    logging = _transformers().utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
