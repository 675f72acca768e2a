"""Numbers in rules: integers, or small arithmetic texts over sizes, so that one set of rules serves any pipeline."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from reprlib import Repr
from typing import Annotated

from pydantic import PlainValidator

from pipeplan.errors import UsageError

__all__ = ["NAMES", "CountFromOne", "CountFromZero", "Limit", "Number", "evaluate", "shown"]

Number = int | str
"""An integer, or a text such as ``"D - d"``."""

NAMES = {
    "D": "devices",
    "d": "place of the device among them, from 0",
    "C": "stages of the device",
    "c": "place of the stage among those of its device, from 0",
    "S": "stages",
    "s": "place of the stage among them, from 0",
    "N": "micro-batches",
}
"""What a text may say. All are of the stage's submodule and route; a device's are those of its first stage."""

_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CALLS: dict[str, Callable[..., int]] = {"min": min, "max": max}

_short = Repr()
_short.maxstring = _short.maxother = _short.maxlong = 100


def shown(value: object) -> str:
    """A value of a file as an error shows it: long ones are cut."""
    return _short.repr(value)


_LONGEST = 200
_LARGEST = 10**12


def _checked(value: object, least: int) -> Number:
    """An integer that is large enough, or a text that can be evaluated.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, str):
        _evaluated(value, dict.fromkeys(NAMES, 1))
    elif isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("write an integer, or a text such as 'D - d'")
    elif value < least:
        raise ValueError(f"it must be at least {least}")
    return value


CountFromOne = Annotated[Number, PlainValidator(partial(_checked, least=1))]
CountFromZero = Annotated[Number, PlainValidator(partial(_checked, least=0))]

Limit = CountFromZero | tuple[CountFromZero, ...]
"""One number for all, or one for each stage (or device) of the submodule in order. One that is too small where it
applies is refused only there, as then the actions that it stops are known."""


def evaluate(key: str, value: Number, sizes: Mapping[str, int], least: int = 1) -> int:
    """The number a value means where the names have these sizes.

    Raises:
        UsageError: the text is no such arithmetic, or gives less than ``least``; with the key and the sizes.
    """
    try:
        result = value if isinstance(value, int) else _evaluated(value, sizes)
    except ValueError as error:
        raise UsageError(f"{key} is {shown(value)}; {error}") from None
    if result < least:
        used = [f"{name} = {size}" for name, size in sizes.items() if isinstance(value, str) and name in value]
        where = f" where {', '.join(used)}" if used else ""
        what = key if isinstance(value, int) else f"{key} = {value!r}"
        raise UsageError(f"{what} is {result}{where}; it must be at least {least}")
    return result


def _evaluated(text: str, sizes: Mapping[str, int]) -> int:
    try:
        return _value(_parsed(text), sizes)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(f"it cannot be evaluated: {_reason(error)}") from None


@lru_cache(maxsize=256)
def _parsed(text: str) -> ast.expr:
    """The text's expression; the same few texts are asked for every stage and device."""
    if len(text) > _LONGEST:
        raise ValueError(f"it is longer than {_LONGEST} characters")
    return ast.parse(text.strip(), mode="eval").body


def _value(node: ast.expr, sizes: Mapping[str, int]) -> int:
    """The value of a piece of the text; nothing but this arithmetic is understood, so no text can run anything."""
    match node:
        case ast.Constant(value=bool()):
            raise ValueError("only integers are numbers here")
        case ast.Constant(value=int() as number):
            result = number
        case ast.Name(id=name) if name in sizes:
            result = sizes[name]
        case ast.Name(id=name):
            raise ValueError(f"{name!r} is not known; choose from {', '.join(sizes)}")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_value(operand, sizes)
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _BINARY:
            result = _BINARY[type(op)](_value(left, sizes), _value(right, sizes))
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as arguments, keywords=[]) if name in _CALLS:
            values = [_value(argument, sizes) for argument in arguments]
            result = _CALLS[name](values)
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not understood; use integers, + - * // %, min, max and names")
    if abs(result) > _LARGEST:
        raise ValueError("it is too large")
    return result


def _reason(error: Exception) -> str:
    return error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
