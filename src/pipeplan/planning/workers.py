"""Work that is done ahead by other processes or machines, and what comes of it taken in the order it was given.

Any :class:`concurrent.futures.Executor` does it: processes of our own, one of Dask, or one that is given in Python.
What is given ahead, and in which order, does not depend on what was found before, so that the same comes out with any
number of workers; only how much is done in vain does.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    InvalidStateError,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import parent_process
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from tempfile import TemporaryFile
from threading import Lock, Thread
from types import ModuleType
from typing import IO, Any, Generic, TypeVar, cast

from pipeplan.errors import UsageError
from pipeplan.search_constants import (
    CANDIDATES_PER_WORKER,
    CLIENT_LEAVING_SECONDS,
    LEAST_PATIENCE,
    MOST_POLLS,
    SCHEDULER_PATIENCE,
    WORKER_POLL_SECONDS,
    WORKERS_AT_ONCE,
)
from pipeplan.time_limit import Limit, TimeUpError, checkpoint

Item = TypeVar("Item")
Found = TypeVar("Found")


class LostError(Exception):
    """The worker that had a piece of work died of it, or before it had done it."""


@dataclass(slots=True)
class Given(Generic[Item, Found]):
    """An item, and what is being done with it; ``future`` None: nothing yet.

    It is ``suspect`` if it was at work when workers broke, so that it is done again alone.
    """

    item: Item
    future: Future[bytes] | None = None
    suspect: bool = False


_UNSENDABLE = (pickle.PicklingError, AttributeError, TypeError)
"""What pickle raises, of a function that no module has under its name, say."""


@dataclass(slots=True)
class Ahead(Generic[Item, Found]):
    """What does ``work`` with items ahead: of so many at once, by an executor that ``renew`` makes, also anew.

    ``known`` are objects that items refer to, and that workers keep. ``left`` says for how many seconds they may work.
    ``close`` ends one that was made. An executor that is given has none, and is not made anew: where it breaks, what it
    was at is done again by a process of our own, and the rest without workers. It is made with the first items, and
    until the first worker has answered nothing is given away.
    """

    work: Callable[[Item], Found]
    known: Sequence[object]
    left: Callable[[], float]
    window: int
    renew: Callable[[], Executor]
    close: Callable[[Executor], None] | None
    notes: list[str] = field(default_factory=list)
    _told: bytes | None = None
    _executor: Executor | None = None
    _first: Future[bytes] | None = None
    _given: deque[Given[Item, Found]] = field(default_factory=deque)
    _closed: bool = False
    _broke: bool = False

    def begin(self) -> None:
        """Let the first workers begin, once. Raises TimeUpError."""
        if self._told is not None or self._closed:
            return
        try:
            self._told = _dumps(tuple(self.known), ())
        except _UNSENDABLE as error:
            self.notes.append(f"workers cannot be sent all that is asked for ({error}): all was done without them")
            self._closed = True
        else:
            self._renewed()

    def end(self) -> None:
        """Give nothing away any more, and end the workers that were made for this."""
        self._closed = True
        if self._executor is not None and self.close is not None:
            self.close(self._executor)
        self._executor = None
        for given in self._given:
            if given.future is not None:
                given.future.cancel()

    def over(self, items: Iterator[Item], wanted: Callable[[Item], bool]) -> Iterator[Given[Item, Found]]:
        """The items in their order, of which those that are ``wanted`` are given away ahead."""
        self.begin()
        self._given.clear()
        while True:
            if self._broke and not any(each.suspect for each in self._given):
                self.end()
            while len(self._given) < (1 if self._closed else self.window) and (item := next(items, None)) is not None:
                self._given.append(Given(item))
            if not self._given:
                return
            for given in self._given if self._ready else ():
                if self._closed or any(each.suspect for each in self._given):
                    break  # each of those is to be alone
                if given.future is None and wanted(given.item):
                    self._give(given)
            yield self._given.popleft()

    def found(self, given: Given[Item, Found]) -> Found | None:
        """What has come, or comes, of an item; None where it was given to nobody, or nobody can take it.

        Raises:
            LostError: its worker died of it, or had no time for it.
            TimeUpError: there is no time to wait for it.
        """
        if given.suspect and self._answers():
            self._give(given)  # alone, as others were in it with it
        if given.future is None:
            return None
        try:
            answer = self._waited(given.future)
        except (KeyboardInterrupt, TimeUpError):
            raise
        except CancelledError:  # by its owner, before it began
            return None
        except BrokenExecutor as error:
            if given.suspect:
                self._renewed()
                raise LostError(_said(error)) from None
            self._broken(error, given)
            return self.found(given)
        except Exception as error:  # of the executor: what work raises is an answer
            if given.suspect and self._broke:
                return None  # the process lives, and does not know what is somebody's own
            raise LostError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from None
        well, what = _loads(answer, self.known)
        if not well:
            raise what
        found: Found = what
        return found

    def _broken(self, error: BrokenExecutor, *taken: Given[Item, Found]) -> None:
        """All that was at work broke with one of them, and nobody knows which: each is to be done again alone."""
        suspects = [each for each in (*taken, *self._given) if each.future is not None and not _has_come(each.future)]
        for given in suspects:
            given.suspect, given.future = True, None
        if self._closed:
            return
        if self.close is None:
            if not suspects:
                self._leave(f"workers take nothing more ({_said(error)})")
                return
            self.notes.append(f"the workers broke ({_said(error)}): the rest was done without them")
            self._executor, self._broke = None, True  # it stays its owner's
            self.renew, self.close = processes(1, context=_WithoutMain())
        self._renewed()

    def _answers(self) -> bool:
        """Whether new workers have begun to answer, which is waited for. Raises TimeUpError."""
        if self._closed or self._first is None:
            return False
        try:
            self._waited(self._first)
        except (KeyboardInterrupt, TimeUpError):
            raise
        except Exception:
            pass  # which is said when they are asked whether they are ready
        return self._ready

    @property
    def _ready(self) -> bool:
        if self._closed or self._first is None or not self._first.done():
            return False
        if error := self._first.exception():
            self._leave(f"no worker answered ({error})")
        return not self._closed

    def _leave(self, why: str) -> None:
        """Go on without workers."""
        self.notes.append(f"{why}: the rest was done without them")
        self._closed = True

    def _renewed(self) -> None:
        if self._executor is not None and self.close is not None:
            self.close(self._executor)
        self._executor = self.renew()
        self._first = None
        self._first = self._submitted(_dumps((_nothing, 0, math.inf), ()))

    def _give(self, given: Given[Item, Found]) -> None:
        try:
            job = _dumps((self.work, given.item, self.left()), self.known)
        except _UNSENDABLE:
            return  # a function of somebody's own, say, which cannot be sent
        try:
            given.future = self._submitted(job)
        except BrokenExecutor as error:
            self._broken(error)

    def _submitted(self, job: bytes) -> Future[bytes] | None:
        assert self._executor is not None
        assert self._told is not None
        try:
            if self.close is not None:
                return submitted(self._executor, answered, self._told, job)
            return self._executor.submit(answered, self._told, job)  # by its owner's processes
        except (BrokenExecutor, RuntimeError) as error:
            if isinstance(error, BrokenExecutor) and self._first is not None:
                raise  # with all that they are at
            self._leave(f"workers take nothing more ({_said(error)})")
            return None

    def _waited(self, future: Future[bytes]) -> bytes:
        polls = 0
        while not future.done():
            checkpoint()
            wait([future], WORKER_POLL_SECONDS)
            if self.close is not None and _gone(self._executor):
                polls += 1  # the executor says so itself, unless it waits for the rest of an answer
                if polls > MOST_POLLS and not future.done():
                    raise BrokenExecutor("a process has ended in the middle of an answer")
        return future.result()


def _has_come(future: Future[bytes]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__


def answered(told: bytes, job: bytes) -> bytes:
    """What a worker does: (whether it succeeded, the answer or the exception) of a job on the objects in ``told``."""
    with _ALONE:
        known = _known(told)
        work, item, seconds = _loads(job, known)
        try:
            with Limit(seconds).enforced():
                return _dumps((True, work(item)), known)
        except TimeUpError:
            return _dumps((False, LostError("there was no time for it")), known)
        except Exception as error:
            return _dumps((False, error), known)


_ALONE = Lock()
"""A worker's threads, as Dask's may have several, take turns: what is known is remembered for all of them."""


def _nothing(item: int) -> int:
    return item


_HELD: dict[bytes, tuple[object, ...]] = {}
"""The objects that this process was sent last."""


def _known(told: bytes) -> tuple[object, ...]:
    key = hashlib.sha256(told).digest()
    if key not in _HELD:
        _HELD.clear()
        _HELD[key] = pickle.loads(told)
    return _HELD[key]


class _TimedPickler(pickle.Pickler):
    """Looks at the time with each object, as many of them take a while. Raises TimeUpError."""

    def reducer_override(self, obj: object) -> Any:
        checkpoint()
        return NotImplemented  # what it would do without


def _dumps(what: object, known: Sequence[object]) -> bytes:
    numbers, held = {id(each): number for number, each in enumerate(known)}, io.BytesIO()

    class Naming(_TimedPickler):
        def persistent_id(self, obj: Any) -> int | None:
            return numbers.get(id(obj))

    (Naming if known else _TimedPickler)(held, pickle.HIGHEST_PROTOCOL).dump(what)
    return held.getvalue()


def _loads(what: bytes, known: Sequence[object]) -> Any:
    class Knowing(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> object:
            return known[pid]

    return Knowing(io.BytesIO(what)).load()


@dataclass(frozen=True, slots=True)
class CandidateWorkers:
    """An executor to evaluate candidates by, as ``renew`` makes it, of which ``window`` are given away at once.

    ``close`` is for one that is done with, or broken; None for one that is somebody else's.
    """

    renew: Callable[[], Executor]
    close: Callable[[Executor], None] | None
    window: int


@contextmanager
def workers_of(count: int, executor: Executor | None) -> Iterator[CandidateWorkers | None]:
    """So many processes for one search after another, or an executor; None for one process, which is this one.

    Raises:
        UsageError: an executor of threads, or something else that is none.
    """
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise UsageError(
            f"executor must be a concurrent.futures.Executor, or a name such as 'dask:tcp://host:8786', not "
            f"{type(executor).__name__}; leave it out, or give one"
        )
    if isinstance(executor, ThreadPoolExecutor):
        raise UsageError(
            "--executor of threads would change what the search itself works on; give one of processes or machines"
        )
    if executor is not None:
        given = executor
        yield CandidateWorkers(lambda: given, None, CANDIDATES_PER_WORKER * max(count, WORKERS_AT_ONCE))
        return
    if count == 1:
        yield None
        return
    made, ended = processes(count)
    held: list[ProcessPoolExecutor] = []

    def renew() -> Executor:
        if not held:
            held.append(made())
        return held[0]

    def close(executor: Executor) -> None:
        """End those that broke: others are for the next search."""
        if held and held[0] is executor and (_gone(executor) or _is_broken(executor)):
            ended(held.pop())

    try:
        yield CandidateWorkers(renew, close, CANDIDATES_PER_WORKER * count)
    finally:
        for executor in held:
            ended(executor)


class HandedOver:
    """An object that processes have when they begin, each as its own, until it is closed.

    Python writes what a process begins with into a pipe and waits for it to be read: for as long as imports take, or
    for ever where the process has ended. So it is in a file, which has no name and ends with those that have it open.

    Raises:
        OSError: there is no room for the file.
        TimeUpError: there is no time.
    """

    def __init__(self, what: object) -> None:
        self._file: IO[bytes] = TemporaryFile()  # noqa: SIM115  (it is closed by close)
        try:
            _TimedPickler(self._file, pickle.HIGHEST_PROTOCOL).dump(what)
            self._file.flush()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """No more processes begin with it."""
        self._file.close()

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return _taken, (DupFd(self._file.fileno()), self._file.tell())


def _taken(descriptor: Any, size: int) -> object:
    """What was handed over, in the process that begins with it."""
    with open(descriptor.detach(), "rb") as file:
        return pickle.loads(os.pread(file.fileno(), size, 0))  # its place in the file is that of all processes


def processes(
    count: int, begin: Callable[..., None] | None = None, *given: object, context: SpawnContext | None = None
) -> tuple[Callable[[], ProcessPoolExecutor], Callable[[Executor], None]]:
    """What makes an executor of ``count`` processes, each running ``begin`` first; and what ends one at once.

    They end where the process that made them does, however that ends. They are to begin :func:`deaf`. Of what they are
    ``given`` all that is large is :class:`HandedOver`. A ``context`` may begin them in another way.
    """
    # Threads of a progress line, and of the solver, do not survive a fork.
    how = SpawnContext() if context is None else context

    def made() -> ProcessPoolExecutor:
        with deaf():  # so that what keeps account of their semaphores outlives a terminal, too
            executor: Any = ProcessPoolExecutor(count, mp_context=how, initializer=_begin, initargs=(begin, given))
        # All begin with the first work: one that began later would come to a list that a thread of the executor goes
        # through as another one ends.
        executor._safe_to_dynamically_spawn_children = False
        return cast("ProcessPoolExecutor", executor)

    def ended(executor: Executor) -> None:
        assert isinstance(executor, ProcessPoolExecutor)
        for process in [*(executor._processes or {}).values()]:
            process.kill()
        # One may have been killed in the middle of an answer, or of what it was given: whoever waits for the rest of
        # it would wait for ever, as the other ends of these pipes are open here, too: the executor's thread, and at
        # the end of this process the one that gives. Some versions of Python close the second one themselves.
        inside: Any = executor
        inside._result_queue._writer.close()
        manager: Thread | None = inside._executor_manager_thread
        if manager is not None:
            manager.join(MOST_POLLS * WORKER_POLL_SECONDS)
            inside._call_queue._reader.close()
        executor.shutdown(wait=True, cancel_futures=True)

    return made, ended


class _ProcessWithoutMain(SpawnProcess):
    """Does not import the main module, as others do: a script whose own executor forks need not be written for that."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        own = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            return SpawnProcess._Popen(process_obj)
        finally:
            sys.modules["__main__"] = own


