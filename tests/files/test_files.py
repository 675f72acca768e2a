"""The file formats: what they refuse and how they say it, reading and writing, schemas and their documentation."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from builders.chains import chain_plan, chain_profile
from pipeplan.checker import check
from pipeplan.errors import FileError
from pipeplan.files import (
    FORMATS,
    BackendFusion,
    BackendRefusal,
    Block,
    Cluster,
    CostRow,
    Cover,
    CoveredGroup,
    DeviceKind,
    Edge,
    FailureDomain,
    FileModel,
    LinkLevel,
    MeasuredCurve,
    Modules,
    PhaseRow,
    PlacedStage,
    Placement,
    Plan,
    Predicted,
    Profile,
    Provenance,
    Recipe,
    RingCosts,
    RunGroup,
    Source,
    StageModules,
    TiedParameter,
    WholeRun,
    parse,
    read_cluster,
    read_cover,
    read_modules,
    read_placement,
    read_plan,
    read_profile,
    schema,
    sha256_of,
    to_json,
    write_file,
)
from pipeplan.files import read_write as files
from pipeplan.files.onward import Onward
from pipeplan.files.packed import PackedProgram, PackedStarts
from pipeplan.files.plan import AlternativeFigures, Decode, KindSource
from pipeplan.files.row_messages import ExpertMessages, RowMessages, SequenceMessages, ShardMessages
from pipeplan.workload.action import Action
from pipeplan.workload.elements import (
    BlockGroup,
    Bucket,
    Dependency,
    Device,
    DeviceMemory,
    Element,
    Hop,
    Loop,
    Operation,
    Players,
    Remade,
    Repetend,
    Round,
    Segment,
    Stage,
    TiedState,
)
from support.paths import ROOT

Data = dict[str, Any]
DOCS = ROOT / "docs"

CLUSTER = Cluster(
    name="c",
    source=Source(method="estimated"),
    devices=(DeviceKind(name="a", count=3, memory_bytes=10), DeviceKind(name="b", count=1)),
    levels=(
        LinkLevel(name="near", group_size=2, latency_ns=1, bandwidth_bytes_per_s=10),
        LinkLevel(name="far", group_size=4, latency_ns=2, bandwidth_bytes_per_s=5),
    ),
    measured=(MeasuredCurve(operation="send", level="near", points=((1, 1), (10, 2))),),
)
EXAMPLES: dict[str, FileModel] = {
    "profile": chain_profile(3, split=(1, 2)),
    "placement": chain_profile(3).placement or Placement.model_construct(),
    "cluster": CLUSTER,
    "plan": chain_plan(3, 4, repetend=True),
    "modules": Modules(
        name="m",
        placement="one-to-one",
        num_ranks=1,
        num_microbatches=4,
        stages=(
            StageModules(rank=0, devices=(0, 1), blocks=("b",), modules=("layers.0",), microbatch_size=2, shards=2),
        ),
    ),
    "cover": Cover(
        name="m",
        profile_sha256="0" * 64,
        microbatch_size=1,
        predicted_ns=3,
        cover=(
            CoveredGroup(blocks=("a", "b"), backend="inductor", ns=2),
            CoveredGroup(blocks=("c",), backend="eager", ns=1),
        ),
    ),
}


# What is refused -----------------------------------------------------------------------------------------------


def put(path: str, value: object) -> Callable[[Data], None]:
    def damage(data: Data) -> None:
        *parents, last = path.split(".")
        part: Any = data
        for key in parents:
            part = part[int(key)] if isinstance(part, list) else part[key]
        part[int(last) if isinstance(part, list) else last] = value

    return damage


def remove(path: str) -> Callable[[Data], None]:
    def damage(data: Data) -> None:
        *parents, last = path.split(".")
        part: Any = data
        for key in parents:
            part = part[int(key)] if isinstance(part, list) else part[key]
        del part[int(last) if isinstance(part, list) else last]

    return damage


PROFILE_DAMAGES = [
    (put("kind", "recipe"), "kind: Input should be 'profile', got 'recipe'"),
    (put("schema_version", 99), "schema_version: Input should be 1"),
    (remove("name"), "name: Field required"),
    (put("nme", "x"), "nme: Extra inputs are not permitted, got 'x'"),
    (
        put("blocks.1.costs.0.forward_ns", "12"),
        "blocks[1].costs[0].forward_ns: Input should be a valid integer, got '12'",
    ),
    (
        put("blocks.1.costs.0.forward_ns", 1.0),
        "blocks[1].costs[0].forward_ns: Input should be a valid integer, got 1.0",
    ),
    (
        put("blocks.1.costs.0.forward_ns", True),
        "blocks[1].costs[0].forward_ns: Input should be a valid integer, got True",
    ),
    (
        put("blocks.1.costs.0.forward_ns", -1),
        "blocks[1].costs[0].forward_ns: Input should be greater than or equal to 0",
    ),
    (
        put("blocks.1.costs.0.forward_ns", 10**16),
        "blocks[1].costs[0].forward_ns: Input should be less than or equal to",
    ),
    (put("blocks.1.costs.0.microbatch_size", 0), "blocks[1].costs[0].microbatch_size: Input should be greater"),
    (remove("blocks.1.costs.0.weight_grad_ns"), "blocks[1].costs[0]: input_grad_ns and weight_grad_ns come together"),
    (put("blocks.1.costs.0", {"microbatch_size": 1, "forward_ns": 1}), "blocks[1].costs[0]: give backward_ns, or"),
    (
        put("blocks.1.costs.0.spread", {"forward": 0.1}),
        "blocks[1].costs[0].spread.forward.[key]: Input should be 'forward_ns'",
    ),
    (put("blocks.1.costs", []), "blocks[1].costs: List should have at least 1 item"),
    (put("blocks.1.id", "block0"), "blocks[1].id 'block0' is already the id of blocks[0]"),
    (
        put("blocks.1.id", "a\nb"),
        "blocks[1].id: has U+000A at character 2, which no text may have; remove it, got 'a\\nb'",
    ),
    (put("blocks.1.dimensions", {"hidden": 0}), "blocks[1].dimensions.hidden: Input should be greater"),
    (
        lambda data: data["blocks"][0]["costs"].append(data["blocks"][0]["costs"][0]),
        "blocks[0]: costs[1] is for the same",
    ),
    (put("edges.0.target", "block9"), "edges[0] names 'block9', which is not a block"),
    (put("edges.0.target", "block0"), "edges[0] joins 'block0' to itself"),
    (lambda data: data["edges"].append(data["edges"][0]), "edges[2] repeats the edge 'block0' -> 'block1'"),
    (
        lambda data: data["edges"].append({"source": "block2", "target": "block0"}),
        "edges form a cycle of 3: block0 -> ",
    ),
    (put("placement.stages.0.devices", [0, 0]), "placement.stages[0]: devices name a device twice"),
    (put("placement.stages.0.devices", [0, 1]), "placement.stages[0]: shards 1 x replicas 1 must equal the 2 devices"),
    (put("placement.stages.0.blocks", ["block0", "block0"]), "placement.stages[0]: blocks name a block twice"),
    (put("placement.stages.0.devices", [7]), "placement: stages[0] stands on device 7, but num_devices is 3"),
    (put("placement.stages.0.blocks", ["block1"]), "placement: block 'block1' is in stages[0] and in stages[1]"),
    (put("placement.stages.0.blocks", ["other"]), "placement.stages[0] has block 'other', which is not in the profile"),
    (remove("placement.stages.2"), "placement leaves out block 'block2' (1 in all)"),
    (lambda data: data["placement"]["stages"].reverse(), "placement puts 'block0' in stage 2, after stage 1"),
    (put("source.method", "guessed"), "source.method: String should match pattern"),
    (put("source.date", "yesterday"), "source.date: String should match pattern"),
    (put("\x1b[31m", 1), "\\x1b[31m: Extra inputs are not permitted, got 1"),
]


def of_inference(change: Callable[[Data], None]) -> Callable[[Data], None]:
    """A change to a profile that has become one of inference."""
    kept = ("microbatch_size", "forward_ns", "activation_bytes", "workspace_bytes")

    def damage(data: Data) -> None:
        data["mode"] = "inference"
        for block in data["blocks"]:
            block |= {"gradient_bytes": 0, "master_bytes": 0, "optimizer_bytes": 0}
            block["costs"] = [{key: row[key] for key in kept} for row in block["costs"]]
        change(data)

    return damage


INFERENCE_DAMAGES = [
    (put("mode", "training"), "blocks[0].costs[0]: give backward_ns, or input_grad_ns and weight_grad_ns; or mode"),
    (put("mode", "serving"), "mode: Input should be 'training' or 'inference', got 'serving'"),
    (put("blocks.1.costs.0.backward_ns", 3), "blocks[1].costs[0] states backward_ns, which the mode 'inference'"),
    (put("blocks.1.costs.0.weight_grad_bytes", 3), "blocks[1].costs[0] states weight_grad_bytes, which the mode"),
    (put("blocks.1.costs.0.recompute", True), "blocks[1].costs[0] states recompute, which the mode 'inference'"),
    (put("step_bytes_per_s", 10), "step_bytes_per_s is of the optimizer, which the mode 'inference' does not have"),
    (put("blocks.0.optimizer_bytes", 3), "blocks[0] states bytes of gradients, master copies or an optimizer, and"),
    (
        lambda data: data["blocks"][0].update(parameter_bytes=2, gradient_bytes=None),
        "blocks[0] leaves gradient_bytes open, which means as many as parameter_bytes; the mode 'inference' keeps none",
    ),
]
PLAN_DAMAGES = [
    (put("starts_ns.0F.1", -1), "starts_ns.0F[1]: Input should be greater than or equal to 0, got -1"),
    (put("starts_ns.0X", [1]), "starts_ns.0X.[key]: String should match pattern"),
    (put("starts_ns.9F", [1]), "starts_ns names 9F, which is not an operation"),
    (remove("starts_ns.1B"), "starts_ns leaves out operation 1B"),
    (put("starts_ns.1B", [0] * 5), "starts_ns[1B] has 5 starts for 4 micro-batches"),
    (put("num_microbatches", 5), "starts_ns[0F] has 4 starts for 5 micro-batches"),
    (put("programs.0.0", "0F"), "programs[0][0]: String should match pattern"),
    (put("programs.0.0", "00F0"), "programs[0][0]: String should match pattern"),
    (put("programs.0.0", "٠F0"), "programs[0][0]: String should match pattern"),
    (put("programs.0.0", "0F0>1"), "programs[0][0]: String should match pattern"),
    (remove("programs.0"), "programs has 2 entries for 3 devices"),
    (remove("predicted.memory.0"), "predicted.memory has 2 entries for 3 devices"),
    (put("predicted.gap", -0.1), "predicted.gap: Input should be greater than or equal to 0"),
    (put("predicted.bubble_rate", 1.1), "predicted.bubble_rate: Input should be less than or equal to 1"),
    (put("stages.0.devices", [3]), "stages[0] stands on device 3, but the plan has 3 devices"),
    (put("stages.0.devices", [0, 0]), "stages[0].devices name a device twice"),
    (put("stages.0.devices", [0, 1]), "stages[0]: shards 1 x replicas 1 must equal the 2 devices"),
    (put("stages.0.microbatch_size", 3), "stages[0].microbatch_size 3 does not divide the mini-batch of 4"),
    (put("operations.0.stage", 3), "operations[0] is of stage 3, but there are 3 stages"),
    (put("operations.0.stage", 1), "operations[1] repeats operation 1F"),
    (put("operations.0.duration_ns", 0), "operations[0].duration_ns: Input should be greater than or equal to 1"),
    (put("operations.0.kind", "X"), "operations[0].kind: String should match pattern"),
    (put("dependencies.0.source", "7F"), "dependencies[0] names 7F, which is not an operation"),
    (put("dependencies.0.target", "0F"), "dependencies[0] joins 0F to itself"),
    (
        put("dependencies.3.hops.0.source_device", 2),
        "dependencies[3].hops[0] leaves from device 2, where 0F does not run",
    ),
    (put("dependencies.3.hops.0.target_device", 2), "dependencies[3].hops[0] ends on device 2, where 1F does not run"),
    (remove("repetend.first.0F"), "repetend.first must name every operation once; 0F is missing or unknown"),
    (put("provenance.profile_sha256", "00"), "provenance.profile_sha256: String should match pattern"),
]
CLUSTER_DAMAGES = [
    (put("levels.1.name", "near"), "levels have a name twice"),
    (put("levels.1.group_size", 3), "levels must nest: group_size 3 is not a larger multiple of 2"),
    (remove("levels.1"), "the outermost level joins 2 devices, but the cluster has 4"),
    (put("measured.0.level", "x"), "measured[0].level 'x' is not a level"),
    (put("measured.0.points", [[2, 1], [1, 1]]), "measured[0]: points must have ascending bytes"),
    (put("devices", []), "devices: List should have at least 1 item"),
    (put("devices.0.count", 65535), "devices add up to 65536"),
]
DAMAGES = [
    *(("profile", damage, text) for damage, text in PROFILE_DAMAGES),
    *(("profile", of_inference(damage), text) for damage, text in INFERENCE_DAMAGES),
    *(("plan", damage, text) for damage, text in PLAN_DAMAGES),
    *(("cluster", damage, text) for damage, text in CLUSTER_DAMAGES[:-1]),
    ("cluster", put("devices.0.count", 65536), "devices add up to 65537, more than the 65536 a cluster may have"),
]


@pytest.mark.parametrize(("kind", "damage", "text"), DAMAGES, ids=[text for *_, text in DAMAGES])
def test_what_is_refused_and_how(kind: str, damage: Callable[[Data], None], text: str) -> None:
    data = json.loads(to_json(EXAMPLES[kind]))
    damage(data)
    with pytest.raises(FileError) as caught:
        parse(json.dumps(data), FORMATS[kind], "file.json")
    assert str(caught.value).startswith(f"file.json: not a valid {kind} file (docs/schema/{kind}.schema.json")
    assert any(problem.startswith(text) for problem in caught.value.problems), caught.value.problems
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("given", "needed"), list(permutations(FORMATS, 2)))
def test_another_kind_of_file_is_told_in_one_line(given: str, needed: str) -> None:
    with pytest.raises(FileError, match=rf"^file: this is a {given}, where a {needed} is needed; \w.*$") as caught:
        parse(to_json(EXAMPLES[given]), FORMATS[needed], "file")
    assert not caught.value.problems


def keys_of(part: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where every key of a file stands; of a list's elements those of the first."""
    for key, inner in part.items() if isinstance(part, dict) else []:
        yield (*path, key)
        yield from keys_of(inner, (*path, key))
    if isinstance(part, list) and part:
        yield from keys_of(part[0], (*path, "0"))


