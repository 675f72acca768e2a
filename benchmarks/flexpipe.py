"""FlexPipe's GPT models on its cluster: the best plan by rules beside even 1F1B, T-1F1B and the repetend alone.

    python benchmarks/flexpipe.py [--size 5b] [--vocabulary 1m] [--limit 60] [--scaling]
        [--cache cells.jsonl --kept pieces.jsonl --part-seconds 90]

Prints Markdown tables (FlexPipe, section 7.1, Fig. 12 to 15). Costs are estimated and iterations simulated: nothing is
measured. Every schedule has the best of all depths, replicas and micro-batch sizes that are powers of two, the others
with and without recomputation, the rules without. Those that search, Tessel and the rules, have the same seconds in all
(``--limit``), then both twice as many, until two doublings shorten neither by a thousandth: seconds that the process
works, which other work on the machine does not shorten. What the rules find is a piece, and what each choice of depth
and size brings Tessel; pieces that are done are kept in a file, so that it can be run in parts. ``--scaling`` prints
Fig. 15 alone, for the last of the vocabularies of a size: all sides anew on 16 devices, and what is best there in two
and four times as many replicas, in the same even time.
Fails where the rules are slower than even 1F1B or T-1F1B.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from resumed import Paused, Pieces, resumable, work_of
from tables import machine, markdown, note

from pipeplan.costs.clusters import named_cluster
from pipeplan.errors import InfeasibleError, SearchTimeoutError
from pipeplan.examples import model
from pipeplan.files import Plan, Profile, parse
from pipeplan.partition.chain.costs import Chain
from pipeplan.partition.placement import place
from pipeplan.planning.build_plan import planned
from pipeplan.planning.candidates import PlacementCandidate
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.trials import Trial
from pipeplan.planning.tuning import tune
from pipeplan.planning.tuning_cells import Cell, settled_cell
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.search import search_schedule

GPUS, MINI_BATCH, SIZES = 32, 128, (1, 2, 4)
SCALED = (16, 32, 64)
"""Devices of Fig. 15. Each schedule keeps what is best on the fewest, since replicas can only be multiplied."""
VOCABULARIES = {"5b": ("64k", "128k", "256k", "512k", "1m"), "16b": ("256k", "512k", "1m", "1.1m", "1.2m")}
LAYERS = {"5b": 64, "16b": 80}
STATED = {"5b": ("1.14-1.91", "1.20-1.28", "1.13-1.30"), "16b": ("1.31-2.28", "1.27-1.31", "1.24-1.49")}
"""The paper's speedups over Megatron-LM, T-1F1B and Tessel (section 7.1)."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """What a schedule keeps when devices are added: depth, samples of a micro-batch, recomputation."""

    depth: int
    size: int
    recompute: bool

    @classmethod
    def of(cls, plan: Plan) -> Fixed:
        replicas = plan.stages[0].replicas
        return cls(len(plan.devices) // replicas, plan.microbatch_size // replicas, plan.stages[0].recomputes)


@dataclass(frozen=True, slots=True)
class Rival:
    """A schedule and its placement: the vocabulary spread, or on the first and last stage of evenly many layers each.

    ``searches``: what it finds depends on the time it has.
    """

    name: str
    scheduler: str
    spread: bool
    deepest: int = GPUS
    searches: bool = False


RIVALS = (
    Rival("Megatron-LM", "1f1b", spread=False),
    Rival("T-1F1B", "1f1b+", spread=True),
    Rival("Tessel", "repetend", spread=True, deepest=8, searches=True),
)
NAMES = (*(rival.name for rival in RIVALS), "rules")
STILL, DOUBLINGS = 0.001, 2
"""Sides that so many doublings of their time in a row shorten by less have stopped improving."""
MOST_SECONDS = 640.0


@cache
def profile_of(name: str) -> Profile:
    """The model's estimated costs on an A800, its vocabulary split over 1 to 32 devices of a node or more."""
    cluster = named_cluster("flexpipe")
    shards = (1, 2, 4, 8, 16, 32)
    return model(name, device="a800-80gb", microbatch_sizes=SIZES, shards=shards, cluster=cluster)


def request_of(profile: Profile, devices: int, options: dict[str, Any], sizes: Sequence[int] = SIZES) -> Request:
    """So many of the paper's GPUs, and as many samples for each as in the paper."""
    batch = Batch(MINI_BATCH * devices // GPUS, 1)
    cluster = named_cluster("flexpipe", devices)
    return Request(profile, devices, batch, sizes=tuple(sizes), cluster=cluster, **options)


def even(layers: int) -> Callable[[Chain], tuple[int, ...]]:
    """As many layers on every stage, the embedding before and the head behind them."""

    def cut(chain: Chain) -> tuple[int, ...]:
        each = 2 * layers // chain.num_stages
        return (0, *(1 + each * stage for stage in range(1, chain.num_stages)))

    return cut


def settings(request: Request, rival: Rival, layers: int) -> Iterator[Fixed]:
    """Powers of two: depths that divide the layers, and sizes."""
    for depth in (2**power for power in range(1, request.num_devices.bit_length())):
        for size in SIZES:
            fits = request.batch.mini_batch % (size * request.num_devices // depth) == 0
            if fits and layers % depth == 0 and depth <= rival.deepest:
                yield from (Fixed(depth, size, recompute) for recompute in (False, True))


def cell_of(request: Request, rival: Rival, layers: int, fixed: Fixed) -> Cell:
    """Its placement on the cluster's devices, with a bound; a failure where it does not fit."""
    replicas = request.num_devices // fixed.depth
    size = fixed.size * replicas
    try:
        placement = place(
            request.profile,
            "one-to-one",
            request.num_devices,
            microbatch_size=size,
            memory_bytes=request.memory,
            recompute=fixed.recompute,
            replicas=replicas,
            spread=rival.spread,
            cut=None if rival.spread else even(layers),
        )
    except InfeasibleError as error:
        return Cell(failure=str(error))
    batch = Batch(request.batch.mini_batch // size, size)
    return settled_cell(request, Cell(PlacementCandidate(placement, batch, fixed.recompute, rival.name)), lambda: False)


def rival_plan(
    request: Request,
    rival: Rival,
    layers: int,
    seconds: float,
    fixed: Fixed | None = None,
    pieces: Pieces | None = None,
) -> Plan | None:
    """Its shortest iteration over all it may choose, or with what is fixed; None where nothing fits into the memory.

    A search has ``seconds`` for all choices together: each its equal share of what is left. Each is one of the pieces.
    """
    choices = settings(request, rival, layers) if fixed is None else [fixed]
    cells = [cell_of(request, rival, layers, choice) for choice in choices]
    waiting = sorted((cell for cell in cells if cell.candidate), key=lambda cell: cell.bound_ns)
    best, left, pieces, where = None, seconds, pieces or Pieces(), place_of(request.num_devices, fixed)
    for index, cell in enumerate(waiting):
        if best is not None and cell.bound_ns >= best.predicted.iteration_ns:
            break
        promising = [each for each in waiting[index:] if best is None or each.bound_ns < best.predicted.iteration_ns]
        share = max(1.0, left / len(promising)) if rival.searches else 0.0
        name = f"{request.profile.name}{where}, {rival.name}, {seconds:g} s of work, choice {index}"
        found = pieces.get(name, partial(searched, request, rival, cell, share))
        left -= found["seconds"]
        best = shorter(best, None if found["plan"] is None else parse(found["plan"], Plan))
    return best


def searched(request: Request, rival: Rival, cell: Cell, seconds: float) -> dict[str, Any]:
    """The text of the plan of one choice, None where none is found, and the seconds that took."""
    assert cell.candidate is not None
    workload, begun = Trial.of(request, cell.candidate).ways[0], time.process_time()
    try:
        found = search_schedule(workload, Budget(seconds, 0, clock=time.process_time), scheduler=rival.scheduler)
        plan = planned(request, cell.candidate, found, found.workload).model_dump_json()
    except (InfeasibleError, SearchTimeoutError):
        plan = None
    return {"plan": plan, "seconds": time.process_time() - begun}


def rules_plan(request: Request, kept: str | None) -> Plan:
    """The best of the auto-tuner, with one process; of cells in the cache it takes what is known."""
    found = tune(request, cache=kept, within=work_of(request.time_limit))
    note(f"  {found.said}")
    return found.result.plan


def rules_text(request: Request, cells: str | None) -> str:
    """The same as a text."""
    return rules_plan(request, cells).model_dump_json()


def place_of(devices: int, fixed: Fixed | None) -> str:
    """What stands in the names of pieces that are not of the paper's devices with everything open."""
    return "" if devices == GPUS and fixed is None else f" on {devices}, {'open' if fixed is None else fixed}"


def of_rules(profile: Profile, devices: int, seconds: float, fixed: Fixed | None) -> Request:
    """What the rules are asked."""
    options: dict[str, Any] = {"spread": True, "recompute": False, "time_limit": seconds}
    if fixed is None:
        return request_of(profile, devices, options)
    replicas = devices // fixed.depth
    options |= {"replicas": replicas, "recompute": fixed.recompute}
    return request_of(profile, devices, options, (fixed.size * replicas,))  # sizes are of all replicas


def even_plans(
    profile: Profile,
    layers: int,
    limit: float,
    cells: str | None,
    pieces: Pieces,
    devices: int = GPUS,
    kept: Mapping[str, Fixed] | None = None,
) -> tuple[dict[str, Plan | None], float]:
    """[schedule] its best plan, with what it has ``kept``, and the seconds that each searching side had last, the same.

    The rules keep what they looked at before, the repetend's search begins anew with all of its time.
    """
    whole, kept = request_of(profile, devices, {"split_backward": False}), kept or {}
    able = [rival for rival in RIVALS if not kept or rival.name in kept]
    plans: dict[str, Plan | None] = dict.fromkeys(NAMES)
    for rival in able:
        if not rival.searches:
            plans[rival.name] = rival_plan(whole, rival, layers, 0.0, kept.get(rival.name))
    seconds, still = limit, 0
    while still < DOUBLINGS and seconds <= MOST_SECONDS:
        asked = of_rules(profile, devices, seconds if seconds == limit else seconds / 2, kept.get("rules"))
        name = f"{profile.name}{place_of(devices, kept.get('rules'))}, rules, {seconds:g} s of work"
        found: dict[str, Plan | None] = {"rules": parse(pieces.get(name, partial(rules_text, asked, cells)), Plan)}
        for rival in able:
            if rival.searches:
                found[rival.name] = rival_plan(whole, rival, layers, seconds, kept.get(rival.name), pieces)
        still = 0 if any(shortened(plans.get(name), plan) for name, plan in found.items()) else still + 1
        plans |= {name: shorter(plans.get(name), plan) for name, plan in found.items()}
        note(f"  {seconds:g} s: " + ", ".join(f"{name} {described(plan)}" for name, plan in plans.items()))
        seconds *= 2
    return plans, seconds / 2


def shortened(before: Plan | None, after: Plan | None) -> bool:
    """Whether a doubling brought a thousandth, or a first plan."""
    if before is None or after is None:
        return after is not None
    return after.predicted.iteration_ns < (1 - STILL) * before.predicted.iteration_ns


def shorter(one: Plan | None, other: Plan | None) -> Plan | None:
    """The plan with the shorter iteration."""
    there = [plan for plan in (one, other) if plan is not None]
    return min(there, key=lambda plan: plan.predicted.iteration_ns, default=None)


def described(plan: Plan | None) -> str:
    """Iteration in ms, depth x replicas, samples of a micro-batch."""
    if plan is None:
        return "out of memory"
    fixed = Fixed.of(plan)
    again = ", recomputed" if fixed.recompute else ""
    time_ms = plan.predicted.iteration_ns / 1e6
    return f"{time_ms:,.0f} ms ({fixed.depth} x {len(plan.devices) // fixed.depth}, {fixed.size}{again})"


def speedup(plan: Plan, rival: Plan | None) -> str:
    """By how much the rival's iteration is longer."""
    return "-" if rival is None else f"{rival.predicted.iteration_ns / plan.predicted.iteration_ns:.2f}"


def chosen(plan: Plan) -> str:
    """Placement and rules."""
    placement = plan.placement.removesuffix(", shared blocks spread")
    return f"{placement}: {plan.provenance.scheduler.removeprefix('rules: ')}"


def parted(plan: Plan) -> tuple[str, str]:
    """Ms that a device computes, and waits, on average: Fig. 14's two parts of an iteration."""
    workload = plan.workload
    work = sum(workload.work_of(x) * len(workload.resources[x]) for x in range(len(workload.operations)))
    busy = work / len(plan.devices)
    return f"{busy / 1e6:,.0f}", f"{(plan.predicted.iteration_ns - busy) / 1e6:,.0f}"


def scaled(name: str, limit: float, cells: str | None, pieces: Pieces) -> list[list[str]]:
    """Iterations on 16 to 64 devices, each schedule with the configuration that is best on 16 (Fig. 15)."""
    profile, layers, rows = profile_of(name), LAYERS[name.split("-")[2]], list[list[str]]()
    kept: dict[str, Fixed] = {}
    for devices in SCALED:
        plans, seconds = even_plans(profile, layers, limit, cells, pieces, devices, kept)
        kept = kept or {schedule: Fixed.of(plan) for schedule, plan in plans.items() if plan is not None}
        rows.append([str(devices), *(described(plans[schedule]) for schedule in NAMES), f"{seconds:g} s of work"])
    return rows


@dataclass(frozen=True, slots=True)
class Row:
    """A vocabulary, done: cells of its row and of Fig. 14, and whether the rules lose to a line of 1F1B."""

    cells: list[str]
    parts: list[list[str]]
    worse: bool


def row_of(size: str, vocabulary: str, limit: float, cells: str | None, pieces: Pieces) -> Row:
    """All of a vocabulary."""
    name = f"flexpipe-gpt-{size}-{vocabulary}"
    note(name)
    plans, seconds = even_plans(profile_of(name), LAYERS[size], limit, cells, pieces)
    ours, others = plans["rules"], [plans[rival.name] for rival in RIVALS]
    assert ours is not None
    line = [vocabulary, *map(described, (*others, ours)), *(speedup(ours, other) for other in others), chosen(ours)]
    return Row(
        [*line, f"{seconds:g} s"],
        [[name, *parted(plan)] for name, plan in plans.items() if plan is not None],
        any(plan is not None and shortened(ours, plan) for plan in others[:2]),
    )


def main() -> int:
    """Print the tables asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=list(LAYERS), action="append")
    parser.add_argument("--vocabulary", action="append")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that each searching side has at first")
    parser.add_argument("--cache", help="file of the rules' cells")
    resumable(parser)
    parser.add_argument("--scaling", action="store_true", help="16 to 64 devices alone, for a size's last vocabulary")
    asked = parser.parse_args()
    print(machine())
    try:
        worse = sum(size_tables(asked, size) for size in asked.size or list(LAYERS))
    except Paused as paused:
        note(str(paused))
        return 3
    if worse:
        note(f"the rules are slower than even 1F1B or T-1F1B in {worse} cases")
    return 1 if worse else 0


def size_tables(asked: argparse.Namespace, size: str) -> int:
    """The tables of 5B or of 16.1B; how often the rules lose."""
    vocabularies, pieces = asked.vocabulary or VOCABULARIES[size], Pieces(asked.kept, asked.part_seconds)
    if asked.scaling:
        table = scaled(f"flexpipe-gpt-{size}-{vocabularies[-1]}", asked.limit, asked.cache, pieces)
        print(f"\n{size}, {vocabularies[-1]}: {', '.join(map(str, SCALED))} devices\n")
        print(markdown(["devices", *NAMES, "each had"], table))
        return 0
    rows = [row_of(size, each, asked.limit, asked.cache, pieces) for each in vocabularies]
    print(f"\n{size}\n")
    over = [f"over {rival} ({stated})" for rival, stated in zip(NAMES[:3], STATED[size], strict=True)]
    print(markdown(["vocabulary", *NAMES, *over, "chosen", "each had"], [row.cells for row in rows]))
    print(f"\n{size}, {vocabularies[-1]}: computing and waiting\n")
    print(markdown(["schedule", "compute, ms", "wait, ms"], rows[-1].parts))
    return sum(row.worse for row in rows)


if __name__ == "__main__":
    sys.exit(main())
