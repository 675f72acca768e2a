"""Chakra traces: read by protobuf, and replayed by ASTRA-sim's rules with the times of the plan."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import pipeplan as face
from builders import sharded
from builders.chains import chain_plan, chain_workload
from builders.drawn import placed, placed_chains
from builders.folds import plans_of
from builders.loops import looped_plans
from builders.orders import random_orders
from pipeplan import Plan, UsageError
from pipeplan.costs.zero import Zero
from pipeplan.errors import FileError
from pipeplan.files import Block, CostRow, Profile, Recipe
from pipeplan.files.profile import Source
from pipeplan.interop.chakra import traces
from pipeplan.interop.chakra.actions import micros
from pipeplan.interop.chakra.wire import CollectiveType, NodeType, TraceNode, read_nodes, trace_bytes
from pipeplan.planning.build_plan import assemble
from pipeplan.simulator.metrics import rates
from pipeplan.simulator.simulation import orders_of, simulate
from pipeplan.workload.action import Action
from pipeplan.workload.bounds import weak_iteration_bound
from pipeplan.workload.elements import Bucket, TiedState
from pipeplan.workload.engine import with_links
from pipeplan.workload.task_graph import earliest_starts, task_graph
from pipeplan.workload.workload import Workload
from references.astra_sim import Replay, links_of_plans, one_port, replay
from support.commands import pipeplan
from support.marks import always, slow_but, some_of
from support.paths import ROOT

Ranks = list[list[TraceNode]]
SHIPPED = sorted(path.stem for path in (ROOT / "plans").glob("*.json"))


@cache
def shipped(name: str) -> Plan:
    return face.read_plan(ROOT / f"plans/{name}.json")


def files_of(plan: Plan) -> tuple[dict[str, Sequence[int]], list[bytes]]:
    """Groups, and the file of each rank."""
    files = face.export(plan, "chakra").files
    ranks = [files[f"plan.{rank}.et"] for rank in range(len(plan.devices))]
    assert set(files) == {"groups.json", *(f"plan.{rank}.et" for rank in range(len(plan.devices)))}
    assert all(isinstance(content, bytes) for content in ranks)
    return json.loads(files["groups.json"]), [content for content in ranks if isinstance(content, bytes)]


def ranks_of(plan: Plan) -> tuple[dict[str, Sequence[int]], Ranks]:
    groups, files = files_of(plan)
    return groups, [read_nodes(content) for content in files]


# A second reader ----------------------------------------------------------------------------------------------------

STRING, BOOL, INT32, INT64, UINT64, ENUM, MESSAGE = 9, 8, 5, 3, 4, 14, 11


@cache
def schema() -> Mapping[str, Any]:
    """Classes of the messages, of field numbers and types that are written down here."""
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    fields: dict[str, list[tuple[str, int, int, bool, str]]] = {
        "GlobalMetadata": [("version", 1, STRING, False, ""), ("attr", 2, MESSAGE, True, "AttributeProto")],
        "AttributeProto": [
            ("name", 1, STRING, False, ""),
            ("int32_val", 7, INT32, False, ""),
            ("int64_val", 9, INT64, False, ""),
            ("bool_val", 27, BOOL, False, ""),
            ("string_val", 29, STRING, False, ""),
        ],
        "Node": [
            ("id", 1, UINT64, False, ""),
            ("name", 2, STRING, False, ""),
            ("type", 3, ENUM, False, "NodeType"),
            ("ctrl_deps", 4, UINT64, True, ""),
            ("data_deps", 5, UINT64, True, ""),
            ("duration_micros", 7, UINT64, False, ""),
            ("attr", 10, MESSAGE, True, "AttributeProto"),
        ],
    }
    kinds = file.enum_type.add(name="NodeType")
    names = ["INVALID", "METADATA", "MEM_LOAD", "MEM_STORE", "COMP", "COMM_SEND", "COMM_RECV", "COMM_COLL"]
    for number, name in enumerate(names):
        kinds.value.add(name=f"{name}_NODE", number=number)
    for message, own in fields.items():
        made = file.message_type.add(name=message)
        if message == "AttributeProto":
            made.oneof_decl.add(name="value")
        for name, number, kind, repeated, of in own:
            field = made.field.add(name=name, number=number, type=kind, label=3 if repeated else 1)
            if of:
                field.type_name = f".ChakraProtoMsg.{of}"
            if message == "AttributeProto" and name != "name":
                field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}")) for name in fields
    }


def delimited(content: bytes) -> Iterator[bytes]:
    place = 0
    while place < len(content):
        length = shift = 0
        while True:
            byte = content[place]
            place, length, shift = place + 1, length | (byte & 127) << shift, shift + 7
            if byte < 128:
                break
        yield content[place : place + length]
        place += length


def read_by_protobuf(content: bytes) -> tuple[Any, list[Any]]:
    """The metadata and the nodes; nothing of them is unknown to the schema."""
    first, *rest = delimited(content)
    found = schema()["GlobalMetadata"].FromString(first), [schema()["Node"].FromString(each) for each in rest]
    for message, given_ in zip([found[0], *found[1]], [first, *rest], strict=True):
        assert message.SerializeToString(deterministic=True) == given_, "another way to write the same message"
    return found


TYPES = {"is_cpu_op": "bool_val", "pg_name": "string_val", "comm_size": "int64_val", "comm_type": "int64_val"}


@slow_but("name", SHIPPED, lambda name: not name.startswith("gpt2-1.3b"), always)
def test_protobuf_reads_the_same(name: str) -> None:
    plan = shipped(name)
    groups, files = files_of(plan)
    for rank, content in enumerate(files):
        metadata, nodes = read_by_protobuf(content)
        assert metadata.version == "1.0.0"
        assert {each.name: each.string_val for each in metadata.attr}["plan"] == plan.name
        own = read_nodes(content)
        assert [node.id for node in nodes] == [*range(1, len(own) + 1)]
        for node, other in zip(nodes, own, strict=True):
            assert (node.id, node.name, node.type) == (other.id, other.name, other.type)
            assert (tuple(node.ctrl_deps), tuple(node.data_deps)) == (other.control, other.data)
            assert max((*node.ctrl_deps, *node.data_deps), default=0) < node.id, "it stands behind what it waits for"
            assert node.duration_micros == other.micros
            values = {each.name: getattr(each, TYPES.get(each.name, "int32_val")) for each in node.attr}
            assert values == dict(other.attributes)
            assert all(each.WhichOneof("value") == TYPES.get(each.name, "int32_val") for each in node.attr)
            assert rank in groups[values["pg_name"]] if node.type == NodeType.COLLECTIVE else "pg_name" not in values


def test_numbers_of_any_size_and_texts_of_any_sort() -> None:
    nodes = [
        TraceNode(1, "0F0", NodeType.COMPUTE, micros=2**63),
        TraceNode(
            2**40, "Ünïcode \n " * 40, NodeType.COLLECTIVE, (1,), (1, 127, 128, 2**35), 1, (("comm_size", 2**62),)
        ),
    ]
    content = trace_bytes(nodes, [("plan", "ä")])
    assert read_nodes(content) == nodes
    assert [node.name for node in read_by_protobuf(content)[1]] == [node.name for node in nodes]
    for damaged in (content[:-1], b"", content.replace(b"1.0.0", b"2.0.0"), b"\xff" * 30):
        with pytest.raises(FileError, match="Chakra"):
            read_nodes(damaged)


# Replayed -----------------------------------------------------------------------------------------------------------


def without_network(plan: Plan) -> Plan:
    """The plan where messages and what devices do together take no time."""
    zero = {"sync_ns": 0, "gather_ns": 0}
    return plan.model_copy(
        update={
            "dependencies": tuple(
                replace(each, hops=tuple(replace(hop, latency_ns=0, occupancy_ns=0) for hop in each.hops))
                for each in plan.dependencies
            ),
            "stages": tuple(
                replace(
                    stage,
                    **zero,
                    buckets=tuple(replace(bucket, sync_ns=0) for bucket in stage.buckets),
                    block_groups=tuple(replace(group, unshard_ns=0, reduce_ns=0) for group in stage.block_groups),
                )
                for stage in plan.stages
            ),
            "tied": tuple(replace(each, sync_ns=0) for each in plan.tied),
        }
    )


def predicted_ns(plan: Plan) -> int:
    """The iteration of a plan's programs, whatever their exchanges are written beside."""
    graph = task_graph(plan.workload)
    orders = orders_of(plan, graph)
    return rates(graph, orders, earliest_starts(graph, orders), None).iteration_ns


