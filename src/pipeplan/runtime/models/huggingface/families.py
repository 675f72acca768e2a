"""The known families: their class in transformers, their samples, and how their weights are split.

Ways of splitting a layer, as transformers names them: ``colwise`` splits its outputs, ``rowwise`` its inputs, so that
its output is a sum over the devices; ``packed_colwise`` splits each of the parts that its outputs consist of. The
bias of a ``rowwise`` layer is whole on every device. Attention between the two has a share of the heads.

transformers applies such plans by itself, with a process group of as many ranks and DTensors, when it loads a model.
Here one device's share is made by itself, without the other devices, to be captured and measured.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, cast

from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.models.huggingface.adapters import (
    ATTENTION,
    LOAD,
    Captions,
    ChosenExperts,
    Contents,
    Illustrated,
    Labels,
    Maker,
    Pairs,
    Speech,
    Translation,
    WordsModel,
    causal,
    gate_of,
    illustrated,
    labelled,
    masked,
    paired,
    spoken,
    translated,
)
from pipeplan.runtime.parallel.places import DividedPlaces
from pipeplan.runtime.parallel.sharding import Cut

_LONGEST = 1024
_MASKED_LONGEST = 512
_CAPTION_LONGEST = 77  # words of CLIP's and Flava's texts

_MASK_TOKEN = 103  # of BERT's vocabulary, which Flava shares


def _simple(make: Maker, config: Any, vocabulary: int, sequence: int) -> Contents:
    return Contents(make, vocabulary, sequence, _MASK_TOKEN)


_CAUSAL = partial(_simple, causal)


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One ``model_type``; without more a causal language model with Llama's names.

    ``config`` and ``model`` are classes of transformers by name, ``module(model, config)`` wraps a model so that it
    returns a loss. ``longest`` is the sequence without ``--sequence``, if ``maximum(config)`` (None: any length) is
    not smaller. ``contents(config, vocabulary, sequence)`` says what its samples are, ``words(config)`` how large the
    vocabulary is. ``plan`` has patterns of module or parameter names inside the wrapper, ``*`` for one part of a name,
    with the way each is split, or makes them of a configuration; None: the configuration's own ``base_model_tp_plan``.
    Where it ``divides``, shares have slices of the sequence outside of split products, up to what ``last`` gives, or
    without it up to the vocabulary; but only of what is ``inside`` modules with these beginnings of their names.
    ``vocabulary`` are the names of what has a row for each word. ``tokens(config, sequence)`` has the positions per
    sample by the beginning of parameters' names, as :func:`positions_at` reads them. ``arguments`` are read by the
    model though its configuration does not declare them, and ``attention`` is the one of transformers' that it is built
    with. ``misfit(config)`` says which of a configuration's sizes do not go together, empty where they do.
    """

    config: str
    model: str
    module: Callable[[nn.Module, Any], nn.Module] = lambda made, _: WordsModel(made)
    longest: int = _LONGEST
    maximum: Callable[[Any], int | None] = attrgetter("max_position_embeddings")
    contents: Callable[[Any, int, int], Contents] = _CAUSAL
    words: Callable[[Any], int] = attrgetter("vocab_size")
    plan: Mapping[str, str] | Callable[[Any], Mapping[str, str]] | None = None
    vocabulary: tuple[str, ...] = ("model.model.embed_tokens", "model.lm_head")
    tokens: Callable[[Any, int], Mapping[str, int]] = lambda _, sequence: {"": sequence}
    divides: bool = True
    inside: tuple[str, ...] = ("",)
    last: str = ""
    arguments: tuple[str, ...] = ()
    attention: str = ATTENTION
    misfit: Callable[[Any], str] = lambda _: ""

    @property
    def is_decoder(self) -> bool:
        """Whether its models write texts on, one word after another, and take nothing else."""
        return self.contents is _CAUSAL

    def divided(self, name: str) -> bool:
        """Whether shares have slices of the sequence around a module or parameter."""
        return self.divides and name.startswith(self.inside)


