"""Ranks of ``--local`` listen on loopback alone, whatever the host's name leads to, and meet where nobody else can."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from pipeplan.errors import ExecutionError, FileError
from pipeplan.runtime.launch import loopback
from pipeplan.runtime.launch.job import Report
from pipeplan.runtime.launch.local import _Ranks, watch_local
from runtime_support.listening_rank import COMMAND, HOST, STRANGERS, listening, outward_address
from runtime_support.warm import warm_ranks

NUM_RANKS = 2
LOOPBACK = {"127.0.0.1", "::1"}


def addresses_of_a_run(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Where each rank listens, and then this process, while all are connected.

    The host's name leads to its address for others, or without one to an address of loopback that nothing else uses.
    """
    outward = outward_address()
    if ipaddress.ip_address(outward).is_loopback:
        outward = "127.0.0.2"
    monkeypatch.setenv(HOST, outward)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    found: dict[int, list[str]] = {}

    def listen(rank: int, report: Report) -> None:
        assert report["on"] == loopback.loopback_interface()
        assert report["named"] == outward, "by its name a rank would listen there"
        found[rank] = report["addresses"]
        found[NUM_RANKS] = listening()

    with warm_ranks():
        work = "runtime_support.listening_rank:listen_job"
        watch_local(work, [("0F0",)] * NUM_RANKS, {}, 60 * 10**9, listen, COMMAND)
    return [found[rank] for rank in range(NUM_RANKS + 1)]


def test_ranks_and_their_parent_listen_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, parent = addresses_of_a_run(monkeypatch)
    assert len(first) == len(second) > 0, "each listens for the others, and where they meet is no socket"
    assert {*first, *second, *parent} <= LOOPBACK, (first, second, parent)


def test_who_connects_to_ranks_that_have_met_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what is sent to them; connections stay open, or are closed half made."""
    monkeypatch.setenv(HOST, "localhost")
    found: dict[int, Report] = {}
    with warm_ranks():
        work = "runtime_support.listening_rank:bothered_job"
        watch_local(work, [("0F0",)] * NUM_RANKS, {}, 60 * 10**9, found.__setitem__, COMMAND)
    assert sorted(found) == [0, 1]
    for report in found.values():
        assert report["connections"] >= len(STRANGERS)
        assert report["sums"] == [2 * number + 1 for number in range(20)]


def test_nobody_else_can_open_where_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    with _Ranks([()], 1) as ranks:
        found = os.stat(ranks._path_of(ranks._unnamed_file(b"")))
        assert (found.st_nlink, found.st_mode & 0o077) == (0, 0)
        monkeypatch.setattr(Path, "exists", lambda _: False)  # as without /proc
        folder = os.path.dirname(ranks._path_of(ranks._unnamed_file(b"")))
        assert os.stat(folder).st_mode & 0o077 == 0
    assert not os.path.exists(folder)


def test_a_disk_without_room_does_not_end_ranks_that_have_met() -> None:
    with warm_ranks():
        work = "runtime_support.listening_rank:full_job"
        watch_local(work, [("0F0",)] * NUM_RANKS, {}, 60 * 10**9, lambda *_: None)


def test_no_room_for_what_ranks_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", MagicMock(side_effect=OSError(28, "No space left on device")))
    told = r"what ranks are given cannot be written there: No space left on device; make room, or .* TMPDIR"
    with pytest.raises(FileError, match=told):
        watch_local("", [()], {}, 1, lambda *_: None)


def test_interfaces_that_the_user_names_are_kept() -> None:
    name = loopback.loopback_interface()
    assert loopback.transport_interfaces({}) == {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    assert loopback.transport_interfaces({"GLOO_SOCKET_IFNAME": "eth7"}) == {"NCCL_SOCKET_IFNAME": f"={name}"}
    assert loopback.transport_interfaces({"GLOO_SOCKET_IFNAME": ""})["GLOO_SOCKET_IFNAME"] == name


def test_a_machine_without_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    monkeypatch.setattr(loopback, "_NAMES", ("none",))
    assert loopback.transport_interfaces(both) == {}
    with pytest.raises(ExecutionError, match="none is up; name another one in GLOO_SOCKET_IFNAME"):
        loopback.transport_interfaces({})
