"""Blocks that are alike are worked out once: with the same answers as where every block is one of its own."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pipeplan.checker import check
from pipeplan.checker.facts import _Job, _on_networks
from pipeplan.costs.stages import group_costs
from pipeplan.costs.zero import WHOLE, Exchanging, Experts, Zero
from pipeplan.errors import UsageError
from pipeplan.files import Block, Cluster, CostRow, Edge, LinkLevel, PhaseRow, Profile, Recipe, Source
from pipeplan.files.cluster import DeviceKind
from pipeplan.files.profile import RingCosts, TiedParameter
from pipeplan.planning.request import Request
from pipeplan.planning.steps import STEPS, EvenCut
from pipeplan.planning.trials import PlanSearch
from pipeplan.schedule.cpsat.solver import Budget
from support.marks import one_in

pytestmark = pytest.mark.counted

SOURCE = Source(method="literature")
CLUSTER = Cluster(
    name="two levels",
    source=SOURCE,
    devices=(DeviceKind(name="device", count=16, memory_bytes=3 * 10**7),),
    levels=(
        LinkLevel(name="node", group_size=4, latency_ns=5, bandwidth_bytes_per_s=10**10),
        LinkLevel(name="net", group_size=16, latency_ns=50, bandwidth_bytes_per_s=10**9),
    ),
)


def drawn(rng: random.Random, num_blocks: int, *, wild: bool) -> Profile:
    """A chain of few kinds of blocks; a wild one has experts, what it ties, and tensors that several blocks take."""
    kinds: list[dict[str, Any]] = []
    for _ in range(3):
        rows = tuple(
            CostRow(
                microbatch_size=size,
                shards=shards,
                expert=expert,
                forward_ns=rng.randrange(100, 900) * size,
                backward_ns=rng.randrange(200, 900) * size,
                activation_bytes=rng.randrange(10**4, 10**6) * size,
                workspace_bytes=rng.randrange(100),
                sequence_parallel=shards > 1 and rng.random() < 0.5,
            )
            for size in (1, 2)
            for shards in (1, 2)
            for expert in ((1, 2) if wild else (1,))
        )
        parameters = rng.randrange(10**3, 10**4)
        kinds.append(
            {"parameters": parameters, "expert_parameters": parameters // 3 if wild else 0, "operator": "layer"}
            | {"costs": rows}
        )
    blocks = tuple(Block(id=f"b{number}", **rng.choice(kinds)) for number in range(num_blocks))
    edges = [
        Edge(source=f"b{number}", target=f"b{number + 1}", tensor="out", bytes_per_sample=rng.choice([0, 64, 1000]))
        for number in range(num_blocks - 1)
    ]
    tied = []
    if wild:
        first = edges[0]
        edges += [first.model_copy(update={"target": f"b{number}"}) for number in (3, 5)]
        edges.append(Edge(source="b2", target="b6", bytes_per_sample=77, broadcast=True, gradient=False))
        tied.append(TiedParameter(name="words", blocks=("b1", f"b{num_blocks - 1}"), parameters=500))
    return Profile(
        name="drawn",
        source=SOURCE,
        recipe=Recipe(name="bf16-mixed"),
        blocks=blocks,
        edges=tuple(edges),
        tied=tuple(tied),
    )


def apart(profile: Profile) -> Profile:
    """The same, where no block is like another: each has a dimension that nothing depends on."""
    blocks = (block.model_copy(update={"dimensions": {"mark": n}}) for n, block in enumerate(profile.blocks, 1))
    found = profile.model_copy(update={"blocks": tuple(blocks)})
    assert len(found.kinds) == len(profile.blocks) > len(profile.kinds)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_costs_of_groups_are_those_of_blocks_that_are_each_of_their_own(seed: int) -> None:
    rng = random.Random(seed)
    profile = drawn(rng, 14, wild=seed % 2 == 1)
    own = apart(profile)
    ids = [block.id for block in profile.blocks]
    for _ in range(30):
        begins = sorted({0, *rng.sample(range(1, 14), rng.randrange(6))})
        groups = [tuple(ids[a:b]) for a, b in zip(begins, [*begins[1:], 14], strict=True)]
        shards, level = rng.choice([1, 2]), rng.randrange(4)
        zero = Zero(level, 2) if level else WHOLE
        experts = Experts.among(rng.choice([1, 2]) if seed % 2 else 1, shards, 2, zero.level, zero.group)
        how: dict[str, Any] = {"recompute": rng.choice([False, True, "selective"]), "zero": zero, "experts": experts}
        how["exchanging"] = Exchanging.on_first(CLUSTER, shards, 2, zero, experts)
        size = rng.choice([1, 2, 3])  # of 3 samples there are no costs

        def costs(of: Profile, groups: Any = groups, size: int = size, shards: int = shards, how: Any = how) -> object:
            try:
                return group_costs(of, groups, size, shards, **how)
            except UsageError as error:
                return str(error)

        assert costs(profile) == costs(own)


def test_blocks_that_differ_in_anything_are_not_alike() -> None:
    row = CostRow(microbatch_size=1, forward_ns=1, backward_ns=2, selective_ns=1, selective_activation_bytes=0)
    block = Block(id="a", operator="layer", parameters=5, parameter_bytes=1, costs=(row,))
    changed = [
        block.model_copy(update={name: value})
        for name, value in {
            "operator": "head",
            "dimensions": {"heads": 2},
            "parameters": 6,
            "frozen_parameters": 1,
            "expert_parameters": 1,
            "whole_parameters": 1,
            "whole_frozen_parameters": 1,
            "parameter_bytes": 2,
            "gradient_bytes": 3,
            "master_bytes": 4,
            "optimizer_bytes": 5,
            "shared": True,
            "cache_bytes_per_token": 1,
            "cache_heads": 2,
            "cache_window_tokens": 1,
            "query_bytes_per_token": 1,
            "mixture_bytes_per_token": 1,
            "phases": (PhaseRow(phase="decode", microbatch_size=1, context_tokens=1, forward_ns=1),),
        }.items()
    ]
    rows = {
        "microbatch_size": 2,
        "backend": "inductor",
        "compile_ns": 3,
        "alone": {"forward_ns": 3},
        "scaled": True,
        "shards": 2,
        "context": 2,
        "expert": 2,
        "expert_shards": 2,
        "configuration": "rows",
        "recompute": True,
        "sequence_parallel": True,
        "forward_ns": 7,
        "backward_ns": None,
        "input_grad_ns": 1,
        "weight_grad_ns": 1,
        "activation_bytes": 8,
        "weight_grad_bytes": 8,
        "workspace_bytes": 8,
        "selective_ns": 3,
        "selective_activation_bytes": 4,
        "ring": RingCosts(forward_ns=1),
        "messages": 0,
        "repeats": 9,
        "spread": {"forward_ns": 0.5},
    }
    assert set(rows) == set(CostRow.model_fields), "a new field belongs here"
    assert {"id", "modules", "costs", *(name for each in changed for name in each.model_fields_set)} == set(
        Block.model_fields
    )
    changed += [block.model_copy(update={"costs": (row.model_copy(update={key: to}),)}) for key, to in rows.items()]
    every = [block, *(each.model_copy(update={"id": f"x{number}"}) for number, each in enumerate(changed))]
    profile = Profile.model_construct(blocks=(*every, block.model_copy(update={"id": "last"})))
    assert profile.alike == {each.id: each.id for each in every} | {"last": "a"}


@one_in(2, "seed", range(6))
def test_a_first_plan_is_that_of_blocks_that_are_each_of_their_own(seed: int) -> None:
    """And passes its check with either profile; in little memory, too, where blocks are computed again."""
    profile = drawn(random.Random(seed), 24, wild=seed % 3 == 2)
    plans = []
    for each in (profile, apart(profile)):
        request = Request.of(each, cluster=CLUSTER, mini_batch=64, memory_bytes=(6 if seed % 2 else 30) * 10**6)
        search = PlanSearch(request, Budget(1000.0), None, STEPS)
        EvenCut().run(search)
        assert search.made is not None
        plans.append(search.made.plan)
    first, second = (plan.model_dump(exclude={"provenance"}) for plan in plans)
    assert first == second
    assert seed % 2 == 0 or any(stage.recomputes for stage in plans[0].stages)
    assert check(plans[0], profile, CLUSTER).valid
    assert check(plans[1], apart(profile), CLUSTER).valid


@pytest.mark.parametrize("seed", range(20))
def test_networks_run_jobs_one_after_another(seed: int) -> None:
    """Each after all before it that share a device, looked through one by one."""
    rng = random.Random(seed)
    jobs: list[_Job] = [
        (rng.randrange(50), rng.randrange(20), frozenset(rng.sample(range(9), rng.randrange(1, 4)))) for _ in range(30)
    ]
    ends: list[int] = []
    for number, (ready, takes, devices) in enumerate(jobs):
        before = [end for end, job in zip(ends, jobs[:number], strict=True) if not devices.isdisjoint(job[2])]
        ends.append(max([ready, *before]) + takes)
    free = [
        max((end for end, job in zip(ends, jobs, strict=True) if device in job[2]), default=0) for device in range(12)
    ]
    assert _on_networks(jobs, 12) == (ends, free)