@pytest.mark.parametrize(("kind", "least"), [("profile", 30), ("placement", 5), ("cluster", 15), ("plan", 60)])
def test_every_misspelt_key_is_asked_about(kind: str, least: int) -> None:
    text, asked = to_json(EXAMPLES[kind]), 0
    for *parents, key in keys_of(json.loads(text)):
        data = json.loads(text)
        put(".".join([*parents, f"{key}q"]), 1)(data)
        with pytest.raises(FileError) as caught:
            parse(json.dumps(data), FORMATS[kind])
        problem = next((each for each in caught.value.problems if "Extra inputs" in each), None)
        if problem is not None:  # not where keys are names
            asked += 1
            assert re.search(rf", got 1; did you mean (\w+ or )*{key}( or \w+)*\?$", problem), problem
    assert asked > least


def test_a_key_like_no_other_is_answered_with_all() -> None:
    data = json.loads(to_json(CLUSTER))
    put("devices.0.zzz", 1)(data)
    with pytest.raises(FileError, match=r"devices\[0\].zzz: Extra .*, got 1; choose from name, count, memory_bytes"):
        parse(json.dumps(data), Cluster)


def test_prices_add_up() -> None:
    """All that a file may say comes to numbers that JSON has."""
    data = json.loads(to_json(CLUSTER))
    put("devices.0.price_per_hour", 1e308)(data)
    with pytest.raises(FileError, match=r"devices\[0\].price_per_hour: .* less than or equal to 1000000000000000"):
        parse(json.dumps(data), Cluster)


