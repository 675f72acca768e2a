"""The drawing as SVG: a file of its own, or a part of a page, which has its style."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeplan.reporting.drawing.model import Bar, DrawnRun, TimelineLane, predicted_run
from pipeplan.reporting.layout import xml_text
from pipeplan.reporting.timeline import kind_name
from pipeplan.simulator.simulation import Simulation
from pipeplan.texts import counted
from pipeplan.units import format_bytes, format_ns
from pipeplan.workload.kinds import is_instruction

LEFT, TOP, ROW, BAR, MARGIN = 110, 76, 24, 20, 16
LINK_ROW, LINK_BAR, MEMORY_ROW = 16, 12, 34
"""Pixels; the page's script has the same from the data."""

LETTER = 6.2
"""Width of a letter of the bars' font, in pixels."""

_MEDIAN_BAR, _MIN_WIDTH, _MAX_WIDTH = 26, 900, 24_000
"""Pixels of an action of median length, as far as the whole width stays within the other two."""

COLOURS = {
    "F": ("#2f62a8", "#b9d2f1"),
    "B": ("#a8480c", "#f8cba6"),
    "I": ("#80570a", "#ecd28a"),
    "W": ("#45702a", "#c9e2b3"),
    "instruction": ("#6d4191", "#dcc6ec"),
}
"""Of a kind: with white text, and of every second stage of a device with dark text."""

DARK = "#14181f"

_STYLE = "\n".join(
    [
        "text { font: 11px sans-serif; fill: #222 }",
        ".title { font-size: 14px; font-weight: bold }",
        ".bar { font-size: 10px; fill: #fff; text-anchor: middle; pointer-events: none }",
        f".dark {{ fill: {DARK} }}",
        ".axis { stroke: #ccc; stroke-width: 1 }",
        *(f".{kind} {{ fill: {plain} }} .{kind}.odd {{ fill: {odd} }}" for kind, (plain, odd) in COLOURS.items()),
        ".repetend { fill: none; stroke: #c00; stroke-width: 1.5 }",
    ]
)


def timeline_svg(simulation: Simulation) -> str:
    """The text of an SVG file. Every second stage of a device is paler; devices with the same stages share a lane."""
    plan, workload, rates = simulation.plan, simulation.workload, simulation.rates
    figures = [
        plan.placement,
        f"{workload.num_devices} devices",
        f"{workload.num_microbatches} micro-batches",
        f"makespan {format_ns(rates.makespan_ns)}",
        f"bubble rate {rates.bubble_rate:.2%} of the iteration, {rates.bubble_rate_span:.2%} by busiest device span",
    ]
    if simulation.bubble_rate_steady is not None:
        figures.append(f"{simulation.bubble_rate_steady:.2%} steady")
    run = predicted_run(simulation, plan.name, ", ".join(figures))
    durations = simulation.graph.durations[: simulation.graph.num_actions]
    wanted = run.end_ns * _MEDIAN_BAR / statistics.median(durations)
    scale = TimeScale(min(max(wanted, _MIN_WIDTH), _MAX_WIDTH), run.end_ns)
    return _file(scale.width, run_height(run), run_parts(run, scale))


def timelines_svg(runs: Mapping[str, Simulation]) -> str:
    """The text of an SVG file with several runs below each other, each under its title, on one time scale.

    It is as wide as a page, however short actions are then.
    """
    drawn = [predicted_run(simulation, title, in_figures(simulation)) for title, simulation in runs.items()]
    scale = page_scale(drawn)
    return _file(scale.width, sum(map(run_height, drawn)), stacked(drawn, scale))


def page_scale(runs: Sequence[DrawnRun]) -> TimeScale:
    """The scale at which the longest of some runs is as wide as a page."""
    return TimeScale(_MIN_WIDTH, max(run.end_ns for run in runs))


