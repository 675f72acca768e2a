"""In a process of many cases: the models of a name, and the shapes of what they have and make, are found once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.training import compatibility, trainer

load_once = functools.cache(load_model)


@contextmanager
def known_once() -> Iterator[None]:
    """For trainers, which look a model over a few times each: half of what it takes to make one that is small."""
    with ExitStack() as patches:
        for owner, name in (
            (trainer, "output_shapes"),
            (compatibility, "output_shapes"),
            (Model, "parameter_shapes"),
            (Model, "require_splittable"),
        ):
            patches.enter_context(mock.patch.object(owner, name, _once(getattr(owner, name))))
        patches.enter_context(mock.patch.object(trainer, "load_model", load_once))
        yield


def _once(find: Callable[..., Any]) -> Callable[..., Any]:
    found: dict[object, tuple[Model, Any]] = {}

    def known(model: Model, *asked: object) -> Any:
        key = (id(model), *asked)
        if key not in found:
            found[key] = model, find(model, *asked)  # with the model, or another one could come to have its id
        return found[key][1]

    return known
