"""Weights go out of any plan as one file, with the module's names, and in again under any other."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.files import Plan, write_file
from pipeplan.runtime.launch.local import watch_local
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.training import weight_files, weights
from pipeplan.runtime.training.checkpoint import ParameterChunk, whole_chunk
from pipeplan.runtime.training.options import RunOutcome, TrainOptions
from pipeplan.runtime.training.weights import WeightNames, read_weights, write_weights
from runtime_support import weights_models
from runtime_support.hugging_face import SEQUENCE, text
from runtime_support.known import look_over
from runtime_support.pairs import PAIRS, TINY, pair
from runtime_support.plans import TRAINING, Unsplit, four_devices, model_plan
from runtime_support.warm import warm_ranks
from support.commands import pipeplan
from support.marks import always, asked_for, slow_but

RANK = (sys.executable, "-m", "runtime_support.weights_rank")
SEQUENTIAL, CAPTURED = (f"runtime_support.weights_models:{name}" for name in ("sequential", "captured"))
STEPS = 3


OWN = {name.partition(":")[2]: name for name in (SEQUENTIAL, CAPTURED)}
NAMES = [*PAIRS, *OWN]


def case_of(name: str) -> tuple[str, list[Plan]]:
    """A model and two plans."""
    if name in OWN:
        model = load_model(OWN[name])
        return OWN[name], [model_plan(model, [0, 1, 2]), model_plan(model, [1, 0], split=True)]
    model_name, plans = pair(name)
    return model_name, plans[:2]


SHARES = "a configuration's shares in stages, then divided, then sequences shared, then whole"
QUICK = ("four devices, then two, then one", SHARES, "sequential", "captured")
"""One by one device each, and one that is split; the other pairs, which are trained in, are long."""


def options_of(name: str, **changes: Any) -> TrainOptions:
    return dataclasses.replace(TRAINING, model=name, num_steps=STEPS, **changes)


def legs_of(folder: Path, name: str, plans: list[Plan]) -> list[tuple[Plan, TrainOptions]]:
    """Every plan trains and writes; then each reads what the one before wrote, and only writes it again."""
    files = [str(folder / f"{index}.safetensors") for index in range(len(plans))]
    trained = [(plan, options_of(name, export_weights=file)) for plan, file in zip(plans, files, strict=True)]
    again = [
        (plan, dataclasses.replace(options_of(name, init=file, export_weights=f"{file}.again"), num_steps=0))
        for plan, file in zip([*plans[1:], plans[0]], files, strict=True)
    ]
    return trained + again


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """What real processes wrote, in a folder for each case."""
    found = tmp_path_factory.mktemp("weights")
    legs: list[tuple[Plan, TrainOptions]] = []
    for case in asked_for(request, dict.fromkeys(NAMES)):
        name, plans = case_of(case)
        (found / case).mkdir()
        legs += legs_of(found / case, name, plans)
    job = [{"plan": four_devices(p).model_dump_json(), "options": options.as_json()} for p, options in legs]
    reports: list[Mapping[str, Any]] = []
    with warm_ranks(look_over, [(leg["plan"], leg["options"]) for leg in job]):
        where = "runtime_support.weights_rank:work"
        watch_local(where, [()] * 4, {"legs": job}, TRAINING.timeout_ns, lambda _, told: reports.append(told), RANK)
    assert {report["unwritten"] for report in reports} == {""}
    assert len(reports) == 4 * len(legs)
    return found


def unsplit_state(name: str, plan: Plan) -> dict[str, Tensor]:
    """What training without a plan ends with, by the names in a file."""
    model, options = load_model(name, seed=TRAINING.seed), options_of(name)
    unsplit, names = Unsplit(model, options), WeightNames.of(model, torch.float64)
    for step in range(STEPS):
        unsplit.step(step, plan.mini_batch)
    own = unsplit.parameters()
    return {name: own[".".join(holder)] for holder, name in names.name_of.items() if ".".join(holder) in own}


@slow_but("name", NAMES, QUICK.__contains__, always)
def test_weights_of_any_plan_are_those_of_an_unsplit_run(name: str, folder: Path) -> None:
    model, plans = case_of(name)
    files = [load_file(folder / name / f"{index}.safetensors") for index in range(len(plans))]
    expected = unsplit_state(model, plans[0])
    for found in files:
        assert found.keys() == files[0].keys() >= expected.keys()
        for key, value in expected.items():
            assert found[key].dtype == torch.float64
            torch.testing.assert_close(found[key], value.detach(), rtol=0, atol=1e-12)
        for key in found:
            torch.testing.assert_close(found[key], files[0][key], rtol=0, atol=1e-12)


@slow_but("name", NAMES, QUICK.__contains__, always)
def test_what_goes_in_comes_out(name: str, folder: Path) -> None:
    for path in (folder / name).glob("*.safetensors"):
        assert path.read_bytes() == Path(f"{path}.again").read_bytes()


@pytest.mark.parametrize("name", ["sequential", "captured"])
def test_names_are_the_modules_own(name: str, folder: Path) -> None:
    made: Any = getattr(weights_models, name)
    module: nn.Module = made()[0]
    file = load_file(folder / name / "0.safetensors")
    missing, unexpected = module.double().load_state_dict(file, strict=False)
    assert not unexpected
    state = module.state_dict(keep_vars=True)
    assert {id(state[name]) for name in missing} <= {id(state[name]) for name in file}, "only second names are missing"
    assert len(file) == len({id(tensor) for tensor in state.values()})


def names_of(model: str, **options: Any) -> tuple[Model, WeightNames]:
    found = load_model(model, **options)
    return found, WeightNames.of(found, torch.float32)


@slow_but("name", ["gpt2", "llama", "bert", "t5"], "gpt2".__eq__)
def test_names_are_those_of_transformers(name: str) -> None:
    from pipeplan.runtime.models.huggingface import load

    _, names = names_of(text(name), sequence=SEQUENCE)
    module = load(text(name), sequence=SEQUENCE).module.model
    assert isinstance(module, nn.Module)
    state = module.state_dict(keep_vars=True)
    known = {id(state[key]) for key in names.forms}
    assert known == {id(tensor) for tensor in state.values()}
    assert {*names.forms, *names.aliases} == {*state}
    assert {*names.forms} == {name for name, _ in module.named_parameters()}, "of several the first, as transformers do"
    assert all(names.forms[key].shape == tuple(state[key].shape) for key in names.forms)


@pytest.mark.slow
def test_transformers_load_what_a_plan_wrote(tmp_path: Path) -> None:
    import transformers

    from pipeplan.runtime.models.huggingface import load

    whole = load(text("gpt2"), sequence=SEQUENCE)
    model = load_model(text("gpt2"), sequence=SEQUENCE)
    write_file(model_plan(model, [0, 1], num_microbatches=3), str(tmp_path / "plan.json"))
    path = tmp_path / "model.safetensors"
    flags = ("--model", text("gpt2"), "--sequence", SEQUENCE, "--local", "--steps", 2, "--export-weights", path)
    with warm_ranks():
        done = pipeplan("run", tmp_path / "plan.json", *flags)
    assert done.returncode == 0, done.stderr
    whole.config.save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    own = load_file(path)
    whole.module.model.load_state_dict({**own, "lm_head.weight": own["transformer.wte.weight"]})
    tokens = whole.batch(2, 0, 0)["tokens"]
    with torch.no_grad():
        logits = loaded(input_ids=tokens).logits
        torch.testing.assert_close(logits, whole.module.model(input_ids=tokens, use_cache=False).logits)
        fresh = load(text("gpt2"), sequence=SEQUENCE).module.model(input_ids=tokens, use_cache=False).logits
    assert (logits - fresh).abs().max() > 1e-4, "training has changed them"


# From a hub's folder ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A tiny Llama as transformers writes it: config.json, bfloat16, in several files with an index."""
    from pipeplan.runtime.models.huggingface import load

    found = tmp_path_factory.mktemp("hub")
    torch.manual_seed(5)
    module = load(text("llama"), sequence=SEQUENCE).module.model.to(torch.bfloat16)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    module.save_pretrained(found, max_shard_size="20KB")
    return found, {key: value.detach().clone() for key, value in module.state_dict().items()}


