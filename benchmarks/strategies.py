"""TensorOpt's Table 2 on gloo: how far estimates are from runs, over 20 strategies drawn at random.

    pip install 'pipeplan[torch]'
    python benchmarks/strategies.py [--model gpt2-124m] [--model strategies:translation] [--sequence 64]
        [--strategies 20] [--kept pieces.jsonl --part-seconds 120]       # some nine minutes for GPT-2, quiet

GPT-2 124M and, of the module itself, an encoder with a decoder of the size of T5's smallest: a Transformer each, as the
paper's RNN and WideResNet have no modules here. A model is profiled here, whole and in halves, and so are the links
between two processes; then two processes, a core for each, train with strategies that split every block in a way drawn
at random. Errors are the paper's, (c - e) / c of what was measured and what was estimated, averaged over the
strategies, and without their signs. Execution time is the median of the steps after the first. Network time is what is
spent in collectives, in which a process also waits for the other one; memory what the process that needs most takes
beyond what it had before. Run it where nothing else runs. The profile is a piece, and so are every five strategies;
pieces that are done are kept in a file, so that it can be run in parts.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from resumed import Paused, Pieces, resumable
from tables import machine, markdown, note

from pipeplan.errors import UsageError
from pipeplan.files import Cluster, Plan, Profile, parse
from pipeplan.planning.sharding_frontier import plan_of_strategy
from pipeplan.runtime.launch.__main__ import main as be_rank
from pipeplan.runtime.launch.job import RankContext
from pipeplan.runtime.launch.local import watch_local
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.models.zoo.encoder_decoder import TranslationSize
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.runtime.training.trainer import train
from pipeplan.sharding.cost_model import CostModel, CostOptions, cost_model
from pipeplan.sharding.details import details_of
from pipeplan.sharding.graph import Strategy

AS_RANK = "--as-rank"
DEVICES, SAMPLES, TIMEOUT_NS = 2, 4, 120 * 10**9
AT_ONCE = 5
"""Strategies that two processes run before they end."""
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all_single", "broadcast")


@dataclass(frozen=True, slots=True)
class Case:
    """A strategy's plan, and what is estimated: ns of an iteration and of messages, bytes of the fullest device."""

    plan: Plan
    network_ns: int

    @property
    def estimated(self) -> tuple[int, int, int]:
        memory = max(device.peak_bytes for device in self.plan.predicted.memory)
        return self.plan.predicted.whole_ns, self.network_ns, memory


def translation() -> Model:
    """Six layers of each stack and the widths of T5's smallest model, sequences of 64."""
    return TranslationSize(6, 512, 8, 32_128, 64, biased=False, shared=False).model("translation")


def pipeplan(*arguments: str) -> None:
    """Run a verb here, where it finds the models of this file."""
    command = [sys.executable, "-m", "pipeplan", *arguments]
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parent)


def measured_costs(model: str, sequence: int) -> dict[str, str]:
    """The texts of the profile of the model and of the links, on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        profile, cluster = Path(folder) / "profile.json", Path(folder) / "cluster.json"
        sizes = ["--microbatch", "2,4", "--shards", "1,2", "--threads", "1", *lengths(model, sequence)]
        pipeplan("profile", model, *sizes, "-o", str(profile))
        pipeplan("profile", "--communication", "--processes", str(DEVICES), "-o", str(cluster))
        return {"profile": profile.read_text(encoding="utf-8"), "cluster": cluster.read_text(encoding="utf-8")}


def lengths(model: str, sequence: int) -> list[str]:
    """The flag of shorter sequences, which models of a module have of their own."""
    return [] if ":" in model else ["--sequence", str(sequence)]


def drawn(built: CostModel, profile: Profile, cluster: Cluster, count: int) -> list[Case]:
    """Plans of strategies that a run can follow, each block's configuration drawn from all that it has."""
    random, cases = Random(0), list[Case]()
    while len(cases) < count:
        chosen = {node.name: random.randrange(len(node.configurations)) for node in built.graph.nodes}
        nodes = dict.fromkeys(chosen, 0)
        strategy = Strategy(0, 0, chosen, nodes, (0,) * len(built.graph.edges))
        try:
            plan = plan_of_strategy(profile, built, strategy, cluster=cluster)
        except UsageError as error:
            note(f"  another one: {str(error)[:120]}")
            continue
        cases.append(Case(plan, details_of(built, strategy).network_ns))
    return cases


