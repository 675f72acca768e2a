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
from pipeplan.runtime.training.options import TrainOptions

HIDDEN, HEADS, FFN, WORDS, SEQUENCE, LAYERS = 32, 4, 64, 63, 12, 2
SEED = 3
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
CAUSAL = {key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT: dict[str, Any] = {
    **CAUSAL,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
LLAMA4: dict[str, Any] = {
    **LLAMA,
    "head_dim": 8,
    "intermediate_size_mlp": 48,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
}
FURTHER: dict[str, dict[str, Any]] = {
    "qwen2_moe": {**LLAMA, **EXPERTS, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {**LLAMA, **EXPERTS, "head_dim": 8},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "llama4_text": LLAMA4,
    "gemma": {**LLAMA, "head_dim": 8},
    "gemma2": {**LLAMA, "head_dim": 8, "sliding_window": 5},
    "gemma3_text": {**LLAMA, "head_dim": 8, "sliding_window": 5},
    "phi": CAUSAL,
    "phi3": {**LLAMA, "pad_token_id": 0},
    "phimoe": {**LLAMA, "num_local_experts": 4},
    "gpt_neox": {**CAUSAL, "intermediate_size": 128},
    "opt": {
        **{key: CAUSAL[key] for key in CAUSAL if key != "intermediate_size"},
        "ffn_dim": FFN,
        "word_embed_proj_dim": HIDDEN,
        "max_position_embeddings": 16,
    },
    "falcon": {
        **{key: CAUSAL[key] for key in CAUSAL if key != "intermediate_size"},
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
    },
    "gemma3": {
        "text_config": {**LLAMA, "head_dim": 8},
        "vision_config": {**IMAGE, "patch_size": 4, "vision_use_head": False},
        "mm_tokens_per_image": 4,
        "image_token_index": 5,
    },
    "llama4": {
        "text_config": LLAMA4,
        "vision_config": {
            **IMAGE,
            "patch_size": 4,
            "intermediate_size": 4 * HIDDEN,
            **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), HIDDEN),
        },
        "image_token_index": 5,
    },
    "vit": {**IMAGE, "num_labels": 10},
    "whisper": {
        "d_model": HIDDEN,
        **{f"{side}_layers": LAYERS for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": FFN for side in ("encoder", "decoder")},
        "vocab_size": WORDS,
        "max_source_positions": 10,
        "max_target_positions": SEQUENCE,
        "num_mel_bins": 8,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
    },
}
"""Families with tests of their own, in ``test_more_families.py``."""

IN_FLOAT32 = ("gemma", "gemma2", "gemma3_text", "deepseek_v2", "deepseek_v3", "llama4_text")
"""Families whose norms or rotations transformers computes in float32 whatever the format: sums of parts round there."""

NAMES = sorted(ARGUMENTS)


TOWERS = {"clip": 2, "flava": 3}

ALIKE = ("mistral", "qwen2", "qwen3", "mt5")
"""In blocks they are as Llama, and T5; with the slow tests."""

torch.set_num_threads(1)


def text(name: str, **changes: Any) -> str:
    """A configuration as it stands on the command line."""
    arguments = {**(ARGUMENTS | FURTHER)[name], **changes}
    return f"{FAMILIES[name].config}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def training_of(name: str) -> TrainOptions:
    """Two clipped steps in float64."""
    return TrainOptions(
        text(name),
        SEQUENCE,
        num_steps=2,
        seed=SEED,
        dtype="float64",
        learning_rate=1e-2,
        weight_decay=0.1,
        clip_norm=0.1,
    )


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
        return load_configuration(text(name), sequence=None if name == "vit" else SEQUENCE, grain=grain)
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
