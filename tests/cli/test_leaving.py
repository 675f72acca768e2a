"""How the command's process ends: at once, but in order where something needs that."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import pipeplan
from pipeplan.cli import leaving

COMMAND = """
import atexit, os, sys
from pipeplan import __main__
{more}
class Kept:
    def __del__(self, write=os.write):
        write(1, b"taken apart\\n")

sys.kept = Kept()
atexit.register(print, "at exit", flush=True)
sys.argv = ["pipeplan", *sys.argv[1:]]
__main__.command()
"""


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was done to end this process, which goes on."""
    done: list[object] = []
    monkeypatch.setattr(leaving.atexit, "_run_exitfuncs", lambda: done.append("at exit"))
    monkeypatch.setattr(os, "_exit", done.append)
    for what in ("getprofile", "gettrace"):
        monkeypatch.setattr(sys, what, lambda: None)
    monkeypatch.setattr(sys, "modules", {name: each for name, each in sys.modules.items() if name != "torch"})
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread()])
    monkeypatch.setattr(os, "listdir", lambda path: [])
    return done


def test_registered_functions_come_first(ended: list[object]) -> None:
    leaving.leave(3)
    assert ended == ["at exit", 3]


def test_torch_ends_in_order(ended: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", os)
    leaving.leave(3)
    assert not ended


def test_what_watches_ends_in_order(ended: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "getprofile", lambda: print)
    leaving.leave(3)
    assert not ended


def test_threads_are_waited_for(ended: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    other = threading.Thread(daemon=True)
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread(), other])
    leaving.leave(0)
    assert ended == ["at exit", 0]
    other.daemon = False
    leaving.leave(1)
    assert ended == ["at exit", 0]


def test_open_files_are_closed_in_order(ended: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those that are written; what is read loses nothing, and pipes and terminals are no files."""
    (tmp_path / "file").write_text("")
    with (tmp_path / "file").open("a") as file:
        monkeypatch.setattr(os, "listdir", lambda path: [str(file.fileno())])
        leaving.leave(0)
    assert not ended
    with (tmp_path / "file").open() as file:
        monkeypatch.setattr(os, "listdir", lambda path: [str(file.fileno()), "12345"])
        leaving.leave(0)
    assert ended == ["at exit", 0]


@pytest.mark.parametrize(("code", "left"), [(3, [3]), (None, [0]), ("no such backend", [])])
def test_words_that_a_process_ends_with_are_printed(
    code: int | str | None, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python does it: a module of the user's may end it so."""
    done: list[int] = []
    monkeypatch.setattr(leaving, "leave", done.append)
    ended = runpy.run_path(pipeplan.__path__[0] + "/__main__.py")  # imported it would be found by who runs the package
    monkeypatch.setitem(ended["command"].__globals__, "main", lambda: sys.exit(code))
    with pytest.raises(SystemExit) as raised:
        ended["command"]()
    assert (done, raised.value.code) == (left, code)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "said"),
    [("", "at exit\n"), ("sys.log = open('log', 'w'); sys.log.write('all')", "at exit\ntaken apart\n")],
)
def test_nothing_is_taken_apart_at_the_end(more: str, said: str, tmp_path: Path) -> None:
    """Unless a file is open, which is written."""
    (tmp_path / "ends.py").write_text(COMMAND.format(more=more))
    command = [sys.executable, "-m", "ends", "example", "shape-v", "--devices", "4", "-o", "v.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, said), done.stderr
    assert not more or (tmp_path / "log").read_text() == "all"
