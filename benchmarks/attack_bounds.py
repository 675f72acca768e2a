"""Bounds that searches state, on problems so small that every schedule can be tried."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from attack_part import Ended, drawn_for

from pipeplan.costs import build_workload
from pipeplan.errors import InfeasibleError, PipeplanError, SearchTimeoutError, UsageError
from pipeplan.files import Block, CostRow, Edge, PlacedStage, Placement, Profile, Source
from pipeplan.planning.build_plan import Result
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import search_plan
from pipeplan.sharding.graph import CostGraph
from pipeplan.sharding.tracking import track
from pipeplan.workload.one_microbatch import OneMicrobatch
from references import cost_graphs
from references.best_makespan import best_makespan
from references.every_placement import every_placement
from references.least_period import least_period_by_enumeration

__all__ = ["Bounds"]

SECONDS = 0.3
SOON_S = 10.0
SIZES = (1, 2)
MOST_OPERATIONS = 7
"""Of a repetend that is enumerated."""


class SlowError(Exception):
    """An answer took longer than it may."""


@contextmanager
def soon() -> Iterator[None]:
    """What runs inside may work for ten seconds: the answer itself, not the enumeration that it is compared with.

    Raises:
        SlowError: it has worked longer.
    """
    begun = time.process_time()
    yield
    if (worked := time.process_time() - begun) > SOON_S:
        raise SlowError(f"an answer took {worked:.1f} s of work")


def answered(request: Request) -> Result:
    """The search's answer. Raises SlowError, and what the search raises."""
    with soon():
        return search_plan(request)


def drawn_profile(rng: Random, *, count: int, shards: tuple[int, ...] = (1,), split: bool = False) -> Profile:
    """A few blocks with small unequal costs, in a row and maybe joined otherwise, too."""
    blocks = []
    for index in range(count):
        forward, backward, weight = (rng.randint(1, 5) for _ in range(3))
        held, kept = rng.randint(0, 3), rng.randint(0, 2)
        extra, workspace = rng.randint(0, 2), rng.randint(0, 1)
        rows = []
        for size, number in itertools.product(SIZES, shards):
            parts: dict[str, Any] = {"backward_ns": backward * size + extra}
            if split:
                parts = {"input_grad_ns": backward * size, "weight_grad_ns": weight * size, "weight_grad_bytes": kept}
            rows.append(
                CostRow(
                    microbatch_size=size,
                    shards=number,
                    forward_ns=forward * size + extra,
                    activation_bytes=held * size,
                    workspace_bytes=workspace,
                    **parts,
                )
            )
        blocks.append(Block(id=f"b{index}", operator="x", costs=tuple(rows)))
    edges = [Edge(source=f"b{i}", target=f"b{i + 1}", transfer_ns=rng.randint(0, 2)) for i in range(count - 1)]
    if count > 2 and rng.random() < 0.5:
        edges[rng.randrange(count - 1)] = Edge(source="b0", target=f"b{count - 1}", transfer_ns=rng.randint(0, 2))
    return Profile(
        name="drawn", source=Source(method="literature"), blocks=tuple(blocks), edges=tuple(dict.fromkeys(edges))
    )


def drawn_placement(rng: Random, count: int, num_devices: int) -> Placement:
    """A stage for each block, on one device or on several."""
    stages = []
    for index in range(count):
        group = [rng.randrange(num_devices)]
        if rng.random() < 0.3:
            group = sorted(rng.sample(range(num_devices), 2))
        stages.append(PlacedStage(blocks=(f"b{index}",), devices=tuple(group), shards=len(group)))
    return Placement(strategy="drawn", num_devices=num_devices, stages=tuple(stages))


@dataclass(frozen=True, slots=True)
class Tiny:
    """A workload to schedule, as a request and as the problem that is tried in full."""

    request: Request
    problem: OneMicrobatch


