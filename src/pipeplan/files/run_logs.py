"""What a run of another trainer says of itself: logs of Megatron-LM, torchtitan, NeMo and DeepSpeed, profilers' traces.

Each is read by what it is known to print; other lines, and figures that no run can have, are passed over, and what is
not there is not known. Rank ``r`` of such a run is device ``r`` of a plan. Durations are ns, sizes bytes.
"""

from __future__ import annotations

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
from pipeplan.units import MAX_BYTES, MAX_LOAD_FACTOR, MAX_NS
from pipeplan.workload.action import Action
from pipeplan.workload.elements import MAX_DEVICES
from pipeplan.workload.kinds import Role

_GIB, _MIB, _MS = 2**30, 2**20, 1e6


@dataclass(slots=True)
class RunLog:
    """What a run says of itself.

    ``steps_ns`` {rank: times of its steps, the first left out where there are several}. ``tokens_per_s`` {rank: tokens
    per second and device of those steps}, where times are not printed, ``samples_per_s`` likewise of all devices
    together. ``forward_ns`` and ``backward_ns`` {rank: of one step}; ``across_ns`` {"forward" or "backward": the least
    and the most of all ranks}, where it is not said by rank; ``actions_ns`` {text of an action: its times};
    ``timeline`` {rank: its steps, of ranges of a pipeline: their names, starts and ends in ns of some clock};
    ``peak_bytes`` {rank: most memory}, of the ``memory`` that is counted. Times of actions are of the device where the
    trace has them, and include waiting for their inputs.
    """

    tool: str
    steps_ns: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    tokens_per_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    samples_per_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
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
            self.samples_per_s,
            self.forward_ns,
            self.backward_ns,
            self.peak_bytes,
        )
        return sorted({rank for part in parts for rank in part})

    def holds(self, rank: int, size: float) -> None:
        """A rank had this much memory at one time."""
        if 0 < size <= MAX_BYTES:
            self.peak_bytes[rank] = max(self.peak_bytes.get(rank, 0), round(size))


