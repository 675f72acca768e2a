"""A rank that is killed, hangs or raises ends the run with one message that names it, and leaves no process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from unittest.mock import patch

import pytest
from torch.distributed import HashStore

from pipeplan.errors import ExecutionError, PipeplanError, UsageError
from pipeplan.files import PlacedStage, Plan, write_file
from pipeplan.runtime.launch.job import finding_out_ns, longest_wait
from pipeplan.runtime.launch.local import run_local
from pipeplan.runtime.launch.status import (
    Board,
    Cause,
    Failure,
    Phase,
    Progress,
    RankError,
    cause_of,
    culprit,
    death,
    first_failure,
    lost_others,
    verdict,
)
from pipeplan.runtime.launch.worker import _meet_here, _say_once, _silent, _where_ranks_meet
from pipeplan.runtime.training.options import TrainOptions
from runtime_support import models as runtime_models
from runtime_support.faults import MARK, left_over
from runtime_support.plans import model_plan, placed_plan
from runtime_support.warm import warm_ranks
from support.marks import slow_but

TRAIN = "pipeplan.runtime.training.trainer:train_job"
SECOND = 10**9
NO_END = 3600.0
MODELS = "runtime_support.models"


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A word in the environment of everything a test starts; at the end nothing that has it may live."""
    word = uuid.uuid4().hex
    monkeypatch.setenv(MARK, word)
    yield word
    assert left_over(word) == [], "processes are left over"


def plan_on(num_devices: int) -> Plan:
    return model_plan(
        runtime_models.breaking(lambda: None), list(range(num_devices)), num_microbatches=4, microbatch_size=1
    )


def split_plan() -> Plan:
    """A block on all three devices, and one on each."""
    stages = [PlacedStage(blocks=("b0",), devices=(2, 1, 0), shards=3)]
    stages += [PlacedStage(blocks=(block,), devices=(device,)) for device, block in enumerate(["b1", "b2", "end"])]
    model = runtime_models.breaking_share(lambda: None)
    return placed_plan(model, stages, num_microbatches=4, microbatch_size=1)


def failure_of(model: str, num_devices: int, timeout_s: float = NO_END, plan: Plan | None = None) -> PipeplanError:
    """How a run ends; without a timeout it ends by itself, or the test does not."""
    options = TrainOptions(
        f"{MODELS}:{model}",
        num_steps=3,
        dtype="float64",
        timeout_ns=round(timeout_s * SECOND),
        num_threads=1,
    )
    with warm_ranks(), pytest.raises(PipeplanError) as caught:
        run_local(TRAIN, plan or plan_on(num_devices), options, lambda _: None)
    return caught.value


WHERE = r"in 1F1 \(step 1, program counter \d+ of \d+\)"
"""Block b2 breaks on its sixth forward: micro-batch 1 of step 1. It is in stage 1 of 2 or 3."""


@pytest.mark.parametrize(
    ("model", "num_devices", "told"),
    [
        ("killed", 2, rf"^rank 1 was killed \(SIGKILL\) {WHERE}; often because memory ran out$"),
        ("raising", 2, rf"^rank 1 failed {WHERE}: block 'b2': ValueError: boom$"),
    ],
)
def test_death_and_exceptions(
    model: str, num_devices: int, told: str, mark: str, capfd: pytest.CaptureFixture[str]
) -> None:
    error = failure_of(model, num_devices)
    assert isinstance(error, ExecutionError)
    assert re.match(told, str(error)), str(error)
    output = capfd.readouterr()
    assert output.out == ""
    assert ("ValueError: boom" in output.err) == (model == "raising"), "a block's traceback is shown, and no other"
    assert "/pipeplan/runtime/" not in output.err, "it begins where our own code ends"


