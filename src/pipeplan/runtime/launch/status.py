"""The status of a run's ranks: where each is, what went wrong, and the one message that a failed run ends with.

A rank writes down what it begins in memory that all processes of a machine share, which costs about a microsecond. So
a failure's report can say where a rank was that was killed or hangs. When a rank dies, its neighbours lose their
connections and report that too; the cause is what is worth saying.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path

from pipeplan.errors import ExecutionError, PipeplanError, UsageError
from pipeplan.texts import number_ranges, printable
from pipeplan.units import format_ns

_FIELDS = 6  # phase, step, counter, peer, since_ns, process
_CELL_BYTES = 8
_READ_TRIES = 16


def warn(text: str) -> None:
    """Warn the user of a rank's finding, on standard error."""
    tell(f"warning: {text}")


def tell(text: str) -> None:
    """Tell the user something that is no warning, on standard error."""
    sys.stderr.write(printable(f"pipeplan: {text}\n"))
    sys.stderr.flush()


class Phase(IntEnum):
    """What a rank is busy with."""

    UNSEEN = 0
    STARTING = 1
    LOADING = 2
    CONNECTING = 3
    RUNNING = 4
    WAITING = 5
    REDUCING = 6
    UPDATING = 7
    REPORTING = 8
    DONE = 9
    SAMPLING = 10
    CLIPPING = 11
    RESUMING = 12
    SAVING = 13
    FAILED = 14

    @property
    def waits(self) -> bool:
        """Whether the rank can only go on when others do, or is not to be seen from here."""
        return self not in (Phase.STARTING, Phase.LOADING, Phase.SAMPLING, Phase.RUNNING, Phase.UPDATING)

    @property
    def takes_long(self) -> bool:
        """Whether it may take longer than the longest wait while steps run."""
        return self in (Phase.STARTING, Phase.LOADING, Phase.CONNECTING, Phase.RESUMING, Phase.SAVING)


_OUTSIDE = {
    Phase.UNSEEN: "on another machine",
    Phase.STARTING: "while starting",
    Phase.LOADING: "while building its blocks",
    Phase.CONNECTING: "while connecting to the other ranks",
    Phase.SAMPLING: "in step {step}, before its program: drawing its samples",
    Phase.REDUCING: "in step {step}, after its program: summing the gradients of parameters that other ranks hold too",
    Phase.CLIPPING: "in step {step}, after its program: computing the norm of all gradients",
    Phase.RESUMING: "before its first step: reading what to start from",
    Phase.SAVING: "after step {step}: writing a checkpoint or the weights",
    Phase.UPDATING: "in step {step}, after its program: optimizer step",
    Phase.REPORTING: "in step {step}, after its program: reporting the loss",
    Phase.DONE: "after its last step",
    Phase.FAILED: "after it failed",
}


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is. ``counter`` is an index into its program, ``peer`` the rank it waits for or -1.

    ``since_ns`` is on ``time.monotonic_ns``'s clock, which processes of one machine share.
    """

    phase: Phase
    step: int
    counter: int
    peer: int
    since_ns: int

    def describe(self, program: Sequence[str]) -> str:
        """The place in words: action, step and program counter, or what the rank does outside its program."""
        if self.phase not in (Phase.RUNNING, Phase.WAITING):
            return _OUTSIDE[self.phase].format(step=self.step)
        action = program[self.counter] if 0 <= self.counter < len(program) else "?"
        return f"in {action} (step {self.step}, program counter {self.counter} of {len(program)})"


class Board:
    """One :class:`Position` per rank in an open file of :meth:`size` bytes, mapped by all processes.

    ``programs`` are what this process knows of the ranks' programs, as texts, ``machines`` the names of theirs, and
    ``meeting`` of that where ranks meet; ``silent`` ranks of others were not heard of when those here had failed.
    """

    def __init__(self, descriptor: int, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.programs: Sequence[Sequence[str]] = [()] * num_ranks
        self.machines: Sequence[str] = ()
        self.meeting = ""
        self.silent: Sequence[int] = ()
        self._cells = memoryview(mmap.mmap(descriptor, self.size(num_ranks))).cast("q")

    @staticmethod
    def size(num_ranks: int) -> int:
        """Bytes the file must have."""
        return num_ranks * _FIELDS * _CELL_BYTES

    def write(self, rank: int, phase: Phase, step: int, counter: int, peer: int) -> None:
        """Note that a rank begins something now."""
        cells, first = self._cells, rank * _FIELDS
        cells[first + 4] = time.monotonic_ns()
        cells[first] = phase
        cells[first + 1] = step
        cells[first + 2] = counter
        cells[first + 3] = peer

    def read(self, rank: int) -> Position:
        """Where a rank is; one that has written nothing, as ranks of other machines, is ``UNSEEN``."""
        first = rank * _FIELDS
        found: list[int] = []
        for _ in range(_READ_TRIES):  # the rank writes cell by cell and never waits: two equal looks are one state
            before, found = found, self._cells[first : first + _FIELDS - 1].tolist()
            if found == before:
                break
        return Position(Phase(found[0]), *found[1:])

    def place(self, rank: int) -> str:
        """Where a rank is, in words."""
        position = self.read(rank)
        if position.phase is Phase.UNSEEN and self.machines:
            return f"on machine {self.machines[rank]}"
        return position.describe(self.programs[rank])

    def sign(self, rank: int) -> None:
        """Note which process the rank is."""
        self._cells[rank * _FIELDS + 5] = os.getpid()

    @property
    def stopped(self) -> list[int]:
        """Ranks of this machine whose processes are stopped, as by SIGSTOP."""
        return [rank for rank, state in self._states() if state in ("T", "t")]

    @property
    def gone(self) -> list[int]:
        """Ranks of this machine whose processes have ended, but those that left because of a failure."""
        ended = [rank for rank, state in self._states() if state in ("", "Z", "X")]
        return [rank for rank in ended if self.read(rank).phase is not Phase.FAILED]

    @property
    def has_failed(self) -> bool:
        """Whether a rank of this machine has given up, and said why."""
        return any(self.read(rank).phase is Phase.FAILED for rank in range(self.num_ranks))

    def _states(self) -> Iterator[tuple[int, str]]:
        """The states of ranks that have signed."""
        signed = [rank for rank in range(self.num_ranks) if self._process(rank)]
        return ((rank, _state(self._process(rank))) for rank in signed)

    def wake(self) -> None:
        """Let stopped processes go on."""
        for rank in self.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process(rank), signal.SIGCONT)

    def _process(self, rank: int) -> int:
        return self._cells[rank * _FIELDS + 5]


class Progress:
    """One rank's pen for the :class:`Board`, and the ``step`` it works on."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board = board
        self.rank = rank
        self.step = 0
        board.sign(rank)
        self.begin(Phase.STARTING)

    def begin(self, phase: Phase, counter: int = -1, peer: int = -1) -> None:
        """Note what the rank does from now on; ``counter`` and ``peer`` as in :class:`Position`."""
        self.board.write(self.rank, phase, self.step, counter, peer)

    def describe(self) -> str:
        """Where the rank is, in words."""
        return self.board.place(self.rank)


