"""From a profile to a plan: joins costs, placement, schedule, lowering and checking into one result."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path

from pipeplan import __version__
from pipeplan.check import check
from pipeplan.costs import build_workload, can_split
from pipeplan.errors import InfeasibleError, PipeplanError, UsageError
from pipeplan.lower import programs
from pipeplan.model import Cluster, Placement, Plan, Predicted, Profile, Provenance, read_placement, sha256_of
from pipeplan.model.workload import Workload
from pipeplan.partition import STRATEGIES, place
from pipeplan.schedule.bounds import makespan_bound, period_bound
from pipeplan.schedule.problem import Problem
from pipeplan.schedule.search import Progress, Schedule, search_schedule
from pipeplan.schedule.solver import Budget, load_solver
from pipeplan.simulate.memory import peak_memory
from pipeplan.simulate.metrics import iteration_time, rates
from pipeplan.simulate.repetend import find_repetend, steady_bubble_rate
from pipeplan.simulate.timing import Orders, TaskGraph, earliest_starts, with_links

__all__ = ["Batch", "Options", "Result", "assemble", "choose_placement", "resolve_batch", "search_plan", "workloads"]


@dataclass(frozen=True, slots=True)
class Batch:
    """How the mini-batch is cut: ``num_microbatches`` micro-batches of ``microbatch_size`` samples."""

    num_microbatches: int
    microbatch_size: int


@dataclass(frozen=True, slots=True)
class Options:
    """How to search. ``split_backward`` and ``recompute`` None mean: whatever is better.

    ``split_overhead_ns`` is what each input and each weight gradient takes longer, being launched apart.
    """

    scheduler: str = "auto"
    unroll: int | None = None
    split_backward: bool | None = None
    split_overhead_ns: int = 0
    recompute: bool | None = None
    time_limit: float = 30.0
    seed: int = 0
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """A plan and how it was found; ``seconds`` is the whole search, ``partition_seconds`` choosing the stages.

    ``status`` is ``optimal`` if the makespan equals the lower bound, else ``feasible``.
    """

    plan: Plan
    schedule: Schedule
    seconds: float
    partition_seconds: float | None
    interrupted: bool

    @property
    def status(self) -> str:
        """``optimal`` or ``feasible``."""
        return "optimal" if self.schedule.optimal else "feasible"

    def summary(self) -> dict[str, object]:
        """The figures of ``search --json``.

        Period, unroll and span are those of the best repetend the search knows: the pattern it proved, or the plan's
        own where that is quicker or no pattern was searched.
        """
        predicted, repetend, pattern = self.plan.predicted, self.plan.repetend, self.schedule.pattern
        period, period_bound_ns = predicted.period_ns, predicted.period_lower_bound_ns
        unroll, span = (repetend.unroll, repetend.span) if repetend is not None else (None, None)
        steady = predicted.bubble_rate_steady
        problem = Problem.of(self.schedule.workload)
        per_round = problem.microbatches_per_round
        if pattern is not None and (period is None or pattern.period / per_round <= period):
            period, period_bound_ns = (
                _number(each / per_round) for each in (pattern.period, self.schedule.period_bound_ns)
            )
            unroll, span = pattern.unroll * per_round, pattern.span * per_round
            busy = sum(problem.work[: problem.num_devices])
            steady = float(1 - Fraction(busy) / (pattern.period * len(self.plan.devices)))
        return {
            "name": self.plan.name,
            "status": self.status,
            "scheduler": self.plan.provenance.scheduler,
            "makespan_ns": predicted.makespan_ns,
            "iteration_ns": predicted.iteration_ns,
            "lower_bound_ns": predicted.lower_bound_ns,
            "gap": predicted.gap,
            "period_ns": period,
            "period_lower_bound_ns": period_bound_ns,
            "unroll": unroll,
            "span": span,
            "bubble_rate": predicted.bubble_rate,
            "bubble_rate_span": predicted.bubble_rate_span,
            "bubble_rate_steady": steady,
            "peak_memory_bytes": [memory.peak_bytes for memory in predicted.memory],
            "num_microbatches": self.plan.num_microbatches,
            "microbatch_size": self.plan.microbatch_size,
            "num_devices": len(self.plan.devices),
            "placement": self.plan.placement,
            "repeats": repetend is not None,
            "interrupted": self.interrupted,
            "search_seconds": self.seconds,
            "repetend_seconds": self.schedule.repetend_seconds,
            "partition_seconds": self.partition_seconds,
        }


def resolve_batch(
    profile: Profile,
    num_devices: int,
    *,
    mini_batch: int | None = None,
    microbatch_size: int | None = None,
    num_microbatches: int | None = None,
) -> Batch:
    """The mini-batch from any two of its numbers, the rest by default.

    Default size: 1 for a profile with a placement, else the largest size all blocks were profiled with. Default
    number: four micro-batches per device.

    Raises:
        UsageError: the three contradict each other or do not divide.
    """
    if mini_batch is not None and microbatch_size is not None and num_microbatches is not None:
        if mini_batch != microbatch_size * num_microbatches:
            raise UsageError(
                f"--mini-batch {mini_batch} is not --microbatches {num_microbatches} x --microbatch-size "
                f"{microbatch_size} = {microbatch_size * num_microbatches}; leave one of them out"
            )
        return Batch(num_microbatches, microbatch_size)
    if microbatch_size is None and mini_batch is not None and num_microbatches is not None:
        return Batch(num_microbatches, _divided(mini_batch, num_microbatches, "--microbatches"))
    if microbatch_size is None:
        sizes = profile.microbatch_sizes
        if profile.placement is None and not sizes:
            raise UsageError("the blocks share no profiled micro-batch size; say one with --microbatch-size")
        microbatch_size = 1 if profile.placement is not None else sizes[-1]
    if num_microbatches is None:
        if mini_batch is None:
            num_microbatches = 4 * num_devices
        else:
            num_microbatches = _divided(mini_batch, microbatch_size, "--microbatch-size")
    return Batch(num_microbatches, microbatch_size)


def choose_placement(profile: Profile, wanted: str, num_devices: int | None) -> tuple[Placement | str, int]:
    """What ``--placement`` and ``--devices`` mean: a placement that exists, or a strategy; and how many devices.

    ``wanted`` is ``auto`` (the profile's own placement, else one-to-one), a strategy, or a placement file.

    Raises:
        UsageError: ``num_devices`` contradicts the placement, is missing, or the strategy is not known.
    """
    given: Placement | None = None
    if wanted == "auto":
        given = profile.placement
    elif wanted == "bidirectional":
        raise UsageError(
            "--placement bidirectional is not built for chains yet; `pipeplan example shape-x` writes one as a profile"
        )
    elif wanted not in STRATEGIES:
        if not Path(wanted).exists():
            raise UsageError(
                f"--placement {wanted!r} is neither a file nor one of auto, {', '.join(STRATEGIES)}, bidirectional"
            )
        given = read_placement(wanted)
        try:
            profile.check_placement(given)
        except ValueError as error:
            raise UsageError(f"{wanted} does not place profile {profile.name!r}: {error}") from None
    if given is not None:
        if num_devices not in (None, given.num_devices):
            where = "the profile's placement" if wanted == "auto" else wanted
            raise UsageError(
                f"--devices {num_devices} contradicts {where}, which stands on {given.num_devices}; leave --devices "
                "out, or choose a --placement strategy"
            )
        return given, given.num_devices
    if num_devices is None:
        raise UsageError(f"profile {profile.name!r} has no placement; say how many --devices, or give a --cluster")
    return "one-to-one" if wanted == "auto" else wanted, num_devices


def search_plan(
    profile: Profile,
    placement: Placement | str,
    batch: Batch,
    options: Options,
    *,
    num_devices: int | None = None,
    chunks: int | None = None,
    cluster: Cluster | None = None,
    memory_bytes: int | None = None,
    progress: Progress | None = None,
) -> Result:
    """Search the best plan of a placement, or of a strategy for ``num_devices``, for a mini-batch.

    ``memory_bytes`` per device goes before the cluster's; without either, memory is unlimited. With
    ``split_backward`` left open both ways get a short look and the better one the rest of the time, and the bound is
    for both; with ``recompute`` left open it is tried only where nothing fits without.

    Raises:
        InfeasibleError: no schedule fits; the text names the device, the bytes and what to change.
        UsageError: options that contradict the profile.
    """
    request = _Request(profile, placement, num_devices, chunks, batch, options, cluster, memory_bytes, progress)
    load_solver()
    budget = Budget(options.time_limit, options.seed, options.deterministic)
    failure: InfeasibleError | None = None
    for recompute in (False, True) if options.recompute is None else (options.recompute,):
        try:
            placed, partition_seconds = _placed(request, recompute)
            best = _schedule(request, placed, recompute, budget)
        except InfeasibleError as error:
            failure = failure or error
            continue
        problem = Problem.of(best.workload)
        plan = assemble(
            best.graph,
            best.orders,
            best.bound_ns,
            # for every unroll, so for whichever repetend the plan has
            period_bound(problem) / problem.microbatches_per_round,
            best.scheduler,
            split_overhead_ns=options.split_overhead_ns,
            provenance=_provenance(request),
        )
        # --memory goes before the cluster's memory, so such a plan is not one for the cluster as it stands
        check(plan, profile, cluster if memory_bytes is None else None).require("the plan that was found")
        return Result(plan, best, budget.elapsed, partition_seconds, budget.interrupted)
    assert failure is not None
    raise failure


@dataclass(frozen=True, slots=True)
class _Request:
    """What was asked of :func:`search_plan`."""

    profile: Profile
    placement: Placement | str
    num_devices: int | None
    chunks: int | None
    batch: Batch
    options: Options
    cluster: Cluster | None
    memory_bytes: int | None
    progress: Progress | None


def _placed(request: _Request, recompute: bool) -> tuple[Placement, float | None]:
    """The placement, and the seconds it took to choose its stages; None if it was given."""
    if isinstance(request.placement, Placement):
        return request.placement, None
    assert request.num_devices is not None
    begun = time.monotonic()
    placement = place(
        request.profile,
        request.placement,
        request.num_devices,
        chunks=request.chunks,
        microbatch_size=request.batch.microbatch_size,
        memory_bytes=_memory(request.num_devices, request.cluster, request.memory_bytes),
        recompute=recompute,
    )
    return placement, time.monotonic() - begun


def _schedule(request: _Request, placement: Placement, recompute: bool, budget: Budget) -> Schedule:
    """The best schedule over the ways of running backward; its bound is the least of them.

    Where there are two ways, each gets a short look. One whose bound is no less than what the other has found is out;
    the better of the others gets the time that is left.
    """
    ways = workloads(
        request.profile, placement, request.batch, request.options, recompute, request.cluster, request.memory_bytes
    )
    bounds = [makespan_bound(Problem.of(workload)) for workload in ways]
    found: dict[int, Schedule] = {}
    failures: list[PipeplanError] = []
    for way, workload in enumerate(ways):
        if any(bounds[way] >= schedule.makespan_ns for schedule in found.values()) or (found and budget.interrupted):
            continue
        try:
            found[way] = _search(request, workload, budget, budget.remaining * (_FIRST_LOOK if len(ways) > 1 else 1.0))
        except (InfeasibleError, UsageError) as error:  # a classic schedule may apply to one way alone
            failures.append(error)
    if not found:
        raise failures[0]
    best = min(found, key=lambda way: found[way].makespan_ns)
    if len(ways) > 1 and not found[best].optimal and not budget.expired:
        again = _search(request, ways[best], budget, budget.remaining)
        bounds[best] = max(found[best].bound_ns, again.bound_ns)
        if again.makespan_ns <= found[best].makespan_ns:
            found[best] = again
    bounds = [max(bound, found[way].bound_ns) if way in found else bound for way, bound in enumerate(bounds)]
    return replace(found[best], bound_ns=min(found[best].makespan_ns, *bounds))


_FIRST_LOOK = 0.15
"""The part of the time left that each way of running backward gets before one is chosen."""


def _search(request: _Request, workload: Workload, budget: Budget, seconds: float) -> Schedule:
    """Search a workload's schedule with a part of the budget."""
    share = Budget(seconds, budget.seed, budget.deterministic, budget.workers)
    try:
        return search_schedule(
            workload,
            share,
            scheduler=request.options.scheduler,
            unroll=request.options.unroll,
            progress=request.progress,
        )
    finally:
        budget.spent += share.spent
        budget.interrupted = budget.interrupted or share.interrupted


def workloads(
    profile: Profile,
    placement: Placement,
    batch: Batch,
    options: Options,
    recompute: bool,
    cluster: Cluster | None,
    memory_bytes: int | None,
) -> list[Workload]:
    """The workload of a placement for each way of running backward that is asked for: split first.

    Raises:
        UsageError: split backward is asked for, and the profile has no costs for it.
    """
    return [
        build_workload(
            profile,
            placement,
            num_microbatches=batch.num_microbatches,
            microbatch_size=batch.microbatch_size,
            split_backward=split,
            split_overhead_ns=options.split_overhead_ns,
            recompute=recompute,
            cluster=cluster,
            memory_bytes=_memory(placement.num_devices, cluster, memory_bytes),
        )
        for split in _backward_ways(profile, options.split_backward)
    ]


def _memory(num_devices: int, cluster: Cluster | None, memory_bytes: int | None) -> list[int | None]:
    """[device] memory: the flag's, else the cluster's, else no limit."""
    if memory_bytes is not None or cluster is None:
        return [memory_bytes] * num_devices
    return [*cluster.memory_bytes[:num_devices], *[None] * (num_devices - cluster.num_devices)]


def _backward_ways(profile: Profile, split_backward: bool | None) -> list[bool]:
    possible = can_split(profile)
    if split_backward and not possible:
        raise UsageError(
            f"--split-backward yes needs input_grad_ns and weight_grad_ns, which profile {profile.name!r} has nowhere"
        )
    if split_backward is None:
        return [True, False] if possible else [False]
    return [split_backward]


def assemble(
    graph: TaskGraph,
    orders: Orders,
    bound_ns: int,
    period_bound_ns: Fraction,
    scheduler: str,
    *,
    split_overhead_ns: int = 0,
    provenance: Provenance | None = None,
) -> Plan:
    """The plan of a workload whose devices run ``orders``, with its predicted figures.

    ``bound_ns`` and ``period_bound_ns`` are what is proved about the workload.
    """
    workload = graph.workload
    orders = with_links(graph, orders)
    starts = earliest_starts(graph, orders)
    figures = rates(graph, orders, starts)
    repetend = find_repetend(graph, orders, starts) if workload.is_uniform else None
    by_operation = {
        operation.id: tuple(starts[graph.offsets[index] : graph.offsets[index + 1]])
        for index, operation in enumerate(workload.operations)
    }
    return Plan(
        name=workload.name,
        placement=workload.placement,
        num_microbatches=workload.num_microbatches,
        microbatch_size=workload.microbatch_size,
        num_routes=workload.num_routes,
        devices=workload.devices,
        stages=workload.stages,
        operations=workload.operations,
        dependencies=workload.dependencies,
        starts_ns=by_operation,
        split_overhead_ns=split_overhead_ns,
        programs=programs(graph, orders, starts),
        repetend=repetend,
        predicted=Predicted(
            makespan_ns=figures.makespan_ns,
            lower_bound_ns=bound_ns,
            gap=figures.makespan_ns / bound_ns - 1,
            iteration_ns=iteration_time(workload, figures),
            period_ns=repetend.period_ns if repetend is not None else None,
            period_lower_bound_ns=_number(period_bound_ns),
            bubble_rate=figures.bubble_rate,
            bubble_rate_span=figures.bubble_rate_span,
            bubble_rate_steady=steady_bubble_rate(workload, repetend) if repetend is not None else None,
            memory=peak_memory(graph, orders),
        ),
        provenance=(provenance or Provenance()).model_copy(update={"scheduler": scheduler}),
    )


def _provenance(request: _Request) -> Provenance:
    options = request.options
    return Provenance(
        profile=request.profile.name,
        profile_sha256=sha256_of(request.profile),
        cluster_sha256=sha256_of(request.cluster) if request.cluster is not None else "",
        options={
            "scheduler": options.scheduler,
            "unroll": options.unroll,
            "split_backward": options.split_backward,
            "split_overhead_ns": options.split_overhead_ns,
            "recompute": options.recompute,
            "time_limit_s": options.time_limit,
            "deterministic": options.deterministic,
            "memory_bytes": request.memory_bytes,
            "chunks": request.chunks,
            "num_microbatches": request.batch.num_microbatches,
            "microbatch_size": request.batch.microbatch_size,
        },
        seed=options.seed,
        versions=_versions(),
    )


def _versions() -> dict[str, str]:
    return {"pipeplan": __version__, "python": platform.python_version(), "ortools": version("ortools")}


def _divided(total: int, by: int, flag: str) -> int:
    if total % by:
        raise UsageError(
            f"--mini-batch {total} is not a multiple of {flag} {by}; the nearest are "
            f"{total // by * by} and {(total // by + 1) * by}"
        )
    return total // by


def _number(value: Fraction) -> float:
    """An int where it is one, for readable JSON."""
    return int(value) if value.denominator == 1 else float(value)
