"""A plan's sizes as settings of other trainers: text to carry over by hand, not a file they read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TextIO

from pipeplan.reporting.layout import console_for, flowed


def print_settings(settings: Iterable[tuple[str, Sequence[str]]], file: TextIO | None = None) -> None:
    """Print what to set in each trainer, of which there are title and lines; of the plan other lines say the rest."""
    console = console_for(file)
    console.print("what to set in other trainers (sizes; stages are carried over by hand)")
    for title, lines in settings:
        console.print(f"  {title}")
        for line in lines:
            for part in flowed(line, console.width - 6).plain.splitlines():
                console.print(f"      {part}", markup=False)
    console.print()
