"""What ``pipeplan frontier`` finds, as points; and which of them a mode chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from pipeplan.cli.frontier_notes import (
    cluster_notes,
    device_notes,
    grain_notes,
    remedies,
    repeated_share,
    share_notes,
    sharing_notes,
)
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.frontier.configurations.building import CostOptions
from pipeplan.frontier.turning import turning_point
from pipeplan.model import Cluster, Plan, Profile, Stage
from pipeplan.planner import Batch, Options, Request, resolve_batch
from pipeplan.planner.alarm import interrupted_after
from pipeplan.planner.splits import SplitPoint, Splits, most_frequent, split_frontier
from pipeplan.planner.strategies import plan_of_strategy
from pipeplan.planner.tradeoff import plan_frontier
from pipeplan.report.frontier import FrontierReport, Point
from pipeplan.units import format_bytes, named_devices

__all__ = ["Asked", "Found", "chosen_points", "of_plans", "of_splits"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the flags mean, with the files read; ``counts`` are numbers of devices, ascending."""

    profile: Profile
    cluster: Cluster | None
    counts: list[int]
    memory_bytes: int | None
    mini_batch: int | None
    time_limit: float | None
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
    found: list[tuple[Splits, SplitPoint]] = []
    shown: list[Point] = []
    least: list[int] = []
    notes = list(asked.notes)
    exact, seconds, held = True, 0.0, 0
    tracked, interrupted = _tracked(asked, samples, options)
    if interrupted:
        notes.append(f"ended early: what there was no time for was tracked as by --within {_ROUGH}")
    for count, splits in zip(asked.counts, tracked, strict=True):
        limit = asked.limit(count)
        own = _with_turning_points([_point(splits, point) for point in splits.points])
        fitting = [index for index, point in enumerate(own) if limit is None or point.memory_bytes <= limit]
        found += [(splits, splits.points[index]) for index in fitting]
        shown += [own[index] for index in fitting]
        notes += sharing_notes(count, samples, [own[index].repeated or 0.0 for index in fitting], splits.model)
        least.append(splits.points[0].memory_bytes)
        if limit is not None and least[-1] > limit:
            notes.append(f"{named_devices(count)}: not enough, each would need at least {format_bytes(least[-1])}")
        exact, seconds = exact and splits.exact, seconds + splits.seconds
        notes += _proof_notes(count, splits)
        held += splits.tracked.eliminations["heuristic"]
    notes += share_notes(asked.profile, tracked[-1].model) if asked.counts[-1] > 1 else ()
    notes += [*device_notes(asked.device, tracked[-1].model), *grain_notes(tracked[-1].model)]
    report = FrontierReport(
        asked.profile.name,
        "all",
        "one stage on all devices, split by " + ("blocks" if asked.whole_blocks else "operators"),
        samples,
        exact,
        seconds,
        tuple(shown),
        tuple(notes),
        interrupted,
        factor=None if held else max(each.factor for each in tracked),
        factor_without=() if all(each.settled for each in tracked) else ("workspace",),
    )

    def plan_of(chosen: int) -> Plan:
        splits, point = found[chosen]
        return plan_of_strategy(
            asked.profile,
            splits.model,
            point.strategy,
            cluster=asked.cluster,
            memory_bytes=asked.memory_bytes,
        )

    return Found(report, plan_of, min(least))


def _proof_notes(count: int, splits: Splits) -> Iterator[str]:
    """What of a frontier is not exact, and what is proved of it all the same."""
    devices, factor = named_devices(count), splits.factor
    if held := splits.tracked.eliminations["heuristic"]:
        yield f"{devices}: not exact, {held} operators were settled by heuristic elimination"
        return
    apart = "" if splits.settled else ", workspace apart: strategies that hold more might need less of it"
    if factor > 1:
        yield f"{devices}: proved to be within {factor - 1:.2%} of every strategy in memory and time{apart}"
    elif apart:
        yield f"{devices}: exact{apart}"


def _tracked(asked: Asked, samples: int, options: CostOptions) -> tuple[list[Splits], bool]:
    """The frontier on every number of devices; when time runs out, or at Ctrl-C, the rest roughly, and True."""

    def on(count: int, within: float, seconds: float) -> Splits:
        given = (asked.profile, asked.cluster, count, samples)
        return split_frontier(*given, device=asked.device, options=options, within=within, seconds=seconds)

    settling = _SETTLING if asked.time_limit is None else min(_SETTLING, _SETTLING_SHARE * asked.time_limit)
    found: list[Splits] = []
    try:
        with interrupted_after(asked.time_limit):
            found.extend(on(count, asked.within, settling) for count in asked.counts)  # one by one: what is done stays
    except KeyboardInterrupt:
        rest = asked.counts[len(found) :]
        return found + [on(count, max(asked.within, _ROUGH), 0.0) for count in rest], True
    return found, False


_SETTLING, _SETTLING_SHARE = 10.0, 0.2
"""Seconds for strategies that have less workspace, so that what is proved holds for peaks; at most, of a time limit."""

_ROUGH = 0.01
"""Within this a frontier is tracked in seconds where the exact one would take minutes."""


def _point(splits: Splits, point: SplitPoint) -> Point:
    """A strategy of a split model as a point."""
    strategy = point.strategy
    share = repeated_share(splits.model, strategy)
    chosen = {name: splits.model.configurations[name][each].name for name, each in strategy.configurations.items()}
    return Point(
        splits.num_devices,
        point.memory_bytes,
        point.time_ns,
        splits.words(strategy),
        workspace_bytes=point.workspace_bytes,
        repeated=share,
        configurations=chosen,
    )


