"""A simulation on a terminal or in a text file: figures, devices, stages, timeline and critical path.

Everything can be read without colour: bars carry their kind and micro-batch as text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from pipeplan.files.profile import EAGER
from pipeplan.planning.alternatives import Explanation
from pipeplan.planning.build_plan import Result
from pipeplan.reporting.decoding import way_of
from pipeplan.reporting.layout import (
    Column,
    console_for,
    flowed,
    groups_of_equal,
    idle_devices,
    labelled,
    more,
    shared_rows,
    shown_rows,
    tables,
)
from pipeplan.reporting.timeline import (
    TimelineCell,
    TimelineWindow,
    device_row,
    kind_name,
    odd_stages,
    repetend_time_range,
    repetend_words,
    runs_by_device,
    windows,
)
from pipeplan.schedule.state import scheduler_words
from pipeplan.simulator.simulation import Simulation
from pipeplan.texts import counted, number_ranges
from pipeplan.units import format_bytes, format_ns
from pipeplan.workload.elements import ONCE, RING, Stage
from pipeplan.workload.kinds import MASTER, MEMORY_KINDS, PARAMETERS, MemoryBytes, Role, in_order, role_of
from pipeplan.workload.samples import size_in_words
from pipeplan.workload.slices import num_sliced, parts_words
from pipeplan.workload.workload import Workload

_MAX_STAGES = 30
_FEW_STAGES = 8
_MAX_BLOCKS = 4


def print_stages(workload: Workload, file: TextIO | None = None) -> None:
    """Print the blocks and the work of every stage and the bottleneck, to stdout unless ``file`` is given."""
    console = console_for(file)
    parts = [*_stage_tables(workload, console.width), *(flowed(line, console.width) for line in _shared(workload))]
    for part in (*parts, flowed(bottleneck(workload), console.width)):
        console.print(part)


def _shared(workload: Workload) -> list[str]:
    """What stages share, a line each: the table counts it with each of them."""
    found = []
    for name in dict.fromkeys(each.name for each in workload.tied):
        entries = [each for each in workload.tied if each.name == name]
        stages = sorted({stage for each in entries for stage in each.stages})
        size = format_bytes(max(_parameters(each.state) * each.parts for each in entries))
        found.append(
            f"stages {number_ranges(stages)} share {name}, {size} of parameters: a device of "
            "several of them keeps what is the same in these once"
        )
    return found


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The device with the most work per micro-batch, in ns, its stages, and how far it is above the mean, as a share.

    No schedule takes less time per micro-batch than this device's work.
    """

    device: int
    stages: tuple[int, ...]
    work_ns: float
    above: float

    @classmethod
    def of(cls, workload: Workload) -> Bottleneck:
        """The busiest device; of equally busy ones the first."""
        totals = [0] * len(workload.devices)
        for item, operation in enumerate(workload.operations):
            for device in workload.resources[item]:
                totals[device] += operation.duration_ns * workload.slots[item].count
        work = [total / workload.num_microbatches for total in totals]
        device = work.index(max(work))
        stages = tuple(index for index, stage in enumerate(workload.stages) if device in stage.devices)
        mean = workload.of_all(totals) / workload.num_microbatches / workload.num_devices
        return cls(device, stages, max(work), max(work) / (mean or 1) - 1)

    @property
    def name(self) -> str:
        """Its stages in words."""
        return f"stage{'s' if len(self.stages) > 1 else ''} {number_ranges(self.stages)}"


def bottleneck(workload: Workload) -> str:
    """The bottleneck in one line."""
    found = Bottleneck.of(workload)
    device = workload.first_playing(found.device)
    return (
        f"bottleneck: {found.name} on device {device}, {format_ns(found.work_ns)} of work per micro-batch, "
        f"{found.above:.1%} above the mean of all devices"
    )


