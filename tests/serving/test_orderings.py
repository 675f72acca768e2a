"""``benchmarks/cache_orderings.py``: what the text says of Figs. 4.2 to 4.5 as checks that can turn out either way."""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Callable

import pytest

from pipeplan.errors import InfeasibleError
from pipeplan.serving.course import ServingResult
from pipeplan.serving.steps import DecodeTime, engine_constants
from support.paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import cache_orderings
from cache_parallelism import LENGTHS, SIDES, Case, Side, Texts

COUNTED = {"communication: tp sends more than cp, as printed", "communication: the same, counted alike"}
"""Of formulas alone."""


def made_up(seed: int) -> Callable[[Side, Case], ServingResult]:
    """Sides that are better or worse than each other in each quantity, with short texts and long ones apart."""
    draw = random.Random(seed)
    worse = {
        (side, quantity, short): draw.choice([1.0, 1.03, 1.06, 2.0, 3.0])
        for side in SIDES
        for quantity in ("compute", "communication", "host", "waits", "evicts")
        for short in (False, True)
    }
    grows, evicts = draw.choice([1.0, 1.5, 4.0]), draw.choice([0, 1])

    def serve(side: Side, case: Case) -> ServingResult:
        def of(quantity: str) -> float:
            return worse[side, quantity, case.tokens == LENGTHS[0]]

        most = case.most or 128
        busy = DecodeTime(1000 * of("compute"), 1000 * of("communication"), 1000 * of("host"))
        waited = 1000 * (of("waits") - 1)
        end = (busy.total_ns + waited) * (most / 32) ** (grows - 1)
        return ServingResult(100, end, busy, 0.0, 10, int(evicts * of("evicts") * most), waited)

    return serve


def test_every_ordering_could_fail_and_could_hold() -> None:
    """Each of the text is found in some worlds and not in others; where all sides are the same no side is better."""
    found = defaultdict[str, set[bool]](set)
    for seed in range(400):
        serve = made_up(seed)
        for each in cache_orderings.orderings():
            found[each.says].add(each.holds(serve))
    assert {says for says, seen in found.items() if len(seen) == 1} == COUNTED

    def same(side: Side, case: Case) -> ServingResult:
        return ServingResult(100, 4000.0, DecodeTime(1000, 1000, 1000), 0.0, 10, 7, 1000.0)

    holding = {each.says for each in cache_orderings.orderings() if each.says not in COUNTED and each.holds(same)}
    assert all("within a tenth" in says for says in holding)


def test_what_sends_more_is_counted() -> None:
    """As the text prints it tensor parallelism sends more; by one convention for both it sends less."""
    found = {each.says: each.holds(made_up(0)) for each in cache_orderings.orderings() if each.says in COUNTED}
    assert [found[says] for says in sorted(COUNTED)] == [False, True]


@pytest.mark.parametrize(
    ("says", "constant"), [("communication: tp longer than cp", "step_ns"), ("host: tp longer than cp", "table_ns")]
)
def test_an_ordering_goes_where_its_reason_goes(says: str, constant: str) -> None:
    """Without the time of a collective's steps, or of the table's entries, what the text finds is not so."""
    ordering = next(each for each in cache_orderings.orderings() if each.says == says)
    constants = engine_constants()
    assert ordering.holds(cache_orderings.at(constants))
    assert not ordering.holds(cache_orderings.at(cache_orderings.varied(constants, constant, 0.0)))


def test_a_whole_model_is_said_where_there_is_room() -> None:
    """A side without room is behind, or its cases are left out; nothing is said where nobody has any."""

    def serve(side: Side, case: Case) -> ServingResult:
        if case.tokens > rooms[side]:
            raise InfeasibleError(f"{case.tokens} tokens do not fit")
        return made_up(0)(side, case)

    found = {each.says: each for each in cache_orderings.orderings()}
    above, waits = found["prefix of 50,000 and more: cp above dp"], found["host: tp longer than cp"]
    rooms = {"cp": 75_000, "tp": 10_000, "dp": 10_000}
    assert cache_orderings.whole(above, serve) == "yes (no room for cp from 100,000, dp from 50,000)"
    assert cache_orderings.whole(waits, serve).endswith(" (no room for tp from 50,000, cp from 100,000)")
    rooms |= {"cp": 10_000, "dp": 100_000}
    assert cache_orderings.whole(above, serve) == "no (no room for cp from 50,000)"
    rooms |= {"cp": 0, "dp": 0, "tp": 0}
    assert {cache_orderings.whole(each, serve) for each in (above, waits)} == {"no room for anybody"}
    rooms["tp"] = 100_000
    assert cache_orderings.whole(waits, serve) == "no room for cp from 10,000"


def test_lengths_are_as_the_constants_say() -> None:
    """Without a spread all are as long as the mean; a request more for each that the batch has room for is a round."""
    usual = Texts.usual()
    case = Case("decode", 10_000, 32)
    assert len({*usual.requests(case)}) > len([*usual.requests(case)]) / 2
    assert {each.new_tokens for each in usual._replace(spread=0).requests(case)} == {10_000}
    assert len([*usual._replace(rounds=3).requests(case)]) == 96
    assert {each.prefix_tokens for each in usual._replace(prompt=7).requests(case)} == {7}
    assert usual.batch(Case("prefix", 10_000, None)) == usual.most


def test_ranges_are_runs_of_factors() -> None:
    assert cache_orderings.words({0: True, 0.0625: True, 1: False, 4: True}) == "0 to 1/16, 4"
    assert cache_orderings.words({1: False}) == "none"
    assert cache_orderings.words({1: True, 4: True}) == "all"
    assert {"table_ns", "attention", "heads", "launch_ns", *Texts._fields} < {*cache_orderings.ranges()}