def tiny(rng: Random, *, num_microbatches: int) -> Tiny | None:
    """A few stages on two or three devices, most with little memory; None where even one micro-batch does not fit."""
    num_devices, count, split = rng.choice([2, 2, 3]), rng.choice([2, 2, 3]), rng.random() < 0.3
    profile = drawn_profile(rng, count=count, shards=(1, 2), split=split)
    placement = drawn_placement(rng, count, num_devices)
    memory = rng.choice([None, 2, 3, 4, 6, 8])
    how: dict[str, Any] = {"split_backward": split, "recompute": False, "replicas": 1, "spread": False, "num_parted": 0}
    batch = Batch(num_microbatches, 1)
    request = Request(
        profile, num_devices, batch, placement, memory_bytes=memory, time_limit=SECONDS, deterministic=True, **how
    )
    try:
        workload = build_workload(
            profile,
            placement,
            num_microbatches=num_microbatches,
            microbatch_size=1,
            split_backward=split,
            memory_bytes=None if memory is None else [memory] * num_devices,
        )
        return Tiny(request, OneMicrobatch.of(workload))
    except InfeasibleError:
        return None


def makespans(rng: Random) -> Ended:
    """The bounds of a placement that is given, against all schedules of it."""
    drawn = tiny(rng, num_microbatches=rng.choice([2, 2, 3]))
    if drawn is None:
        return Ended("nothing fits")
    try:
        found = answered(drawn.request)
    except (InfeasibleError, SearchTimeoutError) as error:
        return _nothing(
            "makespan", error, None if isinstance(error, SearchTimeoutError) else best_makespan(drawn.problem)
        )
    stated = {
        "lower_bound_ns": found.lower_bound_ns,
        "placement_lower_bound_ns": found.placement_lower_bound_ns,
        "the plan's lower_bound_ns": found.plan.predicted.lower_bound_ns,
    }
    shorter = best_makespan(drawn.problem, below=max(*stated.values(), found.plan.predicted.makespan_ns))
    for name, bound in stated.items():
        if shorter is not None and shorter < bound:
            return Ended("makespan", "bound", f"{name} is {bound}, and {shorter} can be reached")
    return Ended("makespan")


def _nothing(what: str, error: Exception, best: int | None) -> Ended:
    """How it ends without an answer: wrong where nothing is said to fit, and something does in ``best`` ns."""
    if best is None:
        return Ended("nothing found")
    return Ended(what, "bound", f"nothing fits, it says, and {best} ns does: {error}")


def periods(rng: Random) -> Ended:
    """The bound on the period, against all repetends of one micro-batch, which may only be longer."""
    drawn = tiny(rng, num_microbatches=4)
    if drawn is None or drawn.problem.num_operations > MOST_OPERATIONS:
        return Ended("nothing to enumerate")
    try:
        found = answered(drawn.request)
    except SearchTimeoutError:
        return Ended("nothing found")
    except InfeasibleError as error:
        return _nothing("period", error, best_makespan(drawn.problem))
    least, stated = least_period_by_enumeration(drawn.problem), found.plan.predicted.period_lower_bound_ns
    if least < stated:
        return Ended("period", "bound", f"period_lower_bound_ns is {stated}, and {least} can be reached")
    repetend = found.plan.repetend
    if repetend is not None and repetend.unroll == 1 and repetend.repetend_ns < least:
        return Ended("period", "bound", f"a repetend of {repetend.repetend_ns} ns, and none is below {least}")
    return Ended("period")


def everything(rng: Random) -> Ended:
    """The bound over all that a request leaves open, against all schedules of all cuts, replicas and sizes."""
    num_devices, split = rng.choice([1, 2, 2, 3]), rng.random() < 0.3
    profile = drawn_profile(rng, count=rng.choice([2, 3]), split=split)
    memory, samples = rng.choice([None, None, 6, 10]), rng.choice([2, 4])
    request = Request(
        profile,
        num_devices,
        Batch(samples, 1),
        memory_bytes=memory,
        time_limit=SECONDS,
        deterministic=True,
        sizes=SIZES,
    )
    below, refused = math.inf, ""
    try:
        below = answered(request).lower_bound_ns
    except SearchTimeoutError:
        return Ended("nothing found")
    except InfeasibleError as error:
        refused = str(error)
    for placement, size, apart in itertools.product(every_placement(profile, num_devices), SIZES, {False, split}):
        if any(size % stage.replicas for stage in placement.stages):
            continue
        best = _best(request, placement, size, apart, below)
        if best is not None:
            said = refused or f"lower_bound_ns is {below}"
            return Ended("of everything", "bound", f"{said}, and {best} is reached")
    return Ended("nothing found" if refused else "of everything")


