"""AutoPipe's tables and figures by simulation: partitions, planners, balance, planning time, startup.

    python benchmarks/autopipe.py                      # prints the tables of docs/benchmarks/planners.md; a minute
    python benchmarks/autopipe.py --heads 2 --only planners,stated

Costs are estimated for an RTX 3090, with layers that are recomputed and attention in steps, as PyTorch 1.10 had it;
links are those of the paper's testbed. The paper does not state what the head (logits and loss) takes beside a layer,
and its partitions hang on that: ``--heads`` says how many layers it is worth, or ``estimated``. What it is by default
is fitted, and stands in ``autopipe_plans.py`` with the planners; ``autopipe_runs.py`` has Fig. 11.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, combinations, pairwise
from random import Random
from statistics import median
from typing import Any

from autopipe_plans import (
    FITTED_HEAD,
    LAYERS,
    MEMORY,
    PLANNERS,
    Case,
    Stages,
    autopipe,
    autopipe_as_stated,
    dapple_as_stated,
    estimated_head,
    one_f_one_b,
    piper_as_stated,
    problem_of,
    whole_pipelines,
)
from tables import machine, markdown, note

from pipeplan.costs import StageCost
from pipeplan.errors import InfeasibleError
from pipeplan.partition.baselines import num_to_split, sliced
from pipeplan.partition.chain.autopipe import Cuts, Step, plan_chain, timeline
from pipeplan.partition.chain.autopipe import autopipe as plan_depths
from pipeplan.partition.chain.costs import ChainCosts
from pipeplan.partition.dapple import dapple
from pipeplan.partition.piper import piper
from pipeplan.partition.problem import PartitionProblem, Pricing, Way
from pipeplan.workload.kinds import OPTIMIZER, MemoryBytes

TABLE_2 = (
    (5, 7, 6, 6),
    (6, 6.5, 6.5, 5),
    (6, 7, 6, 5),
    (6.5, 6.5, 6.5, 4.5),
    (6.5, 6.5, 6, 5),
    (7, 5.5, 6, 5.5),
    (7, 6.5, 5.5, 5),
)
"""Layers per stage of GPT-2 345M."""

Millis = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of Table III or IV: times in ms by mini-batch (None: it did not run, and why), and the depths of P and A
    that the text states."""

    model: str
    microbatch_size: int
    num_devices: int
    mini_batches: tuple[int, int, int]
    times: Mapping[str, Millis | None]
    failed: str
    depths: Mapping[str, int]


LOW, HIGH = (128, 256, 512), (512, 1024, 2048)
ROWS = (
    Row(
        "gpt2-345m", 4, 4, LOW,
        {"D": (11091, 19925, 39815), "P": (6755.6, 12842, 25421), "A": (6510.5, 12852, 25737)},
        "", {"P": 1, "A": 1},
    ),
    Row(
        "gpt2-345m", 4, 16, LOW,
        {"D": None, "P": (2081.1, 4066.0, 7216.0), "A": (2077.6, 4063.7, 7236.5)},
        "-", {"P": 1, "A": 1},
    ),
    Row(
        "gpt2-345m", 32, 4, HIGH,
        {"D": (27477.3, 53539.9, 105635), "P": (30285.9, 56399.5, 108694), "A": (27020.9, 50969.7, 99110.9)},
        "", {"P": 4, "A": 2},
    ),
    Row(
        "gpt2-345m", 32, 8, HIGH,
        {"D": (15828.6, 30853.7, 60898.3), "P": (18143.6, 31901.0, 60397.7), "A": (15445.3, 27147.5, 51217.4)},
        "", {"P": 6, "A": 2},
    ),
    Row(
        "gpt2-1.3b", 16, 4, HIGH,
        {"D": None, "P": (67087.2, 128831, 253052), "A": (62885.0, 119788, 234781)},
        "OOM", {"P": 4, "A": 4},
    ),
    Row(
        "gpt2-1.3b", 16, 8, HIGH,
        {"D": None, "P": (36783.1, 70017.3, 137135), "A": (34512.7, 62869.1, 120732)},
        "OOM", {"P": 5, "A": 4},
    ),
)  # fmt: skip


def as_stated(row: Row, case: Case, mini_batch: int) -> dict[str, Stages]:
    """The plans that the text tells of."""
    return {
        "D": dapple_as_stated(case, mini_batch),
        "P": piper_as_stated(case, row.depths["P"]),
        "A": autopipe_as_stated(case, row.depths["A"], mini_batch),
    }


