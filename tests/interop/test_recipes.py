"""Recipes of trainers: what they set, by the names that those have; and how DeepSpeed is cut."""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import fields, make_dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import pipeplan as face
from builders.chains import chain_plan, chain_workload
from builders.orders import Orders
from builders.plans import plan_of
from interop.test_export import layered, megatron_plan
from pipeplan import Plan, UsageError
from pipeplan.interop.megatron import layout_text, read_layout, require_layout
from pipeplan.interop.torch_schedule import read_csv
from support.commands import pipeplan
from support.paths import ROOT

MICROBATCHES = {
    "pytorch/torchtitan b5bcd76 (2026-08-21)": "num_pp_microbatches",
    "torchtitan 0.3.0, the wheel": "pipeline_parallel_microbatch_size",
}
"""What torchtitan calls the size of micro-batches, or their number."""

PARALLELISM = (
    "pipeline_parallel_degree",
    "tensor_parallel_degree",
    "context_parallel_degree",
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "module_fqns_per_model_part",
    "pipeline_parallel_schedule",
    "pipeline_parallel_schedule_csv",
)
"""Fields of torchtitan's ``ParallelismConfig``, in both."""

PIPELINE = ("pp_schedule", "pp_schedule_csv", "pp_microbatch_size", "module_fqns_per_model_part")
"""Fields of AutoModel's ``PipelineConfig``: NVIDIA-NeMo/Automodel 36044ad (2026-08-22), and the wheel of 0.7.0."""


