"""Start one process per device on this machine, watch them, and leave none running.

Needs no torch: the ranks import it, the parent only listens. A rank learns who it is from one line on its
standard input, which then stays open (it ends when the parent dies), and reports on a pipe of its own, one JSON
object a line. What it prints goes through the parent to standard error, so that only what rank 0 reports reaches the
user's standard output. Ranks meet in a file that nobody else can open, listen only on loopback, and never wait for the
parent, which may be stopped, or wait for who reads its own output.

torchrun starts ranks, too, and plans run under it. What it and torch's ``start_processes`` do not do, of all this, is
measured by ``benchmarks/launchers.py``: ranks outlive a launcher that is killed, wait for who reads their output, and
of one that failed nothing is known but its exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter

from pipeplan.errors import ExecutionError, FileError, PipeplanError
from pipeplan.files import Plan
from pipeplan.files.folded import device_programs
from pipeplan.runtime.launch.job import EVENTS, OnEvent, OnLook, Report, RunOptions, RunResult, job_of
from pipeplan.runtime.launch.loopback import transport_interfaces
from pipeplan.runtime.launch.output import RankOutput
from pipeplan.runtime.launch.processes import CopiedProcess, Identity
from pipeplan.runtime.launch.status import Board, Cause, Failure, Phase, death, first_failure, has_own_cause, verdict
from pipeplan.runtime.launch.stopping import STOPPING
from pipeplan.texts import printable

RANK = (sys.executable, "-m", "pipeplan.runtime.launch.__main__")
"""The command of a rank."""

Command = Sequence[str] | Callable[[Identity], None]
"""What a rank executes, or a function that copies of this process call with who they are."""

_START_TIMEOUT_NS = 180_000_000_000
_STDERR = 2  # the descriptor, since sys.stderr may be replaced by something that has none
_POLL_S = 0.05
_GRACE_S = 0.5  # after the first sign of trouble: its cause may be reported by another rank a moment later
_LATE_NS = 2_000_000_000  # a rank should report its own timeout before the parent does
_DEAF = (Phase.UNSEEN, Phase.STARTING, Phase.LOADING)  # a rank that has no handlers of signals yet
_PAUSE_NS = 1_000_000_000  # between two looks: the parent was stopped meanwhile, or waited for who reads its output
_EXIT_S = 30.0


def start_timeout_ns(timeout_ns: int) -> int:
    """Longest time for importing torch, connecting and building the model: ``--timeout``, but not below 180 s."""
    return max(timeout_ns, _START_TIMEOUT_NS)


@dataclass(slots=True)
class Listener:
    """Reads what the ranks of :func:`run_job` report: ``on_event`` is called as it happens, ``result`` is the whole."""

    on_event: OnEvent
    result: RunResult | None = None

    def __call__(self, rank: int, report: Report) -> None:
        """A report of a rank."""
        if report["event"] == "result":
            self.result = RunResult.from_json(report["result"])
        else:
            kind = next(kind for kind, name in EVENTS.items() if name == report["event"])
            self.on_event(kind(**report[report["event"]]))


def run_local(
    work: str,
    plan: Plan,
    options: RunOptions,
    on_event: OnEvent,
    on_look: OnLook = lambda where: None,
    command: Command = RANK,
) -> RunResult:
    """Run a verified plan with one process per device on this machine; ``on_event`` is called as steps end.

    Args:
        work: what a rank does, ``module:function``; it calls :func:`~pipeplan.runtime.launch.job.run_job`.
        plan: what the ranks get with the ``options``.
        options: how they run it.
        on_event: called with what is known at the start, each step's result, and each evaluation's.
        on_look: called many times a second with where rank 0 is, in words.
        command: what a rank executes; of options with objects it must be a function.

    Raises:
        UsageError: the ranks refused the model or the options.
        ExecutionError: a rank failed, died or hung; the text names rank and action.
    """
    listener, job = Listener(on_event), job_of(plan, options)
    watch_local(work, device_programs(plan), job, options.timeout_ns, listener, command, on_look)
    assert listener.result is not None, "rank 0 ends well only after it has reported its result"
    STOPPING.ended = listener.result.stopped_by > 0
    return listener.result


def watch_local(
    work: str,
    programs: Sequence[Sequence[str]],
    job: Report,
    timeout_ns: int,
    listen: Callable[[int, Report], None],
    command: Command = RANK,
    on_look: OnLook = lambda where: None,
) -> None:
    """Start a rank per program with one job, and return when all have ended well. Raises as :func:`run_local`.

    Args:
        work: what a rank does, ``module:function``, which is called with the job and its
            :class:`~pipeplan.runtime.launch.job.RankContext`.
        programs: the plan's programs, which give the number of ranks and name actions in errors.
        job: what every rank gets.
        timeout_ns: longest wait.
        listen: called with rank and report.
        command: as in :func:`run_local`.
        on_look: as in :func:`run_local`.
    """
    with _Ranks(programs, timeout_ns) as ranks:
        ranks.start(work, job, command)
        ranks.watch(listen, on_look)


class _Rank:
    """A child process: its report pipe, and what is known of its end."""

    def __init__(self, process: subprocess.Popen[bytes] | CopiedProcess, reports: int) -> None:
        self.process = process
        self.reports = reports
        self.unread = bytearray()
        self.open = True

    def read(self) -> list[Report]:
        """Reports that have arrived whole; ``open`` turns false at the end of the pipe."""
        data = os.read(self.reports, 1 << 20)
        self.open = bool(data)
        self.unread += data
        if b"\n" not in data:  # a long report comes in many pieces
            return []
        *lines, self.unread = self.unread.split(b"\n")
        return [json.loads(line) for line in lines]

    def kill(self) -> None:
        """End the process and what it started, stopped or not."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let go of a process that has ended."""
        self.process.wait()
        os.close(self.reports)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


