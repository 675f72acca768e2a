"""AutoPipe: its pipeline simulator, and its planner, which moves the master stage forward from the balanced split on.

The simulator says the time of one iteration of 1F1B, its critical path and its master stage. Where the paper takes the
first micro-batch's way for the whole warmup (III-B1), here every action has its exact time. In 1F1B stage x of p runs a
forward in every other wave and a backward in the waves between them,

    the forward of micro-batch m in wave 2m + x,          its backward in wave 2m + 2p - 1 - x

and what an action waits for is in earlier waves, so that one pass over the waves is enough. A transfer takes time but
no stage's time, as everywhere in pipeplan; the paper's formulas let a stage wait for it even where its input came long
before, which is the same where transfers are free.

The planner is the paper's heuristic search (III-B2), within memory, and polishes what that finds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from typing import Protocol

import numpy as np

from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.partition.chain.costs import Array, ChainCosts, Fitting, StageTimes
from pipeplan.partition.chain.kernel import ShortestStages, least_split
from pipeplan.partition.problem import NoPartitionError, Partition, PartitionProblem, Way, least_enough
from pipeplan.search_constants import LEAST_POLISHING, MAX_SIMULATED, MAX_SIMULATIONS, MOST_CUTS, SIMULATED_FIRST
from pipeplan.time_limit import checked, checkpoint
from pipeplan.units import format_bytes

Step = tuple[str, int, int]
"""("F" or "B", stage, micro-batch)."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """1F1B on a chain of stages: when every action ends, in ns, and which one it waited for longest.

    ``ending`` and ``causes`` have a cell for each wave and stage, wave by wave; a cause is a cell, or -1 at time 0.
    """

    stages: StageTimes
    num_microbatches: int
    ending: list[int]
    causes: list[int]

    @property
    def ends(self) -> dict[Step, int]:
        """By action."""
        count = self.stages.num_stages
        steps = steps_in_order(count, self.num_microbatches)
        return {step: self.ending[_cell(step, count)] for step in steps}

    @property
    def iteration_ns(self) -> int:
        """From the first forward to the end of the last backward."""
        return self.ending[_cell(("B", 0, self.num_microbatches - 1), self.stages.num_stages)]

    @property
    def startup_ns(self) -> int:
        """When the last stage starts: it has received the first micro-batch."""
        last = self.stages.num_stages - 1
        return self.ending[_cell(("F", last, 0), self.stages.num_stages)] - self.stages.forwards[last]

    def critical_path(self) -> list[Step]:
        """The longest path, first to last; of several the one closest to the last stage, as the paper wants it."""
        return [_step(cell, self.stages.num_stages) for cell in self._backwards()][::-1]

    def master_stage(self, repeated: int = 0) -> int:
        """The stage that the critical path passes in the steady phase (III-B).

        That with most steps of the path among those it runs in turn, one forward and one backward; the last of equals.
        ``repeated`` steps belong to the stage where the path is once the steady phase repeats itself.
        """
        count, first = self.stages.num_stages, self._settled_wave()
        counts: Counter[int] = Counter()
        for cell in self._backwards():
            kind, stage, index = _step(cell, count)
            if self._steady(kind, stage, index):
                counts[stage] += 1
            if repeated and cell // count <= first:
                counts[stage] += repeated
                repeated = 0
        return max(counts, key=lambda stage: (counts[stage], stage))

    def period_ns(self) -> int | None:
        """By how much every further micro-batch lengthens the iteration; None if the steady phase does not repeat yet.

        While all stages run in turn, a wave follows from the one before. So if a wave is the one before the last, later
        by the same on all stages, all further ones are, too.
        """
        count, wave = self.stages.num_stages, self._settled_wave()
        if wave < 2 * count + 1:
            return None
        now, before = (self.ending[at * count : (at + 1) * count] for at in (wave, wave - 2))
        differences = set(map(int.__sub__, now, before))
        return differences.pop() if len(differences) == 1 else None

    def _settled_wave(self) -> int:
        """Twice as many waves as stages before stage 0 runs its last forward."""
        return 2 * (self.num_microbatches - 1 - self.stages.num_stages)

    def _backwards(self) -> Iterator[int]:
        """Cells of the longest path from its end on."""
        cell = _cell(("B", 0, self.num_microbatches - 1), self.stages.num_stages)
        while cell >= 0:
            yield cell
            cell = self.causes[cell]

    def _steady(self, kind: str, stage: int, index: int) -> bool:
        """Whether a step belongs to the phase in which its stage runs forwards and backwards in turn."""
        started = self.stages.num_stages - stage - 1
        return index >= started if kind == "F" else index < self.num_microbatches - started


def timeline(stages: StageTimes, num_microbatches: int) -> Timeline:
    """Run 1F1B: every action as soon as its stage is free and its input is there."""
    count, transfer = stages.num_stages, stages.transfer_ns
    last = count - 1
    waves = 2 * (count + num_microbatches) - 2
    ending, causes, latest = [0] * (waves * count), [-1] * (waves * count), [-1] * count
    for wave in checked(range(waves), 64):
        row = wave * count
        for stage in _forwards_in(wave, count, num_microbatches):
            cause = latest[stage]
            start = ending[cause] if cause >= 0 else 0
            # of equals the one at the later stage counts
            if stage and ((arrival := ending[row - count + stage - 1] + transfer) > start or cause < 0):
                start, cause = arrival, row - count + stage - 1
            cell = latest[stage] = row + stage
            ending[cell], causes[cell] = start + stages.forwards[stage], cause
        for stage in _backwards_in(wave, count, num_microbatches):
            cause = latest[stage]
            start = ending[cause]
            if stage < last and (arrival := ending[row - count + stage + 1] + transfer) >= start:
                start, cause = arrival, row - count + stage + 1
            cell = latest[stage] = row + stage
            ending[cell], causes[cell] = start + stages.backwards[stage], cause
    return Timeline(stages, num_microbatches, ending, causes)


@dataclass(frozen=True, slots=True)
class Measured:
    """What the search asks of a timeline, and how many steps it took to find out."""

    iteration_ns: int
    master_stage: int
    num_steps: int


def measured(stages: StageTimes, num_microbatches: int) -> Measured:
    """Iteration and master stage of the timeline, whose steady phase is not run to its end once it repeats itself."""
    fewer, steps = SIMULATED_FIRST * stages.num_stages, 0
    while fewer < num_microbatches:
        found, more = timeline(stages, fewer), num_microbatches - fewer
        steps += len(found.ending)
        period = found.period_ns()
        if period is not None:
            return Measured(found.iteration_ns + more * period, found.master_stage(2 * more), steps)
        fewer *= 2
    found = timeline(stages, num_microbatches)
    return Measured(found.iteration_ns, found.master_stage(), steps + len(found.ending))


def _forwards_in(wave: int, count: int, num_microbatches: int) -> range:
    """Stages that run a forward in a wave."""
    first = max(wave % 2, wave - 2 * num_microbatches + 2)
    return range(first, min(count, wave + 1), 2)


def _backwards_in(wave: int, count: int, num_microbatches: int) -> range:
    """Stages that run a backward in a wave."""
    first = max((wave + 1) % 2, 2 * count - 1 - wave)
    return range(first, min(count, 2 * (num_microbatches + count) - 2 - wave), 2)


def _cell(step: Step, num_stages: int) -> int:
    kind, stage, index = step
    wave = 2 * index + stage if kind == "F" else 2 * (index + num_stages) - 1 - stage
    return wave * num_stages + stage


def _step(cell: int, num_stages: int) -> Step:
    wave, stage = divmod(cell, num_stages)
    if (wave - stage) % 2 == 0:
        return "F", stage, (wave - stage) // 2
    return "B", stage, (wave + 1 + stage) // 2 - num_stages


def steps_in_order(num_stages: int, num_microbatches: int) -> Iterator[Step]:
    """All actions in an order in which each comes after what it waits for, and on every stage 1F1B's."""
    for wave in range(2 * (num_stages + num_microbatches) - 2):
        for stages in (_forwards_in, _backwards_in):
            for stage in stages(wave, num_stages, num_microbatches):
                yield _step(wave * num_stages + stage, num_stages)


