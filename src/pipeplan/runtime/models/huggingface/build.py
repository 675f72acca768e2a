"""From a configuration, in a local file or in text, to a model of blocks, whole and as one device's share.

Configurations are data, never code, and never a download.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeplan.errors import FileError, UsageError, did_you_mean
from pipeplan.files.read_write import read_text
from pipeplan.runtime.models.capture import capture, parameters_of, with_first_layers
from pipeplan.runtime.models.huggingface.adapters import (
    ATTENTION,
    ChosenExperts,
    Contents,
    Pairs,
    PlacedModel,
    WordsModel,
    WritingModel,
    batch_of,
    causal_tokens,
    register_functions,
    texts_of,
)
from pipeplan.runtime.models.huggingface.families import (
    COLUMNS,
    LATENT_WEIGHT,
    ROWS,
    WORDS,
    ModelFamily,
    cut_of,
    even_widths,
    family_of,
    joined_in,
    places_of,
    scattered_in,
    share_of,
    split_weights,
    widths_of,
    with_experts_of_one,
)
from pipeplan.runtime.models.huggingface.running import RunningShares
from pipeplan.runtime.models.spec import (
    Batch,
    BlockSpec,
    CausalDecoder,
    Collective,
    Grain,
    Model,
    shards_named,
    with_positions,
)
from pipeplan.runtime.parallel.context import require_pieces
from pipeplan.runtime.parallel.places import Exchanges, positions_at
from pipeplan.runtime.parallel.sharding import require_even
from pipeplan.texts import of_json

Description = tuple[str, dict[str, Any], bool]
"""A family's ``model_type`` or class name, its keyword arguments, and whether unknown ones are mistakes."""

_IGNORED = {
    "architectures", "attn_implementation", "auto_map", "dtype", "experts_implementation", "model_type",
    "output_attentions", "output_hidden_states", "output_router_logits", "quantization_config", "return_dict",
    "torch_dtype", "torchscript",
}  # fmt: skip
"""Keys that would bring in other code, formats or outputs; models are made from their class, in float32."""


def describe(text: str) -> Description:
    """What a path of a ``config.json``, or a text such as ``LlamaConfig(hidden_size=512)``, says. Raises UsageError."""
    if text.endswith(".json"):
        return _from_file(Path(text))
    try:
        expression = ast.parse(text.strip(), mode="eval").body
        match expression:
            case ast.Name(id=name):
                return name, {}, True
            case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords) if all(each.arg for each in keywords):
                return name, {str(each.arg): ast.literal_eval(each.value) for each in keywords}, True
    except (SyntaxError, ValueError):
        pass
    raise UsageError(
        f"configuration {text!r} is neither the path of a config.json nor of the form "
        "LlamaConfig(hidden_size=512, num_hidden_layers=4) with numbers, texts, lists and dicts; "
        "nothing is downloaded, so save the config.json of a model of the hub first"
    )