def _best(request: Request, placement: Placement, size: int, apart: bool, below: float) -> int | None:
    """A makespan below the bound with these stages, or any without a bound, if there is one."""
    try:
        workload = build_workload(
            request.profile,
            placement,
            num_microbatches=request.batch.mini_batch // size,
            microbatch_size=size,
            split_backward=apart,
            memory_bytes=None if request.memory_bytes is None else [request.memory_bytes] * request.num_devices,
        )
        problem = OneMicrobatch.of(workload)
    except (InfeasibleError, UsageError):
        return None
    return best_makespan(problem, below=below)


def frontiers(rng: Random) -> Ended:
    """Frontiers said to be exact, or proved within a factor, against every strategy."""
    drawn = np.random.default_rng(rng.randrange(2**32))
    graph = drawn_graph(rng, drawn)
    within = rng.choice([0.0, 0.0, 1e-15, 0.05, 0.3])
    try:
        with soon():
            tracked = track(graph, linear=rng.random() < 0.5, pruned=within > 0 or rng.random() < 0.5, within=within)
    except ValueError:
        return Ended("no strategy") if not cost_graphs.enumerate_frontier(graph) else Ended("frontier", "bound", "none")
    known = cost_graphs.enumerate_frontier(graph)
    points = list(zip(tracked.memory_bytes.tolist(), tracked.time_ns.tolist(), strict=True))
    if tracked.exact and points != known:
        return Ended("frontier", "bound", f"exact, it says, and has {points} for {known}")
    if any(not any(m <= a and t <= b for m, t in known) for a, b in points):
        return Ended("frontier", "bound", "a point that is no strategy")
    factor = tracked.factor * (1 + 1e-9)
    for memory, ns in known:
        if not tracked.eliminations["heuristic"] and not any(
            a <= memory * factor and b <= ns * factor for a, b in points
        ):
            return Ended("frontier", "bound", f"within {tracked.factor}, it says, and nothing is near {memory}, {ns}")
    return Ended("frontier")


def drawn_graph(rng: Random, drawn: np.random.Generator) -> CostGraph:
    """A chain, with skips, branches or a hub, of up to five nodes."""
    num = rng.randint(2, 5)
    pairs = {
        "chain": lambda: cost_graphs.chain(num),
        "residual": lambda: cost_graphs.residual(num),
        "branching": lambda: cost_graphs.branching(drawn, num),
        "hub": lambda: cost_graphs.hub(num),
    }[rng.choice(["chain", "residual", "branching", "hub"])]()
    sizes = drawn.integers(1, 4, num).tolist()
    variants, high = rng.choice([1, 2]), rng.choice([4, 30, 1 << 36])
    return cost_graphs.graph_of(drawn, sizes, pairs, variants=variants, high=high, forbidden=rng.choice([0.0, 0.2]))


KINDS = (makespans, makespans, periods, everything, frontiers)
"""In turn, by number."""


@dataclass
class Bounds:
    """Bounds against exact optima; draws again where nothing fits, so that there are as many as are asked for."""

    name: str = "bounds"
    count: int = 500
    limit_s: float = 120.0
    memory_bytes: int | None = None

    def prepare(self, folder: Path) -> None:
        """Nothing."""

    def attack(self, index: int, seed: int, folder: Path) -> Ended:
        """One problem."""
        rng = drawn_for(self.name, seed, index)
        for _ in range(30):
            try:
                ended = KINDS[index % len(KINDS)](rng)
            except PipeplanError as error:
                return Ended("refused", "bound", f"{type(error).__name__}: {error}")
            except SlowError as error:
                return Ended("slow", "hang", str(error))
            if ended.wrong or not ended.how.startswith("no"):
                return ended
        return ended

    def show(self, index: int, seed: int, folder: Path) -> str:
        """How it ends, again."""
        return str(self.attack(index, seed, folder))
