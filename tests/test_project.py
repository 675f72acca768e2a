"""The public face, the README's commands, and what every module must keep to."""

from __future__ import annotations

import importlib
import pkgutil

import pipeplan
from support.paths import ROOT


def test_all_is_importable() -> None:
    for module in pkgutil.walk_packages(pipeplan.__path__, "pipeplan."):
        if ".runtime" in module.name or module.name == "pipeplan.__main__":
            continue
        loaded = importlib.import_module(module.name)
        for name in getattr(loaded, "__all__", ()):
            assert hasattr(loaded, name), f"{module.name}.__all__ names {name}"


def test_readme_has_the_two_commands() -> None:
    blocks = (ROOT / "README.md").read_text().split("```bash\n")[1:]
    assert len(blocks) == 2
    for block in blocks:
        assert block.split("```")[0].startswith("python3 -m venv .venv && .venv/bin/pip install ")
