"""How a command's process ends: without taking apart what a search has left in memory, which can take a second."""

from __future__ import annotations

import atexit
import os
import stat
import sys
import threading
from contextlib import suppress

_STANDARD = 2
"""The last number of the standard streams'."""


def leave(code: int) -> None:
    """End the process with this code, after the functions that are registered for its end.

    It returns where more is needed: other threads, which Python waits for; torch, whose processes take leave of each
    other; a profiler or debugger; a file that somebody, as a module of the user's, has left open for writing.
    """
    watched = sys.getprofile() is not None or sys.gettrace() is not None
    if "torch" in sys.modules or watched or _waits() or _writes():
        return
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has left, or it is closed
            stream.flush()
    os._exit(code)


def _waits() -> bool:
    return any(not each.daemon for each in threading.enumerate() if each is not threading.main_thread())


def _writes() -> bool:
    """Whether a file is open for writing, or it cannot be known here."""
    try:
        import fcntl

        numbers = [int(name) for name in os.listdir("/dev/fd")]
    except (ImportError, OSError, ValueError):
        return True
    for number in numbers:
        with suppress(OSError):  # what listed them is closed
            mode = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
            if number > _STANDARD and mode != os.O_RDONLY and stat.S_ISREG(os.fstat(number).st_mode):
                return True
    return False