def in_figures(simulation: Simulation) -> str:
    """What a run takes, in a few words."""
    count = simulation.workload.num_microbatches
    rates = simulation.rates
    return (
        f"{counted(count, 'micro-batch', 'es')}, {format_ns(rates.makespan_ns)}, devices idle for "
        f"{rates.bubble_rate:.1%} of it"
    )


def stacked(runs: Sequence[DrawnRun], scale: TimeScale) -> Iterator[str]:
    """Runs below each other."""
    top = 0
    for run in runs:
        yield f'<g class="run" transform="translate(0,{top})">'
        yield from run_parts(run, scale)
        yield "</g>"
        top += run_height(run)


def lane_height(lane: TimelineLane, *, link: bool = False) -> int:
    """Pixels of a lane, its memory included."""
    return LINK_ROW if link else ROW + (MEMORY_ROW if lane.memory is not None else 0)


def run_height(run: DrawnRun) -> int:
    """Pixels of a run with its heading."""
    rows = sum(map(lane_height, run.lanes)) + sum(lane_height(lane, link=True) for lane in run.links)
    return TOP + rows + MARGIN


@dataclass(frozen=True, slots=True)
class TimeScale:
    """From time in ns to pixels: ``inner`` pixels are ``end_ns``."""

    inner: float
    end_ns: int

    @property
    def width(self) -> int:
        """Of the whole drawing, in pixels."""
        return round(LEFT + self.inner + MARGIN)

    def span(self, ns: float) -> float:
        """Pixels of a duration."""
        return ns * self.inner / (self.end_ns or 1)

    def x(self, time_ns: float) -> float:
        """Horizontal position of a time."""
        return LEFT + self.span(time_ns)


def _file(width: int, height: int, parts: Iterator[str]) -> str:
    root = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>\n{_STYLE}\n</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    )
    return "\n".join([*root, *parts, "</svg>", ""])


def run_parts(run: DrawnRun, scale: TimeScale) -> Iterator[str]:
    """A run: heading, legend, axis, a row for each lane, and frames around the repetend."""
    yield f'<text class="title" x="{MARGIN}" y="20">{xml_text(run.title)}</text>'
    yield f'<text class="figures" x="{MARGIN}" y="36">{xml_text(run.figures)}</text>'
    yield from _legend(run)
    yield from _axis(run, scale)
    y, frames = TOP, list[str]()
    for lane in run.lanes:
        yield from _row(lane, scale, y)
        frames += _frame(run, lane, scale, y)
        y += lane_height(lane)
    for lane in run.links:
        yield from _row(lane, scale, y, link=True)
        y += lane_height(lane, link=True)
    yield from frames


def class_of(kind: str) -> str:
    """The class of a kind's bars."""
    return "instruction" if is_instruction(kind) else kind


def _legend(run: DrawnRun) -> Iterator[str]:
    """A colour for each kind, and the repetend's frame."""
    x = MARGIN
    for kind in run.kinds:
        name = f"{kind} (instruction)" if is_instruction(kind) else f"{kind} {kind_name(kind)}"
        yield f'<rect class="legend {class_of(kind)}" x="{x}" y="43" width="12" height="12"/>'
        yield f'<text class="legend" x="{x + 17}" y="53">{xml_text(name)}</text>'
        x += 34 + 7 * len(name)
    if run.repetend:
        yield f'<rect class="legend repetend" x="{x}" y="43" width="12" height="12"/>'
        yield f'<text class="legend" x="{x + 17}" y="53">{run.repetend}</text>'


def _axis(run: DrawnRun, scale: TimeScale) -> Iterator[str]:
    """A line and a label at every round time, about 100 pixels apart."""
    step = _round_step(100 / scale.span(1))
    bottom = run_height(run) - MARGIN
    for tick in range(0, run.end_ns + 1, step):
        x = _pixels(scale.x(tick))
        yield f'<path class="axis" d="M{x} {TOP - 6}V{bottom}"/>'
        yield f'<text class="tick" x="{x}" y="{TOP - 9}" text-anchor="middle">{format_ns(run.clock(tick))}</text>'


