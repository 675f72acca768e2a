"""Groups that backends run: built, compared with eager torch and timed; what is wrong or fails is refused."""

from __future__ import annotations

import copy
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pipeplan
from pipeplan.errors import ExecutionError
from pipeplan.files import CostRow, Cover, Profile, parse
from pipeplan.kernels.backend import known_backends
from pipeplan.kernels.operators import GraphOperator, OperatorDag
from pipeplan.kernels.patterns import is_op, wildcard
from pipeplan.runtime.backends.building import BuiltGroup, GroupBuilder, GroupModule
from pipeplan.runtime.backends.comparing import in_one, require_same
from pipeplan.runtime.models.load import load_where_even
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.parallel import device
from pipeplan.runtime.parallel.batch_norms import batch_norm
from pipeplan.runtime.profiling import groups
from pipeplan.runtime.profiling.benches import RowKey
from pipeplan.runtime.profiling.forwards import ForwardBench
from pipeplan.runtime.profiling.groups import GroupBenches
from support.commands import pipeplan as command
from support.marks import slow_but

OWN = """
import os
import torch
from torch import nn
from pipeplan.kernels.backend import Backend
from pipeplan.kernels.patterns import is_op, wildcard
from pipeplan.kernels.rules import PatternRule

class Alone(PatternRule):
    def op_rule(self, op):
        return op.kind == "ffn"

NAMES = ("same", "wrong", "raises", "dies")
pair = is_op("ffn")(is_op("attention")(wildcard()))
BACKENDS = tuple(Backend(n, rule=Alone(), patterns=(pair,) if n == "same" else (), trains=n != "wrong") for n in NAMES)
BACKENDS += (Backend("dies-in-runs", rule=PatternRule(), whole=True),)
BUILT = []

def build(name, module, inputs, training):
    if name == "raises":
        raise RuntimeError("cannot compile this")
    BUILT.extend([name] * module.whole)
    if name == "dies" or BUILT.count("dies-in-runs") > 1:
        os.abort()
    return module if name in ("same", "dies-in-runs") else lambda *taken: module(*taken) * 1.01
"""


def model() -> Model:
    how = {"sequence": 16, "grain": None, "shared": (), "shards": (1,)}
    found, _ = load_where_even("gpt2-tiny", **how, meta=False)
    return found


def benches(*names: str, training: bool) -> GroupBenches:
    known = known_backends()
    return GroupBenches(
        model(),
        dtype=torch.float32,
        device="cpu",
        seed=0,
        training=training,
        repeats=2,
        warmup=0,
        builders={name: GroupBuilder.of(name, known[name].module) for name in names},
        tolerances={name: known[name].tolerance for name in names},
    )


def test_blocks_are_described_by_what_they_call() -> None:
    found = {each.id: each for each in benches("eager", training=False).described(1)}
    assert "scaled_dot_product_attention" in found["layer0.attention"].attributes["calls"]
    assert "scaled_dot_product_attention" not in found["layer0.ffn"].attributes["calls"]
    assert found["layer0.ffn"].inputs == ("layer0.attention",)
    assert found["layer0.ffn"].alike == found["layer1.ffn"].alike != found["layer1.attention"].alike


def test_alike_blocks_of_a_group_have_parameters_of_their_own() -> None:
    own = benches("eager", training=False)
    alike = [each.id for each in own.described(1) if each.kind == "attention"]
    assert len(alike) > 1
    first, second, *_ = own.wired(alike).module.blocks
    again, *_ = own.wired(alike[1:]).module.blocks
    wanted = model().build(alike[1], 0)
    differ = 0
    for name, one in first.named_parameters():
        two = second.get_parameter(name)
        assert torch.equal(two, wanted.get_parameter(name))
        assert torch.equal(two, again.get_parameter(name))
        differ += not torch.equal(one, two)
    assert differ, "a library would compute both at once"


