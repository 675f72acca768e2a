"""What a training takes from its plan: number format and sequence; and what it says of itself while it runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from builders.chains import chain_plan
from pipeplan import example, example_cluster, search
from pipeplan import run as pipeplan_run
from pipeplan.errors import UsageError
from pipeplan.files import Plan, write_file
from pipeplan.runtime.models.given_names import require_importable
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.shapes import tokens_per_sample
from pipeplan.runtime.training.compatibility import warning_of_format, warning_of_overlap
from pipeplan.runtime.training.options import IS_RANK, TrainOptions
from pipeplan.runtime.training.trainer import dtype_of, model_of
from runtime_support.plans import model_plan
from runtime_support.warm import warm_ranks
from support.commands import pipeplan

_SEQUENCE, _OWN = 4, 16


def plan_for(dtype: str, tokens: int | None = None) -> Plan:
    plan = model_plan(load_model("gpt2-tiny"), [0])
    made = plan.provenance.model_copy(update={"dtype": dtype, "tokens_per_sample": tokens})
    return plan.model_copy(update={"provenance": made, "recipe": None})


@pytest.mark.parametrize(
    ("planned", "asked", "dtype"),
    [
        ("bfloat16", {}, "bfloat16"),
        ("float64", {}, "float64"),
        ("", {}, "float32"),
        ("float16", {}, "bfloat16"),
        ("int8", {}, "float32"),
        ("bfloat16", {"dtype": "float64"}, "float64"),
        ("bfloat16", {"precision": "bf16-autocast"}, "float32"),
    ],
)
def test_the_number_format_is_the_plans(planned: str, asked: dict[str, str], dtype: str) -> None:
    options = TrainOptions("gpt2-tiny", **asked).by_plan(plan_for(planned))
    assert options.dtype == dtype
    assert dtype_of(options) is getattr(torch, dtype)


@pytest.mark.parametrize(
    ("model", "names", "asked", "grain"),
    [
        ("LlamaConfig(num_hidden_layers=2)", ["embedding", "layers.0", "layers.1", "head"], {}, "layer"),
        ("llama3-8b", ["layers.0.attention", "layers.0.ffn"], {}, None),
        ("llama3-8b", ["layers.0", "layers.1"], {"grain": "half"}, "half"),
        ("pkg.mod:factory", ["layers.0", "layers.1"], {}, None),  # children of a Sequential may be called so
        ("llama3-8b", ["embedding", "head"], {}, None),
    ],
)
def test_whole_layers_of_a_configuration_are_the_plans(
    model: str, names: list[str], asked: dict[str, Any], grain: str | None
) -> None:
    plan = chain_plan(len(names), 2)
    stages = [replace(stage, blocks=(name,)) for stage, name in zip(plan.stages, names, strict=True)]
    assert TrainOptions(model, **asked).with_grain_of(plan.model_copy(update={"stages": stages})).grain == grain


@pytest.mark.parametrize(
    ("planned", "asked", "told"),
    [
        ("bfloat16", {"dtype": "float32"}, "for bfloat16 and the run is in float32: .*; leave --dtype out, or profile"),
        (
            "bfloat16",
            {"precision": "bf16-autocast"},
            "the run is in bf16-autocast: parameters are in float32 instead of bfloat16, .*; leave --precision out",
        ),
        ("float16", {"dtype": "float32"}, "for float16 and the run is in float32: .*; leave --dtype out"),
        ("float16", {}, ""),
        ("float16", {"dtype": "bfloat16"}, ""),
        ("float32", {"dtype": "float64"}, "which may need more than a device has; .* profile with --dtype float64"),
        ("bfloat16", {}, ""),
        ("", {"dtype": "float64"}, ""),
        ("float32", {"precision": "bf16-autocast"}, "activations and messages are in bfloat16 instead of float32, "),
        ("", {"precision": "bf16-autocast"}, ""),
        ("float32", {"precision": "fp32"}, ""),
    ],
)
def test_another_format_is_a_warning(planned: str, asked: dict[str, str], told: str) -> None:
    plan = plan_for(planned)
    said = warning_of_format(plan, TrainOptions("gpt2-tiny", **asked).by_plan(plan)) or ""
    assert said.startswith("warning: ") == bool(told)
    assert re.search(told, said)


@pytest.mark.parametrize(
    ("overlap", "zero", "warned"), [("all", 1, True), ("all", 0, False), ("sums", 1, False), ("none", 1, False)]
)
def test_exchanges_that_a_run_does_not_hide_are_a_warning(overlap: str, zero: int, warned: bool) -> None:
    cluster = example_cluster("cluster-h100", devices=2).model_copy(update={"overlap": overlap})
    asked = {"dp": 2, "zero": zero, "mini_batch": 4, "time_limit": 1, "deterministic": True}
    plan = search(example("gpt2-124m", microbatch=[1]), cluster=cluster, **asked).plan
    assert ("gather parameters beside the next forward" in (warning_of_overlap(plan) or "")) == warned


CONFIGURATION = "GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9, n_positions=8)"


def test_sequences_are_as_long_as_the_plans_where_the_model_takes_them() -> None:
    def tokens(model: str, asked: int | None, planned: int | None) -> int | None:
        return tokens_per_sample(model_of(TrainOptions(model, sequence=asked), planned), torch.float32)

    assert tokens("gpt2-tiny", None, _SEQUENCE) == _SEQUENCE
    assert tokens("gpt2-tiny", 8, _SEQUENCE) == 8
    assert tokens("gpt2-tiny", None, 1024) == tokens("gpt2-tiny", None, None) == _OWN
    assert tokens("runtime_support.models:chain", None, _SEQUENCE) is None, "it makes its own"
    pytest.importorskip("transformers")
    assert [tokens(CONFIGURATION, None, planned) for planned in (_SEQUENCE, 9, None)] == [_SEQUENCE, 8, 8]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str], str]:
    """A run of a small model in less than its format and its sequence: folder, what it printed, what its rank said."""
    folder = tmp_path_factory.mktemp("following")
    plan = model_plan(load_model("gpt2-tiny", sequence=_SEQUENCE), [0], num_microbatches=2)
    made = plan.provenance.model_copy(update={"dtype": "bfloat16", "tokens_per_sample": _SEQUENCE})
    write_file(plan.model_copy(update={"provenance": made}), str(folder / "plan.json"))
    asked = ("--model", "gpt2-tiny", "--local", "--steps", 2, "--checkpoint", "saved", "--checkpoint-every", 1)
    with warm_ranks(), _stderr_of_ranks(folder / "errors") as errors:
        done = pipeplan("run", "plan.json", *asked, "--json", cwd=folder)
    return folder, done, errors.read_text(encoding="utf-8")


@contextlib.contextmanager
def _stderr_of_ranks(path: Path) -> Iterator[Path]:
    """What goes to descriptor 2, where ranks write."""
    saved = os.dup(2)
    with path.open("w") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield path
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def test_a_run_follows_its_plan(ran: tuple[Path, subprocess.CompletedProcess[str], str]) -> None:
    _, done, said = ran
    assert done.returncode == 0, done.stderr + said
    figures = json.loads(done.stdout)
    assert figures["dtype"] == "bfloat16"
    assert figures["tokens_per_second"] == pytest.approx(_SEQUENCE * figures["samples_per_second"])
    assert "warning" not in said, "neither of formats nor of sizes"


def test_it_says_that_samples_are_made_up(ran: tuple[Path, subprocess.CompletedProcess[str], str]) -> None:
    _, _, said = ran
    assert said.count("pipeplan: samples are made up; --data trains on yours\n") == 1
    assert not load_model("runtime_support.models:chain").made_up, "its batches are somebody's own"
    assert not model_of(TrainOptions("gpt2-tiny", data="builtin")).made_up


def test_it_says_where_a_checkpoint_is(ran: tuple[Path, subprocess.CompletedProcess[str], str]) -> None:
    folder, _, said = ran
    for step in (1, 2):
        assert said.count(f"pipeplan: checkpoint saved/step-{step:08} written\n") == 1
        assert (folder / f"saved/step-{step:08}").is_dir()


# Before ranks are started ------------------------------------------------------------------------------------------


MODULE = """
raise RuntimeError("a module with the name in it is not run")
def captioner(): ...
class Captions64: ...
if True:
    try:
        tower, (left, right) = 1, (2, 3)
    except ValueError as error: ...
