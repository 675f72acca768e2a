"""What the file formats have in common: strict frozen models, their versions, and where their numbers came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from pydantic_core import CoreSchema, core_schema

from pipeplan.files.migrations import current_version

__all__ = ["CurrentVersion", "File", "FileModel", "Source"]


class FileModel(BaseModel):
    """Base of everything read from a file: frozen, unknown keys refused, no conversion between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class File(FileModel):
    """Base of a whole file."""

    _read_sha256: str = PrivateAttr(default="")

    @property
    def read_sha256(self) -> str:
        """Fingerprint of the file this was read from, if that is of an earlier version; empty if not."""
        return self._read_sha256

    def read_as(self, sha256: str) -> Self:
        """Note the fingerprint of the earlier version this was read from."""
        self._read_sha256 = sha256
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy; with changes it is no longer what was read."""
        copied = super().model_copy(update=update, deep=deep)
        return copied.read_as("") if update else copied


@dataclass(frozen=True, slots=True)
class CurrentVersion:
    """Annotates a ``schema_version``: the current one of its kind, as :mod:`pipeplan.files.migrations` says."""

    kind: str

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> CoreSchema:
        return core_schema.literal_schema([current_version(self.kind)])


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
