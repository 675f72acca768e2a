"""What one task costs in each list scheduler, in ns: on the engine, and in the loop of its own that it had before.

    python benchmarks/engine.py [--pairs 40] [--json FILE]

Workloads are drawn with a fixed seed: a chain over 8 devices, one stage each, forward, input and weight gradient of 80
to 120 (a weight gradient 40 to 120), messages that arrive 1 to 20 later, memory for 10 micro-batches in flight; small
with 24 micro-batches, large with 192. On busy links every message also takes its link for 130 to 180, longer than what
makes it, so that it is a task, too. Both loops run in turn in one process, as many pairs as given for small ones and a
fifth of them for large ones; times are of the processor, ratios are of the medians. What is made once per workload
(task graph, problem) is left out; building the loop's own state counts. The loops before are kept in
tests/references/loops.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from tables import machine, markdown, note

import references.loops.listing as listing  # a package beside the tests
import references.loops.refill as old_refill
import references.loops.rules as old_rules
import references.loops.trial as trial
from pipeplan.costs import build_workload
from pipeplan.examples import ShapeCosts, shape
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.list_scheduling import Policy, list_schedule
from pipeplan.schedule.rules import Rules, schedule_by_rules
from pipeplan.schedule.rules.separation import refill
from pipeplan.schedule.stage_graph import Rule, Stages, TrialRun
from pipeplan.workload.elements import Hop
from pipeplan.workload.engine import with_links
from pipeplan.workload.kinds import Role
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload
from references.loops.first_come import FirstCome

DEVICES = 8
SIZES = {"small": 24, "large": 192}
"""{name: micro-batches}"""
IN_FLIGHT = 10

Pair = tuple[Callable[[], object], Callable[[], object]]
"""A scheduler's own loop, and the same on the engine."""


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


def list_scheduling(graph: TaskGraph) -> Pair:
    problem, policy = OneMicrobatch.of(graph.workload), Policy(alternate=True)
    return lambda: listing.list_schedule(problem, policy), lambda: list_schedule(problem, graph, policy)


def rules_in_time(graph: TaskGraph) -> Pair:
    return _rules(graph, Rules(time="true", in_flight="D - d", fit_memory=True))


def rules_unit_steps(graph: TaskGraph) -> Pair:
    return _rules(graph, Rules(in_flight="D - d"))


def _rules(graph: TaskGraph, rules: Rules) -> Pair:
    return lambda: old_rules.RulesRun(graph, rules).run(), lambda: schedule_by_rules(graph, rules)


def greedy_trial(graph: TaskGraph) -> Pair:
    stages = Stages(graph)
    limits = [Rule(DEVICES - stage) for stage in range(stages.count)]
    TrialRun(stages, limits)  # what Stages keeps for all trials
    return lambda: trial.TrialRun(stages, limits).orders, lambda: TrialRun(stages, limits).device_orders


def weight_refill(graph: TaskGraph) -> Pair:
    workload = graph.workload
    orders = _one_f_one_b(graph)
    roles = [operation.role for operation in workload.operations]
    weights = frozenset(
        task for task in range(graph.num_actions) if roles[graph.operation_of[task]] is Role.WEIGHT_GRAD
    )
    kept = [[task for task in order if task not in weights] for order in with_links(graph, orders)]
    expected = earliest_starts(graph, kept)
    arguments = (graph, orders, weights, OneMicrobatch.of(workload).capacity, expected, 0.0)
    return lambda: old_refill.refill(*arguments), lambda: refill(*arguments)


def first_come(graph: TaskGraph) -> Pair:
    orders = _one_f_one_b(graph)
    return lambda: [*orders, *FirstCome(graph, orders).run()], lambda: with_links(graph, orders)


def _one_f_one_b(graph: TaskGraph) -> list[list[int]]:
    orders = CLASSIC["1f1b"].orders(OneMicrobatch.of(graph.workload), graph)
    return list(map(list, graph.on_devices(orders)))


LOOPS: dict[str, tuple[Callable[[TaskGraph], Pair], tuple[bool, ...]]] = {
    "list scheduling": (list_scheduling, (False, True)),
    "rules, true time, memory": (rules_in_time, (False, True)),
    "rules, unit steps": (rules_unit_steps, (False, True)),
    "greedy trial": (greedy_trial, (False, True)),
    "weight gradients into bubbles": (weight_refill, (False, True)),
    "links first come": (first_come, (True,)),
}
"""{scheduler: (what gives its own loop and the one on the engine, with free or busy links)}"""


def ns_in_pairs(pair: Pair, num_pairs: int) -> tuple[float, float]:
    """Median processor times of both loops, run in turn."""
    assert pair[0]() == pair[1](), "the orders differ"
    times: tuple[list[int], list[int]] = ([], [])
    for _ in range(num_pairs):
        for loop, found in zip(pair, times, strict=True):
            gc.collect()
            begun = time.process_time_ns()
            loop()
            found.append(time.process_time_ns() - begun)
    return median(times[0]), median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--json", type=Path, help="also write {scheduler, links, size: [ns before, ns on the engine]}")
    options = parser.parse_args()
    found: dict[str, tuple[int, int]] = {}
    rows = []
    for name, (ready, links) in LOOPS.items():
        for busy in links:
            cells = []
            for size, count in SIZES.items():
                graph = task_graph(drawn_workload(count, busy=busy))
                pairs = max(1, options.pairs // (1 if size == "small" else 5))
                own, engine = (each / graph.num_tasks for each in ns_in_pairs(ready(graph), pairs))
                found[f"{name}, {'busy' if busy else 'free'} links, {size}"] = round(own), round(engine)
                cells += [f"{graph.num_tasks:,}", f"{own:,.0f}", f"{engine:,.0f}", f"{engine / own:.2f}"]
            rows.append([name, "busy" if busy else "free", *cells])
            note(" | ".join(rows[-1]))
    print(markdown(["scheduler", "links", *["tasks", "own loop, ns", "engine, ns", "ratio"] * 2], rows), end="\n\n")
    print(f"Medians of {options.pairs} pairs and a fifth as many; {machine()}.")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
