"""Two shares per kind of device, fitted to published runs: of the matrix units' peak, and of memory and links.

The fit has the least mean of ``|log(predicted / measured)|`` over runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs.uniform.memory import memory
from pipeplan.costs.uniform.published import PublishedRun
from pipeplan.costs.uniform.shares import Shares, shares_for
from pipeplan.costs.uniform.step import step_time
from pipeplan.costs.uniform.words import Machine, Said, Transformer, UniformLayout, stacked

FEWEST_LAYOUTS = 5
"""A kind of device with fewer takes its neighbour's shares."""

_LOWEST, _HIGHEST = 0.2, 1.0
_FIRST, _POINTS, _ROUNDS = 33, 9, 5
"""Points of a side of the first grid, fine enough for a narrow valley, then of those around its best point."""

_DIGITS = 3


@dataclass(frozen=True, slots=True)
class TimedRun:
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


def _stacked(runs: Sequence[PublishedRun]) -> tuple[Transformer, UniformLayout, Machine]:
    return (
        stacked([each.model for each in runs]),
        stacked([each.layout for each in runs]),
        stacked([each.machine for each in runs]),
    )


def fit_shares(measured: Sequence[TimedRun]) -> dict[str, Shares]:
    """Shares by kind of device, of kinds with enough layouts."""
    by_kind: dict[str, list[TimedRun]] = {}
    for each in measured:
        by_kind.setdefault(each.run.device, []).append(each)
    found = {}
    for kind, runs in sorted(by_kind.items()):
        count = len({layout_key(each.run) for each in runs})
        if count >= FEWEST_LAYOUTS:
            found[kind] = Shares(*_fit(runs), kind, count, len(runs))
    return found


def _fit(measured: Sequence[TimedRun]) -> tuple[float, float]:
    """The best two shares: a grid that closes in on its best point."""
    actual = np.array([each.step_s for each in measured])
    said = _stacked([each.run for each in measured])
    model, layout, machine = _as_column(said[0]), _as_column(said[1]), _as_column(said[2])

    def loss(matrix: NDArray[np.float64], bandwidth: NDArray[np.float64]) -> NDArray[np.float64]:
        reached = replace(machine, matrix_share=matrix[None, :], bandwidth_share=bandwidth[None, :])
        found = step_time(model, layout, reached).iteration_ns / 1e9
        return np.asarray(np.abs(np.log(found / actual[:, None])).mean(axis=0))

    low, high = np.full(2, _LOWEST), np.full(2, _HIGHEST)
    best = (low + high) / 2
    for number in range(_ROUNDS):
        sides = [np.linspace(low[axis], high[axis], _POINTS if number else _FIRST) for axis in range(2)]
        matrix, bandwidth = (each.ravel() for each in np.meshgrid(*sides, indexing="ij"))
        place = int(np.argmin(loss(matrix, bandwidth)))
        best = np.array([matrix[place], bandwidth[place]])
        reach = (high - low) / 4
        low, high = np.maximum(_LOWEST, best - reach), np.minimum(_HIGHEST, best + reach)
    return round(float(best[0]), _DIGITS), round(float(best[1]), _DIGITS)


def _as_column(said: Said) -> Said:
    return replace(said, **{each.name: getattr(said, each.name)[:, None] for each in fields(said)})


def with_shares(runs: Iterable[PublishedRun], fitted: Mapping[str, Shares]) -> list[PublishedRun]:
    """The runs at the shares of their devices."""
    return [each.at(shares_for(each.device, fitted)) for each in runs]
