"""AutoPipe's planner: the master stage moved forward from the balanced split on, within memory.

AutoPipe's heuristic search (III-B2): from the balanced split on, move the master stage forward; then polish.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.partition.chain.autopipe_simulator import Measured, measured
from pipeplan.partition.chain.costs import Array, ChainCosts, Place
from pipeplan.partition.chain.kernel import ShortestStages, least_split
from pipeplan.partition.problem import Partition, PartitionProblem, Way
from pipeplan.units import format_bytes

__all__ = ["Cuts", "Fitting", "Planned", "autopipe", "plan_chain"]


@dataclass(frozen=True, slots=True)
class Fitting:
    """Tells of a chain's blocks whether some of them fit into ``memory_bytes`` as a stage.

    A stage holds parameters, gradients, optimizer state, the activations of one micro-batch for itself and one for
    every stage after it, at most of all there are, and the largest workspace. Splitting forwards changes none of it.
    """

    costs: ChainCosts
    memory_bytes: int
    num_microbatches: int

    def needs(self, num_stages: int, stages: Place, begins: Place, ends: Place) -> Array:
        """Bytes of blocks begin..end-1 as that of so many stages."""
        in_flight = np.minimum(self.num_microbatches, num_stages - stages)
        return self.costs.memory(begins, ends, in_flight)

    def fits(self, num_stages: int, stages: Place, begins: Place, ends: Place) -> np.ndarray:
        """Whether blocks begin..end-1 fit as that of so many stages."""
        return self.needs(num_stages, stages, begins, ends) <= self.memory_bytes

    def all_fit(self, begins: Sequence[int]) -> bool:
        """Whether every stage of a cut does."""
        return bool((self._needs_of(begins) <= self.memory_bytes).all())

    def any_cut(self, num_stages: int) -> bool:
        """Whether some cut into so many stages fits."""
        return self._greedy(num_stages, self.memory_bytes) is not None

    def least_bytes(self, num_stages: int) -> tuple[int, int]:
        """The least memory that every device must have for some cut into so many stages, and the stage that needs it.

        At most as many stages as blocks.
        """
        most = int(self.needs(num_stages, 0, 0, self.costs.num_blocks))
        least = bisect_left(range(most), True, key=lambda limit: self._greedy(num_stages, limit) is not None)
        cut = self._greedy(num_stages, least)
        assert cut is not None  # no stage of any cut needs more than all blocks together
        return least, int(self._needs_of(cut).argmax())

    def shortfall(self, num_stages: int) -> str:
        """What is missing for so many stages, in words."""
        (least, stage), most = self.least_bytes(num_stages), self.memory_bytes
        return (
            f"at a depth of {num_stages} stage {stage} needs {format_bytes(least)} at least, "
            f"{format_bytes(max(0, least - most))} more than the {format_bytes(most)} there are"
        )

    def _needs_of(self, begins: Sequence[int]) -> Array:
        """[stage] bytes."""
        bounds = np.array((*begins, self.costs.num_blocks))
        return self.needs(len(begins), np.arange(len(begins)), bounds[:-1], bounds[1:])

    def _greedy(self, num_stages: int, limit: int) -> tuple[int, ...] | None:
        """The cut whose stages, first to last, take as much as fits into ``limit``; None if blocks are left over.

        More blocks never need less, so if any cut fits this one does.
        """
        begins: list[int] = []
        begin, count = 0, self.costs.num_blocks
        for stage in range(num_stages):
            ends = np.arange(begin + 1, count - (num_stages - stage - 1) + 1)
            fitting = int(np.searchsorted(self.needs(num_stages, stage, begin, ends), limit, side="right"))
            if not fitting:
                return None
            begins.append(begin)
            begin = int(ends[fitting - 1])
        return tuple(begins) if begin == count else None


Cuts = tuple[int, ...]
"""The first block of each stage."""

MAX_SIMULATIONS = 1_000
"""Schemes a search looks at before it ends with the best of them; the papers' models need some dozens."""

MAX_STEPS = 2_000_000
"""Actions it simulates before it ends so, about a second's."""

LEAST_POLISHING = 100_000
"""Actions that polishing may simulate at least, some hundredths of a second's; else as many as the search did."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The scheme with the shortest simulated iteration among those looked at.

    ``start_ns`` is the iteration of Algorithm 1's split, where the search started; under a memory limit that may not
    fit, and what is found may take longer.
    """

    begins: Cuts
    iteration_ns: int
    master_stage: int
    start_ns: int
    num_simulated: int


