"""Measuring links: messages and collectives of torch.distributed over sizes, as curves of a cluster.

A *task* is one operation among some ranks at one size. All ranks go through the same tasks in the same order, those
not in a task wait, and rank 0 gathers the times. Sizes are as nccl-tests states them: of all-gather,
reduce-scatter and all-to-all the whole array.

What a plan needs to know is by how much an exchange makes its step longer, and its exchanges follow computing. So every
rank computes before each call, and an exchange takes what computing and calls together take, less the computing alone:
waiting for the rank that computed longer is part of it. Times of many exchanges add up to a step's, so they are means.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from typing import Any, get_args

import torch
import torch.distributed as dist

from pipeplan.costs.communication import latency_and_bandwidth
from pipeplan.costs.devices import preset_called
from pipeplan.errors import UsageError, choose_from
from pipeplan.files import Cluster, DeviceKind, LinkLevel, MeasuredCurve, parse, to_json
from pipeplan.files.cluster import Operation
from pipeplan.runtime.launch.job import RankContext, Report, RunOptions, longest_wait
from pipeplan.runtime.launch.local import RANK, watch_local
from pipeplan.runtime.launch.status import Phase, Progress, lost_others
from pipeplan.runtime.launch.worker import under_torchrun
from pipeplan.runtime.parallel.device import gathered, rank_device
from pipeplan.runtime.profiling.build_profile import source_of
from pipeplan.runtime.profiling.computing import Computing
from pipeplan.runtime.profiling.instruments import mean_of_middle, timed
from pipeplan.units import format_ns

OPERATIONS: tuple[Operation, ...] = get_args(Operation)
"""What can be measured, in the order it is: ``send`` first, since latency and bandwidth come from it."""

_ELEMENT_BYTES = 4
_MAX_CALLS = 8
_CALLS_BYTES = 1 << 20  # of calls that are timed together, lest small ones show the start's skew
_MAX_NOTES = 8000

Taken = tuple[int, int]
"""Ns that a rank took for all calls of a run with the computing before them, and for that computing alone."""

Key = tuple[Operation, str, int]
"""Operation, level and number of devices: what a curve is of."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """What to measure: sizes from ``smallest_bytes`` to ``largest_bytes``, each ``factor`` times the one before.

    Each is the mean of the middle half of ``repeats`` timed runs, after ``warmup`` others. Before each call all ranks
    compute for ``compute_ns``; with 0 calls follow each other, as in nccl-tests. ``device``, ``backend``,
    ``timeout_ns`` as in :class:`RunOptions`; one round over all sizes must end within the timeout. Raises UsageError.
    """

    smallest_bytes: int = 1 << 10
    largest_bytes: int = 1 << 26
    factor: int = 4
    repeats: int = 10
    warmup: int = 3
    compute_ns: int = 5_000_000
    operations: tuple[Operation, ...] = OPERATIONS
    device: str = "cpu"
    backend: str = "auto"
    timeout_ns: int = 120_000_000_000

    def __post_init__(self) -> None:
        if not 1 <= self.smallest_bytes <= self.largest_bytes:
            raise UsageError(f"no sizes from {self.smallest_bytes} to {self.largest_bytes} bytes; give 1 <= MIN <= MAX")
        if self.factor < 2 or self.repeats < 2 or self.warmup < 1:
            raise UsageError(
                f"a factor of {self.factor}, {self.repeats} repeats and {self.warmup} warm-up runs measure nothing; "
                "give at least 2, 2 and 1"
            )
        if unknown := [name for name in self.operations if name not in OPERATIONS]:
            raise UsageError(f"there is no operation {unknown[0]!r}; {choose_from(unknown[0], OPERATIONS)}")

    @property
    def sizes(self) -> Iterator[int]:
        """The sizes in bytes, ascending."""
        size = self.smallest_bytes
        while size <= self.largest_bytes:
            yield size
            size *= self.factor

    @property
    def transport(self) -> str:
        """The torch.distributed backend that is measured."""
        return RunOptions(device=self.device, backend=self.backend).transport


@dataclass(frozen=True, slots=True)
class Task:
    """One operation among ``ranks`` at one size. A send goes from the first rank to the second and back."""

    operation: Operation
    level: str
    ranks: tuple[int, ...]
    size: int

    @property
    def key(self) -> Key:
        """The curve it is a point of."""
        return self.operation, self.level, len(self.ranks)

    @property
    def calls(self) -> int:
        """Calls that are timed together."""
        return max(1, min(_MAX_CALLS, _CALLS_BYTES // self.size))

    def __str__(self) -> str:
        among = f"between ranks {self.ranks[0]} and {self.ranks[1]}"
        if self.operation != "send":
            among = f"among {len(self.ranks)} devices"
        return f"{self.operation} of {self.size} bytes {among} on {self.level}"


@dataclass(frozen=True, slots=True)
class LinkPoint:
    """A measured point: mean time in ns, and its spread over runs, interquartile range over that."""

    operation: Operation
    level: str
    num_devices: int
    size: int
    ns: int
    spread: float


OnPoint = Callable[[LinkPoint], None]
Keep = Callable[[Cluster], None]


# Entries ----------------------------------------------------------------------------------------------------------


def measure_links(
    options: LinkOptions, cluster: Cluster | None = None, *, on_point: OnPoint, keep: Keep
) -> Cluster | None:
    """Measure as a rank that torchrun has started. Returns the cluster on rank 0, None on others.

    Where a rank fails, the first to know says so, naming rank and operation, and the process ends here.

    Args:
        options: what to measure.
        cluster: gets the measured curves in place of its own; without it a new one is made of the ranks there are.
        on_point: called on rank 0 with each point.
        keep: called on rank 0 with all that is measured, whenever a curve is whole; the first time when the sends of
            every level are.
    """
    listener = _LinkListener(on_point, keep)
    under_torchrun(_WORK, lambda: _job_of(options, cluster), options.timeout_ns, listener)
    return listener.cluster


def measure_local(
    num_processes: int,
    options: LinkOptions,
    cluster: Cluster | None = None,
    *,
    on_point: OnPoint,
    keep: Keep,
    command: Sequence[str] = RANK,
) -> Cluster:
    """Measure among processes started on this machine; the rest is as in :func:`measure_links`.

    Raises UsageError where the cluster does not fit, and ExecutionError, which names rank and operation.
    """
    base = cluster or _bare([""] * num_processes, torch.device("cpu"), options)
    program = tuple(map(str, tasks_of(base, num_processes, options)))
    listener, job = _LinkListener(on_point, keep), _job_of(options, cluster)
    watch_local(_WORK, [program] * num_processes, job, options.timeout_ns, listener, command)
    assert listener.cluster is not None, "rank 0 ends well only after it has reported it"
    return listener.cluster


@dataclass(slots=True)
class _LinkListener:
    """Reads what rank 0 reports; ``cluster`` is the last."""

    on_point: OnPoint
    keep: Keep
    cluster: Cluster | None = None

    def __call__(self, rank: int, report: Report) -> None:
        """A report."""
        if report["event"] == "point":
            self.on_point(LinkPoint(**report["point"]))
        else:
            self.cluster = parse(report["cluster"], Cluster)
            self.keep(self.cluster)


_WORK = "pipeplan.runtime.profiling.links:measure_job"


def _job_of(options: LinkOptions, cluster: Cluster | None) -> Report:
    return {"options": asdict(options), "cluster": None if cluster is None else to_json(cluster)}


def measure_job(job: Report, context: RankContext) -> None:
    """The job of a rank; rank 0 reports."""
    options = LinkOptions(**{**job["options"], "operations": tuple(job["options"]["operations"])})
    given = None if job["cluster"] is None else parse(job["cluster"], Cluster)
    _Measuring(options, given, context.progress, context.report).run()


# What to measure --------------------------------------------------------------------------------------------------


def tasks_of(cluster: Cluster, num_ranks: int, options: LinkOptions) -> tuple[Task, ...]:
    """All measurements on a cluster's levels, in order.

    Of each level: sends between the first, the middle and the last two neighbours that it joins, and collectives of
    two, four, ... of the groups inside it, up to all. Raises UsageError where there are none.
    """
    if num_ranks < 2 or num_ranks > cluster.num_devices or not cluster.levels:
        raise UsageError(
            f"links of {num_ranks} devices of cluster {cluster.name!r}, which has {cluster.num_devices} devices and "
            f"{len(cluster.levels)} levels of links, cannot be measured; start 2 or more processes, and as many at most"
        )
    tasks = []
    for operation in OPERATIONS:
        inner = 1
        for level in cluster.levels if operation in options.operations else ():
            outer = min(level.group_size, num_ranks)
            for ranks in (_pairs if operation == "send" else _groups)(inner, outer):
                tasks += [Task(operation, level.name, ranks, _whole(operation, ranks, size)) for size in options.sizes]
            inner = level.group_size
    return tuple(dict.fromkeys(tasks))


def _pairs(inner: int, outer: int) -> list[tuple[int, ...]]:
    """Neighbours in different groups of ``inner`` ranks."""
    borders = range(inner, outer, inner)
    chosen = {borders[0], borders[len(borders) // 2], borders[-1]} if borders else set()
    return [(border - 1, border) for border in sorted(chosen)]


def _groups(inner: int, outer: int) -> list[tuple[int, ...]]:
    """The first 2, 4, ... groups of ``inner`` ranks, and all ``outer`` ranks."""
    counts = []
    while (inner := 2 * inner) < outer:
        counts.append(inner)
    return [tuple(range(count)) for count in counts] + ([tuple(range(outer))] if inner < 2 * outer else [])


def _whole(operation: Operation, ranks: Sequence[int], size: int) -> int:
    """The size rounded down to what can be divided among the ranks, if the operation does that."""
    unit = _ELEMENT_BYTES * (len(ranks) if operation in ("all_gather", "reduce_scatter", "all_to_all") else 1)
    return max(1, size // unit) * unit


def _bare(hosts: Sequence[str], device: torch.device, options: LinkOptions) -> Cluster:
    """A cluster of the ranks, with links still to be measured. Raises UsageError where hosts do not fit."""
    if "send" not in options.operations:
        raise UsageError("a new cluster needs sends, for latency and bandwidth; measure send too, or give --cluster")
    counts = [len(list(ranks)) for _, ranks in groupby(hosts)]
    if len(set(counts)) > 1 or len(counts) != len(set(hosts)):
        raise UsageError(f"hosts must have equally many ranks, numbered host by host; ranks are on {', '.join(hosts)}")
    groups = {"node": counts[0], "network": len(hosts)}
    if len(counts) == 1 or counts[0] == 1:
        groups = {"node" if len(counts) == 1 else "network": len(hosts)}
    cuda = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    preset = preset_called(cuda.name) if cuda else None
    kind = DeviceKind(
        name=cuda.name if cuda else "cpu",
        count=len(hosts),
        memory_bytes=cuda.total_memory if cuda else None,
        memory_reserve_bytes=preset.reserve_bytes if preset else 0,
    )
    levels = (
        LinkLevel(name=name, group_size=size, latency_ns=0, bandwidth_bytes_per_s=1)
        for name, size in groups.items()
        if size > 1 or len(hosts) == 1
    )
    source = source_of("measured", kind.name, torch.float32)
    return Cluster(name=f"{len(hosts)}-{kind.name}", source=source, devices=(kind,), levels=tuple(levels))


# Measuring --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Measuring:
    """A rank's way through the tasks; only rank 0 reports."""

    options: LinkOptions
    given: Cluster | None
    progress: Progress
    report: Callable[[Report], None]
    points: list[LinkPoint] = field(default_factory=list)
    missing: list[Operation] = field(default_factory=list)
    computing: Computing = field(init=False)

    def run(self) -> None:
        """Measure everything."""
        device = rank_device(self.options.device, self.options.transport)
        with lost_others(self.progress):
            hosts = gathered(socket.gethostname())
        base = self.given or _bare(hosts, device, self.options)
        tasks = tasks_of(base, len(hosts), self.options)
        self._prepare(base, device)
        self.progress.board.programs = [tuple(map(str, tasks))] * len(hosts)
        groups = self._connect(tasks)
        last_send = max((index for index, task in enumerate(tasks) if task.operation == "send"), default=-1)
        for _, numbered in groupby(enumerate(tasks), key=lambda entry: entry[1].key):
            curve = list(numbered)
            for ranks, same in groupby(curve, key=lambda entry: entry[1].ranks):
                self._measure(list(same), groups[ranks], device)
            if self.progress.rank == 0 and curve[-1][0] >= last_send:
                cluster = self._so_far(base, len(set(hosts)))
                self.report({"event": "cluster", "cluster": to_json(cluster)})

    def _prepare(self, base: Cluster, device: torch.device) -> None:
        """Find out how much to compute, as much for all devices of a kind."""
        self.computing = Computing(device)
        if not self.options.compute_ns:
            return
        kinds = [number for number, kind in enumerate(base.devices) for _ in range(kind.count)]
        own = kinds[self.progress.rank]
        with lost_others(self.progress):
            dist.barrier()
            found = gathered(self.computing.product_ns())
        alike = [ns for ns, kind in zip(found, kinds, strict=False) if kind == own]
        self.computing.take(self.options.compute_ns, statistics.median(alike))

    def _connect(self, tasks: Sequence[Task]) -> dict[tuple[int, ...], Any]:
        """A process group for each set of ranks, made by all ranks in the same order."""
        transport, timeout = self.options.transport, longest_wait(self.options.timeout_ns, self.progress.board.machines)
        self.progress.begin(Phase.CONNECTING)
        with lost_others(self.progress):
            return {
                ranks: dist.new_group(list(ranks), timeout=timeout, backend=transport)
                for ranks in sorted({task.ranks for task in tasks})
            }

    def _measure(self, numbered: Sequence[tuple[int, Task]], group: Any, device: torch.device) -> None:
        """All sizes take turns, one timing of each per round, so that a slow moment of the machine falls on all."""
        first, task = numbered[0]
        if task.operation in self.missing:
            return
        self.progress.begin(Phase.WAITING, first)
        rank = self.progress.rank
        calls = [
            (*each, _call(each[1], rank, group, device, self.computing.run))
            for each in numbered
            if rank in each[1].ranks
        ]
        rounds = []
        for _ in range(self.options.warmup + self.options.repeats):
            self.progress.begin(Phase.WAITING, first)
            own = self._round(calls, group, device)
            with lost_others(self.progress):
                given = [times for times in gathered(own) if times != []]
            if None in given:
                self.missing.append(task.operation)
                return
            rounds.append(
                [_exchange_ns(each, of) for (_, each), of in zip(numbered, zip(*given, strict=True), strict=True)]
            )
        if rank == 0:
            for (_, task), times in zip(numbered, zip(*rounds[self.options.warmup :], strict=True), strict=True):
                self._note(task, times)

    def _round(
        self, calls: Sequence[tuple[int, Task, Callable[[], object]]], group: Any, device: torch.device
    ) -> list[Taken] | None:
        """Times of each size as this rank sees them; None if the transport does not have the operation."""
        times = list[Taken]()
        for index, task, call in calls:
            self.progress.begin(Phase.WAITING, index)
            with lost_others(self.progress):
                try:
                    times.append(self._time(call, task, group, device))
                except RuntimeError as error:
                    if not _lacking(error):
                        raise
                    return None
        return times

    def _time(self, call: Callable[[], object], task: Task, group: Any, device: torch.device) -> Taken:
        """All ranks start together."""
        dist.barrier(group)
        _, whole = timed(lambda: [call() for _ in range(task.calls)], device)
        return whole, self.computing.taken_ns()

    def _note(self, task: Task, times: Sequence[float]) -> None:
        """Take a point; of several pairs the slowest counts."""
        ns = max(1, round(mean_of_middle(times)))
        low, _, high = statistics.quantiles(times, n=4, method="inclusive")
        self.points.append(LinkPoint(*task.key, task.size, ns, (high - low) / ns))
        self.report({"event": "point", "point": asdict(self.points[-1])})

    def _so_far(self, base: Cluster, num_hosts: int) -> Cluster:
        """The cluster with the curves so far, and if it is new, the links' figures fitted to sends."""
        curves = {(curve.operation, curve.level, curve.num_devices): curve for curve in base.measured}
        curves.update(_curves(self.points))
        levels = base.levels if self.given else tuple(_fitted(level, curves) for level in base.levels)
        notes = f"{base.source.notes} {self._notes(num_hosts)}".strip()
        source = base.source.model_copy(update={"notes": notes} if len(notes) <= _MAX_NOTES else {})
        return base.model_copy(update={"levels": levels, "measured": tuple(curves.values()), "source": source})

    @property
    def _calls(self) -> str:
        if not self.options.compute_ns:
            return "one call right after the other"
        return f"each call after {format_ns(self.options.compute_ns)} of computing on every rank, beyond that computing"

    def _notes(self, num_hosts: int) -> str:
        worst = max(self.points, key=lambda point: point.spread)
        typical = statistics.median(point.spread for point in self.points)
        backend = self.options.transport
        date = f" on {datetime.now(UTC).date().isoformat()}, torch {torch.__version__}" if self.given else ""
        left_out = f" {backend} has no {', '.join(self.missing)}." if self.missing else ""
        fitted = "" if self.given else " Latency and bandwidth are fitted to the sends."
        return (
            f"Links measured with {backend} on {num_hosts} host{'s' if num_hosts > 1 else ''}{date}: means of the "
            f"middle half of {self.options.repeats} runs, {self._calls}, of sends the slowest pair's. Spread of a "
            f"point {typical:.0%} in the median, {worst.spread:.0%} at most ({worst.operation} of {worst.size} bytes, "
            f"{worst.num_devices} devices).{fitted}{left_out}"
        )


