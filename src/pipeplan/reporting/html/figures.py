"""The tables of one plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby, islice

from pipeplan.reporting.html.source import ShownPlan
from pipeplan.reporting.html.tables import ReportTable, TableCell, TableRow, alike, count, ns, share, size, text
from pipeplan.reporting.terminal import stage_way
from pipeplan.reporting.timeline import kind_name
from pipeplan.simulator.measured_times import KindTimes, MeasuredComparison
from pipeplan.simulator.waits import CAUSES
from pipeplan.texts import number_ranges
from pipeplan.units import format_ns
from pipeplan.workload.kinds import MASTER, MEMORY_KINDS, PARAMETERS, in_order, is_instruction
from pipeplan.workload.workload import Workload

_MOST_NAMED = 3
"""Devices that are named as those that another waits for."""

_MOST_BLOCKS = 6


def waits_table(shown: ShownPlan) -> ReportTable:
    """What each device waits for."""
    simulation, rates = shown.simulation, shown.simulation.rates
    idle, first = rates.idle_ns, simulation.workload.first_playing
    rows = [
        (
            ns(rates.busy_ns[device]),
            ns(idle[device]),
            share(idle[device] / (rates.makespan_ns or 1)),
            *(ns(waits.by_cause[cause]) for cause in CAUSES),
            text(_whom({first(other): time for other, time in waits.by_device.items()})),
        )
        for device, waits in enumerate(shown.waits)
    ]
    return ReportTable(
        "What each device waits for, in sum",
        ("device", "busy", "idle", "of the time", *CAUSES, "and for whom"),
        tuple(_device_row(shown, "waits", numbers, cells) for numbers, cells in alike(rows)),
        notes=(
            "; ".join(f"{cause}: {words}" for cause, words in CAUSES.items()) + ". "
            f"The causes add up to the idle time of each device until the last action ends, at "
            f"{format_ns(simulation.rates.makespan_ns)}.",
        ),
    )


def _whom(by_device: dict[int, int]) -> str:
    longest = sorted(by_device.items(), key=lambda each: (-each[1], each[0]))
    named = [f"device {device} ({format_ns(time)})" for device, time in longest[:_MOST_NAMED] if time]
    rest = sum(time for _, time in longest[_MOST_NAMED:])
    return ", ".join([*named, f"others ({format_ns(rest)})"] if rest else named) or "nobody"


def _device_row(shown: ShownPlan, what: str, numbers: Sequence[int], cells: Sequence[TableCell]) -> TableRow:
    """A row of devices that are alike; the first cell shows them in the drawing."""
    name = f"plan-{shown.letter}-{what}-{numbers[0]}"
    shown_as = number_ranges(shown.simulation.workload.playing(numbers))
    return TableRow((TableCell(shown_as, link=f"lane:{shown.letter}:{numbers[0]}"), *cells), name)


def memory_table(shown: ShownPlan) -> ReportTable:
    """What devices hold at their peak, and how many micro-batches are in flight."""
    simulation = shown.simulation
    kinds = [kind for kind in MEMORY_KINDS if any(memory.parts[kind] for memory in simulation.memory)]
    devices = simulation.workload.devices
    rows = [
        (
            count(simulation.in_flight[device]),
            *(size(memory.parts[kind]) for kind in kinds),
            size(memory.peak_bytes),
            size(devices[device].usable_bytes),
            _left(memory.peak_bytes, devices[device].usable_bytes),
        )
        for device, memory in enumerate(simulation.memory)
    ]
    return ReportTable(
        "Memory of each device at its peak",
        ("device", "in flight", *(kind.name for kind in kinds), "peak", "limit", "used"),
        tuple(_device_row(shown, "memory", numbers, cells) for numbers, cells in alike(rows)),
    )


def _left(peak: int, limit: int | None) -> TableCell:
    return text("no limit") if not limit else share(peak / limit)


def stages_table(shown: ShownPlan) -> ReportTable:
    """Blocks and work of every stage."""
    workload = shown.simulation.workload
    kinds = {operation.stage: operation.kind for operation in workload.operations}
    works = workload.work_of_stages
    rows = [
        TableRow(
            (
                TableCell(str(number)),
                text(number_ranges(workload.playing(stage.devices))),
                text(_blocks(stage.blocks) or kinds[number]),
                ns(works[number]),
                size(stage.state[PARAMETERS] or stage.state[MASTER]),
                text(stage_way(workload, stage) or "as it is"),
            ),
            f"plan-{shown.letter}-stage-{number}",
        )
        for number, stage in enumerate(workload.stages)
    ]
    head = ("stage", "devices", "blocks", "work per micro-batch", "parameters", "runs with")
    return ReportTable("Stages and their blocks", head, tuple(rows))


def _blocks(names: Sequence[str]) -> str:
    """All of a few names, else the first and the last and how many there are."""
    if len(names) <= _MOST_BLOCKS:
        return ", ".join(names)
    return f"{names[0]}, {names[1]} .. {names[-1]} ({len(names)} blocks)"


def kinds_table(shown: ShownPlan) -> ReportTable:
    """What each device runs, by kind."""
    simulation = shown.simulation
    workload = simulation.workload
    kinds = in_order(operation.kind for operation in workload.operations)
    rows = []
    for device in range(len(workload.devices)):
        times: Counter[str] = Counter()
        for item in workload.on_resource[device]:
            if item < len(workload.operations):
                times[workload.operations[item].kind] += workload.work_of(item)
        stages = [stage for stage, each in enumerate(workload.stages) if device in each.devices]
        rows.append((text(number_ranges(stages)), *(ns(times[kind]) for kind in kinds)))
    head = ("device", "stages", *(kind if is_instruction(kind) else f"{kind} {kind_name(kind)}" for kind in kinds))
    return ReportTable(
        "What each device computes",
        head,
        tuple(_device_row(shown, "work", numbers, cells) for numbers, cells in alike(rows)),
    )


def links_table(shown: ShownPlan) -> ReportTable | None:
    """Messages between each two devices; None where there are none."""
    simulation = shown.simulation
    sums = _messages(simulation.workload)
    if not sums:
        return None
    rows = alike([count(number), size(total), ns(time), ns(time / number)] for number, total, time in sums.values())
    pairs = list(sums)
    once = " of what is written, where a loop runs more" if simulation.loop is not None else ""
    return ReportTable(
        f"Links: messages from a device to another{once}",
        ("from and to device", "messages", "bytes", "under way", "each"),
        tuple(
            TableRow((text(_pairs(simulation.workload, [pairs[number] for number in numbers])), *cells))
            for numbers, cells in rows
        ),
    )


def _messages(workload: Workload) -> dict[tuple[int, int], list[int]]:
    """[from and to device, or program] how many messages, and the bytes and ns of all."""
    sums: dict[tuple[int, int], list[int]] = {}
    for dependency in workload.dependencies:
        for hop in dependency.hops:
            slots = workload.messages(dependency, hop)
            if not len(slots):
                continue
            found = sums.setdefault((hop.source_device, hop.target_device), [0, 0, 0])
            parted = 2 * slots.num_parted
            for number, sent in ((len(slots) - parted, hop), (parted, hop.part)):
                for at, value in enumerate((1, sent.bytes, sent.duration_ns)):
                    found[at] += number * value
    return sums


def _pairs(workload: Workload, pairs: Sequence[tuple[int, int]]) -> str:
    """Those of all players, as a plan of devices has them: what one dependency sends in each place, then the next."""
    first = dict[tuple[int, int], int]()
    for number, dependency in enumerate(workload.dependencies):
        for hop in dependency.hops:
            first.setdefault((hop.source_device, hop.target_device), number)
    groups = (list(own) for _, own in groupby(pairs, first.__getitem__))
    each = workload.players_each
    all_pairs = ((pair, place) for own in groups for place in range(each) for pair in own)

    def device(end: int, place: int) -> int:
        return workload.players[end].device(place) if workload.players else end

    named = (f"{device(pair[0], at)} to {device(pair[1], at)}" for pair, at in islice(all_pairs, _MOST_BLOCKS))
    more = len(pairs) * each - _MOST_BLOCKS
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


def path_table(shown: ShownPlan) -> ReportTable:
    """How the critical path's time divides over devices and messages."""
    simulation = shown.simulation
    on_device, transfers = simulation.path_times()
    whole = simulation.written_ns or 1
    first = simulation.workload.first_playing
    times = [(f"device {first(device)}", time) for device, time in sorted(on_device.items())]
    times.append(("messages and exchanges", transfers))
    rows = tuple(TableRow((text(name), ns(time), share(time / whole))) for name, time in times)
    return ReportTable("The critical path's time", ("where", "time", "of the path"), rows)


