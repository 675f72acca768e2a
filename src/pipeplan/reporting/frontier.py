"""A frontier as an answer, as a table, as a plot in the terminal, and as SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.table import Table

from pipeplan.planning.frontier import FrontierPoint, FrontierResult
from pipeplan.reporting.frontier_answer import print_frontier_answer
from pipeplan.reporting.layout import Column, console_for, flowed, print_notes, tables, xml_text
from pipeplan.reporting.tables import rate_columns
from pipeplan.units import format_bytes, format_ns, named_devices

_MOST_ROWS, _FEW_ROWS = 24, 8
_COLUMNS, _LEAST_COLUMNS, _LINES = 72, 24, 16
_LEAST_PLOTTED = 4
"""Points below which the table says as much as a plot."""
_LEAST_WORDS = 16
_DOT, _KNEE, _SIGNS = "o", "X", "123456789abcdefghijklmn"


def print_frontier(
    report: FrontierResult, file: TextIO | None = None, *, written: str | None = None, details: bool = False
) -> None:
    """Print the answer, the plot unless there are only a few points, a table, and notes.

    Args:
        report: what was found.
        file: where to print; stdout without it.
        written: the file of the chosen plan, if there is one.
        details: up to 24 points in the table, instead of 8.
    """
    console = console_for(file)
    print_frontier_answer(report, written, file)
    if len(report.points) >= _LEAST_PLOTTED:
        console.print("\n".join(_plot(report.points, console.width)), markup=False)
    print_points(report, file, details=details)


def print_points(report: FrontierResult, file: TextIO | None = None, *, details: bool = False) -> None:
    """Print the points as a table, and notes: up to 24 points with ``details``, else 8."""
    console = console_for(file)
    shown = _shown(report.points, _MOST_ROWS if details else _FEW_ROWS)
    console.print(*_tables(report, shown, console.width), sep="\n")
    print_notes((*_notes(report, shown, details=details), *report.notes), file)


def _notes(report: FrontierResult, shown: Sequence[tuple[int, FrontierPoint]], *, details: bool) -> Iterator[str]:
    """How many points are not shown, and what brackets and marks in the table mean."""
    if left := len(report.points) - len(shown):
        yield f"{left} more points in between; {'--json has all' if details else '--details shows more, --json all'}"
    between = sorted({point.unprofiled for _, point in shown if point.unprofiled})
    for unprofiled in between:
        if not any(unprofiled in other for other in between if other != unprofiled):
            yield f"in brackets, the range if more samples take longer, at most in proportion: {unprofiled}"
    if any(point.bounds_ns is not None and point.bounds_ns[1] is None for _, point in shown):
        yield "no upper end where the profile's own times grow faster than in proportion to samples"
    if any(point.turning_point for _, point in shown):
        yield "knee: beyond it more memory saves little time"
    if any(point.chosen for _, point in shown):
        yield "chosen: the point that -o writes as a plan; --point chooses another"


def _tables(report: FrontierResult, points: Sequence[tuple[int, FrontierPoint]], width: int) -> list[Table]:
    marks = [", ".join(["knee"] * point.turning_point + ["chosen"] * point.chosen) for _, point in points]
    columns = [
        Column("#", [str(number) for number, _ in points], key=True),
        Column("devices", [str(point.num_devices) for _, point in points]),
        Column("memory", [format_bytes(point.memory_bytes) for _, point in points]),
        Column("iteration", [_time(point) for _, point in points]),
        *rate_columns([report.throughput(point) for _, point in points]),
    ]
    if any(point.price_per_hour is not None for _, point in points):
        columns.append(Column("per hour", [_price(point.price_per_hour) for _, point in points]))
        columns.append(Column("per 1000 iter.", [_price(point.price, 1000) for _, point in points]))
    columns.append(Column("", marks, words=True))
    columns.append(Column("how", [point.what for _, point in points], words=True, least=_LEAST_WORDS))
    return tables(columns, width, ["bold" if mark else None for mark in marks])


def _time(point: FrontierPoint) -> str:
    """The time of an iteration; with its range if no size of the profile has its costs."""
    if not point.unprofiled:
        return format_ns(point.time_ns)
    low, high = point.bounds_ns or (0, None)
    between = f"{format_ns(low)} to {format_ns(high)}" if high is not None else f"at least {format_ns(low)}"
    return f"{format_ns(point.time_ns)} ({between if low or high is not None else 'not profiled'})"


def _price(value: float | None, times: int = 1) -> str:
    return "-" if value is None else f"{times * value:.4g}"


def _shown(points: Sequence[FrontierPoint], most: int) -> list[tuple[int, FrontierPoint]]:
    """All with their numbers, or some at even distances with the first, the last and those that are marked."""
    numbered = list(enumerate(points, start=1))
    if len(points) <= most:
        return numbered
    even = {round(index * (len(points) - 1) / (most - 1)) for index in range(most)}
    return [(number, point) for number, point in numbered if number - 1 in even or point.turning_point or point.chosen]


def _plot(points: Sequence[FrontierPoint], width: int) -> Iterator[str]:
    """Time against memory; a digit or letter is the number of devices where there are several, X the knee."""
    labels = {0: format_ns(max(p.time_ns for p in points)), _LINES - 1: format_ns(min(p.time_ns for p in points))}
    margin = max(map(len, labels.values()))
    across = max(_LEAST_COLUMNS, min(_COLUMNS, width - margin - 2))
    counts = sorted({point.num_devices for point in points})
    signs = {count: _DOT if len(counts) == 1 else _SIGNS[i % len(_SIGNS)] for i, count in enumerate(counts)}
    x, y = UnitScale.of([p.memory_bytes for p in points]), UnitScale.of([p.time_ns for p in points])
    cells = [[" "] * across for _ in range(_LINES)]
    for point in sorted(points, key=lambda each: each.turning_point):
        row = _LINES - 1 - round(y.at(point.time_ns) * (_LINES - 1))
        sign = _KNEE if point.turning_point and len(counts) == 1 else signs[point.num_devices]
        cells[row][round(x.at(point.memory_bytes) * (across - 1))] = sign
    for row, line in enumerate(cells):
        yield f"{labels.get(row, ''):>{margin}} |{''.join(line).rstrip()}"
    least, most = (format_bytes(limit(p.memory_bytes for p in points)) for limit in (min, max))
    yield f"{'':{margin}} +{'-' * across}"
    yield f"{'':{margin}}  {least}{most:>{across - len(least)}}"
    if len(counts) > 1:
        yield flowed(", ".join(f"{signs[count]}: {named_devices(count)}" for count in counts), width).plain


@dataclass(frozen=True, slots=True)
class UnitScale:
    """From values to 0..1 between their least and largest."""

    least: int
    width: int

    @classmethod
    def of(cls, values: Sequence[int]) -> UnitScale:
        """From the least to the largest of these."""
        return cls(min(values), max(max(values) - min(values), 1))

    def at(self, value: int) -> float:
        """Where a value lies."""
        return (value - self.least) / self.width


_WIDTH, _HEIGHT, _MARGIN, _LEGEND = 860, 440, 70, 150
_RIGHT, _BOTTOM = _WIDTH - _MARGIN - _LEGEND, _HEIGHT - _MARGIN
_TICKS = 5
_COLOURS = ("#3b6fb6", "#c2571a", "#5f8f3e", "#a8710b", "#7a4a9e", "#c00")

Place = Callable[[FrontierPoint], tuple[float, float]]


def frontier_svg(report: FrontierResult, link: str = "") -> str:
    """The text of an SVG file: a dot with a tooltip per point, knees and the chosen one ringed and named.

    With a ``link``, such as ``#point-``, it is part of a page that has its style, and dots lead to that and their
    number.
    """
    points = report.points
    x, y = UnitScale.of([p.memory_bytes for p in points]), UnitScale.of([p.time_ns for p in points])

    def place(point: FrontierPoint) -> tuple[float, float]:
        across = _MARGIN + x.at(point.memory_bytes) * (_RIGHT - _MARGIN)
        return round(across, 1), round(_BOTTOM - y.at(point.time_ns) * (_BOTTOM - _MARGIN), 1)

    title = f"{report.name}: {report.of}, {report.samples} samples; {report.proved}"
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    begin = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        "<style>text { font: 12px sans-serif; fill: #222 } path { fill: none }</style>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
    ]
    parts = [
        *([f'<svg class="frontier" {size}>'] if link else begin),
        f'<text x="{_MARGIN}" y="24">{xml_text(title)}</text>',
        *_axes(x, y),
        *_lines(points, place, link),
        *_legend(sorted({point.num_devices for point in points})),
        *(_label(point, *place(point)) for point in points if point.turning_point or point.chosen),
    ]
    return "\n".join([*parts, "</svg>", ""])


def _lines(points: Sequence[FrontierPoint], place: Place, link: str) -> Iterator[str]:
    """The points of every number of devices, joined."""
    for index, count in enumerate(sorted({point.num_devices for point in points})):
        colour = _COLOURS[index % len(_COLOURS)]
        own = {number: point for number, point in enumerate(points, 1) if point.num_devices == count}
        line = " ".join(f"{across},{up}" for across, up in map(place, own.values()))
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-opacity=".5"/>'
        for number, point in own.items():
            dot = _dot(point, *place(point), colour)
            yield f'<a href="{link}{number}" aria-label="point {number}">{dot}</a>' if link else dot


def _dot(point: FrontierPoint, across: float, up: float, colour: str) -> str:
    tip = f"{format_bytes(point.memory_bytes)}, {format_ns(point.time_ns)}, {named_devices(point.num_devices)}"
    ring = ' class="ring" stroke="#000" stroke-width="2"' if point.turning_point or point.chosen else ""
    title = f"<title>{xml_text(tip)}: {xml_text(point.what)}</title>"
    return f'<circle cx="{across}" cy="{up}" r="4" fill="{colour}"{ring}>{title}</circle>'


def _label(point: FrontierPoint, across: float, up: float) -> str:
    """What a ringed point is; to its upper right, where no other point of its frontier lies."""
    words = " and ".join(["knee"] * point.turning_point + ["chosen"] * point.chosen)
    figures = f"{format_bytes(point.memory_bytes)}, {format_ns(point.time_ns)}"
    return f'<text x="{across + 8}" y="{up - 8}">{words}: {figures}</text>'


def _legend(counts: Sequence[int]) -> Iterator[str]:
    left = _RIGHT + 24
    for index, count in enumerate(counts):
        up, colour = _MARGIN + 18 * index, _COLOURS[index % len(_COLOURS)]
        yield f'<rect x="{left}" y="{up - 9}" width="10" height="10" fill="{colour}"/>'
        yield f'<text x="{left + 16}" y="{up}">{named_devices(count)}</text>'


def _axes(x: UnitScale, y: UnitScale) -> Iterator[str]:
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
