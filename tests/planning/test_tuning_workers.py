"""Processes of a tuning: Ctrl-C stops them without tearing anything, and one that dies takes nothing along."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import active_children, parent_process
from pathlib import Path

import pytest

from pipeplan.examples import shape
from pipeplan.planning import tuning
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.tuning import Workers
from pipeplan.planning.workers import HandedOver
from pipeplan.time_limit import Limit, TimeUpError
from support.commands import script

REQUEST = Request(shape("v", 2), 2, Batch(2, 1), sizes=(1,))


def pressing(request: Request, item: int, stopped: Callable[[], bool]) -> tuple[int, bool]:
    """Ctrl-C in the second piece of work."""
    if item == 1:
        os.kill(os.getpid(), signal.SIGINT)
    return item, stopped()


def is_deaf(request: Request, item: str, stopped: Callable[[], bool]) -> bool:
    """Whether Ctrl-C does not come through; some items end the process, where it is not the first."""
    if item == "dies" and parent_process() is not None:
        os._exit(1)
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def goes_on_until_stopped(request: Request, item: int, stopped: Callable[[], bool]) -> bool:
    """Whether it was stopped, of a process that nobody sends a signal."""
    while not stopped():
        time.sleep(0.01)
    return parent_process() is not None


def test_another_thread_interrupts_what_processes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "TUNING_LEAVING_SECONDS", 200)  # on a busy machine they take long to be asked
    limit = Limit()
    with ThreadPoolExecutor() as threads, Workers(REQUEST, 2, limit) as workers:
        assert list(workers.run(is_deaf, ["lives"])) == [True]  # the processes are there
        found = threads.submit(lambda: list(workers.run(goes_on_until_stopped, [0, 1, 2])))
        threads.submit(limit.interrupt)
        assert found.result(240) == [True] * 3


def test_ctrl_c_lets_work_come_to_its_end_and_the_second_one_does_not() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Workers(REQUEST, 1, Limit()) as workers:
        assert list(workers.run(pressing, [0, 1, 2])) == [(0, False), (1, True), (2, True)]
        assert workers.interrupted
        with pytest.raises(KeyboardInterrupt):
            list(workers.run(pressing, [1]))
    assert signal.getsignal(signal.SIGINT) is before


def test_processes_begin_deaf_and_one_that_dies_takes_nothing_along() -> None:
    with Workers(REQUEST, 2, Limit()) as workers:
        assert list(workers.run(is_deaf, ["lives"])) == [True]
        assert list(workers.run(is_deaf, ["lives", "dies"]))[1:] == [False]
        assert list(workers.run(is_deaf, ["lives", "dies"])) == [False, False]
        assert not workers.interrupted


def test_a_process_under_which_pipes_are_closed_takes_nothing_along() -> None:
    """As Python does when another one ends, maybe while this one begins."""
    with Workers(REQUEST, 2, Limit()) as workers:
        assert list(workers.run(is_deaf, ["lives"])) == [True]
        assert workers._pool is not None
        workers._pool._call_queue._reader.close()
        assert list(workers.run(is_deaf, ["dies", "dies"])) == [False, False]


def test_processes_that_do_not_stop_are_not_waited_for() -> None:
    """They may not even have begun when a signal comes."""
    limit = Limit()
    limit.interrupt()
    with pytest.raises(TimeUpError):
        Workers(REQUEST, 2, limit)._there(Future())


def test_processes_end_with_the_tuning_even_those_that_only_begin() -> None:
    """Nothing of it lives on beside what is written, whether it was interrupted or its time was up."""
    before = set(active_children())
    limit = Limit()
    with Workers(REQUEST, 2, limit) as workers:
        begun = workers._begun(goes_on_until_stopped, [0, 1])
        assert set(active_children()) > before
        limit.interrupt()
    assert set(active_children()) == before
    assert None not in begun


BEGINNING = """
import multiprocessing, sys
from multiprocessing.resource_tracker import ensure_running
from pipeplan.planning.tuning import Workers
from pipeplan.time_limit import Limit, TimeUpError

def double(request, item, stopped):
    return 2 * item

if __name__ == "__main__":
    ensure_running()  # which begins in the same way as processes do
    ends, sleeps = sys.argv[1:]
    large = bytes(10**7)  # more than any pipe holds
    multiprocessing.set_executable(ends)
    with Workers(large, 2, Limit()) as workers:
        print([*workers.run(double, [1, 2]), *workers.run(double, [3])], *(note.split()[:3] for note in workers.notes))
    multiprocessing.set_executable(sleeps)
    limit = Limit()
    with Workers(large, 2, limit) as workers:
        limit.interrupt()
        try:
            list(workers.run(double, [1, 2]))
        except TimeUpError:
            print("not waited for")
"""


@pytest.mark.slow
def test_processes_that_never_read_what_they_are_to_begin_with_keep_nobody(tmp_path: Path) -> None:
    """One that ends at once is done without, which is said, and one that hangs is not waited for when time is up."""
    sleeps, true = tmp_path / "sleeps", shutil.which("true")
    assert true is not None
    sleeps.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeps.chmod(0o755)
    (tmp_path / "beginning.py").write_text(BEGINNING)
    done = script("beginning.py", true, str(sleeps), cwd=tmp_path)
    said = "[2, 4, 6] ['worker', 'processes', 'died,']\nnot waited for\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


def test_what_is_handed_over_is_no_longer_written_when_time_is_up() -> None:
    with pytest.raises(TimeUpError), Limit(0.0).enforced():
        HandedOver(REQUEST)
