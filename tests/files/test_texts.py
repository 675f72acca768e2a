"""Texts of files: every one that a schema has is printable, and what is printed of other texts is written out."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

import pipeplan
from pipeplan.catalog import names, read_table
from pipeplan.costs.devices import DevicePreset
from pipeplan.costs.recipes import StateRecipe
from pipeplan.costs.uniform.judging import holds_runs, read_runs
from pipeplan.errors import FileError, UsageError
from pipeplan.files import FileModel, read_profile, trace
from pipeplan.files.run_logs import read_load_factor
from pipeplan.interop.layer_lists import read_device_map
from pipeplan.runtime.profiling import benches, rounds  # noqa: F401  # have models of files
from pipeplan.schedule.rules import Rules
from pipeplan.schedule.rules.language import parse_rules
from pipeplan.texts import (
    REFUSED,
    of_json,
    on_one_line,
    printable,
    problem_of,
    problems_of,
    shown,
    shown_key,
    with_short_lines,
)
from pipeplan.workload import elements
from pipeplan.workload.elements import Name, Text

HOSTILE = {
    "ESC": "\x1b[2J",
    "NUL": "\x00",
    "BEL": "\x07",
    "line feed": "\n",
    "carriage return": "\r",
    "DEL": "\x7f",
    "C1 CSI": "\x9b31m",
    "next line": "\x85",
    "override": "\u202e",
    "isolate": "\u2066",
    "mark": "\u200f",
    "line separator": "\u2028",
    "paragraph separator": "\u2029",
    "half a character": "\ud800",
    "no character": "\uffff",
}
HARMLESS = [
    "",
    "Größe 大きさ 크기",
    "b[/nope]",
    "[link=https://example.org]x[/link]",
    ":smile:",
    "👩\u200d👩\u200d👧",
    "a\u00a0b",
    "\\",
]

SHIPPED_ALONE = (DevicePreset, StateRecipe)
"""Of the catalog: :func:`pipeplan.catalog.read_table` looks through their tables before they are made."""


@pytest.mark.parametrize("text", HOSTILE.values(), ids=list(HOSTILE))
def test_what_moves_a_terminal_is_refused_and_written_out(text: str) -> None:
    assert (problem_of(f"ab{text}") or "").startswith(f"has U+{ord(text[0]):04X} at character 3")
    assert re.fullmatch(f"[^{REFUSED}]*", on_one_line(f"ab{text}c"))
    assert printable(f"ab{text}c") == (f"ab{text}c" if text == "\n" else on_one_line(f"ab{text}c"))
    for kind in (Name, Text):
        with pytest.raises(
            ValidationError, match=r"at character 3, which no text may have; remove it|as a unicode string"
        ):
            TypeAdapter(kind).validate_python(f"ab{text}", strict=True)


@pytest.mark.parametrize("text", HARMLESS)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert problem_of(text) is None
    assert printable(text) == on_one_line(text) == text
    assert TypeAdapter(Text).validate_python(text) == text


def test_what_is_quoted_is_short() -> None:
    for value in ("x" * 10**7, b"x" * 10**7, 16**9000, ["x" * 10**7] * 9, {"x" * 10**7: 16**9000}):
        assert len(shown(value)) < 800
    assert shown("a\x1b") == "'a\\x1b'"
    assert all(len(shown_key(text)) <= 80 for text in ("x" * 10**7, "\x1b" * 10**7))
    assert len(with_short_lines("x" * 10**7 + "\nlast")) < 2100


@pytest.mark.parametrize("text", ["[" * 10**5, '{"a":' * 10**5])
def test_json_that_is_nested_too_deeply_is_refused_by_whoever_reads_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text(text)
    deep = str(tmp_path / "deep.json")
    with pytest.raises(ValueError, match="nested too deeply"):
        of_json(text)
    assert not holds_runs(deep)
    for read in (read_runs, read_profile, read_load_factor):
        with pytest.raises(FileError, match=r"deep|recursion"):
            read(deep)
    with pytest.raises(UsageError, match="nested too deeply"):
        read_device_map(text)


def test_a_load_factor_that_no_devices_can_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(f'{{"experts": {{"load_factor": 1{400 * "0"}}}}}')
    with pytest.raises(FileError, match=r"no experts\.load_factor above 0 and at most 65536"):
        read_load_factor(str(tmp_path / "run.json"))


# Every text of every schema ------------------------------------------------------------------------------------


def models() -> Iterator[type[Any]]:
    """Everything that is read from a file."""
    for module in pkgutil.iter_modules(pipeplan.files.__path__, "pipeplan.files."):
        importlib.import_module(module.name)
    waiting: list[type[Any]] = [FileModel, trace._Lenient]
    while waiting:
        model = waiting.pop()
        if model.__module__.startswith("pipeplan."):  # tests make versions of their own
            waiting += model.__subclasses__()
            yield model
    yield Rules


def texts_in(schema: Any, place: str, seen: set[int]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, node) of every text and every value of any type in a core schema; printable ones are left out."""
    if isinstance(schema, list | tuple):
        for each in schema:
            yield from texts_in(each, place, seen)
    if not isinstance(schema, dict) or id(schema) in seen:
        return
    seen.add(id(schema))
    place = f"{place}.{schema['name']}" if schema.get("type") == "dataclass-field" else place
    if schema.get("type") == "function-after" and schema["function"]["function"] is elements._printable:
        assert "max_length" in schema["schema"], place
        return
    if schema.get("type") in ("str", "any"):
        yield place, schema
    for key, each in schema.items():
        if key not in ("metadata", "serialization", "cls", "config", "json_schema_input_schema"):
            yield from texts_in(each, f"{place}.{key}" if key not in ("schema", "fields") else place, seen)


