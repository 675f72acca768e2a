"""Continuous batching: after every step finished requests leave and others join, as long as the cache has room.

First come, first served, as vLLM has it: who waits in host memory comes back before anyone new is let in, and where
the next step has no room the request that was let in last goes to host memory. Prompts are taken as read: only decode
steps take time, and moves between device and host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pipeplan.serving.course import EnginesWaited, MovedCache, ServedSteps, ServingCourse, ServingResult
from pipeplan.serving.paged_cache import PagedCache
from pipeplan.serving.requests import ServedRequest
from pipeplan.serving.steps import StepCosts

_GROWTH = 0.02
"""Steps are taken together until the mean length has grown by this share: a step's time is nearly linear in it."""


@dataclass(slots=True)
class _Running:
    """A request in the engine: its tokens so far, and how many more it is going to write."""

    tokens: int
    left: int


@dataclass(slots=True)
class _Batching:
    """One engine: its clock, its cache, and who runs, waits in host memory, or has not begun; ``events`` are all's."""

    number: int
    costs: StepCosts
    cache: PagedCache
    most: int
    waiting: deque[ServedRequest]
    events: list[ServedSteps | MovedCache | EnginesWaited]
    now_ns: float = 0.0
    running: list[_Running] = field(default_factory=list)
    away: deque[_Running] = field(default_factory=deque)

    @property
    def done(self) -> bool:
        """Whether everyone has left."""
        return not (self.running or self.away or self.waiting)

    def ready(self) -> int:
        """Let in who may join, let go who must, and say how many steps can be taken; none where nobody runs yet."""
        while True:
            self._admit()
            if not self.running:
                return 0
            steps = self.cache.steps_within([each.tokens for each in self.running], self._until_event())
            if steps:
                return steps
            self._evict()

    def _admit(self) -> None:
        """Let in who has room, with a block for the next token of everyone."""
        while self.away and self._takes(self.away[0].tokens):
            back = self.away.popleft()
            self._move(back.tokens, evicted=False)
            self.running.append(back)
        while not self.away and self.waiting and self.waiting[0].arrival_ns <= self.now_ns:
            if not self._takes(self.waiting[0].prefix_tokens):
                return
            first = self.waiting.popleft()
            self.running.append(_Running(first.prefix_tokens, first.new_tokens))

    def _takes(self, tokens: int) -> bool:
        """Let a request in, if it may: alone it always may, beside others where enough stays free."""
        if not self.running:
            return self.cache.take(tokens)
        spare = max(int(self.costs.constants.watermark * self.cache.capacity), len(self.running) + 1)
        return len(self.running) < self.most and self.cache.take(tokens, spare)

    def _until_event(self) -> int:
        """Steps until someone is done, or may join, or lengths are another matter."""
        steps = min([each.left for each in self.running])
        total = sum([each.tokens for each in self.running])
        steps = min(steps, max(1, int(_GROWTH * total / len(self.running))))
        if self.waiting and self.waiting[0].arrival_ns > self.now_ns and len(self.running) < self.most:
            one = self.costs.step([each.tokens for each in self.running]).total_ns
            steps = min(steps, max(1, int((self.waiting[0].arrival_ns - self.now_ns) / one)))
        return steps

    def advance(self, steps: int) -> None:
        """Take so many steps."""
        lengths = [each.tokens for each in self.running]
        self.cache.used += self.cache.growing(lengths, steps)
        count, half = len(lengths), (steps - 1) // 2  # as long as they are in the middle of these steps
        work = self.costs.work(count, max(lengths) + half, sum(lengths) + half * count)
        self.events.append(ServedSteps(self.number, steps, count, work))
        self.now_ns += self.costs.time(work).total_ns * steps
        for each in self.running:
            each.tokens += steps
            each.left -= steps
            if not each.left:
                self.cache.give_back(each.tokens)
        self.running = [each for each in self.running if each.left]

    def _evict(self) -> None:
        """The one that came last makes room; alone it would fit, which was asked before."""
        last = self.running.pop()
        self.cache.give_back(last.tokens)
        self._move(last.tokens, evicted=True)
        self.away.appendleft(last)

    def _move(self, tokens: int, *, evicted: bool) -> None:
        self.events.append(MovedCache(self.number, tokens, evicted))
        self.now_ns += self.costs.moved_ns(tokens)


def serve(costs: StepCosts, requests: Iterable[ServedRequest], most: int, *, together: bool = False) -> ServingResult:
    """Serve requests as :func:`course` does, and say how long it took."""
    return course(costs, requests, most, together=together).timed()


def course(costs: StepCosts, requests: Iterable[ServedRequest], most: int, *, together: bool = False) -> ServingCourse:
    """Serve requests, at most so many at a time on all devices together, and say what was done.

    Of ``dp`` each request goes to the device with the fewest prompt tokens so far, and stays there. Its devices go on
    by themselves, or take every step ``together``: as processes of one program do, which wait for the slowest.

    Raises:
        InfeasibleError: weights leave no room for a cache, or a request does not fit even alone.
        ValueError: fewer requests at a time than devices with engines of their own, or none at all.
    """
    alone = costs.devices if costs.kept == "dp" else 1
    served = sorted(requests, key=lambda each: each.arrival_ns)
    if most < alone or not served:
        raise ValueError(f"{len(served)} requests, {most} at a time, are nothing to serve on {alone} engines")
    events: list[ServedSteps | MovedCache | EnginesWaited] = []
    shares = enumerate(_shared_out(served, alone))
    engines = [_engine(number, costs, own, most // alone, events) for number, own in shares]
    for each in [engines] if together else [[engine] for engine in engines]:
        _run(each, events)
    return ServingCourse(costs, alone, served[-1].arrival_ns <= 0, events)


def _run(engines: Sequence[_Batching], events: list[ServedSteps | MovedCache | EnginesWaited]) -> None:
    """Serve all requests of engines that take every step together."""
    while left := [each for each in engines if not each.done]:
        able = [(each, steps) for each in left if (steps := each.ready())]
        if not able:
            now = min(each.waiting[0].arrival_ns for each in left)
        else:
            steps = min(own for _, own in able)
            for each, _ in able:
                each.advance(steps)
            now = 0.0
        if len(engines) > 1 or now:
            events.append(EnginesWaited(tuple(each.number for each in engines), now))
            now = max([now, *(each.now_ns for each in engines)])
            for each in engines:
                each.now_ns = now


def _shared_out(requests: Sequence[ServedRequest], engines: int) -> list[list[ServedRequest]]:
    found: list[list[ServedRequest]] = [[] for _ in range(engines)]
    load = [0] * engines
    for each in requests:
        least = load.index(min(load))
        load[least] += each.prefix_tokens
        found[least].append(each)
    return found


def _engine(
    number: int,
    costs: StepCosts,
    requests: Sequence[ServedRequest],
    most: int,
    events: list[ServedSteps | MovedCache | EnginesWaited],
) -> _Batching:
    block = costs.constants.block_tokens
    cache = PagedCache(costs.cache_bytes // (block * costs.token_bytes), block, costs.pieces)
    for each in requests:
        cache.require_room(each.prefix_tokens + each.new_tokens)
    return _Batching(number, costs, cache, most, deque(requests), events)
