"""The public face: what can be imported is what is promised, and it costs next to nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from pipeplan import _api

HEAVY = ("networkx", "numpy", "ortools", "pydantic", "rich", "torch")

EVERY_MODULE = """
import importlib, pkgutil, pipeplan
for module in pkgutil.walk_packages(pipeplan.__path__, "pipeplan."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for name in pipeplan.__all__:
    found = getattr(pipeplan, name)
    if name == "__version__":
        continue
    try:
        found(no_such_argument=0)
    except TypeError as error:
        assert "'module' object is not callable" not in str(error), f"{name} is {found}"
    except ValueError as error:  # a file's class says what is wrong with its keys
        assert "no_such_argument" in str(error)
    else:
        raise AssertionError(f"{name} takes anything")
assert set(dir(pipeplan)) == set(pipeplan.__all__)
"""


def said(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("module", ["pipeplan", "pipeplan.cli.main"])
def test_importing_it_imports_nothing_heavy(module: str) -> None:
    assert said(f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])") == "[]\n"


def test_the_functions_behind_it_are_short() -> None:
    """At most 15 lines each, without what says how it is called and what it does."""
    tree = ast.parse(Path(_api.__file__).read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert {node.name for node in functions} >= {"search", "compare", "frontier", "simulate", "check", "profile", "run"}
    for node in functions:
        first = node.body[ast.get_docstring(node) is not None]
        assert (node.end_lineno or 0) - first.lineno < 15, node.name


def test_no_room_takes_the_name_of_a_public_function() -> None:
    """Importing a submodule puts it over a function of the same name."""
    pytest.importorskip("torch")
    said(EVERY_MODULE)
