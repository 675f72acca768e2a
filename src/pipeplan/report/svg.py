"""The timeline as plain SVG: one bar per action and device, with tooltips, a time axis and a legend."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from pipeplan.model import in_order, is_instruction
from pipeplan.report.figures import odd_stages
from pipeplan.simulate.simulation import Simulation
from pipeplan.units import format_bytes, format_ns

__all__ = ["timeline_svg"]

_KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
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
    scale = _Scale.of(simulation)
    height = _TOP + _ROW * len(simulation.orders) + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{scale.width}" height="{height}" '
        f'viewBox="0 0 {scale.width} {height}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{scale.width}" height="{height}" fill="#fff"/>',
        *_heading(simulation),
        *_axis(simulation, scale, height),
    ]
    for device in range(len(simulation.orders)):
        parts += _row(simulation, scale, device)
    parts += _repetend(simulation, scale)
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True, slots=True)
class _Scale:
    """From time in ns to pixels."""

    pixels_per_ns: float
    width: int

    @classmethod
    def of(cls, simulation: Simulation) -> _Scale:
        makespan = simulation.rates.makespan_ns
        wanted = makespan * _MEDIAN_BAR / statistics.median(simulation.graph.durations[: simulation.graph.num_actions])
        inner = min(max(wanted, _MIN_WIDTH), _MAX_WIDTH)
        return cls(inner / makespan, round(_LEFT + inner + _MARGIN))

    def x(self, time_ns: float) -> float:
        """Horizontal position of a time."""
        return _LEFT + time_ns * self.pixels_per_ns


def _heading(simulation: Simulation) -> Iterator[str]:
    """Name, figures and legend."""
    plan, workload, rates = simulation.plan, simulation.workload, simulation.rates
    yield f'<text class="title" x="{_MARGIN}" y="20">{_text(plan.name)}</text>'
    figures = [
        plan.placement,
        f"{len(workload.devices)} devices",
        f"{workload.num_microbatches} micro-batches",
        f"makespan {format_ns(rates.makespan_ns)}",
        f"bubble rate {rates.bubble_rate:.2%} of the iteration, {rates.bubble_rate_span:.2%} by span",
    ]
    if simulation.bubble_rate_steady is not None:
        figures.append(f"{simulation.bubble_rate_steady:.2%} steady")
    yield f'<text x="{_MARGIN}" y="36">{_text(", ".join(figures))}</text>'
    x = _MARGIN
    for kind in in_order(operation.kind for operation in workload.operations):
        name = f"{kind} (instruction)" if is_instruction(kind) else _KINDS[kind]
        yield f'<rect class="{_class(kind)}" x="{x}" y="43" width="12" height="12"/>'
        yield f'<text x="{x + 17}" y="53">{name}</text>'
        x += 34 + 7 * len(name)
    if simulation.copies is not None:
        yield f'<rect class="repetend" x="{x}" y="43" width="12" height="12"/><text x="{x + 17}" y="53">repetend</text>'


def _class(kind: str) -> str:
    return "instruction" if is_instruction(kind) else kind


def _axis(simulation: Simulation, scale: _Scale, height: int) -> Iterator[str]:
    """A line and a label at every round time, about 100 pixels apart."""
    step = _round_step(100 / scale.pixels_per_ns)
    for tick in range(0, simulation.rates.makespan_ns + 1, step):
        x = _pixels(scale.x(tick))
        yield f'<path class="axis" d="M{x} {_TOP - 6}V{height - _MARGIN}"/>'
        yield f'<text x="{x}" y="{_TOP - 9}" text-anchor="middle">{format_ns(tick)}</text>'


def _round_step(at_least: float) -> int:
    """The least of 1, 2, 5, 10, 20, 50, ... that is not below."""
    power = 1
    while 5 * power < at_least:
        power *= 10
    return next(step for step in (power, 2 * power, 5 * power) if step >= at_least)


def _row(simulation: Simulation, scale: _Scale, device: int) -> Iterator[str]:
    """A device's label and bars."""
    graph, starts = simulation.graph, simulation.starts
    y = _TOP + _ROW * device
    memory = simulation.memory[device]
    tip = (
        f"device {device}: busy {format_ns(simulation.rates.busy_ns[device])}, idle "
        f"{format_ns(simulation.rates.idle_ns[device])}, peak memory {format_bytes(memory.peak_bytes)}"
    )
    yield f'<g transform="translate(0,{y})">'
    yield f'<text x="{_MARGIN}" y="14">device {device}<title>{_text(tip)}</title></text>'
    odd = odd_stages(simulation, device)
    for task in simulation.orders[device]:
        operation = graph.workload.operations[graph.operation_of[task]]
        classes = f"{_class(operation.kind)} odd" if operation.stage in odd else _class(operation.kind)
        begin, duration = starts[task], graph.durations[task]
        x, width = scale.x(begin), duration * scale.pixels_per_ns
        yield (
            f'<rect class="{classes}" x="{_pixels(x)}" width="{_pixels(max(width - 0.5, 0.1))}" height="{_BAR}">'
            f"<title>{graph.label(task)} {format_ns(begin)} to {format_ns(begin + duration)}</title></rect>"
        )
        label = str(task - graph.offsets[graph.operation_of[task]])
        if width >= _DIGIT * len(label) + 3:
            yield f'<text class="bar" x="{_pixels(x + width / 2)}" y="14">{label}</text>'
    yield "</g>"


def _repetend(simulation: Simulation, scale: _Scale) -> Iterator[str]:
    """A frame around the repetend's first copy on each device."""
    if simulation.copies is None or simulation.repetend is None:
        return
    tip = f"repetend, unroll {simulation.repetend.unroll}"
    if simulation.period_ns is not None:
        tip += f", every {format_ns(simulation.period_ns * simulation.repetend.unroll)}"
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


def _text(value: str) -> str:
    """Text content: escaped, and without what XML does not allow."""
    return escape(re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", value))
