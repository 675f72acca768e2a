"""Every command, script and example of the README and of the pages runs as it stands, and prints what is shown."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from runtime_support.warm import warm_ranks
from support.pages import PAGES, agrees, blocks, commands, page_runs, run_page
from support.paths import ROOT

LONG = (
    *(
        "quickstart",
        "algorithms/frontier",
        "algorithms/tuner",
        "capture",
        "communication",
        "estimating",
        "executor",
        "export",
    ),
    *("how-to", "hugging-face", "inference", "profiling", "screens", "training"),
)
"""Pages whose commands take a quarter of a minute and more; the tutorials are among them, too."""


def _named(pages: list[Path]) -> list[object]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


def _marks(page: Path) -> list[pytest.MarkDecorator]:
    name = str(page.relative_to(ROOT)).removeprefix("docs/").removesuffix(".md")
    return [pytest.mark.slow, *([pytest.mark.long] if name in LONG or name.startswith("tutorials/") else [])]


WHOLE = [
    pytest.param(page, id=str(page.relative_to(ROOT)), marks=_marks(page))
    for page in PAGES
    if page_runs(page, slow=True)
]


def _run(page: Path, folder: Path, *, slow: bool = False, minutes: bool = False) -> None:
    for block, command, shown, printed in run_page(page, folder, slow=slow, minutes=minutes):
        assert agrees(command, shown, printed), f"{page}:{block.line}: {command}\nprints\n{printed}\nnot\n{shown}"


@pytest.mark.parametrize("page", _named([page for page in PAGES if page_runs(page, slow=False)]))
def test_page(page: Path, tmp_path: Path) -> None:
    runs = "$ pipeplan run" in page.read_text(encoding="utf-8")
    with warm_ranks() if runs else nullcontext():
        _run(page, tmp_path, slow=False)


@pytest.mark.timeout(900)  # a page with many searches and runs, on a machine that is busy
@pytest.mark.parametrize("page", WHOLE)
def test_whole_page(page: Path, tmp_path: Path) -> None:
    with warm_ranks():
        _run(page, tmp_path, slow=True)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)  # searches of one and two minutes one after another
@pytest.mark.parametrize("page", _named([page for page in PAGES if page_runs(page, minutes=True)]))
def test_blocks_of_minutes(page: Path, tmp_path: Path) -> None:
    with warm_ranks():
        _run(page, tmp_path, minutes=True)


def test_nothing_is_run_that_is_not_marked() -> None:
    """Blocks of no language are pictures, or what a file or a message looks like: no command stands in them."""
    for page in PAGES:
        fences = re.findall(r"^```(.*?)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        for body in (body for language, body in fences if not language):
            assert not re.search(r"^(\$ |pipeplan |python )", body, re.MULTILINE), f"{page}: {body}"
        run = [block for block in blocks(page) if block.language in ("console", "bash")]
        assert len(run) == sum(language in ("console", "bash") for language, _ in fences), page


def test_searches_whose_answers_are_shown_are_deterministic() -> None:
    """What a page shows of them, there or below, is then the same on every machine."""
    shown = [
        f"{page.name}: {command.text}"
        for page in PAGES
        for block in blocks(page)
        if block.language == "console"
        for command in commands(block)
        if command.text.startswith(("pipeplan search ", "pipeplan compare ")) and command.shown.strip()
    ]
    assert len(shown) >= 20
    assert [each for each in shown if "--deterministic" not in each] == []


@pytest.mark.parametrize(
    ("command", "shown", "printed", "same"),
    [
        ("pipeplan check p.json", "valid\n", "valid\n", True),
        ("pipeplan check p.json", "valid\n", "broken\n", False),
        ("pipeplan check p.json", "", "anything\n", True),
        ("pipeplan simulate p.json", "makespan 5ms\n", "makespan 6ms\n", False),
        ("pipeplan simulate p.json", "first\n...\nlast\n", "first\nsecond\nthird\nlast\n", True),
        ("pipeplan simulate p.json", "first\n...\n", "other\nsecond\n", False),
        ("pipeplan run p.json", "step 0  loss 4.1  iteration 24.1ms\n", "step 0  loss 4.1  iteration 9.5s\n", True),
        ("pipeplan run p.json", "step 0  loss 4.1  iteration 24.1ms\n", "step 0  loss 4.2  iteration 24.1ms\n", False),
    ],
)
def test_what_is_shown_is_compared(command: str, shown: str, printed: str, same: bool) -> None:
    assert agrees(command, shown, printed) is same


@pytest.mark.parametrize("page", _named([*PAGES, ROOT / "CHANGELOG.md"]))
def test_no_merge_left_anything(page: Path) -> None:
    assert not re.search(r"^(<<<<<<<|>>>>>>>)( |$)", page.read_text(encoding="utf-8"), re.MULTILINE)


# Links --------------------------------------------------------------------------------------------------------------


def _links(text: str) -> list[str]:
    without_code = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", without_code)


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as repositories and the site make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain]
    again = {f"{slug}-{number}" for slug in slugs for number in range(1, slugs.count(slug))}
    return {*slugs, *again}


@pytest.mark.parametrize("page", _named([*PAGES, ROOT / "CHANGELOG.md", ROOT / "plans" / "README.md"]))
def test_links_lead_somewhere(page: Path) -> None:
    """Internal ones to a file and a heading that are there; external ones have the form of one."""
    for link in _links(page.read_text(encoding="utf-8")):
        path, _, heading = link.partition("#")
        if "://" in path:
            parts = urlsplit(link)
            assert parts.scheme == "https", link
            assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", parts.netloc), link
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert target.is_relative_to(ROOT), link
        assert not heading or heading in _anchors(target), f"{page.name}: {link}"


def test_every_page_is_in_the_contents() -> None:
    named = set()
    for contents in (ROOT / "docs" / "index.md", ROOT / "docs" / "benchmarks" / "index.md"):
        for tree in re.findall(r"^```{toctree}\n(.*?)^```$", contents.read_text(), re.MULTILINE | re.DOTALL):
            lines = [line for line in tree.splitlines() if line and not line.startswith(":")]
            named |= {(contents.parent / f"{line}.md").resolve() for line in lines}
    pages = {page for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert named == pages - {ROOT / "docs" / "index.md"}
