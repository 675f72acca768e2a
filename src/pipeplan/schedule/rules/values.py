"""The values of rules: classes whose fields are the keys of rules files, and numbers or arithmetic over sizes.

The classes are built in Python, where wrong arguments raise UsageError, or by pydantic from a table of a file. A number
is an integer, or a small text such as ``"D - d"``, so that one set of rules serves any pipeline.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial, wraps
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from pipeplan.errors import UsageError, choose_from
from pipeplan.texts import shown, shown_key

BY_NAME = ConfigDict(extra="forbid", populate_by_name=True)
"""Python names fields as they are; files have their alias, where there is one."""

_Class = TypeVar("_Class", bound=type)

_REMEDIES = {
    "bool_type": "write true or false",
    "dataclass_type": "write a table [{path}]",
    "dict_type": "write a table [{path}]",
    "greater_than_equal": "it must be at least {ge}",
    "less_than_equal": "it must be at most {le}",
    "int_type": "write an integer",
    "literal_error": "choose from {expected}",
    "string_type": "write a text",
    "tuple_type": "write tables [[{path}]]",
}
"""{pydantic's type of an error: what to do}"""


class TableError(ValueError):
    """What is wrong with the keys of a table; the text begins with one of them."""


@dataclass(config=BY_NAME, frozen=True)
class Stated:
    """Base class; ``text_key`` is the key that a plain text in place of a table sets."""

    text_key: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _spelled_out(cls, value: Any) -> Any:
        """A table of a file with keys that are known. Keys such as ``weights.late`` have a table of their own there."""
        if isinstance(value, str) and cls.text_key:
            value = {cls.text_key: value}
        if not isinstance(value, dict):
            return value
        known = [field.alias or name for name, field in fields_of(cls).items() if not field.exclude]
        spelled: dict[str, object] = {}
        for key, entry in value.items():
            of_table = any(each.startswith(f"{key}.") for each in known)
            if of_table and not isinstance(entry, dict):
                raise TableError(f"{key} is {shown(entry)}; write a table [{key}]")
            has_table = of_table and isinstance(entry, dict)
            spelled |= {f"{key}.{inner}": each for inner, each in entry.items()} if has_table else {key: entry}
        unknown = next((key for key in spelled if key not in known), None)
        if unknown is not None:
            raise TableError(f"{shown_key(unknown)} is not known; {choose_from(unknown, known)}")
        return spelled


def fields_of(stated: Any) -> dict[str, FieldInfo]:
    """{name: field}; files have its alias as the key, and leave out what it excludes: functions."""
    found: dict[str, FieldInfo] = stated.__pydantic_fields__
    return found


def usage_errors(cls: _Class) -> _Class:
    """A class whose constructor raises UsageError where its arguments are wrong."""
    plain, names = cls.__init__, list(fields_of(cls))  # type: ignore[misc]  # only of this class, not of subclasses

    @wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            plain(self, *args[len(names) :], **dict(zip(names, args, strict=False)), **kwargs)
        except ValidationError as error:
            raise UsageError(reason_of(error)) from None

    cls.__init__ = init  # type: ignore[misc]  # a constructor with the same arguments
    return cls


def says(remedy: str) -> WrapValidator:
    """What to write if a value is not of its type; errors in a text itself are passed through."""

    def read(value: object, validate: Callable[[object], object]) -> object:
        try:
            return validate(value)
        except ValidationError as error:
            own = [each["ctx"]["error"] for each in error.errors(include_url=False) if each["type"] == "value_error"]
            raise ValueError(str(own[0]) if own else remedy) from None

    return WrapValidator(read)


def in_units(parse: Callable[[str], int]) -> BeforeValidator:
    """Files have a text with a unit, Python an integer."""

    def read(value: object, info: ValidationInfo) -> object:
        if info.context is None:
            return value
        if not isinstance(value, str):
            raise ValueError("write a text")
        try:
            return parse(value)
        except UsageError as error:
            raise ValueError(str(error)) from None

    return BeforeValidator(read)


def reason_of(error: ValidationError) -> str:
    """What is wrong at the innermost place: where, the value, and what to write instead."""
    wrong = [each for each in error.errors(include_url=False) if each["type"] != "callable_type"]
    first = max(wrong, key=lambda each: len(_keys(each["loc"])))
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in _keys(first["loc"])).removeprefix(".")
    context = first.get("ctx", {})
    reason = context.get("error", first["msg"])
    if isinstance(reason, TableError):
        return f"{path}.{reason}".removeprefix(".")
    if not path and first["type"] == "value_error":
        return str(reason)  # of the table as a whole: the text names its place
    if first["type"] == "missing":
        return f"{path} is missing"
    if first["type"] in _REMEDIES:
        reason = _REMEDIES[first["type"]].format(path=path, **context)
    return f"{path} is {shown(first['input'])}; {reason}"


def _keys(steps: tuple[int | str, ...]) -> list[int | str]:
    """The steps to a value that are keys and indices; pydantic's names for the members of a union are left out."""
    return [step for step in steps if isinstance(step, int) or re.fullmatch(r"(?!int$|str$)[a-z_.]+", step)]


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
    "H": "as D, of the devices that follow each other on the longest way through the graph of stages",
    "h": "place of the device on it, from 0, counted so that H - h devices are left to its end",
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

_LONGEST = 200
_LARGEST = 10**12


def _checked(value: object, least: int, names: Iterable[str] = NAMES) -> Number:
    """An integer that is large enough, or a text of these names that can be evaluated.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, str):
        _evaluated(value, dict.fromkeys(names, 1))
    elif isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"write an integer, or a text such as {'D - d' if 'D' in names else '2 * b'!r}")
    elif not least <= value <= _LARGEST:
        raise ValueError(f"it must be at least {least}" if value < least else f"it must be at most {_LARGEST}")
    return value


CountFromOne = Annotated[Number, PlainValidator(partial(_checked, least=1))]
CountFromZero = Annotated[Number, PlainValidator(partial(_checked, least=0))]
Samples = Annotated[Number, PlainValidator(partial(_checked, least=1, names=("b",)))]
"""Samples of a micro-batch; in a text ``b`` are those of the plan's."""

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
        what = key if isinstance(value, int) else f"{key} = {shown(value)}"
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
