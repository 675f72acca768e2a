"""What a run of another trainer says of itself: logs of torchtitan and Megatron-LM, traces of ``torch.profiler``.

Each is read by what it is known to print; other lines are passed over, and what is not there is not known. Rank ``r``
of such a run is device ``r`` of a plan. Durations are ns, sizes bytes.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeGuard

from pipeplan.errors import FileError
from pipeplan.files.read_write import read_bytes
from pipeplan.files.trace import MeasuredTrace, TimedText, parse_trace
from pipeplan.texts import of_json, shown
from pipeplan.workload.action import Action
from pipeplan.workload.elements import MAX_DEVICES
from pipeplan.workload.kinds import Role

_GIB, _MIB, _MS = 2**30, 2**20, 1e6


@dataclass(slots=True)
class RunLog:
    """What a run says of itself.

    ``steps_ns`` {rank: times of its steps, the first left out where there are several}. ``tokens_per_s`` {rank: tokens
    per second and device of those steps}, where times are not printed. ``forward_ns`` and ``backward_ns`` {rank: of one
    step}; ``across_ns`` {"forward" or "backward": the least and the most of all ranks}, where it is not said by rank;
    ``actions_ns`` {text of an action: its times}; ``timeline`` {rank: its steps, of ranges of a pipeline: their
    names, starts and ends in ns of some clock}; ``peak_bytes`` {rank: most memory}, of the ``memory`` that is
    counted. Times of actions are of the device where the trace has them, and include waiting for their inputs.
    """

    tool: str
    steps_ns: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    tokens_per_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    forward_ns: dict[int, float] = field(default_factory=dict)
    backward_ns: dict[int, float] = field(default_factory=dict)
    across_ns: dict[str, tuple[float, float]] = field(default_factory=dict)
    after_ns: dict[str, float] = field(default_factory=dict)
    actions_ns: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    timeline: dict[int, list[list[TimedText]]] = field(default_factory=dict)
    peak_bytes: dict[int, int] = field(default_factory=dict)
    memory: str = ""
    left_out: int = 0

    @property
    def ranks(self) -> list[int]:
        """Those that say anything."""
        parts: Sequence[Mapping[int, object]] = (
            self.steps_ns,
            self.tokens_per_s,
            self.forward_ns,
            self.backward_ns,
            self.peak_bytes,
        )
        return sorted({rank for part in parts for rank in part})

    def holds(self, rank: int, size: float) -> None:
        """A rank had this much memory at one time."""
        self.peak_bytes[rank] = max(self.peak_bytes.get(rank, 0), round(size))


def read_load_factor(path: str) -> float:
    """How many times the average the fullest of devices that share experts had, by the output of ``run --json``.

    Raises:
        FileError: the file cannot be read, is no such output, or is of a run whose devices shared no experts.
    """
    where = "<stdin>" if path == "-" else path
    try:
        found = of_json(read_bytes(path))
    except ValueError as error:
        raise FileError(f"{where}: not JSON: {error}; give a number, or the output of pipeplan run --json") from None
    loads = found.get("experts") if isinstance(found, dict) else None
    factor = loads.get("load_factor") if isinstance(loads, dict) else None
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor < math.inf:
        raise FileError(
            f"{where}: it has no experts.load_factor of 1 or more; give the output of pipeplan run --json of a plan "
            "with --ep above 1"
        )
    return float(factor)


def read_run(paths: Sequence[str], num_devices: int) -> MeasuredTrace | RunLog:
    """What a run left: pipeplan's trace, a log, or the profiler's trace of each rank; ``-`` is stdin.

    Args:
        paths: one file, or those of several ranks.
        num_devices: of the plan.

    Raises:
        FileError: a file cannot be read, is none of these, or they are not of one kind; it says nothing of a step.
    """
    read = [("<stdin>" if path == "-" else path, read_bytes(path)) for path in paths]
    if len(read) == 1 and _JSON.match(read[0][1]) and not _is_profilers(read[0][1]):
        return parse_trace(read[0][1], read[0][0], num_devices)
    texts = [(where, content.decode(errors="replace")) for where, content in read]
    if all(_is_profilers(content) for _, content in read):
        return _of_traces(texts)
    if len(read) > 1:
        raise FileError(
            f"{read[1][0]}: one log, or one trace of pipeplan run, is of all ranks; only traces of torch.profiler come "
            "in several files"
        )
    where, text = texts[0]
    for tool, reads in _LOGS.items():
        found = reads(text.splitlines(), RunLog(tool))
        if any(found.steps_ns.values()) or any(found.tokens_per_s.values()):
            return found
    raise FileError(
        f"{where}: has neither lines of torchtitan's or Megatron-LM's log with the time of a step, nor is it a trace; "
        "give what pipeplan run --trace or torch.profiler's export_chrome_trace wrote, or such a log"
    )


def _is_profilers(content: bytes) -> bool:
    """Whether it is JSON with something that torch.profiler writes and pipeplan does not."""
    return _JSON.match(content) is not None and any(mark in content for mark in _PROFILERS)


_JSON = re.compile(rb"\s*(\{|\[\s*\{)")
_PROFILERS = (b'"distributedInfo"', b'"schemaVersion"', b'"deviceProperties"', b'"ProfilerStep#')


# Logs ---------------------------------------------------------------------------------------------------------------

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"([0-9][0-9,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"
_RANK = re.compile(r"\[\s*rank\s*([0-9]{1,5})\s*\]", re.IGNORECASE)
_TIME = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2})[,.]([0-9]{3})")
_TITAN_STEP = re.compile(r"step:\s*([0-9]{1,9})\s")
_TITAN_SPEED = re.compile(rf"tps:\s*{_NUMBER}")
_TITAN_MEMORY = re.compile(rf"memory:\s*{_NUMBER}\s*GiB")


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _of_torchtitan(lines: Iterable[str], log: RunLog) -> RunLog:
    """Lines of ``step: ... memory: 66.91GiB(37.51%) tps: 10,050``: per rank, of all steps since the line before.

    ``tps`` are a device's tokens per second, of its share of the batch; memory is what the allocator had reserved at
    most.
    """
    log.memory = "reserved"
    seen: dict[int, tuple[int, datetime | None]] = {}
    for line in lines:
        plain = _COLOUR.sub("", line)
        step, speed = _TITAN_STEP.search(plain), _TITAN_SPEED.search(plain)
        if step is None or speed is None:
            continue
        rank, memory, now = _rank(plain), _TITAN_MEMORY.search(plain), _moment(plain)
        if memory is not None:
            log.holds(rank, _number(memory[1]) * _GIB)
        before = seen.get(rank)
        if before is not None and int(step[1]) <= before[0]:
            continue  # printed twice
        seen[rank] = int(step[1]), now
        if before is None and int(step[1]) == 1:
            log.left_out = 1  # compiled and warmed up in it
            continue
        log.tokens_per_s[rank].append(_number(speed[1]))
        if before is not None and before[1] is not None and now is not None:
            passed = (now - before[1]).total_seconds() / (int(step[1]) - before[0])
            if passed > 0:
                log.steps_ns[rank].append(passed * 1e9)
    return log


def _rank(line: str) -> int:
    found = _RANK.search(line)
    return min(int(found[1]), MAX_DEVICES) if found else 0


def _moment(line: str) -> datetime | None:
    found = _TIME.search(line)
    try:
        return datetime.fromisoformat(f"{found[1]}.{found[2]}") if found else None
    except ValueError:
        return None


_MEGATRON_STEP = re.compile(rf"iteration\s+([0-9]{{1,12}})\s*/.*?elapsed time per iteration \(ms\):\s*{_NUMBER}")
_MEGATRON_MEMORY = re.compile(rf"\[Rank\s+([0-9]{{1,5}})\].*memory \(MB\).*?max allocated:\s*{_NUMBER}")
_AFTER = {"all-grads-sync": "sums", "params-all-gather": "gather", "optimizer": "step"}
_MEGATRON_TIMER = re.compile(r"^\s*(forward-compute|backward-compute|" + "|".join(_AFTER) + r")[\s.]*:\s*$")
_MEGATRON_TIME_OF_RANK = re.compile(rf"^\s*rank\s+([0-9]{{1,5}}):\s*{_NUMBER}\s*$")
_MEGATRON_ACROSS = re.compile(
    rf"^\s*(forward-compute|backward-compute|{'|'.join(_AFTER)})[\s.]*:\s*(?:\(\s*{_NUMBER}\s*,\s*{_NUMBER}\s*\)|{_NUMBER})\s*$"
)
"""Of ``(min, max) time across ranks (ms):``, its default, and of ``max time across ranks (ms):``."""


def _of_megatron(lines: Iterable[str], log: RunLog) -> RunLog:
    """Lines of ``elapsed time per iteration (ms)``, of memory, of timers by any ``--timing-log-option``."""
    log.memory = "allocated"
    timer: dict[int, float] | None = None
    by_timer: dict[str, dict[int, float]] = {each: {} for each in _AFTER}
    by_timer |= {"forward-compute": log.forward_ns, "backward-compute": log.backward_ns}
    steps: list[float] = []
    for line in lines:
        plain = _COLOUR.sub("", line)
        step, memory = _MEGATRON_STEP.search(plain), _MEGATRON_MEMORY.search(plain)
        if step is not None:
            steps.append(_number(step[2]) * _MS)
        elif memory is not None:
            log.holds(int(memory[1]), _number(memory[2]) * _MIB)
        if (across := _MEGATRON_ACROSS.match(plain)) is not None:
            least, most = (_number(across[2] or across[4]) * _MS, _number(across[3] or across[4]) * _MS)
            if across[1] in _AFTER:
                log.after_ns[_AFTER[across[1]]] = most
            else:
                log.across_ns[across[1].partition("-")[0]] = least, most
        if (begins := _MEGATRON_TIMER.match(plain)) is not None:
            timer = by_timer[begins[1]]
            timer.clear()  # those of the last step
        elif (own := _MEGATRON_TIME_OF_RANK.match(plain)) is not None and timer is not None:
            timer[int(own[1])] = _number(own[2]) * _MS
        else:
            timer = None
    log.after_ns |= {_AFTER[each]: max(by_timer[each].values()) for each in _AFTER if by_timer[each]}
    log.left_out = int(len(steps) > 1)
    if steps:
        log.steps_ns[0] = steps[log.left_out :]
    return log


_LOGS: Mapping[str, Callable[[Iterable[str], RunLog], RunLog]] = {
    "Megatron-LM": _of_megatron,
    "torchtitan": _of_torchtitan,
}


# Traces of torch.profiler -------------------------------------------------------------------------------------------

_PROFILER_STEP = re.compile(r"ProfilerStep#([0-9]{1,9})")
_PIPELINE = re.compile(r"PP:(\S+)|(Forward|Backward) [0-9]+")
"""Names of ranges of ``torch.distributed.pipelining``: an action, or only its kind where a rank has one stage."""


_Range = tuple[float, float, str]
"""Start and duration in ns, and the name."""


def _of_traces(read: Sequence[tuple[str, str]]) -> RunLog:
    """Chrome traces, one of each rank: ranges of ``ProfilerStep#N``, of pipeline actions, and memory where profiled."""
    log = RunLog("torch.profiler")
    for where, text in read:
        try:
            content = of_json(text)
        except ValueError as error:
            raise FileError(f"{where}: not readable as JSON: {error}") from None
        events = content.get("traceEvents") if isinstance(content, dict) else content
        if not isinstance(events, list):
            raise FileError(f"{where}: not a trace: it has no list traceEvents")
        about = content.get("distributedInfo") if isinstance(content, dict) else None
        rank = about.get("rank", 0) if isinstance(about, dict) else 0
        if not isinstance(rank, int) or not 0 <= rank < MAX_DEVICES:
            raise FileError(f"{where}: distributedInfo.rank is {shown(str(rank))}; it has to be a rank's number")
        if rank in log.ranks:
            raise FileError(f"{where}: rank {rank} is in a file before it, too; give one trace of each rank")
        _add_trace(log, rank, [event for event in events if isinstance(event, dict)])
        if not log.steps_ns[rank]:
            raise FileError(
                f"{where}: has no step: no range ProfilerStep#N, nor actions of a pipeline schedule (PP:0F0); call the "
                "profiler's step() after each step of the training"
            )
    return log


