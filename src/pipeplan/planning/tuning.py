"""The auto-tuner (FlexPipe, section 6): a grid over depth, replicas, sizes, placements and rules, the best row a plan.

Cells come in the order of their bounds, and in rounds of a fixed number, so that what is skipped because it cannot
become the best depends on nothing but what is asked: not on how many processes share the work. Work can be stopped,
and what is done until then is kept.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from typing import Protocol, Self, TypeVar

from pipeplan.display import Displayed
from pipeplan.errors import InfeasibleError, PipeplanError, SearchTimeoutError, UsageError
from pipeplan.files import Placement, Plan
from pipeplan.planning.bounds import prompt_bound
from pipeplan.planning.build_plan import CandidateCounts, Result, planned, said_of_choices
from pipeplan.planning.candidates import PlacementCandidate, even_cuts, grid, is_large
from pipeplan.planning.expanding import of_blocks
from pipeplan.planning.infeasibility import ExplainShortage, most_telling, shortage
from pipeplan.planning.request import Request
from pipeplan.planning.tuning_cells import (
    Cache,
    Cell,
    CellRows,
    TuningRow,
    cell_of,
    first_row_of,
    rows_of,
    schedule_of,
    settled_cell,
)
from pipeplan.planning.uniform_space import Choice
from pipeplan.planning.workers import HandedOver, deaf, processes, submitted
from pipeplan.schedule.rules import Rules
from pipeplan.schedule.state import Progress, Schedule, noted
from pipeplan.search_constants import (
    ENDING,
    FIRST_SECONDS,
    LATE,
    LATE_SHARE,
    TUNING_LEAVING_SECONDS,
    TUNING_MAKING,
    TUNING_PLACED,
    TUNING_PLACING,
    TUNING_POLL_SECONDS,
    TUNING_ROUND,
    TUNING_SAID_AFTER,
    TUNING_SHORTAGE_SECONDS,
)
from pipeplan.time_limit import Limit, Telling, TimeUpError, clock_of, shielded
from pipeplan.units import format_bytes

Item = TypeVar("Item")
Found = TypeVar("Found")
Work = Callable[[Request, Item, Callable[[], bool]], Found]
"""(request, item, whether to stop now) -> what was found; a function of a module, since it is sent to processes."""


class Workers:
    """Worker processes, or for one none beside this; they stop when ``limit`` says so, or by Ctrl-C.

    Ctrl-C is heard only here, and nothing is torn: what is at work ends at its next look at the clock. The second one
    is what Ctrl-C is without this.
    """

    def __init__(self, request: Request, count: int, limit: Limit) -> None:
        self._request, self._count, self._limit = request, count, limit
        self._pool: ProcessPoolExecutor | None = None
        self._ended = False
        self._left = ExitStack()
        self.notes: list[str] = []

    def __enter__(self) -> Self:
        self._left.enter_context(self._limit.hearing_interrupts(self.interrupt))
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes, whatever they are doing or starting: nobody needs their results, and they own no files."""
        self._left.close()

    def _made(self) -> ProcessPoolExecutor:
        """The processes, when they are needed first. Raises OSError and TimeUpError as :class:`HandedOver`."""
        handed = HandedOver(self._request)
        self._left.callback(handed.close)
        with deaf():
            self._stop = get_context("spawn").Event()
        make, end = processes(self._count, _begin, handed, self._stop, Limit(self._limit.left()))
        pool = make()
        self._left.callback(end, pool)
        return pool

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C was heard."""
        return self._limit.interrupted

    @property
    def stopped(self) -> bool:
        """Whether no more work is to begin: as long as nothing is found, not before all patience is over."""
        return self._limit.over if self._limit.waiting else self._limit.expired

    def interrupt(self) -> None:
        """Let what is at work come to its end soon, and begin no more."""
        self._limit.interrupt()
        if self._pool is not None:
            self._stop.set()

    def run(self, work: Work[Item, Found], items: Sequence[Item]) -> Iterator[Found]:
        """What is found for each item, in their order, as it comes; what is stopped says so itself.

        A process that dies, by a signal or for want of memory, takes nothing along: the work is done here.
        """
        for item, future in zip(items, self._begun(work, items), strict=True):
            try:
                yield self._here(work, item) if future is None else self._there(future)
            except BrokenProcessPool as error:
                self._leave(error)
                yield self._here(work, item)

    def _there(self, future: Future[Found]) -> Found:
        """What a process finds; when time is up there is a moment for it to come to its end.

        Raises:
            TimeUpError: it did not: it may not even have begun, since processes need seconds for that.
        """
        told = 0
        while not future.done():
            wait([future], TUNING_POLL_SECONDS)
            if self._limit.interrupted:  # by another thread, maybe, of which processes must hear
                self.interrupt()
            told += not self._limit.counted and self._limit.over  # processes count their own
            if told * TUNING_POLL_SECONDS > TUNING_LEAVING_SECONDS:
                raise TimeUpError(self._limit)
        return future.result()

    def _begun(self, work: Work[Item, Found], items: Sequence[Item]) -> list[Future[Found] | None]:
        """The items, given to the processes; None for those to be done here, as the first are: processes take time."""
        if self._count == 1 or self._ended or self._limit.waiting or not items:
            return [None] * len(items)
        try:
            if self._pool is None:
                self._pool = self._made()
            pool = self._pool
            return [submitted(pool, _apply, work, item) for item in items]
        except (BrokenProcessPool, OSError) as error:
            self._leave(error)
            return [None] * len(items)

    def _leave(self, why: Exception) -> None:
        """Do without processes from now on."""
        if not self._ended:
            self.notes.append(f"worker processes died, or did not begin ({why}): the rest was done without them")
        self._ended = True

    def _here(self, work: Work[Item, Found], item: Item) -> Found:
        with self._limit.enforced():
            return work(self._request, item, lambda: self.stopped)


class _WorkerState:
    """What a process knows."""

    request: Request
    stop: Event
    limit: Limit


@dataclass(slots=True, eq=False)
class _Stoppable(Limit):
    """A process's limit, which the event interrupts."""

    @property
    def interrupted(self) -> bool:
        """Whether no more work is wanted."""
        return _WorkerState.stop.is_set()


