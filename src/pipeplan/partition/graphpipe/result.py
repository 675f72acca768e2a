"""What is found: stages that form a graph, and whether such a graph is valid (GraphPipe 3.3, C1 to C5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

from pipeplan.partition.graphpipe.problem import Choice, Problem, Row
from pipeplan.partition.in_flight import KFKB, samples_in_flight

__all__ = ["GraphStage", "StageGraph", "Staged", "problems_of"]

Edges = Sequence[tuple[str, str]]

Staged = tuple[tuple[str, ...], Choice]
"""Blocks of a stage and how it runs."""


@dataclass(frozen=True, slots=True)
class GraphStage:
    """Blocks that run together, in order, on devices that each take their share of every micro-batch.

    ``in_flight`` is in samples; ``k`` is that of its kFkB schedule.
    """

    blocks: tuple[str, ...]
    devices: tuple[int, ...]
    microbatch_size: int
    in_flight: int
    k: int = 1
    recompute: bool = False

    @property
    def replicas(self) -> int:
        """Devices that split the samples."""
        return len(self.devices)

    def schedule(self, mini_batch: int) -> Iterator[str]:
        """``"F"`` and ``"B"`` in the order of its kFkB schedule; each kind goes through the micro-batches in order."""
        count = mini_batch // self.microbatch_size
        forwards = min(count, -(-self.in_flight // self.microbatch_size))
        backwards = 0
        yield from "F" * forwards
        while backwards < count:
            some = min(self.k, count - backwards)
            yield from "B" * some
            backwards += some
            more = min(self.k, count - forwards)
            yield from "F" * more
            forwards += more


@dataclass(frozen=True, slots=True)
class StageGraph:
    """Stages in topological order and the edges between them, by their indices.

    ``bottleneck_ns`` is the time of the busiest device for the mini-batch of ``mini_batch`` samples.
    """

    stages: tuple[GraphStage, ...]
    edges: tuple[tuple[int, int], ...]
    mini_batch: int
    bottleneck_ns: int

    @property
    def time_per_sample_ns(self) -> float:
        """Time of the bottleneck stage per sample: what the paper minimises."""
        return self.bottleneck_ns / self.mini_batch

    @property
    def num_devices(self) -> int:
        """Devices that have a stage."""
        return sum(stage.replicas for stage in self.stages)

    @property
    def depth(self) -> int:
        """Stages on the longest path."""
        depths = [1] * len(self.stages)
        for source, target in self.edges:  # in the order of their sources
            depths[target] = max(depths[target], depths[source] + 1)
        return max(depths)

    @classmethod
    def of(cls, stages: Sequence[Staged], edges: Edges, mini_batch: int, bottleneck_ns: int) -> StageGraph:
        """Stages in topological order, with 1F1B.

        Devices are numbered in the order of stages; samples in flight follow from the stages after each.
        """
        stage_of = {block: index for index, (blocks, _) in enumerate(stages) for block in blocks}
        crossing = tuple(sorted({(stage_of[a], stage_of[b]) for a, b in edges if stage_of[a] != stage_of[b]}))
        in_flight = _in_flight([choice.microbatch_size for _, choice in stages], crossing, mini_batch)
        found, first = [], 0
        for (blocks, choice), held in zip(stages, in_flight, strict=True):
            devices = tuple(range(first, first + choice.replicas))
            found.append(GraphStage(blocks, devices, choice.microbatch_size, held, recompute=choice.recompute))
            first += choice.replicas
        return cls(tuple(found), crossing, mini_batch, bottleneck_ns)

    @staticmethod
    def choice_of(problem: Problem, stage: GraphStage) -> Choice:
        """How a stage runs, among the problem's choices."""
        row = problem.rows.index(Row(stage.microbatch_size // stage.replicas, stage.recompute))
        return Choice(stage.microbatch_size, stage.replicas, row, stage.recompute)

    @classmethod
    def memory_of(cls, problem: Problem, stage: GraphStage) -> int:
        """Bytes on each device of a stage."""
        load = reduce(add, (problem.loads[block] for block in stage.blocks))
        return problem.memory_of(load, cls.choice_of(problem, stage), stage.in_flight)


def _in_flight(sizes: Sequence[int], edges: Iterable[tuple[int, int]], mini_batch: int) -> list[int]:
    """[stage] samples in flight with 1F1B."""
    held = list(sizes)
    for source, target in sorted(edges, reverse=True):
        needed = samples_in_flight(KFKB(1, sizes[source]), KFKB(1, sizes[target]), held[target])
        held[source] = min(mini_batch, max(held[source], needed))
    return held


def problems_of(graph: StageGraph, edges: Edges) -> tuple[str, ...]:
    """What makes a stage graph invalid for blocks with these edges: one line each, empty if it is valid.

    C1: every block is in one stage and stages are convex; C2: edges between blocks are edges between stages, and
    those have no cycle; C3: every stage has devices of its own; C4: a stage's schedule runs every micro-batch once
    forward and then once backward; C5: the schedules of all stages together can be run to the end.
    """
    checks = (_blocks(graph, edges), _edges(graph, edges), _devices(graph), _schedules(graph))
    found = tuple(line for check in checks for line in check)
    return found or tuple(_stuck(graph))


def _blocks(graph: StageGraph, edges: Edges) -> Iterator[str]:
    """C1, but for convexity: in a graph of stages without cycles every stage is convex."""
    counts = Counter(block for stage in graph.stages for block in stage.blocks)
    for block, count in counts.items():
        if count > 1:
            yield f"C1: block {block!r} is in {count} stages"
    for block in sorted({block for edge in edges for block in edge} - set(counts)):
        yield f"C1: block {block!r} is in no stage"


def _edges(graph: StageGraph, edges: Edges) -> Iterator[str]:
    stage_of = {block: index for index, stage in enumerate(graph.stages) for block in stage.blocks}
    for source, target in edges:
        pair = (stage_of.get(source, 0), stage_of.get(target, 0))
        if pair[0] > pair[1]:
            yield f"C1: stages are not convex or not in order: {source!r} of stage {pair[0]} is before {target!r}"
        elif pair[0] < pair[1] and pair not in graph.edges:
            yield f"C2: {source!r} -> {target!r} has no edge from stage {pair[0]} to stage {pair[1]}"


def _devices(graph: StageGraph) -> Iterator[str]:
    counts = Counter(device for stage in graph.stages for device in stage.devices)
    for device, count in counts.items():
        if count > 1:
            yield f"C3: device {device} is given {count} times"
    for index, stage in enumerate(graph.stages):
        if not stage.devices:
            yield f"C3: stage {index} has no device"


def _schedules(graph: StageGraph) -> Iterator[str]:
    for index, stage in enumerate(graph.stages):
        if graph.mini_batch % stage.microbatch_size or stage.microbatch_size % max(1, stage.replicas):
            yield f"C4: stage {index} cannot split {graph.mini_batch} samples into micro-batches and replicas"
            continue
        ahead = most = 0
        for kind in stage.schedule(graph.mini_batch):
            ahead += 1 if kind == "F" else -1
            most = max(most, ahead)
            if ahead < 0:
                yield f"C4: stage {index} runs a backward before its forward"
                break
        if most > max(stage.k, -(-stage.in_flight // stage.microbatch_size)):
            yield f"C4: stage {index} has {most} micro-batches in flight, {stage.in_flight} samples are said"


def _stuck(graph: StageGraph) -> Iterator[str]:
    """C5, by running all schedules at once: what waits for samples that do not come."""
    left = [list(reversed(list(stage.schedule(graph.mini_batch)))) for stage in graph.stages]
    done = [{"F": 0, "B": 0} for _ in graph.stages]
    ahead = {"F": [[a for a, b in graph.edges if b == s] for s in range(len(left))]}
    ahead["B"] = [[b for a, b in graph.edges if a == s] for s in range(len(left))]
    moved = True
    while moved:
        moved = False
        for index, (rest, stage) in enumerate(zip(left, graph.stages, strict=True)):
            while rest and all(
                done[other][rest[-1]] >= done[index][rest[-1]] + stage.microbatch_size
                for other in ahead[rest[-1]][index]
            ):
                done[index][rest.pop()] += stage.microbatch_size
                moved = True
    for index, rest in enumerate(left):
        if rest:
            yield f"C5: stage {index} waits for {rest[-1]} of sample {done[index][rest[-1]]} without end"
