"""Links measured among real processes make a cluster to plan with; what fails is named, what was measured is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeplan.costs.clusters import named_cluster as cluster_of
from pipeplan.costs.communication import transfer_time
from pipeplan.errors import ExecutionError, UsageError
from pipeplan.files import (
    Cluster,
    DeviceKind,
    LinkLevel,
    MeasuredCurve,
    Source,
    parse,
    read_cluster,
    to_json,
    write_file,
)
from pipeplan.files.cluster import Operation
from pipeplan.runtime.profiling.computing import Computing
from pipeplan.runtime.profiling.instruments import mean_of_middle
from pipeplan.runtime.profiling.links import (
    _CALLS_BYTES,
    OPERATIONS,
    LinkOptions,
    LinkPoint,
    Taken,
    Task,
    _call,
    _exchange_ns,
    measure_local,
    tasks_of,
)
from runtime_support import link_rank
from runtime_support.warm import warm_ranks

FEW = LinkOptions(largest_bytes=1 << 14, repeats=3, warmup=1, compute_ns=0, timeout_ns=20 * 10**9)
RANK = (sys.executable, "-m", "runtime_support.link_rank")


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with warm_ranks():  # from now on there is the process that they are forked from
        before = children()
    yield
    assert set(children()) <= set(before), "processes are left over"


def children() -> list[str]:
    """Living processes that this one has started."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def measured(
    num_processes: int, options: LinkOptions = FEW, cluster: Cluster | None = None
) -> tuple[Cluster, list[LinkPoint], list[Cluster]]:
    points: list[LinkPoint] = []
    kept: list[Cluster] = []
    with warm_ranks():
        found = measure_local(num_processes, options, cluster, on_point=points.append, keep=kept.append, command=RANK)
    return found, points, kept


def three_levels() -> Cluster:
    sizes = {"pair": 2, "node": 8, "network": 24}
    levels = tuple(
        LinkLevel(name=name, group_size=size, latency_ns=1, bandwidth_bytes_per_s=1) for name, size in sizes.items()
    )
    return Cluster(
        name="three", source=Source(method="estimated"), devices=(DeviceKind(name="x", count=24),), levels=levels
    )


# Tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 11, 16, 24])
def test_every_task_is_of_the_level_that_joins_its_ranks(num_ranks: int) -> None:
    cluster = three_levels()
    tasks = tasks_of(cluster, num_ranks, FEW)
    for task in tasks:
        level = cluster.level_between(task.ranks[0], task.ranks[-1])
        assert level is not None
        assert task.level == level.name
        assert task.ranks == tuple(range(task.ranks[0], task.ranks[-1] + 1))
        shared = len(task.ranks) if task.operation in ("all_gather", "reduce_scatter", "all_to_all") else 1
        assert task.size % (4 * shared) == 0
    assert tasks[0].operation == "send"
    assert max(task.ranks[-1] for task in tasks) == num_ranks - 1
    outermost = cluster.level_between(0, num_ranks - 1)
    assert outermost is not None
    assert {task.level for task in tasks} == {
        each.name for each in cluster.levels if each.group_size <= outermost.group_size
    }
    assert len(set(tasks)) == len(tasks)


def test_groups_double_up_to_all() -> None:
    tasks = tasks_of(three_levels(), 24, replace(FEW, operations=("all_reduce",)))
    assert sorted({(task.level, len(task.ranks)) for task in tasks}) == [
        ("network", 16),
        ("network", 24),
        ("node", 4),
        ("node", 8),
        ("pair", 2),
    ]