def plan(*, chunks: int = 1, counts: tuple[int, ...] = (2, 1, 3), **changes: Any) -> Plan:
    whole = chain_plan(len(counts), 6) if chunks == 1 else megatron_plan(len(counts) // chunks, chunks, 4)
    return layered(whole, counts, **changes)


def with_stages(given: Plan, **changes: Any) -> Plan:
    return given.model_copy(update={"stages": tuple(replace(stage, **changes) for stage in given.stages)})


# torchtitan ----------------------------------------------------------------------------------------------------------


def planned(folder: Path, made: face.Export, field: str, extra: Mapping[str, object] | None = None) -> Any:
    """What the recipe makes of a base that has such a field for the size of micro-batches, and no unknown others."""
    for name, text in made.files.items():
        (folder / name).write_text(text)
    known = [(each, Any, None) for each in (*PARALLELISM, field)]
    sizes = [(each, Any, None) for each in ("local_batch_size", "global_batch_size")]
    parallelism = make_dataclass("ParallelismConfig", known, slots=True)()
    config = SimpleNamespace(parallelism=parallelism, training=make_dataclass("Training", sizes, slots=True)())
    given = {"mine": SimpleNamespace(llama3_8b=lambda: config), **(extra or {})}
    with mock.patch.dict(sys.modules, given):
        return loaded(folder / "planned.py").planned()


def loaded(path: Path) -> ModuleType:
    """A single file of a package, without the package around it."""
    spec = importlib.util.spec_from_file_location(f"published_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


@pytest.mark.parametrize(("field", "value"), [("pipeline_parallel_microbatch_size", 1), ("num_pp_microbatches", 6)])
def test_a_recipe_sets_the_field_that_there_is(field: str, value: int, tmp_path: Path) -> None:
    assert field in MICROBATCHES.values()
    config = planned(tmp_path, face.export(plan(), "torchtitan", base="mine:llama3_8b"), field)
    assert getattr(config.parallelism, field) == value
    assert config.parallelism.module_fqns_per_model_part == [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["layers.2"],
        ["layers.3", "layers.4", "layers.5", "norm", "lm_head"],
    ]
    assert (config.parallelism.pipeline_parallel_degree, config.parallelism.pipeline_parallel_schedule) == (3, "1F1B")
    assert (config.training.global_batch_size, config.training.local_batch_size) == (6, 6)
    rows = read_csv(Path(config.parallelism.pipeline_parallel_schedule_csv).read_text())
    assert [len(row) for row in rows] == [12] * 3


def test_a_torchtitan_with_another_name_is_said(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="another name for the size of micro-batches"):
        planned(tmp_path, face.export(plan(), "torchtitan", base="mine:llama3_8b"), "microbatches")


def test_stages_stand_where_the_schedule_s_name_says() -> None:
    assert "'Interleaved1F1B'" in face.export(plan(chunks=2, counts=(1, 1, 2, 1)), "torchtitan").text
    source = face.read_profile(ROOT / "profiles/gpt2-345m-cpu.json")
    whole = face.import_plan("6,6,6,6", "layers", source, microbatches=4, microbatch_size=1).plan
    devices = (0, 1, 1, 0)
    folded = [stage.model_copy(update={"devices": (devices[n],)}) for n, stage in enumerate(whole.placed.stages)]
    placement = face.Placement(strategy="v-shape", num_devices=2, stages=tuple(folded))
    v = face.search(source, placement=placement, scheduler="gpipe", microbatches=4, microbatch_size=1).plan
    assert "'ZBVZeroBubble'" in face.export(v, "torchtitan").text


def test_recomputation_is_set_with_its_import(tmp_path: Path) -> None:
    made = face.export(with_stages(plan(), recompute=True), "torchtitan", base="mine:llama3_8b")
    kinds = SimpleNamespace(FullAC=SimpleNamespace(Config=lambda: "all"))
    extra = {"torchtitan": ModuleType("torchtitan"), "torchtitan.distributed": ModuleType("torchtitan.distributed")}
    extra["torchtitan.distributed.activation_checkpoint"] = kinds
    assert planned(tmp_path, made, "num_pp_microbatches", extra).activation_checkpoint == "all"


def test_without_a_base_the_recipe_says_what_is_missing(tmp_path: Path) -> None:
    made = face.export(plan(), "torchtitan")
    assert any("--base" in note for note in made.notes)
    with pytest.raises(NotImplementedError, match=r"--base pkg\.mod:function"):
        planned(tmp_path, made, "num_pp_microbatches")


def test_what_a_recipe_cannot_say_is_refused() -> None:
    with pytest.raises(UsageError, match="zero is 1: replicas of torchtitan either keep"):
        face.export(with_stages(plan(), zero=1), "torchtitan")
    given = plan()
    some = (replace(given.stages[0], recompute=True), *given.stages[1:])
    with pytest.raises(UsageError, match="recompute: torchtitan recomputes all layers alike"):
        face.export(given.model_copy(update={"stages": some}), "torchtitan")


@pytest.mark.parametrize("base", ["mine", "mine:a b", "mine:f; import os", ":f", "a-b:f", "mine:f\nimport os"])
def test_a_base_is_a_module_and_a_function(base: str) -> None:
    with pytest.raises(UsageError, match=r"not of the form pkg\.mod:function"):
        face.export(plan(), "torchtitan", base=base)


def test_names_from_files_are_no_code() -> None:
    """Names of modules are texts of strangers."""
    evil = 'x"]\nimport os #'
    given = plan().model_copy(update={"modules": {"layer0": (evil,)}})
    text = face.export(given, "torchtitan", names='tok"] import os #,layers.N'.replace('"] import os #', "")).text
    assert {type(node) for node in ast.parse(text).body} <= {ast.Expr, ast.ImportFrom, ast.FunctionDef, ast.Assign}
    assert evil not in face.export(given, "automodel").text


# NeMo AutoModel ------------------------------------------------------------------------------------------------------


def blocks_of(text: str) -> Any:
    """The part below ``distributed``, whose values are JSON's or words; there is no reader of YAML here."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        key, _, value = line.split("  #")[0].strip().partition(": ")
        if key.startswith("- "):
            found.setdefault("module_fqns_per_model_part", []).append(
                ast.literal_eval(key[2:] + (f": {value}" if value else ""))
            )
        elif value:
            found[key] = int(value) if value.isdecimal() else value.strip('"')
    return found


def test_automodel_s_blocks() -> None:
    made = face.export(plan(), "automodel")
    found = blocks_of(made.files["recipe.yaml"])
    assert set(PIPELINE) <= found.keys()
    assert found["module_fqns_per_model_part"][1] == ["model.layers.2", "model.rotary_emb"]
    assert (found["pp_size"], found["dp_size"], found["tp_size"], found["pp_schedule"]) == (3, 1, 1, "1F1B")
    assert (found["global_batch_size"], found["local_batch_size"], found["pp_microbatch_size"]) == (6, 6, 1)
    assert made.files[found["pp_schedule_csv"]] == face.export(plan(), "torch").text
    named = blocks_of(face.export(plan(), "automodel", names="embed,blocks.N,head").text)
    assert named["module_fqns_per_model_part"][0] == ["embed", "blocks.0", "blocks.1"]


# DeepSpeed -----------------------------------------------------------------------------------------------------------


def pipeline_class(made: face.Export) -> Any:
    """The class, whose base is as little of DeepSpeed's as it uses."""

    class PipelineModule:
        def __init__(self, entries: int, num_stages: int, stage: int) -> None:
            self._layer_specs, self.num_stages, self.global_rank = [None] * entries, num_stages, stage
            self._topo = SimpleNamespace(get_coord=lambda rank: SimpleNamespace(pipe=rank))
            self.bounds: tuple[int, int] | None = None

        def _set_bounds(self, start: int, stop: int) -> None:
            self.bounds = (start, stop)

    names: dict[str, Any] = {}
    given = {"deepspeed": ModuleType("deepspeed"), "deepspeed.pipe": SimpleNamespace(PipelineModule=PipelineModule)}
    with mock.patch.dict(sys.modules, given):
        exec(made.text, names)
    return names["PlannedPipelineModule"]


def test_deepspeed_is_cut_where_the_plan_is() -> None:
    made = pipeline_class(face.export(plan(), "deepspeed"))
    bounds = []
    for stage in range(3):
        module = made(8, 3, stage)
        module._partition_layers()
        bounds.append(module.bounds)
        assert module.parts == [0, 3, 4, 8]
    assert bounds == [(0, 3), (3, 4), (4, 8)]
    with pytest.raises(ValueError, match=r"has 9 entries, and the plan 1 \+ 6 \+ 1"):
        made(9, 3, 0)._partition_layers()
    with pytest.raises(ValueError, match="the plan is of 3 stages, and num_stages is 2"):
        made(8, 2, 0)._partition_layers()


def test_deepspeed_runs_1f1b_alone() -> None:
    source = face.read_profile(ROOT / "profiles/gpt2-345m-cpu.json")
    gpipe = face.import_plan("6,6,6,6", "layers", source, scheduler="gpipe", microbatches=8, microbatch_size=1).plan
    with pytest.raises(UsageError, match="DeepSpeed runs"):
        face.export(gpipe, "deepspeed")
    with pytest.raises(UsageError, match="not with ZeRO 2 or 3"):
        face.export(with_stages(plan(), zero=2), "deepspeed")


# Galvatron -----------------------------------------------------------------------------------------------------------

GALVATRON = {
    *("pp_deg", "tp_sizes_enc", "tp_consecutive_flags", "cp_sizes_enc", "dp_types_enc", "use_sp", "checkpoint"),
    *("global_bsz", "chunks", "pp_division", "pipeline_type", "default_dp_type", "vtp", "vsp", "embed_sdp"),
}
"""PKU-DAIR/Hetu-Galvatron cea12ff (2026-06-16)."""


def test_galvatron_s_lists_have_a_value_for_each_layer() -> None:
    given = plan()
    again = (replace(given.stages[0], recompute=True), *given.stages[1:])
    found = json.loads(face.export(given.model_copy(update={"stages": again}), "galvatron").text)
    assert found.keys() == GALVATRON
    assert (found["pp_deg"], found["pp_division"], found["chunks"], found["global_bsz"]) == (3, "2,1,3", 6, 6)
    assert found["checkpoint"] == "1,1,0,0,0,0"
    assert found["pipeline_type"] == "pipedream_flush"
    assert all(len(found[name].split(",")) == 6 for name in GALVATRON if name.endswith("_enc"))
    source = face.read_profile(ROOT / "profiles/gpt2-345m-cpu.json")
    for scheduler, kind in (("gpipe", "gpipe"), ("1f1b", "pipedream_flush")):
        other = face.import_plan(
            "6,6,6,6", "layers", source, scheduler=scheduler, microbatches=5, microbatch_size=1
        ).plan
        assert json.loads(face.export(other, "galvatron").text)["pipeline_type"] == kind


def test_what_galvatron_cannot_say_is_refused() -> None:
    with pytest.raises(UsageError, match="zero is 1: Galvatron divides nothing"):
        face.export(with_stages(plan(), zero=1), "galvatron")
    with pytest.raises(UsageError, match=r"stages\[0\].recompute is selective"):
        face.export(with_stages(plan(), recompute="selective"), "galvatron")
    orders: Orders = [
        [*(("0F", m) for m in range(3)), *(("0B", m) for m in range(3))],
        [("1F", 0), ("1B", 0), ("1F", 1), ("1B", 1), ("1F", 2), ("1B", 2)],
    ]
    other = layered(plan_of(chain_workload(2, 3), orders), (1, 1))
    with pytest.raises(UsageError, match="is none of 1F1B's, nor are all orders GPipe's"):
        face.export(other, "galvatron")


# The verb ------------------------------------------------------------------------------------------------------------


def test_folders_are_made_and_needed(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan().model_dump_json())
    done = pipeplan("export", path, "--to", "torchtitan")
    assert done.returncode == 2
    assert "--to torchtitan writes planned.py and schedule.csv; give -o FOLDER" in done.stderr
    for _ in range(2):  # the second time over its own files
        done = pipeplan("export", path, "--to", "automodel", "-o", tmp_path / "a" / "b")
        assert (done.returncode, done.stdout) == (0, "")
    assert {each.name for each in (tmp_path / "a" / "b").iterdir()} == {"recipe.yaml", "schedule.csv"}
    done = pipeplan("export", path, "--to", "automodel", "-o", path)
    assert done.returncode == 2
    assert "is a file" in done.stderr
    done = pipeplan("export", path, "--to", "vllm", "--base", "a:b")
    assert "--base names a recipe of torchtitan, and vLLM takes none" in done.stderr


# As published: the wheels --------------------------------------------------------------------------------------------

WHEELS = {"torchtitan": "0.3.0", "nemo-automodel": "0.7.0", "megatron-core": "0.16.1", "megatron-bridge": "0.3.1"}

_FOLDER: list[str] = []


@pytest.fixture(autouse=True, scope="module")
def _somewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    _FOLDER[:] = [str(tmp_path_factory.mktemp("wheels"))]
    yield
    wheel.cache_clear()


@cache
def wheel(name: str) -> Path:
    """A folder with the published package, fetched without what it depends on; skips where there is no index."""
    folder = Path(_FOLDER[0]) / name
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), f"{name}=={WHEELS[name]}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        pytest.skip(f"{name} {WHEELS[name]} cannot be fetched")
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "in")
    return folder / "in"


