"""The step that proves, by a few devices at a time, that no schedule is shorter."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.schedule.state import ScheduleStep, SearchState, origin_of
from pipeplan.search_constants import FEW_TASKS, PROVING_SHARE_OF_FEW, SECONDS_PER_LABEL
from pipeplan.workload.few_device_bounds import FewDeviceBounds


@dataclass(frozen=True)
class ProvingByDevices(ScheduleStep):
    """What a few devices can do at best (:mod:`pipeplan.workload.few_device_bounds`): it goes on where it stopped.

    With ``few_tasks``, or blocks of all of few devices and a gap that is small, it is worth more of the time, since it
    ends with a proof.
    """

    few_tasks: int = FEW_TASKS
    share_of_few: float = PROVING_SHARE_OF_FEW
    name = "few devices"
    when = "nothing proved best; a device's memory is limited"

    def applies(self, state: SearchState) -> bool:
        limited = any(room is not None for room in state.problem.capacity[: state.problem.num_devices])
        return limited and not state.finished

    def run(self, state: SearchState) -> None:
        state.proofs = state.proofs or FewDeviceBounds.all_of(state.problem, not state.budget.deterministic)
        few = state.graph.num_tasks <= self.few_tasks or any(proofs.together for proofs in state.proofs)
        share = max(self.share, self.share_of_few) if few else self.share
        open_, budget = state.proofs, state.budget
        limit = budget.used + budget.seconds * share
        while open_ and not state.finished and budget.used < limit:
            open_ = [proofs for proofs in open_ if self._grow(state, proofs)]

    @staticmethod
    def _grow(state: SearchState, proofs: FewDeviceBounds) -> bool:
        """A part of the work; whether there is more."""
        assert state.best is not None
        before = proofs.num_labels
        more = proofs.grow(below=state.best.iteration)
        state.budget.charge((proofs.num_labels - before) * SECONDS_PER_LABEL)
        state.least_period = max(state.least_period, proofs.period)
        state.raise_bound(proofs.bound)
        return more


@dataclass(frozen=True)
class ScheduleOfAllDevices(ScheduleStep):
    """What proving has found of all devices together, if it has ended: none is shorter.

    It seldom repeats, so that what does is looked for before.
    """

    name = "all devices"
    when = "nothing proved best; few devices were all devices, and have a schedule; the span is open"

    def applies(self, state: SearchState) -> bool:
        return not state.proved and state.max_span is None and any(proofs.orders for proofs in state.proofs)

    def run(self, state: SearchState) -> None:
        assert state.best is not None
        scheduler = f"{origin_of(state.best.scheduler)}+horizon"
        for proofs in state.proofs:
            if proofs.orders is not None:
                state.offer(state.candidate(proofs.orders, scheduler))