def read_whole(path: Path | str, names: WeightNames) -> dict[str, Tensor]:
    """All that a model has of files; of the first dimension of each tensor a rank may have the last rows alone."""
    held = {name: torch.full(form.shape, torch.nan) for name, form in names.forms.items()}
    parts = []
    for name, tensor in held.items():
        half = tensor.shape[0] // 2
        pieces = [ParameterChunk(tensor.size(), torch.Size([0] * tensor.dim()), tensor[:half])] if half else []
        rest = torch.Size([half] + [0] * (tensor.dim() - 1))
        parts.append((name, [*pieces, ParameterChunk(tensor.size(), rest, tensor[half:])]))
    read_weights(str(path), names, "llama", parts)
    return held


def test_a_hub_s_folder_is_read_in_shards_and_widened(hub: Any) -> None:
    """A folder, or its index; bfloat16 numbers are the same in float32. The folder is a model's name, too."""
    folder, saved = hub
    assert len(list(folder.glob("*.safetensors"))) > 1
    _, names = names_of(str(folder), sequence=SEQUENCE)
    for path in (folder, folder / "model.safetensors.index.json"):
        found = read_whole(path, names)
        assert found.keys() <= saved.keys()
        assert all(torch.equal(found[key], saved[key].float()) for key in found)
    dataclasses.replace(TRAINING, model=str(folder), init=str(folder)).require_consistent()


