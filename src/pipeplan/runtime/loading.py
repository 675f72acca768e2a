"""Finding the model that a name on the command line means."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

from pipeplan.errors import UsageError
from pipeplan.runtime.model import Model
from pipeplan.runtime.zoo import ZOO, zoo_model

__all__ = ["load_model"]


def load_model(name: str, *, sequence: int | None = None) -> Model:
    """A model by its name in the zoo, or by the import path ``pkg.mod:factory`` of a function that makes one.

    ``sequence`` shortens the sequences of a zoo model.

    Raises:
        UsageError: an unknown name, or a factory that cannot be imported or does not return a Model.
    """
    if name in ZOO:
        return zoo_model(name, sequence=sequence)
    if ":" not in name:
        raise UsageError(f"model {name!r} is neither in the zoo ({', '.join(ZOO)}) nor of the form pkg.mod:factory")
    if sequence is not None:
        raise UsageError(f"--sequence is for models of the zoo; {name} makes its own")
    try:
        model = _imported(name)()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"model {name!r}: the factory failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, Model):
        raise UsageError(f"model {name!r} returned {type(model).__name__}, not a pipeplan.runtime.model.Model")
    return model


def _imported(path: str) -> Callable[[], object]:
    """What ``pkg.mod:factory`` names; modules of the working directory are found as ``python -m`` finds them."""
    module_name, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory: object = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # whatever the module raises while it is imported
        raise UsageError(f"model {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(factory):
        raise UsageError(f"model {path!r} is a {type(factory).__name__}, not a function that returns a Model")
    return factory
