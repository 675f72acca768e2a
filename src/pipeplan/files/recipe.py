"""Recipe: by what name a profile or a plan says what training keeps of every parameter."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeplan.files.base import FileModel
from pipeplan.workload.elements import Name

CUSTOM = "custom"
"""The recipe of profiles whose blocks state bytes themselves."""

AUTOCAST = "bf16-autocast"
"""The recipe by which parameters are float32, and cast where a block uses them: no copy that computes is kept."""

ADAMW = "adamw"

GradientDtype = Literal["fp32", "bf16", "fp16"]


class Recipe(FileModel):
    """What one parameter takes: a recipe of the catalog, and what of it is chosen otherwise.

    What the names mean in bytes :mod:`pipeplan.costs.recipes` knows.
    """

    name: Annotated[Name, Field(description="of the catalog, such as bf16-mixed; custom: blocks state bytes")] = CUSTOM
    gradient_dtype: Annotated[
        GradientDtype | None, Field(description="number format that gradients add up in; null: the recipe's")
    ] = None
    optimizer: Annotated[Name, Field(description="adamw, momentum or sgd; of custom without meaning")] = ADAMW

    @model_validator(mode="after")
    def _custom_says_all(self) -> Recipe:
        if self.is_custom and (self.gradient_dtype is not None or self.optimizer != ADAMW):
            raise ValueError("recipe custom has neither gradient_dtype nor optimizer: blocks state the bytes of both")
        return self

    @property
    def is_custom(self) -> bool:
        """Whether blocks state bytes."""
        return self.name == CUSTOM

    def __str__(self) -> str:
        gradients = f"gradients in {self.gradient_dtype}" if self.gradient_dtype else ""
        return ", ".join(filter(None, (self.name, gradients, self.optimizer if self.optimizer != ADAMW else "")))
