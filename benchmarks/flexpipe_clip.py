"""FlexPipe's CLIP models on 40 of its devices: DistMM-Pipe, its exchange in the background, mixed schedules.

    python benchmarks/flexpipe_clip.py [--model 4.7b]

Prints a Markdown table (FlexPipe, section 7.2, Fig. 16). Costs are estimated and iterations simulated: nothing is
measured. Every schedule has the best depth, micro-batch size and recomputation; the towers share the devices by their
work. Fails where the exchange in the background is slower than the one that all wait for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import product

from flexpipe import described, speedup
from tables import markdown, note

from pipeplan.costs.clusters import named_cluster
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.examples import model
from pipeplan.files import Plan
from pipeplan.partition.placement import place_submodules
from pipeplan.planning.build_plan import planned
from pipeplan.planning.candidates import PlacementCandidate
from pipeplan.planning.request import SUBMODULES, Batch, Request, submodules_of
from pipeplan.planning.trials import Trial, iteration_of
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.rules import Rules
from pipeplan.schedule.rules.language import named_rules
from pipeplan.schedule.search import search_schedule

GPUS, MINI_BATCH, SIZES = 40, 128, (1, 2, 4)
STATED = {"4.7b": "1.26", "8.2b": "1.29", "9.7b": "1.18"}
"""The paper's speedups over DistMM-Pipe."""


def schedules() -> dict[str, Rules]:
    """What is compared; the last is the paper's own."""
    synchronous, background, mixed = map(named_rules, ("distmm-pipe", "distmm-async", "clip-mixed-async"))
    return {
        "DistMM-Pipe": synchronous,
        "in the background": background,
        "mixed": mixed,
        "mixed, gradients separated": mixed.but(separate=True),
    }


def candidates(request: Request, rules: Rules) -> Iterator[PlacementCandidate]:
    """Depths that leave a power of two of replicas, sizes, recomputation; what cannot be placed is left out."""
    for replicas, size, recompute in product((1, 2, 4, 8), SIZES, (False, True)):
        batch = Batch(MINI_BATCH // (size * replicas), size * replicas)
        try:
            placement = place_submodules(
                request.profile,
                submodules_of(rules, GPUS // replicas, batch.microbatch_size),
                GPUS,
                microbatch_size=batch.microbatch_size,
                memory_bytes=request.memory,
                recompute=recompute,
                replicas=replicas,
            )
        except (InfeasibleError, UsageError):
            continue
        yield PlacementCandidate(placement, batch, recompute, "rules")


def best_plan(name: str, rules: Rules) -> Plan | None:
    """The shortest iteration; None where nothing fits."""
    profile = model(f"flexpipe-clip-{name}", device="a800-80gb", microbatch_sizes=SIZES)
    cluster = named_cluster("flexpipe", GPUS)
    request = Request(
        profile,
        GPUS,
        Batch(MINI_BATCH, 1),
        SUBMODULES,
        scheduler="rules",
        rules=rules,
        split_backward=rules.separate,
        sizes=SIZES,
        cluster=cluster,
    )
    best = None
    for candidate in candidates(request, rules):
        try:
            trial = Trial.of(request, candidate)
            if best is not None and trial.bound_ns >= iteration_of(best[1]):
                continue
            found = search_schedule(trial.ways[0], Budget(0.0, 0), scheduler="rules", rules=rules)
        except (InfeasibleError, UsageError):
            continue
        if best is None or iteration_of(found) < iteration_of(best[1]):
            best = candidate, found
    return None if best is None else planned(request, *best, best[1].workload)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(STATED), action="append")
    rows, worse = [], 0
    for name in parser.parse_args().model or list(STATED):
        plans = {what: best_plan(name, rules) for what, rules in schedules().items()}
        first, *others = plans.values()
        rows.append([name, *map(described, plans.values())])
        rows[-1] += ["-" if plan is None else speedup(plan, first) for plan in others] + [STATED[name]]
        note(" | ".join(rows[-1]))
        background = others[0]
        worse += first is not None and (
            background is None or background.predicted.iteration_ns > first.predicted.iteration_ns
        )
    over = [f"{what}, over DistMM-Pipe" for what in list(schedules())[1:]]
    print(markdown(["model", *schedules(), *over, "stated"], rows))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
