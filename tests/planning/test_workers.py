"""Candidates that workers make and look at ahead: the same plan whoever does it, and the dead cost their candidates."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from textwrap import indent
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

import pipeplan
from builders.chains import chain_profile
from pipeplan.checker import check
from pipeplan.errors import UsageError
from pipeplan.files import CostRow, Profile
from pipeplan.planning import workers
from pipeplan.planning.frontier import frontier_request, search_frontier
from pipeplan.planning.request import Request
from pipeplan.planning.steps import search_plan
from pipeplan.planning.trials import Trial
from pipeplan.planning.workers import Ahead, LostError, answered, processes
from pipeplan.time_limit import Limit
from support.commands import script


def profile(shards: tuple[int, ...] = (1,)) -> Profile:
    """Six blocks, each a little longer than the one before."""
    chain = chain_profile(6, placed=False, parameter_bytes=1_000)
    blocks = tuple(
        block.model_copy(
            update={
                "costs": tuple(
                    CostRow(
                        microbatch_size=size,
                        shards=count,
                        forward_ns=size * (1000 + 70 * number) // count,
                        backward_ns=size * (2000 + 90 * number) // count,
                        activation_bytes=1000 * size // count,
                    )
                    for size in (1, 2)
                    for count in shards
                )
            }
        )
        for number, block in enumerate(chain.blocks)
    )
    return chain.model_copy(update={"blocks": blocks})


def asked(shards: tuple[int, ...] = (1,), **others: Any) -> Request:
    return Request.of(profile(shards), devices=4, mini_batch=16, deterministic=True, time_limit=0.3, **others)


REQUESTS = [asked(), asked((1, 2)), asked(memory_bytes=40_000), asked((1, 2), scheduler="1f1b"), asked(zero="auto")]


@pytest.mark.parametrize(
    "request_",
    [
        *REQUESTS[:2],
        *(pytest.param(own, marks=[pytest.mark.slow, pytest.mark.long]) for own in REQUESTS[2:]),
    ],
    ids=["blocks", "shards", "memory", "1f1b", "zero"],
)
def test_what_is_given_away_comes_to_the_same(request_: Request) -> None:
    """Plan, bounds and how many candidates there were."""
    alone, counting = search_plan(request_), Counting(Dying())
    found = search_plan(request_, executor=counting)
    assert counting.given > 3
    assert (found.plan, found.candidates, found.lower_bound_ns) == (alone.plan, alone.candidates, alone.lower_bound_ns)
    assert found.notes == alone.notes
    assert not any("lost" in note for note in found.notes)


def test_workers_do_not_look_at_what_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what they were given before there was anything to refute it."""
    own, looks = Trial.look, list[int]()

    def counted(trial: Trial, **how: Any) -> None:
        looks[-1] += 1
        own(trial, **how)

    monkeypatch.setattr(Trial, "look", counted)
    for executor in (None, Dying()):
        looks.append(0)
        found = search_plan(asked((1, 2)), executor=executor)
    alone, given = looks
    assert found.candidates.looked_at > alone + 16
    assert given <= alone + 16  # as many are given at once


class Counting(Executor):
    """Another executor, which answers as soon as something is given, so that all that can be is given away."""

    def __init__(self, inner: Executor) -> None:
        self.inner, self.given = inner, 0

    def submit(self, work: Any, /, *items: Any, **named: Any) -> Future[Any]:
        self.given += 1
        future = self.inner.submit(work, *items, **named)
        if self.given == 1:
            future.result()
        return future


class Dying(Executor):
    """Does what it is given at once, but for the work with some numbers, of which its worker dies."""

    def __init__(self, *numbers: int) -> None:
        self.numbers, self.given = numbers, 0

    def submit(self, work: Any, /, *items: Any, **named: Any) -> Future[Any]:
        self.given += 1
        future: Future[Any] = Future()
        if self.given in self.numbers:
            future.set_exception(MemoryError("killed"))
        else:
            future.set_result(work(*items, **named))
        return future


