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
from support.marks import one_in
from support.paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from real_clusters import (
    BY_CUT,
    BY_FIRST,
    CASES,
    REFUTED,
    SAMPLED,
    CellBounds,
    RoomBounds,
    State,
    _sampling,
    _simulated,
    missed,
)


@one_in(3, "seed", range(3), first=1)
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
            ns, _, cut_ns = _simulated(request, each)
            least = bounds.least_ns(each.choice)
            assert ns is None or max(least, cut_ns or 0) <= ns, each.choice
            assert cut_ns is None or _simulated(request, each, cut_ns)[1] == BY_CUT
            looked += ns is not None
            sharper += least > each.least_ns
    assert looked > 10
    assert sharper > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_no_cell_is_below_what_its_blocks_have_room_for(seed: int) -> None:
    """Of random blocks, where little memory is left; some of what does not fit is known before it is cut."""
    rng = random.Random(seed)

    def block(index: int) -> Block:
        forward, first, second = (rng.randint(20, 60) for _ in range(3))
        times = {"forward_ns": forward, "input_grad_ns": first, "weight_grad_ns": second}
        sizes = {"activation_bytes": 8 if index % 2 else 13, "weight_grad_bytes": 3, "workspace_bytes": 2}
        row = CostRow(microbatch_size=1, backward_ns=first + second, **times, **sizes)
        return Block(id=f"b{index}", operator="layer", costs=(row,), parameter_bytes=7 + index % 2)

    profile, full, first, sharper = joined([block(index) for index in range(9)]), 0, 0, 0
    for memory in (30, 50, 90):
        request = Request.of(profile, devices=4, memory_bytes=memory, mini_batch=8, num_parted=0)
        bounds = CellBounds(request)
        rooms = RoomBounds(request, bounds)
        for each in uniform_layouts(request):
            if each.choice.usual is None or not each.choice.usual.name:
                continue
            ns, _, cut_ns = _simulated(request, each)
            for known in (ns, cut_ns):
                assert known is None or not rooms.refute(each.choice, known + 1), each.choice
            if cut_ns is not None:  # nothing that does without its schedule says more
                assert _simulated(request, each, cut_ns + 1)[0] == ns, each.choice
                early = _simulated(request, each, cut_ns // 2)[1]
                assert _simulated(request, each, cut_ns)[1] in REFUTED
                assert _simulated(request, each, cut_ns // 2, to_the_end=True)[1] == BY_CUT
                first += early == BY_FIRST
            sharper += cut_ns is not None and rooms.refute(each.choice, bounds.least_ns(each.choice) + 1)
            full += ns is None and rooms.refute(each.choice, 10**9)
    assert sharper > 10
    assert min(full, first) > 1


def test_what_is_missed_is_said(tmp_path: Path) -> None:
    """A share of peak, a cell or a published configuration that is shorter, a bound, and sizes."""
    case = next(case for case in CASES if case.devices == 4096)
    state = State(tmp_path, 60.0)
    published = {"run": "a run", "flags": "--tp 8", "ours_ns": 2 * 10**9, "theirs_ns": 1_900_000_000}
    for part, found in (
        ("search", {"iteration_ns": 2 * 10**9}),
        ("grid", {"best_ns": 10**9, "wrong": ["tp 1"]}),
        ("commands", {"iteration_ns": 10**9, "plan_bytes": 600_000, "check": {"seconds": 5.5}}),
        ("published", {"runs": [published, published | {"theirs_ns": 2 * 10**9}, published | {"theirs_ns": None}]}),
    ):
        (tmp_path / f"{case.stem}.{part}.json").write_text(json.dumps(found))
    said = "\n".join(missed(state, [case, replace(case, devices=8)]))
    for each in (
        *("bounds that do not hold: tp 1", "search: 2.000 s, and a cell", "6e+05 bytes", "5.5 seconds of check"),
        "search: 2.000 s, and a run 1.900 s (`--tp 8`)",
    ):
        assert each in said
    assert len([line for line in said.splitlines() if "not known" not in line]) == 5


def test_what_failed_or_ended_late_is_missed(tmp_path: Path) -> None:
    """A search without a plan or with a wrong one, a process that failed, and one that ended late; on time is not."""
    few, many = CASES[0], next(case for case in CASES if case.devices == 4096)
    state = State(tmp_path, 60.0)
    for case, part, found in (
        (few, "search", {"iteration_ns": 10**9, "valid": False}),
        (few, "commands", {"search": {"code": 2, "failed": "no such file"}}),
        (many, "search", {"failed": "nothing fits"}),
        (many, "commands", {"search": {"code": 0, "seconds": 62.0}, "check": {"code": 1, "failed": "refused"}}),
    ):
        (tmp_path / f"{case.stem}.{part}.json").write_text(json.dumps({"limit_s": 60.0} | found))
    assert list(missed(state, [few, many])) == [
        f"{few.name}, search: its plan is not valid",
        f"{few.name}, commands, search: no such file",
        f"{many.name}, search: nothing fits",
        f"{many.name}, commands, check: refused",
        f"{many.name}: 62 seconds of search, not 61 at most",
        *(f"{many.name}: {what} are not known" for what in ("bytes of a plan", "bytes of memory")),
        *(f"{many.name}: seconds {what} are not known" for what in ("to a first plan", "of check", "of simulate")),
    ]
    made = {"memory_bytes": 1, "marks": {"made": 5.0}}
    on_time = {"search": {"seconds": 60.9} | made, "check": {"seconds": 5.0}, "simulate": {"seconds": 5.0}}
    (tmp_path / f"{many.stem}.commands.json").write_text(json.dumps({"limit_s": 60.0, "plan_bytes": 1} | on_time))
    (tmp_path / f"{many.stem}.search.json").write_text(json.dumps({"iteration_ns": 10**9, "valid": True}))
    assert list(missed(state, [many])) == []


@pytest.mark.parametrize("cells", [100, 1_189, 43_260, 89_132])
@pytest.mark.parametrize("part", [1.0, 0.9, 0.56, 0.2])
def test_one_in_fifty_of_all_refuted_cells_is_tried_however_few_are_short(cells: int, part: float) -> None:
    short = [number < part * cells for number in range(cells)]
    tried = _sampling(short, 0)
    count = sum(map(tried, range(1, sum(short) + 1)))
    assert abs(count - cells / SAMPLED) <= max(1, 0.03 * count)
    few = _sampling(short, 10)
    assert sum(map(few, range(1, sum(short) + 1))) <= max(11, sum(short) / SAMPLED)


def test_a_shorter_cell_is_missed_on_few_devices(tmp_path: Path) -> None:
    """As is a bound that does not hold."""
    state = State(tmp_path, 60.0)
    for part, found in (("search", {"iteration_ns": 2 * 10**9}), ("grid", {"best_ns": 10**9, "wrong": ["tp 1"]})):
        (tmp_path / f"{CASES[0].stem}.{part}.json").write_text(json.dumps(found))
    bound, cell = missed(state, CASES[:1])
    assert bound.endswith("bounds that do not hold: tp 1")
    assert cell.endswith("search: 2.000 s, and a cell of the grid 1.000 s")


@pytest.mark.parametrize(
    ("searched", "front_ns", "said"),
    [
        ({"iteration_ns": 2 * 10**9}, 10**9, ["2.000 s, and `frontier --plans` 1.000 s"]),
        ({"failed": "nothing fits"}, 10**9, ["nothing fits", "nothing, and `frontier --plans` 1.000 s"]),
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
