"""Configurations of operators and their costs, and graphs of whole models."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest

from builders.states import training_state
from pipeplan.costs import state_of
from pipeplan.costs.clusters import named_cluster
from pipeplan.costs.devices import device_preset
from pipeplan.costs.layouts import Layout, MeshSplit
from pipeplan.costs.resharding import Resharding
from pipeplan.errors import UsageError
from pipeplan.examples.models import MODELS, model
from pipeplan.files import Block, CostRow, Edge, Profile, Source
from pipeplan.sharding import operator_kinds as ops
from pipeplan.sharding.cost_model import CostModel, CostOptions, cost_model
from pipeplan.sharding.details import details_of
from pipeplan.sharding.expansion import expand
from pipeplan.sharding.operators import Axis, Configuration, OperatorScale, Splittable, configurations
from pipeplan.sharding.tracking import track

V100 = device_preset("v100-16gb")
PLAIN = CostOptions()


CUT = ("gpt2-124m", "bert-large", "tessel-mt5-1.8b", "tessel-flava", "flexpipe-clip-9.7b", "mmt", "dlrm", "candle-uno")
"""A model of each kind that we write."""


def axes(**sizes: int) -> tuple[Axis, ...]:
    return tuple(Axis(name, size) for name, size in sizes.items())


BATCH = {"samples": 64}
SPLIT_OPERATORS: list[tuple[Splittable, int]] = [
    (ops.Product(axes(**BATCH, places=32, rows=64, columns=128), 2), 257),
    (ops.Convolution(axes(**BATCH, places=32, rows=64, columns=128), 2), 257),
    (ops.Attention((*axes(**BATCH, places=64), Axis("features", 16, 64)), 2), 121),
    (ops.CrossAttention((*axes(**BATCH, places=64), Axis("features", 16, 64)), 2, memory=32), 121),
    (ops.Embedding(axes(**BATCH, places=32, rows=512, columns=64), 2, learns=False), 257),
    (ops.Norm(axes(**BATCH, places=32, features=64), 2), 121),
    (ops.BatchNorm(axes(**BATCH, places=32, features=64), 2), 121),
    (ops.Activation(axes(**BATCH, places=32, features=64), 2), 121),
    (ops.Add(axes(**BATCH, places=32, features=64), 2), 121),
    (ops.MaxPool(axes(**BATCH, places=32, features=64), 2), 121),
    (ops.Recurrent(axes(**BATCH, rows=64, columns=64), 2, steps=4), 121),
    (ops.Loss(axes(**BATCH, places=32, features=512), 2), 121),
]


@pytest.mark.parametrize(("operation", "count"), SPLIT_OPERATORS, ids=lambda each: type(each).__name__)
def test_sizes_of_configuration_sets_on_16_devices(operation: Splittable, count: int) -> None:
    """Three axes 121, four 257: all meshes of up to three dimensions, copies allowed, where everything divides."""
    found = configurations(operation, OperatorScale(), V100, Resharding(named_cluster("tensoropt"), 16))
    assert len(found) == count
    assert len({each.name for each in found}) == count


@pytest.mark.parametrize("operation", [each for each, _ in SPLIT_OPERATORS], ids=lambda each: type(each).__name__)
def test_shares_hold_and_compute_no_more_than_the_whole(operation: Splittable) -> None:
    scale = OperatorScale(state=training_state(operation.parameters * 2, operation.parameters * 12))
    alone = configurations(operation, scale, V100, Resharding(None, 1))[0]
    for each in configurations(operation, scale, V100, Resharding(None, 16)):
        parts = prod(split.extent for name, split in each.splits.items() if name in operation.weighted)
        assert each.gradient_bytes == -(-alone.gradient_bytes // parts)
        assert each.compute_ns <= alone.compute_ns
        assert each.compute_ns * prod(split.extent for split in each.splits.values()) >= alone.compute_ns * 0.99
        assert each.inside_bytes <= alone.inside_bytes


def test_a_product_split_by_rows_is_a_sum_and_by_columns_gives_one_back() -> None:
    product = ops.Product(axes(samples=64, places=1, rows=64, columns=64), 2)
    scale = OperatorScale(state=training_state(8192, 65536 - 2 * 8192))
    found = {
        each.name: each for each in configurations(product, scale, V100, Resharding(named_cluster("tensoropt"), 16))
    }
    rows, columns = MeshSplit(16, 1), MeshSplit(16, 1)
    assert found["rows16"].output == Layout(partial=rows)
    assert found["rows16"].input_gradients == (Layout(features=rows),)
    assert found["columns16"].output == Layout(features=columns)
    assert found["columns16"].input_gradients == (Layout(partial=columns),)
    assert found["samples16"].sync_ns > 0
    assert found["rows16"].sync_ns == found["copies16"].sync_ns == 0
    assert found["samples2-columns8"].state_bytes == 65536 // 8
    assert found["copies2-samples8"].output == Layout(samples=MeshSplit(8, 1))


def cheapest(found: tuple[Configuration, ...]) -> Configuration:
    return min(found, key=lambda each: each.compute_ns + each.sync_ns)


@pytest.mark.parametrize("name", [*CUT, *(name for name in MODELS if name.startswith("tensoropt"))])
def test_every_model_is_cut_into_operators_that_add_up(name: str) -> None:
    """In closed forms an estimated profile's blocks cost what their operators do; no parameter is lost."""
    profile = model(name, device="v100-16gb", microbatch_sizes=[16])
    whole = expand(profile, 16)
    told = dict.fromkeys((block.id for block in profile.blocks), 0.0)
    learned = dict.fromkeys(told, 0)
    for node in whole.nodes:
        if node.operation.kind == "block":
            told[node.block] = np.nan
            continue
        told[node.block] += node.operation.times(node.operation.numbers(), V100).forward_ns
        learned[node.block] += node.operation.parameters
    split = [block for block in profile.blocks if not np.isnan(told[block.id])]
    assert len(split) >= len(profile.blocks) - 1  # the contrastive loss
    for block in split:  # without causal masks, learned positions, and the transform before BERT's head
        if block.operator not in ("embedding", "head", "norm"):  # and the bias of T5's norms
            assert told[block.id] == pytest.approx(
                block.costs[0].forward_ns, rel=0.5 if "attention" in block.operator else 0.01
            )
            assert learned[block.id] == pytest.approx(block.parameters, rel=0.01)
    assert sum(learned.values()) == pytest.approx(sum(block.parameters for block in split), rel=0.02)
    names = {node.name for node in whole.nodes}
    assert all({link.source, link.target} <= names for link in whole.links)


