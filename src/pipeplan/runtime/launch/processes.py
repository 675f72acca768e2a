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
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from typing import Any

Identity = Mapping[str, Any]
"""Who a rank is."""

_LIFELINE = 0  # standard input: ends with the parent
_PR_SET_PDEATHSIG = 1


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


class CopiedProcess:
    """A copy of this process that calls ``be`` with who it is, and then ends. Raises OSError.

    As much of ``subprocess.Popen`` as is asked of a rank, whose process either is.
    """

    def __init__(
        self, be: Callable[[Identity], None], identity: Identity, output: int, environment: Mapping[str, str]
    ) -> None:
        read, write = os.pipe()
        streams, others = (read, output, output), (write, *identity["others"])
        self._copy = get_context("fork").Process(target=_be_copy, args=(be, identity, streams, others, environment))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads stay behind, which is meant
            self._copy.start()
        os.close(read)
        self.pid = self._copy.pid or 0
        self.stdin = os.fdopen(write, "wb")

    def poll(self) -> int | None:
        """Its exit code, as that of ``subprocess``; None while it runs."""
        return self._copy.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The same, waited for. Raises ``subprocess.TimeoutExpired``."""
        self._copy.join(timeout)
        if self._copy.exitcode is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return self._copy.exitcode


def _be_copy(
    be: Callable[[Identity], None],
    identity: Identity,
    streams: Sequence[int],
    others: Sequence[int],
    environment: Mapping[str, str],
) -> None:
    """In the copy: have streams, signals and an environment of its own, then be a rank."""
    os.setpgid(0, 0)  # as of ranks that are started
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(each, signal.SIG_DFL)
    for number, descriptor in enumerate(streams):
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
