"""GPT-2 whose feed-forward halves are experts, of which each word takes a few (Shazeer et al. 2017; Mixtral's form).

A router scores the experts for every word; of the best few, their scores as shares of one, what they make is added up,
beside what an expert makes that all words take, if there is one (DeepSeekMoE, Dai et al. 2024, section 3.2). There is
no auxiliary loss. No word is dropped, unless experts have a capacity, which is of a device's words in a micro-batch
(Switch Transformer, Fedus et al. 2021, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.runtime.models.spec import BlockSpec, Model
from pipeplan.runtime.models.zoo.gpt import GPTSize
from pipeplan.runtime.models.zoo.layers import (
    ArrayExchange,
    LayerStack,
    columns,
    exchanged,
    into_split,
    layers,
    linear,
    row_linear,
)
from pipeplan.runtime.parallel.experts import capacity_of, routed
from pipeplan.runtime.parallel.grouped_rows import grouped
from pipeplan.runtime.parallel.sharding import WHOLE, Cut, Shards, Split
from pipeplan.runtime.parallel.split_layers import draw
from pipeplan.workload.mesh import EXPERT_PARTS, EXPERTS


@dataclass(frozen=True, slots=True)
class Mixture:
    """``count`` experts of a ``width``, of which a word takes ``each``, and an expert of width ``shared`` for all.

    Each takes at most ``capacity`` times the even share of a device's words; 0: all. Without others to share them,
    ``spread`` devices' experts are represented by those of one, which multiply ``load`` times as many words.
    """

    count: int
    each: int
    width: int
    shared: int = 0
    capacity: float = 0.0
    spread: int = 1
    load: float = 1.0


class ExpertFeedForward(nn.Module):
    """Experts with their router, LayerNorm and residual: a device has all, whole ones of its own, or parts of all.

    ``shards.along[EXPERTS]`` are devices that share them, ``shards.along[EXPERT_PARTS]`` those that have parts of the
    same. Those that split the block, but share no experts, have a part
    of each.
    """

    def __init__(self, stack: LayerStack, mixture: Mixture, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.mixture, self.shards, self.divided = mixture, shards, stack.divides(shards)
        self.shared = EXPERTS in shards.along
        self.devices = shards.along.get(EXPERTS, Shards(mixture.spread))
        self.parts = shards.along.get(EXPERT_PARTS, WHOLE)
        self.norm = nn.LayerNorm(stack.hidden, bias=stack.biased)
        self.router = linear(stack.hidden, mixture.count, biased=False)
        own = mixture.count // self.devices.count
        width = (self.parts if self.shared else shards).own(mixture.width)
        self.expand = nn.Parameter(torch.empty(own, width, stack.hidden))
        self.project = nn.Parameter(torch.empty(own, stack.hidden, width))
        draw(self.expand, 0.02)
        draw(self.project, stack.last_std)
        if mixture.shared:
            self.shared_expand = linear(stack.hidden, shards.own(mixture.shared), biased=stack.biased)
            self.shared_project = row_linear(mixture.shared, stack, shards)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, sequence, hidden] to the same, or this device's slice of the sequence to the same."""
        normed = self.norm(x)
        shares, chosen = self.router(normed).softmax(-1).topk(self.mixture.each)
        shares = shares / shares.sum(-1, keepdim=True)
        result: Tensor
        if self.shared or self.shards.count == 1:
            result = x + self._chosen(normed, chosen, shares)
            if not self.mixture.shared:
                return result
            result = result + self.shared_project(self._wide(into_split(normed, self.shards, self.divided)))
            return result
        if self.divided:
            chosen = self.shards.gathered(chosen, 1)
        normed, shares = (into_split(each, self.shards, self.divided) for each in (normed, shares))
        part = self._chosen(normed, chosen, shares)
        if self.mixture.shared:  # what enters and leaves both is exchanged once
            made = self.shared_project.whole(part + self.shared_project.part(self._wide(normed)))
        else:
            made = self.shards.scattered(part) if self.divided else self.shards.summed(part)
        result = x + made
        return result

    def _wide(self, normed: Tensor) -> Tensor:
        """What the expert that all words take makes inside."""
        return F.gelu(self.shared_expand(normed), approximate="tanh")

    def _chosen(self, normed: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """What each word's experts make of it, of which a device may have parts: all [samples, sequence, ...]."""
        mixture, words = self.mixture, normed.flatten(0, 1)
        capacity = None
        if mixture.capacity and mixture.spread == 1:  # else its load says how many words come, after what is dropped
            capacity = capacity_of(mixture.capacity, len(words), mixture.each, mixture.count)
        given = words, chosen.flatten(0, 1), shares.flatten(0, 1), mixture.count, self.devices, self._experts
        made = routed(*given, capacity=capacity, parts=self.parts, load=mixture.load)
        return made.view_as(normed)

    def _experts(self, rows: Tensor, ends: Tensor) -> Tensor:
        wide = F.gelu(grouped(rows, self.expand, ends), approximate="tanh")
        return grouped(wide, self.project, ends)

    @property
    def deferred_weights(self) -> tuple[Tensor, ...]:
        """Weights whose gradients can wait for W."""
        return self.expand, self.project

    @staticmethod
    def cuts(stack: LayerStack, mixture: Mixture) -> dict[str, Cut]:
        """How parameters are split where devices have parts of each expert."""
        shared = {**columns("shared_expand", biased=stack.biased), "shared_project.weight": Cut(1)}
        return {"expand": Cut(1), "project": Cut(2), **(shared if mixture.shared else {})}


def _chosen_exchanges(stack: LayerStack, mixture: Mixture, shards: Shards) -> tuple[ArrayExchange, ...]:
    """What devices exchange of the experts that words choose, as long integers, and of how much each counts."""
    numbers = stack.sequence * mixture.each
    if not stack.divides(shards):
        return (("all_reduce", "I", numbers),)
    return ("all_gather", "F", 2 * numbers), ("all_gather", "F", numbers), ("reduce_scatter", "I", numbers)


@dataclass(frozen=True, slots=True)
class GPTExpertsSize(GPTSize):
    """Dimensions of a GPT-2 with ``experts`` of a ``width``, ``experts_per_token`` of them for each word.

    All words take an expert of ``shared_width``, if that is not 0. An expert takes at most ``capacity`` times the even
    share of a device's words; 0: all that choose it. Of ``spread`` devices that share them each has a part, which
    stands for the others' too, to be measured, with ``load`` times as many words as it sends away.
    """

    experts: int = 8
    experts_per_token: int = 2
    width: int = 0
    shared_width: int = 0
    capacity: float = 0.0
    spread: int = 1
    load: float = 1.0

    @property
    def mixture(self) -> Mixture:
        """The experts of a layer."""
        width = self.width or 4 * self.hidden
        sizes = self.experts, self.experts_per_token, width, self.shared_width
        return Mixture(*sizes, self.capacity, self.spread, self.load)

    def model(self, name: str) -> Model:
        """The model of this size, of which devices may share experts; a capacity is of a micro-batch's words."""

        def of_one(count: int, load: float) -> Model:
            return replace(self, spread=count, load=load).model(name)

        alone: Literal["", "micro-batches"] = "micro-batches" if self.capacity else ""
        return replace(GPTSize.model(self, name), spread=of_one, loss_of=alone)

    def _writing(self, name: str, placed: bool, count: int) -> Model:
        """Nothing is left out of texts that are written on, where it would depend on whose words come together."""
        return GPTSize._writing(replace(self, capacity=0.0), name, placed, count)

    def _layers(self, source: str, shards: Shards) -> list[BlockSpec]:
        """The halves of its layers, the second of each its experts."""
        found = layers("layer", self.stack, (source,), shards=shards)
        return [self._with_experts(block, shards) for block in found]

    def _with_experts(self, block: BlockSpec, shards: Shards) -> BlockSpec:
        """The block, which takes what experts make and not a plain second half, or is these."""
        sources = tuple(str(source).replace(".ffn", ".experts") for source in block.sources)
        if block.operator != "ffn":
            return replace(block, sources=sources)
        stack, mixture = self.stack, self.mixture
        build = partial(ExpertFeedForward, stack, mixture)
        sizes = {
            "experts": mixture.count // mixture.spread,
            "experts_per_token": mixture.each,
            "ffn": mixture.width,
            **({"shared_ffn": shards.own(mixture.shared)} if mixture.shared else {}),
        }
        return replace(
            block,
            id=block.id.replace(".ffn", ".experts"),
            operator="moe",
            build=partial(build, shards),
            sources=sources,
            dimensions=stack.sizes | sizes,
            collectives=block.collectives + exchanged(shards, *_chosen_exchanges(stack, mixture, shards)),
            split=stack.split(build, ExpertFeedForward.cuts(stack, mixture)),
            splits={EXPERTS: Split(build, {"expand": Cut(), "project": Cut()})},
            form=(ExpertFeedForward, stack, mixture, shards.count, shards.index),
        )
