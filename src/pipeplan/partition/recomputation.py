"""What a stage computes again, block by block: the quickest choice that fits into memory, and chains cut by it.

Each block keeps what its forward made, drops what its attention core made, or drops all but its inputs. With k
micro-batches in flight a stage of blocks b, of which each runs in one of these ways w(b), fits into M bytes if

    state + k * sum of activations of b as w(b) + largest workspace of b as w(b) <= M

The least time under that is a knapsack of several choices (Kellerer, Pferschy and Pisinger 2004, chapter 11), solved by
lists of undominated choices (Nemhauser and Ullmann 1969), one block more at a time, for each workspace that may be the
largest. Of alike blocks only the number counts, so that stages of alike layers have short lists, which are made once.
What computes words or classes, at the ends of a model, is never computed again: it would save next to nothing.

Cutting a chain takes the least time of blocks begin..end-1 for every number of micro-batches in flight from here: cut
and recomputation are chosen together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, reduce
from itertools import accumulate, islice, pairwise
from operator import add
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs import UNLIMITED, StageCost
from pipeplan.costs.blocks import NEVER_AGAIN
from pipeplan.costs.zero import TOGETHER, Experts
from pipeplan.files import Profile
from pipeplan.partition.baselines import StageTable, for_each_size, least_bottleneck
from pipeplan.partition.chain.costs import Array, ChainCosts, FloatArray, StageTimes, taken_ns
from pipeplan.partition.chain.kernel import least_split
from pipeplan.partition.problem import Partition, PartitionProblem, Pricing, Way
from pipeplan.search_constants import (
    LEVELLED_TRIES,
    MOST_CHOICES,
    MOST_TIMES,
    MOST_WORKSPACES,
    RECOMPUTED_LONGEST,
    TIMES_AT_ONCE,
)
from pipeplan.time_limit import checked
from pipeplan.workload.elements import Again, Recompute, recompute_of


class Option(NamedTuple):
    """A way to run a block: ns of forward and backward, bytes of a micro-batch in flight, and of one action."""

    time_ns: int
    held_bytes: int
    workspace_bytes: int
    again: Again


Kind = tuple[Option, ...]
"""The undominated ways to run a block: less memory takes more time."""

Counts = tuple[int, ...]
"""[kind] how many blocks of it there are."""


def kind_of(costs: Sequence[tuple[Again, StageCost]]) -> Kind:
    """The ways of a block with these costs."""
    return undominated(
        [Option(each.compute_ns, each.activation_bytes, each.workspace_bytes, again) for again, each in costs]
    )


def undominated(options: Iterable[Option]) -> Kind:
    """Those that no other beats in time and both sizes, the quickest first."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda option: option[:3]):
        if not any(
            each.held_bytes <= option.held_bytes and each.workspace_bytes <= option.workspace_bytes for each in kept
        ):
            kept.append(option)
    return tuple(kept)


def savings(kinds: Mapping[Kind, int]) -> tuple[FloatArray, FloatArray]:
    """Bytes that so many blocks of these kinds hold less for a micro-batch, ascending from 0, and the least ns for it.

    The relaxed knapsack: between two points a part of a block is recomputed. Least ns per byte come first.
    """
    steps: list[tuple[float, int, int]] = []
    for kind, count in kinds.items():
        hull = [kind[0]]
        for option in sorted(kind, key=lambda each: -each.held_bytes):
            while len(hull) > 1 and _slope(hull[-2], option) <= _slope(hull[-2], hull[-1]):
                hull.pop()
            if option.held_bytes < hull[-1].held_bytes:
                hull.append(option)
        steps += [
            (_slope(one, other), count * (one.held_bytes - other.held_bytes), count * (other.time_ns - one.time_ns))
            for one, other in pairwise(hull)
        ]
    steps.sort()
    bytes_, ns = (np.cumsum([0, *(step[part] for step in steps)], dtype=np.float64) for part in (1, 2))
    return bytes_, ns


