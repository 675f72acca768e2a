"""Work spread over threads, which whoever waits for it can end at any moment.

Numpy and compiled loops leave other threads alone, so that as many threads as there are cores help. Nothing is spread
twice: what a thread spreads, it does itself. Results never depend on the number of threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextvars import ContextVar, copy_context
from functools import cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pipeplan.time_limit import checkpoint

Item = TypeVar("Item")
Made = TypeVar("Made")

_LOOK_SECONDS = 0.1
"""How often who waits looks whether there is time; signals are heard at once."""

_stop: ContextVar[npt.NDArray[np.int64] | None] = ContextVar("stop", default=None)


def nested() -> bool:
    """Whether this thread does already what was spread, so that it spreads nothing more."""
    return _stop.get() is not None


def spread(function: Callable[[Item], Made], items: Iterable[Item]) -> list[Made]:
    """``function`` of every item, in their order; one item needs no thread. Raises TimeUpError."""
    given = list(items)
    if nested() or len(given) < 2:
        return list(map(function, given))
    return _elsewhere(function, given)


def stoppable(function: Callable[[npt.NDArray[np.int64], Item], Made | None], items: Iterable[Item]) -> list[Made]:
    """The same for compiled loops, which hear no signal: they end, with None, once the array they get is set."""
    given = list(items)

    def run(item: Item) -> Made:
        stop = _stop.get()
        assert stop is not None
        made = function(stop, item)
        if made is None:
            raise CancelledError
        return made

    return list(map(run, given)) if nested() else _elsewhere(run, given)


def _elsewhere(function: Callable[[Item], Made], items: list[Item]) -> list[Made]:
    stop = np.zeros(1, np.int64)
    before = _stop.set(stop)
    try:
        futures = [_threads().submit(copy_context().run, function, item) for item in items]
    finally:
        _stop.reset(before)
    try:
        return [_awaited(future) for future in futures]
    except BaseException:
        stop[0] = 1
        for future in futures:
            future.cancel()
        wait(futures)
        raise


def _awaited(future: Future[Made]) -> Made:
    while not future.done():
        wait((future,), _LOOK_SECONDS)
        checkpoint()
    return future.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0)), thread_name_prefix="frontier")
