"""The step that proves, by a few devices at a time, that no schedule is shorter."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.schedule.state import ScheduleStep, SearchState
from pipeplan.search_constants import FEW_TASKS, PROVING_SHARE_OF_FEW, SECONDS_PER_LABEL
from pipeplan.workload.few_device_bounds import FewDeviceBounds


@dataclass(frozen=True)
class ProvingByDevices(ScheduleStep):
    """What a few devices can do at best (:mod:`pipeplan.workload.few_device_bounds`): it goes on where it stopped.

    With at most ``few_tasks`` it is worth more of the time, since it ends with a proof.
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
        share = max(self.share, self.share_of_few) if state.graph.num_tasks <= self.few_tasks else self.share
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
