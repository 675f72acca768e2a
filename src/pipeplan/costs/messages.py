"""What stages send each other, in which slices of its sequence, and what it takes to have these ready.

Devices that split a block may divide its tensors along the sequence (Korthikanti et al. 2022, section 4.2.2). A message
brings each device what it keeps: its slice where all blocks of its stage that take the tensor divide it, else all of
it. Stages of equal shards send what they hold. Where the sender's slices are smaller, neighbours gather theirs first,
at the end of the action that makes them; of larger ones each receiver is sent its part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from pipeplan.costs.blocks import StageCost, places_divided
from pipeplan.costs.communication import all_gather_time, transfer_time
from pipeplan.costs.trees import with_shared_uplinks
from pipeplan.files import Block, Cluster, Edge, Placement, Profile
from pipeplan.time_limit import checked
from pipeplan.workload.elements import Dependency, Hop, Operation, Stage, is_in_line, slots_of
from pipeplan.workload.folding import Fold
from pipeplan.workload.kinds import BACKWARD_ROLES, Role
from pipeplan.workload.samples import carried


@dataclass(frozen=True, slots=True)
class _Sent:
    """A tensor that goes from stage to stage, or its gradient that goes back, known by one of its edges.

    The sender's devices have ``held`` slices of it, and the receiver's keep ``kept``; 1 where it is whole.
    """

    edge: Edge
    held: int
    kept: int

    @property
    def leaving(self) -> int:
        """In how many slices it leaves: these are gathered, and what is sent is cut from them."""
        return math.gcd(self.held, self.kept)


@dataclass(frozen=True, slots=True)
class Crossings:
    """The tensors between each two stages of a route, either way.

    Everything is sent whole if ``whole``: instructions in between look at all of it.
    """

    profile: Profile
    stages: Sequence[Stage]
    whole: bool = False

    def crossing(self) -> dict[tuple[int, int], list[Edge]]:
        """The edges between each two stages of a route."""
        stages_of: dict[str, dict[int, int]] = defaultdict(dict)  # block -> route -> stage
        for index, stage in enumerate(self.stages):
            for block in stage.blocks:
                stages_of[block][stage.route] = index
        found: dict[tuple[int, int], list[Edge]] = defaultdict(list)
        for edge in self.profile.edges:
            for route, source in stages_of[edge.source].items():
                target = stages_of[edge.target][route]
                if source != target:
                    found[source, target].append(edge)
        return found

    def outputs(self, source: int, target: int, edges: Iterable[Edge]) -> list[_Sent]:
        """What goes along the edges between two stages."""
        of_blocks, maker, taker = self.profile.by_id, self.stages[source], self.stages[target]
        apart = not self.whole and goes_in_slices(maker, taker)
        return [
            _Sent(
                own[0],
                _slices(own[0], [of_blocks[own[0].source]], maker, any),
                _slices(own[0], [of_blocks[edge.target] for edge in own], taker, all) if apart else 1,
            )
            for own in _by_tensor(edges)
        ]

    def gradients(self, source: int, target: int, edges: Iterable[Edge]) -> list[_Sent]:
        """What goes back against the edges between two stages."""
        of_blocks, maker, taker = self.profile.by_id, self.stages[source], self.stages[target]
        apart = not self.whole and goes_in_slices(maker, taker)
        return [
            _Sent(
                own[0],
                _slices(own[0], [of_blocks[edge.target] for edge in own], taker, any),
                _slices(own[0], [of_blocks[own[0].source]], maker, all) if apart else 1,
            )
            for own in _by_tensor(edge for edge in edges if edge.gradient)
        ]


def _slices(edge: Edge, blocks: Sequence[Block], stage: Stage, of: Callable[[Iterable[bool]], bool]) -> int:
    """Into how many slices a stage's devices divide a tensor, where ``of`` its blocks do; 1 if it is whole."""
    if stage.shards == 1:
        return 1
    divided = not edge.broadcast and of(places_divided(block, stage.shards) > 1 for block in blocks)
    return stage.shards if divided else 1


def goes_in_slices(source: Stage, target: Stage) -> bool:
    """Whether each device can be sent its slice: those that have both stages hold theirs already.

    Where a stage splits each block in its own way, what is between stages is whole.
    """
    if source.configurations or target.configurations:
        return False
    if source.shards == target.shards == 1 or set(source.devices).isdisjoint(target.devices):
        return True
    common = math.gcd(source.shards, target.shards)
    places = {device: index % source.shards for index, device in enumerate(source.devices)}
    return all(
        places[device] * common // source.shards == index % target.shards * common // target.shards
        for index, device in enumerate(target.devices)
        if device in places
    )


