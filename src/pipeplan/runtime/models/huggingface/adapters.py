"""Modules around transformers' models, their made-up batches, and the functions that these call instead of their own.

Modules take the tensors of a batch by name and return one summed loss. Losses are sums over predictions, not means, so
that gradients add up over micro-batches, and are accumulated in float32 at least. Attention and experts have a form
that can be exported and measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.models.spec import Texts, next_tokens, stacked, token_batch
from pipeplan.runtime.parallel.context import own_positions
from pipeplan.runtime.parallel.device import precise
from pipeplan.runtime.parallel.grouped_rows import GATES
from pipeplan.runtime.parallel.places import traced
from pipeplan.runtime.parallel.sharding import Shards

_IGNORED = -100
_MASKED_EVERY = 7  # BERT masks 15 % of the words


@dataclass(frozen=True, slots=True)
class Contents:
    """What a family's samples are made of.

    ``image`` is (channels, height, width), or the shape of another noise that is called ``image_name``; ``special`` the
    token that a masked word, the decoder's first, a text's last or a part of an image has, ``image_tokens`` of which
    begin a text.
    """

    make: Maker
    vocabulary: int
    sequence: int
    special: int = 0
    image: tuple[int, ...] | None = None
    image_name: str = "pixels"
    image_tokens: int = 0


Maker = Callable[[Contents, dict[str, Tensor]], dict[str, Tensor]]
"""Makes a batch out of ``tokens`` and the ``targets`` that follow them."""


def batch_of(contents: Contents, num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
    """A batch of named tensors."""
    made = contents.make(contents, token_batch(contents.vocabulary, contents.sequence, num_samples, step, seed))
    if contents.image is not None:
        made[contents.image_name] = _images(contents.image, num_samples, step, seed)
    return made


def texts_of(contents: Contents) -> Texts | None:
    """How samples are made from texts; None where they also have images."""

    def batch(windows: Tensor) -> dict[str, Tensor]:
        return contents.make(contents, next_tokens(windows))

    return None if contents.image is not None else Texts(contents.vocabulary, contents.sequence + 1, batch)


def causal(contents: Contents, text: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every word, by those before it."""
    return text


