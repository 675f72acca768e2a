"""``pipeplan run``: what it prints, what it refuses, and that torchrun and --local do the same."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from builders.chains import chain_workload, shared_workload
from builders.orders import gpipe_orders
from builders.plans import plan_of
from pipeplan.cli.run_verb import run_command as command
from pipeplan.errors import FileError, InvalidPlanError, UsageError
from pipeplan.files import Plan, write_file
from pipeplan.runtime.launch.job import RunResult, StepResult
from pipeplan.runtime.training.options import TrainOptions
from runtime_support.warm import warm_ranks
from support.commands import pipeplan

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def written(plan: Plan, directory: Path) -> str:
    path = directory / "plan.json"
    write_file(plan, str(path))
    return str(path)


def chain_plan() -> Plan:
    workload = chain_workload(2, 2)
    return plan_of(workload, gpipe_orders(workload))


def run(*arguments: str) -> None:
    """The command as ``main`` calls it, where errors become exit codes."""
    command.main(list(arguments), standalone_mode=False)


def test_says_how_to_get_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"run needs torch, which is not installed: pip install 'pipeplan\[torch\]'"):
        run(written(chain_plan(), tmp_path), "--model", "gpt2-tiny", "--local")


@needs_torch
@pytest.mark.parametrize("where", [[], ["--local"]])
def test_refuses_plans_it_cannot_run(where: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    wrong = chain_plan()
    swapped = tuple(reversed(wrong.programs[0]))
    path = written(wrong.model_copy(update={"programs": (swapped, wrong.programs[1])}), tmp_path)
    with pytest.raises(InvalidPlanError, match=r"plan\.json: not a valid plan, .*\n.*programs\[0\]"):
        run(path, "--model", "gpt2-tiny", *where)
    with pytest.raises(FileError, match=r"nowhere\.json: cannot be read"):
        run("nowhere.json", "--model", "gpt2-tiny", *where)


@needs_torch
def test_torchrun_and_local_do_not_both_start_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UsageError, match="--local starts all ranks itself, and torchrun has started 3; leave out one"):
        run(written(chain_plan(), tmp_path), "--emulate", "--local")


@needs_torch
def test_says_how_to_start_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match=r"no ranks here: start 2 with torchrun .*, or give --local"):
        run(written(chain_plan(), tmp_path), "--model", "gpt2-tiny")


@needs_torch
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--trace", "-"], "--trace - would mix"),
        (["--timeout", "0ns"], "--timeout 0ns is too short"),
        (["--steps", "0"], "--steps 0 does nothing without --export-weights FILE; give at least 1"),
        (["--resume"], "--resume needs --checkpoint DIR"),
        (["--checkpoint-every", "2"], "--checkpoint-every needs --checkpoint DIR"),
        (
            ["--optimizer", "foo"],
            "--optimizer 'foo' is neither known nor of the form pkg.mod:factory; choose from adamw",
        ),
        (["--lr-schedule", "stepwise"], "nor of the form pkg.mod:factory; choose from constant, cosine, linear"),
    ],
)
def test_refuses_values_that_make_no_sense(wrong: list[str], told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told):
        run(written(chain_plan(), tmp_path), "--model", "gpt2-tiny", "--local", *wrong)


@pytest.mark.parametrize(
    "wrong", [["--steps", "-1"], ["--lr", "-1"], ["--dtype", "int8"], ["--timeout", "5"], ["--backend", "mpi"]]
)
def test_refuses_wrong_options(wrong: list[str], tmp_path: Path) -> None:
    path = written(chain_plan(), tmp_path)
    assert CliRunner().invoke(command, [path, "--model", "gpt2-tiny", "--local", *wrong]).exit_code == 2


@pytest.mark.parametrize(
    ("flag", "value"), [("--lr", "nan"), ("--lr", "inf"), ("--weight-decay", "nan"), ("--clip-norm", "nan")]
)
def test_refuses_what_is_no_number(flag: str, value: str, tmp_path: Path) -> None:
    path = written(chain_plan(), tmp_path)
    done = CliRunner().invoke(command, [path, "--model", "gpt2-tiny", "--local", flag, value])
    assert done.exit_code == 2
    assert f"{value} is not a " in done.output


@needs_torch
def test_norms_may_be_endless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[TrainOptions] = []
    result = RunResult((StepResult(0, 1.0, 10**9, 0),), (1, 1))
    monkeypatch.setattr(
        "pipeplan.runtime.launch.local.run_local", lambda _, __, options, *___: asked.append(options) or result
    )
    run(written(chain_plan(), tmp_path), "--model", "gpt2-tiny", "--local", "--clip-norm", "inf")
    assert asked[0].clip_norm == math.inf


@needs_torch
@pytest.mark.parametrize("given", [[], ["--model", "gpt2-tiny", "--emulate"]])
def test_trains_a_model_or_emulates_without_one(given: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"give --model to train, or --emulate"):
        run(written(chain_plan(), tmp_path), "--local", *given)


@needs_torch
def test_trace_is_tried_first_and_takes_no_results_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, path = tmp_path / "traces", written(chain_plan(), tmp_path)
    arguments = [path, "--emulate", "--local", "--trace", str(folder / "run.trace")]

    def lose_folder(*_: object) -> RunResult:
        folder.rmdir()
        return RunResult((StepResult(0, math.nan, 10**9, 0),), ())

    monkeypatch.setattr("pipeplan.runtime.launch.local.run_local", lose_folder)
    with pytest.raises(FileError, match=r"run\.trace: cannot be written: there is no folder"):
        run(*arguments)
    assert capsys.readouterr().out == ""
    for more, told in [([], "median 1s"), (["--json"], '"iteration_ns": 1000000000')]:
        folder.mkdir()
        with pytest.raises(FileError, match=r"run\.trace: cannot be written"):
            run(*arguments, *more)
        assert told in capsys.readouterr().out


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A v-shape plan with split backward for the smallest model."""
    from pipeplan.runtime.models.load import load_model
    from runtime_support.plans import model_plan

    plan = model_plan(load_model("gpt2-tiny"), [0, 1, 1, 0], split=True)
    return written(plan, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def local(tiny: str) -> tuple[dict[str, Any], str, Path]:
    """What ``run --local --json --trace`` of a small model in float64 printed, its errors, and the trace."""
    trace = Path(tiny).with_name("trace.json")
    arguments = ["--steps", "3", "--dtype", "float64", "--local", "--json", "--trace", str(trace)]
    done = started([sys.executable, "-m", "pipeplan"], "runtime_support.models:talking", tiny, *arguments)
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary, done.stderr, trace


def started(launcher: list[str], model: str, path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*launcher, "run", path, "--model", model, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@needs_torch
@pytest.mark.slow  # as all are that look at this run, which torchrun's is compared with
def test_local_prints_one_object(local: tuple[dict[str, Any], str, Path]) -> None:
    summary, errors, _ = local
    word = "a word from the model"
    assert errors.count(word) == 2, "what ranks print stays off stdout"
    made_up = r"pipeplan: samples are made up; --data .*\npipeplan: warning: the plan expects 64B per sample .*"
    said = "\n".join(line for line in errors.replace(word, "").splitlines() if line)
    assert re.fullmatch(made_up, said), "nothing else is said but this and that of sizes"
    assert [step["step"] for step in summary["steps"]] == [0, 1, 2]
    losses = [step["loss"] for step in summary["steps"]]
    assert losses == sorted(losses, reverse=True), "it learns"
    times = sorted(step["iteration_ns"] for step in summary["steps"])
    assert summary["iteration_ns"] == times[1] > 0
    assert summary["predicted_iteration_ns"] > 0
    assert len(summary["peak_memory_bytes"]) == summary["num_ranks"] == 2
    assert min(summary["peak_memory_bytes"]) > 10_000_000
    assert (summary["backend"], summary["device"], summary["dtype"]) == ("gloo", "cpu", "float64")
    assert {"pipeplan", "python", "torch"} <= set(summary["versions"])


@needs_torch
@pytest.mark.parametrize("blocking", [[], pytest.param(["--blocking"], marks=pytest.mark.slow)])
def test_emulates_without_a_model(blocking: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shared = shared_workload(2, 2, lag=1000)
    path, trace = written(plan_of(shared, gpipe_orders(shared)), tmp_path), tmp_path / "trace.json"
    arguments = [path, "--emulate", "--steps", "2", "--local", "--json", "--trace", str(trace), *blocking]
    with warm_ranks():
        done = pipeplan("run", *arguments)
    assert done.returncode == 0
    summary = json.loads(done.stdout)
    said = r"pipeplan: 2 processes on .* all are stretched [\d.e+]+ times \(--stretch\)\n"
    assert re.fullmatch(said, done.stderr + capfd.readouterr().err)
    assert summary["blocking"] == bool(blocking)
    assert summary["stretch"] > 1, "actions of nanoseconds"
    times = [step["iteration_ns"] for step in summary["steps"]]
    assert min(times) >= summary["predicted_iteration_ns"] > 0
    assert summary["iteration_ns"] == pytest.approx(sum(times) / 2, abs=1)
    measured = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X" and e["pid"] == 2]
    assert len(measured) == 2 * sum(map(len, Plan.model_validate_json(Path(path).read_text()).programs))


@needs_torch
@pytest.mark.slow
def test_trace_has_every_action_predicted_and_measured(tiny: str, local: tuple[dict[str, Any], str, Path]) -> None:
    summary, _, path = local
    plan = Plan.model_validate_json(Path(tiny).read_text())
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    everything = sorted((device, text) for device, program in enumerate(plan.programs) for text in program)
    for process in (1, 2):
        for step in range(3):
            found = [e for e in events if e["pid"] == process and e["args"]["step"] == step]
            assert sorted((e["args"]["device"], e["name"]) for e in found) == everything
    for step in summary["steps"]:
        compute = [e for e in events if e["pid"] == 2 and e["args"]["step"] == step["step"] and e["cat"] in "FBIW"]
        first, last = min(e["ts"] for e in compute), max(e["ts"] + e["dur"] for e in compute)
        assert round((last - first) * 1000) <= step["iteration_ns"] + 10, "behind the actions tied gradients are summed"
        for device, program in enumerate(plan.programs):
            ran = sorted((e["ts"], e["name"]) for e in compute if e["args"]["device"] == device)
            assert [name for _, name in ran] == [text for text in program if "_" not in text]


@pytest.mark.slow
@needs_torch
def test_torchrun_trains_as_local_does(tiny: str, local: tuple[dict[str, Any], str, Path]) -> None:
    """Losses to the printed digit; only rank 0 prints."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = started([*torchrun, "-m", "pipeplan"], "gpt2-tiny", tiny, "--steps", "3", "--dtype", "float64")
    assert done.returncode == 0, done.stderr
    *told, comparison, rate, reason = done.stdout.splitlines()
    assert reason.endswith("shows where time went"), "times of this plan are made up"
    assert comparison.startswith("predicted ")
    assert rate.startswith("trained ")
    lines = [line.split() for line in told]
    assert [line[:4] for line in lines] == [
        ["step", str(step["step"]), "loss", f"{step['loss']:.4f}"] for step in local[0]["steps"]
    ]
    assert all(line[4] == "iteration" and line[5].endswith("s") for line in lines)
