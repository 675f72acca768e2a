"""Published runs beside predictions, at the catalog's shares and at shares fitted without some of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeplan.costs.devices import device_preset
from pipeplan.costs.uniform.fitting import (
    FEWEST_LAYOUTS,
    TimedRun,
    fit_shares,
    predicted_bytes,
    predicted_s,
    with_shares,
)
from pipeplan.costs.uniform.free_text import Unsaid
from pipeplan.costs.uniform.published import PublishedRun, read_run
from pipeplan.costs.uniform.shares import Shares, catalog_shares, shares_for
from pipeplan.errors import FileError, UsageError
from pipeplan.files.read_write import read_text
from pipeplan.texts import of_json


@dataclass(frozen=True, slots=True)
class Judged:
    """A row of published runs: what it took, and what is predicted, or why our words cannot say it.

    Errors are predicted over measured, less 1. A row that does not say what it took is predicted, and says why there
    is no error. ``closed_form_s`` is what closed forms predict, and so do ``predicted_s`` and ``predicted_bytes``
    before a plan does (:func:`pipeplan.planning.uniform.judged_by_plans`). ``shows_reserve``: what is measured is all
    that the driver knows of (``nvidia-smi``), with context, communicators and the allocator's slack, so that the
    reserve of the device's preset is compared, too.
    """

    id: str
    source: str
    step_s: float | None
    measured_bytes: float | None
    run: PublishedRun | None
    predicted_s: float | None = None
    predicted_bytes: float | None = None
    why_not: str | None = None
    closed_form_s: float | None = None
    shows_reserve: bool = False

    @property
    def known(self) -> PublishedRun:
        """The run in our words, where they can say it."""
        if self.run is None:
            raise ValueError(f"{self.id}: {self.why_not}")
        return self.run

    @property
    def measured(self) -> TimedRun:
        """The run with what it took, where both are known."""
        if self.step_s is None:
            raise ValueError(f"{self.id}: step_s is not printed")
        return TimedRun(self.known, self.step_s)

    @property
    def is_dense(self) -> bool:
        """Without experts."""
        return self.known.is_dense

    @property
    def is_16_bit(self) -> bool:
        """Products are in bfloat16 or float16."""
        return self.known.is_16_bit

    @property
    def assumed(self) -> tuple[str, ...]:
        """What the source does not print."""
        return self.run.assumed if self.run is not None else ()

    @property
    def error(self) -> float | None:
        """The error of the step's time."""
        return _error(self.predicted_s, self.step_s)

    @property
    def memory_error(self) -> float | None:
        """The error of peak memory, if the run states it."""
        if self.predicted_bytes is None or self.measured_bytes is None:
            return None
        reserve = device_preset(self.known.device).reserve_bytes if self.shows_reserve else 0
        return _error(self.predicted_bytes + reserve, self.measured_bytes)

    def with_plan(self, seconds: float, size: float) -> Judged:
        """Predicted by a plan."""
        return replace(self, predicted_s=seconds, predicted_bytes=size)

    def figures(self) -> dict[str, Any]:
        """Its object in JSON."""
        return {
            "id": self.id,
            "step_s": self.step_s,
            "predicted_s": self.predicted_s,
            "error": self.error,
            "memory_error": self.memory_error,
            "closed_form_s": self.closed_form_s,
            "why_not": self.why_not,
            "assumed": list(self.assumed),
        }


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1


def holds_runs(path: str | Path) -> bool:
    """Whether a file has published runs, and no profile: a list, or an object with runs."""
    try:
        content = of_json(read_text(str(path)))
    except (FileError, ValueError):
        return False
    return isinstance(content, list) or (isinstance(content, dict) and "runs" in content and "kind" not in content)


def read_runs(path: str | Path) -> list[Any]:
    """The rows of a file of published runs.

    Raises:
        FileError: it cannot be read, or holds no list.
    """
    try:
        rows = of_json(read_text(str(path)))
    except ValueError as error:
        raise FileError(f"{path}: {error}") from error
    if isinstance(rows, dict):
        rows = rows.get("runs")
    if not isinstance(rows, list):
        raise FileError(f"{path}: published runs are a list of objects, or an object with such a list as its runs")
    return rows


