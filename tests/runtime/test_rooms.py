"""The rooms of runtime/: imports go one way, without cycles, and the executor is small and stands on little."""

from __future__ import annotations

import networkx as nx
import pytest

from pipeplan.files import PlacedStage
from pipeplan.runtime.launch.local import watch_local
from runtime_support import replay_rank
from runtime_support.plans import placed_plan
from runtime_support.rooms import (
    ALLOWED,
    RUNTIME,
    SPEC,
    closure_of,
    imports_of,
    in_room,
    num_lines,
    room_of,
    runtime_modules,
)

OUTSIDE = {
    "_version",
    "catalog",
    "checker",
    "costs",
    "display",
    "errors",
    "files",
    "graphs",
    "texts",
    "units",
    "workload",
}
"""What runtime/ may import of the rest of the package, beside its version."""


def imports_torch(module: str) -> bool:
    return any(name.partition(".")[0] == "torch" for name in imports_of(module))


def test_every_module_is_in_a_room() -> None:
    assert [module for module in runtime_modules() if room_of(module) is None] == []
    assert all(in_room(room) for room in ALLOWED)


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_what_stands_below_it(room: str) -> None:
    for module in in_room(room):
        others = {room_of(name) for name in imports_of(module) if name.startswith(f"{RUNTIME}.")}
        assert others - {room} <= ALLOWED[room], module
        rest = {name.split(".")[1] for name in imports_of(module) if name.startswith("pipeplan.")}
        assert rest - {"runtime"} <= OUTSIDE, module


def test_nothing_imports_in_a_circle() -> None:
    graph = nx.DiGraph((module, name) for module in runtime_modules() for name in imports_of(module))
    assert [sorted(found) for found in nx.strongly_connected_components(graph) if len(found) > 1] == []


def test_a_rank_starts_without_torch() -> None:
    """Of launch/ only the worker needs it, which is imported when the rank knows who it is."""
    worker, start = f"{RUNTIME}.launch.worker", f"{RUNTIME}.launch.__main__"
    assert {module for module in in_room("launch") if imports_torch(module)} == {worker}
    assert not any(map(imports_torch, closure_of(set(in_room("launch")) - {worker, start})))


@pytest.mark.parametrize("module", ["message_graph", "rank_program"])
def test_plans_are_lowered_without_torch(module: str) -> None:
    assert not any(map(imports_torch, closure_of([f"{RUNTIME}.executor.{module}"])))


def test_the_executor_is_small_and_stands_on_little() -> None:
    """At most 3,870 lines, and 6,450 with all that it imports of runtime/; of models/ it knows the spec alone.

    Some 60 and 200 of them came with copies of tensors that backward makes again and norms of shared samples, some 30
    and 90 with blocks whose devices share sequences or experts by themselves.
    """
    executor = in_room("executor")
    everything = closure_of(executor, within=RUNTIME)
    assert {room_of(module) for module in everything} <= {"executor", "models", "launch", "parallel"}
    assert [module for module in everything if room_of(module) == "models"] == [SPEC]
    assert num_lines(executor) <= 3870
    assert num_lines(everything) <= 6450


def test_the_executor_replays_a_plan_alone() -> None:
    """Ranks in which nothing of training/, profiling/ and models/ but the spec can be imported; gradients are right.

    A stage has replicas, another splits its backward, and two blocks on different ranks share a parameter.
    """
    stages = [
        PlacedStage(blocks=("b0",), devices=(0,)),
        PlacedStage(blocks=("b1",), devices=(0, 1), replicas=2),
        PlacedStage(blocks=("b2", "end"), devices=(1,)),
    ]
    plan = placed_plan(replay_rank.chain(), stages, num_microbatches=3, microbatch_size=2, split=True)
    found: dict[int, dict[str, float]] = {}
    job = {"plan": plan.model_dump_json()}
    watch_local(
        "runtime_support.replay_rank:replay", plan.programs, job, 60 * 10**9, found.__setitem__, replay_rank.COMMAND
    )
    assert sorted(found) == [0, 1]
    for rank, report in found.items():
        assert report["num_gradients"] > 0, rank
        assert report["distance"] < 1e-12, rank
    losses = [report["loss"] for report in found.values()]
    assert sum(losses) == pytest.approx(found[0]["expected_loss"], rel=1e-12)
