"""The automatic search beside every strategy forced by flags, with the same time for each, on the shipped profiles.

    python benchmarks/planner.py [--limit 10] [--devices 8]

Prints a Markdown table: iteration times in ms, and what the automatic search chose. Fails if it is worse anywhere.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pipeplan.costs.clusters import named_cluster
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.files import read_profile
from pipeplan.partition.strategies import STRATEGIES
from pipeplan.planning.build_plan import Result
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import search_plan

PROFILES = Path(__file__).parents[1] / "profiles"
GB = 10**9

MEMORY = {
    "gpt2-124m-cpu": 3 * GB,
    "gpt2-345m-cpu": 8 * GB,
    "gpt2-1.3b-a100-80gb": 20 * GB,
    "mmt-v100-16gb": 4 * GB,
    "tessel-mt5-1.8b-v100-32gb": 16 * GB,
    "tessel-flava-v100-32gb": 32 * GB,
}
"""Bytes per device: little enough that copies of the whole model do not fit, or not without recomputation."""


def searched(name: str, placement: str, devices: int, limit: float, replicas: int | None) -> Result | None:
    """The best plan for 8 micro-batches per device of the largest profiled size; None where nothing fits."""
    profile = read_profile(str(PROFILES / f"{name}.json"))
    sizes = profile.microbatch_sizes
    try:
        return search_plan(
            Request(
                profile,
                devices,
                Batch(8 * devices, sizes[-1]),
                placement,
                cluster=named_cluster("graphpipe", devices),
                memory_bytes=MEMORY[name],
                sizes=sizes,
                time_limit=limit,
                replicas=replicas,
            )
        )
    except (InfeasibleError, UsageError):
        return None


def cell(result: Result | None) -> str:
    """Its iteration time in ms."""
    return "-" if result is None else f"{result.plan.predicted.iteration_ns / 1e6:,.1f}"


def chosen(result: Result) -> str:
    """What the automatic search settled on."""
    plan = result.plan
    replicas = sorted({stage.replicas for stage in plan.stages})
    sizes = sorted({stage.microbatch_size for stage in plan.stages})
    return (
        f"{plan.placement}, {len(plan.stages)} stages, replicas {', '.join(map(str, replicas))}, micro-batches of "
        f"{', '.join(map(str, sizes))}, {plan.provenance.scheduler}"
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=float, default=10.0)
    parser.add_argument("--devices", type=int, default=8)
    asked = parser.parse_args()
    copies = [count for count in (1, 2, 4) if asked.devices % count == 0]
    print(f"| profile | automatic | {' | '.join(STRATEGIES)} | chosen |")
    print("|---" * (len(STRATEGIES) + 3) + "|")
    worse = 0
    for name in MEMORY:
        best = searched(name, "auto", asked.devices, asked.limit, None)
        rows = []
        for strategy in STRATEGIES:
            tried = [searched(name, strategy, asked.devices, asked.limit, count) for count in copies]
            found = [each for each in tried if each is not None]
            rows.append(min(found, key=lambda each: each.plan.predicted.iteration_ns, default=None))
        for row in rows:
            if row is not None and (best is None or best.plan.predicted.iteration_ns > row.plan.predicted.iteration_ns):
                worse += 1
        print(
            f"| {name} | {cell(best)} | {' | '.join(map(cell, rows))} | {chosen(best) if best else '-'} |", flush=True
        )
    if worse:
        print(f"the automatic search is worse in {worse} cells", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
