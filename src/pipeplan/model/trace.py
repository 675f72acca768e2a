"""Traces: timelines as Chrome JSON, which Perfetto and chrome://tracing open.

A predicted and a measured timeline have the same form and differ in the *process*, so that their events can
stand beside each other in one file. Each device has a track for compute and one for communication, and further
ones where transfers overlap. ``ts`` and ``dur`` are microseconds as floats; ``round(ts * 1000)`` is the exact
number of nanoseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pipeplan.model.action import Action

__all__ = ["MEASURED_PROCESS_ID", "Trace", "TraceEvent", "trace_event", "trace_json"]

Process = Literal["predicted", "measured"]
TraceEvent = dict[str, object]
"""One event of the format: a plain dictionary, ready for JSON."""

MEASURED_PROCESS_ID = 2
_PROCESS_IDS: dict[str, int] = {"predicted": 1, "measured": MEASURED_PROCESS_ID}
_TRACKS = 1000
"""Track ids per device: compute is 0, communication from 1 on."""


def trace_event(
    action: str,
    device: int,
    start_ns: int,
    duration_ns: int,
    *,
    process: Process = "predicted",
    lane: int = 0,
    args: Mapping[str, object] | None = None,
) -> TraceEvent:
    """A complete event (``ph`` X) for one action on one device.

    ``action`` is an action's text, such as ``2F0`` or ``1SEND_F0``; its kind decides the track. ``lane`` numbers
    the communication tracks of a device. ``args`` are shown when the event is selected.
    """
    parsed = Action.parse(action)
    track = 0 if parsed.is_compute else 1 + min(lane, _TRACKS - 2)
    return {
        "name": action,
        "cat": parsed.kind,
        "ph": "X",
        "ts": start_ns / 1000,
        "dur": duration_ns / 1000,
        "pid": _PROCESS_IDS[process],
        "tid": device * _TRACKS + track,
        "args": {"stage": parsed.stage, "microbatch": parsed.microbatch, "device": device, **(args or {})},
    }


@dataclass(slots=True)
class Trace:
    """Collects the actions of one process, ``predicted`` or ``measured``, in any order."""

    process: Process = "predicted"
    _added: list[tuple[int, int, int, str, Mapping[str, object] | None]] = field(default_factory=list)

    def add(
        self, action: str, device: int, start_ns: int, duration_ns: int, args: Mapping[str, object] | None = None
    ) -> None:
        """Add one action on one device; times in ns from the start of the iteration (or of the run)."""
        self._added.append((device, start_ns, duration_ns, action, args))

    def events(self) -> list[TraceEvent]:
        """All events by device and time, behind those that name processes and tracks."""
        named: dict[int, str] = {}
        found: list[TraceEvent] = []
        busy_until: dict[int, list[int]] = {}
        for device, start, duration, action, args in sorted(self._added, key=lambda entry: entry[:4]):
            lane = 0
            if "_" in action:  # a transfer
                lane = _free_lane(busy_until.setdefault(device, []), start, start + duration)
            event = trace_event(action, device, start, duration, process=self.process, lane=lane, args=args)
            found.append(event)
            number = device * _TRACKS + (1 + min(lane, _TRACKS - 2) if "_" in action else 0)
            named[number] = _track_name(number)
        return [*_names(self.process, named), *found]


def trace_json(events: Iterable[TraceEvent], about: Mapping[str, object] | None = None) -> str:
    """The text of a trace file, one event a line; ``about`` goes into its ``otherData``."""
    encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
    rows = ",\n".join(map(encode, events))
    other = json.dumps(dict(about or {}), ensure_ascii=False)
    return f'{{"displayTimeUnit":"ns","otherData":{other},"traceEvents":[\n{rows}\n]}}\n'


def _free_lane(busy_until: list[int], start: int, end: int) -> int:
    """The first lane that is free at ``start``: events of one track must not overlap."""
    for lane, until in enumerate(busy_until):
        if until <= start:
            busy_until[lane] = end
            return lane
    busy_until.append(end)
    return len(busy_until) - 1


def _track_name(number: int) -> str:
    device, track = divmod(number, _TRACKS)
    if track == 0:
        return f"device {device} compute"
    return f"device {device} communication" + (f" {track}" if track > 1 else "")


def _names(process: Process, tracks: Mapping[int, str]) -> list[TraceEvent]:
    """Events that name the process and its tracks and put them in order."""
    pid = _PROCESS_IDS[process]
    found: list[TraceEvent] = [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": process}},
        {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}},
    ]
    for number, name in sorted(tracks.items()):
        found.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": number, "args": {"name": name}})
        found.append(
            {"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": number, "args": {"sort_index": number}}
        )
    return found