@dataclass(slots=True)
class _AutoPipeSearch:
    costs: ChainCosts
    num_microbatches: int
    balance: ShortestStages
    seen: dict[Cuts, Measured] = field(default_factory=dict)
    num_steps: int = 0

    def run(self, begins: Cuts) -> None:
        """Step 1 to 3 of the paper; everything simulated is in ``seen``."""
        self.look(begins)
        waiting = [begins]
        done: set[Cuts] = set()
        while waiting and len(self.seen) < MAX_SIMULATIONS and self.num_steps < MAX_STEPS:
            current = waiting.pop()
            current = self.settled(current, self.look(current).master_stage)
            master = self.look(current).master_stage
            if current in done or master == 0:
                continue
            done.add(current)
            waiting += [
                shifted for shifted in self.shifted(current, master) if self.look(shifted).master_stage <= master
            ]

    def fitting(self, fits: Fitting | None) -> list[Cuts]:
        """Those of the schemes simulated that fit."""
        return [begins for begins in self.seen if fits is None or fits.all_fit(begins)]

    def polished(self, begins: Cuts, fits: Fitting | None) -> Cuts:
        """Move one border by one block at a time as long as that helps, the best first. Not in the paper."""
        most = min(MAX_STEPS, self.num_steps + max(self.num_steps, LEAST_POLISHING))
        while True:
            best = begins
            for each in self.near(begins):
                if self.num_steps >= most:
                    break
                if (fits is None or fits.all_fit(each)) and self.look(each).iteration_ns < self.look(best).iteration_ns:
                    best = each
            if best == begins:
                return begins
            begins = best

    def near(self, begins: Cuts) -> Iterator[Cuts]:
        """Schemes with one border moved by one block, those next to the master stage first."""
        bounds, master = (*begins, self.costs.num_blocks), self.look(begins).master_stage
        for stage in sorted(range(1, len(begins)), key=lambda stage: abs(2 * (stage - master) - 1)):
            for cut in (bounds[stage] + 1, bounds[stage] - 1):
                if bounds[stage - 1] < cut < bounds[stage + 1]:
                    yield (*begins[:stage], cut, *begins[stage + 1 :])

    def look(self, begins: Cuts) -> Measured:
        """What the scheme takes."""
        if begins not in self.seen:
            self.seen[begins] = measured(self.costs.stages(begins), self.num_microbatches)
            self.num_steps += self.seen[begins].num_steps
        return self.seen[begins]

    def settled(self, begins: Cuts, master: int) -> Cuts:
        """Step 2: no bubble in the master's cooldown; ends early where another stage becomes the master.

        Formula 1: for every s after the master i, forwards and backwards of stages i+1 .. s together take no longer
        than s - i backwards of i. Stages that take longer end sooner, and what they lose goes to the next ones.
        """
        pace, sums = self.costs.stages(begins).backwards[master], self.costs.compute
        for stage in range(master + 1, len(begins) - 1):
            most = sums[begins[master + 1]] + (stage - master) * pace
            end = begins[stage + 1]
            while sums[end] > most and end > begins[stage] + 1:
                end -= 1
            begins = (*begins[: stage + 1], end, *begins[stage + 2 :])
            if self.look(begins).master_stage != master:
                break
        return begins

    def shifted(self, begins: Cuts, master: int) -> Iterator[Cuts]:
        """Step 3: the master's first block to the stage before, or its last to the one after, if it has two or more.

        Each as it is, and with the stages before the moved block balanced anew by Algorithm 1.
        """
        bounds = (*begins, self.costs.num_blocks)
        if bounds[master + 1] - bounds[master] < 2:
            return
        for stage, cut in ((master, bounds[master] + 1), (master + 1, bounds[master + 1] - 1)):
            if stage < len(begins):
                later = (cut, *begins[stage + 1 :])
                yield (*begins[:stage], *later)
                yield (*self.balance.begins_of(cut, stage), *later)


def plan_chain(costs: ChainCosts, num_stages: int, num_microbatches: int, fits: Fitting | None = None) -> Planned:
    """Cut a chain into stages with a short 1F1B iteration: never longer than Algorithm 1's split, where that fits.

    Where nothing fits that is looked at from there, the search starts again from the best balanced split that does.

    Raises:
        UsageError: more stages than blocks, or no micro-batch.
        InfeasibleError: no cut fits.
    """
    if not 1 <= num_stages <= costs.num_blocks or num_microbatches < 1:
        raise UsageError(
            f"{costs.num_blocks} blocks cannot be cut into {num_stages} stages for {num_microbatches} micro-batches; "
            "choose 1 to as many stages as blocks, and at least 1 micro-batch"
        )
    return _planned(costs, num_stages, num_microbatches, fits, ShortestStages.of(costs.compute, num_stages))


