"""Signals by which schedulers end a job: a run that writes checkpoints writes one, and ends, after the step it is in.

SLURM sends what ``--signal`` says before time is up, Kubernetes SIGTERM before it ends a pod, torchrun hands that on.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(slots=True)
class Stopping:
    """The signal that has come and that a run has not taken note of yet; 0 is none. There is one of a process.

    A run that some signal ends has ``ended``: to be told once is enough.
    """

    asked: int = 0
    ended: bool = False

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Note these signals instead of ending at once; afterwards the program has its own handlers again.

        One that comes when the run can no longer take note of it is raised once more, so that it is not lost. Only the
        main thread can set handlers: in any other one signals do what they did.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.asked, self.ended = 0, False
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            if (late := self.take()) and not self.ended:
                signal.raise_signal(late)

    def take(self) -> int:
        """The signal that has come since it was last asked for."""
        asked, self.asked = self.asked, 0
        return asked

    def _note(self, number: int, _: FrameType | None) -> None:
        self.asked = number


STOPPING = Stopping()