Cuts = tuple[int, ...]
"""The first block of each stage."""


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


class Cuttable(Protocol):
    """Blocks in a line, and what stages of them take."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the chain."""

    def stages(self, begins: Cuts) -> StageTimes:
        """What each stage takes when the chain is cut so."""


class FitTest(Protocol):
    """Knows which cuts fit."""

    def all_fit(self, begins: Cuts) -> bool:
        """Whether all stages of a cut do."""


@dataclass(slots=True)
class _Polish:
    """Borders of a cut moved, one at a time. Not in the paper."""

    line: Cuttable
    num_microbatches: int
    seen: dict[Cuts, Measured] = field(default_factory=dict)
    num_steps: int = 0

    def polished(self, begins: Cuts, fits: FitTest | None) -> Cuts:
        """Move one border by one block at a time as long as that helps, the best first."""
        most = min(MAX_SIMULATED, self.num_steps + max(self.num_steps, LEAST_POLISHING))
        while True:
            best = begins
            for each in checked(self.near(begins), 1):
                if self.num_steps >= most:
                    break
                if (fits is None or fits.all_fit(each)) and self.look(each).iteration_ns < self.look(best).iteration_ns:
                    best = each
            if best == begins:
                return begins
            begins = best

    def near(self, begins: Cuts) -> Iterator[Cuts]:
        """Schemes with one border moved by one block, those next to the master stage first."""
        bounds, master = (*begins, self.line.num_blocks), self.look(begins).master_stage
        for stage in sorted(range(1, len(begins)), key=lambda stage: abs(2 * (stage - master) - 1)):
            for cut in (bounds[stage] + 1, bounds[stage] - 1):
                if bounds[stage - 1] < cut < bounds[stage + 1]:
                    yield (*begins[:stage], cut, *begins[stage + 1 :])

    def look(self, begins: Cuts) -> Measured:
        """What the scheme takes."""
        if begins not in self.seen:
            self.seen[begins] = measured(self.line.stages(begins), self.num_microbatches)
            self.num_steps += self.seen[begins].num_steps
        return self.seen[begins]


