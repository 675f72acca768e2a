"""A measurement that was interrupted goes on from what it has kept, and nothing is measured twice."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeplan.cli.main import main
from pipeplan.errors import ExecutionError, FileError, InfeasibleError, UsageError
from pipeplan.files import Profile, read_profile, write_text
from pipeplan.runtime.models.spec import BlockSpec, Model
from pipeplan.runtime.profiling import rounds as partial_module
from pipeplan.runtime.profiling.measure import profile_model
from pipeplan.runtime.profiling.rounds import RowKey, UnfinishedProfile

RUNS = {"repeats": 4, "warmup": 1}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Counted(nn.Linear):
    """Counts its forwards by samples, and raises at one of them."""

    def __init__(self, calls: list[int], error: BaseException | None, at: int, from_size: int) -> None:
        super().__init__(8, 8)
        self.calls, self.error, self.at, self.from_size = calls, error, at, from_size

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "meta":
            self.calls.append(len(x))
            if self.error is not None and len(self.calls) >= self.at and len(x) >= self.from_size:
                raise self.error
        return super().forward(x)


def model(calls: list[int], error: BaseException | None = None, at: int = 0, from_size: int = 1) -> Model:
    """Two kinds of blocks: a is quiet, b is counted and fails."""
    blocks = (
        BlockSpec("a", "layer", lambda: nn.Linear(8, 8), samples=("x",)),
        BlockSpec("b", "layer", lambda: Counted(calls, error, at, from_size), sources=("a",)),
    )
    return Model("counted", blocks, lambda num, step, seed: {"x": torch.ones(num, 8)}, lambda batch: 1)


def measure(path: Path, made: Model, **options: Any) -> Profile:
    return profile_model(made, (1, 2), **{**RUNS, **options}, partial=UnfinishedProfile(path))


def kept(path: Path) -> dict[RowKey, int]:
    """Timed runs of each row in a file."""
    return {row.key: len(row.times) for row in UnfinishedProfile._read(path).rows}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "p.json.partial"


@functools.cache
def whole_file() -> str:
    """What a measurement that nothing disturbs keeps."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.json.partial"
        measure(path, model([]))
        return path.read_text()


@functools.cache
def forwards_of_all() -> int:
    """How often a block runs in a measurement that nothing disturbs."""
    calls: list[int] = []
    profile_model(model(calls), (1, 2), **RUNS)
    return len(calls)


def test_going_on_after_an_interruption(path: Path) -> None:
    """The interrupted run itself, its warm-up and the inputs of later blocks are all that comes again."""
    first: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        measure(path, model(first, KeyboardInterrupt(), at=19))
    runs = kept(path)
    assert 0 < sum(runs.values()) < 16
    second: list[int] = []
    found = measure(path, model(second))
    assert {row.repeats for block in found.blocks for row in block.costs} == {4}
    assert {block.id: [row.microbatch_size for row in block.costs] for block in found.blocks} == {
        "a": [1, 2],
        "b": [1, 2],
    }
    # two forwards in each run, one to warm up for each size, and one for each size to hand on
    of_b = sum(count for key, count in runs.items() if key.block == "b")
    assert len(second) == 2 * (8 - of_b) + 2 * 2 + 2
    assert len(second) < forwards_of_all()


def test_times_are_taken_over(path: Path) -> None:
    """What was kept is in the medians: a file with all runs is a profile without any run."""
    with pytest.raises(KeyboardInterrupt):
        measure(path, model([], KeyboardInterrupt(), at=forwards_of_all()))
    text = path.read_text()
    rows = {row.key: row for row in UnfinishedProfile._read(path).rows}
    found = measure(path, model([]))
    (a, _) = found.blocks
    for row in a.costs:
        before = rows[RowKey("a", row.microbatch_size)]
        assert row.activation_bytes == before.activation_bytes
        assert len(before.times) == 4
        assert min(times[0] for times in before.times) <= row.forward_ns <= max(times[0] for times in before.times)
    assert text.count("microbatch_size") == 4


