"""Processes that are ranks: how they end with their parent, and such as are copies of it.

A rank that is a copy needs nothing written down or imported: a model that a script has made, its loader and functions
are in its memory. Only the thread that makes a copy goes on in it, so neither CUDA nor a pool of threads that the
parent has used works there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NoReturn, Protocol

Identity = Mapping[str, Any]
"""Who a rank is."""

_LIFELINE = 0  # standard input: ends with the parent
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.01


def die_with_parent(parent: int) -> None:
    """End this process when its parent ends, however that ends."""
    if sys.platform == "linux":  # also where this process is stopped, or hangs in compiled code
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    def wait() -> None:
        while os.read(_LIFELINE, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="lifeline").start()


class Process(Protocol):
    """As much of ``subprocess.Popen`` as is asked of a rank."""

    pid: int
    stdin: IO[bytes] | None

    def poll(self) -> int | None:
        """Its exit code, as that of ``subprocess``; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The same, waited for. Raises ``subprocess.TimeoutExpired``."""


class CopiedProcess:
    """A copy of this process that calls ``be`` with who it is, and then ends. Raises OSError."""

    def __init__(
        self, be: Callable[[Identity], None], identity: Identity, output: int, environment: Mapping[str, str]
    ) -> None:
        read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._status: int | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads stay behind, which is meant
            self.pid = os.fork()
        if self.pid == 0:
            _be_copy(be, identity, (read, output), (write, *identity["others"]), environment)
        os.close(read)
        self.stdin: IO[bytes] | None = os.fdopen(write, "wb")

    def poll(self) -> int | None:
        """Its exit code, as that of ``subprocess``; None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """The same, waited for. Raises ``subprocess.TimeoutExpired``."""
        until = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            time.sleep(_POLL_S)
        return status


def _be_copy(
    be: Callable[[Identity], None],
    identity: Identity,
    streams: tuple[int, int],
    others: Sequence[int],
    environment: Mapping[str, str],
) -> NoReturn:
    """In the copy: have streams, signals and an environment of its own, then be a rank."""
    code = 1
    try:
        os.setsid()
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(each, signal.SIG_DFL)
        for number, descriptor in enumerate((*streams, streams[1])):
            os.dup2(descriptor, number)
        for descriptor in others:
            os.close(descriptor)
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, buffering, closefd=False)  # noqa: SIM115  (they are the process's own)
            for number, mode, buffering in ((0, "r", -1), (1, "w", 1), (2, "w", 1))
        )
        os.environ.update(environment)
        die_with_parent(identity["parent"])
        be(identity)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
