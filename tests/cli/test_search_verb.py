"""``pipeplan search`` as a user meets it: figures, files, exit codes, interruption."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeplan import _api
from pipeplan.checker import check
from pipeplan.cli import search_verbs
from pipeplan.cli.main import cli
from pipeplan.examples import ShapeCosts, shape
from pipeplan.files import Cluster, DeviceKind, LinkLevel, Placement, Source, read_plan, read_profile, write_file
from pipeplan.time_limit import clock_of
from support.commands import interrupted, pipeplan
from support.marks import one_in, slow_but

pytestmark = pytest.mark.counted

QUICK = ("--deterministic", "--time-limit", "1s")
PLAIN = ("--placement", "one-to-one", "--deterministic", "--time-limit", "100ms")
KEYS = {
    *("status", "scheduler", "makespan_ns", "lower_bound_ns", "gap", "period_ns", "period_lower_bound_ns", "unroll"),
    *("span", "bubble_rate", "bubble_rate_span", "bubble_rate_steady", "peak_memory_bytes", "num_microbatches"),
    *("search_seconds", "repetend_seconds", "partition_seconds"),
}


@pytest.fixture
def v(tmp_path: Path) -> Path:
    path = tmp_path / "v.json"
    write_file(shape("v", 4), str(path))
    return path


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A chain of 12 blocks without a placement."""
    profile = shape("v", 12)
    path = tmp_path / "chain.json"
    write_file(profile.model_copy(update={"placement": None}), str(path))
    return path


