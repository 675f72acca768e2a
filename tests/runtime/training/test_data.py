"""Texts, token files and datasets: every sample once per epoch, the same for all plans."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from pipeplan.errors import UsageError
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.training.data import builtin_text, with_data
from runtime_support import models as runtime_models

BRANCHES = "runtime_support.models:branches"
HERE = "test_data"
SEQUENCE, VOCABULARY = 16, 64


class Numbers(Dataset[dict[str, Any]]):
    """Seven samples, each of its number."""

    def __init__(self, length: int = 7) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.full(8, index), "targets": torch.full((8,), float(index)), "more": index}


def empty() -> Numbers:
    return Numbers(0)


def unnamed() -> list[Tensor]:
    return [torch.zeros(8)]


def missing() -> list[dict[str, Tensor]]:
    return [{"x": torch.zeros(8)}]


def written(folder: Path, tokens: np.ndarray, name: str) -> str:
    path = folder / name
    if path.suffix == ".npy":
        np.save(path, tokens)
    else:
        tokens.tofile(path)
    return str(path)


def test_without_data_a_model_makes_up_its_own() -> None:
    model = load_model("gpt2-tiny")
    assert with_data(model, None) is model


@pytest.mark.parametrize("size", [1, 3, 7, 9])
def test_every_sample_comes_once_per_epoch_whatever_the_mini_batch(size: int) -> None:
    model = with_data(runtime_models.branches(), f"{HERE}:Numbers")
    assert len(model.batch.dataset) == 7
    found = [int(row[0]) for step in range(63 // size) for row in model.batch(size, step, 5)["x"]]
    other = [int(row[0]) for step in range(9) for row in model.batch(7, step, 5)["x"]]
    assert found == other, "the order is that of the samples, not of the mini-batches"
    epochs = [found[begin : begin + 7] for begin in range(0, 63, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1, "shuffled anew"
    assert [int(row[0]) for row in model.batch(7, 0, 6)["x"]] != epochs[0], "another seed, another order"
    assert model.mini_batch(2, 0, 0)["targets"].dtype == torch.float32


def test_tokens_of_files_are_windows_of_their_neighbours(tmp_path: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, 5 * SEQUENCE + 4).astype(np.uint16)
    texts = [written(tmp_path, tokens, "a.npy"), written(tmp_path, tokens, "a.bin")]
    texts.append(written(tmp_path, tokens.astype(np.uint32), "b.npy"))
    expected = [tokens[begin : begin + SEQUENCE + 1].tolist() for begin in range(0, 5 * SEQUENCE, SEQUENCE)]
    for text in texts:
        model = with_data(load_model("gpt2-tiny"), text)
        assert len(model.batch.dataset) == 5
        batch = model.mini_batch(5, 0, 0)
        assert batch["tokens"].dtype == torch.int64
        rows = [[*row.tolist(), int(last[-1])] for row, last in zip(batch["tokens"], batch["targets"], strict=True)]
        assert sorted(rows) == sorted(expected)
        assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


def test_texts_are_bytes_or_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("abca" * 20)
    small = with_data(load_model("gpt2-tiny"), str(path)).batch(1, 0, 0)["tokens"]
    assert set(small.flatten().tolist()) == {0, 1, 2}
    whole = with_data(load_model("gpt2-124m", sequence=16), str(path)).batch(1, 0, 0)["tokens"]
    assert set(whole.flatten().tolist()) == set(b"abc")


def test_the_builtin_text_fits_the_smallest_model() -> None:
    text = builtin_text()
    assert "two and forty make forty-two.\n" in text
    assert "nought and nine make nine." in text
    assert len(set(text)) <= VOCABULARY
    model = with_data(load_model("gpt2-tiny"), "builtin")
    batches = [model.batch(8, step, 3)["tokens"] for step in range(4)]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(batches, 2))
    assert torch.equal(model.batch(8, 2, 3)["tokens"], batches[2])
    assert int(torch.stack(batches).max()) < VOCABULARY


@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_hugging_face_models_take_texts(family: str) -> None:
    pytest.importorskip("transformers")
    from pipeplan.runtime.models.huggingface import load_configuration
    from pipeplan.runtime.models.huggingface.families import FAMILIES
    from runtime_support.hugging_face import ARGUMENTS, SEQUENCE

    (config,) = {each.config for each in FAMILIES.values() if each.config.lower() == f"{family}config"}
    arguments = ", ".join(f"{key}={value!r}" for key, value in ARGUMENTS[family].items())
    model = load_configuration(f"{config}({arguments})", sequence=SEQUENCE)
    made, own = with_data(model, "builtin").batch(3, 1, 0), model.batch(3, 1, 0)
    assert {name: each.shape for name, each in made.items()} == {name: each.shape for name, each in own.items()}
    assert not torch.equal(made["tokens"], own["tokens"])


@pytest.mark.parametrize(
    ("model", "data", "told"),
    [
        ("gpt2-tiny", "nowhere.txt", "--data nowhere.txt cannot be read: .*No such file"),
        ("gpt2-tiny", "nowhere.npy", "cannot be read"),
        ("gpt2-tiny", "nowhere:nothing", "--data 'nowhere:nothing' cannot be imported"),
        ("gpt2-tiny", "builtins:id", r"the factory failed: TypeError"),
        (
            "gpt2-tiny",
            "builtins:object",
            "returned object; give a dataset with a length and items, or a DataLoader",
        ),
        ("mmt-tiny", "builtin", "model 'mmt-tiny' takes no texts; give pkg.mod:factory"),
        (BRANCHES, f"{HERE}:empty", "has no sample"),
        (
            BRANCHES,
            f"{HERE}:unnamed",
            r"an item is Tensor, and the model takes tensors named \['x', 'targets'\]",
        ),
        (BRANCHES, f"{HERE}:missing", r"an item is \['x'\], and model .* \['targets', 'x'\]"),
    ],
)
def test_refusals(model: str, data: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        with_data(load_model(model), data)


def test_refuses_files_that_are_no_tokens_of_the_model(tmp_path: Path) -> None:
    model = load_model("gpt2-tiny")
    wrong = written(tmp_path, np.zeros((3, 40), dtype=np.int64), "wrong.npy")
    with pytest.raises(UsageError, match=r"has int64\[3, 40\]; tokens are a row of uint16 or uint32"):
        with_data(model, wrong)
    short = written(tmp_path, np.zeros(SEQUENCE, dtype=np.uint16), "short.bin")
    with pytest.raises(UsageError, match="has no sample; a text needs a token more than the model's sequence"):
        with_data(model, short)
    tokens = np.zeros(SEQUENCE + 1, dtype=np.uint16)
    tokens[5] = 64
    with pytest.raises(UsageError, match="token 5 is 64, and the model's vocabulary has 64 words"):
        with_data(model, written(tmp_path, tokens, "high.bin"))
    (tmp_path / "bytes").write_bytes(bytes(range(80)) * 3)
    with pytest.raises(UsageError, match="has 80 different bytes, and the model's vocabulary 64 words"):
        with_data(model, str(tmp_path / "bytes"))
    empty_file = tmp_path / "empty.bin"
    empty_file.touch()
    with pytest.raises(UsageError, match="cannot be read"):
        with_data(model, str(empty_file))
