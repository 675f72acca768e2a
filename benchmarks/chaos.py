"""Runs in which a rank is killed, hangs, raises or differs, at random places: how each of them ends.

    python benchmarks/chaos.py --runs 200 --seed 0      # prints the table of docs/benchmarks/robustness.md

Plans are a chain with whole and with split backward, one with replicas, and one whose table of words is split over all
ranks; the fault is on any rank, at any action of any step or outside the program: while starting, building blocks,
connecting, making samples, summing gradients, clipping, stepping, reporting, writing the checkpoint that there is
behind every step. A run has ended soon where that took no more than 12 s since it happened (hangs: since the timeout of
2 s, or of 60 s before the first step). A message is right if it names the rank, its action and what happened to it
(under torchrun, that it is gone). The checkpoint behind the step before must be there and whole.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tables import machine, markdown, note

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

import runtime_support.models as runtime_models
from pipeplan.files import PlacedStage, Plan
from pipeplan.runtime.launch.status import Phase
from pipeplan.runtime.training.options import TrainOptions
from runtime_support.faults import BEFORE_STEPS, HANGS, KINDS, NUM_STEPS, Ending, Fault, run_with
from runtime_support.plans import model_plan, placed_plan

OWN_WORK = ("STARTING", "LOADING", "SAMPLING", "UPDATING")
WITH_OTHERS = ("CONNECTING", "REDUCING", "CLIPPING", "REPORTING", "SAVING")
HEADER = ["", "rank", "runs", "ended soon", "message right", "no process left", "checkpoint loads", "slowest end, s"]


@dataclass(frozen=True)
class Case:
    """A plan, the model it is for, and what stands on each rank."""

    plan: Plan
    model: str
    roles: tuple[str, ...]


def staged(*groups: tuple[str, tuple[int, ...], int]) -> list[PlacedStage]:
    """Stages of blocks on devices, so many of which split each block; the others are replicas."""
    return [
        PlacedStage(blocks=tuple(blocks.split()), devices=devices, shards=n, replicas=len(devices) // n)
        for blocks, devices, n in groups
    ]


def cases() -> dict[str, Case]:
    """A chain, a chain that goes back and forth, replicas, and blocks that all ranks share (Tessel's M)."""
    chain, worded = runtime_models.chain(), runtime_models.worded()
    replicas = staged(("b0 b1", (0,), 1), ("b2 b3", (1, 2), 1), ("b4 end", (3,), 1))
    everyone = (0, 1, 2, 3)
    shared = staged(
        ("words", everyone, 4), ("shift b0", (0,), 1), ("b1", (1,), 1), ("b2", (2,), 1), ("b3 head", (3,), 1)
    )
    line, models = ("first", "middle", "last"), ("runtime_support.models:chain", "runtime_support.models:worded")
    return {
        "chain": Case(model_plan(chain, [0, 1, 2]), models[0], line),
        "chain, split": Case(model_plan(chain, [0, 1, 2, 2, 1, 0], split=True), models[0], line),
        "replicas": Case(
            placed_plan(chain, replicas, num_microbatches=4), models[0], ("first", "replica", "replica", "last")
        ),
        "shared": Case(placed_plan(worded, shared, num_microbatches=4, split=True), models[1], ("shared",) * 4),
    }


def drawn(rng: random.Random, case: Case) -> Fault:
    """Something anywhere. An endless loop is in what a model or an optimizer may do: computing, not waiting."""
    plan, kind = case.plan, rng.choice(list(KINDS))
    rank = rng.randrange(len(plan.programs))
    if kind.startswith("other"):
        return Fault(kind, rng.randrange(1, len(plan.programs)))
    step = rng.randrange(NUM_STEPS)
    if rng.random() < 0.3:
        phase = rng.choice(OWN_WORK if kind == "endless" else OWN_WORK + WITH_OTHERS)
        if kind in HANGS and Phase[phase].takes_long and rng.random() < 0.7:
            phase = "UPDATING"  # those take a minute each
        if kind == "raised" and phase == "STARTING":
            phase = "LOADING"  # before it has its pipe to report on, a process that raises just ends
        if phase == "REDUCING" and case.roles[rank] == "middle":
            phase = "REPORTING"  # others have none of its parameters
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
    known = cases()
    for number in range(options.runs):
        name = rng.choice(list(known))
        case = known[name]
        fault = drawn(rng, case)
        torchrun = fault.counter >= 0 and rng.random() < options.torchrun
        ending = run_with(fault, case.plan, TrainOptions(case.model, dtype="float64"), torchrun=torchrun)
        found[fault.kind, case.roles[fault.rank]].append((fault, ending))
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
