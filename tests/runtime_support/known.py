"""In a process of many cases: the models of a name, and the shapes of what they have and make, are found once."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from pipeplan.files import Plan, parse
from pipeplan.runtime.executor.rank_program import programs_of
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import Model, placed
from pipeplan.runtime.parallel.sharding import Shards
from pipeplan.runtime.training import compatibility, trainer
from pipeplan.runtime.training.options import TrainOptions

load_once = functools.cache(load_model)
_KNOWN = ExitStack()


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


def look_over(cases: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Find out for good, in a process from which ranks are forked, what trainers of these plans and options will ask.

    What cannot be is left to the ranks, which say so.
    """
    _KNOWN.enter_context(known_once())
    for text, given in cases:
        with contextlib.suppress(Exception):
            plan = parse(text, Plan)
            options = TrainOptions(**given).by_plan(plan)
            model = trainer.model_of(options)
            model = model.shared_by(max(stage.context for stage in plan.stages))
            compatibility.require_splittable(plan, model)
            program = programs_of(plan, [block.id for block in model.blocks], model.edges, model.name)[0]
            trainer.travelling(program, model, trainer.dtype_of(options), trainer.autocast_of(options))
            for part in program.stages.values():
                for share in part.shares:
                    model.build_share(share, options.seed, placed(share, lambda line: Shards(len(line))))


def _once(find: Callable[..., Any]) -> Callable[..., Any]:
    found: dict[object, tuple[Model, Any]] = {}

    def known(model: Model, *asked: object) -> Any:
        key = (id(model), *asked)
        if key not in found:
            found[key] = model, find(model, *asked)  # with the model, or another one could come to have its id
        return found[key][1]

    return known
