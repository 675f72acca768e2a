"""Hugging Face configurations: losses and parameters of transformers' own models, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from pipeplan.catalog import NamedConfiguration, configurations
from pipeplan.errors import UsageError
from pipeplan.runtime.models.huggingface import load, load_configuration
from pipeplan.runtime.models.huggingface.families import FAMILIES
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.profiling.build_profile import block_graph_of
from runtime_support.hugging_face import (
    ARGUMENTS,
    FURTHER,
    NAMES,
    SEQUENCE,
    batch_for,
    captured,
    eager_experts,
    size,
    text,
    whole,
)
from support.marks import one_in


def test_every_family_is_tested() -> None:
    assert {*NAMES, *FURTHER} == set(FAMILIES)


def own_mean(name: str, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss as transformers computes it, a mean."""
    labels = {"labels": batch["targets"]} if "targets" in batch else {}
    if name in ("t5", "mt5"):
        return model(input_ids=batch["tokens"], decoder_input_ids=batch["decoder_tokens"], **labels).loss
    if name == "clip":
        return model(input_ids=batch["tokens"], pixel_values=batch["pixels"], return_loss=True).loss
    if name == "bert":
        return model(input_ids=batch["tokens"], **labels).loss
    return model(input_ids=batch["tokens"], shift_labels=batch["targets"], use_cache=False, **labels).loss


@pytest.mark.parametrize("name", [each for each in NAMES if each != "flava"])
def test_the_loss_is_that_of_transformers_times_the_predictions(name: str) -> None:
    found = whole(name)
    eager = {"experts_implementation": "eager"} if name == "mixtral" else {}
    config = getattr(transformers, FAMILIES[name].config)(**ARGUMENTS[name], attn_implementation="sdpa", **eager)
    model = getattr(transformers, FAMILIES[name].model)(config).double().eval()
    assert size(model) == size(found.module)
    model.load_state_dict(found.module.model.state_dict())
    batch = batch_for(found, 3)
    with eager_experts(found):
        assert found.module(**batch).item() == pytest.approx(
            own_mean(name, model, batch).item() * found.predictions(batch),
            rel=1e-6,  # in float32
        )


def test_flava_predicts_words_as_its_own_head_does() -> None:
    found = whole("flava")
    config = transformers.FlavaConfig(**ARGUMENTS["flava"], init_codebook=False)
    model: Any = transformers.FlavaForPreTraining(config).double().eval()
    model.flava.load_state_dict(found.module.model.state_dict())
    model.mmm_text_head.load_state_dict(found.module.head.state_dict())
    batch = batch_for(found, 3)
    made = model(
        input_ids=batch["tokens"],
        input_ids_masked=batch["tokens"],
        pixel_values=batch["pixels"],
        mlm_labels=batch["targets"],
        return_loss=False,
    )
    predicted = F.cross_entropy(made.mmm_text_logits, batch["targets"][batch["targets"] >= 0], reduction="sum")
    assert found.module(**batch).item() == pytest.approx(predicted.item(), rel=1e-9)
    assert size(found.module) == size(model.flava) + size(model.mmm_text_head)


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_does_not_depend_on_how_many_there_are(name: str) -> None:
    few, many = whole(name).batch(2, 3, 1), whole(name).batch(5, 3, 1)
    other = whole(name).batch(2, 4, 1)
    for key, tensor in few.items():
        assert torch.equal(tensor, many[key][:2])
    assert any(not torch.equal(tensor, other[key]) for key, tensor in few.items())
    assert 0 < whole(name).predictions(few) < whole(name).predictions(many)