def _begin(request: Request, stop: Event, limit: Limit) -> None:
    _WorkerState.request, _WorkerState.stop = request, stop
    _WorkerState.limit = _Stoppable(limit.seconds, clock=limit.clock, started=limit.started)


def _apply(work: Work[Item, Found], item: Item) -> Found:
    with _WorkerState.limit.enforced():
        return work(_WorkerState.request, item, lambda: _WorkerState.limit.expired)


_NO_RULES = "no built-in rules make a schedule that fits into the devices' memory; let --scheduler auto search"


@dataclass(frozen=True, slots=True)
class Tuning(Displayed):
    """The best plan, the rules that make it, every row by rank, and how many cells there were.

    Of ``num_cells``, ``num_unfit`` fit under no rules, ``num_skipped`` have a bound that is not below the best
    row's iteration, ``num_known`` were in the cache and ``num_open`` were left when time was up.
    """

    result: Result
    rules: Rules
    rows: tuple[TuningRow, ...]
    num_cells: int
    num_unfit: int
    num_skipped: int
    num_known: int
    num_open: int

    def __repr__(self) -> str:
        return f"<Tuning {self.said}; best: {self.result.plan!r}>"

    @property
    def said(self) -> str:
        """How many cells there were, in words."""
        looked = self.num_cells - self.num_unfit - self.num_skipped - self.num_open
        parts = [f"configurations: {looked} of {self.num_cells} evaluated"]
        parts += [f"{self.num_known} of them known"] if self.num_known else []
        parts += [f"{self.num_skipped} skipped, whose bound is above the best"] if self.num_skipped else []
        parts += [f"{self.num_unfit} out of memory"] if self.num_unfit else []
        parts += [f"{self.num_open} not reached"] if self.num_open else []
        return ", ".join(parts)

    def figures(self) -> dict[str, object]:
        """The figures of ``search --json``, with the rows under ``candidates``."""
        return {
            **self.result.figures(),
            "candidates": [{"rank": rank, **asdict(row)} for rank, row in enumerate(self.rows, 1)],
            "cells": self.num_cells,
            "cells_unfit": self.num_unfit,
            "cells_skipped": self.num_skipped,
            "cells_known": self.num_known,
            "cells_open": self.num_open,
        }


