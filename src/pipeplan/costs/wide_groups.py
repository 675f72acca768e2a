"""Groups of devices that are in several nodes: their messages take what the links between these allow.

A profile's rows have what the devices of a group wait for each other's messages, as it was where the rows were made:
mostly inside of a node. Where a group of a plan is in several nodes of its cluster, and the row says what is sent
(:class:`~pipeplan.files.row_messages.RowMessages`), that is priced on the links that the group has there, as sums of
gradients are (:mod:`pipeplan.costs.communication`): by the rings and the trees over nodes that NCCL would have, by
measured curves, and behind the uplinks of each switch that it crosses. What products hide of it stays as before.

Devices of a stage are in replicas, those of a replica in parts of sequences, and those of a part split blocks: so what
splits blocks lies inside of a node first, then what shares sequences; those that share experts are neighbours, too
(Narayanan et al. 2021, section 3.1, has tensor parallelism inside of nodes for the same reason). Searches price groups
before devices are chosen, as where they lie best (:func:`with_best_places`); a workload prices those of its stages
(:func:`where_it_stands`), which is the same wherever groups are multiples of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from pipeplan.costs.communication import (
    Exchange,
    LinkPath,
    beside_products,
    counts_ns,
    dispatch_ns,
    hops_around,
    price_of_groups,
)
from pipeplan.costs.context import SharedCore
from pipeplan.files import Block, Cluster, CostRow, PlacedStage, Profile, RingCosts, sha256_of
from pipeplan.files.row_messages import (
    Combining,
    ExpertMessages,
    MessageTable,
    RowMessages,
    SequenceMessages,
    ShardMessages,
)
from pipeplan.workload.elements import Stage

AROUND: tuple[Combining, ...] = ("all_gather", "reduce_scatter")
"""Around products that are split: what goes in is gathered, sums of what comes out are scattered."""


class GroupSizes(NamedTuple):
    """How many devices split a block, share sequences, share experts, and split each of these."""

    shards: int
    context: int
    expert: int
    expert_shards: int

    @property
    def width(self) -> int:
        """Devices of a replica, which are neighbours."""
        return self.shards * self.context

    @classmethod
    def of(cls, split: CostRow | PlacedStage | Stage) -> GroupSizes:
        """Those of a row or of a stage."""
        return cls(split.shards, split.context, split.expert, split.expert_shards or 1)


_Groups = tuple[tuple[int, ...], ...]
"""Groups that all exchange at once."""


@dataclass(frozen=True)
class WideGroups:
    """Of each axis groups that exchange at once, some of which are in several nodes; () where none is.

    Of groups that lie in different ways each is there once. ``slowest``: the slowest counts; else the quickest, of
    where a group may lie.
    """

    cluster: Cluster = field(compare=False)
    links: Any
    slowest: bool
    shards: tuple[_Groups, ...] = ()
    context: tuple[_Groups, ...] = ()
    words: tuple[_Groups, ...] = ()
    expert_shards: tuple[_Groups, ...] = ()

    @property
    def is_any(self) -> bool:
        """Whether any group is in several nodes."""
        return bool(self.shards or self.context or self.words or self.expert_shards)

    def of_arrays(self, axis: str) -> Callable[[Exchange], int] | None:
        """What an exchange takes along an axis, in ns; None where groups are inside of nodes."""
        return self._prices.get(axis)

    def hops_ns(self, array_bytes: int) -> int:
        """Ns of all hops of an array's pieces around rings of those that share sequences."""
        each = (hops_around(self.cluster, groups, array_bytes) for groups in self.context)
        return round((max if self.slowest else min)(each))

    def words_ns(self, said: ExpertMessages, apart: int) -> int:
        """Ns for words to go to experts and to come back, by the links that they pass."""
        each = (
            sum(
                dispatch_ns(size, said.experts_per_token, len(group), links, apart)
                for size in (said.bytes + said.routing_bytes, said.bytes)
            )
            for group, links in self._paths
        )
        return round((max if self.slowest else min)(each))

    def counts_ns(self, apart: int) -> int:
        """Ns for devices to tell each other how many words will come, by the links that those pass."""
        each = (counts_ns(len(group), links, apart) for group, links in self._paths)
        return round((max if self.slowest else min)(each))

    @cached_property
    def _prices(self) -> dict[str, Callable[[Exchange], int]]:
        return {
            axis: self._priced(own) for axis in ("shards", "context", "expert_shards") if (own := getattr(self, axis))
        }

    @cached_property
    def _paths(self) -> list[tuple[tuple[int, ...], LinkPath]]:
        return [(group, LinkPath.of_group(self.cluster, group)) for groups in self.words for group in groups]

    def _priced(self, ways: tuple[_Groups, ...]) -> Callable[[Exchange], int]:
        prices = [price_of_groups(self.cluster, groups) for groups in ways]
        one = max if self.slowest else min
        return lru_cache(maxsize=None)(lambda exchange: round(one(price(exchange) for price in prices)))


