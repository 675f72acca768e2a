"""Every uniform layout of a chain as one table, with closed forms of its time and memory: thousands in milliseconds.

A layout is uniform where all stages have as many shards and replicas, and one micro-batch size. Here: how long an
iteration of each takes at least, wherever the chain is cut and whatever the schedule; how long it usually takes, by
which layouts are tried best first; which cannot fit. Not here: cuts and schedules, which the best of them get.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs import StageCost, can_split
from pipeplan.costs.communication import all_reduce_time
from pipeplan.costs.zero import WHOLE, Zero
from pipeplan.errors import UsageError
from pipeplan.files import Edge, Profile
from pipeplan.partition.chain.costs import Array, FloatArray
from pipeplan.partition.problem import Pricing
from pipeplan.partition.strategies import STRATEGIES, PlacementStrategy
from pipeplan.planning.request import Batch, Request
from pipeplan.time_limit import checked
from pipeplan.workload.elements import Again
from pipeplan.workload.kinds import GRADIENTS, MemoryBytes


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy for chains and everything it leaves open.

    ``shards`` devices split each block. ``positions`` are how many groups of them and their replicas there are, by
    default as many as there are devices for; ``batch`` is of all replicas together, which divide what they keep by
    ``zero``.
    """

    strategy: str
    replicas: int
    batch: Batch
    recompute: Again
    spread: bool
    shards: int = 1
    positions: int | None = None
    zero: Zero = WHOLE

    @property
    def pricing(self) -> Pricing:
        """What a device's costs are for."""
        return Pricing(self.batch.microbatch_size // self.replicas, self.recompute, self.shards, self.zero)


@dataclass(frozen=True, slots=True)
class BoundedChoice:
    """A choice, ns that no iteration of it is below, and what 1F1B on an even cut takes, about: ns, bytes."""

    choice: Choice
    least_ns: int
    usual_ns: float
    usual_bytes: float


def best_first(request: Request, choices: Sequence[Choice]) -> list[BoundedChoice]:
    """Those that may fit, first the ones that do with 1F1B on an even cut, by how long an iteration then takes.

    Each says its positions.
    """
    blocks = _Blocks.of(request.profile)
    pricings = dict.fromkeys(one.pricing for one in checked(choices))
    sums = {each: _Sums.of(request, blocks, each) for each in checked(pricings, 1)}
    known = [(choice, own) for choice in checked(choices) if (own := sums[choice.pricing]) is not None]
    if not known:
        return []
    table = _BoundTable.of(request, *map(list, zip(*known, strict=True)))
    fewer = np.array(_fewer([choice for choice, _ in known]))
    order = np.lexsort((table.usual, fewer, ~table.fits))
    return [
        BoundedChoice(known[row][0], int(table.least[row]), float(table.usual[row]), float(table.needs[row]))
        for row in checked(order.tolist())
        if table.possible[row]
    ]


def _fewer(choices: Sequence[Choice]) -> list[bool]:
    """[choice] whether the same with more positions is another of them: that is seldom longer, and looked at first."""
    likes = [(each.strategy, each.shards, each.replicas, each.batch, each.recompute) for each in checked(choices)]
    most: dict[tuple[object, ...], int] = {}
    for like, each in checked(zip(likes, choices, strict=True)):
        most[like] = max(most.get(like, 0), each.positions or 0)
    return [(each.positions or 0) < most[like] for like, each in zip(likes, choices, strict=True)]


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A profile's blocks in the order that is cut, those that cost the same as one: ``kinds`` [block] of ``each``.

    ``chained``: each waits for the one before it. ``shares_tensors``: together some hold less than alone.
    """

    profile: Profile
    each: tuple[str, ...]
    kinds: tuple[int, ...]
    chained: bool
    shares_tensors: bool

    @classmethod
    def of(cls, profile: Profile) -> _Blocks:
        """Of a profile."""
        into: dict[str, list[Edge]] = defaultdict(list)
        for edge in profile.edges:
            into[edge.target].append(edge)
        tied = {block for each in profile.tied for block in each.blocks}
        order, by_id = profile.topological_order(), {block.id: block for block in profile.blocks}
        numbers: dict[tuple[object, ...], int] = {}
        found, each = [], list[str]()
        for name in checked(order, 16):
            fed = tuple(edge.bytes_per_sample for edge in into[name])
            like = by_id[name].model_dump_json(exclude={"id"}), fed, name if name in tied else ""
            if like not in numbers:
                numbers[like] = len(each)
                each.append(name)
            found.append(numbers[like])
        pairs = {(edge.source, edge.target) for edge in profile.edges}
        return cls(
            profile,
            tuple(each),
            tuple(found),
            all(pair in pairs for pair in pairwise(order)),
            any(edge.tensor is not None for edge in profile.edges),
        )

    def costs(self, pricing: Pricing) -> list[StageCost]:
        """[block] as a stage of its own. Raises UsageError where one has no such costs."""
        known = pricing.costs(self.profile, self.each)
        return [known[kind] for kind in self.kinds]


@dataclass(frozen=True, slots=True)
class _Sums:
    """What all blocks come to on a device, of one micro-batch: ns and bytes.

    ``sums_ns`` [block + 1] are running sums of what they do, ``most_ns`` is that of the block that takes longest and
    ``plain_ns`` what all take with backward whole. ``way_ns`` is what a later stage waits for, both ways, and ``share``
    the least part of a block's work that is. ``area`` is the sum of what each block holds
    times the ns until it may give it back. ``alone_bytes`` is what one block needs by itself at most. Of what is all
    computed again, some blocks may keep theirs: no action then takes less than the part ``eased`` of its time.
    """

    sums_ns: Array
    most_ns: float
    plain_ns: float
    way_ns: float
    share: float
    static_bytes: float
    gradient_bytes: int
    activation_bytes: float
    workspace_bytes: float
    alone_bytes: float
    area: float
    eased: float

    @classmethod
    def of(cls, request: Request, blocks: _Blocks, pricing: Pricing) -> _Sums | None:
        """None where a block has no such costs."""
        try:
            costs = blocks.costs(pricing)
        except UsageError:
            return None
        splits = request.split_backward is not False and can_split(request.profile)
        work, way = ([of(cost, splits) for cost in checked(costs)] for of in (_work_ns, _way_ns))
        if request.num_parted != 0 and pricing.samples % 2 == 0:  # forwards may run in halves
            with suppress(UsageError):
                halves = blocks.costs(pricing._replace(samples=pricing.samples // 2))
                work = [min(ns, 2 * _work_ns(half, splits)) for ns, half in checked(zip(work, halves, strict=True))]
                way = [min(ns, _way_ns(half, splits)) for ns, half in checked(zip(way, halves, strict=True))]
        tied = Counter(chain.from_iterable(cost.tied for cost in costs))
        again = sum((each.state * (count - 1) for each, count in tied.items()), MemoryBytes())
        apart = not blocks.shares_tensors
        return cls(
            sums_ns=np.array([0, *accumulate(work)], dtype=np.int64),
            most_ns=max(work),
            plain_ns=sum(cost.compute_ns for cost in checked(costs)),
            way_ns=sum(way) if blocks.chained else max(way),
            share=min((own / ns for own, ns in zip(way, work, strict=True) if ns), default=0.0) * blocks.chained,
            static_bytes=sum(cost.static_bytes for cost in checked(costs)) - again.total,
            gradient_bytes=sum(cost.gradient_bytes for cost in checked(costs)) - again[GRADIENTS],
            activation_bytes=apart * sum(cost.activation_bytes for cost in costs),
            workspace_bytes=max(cost.workspace_bytes for cost in costs),
            alone_bytes=max(cost.memory_bytes(1) for cost in checked(costs)),
            area=_area(costs) if apart and blocks.chained else 0.0,
            eased=_eased(costs, blocks.costs(pricing._replace(recompute=request.recompute or False))),
        )


def _eased(costs: Sequence[StageCost], kept: Sequence[StageCost]) -> float:
    """What part of its time any action takes at least where blocks may be ``kept``."""
    return min(
        (
            own / again
            for cost, other in checked(zip(costs, kept, strict=True))
            for again, own in (
                (cost.forward_ns, other.forward_ns),
                (cost.backward_ns, other.backward_ns),
                (cost.input_grad_ns or 0, other.input_grad_ns or 0),
                (cost.weight_grad_ns or 0, other.weight_grad_ns or 0),
            )
            if again
        ),
        default=1.0,
    )


def _work_ns(cost: StageCost, splits: bool) -> int:
    """Least ns of a forward and its backward, which may be split."""
    return cost.forward_ns + min(_backwards(cost, splits, whole=True))


def _way_ns(cost: StageCost, splits: bool) -> int:
    """Least ns of a stage's first forward, and of what is left there after a later stage's last action."""
    apart = splits and cost.input_grad_ns is not None
    return cost.forward_ns + (0 if apart else cost.backward_ns)  # a weight gradient has nothing after it


def _backwards(cost: StageCost, splits: bool, *, whole: bool) -> Iterator[int]:
    yield cost.backward_ns
    if splits and cost.input_grad_ns is not None and cost.weight_grad_ns is not None:
        yield cost.input_grad_ns + (cost.weight_grad_ns if whole else 0)


def _area(costs: Sequence[StageCost]) -> float:
    """What blocks hold from forward to (input) gradient, times all that runs between."""
    after, area = 0, 0.0
    for cost in checked(reversed(costs)):
        after += cost.forward_ns + min(_backwards(cost, splits=True, whole=False))
        area += max(0, cost.activation_bytes - cost.weight_grad_bytes) * after
    return area


def longest_stages(sums: Sequence[Array], most: int) -> Array:
    """[chain, stages - 1] ns that the longest stage of no cut is below, for chains with these running sums.

    Of 1 to ``most`` stages, all at once: whether stages that take as much as they may reach the end. What they may take
    is between an even share and that with the longest block, and is halved so often that what is left is some
    thousandths of a block. Where that is much, only every so-many-th number of stages is looked at: fewer stages are no
    shorter than those.
    """
    count = len(sums[0])
    apart = 1 + max(int(each[-1]) for each in sums)  # chain after chain, so that one look-up is for all
    line = np.concatenate([each + 2 * apart * number for number, each in enumerate(sums)])
    step = -(-len(sums) * most * most // _MOST_LOOK_UPS)
    stages = np.arange(step, most + step, step)
    firsts = np.repeat(np.arange(len(sums)) * count, len(stages)).reshape(len(sums), len(stages))
    whole = np.array([each[-1] for each in sums])[:, None]
    blocks = np.array([np.diff(each).max() for each in sums])[:, None]
    low, high = np.maximum(-(-whole // stages), blocks), -(-whole // stages) + blocks
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        at = firsts.copy()
        for stage in checked(range(int(stages[-1])), 16):
            own = slice(stage // step, None)  # those of more stages
            at[:, own] = np.searchsorted(line, line[at[:, own]] + middle[:, own], side="right") - 1
        reached = at == firsts + count - 1
        high, low = np.where(reached, middle, high), np.where(reached, low, middle + 1)
    every = np.arange(1, most + 1)
    found: Array = np.maximum(np.maximum(-(-whole // every), blocks), low[:, (every - 1) // step])
    return found


_MOST_LOOK_UPS = 2**20
"""Of each halving: as many take some hundredths of a second."""

_HALVINGS = 12

_SLACK = 1 - 1e-9
"""Floats are off by less than this."""


@dataclass(frozen=True, slots=True)
class _BoundTable:
    """[choice] ns at least and usually, bytes usually, whether that fits, and whether anything can.

    With m micro-batches on p positions, work S and way A (as in :class:`_Sums`) of a micro-batch, and the share a <= 1
    of a stage's work that is on the way:

    * positions work all the time, and the longest block's does it all: m S / p, m max (m / 2 on two routes); the
      longest of p stages, where each has one, is no shorter than that of the evenest cut;
    * one stage per device: stage k has waited for the ways before it when it begins, or others have when it ends. Of
      work w_k it is at least ``sum of a w_i before k + m w_k``; cuts that make the most of these the least have all of
      them equal, so it is ``a S / (1 - (1 - a / m)^p)``;
    * Little's law: what is held, times how long, fits into what all devices have beside their state.
    """

    least: FloatArray
    usual: FloatArray
    needs: FloatArray
    fits: NDArray[np.bool_]
    possible: NDArray[np.bool_]

    @classmethod
    def of(cls, request: Request, choices: Sequence[Choice], sums: Sequence[_Sums]) -> _BoundTable:
        """Of these choices, each with the sums of its costs."""

        def column(values: Iterator[float]) -> FloatArray:
            return np.fromiter(checked(values, 1024), dtype=np.float64, count=len(choices))

        def summed(name: str) -> FloatArray:
            return column(getattr(each, name) for each in sums)

        known = [STRATEGIES[each.strategy] for each in choices]
        p, m = column(each.positions or 1 for each in choices), column(x.batch.num_microbatches for x in choices)
        per_position = column(chunks_of(request, each) for each in known)
        routes = column(1 + each.two_ways for each in known)
        way, static = summed("way_ns"), summed("static_bytes")
        work = column(each.sums_ns[-1] for each in sums)
        held, most, workspace = summed("activation_bytes"), summed("most_ns"), summed("workspace_bytes")
        limits = [limit for limit in request.memory if limit is not None]
        limit = float(max(limits)) if len(limits) == len(request.memory) else math.inf

        alike = {id(each): (row, each) for row, each in enumerate({id(each): each for each in sums}.values())}
        longest = longest_stages([each.sums_ns for _, each in alike.values()], int((p * per_position).max()))
        rows = np.array([alike[id(each)][0] for each in sums])
        evenest = longest[rows, (p * per_position).astype(np.int64) - 1].astype(np.float64)
        one_each = (per_position == 1) & (routes == 1)

        least = np.maximum(np.maximum(m * work / p, m * most / routes), way)
        least = np.maximum(least, np.where(one_each, m * evenest, 0.0))
        share = np.minimum(1.0, summed("share"))
        waits = one_each & (share > 0)
        safe = np.where(waits, share, 1.0)
        waited = safe * work / -np.expm1(p * np.log1p(-np.minimum(safe / m, 1 - 1e-12)))
        least = np.maximum(least, np.where(waits, waited, 0.0))
        room = p * limit - static
        least = np.maximum(least, m * summed("area") / np.maximum(room, 1.0))

        busiest = np.maximum(per_position * evenest, work / p)
        flight = np.minimum(m, p * (1 + (per_position > 1) * (p - 1) / (p * per_position)))
        needs = routes * static / p + flight * held / p + workspace
        sums_ns = column(_sum_ns(request, each, own) for each, own in zip(choices, sums, strict=True))
        ramps = np.maximum(0.0, summed("plain_ns") - busiest) / (per_position * routes)
        usual = np.maximum(m * busiest + ramps, least) + sums_ns
        return cls(
            least=np.maximum(1.0, np.floor(least * summed("eased") * _SLACK)),
            usual=usual,
            needs=needs,
            fits=needs <= limit,
            possible=(static + held <= p * limit) & (summed("alone_bytes") <= limit),
        )


def chunks_of(request: Request, strategy: PlacementStrategy) -> int:
    """How many stages a strategy has on each position, on each route."""
    return (request.chunks or 2) if strategy.chunked else 1


def _sum_ns(request: Request, choice: Choice, sums: _Sums) -> int:
    """Ns of summing the gradients of an even stage over its replicas."""
    if choice.replicas == 1 or request.cluster is None:
        return 0
    peers = range(0, choice.replicas * choice.shards, choice.shards)
    return all_reduce_time(request.cluster, peers, sums.gradient_bytes // (choice.positions or 1))
