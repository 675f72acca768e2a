"""Signals by which schedulers end a job: a run that writes checkpoints writes one, and ends, after the step it is in.

SLURM sends what ``--signal`` says before time is up, Kubernetes SIGTERM before it ends a pod, torchrun hands that on.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(slots=True)
class Stopping:
    """The signal that has come, and the one that ended the run; 0 is none. There is one of a process."""

    asked: int = 0
    ended: int = 0

    def heed(self) -> None:
        """From now on note these signals instead of ending at once."""
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.asked = number


STOPPING = Stopping()
