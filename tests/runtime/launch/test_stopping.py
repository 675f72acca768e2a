"""Signals that ask a training in a program of one's own to end: it ends with a checkpoint, and the program goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pipeplan
from pipeplan.files import Plan
from pipeplan.runtime.launch.job import StepResult
from pipeplan.runtime.launch.status import Board, Phase, Progress
from pipeplan.runtime.launch.stopping import SIGNALS, STOPPING
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.training.checkpoint_folder import CheckpointFolder
from runtime_support.lone_rank import lone_rank
from runtime_support.plans import model_plan


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals that reach handlers that the program had before."""
    found: list[int] = []
    before = {number: signal.signal(number, lambda number, _: found.append(number)) for number in SIGNALS}
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


def sends(number: int) -> Callable[[StepResult], None]:
    """Asks this process to end after a run's second step."""
    return lambda result: os.kill(os.getpid(), number) if result.step == 1 else None


def plan() -> Plan:
    return model_plan(load_model("gpt2-tiny"), [0], num_microbatches=2)


def test_a_program_goes_on_after_a_run_that_was_asked_to_end(heard: list[int], tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    with lone_rank():
        first = pipeplan.run(plan(), "gpt2-tiny", steps=1000, checkpoint=saved, on_step=sends(signal.SIGTERM))
        assert (first.stopped_by, len(first.result.steps)) == (signal.SIGTERM, 3)
        assert "3 steps, " in repr(first)
        assert repr(first).endswith("ended by SIGTERM>")
        assert CheckpointFolder(saved).whole() == [3]
        assert heard == []
        second = pipeplan.run(plan(), "gpt2-tiny", steps=5, checkpoint=saved, resume=True)
        assert (second.stopped_by, len(second.result.steps)) == (None, 2), "it knows nothing of the first one's signal"
        third = pipeplan.run(plan(), "gpt2-tiny", steps=3, on_step=sends(signal.SIGUSR1))
        assert (third.stopped_by, len(third.result.steps), heard) == (None, 3, [signal.SIGUSR1]), "nothing to write"
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGUSR1, signal.SIGTERM], "handlers are the program's again"


def test_a_signal_that_comes_after_the_last_step_is_not_lost(heard: list[int], tmp_path: Path) -> None:
    with lone_rank():
        last = pipeplan.run(
            plan(), "gpt2-tiny", steps=2, checkpoint=str(tmp_path / "saved"), on_step=sends(signal.SIGTERM)
        )
    assert (last.stopped_by, len(last.result.steps), heard) == (signal.SIGTERM, 2, [])
    with STOPPING.heeded():
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == []
    assert heard == [signal.SIGUSR1], "no run has taken note of it"


def test_a_rank_that_others_have_given_up_on_ends_at_once(heard: list[int]) -> None:
    """It may hang in an action, and would never come to the end of its step: torchrun killed it 30 s later."""
    with tempfile.TemporaryFile() as file:
        file.truncate(Board.size(2))
        board = Board(file.fileno(), 2)
        with STOPPING.heeded():
            STOPPING.is_lost = lambda: board.has_failed
            os.kill(os.getpid(), signal.SIGTERM)
            assert (STOPPING.take(), heard) == (signal.SIGTERM, [])
            Progress(board, 1).begin(Phase.FAILED)
            os.kill(os.getpid(), signal.SIGTERM)
            assert (STOPPING.take(), heard) == (0, [signal.SIGTERM])
        with STOPPING.heeded():
            os.kill(os.getpid(), signal.SIGTERM)
            assert STOPPING.take() == signal.SIGTERM, "another run knows nothing of it"


@pytest.mark.slow
def test_ranks_that_a_program_starts_end_as_it_is_asked_to(heard: list[int], tmp_path: Path) -> None:
    """The signal comes to the program alone, which hands it on."""
    saved = str(tmp_path / "saved")
    two = model_plan(load_model("gpt2-tiny"), [0, 1], num_microbatches=2)
    found = pipeplan.run(two, "gpt2-tiny", steps=100_000, checkpoint=saved, on_step=sends(signal.SIGUSR1))
    assert (found.stopped_by, heard) == (signal.SIGUSR1, [])
    (step,) = CheckpointFolder(saved).whole()
    assert step == len(found.result.steps) > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGUSR1, 138, marks=pytest.mark.long)]
)
def test_a_local_run_ends_with_a_checkpoint(number: int, code: int, tmp_path: Path) -> None:
    two, saved = model_plan(load_model("gpt2-tiny"), [0, 1], num_microbatches=2), tmp_path / "saved"
    (tmp_path / "plan.json").write_text(two.model_dump_json())
    command = [sys.executable, "-m", "pipeplan", "run", str(tmp_path / "plan.json"), "--model", "gpt2-tiny"]
    command += ["--local", "--steps", "100000", "--checkpoint", str(saved)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("step 0")
        process.send_signal(number)
        _, said = process.communicate(timeout=120)
    assert process.returncode == code, said
    assert f"ended by {signal.Signals(number).name}" in said
    assert CheckpointFolder(str(saved)).whole()


def test_other_threads_leave_handlers_alone(heard: list[int]) -> None:
    def run() -> None:
        with STOPPING.heeded():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert heard == [signal.SIGTERM]
