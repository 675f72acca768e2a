"""Windows leave alone what a schedule is repeated by."""

from __future__ import annotations

import pytest

from builders.chains import chain_workload
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.cpsat.windows import _try_window
from pipeplan.schedule.state import SearchState
from pipeplan.schedule.steps import microbatch_by_microbatch
from pipeplan.workload.one_microbatch import OneMicrobatch

MICROBATCHES, FROZEN = 6, 3


@pytest.mark.parametrize("late", [False, True])
def test_a_window_of_an_older_schedule_ends_at_the_frozen_repetition(*, late: bool) -> None:
    """One micro-batch after another can be shortened anywhere: a window of everything changes one side alone."""
    state = SearchState.of(OneMicrobatch.of(chain_workload(2, MICROBATCHES)), Budget(20, deterministic=True), None)
    frozen = frozenset(task for task in range(state.graph.num_tasks) if task % MICROBATCHES == FROZEN)
    found = state.candidate(microbatch_by_microbatch(state.problem), "sequential", frozen)
    assert found is not None
    state.offer(found)
    begin = min(found.starts[task] for task in frozen) + 1 if late else 0
    assert _try_window(state, found, (begin, found.iteration), 5.0)
    better = state.steady
    assert better is not None
    assert better.iteration < found.iteration
    (moved,) = {better.starts[task] - found.starts[task] for task in frozen}
    assert moved == 0 if late else moved < 0
    for before, after in zip(found.orders, better.orders, strict=True):
        place = max(before.index(task) for task in before if task in frozen)
        assert (before[: place + 1] == after[: place + 1]) if late else (before[place:] == after[place:])
