"""Schedules as rules: what a search through them costs, and how good the best are beside the repetend (FlexPipe).

    python benchmarks/rules.py cost [--devices 2,4,8,16,32] [--processes 2]
    python benchmarks/rules.py bubbles [--limit 10]

``cost`` is FlexPipe's Table 5: all rules of its section 6 (backward first and interleaved, every stage traversal, on
unit steps) on the shared-embedding placement, and on every placement it names with its shared blocks spread, four
micro-batches per device, without and with gradient separation. Seconds are processor time, shared out over the cores.
It fails unless each row from 8 devices on takes at most a tenth of FlexPipe's time. ``bubbles`` is its Fig. 11: bubble
rates on 4 devices.

Forward takes 1 and backward 3: 2 for the input gradient (forward again, then the gradient) and 1 for the weight
gradient. Shared blocks take 1 and 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from tables import machine, markdown, note

from pipeplan.costs import build_workload
from pipeplan.examples import ShapeCosts, shape
from pipeplan.files import Edge, Placement, Profile
from pipeplan.partition.placement import place
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.rules.sweep import Swept, built_in_rules, sweep
from pipeplan.schedule.search import search_schedule
from pipeplan.schedule.state import Schedule
from pipeplan.simulator.metrics import rates
from pipeplan.workload.task_graph import task_graph
from pipeplan.workload.workload import Workload

MS = 1_000_000
COSTS = ShapeCosts(forward_ns=MS, input_grad_ns=2 * MS, weight_grad_ns=MS)
PAPER = {2: 4.73, 4: 8.28, 8: 71.28, 16: 107.34, 32: 534.78}
"""FlexPipe's Table 5, seconds."""
TESSEL = {2: "1.29 s", 4: "163.62 s", 8: "729.74 s (fast)"}
PLACEMENTS = ("one-to-one", "circular", "v-shape", "bidirectional", "bidirectional-v-shape")
CHUNKED = ("circular", "v-shape", "bidirectional-v-shape")
COUNTS = (8, 16, 32, 64)


def model(devices: int, blocks_per_device: int) -> Profile:
    """shape-mllm's embedding, chain and head, with its chain in so many blocks per device."""
    ends = shape("mllm", devices, costs=COSTS)
    if blocks_per_device == 1:
        return ends
    chain = shape("circular", devices, chunks=blocks_per_device, costs=COSTS)
    first, last = chain.blocks[0].id, chain.blocks[-1].id
    embedding, head = (block for block in ends.blocks if block.shared)
    edges = (Edge(source=embedding.id, target=first), *chain.edges, Edge(source=last, target=head.id))
    return Profile(name="mllm", source=ends.source, blocks=(embedding, *chain.blocks, head), edges=edges)


def workload_of(strategy: str, devices: int, count: int, *, split: bool) -> Workload:
    """The model on a placement, its embedding and head spread over all devices."""
    chunks = 2 if strategy in CHUNKED else None
    profile = model(devices, chunks or 1)
    placed: Placement = place(profile, strategy, devices, chunks=chunks, microbatch_size=1, spread=True)
    return build_workload(profile, placed, num_microbatches=count, microbatch_size=1, split_backward=split)


@dataclass(frozen=True)
class Sweep:
    """One placement's sweep; seconds of processor time."""

    strategy: str
    split: bool
    num_actions: int
    num_rules: int
    seconds: float
    bubble: float


def swept(strategy: str, devices: int, *, split: bool) -> Sweep:
    """All built-in rules on a placement, with separation where backward is split."""
    begun = time.process_time()
    workload = workload_of(strategy, devices, 4 * devices, split=split)
    every = built_in_rules(workload, limits=(None,))
    rules = [each for each in every if each.time == "unit" and each.separate == split]
    found = sweep(workload, rules)
    seconds = time.process_time() - begun
    note(f"{devices} devices, {strategy}, {'separated' if split else 'whole'}: {seconds:.1f} s")
    return Sweep(strategy, split, task_graph(workload).num_tasks, len(rules), seconds, bubble(workload, found[0]))


def bubble(workload: Workload, found: Swept | Schedule) -> float:
    """Bubble rate of the iteration."""
    return rates(task_graph(workload), found.orders, found.starts).bubble_rate