def _from_file(path: Path) -> Description:
    try:
        found = of_json(read_text(str(path)))
    except FileError as error:
        raise UsageError(
            f"configuration {error}; nothing is downloaded, so save the config.json of a model of the hub first"
        ) from error
    except ValueError as error:
        raise UsageError(f"configuration {path} is not JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise UsageError(f"configuration {path} has no 'model_type', so it is not one of transformers")
    return found["model_type"], found, False


def _configuration(family: ModelFamily, keywords: Mapping[str, Any], strict: bool, where: str) -> Any:
    """A family's configuration; ``strict`` refuses arguments that it would keep without using them."""
    cls = getattr(_transformers(), family.config)
    if strict:
        _refuse_unknown(cls(), keywords, where, family.arguments)
    try:
        config = cls(**{key: value for key, value in keywords.items() if key not in _IGNORED})
    except Exception as error:  # whatever the class raises
        raise UsageError(
            f"configuration {where}: {cls.__name__} refuses it: {type(error).__name__}: {error}"
        ) from error
    config._attn_implementation = family.attention
    config._experts_implementation = ATTENTION
    return config


def _refuse_unknown(default: Any, keywords: Mapping[str, Any], where: str, further: tuple[str, ...] = ()) -> None:
    older = ("rope_scaling", "rope_theta") if hasattr(default, "rope_parameters") else ()
    known = {key for key in (*vars(default), *default.attribute_map, *older, *further) if not key.startswith("_")}
    for key, value in keywords.items():
        if key not in known:
            raise UsageError(
                f"configuration {where}: {type(default).__name__} has no argument {key!r}; "
                + (did_you_mean(key, sorted(known), by_word=True) or f"it has {', '.join(sorted(known))}")
            )
        inner = getattr(default, key, None)
        if not isinstance(value, Mapping) or inner is None or not hasattr(inner, "attribute_map"):
            continue
        if value.get("model_type", inner.model_type) == inner.model_type:
            _refuse_unknown(inner, value, where, ("model_type",))


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The module of a configuration, whole or one device's share of it.

    Attributes:
        name: the family's, and what sets this model apart.
        family: which one.
        config: of transformers.
        module: its forward takes the tensors of a batch by name and returns the summed loss; no dropout, no cache.
        sequence: tokens per text.
        ways: how each parameter is split, by its name: "colwise", "packed_colwise", "rowwise" or "words".
        devices: that share the whole.
        divided: whether they divide the sequence outside of split products.
        writes: whether it gives the logits of the word after the last instead of a loss, which devices never divide.
        placed: whether it then takes the position of every word, too.
    """

    name: str
    family: ModelFamily
    config: Any
    module: nn.Module
    sequence: int
    ways: Mapping[str, str]
    devices: int = 1
    divided: bool = False
    writes: bool = False
    placed: bool = False

    @property
    def contents(self) -> Contents:
        """What samples are made of: for a share, of one device's words."""
        words = -(-self.family.words(self.config) // self.devices)
        return self.family.contents(self.config, words, self.sequence)

    def batch(self, num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
        """As :class:`Model` has it."""
        made = batch_of(self.contents, num_samples, step, seed)
        made = causal_tokens(made) if self.writes else made
        return with_positions(made) if self.placed else made

    @property
    def inputs(self) -> dict[str, Tensor]:
        """A batch of two samples, on the module's device."""
        device = next(self.module.parameters()).device
        return {key: tensor.to(device) for key, tensor in self.batch(2, 0, 0).items()}

    @staticmethod
    def predictions(batch: Batch) -> int:
        """Words that are predicted; samples, where the loss is one of whole samples."""
        targets = batch.get("targets")
        return int((targets >= 0).sum()) if targets is not None else next(iter(batch.values())).shape[0]

    def outline(self) -> LoadedModel | None:
        """The same with only the first of layers that are alike, if there are more."""
        module = with_first_layers(self.module)
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)} if module is not None else set()
        ways = {name: way for name, way in self.ways.items() if name in names}
        return None if module is None else replace(self, module=module, ways=ways)

    def sharded(self, num_devices: int) -> LoadedModel:
        """One device's share, by their number. Raises UsageError if it cannot be split so."""
        self.require_even(num_devices)
        share = share_of(self.module, self.ways, num_devices)
        tokens, family = self.family.tokens(self.config, self.sequence), self.family
        lengths = {positions_at(name, tokens) for name in self.ways if family.divided(name)}
        divided = bool(lengths) and num_devices > 1 and not any(length % num_devices for length in lengths)
        divided = divided and not self.writes
        if divided:
            places_of(share, self.ways, family).hook(share, tokens, Exchanges.traced(num_devices))
        return replace(self, module=share, devices=num_devices, divided=divided)

    def require_even(self, num_devices: int) -> None:
        """Check that it is known how to split it, and that devices can share heads and widths. Raises UsageError."""
        _require_known_ways(self.family, self.config, self.name)
        require_even(_counts(self.config) | even_widths(self.module, self.ways), num_devices)

    @property
    def runs_split(self) -> bool:
        """Whether its shares can run: of families in which what goes from block to block is whole or in slices."""
        return self.family.divides and isinstance(self.module, WordsModel) and not self._has_common_parts

    @property
    def _has_common_parts(self) -> bool:
        """Whether parts of a split parameter are whole on every device, whose gradients nothing would sum."""
        given = ((name, way, self.module.get_parameter(name)) for name, way in self.ways.items())
        return any(cut_of(self.module, name, whole, way).whole for name, way, whole in given)


def load(
    text_or_path: str,
    *,
    sequence: int | None = None,
    planned_sequence: int | None = None,
    meta: bool = False,
    seed: int = 0,
    shards: Sequence[int] = (),
    shown: str | None = None,
) -> LoadedModel:
    """The model of a Hugging Face configuration. Nothing is downloaded; parameters are random.

    Args:
        text_or_path: path of a ``config.json``, or text such as ``LlamaConfig(hidden_size=512)``: arguments that are
            left out have transformers' defaults.
        sequence: tokens per text; without it 1024 for causal models, 512 for BERT and T5, 77 for texts of images, or
            the configuration's maximum if that is shorter.
        planned_sequence: the same where ``sequence`` is None and the configuration takes such sequences.
        meta: parameters have shapes but no data.
        seed: of the parameters.
        shards: numbers of devices that the model is going to be split over.
        shown: what errors call it; else the text or path.

    Raises:
        UsageError: no such file, an unknown family, a mistaken argument, a sequence too long, or ``shards`` that cannot
            be, which are refused before any parameter is made.
    """
    where = shown or text_or_path
    name, keywords, strict = describe(text_or_path)
    family = family_of(name)
    _require_few_layers(keywords, where)
    with _quiet():
        config = _configuration(family, keywords, strict, where)
        length = _sequence(family, config, sequence, planned_sequence, where)
        _require_fitting(config, where)
        if max(shards, default=1) > 1:
            _require_known_ways(family, config, where)
        _require_even(_counts(config), where, shards)
        family.contents(config, family.words(config), length)
        if misfit := family.misfit(config):
            raise UsageError(f"configuration {where}: {misfit}")
        shapes = _module(family, config, where, True, 0) if meta or max(shards, default=1) > 1 else None
        if shapes is not None:
            _require_even(even_widths(shapes, split_weights(shapes, _plan(family, config))), where, shards)
        module = shapes if meta and shapes is not None else _module(family, config, where, meta, seed)
    name = f"{config.model_type}-{_signature(module)}"
    return LoadedModel(name, family, config, module, length, split_weights(module, _plan(family, config)))


def _require_even(counts: Mapping[str, int], where: str, shards: Sequence[int]) -> None:
    for count in shards:
        if count > 1:
            with shards_named(count, where):
                require_even(counts, count)


_MOST_LAYERS = 5_000
"""Of two blocks each: 10,000 blocks, for which time limits are kept. Of 10^30 layers no building of a model ends."""


def _require_few_layers(keywords: Mapping[str, Any], where: str) -> None:
    """Refuse more layers, of a configuration or one in it, than anybody builds, before anything is made of them."""
    for key, value in keywords.items():
        if isinstance(value, Mapping):
            _require_few_layers(value, where)
        elif "layer" in key and isinstance(value, int) and value > _MOST_LAYERS:
            digits = str(value)
            number = digits if len(digits) < 20 else f"a number of {len(digits)} digits"
            raise UsageError(f"configuration {where}: {key} is {number}; give at most {_MOST_LAYERS:,} layers")


def _require_fitting(config: Any, where: str) -> None:
    """Refuse heads and experts that do not go together, of a configuration or one in it, before anything is built."""
    for each in _nested(config):
        hidden, heads = _count_of(each, "hidden_size"), _count_of(each, "num_attention_heads")
        groups, experts = _count_of(each, "num_key_value_heads"), _experts_of(each)
        chosen, kind = _count_of(each, "num_experts_per_tok"), type(each).__name__
        if hidden and heads and hidden % heads and not _has_own_head_size(each):
            raise UsageError(
                f"configuration {where}: hidden_size={hidden} of {kind} is not divisible by "
                f"num_attention_heads={heads}; change one of them, or give head_dim where the class has it"
            )
        if heads and groups and heads % groups:
            raise UsageError(
                f"configuration {where}: num_attention_heads={heads} of {kind} is not divisible by "
                f"num_key_value_heads={groups}, which share keys and values among them; change one of them"
            )
        groups_of_experts = _count_of(each, "n_group")
        if experts and groups_of_experts and experts % groups_of_experts:
            raise UsageError(
                f"configuration {where}: {experts} experts of {kind} do not divide into n_group={groups_of_experts} "
                "groups; change one of them"
            )
        if experts and chosen and chosen > experts:
            raise UsageError(
                f"configuration {where}: num_experts_per_tok={chosen} of {kind} is more than its {experts} experts; "
                "choose fewer for each word"
            )


def _nested(config: Any) -> list[Any]:
    """A configuration and those in it."""
    return [config, *(each for key in config.sub_configs if (each := getattr(config, key, None)) is not None)]


def _count_of(config: Any, name: str) -> int | None:
    count = getattr(config, name, None)
    return count if isinstance(count, int) else None


def _experts_of(config: Any) -> int | None:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((count for name in names if (count := _count_of(config, name))), None)


def _has_own_head_size(config: Any) -> bool:
    return any(getattr(config, name, None) for name in ("head_dim", "qk_head_dim", "qk_nope_head_dim", "d_kv"))


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"Hugging Face configurations need transformers: pip install '.[huggingface]' ({error})"
        ) from error
    return transformers


