"""The shapes of the literature: structure, work per device, exact shares, and files that stay as they are."""

from __future__ import annotations

import pytest

from pipeplan.costs import build_workload
from pipeplan.errors import UsageError
from pipeplan.examples import SHAPES, ShapeCosts, shape
from pipeplan.files import Profile, parse, to_json
from support.marks import always, slow_but
from support.paths import ROOT

MS = 1_000_000
EVEN = ("nn", "k")

WORK = {"v": 4, "x": 8, "m": 6, "mllm": 8, "nn": 8, "k": 6, "circular": 4, "zbv": 4}
"""ms of work on every device for one micro-batch: forward 1, backward 3, shared 1 and 1."""


def work(profile: Profile) -> list[int]:
    """[device] ns of forward and backward, from the rows and the placement alone."""
    rows = {block.id: block.costs[0] for block in profile.blocks}
    assert profile.placement is not None
    loads = [0] * profile.placement.num_devices
    for stage in profile.placement.stages:
        for device in stage.devices:
            loads[device] += sum(rows[id_].forward_ns + (rows[id_].backward_ns or 0) for id_ in stage.blocks)
    return loads


def held(profile: Profile, field: str = "activation_bytes") -> list[int]:
    """[device] bytes of one micro-batch, or another field of the rows."""
    rows = {block.id: block.costs[0] for block in profile.blocks}
    assert profile.placement is not None
    taken = [0] * profile.placement.num_devices
    for stage in profile.placement.stages:
        for device in stage.devices:
            taken[device] += sum(getattr(rows[id_], field) or 0 for id_ in stage.blocks)
    return taken


def drawn(profile: Profile) -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
    """Devices of each stage, and edges between stages; every stage has one block."""
    assert profile.placement is not None
    stages = profile.placement.stages
    index = {stage.blocks[0]: position for position, stage in enumerate(stages)}
    assert all(len(stage.blocks) == 1 for stage in stages)
    return [stage.devices for stage in stages], sorted((index[e.source], index[e.target]) for e in profile.edges)


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [(name, count) for name in SHAPES for count in (1, 2, 3, 4, 6, 8, 32) if name not in EVEN or count % 2 == 0],
)
def test_every_device_has_the_same_work(name: str, num_devices: int) -> None:
    assert work(shape(name, num_devices)) == [WORK[name] * MS] * num_devices


def test_shapes_as_drawn_on_four_devices() -> None:
    everywhere = (0, 1, 2, 3)
    one = [(0,), (1,), (2,), (3,)]
    line = [(0, 1), (1, 2), (2, 3)]
    assert drawn(shape("v", 4)) == (one, line)
    assert drawn(shape("x", 4)) == (one + one[::-1], [*line, (4, 5), (5, 6), (6, 7)])
    assert drawn(shape("m", 4)) == ([everywhere, *one], [*line, (3, 4)])
    assert drawn(shape("mllm", 4)) == ([everywhere, *one, everywhere], [*line, (3, 4), (4, 5)])
    assert drawn(shape("nn", 4)) == (
        [everywhere, *one[:2], everywhere, *one[2:]],
        [*line, (3, 4), (4, 5)],
    )
    assert drawn(shape("k", 4)) == ([*one, everywhere], [(0, 1), (1, 4), (2, 3), (3, 4)])
    assert drawn(shape("zbv", 4))[0] == one + one[::-1]
    assert drawn(shape("circular", 3, chunks=3))[0] == [(0,), (1,), (2,)] * 3


@pytest.mark.parametrize("name", SHAPES)
def test_shared_blocks_are_spread_over_all_devices(name: str) -> None:
    profile = shape(name, 4)
    shared = [block for block in profile.blocks if block.shared]
    assert len(shared) == {"m": 1, "mllm": 2, "nn": 2, "k": 1}.get(name, 0)
    for block in shared:
        assert [row.shards for row in block.costs] == [4]
        assert block.costs[0].activation_bytes == (1_000_000_000 if name == "k" else 0)
    assert all(row.shards == 1 for block in profile.blocks if not block.shared for row in block.costs)
    assert not any(block.parameters or block.stated for block in profile.blocks)


@pytest.mark.parametrize("name", SHAPES)
def test_latency_is_on_chain_edges_that_change_device(name: str) -> None:
    profile = shape(name, 4, costs=ShapeCosts(comm_ns=7))
    assert profile.placement is not None
    devices = {stage.blocks[0]: stage.devices for stage in profile.placement.stages}
    for edge in profile.edges:
        ends = devices[edge.source], devices[edge.target]
        chain = all(len(end) == 1 for end in ends)
        assert edge.transfer_ns == (7 if chain and ends[0] != ends[1] else 0)


@pytest.mark.parametrize(("name", "chunks"), [("circular", 3), ("circular", 7), ("zbv", None)])
def test_chunks_share_a_devices_costs_exactly(name: str, chunks: int | None) -> None:
    costs = ShapeCosts(forward_ns=10, input_grad_ns=11, weight_grad_ns=13, activation_bytes=101, weight_grad_bytes=103)
    profile = shape(name, 2, chunks=chunks, costs=costs)
    for field in ("forward_ns", "input_grad_ns", "weight_grad_ns", "activation_bytes", "weight_grad_bytes"):
        assert held(profile, field) == [getattr(costs, field)] * 2
        values = {getattr(block.costs[0], field) for block in profile.blocks}
        assert max(values) - min(values) <= 1
    assert held(profile, "backward_ns") == [24, 24]
    for row in (block.costs[0] for block in profile.blocks):
        assert row.backward_ns == (row.input_grad_ns or 0) + (row.weight_grad_ns or 0)


