"""Names and keys that are nearly right: every flag, file and catalog table asks which one is meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click import ClickException
from click.testing import CliRunner

from builders.chains import chain_profile
from pipeplan import catalog
from pipeplan.catalog import ExportTarget, ModelSize, export_target, read_table, require_known
from pipeplan.cli.main import cli
from pipeplan.costs.devices import device_preset
from pipeplan.costs.recipes import state_recipe
from pipeplan.errors import FileError, PipeplanError, UsageError, choose_from, did_you_mean
from pipeplan.examples import models
from pipeplan.files import write_file
from pipeplan.files.trace import read_trace
from pipeplan.runtime.models.given_names import configuration_text, is_configuration
from support.paths import GOLDEN

TRACE = json.loads((GOLDEN / "measured_chain.trace.json").read_text(encoding="utf-8"))


def said(*arguments: str) -> str:
    done = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert isinstance(done.exception, PipeplanError | ClickException)
    return done.exception.format_message() if isinstance(done.exception, ClickException) else str(done.exception)


@pytest.fixture(scope="module")
def profile_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("chain") / "profile.json"
    write_file(chain_profile(4, placed=False), str(path))
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "question"),
    [
        ("serach PROFILE", "did you mean search?"),
        ("search PROFILE --devices 2 --scheduler 1f1bb", "did you mean 1f1b or 1f1b+?"),
        ("search PROFILE --devices 2 --placement v-shpae", "did you mean v-shape?"),
        ("search PROFILE --devices 2 --rules gipe", "did you mean gpipe?"),
        ("search PROFILE --devices 2 --recompute al", "did you mean all?"),
        ("compare PROFILE --devices 2 --split-backward ye", "did you mean yes?"),
        ("frontier PROFILE --devices 2 --mode min-tiem", "did you mean min-time?"),
        ("frontier PROFILE --devices 2 --device v100-16g", "did you mean v100-16gb"),
        ("example gtp2", "did you mean gpt2-345m or"),
        ("example shape-mlm", "did you mean shape-mllm"),
        ("example gpt2-345m --device h100_80gb", "did you mean h100-80gb"),
        ("example testbed-tensoropts --devices 4", "did you mean testbed-tensoropt"),
        ("profile gpt2-tiny --dtype flaot32 -o -", "did you mean float32?"),
        ("search PROFILE --devices 2 --placement somewhere", "choose from auto, all, one-to-one"),
    ],
)
def test_a_value_that_is_nearly_right(profile_path: str, arguments: str, question: str) -> None:
    assert question in said(*arguments.replace("PROFILE", profile_path).split())


def test_names_that_training_takes() -> None:
    pytest.importorskip("torch")
    from pipeplan.runtime.models.load import load_model
    from pipeplan.runtime.training.options import TrainOptions

    with pytest.raises(UsageError, match="did you mean gpt2-"):
        load_model("gtp2")
    with pytest.raises(UsageError, match="did you mean adamw or adam"):
        TrainOptions(model="gpt2-tiny", optimizer="adamww").require_consistent()
    with pytest.raises(UsageError, match=r"did you mean cosine\?"):
        TrainOptions(model="gpt2-tiny", lr_schedule="cosin").require_consistent()


@pytest.mark.parametrize(
    ("place", "right", "wrong"),
    [
        (("otherData",), "plan_sha256", "plan_sha265"),
        (("otherData",), "emulated", "emulatd"),
        ((), "traceEvents", "traceEvent"),
        (("traceEvents", 0), "dur", "duration"),
        (("traceEvents", 0, "args"), "device", "devcie"),
    ],
)
def test_a_key_of_a_trace_that_is_nearly_right(tmp_path: Path, place: tuple[Any, ...], right: str, wrong: str) -> None:
    trace = json.loads(json.dumps(TRACE))
    measured = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("pid") == 2]
    trace = {"otherData": trace["otherData"] | {"emulated": True}, "traceEvents": measured}
    inside = trace
    for part in place:
        inside = inside[part]
    inside[wrong] = inside.pop(right)
    (tmp_path / "run.trace").write_text(json.dumps(trace), encoding="utf-8")
    with pytest.raises(FileError, match=f"{wrong} is not known; did you mean {right}"):
        read_trace(str(tmp_path / "run.trace"), 2)


def test_keys_that_tools_add_to_a_trace_are_read_over(tmp_path: Path) -> None:
    events = [event | {"tdur": 1, "tts": 2} for event in TRACE["traceEvents"]]
    (tmp_path / "run.trace").write_text(json.dumps(TRACE | {"traceEvents": events, "stackFrames": {}}))
    assert read_trace(str(tmp_path / "run.trace"), 2).steps


def test_a_value_in_a_file_that_is_nearly_right(tmp_path: Path, profile_path: str) -> None:
    profile = json.loads(Path(profile_path).read_text())
    profile["source"]["method"] = "estimatd"
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    assert "did you mean estimated?" in said("search", str(tmp_path / "profile.json"), "--devices", "2")


@pytest.mark.parametrize(
    ("folder", "name", "read", "right", "wrong"),
    [
        ("devices", "cpu", device_preset, "memory_bytes", "memory_byte"),
        ("recipes", "fp32", state_recipe, "bytes", "byte"),
        ("targets", catalog.names("targets")[0], export_target, "placements", "placement"),
    ],
)
def test_a_key_of_the_catalog_that_is_nearly_right(
    monkeypatch: pytest.MonkeyPatch, folder: str, name: str, read: Any, right: str, wrong: str
) -> None:
    table = read_table(folder, name)
    mistaken = {wrong if key == right else key: value for key, value in table.items()}
    for module in ("pipeplan.catalog", "pipeplan.costs.devices", "pipeplan.costs.recipes"):
        monkeypatch.setattr(f"{module}.read_table", lambda *_: mistaken)
    with pytest.raises(FileError, match=f"{wrong} is not known; did you mean {right}"):
        getattr(read, "__wrapped__", read)(name)


def test_a_dimension_of_a_model_that_is_nearly_right(monkeypatch: pytest.MonkeyPatch) -> None:
    size = models.MODELS["gpt2-345m"]
    mistaken = ModelSize("mine", size.family, {"hiden": 1} | dict(size.dimensions))
    monkeypatch.setitem(models.MODELS, "mine", mistaken)
    with pytest.raises(FileError, match=r"model 'mine' of family gpt: hiden is not known; did you mean hidden\?"):
        models.family_of("mine")


def test_the_question_is_about_names_that_are_near_or_begin_so() -> None:
    known = ["gpt2-345m", "gpt2-762m", "dlrm"]
    assert did_you_mean("dlmr", known) == "did you mean dlrm?"
    assert did_you_mean("gtp2", known) == "did you mean gpt2-345m or gpt2-762m?"
    assert did_you_mean("mixtral", known) == ""
    assert choose_from("mixtral", known) == "choose from gpt2-345m, gpt2-762m, dlrm"
    require_known({"title": ""}, ExportTarget, "here")


def test_capitals_and_punctuation_do_not_matter_and_beginnings_come_first() -> None:
    known = ["llama2-13b", "llama3-8b", "llama3-70b", "h100-80gb", "h100-96gb", "num_hidden_layers", "layer_types"]
    assert did_you_mean("llama3-8B", known) == "did you mean llama3-8b?"
    assert did_you_mean("llama-3-8b", known) == "did you mean llama3-8b?"
    assert did_you_mean("h100", known) == "did you mean h100-80gb or h100-96gb?"
    assert did_you_mean("layers", known, by_word=True) == "did you mean num_hidden_layers?"


def test_known_configurations_with_other_arguments() -> None:
    full, small = (configuration_text(f"llama3-8b{text}") for text in ("", "(num_hidden_layers=4, vocab_size=512)"))
    assert small == full.replace("num_hidden_layers=32", "num_hidden_layers=4").replace("128256", "512")
    assert is_configuration("llama3-8b(num_hidden_layers=4)")
    assert not is_configuration("llama9-8b(num_hidden_layers=4)")
    with pytest.raises(UsageError, match=r"not of the form llama3-8b\(num_hidden_layers=4\)"):
        configuration_text("llama3-8b(4)")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("profile gpt2-tiny --device h100-80gb", "--device h100-80gb is a preset; add --estimate"),
        ("profile gpt2-tiny --estimate --device h100", "did you mean h100-80gb or h100-96gb"),
        ("profile llama3-8B --estimate --device h100-80gb", "did you mean llama3-8b?"),
    ],
)
def test_profile_refuses_names_before_it_imports_torch(
    monkeypatch: pytest.MonkeyPatch, arguments: str, text: str
) -> None:
    def imported(*_: object) -> None:
        raise AssertionError("names are to be looked at first")

    monkeypatch.setattr("pipeplan._api.require_torch", imported)
    assert text in said(*arguments.split(), "-o", "-")


def test_a_long_configuration_is_no_path() -> None:
    """A text with more characters than a file's name may have is looked at as what it is."""
    text = f"LlamaConfig({', '.join(f'hidden_size={number}' for number in range(400))})"
    assert configuration_text(text) == text


def test_a_file_where_a_name_in_it_is_meant(tmp_path: Path, profile_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("", encoding="utf-8")
    for name in ("mine.py", "mine"):
        text = said("profile", name, "-o", "-")
        assert f"model {name!r} is a file of Python; give mine:NAME, a function in it" in text
    assert "mine.py: rules in Python are given by name: --rules mine:NAME" in said(
        "search", profile_path, "--devices", "2", "--rules", "mine.py"
    )
    assert "a file with rules is given by --rules" in said(
        "search", profile_path, "--devices", "2", "--scheduler", "mine.toml"
    )