def run(cases: Sequence[Case], options: TrainOptions) -> list[dict[str, Any]]:
    """[case] what the processes tell: times of steps and messages of each rank, and bytes."""
    told: list[dict[str, Any]] = []
    job = {"plans": [case.plan.model_dump_json() for case in cases], "options": options.as_json()}

    def listen(rank: int, report: Mapping[str, Any]) -> None:
        told.append(dict(report))
        note(f"  {len(told)}: {statistics.median(report['steps']) / 1e6:.0f} ms")

    programs = cases[0].plan.programs
    watch_local("strategies:rank", programs, job, TIMEOUT_NS, listen, [sys.executable, __file__, AS_RANK])
    return told


class Timed:
    """Collectives with a clock: ``spent`` ns, and what it was after each step."""

    def __init__(self) -> None:
        self.spent, self.marks = 0, list[int]()
        for name in COLLECTIVES:
            setattr(dist, name, self.wrapped(getattr(dist, name)))

    def mark(self, step: object) -> None:
        """The end of a step."""
        self.marks.append(self.spent)

    def wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **more: Any) -> Any:
            start = time.perf_counter_ns()
            found = call(*arguments, **more)
            if found is not None:  # asynchronous: here it ends at once, so that it is timed, too
                found.wait()
            self.spent += time.perf_counter_ns() - start
            return found

        return timed


def resident(key: str) -> int:
    """Bytes by this key of the process's status; ``VmHWM`` is the most since it was last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"no {key}: this benchmark needs Linux")


def rank(job: Mapping[str, Any], context: RankContext) -> None:
    """One process: all plans, one after another."""
    torch.set_num_threads(1)
    timed, options = Timed(), TrainOptions(**job["options"])
    for text in job["plans"]:
        plan = parse(text, Plan)
        context.progress.board.programs = plan.programs
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        timed.marks = []
        found = train(plan, options, context.progress, timed.mark)
        own = [statistics.median(after - start for start, after in pairwise(timed.marks)), resident("VmHWM") - before]
        every = [torch.zeros(2, dtype=torch.float64) for _ in range(DEVICES)]
        dist.all_gather(every, torch.tensor(own, dtype=torch.float64))
        if context.rank == 0:
            steps = [step.iteration_ns for step in found.steps[1:]]
            network, memory = (max(each[place].item() for each in every) for place in (0, 1))
            context.report({"event": "case", "steps": steps, "network": network, "memory": memory})
        del found
        dist.barrier()


def errors(cases: Sequence[Case], told: Sequence[Mapping[str, Any]]) -> list[str]:
    """Time, network and memory: the mean of the errors with and without signs."""
    cells = []
    for place in range(3):
        pairs = []
        for case, report in zip(cases, told, strict=True):
            actual = (statistics.median(report["steps"]), report["network"], report["memory"])[place]
            pairs.append((actual - case.estimated[place]) / actual)
        cells.append(f"{statistics.mean(pairs):+.1%} ({statistics.mean(map(abs, pairs)):.1%})")
    return cells


def row_of(pieces: Pieces, name: str, given: argparse.Namespace) -> list[str]:
    """A model's line of the table."""
    texts = pieces.get(f"{name}: costs", lambda: measured_costs(name, given.sequence))
    profile, cluster = parse(texts["profile"], Profile), parse(texts["cluster"], Cluster)
    built = cost_model(profile, cluster, DEVICES, SAMPLES, options=CostOptions(blocks=True, reuse=False))
    cases = drawn(built, profile, cluster, given.strategies)
    sequence = None if ":" in name else given.sequence
    options = TrainOptions(num_steps=given.steps + 1, timeout_ns=TIMEOUT_NS, model=name, sequence=sequence)
    told: list[dict[str, Any]] = []
    for first in range(0, len(cases), AT_ONCE):
        some = cases[first : first + AT_ONCE]
        told += pieces.get(f"{name}: strategies from {first + 1}", partial(run, some, options))
    for case, report in zip(cases, told, strict=True):
        note(f"  {case.estimated} {report}")
    return [name, str(len(cases)), *errors(cases, told)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="a model that runs; by default gpt2-124m")
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--strategies", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3, help="steps that count, after a first one")
    resumable(parser)
    given = parser.parse_args()
    pieces = Pieces(given.kept, given.part_seconds)
    try:
        rows = [row_of(pieces, name, given) for name in given.model or ["gpt2-124m"]]
    except Paused as paused:
        note(str(paused))
        return 3
    print(markdown(["model", "strategies", "execution time", "network time", "memory"], rows))
    print(f"\n{machine()}, torch {version('torch')}")
    return 0


if __name__ == "__main__":
    if AS_RANK in sys.argv:
        be_rank()
    else:
        sys.exit(main())
