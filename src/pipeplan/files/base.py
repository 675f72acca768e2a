"""What the file formats have in common: strict frozen models, versions and their migrations, canonical texts.

A kind of file is at version 1 plus the number of its migrations. A migration is a pure function from the file's
content at version n to its content at version n + 1. The content it gets has the form of version n: every key is there,
with its default where the file left it out, and every value has its JSON type. It need not keep ``schema_version``. A
placement inside a profile is part of the profile, so a new version of placements is a new version of profiles too,
whose migration takes the placement along.

To add a version: change the model, enter the migration in the same module, before it, and run
``python -m pipeplan.files.schema docs/schema``. Renaming a key of a profile's blocks and adding one without a default
would be::

    def _blocks_have_a_family(profile: Content) -> Content:
        blocks = [{"family": block["operator"], "layer": 0, ...} for block in profile["blocks"]]
        return profile | {"blocks": blocks}

    MIGRATIONS["profile", 1] = _blocks_have_a_family

A key that is new and has a default needs a migration that changes nothing: the version says which keys a fingerprint
is taken of. A key that files leave out where it has its default (``SAID_ONLY``) may come within a version: no text
that was written before changes, and an earlier pipeplan refuses a file that says it.

The *form* of every version, kept in ``versions/``, has its keys in order, their defaults and JSON types: a JSON Schema
without names, ranges and patterns. It is written when its version is new, and never changed. A file's *canonical text*
is its JSON without blanks, with every key written out in the order of its version's form, and with numbers that may
have a fraction always written with one. Its fingerprint is the sha256 of that: it depends neither on layout nor on
which defaults are written out, and a later version of the format leaves it as it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.resources import files
from operator import eq
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, core_schema, to_json

from pipeplan.display import Displayed
from pipeplan.workload.elements import WRITTEN_WHERE_SAID, Name, Printable, Text

# Versions -----------------------------------------------------------------------------------------------------------


Content = dict[str, Any]
"""A file as JSON has it: dictionaries, lists, texts, numbers, booleans and None."""

Migration = Callable[[Content], Content]

MIGRATIONS: dict[tuple[str, int], Migration] = {}
"""What leads from version n of a kind of file to n + 1, by kind and n; entered in the modules of the kinds."""


def current_version(kind: str) -> int:
    """The version that files of a kind are written in; all from 1 to this one are read."""
    version = 1
    while (kind, version) in MIGRATIONS:
        version += 1
    return version


class ShortForm(NamedTuple):
    """How the files of a version may be written shorter. What is read, and its fingerprint, are the whole form's."""

    said: Migration
    whole: Migration
    """Raises ValueError, with the place in the file, where there is nothing that it could mean."""
    mark: str
    """Files without this text are none that are written so."""


SHORT_FORMS: dict[tuple[str, int], ShortForm] = {}
"""By kind and version; entered like migrations."""


# Models -------------------------------------------------------------------------------------------------------------


class FileModel(BaseModel):
    """Base of everything read from a file: frozen, unknown keys refused, no conversion between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class File(FileModel, Displayed):
    """Base of a whole file."""

    _read_sha256: str = PrivateAttr(default="")

    def __str__(self) -> str:
        return repr(self)

    @property
    def read_sha256(self) -> str:
        """Fingerprint of the file this was read from, if that is of an earlier version; empty if not."""
        return self._read_sha256

    @cached_property
    def where(self) -> str:
        """The file this was read from, for errors that show only later; else what it is called."""
        return " ".join((self.__class__.__name__.lower(), repr(getattr(self, "name", "")))).removesuffix(" ''")

    def read_from(self, where: str) -> Self:
        """Note the file this was read from, which makes no difference to what it says."""
        self.__dict__["where"] = where
        return self

    def read_as(self, sha256: str) -> Self:
        """Note the fingerprint of the earlier version this was read from."""
        self._read_sha256 = sha256
        self.__dict__.pop("fingerprint", None)
        return self

    @cached_property
    def fingerprint(self) -> str:
        """As :func:`sha256_of` has it: of what is read but once, and looked at again with every plan."""
        return self.read_sha256 or sha256_of_text(self.model_dump_json())

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy; with changes it is no longer what was read."""
        copied = super().model_copy(update=update, deep=deep)
        if not update:
            return copied
        for derived in copied.__dict__.keys() - type(copied).model_fields.keys() - {"where"}:
            del copied.__dict__[derived]
        return copied.read_as("")


@dataclass(frozen=True, slots=True)
class CurrentVersion:
    """Annotates a ``schema_version``: the current one of its kind, as :mod:`pipeplan.files.base` says."""

    kind: str

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> CoreSchema:
        return core_schema.literal_schema([current_version(self.kind)])


class Source(FileModel):
    """Where the numbers of a profile or a cluster came from."""

    method: Annotated[
        str,
        Field(
            pattern="^(measured|estimated|literature)$",
            description="measured on a machine, estimated by closed forms, or taken from a paper",
        ),
    ]
    device: Annotated[str, Printable(512), Field(description="device the numbers are for")] = ""
    dtype: Annotated[str, Printable(64), Field(description="number format, such as float32")] = ""
    versions: Annotated[dict[Name, Text], Field(description="versions of what measured, by name")] = {}
    date: Annotated[
        str, Field(pattern="^([0-9]{4}-[0-9]{2}-[0-9]{2})?$", description="day of the measurement, ISO")
    ] = ""
    reference: Annotated[str, Printable(2048), Field(description="for literature: paper and table or figure")] = ""
    notes: Annotated[Text, Field(description="anything a reader must know to trust it")] = ""


