"""Time limits: how long work may take, asked by the loops that take long, on any thread.

A search holds a :class:`Limit` and asks it. Loops far below, which know of no search, call :func:`checkpoint`: it ends
them when the time of a limit that is enforced around them, on their own thread, is up.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType


class TimeUpError(Exception):
    """The time of a ``limit`` is up. It ends loops on the way to who set the limit, and no user sees it."""

    def __init__(self, limit: Limit) -> None:
        super().__init__(f"{limit.seconds:g} s are over")
        self.limit = limit


@dataclass(slots=True, eq=False)
class Limit:
    """Seconds from when it was made, or until it is interrupted; infinitely many are no limit.

    ``clock`` returns seconds from any fixed moment.
    """

    seconds: float = math.inf
    interrupted: bool = field(default=False, kw_only=True)
    clock: Callable[[], float] = field(default=time.monotonic, kw_only=True)
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def elapsed(self) -> float:
        """Seconds by the clock since the limit was made."""
        return self.clock() - self.started

    @property
    def used(self) -> float:
        """What counts against the limit."""
        return self.elapsed

    @property
    def remaining(self) -> float:
        """Seconds left; 0 after an interruption."""
        return 0.0 if self.interrupted else max(0.0, self.seconds - self.used)

    @property
    def expired(self) -> bool:
        """Whether nothing is left."""
        return self.remaining <= 0.0

    def interrupt(self) -> None:
        """Leave no time."""
        self.interrupted = True

    def check(self) -> None:
        """Go on only while there is time. Raises TimeUpError."""
        if self.expired:
            raise TimeUpError(self)

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """What runs inside, on this thread, ends by TimeUpError at its first checkpoint after the time is up."""
        before = _enforced.set((*_enforced.get(), self))
        try:
            yield
        finally:
            _enforced.reset(before)

    @contextmanager
    def hearing_interrupts(self, interrupt: Callable[[], None] | None = None) -> Iterator[None]:
        """Ctrl-C, and SIGTERM where Python hears it, only leave no time, by ``interrupt``; the second one interrupts.

        So nothing is torn: what is at work ends at its next look at the limit. Only the main thread hears signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def hear(number: int, frame: FrameType | None) -> None:
            handler = handlers[signal.Signals(number)]
            if self.interrupted and callable(handler):
                handler(number, frame)
            else:
                (interrupt or self.interrupt)()

        heard = [number for number, handler in handlers.items() if callable(handler)]
        for number in heard:
            signal.signal(number, hear)
        try:
            yield
        finally:
            for number in heard:
                signal.signal(number, handlers[number])


_enforced: ContextVar[tuple[Limit, ...]] = ContextVar("enforced", default=())
"""The limits that are enforced here, the outermost first."""


def checkpoint() -> None:
    """Go on only while there is time, for loops that take long. Raises TimeUpError."""
    for limit in _enforced.get():
        limit.check()