def print_proof(result: Result, file: TextIO | None = None) -> None:
    """Print what is proved of the iteration: for the plan's own placement, for all that was left open; how it ended."""
    counts = result.candidates
    proved = [
        ("on this placement", result.placement_lower_bound_ns, result.placement_gap),
        ("of any plan", result.lower_bound_ns, result.gap),
    ]
    lines = [f"proved: no iteration {what} is below {format_ns(bound)}, gap {gap:.2%}" for what, bound, gap in proved]
    if result.status == "optimal":
        lines = ["proved optimal: nothing that was left open is faster"]
    ended = "the time limit ended the search" if result.timed_out else "none is left to try"
    lines.append(
        f"placements: {counts.looked_at} tried, {counts.refuted} of them ruled out by bounds, "
        f"{'at least ' * counts.at_least}{counts.left} not tried; "
        f"{'the search was interrupted' if result.interrupted else ended}"
    )
    console = console_for(file)
    for line in lines:
        console.print(flowed(line, console.width))


def print_explanation(explanation: Explanation, file: TextIO | None = None) -> None:
    """Print the best different plans with what limits each, and why common layouts are not the best."""
    console = console_for(file)
    console.print("the best different plans, and the parts of each iteration that are no work")
    console.print(_ALTERNATIVES.format("iteration", "longer", "uneven", "bubble", "messages", "sums, step", "memory"))
    for index, each in enumerate(explanation.alternatives):
        first = explanation.alternatives[0].iteration_ns
        parts = [each.uneven_ns, each.bubble_ns, each.messages_ns, each.ending_ns]
        shares = [f"{ns / each.iteration_ns:.1%}" if ns else "" for ns in parts]
        longer = f"{each.iteration_ns / first - 1:+.1%}" if each.iteration_ns > first else ""
        memory = "" if each.memory_bytes is None else f"{each.peak_bytes / each.memory_bytes:.0%}"
        row = _ALTERNATIVES.format(format_ns(each.iteration_ns), longer, *shares, memory)
        mark = bool(explanation.not_first) and index == explanation.returned
        console.print(f"*{row[1:]}" if mark else row, markup=False)
        again = f"; {counted(each.recomputed, 'stage')} recomputed" if each.recomputed else ""
        _print_below(console, f"{each.what}{again}")
    if explanation.not_first:
        marked = "none of these" if explanation.returned is None else "the row with *"
        console.print(flowed(f"* the plan above is {marked}: {explanation.not_first}", console.width))
    if explanation.common:
        console.print("common layouts, and why they are not best")
    for common in explanation.common or ():
        console.print(flowed(f"  {common.what}", console.width))
        _print_below(console, common.why)
    console.print()


_ALTERNATIVES = "{:>11}{:>8}{:>8}{:>8}{:>10}{:>12}{:>8}"
"""A plan's figures under their names."""


def _print_below(console: Console, text: str) -> None:
    """Lines that belong to the one above."""
    for line in flowed(text, console.width - 6).plain.splitlines():
        console.print(f"      {line}", markup=False)


def _parameters(state: MemoryBytes) -> int:
    """Bytes of the copy that computes, or of the one that is cast to it at each use."""
    return state[PARAMETERS] or state[MASTER]


def _stage_tables(workload: Workload, width: int) -> list[Table]:
    """A row for each stage, or for stages that differ only in their devices and the names of their blocks."""
    kinds = {operation.stage: operation.kind for operation in workload.operations}
    stages, works = workload.stages, workload.work_of_stages
    figures = [
        (format_ns(works[index]), format_bytes(_parameters(stage.state)), stage_way(workload, stage))
        for index, stage in enumerate(stages)
    ]
    names = [len(stage.blocks) or kinds[index] for index, stage in enumerate(stages)]
    counts = [len(stage.devices) for stage in stages]
    own = range(len(stages)) if len(stages) <= _FEW_STAGES else [0] * len(stages)
    groups = groups_of_equal(zip(figures, names, counts, own, strict=True))
    rows = [
        (number_ranges(group), _devices_of(workload, group), _blocks_of(workload, group, kinds), *figures[group[0]])
        for group in groups
    ]
    shown = [
        (more(row), *["..."] * 5) if isinstance(row, range) else rows[row] for row in shown_rows(len(rows), _MAX_STAGES)
    ]
    numbers, devices, blocks, work, parameters, ways = zip(*shown, strict=True)
    columns = [
        Column("stage", numbers, key=True),
        Column("device", devices, words=True),
        Column("blocks", blocks, words=True),
        Column("work", work),
        Column("parameters", parameters),
    ]
    if any(way for *_, way in figures):
        columns.append(Column("runs with", ways, words=True))
    return tables(columns, width)