# Forms, canonical texts and fingerprints ----------------------------------------------------------------------------


FOLDER = "versions"
"""Inside this package; a file ``KIND.VERSION.json`` for each version of each kind."""

Form = dict[str, Any]

SAID_ONLY = WRITTEN_WHERE_SAID
"""Marks a key that files and canonical texts leave out where it has its default: one that came within a version."""


def said_only(default: object, description: str, **bounds: float) -> Any:
    """The field of such a key, which pydantic leaves out by itself."""
    more: dict[str, Any] = {"json_schema_extra": {SAID_ONLY: True}, "exclude_if": partial(eq, default)}
    return Field(description=description, **more, **bounds)  # type: ignore[call-overload]  # any of its arguments


_Place = tuple[str | int, ...]

_JSON_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "object": ((dict,), "dict_type"),
    "array": ((list,), "list_type"),
    "string": ((str,), "string_type"),
    "integer": ((int,), "int_type"),
    "number": ((int, float), "float_type"),
    "boolean": ((bool,), "bool_type"),
    "null": ((type(None),), "none_required"),
}
"""By the schema's name: what JSON is read as, and what pydantic calls the error where it is something else."""


def sha256_of(file: File) -> str:
    """Fingerprint of a file's meaning: sha256 of its canonical text, at the version in which it was read."""
    return file.fingerprint


def sha256_of_text(text: str) -> str:
    """Fingerprint of a canonical text."""
    return hashlib.sha256(text.encode()).hexdigest()


def canonical_text(content: Content) -> str:
    """The canonical text of what :func:`completed` gave."""
    return to_json(content, inf_nan_mode="constants").decode()


def form_of_version(kind: str, version: int) -> Form:
    """The form that a version of a kind of file has, or had."""
    form: Form = json.loads(files(__package__).joinpath(FOLDER, f"{kind}.{version}.json").read_bytes())
    return form


def keys_at(form: Form, place: Iterable[str | int]) -> list[str]:
    """The keys that a form has at a place inside a file; none where it is no place for an object with known keys."""
    for part in place:
        forms = [*form.get("anyOf", ()), form]
        inner = (_inside(each, part) for each in forms)
        form = next((each for each in inner if each is not None), {})
    objects = (each for each in [*form.get("anyOf", ()), form] if "properties" in each)
    return list(next(objects, {"properties": ()})["properties"])


def _inside(form: Form, part: str | int) -> Form | None:
    """The form of a member of what has a form, if it says one."""
    if isinstance(part, int):
        prefix: list[Form] = form.get("prefixItems", [])
        inner: Form | None = prefix[part] if part < len(prefix) else form.get("items")
    else:
        inner = form.get("properties", {}).get(part, form.get("values"))
    return inner


def completed(content: Any, form: Form, place: _Place = ()) -> Any:
    """A file's content with every key of its form, in its order.

    Raises:
        ValidationError: a key is missing or unknown, or a value has the wrong JSON type; the first of these problems.
    """
    choices = form.get("anyOf", [form])
    form = next((each for each in choices if _has_type(content, each)), {})
    if not form:
        raise _problem(_JSON_TYPES[choices[0]["type"]][1], place, content)
    if "const" in form and content != form["const"]:
        raise _problem("literal_error", place, content, {"expected": repr(form["const"])})
    if "properties" in form:
        return _completed_object(content, form, place)
    if "values" in form:
        return {key: completed(value, form["values"], (*place, key)) for key, value in content.items()}
    if "items" in form:
        return [completed(value, form["items"], (*place, index)) for index, value in enumerate(content)]
    if "prefixItems" in form:
        pairs = zip(content, form["prefixItems"], strict=False)
        known = [completed(value, each, (*place, index)) for index, (value, each) in enumerate(pairs)]
        return known + content[len(known) :]  # validation refuses what is too much
    return _with_fraction(content) if form["type"] == "number" else content


def _completed_object(content: Content, form: Form, place: _Place) -> Content:
    found, properties = {}, form["properties"]
    for key, each in properties.items():
        if key not in content and key in form.get("required", ()):
            raise _problem("missing", (*place, key), content)
        if each.get(SAID_ONLY) and content.get(key, each["default"]) == each["default"]:
            continue
        found[key] = completed(content.get(key, each.get("default")), each, (*place, key))
    for key, value in content.items():
        if key not in properties:
            raise _problem("extra_forbidden", (*place, key), value)
    return found


def _has_type(content: Any, form: Form) -> bool:
    types, _ = _JSON_TYPES[form["type"]]
    return isinstance(content, types) and (type(content) is not bool or bool in types)


def _with_fraction(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # no valid file has a number that large
        return number


def _problem(type_: str, place: _Place, given: Any, context: dict[str, str] | None = None) -> ValidationError:
    detail = InitErrorDetails(type=type_, loc=place, input=given, ctx=context or {})
    return ValidationError.from_exception_data("file", [detail], input_type="json")