def _planned(
    costs: ChainCosts, num_stages: int, num_microbatches: int, fits: Fitting | None, balance: ShortestStages
) -> Planned:
    """The same with Algorithm 1's table at hand."""
    if fits is not None and not fits.any_cut(num_stages):
        raise InfeasibleError(
            f"no cut of {costs.num_blocks} blocks into {num_stages} stages fits into memory: "
            f"{fits.shortfall(num_stages)}; raise --memory or --devices, or lower --microbatch-size"
        )
    search = _AutoPipeSearch(costs, num_microbatches, balance)
    start = balance.begins_of(costs.num_blocks, num_stages)
    search.run(start)
    if fits is not None and not search.fitting(fits):
        search.run(_roomy_start(costs, num_stages, fits))
    best = min(search.fitting(fits), key=lambda begins: (search.seen[begins].iteration_ns, begins))
    best = search.polished(best, fits)
    found = search.seen[best]
    return Planned(best, found.iteration_ns, found.master_stage, search.seen[start].iteration_ns, len(search.seen))


def _roomy_start(costs: ChainCosts, num_stages: int, fits: Fitting) -> Cuts:
    """The split with the least longest stage of those that fit."""

    def cost(stage: int, begins: Array, ends: Array) -> Array:
        return costs.time(begins, ends)

    def fit(stage: int, begins: Array, ends: Array) -> np.ndarray:
        return fits.fits(num_stages, stage, begins, ends)

    begins = least_split(cost, costs.num_blocks, range(num_stages), fit)
    assert begins is not None  # some cut fits
    return begins


@dataclass(frozen=True, slots=True)
class _Depth:
    """So many stages, with as many replicas of the whole pipeline as the ``way`` has."""

    way: Way
    num_stages: int
    num_microbatches: int
    costs: ChainCosts
    fits: Fitting | None

    def summed(self, planned: Planned, problem: PartitionProblem) -> Planned:
        """With the all-reduce of the stage that has most gradients at the end."""
        bounds = np.array((*planned.begins, self.costs.num_blocks))
        sizes = np.diff(self.costs.parameters[bounds]).tolist()
        waiting = max(problem.waiting(size, self.way) for size in sizes)
        return replace(planned, iteration_ns=planned.iteration_ns + waiting, start_ns=planned.start_ns + waiting)


def autopipe(problem: PartitionProblem) -> Iterator[Partition]:
    """The best depth: stages of a chain, with as many replicas of the whole pipeline as there are devices for.

    AutoPipe's data-parallel size is the same for all stages (IV-D): devices divided by stages. Each replica takes its
    share of every micro-batch, so in the paper's terms, where it takes whole ones in turn, micro-batches are larger by
    the number of replicas. What is found is no optimum.

    Raises:
        InfeasibleError: no depth fits.
    """
    order = problem.order
    depths = _depths(problem, order)
    deepest = {depth.way.row: depth for depth in depths}  # few stages come first
    balances = {row: ShortestStages.of(depth.costs.compute, depth.num_stages) for row, depth in deepest.items()}
    best: tuple[_Depth, Planned] | None = None
    for depth in depths:
        balance = balances[depth.way.row]
        least = depth.num_microbatches * int(balance.longest[depth.num_stages - 1][len(order)])
        if best is not None and least >= best[1].iteration_ns:
            continue  # its longest stage alone takes as long
        if depth.fits is None or depth.fits.any_cut(depth.num_stages):
            planned = _planned(depth.costs, depth.num_stages, depth.num_microbatches, depth.fits, balance)
            found = depth.summed(planned, problem)
            if best is None or found.iteration_ns < best[1].iteration_ns:
                best = depth, found
    if best is None:
        raise InfeasibleError(
            f"no pipeline depth that divides {problem.num_devices} devices fits into memory and shares out a "
            f"mini-batch of {problem.mini_batch} samples{_nearest(depths)}; raise --memory or --devices, or lower "
            "--microbatch-size"
        )
    depth, planned = best
    stages = [(order[begin:end], depth.way) for begin, end in pairwise((*planned.begins, len(order)))]
    yield Partition(problem.placed(stages), planned.iteration_ns)


def _depths(problem: PartitionProblem, order: Sequence[str]) -> list[_Depth]:
    """Depths that leave every way's replicas devices of their own and a block for each stage, few stages first."""
    lines: dict[int, ChainCosts] = {}
    found = []
    for way in sorted(problem.ways, key=lambda way: -way.replicas):
        stages, count = problem.num_devices // way.replicas, problem.mini_batch // way.microbatch_size
        if problem.num_devices % way.replicas == 0 and stages <= len(order):
            if way.row not in lines:
                repeats = problem.repeats[way.row] if problem.repeats else ()
                lines[way.row] = ChainCosts.of([problem.costs[block][way.row] for block in order], repeats)
            costs, limit = lines[way.row], problem.memory_bytes
            fits = None if limit is None else Fitting(costs, limit, count)
            found.append(_Depth(way, stages, count, costs, fits))
    return found


def _nearest(depths: Sequence[_Depth]) -> str:
    """What is missing at the depth that needs least, where that is known."""
    known = [(depth.fits, depth.num_stages) for depth in depths if depth.fits is not None]
    if not known:
        return ""
    fits, stages = min(known, key=lambda each: each[0].least_bytes(each[1])[0])
    return f": {fits.shortfall(stages)}"
