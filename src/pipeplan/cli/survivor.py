"""A process that outlives its work: where a library takes the process down, another goes on after what it died of."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from pipeplan.errors import ExecutionError

_PR_SET_PDEATHSIG = 1
_HANDED_ON = signal.SIGINT, signal.SIGTERM
_ENDINGS = {0, 1, 2, 3, 130}
"""Exit codes of pipeplan's own."""


def survived(died_of: Callable[[], str | None], tell: Callable[[str], None]) -> int | None:
    """Do the work of whoever calls in processes of its own: None there; here, when it is done, its exit code.

    The work is done here, without another process, where torch or threads are at work already, where another program
    runs the command and takes what it prints, since a copy of that one would go on with its work, too, or where nothing
    can be copied.

    Args:
        died_of: says, after a process has died, what of, if its log has that; None if not.
        tell: called with it, before the next process begins.

    Raises:
        ExecutionError: the process died of something that its log does not have.
    """
    taken = sys.stdout is not sys.__stdout__
    if not hasattr(os, "fork") or taken or "torch" in sys.modules or threading.active_count() > 1:
        return None
    while True:
        sys.stdout.flush()
        sys.stderr.flush()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDED_ON)  # until there is somebody to hand them on to
        parent, child = os.getpid(), os.fork()
        if not child:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the parent alone, which hands it on
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent:  # it ended before the system had been asked to end this with it
                    os._exit(1)
            return None
        code, told_to = _ended(child, mask)
        if code in _ENDINGS:
            return code
        if told_to:
            return 128 + told_to  # as a shell says it
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        cause = died_of()
        if cause is None:
            raise ExecutionError(f"the process that measured died with {how}, and had not begun to build a group")
        tell(f"{cause}: the process died with {how}; refused, and measuring goes on with what is left")


def _ended(child: int, mask: set[int | signal.Signals]) -> tuple[int, int]:
    """The exit code of a process, or minus the signal that ended it; and which came here and was handed on, or 0.

    Signals that are blocked meanwhile are let in by the ``mask`` when they can be handed on.
    """
    told_to = 0

    def hand_on(number: int, _: FrameType | None) -> None:
        nonlocal told_to
        told_to = number
        os.kill(child, number)

    before = {number: signal.signal(number, hand_on) for number in _HANDED_ON}
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _, status = os.waitpid(child, 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return os.waitstatus_to_exitcode(status), told_to
