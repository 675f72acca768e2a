"""Decoding loops: the least repetend by brute force, memory at the last step, chunks of prompts, longer runs."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeplan as face
from builders.decoders import drawn_decoder, with_prompts
from pipeplan.checker import check
from pipeplan.costs.blocks import StageCost
from pipeplan.costs.decode_loop import ChunkCost, chunk_costs
from pipeplan.costs.decoding import cached_bytes, phase_costs
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.files import PlacedStage, Placement, Plan, Profile, parse, to_json
from pipeplan.files.plan import Decode
from pipeplan.planning.build_plan import assemble
from pipeplan.planning.decode_plan import decode_plan
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.decode_loop import decode_schedule, without_waiting
from pipeplan.search_constants import DECODE_STEPS
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.bounds import period_bound
from pipeplan.workload.elements import Dependency, Device, Hop, Operation, Stage
from pipeplan.workload.kinds import PREFILL
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.workload import Workload
from references.decode_loops import least_repetend, least_repetend_in_memory
from support.marks import slow_but, some_of

pytestmark = pytest.mark.counted

Devices = Sequence[tuple[int, ...]]


def loop_of(
    times: Sequence[int],
    devices: Devices,
    groups: int,
    lags: Sequence[int] = (),
    back: int = 0,
    chunks: Sequence[int] = (),
) -> Workload:
    """A chain of stages with one request in each group; ``lags`` [stage] are of the messages that leave it.

    ``chunks`` [stage] are times of chunks of prompts, if there are any, which travel in no time.
    """
    lags = [*lags, *[0] * len(times)]

    def joined(source: int, target: int, lag: int, later: int = 0, kind: str = "F") -> Dependency:
        ends = devices[source], devices[target]
        hops = tuple(
            Hop(source_device=ends[0][0], target_device=d, latency_ns=lag) for d in ends[1] if d not in ends[0]
        )
        if kind == "F":
            return Dependency(source=f"{source}F", target=f"{target}F", hops=hops, later=later)
        source, target = f"{source + len(times)}{kind}", "0F" if later else f"{target + len(times)}{kind}"
        return Dependency(source=source, target=target, hops=hops, later=later)

    last = len(times) - 1
    joins = [joined(number, number + 1, lags[number]) for number in range(last)] + [joined(last, 0, back, groups)]
    stages = [
        Stage(blocks=(f"b{number}",), devices=each, shards=len(each), microbatch_size=1)
        for number, each in enumerate(devices)
    ]
    operations = [Operation(kind="F", stage=number, duration_ns=time) for number, time in enumerate(times)]
    if chunks:
        joins += [joined(number, number + 1, 0, kind=PREFILL) for number in range(last)]
        joins.append(joined(last, 0, 0, groups, PREFILL))
        operations += [Operation(kind=PREFILL, stage=len(times) + n, duration_ns=time) for n, time in enumerate(chunks)]
        stages += [replace(each, blocks=()) for each in stages]
    return Workload(
        name="loop",
        placement="one-to-one",
        num_microbatches=DECODE_STEPS * groups,
        microbatch_size=1,
        devices=(Device(),) * (1 + max(map(max, devices))),
        stages=tuple(stages),
        operations=tuple(operations),
        dependencies=tuple(joins),
    )


def plan_of(workload: Workload) -> Plan:
    """The plan of a loop, found and checked."""
    groups = workload.step_microbatches
    schedule = decode_schedule(workload, Budget(30.0))
    plan = assemble(
        schedule.graph,
        schedule.orders,
        schedule.bound_ns,
        schedule.period_bound_ns,
        schedule.scheduler,
        cut=schedule.repetend,
        decode=Decode(
            batch=groups, groups=groups, context_tokens=16, prefill_tokens=int(len(workload.instructions) > 0)
        ),
    )
    check(plan).require()
    return plan


# The least repetend -------------------------------------------------------------------------------------------------


@st.composite
def small_loops(draw: st.DrawFn) -> Workload:
    """One to four stages on one to three devices, some on several or with others; one to three groups."""
    count, few = draw(st.integers(1, 4)), st.integers(1, 3)
    places: list[tuple[int, ...]] = [(0,), (1,), (2,), (0, 1)]
    devices = draw(st.lists(st.sampled_from(places), min_size=count, max_size=count))
    times = draw(st.lists(few, min_size=count, max_size=count))
    lags = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    chunks = draw(st.lists(few, min_size=count, max_size=count)) if count < 3 and draw(st.booleans()) else ()
    most = 3 if count < 3 and not chunks else 1 if chunks and len(set(devices)) == 1 else 2
    groups = draw(st.integers(1, most))
    return loop_of(times, devices, groups, lags, draw(st.integers(0, 2)), chunks)


def require_least(workload: Workload) -> None:
    groups = workload.step_microbatches
    plan, least = plan_of(workload), least_repetend(workload, groups)
    repetend = plan.repetend
    assert repetend is not None
    assert repetend.unroll == groups
    assert repetend.repetend_ns == plan.token_ns == least
    assert plan.predicted.period_lower_bound_ns == pytest.approx(least / groups)


@pytest.mark.parametrize(
    ("devices", "chunks", "groups", "lag"), [(8, 2, 8, 21), (8, 3, 8, 13), (4, 2, 4, 21), (4, 4, 4, 30)]
)
def test_groups_that_take_turns_on_several_stages_of_a_device_wait_nowhere(
    devices: int, chunks: int, groups: int, lag: int
) -> None:
    """Where the way round is what takes longest, no group waits on it, which is proved the least."""
    count = devices * chunks
    workload = loop_of([100] * count, [(number % devices,) for number in range(count)], groups, [lag] * count, lag)
    plan = plan_of(workload)
    assert plan.token_ns == plan.predicted.period_lower_bound_ns * groups == count * (100 + lag)


@settings(max_examples=some_of(30))
@given(small_loops())
def test_a_pattern_without_waiting_is_one(workload: Workload) -> None:
    """In every repetition of it a device runs one at a time, and a group's stages follow as soon as they can."""
    problem = OneMicrobatch.of(workload)
    pattern = without_waiting(problem, ceil(period_bound(problem) * workload.step_microbatches))
    if pattern is None:
        return
    period, starts = pattern.repetend_ns, pattern.starts
    for operations in problem.on_device:
        taken = Counter(
            (starts[i][u] + tick) % period
            for i in operations
            for u in range(pattern.unroll)
            for tick in range(problem.durations[i])
        )
        assert set(taken.values()) <= {1}
    for u, target in itertools.product(range(pattern.unroll), range(problem.num_operations)):
        ends = [starts[x][u] + problem.durations[x] + lag for x, to, lag, *_ in problem.edges if to == target]
        assert starts[target][u] == max(ends, default=starts[0][u])


