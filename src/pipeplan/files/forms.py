"""The form of every version of a file: its keys in order, their defaults and JSON types, kept in ``versions/``.

A file's *canonical text* is its JSON without blanks, with every key written out in the order of its version's form,
and with numbers that may have a fraction always written with one. Its fingerprint is the sha256 of that: it depends
neither on layout nor on which defaults are written out, and a later version of the format leaves it as it is.

A form is a JSON Schema without names, ranges and patterns. It is written when its version is new, and never changed.
"""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, to_json

from pipeplan.files.base import File
from pipeplan.files.migrations import Content

__all__ = ["FOLDER", "Form", "canonical_text", "completed", "form_of", "form_of_version", "sha256_of", "sha256_of_text"]

FOLDER = "versions"
"""Inside this package; a file ``KIND.VERSION.json`` for each version of each kind."""

Form = dict[str, Any]

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
    return file.read_sha256 or sha256_of_text(file.model_dump_json())


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


def form_of(schema: dict[str, Any]) -> Form:
    """The form that a JSON Schema describes, as pydantic makes them."""
    return _form_of(schema, schema.get("$defs", {}))


def _form_of(schema: dict[str, Any], named: dict[str, Any]) -> Form:
    if "$ref" in schema:
        schema = named[schema["$ref"].rpartition("/")[2]] | schema
    form: Form = {key: schema[key] for key in ("type", "const", "required", "default") if key in schema}
    for key in ("anyOf", "prefixItems"):
        if key in schema:
            form[key] = [_form_of(each, named) for each in schema[key]]
    if "items" in schema:
        form["items"] = _form_of(schema["items"], named)
    if "properties" in schema:
        form["properties"] = {key: _form_of(each, named) for key, each in schema["properties"].items()}
    elif schema.get("type") == "object":
        (values,) = schema.get("patternProperties", {"": schema.get("additionalProperties")}).values()
        form["values"] = _form_of(values, named)
    return form


def completed(content: Any, form: Form, place: _Place = ()) -> Any:
    """A file's content with every key of its form, in its order.

    Raises:
        ValidationError: a key is missing or unknown, or a value has the wrong JSON type; the first of these problems.
    """
    choices = form.get("anyOf", [form])
    form = next((each for each in choices if _has_type(content, each)), {})
    if not form:
        raise _problem(_JSON_TYPES[choices[0]["type"]][1], place, content)
    if content != form.get("const", content):
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
    except OverflowError:  # no valid file has such a number
        return number


def _problem(type_: str, place: _Place, given: Any, context: dict[str, str] | None = None) -> ValidationError:
    detail = InitErrorDetails(type=type_, loc=place, input=given, ctx=context or {})
    return ValidationError.from_exception_data("file", [detail], input_type="json")
