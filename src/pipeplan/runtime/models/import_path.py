"""What ``pkg.mod:name`` on a command line means. Names come from whoever starts the command, never from a file."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from pipeplan.errors import UsageError

__all__ = ["imported", "imported_module", "made_by", "value_of"]

Found = TypeVar("Found")


def imported(path: str, what: str) -> Callable[..., Any]:
    """The function or class that ``path`` names; modules of the working directory are found, as by ``python -m``.

    Args:
        path: ``pkg.mod:name``.
        what: what it is for, which errors begin with: ``model``, ``--optimizer``.

    Raises:
        UsageError: it cannot be imported, or cannot be called.
    """
    found = _found(path, what)
    if not callable(found):
        raise UsageError(f"{what} {path!r} is a {type(found).__name__}, not a function")
    return found


def value_of(path: str, what: str) -> object:
    """What ``path`` names or, of a function, what it returns. Raises UsageError as :func:`made_by`."""
    found = _found(path, what)
    return _called(found, path, what) if inspect.isroutine(found) or inspect.isclass(found) else found


def imported_module(path: str, what: str) -> ModuleType:
    """The module that ``path``, as ``pkg.mod``, names. Raises UsageError as :func:`imported`."""
    return _importing(path, what, lambda: importlib.import_module(path))


def _found(path: str, what: str) -> object:
    module_name, _, attribute = path.partition(":")
    return _importing(path, what, lambda: getattr(importlib.import_module(module_name), attribute))


def _importing(path: str, what: str, find: Callable[[], Found]) -> Found:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return find()
    except Exception as error:  # whatever the module raises while it is imported
        raise UsageError(f"{what} {path!r} cannot be imported: {type(error).__name__}: {error}") from error


def made_by(path: str, what: str, *arguments: Any, **options: Any) -> Any:
    """What the function that ``path`` names returns.

    Raises:
        UsageError: as :func:`imported`, or the function failed.
    """
    return _called(imported(path, what), path, what, *arguments, **options)


def _called(factory: Callable[..., Any], path: str, what: str, *arguments: Any, **options: Any) -> Any:
    try:
        return factory(*arguments, **options)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{what} {path!r}: the factory failed: {type(error).__name__}: {error}") from error