@pytest.mark.parametrize("changed", [{"heads": 10**9}, {"hidden": 1}, {"sequence": 10**9, "hidden": 10**9}])
def test_blocks_of_dimensions_that_cannot_be_stay_whole(changed: dict[str, int]) -> None:
    profile = model("gpt2-124m", device="v100-16gb", microbatch_sizes=[16])
    odd = next(block for block in profile.blocks if block.operator == "attention")
    blocks = tuple(
        block.model_copy(update={"dimensions": block.dimensions | changed}) if block is odd else block
        for block in profile.blocks
    )
    profile = profile.model_copy(update={"blocks": blocks})
    kinds = {node.name: node.operation.kind for node in expand(profile, 16).nodes}
    assert [name for name, kind in kinds.items() if kind == "block"] == [odd.id]
    assert cost_model(profile, named_cluster("tensoropt", 2), 2, 16).configurations


def speech(devices: int, options: CostOptions = PLAIN) -> CostModel:
    profile = model("tensoropt-rnn", device="v100-16gb")
    return cost_model(profile, named_cluster("tensoropt", devices), devices, 64, options=options)


def test_one_device_holds_and_takes_what_the_profile_says() -> None:
    profile = model("tensoropt-vgg16", device="v100-16gb", microbatch_sizes=[16])
    found = track(cost_model(profile, None, 1, 16).graph)
    rows = [block.costs[0] for block in profile.blocks]
    assert found.time_ns.tolist() == [
        pytest.approx(sum(row.forward_ns + (row.backward_ns or 0) for row in rows), rel=1e-4)
    ]
    held = sum(row.activation_bytes for row in rows)
    held += sum(state_of(block, profile.recipe).total for block in profile.blocks)
    again = sum(
        16 * edge.bytes_per_sample for edge in profile.edges if "convolution" in edge.source or "linear" in edge.source
    )
    assert held - again <= found.memory_bytes[0] <= held


def test_tensor_reuse_only_adds_strategies() -> None:
    """Keeping one copy costs time and saves memory: with it the frontier lies nowhere above the one without."""
    free, kept = track(speech(4).graph), track(speech(4, CostOptions(reuse=False)).graph)
    assert free.memory_bytes[0] <= kept.memory_bytes[0]
    for memory, time in zip(kept.memory_bytes, kept.time_ns, strict=True):
        assert free.time_ns[free.memory_bytes <= memory].min() <= time


def test_inputs_loaded_by_data_parallelism_cost_their_resharding() -> None:
    free, loaded = track(speech(4).graph), track(speech(4, CostOptions(data_parallel_loading=True)).graph)
    assert loaded.time_ns[-1] >= free.time_ns[-1]
    names = [node.name for node in speech(4, CostOptions(data_parallel_loading=True)).graph.nodes]
    assert "layer0/cell/data" in names
    profile = model("tensoropt-rnn", device="v100-16gb")
    with pytest.raises(UsageError, match="--data-parallel-loading"):
        cost_model(profile, None, 7, 64, options=CostOptions(data_parallel_loading=True))


