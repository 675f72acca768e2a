"""Signals by which schedulers end a job: a run that writes checkpoints writes one, and ends, after the step it is in.

SLURM sends what ``--signal`` says before time is up, Kubernetes SIGTERM before it ends a pod, torchrun hands that on.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def _never() -> bool:
    return False


@dataclass(slots=True)
class Stopping:
    """The signal that has come and that a run has not taken note of yet; 0 is none. There is one of a process.

    A run that some signal ends has ``ended``: to be told once is enough. Where it ``is_lost``, as other ranks have
    given up, signals do what they did: there may be no end of the step.
    """

    asked: int = 0
    ended: bool = False
    is_lost: Callable[[], bool] = _never
    _before: dict[signal.Signals, Any] = field(default_factory=dict)

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Note these signals instead of ending at once; afterwards the program has its own handlers again.

        One that comes when the run can no longer take note of it is raised once more, so that it is not lost. Only the
        main thread can set handlers: in any other one signals do what they did.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.asked, self.ended, self.is_lost = 0, False, _never
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield
        finally:
            self._leave()
            if (late := self.take()) and not self.ended:
                signal.raise_signal(late)

    def take(self) -> int:
        """The signal that has come since it was last asked for."""
        asked, self.asked = self.asked, 0
        return asked

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.is_lost():
            self._leave()
            signal.raise_signal(number)
        else:
            self.asked = number

    def _leave(self) -> None:
        """The program has its own handlers again."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


STOPPING = Stopping()