@settings(max_examples=some_of(40))
@given(small_loops())
def test_the_repetend_is_the_least_of_all_starts(workload: Workload) -> None:
    require_least(workload)


@pytest.mark.slow
@pytest.mark.long
@settings(max_examples=some_of(1500))
@given(small_loops())
def test_the_repetend_is_the_least_of_all_starts_of_many(workload: Workload) -> None:
    require_least(workload)


@st.composite
def loops_in_memory(draw: st.DrawFn) -> Workload:
    """Two or three stages on two devices, whose results have bytes, and hardly room for them."""
    count = draw(st.integers(2, 3))
    devices = draw(st.lists(st.sampled_from([(0,), (1,)]), min_size=count, max_size=count))
    times, lags = (draw(st.lists(st.integers(least, 3), min_size=count, max_size=count)) for least in (1, 0))
    groups = draw(st.integers(1, 3 if len(set(devices)) == count else 2 if count == 2 else 1))
    loop = loop_of(times, devices, groups, lags, draw(st.integers(0, 2)))
    given = [draw(st.integers(1, 3)) for _ in range(count - 1)]
    room = draw(st.integers(max(given), groups * sum(given)))
    operations = (replace(each, acquire_bytes=size) for each, size in zip(loop.operations, [*given, 0], strict=True))
    return replace(loop, operations=tuple(operations), devices=(Device(memory_bytes=room),) * len(loop.devices))


def require_least_in_memory(workload: Workload) -> None:
    """Of all orders that fit; where none does, none is found."""
    groups = workload.step_microbatches
    least = least_repetend_in_memory(workload, groups)
    if least is None:
        with pytest.raises(InfeasibleError):
            plan_of(workload)
    else:
        assert plan_of(workload).token_ns == least


@settings(max_examples=some_of(15))
@given(loops_in_memory())
def test_the_repetend_in_tight_memory_is_the_least_of_all_orders(workload: Workload) -> None:
    require_least_in_memory(workload)


