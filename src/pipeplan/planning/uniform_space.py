"""Every uniform layout of a chain as one table, with closed forms of its time and memory: a thousand in 30 to 45 ms.

A layout is uniform where all stages have as many shards and replicas, and one micro-batch size. Here: how long an
iteration of each takes at least, wherever the chain is cut and whatever the schedule; how long it usually takes, by
which layouts are tried best first; which cannot fit. What is alike of many rows is looked at once. Not here: cuts and
schedules, which the best of them get.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs import StageCost, can_split, transfer_time
from pipeplan.costs.after import AfterActions, least_steps_ns
from pipeplan.costs.blocks import places_divided
from pipeplan.costs.columns import Columns
from pipeplan.costs.held_once import bytes_into, loose_edges
from pipeplan.costs.recipes import state_of
from pipeplan.costs.stages import require_apart
from pipeplan.costs.states import States
from pipeplan.costs.zero import IN_ACTIONS, TOGETHER, WHOLE, Exchanging, Experts, Zero, cuts
from pipeplan.errors import UsageError
from pipeplan.files import Edge, Profile
from pipeplan.partition.chain.costs import Array, FloatArray
from pipeplan.partition.problem import Pricing
from pipeplan.partition.recomputation import Kind, Option, kept_whole, savings, undominated
from pipeplan.partition.strategies import STRATEGIES
from pipeplan.planning.request import Batch, Request, first_layers_open
from pipeplan.planning.usual import Counts, Numbers, Usual, usual_of
from pipeplan.schedule.longer import ShorterRun
from pipeplan.search_constants import HALVINGS, MOST_LOOK_UPS, MOST_POSITIONS, ROOMY, ROWS_AT_ONCE, SLACK
from pipeplan.time_limit import checked, checkpoint
from pipeplan.workload.elements import Again, ContextExchange
from pipeplan.workload.kinds import GRADIENTS, STATE_KINDS, MemoryBytes


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy for chains and everything it leaves open.

    ``shards`` devices split each block, and ``context`` such groups each sequence. Each position has ``chunks`` stages
    on each route where the strategy takes a number, by default two. ``positions`` are how many groups of them
    and their replicas there are, by default as many as there are devices for; ``batch`` is of all replicas together,
    which divide what they keep by ``zero``. Of the ``levels`` of recomputation each block has the one that costs least
    while the ``usual`` schedule fits; without any, all blocks have ``recompute``. ``backwards``: the first position is
    on the last devices, and so on. Groups that share sequences ``exchange`` keys and values so; None: as the profile
    has it.
    """

    strategy: str
    replicas: int
    batch: Batch
    recompute: Again
    spread: bool
    shards: int = 1
    positions: int | None = None
    zero: Zero = WHOLE
    levels: tuple[Again, ...] = ()
    usual: Usual | None = None
    chunks: int | None = None
    context: int = 1
    expert: int = 1
    expert_shards: int = 1
    backwards: bool = False
    exchange: ContextExchange | None = None

    @property
    def width(self) -> int:
        """Devices of a replica at each position."""
        return self.shards * self.context

    @property
    def copies(self) -> int:
        """How many times parameters are there: every replica has them once for each part of a sequence."""
        return self.replicas * self.context

    @property
    def layout(self) -> tuple[object, ...]:
        """All but its strategy, its schedule, and what is recomputed for that."""
        splits = self.shards, self.context, self.exchange, self.expert, self.expert_shards
        return self.replicas, self.positions, self.batch, self.zero, self.backwards, *splits

    @property
    def per_position(self) -> int:
        """How many stages each position has, on each route."""
        return (self.chunks or 2) if STRATEGIES[self.strategy].chunked else 1

    @property
    def actions_looked_at(self) -> int:
        """About how many actions a look at it schedules: of a very long run those of a shorter one."""
        positions, every = self.positions or 1, self.batch.num_microbatches
        each = 3 * positions * self.per_position * (1 + STRATEGIES[self.strategy].two_ways)
        shorter = max(ShorterRun.tasks // each, 2 * positions)
        return each * (shorter if each * every > ShorterRun.most and 2 * shorter <= every else every)

    @property
    def pricing(self) -> Pricing:
        """What a device's costs are for."""
        samples = self.batch.microbatch_size // self.replicas
        among = self.expert, self.shards, self.copies, self.zero.level, self.zero.group
        experts = Experts.among(*among, split=self.expert_shards)
        own = samples, self.recompute, self.shards, self.zero, self.context, experts
        return Pricing(*own, exchange=self.exchange)


class UsualParts(NamedTuple):
    """What of a usual iteration goes where, in ns; waiting is what is left of it.

    ``work`` is what an average position runs once, ``recomputed`` what it runs again, ``uneven`` what the longest has
    more, ``exchanged`` what its replicas exchange in its actions, and ``ending`` what follows them.
    """

    work: float
    recomputed: float
    uneven: float
    exchanged: float
    ending: float


@dataclass(frozen=True, slots=True)
class BoundedChoice:
    """A choice, ns that no iteration of it is below, and what its usual schedule takes on an even cut: ns, bytes.

    With bytes those of the fullest device where nothing is recomputed that need not be by the choice; ``least_bytes``
    where all is that may be, and of no less than the largest block. ``parts`` are of ``usual_ns``.
    """

    choice: Choice
    least_ns: int
    usual_ns: float
    usual_bytes: float
    least_bytes: float
    parts: UsualParts


def best_first(request: Request, choices: Sequence[Choice], blocks: Blocks) -> list[BoundedChoice]:
    """Those that may fit, each with a usual schedule: first what fits with that, by how long an iteration then takes.

    Each says its positions. Where blocks may be recomputed there is one for each schedule that asks for another choice
    of them; else a choice is there once, with the best of its schedules.
    """
    splits = request.split_backward is not False and can_split(request.profile)
    alike = _Alike.of(choices)
    each_key = [(one.pricing, one.levels) for one in checked(alike.firsts)]
    keys = dict.fromkeys(each_key)
    whole = {
        key: _Sums.of(request, blocks, *key)
        for key in checked(dict.fromkeys((_undivided(pricing), levels) for pricing, levels in keys), 1)
    }
    kept = {
        key: blocks.kept(*key)
        for key in checked(dict.fromkeys(map(_dividing, (pricing for pricing, _ in keys))), 1)
        if key[1] != WHOLE
    }
    sums = {
        (pricing, levels): own
        if (own := whole[_undivided(pricing), levels]) is None or pricing.zero == WHOLE
        else own.shared(kept[_dividing(pricing)])
        for pricing, levels in checked(keys, 1)
    }
    alike = alike.having([sums[key] is not None for key in each_key])
    if not alike.choices:
        return []
    usual = [usual_of(each.strategy, each.per_position, splits, request.scheduler) for each in alike.kinds]
    own_sums = [own for key in each_key if (own := sums[key]) is not None]
    pricings = [key[0] for key in each_key if sums[key] is not None]
    table = _BoundTable.of(request, blocks, alike, usual, own_sums)
    order = np.lexsort((table.usual, alike.fewer(pricings)[table.choice], ~table.fits))
    found = order[(table.possible & ~table.beaten(alike, request))[order]]
    # where nothing is recomputed, a choice as it is with the better of its schedules
    wanted = table.again[found]
    plain = np.flatnonzero(~wanted)
    wanted[plain[np.unique(table.choice[found[plain]], return_index=True)[1]]] = True
    return table.rows(found[wanted], alike.choices, [usual[kind] for kind in alike.kind.tolist()])


def _undivided(pricing: Pricing) -> Pricing:
    """The same where copies divide nothing."""
    return pricing._replace(zero=WHOLE, experts=pricing.experts._replace(zero=WHOLE))


def _dividing(pricing: Pricing) -> tuple[int, Zero, Experts]:
    """What the state on a device depends on."""
    return pricing.shards, pricing.zero, pricing.experts


_COSTED = attrgetter(
    *("replicas", "batch", "recompute", "spread", "shards", "zero", "levels", "usual"),
    *("context", "expert", "expert_shards", "exchange"),
)
"""All of a choice but its strategy, and how many stages and positions it has in which direction."""

_BEFORE = attrgetter("strategy", "replicas", "batch", "recompute", "spread", "shards", "positions", "zero", "levels")
_AFTER = attrgetter("chunks", "context", "expert", "expert_shards", "backwards", "exchange")
"""What of a choice comes before its schedule, and after it."""


@dataclass(frozen=True, slots=True)
class _Alike:
    """Choices, and what is alike of them, to be looked at once.

    ``firsts`` are one choice of each layout, all of which has the same costs; ``kinds`` one of each strategy with as
    many stages on a position. [choice] the number of its ``layout`` and of its ``kind``, its ``positions``, 0 where it
    does not say how many, and whether they go ``backwards``.
    """

    choices: Sequence[Choice]
    firsts: Sequence[Choice]
    kinds: Sequence[Choice]
    layout: NDArray[np.int64]
    kind: NDArray[np.int64]
    positions: NDArray[np.int64]
    backwards: NDArray[np.int64]

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> _Alike:
        """Of these choices."""
        layouts, kinds = dict[tuple[int, ...], int](), dict[tuple[str, int | None], int]()
        firsts, ones, table = list[Choice](), list[Choice](), list[tuple[int, int, int, bool]]()
        for choice in checked(choices):
            known = tuple(map(id, _COSTED(choice)))  # what is equal, but not the same, is looked at more than once
            layout = layouts.setdefault(known, len(firsts))
            if layout == len(firsts):
                firsts.append(choice)
            kind = kinds.setdefault((choice.strategy, choice.chunks), len(ones))
            if kind == len(ones):
                ones.append(choice)
            table.append((layout, kind, choice.positions or 0, choice.backwards))
        layout_of, kind_of, positions, backwards = np.array(table, dtype=np.int64).reshape(-1, 4).T.copy()
        return cls(choices, firsts, ones, layout_of, kind_of, positions, backwards)

    def having(self, wanted: Sequence[bool]) -> _Alike:
        """Those whose layouts are wanted."""
        if all(wanted):
            return self
        able = np.array(wanted, dtype=np.bool_)
        own = np.flatnonzero(able[self.layout])
        return _Alike(
            [self.choices[place] for place in own.tolist()],
            [first for first, one in zip(self.firsts, wanted, strict=True) if one],
            self.kinds,
            (np.cumsum(able) - 1)[self.layout[own]],
            self.kind[own],
            self.positions[own],
            self.backwards[own],
        )

    def code(self, layouts: NDArray[np.int64], *, positions: bool = True) -> NDArray[np.int64]:
        """[choice] a number of its own for each kind, direction and, maybe, number of positions of these layouts."""
        code = 2 * (layouts[self.layout] * len(self.kinds) + self.kind) + self.backwards
        return code * (1 + self.positions.max()) + self.positions if positions else code

    def fewer(self, pricings: Sequence[Pricing]) -> NDArray[np.bool_]:
        """[choice] whether the same with more positions is another of them, by the pricings [layout].

        That is seldom longer, and looked at first.
        """
        likes = _numbers(
            (pricing, each.replicas, each.batch, each.levels)
            for pricing, each in zip(pricings, self.firsts, strict=True)
        )
        _, like = np.unique(self.code(likes, positions=False), return_inverse=True)
        most = np.zeros(len(like), dtype=np.int64)
        np.maximum.at(most, like, self.positions)
        found: NDArray[np.bool_] = self.positions < most[like]
        return found

    def exchanging(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Choices that exchange keys and values as the profile has it, and those that differ from these in that."""
        other = np.array([each.exchange is not None for each in self.firsts])[self.layout]
        code = self.code(_numbers(_COSTED(each)[:-1] for each in self.firsts))
        plain, others = np.flatnonzero(~other), np.flatnonzero(other)[::-1]  # the last of those that are equal
        codes, first = np.unique(code[others], return_index=True)
        at = np.searchsorted(codes, code[plain])
        there = np.append(codes, -1)[at] == code[plain]
        return plain[there], others[first[at[there]]]


def _numbers(things: Iterable[Hashable]) -> NDArray[np.int64]:
    """[thing] a number that those have which are equal to it."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(each, len(known)) for each in checked(things)], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A profile's blocks in the order that is cut, those that cost the same as one: ``kinds`` [block] of ``each``.

    ``chained``: each waits for the one before it, and that for its gradient.
    """

    profile: Profile
    each: tuple[str, ...]
    kinds: tuple[int, ...]
    chained: bool
    states: States
    _known: dict[Pricing, Columns] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, profile: Profile) -> Blocks:
        """Of a profile."""
        tied = {block for each in profile.tied for block in each.blocks}
        order, alike, into = profile.topological_order(), profile.alike, profile.edges_into
        loose = loose_edges(profile)
        numbers: dict[tuple[object, ...], int] = {}
        found, each = [], list[str]()
        for name in checked(order, 16):
            fed = _fed(into.get(name, ())), _fed(loose.get(name, ()))
            like = alike[name], *fed, name if name in tied else ""
            if like not in numbers:
                numbers[like] = len(each)
                each.append(name)
            found.append(numbers[like])
        pairs = {(edge.source, edge.target) for edge in profile.edges if edge.gradient}
        return cls(
            profile,
            tuple(each),
            tuple(found),
            all(pair in pairs for pair in pairwise(order)),
            States.of([profile.by_id[name] for name in each], profile.recipe),
        )

    def costs(self, pricing: Pricing) -> list[StageCost]:
        """[block] as a stage of its own. Raises UsageError where one has no such costs."""
        of_kinds = pricing.costs(self.profile, self.each)
        return list(map(of_kinds.__getitem__, self.kinds))

    def columns(self, pricing: Pricing) -> Columns:
        """[kind], in the order of ``each``, what a block of it costs by itself. Raises UsageError as above."""
        if pricing not in self._known:
            self._known[pricing] = pricing.columns(self.profile, self.each)
        return self._known[pricing]

    def loose_bytes(self, pricing: Pricing) -> Array:
        """[kind] bytes that a block of it counts, and that a stage of several need not hold because of it."""
        loose, case = loose_edges(self.profile), (pricing.samples, pricing.shards, pricing.context)
        found = (bytes_into(self.profile.by_id[name], loose.get(name, ()), *case) for name in self.each)
        return np.fromiter(found, dtype=np.int64, count=len(self.each))

    @property
    def counts(self) -> Array:
        """[kind] how many blocks are of it."""
        return np.bincount(self.kinds, minlength=len(self.each))

    def least_bytes(self, pricing: Pricing, positions: int) -> float:
        """Bytes that the fullest of so many positions holds at least, with one micro-batch, wherever blocks are cut.

        One of them has the largest block, and together they have all. Raises UsageError as above.
        """
        costs = self.columns(pricing)
        held = costs.state.sum(axis=1) + np.maximum(0, costs.activation_bytes - self.loose_bytes(pricing))
        every = int(np.dot(self.counts, held)) - self.counted_again(pricing.shards, pricing.zero).total
        return max(int((held + costs.workspace_bytes).max()), every / positions)

    def exchanged_ns(self, pricing: Pricing, exchanging: Exchanging) -> int:
        """Ns of what copies exchange of all blocks with each micro-batch."""
        exchanged = self.states.exchanged(pricing.shards, pricing.zero, pricing.experts)
        gather, reduce = exchanged.times(exchanging)
        return int(np.dot(2 * gather + reduce, np.bincount(self.kinds)))

    def kept(self, shards: int, zero: Zero, experts: Experts) -> KeptBytes:
        """[block] what each keeps alone. Raises UsageError where one shares what it would gather."""
        if zero.level >= IN_ACTIONS:
            require_apart(self.profile, zero.level, set(self.each))
        kept = self.states.kept(shards, zero, experts)[list(self.kinds)]
        shared = self.counted_again(shards, zero)
        whole = self.states.exchanged(shards, zero, experts).workspace_bytes
        return KeptBytes(
            kept.sum(axis=1),
            int(kept.sum()) - shared.total,
            int(kept[:, STATE_KINDS.index(GRADIENTS)].sum()) - shared[GRADIENTS],
            int(whole.max()),
        )

    def counted_again(self, shards: int, zero: Zero) -> MemoryBytes:
        """What blocks each count of what they share, beyond the first time."""
        recipe = self.profile.recipe
        cut = cuts(recipe, zero, shards)
        again = (state_of(each, recipe) // cut * (len(each.blocks) - 1) for each in self.profile.tied)
        return sum(again, MemoryBytes())


def _fed(edges: Sequence[Edge]) -> tuple[tuple[int, bool, bool, int], ...]:
    """What a block's costs depend on of the edges into it: sizes, and which of them carry the same tensor."""
    firsts: dict[object, int] = {}
    return tuple(
        (
            edge.bytes_per_sample,
            edge.broadcast,
            edge.gradient,
            place if edge.tensor is None else firsts.setdefault((edge.source, edge.tensor), place),
        )
        for place, edge in enumerate(edges)
    )


class KeptBytes(NamedTuple):
    """Bytes [block] of state, of all, of all gradients; and of what is there whole while a block runs, at most."""

    each: NDArray[np.int64]
    static_bytes: int
    gradient_bytes: int
    whole_bytes: int


@dataclass(frozen=True, slots=True)
class _Sums:
    """What all blocks come to on a device, of one micro-batch: ns and bytes.

    ``sums_ns`` [block + 1] are running sums of what they do, ``most_ns`` is that of the block that takes longest,
    ``compute_ns`` are whole actions, and ``forward_ns``, ``input_ns``, ``weight_ns`` what all take, the last two as
    near as costs tell them apart. ``way_ns`` is what a later stage waits for, both ways, and ``share`` the least part
    of a block's work that is. ``least_bytes`` of activations are held at least, ``alone_bytes`` is what one block needs
    by itself at most, and ``beside_bytes`` [block] what of that is not state. ``area`` is the sum of what each block
    holds at least times the ns until it may give it back. ``saved_bytes`` and ``again_ns`` are points of how long
    recomputation takes that saves so much. Of what is all computed again, some blocks may keep theirs: no action then
    takes less than the part ``eased`` of its time.
    """

    sums_ns: Array
    most_ns: float
    compute_ns: int
    forward_ns: float
    input_ns: float
    weight_ns: float
    way_ns: float
    share: float
    static_bytes: float
    gradient_bytes: int
    activation_bytes: float
    least_bytes: float
    weight_grad_bytes: float
    workspace_bytes: float
    beside_bytes: NDArray[np.int64]
    alone_bytes: float
    area: float
    saved_bytes: FloatArray
    again_ns: FloatArray
    eased: float

    @classmethod
    def of(cls, request: Request, blocks: Blocks, pricing: Pricing, levels: Sequence[Again] = ()) -> _Sums | None:
        """None where a block has no such costs."""
        try:
            costs = blocks.columns(pricing)
            ways = [(each, blocks.columns(pricing._replace(recompute=each))) for each in levels]
        except UsageError:
            return None
        splits = request.split_backward is not False and can_split(request.profile)
        work, way = _work_ns(costs, splits=splits), _way_ns(costs, splits=splits)
        if request.num_parted != 0 and pricing.samples % 2 == 0:  # forwards may run in halves
            with suppress(UsageError):
                halves = blocks.columns(pricing._replace(samples=pricing.samples // 2))
                work = np.minimum(work, 2 * _work_ns(halves, splits=splits))
                way = np.minimum(way, _way_ns(halves, splits=splits))
        checkpoint()
        counts, kinds = blocks.counts, np.array(blocks.kinds)

        def total(values: Array) -> int:
            return int(np.dot(counts, values))

        shared = blocks.counted_again(pricing.shards, pricing.zero)
        each_way = [own for _, own in ways] or [costs]
        loose = blocks.loose_bytes(pricing)
        held = np.maximum(0, costs.activation_bytes - loose)
        least = np.minimum.reduce([np.maximum(0, each.activation_bytes - loose) for each in each_way])
        beside = np.minimum.reduce(
            [np.maximum(0, each.activation_bytes - loose) + each.workspace_bytes for each in each_way]
        )
        widest = each_way if len(ways) > 1 else [costs]
        saved, longer = savings(_choices_of(request.profile, blocks, ways))
        weight = total(np.where(costs.split, costs.weight_grad_ns, 0))
        worked = work > 0
        return cls(
            sums_ns=np.concatenate(([0], np.cumsum(work[kinds]))),
            most_ns=int(work.max()),
            compute_ns=total(costs.forward_ns + costs.backward_ns),
            forward_ns=total(costs.forward_ns),
            input_ns=total(costs.backward_ns) - weight,
            weight_ns=weight,
            way_ns=total(way) if blocks.chained else int(way.max()),
            share=float((way[worked] / work[worked]).min()) if blocks.chained and worked.any() else 0.0,
            static_bytes=total(costs.state.sum(axis=1)) - shared.total,
            gradient_bytes=total(costs.state[:, STATE_KINDS.index(GRADIENTS)]) - shared[GRADIENTS],
            activation_bytes=total(held),
            least_bytes=total(least),
            weight_grad_bytes=total(costs.weight_grad_bytes),
            workspace_bytes=max(int(each.workspace_bytes.max()) for each in widest),
            beside_bytes=beside[kinds],
            alone_bytes=int((costs.state.sum(axis=1) + beside).max()),
            area=_area(costs, least, kinds) if blocks.chained else 0.0,
            saved_bytes=saved,
            again_ns=longer,
            eased=_eased(costs, blocks.columns(pricing._replace(recompute=request.recompute or False))),
        )

    def shared(self, kept: KeptBytes) -> _Sums:
        """The same where replicas divide what they keep."""
        return replace(
            self,
            static_bytes=kept.static_bytes,
            gradient_bytes=kept.gradient_bytes,
            alone_bytes=int((kept.each + self.beside_bytes).max()),
            workspace_bytes=self.workspace_bytes + kept.whole_bytes,
        )


def _choices_of(profile: Profile, blocks: Blocks, ways: Sequence[tuple[Again, Columns]]) -> Counter[Kind]:
    """How many blocks have which choices of what they compute again; those at a model's ends have none."""
    number = dict(zip(profile.topological_order(), blocks.kinds, strict=True))
    ends = {number[block] for block in kept_whole(profile)}
    figures = [(own.forward_ns + own.backward_ns, own.activation_bytes, own.workspace_bytes) for _, own in ways]
    columns = [list(map(tuple, np.column_stack(each).tolist())) for each in figures]
    alike = Counter[tuple[bool, tuple[tuple[int, int, int], ...]]]()
    for kind, (count, *each_way) in enumerate(zip(blocks.counts.tolist(), *columns, strict=True) if ways else ()):
        alike[kind in ends, tuple(each_way)] += count
    found = Counter[Kind]()
    for (whole, each), count in checked(alike.items()):
        options = [Option(*own, again) for (again, _), own in zip(ways, each, strict=True) if not (again and whole)]
        found[undominated(options)] += count
    return found


def _eased(costs: Columns, kept: Columns) -> float:
    """What part of its time any action takes at least where blocks may be ``kept``."""
    least = math.inf
    for name in ("forward_ns", "backward_ns", "input_grad_ns", "weight_grad_ns"):
        again, own = getattr(costs, name), getattr(kept, name)
        if name in ("input_grad_ns", "weight_grad_ns"):
            again, own = np.where(costs.split, again, 0), np.where(kept.split, own, 0)
        there = again > 0
        least = min(least, float((own[there] / again[there]).min(initial=math.inf)))
    return least if least < math.inf else 1.0


def _work_ns(costs: Columns, *, splits: bool) -> Array:
    """[kind] least ns of a forward and its backward, which may be split."""
    return costs.forward_ns + _backward_ns(costs, costs.input_grad_ns + costs.weight_grad_ns, splits=splits)


def _way_ns(costs: Columns, *, splits: bool) -> Array:
    """[kind] least ns of a stage's first forward, and of what is left there after a later stage's last action."""
    return costs.forward_ns + np.where(costs.split & splits, 0, costs.backward_ns)  # nothing is after a weight gradient


def _backward_ns(costs: Columns, halves: Array, *, splits: bool) -> Array:
    """[kind] the less of a whole backward and of a split one's ``halves``."""
    return np.where(costs.split & splits, np.minimum(costs.backward_ns, halves), costs.backward_ns)


def _area(costs: Columns, held: Array, kinds: Array) -> float:
    """What blocks hold at least from forward to (input) gradient, times all that runs between."""
    times = costs.forward_ns + _backward_ns(costs, costs.input_grad_ns, splits=True)
    after = np.cumsum(times[kinds][::-1])
    kept = np.maximum(0, held - costs.weight_grad_bytes)[kinds][::-1]
    return float(np.dot(kept.astype(np.float64), after.astype(np.float64)))


def longest_stages(sums: Sequence[Array], most: int, wanted: Array | None = None) -> Array:
    """[chain, stages - 1] ns that the longest stage of no cut is below, for chains with these running sums.

    Of 1 to ``most`` stages, all at once: whether stages that take as much as they may reach the end. What they may take
    is between an even share and that with the longest block, and is halved so often that what is left is some
    thousandths of a block. Where that is much, only every so-many-th number of stages is looked at: fewer stages are no
    shorter than those. Of numbers of stages that are not among those ``wanted`` bounds are lower than they might be.
    """
    count = len(sums[0])
    apart = 1 + max(int(each[-1]) for each in sums)  # chain after chain, so that one look-up is for all
    line = np.concatenate([each + 2 * apart * number for number, each in enumerate(sums)])
    step = -(-len(sums) * most * most // MOST_LOOK_UPS)
    every = np.arange(1, most + 1)
    looked = np.unique(((every if wanted is None else wanted) - 1) // step)
    stages = step * (looked + 1)
    more = np.searchsorted(stages, np.arange(stages[-1]), side="right").tolist()  # [stage] where those of more begin
    firsts = np.repeat(np.arange(len(sums)) * count, len(stages)).reshape(len(sums), len(stages))
    whole = np.array([each[-1] for each in sums])[:, None]
    blocks = np.array([np.diff(each).max() for each in sums])[:, None]
    low, high = np.maximum(-(-whole // stages), blocks), -(-whole // stages) + blocks
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        at = firsts.copy()
        for first in checked(more, 16):
            own = slice(first, None)
            at[:, own] = np.searchsorted(line, line[at[:, own]] + middle[:, own], side="right") - 1
        reached = at == firsts + count - 1
        high, low = np.where(reached, middle, high), np.where(reached, low, middle + 1)
    lows = np.zeros((len(sums), most), dtype=low.dtype)
    lows[:, looked] = low
    found: Array = np.maximum(np.maximum(-(-whole // every), blocks), lows[:, (every - 1) // step])
    return found


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

    Of devices of different speeds the fastest are as many as p positions need, and each of these is no faster than its
    devices are together; whatever one stage takes, it takes at the highest speed.
    """

    least: FloatArray
    usual: FloatArray
    parts: FloatArray
    needs: FloatArray
    smallest: FloatArray
    fits: NDArray[np.bool_]
    again: NDArray[np.bool_]
    possible: NDArray[np.bool_]
    choice: NDArray[np.int64]
    number: NDArray[np.int64]

    @classmethod
    def of(
        cls, request: Request, blocks: Blocks, alike: _Alike, usual: Sequence[Sequence[Usual]], sums: Sequence[_Sums]
    ) -> _BoundTable:
        """Of these choices, with the ``usual`` schedules [kind] and the sums of their costs [layout].

        A row each for every schedule of a choice: the ``number`` of that among those of the kind.
        """
        counts = np.array([len(each) for each in usual], dtype=np.int64)[alike.kind]
        choice = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(choice)) - (np.cumsum(counts) - counts)[choice]
        layout, kind = alike.layout[choice], alike.kind[choice]
        schedules = [
            (each, own, one.per_position, 1 + STRATEGIES[one.strategy].two_ways)
            for place, one in enumerate(checked(alike.kinds, 1))
            for which, each in enumerate(usual[place])
            if len(own := np.flatnonzero((kind == place) & (number == which)))
        ]
        distinct = {id(each): each for each in sums}
        places = {key: place for place, key in enumerate(distinct)}
        rows = np.array([places[id(each)] for each in sums])[layout]

        def column(values: Iterator[float]) -> FloatArray:
            return np.fromiter(checked(values, 1024), dtype=np.float64)

        def summed(name: str) -> FloatArray:
            found: FloatArray = column(getattr(each, name) for each in distinct.values())[rows]
            return found

        def by(
            values: Callable[[Sequence[Choice], Sequence[_Sums]], Iterator[Any]], *columns: NDArray[np.int64]
        ) -> Any:
            """[row] values that are the same for all choices that are alike in these columns."""
            code = columns[0]
            for more in columns[1:]:
                code = code * (1 + more.max()) + more
            _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
            ones = [alike.choices[place] for place in first.tolist()]
            own = [sums[place] for place in alike.layout[first].tolist()]
            return np.array([*checked(values(ones, own), 1024)], dtype=np.float64)[inverse[choice]]

        p = np.maximum(1, alike.positions)[choice].astype(np.float64)
        m = column(each.batch.num_microbatches for each in alike.firsts)[layout]
        per_position = column(each.per_position for each in alike.kinds)[kind]
        routes = column(1 + STRATEGIES[each.strategy].two_ways for each in alike.kinds)[kind]
        devices = np.array([each.replicas * each.width for each in alike.firsts], dtype=np.int64)[alike.layout]
        devices_each = devices[choice].astype(np.float64)
        way, static = summed("way_ns"), summed("static_bytes")
        work = column(each.sums_ns[-1] for each in distinct.values())[rows]
        most = summed("most_ns")
        limits = [limit for limit in request.memory if limit is not None]
        limit = float(max(limits)) if len(limits) == len(request.memory) else math.inf

        lines = {id(each.sums_ns): each.sums_ns for each in distinct.values()}
        line = {key: place for place, key in enumerate(lines)}
        of_line = np.array([line[id(each.sums_ns)] for each in distinct.values()])[rows]
        wanted = np.unique(np.concatenate((p, p * per_position))).astype(np.int64)
        longest = longest_stages(list(lines.values()), int(wanted[-1]), wanted)
        evenest = longest[of_line, (p * per_position).astype(np.int64) - 1].astype(np.float64)
        one_each = (per_position == 1) & (routes == 1)
        fastest = max(request.speeds)
        together = _together(request.speeds, p, devices_each)

        least = np.maximum(np.maximum(m * work / together, m * most / routes / fastest), way / fastest)
        least = np.maximum(least, np.where(one_each, m * evenest / fastest, 0.0))
        share = np.minimum(1.0, summed("share"))
        waits = one_each & (share > 0)
        safe = np.where(waits, share, 1.0)
        waited = safe * work / -np.expm1(p * np.log1p(-np.minimum(safe / m, 1 - 1e-12)))
        least = np.maximum(least, np.where(waits, waited / fastest, 0.0))
        room = p * limit - static
        least = np.maximum(least, m * summed("area") / fastest / np.maximum(room, 1.0))

        held, smallest, again = _fitted(request, schedules, p, m, rows, list(distinct.values()), limit)
        # positions, each by its speed
        working = by(lambda ones, _: _working(request, ones), devices, alike.positions, alike.backwards)
        forward, inputs, weights = (summed(name) / working for name in ("forward_ns", "input_ns", "weight_ns"))
        ramps = np.zeros(len(choice))
        for known_schedule, own, chunks, _ in schedules:
            ramps[own] = known_schedule.bubble(forward[own], inputs[own], weights[own], chunks)
        even = work / working  # of several stages on a position, some are longer and others shorter than that
        uneven = np.maximum(0.0, longest[of_line, p.astype(np.int64) - 1] * (p / working) - even) / per_position
        by_line = np.array([line[id(each.sums_ns)] for each in sums])[alike.layout]
        turns = by(lambda ones, own: _paced(ones, [each.sums_ns for each in own]), by_line, alike.kind, alike.positions)
        paced = turns * (p / working)
        exchanged = by(lambda ones, own: _exchanged_ns(request, blocks, ones, own), alike.layout)
        longest_ns = even + uneven
        longest_ns += np.maximum(0.0, paced - longest_ns) * (1 - 1 / p)
        busiest = longest_ns + (again * (p / working) + exchanged) / p
        sums_ns, rest_ns = by(lambda ones, own: _after_ns(request, ones, own), alike.layout, alike.positions).T
        beside = (per_position - 1) * np.minimum(sums_ns, p * (inputs + weights)) / per_position
        after_ns = sums_ns - np.where(paced > 0, beside, 0.0) + rest_ns
        stepped = least_steps_ns(request.profile) / (p * devices_each)
        hop = by(lambda ones, _: _hops_ns(request, ones), alike.layout)
        hops = 2 * (p * per_position - 1) * hop  # of the first and the last micro-batch
        usual_ns = np.maximum(m * busiest + (p - 1) * np.maximum(0.0, ramps) + hops, least) + after_ns
        eased = summed("eased")
        stepped *= p / together  # all parameters are stepped once
        least = np.maximum(least * eased, m * work / together * eased + stepped)
        return cls(
            least=np.maximum(1.0, np.floor(least * SLACK)),
            usual=np.where(np.isfinite(again), usual_ns, m * busiest.clip(max=1e18)),
            parts=np.stack(
                (m * even, m * again / working, m * (longest_ns - even), m * exchanged / p, after_ns), axis=1
            ),
            needs=held,
            smallest=np.maximum(smallest, summed("alone_bytes")),
            fits=np.isfinite(again) & ((held <= limit) | (again > 0)),
            again=again > 0,
            possible=(static + summed("least_bytes") <= p * limit) & (summed("alone_bytes") <= limit),
            choice=choice,
            number=number,
        )

    def beaten(self, alike: _Alike, request: Request) -> NDArray[np.bool_]:
        """[row] whether it is no quicker than that which differs in its exchange of keys and values alone, with all
        kept, and needs no less memory, or that is no matter."""
        found = np.zeros(len(self.choice), dtype=np.bool_)
        least = request.least_memory
        room = math.inf if least is None else ROOMY * least
        plain, others = alike.exchanging()
        begins = np.searchsorted(self.choice, np.arange(len(alike.choices) + 1))
        counts = np.diff(begins)[plain]
        which = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        row, other = (np.repeat(begins[own], counts) + which for own in (plain, others))
        behind = np.where(
            self.least[row] == self.least[other],
            self.needs[other] < self.needs[row],
            self.least[other] < self.least[row],
        )
        one, more = np.where(behind, other, row), np.where(behind, row, other)
        found[more] = self.possible[one] & (self.needs[one] <= np.maximum(room, self.needs[more]))
        return found

    def rows(
        self, wanted: NDArray[np.int64], choices: Sequence[Choice], usual: Sequence[Sequence[Usual]]
    ) -> list[BoundedChoice]:
        """Those rows, in this order, with the ``usual`` schedules [choice]."""
        columns = [
            *(each[wanted].tolist() for each in (self.choice, self.number)),
            self.least[wanted].astype(np.int64).tolist(),
            *(each[wanted].tolist() for each in (self.usual, self.needs, self.smallest, self.parts)),
        ]
        found = list[BoundedChoice]()
        for place, number, least, usually, need, smallest, parts in checked(zip(*columns, strict=True)):
            choice = choices[place]
            own = Choice(*(*_BEFORE(choice), usual[place][number], *_AFTER(choice)))  # as ``replace``, but quicker
            found.append(BoundedChoice(own, least, usually, need, smallest, UsualParts(*parts)))
        return found


def _together(speeds: Sequence[float], positions: FloatArray, each: FloatArray) -> FloatArray:
    """[choice] the most that so many positions of devices can have of the speed of one: of the fastest devices."""
    sums = np.cumsum([0.0, *sorted(speeds, reverse=True)])
    found: FloatArray = sums[np.minimum(positions * each, len(speeds)).astype(np.int64)] / each
    return found


def _working(request: Request, choices: Sequence[Choice]) -> Iterator[float]:
    """[choice] how much its positions have of the speed of one, each being as fast as the slowest of its devices."""
    speeds, known = request.speeds, dict[tuple[int, bool], list[float]]()
    least = min(speeds)
    for choice in choices:
        each, count = choice.width * choice.replicas, choice.positions or 1
        if (key := (each, choice.backwards)) not in known:
            checkpoint()
            line = speeds[::-1] if choice.backwards else speeds
            slowest = (min(line[at : at + each]) for at in range(0, len(line), each))
            known[key] = list(accumulate(slowest, initial=0.0))
        sums = known[key]
        there = min(count, len(sums) - 1)
        yield sums[there] + (count - there) * least


def _of_each(counts: Counts | None, where: tuple[Numbers, Numbers, int, Numbers]) -> FloatArray:
    """[row, position] micro-batches of an average stage."""
    found: FloatArray = np.zeros(1) if counts is None else np.add.reduce(counts(*where)) / where[2]
    return found


def _fitted(
    request: Request,
    schedules: Sequence[tuple[Usual, NDArray[np.int64], int, int]],
    p: FloatArray,
    m: FloatArray,
    rows: NDArray[np.int64],
    sums: Sequence[_Sums],
    limit: float,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """[row] bytes of the fullest position of an even cut, the same where all is recomputed that may be, and ns that
    all recompute together where that must fit.

    ``inf`` where nothing fits. ``schedules`` are each with its rows, and how many stages a position has on how many
    routes; ``rows`` [row] are the places of their sums. Of more than :data:`MOST_POSITIONS`
    positions only this many are looked at, evenly spaced from first to last, to represent the others.
    """
    needs, smallest, again = np.zeros(len(rows)), np.zeros(len(rows)), np.zeros(len(rows))
    spared = np.array([each.saved_bytes[-1] for each in sums], dtype=np.float64)[rows][:, None]
    static, held, owed_bytes, workspace = (
        np.array([getattr(each, name) for each in sums], dtype=np.float64)[rows][:, None]
        for name in ("static_bytes", "activation_bytes", "weight_grad_bytes", "workspace_bytes")
    )
    positions, count = p[:, None], m[:, None]
    first, layers = first_layers_open(request), len(request.profile.blocks)
    curves = {id(each.saved_bytes): each for each in sums}  # what replicas divide is no matter for them
    numbers = {key: number for number, key in enumerate(curves)}
    curve = np.array([numbers[id(each.saved_bytes)] for each in sums])[rows]
    widest = [int(np.minimum(positions[own], MOST_POSITIONS).max()) for _, own, *_ in schedules]
    parts = (
        (usual, own[at : at + ROWS_AT_ONCE], chunks, routes, most)
        for (usual, own, chunks, routes), most in zip(schedules, widest, strict=True)
        for at in range(0, len(own), ROWS_AT_ONCE)
    )
    for usual, own, chunks, routes, most in checked(parts, 1):
        places = positions[own]
        looked = np.minimum(places, MOST_POSITIONS)
        number = np.arange(most)[None, :]
        there = number < looked
        at = np.where(there, number * (places - 1) // np.maximum(looked - 1, 1), places - 1)
        where = places, count[own], chunks, at
        flight, owed = routes * _of_each(usual.in_flight, where), _of_each(usual.owed, where)
        beside = (routes * static[own] + owed * owed_bytes[own]) / places + workspace[own]
        need = np.where(there, beside + flight * held[own] / places, 0.0)
        needs[own] = need.max(axis=1)
        smallest[own] = np.where(there, need - flight * spared[own] / places, 0.0).max(axis=1)
        left = _of_each(usual.ending, where)
        ends = np.where(there, (routes * static[own] + left * owed_bytes[own]) / places, 0.0).max(axis=1) <= limit
        short = np.where(there, (need - limit) * places / np.maximum(flight, 1e-9), 0.0)  # of all blocks
        mine = curve[own]
        order = np.argsort(mine, kind="stable")
        each_curve = list(curves.values())
        for alike in checked(np.split(order, np.flatnonzero(np.diff(mine[order])) + 1), 1):
            one_of = each_curve[mine[alike[0]]]
            saved, longer = one_of.saved_bytes, one_of.again_ns
            lacking = short[alike].clip(min=0.0)
            if first:
                taken = _first_layers_ns(lacking, saved[-1], longer[-1], layers / (places[alike, 0] * chunks))
            else:
                taken = np.interp(lacking, saved, longer, right=math.inf)
                taken = np.where(there[alike], taken, 0.0).sum(axis=1) / looked[alike, 0]
            again[own[alike]] = np.where(ends[alike], taken, math.inf)
    return needs, smallest, again


def _first_layers_ns(lacking: FloatArray, saved: float, longer: float, each: FloatArray) -> FloatArray:
    """[choice] ns by which all stages are longer that each recompute as many of their layers as the fullest must.

    A stage has ``each`` so many; ``lacking`` [choice, position] are bytes of all blocks, of which all layers together
    have ``saved`` so many, in ``longer`` ns.
    """
    share = lacking.max(axis=1) / max(saved, 1e-9)
    counts = np.maximum(1.0, np.floor(each))
    found: FloatArray = np.where(share > 1, math.inf, np.minimum(1.0, np.ceil(share * counts) / counts) * longer)
    return found


def _paced(choices: Sequence[Choice], lines: Sequence[Array]) -> Iterator[float]:
    """[choice] ns of a micro-batch where stages go round in turn, each turn as fast as its longest; 0 elsewhere.

    All positions run their stages of a turn side by side, p micro-batches one after another: the longest stage, of the
    cut whose borders are as near as blocks allow to even ones, holds up all of them but one, as each position is so far
    ahead of the next.
    """
    known: dict[tuple[int, int, int], float] = {}
    for choice, line in zip(choices, lines, strict=True):
        turns, positions = choice.per_position, choice.positions or 1
        if choice.strategy != "circular":
            yield 0.0
            continue
        key = id(line), turns, positions
        if key not in known:
            count = turns * positions
            ideal, places = line[-1] * np.arange(1, count) / count, np.arange(1, count)
            after = np.searchsorted(line, ideal)
            nearest = np.where(line[after] - ideal < ideal - line[after - 1], after, after - 1)
            borders = np.maximum.accumulate(np.maximum(nearest, places) - places) + places
            borders = np.minimum(borders, len(line) - 1 - count + places)
            stages = np.diff(line[[0, *borders, len(line) - 1]])
            known[key] = float(stages.reshape(turns, positions).max(axis=1).sum())
        yield known[key]


def _exchanged_ns(request: Request, blocks: Blocks, choices: Sequence[Choice], sums: Sequence[_Sums]) -> Iterator[int]:
    """[choice] ns by which a micro-batch's actions are longer for what copies exchange, on the cluster's first devices.

    They wait for what compute does not hide, or are slower beside it, as in :func:`pipeplan.costs.zero.with_exchanges`.
    """
    known: dict[tuple[int, Zero, int, Experts], tuple[int, int]] = {}
    for choice, own in zip(choices, sums, strict=True):
        if request.cluster is None or choice.zero.level < IN_ACTIONS:
            yield 0
            continue
        pricing = choice.pricing
        key = pricing.shards, choice.zero, choice.copies, pricing.experts
        if key not in known:
            near = Exchanging.on_first(request.cluster, choice.shards, choice.copies, choice.zero, pricing.experts)
            exchanged = blocks.exchanged_ns(pricing, near)
            known[key] = exchanged, round(near.contention * exchanged)
        exchanged, slowed = known[key]
        yield max(slowed, exchanged - own.compute_ns)


def _hops_ns(request: Request, choices: Sequence[Choice]) -> Iterator[float]:
    """[choice] ns of a message of one micro-batch between neighbours, of the profile's edges that of a middling one."""
    edges, by_id = request.profile.edges, request.profile.by_id
    sent = sorted((edge for edge in edges if edge.transfer_ns is None), key=lambda edge: edge.bytes_per_sample)
    fixed = sorted(edge.transfer_ns for edge in edges if edge.transfer_ns is not None)
    middling, least = (
        sent[len(sent) // 2] if sent else None,
        fixed[len(fixed) // 2] if 2 * len(fixed) > len(edges) else 0,
    )
    known: dict[tuple[int, int, int], int] = {}
    slices = cache(lambda shards: 1 if middling is None else places_divided(by_id[middling.target], shards))
    for choice in choices:
        parts, apart = choice.context * slices(choice.shards), choice.width * choice.replicas
        samples = choice.batch.microbatch_size // choice.replicas
        if apart >= request.num_devices:
            yield 0.0
            continue
        if (samples, parts, apart) not in known:
            size = 0 if middling is None else middling.bytes_per_sample * samples // parts
            known[samples, parts, apart] = least or sum(transfer_time(request.cluster, 0, apart, size))
        yield known[samples, parts, apart]


def _always(zero: Zero, copies: int) -> Zero:
    return zero


def _after_ns(request: Request, choices: Sequence[Choice], sums: Sequence[_Sums]) -> Iterator[tuple[int, int]]:
    """[choice] ns that an even position takes after its actions: summing gradients over its replicas; step, gather."""
    after = AfterActions.of(request.profile, request.cluster)
    of_experts = after.of_experts
    known: dict[tuple[object, ...], tuple[int, int]] = {}
    for choice, own in zip(choices, sums, strict=True):
        positions, experts = choice.positions or 1, choice.pricing.experts if of_experts else TOGETHER
        apart = of_experts // experts.size if experts.size > 1 else 0
        apart //= experts.zero.group if experts.zero.level >= IN_ACTIONS else 1
        each = (max(0, own.gradient_bytes - apart) // positions, choice.shards, choice.copies, choice.zero)
        both = [each]
        if apart:
            both.append((apart // positions, experts.size, choice.copies * choice.shards // experts.size, experts.zero))
        for key in both:
            if key not in known:
                size, shards, copies, zero = key
                known[key] = replace(after, shards=shards, sharing=partial(_always, zero)).parts(size, copies)
        yield sum(known[key][0] for key in both), sum(known[key][1] for key in both)
