"""What it costs to move bytes between two devices of a cluster."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pipeplan.model import Cluster

__all__ = ["leave_one_out_error", "time_on_curve", "transfer_time"]

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


def leave_one_out_error(points: Points) -> float | None:
    """How well the curve tells times it has not seen: the median of ``|told / measured - 1|``.

    Each point but the first and the last is left out once, and told from the others. None below three points.
    """
    errors = [
        abs(time_on_curve([*points[:index], *points[index + 1 :]], size) / ns - 1)
        for index, (size, ns) in enumerate(points[1:-1], start=1)
    ]
    return statistics.median(errors) if errors else None