def chain_of(groups: Mapping[str, Sequence[int]], ranks: Ranks) -> int:
    """How many nodes the longest chain has that compute or exchange."""
    counted = [[replace(node, micros=0) for node in own] for own in ranks]
    return replay(counted, groups, collective=lambda node: 1).iteration_ns


def require_near(plan: Plan, found_ns: int, expected_ns: int, chain: int) -> None:
    """Half of a microsecond for each node of the longest chain, and the nanosecond that takes the place of none."""
    assert abs(found_ns - expected_ns) <= 501 * chain, plan.name


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_plans_take_their_time_on_a_free_network(name: str) -> None:
    plan = shipped(name)
    groups, ranks = ranks_of(plan)
    expected, found = predicted_ns(without_network(plan)), replay(ranks, groups).iteration_ns
    require_near(plan, found, expected, chain_of(groups, ranks))
    if name.endswith("cpu"):
        assert abs(found - expected) < 1e-6 * expected
        assert expected == simulate(plan).iteration_ns  # measured on one machine: its links are free


SCALE = 10_007
"""Of plans in tens of nanoseconds, so that microseconds say something of them."""


def scaled(value: Any, key: str = "") -> Any:
    """A part of a plan's file, all times of which are so many times as long."""
    if isinstance(value, dict):
        return {each: scaled(own, key if key == "starts_ns" else each) for each, own in value.items()}
    if isinstance(value, list):
        return [scaled(own, key) for own in value]
    return SCALE * value if key.endswith("_ns") and isinstance(value, int) else value


