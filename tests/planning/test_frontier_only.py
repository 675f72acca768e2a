"""``frontier --only``: planners that look at less than all, against every strategy gone through."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache

import pytest

import pipeplan
from pipeplan.costs.clusters import named_cluster
from pipeplan.errors import UsageError
from pipeplan.examples.models import model
from pipeplan.planning.frontier import frontier_request, search_frontier
from pipeplan.planning.request import Request, Splitting
from pipeplan.planning.sharding_frontier import Splits, split_frontier
from pipeplan.sharding.baselines import ONLY
from pipeplan.sharding.cost_model import CostModel
from references.cost_graphs import enumerate_frontier
from support.marks import slow_but

Names = Mapping[str, str]
"""The configuration of every operator, such as ``samples2``."""


def request_of(name: str, devices: int, splitting: Splitting) -> Request:
    profile = model(name, device="v100-16gb")
    cluster = named_cluster("tensoropt", devices)
    return frontier_request(profile, devices=[devices], cluster=cluster, mini_batch=64, splitting=splitting)


@cache
def found(name: str, devices: int, splitting: Splitting) -> Splits:
    return split_frontier(request_of(name, devices, splitting), splitting)


def pairs(splits: Splits) -> list[tuple[int, int]]:
    return [(point.memory_bytes, point.time_ns) for point in splits.points]


def every_strategy(model: CostModel, allows: Callable[[Names], bool]) -> list[tuple[int, int]]:
    """Peaks and times of the strategies that nothing beats, one after another."""
    ways = model.configurations

    def named(chosen: Mapping[str, int]) -> Names:
        return {operator: ways[operator][index].name for operator, index in chosen.items()}

    def workspace(chosen: Mapping[str, int]) -> int:
        return max(ways[operator][index].workspace_bytes for operator, index in chosen.items())

    return enumerate_frontier(model.graph, lambda chosen: allows(named(chosen)), workspace)


def nothing_twice(names: Names) -> bool:
    """Cells and the output layer split their parameters; the loss, which has none, is split somehow."""
    own = {"cell": {"rows2", "columns2"}, "output": {"rows2"}, "loss": {"samples2", "places2"}}
    return all(way in own[operator.split("/")[1]] for operator, way in names.items())


def test_each_is_the_best_of_its_own_strategies() -> None:
    """Two devices and an RNN's operators: 3,072 strategies."""
    free = found("tensoropt-rnn", 2, Splitting(whole_blocks=False))
    everything = every_strategy(free.model, lambda names: True)
    assert pairs(free) == everything
    samples = every_strategy(free.model, lambda names: set(names.values()) == {"samples2"})
    split = every_strategy(free.model, nothing_twice)
    alone = {name: found("tensoropt-rnn", 2, Splitting(whole_blocks=False, only=name)) for name in ONLY}
    assert pairs(alone["data-parallel"]) == samples[-1:]
    assert pairs(alone["tofu"]) == split[:1]
    assert [time for _, time in pairs(alone["optcnn"])] == [everything[-1][1]]


def on_one_mesh(free: CostModel) -> list[tuple[int, int]]:
    """All samples, all places, or neither are split, and every tensor is taken as it was given, sums apart."""

    def allows(chosen: Mapping[str, int]) -> bool:
        for axis in ("samples", "places"):
            able = {operator for operator, ways in free.configurations.items() if f"{axis}2" in {w.name for w in ways}}
            split = {
                operator for operator in able if free.configurations[operator][chosen[operator]].name == f"{axis}2"
            }
            if split not in (set(), able):
                return False
        for link in free.operators.links:
            given = free.configurations[link.source][chosen[link.source]].output
            taken = free.layouts(
                link,
                free.configurations[link.source][chosen[link.source]],
                free.configurations[link.target][chosen[link.target]],
            )[1]
            if given._replace(partial=None) != taken:
                return False
        return True

    def workspace(chosen: Mapping[str, int]) -> int:
        return max(free.configurations[operator][index].workspace_bytes for operator, index in chosen.items())

    return enumerate_frontier(free.graph, allows, workspace)


def test_one_mesh_for_all_is_all_that_lies_along_it() -> None:
    free = found("tensoropt-rnn", 2, Splitting(whole_blocks=False))
    assert pairs(found("tensoropt-rnn", 2, Splitting(whole_blocks=False, only="mesh-tensorflow"))) == on_one_mesh(
        free.model
    )


@slow_but("name", ["tensoropt-rnn", "tensoropt-vgg16"], "tensoropt-rnn".__eq__)
@pytest.mark.parametrize("whole", [True, False])
def test_no_planner_beats_the_free_frontier(name: str, whole: bool) -> None:
    free = found(name, 4, Splitting(whole_blocks=whole))
    assert free.tracked.exact
    held = list(zip(free.tracked.memory_bytes.tolist(), free.tracked.time_ns.tolist(), strict=True))
    checked = 0
    for only in ONLY:
        try:
            own = found(name, 4, Splitting(whole_blocks=whole, only=only))
        except UsageError:  # some block cannot be split so
            assert only == "tofu"
            continue
        for point in own.points:
            tracked = point.memory_bytes - point.workspace_bytes
            assert any(best <= tracked and quickest <= point.time_ns for best, quickest in held)
            if free.exact:  # also of peaks, with workspace
                assert any(best <= point.memory_bytes and quickest <= point.time_ns for best, quickest in pairs(free))
            checked += 1
    assert checked >= 3


def test_meshes_of_fewer_dimensions_have_fewer_strategies() -> None:
    flat, two = (found("tensoropt-vgg16", 4, Splitting(whole_blocks=False, mesh_dimensions=most)) for most in (1, 2))
    assert all("-" not in way.name for ways in flat.model.configurations.values() for way in ways)
    assert any("-" in way.name for ways in two.model.configurations.values() for way in ways)
    for memory, time in pairs(flat):
        assert any(best <= memory and quickest <= time for best, quickest in pairs(two))


def test_points_become_plans_that_pass_check() -> None:
    splitting = Splitting(only="mesh-tensorflow")
    request = request_of("tensoropt-vgg16", 4, splitting)
    result = search_frontier(request)
    assert "only mesh-tensorflow" in result.of
    assert any("what is proved is of such strategies alone" in note for note in result.notes)
    plan = result.plan()
    assert plan.predicted.iteration_ns == result.points[result.chosen - 1].time_ns  # checked when made
    assert plan.provenance.choices["splits"] == "--only mesh-tensorflow"


def test_what_has_no_strategy_says_why() -> None:
    with pytest.raises(UsageError, match=r"--only tofu .* has no strategy on 4 devices: operator 'layer0'"):
        found("tensoropt-rnn", 4, Splitting(only="tofu"))


def test_python_has_the_names_of_the_command_line() -> None:
    from pipeplan.cli.frontier_verb import frontier_command

    (option,) = [each for each in frontier_command.params if each.name == "only"]
    assert list(option.type.choices) == list(ONLY)
    annotation = inspect.signature(pipeplan.frontier).parameters["only"].annotation
    assert re.findall(r"'(.*?)'", str(annotation).replace('"', "'")) == list(ONLY)
