"""The least time of the busiest device: a binary search over questions, for the graph as it is and put in a line."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pipeplan.errors import InfeasibleError, SearchTimeoutError
from pipeplan.partition.graph.feasibility import Entry, EntryTrace, Feasibility, Solution
from pipeplan.partition.graph.shapes import PartBounds, Shapes, grouped
from pipeplan.partition.problem import Costs, Partition, PartitionProblem, Way, together
from pipeplan.partition.series_parallel import Part, SeriesParallel, decompose, in_line, topological_order
from pipeplan.units import format_bytes, named_devices

Staged = tuple[tuple[str, ...], Way]
"""Blocks of a stage and how it runs."""


@dataclass(frozen=True, slots=True)
class GraphPartition(Partition):
    """The stages with the least bottleneck, the decomposition they come from, and which candidate had them.

    ``value_ns`` is the time of the busiest device for the mini-batch, and ``series_parallel_ns`` that of the graph as
    it is, None if nothing fits.
    """

    decomposition: SeriesParallel = field(kw_only=True)
    candidate: Literal["series-parallel", "line"] = field(kw_only=True)
    series_parallel_ns: int | None = field(kw_only=True)


def graphpipe(problem: PartitionProblem, *, grain: int = 0, tolerance: float = 0.0) -> Iterator[GraphPartition]:
    """Stages with the least time of the busiest device, of all that the decomposition and the lines can reach.

    The lines are the blocks in the order they were given in (as far as edges let them) and in the order of the
    decomposition. Of equal partitions those of the decomposition are taken, with few samples in flight, then few
    devices. With a ``grain`` blocks in series are taken together as long as they take at most that many ns of the
    mini-batch (GraphPipe 3.5): quicker, and the optimum may be missed. With a ``tolerance`` the result is at most so
    much above the optimum, as a share of it. There is one such partition.

    Raises:
        InfeasibleError: nothing fits; the text says with how much memory something would.
    """
    weights = {block: problem.work(costs) for block, costs in problem.costs.items()}
    found = decompose(tuple(problem.costs), problem.edges, weights)
    best: tuple[int, list[Staged]] | None = None
    series_parallel: int | None = None
    for tree in _candidates(problem, found.tree):
        shapes = Shapes(problem, grouped(tree, weights, grain) if grain else tree)
        better = _least(shapes, None if best is None else best[0], tolerance)
        if tree is found.tree and better is not None:
            series_parallel = better[0]
        best = better or best
    if best is None:
        raise InfeasibleError(_told(problem, found.tree))
    yield GraphPartition(
        problem.placed(best[1], sized=True),
        best[0],
        optimal=not grain and not tolerance,
        decomposition=found,
        candidate="series-parallel" if best[0] == series_parallel else "line",
        series_parallel_ns=series_parallel,
    )


def _candidates(problem: PartitionProblem, tree: Part) -> list[Part]:
    """The decomposition and the lines, each once."""
    if all(part.kind == "block" for part in tree.parts) and tree.kind != "parallel":
        return [tree]
    orders = dict.fromkeys((tree.blocks, topological_order(tuple(problem.costs), problem.edges)))
    return [tree, *map(in_line, orders)]


def _least(shapes: Shapes, below: int | None, tolerance: float) -> tuple[int, list[Staged]] | None:
    """The least bottleneck (below a given one) and its stages; None if there is none.

    From what the bounds allow upwards in growing steps, then by halves; what is found is as good as it is, not as
    what was asked, so the end is exact.
    """
    most = _longest(shapes) if below is None else int((below - 1) / (1 + tolerance))
    low = _lowest(shapes.unlimited(), -(-shapes[shapes.root].work // shapes.problem.num_devices), most, tolerance)
    if shapes.needs.limited:
        low = _lowest(shapes, low, most, max(tolerance, 0.001))
    asked = low
    best: tuple[int, list[Staged]] | None = None
    step = max(1, low // 1024)
    while low <= most and (best is None or most - low >= tolerance * low):
        try:
            solution = _answer(shapes, asked)
        except SearchTimeoutError:
            if best is None:
                raise
            return best
        if solution is not None:
            best = _read(shapes, solution)
            most = best[0] - 1
        else:
            low = asked + 1
        asked, step = (min(low + step, most), 2 * step) if best is None else ((low + most) // 2, step)
    return best


def _lowest(shapes: Shapes, low: int, most: int, tolerance: float) -> int:
    """The least bottleneck from ``low`` on that the bounds allow, or less by the tolerance; above ``most`` if none."""
    num_devices = shapes.problem.num_devices
    step, high = max(1, low // 64), min(low, most)
    while PartBounds(shapes, high).fewest() > num_devices:
        far = low < 8 * step <= 2 * low  # once, before all that is left is tried in vain
        if high == most or (far and PartBounds(shapes, most).fewest() > num_devices):
            return most + 1
        low, high, step = high + 1, min(most, high + step), 2 * step
    while high - low > tolerance * low:
        middle = (low + high) // 2
        low, high = (low, middle) if PartBounds(shapes, middle).fewest() <= num_devices else (middle + 1, high)
    return low


def _answer(shapes: Shapes, most_ns: int) -> Solution | None:
    """Stages that take at most so long."""
    return Feasibility(PartBounds(shapes, most_ns), shapes.problem.num_devices).answer()


def _longest(shapes: Shapes) -> int:
    """More than any stage can take."""
    load = shapes[shapes.root].load
    return max(shapes.problem.time_of(load, choice) for choice in shapes.problem.ways)


def _read(shapes: Shapes, solution: Solution) -> tuple[int, list[Staged]]:
    """A solution's bottleneck and stages, in topological order."""
    problem = shapes.problem
    stages = list(_stages(shapes, shapes.tree, solution.trace))
    times = [problem.time_of(_load(problem, blocks), choice) for blocks, choice in stages]
    return max(times), stages


def _load(problem: PartitionProblem, blocks: Sequence[str]) -> Costs:
    return together(problem.costs[name] for name in blocks)


def _stages(shapes: Shapes, part: Part, trace: EntryTrace | None) -> Iterator[Staged]:
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


def _branches(shapes: Shapes, branches: Sequence[tuple[int, Part]], trace: EntryTrace | None) -> Iterator[Staged]:
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


def _entries(trace: EntryTrace | None) -> Iterator[Entry]:
    while trace is not None:
        yield trace.entry
        trace = trace.rest


def _told(problem: PartitionProblem, tree: Part) -> str:
    """Why nothing fits, and what memory would do, as far as there is time to find out."""
    assert problem.memory_bytes is not None  # without a limit one block per stage, or all in one, is a solution
    devices = named_devices(problem.num_devices)
    try:
        enough = f"{devices} of {format_bytes(_enough(problem, tree))} would do"
    except SearchTimeoutError:
        enough = "with more --time-limit it is said how far"
    return (
        f"no partition onto {devices} of {format_bytes(problem.memory_bytes)} fits; {enough}; raise --memory or "
        "--devices, or allow smaller micro-batches"
    )


def _enough(problem: PartitionProblem, tree: Part) -> int:
    """Bytes per device that let something fit; with a hundredth less nothing does."""
    low, high = problem.memory_bytes or 1, 2 * (problem.memory_bytes or 1)
    while not _fits(replace(problem, memory_bytes=high), tree):
        low, high = high, 2 * high
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(replace(problem, memory_bytes=middle), tree) else (middle, high)
    return high


def _fits(problem: PartitionProblem, tree: Part) -> bool:
    shapes = Shapes(problem, tree)
    return _answer(shapes, _longest(shapes)) is not None