@dataclass(slots=True)
class _AutoPipeSearch(_Polish):
    costs: ChainCosts = field(kw_only=True)
    balance: ShortestStages = field(kw_only=True)

    def run(self, begins: Cuts) -> None:
        """Step 1 to 3 of the paper; everything simulated is in ``seen``."""
        self.look(begins)
        waiting = [begins]
        done: set[Cuts] = set()
        while waiting and len(self.seen) < MAX_SIMULATIONS and self.num_steps < MAX_SIMULATED:
            checkpoint()
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


def polished(line: Cuttable, begins: Cuts, num_microbatches: int, fits: FitTest) -> Cuts:
    """The best cut from ``begins``, which fits, by 1F1B, one border moved at a time; of few cuts the best."""
    search, inner = _Polish(line, num_microbatches), range(1, line.num_blocks)
    if math.comb(len(inner), len(begins) - 1) <= MOST_CUTS:
        every = ((0, *cuts) for cuts in checked(combinations(inner, len(begins) - 1), 1))
        begins = min(filter(fits.all_fit, every), key=lambda cuts: search.look(cuts).iteration_ns)
    return search.polished(begins, fits)


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
    costs: ChainCosts,
    num_stages: int,
    num_microbatches: int,
    fits: Fitting | None,
    balance: ShortestStages,
    polish: bool = True,
) -> Planned:
    """The same with Algorithm 1's table at hand; without ``polish`` as the paper's search leaves it."""
    if fits is not None and not fits.any_cut(num_stages):
        given = fits
        enough = least_enough(lambda memory: replace(given, memory_bytes=memory).any_cut(num_stages), fits.memory_bytes)
        would = "" if enough is None else f"; raise --memory to {format_bytes(enough)}"
        raise InfeasibleError(
            f"no cut of {costs.num_blocks} blocks into {num_stages} stages fits into "
            f"{format_bytes(fits.memory_bytes)} per device{would}",
            enough,
        )
    search = _AutoPipeSearch(costs, num_microbatches, costs=costs, balance=balance)
    start = balance.begins_of(costs.num_blocks, num_stages)
    search.run(start)
    if fits is not None and not search.fitting(fits):
        search.run(_fitting_start(costs, num_stages, fits))
    best = min(search.fitting(fits), key=lambda begins: (search.seen[begins].iteration_ns, begins))
    if polish:
        best = search.polished(best, fits)
    found = search.seen[best]
    return Planned(best, found.iteration_ns, found.master_stage, search.seen[start].iteration_ns, len(search.seen))


