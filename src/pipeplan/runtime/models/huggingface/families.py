"""The families that are known: which class of transformers, what its samples are, and how its weights can be split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from pipeplan.errors import UsageError
from pipeplan.runtime.models.huggingface.adapters import Captions, Contents, Pairs, Translation, WordsModel

__all__ = ["FAMILIES", "ModelFamily", "family_of"]

_LONGEST = 1024
_MASKED_LONGEST = 512
_CAPTION_LONGEST = 77  # words of CLIP's and Flava's texts


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One ``model_type``.

    ``config`` and ``model`` are classes of transformers by name, ``module(model, config)`` wraps a model so that it
    returns a loss. ``longest`` is the sequence without ``--sequence``, if ``maximum(config)`` (None: any length) is
    not smaller. ``contents(config, vocabulary, sequence)`` says what its samples are, ``words(config)`` how large the
    vocabulary is. ``plan`` has patterns of module or parameter names inside the wrapper, ``*`` for one part of a name,
    with the way each is split (see ``sharding.py``); None: the configuration's own ``base_model_tp_plan``.
    ``vocabulary`` are the names of what has a row for each word. ``tokens(config, sequence)`` has the positions per
    sample by the beginning of parameters' names.
    """

    config: str
    model: str
    module: Callable[[nn.Module, Any], nn.Module]
    longest: int
    maximum: Callable[[Any], int | None]
    contents: Callable[[Any, int, int], Contents]
    words: Callable[[Any], int]
    plan: Mapping[str, str] | None
    vocabulary: tuple[str, ...]
    tokens: Callable[[Any, int], Mapping[str, int]]


def _text(config: Any) -> Any:
    return config.text_config


