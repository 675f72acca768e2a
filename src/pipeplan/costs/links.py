"""What it costs to move bytes between two devices of a cluster."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeplan.model import Cluster, MeasuredCurve

__all__ = [
    "LinkResult",
    "latency_and_bandwidth",
    "leave_one_out_error",
    "time_on_curve",
    "time_on_line",
    "transfer_time",
]

Points = Sequence[tuple[int, int]]
"""Pairs of bytes and ns, bytes ascending."""


def transfer_time(cluster: Cluster | None, source: int, target: int, size: int) -> tuple[int, int]:
    """Latency and link occupancy in ns of sending ``size`` bytes from one device to another.

    A measured curve of the level goes first (log-interpolated, made monotone; beyond its ends the rate of its
    last point holds); otherwise latency plus size over bandwidth. Without a cluster links cost nothing.
    """
    level = cluster.level_between(source, target) if cluster is not None and source != target else None
    if cluster is None or level is None:
        return 0, 0
    for curve in cluster.measured:
        if curve.operation == "send" and curve.level == level.name:
            time = time_on_curve(curve.points, size)
            latency = min(level.latency_ns, time)  # together they take what was measured
            return latency, time - latency
    return level.latency_ns, math.ceil(size * 1e9 / level.bandwidth_bytes_per_s)


def time_on_curve(points: Points, size: int) -> int:
    """Time in ns at ``size`` bytes on measured points, interpolated in the logarithms of both.

    It never falls with size: a point that is quicker than a smaller one takes that one's time. Below the first
    point its time holds, beyond the last one its rate.
    """
    monotone: list[tuple[int, int]] = []
    for bytes_, ns in points:
        monotone.append((bytes_, max(ns, monotone[-1][1] if monotone else 0)))
    if size <= monotone[0][0]:
        return monotone[0][1]
    for (low, low_ns), (high, high_ns) in zip(monotone, monotone[1:], strict=False):
        if size == high:
            return high_ns
        if size < high:
            share = math.log(size / max(low, 1)) / math.log(high / max(low, 1))
            return round(low_ns * math.pow(high_ns / low_ns, share))
    last, last_ns = monotone[-1]
    return round(last_ns * size / max(last, 1))


def latency_and_bandwidth(points: Points) -> tuple[int, int]:
    """The latency in ns and the bytes per second whose times are nearest to those measured.

    Nearest by the squares of relative errors, since times differ by orders of magnitude; no latency below 0.
    """
    ones, sizes = [1 / ns for _, ns in points], [size / ns for size, ns in points]  # what a and b count relative to ns
    aa, bb, ab = _dot(ones, ones), _dot(sizes, sizes), _dot(ones, sizes)
    determinant = aa * bb - ab * ab
    latency = (sum(ones) * bb - sum(sizes) * ab) / determinant if determinant > 1e-9 * aa * bb else 0.0
    latency = min(max(latency, 0.0), min(ns for _, ns in points))
    per_byte = (sum(sizes) - latency * ab) / bb if bb else 0.0
    return round(latency), min(max(1, round(1e9 / per_byte)), 10**15) if per_byte > 1e-6 else 10**15


def time_on_line(points: Points, size: int) -> int:
    """Time in ns at ``size`` bytes by latency and bandwidth fitted to measured points."""
    latency, bandwidth = latency_and_bandwidth(points)
    return latency + math.ceil(size * 1e9 / bandwidth)


def leave_one_out_error(points: Points, told: Callable[[Points, int], int] = time_on_curve) -> float | None:
    """How well the curve tells times it has not seen: the median of ``|told / measured - 1|``.

    Each point but the first and the last is left out once, and told from the others. None below three points.
    """
    errors = [
        abs(told([*points[:index], *points[index + 1 :]], size) / ns - 1)
        for index, (size, ns) in enumerate(points[1:-1], start=1)
    ]
    return statistics.median(errors) if errors else None


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


@dataclass(frozen=True, slots=True)
class LinkResult:
    """A cluster with measured curves."""

    cluster: Cluster

    def figures(self) -> dict[str, Any]:
        """The object of ``profile --communication --json``: how well each curve tells what it has not seen."""
        return {"cluster": self.cluster.name, "curves": [_curve_figures(curve) for curve in self.cluster.measured]}


def _curve_figures(curve: MeasuredCurve) -> dict[str, Any]:
    return {
        "operation": curve.operation,
        "level": curve.level,
        "num_devices": curve.num_devices,
        "num_points": len(curve.points),
        "smallest_bytes": curve.points[0][0],
        "largest_bytes": curve.points[-1][0],
        "leave_one_out_error": leave_one_out_error(curve.points),
    }