def _text(config: Any) -> Any:
    return config.text_config


def _patches(config: Any) -> int:
    """Tokens of an image: its patches and one for the class."""
    return int(config.image_size // config.patch_size) ** 2 + 1


def _image(config: Any) -> tuple[int, int, int]:
    return config.num_channels, config.image_size, config.image_size


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
    return Contents(translated, vocabulary, sequence, config.pad_token_id or 0)


def _paired(config: Any, vocabulary: int, sequence: int) -> Contents:
    return Contents(paired, vocabulary, sequence, _text(config).eos_token_id or 0, _image(config.vision_config))


def _captioned(config: Any, vocabulary: int, sequence: int) -> Contents:
    return Contents(masked, vocabulary, sequence, _MASK_TOKEN, _image(config.image_config))


def _captions(model: nn.Module, config: Any) -> nn.Module:
    from transformers.models.flava.modeling_flava import FlavaMaskedPredictionHead

    return Captions(model, FlavaMaskedPredictionHead(config.text_config))


def _fused_tokens(config: Any, sequence: int) -> dict[str, int]:
    patches = _patches(config.image_config)
    fused = patches + sequence + bool(config.multimodal_config.use_cls_token)
    return {"model.image_model": patches, "model.multimodal_model": fused, "": sequence}


_NEOX = {
    "model.gpt_neox.layers.*.attention.query_key_value": "colwise",
    "model.gpt_neox.layers.*.attention.dense": "rowwise",
    "model.gpt_neox.layers.*.mlp.dense_h_to_4h": "colwise",
    "model.gpt_neox.layers.*.mlp.dense_4h_to_h": "rowwise",
}


def _llama_attention(layers: str) -> dict[str, str]:
    return {
        **{f"{layers}.*.self_attn.{each}_proj": "colwise" for each in "qkv"},
        f"{layers}.*.self_attn.o_proj": "rowwise",
    }


def _gated(*parts: str) -> dict[str, str]:
    """Feed-forward parts with a gate, by their names."""
    ways = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
    return {f"{part}.{each}": way for part in parts for each, way in ways.items()}


_PHI3 = {  # transformers' own makes what query, key and value are cut from whole again, and gate and input
    "model.model.layers.*.self_attn.qkv_proj": "packed_colwise",
    "model.model.layers.*.self_attn.o_proj": "rowwise",
    "model.model.layers.*.mlp.gate_up_proj": "packed_colwise",
    "model.model.layers.*.mlp.down_proj": "rowwise",
}
_PHIMOE = {  # transformers' own leaves attention whole
    **_llama_attention("model.model.layers"),
    "model.model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "model.model.layers.*.mlp.experts.down_proj": "rowwise",
}


def _falcon_like(config: Any) -> dict[str, str]:
    """Each key with the queries that share it stands behind the one before; but one for all of them is whole.

    Biases of attention (``alibi``) are made for all heads, so that nothing is split.
    """
    if config.alibi:
        return {}
    single = config.multi_query and not config.new_decoder_architecture
    return {
        "model.transformer.h.*.self_attention.query_key_value": "packed_colwise" if single else "colwise",
        "model.transformer.h.*.self_attention.dense": "rowwise",
        "model.transformer.h.*.mlp.dense_h_to_4h": "colwise",
        "model.transformer.h.*.mlp.dense_4h_to_h": "rowwise",
    }


def _llama4_like(layers: str) -> dict[str, str]:
    """With the expert that all words take, and experts as one part of a layer (:class:`ChosenExperts`)."""
    return {
        **_llama_attention(layers),
        f"{layers}.*.feed_forward.model.experts.gate_up_proj": "packed_colwise",
        f"{layers}.*.feed_forward.model.experts.down_proj": "rowwise",
        **_gated(f"{layers}.*.feed_forward", f"{layers}.*.feed_forward.model.shared_expert"),
    }


def _layers(at: str, attention: str, out: str, feed_forward: str = "") -> dict[str, str]:
    """Layers with ``q_proj``, ``k_proj`` and ``v_proj``, and with ``fc1`` and ``fc2``."""
    return {
        **{f"{at}.*.{attention}.{each}_proj": "colwise" for each in "qkv"},
        f"{at}.*.{attention}.{out}": "rowwise",
        f"{at}.*.{feed_forward}fc1": "colwise",
        f"{at}.*.{feed_forward}fc2": "rowwise",
    }


_VIT = _layers("model.vit.layers", "attention", "o_proj", "mlp.")
_WHISPER = {
    **_layers("model.model.encoder.layers", "self_attn", "out_proj"),
    **_layers("model.model.decoder.layers", "self_attn", "out_proj"),
    **_layers("model.model.decoder.layers", "encoder_attn", "out_proj"),
}
_OPT = _layers("model.model.decoder.layers", "self_attn", "out_proj")
_CLIP = {
    **_layers("model.text_model.encoder.layers", "self_attn", "out_proj", "mlp."),
    **_layers("model.vision_model.encoder.layers", "self_attn", "out_proj", "mlp."),
}

_QWEN2_MOE = {  # transformers' own leaves the expert that all words take whole
    **_llama_attention("model.model.layers"),
    "model.model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "model.model.layers.*.mlp.experts.down_proj": "rowwise",
    **_gated("model.model.layers.*.mlp", "model.model.layers.*.mlp.shared_expert"),
}

LATENT_WEIGHT = ".self_attn.kv_b_proj.weight"
"""Ends the names of what makes keys and values of latents."""

_LATENT = {  # transformers' own leaves attention whole; what projects to latents is whole on every device
    **{f"model.model.layers.*.self_attn.{each}_proj": "colwise" for each in ("q", "q_b", "kv_b")},
    "model.model.layers.*.self_attn.o_proj": "rowwise",
    "model.model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "model.model.layers.*.mlp.experts.down_proj": "rowwise",
    **_gated("model.model.layers.*.mlp", "model.model.layers.*.mlp.shared_experts"),
}


def _spoken(config: Any, vocabulary: int, sequence: int) -> Contents:
    """Whisper's first layers halve the times of its spectra."""
    shape = (config.num_mel_bins, 2 * config.max_source_positions)
    return Contents(spoken, vocabulary, sequence, config.decoder_start_token_id, shape, "sound")


def _heard(config: Any, sequence: int) -> dict[str, int]:
    across = "model.model.decoder.layers.*.encoder_attn"
    places = ("model.model.encoder", f"{across}.k_proj", f"{across}.v_proj")
    return dict.fromkeys(places, config.max_source_positions) | {"": sequence}


def _labelled(config: Any, vocabulary: int, sequence: int) -> Contents:
    return Contents(labelled, vocabulary, sequence, 0, _image(config))


def _illustrated(image_tokens: Callable[[Any], int], token: str) -> Callable[[Any, int, int], Contents]:
    """Texts of which an image takes the first tokens, each with the configuration's ``token``."""

    def contents(config: Any, vocabulary: int, sequence: int) -> Contents:
        count = image_tokens(config)
        if sequence <= count:
            raise UsageError(f"--sequence {sequence}: the image alone has {count} tokens; give more than that")
        special, words = getattr(config, token), _text(config).vocab_size
        if not 0 <= special < words:  # a share has some of them, and takes its last one for it
            raise UsageError(f"{token}={special} is not a word of a vocabulary of {words}; change one of them")
        return Contents(illustrated, vocabulary, sequence, special, _image(config.vision_config), "pixels", count)

    return contents


# Modules -----------------------------------------------------------------------------------------------------------


def _falcon(made: Any, config: Any) -> nn.Module:
    """Falcon knows two attentions of its own, of which it takes torch's; the mask is left to that, too.

    Its linear layers write their product in another way than torch's, whose weight gradients can wait.
    """
    for each in made.modules():
        if type(each).__name__ == "FalconLinear":
            each.__class__ = nn.Linear
    made.transformer.config = copy.copy(config)
    made.transformer.config._attn_implementation = ATTENTION
    return WordsModel(made)


def _with_chosen_experts(made: nn.Module) -> nn.Module:
    for layer in [each for each in made.modules() if type(each).__name__ == "Llama4TextDecoderLayer"]:
        if type(layer.feed_forward).__name__ == "Llama4TextMoe":
            layer.feed_forward = ChosenExperts(layer.feed_forward)
    return made


# The families ------------------------------------------------------------------------------------------------------


def _t5(config: str, model: str) -> ModelFamily:
    return ModelFamily(
        config,
        model,
        module=lambda made, _: Translation(made),
        longest=_MASKED_LONGEST,
        maximum=lambda _: None,
        contents=_translated,
        plan=_t5_like(),
        vocabulary=("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "model.lm_head"),
    )


def _seeing(
    config: str,
    model: str,
    image_tokens: Callable[[Any], int],
    token: str,
    plan: Mapping[str, str],
    words: tuple[str, str],
    tower: str,
    patches: Callable[[Any], int],
    misfit: Callable[[Any], str],
) -> ModelFamily:
    """Language models with a vision ``tower``, whose configuration has one for each.

    Devices divide the sequence of texts, with the image's place in them, and not the tower's.
    """
    return ModelFamily(
        config,
        model,
        module=lambda made, _: Illustrated(_with_chosen_experts(made)),
        maximum=attrgetter("text_config.max_position_embeddings"),
        contents=_illustrated(image_tokens, token),
        words=attrgetter("text_config.vocab_size"),
        plan=plan,
        vocabulary=words,
        inside=(words[0].rpartition(".")[0], words[1]),
        tokens=lambda config, sequence: {tower: patches(config.vision_config), "": sequence},
        misfit=misfit,
    )


def _llama4_image(config: Any) -> int:
    return int((_patches(config.vision_config) - 1) * config.vision_config.pixel_shuffle_ratio**2)


def _llama4_misfit(config: Any) -> str:
    """Patches are joined, 1 by 1 over the ratio's square, into what the feed-forward after the tower takes."""
    seen = config.vision_config
    joined = int(seen.hidden_size / seen.pixel_shuffle_ratio**2)
    if seen.intermediate_size != joined:
        return (
            f"vision_config.intermediate_size={seen.intermediate_size} is not {joined}, which is hidden_size="
            f"{seen.hidden_size} over the square of pixel_shuffle_ratio={seen.pixel_shuffle_ratio}; change one of them"
        )
    if not seen.projector_input_dim == seen.projector_output_dim == seen.vision_output_dim:
        return (
            f"vision_config's projector_input_dim={seen.projector_input_dim}, projector_output_dim="
            f"{seen.projector_output_dim} and vision_output_dim={seen.vision_output_dim} differ; make them equal"
        )
    return ""


def _gemma3_misfit(config: Any) -> str:
    """Squares of patches are averaged into the tokens of an image, as many on each side of it."""
    patches, tokens = _patches(config.vision_config) - 1, config.mm_tokens_per_image
    across, along = math.isqrt(patches), math.isqrt(max(tokens, 1))
    if along**2 == tokens and across >= along and across // (across // along) == along:
        return ""
    return (
        f"mm_tokens_per_image={tokens} cannot be averages of squares of an image's {across} by {across} patches "
        f"(vision_config.image_size={config.vision_config.image_size} by patch_size="
        f"{config.vision_config.patch_size}); give {across**2}, or as many as patches in both directions divide into"
    )


FAMILIES: dict[str, ModelFamily] = {
    "gpt2": ModelFamily(
        "GPT2Config",
        "GPT2LMHeadModel",
        plan=_GPT2,
        vocabulary=("model.transformer.wte", "model.lm_head"),
        last="model.transformer.ln_f",
    ),
    "llama": ModelFamily("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ModelFamily("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ModelFamily("Qwen3Config", "Qwen3ForCausalLM"),
    "mistral": ModelFamily("MistralConfig", "MistralForCausalLM"),
    "mixtral": ModelFamily("MixtralConfig", "MixtralForCausalLM"),
    "qwen2_moe": ModelFamily("Qwen2MoeConfig", "Qwen2MoeForCausalLM", plan=_QWEN2_MOE),
    "qwen3_moe": ModelFamily("Qwen3MoeConfig", "Qwen3MoeForCausalLM", arguments=("head_dim",)),
    "deepseek_v2": ModelFamily("DeepseekV2Config", "DeepseekV2ForCausalLM", plan=_LATENT),
    "deepseek_v3": ModelFamily("DeepseekV3Config", "DeepseekV3ForCausalLM", plan=_LATENT),
    "llama4_text": ModelFamily(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        module=lambda made, _: WordsModel(_with_chosen_experts(made)),
        plan=_llama4_like("model.model.layers"),
    ),
    "gemma": ModelFamily("GemmaConfig", "GemmaForCausalLM"),
    "gemma2": ModelFamily("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3_text": ModelFamily("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "phi": ModelFamily("PhiConfig", "PhiForCausalLM"),
    "phi3": ModelFamily("Phi3Config", "Phi3ForCausalLM", plan=_PHI3),
    "phimoe": ModelFamily("PhimoeConfig", "PhimoeForCausalLM", plan=_PHIMOE),
    "gpt_neox": ModelFamily(
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        plan=_NEOX,
        vocabulary=("model.gpt_neox.embed_in", "model.lm_head", "model.embed_out"),
    ),
    "opt": ModelFamily(
        "OPTConfig",
        "OPTForCausalLM",
        plan=_OPT,
        vocabulary=("model.model.decoder.embed_tokens", "model.lm_head"),
    ),
    "falcon": ModelFamily(
        "FalconConfig",
        "FalconForCausalLM",
        module=_falcon,
        plan=_falcon_like,
        vocabulary=("model.transformer.word_embeddings", "model.lm_head"),
        attention="sdpa",
    ),
    "llama4": _seeing(
        "Llama4Config",
        "Llama4ForConditionalGeneration",
        _llama4_image,
        "image_token_index",
        _llama4_like("model.language_model.model.layers")
        | _layers("model.vision_model.model.layers", "self_attn", "o_proj", "mlp."),
        ("model.language_model.model.embed_tokens", "model.language_model.lm_head"),
        "model.vision_model",
        _patches,
        _llama4_misfit,
    ),
    "gemma3": _seeing(
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        attrgetter("mm_tokens_per_image"),
        "image_token_index",
        _llama_attention("model.model.language_model.layers")
        | _gated("model.model.language_model.layers.*.mlp")
        | _layers("model.model.vision_tower.encoder.layers", "self_attn", "out_proj", "mlp."),
        ("model.model.language_model.embed_tokens", "model.lm_head"),
        "model.model.vision_tower",
        lambda config: _patches(config) - 1,
        _gemma3_misfit,
    ),
    "vit": ModelFamily(
        "ViTConfig",
        "ViTForImageClassification",
        module=lambda made, _: Labels(made),
        longest=1,
        maximum=lambda _: 1,
        contents=_labelled,
        words=attrgetter("num_labels"),
        plan=_VIT,
        divides=False,
        vocabulary=(),
        tokens=lambda config, _: {"": _patches(config)},
        arguments=("num_labels",),
    ),
    "whisper": ModelFamily(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        module=lambda made, _: Speech(made),
        longest=448,
        maximum=attrgetter("max_target_positions"),
        contents=_spoken,
        plan=_WHISPER,
        vocabulary=("model.model.decoder.embed_tokens", "model.proj_out"),
        tokens=_heard,
    ),
    "bert": ModelFamily(
        "BertConfig",
        "BertForMaskedLM",
        longest=_MASKED_LONGEST,
        contents=partial(_simple, masked),
        plan=_bert_like("model.bert.encoder.layer", "self"),
        vocabulary=("model.bert.embeddings.word_embeddings", "model.cls.predictions.decoder"),
    ),
    "t5": _t5("T5Config", "T5ForConditionalGeneration"),
    "mt5": _t5("MT5Config", "MT5ForConditionalGeneration"),
    "clip": ModelFamily(
        "CLIPConfig",
        "CLIPModel",
        module=lambda made, _: Pairs(made),
        longest=_CAPTION_LONGEST,
        maximum=attrgetter("text_config.max_position_embeddings"),
        contents=_paired,
        words=attrgetter("text_config.vocab_size"),
        plan=_CLIP,
        divides=False,
        vocabulary=("model.text_model.embeddings.token_embedding",),
        tokens=lambda config, sequence: {"model.vision_model": _patches(config.vision_config), "": sequence},
    ),
    "flava": ModelFamily(
        "FlavaConfig",
        "FlavaModel",
        module=_captions,
        longest=_CAPTION_LONGEST,
        maximum=attrgetter("text_config.max_position_embeddings"),
        contents=_captioned,
        words=attrgetter("text_config.vocab_size"),
        plan=_flava(),
        divides=False,
        vocabulary=("model.text_model.embeddings.word_embeddings", "head.decoder"),
        tokens=_fused_tokens,
    ),
}
"""By ``model_type``."""


def family_of(name: str) -> ModelFamily:
    """The family of a ``model_type``, or of the name of its configuration's class. Raises UsageError."""
    for model_type, family in FAMILIES.items():
        if name in (model_type, family.config):
            return family
    known = ", ".join(f"{family.config} ({model_type})" for model_type, family in FAMILIES.items())
    raise UsageError(
        f"configurations of {name!r} are not known; known are {known}. For any other model write a function that "
        "returns the module and its example inputs, and give it as pkg.mod:function (docs/capture.md)"
    )


COLUMNS = ("colwise", "packed_colwise")
ROWS = ("rowwise",)
WORDS = "words"
"""Rows of a table, one for each word; those of devices may differ by one."""

_COUNTS = (
    "all_head_size", "inner_dim", "n_heads", "num_attention_heads", "num_heads", "num_key_value_heads", "num_kv_heads",
    "split_size",
)  # fmt: skip
"""Attributes of attention modules that count what is split; what there is one of, all have."""


def split_weights(module: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """The way each split parameter is split, by its name; the plan has patterns of modules' or parameters' names."""
    found = {}
    for pattern, way in plan.items():
        matcher = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+") + r"(\.weight|\.bias)?")
        for name, _ in module.named_parameters(remove_duplicate=False):
            if way in (*COLUMNS, *ROWS, WORDS) and matcher.fullmatch(name) and not _is_whole(name, way):
                found[name] = way
    return found


def places_of(module: nn.Module, ways: Mapping[str, str], family: ModelFamily, *, apart: bool = False) -> DividedPlaces:
    """Where a share of the module divides the sequence, as its family has it; with experts ``apart`` from the rest."""
    last, ways = family.last, {name: way for name, way in ways.items() if family.divided(name)}
    layers = {layer: None for name in ways if (layer := _layer(name))}
    joins = {path: None for name, way in ways.items() if (path := joined_in(module, name, way, last, apart=apart))}
    scatters = {path: None for name, way in ways.items() if (path := scattered_in(module, name, way, apart=apart))}
    return DividedPlaces(tuple(layers), tuple(joins), tuple(scatters), last)


def joined_in(module: nn.Module, name: str, way: str, last: str = "", *, apart: bool = False) -> str:
    """The module whose input is joined for a split weight: its owner's, or a layer's part with experts; else empty.

    Where experts are ``apart``, nothing is joined for them.
    """
    path, owner = _owner(name)
    if way == WORDS:
        return "" if last or isinstance(module.get_submodule(path), nn.Embedding) else path
    if way not in COLUMNS:
        return ""
    return (not apart and _part_with_experts(module, name)) or (path if owner == _layer(name) else owner)


def scattered_in(module: nn.Module, name: str, way: str, *, apart: bool = False) -> str:
    """The module whose output is scattered for a split weight; empty if it makes no parts of a sum."""
    return ((not apart and _part_with_experts(module, name)) or _owner(name)[0]) if way in ROWS else ""


def _owner(name: str) -> tuple[str, str]:
    """The module with a weight or bias, and the one around it; for other parameters the module twice."""
    path, _, last = name.rpartition(".")
    return (path, path.rpartition(".")[0]) if last in ("weight", "bias") else (path, path)


def _layer(name: str) -> str:
    """The element of the outermost list that has a parameter; empty if none does."""
    parts = name.split(".")
    place = next((place for place, part in enumerate(parts) if part.isdecimal()), -1)
    return ".".join(parts[: place + 1])


def _part_with_experts(module: nn.Module, name: str) -> str:
    """The part of a layer with experts whose parameters combine them with the shared experts; else empty."""
    layer = _layer(name)
    part = f"{layer}.{name.removeprefix(f'{layer}.').partition('.')[0]}"
    return part if layer and hasattr(module.get_submodule(part), "experts") else ""


def _is_whole(name: str, way: str) -> bool:
    return way in ROWS and name.endswith(".bias")


def share_of(module: nn.Module, ways: Mapping[str, str], num_devices: int, rank: int = 0) -> nn.Module:
    """A copy with one device's share of what ``ways`` splits; tied parameters stay tied. Raises UsageError."""
    shares: dict[int, object] = {}  # by the identity of the whole one, as deepcopy wants it
    for name, way in ways.items():
        parameter = module.get_parameter(name)
        if id(parameter) not in shares:
            cut = _cut(module, name, parameter.detach(), way, num_devices, rank).clone()
            shares[id(parameter)] = nn.Parameter(cut, parameter.requires_grad)
    made = copy.deepcopy(module, shares)
    layers = {name.rpartition(".")[0]: way for name, way in ways.items() if name.endswith(".weight")}
    for name in layers:
        _resize(made.get_submodule(name))
    configured: dict[int, Any] = {}
    for name in {name.rpartition(".")[0] for name, way in layers.items() if way in COLUMNS}:
        _count_anew(made.get_submodule(name), num_devices, configured)
    return made


def shared_experts(module: nn.Module) -> dict[str, nn.Module]:
    """The experts that devices can share, by their paths: those whose words go through the function known here."""
    return {
        path: each
        for path, each in module.named_modules()
        if path.endswith(".experts") and hasattr(each, "num_experts") and gate_of(each)
    }


def with_experts_of_one(module: nn.Module, num_devices: int, load: float = 1.0) -> nn.Module:
    """A copy that has one of so many equal parts of the experts of each layer, and shares all other parameters.

    Alone it multiplies ``load`` times as many words as it sends away.
    """
    shares: dict[int, object] = {id(each): each for each in (*module.parameters(), *module.buffers())}
    for owner in module.modules():
        count = getattr(owner, "num_experts", None)
        for parameter in owner.parameters(recurse=False):
            if parameter.ndim == 3 and parameter.shape[0] == count:
                own = parameter.detach()[: count // num_devices].clone()
                shares[id(parameter)] = nn.Parameter(own, parameter.requires_grad)
    made = copy.deepcopy(module, shares)
    for owner in made.modules() if load > 1 else ():
        if hasattr(owner, "num_experts") and any(each.ndim == 3 for each in owner.parameters(recurse=False)):
            setattr(owner, LOAD, load)
    return made


def _cut(module: nn.Module, name: str, whole: Tensor, way: str, num_devices: int, rank: int) -> Tensor:
    """One device's part of a parameter."""
    try:
        return cut_of(module, name, whole, way).cut(whole, num_devices, rank)
    except UsageError as error:
        raise UsageError(f"{name} of {error}; choose a number that divides it") from None


def cut_of(module: nn.Module, name: str, whole: Tensor, way: str) -> Cut:
    """How a parameter of the module is cut that is split in some way."""
    owner = module.get_submodule(name.rpartition(".")[0])
    parts, common = _packed(module, name) if way == "packed_colwise" else (1, 0)
    return Cut(_dimension(owner, whole, way), parts, even=way != WORDS, whole=common)


def _packed(module: nn.Module, name: str) -> tuple[int | tuple[int, ...], int]:
    """Of what parts the outputs of a layer consist, and how many of these, the last, all devices have."""
    path, around = _owner(name)
    layer, attention = path.rpartition(".")[2], cast(Any, module.get_submodule(around))
    if layer == "c_attn":
        return 3, 0  # query, key and value
    if layer == "qkv_proj":
        heads, groups = attention.config.num_attention_heads, attention.num_key_value_heads
        return (heads, groups, groups), 0
    if layer == "query_key_value":
        return (attention.num_heads, 1, 1), 2  # one key and value for all heads
    return 2, 0  # gate and input


def _dimension(owner: nn.Module, whole: Tensor, way: str) -> int:
    """The dimension of a parameter that is split."""
    if whole.ndim == 1 or way == WORDS:
        return 0
    return whole.ndim - 2 if (way in COLUMNS) != is_turned(owner) else whole.ndim - 1


def is_turned(owner: nn.Module) -> bool:
    """Whether weights are [inputs, outputs]: tables, GPT-2's layers, and Llama 4's experts."""
    return type(owner).__name__ in ("Conv1D", "Llama4TextExperts") or isinstance(owner, nn.Embedding)


def widths_of(module: nn.Module, name: str) -> tuple[int, int]:
    """Inputs and outputs of the layer with the weight of that name."""
    first, second = module.get_parameter(name).shape[-2:]
    turned = is_turned(module.get_submodule(name.rpartition(".")[0]))
    return (first, second) if turned else (second, first)


def _resize(layer: nn.Module) -> None:
    """Let a layer know the sizes that its weight has now."""
    weight = layer.get_parameter("weight")
    if isinstance(layer, nn.Embedding):
        layer.num_embeddings, layer.embedding_dim = weight.shape
        if layer.padding_idx is not None and layer.padding_idx >= layer.num_embeddings:
            layer.padding_idx = None
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = weight.shape
    else:  # GPT-2's, the other way round
        for name, size in zip(("nx", "nf"), weight.shape, strict=True):
            setattr(layer, name, size)


def _count_anew(module: Any, num_devices: int, configured: dict[int, Any]) -> None:
    """Divide what a module counts of its heads and widths; ``configured`` are configurations that say so, by others."""
    if type(module).__name__ == "Phi3Attention":  # asks its configuration, which layers that are alike share
        if id(module.config) not in configured:
            configured[id(module.config)] = copy.copy(module.config)
            configured[id(module.config)].num_attention_heads //= num_devices
        module.config = configured[id(module.config)]
    for name in _COUNTS:
        if isinstance(getattr(module, name, None), int):
            setattr(module, name, max(1, getattr(module, name) // num_devices))


def even_widths(module: nn.Module, ways: Mapping[str, str]) -> dict[str, int]:
    """What devices must share evenly of the parameters that ``ways`` splits, of those with one width the first."""
    found: dict[int, dict[str, int]] = {}
    for name, way in ways.items():
        whole = module.get_parameter(name)
        for what, size in cut_of(module, name, whole, way).of(name, whole).items():
            found.setdefault(size, {what: size})
    return {what: size for each in found.values() for what, size in each.items()}
