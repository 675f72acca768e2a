"""Of alike stages the profile is looked at once: each of them is compared with what it says all the same."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

import pipeplan
from builders.profiles import profile_of
from pipeplan.checker import check
from pipeplan.files import CostRow, Plan, Profile, parse, to_json

STAGES, EACH = 4, 3


def profile_with(number: int | None = None, /, **edge: Any) -> Profile:
    """A chain of blocks that are alike, with costs for whole and split backward; its edges but for one, too."""
    row = CostRow(
        microbatch_size=1,
        forward_ns=100,
        backward_ns=200,
        input_grad_ns=120,
        weight_grad_ns=80,
        activation_bytes=64,
        weight_grad_bytes=16,
        workspace_bytes=8,
    )
    count = STAGES * EACH
    profile = profile_of([row] * count, parameters=[32] * count, bytes_per_sample=16)
    if number is None:
        return profile
    edges = list(profile.edges)
    edges[number] = edges[number].model_copy(update=edge)
    return profile.model_copy(update={"edges": tuple(edges)})


@cache
def plan() -> Plan:
    """An even cut into stages that are alike but for the first, which takes nothing."""
    how: dict[str, Any] = {"placement": "one-to-one", "scheduler": "1f1b", "deterministic": True, "time_limit": 1.0}
    found = pipeplan.search(profile_with(), devices=STAGES, mini_batch=8, microbatch_size=1, **how).plan
    assert [len(stage.blocks) for stage in found.stages] == [EACH] * STAGES
    return found


def places(found: Plan, profile: Profile) -> set[str]:
    return {problem.place for problem in check(found, profile).problems if problem.rule == "profile"}


@pytest.mark.parametrize("number", range(STAGES))
@pytest.mark.parametrize("key", ["duration_ns", "acquire_bytes", "workspace_bytes"])
def test_what_an_operation_of_one_of_them_does_is_compared(number: int, key: str) -> None:
    assert places(plan(), profile_with()) == set()
    data = json.loads(to_json(plan()))
    own = next(each for each in data["operations"] if (each["stage"], each["kind"]) == (number, "F"))
    own[key] += 1
    assert places(parse(json.dumps(data), Plan), profile_with()) == {f"operations[{number}F].{key}"}


@pytest.mark.parametrize("number", range(STAGES))
def test_what_one_of_them_keeps_is_compared(number: int) -> None:
    data = json.loads(to_json(plan()))
    data["stages"][number]["parameter_bytes"] = data["stages"][number].get("parameter_bytes", 0) + 1
    assert places(parse(json.dumps(data), Plan), profile_with()) == {f"stages[{number}].parameter_bytes"}


@pytest.mark.parametrize("number", range(STAGES))
def test_one_that_holds_a_tensor_twice_is_told_from_the_others(number: int) -> None:
    """Both ends of an edge inside a stage need the tensor: the stage holds it once, and its rows count it twice."""
    inner = profile_with(number * EACH, saved_by_source="yes")
    text = "provenance.profile_sha256"
    found = places(plan(), inner) - {text}
    assert found == {f"operations[{number}F].acquire_bytes", f"operations[{number}B].release_bytes"}


@pytest.mark.parametrize("number", range(STAGES - 1))
def test_what_one_of_them_sends_is_compared(number: int) -> None:
    larger = profile_with((number + 1) * EACH - 1, bytes_per_sample=17)
    found = {place for place in places(plan(), larger) if place.endswith(".bytes")}
    assert len(found) == 2, found