class _Ranks:
    """All child processes; leaving the context ends every one of them."""

    def __init__(self, programs: Sequence[Sequence[str]], timeout_ns: int) -> None:
        self.programs = programs
        self.timeout_ns = timeout_ns
        self.ranks: list[_Rank] = []
        self.failures: list[Failure] = []
        self.deaths: dict[int, Failure] = {}
        self.done: set[int] = set()
        self.looked_ns = self.resumed_ns = time.monotonic_ns()
        self.handed_on = 0
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> _Ranks:
        size = Board.size(len(self.programs))
        self.shared = self._unnamed_file(b"\0" * size)
        self.board = Board(self.shared.fileno(), len(self.programs))
        self.output = RankOutput()
        self.stack.callback(self.output.close)
        self.board.programs = self.programs
        for rank in range(len(self.programs)):
            self.board.write(rank, Phase.STARTING, 0, -1, -1)
        return self

    def __exit__(self, *error: object) -> None:
        interrupted = False
        while self.ranks:
            try:  # also where Ctrl-C comes again: nothing may be left over
                for rank in self.ranks:
                    rank.kill()
                while self.ranks:
                    self.ranks[-1].close()
                    self.ranks.pop()
                self.output.pass_on(_STDERR)
            except KeyboardInterrupt:
                interrupted = True
        self.stack.close()
        if interrupted:
            raise KeyboardInterrupt

    def _unnamed_file(self, content: bytes) -> IO[bytes]:
        """An unnamed file to be inherited: nothing remains, whichever process dies first."""
        try:
            file = self.stack.enter_context(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115  (the stack closes it)
            left = memoryview(content)
            while left:
                left = left[file.write(left) :]
        except OSError as error:
            raise FileError(
                f"{tempfile.gettempdir()}: what ranks are given cannot be written there: {error.strerror}; make room, "
                "or name another folder with TMPDIR"
            ) from None
        return file

    def start(self, work: str, job: Report, command: Command) -> None:
        """Start all ranks."""
        meeting = self._unnamed_file(b"")
        job_file = meeting if callable(command) else self._unnamed_file(json.dumps(job).encode())
        identity = {
            "world_size": len(self.programs),
            "meeting": self._path_of(meeting),
            "work": work,
            "job": job if callable(command) else job_file.fileno(),
            "board": self.shared.fileno(),
            "parent": os.getpid(),
            "timeout_ns": self.timeout_ns,
        }
        inherited = [job_file.fileno(), meeting.fileno(), self.shared.fileno()]
        environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, **transport_interfaces(os.environ)}
        for rank in range(len(self.programs)):
            self._start_one(rank, identity, command, inherited, environment)
        self.output.begin()

    def _path_of(self, file: IO[bytes]) -> str:
        """A name under which ranks may open an unnamed file anew, or of another that only this user may open."""
        if Path(f"/proc/self/fd/{file.fileno()}").exists():
            return f"/proc/self/fd/{file.fileno()}"
        return os.path.join(self.stack.enter_context(tempfile.TemporaryDirectory()), "meeting")

    def _start_one(
        self,
        rank: int,
        identity: Report,
        command: Command,
        inherited: Sequence[int],
        environment: dict[str, str],
    ) -> None:
        reports, written = os.pipe()
        known = {**identity, "rank": rank, "reports": written}
        environment = environment | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(len(self.programs))}
        try:
            if callable(command):
                known["others"] = [each.process.stdin.fileno() for each in self.ranks if each.process.stdin is not None]
                self.ranks.append(_Rank(CopiedProcess(command, known, self.output.written, environment), reports))
                return
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=self.output.written,
                stderr=self.output.written,
                pass_fds=[written, *inherited],
                process_group=0,  # in this session: the system wakes one that stands still as its parent ends
                env=environment,
            )
        except OSError as error:
            os.close(reports)
            raise ExecutionError(f"rank {rank} cannot be started: {error.strerror or error}") from None
        finally:
            os.close(written)
        self.ranks.append(_Rank(process, reports))
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # died at once: watch() sees and says it
            process.stdin.write(json.dumps(known).encode() + b"\n")
            process.stdin.flush()

    def watch(self, listen: Callable[[int, Report], None], on_look: OnLook) -> None:
        """Pass on reports until all ranks have ended well, or raise what went wrong."""
        with selectors.DefaultSelector() as selector:
            for rank, child in enumerate(self.ranks):
                selector.register(child.reports, selectors.EVENT_READ, rank)
            while selector.get_map():
                self._receive(selector, listen)
                self._hand_on()
                on_look(self.board.place(0))
                self._notice_hangs()
                if self.failures or self._died():
                    self._gather(selector, listen)
                    if self.failures or self._died():  # a rank may have ended well between two looks
                        raise self._verdict()
        self._await_exits()

    def _hand_on(self) -> None:
        """Let the ranks end with a checkpoint, once all of them can take note of it, where this process is asked to.

        One that has ended, and its number, is not taken by another process before it is waited for.
        """
        if not STOPPING.asked or any(self.board.read(rank).phase in _DEAF for rank in range(len(self.ranks))):
            return
        for child in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.process.pid, STOPPING.asked)
        self.handed_on, STOPPING.asked = STOPPING.asked, 0

    def _receive(self, selector: selectors.BaseSelector, listen: Callable[[int, Report], None]) -> None:
        ready = selector.select(_POLL_S)
        self.output.pass_on(_STDERR)
        for key, _ in ready:
            rank: int = key.data
            for report in self.ranks[rank].read():
                if report["event"] == "failure":
                    self.failures.append(TypeAdapter(Failure).validate_python(report["failure"]))
                elif report["event"] == "done":
                    self.done.add(rank)
                else:
                    listen(rank, report)
            if not self.ranks[rank].open:
                selector.unregister(key.fileobj)

    def _gather(self, selector: selectors.BaseSelector, listen: Callable[[int, Report], None]) -> None:
        """Listen a moment longer: what came first may be an effect of what comes next."""
        until = time.monotonic() + _GRACE_S
        while time.monotonic() < until and not any(map(has_own_cause, self.failures)):
            if selector.get_map():
                self._receive(selector, listen)
            else:
                time.sleep(_POLL_S)
            self._died()

    def _died(self) -> list[Failure]:
        """Ranks that ended and reported neither success nor failure, each since it was first seen."""
        reported = self.done | {failure.rank for failure in self.failures}
        for rank, child in enumerate(self.ranks):
            status = None if rank in reported else child.process.poll()
            if status is not None and rank not in self.deaths:
                self.deaths[rank] = death(rank, status, self.board)
        return [found for rank, found in self.deaths.items() if rank not in reported]

    def _verdict(self) -> PipeplanError:
        first = first_failure([*self.failures, *self._died()])
        self.output.pass_on(_STDERR)
        sys.stderr.write(printable(first.details))
        return verdict(first, self.board, self.timeout_ns)

    def _notice_hangs(self) -> None:
        """Note what no rank's own timeout notices: an action that does not end, a stopped process.

        What ranks did while this process could not look is not known, so all begin anew when it goes on.
        """
        now = time.monotonic_ns()
        if now - self.looked_ns > _PAUSE_NS:
            self.resumed_ns = now
        self.looked_ns = now
        for rank in set(range(len(self.ranks))) - self.done:
            position = self.board.read(rank)
            allowed = self.timeout_ns + (_LATE_NS if position.phase.waits else 0)
            if position.phase.takes_long:
                allowed = start_timeout_ns(self.timeout_ns) + _LATE_NS
            if now - max(position.since_ns, self.resumed_ns) > allowed:
                self.failures.append(Failure(rank, Cause.TIMEOUT, ""))

    def _await_exits(self) -> None:
        """All pipes are closed; a process that then does not end, or ends badly, is a failure too."""
        until = time.monotonic() + _EXIT_S
        for rank, child in enumerate(self.ranks):
            try:
                status = child.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise ExecutionError(f"rank {rank} did not exit after its last step") from None
            if status or rank not in self.done:
                raise verdict(death(rank, status, self.board), self.board, self.timeout_ns)
        STOPPING.asked = STOPPING.asked or self.handed_on  # unless the ranks have ended for it