def masked(contents: Contents, text: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every seventh word hidden, from one that the text decides on; the hidden words are the targets."""
    words = text["tokens"]
    first = words[:, :1] % min(_MASKED_EVERY, contents.sequence)
    hidden = (torch.arange(contents.sequence) - first) % _MASKED_EVERY == 0
    return {"tokens": words.masked_fill(hidden, _special(contents)), "targets": words.masked_fill(~hidden, _IGNORED)}


def translated(contents: Contents, text: dict[str, Tensor]) -> dict[str, Tensor]:
    """The decoder continues the encoder's text."""
    start = torch.full_like(text["targets"][:, :1], _special(contents))
    shifted = torch.cat([start, text["targets"][:, :-1]], dim=1)
    return {"tokens": text["tokens"], "decoder_tokens": shifted, "targets": text["targets"]}


def spoken(contents: Contents, text: dict[str, Tensor]) -> dict[str, Tensor]:
    """The decoder writes down what it hears."""
    made = translated(contents, text)
    return {name: made[name] for name in ("decoder_tokens", "targets")}


def labelled(contents: Contents, text: dict[str, Tensor]) -> dict[str, Tensor]:
    """A label for each sample."""
    return {"targets": text["tokens"][:, 0]}


def illustrated(contents: Contents, text: dict[str, Tensor]) -> dict[str, Tensor]:
    """Texts that begin with an image; its parts are no targets, and no other word looks like one."""
    places, special = torch.arange(contents.sequence) < contents.image_tokens, _special(contents)
    words = text["tokens"].masked_fill(text["tokens"] == special, (special + 1) % contents.vocabulary)
    return {"tokens": words.masked_fill(places, special), "targets": text["targets"].masked_fill(places, _IGNORED)}


def paired(contents: Contents, text: dict[str, Tensor]) -> dict[str, Tensor]:
    """Texts that end with the special token."""
    end = torch.full_like(text["tokens"][:, :1], _special(contents))
    return {"tokens": torch.cat([text["tokens"][:, 1:], end], dim=1)}


def _special(contents: Contents) -> int:
    """The special token, or the last one of a vocabulary that is too small for it."""
    return min(contents.special, contents.vocabulary - 1)


def _images(shape: tuple[int, ...], num_samples: int, step: int, seed: int) -> Tensor:
    """[num_samples, *shape], standard normal."""
    return stacked(lambda generator: {"": torch.randn(shape, generator=generator)}, num_samples, step, seed)[""]


class _Adapter(nn.Module):
    """A module around a model of transformers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


class WordsModel(_Adapter):
    """A language model, causal or masked, and the loss of the words it predicts.

    A share with logits of some of the words has ``split_words``: how many there are, and over how many devices. One
    with pieces of its sequences (:func:`in_pieces`) has ``pieces``: over how many devices, and for which of these.
    """

    split_words: tuple[int, int] | None = None
    pieces: tuple[int, int] | None = None

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Tokens and targets [samples, sequence]; no loss where a target is -100."""
        logits = self.model(input_ids=tokens, use_cache=False, **self._positions(tokens)).logits
        if self.split_words is None:
            return _summed_loss(logits, targets)
        rows = traced("word_losses", targets.flatten(), *self.split_words)(precise(logits).flatten(0, 1))
        return rows.sum()

    def _positions(self, tokens: Tensor) -> dict[str, Tensor]:
        """Where tokens are in their sequences, if not from the beginning on."""
        if self.pieces is None:
            return {}
        return {"position_ids": own_positions(tokens.shape[1], Shards(*self.pieces), tokens.device)[None]}


def in_pieces(share: WordsModel, count: int, index: int) -> None:
    """Let a causal language model take the pieces of sequences that one of so many devices has.

    Its attention meets keys and values of the others (:mod:`pipeplan.runtime.parallel.context_attention`).
    """
    for each in share.modules():
        each.pieces = (count, index)  # type: ignore[assignment]  # an attribute of transformers' modules


class WritingModel(_Adapter):
    """A causal language model that writes on: the logits of the word after the last."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [samples, sequence] to [samples, words]."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits
        return logits[:, -1]


class PlacedModel(WordsModel):
    """A :class:`WritingModel` of texts that have begun, with the position of each word.

    A share with logits of some of the words gives those.
    """

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Tokens and positions [samples, sequence] to [samples, words]."""
        made = self.model(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=1)
        logits: Tensor = made.logits
        return logits[:, -1]


def causal_tokens(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch without the words that follow."""
    return {"tokens": batch["tokens"]}


class Translation(_Adapter):
    """An encoder and a decoder, and the loss of the words that the decoder predicts."""

    def forward(self, tokens: Tensor, decoder_tokens: Tensor, targets: Tensor) -> Tensor:
        """Tokens of the encoder [samples, sequence], of the decoder, and its targets."""
        made = self.model(input_ids=tokens, decoder_input_ids=decoder_tokens, use_cache=False)
        return _summed_loss(made.logits, targets)


class Speech(_Adapter):
    """Whisper: an encoder of sound and a decoder, and the loss of the words that the decoder predicts."""

    def forward(self, sound: Tensor, decoder_tokens: Tensor, targets: Tensor) -> Tensor:
        """Spectra [samples, frequencies, times], tokens of the decoder [samples, sequence], and its targets."""
        made = self.model(input_features=sound, decoder_input_ids=decoder_tokens, use_cache=False)
        return _summed_loss(made.logits, targets)


class Labels(_Adapter):
    """A classifier of images, and the loss of its labels."""

    def forward(self, pixels: Tensor, targets: Tensor) -> Tensor:
        """Images [samples, channels, height, width], and a label for each."""
        return F.cross_entropy(precise(self.model(pixel_values=pixels).logits), targets, reduction="sum")


class Illustrated(_Adapter):
    """A language model that sees images, and the loss of the words that it predicts.

    A text begins with its image, so that what the vision tower makes of it is put before the other words.
    """

    def forward(self, tokens: Tensor, pixels: Tensor, targets: Tensor) -> Tensor:
        """Texts [samples, sequence] with their image's place, images, and targets as tokens or -100."""
        return _summed_loss(self.logits(tokens, pixels), targets)

    def logits(self, tokens: Tensor, pixels: Tensor) -> Tensor:
        """[samples, sequence, words]"""
        whole = self.model if hasattr(self.model, "vision_model") else self.model.model  # Llama 4's is not wrapped
        tower = whole.vision_model if hasattr(whole, "vision_model") else whole.vision_tower
        seen = whole.multi_modal_projector(tower(pixels).last_hidden_state)
        words = self.model.get_input_embeddings()(tokens)
        given = torch.cat([seen, words[:, seen.shape[1] :]], dim=1)
        made = whole.language_model(inputs_embeds=given, use_cache=False)
        logits: Tensor = made.logits if hasattr(made, "logits") else self.model.lm_head(made.last_hidden_state)
        return logits


class Pairs(_Adapter):
    """CLIP: two towers and the contrastive loss of the micro-batch, as a sum over its samples."""

    def forward(self, tokens: Tensor, pixels: Tensor) -> Tensor:
        """Texts [samples, sequence] and their images [samples, channels, height, width]."""
        made = self.model(input_ids=tokens, pixel_values=pixels)
        scaled = made.text_embeds * self.model.logit_scale.exp()  # samples first, for as long as possible
        per_text = precise(scaled @ made.image_embeds.t())
        partner = torch.arange(per_text.shape[0], device=per_text.device)
        by_text = F.cross_entropy(per_text, partner, reduction="sum")
        return (by_text + F.cross_entropy(per_text.t(), partner, reduction="sum")) / 2


class Captions(_Adapter):
    """Flava: text and image encoders, the multimodal encoder on both, and the loss of the words it predicts."""

    def __init__(self, model: Any, head: Any) -> None:
        super().__init__(model)
        self.head = head
        self.head.bias = self.head.decoder.bias  # transformers ties the two

    def forward(self, tokens: Tensor, pixels: Tensor, targets: Tensor) -> Tensor:
        """Texts [samples, sequence], images [samples, channels, height, width], targets as tokens or -100."""
        fused = self.model(input_ids=tokens, pixel_values=pixels).multimodal_embeddings
        return _summed_loss(self.head(fused[:, -tokens.shape[1] :]), targets)


def _summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(precise(logits).flatten(0, 1), targets.flatten(), reduction="sum")


SHARING = "pipeplan_devices"
"""Attribute of experts that run with other devices: how many of these share them."""

LOAD = "pipeplan_load"
"""Of those of one device that stand for others' too: how many times as many words they multiply as it sends away."""

ATTENTION = "pipeplan"
"""Of the functions here among transformers' attentions and experts. Attention makes no mask, so that a causal one is
left to the operator; experts have one product each, whose sizes depend on the data but whose shapes do not."""


def register_functions() -> None:
    """Make the functions known to transformers, and the work of experts to torch's FLOP counter. Can be repeated."""
    from transformers import AttentionInterface
    from transformers.integrations.moe import ExpertsInterface

    AttentionInterface.register(ATTENTION, _attention)
    ExpertsInterface.register(ATTENTION, _experts)
    _count_grouped_products()


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' own attention on torch's operator, with a mask only for a window shorter than the text.

    Scores that are capped (Gemma 2) have no such operator.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    pieces = getattr(module, "pieces", None)
    if pieces is not None:
        return _of_pieces(query, key, value, sliding_window, *pieces, **options), None
    if sliding_window is not None and sliding_window < key.shape[2]:
        attention_mask = _window(sliding_window, key.shape[2], key.device)
    if options.get("softcap") is not None:
        mask = _window(key.shape[2], key.shape[2], key.device) if attention_mask is None else attention_mask
        return _capped(query, key, value, mask, options["scaling"], options["softcap"]), None
    made: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)
    return made


def _of_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    count: int,
    index: int,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> Tensor:
    """The same for the pieces of sequences that one of so many devices has. Raises UsageError for capped scores."""
    if softcap is not None:
        raise UsageError("its scores are capped, and devices that share sequences know no such attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    given = (query, key, value, scale, window or 0, index, count)
    made: Tensor = torch.ops.pipeplan.context_attention(*given)
    return made.transpose(1, 2).contiguous()


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, cap: float) -> Tensor:
    """Attention whose scores lie between -cap and cap: [samples, sequence, heads, size], as transformers takes it."""
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    scores = cap * torch.tanh(query @ key.transpose(2, 3) * scaling / cap)
    shares = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype)
    return (shares @ value).transpose(1, 2).contiguous()


