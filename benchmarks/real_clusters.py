"""What `search` finds for real models on clusters of eight accelerators a node, beside what else there is.

Each case is one model on some devices, 4 Mi tokens a step; on thousands of devices 16 Mi. For each: the search, and
its plan's file, read, checked and simulated; every cell of the uniform grid (tensor, data and pipeline sizes, virtual
stages, micro-batch, ZeRO level; 1F1B, interleaved and zero-bubble schedules), cut evenly, recomputing what it must, and
simulated; ``frontier --plans``; and published configurations of the same model on as many devices of the same kind. All
have the same costs, estimated with what predicts published runs.
On demand: the command line, as processes, from the profile to a written plan, and ``check`` and ``simulate`` of what it
wrote with its profile and its cluster (``commands``); the same search with a node's devices spare (``spares``); plans
of up to 16 devices by as many processes on gloo (``rehearsed``, with ``--stretch`` so many times as long where cores do
not keep up); two workers beside one; and, in deterministic time,
the search without each of its steps, and without all that give stages devices of their own (``steps``, and of those
that make schedules ``schedule-steps``).

    python benchmarks/real_clusters.py --state FOLDER [--only PARTS] [--limit 60] [--parts search,grid]
    python benchmarks/real_clusters.py --state FOLDER --only llama3-70b-64 --parts workers,steps
    python benchmarks/real_clusters.py --state FOLDER --table
    python benchmarks/real_clusters.py --list

It ends with 1, and says what, where a search or a command has failed, a plan is not valid, a bound does not hold, or a
search is longer than ``frontier --plans``, a cell of the grid or a published configuration; and on thousands of devices
where it breaks one of :data:`LEAST_COUNTED`, :data:`MOST_PLAN_BYTES`, what is beside it and :data:`LATE_S`.

With ``--processor`` seconds are those of the process's own work, so that a busy machine is as good as a quiet one.

A cell whose bound is above the best that is known is counted and not simulated, but for one in fifty: those show that
bounds hold. Of the others some are refuted with less work: not cut, if their blocks do not find room in time and memory
below the best; not fitted, if no schedule is below it as they are cut first; and not scheduled, if none is as they are
cut at last. Of the first two of these one in fifty is simulated, too. With ``--cells N`` no more than N others are
simulated, and of those above a quarter of N, or as many as ``--above`` says (0: one in fifty); with ``--grid-limit``
those for which there is time. With ``--to-the-end`` no cell is left at its first cut, which goes by a margin. What is
done is kept in FOLDER cell by cell, and not done again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from limits import CHILD, MARK
from tables import machine, markdown, note

import pipeplan
from pipeplan.checker import check
from pipeplan.costs import StageCost
from pipeplan.costs.communication import Same
from pipeplan.costs.devices import peak_flops_per_s
from pipeplan.costs.throughput import Yardstick
from pipeplan.costs.zero import IN_ACTIONS
from pipeplan.errors import InfeasibleError, PipeplanError
from pipeplan.files import Plan, read_cluster, read_plan, read_profile
from pipeplan.partition.chain.costs import Array, FloatArray
from pipeplan.partition.problem import Pricing
from pipeplan.partition.recomputation import FittingChain
from pipeplan.partition.strategies import STRATEGIES
from pipeplan.planning.candidates import (
    CandidateStep,
    PlacementCandidate,
    cut_so,
    cut_to_fit,
    fitting_chain,
    placed,
    uniform_choices,
    workload_of,
)
from pipeplan.planning.divided_state import DivideState, divides_by_default
from pipeplan.planning.frontier import frontier_request, search_frontier
from pipeplan.planning.request import Request
from pipeplan.planning.start import StartPlan
from pipeplan.planning.steps import STEPS, search_plan, without
from pipeplan.planning.trials import PlanSearch, PlanStep, Trial, may_move, on_cluster
from pipeplan.planning.uniform_space import Blocks, BoundedChoice, Choice
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.search import first_look
from pipeplan.schedule.state import ScheduleStep, SearchStep
from pipeplan.simulator.simulation import simulate
from pipeplan.time_limit import Limit, WorkClock
from pipeplan.workload.bounds import weak_iteration_bound
from pipeplan.workload.elements import Again
from pipeplan.workload.workload import Workload

TOKENS = 4 * 2**20
"""Of a step."""

MANY, MANY_TOKENS = 4096, 16 * 2**20
"""From so many devices on a step has so many tokens."""

NODE = 8
"""Devices of one, which fail together."""

SAMPLED = 50
"""One in so many cells that are not simulated is, to see that its bound holds."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model as ``profile`` takes it; ``sizes`` are samples of a micro-batch of one replica.

    ``expert`` are how many devices may share experts; how many may share each sequence is left to estimates.
    """

    name: str
    config: str
    sequence: int
    sizes: str = "1,2,4"
    shards: str = "1,2,4,8"
    expert: str = "1"


GPT3 = "GPT2Config(n_embd=12288, n_layer=96, n_head=96, vocab_size=51200, n_positions=2048)"
GPT2 = "GPT2Config(n_embd=2048, n_layer=24, n_head=32, vocab_size=51200, n_positions=1024)"

MODELS = {
    each.name: each
    for each in (
        Model("gpt2-1.3b", GPT2, 1024, sizes="1,2,4,8,16"),
        Model("llama3-8b", "llama3-8b", 8192),
        Model("llama3-70b", "llama3-70b", 8192),
        Model("llama3-405b", "llama3-405b", 8192, sizes="1,2"),
        Model("gpt3-175b", GPT3, 2048),
        Model("mixtral-8x7b", "mixtral-8x7b", 8192, expert="1,2,4,8"),
        Model("mixtral-8x22b", "mixtral-8x22b", 8192, expert="1,2,4,8"),
        Model("deepseek-v3", "deepseek-v3", 4096, sizes="1,2", expert="1,8,16,32,64"),
        Model("deepseek-v3-8k", "deepseek-v3", 8192, sizes="1,2", expert="1,8,16,32,64"),
    )
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model on devices of a kind."""

    model: str
    devices: int
    kind: str = "h100"

    @property
    def name(self) -> str:
        return f"{self.model} on {self.devices} {self.kind.upper()}s"

    @property
    def samples(self) -> int:
        """Of a step."""
        return (TOKENS if self.devices < MANY else MANY_TOKENS) // MODELS[self.model].sequence

    @property
    def stem(self) -> str:
        return f"{self.model}-{self.devices}-{self.kind}"


CASES = (
    *(Case("gpt2-1.3b", devices) for devices in (8, 16, 64, 512)),
    *(Case("llama3-8b", devices) for devices in (8, 16, 64, 512)),
    *(Case("llama3-70b", devices) for devices in (64, 512)),
    Case("llama3-405b", 512),
    *(Case("gpt3-175b", devices) for devices in (64, 512)),
    *(Case("mixtral-8x7b", devices) for devices in (64, 512)),
    *(Case("mixtral-8x22b", devices) for devices in (64, 512)),
    *(Case(model, 512) for model in ("deepseek-v3", "deepseek-v3-8k")),
    Case("gpt3-175b", 64, "a100"),
    *(
        Case(model, devices)
        for model in ("llama3-70b", "llama3-405b", "gpt3-175b", "deepseek-v3")
        for devices in (4096, 16384)
    ),
)

PRESETS = {"h100": "h100-80gb", "a100": "a100-80gb"}


@dataclass(frozen=True, slots=True)
class Published:
    """A configuration that was run, as flags; ``run`` is its row in data/published-runs.json, or says what it is."""

    case: str
    run: str
    flags: str
    samples: int


