"""Ctrl-C, however often, ends a command with one line and exit code 130; closed streams make no difference."""

from __future__ import annotations

import errno
import io
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from pipeplan.cli.output import say
from pipeplan.cli.shared import Status
from pipeplan.cli.survivor import survived
from pipeplan.examples import shape
from pipeplan.files import to_json
from support.marks import one_in, slow_but

INTERRUPTED = """
import atexit, os, signal
from pipeplan.cli import main

def interrupt(*_, **__):
    os.kill(os.getpid(), signal.SIGINT)

atexit.register(interrupt)  # while torch leaves
main.LazyGroup.format_commands = interrupt
{more}
main.main()
"""
TWICE = "main.click.echo = interrupt"
"""Also while the first one is answered."""


def interrupted(folder: Path, more: str = "") -> tuple[int, str]:
    """Exit code and standard error of a command that is interrupted, and once more as its process ends."""
    (folder / "command.py").write_text(INTERRUPTED.format(more=more))
    command = [sys.executable, "-m", "command", "--help"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_a_second_interruption_while_the_process_ends(tmp_path: Path) -> None:
    assert interrupted(tmp_path) == (130, "\npipeplan: interrupted\n")


def test_an_interruption_inside_text_that_is_run(tmp_path: Path) -> None:
    """As dataclasses are made, or named tuples, while a module is imported."""
    inside = "main.LazyGroup.format_commands = lambda *_: exec('interrupt()', globals())"
    assert interrupted(tmp_path, inside) == (130, "\npipeplan: interrupted\n")


def test_an_interruption_before_the_verb(tmp_path: Path) -> None:
    """While click is still looking at the command line."""
    assert interrupted(tmp_path, "main.cli._main_shell_completion = interrupt") == (130, "pipeplan: interrupted\n")


def test_an_interruption_before_the_command_line_is_looked_at(tmp_path: Path) -> None:
    assert interrupted(tmp_path, "main._open_closed_streams = interrupt") == (130, "pipeplan: interrupted\n")


def test_a_second_interruption_while_the_first_is_answered(tmp_path: Path) -> None:
    assert interrupted(tmp_path, TWICE) == (130, "\n")


def test_streams_that_the_shell_has_closed(tmp_path: Path) -> None:
    """Their numbers are those of no other file."""
    (tmp_path / "command.py").write_text(
        "import os, sys\n"
        "from pipeplan.cli import main\n"
        "main.LazyGroup.format_commands = lambda *_: print('opened as', os.open('command.py', os.O_RDONLY) > 2)\n"
        "main.main()\n"
    )
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        command = f"'{sys.executable}' -m command --help {closed}"
        done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), closed
        assert ">" in closed.replace("2>", "") or "opened as True" in done.stdout