def evenly(name: str, num_stages: int) -> Cuts:
    """Megatron-LM's cut: as many layers in every stage."""
    each = LAYERS[name] // num_stages
    return (0, *(1 + 2 * each * stage for stage in range(1, num_stages)))


def table_2(head: float | None) -> str:
    """The schemes ranked, with what is found and the best of all cuts."""
    case = Case("gpt2-345m", 4, 4, head)
    schemes = {
        str(number): (0, *(int(1 + 2 * sum(layers[:stage])) for stage in range(1, 4)))
        for number, layers in enumerate(TABLE_2, start=1)
    }
    schemes["found"] = plan_chain(case.loads, 4, 8).begins
    every = ((0, *inner) for inner in combinations(range(1, case.loads.num_blocks), 3))
    schemes["best of all cuts"] = min(every, key=lambda each: timeline(case.loads.stages(each), 8).iteration_ns)
    times = {name: timeline(case.loads.stages(begins), 8) for name, begins in schemes.items()}
    best = times["best of all cuts"].iteration_ns
    printed = {name: times[name].iteration_ns for name in schemes if name.isdigit()}
    assert min(printed.values()) == printed["4"], "scheme 4 is the fastest of the seven"
    assert max(printed.values()) == printed["1"], "scheme 1 is the slowest"
    rows = [
        [
            name,
            Stages(schemes[name], (1,) * 4).named(case),
            f"{found.iteration_ns / 1e6:.1f}",
            f"{found.iteration_ns / 8e6:.1f}",
            f"{found.iteration_ns / best:.3f}",
            str(found.master_stage()),
        ]
        for name, found in sorted(times.items(), key=lambda each: each[1].iteration_ns)
    ]
    return markdown(["scheme", "layers", "iteration, ms", "per micro-batch", "to the best", "master stage"], rows)


@dataclass(frozen=True, slots=True)
class Compared:
    """Three plans of one row and mini-batch; times in ns, None where a plan does not run, ``failures`` says why."""

    plans: Mapping[str, Stages]
    times: Mapping[str, int | None]
    failures: Mapping[str, str]

    @classmethod
    def of(cls, case: Case, plans: Mapping[str, Stages], mini_batch: int) -> Compared:
        """Simulate what can run."""
        count = mini_batch // case.microbatch_size
        failures = {name: failure(case, plan, count) for name, plan in plans.items()}
        times = {name: None if failures[name] else plan.iteration_ns(case, count) for name, plan in plans.items()}
        return cls(plans, times, failures)

    def cell(self, name: str, case: Case) -> str:
        """The plan and its time."""
        taken = self.times[name]
        return f"{self.plans[name].named(case)}: {self.failures[name] if taken is None else f'{taken / 1e6:,.0f}'}"

    def ratio(self, name: str) -> str:
        """Its time to AutoPipe's."""
        return self.failures[name].partition(",")[0] or ratio_of(self.times[name], self.times["A"])

    @property
    def least_ns(self) -> int:
        """Of the fastest."""
        return min(taken for taken in self.times.values() if taken is not None)

    @property
    def best(self) -> str:
        """The fastest, or all that are within a thousandth of it."""
        known = {name: taken for name, taken in self.times.items() if taken is not None}
        return ", ".join(name for name, taken in known.items() if taken <= 1.001 * self.least_ns)


def failure(case: Case, plan: Stages, num_microbatches: int) -> str:
    """Why a plan cannot run; empty if it can."""
    if plan.shared and max(plan.replicas) > case.microbatch_size:
        return f"x, {max(plan.replicas)} replicas share {case.microbatch_size} samples"
    needs = plan.needs(case, num_microbatches)
    return f"OOM, {needs / 1e9:.1f} GB" if needs > MEMORY else ""


def ratio_of(first: float | None, second: float | None) -> str:
    return "-" if first is None or second is None else f"{first / second:.3f}"