@pytest.mark.slow
def test_a_run_starts_from_a_hub_s_folder(hub: Any, tmp_path: Path) -> None:
    """What it exports again, without a step, are the same numbers in the parameters' format."""
    folder, saved = hub
    model = load_model(str(folder), sequence=SEQUENCE)
    write_file(model_plan(model, [0, 1]), str(tmp_path / "plan.json"))
    flags = ["--model", str(folder), "--local", "--steps", "0", "--init", str(folder), "--sequence", str(SEQUENCE)]
    with warm_ranks():
        done = pipeplan("run", tmp_path / "plan.json", *flags, "--export-weights", tmp_path / "out.safetensors")
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(found[key].bfloat16(), saved[key]) for key in found)


def test_names_without_the_model_s_body_and_buffers_of_old_releases(hub: Any, tmp_path: Path) -> None:
    """As files that were saved from the body alone: but then the head is missing, unless it is tied."""
    folder, saved = hub
    _, names = names_of(str(folder), sequence=SEQUENCE)
    bare = {key.removeprefix("model."): value for key, value in saved.items()}
    bare["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(bare, tmp_path / "bare.safetensors")
    found = read_whole(tmp_path / "bare.safetensors", names)
    assert all(torch.equal(found[key], saved[key].float()) for key in found)
    save_file({**bare, "adapter.weight": torch.zeros(1)}, tmp_path / "odd.safetensors")
    assert refused(tmp_path / "odd.safetensors", names).endswith("1 tensor not in the model (adapter.weight)")
    save_file({f"module.{key}": value for key, value in saved.items()}, tmp_path / "wrapped.safetensors")
    assert "tensors missing" in refused(tmp_path / "wrapped.safetensors", names)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "needs safetensors files, and has none"),
        ({"pytorch_model.bin": ""}, "has only torch's pickles, which are not read"),
        ({"a.safetensors": "", "b.safetensors": ""}, "several models' files (a.safetensors, b.safetensors, ...)"),
        ({"model.safetensors.index.json": "[]"}, "is not an index of safetensors files with a weight_map: TypeError"),
        (
            {"model.safetensors.index.json": '{"weight_map": {"a": "model-1.safetensors", "b": "../b.safetensors"}}'},
            "names 2 files, of which 2 are not beside it (../b.safetensors, model-1.safetensors): download them",
        ),
    ],
)
def test_folders_without_a_model_s_weights(files: dict[str, str], said: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError) as caught:
        dataclasses.replace(TRAINING, init=str(tmp_path)).require_consistent()
    assert said in str(caught.value)


