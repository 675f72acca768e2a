"""A uniform layout timed by its schedule: the event by event counterpart of the closed forms in ``costs.uniform``."""

from __future__ import annotations

from pipeplan.costs import build_workload
from pipeplan.costs.uniform.as_profile import profile_of, schedule_of
from pipeplan.costs.uniform.step import step_time
from pipeplan.costs.uniform.words import Machine, Transformer, UniformLayout
from pipeplan.errors import UsageError
from pipeplan.schedule.classic import CLASSIC
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import earliest_starts, task_graph


def simulated_ns(name: str, model: Transformer, layout: UniformLayout, machine: Machine) -> float:
    """An iteration of one layout, its pipeline simulated: one replica of alike ones, the rest by their collectives.

    Chunks take what the closed forms say, the classic schedule of the layout says in which order they run, and what
    follows the pipeline is added.

    Raises:
        UsageError: the schedule has no meaning on the layout.
    """
    time = step_time(model, layout, machine)
    after = time.iteration_ns - time.stages_ns - time.bubble_ns
    return pipeline_ns(name, model, layout, machine) + float(after)


def pipeline_ns(name: str, model: Transformer, layout: UniformLayout, machine: Machine) -> int:
    """Only from the first action to the end of the last."""
    time = step_time(model, layout, machine)
    profile, schedule = profile_of(name, model, layout, time), schedule_of(layout)
    assert profile.placement is not None
    workload = build_workload(
        profile,
        profile.placement,
        num_microbatches=int(layout.microbatches),
        microbatch_size=int(layout.microbatch),
        split_backward=schedule.startswith("zb"),
    )
    problem, graph = OneMicrobatch.of(workload), task_graph(workload)
    if reason := CLASSIC[schedule].applies(problem):
        raise UsageError(f"{name}: {schedule} does not run: {reason}")
    starts = earliest_starts(graph, CLASSIC[schedule].orders(problem, graph))
    return max(start + duration for start, duration in zip(starts, graph.durations, strict=True))
