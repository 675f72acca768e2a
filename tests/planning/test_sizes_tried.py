"""Which sizes of micro-batches are tried, in which order, and the first plan of a named schedule."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from builders.chains import chain_profile
from pipeplan.errors import UsageError
from pipeplan.files import CostRow, Profile
from pipeplan.partition.problem import PartitionProblem
from pipeplan.planning.candidates import (
    CandidateStep,
    PlacementCandidate,
    Proposal,
    PublishedPlanners,
    RecomputedBlocks,
    StageGraphs,
    candidates,
)
from pipeplan.planning.request import Request
from pipeplan.planning.steps import STEPS, EvenCut, search_plan
from pipeplan.planning.trials import PlanSearch
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.time_limit import Limit

MB = 10**6


def sized(num_blocks: int = 4) -> Profile:
    """Blocks that take 1000 ns and 100 more for each sample, and keep 100 MB of each, for 1, 2 and 4 samples."""
    chain = chain_profile(num_blocks, placed=False)
    rows = tuple(
        CostRow(
            microbatch_size=size,
            forward_ns=1000 + 100 * size,
            backward_ns=2000 + 200 * size,
            activation_bytes=size * 100 * MB,
        )
        for size in (1, 2, 4)
    )
    return chain.model_copy(
        update={"blocks": tuple(block.model_copy(update={"costs": rows}) for block in chain.blocks)}
    )


def first_sizes(request: Request) -> list[int]:
    """The sizes of the placements that a search looks at, in their order."""
    found = (propose() for propose in candidates(request, (), 8))
    return list(dict.fromkeys(each.batch.microbatch_size for each in found if isinstance(each, PlacementCandidate)))


@pytest.mark.parametrize(
    ("memory", "sizes"),
    [
        (None, [4, 2, 1]),
        (1000 * MB, [2, 1, 4]),  # 4 samples of a block on each of 4 devices take 1.6 GB in 1F1B, 2 take 800 MB
    ],
)
def test_the_size_that_1f1b_would_have_is_looked_at_first(memory: int | None, sizes: list[int]) -> None:
    """There may be time for one only."""
    asked = Request.of(sized(), devices=4, mini_batch=64, placement="one-to-one", memory_bytes=memory, recompute=False)
    assert first_sizes(asked) == sizes


def test_sizes_between_the_profiled_ones_are_tried_where_they_divide_the_mini_batch() -> None:
    asked: dict[str, Any] = {"devices": 4, "replicas": 4, "time_limit": 1.0, "deterministic": True}
    assert Request.of(sized(), mini_batch=60, **asked).sizes == (1, 2, 3, 4)
    assert Request.of(sized(), mini_batch=64, **asked).sizes == (1, 2, 4)
    found = search_plan(Request.of(sized(), mini_batch=60, **asked)).plan
    assert (found.workload.num_microbatches, found.workload.microbatch_size) == (5, 12)


@pytest.mark.parametrize("memory", [None, 500 * MB])
def test_a_named_schedule_has_a_first_plan_before_any_other_cut_is_looked_for(memory: int | None) -> None:
    """In 500 MB only where it recomputes."""
    asked = Request.of(
        sized(8), devices=4, mini_batch=64, placement="circular", scheduler="interleaved-1f1b", memory_bytes=memory
    )
    search = PlanSearch(asked, Budget(600), None, STEPS)
    EvenCut().run(search)
    assert search.best is not None
    assert search.made is not None
    assert search.made.plan.provenance.scheduler == "interleaved-1f1b"
    assert any(stage.recompute for stage in search.made.plan.stages) is (memory is not None)


def test_stages_of_any_sizes_get_more_time_than_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """mT5 on 8 devices takes 2.3 s of 15 for them: with 2.25 s its plan was three times as long."""

    def refused(problem: PartitionProblem, tolerance: float) -> Any:
        raise UsageError("none")

    def limited(seconds: float) -> Limit:
        limits.append(seconds)
        return Limit(seconds)

    limits: list[float] = []
    monkeypatch.setattr("pipeplan.planning.candidates.graphpipe", refused)
    monkeypatch.setattr("pipeplan.planning.candidates.Limit", limited)
    request = Request.of(sized(), devices=4, mini_batch=64, time_limit=20.0)
    for propose in StageGraphs().candidates(request):
        assert isinstance(propose(), UsageError)
    assert limits == [6.0] + [3.0] * (len(limits) - 1)
    assert len(limits) > 2


def test_no_step_waits_for_all_candidates_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts with recomputation take seconds each on large graphs; stages as a graph would never have their turn."""
    asked = Request.of(sized(), devices=4, mini_batch=64, memory_bytes=1000 * MB)
    steps, said = (RecomputedBlocks(), StageGraphs(), PublishedPlanners()), list[str]()

    def saying(step: CandidateStep, request: Request) -> Iterator[Proposal]:
        yield from (partial(said.append, step.name) for _ in range(3))

    for step in steps:
        monkeypatch.setattr(type(step), "candidates", saying)
    for propose in candidates(asked, steps, 0):
        if isinstance(propose, partial) and propose.func == said.append:
            propose()
    assert said == 3 * [step.name for step in steps]