@pytest.mark.slow
@pytest.mark.long
@settings(max_examples=some_of(400))
@given(loops_in_memory())
def test_the_repetend_in_tight_memory_is_the_least_of_all_orders_of_many(workload: Workload) -> None:
    require_least_in_memory(workload)


# Plans of a profile --------------------------------------------------------------------------------------------------

GIVEN = 64
"""Bytes of a token's hidden state, as the builder's decoders have them."""


def planned(
    profile: Profile,
    groups: int = 3,
    batch: int = 8,
    context: int = 400,
    memory: int | None = None,
    chunk_tokens: int = 0,
    prompt_tokens: int = 0,
) -> Plan:
    """Embedding and first attention, the layers between, the last and the head, each on a device of its own."""
    blocks = list(profile.blocks)
    parts = [blocks[:2], blocks[2:-2], blocks[-2:]]
    decode = Decode(batch=batch, groups=groups, context_tokens=context, prefill_tokens=chunk_tokens)
    most = max(decode.sizes)
    rows = [[phase_costs(block, "decode", most, context) for block in part] for part in parts]
    stages = [
        PlacedStage(blocks=tuple(block.id for block in part), devices=(number,)) for number, part in enumerate(parts)
    ]
    stages_of_chunks = [[(block.id, 1) for block in part] for part in parts]
    found = decode_plan(
        profile,
        Placement(strategy="one-to-one", num_devices=3, stages=tuple(stages)),
        [
            StageCost(
                sum(row.forward_ns for row in own),
                0,
                activation_bytes=GIVEN * most if number < 2 else 0,
                workspace_bytes=max(row.workspace_bytes for row in own),
            )
            for number, own in enumerate(rows)
        ],
        [batch * sum(cached_bytes(block, context) for block in part) for part in parts],
        decode,
        budget=Budget(20.0),
        memory_bytes=None if memory is None else [memory] * 3,
        prefill=chunk_costs(profile, stages_of_chunks, prompt_tokens, chunk_tokens) if chunk_tokens else (),
    )
    assert parse(to_json(found.plan), Plan) == found.plan
    return found.plan


def test_a_plan_says_its_token_time_and_its_cache() -> None:
    plan = planned(drawn_decoder(0, 3), groups=3)
    steps = [operation.duration_ns for operation in plan.operations]
    assert plan.token_ns == max(3 * max(steps), sum(steps))
    assert plan.tokens_per_s == pytest.approx(8e9 / float(plan.token_ns))
    assert plan.decode is not None
    assert plan.decode.sizes == (2, 3, 3)
    cached = 400 * 2 * 4 * 16 * 8  # a token's keys and values in 4 heads of 16 bytes, of 8 requests
    assert plan.cache_bytes == (cached, 2 * cached, 0)
    assert [memory.cache_bytes for memory in plan.predicted.memory] == list(plan.cache_bytes)


@pytest.mark.parametrize("seed", range(3))
def test_more_groups_hide_the_way_round_until_work_is_all(seed: int) -> None:
    """Each group of two requests: a step lasts as long however many there are."""
    profile = drawn_decoder(seed, 3)
    plans = [planned(profile, groups, batch=3 * groups) for groups in (1, 2, 3, 4, 6)]
    steps = [operation.duration_ns for operation in plans[0].operations]
    for groups, plan in zip((1, 2, 3, 4, 6), plans, strict=True):
        assert plan.token_ns == max(sum(steps), groups * max(steps))
    rates = [plan.tokens_per_s or 0.0 for plan in plans]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(3e9 / max(steps))


def test_more_steps_take_a_token_time_each() -> None:
    plan = planned(drawn_decoder(1, 3))
    known = {steps: simulate(plan, 3 * steps).rates.makespan_ns for steps in (4, 9, 20)}
    assert plan.token_ns is not None
    assert known[9] - known[4] == 5 * plan.token_ns
    assert known[20] - known[9] == 11 * plan.token_ns
    assert check(plan).recomputed.period_ns == float(plan.token_ns / 3)


