"""The pages' pictures are what ``docs/pictures.py`` draws now."""

from __future__ import annotations

import base64
import importlib.util
import re
from types import ModuleType

import pytest

from support.browser import browser, in_browser
from support.marks import slow_but
from support.paths import ROOT


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PICTURES = _script("pictures")


@slow_but(
    "name",
    PICTURES.PICTURES,
    {"known-schedules", "repetend"}.__contains__,
    ("before-after", "search-80", "search-140").__contains__,
)
def test_is_drawn_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert PICTURES.draw(name) == (PICTURES.FOLDER / f"{name}.svg").read_text(encoding="utf-8"), (
        "python docs/pictures.py draws it again"
    )


_APART = """async (pictures) => {
    const [one, other] = await Promise.all(pictures.map(async (data) => {
        const image = new Image();
        image.src = "data:image/png;base64," + data;
        await image.decode();
        const canvas = document.createElement("canvas");
        [canvas.width, canvas.height] = [image.width / 10, image.height / 10];
        const context = canvas.getContext("2d");
        context.imageSmoothingQuality = "high";
        context.drawImage(image, 0, 0, canvas.width, canvas.height);
        return context.getImageData(0, 0, canvas.width, canvas.height).data;
    }));
    return one.filter((value, place) => Math.abs(value - other[place]) > 32).length / one.length;
}"""
"""The share of a picture, at a tenth of its size, that looks otherwise in another."""


@in_browser
@pytest.mark.slow
def test_a_report_is_photographed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    script = _script("screenshots")
    with browser() as launched:
        taken = script.photograph(launched, "one-plan")
        page = launched.new_page()

        def apart(name: str) -> float:
            kept = (PICTURES.FOLDER / f"report-{name}.png").read_bytes()
            share: float = page.evaluate(_APART, [base64.b64encode(each).decode() for each in (taken, kept)])
            return share

        assert apart("one-plan") < 0.02, "python docs/screenshots.py takes it again"
        assert apart("two-plans") > 0.1, "another page looks otherwise"


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