def tune(
    request: Request,
    *,
    workers: int = 1,
    cache: str | None = None,
    progress: Progress | None = None,
    within: Limit | None = None,
) -> Tuning:
    """Look into the grid that the request leaves open, on ``workers`` processes, until all is known or time is up.

    ``cache`` names a file that keeps what is found, and from which a tuning that was interrupted goes on.

    Raises:
        InfeasibleError: no cell fits; the text names the device, the bytes and what to change.
        SearchTimeoutError: time was up before there was a row.
        UsageError: a request that contradicts the profile, or a cache that is none.
    """
    limit = Limit(request.time_limit, whole=within, clock=clock_of(within))
    known = Cache(cache, request)
    with request.reserve_said(), Workers(request, workers, limit) as shared:
        return _Tuner(request, shared, known, limit, progress).run()


class _Looked(Protocol):
    """What is known of a point."""

    @property
    def complete(self) -> bool:
        """Whether that is all."""


Looked = TypeVar("Looked", bound=_Looked)


@dataclass(slots=True)
class _GridPoint:
    """A point of the grid, its text, and what is known of it."""

    choice: Choice | PlacementCandidate
    text: str
    cell: Cell = field(default_factory=Cell)


def _ranked(found: Sequence[tuple[Cell, TuningRow]]) -> list[tuple[Cell, TuningRow]]:
    """The rows by rank; of those that differ in nothing but the names of their rules, the first."""
    unique: dict[TuningRow, tuple[Cell, TuningRow]] = {}
    for cell, row in sorted(found, key=lambda pair: pair[1].rank):
        unique.setdefault(replace(row, rules=""), (cell, row))
    return list(unique.values())


@dataclass(frozen=True, slots=True)
class _TunedPlan:
    """A row as a plan, and the seconds that took."""

    cell: Cell
    row: TuningRow
    rules: Rules
    schedule: Schedule
    plan: Plan
    seconds: float


