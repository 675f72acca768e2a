"""A simulation on a terminal or in a text file: figures, devices, stages, timeline and critical path.

Everything can be read without colour: bars carry their kind and micro-batch as text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pipeplan.files import Plan
from pipeplan.planning.build_plan import Result
from pipeplan.reporting.tables import console_for, counted, new_table, shown_rows
from pipeplan.reporting.timeline import (
    TimelineCell,
    TimelineWindow,
    device_row,
    kind_name,
    odd_stages,
    repetend_time_range,
    runs_by_device,
    windows,
)
from pipeplan.schedule.state import scheduler_words
from pipeplan.simulator.simulation import Simulation
from pipeplan.units import format_bytes, format_ns
from pipeplan.workload.elements import Stage
from pipeplan.workload.kinds import MEMORY_KINDS, PARAMETERS, Role, in_order, role_of
from pipeplan.workload.slices import num_sliced

_MAX_STAGES = 32
_MAX_BLOCKS = 4


def print_stages(plan: Plan, file: TextIO | None = None) -> None:
    """Print the blocks and the work of every stage and the bottleneck, to stdout unless ``file`` is given."""
    console = console_for(file)
    console.print(_stage_table(plan))
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


def proof(result: Result) -> str:
    """What is proved of the iteration, for the plan's own placement and for all that was left open; how far it got."""
    counts = result.candidates
    lines = [
        f"proved for this placement: no iteration below {format_ns(result.placement_lower_bound_ns)}"
        f" (gap {result.placement_gap:.2%})",
        f"proved for all that was left open: no iteration below {format_ns(result.lower_bound_ns)}"
        f" (gap {result.gap:.2%})",
    ]
    if result.status == "optimal":
        lines = ["proved optimal: nothing that was left open is quicker"]
    looked = f"{counted(counts.looked_at, 'placement')} looked at, {counts.refuted} of them proved no better"
    ended = "the time limit ended the search" if result.timed_out else "the search came to its end"
    ended = "interrupted" if result.interrupted else ended
    return "\n".join([*lines, f"{looked}, {counts.left} not looked at; {ended}"])


def _stage_table(plan: Plan) -> Table:
    table = new_table(("stage", "device"), left=("device",))
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
            format_bytes(stage.state[PARAMETERS]),
            *([way] if any(ways) else []),
        )
        for index, (stage, work, way) in enumerate(zip(plan.stages, plan.workload.work_of_stages, ways, strict=True))
    ]
    for index in shown_rows(len(rows), _MAX_STAGES):
        table.add_row(*(("...",) * len(rows[0]) if index is None else rows[index]))
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
        (stage.num_parted > 0, f"{stage.num_parted} sliced"),
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


_STYLES = {
    Role.FORWARD: "white on blue",
    Role.BACKWARD: "black on yellow",
    Role.INPUT_GRAD: "black on cyan",
    Role.WEIGHT_GRAD: "white on magenta",
}
_INSTRUCTION_STYLE = "black on green"
_MAX_ROWS = 16
_MAX_TIMELINE_ROWS = 32
_MAX_RUNS = 12


def print_simulation(simulation: Simulation, file: TextIO | None = None, width: int | None = None) -> None:
    """Print the report of a simulation, to stdout unless ``file`` is given.

    ``width`` is in columns; without it, the terminal's, or 120 where there is none.
    """
    console = console_for(file, width)
    for part in report(simulation, console.width, ascii_only=console.options.ascii_only):
        console.print(part)


def report(simulation: Simulation, width: int, *, ascii_only: bool = False) -> list[RenderableType]:
    """The parts of the report, for a console of ``width`` columns."""
    return [
        *_idle_devices(simulation),
        _headline(simulation),
        _figures(simulation),
        *_devices(simulation, width),
        _timeline(simulation, width, "-.:" if ascii_only else "─·┊"),
        Text(),
        _critical_path(simulation, "->" if ascii_only else "→"),
    ]


def _idle_devices(simulation: Simulation) -> list[Text]:
    idle, devices = simulation.workload.idle_devices, simulation.workload.devices
    told = f"{len(idle)} of {counted(len(devices), 'device')} run nothing: {_shortened([*map(str, idle)])}"
    return [Text(told, "bold yellow")] if idle else []


