"""``benchmarks/hosts.py``: torchrun on hosts that are namespaces trains as on one, and ends when one is cut off."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeplan.files import write_file
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.training.options import TrainOptions
from runtime_support.plans import Unsplit, model_plan
from support.paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import hosts

pytestmark = pytest.mark.slow

BYTES, BYTES_PER_S = 2_000_000, 20_000_000
SERVER = (
    "import socket; s = socket.create_server(('', 5000)); print(flush=True); c, _ = s.accept(); "
    f"c.recv({BYTES}, socket.MSG_WAITALL); c.send(b'x')"
)
CLIENT = (
    "import socket, time; c = socket.create_connection(({!r}, 5000), 20); "
    f"begin = time.monotonic(); c.sendall(bytes({BYTES})); assert c.recv(1) == b'x'; print(time.monotonic() - begin)"
)


@pytest.fixture(autouse=True)
def possible() -> None:
    if found := hosts.hindrance():
        pytest.skip(found)


def names() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("latency_s", [0.0, 0.05])
def test_messages_come_and_take_as_long_as_links_are_limited_to(latency_s: float) -> None:
    with hosts.Hosts(2, BYTES_PER_S, latency_s) as two:
        run = ["ip", "netns", "exec"]
        with subprocess.Popen([*run, two.names[1], sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()
            client = [*run, two.names[0], sys.executable, "-c", CLIENT.format(two.address(1))]
            taken = float(subprocess.run(client, capture_output=True, text=True, check=True, timeout=60).stdout)
        limited = (BYTES - 2 * hosts.BURST) / BYTES_PER_S
        assert taken >= limited + 2 * latency_s, "there, and a byte back"
    assert two.names[0] not in names()


def test_two_hosts_train_as_a_single_process_does(tmp_path: Path) -> None:
    """And say that the plan has both on one node."""
    model, plan = load_model("gpt2-tiny"), str(tmp_path / "plan.json")
    made = model_plan(model, [0, 1], num_microbatches=4, microbatch_size=2)
    made = made.model_copy(update={"provenance": made.provenance.model_copy(update={"node_size": 2})})
    write_file(made, plan)
    options = TrainOptions("gpt2-tiny", num_steps=3, dtype="float64", learning_rate=1e-3, weight_decay=0.01)
    unsplit = Unsplit(model, options)
    expected = [unsplit.step(step, made.mini_batch) for step in range(3)]
    printed = hosts.train_on(2, plan)
    assert hosts.losses_of(json.loads(printed.splitlines()[-1])) == pytest.approx(expected, rel=0, abs=1e-9)
    assert re.search(r"has ranks 0-1 on one node .* on 2 machines or containers here \(pipeplan-\d+-0, ", printed)


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4])
def test_hosts_train_as_one_does(count: int) -> None:
    found = hosts.losses(count)
    assert len(found["one"]) == 3
    assert found["several"] == pytest.approx(found["one"], rel=0, abs=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4])
def test_a_host_that_is_cut_off_ends_the_run_with_its_name(count: int) -> None:
    """By the timeout, wherever the others waited; and the one that says so names no other machine."""
    ended = hosts.cut(count, timeout_s=20.0)  # no step takes as long on a busy machine
    assert 0 not in ended.codes
    assert re.match(rf"nothing is heard of rank {count - 1} on machine pipeplan-\d+-{count - 1}; rank \d ", ended.said)
    assert set(re.findall(r"machines? (\S+?);", ended.said)) == {ended.name}
    assert "raise --timeout (now 20s)" in ended.said, "that is why it has ended"
