"""The command line as a user meets it: in this process, or in one of its own that is interrupted."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

_INTERRUPTED = """
import os
from ortools.sat.python import cp_model
from pipeplan.cli.main import main

solve = cp_model.CpSolver.solve

def interrupt(self, *rest):
    cp_model.CpSolver.solve = solve
    os.kill(os.getpid(), {number})
    return solve(self, *rest)

cp_model.CpSolver.solve = interrupt
main()
"""


def pipeplan(*arguments: object, cwd: Path | None = None, together: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, from ``cwd``; an error that it does not handle is raised.

    With ``together`` what it says on stderr is part of its output, in its place.
    """
    from pipeplan.cli.main import main

    command = ["pipeplan", *map(str, arguments)]
    with _text() as out, _text() as apart, contextlib.chdir(cwd or "."):
        err = out if together else apart
        with (
            mock.patch.object(sys, "argv", command),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                main()
            except SystemExit as ended:
                code = int(ended.code or 0)
        return subprocess.CompletedProcess(command, code, _said(out), _said(apart))


def _text() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)


def _said(text: io.TextIOWrapper) -> str:
    assert isinstance(text.buffer, io.BytesIO)
    return text.buffer.getvalue().decode()


def script(name: str, *arguments: str, cwd: Path, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a script of this folder in a process of its own that finds what this one does, ``cwd`` first."""
    path = os.pathsep.join([str(cwd), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, name, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
        **how,
    )


def interrupted(arguments: Sequence[object], number: signal.Signals) -> tuple[int, str, str]:
    """(exit code, output, errors) of a command in a process of its own that gets the signal in its first solve."""
    command = [sys.executable, "-c", _INTERRUPTED.format(number=int(number)), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stdout, done.stderr