def test_what_dies_costs_its_candidate() -> None:
    alone, found = search_plan(asked()), search_plan(asked(), executor=Dying(3))
    assert found.notes[0] == "a candidate was lost with its worker (MemoryError: killed)"
    assert found.candidates.left == alone.candidates.left + 1
    assert check(found.plan).valid


@pytest.mark.slow
def test_how_many_died_is_said() -> None:
    alone, found = search_plan(asked()), search_plan(asked(), executor=Dying(3, 5, 6))
    assert found.notes[0] == "3 candidates were lost with their workers (MemoryError: killed)"
    assert found.candidates.left == alone.candidates.left + 3


@pytest.mark.slow
def test_what_is_cancelled_before_it_began_is_done_here() -> None:
    class Cancelling(Dying):
        def submit(self, work: Any, /, *items: Any, **named: Any) -> Future[Any]:
            future = super().submit(work, *items, **named)
            if self.given == 3:
                future = Future()
                future.cancel()
            return future

    alone, found = search_plan(asked()), search_plan(asked(), executor=Cancelling())
    assert (found.plan, found.candidates, found.notes) == (alone.plan, alone.candidates, alone.notes)


def test_workers_that_never_answer_are_gone_on_without() -> None:
    """They are given nothing, which is said."""
    alone, dying = search_plan(asked()), Dying(1)
    found = search_plan(asked(), executor=dying)
    assert (found.plan, dying.given) == (alone.plan, 1)
    assert found.notes[0] == "no worker answered (killed): the rest was done without them"


FRONTIER = {"devices": (2, 4), "mini_batch": 16, "deterministic": True, "time_limit": 0.3}


@pytest.mark.slow
@pytest.mark.long
def test_a_frontier_gives_its_searches_candidates_away() -> None:
    """The same points come out; what dies costs its candidate, and is said once."""
    asked = frontier_request(profile((1, 2)), **FRONTIER)
    alone, counting = search_frontier(asked), Counting(Dying())
    found = search_frontier(asked, executor=counting)
    assert counting.given > 6
    assert found.points == alone.points
    lost = search_frontier(asked, executor=Dying(3)).notes
    assert [note for note in lost if "lost with its worker" in note] == [
        "a candidate was lost with its worker (MemoryError: killed)"
    ]


