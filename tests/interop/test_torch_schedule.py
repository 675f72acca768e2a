"""Schedules for torch's pipelining: written, read back, imported, and run by torch with the losses of our executor."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest

import pipeplan as face
from builders.chains import chain_plan
from pipeplan import Plan, UsageError, _api
from pipeplan.files import CostRow, Modules, parse
from pipeplan.interop.torch_schedule import read_csv
from pipeplan.reporting.beside import trace_beside
from pipeplan.simulator.measured_times import LoggedComparison
from pipeplan.workload.action import Action
from support.commands import pipeplan
from support.paths import ROOT

pytest.importorskip("torch")
from runtime_support import torch_schedules
from runtime_support.warm import warm_ranks
from support.marks import one_in

SAMPLES = 8
NAMES = "tok_embeddings,layers.N,norm,lm_head"
CASES: list[tuple[str, Literal["no", "yes"]]] = [
    ("circular", "no"),
    ("circular", "yes"),
    ("v-shape", "no"),
    ("v-shape", "yes"),
]


@cache
def profile() -> face.Profile:
    """Costs that nobody measured, of the decoder's layers."""
    return face.estimate(torch_schedules.MODEL, device="h100-80gb", microbatch=1, granularity="layer", precision="fp32")


def placement(strategy: str) -> face.Placement:
    """A layer in each stage: torch splits no backward of a stage that ends in a view, as that of a head alone does."""
    ids = [block.id for block in profile().blocks]
    first = ids.index("decoder.layers.0")
    stages = [[block] for block in ids[first : first + torch_schedules.LAYERS]]
    stages[0] = [*ids[:first], *stages[0]]
    stages[-1] += ids[first + torch_schedules.LAYERS :]
    ranks = [0, 1, 2, 3, 0, 1, 2, 3] if strategy == "circular" else [0, 1, 2, 3, 3, 2, 1, 0]
    placed = [face.PlacedStage(blocks=tuple(own), devices=(rank,)) for own, rank in zip(stages, ranks, strict=True)]
    return face.Placement(strategy=strategy, num_devices=4, stages=tuple(placed))


@cache
def plan(strategy: str, split: Literal["no", "yes"]) -> Plan:
    found = face.search(
        profile(),
        placement=placement(strategy),
        microbatches=SAMPLES,
        microbatch_size=1,
        split_backward=split,
        slices=0,
        late_inputs="no",
        deterministic=True,
        time_limit=1,
    ).plan
    kinds = {operation.kind for operation in found.operations}
    assert ("W" in kinds) == (split == "yes")
    return found


def modules_of(made: face.Export) -> Modules:
    return parse(made.beside[".modules.json"], Modules)


def test_stages_are_named_by_the_profile_or_by_a_template() -> None:
    given = face.import_plan("2,1,3,2", "layers", profile(), microbatches=4, microbatch_size=1).plan
    made = face.export(given, "torch")
    assert not any("module names" in note for note in made.notes)
    own = [stage.modules for stage in modules_of(made).stages]
    assert own[1:3] == [("decoder.layers.2",), tuple(f"decoder.layers.{number}" for number in (3, 4, 5))]
    named = [stage.modules or () for stage in modules_of(face.export(given, "torch", names=NAMES)).stages]
    assert own == [tuple(f"decoder.{name}" for name in each) for each in named]
    assert [name for each in named for name in each] == every_module()
    assert [stage.rank for stage in modules_of(face.export(plan("v-shape", "no"), "torch")).stages] == [
        *range(4),
        *reversed(range(4)),
    ]


def every_module() -> list[str]:
    return ["tok_embeddings", *(f"layers.{number}" for number in range(torch_schedules.LAYERS)), "norm", "lm_head"]