def _devices_of(workload: Workload, stages: Sequence[int]) -> str:
    """All devices of some stages, and how many each has if there is more than one stage with more than one."""
    devices = workload.playing({device for stage in stages for device in workload.stages[stage].devices})
    each = len(workload.stages[stages[0]].devices) * workload.players_each
    return number_ranges(devices) + (f", {each} each" if len(stages) > 1 and each > 1 else "")


def _blocks_of(workload: Workload, stages: Sequence[int], kinds: Mapping[int, str]) -> str:
    """The blocks of a stage; of several how many each has, and where no other comes between, the first and the last."""
    blocks = [workload.stages[stage].blocks for stage in stages]
    if not blocks[0]:
        return kinds[stages[0]]
    if len(stages) == 1:
        return _shortened(blocks[0])
    together = stages[-1] - stages[0] == len(stages) - 1
    return f"{len(blocks[0])} each" + (f", {blocks[0][0]} .. {blocks[-1][-1]}" if together else "")


def stage_way(workload: Workload, stage: Stage) -> str:
    """What is special about how a stage runs, in words; replicas and their samples say the size of micro-batches."""
    other_size = stage.replicas == 1 and stage.microbatch_size != workload.microbatch_size
    words = [
        (stage.shards > 1 and bool(stage.blocks), f"{stage.shards} shards"),
        (bool(stage.configurations), _configurations(stage)),
        (stage.context > 1, f"context {stage.context}{' (ring)' * (stage.context_exchange == RING)}"),
        (stage.expert > 1, f"expert {stage.expert}"),
        (stage.expert_shards > 1, f"expert shards {stage.expert_shards}"),
        (stage.replicas > 1, f"{stage.replicas} replicas of {size_in_words(stage.microbatch_size // stage.replicas)}"),
        (other_size, f"micro-batches of {size_in_words(stage.microbatch_size)}"),
        (stage.sharers > 1, zero_words([stage])),
        (stage.recomputes, stage.recomputed),
        (workload.num_routes > 1, f"route {stage.route}"),
        (stage.num_parted > 0, _first_forwards(stage.num_parted)),
        (bool(stage.cuts), f"in {1 + len(stage.cuts)} parts"),
        (bool(stage.segments), _backends(stage)),
    ]
    return ", ".join(word for applies, word in words if applies)


def _backends(stage: Stage) -> str:
    """Which kernel backend runs how many of a stage's blocks, but for eager torch."""
    counts = Counter[str]()
    for segment in stage.segments:
        counts[segment.backend] += len(segment.blocks)
    del counts[EAGER]
    return ", ".join(f"{count} of {len(stage.blocks)} blocks by {name}" for name, count in counts.items())


def _first_forwards(count: int) -> str:
    """That they run in parts, as AutoPipe slices them."""
    return f"first {f'{count} forwards' if count > 1 else 'forward'} in 2 parts"


def zero_words(stages: Sequence[Stage]) -> str:
    """What replicas of some stages divide, of which the others divide nothing: ``ZeRO 1 over 8 replicas``.

    Where they share sequences, too, it is over copies of the parameters.
    """
    dividing = [stage for stage in stages if stage.sharers > 1]
    if not dividing:
        return ""
    levels, groups = ({getattr(stage, name) for stage in dividing} for name in ("zero", "sharers"))
    level, group = ("-".join(map(str, dict.fromkeys((min(each), max(each))))) for each in (levels, groups))
    found = f"ZeRO {level} over {group} {'copies' if any(stage.context > 1 for stage in dividing) else 'replicas'}"
    every = [
        f"{done} once"
        if min(counts) == ONCE
        else f"{done} with every {one}"
        if {*counts} == {1}
        else f"{done} every {_between(counts)} {more}"
        for done, one, more, counts in (
            ("gathered", "action", "actions", [stage.unshard_every for stage in dividing if stage.unshard_every]),
            (
                "reduced",
                "micro-batch",
                "micro-batches",
                [stage.reduce_every for stage in dividing if stage.reduce_every],
            ),
        )
        if counts
    ]
    return f"{found} ({', '.join(every)})" if every else found


