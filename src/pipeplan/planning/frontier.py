"""The frontier of ``pipeplan frontier``: of splits of one stage or of whole plans, and which points a mode chooses.

Beside its points stand what is proved of them, and what a reader must know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby
from math import prod
from operator import attrgetter
from typing import Any, Literal

from pipeplan.costs.devices import device_preset
from pipeplan.costs.throughput import Throughput, Yardstick
from pipeplan.display import Displayed
from pipeplan.errors import PipeplanError, SearchTimeoutError, UsageError
from pipeplan.files import Cluster, Placement, Plan, Profile
from pipeplan.partition.strategies import STRATEGIES
from pipeplan.planning.plan_frontier import PlanFrontier, PlanPoint, SharingPoints, plan_frontier, sharing_points
from pipeplan.planning.request import (
    ALL,
    AskedSizes,
    Batch,
    Request,
    Splitting,
    choose_placement,
    input_notes,
    planned_for,
    require_devices,
    require_sizes,
)
from pipeplan.planning.sharding_frontier import (
    SplitPoint,
    Splits,
    costs_of_splits,
    most_frequent,
    split_frontier,
    unprofiled_words,
)
from pipeplan.planning.too_large import more_ways, nothing_fits, one_share, too_large
from pipeplan.schedule.state import Progress, scheduler_words
from pipeplan.search_constants import (
    FIRST_SECONDS,
    FRONTIER_LATE,
    FRONTIER_MAKING,
    FRONTIER_SECONDS,
    FRONTIER_SHARING,
    LATE,
    LATE_SHARE,
    ROUGH,
    SETTLING_SECONDS,
    SETTLING_SHARE,
    TRACKED_ROUGHLY,
    TRACKED_SECONDS,
    TRACKED_SOON,
    TRACKED_SOON_SHARE,
)
from pipeplan.sharding.baselines import ONLY
from pipeplan.sharding.cost_model import CostModel
from pipeplan.sharding.graph import Strategy
from pipeplan.sharding.tracking import knee
from pipeplan.simulator.spares import Spares
from pipeplan.time_limit import Limit
from pipeplan.units import format_bytes, format_ns, named_devices
from pipeplan.workload.elements import Stage
from pipeplan.workload.slices import parts_words
from pipeplan.workload.workload import Workload

Mode = Literal["all", "min-time", "min-devices", "profile"]
"""All points; all, and choose the quickest; those on fewest devices; or the quickest for each number of devices."""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A point: memory of the device that needs most, time of one iteration, and what it is in a few words.

    ``memory_bytes`` is the peak of its plan, ``workspace_bytes`` what of that is workspace.
    ``price_per_hour`` is that of its devices, None where the cluster has no prices. At the knee extra
    memory stops paying off. ``repeated`` is the part of the computing that several devices do alike, None where nobody
    counted; ``configurations`` says of every block how it is split. ``unprofiled`` says which samples on a device some
    of it runs without costs for them, empty where there are costs for all; the time is then between ``bounds_ns``, of
    which the upper one is None where the profile's own times grow more than in proportion to samples.
    """

    num_devices: int
    memory_bytes: int
    time_ns: int
    what: str
    turning_point: bool = False
    chosen: bool = False
    workspace_bytes: int = 0
    price_per_hour: float | None = None
    repeated: float | None = None
    configurations: dict[str, str] = field(default_factory=dict)
    unprofiled: str = ""
    bounds_ns: tuple[int, int | None] | None = None

    @property
    def price(self) -> float | None:
        """The price of one iteration."""
        return None if self.price_per_hour is None else self.price_per_hour * self.time_ns / 3.6e12