def test_an_exchange_of_the_model_that_fails_is_not_the_cause(mark: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The rank that waits in its own block for one that was killed raises an exception as any block may."""
    error = failure_of("exchanging", 2)
    told = (
        r"^rank 1 was killed \(SIGKILL\) in 1F0 \(step 1, program counter \d+ of \d+\); often because memory ran out$"
    )
    assert re.match(told, str(error)), str(error)
    assert capfd.readouterr().err == ""


def test_a_stopped_rank(mark: str) -> None:
    error = failure_of("stopped", 3, timeout_s=2)
    assert isinstance(error, ExecutionError)
    assert re.match(rf"^rank 1 hangs {WHERE}; ", str(error)), str(error)
    assert "raise --timeout (now 2s)" in str(error)


@slow_but(
    "model, timeout_s, told",
    [
        (
            "share_killed",
            NO_END,
            r"^rank 1 was killed \(SIGKILL\) in 0F1 \(step 1, .*\); often because memory ran out$",
        ),
        ("share_raising", NO_END, r"^rank 1 failed in 0F1 \(step 1, .*\): block 'b0': ValueError: boom$"),
        ("share_stopped", 2, r"^rank 1 hangs in 0F1 \(step 1, .*raise --timeout \(now 2s\)$"),
    ],
    lambda case: case[0] != "share_stopped",
)
def test_a_rank_that_others_wait_for_inside_a_split_block(model: str, timeout_s: float, told: str, mark: str) -> None:
    error = failure_of(model, 3, timeout_s, split_plan())
    assert isinstance(error, ExecutionError)
    assert re.match(told, str(error)), str(error)


def test_a_tensor_unlike_the_declared_one(mark: str) -> None:
    options = TrainOptions(f"{MODELS}:lying", num_steps=1, dtype="float64")
    told = r"^rank 0 failed in 0F0 .*: block 'b1' made float16\[1, 8\], and the"
    with warm_ranks(), pytest.raises(ExecutionError, match=told):
        run_local(TRAIN, plan_on(2), options, lambda _: None)


def test_another_model_is_refused_once(mark: str, capfd: pytest.CaptureFixture[str]) -> None:
    with (
        warm_ranks(),
        pytest.raises(UsageError, match=r"stages\[0\] of the plan has block 'b0', which is not in model 'gpt2-tiny'"),
    ):
        run_local(TRAIN, plan_on(2), TrainOptions("gpt2-tiny"), lambda _: None)
    assert capfd.readouterr().err == "", "nor is anything said of a run that there is not"


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_ranks_die_with_their_parent(sent: int, status: int, mark: str, tmp_path: Path) -> None:
    """Also when it is killed, which it cannot notice; ``test_pauses`` has that with ranks that start in a moment."""
    path = tmp_path / "plan.json"
    write_file(plan_on(2), str(path))
    command = [
        sys.executable,
        "-m",
        "pipeplan",
        "run",
        str(path),
        "--model",
        f"{MODELS}:sleeping",
        "--local",
    ]
    while left_over(mark):  # forked ranks of tests before this
        time.sleep(0.05)
    with tempfile.TemporaryFile() as sink:
        parent = subprocess.Popen([*command, "--dtype", "float64"], stdout=sink, stderr=sink)
        while len(left_over(mark)) < 3:  # this and what follows would last until the test's time-out
            assert parent.poll() is None
            time.sleep(0.05)
        parent.send_signal(sent)
        assert parent.wait() == status
    while left_over(mark):
        time.sleep(0.05)


# What a report is made of, without processes


@pytest.fixture
def board() -> Iterator[Board]:
    with tempfile.TemporaryFile() as file:
        file.truncate(Board.size(4))
        found = Board(file.fileno(), 4)
        found.programs = PROGRAMS
        yield found


PROGRAMS = [("0F0", "0F1"), ("1RECV_F0", "1F0"), ("2RECV_F0", "2F0"), ("3RECV_F0", "3F0")]


def test_positions_in_words(board: Board) -> None:
    assert board.read(2).describe(PROGRAMS[2]) == board.place(2) == "on another machine"
    board.machines = ["node-a", "node-a", "node-b", "node-b"]
    assert board.place(2) == "on machine node-b"
    board.write(2, Phase.WAITING, 5, 0, 1)
    assert board.read(2).describe(PROGRAMS[2]) == "in 2RECV_F0 (step 5, program counter 0 of 2)"
    board.write(2, Phase.UPDATING, 5, -1, -1)
    assert board.read(2).describe(PROGRAMS[2]) == "in step 5, after its program: optimizer step"


def test_the_culprit_is_whom_the_chain_of_waits_ends_at(board: Board) -> None:
    board.write(1, Phase.RUNNING, 0, 1, -1)
    board.write(2, Phase.WAITING, 0, 0, 1)
    board.write(3, Phase.WAITING, 0, 0, 2)
    board.write(0, Phase.RUNNING, 0, 1, -1)
    assert culprit(board, 3) == 1
    assert culprit(board, 1) == 1


def test_in_a_circle_the_culprit_has_stood_still_for_longest(board: Board) -> None:
    """Rank 1 was stopped while it waited for rank 2, which has sent since and now waits for rank 1."""
    for rank, peer in ((1, 2), (0, 1), (2, 1), (3, 2)):
        board.write(rank, Phase.WAITING, 0, 0, peer)
        time.sleep(0.001)
    assert [culprit(board, rank) for rank in (3, 2)] == [1, 1]


def test_a_stopped_process_is_the_culprit_wherever_it_stands(board: Board) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        for rank in range(4):
            board.write(rank, Phase.REPORTING, 0, -1, -1)
        with patch("os.getpid", lambda: sleeper.pid):
            board.sign(2)
        assert board.stopped == []
        sleeper.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
        assert board.stopped == [2]
        assert {culprit(board, rank) for rank in range(4)} == {2}
        board.wake()
        assert board.stopped == []
    finally:
        sleeper.kill()
        sleeper.wait()
    assert board.gone == [2]
    lost = Failure(0, Cause.LOST, "rank 0 lost the others")
    where = "in step 0, after its program: reporting the loss"
    assert str(verdict(lost, board, SECOND)) == f"rank 2 ended {where}; rank 0 lost the others"
    board.write(2, Phase.FAILED, 0, -1, -1)
    assert str(verdict(lost, board, SECOND)) == "rank 0 lost the others", "rank 2 left because it lost another, too"


def test_machines_that_are_not_heard_of_are_named(board: Board) -> None:
    progress = Progress(board, 1)
    progress.begin(Phase.REPORTING)

    def said(silent: Sequence[int]) -> str:
        board.silent = silent
        with pytest.raises(RankError) as caught, lost_others(progress):
            raise RuntimeError("Timed out waiting 5000ms for recv operation to complete")
        assert caught.value.cause is Cause.TIMEOUT
        failure = Failure(1, caught.value.cause, str(caught.value))
        return str(verdict(failure, board, SECOND)).partition(" in step 0, ")[0]

    assert said([]) == "rank 1 lost the others"
    board.machines = ["node-a", "node-a", "node-b", "node-c"]
    assert said([2]) == "nothing is heard of rank 2 on machine node-b; rank 1 lost the others"
    assert said([2, 3]) == "nothing is heard of ranks 2-3 on machines node-b, node-c; rank 1 lost the others"
    assert said([]) == "rank 1 lost the others"
    board.machines = ["node-a", "node-a", *(f"node-{number}" for number in range(10))]
    assert "node-6, node-7 and 2 more; rank 1 " in said(range(2, 12))


def test_who_gives_up_first_waits_until_all_but_one_machine_have(board: Board) -> None:
    """Of four machines, of which the last is cut off: the second gives up a moment later."""
    progress, store = Progress(board, 0), HashStore()
    board.machines = ["node-a", "node-b", "node-c", "node-d"]
    store.set("pipeplan/failed/0", "")
    store.set("pipeplan/failed/2", "")
    later = threading.Timer(0.2, store.set, ["pipeplan/failed/1", ""])
    later.start()
    assert _silent(store, progress, seconds=60.0) == [3]
    later.join()


def test_what_finding_out_takes_is_part_of_the_timeout() -> None:
    """A wait ends so early that ranks of several machines can tell each other who is missing within the timeout."""
    assert longest_wait(SECOND, []) == longest_wait(SECOND, ["node-a"] * 4) == timedelta(seconds=1)
    machines = ["node-a", "node-a", "node-b", "node-b"]
    assert longest_wait(4 * SECOND, machines) == timedelta(seconds=2)
    assert longest_wait(600 * SECOND, machines) == timedelta(seconds=590)
    assert finding_out_ns(4 * SECOND) == 2 * SECOND


def test_a_store_that_does_not_answer_is_of_the_machine_where_ranks_meet(
    board: Board, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Connections to a machine that is cut off do not end: a request there waits, and the rank goes on."""

    ended = threading.Event()

    class Silent(HashStore):
        def add(self, key: str, number: int) -> int:
            ended.wait()
            return 1

    board.machines, board.meeting = ["node-a", "node-a", "node-b", "node-c"], "node-a"
    progress = Progress(board, 2)
    assert (_where_ranks_meet(board, 2), _where_ranks_meet(board, 0)) == ([0, 1], [])
    progress.begin(Phase.REPORTING)
    _say_once(Failure(2, Cause.TIMEOUT, "rank 2 lost the others"), Silent(), progress, SECOND)
    ended.set()
    said = capsys.readouterr().err
    assert said.startswith("pipeplan: nothing is heard of ranks 0-1 on machine node-a; rank 2 lost the others; if it ")
    for address, here in (("localhost", True), ("192.0.2.1", False)):
        monkeypatch.setenv("MASTER_ADDR", address)
        assert _meet_here() == here


def test_where_all_are_awaited_the_culprit_is_the_one_that_works(board: Board) -> None:
    for rank in (0, 1, 3):
        board.write(rank, Phase.REPORTING, 0, -1, -1)
    board.write(2, Phase.UPDATING, 0, -1, -1)
    assert culprit(board, 0) == 2


def test_the_first_failure_is_a_cause_and_the_earliest(board: Board) -> None:
    """In whatever order reports arrive: a peer's may come before that of the rank it lost, and both before a death."""
    for rank in range(4):
        board.write(rank, Phase.RUNNING, 0, 1, -1)
    lost = Failure(0, Cause.LOST, "rank 0 lost rank 1 in 0F1: closed", peer=1)
    late = Failure(2, Cause.TIMEOUT, "rank 2 got nothing")
    killed = death(1, -15, board)
    aborted = death(0, -6, board)
    raised = Failure(3, Cause.RAISED, "rank 3 failed")
    refused = Failure(1, Cause.REFUSED, "no such model", exit_code=2)

    def said(*failures: Failure) -> str:
        found = {str(verdict(first_failure(order), board, SECOND)) for order in permutations(failures)}
        assert len(found) == 1
        return found.pop()

    where = "(step 0, program counter 1 of 2)"
    assert isinstance(verdict(refused, board, SECOND), UsageError)
    assert said(raised, refused, lost) == "rank 3 failed"
    assert said(lost, late, raised) == "rank 3 failed"
    assert said(lost, late, killed, aborted, raised) == f"rank 1 was killed (SIGTERM) in 1F0 {where}"
    assert said(aborted, raised) == f"rank 0 was killed (SIGABRT) in 0F1 {where}"
    assert said(death(2, 3, board)) == f"rank 2 ended with exit code 3 in 2F0 {where}"
    assert said(lost, late).startswith("rank 2 got nothing; if it is only slow")
    assert said(lost) == f"{lost.text}; rank 1 was last in 1F0 {where}"


def test_what_is_said_first_is_left_for_the_report_of_torchrun(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = HashStore()
    for rank in (2, 3):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank)))
        _say_once(Failure(rank, Cause.RAISED, f"rank {rank} failed"), store, Progress(board, rank), SECOND)
    assert capsys.readouterr().err == "pipeplan: rank 2 failed\n"
    assert [path.name for path in tmp_path.iterdir()] == ["2"]
    assert json.loads((tmp_path / "2").read_text())["message"]["message"] == "ExecutionError: rank 2 failed"


def test_transport_errors_lose_their_source_lines() -> None:
    late = RuntimeError("[/somewhere/unbound_buffer.cc:78] Timed out waiting 500ms for recv operation to complete")
    absent = RuntimeError("wait timeout after 60000ms, keys: /pipeplan/0//cpu//0/1")
    gone = RuntimeError("[/somewhere/pair.cc:537] Connection closed by peer [127.0.0.1]:4. Check the logs of it")
    assert cause_of(late) == (Cause.TIMEOUT, "Timed out waiting 500ms for recv operation to complete")
    assert cause_of(absent)[0] == Cause.TIMEOUT
    assert cause_of(gone) == (Cause.LOST, "Connection closed by peer [127.0.0.1]:4")