def slower(plan: Plan) -> Plan:
    return Plan.model_validate_json(json.dumps(scaled(json.loads(plan.model_dump_json()))))


def ordered(workload: Workload, seed: int) -> Plan:
    """A plan of random orders."""
    graph = task_graph(workload)
    orders = with_links(graph, random_orders(graph, Random(seed))[: len(workload.devices)])
    return assemble(graph, orders, weak_iteration_bound(workload), 0, "by hand")


def require_replayed(plan: Plan) -> tuple[dict[str, Sequence[int]], Ranks]:
    groups, ranks = ranks_of(plan)
    chain = chain_of(groups, ranks)
    require_near(plan, replay(ranks, groups).iteration_ns, predicted_ns(without_network(plan)), chain)
    return groups, ranks


def with_tail(workload: Workload, choose: Random) -> Workload:
    """The same with sums of gradients, some in buckets, or of what two stages share; steps, and gathering."""
    level, last = choose.randint(0, 1), {each.stage: each.duration_ns for each in workload.operations}
    stages = []
    for number, stage in enumerate(workload.stages):
        changes: dict[str, Any] = {"step_ns": choose.choice([0, 3, 7]), "sync_ns": 4, "gradient_bytes": 96}
        if stage.copies > 1 and level:
            changes |= {"zero": 1, "gather_ns": 5, "master_bytes": 96}
        if choose.random() < 0.5:
            ahead = choose.randint(0, last[number])
            buckets = [Bucket(blocks=1, bytes=32 * n, ahead_ns=time, sync_ns=n) for n, time in ((1, ahead), (2, 0))]
            changes |= {"buckets": tuple(buckets), "blocks": (*stage.blocks, f"{stage.blocks[0]} again")}
        stages.append(replace(stage, **changes))
    tied = ()
    if len(stages) > 1 and choose.random() < 0.7:
        own = choose.sample(range(len(stages)), 2)
        devices = tuple(stages[number].devices[:1] for number in own)
        tied = (TiedState(name="table", stages=tuple(own), devices=devices, sync_ns=6, gradient_bytes=8),)
    return replace(workload, stages=tuple(stages), tied=tied)


def _accepted(plan: Plan) -> Plan:
    """The plan, unless its routes are split unlike, which a trace cannot say."""
    for number, stage in enumerate(plan.stages):
        alike = [each for each in plan.stages[:number] if each.blocks[0] == stage.blocks[0]]
        if any((each.shards, Zero.of(each)) != (stage.shards, Zero.of(stage)) for each in alike):
            with pytest.raises(UsageError, match=r"stages\[\d\] sums gradients of blocks of stages\[\d\]"):
                face.export(plan, "chakra")
            reject()
    return plan


@settings(max_examples=some_of(25))
@given(placed(links=True), st.integers(0, 99))
def test_any_stages_in_any_order(drawn: Any, seed: int) -> None:
    """Groups, replicas, routes, unequal sizes, parts, sums: on a free network they take their time."""
    workload = with_tail(drawn.workload, Random(seed)) if seed % 3 else drawn.workload
    require_replayed(_accepted(slower(ordered(workload, seed))))