@pytest.mark.slow
def test_torchtitan_s_configuration_takes_what_the_recipe_sets(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    configs = loaded(wheel("torchtitan") / "torchtitan/config/configs.py")
    known = {each.name for each in fields(configs.ParallelismConfig)}
    assert {*PARALLELISM, MICROBATCHES["torchtitan 0.3.0, the wheel"]} <= known
    config = SimpleNamespace(parallelism=configs.ParallelismConfig(), training=configs.TrainingConfig())
    made = face.export(plan(), "torchtitan", base="mine:llama3_8b")
    for name, text in made.files.items():
        (tmp_path / name).write_text(text)
    with mock.patch.dict(sys.modules, {"mine": SimpleNamespace(llama3_8b=lambda: config)}):
        assert loaded(tmp_path / "planned.py").planned() is config  # its classes have slots: others are refused
    assert config.parallelism.pipeline_parallel_microbatch_size == 1
    assert config.parallelism.module_fqns_per_model_part[1] == ["layers.2"]


@pytest.mark.slow
def test_automodel_s_configuration_takes_what_the_block_says() -> None:
    pytest.importorskip("torch")
    config = loaded(wheel("nemo-automodel") / "nemo_automodel/components/distributed/pipelining/config.py")
    found = blocks_of(face.export(plan(), "automodel").text)
    made = config.PipelineConfig(**{name: found[name] for name in PIPELINE})
    assert made.module_fqns_per_model_part == found["module_fqns_per_model_part"]
    mesh = (wheel("nemo-automodel") / "nemo_automodel/components/distributed/mesh.py").read_text()
    for size in ("dp_size", "tp_size", "pp_size", "cp_size", "ep_size"):
        assert f"    {size}: int" in mesh


@pytest.mark.slow
def test_megatron_s_own_layout_class_reads_layouts_as_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 random layouts: the same letters on the same ranks and chunks."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(wheel("megatron-core")))
    module = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    rng, letters = random.Random(0), {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    for _ in range(200):
        size, chunks = rng.choice([2, 3, 4]), rng.choice([1, 2])
        stages = ["t" * rng.randint(0, 3) for _ in range(size * chunks)]
        text = "|".join(["E" + stages[0], *stages[1:-1], stages[-1] + "L"])
        if rng.random() < 0.3:
            text = f"E({rng.choice(['t', 'tt'])}|)*{size * chunks - 1}tL"
        layout = read_layout(text)
        require_layout(layout, size)
        theirs = module.PipelineParallelLayerLayout.from_str(text, size).layout
        for rank in range(size):
            for chunk, own in enumerate(theirs[rank]):
                assert "".join(letters[kind.name] for kind in own) == layout[chunk * size + rank], text


BRIDGE = "megatron-bridge"


def hand_made() -> Iterator[tuple[str, int, int, str]]:
    """(file, ranks, chunks, expression) of every table of layouts in the recipes, read with ast and never run."""
    for path in sorted((wheel(BRIDGE) / "megatron/bridge/recipes").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Dict):
                continue
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Tuple) and isinstance(value, ast.List | ast.BinOp):
                    ranks, chunks = ast.literal_eval(key)
                    yield path.stem, ranks, chunks, ast.unparse(value).replace("last_layer", "['mtp', 'loss']")


@pytest.mark.slow
def test_layouts_of_megatron_bridge_are_read() -> None:
    """All of the published recipes' tables: 61 layers of DeepSeek-V3 and Kimi-K2 among them."""
    found = list(hand_made())
    assert len(found) > 12
    assert {"deepseek_v3", "kimi_k2"} <= {name for name, *_ in found}
    for name, ranks, chunks, text in found:
        layout = read_layout(text)
        require_layout(layout, ranks)
        assert len(layout) == ranks * chunks
        assert read_layout(layout_text(layout)) == layout
        if name in ("deepseek_v3", "kimi_k2"):
            assert "".join(layout).count("t") == 61


@pytest.mark.counted
@pytest.mark.slow
@pytest.mark.long  # test_start improves on smaller ones
def test_hand_made_layouts_of_deepseek_v3_are_matched_or_beaten() -> None:
    """Imported, in Megatron-LM's order, then improved on as many ranks: never longer."""
    pytest.importorskip("transformers")
    source = face.estimate("deepseek-v3", sequence=4096, microbatch=1, device="h100-80gb", granularity="layer")
    for name, ranks, _, text in hand_made():
        if name != "deepseek_v3":
            continue
        today = face.import_plan(text, "megatron", source, devices=ranks, microbatches=4 * ranks, microbatch_size=1)
        assert any("multi-token prediction" in note for note in today.notes)
        better = face.search(source, start=today.plan, pp=ranks, tp=1, replicas=1, time_limit=4)
        assert better.plan.predicted.iteration_ns <= today.plan.predicted.iteration_ns
        assert face.check(better.plan, profile=source).valid
