"""Plans whose stages kernel backends run: against brute force over cuts and backends, and the checker's own sums."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pipeplan
from builders.profiles import profile_of
from pipeplan.errors import FileError, UsageError
from pipeplan.files import BackendFusion, CostRow, PlacedStage, Placement, Plan, Profile, parse, write_file
from pipeplan.workload.elements import Segment
from support.commands import pipeplan as command
from support.marks import slow_but

pytestmark = pytest.mark.counted

MICROBATCHES = 3


def row(forward: int, backward: int, backend: str = "eager", **more: Any) -> CostRow:
    halves = {"input_grad_ns": backward // 2, "weight_grad_ns": backward - backward // 2} if backend == "eager" else {}
    whole = None if halves else backward
    sizes = {"activation_bytes": 8, "workspace_bytes": 3, **more}
    return CostRow(microbatch_size=1, backend=backend, forward_ns=forward, backward_ns=whole, **{**halves, **sizes})


def profile(draw: random.Random, num_blocks: int, change_ns: int = 0) -> Profile:
    """Blocks of about 100 + 200 ns, some of which ``fast`` runs alone, and some pairs at once."""
    plain = profile_of([row(draw.randint(80, 120), draw.randint(160, 240)) for _ in range(num_blocks)])
    blocks = [
        block.model_copy(update={"costs": (*block.costs, row(draw.randint(60, 110), draw.randint(130, 230), "fast"))})
        if draw.random() < 0.6
        else block
        for block in plain.blocks
    ]
    pairs = [(one.id, other.id) for one, other in itertools.pairwise(blocks) if draw.random() < 0.4]
    fusions = tuple(
        BackendFusion(blocks=pair, costs=(row(draw.randint(130, 210), draw.randint(280, 420), "fast"),))
        for pair in pairs
    )
    return plain.model_copy(update={"blocks": tuple(blocks), "fusions": fusions, "backend_change_ns": change_ns})


def segmentations(blocks: tuple[str, ...], known: Profile) -> list[tuple[Segment, ...]]:
    """Every way of running a stage's blocks by rows that there are; none is eager torch alone."""
    if not blocks:
        return [()]
    found = []
    rows = known.kernels.rows if known.kernels is not None else {}
    for size in (1, 2):
        if size > len(blocks):
            continue
        own = blocks[:size]
        names = ["eager"] * (size == 1) + ["fast"] * (own in rows)
        for name in names:
            found += [(Segment(blocks=own, backend=name), *rest) for rest in segmentations(blocks[size:], known)]
    return found


def best_of_all(known: Profile, devices: int) -> int:
    """The shortest iteration over all cuts and all segments of each stage, each by a search of its schedules."""
    ids = tuple(block.id for block in known.blocks)
    best = None
    for cuts in itertools.combinations(range(1, len(ids)), devices - 1):
        parts = [ids[a:b] for a, b in itertools.pairwise((0, *cuts, len(ids)))]
        ways = [segmentations(part, known) for part in parts]
        cheapest = []  # of those with a compiled segment only the least forward and backward can be the best
        for each in ways:
            eager = [way for way in each if all(s.backend == "eager" for s in way)]
            cheapest.append([(), *(way for way in each if way not in eager)])
        for chosen in itertools.product(*cheapest):
            stages = [
                PlacedStage(blocks=part, devices=(number,), segments=way)
                for number, (part, way) in enumerate(zip(parts, chosen, strict=True))
            ]
            placement = Placement(strategy="one-to-one", num_devices=devices, stages=tuple(stages))
            how: dict[str, Any] = {"placement": placement, "devices": devices, "microbatches": MICROBATCHES}
            found = pipeplan.search(known, **how, deterministic=True, time_limit=4).plan.predicted.iteration_ns
            best = found if best is None else min(best, found)
    assert best is not None
    return best


