"""``benchmarks/hosts.py``: torchrun on hosts that are namespaces trains as on one, and ends when one is cut off."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from support.paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import hosts

pytestmark = pytest.mark.slow

SERVER = "import socket; s = socket.create_server(('', 5000)); print(flush=True); c, _ = s.accept(); c.send(c.recv(1))"
CLIENT = (
    "import socket, time; c = socket.create_connection(({!r}, 5000), 20); "
    "begin = time.monotonic(); c.send(b'x'); assert c.recv(1) == b'x'; print(time.monotonic() - begin)"
)


@pytest.fixture(autouse=True)
def possible() -> None:
    if found := hosts.hindrance():
        pytest.skip(found)


def names() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("latency_s", [0.0, 0.05])
def test_messages_come_and_take_their_latency(latency_s: float) -> None:
    with hosts.Hosts(2, 20_000_000, latency_s) as two:
        run = ["ip", "netns", "exec"]
        with subprocess.Popen([*run, two.names[1], sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()
            client = [*run, two.names[0], sys.executable, "-c", CLIENT.format(two.address(1))]
            taken = float(subprocess.run(client, capture_output=True, text=True, check=True, timeout=60).stdout)
        assert taken >= 2 * latency_s, "there and back"
    assert two.names[0] not in names()


@pytest.mark.long
def test_hosts_train_as_one_does() -> None:
    found = hosts.losses(2)
    assert len(found["one"]) == 3
    assert found["several"] == pytest.approx(found["one"], rel=0, abs=1e-9)


@pytest.mark.long
def test_a_host_that_is_cut_off_ends_the_run_with_its_name() -> None:
    """Or, where it is cut off just when losses are added up, with what was going on and who is left alone."""
    ended = hosts.cut(2, timeout_s=20.0)  # no step takes as long on a busy machine
    assert ended.codes != [0]
    named = re.search(r"rank 1 hangs on machine pipeplan-\d+-1; rank 0 got nothing from rank 1", ended.said)
    assert named or "rank 0 lost the others in step" in ended.said