def _headline(simulation: Simulation) -> Text:
    plan, workload = simulation.plan, simulation.workload
    count = workload.num_microbatches
    about = [
        plan.placement,
        counted(len(workload.devices), "device"),
        f"{counted(count, 'micro-batch', 'es')} of {counted(workload.microbatch_size, 'sample')}",
    ]
    if plan.provenance.scheduler:
        about.append(f"scheduler: {scheduler_words(plan.provenance.scheduler)}")
    if workload.splits_backward:
        about.append("backward split")
    return Text.assemble((plan.name, "bold"), ": ", ", ".join(about))


def _figures(simulation: Simulation) -> Table:
    rates, repetend = simulation.rates, simulation.repetend
    table = Table.grid(padding=(0, 2))
    table.add_row("makespan", format_ns(rates.makespan_ns))
    if simulation.iteration_ns > rates.makespan_ns:
        table.add_row("iteration", f"{format_ns(simulation.iteration_ns)}, gradients summed over replicas")
    gap = "which is reached" if simulation.gap == 0 else f"gap {simulation.gap:.2%}"
    table.add_row("lower bound", f"{format_ns(simulation.lower_bound_ns)} for this placement, {gap}")
    if repetend is None:
        table.add_row("repetend", "none")
    else:
        time = None if simulation.period_ns is None else f"{format_ns(simulation.period_ns)} per micro-batch"
        bound = format_ns(simulation.period_lower_bound_ns)
        table.add_row("period", f"{time or 'reaches no steady state'}, bound {bound}")
        table.add_row("repetend", f"unroll {repetend.unroll}, span {repetend.span}")
    table.add_row("bubble rate", f"{rates.bubble_rate:.2%} of the iteration")
    table.add_row("", f"{rates.bubble_rate_span:.2%} by busiest device span")
    if simulation.bubble_rate_steady is not None:
        table.add_row("", f"{simulation.bubble_rate_steady:.2%} steady")
    return table


_Column = tuple[str, list[str]]


def _devices(simulation: Simulation, width: int) -> list[Table]:
    """One table of times and memory; where it is too wide, memory apart, and that in as many tables as it takes."""
    rows = shown_rows(len(simulation.orders), _MAX_ROWS)
    times, memory = _time_columns(simulation), _memory_columns(simulation)
    name: _Column = ("device", [str(device) for device in range(len(simulation.orders))])
    groups = [[*times, *memory]]
    if _width_of([name, *groups[0]]) > width:
        groups = [*_packed(times, width - _width_of([name])), *_packed(memory, width - _width_of([name]))]
    return [_table([name, *columns], rows) for columns in groups]


def _packed(columns: Sequence[_Column], width: int) -> list[list[_Column]]:
    """Columns in groups that fit into a width, a group having at least one."""
    groups: list[list[_Column]] = [[]]
    for column in columns:
        if groups[-1] and _width_of([*groups[-1], column]) > width:
            groups.append([])
        groups[-1].append(column)
    return groups


def _width_of(columns: Sequence[_Column]) -> int:
    """Of a table with these columns, each with a space on both sides and one between."""
    return sum(3 + max(map(len, (title, *values))) for title, values in columns)


def _time_columns(simulation: Simulation) -> list[_Column]:
    rates = simulation.rates
    return [
        ("busy", [format_ns(time) for time in rates.busy_ns]),
        ("idle", [format_ns(time) for time in rates.idle_ns]),
        ("first to last", [format_ns(time) for time in rates.span_ns]),
        ("in flight", [str(count) for count in simulation.in_flight]),
    ]


def _memory_columns(simulation: Simulation) -> list[_Column]:
    """Kinds of which there is nothing anywhere are left out, as is the limit where there is none."""
    columns = []
    for kind in MEMORY_KINDS:
        values = [memory.parts[kind] for memory in simulation.memory]
        if any(values):
            columns.append((kind.name, _sizes(values)))
    columns.append(("peak", _sizes([memory.peak_bytes for memory in simulation.memory])))
    limits = [device.memory_bytes for device in simulation.workload.devices]
    if any(limit is not None for limit in limits):
        columns.append(("limit", ["none" if limit is None else format_bytes(limit) for limit in limits]))
    return columns


def _sizes(values: Sequence[int]) -> list[str]:
    return [format_bytes(value) for value in values]


def _table(columns: Sequence[_Column], rows: Sequence[int | None]) -> Table:
    table = new_table((title for title, _ in columns), no_wrap=True)
    for row in rows:
        table.add_row(*("..." if row is None else values[row] for _, values in columns))
    return table


