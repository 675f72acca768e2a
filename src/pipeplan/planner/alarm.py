"""Time limits for work that knows of none: it ends as by Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["interrupted_after"]


@contextmanager
def interrupted_after(seconds: float | None) -> Iterator[None]:
    """Raise KeyboardInterrupt in what runs inside after so many seconds; None lets it run.

    Only the main thread can be interrupted so: others run on.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))  # 0 would switch it off
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