@dataclass(frozen=True, slots=True)
class FrontierResult(Displayed):
    """A frontier, fewest devices and then least memory first, and how to make the ``plans`` of its points.

    ``exact`` says whether every strategy was covered; where it is not, ``notes`` say what was left out. ``factor`` is
    what was proved: no strategy has less memory and less time than all points by more; None where nothing was. Of the
    memory in that proof ``factor_without`` names what was left out: nothing, or "workspace". The
    ``chosen`` point is the one written as a plan, counted from 1. ``profiled_only``: what is proved is proved of
    strategies at sizes that were profiled; others were compared by the nearest size in proportion. Partitions
    ``tried``, and the fewest that were ``untried`` when it was ``interrupted``, are those of whole plans. Where blocks
    are split operator by operator there are no plans to write, and ``makes_plans`` is false. ``spares`` say what spare
    devices cost. Whole plans ``stopped`` where a signal ended the search, not the time limit.
    """

    name: str
    mode: Mode
    of: str
    samples: int
    exact: bool
    seconds: float
    points: tuple[FrontierPoint, ...]
    plans: tuple[Callable[[], Plan], ...]
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    factor: float | None = None
    factor_without: tuple[str, ...] = ()
    chosen: int = 1
    profiled_only: bool = False
    tried: int | None = None
    untried: int | None = None
    makes_plans: bool = True
    spares: Spares | None = None
    stopped: bool = False
    measures: Mapping[int, tuple[Yardstick, float]] = field(default_factory=dict)
    yardstick: Yardstick = field(kw_only=True)

    def __repr__(self) -> str:
        return f"<FrontierResult {self.name!r}: {len(self.points)} points, {self.proved}>"

    def throughput(self, point: FrontierPoint) -> Throughput:
        """The throughput of a point's iteration."""
        alike = self.yardstick, float(point.num_devices)
        yardstick, devices = self.measures.get(point.num_devices, alike)
        return yardstick.throughput(self.samples, point.time_ns, devices)

    def plan(self, number: int | None = None) -> Plan:
        """The plan of a point, counted from 1; by default of the chosen one.

        Raises:
            UsageError: plans cannot say what the point's strategy does.
            InvalidPlanError: it needs more memory than a device has.
        """
        return self.plans[(number or self.chosen) - 1]()

    @property
    def proved(self) -> str:
        """How far the points are proved, in a few words."""
        if self.factor is None:
            return "exact" if self.exact else "found, not proved"
        proved = f"proved within {self.factor - 1:.2%}" if self.factor > 1 else "exact"
        where = " at profiled sizes" * self.profiled_only
        return ", ".join([f"{proved}{where}", *(f"{each} apart" for each in self.factor_without)])

    @property
    def written(self) -> str:
        """The chosen point in a few words."""
        point = self.points[self.chosen - 1]
        figures = f"{format_bytes(point.memory_bytes)}, {format_ns(point.time_ns)}, {named_devices(point.num_devices)}"
        marks = ", the knee" * point.turning_point
        return f"point {self.chosen} of {len(self.points)} ({figures}{marks})"

    def figures(self) -> dict[str, object]:
        """The object of ``frontier --json``."""
        return {
            "name": self.name,
            "mode": self.mode,
            "of": self.of,
            "samples": self.samples,
            "exact": self.exact,
            "factor": self.factor,
            "factor_without": list(self.factor_without),
            "profiled_only": self.profiled_only,
            "seconds": self.seconds,
            "chosen": self.chosen,
            "points": [
                {"number": number} | asdict(point) | {"price": point.price} | self.throughput(point).figures()
                for number, point in enumerate(self.points, start=1)
            ],
            "notes": list(self.notes),
            "interrupted": self.interrupted,
            "tried": self.tried,
            "untried": self.untried,
            **({} if self.spares is None else {"spares": self.spares.figures()}),
        }


def frontier_notes(request: Request) -> Iterator[str]:
    """What must be known of the costs, and what counts as equal or is left out because the cluster's devices differ."""
    yield from input_notes(request)
    if reserve := max(request.reserve):
        yield f"memory does not include the reserve of {format_bytes(reserve)} on each device"
    if request.cluster is None:
        return
    kinds = request.cluster.first(request.num_devices).devices
    if request.splitting is not None and len({(kind.name, kind.memory_bytes) for kind in kinds}) > 1:
        names = ", ".join(f"{kind.count} {kind.name}" for kind in kinds)
        yield f"devices differ ({names}): all count as the profile's, with the memory of the smallest"
    unpriced = [kind.name for kind in kinds if kind.price_per_hour is None]
    if 0 < len(unpriced) < len(kinds):
        yield f"no price_per_hour for {', '.join(unpriced)}: points that use them have no price"


def _shared_by_rows(profile: Profile) -> bool:
    """Whether devices may share sequences or experts by the rows of a profile."""
    return any(row.context > 1 or row.expert > 1 for block in profile.kinds for row in block.costs)


def _shares_stages(splitting: Splitting) -> bool:
    """Whether layouts stand among its points whose devices share something over the whole stage: they are plans."""
    return splitting.whole_blocks and splitting.only is None


def repeated_share(model: CostModel, strategy: Strategy) -> float:
    """The part of a strategy's computing that several devices do alike, 0 to 1: time of devices beyond one copy."""
    spent = repeated = 0.0
    for name, index in strategy.configurations.items():
        way = model.configurations[name][index]
        copies = model.resharding.devices / prod(split.extent for split in way.splits.values())
        spent += way.compute_ns
        repeated += way.compute_ns * (1 - 1 / copies)
    return repeated / spent if spent else 0.0


def sharing_notes(num_devices: int, samples: int, shares: Sequence[float], model: CostModel) -> Iterator[str]:
    """Why devices of a split model do the same, how much of it there is at its points, and what is not taken apart."""
    if samples % num_devices:
        yield f"{named_devices(num_devices)}: {samples} samples cannot be split evenly over them"
    least, most = min(shares, default=0.0), max(shares, default=0.0)
    if most >= 0.01:
        part = f"{least:.0%} to {most:.0%}" if round(most - least, 2) else f"{most:.0%}"
        yield f"{named_devices(num_devices)}: {part} of the computing is repeated on several devices"
    blocks = [node for node in model.operators.nodes if node.operation.kind == "block"]
    if blocks and not model.options.blocks:
        count = len({node.block for node in model.operators.nodes})
        yield f"{named_devices(num_devices)}: {len(blocks)} of {count} blocks stay whole: their dimensions are unknown"