@pytest.mark.parametrize("num_ranks", [0, 1, 25])
def test_refuses_ranks_that_do_not_fit(num_ranks: int) -> None:
    with pytest.raises(UsageError, match=f"links of {num_ranks} devices .* which has 24 devices"):
        tasks_of(three_levels(), num_ranks, FEW)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"smallest_bytes": 0}, "no sizes from 0"),
        ({"largest_bytes": 10}, "no sizes from 1024 to 10"),
        ({"factor": 1}, "a factor of 1"),
        ({"repeats": 1}, "1 repeats"),
        ({"operations": ("gossip",)}, "no operation 'gossip'; choose from send"),
    ],
)
def test_refuses_options_that_measure_nothing(changes: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        LinkOptions(**changes)  # type: ignore[arg-type]  # options of several types


# Times ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "taken", "ns"),
    [
        ("all_reduce", [(1000, 600), (900, 700)], 175),  # two calls: the last ends after 1000, computing took 650
        ("broadcast", [(700, 600), (900, 600), (800, 600)], 150),  # who sends is done early
        ("send", [(1000, 300), (990, 500)], 50),  # one computes after the other; there and back
        ("all_gather", [(500, 0), (450, 0)], 250),  # no computing: of the slowest rank
    ],
)
def test_an_exchange_is_what_calls_add_to_computing(operation: Operation, taken: list[Taken], ns: float) -> None:
    size = _CALLS_BYTES // 2
    assert _exchange_ns(Task(operation, "node", (0, 1), size), taken) == ns