def test_a_profile_of_inference_has_forwards_alone() -> None:
    data = json.loads(to_json(EXAMPLES["profile"]))
    assert "mode" not in data
    of_inference(lambda data: None)(data)
    read = parse(json.dumps(data), Profile, "file")
    assert read.is_inference
    assert not any(row.has_backward for block in read.blocks for row in block.costs)
    assert json.loads(to_json(read))["mode"] == "inference"


def test_a_profile_is_no_plan_yet() -> None:
    with pytest.raises(FileError, match="search it first"):
        parse(to_json(EXAMPLES["profile"]), Plan, "file")


def test_many_problems_are_cut() -> None:
    data = json.loads(to_json(CLUSTER)) | {f"key{index}": 1 for index in range(20)}
    with pytest.raises(FileError) as caught:
        parse(json.dumps(data), Cluster)
    assert len(caught.value.problems) == 9
    assert caught.value.problems[-1] == "... and 12 more"


@pytest.mark.parametrize("text", ["", "{", "[1", "{'a': 1}", "\ufeff{}", '{"a": 1} x', "nul"])
def test_what_is_not_json_is_told_with_its_line(text: str) -> None:
    with pytest.raises(FileError, match=r"^file: not readable as JSON: .* at line 1 column \d+$"):
        parse(text, Plan, "file")