def _add_trace(log: RunLog, rank: int, events: Sequence[Mapping[str, Any]]) -> None:
    steps = sorted(_ranges(events, lambda name: _PROFILER_STEP.fullmatch(name) is not None))
    actions = sorted(_ranges(events, lambda name: _PIPELINE.fullmatch(name) is not None))
    steps = steps or _repetitions(actions)
    if len(steps) > 1:
        first, log.left_out = steps[0], 1
        steps = steps[1:]
        actions = [each for each in actions if each[0] >= first[0] + first[1]]
    log.steps_ns[rank] += [lasts for _, lasts, _ in steps]
    if actions:
        log.timeline[rank] = [
            [
                (name.removeprefix("PP:"), round(start), round(start + lasts))
                for start, lasts, name in actions
                if begin <= start < begin + whole
            ]
            for begin, whole, _ in steps
        ]
    parts = {True: 0.0, False: 0.0}
    for _, lasts, name in actions:
        found = _PIPELINE.fullmatch(name)
        assert found is not None
        action = None if found[1] is None else _action(found[1])
        if action is not None:
            log.actions_ns[str(action)].append(lasts)
        if action is not None or found[1] is None:
            forward = found[2] == "Forward" if action is None else action.role is Role.FORWARD
            parts[forward] += lasts / len(steps)
    if any(parts.values()):
        log.forward_ns[rank], log.backward_ns[rank] = parts[True], parts[False]
    for event in events:
        about = event.get("args")
        if event.get("name") == "[memory]" and isinstance(about, dict) and about.get("Device Type") != 0:
            size = about.get("Total Reserved")
            if _is_number(size) and size > 0:
                log.memory = "reserved"
                log.holds(rank, size)