def groups_at(cluster: Cluster | None, devices: Sequence[int], sizes: GroupSizes) -> WideGroups | None:
    """Those of a stage on these devices; None where all are inside of nodes, or links are all alike."""
    if cluster is None or len(cluster.levels) < 2 or max(sizes) == 1:
        return None
    return _groups_at(_PricedLinks(cluster), tuple(devices), sizes)


def best_groups(cluster: Cluster | None, sizes: GroupSizes) -> WideGroups | None:
    """Those of a stage that lies as well as it can: neighbours, which begin where others end.

    None where a group is inside of a node, or wider than the cluster.
    """
    if cluster is None or len(cluster.levels) < 2 or max(sizes.width, sizes.expert) > cluster.num_devices:
        return None
    return _best_groups(_PricedLinks(cluster), sizes)


def groups_on_mesh(cluster: Cluster | None, groups: Mapping[str, Sequence[Sequence[int]]]) -> WideGroups | None:
    """Those along axes of a mesh of a cluster's first devices; None if each is inside of a node, or links are alike."""
    if cluster is None or len(cluster.levels) < 2:
        return None
    node, links = cluster.levels[0].group_size, _PricedLinks(cluster)
    wide = {
        axis: (tuple(map(tuple, own)),)
        for axis, own in groups.items()
        if any(len({device // node for device in each}) > 1 for each in own)
    }
    return WideGroups(cluster, links.key, slowest=True, **wide) if wide else None


class _PricedLinks:
    """A cluster to remember prices by: those with the same links have the same."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.key = cluster.levels, cluster.measured, cluster.num_devices

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _PricedLinks) and self.key == other.key


@lru_cache(maxsize=1024)
def _groups_at(links: _PricedLinks, devices: tuple[int, ...], sizes: GroupSizes) -> WideGroups | None:
    cluster = links.cluster
    if len(devices) % sizes.width or len(devices) % sizes.expert or sizes.expert % sizes.expert_shards:
        return None  # refused whatever it costs
    found = _found(cluster, np.asarray(devices, dtype=np.int64), sizes)
    own = WideGroups(cluster, links.key, slowest=True, **found)
    return own if own.is_any else None


@lru_cache(maxsize=1024)
def _best_groups(links: _PricedLinks, sizes: GroupSizes) -> WideGroups | None:
    cluster, node, found = links.cluster, links.cluster.levels[0].group_size, dict[str, tuple[_Groups, ...]]()
    for width, axes in ((sizes.width, ("shards", "context")), (sizes.expert, ("words", "expert_shards"))):
        period = min(lcm(width, node), cluster.num_devices // width * width)
        starts = range(0, period, width)
        each = [_found(cluster, np.arange(start, start + width), sizes, axes) for start in starts]
        for axis in axes:
            ways = [own[axis] for own in each]
            found[axis] = tuple(dict.fromkeys(way for own in ways for way in own)) if all(ways) else ()
    own = WideGroups(cluster, links.key, slowest=False, **found)
    return own if own.is_any else None


_AXES = ("shards", "context", "words", "expert_shards")


def _found(
    cluster: Cluster, devices: Any, sizes: GroupSizes, axes: Sequence[str] = _AXES
) -> dict[str, tuple[_Groups, ...]]:
    """By axis, groups that exchange at once, where any of them is in several nodes."""
    node = cluster.levels[0].group_size
    found = dict[str, tuple[_Groups, ...]]()
    for axis in axes:
        width, cut = _AXIS[axis](sizes)
        together = devices.reshape(-1, width)
        groups = cut(together.reshape(-1, width))
        nodes = groups // node
        wide = (nodes != nodes[:, :, :1]).any()
        found[axis] = tuple(_filled(cluster, each, cut) for each in _unlike(cluster, together)) if wide else ()
    return found


def _of_shards(sizes: GroupSizes) -> tuple[int, Callable[[Any], Any]]:
    return sizes.width, lambda own: own.reshape(len(own), -1, sizes.shards)


def _of_context(sizes: GroupSizes) -> tuple[int, Callable[[Any], Any]]:
    return sizes.width, lambda own: own.reshape(len(own), sizes.context, sizes.shards).transpose(0, 2, 1)


def _of_words(sizes: GroupSizes) -> tuple[int, Callable[[Any], Any]]:
    return sizes.expert, lambda own: own.reshape(len(own), 1, sizes.expert)


def _of_expert_shards(sizes: GroupSizes) -> tuple[int, Callable[[Any], Any]]:
    return sizes.expert, lambda own: own.reshape(len(own), -1, sizes.expert_shards)


_AXIS: dict[str, Callable[[GroupSizes], tuple[int, Callable[[Any], Any]]]] = {
    "shards": _of_shards,
    "context": _of_context,
    "words": _of_words,
    "expert_shards": _of_expert_shards,
}
"""Devices that are neighbours, and how groups of an axis are among these: [.., group, device]."""


def _unlike(cluster: Cluster, together: Any) -> Iterator[Any]:
    """Of these rows of devices those that lie differently, each from the begin of what its outermost links join."""
    unit = cluster.levels[-2].group_size
    seen = set[tuple[int, ...]]()
    for own in together - together.min(axis=1, keepdims=True) // unit * unit:
        if (key := tuple(own.tolist())) not in seen:
            seen.add(key)
            yield own


def _filled(cluster: Cluster, own: Any, cut: Callable[[Any], Any]) -> _Groups:
    """Groups of these devices, and of those beside them in the same nodes, which are taken to do the same."""
    node, width = cluster.levels[0].group_size, len(own)
    nodes, every = set((own // node).tolist()), [own]
    if len(nodes) * node > width:
        for way in (width, -width):
            beside = own + way
            while beside.min() >= 0 and beside.max() < cluster.num_devices and nodes & set((beside // node).tolist()):
                every.append(beside)
                beside = beside + way
    groups = cut(np.array(every)).reshape(-1, cut(own[None]).shape[-1])
    return tuple(map(tuple, groups.tolist()))


# Rows -----------------------------------------------------------------------------------------------------------------


class MessageWaits(NamedTuple):
    """What a device waits for messages in F, in I and in W, and in a core that is computed again; ns."""

    forward: int = 0
    input_grad: int = 0
    weight_grad: int = 0
    core: int = 0

    def __add__(self, other: Any) -> MessageWaits:
        return MessageWaits(*(one + another for one, another in zip(self, other, strict=True)))

    def __sub__(self, other: MessageWaits) -> MessageWaits:
        return MessageWaits(*(one - another for one, another in zip(self, other, strict=True)))


def waited_of_shards(said: ShardMessages, shards: int) -> MessageWaits:
    """What products of a block do not hide of messages among those that split it."""
    ahead, back = said.products_forward_ns, said.products_input_grad_ns
    if ahead is None or back is None:
        return MessageWaits(said.forward_ns, said.input_grad_ns, said.weight_grad_ns)
    found = said.forward_ns, said.input_grad_ns
    if said.overlapped:
        found = (
            round(float(beside_products(said.forward_ns, ahead, shards))),
            round(float(beside_products(said.input_grad_ns, back, shards))),
        )
    return MessageWaits(*found, max(0, said.weight_grad_ns - back))


def waited_for_sequences(said: SequenceMessages, context: int, *, around: bool) -> MessageWaits:
    """What attention waits for keys and values: gathered, or ``around`` a ring with what that adds to the core."""
    if not around:
        return MessageWaits(said.gather_ns, 2 * said.gather_ns, 0, said.gather_ns)
    moved = said.gather_ns, 0, 0, said.merge_ns, said.merge_grad_ns, said.hops_ns
    core = SharedCore(context, said.core_ns, said.core_grad_ns, *moved).ring
    ahead = round(float(core.forward_ns))
    return MessageWaits(ahead, round(float(core.input_grad_ns)), 0, ahead)


def waited_for_experts(said: ExpertMessages) -> MessageWaits:
    """Words go and come back in F, when it is known how many, and their gradients in I; tokens for shared experts are
    gathered again for W.
    """
    ahead = said.words_ns + said.gathered_ns + said.shared_ns
    return MessageWaits(said.counts_ns + ahead, ahead, round(said.shared_ns / 2))


def among_parts(said: ExpertMessages) -> tuple[Exchange, Exchange]:
    """What devices that split the same experts exchange: words, with what goes along with them, and sums of parts."""
    routing = said.gathered_bytes * said.routing_bytes // max(1, said.bytes)
    gather, scatter = AROUND
    return Exchange(gather, said.gathered_bytes + routing), Exchange(scatter, said.gathered_bytes)


def waited_in(said: RowMessages, row: CostRow, *, around: bool = False) -> MessageWaits:
    """What a row has of all its messages."""
    found = MessageWaits()
    if said.shards is not None:
        found += waited_of_shards(said.shards, row.shards)
    if said.context is not None:
        found += waited_for_sequences(said.context, row.context, around=around)
    if said.expert is not None:
        found += waited_for_experts(said.expert)
    return found


def row_at(row: CostRow, said: RowMessages, groups: WideGroups, *, around: bool = False) -> tuple[CostRow, RowMessages]:
    """The row, of which ``said`` are the messages, and these, where its groups lie so.

    ``around``: keys and values of the row go around a ring. ``row.ring`` is what that changes, either way.
    """
    priced = _priced(said, groups, row.expert_shards)
    if priced == said:
        return row, said
    more = waited_in(priced, row, around=around) - waited_in(said, row, around=around)
    again = more.forward * row.recompute
    longer = {
        "forward_ns": more.forward,
        "backward_ns": more.input_grad + more.weight_grad + again,
        "input_grad_ns": more.input_grad + again,
        "weight_grad_ns": more.weight_grad,
        "selective_ns": more.core,
    }
    update: dict[str, Any] = {name: own + longer[name] for name in longer if (own := getattr(row, name)) is not None}
    if row.ring is not None and priced.context is not None and said.context is not None:
        update["ring"] = _ring_at(row.ring, said.context, priced.context, row.context)
    return row.model_copy(update=update), priced


def _ring_at(ring: RingCosts, before: SequenceMessages, after: SequenceMessages, context: int) -> RingCosts:
    """How much more a ring takes than gathering where messages take another time."""
    was, now = (
        waited_for_sequences(said, context, around=True) - waited_for_sequences(said, context, around=False)
        for said in (before, after)
    )
    more = now - was
    return ring.model_copy(
        update={"forward_ns": ring.forward_ns + more.forward, "input_grad_ns": ring.input_grad_ns + more.input_grad}
    )


def _priced(said: RowMessages, groups: WideGroups, expert_shards: int) -> RowMessages:
    found = dict[str, Any]()
    among = groups.of_arrays("shards")
    if said.shards is not None and among is not None:
        taken = {
            name: sum(among(Exchange(how, size)) for own, how, size in said.shards.sent if own == phase)
            for phase, name in (("F", "forward_ns"), ("I", "input_grad_ns"), ("W", "weight_grad_ns"))
        }
        found["shards"] = said.shards.model_copy(update=taken)
    if said.context is not None and (price := groups.of_arrays("context")) is not None:
        size = said.context.bytes
        taken = {"gather_ns": price(Exchange("all_gather", size)), "hops_ns": groups.hops_ns(size)}
        found["context"] = said.context.model_copy(update=taken)
    if said.expert is not None:
        own = dict[str, int]()
        if groups.words:
            own |= {
                "counts_ns": groups.counts_ns(expert_shards),
                "words_ns": groups.words_ns(said.expert, expert_shards),
            }
        if (price := groups.of_arrays("expert_shards")) is not None and said.expert.gathered_bytes:
            own["gathered_ns"] = sum(map(price, among_parts(said.expert)))
        if among is not None and said.expert.shared_bytes:
            own["shared_ns"] = sum(among(Exchange(how, said.expert.shared_bytes)) for how in AROUND)
        found["expert"] = said.expert.model_copy(update=own)
    return said.model_copy(update=found)


# Profiles -------------------------------------------------------------------------------------------------------------


def says_messages(profile: Profile, sizes: GroupSizes) -> bool:
    """Whether all rows for a way to split say what is sent, of every kind of device."""

    def says(block: Block) -> bool:
        own = sizes if block.expert_parameters else sizes._replace(expert=1, expert_shards=1)
        return all(row.messages is not None for row in block.costs if GroupSizes.of(row) == own and max(own) > 1)

    return all(says(block) for each in (profile, *profile.of_kinds.values()) for block in each.kinds)


def with_best_places(profile: Profile, cluster: Cluster | None) -> Profile:
    """The profile whose rows have what messages take where groups lie as well as they can in a cluster."""
    if cluster is None or len(cluster.levels) < 2:
        return profile
    return _with_rows(profile, lambda row: best_groups(cluster, GroupSizes.of(row)))


def where_it_stands(profile: Profile, stage: PlacedStage | Stage, cluster: Cluster | None) -> Profile:
    """The profile whose rows of a stage's way to split have what messages take where its groups are."""
    sizes = GroupSizes.of(stage)
    groups = groups_at(cluster, stage.devices, sizes)
    if groups is None:
        return profile
    own = {sizes, sizes._replace(expert=1, expert_shards=1)}
    return profile.once(
        ("where it stands", sizes, groups),
        lambda: _with_rows(profile, lambda row: groups if GroupSizes.of(row) in own else None),
    )


def _with_rows(profile: Profile, groups_of: Callable[[CostRow], WideGroups | None]) -> Profile:
    """The profile with rows where groups lie so: itself where none changes."""
    table, changed = MessageTable(), False

    def at(row: CostRow) -> CostRow:
        nonlocal changed
        if row.messages is None:
            return row
        said, found = profile.messages[row.messages], row
        groups = groups_of(row)
        if groups is not None:
            found, said = row_at(row, said, groups, around=(row.shards, row.context) in profile.rings)
            changed |= found is not row
        place = table.place_of(said)
        return found if place == row.messages else found.model_copy(update={"messages": place})

    made = {block.id: tuple(map(at, block.costs)) for block in profile.kinds}
    kinds = {kind: _with_rows(own, groups_of) for kind, own in profile.of_kinds.items()}
    if not changed and all(kinds[kind] is own for kind, own in profile.of_kinds.items()):
        return profile
    blocks = tuple(block.model_copy(update={"costs": made[profile.alike[block.id]]}) for block in profile.blocks)
    priced = profile.model_copy(update={"blocks": blocks, "messages": table.messages})
    return priced.read_as(sha256_of(profile)).with_rings(profile.rings).with_kinds(kinds)
