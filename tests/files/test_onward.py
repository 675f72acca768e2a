"""Lists in short: what goes on in numbers is said once, and read as it was; what cannot go on is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from builders.folds import plans_of
from pipeplan.errors import FileError
from pipeplan.files import Plan, parse, to_json
from pipeplan.files.onward import MOST_TOGETHER, in_short, longer, shorter, whole

PLANS = sorted((Path(__file__).parents[2] / "plans").glob("*.json"))


def _value(draw: Random, depth: int) -> Callable[[int], Any]:
    """Something of a file that is a function of a number: by steps, or not at all."""
    start, step = draw.choice([0, 1, 9, 10**9, 10**15]), draw.choice([0, 0, 1, -1, 3, 1000])
    kind = draw.randrange(9 if depth else 6)
    if kind < 2:
        return lambda time: start + step * time
    if kind == 2:
        word = draw.choice(["layers.{}.ffn", "{}F", "a{}b{}", "00{}", "1234567890{}", "x", ""])
        return lambda time: word.format(abs(start + step * time), time)
    if kind < 6:
        fixed = draw.choice([None, True, False, 1.5, -0.0, 1, "x9", [], {}])
        return lambda time: fixed
    inner = [_value(draw, depth - 1) for _ in range(draw.randint(0, 3))]
    if kind == 6:
        return lambda time: [each(time) for each in inner]
    return lambda time: {f"k{place}": each(time) for place, each in enumerate(inner)}


def _list(seed: int) -> list[Any]:
    draw = Random(seed)
    found: list[Any] = []
    for _ in range(draw.randint(0, 4)):
        together = [_value(draw, 2) for _ in range(draw.randint(1, 3))]
        found += [each(time) for time in range(draw.randint(1, 12)) for each in together]
        found += [draw.choice(found)] * draw.randint(0, 1)
    return found


def test_any_list_is_read_as_it_was() -> None:
    short = 0
    for seed in range(400):
        elements = _list(seed)
        said = shorter(elements)
        short += len(said) < len(elements)
        assert json.dumps(longer(said, "there")) == json.dumps(elements), seed
    assert short > 100


def test_lists_of_written_plans_are_read_as_they_were() -> None:
    """Those of small plans, one by one written, as if their devices had players."""
    assert len(PLANS) > 9
    for path in PLANS:
        content = json.loads(path.read_text()) | {"players": [{"first": 0, "counts": [1], "steps": [1]}]}
        said = in_short(content)
        assert whole(said) == content
        assert len(json.dumps(said)) < len(json.dumps(content)), path


@pytest.mark.parametrize("seed", range(10))
def test_a_plan_in_short_is_the_plan(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by its fingerprint; and one that says all of it is read as before."""
    folded, *_ = plans_of(seed, monkeypatch)
    said = json.loads(to_json(folded))
    content = folded.model_dump(mode="json")
    assert whole(said) == content
    short, long = parse(json.dumps(said), Plan), parse(json.dumps(content), Plan)
    assert short == long == folded
    assert short.fingerprint == long.fingerprint == folded.fingerprint