def test_what_the_search_notes_is_said(v: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a person, a program or a file gets the answer: that a better plan was lost is not kept from anybody."""
    own = _api.search
    noted = "a schedule of 1ms was found, and there was no time to make its plan"
    monkeypatch.setattr(_api, "search", lambda *given, **how: replace(own(*given, **how), notes=(noted,)))
    for asked, stream in (((), "stdout"), (("--details",), "stdout"), (("--json",), "stderr"), (("-o", "-"), "stderr")):
        done = CliRunner().invoke(cli, ["search", str(v), *PLAIN, *asked], env={"COLUMNS": "120"})
        assert done.exit_code == 0, done.output
        assert noted in getattr(done, stream)


def test_figures_and_plan(v: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    done = pipeplan("search", v, "--json", "-o", plan)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert set(figures) >= KEYS
    assert figures["status"] == "optimal"
    assert figures["name"] == read_profile(str(v)).name
    assert figures["num_microbatches"] == 16
    assert figures["makespan_ns"] == figures["lower_bound_ns"] == (16 + 3) * 4_000_000
    assert figures["period_ns"] == figures["period_lower_bound_ns"] == 4_000_000
    assert figures["span"] == 4
    assert check(read_plan(str(plan)), read_profile(str(v))).valid


def test_what_a_search_has_left_is_not_collected_while_its_answer_is_printed(
    v: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a long search that took half a second, after its limit."""
    thresholds, before = list[int](), gc.get_threshold()
    monkeypatch.setattr(search_verbs, "print_result", lambda *_, **__: thresholds.append(gc.get_threshold()[0]))
    assert pipeplan("search", v, "--devices", "4", *QUICK).returncode == 0
    assert thresholds == [50_000]
    assert gc.get_threshold() == before


def test_report_is_for_people_and_the_plan_goes_to_stdout_if_asked(v: Path) -> None:
    report = pipeplan("search", v, "--details").stdout
    assert "bubble rate" in report
    assert "bottleneck: stage 0 on device 0, 4ms of work per micro-batch, 0.0% above" in report
    assert json.loads(pipeplan("search", v, "-o", "-").stdout)["kind"] == "plan"


@one_in(
    2,
    "strategy, num_stages",
    [("one-to-one", 3), ("circular", 6), ("v-shape", 6), ("bidirectional", 6), ("bidirectional-v-shape", 12)],
    first=1,
)
def test_strategies_on_a_chain(chain: Path, tmp_path: Path, strategy: str, num_stages: int) -> None:
    plan = tmp_path / "plan.json"
    done = pipeplan("search", chain, "--devices", 3, "--placement", strategy, *QUICK, "--json", "-o", plan)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["partition_seconds"] is not None
    assert len(read_plan(str(plan)).stages) == num_stages
    assert check(read_plan(str(plan)), read_profile(str(chain))).valid


def test_cluster_gives_devices_memory_and_links(chain: Path, tmp_path: Path) -> None:
    cluster = Cluster(
        name="two nodes",
        source=Source(method="estimated"),
        devices=(
            DeviceKind(name="big", count=2, memory_bytes=8 * 10**9),
            DeviceKind(name="small", count=2, memory_bytes=6 * 10**9),
        ),
        levels=(LinkLevel(name="link", group_size=4, latency_ns=5000, bandwidth_bytes_per_s=10**9),),
    )
    profile = read_profile(str(chain))
    edges = tuple(edge.model_copy(update={"transfer_ns": None, "bytes_per_sample": 1000}) for edge in profile.edges)
    write_file(profile.model_copy(update={"edges": edges}), str(chain))
    write_file(cluster, str(tmp_path / "cluster.json"))
    done = pipeplan(
        *("search", chain, "--cluster", "cluster.json", *PLAIN),
        *("-o", "plan.json", "--json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    plan = read_plan(str(tmp_path / "plan.json"))
    assert [device.memory_bytes for device in plan.devices] == [8 * 10**9] * 2 + [6 * 10**9] * 2
    assert {hop.duration_ns for each in plan.dependencies for hop in each.hops} == {6000}
    assert check(plan, read_profile(str(chain)), cluster).valid
    more = pipeplan("search", chain, "--cluster", "cluster.json", "--memory", "9GB", *PLAIN, cwd=tmp_path)
    assert more.returncode == 0, more.stderr


def test_placement_file(chain: Path, tmp_path: Path) -> None:
    profile = read_profile(str(chain))
    placement = Placement(
        strategy="by-hand",
        num_devices=2,
        stages=(
            {"blocks": tuple(block.id for block in profile.blocks[:3]), "devices": (1,)},
            {"blocks": tuple(block.id for block in profile.blocks[3:]), "devices": (0,)},
        ),
    )
    write_file(placement, str(tmp_path / "placement.json"))
    done = pipeplan("search", chain, "--placement", tmp_path / "placement.json", *QUICK, "-o", tmp_path / "plan.json")
    assert done.returncode == 0, done.stderr
    assert read_plan(str(tmp_path / "plan.json")).stages[0].devices == (1,)


def test_what_would_do_is_figures_too(v: Path) -> None:
    done = pipeplan("search", v, "--memory", "0.5GB", "--json")
    assert done.returncode == 1
    said = json.loads(done.stdout)
    assert "4 devices of 1GB would do" in said["error"]
    assert said["would_do"] == [{"num_devices": 4, "memory_bytes": 10**9, "what": "tp 1 dp 1 pp 4, all recomputed"}]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--memory", "0.5GB"], 1, "500MB too much; 4 devices of 1GB would do; that was found"),
        (["--devices", "3"], 2, "--devices 3 contradicts the profile's placement"),
        (["--chunks", "2"], 2, "--chunks 2 would do nothing"),
        (["--memory", "lots"], 2, "is not a size"),
        (["--time-limit", "30"], 2, "'--time-limit': 30 of what? 30s, or 30 milliseconds as 30ms"),
        (["--memory", "3"], 2, "'--memory': 3 of what? 3GB, or 3 bytes as 3B"),
        (["--memory", "16384"], 2, "16384 of what? 16384MB, or 16384 bytes as 16384B"),
        (["--scheduler", "best"], 2, "choose from auto"),
        (["--split-backward", "yes"], 2, "needs input_grad_ns and weight_grad_ns"),
        (["--unroll", "0"], 2, "--unroll"),
        (["--microbatch-size", "4"], 2, "profile it with --microbatch 4"),
        (["--cluster", "nowhere.json"], 2, "nowhere.json: cannot be read"),
        (["-o", "-", "--json"], 2, "both print to stdout"),
        (["-o", "no/such/folder/plan.json"], 2, "cannot be written"),
    ],
)
def test_errors(v: Path, arguments: list[str], code: int, text: str) -> None:
    done = pipeplan("search", v, *arguments)
    assert done.returncode == code
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_rules_of_a_file_make_the_schedule(v: Path, tmp_path: Path) -> None:
    rules, plan = tmp_path / "mine.toml", tmp_path / "plan.json"
    rules.write_text('in_flight = "D - d"\n')
    done = pipeplan("search", v, "--rules", rules, "--json", "-o", plan)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["scheduler"] == "rules: mine"
    found = read_plan(str(plan))
    assert check(found, read_profile(str(v))).valid
    assert [memory.activation_bytes for memory in found.predicted.memory] == [4e9, 3e9, 2e9, 1e9]
    assert found.provenance.options["rules"] == "mine"


@pytest.mark.parametrize(
    ("arguments", "told"), [(["--scheduler", "auto"], True), (["--scheduler", "rules"], False), ([], False)]
)
def test_rules_beside_a_search_that_is_asked_for_are_told_to_be_alone(
    v: Path, tmp_path: Path, arguments: list[str], told: bool
) -> None:
    texts = [
        pipeplan("search", v, "--rules", "1f1b+", *arguments, "--json").stderr,
        pipeplan("search", v, "--rules", "1f1b+", *arguments, "-o", tmp_path / "plan.json").stdout,
    ]
    assert [("--rules alone" in " ".join(text.split())) for text in texts] == [told, told]


@pytest.mark.parametrize(
    ("rules", "arguments", "code", "text"),
    [
        ("in_flight = 0", [], 2, "rules 'mine': in_flight is 0; it must be at least 1; 0F0 could never start"),
        ("in_flight = -1", [], 2, "mine.toml: not a valid rules file: in_flight is -1"),
        ("in_flight = 1", ["--scheduler", "1f1b"], 2, "--rules is for --scheduler rules"),
        ('placement = "mine.toml"', [], 2, "placement is 'mine.toml'; choose from one-to-one"),
        ('types = "fwd-first"', ["--memory", "2GB", "--recompute", "none"], 1, "needs 16GB, 14GB too much"),
    ],
)
def test_rules_that_are_wrong(v: Path, tmp_path: Path, rules: str, arguments: list[str], code: int, text: str) -> None:
    (tmp_path / "mine.toml").write_text(rules)
    done = pipeplan("search", v, "--rules", tmp_path / "mine.toml", *arguments)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert text in done.stderr


def test_too_few_blocks(chain: Path) -> None:
    done = pipeplan("search", chain, "--devices", 13, "--placement", "one-to-one")
    assert done.returncode == 2
    assert "12 blocks" in done.stderr


def test_a_broken_profile_names_the_place(v: Path) -> None:
    data = json.loads(v.read_text())
    data["blocks"][2]["costs"][0]["forward_ns"] = "fast"
    v.write_text(json.dumps(data))
    done = pipeplan("search", v)
    assert done.returncode == 2
    assert "blocks[2].costs[0].forward_ns" in done.stderr


@slow_but("number", [signal.SIGINT, signal.SIGTERM], lambda _: False, signal.SIGINT.__eq__)
def test_interruption_writes_the_best_plan(tmp_path: Path, number: signal.Signals) -> None:
    costs = ShapeCosts(101, None, 97, 89, comm_ns=10, activation_bytes=2 * 10**9, weight_grad_bytes=10**9)
    profile = tmp_path / "profile.json"
    write_file(shape("v", 8, costs=costs), str(profile))
    plan = tmp_path / "plan.json"
    command = ["search", profile, "-o", plan, "--json", "--memory", "8GB", "--time-limit", "600s"]
    code, out, err = interrupted(command, number)
    assert code == 0, err
    assert json.loads(out)["interrupted"]
    assert check(read_plan(str(plan)), read_profile(str(profile))).valid


@pytest.mark.parametrize("verb", ["", "search", "compare", "frontier", "check", "simulate", "run", "profile"])
def test_help_is_quick_to_import(verb: str) -> None:
    """Start-up is a feature: help imports none of the heavy libraries."""
    heavy = ("ortools", "pydantic", "torch", "networkx", "numpy", "rich")
    code = f"""
import sys
import time
from pipeplan.cli.main import cli
cli.main([*{[verb] if verb else []}, "--help"], standalone_mode=False)
print([name for name in {heavy} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Options:" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_profiles_are_estimated_without_the_planner(tmp_path: Path) -> None:
    """Imports are most of an estimate's time: names of devices need none of the planner's, and chains no graphs."""
    said = ["profile", "gpt2-tiny", "--estimate", "--device", "h100-80gb", "-o", str(tmp_path / "profile.json")]
    code = f"""
import sys
from pipeplan.cli.main import cli
cli.main({said}, standalone_mode=False)
print([name for name in ("networkx", "ortools", "pipeplan.planning") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_version_and_verbs() -> None:
    from pipeplan._version import __version__

    assert __version__ in pipeplan("--version").stdout
    shown = pipeplan("--help").stdout
    for verb in ("search", "compare", "simulate", "run", "profile", "check", "example"):
        assert verb in shown
        assert pipeplan(verb, "--help").returncode == 0


def test_a_plan_states_the_overhead_of_splitting(tmp_path: Path) -> None:
    """And check knows it: durations are the profile's and the overhead, in I and W alone."""
    profile, plan = tmp_path / "p.json", tmp_path / "plan.json"
    write_file(shape("v", 4, costs=ShapeCosts(100, None, 100, 100)), str(profile))
    done = pipeplan(*("search", profile, "-o", plan, "--split-backward", "yes", "--split-overhead", "7ns", *QUICK))
    assert done.returncode == 0, done.stderr
    written = read_plan(str(plan))
    assert written.split_overhead_ns == 7
    assert {operation.duration_ns for operation in written.operations if operation.kind == "F"} == {100}
    assert {operation.duration_ns for operation in written.operations if operation.kind in "IW"} == {107}
    assert check(written, read_profile(str(profile))).valid
    damaged = written.model_copy(update={"split_overhead_ns": 6})
    assert not check(damaged, read_profile(str(profile))).valid
    again = pipeplan("simulate", plan, "--profile", profile, "--json")
    assert json.loads(again.stdout)["makespan_ns"] == written.predicted.makespan_ns


def test_stages_can_be_edited_by_hand(chain: Path, tmp_path: Path) -> None:
    said = ("--devices", 3, "--replicas", 1, "--placement", "one-to-one", "--mini-batch", 12)
    first = ("search", chain, *said, *QUICK, "--json")
    done = pipeplan(*first, "--placement-output", tmp_path / "stages.json", "-o", tmp_path / "first.json")
    assert done.returncode == 0, done.stderr
    stages = json.loads((tmp_path / "stages.json").read_text())
    assert stages["kind"] == "placement"
    last = stages["stages"][-1]
    moved = stages["stages"][-2]["blocks"].pop()
    last["blocks"].insert(0, moved)
    (tmp_path / "stages.json").write_text(json.dumps(stages))
    edited = ("--placement", tmp_path / "stages.json", "--mini-batch", 12, *QUICK, "--json")
    done = pipeplan("search", chain, *edited, "-o", tmp_path / "second.json")
    assert done.returncode == 0, done.stderr
    plans = [read_plan(str(tmp_path / name)) for name in ("first.json", "second.json")]
    assert plans[1].stages[-1].blocks == (moved, *plans[0].stages[-1].blocks)
    assert plans[1].mini_batch == 12
    assert check(plans[1], read_profile(str(chain))).valid


def test_flags_that_contradict_the_devices(chain: Path) -> None:
    done = pipeplan("search", chain, "--devices", 4, "--placement", "one-to-one", "--replicas", 3)
    assert done.returncode == 2
    assert "3" in done.stderr
    assert "--replicas" in done.stderr
    done = pipeplan("search", chain, "--devices", 4, "--placement", "one-to-one", "--shard-shared", "yes")
    assert done.returncode == 2
    assert "no shared blocks" in done.stderr


def test_rules_without_a_file_are_a_tuning(chain: Path, tmp_path: Path) -> None:
    plan, kept = tmp_path / "plan.json", tmp_path / "cells.jsonl"
    asked = ("search", chain, "--devices", 2, "--scheduler", "rules", "--placement", "circular", "--workers", 1)
    best, stages = tmp_path / "best.toml", tmp_path / "stages.json"
    to = ("--rules-output", best, "--placement-output", stages)
    done = pipeplan(*asked, "--cache", kept, *to, "--json", "-o", plan)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    rows = figures["candidates"]
    assert [row["rank"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows[0]["iteration_ns"] == figures["iteration_ns"] == min(row["iteration_ns"] for row in rows)
    assert figures["cells"] == figures["cells_skipped"] + 1
    assert check(read_plan(str(plan)), read_profile(str(chain))).valid
    again = pipeplan(*asked, "--cache", kept)
    assert "configurations: 1 of 1 evaluated, 1 of them known" in again.stdout
    assert "bwd-first" in again.stdout
    same = pipeplan("search", chain, "--rules", best, "--placement", stages, "-o", tmp_path / "same.json")
    assert same.returncode == 0, same.stderr
    assert read_plan(str(tmp_path / "same.json")).programs == read_plan(str(plan)).programs
    refused = pipeplan("search", chain, "--devices", 2, "--cache", "cells.jsonl")
    assert (refused.returncode, "--scheduler rules" in refused.stderr) == (2, True)


@pytest.mark.parametrize("flag", ["--placement", "--rules"])
def test_a_name_that_no_file_can_have_is_refused(flag: str, tmp_path: Path) -> None:
    """Asking whether such a file is there is an error of the system's."""
    path = tmp_path / "profile.json"
    assert pipeplan("example", "shape-v", "--devices", 2, "-o", path).returncode == 0
    refused = pipeplan("search", path, flag, "x" * 5000)
    assert refused.returncode == 2
    assert refused.stderr.startswith("pipeplan: ")
    assert "Traceback" not in refused.stderr


def test_the_limit_is_of_the_command_as_a_whole(tmp_path: Path) -> None:
    """The process began longer ago than the limit is: there is a plan, and no time for another."""
    profile = tmp_path / "profile.json"
    write_file(shape("m", 4), str(profile))
    asked = ["search", str(profile), "--microbatches", "8", "--memory", "6GB", "--time-limit", "1000s", "--json"]
    done = CliRunner().invoke(cli, asked, obj=clock_of(None)() - 2000)
    assert done.exit_code == 0
    assert json.loads(done.stdout)["timed_out"]