def _repetitions(actions: Sequence[_Range]) -> list[_Range]:
    """Steps by their actions: each begins with the one that the first began with."""
    begins = [number for number, each in enumerate(actions) if each[2] == actions[0][2]]
    found: list[_Range] = []
    for begin, end in zip(begins, [*begins[1:], len(actions)], strict=False):
        own = actions[begin:end]
        found.append((own[0][0], max(start + lasts for start, lasts, _ in own) - own[0][0], ""))
    return found


def _action(text: str) -> Action | None:
    """What a range says it computes; None of messages and of what is no action of a plan."""
    try:
        found = Action.parse(text)
    except ValueError:
        return None
    return found if found.is_compute else None


def _ranges(events: Iterable[Mapping[str, Any]], wanted: Callable[[str], bool]) -> Iterator[_Range]:
    """Start and duration in ns, and the name, of ranges with a wanted name; those of the device where it has them."""
    of_host: list[_Range] = []
    of_device: list[_Range] = []
    for event in events:
        name, start, lasts = str(event.get("name")), event.get("ts"), event.get("dur")
        if event.get("ph") != "X" or not wanted(name):
            continue
        if _is_number(start) and _is_number(lasts) and lasts >= 0:
            kept = of_device if "gpu" in str(event.get("cat")) else of_host
            kept.append((start * 1000, lasts * 1000, name))
    yield from of_device or of_host


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