def cost_row(devices: int, processes: int, *, placements: tuple[str, ...]) -> list[str]:
    """A row of Table 5: the shared-embedding placement alone (on one core), then all of them (on all)."""
    cases = [(strategy, split) for strategy in placements for split in (False, True)]
    with ProcessPoolExecutor(processes) as pool:
        jobs = [pool.submit(swept, strategy, devices, split=split) for strategy, split in cases]
        found = [job.result() for job in jobs]
    seconds = max(sum(each.seconds for each in found) / processes, *(each.seconds for each in found))
    whole, apart = found[:2]
    paper = PAPER.get(devices)
    if paper is not None and devices >= 8 and seconds > paper / 10:
        sys.exit(f"{devices} devices: {seconds:.1f} s are more than a tenth of FlexPipe's {paper} s")
    best = min(found, key=lambda each: each.bubble)
    return [
        str(devices),
        TESSEL.get(devices, "fails"),
        "-" if paper is None else f"{paper} s",
        f"{apart.num_actions:,}",
        str(whole.num_rules + apart.num_rules),
        f"{whole.seconds + apart.seconds:.2f} s",
        f"{whole.bubble:.1%}, {apart.bubble:.1%}",
        str(sum(each.num_rules for each in found)) if len(placements) > 1 else "-",
        f"{seconds:.2f} s" if len(placements) > 1 else "-",
        f"{best.bubble:.1%} ({best.strategy})" if len(placements) > 1 else "-",
    ]


COST_HEADER = [
    "devices",
    "Tessel",
    "FlexPipe",
    "actions",
    "rules",
    "shared embedding",
    "bubbles whole, separated",
    "rules",
    "all placements",
    "least bubbles",
]


def bubbles_row(count: int, limit: float) -> list[str]:
    """A row of Fig. 11 for so many micro-batches on 4 devices: rules, the repetend, and the automatic search."""
    workloads = [workload_of("one-to-one", 4, count, split=split) for split in (False, True)]
    rules = [bubble(workload, sweep(workload)[0]) for workload in workloads]
    others = min(
        (bubble(w, sweep(w)[0]), strategy)
        for strategy in PLACEMENTS[1:]
        for w in (workload_of(strategy, 4, count, split=True),)
    )
    repetend = [
        search_schedule(workload, Budget(limit, deterministic=True), scheduler="repetend") for workload in workloads
    ]
    chosen = [search_schedule(workload, Budget(limit, deterministic=True)) for workload in workloads]
    least = [bubble(workload, found) for workload, found in zip(workloads, chosen, strict=True)]
    note(f"{count} micro-batches: {[found.scheduler for found in chosen]}")
    for split, found in enumerate(chosen):
        best = min(rules[split], bubble(workloads[split], repetend[split]))
        if least[split] > best + 1e-12:
            sys.exit(f"{count} micro-batches: the automatic search has {least[split]:.2%} bubbles, others {best:.2%}")
        note(f"   gap {found.makespan_ns / found.bound_ns - 1:.2%}")
    return [
        str(count),
        *(f"{value:.1%}" for value in rules),
        f"{others[0]:.1%} ({others[1]})",
        *(f"{bubble(workload, found):.1%}" for workload, found in zip(workloads, repetend, strict=True)),
        *(f"{value:.1%}" for value in least),
    ]


BUBBLES_HEADER = [
    "micro-batches",
    "rules",
    "rules, separated",
    "rules, separated, other placements",
    "repetend",
    "repetend, split backward",
    "automatic",
    "automatic, split backward",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["cost", "bubbles"])
    parser.add_argument("--devices", default="2,4,8,16,32")
    parser.add_argument("--one-placement", action="store_true", help="the shared-embedding placement alone")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=float, default=10.0, help="deterministic seconds for one search")
    options = parser.parse_args()
    if options.part == "cost":
        placements = PLACEMENTS[: 1 if options.one_placement else None]
        devices = map(int, options.devices.split(","))
        rows = [cost_row(number, options.processes, placements=placements) for number in devices]
        print(markdown(COST_HEADER, rows))
    else:
        print(markdown(BUBBLES_HEADER, [bubbles_row(count, options.limit) for count in COUNTS]))
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
