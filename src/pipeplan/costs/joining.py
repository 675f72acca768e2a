"""Blocks that are kept together as one: a profile of what a stage is made of, where that is more than single blocks.

A group's rows have what its blocks come to one after another, as a stage of them would (:func:`.stage_costs`), for
every size that is asked for, so that sums of groups are sums of their blocks. What is larger in the group than in its
blocks is memory that only one action needs: copies that are cast at each use, and the attention core of a whole layer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product, takewhile
from operator import itemgetter
from typing import Any

from pipeplan.costs.blocks import NEVER_AGAIN, StageCost, asked_again
from pipeplan.costs.context import exchanged_as, open_exchanges
from pipeplan.costs.layers import layer_of
from pipeplan.costs.stages import group_costs
from pipeplan.costs.zero import Experts
from pipeplan.errors import UsageError
from pipeplan.files import Block, CostRow, Edge, Placement, Plan, Profile, Recipe, RingCosts, TiedParameter
from pipeplan.files.profile import NEEDS
from pipeplan.time_limit import checked
from pipeplan.units import MAX_BYTES, require_sum
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
    made = {
        "blocks": _GroupBlocks(profile, set(samples), selective, tied).blocks(members),
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


_COUNTED = (
    *("parameters", "frozen_parameters", "expert_parameters"),
    *("whole_parameters", "whole_frozen_parameters"),
)
_Way = tuple[int, int, int, int, int]
"""Shards, context, expert, expert shards, and the number of samples."""


@dataclass
class _GroupBlocks:
    """Makes blocks of groups, rows of those of alike blocks once, and of all groups beside each other."""

    profile: Profile
    samples: set[int]
    selective: bool
    tied: bool

    def blocks(self, groups: Mapping[str, Sequence[str]]) -> tuple[Block, ...]:
        """The groups in their order. Raises UsageError where one has no costs."""
        by_id = self.profile.by_id
        own = {name: [by_id[member] for member in members] for name, members in checked(groups.items(), 16)}
        keys = {name: self._key(blocks) for name, blocks in checked(own.items(), 16) if len(blocks) > 1}
        rows = self._costs({key: own[name] for name, key in reversed(keys.items())})
        made = list[Block]()
        for name, blocks in checked(own.items(), 16):
            if name not in keys:
                made.append(self._alone(*blocks))
                continue
            if not rows[keys[name]]:
                raise UsageError(
                    f"blocks {blocks[0].id!r} to {blocks[-1].id!r} are to be kept together, and have no costs for the "
                    "same number of samples; profile all of them with the same --microbatch"
                )
            operator = _operator(blocks)
            state = self._state(blocks)
            for key in (*_COUNTED, *(kind.key for kind in STATE_KINDS)):
                if (value := state[key]) is not None:
                    of = f"{key} of blocks {blocks[0].id!r} to {blocks[-1].id!r}, which are kept together,"
                    require_sum(self.profile.where, of, value, "bytes", MAX_BYTES, "let fewer be kept together")
            made.append(Block(id=name, operator=operator, costs=tuple(rows[keys[name]]), **state))
        return tuple(made)

    def _alone(self, only: Block) -> Block:
        core = any(row.selective_ns is not None for row in only.costs)
        return _without_cores(only) if core and not self.selective else only

    def _key(self, blocks: Sequence[Block]) -> Hashable:
        """Equal for groups with the same rows."""
        members = {block.id for block in blocks}
        into = tuple(
            (
                edge.source in members,
                *(edge.tensor, edge.bytes_per_sample, edge.broadcast, edge.gradient),
                *(edge.saved, edge.saved_by_source),
            )
            for block in blocks
            for edge in self.profile.edges_into.get(block.id, ())
        )
        return tuple(self._priced[self.profile.alike[block.id]] for block in blocks), into, _operator(blocks)

    @cached_property
    def _priced(self) -> dict[str, str]:
        """{one of alike blocks: the first whose rows, and what of them is for experts or computed again, are the same}

        What blocks keep, in which there are more kinds of them, changes no row.
        """
        firsts: dict[Hashable, str] = {}
        return {
            kind.id: firsts.setdefault(
                (kind.prices, bool(kind.expert_parameters), kind.operator in NEVER_AGAIN), kind.id
            )
            for kind in checked(self.profile.kinds, 16)
        }

    def _state(self, blocks: Sequence[Block]) -> dict[str, Any]:
        found: dict[str, Any] = {key: sum(getattr(block, key) for block in blocks) for key in _COUNTED}
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

    def _costs(self, groups: Mapping[Hashable, Sequence[Block]]) -> dict[Hashable, list[CostRow]]:
        """{group: its rows}, by splits and then sizes: of each all groups that have it."""
        bare = self.profile.model_copy(update={"recipe": Recipe()})
        ways: dict[_Way, list[tuple[Hashable, bool]]] = defaultdict(list)
        for key, blocks in checked(groups.items(), 16):
            for way, sequences in self._ways(blocks):
                ways[way].append((key, sequences))
        found: dict[Hashable, list[CostRow]] = {key: [] for key in groups}
        for way, those in sorted(ways.items(), key=itemgetter(0)):
            each = dict(zip(("shards", "context", "expert", "expert_shards", "microbatch_size"), way, strict=True))
            own = {key: groups[key] for key, _ in those}
            kept = _costs_of(bare, own, way, False)
            core = _costs_of(bare, {key: own[key] for key in own if self._has_core(own[key])}, way, "selective")
            again = {key: own[key] for key in own if _operator(own[key]) not in NEVER_AGAIN}
            again_costs = _costs_of(bare, again, way, True)
            turned, turned_again = _turned(bare, own, way, False), _turned(bare, again, way, True)
            around = way[:2] in bare.rings
            for key, sequences in checked(those):
                how: dict[str, Any] = {**each, "sequence_parallel": sequences}
                cores: dict[str, Any] = _core(kept[key], core[key]) if key in core else {}
                row = CostRow(**how, **_figures(kept[key]), **cores)
                found[key].append(_with_ring(row, turned.get(key), around=around))
                if key in again:
                    row = CostRow(**how, recompute=True, **_figures(again_costs[key]))
                    found[key].append(_with_ring(row, turned_again.get(key), around=around))
        return found

    def _ways(self, blocks: Sequence[Block]) -> Iterator[tuple[_Way, bool]]:
        """What all blocks of a group have costs for, and whether any divides the sequence there."""
        for shards, *sharing in _splits(blocks):
            own = [[row for row in block.rows(*sharing) if row.shards == shards] for block in blocks]
            if not all(own):
                continue
            low = max(min(row.microbatch_size for row in rows) for rows in own)
            high = min(max(row.microbatch_size for row in rows) for rows in own)
            known = {row.microbatch_size for rows in own for row in rows} | self.samples
            sequences = shards > 1 and any(row.sequence_parallel for rows in own for row in rows)
            context, expert, expert_shards = sharing
            yield from (
                ((shards, context, expert, expert_shards, size), sequences) for size in known if low <= size <= high
            )

    def _has_core(self, blocks: Sequence[Block]) -> bool:
        return self.selective and any(row.selective_ns is not None for block in blocks for row in block.costs)


def _costs_of(
    profile: Profile, groups: Mapping[Hashable, Sequence[Block]], way: _Way, again: Again
) -> dict[Hashable, StageCost]:
    """{group: what it comes to} where all of them have costs."""
    shards, context, expert, expert_shards, size = way
    experts = Experts(expert, split=expert_shards)
    how: dict[str, Any] = {"context": context, "recompute": again, "experts": experts}
    ids = [[block.id for block in blocks] for blocks in groups.values()]
    return dict(zip(groups, group_costs(profile, ids, size, shards, **how) if ids else (), strict=True))


def _turned(
    profile: Profile, groups: Mapping[Hashable, Sequence[Block]], way: _Way, again: Again
) -> dict[Hashable, StageCost]:
    """{group: what it comes to with the other exchange of keys and values}, where both are open."""
    split = way[:2]
    if (other := open_exchanges(profile).get(split)) is None:
        return {}
    return _costs_of(exchanged_as(profile, split, other), groups, way, again)


def _with_ring(row: CostRow, turned: StageCost | None, *, around: bool) -> CostRow:
    """A row that says what a ring changes, of which it is one itself (``around``) or else what is ``turned``."""
    if turned is None:
        return row
    forward = turned.forward_ns - row.forward_ns
    back = (turned.input_grad_ns or 0) - (row.input_grad_ns or 0) - forward * row.recompute
    held = min(turned.workspace_bytes, MAX_BYTES) - row.workspace_bytes
    more = RingCosts(forward_ns=forward, input_grad_ns=back, workspace_bytes=held)
    return row.model_copy(update={"ring": -more if around else more}) if any((forward, back, held)) else row


def _core(kept: StageCost, core: StageCost) -> dict[str, Any]:
    """What a group comes to where attention cores are computed again."""
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
    inside = {edge.key for edge in profile.edges if of[edge.source] == of[edge.target] and edge.is_saved()}
    found: dict[tuple[str, str, str | None], Edge] = {}
    for edge in between:
        source, target, tensor = of[edge.source], of[edge.target], edge.tensor
        if tensor is None and pairs[source, target] > 1:
            tensor = f"{edge.source} to {edge.target}"
        elif tensor is not None and sources[source] > 1:
            tensor = f"{edge.source}: {tensor}"
        whose: dict[str, Any] = {"saved_by_source": "yes"} if edge.key in inside else {}
        made = edge.model_copy(update={"source": source, "target": target, "tensor": tensor, **whose})
        before = found.setdefault((source, target, tensor), made)
        if NEEDS.index(made.need) > NEEDS.index(before.need):  # another block of the group needs it more
            found[source, target, tensor] = before.model_copy(update={"saved": made.saved})
    yield from found.values()


def _tied(profile: Profile, of: Mapping[str, str]) -> Iterator[TiedParameter]:
    """Those that several groups share."""
    for each in profile.tied:
        groups = tuple(dict.fromkeys(of[block] for block in each.blocks))
        if len(groups) > 1:
            yield each.model_copy(update={"blocks": groups})