_PLANS_SECONDS = 60.0
"""The time limit for whole plans where none is given: of them there is no end."""


def of_plans(asked: Asked, *, quickest: bool = False) -> Found:
    """Whole plans, pipelines or not, for every number of devices; those that should be ``quickest`` come first."""
    batch = asked.batch
    request = Request(
        profile=asked.profile,
        placement="auto",
        num_devices=asked.counts[-1],
        chunks=None,
        batch=batch,
        sizes=asked.profile.microbatch_sizes or (batch.microbatch_size,),
        options=Options(time_limit=_PLANS_SECONDS if asked.time_limit is None else asked.time_limit),
        cluster=asked.cluster,
        memory_bytes=asked.memory_bytes,
        progress=None,
    )
    found = plan_frontier(request, asked.counts, quickest=quickest)
    points = _with_turning_points(
        [
            Point(
                point.num_devices,
                point.memory_bytes,
                point.iteration_ns,
                _words(point.plan),
                workspace_bytes=point.workspace_bytes,
                configurations=_ways(point.plan),
            )
            for point in found.points
        ]
    )
    note = f"{found.num_tried} partitions were tried: no plan among them beats one of these"
    if found.interrupted:
        left = (
            f"at least {found.num_untried} were not tried"
            if found.num_untried
            else "how many are left was not found out"
        )
        note += f"; time ran out ({left}): raise --time-limit for more"
    if found.rough:
        note += f"; on {', '.join(map(str, found.rough))} devices there was no time for all strategies of one stage"
    report = FrontierReport(
        asked.profile.name,
        "all",
        "whole plans",
        batch.mini_batch,
        False,
        found.seconds,
        tuple(points),
        (*asked.notes, *(f"{named_devices(count)}: {error}" for count, error in found.failures.items()), note),
        found.interrupted,
        tried=found.num_tried,
        untried=found.num_untried,
    )
    return Found(report, lambda chosen: found.points[chosen].plan, min(point.memory_bytes for point in points))


def _words(plan: Plan) -> str:
    """A plan in a few words: stages as replicas x shards, runs of equal ones together, schedule, size."""
    ways = [_stage_words(stage) for stage in plan.stages]
    runs = [(way, len(list(same))) for way, same in groupby(ways)]
    stages = ", ".join(f"{count} of {way}" if count > 1 else way for way, count in runs)
    number = f"{len(ways)} stage{'s' if len(ways) > 1 else ''}"
    return f"{number}: {stages}; {plan.provenance.scheduler}, micro-batches of {plan.microbatch_size}"


def _stage_words(stage: Stage) -> str:
    """Replicas x shards, or that every block is split in a way of its own, and which ways are most frequent."""
    each = set(stage.configurations)
    blocks = f"{len(stage.devices)} by block ({most_frequent(stage.configurations)})"
    own = blocks if len(each) > 1 else "".join(each)
    return (own or f"{stage.replicas}x{stage.shards}") + (" recomputed" if stage.recompute else "")


def _ways(plan: Plan) -> dict[str, str]:
    """Every block's replicas and how each of them splits it, as 2xshards4."""
    return {
        block: f"{stage.replicas}x{stage.configurations[index] if stage.configurations else f'shards{stage.shards}'}"
        for stage in plan.stages
        for index, block in enumerate(stage.blocks)
    }


def chosen_points(
    asked: Asked, found: Found, mode: str, number: int | None = None
) -> tuple[FrontierReport, Sequence[int]]:
    """The report with what a mode asks for, marked; and which of what was found its points are, for their plans.

    ``number`` chooses the n-th point of those that the mode shows instead.

    Raises:
        UsageError: so many points there are not.
        InfeasibleError: nothing fits.
    """
    points = found.report.points
    if not points:
        raise InfeasibleError(
            f"nothing fits into {format_bytes(asked.limit(asked.counts[-1]) or 0)}: "
            f"{named_devices(*asked.counts)} need at least {format_bytes(found.least_bytes)} each "
            f"for {found.report.samples} samples per iteration; " + remedies(asked.profile, asked.whole_blocks)
        )
    marked = [replace(point, price_per_hour=asked.price_per_hour(point.num_devices)) for point in points]
    shown, chosen = _of_mode(points, mode)
    if number is not None:
        if number > len(shown):
            raise UsageError(f"--point {number}: there are {len(shown)} points; choose one of 1 to {len(shown)}")
        chosen = shown[number - 1]
    marked[chosen] = replace(marked[chosen], chosen=True)
    points = tuple(marked[index] for index in shown)
    return replace(found.report, mode=mode, points=points, chosen=shown.index(chosen) + 1), shown


def _of_mode(points: Sequence[Point], mode: str) -> tuple[Sequence[int], int]:
    """The points that a mode shows, and the one that it chooses."""
    every = range(len(points))
    if mode == "all":
        most = [index for index in every if points[index].num_devices == points[-1].num_devices]
        turning = [index for index in most if points[index].turning_point]
        return every, turning[0] if turning else _quickest(points, most)
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


def _with_turning_points(points: Sequence[Point]) -> list[Point]:
    """The same points with the turning point of every number of devices marked, where there is one."""
    marked = list(points)
    for same in _by_devices(points):
        turning = turning_point([points[i].memory_bytes for i in same], [points[i].time_ns for i in same])
        if turning is not None:
            marked[same[turning]] = replace(points[same[turning]], turning_point=True)
    return marked
