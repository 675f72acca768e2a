"""Plans in other tools' words: counts by rules written down here again; or refused, with the place in the plan."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

import pipeplan as face
from builders.chains import chain_plan, chain_profile, chain_workload
from builders.orders import Orders
from builders.plans import plan_of
from pipeplan import Plan, UsageError
from pipeplan.catalog import export_target, names
from pipeplan.interop.export import export_targets
from pipeplan.interop.megatron import layout_text, order, read_layout, require_layout
from pipeplan.interop.settings import megatron_sizes, torchtitan_settings
from support.commands import pipeplan
from support.marks import always, slow_but
from support.paths import ROOT

LISTS = {"vllm": "VLLM_PP_LAYER_PARTITION={}", "sglang": "SGLANG_PP_LAYER_PARTITION={}"}

VECTORS = {
    "Et*4|(t*4|)*14tmL": (16, 61, 1),
    "Et|(tt|)*30mL": (32, 61, 1),
    "Et*3|(tt|)*29m|L": (32, 61, 1),
    "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL": (40, 80, 0),
}
"""Layouts of Megatron-Bridge's recipes: stages, layers, layers of multi-token prediction."""


def megatron_plan(positions: int, chunks: int, microbatches: int, *, split: bool = False) -> Plan:
    """A plan in Megatron-LM's order, by hand; its blocks are no layers yet."""
    devices = [[stage % positions] for stage in range(positions * chunks)]
    workload = chain_workload(positions, microbatches, devices=devices)
    orders: Orders = [
        [(f"{stage}{kind}", m) for kind, stage, m in order(positions, chunks, microbatches, positions, rank)]
        for rank in range(positions)
    ]
    return plan_of(workload, orders)


@cache
def base(positions: int, chunks: int, microbatches: int) -> Plan:
    if chunks == 1:
        return chain_plan(positions, microbatches)
    return megatron_plan(positions, chunks, microbatches)


def with_blocks(plan: Plan, blocks: Sequence[Sequence[str]], **changes: Any) -> Plan:
    """The plan, whose stages have other blocks and other sizes."""
    stages = tuple(replace(stage, blocks=tuple(own), **changes) for stage, own in zip(plan.stages, blocks, strict=True))
    return plan.model_copy(update={"stages": stages})


def layered(plan: Plan, counts: Sequence[int], *, halves: bool = False, name: str = "layer{}") -> Plan:
    """The plan with so many layers in each stage, between an embedding and a head."""
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    blocks: list[list[str]] = []
    for start, count in zip(starts, counts, strict=True):
        layers = [name.format(layer) for layer in range(start, start + count)]
        blocks.append([f"{layer}.{part}" for layer in layers for part in ("attention", "ffn")] if halves else layers)
    blocks[0].insert(0, "embedding")
    blocks[-1].append("head")
    return with_blocks(plan, blocks)


# Megatron-LM -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "sizes"), VECTORS.items())
def test_known_layouts_round_trip(text: str, sizes: tuple[int, int, int]) -> None:
    stages, layers, predicting = sizes
    layout = read_layout(text)
    letters = "".join(layout)
    assert (len(layout), letters.count("t"), letters.count("m")) == (stages, layers, predicting)
    assert read_layout(layout_text(layout)) == layout
    require_layout(layout, 8, layers)


def test_letters_groups_commas_and_empty_stages() -> None:
    assert read_layout("E||t|L") == ("E", "", "t", "L")
    assert read_layout("E,t*3|(t|t*2)*2L") == ("Ettt", "t", "ttt", "ttL")
    assert read_layout("E|*3tL") == ("E", "", "", "tL")


