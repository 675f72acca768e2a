"""What the benchmarks share: markdown tables, and a line about the machine."""

from __future__ import annotations

import datetime
import os
import platform
import random
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median

__all__ = ["interval", "machine", "markdown", "note"]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as the pages in docs/benchmarks have them."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine() -> str:
    """Processor, cores, versions and date of a measurement."""
    compiled = f"numba {version('numba')}" if find_spec("numba") else "no numba"
    return (
        f"{_processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, ortools {version('ortools')}, "
        f"{compiled}; {datetime.date.today().isoformat()}"
    )


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, by samples drawn again."""
    draws = random.Random(0)
    medians = sorted(median(draws.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]


def note(text: str) -> None:
    """Progress, beside the table."""
    print(text, file=sys.stderr, flush=True)