def device_notes(device: str | None, model: CostModel) -> Iterator[str]:
    """A note that the requested device sets no times: whole blocks have their rows' times, however they are split."""
    if device and all(node.operation.kind == "block" for node in model.operators.nodes):
        yield f"--device {device} changes nothing: all blocks are split whole, with the times of the profile's rows"


def grain_notes(model: CostModel) -> Iterator[str]:
    """A note that times by operators differ from those by blocks, whose gradients are summed together."""
    summed = {name for name, ways in model.configurations.items() if any(way.sync_ns for way in ways)}
    blocks = {node.block for node in model.operators.nodes if node.name in summed}
    if len(summed) > len(blocks):
        yield (
            f"times are not comparable with those by blocks: gradients are summed for each of {len(summed)} "
            f"operators here, for each of {len(blocks)} blocks there, and every sum costs its latency"
        )


def share_notes(profile: Profile, model: CostModel) -> Iterator[str]:
    """A note that the profile only allows splits by samples, so that there may be a single point."""
    axes = [{axis for way in ways for axis in way.splits} for ways in model.configurations.values()]
    stuck = sum(each <= {"samples"} for each in axes)
    if stuck and one_share(profile, model.options.blocks):
        few = "as the profile has rows for one share only"
        yield f"{stuck} of {len(axes)} blocks can be split by samples only, {few}: {more_ways(profile)}"


def frontier_request(
    profile: Profile,
    *,
    devices: Sequence[int] | None = None,
    cluster: Cluster | None = None,
    memory_bytes: int | None = None,
    reserve_bytes: int | None = None,
    mini_batch: int | None = None,
    zero: int | Literal["auto"] | None = None,
    zero_group: int | None = None,
    time_limit: float | None = None,
    mode: Mode = "all",
    splitting: Splitting | None = None,
    spares: int = 0,
    placement: Placement | str = "auto",
    **sizes: Any,
) -> Request:
    """The request of a frontier: with ``splitting`` of one stage on all devices, else of whole plans.

    Plans are placed as ``placement`` says, as in a search: by the profile's own, or one that is given, on its devices
    alone. The mini-batch is the same for all numbers of devices; that of one stage is one micro-batch. ``sizes`` are
    fields of whole plans' requests that say how devices are shared out, and ``recompute``; without ``devices`` the
    numbers are those of the default that can be shared out so.

    Raises:
        UsageError: no number of devices is said, or more than the cluster has; a mode that needs a memory limit;
            devices that cannot be shared out as is said, or that the placement is not for.
    """
    if devices is None and cluster is None and all(sizes.get(name) for name in AskedSizes._fields):
        devices = (prod(sizes[name] for name in AskedSizes._fields),)
    planned = planned_for(cluster, devices, spares) if spares else 0
    if splitting is None:
        placement, devices = _placed(profile, placement, devices, cluster, planned)
    counts = _counts(devices, cluster.first(planned) if cluster and planned else cluster, mode, splitting)
    if splitting is None:
        counts = _shared_out(profile, cluster, counts, sizes | {"zero": zero}, given=devices is not None)
    if splitting is not None and (zero, zero_group) != (None, None):
        raise UsageError("--zero is for plans with replicas, and one stage has none; add --plans, or leave it out")
    common: dict[str, Any] = {
        "cluster": cluster,
        "memory_bytes": memory_bytes,
        "reserve_bytes": reserve_bytes,
        "zero": zero,
        "zero_group": zero_group,
        "device_counts": counts,
        **sizes,
    }
    if splitting is None:
        asked: dict[str, Any] = {"devices": counts[-1], "placement": placement, "mini_batch": mini_batch}
        limit = FRONTIER_SECONDS if time_limit is None else time_limit
        request = replace(Request.of(profile, **asked, **common, time_limit=limit), spares=spares)
    else:
        batch = Batch(1, mini_batch or (max(profile.microbatch_sizes, default=1) * counts[-1]))
        request = Request(
            profile,
            counts[-1],
            batch,
            **common,
            time_limit=math.inf if time_limit is None else time_limit,
            splitting=splitting,
            spares=spares,
            samples_assumed=mini_batch is None,
        )
    request.require_sharing()
    kinds = () if cluster is None or splitting is None else cluster.first(counts[-1]).devices
    if (other := next((kind for kind in kinds if kind.speed != 1), None)) is not None:
        raise UsageError(
            f"a frontier of one stage is for devices as fast as the profile's, and those called {other.name!r} have "
            f"speed {other.speed:g}; add --plans, or leave out speed in the cluster"
        )
    if mode == "min-devices" and all(each.least_memory is None for each in request.by_devices):
        raise UsageError("--mode min-devices: without a memory limit one device is enough; say --memory of each device")
    return request


