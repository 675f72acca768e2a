"""Rules files: the language as TOML. Data from strangers: reading one runs nothing and opens nothing else.

Every key is that of :mod:`pipeplan.schedule.rules.language`. A text in place of a table is its first key, so that
``types = "fwd-first"`` says the same as ``[types]`` with ``first = "fwd-first"``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import TypeAdapter, ValidationError

from pipeplan.catalog import names, read_text
from pipeplan.errors import FileError, UsageError
from pipeplan.files.read_write import read_bytes
from pipeplan.schedule.rules.language import Rules
from pipeplan.schedule.rules.stated import Stated, fields_of, told

__all__ = ["named_rules", "parse_rules", "read_rules", "shipped_rules", "to_toml"]

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
        return TypeAdapter(Rules).validate_python({"name": name, **table}, context="a file")
    except ValidationError as error:
        raise FileError(f"{where}: not a valid rules file: {told(error)}") from None


# Writing -------------------------------------------------------------------------------------------------------


def to_toml(rules: Rules) -> str:
    """The text of a rules file that says these rules, what holds without being said left out.

    Raises:
        UsageError: they have functions, which no file has.
    """
    return tomli_w.dumps(_said(rules))


_UNITS = {"duration_ns": "ns", "bytes_per_sample": "B"}


def _said(entry: Stated) -> dict[str, Any]:
    """{key: value} of what is not as it is without; of a table's first key, which says what it is, in any case."""
    said: dict[str, Any] = {}
    for name, field in fields_of(entry).items():
        value, key = getattr(entry, name), field.alias or name
        if value == field.get_default(call_default_factory=True) and name not in ("name", "first", "direction"):
            continue
        table, _, inner = key.rpartition(".")
        place = said.setdefault(table, {}) if table else said
        place[inner] = f"{value}{_UNITS[name]}" if name in _UNITS else _plain(value, key)
    return said


def _plain(value: Any, key: str) -> Any:
    if isinstance(value, Stated):
        return _said(value)
    if isinstance(value, tuple):
        return [_plain(each, key) for each in value]
    if callable(value):
        raise UsageError(f"{key} has a function, which a rules file cannot say; keep these rules in Python")
    return value