def test_default_backward_is_shared_by_the_chunks() -> None:
    assert held(shape("circular", 2, chunks=3), "backward_ns") == [3 * MS] * 2


def test_split_costs_are_the_chains_alone() -> None:
    costs = ShapeCosts(input_grad_ns=2, weight_grad_ns=3, shared_forward_ns=5, shared_backward_ns=7)
    for block in shape("mllm", 2, costs=costs).blocks:
        row = block.costs[0]
        assert (row.input_grad_ns, row.weight_grad_ns, row.backward_ns) == (
            (None, None, 7) if block.shared else (2, 3, 5)
        )


@slow_but("name", SHAPES, lambda name: name in ("v", "mllm"), always)
def test_thousands_of_devices(name: str) -> None:
    num_devices = 4096
    loads = work(shape(name, num_devices))
    assert (min(loads), max(loads), len(loads)) == (WORK[name] * MS, WORK[name] * MS, num_devices)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_survives_its_file_and_is_a_workload(name: str) -> None:
    profile = shape(name, 4)
    assert parse(to_json(profile), Profile) == profile
    assert profile.placement is not None
    workload = build_workload(profile, profile.placement, num_microbatches=3, microbatch_size=1)
    assert len(workload.stages) == len(profile.blocks)


@pytest.mark.parametrize(
    ("name", "num_devices", "chunks", "costs", "words"),
    [
        ("w", 4, None, ShapeCosts(), "choose from v, x"),
        ("v", 0, None, ShapeCosts(), "1 to 4096 devices, not 0"),
        ("v", 4097, None, ShapeCosts(), "1 to 4096 devices, not 4097"),
        ("k", 3, None, ShapeCosts(), "even number of devices, not 3; give --devices 4"),
        ("nn", 1, None, ShapeCosts(), "even number of devices, not 1"),
        ("v", 4, 2, ShapeCosts(), "--chunks does not apply to shape-v"),
        ("zbv", 4, 2, ShapeCosts(), "--chunks does not apply to shape-zbv"),
        ("circular", 4, 0, ShapeCosts(), "from 1 to 64, not 0"),
        ("circular", 4, 65, ShapeCosts(), "from 1 to 64, not 65"),
        ("v", 4, None, ShapeCosts(input_grad_ns=1), "come together"),
        ("v", 4, None, ShapeCosts(weight_grad_ns=1), "come together"),
        ("v", 4, None, ShapeCosts(backward_ns=1, input_grad_ns=1, weight_grad_ns=1), "give one of them"),
        ("v", 4, None, ShapeCosts(weight_grad_bytes=1), "give --input-grad and --weight-grad too"),
        ("v", 4, None, ShapeCosts(input_grad_ns=10**15, weight_grad_ns=10**15), "lower them"),
    ],
)
def test_refused(name: str, num_devices: int, chunks: int | None, costs: ShapeCosts, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        shape(name, num_devices, chunks=chunks, costs=costs)


@pytest.mark.parametrize("name", ["v", "x", "m", "nn", "k"])
def test_shipped_profiles_are_what_the_code_makes(name: str) -> None:
    assert (ROOT / "profiles" / f"tessel-{name}.json").read_text(encoding="utf-8") == to_json(shape(name, 4))


@pytest.mark.parametrize(
    ("name", "chunks", "costs"),
    [
        (
            "mllm",
            None,
            ShapeCosts(shared_forward_ns=200_000, shared_backward_ns=300_000, comm_ns=10_000, activation_bytes=1 << 20),
        ),
        ("circular", 3, ShapeCosts(forward_ns=10, backward_ns=20, comm_ns=7, activation_bytes=100)),
        (
            "zbv",
            None,
            ShapeCosts(
                forward_ns=3,
                input_grad_ns=3,
                weight_grad_ns=5,
                comm_ns=7,
                activation_bytes=101,
                weight_grad_bytes=3,
            ),
        ),
    ],
)
def test_golden(name: str, chunks: int | None, costs: ShapeCosts) -> None:
    expected = (ROOT / "tests" / "golden" / f"shape-{name}.json").read_text(encoding="utf-8")
    assert to_json(shape(name, 2, chunks=chunks, costs=costs)) == expected


def test_edges_have_bytes_instead_of_a_time_where_bytes_are_given() -> None:
    for name in ("m", "circular"):
        edges = shape(name, 4, costs=ShapeCosts(edge_bytes=1000)).edges
        assert {(edge.bytes_per_sample, edge.transfer_ns) for edge in edges} == {(1000, None)}
    with pytest.raises(UsageError, match="--bytes and --comm both say what a message takes; leave one of them out"):
        shape("v", 4, costs=ShapeCosts(edge_bytes=1, comm_ns=1))
