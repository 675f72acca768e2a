"""Bytes that a process has sent over its TCP connections, as the system counts them: gloo's are among them."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

_SENT_AND_SENT_AGAIN = struct.Struct("=QQ")
_OFFSET = 200
"""Of these in Linux's ``tcp_info``, which has them since 4.19."""


def sent_over_tcp() -> int | None:
    """So far, without what was sent again; None where the system does not say."""
    try:
        numbers = [int(each) for each in os.listdir("/proc/self/fd")]
    except OSError:
        return None
    counts = [count for number in numbers for count in _sent(number)]
    return sum(counts) if counts else None


def _sent(number: int) -> Iterator[int]:
    """Of an open file, if it is a connection."""
    try:
        if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
            return
        with socket.socket(fileno=os.dup(number)) as copied:
            if copied.family not in (socket.AF_INET, socket.AF_INET6) or copied.type != socket.SOCK_STREAM:
                return
            said = copied.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _OFFSET + _SENT_AND_SENT_AGAIN.size)
    except (OSError, AttributeError):
        return
    if len(said) >= _OFFSET + _SENT_AND_SENT_AGAIN.size:
        sent, again = _SENT_AND_SENT_AGAIN.unpack_from(said, _OFFSET)
        yield sent - again
