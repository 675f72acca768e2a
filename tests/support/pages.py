"""What the pages say to type, run as it stands: commands, Python and files, in the order of the page.

    PYTHONPATH=src:tests python -m support.pages [PAGE ...]

writes what commands print now into the pages that show it, for those that run here.

Of a page, in one folder that has ``profiles`` and ``plans``:

* a ``console`` block is lines that begin with ``$``, each with what it prints below it, if that is shown;
* a ``bash`` block is a script;
* a ``python`` block runs, and a ``text`` block right after it is what it prints;
* a block of any language whose first line is ``# NAME.EXT`` is a file of that name, and is not run.

What is shown is compared. A line ``...`` stands for any lines. Times that a machine takes, and what follows from them,
are masked: all of ``run`` and ``profile``, and after ``in`` elsewhere.

A comment before a block says what it needs, ``<!-- needs: cuda -->``, and is not shown. There are

* ``slow``: it takes more than five seconds, and runs with the slow tests; so do blocks after it, which may need its
  files;
* ``cuda``, ``8 devices``, ``network``, ``checkout``, ``ASTRA-sim``, ``Ray``: what this machine may not have. It does
  not run;
* ``minutes``: it takes that long on a few cores; such blocks of a page run by themselves, among the long tests;
* ``nothing``: a fragment, or a command of a shell's start-up file, that is not to run by itself;
* ``code 1``: a command that ends with this exit code.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from support.commands import pipeplan
from support.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_ABSENT = {"cuda", "8 devices", "network", "checkout", "ASTRA-sim", "Ray", "nothing"}
NEEDS = ("slow", *sorted(_ABSENT), "minutes", "code 1", "code 2")
_BLOCK = re.compile(
    r"^(?:<!-- needs: (?P<needs>[^>]*) -->\n+)?```(?P<language>console|bash|python|text|toml|json)\n"
    r"(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_FILE = re.compile(r"# (\S+\.\w+)\n")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a page, from its line, and what it needs."""

    language: str
    body: str
    needs: frozenset[str]
    line: int
    start: int

    @property
    def runs(self) -> bool:
        """Whether it is to run here."""
        return self.language in ("console", "bash", "python") and not self.needs & _ABSENT

    @property
    def file(self) -> str | None:
        """The name of the file that it is."""
        found = _FILE.match(self.body)
        return found[1] if found and self.language != "console" else None


@dataclass(frozen=True, slots=True)
class Command:
    """A command and what the page shows below it."""

    text: str
    shown: str


def blocks(page: Path) -> list[Block]:
    """A page's blocks, in order; a mark that is not known fails."""
    text, found = page.read_text(encoding="utf-8"), []
    for match in _BLOCK.finditer(text):
        needs = frozenset(each.strip() for each in (match["needs"] or "").split(",") if each.strip())
        assert needs <= set(NEEDS), f"{page}: {needs - set(NEEDS)}; known are {NEEDS}"
        line = text.count("\n", 0, match.start("body"))
        found.append(Block(match["language"], match["body"], needs, line, match.start("body")))
    return found


def commands(block: Block) -> list[Command]:
    """The commands of a ``console`` block; a line that ends with a backslash goes on."""
    found: list[Command] = []
    for part in re.split(r"^\$ ", block.body, flags=re.MULTILINE)[1:]:
        match = re.match(r"((?:.*\\\n)*.*)\n?", part)
        assert match is not None
        found.append(Command(match[1], part[match.end() :]))
    return found


def page_runs(page: Path, *, slow: bool = False, minutes: bool = False) -> bool:
    """Whether anything of a page is to run, among the slow tests, those that take minutes, or the others."""
    return any(True for _ in _to_run(page, slow=slow, minutes=minutes))


def _to_run(page: Path, *, slow: bool, minutes: bool) -> Iterator[Block]:
    """Blocks of minutes alone; or of the others the quick ones up to the first slow one, or all where one is slow."""
    known = [block for block in blocks(page) if block.runs and block.file is None]
    known = [block for block in known if ("minutes" in block.needs) == minutes]
    if minutes:
        yield from known
        return
    first = next((number for number, block in enumerate(known) if "slow" in block.needs), len(known))
    if not slow:
        yield from known[:first]
    elif first < len(known):
        yield from known


def run_page(
    page: Path, folder: Path, *, slow: bool = False, minutes: bool = False
) -> Iterator[tuple[Block, str, str, str]]:
    """Run a page in a folder: of each command or script (block, what it is, what is shown, what it printed)."""
    for name in ("profiles", "plans"):
        (folder / name).symlink_to(ROOT / name)
    known = blocks(page)
    for block in known:
        if block.file is not None:
            (folder / block.file).write_text(block.body, encoding="utf-8")
    names: dict[str, object] = {"__name__": "__page__"}
    for block in _to_run(page, slow=slow, minutes=minutes):
        if block.language == "console":
            for command in commands(block):
                yield block, command.text, command.shown, run_command(command.text, folder, _code(block))
        elif block.language == "bash":
            yield block, block.body, "", run_command(block.body, folder, _code(block))
        else:
            below = block.start + len(block.body) + len("```\n\n```text\n")
            shown = next((each.body for each in known if (each.language, each.start) == ("text", below)), "")
            yield block, block.body, shown, _run_python(block, names, folder)