@pytest.mark.slow
def test_a_frontier_of_two_workers_is_that_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches on several numbers of devices share two processes, which end with the last."""
    before = set(active_children())
    asked, made = frontier_request(profile((1, 2)), **FRONTIER), list[Executor]()

    class Noted(ProcessPoolExecutor):
        def __init__(self, *how: Any, **more: Any) -> None:
            made.append(self)
            super().__init__(*how, **more)

    monkeypatch.setattr(workers, "ProcessPoolExecutor", Noted)
    found = search_frontier(asked, workers=2)
    assert len(made) == 1
    assert found.points == search_frontier(asked).points
    assert set(active_children()) == before


def test_an_executor_that_is_shut_down_is_gone_on_without() -> None:
    executor = ProcessPoolExecutor(1)
    executor.shutdown()
    alone, found = search_plan(asked()), search_plan(asked(), executor=executor)
    assert found.plan == alone.plan
    assert "the rest was done without them" in found.notes[0]


@pytest.mark.slow
@pytest.mark.long  # the Dask cluster below has two workers' plan beside one's, too
def test_processes_find_what_is_found_without_and_end_with_it() -> None:
    before = set(active_children())
    request = asked((1, 2), memory_bytes=40_000)
    alone, found = search_plan(request), search_plan(request, workers=2)
    assert (found.plan, found.candidates) == (alone.plan, alone.candidates)
    assert set(active_children()) == before


def dies_of_three(item: int) -> int:
    if item == 3 and parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return 10 * item


def dies_once(mark: Path, item: int) -> int:
    """In the first process that comes to it."""
    if item == 3 and parent_process() is not None and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 10 * item


def all_of(ahead: Ahead[int, int], items: range) -> Iterator[int | str | None]:
    """What comes of so many items where new workers are waited for: until they answer nothing is given to them."""
    ahead.begin()
    wait_for_workers(ahead)
    for given in ahead.over(iter(items), lambda item: True):
        try:
            yield ahead.found(given)
        except LostError:
            yield "lost"
        wait_for_workers(ahead)


def wait_for_workers(ahead: Ahead[int, int]) -> None:
    deadline = time.monotonic() + 60
    while not ahead._ready and not ahead._closed and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.slow
def test_a_process_that_dies_costs_only_what_it_died_of(tmp_path: Path) -> None:
    """Others that were at work break with it, and are done again; so is what somebody else killed it at."""
    before = set(active_children())
    ahead = Ahead(dies_of_three, (), lambda: math.inf, 4, *processes(2))
    assert list(all_of(ahead, range(6))) == [0, 10, 20, "lost", 40, 50]
    ahead.end()
    ahead = Ahead(partial(dies_once, tmp_path / "mark"), (), lambda: math.inf, 4, *processes(2))
    assert list(all_of(ahead, range(6))) == [0, 10, 20, 30, 40, 50]
    assert (tmp_path / "mark").exists()
    ahead.end()
    assert set(active_children()) == before


@pytest.mark.slow
def test_a_given_pool_that_breaks_costs_only_what_it_died_of() -> None:
    """What was in progress is done again by a process that ends with it, the rest here; the pool stays its owner's."""
    before = set(active_children())
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        given = Ahead(dies_of_three, (), lambda: math.inf, 4, partial(itself, pool), None)
        found = list(all_of(given, range(3, 9)))
        given.end()
    assert [own or 10 * item for item, own in enumerate(found, start=3)] == ["lost", 40, 50, 60, 70, 80]
    assert found[-2:] == [None, None], "they are for this process"
    assert "the rest was done without them" in "".join(given.notes)
    assert set(active_children()) == before


def itself(pool: Executor) -> Executor:
    return pool


@pytest.mark.slow
def test_a_given_pool_that_is_killed_gives_the_same_plan() -> None:
    """With several candidates in flight, at which its processes were stopped before."""
    request = asked()

    class Killing(Counting):
        def submit(self, work: Any, /, *items: Any, **named: Any) -> Future[Any]:
            for number, what in ((4, signal.SIGSTOP), (12, signal.SIGKILL)):
                for pid in list(pool._processes) if self.given == number else ():
                    os.kill(pid, what)
            return super().submit(work, *items, **named)

    alone = search_plan(request)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        killing = Killing(pool)
        found = search_plan(request, executor=killing)
    assert killing.given >= 12
    assert (found.plan, found.candidates) == (alone.plan, alone.candidates)
    (note,) = set(found.notes) - set(alone.notes)
    assert note.endswith("the rest was done without them")


