"""The timeline of a simulation: rows of characters, plain SVG, and a trace, with a measured timeline beside it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from pipeplan.files import Plan, sha256_of
from pipeplan.files.trace import Trace, TraceEvent, trace_json
from pipeplan.reporting.layout import xml_text
from pipeplan.simulator.simulation import Simulation, simulate
from pipeplan.texts import counted
from pipeplan.units import format_bytes, format_ns
from pipeplan.workload.action import Action
from pipeplan.workload.elements import Dependency, Hop
from pipeplan.workload.kinds import Role, in_order, is_instruction, role_of

_ROLE_NAMES = {
    Role.FORWARD: "forward",
    Role.BACKWARD: "backward",
    Role.INPUT_GRAD: "input gradient",
    Role.WEIGHT_GRAD: "weight gradient",
}


def kind_name(kind: str) -> str:
    """A kind in words; an instruction has its own."""
    return _ROLE_NAMES.get(role_of(kind), "instruction")


def runs_by_device(simulation: Simulation) -> list[tuple[int, list[str]]]:
    """The critical path as runs of actions on one device: (device, action texts).

    Messages on it, having waited for their link or not, are runs of their link's number, which come after the devices'.
    """
    graph = simulation.graph
    steps = simulation.critical_path
    return [
        (device, [simulation.label(step.task) for step in run])
        for device, run in groupby(steps, key=lambda step: graph.devices_of(step.task)[0])
    ]


def odd_stages(simulation: Simulation, device: int) -> list[int]:
    """Every second of the device's stages that run blocks; those of instructions have none, and are never drawn so."""
    stages = enumerate(simulation.workload.stages)
    return [index for index, stage in stages if device in stage.devices and stage.blocks][1::2]


@dataclass(frozen=True, slots=True)
class TimelineWindow:
    """A part of the run, from ``start_ns`` to ``end_ns``, drawn in ``num_cells`` cells."""

    start_ns: int
    end_ns: int
    num_cells: int

    def cell_of(self, time_ns: int) -> int:
        """The cell boundary nearest to a time, from 0 to ``num_cells``."""
        share = (time_ns - self.start_ns) / (self.end_ns - self.start_ns)
        return min(self.num_cells, max(0, round(share * self.num_cells)))


@dataclass(frozen=True, slots=True)
class TimelineCell:
    """One character of a row: the kind that runs there (None is idle) and a letter or digit of the action, if any."""

    kind: str | None
    text: str = ""


def windows(simulation: Simulation, num_cells: int) -> list[TimelineWindow]:
    """The whole run if an action of median length keeps a cell; otherwise its beginning, its repetend and its end.

    Without a repetend the middle part is from the middle of the run. In parts, an action of median length has
    room for its label, unless the repetend is longer than that. One cell is left between parts. Of a loop's round,
    which is the repetend then, there is one copy, and times are those of what is written.
    """
    makespan = simulation.written_ns
    median = statistics.median(simulation.graph.durations[: simulation.graph.num_actions])
    part_cells = (num_cells - 2) // 3
    length = max(1, round(part_cells * median / len(f"F{simulation.workload.num_microbatches - 1}")))
    repetend = repetend_time_range(simulation)
    if repetend is not None:
        length = max(length, repetend[1] - repetend[0])
    if makespan / median <= num_cells or 3 * length >= makespan:
        return [TimelineWindow(0, makespan, num_cells)]
    middle = (makespan - length) // 2 if repetend is None else repetend[0]
    middle = min(max(middle, length), makespan - 2 * length)
    return [TimelineWindow(start, start + length, part_cells) for start in (0, middle, makespan - length)]


def repetend_time_range(simulation: Simulation) -> tuple[int, int] | None:
    """From the first start of the repetend's first copy, for as long as a repetition takes, in ns."""
    if simulation.repetend is None or simulation.copies is None or simulation.period_ns is None:
        return None
    firsts = [order[copy[0]] for order, copy in zip(simulation.orders, simulation.copies, strict=True) if copy]
    start = min(simulation.starts[task] for task in firsts)
    return start, start + round(simulation.period_ns * simulation.repetend.unroll)


def repetend_words(simulation: Simulation) -> str:
    """What a frame around the repetend is called: with how often it runs, where it is drawn once."""
    return "repetend" if simulation.loop is None else f"repetend \u00d7 {simulation.loop.copies:,}"