def _code(block: Block) -> int:
    return next((int(each[-1]) for each in block.needs if each.startswith("code")), 0)


def run_command(text: str, folder: Path, code: int = 0) -> str:
    """What a command prints, both streams together; one of pipeplan's runs in this process."""
    arguments = shlex.split(text.replace("\\\n", " "), comments=True)
    if arguments[0] == "pipeplan" and not set(arguments) & {"|", ">", "<", "&&", "$"}:
        with mock.patch.dict(os.environ, COLUMNS="100"), mock.patch.object(sys, "path", [str(folder), *sys.path]):
            done = pipeplan(*arguments[1:], cwd=folder, together=True)
        for name in [*sys.modules]:  # a page's own modules, which another page may have, too
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                del sys.modules[name]
    else:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = os.environ | {"COLUMNS": "100", "PATH": path}
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=250,
            check=False,
        )
    assert done.returncode == code, f"{text}\nended with {done.returncode}, not {code}\n{done.stdout}"
    return _SO_FAR.sub("", str(done.stdout))


_SO_FAR = re.compile(r"^pipeplan: after [^:]*: .*\n", re.MULTILINE)
"""What is said on the way where it takes long, which depends on the machine."""


def _run_python(block: Block, names: dict[str, object], folder: Path) -> str:
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.chdir(folder),
        mock.patch.object(sys, "path", [str(folder), *sys.path]),
    ):
        exec(compile("\n" * block.line + block.body, "page", "exec"), names)
    return printed.getvalue()


# What is shown ------------------------------------------------------------------------------------------------------

_DURATION = r"\d+(?:\.\d+)?(?:ns|us|ms|s|min|h)\b"
_PERCENT = r"\(?[-+]\d+(?:\.\d+)?%\)?|\d+(?:\.\d+)?%"
_OF_A_MACHINE = re.compile(rf"{_DURATION}|{_PERCENT}|\b\d+(?:\.\d+)? (?:times\b|(?:samples|tokens)/s)|\bon \d+ cores\b")
_STRETCHED = re.compile(r"^pipeplan: \d+ processes on .*\n| \(the plan's \S+ stretched \S+ times\)", re.MULTILINE)
"""What an emulated run says of a machine that is too slow for its plan; a rank says it, whom nobody hears here."""

_OF_A_BUSY_ONE = re.compile(
    r"^(?:.*; )?(?:--trace FILE, then )?pipeplan simulate .* shows? where time went$"
    r"|^verdict .*(?:\n {9,}\S.*)*$"
    r"|(?<=^profile written to )(\S+)\n[\s\S]*",
    re.MULTILINE,
)
"""What depends on how busy the machine is: why a run took longer, and what makes a profile doubtful."""

_AFTER_IN = re.compile(rf"\b(in|after) (?:{_DURATION}|\d+(?:\.\d+)? s\b)")


def masked(command: str, text: str) -> str:
    """What is printed without times of the machine, and without blanks at ends of lines."""
    lines = "\n".join(line.rstrip() for line in text.strip().splitlines())
    if re.match(r"pipeplan (run|profile)|torchrun", command) or "--measured" in command:
        quiet = _OF_A_BUSY_ONE.sub(lambda found: found[1] or "", _STRETCHED.sub("", lines))
        return re.sub(r" {2,}", "  ", _OF_A_MACHINE.sub("TIME", re.sub(r"\n{2,}", "\n\n", quiet))).rstrip()
    return _AFTER_IN.sub(r"\1 TIME", lines)


def agrees(command: str, shown: str, printed: str) -> bool:
    """Whether what is shown, in which ``...`` stands for any lines, is what was printed."""
    parts = [re.escape(part) for part in re.split(r"^\.\.\.\n?", masked(command, shown) + "\n", flags=re.MULTILINE)]
    return not shown.strip() or re.fullmatch("(?:.*\n)*?".join(parts), masked(command, printed) + "\n") is not None


def _rewritten(page: Path, folder: Path) -> str:
    """The page with what its commands print now, where it shows something and all of it."""
    text = page.read_text(encoding="utf-8")
    for block, command, shown, printed in run_page(page, folder, slow=True) if page_runs(page, slow=True) else ():
        text = _with(text, block, command, shown, printed)
    for block, command, shown, printed in () if page_runs(page, slow=True) else run_page(page, folder, slow=False):
        text = _with(text, block, command, shown, printed)
    return text


def _with(text: str, block: Block, command: str, shown: str, printed: str) -> str:
    if not shown.strip() or agrees(command, shown, printed) or block.language != "console":
        return text
    if re.search(r"^\.\.\.$", shown, re.MULTILINE):
        print(f"{command}: shown in part, to be mended by hand", file=sys.stderr)
        return text
    lines = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    return text.replace(f"$ {command}\n{shown}", f"$ {command}\n{lines}\n", 1)


if __name__ == "__main__":
    import tempfile

    from runtime_support.warm import warm_ranks

    for page_ in PAGES:
        if any(each in str(page_) for each in sys.argv[1:] or [""]):
            with tempfile.TemporaryDirectory() as folder_, warm_ranks():
                page_.write_text(_rewritten(page_, Path(folder_)), encoding="utf-8")
