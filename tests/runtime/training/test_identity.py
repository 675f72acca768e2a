"""Which trainings are the same one, so that a checkpoint goes on, and how others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.training.compatibility import identity_of, require_identity
from pipeplan.runtime.training.data import fingerprint, with_data
from pipeplan.runtime.training.options import TrainOptions
from runtime_support.checkpoint_models import TINY

WHERE = Path("saved/step-00000010")
CONFIGURATION = "GPT2Config(n_layer=1, n_embd=16, n_head={heads}, n_positions=16, vocab_size=64)"


class Heads(nn.Module):
    """Attention whose parameters have the same shapes whatever the heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.inward = heads, nn.Linear(8, 8)

    def forward(self, input: Tensor) -> Tensor:
        """Numbers [samples, 4, 8] as [samples, heads, 4, 8 / heads]."""
        made: Tensor = self.inward(input).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return made


def chain(heads: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    return nn.Sequential(Heads(heads)), torch.zeros(2, 4, 8), torch.zeros(2, heads, 4, 8 // heads)


def two_heads() -> Any:
    return chain(2)


def four_heads() -> Any:
    return chain(4)


def facts(options: TrainOptions) -> dict[str, object]:
    model = load_model(options.model, sequence=options.sequence, grain=options.grain)
    return identity_of(with_data(model, options.data), options, mini_batch=8)


def refusal(saved: Mapping[str, object], own: Mapping[str, object]) -> str:
    with pytest.raises(UsageError) as caught:
        require_identity(WHERE, saved, own)
    return str(caught.value)


def test_the_same_goes_on_wherever_and_however_long(tmp_path: Path) -> None:
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.txt").write_bytes(bytes(range(60)) * 10)
    options = TrainOptions("gpt2-tiny", data=str(tmp_path / "here" / "text.txt"))
    moved = replace(options, num_steps=99, resume=True, data=str(tmp_path / "there" / "text.txt"), device="cuda")
    require_identity(WHERE, facts(options), facts(moved))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"sequence": 8}, "was trained with --sequence 16, and this run is with --sequence 8; resume with the same"),
        ({"seed": 4}, "was trained with --seed 0, and this run is with --seed 4"),
        ({"optimizer": "sgd"}, "was trained with --optimizer adamw, and this run is with --optimizer sgd"),
        ({"dtype": "float64"}, "was trained with --dtype float32, and this run is with --dtype float64"),
        (
            {"lr_schedule": "cosine"},
            "was trained with --lr-schedule constant, and this run is with --lr-schedule cosine",
        ),
        ({"lr_steps": 8}, "was trained with --lr-steps 5, and this run is with --lr-steps 8"),
        ({"clip_norm": 1.0}, "was trained without --clip-norm, and this run is with --clip-norm 1.0"),
        ({"data": "builtin"}, "was trained without --data, and this run is with --data builtin (6158 samples, 9"),
    ],
)
def test_flags_are_refused_in_the_users_words(changed: dict[str, Any], told: str) -> None:
    options = TrainOptions("gpt2-tiny", sequence=16)
    if "lr_steps" in changed:
        options = replace(options, lr_schedule="cosine", lr_steps=5)
    assert f"{WHERE} {told}" in refusal(facts(options), facts(replace(options, **changed)))


def test_a_sequence_that_nobody_asked_for_may_be_the_same() -> None:
    """Plans say it, or the model does; shapes tell where it is another one."""
    own, same, other = (facts(TrainOptions("gpt2-tiny", sequence=length)) for length in (None, 16, 8))
    require_identity(WHERE, own, same)
    require_identity(WHERE, same, own)
    assert f"{WHERE} was trained with block embedding " in refusal(own, other)


def test_another_mini_batch() -> None:
    eight, ten = (identity_of(load_model("gpt2-tiny"), TrainOptions("gpt2-tiny"), mini_batch=size) for size in (8, 10))
    assert "was trained with --mini-batch 8, and this run is with --mini-batch 10" in refusal(eight, ten)


def test_other_heads_of_a_configuration() -> None:
    pytest.importorskip("transformers")
    two, four = (facts(TrainOptions(CONFIGURATION.format(heads=heads))) for heads in (2, 4))
    assert two["--model"] == four["--model"], "the name does not tell them apart"
    assert "with n_head 2 in --model, and this run is with n_head 4 in --model" in refusal(two, four)
    assert "transformers_version in --model" not in two


def test_blocks_with_the_same_parameters_that_make_other_shapes() -> None:
    two, four = (facts(TrainOptions(f"test_identity:{name}")) for name in ("two_heads", "four_heads"))
    own = {**four, "--model": two["--model"]}
    text = refusal(two, own)
    assert text.startswith(f'{WHERE} was trained with block 0 {{"heads": {{}}, "makes": [2, 2, 4, 4]')
    assert '"makes": [2, 4, 4, 2]' in text


def _tiny(heads: int) -> Model:
    return replace(TINY, heads=heads).model("gpt2-tiny")


def test_blocks_that_say_their_dimensions() -> None:
    options = TrainOptions("gpt2-tiny")
    two, four = (identity_of(_tiny(heads), options, 8) for heads in (2, 4))
    assert '"heads": 2' in (text := refusal(two, four))
    assert '"heads": 4' in text


def test_what_only_one_of_them_has() -> None:
    options = TrainOptions("gpt2-tiny")
    four, five = (identity_of(replace(TINY, layers=layers).model("gpt2-tiny"), options, 8) for layers in (4, 5))
    assert "was trained without block layer4.attention in --model, and this run is with block" in refusal(four, five)
    assert "was trained with block more [] in --model" in (
        text := refusal({**four, "block more in --model": "[]"}, four)
    )
    assert "and this run is without block more in --model;" in text


def test_other_data_of_equal_size(tmp_path: Path) -> None:
    found = []
    for name, last in (("a", b"\x01"), ("b", b"\x02")):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "text.txt"
        path.write_bytes(bytes(range(60)) * 5 + last)
        found.append(facts(TrainOptions("gpt2-tiny", data=str(path))))
    text = refusal(*found)
    assert "with --data text.txt (18 samples, 301 bytes, sha256 " in text
    assert found[0]["--data"] != found[1]["--data"]


def test_of_a_large_file_both_ends_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeplan.runtime.training.data._LARGE_BYTES", 300)
    monkeypatch.setattr("pipeplan.runtime.training.data._PART_BYTES", 20)
    path, found = tmp_path / "text.txt", []
    for changed in (None, 0, 19, 20, 580, 599):
        content = bytearray(bytes(range(60)) * 10)
        if changed is not None:
            content[changed] = 5 if content[changed] != 5 else 6
        path.write_bytes(content)
        found.append(fingerprint(with_data(load_model("gpt2-tiny"), str(path)), str(path)))
    same, middle = found[0], found[3]
    assert middle == same, "what lies between is not read"
    assert len(set(found)) == 5


def _items(last: float) -> Any:
    return [{"input": torch.full((4, 8), value), "targets": torch.zeros(2, 4, 4)} for value in (0.0, 1.0, last)]


def first_items() -> Any:
    return _items(2.0)


def other_items() -> Any:
    return _items(3.0)


def test_other_items_of_a_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model("test_identity:two_heads")
    path = "test_identity:first_items"
    before = fingerprint(with_data(model, path), path)
    assert before is not None
    assert before.startswith(f"{path} (3 samples, sha256 ")
    assert before == fingerprint(with_data(model, path), path)
    monkeypatch.setattr("test_identity.first_items", other_items)
    assert before != fingerprint(with_data(model, path), path)