def _window(width: int, length: int, device: torch.device) -> Tensor:
    """[1, 1, length, length]: whether a query (third) may look at a key: itself and the width - 1 before it."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]
    return ((distance >= 0) & (distance < width))[None, None]


def _experts(module: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Sum of each token's experts: hidden [tokens, hidden], chosen and shares [tokens, experts per token].

    Rows are sorted by expert, and ``transformers::grouped_mm_fallback`` multiplies those of each by its weights.
    """
    if (count := getattr(module, SHARING, 1)) > 1:
        weights = module.gate_up_proj, module.down_proj, gate_of(module), module.num_experts
        found: Tensor = torch.ops.pipeplan.routed_experts(hidden, chosen, shares, *weights, 0, count)
        return found
    if (load := getattr(module, LOAD, 1.0)) > 1:
        words = torch.ops.pipeplan.under_load(chosen, load, 1)
        more = _products(module, hidden[words], chosen[words], shares[words])
        return torch.zeros_like(hidden).index_add(0, words, more)
    return _products(module, hidden, chosen, shares)


def _products(module: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """The same of experts that one device has."""
    product = torch.ops.transformers.grouped_mm_fallback
    each = chosen.shape[1]
    order, ends = _by_expert(chosen, module.num_experts, module.gate_up_proj.shape[0])
    gate, up = product(hidden[order // each], module.gate_up_proj.transpose(1, 2), ends).chunk(2, dim=-1)
    made = product(module.act_fn(gate) * up, module.down_proj.transpose(1, 2), ends)
    weighted = made[order.argsort()] * shares.flatten()[:, None].to(made.dtype)
    summed: Tensor = weighted.unflatten(0, (-1, each)).sum(1)
    return summed


def gate_of(module: Any) -> str:
    """The name of the function before the gate of experts; empty if it is none of those that can run apart."""
    from transformers.activations import ACT2CLS

    named = (name for name in GATES if name in ACT2CLS)
    found = {name: kind if isinstance(kind := ACT2CLS[name], type) else kind[0] for name in named}
    return next((name for name, kind in found.items() if type(getattr(module, "act_fn", None)) is kind), "")


def _by_expert(chosen: Tensor, num_experts: int, num_own: int) -> tuple[Tensor, Tensor]:
    """The order of rows by their expert, and where each expert's end.

    Where a device has fewer experts than there are, those of other devices stand for what these send: as many words.
    """
    expert, order = (chosen if num_own == num_experts else chosen % num_own).flatten().sort()
    numbers = torch.arange(num_own, device=expert.device)
    return order, (expert[:, None] <= numbers).sum(0).to(torch.int32)


class ChosenExperts(_Adapter):
    """Llama 4's layer of experts, of which each takes the words that chose it, times the sigmoid of their scores.

    transformers' own lets every expert multiply every word, by zero where it was not chosen. Experts that devices share
    get their words as those of other families do; the expert that all words take stays with them.
    """

    @property
    def experts(self) -> nn.Module:
        """Those that words choose from."""
        found: nn.Module = self.model.experts
        return found

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[samples, sequence, hidden] to [samples * sequence, hidden], and the router's scores."""
        layer = self.model
        experts = layer.experts
        words = hidden.reshape(-1, layer.hidden_dim)
        logits = F.linear(words, layer.router.weight, layer.router.bias)
        scores, chosen = logits.topk(layer.top_k, dim=1)
        if (count := getattr(experts, SHARING, 1)) > 1:
            weights = experts.gate_up_proj.transpose(1, 2), experts.down_proj.transpose(1, 2)
            how = gate_of(experts), layer.num_experts, 1, count
            shares = scores.sigmoid().to(words.dtype)
            found = torch.ops.pipeplan.routed_experts(words, chosen, shares, *weights, *how)
            return layer.shared_expert(words) + found, logits
        if (load := getattr(experts, LOAD, 1.0)) > 1:
            every = torch.ops.pipeplan.under_load(chosen, load, 1)
            more = self._products(words[every], chosen[every], scores[every])
            found = torch.zeros_like(words).index_add(0, every, more)
        else:
            found = self._products(words, chosen, scores)
        return layer.shared_expert(words) + found, logits

    def _products(self, words: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        """What experts make of words that chose them, of each word together."""
        layer, product, experts = self.model, torch.ops.transformers.grouped_mm_fallback, self.model.experts
        order, ends = _by_expert(chosen, layer.num_experts, experts.gate_up_proj.shape[0])
        given = words[order // layer.top_k] * scores.flatten()[order][:, None].sigmoid().to(words.dtype)
        gate, up = product(given, experts.gate_up_proj, ends).chunk(2, dim=-1)
        made = product(up * experts.act_fn(gate), experts.down_proj, ends)[order.argsort()]
        summed: Tensor = made.unflatten(0, (-1, layer.top_k)).sum(1)
        return summed


def _count_grouped_products() -> None:
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    product = torch.ops.transformers.grouped_mm_fallback
    if product in flop_registry:
        return

    @register_flop_formula(product)
    def forward(input: Any, weight: Any, offsets: Any, *_: Any, **__: Any) -> int:
        return 2 * int(input[0]) * int(weight[1]) * int(weight[2])

    @register_flop_formula(torch.ops.transformers.grouped_mm_fallback_backward)
    def backward(input: Any, weight: Any, *_: Any, **__: Any) -> int:
        return 4 * int(input[0]) * int(weight[1]) * int(weight[2])