def _placed(
    profile: Profile,
    placement: Placement | str,
    devices: Sequence[int] | None,
    cluster: Cluster | None,
    planned: int,
) -> tuple[Placement | str, Sequence[int] | None]:
    """Where plans are placed, and on how many devices, as a search has it; beside spare ones on those ``planned``.

    Raises UsageError.
    """
    own = profile.placement
    if isinstance(placement, str) and ((placement, own) == ("auto", None) or placement in (ALL, *STRATEGIES)):
        if devices is None and cluster is None and own is not None:
            devices = (own.num_devices,)
        return ALL if placement == "auto" else placement, devices
    return placement, tuple(choose_placement(profile, placement, count)[1] for count in devices or (planned or None,))


def _shared_out(
    profile: Profile, cluster: Cluster | None, counts: tuple[int, ...], said: Mapping[str, Any], *, given: bool
) -> tuple[int, ...]:
    """The numbers of devices that can be shared out as is said; all of them must be where they are given.

    Raises:
        UsageError: one that must cannot.
    """
    able: list[int] = []
    for count in counts:
        try:
            require_sizes(profile, "auto", count, said, cluster)
        except UsageError:
            if given or (count == counts[-1] and not able):
                raise
        else:
            able.append(count)
    return tuple(able)


def _counts(
    devices: Sequence[int] | None, cluster: Cluster | None, mode: Mode, splitting: Splitting | None
) -> tuple[int, ...]:
    """Numbers of devices to look at: those asked for; powers of two below a most where a mode compares."""
    if devices is None and cluster is None:
        raise UsageError("give --devices or a --cluster")
    available = 0 if cluster is None else cluster.num_devices
    most = max(devices) if devices is not None else available
    require_devices(cluster, most)
    if devices is not None and (len(devices) > 1 or mode != "min-devices"):
        return tuple(devices)
    if mode in ("min-devices", "profile") or (splitting is None and mode == "all"):
        return tuple(sorted({1 << power for power in range(most.bit_length()) if 1 << power <= most} | {most}))
    return (most,)


def search_frontier(
    request: Request,
    *,
    mode: Mode = "all",
    point: int | None = None,
    within: Limit | None = None,
    progress: Progress | None = None,
    workers: int = 1,
    executor: Executor | None = None,
    written: float = 0,
) -> FrontierResult:
    """All strategies that no other one found beats in memory, time and devices, and the one that ``mode`` chooses.

    ``point`` chooses one of those that the mode shows instead, by its number. When time runs out, or at Ctrl-C, what
    was found until then. ``progress`` hears of the quickest so far. Searches for whole plans may have ``workers`` or an
    ``executor``, and leave time for the plans of as many points as are to be ``written``.

    Raises:
        UsageError: there are fewer points than ``point``.
        InfeasibleError: nothing fits.
    """
    with request.reserve_said():
        if request.splitting is None:
            by: dict[str, Any] = {"workers": workers, "executor": executor, "written": written}
            found = _of_plans(request, within, progress, quickest=mode in ("min-time", "profile"), **by)
        else:
            found = _of_splits(request, request.splitting, within, progress, written)
    return _chosen(found, mode, point)


