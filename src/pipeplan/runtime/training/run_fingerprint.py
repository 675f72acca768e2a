"""What a training is: all that its losses depend on, so that only the same training goes on from a checkpoint.

Facts are by the flag that says them, or by ``WHAT in FLAG`` where they are part of what a flag means. Values are
texts, numbers or None, for flags that were not given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeplan.errors import UsageError
from pipeplan.runtime.models.shapes import output_shapes
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.training.data import fingerprint
from pipeplan.runtime.training.options import TrainOptions

__all__ = ["identity_of", "require_identity"]

_SAMPLES = 2  # some losses compare samples with each other


def identity_of(model: Model, options: TrainOptions, mini_batch: int) -> dict[str, object]:
    """All facts of a training; the same under every plan of this mini-batch.

    Raises:
        UsageError: a block cannot be built or called on the meta device.
    """
    named: dict[str, object] = {"--model": model.name, "--mini-batch": mini_batch}
    return named | options.identity | {"--data": fingerprint(model, options.data)} | _inside(model)


def require_identity(path: Path, saved: Mapping[str, object], own: Mapping[str, object]) -> None:
    """Refuse a checkpoint of another training.

    Raises:
        UsageError: the text names the first fact that differs, and both values.
    """
    for fact in dict.fromkeys([*own, *saved]):
        if saved.get(fact) != own.get(fact):
            raise UsageError(
                f"{path} was trained {_said(fact, saved.get(fact))}, and this run is {_said(fact, own.get(fact))}; "
                "resume with the same, or start anew in another folder"
            )


def _said(fact: str, value: object) -> str:
    """A fact in the user's words."""
    if value is None:
        return f"without {fact}"
    what, inside, flag = fact.rpartition(" in ")
    return f"with {what} {value}{inside}{flag}" if inside else f"with {flag} {value}"


def _inside(model: Model) -> dict[str, object]:
    """What a model's name does not say: settings of its configuration, and what its blocks are, take and make."""
    made = output_shapes(model, _SAMPLES)
    facts = {name: _text(value) for name, value in _flat(model.settings)}
    for block in model.blocks:
        about = {
            block.operator: dict(block.dimensions),
            "takes": [*block.inputs, *block.samples],
            "makes": list(made[block.id][0]),
        }
        facts[f"block {block.id}"] = _text(about)
    return {f"{name} in --model": text for name, text in facts.items()}


def _flat(settings: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    """Settings by the path of their names."""
    for key in sorted(settings, key=str):
        value = settings[key]
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _text(value: object) -> str:
    """As canonical JSON."""
    return json.dumps(value, sort_keys=True, default=str)