@pytest.mark.parametrize("late", [False, True])
def test_stages_that_exchange_state_and_wait_inside(late: bool) -> None:
    kinds = set[object]()
    for seed in range(8):
        _, ranks = require_replayed(slower(sharded.random_plan(seed, late=late)[0]))
        kinds |= {node.attribute("comm_type") for own in ranks for node in own if node.type is NodeType.COLLECTIVE}
    assert kinds == {CollectiveType.ALL_GATHER, CollectiveType.REDUCE_SCATTER}


# On slow links ------------------------------------------------------------------------------------------------------


def times_of(plan: Plan) -> Callable[[TraceNode], tuple[int, int]]:
    """Of a message, for how long the plan says that it takes its link, and when it arrives."""
    hops = {
        (each.source_stage, each.payload, hop.source_device, hop.target_device): hop
        for each in plan.dependencies
        for hop in each.hops
    }

    def times(node: TraceNode) -> tuple[int, int]:
        if node.name.endswith((" ready", " go")):
            return 0, 0
        action = Action.parse(node.name)
        hop = hops[action.stage, action.payload, node.attribute("comm_src"), node.attribute("comm_dst")]
        sent = hop if action.part is None else hop.part
        assert node.attribute("comm_size") == max(1, sent.bytes)
        return sent.occupancy_ns, sent.duration_ns

    return times


def whole_times_of(plan: Plan) -> Callable[[TraceNode], tuple[int, int]]:
    """The same where what a message occupies is taken until it has arrived."""
    own = times_of(plan)
    return lambda node: (own(node)[1],) * 2


def plans_own(node: TraceNode) -> int:
    return 1000 * node.micros


@settings(max_examples=some_of(15))
@given(placed_chains(), st.integers(0, 99))
def test_on_links_as_the_plan_has_them_it_takes_as_long(drawn: Any, seed: int) -> None:
    """Between single devices the times of messages are all that a trace does not say."""
    plan = slower(ordered(drawn.workload, seed))
    groups, ranks = ranks_of(plan)
    found = replay(ranks, groups, times_of(plan), plans_own, links_of_plans)
    require_near(plan, found.iteration_ns, simulate(plan).iteration_ns, chain_of(groups, ranks))


def test_exchanges_of_the_plans_times_take_as_long() -> None:
    """Where devices exchange state the plan's times of that are in the trace, too."""
    for seed in range(8):
        plan = slower(sharded.random_plan(seed)[0])
        groups, ranks = ranks_of(plan)
        found = replay(ranks, groups, times_of(plan), plans_own, links_of_plans)
        require_near(plan, found.iteration_ns, predicted_ns(plan), chain_of(groups, ranks))


def made_ns(node: TraceNode, rank: int, found: Replay) -> int:
    return max((found.end[rank, other] for other in node.data), default=0)


def require_explained(ranks: Ranks, found: Replay) -> None:
    """From when a message is made until it leaves, others leave its rank one behind the other."""
    for rank, own in enumerate(ranks):
        taken = sorted(
            (found.begin[rank, node.id], found.end[rank, node.id])
            for node in own
            if node.type in (NodeType.SEND, NodeType.COLLECTIVE)
        )
        for node in own:
            at, leaves = made_ns(node, rank, found), found.begin[rank, node.id]
            for begin, end in taken if node.type is NodeType.SEND else ():
                if begin <= at < min(end, leaves):
                    at = end
            assert at >= leaves or node.type is not NodeType.SEND, f"rank {rank}: {node.name} waits for nothing"


def waited_ns(ranks: Ranks, found: Replay) -> int:
    """Ns on a longest chain of a replay in which messages that are made have not left."""
    nodes = {(rank, node.id): node for rank, own in enumerate(ranks) for node in own}
    name = ("comm_src", "comm_dst", "comm_tag")
    sends = {tuple(map(node.attribute, name)): key for key, node in nodes.items() if node.type is NodeType.SEND}
    key, waited = max(found.end, key=found.end.__getitem__), 0
    while True:
        if nodes[key].type is NodeType.RECEIVE:
            key = sends[tuple(map(nodes[key].attribute, name))]
            waited += found.begin[key] - made_ns(nodes[key], key[0], found)
        node = nodes[key]
        before = node.data if node.type is NodeType.SEND else (*node.control, *node.data)
        if not before:
            return waited
        key = max(((key[0], other) for other in before), key=found.end.__getitem__)


