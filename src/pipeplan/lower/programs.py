"""From a schedule to one program per device, with communication put in and ordered.

Every message is emitted, on both of its ends, at the time its producer ends (Tessel IV-D's topological sort by
start time). Times are the same on all devices, so the union of all program orders has no cycle: no
interleaving can deadlock, even with blocking sends, and messages between two devices match first in, first out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipeplan.model import Action, Dependency, Hop, payload_of
from pipeplan.simulate.timing import Orders, TaskGraph

__all__ = ["programs"]

_Event = tuple[int, int, int, str]  # time, 0 for a message and 1 for compute, tie-break, text


def programs(graph: TaskGraph, orders: Orders, starts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Each device's compute and communication in order, as action texts.

    ``orders`` [device] and ``starts`` [task] are those of :func:`pipeplan.simulate.timing.earliest_starts`.
    """
    events: list[list[_Event]] = [[(starts[task], 1, task, graph.label(task)) for task in order] for order in orders]
    _add_messages(graph, starts, events)
    return tuple(tuple(text for *_, text in sorted(device_events)) for device_events in events)


def _add_messages(graph: TaskGraph, starts: Sequence[int], events: list[list[_Event]]) -> None:
    workload = graph.workload
    position = {operation.id: index for index, operation in enumerate(workload.operations)}
    naming = _PeerNames(workload.dependencies)
    number = 0
    for dependency in workload.dependencies:
        source = position[dependency.source]
        for hop in dependency.hops:
            for task in range(graph.offsets[source], graph.offsets[source + 1]):
                end = starts[task] + graph.durations[task]
                send, receive = naming.messages(dependency, hop, task - graph.offsets[source])
                events[hop.source_device].append((end, 0, number, str(send)))
                events[hop.target_device].append((end, 0, number, str(receive)))
                number += 1


class _PeerNames:
    """Says which stage or device is at the other end where more than one could be meant."""

    def __init__(self, dependencies: Sequence[Dependency]) -> None:
        self._targets: Counter[tuple[int, str, int]] = Counter()  # source stage, payload, device
        self._target_devices: Counter[tuple[int, str, int, int]] = Counter()  # ... and target stage
        self._sources: Counter[tuple[int, str, int]] = Counter()  # target stage, payload, device
        for dependency in dependencies:
            source, payload, target = _ends(dependency)
            for device in {hop.source_device for hop in dependency.hops}:
                self._targets[source, payload, device] += 1
            for hop in dependency.hops:
                self._target_devices[source, payload, hop.source_device, target] += 1
                self._sources[target, payload, hop.target_device] += 1

    def messages(self, dependency: Dependency, hop: Hop, microbatch: int) -> tuple[Action, Action]:
        """The SEND and the RECV of one message."""
        source, payload, target = _ends(dependency)
        send = Action(
            source,
            f"SEND_{payload}",
            microbatch,
            target if self._targets[source, payload, hop.source_device] > 1 else None,
            hop.target_device if self._target_devices[source, payload, hop.source_device, target] > 1 else None,
        )
        receive = Action(
            target,
            f"RECV_{payload}",
            microbatch,
            source if self._sources[target, payload, hop.target_device] > 1 else None,
        )
        return send, receive


def _ends(dependency: Dependency) -> tuple[int, str, int]:
    return int(dependency.source[:-1]), payload_of(dependency.source[-1]), int(dependency.target[:-1])