def judge(rows: Sequence[Any]) -> list[Judged]:
    """Every row at the catalog's shares, by closed forms."""
    found = [_read(place, row) for place, row in enumerate(rows)]
    told = [each for each in found if each.run is not None]
    seconds = iter(predicted_s([each.known for each in told]))
    sizes = iter(predicted_bytes([each.known for each in told]))
    return [
        replace(
            each, closed_form_s=(time := float(next(seconds))), predicted_s=time, predicted_bytes=float(next(sizes))
        )
        if each.run
        else each
        for each in found
    ]


def _read(place: int, row: Any) -> Judged:
    if not isinstance(row, Mapping):
        return Judged(f"row {place}", "", None, None, None, why_not="the row is no object")
    measured = row.get("measured")
    measured = measured if isinstance(measured, Mapping) else {}
    memory, shows = positive(measured.get("memory_gb")), "nvidia-smi" in str(measured.get("memory_kind"))
    name, source, seconds = str(row.get("id", f"row {place}")), str(row.get("source", "")), positive(row.get("step_s"))
    size = None if memory is None else 1e9 * memory
    untimed = "step_s is not printed" if row.get("step_s") is None else "step_s is no positive number"
    try:
        why_not = None if seconds else untimed
        return Judged(name, source, seconds, size, read_run(row), why_not=why_not, shows_reserve=shows)
    except Unsaid as reason:
        return Judged(name, source, seconds, size, None, why_not=str(reason))


def positive(value: object) -> float | None:
    """A number above 0 that is one, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        return None
    return float(value)


def left_out_errors(told: Sequence[Judged], groups: Sequence[Collection[str]]) -> dict[str, float]:
    """Errors by id, of each group of sources at shares that were fitted to all others."""
    errors = {}
    for sources in groups:
        fitted = fit_shares([each.measured for each in told if each.source not in sources])
        unseen = [each for each in told if each.source in sources]
        found = predicted_s(with_shares([each.known for each in unseen], fitted))
        for each, seconds in zip(unseen, found, strict=True):
            errors[each.id] = float(seconds) / each.measured.step_s - 1
    return errors


@dataclass(frozen=True, slots=True)
class RunsFit:
    """Shares fitted to a file of published runs for one device, and the mean absolute errors of these runs.

    ``before`` is at the catalog's shares, ``after`` at the fitted ones, each of the runs they were fitted on.
    """

    shares: Shares
    before: float
    after: float

    @property
    def notes(self) -> str:
        """What a profile says of it."""
        return (
            f"{self.shares.notes} Their error is {self.after:.1%} in the mean, and was {self.before:.1%} at the "
            "catalog's shares."
        )


def fit_device(rows: Sequence[Any], device: str) -> RunsFit:
    """The shares of a kind of device by these runs; where they have too few layouts of it, its neighbour's.

    Raises:
        UsageError: there are too few of its neighbours, too.
    """
    told = [each for each in judge(rows) if each.error is not None]
    shares = shares_for(device, fit_shares([each.measured for each in told]))
    if not shares.runs:
        raise UsageError(
            f"--calibrate: of {len(rows)} runs fewer than {FEWEST_LAYOUTS} layouts are on {device} or one like it; "
            "give more runs, or a measured profile"
        )
    fitted_on = [each.measured for each in told if each.known.device == shares.whose]
    before, after = (
        predicted_s([each.run.at(reached) for each in fitted_on])
        for reached in (shares_for(shares.whose, catalog_shares()), shares)
    )
    return RunsFit(shares, _mean_error(before, fitted_on), _mean_error(after, fitted_on))


def _mean_error(seconds: Iterable[float], runs: Sequence[TimedRun]) -> float:
    return sum(abs(one / each.step_s - 1) for one, each in zip(seconds, runs, strict=True)) / len(runs)
