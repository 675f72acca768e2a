"""From a configuration to a model of blocks, whole and as one device's share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from torch import nn

from pipeplan.runtime.models.capture import capture, parameters_of
from pipeplan.runtime.models.huggingface.build import LoadedModel, load
from pipeplan.runtime.models.huggingface.sharding import COLUMNS, ROWS, WORDS, widths_of
from pipeplan.runtime.models.spec import BlockSpec, Collective, Grain, Model

__all__ = ["collectives_of", "load_configuration"]

_ELEMENT_BYTES = 4  # float32
_LOSS_NUMBERS = 3  # per word: the largest logit, the sum of exponentials, the target's logit


def load_configuration(
    text_or_path: str, *, sequence: int | None = None, grain: Grain = "half", meta: bool = False, seed: int = 0
) -> Model:
    """The blocks of a Hugging Face configuration; arguments and errors are those of ``load`` and ``capture``.

    ``Model.sharded`` gives one device's share with its collectives, in bytes of float32.
    """
    whole = load(text_or_path, sequence=sequence, meta=meta, seed=seed)
    model, sharded = _captured(whole, grain), partial(_share, whole, grain)
    return replace(model, sharded=sharded, texts=whole.texts, settings=whole.settings)


def _captured(whole: LoadedModel, grain: Grain) -> Model:
    return capture(
        whole.module, whole.inputs, name=whole.name, grain=grain, batch=whole.batch, predictions=whole.predictions
    )


def _share(whole: LoadedModel, grain: Grain, num_devices: int) -> Model:
    share = whole.sharded(num_devices)
    model = _captured(share, grain)
    return model if num_devices == 1 else collectives_of(model, share)


def collectives_of(model: Model, share: LoadedModel) -> Model:
    """The model with what each of its blocks needs of the other devices, as Megatron-LM does it.

    Sums over devices follow every layer that is split by its inputs, and the lookup in a table of words, in F; and the
    input gradient of all layers that are split by outputs and take the same input, in I, in the first block that has
    one of them. The head sums three float32 numbers per word in F. Bytes are those of float32 elements.

    Args:
        model: captured from the share's module.
        share: one of several devices'.
    """
    seen = set[str]()
    return replace(model, blocks=tuple(_with_collectives(block, share, seen) for block in model.blocks))


def _with_collectives(block: BlockSpec, share: LoadedModel, seen: set[str]) -> BlockSpec:
    found: list[Collective] = []
    for name in parameters_of(block).values():
        way = share.ways.get(name)
        if way is not None and not name.endswith("bias"):
            found += _of_weight(name, way, block, share, seen)
    return replace(block, collectives=tuple(found))


def _of_weight(name: str, way: str, block: BlockSpec, share: LoadedModel, seen: set[str]) -> Iterator[Collective]:
    tokens = _tokens(name, share.tokens)
    inputs, outputs = widths_of(share.module, name)
    hidden = share.module.get_parameter(name).shape[-1]  # of a table, whichever of two tied ones it is named after
    if way in ROWS:
        yield Collective("all_reduce", "F", tokens * outputs * _ELEMENT_BYTES)
    elif way == WORDS and block.operator == "embedding":
        yield Collective("all_reduce", "F", tokens * hidden * _ELEMENT_BYTES)
    elif way == WORDS:
        yield Collective("all_reduce", "F", tokens * _LOSS_NUMBERS * _ELEMENT_BYTES)
        yield Collective("all_reduce", "I", tokens * hidden * _ELEMENT_BYTES)
    elif way in COLUMNS and not _is_table(share.module, name) and (taker := _taker(name)) not in seen:
        seen.add(taker)
        yield Collective("all_reduce", "I", tokens * inputs * _ELEMENT_BYTES)


def _taker(name: str) -> str:
    """The same for all layers that take the same input: those of a module, but a query across attends to another's."""
    owner, _, layer = name.removesuffix(".weight").rpartition(".")
    return f"{owner}.q" if owner.endswith("EncDecAttention") and layer == "q" else owner


def _is_table(module: nn.Module, name: str) -> bool:
    return isinstance(module.get_submodule(name.rpartition(".")[0]), nn.Embedding)


def _tokens(name: str, tokens: Mapping[str, int]) -> int:
    """Positions per sample where a parameter is used, by the longest beginning of its name."""
    return tokens[max((prefix for prefix in tokens if name.startswith(prefix)), key=len)]