@pytest.mark.parametrize("seed", range(4))
def test_memory_is_kept_at_the_last_step(seed: int) -> None:
    """With as much as it needs there is a plan, with too little none; how many requests would fit, do."""
    profile = drawn_decoder(seed, 3)
    peaks = [
        max(memory.peak_bytes for memory in planned(profile, context=context).predicted.memory)
        for context in (10, 150, 399, 400)
    ]
    assert peaks == sorted(peaks)
    assert peaks[-1] > peaks[-2]  # a token more for each request
    plan = planned(profile, memory=peaks[-1])
    assert max(memory.peak_bytes for memory in plan.predicted.memory) <= peaks[-1]
    with pytest.raises(InfeasibleError, match=r"requests? would fit; lower --batch or --context, or raise") as caught:
        planned(profile, groups=1, memory=peaks[-1] // 2)
    fitting = int(re.findall(r"(\d+) requests? would fit", str(caught.value))[0])
    assert 1 <= fitting < 8
    assert planned(profile, groups=1, batch=fitting, memory=peaks[-1] // 2).predicted.memory
    with pytest.raises(InfeasibleError):
        planned(profile, groups=1, batch=fitting + 2, memory=peaks[-1] // 2)


# Chunks of prompts --------------------------------------------------------------------------------------------------


def test_check_prices_chunks_of_prompts_again() -> None:
    """Each of their times and bytes, of whole prompts and of parts of them."""
    profile = with_prompts(drawn_decoder(2, 2, shards=(1,)))
    for tokens in (100, 400):
        plan = face.search(
            profile, devices=2, pp=2, batch=8, context=400, prefill=tokens, time_limit=5, deterministic=True
        ).plan
        assert check(plan, profile).valid
        chunks = [number for number, each in enumerate(plan.operations) if each.kind == PREFILL]
        assert len(chunks) == 2
        for number in chunks:
            for key in ("duration_ns", "acquire_bytes", "workspace_bytes"):
                chunk = plan.operations[number]
                changes: dict[str, Any] = {key: getattr(chunk, key) + 1}
                operations = (*plan.operations[:number], replace(chunk, **changes), *plan.operations[number + 1 :])
                found = check(plan.model_copy(update={"operations": operations}), profile).problems
                assert any(
                    each.place == f"operations[{chunk.id}].{key}" and "prefill rows give" in each.message
                    for each in found
                )


def test_a_chunk_takes_its_tokens_and_their_attention_to_all_before() -> None:
    profile = with_prompts(drawn_decoder(0, 1))
    stages = [[("embedding", 1)], [("layer0.attention", 1), ("layer0.ffn", 1), ("head", 1)]]
    whole = chunk_costs(profile, stages, 400, 400)
    assert whole == [ChunkCost(500 + 800, 64 * 400, 400), ChunkCost(3 * (500 + 800) + 1600, 0, 400)]
    last = chunk_costs(profile, stages, 400, 100)  # 400 * 400 / 100 less 300 * 300 / 100 before
    assert last == [ChunkCost(500 + 200, 64 * 100, 400), ChunkCost(3 * (500 + 200) + 700, 0, 400)]
    with pytest.raises(UsageError, match="--prefill 500 is not of prompts of 400 tokens"):
        chunk_costs(profile, stages, 400, 500)


@slow_but("groups, chunk", [(1, 10), (2, 100), (3, 400)], lambda case: case[0] > 1)
def test_prompts_join_in_chunks_or_whole(groups: int, chunk: int) -> None:
    """Beside one group they run in what its way round leaves idle; of many they add to the busiest device's work."""
    profile = with_prompts(drawn_decoder(2, 3))
    alone, joined = planned(profile, groups), planned(profile, groups, chunk_tokens=chunk, prompt_tokens=400)
    busy = [
        sum(each.duration_ns for each in joined.operations if joined.stages[each.stage].devices == (d,))
        for d in range(3)
    ]
    assert alone.token_ns is not None
    assert joined.token_ns == max(alone.token_ns, groups * max(busy))
    chunks = [each for each in joined.operations if each.kind == PREFILL]
    assert [each.attributes for each in chunks] == [{"stage": number, "tokens": chunk} for number in range(3)]
    assert f"{5}SEND_{PREFILL}0" in joined.programs[2]


# What is refused ----------------------------------------------------------------------------------------------------


def changed(plan: Plan, **changes: Any) -> Plan:
    return Plan.model_validate(plan.model_copy(update=changes).model_dump(), strict=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decode": None}, r"dependencies\[2\].later is for plans of decode steps"),
        ({"mode": "training"}, "plan's mode is training; decode steps are of"),
        ({"decode": Decode(batch=8, groups=9, context_tokens=1)}, "groups 9 are more than its batch of 8 requests"),
        ({"decode": Decode(batch=9, groups=2, context_tokens=1)}, "microbatch_size 3 is not that of the largest of 2"),
        ({"decode": Decode(batch=15, groups=5, context_tokens=1)}, "12 are no whole number of steps of 5 groups"),
        ({"decode": Decode(batch=8, groups=4, context_tokens=1), "microbatch_size": 2}, "12|size"),
    ],
)
def test_what_is_no_loop_of_decode_steps(changes: dict[str, Any], message: str) -> None:
    plan = planned(drawn_decoder(0, 3))
    with pytest.raises(ValueError, match=message):
        changed(plan, **changes)


def damaged_dependency(plan: Plan, **changes: Any) -> Plan:
    *others, back = plan.dependencies
    return plan.model_copy(update={"dependencies": (*others, replace(back, **changes))})


@pytest.mark.parametrize(
    ("damage", "rule", "message"),
    [
        (
            lambda plan: plan.model_copy(update={"dependencies": plan.dependencies[:-1]}),
            "dependencies",
            "0F begins a step",
        ),
        (lambda plan: damaged_dependency(plan, source="1F", hops=()), "dependencies", "is not the last of a step"),
        (lambda plan: damaged_dependency(plan, hops=()), "hops", "a hop is missing"),
        (
            lambda plan: damaged_dependency(plan, hops=(replace(plan.dependencies[-1].hops[0], latency_ns=10**6),)),
            "inputs",
            "0F3.*starts at|2F0 ends at",
        ),
    ],
)
def test_check_knows_what_returns(damage: Callable[[Plan], Plan], rule: str, message: str) -> None:
    report = check(damage(planned(drawn_decoder(0, 3))))
    assert any(each.rule == rule and re.search(message, str(each)) for each in report.problems), report.problems


def test_check_compares_steps_and_cache_with_the_profile() -> None:
    profile = drawn_decoder(0, 3)
    plan = planned(profile)
    assert check(plan, profile).valid
    first, *stages = plan.stages
    less = plan.model_copy(update={"stages": (first.with_cache(first.cached.total - 1), *stages)})
    assert any("tokens cache" in each.message for each in check(less, profile).problems)
    step, *steps = plan.operations
    quicker = plan.model_copy(update={"operations": (replace(step, duration_ns=step.duration_ns - 1), *steps)})
    assert any("decode rows give" in each.message for each in check(quicker, profile).problems)
    bytes_ = damaged_dependency(plan, hops=(replace(plan.dependencies[-1].hops[0], bytes=1),))
    assert any("tokens of 3 requests give 24" in each.message for each in check(bytes_, profile).problems)


# The flag -----------------------------------------------------------------------------------------------------------


def test_a_search_says_what_prompts_cost() -> None:
    profile = with_prompts(drawn_decoder(2, 3, shards=(1,)))
    asked: dict[str, Any] = {"devices": 2, "batch": 8, "context": 400, "time_limit": 5.0, "deterministic": True}
    alone, joined, whole = (face.search(profile, **asked, prefill=tokens) for tokens in (None, 100, "400"))
    assert alone.decode is not None
    assert "prefill_tokens" not in alone.decode.figures()
    for found, tokens in ((joined, 100), (whole, 400)):
        assert found.decode is not None
        assert found.plan.decode is not None
        assert found.plan.decode.prefill_tokens == found.decode.prefill_tokens == tokens
        assert found.decode.figures()["alone_token_ns"] == alone.decode.token_ns
        assert found.plan.token_ns == found.decode.token_ns
        assert check(found.plan, profile).valid
    assert alone.decode.token_ns <= joined.decode.token_ns < whole.decode.token_ns


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prefill": 500}, "prefill=?.?500 is not of prompts of 400 tokens"),
        ({"prefill": 5}, "prefill rows for contexts of 10, 100, 300, 400, not of 5"),
        ({"prefill": 100, "for_": "vllm"}, "is for plans of decode steps, and servers share caches"),
    ],
)
def test_prompts_that_cannot_join(asked: dict[str, Any], message: str) -> None:
    profile = with_prompts(drawn_decoder(2, 3, shards=(1,)))
    with pytest.raises(UsageError, match=message):
        face.search(profile, **({"devices": 2, "context": 400, "time_limit": 2.0} | asked))
    with pytest.raises(UsageError, match="has no prefill rows"):
        face.search(drawn_decoder(2, 3, shards=(1,)), devices=2, context=400, prefill=100, time_limit=2.0)
