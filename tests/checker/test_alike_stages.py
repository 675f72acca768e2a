"""Of alike stages the profile is looked at once: each of them is compared with what it says all the same."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import pipeplan
from builders.profiles import profile_of
from costs.test_trees import tree
from pipeplan.checker import check, inputs
from pipeplan.costs.communication import Exchange, time_of_groups
from pipeplan.files import Cluster, CostRow, PlacedStage, Placement, Plan, Profile, parse, to_json

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


NODES = Cluster.of("nodes", 16, levels=[("node", 4, "1us", "100GB"), ("net", 16, "5us", "10GB")])


@cache
def copied(zero: int) -> Plan:
    """Each stage on a node of four as four copies."""
    stages = tuple(
        PlacedStage(
            blocks=tuple(f"b{number * EACH + each}" for each in range(EACH)),
            devices=tuple(range(4 * number, 4 * number + 4)),
            replicas=4,
            zero=zero,
        )
        for number in range(STAGES)
    )
    placement = Placement(strategy="custom", num_devices=16, stages=stages)
    how: dict[str, Any] = {"scheduler": "1f1b", "deterministic": True, "time_limit": 1.0, "cluster": NODES}
    return pipeplan.search(profile_with(), placement=placement, mini_batch=32, microbatch_size=4, **how).plan


@pytest.mark.parametrize("zero", [0, 1])
def test_sums_of_those_that_lie_alike_are_one_question(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_, asked, answer = copied(zero), [], inputs._summed_on
    monkeypatch.setattr(inputs, "_summed_on", lambda *those, **how: asked.append(those) or answer(*those, **how))
    check(plan_, profile_with(), NODES).require("plan")
    assert len({size for _, _, size, *_ in asked}) == len(asked) > 0, "one for each size, of stages and of buckets"
    data = json.loads(to_json(plan_))
    for number in range(STAGES):
        changed = json.loads(json.dumps(data))
        changed["stages"][number]["sync_ns"] += 1
        found = check(parse(json.dumps(changed), Plan), profile_with(), NODES).problems
        assert f"stages[{number}].sync_ns" in {problem.place for problem in found}


TREES = [
    NODES,
    tree((4, 300, None), (64, 40, 2.0)),
    tree((4, 300, None), (16, 40, 1.0), (64, 40, 4.0), rails=1),
]


@pytest.mark.parametrize("cluster", TREES, ids=["nodes", "tree", "rails"])
def test_exchanges_of_those_that_lie_alike_take_as_long(cluster: Cluster) -> None:
    """Moved to other groups of those that the outermost links join, in order."""
    draw, unit = random.Random(1), cluster.levels[-2].group_size
    count = cluster.num_devices // unit
    for _ in range(100):
        units = sorted(draw.sample(range(count), draw.randint(1, count)))
        others = sorted(draw.sample(range(count), len(units)))
        inside = {number: sorted(draw.sample(range(unit), draw.randint(1, unit))) for number in units}
        here = [number * unit + place for number in units for place in inside[number]]
        there = [other * unit + place for number, other in zip(units, others, strict=True) for place in inside[number]]
        shards = draw.choice([n for n in range(1, len(here) + 1) if len(here) % n == 0])
        stages = [replace(copied(0).stages[0], devices=tuple(each), shards=shards) for each in (here, there)]
        assert inputs._lying(stages[:1], cluster) == inputs._lying(stages[1:], cluster)
        for how in ("all_reduce", "all_gather", "reduce_scatter"):
            times = [
                time_of_groups(cluster, Exchange(how, 10**6), [each[n::shards] for n in range(shards)])
                for each in (here, there)
            ]
            assert times[0] == times[1]
    alone, beside = (replace(copied(0).stages[0], devices=devices) for devices in ((0, 1), (0, unit)))
    assert inputs._lying([alone], cluster) != inputs._lying([beside], cluster)