@pytest.mark.slow
def test_torch_runs_the_schedules_with_the_losses_of_our_executor(tmp_path: Path) -> None:
    """Circular and V, whole and split backward: four gloo processes, first of torch's pipelining, then of ours."""
    cases, ours = {}, {}
    for strategy, split in CASES:
        made = face.export(plan(strategy, split), "torch")
        path = tmp_path / f"{strategy}-{split}.csv"
        path.write_text(made.text)
        cases[path.stem] = (str(path), made.beside[".modules.json"])
    profiled = "v-shape-yes"
    theirs = torch_schedules.losses(tmp_path, cases, SAMPLES, profiled)
    require_read(plan("v-shape", "yes"), [str(tmp_path / f"{rank}.json") for rank in range(4)])
    with warm_ranks():
        for strategy, split in (CASES[1], CASES[2]):
            run = face.run(
                plan(strategy, split),
                model=torch_schedules.MODEL,
                granularity="layer",
                local=True,
                steps=1,
                dtype="float64",
            )
            ours[f"{strategy}-{split}"] = run.result.steps[0].loss * SAMPLES
    assert theirs.keys() == {f"{strategy}-{split}" for strategy, split in CASES}
    for strategy, split in CASES:  # ours is one number for all orders, as test_executor shows
        name = f"{strategy}-{split}"
        assert theirs[name] == pytest.approx(ours.get(name, max(ours.values())), rel=1e-9), name


def require_read(given: Plan, paths: list[str]) -> None:
    """What torch.profiler wrote of each rank has every action of the plan, and a trace has it beside the prediction."""
    found, run = _api.measured_run(face.simulate(given), paths)
    events = [each for each in json.loads(trace_beside(found, run))["traceEvents"] if each["ph"] == "X"]
    for device, program in enumerate(given.programs):
        own = [each["name"] for each in events if (each["pid"], each["tid"]) == (2, 1000 * device)]
        assert own == [text for text in program if "_" not in text]
    assert isinstance(found.measured, LoggedComparison)
    actions = [Action.parse(text) for program in given.programs for text in program if "_" not in text]
    assert {each.kind: each.count for each in found.measured.kinds} == Counter(action.kind for action in actions)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, where it copies a traced model
def test_module_lists_are_split_points_of_a_traced_model() -> None:
    """``torch.distributed.pipelining.pipeline`` cuts where the lists do."""
    import torch
    from torch.distributed.pipelining import SplitPoint, pipeline

    stages = modules_of(face.export(plan("circular", "no"), "torch")).stages
    names = [[name.removeprefix("decoder.") for name in stage.modules or ()] for stage in stages]
    assert [name for each in names for name in each] == every_module()
    model = torch_schedules.decoder()
    tokens = torch.zeros(1, torch_schedules.TOKENS, dtype=torch.long)
    pipe = pipeline(model, mb_args=(tokens,), split_spec={each[0]: SplitPoint.BEGINNING for each in names[1:]})
    assert pipe.num_stages == len(stages)
    for number, own in enumerate(names):
        wanted = {name for name, _ in model.named_parameters() if any(name.startswith(f"{module}.") for module in own)}
        assert {name for name, _ in pipe.get_stage_module(number).named_parameters()} == wanted


# Read back --------------------------------------------------------------------------------------------------------


@one_in(2, "strategy, split", CASES)
def test_what_is_exported_comes_back_as_it_was(strategy: str, split: Literal["no", "yes"], tmp_path: Path) -> None:
    """With the file of modules the whole plan; without it the order, on stages that are cut evenly by time."""
    given, path = plan(strategy, split), tmp_path / "schedule.csv"
    made = face.export(given, "torch")
    path.write_text(made.text)
    even = face.import_plan(path, "torch", profile(), microbatch_size=1)
    assert any("cut evenly by time" in note for note in even.notes)
    Path(f"{path}.modules.json").write_text(made.beside[".modules.json"])
    back = face.import_plan(path, "torch", profile()).plan
    assert (back.placement, back.stages, back.operations) == (given.placement, given.stages, given.operations)
    assert (back.programs, back.starts_ns) == (given.programs, given.starts_ns)
    assert [stage.devices for stage in even.plan.stages] == [stage.devices for stage in given.stages]
    for one, other in zip(even.plan.whole_programs, given.whole_programs, strict=True):
        assert [text for text in one if "_" not in text] == [text for text in other if "_" not in text]


