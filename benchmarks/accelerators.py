"""What the accelerators of exact methods bring: CPU seconds with one of them switched off, and what is found then.

``frontier``: the cost frontiers of TensorOpt's models, and of stages inside pipelines; ``graphpipe``: the partitioner
on the models of Table 3.1 and on graphs of many blocks with little memory; ``chain``: cuts for devices that run several
stages, where what counts is the run they promise (:func:`pipeplan.partition.chain.rebalance.run_time`). Every run
is a process of its own, ended after --cpu seconds.

    python benchmarks/accelerators.py [--part frontier,graphpipe,chain] [--cells "on 8"] [--cpu 60]
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import frontier as frontiers
import numpy as np
import stage_frontiers
from tables import machine, markdown, note

import partition as partitions
from pipeplan.costs.clusters import named_cluster
from pipeplan.errors import PipeplanError
from pipeplan.examples import model
from pipeplan.files import read_profile
from pipeplan.partition import placement as strategies
from pipeplan.partition.chain.costs import Chain
from pipeplan.partition.chain.rebalance import run_time
from pipeplan.partition.graph.search import graphpipe
from pipeplan.partition.stage_frontier import StageFrontiers
from pipeplan.sharding.cost_model import CostOptions, cost_model
from pipeplan.sharding.tracking import track

PROFILES = Path(__file__).parents[1] / "profiles"
WORSE, SLOWER = 1.001, 1.5


class Measured(NamedTuple):
    """CPU seconds, and what was found as a number of which less is better; None where it was not found in time."""

    cpu_s: float | None
    value: float | None


Cell = Callable[[], Measured]


@dataclass(frozen=True, slots=True)
class Switch:
    """What stands for an accelerator that is switched off, in place of an attribute of a module (or of its class)."""

    module: str
    attribute: str
    replacement: Any

    def off(self) -> None:
        """Switch it off, for good."""
        owner: Any = importlib.import_module(f"pipeplan.{self.module}")
        *classes, name = self.attribute.split(".")
        for each in classes:
            owner = getattr(owner, each)
        setattr(owner, name, self.replacement)


def timed(call: Callable[[], float]) -> Measured:
    """Processor seconds, since other programs may be running, and the result."""
    begun = time.process_time()
    value = call()
    return Measured(time.process_time() - begun, value)


# Frontiers --------------------------------------------------------------------------------------------------------


def frontier_cells() -> Iterator[tuple[str, Cell]]:
    for name, devices, dimensions, within in (
        ("vgg16", 16, 3, 0.0),
        ("wideresnet", 4, 2, 0.0),
        ("wideresnet", 16, 2, 0.01),
        ("transformer", 16, 2, 0.01),
    ):
        title = f"{name} on {devices}, meshes of {dimensions}, {f'within {within:.0%}' if within else 'exact'}"
        yield title, partial(_frontier, name, devices, dimensions, within)
    for name in stage_frontiers.MODELS:
        yield f"stages of {name}", partial(_stages, name)


def _frontier(name: str, devices: int, dimensions: int, within: float) -> Measured:
    """The value is the factor that was proved."""
    options = CostOptions(mesh_dimensions=dimensions)
    profile, cluster = frontiers.profile_of(name), named_cluster("tensoropt", devices)
    graph = cost_model(profile, cluster, devices, frontiers.BATCH, options=options).graph
    return timed(lambda: max(1 + within, track(graph, within=within).factor))


def _stages(name: str) -> Measured:
    """The value is the sum of what is promised under five memory limits."""
    cluster, profile = named_cluster("tensoropt", stage_frontiers.DEVICES), model(name, shards=(1, 2, 4))

    def call() -> float:
        sizes = stage_frontiers.SIZE, stage_frontiers.NUMBER, stage_frontiers.DEVICES
        own = StageFrontiers(profile, *sizes, (False, True), cluster)
        most = max(cut.memory_bytes for cut in own.fastest(stage_frontiers.DEVICES, None))
        return sum(stage_frontiers.promised(own, int(0.7**step * most)) or 0 for step in range(5))

    return timed(call)


def _everything(graph: Any, besides: Any = None) -> dict[str, Any]:
    """No configuration is left out."""
    return {node.name: np.arange(len(node.configurations)) for node in graph.nodes}


FRONTIER = {
    "at once": Switch("sharding.tracking", "SUMS_AT_ONCE", -1),
    "corridors": Switch("sharding.tracking", "CORRIDOR", 1.0),
    "limits of sums": Switch("sharding.bounds", "Bounds.limit", lambda bounds, key: None),
    "dominance": Switch("partition.per_block_sharding", "undominated", _everything),
}


# GraphPipe --------------------------------------------------------------------------------------------------------


def graphpipe_cells() -> Iterator[tuple[str, Cell]]:
    for name in partitions.PRINTED:
        for devices in partitions.DEVICES:
            yield f"{name} on {devices}", partial(_task, name, devices)
    for blocks, branches, devices in ((100, 1, 1024), (100, 8, 1024), (200, 8, 1024), (400, 1, 32)):
        title = f"{blocks} blocks in {branches} branches on {devices}, little memory"
        yield title, partial(_sized, blocks, branches, devices)


def _task(name: str, devices: int) -> Measured:
    task = partitions.task_of(name, devices)
    return timed(lambda: task.ours().bottleneck_ns)


def _sized(blocks: int, branches: int, devices: int) -> Measured:
    free = partitions.sized(blocks, branches, devices, None)
    static = sum(each[0].static_bytes for each in free.costs.values())
    problem = replace(free, memory_bytes=max(20_000, 2 * static // devices))
    return timed(lambda: next(graphpipe(problem)).value_ns)


def _distinct(devices: Any, totals: Any, differences: Any) -> Any:
    """Solutions that differ, whether others beat them or not."""
    first = np.unique(np.stack((devices, totals, differences)), axis=1, return_index=True)[1]
    return first[np.lexsort((differences[first], totals[first], devices[first]))]


GRAPHPIPE = {
    "least time from bounds": Switch("partition.graph.search", "_lowest", lambda shapes, low, most, tolerance: low),
    "bounds without memory": Switch("partition.graph.shapes", "Shapes.unlimited", lambda shapes: shapes),
    "fronts": Switch("partition.graph.search", "_unbeaten_fronts", _distinct),
}


# Chains -----------------------------------------------------------------------------------------------------------


def chain_cells() -> Iterator[tuple[str, Cell]]:
    for path in sorted(PROFILES.glob("*.json")):
        if read_profile(str(path)).placement is None:
            for strategy in ("circular", "v-shape"):
                for devices, chunks in ((4, 2), (4, 4), (8, 2)):
                    title = f"{path.stem}, {strategy}, {chunks} stages on each of {devices}"
                    yield title, partial(_cut, path, strategy, devices, chunks)


def _cut(path: Path, strategy: str, devices: int, chunks: int) -> Measured:
    profile, cuts = read_profile(str(path)), strategies._cut
    found: list[tuple[Chain, tuple[int, ...]]] = []

    def watched(chain: Chain, allowed: Any) -> tuple[int, ...]:
        found.append((chain, cuts(chain, allowed)))
        return found[-1][1]

    strategies._cut = watched
    size = profile.microbatch_sizes[-1]
    begun = time.process_time()
    try:
        strategies.place(profile, strategy, devices, chunks=chunks, microbatch_size=size)
    except PipeplanError:  # more stages than blocks
        return Measured(0.0, None)
    return Measured(time.process_time() - begun, run_time(*found[-1]))


def _pairs(chain: Chain) -> list[tuple[int, int]]:
    """Neighbouring stages alone."""
    return [(first, first + 2) for first in range(chain.num_stages - 1)]


CHAIN = {
    "exact cuts": Switch("partition.chain.rebalance", "shortest_run", lambda chain, below: None),
    "windows over all devices": Switch("partition.chain.rebalance", "_windows", _pairs),
    "windows": Switch("partition.chain.rebalance", "_windows", lambda chain: []),
}

PARTS = {
    "frontier": (frontier_cells, FRONTIER),
    "graphpipe": (graphpipe_cells, GRAPHPIPE),
    "chain": (chain_cells, CHAIN),
}


def apart(cell: Cell, switch: Switch | None, cpu: int) -> Measured:
    """A cell in a process of its own."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(cell, switch, cpu, send))
    child.start()
    send.close()
    try:
        return Measured(*receive.recv())
    except EOFError:  # it was ended
        return Measured(None, None)
    finally:
        child.join()


