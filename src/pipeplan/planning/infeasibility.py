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
)
from pipeplan.files import Cluster, Placement
from pipeplan.planning.alternatives import choice_words, layout_words
from pipeplan.planning.bounds import least_state_bytes
from pipeplan.planning.candidates import (
    CandidateOrError,
    PlacementCandidate,
    StageGraphs,
    is_large,
    likely_choices,
    longest_choices,
    open_splits,
)
from pipeplan.planning.leanest import Point, leanest_rows, least_bytes, placed_lean, plainest_first, weighing_levels
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.trials import PlanSearch, PlanStep, Trial
from pipeplan.planning.uniform_space import BoundedChoice, Choice
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.search import SEARCHING
from pipeplan.schedule.state import Schedule
from pipeplan.search_constants import (
    SECONDS_PER_CUT,
    SECONDS_PER_LOOK,
    SECONDS_PER_QUESTION,
    SHORTAGE_ABOVE,
    SHORTAGE_FEWER,
    SHORTAGE_KEPT,
    SHORTAGE_LEAST_SECONDS,
    SHORTAGE_MOST_WORKING,
    SHORTAGE_OPENED,
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
    machine the clock ends it ``seconds`` after its share. Flags that fix something are opened before that, likewise,
    and devices are looked for after it, node by node where there are nodes, from the fewest that have room for a
    model's state. One schedule of a scheduler that was asked for and is not among those that are known at once may take
    ``seconds_per_schedule``.
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
    where time has run out before all of it was looked for it is said that less may do. On ``fewer`` devices, where
    nothing fits either, it is looked for in half of the time how much memory of each would.
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
    if not known:
        return _without_memory(error, limit, least)
    if min(each.enough for each in known) <= rounded_up(limit):
        return error
    counts = [request.num_devices, *(asked.num_devices for asked in fewer)]
    text = _text(counts, limit, least, known, in_time=in_time)
    return InfeasibleError(text, min(each.enough for each in known), _remedies(limit, least, known))


def _least(request: Request, limit: int, seconds: float, step: ExplainShortage, *, of_memory: bool = False) -> _Least:
    """What would do on a request's devices, or only how much memory of each."""
    # with its limit, since without one nothing would recompute
    asked = replace(
        weighing_levels(request.within(limit).unlinked), time_limit=max(1.0, SHORTAGE_SEARCH_SHARE * seconds)
    )
    node = request.unit if request.knows_links else None
    least = _Least(asked, limit, step, request.time_limit, node, request.cluster)
    least.find(seconds, of_memory=of_memory)
    return least


_FitOf = Callable[[Request], _Fit | None]


@dataclass(frozen=True, slots=True, eq=False)
class _ShortagePart:
    """Something to look for, and how large a part of the time it has beside others."""

    run: Callable[[], None]
    weight: float = 1.0


@dataclass(slots=True, eq=False)
class _ShortageQuestion:
    """What is asked of less and less memory, or fewer and fewer devices: a ``point`` alone, or all that ``fit`` knows.

    So much was ``refuted``, and less is not asked any more; ``fitted``: in what is known to be enough it fits.
    ``about`` are bytes that the point should need, where it was placed.
    """

    fit: _FitOf
    point: Point | None = None
    refuted: int = 0
    fitted: bool = False
    about: int | None = None


class _Least:
    """The search for the least memory per device, then for the fewest devices; what it knows stands at any moment.

    ``opened`` are flags that fix something, without one of which something fits as it is.

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
        self.opened: list[str] = []
        self.in_time = True
        self._changes = list(_changed(request))
        self._of_memory: list[_ShortageQuestion] = []
        self._of_devices = [_ShortageQuestion(self._chain), _ShortageQuestion(self._graph)]
        self._changed: _Least | None = None
        self._below: int | None = None
        self._alone: dict[tuple[str, int], bool] = {}

    @property
    def num_devices(self) -> int:
        """Devices of the request, on which nothing fits."""
        return self._request.num_devices

    @property
    def number_is_given(self) -> bool:
        """Whether a placement or sizes say how many devices there are."""
        return _is_number_given(self._request)

    def find(self, seconds: float, *, of_memory: bool = False) -> None:
        """Find both, and before them what flags that fix something keep from fitting; or memory alone.

        Each has a part of the time, with what those before it left; what its part was too little for goes on in what
        all of them left.
        """
        whole = Budget(seconds, self._request.seed, self._request.deterministic)
        parts = [_ShortagePart(self._find_memory)] if of_memory else [*self._parts()]
        parts = self._in_turn(parts, whole)
        while parts and whole.remaining > 0.0:
            parts = self._in_turn(parts, whole)
        self.in_time = not parts

    def _parts(self) -> Iterator[_ShortagePart]:
        """What is looked for: first what takes no more than to leave out a flag."""
        for change in self._changes:
            yield _ShortagePart(partial(self._find_change, *change), min(1.0, SHORTAGE_OPENED / len(self._changes)))
        yield _ShortagePart(self._find_memory)
        if not self.number_is_given:
            yield _ShortagePart(self._find_devices)
        if self._changes:
            yield _ShortagePart(self._find_changed)
        if len(self._changes) > 1:
            yield _ShortagePart(self._find_alone)

    def _in_turn(self, parts: Sequence[_ShortagePart], whole: Budget) -> list[_ShortagePart]:
        """Those of the parts that ran out of their time; for none of them more is waited than for all."""
        begun, seconds = whole.used, whole.remaining
        total, done, unfinished = sum(part.weight for part in parts), 0.0, []
        for part in parts:
            done += part.weight / total
            with whole.share(begun + done * seconds - whole.used) as self._time:
                self._time.wait(0.0, part.weight * self._working, self._step.seconds)
                try:
                    with self._time.enforced():
                        part.run()
                except TimeUpError as up:
                    if up.limit is not self._time:
                        raise
                    unfinished.append(part)
        return unfinished

    def _go_on(self, worked: float = 0.0) -> None:
        """While there is time, of which as much has gone where it is work that counts."""
        self._time.charge(worked)
        if self._time.expired and (self._request.deterministic or self._time.over):
            raise TimeUpError(self._time)

    def _find_memory(self) -> None:
        if not self._of_memory:
            points = self._points(self._request)
            self._of_memory = [_ShortageQuestion(partial(self._point, point), point) for point in points]
            self._of_memory.append(_ShortageQuestion(self._graph))
            self.about = next((each for each in points if isinstance(each, BoundedChoice)), None)
        for question in self._of_memory:
            if question.point is not None:
                self._as_placed(question, question.point)
        for question in self._of_memory:
            if not isinstance(question.point, BoundedChoice):
                self._lower(question)

    def _as_placed(self, question: _ShortageQuestion, point: Point) -> None:
        """What a point needs as it is placed so that little memory does, if that is less than what is known.

        Nothing is placed of which it is known before that it needs more. Of a layout of a table, where what it needs as
        it is placed is not enough, a little more is tried each time.
        """
        form, of_table = least_bytes(self._request, point), isinstance(point, BoundedChoice)
        if not of_table:
            question.refuted = max(question.refuted, min(MAX_BYTES, math.ceil(form)) - 1)
        if self._no_less(form):
            return
        if question.about is None:
            question.about = self._about(question, point)
        if question.about == MAX_BYTES or self._no_less(question.about) or self._less_memory(question, question.about):
            return
        for more in self._step.above if of_table else ():
            memory = more * max(form, question.about)
            if self._no_less(memory) or self._less_memory(question, int(memory)):
                return

    def _no_less(self, memory: float) -> bool:
        """Whether so much memory is no less than what is known to do."""
        return self.memory is not None and memory * self._step.precision >= self.enough

    def _about(self, question: _ShortageQuestion, point: Point) -> int:
        """Bytes that a point needs where it is cut so that little memory does; :data:`MAX_BYTES`: it cannot be placed.

        Where one micro-batch is as good as many the cut says it; of one stage per device no cut needs less.
        """
        request = self._request
        self._go_on(SECONDS_PER_CUT if is_large(request) else SECONDS_PER_QUESTION)
        if isinstance(point, PlacementCandidate) or not _waits_for_room(request):
            roomy = question.fit(request.within(MAX_BYTES - max(request.reserve)))
            return MAX_BYTES if roomy is None else max(roomy.peak_bytes, self._limit)
        found = placed_lean(request.within(self._limit), point)
        if isinstance(found, PlacementCandidate):
            return self._limit
        if not isinstance(found, InfeasibleError):
            question.refuted = MAX_BYTES
            return MAX_BYTES
        about = max(found.enough_bytes or 0, self._limit)
        if isinstance(point, Choice) and point.strategy == "one-to-one":
            question.refuted = max(question.refuted, about - 1)
        return about

    def _find_devices(self) -> None:
        for question in self._of_devices:
            self._lower_devices(question)

    def _find_change(self, remedy: str, request: Request) -> None:
        """Whether a change by itself makes something fit into the memory there is."""
        if self._fewest <= self._request.num_devices and self._fits(request):
            self.opened.append(remedy)

    def _find_changed(self) -> None:
        """Where none does: all of them together, on as many devices or, if need be, on more; fewer than do without."""
        if self.opened:
            return
        remedy, request = _all_changed(self._request)
        if len(self._changes) > 1:
            self._find_change(remedy, request)
        if self.opened or _is_number_given(request):
            return
        if self._changed is None:
            self._changed = _Least(request, self._limit, self._step, 0.0, self._node)
        changed = self._changed
        changed._time, changed._below = self._time, self.devices
        changed._find_devices()

    def _find_alone(self) -> None:
        """Which of them alone make something fit on as many devices as all together."""
        changed = self._changed
        if changed is None or changed.devices is None or self.opened:
            return
        changed._time = self._time
        for remedy, request in self._changes:
            key = remedy, changed.devices
            if key not in self._alone:
                asked = replace(request, num_devices=changed.devices)
                self._alone[key] = not _is_number_given(request) and changed._fits(asked)

    def _fits(self, request: Request) -> bool:
        """Whether something fits into the memory there is."""
        return any(fit(request.within(self._limit)) is not None for fit in (self._chain, self._graph))

    def opened_on_more(self) -> Iterator[tuple[str, int]]:
        """Changes that make something fit on more devices than there are, but on fewer than without them; how many."""
        changed = self._changed
        if self.opened or changed is None or changed.devices is None or changed.on_devices is None:
            return
        if self.devices is None or changed.devices < self.devices:
            have = _have(changed.devices, self.cluster)
            alone = [remedy for (remedy, count), fits in self._alone.items() if fits and count == changed.devices]
            for remedy in alone:
                yield f"{have} and {remedy}", changed.devices
            if not alone:
                remedy, _ = _all_changed(self._request)
                yield f"{have} and {remedy} ({changed.on_devices.what})", changed.devices

    def _lower(self, question: _ShortageQuestion) -> None:
        """The least memory with which something fits, if that is less than what is known."""
        if self.memory is None:
            self._begin(question)
        elif not question.fitted and not self._less_memory(question, int(self.enough / self._step.precision)):
            return
        question.refuted = max(question.refuted, self._limit)
        while self.memory is not None and self.enough > question.refuted * self._step.precision:
            middle = max(question.refuted + 1, math.isqrt(question.refuted * self.enough))
            if rounded_up(middle) >= self.enough:  # memory is said in so many digits
                return
            self._less_memory(question, middle)

    def _begin(self, question: _ShortageQuestion) -> None:
        """Some memory that is enough: what a plan without a limit takes, or little more."""
        self._go_on()
        unlimited = question.fit(self._request.within(None))
        if unlimited is not None:
            need = max(unlimited.peak_bytes, self._limit)
            any(self._less_memory(question, times * need) for times in SHORTAGE_TIMES)

    def _less_memory(self, question: _ShortageQuestion, memory: int) -> bool:
        if memory <= question.refuted:
            return False
        self._go_on()
        found = question.fit(self._request.within(rounded_up(memory)))
        if found is None:
            question.refuted = memory
            return False
        self.memory, self.enough, question.fitted = found, rounded_up(memory), True
        return True

    def _lower_devices(self, question: _ShortageQuestion) -> None:
        """The fewest that may do, and then doubling until a number does; then halving the distance."""
        question.refuted = max(question.refuted, self._refuted)
        unit = self._unit
        if self.devices is None:
            most = self._most_devices
            counts, count = [question.refuted + unit], self._request.num_devices
            while (count := min(2 * count, most)) < most:
                counts += [count] * (count > counts[0])
            for count in (*counts, most):  # samples divide among twice as many more often than among one node more
                if count <= most and self._fewer_devices(question, count):
                    break
        elif not question.fitted and not self._fewer_devices(question, self.devices - unit):
            return
        while self.devices is not None and self.devices - question.refuted > unit:
            half = (self.devices - question.refuted) // (2 * unit) * unit
            self._fewer_devices(question, question.refuted + max(unit, half))

    @property
    def _most_devices(self) -> int:
        """Enough, if any number is: every block alone, split as far as it can be, its samples on as many replicas; but
        fewer than are known to do without changes."""
        samples = max(self._request.sizes or [self._request.batch.microbatch_size])
        splits = open_splits(replace(self._request, num_devices=self._node or MAX_DEVICES))
        width = max((each.width for each in splits), default=1)
        most = min(MAX_DEVICES, max(len(self._request.profile.blocks) * samples * width, self._refuted))
        return most if self._below is None else min(most, self._below - self._unit)

    @property
    def _refuted(self) -> int:
        """So many devices, whole nodes of them, and fewer are not enough."""
        return max(self._request.num_devices, (self._fewest - 1) // self._unit * self._unit)

    @property
    def _fewest(self) -> int:
        """Fewer devices have no room for the state."""
        return -(-least_state_bytes(self._request) // self._limit)

    def _fewer_devices(self, question: _ShortageQuestion, count: int) -> bool:
        if count <= question.refuted:
            return False
        self._go_on()
        found = question.fit(replace(self._request.within(self._limit), num_devices=count))
        if found is None:
            question.refuted = count
            return False
        self.devices, self.on_devices, question.fitted = count, found, True
        return True

    def _chain(self, request: Request) -> _Fit | None:
        limit, more = request.least_memory or math.inf, request.num_devices > self._request.num_devices
        points = self._points(request, longest=more)
        able = (point for point in points if least_bytes(request, point) <= limit)
        if more and points and isinstance(points[0], BoundedChoice) and points[0].least_bytes <= limit:
            self.about_devices = request.num_devices, points[0]
        return self._first_fit(request, (placed_lean(request, point) for point in able))

    def _graph(self, request: Request) -> _Fit | None:
        """Not of large requests, where one graph takes all the time, and the table has what needs least."""
        if is_large(request):
            return None
        every = chain.from_iterable(map(StageGraphs().candidates, request.levels))
        return self._first_fit(request, (propose() for propose in every))

    def _points(self, request: Request, *, longest: bool = False) -> list[Point]:
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
            return [*leanest_rows(uniform)]
        plain, others = plainest_first(request)
        return [*plain, *others]

    def _point(self, point: Point, request: Request) -> _Fit | None:
        return self._first_fit(request, [placed_lean(request, point)])

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
            if _waits_for_room(request):  # one micro-batch is then as good as many
                batch = replace(candidate.batch, num_microbatches=candidate.placement.num_routes)
                trial = Trial.of(request, replace(candidate, batch=batch))
                trial.look()
            else:
                trial, seconds = Trial.of(request, candidate), self._step.seconds_per_schedule
                trial.search(request, self._time, seconds)
        except PipeplanError:
            return None
        return trial.best


def _waits_for_room(request: Request) -> bool:
    """Whether micro-batches run one after another where there is no room for more: in no schedule that is fixed."""
    return request.scheduler in SEARCHING or (request.scheduler == "rules" and request.rules is None)


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
    "replicas": "leave --dp out",
}
"""Sizes that may be open, and what opens each."""


def _changed(request: Request) -> Iterator[tuple[str, Request]]:
    """Requests that may need less memory, by what makes them; only what was fixed is changed."""
    if request.recompute not in (None, True):
        yield "give --recompute auto", replace(request, recompute=None)
    if request.zero not in (None, AUTO):
        open_zero = weighing_levels(replace(request, zero=None, zero_group=None))
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
    remedies = [*least.opened, f"raise --memory to {memory} ({best.memory.what})", *_more_devices(least)]
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


def _more_devices(least: _Least) -> Iterator[str]:
    """How many devices would do, with all else as asked, and with less fixed if these are fewer."""
    if least.on_devices is not None:
        yield f"{_have(least.devices, least.cluster)} ({least.on_devices.what})"
    elif least.about_devices is not None:
        count, choice = least.about_devices
        have = _have(count, least.cluster)
        yield f"{have} ({choice_words(choice.choice)} by closed form, which was not tried)"
    yield from (remedy for remedy, _ in least.opened_on_more())


def _without_memory(error: InfeasibleError, limit: int, least: _Least) -> InfeasibleError:
    """Where no memory was found that does: the error with what was, and what the closed forms say."""
    text, would_do = str(error.args[0]), _remedies(limit, least, ())
    if least.about is not None:
        needs, what = rounded_up(int(least.about.least_bytes)), choice_words(least.about.choice)
        text = (
            f"{text}; by closed form {what} needs about {format_bytes(needs)} with all recomputed that may be, the "
            "least of all layouts alike in all stages: there was no time to try it"
        )
        untried = f"{what}, by closed form, not tried"
        would_do.append({"num_devices": least.num_devices, "memory_bytes": needs, "what": untried})
    remedies = [*least.opened, *_more_devices(least)]
    if not would_do and not least.in_time:
        remedies = ["raise --time-limit: there was no time to find what would do"]
    return InfeasibleError("; ".join(filter(None, (text, ", or ".join(remedies)))), would_do=would_do)


def _remedies(limit: int, least: _Least, known: Sequence[_Least]) -> list[dict[str, int | str]]:
    """The same as figures: devices, bytes that a plan may use of each, and the layout that was found to fit."""
    found: list[tuple[int, int, str]] = [(least.num_devices, limit, remedy) for remedy in least.opened]
    if least.devices is not None and least.on_devices is not None:
        found.append((least.devices, limit, least.on_devices.what))
    found += [(each.num_devices, each.enough, each.memory.what) for each in known if each.memory is not None]
    found += [(count, limit, remedy) for remedy, count in least.opened_on_more()]
    return [{"num_devices": count, "memory_bytes": memory, "what": what} for count, memory, what in found]


def unproved(*, in_time: bool) -> str:
    """What is not known of what would do."""
    return (
        "that was found, and that less would not is not proved"
        if in_time
        else "that was found in the time there was, and with more --time-limit less may be"
    )


def _range(blocks: tuple[str, ...]) -> str:
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]} .. {blocks[-1]} ({len(blocks)} blocks)"
