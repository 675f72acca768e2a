"""Further families of Hugging Face: their blocks compute the whole model, and have all of its parameters once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers

from pipeplan.errors import UsageError
from pipeplan.runtime.models.capture import parameters_of
from pipeplan.runtime.models.huggingface import LoadedModel, load, load_configuration
from pipeplan.runtime.models.huggingface.families import FAMILIES
from pipeplan.runtime.models.spec import Model
from runtime_support.hugging_face import FFN, FURTHER, HIDDEN, SEQUENCE, batch_for, eager_experts, size, text
from runtime_support.whole_model import replay
from support.marks import slow_but

EAGER = ("qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "phimoe")
"""Whose experts are those of transformers where it runs a model without pipeplan's functions."""

HALVES = ["attention", "ffn"] * 2
BLOCKS = {
    "qwen2_moe": ["embedding", *["attention", "moe"] * 2, "head"],
    "qwen3_moe": ["embedding", *["attention", "moe"] * 2, "head"],
    "deepseek_v2": ["embedding", *HALVES[:3], "moe", "head"],
    "deepseek_v3": ["embedding", *HALVES[:3], "moe", "head"],
    "llama4_text": ["embedding", *HALVES[:3], "moe", "head"],
    "gemma": ["embedding", *HALVES, "head"],
    "gemma2": ["embedding", *HALVES, "head"],
    "gemma3_text": ["embedding", *HALVES, "head"],
    "phi": ["embedding", "layer", "layer", "head"],
    "phi3": ["embedding", *HALVES, "head"],
    "phimoe": ["embedding", *["attention", "moe"] * 2, "head"],
    "gpt_neox": ["embedding", "layer", "layer", "head"],
    "opt": ["embedding", *HALVES, "head"],
    "falcon": ["embedding", "layer", "layer", "head"],
    "gemma3": ["embedding", *HALVES, "linear", "embedding", *HALVES, "head"],
    "llama4": ["linear", *HALVES, "linear", "embedding", *HALVES[:3], "moe", "head"],
    "vit": ["convolution", *HALVES, "head"],
    "whisper": ["embedding", *HALVES, "norm", "embedding", *["attention", "cross-attention", "ffn"] * 2, "head"],
}


UNLIKE = ("llama4_text", "gpt_neox", "gemma3", "vit", "whisper")
"""Of the slow ones those that are unlike the quick ones: layers in one piece, images, sounds; the others are long."""


def captured(name: str) -> tuple[LoadedModel, Model]:
    sequence = None if name == "vit" else SEQUENCE
    found = load(text(name), sequence=sequence)
    found.module.double()
    return found, load_configuration(text(name), sequence=sequence)


@slow_but(
    "name", list(FURTHER), lambda name: name in ("deepseek_v3", "gemma2", "falcon"), lambda name: name not in UNLIKE
)
def test_blocks_are_the_model(name: str) -> None:
    """What kinds they are, that they have all parameters once, and that they give the model's loss."""
    found, model = captured(name)
    assert [block.operator for block in model.blocks] == BLOCKS[name]
    names = {key for block in model.blocks for key in parameters_of(block).values()}
    held = {id(found.module.get_parameter(key)): found.module.get_parameter(key).numel() for key in names}
    assert sum(held.values()) == size(found.module)
    batch = batch_for(found, 3)
    modules = {block.id: block.build().double() for block in model.blocks}
    with torch.no_grad(), eager_experts(found):
        assert replay(model, modules, batch).item() == pytest.approx(found.module(**batch).item(), rel=1e-6)


@slow_but("name", list(FURTHER), lambda name: name in ("gemma2", "llama4_text"), lambda name: name not in UNLIKE)
def test_the_loss_is_that_of_transformers(name: str) -> None:
    """With its own attention and experts, and images where it puts them itself."""
    if name == "llama4" and transformers.__version__ == "5.24.0":
        pytest.skip("transformers 5.24.0 cannot run Llama 4 with images: its text model gives no image_outputs")
    found, _ = captured(name)
    eager = {"experts_implementation": "eager"} if name in EAGER else {}
    config = getattr(transformers, FAMILIES[name].config)(**FURTHER[name], attn_implementation="eager", **eager)
    model: Any = getattr(transformers, FAMILIES[name].model)(config).double().eval()
    state = found.module.model.state_dict()
    model.load_state_dict({key.replace("feed_forward.model.", "feed_forward."): each for key, each in state.items()})
    batch = batch_for(found, 2)
    given = {
        "tokens": "input_ids",
        "decoder_tokens": "decoder_input_ids",
        "pixels": "pixel_values",
        "sound": "input_features",
    }
    with torch.no_grad():
        logits = model(**{given[key]: value for key, value in batch.items() if key in given}).logits
        targets = batch["targets"].flatten()
        own = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets, reduction="sum")
        with eager_experts(found):
            assert found.module(**batch).item() == pytest.approx(own.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3", "llama4_text"])
def test_experts_are_dimensions(name: str) -> None:
    _, model = captured(name)
    (found,) = {tuple(sorted(block.dimensions.items())) for block in model.blocks if block.operator == "moe"}
    widths = {"qwen2_moe": (24, 40, 2), "deepseek_v3": (24, 48, 2), "llama4_text": (FFN, FFN, 1)}
    ffn, shared, chosen = widths[name]
    assert dict(found) == {
        "sequence": SEQUENCE,
        "hidden": HIDDEN,
        "experts": 4,
        "experts_per_token": chosen,
        "ffn": ffn,
        "shared_ffn": shared,
    }


def test_a_layer_whose_halves_take_the_same_input_is_one_block() -> None:
    _, model = captured("gpt_neox")
    assert [block.id for block in model.blocks][1:] == ["gpt_neox.layers.0", "gpt_neox.layers.1", "head"]
    assert model.blocks[1].dimensions == {"sequence": SEQUENCE, "hidden": HIDDEN, "heads": 4, "ffn": 128}


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("deepseek_v3", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 .* more than its 4 experts"),
        ("qwen3_moe", {"num_key_value_heads": 3}, "not divisible by num_key_value_heads=3"),
        ("gpt_neox", {"hidden_size": 30}, "hidden size is not divisible"),
        ("opt", {"max_position_embeddings": 8}, "--sequence 12: .* 1 to 8"),
        ("whisper", {"max_target_positions": 8}, "--sequence 12: .* 1 to 8"),
        ("gemma3", {"mm_tokens_per_image": 16}, "--sequence 12: the image alone has 16 tokens"),
        ("gemma3", {"image_token_index": 99}, "image_token_index=99 is not a word of a vocabulary of 63"),
        ("deepseek_v3", {"n_group": 3}, "4 experts .* n_group=3 groups"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_built(
    name: str, changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeplan.runtime.models.huggingface.build._module", None)
    with pytest.raises(UsageError, match=said):
        load(text(name, **changes), sequence=SEQUENCE, meta=True)


def test_families_that_do_not_say_how_they_are_split_refuse_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeplan.runtime.models.huggingface.build._module", None)
    with pytest.raises(
        UsageError, match=r"FalconConfig.* cannot be split over devices: transformers has no plan for it"
    ):
        load(text("falcon", alibi=True), sequence=SEQUENCE, meta=True, shards=(1, 2))


def test_every_family_has_its_blocks() -> None:
    assert set(BLOCKS) == set(FURTHER)
    assert Counter(BLOCKS["whisper"])["cross-attention"] == 2
