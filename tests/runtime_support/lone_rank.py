"""This process as the only rank that a launcher has started: what such a rank does, without starting any process."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import NoReturn
from unittest import mock

from pipeplan.runtime.launch import worker


def _raise(code: int) -> NoReturn:
    raise AssertionError(f"the rank would have ended with {code}")


@contextlib.contextmanager
def lone_rank() -> Iterator[None]:
    """While it lasts, runs are those of a launcher's rank; one that fails raises instead of ending the process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    said = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    patched = mock.patch.multiple(worker, _STORES=[], _leave=_raise)
    with mock.patch.dict(os.environ, said), patched:
        yield
