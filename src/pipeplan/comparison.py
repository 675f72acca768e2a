"""Every known schedule for one model and its memory, beside what the search finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.model import Cluster, PlacedStage, Placement, Profile
from pipeplan.model.workload import Workload
from pipeplan.planner import Batch, Options, Result, search_plan, workloads
from pipeplan.report.comparison import OURS, Comparison, NotThere, Row
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.problem import Problem
from pipeplan.schedule.search import Progress
from pipeplan.simulate.memory import overflow, peak_memory
from pipeplan.simulate.metrics import rates
from pipeplan.simulate.timing import earliest_starts, task_graph, with_links

__all__ = ["compare"]


def compare(
    profile: Profile,
    placements: Sequence[Placement | str],
    batch: Batch,
    options: Options,
    *,
    num_devices: int,
    chunks: int | None = None,
    cluster: Cluster | None = None,
    memory_bytes: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Time every classic schedule on each of the placements, and search one there.

    The time limit is shared between the placements. An interruption ends the searches; the classic schedules of all
    placements are still timed.

    Raises:
        InfeasibleError: nothing fits on any placement.
        UsageError: no placement is possible.
    """
    rows: list[Row] = []
    missing: list[NotThere] = []
    memory: tuple[int | None, ...] = ()
    failures: list[InfeasibleError | UsageError] = []
    share, interrupted = replace(options, time_limit=options.time_limit / len(placements)), False
    for wanted in placements:
        try:
            result = search_plan(
                profile,
                wanted,
                batch,
                replace(share, time_limit=0.0) if interrupted else share,
                num_devices=num_devices,
                chunks=chunks if wanted in _CHUNKED else None,
                cluster=cluster,
                memory_bytes=memory_bytes,
                progress=progress,
            )
        except (InfeasibleError, UsageError) as error:
            failures.append(error)
            missing.append(NotThere("all", wanted if isinstance(wanted, str) else wanted.strategy, str(error)))
            continue
        interrupted = interrupted or result.interrupted
        memory = tuple(device.memory_bytes for device in result.plan.devices)
        recompute = any(stage.recompute for stage in result.plan.stages)
        ways = workloads(profile, _placement(result), batch, options, recompute, cluster, memory_bytes)
        ours = _ours(result, recompute)
        classics, reasons = _classics(ways, recompute, ours.lower_bound_ns)
        rows += [ours, *classics]
        missing += reasons
    if not rows:
        raise failures[0]
    rows.sort(key=lambda row: (not row.fits, row.makespan_ns, row.schedule != OURS, max(row.peak_memory_bytes)))
    return Comparison(
        profile.name,
        num_devices,
        batch.num_microbatches,
        batch.microbatch_size,
        memory,
        tuple(rows),
        tuple(missing),
        interrupted,
    )


_CHUNKED = ("circular", "v-shape")
"""Placements with several stages per device."""


def _placement(result: Result) -> Placement:
    """Where the plan's stages are."""
    return Placement(
        strategy=result.plan.placement,
        num_devices=len(result.plan.devices),
        stages=tuple(
            PlacedStage(blocks=stage.blocks, devices=stage.devices, shards=stage.shards, replicas=stage.replicas)
            for stage in result.plan.stages
        ),
    )


def _ours(result: Result, recompute: bool) -> Row:
    plan, predicted = result.plan, result.plan.predicted
    return Row(
        OURS,
        plan.placement,
        any(operation.kind == "I" for operation in plan.operations),
        recompute,
        True,
        predicted.makespan_ns,
        predicted.bubble_rate,
        predicted.bubble_rate_span,
        tuple(memory.peak_bytes for memory in predicted.memory),
        predicted.lower_bound_ns,
    )


def _classics(ways: Sequence[Workload], recompute: bool, bound_ns: int) -> tuple[list[Row], list[NotThere]]:
    """A row for each classic schedule that applies, with the better way of backward; the others' reasons."""
    rows: list[Row] = []
    missing: list[NotThere] = []
    problems = [Problem.of(workload) for workload in ways]
    for name, classic in CLASSIC.items():
        reasons = [classic.applies(problem) for problem in problems]
        found = [
            _row(name, problem, recompute, bound_ns)
            for problem, reason in zip(problems, reasons, strict=True)
            if reason is None
        ]
        if found:
            rows.append(min(found, key=lambda row: (not row.fits, row.makespan_ns)))
        else:
            missing.append(NotThere(name, ways[0].placement, reasons[0] or ""))
    return rows, missing


def _row(name: str, problem: Problem, recompute: bool, bound_ns: int) -> Row:
    graph = task_graph(problem.workload)
    orders = with_links(graph, CLASSIC[name].orders(problem, graph))
    starts = earliest_starts(graph, orders)
    figures, over = rates(graph, orders, starts), overflow(graph, orders)
    return Row(
        name,
        problem.workload.placement,
        "I" in problem.kinds,
        recompute,
        over is None,
        figures.makespan_ns,
        figures.bubble_rate,
        figures.bubble_rate_span,
        tuple(memory.peak_bytes for memory in peak_memory(graph, orders)),
        bound_ns,
        "" if over is None else str(over),
    )
