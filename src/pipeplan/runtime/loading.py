"""Finding the model that a name on the command line means."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.importing import made_by
from pipeplan.runtime.model import Model
from pipeplan.runtime.zoo import ZOO, zoo_model

__all__ = ["Grain", "load_model"]

Grain = Literal["layer", "half", "operator"]
"""What a block is of a model that is captured: a layer, half of one, or an operator."""

_CONFIGURATION = re.compile(r"\w+Config\s*(\(.*\))?\s*", re.DOTALL)


def load_model(
    name: str,
    *,
    sequence: int | None = None,
    grain: Grain | None = None,
    shared: Sequence[str] = (),
    meta: bool = False,
) -> Model:
    """The model that a name means.

    Args:
        name: one of the zoo; a Hugging Face configuration, as the path of a ``config.json`` or as text such as
            ``LlamaConfig(num_hidden_layers=4)``; or ``pkg.mod:factory``, a function without arguments that returns a
            Model, or a module and its example inputs, which are then captured.
        sequence: length of the sequences, for the zoo and for configurations.
        grain: what a block is of a captured model; half a layer without it.
        shared: blocks that placements may spread over all devices, by id or operator, with ``*``.
        meta: parameters without data where possible, for models that are only looked at.

    Raises:
        UsageError: an unknown name, an option that does not apply, or a model that cannot be made or captured.
    """
    if name in ZOO:
        _refuse_grain(name, grain)
        return _with_shared(zoo_model(name, sequence=sequence), shared)
    if name.endswith(".json") or _CONFIGURATION.fullmatch(name):
        from pipeplan.runtime.hugging_face import load_configuration

        return _with_shared(load_configuration(name, sequence=sequence, grain=grain or "half", meta=meta), shared)
    if ":" not in name:
        raise UsageError(
            f"model {name!r} is neither in the zoo ({', '.join(ZOO)}), nor a Hugging Face config.json or "
            "SomeConfig(...), nor of the form pkg.mod:factory"
        )
    if sequence is not None:
        raise UsageError(f"--sequence is for models of the zoo and configurations; {name} makes its own")
    return _with_shared(_made_by(name, grain), shared)


def _made_by(name: str, grain: Grain | None) -> Model:
    made = made_by(name, "model")
    if isinstance(made, Model):
        _refuse_grain(name, grain)
        return made
    match made:
        case (nn.Module() as module, Mapping() as inputs):
            return _captured(module, inputs, name.partition(":")[2], grain)
        case (nn.Module() as module, Tensor() as input):
            return _captured(module, {"input": input}, name.partition(":")[2], grain)
    raise UsageError(
        f"model {name!r} returned {type(made).__name__}; return a pipeplan.runtime.model.Model, or a module and its "
        "example inputs: a tensor, or tensors by the names of the arguments, with samples in the first dimension"
    )


def _captured(module: nn.Module, inputs: Mapping[str, Tensor], name: str, grain: Grain | None) -> Model:
    from pipeplan.runtime.capture import capture

    return capture(module, inputs, name=name, grain=grain or "half")


def _refuse_grain(name: str, grain: Grain | None) -> None:
    if grain is not None:
        raise UsageError(f"--grain {grain}: {name} has blocks of its own; leave it out")


def _with_shared(model: Model, patterns: Sequence[str]) -> Model:
    """The model with those blocks marked whose id or operator matches a pattern."""
    from fnmatch import fnmatchcase

    marked = set[str]()
    for pattern in patterns:
        found = {
            block.id for block in model.blocks if fnmatchcase(block.id, pattern) or fnmatchcase(block.operator, pattern)
        }
        if not found:
            operators = sorted({block.operator for block in model.blocks})
            raise UsageError(f"--shared {pattern!r} matches no block of {model.name}; its operators are {operators}")
        marked |= found
    blocks = tuple(replace(block, shared=True) if block.id in marked else block for block in model.blocks)
    return replace(model, blocks=blocks) if marked else model
