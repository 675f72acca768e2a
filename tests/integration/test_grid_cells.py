"""Cells of the uniform grid of benchmarks/real_clusters.py: their bounds, and what a run of it says was missed."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from builders.profiles import joined
from pipeplan.files import Block, Cluster, CostRow
from pipeplan.planning.candidates import uniform_layouts
from pipeplan.planning.request import Request
from support.paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from real_clusters import CASES, CellBounds, State, _simulated, missed


@pytest.mark.parametrize("seed", range(3))
def test_no_cell_is_below_its_own_bound(seed: int) -> None:
    """Of random blocks, links and schedules, whatever copies divide; some bounds are above the table's."""
    rng = random.Random(seed)

    def block(index: int) -> Block:
        forward, first, second = (rng.randint(1, 60) for _ in range(3))
        times = {"forward_ns": forward, "input_grad_ns": first, "weight_grad_ns": second}
        row = CostRow(microbatch_size=1, activation_bytes=rng.randint(1, 9), backward_ns=first + second, **times)
        return Block(id=f"b{index}", operator="layer", costs=(row,), parameter_bytes=rng.randint(0, 40))

    cluster = Cluster.of("c", 4, levels=[("node", 4, 0, rng.choice([2 * 10**8, 10**9, 10**10]))])
    request = Request.of(joined([block(index) for index in range(5)]), cluster=cluster, mini_batch=8, num_parted=0)
    bounds, looked, sharper = CellBounds(request), 0, 0
    for each in uniform_layouts(request):
        if each.choice.usual is not None and each.choice.usual.name:
            ns, _ = _simulated(request, each)
            least = bounds.least_ns(each.choice)
            assert ns is None or least <= ns, each.choice
            looked += ns is not None
            sharper += least > each.least_ns
    assert looked > 10
    assert sharper > 10


def test_what_is_missed_is_said(tmp_path: Path) -> None:
    """A share of peak, a cell that is shorter, a bound, and sizes."""
    case = next(case for case in CASES if case.devices == 4096)
    state = State(tmp_path, 60.0)
    for part, found in (
        ("search", {"iteration_ns": 2 * 10**9}),
        ("grid", {"best_ns": 10**9, "wrong": ["tp 1"]}),
        ("commands", {"iteration_ns": 10**9, "plan_bytes": 600_000, "check": {"seconds": 5.5}}),
    ):
        (tmp_path / f"{case.stem}.{part}.json").write_text(json.dumps(found))
    said = "\n".join(missed(state, [case, replace(case, devices=8)]))
    for each in ("bounds that do not hold: tp 1", "search: 2.000 s, and a cell", "6e+05 bytes", "5.5 seconds of check"):
        assert each in said
    assert len(said.splitlines()) == 4


@pytest.mark.parametrize(
    ("searched", "front_ns", "said"),
    [
        ({"iteration_ns": 2 * 10**9}, 10**9, ["2.000 s, and `frontier --plans` 1.000 s"]),
        ({"failed": "nothing fits"}, 10**9, ["nothing, and `frontier --plans` 1.000 s"]),
        ({"iteration_ns": 2 * 10**9}, 2 * 10**9, []),
        ({"iteration_ns": 2 * 10**9}, None, []),
    ],
)
def test_a_shorter_frontier_is_missed(
    tmp_path: Path, searched: dict[str, object], front_ns: int | None, said: list[str]
) -> None:
    """On any number of devices, and where the search has no plan; as long a plan is none, nor is no frontier."""
    state = State(tmp_path, 60.0)
    for part, found in (("search", searched), ("frontier", {"best_ns": front_ns})):
        (tmp_path / f"{CASES[0].stem}.{part}.json").write_text(json.dumps(found))
    assert [line.rpartition("search: ")[2] for line in missed(state, CASES[:1])] == said
