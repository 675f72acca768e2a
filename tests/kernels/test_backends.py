"""Our backends say what they take without torch, in about a hundred lines each; users add theirs by a module."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from pipeplan.errors import UsageError
from pipeplan.kernels.backend import Backend, chosen_backends, known_backends
from pipeplan.kernels.operators import GraphOperator, OperatorDag
from pipeplan.kernels.patterns import is_op, wildcard
from pipeplan.kernels.rules import AllBut, PatternRule
from support.paths import ROOT

PACKAGE = ROOT / "src" / "pipeplan"
FILES = sorted(path for path in (PACKAGE / "kernels" / "backends").glob("*.py") if path.stem != "__init__")
NAMES = {
    *("eager", "inductor", "onednn", "onednn-off", "torchscript", "channels-last", "onnxruntime", "openvino"),
    *("attention-flash", "attention-efficient", "attention-math", "attention-cudnn"),
    *("cublas", "cublaslt", "cuda-graphs"),
}


def layers(count: int = 3) -> OperatorDag:
    """A transformer in halves of layers."""
    names = ["embedding", *(f"{half}{n}" for n in range(count) for half in ("attention", "ffn")), "head"]
    return OperatorDag(
        GraphOperator(name, name.rstrip("0123456789"), tuple(names[place - 1 : place]), {"calls": calls(name)})
        for place, name in enumerate(names)
    )


def calls(name: str) -> frozenset[str]:
    return frozenset({"scaled_dot_product_attention"} if name.startswith("attention") else {"linear"})


def test_they_are_known_by_name() -> None:
    assert set(known_backends()) == NAMES


@pytest.mark.parametrize("name", ["attention-efficient", "attention-cudnn", "cublas", "cublaslt", "cuda-graphs"])
def test_what_is_for_cuda_says_so_elsewhere(name: str) -> None:
    backend = known_backends()[name]
    assert backend.absence("cpu", training=False) == "it runs on cuda only, and this is cpu"
    assert backend.absence("cuda", training=False) is None
    forward_only = name == "cuda-graphs"
    assert (backend.absence("cuda", training=True) is None) is not forward_only


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_backend_is_about_a_hundred_lines(path: Path) -> None:
    builder = PACKAGE / "runtime" / "backends" / path.name
    assert sum(len(each.read_text(encoding="utf-8").splitlines()) for each in (path, builder)) <= 100


def test_rules_need_no_torch() -> None:
    code = "import sys; from pipeplan.kernels.backend import known_backends as k; k(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_what_compiles_slowly_gets_single_operators_and_the_largest_groups() -> None:
    graph, known = layers(), known_backends()
    groups = known["inductor"].groups(graph)
    assert {len(group) for group in groups} == {1, len(graph)}
    assert len(groups) == len(graph) + 1
    assert {len(group) for group in known["torchscript"].groups(graph)} == {1, 2, 3, 4, len(graph)}
    assert {len(group) for group in known["onnxruntime"].groups(graph)} == {1, len(graph)}


def captured() -> OperatorDag:
    """Two bottlenecks as they are captured operator by operator, between a stem and classes."""
    taken, last = [("stem", "convolution", ())], "stem"
    for block in ("blocks.0", "blocks.1"):
        ids = [f"{block}.{name}" for name in ("reduce", "norm", "mix.first", "mix.second", "add")]
        kinds = ("convolution", "norm", "convolution", "elementwise", "elementwise")
        sources = [(last,), *((each,) for each in ids[:3]), (ids[3], last)]
        taken += zip(ids, kinds, sources, strict=True)
        last = ids[-1]
    taken.append(("classes", "linear", (last,)))
    named = {"norm": "batch_norm", "linear": "linear", "convolution": "convolution", "elementwise": "relu"}
    return OperatorDag(GraphOperator(id_, kind, own, {"calls": {named[kind]}}) for id_, kind, own in taken)


def test_modules_of_the_model_are_groups_of_middle_size() -> None:
    graph, known = captured(), known_backends()
    blocks = {graph.order[1:6], graph.order[6:11]}
    inner = {graph.order[3:5], graph.order[8:10]}
    wanted = blocks | inner | {graph.order[1:11]}
    for name in ("openvino", "onnxruntime", "inductor"):
        groups = {group for group in known[name].groups(graph) if len(group) > 1}
        assert groups == wanted | {graph.order}
    assert wanted <= set(known["torchscript"].groups(graph))
    partly = Backend("mine", rule=AllBut("batch_norm"), modules=True)
    assert {group for group in partly.groups(graph) if len(group) > 1} == inner


def test_channels_last_begins_with_a_convolution() -> None:
    groups = known_backends()["channels-last"].groups(captured())
    assert ("blocks.0.reduce", "blocks.0.norm", "blocks.0.mix.first") in groups
    assert captured().order[1:11] in groups
    singles = {group for group in groups if len(group) == 1}
    assert singles == {(op.id,) for op in captured() if op.kind == "convolution"}


def test_switches_of_eager_torch_take_blocks_that_they_change() -> None:
    graph, known = layers(), known_backends()
    assert known["attention-math"].groups(graph) == (("attention0",), ("attention1",), ("attention2",))
    assert known["channels-last"].groups(graph) == ()
    assert known["cublaslt"].groups(captured()) == (("classes",),)
    convolutions = OperatorDag(
        [GraphOperator("c", "convolution", ()), GraphOperator("r", "relu", ("c",)), GraphOperator("l", "ffn", ("r",))]
    )
    assert ("c", "r") in known["channels-last"].groups(convolutions)
    assert ("l",) not in known["channels-last"].groups(convolutions)


def test_patterns_and_rules_add_up() -> None:
    pair = is_op("ffn")(is_op("attention")(wildcard()))

    class Heads(PatternRule):
        def op_rule(self, op: GraphOperator) -> bool:
            return op.kind == "head"

    backend = Backend("mine", patterns=(pair,), rule=Heads())
    assert backend.groups(layers(2)) == (("head",), ("attention0", "ffn0"), ("attention1", "ffn1"))


@pytest.mark.parametrize(
    ("backend", "device", "training", "said"),
    [
        (Backend("x", devices=("cuda",)), "cpu", False, "runs on cuda only"),
        (Backend("x", trains=False), "cpu", True, "forward only; add --inference"),
        (Backend("x", packages={"no-such-package": ("", "")}), "cpu", False, "pip install no-such-package"),
        (Backend("x", packages={"pydantic": ("1000", "")}), "cpu", False, "is for pydantic 1000"),
        (Backend("x", packages={"pydantic": ("", "2.0")}), "cpu", False, version("pydantic")),
        (Backend("x", packages={"pydantic": ("2", "1000")}), "cpu", False, None),
    ],
)
def test_why_one_cannot_run_here(backend: Backend, device: str, training: bool, said: str | None) -> None:
    found = backend.absence(device, training=training)
    assert (found is None) == (said is None)
    assert said is None or (found is not None and said in found)


def test_users_add_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    text = (
        "from pipeplan.kernels.backend import Backend\nBACKENDS = (Backend('mine'), Backend('inductor', whole=True))\n"
    )
    (tmp_path / "own_backends.py").write_text(text)
    (tmp_path / "bad_backends.py").write_text("BACKENDS = 3\n")
    known = known_backends(["own_backends"])
    assert [each.name for each in chosen_backends(["mine", "mine"], known)] == ["eager", "mine"]
    assert known["inductor"].module == "own_backends"
    for name, said in (("bad_backends", "no BACKENDS"), ("none_such", "cannot be imported")):
        with pytest.raises(UsageError, match=said):
            known_backends([name])
    with pytest.raises(UsageError, match="did you mean inductor"):
        chosen_backends(["inducter"], known)