def _round_step(at_least: float) -> int:
    """The least of 1, 2, 5, 10, 20, 50, ... that is not below."""
    power = 1
    while 5 * power < at_least:
        power *= 10
    return next(step for step in (power, 2 * power, 5 * power) if step >= at_least)


def _row(lane: TimelineLane, scale: TimeScale, y: int, *, link: bool = False) -> Iterator[str]:
    """A lane's label, bars and memory."""
    height, name = (LINK_BAR, "lane link") if link else (BAR, "lane")
    yield f'<g class="{name}" transform="translate(0,{y})">'
    about = f"{xml_text(lane.name)}<title>{xml_text(lane.about)}</title>"
    yield f'<text x="{MARGIN}" y="{height - 6 + 3 * link}">{about}</text>'
    for bar in lane.bars:
        yield from _bar(bar, scale, height)
    if lane.memory is not None:
        yield from _memory(lane, scale)
    yield "</g>"


def _bar(bar: Bar, scale: TimeScale, height: int) -> Iterator[str]:
    """A bar, and as much of what it is as has room."""
    odd = " odd" if bar.odd else ""
    x, width = scale.x(bar.start_ns), scale.span(bar.duration_ns)
    yield (
        f'<rect class="{class_of(bar.kind)}{odd}" x="{_pixels(x)}" width="{_pixels(max(width - 0.5, 0.1))}" '
        f'height="{height}"><title>{xml_text(bar.name)} {bar.times}</title></rect>'
    )
    if label := fitting(bar, width):
        dark = " dark" if bar.odd else ""
        yield (
            f'<text class="bar{dark}" x="{_pixels(x + width / 2)}" y="{height - 6 + 3 * (height < BAR)}">'
            f"{xml_text(label)}</text>"
        )


def fitting(bar: Bar, width: float) -> str:
    """The longest of what may stand in a bar that has room: its kind and micro-batch, its micro-batch, its kind."""
    for text in (bar.label, bar.number, bar.label[:1]):
        if width >= LETTER * len(text) + 3:
            return text
    return ""


def _memory(lane: TimelineLane, scale: TimeScale) -> Iterator[str]:
    """What is held over time, below the bars, and a line at the limit."""
    memory = lane.memory
    assert memory is not None
    base, height = ROW + MEMORY_ROW - 6, MEMORY_ROW - 8

    def y(size: int) -> str:
        return _pixels(base - height * size / memory.top_bytes)

    steps = "".join(f"H{_pixels(scale.x(time))}V{y(size)}" for time, size in memory.points)
    limit = "" if memory.limit_bytes is None else f" of {format_bytes(memory.limit_bytes)}"
    tip = f"memory, at most {format_bytes(memory.peak_bytes)}{limit}"
    area = f"M{LEFT} {base}{steps}H{_pixels(scale.x(scale.end_ns))}V{base}Z"
    yield f'<path class="memory" d="{area}"><title>{tip}</title></path>'
    if memory.limit_bytes is not None:
        at = y(memory.limit_bytes)
        yield f'<path class="limit" d="M{LEFT} {at}H{_pixels(scale.x(scale.end_ns))}"/>'
    yield f'<text class="memory-words" x="{MARGIN}" y="{base - 4}">{format_bytes(memory.peak_bytes)}{limit}</text>'


def _frame(run: DrawnRun, lane: TimelineLane, scale: TimeScale, y: int) -> Iterator[str]:
    """A frame around the repetend's first copy."""
    if lane.frame is None:
        return
    x = scale.x(lane.frame[0])
    yield (
        f'<rect class="repetend" x="{_pixels(x)}" y="{y - 1}" width="{_pixels(scale.x(lane.frame[1]) - x)}" '
        f'height="{BAR + 2}"><title>{run.repetend_tip}</title></rect>'
    )


def _pixels(value: float) -> str:
    """At most one decimal."""
    return f"{value:.1f}".removesuffix(".0")
