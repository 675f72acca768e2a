"""Small stage graphs with micro-batch sizes of their own, and all their orders: what is best is found by trying.

A *word* is a stage's order: ``"FFBB"``, forwards and backwards each in the order of micro-batches. Times are found by a
replay written here, with nothing of pipeplan's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pipeplan.schedule.stage_graph import Stages
from pipeplan.workload.elements import Dependency, Device, Hop, Operation, Stage
from pipeplan.workload.task_graph import Orders, TaskGraph
from pipeplan.workload.workload import Workload

Words = tuple[str, ...]
Edges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class StageGraph:
    """Stages in topological order, each on a device of its own.

    ``forward`` and ``backward`` [stage] are ns for one sample, ``lags`` [edge] ns both ways.
    """

    sizes: tuple[int, ...]
    edges: Edges
    mini_batch: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    lags: tuple[int, ...] = ()

    @classmethod
    def balanced(
        cls, sizes: Sequence[int], edges: Edges, mini_batch: int, forward: int = 1, backward: int = 1, lag: int = 0
    ) -> StageGraph:
        """All stages take equally long for a sample."""
        count = len(sizes)
        return cls(tuple(sizes), edges, mini_batch, (forward,) * count, (backward,) * count, (lag,) * len(edges))

    @property
    def delays(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Edges with their lags."""
        return zip(self.edges, self.lags or (0,) * len(self.edges), strict=True)

    @property
    def counts(self) -> list[int]:
        """[stage] micro-batches."""
        return [self.mini_batch // size for size in self.sizes]

    def workload(self, devices: Sequence[tuple[int, ...]] | None = None, split: Collection[int] = ()) -> Workload:
        """The same as pipeplan has it; ``split`` stages run I and W, of the backward's time and one ns more, for B."""
        groups = devices or [(stage,) for stage in range(len(self.sizes))]
        stages = tuple(
            Stage(blocks=(f"b{index}",), devices=group, shards=len(group), microbatch_size=size)
            for index, (size, group) in enumerate(zip(self.sizes, groups, strict=True))
        )
        operations = [self._operation("F", stage, 1) for stage in range(len(stages))]
        dependencies = []
        back = ["I" if stage in split else "B" for stage in range(len(stages))]
        for stage in reversed(range(len(stages))):
            operations.append(self._operation(back[stage], stage, 1))
            dependencies.append(Dependency(source=f"{stage}F", target=f"{stage}{back[stage]}"))
            if stage in split:
                operations.append(self._operation("W", stage, 0))
                dependencies.append(Dependency(source=f"{stage}I", target=f"{stage}W"))
        for (source, target), lag in self.delays:
            for a, b, kind_a, kind_b in ((source, target, "F", "F"), (target, source, back[target], back[source])):
                ends = itertools.product(groups[a][:1], groups[b])
                away = [(x, y) for x, y in ends if y not in groups[a]]
                hops = tuple(Hop(source_device=x, target_device=y, latency_ns=lag) for x, y in away)
                dependencies.append(Dependency(source=f"{a}{kind_a}", target=f"{b}{kind_b}", hops=hops))
        num_devices = 1 + max(device for group in groups for device in group)
        on = (Device(),) * num_devices
        return Workload("graph", "by hand", self.mini_batch, 1, on, stages, tuple(operations), tuple(dependencies))

    def _operation(self, kind: str, stage: int, held: int) -> Operation:
        time = self.sizes[stage] * (self.forward if kind == "F" else self.backward)[stage]
        held *= self.sizes[stage]
        return Operation(
            kind=kind,
            stage=stage,
            duration_ns=time if kind != "W" else 1,
            acquire_bytes=held if kind == "F" else 0,
            release_bytes=0 if kind == "F" else held,
        )


def words_of(graph: TaskGraph, orders: Orders) -> Words:
    """The words of orders in which each device has one stage."""
    kinds = [operation.kind for operation in graph.workload.operations]
    found = []
    for stage in graph.workload.stages:
        order = orders[stage.devices[0]]
        found.append("".join(kinds[graph.operation_of[task]] for task in order))
    return tuple(found)


def forwards_first(case: StageGraph) -> Words:
    """All forwards, then all backwards."""
    return tuple("F" * count + "B" * count for count in case.counts)


def in_flight(word: str) -> int:
    """The most micro-batches in flight."""
    return max(itertools.accumulate(1 if kind == "F" else -1 for kind in word))


@lru_cache
def all_words(count: int) -> list[str]:
    """All orders of a stage with so many micro-batches, backwards first where there is a choice."""

    def longer(word: str, forwards: int, backwards: int) -> Iterator[str]:
        if backwards == count:
            yield word
        if backwards < forwards:
            yield from longer(word + "B", forwards, backwards + 1)
        if forwards < count:
            yield from longer(word + "F", forwards + 1, backwards)

    return list(longer("", 0, 0))


def makespan(
    case: StageGraph, words: Sequence[str | None], ways: Sequence[tuple[int, int]] | None = None
) -> int | None:
    """Iteration time; None if stages wait for each other.

    Of stages without a word all inputs and gradients are there from the start. ``ways`` [stage] are ns before its first
    forward and after its last backward, at the least.
    """
    before, after = zip(*(ways or [(0, 0)] * len(words)), strict=True)
    ends: dict[str, list[list[int]]] = {"F": [[] for _ in words], "B": [[] for _ in words]}
    waits: dict[str, list[list[tuple[int, int]]]] = {"F": [[] for _ in words], "B": [[] for _ in words]}
    for (source, target), lag in case.delays:
        if words[source] and words[target]:
            waits["F"][target].append((source, lag))
            waits["B"][source].append((target, lag))
    free, at, moved = list(before), [0] * len(words), True
    times = {"F": case.forward, "B": case.backward}
    while moved:
        moved = False
        for stage, word in enumerate(words):
            while word and at[stage] < len(word):
                kind = word[at[stage]]
                last = (len(ends[kind][stage]) + 1) * case.sizes[stage] - 1
                needed = [(ends[kind][other], last // case.sizes[other], lag) for other, lag in waits[kind][stage]]
                if any(len(done) <= number for done, number, _ in needed):
                    break
                start = max([free[stage], *(done[number] + lag for done, number, lag in needed)])
                free[stage] = start + times[kind][stage] * case.sizes[stage]
                ends[kind][stage].append(free[stage])
                at[stage] += 1
                moved = True
    done = all(at[stage] == len(word or "") for stage, word in enumerate(words))
    return max(map(int.__add__, free, after)) if done else None


def ways_to_stages(case: StageGraph) -> list[tuple[int, int]]:
    """[stage] ns that inputs take from the first stages, and gradients back to them, at the least."""
    ways = [(0, 0)] * len(case.sizes)
    for (source, target), lag in sorted(case.delays):
        there, back = ways[source]
        size = case.sizes[source]
        there, back = there + case.forward[source] * size + lag, back + case.backward[source] * size + lag
        ways[target] = (max(ways[target][0], there), max(ways[target][1], back))
    return ways


def best_of_all(case: StageGraph) -> tuple[int, list[tuple[int, ...]]]:
    """Least iteration time over all orders, and [stage] micro-batches in flight that no other order with it beats.

    Stages are tried from the last to the first; those chosen so far, with the ways to and from them, never take longer
    than all together.
    """
    ways = ways_to_stages(case)
    best: list[int] = [makespan(case, forwards_first(case)) or 0]
    flights: set[tuple[int, ...]] = set()

    def choose(stage: int, words: list[str | None]) -> None:
        if stage < 0:
            flights.add(tuple(in_flight(word or "") for word in words))
            return
        for word in all_words(case.counts[stage]):
            words[stage] = word
            time = makespan(case, words, ways)
            if time is not None and time <= best[0]:
                if stage == 0 and time < best[0]:
                    best[0] = time
                    flights.clear()
                choose(stage - 1, words)
        words[stage] = None

    choose(len(case.sizes) - 1, [None] * len(case.sizes))
    kept = [flight for flight in flights if not any(_beats(other, flight) for other in flights)]
    return best[0], sorted(kept)


def _beats(one: Sequence[int], other: Sequence[int]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def from_last_to_first(case: StageGraph, schedule: Callable[[int, Callable[[str], int]], str]) -> Words:
    """Words chosen stage by stage, given those of all stages that follow.

    ``schedule`` has the number of micro-batches, and a function that says how long a word makes the stage and those
    that follow it, with all inputs there at the start.
    """
    words: list[str | None] = [None] * len(case.sizes)
    for stage in reversed(range(len(case.sizes))):
        following = _following(case, stage)

        def time(word: str, stage: int = stage, following: set[int] = following) -> int:
            own = [word if s == stage else w if s in following else None for s, w in enumerate(words)]
            found = makespan(case, own)
            return 2**62 if found is None else found

        words[stage] = schedule(case.counts[stage], time)
    return tuple(word or "" for word in words)


def _following(case: StageGraph, stage: int) -> set[int]:
    found = {stage}
    for source, target in sorted(case.edges):
        if source in found:
            found.add(target)
    return found


def connected_graphs(count: int) -> Iterator[Edges]:
    """All edges between so many stages in topological order by which every stage is joined to every other."""
    pairs = list(itertools.combinations(range(count), 2))
    for chosen in itertools.product((False, True), repeat=len(pairs)):
        edges = tuple(pair for pair, there in zip(pairs, chosen, strict=True) if there)
        together = {0}
        for _ in range(count):
            together |= {stage for edge in edges if together & set(edge) for stage in edge}
        if len(together) == count:
            yield edges


def samples_held(graph: TaskGraph, orders: Orders) -> list[int]:
    """[stage] the most samples in flight when devices run in this order."""
    stages = Stages(graph)
    held, most = [0] * stages.count, [0] * stages.count
    for device, order in enumerate(graph.on_devices(orders)):
        for task in order:
            stage = stages.stage_of[graph.operation_of[task]]
            if device == graph.workload.stages[stage].devices[0]:
                held[stage] += stages.taken[task]
                most[stage] = max(most[stage], held[stage])
                held[stage] -= stages.given[task]
    return most
