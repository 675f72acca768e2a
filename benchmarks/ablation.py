"""What each step of the search for a schedule brings: searches with some of the steps switched off.

Cells are those of benchmarks/grid.py; shapes with blocks shared by all devices on 4 to 32 devices, with and without a
memory cap; the shipped profiles, searched for a whole plan with the memory of benchmarks/planner.py on 4 and 8
devices; and :data:`SHORT`. Seconds are deterministic, so what else runs on the machine changes nothing. A search whose
result is known is not made: where a step left everything as it was, the search without it finds the same.

Results are JSON lines in the file given by --results; what is there is not searched again. With --hours, no search
begins after so much processor time in all, that of earlier runs with it; cells come in a drawn order, so that those it
does not come to are of no one kind, and rows have the cells that all of them come to.

    python benchmarks/ablation.py --results /tmp/ablation.jsonl [--limit 2] [--off "ramps;windows"] [--cells "grid 4"]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grid
import planner as planning
from shared_shapes import COSTS
from tables import machine, markdown, note

from pipeplan.costs import build_workload
from pipeplan.costs.clusters import named_cluster
from pipeplan.errors import PipeplanError
from pipeplan.examples import model, shape
from pipeplan.files import read_profile
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import STEPS, search_plan, without
from pipeplan.schedule.cpsat.solver import Budget, load_solver
from pipeplan.schedule.search import search_schedule
from pipeplan.schedule.state import ScheduleStep, SearchState, SearchStep
from pipeplan.schedule.steps import AdoptedRepetitions
from pipeplan.workload.steady_state.repetend import find_repetend
from pipeplan.workload.workload import Workload

NAMES = tuple(dict.fromkeys(step.name for step in STEPS if not step.needed))
"""The steps that can be switched off."""

OF_PLANS = frozenset(NAMES) - {step.name for step in STEPS if isinstance(step, ScheduleStep)}
"""Those of them that only the search for a whole plan has."""

Steps = Sequence[SearchStep]
Off = frozenset[str]
Found = tuple[int, bool]
"""The makespan or iteration in ns, and whether the schedule can be repeated for more micro-batches."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Something to search within so many deterministic seconds, by some steps."""

    name: str
    search: Callable[[float, Steps], Found]
    is_plan: bool = False


def cells() -> list[Cell]:
    return [*_grid_cells(), *_shared_cells(), *_profile_cells(), *_short_cells()]


def _grid_cells() -> Iterator[Cell]:
    for devices in (4, 8):
        for chunks in (1, 2):
            for variant in grid.VARIANTS:
                for memory in grid.MEMORY:
                    name = f"grid {devices} x {chunks}, {variant.name}, {memory:g}p"
                    cell = (variant, devices, chunks, memory)
                    yield Cell(name, partial(_scheduled, partial(grid.workload, *cell)))


def _shared_cells() -> Iterator[Cell]:
    for devices, microbatches in ((4, 16), (8, 16), (16, 32), (32, 32)):
        for name in ("m", "mllm", "nn", "k"):
            for memory in (None, 0.5, 0.75) if devices <= 8 else (None,):
                cell = (name, devices, microbatches, memory)
                title = f"shape {name} on {devices}" + ("" if memory is None else f", {memory:g}p")
                yield Cell(title, partial(_scheduled, partial(_shared, *cell)))


def _shared(name: str, devices: int, microbatches: int, memory: float | None) -> Workload:
    """``memory`` is in activations of as many micro-batches as there are devices."""
    profile = shape(name, devices, costs=COSTS)
    assert profile.placement is not None
    rooms = None if memory is None else [int(memory * devices * COSTS.activation_bytes)] * devices
    return build_workload(
        profile, profile.placement, num_microbatches=microbatches, microbatch_size=1, memory_bytes=rooms
    )


