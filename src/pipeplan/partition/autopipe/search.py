"""AutoPipe's heuristic search (III-B2): from the balanced split on, move the master stage forward; then polish."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.partition.autopipe.balance import Balance
from pipeplan.partition.autopipe.loads import Cuts, Loads
from pipeplan.partition.autopipe.memory import Fitting
from pipeplan.partition.autopipe.simulator import Measured, measured
from pipeplan.partition.balance import balanced_split

__all__ = ["Fits", "Planned", "plan_chain", "plan_depths"]

Fits = Callable[[int, int, int, int], bool]
"""(stages, stage, begin, end) -> whether blocks begin..end-1 fit as that of so many stages; fewer fit if all do."""

AllReduce = Callable[[Cuts, int], int]
"""(cuts, replicas) -> ns at the end of an iteration in which gradients are summed over the replicas."""

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
    replicas: int = 1

    @property
    def num_stages(self) -> int:
        """Stages of the scheme, each on as many devices as there are replicas."""
        return len(self.begins)


@dataclass(slots=True)
class _Search:
    loads: Loads
    num_microbatches: int
    balance: Balance
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

    def fitting(self, fits: Fits | None) -> list[Cuts]:
        """Those of the schemes simulated that fit."""
        return [begins for begins in self.seen if self.all_fit(begins, fits)]

    def all_fit(self, begins: Cuts, fits: Fits | None) -> bool:
        """Whether every stage does."""
        bounds = pairwise((*begins, self.loads.num_blocks))
        return fits is None or all(fits(len(begins), stage, *each) for stage, each in enumerate(bounds))

    def polished(self, begins: Cuts, fits: Fits | None) -> Cuts:
        """Move one border by one block at a time as long as that helps, the best first. Not in the paper."""
        most = min(MAX_STEPS, self.num_steps + max(self.num_steps, LEAST_POLISHING))
        while True:
            best = begins
            for each in self.near(begins):
                if self.num_steps >= most:
                    break
                if self.all_fit(each, fits) and self.look(each).iteration_ns < self.look(best).iteration_ns:
                    best = each
            if best == begins:
                return begins
            begins = best

    def near(self, begins: Cuts) -> Iterator[Cuts]:
        """Schemes with one border moved by one block, those next to the master stage first."""
        bounds, master = (*begins, self.loads.num_blocks), self.look(begins).master_stage
        for stage in sorted(range(1, len(begins)), key=lambda stage: abs(2 * (stage - master) - 1)):
            for cut in (bounds[stage] + 1, bounds[stage] - 1):
                if bounds[stage - 1] < cut < bounds[stage + 1]:
                    yield (*begins[:stage], cut, *begins[stage + 1 :])

    def look(self, begins: Cuts) -> Measured:
        """What the scheme takes."""
        if begins not in self.seen:
            self.seen[begins] = measured(self.loads.stages(begins), self.num_microbatches)
            self.num_steps += self.seen[begins].num_steps
        return self.seen[begins]

    def settled(self, begins: Cuts, master: int) -> Cuts:
        """Step 2: no bubble in the master's cooldown; ends early where another stage becomes the master.

        Formula 1: for every s after the master i, forwards and backwards of stages i+1 .. s together take no longer
        than s - i backwards of i. Stages that take longer end sooner, and what they lose goes to the next ones.
        """
        pace, sums = self.loads.stages(begins).backwards[master], self.loads.totals
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
        bounds = (*begins, self.loads.num_blocks)
        if bounds[master + 1] - bounds[master] < 2:
            return
        for stage, cut in ((master, bounds[master] + 1), (master + 1, bounds[master + 1] - 1)):
            if stage < len(begins):
                later = (cut, *begins[stage + 1 :])
                yield (*begins[:stage], *later)
                yield (*self.balance.begins_of(cut, stage), *later)


def plan_chain(loads: Loads, num_stages: int, num_microbatches: int, fits: Fits | None = None) -> Planned:
    """Cut a chain into stages with a short 1F1B iteration: never longer than Algorithm 1's split, where that fits.

    Where nothing fits that is looked at from there, the search starts again from the best balanced split that does.

    Raises:
        UsageError: more stages than blocks, or no micro-batch.
        InfeasibleError: no cut fits.
    """
    if not 1 <= num_stages <= loads.num_blocks or num_microbatches < 1:
        raise UsageError(
            f"{loads.num_blocks} blocks cannot be cut into {num_stages} stages for {num_microbatches} micro-batches; "
            "choose 1 to as many stages as blocks, and at least 1 micro-batch"
        )
    return _planned(loads, num_stages, num_microbatches, fits, Balance.of(loads.totals, num_stages))


def _planned(loads: Loads, num_stages: int, num_microbatches: int, fits: Fits | None, balance: Balance) -> Planned:
    """The same with Algorithm 1's table at hand."""
    if isinstance(fits, Fitting) and not fits.any_cut(num_stages):
        raise _too_big(loads, num_stages, fits)
    search = _Search(loads, num_microbatches, balance)
    start = balance.begins_of(loads.num_blocks, num_stages)
    search.run(start)
    if fits is not None and not search.fitting(fits):
        search.run(_roomy_start(loads, num_stages, fits))
    best = min(search.fitting(fits), key=lambda begins: (search.seen[begins].iteration_ns, begins))
    best = search.polished(best, fits)
    found = search.seen[best]
    return Planned(best, found.iteration_ns, found.master_stage, search.seen[start].iteration_ns, len(search.seen))


