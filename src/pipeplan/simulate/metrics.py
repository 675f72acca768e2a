"""Figures of a timeline: makespan, how busy each device is, bubble rates, micro-batches in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.model.workload import Workload
from pipeplan.simulate.timing import Orders, TaskGraph

__all__ = ["Rates", "in_flight", "iteration_time", "rates"]


@dataclass(frozen=True, slots=True)
class Rates:
    """Figures of one iteration; times in ns, the iteration begins at 0.

    ``busy_ns`` [device]; ``first_start_ns`` and ``last_end_ns`` [device], both 0 for a device without actions.
    ``bubble_rate`` is of the iteration, ``1 - sum of busy / (D * makespan)``. ``bubble_rate_span`` is
    ``1 - busy/span`` of the device with the longest time from its first start to its last end.
    """

    makespan_ns: int
    busy_ns: tuple[int, ...]
    first_start_ns: tuple[int, ...]
    last_end_ns: tuple[int, ...]
    bubble_rate: float
    bubble_rate_span: float

    @property
    def span_ns(self) -> tuple[int, ...]:
        """Time from the first start to the last end [device]."""
        return tuple(last - first for first, last in zip(self.first_start_ns, self.last_end_ns, strict=True))

    @property
    def idle_ns(self) -> tuple[int, ...]:
        """Time of the iteration in which nothing runs [device]."""
        return tuple(self.makespan_ns - busy for busy in self.busy_ns)


def rates(graph: TaskGraph, orders: Orders, starts: Sequence[int]) -> Rates:
    """Figures of the timeline in which each task begins at ``starts`` [task], in ns; links count for nothing."""
    durations = graph.durations
    orders = graph.on_devices(orders)
    busy = tuple(sum(map(durations.__getitem__, order)) for order in orders)
    first = tuple(min(map(starts.__getitem__, order), default=0) for order in orders)
    last = tuple(max((starts[task] + durations[task] for task in order), default=0) for order in orders)
    makespan = max(last)
    spans = [end - start for start, end in zip(first, last, strict=True)]
    longest = spans.index(max(spans))  # ties: the smallest device
    return Rates(
        makespan_ns=makespan,
        busy_ns=busy,
        first_start_ns=first,
        last_end_ns=last,
        bubble_rate=_share_idle(sum(busy), len(busy) * makespan),
        bubble_rate_span=_share_idle(busy[longest], spans[longest]),
    )


def iteration_time(workload: Workload, figures: Rates) -> int:
    """Ns of an iteration: until each device has ended its last action and summed its stages' gradients."""
    waits = [0] * len(workload.devices)
    for stage in workload.stages:
        for device in stage.devices:
            waits[device] += stage.sync_ns
    return max(map(sum, zip(figures.last_end_ns, waits, strict=True)))


def in_flight(graph: TaskGraph, orders: Orders) -> tuple[int, ...]:
    """The most micro-batches whose activations (or deferred weight gradients) each device holds at once.

    On a device whose stages have micro-batches of unequal sizes, they are counted in units of the greatest
    common divisor of the sizes.
    """
    return tuple(_in_flight(graph, device, order) for device, order in enumerate(graph.on_devices(orders)))


def _in_flight(graph: TaskGraph, device: int, order: Sequence[int]) -> int:
    """A unit of samples is in flight while the device holds bytes on its behalf, in any of its stages."""
    workload, operation_of, offsets = graph.workload, graph.operation_of, graph.offsets
    stages = [stage for stage in workload.stages if device in stage.devices]
    pieces = 2 if any(stage.num_parted for stage in stages) else 1
    unit = (math.gcd(*(stage.microbatch_size for stage in stages)) or 1) // pieces
    effects = [(op.acquire_bytes, op.release_bytes) for op in workload.operations]
    held = [0] * (workload.mini_batch // unit)
    holding = most = 0
    for task in order:
        operation = operation_of[task]
        acquire, release = effects[operation]
        begin, end = workload.slots[operation].samples(task - offsets[operation])
        units = range(begin // unit, end // unit)
        if acquire:
            for sample in units:
                holding += not held[sample]
                held[sample] += acquire
            most = max(most, holding)
        if release:
            for sample in units:
                holding -= 0 < held[sample] <= release
                held[sample] -= release
    return -(-most // pieces)


def _share_idle(busy: int, available: int) -> float:
    return (available - busy) / available if available else 0.0