def test_bytes_that_are_not_utf8() -> None:
    with pytest.raises(FileError, match=r"^file: "):
        parse(b'{"name": "\xff"}', Plan, "file")


# Actions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["0F0", "12B345", "7I3", "7W3", "1SEND_F0", "2RECV_B9>1", "1SEND_F0>3@2", "1SEND_B0@2"]
)
def test_actions_read_as_written(text: str) -> None:
    action = Action.parse(text)
    assert str(action) == text
    assert action.operation == re.split(r"(?<=[A-Z])\d", text)[0]
    assert str(replace(action, peer_stage=None, peer_device=None)) == re.split("[>@]", text)[0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F0",
        "0F",
        "0X0",
        "0F0 ",
        " 0F0",
        "0F0\n",
        "-1F0",
        "00F0",
        "0F01",
        "0F0>1",
        "0F0@1",
        "٠F0",
        "0SEND_W0",
        "1F12345678",
    ],
)
def test_what_is_no_action(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action"):
        Action.parse(text)


# Reading and writing -------------------------------------------------------------------------------------------


READERS: dict[str, Callable[[str], FileModel]] = {
    "profile": read_profile,
    "placement": read_placement,
    "modules": read_modules,
    "cover": read_cover,
    "cluster": read_cluster,
    "plan": read_plan,
}


@pytest.mark.parametrize("kind", FORMATS)
def test_files_come_back_as_they_were(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_file(EXAMPLES[kind], str(path))
    assert READERS[kind](str(path)) == EXAMPLES[kind]
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask()
    assert os.listdir(tmp_path) == ["file.json"]


def umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"
    path.write_text("old", encoding="utf-8")

    def fail(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(FileError, match=r"file.json: cannot be written: No space left on device"):
        write_file(CLUSTER, str(path))
    assert path.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["file.json"]


def test_links_and_modes_stay(tmp_path: Path) -> None:
    target, link = tmp_path / "real.json", tmp_path / "link.json"
    target.write_text("old", encoding="utf-8")
    target.chmod(0o640)
    link.symlink_to(target)
    write_file(CLUSTER, str(link))
    assert link.is_symlink()
    assert read_cluster(str(target)) == CLUSTER
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_devices_are_written_through() -> None:
    write_file(CLUSTER, os.devnull)
    assert not Path(os.devnull).is_file()


def test_dash_is_stdin_and_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_file(CLUSTER, "-")
    text = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert read_cluster("-") == CLUSTER
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{")))
    with pytest.raises(FileError, match=r"^<stdin>: not readable"):
        read_cluster("-")


def test_paths_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileError, match=r"absent.json: cannot be read: No such file"):
        read_plan(str(tmp_path / "absent.json"))
    with pytest.raises(FileError, match="cannot be read: Is a directory"):
        read_plan(str(tmp_path))
    with pytest.raises(FileError, match="cannot be written: No such file"):
        write_file(CLUSTER, str(tmp_path / "no" / "file.json"))
    with pytest.raises(FileError, match="cannot be written: Is a directory"):
        write_file(CLUSTER, str(tmp_path))
    write_file(CLUSTER, str(tmp_path / "file.json"))
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 10)
    with pytest.raises(FileError, match="is more than the 10 a file may have"):
        read_cluster(str(tmp_path / "file.json"))


def test_the_fingerprint_is_of_the_meaning() -> None:
    again = parse(json.dumps(json.loads(to_json(CLUSTER)), indent=7), Cluster)
    assert sha256_of(again) == sha256_of(CLUSTER)
    assert sha256_of(CLUSTER.model_copy(update={"name": "d"})) != sha256_of(CLUSTER)
    assert sha256_of(CLUSTER.model_copy().read_as("an earlier one")) == "an earlier one"
    assert again == parse(to_json(CLUSTER), Cluster), "that one knows its fingerprint makes no difference"


# Schemas and documentation -------------------------------------------------------------------------------------


def test_schemas_are_current() -> None:
    stored = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "schema").iterdir()}
    assert stored == schema.schema_files(), "run python -m pipeplan.files.schema docs/schema"


