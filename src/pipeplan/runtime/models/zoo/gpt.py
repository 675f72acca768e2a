"""GPT-2 (Radford et al. 2019): learned positions, pre-LayerNorm layers, causal attention; no dropout.

The output layer shares the token embedding. Halves of layers are blocks, or every operator, so that each can be split
in a way of its own: then the query, key and value of a head lie together, so that a slice of their product has whole
heads. Tensors between blocks are [samples, places, features].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.runtime.models.spec import (
    BlockSpec,
    CausalDecoder,
    Model,
    Texts,
    next_tokens,
    token_batch,
    with_positions,
)
from pipeplan.runtime.models.zoo.layers import (
    LayerStack,
    ZooSize,
    layers,
    next_word,
    num_targets,
    small,
    summed_loss,
    word_embedding,
    word_head,
)
from pipeplan.runtime.parallel.context import context_of, own_positions, require_pieces
from pipeplan.runtime.parallel.sharding import WHOLE, Cut, Shards, Split
from pipeplan.runtime.parallel.split_layers import FEATURES, Tile, WordEmbedding, draw, hidden_of
from pipeplan.workload.mesh import PLACES

Module = TypeVar("Module", bound=nn.Module)

_EPSILON = 1e-5


class NormOperator(nn.Module):
    """LayerNorm, of which devices may have slices of the features."""

    bias: nn.Parameter | None

    def __init__(self, hidden: int, biased: bool, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.hidden, self.features = hidden, _features(shards)
        own = hidden // self.features.count
        self.weight = nn.Parameter(torch.ones(own))
        self.register_parameter("bias", nn.Parameter(torch.zeros(own)) if biased else None)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, places, features of this device] to the same."""
        if self.features.count == 1:
            return F.layer_norm(x, (self.hidden,), self.weight, self.bias, _EPSILON)
        centred = x - self._mean(x)
        result = centred * torch.rsqrt(self._mean(centred.square()) + _EPSILON) * self.weight
        return result if self.bias is None else result + self.bias

    def _mean(self, x: Tensor) -> Tensor:
        """Over the features of all devices; each uses it for its own, so its gradient is the sum of theirs."""
        return self.features.shared(self.features.summed(x.sum(-1, keepdim=True))) / self.hidden


