"""Blocks that are kept together as one: a profile of what a stage is made of, where that is more than single blocks.

A group's rows have what its blocks come to one after another, as a stage of them would (:func:`.stage_costs`), for
every size that is asked for, so that sums of groups are sums of their blocks. What is larger in the group than in its
blocks is memory that only one action needs: copies that are cast at each use, and the attention core of a whole layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product, takewhile
from typing import Any

from pipeplan.costs.blocks import NEVER_AGAIN, StageCost, asked_again
from pipeplan.costs.layers import layer_of
from pipeplan.costs.stages import stage_costs
from pipeplan.costs.zero import Experts
from pipeplan.errors import UsageError
from pipeplan.files import Block, CostRow, Edge, Placement, Plan, Profile, Recipe, TiedParameter
from pipeplan.time_limit import checked
from pipeplan.units import MAX_BYTES
from pipeplan.workload.elements import Again, Recompute, Stage, recompute_of
from pipeplan.workload.kinds import STATE_KINDS

Groups = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class JoinedProfile:
    """A ``profile`` of groups of blocks, the ``whole`` profile of these, and the ``members`` of each group."""

    profile: Profile
    whole: Profile
    members: Mapping[str, tuple[str, ...]]

    def blocks(self, groups: Sequence[str]) -> tuple[str, ...]:
        """The blocks of some groups, in their order."""
        return tuple(chain.from_iterable(self.members[group] for group in groups))

    def again(self, groups: Sequence[str], again: Sequence[Again]) -> Recompute:
        """What the blocks of groups compute again, of what [group] each does."""
        own = ((self.members[group], each) for group, each in zip(groups, again, strict=True))
        return recompute_of(tuple(chain.from_iterable(self._of_group(*each) for each in own)))

    def grouped(self, stages: Sequence[Stage]) -> Iterator[Stage]:
        """Stages of blocks as stages of groups.

        Raises:
            UsageError: one has a part of a group, or computes a part of one again.
        """
        of = {block: name for name, own in self.members.items() for block in own}
        for number, stage in enumerate(stages):
            again = dict(zip(stage.blocks, stage.again, strict=True))
            groups = [*dict.fromkeys(of[block] for block in stage.blocks if block in of)]
            kinds = recompute_of([self._again_of(number, self.members[group], again) for group in groups])
            yield replace(stage, blocks=tuple(groups), recompute=kinds)

    def _again_of(self, number: int, members: Sequence[str], again: Mapping[str, Again]) -> Again:
        """What a group of a stage computes again. Raises UsageError."""
        apart = next((block for block in members if block not in again), None)
        if apart is not None:
            inside = next(block for block in members if block in again)
            raise UsageError(f"stages[{number}] has block {inside!r} and not {apart!r}, which are to be kept together")
        kinds = {again[block]: block for block in members if self.whole.by_id[block].operator not in NEVER_AGAIN}
        if len(kinds) > 1:
            one, other, *_ = kinds.values()
            raise UsageError(
                f"stages[{number}].recompute is another for {one!r} than for {other!r}, which are to be kept together"
            )
        return next(iter(kinds), False)

    def _of_group(self, members: Sequence[str], again: Again) -> tuple[Again, ...]:
        blocks = [self.whole.by_id[member] for member in members]
        return asked_again(blocks, again) if again is True else (again,) * len(blocks)


def with_groups(joined: JoinedProfile, plan: Plan) -> Plan:
    """The plan with stages of groups, where it has some of blocks. What it says of messages is the blocks' own.

    Raises:
        UsageError: a stage has a part of a group, or computes a part of one again.
    """
    if not all(stage.blocks for stage in plan.stages):
        return plan  # of instructions
    return plan.model_copy(update={"stages": tuple(joined.grouped(plan.stages))})


def require_kept(groups: Groups, placement: Placement) -> None:
    """Refuse a placement that cuts inside a group. Raises UsageError."""
    for members in groups:
        for number, stage in enumerate(placement.stages):
            inside = [block for block in members if block in stage.blocks]
            if inside and len(inside) < len(members):
                apart = next(block for block in members if block not in stage.blocks)
                raise UsageError(
                    f"{placement.where}: stages[{number}] has block {inside[0]!r} and not {apart!r}, which are to be "
                    "kept together; place them in one stage, or leave them out of keep_together"
                )


def joined(
    profile: Profile, groups: Groups, samples: Sequence[int] = (), *, selective: bool = True, tied: bool = True
) -> JoinedProfile:
    """The profile whose blocks are these groups, and every other block alone; with rows of these numbers of samples.

    Without ``selective`` no group says what its attention core takes, and without ``tied`` no two share a parameter.

    Raises:
        UsageError: groups that need each other, or have a block in common.
    """
    order, place = profile.topological_order(), {}
    for group in groups:
        for block in group:
            if block in place:
                raise UsageError(f"block {block!r} is to be kept together with two groups; join these to one")
            place[block] = group
    ranked = {block: rank for rank, block in enumerate(order)}
    members: dict[str, tuple[str, ...]] = {}
    taken = set(order)
    for block in order:
        group = sorted(place.get(block, (block,)), key=ranked.__getitem__)
        if group[0] == block:
            members[_named(group, taken)] = tuple(group)
    of = {block: name for name, own in members.items() for block in own}
    make = _GroupBlocks(profile, set(samples), selective, tied)
    made = {
        "blocks": tuple(make.block(name, own) for name, own in checked(members.items(), 16)),
        "edges": tuple(_edges(profile, of)),
        "tied": tuple(_tied(profile, of)) if tied else (),
        "placement": None,
        "keep_together": (),
    }
    found = profile.model_copy(update=made)
    try:
        found.topological_order()
    except ValueError as error:
        raise UsageError(
            f"blocks cannot be kept together so: {error}; keep what stands between them with them"
        ) from None
    kinds = {
        kind: joined(own, groups, samples, selective=selective, tied=tied).profile
        for kind, own in profile.of_kinds.items()
    }
    return JoinedProfile(found.with_kinds(kinds), profile, members)


def _named(group: Sequence[str], taken: set[str]) -> str:
    """What a group is called: what its blocks' names begin with, else its ends."""
    if len(group) == 1:
        return group[0]
    parts = zip(*(block.split(".") for block in group), strict=False)
    common = [some[0] for some in takewhile(lambda some: len(set(some)) == 1, parts)]
    name = ".".join(common) if common else f"{group[0]} to {group[-1]}"
    name = name if name not in taken else f"{group[0]} to {group[-1]}"
    taken.add(name)
    return name


