"""AutoPipe's Fig. 11: the seven partitions of Table II as simulated, and as they run, emulated by four processes.

    pip install 'pipeplan[torch]'
    python benchmarks/autopipe_runs.py [--steps 5]     # two minutes

GPT-2 345M in 8 micro-batches of 4 by 1F1B, with the estimated costs of ``autopipe.py``. Each process waits as long as
its actions take, and sends messages on gloo; the paper's runs are on GPUs. Simulated are the planner's own simulator
and ``pipeplan simulate``, which has the testbed's links. Asserted: in both the partitions rank as they run, ties aside.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import combinations
from statistics import median
from typing import Any

from autopipe import TABLE_2
from autopipe_plans import DEVICE, FITTED_HEAD, Case, cluster, in_steps
from emulation import Case as Run
from emulation import emulated
from tables import machine, markdown

from pipeplan.examples import model
from pipeplan.files import Plan, Profile
from pipeplan.partition.chain.autopipe import Cuts, timeline
from pipeplan.partition.placement import place
from pipeplan.planning.build_plan import planned
from pipeplan.planning.candidates import PlacementCandidate
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.trials import Trial
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.search import search_schedule

SIZE, COUNT, DEVICES = 4, 8, 4
TIE = 0.01
"""Partitions whose times differ by less may change places."""


def profile_of(case: Case) -> Profile:
    """The model's costs with the head of the case."""
    profile = in_steps(model(case.model, device=DEVICE, microbatch_sizes=(SIZE,)))
    head, cost = profile.blocks[-1], case.costs(SIZE)[-1]
    times = {"forward_ns": cost.forward_ns, "backward_ns": cost.backward_ns}
    rows = tuple(row.model_copy(update={**times, "input_grad_ns": None, "weight_grad_ns": None}) for row in head.costs)
    return profile.model_copy(update={"blocks": (*profile.blocks[:-1], head.model_copy(update={"costs": rows}))})


def plan_of(profile: Profile, begins: Cuts) -> Plan:
    """1F1B on stages cut there."""
    options: dict[str, Any] = {"memory_bytes": None, "recompute": True, "cut": lambda chain: begins}
    placement = place(profile, "one-to-one", DEVICES, microbatch_size=SIZE, **options)
    batch = Batch(COUNT * SIZE, SIZE)
    request = Request(profile, DEVICES, batch, cluster=cluster(DEVICES), split_backward=False)
    candidate = PlacementCandidate(placement, replace(batch, num_microbatches=COUNT), True, "one-to-one")
    workload = Trial.of(request, candidate).ways[0]
    return planned(request, candidate, search_schedule(workload, Budget(0.0, 0), scheduler="1f1b"), workload)


def require_alike(simulated: Sequence[float], taken: Sequence[float]) -> None:
    """Of every two the one that should be quicker is, unless they are a tie."""
    for one, other in combinations(range(len(taken)), 2):
        if abs(simulated[one] / simulated[other] - 1) > TIE:
            assert (simulated[one] < simulated[other]) == (taken[one] < taken[other]), (one, other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="steps that count, after a first one")
    parser.add_argument("--head", type=float, default=FITTED_HEAD, help="layers of GPT-2 345M that its head is worth")
    given = parser.parse_args()
    case = Case("gpt2-345m", SIZE, DEVICES, given.head)
    profile = profile_of(case)
    cuts = [(0, *(int(1 + 2 * sum(layers[:stage])) for stage in range(1, DEVICES))) for layers in TABLE_2]
    plans = [plan_of(profile, begins) for begins in cuts]
    runs = emulated([Run(f"scheme {number}", plan, False) for number, plan in enumerate(plans, 1)], given.steps, 0.0)
    own = [timeline(case.loads.stages(begins), COUNT).iteration_ns for begins in cuts]
    ours = [plan.predicted.iteration_ns for plan in plans]
    ran = [median(run.iterations) / run.stretch for run in runs.values()]
    rows = [
        [
            str(number),
            ", ".join(f"{each:g}" for each in layers),
            *(f"{each / COUNT / 1e6:.1f}" for each in times),
            f"{times[2] / times[1] - 1:+.2%}",
        ]
        for number, (layers, *times) in enumerate(zip(TABLE_2, own, ours, ran, strict=True), 1)
    ]
    header = ["scheme", "layers", "ms per micro-batch: the planner's simulator", "simulate", "emulated", "more"]
    print(markdown(header, rows))
    for simulated in (own, ours):
        require_alike(simulated, ran)
    print(f"\nHead of {given.head:g} layers, fitted. {machine()}, torch {version('torch')}")


if __name__ == "__main__":
    main()
