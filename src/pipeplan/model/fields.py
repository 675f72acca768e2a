"""What a field may hold, said once as an annotation: nothing reads it here, files enforce it where they are read.

Bounds are annotated-types'; the classes here speak the protocol by which pydantic asks annotations, without needing it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Le, MaxLen, MinLen

from pipeplan.model.action import KIND_PATTERN, NUMBER_PATTERN
from pipeplan.units import MAX_BYTES, MAX_NS

__all__ = [
    "MAX_DEVICES",
    "Bytes",
    "Count",
    "DeviceCount",
    "FirstProblemOnly",
    "Index",
    "Items",
    "Kind",
    "Matching",
    "Meaning",
    "Name",
    "Nanoseconds",
    "OperationId",
    "PositiveNs",
]

MAX_COUNT = 1_000_000
MAX_DEVICES = 65_536


@dataclass(frozen=True, slots=True)
class Matching:
    """A text that matches a regular expression."""

    pattern: str

    def __get_pydantic_core_schema__(self, source: type, handler: Callable[[type], dict[str, Any]]) -> dict[str, Any]:
        return {**handler(source), "pattern": self.pattern}


@dataclass(frozen=True, slots=True)
class FirstProblemOnly:
    """A list of which only the first problem is reported: noting a million of them would take a gigabyte."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {**handler(source), "fail_fast": True}


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a field means, in the words of its file's JSON Schema; and its default, where that is a new object."""

    text: str
    default: dict[str, Any] | None = None

    def __get_pydantic_json_schema__(self, core: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        default = {} if self.default is None else {"default": self.default}
        return {**default, **handler(core), "description": self.text}


Item = TypeVar("Item")
Items = Annotated[tuple[Item, ...], FirstProblemOnly()]
"""A list of a file."""

Nanoseconds = Annotated[int, Ge(0), Le(MAX_NS)]
PositiveNs = Annotated[int, Ge(1), Le(MAX_NS)]
Bytes = Annotated[int, Ge(0), Le(MAX_BYTES)]
Count = Annotated[int, Ge(1), Le(MAX_COUNT)]
DeviceCount = Annotated[int, Ge(1), Le(MAX_DEVICES)]
Index = Annotated[int, Ge(0), Le(MAX_COUNT)]
Name = Annotated[str, MinLen(1), MaxLen(256), Matching(r"^[^\x00-\x1f\x7f]+$")]
Kind = Annotated[str, Matching(f"^{KIND_PATTERN}$")]
OperationId = Annotated[str, Matching(f"^{NUMBER_PATTERN}{KIND_PATTERN}$")]