def device_row(simulation: Simulation, device: int, window: TimelineWindow) -> list[TimelineCell]:
    """The cells of one device in a window.

    A cell has the kind that takes most of its time, or is idle if nothing runs for half of it. Where an action
    has the cells, its kind and micro-batch stand at its beginning: ``F12``, ``F0.1`` where it is a part of one (``F0``
    where that is too long), or ``f12`` in every second stage of the device.
    """
    kinds, odd = _kinds(simulation, device, window), odd_stages(simulation, device)
    texts = [""] * window.num_cells
    graph = simulation.graph
    for task in _inside(simulation, device, window):
        start, end = simulation.starts[task], simulation.starts[task] + graph.durations[task]
        left, right = window.cell_of(start), window.cell_of(end)
        if start < window.start_ns:
            continue
        operation = graph.workload.operations[graph.operation_of[task]]
        kind = operation.kind.lower() if operation.stage in odd else operation.kind
        label = f"{kind}{simulation.microbatch_text(task)}"
        shorter = (label, label.partition(".")[0], kind[:1], "")
        shown = next(each for each in shorter if len(each) <= right - left)
        for offset, letter in enumerate(shown):
            texts[left + offset] = letter
    return [TimelineCell(kind, text if kind else "") for kind, text in zip(kinds, texts, strict=True)]


def _inside(simulation: Simulation, device: int, window: TimelineWindow) -> list[int]:
    """Tasks of the device that run in the window."""
    starts, durations = simulation.starts, simulation.graph.durations
    return [
        task
        for task in simulation.orders[device]
        if starts[task] < window.end_ns and starts[task] + durations[task] > window.start_ns
    ]


def _kinds(simulation: Simulation, device: int, window: TimelineWindow) -> list[str | None]:
    """The kind that prevails in each cell."""
    graph = simulation.graph
    width = (window.end_ns - window.start_ns) / window.num_cells
    taken: list[dict[str, float]] = [{} for _ in range(window.num_cells)]
    for task in _inside(simulation, device, window):
        kind = graph.workload.operations[graph.operation_of[task]].kind
        begin = max(0.0, (simulation.starts[task] - window.start_ns) / width)
        end = min(float(window.num_cells), (simulation.starts[task] + graph.durations[task] - window.start_ns) / width)
        for cell in range(int(begin), min(window.num_cells, int(end) + 1)):
            share = min(end, cell + 1) - max(begin, cell)
            if share > 0:
                taken[cell][kind] = taken[cell].get(kind, 0.0) + share
    return [max(cell, key=cell.__getitem__) if sum(cell.values()) >= 0.5 else None for cell in taken]


_LEFT, _TOP, _ROW, _BAR, _MARGIN = 80, 76, 24, 20, 16
_DIGIT = 6.2
"""Width of a digit of the bars' font, in pixels."""

_MEDIAN_BAR, _MIN_WIDTH, _MAX_WIDTH = 26, 900, 24_000
"""Pixels of an action of median length, as far as the whole width stays within the other two."""

_STYLE = """
text { font: 11px sans-serif; fill: #222 }
.title { font-size: 14px; font-weight: bold }
.bar { font-size: 10px; fill: #fff; text-anchor: middle; pointer-events: none }
.axis { stroke: #ccc; stroke-width: 1 }
.F { fill: #3b6fb6 } .B { fill: #c2571a } .I { fill: #a8710b } .W { fill: #5f8f3e } .instruction { fill: #7a4a9e }
.odd { fill-opacity: .72 }
.repetend { fill: none; stroke: #c00; stroke-width: 1.5 }
"""


def timeline_svg(simulation: Simulation) -> str:
    """The text of an SVG file. Every second stage of a device is paler."""
    scale = _TimeScale.of(simulation)
    height = _height(simulation)
    return _svg(scale.width, height, [*_heading(simulation), *_run(simulation, scale, height)])


