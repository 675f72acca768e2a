"""Submodules with micro-batches of their own: stages have them, the joint waits for samples, bounds hold for them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.requests import request_of
from builders.towers import towers
from pipeplan.checker import check
from pipeplan.errors import UsageError
from pipeplan.files import CostRow, Plan, Profile
from pipeplan.partition.placement import Submodule, place_submodules
from pipeplan.planning.bounds import request_bound
from pipeplan.planning.request import SUBMODULES, Batch, choose_placement
from pipeplan.planning.steps import search_plan
from pipeplan.schedule.rules import CustomOp, Rules, SubmoduleRules
from support.marks import some_of

BATCH = Batch(8, 2)


def sized(times: dict[int, int], profile: Profile | None = None) -> Profile:
    """Two towers of four blocks, and a loss, whose forwards take ``times`` [samples] ns and hold 2 bytes a sample."""
    rows = tuple(
        CostRow(
            microbatch_size=size,
            forward_ns=time,
            backward_ns=2 * time,
            input_grad_ns=time,
            weight_grad_ns=time,
            activation_bytes=2 * size,
        )
        for size, time in times.items()
    )
    own = profile or towers((1,) * 4, (1,) * 4)
    return own.model_copy(update={"blocks": tuple(each.model_copy(update={"costs": rows}) for each in own.blocks)})


def rules_of(image: int | str | None = None, text: int | str | None = None, **others: object) -> Rules:
    one = {"placement": "one-to-one", "in_flight": 8}
    both = (("image.*", image), ("text.*", text))
    submodules = tuple(SubmoduleRules(blocks=name, microbatch_size=size, **one) for name, size in both)
    return Rules(submodules=submodules, **others)


def planned(
    rules: Rules,
    batch: Batch = BATCH,
    times: dict[int, int] | None = None,
    num_devices: int = 4,
    **others: object,
) -> Plan:
    profile = sized(times or dict.fromkeys((1, 2, 4), 10))
    request = request_of(
        profile,
        SUBMODULES,
        batch,
        num_devices=num_devices,
        split_backward=False,
        scheduler="rules",
        rules=rules,
        **others,
    )
    result = search_plan(request)
    assert check(result.plan, profile).problems == ()
    assert result.lower_bound_ns <= result.plan.predicted.iteration_ns
    return result.plan


def sizes_of(plan: Plan) -> dict[str, set[int]]:
    """{submodule, or block behind them: micro-batch sizes of its stages}"""
    found: dict[str, set[int]] = {}
    for stage in (each for each in plan.stages if each.blocks):
        found.setdefault(stage.blocks[0].partition(".")[0], set()).add(stage.microbatch_size)
    return found


@pytest.mark.parametrize(
    ("image", "text", "expected"),
    [
        (None, None, {"image": {2}, "text": {2}, "contrast": {2}}),
        (1, 4, {"image": {1}, "text": {4}, "contrast": {2}}),
        ("b // 2", "2 * b", {"image": {1}, "text": {4}, "contrast": {2}}),
        (None, "min(b, 1)", {"image": {2}, "text": {1}, "contrast": {2}}),
    ],
)
def test_stages_have_the_sizes_of_their_submodule(
    image: int | str | None, text: int | str | None, expected: dict[str, set[int]]
) -> None:
    assert sizes_of(planned(rules_of(image, text))) == expected


def test_of_a_large_request_they_are_placed_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layouts are sorted by what is written of them, which strategies say and submodules do not."""
    monkeypatch.setattr("pipeplan.planning.candidates.is_large", lambda _: True)
    assert sizes_of(planned(rules_of(1, 4))) == {"image": {1}, "text": {4}, "contrast": {2}}


@pytest.mark.parametrize(("image", "text"), [(1, 4), (4, 1), (2, 4), (None, 4), (1, 1)])
def test_the_joint_waits_for_the_samples_it_takes(image: int | None, text: int | None) -> None:
    """The loss of some samples starts when both towers have made them, and no tower's backward before their losses."""
    plan = planned(rules_of(image, text))
    stage_of = {block: number for number, stage in enumerate(plan.stages) for block in stage.blocks}
    size = [stage.microbatch_size for stage in plan.stages]
    loss, starts = stage_of["contrast"], plan.starts_ns
    lasts = {each.id: each.duration_ns for each in plan.operations}
    for sample in range(plan.mini_batch):
        here = sample // size[loss]
        for tower in (stage_of["image.3"], stage_of["text.3"]):
            own = sample // size[tower]
            assert starts[f"{loss}F"][here] >= starts[f"{tower}F"][own] + lasts[f"{tower}F"]
            assert starts[f"{tower}B"][own] >= starts[f"{loss}B"][here] + lasts[f"{loss}B"]


def test_devices_are_shared_out_by_work_per_sample() -> None:
    """A micro-batch takes 10 ns whatever its size: images of one sample have four times the work of texts of four."""
    plan = planned(rules_of(1, 4), Batch(8, 4), num_devices=5)
    devices = {stage.blocks[0].partition(".")[0]: stage.devices for stage in plan.stages}
    assert [sum(stage.blocks[0].startswith(name) for stage in plan.stages) for name in ("image", "text")] == [4, 1]
    assert devices["contrast"] == devices["text"]


