"""The table of uniform layouts looks at what is alike once: each row is what it is where it is alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from builders.profiles import joined
from builders.requests import request_of
from pipeplan.files import Block, Cluster, CostRow
from pipeplan.planning import candidates, uniform_space
from pipeplan.planning.candidates import uniform_choices
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.uniform_space import Blocks, BoundedChoice, Choice, best_first
from pipeplan.search_constants import ROOMY


def block(index: int) -> Block:
    """One that takes more than those before it, with rows that recompute, and less than half of them split."""
    size = 100_000 * (5 + index)
    rows = []
    for samples, shards, context, again in itertools.product((1, 2), (1, 2), (1, 2), (False, True)):
        part = size * samples // (shards * context) + 70 * index
        row: dict[str, Any] = {"forward_ns": part, "backward_ns": 2 * part + again * part, "input_grad_ns": part}
        row |= {"weight_grad_ns": part, "activation_bytes": (1 if again else 6) * part // 100, "recompute": again}
        rows.append(CostRow(microbatch_size=samples, shards=shards, context=context, **row))
    return Block(id=f"b{index}", operator="layer", parameter_bytes=200_000 + 10_000 * index, costs=tuple(rows))


CHAIN = joined([block(index) for index in range(6)])
PAIRS = Cluster.of("pairs", 8, levels=[("pair", 2, "1us", "90GB"), ("net", 8, "10us", "5GB")])


def asked(scheduler: str, memory: int | None, cluster: Cluster = PAIRS) -> Request:
    how: dict[str, Any] = {"cluster": cluster, "scheduler": scheduler, "memory_bytes": memory, "sizes": (1, 2, 4)}
    return request_of(CHAIN, "auto", Batch(16, 1), 8, time_limit=1.0, deterministic=True, **how).levelled


def table_of(request: Request, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Choice], Blocks]:
    """The choices of which the request has a table, and the blocks it is made with."""
    given = list[tuple[list[Choice], Blocks]]()

    def kept(request: Request, choices: list[Choice], blocks: Blocks) -> list[BoundedChoice]:
        given.append((choices, blocks))
        return best_first(request, choices, blocks)

    monkeypatch.setattr(candidates, "best_first", kept)
    candidates._uniform_of.cache_clear()
    uniform_choices(request)
    candidates._uniform_of.cache_clear()
    return given[0]


def alone(request: Request, choices: Sequence[Choice], blocks: Blocks) -> list[BoundedChoice]:
    return [row for choice in choices for row in best_first(request, [choice], blocks)]


def in_order(rows: Sequence[BoundedChoice], choices: Sequence[Choice]) -> list[BoundedChoice]:
    """By whether there is the same with more positions, and by how long they take, where all fit."""
    longest: dict[Choice, int] = {}
    for each in choices:
        like = replace(each, positions=None)
        longest[like] = max(longest.get(like, 0), each.positions or 0)

    def key(row: BoundedChoice) -> tuple[bool, float]:
        choice = replace(row.choice, usual=None)
        return (choice.positions or 0) < longest[replace(choice, positions=None)], row.usual_ns

    return sorted(rows, key=key)


def layouts(devices: int, node: int, blocks: int, mini_batch: int) -> Iterator[tuple[Any, ...]]:
    """By loops over every size: (tp, cp, dp, pp, strategy, stages per position, samples, ZeRO level, its group)."""
    every = range(1, devices + 1)
    for tp, cp, dp, pp, samples in itertools.product((1, 2), (1, 2), every, every, (1, 2)):
        if tp * cp * dp * pp > devices or mini_batch % (samples * dp) or pp > blocks:
            continue
        if tp * cp > node:
            continue  # the profile does not say what those that share a block send each other
        shared = [(0, 1)]
        if dp * cp > 1:
            groups = {dp * cp, math.gcd(dp * cp, node // tp)} - {1}
            shared += [(1, dp * cp), *itertools.product((2, 3), groups)]
        stages = [("one-to-one", 1)]
        if pp > 1:
            even = mini_batch // (samples * dp) % 2 == 0
            stages += [("circular", vp) for vp in (2, 3, 4, 5, 6) if vp * pp <= blocks]
            stages += [("v-shape", 2)] * (2 * pp <= blocks)
            stages += [("bidirectional", 1)] * even
            stages += [("bidirectional-v-shape", 2)] * (even and 2 * pp <= blocks)
        for strategy, zero in itertools.product(stages, shared):
            yield tp, cp, dp, pp, *strategy, samples, *zero


def test_the_table_has_every_layout_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    choices, _ = table_of(asked("auto", None), monkeypatch)
    found = [
        (
            *(each.shards, each.context, each.replicas, each.positions, each.strategy, each.per_position),
            *(each.batch.microbatch_size // each.replicas, each.zero.level, each.zero.group),
        )
        for each in choices
    ]
    expected = list(layouts(8, 2, 6, 16))
    assert len(expected) == len(set(expected)) == len(set(found))
    assert set(found) == set(expected)


@pytest.mark.parametrize("memory", [None, 1_200_000])
@pytest.mark.parametrize("scheduler", ["auto", "1f1b"])
def test_rows_are_what_they_are_alone(memory: int | None, scheduler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    request = asked(scheduler, memory)
    choices, blocks = table_of(request, monkeypatch)
    some = choices[::5] if scheduler == "auto" else choices[::7]
    rows, found = alone(request, some, blocks), best_first(request, some, blocks)
    assert len(found) > 40
    if memory is None:
        assert found == in_order(rows, some)
    assert sorted(map(repr, found)) == sorted(map(repr, rows))
    assert len({row.choice.layout for row in found}) < len(found)


def test_rows_of_unlike_devices_are_what_they_are_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = PAIRS.devices[0]
    kinds = [
        kind.model_copy(update={"count": 4, "name": name, "speed": speed}) for name, speed in (("a", 1.0), ("b", 0.7))
    ]
    request = asked("auto", None, PAIRS.model_copy(update={"devices": tuple(kinds)}))
    choices, blocks = table_of(request, monkeypatch)
    some = choices[::9]
    assert {each.backwards for each in some} == {False, True}
    assert best_first(request, some, blocks) == in_order(alone(request, some, blocks), some)


@pytest.mark.parametrize("memory", [None, 1_200_000])
def test_the_worse_exchange_of_two_is_left_out(memory: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By every two rows that differ in it alone; here those around a ring hold more, and some take less."""
    request = asked("1f1b", memory)
    choices, blocks = table_of(request, monkeypatch)
    choices = [each for each in choices if each.context > 1][::5]
    pairs = [*choices, *(replace(each, exchange="ring") for each in choices[::-2])]
    sums = uniform_space._Sums.of

    def other(request: Request, blocks: Blocks, pricing: Any, levels: Any = ()) -> Any:
        found = sums(request, blocks, pricing, levels)
        if found is None or pricing.exchange is None:
            return found
        parts = 10 if pricing.samples == 2 else 7  # of some alone what is held differs
        return replace(found, sums_ns=found.sums_ns * parts // 10, activation_bytes=found.activation_bytes * 2)

    monkeypatch.setattr(uniform_space._Sums, "of", other)
    rows = alone(request, pairs, blocks)
    beaten = set()
    room = float("inf") if memory is None else ROOMY * memory
    for one, row in itertools.permutations(rows, 2):
        alike = replace(one.choice, exchange=None) == replace(row.choice, exchange=None)
        if alike and one.choice.exchange != row.choice.exchange:
            better = (one.least_ns, one.usual_bytes), (row.least_ns, row.usual_bytes)
            first = better[0] < better[1] or (better[0] == better[1] and one.choice.exchange is None)
            if first and one.usual_bytes <= max(room, row.usual_bytes):
                beaten.add(id(row))
    found = best_first(request, pairs, blocks)
    assert 0 < len(beaten) < len(rows)
    assert sorted(map(repr, found)) == sorted(repr(row) for row in rows if id(row) not in beaten)
