"""What pipeplan answered before its reorganisation it still answers: plans, JSON keys, files of version 1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from golden.json_keys import KEYS, keys_of
from golden.runner import (
    BEFORE,
    VERBS,
    answer,
    arguments_of,
    differences,
    expected_answers,
    inputs,
    longer,
    pipeplan,
    recorded,
    requests,
)
from pipeplan.time_limit import Limit
from runtime_support.warm import warm_ranks
from support.marks import slow_but

FAST = {
    "gpt2-124m/recompute",
    "gpt2-124m/v-shape",
    "gpt2-345m/cluster",
    "gpt2-345m/slices",
    "gpt2-345m/unroll",
    "gpt2-1.3b/chimera",
    "gpt2-1.3b/zb-v",
    "mmt/placement",
    "mt5/zb-auto",
    "tessel-k/repetend",
    "tessel-k/rules",
    "tessel-nn/rules",
    "tessel-x/auto",
    "tessel-x/chimera",
    "zbv/v-half",
    "zbv/zb-v",
}
"""Searches of a moment; all the others are slow together."""

LONG = (
    *("flava/auto", "gpt2-1.3b/auto", "gpt2-1.3b/cluster", "mmt/cluster", "mmt/greedy", "mt5/auto", "mt5/spread"),
    *(
        "gpt2-124m/interleaved-rules",
        "mt5/rules",
        "tessel-nn/unroll",
        "zbv/repetend",
        "mmt/auto",
        "tessel-nn/memory",
        "tessel-x/repetend",
        "zbv/auto",
    ),
)
"""Of these the dearest, beside which the same profiles are searched in two other ways and more."""


@pytest.fixture(scope="module", autouse=True)
def folder() -> Iterator[Path]:
    with inputs() as found:
        yield found


def slow(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.slow)


def long(name: str) -> object:
    return pytest.param(name, marks=[pytest.mark.slow, pytest.mark.long])


def marked(name: str) -> object:
    return name if name in FAST else long(name) if name in LONG else slow(name)


@pytest.mark.parametrize("name", list(map(marked, requests("search"))))
def test_search(name: str) -> None:
    """The plan is that of the step before, and no longer than the one before the reorganisation."""
    found = answer("search", requests("search")[name])
    assert not longer({name: recorded(BEFORE)[f"search {name}"]}, {name: found})
    assert not differences(name, expected_answers()[f"search {name}"], found)


CLOCKLESS = ("tessel-x/auto", "gpt2-124m/recompute")
AS_CLOCKLESS = ("mt5/zb-auto", "tessel-k/repetend", "tessel-nn/rules", "zbv/v-half")
"""Those in fast, and those in CI; the other quick searches are long here."""


@pytest.mark.parametrize(
    "name",
    [
        *CLOCKLESS,
        *map(slow, AS_CLOCKLESS),
        *map(long, sorted({*FAST} - {*CLOCKLESS, *AS_CLOCKLESS})),
        long("flava/auto"),
    ],
)
@pytest.mark.parametrize("pace", [pytest.param(0, marks=pytest.mark.long), 10**6])
def test_no_clock_decides_in_a_deterministic_search(name: str, pace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether none passes any time, or a million seconds at each look: the plan is the same."""
    now, counted = [0.0], Limit.elapsed.fget  # type: ignore[attr-defined]

    def clock(*_: object) -> float:
        now[0] += pace
        return now[0]

    monkeypatch.setattr(Limit, "elapsed", property(lambda limit: counted(limit) if limit.counted else clock()))
    monkeypatch.setattr("time.process_time", clock)
    assert not differences(name, expected_answers()[f"search {name}"], answer("search", requests("search")[name]))


@slow_but(
    "verb, name",
    [(verb, name) for verb in VERBS[1:] for name in requests(verb)],
    lambda case: case[0] != "frontier",
    lambda case: case[1] == "gpt2-1.3b/profile",
)
def test_other_verbs(verb: str, name: str) -> None:
    """The figures are those of the step before."""
    assert not differences(name, expected_answers()[f"{verb} {name}"], answer(verb, requests(verb)[name]))


def test_forty_searches_for_ten_profiles() -> None:
    names = [name.split("/")[0] for name in requests("search")]
    assert len(names) == 40
    assert all(names.count(name) == 4 for name in names)
    assert set(requests("search")) >= FAST


MOVED = {"blocks[].tied"}
"""Keys that a later version of a format says elsewhere: profiles of version 2 list what is tied, with its bytes."""


@pytest.mark.parametrize(
    "case",
    [
        *requests("keys"),
        *(long(case) if case == "profile communication" else slow(case) for case in requests("keys_torch")),
    ],
)
def test_every_json_key_is_still_there(case: str) -> None:
    known = set(json.loads(KEYS.read_text(encoding="utf-8"))[case])
    text = (requests("keys") | requests("keys_torch"))[case]
    with warm_ranks() if case in requests("keys_torch") else nullcontext():
        assert not known - MOVED - set(keys_of(case, text))


@pytest.mark.parametrize("plan", requests("plans"))
def test_check_accepts_an_old_plan_with_its_old_profile(plan: str) -> None:
    done = pipeplan("check", f"{plan}.json", *arguments_of(requests("plans")[plan]), "--json")
    assert json.loads(done.out)["problems"] == []
    assert done.code == 0


def test_every_shipped_profile_has_an_old_plan() -> None:
    shipped = {path.stem for path in (BEFORE.parents[2] / "profiles").glob("*.json")}
    used = {part.strip("{}") for text in requests("plans").values() for part in text.split()}
    assert shipped <= used
    assert {path.name.split(".json")[0] for path in (BEFORE / "files").glob("plan-*")} == set(requests("plans"))


def test_longer_finds_a_longer_makespan_and_a_longer_sum() -> None:
    """Within 0.1 % one may be longer, but not all of them together; a plan that is no longer found is reported."""
    before = {name: {"exit": 0, "figures": {"makespan_ns": 10_000}} for name in "ab"}

    def found(a: int, b: int) -> list[str]:
        return longer(before, {n: {"exit": 0, "figures": {"makespan_ns": m}} for n, m in (("a", a), ("b", b))})

    assert found(10_010, 9_990) == []
    assert len(found(10_011, 9_900)) == 1
    assert len(found(10_010, 10_000)) == 1
    assert "no plan" in longer(before, {"a": {"exit": 1, "message": "pipeplan: nothing"}})[0]