def test_ranks_of_several_devices_come_back(tmp_path: Path) -> None:
    """Replicas share a row, and the file of modules has the devices."""
    source = face.read_profile(ROOT / "profiles/gpt2-124m-cpu.json")
    given = face.read_plan(ROOT / "plans/gpt2-124m-cpu.json")
    made, path = face.export(given, "torch"), tmp_path / "s.csv"
    path.write_text(made.text)
    Path(f"{path}.modules.json").write_text(made.beside[".modules.json"])
    back = face.import_plan(path, "torch", source).plan
    assert len(made.text.splitlines()) == len({stage.devices for stage in given.stages}) < len(given.devices)
    assert back.predicted.iteration_ns == given.predicted.iteration_ns
    assert (back.stages, back.programs) == (given.stages, given.programs)
    tied = next(note for note in made.notes if "is shared by" in note)
    assert "a table of its own in each of them" in tied
    assert any("an iteration without these sums takes" in note for note in made.notes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0X0\n", "row 0, field 1: '0X0' is not an action"),
        ("0F0,0SEND_F0\n", "field 1 is 0SEND_F0: read a schedule of compute actions alone"),
        ("0F0,0B0\n0F1,0B1\n", "row 1 runs 0F1, and stage 0 is rank 0's"),
        ("0F0,0B0\n2F0,2B0\n", "no row runs stage 1"),
        ("0F0,0B0\n,\n", "row 1 has no actions"),
        ("", "no row runs stage 0"),
        ("0F0,0B0,0F1\n", "leaves out 0B1"),
        (",".join(f"{n}F0" for n in range(99)), "the schedule has 99 stages, the profile only"),
    ],
)
def test_schedules_that_are_none_are_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        face.import_plan(path, "torch", profile(), microbatch_size=1)


def test_what_torch_cannot_run_is_refused_with_its_place() -> None:
    def refused(name: str) -> str:
        with pytest.raises(UsageError) as caught:
            face.export(ROOT / f"plans/{name}.json", "torch")
        return str(caught.value)

    assert "0F0.0: torch.distributed.pipelining runs micro-batches whole" in refused("tessel-mt5-1.8b-v100-32gb")
    assert "from stage 2 to stage 5" in refused("tessel-flava-v100-32gb")
    assert "stages[4] takes nothing from stages[3]" in refused("tessel-x")
    assert "another stage is with other devices" in refused("tessel-m")


def test_a_plan_with_a_loop_is_written_whole() -> None:
    """Rows have every action once, in the plan's order."""
    given = chain_plan(3, 6)
    rows = read_csv(face.export(given, "torch").text)
    assert [len(row) for row in rows] == [12, 12, 12]
    for row, program in zip(rows, given.whole_programs, strict=True):
        assert [str(action) for action in row] == [text for text in program if "_" not in text]


# Lists of layers and layouts --------------------------------------------------------------------------------------


def test_lists_of_layers_come_back() -> None:
    source = face.read_profile(ROOT / "profiles/gpt2-345m-cpu.json")
    found = face.import_plan("5,7,7,5", "layers", source, devices=8, microbatches=8)
    assert face.export(found.plan, "vllm").text == "VLLM_PP_LAYER_PARTITION=5,7,7,5\n"
    assert [stage.replicas for stage in found.plan.stages] == [2] * 4
    assert any("1f1b is assumed" in note for note in found.notes)
    assert found.plan.provenance.scheduler == "1f1b"


@pytest.mark.parametrize(
    ("layout", "ranks", "group"), [("Et*6|t*6|t*6|t*6L", 4, None), ("(Et*6|)*1t*6|t*6|t*6L", 2, 4)]
)
def test_layouts_come_back_with_their_order(layout: str, ranks: int, group: int | None, tmp_path: Path) -> None:
    source = face.read_profile(ROOT / "profiles/gpt2-345m-cpu.json")
    sizes = [f"--pipeline-model-parallel-size {ranks}", "--micro-batch-size 1", "--global-batch-size 8"]
    if group:
        sizes.append(f"--microbatch-group-size-per-virtual-pipeline-stage {group}")
    path = tmp_path / "layout"
    path.write_text("\n".join([layout, *sizes]))
    found = face.import_plan(path, "megatron", source)
    assert found.plan.num_microbatches == 8
    text = face.export(found.plan, "megatron").text.splitlines()
    assert text[0] == "Et*6|t*6|t*6|t*6L"
    assert set(sizes) <= set(text)


