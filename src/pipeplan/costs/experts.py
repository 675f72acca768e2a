"""Experts that devices share: each has whole ones of its own, whatever splits the rest of its blocks.

A group is of neighbouring devices of a stage, of its shards, parts of sequences and replicas together; or each few
neighbours of it split the same (an expert tensor size above 1). So an expert is on as many devices as there are
groups, which sum its gradients, and by a ZeRO level divide what training keeps of it; all else of a stage is as without
experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeplan.costs.recipes import expert_state_of, state_over
from pipeplan.costs.zero import TOGETHER, WHOLE, Experts, Zero, cuts
from pipeplan.files import Block, Recipe
from pipeplan.workload.elements import Stage
from pipeplan.workload.kinds import GRADIENTS, MemoryBytes


def kept_of(block: Block, recipe: Recipe, shards: int, zero: Zero = WHOLE, experts: Experts = TOGETHER) -> MemoryBytes:
    """What a device keeps of a block, of which ``shards`` have equal parts, and groups of experts' devices theirs."""
    whole, cut = state_over(block, recipe, shards), cuts(recipe, zero, shards)
    if experts.size == 1 or not block.expert_parameters:
        return whole.share(cut)
    own = expert_state_of(block, recipe)
    return (whole - own).share(cut) + own.share(cuts(recipe, experts.zero, experts.size))


@dataclass(frozen=True, slots=True)
class ExpertState:
    """What each device of a stage keeps of experts, and of their gradients what is in each of its buckets."""

    state: MemoryBytes
    buckets: tuple[int, ...] = ()

    @classmethod
    def of(cls, stage: Stage, blocks: Mapping[str, Block], recipe: Recipe) -> ExpertState | None:
        """The shared experts of a stage; None if it has none."""
        if stage.expert == 1:
            return None
        experts = Experts.of(stage)
        cut = cuts(recipe, experts.zero, experts.size)
        kept = [expert_state_of(blocks[id_], recipe).share(cut) for id_ in stage.blocks]
        end, buckets = len(kept), list[int]()
        for bucket in stage.buckets:
            begin = end - bucket.blocks
            buckets.append(sum(each[GRADIENTS] for each in kept[begin:end]))
            end = begin
        return cls(sum(kept, MemoryBytes()), tuple(buckets))


def as_copies_of_experts(stage: Stage, state: MemoryBytes | None = None) -> Stage:
    """The stage as its experts are on it: a replica is a group that shares them, with this ``state`` of them."""
    copies = len(stage.devices) // stage.expert
    group = stage.zero_group and max(1, stage.zero_group * stage.shards // stage.expert)
    side = replace(stage, shards=stage.expert, context=1, replicas=copies, zero_group=group, expert=1, buckets=())
    return side if state is None else side.with_state(state)


def exchanged_apart(
    stage: Stage, sharing: Sequence[Stage], experts: ExpertState
) -> tuple[Stage, tuple[Stage, list[Stage]]]:
    """The stage without what it keeps of experts, and these as a stage of their own with those it shares them with."""
    side = as_copies_of_experts(stage, experts.state)
    return stage.with_state(stage.state - experts.state), (side, [as_copies_of_experts(each) for each in sharing])
