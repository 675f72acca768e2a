"""Runs in which a rank is killed, hangs, raises or differs, at random places: how each of them ends.

    python benchmarks/chaos.py --runs 200 --seed 0      # prints the table of docs/benchmarks.md

Plans are a chain with whole and with split backward, and one with replicas; the fault is on any rank, at any action of
any step or outside the program: while starting, building blocks, connecting, making samples, summing gradients,
clipping, stepping, reporting, writing the checkpoint that there is behind every step. A run has ended soon where that
took no more than 12 s since it happened (hangs: since the timeout of 2 s, or of 60 s before the first step). A message
is right if it names the rank, its action and what happened to it (under torchrun, that it is gone). The checkpoint
behind the step before must be there and whole.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from tables import machine, markdown, note

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

import runtime_models  # noqa: E402  (lies beside the tests)
from faults import BEFORE_STEPS, HANGS, KINDS, NUM_STEPS, Ending, Fault, run_with  # noqa: E402
from runtime_plans import model_plan, placed_plan  # noqa: E402

from pipeplan.model import PlacedStage, Plan  # noqa: E402
from pipeplan.runtime.options import RunOptions  # noqa: E402
from pipeplan.runtime.progress import Phase  # noqa: E402

OWN_WORK = ("STARTING", "LOADING", "SAMPLING", "UPDATING")
WITH_OTHERS = ("CONNECTING", "REDUCING", "CLIPPING", "REPORTING", "SAVING")
HEADER = ["", "rank", "runs", "ended soon", "message right", "no process left", "checkpoint loads", "slowest end, s"]


def plans() -> dict[str, tuple[Plan, Mapping[int, str]]]:
    """Plans, and what stands on each of their ranks."""
    model = runtime_models.chain()
    names = [block.id for block in model.blocks]
    replicated = [
        PlacedStage(blocks=tuple(names[:2]), devices=(0,)),
        PlacedStage(blocks=tuple(names[2:4]), devices=(1, 2), replicas=2),
        PlacedStage(blocks=tuple(names[4:]), devices=(3,)),
    ]
    line = {0: "first", 1: "middle", 2: "last"}
    return {
        "chain": (model_plan(model, [0, 1, 2]), line),
        "chain, split": (model_plan(model, [0, 1, 2, 2, 1, 0], split=True), line),
        "replicas": (
            placed_plan(model, replicated, num_microbatches=4),
            {0: "first", 1: "replica", 2: "replica", 3: "last"},
        ),
    }


def drawn(rng: random.Random, plan: Plan) -> Fault:
    """Something anywhere. An endless loop is in what a model or an optimizer may do: computing, not waiting."""
    kind = rng.choice(list(KINDS))
    rank = rng.randrange(len(plan.programs))
    if kind.startswith("other"):
        return Fault(kind, rng.randrange(1, len(plan.programs)))
    step = rng.randrange(NUM_STEPS)
    if rng.random() < 0.3:
        phase = rng.choice(OWN_WORK if kind == "endless" else OWN_WORK + WITH_OTHERS)
        if kind in HANGS and phase in BEFORE_STEPS and rng.random() < 0.7:
            phase = "UPDATING"  # those take a minute each
        if kind == "raised" and phase == "STARTING":
            phase = "LOADING"  # before it has its pipe to report on, a process that raises just ends
        return Fault(kind, rank, phase, 0 if phase in BEFORE_STEPS else step)
    program = plan.programs[rank]
    counters = [c for c, text in enumerate(program) if kind != "endless" or not ("SEND" in text or "RECV" in text)]
    return Fault(kind, rank, Phase.RUNNING.name, step, rng.choice(counters))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torchrun", type=float, default=0.1, help="share of the runs that torchrun starts")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    rng, found = random.Random(options.seed), defaultdict[tuple[str, str], list[tuple[Fault, Ending]]](list)
    known = plans()
    for number in range(options.runs):
        name = rng.choice(list(known))
        plan, roles = known[name]
        fault = drawn(rng, plan)
        torchrun = fault.counter >= 0 and rng.random() < options.torchrun
        ending = run_with(fault, plan, RunOptions("runtime_models:chain", dtype="float64"), torchrun=torchrun)
        found[fault.kind, roles[fault.rank]].append((fault, ending))
        told = "as it should" if is_good(fault, ending) else f"WRONG: {ending}"
        note(f"{number} {name} {fault}{torchrun * ' under torchrun'} {ending.seconds:.1f} s: {told}")
    rows = [row(*key, found[key]) for key in sorted(found)]
    print(markdown(HEADER, rows))
    print(f"\n{machine()}.")
    sys.exit(not all(is_good(*each) for endings in found.values() for each in endings))


def is_good(fault: Fault, ending: Ending) -> bool:
    """Whether everything the table counts is as it should be."""
    return ending.is_clean and ending.seconds <= fault.expected_s


def row(kind: str, role: str, endings: list[tuple[Fault, Ending]]) -> list[str]:
    """How many of them were as they should be."""
    soon = sum(ending.seconds <= fault.expected_s for fault, ending in endings)
    right = sum(ending.is_right for _, ending in endings)
    gone = sum(not ending.left for _, ending in endings)
    loaded = sum(ending.checkpoint_loads for _, ending in endings)
    slowest = max(ending.seconds for _, ending in endings)
    return [kind, role, str(len(endings)), str(soon), str(right), str(gone), str(loaded), f"{slowest:.1f}"]


if __name__ == "__main__":
    main()
