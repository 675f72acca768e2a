"""What one task costs in each of the loops that schedule event by event, in ns.

    python benchmarks/engine.py [--repeats 7] [--json FILE]

Workloads are drawn with a fixed seed: a chain over 8 devices, one stage each, forward, input and weight gradient of 80
to 120 (a weight gradient 40 to 120), messages that arrive 1 to 20 later, memory for 10 micro-batches in flight; small
with 24 micro-batches, large with 192. On busy links every message also takes its link for 130 to 180, longer than what
makes it, so that it is a task, too. Times are of the processor, the least of the repeats, and without what is made once
per workload (task graph, problem); building the loop's own state counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

from tables import machine, markdown, note

from pipeplan.costs import build_workload
from pipeplan.examples import ShapeCosts, shape
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.list_scheduling import Policy, list_schedule
from pipeplan.schedule.rules import Rules, schedule_by_rules
from pipeplan.schedule.rules.refill import refill
from pipeplan.schedule.stage_graph.stages import Rule, Stages, TrialRun
from pipeplan.workload.elements import Hop
from pipeplan.workload.kinds import Role
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import TaskGraph, earliest_starts, task_graph, with_links
from pipeplan.workload.workload import Workload

DEVICES = 8
SIZES = {"small": 24, "large": 192}
"""{name: micro-batches}"""
IN_FLIGHT = 10

Loop = Callable[[], object]


def drawn_workload(num_microbatches: int, *, busy: bool, seed: int = 1) -> Workload:
    """The chain of the module's text."""
    costs = ShapeCosts(100, None, 100, 100, activation_bytes=2000, weight_grad_bytes=1000)
    profile = shape("v", DEVICES, costs=costs)
    assert profile.placement is not None
    workload = build_workload(
        profile,
        profile.placement,
        num_microbatches=num_microbatches,
        microbatch_size=1,
        split_backward=True,
        memory_bytes=[IN_FLIGHT * 2000] * DEVICES,
    )
    random = Random(seed)
    operations = tuple(
        replace(operation, duration_ns=random.randint(40 if operation.role is Role.WEIGHT_GRAD else 80, 120))
        for operation in workload.operations
    )

    def drawn(hop: Hop) -> Hop:
        latency = random.randint(1, 20)
        return replace(hop, latency_ns=latency, occupancy_ns=random.randint(130, 180) if busy else 0)

    dependencies = tuple(replace(each, hops=tuple(map(drawn, each.hops))) for each in workload.dependencies)
    return replace(workload, operations=operations, dependencies=dependencies)


def list_scheduling(graph: TaskGraph) -> Loop:
    problem, policy = OneMicrobatch.of(graph.workload), Policy(alternate=True)
    return lambda: list_schedule(problem, policy)


def rules_engine(graph: TaskGraph) -> Loop:
    rules = Rules(time="true", in_flight="D - d", fit_memory=True)
    return lambda: schedule_by_rules(graph, rules)


def rules_unit_steps(graph: TaskGraph) -> Loop:
    rules = Rules(in_flight="D - d")
    return lambda: schedule_by_rules(graph, rules)


def greedy_trial(graph: TaskGraph) -> Loop:
    stages = Stages(graph)
    limits = [Rule(DEVICES - stage) for stage in range(stages.count)]
    TrialRun(stages, limits)  # what Stages keeps for all trials
    return lambda: TrialRun(stages, limits)


def weight_refill(graph: TaskGraph) -> Loop:
    workload = graph.workload
    orders = _one_f_one_b(graph)
    weights = frozenset(
        task
        for task in range(graph.num_actions)
        if workload.operations[graph.operation_of[task]].role is Role.WEIGHT_GRAD
    )
    kept = [[task for task in order if task not in weights] for order in orders]
    expected = earliest_starts(graph, with_links(graph, kept))
    capacity = OneMicrobatch.of(workload).capacity
    return lambda: refill(graph, orders, weights, capacity, expected, 0.0)


def first_come(graph: TaskGraph) -> Loop:
    orders = _one_f_one_b(graph)
    return lambda: with_links(graph, orders)


def _one_f_one_b(graph: TaskGraph) -> list[list[int]]:
    orders = CLASSIC["1f1b"].orders(OneMicrobatch.of(graph.workload), graph)
    return list(map(list, graph.on_devices(orders)))


LOOPS: dict[str, tuple[Callable[[TaskGraph], Loop], tuple[bool, ...]]] = {
    "list scheduling": (list_scheduling, (False,)),
    "rules, true time, memory": (rules_engine, (False, True)),
    "rules, unit steps": (rules_unit_steps, (False,)),
    "greedy trial": (greedy_trial, (False, True)),
    "weight gradients into bubbles": (weight_refill, (False, True)),
    "links first come": (first_come, (True,)),
}
"""{loop: (what makes it ready for a task graph, with free or busy links)}"""


def ns_per_task(loop: Loop, num_tasks: int, repeats: int) -> float:
    """The least processor time of a run, shared by its tasks."""
    assert loop() is not None, "the loop got stuck"
    least = float("inf")
    for _ in range(repeats):
        gc.collect()
        begun = time.process_time_ns()
        loop()
        least = min(least, time.process_time_ns() - begun)
    return least / num_tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write {loop, links, size: ns per task} here")
    options = parser.parse_args()
    found: dict[str, float] = {}
    rows = []
    for name, (ready, links) in LOOPS.items():
        for busy in links:
            cells = []
            for size, count in SIZES.items():
                graph = task_graph(drawn_workload(count, busy=busy))
                each = ns_per_task(ready(graph), graph.num_tasks, options.repeats)
                found[f"{name}, {'busy' if busy else 'free'} links, {size}"] = round(each)
                cells += [f"{graph.num_tasks:,}", f"{each:,.0f}"]
            rows.append([name, "busy" if busy else "free", *cells])
            note(" | ".join(rows[-1]))
    print(markdown(["loop", "links", "tasks", "ns each", "tasks", "ns each"], rows), end="\n\n")
    print(f"Least of {options.repeats}; {machine()}.")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
