"""Time limits for work that knows of none."""

from __future__ import annotations

import itertools
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeplan.planner.alarm import interrupted_after


def test_work_ends_as_by_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(KeyboardInterrupt), interrupted_after(0.01):
        for _ in itertools.count():
            pass
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_without_a_limit_and_in_other_threads_work_goes_on() -> None:
    def work(seconds: float | None) -> int:
        with interrupted_after(seconds):
            return sum(range(10**6))

    with ThreadPoolExecutor(1) as others:
        assert others.submit(work, 1e-6).result() == work(None)
