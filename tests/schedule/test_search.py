"""The anytime search: valid from the first moment, reproducible, interruptible, and honest about what is proved."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from builders.requests import request_of
from builders.shapes import shape_workload
from builders.towers import towers
from pipeplan.errors import InfeasibleError, SearchTimeoutError, UsageError
from pipeplan.examples import ShapeCosts, shape
from pipeplan.partition.placement import place_submodules
from pipeplan.planning.request import SUBMODULES, Batch, choose_placement, resolve_batch, submodules_of
from pipeplan.planning.steps import search_plan
from pipeplan.schedule import steps
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.rules import Rules
from pipeplan.schedule.rules.language import named_rules
from pipeplan.schedule.search import search_schedule
from pipeplan.schedule.state import Schedule, SearchState
from pipeplan.workload.memory import fits
from pipeplan.workload.one_microbatch import OneMicrobatch
from support.marks import always, slow_but

GB = 10**9


def require_sound(found: Schedule) -> None:
    assert found.bound_ns <= found.makespan_ns
    assert fits(found.graph, found.orders)


@slow_but(
    "name, memory",
    product(["v", "x", "m", "mllm", "nn", "k", "circular", "zbv"], [None, 3 * GB]),
    lambda case: case[1] is not None and case[0] not in ("x", "mllm", "nn"),
)
def test_every_shape_gets_a_schedule(name: str, memory: int | None) -> None:
    found = search_schedule(shape_workload(name, memory=memory), Budget(0.5, deterministic=True))
    require_sound(found)
    assert found.pattern is not None
    assert found.pattern.period >= found.period_bound_ns


@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_the_smallest_cases(num_devices: int, num_microbatches: int) -> None:
    found = search_schedule(shape_workload("v", num_devices, num_microbatches), Budget(5, deterministic=True))
    assert found.optimal


@slow_but("name", ["m", "mllm", "nn", "k"], lambda name: name in ("m", "k"), always)
def test_shapes_with_shared_blocks_repeat_on_many_devices(name: str) -> None:
    """GPipe is as short, with all micro-batches in flight; the least peak wins, and the plan is zero-bubble."""
    found = search_schedule(shape_workload(name, 32, 64), Budget(5, deterministic=True))
    assert found.optimal
    assert found.repeats
    assert found.scheduler == "repetend"
    assert found.most_bytes <= 48 * GB


def test_of_equals_the_one_with_less_memory_that_repeats_and_is_simple() -> None:
    """Orders of one workload, of equal length: each is better than the next by one thing alone."""
    workload = shape_workload("v", 2, 6)
    state = SearchState.of(OneMicrobatch.of(workload), Budget(1, deterministic=True), None)
    orders, gpipe = (CLASSIC[name].orders(state.problem, state.graph) for name in ("1f1b", "gpipe"))
    found = [
        state.candidate(orders, "1f1b", frozenset({0})),
        state.candidate(orders, "repetend", frozenset({0})),
        state.candidate(orders, "repetend+windows", frozenset({0})),
        state.candidate(orders, "1f1b"),
        state.candidate(gpipe, "gpipe", frozenset({0})),
        state.candidate(gpipe, "gpipe"),
    ]
    values = [each.value for each in found if each is not None]
    assert len({makespan for makespan, *_ in values}) == 1
    assert values == sorted(values)
    for each in reversed(found):
        state.offer(each)
        assert state.best is each


def test_no_time_still_gives_a_schedule() -> None:
    require_sound(search_schedule(shape_workload("m"), Budget(0, deterministic=True)))


def test_too_little_memory_is_infeasible_and_says_how_much() -> None:
    with pytest.raises(InfeasibleError, match="500MB too much; raise --memory"):
        search_schedule(shape_workload("v", memory=GB // 2), Budget(5, deterministic=True))


def test_branches_that_fit_only_one_after_the_other() -> None:
    """Both directions of X hold 1 GB each on every device: with room for one, one must be finished first."""
    require_sound(search_schedule(shape_workload("x", memory=GB), Budget(1, deterministic=True)))


def test_time_out_with_nothing_found_is_not_infeasible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "solve_pattern", lambda *_, **__: (None, None, None))
    with pytest.raises(SearchTimeoutError, match="raise --time-limit"):
        search_schedule(shape_workload("x", memory=GB), Budget(1, deterministic=True))


def test_same_seed_same_schedule() -> None:
    costs = ShapeCosts(100, None, 100, 100, comm_ns=10, activation_bytes=2 * GB, weight_grad_bytes=GB)
    workload = shape_workload("v", num_microbatches=6, memory=6 * GB, costs=costs, split=True)
    first, second = (search_schedule(workload, Budget(0.5, seed=7, deterministic=True)) for _ in range(2))
    assert first.orders == second.orders
    assert first.bound_ns == second.bound_ns


def test_interruption_between_solves_keeps_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(steps.RepetendSearch, "run", interrupt)
    found = search_schedule(shape_workload("m"), Budget(10, deterministic=True))
    assert found.interrupted
    require_sound(found)


def test_progress_never_gets_worse() -> None:
    heard: list[tuple[int, int, float]] = []
    costs = ShapeCosts(100, None, 100, 100, comm_ns=10, activation_bytes=2 * GB, weight_grad_bytes=GB)
    workload = shape_workload("v", num_microbatches=12, memory=6 * GB, costs=costs, split=True)
    found = search_schedule(
        workload,
        Budget(1, deterministic=True),
        progress=lambda _, best, bound, seconds: heard.append((best, bound, seconds)),
    )
    bests, bounds, seconds = zip(*heard, strict=True)
    assert list(bests) == sorted(bests, reverse=True)
    assert list(bounds) == sorted(bounds)
    assert list(seconds) == sorted(seconds)
    assert bests[-1] >= found.makespan_ns


@pytest.mark.parametrize(("num_microbatches", "memory", "best"), [(12, 8, 4020), (12, 4, 6380)])
def test_chains_with_little_memory(num_microbatches: int, memory: int, best: int) -> None:
    """Forward, input and weight gradient 100, communication 10, 4 devices; optima proved by a separate solve."""
    costs = ShapeCosts(100, None, 100, 100, comm_ns=10, activation_bytes=2 * GB, weight_grad_bytes=GB)
    workload = shape_workload("v", num_microbatches=num_microbatches, memory=memory * GB, costs=costs, split=True)
    found = search_schedule(workload, Budget(1, deterministic=True))
    require_sound(found)
    assert found.makespan_ns == best


def test_a_pattern_of_several_microbatches_where_memory_limits() -> None:
    workload = shape_workload("v", num_microbatches=24, memory=3 * GB)
    found = search_schedule(workload, Budget(4, deterministic=True))
    assert found.pattern is not None
    assert found.pattern.period * 3 == 16_000_000
    one = search_schedule(workload, Budget(1, deterministic=True), unroll=1)
    assert one.pattern is not None
    assert one.pattern.period == 8_000_000


def test_classic_schedulers_by_name() -> None:
    found = search_schedule(shape_workload("v"), Budget(5, deterministic=True), scheduler="gpipe")
    assert found.scheduler == "gpipe"
    with pytest.raises(UsageError, match="does not apply"):
        search_schedule(shape_workload("m"), Budget(5, deterministic=True), scheduler="1f1b")
    with pytest.raises(UsageError, match=r"did you mean zb-h2 or zb-h1 or zb-v\?"):
        search_schedule(shape_workload("m"), Budget(5, deterministic=True), scheduler="zb-h9")
    with pytest.raises(InfeasibleError, match="gpipe does not fit"):
        search_schedule(shape_workload("v", memory=4 * GB), Budget(5, deterministic=True), scheduler="gpipe")


class TestBatch:
    profile = shape("v", 4)

    @pytest.mark.parametrize(
        ("asked", "expected"),
        [
            ({}, Batch(16, 1)),
            ({"num_microbatches": 6}, Batch(6, 1)),
            ({"mini_batch": 24}, Batch(24, 1)),
            ({"mini_batch": 24, "num_microbatches": 6}, Batch(6, 4)),
            ({"mini_batch": 24, "microbatch_size": 4}, Batch(6, 4)),
            ({"mini_batch": 24, "microbatch_size": 4, "num_microbatches": 6}, Batch(6, 4)),
        ],
    )
    def test_any_two_give_the_third(self, asked: dict[str, int], expected: Batch) -> None:
        assert resolve_batch(self.profile, 4, **asked) == expected

    def test_contradictions(self) -> None:
        with pytest.raises(UsageError, match="is not --microbatches 5 x --microbatch-size 4 = 20"):
            resolve_batch(self.profile, 4, mini_batch=24, microbatch_size=4, num_microbatches=5)
        with pytest.raises(UsageError, match="choose --microbatches 4, or --mini-batch 20 or 25"):
            resolve_batch(self.profile, 4, mini_batch=24, num_microbatches=5)


class TestPlacementChoice:
    def test_the_profiles_own(self) -> None:
        profile = shape("m", 4)
        assert choose_placement(profile, "auto", None) == (profile.placement, 4)
        with pytest.raises(UsageError, match="--devices 8 contradicts the profile's placement, which is for 4"):
            choose_placement(profile, "auto", 8)

    def test_strategies(self) -> None:
        profile = shape("v", 4).model_copy(update={"placement": None})
        assert choose_placement(profile, "auto", 2) == ("auto", 2)
        assert choose_placement(profile, "circular", 2) == ("circular", 2)
        with pytest.raises(UsageError, match="give --devices or a --cluster"):
            choose_placement(profile, "auto", None)
        with pytest.raises(UsageError, match="neither a file nor a strategy; choose from auto"):
            choose_placement(profile, "zigzag", 2)

    @pytest.mark.parametrize(
        ("kind", "rules"),
        [
            *[("v", "1f1b"), ("mllm", "1f1b"), ("nn", "zb-h1"), ("k", "1f1b"), ("circular", "looped-bfs")],
            *[("zbv", "hanayo"), ("x", "chimera"), ("circular", "gpipe"), ("x", "1f1b+")],
        ],
    )
    def test_rules_keep_the_profiles_own_where_they_are_for_it(self, kind: str, rules: str) -> None:
        """Stages on all devices aside; rules without a placement are for any."""
        profile = shape(kind, 4)
        assert choose_placement(profile, "auto", None, named_rules(rules)) == (profile.placement, 4)
        with pytest.raises(UsageError, match="--devices 2 contradicts the profile's placement"):
            choose_placement(profile, "auto", 2, named_rules(rules))

    @pytest.mark.parametrize(
        ("kind", "rules"),
        [
            *[("circular", "1f1b"), ("v", "interleaved-1f1b"), ("zbv", "circular"), ("mllm", "hanayo")],
            *[("v", "chimera"), ("zbv", "chimera"), ("x", "hanayo"), ("x", "bitpipe"), ("m", "distmm-pipe")],
        ],
    )
    def test_rules_for_another_placement_than_the_profiles_own_are_refused(self, kind: str, rules: str) -> None:
        """As classic schedules are; --placement goes before both."""
        profile = shape(kind, 4)
        asked = named_rules("looped-bfs" if rules == "circular" else rules)
        with pytest.raises(UsageError, match=rf"rules '{asked.name}' are for stages that stand .*; (give|take)"):
            choose_placement(profile, "auto", None, asked)
        assert choose_placement(profile, "v-shape", None, asked) == ("v-shape", 4)

    def test_chunks_of_the_rules_are_of_their_placement(self) -> None:
        profile, rules = shape("circular", 4, chunks=2), Rules(name="three", placement="circular", chunks=3)
        with pytest.raises(UsageError, match="stand circular with 3 stages per device"):
            choose_placement(profile, "auto", None, rules)
        assert choose_placement(profile, "auto", None, rules.but(chunks=2))[0] is profile.placement

    def test_submodules_of_the_profiles_own(self) -> None:
        """Two towers and what joins them, on the devices that the rules would take or on others."""
        profile = towers((2,) * 8, (2,) * 8)
        rules = named_rules("distmm-pipe")
        placement = place_submodules(profile, submodules_of(rules, 4, 1), 4, microbatch_size=1)
        own = profile.model_copy(update={"placement": placement})
        assert choose_placement(own, "auto", None, rules)[0] is own.placement
        with pytest.raises(UsageError, match=r"each submodule on devices of its own.*take the placement out"):
            choose_placement(own, "auto", None, named_rules("clip-mixed"))

    def test_chunks_are_for_placements_to_be_made(self) -> None:
        """Neither for one that exists, nor for submodules, of which each has its own."""
        v, rules = shape("v", 4), {"scheduler": "rules", "rules": named_rules("clip-mixed")}
        assert v.placement is not None
        with pytest.raises(UsageError, match=r"--chunks 2 would do nothing: the placement .* leave --chunks out"):
            search_plan(request_of(v, v.placement, Batch(4, 1), chunks=2))
        with pytest.raises(UsageError, match="--chunks 2 would do nothing: the rules, which place submodules"):
            search_plan(
                request_of(towers((2,) * 8, (2,) * 8), SUBMODULES, Batch(4, 1), num_devices=4, chunks=2, **rules)
            )

    def test_shared_blocks_without_costs_of_their_own_are_spread(self) -> None:
        """Those of the shape have costs for 4 shards alone: strategies put them on all devices, or say why not."""
        profile = shape("mllm", 4)
        assert profile.placement is not None
        options = {"scheduler": "gpipe", "time_limit": 1, "deterministic": True}
        result = search_plan(request_of(profile, "one-to-one", Batch(4, 1), num_devices=4, **options))
        assert [stage.devices for stage in result.plan.stages] == [stage.devices for stage in profile.placement.stages]
        with pytest.raises(UsageError, match=r"block 'embedding' .* costs for 4 shards, but .* needs 1;"):
            search_plan(request_of(profile, "one-to-one", Batch(4, 1), num_devices=4, **(options | {"spread": False})))


def test_recomputation_is_chosen_only_where_memory_asks_for_it() -> None:
    profile = shape("v", 4)
    assert profile.placement is not None
    options = {"time_limit": 1, "deterministic": True}
    roomy = search_plan(request_of(profile, profile.placement, Batch(8, 1), memory_bytes=4 * GB, **options))
    assert not any(stage.recompute for stage in roomy.plan.stages)
    forced = search_plan(request_of(profile, profile.placement, Batch(8, 1), **(options | {"recompute": True})))
    assert all(stage.recompute for stage in forced.plan.stages)
    assert forced.plan.predicted.makespan_ns > roomy.plan.predicted.makespan_ns


def test_where_the_best_is_proved_and_repeats_no_other_is_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 256 devices that took 8 s of MLLM."""

    def looked_through(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(steps, "find_repetend", looked_through)
    workload = shape_workload("mllm", 4, 8, costs=ShapeCosts(1, 3, shared_forward_ns=1, shared_backward_ns=1))
    few = [replace(step, many=0) if isinstance(step, steps.AdoptedRepetitions) else step for step in steps.STEPS]
    found = search_schedule(workload, Budget(1, deterministic=True), steps=few)
    assert found.optimal
    assert found.repeats
    assert found.notes == ()