def comparison(head: float | None, plans_of: Callable[[Row, Case, int], dict[str, Stages]]) -> str:
    """Tables III and IV: plans and times of three planners, and their ratios beside the paper's."""
    free = plans_of is planned
    lines = []
    for row in ROWS:
        case = Case(row.model, row.microbatch_size, row.num_devices, head)
        for index, mini_batch in enumerate(row.mini_batches):
            found = Compared.of(case, plans_of(row, case, mini_batch), mini_batch)
            note(f"{row.model} {row.num_devices} {mini_batch}: {found.times}")
            least, smaller = of_any_size(case, mini_batch)
            assert not free or least <= 1.001 * found.least_ns, "AutoPipe's best size is no slower than any planner"
            theirs = {name: times[index] for name, times in row.times.items() if times is not None}
            lines.append(
                [
                    row.model if not index else "",
                    f"{row.microbatch_size}" if not index else "",
                    f"{row.num_devices}" if not index else "",
                    f"{mini_batch}",
                    *(found.cell(name, case) for name in "DPA"),
                    *([smaller] if free else []),
                    found.best,
                    f"{found.ratio('D')}, {found.ratio('P')}",
                    f"{ratio_of(theirs['D'], theirs['A']) if 'D' in theirs else row.failed}, "
                    f"{ratio_of(theirs['P'], theirs['A'])}",
                    min(theirs, key=lambda name: theirs[name]),
                ]
            )
    header = ["model", "size", "devices", "mini-batch", "D: layers, ms", "P", "A", *(["A, any size"] if free else [])]
    return markdown([*header, "best", "D/A, P/A", "paper", "best there"], lines)