def read_load_factor(path: str) -> float:
    """How many times an even share the fullest of devices that share experts had, by the output of ``run --json``.

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
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= MAX_LOAD_FACTOR:
        raise FileError(
            f"{where}: it has no experts.load_factor above 0 and at most {MAX_LOAD_FACTOR}; give the output of "
            "pipeplan run --json of a plan with --ep above 1"
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
    for tool, reads in _LOGS:
        found = reads(text.splitlines(), RunLog(tool), num_devices)
        if any(any(part.values()) for part in (found.steps_ns, found.tokens_per_s, found.samples_per_s)):
            return found
    raise FileError(
        f"{where}: has no lines with the time or speed of a step as {', '.join(dict(_LOGS))} print them, nor is it a "
        "trace; give such a log, or what pipeplan run --trace or torch.profiler's export_chrome_trace wrote"
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
_TIME = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2})(?:[,.]([0-9]{3}))?")


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _possible(figure: float) -> bool:
    """Whether a run can have this as ns of a step, or as a speed."""
    return 1e-6 <= figure <= MAX_NS


@dataclass(frozen=True, slots=True)
class _StepLine:
    """What a trainer prints of a step in one line: its number, a speed or a time, memory.

    ``said`` is which field of ``RunLog`` the figure is for, in ``unit`` of it; ``memory`` has GiB, of what ``holds``.
    """

    step: re.Pattern[str]
    figure: re.Pattern[str]
    said: str
    unit: float = 1.0
    memory: re.Pattern[str] | None = None
    holds: str = "allocated"


_TORCHTITAN = _StepLine(
    re.compile(r"(?<!validate )step:\s*([0-9]{1,9})\s"),
    re.compile(rf"tps:\s*{_NUMBER}"),
    "tokens_per_s",
    memory=re.compile(rf"memory:\s*{_NUMBER}\s*GiB"),
    holds="reserved",
)
_AUTOMODEL = _StepLine(
    re.compile(r"\bstep ([0-9]{1,9}) \| epoch"),
    re.compile(rf"tps [^(|]*\({_NUMBER}/gpu\)"),
    "tokens_per_s",
    memory=re.compile(rf"\bmem {_NUMBER} GiB"),
)
_NEMO = _StepLine(
    re.compile(rf"global_step(?:=|: ){_NUMBER}"),
    re.compile(rf"train_step_timing in s(?:=|: ){_NUMBER}"),
    "steps_ns",
    1e9,
)
_DEEPSPEED_PIPELINE = _StepLine(
    re.compile(r"\bsteps: ([0-9]{1,9}) loss:"), re.compile(rf"iter time \(s\): {_NUMBER}"), "steps_ns", 1e9
)
_DEEPSPEED = _StepLine(
    re.compile(r"global_step=([0-9]{1,9}),"),
    re.compile(rf"CurrSamplesPerSec={_NUMBER}"),
    "samples_per_s",
    memory=re.compile(rf"MaxMemAllocated={_NUMBER}GB"),
)


def _by_lines(form: _StepLine) -> Callable[[Iterable[str], RunLog, int], RunLog]:
    """A reader of lines of one form: per rank, each of all steps since the line before.

    The first line of a rank that has several is left out where it has the first step in it, which compiled and warmed
    up: its number is 0 or 1, or it has a time, which is a mean since the line before.
    """

    def read(lines: Iterable[str], log: RunLog, num_devices: int) -> RunLog:
        log.memory = form.holds
        found: defaultdict[int, list[tuple[int, float, datetime | None]]] = defaultdict(list)
        for line in lines:
            plain = _COLOUR.sub("", line)
            step, figure = form.step.search(plain), form.figure.search(plain)
            if step is None or figure is None or not _possible(value := _number(figure[1]) * form.unit):
                continue
            number, rank = _number(step[1]), _rank(plain)
            if form.memory is not None and (memory := form.memory.search(plain)) is not None:
                log.holds(rank, _number(memory[1]) * _GIB)
            if number <= MAX_NS and (not found[rank] or number > found[rank][-1][0]):  # else printed twice
                found[rank].append((int(number), value, _moment(plain)))
        for rank, said in found.items():
            warm_up = int(len(said) > 1 and (said[0][0] <= 1 or form.said == "steps_ns"))
            log.left_out = max(log.left_out, warm_up)
            figures: dict[int, list[float]] = getattr(log, form.said)
            figures[rank] += [value for _, value, _ in said[warm_up:]]
            if form.said != "steps_ns":
                log.steps_ns[rank] += _by_the_clock(said)
        return log

    return read


def _by_the_clock(said: Sequence[tuple[int, float, datetime | None]]) -> Iterator[float]:
    """Ns of a step between two lines, by the times that they begin with."""
    for (before, _, begin), (number, _, end) in zip(said, said[1:], strict=False):
        if begin is not None and end is not None and (passed := (end - begin).total_seconds()) > 0:
            yield passed * 1e9 / (number - before)


def _rank(line: str) -> int:
    found = _RANK.search(line)
    return min(int(found[1]), MAX_DEVICES) if found else 0


def _moment(line: str) -> datetime | None:
    found = _TIME.search(line)
    try:
        return datetime.fromisoformat(f"{found[1]}.{found[2] or '000'}") if found else None
    except ValueError:
        return None


_BEGIN = r"(?:^|[\s:])"
"""What goes before a line of a timer: launchers put ``[default0]:`` or ``3: `` before all lines."""
_AFTER = {"all-grads-sync": "sums", "params-all-gather": "gather", "optimizer": "step"}
_TIMER = rf"(forward-compute|backward-compute|{'|'.join(_AFTER)})"
_MEGATRON_STEP = re.compile(rf"iteration\s+([0-9]{{1,12}})\s*/.*?elapsed time per iteration \(ms\):\s*{_NUMBER}")
_MEGATRON_MEMORY = re.compile(
    r"\[Rank\s+([0-9]{1,5})\].*?memory \((?:MB\).*?\bmax allocated|GB\).*?mem-(max)-allocated-gigabytes):\s*" + _NUMBER
)
"""Of Megatron-LM, and of Megatron Bridge, whose gigabytes are decimal."""
_MEGATRON_TIMER = re.compile(rf"{_BEGIN}([a-z][\w/-]*)[\s.]*:\s*$")
_MEGATRON_TIME_OF_RANK = re.compile(rf"{_BEGIN}rank\s+([0-9]{{1,5}}):\s*{_NUMBER}\s*$")
_MEGATRON_ACROSS = re.compile(rf"{_BEGIN}{_TIMER}[\s.]*:\s*(?:\(\s*{_NUMBER}\s*,\s*{_NUMBER}\s*\)|{_NUMBER})\s*$")
"""Of ``(min, max) time across ranks (ms):``, its default, and of ``max time across ranks (ms):``."""
_MEGATRON_OF_LAST = re.compile(rf"time \(ms\) \|.*?\bforward-compute:\s*{_NUMBER}.*?\bbackward-compute:\s*{_NUMBER}")
"""Before 2022, and its descendants: one line, by the last rank, of its own times."""


def _of_megatron(lines: Iterable[str], log: RunLog, num_devices: int) -> RunLog:
    """Lines of ``elapsed time per iteration (ms)``, of memory, of timers by any ``--timing-log-option``."""
    log.memory = "allocated"
    timer: dict[int, float] = {}
    by_timer: dict[str, dict[int, float]] = {each: {} for each in _AFTER}
    by_timer |= {"forward-compute": log.forward_ns, "backward-compute": log.backward_ns}
    steps: list[float] = []
    for line in lines:
        plain = _COLOUR.sub("", line)
        if (step := _MEGATRON_STEP.search(plain)) is not None:
            timer = {}
            if _possible(lasts := _number(step[2]) * _MS):
                steps.append(lasts)
        elif (memory := _MEGATRON_MEMORY.search(plain)) is not None:
            log.holds(int(memory[1]), _number(memory[3]) * (_MIB if memory[2] is None else 1e9))
        elif (last := _MEGATRON_OF_LAST.search(plain)) is not None:
            log.forward_ns[num_devices - 1], log.backward_ns[num_devices - 1] = (_ms(last[1]), _ms(last[2]))
        elif (across := _MEGATRON_ACROSS.search(plain)) is not None:
            least, most = _ms(across[2] or across[4]), _ms(across[3] or across[4])
            if across[1] in _AFTER:
                log.after_ns[_AFTER[across[1]]] = most
            else:
                log.across_ns[across[1].partition("-")[0]] = least, most
        elif (own := _MEGATRON_TIME_OF_RANK.search(plain)) is not None:
            timer[int(own[1])] = _ms(own[2])
        elif (begins := _MEGATRON_TIMER.search(plain)) is not None:
            timer = by_timer.get(begins[1], {})
            timer.clear()  # those of the last step
    log.after_ns |= {_AFTER[each]: max(by_timer[each].values()) for each in _AFTER if by_timer[each]}
    log.left_out = int(len(steps) > 1)
    if steps:
        log.steps_ns[0] = steps[log.left_out :]
    return log


def _ms(text: str) -> float:
    """Ns of what is printed in ms, at most what a plan's times can be."""
    return min(_number(text) * _MS, float(MAX_NS))