@dataclass
class _GroupBlocks:
    """Makes blocks of groups, those of alike blocks once."""

    profile: Profile
    samples: set[int]
    selective: bool
    tied: bool

    def __post_init__(self) -> None:
        self._bare = self.profile.model_copy(update={"recipe": Recipe()})
        self._rows: dict[object, tuple[CostRow, ...]] = {}

    def block(self, name: str, members: Sequence[str]) -> Block:
        blocks = [self.profile.by_id[member] for member in members]
        if len(blocks) == 1:
            (only,) = blocks
            core = any(row.selective_ns is not None for row in only.costs)
            return _without_cores(only) if core and not self.selective else only
        kinds = tuple(self.profile.alike[member] for member in members)
        into = tuple(
            (edge.source in members, edge.tensor, edge.bytes_per_sample, edge.broadcast, edge.gradient)
            for member in members
            for edge in self.profile.edges_into.get(member, ())
        )
        key = kinds, into, _operator(blocks)
        if key not in self._rows:
            self._rows[key] = tuple(self._costs(blocks, _operator(blocks)))
            if not self._rows[key]:
                raise UsageError(
                    f"blocks {members[0]!r} to {members[-1]!r} are to be kept together, and have no costs for the same "
                    "number of samples; profile all of them with the same --microbatch"
                )
        return Block(id=name, operator=_operator(blocks), costs=self._rows[key], **self._state(blocks))

    def _state(self, blocks: Sequence[Block]) -> dict[str, Any]:
        found: dict[str, Any] = {
            key: sum(getattr(block, key) for block in blocks)
            for key in ("parameters", "frozen_parameters", "expert_parameters")
        }
        for kind in STATE_KINDS:
            stated = any(getattr(block, kind.key) is not None for block in blocks)
            found[kind.key] = sum(_stated(block, kind.key) for block in blocks) if stated else None
        ids = {block.id for block in blocks}
        for each in self.profile.tied if self.tied else ():
            again = len(ids.intersection(each.blocks)) - 1
            if again > 0:
                found["parameters"] -= again * each.parameters
                for kind in STATE_KINDS:
                    if found[kind.key] is not None:
                        found[kind.key] -= again * _stated(each, kind.key)
        found["dimensions"] = dict(chain.from_iterable(block.dimensions.items() for block in reversed(blocks)))
        found["shared"] = all(block.shared for block in blocks)
        found["modules"] = tuple(dict.fromkeys(chain.from_iterable(block.modules for block in blocks)))
        return found

    def _costs(self, blocks: Sequence[Block], operator: str) -> Iterator[CostRow]:
        for shards, context, expert, expert_shards in sorted(_splits(blocks)):
            sharing = context, expert, expert_shards
            own = [[row for row in block.rows(*sharing) if row.shards == shards] for block in blocks]
            if not all(own):
                continue
            low = max(min(row.microbatch_size for row in rows) for rows in own)
            high = min(max(row.microbatch_size for row in rows) for rows in own)
            known = {row.microbatch_size for rows in own for row in rows} | self.samples
            sequences = shards > 1 and any(row.sequence_parallel for rows in own for row in rows)
            for size in sorted(size for size in known if low <= size <= high):
                how: dict[str, Any] = {"microbatch_size": size, "shards": shards, "context": context, "expert": expert}
                how |= {"expert_shards": expert_shards, "sequence_parallel": sequences}
                ids = [block.id for block in blocks]
                cost, core, again = (
                    self._cost(ids, each, size, shards, context, Experts(expert, split=expert_shards))
                    for each in (False, "selective", recompute_of(asked_again(blocks, True)))
                )
                yield CostRow(**how, **_figures(cost), **self._core(blocks, cost, core))
                if operator not in NEVER_AGAIN:
                    yield CostRow(**how, recompute=True, **_figures(again))

    def _cost(
        self, ids: Sequence[str], again: Recompute, size: int, shards: int, context: int, experts: Experts
    ) -> StageCost:
        how: dict[str, Any] = {"context": context, "recompute": again, "experts": experts}
        return stage_costs(self._bare, ids, size, shards, **how)

    def _core(self, blocks: Sequence[Block], kept: StageCost, core: StageCost) -> dict[str, Any]:
        """What it comes to where attention cores are computed again, if there are some."""
        if not self.selective or not any(row.selective_ns is not None for block in blocks for row in block.costs):
            return {}
        return {
            "selective_ns": core.backward_ns - kept.backward_ns,
            "selective_activation_bytes": min(core.activation_bytes, kept.activation_bytes),
        }


def _figures(cost: StageCost) -> dict[str, Any]:
    return {
        "forward_ns": cost.forward_ns,
        "backward_ns": cost.backward_ns,
        "input_grad_ns": cost.input_grad_ns,
        "weight_grad_ns": cost.weight_grad_ns,
        "activation_bytes": cost.activation_bytes,
        "weight_grad_bytes": cost.weight_grad_bytes,
        "workspace_bytes": min(cost.workspace_bytes, MAX_BYTES),
    }


def _without_cores(block: Block) -> Block:
    """The block without what its attention core takes."""
    none = {"selective_ns": None, "selective_activation_bytes": None}
    return block.model_copy(update={"costs": tuple(row.model_copy(update=none) for row in block.costs)})


def _operator(blocks: Sequence[Block]) -> str:
    """What a group of blocks is: of layers what their first is, of a model's ends what is never computed again."""
    ends = [block.operator for block in blocks if block.operator in NEVER_AGAIN]
    others = [block.operator for block in blocks if block.operator not in NEVER_AGAIN]
    if ends and all(layer_of(block.id) is None for block in blocks):
        return ends[0]
    return (others or ends)[0]


def _splits(blocks: Sequence[Block]) -> set[tuple[int, int, int, int]]:
    """Every (shards, context, expert, expert shards) that some block has a row of, as those of all others may be."""
    rows = [row for block in blocks for row in block.costs]
    shards, contexts = ({getattr(row, name) for row in rows} for name in ("shards", "context"))
    experts = {(row.expert, row.expert_shards) for row in rows}
    return {(*split, *own) for *split, own in product(shards, contexts, experts)}


def _stated(parts: Block | TiedParameter, key: str) -> int:
    """Bytes that are stated; of gradients, where none are, as many as of parameters."""
    own = getattr(parts, key)
    return parts.parameter_bytes if own is None else own


def _edges(profile: Profile, of: Mapping[str, str]) -> Iterator[Edge]:
    """Those between groups; tensors of several blocks of a group keep apart."""
    between = [edge for edge in profile.edges if of[edge.source] != of[edge.target]]
    sources = Counter(of[source] for source in {edge.source for edge in between})
    pairs = Counter((of[edge.source], of[edge.target]) for edge in between)
    seen = set[tuple[str, str, str | None]]()
    for edge in between:
        source, target, tensor = of[edge.source], of[edge.target], edge.tensor
        if tensor is None and pairs[source, target] > 1:
            tensor = f"{edge.source} to {edge.target}"
        elif tensor is not None and sources[source] > 1:
            tensor = f"{edge.source}: {tensor}"
        if (source, target, tensor) not in seen:
            seen.add((source, target, tensor))
            yield edge.model_copy(update={"source": source, "target": target, "tensor": tensor})


def _tied(profile: Profile, of: Mapping[str, str]) -> Iterator[TiedParameter]:
    """Those that several groups share."""
    for each in profile.tied:
        groups = tuple(dict.fromkeys(of[block] for block in each.blocks))
        if len(groups) > 1:
            yield each.model_copy(update={"blocks": groups})
