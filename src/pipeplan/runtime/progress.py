"""Where every rank is, in memory that all processes of one machine share.

A rank writes down what it begins, which costs about a microsecond. Whoever reports a failure can then say where
a rank was that cannot say it any more, because it was killed or hangs.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["Board", "Phase", "Position", "Progress"]

_RECORD = struct.Struct("=5q")  # phase, step, counter, peer, since_ns


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

    @property
    def waits(self) -> bool:
        """Whether the rank can only go on when others do, or is not to be seen from here."""
        return self not in (Phase.STARTING, Phase.LOADING, Phase.RUNNING, Phase.UPDATING)


_OUTSIDE = {
    Phase.UNSEEN: "on another machine",
    Phase.STARTING: "while starting",
    Phase.LOADING: "while building its blocks",
    Phase.CONNECTING: "while connecting to the other ranks",
    Phase.REDUCING: "in step {step}, behind its program: summing gradients of tied parameters",
    Phase.UPDATING: "in step {step}, behind its program: optimizer step",
    Phase.REPORTING: "in step {step}, behind its program: reporting the loss",
    Phase.DONE: "behind its last step",
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
        self._memory = mmap.mmap(descriptor, self.size(num_ranks))

    @staticmethod
    def size(num_ranks: int) -> int:
        """Bytes the file must have."""
        return num_ranks * _RECORD.size

    def write(self, rank: int, phase: Phase, step: int, counter: int, peer: int) -> None:
        """Note that a rank begins something now."""
        _RECORD.pack_into(self._memory, rank * _RECORD.size, phase, step, counter, peer, time.monotonic_ns())

    def read(self, rank: int) -> Position:
        """Where a rank is; one that has written nothing, as ranks of other machines, is ``UNSEEN``."""
        phase, step, counter, peer, since_ns = _RECORD.unpack_from(self._memory, rank * _RECORD.size)
        return Position(Phase(phase), step, counter, peer, since_ns)

    def culprit(self, rank: int) -> int:
        """The rank that holds up ``rank``: whom it waits for, and so on, up to one that does not wait.

        Where the chain ends at a rank that waits for all, or in a circle, it is the rank that has stood still
        for longest: first among those that wait for nobody, then among all of the chain.
        """
        chain = [rank]
        position = self.read(rank)
        while position.phase is Phase.WAITING and position.peer not in (-1, *chain):
            chain.append(position.peer)
            position = self.read(position.peer)
        if not position.phase.waits:
            return chain[-1]
        idle = [other for other in range(self.num_ranks) if not self.read(other).phase.waits]
        candidates = chain if position.phase is Phase.WAITING else idle or chain
        return min(candidates, key=lambda other: self.read(other).since_ns)


class Progress:
    """One rank's pen: what the rank itself writes on the :class:`Board`.

    ``program`` has the texts of its actions, ``step`` the mini-batch it works on.
    """

    def __init__(self, board: Board, rank: int, program: Sequence[str] = ()) -> None:
        self.board = board
        self.rank = rank
        self.program = program
        self.step = 0
        self.begin(Phase.STARTING)

    def begin(self, phase: Phase, counter: int = -1, peer: int = -1) -> None:
        """Note what the rank does from now on; ``counter`` and ``peer`` as in :class:`Position`."""
        self.board.write(self.rank, phase, self.step, counter, peer)

    def describe(self) -> str:
        """Where the rank is, in words."""
        return self.board.read(self.rank).describe(self.program)