def recomputed_words(stages: Sequence[Stage]) -> str:
    """How many stages recompute, and how much of their blocks where that is not all: ``(5 of 28 blocks)``."""
    some = [again for stage in stages if (again := stage.again) and stage.recomputes]
    if not some:
        return ""
    each = [one for again in some for one in again]
    blocks, cores = each.count(True), each.count("selective")
    parts = [f"{blocks} of {len(each)} blocks"] * (0 < blocks < len(each))
    parts += ["attention" if cores == len(each) else f"attention of {counted(cores, 'block')}"] * bool(cores)
    how = ", ".join(parts)
    return f"{counted(len(some), 'stage')} recomputed{f' ({how})' if how else ''}"


def _between(counts: Sequence[int]) -> str:
    """The least and the most: ``1-8``."""
    ends = dict.fromkeys((min(counts), max(counts)))
    return "-".join("all" if each == ONCE else str(each) for each in ends)


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
_MAX_ROWS = 15
_MAX_TIMELINE_ROWS = 30
_FEW_TIMELINE_ROWS = 6
_MAX_RUNS = 12


def print_simulation(simulation: Simulation, file: TextIO | None = None, width: int | None = None) -> None:
    """Print the report of a simulation, to stdout unless ``file`` is given.

    ``width`` as in :func:`pipeplan.reporting.layout.console_for`.
    """
    console = console_for(file, width)
    for part in report(simulation, console.width, ascii_only=console.options.ascii_only):
        console.print(part)


def report(simulation: Simulation, width: int, *, ascii_only: bool = False) -> list[RenderableType]:
    """The parts of the report, for a console of ``width`` columns."""
    return [
        *idle_devices(simulation.workload.idle_devices, simulation.workload.num_devices, width),
        flowed(_headline(simulation), width),
        labelled(_figures(simulation), width),
        *_devices(simulation, width),
        _timeline(simulation, width, _marks(ascii_only=ascii_only)),
        Text(),
        flowed(_critical_path(simulation, "->" if ascii_only else "→"), width),
        *(flowed(Text(note, "dim"), width) for note in simulation.notes),
    ]


def _headline(simulation: Simulation) -> Text:
    plan, workload = simulation.plan, simulation.workload
    count = workload.num_microbatches
    about = [
        plan.placement,
        counted(workload.num_devices, "device"),
        f"{counted(count, 'micro-batch', 'es')} of {workload.microbatch_words}{parts_words(workload)}",
    ]
    if plan.provenance.scheduler:
        about.append(f"scheduler: {scheduler_words(plan.provenance.scheduler)}")
    if workload.splits_backward:
        about.append("backward split")
    if shared := zero_words(workload.stages):
        about.append(shared)
    recomputed = sum(stage.recomputes for stage in workload.stages)
    if recomputed:
        about.append(f"{counted(recomputed, 'stage')} of {len(workload.stages)} recomputed")
    return Text.assemble((plan.name, "bold"), ": ", ", ".join(about))


def _after_actions(simulation: Simulation) -> str:
    """What of the iteration comes after its last action, in words."""
    tail = simulation.rates.tail
    parts = [
        (tail.exposed_reduction_ns, "summing gradients"),
        (tail.exposed_step_ns, "in the optimizer's step"),
        (tail.exposed_gather_ns, "gathering parameters"),
    ]
    return f"after the last action {', '.join(f'{format_ns(ns)} {what}' for ns, what in parts if ns)}"


