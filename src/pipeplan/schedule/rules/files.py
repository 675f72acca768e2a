"""Rules files: the language as TOML. Data from strangers: reading one runs nothing and opens nothing else.

Every key is that of :mod:`pipeplan.schedule.rules.language`. A text in place of a table is its first key, so that
``types = "fwd-first"`` says the same as ``[types]`` with ``first = "fwd-first"``.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

from pipeplan.catalog.reading import names, read_text
from pipeplan.errors import FileError, UsageError
from pipeplan.model.files import read_bytes
from pipeplan.schedule.rules.language import (
    DeviceRules,
    Instruction,
    Rules,
    Settings,
    StageTraversal,
    SubmoduleRules,
    TypeTraversal,
)
from pipeplan.schedule.rules.numbers import Number, check_number, shown
from pipeplan.units import parse_bytes, parse_ns

__all__ = ["named_rules", "parse_rules", "read_rules", "shipped_rules", "to_toml"]

_Reader = Callable[[object, str], Any]
"""Turns what stands under a key, whose path is given, into what the language takes."""


_MOST_CHARACTERS = 1_000_000


@cache
def shipped_rules() -> Mapping[str, str]:
    """{name: text} of the rules files that ship, by name."""
    return {name: read_text("rules", name) for name in names("rules")}


@cache
def named_rules(name: str) -> Rules:
    """Rules of the catalog.

    Raises:
        UsageError: there are none of this name.
    """
    if name not in shipped_rules():
        raise UsageError(f"there are no rules {name!r}; give a file, or one of {', '.join(shipped_rules())}")
    return parse_rules(shipped_rules()[name], name)


def read_rules(where: str) -> Rules:
    """The rules in a file, or those of the catalog with this name; ``-`` is stdin.

    Raises:
        FileError: the file cannot be read, or is no rules file; the text names the key.
        UsageError: there is neither a file nor an entry of the catalog.
    """
    if where != "-" and not Path(where).exists():
        if Path(where).suffix:
            raise FileError(f"{where}: there is no such file; the rules that ship are {', '.join(shipped_rules())}")
        return named_rules(where)
    try:
        text = read_bytes(where).decode()
    except UnicodeDecodeError as error:
        raise FileError(f"{where}: not readable as TOML: {error}") from None
    return parse_rules(text, "rules" if where == "-" else Path(where).stem, where)


def parse_rules(text: str, name: str, where: str | None = None) -> Rules:
    """The rules that a TOML text states; ``name`` unless it says another.

    Raises:
        FileError: the text is not TOML, or says something that the language does not know.
    """
    where = where or name
    if len(text) > _MOST_CHARACTERS:
        raise FileError(f"{where}: {len(text)} characters are more than the {_MOST_CHARACTERS} that rules may have")
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where}: not readable as TOML: {error}") from None
    try:
        return Rules(**{"name": name, **_read(table, _RULES, "")})
    except UsageError as error:
        raise FileError(f"{where}: not a valid rules file: {error}") from None


def _read(table: Mapping[str, object], readers: Mapping[str, _Reader], path: str) -> dict[str, Any]:
    """The fields that a table says."""
    unknown = next((key for key in table if key not in readers), None)
    if unknown is not None:
        raise UsageError(f"{path}{shown(unknown)[1:-1]} is not known; choose from {', '.join(readers)}")
    found: dict[str, Any] = {}
    for key, value in table.items():
        result = readers[key](value, f"{path}{key}")
        found |= result if key == "weights" else {_FIELDS.get(key, key): result}
    return found


def _exactly(kind: type, what: str) -> _Reader:
    def read(value: object, path: str) -> object:
        if type(value) is not kind:
            raise UsageError(f"{path} is {shown(value)}; write {what}")
        return value

    return read


_TEXT, _FLAG, _INTEGER = _exactly(str, "a text"), _exactly(bool, "true or false"), _exactly(int, "an integer")


def _number(value: object, path: str) -> Number:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise UsageError(f"{path} is {shown(value)}; write an integer, or a text such as 'D - d'")
    return value


def _count(value: object, path: str) -> object:
    """A number from 0 on."""
    number = _number(value, path)
    check_number(path, number, 0)
    return number


def _limit(value: object, path: str) -> object:
    if not isinstance(value, list):
        return _number(value, path)
    return tuple(_number(entry, f"{path}[{index}]") for index, entry in enumerate(value))


def _table(readers: Mapping[str, _Reader], make: Callable[..., object]) -> _Reader:
    """Reads a table into an object; a text in its place is the first of its keys."""

    def read(value: object, path: str) -> object:
        table = {next(iter(readers)): value} if isinstance(value, str) else value
        if not isinstance(table, dict):
            raise UsageError(f"{path} is {shown(value)}; write a table [{path}]")
        said = _read(table, readers, f"{path}.")
        try:
            return make(**said)
        except UsageError as error:
            raise UsageError(f"{path}.{error}") from None

    return read


def _tables(readers: Mapping[str, _Reader], make: Callable[..., object]) -> _Reader:
    def read(value: object, path: str) -> object:
        if not isinstance(value, list):
            raise UsageError(f"{path} is {shown(value)}; write tables [[{path}]]")
        return tuple(one(entry, f"{path}[{index}]") for index, entry in enumerate(value))

    one = _table(readers, make)
    return read


def _device_numbers(value: object, path: str) -> object:
    if not isinstance(value, list):
        raise UsageError(f"{path} is {shown(value)}; write a list of device numbers")
    return tuple(_INTEGER(entry, f"{path}[{index}]") for index, entry in enumerate(value))


def _range(value: object, path: str) -> object:
    if not isinstance(value, list) or len(value) != 2:
        raise UsageError(f"{path} is {shown(value)}; write the first device and the one behind the last: [0, 'D']")
    return _limit(value, path)


def _ends(value: object, path: str) -> object:
    """Stages by number or name; one of them may stand without a list."""
    entries = value if isinstance(value, list) else [value]
    for index, entry in enumerate(entries):
        if type(entry) not in (int, str):
            raise UsageError(f"{path}[{index}] is {shown(entry)}; write a stage's number or the name of a block")
    return tuple(entries)


def _in_units(parse: Callable[[str], int]) -> _Reader:
    def read(value: object, path: str) -> object:
        try:
            return parse(_TEXT(value, path))
        except UsageError as error:
            raise UsageError(str(error) if path in str(error) else f"{path}: {error}") from None

    return read


def _attributes(value: object, path: str) -> object:
    if not isinstance(value, dict):
        raise UsageError(f"{path} is {shown(value)}; write a table [{path}]")
    return {key: tuple(entry) if isinstance(entry, list) else entry for key, entry in value.items()}


def _weights(**said: object) -> dict[str, object]:
    return {f"weights_{key}": value for key, value in said.items()}


_TYPES: dict[str, _Reader] = {"first": _TEXT, "forward_unit": _number, "backward_unit": _number, "wait": _FLAG}
_TRAVERSAL: dict[str, _Reader] = {"direction": _TEXT, "interval": _number, "every": _number}

_SETTINGS: dict[str, _Reader] = {
    "types": _table(_TYPES, TypeTraversal),
    "forward": _table(_TRAVERSAL, StageTraversal),
    "backward": _table(_TRAVERSAL, StageTraversal),
    "in_flight": _limit,
    "in_flight_device": _limit,
    "in_flight_shared": _limit,
    "weights": _table({"late": _count, "fill": _FLAG}, _weights),
}

_PLACE: dict[str, _Reader] = {"placement": _TEXT, "chunks": _INTEGER}

_INSTRUCTION: dict[str, _Reader] = {
    "kind": _TEXT,
    "last": _FLAG,
    "after": _ends,
    "before": _ends,
    "devices": lambda value, path: value if value == "before" else _device_numbers(value, path),
    "every": _INTEGER,
    "duration": _in_units(parse_ns),
    "bytes_per_sample": _in_units(parse_bytes),
    "attributes": _attributes,
}

_FIELDS = {"device": "devices", "submodule": "submodules", "instruction": "instructions", "duration": "duration_ns"}
"""Tables in the plural, and times in ns, as the language has them."""

_RULES: dict[str, _Reader] = {
    "name": _TEXT,
    "time": _TEXT,
    "separate": _FLAG,
    "fit_memory": _FLAG,
    "shared_first": _FLAG,
    **_PLACE,
    **_SETTINGS,
    "device": _tables({"devices": _device_numbers, **_SETTINGS}, DeviceRules),
    "submodule": _tables({"blocks": _TEXT, **_PLACE, "devices": _range, **_SETTINGS}, SubmoduleRules),
    "instruction": _tables(_INSTRUCTION, Instruction),
}


# Writing -------------------------------------------------------------------------------------------------------


def to_toml(rules: Rules) -> str:
    """The text of a rules file that says these rules, what holds without being said left out.

    Raises:
        UsageError: they have functions, which no file has.
    """
    said = {"name": rules.name} | _said(rules)
    return "".join(f"{key} = {_toml(value, key)}\n" for key, value in said.items())


_KEYS: Mapping[type, Mapping[str, str]] = {
    Rules: {field: key for key, field in _FIELDS.items()},
    Instruction: {"duration_ns": "duration"},
}
"""Fields with another key in files; those of weights have a table."""

_UNITS = {"duration_ns": "ns", "bytes_per_sample": "B"}

_Written = Rules | Settings | TypeTraversal | StageTraversal | Instruction


def _said(entry: _Written) -> dict[str, object]:
    """{key: value} of what is not as it is without; of a table's first key, which says what it is, in any case."""
    said: dict[str, object] = {}
    weights: dict[str, object] = {}
    keys = _KEYS.get(type(entry), {})
    for field in fields(entry):
        value = getattr(entry, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if value == default and field.name not in ("name", "first", "direction"):
            continue
        if field.name.startswith("weights_"):
            weights[field.name.removeprefix("weights_")] = value
        else:
            unit = _UNITS.get(field.name)
            said[keys.get(field.name, field.name)] = value if unit is None else f"{value}{unit}"
    return said | ({"weights": weights} if weights else {})


def _toml(value: object, path: str) -> str:
    """A value as TOML, on one line."""
    if isinstance(value, _Written):
        value = _said(value)
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case tuple():
            return f"[{', '.join(_toml(entry, path) for entry in value)}]"
        case Mapping():
            entries = (f"{_key(key)} = {_toml(entry, path)}" for key, entry in value.items())
            return f"{{ {', '.join(entries)} }}"
    raise UsageError(f"{path} has a function, which a rules file cannot say; keep these rules in Python")


def _key(text: str) -> str:
    """A key as it is, or quoted where TOML asks for that."""
    return text if re.fullmatch("[A-Za-z0-9_-]+", text) else _toml(text, text)
