"""The drawing as data for the page's script: columns for each lane, in which equal things are said once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from pipeplan.reporting.drawing import svg
from pipeplan.reporting.drawing.model import Bar, DrawnRun, TimelineLane
from pipeplan.reporting.timeline import kind_name
from pipeplan.simulator.metrics import StepsBefore
from pipeplan.simulator.simulation import Simulation
from pipeplan.simulator.waits import in_time
from pipeplan.units import format_ns
from pipeplan.workload.kinds import is_instruction

T = TypeVar("T")

Place = tuple[int, int]
"""A lane and a bar of it."""

GEOMETRY = {
    "left": svg.LEFT,
    "top": svg.TOP,
    "row": svg.ROW,
    "bar": svg.BAR,
    "margin": svg.MARGIN,
    "linkRow": svg.LINK_ROW,
    "linkBar": svg.LINK_BAR,
    "memoryRow": svg.MEMORY_ROW,
    "letter": svg.LETTER,
}


def drawing_data(runs: Sequence[DrawnRun]) -> dict[str, Any]:
    """What the script draws: the runs, their lanes, and the sizes that the SVG has."""
    return {"geometry": GEOMETRY, "left": svg.LEFT, "end": max(run.end_ns for run in runs), "runs": [*map(_run, runs)]}


def _run(run: DrawnRun) -> dict[str, Any]:
    kinds = _Numbering[tuple[str, bool]]()
    lanes = [_lane(lane, kinds) for lane in (*run.lanes, *run.links)]
    found: dict[str, Any] = {
        "title": run.title,
        "figures": run.figures,
        "plan": run.plan,
        "end": run.end_ns,
        "numLinks": len(run.links),
        "lanes": lanes,
        "jumps": _jumps(run.simulation),
        "legend": run.kinds,
        "repetend": run.repetend,
        "repetendTip": run.repetend_tip,
        "waits": [],
        "path": [],
    }
    if run.simulation is not None:
        places = {bar.task: (row, at) for row, lane in enumerate(run.lanes) for at, bar in enumerate(lane.bars)}
        waits = _WaitTexts(run.simulation, places)
        for lane, data in zip(run.lanes, lanes, strict=False):
            data["waits"] = [waits.number(bar.task, at) for at, bar in enumerate(lane.bars)]
        found["waits"] = waits.texts
        path = (step.task for step in run.simulation.critical_path)
        found["path"] = [places[task] for task in path if task in places]
    found["kinds"] = [
        {"kind": kind, "class": svg.class_of(kind), "odd": odd, "words": _words(kind)} for kind, odd in kinds.known
    ]
    return found


def _words(kind: str) -> str:
    return f"{kind}, an instruction" if is_instruction(kind) else kind_name(kind)


def _lane(lane: TimelineLane, kinds: _Numbering[tuple[str, bool]]) -> dict[str, Any]:
    """Starts are differences, durations the same numbers as long as they do not change."""
    names = _Numbering[str]()
    starts, durations, shown, kind_of, odd, numbers, _, _ = zip(*lane.bars, strict=True) if lane.bars else [()] * 8
    found: dict[str, Any] = {
        "name": lane.name,
        "about": lane.about,
        "devices": lane.devices,
        "starts": [*_differences(starts)],
        "durations": _repeated(durations),
        "kinds": _repeated([*map(kinds.of, zip(kind_of, odd, strict=True))]),
        "numbers": [int(number) if number.isdecimal() else number for number in numbers],
        "stems": _repeated([_stem(bar, names) for bar in lane.bars]),
        "names": names.known,
    }
    if shown != starts:
        found["later"] = _repeated([later - start for later, start in zip(shown, starts, strict=True)])
    if lane.memory is not None:
        times, sizes = zip(*lane.memory.points, strict=True)
        found["memory"] = {
            "times": [*_differences(times)],
            "sizes": [*_differences(sizes)],
            "limit": lane.memory.limit_bytes,
            "top": lane.memory.top_bytes,
            "peak": lane.memory.peak_bytes,
        }
    if lane.frame is not None:
        found["frame"] = lane.frame
    return found


def _stem(bar: Bar, names: _Numbering[str]) -> int:
    """A bar's name with ``#`` for its micro-batch, of which a lane has few."""
    before, found, after = bar.name.partition(f"{bar.kind}{bar.number}")
    return names.of(f"{before}{bar.kind}#{after}" if found else bar.name)