def _of_splits(
    request: Request, splitting: Splitting, within: Limit | None, progress: Progress | None, written: float
) -> FrontierResult:
    """One stage on all devices, for every number of them."""
    samples, requests = request.batch.mini_batch, request.by_devices
    points: list[FrontierPoint] = []
    plans: list[Callable[[], Plan]] = []
    notes = list(frontier_notes(request))
    within = Limit.part_of(within, request.time_limit)
    shared = _sharing(requests, splitting, within)
    bounds = {each.num_devices: known for each in requests if (known := too_large(each, splitting, within)) is not None}
    notes += (f"{named_devices(count)}: {_not_enough(known.num_bytes)}" for count, known in bounds.items())
    requests = [each for each in requests if each.num_devices not in bounds]
    tracked, interrupted = list[Splits](), False
    if requests:
        try:
            tracked, interrupted = _tracked(requests, splitting, within, progress, written)
        except (SearchTimeoutError, KeyboardInterrupt):
            interrupted = True
            if not any(each.points for each in shared.values()):
                raise
    if interrupted and tracked:
        notes.append(f"ended early: the rest was tracked with --tolerance {ROUGH}, or as near as there was time for")
    untracked = {each.num_devices for each in requests} - {each.num_devices for each in tracked}
    if untracked:
        notes.append(f"on {named_devices(*sorted(untracked))} there was no time to track any: raise --time-limit")
    of_count = {each.num_devices: each for each in tracked}
    for own in request.by_devices:
        count, limit, splits = own.num_devices, own.least_memory, of_count.get(own.num_devices)
        ways = list[tuple[FrontierPoint, Callable[[], Plan]]]()
        if (laid := shared.get(count)) is not None:
            ways += [(_plan_point(own, each), partial(attrgetter("plan"), each)) for each in laid.points]
            notes.append(_sharing_note(count, laid))
        if splits is not None:
            ways += [(_split_point(splits, each), partial(splits.plan, own, n)) for n, each in enumerate(splits.points)]
        if laid is not None:
            ways = _unbeaten(ways)
        marked = _with_knees([point for point, _ in ways])
        fitting = [index for index, each in enumerate(marked) if limit is None or each.memory_bytes <= limit]
        plans += [ways[index][1] for index in fitting]
        points += [replace(marked[index], price_per_hour=_price_per_hour(own)) for index in fitting]
        if splits is None:
            continue
        repeated = [share for index in fitting if (share := marked[index].repeated) is not None]
        notes += sharing_notes(count, samples, repeated, splits.model)
        least = splits.points[0].memory_bytes
        if limit is not None and least > limit:
            notes.append(f"{named_devices(count)}: {_not_enough(least)}")
        notes += _proof_notes(count, splits, [marked[index] for index in fitting])
    if not points:
        found = {each.num_devices: each.points[0].memory_bytes for each in tracked}
        raise nothing_fits(request, splitting, _as_plans(request), found, bounds, within)
    unprofiled = any(point.unprofiled for point in points)
    again = any(each.model.counted_again for each in tracked)
    factor = max((each.factor_of_all for each in tracked), default=math.inf)
    covered = bool(tracked) and all(each.complete for each in shared.values())
    notes += share_notes(request.profile, tracked[-1].model) if tracked and request.num_devices > 1 else ()
    if splitting.only is not None:
        notes.append(
            f"--only {splitting.only}: {ONLY[splitting.only].words}; what is proved is of such strategies alone"
        )
    if tracked:
        notes += [*device_notes(splitting.device, tracked[-1].model), *grain_notes(tracked[-1].model)]
    return FrontierResult(
        request.profile.name,
        "all",
        "one stage on all devices, split by "
        + ("blocks" if splitting.whole_blocks else "operators")
        + (f", only {splitting.only}" if splitting.only is not None else ""),
        samples,
        covered and all(each.exact for each in tracked) and not unprofiled,
        sum(each.seconds for each in tracked),
        tuple(points),
        tuple(plans),
        tuple(notes),
        interrupted,
        factor=None if unprofiled or again or not covered or factor == math.inf else factor,
        factor_without=() if all(each.settled for each in tracked) else ("workspace",),
        yardstick=_yardstick(request.profile, splitting.device),
        profiled_only=any(each.model.extrapolates for each in tracked),
        makes_plans=splitting.whole_blocks,
    )


def _sharing(requests: Sequence[Request], splitting: Splitting, within: Limit) -> dict[int, SharingPoints]:
    """{devices: layouts of one stage that share sequences or experts}, where rows have their costs.

    They come first, as there is no end to what tracking may take, and have a part of the time.
    """
    profile = requests[0].profile
    if not _shares_stages(splitting) or not _shared_by_rows(profile):
        return {}
    limit, found = Limit.part_of(within, FRONTIER_SHARING * within.seconds), dict[int, SharingPoints]()
    with within.hearing_interrupts():
        for each in requests:
            if each.num_devices > 1:
                plain: dict[str, Any] = {"positions": 1, "zero": 0, "recompute": False}
                found[each.num_devices] = sharing_points(_as_plans(each, **plain), limit)
    return found


def _sharing_note(count: int, found: SharingPoints) -> str:
    """What was tried beside strategies of blocks."""
    tried = f"{named_devices(count)}: {found.num_tried} layouts whose devices share sequences or experts, each over the"
    text = f"{tried} whole stage and in micro-batches of profiled sizes, were tried, too"
    return text if found.complete else f"{text}; not all, as time ran out: raise --time-limit"


def _unbeaten(
    ways: Iterable[tuple[FrontierPoint, Callable[[], Plan]]],
) -> list[tuple[FrontierPoint, Callable[[], Plan]]]:
    """Those with less time than all with as little memory, least memory first."""
    found = list[tuple[FrontierPoint, Callable[[], Plan]]]()
    for point, make in sorted(ways, key=lambda way: (way[0].memory_bytes, way[0].time_ns)):
        if not found or point.time_ns < found[-1][0].time_ns:
            found.append((point, make))
    return found


def _not_enough(least: int) -> str:
    return f"not enough, each would need at least {format_bytes(least)}"


def _as_plans(request: Request, **sizes: Any) -> Request:
    """The same asked of whole plans, of such ``sizes``."""
    return frontier_request(
        request.profile,
        devices=(request.num_devices,),
        cluster=request.cluster,
        memory_bytes=request.memory_bytes,
        reserve_bytes=request.reserve_bytes,
        mini_batch=request.batch.mini_batch,
        **sizes,
    )