def test_a_few_disturbed_runs_do_not_count_and_the_others_are_averaged() -> None:
    assert mean_of_middle([5, 1, 2, 3, 4, 6, 7, 1000]) == pytest.approx((3 + 4 + 5 + 6) / 4)
    assert mean_of_middle([1, 2, 9]) == 4


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_compute_before_each_call_and_senders_before_they_send(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    for name in ("send", "recv", "all_reduce"):
        monkeypatch.setattr(dist, name, lambda *_, name=name, **__: done.append(name))
    computing = Computing(torch.device("cpu"))
    computing.take(3000, 1000)
    monkeypatch.setattr(torch, "mm", lambda rows, weights: done.append("product"))
    for operation in ("all_reduce", "send"):
        _call(Task(operation, "node", (0, 1), 64), rank, None, torch.device("cpu"), computing.run)()
    products = ["product"] * 3
    back = ["recv", *products, "send"] if rank else [*products, "send", "recv"]
    assert done == [*products, "all_reduce", *back]
    assert computing.taken_ns() > 0
    assert computing.taken_ns() == 0  # since it was last asked for
    computing.take(0, 1000)
    computing.run()
    assert done[-1] == back[-1]


# Measuring --------------------------------------------------------------------------------------------------------


def test_three_ranks_measure_every_operation() -> None:
    found, points, kept = measured(3)
    assert parse(to_json(found), Cluster) == found == kept[-1]
    assert found.num_devices == 3
    assert found.memory_bytes == (None,) * 3
    assert [level.name for level in found.levels] == ["node"]
    assert {(curve.operation, curve.num_devices) for curve in found.measured} == {
        ("send", 2),
        *((operation, count) for operation in OPERATIONS[1:] for count in (2, 3)),
    }
    assert all(len(curve.points) == 3 for curve in found.measured)
    assert found.source.method == "measured"
    assert "gloo on 1 host: means of the middle half of 3 runs, one call right after the other" in found.source.notes
    assert all(point.spread >= 0 for point in points)
    assert len(kept) == len(found.measured)  # once per whole curve
    (send,) = (curve for curve in found.measured if curve.operation == "send")
    slowest = {point.size: 0 for point in points if point.operation == "send"}
    for point in points:
        if point.operation == "send":
            slowest[point.size] = max(slowest[point.size], point.ns)
    assert dict(send.points) == slowest
    times = [sum(transfer_time(found, 0, 2, size)) for size, _ in send.points]
    assert times == sorted(times)
    assert times[0] == send.points[0][1]


def test_a_given_cluster_keeps_its_figures_and_gets_the_curves_in_place_of_its_own() -> None:
    paper = cluster_of("tessel")
    reduce = MeasuredCurve(operation="all_reduce", level="nvlink", num_devices=2, points=((1, 1),))
    others = tuple(reduce.model_copy(update=each) for each in ({"num_devices": 4}, {"level": "infiniband"}))
    given = paper.model_copy(update={"measured": (*others, reduce)})
    found, _, _ = measured(2, replace(FEW, operations=("all_reduce",)), given)
    assert (found.levels, found.devices, found.source.method) == (paper.levels, paper.devices, "literature")
    assert found.measured[:2] == others
    assert [(curve.operation, curve.level, curve.num_devices) for curve in found.measured[2:]] == [
        ("all_reduce", "nvlink", 2)
    ]
    assert found.measured[2].points[0][0] == FEW.smallest_bytes
    assert found.source.notes.startswith(paper.source.notes)


@pytest.mark.slow
def test_two_hosts_give_two_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(link_rank.PLAY, "two-hosts")
    found, _, kept = measured(4, replace(FEW, operations=("send", "all_reduce"), largest_bytes=4096))
    assert [(level.name, level.group_size) for level in found.levels] == [("node", 2), ("network", 4)]
    assert [(curve.operation, curve.level, curve.num_devices) for curve in found.measured] == [
        ("send", "node", 2),
        ("send", "network", 2),
        ("all_reduce", "node", 2),
        ("all_reduce", "network", 4),
    ]
    assert "2 hosts" in found.source.notes
    assert len(kept) == 3  # both levels have their sends before anything is kept
    assert all(level.bandwidth_bytes_per_s > 1 for cluster in kept for level in cluster.levels)


def test_an_operation_that_the_transport_lacks_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(link_rank.PLAY, "lacks")
    found, _, _ = measured(2, replace(FEW, operations=("send", "all_reduce", "broadcast"), compute_ns=10_000))
    assert [curve.operation for curve in found.measured] == ["send", "broadcast"]
    assert "each call after 10us of computing on every rank" in found.source.notes
    assert "gloo has no all_reduce" in found.source.notes


@pytest.mark.parametrize(
    ("what", "told"), [("dies", r"^rank 1 was killed \(SIGKILL\)"), ("raises", r"^rank 1 failed .*ValueError: boom")]
)
def test_a_rank_that_breaks_is_named_with_its_operation(
    what: str, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(link_rank.PLAY, what)
    path = str(tmp_path / "cluster.json")
    with warm_ranks(), pytest.raises(ExecutionError, match=told) as caught:
        measure_local(3, FEW, on_point=lambda _: None, keep=lambda cluster: write_file(cluster, path), command=RANK)
    assert "in all_reduce of 1024 bytes among 2 devices on node" in str(caught.value)
    assert [curve.operation for curve in read_cluster(path).measured] == ["send"]


def test_an_interruption_keeps_whole_curves() -> None:
    kept: list[Cluster] = []

    def interrupt(point: LinkPoint) -> None:
        if point.operation == "all_reduce" and point.num_devices == 3:
            raise KeyboardInterrupt

    with warm_ranks(), pytest.raises(KeyboardInterrupt):
        measure_local(3, FEW, on_point=interrupt, keep=kept.append)
    assert [(curve.operation, curve.num_devices) for curve in kept[-1].measured] == [("send", 2), ("all_reduce", 2)]
    assert parse(to_json(kept[-1]), Cluster) == kept[-1]


def test_a_new_cluster_needs_sends() -> None:
    with pytest.raises(UsageError, match="a new cluster needs sends"):
        measured(2, replace(FEW, operations=("all_reduce",)))


# Under torchrun ---------------------------------------------------------------------------------------------------


def torchrun(output: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, *RANK[1:]],
        env={**os.environ, link_rank.OUTPUT: str(output)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.long  # the next one starts by torchrun, too
def test_torchrun_writes_on_rank_0(tmp_path: Path) -> None:
    ended = torchrun(tmp_path / "cluster.json")
    assert ended.returncode == 0, ended.stderr
    found = read_cluster(str(tmp_path / "cluster.json"))
    assert [curve.operation for curve in found.measured] == ["send", "all_reduce"]


@pytest.mark.slow
def test_torchrun_names_the_rank_and_keeps_the_sends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(link_rank.PLAY, "raises")
    ended = torchrun(tmp_path / "cluster.json")
    assert ended.returncode != 0
    assert "pipeplan: rank 1 failed in all_reduce of 1024 bytes among 2 devices on node" in ended.stderr
    assert [curve.operation for curve in read_cluster(str(tmp_path / "cluster.json")).measured] == ["send"]
