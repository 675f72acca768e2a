"""The known families: their class in transformers, their samples, and how their weights are split.

Ways of splitting a layer, as transformers names them: ``colwise`` splits its outputs, ``rowwise`` its inputs, so that
its output is a sum over the devices; ``packed_colwise`` splits each of the parts that its outputs consist of. The
bias of a ``rowwise`` layer is whole on every device. Attention between the two has a share of the heads.

transformers applies such plans by itself, with a process group of as many ranks and DTensors, when it loads a model.
Here one device's share is made by itself, without the other devices, to be captured and measured.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.models.huggingface.adapters import (
    ATTENTION,
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
    with the way each is split; None: the configuration's own ``base_model_tp_plan``. Where it ``divides``, shares have
    slices of the sequence outside of split products, up to what ``last`` gives, or without it up to the vocabulary.
    ``vocabulary`` are the names of what has a row for each word. ``tokens(config, sequence)`` has the positions per
    sample by the beginning of parameters' names. ``splits`` is False where nothing says how devices split all of it.
    ``arguments`` are read by the model though its configuration does not declare them, and ``attention`` is the one of
    transformers' that it is built with.
    """

    config: str
    model: str
    module: Callable[[nn.Module, Any], nn.Module] = lambda made, _: WordsModel(made)
    longest: int = _LONGEST
    maximum: Callable[[Any], int | None] = attrgetter("max_position_embeddings")
    contents: Callable[[Any, int, int], Contents] = _CAUSAL
    words: Callable[[Any], int] = attrgetter("vocab_size")
    plan: Mapping[str, str] | None = None
    vocabulary: tuple[str, ...] = ("model.model.embed_tokens", "model.lm_head")
    tokens: Callable[[Any, int], Mapping[str, int]] = lambda _, sequence: {"": sequence}
    splits: bool = True
    divides: bool = True
    last: str = ""
    arguments: tuple[str, ...] = ()
    attention: str = ATTENTION


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


_OPT = {
    **{f"model.model.decoder.layers.*.self_attn.{each}_proj": "colwise" for each in "qkv"},
    "model.model.decoder.layers.*.self_attn.out_proj": "rowwise",
    "model.model.decoder.layers.*.fc1": "colwise",
    "model.model.decoder.layers.*.fc2": "rowwise",
}
_NEOX = {
    "model.gpt_neox.layers.*.attention.query_key_value": "colwise",
    "model.gpt_neox.layers.*.attention.dense": "rowwise",
    "model.gpt_neox.layers.*.mlp.dense_h_to_4h": "colwise",
    "model.gpt_neox.layers.*.mlp.dense_4h_to_h": "rowwise",
}
_QWEN2_MOE = {  # transformers' own leaves the expert that all words take whole
    **{f"model.model.layers.*.self_attn.{each}_proj": "colwise" for each in "qkv"},
    "model.model.layers.*.self_attn.o_proj": "rowwise",
    "model.model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "model.model.layers.*.mlp.experts.down_proj": "rowwise",
    **{
        f"model.model.layers.*.{at}.{each}_proj": way
        for at in ("mlp", "mlp.shared_expert")
        for each, way in {"gate": "colwise", "up": "colwise", "down": "rowwise"}.items()
    },
}

_LATENT = {  # transformers' own leaves attention whole; what projects to latents is whole on every device
    **{f"model.model.layers.*.self_attn.{each}_proj": "colwise" for each in ("q", "q_b", "kv_b")},
    "model.model.layers.*.self_attn.o_proj": "rowwise",
    "model.model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "model.model.layers.*.mlp.experts.down_proj": "rowwise",
    **{
        f"model.model.layers.*.{at}.{each}_proj": way
        for at in ("mlp", "mlp.shared_experts")
        for each, way in {"gate": "colwise", "up": "colwise", "down": "rowwise"}.items()
    },
}


def _spoken(config: Any, vocabulary: int, sequence: int) -> Contents:
    """Whisper's first layers halve the times of its spectra."""
    shape = (config.num_mel_bins, 2 * config.max_source_positions)
    return Contents(spoken, vocabulary, sequence, config.decoder_start_token_id, shape, "sound")


def _labelled(config: Any, vocabulary: int, sequence: int) -> Contents:
    return Contents(labelled, vocabulary, sequence, 0, _image(config))


def _illustrated(image_tokens: Callable[[Any], int], token: str) -> Callable[[Any, int, int], Contents]:
    """Texts of which an image takes the first tokens, each with the configuration's ``token``."""

    def contents(config: Any, vocabulary: int, sequence: int) -> Contents:
        count = image_tokens(config)
        if sequence <= count:
            raise UsageError(f"--sequence {sequence}: the image alone has {count} tokens; give more than that")
        special = getattr(config, token)
        if not 0 <= special < vocabulary:
            raise UsageError(f"{token}={special} is not a word of a vocabulary of {vocabulary}; change one of them")
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


def _seeing(config: str, model: str, image_tokens: Callable[[Any], int], token: str) -> ModelFamily:
    """Language models with a vision tower, whose configuration has one for each."""
    return ModelFamily(
        config,
        model,
        module=lambda made, _: Illustrated(_with_chosen_experts(made)),
        maximum=attrgetter("text_config.max_position_embeddings"),
        contents=_illustrated(image_tokens, token),
        words=attrgetter("text_config.vocab_size"),
        splits=False,
    )