def _differences(values: Iterable[int]) -> Iterator[int]:
    before = 0
    for value in values:
        yield value - before
        before = value


def _repeated(values: Sequence[int]) -> list[int] | dict[str, list[int]]:
    """The values, or which there are and the number of each, where that is shorter."""
    known = sorted(set(values))
    if len(known) > len(values) // 2:
        return [*values]
    number = {value: index for index, value in enumerate(known)}
    return {"values": known, "of": [number[value] for value in values]}


def _jumps(simulation: Simulation | None) -> list[tuple[int, int]]:
    """(drawn time, ns by which all from then on is later) of a loop."""
    loop = None if simulation is None else simulation.loop
    return [] if loop is None else [(begin + time, (loop.copies - 1) * time) for begin, time in loop.moments]


class _Numbering(Generic[T]):
    """Numbers of things as they come."""

    def __init__(self) -> None:
        self.known: list[T] = []
        self._number: dict[T, int] = {}

    def of(self, thing: T) -> int:
        """The number of one."""
        if thing not in self._number:
            self._number[thing] = len(self.known)
            self.known.append(thing)
        return self._number[thing]


class _WaitTexts:
    """What every action waited for: 0 for the one before it in its lane, else a number in ``texts``, counted from 1."""

    def __init__(self, simulation: Simulation, places: Mapping[int, Place]) -> None:
        self._simulation, self._graph, self._starts = simulation, simulation.graph, simulation.starts
        self._places = places
        self._steps = StepsBefore(self._graph, [*simulation.orders, *in_time(simulation)], self._starts)
        self.texts: list[tuple[str, int, int]] = []

    def number(self, task: int, at: int) -> int:
        """Of an action, bar ``at`` of its lane."""
        before = self._steps.on_device(task)
        if before is not None and self._places.get(before) == (self._places[task][0], at - 1):
            return 0
        found = self._found(task)
        place = self._places.get(found[1]) if found[1] is not None else None
        self.texts.append((found[0], *(place or (-1, -1))))
        return len(self.texts)

    def _found(self, task: int) -> tuple[str, int | None]:
        """Words on what was waited for, empty for a device that was busy, and the action that was."""
        found = self._steps.of(task)
        if found is None:
            return ("nothing: it starts the iteration" if not self._starts[task] else "state to be gathered"), None
        step, other = found
        if other >= self._graph.num_actions:  # a message that may have waited for its link
            return self._message(task, other)
        if step.reason == "device":
            return "", other
        if step.reason == "exchange":
            return f"state exchanged after {self._label(other)}, for {format_ns(step.lag_ns)}", other
        if step.reason == "transfer":
            return f"the message of {self._label(other)}, {format_ns(step.lag_ns)} on its way", other
        return f"the result of {self._label(other)}", other

    def _message(self, task: int, message: int) -> tuple[str, int | None]:
        maker: int | None = message
        while maker is not None and maker >= self._graph.num_actions:
            maker = self._steps.maker(maker)
        if maker is None:
            return "a message", None
        ended = self._starts[maker] + self._graph.durations[maker]
        late = self._starts[message] - ended
        waited = f", {format_ns(late)} of it for its link" if late > 0 else ""
        taken = format_ns(self._starts[task] - ended)
        return f"the message of {self._label(maker)}, {taken} on its way{waited}", maker

    def _label(self, task: int) -> str:
        device = self._graph.workload.holders[self._graph.operation_of[task]][0]
        return f"{self._simulation.label(task)} on device {self._graph.workload.first_playing(device)}"