@pytest.mark.parametrize(
    ("text", "positions", "said"),
    [
        ("Ex|tL", 2, "stage 0 has 'x'"),
        ("E(t|)L", 2, "stage 0 has '\\('"),
        ("E(t)*2*2L", 1, "has 3 layers"),  # as Megatron-LM reads it: the group, then the letter before the second
        ("Et|t|tL", 2, "3 stages cannot be shared by 2"),
        ("tE|tL", 2, "begins with the one E"),
        ("EE|tL", 2, "begins with the one E"),
        ("Et|Lt", 2, "ends with the one L"),
        ("Emt|L", 2, "a t stands after an m"),
        ("Et|m|m|L", 2, "m is in stages 1 and 2"),
        ("Et|m|t*0|L", 2, "not the last stage of its rank"),
        ("E(t|)*99999999L", 2, "more than 1000000 letters"),
        (f"E(t|)*{5000 * '0'}9999999L", 2, "more than 1000000 letters"),
        ("[['embedding'] * 1000] * 1001", 2, "more than 1000000 letters"),
        ("[['embedding', ['decoder']], ['loss']]", 2, r"\['decoder'\] is none of"),
    ],
)
def test_layouts_that_are_none(text: str, positions: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        require_layout(read_layout(text), positions, None if "layers" not in said else 99)


def test_orders_are_those_of_the_classic_schedules() -> None:
    """1F1B, and interleaved 1F1B with as many micro-batches in a group as ranks, found by rules for another purpose."""
    for chunks, scheduler in ((1, "1f1b"), (2, "interleaved-1f1b")):
        profile = face.example("shape-circular", devices=3, chunks=chunks)
        placement = "circular" if chunks > 1 else "one-to-one"
        plan = face.search(profile, placement=placement, scheduler=scheduler, microbatches=6, recompute=False).plan
        for rank in range(3):
            words = [text for text in plan.whole_programs[rank] if "_" not in text]
            assert words == [f"{stage}{kind}{m}" for kind, stage, m in order(3, chunks, 6, 3, rank)]


@slow_but("seed", [28, 29], (28).__eq__, always)
def test_layouts_of_random_plans_count_right(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(500):
        positions, chunks = draw.randint(1, 4), draw.randint(1, 3)
        chunks = chunks if positions > 1 else 1
        counts = [draw.randint(1, 5) for _ in range(positions * chunks)]
        if len(counts) > 1:
            counts[0], counts[-1] = draw.randint(0, 3), draw.randint(0, 3)
        counts[0] += not sum(counts)
        plan = layered(base(positions, chunks, 2 * positions), counts, halves=draw.random() < 0.5)
        line, *flags = face.export(plan, "megatron").text.splitlines()
        stages = read_layout(line)
        assert [stage.count("t") for stage in stages] == counts
        assert [stage.count("E") for stage in stages] == [1] + [0] * (len(counts) - 1)
        assert [stage.count("L") for stage in stages] == [0] * (len(counts) - 1) + [1]
        said = dict(flag.split(" ", 1) for flag in flags if " " in flag)
        assert said["--num-layers"] == str(sum(counts))
        assert said["--pipeline-model-parallel-size"] == str(positions)
        assert shlex.split(said["--pipeline-model-parallel-layout"]) == [line]
        assert said["--micro-batch-size"] == "1"
        assert said["--global-batch-size"] == str(2 * positions)


def test_groups_of_another_size_are_a_flag() -> None:
    workload = chain_workload(2, 6, devices=[[0], [1], [0], [1]])
    orders: Orders = [[(f"{s}{kind}", m) for kind, s, m in order(2, 2, 6, 3, rank)] for rank in range(2)]
    text = face.export(layered(plan_of(workload, orders), [1, 1, 1, 1]), "megatron").text
    assert "--microbatch-group-size-per-virtual-pipeline-stage 3" in text.splitlines()


def test_a_divided_sequence_is_a_flag_or_a_note() -> None:
    plan = with_blocks(layered(base(2, 1, 4), [1, 1]), [["layer0"], ["layer1"]], shards=2)
    tried: list[dict[str, bool]] = [{}, {"sequence_parallel": False}, {"sequence_parallel": True}]
    for options in tried:
        made = plan.provenance.model_copy(update={"options": options})
        found = face.export(plan.model_copy(update={"provenance": made}), "megatron")
        assert ("--sequence-parallel" in found.text.splitlines()) == options.get("sequence_parallel", False)
        assert any("--sequence-parallel" in note for note in found.notes) == (True not in options.values())


@pytest.mark.parametrize("divided", [False, True])
def test_plans_say_whether_their_costs_divide_the_sequence(divided: bool) -> None:
    profile = chain_profile(4, placed=False)
    blocks = tuple(
        block.model_copy(
            update={
                "costs": (
                    *block.costs,
                    *(row.model_copy(update={"shards": 2, "sequence_parallel": divided}) for row in block.costs),
                )
            }
        )
        for block in profile.blocks
    )
    split = profile.model_copy(update={"blocks": blocks})
    asked: dict[str, Any] = {"devices": 2, "placement": "one-to-one", "microbatches": 4, "scheduler": "1f1b"}
    plan = face.search(split, tp=2, pp=1, **asked).plan
    assert plan.provenance.options.get("sequence_parallel", False) is divided
    assert "sequence_parallel" not in face.search(split, **asked).plan.provenance.options


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"recompute": True}, ["--recompute-granularity full", "--recompute-method uniform"]),
        ({"recompute": "selective"}, ["--recompute-granularity selective"]),
    ],
)
def test_recomputation_is_a_flag(changes: dict[str, Any], flags: list[str]) -> None:
    plan = layered(base(2, 1, 4), [2, 2])
    assert not set(flags) & set(face.export(plan, "megatron").text.splitlines())
    changed = with_blocks(plan, [stage.blocks for stage in plan.stages], **changes)
    assert set(flags) <= set(face.export(changed, "megatron").text.splitlines())