def test_patterns_of_the_page_match_what_is_captured() -> None:
    found, _ = load_where_even("dcgan", sequence=None, grain="operator", shared=(), shards=(1,), meta=False)
    how = {"dtype": torch.float32, "device": "cpu", "seed": 0, "repeats": 1, "warmup": 0, "training": False}
    blocks = GroupBenches(found, builders={}, tolerances={}, **how).described(1)  # type: ignore[arg-type]
    graph = OperatorDag(GraphOperator(b.id, b.kind, b.inputs, b.attributes, (b.alike,)) for b in blocks)
    norm = is_op("norm")(is_op("convolution")(wildcard()).has_attr({"channels": 512}))
    relu = is_op("elementwise")(norm).has_attr({"calls": lambda names: "relu" in names})
    assert [*relu.matches(graph)] == [("layers.0.grow", "layers.0.norm", "layers.0.active")]


def test_switches_of_eager_torch_run_forward_and_backward() -> None:
    measured = benches("onednn-off", "attention-math", "channels-last", training=True)
    for backend in ("onednn-off", "attention-math"):
        row, change = measured.measure(["layer0.attention"], 2, backend)
        assert (row.backend, row.microbatch_size, row.repeats) == (backend, 2, 2)
        assert row.backward_ns is not None
        assert row.input_grad_ns is None
        assert row.activation_bytes > 0
        assert change is not None
    row, change = measured.measure(["layer0.attention", "layer0.ffn"], 1, "onednn-off")
    assert change is None