@pytest.mark.slow
def test_a_script_whose_pool_breaks_is_not_run_again(tmp_path: Path) -> None:
    """One that forks needs no line that keeps others from running it."""
    (tmp_path / "died.py").write_text(f"import os, signal\n{WORK_THAT_DIES}")
    (tmp_path / "forks.py").write_text(FORKS)
    done = script("forks.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "begins\n0\nlost\n20\n"), done.stderr


WORK_THAT_DIES = """
def dies_of_one(item):
    if item == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return 10 * item
"""

FORKS = """
print("begins", flush=True)
import math
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from died import dies_of_one
from pipeplan.planning.workers import Ahead, LostError
with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
    ahead = Ahead(dies_of_one, (), lambda: math.inf, 3, lambda: pool, None)
    ahead.begin()
    ahead._first.result()
    for given in ahead.over(iter(range(3)), lambda item: True):
        try:
            print(ahead.found(given), flush=True)
        except LostError:
            print("lost", flush=True)
    ahead.end()
"""


def test_what_is_given_away_does_not_depend_on_when_answers_come() -> None:
    ahead: Ahead[int, int] = Ahead(_noted, (), lambda: math.inf, 3, lambda: Dying(), None)
    _given.clear()
    found = [ahead.found(each) for each in ahead.over(iter(range(7)), lambda item: item != 2)]
    assert found == [0, 1, None, 3, 4, 5, 6]
    assert _given == [0, 1, 3, 4, 5, 6]


_given: list[int] = []


def _noted(item: int) -> int:
    _given.append(item)
    return item


def test_workers_have_the_time_that_is_left() -> None:
    """Theirs is up: that is no fault of the search, and says so."""
    ahead: Ahead[Request, Any] = Ahead(search_plan, (), lambda: 0.0, 2, lambda: Dying(), None)
    (given,) = ahead.over(iter([replace(asked(), deterministic=False, time_limit=math.inf)]), lambda item: True)
    with pytest.raises(LostError):
        ahead.found(given)


def test_a_search_that_is_interrupted_waits_for_nobody() -> None:
    """Work that never comes back: the plan is there within moments, of what was done here."""

    class Silent(Executor):
        given = 0

        def submit(self, work: Any, /, *items: Any, **named: Any) -> Future[Any]:
            Silent.given += 1
            future: Future[Any] = Future()
            if Silent.given == 1:
                future.set_result(work(*items, **named))
            else:
                limit.interrupt()
            return future

    limit = Limit()
    found = search_plan(replace(asked((1, 2)), deterministic=False, time_limit=600.0), executor=Silent(), within=limit)
    assert found.interrupted
    assert check(found.plan).valid


def test_processes_that_end_with_work_cancelled_end_all_that_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor's thread, and the one that gives, whose pipe is full: a process waits for that at its own end."""
    died = list[object]()
    monkeypatch.setattr(threading, "excepthook", died.append)
    made, ended = processes(1)
    pool = made()
    give: Any = partial(workers.submitted, pool)
    assert give(int, 1).result(60) == 1
    open_ = [give(time.sleep, 60), *(give(len, b" " * 10**6) for _ in range(4))]
    while not open_[0].running():
        time.sleep(0.01)
    for each in open_[1:]:
        each.cancel()
    (process,) = pool._processes.values()
    process.kill()
    inside: Any = pool
    feeder, manager = inside._call_queue._thread, inside._executor_manager_thread
    ended(pool)
    feeder.join(60)
    assert not feeder.is_alive()
    assert not manager.is_alive()
    assert not died


def test_broken_executors_that_are_given_are_not_made_anew() -> None:
    class Broken(Dying):
        def submit(self, work: Any, /, *items: Any, **named: Any) -> Future[Any]:
            if self.given >= 2:
                raise BrokenExecutor("its workers are gone")
            return super().submit(work, *items, **named)

    assert search_plan(asked(), executor=Broken(0)).plan == search_plan(asked()).plan


def test_jobs_name_what_workers_know() -> None:
    """A profile of many blocks does not travel with every candidate."""
    jobs: list[bytes] = []

    class Listening(Dying):
        def submit(self, work: Any, /, *items: Any, **named: Any) -> Future[Any]:
            assert work is answered
            jobs.append(items[1])
            return super().submit(work, *items, **named)

    request = asked()
    search_plan(request, executor=Listening(0))
    assert len(jobs) > 3
    assert all(b"parameter_bytes" not in job and b"forward_ns" not in job for job in jobs)


@pytest.mark.slow
def test_a_dask_cluster_of_which_one_process_is_killed_gives_the_same_plan() -> None:
    """When half of what is given away was."""
    distributed = pytest.importorskip("distributed")
    request, counting = asked((1, 2), memory_bytes=40_000), Counting(Dying())
    alone = search_plan(request)
    search_plan(request, executor=counting)
    half = counting.given // 2
    assert half > 16, "more than are given at once"
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", processes=True, host="127.0.0.1"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        killed: list[int] = []

        class Killing(Counting):
            def submit(self, work: Any, /, *items: Any, **named: Any) -> Future[Any]:
                if self.given == half and not killed:
                    killed.append(next(iter(client.run(os.getpid).values())))
                    os.kill(killed[0], signal.SIGKILL)
                return super().submit(work, *items, **named)

        with workers.named_executor(f"dask:{cluster.scheduler_address}") as executor:
            found = search_plan(request, executor=Killing(executor))
    assert killed
    assert (found.plan, found.candidates, found.notes) == (alone.plan, alone.candidates, alone.notes)


def test_threads_are_refused() -> None:
    """They would remember things in the search's own objects while it reads them."""
    with ThreadPoolExecutor(1) as executor, pytest.raises(UsageError, match="processes or machines"):
        search_plan(asked(), executor=executor)


def blocked_signals() -> set[signal.Signals]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, []))