def again_in_megatron(flags: Sequence[str], count: int) -> list[object]:
    """[layer of a stage] what Megatron-LM computes again of it, as its arguments are documented."""
    said = dict(flag.split(" ", 1) for flag in flags if " " in flag)
    method, granularity = said.get("--recompute-method"), said.get("--recompute-granularity")
    if granularity != "full":
        return [granularity == "selective" and "selective"] * count
    return [method == "uniform" or layer < int(said["--recompute-num-layers"]) for layer in range(count)]


@slow_but("seed", [20, 21], (20).__eq__, always)
def test_any_plan_is_exported_exactly_or_refused_with_its_place(seed: int) -> None:
    """Recomputation by block, sizes, state, names of blocks and programs at random; no other error ends an export."""
    draw = random.Random(seed)
    done, places = 0, list[str]()
    for _ in range(300):
        positions, chunks = draw.randint(1, 3), draw.randint(1, 2)
        counts = [draw.randint(0, 3) for _ in range(positions * chunks)]
        counts[0] += not sum(counts)
        plan = layered(base(positions, chunks, 2 * positions), counts, halves=draw.random() < 0.3)
        first = draw.randint(0, 3)
        stages = []
        for stage in plan.stages:
            layers = [block for block in stage.blocks if block.startswith("layer")]
            own = set(layers[:first] if draw.random() < 0.9 else draw.sample(layers, len(layers) // 2))
            again: Any = tuple(block in own for block in stage.blocks) if draw.random() < 0.9 else "selective"
            changes: dict[str, Any] = draw.choice(
                [{}] * 20 + [{"zero": 1}, {"zero": 3}, {"replicas": 2}, {"shards": 2}]
            )
            stages.append(replace(stage, recompute=again, **changes))
        programs = list(plan.programs)
        if draw.random() < 0.1:  # some actions are not there
            programs[-1] = tuple(text for text in programs[-1] if draw.random() < 0.9 and "B" not in text)
        plan = plan.model_copy(update={"stages": tuple(stages), "programs": tuple(programs)})
        for target in {*export_targets()} - {"chakra"}:  # whose plans of all sorts are drawn in test_chakra
            try:
                found = face.export(plan, target)
            except UsageError as error:
                places.append(str(error))
                continue
            if target == "megatron":
                done += any(stage.recomputes for stage in stages)
                for stage, count in zip(stages, counts, strict=True):
                    wanted = {
                        block.split(".")[0]: again for block, again in zip(stage.blocks, stage.again, strict=True)
                    }
                    agains = [again for block, again in wanted.items() if block.startswith("layer")]
                    assert again_in_megatron(found.text.splitlines(), count) == agains
    assert done > 50
    assert all("stages[" in said or "programs[" in said for said in places)


def test_what_megatron_cannot_run_is_refused_with_its_place() -> None:
    chain = layered(base(3, 1, 6), [1, 2, 1])
    moved = chain.programs[1]
    first, second = (index for index, text in enumerate(moved) if text in ("1F0", "1F1"))
    swapped = list(moved)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    programs = (chain.programs[0], tuple(swapped), chain.programs[2])
    cases: dict[str, dict[str, Any]] = {
        "programs\\[1\\]: its compute action 0 is 1F1, and Megatron-LM runs 1F0": {"programs": programs},
        "stages\\[1\\]\\.recompute": {
            "stages": (chain.stages[0], replace(chain.stages[1], recompute=True), chain.stages[2])
        },
        "stages\\[2\\]\\.zero is 1, stages\\[0\\]\\.zero 0": {
            "stages": (*chain.stages[:2], replace(chain.stages[2], zero=1))
        },
    }
    for said, update in cases.items():
        with pytest.raises(UsageError, match=said):
            face.export(chain.model_copy(update=update), "megatron")
    split = layered(chain_plan(2, 4, split=(10, 10)), [1, 1])
    with pytest.raises(UsageError, match=r"is 0I0: Megatron-LM runs whole backwards; .*split_backward"):
        face.export(split, "megatron")


# Layer lists and device maps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["vllm", "sglang", "tensorrt-llm"])
def test_layer_lists_have_one_number_for_each_rank(target: str) -> None:
    draw = random.Random(28)
    for _ in range(50):
        counts = [draw.randint(1, 9) for _ in range(draw.randint(1, 5))]
        text = face.export(layered(base(len(counts), 1, 2 * len(counts)), counts), target).text
        form = LISTS.get(target, "pp_partition=[{}]")
        assert text == form.format((", " if target == "tensorrt-llm" else ",").join(map(str, counts))) + "\n"


def test_a_layer_list_may_have_the_head_alone() -> None:
    found = face.export(layered(base(4, 1, 8), [4, 4, 4, 0]), "vllm")
    assert found.text == "VLLM_PP_LAYER_PARTITION=4,4,4,0\n"
    assert any("stage 3 has no layer" in note for note in found.notes)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_device_map_has_every_module_once(chunks: int) -> None:
    counts = [2, 1, 3, 2][: 2 * chunks]
    plan = layered(base(2, chunks, 4), counts, name="model.layers.{}")
    placed = json.loads(face.export(plan, "huggingface").text)
    layers = [name for name in placed if name.startswith("model.layers.")]
    assert layers == [f"model.layers.{layer}" for layer in range(sum(counts))]
    wanted = [stage % 2 for stage, count in enumerate(counts) for _ in range(count)]
    assert [placed[name] for name in layers] == wanted
    assert set(placed) - set(layers) == {"model.embed_tokens", "model.norm", "lm_head"}
    assert (placed["model.embed_tokens"], placed["lm_head"]) == (0, 1)


def test_names_of_modules_are_asked_for() -> None:
    plan = layered(base(2, 1, 4), [1, 1])
    found = face.export(plan, "huggingface", names="transformer.wte,transformer.wpe,transformer.h.N,transformer.ln_f")
    assert json.loads(found.text) == {
        "transformer.wte": 0,
        "transformer.wpe": 0,
        "transformer.h.0": 0,
        "transformer.h.1": 1,
        "transformer.ln_f": 1,
    }
    for template in ("layers", "layers.N,layers.N", "a b,layers.N"):
        with pytest.raises(UsageError, match="with N for its number"):
            face.export(plan, "huggingface", names=template)
    for template in ("a,a,layers.N", "layers.N,layers.5"):
        with pytest.raises(UsageError, match="is named twice"):
            face.export(plan, "huggingface", names=template)
    with pytest.raises(UsageError, match="names is for targets that take module names"):
        face.export(plan, "vllm", names="layers.N")


# What no target has ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        (
            [["e", "layer0.a"], ["layer0.b", "layer1"]],
            r"stages\[1\]\.blocks\[0\] is 'layer0\.b', and layer 0 begins in",
        ),
        ([["e"], ["f", "layer0"]], r"stages\[1\]\.blocks\[0\] is 'f', of the model's beginning"),
        ([["layer0", "head"], ["layer1"]], r"stages\[0\]\.blocks\[1\] is 'head', of the model's end"),
        ([["layer0"], ["layer2"]], r"'layer2', of layer 2, where layer 1 comes next|where layer 1 comes next"),
        ([["text.layer0"], ["image.layer1"]], "a layer of another part of the model"),
        ([["x"], ["y"]], "no block of the plan says which layer it is of"),
        ([["layer0"], []], r"stages\[1\] runs instructions"),
    ],
)
@pytest.mark.parametrize("target", ["vllm", "megatron", "huggingface"])
def test_stages_of_other_things_than_whole_layers(blocks: list[list[str]], said: str, target: str) -> None:
    with pytest.raises(UsageError, match=said):
        face.export(with_blocks(base(2, 1, 4), blocks), target)


