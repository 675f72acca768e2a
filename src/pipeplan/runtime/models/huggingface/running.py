"""How a stage of several devices runs the blocks of a configuration: each device its share of them, captured by itself.

A share is the model with parts of its weights, as it is measured, but for what only shows when the others are there: a
table finds its own words, a bias is added once to what all devices sum, and the loss is one over all words. The
exchanges are operators in the capture (:mod:`pipeplan.runtime.parallel.places`), so that stages split backward, divide
state, and keep weights as they do of any other block.

torch's ``parallelize_module`` would exchange in hooks of modules, on DTensors, which a block has none of any more.
``benchmarks/tensor_parallel.py`` compares the two.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.models.capture import parameters_of
from pipeplan.runtime.models.huggingface.adapters import SHARING, WordsModel, in_pieces
from pipeplan.runtime.models.huggingface.families import (
    ROWS,
    WORDS,
    ModelFamily,
    cut_of,
    is_turned,
    places_of,
    scattered_in,
    share_of,
    shared_experts,
    with_experts_of_one,
)
from pipeplan.runtime.models.spec import BlockSpec, Model
from pipeplan.runtime.parallel.context import CONTEXT
from pipeplan.runtime.parallel.places import Change, DividedPlaces, Exchanges, by_samples, traced
from pipeplan.runtime.parallel.sharding import WHOLE, Cut, Shards, Split, range_of
from pipeplan.workload.mesh import EXPERT_PARTS, EXPERTS


class _RankShare(NamedTuple):
    """Which share of a model a device has, which pieces of sequences, and of how many parts of all experts it has one.

    Of each of its experts it has one of ``parts``.
    """

    shards: int
    shard: int
    piece: int
    experts: int
    parts: int
    part: int


@dataclass(frozen=True)
class RunningShares:
    """The shares of a ``module``, whose weights are split in ``ways`` by their names.

    ``capture`` cuts a share into blocks; ``require(count)`` refuses numbers of devices that cannot have shares.
    Where the ``sequence`` divides by their number so do devices outside of products, as the family has it, but not
    without ``divides``. So many devices share sequences as ``context`` says, each with pieces as long as ``sequence``.
    """

    module: WordsModel
    ways: Mapping[str, str]
    family: ModelFamily
    words: int
    sequence: int
    capture: Callable[[nn.Module], Model]
    require: Callable[[int], None]
    divides: bool = True
    context: int = 1
    _known: dict[_RankShare, Model] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def split(self, block: BlockSpec) -> BlockSpec:
        """The block, which now says how devices run it."""
        names = parameters_of(block)
        cuts = {own: cut for own, name in names.items() if (cut := self._cut(name))}
        parts = frozenset(own for own, name in names.items() if self._is_inside(name))
        build = partial(self._built, block.id)
        sequence = self.sequence if self.divides else 0
        experts = {own: Cut() for own, name in names.items() if name in self._of_experts}
        splits = {**block.splits, EXPERTS: Split(build, experts)} if experts else block.splits
        return replace(block, split=Split(build, cuts, sequence=sequence, gradient_parts=parts), splits=splits)

    @cached_property
    def _of_experts(self) -> frozenset[str]:
        """Names of the weights that devices can share as whole experts."""
        return frozenset(
            f"{path}.{name}"
            for path, each in shared_experts(self.module).items()
            for name, _ in each.named_parameters()
        )

    @cached_property
    def _ways(self) -> dict[int, str]:
        """By what is split, which may have several names."""
        return {id(self.module.get_parameter(name)): way for name, way in self.ways.items()}

    def _cut(self, name: str) -> Cut | None:
        whole = self.module.get_parameter(name)
        return cut_of(self.module, name, whole, self._ways[id(whole)]) if id(whole) in self._ways else None

    def _is_inside(self, name: str) -> bool:
        """Whether a whole parameter is used between what devices take and what they sum: each has a part of its
        gradient."""
        path, _, last = name.rpartition(".")
        if self._cut(name) or (last == "bias" and path in self._places.scatters):
            return False
        return any(path == join or path.startswith(f"{join}.") for join in self._places.joins)

    @cached_property
    def _places(self) -> DividedPlaces:
        return places_of(self.module, self.ways, self.family)

    def _built(self, id_: str, shards: Shards) -> nn.Module:
        """A device's share of a block. Raises UsageError."""
        context, experts, parts = (shards.along.get(name, WHOLE) for name in (CONTEXT, EXPERTS, EXPERT_PARTS))
        held = _RankShare(shards.count, shards.index, context.index, experts.count, parts.count, parts.index)
        made = self._model(held).block(id_).build()
        made.shards = shards  # type: ignore[assignment]  # a captured block's
        return made

    def _model(self, held: _RankShare) -> Model:
        with self._lock, torch.device("cpu"):
            if held not in self._known:
                if held.shards > 1:
                    self.require(held.shards)
                self._known[held] = self.capture(self._share(held))
            return self._known[held]

    @cached_property
    def _shapes(self) -> nn.Module:
        """The module without numbers in its parameters; buffers have theirs."""
        known: dict[int, object] = {id(each): each for each in self.module.buffers()}
        for each in self.module.parameters():
            known[id(each)] = nn.Parameter(each.detach().to("meta"), each.requires_grad)
        return copy.deepcopy(self.module, known)

    def _share(self, held: _RankShare) -> nn.Module:
        """What a device has: of its own experts, where devices share these, or as all else is split."""
        count, index, apart = held.shards, held.shard, held.experts * held.parts > 1
        ways = {name: way for name, way in self.ways.items() if not (apart and name in self._of_experts)}
        share = share_of(self._shapes, ways, count, index)
        if apart:
            split = {name: way for name, way in self.ways.items() if name in self._of_experts}
            share = share_of(share, split, held.parts, held.part) if held.parts > 1 else share
            share = with_experts_of_one(share, held.experts)
            for each in shared_experts(share).values():
                setattr(each, SHARING, held.experts * held.parts)
        assert isinstance(share, WordsModel)
        if self.context > 1:
            in_pieces(share, self.context, held.piece)
        if count == 1:
            return share
        divides = self.divides and self.sequence % count == 0
        exchanges = Exchanges.running(count, divides)
        biased = list(self._biased())
        for path in biased:
            _add_bias_last(share.get_submodule(path), partial(by_samples, exchanges.scatter, places=self.sequence))
        places = places_of(self.module, ways, self.family, apart=True) if apart else self._places
        scatters = tuple(path for path in places.scatters if path not in biased)
        replace(places, scatters=scatters).hook(share, {"": self.sequence}, exchanges)
        even = _evened(traced("even_gradient", count))
        for path, each in share.named_modules():
            if path.endswith(".experts") and not apart:
                each.register_forward_pre_hook(even)
        for path, table in self._tables():
            _look_up_own(share.get_submodule(path), table, self.words, count, index, divides)
        if self._splits_head:
            share.split_words = (self.words, count)
        return share

    def _biased(self) -> Iterator[str]:
        """Layers split by their inputs that have a bias. Raises UsageError where it would be summed."""
        for name, way in self.ways.items():
            path = name.removesuffix(".weight")
            layer = self.module.get_submodule(path) if way in ROWS and path != name else None
            if layer is not None and getattr(layer, "bias", None) is not None:
                if scattered_in(self.module, name, way) != path:
                    raise UsageError(f"the bias of {path} is added before experts are summed over the devices")
                yield path

    def _tables(self) -> Iterator[tuple[str, nn.Embedding]]:
        for name, way in self.ways.items():
            path = name.removesuffix(".weight")
            layer = self.module.get_submodule(path) if way == WORDS and path != name else None
            if isinstance(layer, nn.Embedding):
                yield path, layer

    @property
    def _splits_head(self) -> bool:
        tables = {path for path, _ in self._tables()}
        return any(way == WORDS and name.rpartition(".")[0] not in tables for name, way in self.ways.items())