def test_memory_is_that_of_their_sizes() -> None:
    """Two micro-batches of four texts, each held by four blocks in 2 bytes, and beside them a loss of four samples."""
    plan = planned(rules_of(1, 4, time="true"), Batch(2, 4))
    held = {stage.blocks[0].partition(".")[0]: plan.predicted.memory[stage.devices[0]] for stage in plan.stages}
    assert held["text"].peak_bytes == 2 * (4 * 4 * 2) + 2 * 4


@settings(max_examples=some_of(40), deadline=None)
@given(st.integers(0, 1 << 20), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_bounds_hold_for_their_sizes(seed: int, image: int, text: int, size: int) -> None:
    """Larger ones take less per sample, so that the plan's own size would bound too high (``planned`` compares)."""
    draw = random.Random(seed)
    times = {1: draw.randint(4, 9), 2: draw.randint(5, 14), 4: draw.randint(6, 25)}
    assert sizes_of(planned(rules_of(image, text), Batch(8 // size, size), times, num_devices=2))["text"] == {text}


def test_a_larger_size_is_not_above_the_bound_of_the_plans() -> None:
    """All in one micro-batch of four: a quarter of what four of one sample take."""
    one = planned(rules_of(1, 1), Batch(4, 1), num_devices=2).predicted
    four = planned(rules_of(4, 4), Batch(4, 1), num_devices=2).predicted
    assert four.iteration_ns < one.lower_bound_ns


def test_the_bound_of_a_request_counts_their_sizes() -> None:
    """Eight samples, two towers of four blocks and a loss, 30 ns each way: 16 micro-batches for a tower of 4 are 2."""
    profile = sized(dict.fromkeys((1, 2, 4), 10))
    bounds = []
    for size in (1, 4):
        how = {"scheduler": "rules", "rules": rules_of(size, size), "split_backward": False}
        bounds.append(request_bound(request_of(profile, SUBMODULES, Batch(8, 1), num_devices=2, **how)))
    assert bounds == [(8 * 8 + 8) * 30 // 2, (2 * 8 + 8) * 30 // 2]


@pytest.mark.parametrize("devices", ["before", ()])
def test_what_synchronises_them_counts_the_plans_micro_batches(devices: str | tuple[()]) -> None:
    gather = CustomOp("GATHER", after=("image.*", "text.*"), before="contrast", devices=devices, duration_ns=5)
    plan = planned(rules_of(1, 4, instructions=(gather,)))
    assert sizes_of(plan)["contrast"] == {2}
    (kind,) = [each for each in plan.operations if each.kind == "GATHER"]
    assert plan.num_instances(kind.id) == 8


def test_replicas_share_them() -> None:
    plan = planned(rules_of(2, 4), Batch(8, 2), replicas=2)
    assert sizes_of(plan) == {"image": {2}, "text": {4}, "contrast": {2}}
    assert {stage.replicas for stage in plan.stages} == {2}


@pytest.mark.parametrize(
    ("image", "others", "why"),
    [
        ("b - 2", {}, r"microbatch_size of submodule 'image\.\*' = 'b - 2' is 0 where b = 2; it must be at least 1"),
        (3, {}, "stages of 3 samples.*mini-batch of 16|16.*3"),
        (1, {"replicas": 2}, r"'image\.\*': micro-batches of 1 samples cannot be shared by 2 replicas"),
        (8, {}, "has costs for micro-batches of 1, 2, 4 samples per replica, not for 8"),
    ],
)
def test_sizes_that_cannot_be_are_refused(image: int | str, others: dict[str, object], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        planned(rules_of(image), **others)


def test_a_placement_that_is_there_says_them() -> None:
    """Rules with sizes are for stages that have them; a text is for any."""
    profile, text = sized(dict.fromkeys((1, 2, 4), 10)), Submodule("text.*", microbatch_size=4)
    for size, others, good in ((1, text, True), (None, text, False), (2, text, False)):
        towers_ = [Submodule("image.*", microbatch_size=size), others]
        placement = place_submodules(profile, towers_, 4, microbatch_size=2)
        own = profile.model_copy(update={"placement": placement})
        for rules in (rules_of(1, 4), rules_of("b // 2", "2 * b")):
            if good or (size and rules.submodules[0].microbatch_size != 1):
                assert choose_placement(own, "auto", None, rules)[0] is own.placement
            else:
                with pytest.raises(UsageError, match="with micro-batches of their own"):
                    choose_placement(own, "auto", None, rules)


def test_a_cut_holds_what_their_sizes_take() -> None:
    """A first block that holds 12 bytes a sample leaves no room for another beside four samples, and one for one."""
    profile = sized(dict.fromkeys((1, 4), 10))
    first, *others = profile.blocks
    assert first.id == "image.0"
    rows = tuple(row.model_copy(update={"activation_bytes": 12 * row.microbatch_size}) for row in first.costs)
    blocks = (first.model_copy(update={"costs": rows}), *others)
    uneven = profile.model_copy(update={"blocks": blocks})

    def firsts(size: int | None) -> tuple[str, ...]:
        image = Submodule("image.*", positions=(0, 2), microbatch_size=size)
        both = (image, Submodule("text.*", positions=(2, 4)))
        memory = [50, 50, None, None]
        placed = place_submodules(uneven, both, 4, microbatch_size=1, memory_bytes=memory)
        return next(stage.blocks for stage in placed.stages if "image.0" in stage.blocks)

    assert firsts(None) == ("image.0", "image.1")
    assert firsts(4) == ("image.0",)
