"""``pipeplan check`` from outside: what it prints where, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from builders.chains import chain_plan, chain_profile
from builders.clusters import cluster_of
from pipeplan.cli.main import main
from pipeplan.files import Cluster, DeviceKind, Plan, Source, to_json, write_file

Run = tuple[int, str, str]
"""Exit code, stdout, stderr."""

Check = Callable[..., Run]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Run ``pipeplan check`` in process, as the installed command does."""

    def check(*arguments: str) -> Run:
        monkeypatch.setattr(sys, "argv", ["pipeplan", "check", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return check


@pytest.fixture
def plan_path(tmp_path: Path) -> str:
    return written(tmp_path, chain_plan(4, 8, repetend=True))


def written(directory: Path, plan: Plan, **changes: object) -> str:
    path = directory / "plan.json"
    path.write_text(json.dumps(json.loads(to_json(plan)) | changes), encoding="utf-8")
    return str(path)


def test_a_valid_plan_is_one_line(run: Check, plan_path: str) -> None:
    assert run(plan_path) == (
        0,
        f"{plan_path}: valid; 64 actions and 48 transfers on 4 devices; makespan 330ns, bubble rate 27.3%; "
        "peak memory 4kB; repetend 30ns for 1\n",
        "",
    )


def test_it_says_what_it_was_compared_with(run: Check, plan_path: str, tmp_path: Path) -> None:
    profile, cluster = str(tmp_path / "profile.json"), str(tmp_path / "cluster.json")
    write_file(chain_profile(4), profile)
    kind = DeviceKind(name="device", count=4, memory_bytes=4000)
    write_file(Cluster(name="small", source=Source(method="estimated"), devices=(kind,)), cluster)
    code, out, err = run(plan_path, "--profile", profile, "--cluster", cluster)
    assert (code, err) == (0, "")
    assert out.endswith("(also against chain and small)\n")


def test_an_invalid_plan_names_its_problems_on_stderr(run: Check, tmp_path: Path) -> None:
    path = written(tmp_path, chain_plan(4, 8), programs=[["0F0", "0F0"], [], [], []])
    code, out, err = run(path)
    assert (code, out) == (1, "")
    lines = err.splitlines()
    assert lines[0] == f"pipeplan: {path}: not a valid plan, 21 problems:"
    assert lines[1] == "  programs[0][1] (0F0): is already there as programs[0][0] (0F0) [actions]"
    assert lines[-1] == "  ... and 1 more"
    assert len(lines) == 22


def test_another_profile_is_a_problem(run: Check, plan_path: str, tmp_path: Path) -> None:
    write_file(chain_profile(4, forward=11), str(tmp_path / "profile.json"))
    code, out, err = run(plan_path, "--profile", str(tmp_path / "profile.json"))
    assert (code, out) == (1, "")
    assert "operations[0F].duration_ns: is 10, the profile gives 11 [profile]" in err


def test_json_of_a_valid_plan(run: Check, plan_path: str) -> None:
    code, out, err = run(plan_path, "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data.pop("bubble_rate") == pytest.approx(3 / 11)
    assert data.pop("bubble_rate_span") == pytest.approx(3 / 11)
    assert data == {
        "exposed_gather_ns": 0,
        "exposed_reduction_ns": 0,
        "exposed_step_ns": 0,
        "valid": True,
        "num_problems": 0,
        "problems": [],
        "remarks": [],
        "num_devices": 4,
        "num_actions": 64,
        "num_transfers": 48,
        "makespan_ns": 330,
        "iteration_ns": 330,
        "bubble_rate_steady": 0.0,
        "period_ns": 30.0,
        "peak_memory_bytes": [4000, 3000, 2000, 1000],
    }


def test_a_cluster_of_other_devices_is_a_remark(run: Check, tmp_path: Path) -> None:
    plan, profile = chain_plan(4, 8), chain_profile(4)
    source = Source(method="estimated", device="A100-SXM4-80GB")
    write_file(profile.model_copy(update={"source": source}), str(tmp_path / "profile.json"))
    write_file(plan, str(tmp_path / "plan.json"))
    against = str(tmp_path / "plan.json"), "--profile", str(tmp_path / "profile.json"), "--cluster"
    for name, other in (("H100-SXM5-80GB", True), ("A100-SXM4-80GB", False), ("small", False)):
        write_file(cluster_of(4, latency_ns=0, name=name), str(tmp_path / "cluster.json"))
        code, out, err = run(*against, str(tmp_path / "cluster.json"))
        assert (code, err) == (0, "")
        said = "remark: times are those of A100-SXM4-80GB, the cluster has H100-SXM5-80GB" in " ".join(out.split())
        assert said == other


def test_json_of_an_invalid_plan(run: Check, tmp_path: Path) -> None:
    path = written(tmp_path, chain_plan(4, 8), programs=[["0F0", "0F0"], [], [], []])
    code, out, err = run(path, "--json")
    assert (code, err) == (1, "")
    data = json.loads(out)
    assert (data["valid"], data["num_problems"], len(data["problems"])) == (False, 21, 21)
    assert data["problems"][0] == {
        "rule": "actions",
        "place": "programs[0][1] (0F0)",
        "message": "is already there as programs[0][0] (0F0)",
    }
    assert data["peak_memory_bytes"] == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["absent.json"], "pipeplan: absent.json: cannot be read: No such file or directory\n"),
        ([], "Error: Missing argument 'PLAN'."),
        (["{plan}", "--profile", "{plan}"], "plan.json: this is a plan, where a profile is needed"),
        (["{plan}", "--cluster", "absent.json"], "absent.json: cannot be read"),
        (["{plan}", "--nonsense"], "No such option"),
    ],
)
def test_what_cannot_be_read_is_exit_2(run: Check, plan_path: str, arguments: list[str], text: str) -> None:
    code, out, err = run(*(argument.format(plan=plan_path) for argument in arguments))
    assert (code, out) == (2, "")
    assert text in err


def test_the_installed_command_reads_stdin(plan_path: str) -> None:
    with open(plan_path, "rb") as stream:
        done = subprocess.run(
            [sys.executable, "-m", "pipeplan.cli.main", "check", "-"], stdin=stream, capture_output=True, check=False
        )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"-: valid; 64 actions")
