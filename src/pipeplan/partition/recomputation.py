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

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pipeplan.costs import UNLIMITED, StageCost
from pipeplan.costs.blocks import NEVER_AGAIN
from pipeplan.files import Profile
from pipeplan.partition.baselines import StageTable, for_each_size, least_bottleneck
from pipeplan.partition.chain.costs import Array, ChainCosts
from pipeplan.partition.problem import Partition, PartitionProblem, Pricing, Way
from pipeplan.time_limit import checked
from pipeplan.workload.elements import Again, Recompute, recompute_of

MOST_CHOICES = 4_096
"""Undominated choices of some blocks that are kept; of more some are left out, and the best may be among them."""

MOST_WORKSPACES = 32
"""Largest workspaces that are looked at for a number of blocks; of more some are left out."""


class Option(NamedTuple):
    """A way to run a block: ns of forward and backward, bytes of a micro-batch in flight, and of one action."""

    time_ns: int
    held_bytes: int
    workspace_bytes: int
    again: Again


Kind = tuple[Option, ...]
"""The ways of a block, none of them for nothing: less memory takes more time."""

Counts = tuple[int, ...]
"""[kind] how many blocks of it there are."""


def kind_of(costs: Sequence[tuple[Again, StageCost]]) -> Kind:
    """The ways of a block with these costs."""
    options = [Option(each.compute_ns, each.activation_bytes, each.workspace_bytes, again) for again, each in costs]
    kept: list[Option] = []
    for option in sorted(options, key=lambda option: option[:3]):
        if not any(
            each.held_bytes <= option.held_bytes and each.workspace_bytes <= option.workspace_bytes for each in kept
        ):
            kept.append(option)
    return tuple(kept)


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
        some = np.unique(np.linspace(0, len(found) - 1, MOST_WORKSPACES).astype(int)).tolist()
        return found if len(found) <= MOST_WORKSPACES else [found[index] for index in some]

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
        """[in flight, case] least ns with ``statics`` [case] bytes of state; ``UNLIMITED`` where nothing fits."""
        best = np.full((len(in_flight), len(statics)), UNLIMITED)
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
        best: tuple[int, int, int] | None = None
        for workspace in self.workspaces(counts):
            if (left := limit - static - workspace) >= 0:
                choices = self.undominated(workspace, counts)
                place = int(np.searchsorted(choices.held, left // in_flight, side="right")) - 1
                if place >= 0 and (best is None or choices.times[place] < best[0]):
                    best = int(choices.times[place]), workspace, place
        return None if best is None else self.traced(counts, *best[1:])

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

    def least(self, sums: ChainCosts, row: int, stages: tuple[Array, Array], most: int, limit: int) -> Array:
        """[in flight - 1, stage] least ns of compute of ranges, for up to ``most`` micro-batches in flight.

        ``sums`` are of the same blocks, and in its ``row`` nothing is computed again. ``UNLIMITED`` where nothing fits.
        """
        begins, ends = stages
        in_flight, statics = np.arange(1, most + 1), sums.statics(begins, ends)[row]
        kept = sums.most_in_flight(begins, ends, limit)[row]
        found = np.where(kept >= in_flight[:, None], sums.time(begins, ends)[row], UNLIMITED)
        kinds = [self.knapsacks.kinds[kind] for kind in self.kind_of_block]
        held = np.cumsum([0, *(min(option.held_bytes for option in kind) for kind in kinds)])
        open_ = np.flatnonzero((kept < most) & (statics + held[ends] - held[begins] <= limit))
        alike = defaultdict[Counts, list[int]](list)
        for stage in checked(open_.tolist(), 64):
            alike[self.counts(int(begins[stage]), int(ends[stage]))].append(stage)
        for counts, same in checked(alike.items(), 1):
            found[:, same] = np.minimum(found[:, same], self.knapsacks.least(counts, statics[same], in_flight, limit))
        return found


def levels_of(profile: Profile) -> tuple[Again, ...]:
    """What can be computed again of some block of a profile."""
    has_cores = any(row.selective_ns is not None for block in profile.blocks for row in block.costs)
    return (False, "selective", True) if has_cores else (False, True)


def kept_whole(profile: Profile) -> frozenset[str]:
    """Blocks at the ends of a model, of which nothing is computed again."""
    return frozenset(block.id for block in profile.blocks if block.operator in NEVER_AGAIN)


def choices_of(profile: Profile, blocks: Sequence[str], samples: int, shards: int) -> ChoosingBlocks:
    """The blocks of one stage. Raises UsageError where one has no costs for so many samples and shards."""
    ways = [(again, Pricing(samples, again, shards).costs(profile, blocks)) for again in levels_of(profile)]
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
    by_row = {row: each.least(sums, row, stages, most, limit) for row, each in choosing.items()}
    times = []
    for in_flight in range(most):
        computing = np.stack([by_row[way.row][in_flight] for way in ways])
        whole = count * np.where(computing < UNLIMITED, computing, 0) + plain.waits
        times.append(np.where(computing < UNLIMITED, whole, UNLIMITED))
    table = _RecomputingTable(**{each.name: getattr(plain, each.name) for each in fields(plain)}, least=times)
    found = least_bottleneck(problem, table)
    if found is None:
        return None
    placed = []
    for place, (begin, end, way) in enumerate(found[1]):
        in_flight = min(count, len(found[1]) - place)
        static = int(sums.statics(begin, end)[way.row])
        again = choosing[way.row].chosen(begin, end, static, in_flight, limit)
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