def _llama4_image(config: Any) -> int:
    return int((_patches(config.vision_config) - 1) * config.vision_config.pixel_shuffle_ratio**2)


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
        splits=False,
    ),
    "gemma": ModelFamily("GemmaConfig", "GemmaForCausalLM"),
    "gemma2": ModelFamily("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3_text": ModelFamily("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "phi": ModelFamily("PhiConfig", "PhiForCausalLM"),
    "phi3": ModelFamily("Phi3Config", "Phi3ForCausalLM", splits=False),
    "phimoe": ModelFamily("PhimoeConfig", "PhimoeForCausalLM", splits=False),
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
    "falcon": ModelFamily("FalconConfig", "FalconForCausalLM", module=_falcon, splits=False, attention="sdpa"),
    "llama4": _seeing("Llama4Config", "Llama4ForConditionalGeneration", _llama4_image, "image_token_index"),
    "gemma3": _seeing(
        "Gemma3Config", "Gemma3ForConditionalGeneration", attrgetter("mm_tokens_per_image"), "image_token_index"
    ),
    "vit": ModelFamily(
        "ViTConfig",
        "ViTForImageClassification",
        module=lambda made, _: Labels(made),
        longest=1,
        maximum=lambda _: 1,
        contents=_labelled,
        words=attrgetter("num_labels"),
        splits=False,
        arguments=("num_labels",),
    ),
    "whisper": ModelFamily(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        module=lambda made, _: Speech(made),
        longest=448,
        maximum=attrgetter("max_target_positions"),
        contents=_spoken,
        splits=False,
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
        plan=_clip(),
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

_PARTS = {"c_attn": 3}  # query, key and value
_USUAL_PARTS = 2  # gate and input
_COUNTS = ("all_head_size", "inner_dim", "n_heads", "num_attention_heads", "num_heads", "split_size")
"""Attributes of attention modules that count what is split."""


def split_weights(module: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """The way each split parameter is split, by its name; the plan has patterns of modules' or parameters' names."""
    found = {}
    for pattern, way in plan.items():
        matcher = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+") + r"(\.weight|\.bias)?")
        for name, _ in module.named_parameters(remove_duplicate=False):
            if way in (*COLUMNS, *ROWS, WORDS) and matcher.fullmatch(name) and not _is_whole(name, way):
                found[name] = way
    return found


def places_of(module: nn.Module, ways: Mapping[str, str], last: str = "") -> DividedPlaces:
    """Where a share of the module divides the sequence, as :class:`ModelFamily` has it."""
    layers = {layer: None for name in ways if (layer := _layer(name))}
    joins = {path: None for name, way in ways.items() if (path := joined_in(module, name, way, last))}
    scatters = {path: None for name, way in ways.items() if (path := scattered_in(module, name, way))}
    return DividedPlaces(tuple(layers), tuple(joins), tuple(scatters), last)


def joined_in(module: nn.Module, name: str, way: str, last: str = "") -> str:
    """The module whose input is joined for a split weight: its owner's, or a layer's part with experts; else empty."""
    path, owner = _owner(name)
    if way == WORDS:
        return "" if last or isinstance(module.get_submodule(path), nn.Embedding) else path
    if way not in COLUMNS:
        return ""
    return _part_with_experts(module, name) or (path if owner == _layer(name) else owner)


def scattered_in(module: nn.Module, name: str, way: str) -> str:
    """The module whose output is scattered for a split weight; empty if it makes no parts of a sum."""
    return (_part_with_experts(module, name) or _owner(name)[0]) if way in ROWS else ""


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
    for name in {name.rpartition(".")[0] for name, way in layers.items() if way in COLUMNS}:
        _count_anew(made.get_submodule(name), num_devices)
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
    last = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    parts = _PARTS.get(last, _USUAL_PARTS) if way == "packed_colwise" else 1
    return Cut(_dimension(owner, whole, way), parts, even=way != WORDS)


def _dimension(owner: nn.Module, whole: Tensor, way: str) -> int:
    """The dimension of a parameter that is split."""
    if whole.ndim == 1 or way == WORDS:
        return 0
    return whole.ndim - 2 if (way in COLUMNS) != is_turned(owner) else whole.ndim - 1


def is_turned(owner: nn.Module) -> bool:
    """Whether weights are [inputs, outputs]: tables, and GPT-2's layers."""
    return type(owner).__name__ == "Conv1D" or isinstance(owner, nn.Embedding)


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


def _count_anew(module: nn.Module, num_devices: int) -> None:
    """Divide what a module counts of its heads and widths."""
    for name in _COUNTS:
        if isinstance(getattr(module, name, None), int):
            setattr(module, name, getattr(module, name) // num_devices)


def even_widths(module: nn.Module, ways: Mapping[str, str]) -> dict[str, int]:
    """What devices must share evenly of the parameters that ``ways`` splits, of those with one width the first."""
    found: dict[int, dict[str, int]] = {}
    for name, way in ways.items():
        whole = module.get_parameter(name)
        for what, size in cut_of(module, name, whole, way).of(name, whole).items():
            found.setdefault(size, {what: size})
    return {what: size for each in found.values() for what, size in each.items()}
