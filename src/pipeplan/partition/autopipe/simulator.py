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
from operator import itemgetter

from pipeplan.partition.autopipe.loads import StageLoads

__all__ = ["Step", "Timeline", "steps_in_order", "timeline"]

Step = tuple[str, int, int]
"""("F" or "B", stage, micro-batch)."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """1F1B on a chain of stages: when every action ends, in ns, and which one it waited for longest."""

    stages: StageLoads
    num_microbatches: int
    ends: dict[Step, int]
    causes: dict[Step, Step]

    @property
    def iteration_ns(self) -> int:
        """From the first forward to the end of the last backward."""
        return self.ends["B", 0, self.num_microbatches - 1]

    @property
    def startup_ns(self) -> int:
        """When the last stage starts: it has received the first micro-batch."""
        last = self.stages.num_stages - 1
        return self.ends["F", last, 0] - self.stages.forwards[last]

    def critical_path(self) -> list[Step]:
        """The longest path, first to last; of several the one closest to the last stage, as the paper wants it."""
        step = ("B", 0, self.num_microbatches - 1)
        path = [step]
        while step in self.causes:
            step = self.causes[step]
            path.append(step)
        return path[::-1]

    def master_stage(self) -> int:
        """The stage that the critical path passes in the steady phase (III-B).

        That with most steps of the path among those it runs in turn, one forward and one backward; the last of equals.
        """
        counts = Counter(stage for kind, stage, index in self.critical_path() if self._steady(kind, stage, index))
        return max(counts, key=lambda stage: (counts[stage], stage))

    def _steady(self, kind: str, stage: int, index: int) -> bool:
        """Whether a step belongs to the phase in which its stage runs forwards and backwards in turn."""
        started = self.stages.num_stages - stage - 1
        return index >= started if kind == "F" else index < self.num_microbatches - started


def timeline(stages: StageLoads, num_microbatches: int) -> Timeline:
    """Run 1F1B: every action as soon as its stage is free and its input is there."""
    ends: dict[Step, int] = {}
    causes: dict[Step, Step] = {}
    latest: dict[int, Step] = {}
    for step in steps_in_order(stages.num_stages, num_microbatches):
        kind, stage, _ = step
        waits = [(ends[latest[stage]], latest[stage])] if stage in latest else []
        source = _input_of(step, stages.num_stages)
        if source is not None:
            arrival = (ends[source] + stages.transfer_ns, source)
            # of equals the first counts: the one at the later stage
            waits = [*waits, arrival] if kind == "F" else [arrival, *waits]
        start, cause = max(waits, key=itemgetter(0), default=(0, None))
        if cause is not None:
            causes[step] = cause
        ends[step] = start + (stages.forwards if kind == "F" else stages.backwards)[stage]
        latest[stage] = step
    return Timeline(stages, num_microbatches, ends, causes)


def steps_in_order(num_stages: int, num_microbatches: int) -> Iterator[Step]:
    """All actions in an order in which each comes after what it waits for, and on every stage 1F1B's."""
    for wave in range(2 * (num_stages + num_microbatches) - 1):
        for stage in range(num_stages):
            kind, twice = ("F", wave - stage) if (wave - stage) % 2 == 0 else ("B", wave + 1 + stage - 2 * num_stages)
            if 0 <= twice < 2 * num_microbatches:
                yield kind, stage, twice // 2


def _input_of(step: Step, num_stages: int) -> Step | None:
    """What sends a step its input; on the last stage a backward follows its own forward anyway."""
    kind, stage, index = step
    neighbour = stage - 1 if kind == "F" else stage + 1
    return (kind, neighbour, index) if 0 <= neighbour < num_stages else None
