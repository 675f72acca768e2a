"""What goes wrong on a rank, in its own words, and the one message that a failed run ends with.

When a rank dies, its neighbours lose their connections and report that too. The cause is what is worth saying.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipeplan.errors import ExecutionError, PipeplanError, UsageError
from pipeplan.runtime.launch.status_board import Board, Phase, Progress
from pipeplan.units import format_ns

__all__ = ["Cause", "Failure", "RankError", "cause_of", "culprit", "lost_others", "telling", "verdict"]


class Cause(StrEnum):
    """Why a rank gave up, most telling first."""

    REFUSED = "refused"  # before the first step: model, plan and options do not fit together
    RAISED = "raised"  # an exception in the model's code or ours
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
    """A rank's own report.

    ``exit_code`` is what the command ends with, ``details`` a traceback or nothing, ``peer`` the rank that was
    lost or -1.
    """

    rank: int
    cause: Cause
    text: str
    exit_code: int = 1
    details: str = ""
    peer: int = -1


def cause_of(error: RuntimeError) -> tuple[Cause, str]:
    """What an error of a transport means, TIMEOUT or LOST, and its text without place and advice."""
    text = re.sub(r"^\[[^\]]*\] *", "", str(error).strip().partition("\n")[0]).partition(". ")[0]
    return Cause.TIMEOUT if re.search("timed ?out|timeout", text, re.IGNORECASE) else Cause.LOST, text


@contextlib.contextmanager
def lost_others(progress: Progress) -> Iterator[None]:
    """Turn what a collective of all ranks raises into an error that names rank and place."""
    try:
        yield
    except RuntimeError as error:
        cause, text = cause_of(error)
        raise RankError(cause, f"rank {progress.rank} lost the others {progress.describe()}: {text}") from error


def verdict(
    failures: Sequence[Failure],
    deaths: Mapping[int, int],
    board: Board,
    programs: Sequence[Sequence[str]],
    timeout_ns: int,
) -> PipeplanError:
    """The one error that a failed run ends with.

    ``failures`` are what ranks reported, in order of arrival; ``deaths`` the exit status of those that ended without a
    report, as ``subprocess`` gives it; ``timeout_ns`` is the longest wait allowed.
    """
    cause = telling(failures)
    if cause is not None:
        return UsageError(cause.text) if cause.exit_code == UsageError.exit_code else ExecutionError(cause.text)
    if deaths:
        return ExecutionError("; ".join(death(rank, deaths[rank], board, programs) for rank in sorted(deaths)))
    first = min(failures, key=lambda failure: (failure.cause is Cause.LOST, not failure.text))
    if first.cause is Cause.LOST:
        return ExecutionError(loss(first, board, programs))
    return ExecutionError(hang(first.rank, first.text, board, programs, timeout_ns))


def telling(failures: Sequence[Failure]) -> Failure | None:
    """The failure that explains the others by itself, if one does: a refusal, or else an exception."""
    found = [failure for failure in failures if failure.cause in (Cause.REFUSED, Cause.RAISED)]
    return min(found, key=lambda failure: failure.cause is Cause.RAISED, default=None)


def death(rank: int, status: int, board: Board, programs: Sequence[Sequence[str]]) -> str:
    """A rank ended without a word: how, and where it was."""
    place = board.read(rank).describe(programs[rank])
    if status >= 0:
        return f"rank {rank} ended with exit code {status} {place}"
    name = signal.Signals(-status).name if -status in {int(s) for s in signal.Signals} else f"signal {-status}"
    hint = "; often because memory ran out" if -status == signal.SIGKILL else ""
    return f"rank {rank} was killed ({name}) {place}{hint}"


def loss(failure: Failure, board: Board, programs: Sequence[Sequence[str]]) -> str:
    """A connection broke: whose, or which ranks have ended, and where they were last."""
    peers = [failure.peer] if failure.peer >= 0 else [rank for rank in board.gone if rank != failure.rank]
    return "; ".join(
        [failure.text, *(f"rank {peer} was last {board.read(peer).describe(programs[peer])}" for peer in peers)]
    )


def hang(rank: int, text: str, board: Board, programs: Sequence[Sequence[str]], timeout_ns: int) -> str:
    """A rank waited too long: who holds it up, where that one is, and what the first one waited for."""
    other = culprit(board, rank)
    place = board.read(other).describe(programs[other])
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
