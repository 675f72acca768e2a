"""Chromium of the distribution's packages, which the tests of the report drive; without it they are skipped."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """Where Chromium is, if it is there."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def why_not() -> str:
    """Why nothing can be shown in a browser here; empty where it can."""
    if chromium() is None:
        return "Chromium is not installed (apt-get install chromium)"
    missing = [name for name in ("playwright", "axe_playwright_python") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed (pip install -e '.[dev]')" if missing else ""


in_browser = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
"""Marks a test that needs the browser."""


@contextmanager
def browser() -> Iterator[Any]:
    """Headless Chromium; as root it runs without its sandbox, which it refuses to have then."""
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium(), args=arguments)
        try:
            yield launched
        finally:
            launched.close()


@dataclass
class Opened:
    """A page, and what it asked for and complained of."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


def opened(launched: Any, path: Path, *, width: int = 1280, **context: Any) -> Opened:
    """A file in a window of its own."""
    page = launched.new_context(viewport={"width": width, "height": 900}, **context).new_page()
    found = Opened(page)
    page.on("request", lambda request: found.requests.append(request.url))
    page.on("console", lambda message: found.complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: found.complaints.append(str(error)))
    page.on("dialog", lambda dialog: (found.complaints.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.goto(path.as_uri())
    wait_for(page, "timeline.frameTimes.length > 0")
    return found


def wait_for(page: Any, expression: str, polls: int = 3000) -> None:
    """Returns once a page's expression is true. Each poll is an evaluation of its own from here, which the page's
    content security policy lets be: Playwright's `wait_for_function` evaluates text inside of the page from its second
    poll on, and that is what the report's policy forbids."""
    for _ in range(polls):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(10)
    raise AssertionError(f"never true on the page: {expression}")
