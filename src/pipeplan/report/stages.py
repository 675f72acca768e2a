"""The stages of a plan for people: their blocks, their work, and the device that everything waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeplan.model import Plan, Stage
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
    totals = [0] * len(plan.devices)
    for operation in plan.operations:
        for device in plan.devices_of(operation.id):
            totals[device] += operation.duration_ns * plan.slots(operation.id).count
    work = [total / plan.num_microbatches for total in totals]
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
    ways = [_way(plan, stage) for stage in plan.stages]
    kinds = {operation.stage: operation.kind for operation in plan.operations}
    if any(ways):
        table.add_column("runs with", overflow="fold")
    rows = [
        (
            str(index),
            _shortened([str(device) for device in stage.devices]),
            _shortened(stage.blocks) if stage.blocks else kinds[index],
            format_ns(work),
            format_bytes(stage.parameter_bytes),
            *([way] if any(ways) else []),
        )
        for index, (stage, work, way) in enumerate(zip(plan.stages, _stage_work(plan), ways, strict=True))
    ]
    if len(rows) > _MAX_STAGES:
        half = _MAX_STAGES // 2
        rows = [*rows[:half], ("...",) * len(rows[0]), *rows[-half:]]
    for row in rows:
        table.add_row(*row)
    return table


def _way(plan: Plan, stage: Stage) -> str:
    """What is special about how a stage runs, in words."""
    words = [
        (stage.shards > 1 and bool(stage.blocks), f"{stage.shards} shards"),
        (bool(stage.configurations), _configurations(stage)),
        (stage.replicas > 1, f"{stage.replicas} replicas"),
        (stage.microbatch_size != plan.microbatch_size, f"micro-batches of {stage.microbatch_size}"),
        (stage.recompute, "recomputation"),
        (plan.num_routes > 1, f"route {stage.route}"),
        (stage.num_parted > 0, f"{stage.num_parted} in halves"),
    ]
    return ", ".join(word for applies, word in words if applies)


def _configurations(stage: Stage) -> str:
    """How many blocks are split in each way."""
    return ", ".join(f"{count} as {text}" for text, count in Counter(stage.configurations).items())


def _shortened(names: Sequence[str]) -> str:
    """All of a few names, else the first and the last and how many there are."""
    if len(names) <= _MAX_BLOCKS:
        return ", ".join(names)
    return f"{names[0]} .. {names[-1]} ({len(names)})"
