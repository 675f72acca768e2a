"""Comparisons of schedules, and rankings of an auto-tuning, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeplan.planning.comparison import OURS, Comparison, ComparisonRow
from pipeplan.planning.tuning_cells import TuningRow
from pipeplan.units import format_bytes, format_ns

__all__ = ["print_comparison", "print_ranking"]


_PLAIN_WIDTH = 120


def print_comparison(comparison: Comparison, file: TextIO | None = None) -> None:
    """Print the table and what there is no row for, to stdout unless ``file`` is given."""
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=_PLAIN_WIDTH)
    memory = {limit for limit in comparison.memory_bytes if limit is not None}
    limits = [format_bytes(limit) for limit in sorted(memory)] or ["no limit"]
    console.print(
        Text.assemble(
            (comparison.name, "bold"),
            f": {comparison.num_devices} devices, {comparison.num_microbatches} micro-batches of "
            f"{comparison.microbatch_size}, memory {' or '.join(limits)}",
        )
    )
    console.print(_table(comparison))
    for note in _notes(comparison):
        console.print(note, style="dim")


def _notes(comparison: Comparison) -> list[str]:
    """Searches that were too short, what does not fit and by how much, and what does not apply anywhere."""
    notes = [
        f"the search on {ours.placement} had too little time: {row.schedule} is shorter; raise --time-limit"
        for ours, row in _missed(comparison)
    ]
    notes += [f"{row.schedule} on {row.placement} does not fit: {row.why}" for row in comparison.rows if not row.fits]
    there = {row.schedule for row in comparison.rows}
    names: dict[str, list[str]] = {}
    for missing in comparison.missing:
        if missing.schedule is None:
            notes.append(f"nothing on {missing.placement}: {missing.why}")
        elif missing.schedule not in there:
            same = names.setdefault(missing.why, [])
            same += [] if missing.schedule in same else [missing.schedule]
    return notes + [f"not applicable: {', '.join(same)} ({why})" for why, same in names.items()]


def _missed(comparison: Comparison) -> list[tuple[ComparisonRow, ComparisonRow]]:
    """The search's rows, each with the best classic schedule of its placement, where that fits and is shorter."""
    first: dict[str, ComparisonRow] = {}
    for row in comparison.rows:
        first.setdefault(row.placement, row)
    return [
        (row, first[row.placement])
        for row in comparison.rows
        if row.schedule == OURS and row.makespan_ns > first[row.placement].makespan_ns
    ]


def _table(comparison: Comparison) -> Table:
    """One line per row; what all rows have in common has no column."""
    several = len({row.placement for row in comparison.rows}) > 1
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("schedule", *(["placement"] if several else []), "backward"):
        table.add_column(title)
    for title in ("iteration", "bubble rate", "by busiest device span", "peak memory", "gap"):
        table.add_column(title, justify="right")
    table.add_column("fits")
    for row in comparison.rows:
        table.add_row(
            row.schedule,
            *([row.placement] if several else []),
            ("split" if row.split_backward else "whole") + (", recomputed" if row.recompute else ""),
            format_ns(row.makespan_ns),
            f"{row.bubble_rate:.2%}",
            f"{row.bubble_rate_span:.2%}",
            format_bytes(max(row.peak_memory_bytes)),
            "-" if row.gap is None else f"{row.gap:.2%}",
            "yes" if row.fits else "no",
            style="bold" if row.schedule == OURS else None,
        )
    return table


_RANKING_WIDTH = 160
_SHOWN = 20


def print_ranking(rows: Sequence[TuningRow], file: TextIO | None = None) -> None:
    """Print the first rows as a table, to stdout unless ``file`` is given."""
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=_RANKING_WIDTH)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("rank", "pp", "dp", "size"):
        table.add_column(title, justify="right")
    for title in ("placement", "rules", "backward"):
        table.add_column(title)
    for title in ("iteration", "bubble rate", "peak memory"):
        table.add_column(title, justify="right")
    for rank, row in enumerate(rows[:_SHOWN], 1):
        table.add_row(
            *map(str, (rank, row.depth, row.replicas, row.microbatch_size)),
            row.placement,
            row.rules,
            ("split" if row.split else "whole") + (", recomputed" if row.recompute else ""),
            format_ns(row.iteration_ns),
            f"{row.bubble_rate:.2%}",
            format_bytes(row.peak_memory_bytes),
        )
    console.print(table)
    if len(rows) > _SHOWN:
        console.print(f"and {len(rows) - _SHOWN} more", style="dim")
