"""Where every rank is, in memory that all processes of one machine share.

A rank writes down what it begins, which costs about a microsecond. So a failure's report can say where a rank was that
was killed or hangs.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

__all__ = ["Board", "Phase", "Progress"]

_FIELDS = 6  # phase, step, counter, peer, since_ns, process
_CELL_BYTES = 8
_READ_TRIES = 16


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
    Phase.RESUMING: "before its first step: looking for a checkpoint to resume from",
    Phase.SAVING: "after step {step}: writing a checkpoint",
    Phase.UPDATING: "in step {step}, after its program: optimizer step",
    Phase.REPORTING: "in step {step}, after its program: reporting the loss",
    Phase.DONE: "after its last step",
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
    """One :class:`Position` per rank in a file mapped by all processes.

    Args:
        descriptor: an open file, at least :meth:`size` bytes long.
        num_ranks: number of positions.
    """

    def __init__(self, descriptor: int, num_ranks: int) -> None:
        self.num_ranks = num_ranks
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

    def sign(self, rank: int) -> None:
        """Note which process the rank is."""
        self._cells[rank * _FIELDS + 5] = os.getpid()

    @property
    def stopped(self) -> list[int]:
        """Ranks of this machine whose processes are stopped, as by SIGSTOP."""
        return [rank for rank, state in self._states() if state in ("T", "t")]

    @property
    def gone(self) -> list[int]:
        """Ranks of this machine whose processes have ended."""
        return [rank for rank, state in self._states() if state in ("", "Z", "X")]

    def _states(self) -> Iterator[tuple[int, str]]:
        """Of ranks that have signed."""
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
    """One rank's pen: what the rank itself writes on the :class:`Board`.

    ``program`` has the texts of its actions, ``step`` the mini-batch it works on.
    """

    def __init__(self, board: Board, rank: int, program: Sequence[str] = ()) -> None:
        self.board = board
        self.rank = rank
        self.program = program
        self.step = 0
        board.sign(rank)
        self.begin(Phase.STARTING)

    def begin(self, phase: Phase, counter: int = -1, peer: int = -1) -> None:
        """Note what the rank does from now on; ``counter`` and ``peer`` as in :class:`Position`."""
        self.board.write(self.rank, phase, self.step, counter, peer)

    def describe(self) -> str:
        """Where the rank is, in words."""
        return self.board.read(self.rank).describe(self.program)


def _state(process: int) -> str:
    """The letter by which Linux says what a process does, nothing if there is none; R where the system does not say."""
    if not Path("/proc/self/stat").exists():
        return "R"
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(") ")[2][:1]
    except OSError:
        return ""