def _timeline(simulation: Simulation, width: int, marks: str) -> Text:
    """Rows of cells under a ruler, and a legend. ``marks`` are filler, idle and what stands between parts."""
    label = max(6, len(str(len(simulation.orders) - 1)))
    parts = windows(simulation, max(20, width - label - 2))
    text = Text(no_wrap=True, overflow="ignore")
    text.append(_ruler(simulation, parts, label) + "\n", style="dim")
    for device in shown_rows(len(simulation.orders), _MAX_TIMELINE_ROWS):
        if device is None:
            text.append(f"{'...':>{label}}\n")
            continue
        text.append(f"{device:>{label}} ")
        for index, part in enumerate(parts):
            if index:
                text.append(marks[2], style="dim")
            _append_cells(text, device_row(simulation, device, part), marks)
        text.append("\n")
    text.append(" " * (label + 1))
    text.append_text(_legend(simulation, marks))
    if num_sliced(simulation.workload):
        text.append(f"\n{'':{label}} micro-batches in halves: F0.0 and F0.1, or F0 twice where cells are few")
    if any(odd_stages(simulation, device) for device in range(len(simulation.orders))):
        text.append(f"\n{'':{label}} small letters: every second stage of a device")
    return text


def _legend(simulation: Simulation, marks: str) -> Text:
    text = Text()
    for kind in in_order(operation.kind for operation in simulation.workload.operations):
        text.append(kind, style=_STYLES.get(role_of(kind), _INSTRUCTION_STYLE))
        text.append(f" {kind_name(kind)}  ")
    text.append(f"{marks[1]} idle; the number is the micro-batch")
    return text


def _append_cells(text: Text, cells: Sequence[TimelineCell], marks: str) -> None:
    for cell in cells:
        if cell.kind is None:
            text.append(marks[1], style="dim")
        else:
            text.append(cell.text or marks[0], style=_STYLES.get(role_of(cell.kind), _INSTRUCTION_STYLE))


def _ruler(simulation: Simulation, parts: Sequence[TimelineWindow], label: int) -> str:
    """Times where parts begin and where the run ends; brackets around one repetition of the repetend."""
    repetition = repetend_time_range(simulation)
    rulers = []
    for part in parts:
        ruler = list(format_ns(part.start_ns).ljust(part.num_cells)[: part.num_cells])
        if part is parts[-1]:
            end = format_ns(part.end_ns)
            ruler[-len(end) :] = end
        if repetition is not None and part.start_ns <= repetition[0] and repetition[1] <= part.end_ns:
            _bracket(ruler, part.cell_of(repetition[0]), part.cell_of(repetition[1]))
            repetition = None
        rulers.append("".join(ruler))
    return f"{'device':>{label}} " + " ".join(rulers)


def _bracket(ruler: list[str], left: int, right: int) -> None:
    """Write ``[repetend]`` over the cells from left to right, where they are free and wide enough."""
    if right - left < 2 or any(ruler[cell] != " " for cell in range(left, right)):
        return
    inside = right - left - 2
    ruler[left:right] = "[" + "repetend".center(inside)[:inside] + "]" if inside >= 8 else "[" + " " * inside + "]"


def _critical_path(simulation: Simulation, arrow: str) -> Text:
    """How the path's time divides over devices and transfers, and its actions, runs on one device shortened."""
    on_device, transfers = simulation.path_times()
    makespan = simulation.rates.makespan_ns
    longest = sorted(on_device.items(), key=lambda item: (-item[1], item[0]))[:3]
    shares = [f"{time / makespan:.1%} on device {device}" for device, time in longest]
    if len(on_device) > len(longest):
        rest = sum(on_device.values()) - sum(time for _, time in longest)
        shares.append(f"{rest / makespan:.1%} on {counted(len(on_device) - len(longest), 'other device')}")
    if transfers:
        shares.append(f"{transfers / makespan:.1%} in transfers")
    runs = [_run(actions) for _, actions in runs_by_device(simulation)]
    if len(runs) > _MAX_RUNS:
        half = _MAX_RUNS // 2
        runs = [*runs[:half], f"... {len(runs) - _MAX_RUNS} more runs ...", *runs[-half:]]
    messages = sum(step.task >= simulation.graph.num_actions for step in simulation.critical_path)
    count = counted(len(simulation.critical_path) - messages, "action")
    if messages:
        count += f" and {counted(messages, 'message')}"
    summary = f": {count}, {', '.join(shares)}\n"
    return Text.assemble(("critical path", "bold"), summary, "  " + f" {arrow} ".join(runs))


def _run(actions: Sequence[str]) -> str:
    """Actions one after another on a device, as the first and the last."""
    if len(actions) <= 2:
        return " ".join(actions)
    return f"{actions[0]} .. {actions[-1]} ({len(actions)})"
