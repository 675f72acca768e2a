"""What ``pipeplan frontier`` finds, as points; and which of them a mode chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from pipeplan.cli.frontier_notes import cluster_notes, remedies, repeated_share, sharing_notes
from pipeplan.errors import InfeasibleError
from pipeplan.frontier.configurations.building import CostOptions
from pipeplan.frontier.turning import turning_point
from pipeplan.model import Cluster, Plan, Profile
from pipeplan.planner import Batch, Options, Request, resolve_batch
from pipeplan.planner.splits import Splits, split_frontier
from pipeplan.planner.strategies import plan_of_strategy
from pipeplan.planner.tradeoff import plan_frontier
from pipeplan.report.frontier import FrontierReport, Point
from pipeplan.units import format_bytes

__all__ = ["Asked", "Found", "chosen_points", "of_plans", "of_splits"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the flags mean, with the files read; ``counts`` are numbers of devices, ascending."""

    profile: Profile
    cluster: Cluster | None
    counts: list[int]
    memory_bytes: int | None
    mini_batch: int | None
    time_limit: float
    device: str | None
    whole_blocks: bool
    data_parallel_loading: bool
    within: float = 0.0

    @property
    def batch(self) -> Batch:
        """The same mini-batch for all numbers of devices."""
        return resolve_batch(self.profile, self.counts[-1], mini_batch=self.mini_batch)

    def limit(self, num_devices: int) -> int | None:
        """Memory of the smallest of the first so many devices."""
        if self.memory_bytes is not None or self.cluster is None:
            return self.memory_bytes
        known = [limit for limit in self.cluster.memory_bytes[:num_devices] if limit is not None]
        return min(known, default=None)

    def price_per_hour(self, num_devices: int) -> float | None:
        """Of the first so many devices; None where one has no price."""
        kinds = self.cluster.first(num_devices).devices if self.cluster is not None else ()
        prices = [kind.price_per_hour * kind.count for kind in kinds if kind.price_per_hour is not None]
        return sum(prices) if kinds and len(prices) == len(kinds) else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What is taken for granted of the cluster."""
        return tuple(cluster_notes(self.cluster, self.counts[-1]))


@dataclass(frozen=True, slots=True)
class Found:
    """Points by devices and memory, what they are of, and how to get the plan of one."""

    report: FrontierReport
    plan_of: Callable[[int], Plan]
    least_bytes: int


def of_splits(asked: Asked) -> Found:
    """One stage on all devices, for every number of them.

    The mini-batch is one micro-batch.
    """
    samples = asked.mini_batch or (max(asked.profile.microbatch_sizes, default=1) * asked.counts[-1])
    options = CostOptions(blocks=asked.whole_blocks, data_parallel_loading=asked.data_parallel_loading)
    found: list[tuple[Splits, int, Point]] = []
    least: list[int] = []
    notes = list(asked.notes)
    exact, seconds = True, 0.0
    for count in asked.counts:
        splits = split_frontier(
            asked.profile,
            asked.cluster,
            count,
            samples,
            device=asked.device,
            options=options,
            within=asked.within,
        )
        memory, limit = splits.tracked.memory_bytes.tolist(), asked.limit(count)
        own = [
            (splits, index, _point(splits, index))
            for index, bytes_ in enumerate(memory)
            if limit is None or bytes_ <= limit
        ]
        found += own
        notes += sharing_notes(count, samples, [point.repeated or 0.0 for _, _, point in own], splits.model)
        least.append(memory[0])
        if limit is not None and memory[0] > limit:
            notes.append(f"{count} devices: not enough, each would need at least {format_bytes(memory[0])}")
        exact, seconds = exact and splits.tracked.exact, seconds + splits.seconds
        if held := splits.tracked.eliminations["heuristic"]:
            notes.append(f"{count} devices: not exact, {held} operators were settled by heuristic elimination")
        if splits.tracked.factor > 1:
            beyond = splits.tracked.factor - 1
            notes.append(f"{count} devices: proved to be within {beyond:.2%} of every strategy in memory and time")
    report = FrontierReport(
        asked.profile.name,
        "all",
        "one stage on all devices, split by " + ("blocks" if asked.whole_blocks else "operators"),
        samples,
        exact,
        seconds,
        tuple(point for _, _, point in found),
        tuple(notes),
    )

    def plan_of(chosen: int) -> Plan:
        splits, index, _ = found[chosen]
        cluster = None if asked.cluster is None else asked.cluster.first(splits.num_devices)
        return plan_of_strategy(
            asked.profile,
            splits.model,
            splits.tracked.strategy(index),
            cluster=cluster,
            memory_bytes=asked.memory_bytes,
        )

    return Found(report, plan_of, min(least))


def _point(splits: Splits, index: int) -> Point:
    """A strategy of a split model as a point."""
    memory, time = int(splits.tracked.memory_bytes[index]), int(splits.tracked.time_ns[index])
    share = repeated_share(splits.model, splits.tracked.strategy(index))
    return Point(splits.num_devices, memory, time, splits.words(index), repeated=share)


def of_plans(asked: Asked) -> Found:
    """Whole plans, pipelines or not, for every number of devices."""
    batch = asked.batch
    request = Request(
        profile=asked.profile,
        placement="auto",
        num_devices=asked.counts[-1],
        chunks=None,
        batch=batch,
        sizes=asked.profile.microbatch_sizes or (batch.microbatch_size,),
        options=Options(time_limit=asked.time_limit),
        cluster=asked.cluster,
        memory_bytes=asked.memory_bytes,
        progress=None,
    )
    found = plan_frontier(request, asked.counts)
    points = [
        Point(point.num_devices, point.memory_bytes, point.iteration_ns, _words(point.plan)) for point in found.points
    ]
    note = f"{found.num_tried} partitions were tried: no plan among them beats one of these"
    report = FrontierReport(
        asked.profile.name,
        "all",
        "whole plans",
        batch.mini_batch,
        False,
        found.seconds,
        tuple(points),
        (*asked.notes, note),
        found.interrupted,
    )
    return Found(report, lambda chosen: found.points[chosen].plan, min(point.memory_bytes for point in points))


def _words(plan: Plan) -> str:
    """A plan in a few words: stages as replicas x shards, runs of equal ones together, schedule, size."""
    ways = [f"{stage.replicas}x{stage.shards}" + (" recomputed" if stage.recompute else "") for stage in plan.stages]
    runs = [(way, len(list(same))) for way, same in groupby(ways)]
    stages = ", ".join(f"{count} of {way}" if count > 1 else way for way, count in runs)
    number = f"{len(ways)} stage{'s' if len(ways) > 1 else ''}"
    return f"{number}: {stages}; {plan.provenance.scheduler}, micro-batches of {plan.microbatch_size}"


def chosen_points(asked: Asked, found: Found, mode: str, *, want_plan: bool) -> tuple[FrontierReport, Plan | None]:
    """The report with what a mode asks for, marked; and the plan of the chosen point, if wanted.

    Raises:
        InfeasibleError: nothing fits.
    """
    points = found.report.points
    if not points:
        raise InfeasibleError(
            f"nothing fits into {format_bytes(asked.limit(asked.counts[-1]) or 0)}: "
            f"{', '.join(map(str, asked.counts))} devices need at least {format_bytes(found.least_bytes)} each; "
            + remedies(asked.profile, asked.whole_blocks)
        )
    turning = set(_turning(points))
    marked = [
        replace(point, turning_point=index in turning, price_per_hour=asked.price_per_hour(point.num_devices))
        for index, point in enumerate(points)
    ]
    shown, chosen = _of_mode(points, mode, turning)
    marked[chosen] = replace(marked[chosen], chosen=mode != "all")
    report = replace(found.report, mode=mode, points=tuple(marked[index] for index in shown))
    return report, found.plan_of(chosen) if want_plan else None


def _of_mode(points: Sequence[Point], mode: str, turning: set[int]) -> tuple[Sequence[int], int]:
    """The points that a mode shows, and the one that it chooses."""
    every = range(len(points))
    if mode == "all":
        return every, max(turning)
    if mode == "min-time":
        return every, _quickest(points, every)
    if mode == "min-devices":
        fewest = [index for index in every if points[index].num_devices == points[0].num_devices]
        return fewest, _quickest(points, fewest)
    best = [_quickest(points, same) for same in _by_devices(points)]
    return best, _quickest(points, best)


def _quickest(points: Sequence[Point], among: Sequence[int]) -> int:
    return min(among, key=lambda index: points[index].time_ns)


def _by_devices(points: Sequence[Point]) -> Iterator[list[int]]:
    for _, same in groupby(range(len(points)), key=lambda index: points[index].num_devices):
        yield list(same)


def _turning(points: Sequence[Point]) -> Iterator[int]:
    """The turning point of every number of devices."""
    for same in _by_devices(points):
        yield same[turning_point([points[i].memory_bytes for i in same], [points[i].time_ns for i in same])]
