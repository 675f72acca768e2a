"""Cells of the auto-tuner's grid (FlexPipe, section 6): placements under every built-in rule, kept in a file."""

from __future__ import annotations

import hashlib
import itertools
import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from pipeplan._version import __version__
from pipeplan.errors import InfeasibleError, PipeplanError, UsageError
from pipeplan.files import sha256_of, write_elsewhere
from pipeplan.files.read_write import read_bytes
from pipeplan.planning.candidates import PlacementCandidate, placed
from pipeplan.planning.request import Request
from pipeplan.planning.trials import Trial, may_move, may_turn, workloads
from pipeplan.planning.uniform_space import Choice
from pipeplan.schedule.longer import ShorterRun
from pipeplan.schedule.rules import Rules
from pipeplan.schedule.rules.sweep import Swept, built_in_rules, run_rules, sweep
from pipeplan.schedule.search import timed
from pipeplan.schedule.state import Schedule
from pipeplan.search_constants import MOST_STARTED
from pipeplan.simulator.metrics import rates
from pipeplan.texts import of_json, problems_of
from pipeplan.time_limit import TimeUpError
from pipeplan.workload.bounds import strong_iteration_bound
from pipeplan.workload.elements import Again
from pipeplan.workload.one_microbatch import OneMicrobatch, device_groups
from pipeplan.workload.task_graph import task_graph
from pipeplan.workload.workload import Workload

_HEADER = {"kind": "tuning", "schema_version": 1}

Known = TypeVar("Known")


class Cache:
    """What was found of cells, by what it follows from: profile, cluster, memory, options, version, and the cell.

    Without a ``path`` it only remembers. A file that can no longer be written goes on as a temporary one, with
    a warning.

    Raises:
        UsageError: the file is something else, or cannot be read or written.
    """

    def __init__(self, path: str | None, request: Request) -> None:
        self.path, self._request = None if path is None else Path(path), _digest(request)
        self._known: dict[str, object] = {}
        if self.path is not None:
            self._open(self.path)

    def get(self, what: str, cell: str, kind: type[Known]) -> Known | None:
        """What is known of a cell; None if nothing is."""
        found = self._known.get(self._key(what, cell))
        if found is None:
            return None
        try:
            return TypeAdapter(kind).validate_json(json.dumps(found))
        except ValidationError as error:
            raise UsageError(
                f"--cache {self.path} has {what} of a cell that cannot be read: "
                f"{error.errors()[0]['msg']}; delete the file"
            ) from None

    def put(self, what: str, cell: str, known: object) -> None:
        """Keep what was found of a cell."""
        key = self._key(what, cell)
        self._known[key] = TypeAdapter(type(known)).dump_python(known, mode="json")
        self._append(key)

    def _open(self, path: Path) -> None:
        try:
            lines = read_bytes(str(path)).splitlines(keepends=True) if path.exists() else []
            with path.open("ab") as file:
                if lines and not lines[-1].endswith(b"\n"):  # a process ended while it wrote
                    file.truncate(sum(map(len, lines[:-1])))
                    lines = lines[:-1]
                if not lines:
                    file.write(_line(_HEADER))
        except OSError as error:
            raise UsageError(
                f"--cache {path} cannot be written: {error.strerror}; name a file that can be, or leave it out"
            ) from None
        if lines and _read(path, 1, lines[0]) != _HEADER:
            raise UsageError(f"--cache {path} is not a tuning cache; name another file, or a new one")
        for number, line in enumerate(lines[1:], 2):
            entry = _read(path, number, line)
            if set(entry) != {"key", "known"}:
                raise UsageError(
                    f"--cache {path}, line {number}: not a configuration of a tuning; delete the line or the file"
                )
            self._known[str(entry["key"])] = entry["known"]

    def _append(self, key: str) -> None:
        if self.path is None:
            return
        try:
            with self.path.open("ab") as file:
                file.write(self._lines(key))
        except OSError as error:
            self._move(self.path, error)

    def _move(self, path: Path, error: OSError) -> None:
        """Keep everything in a temporary file from now on, or only here where there is no room for one either."""
        kept = write_elsewhere((_line(_HEADER) + self._lines(*self._known)).decode(), str(path))
        self.path = None if kept is None else Path(kept)
        where = f"is kept in {kept or 'no file'} from now on"
        warnings.warn(f"--cache {path} cannot be written: {error.strerror}; what is found {where}", stacklevel=2)

    def _lines(self, *keys: str) -> bytes:
        return b"".join(_line({"key": key, "known": self._known[key]}) for key in keys)

    def _key(self, what: str, cell: str) -> str:
        return _sha256([self._request, what, cell])


