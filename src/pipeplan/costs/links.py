"""What it costs to move bytes between two devices of a cluster."""

from __future__ import annotations

import math

from pipeplan.model import Cluster

__all__ = ["transfer_time"]


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
            return level.latency_ns, max(0, _on_curve(curve.points, size) - level.latency_ns)
    return level.latency_ns, math.ceil(size * 1e9 / level.bandwidth_bytes_per_s)


def _on_curve(points: tuple[tuple[int, int], ...], size: int) -> int:
    """Time at ``size`` on measured points, interpolated in the logarithms of both, never falling with size."""
    monotone: list[tuple[int, int]] = []
    for bytes_, ns in points:
        monotone.append((bytes_, max(ns, monotone[-1][1] if monotone else 0)))
    if size <= monotone[0][0]:
        return monotone[0][1]
    for (low, low_ns), (high, high_ns) in zip(monotone, monotone[1:], strict=False):
        if size <= high:
            share = math.log(size / max(low, 1)) / math.log(high / max(low, 1))
            return round(low_ns * math.pow(high_ns / low_ns, share))
    last, last_ns = monotone[-1]
    return round(last_ns * size / max(last, 1))
