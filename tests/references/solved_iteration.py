"""The shortest iteration by a solver over all actions of a plan as it is given, without orders of micro-batches."""

from __future__ import annotations

from ortools.sat.python import cp_model

from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import task_graph
from pipeplan.workload.workload import Workload

__all__ = ["solved_iteration"]


def solved_iteration(problem: OneMicrobatch, seconds: float = 1.0) -> int | None:
    """Ns of the least iteration, in buckets or not; None if it is not found in so many seconds of the solver's work.

    Of the workload that the problem was reduced from: every device for itself, micro-batches of any sizes. Networks
    gather in any order, which plans do not: that may be sooner by something.
    """
    reduction = problem.reduction
    given = problem.workload if reduction is None else reduction.workload
    groups = range(problem.num_devices) if reduction is None else reduction.groups
    rooms = [None if group < 0 else problem.capacity[group] for group in groups]
    found = [_solved(way, rooms, seconds) for way in given.ways_to_sum]
    known = [each for each in found if each is not None]
    return min(known) if len(known) == len(found) else None


def _solved(workload: Workload, rooms: list[int | None], seconds: float) -> int | None:
    model, graph = cp_model.CpModel(), task_graph(workload)
    jobs = (*workload.gradient_sums, *workload.gathers)
    latest = sum(graph.durations) + sum(lag for each in graph.successors for _, lag in each)
    latest += sum(job.duration_ns for job in jobs) + sum(workload.steps_ns)
    starts = [model.new_int_var(0, latest, "") for _ in graph.durations]
    ends = [start + duration for start, duration in zip(starts, graph.durations, strict=True)]
    spans = [model.new_fixed_size_interval_var(*each, "") for each in zip(starts, graph.durations, strict=True)]
    for task, following in enumerate(graph.successors):
        for other, lag in following:
            model.add(starts[other] >= ends[task] + lag)
    for device, room in enumerate(rooms):
        here = [task for task in range(graph.num_tasks) if device in graph.devices_of(task)]
        model.add_no_overlap([spans[task] for task in here])
        if room is None:
            continue
        held = [(spans[task], workload.effects[graph.operation_of[task]].workspace) for task in here]
        for hold in workload.holds:
            if device not in workload.holders[hold.source]:
                continue
            for number in range(graph.offsets[hold.source + 1] - graph.offsets[hold.source]):
                begin, until = starts[graph.offsets[hold.source] + number], model.new_int_var(0, latest, "")
                for target in hold.targets:
                    model.add(until >= ends[graph.offsets[target] + number])
                length = model.new_int_var(0, latest, "")
                held.append((model.new_interval_var(begin, length, until if hold.targets else latest, ""), hold.size))
        model.add_cumulative([span for span, _ in held], [size for _, size in held], room)
    model.minimize(_iteration(model, workload, [ends[slice(*each)] for each in _ranges(graph.offsets)], latest))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = seconds
    return round(solver.objective_value) if solver.solve(model) == cp_model.OPTIMAL else None


def _ranges(offsets: list[int]) -> list[tuple[int, int]]:
    return [*zip(offsets, offsets[1:], strict=False)]


def _iteration(
    model: cp_model.CpModel, workload: Workload, ends: list[list[cp_model.LinearExprT]], latest: int
) -> cp_model.IntVar:
    """When everything has ended, where the actions of each operation end at ``ends`` [operation][micro-batch]."""
    devices = range(len(workload.devices))
    summed, ended = [model.new_int_var(0, latest, "") for _ in devices], model.new_int_var(0, latest, "")
    last = [model.new_int_var(0, latest, "") for _ in workload.stages]
    for operation, own in zip(workload.operations, ends, strict=False):
        for end in own:
            for device in workload.stages[operation.stage].devices:
                model.add(summed[device] >= end)
            if operation.kind in ("B", "W"):
                model.add(last[operation.stage] >= end)
    stepped = [moment + step for moment, step in zip(summed, workload.steps_ns, strict=True)]
    on_network: list[list[cp_model.IntervalVar]] = [[] for _ in devices]
    for job in workload.gradient_sums:
        start = model.new_int_var(0, latest, "")
        for stage, ahead in zip(job.stages, job.ahead_ns, strict=True):
            model.add(start >= last[stage] - ahead)
        for device in job.devices:
            model.add(summed[device] >= start + job.duration_ns)
            on_network[device].append(model.new_fixed_size_interval_var(start, job.duration_ns, ""))
    for job in workload.gathers:
        start = model.new_int_var(0, latest, "")
        for device in job.devices:
            model.add(start >= stepped[device])
            on_network[device].append(model.new_fixed_size_interval_var(start, job.duration_ns, ""))
        model.add(ended >= start + job.duration_ns)
    for own in on_network:
        model.add_no_overlap(own)
    for moment in stepped:
        model.add(ended >= moment)
    return ended
