"""What the file formats have in common: strict frozen models, and the number types they use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, PrivateAttr, StringConstraints
from pydantic_core import CoreSchema, core_schema

from pipeplan.model.migrations import current_version
from pipeplan.units import MAX_BYTES, MAX_NS

__all__ = [
    "MAX_DEVICES",
    "Bytes",
    "Count",
    "CurrentVersion",
    "DeviceCount",
    "File",
    "FileModel",
    "Index",
    "Items",
    "Name",
    "Nanoseconds",
    "PositiveNs",
    "Source",
]

MAX_COUNT = 1_000_000
MAX_DEVICES = 65_536

Nanoseconds = Annotated[int, Field(ge=0, le=MAX_NS)]
PositiveNs = Annotated[int, Field(ge=1, le=MAX_NS)]
Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
DeviceCount = Annotated[int, Field(ge=1, le=MAX_DEVICES)]
Index = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$")]

Item = TypeVar("Item")
Items = Annotated[tuple[Item, ...], FailFast()]
"""A list of a file. Only its first problem is told: noting a million of them would take a gigabyte."""


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
    """Annotates a ``schema_version``: the current one of its kind, as :mod:`pipeplan.model.migrations` says."""

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