def timelines_svg(runs: Mapping[str, Simulation]) -> str:
    """The text of an SVG file with several runs below each other, each under its title, on one time scale.

    It is as wide as a page, however short actions are then.
    """
    longest = max(simulation.written_ns for simulation in runs.values())
    scale, top = _TimeScale(_MIN_WIDTH / longest, _LEFT + _MIN_WIDTH + _MARGIN), 0
    parts: list[str] = []
    for title, simulation in runs.items():
        height = _height(simulation)
        heading = [f'<text class="title" x="{_MARGIN}" y="20">{xml_text(title)}</text>']
        heading += [f'<text x="{_MARGIN}" y="36">{xml_text(_in_figures(simulation))}</text>', *_legend(simulation)]
        parts += [f'<g transform="translate(0,{top})">', *heading, *_run(simulation, scale, height), "</g>"]
        top += height
    return _svg(scale.width, top, parts)


def _height(simulation: Simulation) -> int:
    return _TOP + _ROW * len(simulation.orders) + _MARGIN


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    root = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    )
    return "\n".join([*root, *parts, "</svg>", ""])


def _run(simulation: Simulation, scale: _TimeScale, height: int) -> Iterator[str]:
    """The axis, a row for each device, and the repetend's frame."""
    yield from _axis(simulation, scale, height)
    for device in range(len(simulation.orders)):
        yield from _row(simulation, scale, device)
    yield from _repetend(simulation, scale)


@dataclass(frozen=True, slots=True)
class _TimeScale:
    """From time in ns to pixels."""

    pixels_per_ns: float
    width: int

    @classmethod
    def of(cls, simulation: Simulation) -> _TimeScale:
        makespan = simulation.written_ns
        wanted = makespan * _MEDIAN_BAR / statistics.median(simulation.graph.durations[: simulation.graph.num_actions])
        inner = min(max(wanted, _MIN_WIDTH), _MAX_WIDTH)
        return cls(inner / makespan, round(_LEFT + inner + _MARGIN))

    def x(self, time_ns: float) -> float:
        """Horizontal position of a time."""
        return _LEFT + time_ns * self.pixels_per_ns


def _heading(simulation: Simulation) -> Iterator[str]:
    """Name, figures and legend."""
    plan, workload, rates = simulation.plan, simulation.workload, simulation.rates
    yield f'<text class="title" x="{_MARGIN}" y="20">{xml_text(plan.name)}</text>'
    figures = [
        plan.placement,
        f"{len(workload.devices)} devices",
        f"{workload.num_microbatches} micro-batches",
        f"makespan {format_ns(rates.makespan_ns)}",
        f"bubble rate {rates.bubble_rate:.2%} of the iteration, {rates.bubble_rate_span:.2%} by busiest device span",
    ]
    if simulation.bubble_rate_steady is not None:
        figures.append(f"{simulation.bubble_rate_steady:.2%} steady")
    yield f'<text x="{_MARGIN}" y="36">{xml_text(", ".join(figures))}</text>'
    yield from _legend(simulation)


def _in_figures(simulation: Simulation) -> str:
    """What a run takes, in a few words."""
    count = simulation.workload.num_microbatches
    rates = simulation.rates
    return (
        f"{counted(count, 'micro-batch', 'es')}, {format_ns(rates.makespan_ns)}, devices idle for "
        f"{rates.bubble_rate:.1%} of it"
    )


def _legend(simulation: Simulation) -> Iterator[str]:
    """A colour for each kind, and the repetend's frame."""
    x = _MARGIN
    for kind in in_order(operation.kind for operation in simulation.workload.operations):
        name = f"{kind} (instruction)" if is_instruction(kind) else kind_name(kind)
        yield f'<rect class="{_class(kind)}" x="{x}" y="43" width="12" height="12"/>'
        yield f'<text x="{x + 17}" y="53">{name}</text>'
        x += 34 + 7 * len(name)
    if simulation.copies is not None:
        name = repetend_words(simulation)
        yield f'<rect class="repetend" x="{x}" y="43" width="12" height="12"/><text x="{x + 17}" y="53">{name}</text>'


def _class(kind: str) -> str:
    return "instruction" if is_instruction(kind) else kind


def _axis(simulation: Simulation, scale: _TimeScale, height: int) -> Iterator[str]:
    """A line and a label at every round time, about 100 pixels apart."""
    step = _round_step(100 / scale.pixels_per_ns)
    for tick in range(0, simulation.written_ns + 1, step):
        x = _pixels(scale.x(tick))
        yield f'<path class="axis" d="M{x} {_TOP - 6}V{height - _MARGIN}"/>'
        yield f'<text x="{x}" y="{_TOP - 9}" text-anchor="middle">{format_ns(simulation.clock(tick))}</text>'


