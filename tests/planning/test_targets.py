"""Plans for tools: inside of what each can run, so that every one of them is exported; and what that costs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, pairwise, product
from typing import Any

import pytest

import pipeplan as face
from pipeplan import Block, Edge, InfeasibleError, Plan, Profile, UsageError
from pipeplan.catalog import export_target
from pipeplan.costs import build_workload
from pipeplan.files import CostRow, PlacedStage, Placement, TiedParameter
from pipeplan.planning.restrictions import search_targets
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.search import search_schedule
from support.commands import pipeplan
from support.marks import always, one_in, slow_but
from support.paths import ROOT

pytestmark = pytest.mark.counted

TARGETS = search_targets()
SERVERS = [name for name in TARGETS if not export_target(name).trains]


def layered(seed: int, layers: int, *, tied: bool = False, split: bool | None = None) -> Profile:
    """A model of layers in halves or whole, between an embedding and a norm and head, with times at random."""
    draw = random.Random(seed)
    split = draw.random() < 0.5 if split is None else split
    shards = draw.choice([(1,), (1, 2)])

    def block(name: str, operator: str = "ffn") -> Block:
        rows = []
        for each in shards:
            forward, other = draw.randint(1, 40) * 1000 // each, draw.randint(1, 40) * 1000 // each
            backward: dict[str, Any] = (
                {"input_grad_ns": forward, "weight_grad_ns": other} if split else {"backward_ns": 2 * forward}
            )
            sizes = {"activation_bytes": draw.randint(0, 60), "workspace_bytes": draw.randint(0, 9)}
            rows += [
                CostRow(microbatch_size=size, shards=each, forward_ns=size * forward, **backward, **sizes)
                for size in (1, 2)
            ]
        state = {"parameter_bytes": 40, "gradient_bytes": 40, "optimizer_bytes": 80}
        return Block(id=name, operator=operator, costs=tuple(rows), **state)

    parts = draw.choice([("",), (".attention", ".ffn")])
    blocks = [block("embedding", "embedding"), *(block(f"layer{n}{part}") for n in range(layers) for part in parts)]
    blocks += [block("norm"), block("head", "head")]
    edges = tuple(
        Edge(source=one.id, target=other.id, bytes_per_sample=draw.randint(0, 50)) for one, other in pairwise(blocks)
    )
    profile = Profile.of(f"layers-{seed}", blocks, edges=edges)
    table = TiedParameter(name="table", blocks=("embedding", "head"), parameter_bytes=30, gradient_bytes=30)
    return profile.model_copy(update={"tied": (table,)}) if tied else profile


def searched(profile: Profile, target: str, devices: int = 2, **asked: Any) -> face.Result:
    asked = {"time_limit": 0.05, "deterministic": True, "mini_batch": 4 * devices} | asked
    return face.search(profile, devices=devices, for_=target, **asked)


def random_request(draw: random.Random) -> tuple[Profile, dict[str, Any]]:
    profile = layered(draw.randint(0, 10**6), draw.randint(2, 5), tied=draw.random() < 0.3)
    asked: dict[str, Any] = {"devices": draw.choice([2, 2, 4])}
    if draw.random() < 0.5:
        asked["memory"] = draw.randint(2000, 6000)
    if draw.random() < 0.3:
        asked["pp"] = 2
    if draw.random() < 0.3:
        asked["cluster"] = face.example_cluster("cluster-h100", devices=asked["devices"])
    if draw.random() < 0.2:
        asked["keep_together"] = ["2"]
    if draw.random() < 0.2:
        asked["zero"] = "auto"
    return profile, asked


def require_inside(plan: Plan, profile: Profile, target: str) -> None:
    """The plan is exported, and one of the profile."""
    assert face.check(plan, profile=profile).valid
    assert {block for stage in plan.stages for block in stage.blocks} == {block.id for block in profile.blocks}
    face.export(plan, target)


@slow_but(
    "target, seed",
    [(target, seed) for target in TARGETS for seed in range(25)],
    lambda case: case[1] == 0 and case[0] != "galvatron",
    always,
)
def test_every_plan_for_a_target_is_exported(target: str, seed: int) -> None:
    draw = random.Random(f"{target} {seed}")
    profile, asked = random_request(draw)
    found, why = None, ""
    try:
        found = searched(profile, target, **asked)
    except (InfeasibleError, UsageError) as error:
        why = str(error)
    if found is None:  # memory is too small, or devices are more than groups of layers
        assert "fit" in why or "choose pp" in why or ("one pipeline" in why and target in SERVERS)
        return
    require_inside(found.plan, profile, target)
    assert found.cost is not None
    assert found.cost.bound_ns <= found.cost.own_ns
    assert any(export_target(target).title in note for note in found.notes)
    assert found.lower_bound_ns <= found.plan.predicted.iteration_ns


# The best of all -----------------------------------------------------------------------------------------------------


def cuts(groups: Sequence[Sequence[str]], stages: int) -> Iterator[list[list[str]]]:
    """Every way to cut groups into so many stages."""
    for borders in combinations(range(1, len(groups)), stages - 1):
        ends = [0, *borders, len(groups)]
        yield [[block for group in groups[a:b] for block in group] for a, b in pairwise(ends)]


def groups_by_hand(profile: Profile) -> list[list[str]]:
    """The embedding, each layer, and norm and head."""
    groups: dict[str, list[str]] = {}
    for block in profile.blocks:
        groups.setdefault("end" if block.id in ("norm", "head") else block.id.split(".")[0], []).append(block.id)
    return list(groups.values())


@one_in(3, "seed", range(3), first=2)
def test_of_few_layers_the_plan_is_the_best_there_is(seed: int) -> None:
    """Every cut of whole layers, and 1F1B on each."""
    profile = layered(seed, 3, split=False)
    asked: dict[str, Any] = {"microbatch_size": 2, "microbatches": 4, "tp": 1, "time_limit": 0.3, "deterministic": True}
    found = searched(profile, "deepspeed", 3, pp=3, mini_batch=None, **asked).plan
    best = min(
        face.search(
            profile,
            placement=face.Placement.of(each),
            scheduler="1f1b",
            recompute=False,
            microbatch_size=2,
            microbatches=4,
        ).plan.predicted.iteration_ns
        for each in cuts(groups_by_hand(profile), 3)
    )
    assert found.predicted.iteration_ns == best


@pytest.mark.parametrize("seed", range(5))
def test_the_busiest_stage_of_a_server_is_as_quick_as_any(seed: int) -> None:
    profile = layered(seed, 5)
    found = searched(profile, "vllm", 3, tp=1, microbatch_size=1)
    times = {block.id: next(row.forward_ns for row in block.costs if row.shards == 1) for block in profile.blocks}
    layers = groups_by_hand(profile)[1:-1]
    layers[0] = ["embedding", *layers[0]]
    layers[-1] = [*layers[-1], "norm", "head"]
    best = min(max(sum(times[block] for block in stage) for stage in each) for each in cuts(layers, 3))
    assert max(sum(times[block] for block in stage.blocks) for stage in found.plan.stages) == best
    assert found.cost is not None
    assert (found.cost.measure, found.cost.own_ns) == ("busiest stage", best)
    assert found.cost.free_ns is not None
    assert found.cost.bound_ns <= found.cost.free_ns <= best


def test_a_server_s_stages_fit_into_memory() -> None:
    profile = layered(3, 6)
    most = [160 * len(stage.blocks) for stage in searched(profile, "vllm", 2, tp=1).plan.stages]
    tight = searched(profile, "vllm", 2, tp=1, memory=sum(most) // 2 + 600).plan
    assert max(memory.peak_bytes for memory in tight.predicted.memory) <= sum(most) // 2 + 600
    with pytest.raises(InfeasibleError, match="no cut into whole layers fits"):
        searched(profile, "vllm", 2, memory=500)


def holding(profile: Profile, activation_bytes: int) -> Profile:
    """The profile whose blocks hold so much of each sample between forward and backward."""

    def held(row: CostRow) -> CostRow:
        sizes = {"activation_bytes": activation_bytes * row.microbatch_size, "workspace_bytes": 0}
        return row.model_copy(update=sizes)

    blocks = (block.model_copy(update={"costs": tuple(map(held, block.costs))}) for block in profile.blocks)
    return profile.model_copy(update={"blocks": tuple(blocks)})


@pytest.mark.parametrize("together", [1, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.long])])
def test_megatron_recomputes_the_first_layers_that_it_must(together: int) -> None:
    """Also where several are kept together, of which none recomputes alone."""
    profile = holding(layered(5, 6 * together, split=False), 400)
    asked: dict[str, Any] = {"pp": 2, "placement": "one-to-one", "microbatch_size": 1, "mini_batch": None, "tp": 1}
    asked["keep_together"] = str(together)
    free, again = (searched(profile, "megatron", recompute=each, **asked).plan for each in ("none", "all"))
    most, least = (max(memory.peak_bytes for memory in plan.predicted.memory) for plan in (free, again))
    assert least < most
    memory = (least + most) // 2
    found = searched(profile, "megatron", memory=memory, **asked).plan
    assert max(each.peak_bytes for each in found.predicted.memory) <= memory
    assert free.predicted.iteration_ns < found.predicted.iteration_ns < again.predicted.iteration_ns
    first = face.export(found, "megatron").text.split("--recompute-num-layers ")
    assert "--recompute-method block" in first[0]
    assert int(first[1].split()[0]) % together == 0


@dataclass(frozen=True)
class Cell:
    """A uniform layout that Megatron-LM runs: sizes, ZeRO, samples of a micro-batch, first layers that recompute."""

    tp: int
    dp: int
    pp: int
    vp: int
    zero: int
    size: int
    first: int


def cells(profile: Profile, devices: int, mini_batch: int) -> Iterator[Cell]:
    """Every one of them."""
    layers, shards = len(groups_by_hand(profile)) - 2, sorted({row.shards for row in profile.blocks[0].costs})
    powers = [1 << n for n in range(devices.bit_length())]
    for tp, dp, pp, vp, zero, size in product(shards, powers, powers, (1, 2, 3), (0, 1), (1, 2)):
        count, rest = divmod(mini_batch, size * dp)
        turns = vp == 1 or (pp > 1 and count % pp == 0)
        if tp * dp * pp == devices and not rest and turns and pp * vp <= layers and (dp > 1 or not zero):
            for first in range(-(-layers // (pp * vp)) + 1):
                yield Cell(tp, dp, pp, vp, zero, size, first)


def found_of(profile: Profile, cell: Cell, mini_batch: int) -> tuple[int, int]:
    """Its iteration in ns and the bytes of its fullest device, with as many layers on every stage, or one more."""
    start, *layers, end = groups_by_hand(profile)
    stages, each = cell.pp * cell.vp, cell.tp * cell.dp
    counts = [len(layers) // stages + (number < len(layers) % stages) for number in range(stages)]
    placed, rows = list[PlacedStage](), iter(layers)
    for number, count in enumerate(counts):
        own = [next(rows) for _ in range(count)]
        blocks = (*(start if number == 0 else ()), *chain.from_iterable(own), *(end if number == stages - 1 else ()))
        again = {block for layer in own[: cell.first] for block in layer}
        place = number % cell.pp * each
        placed.append(
            PlacedStage(
                blocks=blocks,
                devices=tuple(range(place, place + each)),
                shards=cell.tp,
                replicas=cell.dp,
                zero=cell.zero,
                recompute=tuple(block in again for block in blocks),
            )
        )
    strategy, scheduler = ("one-to-one", "1f1b") if cell.vp == 1 else ("circular", "interleaved-1f1b")
    placement = Placement(strategy=strategy, num_devices=cell.pp * each, stages=tuple(placed))
    size = cell.size * cell.dp
    workload = build_workload(profile, placement, num_microbatches=mini_batch // size, microbatch_size=size)
    found = search_schedule(workload, Budget(1.0, deterministic=True), scheduler=scheduler)
    return found.iteration_ns, found.most_bytes


@slow_but("seed", range(12), lambda _: False, (1).__ne__)
def test_no_uniform_layout_that_megatron_runs_is_quicker(seed: int) -> None:
    """Neither with everything kept nor with any number of first layers that recompute on each stage."""
    draw = random.Random(seed)
    profile = holding(layered(20 + seed, draw.randint(4, 6), split=False), draw.randint(100, 400))
    pp = draw.choice([None, 2, 2, 4])
    every = {cell: found_of(profile, cell, 8) for cell in cells(profile, 4, 8) if pp in (None, cell.pp)}
    peaks = sorted(peak for _, peak in every.values())
    memory = peaks[len(peaks) // draw.randint(3, 9)]
    best = min(ns for ns, peak in every.values() if peak <= memory)
    found = searched(profile, "megatron", 4, mini_batch=8, memory=memory, pp=pp, time_limit=1.0, deterministic=True)
    assert found.plan.predicted.iteration_ns <= best
    require_inside(found.plan, profile, "megatron")


# What is kept together -----------------------------------------------------------------------------------------------


def stages_of(plan: Plan) -> list[set[str]]:
    return [set(stage.blocks) for stage in plan.stages]


def test_blocks_are_kept_together_as_the_profile_or_a_flag_says() -> None:
    profile = layered(4, 6)
    together = ("layer1", "layer2") if "layer1" in profile.by_id else ("layer1.ffn", "layer2.attention")
    said = profile.model_copy(update={"keep_together": (together,)})
    asked: dict[str, Any] = {"devices": 3, "pp": 3, "mini_batch": 12, "time_limit": 0.05, "deterministic": True}
    for plan in (
        face.search(said, **asked).plan,
        face.search(profile, keep_together=",".join(together), **asked).plan,
        face.search(said, for_="megatron", **asked).plan,
        face.search(said, for_="vllm", tp=1, **asked).plan,
    ):
        assert face.check(plan, profile=profile).valid or face.check(plan, profile=said).valid
        assert all(set(together) <= own or not set(together) & own for own in stages_of(plan))
    layers = face.search(profile, keep_together="3", **asked).plan
    for first in (0, 3):
        own = {
            block.id
            for block in profile.blocks
            if block.id.split(".")[0] in [f"layer{n}" for n in range(first, first + 3)]
        }
        assert any(own <= stage for stage in stages_of(layers))


def test_groups_that_are_none_are_refused() -> None:
    profile = layered(4, 2)
    for text, said in (("nothing", "no block is called 'nothing'"), ("head", "is one block"), ("norm,x*", "'x\\*'")):
        with pytest.raises(UsageError, match=said):
            face.search(profile, devices=2, keep_together=text)
    with pytest.raises(ValueError, match=r"keep_together\[0\] names 'x', which is not a block"):
        Profile.model_validate(profile.model_dump() | {"keep_together": [["head", "x"]]}, strict=False)
    placed = face.Placement.of([["embedding"], [block.id for block in profile.blocks[1:]]])
    with pytest.raises(UsageError, match="are to be kept together"):
        face.search(profile, placement=placed, keep_together="embedding,head")
    with pytest.raises(UsageError, match="keep what stands between them with them"):
        face.search(profile, devices=2, keep_together="embedding,head")


def test_frontiers_of_plans_keep_together_what_a_search_does() -> None:
    kept = layered(4, 2).model_copy(update={"keep_together": (("norm", "head"),)})
    how: dict[str, Any] = {"devices": 2, "mini_batch": 4, "deterministic": True, "time_limit": 0.3}
    found, points = face.search(kept, **how).plan, face.frontier(kept, plans=True, **how)
    plans = [points.plan(number) for number in range(1, len(points.points) + 1)]
    assert min(plan.predicted.iteration_ns for plan in plans) == found.predicted.iteration_ns
    for plan, point in zip(plans, points.points, strict=True):
        assert (plan.predicted.iteration_ns, plan.num_devices) == (point.time_ns, 2)
        assert any({"norm", "head"} <= set(stage.blocks) for stage in plan.stages)
        assert face.check(plan, profile=kept).valid


# From what there is --------------------------------------------------------------------------------------------------


@slow_but(
    "target, seed",
    [(target, seed) for target in TARGETS for seed in range(8)],
    lambda case: case[1] == 0 and case[0] not in ("automodel", "torchtitan"),
    always,
)
def test_a_plan_to_start_from_is_never_worse_within_a_tool_s_limits(target: str, seed: int) -> None:
    """With hardly any time, from a plan for which there was more: it comes back, or something shorter does."""
    draw = random.Random(f"{target} {seed} start")
    profile, asked = random_request(draw)
    try:
        start = searched(profile, target, **asked, time_limit=0.2, deterministic=True).plan
    except (InfeasibleError, UsageError):
        return
    mini_batch = {"mini_batch": start.mini_batch, "time_limit": 0.001}
    found = searched(profile, target, start=start, **(asked | mini_batch))
    require_inside(found.plan, profile, target)
    said = [note for note in found.notes if "the plan of --start" in note]
    if target in SERVERS:  # the cut is the best there is in any case
        assert found.start_ns is None
        assert [note.split(" takes ")[1].split(" that ")[0] for note in said] == ["as much as"]
        return
    assert found.start_ns == start.predicted.iteration_ns
    assert found.plan.predicted.iteration_ns <= found.start_ns
    assert len(said) == 1


def today(profile: Profile, counts: Sequence[int]) -> Plan:
    """As a team may run it: stages of so many groups, and 1F1B."""
    groups, stages = groups_by_hand(profile), list[list[str]]()
    for count in counts:
        stages.append([block for group in groups[:count] for block in group])
        groups = groups[count:]
    return face.search(profile, placement=face.Placement.of(stages), scheduler="1f1b", mini_batch=8, zero=0).plan


def test_what_a_team_runs_today_is_improved_within_its_tool_s_limits() -> None:
    profile = layered(3, 6)
    uneven = today(profile, (2, 6))
    found = face.search(profile, for_="megatron", start=uneven, deterministic=True, time_limit=0.3)
    assert found.plan.mini_batch == 8
    assert len(found.plan.devices) == 2
    assert found.start_ns == uneven.predicted.iteration_ns
    assert found.plan.predicted.iteration_ns < found.start_ns
    require_inside(found.plan, profile, "megatron")
    assert any("shorter than the plan of --start, which takes" in note for note in found.notes)
    served = searched(profile, "vllm", start=uneven, mini_batch=8, tp=1, microbatch_size=uneven.microbatch_size)
    assert any("% less than that of the plan of --start" in note for note in served.notes)


def test_what_the_tool_does_not_run_is_no_start() -> None:
    profile = layered(3, 6)
    whole = today(profile, (2, 6))
    first = [[*whole.stages[0].blocks, whole.stages[1].blocks[0]], [*whole.stages[1].blocks[1:]]]
    cut = face.search(profile, placement=face.Placement.of(first), mini_batch=8).plan
    inside = len(profile.blocks) > 10  # layers in halves
    assert inside
    with pytest.raises(
        UsageError, match=r"start: stages\[0\] has block '.*attention' and not '.*ffn', which are to be"
    ):
        searched(profile, "megatron", start=cut, mini_batch=8)
    gpipe = face.search(profile, placement=whole.placed, scheduler="gpipe", mini_batch=8).plan
    with pytest.raises(UsageError, match=r"start: .*; start from a plan that megatron runs, or leave out start"):
        searched(profile, "megatron", start=gpipe, mini_batch=8)


def test_a_plan_to_start_from_keeps_blocks_together() -> None:
    """Without a tool, too."""
    profile = layered(3, 6)
    start = today(profile, (3, 5))
    asked: dict[str, Any] = {"devices": 2, "start": start, "mini_batch": 8, "deterministic": True, "time_limit": 0.001}
    found = face.search(profile, keep_together="norm,head", **asked)
    assert found.start_ns == start.predicted.iteration_ns >= found.plan.predicted.iteration_ns
    assert face.check(found.plan, profile=profile).valid
    with pytest.raises(UsageError, match="which are to be kept together"):
        face.search(profile, keep_together=["layer1*,layer2*"], **asked)


@one_in(2, "target", ["torchtitan", "automodel"])
def test_tools_that_run_any_order_run_those_of_rules(target: str) -> None:
    profile = layered(1, 4)
    asked: dict[str, Any] = {"placement": "one-to-one", "pp": 2, "tp": 1, "microbatches": 4, "mini_batch": None}
    found = searched(profile, target, rules="gpipe", **asked)
    require_inside(found.plan, profile, target)
    named = searched(profile, target, scheduler="gpipe", **asked).plan
    assert found.plan.predicted.iteration_ns == named.predicted.iteration_ns
    assert "rules" in found.plan.provenance.scheduler


# What is refused -----------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("nothing", {}, "there is no such target; choose from"),
    ("torch", {}, "there is no such target"),
    ("vllm", {"placement": "circular"}, "vLLM places stages one-to-one"),
    (
        "megatron",
        {"zero": 3},
        "for Megatron-LM .for_.: zero=3, and Megatron-LM's pipeline shards .*; give one of zero=0, 1",
    ),
    ("deepspeed", {"recompute": "selective"}, "does not recompute so"),
    ("galvatron", {"split_backward": True}, "runs whole backwards"),
    ("torchtitan", {"slices": 2}, "runs micro-batches whole"),
    ("torchtitan", {"late_inputs": True}, "waits for all inputs"),
    ("automodel", {"chunks": 4, "placement": "v-shape"}, "has 2 stages on each rank"),
    ("megatron", {"scheduler": "gpipe"}, "runs 1f1b or interleaved-1f1b, not gpipe"),
    ("megatron", {"placement": "circular", "scheduler": "1f1b"}, "does not run 1f1b with placement='circular'"),
    ("torchtitan", {"planner": "dapple"}, "our own planner alone"),
    ("sglang", {"replicas": 2}, "is one pipeline"),
    ("deepspeed", {"pp": 8, "devices": 8}, "whole layers are 5; choose pp of at most 5"),
    ("vllm", {"devices": 16, "tp": 1}, "are not one pipeline of whole layers for vLLM: 3 can stand apart"),
    ("megatron", {"rules": "1f1b"}, "Megatron-LM has orders of its own; leave rules out"),
    ("torchtitan", {"scheduler": "rules"}, "tunes rules, and may place stages as torchtitan does not; give rules"),
    ("vllm", {"rules": "1f1b"}, "vLLM has orders of its own"),
]


@pytest.mark.parametrize(("target", "asked", "said"), REFUSED)
def test_what_a_target_does_not_run_is_refused(target: str, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        searched(layered(1, 3), target, **{"devices": 2, **asked})


def test_models_that_are_no_row_of_layers_are_refused() -> None:
    for name, said in (("tessel-k", "no block says which layer"), ("mmt-v100-16gb", "places one row of layers")):
        with pytest.raises(UsageError, match=said):
            searched(face.read_profile(ROOT / f"profiles/{name}.json"), "megatron", 4)
    profile = layered(1, 4)
    skip = Edge(source="embedding", target="norm", bytes_per_sample=1)
    skipping = profile.model_copy(update={"edges": (*profile.edges, skip)})
    with pytest.raises(UsageError, match=r"'embedding' feeds 'norm.*', which does not come next.*keep_together"):
        searched(skipping, "torchtitan")
    require_inside(searched(skipping, "megatron").plan, skipping, "megatron")


def test_the_command_line_says_what_it_costs(tmp_path: Any) -> None:
    path = tmp_path / "plan.json"
    profile = ROOT / "profiles/gpt2-124m-cpu.json"
    done = pipeplan("search", profile, "--devices", "2", "--pp", "2", "--for", "vllm", "--time-limit", "1s", "-o", path)
    assert done.returncode == 0
    assert "the busiest stage's forward" in " ".join(done.stdout.split())
    assert pipeplan("export", path, "--to", "vllm").stdout.startswith("VLLM_PP_LAYER_PARTITION=")
    done = pipeplan("compare", profile, "--devices", "2", "--for", "vllm")
    assert done.returncode == 2
    assert "--for" in done.stderr