def _deep(stages: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A folded plan's content whose lists are as long as those of so many alike stages."""
    folded = next(each for seed in range(10) if (each := plans_of(seed, monkeypatch)[0]).players)
    content = folded.model_dump(mode="json")
    stage = content["stages"][0]
    content["stages"] = [stage | {"blocks": [f"layers.{number}"], "devices": [number]} for number in range(stages)]
    return content


def test_files_of_many_alike_stages_are_as_small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [len(json.dumps(in_short(_deep(number, monkeypatch))["stages"])) for number in (8, 256, 4096)]
    assert max(sizes) <= min(sizes) + 6


_STAGES: list[Any] = [{"blocks": ["layers.3"], "devices": [3]}, {"blocks": ["layers.1"], "devices": [2]}]


@pytest.mark.parametrize(
    ("elements", "said"),
    [
        ([{"onward": 1, "times": 2}], r"stages\[0\] goes on from the 2 elements before it, and there are 0"),
        ([*_STAGES, {"onward": 2, "times": 1}], r"stages\[2\] goes on from the 4 elements before it, and there are 2"),
        ([*_STAGES, {"onward": 1}], r"stages\[2\] has keys onward; give onward and times"),
        ([*_STAGES, {"onward": 1, "times": 1, "devices": []}], r"stages\[2\] has keys onward, times, devices; give"),
        ([*_STAGES, {"onward": 1, "times": True}], r"stages\[2\] has keys"),
        ([*_STAGES, {"onward": 0, "times": 1}], r"stages\[2\] lets 0 go on 1 times; onward is 1 to 16"),
        ([*_STAGES, {"onward": 1, "times": 0}], r"stages\[2\] lets 1 go on 0 times"),
        ([*_STAGES, {"onward": 1, "times": 10**6 + 1}], r"stages\[2\] lets 1 go on 1000001 times"),
        ([*_STAGES, {"onward": MOST_TOGETHER + 1, "times": 1}], r"stages\[2\] lets 17 go on 1 times"),
        ([*_STAGES, {"onward": 1, "times": 2}], r"stages\[2\] goes on from 'layers.1' to the number -1, and texts"),
        (["a", "b", {"onward": 1, "times": 1}], r"stages\[2\] goes on from 'a' to 'b', which differ in more than"),
        ([1, 2.0, {"onward": 1, "times": 1}], r"stages\[2\] goes on from 1 to 2.0, which differ in more than"),
        ([[1], [1, 2], {"onward": 1, "times": 1}], r"goes on from \[1\] to \[1, 2\], which differ in more"),
        ([{"a": 1}, {"b": 1}, {"onward": 1, "times": 1}], r'goes on from {"a": 1} to {"b": 1}, which differ'),
        ([None, None, {"onward": 1, "times": 10**6}, "x" * 99, "x" * 99, {"onward": 1, "times": 10**6}], "67108864"),
    ],
)
def test_what_cannot_go_on_is_refused(elements: list[Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        longer(elements, "stages")


def test_damaged_files_in_short_are_refused_with_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    folded = plans_of(0, monkeypatch)[0]
    content = folded.model_dump(mode="json")

    def refused(changes: dict[str, Any]) -> str:
        with pytest.raises(FileError) as caught:
            parse(json.dumps(content | changes), Plan)
        return str(caught.value)

    stages = content["stages"]
    assert "stages[1] goes on from the 2 elements" in refused({"stages": [stages[0], {"onward": 1, "times": 1}]})
    pair = ["0F", content["starts_ns"]["0F"]]
    assert "starts_ns[1] is of 0F, as one before it is" in refused({"starts_ns": [pair, pair]})
    assert "starts_ns[0] is no pair of a name" in refused({"starts_ns": [pair[:1]]})
    assert "modules[0] is no pair" in refused({"modules": [{}]})
    memory = [*content["predicted"]["memory"][:1] * 2, {"onward": 1, "times": 9}]
    assert "predicted.memory has 11 entries" in refused({"predicted": content["predicted"] | {"memory": memory}})
    more = [*stages[:1] * 2, {"onward": 1, "times": 1}]
    assert "stages" in refused({"stages": more})  # whose blocks two stages have


def test_only_folded_plans_have_lists_in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = plans_of(0, monkeypatch)[1]
    content = json.loads(to_json(devices))
    assert content == devices.model_dump(mode="json")
    content["stages"] += [{"onward": 1, "times": 1}]
    with pytest.raises(FileError, match=r"stages\[[0-9]+\]\.(onward|blocks)"):
        parse(json.dumps(content), Plan)
    with pytest.raises(FileError, match="version 1"):
        parse(json.dumps(content | {"schema_version": 1, "players": content.get("players", [])}), Plan)