def _round_step(at_least: float) -> int:
    """The least of 1, 2, 5, 10, 20, 50, ... that is not below."""
    power = 1
    while 5 * power < at_least:
        power *= 10
    return next(step for step in (power, 2 * power, 5 * power) if step >= at_least)


def _row(simulation: Simulation, scale: _TimeScale, device: int) -> Iterator[str]:
    """A device's label and bars."""
    graph, starts = simulation.graph, simulation.starts
    y = _TOP + _ROW * device
    memory = simulation.memory[device]
    tip = (
        f"device {device}: busy {format_ns(simulation.rates.busy_ns[device])}, idle "
        f"{format_ns(simulation.rates.idle_ns[device])}, peak memory {format_bytes(memory.peak_bytes)}"
    )
    yield f'<g transform="translate(0,{y})">'
    yield f'<text x="{_MARGIN}" y="14">device {device}<title>{xml_text(tip)}</title></text>'
    odd = odd_stages(simulation, device)
    for task in simulation.orders[device]:
        operation = graph.workload.operations[graph.operation_of[task]]
        classes = f"{_class(operation.kind)} odd" if operation.stage in odd else _class(operation.kind)
        begin, duration = starts[task], graph.durations[task]
        x, width = scale.x(begin), duration * scale.pixels_per_ns
        yield (
            f'<rect class="{classes}" x="{_pixels(x)}" width="{_pixels(max(width - 0.5, 0.1))}" height="{_BAR}">'
            f"<title>{simulation.label(task)} {format_ns(simulation.start_of(task))} to "
            f"{format_ns(simulation.start_of(task) + duration)}</title></rect>"
        )
        label = simulation.microbatch_text(task)
        if width >= _DIGIT * len(label) + 3:
            yield f'<text class="bar" x="{_pixels(x + width / 2)}" y="14">{label}</text>'
    yield "</g>"


def _repetend(simulation: Simulation, scale: _TimeScale) -> Iterator[str]:
    """A frame around the repetend's first copy on each device."""
    if simulation.copies is None or simulation.repetend is None:
        return
    tip = f"repetend, unroll {simulation.repetend.unroll}"
    if simulation.period_ns is not None:
        tip += f", every {format_ns(simulation.period_ns * simulation.repetend.unroll)}"
    if simulation.loop is not None:
        tip += f"; runs {simulation.loop.copies} times, and is drawn once"
    for device, (order, copy) in enumerate(zip(simulation.orders, simulation.copies, strict=True)):
        if not copy:
            continue
        first, last = order[copy[0]], order[copy[-1]]
        x = scale.x(simulation.starts[first])
        width = scale.x(simulation.starts[last] + simulation.graph.durations[last]) - x
        yield (
            f'<rect class="repetend" x="{_pixels(x)}" y="{_TOP + _ROW * device - 1}" width="{_pixels(width)}" '
            f'height="{_BAR + 2}"><title>{tip}</title></rect>'
        )