def measured_tables(shown: ShownPlan) -> Iterator[ReportTable]:
    """Predicted beside measured."""
    measured = shown.simulation.measured
    if measured is None:
        return
    rows = [("predicted", float(measured.predicted_ns)), ("measured, the median", float(measured.measured_ns))]
    if isinstance(measured, MeasuredComparison):
        rows.append(("if every action lasts as measured", float(measured.replayed_ns)))
    rows += [(f"step {number}", float(time)) for number, time in enumerate(measured.iterations_ns, 1)]
    cells = (TableRow((text(name), ns(time), _ratio(time / measured.predicted_ns))) for name, time in rows)
    yield ReportTable("The iteration, predicted and measured", ("what", "time", "to predicted"), tuple(cells))
    if measured.kinds:
        yield _kinds(measured.kinds)
    if isinstance(measured, MeasuredComparison):
        yield _devices(shown, measured)


def _ratio(ratio: float) -> TableCell:
    return TableCell(f"{ratio - 1:+.1%}", ratio)


def _kinds(kinds: Sequence[KindTimes]) -> ReportTable:
    rows = [
        TableRow(
            (
                text(kind.kind),
                count(kind.count),
                ns(kind.predicted_ns),
                ns(kind.measured_ns),
                text("") if kind.ratio is None else _ratio(kind.ratio),
            )
        )
        for kind in kinds
    ]
    return ReportTable(
        "Actions and messages, mean of each kind", ("kind", "count", "predicted", "measured", ""), tuple(rows)
    )