def test_placements_that_a_target_has_not() -> None:
    circular = layered(base(2, 2, 4), [1, 1, 1, 1])
    with pytest.raises(UsageError, match=r"stages\[2\] is on rank 0, of ranks 0,1,0,1; vLLM places stages one-to-one"):
        face.export(circular, "vllm")
    devices = [(0,), (1,), (1,), (0,)]
    stages = tuple(replace(stage, devices=on) for stage, on in zip(circular.stages, devices, strict=True))
    with pytest.raises(UsageError, match=r"stages\[2\] is on rank 1, of ranks 0,1,1,0; Megatron-LM"):
        face.export(circular.model_copy(update={"stages": stages}), "megatron")
    assert json.loads(face.export(circular.model_copy(update={"stages": stages}), "huggingface").text)["lm_head"] == 0


def test_every_target_without_a_writer_says_so() -> None:
    plan = layered(base(2, 1, 4), [1, 1])
    for name in names("targets"):
        if name in export_targets():
            assert face.export(plan, name).text
        else:
            with pytest.raises(UsageError, match=f"not written for {export_target(name).title} yet"):
                face.export(plan, name)
    with pytest.raises(UsageError, match="there is no target 'megatrn'; did you mean megatron"):
        face.export(plan, "megatrn")


# The verb ----------------------------------------------------------------------------------------------------------