def _proof_notes(count: int, splits: Splits, points: Sequence[FrontierPoint]) -> Iterator[str]:
    """What of a frontier is not exact, and what is proved of it all the same."""
    devices, factor = named_devices(count), splits.factor
    if any(point.unprofiled for point in points):
        yield (
            f"{devices}: nothing is proved, as points have samples on a device that the profile has no costs for; the "
            "nearest size stands for them in proportion: profile more --microbatch sizes, or lower --mini-batch"
        )
        return
    if splits.model.extrapolates:
        yield f"{devices}: what is proved is of strategies at profiled sizes; no other was found to be better"
    if again := splits.model.counted_again:
        more = f" and {len(again) - 1} more" if len(again) > 1 else ""
        yield (
            f"{devices}: not exact, as {again[0]!r}{more} may count more than once on a device: the blocks that "
            "share it are too many or too entangled to try all ways of keeping one copy"
        )
        return
    apart = "" if splits.settled else ", workspace apart: strategies that hold more might need less of it"
    if held := splits.tracked.eliminations["heuristic"]:
        of_all = splits.factor_of_all
        every = f"within {of_all - 1:.2%} of every strategy in memory and time" if of_all < math.inf else "not at all"
        yield (
            f"{devices}: not exact, {held} operators were settled by heuristic elimination: proved to be {every}, and "
            f"within {factor - 1:.2%} of those with the same choices{apart}"
        )
    elif factor > 1:
        yield f"{devices}: proved to be within {factor - 1:.2%} of every strategy in memory and time{apart}"
    elif apart:
        yield f"{devices}: exact{apart}"


def _tracked(
    requests: Sequence[Request],
    splitting: Splitting,
    within: Limit | None,
    progress: Progress | None,
    written: float = 0,
) -> tuple[list[Splits], bool]:
    """The frontier on every number of devices; when time runs out, or at Ctrl-C, the rest roughly, and True.

    Costs are worked out once, the first ones in all of the time, as nothing is without. Each number is tracked roughly
    for a moment first, as far as that goes, so that there is something at any time: after an interruption that is the
    answer at once. When time runs out the rest is tracked roughly in a part of the time that is kept for it, unless the
    moment was enough. What there is nothing of is left out. Of as many points as are ``written`` plans are made
    afterwards, for each of which as much time is left as one of the first points takes.

    Raises:
        KeyboardInterrupt: interrupted before there was anything.
        SearchTimeoutError: time was up before there was anything.
    """
    limit = Limit.part_of(within, requests[0].time_limit)
    settling = min(SETTLING_SECONDS, SETTLING_SHARE * limit.seconds)
    soon = min(TRACKED_SOON, TRACKED_SOON_SHARE * limit.seconds)
    patience = max(0.0, -limit.left()) + FRONTIER_LATE * max(LATE, LATE_SHARE * limit.seconds)
    making: list[float] = []  # seconds for plans, once they are known
    limit.reserved = TRACKED_ROUGHLY * limit.seconds if limit.seconds < math.inf else 0.0
    rough = replace(splitting, within=max(splitting.within, ROUGH))
    found: dict[int, Splits] = {}
    nearly: dict[int, Splits] = {}
    models: dict[int, CostModel] = {}

    def costs(each: Request) -> CostModel:
        if not models:
            kept, limit.reserved = limit.reserved, 0.0
            limit.wait(0.0, FIRST_SECONDS, patience)
            models[each.num_devices] = costs_of_splits(each, splitting)
            limit.reserved = kept
            limit.wait_no_longer()
        elif each.num_devices not in models:
            models[each.num_devices] = costs_of_splits(each, splitting)
        return models[each.num_devices]

    def track_roughly(each: Request) -> None:
        nearly[each.num_devices] = split_frontier(each, rough, model=costs(each), as_far=True)

    def keep_for_plans(each: Request, splits: Splits) -> None:
        """Find out how long plans take by making one, and keep that much."""
        if written and splits.points and not making:
            begun = limit.elapsed
            with suppress(PipeplanError):  # which is said where it is written
                splits.plan(each, 0)
            plans = min(written, len(requests) * len(splits.points))
            making.append(min(plans * (limit.elapsed - begun), FRONTIER_MAKING * limit.seconds))
            limit.reserved += sum(making)

    def unfinished(each: Request) -> bool:
        """Whether more of it can be found roughly."""
        own = nearly.get(each.num_devices)
        return each.num_devices not in found and (own is None or own.factor > 1 + rough.within)

    with limit.hearing_interrupts():
        with limit.ended():
            for each in requests:
                model = costs(each)
                moment = Limit.part_of(limit, soon)
                moment.wait(0.0, soon)
                with moment.ended():
                    track_roughly(each)
                if each.num_devices in nearly:
                    keep_for_plans(each, nearly[each.num_devices])
                if each is requests[-1] and not unfinished(each):
                    limit.reserved = sum(making)
                if progress is not None and (nearly or found):
                    best = min(point.time_ns for splits in (nearly | found).values() for point in splits.points)
                    progress(f"one stage on {named_devices(each.num_devices)}", best, 0, limit.elapsed)
                found[each.num_devices] = split_frontier(each, splitting, seconds=settling, model=model)
        limit.reserved = sum(making)
        limit.wait(0.0, FIRST_SECONDS, patience)
        with limit.ended(), limit.finishing(TRACKED_SECONDS):
            for each in requests if models else ():  # else what took all of the time would only begin anew
                if unfinished(each) and not (limit.interrupted and (nearly or found)):
                    track_roughly(each)
    known = nearly | found
    if not known:
        if limit.interrupted:
            raise KeyboardInterrupt
        devices = named_devices(*(each.num_devices for each in requests))
        raise SearchTimeoutError(
            f"no strategies on {devices} were tracked in {limit.elapsed:.1f} s; raise --time-limit, or give --plans"
        )
    return [known[each.num_devices] for each in requests if each.num_devices in known], len(found) < len(requests)