def test_alike_operators_and_tensors_share_their_tables() -> None:
    graph = speech(4).graph
    cells = [node.costs for node in graph.nodes if node.name in ("layer1/cell", "layer2/cell", "layer3/cell")]
    assert cells[0] is cells[1] is cells[2]
    between = [edge.costs for edge in graph.edges if edge.target in ("layer2/cell", "layer3/cell")]
    assert between[0] is between[1]


def opaque(shards: tuple[int, ...] = (1, 2)) -> Profile:
    """Two blocks of an unknown kind with a row per number of shards."""
    rows = tuple(
        CostRow(
            microbatch_size=8,
            shards=count,
            forward_ns=8000 // count,
            backward_ns=16000 // count,
            activation_bytes=800 // count,
        )
        for count in shards
    )
    return Profile(
        name="opaque",
        source=Source(method="measured", device="v100-16gb"),
        blocks=tuple(Block(id=name, operator="something", parameter_bytes=100, costs=rows) for name in "ab"),
        edges=(Edge(source="a", target="b", bytes_per_sample=10),),
    )


def test_unknown_blocks_are_split_by_samples_and_by_their_rows() -> None:
    built = cost_model(opaque(), named_cluster("tensoropt", 4), 4, 8)
    names = {each.name for each in built.configurations["a"]}
    assert names == {
        "copies4", "copies2-samples2", "samples2-copies2", "samples4", "copies2-shards2", "shards2-copies2",
        "samples2-shards2", "shards2-samples2",
    }  # fmt: skip
    by_name = {each.name: each for each in built.configurations["a"]}
    assert by_name["samples2-shards2"].forward_ns == 2000
    assert by_name["samples2-shards2"].state_bytes == 100
    assert by_name["samples4"].inside_bytes == 200


def test_whole_blocks_are_asked_for() -> None:
    profile = model("gpt2-124m", device="v100-16gb", microbatch_sizes=[4], shards=(1, 2, 4))
    built = cost_model(profile, named_cluster("tensoropt", 4), 4, 4, options=CostOptions(blocks=True))
    assert [node.name for node in built.graph.nodes] == [block.id for block in profile.blocks]
    assert {"shards4", "samples2-shards2"} <= {each.name for each in built.configurations["layer0.attention"]}


def test_more_micro_batches_share_the_sum_of_gradients_and_hold_more() -> None:
    profile = model("tensoropt-rnn", device="v100-16gb")
    once, often = (
        cost_model(profile, named_cluster("tensoropt", 4), 4, 64, options=CostOptions(microbatches=n, in_flight=n))
        for n in (1, 4)
    )
    one, four = (built.configurations["layer0/cell"] for built in (once, often))
    assert [each.sync_ns for each in one] == [each.sync_ns for each in four]
    first, second = (built.graph.nodes[0].costs for built in (once, often))
    place = next(index for index, each in enumerate(one) if each.name == "samples4")
    assert first.time_ns[place] - second.time_ns[place] == pytest.approx(one[place].sync_ns * 3 / 4, abs=2)
    assert second.memory_bytes[place] > first.memory_bytes[place]


def test_profiles_of_unknown_devices_name_the_remedy() -> None:
    profile = opaque().model_copy(update={"source": Source(method="measured", device="abacus")})
    with pytest.raises(UsageError, match="--device"):
        cost_model(profile, None, 2, 8)


def test_more_devices_never_need_more_memory() -> None:
    least = [track(speech(devices).graph).memory_bytes[0] for devices in (1, 2, 4)]
    assert all(more < fewer for fewer, more in pairwise(least))


@pytest.mark.parametrize("name", ["tensoropt-rnn", "tensoropt-vgg16", "candle-uno-8"])
def test_details_of_strategies_add_up(name: str) -> None:
    profile = model(name, device="v100-16gb").model_copy(update={"step_bytes_per_s": 10**11})
    built = cost_model(profile, named_cluster("tensoropt", 4), 4, 8)
    found = track(built.graph)
    for point in (0, len(found.memory_bytes) // 2, -1):
        strategy = found.strategy(range(len(found.memory_bytes))[point])
        details = details_of(built, strategy)
        assert details.memory_bytes == strategy.memory_bytes
        assert details.step_ns > 0
        assert details.compute_ns + details.network_ns + details.step_ns == pytest.approx(
            strategy.time_ns, abs=3 * len(details.tensors)
        )
        for each in details.tensors:
            for moves in (each.forward, each.again, each.backward):
                assert all(one.target == other.source for one, other in pairwise(moves))
