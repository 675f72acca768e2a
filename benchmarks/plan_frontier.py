"""Frontiers over whole plans for GPT, mT5-like and MMT profiles: every point is checked and simulated anew.

python benchmarks/plan_frontier.py [SECONDS]
"""

from __future__ import annotations

import sys

from pipeplan.checker import check
from pipeplan.examples import model
from pipeplan.planning.plan_frontier import plan_frontier
from pipeplan.planning.request import Batch, Request
from pipeplan.simulator.simulation import simulate
from pipeplan.units import format_bytes, format_ns

MODELS = ("tessel-gpt-11b", "tessel-mt5-1.8b", "mmt")
DEVICES = (1, 2, 4, 8)


def main(seconds: float) -> None:
    print("| profile | plans tried | points | with split blocks | each in its own way | memory | iteration | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for name in MODELS:
        profile = model(name, shards=(1, 2, 4))
        batch = Batch(4 * DEVICES[-1], profile.microbatch_sizes[-1])
        request = Request(
            profile,
            DEVICES[-1],
            batch,
            sizes=profile.microbatch_sizes,
            time_limit=seconds,
            device_counts=DEVICES,
        )
        found = plan_frontier(request)
        assert len(found.points) >= 10, "fewer than ten plans"
        for point in found.points:
            check(point.plan, profile).require(name)
            simulated = simulate(point.plan)
            assert simulated.iteration_ns == point.iteration_ns == point.plan.predicted.iteration_ns
            assert max(device.peak_bytes for device in simulated.memory) == point.memory_bytes
        split = sum(any(stage.shards > 1 for stage in point.plan.stages) for point in found.points)
        own = sum(any(len(set(stage.configurations)) > 1 for stage in point.plan.stages) for point in found.points)
        memory = [format_bytes(pick(p.memory_bytes for p in found.points)) for pick in (min, max)]
        times = [format_ns(pick(p.iteration_ns for p in found.points)) for pick in (min, max)]
        cells = [name, found.num_tried, len(found.points), split, own, " to ".join(memory), " to ".join(times)]
        print("|", " | ".join(map(str, [*cells, f"{found.seconds:.0f}"])), "|", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
