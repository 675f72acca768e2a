"""The stages of a plan for people: their blocks, their work, and the device that everything waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeplan.model import Plan
from pipeplan.units import format_bytes, format_ns

__all__ = ["bottleneck", "print_stages"]

_PLAIN_WIDTH = 120
_MAX_STAGES = 32
_MAX_BLOCKS = 4


def print_stages(plan: Plan, file: TextIO | None = None) -> None:
    """Print the blocks and the work of every stage and the bottleneck, to stdout unless ``file`` is given."""
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=_PLAIN_WIDTH)
    console.print(_table(plan))
    console.print(bottleneck(plan))


def bottleneck(plan: Plan) -> str:
    """The device with the most work per micro-batch, its stages, and how far it is above the mean, in one line.

    No schedule takes less time per micro-batch than this device's work.
    """
    work = [0] * len(plan.devices)
    for stage, time in zip(plan.stages, _stage_work(plan), strict=True):
        for device in stage.devices:
            work[device] += time
    device = work.index(max(work))
    stages = [index for index, stage in enumerate(plan.stages) if device in stage.devices]
    name = "stage" if len(stages) == 1 else "stages"
    above = max(work) * len(work) / sum(work) - 1
    return (
        f"bottleneck: {name} {_shortened([str(stage) for stage in stages])} on device {device}, "
        f"{format_ns(max(work))} of work per micro-batch, {above:.1%} above the mean of all devices"
    )


def _stage_work(plan: Plan) -> list[int]:
    """[stage] ns of its operations for one micro-batch, on each of its devices."""
    work = [0] * len(plan.stages)
    for operation in plan.operations:
        work[operation.stage] += operation.duration_ns
    return work


def _table(plan: Plan) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage", justify="right")
    table.add_column("device")
    table.add_column("blocks", overflow="fold")
    table.add_column("work", justify="right")
    table.add_column("parameters", justify="right")
    rows = [
        (
            str(index),
            _shortened([str(device) for device in stage.devices]),
            _shortened(stage.blocks),
            format_ns(work),
            format_bytes(stage.parameter_bytes),
        )
        for index, (stage, work) in enumerate(zip(plan.stages, _stage_work(plan), strict=True))
    ]
    if len(rows) > _MAX_STAGES:
        half = _MAX_STAGES // 2
        rows = [*rows[:half], ("...",) * 5, *rows[-half:]]
    for row in rows:
        table.add_row(*row)
    return table


def _shortened(names: Sequence[str]) -> str:
    """All of a few names, else the first and the last and how many there are."""
    if len(names) <= _MAX_BLOCKS:
        return ", ".join(names)
    return f"{names[0]} .. {names[-1]} ({len(names)})"
