"""What a stage costs each of its devices, and what training holds of every parameter."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from pydantic import ConfigDict, TypeAdapter

from pipeplan.catalog.reading import names, read_table
from pipeplan.errors import UsageError

__all__ = ["RECIPES", "UNLIMITED", "StageCost", "StateRecipe", "state_bytes", "state_recipe"]


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


def state_bytes(parameter_bytes: int, optimizer_bytes: int = 0) -> int:
    """Bytes of parameters, gradients of the same size, and the optimizer's state."""
    return 2 * parameter_bytes + optimizer_bytes


UNLIMITED = 1 << 60
"""More micro-batches than there can be, and more ns."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """Costs of a stage on each of its devices, for one micro-batch; times in ns, sizes in bytes.

    ``input_grad_ns`` and ``weight_grad_ns`` are None where a block of the stage has no split backward. ``sync_ns`` is
    summing gradients among the devices of a replica, once per iteration. Two stages that become one have the sum of
    their costs, but for the workspace: only one block runs at a time.
    """

    forward_ns: int
    backward_ns: int
    input_grad_ns: int | None = None
    weight_grad_ns: int | None = None
    activation_bytes: int = 0
    weight_grad_bytes: int = 0
    workspace_bytes: int = 0
    parameter_bytes: int = 0
    optimizer_bytes: int = 0
    sync_ns: int = 0

    @property
    def compute_ns(self) -> int:
        """Forward and backward."""
        return self.forward_ns + self.backward_ns

    @property
    def static_bytes(self) -> int:
        """What is held all the time."""
        return state_bytes(self.parameter_bytes, self.optimizer_bytes)

    def memory_bytes(self, in_flight: int) -> int:
        """Bytes with so many micro-batches in flight."""
        return self.static_bytes + in_flight * self.activation_bytes + self.workspace_bytes

    def most_in_flight(self, limit: int) -> int:
        """Micro-batches of which so many bytes hold the activations; -1 if they do not even hold the rest."""
        left = limit - self.static_bytes - self.workspace_bytes
        return -1 if left < 0 else left // self.activation_bytes if self.activation_bytes else UNLIMITED

    def __add__(self, other: StageCost) -> StageCost:
        return StageCost(
            self.forward_ns + other.forward_ns,
            self.backward_ns + other.backward_ns,
            _both(self.input_grad_ns, other.input_grad_ns),
            _both(self.weight_grad_ns, other.weight_grad_ns),
            self.activation_bytes + other.activation_bytes,
            self.weight_grad_bytes + other.weight_grad_bytes,
            max(self.workspace_bytes, other.workspace_bytes),
            self.parameter_bytes + other.parameter_bytes,
            self.optimizer_bytes + other.optimizer_bytes,
            self.sync_ns + other.sync_ns,
        )


def _both(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
