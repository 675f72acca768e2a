"""A parent that is stopped, or that nobody reads, does not end a run; one that ends leaves no rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeplan.errors import ExecutionError
from pipeplan.runtime.launch import local
from pipeplan.runtime.launch.job import RankContext, Report, Reports
from pipeplan.runtime.launch.output import RankOutput
from pipeplan.runtime.launch.status import Phase, Position
from runtime_support.faults import MARK, left_over
from runtime_support.plain_rank import PARENT, RANK, STANDS_STILL
from runtime_support.warm import warm_ranks

PIPE_BYTES = 1 << 16
MILLISECOND = 10**6


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A word in the environment of everything a test starts; at the end nothing that has it may live."""
    word = uuid.uuid4().hex
    monkeypatch.setenv(MARK, word)
    yield word
    while left_over(word):  # ends with the test's time-out at the latest
        time.sleep(0.01)


def parent_of(lines: int, stay_s: float, timeout_ns: int, **others: object) -> subprocess.Popen[str]:
    """A parent whose ranks have begun."""
    job = {
        "lines": lines,
        "bytes": PIPE_BYTES // 4,
        "stay_s": stay_s,
        "timeout_ns": timeout_ns,
        "stops": False,
    } | others
    process = subprocess.Popen([*PARENT, json.dumps(job)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def test_a_stopped_parent_goes_on_where_it_was(mark: str, tmp_path: Path) -> None:
    """Longer than the timeout, by its clock: its ranks have ended, but for what its pipes have no room for."""
    parent = parent_of(lines=40, stay_s=0.0, timeout_ns=600 * 10**9, stops=True, done=str(tmp_path))
    while len([*tmp_path.iterdir()]) < 2:
        time.sleep(0.01)
    ranks = len(left_over(mark)) - 1
    parent.send_signal(signal.SIGCONT)
    out, err = parent.communicate()
    assert ranks == 2, "they wait with their last reports"
    assert (parent.returncode, err) == (0, "")
    assert "heard 80" in out


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_a_parent_that_ends_leaves_no_rank(number: signal.Signals, mark: str) -> None:
    """Stopped or not; the fixture waits for the ranks' end."""
    parent = parent_of(lines=1, stay_s=3600.0, timeout_ns=3600 * 10**9)
    parent.send_signal(signal.SIGSTOP)
    parent.send_signal(number)
    parent.send_signal(signal.SIGCONT)
    assert (parent.communicate()[1], parent.returncode) == ("", -number)


def test_a_parent_that_ends_leaves_no_rank_that_stood_still_from_the_start(
    mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it could ask the system to end with its parent; the fixture waits for the ranks' end."""
    monkeypatch.setenv(STANDS_STILL, "1")
    job = {"lines": 0, "bytes": 0, "stay_s": 3600.0, "timeout_ns": 3600 * 10**9, "stops": False}
    with subprocess.Popen([*PARENT, json.dumps(job)], stderr=subprocess.PIPE) as parent:
        while [*map(state_of, left_over(mark))].count("T") < 2:
            assert parent.poll() is None
            time.sleep(0.01)
        parent.kill()


def state_of(pid: int) -> str:
    """Of a process, as the system has it: T where it stands still."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


LETTERS = 1 << 20


def test_while_nobody_reads_a_thread_empties_the_pipe_from_the_beginning() -> None:
    output = RankOutput()
    rank = os.dup(output.written)
    output.begin()
    try:
        assert output._thread.is_alive()
    finally:
        os.close(rank)
        output.close()


def test_ranks_go_on_while_nobody_reads_what_they_print(mark: str) -> None:
    """More than pipes hold, while nothing may take longer than half a second: they end, and nothing of it is lost."""
    job = {"lines": 1, "bytes": 0, "stay_s": 0.0, "timeout_ns": 500 * MILLISECOND, "stops": False, "prints": LETTERS}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    parent = subprocess.Popen([*PARENT, json.dumps(job)], text=True, **pipes)  # type: ignore[call-overload]
    assert parent.stdout is not None
    assert parent.stderr is not None
    with parent:
        err = parent.stderr.read(1)
        assert err == "x", "they have begun"
        while len(left_over(mark)) > 1:
            time.sleep(0.01)
        err += parent.stderr.read()
        out = parent.stdout.read()
    assert (parent.returncode, err.count("x"), err.replace("x", "").strip()) == (0, 4 * LETTERS, "")
    assert "heard 2" in out


def test_the_last_that_nobody_reads_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeplan.runtime.launch.output._MOST_BYTES", 1 << 20)
    output = RankOutput()
    rank = os.dup(output.written)
    output.begin()
    for letter in b"abc":
        data = bytes([letter]) * (1 << 20)
        while data:
            data = data[os.write(rank, data) :]
    os.close(rank)
    with tempfile.TemporaryFile() as file:
        output.pass_on(file.fileno())
        output.close()
        file.seek(0)
        kept = file.read()
    assert kept == b"c" * len(kept)
    assert (1 << 19) < len(kept) <= 1 << 20
    said = f"pipeplan: {(3 << 20) - len(kept)} bytes that ranks printed are left out: nobody read on for too long\n"
    assert capsys.readouterr().err == said


def test_what_is_printed_before_a_rank_is_killed_is_not_lost(
    mark: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    job = {"lines": 0, "bytes": 0, "stay_s": 0.0, "prints": 7, "dies": True}
    with pytest.raises(ExecutionError, match=r"rank \d was killed \(SIGKILL\) in 0F0"):
        local.watch_local("", [("0F0",)], job, 3600 * 10**9, lambda *_: None, RANK)
    assert "xxxxxxx\nxxxxxxx\n" in capfd.readouterr().err


def test_who_reads_what_ranks_print_may_leave(mark: str) -> None:
    job = {"lines": 1, "bytes": 0, "stay_s": 0.0, "timeout_ns": 3600 * 10**9, "stops": False, "prints": LETTERS}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    parent = subprocess.Popen([*PARENT, json.dumps(job)], text=True, **pipes)  # type: ignore[call-overload]
    assert parent.stdout is not None
    assert parent.stderr is not None
    with parent:
        parent.stderr.close()
        assert "heard 2" in parent.stdout.read()
    assert parent.returncode == 0


def test_who_waits_can_see_where_rank_0_is(mark: str) -> None:
    seen: list[str] = []
    job = {"lines": 1, "bytes": 0, "stay_s": 0.1}
    local.watch_local("", [("0F0",)] * 2, job, 60 * 10**9, lambda *_: None, RANK, on_look=seen.append)
    assert {"while starting", "in 0F0 (step 0, program counter 0 of 1)"} <= {*seen}


def test_a_second_interruption_leaves_no_rank(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    close, again = local._Rank.close, [KeyboardInterrupt(), KeyboardInterrupt()]

    def interrupted(rank: local._Rank) -> None:
        if again:
            raise again.pop()
        close(rank)

    def listen(rank: int, report: Report) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(local._Rank, "close", interrupted)
    job = {"lines": 1, "bytes": 0, "stay_s": 3600.0}
    with pytest.raises(KeyboardInterrupt):
        local.watch_local("", [("0F0",)] * 2, job, 3600 * 10**9, listen, RANK)
    assert not again
    assert left_over(mark) == []


def chatter(job: Report, context: RankContext) -> None:
    """The job of a rank: reports more than a pipe holds, while the other waits no longer than two seconds; says so."""
    from datetime import timedelta

    import torch.distributed as dist

    dist.barrier()  # both are here: on a loaded machine one may come much later
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    for _ in range(8):
        context.report({"event": "line", "filler": context.rank * PIPE_BYTES * "x"})
        dist.barrier(group)
    Path(job["done"], str(context.rank)).touch()


def test_ranks_go_on_while_nobody_reads_the_output_of_their_parent(mark: str, tmp_path: Path) -> None:
    heard = []

    def listen(rank: int, report: Report) -> None:
        while not heard and len([*tmp_path.iterdir()]) < 2:  # as where a pager is full until they have done all
            time.sleep(0.01)
        heard.append(rank)

    with warm_ranks():
        local.watch_local(f"{__name__}:chatter", [("0F0",)] * 2, {"done": str(tmp_path)}, 3600 * 10**9, listen)
    assert sorted(heard) == [0] * 8 + [1] * 8


def test_after_a_pause_of_the_parent_ranks_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they did meanwhile is not known: they hang only if they do so from then on. The clock is moved by hand."""
    position = Position(Phase.WAITING, 1, 0, 1, 0)
    ranks: Any = SimpleNamespace(
        looked_ns=0,
        resumed_ns=0,
        ranks=[None] * 2,
        done={1},
        board=SimpleNamespace(read=lambda rank: position),
        timeout_ns=3_000 * MILLISECOND,
        failures=[],
    )
    for now, hangs in (
        (500, False),
        (60_000, False),
        (60_900, False),
        (61_800, False),
        (62_700, False),
        (66_000, True),
    ):
        monkeypatch.setattr(time, "monotonic_ns", lambda now=now: now * MILLISECOND)
        ranks.looked_ns = (
            max(ranks.looked_ns, 65_500 * MILLISECOND) if hangs else ranks.looked_ns
        )  # it looked meanwhile
        local._Ranks._notice_hangs(ranks)
        assert bool(ranks.failures) == hangs


def test_reports_wait_for_room_and_keep_their_order() -> None:
    read, write = os.pipe()
    report = Reports(write)
    for number in range(4):
        report({"number": number, "filler": PIPE_BYTES * "x"})
    with os.fdopen(read) as reports, ThreadPoolExecutor(1) as pool:
        closed = pool.submit(report.close)
        assert [json.loads(line)["number"] for line in reports] == [0, 1, 2, 3]
        closed.result()
