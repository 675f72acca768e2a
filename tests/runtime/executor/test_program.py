"""Programs from a plan and a model's graph: what a rank does, and which plans and models do not go together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders.chains import chain_workload
from builders.orders import gpipe_orders
from builders.plans import plan_of
from builders.profiles import joined
from pipeplan.costs import build_workload
from pipeplan.errors import UsageError
from pipeplan.files import Block, CostRow, PlacedStage, Placement, Plan
from pipeplan.runtime.executor.message_graph import Message, Numbers
from pipeplan.runtime.executor.rank_program import Program, programs_of
from pipeplan.runtime.parallel import Share
from pipeplan.workload.elements import Dependency

BLOCKS = ["block0", "block1", "block2"]
EDGES = [("block0", "block1"), ("block1", "block2")]


def chain() -> Plan:
    workload = chain_workload(2, 2, devices=[(0,), (1,), (0,)], split=(5, 5))
    return plan_of(workload, gpipe_orders(workload))


def test_transfers_know_message_and_peer() -> None:
    first, second = programs_of(chain(), BLOCKS, EDGES, "m")
    sends = {(i.message, i.peer) for i in first.steps if i.action.kind.startswith("SEND")}
    received = {(i.message, i.peer) for i in second.steps if i.action.kind.startswith("RECV")}
    assert {message for message, _ in sends} == {message for message, _ in received}
    assert sends == {(Message("F", 0, 1), 1), (Message("B", 2, 1), 1)}
    assert {peer for _, peer in received} == {0}
    assert [i.counter for i in first.steps] == list(range(len(first.texts)))


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
        (["block0", "block1"], EDGES[:1], r"stages\[2\] of the plan has block 'block2', which is not in model 'm'"),
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
    stages = (replace(plan.stages[0], blocks=("block3", "block0")), *plan.stages[1:])
    with pytest.raises(UsageError, match=r"stages\[0\] of the plan runs block 'block3' before 'block0'"):
        programs_of(
            plan.model_copy(update={"stages": stages}), [*BLOCKS, "block3"], [*EDGES, ("block0", "block3")], "m"
        )


def test_a_backward_dependency_alone_is_refused() -> None:
    plan = chain()
    odd = Dependency(source="2I", target="0I")
    with pytest.raises(UsageError, match="the plan makes 0I wait for 2I"):
        programs_of(plan.model_copy(update={"dependencies": (*plan.dependencies, odd)}), BLOCKS, EDGES, "m")


# Samples ---------------------------------------------------------------------------------------------------------


def placed(*stages: PlacedStage, size: int = 4) -> tuple[Program, ...]:
    """Programs of a chain of two blocks on these stages, for a mini-batch of 8 samples."""
    rows = tuple(
        CostRow(microbatch_size=n, shards=shards, forward_ns=10, backward_ns=20)
        for n in (1, 2, 4)
        for shards in (1, 2, 4)
    )
    profile = joined([Block(id=block, operator="linear", costs=rows) for block in BLOCKS[:2]], bytes_per_sample=8)
    devices = 1 + max(device for stage in stages for device in stage.devices)
    routes = 1 + max(stage.route for stage in stages)
    placement = Placement(strategy="by-hand", num_devices=devices, num_routes=routes, stages=stages)
    workload = build_workload(profile, placement, num_microbatches=8 // size, microbatch_size=size)
    return programs_of(plan_of(workload, gpipe_orders(workload)), BLOCKS[:2], EDGES[:1], "m")


def samples_of(program: Program) -> dict[str, tuple[Numbers, ...]]:
    return {text: i.samples for text, i in zip(program.texts, program.steps, strict=True)}


def first(*devices: int, **more: int) -> PlacedStage:
    return PlacedStage(blocks=("block0",), devices=devices, replicas=len(devices), **more)


def second(*devices: int, **more: int) -> PlacedStage:
    return PlacedStage(blocks=("block1",), devices=devices, replicas=len(devices), **more)


def test_messages_carry_what_the_target_works_on() -> None:
    """One device with micro-batches of 4 sends to two replicas, which share micro-batches of 2."""
    source, even, odd = map(samples_of, placed(first(0), second(1, 2, microbatch_size=2)))
    assert source["0F1"] == ((4, 5, 6, 7),)
    assert source["0SEND_F1>1@2"] == odd["1RECV_F1"] == ((5, 7),)
    assert even["1F3"] == ((6,),)
    assert even["1SEND_B3"] == source["0RECV_B3>1@1"] == ((6,),)


def test_a_device_of_both_groups_keeps_its_own_samples() -> None:
    both, other = map(samples_of, placed(first(0, 1), second(0)))
    assert other["0SEND_F0"] == both["1RECV_F0"] == ((2, 3),)
    assert not any("SEND_F" in text for text in both)
    assert both["1F0"] == ((0, 1, 2, 3),)


def test_replicas_share_each_part_and_so_the_micro_batch() -> None:
    """Both stages run the first micro-batch in parts, or the second not: then it gets its halves' shares at once."""
    for parted in (1, 0):
        programs = placed(first(0, 1, num_parted=1), second(2, 3, num_parted=parted))
        left, _, onto, _ = map(samples_of, programs)
        assert left["0F0.0"] == ((0,),)
        assert left["0F0.1"] == ((2,),)
        assert left["0B0"] == ((0,), (2,))
        assert left["0F1"] == ((4, 5),)
        assert onto["1B0"] == (((0,), (2,)) if parted else ((0, 2),))
        assert left["0SEND_F0.1" if parted else "0SEND_F0"] == (((2,),) if parted else ((0, 2),))
        assert onto["1SEND_B0"] == left["0RECV_B0"] == ((0, 2),)


def test_shards_work_on_the_same_samples_and_share_what_there_is_to_send() -> None:
    """Two replicas of two shards send to four shards, of which the last holds what the first replica makes."""
    source = PlacedStage(blocks=("block0",), devices=(0, 1, 2, 3), shards=2, replicas=2)
    target = PlacedStage(blocks=("block1",), devices=(4, 5, 6, 1), shards=4)
    programs = placed(source, target)
    found = [samples_of(program) for program in programs]
    assert [each.get("0F0") for each in found] == [((0, 1),), ((0, 1),), ((2, 3),), ((2, 3),)] + [None] * 3
    assert [each.get("1F1") for each in found] == [None, ((4, 5, 6, 7),), None, None] + 3 * [((4, 5, 6, 7),)]
    sent = [sum("SEND_F0" in text for text in program.texts) for program in programs]
    assert sent == [2, 1, 2, 2, 0, 0, 0], "each target gets two samples of either replica, but one has two already"
    assert programs[1].stages[0].shares == (Share("block0", 1, (0, 1)),)
    assert programs[1].stages[1].shares == (Share("block1", 3, (4, 5, 6, 1)),)
    assert [program.stages[0].counts_loss for program in programs[:4]] == [True, False, True, False]
    assert str(Share("block1", 3, (4, 5, 6, 1))) == "block1[3/4]"


def test_routes_take_turns() -> None:
    stages = [first(0), second(1), first(1, route=1), second(0, route=1)]
    programs = placed(*stages, size=2)
    down = samples_of(programs[0])
    assert down["0F1"] == ((4, 5),)
    assert down["3F1"] == ((6, 7),)
    assert set(programs[0].holders) == {(Share(block), (0, 1)) for block in BLOCKS[:2]}
    assert {message for message, _, _ in programs[0].remote} == {
        Message("F", 0, 1),
        Message("F", 2, 3),
        Message("B", 1, 0),
        Message("B", 3, 2),
    }
