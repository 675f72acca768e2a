"""Closed forms price groups on a cluster's first devices; plans where they lie. Which groups lie inside a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

import pipeplan
from pipeplan.checker import check
from pipeplan.costs.communication import Exchange, time_of_groups
from pipeplan.files import Block, Cluster, DeviceKind, PlacedStage, Placement, Profile
from pipeplan.planning.candidates import Batch, PlacementCandidate, uniform_layouts
from pipeplan.planning.request import Request
from pipeplan.planning.trials import Trial, on_cluster

NODES = Cluster.of("nodes", 12, levels=[("node", 4, "1us", "100GB"), ("net", 12, "10us", "2GB")])
H100S = Cluster.of("h100s", 64, levels=[("nvlink", 8, "5us", "219.6GB"), ("infiniband", 64, "10us", "24.4GB")])
H100S = H100S.model_copy(
    update={
        "levels": (H100S.levels[0], H100S.levels[1].model_copy(update={"node_bandwidth_bytes_per_s": 195_200_000_000}))
    }
)
"""As ``example cluster-h100`` has them: a network card for each device, for all of a node to use."""


def test_a_plan_has_exchanges_where_its_groups_lie_and_closed_forms_on_the_first_devices() -> None:
    """Of four groups of three in nodes of four one lies in several nodes, and waits for a ring over the network."""
    blocks = [Block.of(f"b{n}", "1ms", "2ms", trained=1_000_000) for n in range(4)]
    profile = Profile.of("kept", blocks, recipe="fp32")
    asked = {"cluster": NODES, "mini_batch": 12, "zero": 3, "deterministic": True, "time_limit": 1}
    found = pipeplan.search(profile, scheduler="1f1b", dp=3, pp=4, zero_exchange="inside", **asked)
    check(found.plan, profile=profile, cluster=NODES).require("the plan")
    ring = 2 * (10_000 + 4_000_000 / 3 / 2e9 * 1e9)  # two steps, each a third of the parameters, or of the gradients
    spread = [len({device // 4 for device in stage.devices}) > 1 for stage in found.plan.stages]
    assert sorted(spread) == [False, False, False, True]
    took = {(each.stage, each.kind): each.duration_ns for each in found.plan.operations}
    for stage, is_spread in enumerate(spread):
        assert took[stage, "F"] == pytest.approx(ring if is_spread else 1_000_000)
        assert took[stage, "B"] == pytest.approx(2 * ring if is_spread else 2_000_000)
    rows = [
        each
        for each in uniform_layouts(Request.of(profile, replicas=3, positions=4, **asked))
        if each.choice.strategy == "one-to-one"
    ]
    assert rows
    assert {each.parts.exchanged for each in rows} == {0.0}, "what they wait for on devices 0 to 2"
    assert all(each.least_ns <= found.plan.predicted.iteration_ns for each in rows)


def test_positions_that_nobody_splits_lie_where_a_candidate_is_quickest() -> None:
    """Eight in nodes of seven: in seven of eight replicas a message would leave the node, which all wait for.

    Where links are least busy sums of gradients would cross nodes in many rings of few devices each.
    """
    cluster = pipeplan.example_cluster("cluster-h100", devices=512)
    profile = pipeplan.example("gpt2-1.3b", device="h100-80gb")
    request = Request.of(profile, cluster=cluster, devices=448, mini_batch=2048, positions=7, replicas=64)
    blocks = [block.id for block in profile.blocks]
    cuts = [len(blocks) * place // 7 for place in range(8)]
    stages = tuple(
        PlacedStage(blocks=tuple(blocks[begin:end]), devices=tuple(range(64 * n, 64 * n + 64)), replicas=64)
        for n, (begin, end) in enumerate(pairwise(cuts))
    )
    placement = Placement(strategy="one-to-one", num_devices=448, stages=stages)
    candidate = PlacementCandidate(placement, Batch(16, 128), False, "by hand")
    chosen, least_busy = Trial.where_quick(request, candidate), on_cluster(request, candidate)
    assert least_busy is not None
    busy = Trial.of(request, least_busy)
    for trial in (chosen, busy):
        trial.look_plainly()
    assert chosen.value_ns is not None
    assert busy.value_ns is not None
    assert chosen.bound_ns < busy.bound_ns
    assert 1.05 * chosen.value_ns < busy.value_ns


def test_positions_stay_on_devices_that_have_room_for_them() -> None:
    """Half of the devices have room for either position, the others for one: in another order it would not fit."""
    blocks = [Block.of(f"b{n}", "1ms", "2ms", trained=10_000_000 if n < 2 else 10) for n in range(4)]
    profile = Profile.of("unlike", blocks, recipe="fp32")
    kinds = [DeviceKind(name=name, count=8, memory_bytes=size) for name, size in (("large", 10**9), ("small", 10**8))]
    levels = NODES.levels[0], NODES.levels[1].model_copy(update={"group_size": 16})
    cluster = NODES.model_copy(update={"devices": tuple(kinds), "levels": levels})
    stages = [
        PlacedStage(blocks=own, devices=tuple(range(begin, begin + 8)), replicas=8)
        for own, begin in ((("b0", "b1"), 0), (("b2", "b3"), 8))
    ]
    placement = Placement(strategy="one-to-one", num_devices=16, stages=tuple(stages))
    request = Request.of(profile, cluster=cluster, devices=16, mini_batch=64)
    candidate = PlacementCandidate(placement, Batch(8, 8), False, "by hand")
    for trial in (Trial.of(request, candidate), Trial.where_quick(request, candidate)):
        trial.look_plainly()
        assert trial.value_ns is not None


Order = Callable[[int, int, int], int]


def groups(shards: int, context: int, place: Order) -> tuple[list[list[int]], list[list[int]]]:
    """Those that split blocks and those that share sequences, of all replicas of 64 devices."""
    begins = range(0, 64, shards * context)
    each, parts = range(shards), range(context)
    split = [[place(begin, shard, part) for shard in each] for begin in begins for part in parts]
    shared = [[place(begin, shard, part) for part in parts] for begin in begins for shard in each]
    return split, shared


@pytest.mark.parametrize(
    ("shards", "context", "longer_ms"),
    [(4, 2, 0.0), (2, 4, 0.0), (2, 2, 0.0), (8, 2, 3.15), (4, 4, 3.75), (2, 8, 2.84)],
)
def test_shards_lie_inside_sequences(shards: int, context: int, longer_ms: float) -> None:
    """Messages of a layer of Llama 70B and 8,192 tokens on H100s, in ms more with sequences inside and shards outside.

    Shards gather and scatter activations, sequences keys and values. Where both lie in a node it is no matter.
    """
    activations, keys = 8192 // context * 8192 * 2, 8192 * 2 * 1024 // shards * 2

    def took(place: Order) -> float:
        split, shared = groups(shards, context, place)
        several: Sequence[tuple[int, str, int, list[list[int]]]] = (
            (6, "all_gather", activations, split),
            (4, "reduce_scatter", activations, split),
            (2, "all_gather", keys, shared),
            (1, "reduce_scatter", keys, shared),
        )
        return sum(count * time_of_groups(H100S, Exchange(what, size), those) for count, what, size, those in several)

    inside = took(lambda begin, shard, part: begin + shard + shards * part)
    outside = took(lambda begin, shard, part: begin + part + context * shard)
    assert (outside - inside) / 1e6 == pytest.approx(longer_ms, abs=0.01)
