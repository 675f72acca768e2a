"""AutoPipe's pipeline simulator: the time of one iteration of 1F1B, its critical path and its master stage.

Where the paper takes the first micro-batch's way for the whole warmup (III-B1), here every action has its exact time.
In 1F1B stage x of p runs a forward in every other wave and a backward in the waves between them,

    the forward of micro-batch m in wave 2m + x,          its backward in wave 2m + 2p - 1 - x

and what an action waits for is in earlier waves, so that one pass over the waves is enough. A transfer takes time but
no stage's time, as everywhere in pipeplan; the paper's formulas let a stage wait for it even where its input came long
before, which is the same where transfers are free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from pipeplan.partition.chain.costs import StageTimes

__all__ = ["Measured", "Step", "Timeline", "measured", "steps_in_order", "timeline"]

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
        So many steps ``repeated`` belong to the stage where the path is once the steady phase repeats itself.
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
        by the same on all stages, all further ones are, too. As many waves as the path may need to get to the stage
        where it stays are left after it.
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
    for wave in range(waves):
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
    fewer, steps = 4 * stages.num_stages, 0
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