def _pixels(value: float) -> str:
    """At most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


# As a trace ---------------------------------------------------------------------------------------------------------


Timeline = Sequence[Sequence[Sequence[tuple[int, int, int]]]]


def predicted_trace(simulation: Simulation) -> Trace:
    """Every action on each of its devices, and every message on both of its ends, from when it is under way.

    Of each of a loop's rounds there is the first copy, and what is after it when it is.
    """
    graph, trace = simulation.graph, Trace("predicted")
    for device, order in enumerate(simulation.orders):
        for task in order:
            trace.add(simulation.label(task), device, simulation.start_of(task), graph.durations[task])
    workload, loop = graph.workload, simulation.loop
    for text, devices, begin, duration, size in simulation.exchanges:
        for device in devices:
            trace.add(text, device, begin, duration, {"bytes": size})
    position = {operation.id: index for index, operation in enumerate(workload.operations)}
    for dependency in workload.dependencies:
        source, target = position[dependency.source], position[dependency.target]
        for hop in dependency.hops:
            slots = workload.messages(dependency, hop)
            names = _Names(simulation.plan, dependency, hop, *slots.name(0))
            item = workload.item_of.get((source, target, hop))
            for number in range(len(slots)):
                begin = _made(simulation, source, slots.samples(number))  # leaves then, unless it waits for its link
                if item is not None:
                    begin = simulation.starts[graph.offsets[item] + number]
                microbatch, part = slots.name(number)
                if loop is not None:
                    after = begin >= sum(loop.moments[loop.rounds[source]])
                    begin, microbatch = simulation.clock(begin), microbatch + after * loop.skipped_of(source)
                sent = hop if part is None else hop.part
                for device, name in names.of(microbatch, part):
                    trace.add(name, device, begin, sent.duration_ns, {"bytes": sent.bytes})
    return trace


def _made(simulation: Simulation, operation: int, samples: tuple[int, int]) -> int:
    """When all actions of an operation that hold some of these samples have ended."""
    graph = simulation.graph
    tasks = [graph.offsets[operation] + n for n in graph.workload.slots[operation].sharing(samples)]
    return max(simulation.starts[task] + graph.durations[task] for task in tasks)


def trace_text(simulation: Simulation) -> str:
    """The text of a trace file with the predicted timeline."""
    about = {
        "plan": simulation.plan.name,
        "num_microbatches": simulation.workload.num_microbatches,
        "makespan_ns": simulation.rates.makespan_ns,
    }
    if simulation.loop is not None:
        about["loop_copies"] = simulation.loop.copies
    return trace_json(predicted_trace(simulation).events(), about)


def run_trace(plan: Plan, timeline: Timeline, about: Mapping[str, object]) -> str:
    """The text of ``run --trace``: predicted and measured, step after step; in each both begin at the same moment.

    ``timeline`` [step][rank] has (program counter, start, end). A measured SEND lasts as long as posting it took, a
    RECV as long as its consumer waited for it.
    """
    predicted = predicted_trace(simulate(plan.unrolled())).events()
    measured = Trace("measured")
    events: list[TraceEvent] = [event for event in predicted if event["ph"] != "X"]
    begin_ns = 0
    for step, ranks in enumerate(timeline):
        for rank, actions in enumerate(ranks):
            for counter, start, end in actions:
                measured.add(plan.whole_programs[rank][counter], rank, begin_ns + start, end - start, {"step": step})
        events += [_later(event, begin_ns, step) for event in predicted if event["ph"] == "X"]
        last = max((end for actions in ranks for *_, end in actions), default=0)
        begin_ns += max(last, plan.predicted.makespan_ns) * 21 // 20
    known = {
        "plan": plan.name,
        "plan_sha256": sha256_of(plan),
        **about,
        "steps": len(timeline),
        "makespan_ns": plan.predicted.makespan_ns,
    }
    return trace_json([*events, *measured.events()], known)


def _later(event: TraceEvent, by_ns: int, step: int) -> TraceEvent:
    at, args = event["ts"], event["args"]
    assert isinstance(at, float)
    assert isinstance(args, dict)
    return {**event, "ts": (round(at * 1000) + by_ns) / 1000, "args": {**args, "step": step}}


class _Names:
    """How the plan's programs call the messages of one hop: with or without the peer."""

    def __init__(self, plan: Plan, dependency: Dependency, hop: Hop, microbatch: int, part: int | None) -> None:
        """``microbatch`` and ``part`` are those of any of the messages."""
        source, target = dependency.source_stage, dependency.target_stage
        payload = dependency.payload
        send = Action(source, f"SEND_{payload}", microbatch, target, hop.target_device, part)
        receive = Action(target, f"RECV_{payload}", microbatch, source, hop.source_device, part)
        self._ends = [
            (hop.source_device, _as_in(plan, hop.source_device, send)),
            (hop.target_device, _as_in(plan, hop.target_device, receive)),
        ]

    def of(self, microbatch: int, part: int | None) -> Iterator[tuple[int, str]]:
        """(device, action text) of the SEND and the RECV of a micro-batch, or of a part of it."""
        for device, name in self._ends:
            yield device, str(replace(name, microbatch=microbatch, part=part))


def _as_in(plan: Plan, device: int, full: Action) -> Action:
    """The form of an action in a device's program, which leaves out peers where only one is possible."""
    program = set(plan.programs[device])
    forms = [
        replace(full, peer_stage=peer_stage, peer_device=peer_device)
        for peer_stage in (full.peer_stage, None)
        for peer_device in (full.peer_device, None)
    ]
    return next((form for form in forms if str(form) in program), full)
