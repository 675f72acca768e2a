"""Programs from a plan and a model's graph: what a rank does, and which plans and models do not go together."""

from __future__ import annotations

import pytest
from helpers import chain_workload, gpipe_orders, plan_of, shared_workload

from pipeplan.errors import UsageError
from pipeplan.model import Dependency, Plan
from pipeplan.runtime.program import Message, programs_of, require_runnable

BLOCKS = ["block0", "block1", "block2"]
EDGES = [("block0", "block1"), ("block1", "block2")]


def chain() -> Plan:
    workload = chain_workload(2, 2, devices=[(0,), (1,), (0,)], split=(5, 5))
    return plan_of(workload, gpipe_orders(workload))


def test_transfers_know_message_and_peer() -> None:
    first, second = programs_of(chain(), BLOCKS, EDGES, "m")
    sends = {(i.message, i.peer) for i in first.instructions if i.action.kind.startswith("SEND")}
    received = {(i.message, i.peer) for i in second.instructions if i.action.kind.startswith("RECV")}
    assert {message for message, _ in sends} == {message for message, _ in received}
    assert sends == {(Message("F", 0, 1), 1), (Message("B", 2, 1), 1)}
    assert {peer for _, peer in received} == {0}
    assert [i.counter for i in first.instructions] == list(range(len(first.texts)))


def test_stages_know_their_neighbours() -> None:
    first, second = programs_of(chain(), BLOCKS, EDGES, "m")
    assert set(first.stages) == {0, 2}
    assert set(second.stages) == {1}
    middle = second.stages[1]
    assert middle.split
    assert (middle.inputs, middle.outputs) == ({0: ("block0",)}, {2: ("block1",)})
    assert (middle.returns, middle.awaits) == (frozenset({0}), frozenset({2}))
    assert first.stages[0].inputs == {}
    assert first.remote == tuple(
        sorted(
            [
                (Message("F", 0, 1), 0, 1),
                (Message("F", 1, 2), 1, 0),
                (Message("B", 2, 1), 0, 1),
                (Message("B", 1, 0), 1, 0),
            ]
        )
    )


def test_an_edge_without_gradient_dependency_brings_none_back() -> None:
    plan = chain()
    forward = tuple(d for d in plan.dependencies if {d.source[-1], d.target[-1]} != {"I"})
    first, second = programs_of(
        plan.model_copy(update={"dependencies": forward, "programs": ((), ())}), BLOCKS, EDGES, "m"
    )
    assert second.stages[1].awaits == second.stages[1].returns == frozenset()
    assert {message.payload for message in first.tensors} == {"F"}


@pytest.mark.parametrize(
    ("blocks", "edges", "told"),
    [
        (["block0", "block1"], EDGES[:1], r"stages\[2\] of the plan has block 'block2', which model 'm' has not"),
        ([*BLOCKS, "more"], EDGES, "model 'm' has block 'more', which no stage of the plan has"),
        (BLOCKS, EDGES[:1], "the plan makes 2F wait for 1F, but model 'm' has no edge from a block of stage 1"),
        (BLOCKS, [*EDGES, ("block0", "block2")], "model 'm' has an edge from stage 0 to stage 2"),
    ],
)
def test_refuses_another_model(blocks: list[str], edges: list[tuple[str, str]], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        programs_of(chain(), blocks, edges, "m")


def test_refuses_blocks_in_another_order() -> None:
    plan = chain()
    stages = (plan.stages[0].model_copy(update={"blocks": ("block3", "block0")}), *plan.stages[1:])
    with pytest.raises(UsageError, match=r"stages\[0\] of the plan runs block 'block3' before 'block0'"):
        programs_of(
            plan.model_copy(update={"stages": stages}), [*BLOCKS, "block3"], [*EDGES, ("block0", "block3")], "m"
        )


def test_refuses_stages_on_several_devices() -> None:
    workload = shared_workload(2, 2)
    with pytest.raises(UsageError, match=r"stages\[0\] stands on 2 devices \(2 shards x 1 replicas\)"):
        require_runnable(plan_of(workload, gpipe_orders(workload)))


def test_a_backward_dependency_alone_is_refused() -> None:
    plan = chain()
    odd = Dependency(source="2I", target="0I")
    with pytest.raises(UsageError, match="the plan makes 0I wait for 2I"):
        programs_of(plan.model_copy(update={"dependencies": (*plan.dependencies, odd)}), BLOCKS, EDGES, "m")
