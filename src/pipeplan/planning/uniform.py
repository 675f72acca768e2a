"""A uniform layout as a plan: what its profile, placement and cluster come to, action by action.

The profile's rows have the terms of the closed forms, which are also those of ``profile --estimate``; messages, sums,
sharded state and steps are as in every plan on such a cluster.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from pipeplan.costs import build_workload
from pipeplan.costs.uniform.as_profile import cluster_of, placement_of, profile_of, schedule_of
from pipeplan.costs.uniform.judging import Judged
from pipeplan.costs.uniform.words import Machine, Transformer, UniformLayout
from pipeplan.errors import PipeplanError, UsageError
from pipeplan.files import Cluster, Plan, Profile
from pipeplan.planning.build_plan import assemble
from pipeplan.planning.comparison import defined_run, written_run
from pipeplan.schedule.classic import CLASSIC
from pipeplan.search_constants import MOST_ACTIONS, MOST_LAYERS
from pipeplan.workload.bounds import period_bound, weak_iteration_bound
from pipeplan.workload.elements import MAX_COUNT, MAX_DEVICES
from pipeplan.workload.memory import peak_memory
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.steady_state.loop import LoopedOrders
from pipeplan.workload.workload import Workload


@dataclass(frozen=True)
class PlannedLayout:
    """A layout's files, and its workload as its schedule runs it."""

    profile: Profile
    cluster: Cluster
    workload: Workload
    schedule: str
    run: LoopedOrders

    @property
    def _skipped_ns(self) -> int:
        return 0 if self.run.loop is None else self.run.loop.skipped_ns

    @cached_property
    def iteration_ns(self) -> int:
        """Until the last device has updated its parameters."""
        return self.run.graph.iteration(self.run.starts, self._skipped_ns)

    @cached_property
    def peak_bytes(self) -> int:
        """Of the device that needs most."""
        return max(each.peak_bytes for each in peak_memory(self.run.graph, self.run.orders, self.run.loop))

    def plan(self) -> Plan:
        """The file."""
        bound = weak_iteration_bound(self.workload)
        graph, orders, loop = self.run.graph, self.run.orders, self.run.loop
        return assemble(
            graph,
            orders,
            bound_ns=bound,
            period_bound_ns=period_bound(OneMicrobatch.of(self.workload, require_room=False)),
            scheduler=self.schedule,
            loop=loop,
            recipe=self.profile.recipe,
        )


def planned(name: str, model: Transformer, layout: UniformLayout, machine: Machine) -> PlannedLayout:
    """A layout as a plan: one replica of alike ones is scheduled, and the others are in its collectives.

    Raises:
        UsageError: the schedule has no meaning on the layout, or that is too large.
    """
    devices = layout.tensor * layout.context * layout.data * layout.pipeline
    if model.layers > MOST_LAYERS or devices > MAX_DEVICES or layout.microbatches > MAX_COUNT:
        raise UsageError(f"{name}: {model.layers} layers on {devices} devices are too many to be planned")
    profile, placement = profile_of(name, model, layout, machine), placement_of(model, layout)
    cluster = cluster_of(name, layout, machine)
    schedule = schedule_of(layout)
    workload = build_workload(
        profile,
        placement,
        num_microbatches=int(layout.microbatches),
        microbatch_size=int(layout.microbatch * layout.data),
        split_backward=CLASSIC[schedule].splits,
        cluster=cluster,
    )
    if reason := CLASSIC[schedule].applies(OneMicrobatch.of(workload, require_room=False)):
        raise UsageError(f"{name}: {schedule} does not run: {reason}")
    run = defined_run(CLASSIC[schedule], workload)
    if run is None and sum(map(len, workload.slots)) > MOST_ACTIONS:
        raise UsageError(f"{name}: nothing in {schedule} repeats, and its micro-batches are too many without")
    run = run or written_run(CLASSIC[schedule], workload)
    return PlannedLayout(profile, cluster, workload, schedule, run)


def judged_by_plans(judged: Iterable[Judged]) -> list[Judged]:
    """Every run with the time and memory of its plan; alike ones are planned once.

    A layout whose schedule our plans do not have keeps those of its closed forms.
    """
    known: dict[object, tuple[float, float] | None] = {}
    found = []
    for each in judged:
        if each.run is None:
            found.append(each)
            continue
        key = each.run.model, each.run.layout, each.run.machine
        if key not in known:
            try:
                plan = planned(each.id, *key)
                known[key] = plan.iteration_ns / 1e9, float(plan.peak_bytes)
            except (PipeplanError, ValueError):  # the latter: beyond what files may say
                known[key] = None
        figures = known[key]
        found.append(each if figures is None else each.with_plan(*figures))
    return found