@dataclass(slots=True)
class _Tuner:
    """What a tuning knows: the rows of each cell that it has evaluated."""

    request: Request
    workers: Workers
    cache: Cache
    limit: Limit
    progress: Progress | None = None
    failures: list[PipeplanError] = field(default_factory=list)
    found: list[tuple[Cell, TuningRow]] = field(default_factory=list)
    seen: set[Hashable] = field(default_factory=set)
    num_unfit: int = 0
    num_skipped: int = 0
    num_known: int = 0
    num_done: int = 0
    made: _TunedPlan | None = None
    making_seconds: float = 0.0
    partition_seconds: float = 0.0
    known_bound_ns: int | None = None

    def run(self) -> Tuning:
        """All rounds."""
        waiting = self._points()
        self.limit.wait(0.0, FIRST_SECONDS)
        telling = Telling(TUNING_SAID_AFTER, clock=self.limit.clock, tell=self._none_yet)
        try:
            with self.limit.ended(), telling.enforced():
                self._begin()
                with noted("rules", self.workers.notes, lambda _: bool(self.found)):
                    self._look_into(waiting)
        finally:
            if self.limit.interrupted:
                self.workers.interrupt()
        num_cells = len(self.seen) + len(waiting)
        ranked = _ranked(self.found)
        num_open = num_cells - self.num_unfit - self.num_skipped - self.num_done
        rules, result = self._result(ranked, num_open)
        return Tuning(
            result=result,
            rules=rules,
            rows=tuple(row for _, row in ranked),
            num_cells=num_cells,
            num_unfit=self.num_unfit,
            num_skipped=self.num_skipped,
            num_known=self.num_known,
            num_open=num_open,
        )

    def _begin(self) -> None:
        """Of a large request even cuts come first, until one has a row: placing a point of the grid takes seconds.

        That is of the plainest rules, and made a plan at once, which an interruption leaves; as long as it took is kept
        for the last one.
        """
        if isinstance(self.request.placement, Placement) or not is_large(self.request):
            return
        for cut in even_cuts(self.request):
            candidate = replace(cut, given=None, usual=None)  # what the cache can keep
            points = self._placed(deque([_GridPoint(candidate, repr(candidate))]), self._elapsed)
            self._round(points, first_row_of)
            if self.found:
                self._secure()
                self._report()
                self.limit.wait_no_longer()
                self._round(points)
                self._report()
                self._secure()
            if self.found or self.workers.stopped:
                return

    def _none_yet(self) -> None:
        if self.progress is not None and not self.found:
            self.progress("no rules were found yet whose schedule fits: the tuning goes on", 0, 0, self._elapsed)

    def _secure(self) -> None:
        """Make a plan of the best row, unless that has taken much of the time already."""
        known = 0.0 if self.made is None else self.made.seconds
        if self.found and self.making_seconds + known <= TUNING_MAKING * self._elapsed:
            made = self._made_of(*min(self.found, key=lambda pair: pair[1].rank))
            self.limit.reserved = max(self.limit.reserved, made.seconds)

    def _look_into(self, waiting: deque[_GridPoint]) -> None:
        """Place points and try their cells, in turn, until all are done or time is up.

        Before there is a plan, few are placed and one cell after another is tried, the most promising first.
        """
        while waiting and not self.workers.stopped:
            begun = self._elapsed
            placing = TUNING_PLACING * (self.request.time_limit - begun) if self.found else 0.0
            cells = deque(sorted(self._placed(waiting, begun + placing), key=lambda point: point.cell.bound_ns))
            self.partition_seconds += self._elapsed - begun
            while cells and not self.workers.stopped:
                size = TUNING_ROUND if self.found else 1
                self._round([cells.popleft() for _ in range(min(size, len(cells)))])
                self._report()
                if is_large(self.request):
                    self._secure()

    @property
    def _elapsed(self) -> float:
        return self.limit.elapsed

    @property
    def _best_ns(self) -> float:
        return min((row.iteration_ns for _, row in self.found), default=math.inf)

    def _points(self) -> deque[_GridPoint]:
        """The grid, yet to be placed. Cells with few micro-batches come first, since they are evaluated quickly."""
        points: list[_GridPoint] = []
        for choice in grid(self.request):
            if isinstance(choice, UsageError):
                self.failures.append(choice)
            else:
                points.append(_GridPoint(choice, repr(choice)))
        return deque(sorted(points, key=lambda point: point.choice.batch.num_microbatches))

    def _placed(self, waiting: deque[_GridPoint], until: float) -> list[_GridPoint]:
        """The next points, placed, until there has been time for it.

        What cannot be placed for other reasons than memory, or is there already, is none of the grid.
        """
        found: list[_GridPoint] = []
        while waiting and (self._elapsed < until or not found) and not self.workers.stopped:
            points = [
                waiting.popleft() for _ in range(min(TUNING_PLACED if self.found else TUNING_ROUND, len(waiting)))
            ]
            cells = self._look_up("cell", Cell, cell_of, points, [point.choice for point in points])
            for point, cell in zip(points, cells, strict=True):
                point.cell = cell
                self._note_failure(point)
                key = point.text if cell.candidate is None else cell.candidate.key
                if key not in self.seen and (cell.candidate is not None or cell.unfit or not cell.complete):
                    self.seen.add(key)
                    found += [point] if cell.candidate is not None else []
        return found

    def _round(self, points: Sequence[_GridPoint], work: Work[Cell, CellRows] = rows_of) -> None:
        """Look into those that may become the best; their bounds may rise when their devices are chosen."""
        live = self._live(points)
        settled = self._look_up("settled cell", Cell, settled_cell, live, [point.cell for point in live])
        for point, cell in zip(live, settled, strict=True):
            point.cell = cell
            self._note_failure(point)
        live = self._live([point for point in live if point.cell.settled])
        found = self._look_up("rows", CellRows, work, live, [point.cell for point in live])
        for point, rows in zip(live, found, strict=True):
            unfit = rows.complete and not rows.rows
            if unfit:
                self.num_unfit += 1
                self.failures.append(InfeasibleError(_NO_RULES))
            self.num_done += rows.complete and not unfit
            self.found += [(point.cell, row) for row in rows.rows]
        if self.found:
            self.limit.wait_no_longer()

    def _live(self, points: Sequence[_GridPoint]) -> list[_GridPoint]:
        """Those that may become the best."""
        best = self._best_ns
        live = [point for point in points if point.cell.bound_ns < best]
        self.num_skipped += len(points) - len(live)
        return live

    def _look_up(
        self,
        what: str,
        kind: type[Looked],
        work: Work[Item, Looked],
        points: Sequence[_GridPoint],
        items: Sequence[Item],
    ) -> list[Looked]:
        """What the cache or the work says of each point; nothing where it was stopped."""
        known = [self.cache.get(what, point.text, kind) for point in points]
        new = [number for number, found in enumerate(known) if found is None]
        self.num_known += len(known) - len(new) if kind is CellRows else 0
        for number, found in zip(new, self.workers.run(work, [items[number] for number in new]), strict=False):
            known[number] = found
            if found.complete:
                self.cache.put(what, points[number].text, found)
        return [found if found is not None else kind() for found in known]

    def _note_failure(self, point: _GridPoint) -> None:
        if point.cell.failure:
            self.failures.append(point.cell.error)
            self.num_unfit += point.cell.unfit

    def _report(self) -> None:
        if self.progress is not None and self.found:
            cell, row = min(self.found, key=lambda pair: pair[1].rank)
            bound = min(self._bound_ns, cell.bound_ns, row.iteration_ns)
            self.progress(f"{row.placement}, {row.rules}", row.iteration_ns, bound, self._elapsed)

    def _result(self, ranked: Sequence[tuple[Cell, TuningRow]], num_open: int) -> tuple[Rules, Result]:
        """The rules of the best row, and its plan, made again.

        Raises:
            PipeplanError: there is none.
        """
        if not ranked:
            raise self._failure()
        made = self._last_made(*ranked[0])
        chosen = None if isinstance(self.request.placement, Placement) else self.partition_seconds
        proved = min(made.cell.bound_ns, made.plan.predicted.iteration_ns)
        notes = said_of_choices(self.request, made.schedule.workload, "rules are tuned for whole forwards")
        if made.row != ranked[0][1]:
            notes = (*notes, "there was no time to make a plan of the first row: this is the plan of another")
        notes = (*notes, *self.workers.notes)
        return made.rules, Result(
            made.plan,
            made.schedule,
            self._elapsed,
            chosen,
            self.workers.interrupted,
            lower_bound_ns=min(self._bound_ns, proved),
            placement_lower_bound_ns=proved,
            candidates=CandidateCounts(self.num_done + self.num_skipped, self.num_skipped, num_open),
            timed_out=num_open > 0 and not self.workers.interrupted,
            notes=notes,
            request=self.request,
        )

    def _last_made(self, cell: Cell, row: TuningRow) -> _TunedPlan:
        """The plan of a row, or the one that is there where that would be too late."""
        known = self.made
        if known is None or (known.seconds <= TUNING_LEAVING_SECONDS and not is_large(self.request)):
            return self._made_of(cell, row)
        if self.workers.interrupted and known.seconds > TUNING_LEAVING_SECONDS:
            return known
        late = max(LATE, LATE_SHARE * self.request.time_limit) - ENDING
        seconds = TUNING_LEAVING_SECONDS if self.workers.interrupted else late + self.limit.left()
        with shielded(), Limit(seconds, clock=self.limit.clock).ended():
            return self._made_of(cell, row)
        return known

    def _made_of(self, cell: Cell, row: TuningRow) -> _TunedPlan:
        """The plan of a row, kept."""
        if self.made is None or self.made.row != row:
            begun = self._elapsed
            assert cell.candidate is not None
            rules, schedule = schedule_of(self.request, cell.candidate, row)
            schedule = of_blocks(self.request, schedule)
            plan = planned(self.request, cell.candidate, schedule, schedule.workload)
            self.made = _TunedPlan(cell, row, rules, schedule, plan, self._elapsed - begun)
            self.making_seconds += self.made.seconds
        return self.made

    @property
    def _bound_ns(self) -> int:
        """No plan of the grid has a shorter iteration."""
        if isinstance(self.request.placement, Placement):
            return min(cell.bound_ns for cell, _ in self.found)
        if self.known_bound_ns is None:
            self.known_bound_ns = prompt_bound(self.request, self.limit)
        return self.known_bound_ns

    @property
    def _kept(self) -> str:
        return "" if self.cache.path is None else f"what is known of the cells is kept in {self.cache.path}; "

    def _failure(self) -> PipeplanError:
        """Why there is no row; where memory is short, with what would do."""
        if self.workers.interrupted:
            return SearchTimeoutError(f"interrupted before any schedule was found; {self._kept}let it run longer")
        error = next((each for each in self.failures if isinstance(each, InfeasibleError)), None)
        step = ExplainShortage()
        why = error and shortage(
            self.request, error, min(TUNING_SHORTAGE_SECONDS, max(step.seconds, self.limit.remaining)), step
        )
        if self.workers.stopped:
            enough = f", or --memory to {format_bytes(why.enough_bytes)}" if why and why.enough_bytes else ""
            limit = self.request.time_limit
            return SearchTimeoutError(f"no schedule was found in {limit:g} s; {self._kept}raise --time-limit{enough}")
        return why or most_telling(self.failures)