def _patches(config: Any) -> int:
    """Tokens of an image: its patches and one for the class."""
    return int(config.image_size // config.patch_size) ** 2 + 1


def _image(config: Any) -> tuple[int, int, int]:
    return config.num_channels, config.image_size, config.image_size


def _of(*names: str) -> Callable[[Any], Any]:
    """A configuration's number by the path of its name."""

    def read(config: Any) -> Any:
        for name in names:
            config = getattr(config, name)
        return config

    return read


# How weights are split ---------------------------------------------------------------------------------------------

_GPT2 = {
    "model.transformer.h.*.attn.c_attn": "packed_colwise",
    "model.transformer.h.*.attn.c_proj": "rowwise",
    "model.transformer.h.*.mlp.c_fc": "colwise",
    "model.transformer.h.*.mlp.c_proj": "rowwise",
}


def _bert_like(layers: str, attention: str) -> dict[str, str]:
    return {
        **{f"{layers}.*.attention.{attention}.{each}": "colwise" for each in ("query", "key", "value")},
        f"{layers}.*.attention.output.dense": "rowwise",
        f"{layers}.*.intermediate.dense": "colwise",
        f"{layers}.*.output.dense": "rowwise",
    }


def _t5_like() -> dict[str, str]:
    found: dict[str, str] = {}
    for side in ("encoder", "decoder"):
        for attention in ("SelfAttention", "EncDecAttention"):
            at = f"model.{side}.block.*.layer.*.{attention}"
            found |= {f"{at}.{each}": "colwise" for each in ("q", "k", "v", "relative_attention_bias")}
            found[f"{at}.o"] = "rowwise"
        at = f"model.{side}.block.*.layer.*.DenseReluDense"
        found |= {f"{at}.wi": "colwise", f"{at}.wi_0": "colwise", f"{at}.wi_1": "colwise", f"{at}.wo": "rowwise"}
    return found


def _clip() -> dict[str, str]:
    found: dict[str, str] = {}
    for tower in ("text_model", "vision_model"):
        at = f"model.{tower}.encoder.layers.*"
        found |= {f"{at}.self_attn.{each}_proj": "colwise" for each in "qkv"}
        found |= {f"{at}.self_attn.out_proj": "rowwise", f"{at}.mlp.fc1": "colwise", f"{at}.mlp.fc2": "rowwise"}
    return found


def _flava() -> dict[str, str]:
    towers = ("text_model", "image_model", "multimodal_model")
    return {
        pattern: way
        for tower in towers
        for pattern, way in _bert_like(f"model.{tower}.encoder.layer", "attention").items()
    }


# What samples are --------------------------------------------------------------------------------------------------


def _translated(config: Any, vocabulary: int, sequence: int) -> Contents:
    """T5's decoder starts with the padding token."""
    return Contents("translated", vocabulary, sequence, config.pad_token_id or 0)


def _paired(config: Any, vocabulary: int, sequence: int) -> Contents:
    return Contents("paired", vocabulary, sequence, _text(config).eos_token_id or 0, _image(config.vision_config))


def _captioned(config: Any, vocabulary: int, sequence: int) -> Contents:
    return Contents("captioned", vocabulary, sequence, _MASK_TOKEN, _image(config.image_config))


_MASK_TOKEN = 103  # of BERT's vocabulary, which Flava shares


def _captions(model: nn.Module, config: Any) -> nn.Module:
    from transformers.models.flava.modeling_flava import FlavaMaskedPredictionHead

    return Captions(model, FlavaMaskedPredictionHead(config.text_config))


def _fused_tokens(config: Any, sequence: int) -> dict[str, int]:
    patches = _patches(config.image_config)
    fused = patches + sequence + bool(config.multimodal_config.use_cls_token)
    return {"model.image_model": patches, "model.multimodal_model": fused, "": sequence}


# The families ------------------------------------------------------------------------------------------------------


def _decoder(config: str, model: str, **changes: Any) -> ModelFamily:
    """A causal language model with Llama's names."""
    usual: dict[str, Any] = {
        "module": lambda made, _: WordsModel(made),
        "longest": _LONGEST,
        "maximum": _of("max_position_embeddings"),
        "contents": partial(_simple, "causal"),
        "words": _of("vocab_size"),
        "plan": None,
        "vocabulary": ("model.model.embed_tokens", "model.lm_head"),
        "tokens": lambda _, sequence: {"": sequence},
    }
    return ModelFamily(config, model, **{**usual, **changes})


def _simple(kind: str, config: Any, vocabulary: int, sequence: int) -> Contents:
    return Contents(kind, vocabulary, sequence, _MASK_TOKEN)


def _t5(config: str, model: str) -> ModelFamily:
    return _decoder(
        config,
        model,
        module=lambda made, _: Translation(made),
        longest=_MASKED_LONGEST,
        maximum=lambda _: None,
        contents=_translated,
        plan=_t5_like(),
        vocabulary=("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "model.lm_head"),
    )


FAMILIES: dict[str, ModelFamily] = {
    "gpt2": _decoder(
        "GPT2Config", "GPT2LMHeadModel", plan=_GPT2, vocabulary=("model.transformer.wte", "model.lm_head")
    ),
    "llama": _decoder("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": _decoder("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": _decoder("Qwen3Config", "Qwen3ForCausalLM"),
    "mistral": _decoder("MistralConfig", "MistralForCausalLM"),
    "mixtral": _decoder("MixtralConfig", "MixtralForCausalLM"),
    "bert": _decoder(
        "BertConfig",
        "BertForMaskedLM",
        longest=_MASKED_LONGEST,
        contents=partial(_simple, "masked"),
        plan=_bert_like("model.bert.encoder.layer", "self"),
        vocabulary=("model.bert.embeddings.word_embeddings", "model.cls.predictions.decoder"),
    ),
    "t5": _t5("T5Config", "T5ForConditionalGeneration"),
    "mt5": _t5("MT5Config", "MT5ForConditionalGeneration"),
    "clip": _decoder(
        "CLIPConfig",
        "CLIPModel",
        module=lambda made, _: Pairs(made),
        longest=_CAPTION_LONGEST,
        maximum=_of("text_config", "max_position_embeddings"),
        contents=_paired,
        words=_of("text_config", "vocab_size"),
        plan=_clip(),
        vocabulary=("model.text_model.embeddings.token_embedding",),
        tokens=lambda config, sequence: {"model.vision_model": _patches(config.vision_config), "": sequence},
    ),
    "flava": _decoder(
        "FlavaConfig",
        "FlavaModel",
        module=_captions,
        longest=_CAPTION_LONGEST,
        maximum=_of("text_config", "max_position_embeddings"),
        contents=_captioned,
        words=_of("text_config", "vocab_size"),
        plan=_flava(),
        vocabulary=("model.text_model.embeddings.word_embeddings", "head.decoder"),
        tokens=_fused_tokens,
    ),
}
"""By ``model_type``."""


def family_of(name: str) -> ModelFamily:
    """The family of a ``model_type``, or of the name of its configuration's class.

    Raises:
        UsageError: it is not among those known.
    """
    for model_type, family in FAMILIES.items():
        if name in (model_type, family.config):
            return family
    known = ", ".join(f"{family.config} ({model_type})" for model_type, family in FAMILIES.items())
    raise UsageError(
        f"configurations of {name!r} are not known; known are {known}. For any other model write a function that "
        "returns the module and its example inputs, and give it as pkg.mod:function (docs/capture.md)"
    )
