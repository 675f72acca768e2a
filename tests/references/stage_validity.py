"""For the tests of GraphPipe's partitioner: costs row by row, and whether stages form a valid graph (3.3, C1 to C5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from builders.states import training_state
from pipeplan.costs import StageCost
from pipeplan.files import PlacedStage, Placement
from pipeplan.partition.graph.in_flight import KFKB, flows, kfkb_word
from pipeplan.partition.problem import Costs
from pipeplan.workload.kinds import Role

Edges = Sequence[tuple[str, str]]


def costs_of(
    times: Sequence[int], activations: Sequence[int], workspaces: Sequence[int], parameters: int = 0, static: int = 0
) -> Costs:
    """A block's costs [row], with so many bytes held all the time."""
    return tuple(
        StageCost(
            time,
            0,
            activation_bytes=held,
            workspace_bytes=workspace,
            state=training_state(parameters, static - 2 * parameters),
        )
        for time, held, workspace in zip(times, activations, workspaces, strict=True)
    )


@dataclass(frozen=True, slots=True)
class StageGraph:
    """Stages in topological order with sizes of their own, the edges between them by index, and samples in flight."""

    stages: tuple[PlacedStage, ...]
    edges: tuple[tuple[int, int], ...]
    mini_batch: int
    in_flight: tuple[int, ...]

    @classmethod
    def of(cls, placement: Placement, edges: Edges, mini_batch: int) -> StageGraph:
        """With 1F1B."""
        stages = placement.stages
        stage_of = {block: index for index, stage in enumerate(stages) for block in stage.blocks}
        crossing = tuple(sorted({(stage_of[a], stage_of[b]) for a, b in edges if stage_of[a] != stage_of[b]}))
        in_flight = flows([stage.microbatch_size or 0 for stage in stages], crossing, mini_batch)
        return cls(stages, crossing, mini_batch, tuple(in_flight))

    @property
    def depth(self) -> int:
        """Stages on the longest path."""
        depths = [1] * len(self.stages)
        for source, target in self.edges:  # in the order of their sources
            depths[target] = max(depths[target], depths[source] + 1)
        return max(depths)

    def size(self, index: int) -> int:
        """Samples in a stage's micro-batch."""
        return self.stages[index].microbatch_size or 0

    def word(self, index: int) -> list[Role]:
        """A stage's 1F1B."""
        return list(kfkb_word(KFKB(1, self.size(index)), self.in_flight[index], self.mini_batch))


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
        if graph.mini_batch % graph.size(index) or graph.size(index) % max(1, stage.replicas):
            yield f"C4: stage {index} cannot split {graph.mini_batch} samples into micro-batches and replicas"
            continue
        ahead = most = 0
        for kind in graph.word(index):
            ahead += 1 if kind is Role.FORWARD else -1
            most = max(most, ahead)
            if ahead < 0:
                yield f"C4: stage {index} runs a backward before its forward"
                break
        if most > max(1, -(-graph.in_flight[index] // graph.size(index))):
            yield f"C4: stage {index} has {most} micro-batches in flight, {graph.in_flight[index]} samples are said"


def _stuck(graph: StageGraph) -> Iterator[str]:
    """C5, by running all schedules at once: what waits for samples that do not come."""
    left = [graph.word(index)[::-1] for index in range(len(graph.stages))]
    done = [{Role.FORWARD: 0, Role.BACKWARD: 0} for _ in graph.stages]
    ahead = {Role.FORWARD: [[a for a, b in graph.edges if b == s] for s in range(len(left))]}
    ahead[Role.BACKWARD] = [[b for a, b in graph.edges if a == s] for s in range(len(left))]
    moved = True
    while moved:
        moved = False
        for index, rest in enumerate(left):
            while rest and all(
                done[other][rest[-1]] >= done[index][rest[-1]] + graph.size(index) for other in ahead[rest[-1]][index]
            ):
                done[index][rest.pop()] += graph.size(index)
                moved = True
    for index, rest in enumerate(left):
        if rest:
            kind = "F" if rest[-1] is Role.FORWARD else "B"
            yield f"C5: stage {index} waits for {kind} of sample {done[index][rest[-1]]} without end"
