"""The first lines of a frontier: its fastest and its smallest point, what more devices bring, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.text import Text

from pipeplan.planning.frontier import FrontierPoint, FrontierResult
from pipeplan.reporting.layout import Clause, Row, console_for, fitted, flowed, labelled
from pipeplan.texts import counted
from pipeplan.units import format_bytes, format_ns, named_devices

LINES = 10
"""Lines of the answer where the terminal has at least 80 columns."""

_MOST_COUNTS = 6


def print_frontier_answer(
    found: FrontierResult,
    written: str | None = None,
    file: TextIO | None = None,
    keep: str = "-o plan.json; --point N chooses another",
) -> None:
    """Print the answer, to stdout unless ``file`` is given.

    ``written`` is the chosen plan's file, if there is one; ``keep`` is what would write it.
    """
    console = console_for(file)
    devices = named_devices(*sorted({point.num_devices for point in found.points}))
    heading = f": {found.of}, {counted(found.samples, 'sample')}, {devices}"
    console.print(flowed(Text.assemble((found.name, "bold"), heading), console.width))
    console.print(labelled(fitted(list(_rows(found, written, keep)), console.width, LINES - 1), console.width))
    console.print()


def _rows(found: FrontierResult, written: str | None, keep: str) -> Iterator[Row]:
    points = found.points
    fastest = min(points, key=lambda point: (point.time_ns, point.memory_bytes, point.num_devices))
    smallest = min(points, key=lambda point: (point.memory_bytes, point.time_ns, point.num_devices))
    knees = [point for point in points if point.turning_point and point.num_devices == fastest.num_devices]
    yield "fastest", _point(found, fastest, None, 1)
    if smallest is not fastest:
        yield "smallest", _point(found, smallest, fastest, 2)
    for knee in knees:
        yield "knee", [*_point(found, knee, fastest, 4), ("; more memory saves little time", 5)]
    yield from _devices(points)
    yield from _price(points)
    yield "proved", [(_proved(found), 0)]
    for number, step in enumerate(_next(found, written, keep)[:2]):
        yield "" if number else "next", [(step, 2 * number)]


def _point(found: FrontierResult, point: FrontierPoint, beside: FrontierPoint | None, spare: int) -> list[Clause]:
    """A point's time, memory and rates, and what it is, beside the fastest; ``spare`` is how far the last goes."""
    estimated = "estimated " if found.yardstick.estimated and beside is None else ""
    memory, time = f"{format_bytes(point.memory_bytes)} per device", f"{estimated}{format_ns(point.time_ns)}"
    of = f" on {named_devices(point.num_devices)}"
    rates = found.throughput(point).words
    if beside is None:
        return [
            (f"{time} per iteration{of}, {memory}", 0),
            (f", {rates}" if rates else "", 1),
            (f"; {point.what}", spare),
        ]
    return [
        (f"{memory}{of}, {time}{_slower(point.time_ns / (beside.time_ns or 1))}", 0),
        (f"; {point.what}", spare + 2),
    ]


def _slower(times: float) -> str:
    """How many times as long as the fastest; nothing where it is as fast."""
    if times >= 2:
        return f", {times:.1f} times as long as the fastest"
    return f", {times - 1:.1%} slower than the fastest" if times >= 1.0005 else ""


def _devices(points: Sequence[FrontierPoint]) -> Iterator[Row]:
    """The best time of every number of devices, and how many times as fast that is as the fewest."""
    best: dict[int, int] = {}
    for point in points:
        best[point.num_devices] = min(point.time_ns, best.get(point.num_devices, point.time_ns))
    if len(best) < 2:
        return
    counts = sorted(best)
    shown = counts if len(counts) <= _MOST_COUNTS else [*counts[:2], *counts[2 - _MOST_COUNTS :]]
    first = best[counts[0]]
    texts = [f"{count}: {format_ns(best[count])} ({first / (best[count] or 1):.2f}x)" for count in shown]
    yield "devices", [(", ".join([f"{counts[0]}: {format_ns(first)}", *texts[1:]]), 1)]


def _price(points: Sequence[FrontierPoint]) -> Iterator[Row]:
    priced = [(point.price, point) for point in points if point.price is not None]
    if priced:
        price, point = min(priced, key=lambda each: each[0])
        yield "cheapest", [(f"{1000 * price:.4g} per 1,000 iterations, on {named_devices(point.num_devices)}", 1)]


def _proved(found: FrontierResult) -> str:
    points = counted(len(found.points), "point")
    if found.tried is None:
        return f"{points}, {found.proved}"
    left = " before time ran out" if found.interrupted else ""
    return f"{points}, {found.proved}; {counted(found.tried, 'partition')} tried{left}"


def _next(found: FrontierResult, written: str | None, keep: str) -> list[str]:
    """What to do with the points: write one, look longer, look at pipelines, too."""
    steps = []
    if written is not None:
        steps.append(f"pipeplan simulate {written}: the chosen point, action by action")
    elif found.makes_plans:
        steps.append(f"write the plan of point {found.chosen}: {keep}")
    if found.interrupted:
        steps.append("a longer --time-limit: some partitions were not looked at")
    if found.tried is None:
        steps.append("--plans: pipelines as well, with a plan for every point")
    return steps
