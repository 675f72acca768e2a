"""How close emulated runs come to their prediction, and what blocking transfers cost (Tessel, Fig. 17).

    pip install 'pipeplan[torch]'
    python benchmarks/emulation.py          # prints the tables of docs/benchmarks/runs.md; takes some minutes
    python benchmarks/emulation.py --devices 4 --steps 2 --block 5ms

Plans of literature shapes are searched for as on the command line, 2 micro-batches per device; those that also run with
blocking transfers by their repetend, as Tessel's (plans that keep more micro-batches in flight wait less for each
other, and blocking costs them less). Their blocks take ``--block`` forward, three times that backward (ZB-V: once for
each of the two gradients), and shared blocks ``--block`` each way. Then as many processes as devices, on gloo, run each
plan with waiting instead of computing. A message takes no time in the prediction (``--comm``), so everything that real
ones take is error. The first step warms up; figures are medians over the others. Times are stretched as `--stretch` of
this script says; with `auto` as far as the machine needs, which the tables then say.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tables import machine, markdown, note

from pipeplan.files import Plan, parse, read_plan
from pipeplan.runtime.emulation.emulate import emulate
from pipeplan.runtime.launch.__main__ import main as be_rank
from pipeplan.runtime.launch.job import RankContext, RunOptions
from pipeplan.runtime.launch.local import watch_local
from pipeplan.units import format_ns, parse_ns

AS_RANK = "--as-rank"
TIMEOUT_NS = 120 * 10**9
CLOSE, BLOCKING = ("v", "m", "zbv"), ("v", "m", "nn")
SHARED = ("m", "nn")


@dataclass(frozen=True)
class Case:
    """A plan, and whether its transfers block."""

    shape: str
    plan: Plan
    blocking: bool

    @property
    def name(self) -> str:
        return f"{self.shape} {'blocking' if self.blocking else 'beside'}"


def planned(shape: str, devices: int, block_ns: int, comm: str, limit: str, directory: Path) -> Plan:
    """The plan that ``pipeplan search`` finds for a shape."""
    profile, plan = directory / f"{shape}{devices}.profile.json", directory / f"{shape}{devices}.json"
    chunks = 2 if shape == "zbv" else 1  # the costs of a device are divided among its chunks
    costs = ["--forward", f"{chunks * block_ns}ns"]
    if shape == "zbv":
        costs += ["--input-grad", f"{chunks * block_ns}ns", "--weight-grad", f"{chunks * block_ns}ns"]
    else:
        costs += ["--backward", f"{3 * block_ns}ns"]
    if shape in SHARED:
        costs += ["--shared-forward", f"{block_ns}ns", "--shared-backward", f"{block_ns}ns"]
    pipeplan("example", f"shape-{shape}", "--devices", str(devices), *costs, "--comm", comm, "-o", str(profile))
    count = str(2 * devices)
    search = ["--microbatches", count, "--time-limit", limit]
    if shape in BLOCKING:
        search += ["--scheduler", "repetend"]
    pipeplan("search", str(profile), *search, "-o", str(plan))
    return read_plan(str(plan))


def pipeplan(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pipeplan", *arguments], check=True, capture_output=True)


@dataclass(frozen=True)
class Emulated:
    """What a case took: ns of the iterations, without the first, and how far all times were stretched."""

    iterations: Sequence[int]
    stretch: float


def emulated(cases: Sequence[Case], steps: int, stretch: float) -> dict[str, Emulated]:
    """[case] times, all by the same processes."""
    found: dict[str, Emulated] = {}

    def listen(rank: int, report: Mapping[str, Any]) -> None:
        found[report["name"]] = Emulated(report["iterations"], report["stretch"])
        note(f"{report['name']} x {report['stretch']}: {', '.join(map(format_ns, report['iterations']))}")

    job = {case.name: {"plan": case.plan.model_dump_json(), "options": options(case, steps, stretch)} for case in cases}
    programs = cases[0].plan.programs
    watch_local("emulation:rank", programs, {"cases": job}, TIMEOUT_NS, listen, [sys.executable, __file__, AS_RANK])
    return found


def options(case: Case, steps: int, stretch: float) -> dict[str, Any]:
    return RunOptions(num_steps=steps + 1, timeout_ns=TIMEOUT_NS, blocking=case.blocking, stretch=stretch).as_json()


def rank(job: Mapping[str, Any], context: RankContext) -> None:
    """One process: all cases, of which rank 0 tells the times."""
    torch.set_num_threads(1)
    for name, case in job["cases"].items():
        plan = parse(case["plan"], Plan)
        context.progress.board.programs = plan.programs
        result = emulate(plan, RunOptions(**case["options"]), context.progress, lambda step: None)
        if context.rank == 0:
            iterations = [step.iteration_ns for step in result.steps[1:]]
            context.report({"event": "case", "name": name, "iterations": iterations, "stretch": result.stretch})
        dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="4,8", help="numbers of devices, and of processes")
    parser.add_argument("--block", default="20ms", help="time of a forward")
    parser.add_argument("--comm", default="0ns", help="predicted time of a message")
    parser.add_argument("--steps", type=int, default=20, help="steps that count")
    parser.add_argument("--stretch", default="auto", help="auto, or how many times as long everything takes")
    parser.add_argument("--shapes", default=",".join(dict.fromkeys(CLOSE + BLOCKING)))
    parser.add_argument("--no-blocking", action="store_true", help="without the comparison with blocking transfers")
    parser.add_argument("--limit", default="5s", help="time limit of a search")
    given = parser.parse_args()
    close, blocking = [], []
    stretch = 0.0 if given.stretch == "auto" else float(given.stretch)
    shapes = given.shapes.split(",")
    compared = [] if given.no_blocking else [shape for shape in shapes if shape in BLOCKING]
    with tempfile.TemporaryDirectory() as directory:
        for devices in map(int, given.devices.split(",")):
            block_ns = parse_ns(given.block)
            plans = {s: planned(s, devices, block_ns, given.comm, given.limit, Path(directory)) for s in shapes}
            cases = [Case(shape, plan, False) for shape, plan in plans.items()]
            cases += [Case(shape, plans[shape], True) for shape in compared]
            found = emulated(cases, given.steps, stretch)
            close += [closeness(shape, plans[shape], found[f"{shape} beside"]) for shape in plans]
            blocking += [comparison(shape, plans[shape], found) for shape in compared]
    header = ["shape", "devices", "micro-batches", "predicted", "stretched", "emulated", "more", "from", "to"]
    print(markdown(header, close))
    if blocking:
        header = ["shape", "devices", "predicted", "beside computing", "blocking", "blocking / beside"]
        print(f"\n{markdown(header, blocking)}")
    print(f"\n{machine()}, torch {version('torch')}")


def closeness(shape: str, plan: Plan, taken: Emulated) -> list[str]:
    """``predicted`` is the plan's; what was emulated is compared with that, stretched."""
    predicted, median = plan.predicted.makespan_ns, statistics.median(taken.iterations)
    times = [format_ns(time) for time in (min(taken.iterations), max(taken.iterations))]
    count, factor = str(plan.num_microbatches), f"{taken.stretch:g} times"
    more = f"{median / predicted / taken.stretch - 1:.2%}"
    return [shape, str(len(plan.devices)), count, format_ns(predicted), factor, format_ns(median), more, *times]


def comparison(shape: str, plan: Plan, found: Mapping[str, Emulated]) -> list[str]:
    """In the plan's time."""
    medians = {how: found[f"{shape} {how}"] for how in ("beside", "blocking")}
    beside, blocking = (statistics.median(each.iterations) / each.stretch for each in medians.values())
    times = [format_ns(time) for time in (plan.predicted.makespan_ns, beside, blocking)]
    return [shape, str(len(plan.devices)), *times, f"{blocking / beside:.2f}"]


if __name__ == "__main__":
    if AS_RANK in sys.argv:
        be_rank()
    else:
        main()