def _sequence(family: ModelFamily, config: Any, asked: int | None, planned: int | None, where: str) -> int:
    maximum = family.maximum(config)
    if maximum is not None and (not isinstance(maximum, int) or maximum < 1):
        raise UsageError(f"configuration {where}: it takes sequences of at most {maximum!r:.40} words; give 1 or more")
    if asked is None and planned is not None and (maximum is None or planned <= maximum):
        return planned
    if asked is None:
        return family.longest if maximum is None else min(family.longest, maximum)
    if asked < 1 or (maximum is not None and asked > maximum):
        raise UsageError(f"--sequence {asked}: {where} takes sequences of 1 to {maximum or 'any length'}")
    return asked


def _module(family: ModelFamily, config: Any, where: str, meta: bool, seed: int) -> nn.Module:
    """The wrapped model with the same random numbers for a seed, in evaluation mode, where dropout does nothing."""
    register_functions()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta" if meta else "cpu"):
            torch.manual_seed(seed)
            made = getattr(_transformers(), family.model)(config)
            return family.module(made, config).eval()
    except Exception as error:  # whatever transformers makes of a configuration that does not fit together
        raise UsageError(
            f"configuration {where}: {family.model} cannot be built from it: {type(error).__name__}: {error}"
        ) from error


def _plan(family: ModelFamily, config: Any) -> dict[str, str]:
    """Patterns of names inside the wrapper and the way each is split; transformers' where the family has none here."""
    if family.plan is None:
        inside = [
            name for name in family.vocabulary if name.startswith(_BASE)
        ]  # tables, of which its plans say nothing
        return {**_own_plan(family, config), **dict.fromkeys(inside, WORDS)}
    plan = family.plan(config) if callable(family.plan) else family.plan
    return {**plan, **dict.fromkeys(family.vocabulary, WORDS)}


