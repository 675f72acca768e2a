"""pipeplan beside torch: steps of both take turns in the same processes, and neighbours are compared.

Two processes with one thread each, on gloo. A step ends when the slower process has ended; which of the two goes first
changes with every pair. The figure is the median of the ratios of neighbours with its 95 % interval; pairs are added
until that is narrow enough, or the time for them is over.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tables import interval, machine, markdown, note

from pipeplan.runtime.launch.__main__ import main as be_rank
from pipeplan.runtime.launch.job import RankContext
from pipeplan.runtime.launch.local import watch_local

__all__ = ["HEADER", "NUM_RANKS", "TIMEOUT_NS", "arguments", "cells", "in_turn", "job_of", "printed", "told_by"]

NUM_RANKS, TIMEOUT_NS = 2, 60 * 10**9
HEADER = ["pipeplan, ms a step", "torch", "pairs", "median ratio", "95 %", "differ by"]
AS_RANK, NARROW, ROUND = "--as-rank", 0.06, 10

Steps = Mapping[str, Callable[[], None]]
"""A step of ``pipeplan`` and one of ``torch``."""


def arguments(text: str | None) -> argparse.ArgumentParser:
    """What every comparison may be told."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="at least")
    parser.add_argument("--warmup", type=int, default=3, help="pairs before them")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help=f"for a row; less once its interval is {NARROW} wide"
    )
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    return parser


def in_turn(steps: Steps, job: Mapping[str, Any]) -> dict[str, list[int]]:
    """Times of steps in ns, the same on all ranks: how long each took on the rank that took longest."""
    found: dict[str, list[int]] = {name: [] for name in steps}
    spent, number = 0, -job["warmup"]
    while number < job["pairs"] or ((number % ROUND or _is_wide(found)) and spent < 1e9 * job["seconds"]):
        for name in sorted(steps, reverse=bool(number % 2)):
            took = _slowest(steps[name])
            spent += took
            if number >= 0:
                found[name].append(took)
        number += 1
    return found


def _is_wide(found: Mapping[str, Sequence[int]]) -> bool:
    low, high = interval(_ratios(found))
    return high - low > NARROW


def _ratios(found: Mapping[str, Sequence[int]]) -> list[float]:
    return [ours / theirs for ours, theirs in zip(found["pipeplan"], found["torch"], strict=True)]


def _slowest(run: Callable[[], None]) -> int:
    """How long it takes until the last rank has done it, from when all are ready."""
    dist.barrier()
    begin = time.monotonic_ns()
    run()
    took = torch.tensor([time.monotonic_ns() - begin])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return int(took.item())


def cells(told: Mapping[str, Any]) -> list[str]:
    """Those of :data:`HEADER`, of what :func:`in_turn` found and how far ``apart`` results are."""
    ratios = _ratios(told)
    low, high = interval(ratios)
    times = [f"{median(told[name]) / 1e6:.2f}" for name in ("pipeplan", "torch")]
    found = [*times, str(len(ratios)), f"{median(ratios):.3f}", f"{low:.3f} to {high:.3f}", f"{told['apart']:.0e}"]
    note(" ".join(found))
    return found


def job_of(given: argparse.Namespace, **others: Any) -> dict[str, Any]:
    """What ranks need of the arguments, with ``others``."""
    return {name: getattr(given, name) for name in ("pairs", "warmup", "seconds")} | others


def told_by(work: str, job: Mapping[str, Any], programs: Sequence[Sequence[str]] = ((),) * NUM_RANKS) -> dict[str, Any]:
    """What rank 0 of two processes says: what ``work``, ``module:function`` of job and context, returns there."""
    found: list[dict[str, Any]] = []
    watch_local(
        "beside:as_rank",
        programs,
        {"work": work, **job},
        TIMEOUT_NS,
        lambda _, report: found.append(report["told"]),
        (sys.executable, __file__, AS_RANK),
    )
    return found[0]


def as_rank(job: Mapping[str, Any], context: RankContext) -> None:
    """The work of one process."""
    torch.set_num_threads(1)
    told = resolve_name(job["work"])(job, context)
    if context.rank == 0:
        context.report({"event": "told", "told": told})


def printed(given: argparse.Namespace, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The table, and where it was measured."""
    print(json.dumps([dict(zip(header, row, strict=True)) for row in rows]) if given.json else markdown(header, rows))
    if not given.json:
        print(f"\n{machine()}, torch {torch.__version__}.")


if __name__ == "__main__" and sys.argv[1:] == [AS_RANK]:
    be_rank()
