"""What would fit where nothing does: the least memory and the fewest devices for which the same search finds a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from pipeplan.costs.zero import AUTO
from pipeplan.errors import (
    InfeasibleError,
    InvalidPlanError,
    NotApplicableError,
    PipeplanError,
    SearchTimeoutError,
    SumError,
    UsageError,
)
from pipeplan.files import Cluster, Placement
from pipeplan.partition.chain.rebalance import least_short
from pipeplan.planning.alternatives import choice_words, layout_words
from pipeplan.planning.bounds import least_state_bytes
from pipeplan.planning.candidates import (
    CandidateOrError,
    PlacementCandidate,
    StageGraphs,
    grid,
    has_table,
    is_large,
    likely_choices,
    longest_choices,
    open_splits,
    placed,
)
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.trials import PlanSearch, PlanStep, Trial
from pipeplan.planning.uniform_space import BoundedChoice, Choice
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.search import SEARCHING
from pipeplan.schedule.state import Schedule
from pipeplan.search_constants import (
    SECONDS_PER_LOOK,
    SECONDS_PER_QUESTION,
    SHORTAGE_ABOVE,
    SHORTAGE_FEWER,
    SHORTAGE_KEPT,
    SHORTAGE_LEAST_SECONDS,
    SHORTAGE_MOST_WORKING,
    SHORTAGE_PRECISION,
    SHORTAGE_SCHEDULE_SECONDS,
    SHORTAGE_SEARCH_SHARE,
    SHORTAGE_TIMES,
    SHORTAGE_WORKING,
)
from pipeplan.texts import counted
from pipeplan.time_limit import TimeUpError
from pipeplan.units import MAX_BYTES, format_bytes, named_devices, rounded_up
from pipeplan.workload.elements import MAX_DEVICES
from pipeplan.workload.memory import peak_memory


@dataclass(frozen=True)
class ExplainShortage(PlanStep):
    """What would do where nothing fits, looked for in at least ``seconds``; memory is found to ``precision``.

    Of layouts of the table their closed forms say how much memory they need at least: those that need least are cut and
    scheduled in as much, and then so many times as much (``above``), until they fit. A search without a plan keeps a
    part ``kept`` of its time for that, at most ``seconds``. Memory is looked for until the process has worked for a
    part ``working`` of the limit, at most ``most_working`` seconds, as there would be nothing else to say; on a busy
    machine the clock ends it ``seconds`` after its share. Devices are looked for likewise, node by node where there are
    nodes, from the fewest that have room for a model's state. One schedule of a scheduler that was asked for and is not
    among those that are known at once may take ``seconds_per_schedule``.
    """

    seconds: float = SHORTAGE_LEAST_SECONDS
    kept: float = SHORTAGE_KEPT
    precision: float = SHORTAGE_PRECISION
    above: tuple[float, ...] = SHORTAGE_ABOVE
    working: float = SHORTAGE_WORKING
    most_working: float = SHORTAGE_MOST_WORKING
    seconds_per_schedule: float = SHORTAGE_SCHEDULE_SECONDS
    name = "explain what does not fit"
    when = "nothing fits into memory"

    def reserved(self, search: PlanSearch) -> float:
        if search.request.least_memory is None:
            return 0.0
        return min(self.seconds, self.kept * search.budget.seconds)

    def after_all(self, search: PlanSearch) -> bool:
        return True

    def applies(self, search: PlanSearch) -> bool:
        return search.best is None and not search.budget.interrupted and bool(search.failures)

    def run(self, search: PlanSearch) -> None:
        error = most_telling(search.failures)
        search.budget.reserved = 0.0
        if isinstance(error, InfeasibleError):
            seconds = max(self.seconds, search.budget.remaining)
            search.failures.insert(0, shortage(search.request, error, seconds, self))


@dataclass(frozen=True, slots=True)
class _Fit:
    """A schedule that fits, and the device that holds most in it; ``what`` is its layout in words."""

    schedule: Schedule
    device: int
    peak_bytes: int
    what: str

    @property
    def place(self) -> str:
        """The device, with its stages and their blocks."""
        stages = [
            f"stage {index}: {_range(stage.blocks)}"
            for index, stage in enumerate(self.schedule.workload.stages)
            if self.device in stage.devices
        ]
        device = self.schedule.workload.first_playing(self.device)
        return f"device {device} ({'; '.join(stages[:3])}{'; ...' if len(stages) > 3 else ''})"


def most_telling(failures: Sequence[PipeplanError]) -> PipeplanError:
    """What to say where nothing was found: that it does not fit goes before what could not be asked.

    Of that, what is wrong whatever is chosen goes before what some placements cannot be asked. Where there was a plan
    that was not valid it is not said that nothing fits.
    """
    kinds = (InvalidPlanError, InfeasibleError, SearchTimeoutError, SumError, NotApplicableError, PipeplanError)
    return next(error for kind in kinds for error in failures if isinstance(error, kind))


def shortage(
    request: Request, error: InfeasibleError, seconds: float, step: ExplainShortage, fewer: Sequence[Request] = ()
) -> InfeasibleError:
    """The error that says by how many bytes nothing fits, where, and what would do; ``error`` where that is unknown.

    What would do is looked for with known schedules, for at most about ``seconds``; what is said was found to fit, and
    where time has run out it is said that less may do. On ``fewer`` devices, where nothing fits either, it is looked
    for in half of the time how much memory of each would.
    """
    limit = request.least_memory
    if limit is None:
        return error
    whole = Budget(seconds, request.seed, request.deterministic)
    least = _least(request, limit, (1 - SHORTAGE_FEWER) * seconds if fewer else seconds, step)
    below: list[_Least] = []
    for index, asked in enumerate(fewer):
        left = SHORTAGE_FEWER * seconds if request.deterministic else whole.remaining
        if left > 0:
            below.append(_least(asked, limit, left / (len(fewer) - index), step, of_memory=True))
    in_time = least.in_time and len(below) == len(fewer) and all(each.in_time for each in below)
    known = [each for each in (least, *below) if each.memory is not None]
    if not known and least.about is not None:
        needs, what = rounded_up(int(least.about.least_bytes)), choice_words(least.about.choice)
        untried: dict[str, int | str] = {
            "num_devices": request.num_devices,
            "memory_bytes": needs,
            "what": f"{what}, by closed form, not tried",
        }
        others = ", or ".join(["", *_other_remedies(least)])
        return InfeasibleError(
            f"{error}; by closed form {what} needs about {format_bytes(needs)} with all recomputed that may be, the "
            f"least of all layouts alike in all stages: there was no time to try it{others}",
            would_do=[*_with_devices(limit, least), untried],
        )
    if not known or min(each.enough for each in known) <= rounded_up(limit):
        return error
    counts = [request.num_devices, *(asked.num_devices for asked in fewer)]
    text = _text(counts, limit, least, known, in_time=in_time)
    return InfeasibleError(text, min(each.enough for each in known), tuple(_remedies(limit, least, known)))


def _least(request: Request, limit: int, seconds: float, step: ExplainShortage, *, of_memory: bool = False) -> _Least:
    """What would do on a request's devices, or only how much memory of each."""
    # with its limit, since without one nothing would recompute
    asked = replace(
        _weighing_levels(request.within(limit).unlinked), time_limit=max(1.0, SHORTAGE_SEARCH_SHARE * seconds)
    )
    node = request.unit if request.knows_links else None
    least = _Least(asked, limit, step, request.time_limit, node, request.cluster)
    least.find(seconds, of_memory=of_memory)
    return least


