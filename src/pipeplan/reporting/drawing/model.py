"""What a timeline shows: lanes of bars, with memory over time, of a plan or of a measured step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from pipeplan.files.trace import MeasuredTrace
from pipeplan.reporting.timeline import device_messages, odd_stages, repetend_words
from pipeplan.simulator.simulation import Simulation
from pipeplan.texts import counted, number_ranges
from pipeplan.units import format_bytes, format_ns
from pipeplan.workload.action import Action
from pipeplan.workload.elements import Hop
from pipeplan.workload.kinds import in_order, is_instruction
from pipeplan.workload.memory import memory_curves
from pipeplan.workload.samples import Slots
from pipeplan.workload.task_graph import NEVER

NO_TASK = -1
"""The task of a bar that is none of a plan's actions: a message, or what was measured."""

_LONG_NAME = 14


class Bar(NamedTuple):
    """An action or a message: when it is drawn, and when it starts in all that runs, which differs in a loop; in ns."""

    start_ns: int
    duration_ns: int
    shown_ns: int
    kind: str
    odd: bool
    number: str
    name: str
    task: int = NO_TASK

    @property
    def label(self) -> str:
        """Its kind and micro-batch, as in its name, whose stage its lane and colour say."""
        return self.kind + self.number if not is_instruction(self.kind) else self.number

    @property
    def times(self) -> str:
        """When it runs, in words."""
        return f"{format_ns(self.shown_ns)} to {format_ns(self.shown_ns + self.duration_ns)}"


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """What a device holds, state included: pairs (time in ns, bytes from then on); and what it may hold, if limited."""

    points: tuple[tuple[int, int], ...]
    limit_bytes: int | None

    @property
    def peak_bytes(self) -> int:
        """The most that is held."""
        return max(size for _, size in self.points)

    @property
    def top_bytes(self) -> int:
        """What the drawing's height stands for."""
        return max(self.peak_bytes, self.limit_bytes or 0, 1)


@dataclass(frozen=True, slots=True)
class TimelineLane:
    """A device, devices with the same stages, or a link: its bars in time, and what is to say of it.

    ``devices`` are those of it, or at its ends; ``frame`` is the time of the repetend's first copy there.
    """

    name: str
    about: str
    bars: tuple[Bar, ...]
    devices: tuple[int, ...]
    memory: MemoryCurve | None = None
    frame: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class DrawnRun:
    """One run: a plan as it is predicted, or a step of it as measured.

    ``clock`` is when something happens that is drawn at a time. ``repetend`` is what a frame is called, if there are
    any, and ``repetend_tip`` what it says; ``plan`` is the letter of the
    plan in a report.
    """

    title: str
    figures: str
    lanes: tuple[TimelineLane, ...]
    links: tuple[TimelineLane, ...]
    end_ns: int
    kinds: tuple[str, ...]
    clock: Callable[[int], int]
    repetend: str = ""
    repetend_tip: str = ""
    plan: str = ""
    simulation: Simulation | None = None

    @property
    def num_bars(self) -> int:
        """Bars of all lanes."""
        return sum(len(lane.bars) for lane in (*self.lanes, *self.links))


def predicted_run(
    simulation: Simulation, title: str, figures: str, *, memory: bool = False, links: bool = False, plan: str = ""
) -> DrawnRun:
    """The lanes of a simulation; devices with the same stages have one. With ``memory`` and ``links`` these, too."""
    groups: dict[int, list[int]] = {}
    for device, leader in enumerate(simulation.workload.leaders):
        groups.setdefault(leader, []).append(device)
    curves = memory_curves(simulation.graph, simulation.starts, simulation.orders) if memory else None
    lanes = tuple(
        TimelineLane(
            _name("device", simulation.workload.playing(devices)),
            _about(simulation, leader, devices),
            tuple(_bars(simulation, leader)),
            tuple(devices),
            None if curves is None else _memory(simulation, devices, curves[leader]),
            _frame(simulation, leader),
        )
        for leader, devices in groups.items()
    )
    return DrawnRun(
        title=title,
        figures=figures,
        lanes=lanes,
        links=tuple(_links(simulation)) if links else (),
        end_ns=simulation.written_ns,
        kinds=tuple(in_order(operation.kind for operation in simulation.workload.operations)),
        clock=simulation.clock,
        repetend="" if simulation.copies is None else repetend_words(simulation),
        repetend_tip=_repetend_tip(simulation),
        plan=plan,
        simulation=simulation,
    )


def _name(what: str, devices: Sequence[int]) -> str:
    if len(devices) == 1:
        return f"{what} {devices[0]}"
    ranges = number_ranges(devices)
    return f"{what}s {ranges}" if len(ranges) + len(what) < _LONG_NAME else f"{len(devices)} {what}s, {devices[0]}.."


def _about(simulation: Simulation, leader: int, devices: Sequence[int]) -> str:
    """Busy and idle time and peak memory."""
    playing = simulation.workload.playing(devices)
    return (
        f"device{'s' * (len(playing) > 1)} {number_ranges(playing)}: busy "
        f"{format_ns(simulation.rates.busy_ns[leader])}, idle {format_ns(simulation.rates.idle_ns[leader])}, peak "
        f"memory {format_bytes(simulation.memory[leader].peak_bytes)}"
    )


def _bars(simulation: Simulation, device: int) -> Iterator[Bar]:
    graph, odd = simulation.graph, set(odd_stages(simulation, device))
    starts, durations, operation_of = simulation.starts, graph.durations, graph.operation_of
    known: dict[int, _BarsOf] = {}
    for task in simulation.orders[device]:
        x = operation_of[task]
        if x not in known:
            known[x] = _BarsOf.of(simulation, x, odd)
        first, until, skipped, later, after, slots, name, kind, is_odd = known[x]
        number, start = task - first, starts[task]
        shown = start + (later if number < until else after)
        number += 0 if number < until else skipped
        text = slots.text(number) if slots is not None else str(number)
        yield Bar(start, durations[task], shown, kind, is_odd, text, name + text, task)


