"""The pages' pictures are what ``docs/pictures.py`` draws now."""

from __future__ import annotations

import importlib.util
import re
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


def test_pages_say_what_their_pictures_show() -> None:
    """Seconds of both runs in the README, and bubbles of all schedules in the introduction."""
    texts = {name: (PICTURES.FOLDER / f"{name}.svg").read_text(encoding="utf-8") for name in PICTURES.PICTURES}
    readme, introduction = (ROOT / "README.md").read_text(), (ROOT / "docs" / "introduction.md").read_text()
    seconds = re.findall(r"micro-batches, ([\d.]+)s,", texts["before-after"])
    assert len(seconds) == 2
    assert all(f"{float(each):.1f} s" in readme for each in seconds)
    bubbles = re.findall(r"idle for ([\d.]+)% of it", texts["known-schedules"] + texts["zero-bubble"])
    assert len(bubbles) == 6
    assert all(f"{float(each):g} %" in introduction for each in bubbles)