def test_a_second_interruption_while_the_first_ends_an_import(tmp_path: Path) -> None:
    """Of the command line itself: nothing of it hears signals yet."""
    more = "atexit.register(os.kill, os.getpid(), signal.SIGINT)\nmain()"
    (tmp_path / "command.py").write_text(
        IMPORTING.format(name="pipeplan.cli.main", number="SIGINT").replace("\nmain()", f"\n{more}")
    )
    done = subprocess.run([sys.executable, "-m", "command"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "pipeplan: interrupted\n")


IMPORTING = """
import atexit, os, signal, sys
from pipeplan.__main__ import main

class Finder:
    def find_spec(self, name, *_):
        if name == {name!r}:
            os.kill(os.getpid(), signal.{number})

atexit.register(lambda: print({name!r} in sys.modules))
sys.meta_path.insert(0, Finder())
main()
"""
"""A signal comes as a module is imported."""


def test_an_interruption_where_python_ignores_it_comes_again(tmp_path: Path) -> None:
    """As in what it calls when the lock of an import is let go: it was lost, and the command went on."""
    (tmp_path / "p.json").write_text(to_json(shape("v", 4)))
    signals = "os.kill(os.getpid(), signal.SIGINT)"
    ignored = f"weakref.finalize(Finder(), lambda: [{signals}, time.sleep(0)])"
    own = IMPORTING.format(name="pipeplan.cli.main", number="SIGINT").replace(signals, ignored)
    (tmp_path / "command.py").write_text(f"import time, weakref\n{own}")
    command = [sys.executable, "-m", "command", "search", "p.json", "--devices", "4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (130, "pipeplan: interrupted")


@one_in(
    2,
    "name, number, arguments",
    [
        ("pipeplan.cli.main", "SIGINT", "search"),
        ("pipeplan.planning.steps", "SIGINT", "search"),
        ("pipeplan.planning.tuning", "SIGTERM", "search --scheduler rules"),
        ("pipeplan.planning.comparison", "SIGHUP", "compare"),
        ("pipeplan.planning.plan_frontier", "SIGINT", "frontier --plans"),
    ],
)
def test_an_interruption_while_planning_is_imported(name: str, number: str, arguments: str, tmp_path: Path) -> None:
    """It ends the command there, before anything could be lost: imports take more than half a second when busy."""
    (tmp_path / "p.json").write_text(to_json(shape("v", 4)))
    (tmp_path / "command.py").write_text(IMPORTING.format(name=name, number=number))
    verb, *flags = arguments.split()
    command = [sys.executable, "-m", "command", verb, "p.json", "--devices", "4", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "False\n", "pipeplan: interrupted")


SURVIVED = """
import os, sys, time
from pathlib import Path
from pipeplan.cli import survivor
from pipeplan.cli.survivor import survived

waited = survivor._ended
survivor._ended = lambda *given: time.sleep({late}) or waited(*given)
ended = survived(lambda: "a group" if Path("begun").exists() else None, print)
if ended is not None:
    sys.exit(ended)
try:
    {work}
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("late", [0, 0.5])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_who_outlives_its_work_hands_signals_on(number: signal.Signals, code: int, late: float) -> None:
    """It alone hears a terminal's Ctrl-C, also before it has begun to wait."""
    work = "print(os.getpgid(0) == os.getpid() != os.getppid(), flush=True); time.sleep(20)"
    command = [sys.executable, "-c", SURVIVED.format(work=work, late=late)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        process.send_signal(number)
        assert process.wait() == code


@pytest.mark.parametrize(
    ("before", "code", "told"),
    [
        ("Path('begun').touch()", 3, "a group: the process died with signal SIGABRT; refused, and measuring goes on"),
        ("None", 1, "ExecutionError: the process that measured died with signal SIGABRT, and had not begun"),
    ],
)
def test_work_whose_process_dies_goes_on_in_another(before: str, code: int, told: str, tmp_path: Path) -> None:
    work = f"sys.exit(3) if Path('begun').exists() else {before}; os.abort()"
    command = [sys.executable, "-c", SURVIVED.format(work=work, late=0)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert told in done.stdout + done.stderr


WRITING = """
import os, signal
from pipeplan import _api
from pipeplan.cli import main

write = _api.write_text

def interrupted(*given):
    os.kill(os.getpid(), signal.{name})
    return write(*given)

_api.write_text = interrupted
main.main()
"""


@slow_but(
    "verb,name",
    [(verb, name) for verb in ("search", "frontier", "kernels") for name in ("SIGINT", "SIGTERM", "SIGHUP")],
    lambda each: each == ("search", "SIGTERM"),
    lambda each: each != ("frontier", "SIGHUP"),
)
def test_a_signal_while_a_plan_is_written_takes_nothing_along(verb: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "command.py").write_text(WRITING.format(name=name))
    (tmp_path / "p.json").write_text(to_json(shape("v", 2)))
    more = {
        "search": ("--microbatches", "4", "--scheduler", "1f1b"),
        "frontier": ("--plans", "--devices", "2", "--mini-batch", "4", "--time-limit", "2s"),
        "kernels": (),
    }
    command = [sys.executable, "-m", "command", verb, "p.json", *more[verb], "-o", "plan.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plan.json").read_text().startswith("{")


class Terminal(io.TextIOBase):
    """A terminal that can go."""

    gone = False

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.gone:
            raise OSError(errno.EIO, "Input/output error")
        return len(text)

    def flush(self) -> None:
        self.write("")


@pytest.mark.parametrize("begun", [False, True])
def test_messages_to_a_terminal_that_has_gone_end_nothing(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal: Any = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    terminal.gone = not begun
    with Status() as progress:
        progress("searching", 10, 5, 1.0)
        terminal.gone = True
        progress("searching", 9, 5, 10.0)
    say("anything", err=True)


@pytest.mark.slow
def test_a_terminal_that_closes_leaves_the_best_plan(tmp_path: Path) -> None:
    """Its window is closed: nothing can be said any more, and the hangup ends the search."""
    made = [sys.executable, "-m", "pipeplan", "example", "gpt2-345m", "-o", "p.json"]
    subprocess.run(made, cwd=tmp_path, check=True, capture_output=True)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pipeplan", "search", "p.json", "--devices", "16", "--mini-batch", "64"]
    how: dict[str, Any] = {"cwd": tmp_path, "stdin": theirs, "stdout": theirs, "stderr": theirs}
    with subprocess.Popen([*command, "--time-limit", "120s", "-o", "plan.json"], start_new_session=True, **how) as run:
        os.close(theirs)
        shown = b""
        while shown.count(b"best") < 4:  # by then the first of them is a plan
            shown += os.read(ours, 4096)
        os.close(ours)
        run.send_signal(signal.SIGHUP)
        run.wait(60)
    assert (tmp_path / "plan.json").read_text().startswith("{")


def test_a_program_that_takes_what_a_command_prints_is_not_copied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The copy would go on with that program's work, as these tests would twice."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("it was"))
    assert survived(lambda: None, print) is None
    assert sys.stdout is not sys.__stdout__
    assert capsys.readouterr().out == ""
