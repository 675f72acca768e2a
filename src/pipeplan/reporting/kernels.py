"""Which kernel backend runs each block, as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import TextIO

from rich.text import Text

from pipeplan.planning.kernel_choice import GraphLevel, KernelChoice
from pipeplan.reporting.layout import Column, console_for, flowed, more, shown_rows, tables
from pipeplan.texts import counted
from pipeplan.units import format_ns

_MOST_ROWS = 40


def print_choice(choice: KernelChoice, file: TextIO | None = None) -> None:
    """Print what each backend takes for each kind of block, the cover, and the whole model by each backend alone."""
    console, cover = console_for(file), choice.cover
    what = "forward" if choice.profile.is_inference else "forward and backward"
    heading = Text.assemble((choice.profile.name, "bold"), f": {what} of {counted(choice.size, 'sample')}")
    console.print(flowed(heading, console.width))
    console.print(*tables(_of_blocks(choice), console.width), sep="\n")
    console.print(*tables(_of_cover(choice), console.width), sep="\n")
    console.print(*tables(_alone(choice), console.width), sep="\n")
    proved = (
        "no cover of these groups takes less"
        if cover.proved
        else f"every cover takes at least {format_ns(choice.lower_bound_ns)}"
    )
    changes = f"{counted(cover.num_changes, 'change')} of backend at {format_ns(choice.profile.backend_change_ns)} each"
    console.print(flowed(f"cover: {format_ns(cover.total_ns)}, {changes} included; {proved}", console.width))
    if refused := choice.figures()["num_refused"]:
        console.print(flowed(f"refused by backends: {counted(refused, 'group')}; the profile says why", console.width))


def print_graph_level(level: GraphLevel, file: TextIO | None = None) -> None:
    """Print what the graph level's cover was measured to take beside the operator level's, and what it is."""
    console, found = console_for(file), level.found
    counts = Counter(name for _, name in level.groups)
    ran = ", ".join(f"{name} {counted(count, 'group')}" for name, count in counts.items())
    measured = f"measured {format_ns(found.ns)}, the cover above {format_ns(level.operator_ns)}"
    tried = f"{counted(found.curve[-1].measured if found.curve else 1, 'cover')} in"
    texts = [
        f"graph level with {level.library}: {measured} ({level.gain:.2f} times as long); {ran}",
        f"measured {tried} {counted(len(found.curve), 'generation')}, {len(found.failures)} of them refused"
        + ("; interrupted" if found.interrupted else ""),
    ]
    for text in texts:
        console.print(flowed(text, console.width))


def _of_blocks(choice: KernelChoice) -> list[Column]:
    """Blocks that take the same by all backends, as one row."""
    kinds: dict[Hashable, list[str]] = {}
    for id_, times in choice.of_blocks.items():
        kinds.setdefault(tuple(times.values()), []).append(id_)
    rows = shown_rows(len(kinds), _MOST_ROWS)
    known = list(kinds.items())

    def cells(number: int | None) -> list[str]:
        found = []
        for row in rows:
            if isinstance(row, range):
                found.append(more(row) if number is None else "")
            elif number is None:
                ids = known[row][1]
                found.append(ids[0] if len(ids) == 1 else f"{ids[0]} and {len(ids) - 1} like it")
            else:
                times = known[row][0]
                assert isinstance(times, tuple)
                found.append("-" if times[number] is None else format_ns(times[number]))
        return found

    names = [Column(name, cells(number)) for number, name in enumerate(choice.single)]
    return [Column("block", cells(None), words=True, key=True), *names]


def _of_cover(choice: KernelChoice) -> list[Column]:
    """Neighbouring groups of one backend as one row."""
    runs: list[tuple[str, list[str], int, int]] = []
    for match in choice.cover.as_runs(choice.graph):
        if runs and runs[-1][0] == match.backend:
            name, blocks, count, ns = runs.pop()
            runs.append((name, [*blocks, *match.blocks], count + 1, ns + match.ns))
        else:
            runs.append((match.backend, [*match.blocks], 1, match.ns))
    shown = [runs[row] if isinstance(row, int) else row for row in shown_rows(len(runs), _MOST_ROWS)]
    return [
        Column("cover", [_named(each) for each in shown], words=True, key=True),
        Column("backend", ["" if isinstance(each, range) else each[0] for each in shown]),
        Column("groups", ["" if isinstance(each, range) else str(each[2]) for each in shown]),
        Column("time", ["" if isinstance(each, range) else format_ns(each[3]) for each in shown]),
    ]


def _named(run: tuple[str, list[str], int, int] | range) -> str:
    if isinstance(run, range):
        return more(run)
    return run[1][0] if len(run[1]) == 1 else f"{run[1][0]} to {run[1][-1]}"


def _alone(choice: KernelChoice) -> list[Column]:
    best = choice.cover.total_ns
    rows = [("the cover", best), *choice.single.items()]
    return [
        Column("the whole model by", [name for name, _ in rows], words=True, key=True),
        Column("time", ["not all of it" if ns is None else format_ns(ns) for _, ns in rows]),
        Column("over the cover", ["" if ns is None else f"{ns / best:.2f}" if best else "" for _, ns in rows]),
    ]