def _slope(one: Option, other: Option) -> float:
    """Ns for each byte less."""
    return (other.time_ns - one.time_ns) / max(1, one.held_bytes - other.held_bytes)


@dataclass(frozen=True, slots=True)
class _Undominated:
    """Choices for some blocks, by bytes held, ascending, and so by time, descending; how each was made.

    ``before`` is the place in the list with one block less, ``options`` what that block then does.
    """

    held: Array
    times: Array
    before: Array
    options: Array


_NOTHING = _Undominated(*(np.zeros(1, dtype=np.int64) for _ in range(4)))


@dataclass(frozen=True, slots=True)
class Knapsacks:
    """Least times of any numbers of blocks of some ``kinds``."""

    kinds: Sequence[Kind]
    _lists: dict[tuple[int, Counts], _Undominated] = field(default_factory=dict, repr=False)

    def workspaces(self, counts: Counts) -> Sequence[int]:
        """What may be the largest workspace, ascending: all blocks can run in no more."""
        own = [kind for kind, count in zip(self.kinds, counts, strict=True) if count]
        least = max(min(option.workspace_bytes for option in kind) for kind in own)
        found = sorted({option.workspace_bytes for kind in own for option in kind if option.workspace_bytes >= least})
        if len(found) <= MOST_WORKSPACES:
            return found
        some = np.unique(np.linspace(0, len(found) - 1, MOST_WORKSPACES).astype(int)).tolist()
        return [found[index] for index in some]

    def undominated(self, workspace: int, counts: Counts) -> _Undominated:
        """The choices of blocks that all run within a ``workspace``."""
        missing: list[tuple[int, Counts]] = []
        while any(counts) and (workspace, counts) not in self._lists:
            last = max(kind for kind, count in enumerate(counts) if count)
            missing.append((last, counts))
            counts = (*counts[:last], counts[last] - 1, *counts[last + 1 :])
        found = self._lists[workspace, counts] if any(counts) else _NOTHING
        for last, more in reversed(missing):
            found = self._lists[workspace, more] = _with_one_more(found, self.kinds[last], workspace)
        return found

    def least(self, counts: Counts, statics: Array, in_flight: Array, limit: int) -> Array:
        """[in flight, case] least ns with ``statics`` [..., case] bytes of state; ``UNLIMITED`` where nothing fits."""
        best = np.full((len(in_flight), statics.shape[-1]), UNLIMITED)
        for workspace in self.workspaces(counts):
            left = limit - statics - workspace
            if (left < 0).all():
                break
            choices = self.undominated(workspace, counts)
            each = np.maximum(left, 0) // in_flight[:, None]
            place = np.searchsorted(choices.held, each, side="right") - 1
            times = np.where((place >= 0) & (left >= 0), choices.times[np.maximum(place, 0)], UNLIMITED)
            np.minimum(best, times, out=best)
        return best

    def chosen(self, counts: Counts, static: int, in_flight: int, limit: int) -> list[list[Again]] | None:
        """[kind][block] what is computed again in the least time; None if nothing fits."""
        workspaces = self.workspaces(counts)
        if (quickest := self._quickest(counts, workspaces, static, in_flight, limit)) is not None:
            return quickest
        best: tuple[int, int, int] | None = None
        for workspace in workspaces:
            if (left := limit - static - workspace) >= 0:
                choices = self.undominated(workspace, counts)
                place = int(np.searchsorted(choices.held, left // in_flight, side="right")) - 1
                if place >= 0 and (best is None or choices.times[place] < best[0]):
                    best = int(choices.times[place]), workspace, place
        return None if best is None else self.traced(counts, *best[1:])

    def _quickest(
        self, counts: Counts, workspaces: Sequence[int], static: int, in_flight: int, limit: int
    ) -> list[list[Again]] | None:
        """Each block's quickest option, where they fit and no block has another as quick: no list is needed then."""
        firsts = [min(kind, key=lambda option: option.time_ns) for kind in self.kinds]
        own = [(first, kind, count) for first, kind, count in zip(firsts, self.kinds, counts, strict=True) if count]
        widest = max(first.workspace_bytes for first, _, _ in own)
        workspace = next((each for each in workspaces if each >= widest), limit + 1)
        held = sum(first.held_bytes * count for first, _, count in own)
        if held > (limit - static - workspace) // in_flight:
            return None
        if any(sum(option.time_ns == first.time_ns for option in kind) > 1 for first, kind, _ in own):
            return None
        return [[first.again] * count for first, count in zip(firsts, counts, strict=True)]

    def traced(self, counts: Counts, workspace: int, place: int) -> list[list[Again]]:
        """[kind][block] how one of the choices was made; of alike blocks those that do least again come first."""
        found: list[list[Again]] = [[] for _ in self.kinds]
        while any(counts):
            choices = self.undominated(workspace, counts)
            last = max(kind for kind, count in enumerate(counts) if count)
            found[last].append(self.kinds[last][int(choices.options[place])].again)
            place = int(choices.before[place])
            counts = (*counts[:last], counts[last] - 1, *counts[last + 1 :])
        order = (False, "selective", True)
        return [sorted(each, key=order.index) for each in found]


def _with_one_more(before: _Undominated, kind: Kind, workspace: int) -> _Undominated:
    able = [place for place, option in enumerate(kind) if option.workspace_bytes <= workspace]
    held = np.concatenate([before.held + kind[place].held_bytes for place in able])
    times = np.concatenate([before.times + kind[place].time_ns for place in able])
    order = np.lexsort((times, held))
    least = np.minimum.accumulate(times[order])
    kept = order[np.concatenate(([True], least[1:] < least[:-1]))]
    if len(kept) > MOST_CHOICES:
        kept = kept[np.unique(np.linspace(0, len(kept) - 1, MOST_CHOICES).astype(int))]
    option, place = np.divmod(kept, len(before.held))
    return _Undominated(held[kept], times[kept], place, np.array(able)[option])


@dataclass(frozen=True)
class ChoosingBlocks:
    """Blocks of a stage, or of all stages, in order: which are alike, and in which ways each can run."""

    knapsacks: Knapsacks
    kind_of_block: Sequence[int]

    @classmethod
    def of(cls, costs: Sequence[Sequence[tuple[Again, StageCost]]]) -> ChoosingBlocks:
        """Blocks with these costs [block][way]."""
        kinds = [kind_of(each) for each in costs]
        distinct = list(dict.fromkeys(kinds))
        number = {kind: place for place, kind in enumerate(distinct)}
        return cls(Knapsacks(distinct), [number[kind] for kind in kinds])

    def counts(self, begin: int, end: int) -> Counts:
        """How many blocks of each kind are among begin..end-1."""
        found = [0] * len(self.knapsacks.kinds)
        for kind in self.kind_of_block[begin:end]:
            found[kind] += 1
        return tuple(found)

    def chosen(self, begin: int, end: int, static: int, in_flight: int, limit: int) -> Recompute | None:
        """What blocks begin..end-1 compute again in the least time that fits; None if nothing does."""
        found = self.knapsacks.chosen(self.counts(begin, end), static, in_flight, limit)
        return None if found is None else self.in_order(begin, end, found)

    def in_order(self, begin: int, end: int, by_kind: Sequence[Sequence[Again]]) -> Recompute:
        """What blocks begin..end-1 do, of [kind][block] what those of each kind do."""
        left = [iter(each) for each in by_kind]
        return recompute_of([next(left[kind]) for kind in self.kind_of_block[begin:end]])

    @property
    def num_undominated(self) -> int:
        """How many choices for all blocks as one stage no other beats in both time and bytes held."""
        return len(self._all[2].held)

    def undominated(self, place: int) -> Recompute:
        """One of these: the higher its place the more time it takes, and the less it holds."""
        counts, workspace, choices = self._all
        found = self.knapsacks.traced(counts, workspace, len(choices.held) - 1 - place)
        return self.in_order(0, len(self.kind_of_block), found)

    @cached_property
    def _all(self) -> tuple[Counts, int, _Undominated]:
        counts = self.counts(0, len(self.kind_of_block))
        workspace = self.knapsacks.workspaces(counts)[-1]
        return counts, workspace, self.knapsacks.undominated(workspace, counts)

    def least(
        self,
        sums: ChainCosts,
        row: int,
        stages: tuple[Array, Array],
        in_flight: Array,
        limit: int,
        beside: Array | int = 0,
    ) -> Array:
        """[in flight, stage] least compute time in ns of ranges with that many micro-batches ``in_flight``.

        ``sums`` are of the same blocks, and in its ``row`` nothing is computed again. ``beside`` [in flight, stage] are
        bytes beside state, activations and workspace. ``UNLIMITED`` where nothing fits.
        """
        begins, ends = stages
        statics = sums.statics(begins, ends)[row] + beside
        running = sums.workspace(begins, ends)[row] + in_flight[:, None] * sums.activation(begins, ends)[row]
        whole = statics + running <= limit
        found = np.where(whole, sums.time(begins, ends)[row], UNLIMITED)
        kinds = [self.knapsacks.kinds[kind] for kind in self.kind_of_block]
        held = np.cumsum([0, *(min(option.held_bytes for option in kind) for kind in kinds)])
        least = in_flight[:, None] * (held[ends] - held[begins])
        open_ = np.flatnonzero((~whole & (statics + least <= limit)).any(axis=0))
        alike = defaultdict[Counts, list[int]](list)
        for stage in checked(open_.tolist(), 64):
            alike[self.counts(int(begins[stage]), int(ends[stage]))].append(stage)
        for counts, same in checked(alike.items(), 1):
            own = self.knapsacks.least(counts, statics[..., same], in_flight, limit)
            found[:, same] = np.minimum(found[:, same], own)
        return found


def levels_of(profile: Profile) -> tuple[Again, ...]:
    """What can be computed again of some block of a profile."""
    rows = (row for block in profile.kinds for row in block.costs)
    has_cores = profile.once("has_cores", lambda: any(row.selective_ns is not None for row in rows))
    return (False, "selective", True) if has_cores else (False, True)


def kept_whole(profile: Profile) -> frozenset[str]:
    """Blocks at the ends of a model, of which nothing is computed again."""
    return frozenset(block.id for block in profile.blocks if block.operator in NEVER_AGAIN)


def choices_of(
    profile: Profile,
    blocks: Sequence[str],
    samples: int,
    shards: int,
    context: int = 1,
    experts: Experts = TOGETHER,
) -> ChoosingBlocks:
    """The blocks of one stage. Raises UsageError if one has no costs for this number of samples and shards."""
    plain = Pricing(samples, shards=shards, context=context, experts=experts)
    ways = [(again, plain._replace(recompute=again).costs(profile, blocks)) for again in levels_of(profile)]
    kept = kept_whole(profile)
    return ChoosingBlocks.of(
        [
            [(again, costs[place]) for again, costs in ways if not (again and block in kept)]
            for place, block in enumerate(blocks)
        ]
    )


@dataclass(frozen=True, slots=True)
class _RecomputingTable(StageTable):
    """Stages of which each recomputes what it must: ``least`` [in flight - 1] is what :meth:`within` has then."""

    least: Sequence[Array] = field(kw_only=True)

    def within(self, num_microbatches: int, later: int) -> Array:
        """As for any stages, where those that do not fit recompute as little as they must."""
        return self.least[min(num_microbatches, later + 1) - 1]


def recomputing(problem: PartitionProblem, kept: Container[str] = ()) -> Iterator[Partition]:
    """For each size, the chain with the fastest slowest stage, each stage recomputing of its blocks what it must.

    Cuts, replicas and recomputation are chosen together, exactly, by PipeDream's programme. Of blocks in ``kept``
    nothing is recomputed.

    Raises:
        NoPartitionError: no partition fits into memory.
    """
    order = problem.order

    def planned(problem: PartitionProblem, ways: Sequence[Way]) -> Partition | None:
        return _planned(problem, [way for way in ways if not way.recompute], order, kept)

    return for_each_size(problem, planned, f"no split of {len(order)} blocks into stages in a line fits")


def _planned(
    problem: PartitionProblem, ways: Sequence[Way], order: Sequence[str], kept: Container[str]
) -> Partition | None:
    limit, count = problem.memory_bytes, problem.mini_batch // ways[0].microbatch_size
    assert limit is not None, "without a limit nothing need be recomputed"
    sums, most = problem.chain(order), min(count, problem.num_devices, len(order))
    plain = StageTable.of_chain(problem, ways, order)
    stages = plain.begins, plain.ends
    choosing = {way.row: _choosing(problem, way, order, kept) for way in ways}
    in_flight = np.arange(1, most + 1)
    by_row = {row: each.least(sums, row, stages, in_flight, limit) for row, each in choosing.items()}
    times = []
    for place in range(most):
        computing = np.stack([by_row[way.row][place] for way in ways])
        whole = count * np.where(computing < UNLIMITED, computing, 0) + plain.waits
        times.append(np.where(computing < UNLIMITED, whole, UNLIMITED))
    table = _RecomputingTable(**{each.name: getattr(plain, each.name) for each in fields(plain)}, least=times)
    found = least_bottleneck(problem, table)
    if found is None:
        return None
    placed = []
    for place, (begin, end, way) in enumerate(found[1]):
        held = min(count, len(found[1]) - place)
        static = int(sums.statics(begin, end)[way.row])
        again = choosing[way.row].chosen(begin, end, static, held, limit)
        assert again is not None, "it fits"
        placed.append((order[begin:end], way._replace(recompute=again)))
    return Partition(problem.placed(placed), found[0], optimal=True)


def _choosing(problem: PartitionProblem, way: Way, order: Sequence[str], kept: Container[str]) -> ChoosingBlocks:
    same = problem.rows[way.row]
    rows = [(row.recompute, place) for place, row in enumerate(problem.rows) if row._replace(recompute=False) == same]
    return ChoosingBlocks.of(
        [
            [(again, problem.costs[block][place]) for again, place in rows if not (again and block in kept)]
            for block in order
        ]
    )


def first_counts(numbers: Sequence[Sequence[int]]) -> list[int]:
    """How many first layers all stages may recompute, or all they have, where blocks of several layers do so whole.

    ``numbers`` [stage][block] are how many layers a stage has up to the end of a block. Ascending, none of them first.
    """
    able = {0}.union(*numbers)
    return sorted(count for count in able if all(not count or count in own or own[-1] <= count for own in numbers))


class Holding(NamedTuple):
    """What a schedule has in flight of a stage: micro-batches whole, and those that owe only a weight gradient.

    ``position`` runs it, with ``limit`` bytes, at some ``speed``.
    """

    position: int
    stage: int
    in_flight: int
    owed: int
    limit: int
    speed: float = 1.0


Cuts = tuple[int, ...]


@dataclass(frozen=True)
class FittingChain:
    """Blocks in a line, to be cut into stages of which each recomputes what it must: least, for ``holdings``.

    ``ways`` are the blocks' costs at each level, without recomputation first; ``kept`` says of which blocks nothing is
    recomputed. Of several routes a stage has a holding on each. With ``layers`` [block], how many each block is, the
    first few layers of each stage are recomputed, as many in all stages; else each stage recomputes what is quickest.
    """

    ways: Sequence[tuple[Again, Sequence[StageCost]]]
    kept: Sequence[bool]
    holdings: Sequence[Holding]
    layers: Sequence[int] | None = None
    _times: dict[tuple[tuple[int, int, int, float], int, int], int] = field(default_factory=dict, repr=False)

    @cached_property
    def choosing(self) -> ChoosingBlocks:
        """Which blocks are alike, and how each can run."""
        places = range(len(self.kept))
        return ChoosingBlocks.of(
            [[(again, costs[at]) for again, costs in self.ways if not (again and self.kept[at])] for at in places]
        )

    @cached_property
    def sums(self) -> ChainCosts:
        """Running sums where nothing is recomputed."""
        return ChainCosts.of_rows([self.ways[0][1]])

    @cached_property
    def owed_bytes(self) -> Array:
        """[cut] bytes of a micro-batch that weight gradients before it need."""
        return np.cumsum([0, *(cost.weight_grad_bytes for cost in self.ways[0][1])])

    @property
    def num_blocks(self) -> int:
        """Blocks in the chain."""
        return len(self.kept)

    @cached_property
    def num_stages(self) -> int:
        """Stages it is cut into."""
        return 1 + max(each.stage for each in self.holdings)

    def cut(self) -> Cuts | None:
        """The first block of each stage, with one on each position; None where nothing fits, or ways are too many.

        The longest is as short as can be, then the sum of squares.
        """
        if self.num_stages == 1:  # of all ranges only one is looked at
            return (0,) if self.all_fit((0,)) else None
        uneven = max(each.speed for each in self.holdings) / min(each.speed for each in self.holdings)
        share = int(-(-int(self.sums.compute[0, -1]) // self.num_stages) * uneven)
        most = RECOMPUTED_LONGEST * share + int(np.diff(self.sums.compute[0]).max())
        for limit in (most, UNLIMITED):
            table = self._table(limit)
            found = None if table is None else least_split(table.cost, self.num_blocks, table.kinds, table.fits)
            if found is not None:
                return found
        return None

    def _table(self, most: int) -> _FittingTable | None:
        """A table of stages that take no more than ``most`` ns with nothing recomputed; None if they are too many."""
        like, times = list(dict.fromkeys(each[2:] for each in self.holdings)), self.sums.compute[0]
        last = np.searchsorted(times, times[:-1] + min(most, int(times[-1])), side="right") - 1
        counts = last - np.arange(self.num_blocks)
        if int(counts.sum()) * len(like) > MOST_TIMES:
            return None
        first = np.cumsum([0, *counts])
        begins = np.repeat(np.arange(self.num_blocks), counts)
        ends = begins + 1 + np.arange(len(begins)) - first[begins]
        limit = max(each.limit for each in self.holdings)
        in_flight, owed, room, speeds = (np.array(column) for column in zip(*like, strict=True))
        found = np.empty((len(like), len(begins) + 1), dtype=np.int64)
        found[:, -1] = UNLIMITED
        few = TIMES_AT_ONCE // len(like) + 1
        for at in checked(range(0, len(begins), few), 1):
            own = begins[at : at + few], ends[at : at + few]
            beside = owed[:, None] * (self.owed_bytes[own[1]] - self.owed_bytes[own[0]]) + (limit - room)[:, None]
            part = self.choosing.least(self.sums, 0, own, in_flight, limit, beside)
            if (speeds != 1).any():
                part = np.where(part < UNLIMITED, np.ceil(part / speeds[:, None]).astype(np.int64), UNLIMITED)
            found[:, at : at + part.shape[1]] = part
        return _FittingTable(found, first, last, [like.index(each[2:]) for each in self.holdings])

    def stages(self, begins: Cuts) -> StageTimes:
        """What each stage takes when the chain is cut so, with one stage on each position."""
        ranges = list(pairwise((*begins, self.num_blocks)))
        forwards = [int(self.sums.forward[0, end] - self.sums.forward[0, begin]) for begin, end in ranges]
        forwards = [taken_ns(ns, each.speed) for ns, each in zip(forwards, self.holdings, strict=False)]
        totals = [self._time(each[2:], *own) for each, own in zip(self.holdings, ranges, strict=True)]
        return StageTimes(tuple(forwards), tuple(map(int.__sub__, totals, forwards)))

    def all_fit(self, begins: Cuts) -> bool:
        """Whether every stage does, with one stage on each position."""
        ranges = pairwise((*begins, self.num_blocks))
        return all(self._time(each[2:], *own) < UNLIMITED for each, own in zip(self.holdings, ranges, strict=True))

    def _time(self, held: tuple[int, int, int, float], begin: int, end: int) -> int:
        """Least ns of a stage."""
        if (held, begin, end) not in self._times:
            (in_flight, owed, limit, speed), stage = held, (np.array([begin]), np.array([end]))
            beside = owed * (self.owed_bytes[stage[1]] - self.owed_bytes[stage[0]])[None]
            found = self.choosing.least(self.sums, 0, stage, np.array([in_flight]), limit, beside)
            least = int(found[0, 0])
            self._times[held, begin, end] = taken_ns(least, speed) if least < UNLIMITED else least
        return self._times[held, begin, end]

    def chosen(self, begins: Cuts) -> list[list[Again]] | None:
        """[holding][block] what is recomputed, the least that each position must; None where nothing fits.

        The stages of a position share its memory, and so one knapsack: of each block what all its micro-batches in
        flight hold.
        """
        ranges = list(pairwise((*begins, self.num_blocks)))
        found: list[list[Again]] = [[] for _ in self.holdings]
        by_position: dict[int, list[int]] = defaultdict(list)
        for number, each in enumerate(self.holdings):
            by_position[each.position].append(number)
        if self.layers is not None:
            return self._first_layers(self.layers, by_position, ranges)
        for own in checked(by_position.values(), 1):
            made = self._position([self.holdings[number] for number in own], ranges)
            if made is None:
                return None
            for number, again in zip(own, made, strict=True):
                found[number] = again
        return found

    def _first_layers(
        self, layers: Sequence[int], by_position: Mapping[int, Sequence[int]], ranges: Sequence[tuple[int, int]]
    ) -> list[list[Again]] | None:
        """The same where all stages recompute as many of their first layers: as few as fit everywhere."""
        numbers = [[*accumulate(layers[begin:end])] for begin, end in ranges]
        whole, again = dict(self.ways)[False], dict(self.ways)[True]

        def chosen(count: int) -> list[list[Again]]:
            of_stage = [
                [bool(layers[begin + at]) and number <= count for at, number in enumerate(own)]
                for (begin, _), own in zip(ranges, numbers, strict=True)
            ]
            return [[*of_stage[each.stage]] for each in self.holdings]

        def fits(count: int) -> bool:
            every = chosen(count)
            for own in by_position.values():
                held, workspace, here = 0, 0, list[StageCost]()
                for place in own:
                    each, blocks = self.holdings[place], range(*ranges[self.holdings[place].stage])
                    costs = [(again if a else whole)[block] for a, block in zip(every[place], blocks, strict=True)]
                    held += each.in_flight * sum(cost.activation_bytes for cost in costs)
                    held += each.owed * int(self.owed_bytes[blocks.stop] - self.owed_bytes[blocks.start])
                    workspace = max(workspace, *(cost.workspace_bytes for cost in costs))
                    here += costs
                if self._static(here) + held + workspace > self.holdings[own[0]].limit:
                    return False
            return True

        counts = first_counts(numbers)
        place = bisect_left(counts, True, key=fits)
        return None if place == len(counts) else chosen(counts[place])

    @staticmethod
    def _static(costs: Sequence[StageCost]) -> int:
        """Bytes of state of blocks on one position, which have what they share once."""
        shares = any(cost.tied for cost in costs)
        return reduce(add, costs).static_bytes if shares else sum(cost.static_bytes for cost in costs)

    def _position(self, own: Sequence[Holding], ranges: Sequence[tuple[int, int]]) -> list[list[Again]] | None:
        kinds: dict[tuple[int, int], Kind] = {}
        blocks: list[tuple[int, int]] = []
        beside = 0
        for each in own:
            begin, end = ranges[each.stage]
            beside += each.owed * int(self.owed_bytes[end] - self.owed_bytes[begin])
            for number in self.choosing.kind_of_block[begin:end]:
                kinds[number, each.in_flight] = tuple(
                    option._replace(held_bytes=option.held_bytes * each.in_flight)
                    for option in self.choosing.knapsacks.kinds[number]
                )
                blocks.append((number, each.in_flight))
        ways, costs = list(kinds), self.ways[0][1]
        here = [costs[block] for each in own for block in range(*ranges[each.stage])]
        static = self._static(here)
        counted = Counter(blocks)
        counts = tuple(counted[way] for way in ways)
        by_kind = Knapsacks(list(kinds.values())).chosen(counts, static + beside, 1, own[0].limit)
        if by_kind is None:
            return None
        left = dict(zip(ways, map(iter, by_kind), strict=True))
        every = iter([next(left[block]) for block in blocks])
        return [list(islice(every, ranges[each.stage][1] - ranges[each.stage][0])) for each in own]

    def levelled(
        self, cut: Callable[[Sequence[StageCost]], Cuts], tries: int = LEVELLED_TRIES
    ) -> tuple[Cuts, list[list[Again]]] | None:
        """Cuts and what is recomputed, for positions that run several stages: the busiest works as little as is found.

        ``cut`` cuts blocks with given costs. What was recomputed is then known, and they are cut anew with what that
        takes, as long as it helps.
        """
        best: tuple[int, Cuts, list[list[Again]]] | None = None
        level = dict(self.ways)
        costs: Sequence[StageCost] = self.ways[0][1]
        for _ in range(tries):
            begins = cut(costs)
            again = self.chosen(begins)
            if again is None:
                break
            ranges = list(pairwise((*begins, self.num_blocks)))
            loads: Counter[int] = Counter()
            taken: dict[int, list[StageCost]] = {}
            for each, own in zip(self.holdings, again, strict=True):
                blocks = range(*ranges[each.stage])
                taken[each.stage] = [level[a][block] for a, block in zip(own, blocks, strict=True)]
                loads[each.position] += taken_ns(sum(cost.compute_ns for cost in taken[each.stage]), each.speed)
            busiest = max(loads.values())
            if best is not None and busiest >= best[0]:
                break
            best = busiest, begins, again
            costs = [cost for stage in range(self.num_stages) for cost in taken[stage]]
        return None if best is None else best[1:]


@dataclass(frozen=True, slots=True)
class _FittingTable:
    """[kind of stage, range] ns, ``UNLIMITED`` where it does not fit, as the last range does not.

    Those that begin with a block are in a row from ``first`` [begin] on, up to that which ends at ``last`` [begin].
    """

    times: Array
    first: Array
    last: Array
    kinds: list[int]

    def cost(self, kind: int, begins: Array, ends: Array) -> Array:
        """Ns of ranges as such a stage."""
        there = np.minimum(begins, len(self.last) - 1)
        number = self.first[there] + ends - begins - 1
        known = (begins < ends) & (ends <= self.last[there])
        found: Array = self.times[kind, np.where(known, number, self.times.shape[1] - 1)]
        return found

    def fits(self, kind: int, begins: Array, ends: Array) -> NDArray[np.bool_]:
        """Whether they fit."""
        return self.cost(kind, begins, ends) < UNLIMITED
