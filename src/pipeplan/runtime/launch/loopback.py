"""Where the ranks of one machine listen: on its loopback interface, since transports authenticate nobody."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from pipeplan.errors import ExecutionError

_PREFIXES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}
"""What gives a transport its interface, and what it wants before a whole name."""

_UP, _LOOPBACK = 0x1, 0x8  # flags of interfaces, the same on Linux and macOS


class _Interface(ctypes.Structure):
    """The beginning of C's ``struct ifaddrs``."""


_Interface._fields_ = [("next", ctypes.POINTER(_Interface)), ("name", ctypes.c_char_p), ("flags", ctypes.c_uint)]


def transport_interfaces(given: Mapping[str, str]) -> dict[str, str]:
    """Variables that have transports listen on loopback, but where those ``given`` say otherwise.

    Without them gloo listens on whatever address the host's name has. Raises ExecutionError.
    """
    missing = [name for name in _PREFIXES if not given.get(name)]
    if not missing:
        return {}
    found = loopback_interface()
    return {name: _PREFIXES[name] + found for name in missing}


def loopback_interface() -> str:
    """Its name: ``lo`` on Linux, ``lo0`` on macOS. Raises ExecutionError where none is up."""
    libc, first = ctypes.CDLL(None, use_errno=True), ctypes.POINTER(_Interface)()
    if libc.getifaddrs(ctypes.byref(first)):
        raise ExecutionError(f"network interfaces cannot be listed: {os.strerror(ctypes.get_errno())}")
    try:
        each = first
        while each:
            if each.contents.flags & (_UP | _LOOPBACK) == _UP | _LOOPBACK:
                return os.fsdecode(each.contents.name)
            each = each.contents.next
    finally:
        libc.freeifaddrs(first)
    raise ExecutionError(
        "ranks listen on the loopback interface, and none is up; name another one in GLOO_SOCKET_IFNAME and "
        "NCCL_SOCKET_IFNAME"
    )