_BASE = "model.model."
"""How names begin inside the model without its output layer, in the wrapper."""


def _own_plan(family: ModelFamily, config: Any) -> dict[str, str]:
    """transformers' plan: of the configuration for the model without its output layer, of the class for that one."""
    inside = {f"{_BASE}{pattern}": way for pattern, way in (config.base_model_tp_plan or {}).items()}
    outside = getattr(getattr(_transformers(), family.model), "_tp_plan", None) or {}
    return inside | {f"model.{pattern}": WORDS if way in _HEADS else way for pattern, way in outside.items()}


_HEADS = ("colwise_gather_output", "colwise_rep")
"""What transformers calls it where logits are gathered; here they stay apart, and the loss is one over all of them."""

_MADE_HERE = ("moe_tp_experts", "replicated_with_grad_allreduce")
"""Ways that come with those of the modules around: of experts, and of whole weights between split products."""


def _require_known_ways(family: ModelFamily, config: Any, where: str) -> None:
    """Refuse a model that has no plan, or one with ways to split that nothing here knows. Raises UsageError."""
    plan = _plan(family, config)
    known = (*COLUMNS, *ROWS, WORDS, *_MADE_HERE)
    unknown = {pattern: way for pattern, way in plan.items() if way not in known}
    heads = {name: plan.get(name) for name in family.vocabulary if plan.get(name) != WORDS}
    if not set(plan.values()) - {WORDS}:
        found = "transformers has no plan for it"
    elif unknown:
        pattern, way = next(iter(unknown.items()))
        found = f"transformers splits {pattern} as {way!r}, which pipeplan does not know"
    elif heads:
        name, own = next(iter(heads.items()))
        said = "does not have it" if own is None else f"has it as {own!r}"
        found = f"{name.removeprefix('model.')} is split only as {_HEADS[0]!r}, and {family.model}._tp_plan {said}"
    else:
        return
    raise UsageError(f"{where} cannot be split over devices: {found}; leave --shards out")


