"""A tuning as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeplan.planner.tuning.cells import TuningRow
from pipeplan.units import format_bytes, format_ns

__all__ = ["print_ranking"]

_PLAIN_WIDTH = 160
_SHOWN = 20


def print_ranking(rows: Sequence[TuningRow], file: TextIO | None = None) -> None:
    """Print the first rows as a table, to stdout unless ``file`` is given."""
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=_PLAIN_WIDTH)
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
