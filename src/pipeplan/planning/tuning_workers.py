"""Work shared by processes, each of which knows the request; it can be stopped, and what is done until then is kept."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from typing import Self, TypeVar

from pipeplan.planning.request import Request
from pipeplan.time_limit import Limit

__all__ = ["Workers"]

Item = TypeVar("Item")
Found = TypeVar("Found")
Work = Callable[[Request, Item, Callable[[], bool]], Found]
"""(request, item, whether to stop now) -> what was found; a function of a module, since it is sent to processes."""


class Workers:
    """So many processes, or for one none beside this; they stop when ``limit`` says so, or by Ctrl-C.

    Ctrl-C is heard here alone, and nothing is torn: what is at work ends at its next look at the clock. The second one
    is what Ctrl-C is without this.
    """

    def __init__(self, request: Request, count: int, limit: Limit) -> None:
        self._request, self._count, self._limit = request, count, limit
        self._pool: ProcessPoolExecutor | None = None
        self._left = ExitStack()

    def __enter__(self) -> Self:
        if self._count > 1:
            context = get_context("spawn")  # threads of a progress line do not survive a fork
            self._stop = context.Event()
            known = self._request, self._stop, self._limit
            self._pool = ProcessPoolExecutor(self._count, mp_context=context, initializer=_begin, initargs=known)
        self._left.enter_context(self._limit.hearing_interrupts(self.interrupt))
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()
        if self._pool is not None:
            self._stop.set()
            self._pool.shutdown(cancel_futures=True)

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C was heard."""
        return self._limit.interrupted

    @property
    def stopped(self) -> bool:
        """Whether no more work is to begin."""
        return self._limit.expired

    def interrupt(self) -> None:
        """Let what is at work come to its end soon, and begin no more."""
        self._limit.interrupted = True
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


class _WorkerState:
    """What a process knows."""

    request: Request
    stop: Event
    limit: Limit


def _begin(request: Request, stop: Event, limit: Limit) -> None:
    _WorkerState.request, _WorkerState.stop, _WorkerState.limit = request, stop, limit


def _apply(work: Work[Item, Found], item: Item) -> Found:
    return work(_WorkerState.request, item, _stopped)


def _stopped() -> bool:
    return _WorkerState.stop.is_set() or _WorkerState.limit.expired