def test_schema_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert schema.main([str(tmp_path)]) == 0
    assert schema.main(["--check", str(tmp_path)]) == 0
    (tmp_path / "plan.schema.json").write_text("{}", encoding="utf-8")
    (tmp_path / "cluster.schema.json").unlink()
    assert schema.main(["--check", str(tmp_path)]) == 1
    told = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in told] == [str(tmp_path / f"{kind}.schema.json") for kind in ("cluster", "plan")]
    assert schema.main([]) == 2
    assert schema.main([str(tmp_path / "absent")]) == 2


SECTIONS: dict[str, type[FileModel | Element]] = {
    "Fusion of a profile": BackendFusion,
    "Refusal of a profile": BackendRefusal,
    "Whole run of a profile": WholeRun,
    "Group of a whole run": RunGroup,
    "Cover": Cover,
    "Group of a cover": CoveredGroup,
    "Profile": Profile,
    "Source of a profile or a cluster": Source,
    "Block of a profile": Block,
    "Recipe of a profile or a plan": Recipe,
    "Tied parameter of a profile": TiedParameter,
    "Cost row of a block": CostRow,
    "Ring of a cost row": RingCosts,
    "Messages of a profile": RowMessages,
    "Messages of shards": ShardMessages,
    "Messages of shared sequences": SequenceMessages,
    "Messages of shared experts": ExpertMessages,
    "Phase row of a block": PhaseRow,
    "Edge of a profile": Edge,
    "Placement": Placement,
    "Stage of a placement": PlacedStage,
    "Modules": Modules,
    "Stage of a file of modules": StageModules,
    "Cluster": Cluster,
    "Devices of a cluster": DeviceKind,
    "Level of a cluster": LinkLevel,
    "Failure domain of a cluster": FailureDomain,
    "Measured curve of a cluster": MeasuredCurve,
    "Plan": Plan,
    "Players of a program": Players,
    "Elements that go on": Onward,
    "Program of a folded plan": PackedProgram,
    "Starts of a folded plan": PackedStarts,
    "Device of a plan": Device,
    "Stage of a plan": Stage,
    "Segment of a stage": Segment,
    "Remade tensor of a stage": Remade,
    "Group of blocks of a stage": BlockGroup,
    "Bucket of a stage": Bucket,
    "Tied state of a plan": TiedState,
    "Operation of a plan": Operation,
    "Dependency of a plan": Dependency,
    "Hop of a dependency": Hop,
    "Repetend of a plan": Repetend,
    "Loop of a plan": Loop,
    "Round of a loop": Round,
    "Predicted figures of a plan": Predicted,
    "Memory of a device": DeviceMemory,
    "Decode steps of a plan": Decode,
    "Provenance of a plan": Provenance,
    "Another plan that a search found": AlternativeFigures,
    "Profile of a kind of device": KindSource,
}