class _WithoutMain(SpawnContext):
    Process = _ProcessWithoutMain


def submitted(executor: Executor, work: Callable[..., Found], *given: object) -> Future[Found]:
    """Work given to an executor of ours, whose processes begin :func:`deaf`.

    Raises:
        BrokenExecutor: a process ended, or another one cannot begin. Python closes the pipes of processes as one ends,
            without a lock: under another that begins, whose list of descriptors is wrong then.
    """
    try:
        with deaf():
            future = executor.submit(work, *given)
    except (OSError, ValueError) as error:
        raise BrokenProcessPool(f"no process begins: {error}") from error
    fail = future.set_exception

    def unless_cancelled(error: BaseException | None) -> None:
        with suppress(InvalidStateError):
            fail(error)

    # As processes end the executor's thread fails all that is open; of what was cancelled that ends the thread itself.
    setattr(future, "set_exception", unless_cancelled)  # noqa: B010  # a method of this one alone
    return future


def _gone(executor: Executor | None) -> bool:
    """Whether a process of an executor of ours has ended, which only its death does."""
    known = executor._processes if isinstance(executor, ProcessPoolExecutor) else None
    return any(process.exitcode is not None for process in [*(known or {}).values()])


def _is_broken(executor: Executor) -> bool:
    """Whether an executor of ours takes nothing any more."""
    inside: Any = executor
    return bool(inside._broken)