def _child(cell: Cell, switch: Switch | None, cpu: int, send: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    if switch is not None:
        switch.off()
    send.send(cell())


def row(name: str, plain: dict[str, Measured], without: dict[str, Measured]) -> tuple[str, ...]:
    """Without an accelerator: cells that are worse, and how many times as long it takes."""
    late = [cell for cell in plain if plain[cell].cpu_s is not None and without[cell].cpu_s is None]
    values = {cell: (plain[cell].value, without[cell].value) for cell in plain}
    worse = {cell: after / before for cell, (before, after) in values.items() if before and after}
    both = list(worse)
    most = max(both, key=lambda cell: worse[cell])
    seconds = [sum(found[cell].cpu_s or 0.0 for cell in both) for found in (plain, without)]
    slowest = max(both, key=lambda cell: (without[cell].cpu_s or 0.0) / max(plain[cell].cpu_s or 0.0, 0.1))
    return (
        name,
        str(len(both) + len(late)),
        str(sum(factor > WORSE for factor in worse.values())),
        f"{worse[most] - 1:+.2%} ({most})" if worse[most] > 1 else "-",
        f"{seconds[0]:.1f}, {seconds[1]:.1f}",
        f"{seconds[1] / seconds[0]:.2f}" + (", slower" if seconds[1] > SLOWER * seconds[0] else ""),
        f"{plain[slowest].cpu_s:.1f}, {without[slowest].cpu_s:.1f} ({slowest})",
        ", ".join(late) or "-",
    )


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default=",".join(PARTS))
    parser.add_argument("--cells", default="", help="only cells with this in their name")
    parser.add_argument("--cpu", type=int, default=60, help="CPU seconds of one run at most")
    asked = parser.parse_args()
    header = ("without", "cells", "worse", "most", "CPU s with, without", "ratio", "slowest", "not in time")
    for part in asked.part.split(","):
        cells, switches = PARTS[part]
        found: dict[str | None, dict[str, Measured]] = {}
        for name, cell in cells():
            if asked.cells in name:
                for off in (None, *switches):
                    measured = apart(cell, None if off is None else switches[off], asked.cpu)
                    found.setdefault(off, {})[name] = measured
                    note(f"{name}, without {off or 'nothing'}: {measured}")
        print(f"\n{part}:\n\n" + markdown(header, [row(off, found[None], found[off]) for off in switches]))
    print(f"\nAt most {asked.cpu} CPU s per run; {machine()}.")


if __name__ == "__main__":
    main()
