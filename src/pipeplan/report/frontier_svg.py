"""A frontier drawn as SVG: time against memory, a line per number of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from xml.sax.saxutils import escape

from pipeplan.planner.frontier_result import FrontierPoint, FrontierResult
from pipeplan.report.frontier import Scale
from pipeplan.units import format_bytes, format_ns, named_devices

__all__ = ["frontier_svg"]

_WIDTH, _HEIGHT, _MARGIN, _LEGEND = 860, 440, 70, 150
_RIGHT, _BOTTOM = _WIDTH - _MARGIN - _LEGEND, _HEIGHT - _MARGIN
_TICKS = 5
_COLOURS = ("#3b6fb6", "#c2571a", "#5f8f3e", "#a8710b", "#7a4a9e", "#c00")

Place = Callable[[FrontierPoint], tuple[float, float]]


def frontier_svg(report: FrontierResult) -> str:
    """The text of an SVG file: a dot with a tooltip per point, turning points and the chosen one ringed and named."""
    points = report.points
    x, y = Scale.of([p.memory_bytes for p in points]), Scale.of([p.time_ns for p in points])

    def place(point: FrontierPoint) -> tuple[float, float]:
        across = _MARGIN + x.at(point.memory_bytes) * (_RIGHT - _MARGIN)
        return round(across, 1), round(_BOTTOM - y.at(point.time_ns) * (_BOTTOM - _MARGIN), 1)

    title = f"{report.name}: {report.of}, {report.samples} samples; {report.proved}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}">',
        "<style>text { font: 12px sans-serif; fill: #222 } path { fill: none }</style>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_MARGIN}" y="24">{escape(title)}</text>',
        *_axes(x, y),
        *_lines(points, place),
        *_legend(sorted({point.num_devices for point in points})),
        *(_label(point, *place(point)) for point in points if point.turning_point or point.chosen),
    ]
    return "\n".join([*parts, "</svg>", ""])


def _lines(points: Sequence[FrontierPoint], place: Place) -> Iterator[str]:
    """The points of every number of devices, joined."""
    for index, count in enumerate(sorted({point.num_devices for point in points})):
        colour = _COLOURS[index % len(_COLOURS)]
        own = [point for point in points if point.num_devices == count]
        line = " ".join(f"{across},{up}" for across, up in map(place, own))
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-opacity=".5"/>'
        yield from (_dot(point, *place(point), colour) for point in own)


def _dot(point: FrontierPoint, across: float, up: float, colour: str) -> str:
    tip = f"{format_bytes(point.memory_bytes)}, {format_ns(point.time_ns)}, {named_devices(point.num_devices)}"
    ring = ' stroke="#000" stroke-width="2"' if point.turning_point or point.chosen else ""
    title = f"<title>{escape(tip)}: {escape(point.what)}</title>"
    return f'<circle cx="{across}" cy="{up}" r="4" fill="{colour}"{ring}>{title}</circle>'


def _label(point: FrontierPoint, across: float, up: float) -> str:
    """What a ringed point is; to its upper right, where no other point of its frontier lies."""
    words = " and ".join(["turning point"] * point.turning_point + ["chosen"] * point.chosen)
    figures = f"{format_bytes(point.memory_bytes)}, {format_ns(point.time_ns)}"
    return f'<text x="{across + 8}" y="{up - 8}">{words}: {figures}</text>'


def _legend(counts: Sequence[int]) -> Iterator[str]:
    left = _RIGHT + 24
    for index, count in enumerate(counts):
        up, colour = _MARGIN + 18 * index, _COLOURS[index % len(_COLOURS)]
        yield f'<rect x="{left}" y="{up - 9}" width="10" height="10" fill="{colour}"/>'
        yield f'<text x="{left + 16}" y="{up}">{named_devices(count)}</text>'


def _axes(x: Scale, y: Scale) -> Iterator[str]:
    """Memory across and time up, each with ticks at even distances."""
    yield f'<path d="M{_MARGIN} {_MARGIN}V{_BOTTOM}H{_RIGHT}" stroke="#999"/>'
    for tick in range(_TICKS):
        part = tick / (_TICKS - 1)
        across, up = _MARGIN + part * (_RIGHT - _MARGIN), _BOTTOM - part * (_BOTTOM - _MARGIN)
        size, time = format_bytes(x.least + part * x.width), format_ns(y.least + part * y.width)
        yield f'<path d="M{across:.1f} {_BOTTOM}v5M{_MARGIN} {up:.1f}h-5" stroke="#999"/>'
        yield f'<text x="{across:.1f}" y="{_BOTTOM + 20}" text-anchor="middle">{size}</text>'
        yield f'<text x="{_MARGIN - 8}" y="{up + 4:.1f}" text-anchor="end">{time}</text>'
    yield f'<text x="{(_MARGIN + _RIGHT) / 2}" y="{_BOTTOM + 40}" text-anchor="middle">memory per device</text>'
    yield f'<text x="{_MARGIN - 8}" y="{_MARGIN - 16}" text-anchor="end">iteration</text>'
