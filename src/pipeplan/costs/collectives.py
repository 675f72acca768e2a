"""What it costs the devices of a group to combine or exchange arrays: rings over links, or measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeplan.costs.links import time_on_curve
from pipeplan.costs.presets import DevicePreset
from pipeplan.model import Cluster, LinkLevel

__all__ = [
    "Combining",
    "Exchange",
    "Prices",
    "all_gather_time",
    "all_reduce_time",
    "price_at",
    "prices_in",
    "prices_of",
    "ring_ns",
]

LINK_CEILING = 0.85
"""Share of a link's bandwidth that large messages reach. Assumed."""

LAUNCH_NS = 5_000
"""Before a collective moves anything. Assumed."""

STEP_NS = 2_000
"""One step of a ring takes this long however little it carries. Assumed."""


Combining = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective among the devices of a group, about an array of ``array_bytes`` (gathered: the whole array)."""

    operation: Combining
    array_bytes: int


Prices = Callable[[Exchange, int], float]
"""Time in ns of an exchange among so many devices."""


def ring_ns(exchange: Exchange, devices: int, bytes_per_s: float, step_ns: float) -> float:
    """Each device sends a share of the array per step, in as many steps as there are others; twice for all-reduce."""
    steps = (devices - 1) * (2 if exchange.operation == "all_reduce" else 1)
    return steps * (step_ns + 1e9 * exchange.array_bytes / devices / bytes_per_s)


def prices_of(device: DevicePreset) -> Prices:
    """Rings over a device's own links at their ceiling, and a launch."""
    rate = LINK_CEILING * device.link_bytes_per_s
    return lambda exchange, devices: LAUNCH_NS + ring_ns(exchange, devices, rate, STEP_NS)


def prices_in(cluster: Cluster) -> Prices:
    """Measured times among the first devices of a cluster where it has them, else rings over the slowest link."""
    return lambda exchange, devices: price_at(cluster, exchange, devices, cluster.level_between(0, devices - 1))


def all_reduce_time(cluster: Cluster | None, devices: Sequence[int], size: int) -> int:
    """Time in ns to sum ``size`` bytes over these devices; nothing without a cluster, or on one device."""
    return _time_of(cluster, Exchange("all_reduce", size), devices)


def all_gather_time(cluster: Cluster | None, devices: Sequence[int], size: int) -> int:
    """Time in ns until each of these devices has all of ``size`` bytes; nothing without a cluster, or on one device."""
    return _time_of(cluster, Exchange("all_gather", size), devices)


def _time_of(cluster: Cluster | None, exchange: Exchange, devices: Sequence[int]) -> int:
    if cluster is None or len(devices) < 2 or not exchange.array_bytes:
        return 0
    level = cluster.level_between(min(devices), max(devices))
    return round(price_at(cluster, exchange, len(devices), level))


def price_at(cluster: Cluster, exchange: Exchange, devices: int, level: LinkLevel | None) -> float:
    """Measured time of the level, interpolated over sizes and numbers of devices, else a ring over the level's links.

    Between two measured numbers of devices the time is interpolated in the logarithms of both; outside of them, and
    where only one was measured, it is a ring.
    """
    if level is None:
        return 0.0
    measured = sorted(
        (curve.num_devices, time_on_curve(curve.points, exchange.array_bytes))
        for curve in cluster.measured
        if (curve.operation, curve.level) == (exchange.operation, level.name)
    )
    for count, time in measured:
        if count == devices:
            return time
    for (fewer, low), (more, high) in zip(measured, measured[1:], strict=False):
        if fewer < devices < more:
            share = math.log(devices / fewer) / math.log(more / fewer)
            return low * math.pow(high / low, share)
    return ring_ns(exchange, devices, level.bandwidth_bytes_per_s, level.latency_ns)