def _curves(points: Sequence[LinkPoint]) -> dict[Key, MeasuredCurve]:
    found: dict[Key, dict[int, int]] = {}
    for point in points:
        times = found.setdefault((point.operation, point.level, point.num_devices), {})
        times[point.size] = max(point.ns, times.get(point.size, 0))
    return {
        key: MeasuredCurve(operation=key[0], level=key[1], num_devices=key[2], points=tuple(sorted(times.items())))
        for key, times in found.items()
    }


def _fitted(level: LinkLevel, curves: Mapping[Key, MeasuredCurve]) -> LinkLevel:
    latency, bandwidth = latency_and_bandwidth(curves["send", level.name, 2].points)
    return level.model_copy(update={"latency_ns": latency, "bandwidth_bytes_per_s": bandwidth})


def _exchange_ns(task: Task, taken: Sequence[Taken]) -> float:
    """Ns of one call beside computing, by what each rank took: all end with the last one.

    They compute at the same time; of a send and the one back first one does, then the other.
    """
    whole, computed = max(each for each, _ in taken), [each for _, each in taken]
    if task.operation == "send":
        return (whole - sum(computed)) / task.calls / 2
    return (whole - statistics.fmean(computed)) / task.calls


def _lacking(error: RuntimeError) -> bool:
    """Whether a transport says with this that it does not have an operation."""
    return isinstance(error, NotImplementedError) or "support" in str(error).lower()


def _call(task: Task, rank: int, group: Any, device: torch.device, compute: Callable[[], None]) -> Callable[[], object]:
    """What computes and then does the task's operation once."""
    whole = torch.ones(task.size // _ELEMENT_BYTES, device=device)
    other = torch.ones_like(whole) if task.operation == "all_to_all" else whole
    share = torch.ones(max(1, len(whole) // len(task.ranks)), device=device)
    if task.operation == "send":
        return partial(_ping_pong, whole, task.ranks.index(rank) == 0, sum(task.ranks) - rank, group, compute)
    # torch 2.13 renames them and warns of the old names
    all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls: dict[Operation, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: all_gather(whole, share, group=group),
        "reduce_scatter": lambda: reduce_scatter(share, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, task.ranks[0], group=group),
    }
    exchange = calls[task.operation]

    def call() -> None:
        compute()
        exchange()

    return call


def _ping_pong(tensor: torch.Tensor, first: bool, peer: int, group: Any, compute: Callable[[], None]) -> None:
    """There and back again, each time once the sender has computed."""
    for sends in (first, not first):
        if sends:
            compute()
            dist.send(tensor, peer, group=group)
        else:
            dist.recv(tensor, peer, group=group)