def _weighing_levels(request: Request) -> Request:
    """The same with every level by which replicas may divide what they keep, where that is open: as one table of
    layouts, or as several requests."""
    if request.zero not in (None, AUTO):
        return request
    if has_table(request):
        return replace(request, zero=None, any_level=True)
    placement = request.placement
    given = [stage.copies for stage in placement.stages] if isinstance(placement, Placement) else None
    may_divide = max(given) > 1 if given else request.num_devices > 1 and request.replicas != 1
    return request.with_any_level() if may_divide else request


_FitOf = Callable[[Request], _Fit | None]


class _Least:
    """The search for the least memory per device, then for the fewest devices; what it knows stands at any moment.

    Strategies for chains come first, which are quick to ask; then stages as a graph, with less than those need. Links
    of ``cluster``, whose devices the request is for, cost nothing here.
    """

    def __init__(
        self,
        request: Request,
        limit: int,
        step: ExplainShortage,
        whole_limit: float,
        node: int | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self.cluster = cluster
        self._request, self._step, self._node, self._unit = request, step, node, node or 1
        self._limit = max(1, limit)  # where a device has no memory at all, nothing fits that would not in one byte
        self._working = min(step.most_working, step.working * whole_limit)
        self._time = Budget(deterministic=request.deterministic)
        self.memory: _Fit | None = None
        self.enough = 0
        self.about: BoundedChoice | None = None
        self.devices: int | None = None
        self.on_devices: _Fit | None = None
        self.about_devices: tuple[int, BoundedChoice] | None = None
        self.others: dict[str, int] = {}
        self.in_time = True

    @property
    def num_devices(self) -> int:
        """Devices of the request, on which nothing fits."""
        return self._request.num_devices

    @property
    def number_is_given(self) -> bool:
        """Whether a placement or sizes say how many devices there are."""
        return _is_number_given(self._request)

    def find(self, seconds: float, *, of_memory: bool = False) -> None:
        """Find both, and other changes, each in a part of the time; or memory alone."""
        whole = Budget(seconds, self._request.seed, self._request.deterministic)
        parts = [self._find_memory]
        if not of_memory and not self.number_is_given:
            parts.append(self._find_devices)
        if not of_memory:
            parts.append(self._find_others)
        for number, part in enumerate(parts, 1):
            with whole.share(number * seconds / len(parts) - whole.used) as self._time:
                if part != self._find_others:
                    self._time.wait(0.0, self._working, self._step.seconds)
                try:
                    with self._time.enforced():
                        part()
                except TimeUpError as up:
                    if up.limit is not self._time:
                        raise
                    self.in_time = self.in_time and part == self._find_others  # what it finds is no less

    def _go_on(self, worked: float = 0.0) -> None:
        """While there is time, of which as much has gone where it is work that counts."""
        self._time.charge(worked)
        if self._time.expired and (self._request.deterministic or self._time.over):
            raise TimeUpError(self._time)

    def _find_memory(self) -> None:
        for point in self._points(self._request):
            fit = partial(self._point, point)
            if isinstance(point, BoundedChoice):
                self.about = self.about or point
                self._from_closed_form(point, fit)
            else:
                self._lower(fit)
        self._lower(self._graph)

    def _from_closed_form(self, point: BoundedChoice, fit: _FitOf) -> None:
        """The least memory of a layout of the table, from what its closed form says, a little more each time.

        Where the form says no less than is known there is no question.
        """
        about = max(point.least_bytes, float(self._limit))
        for more in self._step.above:
            memory = int(more * about)
            if self.memory is not None and memory * self._step.precision >= self.enough:
                return
            if self._less_memory(fit, memory):
                return

    def _find_devices(self) -> None:
        for fit in (self._chain, self._graph):
            self._lower_devices(fit)

    def _find_others(self) -> None:
        """Changes each of which by itself makes something fit into the memory there is; or all of them together, and
        more devices with these where nothing else would do."""
        changes = list(_changed(self._request))
        if self._fewest <= self._request.num_devices:
            together = [_all_changed(self._request)] if len(changes) > 1 else []
            for remedy, request in (*changes, *together):
                within = request.within(self._limit)
                if (remedy, request) in together and self.others:
                    return
                if any(fit(within) is not None for fit in (self._chain, self._graph)):
                    self.others[remedy] = request.num_devices
        if changes and not self.others and self.on_devices is None:
            remedy, request = _all_changed(self._request)
            if not _is_number_given(request):
                other = _Least(request, self._limit, self._step, 0.0, self._node)
                other._time = self._time
                other._find_devices()
                if other.devices is not None and other.on_devices is not None:
                    what = f"{_have(other.devices, self.cluster)} and {remedy} ({other.on_devices.what})"
                    self.others[what] = other.devices

    def _lower(self, fit: _FitOf) -> None:
        """The least memory with which something fits, if that is less than what is known."""
        if self.memory is None:
            self._begin(fit)
        elif not self._less_memory(fit, int(self.enough / self._step.precision)):
            return
        low = self._limit
        while self.memory is not None and self.enough > low * self._step.precision:
            middle = math.isqrt(low * self.enough)
            if not self._less_memory(fit, middle):
                low = middle

    def _begin(self, fit: _FitOf) -> None:
        """Some memory that is enough: what a plan without a limit takes, or little more."""
        self._go_on()
        unlimited = fit(self._request.within(None))
        if unlimited is not None:
            need = max(unlimited.peak_bytes, self._limit)
            any(self._less_memory(fit, times * need) for times in SHORTAGE_TIMES)

    def _less_memory(self, fit: _FitOf, memory: int) -> bool:
        self._go_on()
        found = fit(self._request.within(rounded_up(memory)))
        if found is None:
            return False
        self.memory, self.enough = found, rounded_up(memory)
        return True

    def _lower_devices(self, fit: _FitOf) -> None:
        """The fewest that may do, and then doubling until a number does; then halving the distance."""
        low = self._refuted
        # enough, if any number is: every block alone, split as far as it can be, its samples on as many replicas
        samples = max(self._request.sizes or [self._request.batch.microbatch_size])
        splits = open_splits(replace(self._request, num_devices=self._node or MAX_DEVICES))
        width = max((each.width for each in splits), default=1)
        most = min(MAX_DEVICES, max(len(self._request.profile.blocks) * samples * width, low))
        unit = self._unit
        if self.devices is None:
            counts, count = [low + unit], self._request.num_devices
            while (count := min(2 * count, most)) < most:
                counts += [count] * (count > counts[0])
            for count in (*counts, most):  # samples divide among twice as many more often than among one node more
                if count <= most and self._fewer_devices(fit, count):
                    break
                low = max(low, count)
        elif self.devices - unit <= low or not self._fewer_devices(fit, self.devices - unit):
            return
        while self.devices is not None and self.devices - low > unit:
            middle = low + (self.devices - low) // (2 * unit) * unit
            if not self._fewer_devices(fit, middle):
                low = middle

    @property
    def _refuted(self) -> int:
        """So many devices, whole nodes of them, and fewer are not enough."""
        return max(self._request.num_devices, (self._fewest - 1) // self._unit * self._unit)

    @property
    def _fewest(self) -> int:
        """Fewer devices have no room for the state."""
        return -(-least_state_bytes(self._request) // self._limit)

    def _fewer_devices(self, fit: _FitOf, count: int) -> bool:
        self._go_on()
        found = fit(replace(self._request.within(self._limit), num_devices=count))
        if found is None:
            return False
        self.devices, self.on_devices = count, found
        return True

    def _chain(self, request: Request) -> _Fit | None:
        limit, more = request.least_memory or math.inf, request.num_devices > self._request.num_devices
        able = [
            point
            for point in self._points(request, longest=more)
            if not isinstance(point, BoundedChoice) or point.least_bytes <= limit
        ]
        if more and able and isinstance(able[0], BoundedChoice):
            self.about_devices = request.num_devices, able[0]
        return self._first_fit(request, (_placed(request, point) for point in able))

    def _graph(self, request: Request) -> _Fit | None:
        """Not of large requests, where one graph takes all the time, and the table has what needs least."""
        if is_large(request):
            return None
        every = chain.from_iterable(map(StageGraphs().candidates, request.levels))
        return self._first_fit(request, (propose() for propose in every))

    def _points(self, request: Request, *, longest: bool = False) -> list[_Point]:
        """What there is without stages as a graph, to be placed so that little memory does: what should need least
        first.

        There may not be time for all, and what needs more than is known to do is refuted by one question. Only the
        ``longest`` pipelines of a table are fewer, and what fits into devices mostly fits in one of them. The devices
        of a node split blocks and sequences, or as many as are asked for.
        """
        choices, widest = longest_choices if longest else likely_choices, self._node or request.num_devices
        widest = max(widest, (request.shards or 1) * (request.context or 1))
        uniform = [each for each in choices(request.within(MAX_BYTES)) if each.choice.width <= widest]
        if uniform:
            return [*sorted(uniform, key=lambda each: (each.least_bytes, each.usual_ns))]
        points = [point for each in request.levels for point in grid(each) if not isinstance(point, UsageError)]
        points.sort(key=lambda point: (not point.recompute, point.batch.microbatch_size))
        return [*points]

    def _point(self, point: _Point, request: Request) -> _Fit | None:
        return self._first_fit(request, [_placed(request, point)])

    def _first_fit(self, request: Request, found: Iterable[CandidateOrError | None]) -> _Fit | None:
        """The first candidate's schedule that fits, if there is one."""
        for each in found:
            self._go_on(SECONDS_PER_QUESTION + len(request.profile.blocks) * request.num_devices * SECONDS_PER_LOOK)
            if not isinstance(each, PlacementCandidate):
                continue
            schedule = self._schedule(request, each)
            if schedule is not None:
                peaks = [memory.peak_bytes for memory in peak_memory(schedule.graph, schedule.orders, schedule.loop)]
                return _Fit(schedule, peaks.index(max(peaks)), max(peaks), _layout_words(each, schedule))
        return None

    def _schedule(self, request: Request, candidate: PlacementCandidate) -> Schedule | None:
        """One that fits, if there is one: micro-batches one after another, or as the scheduler asked for has it."""
        try:
            built_in = request.scheduler == "rules" and request.rules is None  # these wait for room
            if built_in or request.scheduler in SEARCHING:  # one micro-batch is then as good as many
                batch = replace(candidate.batch, num_microbatches=candidate.placement.num_routes)
                trial = Trial.of(request, replace(candidate, batch=batch))
                trial.look()
            else:
                trial, seconds = Trial.of(request, candidate), self._step.seconds_per_schedule
                trial.search(request, self._time, seconds)
        except PipeplanError:
            return None
        return trial.best


def _is_number_given(request: Request) -> bool:
    """Whether a placement or sizes say how many devices there are."""
    given = None not in (request.shards, request.positions, request.replicas)
    return isinstance(request.placement, Placement) or given


_OPENED = {
    "shards": "give --tp auto",
    "context": "give --cp auto",
    "expert": "give --ep auto",
    "positions": "leave --pp out",
    "chunks": "leave --vp out",
    "replicas": "leave --replicas out",
}
"""Sizes that may be open, and what opens each."""


def _changed(request: Request) -> Iterator[tuple[str, Request]]:
    """Requests that may need less memory, by what makes them; only what was fixed is changed."""
    if request.recompute not in (None, True):
        yield "give --recompute auto", replace(request, recompute=None)
    if request.zero not in (None, AUTO):
        open_zero = _weighing_levels(replace(request, zero=None, zero_group=None))
        if open_zero.any_level:
            yield "give --zero auto", open_zero
    if isinstance(request.placement, str):
        for name, remedy in _OPENED.items():
            if getattr(request, name) is not None:
                opened: dict[str, Any] = {name: None}
                yield remedy, replace(request, **opened)
    size = request.batch.microbatch_size
    if not request.sizes and not isinstance(request.placement, Placement):
        smallest = max(min(row.microbatch_size for row in block.costs) for block in request.profile.blocks)
        if smallest < size and request.batch.mini_batch % smallest == 0:
            batch = Batch(request.batch.mini_batch // smallest, smallest)
            yield f"give --microbatch-size {smallest}", replace(request, batch=batch)


def _all_changed(request: Request) -> tuple[str, Request]:
    """All of these changes together."""
    remedies = []
    while (change := next(_changed(request), None)) is not None:
        remedy, request = change
        remedies.append(remedy)
    given = [remedy.removeprefix("give ") for remedy in remedies if remedy.startswith("give ")]
    others = [remedy for remedy in remedies if not remedy.startswith("give ")]
    return " and ".join([*(["give " + " ".join(given)] if given else []), *others]), request


_Point = BoundedChoice | Choice | PlacementCandidate


def _placed(request: Request, point: _Point) -> CandidateOrError:
    """A point cut so that little memory does: where it is open what blocks recompute, all do."""
    point = point.choice if isinstance(point, BoundedChoice) else point
    if isinstance(point, Choice) and point.levels:
        point = replace(point, recompute=True, levels=())
    return placed(request, point, least_short)


def _layout_words(candidate: PlacementCandidate, schedule: Schedule) -> str:
    """How devices are shared out, and what is recomputed."""
    stages = schedule.workload.stages
    again = sum(stage.recomputes for stage in stages)
    whole = all(stage.recompute is True for stage in stages)
    recomputed = "all recomputed" if whole else f"{counted(again, 'stage')} recomputed" if again else ""
    return ", ".join(filter(None, (layout_words(candidate.placement.stages, schedule.workload), recomputed)))


def _text(counts: Sequence[int], limit: int, least: _Least, known: Sequence[_Least], *, in_time: bool) -> str:
    """In words; ``known`` are those of which it was found how much memory would do, ``least`` or on fewer devices."""
    best = min(known, key=lambda each: each.enough)
    assert best.memory is not None
    memory = format_bytes(best.enough)
    each_on = {each.num_devices: format_bytes(each.enough) for each in known}
    on = [f"{named_devices(count)} of {each_on[count]}" for count in sorted(each_on)]
    enough = f"{' or '.join(on)} would do"
    remedies = [f"raise --memory to {memory} ({best.memory.what})", *_other_remedies(least)]
    if least.on_devices is not None:
        others = f"{best.num_devices} of {memory}" if len(on) == 1 else " or ".join(on)
        enough = f"{named_devices(least.devices or 0)} of this size would do, or {others}"
    elif in_time and not least.number_is_given:
        enough += f", and with {format_bytes(limit)} each, all else as asked, no number of devices was found that does"
    return (
        f"no plan was found for {named_devices(*sorted(counts))} of {format_bytes(limit)}: in the one found that needs "
        f"least, {best.memory.place} needs {memory}, {format_bytes(best.enough - limit)} too much; {enough}; "
        f"{unproved(in_time=in_time)}; " + ", or ".join(remedies)
    )


def _have(devices: int | None, cluster: Cluster | None) -> str:
    """To plan for so many devices: by a flag where they are there."""
    there = devices is None or cluster is None or devices <= cluster.num_devices
    return f"raise --devices to {devices}" if there else f"give a cluster of {devices} devices"


def _other_remedies(least: _Least) -> Iterator[str]:
    """What to do but to raise memory: more devices, or other changes."""
    if least.on_devices is not None:
        yield f"{_have(least.devices, least.cluster)} ({least.on_devices.what})"
    elif least.about_devices is not None:
        count, choice = least.about_devices
        have = _have(count, least.cluster)
        yield f"{have} ({choice_words(choice.choice)} by closed form, which was not tried)"
    yield from least.others


def _with_devices(limit: int, least: _Least) -> Iterator[dict[str, int | str]]:
    """On how many devices something was found to fit, as figures."""
    if least.devices is not None and least.on_devices is not None:
        yield {"num_devices": least.devices, "memory_bytes": limit, "what": least.on_devices.what}


def _remedies(limit: int, least: _Least, known: Sequence[_Least]) -> Iterator[dict[str, int | str]]:
    """The same as figures: devices, bytes that a plan may use of each, and the layout that was found to fit."""
    yield from _with_devices(limit, least)
    for each in known:
        if each.memory is not None:
            yield {"num_devices": each.num_devices, "memory_bytes": each.enough, "what": each.memory.what}
    for other, count in least.others.items():
        yield {"num_devices": count, "memory_bytes": limit, "what": other}


def unproved(*, in_time: bool) -> str:
    """What is not known of what would do."""
    return (
        "that was found, and that less would not is not proved"
        if in_time
        else "that was found in the time there was, and with more --time-limit less may be"
    )


def _range(blocks: tuple[str, ...]) -> str:
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]} .. {blocks[-1]} ({len(blocks)} blocks)"