def test_a_search_weighs_backends_against_a_split_backward() -> None:
    """The last stage gives gradients sooner than by its slightly faster backend; the first has a cover."""
    plain = profile_of([row(100, 200)] * 2)
    much = plain.blocks[0].model_copy(update={"costs": (*plain.blocks[0].costs, row(60, 110, "fast"))})
    little = plain.blocks[1].model_copy(update={"costs": (*plain.blocks[1].costs, row(98, 198, "fast"))})
    known = plain.model_copy(update={"blocks": (much, little)})
    found = pipeplan.search(
        known, devices=2, pp=2, microbatches=4, placement="one-to-one", kernels="auto", time_limit=2, deterministic=True
    )
    assert [bool(stage.segments) for stage in found.plan.stages] == [True, False]
    kinds = {operation.id for operation in found.plan.operations}
    assert {"1I", "1W", "0B"} <= kinds
    assert not {"0I", "0W"} & kinds
    assert found.figures()["kernels"] == {"fast": 1}
    assert found.lower_bound_ns <= found.plan.predicted.iteration_ns
    assert pipeplan.check(found.plan, profile=known).valid


@slow_but("seed", range(6), lambda seed: seed == 0)
def test_small_searches_find_the_best_of_all(seed: int) -> None:
    draw = random.Random(seed)
    known = profile(draw, 4, change_ns=draw.choice((0, 7)))
    found = pipeplan.search(
        known, devices=2, pp=2, microbatches=MICROBATCHES, placement="one-to-one", kernels="auto", time_limit=20,
        deterministic=True,
    )  # fmt: skip
    assert found.plan.predicted.iteration_ns == best_of_all(known, 2)
    assert found.lower_bound_ns <= found.plan.predicted.iteration_ns
    assert pipeplan.check(found.plan, profile=known).valid


def segmented(tmp_path: Path) -> tuple[Profile, Plan]:
    """A plan with two backends in a stage, written with its profile."""
    known = profile(random.Random(3), 4, change_ns=5)
    ids = [block.id for block in known.blocks]
    alone = next(id_ for id_ in ids[1:3] if any(r.backend == "fast" for r in known.by_id[id_].costs))
    segments = tuple(Segment(blocks=(id_,), backend="fast" if id_ == alone else "eager") for id_ in ids[:3])
    stages = (
        PlacedStage(blocks=tuple(ids[:3]), devices=(0,), segments=segments),
        PlacedStage(blocks=tuple(ids[3:]), devices=(1,)),
    )
    placement = Placement(strategy="one-to-one", num_devices=2, stages=stages)
    plan = pipeplan.search(known, placement=placement, devices=2, microbatches=2, time_limit=3, deterministic=True).plan
    write_file(known, str(tmp_path / "profile.json"))
    pipeplan.write(plan, tmp_path / "plan.json")
    write_file(placement, str(tmp_path / "placement.json"))
    return known, plan