@pytest.mark.parametrize("said", [1, 2, None])
@pytest.mark.parametrize("shards", [1, 2])
def test_sizes_of_experts_come_back(shards: int, said: int | None) -> None:
    """Where Megatron-LM is not told how many devices split an expert, as many do as split all else."""
    split = shards if said is None else said
    sizes = [f"--tensor-model-parallel-size {shards}", f"--expert-model-parallel-size {4 // split}"]
    sizes += [] if said is None or said == shards else [f"--expert-tensor-parallel-size {said}"]
    whole = CostRow(microbatch_size=shards, shards=shards, forward_ns=10, backward_ns=20)
    rows = tuple(whole.model_copy(update={"expert": 4, "expert_shards": each}) for each in (1, 2))
    ends = [face.Block(id=id_, operator=id_, costs=(whole,)) for id_ in ("embedding", "head")]
    of_layer: dict[str, Any] = {"operator": "layer", "parameters": 8, "expert_parameters": 8, "costs": (whole, *rows)}
    layers = [face.Block(id=f"layer{n}", **of_layer) for n in range(4)]
    source = face.Profile.of("experts", [ends[0], *layers, ends[1]], recipe="bf16")
    found = face.import_plan(
        "\n".join(["Et*2|t*2L", *sizes]), "megatron", source, devices=8, microbatches=2, microbatch_size=4
    )
    assert {(stage.expert, stage.expert_shards) for stage in found.plan.stages} == {(4, split)}
    text = face.export(found.plan, "megatron").text.splitlines()
    assert {each for each in text if "expert" in each} == {each for each in sizes if "expert" in each}


@pytest.mark.parametrize(
    ("source", "form", "flags", "said"),
    [
        ("5,7,7,6", "layers", {}, "the source has 25 layers, and profile 'gpt2-345m' has 24"),
        ("12,12", "layers", {"devices": 3}, "devices=3 cannot be shared evenly by 2 pipeline ranks"),
        ("Et*12|t*12L", "layers", {}, "is not a list of layers"),
        (f"12,{5000 * '9'}", "layers", {}, "is not a list of layers"),
        ("Et*12|t*12L\n--tensor-model-parallel-size 9999999", "megatron", {}, "19999998 devices, more than the 65536"),
        (
            "Et*12|t*12L\n--global-batch-size 9999999 --micro-batch-size 1",
            "megatron",
            {},
            "9999999 micro-batches, more than the 1000000",
        ),
        ("Et*12|t*12L", "megatron", {"devices": 3}, "2 stages cannot be shared by|cannot be shared evenly"),
        ("E|t*24L", "torch", {"modules": "x"}, "No such file"),
        ("12,12", "layers", {"modules": str(ROOT / "docs/schema")}, "."),
        ("12,12", "csv", {}, "'csv' is not known"),
    ],
)
def test_what_does_not_suit_is_refused(source: str, form: Any, flags: dict[str, Any], said: str) -> None:
    known = face.read_profile(ROOT / "profiles/gpt2-345m-cpu.json")
    with pytest.raises(face.PipeplanError, match=said):
        face.import_plan(source, form, known, **flags)


def test_the_verb_writes_a_plan_that_check_accepts(tmp_path: Path) -> None:
    path, back = tmp_path / "s.csv", tmp_path / "back.json"
    done = pipeplan("export", ROOT / "plans/gpt2-345m-cpu.json", "--to", "torch", "-o", path)
    assert (done.returncode, done.stdout) == (0, "")
    assert {each.name for each in tmp_path.iterdir()} == {"s.csv", "s.csv.modules.json"}
    source = ROOT / "profiles/gpt2-345m-cpu.json"
    done = pipeplan("import", path, "--from", "torch", "--profile", source, "-o", back)
    assert done.returncode == 0, done.stderr
    assert "8 stages" in done.stdout
    assert pipeplan("check", back, "--profile", source).returncode == 0
    done = pipeplan("import", "6,6,6,6", "--from", "layers", "--profile", source, "-o", "-")
    assert done.stdout.startswith("{")
    assert "1f1b is assumed (--scheduler)" in done.stderr


def test_modules_that_no_devices_can_run_are_refused(tmp_path: Path) -> None:
    made = face.export(plan("v-shape", "no"), "torch")
    damaged = json.loads(made.beside[".modules.json"])
    damaged["stages"][2]["replicas"] = 2
    (tmp_path / "modules.json").write_text(json.dumps(damaged))
    told = r"stages\[2\]: shards 1 x replicas 2 must equal the 1 devices; give the file that was"
    with pytest.raises(UsageError, match=told):
        face.import_plan(made.text, "torch", profile(), modules=str(tmp_path / "modules.json"))


def test_a_field_longer_than_csv_has_them_is_refused() -> None:
    with pytest.raises(UsageError, match="it is no CSV of a schedule: field larger than"):
        read_csv("x" * 200_000)
