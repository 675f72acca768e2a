"""Work shared by processes, each of which knows the request; it can be stopped, and what is done until then is kept."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from types import FrameType
from typing import Self, TypeVar

from pipeplan.planner.request import Request

__all__ = ["Workers"]

Item = TypeVar("Item")
Found = TypeVar("Found")
Work = Callable[[Request, Item, Callable[[], bool]], Found]
"""(request, item, whether to stop now) -> what was found; a function of a module, since it is sent to processes."""

_Handler = Callable[[int, FrameType | None], object]
_INTERRUPTS = signal.SIGINT, signal.SIGTERM
"""Where SIGTERM is no interrupt, nothing in Python hears it, and it stays as it is."""


class Workers:
    """So many processes, or for one none beside this; they stop at ``deadline`` (``time.monotonic``), or by Ctrl-C.

    Ctrl-C is heard here alone, and nothing is torn: what is at work ends at its next look at the clock. The second one
    is what Ctrl-C is without this.
    """

    def __init__(self, request: Request, count: int, deadline: float) -> None:
        self._request, self._count, self._deadline = request, count, deadline
        self._pool: ProcessPoolExecutor | None = None
        self._handlers: dict[signal.Signals, _Handler] = {}
        self.interrupted = False

    def __enter__(self) -> Self:
        if self._count > 1:
            context = get_context("spawn")  # threads of a progress line do not survive a fork
            self._stop = context.Event()
            known = self._request, self._stop, self._deadline
            self._pool = ProcessPoolExecutor(self._count, mp_context=context, initializer=_begin, initargs=known)
        if threading.current_thread() is threading.main_thread():  # no other may say what signals do
            now = {number: signal.getsignal(number) for number in _INTERRUPTS}
            self._handlers = {number: handler for number, handler in now.items() if callable(handler)}
            for number in self._handlers:
                signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._pool is not None:
            self._stop.set()
            self._pool.shutdown(cancel_futures=True)

    @property
    def stopped(self) -> bool:
        """Whether no more work is to begin."""
        return self.interrupted or time.monotonic() >= self._deadline

    def interrupt(self) -> None:
        """Let what is at work come to its end soon, and begin no more."""
        self.interrupted = True
        if self._pool is not None:
            self._stop.set()

    def run(self, work: Work[Item, Found], items: Sequence[Item]) -> Iterator[Found]:
        """What is found for each item, in their order, as it comes; what is stopped says so itself.

        A process that dies, by a signal or for want of memory, takes nothing along: the work is done here.
        """
        for item, future in zip(items, self._begun(work, items), strict=True):
            try:
                yield self._here(work, item) if future is None else future.result()
            except BrokenProcessPool:
                yield self._here(work, item)

    def _begun(self, work: Work[Item, Found], items: Sequence[Item]) -> list[Future[Found] | None]:
        """The items, given to the processes; None for those to be done here."""
        if self._pool is None:
            return [None] * len(items)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # inherited: processes begin deaf to it
        try:
            return [self._pool.submit(_apply, work, item) for item in items]
        except BrokenProcessPool:
            return [None] * len(items)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _here(self, work: Work[Item, Found], item: Item) -> Found:
        return work(self._request, item, lambda: self.stopped)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            self._handlers[signal.Signals(number)](number, frame)
        else:
            self.interrupt()


class _Known:
    """What a process knows."""

    request: Request
    stop: Event
    deadline: float


def _begin(request: Request, stop: Event, deadline: float) -> None:
    _Known.request, _Known.stop, _Known.deadline = request, stop, deadline


def _apply(work: Work[Item, Found], item: Item) -> Found:
    return work(_Known.request, item, _stopped)


def _stopped() -> bool:
    return _Known.stop.is_set() or time.monotonic() >= _Known.deadline