# What does not fit -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> tuple[Model, WeightNames, dict[str, Tensor]]:
    model, names = names_of(TINY)
    return model, names, {key: torch.zeros(form.shape) for key, form in names.forms.items()}


def refused(path: Path, names: WeightNames) -> str:
    with pytest.raises(UsageError) as caught:
        read_weights(str(path), names, TINY, [])
    return str(caught.value)


def test_all_that_does_not_fit_is_counted_and_the_first_named(tiny: Any, tmp_path: Path) -> None:
    _, names, whole = tiny
    file, (first, second, third, fourth, *_) = dict(whole), list(whole)
    del file[first]
    file |= {second: torch.zeros(3, 3), third: whole[third].double(), "odd": torch.zeros(1), "odder": torch.zeros(1)}
    save_file(file, tmp_path / "wrong.safetensors")
    told = refused(tmp_path / "wrong.safetensors", names)
    assert f"does not fit model 'gpt2-tiny': 1 tensor missing ({first})" in told
    assert "2 tensors not in the model (odd, odder)" in told
    assert f"1 tensor of another shape ({second}: [3, 3], not {list(whole[second].shape)})" in told
    assert f"1 tensor of another format (see --dtype) ({third}: F64, not F32)" in told
    save_file({fourth: whole[fourth]}, tmp_path / "few.safetensors")
    told = refused(tmp_path / "few.safetensors", names)
    assert f"{len(whole) - 1} tensors missing ({first}, {second}, {third}, ...)" in told


def test_what_is_no_file_of_weights(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "text.safetensors").write_text("these are no weights")
    assert "cannot be read as safetensors" in refused(tmp_path / "text.safetensors", tiny[1])


def test_second_names_are_taken(tmp_path: Path) -> None:
    """A file may call a shared weight as any of the layers that have it, or have it under each name."""
    _, names = names_of(SEQUENTIAL)
    assert names.aliases == {"head.weight": "words.weight"}
    file = {key: torch.rand(form.shape) for key, form in names.forms.items()}
    held = torch.zeros(8, 6)
    for several in (False, True):
        kept = {"head.weight" if key == "words.weight" else key: value for key, value in file.items()}
        kept |= {"words.weight": file["words.weight"].clone()} if several else {}
        path = str(tmp_path / "second.safetensors")
        save_file(kept, path)
        read_weights(path, names, "chain", [("words.weight", [whole_chunk(held.zero_())])])
        assert torch.equal(held, file["words.weight"])


def test_the_command_refuses_before_training(tiny: Any, tmp_path: Path) -> None:
    model, _, whole = tiny
    write_file(model_plan(model, [0, 1]), str(tmp_path / "plan.json"))
    save_file({key: value for key, value in whole.items() if "head" not in key}, tmp_path / "part.safetensors")
    run = ("run", tmp_path / "plan.json", "--model", TINY, "--local", "--steps", 1)
    with warm_ranks():
        done = pipeplan(*run, "--init", tmp_path / "part.safetensors")
    assert done.returncode == 2
    assert "does not fit model 'gpt2-tiny'" in done.stderr
    assert "step 0" not in done.stdout


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--init", "none.safetensors"), "there is no such file; give one that --export-weights wrote"),
        (("--init", "plan.json", "--resume", "--checkpoint", "folder"), "leave out one of the two"),
        (("--steps", 0), "--steps 0 does nothing without --export-weights FILE"),
        (("--export-weights", "nowhere/file"), "there is no folder"),
        (("--export-weights", "-"), "would mix with the losses on stdout"),
        (("--export-weights", "/dev/null"), "is not a regular file"),
    ],
)
def test_flags_that_make_no_sense(flags: tuple[object, ...], told: str, tiny: Any, tmp_path: Path) -> None:
    write_file(model_plan(tiny[0], [0, 1]), str(tmp_path / "plan.json"))
    done = pipeplan("run", "plan.json", "--model", TINY, "--local", *flags, cwd=tmp_path)
    assert done.returncode == 2
    assert told in " ".join(done.stderr.split())


