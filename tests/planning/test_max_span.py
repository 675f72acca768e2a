"""``--max-span N``, Tessel's N_R: the plan's repetend reaches over at most so many micro-batches."""

from __future__ import annotations

from typing import Any

import pytest

from pipeplan.checker import check
from pipeplan.errors import UsageError
from pipeplan.examples import shape
from pipeplan.files import Plan
from pipeplan.planning.request import Request
from pipeplan.planning.steps import search_plan
from pipeplan.schedule.rules.language import named_rules
from pipeplan.simulator.simulation import simulate
from support.marks import always, slow_but


def planned(name: str, **others: Any) -> Plan:
    request = Request.of(shape(name, 4), num_microbatches=12, deterministic=True, time_limit=4.0, **others)
    plan = search_plan(request).plan
    assert check(plan, shape(name, 4)).problems == ()
    return plan


@pytest.mark.parametrize(("span", "period_ms"), [(1, 16), (2, 8), (4, 4), (7, 4)])
def test_the_repetend_reaches_no_further(span: int, period_ms: int) -> None:
    """Fig. 11: V's repetend of one micro-batch takes 16 ms, of two 8, and from four on it has no bubble."""
    plan = planned("v", max_span=span)
    assert plan.repetend is not None
    assert plan.repetend.span <= span
    assert (plan.repetend.unroll, plan.repetend.repetend_ns) == (1, period_ms * 1_000_000)
    assert plan.provenance is not None
    assert plan.provenance.options["max_span"] == span


@slow_but("name, span", [("m", 2), ("nn", 2), ("nn", 4)], lambda case: case[1] == 2, always)
def test_each_device_begins_it_at_a_moment_of_its_own(name: str, span: int) -> None:
    plan = planned(name, max_span=span)
    assert plan.repetend is not None
    assert plan.repetend.span <= span


def test_every_whole_repetition_is_kept() -> None:
    """Warmup and cooldown are of the micro-batches a repetend reaches over: with one, all run in turn."""
    assert planned("v", max_span=1).predicted.makespan_ns == 12 * 16_000_000


def test_it_can_be_repeated() -> None:
    plan = planned("v", max_span=2)
    assert simulate(plan, 40).rates.makespan_ns == plan.predicted.makespan_ns + 28 * 8_000_000


def test_unrolled() -> None:
    plan = planned("v", max_span=3, unroll=2)
    assert plan.repetend is not None
    assert (plan.repetend.unroll, plan.repetend.span <= 3) == (2, True)


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"scheduler": "1f1b"}, "--max-span 2 is for a search for a repetend, not for --scheduler 1f1b"),
        ({"scheduler": "rules", "rules": named_rules("1f1b")}, "not for --rules; leave one of them out"),
        ({"late_inputs": True}, "--max-span 2 needs actions that run whole, and --late-inputs yes has others"),
        ({"num_parted": 1}, "--max-span 2 needs actions that run whole, and --slices 1 has others"),
        ({"unroll": 3}, "--max-span 2 is less than --unroll 3, which every repetend reaches over; raise it"),
    ],
)
def test_what_has_no_such_repetend_is_refused(others: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Request.of(shape("v", 4), num_microbatches=12, max_span=2, **others)


def test_two_routes_have_none() -> None:
    with pytest.raises(UsageError, match="--max-span 2 is for plans with a repetend: of one route"):
        planned("v", max_span=2, placement="bidirectional")
