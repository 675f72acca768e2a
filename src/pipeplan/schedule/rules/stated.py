"""Classes whose fields are the keys of rules files: the types of the fields say what a table may hold.

They are built in Python, where wrong arguments raise UsageError, or by pydantic from a table of a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, TypeVar

from pydantic import BeforeValidator, ConfigDict, ValidationError, ValidationInfo, WrapValidator, model_validator
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from pipeplan.errors import UsageError
from pipeplan.schedule.rules.numbers import shown

__all__ = ["BY_NAME", "Stated", "TableError", "fields_of", "in_units", "says", "told", "usage_errors"]

BY_NAME = ConfigDict(populate_by_name=True)
"""Python names fields as they are; files have their alias, where there is one."""

_Class = TypeVar("_Class", bound=type)

_REMEDIES = {
    "bool_type": "write true or false",
    "dataclass_type": "write a table [{path}]",
    "dict_type": "write a table [{path}]",
    "greater_than_equal": "it must be at least {ge}",
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
    """Base of all; ``text_key`` is the key that a text in place of a table stands for."""

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
            has_table = isinstance(entry, dict) and any(each.startswith(f"{key}.") for each in known)
            spelled |= {f"{key}.{inner}": each for inner, each in entry.items()} if has_table else {key: entry}
        unknown = next((key for key in spelled if key not in known), None)
        if unknown is not None:
            raise TableError(f"{shown(unknown)[1:-1]} is not known; choose from {', '.join(known)}")
        return spelled


def fields_of(stated: Any) -> dict[str, FieldInfo]:
    """{name: field}; files have its alias as the key, and leave out what it excludes: functions."""
    found: dict[str, FieldInfo] = stated.__pydantic_fields__
    return found


def usage_errors(cls: _Class) -> _Class:
    """A class whose constructor raises UsageError where its arguments are wrong."""
    plain, names = cls.__init__, list(fields_of(cls))  # type: ignore[misc]  # the class's own

    @wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            plain(self, *args[len(names) :], **dict(zip(names, args, strict=False)), **kwargs)
        except ValidationError as error:
            raise UsageError(told(error)) from None

    cls.__init__ = init  # type: ignore[misc]  # calls the one it replaces
    return cls


def says(remedy: str) -> WrapValidator:
    """What to write where a value is not of its type, whatever is wrong with it."""

    def read(value: object, validate: Callable[[object], object]) -> object:
        try:
            return validate(value)
        except ValidationError:
            raise ValueError(remedy) from None

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


def told(error: ValidationError) -> str:
    """What is wrong at the innermost place: where, the value, and what to write instead."""
    wrong = [each for each in error.errors(include_url=False) if each["type"] != "callable_type"]
    first = max(wrong, key=lambda each: len(_keys(each["loc"])))
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in _keys(first["loc"])).removeprefix(".")
    context = first.get("ctx", {})
    reason = context.get("error", first["msg"])
    if isinstance(reason, TableError):
        return f"{path}.{reason}".removeprefix(".")
    if first["type"] == "missing":
        return f"{path} is missing"
    if first["type"] in _REMEDIES:
        reason = _REMEDIES[first["type"]].format(path=path, **context)
    return f"{path} is {shown(first['input'])}; {reason}"


def _keys(steps: tuple[int | str, ...]) -> list[int | str]:
    """The steps to a value that are keys and indices; pydantic's names for the members of a union are left out."""
    return [step for step in steps if isinstance(step, int) or re.fullmatch(r"(?!int$|str$)[a-z_.]+", step)]
