"""What ranks print: taken from them at once, so that none waits for who reads it, and passed on as that one reads."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import threading
from collections import deque

from pipeplan.runtime.launch.status import tell

_PIPE_BYTES = 1 << 20  # as much as a pipe may have without privileges: what fits while this process is stopped
_MOST_BYTES = 1 << 24
_READ_BYTES = 1 << 16
_LOOK_S = 0.2


class RankOutput:
    """A pipe that ranks print to, ``written``, and a thread that empties it, whatever else this process waits for.

    :meth:`pass_on` writes what has come to a descriptor. Of what nobody reads meanwhile the last 16 MiB are kept.
    """

    def __init__(self) -> None:
        self._pipe, self.written = os.pipe()
        os.set_blocking(self._pipe, False)
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with contextlib.suppress(OSError):  # of a user who has too many of them it stays as large as it is
                fcntl.fcntl(self.written, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._waiting: deque[bytes] = deque()
        self._num_bytes = self._num_lost = 0
        self._open, self._read_by_nobody = True, False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._empty, daemon=True, name="output of ranks")

    def begin(self) -> None:
        """All ranks have been started, and have the end that is written."""
        os.close(self.written)
        self._thread.start()

    def pass_on(self, descriptor: int) -> None:
        """Write what ranks have printed so far, which blocks as long as the reader does."""
        self._take()
        if self._num_lost:
            tell(f"{self._num_lost} bytes that ranks printed are left out: nobody read on for too long")
            self._num_lost = 0
        while self._waiting:
            with self._lock:
                first = self._waiting.popleft()
                self._num_bytes -= len(first)
            self._write(descriptor, first)

    def _write(self, descriptor: int, data: bytes) -> None:
        while data and not self._read_by_nobody:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                select.select([], [descriptor], [])
            except OSError:  # who read it has left, or a disk is full: the run goes on
                self._read_by_nobody = True

    def close(self) -> None:
        """Let go of the pipe: ranks have ended."""
        self._open = False
        if self._thread.ident is None:
            os.close(self.written)
        else:
            self._thread.join()
        os.close(self._pipe)

    def _empty(self) -> None:
        """What the thread does."""
        while self._open:
            select.select([self._pipe], [], [], _LOOK_S)
            if not self._take():
                return

    def _take(self) -> bool:
        """Take what is in the pipe; False where all who could write to it have ended."""
        with self._lock:
            while True:
                try:
                    data = os.read(self._pipe, _READ_BYTES)
                except BlockingIOError:
                    return True
                if not data:
                    return False
                self._waiting.append(data)
                self._num_bytes += len(data)
                while self._num_bytes > _MOST_BYTES:
                    lost = len(self._waiting.popleft())
                    self._num_bytes -= lost
                    self._num_lost += lost
