"""What the scheduler of rules costs per action: 1F1B, interleaved 1F1B and shared blocks, 1,000 to 262,144 actions.

    python benchmarks/rules_scale.py [--repeats 2]

Seconds are processor time, the least of the repeats. It fails if an action of the largest takes three times as long as
one of the smallest: the cost is to stay near linear.
"""

from __future__ import annotations

import argparse
import time

from tables import machine, markdown, note

from pipeplan.costs import build_workload
from pipeplan.examples import shape
from pipeplan.schedule.rules import Rules, StageTraversal, TypeTraversal, schedule_by_rules
from pipeplan.workload.task_graph import TaskGraph, task_graph

INTERLEAVED = Rules(
    types=TypeTraversal("interleaved"),
    forward=StageTraversal("breadth-first", "D"),
    backward=StageTraversal("depth-first", "D"),
)
SHARED = Rules(in_flight="D - d", forward=StageTraversal("depth-first"))
CASES = {
    "1F1B": ("v", Rules(in_flight="D - d"), ((8, 63), (16, 313), (64, 782), (128, 1024))),
    "1F1B within memory": ("v", Rules(fit_memory=True), ((8, 63), (16, 313), (64, 782), (128, 1024))),
    "interleaved 1F1B": ("circular", INTERLEAVED, ((8, 32), (16, 157), (64, 391), (128, 512))),
    "shared blocks": ("mllm", SHARED, ((8, 50), (16, 278), (64, 750), (128, 1000))),
    "shared blocks, true time": ("mllm", SHARED.but(time="true"), ((8, 50), (16, 278), (64, 750), (128, 1000))),
}
"""{what: (shape, rules, ((devices, micro-batches), ...))}"""

MOST_SLOWER = 3.0


def graph_of(name: str, devices: int, count: int) -> TaskGraph:
    """The actions of a shape; every device has room for twice as many micro-batches as there are devices."""
    profile = shape(name, devices)
    assert profile.placement is not None
    memory = [2 * devices * 10**9] * devices
    return task_graph(
        build_workload(profile, profile.placement, num_microbatches=count, microbatch_size=1, memory_bytes=memory)
    )


def seconds(graph: TaskGraph, rules: Rules, repeats: int) -> float:
    """Processor time of the scheduler."""
    least = float("inf")
    for _ in range(repeats):
        begun = time.process_time()
        schedule_by_rules(graph, rules)
        least = min(least, time.process_time() - begun)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    repeats = parser.parse_args().repeats
    rows = []
    for what, (name, rules, sizes) in CASES.items():
        each = []
        for devices, count in sizes:
            graph = graph_of(name, devices, count)
            took = seconds(graph, rules, repeats)
            each.append(took / graph.num_actions)
            rows.append([what, str(devices), f"{graph.num_actions:,}", f"{took:.3f} s", f"{1 / each[-1]:,.0f}"])
            note(" | ".join(rows[-1]))
        assert each[-1] < MOST_SLOWER * each[0], f"{what}: {each[-1] / each[0]:.1f} times as long per action"
    print(markdown(["rules", "devices", "actions", "time", "actions per second"], rows))
    print(machine())


if __name__ == "__main__":
    main()
