"""Option types that several verbs share."""

from __future__ import annotations

import math
from typing import Any

import click

from pipeplan.errors import UsageError
from pipeplan.units import parse_bytes, parse_ns

__all__ = ["BYTES", "COUNTS", "DURATION", "FiniteRange"]

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


class FiniteRange(click.FloatRange):
    """Numbers from ``min`` on: never ``nan``, which no bound of click's refuses, and ``inf`` only if that is said."""

    def __init__(self, min: float, *, min_open: bool = False, infinite: bool = False) -> None:
        super().__init__(min=min, min_open=min_open)
        self._infinite = infinite

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number) or (math.isinf(number) and not self._infinite):
            self.fail(f"{value} is not a {'number' if self._infinite else 'finite number'}", param, ctx)
        return number


DURATION = _Duration()
BYTES = _Bytes()
COUNTS = _Counts()