class _BiasLast(nn.Module):
    """A linear layer, torch's or GPT-2's, split by its inputs: products are exchanged before the bias is added."""

    weight: Tensor
    bias: Tensor
    exchange: Change
    is_turned: bool

    def forward(self, given: Tensor) -> Tensor:
        """[..., inputs of this device] to [..., outputs]"""
        part = given @ self.weight if self.is_turned else F.linear(given, self.weight)
        return self.exchange(part) + self.bias


def _add_bias_last(layer: nn.Module, exchange: Change) -> None:
    turned = is_turned(layer)
    layer.__class__ = _BiasLast
    layer.exchange, layer.is_turned = exchange, turned  # type: ignore[assignment]  # those of its class now


class _OwnWords(nn.Module):
    """What a table does that has some of the words: the others' come with a sum, scattered where devices divide."""

    split: tuple[int, int]
    divides: bool

    def forward(self, indices: Tensor) -> Tensor:
        """[samples, places] of all words to [samples, places, width]; 0 at places of others, where they ``divide``."""
        words, count = self.split
        found = super().forward(traced("own_words", words, count)(indices))
        return traced("sum_own_words" if self.divides else "sum_words", indices, words, count)(found)


def _look_up_own(table: nn.Module, whole: nn.Embedding, words: int, count: int, index: int, divides: bool) -> None:
    """Let a share of a table look up words of all; where devices ``divide`` what follows, each at its places."""
    begin, end = range_of(words, count, index)
    padding = whole.padding_idx
    own = padding - begin if padding is not None and begin <= padding < end else None
    table.padding_idx = own  # type: ignore[assignment]  # of an embedding, which the share of one is
    kind = type(table)
    table.__class__ = type(f"Split{kind.__name__}", (_OwnWords, kind), {})
    table.split, table.divides = (words, count), divides  # type: ignore[assignment]  # those of its class now


def _evened(change: Change) -> Callable[..., Any]:
    """A hook of experts, which take words, which experts these chose, and by how much each counts.

    In the words' format, in which parts of the gradient are summed before a router rounds them.
    """

    def hook(_: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        words, chosen, shares = args
        return words, chosen, change(shares.to(words.dtype))

    return hook
