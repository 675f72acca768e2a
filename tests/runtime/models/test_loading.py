"""Which model a name means: the zoo, configurations, factories of models and of modules with example inputs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipeplan.errors import UsageError
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.profiling.measure import profile_model

MODULE = """
import torch
from torch import nn

def chain():
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    return layers, torch.randn(2, 8)

class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, targets):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return nn.functional.cross_entropy(x, targets, reduction="sum")

def with_loss():
    return Sum(), {"x": torch.randn(4, 8), "targets": torch.randint(8, (4,))}

def alone():
    return Sum()
"""
LLAMA = (
    "LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, "
    "intermediate_size=64, vocab_size=50)"
)


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    torch.set_num_threads(1)
    (tmp_path / "models_to_load.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("models_to_load", None)


def test_a_sequential_and_one_tensor() -> None:
    model = load_model("models_to_load:chain")
    assert [block.operator for block in model.blocks] == ["linear", "linear", "linear"]
    profile = profile_model(model, (1, 2), repeats=1, warmup=0)
    assert profile.microbatch_sizes == (1, 2)
    assert sum(block.parameters for block in profile.blocks) == 8 * 16 + 16 + 16 * 16 + 16 + 16 * 2 + 2


def test_a_module_and_inputs_by_name() -> None:
    model = load_model("models_to_load:with_loss", grain="layer")
    assert model.blocks[-1].loss
    assert set(model.mini_batch(3, 0, 0)) == {"x", "targets"}
    profile = profile_model(model, (2,), repeats=1, warmup=0)
    assert len(profile.blocks) >= 3


def test_grains_of_a_configuration() -> None:
    counts = {grain: len(load_model(LLAMA, sequence=8, grain=grain).blocks) for grain in ("layer", "half", "operator")}
    assert counts["layer"] == 4  # embedding, two layers, head
    assert counts["half"] == 6
    assert counts["operator"] > 2 * counts["half"]


def test_shared_blocks() -> None:
    model = load_model(LLAMA, sequence=8, shared=("embedding", "h*d"))
    assert [block.id for block in model.blocks if block.shared] == ["embedding", "head"]
    profile = profile_model(model, (1,), repeats=1, warmup=0)
    assert [block.id for block in profile.blocks if block.shared] == ["embedding", "head"]
    assert [block.id for block in load_model("gpt2-tiny", shared=("*.ffn",)).blocks if block.shared] == [
        f"layer{layer}.ffn" for layer in range(4)
    ]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gpt2-tiny", {"grain": "layer"}, "--granularity layer: gpt2-tiny has blocks of its own"),
        ("gpt2-tiny", {"shared": ("tower*",)}, r"--shared 'tower\*' matches no block of gpt2-tiny; its operators are"),
        ("models_to_load:chain", {"sequence": 8}, "--sequence is for models of the zoo and configurations"),
        (
            "models_to_load:alone",
            {},
            "returned, Sum; give a pipeplan.runtime.models.spec.Model, or a module and its example",
        ),
        ("models_to_load:nothing", {}, "cannot be imported: AttributeError"),
        ("PerceiverConfig()", {}, "PerceiverConfig"),
        ("none.json", {}, "none.json"),
        ("LlamaConfig(layers=__import__('os'))", {}, "with numbers, texts, lists and dicts"),
    ],
)
def test_refused(name: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_model(name, **options)  # type: ignore[arg-type]  # options of several types