def test_on_slow_links_the_difference_is_messages_that_wait_for_their_port() -> None:
    """ASTRA-sim lets one message at a time leave a rank, a plan one on each link: no other difference is there."""
    differences = []
    for places in ([0, 1, 2, 3], [0, 1, 2, 0, 1, 2], [0, 1, 2, 2, 1, 0]):  # one-to-one, circular, V
        workload = chain_workload(len({*places}), 6, forward=40, backward=90, devices=[(place,) for place in places])
        dependencies = tuple(
            replace(each, hops=tuple(replace(hop, occupancy_ns=120, latency_ns=9) for hop in each.hops))
            for each in workload.dependencies
        )
        plan = slower(ordered(replace(workload, dependencies=dependencies), 7))
        groups, ranks = ranks_of(plan)
        ours = replay(ranks, groups, times_of(plan), plans_own, links_of_plans)
        theirs = replay(ranks, groups, whole_times_of(plan), plans_own, one_port)
        require_near(plan, ours.iteration_ns, predicted_ns(plan), chain_of(groups, ranks))
        assert all(theirs.begin[key] >= begin for key, begin in ours.begin.items())
        difference = theirs.iteration_ns - ours.iteration_ns
        require_explained(ranks, theirs)
        assert 0 <= difference <= waited_ns(ranks, theirs)
        differences.append(difference)
    assert max(differences) > 0


# What becomes of a plan ---------------------------------------------------------------------------------------------


def test_a_device_keeps_its_order_and_messages_their_names() -> None:
    plan = shipped("tessel-v")
    _, ranks = ranks_of(plan)
    for own, program in zip(ranks, plan.programs, strict=True):
        computed = [node for node in own if node.type is NodeType.COMPUTE]
        assert [node.name for node in computed] == [text for text in program if "_" not in text]
        for before, after in zip(computed, computed[1:], strict=False):
            assert before.id in after.control
        for node in own:
            if node.type is NodeType.RECEIVE:
                assert (node.control, node.data) == ((), ())
        assert {node.name for node in own} == set(program)


