"""Option types that several verbs share."""

from __future__ import annotations

from typing import Any

import click

from pipeplan.errors import UsageError
from pipeplan.units import parse_bytes, parse_ns

__all__ = ["BYTES", "COUNTS", "DURATION"]

_MOST = 1_000_000


class _Duration(click.ParamType[int]):
    """A duration with a unit, as ns: ``3.2ms``."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Nanoseconds."""
        if isinstance(value, int):
            return value
        try:
            return parse_ns(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class _Bytes(click.ParamType[int]):
    """A size, as bytes: ``80GB``, ``80GiB``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes."""
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class _Counts(click.ParamType[tuple[int, ...]]):
    """Numbers from 1 on, ascending and each once: ``1,2,4``."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isascii() and part.isdecimal() and 1 <= int(part) <= _MOST for part in parts):
            self.fail(f"{value!r} is not a list of numbers from 1 to {_MOST}; write them as 1,2,4", param, ctx)
        return tuple(sorted({int(part) for part in parts}))


DURATION = _Duration()
BYTES = _Bytes()
COUNTS = _Counts()