def _digest(request: Request) -> str:
    """What rows follow from beside their cell."""
    cluster = request.cluster
    return _sha256(
        [
            __version__,
            [each.name for each in fields(TuningRow)],
            sha256_of(request.profile),
            str(request.profile.recipe),
            None if cluster is None else sha256_of(cluster),
            request.memory,
            request.num_devices,
            request.batch.mini_batch,
            request.chunks,
            request.split_backward,
            request.split_overhead_ns,
        ]
    )


def _line(entry: Mapping[str, object]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _read(path: Path, number: int, line: bytes) -> dict[str, object]:
    try:
        entry = of_json(line)
    except ValueError:
        entry = None
    if not isinstance(entry, dict):
        raise UsageError(f"--cache {path}, line {number}: no JSON object; this is not a tuning cache")
    for place, problem in problems_of(entry):
        raise UsageError(f"--cache {path}, line {number}: {place} {problem}")
    return entry


@dataclass(frozen=True, slots=True)
class Cell:
    """A point of the grid, placed, and ns that no iteration of it is below.

    ``failure`` says why there is none, or why it is ``unfit`` for the memory under every schedule. Once it is
    ``settled`` its devices are chosen among the cluster's; until then the bound is one for any devices.
    """

    candidate: PlacementCandidate | None = None
    bound_ns: int = 0
    settled: bool = False
    failure: str = ""
    unfit: bool = False

    @property
    def complete(self) -> bool:
        """Whether there was time for it."""
        return self.candidate is not None or bool(self.failure)

    @property
    def error(self) -> PipeplanError:
        """The failure as it is raised."""
        return InfeasibleError(self.failure) if self.unfit else UsageError(self.failure)


@dataclass(frozen=True, slots=True)
class TuningRow:
    """A cell under one set of rules.

    ``depth`` is how many groups of devices form a pipeline, ``microbatch_size`` the samples of a micro-batch over all
    ``replicas``, ``samples_per_replica`` the least and most in each, ``shards`` and ``context`` how many devices split
    each block, and how many of them each sequence; ``split``: backward has two parts. ``bubble_rate``
    is of the iteration, ``peak_memory_bytes`` of the device that needs most.
    """

    depth: int
    replicas: int
    microbatch_size: int
    samples_per_replica: tuple[int, int]
    num_microbatches: int
    placement: str
    recompute: Again
    split: bool
    rules: str
    iteration_ns: int
    makespan_ns: int
    bubble_rate: float
    peak_memory_bytes: int
    shards: int = 1
    context: int = 1

    @property
    def rank(self) -> tuple[int, int, int, str]:
        """What is better comes first: shorter, then less memory, then fewer groups; names make it definite."""
        return self.iteration_ns, self.peak_memory_bytes, self.depth, f"{self.placement}, {self.rules}"


@dataclass(frozen=True, slots=True)
class CellRows:
    """What is known of a cell's rows, and whether that is all."""

    rows: list[TuningRow] = field(default_factory=list)
    complete: bool = False


def cell_of(request: Request, point: Choice | PlacementCandidate, stopped: Callable[[], bool]) -> Cell:
    """The cell of a point of the grid, with a bound that is quickly had; nothing where time is up."""
    with suppress(TimeUpError):
        if not stopped():
            candidate = placed(request, point)
            if not isinstance(candidate, PlacementCandidate):
                return _failed(candidate)
            movable = may_move(request, candidate) or may_turn(request, candidate)
            return _bounded(_with_free_links(request) if movable else request, candidate, closely=False)
    return Cell()


def settled_cell(request: Request, cell: Cell, stopped: Callable[[], bool]) -> Cell:
    """The cell on devices of the cluster that are near each other, with a bound that takes longer."""
    with suppress(TimeUpError):
        if not stopped() and cell.candidate is not None:
            return _bounded(request, cell.candidate, closely=True)
    return Cell()


def _bounded(request: Request, candidate: PlacementCandidate, *, closely: bool) -> Cell:
    try:
        trial = (Trial.where_quick if closely else Trial.of)(request, candidate)
        problems = [OneMicrobatch.of(workload) for workload in trial.ways]
    except (InfeasibleError, UsageError) as error:
        return _failed(error)
    if closely:
        trial.bounds = [max(*each) for each in zip(trial.bounds, map(strong_iteration_bound, problems), strict=True)]
    return Cell(trial.candidate, trial.bound_ns, settled=closely)


def _failed(error: PipeplanError) -> Cell:
    return Cell(failure=str(error), unfit=isinstance(error, InfeasibleError))


def _with_free_links(request: Request) -> Request:
    """Messages take no time, and every device has the memory of the largest: no choice of devices does better."""
    limits = [limit for limit in request.memory if limit is not None]
    most = max(limits) if len(limits) == request.num_devices else None
    return request.within(most).unlinked


def rows_of(request: Request, cell: Cell, stopped: Callable[[], bool]) -> CellRows:
    """A row for each schedule that the built-in rules make, or those there was time for."""
    assert cell.candidate is not None
    found = CellRows()
    with suppress(TimeUpError):
        for workload in workloads(request, cell.candidate):
            problem = _problem(workload)
            rules = _rules(problem.workload)
            tried = itertools.takewhile(lambda _: not stopped(), rules)
            for swept in sweep(problem.workload, tried):
                schedule = _schedule(problem, workload, swept)
                if schedule is not None:
                    found.rows.append(_row(cell.candidate, schedule, swept.rules))
        return replace(found, complete=not stopped())
    return found


def first_row_of(request: Request, cell: Cell, stopped: Callable[[], bool]) -> CellRows:
    """The row of 1F1B's rules alone, of the first kind of backward for which they make a schedule; it is not all."""
    assert cell.candidate is not None
    for workload in workloads(request, cell.candidate):
        problem = _problem(workload)
        for swept in sweep(
            problem.workload, itertools.takewhile(lambda _: not stopped(), _plain_rules(problem.workload))
        ):
            schedule = _schedule(problem, workload, swept)
            if schedule is not None:
                return CellRows([_row(cell.candidate, schedule, swept.rules)])
    return CellRows()


def schedule_of(request: Request, candidate: PlacementCandidate, row: TuningRow) -> tuple[Rules, Schedule]:
    """The rules of one of a cell's rows, and the schedule, made again."""
    for workload in workloads(request, candidate):
        if workload.splits_backward == row.split:
            problem = _problem(workload)
            rules = next(rules for rules in _rules(problem.workload) if rules.name == row.rules)
            schedule = _schedule(problem, workload, run_rules(task_graph(problem.workload), rules))
            assert schedule is not None
            said = rules.splits_backward or not row.split  # that backward is split, for those who run the rules again
            return rules if said else rules.but(weights_late=0), schedule
    raise AssertionError("a row is of one of its cell's workloads")


def _rules(workload: Workload) -> list[Rules]:
    """The rules to try on a workload: where that is much work, 1F1B's, and then those of the paper's own search."""
    rules = built_in_rules(workload)
    started = len(rules) * workload.num_microbatches * len(workload.operations)
    if started <= MOST_STARTED:
        return rules
    return [*_plain_rules(workload), *built_in_rules(workload, limits=(None,), times=("unit",), separate=(True,))]


def _plain_rules(workload: Workload) -> list[Rules]:
    """1F1B's."""
    return built_in_rules(workload, limits=("S - s",), times=("unit",), separate=(False,))[:1]


def _problem(workload: Workload) -> OneMicrobatch:
    """What rules are tried on: of a very long run a shorter one."""
    return OneMicrobatch.of(ShorterRun().shorter(workload) or workload)


def _schedule(problem: OneMicrobatch, workload: Workload, swept: Swept) -> Schedule | None:
    """What rules make of a problem, as a schedule of the whole workload; None if it does not fit."""
    given = problem.workload if problem.reduction is None else problem.reduction.workload
    graph = task_graph(given)
    found = timed(problem, graph, swept.orders[: problem.num_devices], f"rules: {swept.rules.name}")
    if found is None or given.num_microbatches == workload.num_microbatches:
        return found
    return ShorterRun().repeating(found, workload)


def _row(candidate: PlacementCandidate, schedule: Schedule, rules: Rules) -> TuningRow:
    workload, replicas = schedule.workload, max(stage.replicas for stage in candidate.placement.stages)
    later = 0 if schedule.loop is None else schedule.loop.skipped_ns
    figures = rates(schedule.graph.summed_best(schedule.starts, later), schedule.orders, schedule.starts, schedule.loop)
    return TuningRow(
        depth=len(set(device_groups(workload))),
        replicas=replicas,
        microbatch_size=candidate.batch.microbatch_size,
        samples_per_replica=workload.samples_per_replica,
        num_microbatches=candidate.batch.num_microbatches,
        placement=candidate.placement.strategy,
        recompute=candidate.recompute,
        split=workload.splits_backward,
        rules=rules.name,
        iteration_ns=schedule.iteration_ns,
        makespan_ns=figures.makespan_ns,
        bubble_rate=figures.bubble_rate,
        peak_memory_bytes=schedule.most_bytes,
        shards=max(stage.shards for stage in candidate.placement.stages),
        context=max(stage.context for stage in candidate.placement.stages),
    )
