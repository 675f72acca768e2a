"""Where the ranks of one machine listen: on its loopback interface, since transports authenticate nobody."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from pipeplan.errors import ExecutionError

_PREFIXES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}
"""What gives a transport its interface, and what it wants before a whole name."""

_NAMES = ("lo", "lo0")
"""Of the interface, on Linux and on macOS."""


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
    """Its name. Raises ExecutionError where none is up."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as here, socket.create_connection(here.getsockname()):
            return next(name for _, name in socket.if_nameindex() if name in _NAMES)
    except (OSError, StopIteration):
        raise ExecutionError(
            "ranks listen on the loopback interface, and none is up; name another one in GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME"
        ) from None