_LOGS: Sequence[tuple[str, Callable[[Iterable[str], RunLog, int], RunLog]]] = (
    ("Megatron-LM", _of_megatron),
    ("torchtitan", _by_lines(_TORCHTITAN)),
    ("NeMo AutoModel", _by_lines(_AUTOMODEL)),
    ("NeMo", _by_lines(_NEMO)),
    ("DeepSpeed", _by_lines(_DEEPSPEED_PIPELINE)),
    ("DeepSpeed", _by_lines(_DEEPSPEED)),
)
"""Tried in this order: Megatron-LM under DeepSpeed prints lines of both."""


# Traces of torch.profiler -------------------------------------------------------------------------------------------

_PROFILER_STEP = re.compile(r"ProfilerStep#([0-9]{1,9})")
_PIPELINE = re.compile(r"PP:(\S+)|(Forward|Backward) [0-9]+")
"""Names of ranges of ``torch.distributed.pipelining``: an action, or only its kind where a rank has one stage."""


_MOST = 2.0**63
"""Of a number in a trace: microseconds since 1970 are below, and what is not a number is not."""
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
        if _is_number(start) and _is_number(lasts) and 0 <= lasts * 1000 <= MAX_NS:
            kept = of_device if "gpu" in str(event.get("cat")) else of_host
            kept.append((start * 1000, lasts * 1000, name))
    yield from of_device or of_host


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST
