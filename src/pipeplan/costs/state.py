"""What training holds of every parameter beside the copy it computes with: recipes, one file each in the catalog."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from pydantic import ConfigDict, TypeAdapter

from pipeplan.catalog.reading import names, read_table
from pipeplan.errors import UsageError

__all__ = ["RECIPES", "StateRecipe", "state_recipe"]

RECIPES = names("recipes")
"""Every recipe by name."""

_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class StateRecipe:
    """Tensors of a parameter's shape by their format; ``own`` is the one that the parameter itself has.

    Gradients have it in every recipe, since a profile says that they take what parameters take. ``master`` is the copy
    that is updated where another one is computed with.
    """

    title: str
    source: str
    gradient: tuple[Literal["own"]]
    master: tuple[Literal["float32"], ...]
    optimizer: tuple[Literal["own", "float32"], ...]

    __pydantic_config__ = ConfigDict(extra="forbid")

    def optimizer_bytes(self, parameters: int, parameter_bytes: int) -> int:
        """Master copies and the optimizer's own numbers, in bytes, for so many parameters of so many bytes in all."""
        sizes = {"own": parameter_bytes, "float32": _FLOAT32_BYTES * parameters}
        return sum(sizes[each] for each in (*self.master, *self.optimizer))


@cache
def state_recipe(name: str) -> StateRecipe:
    """The recipe of this name.

    Raises:
        UsageError: there is none.
    """
    if name not in RECIPES:
        raise UsageError(f"there is no recipe {name!r}; choose from {', '.join(RECIPES)}")
    return TypeAdapter(StateRecipe).validate_python(read_table("recipes", name))