CONTROLLED = re.compile(r"\^[^.]*\$")
"""A pattern that lists what a text may have: nothing is negated, and no dot stands for anything."""

ANY = {
    "traceEvents": "other tools' events, passed over: ours are read as _Event",
    "attributes": "looked through by _attributes",
}


@pytest.mark.parametrize("model", list(models()), ids=lambda model: model.__name__)
def test_every_text_of_a_file_is_printable(model: type[Any]) -> None:
    for place, node in texts_in(TypeAdapter(model).core_schema, model.__name__, set()):
        pattern = node.get("pattern", "")
        if node["type"] == "str":
            listed = pattern.replace("[.]", "").replace(r"\.", "")
            assert CONTROLLED.fullmatch(listed), place
            assert not re.search(r"\[\^|\\[SDW]", listed), place
        else:
            assert ANY.keys() & set(place.split(".")), place


def test_the_walk_finds_a_plain_text() -> None:
    class Careless(FileModel):
        name: Name
        other: dict[Name, tuple[str, ...]]

    found = list(texts_in(TypeAdapter(Careless).core_schema, "Careless", set()))
    assert len(found) == 1
    assert "other" in found[0][0]


@pytest.mark.parametrize("folder", ["devices", "clusters", "models", "recipes", "targets"])
def test_the_catalog_is_looked_through(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in names(folder):
        assert not list(problems_of(read_table(folder, name)))
    first = names(folder)[0]
    monkeypatch.setattr("json.loads", lambda _: {"a": [{"b": "x\x1b"}]})
    monkeypatch.setattr("tomllib.loads", lambda _: {"a": [{"b": "x\x1b"}]})
    with pytest.raises(
        ValueError, match=rf"catalog/{folder}/{re.escape(first)}: a\[0\]\.b: has U\+001B at character 2"
    ):
        read_table(folder, first)


@pytest.mark.parametrize("text", [text for text in HOSTILE.values() if text != "\ud800"])
@pytest.mark.parametrize(
    "key",
    [
        "name = {}",
        "placement = {}",
        "[[submodule]]\nblocks = {}",
        "[[submodule]]\nblocks = 'b*'\nplacement = {}",
        "[[instruction]]\nkind = 'GATHER'\nafter = {}",
        "[[instruction]]\nkind = 'GATHER'\nafter = 0\nattributes = {{ names = [{}] }}",
        "[[instruction]]\nkind = 'GATHER'\nafter = 0\nattributes = {{ {} = 1 }}",
    ],
)
def test_texts_of_rules(key: str, text: str) -> None:
    quoted = '"' + "".join(f"\\u{ord(letter):04x}" for letter in f"a{text}") + '"'
    with pytest.raises(FileError, match=rf"^mine\.toml: .*U\+{ord(text[0]):04X} at character 2") as caught:
        parse_rules(key.format(quoted), "mine", "mine.toml")
    assert not problem_of(str(caught.value))