def test_all_measured_runs_nothing(path: Path) -> None:
    profile = measure(path, model([]))
    calls: list[int] = []
    again = measure(path, model(calls))
    assert again.blocks == profile.blocks
    assert calls == [1, 2]  # what the next block would take


@pytest.mark.parametrize(
    ("error", "raised"),
    [(ValueError("boom"), ExecutionError), (MemoryError("boom"), InfeasibleError)],
    ids=["failing", "out of memory"],
)
def test_a_block_that_fails_leaves_what_others_had(path: Path, error: Exception, raised: type[Exception]) -> None:
    with pytest.raises(raised, match="block 'b' at micro-batch size 1"):
        measure(path, model([], error, at=13))
    assert sum(count for key, count in kept(path).items() if key.block == "a") > 0
    assert measure(path, model([])).microbatch_sizes == (1, 2)


def test_failing_at_a_larger_size_keeps_the_memory_of_smaller_ones(path: Path) -> None:
    with pytest.raises(ExecutionError, match="block 'b' at micro-batch size 2"):
        measure(path, model([], ValueError("boom"), from_size=2))
    assert set(kept(path)) == {RowKey("a", 1), RowKey("b", 1), RowKey("a", 2)}


def test_rows_of_other_cases_are_kept_apart(path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        measure(path, model([], KeyboardInterrupt(), at=30), recompute=True)
    assert {(key.size, key.recompute) for key in kept(path)} == {(1, False), (1, True), (2, False), (2, True)}
    found = measure(path, model([]), recompute=True)
    assert [row.recompute for row in found.blocks[1].costs] == [False, True] * 2


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"repeats": 5}, "--repeats 4, and now it is 5"),
        ({"warmup": 0}, "--warmup 1, and now it is 0"),
        ({"dtype": torch.float64}, "--dtype float32, and now it is float64"),
        ({"seed": 1}, "--seed 0, and now it is 1"),
        ({"recompute": True}, "--recompute false, and now it is true"),
        ({"max_spread": 0.1}, "largest spread None, and now it is 0.1"),
    ],
)
def test_another_question_is_refused(path: Path, options: dict[str, Any], difference: str) -> None:
    path.write_text(before := whole_file())
    calls: list[int] = []
    with pytest.raises(UsageError, match=f"{difference}; ask for the same to go on with it, delete it"):
        measure(path, model(calls), **options)
    assert calls == []
    assert path.read_text() == before


def test_going_on_with_other_sizes(path: Path) -> None:
    """After a size that fails: rows of sizes that are still wanted are taken over, and those of others stay."""
    with pytest.raises(ExecutionError, match="block 'b' at micro-batch size 2"):
        measure(path, model([], ValueError("boom"), from_size=2))
    before = {row.key: row for row in UnfinishedProfile._read(path).rows}
    found = profile_model(model([]), (1, 3), **RUNS, partial=UnfinishedProfile(path))
    assert found.microbatch_sizes == (1, 3)
    after = {row.key: row for row in UnfinishedProfile._read(path).rows}
    assert set(after) == {*before, RowKey("b", 1), RowKey("a", 3), RowKey("b", 3)}
    assert after[RowKey("a", 2)] == before[RowKey("a", 2)]
    calls: list[int] = []
    assert profile_model(model(calls), (1,), **RUNS, partial=UnfinishedProfile(path)).microbatch_sizes == (1,)
    assert calls == [1]  # what the next block would take: nothing is measured again


def test_another_model_is_refused(path: Path) -> None:
    path.write_text(whole_file())
    wider = Model("counted", model([]).blocks[:1], model([]).batch, len)
    with pytest.raises(UsageError, match="fingerprint of the model's blocks"):
        measure(path, wider)