def _scheduled(workload: Callable[[], Workload], limit: float, steps: Steps) -> Found:
    own = [step for step in steps if isinstance(step, ScheduleStep)]
    found = search_schedule(workload(), Budget(limit, deterministic=True), steps=own)
    repetend = find_repetend(found.graph, found.orders, found.starts, AdoptedRepetitions.most_unroll)
    return found.makespan_ns, repetend is not None


def _profile_cells() -> Iterator[Cell]:
    for devices in (4, 8):
        for name in planning.MEMORY:
            cell = (name, devices)
            yield Cell(f"{name} on {devices}", partial(_planned, *cell), is_plan=True)


def _planned(name: str, devices: int, limit: float, steps: Steps) -> Found:
    profile = read_profile(str(planning.PROFILES / f"{name}.json"))
    sizes = profile.microbatch_sizes
    request = Request(
        profile,
        devices,
        Batch(8 * devices, sizes[-1]),
        "auto",
        cluster=named_cluster("graphpipe", devices),
        memory_bytes=planning.MEMORY[name],
        sizes=sizes,
        time_limit=limit,
        deterministic=True,
    )
    plan = search_plan(request, steps=steps).plan
    return plan.predicted.iteration_ns, plan.repetend is not None


SHORT = (("gpt2-345m", 16, 1), ("gpt2-1.3b", 32, 2))
"""Models on so many V100s of so many GB, which together have little more than room for the state."""


def _short_cells() -> Iterator[Cell]:
    for name, devices, gigabytes in SHORT:
        yield Cell(f"{name} on {devices} of {gigabytes} GB", partial(_short, name, devices, gigabytes), is_plan=True)


def _short(name: str, devices: int, gigabytes: int, limit: float, steps: Steps) -> Found:
    asked: dict[str, Any] = {"memory_bytes": gigabytes * 10**9, "mini_batch": devices, "time_limit": limit}
    profile, cluster = model(name, device="v100-16gb", shards=(1, 2, 4)), named_cluster("graphpipe", devices)
    plan = search_plan(Request.of(profile, cluster=cluster, deterministic=True, **asked), steps=steps).plan
    return plan.predicted.iteration_ns, plan.repetend is not None


def watched(off: Off, telling: set[str]) -> Steps:
    """The steps that are not off; the set gets the names of those that change anything, as they do."""
    return [
        _Watched(step, telling) if isinstance(step, ScheduleStep) and not step.needed else step for step in without(off)
    ]


class _Watched(ScheduleStep):
    """A step that says whether it changed anything."""

    name = "watched"

    def __init__(self, step: ScheduleStep, telling: set[str]) -> None:
        self.step, self.telling = step, telling

    def applies(self, state: SearchState) -> bool:
        return self.step.applies(state)

    def run(self, state: SearchState) -> None:
        before = _known(state)
        self.step.run(state)
        if _known(state) != before:
            self.telling.add(self.step.name)


def _known(state: SearchState) -> tuple[Any, ...]:
    """All of a state that a later step can see."""
    found = [state.best, state.steady, state.pattern, *state.others]
    return (*map(id, found), state.bound, state.period_proved, state.budget.spent)


@dataclass(slots=True)
class Results:
    """What was found so far, by cell and steps switched off."""

    path: Path
    limit: float
    found: dict[tuple[str, Off], dict[str, Any]]

    @classmethod
    def read(cls, path: Path, limit: float) -> Results:
        """Those in a file that had the same limit."""
        found = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            entry = json.loads(line)
            if entry["limit"] == limit:
                found[entry["cell"], frozenset(entry["off"])] = entry
        return cls(path, limit, found)

    def of(self, cell: Cell, off: Off) -> dict[str, Any]:
        """A result, searched if it is not known and does not follow from one that is."""
        key = cell.name, off
        if key not in self.found:
            self.found[key] = self._equal(cell, off) or _searched(cell, off, self.limit)
            with self.path.open("a") as file:
                file.write(json.dumps(self.found[key]) + "\n")
        return self.found[key]

    def _equal(self, cell: Cell, off: Off) -> dict[str, Any] | None:
        """The result with fewer steps off, if the others that are off changed nothing there."""
        for (name, fewer), entry in self.found.items():
            if name == cell.name and fewer < off and not (off - fewer) & {*entry["telling"], *OF_PLANS}:
                return {**entry, "off": sorted(off), "cpu_s": 0.0}
        return None


