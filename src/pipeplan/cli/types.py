"""Option types that several verbs share."""

from __future__ import annotations

from typing import Any

import click

from pipeplan.errors import UsageError
from pipeplan.units import parse_bytes, parse_ns

__all__ = ["BYTES", "DURATION"]


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


DURATION = _Duration()
BYTES = _Bytes()