def sections() -> dict[str, str]:
    """Parts of docs/files.md by their headings."""
    parts = re.split(r"^#+ (.*)$", (DOCS / "files.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_key_is_documented(heading: str) -> None:
    rows = re.findall(r"^\| (`.*?) \|", sections()[heading], re.MULTILINE)
    documented = [key for row in rows for key in re.findall("`(.*?)`", row)]
    assert documented == list(fields_of(SECTIONS[heading]))


def fields_of(part: type[FileModel | Element]) -> dict[str, Any]:
    """The keys of a part of a file with their types."""
    if not issubclass(part, Element):
        return dict(part.model_fields)
    return {key: hint for key, hint in get_type_hints(part, include_extras=True).items() if key[0] != "_"}


def test_no_other_part_of_a_file_is_left_out() -> None:
    found: set[type[FileModel | Element]] = set()
    waiting: list[Any] = list(FORMATS.values())
    while waiting:
        each = waiting.pop()
        if isinstance(each, type) and issubclass(each, FileModel | Element) and each not in found:
            found.add(each)
            waiting += [getattr(field, "annotation", field) for field in fields_of(each).values()]
        waiting += getattr(each, "__args__", ())
        waiting += [each.__value__] if hasattr(each, "__value__") else []
    assert found == set(SECTIONS.values()) - {Onward, PackedProgram, PackedStarts}  # which are read as other things


def test_examples_of_the_documentation_read_and_fit_each_other() -> None:
    read = {}
    for kind, model in FORMATS.items():
        (text,) = re.findall(r"```json\n(.*?)```", sections()[kind.capitalize()], re.DOTALL)
        read[kind] = parse(text, model)
    plan, profile = read["plan"], read["profile"]
    assert isinstance(plan, Plan)
    assert isinstance(profile, Profile)
    assert check(plan, profile).problems == ()
    assert profile.placement == read["placement"]
