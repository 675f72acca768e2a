"""Which room of runtime/ each of its modules is in, and what modules import, read from their source."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pipeplan

SOURCE = Path(pipeplan.__file__).parents[1]
RUNTIME = "pipeplan.runtime"

ALLOWED = {
    "decoding": {"training", "profiling", "executor", "models", "launch", "parallel"},
    "training": {"profiling", "executor", "models", "launch", "parallel", "backends"},
    "emulation": {"executor", "launch"},
    "executor": {"models", "launch", "parallel"},
    "profiling": {"models", "launch", "parallel", "backends"},
    "models": {"launch", "parallel"},
    "launch": {"parallel"},
    "parallel": set[str](),
    "backends": set[str](),
}
"""What a room may import of the others."""

SPEC = f"{RUNTIME}.models.spec"
"""All that the executor may import of models/."""


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name."""
    found = {}
    for path in (SOURCE / "pipeplan").rglob("*.py"):
        *names, last = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(names if last == "__init__" else (*names, last))] = path
    return found


def runtime_modules() -> list[str]:
    """Those of runtime/ that are in a room."""
    return sorted(name for name in modules() if name.count(".") > 2 and name.startswith(f"{RUNTIME}."))


@cache
def room_of(module: str) -> str | None:
    """The room of a module of runtime/."""
    room = module.removeprefix(f"{RUNTIME}.").partition(".")[0]
    return room if room in ALLOWED else None


def in_room(room: str) -> list[str]:
    """The modules of a room."""
    return [module for module in runtime_modules() if room_of(module) == room]


@cache
def imports_of(module: str) -> frozenset[str]:
    """All that a module imports, also inside functions and under TYPE_CHECKING: modules of ours, names of others."""
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    return frozenset(name for node in ast.walk(tree) for name in _imported(node)) - {module}


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.module is not None
        assert node.level == 0, "imports are absolute"
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in modules() else node.module


def closure_of(start: Iterable[str], *, within: str = "pipeplan") -> set[str]:
    """Modules and all that they import of ours, directly or not, in a package."""
    found, left = set[str](), list(start)
    while left:
        module = left.pop()
        if module not in found:
            found.add(module)
            left += (name for name in imports_of(module) if name in modules() and name.startswith(f"{within}."))
    return found


def num_lines(names: Iterable[str]) -> int:
    """Lines of all these modules, as an editor counts them."""
    return sum(len(modules()[name].read_text(encoding="utf-8").splitlines()) for name in names)
