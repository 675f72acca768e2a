"""The least time of the busiest device: a binary search over questions, for the graph as it is and put in a line."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Literal

from pipeplan.errors import InfeasibleError
from pipeplan.partition.graphpipe.grouping import grouped
from pipeplan.partition.graphpipe.problem import Choice, Problem
from pipeplan.partition.graphpipe.question import Entry, Question, Solution, Trace
from pipeplan.partition.graphpipe.result import StageGraph
from pipeplan.partition.graphpipe.shapes import Shapes
from pipeplan.partition.series_parallel import Part, SeriesParallel, decompose, in_line, topological_order
from pipeplan.units import format_bytes

__all__ = ["Partition", "partition"]

Chosen = tuple[tuple[str, ...], int, int]
"""Of a stage: blocks, micro-batch size, replicas."""

Staged = tuple[tuple[str, ...], Choice]


@dataclass(frozen=True, slots=True)
class Partition:
    """The stages with the least bottleneck, the decomposition they come from, and which candidate had them.

    ``series_parallel_ns`` is the bottleneck of the graph as it is, None if nothing fits.
    """

    graph: StageGraph
    decomposition: SeriesParallel
    candidate: Literal["series-parallel", "line"]
    series_parallel_ns: int | None


def partition(problem: Problem, *, grain: int = 0, tolerance: float = 0.0) -> Partition:
    """Stages with the least time of the busiest device, of all that the decomposition and the lines can reach.

    The lines are the blocks in the order they were given in (as far as edges let them) and in the order of the
    decomposition. Of equal partitions those of the decomposition are taken, with few samples in flight, then few
    devices. With a ``grain`` blocks in series are taken together as long as they make at most so many ns for the
    mini-batch (GraphPipe 3.5): quicker, and the optimum may be missed. With a ``tolerance`` the result is at most so
    much above the optimum, as a share of it.

    Raises:
        InfeasibleError: nothing fits; the text says on how many devices or with how much memory something would.
    """
    weights = {block: problem.work(load) for block, load in problem.loads.items()}
    found = decompose(tuple(problem.loads), problem.edges, weights)
    best: tuple[int, list[Chosen]] | None = None
    series_parallel: int | None = None
    for tree in _candidates(problem, found.tree):
        shapes = Shapes(problem, grouped(tree, weights, grain) if grain else tree)
        better = _least(shapes, None if best is None else best[0], tolerance)
        if tree is found.tree and better is not None:
            series_parallel = better[0]
        best = better or best
    if best is None:
        raise InfeasibleError(_why(problem, found.tree))
    graph = StageGraph.of(best[1], problem.edges, problem.mini_batch, best[0])
    return Partition(graph, found, "series-parallel" if best[0] == series_parallel else "line", series_parallel)


def _candidates(problem: Problem, tree: Part) -> list[Part]:
    """The decomposition and the lines, each once."""
    if all(part.kind == "block" for part in tree.parts) and tree.kind != "parallel":
        return [tree]
    orders = dict.fromkeys((tree.blocks, topological_order(tuple(problem.loads), problem.edges)))
    return [tree, *map(in_line, orders)]


def _least(shapes: Shapes, below: int | None, tolerance: float) -> tuple[int, list[Chosen]] | None:
    """The least bottleneck (below a given one) and its stages; None if there is none.

    From what all devices could do together upwards in growing steps, then by halves; what is found is as good as it
    is, not as what was asked, so the end is exact.
    """
    problem = shapes.problem
    most = _longest(shapes) if below is None else int((below - 1) / (1 + tolerance))
    low, limited = -(-shapes[shapes.root].work // problem.num_devices), problem.memory_bytes is not None
    best: tuple[int, list[Chosen]] | None = None
    step = max(1, low // 64)
    asked = most if below is not None else low
    while low <= most and (best is None or most - low >= tolerance * low):
        solution = Question(shapes, asked, problem.num_devices, limited).answer()
        if solution is not None:
            best = _read(shapes, solution)
            most = best[0] - 1
        elif best is None and below is not None:
            return None
        else:
            low = asked + 1
        asked, step = (min(low + step, most), 2 * step) if best is None else ((low + most) // 2, step)
    if best is None or limited:
        return best
    solution = Question(shapes, best[0], problem.num_devices, True).answer()
    return best if solution is None else _read(shapes, solution)


def _longest(shapes: Shapes) -> int:
    """More than any stage can take."""
    load = shapes[shapes.root].load
    return max(shapes.problem.time_of(load, choice) for choice in shapes.problem.choices)


def _read(shapes: Shapes, solution: Solution) -> tuple[int, list[Chosen]]:
    """A solution's bottleneck and stages, in topological order."""
    problem = shapes.problem
    stages = list(_stages(shapes, shapes.tree, solution.trace))
    times = [
        problem.time_of(reduce(add, (problem.loads[name] for name in blocks)), choice) for blocks, choice in stages
    ]
    return max(times), [(blocks, choice.microbatch_size, choice.replicas) for blocks, choice in stages]


