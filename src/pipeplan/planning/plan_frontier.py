"""The frontier over whole plans: iteration time against memory per device against devices.

On every number of devices it is the search of :func:`pipeplan.planning.steps.search_plan`, of which every schedule is
a point: so no plan that a search finds in the same work is shorter than the shortest point. What is in less memory
comes after it. One stage on all devices, split block by block as each point of its cost frontier says, and the
profile's own placement in less and less memory, where it is for that number of devices. Then
the partitions of :mod:`pipeplan.planning.partition_trials` under one memory limit after another, from none down to
where nothing fits: uniform layouts, as ``search`` has them, and stages each of which takes its way to run from its
device group's frontier. Every partition gets the best known schedule under that limit. While there is time, GraphPipe's
stages join them, and those that stand are tried again with each block split in a way of its own. What is simulated
counts: a point stays if no other has at most its memory, time and devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice, zip_longest

from pipeplan.errors import InfeasibleError, PipeplanError, SearchTimeoutError, UsageError
from pipeplan.files import Placement, Plan
from pipeplan.partition.per_block_sharding import GroupSplits
from pipeplan.planning.alternatives import choice_words
from pipeplan.planning.block_splits import group_splits, split_stages
from pipeplan.planning.bounds import rows_bound
from pipeplan.planning.candidates import (
    PlacementCandidate,
    any_form,
    as_asked,
    longest_choices,
    own_placement,
    placed,
    uniform_layouts,
)
from pipeplan.planning.expanding import of_blocks
from pipeplan.planning.infeasibility import ExplainShortage, most_telling, shortage
from pipeplan.planning.partition_trials import (
    HOW,
    PartitionTrial,
    chains,
    in_turn,
    says_sizes,
    stage_graphs,
    uniform,
)
from pipeplan.planning.request import Batch, Request, Splitting
from pipeplan.planning.sharding_frontier import SCHEDULER, costs_of_splits, least_of_splits, split_frontier
from pipeplan.planning.steps import STEPS, num_left, plan_of, run_search, search_of
from pipeplan.planning.trials import PlanSearch, Trial, said_lost, unfit_by_state
from pipeplan.planning.uniform_space import BoundedChoice
from pipeplan.planning.workers import CandidateWorkers, workers_of
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.state import Progress, noted
from pipeplan.search_constants import (
    FIRST_SECONDS,
    FRONTIER_CHAINS,
    FRONTIER_COUNTING,
    FRONTIER_EACH,
    FRONTIER_EXPLAINING,
    FRONTIER_FIRST,
    FRONTIER_KEPT,
    FRONTIER_MAKING,
    FRONTIER_MOST_COUNTING,
    FRONTIER_MOST_DEVICES,
    FRONTIER_ONE_STAGE,
    FRONTIER_ROUGH,
    FRONTIER_ROUGHLY,
    FRONTIER_SEARCHING,
    FRONTIER_SPLIT,
    MOST_TIMES_DEVICES,
    SHORTAGE_KEPT,
)
from pipeplan.sharding.cost_model import CostModel
from pipeplan.time_limit import Limit, TimeUpError, checkpoint, shielded
from pipeplan.units import MAX_BYTES, format_bytes, named_devices, rounded_up
from pipeplan.workload.kinds import WORKSPACE
from pipeplan.workload.memory import peak_memory
from pipeplan.workload.workload import Workload


@dataclass(frozen=True)
class _Constants:
    """How the frontier is searched; parts are of the time.

    Searches end after a part ``searching``, of which those on more devices come first, which take longer: the first has
    three quarters, each other half of what is left, and the last one all. The uniform layout that should be quickest on
    each number of devices comes next, while no more than a part ``first`` is over: to track the strategies of one stage
    of a large model may take all of it. After a part ``one_stage`` these are only tracked to within ``rough`` of the
    frontier, after ``roughly`` no further; after ``chains`` partitions of the chain make way for what else there is,
    after ``split`` split stages.
    What would do where nothing fits gets what is left, ``explaining`` seconds at least; counting what was not tried
    gets ``counting``, but no more than ``most_counting`` seconds.
    """

    searching: float = FRONTIER_SEARCHING
    first: float = FRONTIER_FIRST
    one_stage: float = FRONTIER_ONE_STAGE
    rough: float = FRONTIER_ROUGH
    roughly: float = FRONTIER_ROUGHLY
    chains: float = FRONTIER_CHAINS
    split: float = FRONTIER_SPLIT
    explaining: float = FRONTIER_EXPLAINING
    counting: float = FRONTIER_COUNTING
    most_counting: float = FRONTIER_MOST_COUNTING


_HOW = _Constants()

_STEPS = tuple(step for step in STEPS if not isinstance(step, ExplainShortage))
"""Steps of its searches: what would do where nothing fits is said of all numbers of devices together."""


@dataclass(frozen=True)
class PlanPoint:
    """What fits and what it takes, to be compared; memory is the peak of the device that needs most, with workspace.

    Its stages may yet be split where there is a ``candidate``. Making its plan takes longer than saying what it is, for
    which its ``workload`` does, of which the stages and sizes are known, and what the ``scheduler`` is.
    """

    request: Request
    memory_bytes: int
    workspace_bytes: int
    iteration_ns: int
    make: Callable[[], Plan]
    workload: Workload
    scheduler: str
    candidate: PlacementCandidate | None = None

    @cached_property
    def plan(self) -> Plan:
        """Made when it is wanted."""
        return self.make()

    @property
    def num_devices(self) -> int:
        """Devices of the plan."""
        return self.request.num_devices

    @property
    def place(self) -> tuple[int, int, int]:
        """What points are compared by; less is better."""
        return self.num_devices, self.memory_bytes, self.iteration_ns


@dataclass(frozen=True, slots=True)
class PlanFrontier:
    """Plans that no other plan found beats in memory, time and devices together, fewest devices and memory first.

    ``interrupted`` if there was more to try: at least ``num_untried`` partitions of the chain. ``rough`` are the
    numbers of devices for which there was no time to track all strategies of one stage, ``failures`` those without a
    point, and why, ``notes`` what went wrong in searches. ``stopped`` if a signal, as of Ctrl-C, ended it early.
    """

    points: tuple[PlanPoint, ...]
    num_tried: int
    seconds: float
    interrupted: bool
    num_untried: int = 0
    rough: tuple[int, ...] = ()
    failures: Mapping[int, PipeplanError] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    stopped: bool = False


def plan_frontier(
    request: Request,
    *,
    quickest: bool = False,
    within: Limit | None = None,
    progress: Progress | None = None,
    workers: int = 1,
    executor: Executor | None = None,
    written: float = 0,
) -> PlanFrontier:
    """The frontier of a request's profile and mini-batch over its numbers of devices.

    The request's memory is the most that any plan may take. Ends when all partitions have been tried, at Ctrl-C, or at
    the time limit, that of ``within``, too, whatever is going on then: with what there is. Where the ``quickest`` are
    looked for, what promises least time comes first. ``progress`` hears what is tried, the quickest plan so far, and
    what none is below. The searches give candidates to ``workers`` or an ``executor``, as
    :func:`pipeplan.planning.steps.search_plan` says. Where plans of up to so many points are to be ``written``, it ends
    early enough to make them within the limit.

    Raises:
        InfeasibleError: nothing fits; it says what would, as far as there was time to find out.
        KeyboardInterrupt: interrupted before there was anything.
        SearchTimeoutError: time was up before there was anything.
    """
    request = replace(request, any_level=True)  # what each level of ZeRO keeps is weighed here
    limit = Limit.part_of(within, request.time_limit)
    if request.deterministic:
        limit = Budget(math.inf, deterministic=True, whole=within)  # which only an interruption ends
    limit.wait(0.0, FIRST_SECONDS)
    with workers_of(workers, executor) as by:
        found = _searched(request, limit, quickest, progress, workers=by, written=written)
    if not found.best:
        raise KeyboardInterrupt if limit.interrupted else _why(request, found)
    untried = _counted(found, min(_HOW.counting * request.time_limit, _HOW.most_counting)) if found.interrupted else 0
    points = sorted(found.best, key=lambda point: point.place)
    seconds, counts = found.limit.elapsed, {point.num_devices for point in points}
    failures = {count: error for count, error in found.failures.items() if count not in counts}
    how = found.num_tried, seconds, found.interrupted, untried, tuple(found.rough)
    notes = (*said_lost(found.lost), *dict.fromkeys(found.notes))
    return PlanFrontier(tuple(points), *how, failures, notes, stopped=found.interrupted and limit.interrupted)


def _searched(
    request: Request,
    limit: Limit,
    quickest: bool,
    progress: Progress | None = None,
    *,
    workers: CandidateWorkers | None = None,
    written: float = 0,
) -> _FrontierSearch:
    """Try everything in turn, until the time is up, less what counting what is left will take."""
    requests = request.by_devices
    splits = group_splits(request)
    levels = [level for asked in requests for level in asked.levels]
    free = [asked for asked in levels if _any_partition(asked)]
    laid_out = [] if isinstance(request.placement, Placement) else levels
    streams = [uniform(asked) for asked in laid_out], [chains(asked, splits, quickest=quickest) for asked in free]
    partitions = in_turn([each for own in zip_longest(*streams) for each in own if each is not None])
    whole = [asked for asked in requests if _any_partition(asked) and not asked.recompute]
    rough = [asked.num_devices for asked in whole]
    search = _FrontierSearch(limit, partitions, interrupted=True, progress=progress, rough=rough, written=written)
    if progress is not None:  # those of its searches are higher, and come one after another
        search.bounds = {asked.num_devices: rows_bound(asked) for asked in requests}
    share = (_HOW.chains, _HOW.split) if quickest else (1.0, 1.0)
    if request.least_memory is not None:  # until there is a point, as a search keeps it
        limit.reserved = min(_HOW.explaining, SHORTAGE_KEPT * limit.seconds)
    with limit.hearing_interrupts(), limit.ended():
        search.search_all(requests, workers)
        if request.least_memory is not None and not search.best and not request.deterministic:
            limit.reserved += FRONTIER_KEPT * max(0.0, limit.left())
        search.try_all(chain.from_iterable(islice(each, 1) for each in streams[0]), _HOW.first)
        for asked in whole:
            with search.noting("strategies of one stage"):
                search.one_stage(asked)
        with search.noting("placements that are given"):
            for asked in levels:
                search.as_placed(asked, own_placement(asked) if asked in free else as_asked(asked))
        search.try_all(partitions, share[0])
        others = [
            stage_graphs(each, search.memories(each.num_devices))
            for each in levels
            if any_form(each) and _any_partition(each)
        ]
        joined = search.try_all(in_turn(others), share[1])
        again = search.by_devices(requests) if free else []
        split = search.try_all(in_turn([_split(splits, points) for points in again]))
        search.interrupted = search.unsearched or not (search.try_all(partitions) and split and joined)
    return search


def _any_partition(request: Request) -> bool:
    """Whether stages may be of any blocks, on any devices, alike ones; else only what searches and layouts have is."""
    return request.placement == "auto" and not (
        says_sizes(request) or request.uneven or request.by_kinds or request.joined is not None
    )


def _why(request: Request, found: _FrontierSearch) -> PipeplanError:
    """Why there is nothing; where memory is short, with what would do, as a search says it."""
    limit, requests = request.least_memory, request.by_devices
    nothing: PipeplanError = InfeasibleError(f"no plan was found for {_all_devices(request)}")
    if found.interrupted:
        nothing = SearchTimeoutError(
            f"no plan was found in {found.limit.elapsed:.1f} s, but there may be one; raise --time-limit"
        )
    error = next(iter(found.failures.values()), nothing)
    short = {count: each for count, each in found.failures.items() if isinstance(each, InfeasibleError)}
    if limit is None:
        return error
    if not short:
        if not found.interrupted:
            return error
        return _with_closed_form(request, limit, error, Limit(_HOW.explaining, clock=found.limit.clock))
    found.limit.reserved = 0.0
    seconds = request.time_limit if request.deterministic else max(_HOW.explaining, found.limit.left())
    most, *fewer = sorted((each for each in requests if each.num_devices in short), key=lambda each: -each.num_devices)
    unbounded = Limit(math.inf, clock=found.limit.clock)  # it keeps to its seconds; this hears interruptions
    with unbounded.hearing_interrupts(), unbounded.ended():
        error = shortage(most, short[most.num_devices], seconds, ExplainShortage(), fewer)
    return error


def _all_devices(request: Request) -> str:
    return named_devices(*(each.num_devices for each in request.by_devices))


def _with_closed_form(request: Request, limit: int, error: PipeplanError, time: Limit) -> PipeplanError:
    """The error of a frontier that was not over, with what the leanest layout needs where that is more than there is.

    Of the table of layouts, as far as there is time, most devices first.
    """
    leanest: list[BoundedChoice] = []
    with time.ended():
        for asked in sorted(request.within(MAX_BYTES).by_devices, key=lambda each: -each.num_devices):
            leanest += sorted(longest_choices(asked), key=lambda each: each.least_bytes)[:1]
    least = min(leanest, key=lambda each: each.least_bytes, default=None)
    if least is None or least.least_bytes <= limit or not isinstance(error, InfeasibleError | SearchTimeoutError):
        return error
    needs = format_bytes(rounded_up(int(least.least_bytes)))
    return type(error)(
        f"{error}; by closed form {choice_words(least.choice)} needs about {needs} with all recomputed that may be, "
        "the least of the longest pipelines alike in all stages: there was no time to try it"
    )


@dataclass(frozen=True, slots=True)
class SharingPoints:
    """Layouts of one stage whose devices share sequences or experts, those that no other of them beats.

    ``complete``: the ``num_tried`` are all there are.
    """

    points: tuple[PlanPoint, ...] = ()
    num_tried: int = 0
    complete: bool = True


def sharing_points(request: Request, within: Limit) -> SharingPoints:
    """Every uniform layout of a request for one stage in which devices share sequences or experts, as plans.

    Those take whole stages, while the strategies of one stage are chosen block by block; so each of them is simulated.
    """
    search = _FrontierSearch(within, iter(()))
    complete = False
    with within.ended():
        layouts = (each for each in uniform_layouts(request) if each.choice.context > 1 or each.choice.expert > 1)
        complete = search.try_all(
            PartitionTrial(request, placed(request, each.choice), int(each.usual_ns)) for each in layouts
        )
    return SharingPoints(tuple(search.best), search.num_tried, complete)


def some_plan(request: Request, limit: Limit) -> PlanPoint | None:
    """The first of the uniform layouts that fits, those that should be quickest tried first; None where none does."""
    search = _FrontierSearch(limit, iter(()))
    with limit.ended():
        search.try_all(uniform(request), 0.0)
    return next(iter(search.best), None)


def changes_that_do(request: Request, fits: Callable[[Request], bool], time: Limit) -> list[str]:
    """Fewer samples, or more devices, with which something fits; as far as there is time to find out."""
    found: list[str] = []
    for ways, parts in ((halved, 2), (_doubled, 1)):
        with Limit.part_of(time, time.left() / parts).ended():
            for flag, asked in ways(request):
                checkpoint()
                with suppress(UsageError):  # the cluster has no more
                    if fits(asked):
                        found.append(flag)
                        break
    return found


def halved(request: Request) -> Iterator[tuple[str, Request]]:
    """Fewer and fewer samples in an iteration, as one micro-batch where the request has one."""
    batch = request.batch
    while batch.mini_batch > 1:
        fewer = batch.mini_batch // 2
        batch = Batch(1, fewer) if batch.num_microbatches == 1 else _divided(batch, fewer)
        yield f"lower --mini-batch to {batch.mini_batch}", replace(request, batch=batch)


def _divided(batch: Batch, mini_batch: int) -> Batch:
    """The mini-batch as micro-batches of the size there was, or of one sample where that does not divide it."""
    size = batch.microbatch_size if mini_batch % batch.microbatch_size == 0 else 1
    return Batch(mini_batch // size, size)


def _doubled(request: Request) -> Iterator[tuple[str, Request]]:
    """More and more devices for the same samples, as many as the cluster has."""
    most = math.inf if request.cluster is None else request.cluster.num_devices
    count = request.num_devices
    while count < most and count < MOST_TIMES_DEVICES * request.num_devices:
        count = int(min(2 * count, most))
        asked = replace(request, num_devices=count, device_counts=(count,))
        yield f"give --devices {count} --mini-batch {request.batch.mini_batch}", asked


@dataclass(slots=True)
class _FrontierSearch:
    """What has been found until the time is up; whether there was more to try, and the ``partitions`` that are left.

    Of so many points, or all, plans are ``written`` afterwards; each is taken to be made in ``seconds_per_plan``, those
    that the first one took. ``lost`` are candidates whose workers died of them, and of what; ``bounds`` {devices: ns}
    are below the time of any plan, as far as it is known.
    """

    limit: Limit
    partitions: Iterator[PartitionTrial]
    interrupted: bool = False
    best: list[PlanPoint] = field(default_factory=list)
    failures: dict[int, PipeplanError] = field(default_factory=dict)
    num_tried: int = 0
    rough: list[int] = field(default_factory=list)
    progress: Progress | None = None
    unsearched: bool = False
    notes: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    bounds: dict[int, int] = field(default_factory=dict)
    written: float = 0
    seconds_per_plan: float | None = None

    def search_all(self, requests: Sequence[Request], workers: CandidateWorkers | None) -> None:
        """Search on each number of devices until a share of the time is over: most first.

        But for those that have no room for the model's state, which take none of it.
        """
        ordered = sorted(requests, key=lambda asked: (unfit_by_state(asked) is None, -asked.num_devices))
        most = max((asked.num_devices for asked in requests if unfit_by_state(asked) is None), default=0)
        for number, asked in enumerate(ordered, start=1):
            left = self.left(_HOW.searching)
            if self.best and left <= 0 and not asked.deterministic:
                self.unsearched = True
                return
            part = FRONTIER_MOST_DEVICES if asked.num_devices == most else FRONTIER_EACH
            seconds = left if number == len(ordered) else part * left
            with self.noting(f"search on {named_devices(asked.num_devices)}"):
                self._search(asked if asked.deterministic else replace(asked, time_limit=max(0.0, seconds)), workers)

    def _search(self, request: Request, workers: CandidateWorkers | None) -> None:
        """Search on one number of devices; whatever ends it, points are made of what was found."""
        search = search_of(request, self.limit, progress=self._heard(request), steps=_STEPS)
        try:
            run_search(search, workers)
        finally:
            self.notes += search.notes
            self.lost += search.lost
            self._learn(request, search.bound_ns)
            self._keep_trials(search)
        self.num_tried += search.looked_at
        self.unsearched |= num_left(search)[0] > 0
        if search.answer is None and search.failures:
            self.failures.setdefault(request.num_devices, most_telling(search.failures))

    def _keep_trials(self, search: PlanSearch) -> None:
        """The answer in any case, which takes no longer than making its plan; of the others what there is time for."""
        answer = search.answer
        if answer is not None:
            with shielded():
                self._keep_trial(search.request, answer)
        for trial in sorted(search.done, key=lambda trial: trial.value_ns or 0):
            if trial is not answer:
                checkpoint()
                self._keep_trial(search.request, trial)

    def _keep_trial(self, request: Request, trial: Trial) -> None:
        found = _point(request, trial, self.best)
        if found is not None:
            self.keep(found)

    def _heard(self, request: Request) -> Progress | None:
        """What a search reports, with the devices that it is on, and the bound of all numbers of devices."""
        tell = self.progress
        if tell is None:
            return None

        def hear(what: str, best_ns: int, bound_ns: int, seconds: float) -> None:
            known = [best for best in (best_ns, *(point.iteration_ns for point in self.best)) if best]
            where = f"{what} on {named_devices(request.num_devices)}"
            if best_ns:  # else it is one of what is being looked at alone
                self._learn(request, bound_ns)
            tell(where, *self._told(known, bound_ns), self.limit.elapsed)

        return hear

    def report(self, request: Request, what: str) -> None:
        """Say what is tried, the quickest plan so far, and the bound."""
        if self.progress is not None and self.best:
            where = f"{what} on {named_devices(request.num_devices)}, {len(self.best)} points"
            self.progress(where, *self._told([point.iteration_ns for point in self.best]), self.limit.elapsed)

    def _told(self, known: Sequence[int], else_ns: int = 0) -> tuple[int, int]:
        """The least of what is known and the bound, ns; before there is a plan only what bound is to be said."""
        best = min(known, default=0)
        return best, min(best, *self.bounds.values()) if best else else_ns

    def _learn(self, request: Request, bound_ns: int) -> None:
        """No plan on the devices of a request is below a bound."""
        self.bounds[request.num_devices] = max(bound_ns, self.bounds.get(request.num_devices, 0))

    def left(self, share: float = 1.0) -> float:
        """Seconds until a share of the time is over."""
        return share * self.limit.seconds - self.limit.elapsed

    def keep(self, found: PlanPoint) -> None:
        """Another point, if it belongs there; from now on there is something, and time for all that must follow."""
        self.best = _with(self.best, found)
        self.limit.wait_no_longer()
        counting = min(_HOW.counting * self.limit.seconds, _HOW.most_counting)
        self.limit.reserved = counting
        if not self.written:
            return
        if self.seconds_per_plan is None:
            begun = self.limit.elapsed
            with suppress(PipeplanError):  # which is said where it is written
                _ = found.plan
            self.seconds_per_plan = self.limit.elapsed - begun
        making = self.seconds_per_plan * min(self.written, len(self.best))
        self.limit.reserved = counting + min(making, FRONTIER_MAKING * self.limit.seconds)

    def one_stage(self, request: Request) -> None:
        """Compare the strategies of one stage: all, or when a share of the time is over some, or none."""
        self.report(request, "one stage")
        model: list[CostModel] = []
        for share, within in ((_HOW.one_stage, 0.0), (_HOW.roughly, _HOW.rough)):
            limit = Limit.part_of(self.limit, self.left(share))
            try:
                with limit.enforced():
                    found = list(_one_stage(request, within, model))
            except TimeUpError as up:
                if up.limit is not limit:
                    raise
                continue
            for tried in found:
                self.keep(tried)
            if not within:
                self.rough.remove(request.num_devices)
            return

    def as_placed(self, request: Request, found: Iterator[PlacementCandidate]) -> None:
        """Try candidates in less and less memory: how many micro-batches are in flight is left."""
        for candidate in found:
            limit = request.least_memory
            while not self.best or self.left() > 0:
                tried = _tried(PartitionTrial(request.within(limit), candidate), candidate, ())
                self.num_tried += 1
                if tried is None:
                    break
                self.keep(tried)
                limit = int(HOW.step * tried.memory_bytes)

    def try_all(self, found: Iterator[PartitionTrial], share: float = 1.0) -> bool:
        """Try partitions until a share of the time is over, at least until something fits; whether it was all."""
        while not self.best or self.left(share) > 0:
            asked = next(found, None)
            if asked is None:
                return True
            self._try(asked)
        return False

    def _try(self, asked: PartitionTrial) -> None:
        if isinstance(asked.candidate, PipeplanError):
            self.failures.setdefault(asked.request.num_devices, asked.candidate)
            return
        self.num_tried += 1
        self.report(asked.request, f"partition {self.num_tried}")
        with self.noting("partitions"):
            tried = _tried(asked, asked.candidate, self.best)
            if tried is not None:
                self.keep(tried)

    def noting(self, what: str) -> AbstractContextManager[None]:
        """What goes wrong inside is only noted once there is a point."""
        return noted(what, self.notes, lambda _: bool(self.best))

    def memories(self, num_devices: int) -> list[int]:
        """The memory of the points on ``num_devices``, most first."""
        return sorted(
            (each.memory_bytes for each in self.best if each.request.num_devices == num_devices), reverse=True
        )

    def by_devices(self, requests: Sequence[Request]) -> list[list[PlanPoint]]:
        """The points of every number of devices, quickest first."""
        ordered = sorted(self.best, key=lambda each: each.iteration_ns)
        return [[each for each in ordered if each.request.num_devices == asked.num_devices] for asked in requests]


def _one_stage(request: Request, within: float, model: list[CostModel]) -> Iterator[PlanPoint]:
    """The cost frontier of the whole model on all devices; nothing where its costs are not known, or nothing fits.

    They are put into the empty ``model``, or taken from it. What is tracked within a factor may end early. One device
    splits nothing, and is left to the partitions. What devices run is profiled, as in every other plan.
    """
    splitting = Splitting(profiled=True, within=within)
    if request.num_devices == 1:
        return
    limit = request.least_memory
    try:
        if limit is not None and least_of_splits(request, splitting).num_bytes > limit:
            return
        if not model:
            model.append(costs_of_splits(request, splitting))
        splits = split_frontier(request, splitting, model=model[0], as_far=within > 0)
    except (PipeplanError, ValueError):  # blocks of unknown kinds or devices
        return
    for index, point in enumerate(splits.points):
        if limit is not None and point.memory_bytes > limit:
            continue
        if not within:
            checkpoint()
        with suppress(UsageError):  # plans cannot say what it does
            figures = point.memory_bytes, point.workspace_bytes, point.time_ns
            workload = splits.described(request, index)
            yield PlanPoint(request, *figures, partial(splits.plan, request, index), workload, SCHEDULER)


def _split(splits: GroupSplits, best: Sequence[PlanPoint]) -> Iterator[PartitionTrial]:
    """The points again with every stage on several devices split as its own frontier says, under the same limits."""
    for tried in best:
        asked = tried.request
        found = tried.candidate and split_stages(splits, tried.candidate, asked.least_memory, asked.recomputes)
        if found is not None:
            yield PartitionTrial(tried.request, found)


def _counted(found: _FrontierSearch, seconds: float) -> int:
    """How many partitions there still are, as far as they can be counted in so long; interrupted, nobody waits."""
    found.limit.reserved = 0.0
    number, limit = 0, Limit.part_of(found.limit, seconds)
    with limit.ended():
        for asked in found.partitions:
            number += not isinstance(asked.candidate, PipeplanError)
            limit.check()
    return number


def _tried(asked: PartitionTrial, candidate: PlacementCandidate, best: Sequence[PlanPoint]) -> PlanPoint | None:
    """A candidate with the best known schedule; None if it does not fit, or cannot be better than what there is."""
    request = asked.request
    try:
        trial = Trial.where_quick(request, candidate)
    except PipeplanError:
        return None
    if _is_beaten(request, trial, trial.bound_ns, best):
        return None
    trial.look()
    return _point(request, trial, (), trial.candidate if asked.open else None)


def _is_beaten(request: Request, trial: Trial, iteration_ns: int, best: Sequence[PlanPoint]) -> bool:
    """Whether there is a point that no plan of a trial with that iteration can be better than."""
    static = max(state.total for state in trial.ways[0].states)
    return any(_beats(each.place, (request.num_devices, static, iteration_ns)) for each in best)


def _point(
    request: Request, trial: Trial, best: Sequence[PlanPoint], still_open: PlacementCandidate | None = None
) -> PlanPoint | None:
    """What a trial has found; None where it has no schedule, or one that cannot be better than what there is."""
    value = trial.value_ns
    if trial.best is None or value is None or _is_beaten(request, trial, value, best):
        return None
    try:
        known = of_blocks(request, trial.settled)
    except PipeplanError:  # what is kept together fits only as one block
        return None
    peak = max(peak_memory(known.graph, known.orders, known.loop), key=lambda each: each.peak_bytes)
    figures = peak.peak_bytes, peak.parts[WORKSPACE], known.iteration_ns
    plan = partial(plan_of, request, trial, known)
    return PlanPoint(request, *figures, plan, known.workload, known.scheduler, still_open)


def _with(best: Sequence[PlanPoint], found: PlanPoint) -> list[PlanPoint]:
    """The frontier with another point, if it belongs there."""
    if any(_beats(each.place, found.place) for each in best):
        return list(best)
    return [each for each in best if not _beats(found.place, each.place)] + [found]


def _beats(place: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """At most as much of everything."""
    return all(own <= other for own, other in zip(place, others, strict=True))