@pytest.mark.parametrize("name", ["mixtral", "clip"])
def test_file_and_text_say_the_same(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = getattr(transformers, FAMILIES[name].config)(**ARGUMENTS[name])
    said = {**config.to_dict(), "auto_map": {"AutoModel": "evil.Model"}, "torch_dtype": "bfloat16", "unknown": 1}
    path.write_text(json.dumps(said))
    one, other = load(str(path), sequence=SEQUENCE), load(text(name), sequence=SEQUENCE)
    assert one.name == other.name
    for (key, tensor), (twin, same) in zip(
        one.module.state_dict().items(), other.module.state_dict().items(), strict=True
    ):
        assert key == twin
        assert torch.equal(tensor, same)
        assert tensor.dtype != torch.bfloat16


def test_arguments_that_ask_for_more_outputs_or_are_of_older_versions_do_no_harm() -> None:
    changes = {"output_router_logits": True, "output_hidden_states": True, "rope_theta": 1e6}
    model = load_configuration(text("mixtral", **changes), sequence=SEQUENCE, meta=True)
    assert [block.operator for block in model.blocks][1:3] == ["attention", "moe"]
    assert model.blocks[2].dimensions["experts"] == 4


PUBLISHED = {
    "GPT2Config": 124_439_808,
    "LlamaConfig()": 6_738_415_616,
    "MistralConfig()": 7_241_732_096,
    "MixtralConfig()": 46_702_792_704,
    "BertConfig()": 109_514_298,
    "T5Config": 60_506_624,
    "CLIPConfig": 151_277_313,
}


@pytest.mark.parametrize("said", PUBLISHED)
def test_large_models_need_no_memory_and_have_the_published_parameters(said: str) -> None:
    found = load(said, meta=True)
    assert all(tensor.is_meta for tensor in found.module.state_dict().values())
    assert size(found.module) == PUBLISHED[said]


@pytest.mark.slow
def test_a_model_without_data_is_cut_and_run_on_meta() -> None:
    model = load_configuration("LlamaConfig(num_hidden_layers=3)", sequence=64, meta=True)
    assert all(torch.isfinite(parameter).all() for parameter in model.block("head").build().parameters())
    found = block_graph_of(model, torch.bfloat16)
    assert len({block.kind for block in found.blocks}) == 4
    assert model.batch(1, 0, 0)["tokens"].shape == (1, 64)


def test_sequences_are_the_shorter_of_the_usual_and_the_longest() -> None:
    assert load("GPT2Config(n_layer=1)", meta=True).inputs["tokens"].shape == (2, 1024)
    assert load("GPT2Config(n_layer=1, n_positions=48)", meta=True).inputs["tokens"].shape == (2, 48)
    assert load("T5Config(num_layers=1)", sequence=2000, meta=True).inputs["tokens"].shape == (2, 2000)


MISTAKES = {
    "BloomConfig()": "LlamaConfig .llama.*pkg.mod:function",
    "LlamaConfig(hiden_size=3)": "no argument 'hiden_size'",
    "CLIPConfig(text_config={'hiden_size': 3})": "CLIPTextConfig has no argument 'hiden_size'",
    "LlamaConfig(hidden_size='x')": "hidden_size",
    "GPT2Config(n_layer=5001)": "n_layer is 5001; give at most 5,000 layers",
    f"Qwen3Config(num_hidden_layers={10**400})": "num_hidden_layers is a number of 401 digits; give at most 5,000",
    "CLIPConfig(vision_config={'num_hidden_layers': 99999})": "num_hidden_layers is 99999; give at most",
    "GPT2Config(n_embd=30, n_head=4)": "hidden_size=30 .* is not divisible by num_attention_heads=4",
    "LlamaConfig(hidden_size=open('x').read())": "neither the path",
    "LlamaConfig(512)": "neither the path",
    "LlamaConfig(**{})": "neither the path",
    "os.system('x')": "nothing is downloaded",
    "meta-llama/Llama-3.1-8B": "nothing is downloaded",
    "nowhere/config.json": "cannot be read",
}


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes_are_named(said: str) -> None:
    with pytest.raises(UsageError, match=MISTAKES[said]):
        load(said, meta=True)


@pytest.mark.parametrize(
    ("content", "reason"), [("{", "not JSON"), ("[]", "model_type"), ('{"model_type": "bloom"}', "not known")]
)
def test_files_that_are_no_configurations_are_named(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=reason):
        load(str(path))


def test_sequences_out_of_range_are_refused() -> None:
    for asked in (0, 17):
        with pytest.raises(UsageError, match=f"--sequence {asked}.*1 to 16"):
            load(text("gpt2"), sequence=asked, meta=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads=4 .* not divisible by num_key_value_heads=3"),
        ({"hidden_size": 30, "head_dim": None}, "hidden_size=30|hidden size"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 .* more than its 4 experts"),
        ({"max_position_embeddings": 8}, "--sequence 12: .* 1 to 8"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_built(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeplan.runtime.models.huggingface.build._module", None)
    with pytest.raises(UsageError, match=said):
        load(text("mixtral", **changes), sequence=SEQUENCE, meta=True)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("Llama4Config()", "vision_config.intermediate_size=5632 is not 3072, which is hidden_size=768 over"),
        (
            "Llama4Config(vision_config={'hidden_size': 1408})",
            "projector_input_dim=4096, projector_output_dim=4096 and vision_output_dim=7680 differ",
        ),
        ("Gemma3Config()", "mm_tokens_per_image=256 cannot be averages of squares of an image's 14 by 14 patches"),
        ("Gemma3Config(mm_tokens_per_image=50)", "mm_tokens_per_image=50 cannot"),
    ],
)
def test_nested_sizes_that_do_not_go_together_are_refused_before_anything_is_built(
    said: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeplan.runtime.models.huggingface.build._module", None)
    with pytest.raises(UsageError, match=re.escape(reason)):
        load(said, meta=True)


def test_heads_that_do_not_divide_are_refused_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeplan.runtime.models.huggingface.build._module", None)
    with pytest.raises(UsageError, match=r"--shards 3: .* heads"):
        load(text("llama"), sequence=SEQUENCE, meta=True, shards=[1, 3])


@one_in(2, "name", configurations())
def test_well_known_models_have_as_many_parameters_as_published(name: str) -> None:
    known = configurations()[name]
    found = load(known.text, meta=True)
    assert sum(parameter.numel() for parameter in found.module.parameters()) == known.parameters


def test_a_well_known_model_is_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    small = NamedConfiguration("LlamaConfig", ARGUMENTS["llama"], 0, "")
    monkeypatch.setattr("pipeplan.runtime.models.given_names.configurations", lambda: {"llama3-tiny": small})
    model = load_model("llama3-tiny", sequence=SEQUENCE, meta=True)
    assert [block.id for block in model.blocks] == [block.id for block in captured("llama", "half").blocks]
    with pytest.raises(UsageError, match="did you mean llama3-tiny"):
        load_model("llama3-tinny")