class _BarsOf(NamedTuple):
    """What all bars of an operation have.

    Its actions are numbered from ``first`` on; from number ``until`` on they are after a loop, and have numbers that
    are higher by ``skipped``. In all that runs they start by ``later`` ns later, or by ``after``. ``slots`` are theirs
    where actions are not whole micro-batches, all of them.
    """

    first: int
    until: int
    skipped: int
    later: int
    after: int
    slots: Slots | None
    name: str
    kind: str
    odd: bool

    @classmethod
    def of(cls, simulation: Simulation, x: int, odd: set[int]) -> _BarsOf:
        graph, loop = simulation.graph, simulation.loop
        operation, slots = graph.workload.operations[x], graph.workload.slots[x]
        until, skipped, later, after = NEVER, 0, 0, 0
        if loop is not None:
            until, skipped = loop.begins[x] + loop.counts[x], loop.skipped_of(x)
            later, after = loop.later_ns(x, until - 1), loop.later_ns(x, until)
        parts = None if slots.plain else slots
        name, kind, stage = operation.id, operation.kind, operation.stage
        return cls(graph.offsets[x], until, skipped, later, after, parts, name, kind, stage in odd)


def _memory(simulation: Simulation, devices: Sequence[int], curve: Sequence[tuple[int, int]]) -> MemoryCurve:
    """Of devices with the same stages the least limit."""
    static = simulation.workload.static_bytes(devices[0])
    limits = [simulation.workload.devices[device].usable_bytes for device in devices]
    limit = min((each for each in limits if each is not None), default=None)
    return MemoryCurve(tuple((time, static + held) for time, held in curve), limit)


def _frame(simulation: Simulation, device: int) -> tuple[int, int] | None:
    """The time of the repetend's first copy on a device, if it has any of it."""
    if simulation.copies is None or simulation.repetend is None or not simulation.copies[device]:
        return None
    order, copy = simulation.orders[device], simulation.copies[device]
    last = order[copy[-1]]
    return simulation.starts[order[copy[0]]], simulation.starts[last] + simulation.graph.durations[last]


def _repetend_tip(simulation: Simulation) -> str:
    if simulation.repetend is None:
        return ""
    tip = f"repetend, unroll {simulation.repetend.unroll}"
    if simulation.period_ns is not None:
        tip += f", every {format_ns(simulation.period_ns * simulation.repetend.unroll)}"
    if simulation.loop is not None:
        tip += f"; runs {simulation.loop.copies} times, and is drawn once"
    return tip


def _links(simulation: Simulation) -> Iterator[TimelineLane]:
    """A lane for the messages from one device to another; of devices with the same stages those of the first two.

    Links whose messages take no time have none.
    """
    leaders, first = simulation.workload.leaders, simulation.workload.first_playing
    ends = dict[tuple[int, int], tuple[int, int]]()
    bars: dict[tuple[int, int], list[Bar]] = {}
    sizes: dict[tuple[int, int], int] = {}

    def is_drawn(hop: Hop) -> bool:
        pair = hop.source_device, hop.target_device
        return ends.setdefault((leaders[pair[0]], leaders[pair[1]]), pair) == pair

    @cache
    def to(device: int, size: int) -> str:
        return f" to device {first(device)}, {format_bytes(size)}"

    for each in device_messages(simulation, is_drawn):
        pair = each.source_device, each.target_device
        name = each.name + to(each.target_device, each.size_bytes)
        bar = Bar(each.written_ns, each.duration_ns, each.begin_ns, each.payload, False, each.number, name)
        bars.setdefault(pair, []).append(bar)
        sizes[pair] = sizes.get(pair, 0) + each.size_bytes
    for pair in sorted(pair for pair, own in bars.items() if any(bar.duration_ns for bar in own)):
        own = sorted(bars[pair], key=lambda bar: bar.start_ns)
        ends_of = first(pair[0]), first(pair[1])
        between = f"from device {ends_of[0]} to device {ends_of[1]}"
        about = f"{counted(len(own), 'message')} {between}, {format_bytes(sizes[pair])}"
        yield TimelineLane(f"link {ends_of[0]} to {ends_of[1]}", about, tuple(own), pair)


def measured_run(
    simulation: Simulation, trace: MeasuredTrace, step: int, title: str, figures: str, plan: str
) -> DrawnRun:
    """The lanes of a measured step, counted from 0: what devices computed, from the first start on."""
    actions = trace.steps[step]
    begin = min(start for own in actions for text, start, _ in own if "_" not in text)
    odd = {device: set(odd_stages(simulation, device)) for device in range(len(actions))}
    lanes = tuple(
        TimelineLane(
            f"device {device}", f"device {device}, measured", tuple(_measured(own, begin, odd[device])), (device,)
        )
        for device, own in enumerate(actions)
    )
    ends = [bar.start_ns + bar.duration_ns for lane in lanes for bar in lane.bars]
    kinds = in_order(bar.kind for lane in lanes for bar in lane.bars)
    return DrawnRun(title, figures, lanes, (), max(ends), tuple(kinds), lambda time: time, plan=plan)


def _measured(actions: Iterable[tuple[str, int, int]], begin_ns: int, odd: set[int]) -> Iterator[Bar]:
    for text, start, end in actions:
        if "_" not in text:
            action = Action.parse(text)
            number = text[len(f"{action.stage}{action.kind}") :]
            begin = start - begin_ns
            yield Bar(begin, end - start, begin, action.kind, action.stage in odd, number, text)
