"""GraphPipe's partitioner beside its paper, and beside PipeDream's and Piper's planners in the same run.

The three models of GraphPipe (thesis, chapter 3) with estimated V100 costs on its testbed. Asserted: no search takes
longer than the paper says, and no planner here has a slowest stage that is less slow.

    python benchmarks/partition.py [--part search,sums,size,throughput,branches,microbatch,case] [--limit 30]
        [--late-inputs] [--launch-overhead 50us] [--cells 2x16,4x8]

``--cells`` are those of ``branches`` that are asked for, branches by devices; without it all twelve.

With late inputs a stage of a graph begins before all its inputs are there, and waits inside for those that only later
blocks take; a stage of a line has but one input. With a launch overhead every action of every block takes so much more.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise, product
from random import Random
from time import process_time
from typing import Any, TypeVar

from tables import machine, markdown, note

from pipeplan.costs import StageCost, build_workload
from pipeplan.costs.clusters import named_cluster
from pipeplan.costs.communication import all_reduce_time
from pipeplan.costs.devices import device_preset
from pipeplan.costs.late_inputs import with_late_inputs
from pipeplan.costs.launches import with_launches
from pipeplan.costs.recipes import state_of
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.examples import model
from pipeplan.examples.layout import ModelLayout
from pipeplan.examples.models import family_of
from pipeplan.files import Cluster, Edge, PlacedStage, Placement, Profile, Source
from pipeplan.partition.graph.search import graphpipe
from pipeplan.partition.pipedream import pipedream
from pipeplan.partition.piper import piper
from pipeplan.partition.problem import Costs, Partition, PartitionProblem, Pricing, Way, together
from pipeplan.partition.series_parallel import Part, decompose
from pipeplan.schedule.stage_graph import kfkb_orders
from pipeplan.units import ns_of
from pipeplan.workload.engine import with_links
from pipeplan.workload.kinds import GRADIENTS, OPTIMIZER, PARAMETERS, MemoryBytes
from pipeplan.workload.task_graph import earliest_starts, task_graph

DEVICES = (4, 8, 16, 32)
MEMORY = 16_000_000_000
SAMPLES = {"mmt": (1, 64), "dlrm": (4, 256), "candle-uno": (64, 4096)}
"""Least and most samples of a micro-batch on one device that there are costs for."""
PER_DEVICE = {"mmt": 16, "dlrm": 64, "candle-uno": 1024}
"""Mini-batch for each device (3.10.3)."""
PRINTED = {  # Table 3.1: seconds of Piper, PipeDream and GraphPipe
    "mmt-2": ((52.9, 2.57, 0.12), (126, 11.9, 0.76), (304, 44.3, 3.00), (745, 151, 10.11)),
    "dlrm-8": ((None, 6.39, 0.33), (None, 31.3, 2.73), (None, 131, 13.28), (None, 505, 54.6)),
    "candle-uno-8": ((None, 3.84, 0.19), (None, 17.0, 1.43), (None, 66.10, 6.14), (None, 234, 22.37)),
}
CHILD_BYTES = 4 << 30
ASKED = argparse.Namespace(late_inputs=False, launch_overhead=0, cells=())
"""What the command line says of all parts."""

Found = TypeVar("Found")


@cache
def links() -> Cluster:
    return named_cluster("graphpipe")


@cache
def all_reduce(size: int, replicas: int) -> int:
    return all_reduce_time(links(), range(replicas), size)


@dataclass(frozen=True)
class Stages:
    """Of a plan: (blocks, replicas, micro-batch size) of each stage, and its slowest stage in ns per mini-batch."""

    stages: tuple[tuple[tuple[str, ...], int, int], ...]
    bottleneck_ns: int


@dataclass(frozen=True)
class Task:
    """A model on devices, with a mini-batch and sizes to choose from."""

    profile: Profile
    num_devices: int
    mini_batch: int
    sizes: tuple[int, ...]
    memory_bytes: int | None = MEMORY
    late: bool = False

    def ours(self, sizes: Sequence[int] | None = None) -> Stages:
        return read(next(graphpipe(self.problem(self.sizes if sizes is None else sizes))))

    def problem(self, sizes: Sequence[int]) -> PartitionProblem:
        return PartitionProblem.of(
            self.profile,
            self.num_devices,
            self.mini_batch,
            microbatch_sizes=sizes,
            memory_bytes=self.memory_bytes,
            all_reduce=all_reduce,
        )

    def published(self, planner: Callable[[PartitionProblem, int], Stages]) -> list[Stages]:
        """A plan for each size that all stages can have."""
        found = []
        for size in self.sizes:
            with suppress(InfeasibleError, UsageError):
                found.append(planner(self.problem([size]), size))
        return found

    def samples_per_second(self, plan: Stages, in_line: bool, links: bool = True) -> float:
        return self.mini_batch / iteration_ns(self, plan, in_line, links) * 1e9


def task_of(name: str, num_devices: int, mini_batch: int | None = None, profile: Profile | None = None) -> Task:
    kind = next(key for key in SAMPLES if name.startswith(key))
    low, high = SAMPLES[kind]
    each = [1 << power for power in range(high.bit_length()) if low <= 1 << power <= high]
    batch = mini_batch or PER_DEVICE[kind] * num_devices
    sizes = [1 << power for power in range(batch.bit_length()) if low <= 1 << power <= batch]
    found = with_launches(profile or model(name, device="v100-16gb", microbatch_sizes=each), ASKED.launch_overhead)
    return Task(found, num_devices, batch, tuple(sizes), late=ASKED.late_inputs)


def read(found: Partition, size: int = 0) -> Stages:
    stages = found.placement.stages
    return Stages(tuple((s.blocks, s.replicas, s.microbatch_size or size) for s in stages), found.value_ns)


def by_pipedream(problem: PartitionProblem, size: int, *, beside: bool = False) -> Stages:
    """Of its stages those that suit synchronous training, as ours do: sums follow compute; or as its paper has them."""
    return read(next(pipedream(problem, beside=beside)), size)


def by_piper(problem: PartitionProblem, size: int, max_downsets: int = 1 << 40) -> Stages:
    return read(next(piper(problem, max_downsets)), size)


def grouped(tree: Part, weights: Mapping[str, int], grain: int) -> Part:
    """The tree with neighbours in a series, and parallel blocks, taken together while they weigh at most ``grain``."""
    done: list[tuple[Part, int]] = []
    for part in tree.post_order():
        if part.kind == "block":
            done.append((part, sum(weights[name] for name in part.names)))
            continue
        children = done[-len(part.parts) :]
        del done[-len(part.parts) :]
        total = sum(weight for _, weight in children)
        if total <= grain and all(child.kind == "block" for child, _ in children):
            kept = [_merged([child for child, _ in children])]
        else:
            kept = _neighbours(children, grain) if part.kind == "series" else [child for child, _ in children]
        done.append((kept[0] if len(kept) == 1 else Part(part.kind, tuple(kept)), total))
    return done[0][0]


def _neighbours(children: Sequence[tuple[Part, int]], grain: int) -> list[Part]:
    groups: list[tuple[list[Part], int]] = []
    for child, weight in children:
        open_ = groups and groups[-1][0][-1].kind == child.kind == "block"
        if open_ and groups[-1][1] + weight <= grain:
            groups[-1] = ([*groups[-1][0], child], groups[-1][1] + weight)
        else:
            groups.append(([child], weight))
    return [_merged(group) for group, _ in groups]


def _merged(parts: Sequence[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    return Part("block", names=tuple(name for part in parts for name in part.names))


def coarse_piper(problem: PartitionProblem, size: int) -> Stages:
    """Piper with neighbours taken together until it has at most 1,500 downsets."""
    work = {name: costs[problem.ways[0].row].compute_ns for name, costs in problem.costs.items()}
    tree, total = decompose(problem.order, problem.edges, work).tree, sum(work.values())
    for share in (64, 48, 32, 24, 16, 12, 8):
        groups = [part.names for part in grouped(tree, work, total // share).post_order() if part.kind == "block"]
        try:
            plan = by_piper(_joined(problem, groups), size, 1_500)
        except UsageError:
            continue
        members = {group[0]: group for group in groups}
        stages = tuple(
            (tuple(name for block in blocks for name in members[block]), replicas, each)
            for blocks, replicas, each in plan.stages
        )
        return Stages(stages, plan.bottleneck_ns)
    raise UsageError("even large groups have too many downsets")


def _joined(problem: PartitionProblem, groups: Sequence[tuple[str, ...]]) -> PartitionProblem:
    place = {name: index for index, name in enumerate(problem.order)}
    order = sorted(groups, key=lambda group: min(place[name] for name in group))
    of = {name: group[0] for group in order for name in group}
    edges = {(of[a], of[b]) for a, b in problem.edges if of[a] != of[b]}
    costs = {group[0]: together(problem.costs[name] for name in group) for group in order}
    return replace(problem, costs=costs, edges=tuple(sorted(edges)))


# Simulation ----------------------------------------------------------------------------------------------------


def iteration_ns(task: Task, plan: Stages, in_line: bool, links: bool) -> int:
    """An iteration with 1F1B, warmup and cooldown; with ``links`` also messages and gradients' sums.

    ``in_line`` every stage waits for the one before it, as in a sequential pipeline.
    """
    stages, first = [], 0
    for blocks, replicas, size in plan.stages:
        devices = tuple(range(first, first + replicas))
        stages.append(PlacedStage(blocks=blocks, devices=devices, replicas=replicas, microbatch_size=size))
        first += replicas
    profile = _in_line(task.profile, stages) if in_line else task.profile
    placement = Placement(strategy="stage graph", num_devices=first, stages=tuple(stages))
    cluster = named_cluster("graphpipe", first) if links else None
    workload = build_workload(profile, placement, num_microbatches=task.mini_batch, microbatch_size=1, cluster=cluster)
    if task.late and not in_line:
        workload = with_late_inputs(profile, workload, cluster)
    graph = task_graph(workload)
    starts = earliest_starts(graph, with_links(graph, kfkb_orders(workload, graph)))
    ends = [0] * len(workload.stages)
    for item in range(graph.num_actions):
        stage = workload.operations[graph.operation_of[item]].stage
        ends[stage] = max(ends[stage], starts[item] + graph.durations[item])
    return max(end + stage.sync_ns for end, stage in zip(ends, workload.stages, strict=True))


def _in_line(profile: Profile, stages: Sequence[PlacedStage]) -> Profile:
    """With empty edges from each stage to the next, as sequential pipelines have them."""
    extra = tuple(
        Edge(source=before.blocks[-1], target=after.blocks[0], tensor=f"line{index}")
        for index, (before, after) in enumerate(pairwise(stages))
    )
    return profile.model_copy(update={"edges": (*profile.edges, *extra)})


def best(task: Task, plans: Iterable[Stages], *, in_line: bool, links: bool = True) -> tuple[float, Stages]:
    """Samples per second and stages of the plan that simulates best."""
    speeds = ((task.samples_per_second(plan, in_line, links), plan) for plan in plans)
    return max(speeds, key=lambda each: each[0])


def all_ours(task: Task) -> Iterator[Stages]:
    """With free sizes, and with one size for all stages."""
    yield task.ours()
    for size in task.sizes:
        try:
            yield task.ours([size])
        except (InfeasibleError, UsageError):
            continue


def depth(task: Task, plan: Stages, in_line: bool) -> int:
    if in_line:
        return len(plan.stages)
    stage_of = {block: index for index, (blocks, _, _) in enumerate(plan.stages) for block in blocks}
    depths = [1] * len(plan.stages)
    ends = {(stage_of[e.source], stage_of[e.target], e.target) for e in task.profile.edges}
    for source, target, block in sorted(ends):
        if source != target:  # what only a later block takes delays the stage by that block alone
            late = task.late and block != plan.stages[target][0][0]
            depths[target] = max(depths[target], depths[source] + (not late))
    return max(depths)


def shown(task: Task, plan: Stages, in_line: bool) -> str:
    """Micro-batch sizes, and depth in stages."""
    sizes = sorted({size for _, _, size in plan.stages})
    text = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}-{sizes[-1]}"
    return f"{text}, {depth(task, plan, in_line)}"


# Search time -----------------------------------------------------------------------------------------------------


def timed_piper(task: Task, limit: float) -> tuple[float, list[Stages]] | None:
    """Processor seconds and plans; None if time or memory ran out, for which it has a process of its own."""
    receive, send = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.Process(target=_piper_child, args=(task, send))
    child.start()
    found = receive.recv() if receive.poll(limit) else None
    child.kill()
    child.join()
    return found


def _piper_child(task: Task, send: multiprocessing.connection.Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (CHILD_BYTES, CHILD_BYTES))
    try:
        send.send(timed(lambda: task.published(by_piper)))
    except MemoryError:
        note("    Piper: out of memory")
        send.send(None)


def timed(call: Callable[[], Found]) -> tuple[float, Found]:
    """Processor seconds, since other programs may be running, and the result."""
    start = process_time()
    found = call()
    return process_time() - start, found


def search_times(limit: float) -> None:
    task_of("mmt-2", 4).ours()  # imports
    rows, slower = [], []
    for name, printed in PRINTED.items():
        for devices, (_, _, most) in zip(DEVICES, printed, strict=True):
            task = task_of(name, devices)
            rows.append(_search_row(task, printed[DEVICES.index(devices)], limit))
            note(" | ".join(rows[-1]))
            slower += [f"{name} on {devices}"] * (float(rows[-1][2]) > most)
    header: tuple[str, ...] = ("model", "devices", "ours, s", "paper", "PipeDream", "ratio", "paper's ratio")
    header += ("Piper", "ratio", "paper's ratio", "slowest stage: PipeDream's / ours", "Piper's / ours")
    print(markdown(header, rows))
    assert not slower, f"longer than the paper's: {', '.join(slower)}"


def _search_row(task: Task, printed: tuple[float | None, float, float], limit: float) -> list[str]:
    all_reduce.cache_clear()
    seconds, ours = timed(task.ours)
    all_reduce.cache_clear()
    others, lines = timed(lambda: task.published(by_pipedream))
    pipers = timed_piper(task, limit)
    least = min(plan.bottleneck_ns for plan in lines)
    assert ours.bottleneck_ns <= least, "PipeDream's slowest stage is less slow"
    ratios = [
        "-",
        "-",
        "x" if printed[0] is None else f"{printed[0] / printed[2]:.1f}",
        f"{least / ours.bottleneck_ns:.3f}",
        "-",
    ]
    if pipers is not None:
        theirs = min(plan.bottleneck_ns for plan in pipers[1])
        assert ours.bottleneck_ns <= theirs, "Piper's slowest stage is less slow"
        ratios[0], ratios[1] = f"{pipers[0]:.2f}", f"{pipers[0] / seconds:.1f}"
        ratios[4] = f"{theirs / ours.bottleneck_ns:.3f}"
    else:
        ratios[0] = f"not in {limit:.0f} s"
    return [
        task.profile.name,
        str(task.num_devices),
        f"{seconds:.2f}",
        f"{printed[2]:.2f}",
        f"{others:.2f}",
        f"{others / seconds:.1f}",
        f"{printed[1] / printed[2]:.1f}",
        *ratios,
    ]


def sums() -> None:
    """PipeDream's slowest stage, by our time, where its planner has sums of gradients beside compute, as its paper."""
    rows = []
    for name, devices in product(PRINTED, DEVICES):
        task = task_of(name, devices)
        plans = task.published(partial(by_pipedream, beside=True))
        ratio = min(slowest_ns(task, plan) for plan in plans) / task.ours().bottleneck_ns
        rows.append([name, str(devices), f"{ratio:.3f}"])
    print(markdown(("model", "devices", "slowest stage: PipeDream's / ours"), rows))


