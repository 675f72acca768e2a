"""Work shared by processes, each of which knows the request; it can be stopped, and what is done until then is kept."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from typing import Self, TypeVar

from pipeplan.planner.request import Request

__all__ = ["Workers"]

Item = TypeVar("Item")
Found = TypeVar("Found")
Work = Callable[[Request, Item, Callable[[], bool]], Found]
"""(request, item, whether to stop now) -> what was found; a function of a module, since it is sent to processes."""


class Workers:
    """So many processes, or for one none beside this; they stop at ``deadline`` (``time.monotonic``), or by Ctrl-C."""

    def __init__(self, request: Request, count: int, deadline: float) -> None:
        self._request, self._count, self._deadline = request, count, deadline
        self._pool: ProcessPoolExecutor | None = None
        self.interrupted = False

    def __enter__(self) -> Self:
        if self._count > 1:
            context = get_context("spawn")  # threads of a progress line do not survive a fork
            self._stop = context.Event()
            known = self._request, self._stop, self._deadline
            self._pool = ProcessPoolExecutor(self._count, mp_context=context, initializer=_begin, initargs=known)
        return self

    def __exit__(self, *_: object) -> None:
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
        """What is found for each item, in their order, as it comes; fewer where it was stopped."""
        if self._pool is None:
            yield from self._run_here(work, items)
            return
        for future in [self._pool.submit(_apply, work, item) for item in items]:
            yield self._result(future)

    def _run_here(self, work: Work[Item, Found], items: Sequence[Item]) -> Iterator[Found]:
        for item in items:
            try:
                found = work(self._request, item, lambda: self.stopped)
            except KeyboardInterrupt:
                self.interrupt()
                return
            yield found

    def _result(self, future: Future[Found]) -> Found:
        """Ctrl-C lets the processes end what they are at, at the next set of rules."""
        try:
            return future.result()
        except KeyboardInterrupt:
            self.interrupt()
            return future.result()


class _Known:
    """What a process knows."""

    request: Request
    stop: Event
    deadline: float


def _begin(request: Request, stop: Event, deadline: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process hears it, and says so by the event
    _Known.request, _Known.stop, _Known.deadline = request, stop, deadline


def _apply(work: Work[Item, Found], item: Item) -> Found:
    return work(_Known.request, item, _stopped)


def _stopped() -> bool:
    return _Known.stop.is_set() or time.monotonic() >= _Known.deadline
