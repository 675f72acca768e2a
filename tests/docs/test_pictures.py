"""The pages' pictures are what ``docs/pictures.py`` draws now."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from support.marks import slow_but
from support.paths import ROOT

_SCRIPT = ROOT / "docs" / "pictures.py"


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_pictures", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PICTURES = _script()


@slow_but("name", PICTURES.PICTURES, {"known-schedules", "repetend"}.__contains__)
def test_is_drawn_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert PICTURES.draw(name) == (PICTURES.FOLDER / f"{name}.svg").read_text(encoding="utf-8"), (
        "python docs/pictures.py draws it again"
    )


def test_every_picture_is_drawn() -> None:
    assert {path.stem for path in PICTURES.FOLDER.glob("*.svg")} == set(PICTURES.PICTURES)
