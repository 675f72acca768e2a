"""Reading the traces that runs write: when every action of every step really ran."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeplan.errors import FileError
from pipeplan.model.fields import Index
from pipeplan.model.files import read_bytes
from pipeplan.model.trace import MEASURED_PROCESS_ID

__all__ = ["MeasuredTrace", "TimedText", "read_trace"]

TimedText = tuple[str, int, int]
"""An action's text, its start and its end in ns."""


@dataclass(frozen=True, slots=True)
class MeasuredTrace:
    """What a run measured; ``steps`` [step][device] has its actions by start.

    ``plan`` and ``plan_sha256`` are of the plan that ran. ``emulated`` is whether actions only took their time.
    """

    plan: str
    plan_sha256: str
    emulated: bool
    steps: tuple[tuple[tuple[TimedText, ...], ...], ...]


def read_trace(path: str, num_devices: int) -> MeasuredTrace:
    """Read what ``pipeplan run --trace`` wrote; ``-`` is stdin.

    Args:
        path: the file.
        num_devices: of the plan.

    Raises:
        FileError: the file cannot be read, or is no trace of a run.
    """
    where = "<stdin>" if path == "-" else path
    try:
        file = _File.model_validate_json(read_bytes(path))
        events = [_Event.model_validate(event) for event in file.traceEvents if _is_measured(event)]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "file"
        raise FileError(
            f"{where}: not a trace that pipeplan run --trace has written: {place}: {first['msg']}"
        ) from None
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
    return MeasuredTrace(about.plan, about.plan_sha256, about.emulated, steps)


def _is_measured(event: dict[str, Any]) -> bool:
    return event.get("ph") == "X" and event.get("pid") == MEASURED_PROCESS_ID


class _Lenient(BaseModel):
    """Tools add keys of their own to traces."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _About(_Lenient):
    plan: str
    plan_sha256: str
    emulated: bool = False


class _File(_Lenient):
    otherData: _About
    traceEvents: list[dict[str, Any]]


class _Arguments(_Lenient):
    device: Index
    step: Index


class _Event(_Lenient):
    name: str
    ts: Annotated[float, Field(allow_inf_nan=False)]
    dur: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    args: _Arguments
