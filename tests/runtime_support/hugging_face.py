"""Tiny Hugging Face configurations of every family, and their blocks, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.runtime.models.huggingface import LoadedModel, load, load_configuration
from pipeplan.runtime.models.huggingface.families import FAMILIES
from pipeplan.runtime.models.spec import Grain, Model

HIDDEN, HEADS, FFN, WORDS, SEQUENCE, LAYERS = 32, 4, 64, 63, 12, 2
LLAMA: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "intermediate_size": FFN,
    "vocab_size": WORDS,
}
T5: dict[str, Any] = {
    "d_model": HIDDEN,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "d_kv": 8,
    "d_ff": FFN,
    "vocab_size": WORDS,
}
TOWER: dict[str, Any] = {key: LLAMA[key] for key in LLAMA if key not in ("num_key_value_heads", "vocab_size")}
IMAGE: dict[str, Any] = {**TOWER, "image_size": 16, "patch_size": 8}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 16, "vocab_size": WORDS},
    "llama": LLAMA,
    "qwen2": LLAMA,
    "qwen3": {**LLAMA, "head_dim": 8},
    "mistral": {**LLAMA, "sliding_window": 5},
    "mixtral": {**LLAMA, "num_local_experts": 4},
    "bert": {**TOWER, "vocab_size": WORDS, "max_position_embeddings": 16},
    "t5": T5,
    "mt5": T5,
    "clip": {
        "projection_dim": 16,
        "text_config": {**TOWER, "vocab_size": WORDS, "max_position_embeddings": SEQUENCE, "eos_token_id": WORDS - 1},
        "vision_config": IMAGE,
    },
    "flava": {
        "hidden_size": HIDDEN,
        "text_config": {**TOWER, "vocab_size": WORDS},
        "image_config": IMAGE,
        "multimodal_config": TOWER,
    },
}
NAMES = sorted(ARGUMENTS)


TOWERS = {"clip": 2, "flava": 3}

ALIKE = ("mistral", "qwen2", "qwen3", "mt5")
"""In blocks they are as Llama, and T5; with the slow tests."""

torch.set_num_threads(1)


def text(name: str, **changes: Any) -> str:
    """A configuration as it stands on the command line."""
    arguments = {**ARGUMENTS[name], **changes}
    return f"{FAMILIES[name].config}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


@cache
def whole(name: str) -> LoadedModel:
    found = load(text(name), sequence=SEQUENCE)
    found.module.double()
    return found


def batch_for(found: LoadedModel, samples: int) -> dict[str, Tensor]:
    made = found.batch(samples, 0, 0)
    return {key: each.double() if each.is_floating_point() else each for key, each in made.items()}


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@cache
def captured(name: str, grain: Grain, num_devices: int = 1) -> Model:
    if num_devices == 1:
        return load_configuration(text(name), sequence=SEQUENCE, grain=grain)
    split = captured(name, grain).sharded
    assert split is not None
    return split(num_devices)


@contextmanager
def eager_experts(found: LoadedModel) -> Iterator[None]:
    """transformers' own loop over experts for a while, which cannot be exported."""
    config: Any = found.module.model.config
    before = config._experts_implementation
    config._experts_implementation = "eager"
    yield
    config._experts_implementation = before
