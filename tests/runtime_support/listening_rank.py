"""Ranks that say where they listen, on a host whose name is that of an address for others, as most hosts' names are."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import itertools
import os
import resource
import socket
import sys
from pathlib import Path

from pipeplan.runtime.launch.__main__ import main
from pipeplan.runtime.launch.job import RankContext, Report

COMMAND = (sys.executable, "-m", "runtime_support.listening_rank")
HOST = "PIPEPLAN_TEST_HOST"
_NEW_USER, _NEW_UTS = 0x10000000, 0x04000000  # namespaces: of users, so that one may have others, and of host names
_LISTENS = "0A"


def listening() -> list[str]:
    """The addresses on which this process listens, IPv4 and IPv6."""
    return [address for address, _ in _sockets()]


def _sockets() -> list[tuple[str, int]]:
    """The same with ports."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it was that of the folder
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").rstrip("]"))
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    rows = [row.split() for table in tables if table.exists() for row in table.read_text().splitlines()[1:]]
    return [_socket(row[1]) for row in rows if row[3] == _LISTENS and row[9] in inodes]


def _socket(written: str) -> tuple[str, int]:
    """In hexadecimal digits, each four bytes of the address as one number of this machine."""
    digits, _, port = written.partition(":")
    words = [int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(b"".join(words))), int(port, 16)


def outward_address() -> str:
    """This host's address for others, or loopback where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return "127.0.0.1"
        return str(asked.getsockname()[0])


def rename_host(name: str) -> None:
    """Another host name, for this process alone; where it may not have one, it keeps the host's."""
    libc = ctypes.CDLL(None)
    if not libc.unshare(_NEW_UTS) or not libc.unshare(_NEW_USER | _NEW_UTS):
        socket.sethostname(name)


def listen_job(job: Report, context: RankContext) -> None:
    """The job of a rank: connects with all others, and reports the addresses."""
    import torch.distributed as dist

    group = dist.new_group(backend="gloo")
    dist.barrier(group)
    named = socket.gethostbyname(socket.gethostname())
    context.report(
        {"event": "listening", "addresses": listening(), "on": os.environ["GLOO_SOCKET_IFNAME"], "named": named}
    )


STRANGERS = (b"", bytes(8), *(number.to_bytes(8, sys.byteorder) for number in range(1, 9)), b"\xff" * 4096)
"""What they send: nothing, what may be numbers of connections, and what is none."""


def bothered_job(job: Report, context: RankContext) -> None:
    """The job of a rank that strangers connect to once it has met the others; reports how often, and sums."""
    import torch
    import torch.distributed as dist

    group = dist.new_group(backend="gloo")
    dist.barrier(group)
    with contextlib.ExitStack() as open_still:
        for (address, port), sent in itertools.product(_sockets(), STRANGERS):
            stranger = open_still.enter_context(socket.create_connection((address, port), timeout=10))
            stranger.sendall(sent)
        sums = []
        for number in range(20):
            given = torch.tensor([number + context.rank])
            dist.all_reduce(given, group=group)
            sums.append(given.item())
        context.report({"event": "bothered", "connections": len(STRANGERS) * len(_sockets()), "sums": sums})
        dist.barrier(group)


def full_job(job: Report, context: RankContext) -> None:
    """The job of a rank that finds no room on any disk once it has met the others."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))


if __name__ == "__main__":
    rename_host(os.environ[HOST])
    main()
