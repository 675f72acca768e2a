"""``pipeplan compare`` as a user meets it: the table, the JSON object, placements, what does not fit."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from pipeplan.examples import ShapeCosts, shape
from pipeplan.files import write_file
from pipeplan.schedule.classic import CLASSIC
from support.commands import interrupted, pipeplan
from support.marks import slow_but

pytestmark = pytest.mark.counted

GB = 10**9
QUICK = ("--deterministic", "--time-limit", "1s")
QUICKER = ("--deterministic", "--time-limit", "300ms")


def compared(*arguments: str | Path) -> dict[str, Any]:
    done = pipeplan("compare", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def zero_bubble(tmp_path: Path) -> Path:
    """Forward, input and weight gradient 100 us, 10 us between devices, 2 GB per micro-batch."""
    costs = ShapeCosts(100_000, None, 100_000, 100_000, comm_ns=10_000, activation_bytes=2 * GB, weight_grad_bytes=GB)
    path = tmp_path / "zb.json"
    write_file(shape("v", 4, costs=costs), str(path))
    return path


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    """A chain of 8 blocks without a placement, backward split."""
    profile = shape("v", 8, costs=ShapeCosts(1000, None, 1000, 1000))
    path = tmp_path / "chain.json"
    write_file(profile.model_copy(update={"placement": None}), str(path))
    return path


def test_rows_are_best_first_and_ours_is_never_worse(zero_bubble: Path) -> None:
    found = compared(zero_bubble, "--microbatches", "12", "--memory", "8GB", *QUICK)
    rows = found["rows"]
    fitting = [row for row in rows if row["fits"]]
    assert [row["fits"] for row in rows] == sorted((row["fits"] for row in rows), reverse=True)
    assert [row["makespan_ns"] for row in fitting] == sorted(row["makespan_ns"] for row in fitting)
    assert rows[0]["schedule"] == "pipeplan"
    by_name = {row["schedule"]: row for row in rows}
    assert by_name["zb-h1"]["makespan_ns"] == 4_020_000
    assert max(by_name["zb-h1"]["peak_memory_bytes"]) == 8 * GB
    assert not by_name["zb-h2"]["fits"]
    assert "more than its 8GB" in by_name["zb-h2"]["why"]
    assert all(row["gap"] == row["makespan_ns"] / row["lower_bound_ns"] - 1 for row in fitting)
    assert all(row["gap"] is None for row in rows if not row["fits"])
    everything = {row["schedule"] for row in rows} | {missing["schedule"] for missing in found["not_applicable"]}
    assert everything == {"pipeplan", *CLASSIC}
    assert found["memory_bytes"] == [8 * GB] * 4


def test_the_table(zero_bubble: Path) -> None:
    done = pipeplan("compare", zero_bubble, "--memory", "8GB", "--microbatches", "12", "--recompute", "none", *QUICK)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "shape-v: 4 devices, 12 micro-batches of 1 sample, memory 8GB"
    start = next(number for number, line in enumerate(lines) if line.startswith(" ──"))
    headings = {word for line in lines[2:start] for word in line.split()}
    expected = "schedule backward iteration samples/s bubble rate by busiest device span peak memory gap"
    assert headings == {*expected.split()}
    first = lines[start + 1].split()
    assert first[0] == "pipeplan"
    assert first[-7:-1] == ["split", "4.02ms", "2985", "10.45%", "10.45%", "8GB"]
    assert 0 <= float(first[-1].removesuffix("%")) <= 1.6, "to a bound that work and dependencies give"
    assert not any(line.split()[:1] == ["zb-h2"] for line in lines), "what does not fit has no row"
    assert "does not fit on v (8GB per device): " in done.stdout
    assert "zb-h2 needs 14GB" in " ".join(done.stdout.split())
    assert "not applicable on v: zb-v" in done.stdout
    assert "\x1b" not in done.stdout


def test_without_a_placement_all_strategies_are_compared(blocks: Path) -> None:
    rows = compared(blocks, "--devices", "4", *QUICKER)["rows"]
    where = {(row["schedule"], row["placement"]) for row in rows}
    assert {("pipeplan", name) for name in ("one-to-one", "circular", "v-shape")} <= where
    assert {("1f1b", "one-to-one"), ("interleaved-1f1b", "circular"), ("zb-v", "v-shape")} <= where
    one = compared(blocks, "--devices", "4", "--placement", "circular", *QUICKER)["rows"]
    assert {row["placement"] for row in one} == {"circular"}


def test_all_strategies_whatever_the_profile_says_and_rules_beside_them(zero_bubble: Path, tmp_path: Path) -> None:
    rules = tmp_path / "mine.toml"
    rules.write_text('in_flight = "D - d"', encoding="utf-8")
    found = compared(zero_bubble, "--placement", "all", "--devices", "2", "--rules", rules, *QUICK)
    where = {(row["schedule"], row["placement"]) for row in found["rows"]}
    assert {("pipeplan", "one-to-one"), ("rules: mine", "one-to-one"), ("pipeplan", "v-shape")} <= where
    assert found["not_reached"] == []


def test_too_few_blocks_for_some_placements(tmp_path: Path) -> None:
    """Of three blocks no two devices have two each."""
    path = tmp_path / "chain.json"
    write_file(shape("v", 3).model_copy(update={"placement": None}), str(path))
    found = compared(path, "--devices", "8", *QUICKER)
    assert {row["placement"] for row in found["rows"]} == {"one-to-one", "bidirectional"}
    reasons = {missing["placement"]: missing["why"] for missing in found["not_applicable"] if not missing["schedule"]}
    assert set(reasons) == {"circular", "v-shape", "bidirectional-v-shape"}
    assert all("needs 16 stages" in why for why in reasons.values())


def test_nothing_fits(zero_bubble: Path) -> None:
    done = pipeplan("compare", zero_bubble, "--memory", "1GB", *QUICK)
    assert done.returncode == 1
    assert "raise --memory to 2GB" in done.stderr
    assert "does not fit on v (1GB per device): " in done.stdout
    assert "1f1b needs 8GB" in " ".join(done.stdout.split())
    done = pipeplan("compare", zero_bubble, "--memory", "1GB", *QUICK, "--json")
    assert done.returncode == 1
    assert {row["schedule"]: row["fits"] for row in json.loads(done.stdout)["rows"]}["1f1b"] is False


def test_overhead_of_splitting_decides(zero_bubble: Path) -> None:
    """Free splitting wins; at 60 us on each launch the whole backward does."""
    free = compared(zero_bubble, *QUICK)["rows"]
    dear = compared(zero_bubble, *QUICK, "--split-overhead", "60us")["rows"]
    assert free[0]["split_backward"]
    assert not dear[0]["split_backward"]
    assert dear[0]["makespan_ns"] > free[0]["makespan_ns"]


@slow_but("number", [signal.SIGINT, signal.SIGTERM], lambda _: False, lambda number: number != signal.SIGINT)
def test_interruption_prints_what_is_known(tmp_path: Path, number: signal.Signals) -> None:
    costs = ShapeCosts(101, None, 97, 89, comm_ns=10, activation_bytes=2 * GB, weight_grad_bytes=GB)
    profile = tmp_path / "profile.json"
    write_file(shape("v", 8, costs=costs), str(profile))
    command = ["compare", profile, "--json", "--memory", "8GB", "--time-limit", "600s"]
    code, out, err = interrupted(command, number)
    assert code == 0, err
    assert "interrupted; these are the best plans so far" in err
    found = json.loads(out)
    assert found["interrupted"]
    assert {"pipeplan", "gpipe", "1f1b"} <= {row["schedule"] for row in found["rows"]}


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--devices", "3"], 2, "--devices 3 contradicts the profile's placement"),
        (["--split-overhead", "7"], 2, "7 of what? 7s, or 7 milliseconds as 7ms"),
        (["--scheduler", "1f1b"], 2, "No such option"),
        (["-o", "plan.json"], 2, "No such option"),
    ],
)
def test_errors_of_compare(zero_bubble: Path, arguments: list[str], code: int, text: str) -> None:
    done = pipeplan("compare", zero_bubble, *arguments)
    assert done.returncode == code
    assert text in done.stderr
    assert "Traceback" not in done.stderr