def _state(process: int) -> str:
    """The letter by which Linux says what a process does, nothing if there is none; R where the system does not say."""
    if not Path("/proc/self/stat").exists():
        return "R"
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(") ")[2][:1]
    except OSError:
        return ""


class Cause(StrEnum):
    """Why a rank gave up. The last two may be the effect of what happened to another rank."""

    REFUSED = "refused"  # before the first step: model, plan and options do not fit together
    RAISED = "raised"  # an exception in the model's code or ours
    DIED = "died"  # its process ended without a word
    TIMEOUT = "timeout"  # nothing came for as long as --timeout allows
    LOST = "lost"  # the connection to another rank broke


class RankError(ExecutionError):
    """A rank cannot go on; the text names rank, action and program counter. ``peer`` is the rank it lost, or -1."""

    def __init__(self, cause: Cause, message: str, peer: int = -1) -> None:
        self.cause = cause
        self.peer = peer
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank reports, or is seen of it: the command's exit code, maybe a traceback, and the lost ``peer`` or -1.

    ``at_ns`` is when it happened, on the clock of :class:`Position`.
    """

    rank: int
    cause: Cause
    text: str
    exit_code: int = 1
    details: str = ""
    peer: int = -1
    at_ns: int = field(default_factory=time.monotonic_ns)


def cause_of(error: RuntimeError) -> tuple[Cause, str]:
    """What an error of a transport means, TIMEOUT or LOST, and its text without place and advice."""
    text = re.sub(r"^\[[^\]]*\] *", "", str(error).strip().partition("\n")[0]).partition(". ")[0]
    return Cause.TIMEOUT if re.search("timed ?out|timeout", text, re.IGNORECASE) else Cause.LOST, text


@contextlib.contextmanager
def transport_errors(as_error: Callable[[Cause, str], ExecutionError | RuntimeError]) -> Iterator[None]:
    """Turn what a transport raises into an error of its cause and text (:func:`cause_of`)."""
    try:
        yield
    except RuntimeError as error:
        raise as_error(*cause_of(error)) from error


def lost_others(progress: Progress) -> contextlib.AbstractContextManager[None]:
    """Turn what a collective of all ranks raises into an error that names rank and place."""

    def lost(cause: Cause, text: str) -> RankError:
        return RankError(cause, f"rank {progress.rank} lost the others {progress.describe()}: {text}")

    return transport_errors(lost)


_NAMED = 8
"""Machines that an error names."""


def _silence(board: Board) -> str:
    """Which machines nothing was heard of, in words; empty where they all answered, or that is not known."""
    names = list(dict.fromkeys(board.machines[rank] for rank in board.silent))
    where = f"{', '.join(names[:_NAMED])}{f' and {len(names) - _NAMED} more' * (len(names) > _NAMED)}"
    ranks = f"rank{'s' * (len(board.silent) > 1)} {number_ranges(board.silent)}"
    return f"nothing is heard of {ranks} on machine{'s' * (len(names) > 1)} {where}; " * bool(names)


_EFFECTS = (Cause.TIMEOUT, Cause.LOST)
"""What also comes of others' failures: of a rank that gives up first, then of one that leaves."""


