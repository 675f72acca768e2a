"""Traces: what a run writes and a simulation predicts, as Chrome JSON for Perfetto; and reading them back.

A predicted and a measured timeline have the same form and differ in the *process*, so that their events can
stand beside each other in one file. Each device has a track for compute and one for communication, and further
ones where transfers overlap. ``ts`` and ``dur`` are microseconds as floats; ``round(ts * 1000)`` is the exact
number of nanoseconds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeplan.errors import FileError, did_you_mean
from pipeplan.files.read_write import read_bytes
from pipeplan.texts import escaped
from pipeplan.units import MAX_STRETCH, MAX_TOTAL
from pipeplan.workload.action import Action, StateAction
from pipeplan.workload.elements import Index, Name

Process = Literal["predicted", "measured"]
TraceEvent = dict[str, object]
"""One event of the format: a plain dictionary, ready for JSON."""

MEASURED_PROCESS_ID = 2
_PROCESS_IDS: dict[str, int] = {"predicted": 1, "measured": MEASURED_PROCESS_ID}
_TRACKS = 1000
"""Track ids per device: compute is 0, communication from 1 on."""


@dataclass(slots=True)
class Trace:
    """Collects the actions of one process, ``predicted`` or ``measured``, in any order."""

    process: Process = "predicted"
    _added: list[tuple[int, int, int, str, Mapping[str, object] | None]] = field(default_factory=list)

    def add(
        self, action: str, device: int, start_ns: int, duration_ns: int, args: Mapping[str, object] | None = None
    ) -> None:
        """Add one action on one device, by its text; times in ns from the start of the iteration (or of the run).

        ``args`` are shown when the event is selected.
        """
        self._added.append((device, start_ns, duration_ns, action, args))

    def events(self) -> list[TraceEvent]:
        """All events by device and time, after those that name processes and tracks."""
        named: dict[int, str] = {}
        found: list[TraceEvent] = []
        busy_until: dict[int, list[int]] = {}
        for device, start, duration, action, args in sorted(self._added, key=lambda entry: entry[:4]):
            state = StateAction.read(action)
            parsed, track = state or Action.parse(action), 0
            if not (isinstance(parsed, Action) and parsed.is_compute):
                lane = _free_lane(busy_until.setdefault(device, []), start, start + duration)
                track = 1 + min(lane, _TRACKS - 2)
            number = device * _TRACKS + track
            named[number] = _track_name(number)
            number_of = {} if isinstance(parsed, StateAction) else {"microbatch": parsed.microbatch}
            about = {"stage": parsed.stage, **number_of, "device": device, **(args or {})}
            found.append(
                {
                    "name": action,
                    "cat": parsed.kind,
                    "ph": "X",
                    "ts": start / 1000,
                    "dur": duration / 1000,
                    "pid": _PROCESS_IDS[self.process],
                    "tid": number,
                    "args": about,
                }
            )
        return [*_names(self.process, named), *found]


def trace_json(events: Iterable[TraceEvent], about: Mapping[str, object] | None = None) -> str:
    """The text of a trace file, one event a line; ``about``, also of the command line, goes into its ``otherData``."""
    encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
    rows = ",\n".join(map(encode, events))
    other = json.dumps(escaped(dict(about or {})), ensure_ascii=False)
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


TimedText = tuple[str, int, int]
"""An action's text, its start and its end in ns."""


@dataclass(frozen=True, slots=True)
class MeasuredTrace:
    """What a run measured; ``steps`` [step][device] has its actions by start.

    ``plan`` and ``plan_sha256`` are of the plan that ran. ``emulated`` is whether actions only took their time, which
    was ``stretch`` times as long as here.
    """

    plan: str
    plan_sha256: str
    emulated: bool
    steps: tuple[tuple[tuple[TimedText, ...], ...], ...]
    stretch: float = 1.0


def read_trace(path: str, num_devices: int) -> MeasuredTrace:
    """Read what ``pipeplan run --trace`` wrote; ``-`` is stdin.

    Args:
        path: the file.
        num_devices: of the plan.

    Raises:
        FileError: the file cannot be read, or is no trace of a run.
    """
    return parse_trace(read_bytes(path), "<stdin>" if path == "-" else path, num_devices)


def parse_trace(content: bytes, where: str, num_devices: int) -> MeasuredTrace:
    """The same of a file's content; ``where`` is its name in errors. Raises FileError."""
    try:
        file = _TraceFile.model_validate_json(content)
        events = [_Event.model_validate(event) for event in file.traceEvents if _is_measured(event)]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place, problem = ".".join(map(str, first["loc"])) or "file", first["msg"].removeprefix("Value error, ")
        raise FileError(f"{where}: not a trace that pipeplan run --trace has written: {place}: {problem}") from None
    if not events:
        raise FileError(f"{where}: has no measured actions; pipeplan run --trace writes them")
    found: defaultdict[int, list[list[TimedText]]] = defaultdict(lambda: [[] for _ in range(num_devices)])
    for event in events:
        if event.args.device >= num_devices:
            raise FileError(f"{where}: has actions on device {event.args.device}; the plan has {num_devices} devices")
        start_ns = round(event.ts * 1000)
        found[event.args.step][event.args.device].append((event.name, start_ns, start_ns + round(event.dur * 1000)))
    steps = tuple(tuple(tuple(sorted(row, key=lambda a: a[1:])) for row in found[step]) for step in sorted(found))
    about = file.otherData
    return MeasuredTrace(about.plan, about.plan_sha256, about.emulated, steps, about.stretch)


def _is_measured(event: object) -> bool:
    return isinstance(event, dict) and event.get("ph") == "X" and event.get("pid") == MEASURED_PROCESS_ID


class _Lenient(BaseModel):
    """Tools add keys of their own to traces."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_mistaken_keys(cls, value: Any) -> Any:
        """Refuse an unknown key that looks like a misspelt known one that is missing."""
        missing = [name for name in cls.model_fields if isinstance(value, dict) and name not in value]
        for key in value if missing else ():
            if key not in cls.model_fields and (question := did_you_mean(key, missing)):
                raise ValueError(f"{key} is not known; {question}")
        return value


_MOST_US = MAX_TOTAL / 1000
"""How far from the start of a run an event may be, in microseconds, and how long: what an iteration may come to."""


class _About(_Lenient):
    plan: Name
    plan_sha256: Name
    emulated: bool = False
    stretch: Annotated[float, Field(gt=0, le=MAX_STRETCH, allow_inf_nan=False)] = 1.0


class _TraceFile(_Lenient):
    otherData: _About
    traceEvents: list[Any]


class _Arguments(_Lenient):
    device: Index
    step: Index


class _Event(_Lenient):
    name: Name
    ts: Annotated[float, Field(ge=-_MOST_US, le=_MOST_US, allow_inf_nan=False)]
    dur: Annotated[float, Field(ge=0, le=_MOST_US, allow_inf_nan=False)]
    args: _Arguments
