"""Photographs three reports in Chromium, for docs/report.md.

    python docs/screenshots.py [NAME ...]

writes ``docs/pictures/report-*.png``. It needs Chromium of the distribution's packages, the ``dev`` extra and torch,
with which the third plan is emulated. Letters and edges are the machine's, so a test compares the first from further
away; the second has a frontier that is as good as the machine was quick, and the third has measured times.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

from pictures import FOLDER, ROOT, pipeplan

sys.path.insert(0, str(ROOT / "tests"))

from support.browser import browser, opened

GPT2 = "profiles/gpt2-124m-cpu.json"
ASKED = (
    *("--devices", "4", "--memory", "3GB", "--mini-batch", "16", "--zero", "0"),
    *("--deterministic", "--time-limit", "3s"),
)


def one_plan() -> tuple[str, ...]:
    """A plan for estimated times."""
    return ("plans/gpt2-1.3b-a100-80gb.json",)


def two_plans() -> tuple[str, ...]:
    """1F1B beside what a search finds, and what more memory brings."""
    pipeplan("search", GPT2, *ASKED, "--placement", "one-to-one", "--scheduler", "1f1b", "-o", "1f1b.json")
    pipeplan("search", GPT2, *ASKED, "-o", "found.json")
    asked = ("--devices", "4", "--memory", "4GB", "--mini-batch", "16", "--time-limit", "10s")
    Path("frontier.json").write_text(pipeplan("frontier", GPT2, *asked, "--plans", "--json"), encoding="utf-8")
    return ("1f1b.json", "found.json", "--frontier", "frontier.json")


def measured() -> tuple[str, ...]:
    """A plan beside its emulation."""
    plan = "plans/tessel-v.json"
    pipeplan("run", plan, "--emulate", "--local", "--steps", "3", "--trace", "trace.json")
    return (plan, "--measured", "trace.json")


REPORTS = {
    "one-plan": (one_plan, 1280, "light"),
    "two-plans": (two_plans, 1280, "dark"),
    "measured": (measured, 390, "light"),
}
"""Name -> what makes the arguments of ``report``, the width of the window, and the colours that it prefers."""


def photograph(launched: Any, name: str) -> bytes:
    """Make a report in a folder of its own and photograph what a reader sees first, as PNG."""
    arguments, width, scheme = REPORTS[name]
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for name_of_folder in ("plans", "profiles"):
            Path(name_of_folder).symlink_to(ROOT / name_of_folder)
        pipeplan("report", *arguments(), "-o", "report.html")
        page = opened(launched, Path("report.html").resolve(), width=width, color_scheme=scheme).page
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        clip = {"x": 0, "y": 0, "width": width, "height": 1400}
        taken: bytes = page.screenshot(full_page=True, clip=clip)
        return taken


def main() -> None:
    """Write all, or those that are named."""
    with browser() as launched:
        for name in sys.argv[1:] or REPORTS:
            (FOLDER / f"report-{name}.png").write_bytes(photograph(launched, name))
            print(name)


if __name__ == "__main__":
    main()