class AttentionCore(nn.Module):
    """Attention of [samples, places, heads * 3 sizes]: heads are split, or places, of which all keys are gathered."""

    def __init__(self, stack: LayerStack, shards: Shards = WHOLE) -> None:
        super().__init__()
        stack.heads_of(_features(shards))  # refuses slices of heads
        self.size, self.causal = stack.hidden // stack.heads, stack.causal
        self.places = shards.along.get(PLACES, WHOLE)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, places, heads * 3 sizes] to [samples, places, heads * size], each of this device."""
        query, both = torch.split(x.reshape(*x.shape[:2], -1, 3, self.size), [1, 2], dim=-2)
        both = self.places.shared(self.places.gathered(both, 1))
        key, value = both.permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(
            query.squeeze(-2).transpose(1, 2), key, value, attn_mask=self._mask(x, key.shape[-2])
        )
        return mixed.transpose(1, 2).flatten(2)

    def _mask(self, x: Tensor, num_keys: int) -> Tensor | None:
        """Which keys each place looks at: those up to its own."""
        if not self.causal:
            return None
        own = torch.arange(x.shape[1], device=x.device) + self.places.index * x.shape[1]
        return own[:, None] >= torch.arange(num_keys, device=x.device)[None, :]


class ActivationOperator(nn.Module):
    """GELU with the tanh approximation."""

    def forward(self, x: Tensor) -> Tensor:
        """[...] to the same."""
        return F.gelu(x, approximate="tanh")


class AddOperator(nn.Module):
    """The sum of two tensors."""

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        """[...] twice to the same."""
        return x + more


class LossOperator(nn.Module):
    """The sum of the tokens' cross-entropies, of which devices may have slices of the words."""

    def __init__(self, words: int, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.words, self.features = words, _features(shards)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[samples, places, words of this device] and [samples, places] to a scalar, in float32 at least."""
        return summed_loss(logits, targets, self.words, self.features)


def operators_of_layers(stack: LayerStack, source: str) -> list[BlockSpec]:
    """The operators of all layers, one after another, with their residuals."""
    found: list[BlockSpec] = []
    for layer in range(stack.layers):
        for half in (_attention, _feed_forward):
            found += half(f"layer{layer}", stack, found[-1].id if found else source)
    return found


def _product(id_: str, stack: LayerStack, source: str, inputs: int, outputs: int, *, std: float = 0.02) -> BlockSpec:
    """One of a layer."""
    return product_by_operator(id_, stack.sequence, source, inputs, outputs, std=std, biased=stack.biased)


def operators_of_head(stack: LayerStack, words: int, source: str) -> list[BlockSpec]:
    """Final norm, output layer and loss."""
    norm = norm_by_operator("head.norm", stack, source)
    output = product_by_operator("head.output", stack.sequence, norm.id, stack.hidden, words, std=0.02, biased=False)
    return [norm, output, loss_by_operator(output.id, stack.sequence, words)]


def loss_by_operator(source: str, sequence: int, words: int) -> BlockSpec:
    """The loss of so many words, or classes, at each place of a ``sequence``."""
    build = partial(LossOperator, words)
    return BlockSpec(
        "head.loss",
        "loss",
        build,
        (source,),
        ("targets",),
        loss=True,
        dimensions={"sequence": sequence, "vocabulary": words},
        splits={FEATURES: Split(build, takes=True)} | _places(sequence, build),
    )


def _attention(layer: str, stack: LayerStack, source: str) -> list[BlockSpec]:
    prefix, hidden = f"{layer}.attention", stack.hidden
    norm = norm_by_operator(f"{prefix}.norm", stack, source)
    made = _product(f"{prefix}.made", stack, norm.id, hidden, 3 * hidden)
    build = partial(AttentionCore, stack)
    core = BlockSpec(
        f"{prefix}.core",
        "attention-core",
        build,
        (made.id,),
        dimensions=stack.sizes | {"heads": stack.heads},
        splits=_slices(build),
    )
    last = _product(f"{prefix}.projection", stack, core.id, hidden, hidden, std=stack.last_std)
    return [norm, made, core, last, _each(f"{prefix}.sum", "add", AddOperator, stack, (source, last.id))]


def _feed_forward(layer: str, stack: LayerStack, source: str) -> list[BlockSpec]:
    prefix, hidden = f"{layer}.ffn", stack.hidden
    norm = norm_by_operator(f"{prefix}.norm", stack, source)
    wide = _product(f"{prefix}.expand", stack, norm.id, hidden, 4 * hidden)
    bent = _each(f"{prefix}.activation", "activation", ActivationOperator, stack, (wide.id,), 4 * hidden)
    last = _product(f"{prefix}.projection", stack, bent.id, 4 * hidden, hidden, std=stack.last_std)
    return [norm, wide, bent, last, _each(f"{prefix}.sum", "add", AddOperator, stack, (source, last.id))]


def norm_by_operator(id_: str, stack: LayerStack, source: str) -> BlockSpec:
    """A norm by itself, split as any operator."""
    build = partial(NormOperator, stack.hidden, stack.biased)
    names = ("weight", "bias") if stack.biased else ("weight",)
    cuts = {name: Cut() for name in names}
    return BlockSpec(id_, "norm", build, (source,), dimensions=stack.sizes, splits=_slices(build, cuts))


def product_by_operator(
    id_: str, sequence: int, source: str, inputs: int, outputs: int, *, std: float, biased: bool = True
) -> BlockSpec:
    """A linear layer at each place of a ``sequence``, of whose weight devices may have tiles."""
    build = partial(_tile, inputs, outputs, std, biased)
    return BlockSpec(
        id_,
        "product",
        build,
        (source,),
        dimensions={"sequence": sequence, "inputs": inputs, "outputs": outputs},
        splits=Tile.ways(build, bias=biased) | _places(sequence, build),
    )


def _places(sequence: int, build: Callable[[Shards], nn.Module]) -> dict[str, Split]:
    """Where there are several, devices can share them; tensors have no dimension of a single one."""
    return {PLACES: Split(build)} if sequence > 1 else {}


def _tile(inputs: int, outputs: int, std: float, biased: bool, shards: Shards = WHOLE) -> Tile:
    return small(Tile(inputs, outputs, shards, bias=biased), std)


def _each(
    id_: str,
    operator: str,
    module: type[nn.Module],
    stack: LayerStack,
    sources: tuple[str, ...],
    width: int | None = None,
) -> BlockSpec:
    """A function of each number."""
    build = partial(_anywhere, module)
    dimensions = {"sequence": stack.sequence, "hidden": width or stack.hidden}
    return BlockSpec(id_, operator, build, sources, dimensions=dimensions, splits=_slices(build))


def _anywhere(module: Callable[[], Module], shards: Shards = WHOLE) -> Module:
    """A module that computes the same for any part of its input."""
    return module()


def _slices(build: Callable[[Shards], nn.Module], cuts: dict[str, Cut] | None = None) -> dict[str, Split]:
    """What takes slices of the features and gives some, and takes any places."""
    return {FEATURES: Split(build, cuts or {}, takes=True, gives=True), PLACES: Split(build)}


def _features(shards: Shards) -> Shards:
    return shards.along.get(FEATURES, WHOLE)


@dataclass(frozen=True, slots=True)
class GPTSize(ZooSize):
    """Dimensions of a GPT-2 model.

    ``positions`` is the longest sequence it can take, ``sequence`` the one its batches have. With ``tied`` the output
    layer shares the token embedding's weight. ``shared`` spreads embedding and head over all devices, as Tessel does.
    With ``by_operator`` every operator is a block. One that ``writes`` gives the logits of the word after the last, and
    its devices do not divide the sequence, which in decoding is one word; one that is ``placed`` takes where in its
    text each word is.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int
    sequence: int
    tied: bool = True
    shared: bool = False
    by_operator: bool = False
    writes: bool = False
    placed: bool = False

    @property
    def stack(self) -> LayerStack:
        """Its layers."""
        return LayerStack(self.layers, self.hidden, self.heads, self.sequence, causal=True, divided=not self.writes)

    def model(self, name: str) -> Model:
        """The model of this size; of one by operators nothing is known of shares."""
        if self.by_operator:
            return self._model(name, WHOLE)
        if self.writes:
            return ZooSize.model(self, name)
        at, placed = partial(self._writing, name, False), partial(self._writing, name, True)
        shared = cache(partial(self._in_context, name))
        return replace(ZooSize.model(self, name), decoder=CausalDecoder(at, placed, self.positions), in_context=shared)

    def _in_context(self, name: str, count: int) -> Model:
        require_pieces(self.sequence, count, name)
        return replace(self, sequence=self.sequence // count).model(name)

    def _layers(self, source: str, shards: Shards) -> list[BlockSpec]:
        """The halves of its layers."""
        return layers("layer", self.stack, (source,), shards=shards)

    def _writing(self, name: str, placed: bool, count: int) -> Model:
        return replace(self, sequence=count, writes=True, placed=placed).model(name)

    def _model(self, name: str, shards: Shards) -> Model:
        """Embedding, then attention and feed-forward of each layer, then head with loss."""
        first = words(self, "embedding", shards)
        if self.by_operator:
            middle = operators_of_layers(self.stack, first.id)
            end, output = operators_of_head(self.stack, self.vocabulary, middle[-1].id), ("head.output", "weight")
        else:
            middle = self._layers(first.id, shards)
            head = next_word if self.writes else word_head
            end = [head(middle[-1].id, self.stack, self.vocabulary, shards, shared=self.shared)]
            output = ("head", "output.weight")
        make = partial(token_batch, self.vocabulary, self.sequence)
        return Model(
            name,
            (first, *middle, *end),
            partial(_placed, make) if self.placed else make,
            num_targets,
            tied=((("embedding", "token.weight"), output),) if self.tied else (),
            texts=Texts(self.vocabulary, self.sequence + 1, next_tokens),
        )


def _placed(make: Callable[[int, int, int], dict[str, Tensor]], *numbers: int) -> dict[str, Tensor]:
    """A batch with the positions of its words."""
    return with_positions(make(*numbers))


class TokenEmbedding(nn.Module):
    """Token and position embedding: tokens [samples, sequence] to [samples, sequence, hidden]."""

    def __init__(self, size: GPTSize, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.places, self.context = shards if size.stack.divides(shards) else WHOLE, context_of(shards)
        self.token = WordEmbedding(size.vocabulary, size.hidden, shards, divided=self.places.count > 1)
        self.position = nn.Embedding(size.positions, size.hidden // hidden_of(shards).count)
        draw(self.position.weight, 0.02)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """[samples, sequence] to [samples, sequence, hidden], or this device's part of sequence and hidden.

        Without ``positions`` [samples, sequence] texts begin with these tokens, or have other pieces elsewhere.
        """
        if positions is None:
            begin, end = self.places.range(tokens.shape[1])
            positions = own_positions(tokens.shape[1], self.context, tokens.device)[begin:end]
        result: Tensor = self.token(tokens) + self.position(positions)
        return result


def words(size: GPTSize, id_: str, shards: Shards) -> BlockSpec:
    """The embedding of the batch's ``tokens``."""
    build, tables = partial(TokenEmbedding, size), ("token", "position")
    samples = ("tokens", "positions") if size.placed else ("tokens",)
    return word_embedding(id_, samples, build, tables, size.stack, size.vocabulary, shards, shared=size.shared)