@pytest.mark.parametrize(("into", "back"), [(40, 0), (0, 60), (30, 50)])
def test_a_change_of_backend_is_what_the_first_run_after_it_takes_longer(
    into: int, back: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of its own: a run takes 100 ns by eager torch and 70 by the other, and more after one of the other."""
    takes, ran = {"eager": (100, back), "onednn-off": (70, into)}, ["eager"]

    def timed(work: Callable[[], object], where: torch.device) -> tuple[object, int]:
        name = "eager" if isinstance(work, partial) else "onednn-off"
        ns, more = takes[name]
        ran.append(name)
        return work(), ns + more * (ran[-2] != name)

    monkeypatch.setattr(groups, "timed", timed)
    _, change = benches("onednn-off", training=False).measure(["layer0.attention"], 1, "onednn-off")
    assert change == (into + back) // 2
    assert {"eager", "onednn-off"} == set(ran)


class Mixed(nn.Module):
    """A convolution, batch normalisation, an attention and products: something for every backend."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8)
        self.conv, self.mix, self.last = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[sample, 3, rows, columns] to [sample, place, 4]."""
        norm = self.norm
        statistics = norm.weight, norm.bias, norm.running_mean, norm.running_var
        made = batch_norm(self.conv(images), *statistics, self.training, 0.1, 1e-5, False)  # as captured models have it
        made = torch.relu(made).flatten(2).transpose(1, 2)
        heads = (each.unflatten(2, (2, 4)).transpose(1, 2) for each in self.mix(made).chunk(3, dim=2))
        mixed = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return torch.as_tensor(self.last(mixed))


def numbers(module: nn.Module, built: BuiltGroup, images: torch.Tensor, *, training: bool) -> list[torch.Tensor]:
    """What a group gives, and in training the gradients of what it takes and of its parameters."""
    taken = images.clone().requires_grad_(training)
    with built.around(), torch.set_grad_enabled(training):
        made = built.call(taken)
        assert isinstance(made, torch.Tensor)
        if training:
            made.square().sum().backward()
    wanted = [taken, *module.parameters()] if training else []
    gradients = [each.grad for each in wanted if each.grad is not None]
    assert len(gradients) == len(wanted)
    return [made.detach(), *gradients]


@slow_but(
    "name, training",
    [(name, training) for name in sorted(known_backends()) for training in (False, True)],
    lambda each: each[0] not in ("inductor", "onnxruntime", "openvino"),
    lambda each: each == ("inductor", False),
)
def test_every_builder_runs_what_eager_torch_runs(name: str, *, training: bool) -> None:
    """Inductor, which compiles for seconds, among the slow tests, and without gradients among the long ones."""
    backend = known_backends()[name]
    device = "cuda" if torch.cuda.is_available() and "cuda" in backend.devices else "cpu"
    if (reason := backend.absence(device, training=training)) is not None:
        pytest.skip(f"{name}: {reason}")
    torch.manual_seed(0)
    plain, images = Mixed().to(device).train(training), torch.randn(2, 3, 4, 4, device=device)
    group = GroupModule([copy.deepcopy(plain)], [[(-1, 0)]], [(0, 0)], whole=True)
    built = GroupBuilder.of(name, backend.module).build(group, [images.requires_grad_(training)], training=training)
    wanted = numbers(plain, BuiltGroup(plain), images.detach(), training=training)
    found = numbers(group, built, images.detach(), training=training)
    require_same(wanted, found, backend.tolerance, torch.float32)
    group.zero_grad()
    if GroupBuilder.of(name, backend.module).is_deterministic and device == "cpu":
        again = numbers(group, built, images.detach(), training=training)
        assert all(map(torch.equal, found, again)), "bit for bit"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_what_is_far_from_eagers_numbers_is_wrong_in_every_format(dtype: torch.dtype) -> None:
    wanted = torch.linspace(-1, 1, 101).to(dtype)
    step = torch.finfo(dtype).eps
    for tolerance in (1e-4, 1e-3):
        require_same([wanted], [wanted * (1 + 2 * step)], tolerance, dtype)
        for wrong in (torch.zeros_like(wanted), -wanted, wanted + 1):
            with pytest.raises(ExecutionError, match="wrong"):
                require_same([wanted], [wrong], tolerance, dtype)
    with pytest.raises(ExecutionError, match="wrong"):
        require_same([wanted], [wanted * 1.05], 1e-4, dtype)
    require_same([wanted], [wanted * 1.05], 0.1, dtype)


def test_a_gradient_that_is_only_rounding_is_compared_with_all_of_them() -> None:
    """Such as that of the bias of an attention's keys, which is 0."""
    found = [in_one([torch.ones(3), torch.full((2,), noise)]) for noise in (1e-9, -1e-9)]
    require_same(*found, 1e-4, torch.float32)
    assert in_one([]) == []


def test_torchscript_runs_a_group_forward() -> None:
    measured = benches("torchscript", training=False)
    row, _ = measured.measure(["layer0.attention", "layer0.ffn"], 2, "torchscript")
    assert row.forward_ns > 0
    assert row.backward_ns is None
    assert row.compile_ns > row.forward_ns


def own_backends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "own_kernels.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(folder))


PROFILE = ("profile", "gpt2-tiny", "--inference", "--sequence", "8", "--repeats", "2", "--warmup", "0")


def test_what_is_wrong_or_fails_is_refused_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_backends(tmp_path, monkeypatch)
    names = ("--backends", "same,wrong,raises", "--backend-rules", "own_kernels")
    done = command(*PROFILE, *names, "-o", "profile.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "wrong: layer0.ffn at micro-batch size 1: refused: its numbers are off eager's by" in done.stderr
    assert "raises: layer0.ffn at micro-batch size 1: refused: RuntimeError: cannot compile this" in done.stderr
    found = parse((tmp_path / "profile.json").read_text(), Profile)
    assert found.groups_by_backend == {"same": 8}
    assert {each.backend for each in found.refusals} == {"wrong", "raises"}
    cover = json.loads(command("kernels", "profile.json", "--json", cwd=tmp_path).stdout)
    assert {id_ for group in cover["cover"] for id_ in group["blocks"]} == set(cover["blocks"])
    assert cover["single_ns"].keys() == {*cover["backends"]} == {"eager", "same", "wrong", "raises"}
    assert cover["single_ns"]["eager"] > 0
    assert cover["single_ns"]["same"] is cover["single_ns"]["wrong"] is cover["single_ns"]["raises"] is None
    again = command(*PROFILE, *names, "-o", "profile.json", "--json", cwd=tmp_path)
    assert "resuming from profile.json" in again.stderr
    assert json.loads(again.stdout)["backends"] == {"same": 8}
    assert parse((tmp_path / "profile.json").read_text(), Profile) == found


REMEMBERS = """
import torch
from pipeplan.kernels.backend import Backend
from pipeplan.kernels.rules import PatternRule

BACKENDS = (Backend("remembers", rule=PatternRule(), whole=True, trains=False),)
CLOCK = [0]

def build(name, module, inputs, training):
    last = []
    def call(*taken):
        if not last or not all(map(torch.equal, last[0], taken)):
            last[:] = [each.clone() for each in taken], module(*taken)
        CLOCK[0] += 50_000_000 * (len(module.blocks) in (1, 10))
        return last[1]
    return call
"""
"""A library that takes 50 ms for any block alone and for all ten of them, and no time for some together."""


@pytest.mark.slow
def test_the_graph_level_measures_whole_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: blocks in eager torch take 1 ms each. The operator level has no groups of some blocks."""
    (tmp_path / "remembering_kernels.py").write_text(REMEMBERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    clock, forward = importlib.import_module("remembering_kernels").CLOCK, GroupModule.forward

    def slow(module: GroupModule, *taken: torch.Tensor) -> object:
        clock[0] += 1_000_000 * len(module.blocks)
        return forward(module, *taken)

    def now() -> int:
        clock[0] += 1
        return int(clock[0])

    monkeypatch.setattr(GroupModule, "forward", slow)
    monkeypatch.setattr(device, "time", SimpleNamespace(monotonic_ns=now))
    own = ("--backend-rules", "remembering_kernels", "--sequence", "8", "--repeats", "2")
    asked = ("profile", "gpt2-tiny", *own, "--inference", "--backends", "remembers", "--warmup", "0")
    done = command(*asked, "-o", "profile.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    asked = ("kernels", "profile.json", *own, "--graph-level", "--model", "gpt2-tiny", "--json", "-o", "cover.json")
    done = command(*asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said, cover = json.loads(done.stdout), parse((tmp_path / "cover.json").read_text(), Cover)
    level = said["graph_level"]
    assert {group["backend"] for group in said["cover"]} == {"eager"}
    assert round(level["operator_level_ns"], -6) == 10_000_000
    outside = [group for group in level["cover"] if group["backend"] == "eager"]
    assert round(level["measured_ns"], -6) == 1_000_000 * len(outside) < 5_000_000
    assert level["num_failed"] == 0
    assert [(group.blocks, group.backend) for group in cover.cover] == [
        (tuple(group["blocks"]), group["backend"]) for group in level["cover"]
    ]
    assert cover.predicted_ns == level["measured_ns"]

    for after in (5, 300):
        ends = iter([False] * after + [True])

        def interrupting(module: GroupModule, *taken: torch.Tensor, ends: Iterator[bool] = ends) -> object:
            if next(ends, False):
                os.kill(os.getpid(), signal.SIGINT)
            return slow(module, *taken)

        monkeypatch.setattr(GroupModule, "forward", interrupting)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as a process begins: a command that ended ignores it
        done = command(*asked, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        cover = parse((tmp_path / "cover.json").read_text(), Cover)
        if after == 5:
            assert "interrupted before the whole model had run" in " ".join(done.stderr.split())
            assert [list(group.blocks) for group in cover.cover] == [group["blocks"] for group in found["cover"]]
        else:
            assert found["graph_level"]["interrupted"] is True
            assert cover.predicted_ns == found["graph_level"]["measured_ns"] <= level["operator_level_ns"]
    if not torch.cuda.is_available():
        refused = command(*asked, "--device", "cuda", cwd=tmp_path)
        assert (refused.returncode, "--device cuda: torch finds no CUDA device here" in refused.stderr) == (2, True)


ABSENT = """
from pipeplan.kernels.backend import Backend
from pipeplan.kernels.rules import PatternRule

BACKENDS = (Backend("absent", rule=PatternRule(), packages={"no-such-library": ("1", "")}),)

def build(name, module, inputs, training):
    raise AssertionError("it is not installed")
"""


def test_a_backend_that_is_not_installed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "absent_kernels.py").write_text(ABSENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = (*PROFILE, "--backends", "absent", "--backend-rules", "absent_kernels", "-o", "profile.json")
    done = command(*asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = "--backends absent: left out: no-such-library is not installed; pip install no-such-library"
    assert said in " ".join(done.stderr.split())
    assert parse((tmp_path / "profile.json").read_text(), Profile).groups_by_backend == {}


@pytest.mark.slow
def test_more_sizes_are_measured_beside_those_that_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_backends(tmp_path, monkeypatch)
    asked = (*PROFILE, "--backends", "same", "--backend-rules", "own_kernels", "-o", "profile.json", "--batch")
    assert command(*asked, "2", cwd=tmp_path).returncode == 0
    first = parse((tmp_path / "profile.json").read_text(), Profile)
    done = command(*asked, "1", cwd=tmp_path)
    assert (done.returncode, "resuming from profile.json" in done.stderr) == (0, True)
    both = parse((tmp_path / "profile.json").read_text(), Profile)
    assert first.microbatch_sizes == (2,)
    assert both.microbatch_sizes == (1, 2)
    rows = [row for block in both.blocks for row in block.costs] + [row for each in both.fusions for row in each.costs]
    old = [row for block in first.blocks for row in block.costs] + [row for each in first.fusions for row in each.costs]
    assert [row for row in rows if row.microbatch_size == 2] == old
    assert {row.backend for row in rows if row.microbatch_size == 1} == {"eager", "same"}
    assert [run for run in both.whole_runs if run.microbatch_size == 2] == list(first.whole_runs)


def test_what_a_limit_leaves_out_is_said_and_measured_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_backends(tmp_path, monkeypatch)
    asked = (*PROFILE, "--backends", "same", "--backend-rules", "own_kernels", "-o", "profile.json")
    begun = command(*asked, "--measure-limit", "1ns", cwd=tmp_path)
    assert begun.returncode == 0, begun.stderr
    assert "not measured: same: layer0.attention to layer0.ffn at micro-batch size 1, same: layer0.ffn" in begun.stderr
    assert parse((tmp_path / "profile.json").read_text(), Profile).groups_by_backend == {}
    done = command(*asked, cwd=tmp_path)
    assert "not measured: " not in done.stderr
    assert parse((tmp_path / "profile.json").read_text(), Profile).groups_by_backend == {"same": 8}


LLAMA = (
    "LlamaConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2, "
    "num_key_value_heads=1, vocab_size=50)"
)
CAPTURED = ("runtime_support.weights_models:captured", "--granularity", "operator")
MODELS = {
    "hugging face": ((LLAMA, "--sequence", "8", "--microbatch", "1"), {"attention-math", "onednn-off"}),
    "captured": ((*CAPTURED, "--microbatch", "1"), {"onednn-off"}),
    "hugging face by a library": ((LLAMA, "--sequence", "8", "--inference", "--batch", "1"), {"torchscript"}),
    "captured by a library": ((*CAPTURED, "--inference", "--batch", "1"), {"torchscript"}),
}


@slow_but("kind", list(MODELS), lambda kind: kind == "captured")
def test_models_of_all_kinds_have_groups(kind: str, tmp_path: Path) -> None:
    """Those of attention by what they call, and of torch's switch; in training, and of a library of graphs forward."""
    if "hugging face" in kind:
        pytest.importorskip("transformers")
    arguments, names = MODELS[kind]
    how = ("--repeats", "2", "--warmup", "0", "-o", "profile.json")
    backends = "torchscript" if "library" in kind else "attention-math,onednn-off"
    done = command("profile", *arguments, "--backends", backends, *how, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = parse((tmp_path / "profile.json").read_text(), Profile)
    assert set(found.groups_by_backend) == names
    assert not found.refusals
    cover = pipeplan.choose_kernels(found).cover
    assert {id_ for match in cover.matches for id_ in match.blocks} == {block.id for block in found.blocks}
    if "library" in kind:
        single = pipeplan.choose_kernels(found).single
        assert single["torchscript"] is not None, "it runs the whole model"


def died(folder: Path, name: str, what: str) -> Profile:
    """What a process measures after one that a backend of OWN took down, which is said."""
    (folder / "own_kernels.py").write_text(OWN)
    arguments = (*PROFILE, "--backends", f"{name},same", "--backend-rules", "own_kernels", "-o", "profile.json")
    run = [sys.executable, "-m", "pipeplan", *arguments]
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{what}: the process died with signal SIGABRT" in done.stderr
    return parse((folder / "profile.json").read_text(), Profile)


@pytest.mark.slow
def test_a_backend_that_takes_the_process_down_is_refused(tmp_path: Path) -> None:
    found = died(tmp_path, "dies", "dies: layer0.ffn at micro-batch size 1")
    assert found.groups_by_backend == {"same": 8}
    assert {each.reason for each in found.refusals} == {DIED}


@pytest.mark.slow
@pytest.mark.long
def test_a_run_of_the_whole_model_that_takes_the_process_down_is_refused(tmp_path: Path) -> None:
    """Of a backend that dies when it builds all blocks at once for the second time in a process."""
    found = died(tmp_path, "dies-in-runs", "the whole model by dies-in-runs")
    assert not found.refusals
    (whole,) = (each for each in found.whole_runs if each.reason)
    assert (whole.reason, len(whole.cover)) == (DIED, 1)
    ran = [each for each in found.whole_runs if not each.reason]
    assert {frozenset({"eager"}), frozenset({"dies-in-runs"})} <= {each.backends for each in ran}


DIED = "the process died while it was built or run"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("training", [False, True])
def test_inductor_agrees_with_eager_torch(*, training: bool) -> None:
    row, _ = benches("inductor", training=training).measure(["layer0.ffn"], 2, "inductor")
    assert isinstance(row, CostRow)
    assert (row.backward_ns is not None) == training
    assert row.compile_ns > 10**8


def test_shapes_that_differ_are_refused() -> None:
    measured = benches("eager", training=False)

    class Shorter:
        @staticmethod
        def build(name: str, module: torch.nn.Module, inputs: object, training: bool) -> object:
            return lambda *taken: module(*taken)[:, 1:]

    measured._builders = {"eager": GroupBuilder("eager", Shorter)}  # type: ignore[arg-type]
    with pytest.raises(ExecutionError, match="other shapes"):
        measured.measure(["layer0.ffn"], 1, "eager")


def test_inputs_are_written_before_a_forward_is_timed_but_not_expanded_ones() -> None:
    given = torch.rand(2, 3), torch.rand(1, 3).expand(2, 3), torch.arange(6).view(2, 3)
    before = [(each.clone(), each._version) for each in given]
    bench = ForwardBench(RowKey("b", 2), Sums(), given, (False,) * 3, (), (), torch.device("cpu"))
    bench.time(keep=True)
    assert len(bench.times) == 1
    assert [each._version - old for each, (_, old) in zip(given, before, strict=True)] == [1, 0, 0]
    assert all(torch.equal(each, old) for each, (old, _) in zip(given, before, strict=True))


class Sums(torch.nn.Module):
    def forward(self, *taken: torch.Tensor) -> torch.Tensor:
        return torch.stack([each.float() for each in taken]).sum(0)