def _by_tensor(edges: Iterable[Edge]) -> list[list[Edge]]:
    """Edges that carry the same tensor, together."""
    found: dict[object, list[Edge]] = defaultdict(list)
    for number, edge in enumerate(edges):
        found[number if edge.tensor is None else (edge.source, edge.tensor)].append(edge)
    return list(found.values())


def distinct(edges: Iterable[Edge]) -> list[Edge]:
    """One edge for each tensor."""
    return [own[0] for own in _by_tensor(edges)]


def edge_bytes(edge: Edge, microbatch_size: int, parts: int = 1) -> int:
    """Bytes of an edge's tensor, or of one of its slices; a tensor for all samples is not sliced."""
    return edge.bytes_per_sample if edge.broadcast else -(-edge.bytes_per_sample * microbatch_size // parts)


def with_gathers(
    crossings: Crossings, costs: Sequence[StageCost], given: Collection[int], cluster: Cluster | None
) -> list[StageCost]:
    """Costs of stages with what it takes to gather what leaves them in larger slices than their devices have.

    Outputs are gathered in F, and gradients in B or I. Stages in ``given`` have costs of their own.
    """
    found, stages = list(costs), crossings.stages
    if cluster is None or all(stage.shards == 1 for stage in stages):
        return found
    for (number, forth), every in gathers(crossings).items():
        more = sum(_gathering_ns(stages[number], each, cluster) for each in every)
        if not more or number in given:
            continue
        cost = found[number]
        if forth:
            found[number] = replace(cost, forward_ns=cost.forward_ns + more)
        else:
            split = None if cost.input_grad_ns is None else cost.input_grad_ns + more
            found[number] = replace(cost, backward_ns=cost.backward_ns + more, input_grad_ns=split)
    return found


class Gather(NamedTuple):
    """Neighbours that make one slice of theirs before it leaves: how many devices, and its bytes of a micro-batch."""

    devices: int
    array_bytes: int


def gathers(crossings: Crossings) -> dict[tuple[int, bool], list[Gather]]:
    """What each stage gathers of what leaves it, by stage and whether it goes forth, each tensor once."""
    leaving: dict[tuple[int, bool], dict[object, _Sent]] = defaultdict(dict)
    for (source, target), edges in crossings.crossing().items():
        ways = (
            (source, True, crossings.outputs(source, target, edges)),
            (target, False, crossings.gradients(source, target, edges)),
        )
        for number, forth, every in ways:
            for sent in every:
                name = id(sent.edge) if sent.edge.tensor is None else (sent.edge.source, sent.edge.tensor)
                leaving[number, forth].setdefault((name, sent.leaving), sent)
    return {
        (number, forth): [_gather(crossings.stages[number], sent) for sent in tensors.values()]
        for (number, forth), tensors in leaving.items()
    }


def _gather(stage: Stage, sent: _Sent) -> Gather:
    size = edge_bytes(sent.edge, stage.microbatch_size // stage.replicas, stage.context * sent.leaving)
    return Gather(sent.held // sent.leaving, size)


def _gathering_ns(stage: Stage, gather: Gather, cluster: Cluster) -> int:
    """What neighbours take for it; the slowest of them count."""
    count, size = gather
    groups = (stage.devices[at : at + count] for at in range(0, len(stage.devices), count))
    return max(all_gather_time(cluster, group, size) for group in groups) if count > 1 else 0


def dependencies(
    crossings: Crossings,
    placement: Placement,
    operations: Sequence[Operation],
    cluster: Cluster | None,
    fold: Fold | None = None,
) -> tuple[Dependency, ...]:
    """Within a stage F before B or I, I before W; between stages of a route outputs down the edges, gradients up.

    Where stages are run in line each also waits for its neighbour, by a message of no bytes where no edge joins them.
    With a ``fold`` stages are on programs, and messages between those: of one place of their players.
    """
    stages, num_routes = crossings.stages, placement.num_routes
    back = {operation.stage: operation.kind for operation in operations if operation.role in BACKWARD_ROLES}
    deferred = {operation.stage for operation in operations if operation.role is Role.WEIGHT_GRAD}
    found = [Dependency(source=f"{stage}F", target=f"{stage}{back[stage]}") for stage in sorted(back)]
    found += [Dependency(source=f"{stage}{back[stage]}", target=f"{stage}W") for stage in sorted(deferred)]
    crossing = crossings.crossing()
    if is_in_line(placement.strategy):
        crossing |= {pair: [] for pair in pairwise(range(len(stages))) if pair not in crossing}

    in_place_0 = stages if fold is None else list(map(fold.in_place_0, stages))

    def joined(ends: tuple[str, str], sender: int, receiver: int, sent: Sequence[_Sent]) -> Dependency:
        slices = max((each.kept for each in sent), default=1)
        maker, taker = in_place_0[sender], in_place_0[receiver]
        hops = _hops(maker, taker, num_routes, sent, cluster, stages[sender].context)
        hops = hops if fold is None else tuple(map(fold.hop, hops))
        return Dependency(source=ends[0], target=ends[1], hops=hops, slices=slices)

    for (source, target), edges in checked(sorted(crossing.items()), 16):
        forth = crossings.outputs(source, target, edges)
        found.append(joined((f"{source}F", f"{target}F"), source, target, forth))
        if not back:  # forwards alone
            continue
        upward = crossings.gradients(source, target, edges)
        if upward or not edges:
            found.append(joined((f"{target}{back[target]}", f"{source}{back[source]}"), target, source, upward))
    assert all(dependency.payload for dependency in found if dependency.hops)
    return with_shared_uplinks(found, cluster, () if fold is None else fold.players)


def returned(source: Stage, target: Stage, token_bytes: int, cluster: Cluster | None) -> tuple[Hop, ...]:
    """What a decode step's last stage sends back to the first: so few bytes that they occupy no link."""
    token = _Sent(Edge(source="token", target="next token", bytes_per_sample=token_bytes), 1, 1)
    hops = _hops(source, target, 1, [token], cluster, source.context)
    return tuple(replace(hop, latency_ns=hop.duration_ns, occupancy_ns=0) for hop in hops)


def beside(hops: Iterable[Hop], samples: int, tokens: int, cluster: Cluster | None) -> tuple[Hop, ...]:
    """Messages of so many tokens beside those ``hops`` of one token of each of ``samples`` requests."""
    found = []
    for hop in hops:
        size = -(-hop.bytes * tokens // samples)
        latency, occupancy = transfer_time(cluster, hop.source_device, hop.target_device, size)
        found.append(replace(hop, bytes=size, latency_ns=latency, occupancy_ns=occupancy))
    return tuple(found)


def _hops(
    source: Stage, target: Stage, num_routes: int, sent: Sequence[_Sent], cluster: Cluster | None, context: int = 1
) -> tuple[Hop, ...]:
    """A message from each device to each that works on the samples and does not hold them already.

    Each carries one of ``context`` parts of a sequence.
    """
    by_target: dict[int, list[Hop]] = defaultdict(list)
    in_slices = any(each.kept > 1 for each in sent)
    for (sender, receiver), samples in _carried(source, target, num_routes, in_slices=in_slices).items():
        size = max(samples.values())
        hop = _hop(sender, receiver, sent, size, context, cluster)
        period = _period(source, target)
        first, last = min(samples), max(samples)
        if len(samples) < period:
            assert last - first + 1 == len(samples), "neighbouring micro-batches hold neighbouring samples"
            hop = replace(hop, every=period, run=len(samples), first=first)
        by_target[receiver].append(hop)
    return tuple(hop for device in target.devices for hop in by_target[device])


def _period(source: Stage, target: Stage) -> int:
    """Number of micro-batches of the source after which both stages begin a micro-batch together again."""
    return math.lcm(source.microbatch_size, target.microbatch_size) // source.microbatch_size


def _carried(
    source: Stage, target: Stage, num_routes: int, *, in_slices: bool
) -> Mapping[tuple[int, int], Mapping[int, int]]:
    """{(source device, target device): {micro-batch of the source: samples sent}}, for the first micro-batches."""
    period = _period(source, target)
    total = period * source.microbatch_size * num_routes
    own, others = (slots_of(stage, "B", total, num_routes) for stage in (source, target))
    found: dict[tuple[int, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for m in range(period):
        samples = own.samples(m)
        for other in others.sharing(samples):
            ends = carried(source, samples, target, others.samples(other), in_slices=in_slices)
            for sender, receiver, (begin, end) in ends:
                found[sender, receiver][m] += end - begin
    return found


def _hop(sender: int, receiver: int, sent: Sequence[_Sent], samples: int, parts: int, cluster: Cluster | None) -> Hop:
    """A message of so many samples, of each of whose sequences it carries one of ``parts``, or a slice of that."""
    sizes = [(each.edge, edge_bytes(each.edge, samples, parts * each.kept)) for each in sent]
    priced = sum(size for edge, size in sizes if edge.transfer_ns is None)
    fixed = max((edge.transfer_ns for edge, _ in sizes if edge.transfer_ns is not None), default=0)
    latency, occupancy = transfer_time(cluster, sender, receiver, priced)
    if all(edge.transfer_ns is not None for edge, _ in sizes):
        latency, occupancy = 0, 0
    return Hop(
        source_device=sender,
        target_device=receiver,
        bytes=sum(size for _, size in sizes),
        latency_ns=max(latency, fixed),
        occupancy_ns=occupancy,
    )
