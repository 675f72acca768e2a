"""What names mean that a user gives, ``pkg.mod:name`` among them, and whether they mean anything; needs no torch.

Only the command line and Python can give such names, never a file. Where a name may stand, Python may give what it
would name instead: a :class:`PythonValue`.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

from pipeplan.catalog import configurations, running_models
from pipeplan.errors import UsageError, did_you_mean

_Kind = TypeVar("_Kind")

_CONFIGURATION = re.compile(r"\w+Config\s*(\(.*\))?\s*", re.DOTALL)
_WITH_ARGUMENTS = re.compile(r"([\w.-]+)\s*(\(.*\))\s*", re.DOTALL)
_OF_A_HUB = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PythonValue:
    """What Python has given where others give a name; ``name`` is what it is called in texts."""

    value: Any
    name: str

    @classmethod
    def of(cls, value: object) -> PythonValue:
        """A function by its name, anything else by its class: of a tuple by that of its first part."""
        first = value[0] if isinstance(value, tuple) and value else value
        named = first if inspect.isroutine(first) or inspect.isclass(first) else type(first)
        return cls(value, str(getattr(named, "__qualname__", type(first).__name__)))

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return repr(self.name)


Name = str | PythonValue
"""A name that a user gives, or what it would name."""


# Models -----------------------------------------------------------------------------------------------------------


def is_configuration(name: str) -> bool:
    """Whether a model's name is a Hugging Face configuration: a known one, a file, or text such as ``T5Config()``.

    A known one may have other arguments: ``llama3-8b(num_hidden_layers=4)``. A folder with a config.json means that.
    """
    is_text = _CONFIGURATION.fullmatch(name) is not None
    return _known_in(name) is not None or name.endswith(".json") or is_text or _of_folder(name) is not None


def configuration_text(name: str) -> str:
    """A configuration's path or text, with what the catalog has for a known one. Raises UsageError."""
    known = _known_in(name)
    if known is None:
        return _of_folder(name) or name
    arguments = {**configurations()[known].arguments, **_arguments(name, known)}
    return replace(configurations()[known], arguments=arguments).text


def _of_folder(name: str) -> str | None:
    """The configuration in a folder, as hubs have it beside weights."""
    file = os.path.join(name, "config.json")
    return file if os.path.isfile(file) else None  # False for a text that is too long for a path, too


def _known_in(name: str) -> str | None:
    """The known configuration that a name is, or begins with before arguments in brackets."""
    found = _WITH_ARGUMENTS.fullmatch(name)
    known = name if found is None else found[1]
    return known if known in configurations() else None


def _arguments(name: str, known: str) -> dict[str, Any]:
    """The text in parentheses after a known name."""
    if name == known:
        return {}
    try:
        match ast.parse(f"_{name.strip()[len(known) :].lstrip()}", mode="eval").body:
            case ast.Call(args=[], keywords=keywords) if all(each.arg for each in keywords):
                return {str(each.arg): ast.literal_eval(each.value) for each in keywords}
    except (SyntaxError, ValueError):
        pass
    raise UsageError(
        f"model {name!r} is not of the form {known}(num_hidden_layers=4), with numbers, texts, lists and dicts"
    )


def require_model(name: str) -> None:
    """Refuse a name that is neither a model's nor importable. Raises UsageError."""
    zoo = running_models()
    if name in zoo or is_configuration(name) or ":" in name:
        return
    known = [*zoo, *configurations()]
    if _OF_A_HUB.fullmatch(name):
        near = _named_in(name, list(configurations()))
        hint = f"try {near}, or " if near else ""
        raise UsageError(
            f"model {name!r} is a name of a hub, from which nothing is downloaded; {hint}download its config.json and "
            "give the path of that"
        )
    if os.path.isfile(f"{name.removesuffix('.py')}.py") and (module := name.removesuffix(".py")).isidentifier():
        raise UsageError(
            f"model {name!r} is a file of Python; give {module}:NAME, a function in it that returns the model and "
            "example inputs (docs/tutorials/own-model.md)"
        )
    question = did_you_mean(name, known)
    near = f" ({question})" if question else ""
    raise UsageError(
        f"model {name!r} is neither in the zoo nor well known{near}, nor a Hugging Face config.json or "
        f"SomeConfig(...), nor of the form pkg.mod:factory; docs/models.md lists the zoo's {len(zoo)} "
        f"models, docs/hugging-face.md the {len(configurations())} well-known configurations"
    )