def _stages(shapes: Shapes, part: Part, trace: Trace | None) -> Iterator[Staged]:
    children = part.parts if part.kind == "series" else (part,)
    for entry in _entries(trace):
        names = tuple(name for child in children[entry.begin : entry.end] for name in child.blocks)
        if entry.choice is None:
            branches = [(shapes.of[branch], branch) for branch in children[entry.begin].parts]
            yield from _branches(shapes, branches, entry.inside)
        elif entry.group:
            branches, tail = _shortened(shapes, children[entry.begin - 1], entry)
            yield from _branches(shapes, branches, entry.inside)
            yield tail + names, entry.choice
        else:
            yield names, entry.choice


def _shortened(shapes: Shapes, part: Part, entry: Entry) -> tuple[list[tuple[int, Part]], tuple[str, ...]]:
    """Parallel branches without the end of one of them, and that end's blocks."""
    branches, number = [(shapes.of[branch], branch) for branch in part.parts], entry.group[0]
    at = [shape for shape, _ in branches].index(number)
    branch = branches.pop(at)[1]
    children = branch.parts or (branch,)
    if entry.kept:
        branches.append((shapes.beginning(number, entry.kept), Part("series", children[: entry.kept])))
    return branches, tuple(name for child in children[entry.kept :] for name in child.blocks)


def _branches(shapes: Shapes, branches: Sequence[tuple[int, Part]], trace: Trace | None) -> Iterator[Staged]:
    """Stages of parallel branches: entries name shapes, any branch of that shape will do."""
    of_shape: dict[int, deque[Part]] = defaultdict(deque)
    for number, branch in branches:
        of_shape[number].append(branch)
    for entry in _entries(trace):
        group = [of_shape[number].popleft() for number in entry.group]
        if entry.choice is None:
            yield from _stages(shapes, group[0], entry.inside)
        else:
            yield tuple(name for branch in group for name in branch.blocks), entry.choice


def _entries(trace: Trace | None) -> Iterator[Entry]:
    while trace is not None:
        yield trace.entry
        trace = trace.rest


def _why(problem: Problem, tree: Part) -> str:
    """What would have to be different for anything to fit."""
    assert problem.memory_bytes is not None  # without a limit one block per stage, or all in one, is a solution
    shapes = Shapes(problem, tree)
    most = _longest(shapes)
    many = Question(shapes, most, problem.num_devices * len(problem.loads), True).solutions()
    devices = f"at least {min(each.devices for each in many)} devices of this size" if many else "no number of devices"
    return (
        f"no partition onto {problem.num_devices} devices of {format_bytes(problem.memory_bytes)} fits: "
        f"{devices} would do, or {problem.num_devices} devices of {format_bytes(_enough(problem, tree, most))}; "
        "raise --memory or --devices, or allow smaller micro-batches"
    )


def _enough(problem: Problem, tree: Part, most: int) -> int:
    """Bytes per device that let something fit; with a hundredth less nothing does."""
    low, high = problem.memory_bytes or 1, 2 * (problem.memory_bytes or 1)
    while not _fits(replace(problem, memory_bytes=high), tree, most):
        low, high = high, 2 * high
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(replace(problem, memory_bytes=middle), tree, most) else (middle, high)
    return high


def _fits(problem: Problem, tree: Part, most: int) -> bool:
    return Question(Shapes(problem, tree), most, problem.num_devices, True).answer() is not None