def _fitting_start(costs: ChainCosts, num_stages: int, fits: Fitting) -> Cuts:
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
    """A number of stages, with as many replicas of the whole pipeline as the ``way`` has."""

    way: Way
    num_stages: int
    num_microbatches: int
    costs: ChainCosts
    fits: Fitting | None

    def summed(self, planned: Planned, problem: PartitionProblem) -> Planned:
        """With the all-reduce of the stage that has most gradients at the end."""
        bounds = np.array((*planned.begins, self.costs.num_blocks))
        sizes = self.costs.gradients(bounds[:-1], bounds[1:]).tolist()
        waiting = max(problem.waiting(size, self.way) for size in sizes)
        return replace(planned, iteration_ns=planned.iteration_ns + waiting, start_ns=planned.start_ns + waiting)


def autopipe(problem: PartitionProblem, polish: bool = True) -> Iterator[Partition]:
    """The best depth: stages of a chain, with as many replicas of the whole pipeline as there are devices for.

    The data-parallel size is the same for all stages (IV-D): devices divided by stages. Each replica takes its share of
    every micro-batch, where in the paper it takes whole ones in turn. What is found is no optimum; without ``polish``
    it is what the paper's search finds.

    Raises:
        NoPartitionError: no depth fits.
        UsageError: no number of replicas shares the devices.
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
            planned = _planned(depth.costs, depth.num_stages, depth.num_microbatches, depth.fits, balance, polish)
            found = depth.summed(planned, problem)
            if best is None or found.iteration_ns < best[1].iteration_ns:
                best = depth, found
    if not depths:
        raise _no_depth(problem)
    if best is None:
        raise NoPartitionError(
            f"no pipeline depth for a mini-batch of {problem.mini_batch} samples fits",
            problem,
            lambda memory: any(
                depth.fits is not None and replace(depth.fits, memory_bytes=memory).any_cut(depth.num_stages)
                for depth in depths
            ),
        )
    depth, planned = best
    stages = [(order[begin:end], depth.way) for begin, end in pairwise((*planned.begins, len(order)))]
    yield Partition(problem.placed(stages), planned.iteration_ns)


def _no_depth(problem: PartitionProblem) -> UsageError:
    """No number of replicas shares the devices and leaves every stage a block."""
    blocks, replicas = len(problem.costs), {way.replicas for way in problem.ways}
    able = [
        count
        for count in range(1, problem.num_devices)
        if any(count % each == 0 and count // each <= blocks for each in replicas)
    ]
    return UsageError(
        f"{problem.num_devices} devices cannot be shared by {', '.join(map(str, sorted(replicas)))} replicas of at "
        f"most {blocks} stages each"
        + (f"; lower --devices to {able[-1]}" if able else f"; raise --devices to {min(replicas)}")
    )


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