def _figures(simulation: Simulation) -> list[tuple[str, str]]:
    rates, repetend = simulation.rates, simulation.repetend
    estimated = ", estimated" if simulation.yardstick.estimated else ""
    rows = [("makespan", f"{format_ns(rates.makespan_ns)}{estimated}")]
    if simulation.iteration_ns > rates.makespan_ns:
        rows.append(("iteration", f"{format_ns(simulation.iteration_ns)}; {_after_actions(simulation)}"))
    rows.append(("throughput", simulation.throughput.words))
    gap = "which is reached" if simulation.gap == 0 else f"gap {simulation.gap:.2%}"
    rows.append(("lower bound", f"{format_ns(simulation.lower_bound_ns)} for this placement, {gap}"))
    if repetend is None:
        rows.append(("repetend", "none"))
    else:
        time = None if simulation.period_ns is None else f"{format_ns(simulation.period_ns)} per micro-batch"
        bound = format_ns(simulation.period_lower_bound_ns)
        rows.append(("period", f"{time or 'reaches no steady state'}, bound {bound}"))
        rows.append(("repetend", f"unroll {repetend.unroll}, span {repetend.span}"))
    if (decode := simulation.plan.decode) is not None and (token_ns := simulation.token_ns) is not None:
        groups = f"{counted(decode.batch, 'request')} in {counted(decode.groups, 'group')}; {way_of(decode.kv)}"
        rows.append(("token", f"{format_ns(token_ns)} from one of a request to its next, of {groups}"))
    if simulation.loop is not None:
        loop, written = simulation.loop, simulation.graph.workload.num_microbatches
        rows.append(("loop", f"{loop.copies:,} times {loop.microbatches}, of {written} micro-batches that are written"))
    rows.append(("bubble rate", f"{rates.bubble_rate:.2%} of the iteration"))
    rows.append(("", f"{rates.bubble_rate_span:.2%} by busiest device span"))
    if simulation.bubble_rate_steady is not None:
        rows.append(("", f"{simulation.bubble_rate_steady:.2%} steady"))
    if choices := simulation.plan.provenance.choices:
        rows.append(("chosen by", "; ".join(f"{name.replace('_', ' ')}: {by}" for name, by in choices.items())))
    return rows


def _devices(simulation: Simulation, width: int) -> list[Table]:
    """Times and memory of devices, alike ones in one row, in one table where it is wide enough."""
    first, *more = _memory_columns(simulation)
    columns = [*_time_columns(simulation), replace(first, apart=True), *more]
    return tables(shared_rows("device", columns, _MAX_ROWS, simulation.workload.playing), width)


def _time_columns(simulation: Simulation) -> list[Column]:
    rates = simulation.rates
    return [
        Column("busy", [format_ns(time) for time in rates.busy_ns]),
        Column("idle", [format_ns(time) for time in rates.idle_ns]),
        Column("first to last", [format_ns(time) for time in rates.span_ns]),
        Column("in flight", [str(count) for count in simulation.in_flight]),
    ]


def _memory_columns(simulation: Simulation) -> list[Column]:
    """Kinds that are zero everywhere are left out, and so are reserve and limit if there is none."""
    columns = []
    for kind in MEMORY_KINDS:
        values = [memory.parts[kind] for memory in simulation.memory]
        if any(values):
            columns.append(Column(kind.name, _sizes(values)))
    columns.append(Column("peak", _sizes([memory.peak_bytes for memory in simulation.memory])))
    devices = simulation.workload.devices
    if any(device.reserve_bytes for device in devices):
        columns.append(Column("reserve", _sizes([device.reserve_bytes for device in devices])))
    limits = [device.usable_bytes for device in devices]
    if any(limit is not None for limit in limits):
        columns.append(Column("limit", ["none" if limit is None else format_bytes(limit) for limit in limits]))
    return columns


def _sizes(values: Sequence[int]) -> list[str]:
    return [format_bytes(value) for value in values]


def print_timeline(simulation: Simulation, file: TextIO | None = None) -> None:
    """Print the timeline of a few devices, and what follows it, to stdout unless ``file`` is given."""
    console = console_for(file)
    marks = _marks(ascii_only=console.options.ascii_only)
    ends = [format_ns(ns) for ns in (simulation.rates.makespan_ns, simulation.iteration_ns)]
    after = f"not drawn: {_after_actions(simulation)}" if ends[0] != ends[1] else ""
    console.print(_timeline(simulation, console.width, marks, _FEW_TIMELINE_ROWS, after))


def _marks(*, ascii_only: bool) -> str:
    """The filler, idle and separator characters of a timeline."""
    return "-.:" if ascii_only else "─·┊"


