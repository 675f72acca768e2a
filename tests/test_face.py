"""The public face: what can be imported is what is promised, and it costs next to nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("networkx", "numpy", "ortools", "pydantic", "rich", "torch")

EVERY_MODULE = """
import importlib, pkgutil, pipeplan
for module in pkgutil.walk_packages(pipeplan.__path__, "pipeplan."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for name in pipeplan.__all__:
    found = getattr(pipeplan, name)
    assert callable(found) or name == "__version__", f"{name} is {found}"
assert set(dir(pipeplan)) == set(pipeplan.__all__)
"""


def said(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("module", ["pipeplan", "pipeplan.cli.main"])
def test_importing_it_imports_nothing_heavy(module: str) -> None:
    assert said(f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])") == "[]\n"


def test_no_room_takes_the_name_of_a_public_function() -> None:
    """Importing a submodule puts it over a function of the same name."""
    pytest.importorskip("torch")
    said(EVERY_MODULE)