def _searched(cell: Cell, off: Off, limit: float) -> dict[str, Any]:
    begun = time.process_time()
    value, repeats = None, False
    telling: set[str] = set()
    try:
        value, repeats = cell.search(limit, watched(off, telling))
    except PipeplanError as error:
        note(f"{cell.name}: {error}")
    spent = round(time.process_time() - begun, 2)
    note(f"{cell.name}, without {', '.join(sorted(off)) or 'nothing'}: {value} in {spent} CPU s")
    found = {"value": value, "repeats": repeats, "telling": sorted(telling), "cpu_s": spent}
    return {"cell": cell.name, "off": sorted(off), "limit": limit, **found}


def searched(results: Results, sets: Sequence[Off], chosen: Sequence[Cell], hours: float) -> list[Cell]:
    """Those of the cells that are searched with everything and without each of the sets before time is up."""
    drawn = random.Random(0).sample(chosen, len(chosen))
    for count, cell in enumerate(drawn):
        for off in [frozenset[str](), *(each for each in sets if _tells(each, cell))]:
            spent = sum(entry["cpu_s"] for entry in results.found.values())
            if spent > 3600 * hours and (cell.name, off) not in results.found:
                return drawn[:count]
            results.of(cell, off)
    return drawn


def _tells(off: Off, cell: Cell) -> bool:
    """Whether the search of a cell has these steps."""
    return cell.is_plan or not off & OF_PLANS


def row(results: Results, off: Off, chosen: Sequence[Cell]) -> tuple[str, ...]:
    """What is lost without these steps."""
    lost, fewer = {}, 0
    for cell in (each for each in chosen if _tells(off, each)):
        everything, without = results.of(cell, frozenset()), results.of(cell, off)
        fewer += everything["repeats"] and not without["repeats"]
        if everything["value"] is not None:
            lost[cell.name] = float("inf") if without["value"] is None else without["value"] / everything["value"] - 1
    if not lost:
        return (", ".join(sorted(off)), "0", *["-"] * 5, str(fewer))
    worst, best = max(lost, key=lambda name: lost[name]), min(lost, key=lambda name: lost[name])
    return (
        ", ".join(sorted(off)),
        str(len(lost)),
        str(sum(loss > 0.001 for loss in lost.values())),
        f"{lost[worst]:+.2%} ({worst})" if lost[worst] > 0 else "-",
        str(sum(loss < -0.001 for loss in lost.values())),
        f"{lost[best]:+.2%} ({best})" if lost[best] < 0 else "-",
        f"{sum(lost.values()) / len(lost):+.3%}",
        str(fewer),
    )


def main() -> int:
    """Search and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=2.0, help="deterministic seconds per search")
    parser.add_argument(
        "--off", action="append", help="steps to leave out together, with ; between; by default each alone"
    )
    parser.add_argument("--cells", default="", help="only cells with this in their name")
    parser.add_argument("--hours", type=float, default=float("inf"), help="processor time of all searches together")
    asked = parser.parse_args()
    sets = [frozenset(each.split(";")) for each in asked.off or NAMES]
    unknown = frozenset[str]().union(*sets) - set(NAMES)
    if unknown:
        parser.error(f"--off {', '.join(sorted(unknown))}: not one of {', '.join(NAMES)}")
    load_solver()
    results = Results.read(asked.results, asked.limit)
    chosen = searched(results, sets, [cell for cell in cells() if asked.cells in cell.name], asked.hours)
    header = ("without", "cells", "longer", "most", "shorter", "most", "mean", "no longer repeatable")
    print(markdown(header, [row(results, off, chosen) for off in sets]))
    print(f"\n{asked.limit:g} deterministic s per search; {machine()}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
