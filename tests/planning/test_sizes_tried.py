"""Which sizes of micro-batches are tried, in which order, and the first plan of a named schedule."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from builders.chains import chain_profile
from pipeplan.errors import UsageError
from pipeplan.files import Cluster, CostRow, DeviceKind, LinkLevel, Profile, Source
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

pytestmark = pytest.mark.counted

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


def disturbed(factors: dict[int, int]) -> Profile:
    """The same blocks as ``sized``, with other times at some sizes."""
    chain = sized()

    def slower(row: CostRow) -> CostRow:
        by = factors.get(row.microbatch_size, 1)
        return row.model_copy(update={"forward_ns": by * row.forward_ns, "backward_ns": by * row.backward_ns})

    blocks = [block.model_copy(update={"costs": tuple(map(slower, block.costs))}) for block in chain.blocks]
    return chain.model_copy(update={"blocks": tuple(blocks)})


@pytest.mark.parametrize(("factors", "size"), [({}, 4), ({1: 9}, 4), ({4: 9}, 2), ({2: 9, 4: 9}, 1)])
@pytest.mark.parametrize("asked", [{"placement": "one-to-one"}, {"replicas": 1}, {"scheduler": "1f1b"}])
def test_the_first_plan_has_the_quickest_size(factors: dict[int, int], size: int, asked: dict[str, Any]) -> None:
    """In whatever little time; it had the smallest one, which took 7 times as long where that was measured badly."""
    request = Request.of(disturbed(factors), devices=4, mini_batch=64, **asked)
    search = PlanSearch(request, Budget(1e-3), None, STEPS)
    EvenCut().run(search)
    assert search.best is not None
    assert search.best.candidate.size_per_replica == size


def test_every_size_is_looked_at_before_anything_is_searched() -> None:
    """Each size is the quickest for some schedule: what says so beforehand knows no messages."""
    cluster = Cluster(
        name="slow to begin",
        source=Source(method="estimated"),
        devices=(DeviceKind(name="any", count=4),),
        levels=(LinkLevel(name="all", group_size=4, latency_ns=5000, bandwidth_bytes_per_s=10**12),),
    )
    few = Request.of(disturbed({4: 2}), cluster=cluster, mini_batch=64, placement="one-to-one")
    search = PlanSearch(few, Budget(600), None, STEPS)
    EvenCut().run(search)
    assert search.best is not None
    assert {1, 2, 4} == search.sizes


def test_what_was_not_tried_is_said() -> None:
    request = Request.of(sized(), devices=4, mini_batch=64, placement="one-to-one", time_limit=1e-3)
    found = search_plan(request)
    assert found.plan.microbatch_size == 4
    assert found.candidates.left
    left = found.candidates.left
    least = "at least " * found.candidates.at_least
    assert found.not_tried.startswith(f"{least}{left} placement{'s' * (left > 1)} not tried")
    assert all(size not in found.sizes_left for size in (found.plan.microbatch_size,))


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

    def refused(problem: PartitionProblem, tolerance: float, lines: bool) -> Any:
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
