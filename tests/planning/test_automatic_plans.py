"""Plans of the automatic search on random graphs, clusters and memory: they pass the check and say what they take."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from builders.requests import request_of
from pipeplan.checker import check
from pipeplan.errors import InfeasibleError, SearchTimeoutError, UsageError
from pipeplan.examples import shape
from pipeplan.files import (
    Block,
    Cluster,
    CostRow,
    DeviceKind,
    Edge,
    LinkLevel,
    Plan,
    Profile,
    Source,
    parse,
    read_profile,
    to_json,
)
from pipeplan.partition.strategies import STRATEGIES
from pipeplan.planning.candidates import (
    CandidateStep,
    PlacementCandidate,
    PublishedPlanners,
    RecomputedBlocks,
    StageGraphs,
)
from pipeplan.planning.partition_trials import StageWays
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import search_plan
from pipeplan.simulator.simulation import simulate
from support.marks import some_of

ROOT = Path(__file__).parents[2]
SOURCE = Source(method="estimated")


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Random graphs of blocks with costs for 1 to 4 samples."""
    count = draw(st.integers(1, 7))
    blocks = []
    for index in range(count):
        forward, backward, held = (draw(st.integers(1, 9)) for _ in range(3))
        rows = tuple(
            CostRow(
                microbatch_size=size,
                forward_ns=forward * size + 1,
                backward_ns=backward * size + 1,
                activation_bytes=held * size,
                workspace_bytes=size,
            )
            for size in (1, 2, 4)
        )
        blocks.append(Block(id=f"b{index}", operator="x", parameter_bytes=draw(st.integers(0, 9)), costs=rows))
    edges = tuple(
        Edge(source=f"b{source}", target=f"b{target}", bytes_per_sample=draw(st.integers(0, 9)))
        for target in range(1, count)
        for source in range(target)
        if source == target - 1 or draw(st.integers(0, 3)) == 0
    )
    return Profile(name="random", source=SOURCE, blocks=tuple(blocks), edges=edges)


def cluster_of(num_devices: int, bandwidth: int) -> Cluster:
    """Nodes of two devices."""
    levels = [LinkLevel(name="node", group_size=2, latency_ns=1, bandwidth_bytes_per_s=10**10)]
    if num_devices > 2:
        levels.append(LinkLevel(name="all", group_size=4, latency_ns=2, bandwidth_bytes_per_s=bandwidth))
    return Cluster(
        name="two by two",
        source=SOURCE,
        devices=(DeviceKind(name="device", count=num_devices),),
        levels=tuple(levels),
    )


@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(
    profiles(),
    st.integers(1, 4),
    st.none() | st.sampled_from([10**9, 10**10]),
    st.none() | st.integers(40, 200),
    st.sampled_from(["auto", "auto", *STRATEGIES]),
)
def test_they_pass_the_check(
    profile: Profile, num_devices: int, bandwidth: int | None, memory: int | None, placement: str
) -> None:
    cluster = None if bandwidth is None else cluster_of(num_devices, bandwidth)
    try:
        result = search_plan(
            request_of(
                profile,
                placement,
                Batch(4, 4),
                num_devices=num_devices,
                cluster=cluster,
                memory_bytes=memory,
                sizes=(1, 2, 4),
                time_limit=0.3,
                deterministic=True,
            )
        )
    except (InfeasibleError, UsageError):
        assume(False)
    plan = result.plan
    report = check(plan, profile, cluster if memory is None else None)
    assert report.valid, report.problems
    found = simulate(plan)
    assert (found.rates.makespan_ns, found.iteration_ns) == (plan.predicted.makespan_ns, plan.predicted.iteration_ns)
    again = simulate(plan, profile=profile, cluster=cluster)
    assert (again.rates.makespan_ns, again.iteration_ns) == (found.rates.makespan_ns, found.iteration_ns)
    assert plan.predicted.lower_bound_ns <= plan.predicted.iteration_ns
    assert plan.mini_batch == 16
    assert memory is None or all(each.peak_bytes <= memory for each in plan.predicted.memory)
    assert parse(to_json(plan), Plan) == plan


@settings(max_examples=some_of(6), suppress_health_check=list(HealthCheck))
@given(profiles(), st.integers(2, 4))
def test_they_are_no_worse_than_what_published_planners_choose(profile: Profile, num_devices: int) -> None:
    limits: dict[str, Any] = {"time_limit": 0.3, "deterministic": True}
    request = request_of(profile, "auto", Batch(4, 4), num_devices=num_devices, sizes=(1, 2, 4), **limits)
    best = search_plan(request).plan.predicted.iteration_ns
    compared = set()
    for propose in PublishedPlanners().candidates(request):
        candidate = propose()
        assert isinstance(candidate, PlacementCandidate)
        with suppress(UsageError):  # 1F1B wants every stage to have the same devices
            theirs = request_of(profile, candidate.placement, candidate.batch, scheduler="1f1b", **limits)
            assert best <= search_plan(theirs).plan.predicted.iteration_ns
            compared.add(candidate.source)
    assert compared


def test_published_planners_are_asked_about_models_of_common_size() -> None:
    """GPT-2 345M, 50 blocks, on 16 devices was too much for two of them."""
    profile = read_profile(str(ROOT / "profiles" / "gpt2-345m-cpu.json"))
    request = request_of(profile, "auto", Batch(64, 2), num_devices=16, deterministic=True)
    found = [propose() for propose in PublishedPlanners().candidates(request)]
    sources = [each.source for each in found if isinstance(each, PlacementCandidate)]
    assert sources == ["PipeDream", "DAPPLE", "Piper"]


def test_searches_ask_published_planners(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each size; and what they choose is looked at wherever there is something else, too."""
    asked, found = [], []

    def noted(step: PublishedPlanners, request: Request, name: str, planner: Any, size: int) -> PlacementCandidate:
        asked.append((name, size))
        found.append(published(step, request, name, planner, size))
        return found[-1]

    published = PublishedPlanners._one
    monkeypatch.setattr(PublishedPlanners, "_one", noted)
    request = request_of(shape("v", 4), "auto", Batch(4, 1), num_devices=2, time_limit=0.3, deterministic=True)
    assert request.sizes == ()
    search_plan(request)
    assert asked == [("PipeDream", 1), ("DAPPLE", 1), ("Piper", 1)]
    assert not any(candidate.fallback for candidate in found)


def test_the_pages_say_how_far_published_planners_are_asked() -> None:
    for page in (ROOT / "docs" / "algorithms" / "planner.md", ROOT / "README.md"):
        assert f"up to {PublishedPlanners().most:,} blocks times devices" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "step", [each(seconds=1e-3) for each in (PublishedPlanners, StageWays, StageGraphs, RecomputedBlocks)]
)
def test_partitioning_ends_after_its_part_of_the_time_where_work_is_counted(step: CandidateStep) -> None:
    """On 64 devices these took minutes of a search of four counted seconds."""
    profile = read_profile(str(ROOT / "profiles" / "gpt2-345m-cpu.json"))
    memory: dict[str, Any] = {"memory_bytes": 4_000_000_000} if isinstance(step, RecomputedBlocks) else {}
    asked = request_of(profile, "auto", Batch(64, 2), num_devices=16, time_limit=0.01, deterministic=True, **memory)
    failed = [error for each in step.candidates(asked) if isinstance(error := each(), SearchTimeoutError)]
    assert failed
    assert {str(error) for error in failed} == {"partitioning took all the time it had; raise --time-limit"}
    assert not any(isinstance(each(), SearchTimeoutError) for each in replace(step, seconds=60.0).candidates(asked))