def of_any_size(case: Case, mini_batch: int) -> tuple[int, str]:
    """AutoPipe's best plan when its micro-batches may be smaller, too: its time, and in words."""
    sizes = [case.microbatch_size // 2**power for power in range(case.microbatch_size.bit_length())]
    cases = [replace(case, microbatch_size=size) for size in sizes]
    plans = [(autopipe(each, mini_batch), each) for each in cases]
    times = [plan.iteration_ns(each, mini_batch // each.microbatch_size) for plan, each in plans]
    best, (plan, each) = min(zip(times, plans, strict=True), key=lambda found: found[0])
    return best, f"{plan.named(each)} of {each.microbatch_size}: {best / 1e6:,.0f}"


def planned(row: Row, case: Case, mini_batch: int) -> dict[str, Stages]:
    """What our planners find."""
    return {name: planner(case, mini_batch) for name, planner in PLANNERS.items()}


STATED = {"D": (2.73, 6.89), "P": (5.35, 12.7)}


def balance(head: float | None) -> str:
    """Fig. 13: the deviation of stage times on GPT-2 345M in micro-batches of 32, to AutoPipe's."""
    lines = []
    for row in ROWS[2:4]:
        case = Case(row.model, row.microbatch_size, row.num_devices, head)
        kinds = {
            "as stated": as_stated(row, case, row.mini_batches[0]),
            "ours": planned(row, case, row.mini_batches[0]),
        }
        for kind, plans in kinds.items():
            ours = plans["A"].deviation(case)
            lines += [
                [
                    f"{row.num_devices}",
                    f"{name} {kind}",
                    plans[name].named(case),
                    f"{plans[name].deviation(case) / 1e6:.1f}",
                    plans["A"].named(case),
                    f"{ours / 1e6:.1f}",
                    f"{plans[name].deviation(case) / ours:.2f}",
                    " to ".join(map(str, STATED[name])),
                ]
                for name in "DP"
            ]
    header = ["devices", "plan", "layers", "deviation, ms", "A", "deviation, ms", "ratio", "paper"]
    return markdown(header, lines)


def speedup(case: Case, depth: int) -> str:
    """Even layers' time to that of AutoPipe's cut, and with leading micro-batches in halves."""
    count = 2 * depth
    even = timeline(case.loads.stages(evenly(case.model, depth)), count).iteration_ns
    stages = case.loads.stages(plan_chain(case.loads, depth, count).begins)
    halved = sliced(stages, count, num_to_split(stages)).iteration_ns
    return f"{even / timeline(stages, count).iteration_ns:.2f}, {even / halved:.2f}"


def speedups(head: float | None) -> str:
    """Fig. 10: numbers of stages, twice as many micro-batches."""
    asked = (("gpt2-345m", 4, (2, 4, 8, 12)), ("gpt2-762m", 4, (2, 4, 9, 12)), ("bert-large", 16, (2, 4, 8, 12)))
    lines = [
        [name, f"{size}", *(speedup(Case(name, size, depth, head), depth) for depth in depths)]
        for name, size, depths in asked
    ]
    return markdown(["model", "size", "2 stages", "4", "8 (762M: 9)", "12"], lines)


def sizes(head: float | None) -> str:
    """Fig. 9: micro-batch sizes, 4 stages and 8 micro-batches; GPT-2 762M has no room for 32 there."""
    tried = (4, 8, 16, 24, 32)
    lines = []
    for name in ("gpt2-345m", "gpt2-762m", "bert-large"):
        fit = [size for size in tried if (name, size) != ("gpt2-762m", 32)]
        cells = [speedup(Case(name, size, 4, head), 4) for size in fit]
        lines.append([name, *cells, *["-"] * (len(tried) - len(fit))])
    return markdown(["model", *(f"size {size}" for size in tried)], lines)


def memory(head: float | None) -> str:
    """What the device that needs most needs: AutoPipe's cuts by depth, and the plans that the text tells of."""
    lines = []
    asked = [*ROWS[2:], *(replace(ROWS[2], model="gpt2-762m", microbatch_size=size, depths={}) for size in (24, 32))]
    for row in asked:
        case = Case(row.model, row.microbatch_size, row.num_devices, head)
        mini_batch = 64 * row.microbatch_size
        plans = [autopipe_as_stated(case, depth, mini_batch) for depth in (1, 2, 4)]
        plans += [as_stated(row, case, mini_batch)[name] for name in "DP"] if row.depths else []
        needs = [plan.needs(case, 64) for plan in plans]
        cells = [f"{each / 1e9:.1f}{' (too much)' if each > MEMORY else ''}" for each in needs]
        cells += ["-"] * (5 - len(cells))
        lines.append([row.model, f"{row.microbatch_size}", f"{row.num_devices}", *cells])
    return markdown(["model", "size", "devices", "whole model", "2 stages", "4 stages", "D", "P"], lines)


def first_plan(planner: Callable[[Any], Iterator[Any]], problem: Any) -> Any:
    return next(planner(problem))


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Median of some runs."""
    return seconds_in_turn([run], repeats)[0]


def seconds_in_turn(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Medians, of the processor's time, of runs that take turns: other programs on the machine count as little as can
    be."""
    taken: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, times in zip(runs, taken, strict=True):
            start = time.process_time()
            run()
            times.append(time.process_time() - start)
    return [median(times) for times in taken]


def planning(head: float | None) -> str:
    """Fig. 12: seconds to plan, and AutoPipe's search against all cuts into four stages."""
    asked = {"gpt2-345m": 32, "gpt2-762m": 24, "gpt2-1.3b": 16, "bert-large": 16}
    header = ["model", "blocks", "4 stages (schemes)", "all cuts (schemes)", "ratio", "A, 16 devices"]
    lines = [planned_in(Case(name, size, 16, head)) for name, size in asked.items()]
    return markdown([*header, "P", "P/A", "D", "D/A"], lines)


def planned_in(case: Case) -> list[str]:
    """Seconds of every planner; costs are known before."""
    mini_batch = 16 * case.microbatch_size * case.num_devices
    chain = plan_chain(case.loads, 4, 8)
    every = [(0, *inner) for inner in combinations(range(1, case.loads.num_blocks), 3)]
    one = seconds(lambda: plan_chain(case.loads, 4, 8), 15)
    whole = seconds(lambda: [timeline(case.loads.stages(each), 8) for each in every], 1)
    problems = [problem_of(case, mini_batch, shared=shared) for shared in (False, True)]
    planners: list[Callable[[Any], Iterator[Any]]] = [plan_depths, piper, dapple]
    plans = zip(planners, (whole_pipelines(case, mini_batch), *problems), strict=True)
    ours, *theirs = seconds_in_turn([partial(first_plan, plan, of) for plan, of in plans], 7)
    assert max(one, ours) < 0.1, "planning takes less than a tenth of a second"
    return [
        case.model,
        f"{case.loads.num_blocks}",
        f"{one * 1e3:.1f} ms ({chain.num_simulated})",
        f"{whole:.1f} s ({len(every):,})",
        f"{whole / one:,.0f}",
        f"{ours * 1e3:.1f} ms",
        *(cell for each in theirs for cell in (f"{each * 1e3:.0f} ms", f"{each / ours:.1f}")),
    ]


def most_held(ends: Mapping[Step, int], stage: int) -> int:
    """Micro-batches that a stage holds at most, by the order of its actions."""
    order = sorted((end, kind) for (kind, at, _), end in ends.items() if at == stage)
    return max(accumulate(1 if kind == "F" else -1 for _, kind in order))


def bytes_held(case: Case, begins: Cuts, ends: Mapping[Step, int]) -> int:
    """Of the stage that needs most, when its actions run in this order."""
    found = []
    for stage, (begin, end) in enumerate(pairwise((*begins, case.loads.num_blocks))):
        costs = case.costs(case.microbatch_size)[begin:end]
        found.append(
            case.statics(begins)[stage]
            + most_held(ends, stage) * sum(each.activation_bytes for each in costs)
            + max(each.workspace_bytes for each in costs)
        )
    return max(found)


def interleaved(case: Case, depth: int) -> tuple[str, str]:
    """Startup in ms and GB of Megatron-LM's interleaved 1F1B with two chunks of even layers on each device.

    It needs an even number of layers on a device. The first micro-batch is at the last device after the first chunks of
    all others; a device starts 2 (depth - d - 1) + depth + 1 forwards ahead, in groups of ``depth`` for each chunk.
    """
    if LAYERS[case.model] % (2 * depth):
        return "X", "X"
    begins = evenly(case.model, 2 * depth)
    loads, bounds = case.loads.stages(begins), [*begins, case.loads.num_blocks]
    arrives = sum(loads.forwards[: depth - 1]) + (depth - 1) * case.transfer_ns
    costs, statics = case.costs(case.microbatch_size), case.statics(begins)
    needs = []
    for device in range(depth):
        chunks = [costs[bounds[chunk] : bounds[chunk + 1]] for chunk in (device, device + depth)]
        held = [sum(each.activation_bytes for each in chunk) for chunk in chunks]
        order = one_f_one_b(range(4 * depth), min(4 * depth, 2 * (depth - device - 1) + depth + 1))
        now, most = 0, 0
        for kind, number in order:
            chunk = number // depth % 2
            now += held[chunk] if kind == "F" else -held[1 - chunk]
            most = max(most, now)
        workspace = max(each.workspace_bytes for chunk in chunks for each in chunk)
        needs.append(statics[device] + statics[device + depth] + most + workspace)
    return f"{arrives / 1e6:.1f}", f"{max(needs) / 1e9:.2f}{' (too much)' if max(needs) > MEMORY else ''}"


def startup(head: float | None) -> str:
    """Fig. 14: startup of GPT-2 345M whole and in halves, for even layers and AutoPipe's cut, and the memory."""
    lines = []
    for depth, size in ((2, 4), (4, 4), (8, 4), (12, 4), (4, 8), (4, 16), (4, 24), (4, 32)):
        case, count = Case("gpt2-345m", size, depth, head), 2 * depth
        cells: list[str] = []
        for begins in (evenly("gpt2-345m", depth), plan_chain(case.loads, depth, count).begins):
            stages = case.loads.stages(begins)
            before, after = timeline(stages, count), sliced(stages, count, num_to_split(stages))
            memory = [bytes_held(case, begins, each.ends) for each in (before, after)]
            assert memory[0] == memory[1], "halves hold no more"
            assert abs(after.startup_ns / before.startup_ns - 0.5) < 1e-3, "halves start in half the time"
            too_much = " (too much)" if memory[0] > MEMORY else ""
            cells += [f"{each.startup_ns / 1e6:.1f}" for each in (before, after)] + [f"{memory[0] / 1e9:.2f}{too_much}"]
        lines.append([f"{depth}", f"{size}", *cells[:3], *interleaved(case, depth), *cells[3:]])
    even = ["even layers: startup, ms", "sliced", "GB, both", "interleaved", "GB"]
    return markdown(["stages", "size", *even, "AutoPipe's cut: startup, ms", "sliced", "GB, both"], lines)


def random_blocks(random: Random, blocks: int) -> list[StageCost]:
    """Forwards of 1 to 12 and backwards of 1 to 24."""
    forwards, backwards = ([random.randint(1, most) for _ in range(blocks)] for most in (12, 24))
    return [StageCost(*times, state=MemoryBytes({OPTIMIZER: 1})) for times in zip(forwards, backwards, strict=True)]


def random_chain(random: Random, blocks: int) -> ChainCosts:
    return ChainCosts.of(random_blocks(random, blocks))


def search(head: float | None) -> str:
    """What the heuristic search and its start miss of the best of all cuts: 500 random chains per number of stages."""
    random, lines = Random(0), []
    for depth in (2, 3, 4, 5):
        misses: list[list[float]] = [[], []]
        for _ in range(500):
            loads = random_chain(random, random.randint(max(6, depth), 12))
            every = ((0, *inner) for inner in combinations(range(1, loads.num_blocks), depth - 1))
            best = min(timeline(loads.stages(each), 2 * depth).iteration_ns for each in every)
            found = plan_chain(loads, depth, 2 * depth)
            for column, reached in zip(misses, (found.iteration_ns, found.start_ns), strict=True):
                column.append(reached / best - 1)
        cells = [
            cell
            for column in misses
            for cell in (f"{column.count(0.0)}", f"{sum(column) / len(column):.2%}", f"{max(column):.1%}")
        ]
        lines.append([f"{depth}", *cells])
    header = ["best found", "above it, mean", "most"]
    return markdown(["stages", *(f"search: {each}" for each in header), *(f"start: {each}" for each in header)], lines)


def at_most_20(blocks: Sequence[StageCost], devices: int, count: int) -> PartitionProblem:
    """Memory that has room for 20 blocks in a stage, and every number of replicas."""
    names = [str(block) for block in range(len(blocks))]
    ways = tuple(Way(replicas, replicas, 0) for replicas in range(1, devices + 1) if count % replicas == 0)
    costs = {name: (cost,) for name, cost in zip(names, blocks, strict=True)}
    return PartitionProblem(costs, tuple(pairwise(names)), devices, count, (Pricing(1),), ways, memory_bytes=20)


def scale(head: float | None) -> str:
    """Seconds to plan random chains, by blocks, stages and micro-batches."""
    random, lines = Random(0), []
    for blocks, depth, count in ((100, 8, 32), (400, 8, 32), (400, 32, 128), (400, 32, 4096), (400, 128, 512)):
        loads = random_chain(random, blocks)
        found = plan_chain(loads, depth, count)
        taken = seconds(partial(plan_chain, loads, depth, count), 3)
        lines.append([f"{blocks}", f"{depth}", f"{count}", f"{found.num_simulated}", f"{taken:.3f}"])
    for blocks, devices, count in ((400, 64, 256), (400, 1024, 4096)):
        problem = at_most_20(random_blocks(random, blocks), devices, count)
        chosen = next(plan_depths(problem)).placement.stages
        name = f"1 to {devices}: {len(chosen)} with {chosen[0].replicas} replicas"
        taken = seconds(partial(first_plan, plan_depths, problem), 3)
        lines.append([f"{blocks}", name, f"{count}", "", f"{taken:.3f}"])
    return markdown(["blocks", "stages", "micro-batches", "schemes", "seconds"], lines)


TABLES: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "schemes": ("Table II, 8 micro-batches of 4 on 4 devices", table_2),
    "planners": ("Tables III and IV, what our planners find", lambda head: comparison(head, planned)),
    "stated": ("Tables III and IV, the plans that the text tells of", lambda head: comparison(head, as_stated)),
    "balance": ("Fig. 13, balance", balance),
    "memory": (f"Memory, GB of {MEMORY / 1e9:g}", memory),
    "sizes": ("Fig. 9, even layers to AutoPipe's planner, and with its slicer", sizes),
    "speedups": ("Fig. 10, even layers to AutoPipe's planner, and with its slicer", speedups),
    "planning": ("Fig. 12, planning time", planning),
    "startup": ("Fig. 14, startup", startup),
    "search": ("Random chains of 6 to 12 blocks", search),
    "scale": ("Long chains", scale),
}
WITHOUT_HEAD = ("search", "scale")


def printed(names: Sequence[str], heads: Sequence[float | None]) -> Iterator[str]:
    for name in names:
        title, table = TABLES[name]
        if name in WITHOUT_HEAD:
            yield f"{title}\n\n{table(None)}"
            continue
        for head in heads:
            layers = f"{estimated_head('gpt2-345m', 32):.2f}, as estimated" if head is None else f"{head:g}, fitted"
            yield f"{title}; layers that the head of GPT-2 345M is worth: {layers}\n\n{table(head)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(TABLES), help=f"some of {', '.join(TABLES)}")
    parser.add_argument(
        "--heads", default=f"{FITTED_HEAD},estimated", help="layers that the head is worth, or estimated"
    )
    options = parser.parse_args()
    heads = [None if head == "estimated" else float(head) for head in options.heads.split(",")]
    for text in printed(options.only.split(","), heads):
        print(text, end="\n\n")
    print(f"{machine()}.")


if __name__ == "__main__":
    try:
        main()
    except InfeasibleError as error:
        raise SystemExit(f"no plan: {error}") from None
