"""State that replicas divide (ZeRO 1 to 3): equal to an unsplit run, and as many bytes as the plan says."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from builders.sharded import pairs
from pipeplan.checker import check
from pipeplan.files import PlacedStage
from pipeplan.planning.candidates import UNDIVIDED
from pipeplan.runtime.models.load import load_model
from pipeplan.workload.action import Action
from pipeplan.workload.kinds import GRADIENT_ROLES, GRADIENTS, OPTIMIZER, PARAMETERS
from runtime_support.plans import TRAINING, Case, Reports, assert_as_unsplit, reports_of
from runtime_support.sharded_plans import FLOAT32, halves, one_stage, planned_bytes, profile_by, sharded_plan
from support.marks import always, asked_for, slow_but

TIED, TINY = "runtime_support.models:chain", "gpt2-tiny"
CHAIN, BRANCHES = "runtime_support.models:untied_chain", "runtime_support.models:untied_branches"
TOWERS = "runtime_support.models:pairing"

ACTIONS: dict[int, dict[str, Any]] = {2: {"reduce_every": 2}, 3: {"reduce_every": 3, "unshard_every": 2}}
"""[level] how often actions exchange: not as often as there are micro-batches, nor evenly."""


def _two_stages_on_all() -> list[PlacedStage]:
    """Both stages on the same devices, in turn."""
    return [
        stage.model_copy(update={"devices": (1, 0, 3, 2), "replicas": 4}) for stage in halves(CHAIN, 3, **ACTIONS[3])
    ]


def _unlike() -> list[PlacedStage]:
    """What is tied is divided by only one of the stages that have it."""
    first, second = halves(TINY, 1)
    return [first, second.model_copy(update={"zero": 0})]


MOST_UNEVEN = 5 * 8 * 2 * 8
"""Bytes of a row of each of five tables: of the optimizer two numbers of 8 bytes for each of 8 columns."""

Asked = tuple[str, list[PlacedStage], bool, bool]
"""Model, stages, and whether backward is split, and blocks are recomputed."""


def _asked() -> dict[str, Asked]:
    """Each level, with exchanges inside of actions and by them, full and split backward."""
    found: dict[str, Asked] = {}
    for level in (1, 2, 3):
        for split in (False, True):
            how = " split" * split
            found[f"zero {level}{how}"] = CHAIN, halves(CHAIN, level), split, False
            if level > 1:
                found[f"zero {level} by actions{how}"] = CHAIN, halves(CHAIN, level, **ACTIONS[level]), split, False
        found[f"zero {level} groups"] = CHAIN, one_stage(CHAIN, level, zero_group=2), level == 2, False
        found[f"zero {level} shards"] = TOWERS, one_stage(TOWERS, level, shards=2), level == 2, False
    return found | {
        "zero 1 tied": (TINY, halves(TINY, 1), True, False),
        "zero 1 tied once": (TIED, one_stage(TIED, 1), False, False),
        "zero 1 tied unlike": (TINY, _unlike(), True, False),
        "zero 3 branches": (BRANCHES, halves(BRANCHES, 3), True, True),
        "zero 3 branches by actions": (BRANCHES, one_stage(BRANCHES, 3, **ACTIONS[3]), False, True),
        "zero 3 two stages by actions": (CHAIN, _two_stages_on_all(), False, False),
    }


@functools.cache
def cases() -> dict[str, Case]:
    """Plans, and how they train."""
    return {
        name: (sharded_plan(model, own, split=split, recompute=recompute), replace(TRAINING, model=model))
        for name, (model, own, split, recompute) in _asked().items()
    }


NAMES = list(_asked())


@functools.cache
def bucketed() -> dict[str, Case]:
    """Plans in which each block's gradients are summed while those of blocks before it are made."""
    asked = {
        f"buckets{' zero 1' * level}{how}": (model, stages, "split" in how)
        for level in (0, 1)
        for how, model, stages in (
            ("", CHAIN, halves(CHAIN, level)),
            (" split", CHAIN, halves(CHAIN, level)),
            (" shards", TOWERS, one_stage(TOWERS, level, shards=2)),
            (" tied", TINY, halves(TINY, level)),
            (" two stages split", CHAIN, [each.model_copy(update={"zero": level}) for each in _undivided()]),
        )
    }
    with mock.patch("pipeplan.costs.buckets.BUCKET_BYTES", 1):
        return {
            name: (sharded_plan(model, own, split=split), replace(TRAINING, model=model))
            for name, (model, own, split) in asked.items()
        }


