"""What engines did in a simulation, one after another, and how long that takes with an engine's constants.

Where all requests come at once nothing that an engine does depends on how long it takes: who is let in, who is evicted
and which steps are taken follow from lengths and blocks alone. One simulation then tells the times with any constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pipeplan.serving.steps import DecodeTime, EngineConstants, StepCosts


@dataclass(frozen=True, slots=True)
class ServingResult:
    """How requests were served: ``tokens`` written until ``end_ns``, in ``steps``, whose times add up to ``busy``.

    ``moved_ns`` is what moves to host memory and back took, of ``evictions``. Of several engines ``end_ns`` is the
    last one's, and ``busy``, ``moved_ns`` and ``steps`` are of that one. ``waited_ns`` is what an engine waits in the
    mean: for requests, for slower ones in every step, or for the last one at the end.
    """

    tokens: int
    end_ns: float
    busy: DecodeTime
    moved_ns: float
    steps: int
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


class Steps(NamedTuple):
    """An engine's ``steps`` taken together, of so many requests; in the middle step they have so many tokens."""

    engine: int
    steps: int
    requests: int
    longest: int
    total: int


class Moved(NamedTuple):
    """A cache of so many tokens went to host memory, or came back."""

    engine: int
    tokens: int
    evicted: bool


class Waited(NamedTuple):
    """Engines waited for the last of them, and until then at least."""

    engines: tuple[int, ...]
    until_ns: float


@dataclass(slots=True)
class _Clock:
    """What an engine has taken so far."""

    now_ns: float = 0.0
    busy: DecodeTime = field(default_factory=DecodeTime)
    moved_ns: float = 0.0
    steps: int = 0

    def take(self, between: DecodeTime, steps: int) -> None:
        self.busy += between
        self.now_ns += between.total_ns
        self.steps += steps

    def move(self, taken_ns: float) -> None:
        self.moved_ns += taken_ns
        self.now_ns += taken_ns


@dataclass(frozen=True, slots=True)
class ServingCourse:
    """All that engines did; ``at_once`` where all requests were there from the beginning."""

    costs: StepCosts
    engines: int
    at_once: bool
    events: Sequence[Steps | Moved | Waited]

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

    def _timed(self, costs: StepCosts) -> ServingResult:
        clocks = [_Clock() for _ in range(self.engines)]
        for each in self.events:
            match each:
                case Steps(engine, steps, requests, longest, total):
                    clocks[engine].take(costs.step_of(requests, longest, total).times(steps), steps)
                case Moved(engine, tokens):
                    clocks[engine].move(costs.moved_ns(tokens))
                case Waited(engines, until):
                    now = max([until, *(clocks[engine].now_ns for engine in engines)])
                    for engine in engines:
                        clocks[engine].now_ns = now
        last = max(clocks, key=lambda each: each.now_ns)
        return ServingResult(
            tokens=sum(each.steps * each.requests for each in self.events if isinstance(each, Steps)),
            end_ns=last.now_ns,
            busy=last.busy,
            moved_ns=last.moved_ns,
            steps=last.steps,
            evictions=sum(each.evicted for each in self.events if isinstance(each, Moved)),
            waited_ns=sum(last.now_ns - each.busy.total_ns - each.moved_ns for each in clocks) / len(clocks),
        )