def _named_in(name: str, known: Sequence[str]) -> str:
    """The longest known name contained in another one, ignoring characters between its letters; empty if none is."""

    def bare(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    return max((each for each in known if bare(each) in bare(name)), key=len, default="")


# Names of modules ---------------------------------------------------------------------------------------------------


def require_importable(path: str, what: str) -> None:
    """Refuse ``pkg.mod:name``, or ``pkg.mod``, that is not there, before processes start for it.

    Where the source shows it nothing is imported; else it is tried. Raises UsageError as :func:`found_at`.
    """
    if not _is_in_source(path):
        found_at(path, what)


def found_at(path: Name, what: str) -> object:
    """What ``pkg.mod:name``, or ``pkg.mod``, names; modules of the working directory are found, as by ``python -m``.

    ``what`` it is for begins errors: ``model``, ``--optimizer``. Raises UsageError where it cannot be imported.
    """
    if isinstance(path, PythonValue):
        return path.value
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return resolve_name(path)
    except (Exception, SystemExit) as error:  # whatever the module raises while it is imported
        hint = _hint(path)
        raise UsageError(
            f"{what} {path!r} cannot be imported: {type(error).__name__}: {error}{hint and f'; {hint}'}"
        ) from error


def value_of(path: Name, what: str) -> object:
    """What ``path`` names or, of a function, what it returns. Raises UsageError as :func:`made_by`."""
    found = found_at(path, what)
    return made_by(path, what) if inspect.isroutine(found) or inspect.isclass(found) else found


def made_by(path: Name, what: str, *arguments: Any, **options: Any) -> Any:
    """What the function that ``path`` names returns. Raises UsageError as :func:`found_at`, and where it fails."""
    factory = found_at(path, what)
    if not callable(factory):
        raise UsageError(f"{what} {path!r} is a {type(factory).__name__}, not a function")
    try:
        return factory(*arguments, **options)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{what} {path!r}: the factory failed: {type(error).__name__}: {error}") from error


def instance_at(path: str, what: str, kind: type[_Kind], remedy: str) -> _Kind:
    """What ``path`` names, or what a function without arguments that it names returns.

    Raises:
        UsageError: as :func:`found_at`, and where it is not of this kind; ``remedy`` is for other functions and
            classes, with {name} for theirs.
    """
    found = found_at(path, what)
    if inspect.isfunction(found) and not inspect.signature(found).parameters:
        found = made_by(path, what)
    if isinstance(found, kind):
        return found
    own = "a function with arguments" if inspect.isroutine(found) else f"a {type(found).__name__}"
    hint = f", {remedy.format(name=path.partition(':')[2])}" if callable(found) else ""
    raise UsageError(f"{what} {path!r} is {own}, not {kind.__name__} nor a function that returns them; name some{hint}")


def _hint(path: str) -> str:
    """What may have been meant; empty if that is not known."""
    module, colon, name = path.partition(":")
    if module.endswith(".py"):
        return f"leave out .py: {module.removesuffix('.py').replace('/', '.')}{colon}{name}"
    if module in sys.modules:
        known = [each for each in vars(sys.modules[module]) if not each.startswith("_")]
        return did_you_mean(name, known) if name and name not in known else ""
    top = module.partition(".")[0]
    hiding = getattr(sys.modules.get(top), "__file__", None)
    if hiding and Path(top).is_dir() and not Path(hiding).is_relative_to(Path.cwd()):
        return f"{top} is {hiding}, which hides the folder {top} here; rename the folder"
    here = [file.stem for file in Path().glob("*.py")]
    return did_you_mean(module, here) if module not in here else ""


def _is_in_source(path: str) -> bool:
    """Whether the module's source, which is not run, defines the name at its top."""
    module, _, name = path.partition(":")
    spec = _spec_of(module)
    if spec is None or spec.origin is None:
        return False
    if not name:
        return True
    try:
        body = ast.parse(Path(spec.origin).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False
    return name in _defined(body)


def _spec_of(module: str) -> ModuleSpec | None:
    """Where a module is; its packages are not imported, either."""
    where: Sequence[str] | None = [os.getcwd(), *sys.path]
    spec, parts = None, module.split(".")
    for number in range(len(parts)):
        if where is None or not parts[number]:
            return None
        spec = PathFinder.find_spec(".".join(parts[: number + 1]), where)
        where = None if spec is None else spec.submodule_search_locations
    return spec


def _defined(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that statements give a meaning to, also inside conditions and the like."""
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (each.asname or each.name.partition(".")[0] for each in names)
            case _:
                for part in ast.walk(statement):
                    if isinstance(part, ast.FunctionDef | ast.ClassDef):
                        yield part.name
                    elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                        yield part.id