@pytest.mark.parametrize(
    "damage", [lambda text: text[: len(text) // 2], lambda text: "", lambda text: text.replace('"times"', '"tmies"')]
)
def test_a_damaged_file_is_refused(path: Path, damage: Callable[[str], str]) -> None:
    path.write_text(damage(whole_file()))
    with pytest.raises(FileError, match="not what an interrupted measurement keeps; delete it"):
        measure(path, model([]))


def test_it_is_written_while_measuring(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_module, "_SAVE_EVERY_S", 0.0)
    seen: list[int] = []
    measure(path, model([]), progress=lambda *_: seen.append(sum(kept(path).values()) if path.exists() else 0))
    assert seen == sorted(seen)
    assert len(set(seen)) == 4  # nothing, and each timed round but the last


def refuse_to_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk on which this file lies is full; temporary files go elsewhere."""

    def refuse(text: str, where: str) -> None:
        if where == str(path):
            raise FileError(f"{where}: cannot be written: No space left on device")
        write_text(text, where)

    monkeypatch.setattr(partial_module, "write_text", refuse)
    monkeypatch.setattr("tempfile.tempdir", str(path.parent))


def test_a_disk_that_is_full_half_way_loses_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement goes on to its end; what it had when it was interrupted is in the file that is named."""
    refuse_to_write(path, monkeypatch)
    partial = UnfinishedProfile(path)
    with (
        pytest.warns(
            UserWarning, match=r"p\.json\.partial: cannot be written: No space left on device; what is"
        ) as told,
        pytest.raises(KeyboardInterrupt),
    ):
        profile_model(model([], KeyboardInterrupt(), at=19), (1, 2), **RUNS, partial=partial)
    (there,) = path.parent.glob("pipeplan-*")
    assert str(told[0].message).endswith(f"what is measured is kept in {there} from now on")
    assert partial.path == there
    runs = sum(kept(there).values())
    assert runs > 0
    monkeypatch.undo()
    there.rename(path)
    again: list[int] = []
    measure(path, model(again))
    assert len(again) < forwards_of_all()


def measure_without_room(path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """The exit code of ``profile``, for which there is no room for what is unfinished where it belongs."""
    refuse_to_write(Path("p.json.partial"), monkeypatch)
    monkeypatch.setattr("tempfile.tempdir", str(path.parent))
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(sys, "argv", ["pipeplan", "profile", *arguments, "--threads", "1", "-o", "p.json"])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.filterwarnings("default:.* what is measured:UserWarning")
def test_a_profile_comes_out_on_a_disk_without_room_for_what_is_unfinished(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--microbatch", "1", "--repeats", "1", "--warmup", "0")
    code = measure_without_room(path, monkeypatch, "runtime_support.models:chain", *options)
    out, err = capsys.readouterr()
    assert not code, err
    assert re.search(
        r"^pipeplan: warning: p\.json\.partial: cannot be written: .*; what is measured is kept in \S+ from now on$",
        err,
        re.M,
    )
    assert "block" in out
    assert [each.name for each in path.parent.iterdir()] == ["p.json"]


@pytest.mark.filterwarnings("default:.* what is measured:UserWarning")
def test_the_command_says_where_it_is_kept_instead(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeplan.cli.profile_verb._model", lambda *_: (model([], KeyboardInterrupt(), at=19), (1,)))
    options = ("--microbatch", "1,2", "--repeats", "4", "--warmup", "1")
    assert measure_without_room(path, monkeypatch, "runtime_support.models:chain", *options) == 130
    (there,) = path.parent.glob("pipeplan-*")
    err = capsys.readouterr().err
    assert f"what was measured is kept in {there}: move it to p.json.partial, and the same command resumes" in err
    assert "pipeplan: warning: p.json.partial: cannot be written" in err


def test_the_command_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A block that fails: which it is, once, what to change, and what goes on with the rest."""
    asked = 'os.environ["FAIL"] and len(x) == 2 and fail()'
    fails = MODULE.replace("            if os.path", f"            {asked}\n            if os.path")
    (tmp_path / "failing_models.py").write_text(fails + "\ndef fail():\n    raise ValueError('boom')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(partial_module, "_SAVE_EVERY_S", 5.0)  # the module sets it
    monkeypatch.setenv("STOP_AT", "1000")
    options = ["--microbatch", "1,2", "--repeats", "1", "--warmup", "0", "--threads", "1", "-o", "p.json"]
    monkeypatch.setattr(sys, "argv", ["pipeplan", "profile", "failing_models:model", *options])
    for fail, code in (("yes", 1), ("", 0)):
        monkeypatch.setenv("FAIL", fail)
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code or 0) == code
    _, err = capsys.readouterr()
    where = "block 'slow' at micro-batch size 2"
    assert "what was measured is kept in p.json.partial, and a command with other --microbatch sizes resumes" in err
    assert err.partition("warning")[0].count("block 'slow'") == 1
    assert f"{where} failed: ValueError: boom; it would again: change the block, or leave the size out of" in err
    assert "pipeplan: resuming from p.json.partial" in err
    assert [path.name for path in tmp_path.glob("*.json*")] == ["p.json"]
    sys.modules.pop("failing_models", None)


# Real processes --------------------------------------------------------------------------------------------------

MODULE = """
import os
import time
import torch
from torch import nn
from pipeplan.runtime.profiling import rounds as partial
from pipeplan.runtime.models.spec import BlockSpec, Model

partial._SAVE_EVERY_S = 0.0

class Slow(nn.Linear):
    def forward(self, x):
        if x.device.type != "meta":
            with open("calls", "a") as file:
                file.write("x")
            if os.path.getsize("calls") >= int(os.environ["STOP_AT"]):
                time.sleep(3600)
        return super().forward(x)

def batch(num_samples, step, seed):
    return {"x": torch.ones(num_samples, 2)}

def model():
    return Model("slow", (BlockSpec("slow", "slow", lambda: Slow(2, 2), samples=("x",)),), batch, len)
"""


def start(folder: Path, stop_at: int) -> subprocess.Popen[str]:
    """The command in a process of its own, whose forward number ``stop_at`` takes an hour."""
    command = [sys.executable, "-c", "from pipeplan.cli.main import main; main()", "profile", "slow_models:model"]
    options = ["--microbatch", "1", "--repeats", "8", "--warmup", "0", "--threads", "1", "-o", "p.json"]
    environment = {**os.environ, "STOP_AT": str(stop_at)}
    return subprocess.Popen(command + options, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


def stop(process: subprocess.Popen[str], folder: Path, number: signal.Signals, again: int) -> tuple[int, str]:
    """Send a signal once two timed runs are kept, and ``again`` so often; exit code and stderr."""
    file = folder / "p.json.partial"
    with process:
        try:
            while not (file.exists() and sum(kept(file).values()) >= 2):
                assert process.poll() is None, "it ended by itself"
                time.sleep(0.2)
            process.send_signal(number)
            for _ in range(again):
                time.sleep(0.05)
                process.send_signal(number)
            _, err = process.communicate()
        finally:
            process.kill()
    return process.returncode, err


@pytest.mark.slow  # 6 s
def test_a_second_interruption_is_answered_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "slow_models.py").write_text(MODULE)
    code, err = stop(start(tmp_path, 10), tmp_path, signal.SIGINT, 5)
    assert code == 130
    assert "Traceback" not in err
    assert err.count("interrupted while measuring block 'slow' at micro-batch size 1") == 1
    assert sum(kept(tmp_path / "p.json.partial").values()) >= 2


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "slow_models.py").write_text(MODULE)
    (tmp_path / "p.json").write_text("what was there")
    code, err = stop(start(tmp_path, 10), tmp_path, number, 20 if number == signal.SIGINT else 0)
    if number == signal.SIGINT:
        assert code == 130
        assert "Traceback" not in err
        assert "interrupted while measuring block 'slow' at micro-batch size 1; what was measured is kept in" in err
    assert (tmp_path / "p.json").read_text() == "what was there"
    before = sum(kept(tmp_path / "p.json.partial").values())
    (tmp_path / "calls").unlink()
    process = start(tmp_path, 1000)
    _, err = process.communicate()
    assert process.returncode == 0
    assert "resuming from p.json.partial" in err
    assert len((tmp_path / "calls").read_text()) == 1 + 2 * (8 - before)
    assert read_profile(str(tmp_path / "p.json")).blocks[0].costs[0].repeats == 8
    assert not (tmp_path / "p.json.partial").exists()
