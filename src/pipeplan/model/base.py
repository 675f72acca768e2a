"""What the three file formats have in common: strict frozen models, and where their numbers came from."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["FileModel", "Source"]


class FileModel(BaseModel):
    """Base of everything read from a file: frozen, unknown keys refused, no conversion between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Source(FileModel):
    """Where the numbers of a profile or a cluster came from."""

    method: Annotated[
        str,
        Field(
            pattern="^(measured|estimated|literature)$",
            description="measured on a machine, estimated by closed forms, or taken from a paper",
        ),
    ]
    device: Annotated[str, Field(max_length=512, description="device the numbers are for")] = ""
    dtype: Annotated[str, Field(max_length=64, description="number format, such as float32")] = ""
    versions: Annotated[dict[str, str], Field(description="versions of what measured, by name")] = {}
    date: Annotated[
        str, Field(pattern="^([0-9]{4}-[0-9]{2}-[0-9]{2})?$", description="day of the measurement, ISO")
    ] = ""
    reference: Annotated[str, Field(max_length=2048, description="for literature: paper and table or figure")] = ""
    notes: Annotated[str, Field(max_length=8192, description="anything a reader must know to trust it")] = ""
