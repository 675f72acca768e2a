"""What a frontier says: a table, and a plot of time against memory in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeplan.planner.frontier_result import FrontierPoint, FrontierResult
from pipeplan.units import format_bytes, format_ns, named_devices

__all__ = ["Scale", "print_frontier"]

_PLAIN_WIDTH = 120
_MOST_ROWS = 24
_WIDTH, _HEIGHT = 72, 16
_DOT, _TURNING, _SIGNS = "o", "X", "123456789abcdefghijklmn"


def print_frontier(report: FrontierResult, file: TextIO | None = None) -> None:
    """Print a heading, the plot where there is something to see, the table, and notes."""
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=_PLAIN_WIDTH)
    counts = sorted({point.num_devices for point in report.points})
    samples = f"{report.samples} sample{'s' if report.samples != 1 else ''}"
    heading = f": {report.of}, {samples}, {named_devices(*counts)}; {report.proved}"
    console.print(Text.assemble((report.name, "bold"), heading))
    if len(report.points) > 1:
        console.print("\n".join(_plot(report.points)), markup=False)
    shown = _shown(report.points)
    console.print(_table(shown))
    if len(shown) < len(report.points):
        console.print(
            f"{len(report.points) - len(shown)} more points in between, left out here: --json has all", style="dim"
        )
    for note in report.notes:
        console.print(note, style="dim")


def _table(points: Sequence[tuple[int, FrontierPoint]]) -> Table:
    priced = any(point.price_per_hour is not None for _, point in points)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("#", "devices", "memory", "iteration", *(["per hour", "per 1000 iter."] if priced else [])):
        table.add_column(title, justify="right")
    table.add_column("")
    table.add_column("how", overflow="fold")
    for number, point in points:
        marks = ", ".join(["turning point"] * point.turning_point + ["chosen"] * point.chosen)
        prices = (_price(point.price_per_hour), _price(point.price, 1000)) if priced else ()
        row = (str(number), str(point.num_devices), format_bytes(point.memory_bytes), format_ns(point.time_ns), *prices)
        table.add_row(*row, marks, point.what, style="bold" if marks else None)
    return table


def _price(value: float | None, times: int = 1) -> str:
    return "-" if value is None else f"{times * value:.4g}"


def _shown(points: Sequence[FrontierPoint]) -> list[tuple[int, FrontierPoint]]:
    """All with their numbers, or some at even distances with the first, the last and those that are marked."""
    numbered = list(enumerate(points, start=1))
    if len(points) <= _MOST_ROWS:
        return numbered
    even = {round(index * (len(points) - 1) / (_MOST_ROWS - 1)) for index in range(_MOST_ROWS)}
    return [(number, point) for number, point in numbered if number - 1 in even or point.turning_point or point.chosen]


def _plot(points: Sequence[FrontierPoint]) -> Iterator[str]:
    """Time against memory; a digit or letter is the number of devices where there are several, X the turning point."""
    counts = sorted({point.num_devices for point in points})
    signs = {count: _DOT if len(counts) == 1 else _SIGNS[i % len(_SIGNS)] for i, count in enumerate(counts)}
    x, y = Scale.of([p.memory_bytes for p in points]), Scale.of([p.time_ns for p in points])
    cells = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for point in sorted(points, key=lambda each: each.turning_point):
        row = _HEIGHT - 1 - round(y.at(point.time_ns) * (_HEIGHT - 1))
        sign = _TURNING if point.turning_point and len(counts) == 1 else signs[point.num_devices]
        cells[row][round(x.at(point.memory_bytes) * (_WIDTH - 1))] = sign
    labels = {0: format_ns(max(p.time_ns for p in points)), _HEIGHT - 1: format_ns(min(p.time_ns for p in points))}
    margin = max(map(len, labels.values()))
    for row, line in enumerate(cells):
        yield f"{labels.get(row, ''):>{margin}} |{''.join(line).rstrip()}"
    least, most = (format_bytes(limit(p.memory_bytes for p in points)) for limit in (min, max))
    yield f"{'':{margin}} +{'-' * _WIDTH}"
    yield f"{'':{margin}}  {least}{most:>{_WIDTH - len(least)}}"
    if len(counts) > 1:
        yield f"{'':{margin}}  {', '.join(f'{signs[count]}: {named_devices(count)}' for count in counts)}"


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to 0..1 between their least and largest."""

    least: int
    width: int

    @classmethod
    def of(cls, values: Sequence[int]) -> Scale:
        """From the least to the largest of these."""
        return cls(min(values), max(max(values) - min(values), 1))

    def at(self, value: int) -> float:
        """Where a value lies."""
        return (value - self.least) / self.width