def _counts(config: Any) -> dict[str, int]:
    """What must divide by the number of devices, of a configuration and those nested in it: heads."""
    names = {
        "num_attention_heads": "heads",
        "decoder_attention_heads": "heads of the decoder",
        "num_key_value_heads": "key-value heads",
        "num_kv_heads": "key-value heads",
    }
    found = {}
    for each in _nested(config):
        unused = "" if getattr(each, "new_decoder_architecture", True) else "num_kv_heads"  # in older Falcons
        for key, what in names.items():
            if key == unused:
                continue
            if (count := _count_of(each, key)) is not None:
                found[f"{what} in {type(each).__name__}"] = count
    return found


def _signature(module: nn.Module) -> str:
    """Parameters in millions or billions."""
    count = sum(parameter.numel() for parameter in module.parameters())
    for unit, size in (("b", 10**9), ("m", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' remarks about token ids and the like."""
    logging = _transformers().utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


_ELEMENT_BYTES = 4  # float32
_LOSS_BYTES = 2 * _ELEMENT_BYTES  # per word, of a device: the logarithm of the sum of exponentials, the target's logit


def load_configuration(
    text_or_path: str,
    *,
    sequence: int | None = None,
    planned_sequence: int | None = None,
    grain: Grain = "half",
    meta: bool = False,
    seed: int = 0,
    shards: Sequence[int] = (),
    shown: str | None = None,
) -> Model:
    """The blocks of a Hugging Face configuration; arguments and errors are those of ``load`` and ``capture``."""
    sizes: dict[str, Any] = {"sequence": sequence, "planned_sequence": planned_sequence, "shards": shards}
    whole = load(text_or_path, meta=meta, seed=seed, shown=shown, **sizes)
    settings = {key: value for key, value in whole.config.to_dict().items() if key != "transformers_version"}
    model = _captured(whole, grain)
    sharded = partial(_share, whole, grain)
    loss_of: Literal["samples", "micro-batches"] = "micro-batches" if isinstance(whole.module, Pairs) else "samples"
    known: dict[str, Any] = {"settings": settings, "made_up": True, "decoder": _decoder(whole, grain, model)}
    known["spread"] = partial(_spread, whole, grain)
    known["outlined"] = partial(_outlined, whole, grain)
    known["in_context"] = cache(partial(_in_context, whole, grain)) if _shares_sequences(whole, grain) else None
    model = replace(model, sharded=sharded, texts=texts_of(whole.contents), loss_of=loss_of, **known)
    return _named_as_in_transformers(_split_for_runs(model, whole, grain))


def _decoder(whole: LoadedModel, grain: Grain, model: Model) -> CausalDecoder | None:
    """How a causal language ``model`` writes on; None for any other, such as one that also sees or translates."""
    if not whole.family.is_decoder or grain == "operator":
        return None
    config = whole.config
    latent = getattr(config, "kv_lora_rank", None)
    return CausalDecoder(
        partial(_writing, whole, grain, model.blocks[-1]),
        partial(_placed, whole, grain, model.blocks[-1]),
        whole.family.maximum(config),
        key_heads=None if latent else _key_heads(config),
        latent=(latent, config.qk_rope_head_dim) if latent else None,
        latent_weight=LATENT_WEIGHT,
        windows=partial(_window_of, config),
    )


def _writing(whole: LoadedModel, grain: Grain, head: BlockSpec, count: int) -> Model:
    """The model that takes so many words of each text at once, and gives the logits of the next as its ``head``."""
    assert isinstance(whole.module, WordsModel)
    module = WritingModel(whole.module.model).eval()
    written = replace(whole, module=module, sequence=count, writes=True)
    named = partial(_ending_in, head)
    model = replace(_captured(written, grain), sharded=lambda count: named(_share(written, grain, count)), made_up=True)
    return _named_as_in_transformers(named(model))


def _placed(whole: LoadedModel, grain: Grain, head: BlockSpec, count: int) -> Model:
    """The same for words whose positions are given, as a stage of one device or of several runs it.

    Raises:
        UsageError: its forward takes no positions, so that it can only begin texts.
    """
    assert isinstance(whole.module, WordsModel)
    module = PlacedModel(whole.module.model).eval()
    placed = replace(whole, module=module, sequence=count, writes=True, placed=True)
    model = _captured(placed, grain)
    if not any("positions" in block.samples for block in model.blocks):
        raise UsageError(
            f"{whole.name} takes no positions of words, as its scores depend on their distances: it can be trained and "
            "profiled, but not decoded with a cache"
        )
    return _named_as_in_transformers(_ending_in(head, _split_for_runs(model, placed, grain)))


def _ending_in(head: BlockSpec, model: Model) -> Model:
    """The model, whose last block, which has no loss to be called by, is called as that of the whole model."""
    last = replace(model.blocks[-1], id=head.id, operator=head.operator)
    own = {model.blocks[-1].id: head.id}
    tied = tuple(tuple((own.get(id_, id_), name) for id_, name in group) for group in model.tied)
    return replace(model, blocks=(*model.blocks[:-1], last), tied=tied)


def _key_heads(config: Any) -> int | None:
    """Heads of keys and values, by the name that the configuration's class has for them; None: as many as queries'."""
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1  # of Falcons before there were groups
    unused = hasattr(config, "multi_query") and not config.new_decoder_architecture
    return _count_of(config, "num_key_value_heads") or (None if unused else _count_of(config, "num_kv_heads"))


def _window_of(config: Any, block: str) -> int | None:
    """How far the block of a layer looks back, as transformers' own caches have it; None: to the first word."""
    number = next((int(part) for part in block.split(".") if part.isdecimal()), None)
    if number is None:
        return None
    kinds = getattr(config, "layer_types", None)
    kind = kinds[number] if kinds else "sliding_attention"
    if kind == "sliding_attention":
        return _count_of(config, "sliding_window")
    return _count_of(config, "attention_chunk_size") if kind == "chunked_attention" else None


def _outlined(whole: LoadedModel, grain: Grain, num_devices: int, count: int) -> Model | None:
    """A share of parts of its sequences, with only the first of layers that are alike; None where none are."""
    outline = whole.outline()
    return None if outline is None else _share(replace(outline, sequence=whole.sequence // count), grain, num_devices)


def _shares_sequences(whole: LoadedModel, grain: Grain) -> bool:
    """Whether devices can share its sequences: of a causal language model whose attention is the one of here."""
    return whole.family.is_decoder and whole.family.attention == ATTENTION and whole.runs_split and grain != "operator"


def _in_context(whole: LoadedModel, grain: Grain, count: int) -> Model:
    """The model as so many devices run it that have an early and a late piece of each sequence. Raises UsageError."""
    require_pieces(whole.sequence, count, whole.name)
    part = replace(whole, sequence=whole.sequence // count)
    with torch.device("cpu"):  # words are numbers, also where blocks are only built to be checked
        captured = _captured(part, grain)
    return _named_as_in_transformers(_split_for_runs(captured, part, grain, count))


def _split_for_runs(model: Model, whole: LoadedModel, grain: Grain, context: int = 1) -> Model:
    """The model, whose blocks say how a stage of several devices runs them, if that is known."""
    if not whole.runs_split or grain == "operator":
        return model
    assert isinstance(whole.module, WordsModel)
    shares = RunningShares(
        whole.module,
        whole.ways,
        whole.family,
        whole.family.words(whole.config),
        whole.sequence,
        lambda share: _captured(whole, grain, share),
        whole.require_even,
        divides=not whole.writes,
        context=context,
    )
    return replace(model, blocks=tuple(map(shares.split, model.blocks)))


def _named_as_in_transformers(model: Model) -> Model:
    """The model, whose parameters are called as in the state of transformers' module, not as in the one around it."""

    def own(name: str) -> str:
        return name.removeprefix("model.")

    blocks = (
        replace(
            block,
            names={key: own(name) for key, name in (block.names or {}).items()},
            modules=tuple(own(name) for name in block.modules if own(name) != "model"),
        )
        for block in model.blocks
    )
    aliases = {own(alias): own(name) for alias, name in model.aliases.items()}
    return replace(model, blocks=tuple(blocks), aliases=aliases)


def _captured(whole: LoadedModel, grain: Grain, share: nn.Module | None = None) -> Model:
    module = whole.module if share is None else share
    return capture(module, whole.inputs, name=whole.name, grain=grain, batch=whole.batch, predictions=whole.predictions)


def _share(whole: LoadedModel, grain: Grain, num_devices: int) -> Model:
    share = whole.sharded(num_devices)
    model = _captured(share, grain)
    return model if num_devices == 1 else collectives_of(model, share)


def _spread(whole: LoadedModel, grain: Grain, num_devices: int, load: float) -> Model:
    one = replace(whole, module=with_experts_of_one(whole.module, num_devices, load))
    model = _captured(one, grain)
    return replace(model, decoder=_decoder(one, grain, model))


def collectives_of(model: Model, share: LoadedModel) -> Model:
    """The model, captured from one device's share, with what each block needs of the others, as Megatron-LM does it.

    Sums over devices follow every layer that is split by its inputs, and the lookup in a table of words, in F; and the
    input gradient of all layers that are split by outputs and take the same input, in I, in the first block that has
    one of them. The head gathers two float32 numbers per word of each device in F, where Megatron-LM sums three. Bytes
    are those of float32 elements.

    Where devices divide the sequence, each sum is scattered, and its gradient gathered; what enters split products is
    gathered, in W, too, and its gradient scattered (Korthikanti et al. 2022, section 4.2.2).
    """
    seen = set[str]()
    return replace(model, blocks=tuple(_with_collectives(block, share, seen) for block in model.blocks))


def _with_collectives(block: BlockSpec, share: LoadedModel, seen: set[str]) -> BlockSpec:
    found: list[Collective] = []
    for name in parameters_of(block).values():
        way = share.ways.get(name)
        if way is not None and not name.endswith("bias"):
            found += _of_weight(name, way, block, share, seen)
    names = parameters_of(block).values()
    found += _of_choices(names, share)
    divided = share.divided and (share.family.divided("") or any(map(share.family.divided, names)))
    return replace(block, collectives=tuple(found), divided=divided)


def _of_choices(names: Collection[str], share: LoadedModel) -> Iterator[Collective]:
    """Of split experts each device finds a part of the gradient of how much each chosen one counts; all sum these.

    Not of Llama 4's, whose words are multiplied by that before.
    """
    chosen = next(filter(None, (_count_of(each, "num_experts_per_tok") for each in _nested(share.config))), 0)
    lists = {name.partition(".experts.")[0]: name for name in names if ".experts." in name and name in share.ways}
    for path, name in lists.items() if chosen else ():
        if isinstance(share.module.get_submodule(path.rpartition(".")[0]), ChosenExperts):
            continue
        tokens = positions_at(name, share.family.tokens(share.config, share.sequence))
        yield Collective("all_reduce", "I", tokens * chosen * _ELEMENT_BYTES)


def _of_weight(name: str, way: str, block: BlockSpec, share: LoadedModel, seen: set[str]) -> Iterator[Collective]:
    tokens = positions_at(name, share.family.tokens(share.config, share.sequence))
    inputs, outputs = widths_of(share.module, name)
    hidden = share.module.get_parameter(name).shape[-1]  # of a table, whichever of two tied ones it is named after
    if share.divided and share.family.divided(name):
        yield from _of_places(name, way, block, share, seen, _ELEMENT_BYTES * tokens)
    elif way in ROWS:
        yield Collective("all_reduce", "F", tokens * outputs * _ELEMENT_BYTES)
    elif way == WORDS and block.operator == "embedding":
        yield Collective("all_reduce", "F", tokens * hidden * _ELEMENT_BYTES)
    elif way == WORDS and share.writes:
        yield Collective("all_gather", "F", share.family.words(share.config) * _ELEMENT_BYTES)
    elif way == WORDS:
        yield Collective("all_gather", "F", tokens * _LOSS_BYTES * share.devices)
        yield Collective("all_reduce", "I", tokens * hidden * _ELEMENT_BYTES)
    elif way in COLUMNS and not _is_table(share.module, name) and (taker := _taker(name)) not in seen:
        seen.add(taker)
        yield Collective("all_reduce", "I", tokens * inputs * _ELEMENT_BYTES)


def _of_places(
    name: str, way: str, block: BlockSpec, share: LoadedModel, seen: set[str], column_bytes: int
) -> Iterator[Collective]:
    """The same where the sequence is divided; ``column_bytes`` are those of a number of every word."""
    inputs, outputs = widths_of(share.module, name)
    if way in COLUMNS and getattr(share.config, "kv_lora_rank", None):
        inputs = share.config.hidden_size  # latents are made of the words that are joined, on every device
    joined, scattered = joined_in(share.module, name, way), scattered_in(share.module, name, way)
    if way in COLUMNS:
        if _is_table(share.module, name):  # of T5's position biases, which no words go into
            return
        joined = taker if (taker := _taker(name)).endswith(".q") else joined  # takes another input than k and v
    if way == WORDS:  # a tied head has the name of the embedding
        is_table = block.operator == "embedding"
        joined, scattered = ("", f"table of {block.id}") if is_table else ("head", "")
        inputs = outputs = share.module.get_parameter(name).shape[-1]
        if not is_table:
            yield Collective("all_gather", "F", column_bytes // _ELEMENT_BYTES * _LOSS_BYTES * share.devices)
    if joined and joined not in seen:
        yield Collective("all_gather", "F", column_bytes * inputs)
        yield Collective("reduce_scatter", "I", column_bytes * inputs)
        yield Collective("all_gather", "W", column_bytes * inputs)
    if scattered and f"{scattered}()" not in seen:
        yield Collective("reduce_scatter", "F", column_bytes * outputs)
        yield Collective("all_gather", "I", column_bytes * outputs)
    seen.update((joined, f"{scattered}()"))


def _taker(name: str) -> str:
    """The same for all layers that take the same input: those of a module, but a query across attends to another's."""
    owner, _, layer = name.removesuffix(".weight").rpartition(".")
    return f"{owner}.q" if owner.endswith(_ACROSS) and layer in ("q", "q_proj") else owner


_ACROSS = ("EncDecAttention", "encoder_attn")


def _is_table(module: nn.Module, name: str) -> bool:
    return isinstance(module.get_submodule(name.rpartition(".")[0]), nn.Embedding)
