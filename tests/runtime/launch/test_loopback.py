"""Ranks of ``--local`` listen on loopback alone, whatever the host's name leads to: no transport asks who connects."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import pytest

from pipeplan.errors import ExecutionError
from pipeplan.runtime.launch import loopback
from pipeplan.runtime.launch.job import Report
from pipeplan.runtime.launch.local import watch_local
from runtime_support.listening_rank import COMMAND, HOST, listening, outward_address
from runtime_support.warm import warm_ranks

NUM_RANKS = 2


def addresses_of_a_run(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Where each rank listens, and then this process, while all are connected."""
    monkeypatch.setenv(HOST, outward_address())
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    found: dict[int, list[str]] = {}

    def listen(rank: int, report: Report) -> None:
        assert report["on"] == loopback.loopback_interface()
        found[rank] = report["addresses"]
        found[NUM_RANKS] = listening()

    with warm_ranks():
        work = "runtime_support.listening_rank:listen_job"
        watch_local(work, [("0F0",)] * NUM_RANKS, {}, 60 * 10**9, listen, COMMAND)
    return [found[rank] for rank in range(NUM_RANKS + 1)]


def test_ranks_and_their_parent_listen_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, parent = addresses_of_a_run(monkeypatch)
    assert len(first) > len(second) > 0, "each listens for the others, and rank 0 keeps where they meet"
    assert all(ipaddress.ip_address(each).is_loopback for each in first + second + parent), (first, second, parent)


def test_ranks_meet_where_there_is_no_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    create_server = socket.create_server

    def refuse(address: tuple[str, int], **how: Any) -> socket.socket:
        if how["family"] == socket.AF_INET:
            raise OSError("Cannot assign requested address")
        return create_server(address, **how)

    monkeypatch.setattr(socket, "create_server", refuse)
    try:
        loopback.loopback_server(1).close()
    except ExecutionError:
        pytest.skip("there is no IPv6 here")
    assert "::1" in addresses_of_a_run(monkeypatch)[0]


def test_interfaces_that_the_user_names_are_kept() -> None:
    name = loopback.loopback_interface()
    assert loopback.transport_interfaces({}) == {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    assert loopback.transport_interfaces({"GLOO_SOCKET_IFNAME": "eth7"}) == {"NCCL_SOCKET_IFNAME": f"={name}"}
    assert loopback.transport_interfaces({"GLOO_SOCKET_IFNAME": ""})["GLOO_SOCKET_IFNAME"] == name


def test_a_machine_without_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    monkeypatch.setattr(loopback, "_LOOPBACK", 1 << 30)
    assert loopback.transport_interfaces(both) == {}
    with pytest.raises(ExecutionError, match="none is up; name another one in GLOO_SOCKET_IFNAME"):
        loopback.transport_interfaces({})
    monkeypatch.setattr(socket, "create_server", lambda *_, **__: (_ for _ in ()).throw(OSError("not available")))
    with pytest.raises(ExecutionError, match=r"cannot meet on 127\.0\.0\.1 or ::1: not available; is the loopback"):
        loopback.loopback_server(1)
