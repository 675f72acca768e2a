"""Hugging Face models write on what their own ``generate`` writes, whose caches are transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeplan.runtime.models.huggingface.build import describe
from runtime_support.decoding_rank import case, model_of, written_by

SIZES = (
    "hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, "
    "vocab_size=50, max_position_embeddings=64"
)
MODELS = {
    "llama": f"LlamaConfig({SIZES})",
    "qwen2": f"Qwen2Config({SIZES})",
    "mistral, which looks back four words": f"MistralConfig({SIZES}, sliding_window=4)",
    "gpt2": "GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=64)",
    "mixtral": f"MixtralConfig({SIZES}, num_local_experts=4)",
}
LATENT = (
    f"{SIZES}, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, n_routed_experts=4, "
    "n_shared_experts=2, num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=2"
).replace("num_key_value_heads=4", "num_key_value_heads=8")
"""Layers are dense, as a router of these has no float64."""

MODELS |= {
    "deepseek v3": f"DeepseekV3Config({LATENT}, q_lora_rank=16, n_group=2, topk_group=1)",
    "deepseek v2": f"DeepseekV2Config({LATENT}, q_lora_rank=None, topk_method='greedy')",
}
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [5, 4], [9, 8, 7, 3, 1], [11], [3] * 9]
NEW = 6


def generated(name: str, prompt: list[int]) -> list[int]:
    """What transformers' own model writes, with the weights that ours has."""
    import transformers

    kind = name.partition("Config")[0]
    ours = model_of(name)
    config: Any = getattr(transformers, f"{kind}Config")(**describe(name)[1])
    config._experts_implementation = "eager"  # grouped products have no float64
    model = getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    state = {
        own: tensor
        for block in ours.blocks
        for key, tensor in block.build().state_dict().items()
        if (own := (block.names or {}).get(key)) is not None
    }
    missing, more = model.load_state_dict(state, strict=False)
    assert ({*missing} <= {"lm_head.weight"}, more) == (True, []), "what is tied has one name"
    model = model.double().eval()
    asked = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    made = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **asked)
    found: list[int] = made[0, len(prompt) :].tolist()
    return found


KINDS = ("samples", "shards", "cache", "cacheq")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "ways"),
    [
        (["deepseek v3"], ("shards", "cacheq")),
        *(
            pytest.param(names, KINDS, marks=pytest.mark.long)
            for names in (["deepseek v3"], ["llama", "qwen2", "deepseek v2"], [*MODELS][2:5])
        ),
    ],
)
def test_what_is_written_is_what_transformers_generates(names: list[str], ways: tuple[str, ...]) -> None:
    """On one process, on four in each way and that share experts, and on two stages of two in each way."""
    four, two = [[0, 1, 2, 3]], [[0, 1], [2, 3]]
    asked = [
        (name, case(MODELS[name], kinds, devices, sizes=(3,), prompts=PROMPTS, new_tokens=NEW))
        for name in names
        for kinds, devices in (
            ([""], [[0]]),
            *(([f"{kind}4"], four) for kind in (*ways, *(["experts"] if name == "mixtral" else []))),
            *(([f"{kind}2"] * 2, two) for kind in ways),
        )
    ]
    wanted = {name: [generated(MODELS[name], prompt) for prompt in PROMPTS] for name in names}
    for (name, each), found in zip(asked, written_by([each for _, each in asked], 4), strict=True):
        assert [[word for word, _ in of] for of in found.texts().values()] == wanted[name], (name, each["stages"])