def _roomy_start(loads: Loads, num_stages: int, fits: Fits) -> Cuts:
    """The split with the least longest stage of those that fit."""
    times = [after - before for before, after in pairwise(loads.totals)]
    begins = balanced_split(times, num_stages, partial(fits, num_stages))
    if begins is None:
        raise _too_big(loads, num_stages, fits)
    return begins


def _too_big(loads: Loads, num_stages: int, fits: Fits) -> InfeasibleError:
    return InfeasibleError(
        f"no cut of {loads.num_blocks} blocks into {num_stages} stages fits into memory{_shortfall(fits, num_stages)}; "
        "raise --memory or --devices, or lower --microbatch-size"
    )


def _shortfall(fits: Fits | None, num_stages: int) -> str:
    """What is missing, where that is known."""
    return f": {fits.shortfall(num_stages)}" if isinstance(fits, Fitting) else ""


def plan_depths(
    loads: Loads,
    num_devices: int,
    num_microbatches: int,
    fits: Fits | None = None,
    all_reduce: AllReduce | None = None,
) -> Planned:
    """Choose the number of stages, too: with as many replicas of the whole pipeline as devices and micro-batches allow.

    AutoPipe's data-parallel size is the same for all stages (IV-D): devices divided by stages. Each replica runs its
    share of the ``num_microbatches``; ``all_reduce`` is added to every iteration with several replicas.

    Raises:
        InfeasibleError: no depth fits.
    """
    best: Planned | None = None
    depths = _depths(num_devices, loads.num_blocks, num_microbatches)
    balance = Balance.of(loads.totals, max(depths, default=1))
    for stages in depths:
        replicas = num_devices // stages
        share = num_microbatches // replicas
        if best is not None and share * balance.longest[stages - 1][loads.num_blocks] >= best.iteration_ns:
            continue  # its longest stage alone takes as long
        if isinstance(fits, Fitting) and not fits.any_cut(stages):
            continue
        try:
            found = _summed(_planned(loads, stages, share, fits, balance), replicas, all_reduce)
        except InfeasibleError:
            continue
        best = found if best is None else min(best, found, key=lambda each: each.iteration_ns)
    if best is None:
        raise InfeasibleError(
            f"no pipeline depth that divides {num_devices} devices fits into memory and shares out {num_microbatches} "
            f"micro-batches{_nearest(fits, depths)}; raise --memory or --devices, or lower --microbatch-size"
        )
    return best


def _summed(planned: Planned, replicas: int, all_reduce: AllReduce | None) -> Planned:
    """The same with the gradients' all-reduce."""
    waiting = all_reduce(planned.begins, replicas) if all_reduce is not None and replicas > 1 else 0
    return Planned(
        planned.begins,
        planned.iteration_ns + waiting,
        planned.master_stage,
        planned.start_ns + waiting,
        planned.num_simulated,
        replicas,
    )


def _depths(num_devices: int, num_blocks: int, num_microbatches: int) -> list[int]:
    """Numbers of stages that divide the devices into replicas with equal shares of the micro-batches."""
    return [
        stages
        for stages in range(1, min(num_devices, num_blocks) + 1)
        if num_devices % stages == 0 and num_microbatches % (num_devices // stages) == 0
    ]


def _nearest(fits: Fits | None, depths: Sequence[int]) -> str:
    """What is missing at the depth that needs least, where that is known."""
    if not isinstance(fits, Fitting) or not depths:
        return ""
    return _shortfall(fits, min(depths, key=lambda stages: fits.least_bytes(stages)[0]))