def _split_point(splits: Splits, point: SplitPoint) -> FrontierPoint:
    """A strategy of a split model as a point."""
    strategy, model = point.strategy, splits.model_of(point)
    share = repeated_share(model, strategy)
    chosen = {name: model.configurations[name][each].name for name, each in strategy.configurations.items()}
    unprofiled, bounds = _unprofiled(splits, point)
    return FrontierPoint(
        splits.num_devices,
        point.memory_bytes,
        point.time_ns,
        splits.words(point),
        workspace_bytes=point.workspace_bytes,
        repeated=share,
        configurations=chosen,
        unprofiled=unprofiled,
        bounds_ns=bounds,
    )


def _unprofiled(splits: Splits, point: SplitPoint) -> tuple[str, tuple[int, int | None] | None]:
    """What of a point no size of the profile has, and what its time is between; None is no upper end."""
    found = splits.model_of(point).unprofiled_in(point.strategy)
    text = unprofiled_words(found)
    if not found:
        return text, None
    less = [each.less_ns for each in found if each.less_ns is not None]
    more = [each.more_ns for each in found if each.more_ns is not None]
    low = point.time_ns - sum(less) if len(less) == len(found) else 0
    return text, (low, point.time_ns + sum(more) if len(more) == len(found) else None)


def _of_plans(request: Request, within: Limit | None, progress: Progress | None, **how: Any) -> FrontierResult:
    """Whole plans, pipelines or not, for every number of devices, as :func:`.plan_frontier` is told."""
    found = plan_frontier(request, within=within, progress=progress, **how)
    points = [_plan_point(replace(request, num_devices=point.num_devices), point) for point in found.points]
    return FrontierResult(
        request.profile.name,
        "all",
        "whole plans",
        request.batch.mini_batch,
        False,
        found.seconds,
        tuple(_with_knees(points)),
        tuple(partial(attrgetter("plan"), point) for point in found.points),
        (*frontier_notes(request), *_plan_notes(found)),
        found.interrupted,
        tried=found.num_tried,
        untried=found.num_untried,
        stopped=found.stopped,
        measures={each: _measure(replace(request, num_devices=each)) for each in {one.num_devices for one in points}},
        yardstick=Yardstick.of(request.profile),
    )


def _measure(request: Request) -> tuple[Yardstick, float]:
    """The yardstick of a request's devices, and as many of those that times are of."""
    names = () if request.cluster is None else request.cluster.names[: request.num_devices]
    return Yardstick.of(request.profile, names), sum(request.speeds)


def _plan_point(request: Request, point: PlanPoint) -> FrontierPoint:
    """A plan for a request's devices as a point."""
    return FrontierPoint(
        point.num_devices,
        point.memory_bytes,
        point.iteration_ns,
        _words(point),
        workspace_bytes=point.workspace_bytes,
        price_per_hour=_price_per_hour(request),
        configurations=_ways(point.workload),
    )


def _yardstick(profile: Profile, device: str | None) -> Yardstick:
    """The profile's, where times are estimated those of a preset."""
    own = Yardstick.of(profile)
    return own if device is None else own.on(device_preset(device).title, own.dtype, estimated=True)


def _plan_notes(found: PlanFrontier) -> Iterator[str]:
    """What went wrong, on what numbers of devices nothing fits, and how much was tried."""
    yield from found.notes
    yield from (f"{named_devices(count)}: {error}" for count, error in found.failures.items())
    note = (
        f"{found.num_tried} partitions tried with known schedules, and no plan among them beats one of these; "
        "search with the --devices and --memory of a point may find a shorter one, or as short a one in less"
    )
    if found.interrupted:
        left = f"at least {found.num_untried} not tried" if found.num_untried else "it is not known how many are left"
        note += f"; interrupted ({left})" if found.stopped else f"; time ran out ({left}): raise --time-limit for more"
    if found.rough:
        note += (
            f"; on {', '.join(map(str, found.rough))} devices there was no time to track all strategies of one stage"
        )
    yield note