PUBLISHED = (
    Published(
        "llama3-70b-64-h100",
        "dgxc-2504-llama31-70b-bf16-64",
        "--tp 4 --pp 4 --cp 2 --dp 2 --vp 5 --microbatch-size 2 --scheduler interleaved-1f1b",
        128,
    ),
    *(
        Published("gpt3-175b-64-a100", f"korthikanti-175B-{run}", f"--tp 8 --pp 8 --vp 3 --microbatch-size 1{more}", 64)
        for run, more in (("selective+sp", ""), ("full", " --recompute all"))
    ),
    *(
        Published(f"llama3-8b-{devices}-h100", run, f"--tp 1 --pp 1 --cp 2 --dp {replicas} {size} --zero 1", samples)
        for devices, replicas, samples in ((8, 4, 128), (64, 32, 1024))
        for run in (f"dgxc-2504-llama31-8b-bf16-{devices}",)
        for size in (f"--microbatch-size {replicas}",)
    ),
    Published(
        "llama3-70b-512-h100",
        "dgxc-2504-llama31-70b-bf16-512",
        "--tp 4 --pp 4 --cp 2 --dp 16 --vp 5 --microbatch-size 16 --zero 1 --scheduler interleaved-1f1b",
        1024,
    ),
    Published(
        "llama3-405b-512-h100",
        "dgxc-2504-llama31-405b-bf16-512",
        "--tp 8 --pp 8 --cp 2 --dp 4 --vp 8 --microbatch-size 4 --zero 1 --scheduler interleaved-1f1b",
        256,
    ),
    Published(
        "llama3-405b-16384-h100",
        "the Llama 3 paper's table 4: 400 TFLOP/s each",
        "--tp 8 --pp 16 --cp 1 --dp 128 --vp 8 --microbatch-size 128 --scheduler interleaved-1f1b",
        2048,
    ),
    *(
        Published(
            f"{model}-{devices}-h100",
            run,
            f"{sizes} --dp {replicas} --microbatch-size {replicas} --scheduler interleaved-1f1b",
            MANY_TOKENS // MODELS[model].sequence,
        )
        for model, run, sizes, width in (
            ("llama3-405b", "dgxc-2504-llama31-405b-bf16-2048", "--tp 8 --pp 8 --cp 2 --vp 8", 128),
            ("llama3-70b", "dgxc-2504-llama31-70b-bf16-2048", "--tp 4 --pp 4 --cp 2 --vp 5", 32),
            ("gpt3-175b", "korthikanti-175B-selective+sp", "--tp 8 --pp 8 --vp 3", 64),
            ("deepseek-v3", "mbridge-card-deepseek-v3-perf-h100", "--tp 2 --pp 8 --ep 64 --vp 4", 16),
        )
        for devices in (4096, 16384)
        for replicas in (devices // width,)
    ),
)
"""The last eight with more replicas than were run. How many virtual stages Meta's run had was not published. Runs of
dgxc's other releases in the same layouts (2501, 2505) differ in what was measured alone.
"""


class State:
    """Files of one folder: inputs, and what was found of each case."""

    def __init__(
        self,
        folder: Path,
        limit: float,
        clock: Callable[[], float] = time.monotonic,
        cells: int = 0,
        above: int | None = None,
        grid_limit: float = math.inf,
        stretch: str = "1",
        to_the_end: bool = False,
    ) -> None:
        self.folder, self.limit, self.clock, self.cells, self.grid_limit = folder, limit, clock, cells, grid_limit
        self.stretch, self.to_the_end = stretch, to_the_end
        self.above = cells // 4 if above is None else above
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def how(self) -> list[str]:
        """The flag that has a child measure time as here."""
        return ["--processor"] if isinstance(self.clock, WorkClock) else []

    @property
    def within(self) -> Limit | None:
        """The limit of a search by a clock that is not the wall's."""
        return Limit(self.limit, clock=self.clock) if self.how else None

    def request(self, case: Case, **others: Any) -> Request:
        """What is asked of a case."""
        asked = {"mini_batch": case.samples, "time_limit": self.limit} | others
        return Request.of(read_profile(str(self.profile(case))), cluster=read_cluster(str(self.cluster(case))), **asked)

    def profile(self, case: Case) -> Path:
        """The model's, estimated where it is not there yet."""
        model, path = MODELS[case.model], self.folder / f"{case.model}-{case.kind}.json"
        if model.expert != "1":
            path = path.with_stem(f"{path.stem}-expert-{model.expert.replace(',', '-')}")
        if not path.exists():
            begun = time.monotonic()
            said = [
                *("profile", model.config, "--estimate", "--device", PRESETS[case.kind]),
                *("--sequence", str(model.sequence), "--microbatch", model.sizes, "--shards", model.shards),
                *("--expert", model.expert),
            ]
            self.run([*said, "-o", str(path)])
            note(f"{path.name}: {time.monotonic() - begun:.0f} s")
        return path

    def cluster(self, case: Case) -> Path:
        """Nodes of eight."""
        path = self.folder / f"cluster-{case.kind}-{case.devices}.json"
        if not path.exists():
            self.run(["example", f"cluster-{case.kind}", "--devices", str(case.devices), "-o", str(path)])
        return path

    @staticmethod
    def run(arguments: Sequence[str]) -> str:
        """The command line's standard output.

        Raises:
            SystemExit: it failed.
        """
        done = subprocess.run([sys.executable, "-m", "pipeplan", *arguments], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"pipeplan {shlex.join(arguments)}: {done.stderr.strip()[-600:]}")
        return done.stdout

    def of(self, case: Case, what: str, made: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """A part of a case, made where it is not there yet."""
        path = self.folder / f"{case.stem}.{what}.json"
        if not path.exists():
            found = dict(made())
            path.write_text(json.dumps(found, indent=1))
        kept: dict[str, Any] = json.loads(path.read_text())
        return kept

    def known(self, case: Case, what: str) -> dict[str, Any] | None:
        """A part of a case, if it is there."""
        path = self.folder / f"{case.stem}.{what}.json"
        return json.loads(path.read_text()) if path.exists() else None


def searched(state: State, case: Case, *how: str) -> dict[str, Any]:
    """The search in a process of its own: what it found, when it knew what, and its memory."""
    given = [sys.executable, __file__, "--state", str(state.folder), "--limit", str(state.limit), "--child", case.stem]
    given += [*how, *state.how]
    state.profile(case), state.cluster(case)
    done = subprocess.run(given, capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr.strip()[-300:]}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def child(state: State, case: Case, off: Sequence[str], workers: int, *, deterministic: bool) -> None:
    """Search without some steps and print what was found. Times are from when the profile has been read."""
    request = state.request(case, deterministic=deterministic)
    begun, told = state.clock(), list[tuple[float, int]]()

    def hear(what: str, best: int | None, *rest: Any) -> None:
        if best and (not told or best < told[-1][1]):
            told.append((state.clock() - begun, best))

    within = None if deterministic else state.within
    result = search_plan(request, progress=hear, workers=workers, steps=without(off), within=within)
    plan, seconds = result.plan, state.clock() - begun
    predicted = plan.predicted
    near = next((at for at, best in told if best <= 1.02 * predicted.iteration_ns), seconds)
    problems = check(plan, read_profile(str(state.profile(case))), read_cluster(str(state.cluster(case)))).problems
    layouts = dict.fromkeys(
        (stage.shards, _context(stage.context, stage.expert), stage.replicas, stage.zero) for stage in plan.stages
    )
    rates = Yardstick.of_plan(plan).throughput(plan.mini_batch, predicted.iteration_ns, plan.num_devices)
    print(
        json.dumps(
            {
                "iteration_ns": predicted.iteration_ns,
                "lower_bound_ns": result.lower_bound_ns,
                "seconds": seconds,
                "first_s": told[0][0] if told else seconds,
                "near_s": near,
                "known": told,
                "memory_bytes": _held(os.getpid(), "VmHWM"),
                "layout": " and ".join(
                    f"tp {shards}{beside} dp {replicas}" + (f" ZeRO {zero}" if zero else "")
                    for shards, beside, replicas, zero in layouts
                ),
                "share_of_peak": rates.model_flops_utilisation,
                "stages": len(plan.stages),
                "positions": len({s.devices for s in plan.stages}),
                "recomputed": sum(bool(s.recompute) for s in plan.stages),
                "microbatch_size": plan.microbatch_size // plan.stages[0].replicas,
                "scheduler": plan.provenance.scheduler,
                "valid": not problems,
                **_written(state, case, plan),
                "notes": list(result.notes),
            }
        )
    )


def _written(state: State, case: Case, plan: Plan) -> dict[str, Any]:
    """The plan's file, and seconds to read, check and simulate it."""
    path = state.folder / f"{case.stem}.plan.json"
    pipeplan.write(plan, path)
    begun, took = state.clock(), dict[str, float]()
    ways: dict[str, Callable[[], object]] = {
        "read": lambda: read_plan(str(path)),
        "check": lambda: check(plan),
        "simulate": lambda: simulate(plan).figures(),
    }
    for what, done in ways.items():
        done()
        took[f"{what}_s"], begun = state.clock() - begun, state.clock()
    return {"programs": len(plan.devices), "plan_bytes": path.stat().st_size, **took}


def grid(state: State, case: Case) -> dict[str, Any]:
    """Every cell of the uniform grid whose bound is below the best known, simulated; best first.

    Where there is a number of ``cells``, only so many of those that should be quickest; of what is left the first is
    said, by what it should take. Of the others some are simulated, spread evenly over those that take a moment.
    """
    best_ns = (state.known(case, "search") or {}).get("iteration_ns")
    request = replace(state.request(case), num_parted=0)
    bounds = CellBounds(request)
    rooms = RoomBounds(request, bounds)
    rows = (each for each in uniform_choices(request) if each.choice.usual is not None and each.choice.usual.name)
    named = [(each, max(each.least_ns, bounds.least_ns(each.choice))) for each in rows]
    path = state.folder / f"{case.stem}.cells.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {line["cell"]: line for line in lines}
    best = min([*(line["ns"] for line in lines if line["ns"]), *([best_ns] if best_ns else [])], default=None)
    bounded, apart, able, opened, narrow, first, wrong, left = 0, 0, 0, 0, 0, 0, list[str](), list[float]()
    is_tried = _sampling([_is_short(each) for each, least_ns in named if _above(least_ns, best)], state.above)
    started = state.clock()
    with path.open("a") as cells:
        for number, (each, least_ns) in enumerate(named):
            above = _above(least_ns, best)
            apart += above and not _above(each.least_ns, best)
            bounded, opened, able = bounded + above, opened + (not above), able + (above and _is_short(each))
            name = _cell(each)
            old = known.get(name)
            again = old is None or (old["why"] in REFUTED and best is not None and old["cut_ns"] < best)
            again = again or (state.to_the_end and old is not None and old["why"] == BY_FIRST)
            enough = bool(state.cells) and opened > state.cells
            if not above and again and (enough or state.clock() - started > state.grid_limit):
                left.append(each.usual_ns)
                continue
            if again and not (above and not (_is_short(each) and is_tried(able))):
                begun = state.clock()
                full = not above and best is not None and rooms.refute(each.choice, best)
                narrow += full and _is_short(each)
                if full:
                    ns, why, cut_ns = None, BY_ROOM, best
                else:
                    ns, why, cut_ns = _simulated(request, each, None if above else best, state.to_the_end)
                first += why == BY_FIRST and _is_short(each)
                sampled = why in (BY_ROOM, BY_FIRST) and _is_short(each) and not (narrow if full else first) % SAMPLED
                if sampled:
                    ns, why, cut_ns = _simulated(request, each)
                known[name] = {"cell": name, "ns": ns, "least_ns": least_ns, "above": above, "why": why}
                known[name] |= {} if cut_ns is None else {"cut_ns": cut_ns}
                known[name] |= {"refuted_ns": best} if sampled else {}
                known[name]["seconds"] = round(state.clock() - begun, 2)
                cells.write(json.dumps(known[name]) + "\n")
                cells.flush()
                if number % 50 == 0:
                    note(f"{case.name}: cell {number} of {len(named)}, best {best and best / 1e9}")
            if name not in known:
                continue
            known[name] |= {"least_ns": least_ns, "above": above}  # of an earlier run as bounds are now
            if (ns := known[name]["ns"]) is not None:
                best = ns if best is None else min(best, ns)
                if ns < max(least_ns, *(known[name].get(what, 0) for what in ("cut_ns", "refuted_ns"))):
                    wrong.append(name)
    room, early, cut = (sum(line["why"] == why for line in known.values()) for why in REFUTED)
    simulated = [line for line in known.values() if line["ns"] is not None]
    winner = min(simulated, key=lambda line: line["ns"], default=None)
    return {
        "cells": len(named),
        "above": bounded,
        "sharper": apart,
        "simulated": len(simulated),
        "by_room": room,
        "by_first": early,
        "checked": sum("refuted_ns" in line for line in known.values()),
        "by_cut": cut,
        "without_schedule": len(known) - len(simulated) - room - early - cut,
        "tried": sum(line["above"] for line in known.values()),
        "sampled": sum(line["above"] for line in simulated),
        "tightest": min((line["ns"] / line["least_ns"] for line in simulated if line["above"]), default=None),
        "left": len(left),
        "left_ns": min(left, default=None),
        "wrong": wrong,
        "best_ns": winner and winner["ns"],
        "best": winner and winner["cell"],
    }


SHORT = 20_000
"""A look at so many actions takes a moment: cells that are only to show that bounds hold have no more."""


def _sampling(short: Sequence[bool], count: int) -> Callable[[int], bool]:
    """Which of the short cells above the best are tried, by their places among these from 1 on: ``count``, evenly
    spread, or for 0 as many as are one in :data:`SAMPLED` of all cells above, ``short`` or not."""
    every = max(SAMPLED, sum(short) // count) if count else SAMPLED
    more = len(short) / max(1, sum(short)) - 1  # what longer ones leave to them
    again = 0 if count or not more else max(1, math.floor(every / more))
    return lambda place: place % every == 0 or (again > 0 and place % again == again // 2)


def _is_short(each: BoundedChoice) -> bool:
    return each.choice.actions_looked_at <= SHORT


class CellWork(NamedTuple):
    """Ns of all blocks for a micro-batch; how long it is on its way through each, the least first; and of the blocks in
    which that is at least some share of the work, this share and their ns together, for every share there is."""

    work: int
    ways: list[int]
    shares: list[tuple[float, int]]


class CellBounds:
    """Bounds of cells on devices of one kind, whatever their cut: often above the table's, which are of all schedules.

    A cell's schedule splits backward or not. What copies exchange of what they divide is left out: a network may do it
    beside actions.

    Position p of P, in the order of the chain, begins once a micro-batch has been through p stages, each with a block
    at least; and where backward is whole, its last action goes on through the same ones. So an iteration T is no less
    than ``m W_p`` with the p least of blocks, whose sum over positions is ``P T >= m W + sum over p of these``.

    With one stage each, a micro-batch is on its way through a position for at least a share r of its work on these
    blocks: ``T >= m W_p + r (W_1 + ... + W_(p-1))``. So the first p together have at most ``(1 - (1 - r/m)^p) T / r``.
    """

    def __init__(self, request: Request) -> None:
        self.request, self.blocks = request, Blocks.of(request.profile)
        self._known = dict[tuple[Pricing, tuple[Again, ...], bool], CellWork]()

    def least_ns(self, choice: Choice) -> int:
        """Ns that no iteration of a cell is below."""
        work, waits = self.work_and_waits(choice)
        rounds, positions = choice.batch.num_microbatches, len(waits)
        least_ns = (rounds * work + sum(waits)) // positions
        if waits[-1] and choice.per_position == 1:
            for share, work in self._known[self._key(choice)].shares:
                least_ns = max(least_ns, int(share * work / (1 - (1 - share / rounds) ** positions) * (1 - ROUNDED)))
        return least_ns

    def work_and_waits(self, choice: Choice) -> tuple[int, list[int]]:
        """Ns of all blocks for a micro-batch, and [position] ns that go by before it begins and after it ends."""
        assert choice.usual is not None
        positions, key = choice.positions or 1, self._key(choice)
        if key not in self._known:
            self._known[key] = self._of_blocks(*key)
        work, ways, _ = self._known[key]
        if STRATEGIES[choice.strategy].two_ways or not self.blocks.chained:
            return work, [0] * positions
        waits = [0, *accumulate(ways[: positions - 1])]
        return work, [*waits, *[waits[-1]] * (positions - len(waits))]

    @staticmethod
    def _key(choice: Choice) -> tuple[Pricing, tuple[Again, ...], bool]:
        assert choice.usual is not None
        return choice.pricing, choice.levels or (choice.recompute,), not choice.usual.splits

    def _of_blocks(self, pricing: Pricing, levels: Sequence[Again], whole: bool) -> CellWork:
        own = [pricing._replace(recompute=each) for each in levels]
        costs = zip(*(each.costs(self.blocks.profile, self.blocks.each) for each in own), strict=True)
        work, ways, shares = 0, list[int](), list[tuple[float, int]]()
        for count, each in zip(self.blocks.counts.tolist(), costs, strict=True):
            least = [_least_work_ns(cost, whole) for cost in each]
            through = [cost.compute_ns if whole else cost.forward_ns for cost in each]
            work += count * min(least)
            ways += [min(through)] * count
            share = min(way / ns if ns else 1.0 for way, ns in zip(through, least, strict=True))
            shares.append((min(share, 1.0), count * min(least)))
        shares.sort(reverse=True)
        together = accumulate(ns for _, ns in shares)
        named = [(share, ns) for (share, _), ns in zip(shares, together, strict=True) if share]
        return CellWork(work, sorted(ways), named)


def _least_work_ns(cost: StageCost, whole: bool) -> int:
    """A forward and a backward, ``whole`` or split where it can be."""
    if whole or cost.input_grad_ns is None or cost.weight_grad_ns is None:
        return cost.compute_ns
    return cost.forward_ns + min(cost.backward_ns, cost.input_grad_ns + cost.weight_grad_ns)


class RunWay(NamedTuple):
    """A way to run a block: ns; bytes held all the time, of a micro-batch in flight, and of a weight gradient owed."""

    work: int
    static: int
    activation: int
    owed: int


@dataclass(frozen=True, slots=True)
class RunWays:
    """The ways of the first block, of the last, and those of each kind between them with how many there are of it."""

    first: tuple[RunWay, ...]
    last: tuple[RunWay, ...]
    between: Mapping[tuple[RunWay, ...], int]
    least_workspace: int

    @classmethod
    def of(cls, chain: FittingChain, *, whole: bool) -> RunWays:
        """Of a cell's blocks, with backward ``whole`` or split where it can be."""
        plain = chain.ways[0][1]
        first, *between, last = (
            tuple(
                RunWay(
                    _least_work_ns(costs[at], whole),
                    _own_bytes(costs[at]),
                    costs[at].activation_bytes,
                    plain[at].weight_grad_bytes,
                )
                for again, costs in chain.ways
                if not (again and kept)
            )
            for at, kept in enumerate(chain.kept)
        )
        least = min(cost.workspace_bytes for _, costs in chain.ways for cost in costs)
        return cls(first, last, Counter(between), least)

    @property
    def counts(self) -> Array:
        """[kind] how many blocks."""
        return np.array(list(self.between.values()))

    @property
    def kind(self) -> Array:
        """[way] the number of its kind."""
        return np.array([number for number, ways in enumerate(self.between) for _ in ways])

    @property
    def columns(self) -> tuple[FloatArray, ...]:
        """[way] of all kinds, what each takes of what."""
        rows = [way for ways in self.between for way in ways]
        return tuple(np.array(column, dtype=float) for column in zip(*rows, strict=True))

    def least(self, what: str) -> list[int]:
        """[kind] the least of something."""
        return [min(getattr(way, what) for way in ways) for ways in self.between]

    def sums(self, most_ns: int) -> Array | None:
        """All ns up to this that some of these blocks may take, ascending; None where they are too many."""
        found = np.zeros(1, dtype=np.int64)
        counted = Counter[int]()
        for work, count in zip(self.least("work"), self.between.values(), strict=True):
            counted[work] += count
        for work, count in counted.items():
            able = np.arange(min(count, most_ns // work if work else 0) + 1) * work
            if len(found) * len(able) > MOST_SUMS:
                return None
            found = np.unique(np.add.outer(found, able))
            found = found[found <= most_ns]
        return found


def _own_bytes(cost: StageCost) -> int:
    """What a block holds all the time and shares with no other."""
    return cost.static_bytes - sum(each.state.total for each in cost.tied)


class RoomBounds:
    """Bounds of cells by time and memory together, before they are cut: all blocks must find room.

    In an iteration T position p has ``t = (T - waits) / m`` for a micro-batch, and memory M. The first stage has the
    first block and the last the last one; what these take at least is gone. A way to run another block there, in one of
    the position's chunks and at one level, takes x of t and y of M, with what the cell's schedule has in flight of the
    chunk. Say each block is worth w, whatever w. For any share s from 0 to 1 what a position runs has ``sum of
    s x / t + (1 - s) y / M <= 1``, so it is worth at most the greatest ``w / (s x / t + (1 - s) y / M)`` of a way. And
    by time alone it runs whole blocks: their times are a sum of such times. If all positions together have room for
    less than all blocks are worth, no cut has an iteration T.
    """

    def __init__(self, request: Request, bounds: CellBounds) -> None:
        self.request, self.bounds = request.levelled, bounds
        self._known = dict[tuple[Pricing, tuple[Again, ...], bool], RunWays]()

    def refute(self, choice: Choice, iteration_ns: int) -> bool:
        """Whether no iteration of a cell is below this, however it is cut and whatever it recomputes."""
        assert choice.usual is not None
        if not choice.levels or STRATEGIES[choice.strategy].two_ways or not self.bounds.blocks.chained:
            return False
        chain, key = fitting_chain(self.request, choice), (choice.pricing, choice.levels, not choice.usual.splits)
        if key not in self._known:
            self._known[key] = RunWays.of(chain, whole=key[-1])
        ways, positions = self._known[key], choice.positions or 1
        times = np.array(self.bounds.work_and_waits(choice)[1], dtype=float)
        times = (iteration_ns - times) / choice.batch.num_microbatches
        room = np.zeros(positions)
        held = np.zeros((2, positions, chain.num_stages // positions))
        for each in chain.holdings:
            room[each.position] = each.limit - ways.least_workspace
            held[:, each.position, each.stage // positions] = each.in_flight, each.owed
        for stage, block in ((0, ways.first), (chain.num_stages - 1, ways.last)):
            at = next(each for each in chain.holdings if each.stage == stage)
            times[at.position] -= min(way.work for way in block)
            room[at.position] -= min(way.static + at.in_flight * way.activation + at.owed * way.owed for way in block)
        if min(times.min(), room.min()) < 0:
            return True
        return self._full(ways, np.maximum(times, TINY), np.maximum(room, TINY), held)

    @staticmethod
    def _full(ways: RunWays, times: FloatArray, room: FloatArray, held: FloatArray) -> bool:
        """Whether positions with this much time and room [position], and so much in flight [and owed, position, chunk],
        do not hold all blocks between the first and the last.
        """
        positions, chunks = held.shape[1:]
        work, static, activation, owed = ways.columns
        memory = (static + held[0, ..., None] * activation + held[1, ..., None] * owed).reshape(positions, -1)
        memory, work = memory / room[:, None], np.tile(work, chunks) / times[:, None]
        used = np.stack([share * work + (1 - share) * memory for share in np.linspace(0.0, 1.0, SHARES)])
        kind, counts = np.tile(ways.kind, chunks), ways.counts
        least, state = (np.array(ways.least(what), dtype=float) for what in ("work", "static"))
        sums = ways.sums(int(times.max()))
        for worth in (least, state, least / times.sum() + state / room.sum()):
            most = (worth[kind] / np.maximum(used, TINY)).max(axis=2).min(axis=0)
            if worth is least and sums is not None:
                most = np.minimum(most, sums[np.searchsorted(sums, times, side="right") - 1])
            if most.sum() * (1 + ROUNDED) < (worth * counts).sum():
                return True
        return False


SHARES, ROUNDED, TINY = 33, 1e-9, 1e-9
"""How many shares of time and memory are tried; what sums of floats may be off, as a share; what stands for nothing."""

MOST_SUMS = 50_000
"""So many times that some blocks take are looked at."""


def _above(least_ns: int, best: int | None) -> bool:
    """Whether a bound is not below the best that is known."""
    return best is not None and least_ns >= best


def _cell(each: BoundedChoice) -> str:
    choice = each.choice
    assert choice.usual is not None
    zero = f" zero {choice.zero.level}" if choice.zero.level else ""
    zero += f" in groups of {choice.zero.group}" if zero and choice.zero.group != choice.copies else ""
    turns = f" vp {choice.per_position}" if choice.per_position > 1 else ""
    size = choice.batch.microbatch_size // choice.replicas
    exchange = f" {choice.exchange}" if choice.exchange else ""
    exchange += f" etp {choice.expert_shards}" if choice.expert_shards > 1 else ""
    beside = _context(choice.context, choice.expert)
    split = f"tp {choice.shards}{beside}{exchange} dp {choice.replicas} pp {choice.positions}"
    return f"{split}{turns}{zero} mb {size} {choice.usual.name}"


def _context(size: int, expert: int = 1) -> str:
    return (f" cp {size}" if size > 1 else "") + (f" ep {expert}" if expert > 1 else "")


BY_ROOM = "above by its room"
"""Why a cell has no time: no cut has room for all blocks in an iteration below the best that was known."""

BY_FIRST = "above by its first cut"
"""As it is cut first, by what its schedule should hold, no schedule is below the best by :data:`LATER`."""

LATER = 1.03
"""Where a cell's schedule holds more than it should it is cut anew with less memory, which may be luckier by so much.

Measured: 0 to 1.3 % in 263 cells; in all 17 grids, cut to the end since, it had hidden no shorter one.
"""

BY_CUT = "above by its cut"
"""As it is cut no schedule's iteration is below the best that was known."""

REFUTED = BY_ROOM, BY_FIRST, BY_CUT


def _simulated(
    request: Request, each: BoundedChoice, best_ns: int | None = None, to_the_end: bool = False
) -> tuple[int | None, str, int | None]:
    """An iteration's ns by the cell's own schedule and what has no cell but goes with it, or why there is none; and ns
    that none of the cell as it is cut is below.

    There is none where the last is not below ``best_ns``, whatever schedules are; nor, unless cells are cut
    ``to_the_end``, where it would not be below that by the first cut.
    """
    usual = each.choice.usual
    assert usual is not None
    asked, least_ns = _asked(Same(request), split_backward=usual.splits), None
    if best_ns is not None and each.choice.levels and not to_the_end:
        first_ns = _first_ns(asked, each.choice, int(LATER * best_ns))
        if first_ns is None:
            return None, "no cut fits", None
        if (first_ns := int(first_ns / LATER)) >= best_ns:
            return None, BY_FIRST, first_ns
    candidate = placed(asked, each.choice)
    if not isinstance(candidate, PlacementCandidate):
        return None, str(candidate)[:120], None
    names = [usual.name, *usual.beside]
    try:
        if best_ns is not None and may_move(asked, candidate):  # on any devices, so that it need not be placed
            least_ns = weak_iteration_bound(_without_links(asked, candidate, splits=usual.splits))
            if least_ns >= best_ns:
                return None, BY_CUT, least_ns
        trial = Trial.of(asked, on_cluster(asked, candidate) or candidate)
        least_ns = trial.bound_ns
        if best_ns is not None and least_ns >= best_ns:
            return None, BY_CUT, least_ns
        for way in trial.ways:
            trial.offer(first_look(way, names=names))
    except PipeplanError as error:
        return None, str(error)[:120], least_ns
    return (trial.value_ns, "", least_ns) if trial.best is not None else (None, "no schedule fits", least_ns)


def _first_ns(request: Request, choice: Choice, enough_ns: int) -> int | None:
    """Ns that no schedule of a cell is below as it is cut first, by what its schedule should hold; None where nothing
    fits so.

    The longest of what positions wait and work will do where that takes ``enough_ns``. What devices send each other
    takes no time where they may move, or where their actions may exchange state.
    """
    request = request.levelled
    chain = fitting_chain(request, choice)
    found = cut_to_fit(chain, choice)
    if found is None:
        return None
    assert choice.usual is not None
    splits, costs = choice.usual.splits, dict(chain.ways)
    work, ways, begins = Counter[int](), Counter[int](), (*found[0], chain.num_blocks)
    for each, again in zip(chain.holdings, found[1], strict=True):
        own = [costs[level][at] for at, level in zip(range(*begins[each.stage : each.stage + 2]), again, strict=True)]
        work[each.position] += sum(_least_work_ns(cost, not splits) for cost in own)
        ways[each.stage] += sum(cost.forward_ns if splits else cost.compute_ns for cost in own)
    rounds = choice.batch.num_microbatches
    if STRATEGIES[choice.strategy].two_ways:
        least_ns = rounds // 2 * max(work.values())
    else:  # until the first micro-batch comes to a position's first stage, and back from it where backward is whole
        waits = [0, *accumulate(ways[stage] for stage in range(len(work) - 1))]
        least_ns = max(rounds * work[position] + wait for position, wait in enumerate(waits))
    if least_ns >= enough_ns:
        return least_ns
    candidate = cut_so(request, choice, "balanced", *found)
    if choice.zero.level >= IN_ACTIONS or may_move(request, candidate):
        return weak_iteration_bound(_without_links(request, candidate, splits=splits))
    return weak_iteration_bound(workload_of(request, candidate, split_backward=splits))


def _without_links(request: Request, candidate: PlacementCandidate, *, splits: bool) -> Workload:
    """A candidate's workload where what devices send each other takes no time."""
    return workload_of(_asked(Same(request), cluster=None), candidate, split_backward=splits)


@lru_cache(maxsize=8)
def _asked(same: Same[Request], **otherwise: Any) -> Request:
    """A request with something changed, once for all cells: so what is worked out for it is kept."""
    return replace(same.thing, **otherwise)


def front(state: State, case: Case) -> dict[str, Any]:
    """The shortest plan of ``frontier --plans`` with the same time."""
    if state.how:
        return searched(state, case, "--frontier")
    said = [
        *("frontier", str(state.profile(case)), "--cluster", str(state.cluster(case)), "--plans"),
        *("--mini-batch", str(case.samples), "--time-limit", f"{state.limit:g}s", "--json"),
    ]
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "pipeplan", *said], capture_output=True, text=True)
    seconds = time.monotonic() - begun
    if done.returncode:
        return {"failed": done.stderr.strip()[-300:], "seconds": seconds}
    points = json.loads(done.stdout)["points"]
    return {"best_ns": min((point["iteration_ns"] for point in points), default=None), "seconds": seconds}


def front_child(state: State, case: Case) -> None:
    """The same by the process's own work, printed."""
    profile, cluster = read_profile(str(state.profile(case))), read_cluster(str(state.cluster(case)))
    asked = frontier_request(profile, cluster=cluster, mini_batch=case.samples, time_limit=state.limit)
    begun = state.clock()
    try:
        points = search_frontier(asked, within=state.within).points
    except PipeplanError as error:
        print(json.dumps({"failed": str(error)[:300], "seconds": state.clock() - begun}))
        return
    best = min(points, key=lambda point: point.time_ns)
    print(json.dumps({"best_ns": best.time_ns, "what": best.what, "seconds": state.clock() - begun}))


def published(state: State, case: Case) -> dict[str, Any]:
    """What was published of the same model on as many devices, and our search for as many samples."""
    found = []
    for each in PUBLISHED:
        if each.case != case.stem:
            continue
        model, sizes = MODELS[case.model], iter(shlex.split(each.flags))
        said: dict[str, Any] = {
            flag[2:].replace("-", "_"): int(value) if value.isdigit() else value
            for flag, value in zip(sizes, sizes, strict=True)
        }
        try:
            theirs, why = _found_ns(state, case, each.samples, said), ""
        except InfeasibleError as error:
            theirs, why = None, str(error).split(";")[0]
        known = state.known(case, "search") or {}
        same = each.samples == case.samples and "iteration_ns" in known
        ours = known["iteration_ns"] if same else _found_ns(state, case, each.samples, {})
        run = {"run": each.run, "flags": each.flags, "model": model.name, "theirs_ns": theirs, "ours_ns": ours}
        found.append(run | ({"why": why} if why else {}))
    return {"runs": found}


def _found_ns(state: State, case: Case, samples: int, said: Mapping[str, Any]) -> int:
    """The iteration of a search with some sizes said."""
    found = pipeplan.search(
        state.profile(case),
        cluster=state.cluster(case),
        mini_batch=samples,
        time_limit=state.limit,
        within=state.within,
        **said,
    )
    return found.plan.predicted.iteration_ns


def commands(state: State, case: Case) -> dict[str, Any]:
    """``search`` with its limit, then ``check`` and ``simulate`` of the plan it wrote, with its profile and cluster.

    Each is a process. Seconds are from its start until it is over, by the clock and of its work, or of its work alone;
    a first plan's are until it was made, imports and reading included. Memory is what a process and all that it began
    held, at most.
    """
    profile, cluster, plan = state.profile(case), state.cluster(case), state.folder / f"{case.stem}.command.json"
    both = ["--profile", str(profile), "--cluster", str(cluster)]
    asked = ["search", str(profile), *both[2:], "--mini-batch", str(case.samples)]
    asked += ["--time-limit", f"{state.limit:g}s", "-o", str(plan)]
    ran = partial(_process, of_work=bool(state.how))
    found: dict[str, Any] = {"search": ran([sys.executable, "-c", CHILD, *asked]), "limit_s": state.limit}
    if found["search"]["code"]:
        return found
    for verb in ("check", "simulate"):
        found[verb] = ran([sys.executable, "-m", "pipeplan", verb, str(plan), *both])
    return found | {"plan_bytes": plan.stat().st_size, "iteration_ns": read_plan(str(plan)).predicted.iteration_ns}


def counted_share(state: State, case: Case, iteration_ns: int) -> float | None:
    """The share of all devices' peak that an iteration reaches, counting 6 N + 6 L h s a token.

    N are all parameters, embedding and head included. None where a token meets only some of them.
    """
    profile = read_profile(str(state.profile(case)))
    peak = peak_flops_per_s(profile.source.device, profile.source.dtype)
    if peak is None or any(block.expert_parameters for block in profile.blocks):
        return None
    twice = sum(each.parameters * (len(each.blocks) - 1) for each in profile.tied)
    flops = 6 * (sum(block.parameters for block in profile.blocks) - twice)
    for block in profile.blocks:
        if block.operator == "attention":
            flops += 6 * block.dimensions["hidden"] * MODELS[case.model].sequence
    tokens = case.samples * MODELS[case.model].sequence
    return flops * tokens / (case.devices * peak * iteration_ns / 1e9)


def spares(state: State, case: Case) -> dict[str, Any]:
    """The search for all devices but a node's, in half of the limit, and what these spare ones lose and cover."""
    found = pipeplan.search(
        state.profile(case),
        cluster=state.cluster(case),
        mini_batch=case.samples,
        time_limit=state.limit,
        spares=NODE,
        within=state.within,
    )
    assert found.spares is not None
    return found.spares.figures() | {"said": found.spares.said}


REHEARSED = 16
"""Plans on no more devices than these are rehearsed."""


def rehearsed(state: State, case: Case) -> dict[str, Any]:
    """What the search found on few devices, run by as many processes on gloo: each action waits for its time."""
    path = state.folder / f"{case.stem}.plan.json"
    if case.devices > REHEARSED or not path.exists():
        return {"processes": None}
    said = ["run", str(path), "--emulate", "--local", "--steps", "1", "--stretch", state.stretch]
    said += ["--message-limit", "64KB", "--json"]
    found = json.loads(state.run(said))
    return {
        "processes": found["num_ranks"],
        "predicted_ns": found["predicted_iteration_ns"],
        "iteration_ns": found["iteration_ns"],
    }


def _process(command: Sequence[str], *, of_work: bool = False) -> dict[str, Any]:
    """What a process took and held, how it ended, and what it marked when, in seconds from its start or of its work."""
    most, begun = 0, time.monotonic()
    environment = os.environ | ({"LIMITS_OF_WORK": "1"} if of_work else {})
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, env=environment)
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            most = max(most, sum(map(_held, _tree(process.pid))), _held(process.pid, "VmHWM"))
            time.sleep(0.05)
        over = time.monotonic() - begun
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        errors = said.read()
    marks = {what: float(when) - (0.0 if of_work else begun) for what, when in reversed(MARK.findall(errors))}
    work_s = used.ru_utime + used.ru_stime
    left = "" if process.returncode == 0 else errors.strip()[-300:]
    return {
        "code": process.returncode,
        "seconds": work_s if of_work else over,
        "work_s": work_s,
        "memory_bytes": most,
        "marks": marks,
        "failed": left,
    }


def _tree(process: int) -> Iterator[int]:
    """A process and all that it began and that are there."""
    yield process
    try:
        began = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:  # it is over, or this is not Linux
        began = []
    for each in began:
        yield from _tree(int(each))


def _held(process: int, what: str = "VmRSS") -> int:
    """Bytes that a process has in memory, or had at most; what it shares with others counts for each."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith(f"{what}:")), 0)


PARTS = ("search", "grid", "frontier", "published")
"""What is done unless others are asked for. Beside these are ``commands``, ``spares``, ``rehearsed``, ``workers``,
``steps`` and ``schedule-steps``.
"""

OFF = {
    **{step.name: (step.name,) for step in STEPS if not step.needed and not isinstance(step, ScheduleStep)},
    "all widths": ("every width", "stage graphs", "recomputed blocks", "published planners", "stage ways"),
}
"""Steps that are left out together, by what the table calls them."""

SCHEDULES_OFF = {step.name: (step.name,) for step in STEPS if not step.needed and isinstance(step, ScheduleStep)}
"""The same of the steps that make schedules."""


def by_workers(state: State, case: Case) -> dict[str, Any]:
    """The same search with one process and with two: when each was within 2 % of the shorter of both results."""
    found = {count: searched(state, case, "--workers", str(count)) for count in (1, 2)}
    if any("failed" in each for each in found.values()):
        return {"failed": [each.get("failed") for each in found.values()]}
    best = min(each["iteration_ns"] for each in found.values())
    near = []
    for each in found.values():
        ends = [*each["known"], (each["seconds"], each["iteration_ns"])]
        near.append(next((at for at, ns in ends if ns <= 1.02 * best), None))
    return {"iterations_ns": [each["iteration_ns"] for each in found.values()], "near_s": near}


def steps(state: State, case: Case, left_out: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The iteration with all steps, and without each: all by work, not by the clock. Each is kept by itself.

    Steps that have nothing to do there change nothing, and are only named.
    """
    request, asked = state.request(case, deterministic=True), partial(searched, state, case, "--deterministic")
    idle = {step.name for step in STEPS if _is_idle(step, request)}
    every = state.of(case, "with-all", asked)
    found = {}
    for name, off in left_out.items():
        if not set(off) <= idle:
            how = "--off", ";".join(off)
            found[name] = state.of(case, f"without-{name.replace(' ', '-')}", partial(asked, *how))
    known = {name: each.get("iteration_ns") for name, each in found.items()}
    return {"all_ns": every.get("iteration_ns"), "idle": sorted(idle & set(left_out)), **known}


def _is_idle(step: SearchStep, request: Request) -> bool:
    """Whether it has nothing to do for a request, whatever is found."""
    if isinstance(step, CandidateStep):
        return next(iter(step.candidates(request)), None) is None
    if isinstance(step, StartPlan):
        return request.start is None
    if isinstance(step, DivideState):
        return not divides_by_default(request)
    search = PlanSearch(request, Budget(request.time_limit, deterministic=True), None, STEPS)
    return isinstance(step, PlanStep) and not step.in_turn and not step.applies(search)


def work(state: State, cases: Iterable[Case], parts: Sequence[str]) -> None:
    """Do what is not done."""
    for case in cases:
        ways: dict[str, Callable[[], Mapping[str, Any]]] = {
            "search": partial(searched, state, case),
            "grid": partial(grid, state, case),
            "frontier": partial(front, state, case),
            "published": partial(published, state, case),
            "commands": partial(commands, state, case),
            "spares": partial(spares, state, case),
            "rehearsed": partial(rehearsed, state, case),
            "workers": partial(by_workers, state, case),
            "steps": partial(steps, state, case, OFF),
            "schedule-steps": partial(steps, state, case, SCHEDULES_OFF),
        }
        for part in parts:
            state.of(case, part, ways[part])


def tables(state: State, cases: Iterable[Case]) -> Iterator[str]:
    """What is known, as Markdown."""
    rows, grids, others = [], [], []
    for case in cases:
        if left := state.known(case, "spares"):
            said = "; ".join(left["said"])
            others.append((case.name, said, *_beside(left["whole_iteration_ns"], left["iteration_ns"])))
        found = state.known(case, "search")
        if found is None:
            continue
        if "failed" in found:
            rows.append((case.name, found["failed"], *[""] * 8))
            continue
        ns, cells = found["iteration_ns"], state.known(case, "grid")
        if "share_of_peak" in found:  # else the folder was given what another search had found, for its grid
            rows.append(_search_row(case, found))
        if cells is not None:
            best = cells["best_ns"]
            grids.append(
                (
                    case.name,
                    f"{ns / 1e9:.2f}",
                    "none" if best is None else f"{best / 1e9:.2f}",
                    cells["best"] or "",
                    "" if best is None else f"{ns / best - 1:+.1%}",
                    *(str(cells.get(key, "")) for key in COUNTS),
                    f"{cells['tightest']:.3f}" if cells.get("tightest") else "",
                    str(len(cells["wrong"])),
                    f"{cells['left']}, from {cells['left_ns'] / 1e9:.2f} s on" if cells.get("left") else "none",
                )
            )
        other = state.known(case, "frontier")
        if other is not None:
            others.append(
                (case.name, "`frontier --plans`", *_beside(other.get("best_ns"), ns, other.get("failed", "")))
            )
        two = state.known(case, "workers")
        if two is not None and "failed" not in two:
            one, both = (f"{ns / 1e9:.2f}" for ns in two["iterations_ns"])
            near = " and ".join("not" if at is None else f"{at:.1f}" for at in two["near_s"])
            others.append((case.name, f"one worker ({one} s) and two; within 2 % after {near} s", one, both, ""))
        off = (state.known(case, "steps") or {}) | (state.known(case, "schedule-steps") or {})
        every, idle = off.pop("all_ns", None), off.pop("idle", ())
        if idle:
            others.append((case.name, f"without *{'*, *'.join(idle)}*, which have nothing to do there", "", "", ""))
        for name, ns_without in off.items() if every else ():
            if ns_without != every:
                others.append((case.name, f"without *{name}*, deterministic", *_beside(ns_without, every)))
        real = state.known(case, "rehearsed")
        if real is not None and real["processes"]:
            what = f"rehearsed by {real['processes']} processes on gloo"
            others.append((case.name, what, *_beside(real["iteration_ns"], real["predicted_ns"])))
        for run in (state.known(case, "published") or {"runs": []})["runs"]:
            what = f"{run['run']} (`{run['flags']}`)"
            others.append((case.name, what, *_beside(run["theirs_ns"], run["ours_ns"], run.get("why", ""))))
    header = (
        "case",
        "iteration, s",
        "of peak",
        "bound",
        "plan",
        "first, s",
        "near, s",
        "ended, s",
        "memory, GB",
        "valid",
    )
    yield markdown(header, rows)
    if grids:
        counts = *COUNTS.values(), "tightest", "bounds that do not hold", "left"
        yield markdown(("case", "search, s", "best cell, s", "cell", "search is", *counts), grids)
    if asked := [
        (case.name, *_commands(state, case, known)) for case in cases if (known := state.known(case, "commands"))
    ]:
        yield markdown(COMMANDS, asked)
    if others:
        yield markdown(("case", "beside", "its iteration, s", "search, s", "search is"), others)


def _search_row(case: Case, found: Mapping[str, Any]) -> tuple[str, ...]:
    """What a search found, as a row of the first table."""
    return (
        case.name,
        f"{found['iteration_ns'] / 1e9:.2f}",
        f"{found['share_of_peak']:.1%}",
        f"{found['lower_bound_ns'] / 1e9:.2f}",
        f"{found['layout']}, {found['stages']} stages on {found['positions']} positions, "
        f"{found['recomputed']} recomputed, micro-batch {found['microbatch_size']}, {found['scheduler']}",
        f"{found['first_s']:.1f}",
        f"{found['near_s']:.1f}",
        f"{found['seconds']:.1f}",
        f"{found['memory_bytes'] / 1e9:.2f}",
        "yes" if found["valid"] else "no",
    )


COUNTS = {
    "cells": "cells",
    "simulated": "simulated",
    "by_room": "above by room",
    "by_first": "above by a first cut",
    "checked": "others so, tried",
    "by_cut": "above by their cuts",
    "without_schedule": "no schedule",
    "above": "above",
    "sharper": "of these by a cell's own bound",
    "tried": "of these tried",
    "sampled": "fit",
}
"""Of a grid, and what its columns are called; the least ratio of a time to its bound is the tightest."""

COMMANDS = (
    *(
        "case",
        "iteration, s",
        "of peak by 6 N + 6 L h s",
        "first plan, s",
        "`search`, s",
        "its work, s",
        "its memory, GB",
    ),
    *("plan, kB", "`check`, s", "memory, GB", "`simulate`, s", "memory, GB"),
)


def _commands(state: State, case: Case, known: Mapping[str, Any]) -> Iterator[str]:
    """The cells of a case's commands, or how one failed."""
    for each in (known["search"], known.get("check"), known.get("simulate")):
        if each and each["code"]:
            yield each["failed"]
            return
    search = known["search"]
    yield f"{known['iteration_ns'] / 1e9:.2f}"
    share = counted_share(state, case, known["iteration_ns"])
    yield "" if share is None else f"{share:.1%}"
    yield from (f"{each:.1f}" for each in (search["marks"]["made"], search["seconds"], search["work_s"]))
    yield f"{search['memory_bytes'] / 1e9:.2f}"
    yield f"{known['plan_bytes'] / 1000:.0f}"
    for verb in ("check", "simulate"):
        yield from (f"{known[verb]['seconds']:.1f}", f"{known[verb]['memory_bytes'] / 1e9:.2f}")


def _beside(theirs: int | None, ours: int, why: str = "") -> tuple[str, ...]:
    """Two iterations, and how much longer the second is; or why there is no first."""
    if theirs is None:
        return why or "none", f"{ours / 1e9:.2f}", ""
    return f"{theirs / 1e9:.2f}", f"{ours / 1e9:.2f}", f"{ours / theirs - 1:+.1%}"


LEAST_COUNTED = {"llama3-405b-4096-h100": 0.42}
"""The share of all devices' peak that a plan of a case reaches at least, as :func:`counted_share` counts."""

MOST_PLAN_BYTES, MOST_MEMORY_BYTES, MOST_S = 500_000, 4 * 2**30, 5.0
"""Of a plan's file and of a search; seconds to a first plan, and of ``check`` and ``simulate``."""

LATE_S = 1.0
"""A search's process may end so many seconds after its limit: what a slow machine takes to write and to leave."""


def missed(state: State, cases: Iterable[Case]) -> Iterator[str]:
    """What is known and is not as it must be: a line for each.

    Shares of the peak, sizes and seconds are on thousands of devices; the rest is on any number.
    """
    for case in cases:
        search, command = (state.known(case, part) or {} for part in ("search", "commands"))
        yield from (f"{case.name}, {line}" for line in _failed(search, command))
        front_ns = (state.known(case, "frontier") or {}).get("best_ns")
        if front_ns and search and front_ns < search.get("iteration_ns", math.inf):
            own = f"{search['iteration_ns'] / 1e9:.3f} s" if "iteration_ns" in search else "nothing"
            yield f"{case.name}, search: {own}, and `frontier --plans` {front_ns / 1e9:.3f} s"
        grid_ns, wrong = ((state.known(case, "grid") or {}).get(key) for key in ("best_ns", "wrong"))
        if wrong:
            yield f"{case.name}: bounds that do not hold: {', '.join(wrong)}"
        for what, found in (("search", search), ("commands", command)):
            if (ns := found.get("iteration_ns")) is not None and grid_ns and ns > grid_ns:
                yield f"{case.name}, {what}: {ns / 1e9:.3f} s, and a cell of the grid {grid_ns / 1e9:.3f} s"
        for run in (state.known(case, "published") or {"runs": []})["runs"]:
            if run["theirs_ns"] is not None and run["ours_ns"] > run["theirs_ns"]:
                sides = f"{run['ours_ns'] / 1e9:.3f} s, and {run['run']} {run['theirs_ns'] / 1e9:.3f} s"
                yield f"{case.name}, search: {sides} (`{run['flags']}`)"
        if case.devices < MANY:
            continue
        for what, found in (("search", search), ("commands", command)):
            if (ns := found.get("iteration_ns")) is None:
                continue
            least = LEAST_COUNTED.get(case.stem)
            share = least and counted_share(state, case, ns)
            if least and share and share < least:
                yield f"{case.name}, {what}: {share:.1%} of the peak by 6 N + 6 L h s, not {least:.0%}"
        limit = command.get("limit_s", math.inf)
        said: list[tuple[str, float | None, float]] = [
            ("seconds of search", command.get("search", {}).get("seconds"), limit + LATE_S),
            ("bytes of a plan", command.get("plan_bytes", search.get("plan_bytes")), MOST_PLAN_BYTES),
            ("bytes of memory", command.get("search", search).get("memory_bytes"), MOST_MEMORY_BYTES),
            ("seconds to a first plan", command.get("search", {}).get("marks", {}).get("made"), MOST_S),
            *((f"seconds of {verb}", command.get(verb, {}).get("seconds"), MOST_S) for verb in ("check", "simulate")),
        ]
        for what, figure, most in said:
            if figure is None and command:
                yield f"{case.name}: {what} are not known"
            elif figure is not None and figure > most:
                yield f"{case.name}: {figure:,.4g} {what}, not {most:,.4g} at most"


def _failed(search: Mapping[str, Any], command: Mapping[str, Any]) -> Iterator[str]:
    """Of a search, and of the processes of a command: which has no result, or one that is not valid."""
    if "failed" in search:
        yield f"search: {search['failed']}"
    if not search.get("valid", True):
        yield "search: its plan is not valid"
    for verb in ("search", "check", "simulate"):
        if (each := command.get(verb)) and each.get("code"):
            yield f"commands, {verb}: {each['failed']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, help="the folder where everything is kept, to go on from")
    parser.add_argument("--only", default="", help="parts of cases' names, with commas")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to do")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each search")
    parser.add_argument("--table", action="store_true", help="only print what is known")
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--processor", action="store_true", help="measure the process's own seconds, not the wall's")
    parser.add_argument("--cells", type=int, default=0, help="look at no more than so many cells of a grid")
    parser.add_argument("--above", type=int, help="of those above the best, 0: one in fifty; a quarter of --cells")
    parser.add_argument("--grid-limit", type=float, default=math.inf, help="seconds for the cells of each grid")
    parser.add_argument("--to-the-end", action="store_true", help="end no cell by its first cut")
    parser.add_argument("--stretch", default="1", help="rehearse plans so many times as long")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--frontier", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--off", default="", help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--deterministic", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = [case for case in CASES if any(part in case.stem for part in options.only.split(","))]
    if options.list:
        print("\n".join(case.stem for case in cases))
        return
    if options.state is None:
        parser.error("--state FOLDER is needed")
    clock = WorkClock() if options.processor else time.monotonic
    grids = options.cells, options.above, options.grid_limit
    state = State(options.state, options.limit, clock, *grids, options.stretch, options.to_the_end)
    if options.child:
        off = [name for name in options.off.split(";") if name]
        case = next(case for case in CASES if case.stem == options.child)
        if options.frontier:
            front_child(state, case)
            return
        child(state, case, off, options.workers, deterministic=options.deterministic)
        return
    if not options.table:
        work(state, cases, options.parts.split(","))
    print("\n\n".join(tables(state, cases)))
    print(f"\n{options.limit:g} s per search; {machine()}.")
    if lines := list(missed(state, cases)):
        raise SystemExit("\n".join(lines))


if __name__ == "__main__":
    main()