def slowest_ns(task: Task, plan: Stages) -> int:
    """Of stages that all have micro-batches of one size, the slowest one, with sums after compute."""
    problem = task.problem([plan.stages[0][2]])
    ways = {way.replicas: way for way in problem.ways}
    return max(
        problem.time_of(together(problem.costs[block] for block in blocks), ways[replicas])
        for blocks, replicas, _ in plan.stages
    )


# Cost against size -----------------------------------------------------------------------------------------------


def sized(blocks: int, branches: int, num_devices: int, memory: int | None) -> PartitionProblem:
    """A chain, or branches and a block that joins them; all blocks differ."""
    draw = Random(blocks)
    rows = tuple(Pricing(1 << power) for power in range(6))

    def costs() -> Costs:
        time, held, size = draw.randint(50, 200), draw.randint(5, 20), draw.randint(10, 40)
        return tuple(
            StageCost(
                200 + time * row.samples,
                0,
                activation_bytes=held * row.samples,
                workspace_bytes=held * row.samples // 2,
                state=MemoryBytes({PARAMETERS: 10 * size, GRADIENTS: 10 * size, OPTIMIZER: 40 * size}),
            )
            for row in rows
        )

    if branches == 1:
        lines = [[f"b{index}" for index in range(blocks)]]
        edges = list(pairwise(lines[0]))
    else:
        lines = [[f"b{branch}.{index}" for index in range(blocks // branches)] for branch in range(branches)]
        edges = [pair for line in lines for pair in (*pairwise(line), (line[-1], "join"))]
        lines.append(["join"])
    mini_batch = 4 * num_devices
    ways = [
        Way(size, replicas, row)
        for row, samples in enumerate(each.samples for each in rows)
        for replicas in (1 << power for power in range(num_devices.bit_length()))
        if (size := samples * replicas) <= mini_batch
    ]
    return PartitionProblem(
        {block: costs() for line in lines for block in line},
        tuple(edges),
        num_devices,
        mini_batch,
        rows,
        tuple(ways),
        memory,
        lambda size, replicas: 2 * (replicas - 1) * size // replicas,
    )


def sizes() -> None:
    rows = []
    for branches in (1, 8):
        for blocks, devices in ((50, 1024), (100, 1024), (200, 1024), (400, 32), (400, 128), (400, 512), (400, 1024)):
            free = sized(blocks, branches, devices, None)
            static = sum(costs[0].static_bytes for costs in free.costs.values())
            memory = max(20_000, 2 * static // devices)
            cells = [_sized_cell(free, 0.0), _sized_cell(replace(free, memory_bytes=memory), 0.0)]
            cells.append(_sized_cell(replace(free, memory_bytes=memory), 0.01))
            (plain, plain_ns), (limited, limited_ns), (near, near_ns) = cells
            row = [
                "chain" if branches == 1 else "8 branches",
                str(blocks),
                str(devices),
                f"{plain:.1f}",
                f"{limited:.1f}",
            ]
            rows.append([*row, f"{limited_ns / plain_ns:.2f}", f"{near:.1f}", f"{near_ns / limited_ns - 1:.2%}"])
            note(" | ".join(rows[-1]))
    header = ("graph", "blocks", "devices", "no limit, s", "little memory, s", "slowest stage: little / no limit")
    print(markdown((*header, "tolerance 1 %, s", "above the optimum"), rows))


def _sized_cell(problem: PartitionProblem, tolerance: float) -> tuple[float, int]:
    return timed(lambda: next(graphpipe(problem, tolerance=tolerance)).value_ns)


# Throughput --------------------------------------------------------------------------------------------------------


def compared(task: Task) -> list[str]:
    """Samples per second of ours, and its ratios to PipeDream's and Piper's plans."""
    lines, graphs = task.published(by_pipedream), list(all_ours(task))
    coarse = task.published(coarse_piper)
    ours, theirs = best(task, graphs, in_line=False), best(task, lines, in_line=True)
    silent = best(task, graphs, in_line=False, links=False)[0]
    ratios = [
        ours[0] / theirs[0],
        silent / best(task, lines, in_line=True, links=False)[0],
        ours[0] / best(task, lines, in_line=False)[0],
    ]
    if coarse:
        ratios += [ours[0] / best(task, coarse, in_line=True)[0]]
        ratios += [silent / best(task, coarse, in_line=True, links=False)[0]]
    texts = [f"{ratio:.2f}" for ratio in ratios] + ["x"] * (5 - len(ratios))
    return [f"{ours[0]:,.0f}", shown(task, ours[1], False), shown(task, theirs[1], True), *texts]


HEADER: tuple[str, ...] = (
    "ours, samples/s",
    "ours: sizes, depth",
    "PipeDream: size, depth",
    "ours / PipeDream",
    "without messages",
)
HEADER += ("ours / PipeDream's stages not in a line", "ours / Piper, coarse", "without messages")


def throughputs() -> None:
    rows = []
    for name in SAMPLES:
        for devices in DEVICES:
            rows.append([name, str(devices), *compared(task_of(name, devices))])
            note(" | ".join(rows[-1]))
    print(markdown(("model", "devices", *HEADER), rows))


def branches() -> None:
    """Fig. 3.7, left; of ``--cells`` where they are named, some ten seconds to a minute each."""
    rows = []
    for number, devices in ASKED.cells or product((2, 4, 8, 16), (4, 8, 16)):
        rows.append([str(number), str(devices), *compared(task_of("candle-uno", devices, profile=_uno(number)))])
        note(" | ".join(rows[-1]))
    print(markdown(("branches", "devices", *HEADER), rows))


def _uno(number: int) -> Profile:
    """CANDLE-Uno with another number of branches."""
    each = [1 << power for power in range(6, 13)]
    layout = ModelLayout(device_preset("v100-16gb"), each)
    family: Any = family_of("candle-uno")
    replace(family, branches=number).build(layout)
    return _profile(f"candle-uno-{number}", layout)


def _profile(name: str, layout: ModelLayout) -> Profile:
    source = Source(method="estimated")
    blocks, edges = tuple(layout.blocks), tuple(layout.edges)
    return Profile(name=name, source=source, recipe=layout.recipe, blocks=blocks, edges=edges)


def microbatches() -> None:
    rows = []
    for size in (1, 2, 4, 8, 16, 32):
        task = replace(task_of("mmt", 8, 128), sizes=(size,))
        rows.append([str(size), *compared(task)])
        note(" | ".join(rows[-1]))
    print(markdown(("micro-batch", *HEADER), rows))


# The case study ------------------------------------------------------------------------------------------------------


def case_study() -> None:
    """Fig. 3.8 and 3.9: two branches of four layers on 8 devices, mini-batches of 64; memory so that the line has 2."""
    profile = with_launches(model("graphpipe-case-study"), ASKED.launch_overhead)
    room = _room(profile)
    task = Task(profile, 8, 64, (1, 2, 4, 8, 16), room, late=ASKED.late_inputs)
    line = min(task.published(by_pipedream), key=lambda plan: plan.bottleneck_ns)
    graph = task.ours()
    same = task.ours([line.stages[0][2]])
    rows: list[list[str]] = []
    before: tuple[float, ...] = (0.0, 0.0)
    for name, plan, in_line in (("in a line", line, True), ("graph, same size", same, False), ("graph", graph, False)):
        speeds = tuple(task.samples_per_second(plan, in_line, links) for links in (False, True))
        gains = [f"{now / then - 1:.1%}" if then else "-" for now, then in zip(speeds, before, strict=True)]
        row = [name, str(len(plan.stages)), *shown(task, plan, in_line).split(", ")]
        rows.append([*row, f"{speeds[0]:,.0f}", gains[0], f"{speeds[1]:,.0f}", gains[1]])
        before = speeds
    header = ("plan", "stages", "micro-batch", "depth", "samples/s", "gain", "with messages, samples/s", "gain")
    print(markdown(header, rows))
    print(f"\n{room / 1e9:.2f} GB per device\n")


def _room(profile: Profile) -> int:
    """Bytes that let the graph have micro-batches of 4, of which 5 are in flight, but the line, of 8, only of 2."""
    layer = [block for block in profile.blocks if block.id.startswith("branch0.layer0")]
    rows = [next(row for row in block.costs if row.microbatch_size == 4) for block in layer]
    static = sum(state_of(block, profile.recipe).total for block in layer)
    held = sum(row.activation_bytes for row in rows)
    return static + 6 * held + 2 * max(row.workspace_bytes for row in rows)


PARTS: dict[str, Callable[[], None]] = {
    "sums": sums,
    "size": sizes,
    "throughput": throughputs,
    "branches": branches,
    "microbatch": microbatches,
    "case": case_study,
}


def _cells_of(text: str) -> tuple[tuple[int, int], ...]:
    """[(branches, devices)] of ``2x16,4x8``."""
    pairs = [cell.split("x") for cell in text.split(",")]
    return tuple((int(branches), int(devices)) for branches, devices in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="search,sums,size,throughput,branches,microbatch,case")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for Piper's planner")
    parser.add_argument("--late-inputs", action="store_true")
    parser.add_argument("--launch-overhead", type=ns_of, default=0, help="of each block's actions, such as 50us")
    parser.add_argument("--cells", type=_cells_of, default=(), help="branches x devices, such as 2x16,4x8")
    options = parser.parse_args(namespace=ASKED)
    parts: dict[str, Callable[[], None]] = {**PARTS, "search": partial(search_times, options.limit)}
    for part in options.part.split(","):
        parts[part]()
        print(f"\n{machine()}.\n", flush=True)


if __name__ == "__main__":
    main()