def _devices(shown: ShownPlan, measured: MeasuredComparison) -> ReportTable:
    rows = [
        (
            ns(each.predicted_busy_ns),
            ns(each.busy_ns),
            ns(each.waiting_ns),
            ns(each.sending_ns),
            ns(each.outside_ns),
            ns(each.other_ns),
        )
        for each in measured.devices
    ]
    head = ("device", "busy, predicted", "busy", "waiting", "sending", "before and after", "other")
    return ReportTable(
        "Devices, as measured",
        head,
        tuple(_device_row(shown, "measured", numbers, cells) for numbers, cells in alike(rows)),
    )


def alternatives_table(shown: ShownPlan) -> ReportTable | None:
    """What else the search found; None where the plan does not say."""
    found = shown.plan.provenance.alternatives
    if not found:
        return None
    best = found[0].iteration_ns or 1
    rows = [
        TableRow(
            (
                TableCell(f"{number}", None),
                text(each.what),
                ns(each.iteration_ns),
                _ratio(each.iteration_ns / best),
                share(each.uneven_ns / (each.iteration_ns or 1)),
                share(each.waiting_ns / (each.iteration_ns or 1)),
                share(each.ending_ns / (each.iteration_ns or 1)),
                size(each.peak_bytes),
            ),
            marked=number == 1,
        )
        for number, each in enumerate(found, 1)
    ]
    head = ("", "plan", "iteration", "to the best", "uneven stages", "waiting", "after the last action", "peak memory")
    return ReportTable("The best plans of the search that differ", head, tuple(rows))


def provenance_table(shown: ShownPlan) -> ReportTable:
    """What made the plan, and from what."""
    made = shown.plan.provenance
    options = [(name, value) for name, value in made.options.items() if value is not None]
    rows = [
        ("profile", f"{made.profile} (sha256 {made.profile_sha256[:16]}...)" if made.profile_sha256 else made.profile),
        ("cluster", f"sha256 {made.cluster_sha256[:16]}..." if made.cluster_sha256 else "none: links are free"),
        ("times", " ".join(filter(None, (made.method, made.dtype, made.device and f"on {made.device}")))),
        ("scheduler", made.scheduler),
        *((f"chosen: {name.replace('_', ' ')}", by) for name, by in made.choices.items()),
        *((f"option: {name.replace('_', ' ')}", str(value)) for name, value in options),
        ("seed", str(made.seed)),
        ("versions", ", ".join(f"{name} {version}" for name, version in made.versions.items())),
    ]
    given = tuple(TableRow((text(name), text(value))) for name, value in rows if value)
    return ReportTable("What made the plan, and from what", ("what", "value"), given)