def _undivided() -> list[PlacedStage]:
    return [stage.model_copy(update=UNDIVIDED) for stage in _two_stages_on_all()]


HOW = ("", " split", " shards", " tied", " two stages split")
BUCKETED = [f"buckets{level}{how}" for level in ("", " zero 1") for how in HOW]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> Reports:
    """[case][rank] what 4 real processes report, started once for all cases."""
    return reports_of(asked_for(request, cases() | bucketed()))


QUICK = (
    *("zero 1", "zero 1 tied unlike", "zero 2 by actions split", "zero 3 by actions", "zero 3 shards"),
    "buckets zero 1 tied",
)
"""The others are long: what these show, by the other levels and with the other backward."""


def each_of(names: Iterable[str]) -> pytest.MarkDecorator:
    """A test of the cases of some names."""
    return slow_but("name", names, QUICK.__contains__, always)


@each_of([*NAMES, *BUCKETED])
def test_equals_an_unsplit_run(name: str, reports: Reports) -> None:
    _, options = (cases() | bucketed())[name]
    assert_as_unsplit(load_model(options.model), options, reports[name])


@each_of(BUCKETED)
def test_sums_begin_inside_of_the_last_action(name: str, reports: Reports) -> None:
    """Each bucket's, in every step: in the last action that adds to its stage's gradients, the first before its end."""
    plan, options = bucketed()[name]
    assert all(len(stage.buckets) > 1 for stage in plan.stages)
    for rank, report in reports[name].items():
        adds = [text for text in plan.programs[rank] if Action.parse(text).role in GRADIENT_ROLES]
        last = {Action.parse(text).stage: text for text in adds}
        begun = Counter(text for text, _ in report["begun"])
        early = Counter(text for text, more in report["begun"] if more)
        assert set(begun) == set(last.values()), rank
        for stage, text in last.items():
            assert 1 < begun[text] // options.num_steps <= 2 * len(plan.stages[stage].blocks)
            assert begun[text] % options.num_steps == early[text] % options.num_steps == 0
            assert early[text] > 0, "or sums overlap nothing"


@each_of(name for name in NAMES if "once" not in name)
def test_ranks_hold_what_the_plan_says(name: str, reports: Reports) -> None:
    """To the byte, in float64, where the plan is of float32: twice as many.

    But where a parameter gets no gradient. Of devices that split blocks some have a row more than others of a table of
    11 words, or of 3 places: of these plans have an even part, so that all of them together have what the plan says.
    """
    plan, _ = cases()[name]
    found = reports[name]
    for rank in found:
        own = [stage for stage in plan.stages if rank in stage.devices]
        together = own[0].devices if any(stage.shards > 1 for stage in own) else (rank,)
        for kind in (PARAMETERS, GRADIENTS, OPTIMIZER):
            planned = sum(stage.state[kind] for stage in own)
            planned -= sum(each.state[kind] * (sum(rank in on for on in each.devices) - 1) for each in plan.tied if own)
            held = [found[device]["held"][kind.key] for device in together]
            assert sum(held) == 2 * planned * len(held), (rank, kind.key)
            assert max(held) - min(held) <= MOST_UNEVEN * (len(held) - 1), (rank, kind.key)


UNEVEN = ("shards", "tied once")
"""Plans of parameters whose rows ranks cannot divide evenly: they send as if each had the most."""


@each_of([*NAMES, *BUCKETED])
def test_ranks_move_what_the_plan_says(name: str, reports: Reports) -> None:
    """Gradients and updated parameters of all steps, to the byte, in float64, where the plan is of float32."""
    plan, options = (cases() | bucketed())[name]
    for rank, planned in enumerate(planned_bytes(plan, profile_by(options.model, FLOAT32))):
        moved = sum(reports[name][rank]["moved"].values())
        share = 0.035 if any(each in name for each in UNEVEN) else 0
        assert moved > 0
        assert moved == pytest.approx(2 * options.num_steps * planned, rel=share, abs=0.5), rank


def test_check_accepts_them_and_exchanges_are_in_their_programs() -> None:
    for name, (plan, options) in cases().items():
        profile = profile_by(options.model, FLOAT32)
        check(plan, profile, pairs(len(plan.devices))).require(name)
        found = {text.lstrip("0123456789") for program in plan.programs for text in program}
        by_actions = {"REDUCE_GRAD"} if "zero 2" in name else {"UNSHARD", "RESHARD", "REDUCE_GRAD"}
        assert (by_actions <= {text.split(".")[0] for text in found}) == ("by actions" in name)