# One process's part ------------------------------------------------------------------------------------------------


class _Alone:
    """All ranks there are."""

    def gather(self, value: Any) -> list[Any]:
        return [value]


def test_a_rank_reads_only_its_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = WeightNames({"w": weights.TensorForm("F32", (6, 4))}, {}, {})
    whole = torch.arange(24.0).reshape(6, 4)
    save_file({"w": whole}, tmp_path / "file.safetensors")
    asked: list[object] = []

    class Recorded:
        def __init__(self, slices: Any) -> None:
            self._slices = slices

        def __getitem__(self, index: object) -> Tensor:
            asked.append(index)
            found: Tensor = self._slices[index]
            return found

        def __getattr__(self, name: str) -> Any:
            return getattr(self._slices, name)

    class Opened:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._file = safe_open(*arguments, **options)

        def __enter__(self) -> Opened:
            self._file.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self._file.__exit__(*error)

        def keys(self) -> list[str]:
            return list(self._file.keys())

        def get_slice(self, name: str) -> Recorded:
            return Recorded(self._file.get_slice(name))

    monkeypatch.setattr(weight_files, "_library", lambda: (Opened, OSError))
    mine = torch.zeros(2, 4)
    piece = ParameterChunk(torch.Size([6, 4]), torch.Size([2, 0]), mine)
    read_weights(str(tmp_path / "file.safetensors"), names, "m", [("w", [piece])])
    assert asked == [(slice(2, 4), slice(0, 4))]
    assert torch.equal(mine, whole[2:4])


def written(path: Path) -> str:
    tensors = {
        "a": torch.rand(3, 5, dtype=torch.bfloat16),
        "b": torch.rand(2, 2, dtype=torch.float64),
        "n": torch.tensor(7),
    }
    forms = {
        name: weights.TensorForm(weights._FORMATS[each.dtype], tuple(each.shape)) for name, each in tensors.items()
    }
    held = [(name, [whole_chunk(tensor)]) for name, tensor in tensors.items()]
    problem = write_weights(str(path), WeightNames(forms, {}, {}), held, _Alone(), 0)
    if not problem:
        found = load_file(path)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    return problem


def test_formats_of_all_widths_and_what_was_there_before(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    path.write_text("old")
    path.chmod(0o640)
    assert written(path) == ""
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == [path.name]
    header = path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")]
    assert json.loads(header)["__metadata__"] == {"format": "pt"}


def test_what_cannot_be_put_in_its_place_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file.safetensors"
    path.write_text("old")
    monkeypatch.setattr(os, "replace", fail)
    problem = written(path)
    assert problem.startswith(f"{path}: cannot be written: No space left on device; what was to be there is in ")
    assert load_file(problem.rpartition(" ")[2])["n"] == 7
    assert path.read_text() == "old"


def test_without_room_nothing_is_left_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert "No space left on device" in written(tmp_path / "file.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_run_of_no_steps_has_figures() -> None:
    from pipeplan.runtime.launch.job import RunResult

    plan = model_plan(load_model(TINY), [0, 1])
    options = options_of(TINY, export_weights="file")
    figures = RunOutcome(plan, options, RunResult((), (1, 1))).figures()
    assert figures["steps"] == []
    assert figures["iteration_ns"] == 0