def _timeline(simulation: Simulation, width: int, marks: str, most: int = _MAX_TIMELINE_ROWS, after: str = "") -> Text:
    """At most ``most`` rows of cells under a ruler, one for devices that run the same at the same time; a legend.

    The legend ends with what comes ``after`` the picture.
    """
    groups = groups_of_equal(map(tuple, simulation.orders))
    rows = shown_rows(len(groups), most)
    own = simulation.workload.playing
    names = [more(row) if isinstance(row, range) else number_ranges(own(groups[row])) for row in rows]
    label = max(6, *map(len, names))
    parts = windows(simulation, max(20, width - label - 2))
    text = Text(no_wrap=True, overflow="ignore")
    ruler, framed = _ruler(simulation, parts, label)
    text.append(ruler + "\n", style="dim")
    for name, row in zip(names, rows, strict=True):
        text.append(f"{name:>{label}} ")
        if not isinstance(row, range):
            for index, part in enumerate(parts):
                if index:
                    text.append(marks[2], style="dim")
                _append_cells(text, device_row(simulation, groups[row][0], part), marks)
        text.append("\n")
    below = [_legend(simulation, marks)]
    if framed:
        below.append(Text("[ ] one round of the pattern that repeats"))
    if len(parts) > 1:
        below.append(Text(f"{marks[2]} time left out: the start, the middle and the end are shown"))
    if num_sliced(simulation.workload):
        below.append(Text("micro-batches in parts: F0.0 and F0.1, or F0 twice where there is no room"))
    if any(odd_stages(simulation, device) for device, *_ in groups):
        below.append(Text("lower case: every other stage of a device"))
    if after:
        below.append(Text(after))
    lines = [line for each in below for line in flowed(each, max(1, width - label - 1)).split("\n")]
    text.append_text(Text("\n").join(Text.assemble(" " * (label + 1), line) for line in lines))
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


def _ruler(simulation: Simulation, parts: Sequence[TimelineWindow], label: int) -> tuple[str, bool]:
    """Times where parts begin and where the run ends, and brackets around one repetition of the repetend, if they fit.

    Returns the line, and whether it has brackets that do not say what they are.
    """
    repetition = repetend_time_range(simulation)
    rulers, unnamed = [], False
    for part in parts:
        start, end = (format_ns(simulation.clock(time)) for time in (part.start_ns, part.end_ns))
        start, end = f"t={start}" if part is parts[0] else start, end if part is parts[-1] else ""
        if len(start) + len(end) >= part.num_cells:  # no room for both
            start = ""
        ruler = list(start + end.rjust(part.num_cells - len(start)))
        if repetition is not None and part.start_ns <= repetition[0] and repetition[1] <= part.end_ns:
            cells = part.cell_of(repetition[0]), part.cell_of(repetition[1])
            unnamed = _bracket(ruler, *cells, repetend_words(simulation)) == ""
            repetition = None
        rulers.append("".join(ruler))
    return f"{'device':>{label}} " + " ".join(rulers), unnamed


def _bracket(ruler: list[str], left: int, right: int, name: str) -> str | None:
    """Write ``[repetend]`` over the cells from left to right, where they are free and wide enough.

    Returns what stands between the brackets; None where there are none.
    """
    if right - left < 2 or any(ruler[cell] != " " for cell in range(left, right)):
        return None
    inside = right - left - 2
    shown = next((each for each in (name, "repetend") if len(each) <= inside), "")
    ruler[left:right] = f"[{shown.center(inside)}]"
    return shown


def _critical_path(simulation: Simulation, arrow: str) -> Text:
    """How the path's time divides over devices and transfers, and its actions, runs on one device shortened."""
    on_device, transfers = simulation.path_times()
    makespan = simulation.written_ns
    longest = sorted(on_device.items(), key=lambda item: (-item[1], item[0]))[:3]
    shares = [
        f"{time / makespan:.1%} on device {simulation.workload.first_playing(device)}" for device, time in longest
    ]
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
    if simulation.loop is not None:
        shares.append("with the loop run once")
    if (master := simulation.master_stage) is not None:
        shares.append(f"master stage {master}")
    summary = f": {count}, {', '.join(shares)}\n"
    return Text.assemble(("critical path", "bold"), summary, "  " + f" {arrow} ".join(runs))


def _run(actions: Sequence[str]) -> str:
    """Actions one after another on a device, as the first and the last."""
    if len(actions) <= 2:
        return " ".join(actions)
    return f"{actions[0]} .. {actions[-1]} ({len(actions)})"