def has_own_cause(failure: Failure) -> bool:
    """Whether a failure is never the effect of what happened to another rank."""
    return failure.cause not in _EFFECTS


def first_failure(failures: Sequence[Failure]) -> Failure:
    """The one that the others are effects of, in whatever order they are known.

    That is the earliest of those with a cause of their own, where there are such.
    """
    own = [failure for failure in failures if has_own_cause(failure)]
    if own:
        return min(own, key=lambda failure: failure.at_ns)
    return min(failures, key=lambda failure: (_EFFECTS.index(failure.cause), not failure.text, failure.at_ns))


def verdict(first: Failure, board: Board, timeout_ns: int) -> PipeplanError:
    """The one error that a run ends with whose :func:`first_failure` this is; ``timeout_ns``: the longest wait."""
    if has_own_cause(first):
        return UsageError(first.text) if first.exit_code == UsageError.exit_code else ExecutionError(first.text)
    if first.cause is Cause.LOST:
        return ExecutionError(f"{_silence(board)}{loss(first, board)}")
    return ExecutionError(f"{_silence(board)}{hang(first.rank, first.text, board, timeout_ns)}")


def death(rank: int, status: int, board: Board) -> Failure:
    """A rank's process has ended without a word, with this status as ``subprocess`` gives it: how, and where it was."""
    place = board.place(rank)
    if status >= 0:
        return Failure(rank, Cause.DIED, f"rank {rank} ended with exit code {status} {place}")
    name = signal.Signals(-status).name if -status in {int(s) for s in signal.Signals} else f"signal {-status}"
    hint = "; often because memory ran out" if -status == signal.SIGKILL else ""
    return Failure(rank, Cause.DIED, f"rank {rank} was killed ({name}) {place}{hint}")


def loss(failure: Failure, board: Board) -> str:
    """A connection broke: which ranks have ended, and where, or else where the other end was last."""
    gone = board.gone
    peers = [failure.peer] if failure.peer >= 0 else [rank for rank in gone if rank != failure.rank]
    ended = [f"rank {peer} ended {board.place(peer)}" for peer in peers if peer in gone]
    last = [f"rank {peer} was last {board.place(peer)}" for peer in peers if peer not in gone]
    return "; ".join([*ended, failure.text, *last])


def hang(rank: int, text: str, board: Board, timeout_ns: int) -> str:
    """A rank waited too long: who holds it up, where that one is, and what the first one waited for."""
    other = rank if board.silent else culprit(board, rank)  # who waits for whom beyond this machine is not known
    place = board.place(other)
    remedy = f"if it is only slow, raise --timeout (now {format_ns(timeout_ns)})"
    if other == rank:
        return f"{text or f'rank {rank} hangs {place}'}; {remedy}"
    return f"rank {other} hangs {place}; {text or f'rank {rank} waits for it'}; {remedy}"


def culprit(board: Board, rank: int) -> int:
    """The rank that holds up ``rank``: whom it waits for, and so on, up to one that does not wait.

    A stopped process comes before all. Where the chain ends at a rank that waits for all, or in a circle, it is the
    rank that has stood still for longest: of those that wait for nobody, else of the chain.
    """
    stopped = board.stopped
    if stopped:
        return min(stopped, key=lambda other: board.read(other).since_ns)
    chain = [rank]
    position = board.read(rank)
    while position.phase is Phase.WAITING and position.peer not in (-1, *chain):
        chain.append(position.peer)
        position = board.read(position.peer)
    if not position.phase.waits:
        return chain[-1]
    idle = [other for other in range(board.num_ranks) if not board.read(other).phase.waits]
    candidates = chain if position.phase is Phase.WAITING else idle or chain
    return min(candidates, key=lambda other: board.read(other).since_ns)