from os import path as place
import os.path
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "raising.py").write_text(MODULE)
    (tmp_path / "models_to_name.py").write_text("def captioner(): ...\nglobals()['made'] = 1\nclass Captions64: ...\n")
    (tmp_path / "broken.py").write_text("def (")
    yield
    for name in ("raising", "models_to_name", "broken"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        *((f"raising:{name}", "") for name in ("captioner", "Captions64", "left", "tower", "place", "os")),
        ("models_to_name", ""),
        ("models_to_name:made", ""),
        ("models_to_name:captionner", "has no attribute 'captionner'; did you mean captioner"),
        ("models_to_name:Caption64", "did you mean Captions64"),
        ("models_to_name.py:captioner", "; leave out .py: models_to_name:captioner"),
        ("model_to_name:captioner", "No module named 'model_to_name'; did you mean models_to_name?"),
        ("broken:name", "SyntaxError"),
        ("raising:nothing", "RuntimeError: a module with the name in it is not run"),
        (":name", "cannot be imported"),
    ],
)
@pytest.mark.usefixtures("modules")
def test_names_are_looked_up_before_ranks_start(path: str, told: str) -> None:
    if not told:
        require_importable(path, "model")
        assert "raising" not in sys.modules
        return
    with pytest.raises(UsageError, match=re.escape(told)):
        require_importable(path, "model")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model": "models_to_name:captionner"}, "model 'models_to_name:captionner' cannot be imported"),
        ({"data": "models_to_name:Caption64"}, "--data 'models_to_name:Caption64' cannot be imported"),
        ({"data": "nowhere.txt"}, "--data nowhere.txt cannot be read: there is no such file"),
        ({"optimizer": "models_to_name:nothing"}, "--optimizer 'models_to_name:nothing' cannot be imported"),
        ({"lr_schedule": "models_to_name:nothing"}, "--lr-schedule 'models_to_name:nothing' cannot be imported"),
        ({"instructions": "models_to_nam"}, "did you mean models_to_name?"),
        ({"model": "gpt2-tinny"}, "did you mean gpt2-tiny"),
        ({"model": "config.json"}, "--model config.json: there is no such file"),
    ],
)
@pytest.mark.usefixtures("modules")
def test_what_ranks_would_refuse_is_refused_before(given: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        TrainOptions(**{"model": "gpt2-tiny", **given}).require_consistent()
    TrainOptions(CONFIGURATION).require_consistent()


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("meta-llama/Meta-Llama-3-8B", "try llama3-8b, or "),
        ("meta-llama/Llama-2-7b-hf", "try llama2-7b, or "),
        ("Qwen/Qwen2-72B", "try qwen2-72b, or "),
        ("somebody/something", ""),
    ],
)
def test_names_of_a_hub(name: str, known: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_model(name)
    assert str(caught.value) == (
        f"model {name!r} is a name of a hub, from which nothing is downloaded; {known}download its config.json and "
        "give the path of that"
    )


def test_a_rank_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a program would that has the model, and calls ``run`` when ranks import it."""
    monkeypatch.setenv(IS_RANK, "0")
    with pytest.raises(UsageError, match='put the call of run under if __name__ == "__main__":'):
        pipeplan_run(plan_for(""), model="gpt2-tiny")
