"""What is kept of a parameter in a uniform layout, and what the optimizer's step moves of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from pipeplan.costs.recipes import bytes_per_parameter, step_bytes
from pipeplan.costs.uniform.words import Number, UniformLayout
from pipeplan.files import Recipe
from pipeplan.workload.kinds import GRADIENTS, MASTER, OPTIMIZER, PARAMETERS


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes of a parameter: of the copy that computes, its gradient, the master copy, the optimizer's state; and how
    many a step reads and writes.
    """

    compute: Number
    gradient: Number
    master: Number
    optimizer: Number
    step: Number


@cache
def bytes_of(recipe: str, optimizer: str = "adamw") -> ParameterBytes:
    """Of one recipe and optimizer. Raises UsageError if the catalog does not have them."""
    of_catalog = Recipe(name=recipe, optimizer=optimizer)
    kept = bytes_per_parameter(of_catalog)
    return ParameterBytes(
        kept[PARAMETERS], kept[GRADIENTS], kept[MASTER], kept[OPTIMIZER], step_bytes(kept, of_catalog)
    )


def parameter_bytes(layout: UniformLayout) -> ParameterBytes:
    """Of a layout; a gradient that is summed in fewer bytes is kept, and read by the step, in these."""
    every = [
        ((layout.recipe == recipe) & (layout.optimizer == optimizer), bytes_of(str(recipe), str(optimizer)))
        for recipe in np.unique(np.asarray(layout.recipe))
        for optimizer in np.unique(np.asarray(layout.optimizer))
    ]

    def column(name: str) -> Number:
        return sum(np.where(is_it, getattr(each, name), 0) for is_it, each in every)

    kept, step = column("gradient"), column("step")
    gradient = np.minimum(kept, layout.gradient_bytes)
    return ParameterBytes(column("compute"), gradient, column("master"), column("optimizer"), step - kept + gradient)
