"""In which order a plan's positions and replicas lie along a cluster's levels.

Devices that split a block or a sequence are neighbours, as their messages are priced; beside them lie the replicas of
the same stages, and then the next position: sums of gradients stay together, and messages between stages go far. Where
these take longer than sums, as below the uplinks of an oversubscribed switch, so many replicas of every position lie
together as fill a node, a rack or a pod, and the rest of the replicas in others (Megatron-LM's orders tp-cp-dp-pp and
tp-cp-pp-dp are the ends). Nothing but links changes, so the same orders of actions are timed anew.

Below oversubscribed uplinks the order says most of what a candidate is worth, and where nobody splits blocks all
positions may lie anywhere; there each is looked at in the order of the least bound
(:meth:`pipeplan.planning.trials.Trial.where_quick`), and only orders of the best are timed here. What is not folded,
and positions that are not alike, are mapped as well (:func:`pipeplan.planning.trials.on_cluster`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeplan.planning.candidates import PlacementCandidate
from pipeplan.planning.request import Request
from pipeplan.planning.start import with_orders
from pipeplan.planning.trials import PlanSearch, PlanStep, Trial, elsewhere, iteration_of, keeps_devices, workloads
from pipeplan.schedule.state import Schedule
from pipeplan.search_constants import FINALISTS, SECONDS_PER_LOOK
from pipeplan.workload.engine import with_links
from pipeplan.workload.task_graph import task_graph
from pipeplan.workload.workload import Workload


@dataclass(frozen=True)
class DeviceOrders(PlanStep):
    """The best ``finalists`` on other devices of the cluster, where messages or sums are quicker so.

    What is second where replicas of a position are neighbours may be first where they are not.
    """

    finalists: int = FINALISTS
    name = "device orders"
    when = "the best {finalists} plans; a cluster of several levels; alike devices, which nothing keeps where they are"

    def applies(self, search: PlanSearch) -> bool:
        """Whether devices may be others, and some are nearer than others."""
        return not keeps_devices(search.request)

    def run(self, search: PlanSearch) -> None:
        """Time the actions of each in each order of devices, and keep the quickest: the best plan first."""
        best = search.best
        others = (trial for trial in search.finalists[: self.finalists] if trial is not best)
        for trial in [*([] if best is None else [best]), *others]:
            self._try(search, trial)

    @staticmethod
    def _try(search: PlanSearch, trial: Trial) -> None:
        if trial.best is None or trial.parted is not None or trial.candidate.stay:
            return
        budget, longest = search.budget, 0.0
        if budget.expired:
            return
        for other in elsewhere(search.request, trial.candidate, folded=trial.is_folded):
            begun = budget.used
            if budget.expired or (longest and budget.remaining < longest):
                return
            schedule = _retimed(search.request, trial, other)
            budget.charge(SECONDS_PER_LOOK * trial.num_actions)
            if schedule is not None and iteration_of(schedule) < iteration_of(trial.best):
                trial.candidate, trial.best = other, schedule
                trial.bounds = [schedule.bound_ns]
                trial.begin_again(search.request)
                search.report(trial)
            longest = max(longest, budget.used - begun)


def _retimed(request: Request, trial: Trial, other: PlacementCandidate) -> Schedule | None:
    """The same orders of actions where stages stand on other devices; None where programs would be others."""
    base = trial.best
    assert base is not None
    split = replace(request, split_backward=base.workload.splits_backward)
    (workload,) = workloads(split, other)
    before = _programs_before(base.workload, workload)
    if before is None:
        return None
    graph = task_graph(workload.with_microbatches(base.graph.workload.num_microbatches))
    own = base.graph.on_devices(base.orders)
    programs = range(len(workload.devices))
    orders = with_links(graph, [own[before[program]] if program in before else [] for program in programs])
    return with_orders(replace(base, orders=orders), workload, "")


def _programs_before(old: Workload, new: Workload) -> dict[int, int] | None:
    """{program that a stage is on: which one of the old workload it was}; None where more or fewer play each."""
    if old.players_each != new.players_each:
        return None
    before = dict[int, int]()
    for one, other in zip(old.stages, new.stages, strict=True):
        for was, now in zip(one.devices, other.devices, strict=True):
            if before.setdefault(now, was) != was:
                return None
    return before