def _words(point: PlanPoint) -> str:
    """A plan in a few words: stages and what each runs on, equal neighbours together, schedule, size."""
    ways = [_stage_words(stage) for stage in point.workload.stages]
    runs = [(way, len(list(same))) for way, same in groupby(ways)]
    number = f"{len(ways)} stage{'s' if len(ways) > 1 else ''}"
    on, again = runs[0][0]
    stages = f"{number} on {on}{' each' if len(ways) > 1 else ''}{again}"
    if len(runs) > 1:
        stages = f"{number}: {', '.join(f'{count} on {on}{again}' for (on, again), count in runs)}"
    idle = len(point.workload.idle_devices)
    stages += f", {named_devices(idle)} {'runs' if idle == 1 else 'run'} nothing" if idle else ""
    sizes = f"micro-batches of {point.workload.microbatch_words}{parts_words(point.workload)}"
    return f"{stages}; {scheduler_words(point.scheduler)}, {sizes}"


def _stage_words(stage: Stage) -> tuple[str, str]:
    """What a stage runs on: devices, replicas, shards, or blocks split each in its own way; and what recomputes."""
    each, number = set(stage.configurations), len(stage.devices)
    if each:
        found = f"{named_devices(number)}, blocks split: {most_frequent(stage.configurations)}"
        found = f"({found})" if len(each) > 1 else found
    else:
        counts = [(stage.replicas, "replicas"), (stage.context, "context"), (stage.shards, "shards")]
        found = " x ".join(f"{count} {what}" for count, what in counts if count > 1) or "1 device"
    found += f", experts over {stage.expert}" if stage.expert > 1 else ""
    if stage.sharers > 1:
        found += f" (ZeRO {stage.zero}{f' over {stage.sharers}' if stage.sharers < stage.copies else ''})"
    return found, f", {stage.recomputed}" if stage.recomputes else ""


def _ways(workload: Workload) -> dict[str, str]:
    """Every block's replicas and how each of them splits it: 2xshards4, 2xcontext2xshards4 with experts over 8."""
    return {
        block: f"{stage.replicas}x{stage.configurations[index] if stage.configurations else _uniform_way(stage)}"
        for stage in workload.stages
        for index, block in enumerate(stage.blocks)
    }


def _uniform_way(stage: Stage) -> str:
    """How a replica splits all blocks of a stage alike, and over how many of all its devices experts are."""
    experts = f" with experts over {stage.expert}" if stage.expert > 1 else ""
    return (f"context{stage.context}x" if stage.context > 1 else "") + f"shards{stage.shards}{experts}"


def _price_per_hour(request: Request) -> float | None:
    """The hourly price of the request's devices; None if one has no price."""
    kinds = request.cluster.first(request.num_devices).devices if request.cluster is not None else ()
    prices = [kind.price_per_hour * kind.count for kind in kinds if kind.price_per_hour is not None]
    return sum(prices) if kinds and len(prices) == len(kinds) else None


def _chosen(found: FrontierResult, mode: Mode, number: int | None) -> FrontierResult:
    """The points that a mode shows, with the one that it or ``number`` chooses marked."""
    shown, chosen = _of_mode(found.points, mode)
    if number is not None:
        if number > len(shown):
            many = f"are {len(shown)} points; choose one of 1 to {len(shown)}"
            raise UsageError(f"--point {number}: there {many if len(shown) > 1 else 'is one point; choose 1'}")
        chosen = shown[number - 1]
    marked = [replace(found.points[index], chosen=index == chosen) for index in shown]
    plans = tuple(found.plans[index] for index in shown)
    return replace(found, mode=mode, points=tuple(marked), plans=plans, chosen=shown.index(chosen) + 1)


def _of_mode(points: Sequence[FrontierPoint], mode: Mode) -> tuple[Sequence[int], int]:
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


def _quickest(points: Sequence[FrontierPoint], among: Sequence[int]) -> int:
    return min(among, key=lambda index: points[index].time_ns)


def _by_devices(points: Sequence[FrontierPoint]) -> Iterator[list[int]]:
    for _, same in groupby(range(len(points)), key=lambda index: points[index].num_devices):
        yield list(same)


def _with_knees(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """The same points with the turning point of every number of devices marked, where there is one."""
    marked = list(points)
    for same in _by_devices(points):
        turning = knee([points[i].memory_bytes for i in same], [points[i].time_ns for i in same])
        if turning is not None:
            marked[same[turning]] = replace(points[same[turning]], turning_point=True)
    return marked
