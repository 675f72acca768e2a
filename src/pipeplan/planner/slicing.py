"""Leading forwards in two parts (AutoPipe III-C), where that makes the iteration of a schedule shorter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pipeplan.errors import UsageError
from pipeplan.model import Placement
from pipeplan.planner.request import Request
from pipeplan.planner.trials import Trial, iteration_of, workloads
from pipeplan.schedule.search import Schedule
from pipeplan.simulate.bounds import makespan_bound
from pipeplan.simulate.memory import fits
from pipeplan.simulate.parts import in_parts
from pipeplan.simulate.timing import earliest_starts, task_graph

__all__ = ["slice_forwards"]


def slice_forwards(request: Request, trial: Trial) -> None:
    """Run leading forwards of the trial's best schedule in parts: of as many micro-batches as asked for, or as helps.

    Micro-batch m of those in parts is so on all stages but the last m: there its forward is no warmup any more. On the
    last of the others its parts are sent together. It is for one stage per device and one size of micro-batch.

    Raises:
        UsageError: so many are asked for, and the placement or the profile does not allow it.
    """
    wanted = request.options.num_parted
    if wanted == 0 or trial.best is None:
        return
    reason = _reason_against(trial)
    if reason is not None:
        if wanted is not None:
            raise UsageError(f"--slices {wanted} does not apply: {reason}")
        return
    depth = 1 + max(_places(trial))
    counts = [wanted] if wanted is not None else range(1, min(depth, trial.candidate.batch.num_microbatches) + 1)
    for schedule in _tried(request, trial, counts, required=wanted is not None):
        if wanted is not None or iteration_of(schedule) < iteration_of(trial.best):
            trial.best = schedule
            trial.bounds = [schedule.bound_ns]


def _reason_against(trial: Trial) -> str | None:
    assert trial.best is not None
    workload = trial.best.workload
    devices = [device for stage in workload.stages for device in stage.devices]
    if len(set(devices)) < len(devices):
        return "it needs one stage per device"
    if not workload.is_uniform:
        return "it needs one micro-batch size and one route"
    if any(stage.microbatch_size % (2 * stage.replicas) for stage in workload.stages):
        return f"micro-batches of {workload.microbatch_size} samples cannot be halved on every replica"
    return None


def _places(trial: Trial) -> list[int]:
    """[stage] how many stages come before it, on the longest way."""
    workload = trial.ways[0]
    places = [0] * len(workload.stages)
    for dependency in sorted(workload.dependencies, key=lambda each: int(each.source[:-1])):
        source, target = int(dependency.source[:-1]), int(dependency.target[:-1])
        if dependency.source[-1] == dependency.target[-1] == "F":
            places[target] = max(places[target], places[source] + 1)
    return places


def _tried(request: Request, trial: Trial, counts: Iterable[int], *, required: bool) -> Iterator[Schedule]:
    """The best schedule with so many micro-batches in parts, for each number."""
    assert trial.best is not None
    places = _places(trial)
    split = any(operation.kind == "I" for operation in trial.best.workload.operations)
    options = replace(request.options, split_backward=split)
    whole = trial.best
    for count in counts:
        placement = _parted(trial.candidate.placement, [min(count, 1 + max(places) - place) for place in places])
        candidate = replace(trial.candidate, placement=placement)
        try:
            (workload,) = workloads(replace(request, options=options), candidate)
        except UsageError:  # no costs for half the samples
            if required:
                raise
            return
        graph = task_graph(workload)
        orders = in_parts(whole.orders, graph)
        if not fits(graph, orders):
            continue
        starts = earliest_starts(graph, orders)
        makespan = max(map(sum, zip(starts, graph.durations, strict=True)))
        bound = min(makespan, makespan_bound(workload))
        yield replace(
            whole,
            workload=workload,
            graph=graph,
            orders=orders,
            starts=starts,
            makespan_ns=makespan,
            bound_ns=bound,
            scheduler=f"{whole.scheduler}+slices",
            pattern=None,
        )


def _parted(placement: Placement, counts: list[int]) -> Placement:
    stages = (
        stage.model_copy(update={"num_parted": count}) for stage, count in zip(placement.stages, counts, strict=True)
    )
    return placement.model_copy(update={"stages": tuple(stages)})