@contextmanager
def deaf() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C and hangups, which a terminal sends to all: their parent handles them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGHUP])  # which they inherit
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(begin: Callable[..., None] | None, given: tuple[object, ...]) -> None:
    def follow() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    Thread(target=follow, daemon=True).start()
    if begin is not None:
        begin(*given)


@contextmanager
def named_executor(name: str, within: Limit | None = None) -> Iterator[Executor]:
    """An executor of a name as the command line has it: ``dask:ADDRESS`` of a scheduler.

    Waiting for it spends the time of ``within``, and ends with it.

    Raises:
        UsageError: it has another name, Dask is not installed, nobody answers there, or there are no workers.
        KeyboardInterrupt: interrupted while it was waited for.
    """
    kind, _, address = name.partition(":")
    if kind != "dask" or not address:
        raise UsageError(f"--executor {name!r} is not known; give dask:ADDRESS, such as dask:tcp://host:8786")
    try:
        from distributed import Client
    except ImportError:
        raise UsageError("--executor dask needs Dask; install pipeplan[dask]") from None
    limit = Limit() if within is None else within
    patience = min(SCHEDULER_PATIENCE, max(LEAST_PATIENCE, limit.left()))
    try:
        client: Any = _waited_for(
            lambda: Client(address, timeout=patience),  # type: ignore[no-untyped-call]  # Dask has it without types
            patience,
            limit,
            late=_closed,
        )
    except Exception as error:  # of Dask's own, or of the network
        raise UsageError(
            f"--executor {name}: no scheduler of Dask answers there within {patience:g} s ({error}); start one with "
            "dask scheduler, or leave --executor out"
        ) from None
    try:
        try:
            _waited_for(lambda: client.wait_for_workers(1, timeout=patience), patience, limit)
        except TimeoutError:
            raise UsageError(
                f"--executor {name}: the scheduler has no workers after {patience:g} s; start some with dask worker "
                f"{address}, or leave --executor out"
            ) from None
        yield client.get_executor(pure=False)
    finally:
        with suppress(Exception):  # a scheduler that does not answer any more is left to itself
            _waited_for(lambda: _closed(client), CLIENT_LEAVING_SECONDS, Limit())


def _closed(client: Any) -> None:
    client.close()


def _waited_for(
    work: Callable[[], Found], seconds: float, limit: Limit, late: Callable[[Found], object] = lambda _: None
) -> Found:
    """What work finds that may not come back, and does not ask for the time: it is done on a thread of its own.

    Where it is not waited for any longer, what it finds all the same is for ``late`` to deal with.

    Raises:
        TimeoutError: it takes longer, by the clock of the limit.
        KeyboardInterrupt: the limit was interrupted.
        Exception: what work raises.
    """
    future: Future[Found] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    def leave(future: Future[Found]) -> None:
        with suppress(Exception):
            late(future.result())

    until = limit.clock() + seconds
    Thread(target=do, daemon=True).start()
    while not future.done():
        if limit.interrupted or limit.clock() >= until:
            future.add_done_callback(leave)
            raise KeyboardInterrupt if limit.interrupted else TimeoutError("it took too long")
        wait([future], WORKER_POLL_SECONDS)
    return future.result()