def test_the_verb_prints_what_the_tool_reads_alone(tmp_path: Any) -> None:
    plan = tmp_path / "plan.json"
    face.write(layered(base(2, 1, 4), [3, 2]), plan)
    done = pipeplan("export", plan, "--to", "vllm")
    assert (done.returncode, done.stdout) == (0, "VLLM_PP_LAYER_PARTITION=3,2\n")
    assert "not the plan's schedule" in done.stderr
    done = pipeplan("export", plan, "--to", "megatron", "-o", tmp_path / "layout")
    assert (done.returncode, done.stdout) == (0, "")
    assert (tmp_path / "layout").read_text().splitlines()[0] == "Et*3|ttL"
    done = pipeplan("export", ROOT / "plans" / "gpt2-345m-cpu.json", "--to", "megatron")
    assert done.returncode == 2
    assert "stages[1].blocks[0] is 'layer2.ffn'" in done.stderr


def test_a_shared_table_is_named_with_what_becomes_of_it() -> None:
    plan = face.search(
        ROOT / "profiles" / "gpt2-124m-cpu.json",
        placement=placement_of_whole_layers(),
        devices=4,
        microbatches=8,
        microbatch_size=1,
        scheduler="1f1b",
        recompute=False,
    ).plan
    found = face.export(plan, "megatron")
    assert found.text.splitlines()[0] == "Et*3|t*3|t*3|t*3L"
    assert "--untie-embeddings-and-output-weights" not in found.text
    (note,) = (note for note in found.notes if "embedding.token.weight" in note)
    assert "stages[0], stages[3]" in note
    assert "gradients are summed" in note


def placement_of_whole_layers() -> face.Placement:
    cuts = [0, 3, 6, 9, 12]
    stages = [
        [f"layer{layer}.{part}" for layer in range(*each) for part in ("attention", "ffn")] for each in pairwise(cuts)
    ]
    stages[0].insert(0, "embedding")
    stages[-1].append("head")
    return face.Placement.of(stages)


NOT_SPLIT = (
    "# no settings: 2 devices split each expert, and torchtitan's experts are whole or split by as many as all else (1)"
)


@pytest.mark.parametrize(
    ("shards", "expert", "split", "megatron", "torchtitan"),
    [
        (1, 4, 1, ["--expert-model-parallel-size 4"], ["parallelism.expert_parallel_degree = 4"]),
        (2, 4, 2, ["--expert-model-parallel-size 2"], [2, 2]),
        (2, 4, 1, ["--expert-model-parallel-size 4", "--expert-tensor-parallel-size 1"], [4]),
        (1, 4, 2, ["--expert-model-parallel-size 2", "--expert-tensor-parallel-size 2"], [NOT_SPLIT]),
    ],
)
def test_experts_have_a_size_and_a_tensor_size(
    shards: int, expert: int, split: int, megatron: list[str], torchtitan: list[object]
) -> None:
    """Of four devices; Megatron-LM takes the tensor size for experts, too, where nothing is said."""
    workload = chain_workload(1, 4)
    stage = replace(
        workload.stages[0],
        devices=(0, 1, 2, 3),
        shards=shards,
        replicas=4 // shards,
        expert=expert,
        expert_shards=split,
        microbatch_size=4,
    )
    given = replace(workload, stages=(stage,), devices=workload.devices * 4, microbatch_size=4, num_microbatches=1)
    assert [each for each in megatron_sizes(given, 1) if "expert" in each] == megatron
    found = [each for each in torchtitan_settings(given, "1f1b") if "expert" in each]
    names = ("parallelism.expert_parallel_degree", "parallelism.expert_tensor_parallel_degree")
    expected = [
        each if isinstance(each, str) else f"{name} = {each}" for name, each in zip(names, torchtitan, strict=False)
    ]
    assert found == expected
