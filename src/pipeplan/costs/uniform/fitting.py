"""Two shares per kind of device, fitted to published runs: of the matrix units' peak, and of memory and links.

The fit has the least mean of ``|log(predicted / measured)|`` over runs.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs.uniform.memory import memory
from pipeplan.costs.uniform.published import PublishedRun, Unsaid, read_run
from pipeplan.costs.uniform.shares import Shares, shares_for
from pipeplan.costs.uniform.step import step_time
from pipeplan.costs.uniform.words import Layout, Machine, Transformer, stacked
from pipeplan.errors import FileError

FEWEST_LAYOUTS = 5
"""A kind of device with fewer takes its neighbour's shares."""

_LOWEST, _HIGHEST = 0.2, 1.0
_POINTS, _ROUNDS = 9, 5
_DIGITS = 3


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run in our words with what it took."""

    run: PublishedRun
    step_s: float


def layout_key(run: PublishedRun) -> Hashable:
    """Equal for a model in one layout, whatever the number of replicas."""
    return run.model, replace(run.layout, data=0, global_batch=0, zero_group=0), run.device


def predicted_s(runs: Sequence[PublishedRun]) -> NDArray[np.float64]:
    """Seconds of an iteration of each run."""
    if not runs:
        return np.zeros(0)
    model, layout, machine = _stacked(runs)
    return np.asarray(step_time(model, layout, machine).iteration_ns / 1e9, dtype=np.float64)


def predicted_bytes(runs: Sequence[PublishedRun]) -> NDArray[np.float64]:
    """The peak of a device's memory in each run."""
    if not runs:
        return np.zeros(0)
    return np.asarray(memory(*_stacked(runs)).peak_bytes, dtype=np.float64)


def _stacked(runs: Sequence[PublishedRun]) -> tuple[Transformer, Layout, Machine]:
    return (
        stacked([each.model for each in runs]),
        stacked([each.layout for each in runs]),
        stacked([each.machine for each in runs]),
    )


def fit_shares(measured: Sequence[MeasuredRun]) -> dict[str, Shares]:
    """Shares by kind of device, of kinds with enough layouts."""
    by_kind: dict[str, list[MeasuredRun]] = {}
    for each in measured:
        by_kind.setdefault(each.run.device, []).append(each)
    found = {}
    for kind, runs in sorted(by_kind.items()):
        count = len({layout_key(each.run) for each in runs})
        if count >= FEWEST_LAYOUTS:
            found[kind] = Shares(*_fit(runs), kind, count, len(runs))
    return found


def _fit(measured: Sequence[MeasuredRun]) -> tuple[float, float]:
    """The best two shares: a grid that closes in on its best point."""
    actual = np.array([each.step_s for each in measured])
    model, layout, machine = (_as_column(each) for each in _stacked([each.run for each in measured]))

    def loss(matrix: NDArray[np.float64], bandwidth: NDArray[np.float64]) -> NDArray[np.float64]:
        reached = replace(machine, matrix_share=matrix[None, :], bandwidth_share=bandwidth[None, :])
        found = step_time(model, layout, reached).iteration_ns / 1e9
        return np.asarray(np.abs(np.log(found / actual[:, None])).mean(axis=0))

    low, high = np.full(2, _LOWEST), np.full(2, _HIGHEST)
    best = (low + high) / 2
    for _ in range(_ROUNDS):
        sides = [np.linspace(low[axis], high[axis], _POINTS) for axis in range(2)]
        matrix, bandwidth = (each.ravel() for each in np.meshgrid(*sides, indexing="ij"))
        place = int(np.argmin(loss(matrix, bandwidth)))
        best = np.array([matrix[place], bandwidth[place]])
        reach = (high - low) / 4
        low, high = np.maximum(_LOWEST, best - reach), np.minimum(_HIGHEST, best + reach)
    return round(float(best[0]), _DIGITS), round(float(best[1]), _DIGITS)


def _as_column(said: Transformer | Layout | Machine) -> Transformer | Layout | Machine:
    return replace(said, **{each.name: getattr(said, each.name)[:, None] for each in fields(said)})


def with_shares(runs: Iterable[PublishedRun], fitted: Mapping[str, Shares]) -> list[PublishedRun]:
    """The runs at the shares of their devices."""
    return [each.at(shares_for(each.device, fitted)) for each in runs]


# Judging ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Judged:
    """A row of published runs: what it took, and what is predicted, or why our words cannot say it.

    Errors are predicted over measured, less 1.
    """

    id: str
    source: str
    step_s: float | None
    measured_bytes: float | None
    run: PublishedRun | None
    predicted_s: float | None = None
    predicted_bytes: float | None = None
    why_not: str | None = None

    @property
    def known(self) -> PublishedRun:
        """The run in our words, where they can say it."""
        if self.run is None:
            raise ValueError(f"{self.id}: {self.why_not}")
        return self.run

    @property
    def measured(self) -> MeasuredRun:
        """The run with what it took, where both are known."""
        if self.step_s is None:
            raise ValueError(f"{self.id}: step_s is not printed")
        return MeasuredRun(self.known, self.step_s)

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
        """Of the step's time."""
        return _error(self.predicted_s, self.step_s)

    @property
    def memory_error(self) -> float | None:
        """Of the peak of memory, where it was printed."""
        return _error(self.predicted_bytes, self.measured_bytes)

    def figures(self) -> dict[str, Any]:
        """Its object in JSON."""
        return {
            "id": self.id,
            "step_s": self.step_s,
            "predicted_s": self.predicted_s,
            "error": self.error,
            "memory_error": self.memory_error,
            "why_not": self.why_not,
            "assumed": list(self.assumed),
        }


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1


def read_runs(path: Path) -> list[Any]:
    """The rows of a file of published runs.

    Raises:
        FileError: it cannot be read, or holds no list.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: {error}") from error
    if isinstance(rows, dict):
        rows = rows.get("runs")
    if not isinstance(rows, list):
        raise FileError(f"{path}: published runs are a list of objects, or an object with such a list as its runs")
    return rows


def judge(rows: Sequence[Any]) -> list[Judged]:
    """Every row at the catalog's shares."""
    found = [_read(place, row) for place, row in enumerate(rows)]
    told = [each for each in found if each.run is not None]
    seconds = iter(predicted_s([each.known for each in told]))
    sizes = iter(predicted_bytes([each.known for each in told]))
    return [
        replace(each, predicted_s=float(next(seconds)), predicted_bytes=float(next(sizes))) if each.run else each
        for each in found
    ]


def _read(place: int, row: Any) -> Judged:
    if not isinstance(row, Mapping):
        return Judged(f"row {place}", "", None, None, None, why_not="the row is no object")
    measured = row.get("measured")
    memory = positive(measured.get("memory_gb")) if isinstance(measured, Mapping) else None
    name, source, seconds = str(row.get("id", f"row {place}")), str(row.get("source", "")), positive(row.get("step_s"))
    size = None if memory is None else 1e9 * memory
    try:
        return Judged(name, source, seconds, size, read_run(row))
    except Unsaid as reason:
        return Judged(name, source, seconds, size, None, why_not=str(reason))


def positive(value: object) -> float | None:
    """A number above 0 that is one, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        return None
    return float(value)