def test_gradients_are_summed_where_links_of_the_plan_are_free() -> None:
    """Two replicas of two stages, of a machine without links, which divide the optimizer's state (ZeRO 1).

    Gradients are reduced and scattered, those of the shared table summed, and each has half of what a step changes.
    """
    plan = shipped("gpt2-124m-cpu")
    groups, ranks = ranks_of(plan)
    sums = [node for own in ranks for node in own if node.type is NodeType.COLLECTIVE]
    assert groups == {"1": [0, 1], "2": [2, 3]}
    table = sum(each.gradient_bytes for each in plan.tied)
    sizes = {each: set[tuple[str, int]]() for each in CollectiveType}
    for node in sums:
        sizes[node.attribute("comm_type")].add((node.attribute("pg_name"), node.attribute("comm_size")))
    own = [stage.gradient_bytes - table * (number in plan.tied[0].stages) for number, stage in enumerate(plan.stages)]
    half = [stage.parameter_bytes // 2 for stage in plan.stages]
    assert {kind: found for kind, found in sizes.items() if found} == {
        CollectiveType.ALL_REDUCE: {("1", table)},
        CollectiveType.REDUCE_SCATTER: {("1", own[0]), ("1", own[3]), ("2", own[1]), ("2", own[2])},
        CollectiveType.ALL_GATHER: {("1", half[0]), ("1", half[3]), ("2", half[1]), ("2", half[2])},
    }


@pytest.mark.parametrize("zero", [0, 1])
def test_what_shards_have_whole_is_summed_by_all(zero: int) -> None:
    """In collectives that together take as long as the plan's sums; replicas that divide state sum halves of it."""
    rows = [CostRow(microbatch_size=1, forward_ns=10**6, backward_ns=10**6, shards=2, sequence_parallel=True)]
    block = Block(id="b", operator="layer", parameters=9_000_000, whole_parameters=1_000_000, costs=tuple(rows))
    profile = Profile(name="b", source=Source(method="literature"), recipe=Recipe(name="fp32"), blocks=(block,))
    how: dict[str, Any] = {"pp": 1, "tp": 2, "dp": 2, "zero": zero, "mini_batch": 4, "microbatch_size": 2}
    plan = face.search(profile, cluster=sharded.pairs(4), deterministic=True, **how).plan
    (stage,) = plan.stages
    groups, ranks = ranks_of(plan)
    found = Counter[tuple[object, ...]]()
    for own in ranks:
        sums = [node for node in own if "SUM" in node.name]
        assert sum(node.micros for node in sums) == micros(stage.sync_ns)
        for node in sums:
            members = tuple(groups[str(node.attribute("pg_name"))])
            found[node.attribute("comm_type"), node.attribute("comm_size"), members] += 1
    assert stage.whole_gradient_bytes == 4_000_000
    neighbours, apart, every = ((0, 1), (2, 3)), ((0, 2), (1, 3)), (0, 1, 2, 3)
    expected: dict[tuple[object, ...], int]
    if zero:
        expected = {(CollectiveType.REDUCE_SCATTER, 20_000_000, each): 2 for each in apart}
        expected |= {(CollectiveType.ALL_REDUCE, 2_000_000, each): 2 for each in neighbours}
    else:
        expected = {(CollectiveType.ALL_REDUCE, 16_000_000, each): 2 for each in apart}
        expected[CollectiveType.ALL_REDUCE, 4_000_000, every] = 4
    assert found == expected


def test_what_a_trace_cannot_say_is_refused_with_its_place() -> None:
    chain = chain_plan(2, 4)
    silent = tuple(replace(each, hops=()) for each in chain.dependencies)
    with pytest.raises(
        UsageError, match=r"dependencies\[\d\]: 1F waits for 0F, which runs on other devices and sends it"
    ):
        face.export(chain.model_copy(update={"dependencies": silent}), "chakra")
    plan = shipped("gpt2-124m-cpu")

    def changed(**changes: Any) -> Plan:
        return plan.model_copy(update={"stages": tuple(replace(stage, **changes) for stage in plan.stages)})

    with pytest.raises(UsageError, match=r"stages\[\d\].expert is 2: a plan does not say how many of its bytes"):
        face.export(changed(expert=2), "chakra")
    with pytest.raises(UsageError, match=r"stages\[\d\].configurations: a plan does not say"):
        face.export(changed(configurations=("samples2",) * len(plan.stages[0].blocks)), "chakra")
    with pytest.raises(UsageError, match=r"stages\[\d\].zero is 2, exchanged inside of actions"):
        face.export(changed(zero=2, sync_ns=5, gather_ns=1), "chakra")


def test_loops_are_written_out_or_refused_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = looped_plans(chain_workload(3, 8), 8, 40)
    assert plans
    for plan in plans.values():
        _, ranks = ranks_of(plan)
        assert [node.name for node in ranks[0]] == [node.name for node in ranks_of(plan.unrolled())[1][0]]
        monkeypatch.setattr(traces, "MAX_ENTRIES", 100)
        with pytest.raises(UsageError, match=r"loop.copies is \d+, so that programs have \d+ entries together"):
            face.export(plan, "chakra")
        monkeypatch.undo()


def test_folded_plans_of_many_devices_are_refused_before_they_are_unfolded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the entries of all players of a program, as those of its unfolded form are."""
    folded, devices, _, _ = plans_of(0, monkeypatch)
    monkeypatch.setattr(traces, "MAX_ENTRIES", 10)
    with pytest.raises(UsageError, match="entries together") as said:
        face.export(devices, "chakra")
    monkeypatch.setattr(traces, "unfolded", None)
    with pytest.raises(UsageError, match=re.escape(str(said.value))):
        face.export(folded, "chakra")


def test_what_traces_leave_to_the_simulator_is_said() -> None:
    notes = face.export(shipped("tessel-m"), "chakra").notes
    assert "not the times that they take in the plan" in notes[0]
    assert any("tensor parallel devices exchange inside of actions" in note for note in notes)
    assert any("messages of a byte ('ready', 'go')" in note for note in notes)
    short = face.export(chain_plan(2, 4, forward=1700, backward=4000), "chakra").notes
    assert any("F takes 1.7us in the plan, 2 us in the trace" in note for note in short), short


def test_the_verb_makes_a_folder(tmp_path: Any) -> None:
    plan, folder = ROOT / "plans/tessel-v.json", tmp_path / "new"
    refused = pipeplan("export", plan, "--to", "chakra")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--to chakra writes 5 files; give -o FOLDER" in refused.stderr
    done = pipeplan("export", plan, "--to", "chakra", "-o", folder)
    assert (done.returncode, done.stdout) == (0, "")
    assert "5 files" in done.stderr
    assert {path.name for path in folder.iterdir()} == {"groups.json", *(f"plan.{rank}.et" for rank in range(4))}
    made = face.export(plan, "chakra").files
    for name, own in made.items():
        assert (folder / name).read_bytes() == (own.encode() if isinstance(own, str) else own)