def test_the_checker_adds_up_segments_itself(tmp_path: Path) -> None:
    known, plan = segmented(tmp_path)
    assert parse((tmp_path / "plan.json").read_text(), Plan) == plan
    stage = plan.stages[0]
    rows = [next(r for r in known.by_id[s.blocks[0]].costs if r.backend == s.backend) for s in stage.segments]
    changes = sum(one.backend != other.backend for one, other in itertools.pairwise(stage.segments))
    times = {each.id: each.duration_ns for each in plan.operations}
    assert times["0F"] == sum(r.forward_ns for r in rows) + changes * known.backend_change_ns
    assert times["0B"] == sum(r.whole_backward_ns for r in rows)
    checked = command("check", "plan.json", "--profile", "profile.json", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "blocks by fast" in command("simulate", "plan.json", cwd=tmp_path).stdout
    slower = plan.model_copy(
        update={"operations": tuple(replace(o, duration_ns=o.duration_ns + 1) for o in plan.operations)}
    )
    said = [str(each) for each in pipeplan.check(slower, profile=known).problems]
    assert any("0F" in text and "the profile gives" in text for text in said)
    bare = known.model_copy(
        update={"fusions": (), "blocks": tuple(b.model_copy(update={"costs": b.costs[:1]}) for b in known.blocks)}
    )
    said = [str(each) for each in pipeplan.check(plan, profile=bare).problems]
    assert any("the plan was made from another" in text for text in said)
    assert any("no row of" in text and "'fast'" in text for text in said)


def test_segments_that_are_wrong_are_refused(tmp_path: Path) -> None:
    segmented(tmp_path)
    good = json.loads((tmp_path / "plan.json").read_text())
    assert "segments" not in good["stages"][1]
    first = good["stages"][0]["segments"]
    other = good["stages"][1]["blocks"][0]
    cases = [
        ([*first, {"blocks": [other], "backend": "fast"}], "a segment is of one stage"),
        (first[1:], "leave out block"),
        (first[::-1], "in its order"),
        ([{"blocks": [], "backend": "fast"}], "blocks"),
    ]
    for segments, said in cases:
        stage = {**good["stages"][0], "segments": segments}
        with pytest.raises(FileError, match=said):
            parse(json.dumps({**good, "stages": [stage, good["stages"][1]]}), Plan)
    for key, value in (("recompute", True), ("shards", 2)):
        placed = json.loads((tmp_path / "placement.json").read_text())
        stage = {**placed["stages"][0], key: value, "devices": [0, 2] if key == "shards" else [0]}
        changed = {**placed, "num_devices": 3, "stages": [stage, placed["stages"][1]]}
        with pytest.raises(FileError, match=f"it has {key}"):
            parse(json.dumps(changed), Placement)
    assert parse(json.dumps({**good, "stages": [{**good["stages"][0], "segments": []}, good["stages"][1]]}), Plan)


def test_kernels_that_are_not_there_are_said(tmp_path: Path) -> None:
    known, _ = segmented(tmp_path)
    how: dict[str, Any] = {"devices": 2, "microbatches": 2, "time_limit": 2}
    with pytest.raises(UsageError, match="no times of backend 'inductor'"):
        pipeplan.search(known, kernels="inductor", **how)
    with pytest.raises(UsageError, match="measure them with"):
        pipeplan.search(profile_of([row(1, 2)] * 2), kernels="auto", **how)
    cover = pipeplan.choose_kernels(known).file
    other = known.model_copy(update={"backend_change_ns": 99})
    with pytest.raises(UsageError, match="choose the cover anew"):
        pipeplan.search(other, kernels=cover, **how)
    with pytest.raises(UsageError, match="is not for for_"):
        pipeplan.search(known, kernels="auto", for_="megatron", **how)
    with pytest.raises(UsageError, match="were measured without"):
        pipeplan.search(known, kernels="auto", launch_overhead="1us", **how)


def test_a_cover_is_kept_to(tmp_path: Path) -> None:
    """No stage has a part of one of its groups, and each block has the cover's backend."""
    known = profile(random.Random(5), 6)
    pair = tuple(block.id for block in known.blocks[2:4])
    fusion = BackendFusion(blocks=pair, costs=(row(90, 150, "fast"),))
    known = known.model_copy(update={"fusions": (fusion,)})
    write_file(known, str(tmp_path / "profile.json"))
    made = command("kernels", "profile.json", "-o", "cover.json", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    searched = command(
        *("search", "profile.json", "--kernels", "cover.json", "--devices", "2", "--microbatches", "2"),
        *("--time-limit", "3s", "-o", "plan.json"),
        cwd=tmp_path,
    )
    assert searched.returncode == 0, searched.stderr
    plan = pipeplan.read_plan(tmp_path / "plan.json")
    assert any(pair == segment.blocks for stage in plan.stages for segment in stage.segments)
    of = {block: group.backend for group in pipeplan.choose_kernels(known).file.cover for block in group.blocks}
    for stage in plan.stages:
        ran = {block: s.backend for s in stage.segments for block in s.blocks} or dict.fromkeys(stage.blocks, "eager")
        assert ran == {block: of[block] for block in stage.blocks}
    assert plan.provenance.choices["kernels"] == "--kernels cover.json"
