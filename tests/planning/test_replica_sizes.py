"""A micro-batch counts samples over all replicas wherever it is named, and beside it stands what one replica has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from builders.chains import chain_workload
from pipeplan.examples import ShapeCosts, shape
from pipeplan.files import Block, CostRow, Edge, Profile, Source, write_file
from support.commands import pipeplan

pytestmark = pytest.mark.counted

FREE = "links are free: without --cluster, transfers take no time"
QUICK = ("--deterministic", "--time-limit", "1s")


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Four blocks with costs for 1 to 16 samples."""
    blocks = tuple(
        Block(
            id=f"block{index}",
            operator="block",
            costs=tuple(CostRow(microbatch_size=n, forward_ns=n * 1000, backward_ns=n * 2000) for n in (1, 2, 4, 16)),
        )
        for index in range(4)
    )
    edges = tuple(Edge(source=f"block{n}", target=f"block{n + 1}", bytes_per_sample=64) for n in range(3))
    path = tmp_path / "chain.json"
    write_file(Profile(name="chain", source=Source(method="estimated"), blocks=blocks, edges=edges), str(path))
    return path


def asked(chain: Path) -> tuple[object, ...]:
    """Two stages with four replicas each, which share micro-batches of 16 samples."""
    sizes = ("--mini-batch", 64, "--microbatch-size", 16)
    return (chain, "--devices", 8, "--replicas", 4, "--placement", "one-to-one", *sizes, *QUICK)


def test_search_and_simulate_say_both(chain: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    report = pipeplan("search", *asked(chain), "-o", plan, "--details").stdout
    assert "4 micro-batches of 16 samples, 4 per replica" in report
    assert "4 replicas of 4 samples" in report, "in the table of stages"
    for arguments in (("search", *asked(chain)), ("simulate", plan)):
        figures = json.loads(pipeplan(*arguments, "--json").stdout)
        assert (figures["microbatch_size"], figures["samples_per_replica"]) == (16, [4, 4])
    assert "16 samples, 4 per replica" in pipeplan("simulate", plan).stdout


def test_without_replicas_there_is_one_figure(chain: Path) -> None:
    done = pipeplan("search", chain, "--devices", 4, "--placement", "one-to-one", "--microbatch-size", 2, *QUICK)
    assert "micro-batches of 2 samples" in done.stdout
    assert "per replica" not in done.stdout


def test_compare_says_both(chain: Path) -> None:
    lines = pipeplan("compare", *asked(chain)).stdout.splitlines()
    assert (
        lines[0] == "chain: 8 devices, 4 micro-batches of 16 samples, 4 per replica, no memory limit, times estimated"
    )
    rows = json.loads(pipeplan("compare", *asked(chain), "--json").stdout)["rows"]
    assert all((row["replicas"], row["samples_per_replica"]) == (4, [4, 4]) for row in rows)


def test_tuning_says_both_and_the_size_is_that_of_the_flag(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    arguments = ("search", *asked(chain), "--scheduler", "rules", "--workers", 1)
    lines = pipeplan(*arguments).stdout.splitlines()
    header = next(line for line in lines if line.strip().startswith("rank"))
    assert " ".join(header.split()).startswith("rank pp dp samples per replica placement")
    assert lines[lines.index(header) + 2].split()[:5] == ["1", "2", "4", "16", "4"]
    row = json.loads(pipeplan(*arguments, "--json").stdout)["candidates"][0]
    assert (row["replicas"], row["microbatch_size"], row["samples_per_replica"]) == (4, 16, [4, 4])


def test_points_of_frontiers_say_both(chain: Path) -> None:
    done = pipeplan("frontier", chain, "--devices", 8, "--mini-batch", 64, "--plans", "--time-limit", "1s", "--json")
    found = [point["what"] for point in json.loads(done.stdout)["points"]]
    replicated = [what for what in found if "8 replicas" in what]
    assert replicated
    assert all("per replica" in what for what in replicated)


def test_stages_with_different_replicas_give_a_range() -> None:
    workload = chain_workload(2, 4, sizes=[16, 16])
    stages = tuple(replace(stage, replicas=count) for stage, count in zip(workload.stages, (4, 2), strict=True))
    workload = replace(workload, stages=stages, microbatch_size=16)
    assert workload.samples_per_replica == (4, 8)
    assert workload.microbatch_words == "16 samples, 4 to 8 per replica"


def test_a_size_that_was_not_profiled_is_that_of_a_replica(chain: Path) -> None:
    arguments = (chain, "--devices", 1, "--placement", "one-to-one", "--scheduler", "gpipe", "--microbatch-size", 32)
    done = pipeplan("search", *arguments, "--microbatches", 2, *QUICK)
    assert done.returncode == 2
    assert "per replica" in done.stderr or "each replica" in done.stderr


@pytest.mark.parametrize("verb", ["search", "compare", "frontier"])
def test_free_links_are_said_everywhere_in_the_same_words(verb: str, chain: Path) -> None:
    """Below the report, and on stderr where stdout has JSON; not where there are links, or none are needed."""
    limit = ("--device", "a100-80gb") if verb == "frontier" else ("--placement", "one-to-one", *QUICK)
    sizes = ("--mini-batch", 16)
    done = pipeplan(verb, chain, "--devices", 2, *sizes, *limit)
    assert FREE in " ".join(done.stdout.split())
    assert done.stderr == ""
    done = pipeplan(verb, chain, "--devices", 2, *sizes, *limit, "--json")
    assert done.stderr == f"pipeplan: {FREE}\n"
    cluster = chain.parent / "cluster.json"
    assert pipeplan("example", "testbed-tensoropt", "--devices", 2, "-o", cluster).returncode == 0
    for other in (("--devices", 1), ("--devices", 2, "--cluster", cluster)):
        done = pipeplan(verb, chain, *other, *sizes, *limit)
        assert done.returncode == 0, done.stderr
        assert "links are free" not in done.stdout + done.stderr


def test_edges_with_a_time_of_their_own_are_excepted(tmp_path: Path) -> None:
    path = tmp_path / "v.json"
    write_file(shape("v", 4, costs=ShapeCosts(comm_ns=10_000)), str(path))
    said = " ".join(pipeplan("search", path, *QUICK).stdout.split())
    assert f"{FREE}, except on 3 edges whose time the profile states" in said
