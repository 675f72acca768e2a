"""Devices that share sequences or experts of single blocks: configurations like all others, against all strategies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pipeplan.checker import check
from pipeplan.files import Block, Cluster, CostRow, Edge, Plan, Profile, Recipe, Source, parse, to_json
from pipeplan.planning.request import Batch, Request, Splitting
from pipeplan.planning.sharding_frontier import Splits, split_frontier
from pipeplan.planning.steps import search_plan
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.training.compatibility import require_splittable
from pipeplan.sharding.baselines import ONLY
from pipeplan.sharding.cost_model import CostOptions, cost_model
from pipeplan.sharding.operators import Configuration
from pipeplan.workload.mesh import Mesh

SAMPLES, EACH = 8, 1000
"""Of the micro-batch, and bytes of one between blocks."""

LINKS = Cluster.of("links", 2, levels=[("node", 2, 0, 10**9)])
"""A byte takes a nanosecond."""


def block(name: str, work: int, parameters: int, experts: int = 0, *, counts: tuple[int, ...] = (1, 2, 4)) -> Block:
    """Some ns for a sample: places divide them, shards less so, experts take a tenth more; 100 and 7 bytes are held."""

    def row(samples: int, **sizes: int) -> CostRow:
        parts = sizes.get("shards", 1) * sizes.get("context", 1)
        more = {"shards": 20, "expert": 10, "context": -5}  # in percent; some kernels like short sequences
        spent = samples * work // parts + sum(samples * work * more[axis] // 100 for axis in sizes)
        held = {"activation_bytes": 100 * samples // parts, "workspace_bytes": 7 * samples}
        return CostRow(microbatch_size=samples, forward_ns=spent, backward_ns=2 * spent, **held, **sizes)

    every = [{}, *({axis: n} for axis in ("shards", "context") for n in counts if n > 1)]
    every += [{"expert": n} for n in counts if n > 1 and experts]
    costs = tuple(row(samples, **sizes) for sizes in every for samples in (1, 2, 4, 8))
    numbers = {"parameters": parameters, "expert_parameters": experts}
    return Block(id=name, operator="layer", dimensions={"heads": 4}, costs=costs, **numbers)


def profile() -> Profile:
    """Attention, experts and a last block that nothing but samples split."""
    blocks = (block("mixing", 9000, 500), block("experts", 7000, 4000, 3600), block("last", 3000, 60, counts=(1,)))
    edges = tuple(
        Edge(source=source, target=target, bytes_per_sample=EACH)
        for source, target in itertools.pairwise(each.id for each in blocks)
    )
    source = Source(method="estimated", device="v100-16gb", dtype="float32")
    return Profile(name="three", source=source, blocks=blocks, edges=edges, recipe=Recipe(name="fp32"))


def found(cluster: Cluster | None = None, only: str | None = None, *, whole: bool = True) -> Splits:
    """On two devices."""
    return split_frontier(request_of(cluster), Splitting(device="v100-16gb", only=only, whole_blocks=whole))


def request_of(cluster: Cluster | None) -> Request:
    return Request(profile(), 2, Batch(1, SAMPLES), cluster=cluster)


# Every strategy of two devices, without anything of ours: what lies where, and what has to be moved.

KEPT = {"samples2": "samples", "places2": "places", "experts2": "samples", "shards2": "", "copies2": ""}
"""What tensors of a block are split by, by its configuration."""


def moved(before: str, after: str) -> int:
    """Ns for what another block gives and this one takes: gathered, dropped at no cost, or exchanged."""
    whole = SAMPLES * EACH
    if before == after or not before:
        return 0
    return whole // 2 if not after else whole // 4


def by_hand(chosen: tuple[str, ...], links: bool) -> tuple[int, int, int]:
    """Bytes, workspace and ns of a strategy."""
    memory, workspace, time = 0, 0, 0
    for each, way in zip(profile().blocks, chosen, strict=True):
        apart = each.expert_parameters if way == "experts2" else 0
        dense = -(-(each.parameters - apart) // (2 if way == "shards2" else 1))
        row = next(
            row
            for row in each.costs
            if row.microbatch_size == (SAMPLES // 2 if KEPT[way] == "samples" else SAMPLES)
            and (row.shards, row.context, row.expert)
            == tuple(2 if way == name else 1 for name in ("shards2", "places2", "experts2"))
        )
        assert row.backward_ns is not None
        memory += 16 * (dense + apart // 2) + row.activation_bytes
        workspace = max(workspace, row.workspace_bytes)
        time += row.forward_ns + row.backward_ns
        if links and KEPT[way]:  # gradients are summed by both, but for experts' own
            time += 4 * dense
    if links:
        for before, after in itertools.pairwise(KEPT[way] for way in chosen):
            time += moved(before, after) + moved(after, before)  # and gradients come back
    return memory, workspace, time


def unbeaten(every: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    kept: list[tuple[int, int]] = []
    for memory, time in sorted(every):
        if not kept or time < kept[-1][1]:
            kept.append((memory, time))
    return kept


@pytest.mark.parametrize("links", [False, True])
def test_the_frontier_is_that_of_every_strategy(links: bool) -> None:
    rest = ["samples2", "copies2"]
    ways = [[*rest, "places2", "shards2"], [*rest, "places2", "shards2", "experts2"], rest]
    costs = {chosen: by_hand(chosen, links) for chosen in itertools.product(*ways)}
    expected = unbeaten((memory + workspace, time) for memory, workspace, time in costs.values())
    splits = found(LINKS if links else None)
    assert [(point.memory_bytes, point.time_ns) for point in splits.points] == expected
    assert splits.exact
    names = {name: {way.name for way in ways} for name, ways in splits.model.configurations.items()}
    assert [names[each.id] for each in profile().blocks] == list(map(set, ways))
    chosen = {way for point in splits.points for way in names_of(splits, point.strategy.configurations)}
    assert {"places2", "experts2"} <= chosen, "something is gained by both"


def names_of(splits: Splits, chosen: dict[str, int]) -> list[str]:
    return [splits.model.configurations[name][index].name for name, index in chosen.items()]


def test_experts_lie_beside_samples_and_nothing_else() -> None:
    """Devices that share experts have samples of their own: with others that split samples they are one split."""
    model = cost_model(profile(), None, 8, SAMPLES, device="v100-16gb", options=CostOptions(blocks=True))
    ways = {way.name: way for way in model.configurations["experts"] if "experts" in way.name}
    expected = {"experts2-samples4", "samples4-experts2", "experts4-samples2", "samples2-experts4"}
    expected |= {"experts2-samples2-copies2", "samples2-experts2-copies2"}
    expected |= {"copies2-experts2-samples2", "copies2-samples2-experts2", "copies2-experts4", "experts4-copies2"}
    expected |= {"copies4-experts2", "copies2-experts2-copies2", "experts2-copies4"}
    assert ways.keys() == expected, "eight devices cannot share them, nor may copies stand between"

    def samples_of(way: Configuration) -> int:
        assert way.output == way.taken(0)
        return way.output.shards

    for name, way in ways.items():
        parts = Mesh.parse(name)
        assert samples_of(way) == parts.size_of("experts") * parts.size_of("samples")
        assert way.expert_bytes == 4 * 3600 // parts.size_of("experts")
        assert way.gradient_bytes == 4 * 400 + way.expert_bytes


@pytest.mark.parametrize("only", [each for each in ONLY if each != "tofu"])  # which cannot split the last
@pytest.mark.parametrize("whole", [True, False])
def test_planners_that_restrict_themselves_find_no_better(only: str, whole: bool) -> None:
    """Data parallelism shares neither; one mesh for all takes both."""
    free, own = found(LINKS, whole=whole), found(LINKS, only, whole=whole)
    costs = list(zip(free.tracked.memory_bytes.tolist(), free.tracked.time_ns.tolist(), strict=True))
    for point in own.points:
        assert any(
            memory <= point.memory_bytes - point.workspace_bytes and time <= point.time_ns for memory, time in costs
        )


LIKE_IT = ("layer0.attention", "layer0.experts", "head")
"""Blocks of a model that are as those of the profile."""


def test_plans_of_them_are_checked_and_run() -> None:
    splits = found(LINKS)
    shared = [
        (index, names)
        for index, point in enumerate(splits.points)
        if {"places2", "experts2"} & set(names := names_of(splits, dict(point.strategy.configurations)))
    ]
    assert shared
    for index, names in shared:
        plan = splits.plan(request_of(LINKS), index)
        assert plan.stages[0].configurations == tuple(names)
        point = splits.points[index]
        assert plan.predicted.iteration_ns == point.time_ns
        assert max(each.peak_bytes for each in plan.predicted.memory) == point.memory_bytes
        check(parse(to_json(plan), Plan), profile(), LINKS).require("plan")
        for key, more in (("sync_ns", 1), ("optimizer_bytes", 8)):
            stage = replace(plan.stages[0], **{key: getattr(plan.stages[0], key) + more})
            assert not check(plan.model_copy(update={"stages": (stage,)}), profile(), LINKS).valid
        run = plan.model_copy(update={"stages": (replace(plan.stages[0], blocks=LIKE_IT),)})
        require_splittable(run, load_model("gpt2-experts-tiny"))


@pytest.mark.parametrize(
    ("asked", "ways"), [({}, ("places2", "experts2", "samples2")), ({"context": 1, "expert": 1}, ())]
)
def test_a_search_takes_them(asked: dict[str, int], ways: tuple[str, ...]) -> None:
    """Where links are slow, and places are split in half of the time; none where they are not asked for."""
    links = Cluster.of("slow", 2, levels=[("node", 2, 0, 10**8)])

    def quick(row: CostRow) -> CostRow:
        halves = {"forward_ns": row.forward_ns // 2, "backward_ns": (row.backward_ns or 0) // 2}
        return row.model_copy(update=halves) if row.context > 1 else row

    blocks = (each.model_copy(update={"costs": tuple(map(quick, each.costs))}) for each in profile().blocks)
    quicker = profile().model_copy(update={"blocks": tuple(blocks)})
    request = replace(request_of(links), profile=quicker, deterministic=True, **asked)
    plan = search_plan(request).plan
    check(plan, quicker, links).require("plan")
    assert [stage.configurations for stage in plan.stages] == [ways]