@pytest.mark.slow
def test_what_a_terminal_sends_to_all_is_for_one(tmp_path: Path) -> None:
    """Neither workers nor what keeps account of their semaphores end, or say anything, at its hangup or Ctrl-C."""
    code = """
import os, signal
from pipeplan.planning.workers import deaf, processes
if __name__ == "__main__":
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    make, end = processes(1)
    pool = make()
    with deaf():
        work = pool.submit(len, "four")
    assert work.result() == 4
    for number in (signal.SIGHUP, signal.SIGINT):
        os.killpg(0, number)
    assert pool.submit(len, "three").result() == 5
    end(pool)
"""
    (tmp_path / "terminal.py").write_text(code)
    done = script("terminal.py", cwd=tmp_path, start_new_session=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_processes_of_others_hear_what_they_did() -> None:
    """They begin when the search gives them something, and stay their owner's."""
    with ProcessPoolExecutor(1) as executor:
        search_plan(asked(), executor=executor)
        assert signal.SIGINT not in executor.submit(blocked_signals).result()


def running(pid: int) -> bool:
    """Not ended, nor only waiting to be reaped."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


MAKERS = {
    "search": """
from pipeplan.planning.workers import processes
pool = processes(2)[0]()
for _ in range(2):
    pool.submit(time.sleep, 60)
""",
    "tuning": """
from pipeplan.examples import shape
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.tuning import Workers
from pipeplan.time_limit import Limit
workers = Workers(Request(shape("v", 2), 2, Batch(2, 1), sizes=(1,)), 2, Limit()).__enter__()
for begun in workers._begun(getattr, ["seed", "seed"]):
    begun.result()
pool = workers._pool
""",
}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="which processes run is asked of /proc")
@pytest.mark.parametrize("made", MAKERS)
def test_workers_do_not_outlive_who_made_them(made: str) -> None:
    """However that ends."""
    code = f"import time\n{MAKERS[made]}\nprint(*pool._processes, flush=True)\ntime.sleep(600)\n"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = list(map(int, parent.stdout.readline().split()))
        assert len(pids) == 2
        assert all(map(running, pids))
        parent.kill()
    deadline = time.monotonic() + 60
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(running, pids))


TORN = """
import os, struct, sys

def torn(item):
    frame = sys._getframe()
    while "result_queue" not in frame.f_locals:
        frame = frame.f_back
    os.write(frame.f_locals["result_queue"]._writer.fileno(), struct.pack("!i", 1_000) + b"x")
    os._exit(1)
"""
"""Begins an answer, and ends: as one that is killed while it writes."""

ENDS = {
    "at the end": """
from torn import torn
from pipeplan.planning.workers import processes
make, end = processes(1)
pool = make()
pool.submit(torn, 0)
while not pool._processes or all(each.exitcode is None for each in pool._processes.values()):
    pass
pool.submit(len, 10**7 * b"x")
end(pool)
""",
    "while it is waited for": """
import math
from torn import torn
from pipeplan.planning import workers
from pipeplan.planning.workers import Ahead, LostError, processes
make, end = processes(1)
ahead = Ahead(torn, (), lambda: math.inf, 2, make, end)
ahead.begin()
ahead._first.result()
(given,) = ahead.over(iter([0]), lambda item: True)
try:
    ahead.found(given)
except LostError:
    ahead.end()
else:
    raise SystemExit("it was not lost")
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("when", ENDS)
def test_a_worker_that_dies_in_the_middle_of_an_answer_keeps_nobody(when: str, tmp_path: Path) -> None:
    """Neither the search nor the end of the process waits for the rest, which never comes."""
    (tmp_path / "torn.py").write_text(TORN)
    code = f"if __name__ == '__main__':\n{indent(ENDS[when], '    ')}"
    (tmp_path / "ends.py").write_text(code)
    done = script("ends.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_clusters_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No scheduler at the address, and one without workers; both say what would do."""
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr(workers, "SCHEDULER_PATIENCE", 0.5)
    with pytest.raises(UsageError, match=r"no scheduler of Dask answers there within 0\.5 s .*; start one with"):
        workers.named_executor("dask:tcp://127.0.0.1:1").__enter__()
    with distributed.LocalCluster(
        n_workers=0, dashboard_address="127.0.0.1:0", processes=True, host="127.0.0.1"
    ) as cluster:
        named = f"dask:{cluster.scheduler_address}"
        with pytest.raises(UsageError, match=r"has no workers after 0\.5 s; start some with dask worker"):
            workers.named_executor(named).__enter__()


class Unheard:
    """A cluster's client that never comes back, beside a clock that is moved whenever it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.end = 0.0, Event()
        self.limit = Limit(3.0, clock=self)
        monkeypatch.setitem(sys.modules, "distributed", SimpleNamespace(Client=self.client))

    def __call__(self) -> float:
        self.now += 0.25
        return self.now

    def client(self, address: str, timeout: float) -> None:
        self.end.wait()


def test_a_cluster_that_does_not_answer_is_waited_for_no_longer_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor than an interruption: connecting took a minute where something listens that says nothing."""
    for interrupted, raised in ((False, UsageError), (True, KeyboardInterrupt)):
        unheard = Unheard(monkeypatch)
        if interrupted:
            unheard.limit.interrupt()
        with pytest.raises(raised), workers.named_executor("dask:tcp://127.0.0.1:1", unheard.limit):
            pass
        unheard.end.set()
        assert unheard.now < (1.5 if interrupted else 4.0)


@pytest.mark.parametrize("plans", [False, True])
def test_waiting_for_an_executor_spends_the_time_limit_in_python_too(
    monkeypatch: pytest.MonkeyPatch, plans: bool
) -> None:
    """The limit of what follows is the one that waiting has begun; where time is counted nothing has begun."""
    waited = list[Limit | None]()

    @contextmanager
    def named(name: str, within: Limit | None = None) -> Iterator[Executor]:
        waited.append(within)
        raise UsageError("nobody answers")
        yield

    monkeypatch.setattr(workers, "named_executor", named)
    how: dict[str, Any] = {"devices": 2, "time_limit": "7s", "executor": "dask:tcp://nobody:1"}
    asked: Callable[..., object] = partial(pipeplan.frontier, plans=True) if plans else pipeplan.search
    for deterministic in (False, True):
        with pytest.raises(UsageError, match="nobody answers"):
            asked(profile(), deterministic=deterministic, **how)
    assert waited[0] is not None
    assert (waited[0].seconds, waited[1]) == (7.0, None)


def test_what_is_no_executor_is_refused() -> None:
    with pytest.raises(UsageError, match=r"must be a concurrent.futures.Executor, or a name .* not object"):
        pipeplan.search(profile(), devices=2, time_limit=0.1, deterministic=True, executor=cast("Executor", object()))


def test_names_of_executors() -> None:
    for name in ("dask", "dask:", "ray:auto"):
        with pytest.raises(UsageError, match="give dask:ADDRESS"), workers.named_executor(name):
            pass
