"""Hugging Face configurations from a local file or from text: data, never code, and never a download."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeplan.errors import UsageError

__all__ = ["Description", "configuration", "describe"]

Description = tuple[str, dict[str, Any], bool]
"""A family's ``model_type`` or class name, its keyword arguments, and whether unknown ones are mistakes."""

_IGNORED = {
    "architectures", "attn_implementation", "auto_map", "dtype", "experts_implementation", "model_type",
    "output_attentions", "output_hidden_states", "output_router_logits", "quantization_config", "return_dict",
    "torch_dtype", "torchscript",
}  # fmt: skip
"""Keys that would bring in other code, formats or outputs; models are made from their class, in float32."""


def describe(text: str) -> Description:
    """What a path of a ``config.json``, or a text such as ``LlamaConfig(hidden_size=512)``, says.

    Raises:
        UsageError: no such file, one that is not a configuration, or text with anything but literals.
    """
    if text.endswith(".json"):
        return _from_file(Path(text))
    try:
        expression = ast.parse(text.strip(), mode="eval").body
        match expression:
            case ast.Name(id=name):
                return name, {}, True
            case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords) if all(each.arg for each in keywords):
                return name, {str(each.arg): ast.literal_eval(each.value) for each in keywords}, True
    except (SyntaxError, ValueError):
        pass
    raise UsageError(
        f"configuration {text!r} is neither the path of a config.json nor of the form "
        "LlamaConfig(hidden_size=512, num_hidden_layers=4) with numbers, texts, lists and dicts; "
        "nothing is downloaded, so save the config.json of a model of the hub first"
    )


def _from_file(path: Path) -> Description:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"configuration {path} cannot be read: {error.strerror}; nothing is downloaded, so save the config.json "
            "of a model of the hub first"
        ) from error
    except ValueError as error:
        raise UsageError(f"configuration {path} is not JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise UsageError(f"configuration {path} has no 'model_type', so it is not one of transformers")
    return found["model_type"], found, False


def configuration(cls: Any, keywords: Mapping[str, Any], strict: bool, where: str) -> Any:
    """A configuration of a class of transformers.

    Args:
        cls: the class.
        keywords: its arguments; those of nested configurations are dicts.
        strict: refuse arguments that the class does not have, which transformers would keep without using them.
        where: for errors.

    Raises:
        UsageError: an unknown argument, or values that the class refuses.
    """
    if strict:
        _refuse_unknown(cls(), keywords, where)
    try:
        return cls(**{key: value for key, value in keywords.items() if key not in _IGNORED})
    except Exception as error:  # whatever the class raises
        raise UsageError(
            f"configuration {where}: {cls.__name__} refuses it: {type(error).__name__}: {error}"
        ) from error


def _refuse_unknown(default: Any, keywords: Mapping[str, Any], where: str) -> None:
    older = ("rope_scaling", "rope_theta") if hasattr(default, "rope_parameters") else ()
    known = {key for key in (*vars(default), *default.attribute_map, *older) if not key.startswith("_")}
    for key, value in keywords.items():
        if key not in known:
            raise UsageError(
                f"configuration {where}: {type(default).__name__} has no argument {key!r}; it has "
                f"{', '.join(sorted(known))}"
            )
        if isinstance(value, Mapping) and hasattr(getattr(default, key), "attribute_map"):
            _refuse_unknown(getattr(default, key), value, where)
