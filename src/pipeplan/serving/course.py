"""What engines did in a simulation, one after another, and how long that takes with an engine's constants.

Where all requests come at once nothing that an engine does depends on how long it takes: who is let in, who is evicted
and which steps are taken follow from lengths and blocks alone. One simulation then tells the times with any constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from pipeplan.serving.steps import DecodeTime, EngineConstants, StepCosts, StepWork


@dataclass(frozen=True, slots=True)
class ServingResult:
    """How requests were served: ``tokens`` written until ``end_ns``, in ``steps``, whose times add up to ``busy``.

    ``moved_ns`` is what moves to host memory and back took, of ``evictions``. Of several engines ``end_ns`` is the
    last one's, and all others are of an engine in the mean, but for ``tokens`` and ``evictions``, which are of all.
    ``waited_ns`` is for requests, for slower engines in every step, or for the last one at the end; with ``busy`` and
    ``moved_ns`` it adds up to ``end_ns``.
    """

    tokens: int
    end_ns: float
    busy: DecodeTime
    moved_ns: float
    steps: float
    evictions: int
    waited_ns: float

    @property
    def tokens_per_s(self) -> float:
        """Of all requests."""
        return 1e9 * self.tokens / self.end_ns

    @property
    def step_ns(self) -> float:
        """Between two tokens of a request, in the mean, moves included."""
        return (self.busy.total_ns + self.moved_ns) / self.steps


class ServedSteps(NamedTuple):
    """An engine's ``steps`` taken together, of so many requests; each does what the one in the middle does."""

    engine: int
    steps: int
    requests: int
    work: StepWork


class MovedCache(NamedTuple):
    """A cache of so many tokens went to host memory, or came back."""

    engine: int
    tokens: int
    evicted: bool


class EnginesWaited(NamedTuple):
    """Engines waited for the last of them, and until then at least."""

    engines: tuple[int, ...]
    until_ns: float


class _Done(NamedTuple):
    """Arrays of [number, event]: of steps waits before, engine, steps, requests and what :class:`StepWork` has; of
    moves waits before, engine and tokens.
    """

    steps: Any
    moves: Any
    waits: Sequence[EnginesWaited]


@dataclass(frozen=True)
class ServingCourse:
    """All that engines did; ``at_once`` where all requests were there from the beginning."""

    costs: StepCosts
    engines: int
    at_once: bool
    events: Sequence[ServedSteps | MovedCache | EnginesWaited]

    def timed(self, constants: EngineConstants | None = None) -> ServingResult:
        """How long it took, or takes with other constants.

        Raises:
            ValueError: with other constants it would be another course, as requests come later, or blocks differ.
        """
        own = self.costs.constants
        if constants is None or constants == own:
            return self._timed(self.costs)
        blocks = {(each.block_tokens, each.watermark) for each in (own, constants)}
        if not self.at_once or len(blocks) > 1:
            raise ValueError("requests that come later, and other blocks, are served in another order; serve them anew")
        return self._timed(replace(self.costs, constants=constants))

    @cached_property
    def _done(self) -> _Done:
        rows: list[tuple[float, ...]] = []
        moves: list[tuple[int, int, int]] = []
        waits: list[EnginesWaited] = []
        for each in self.events:
            match each:
                case ServedSteps(engine, steps, requests, work):
                    rows.append((len(waits), engine, steps, requests, *work))
                case MovedCache(engine, tokens):
                    moves.append((len(waits), engine, tokens))
                case EnginesWaited():
                    waits.append(each)
        return _Done(np.array(rows).T, np.array(moves, dtype=int).reshape(-1, 3).T, waits)

    def _timed(self, costs: StepCosts) -> ServingResult:
        done = self._done
        rounds, engines = done.steps[:2].astype(int)
        counts = done.steps[2]
        times = costs.time(StepWork(*done.steps[4:])).times(counts)
        moved = np.array([costs.moved_ns(tokens) for tokens in done.moves[2].tolist()])
        taken = np.zeros((len(done.waits) + 1, self.engines))
        np.add.at(taken, (rounds, engines), times.total_ns)
        np.add.at(taken, tuple(done.moves[:2]), moved)
        now = self._ends(taken.tolist())
        parts: tuple[Any, ...] = (times.compute_ns, times.communication_ns, times.host_ns)
        return ServingResult(
            tokens=int(counts @ done.steps[3]),
            end_ns=max(now),
            busy=DecodeTime(*(float(np.sum(each)) / self.engines for each in parts)),
            moved_ns=float(np.sum(moved)) / self.engines,
            steps=float(np.sum(counts)) / self.engines,
            evictions=sum(each.evicted for each in self.events if isinstance(each, MovedCache)),
            waited_ns=max(now) - float(taken.sum()) / self.engines,
        )

    def _ends(self, taken: Sequence[Sequence[float]]) -> list[float]:
        """[engine] when it is done, of [number of waits before][engine] ns."""
        now = [0.0] * self.engines
        for each, wait in zip(taken, [*self._done.waits, None], strict=True):
            now = [before + own for before, own in zip(now, each, strict=True)]
            if wait is not None:
                latest = max([wait.until_ns, *(now[engine] for engine in wait.engines)])
                for engine in wait.engines:
                    now[engine] = latest
        return now
