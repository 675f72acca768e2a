"""Results as tables: comparisons of schedules, rankings of an auto-tuning, predicted and measured times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO

from rich.table import Table
from rich.text import Text

from pipeplan.costs.throughput import Throughput, format_rate
from pipeplan.reporting.layout import (
    Column,
    console_for,
    flowed,
    groups_of_equal,
    idle_devices,
    labelled,
    print_notes,
    shared_rows,
    tables,
)
from pipeplan.texts import counted
from pipeplan.units import format_bytes, format_ns, rounded_up
from pipeplan.workload.kinds import is_instruction
from pipeplan.workload.samples import size_in_words

if TYPE_CHECKING:  # a profile is shown without the rooms that plan
    from pipeplan.planning.comparison import Comparison, ComparisonRow
    from pipeplan.planning.tuning_cells import TuningRow
    from pipeplan.simulator.measured_times import DeviceTimes, KindTimes, LoggedComparison, MeasuredComparison
    from pipeplan.simulator.simulation import Simulation

# Comparisons of schedules -----------------------------------------------------------------------------------------


def print_comparison(comparison: Comparison, file: TextIO | None = None) -> None:
    """Print the table and notes on what has no row, to stdout unless ``file`` is given."""
    console = console_for(file)
    memory = {limit for limit in comparison.memory_bytes if limit is not None}
    limits = [format_bytes(limit) for limit in sorted(memory)]
    shares = {row.samples_per_replica for row in comparison.rows}
    replicated = any(row.replicas > 1 for row in comparison.rows)
    per_replica = (min(map(min, shares)), max(map(max, shares))) if replicated else None
    batch = comparison.batch
    samples = (
        counted(comparison.mini_batch, "sample")
        if batch is None
        else f"{counted(batch.num_microbatches, 'micro-batch', 'es')} of "
        f"{size_in_words(batch.microbatch_size, per_replica)}"
    )
    devices = counted(comparison.num_devices, "device")
    limited = f"memory {' or '.join(limits)}" if limits else "no memory limit"
    if reserve := max(comparison.reserve_bytes, default=0):
        limited += f" and {format_bytes(reserve)} in reserve"
    estimated = ", times estimated" if comparison.yardstick.estimated else ""
    heading = Text.assemble((comparison.name, "bold"), f": {devices}, {samples}, {limited}{estimated}")
    idle = idle_devices(comparison.rows[0].idle_devices, comparison.num_devices, console.width, "in the first row ")
    console.print(*idle, flowed(heading, console.width), sep="\n")
    console.print(*_comparison_tables(comparison, console.width), sep="\n")
    print_notes((*_notes(comparison), *comparison.notes), file)


def _notes(comparison: Comparison) -> list[str]:
    """Searches that were too short, what does not fit and how much it needs, and what does not apply anywhere."""
    short = dict.fromkeys(row.placement for row in comparison.rows if row.is_ours and row.cut_short)
    notes = []
    if short:
        notes.append(
            f"cut short: the search on {', '.join(short)} had too little time to look at everything; raise --time-limit"
        )
    notes += _unfit(comparison)
    there = {row.schedule for row in comparison.rows}
    places: dict[tuple[str, str], list[str]] = {}
    for missing in comparison.missing:
        if not missing.reached:
            continue
        if missing.schedule is None:
            notes.append(f"nothing on {missing.placement}: {missing.why}")
        elif missing.schedule not in there:
            known = places.setdefault((missing.schedule, missing.why), [])
            known += [] if missing.placement in known else [missing.placement]
    alike: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for (schedule, why), where in places.items():
        alike.setdefault((tuple(where), why), []).append(schedule)
    notes += [
        f"not applicable on {', '.join(where)}: {', '.join(names)} ({why})" for (where, why), names in alike.items()
    ]
    return [*notes, *_said_of_all(comparison), *_not_reached(comparison), _columns_said(comparison)]


def _columns_said(comparison: Comparison) -> str:
    """What columns are that do not say it themselves."""
    after = any(row.iteration_ns != row.makespan_ns for row in comparison.rows)
    sums = "; after actions: gradient sums, optimizer steps and gathers" if after else ""
    return (
        "bubble rate: idle share of the iteration; by busiest device span: of the device in use longest, from its "
        f"first action to its last{sums}"
    )


def _said_of_all(comparison: Comparison) -> list[str]:
    """The flags that made choices of every row."""
    common = set.intersection(*(set(row.choices.items()) for row in comparison.rows))
    said = [by for name, by in comparison.rows[0].choices.items() if (name, by) in common and by.startswith("--")]
    return [f"in every row by a flag: {'; '.join(dict.fromkeys(said))}"] if said else []


def _not_reached(comparison: Comparison) -> list[str]:
    """What there was no time for, and how long would do.

    A placement may be tried in several layouts: a schedule with a row there, or a placement with any, lacks only the
    others.
    """
    there = {(schedule, row.placement) for row in comparison.rows for schedule in (row.schedule, None)}
    unreached: dict[str, dict[str, None]] = {}
    others: dict[str, dict[str, None]] = {}
    for missing in comparison.missing:
        if not missing.reached:
            some = (missing.schedule, missing.placement) in there
            name = missing.schedule or ("all schedules" if some else "anything")
            (others if some else unreached).setdefault(missing.placement, {})[name] = None
    texts = [*_by_names(unreached), *(f"other layouts of {text}" for text in _by_names(others))]
    if not texts:
        return []
    enough = comparison.enough_seconds
    longer = "" if enough is None else f" to about {rounded_up(math.ceil(enough))}s"
    if comparison.interrupted:
        return [f"not reached before the interruption: {'; '.join(texts)}"]
    return [f"not reached in the time limit: {'; '.join(texts)}; raise --time-limit{longer}"]


def _by_names(found: dict[str, dict[str, None]]) -> list[str]:
    """Schedules on placements, those that are missing on the same placements together."""
    where: dict[tuple[str, ...], list[str]] = {}
    for placement, names in found.items():
        where.setdefault(tuple(names), []).append(placement)
    return [f"{', '.join(names)} on {', '.join(placements)}" for names, placements in where.items()]


def _unfit(comparison: Comparison) -> list[str]:
    """What does not fit, by placement, with the memory of the device that is farthest from having enough."""
    limits = comparison.memory_bytes
    alike = len(set(limits)) == 1
    there = f" ({format_bytes(limits[0] or 0)} per device)" if alike else ""
    needs: dict[str, dict[str, None]] = {}
    for row in comparison.rows:
        if not row.fits:
            over = [
                (peak - limit, peak, f" on device {device} of {format_bytes(limit)}")
                for device, (peak, limit) in enumerate(zip(row.peak_memory_bytes, limits, strict=True))
                if limit is not None
            ]
            _, peak, where = max(over, key=lambda each: each[0])
            text = f"{row.title} needs {format_bytes(peak)}{'' if alike else where} ({format_ns(row.iteration_ns)})"
            needs.setdefault(row.placement, {})[text] = None
    return [f"does not fit on {placement}{there}: {', '.join(texts)}" for placement, texts in needs.items()]


def _comparison_tables(comparison: Comparison, width: int) -> list[Table]:
    """One line for rows that differ in nothing but their names; what all rows have in common has no column.

    What does not fit is in the notes, unless nothing does.
    """
    rows = [row for row in comparison.rows if row.fits] or list(comparison.rows)
    columns = _comparison_columns(comparison, rows)
    groups = groups_of_equal(zip(*(column.cells for column in columns), strict=True))
    titles = [" = ".join(dict.fromkeys(rows[number].title for number in group)) for group in groups]
    columns = [replace(column, cells=[column.cells[group[0]] for group in groups]) for column in columns]
    ours = [any(rows[number].is_ours for number in group) for group in groups]
    named = Column("schedule", titles, words=True, key=True, most=_SCHEDULE_WIDTH)
    return tables([named, *columns], width, ["bold" if own else None for own in ours])


_SCHEDULE_WIDTH = 24


def _comparison_columns(comparison: Comparison, rows: Sequence[ComparisonRow]) -> list[Column]:
    """All columns but the schedule's name."""
    places = [Column("placement", [row.placement for row in rows], words=True, key=True)]
    cuts = [Column("micro-batches", [f"{row.num_microbatches} x {row.microbatch_size}" for row in rows])]
    exposed = [row.exposed_reduction_ns + row.exposed_step_ns + row.exposed_gather_ns for row in rows]
    after = [Column("after actions", [format_ns(ns) for ns in exposed])] if any(exposed) else []
    copies = [Column("replicas", [str(row.replicas) for row in rows])]
    others: list[tuple[str, list[int]]] = [  # what is usual has no column
        ("tp", [row.shards if row.shards > 1 else 0 for row in rows]),
        ("cp", [row.context if row.context > 1 else 0 for row in rows]),
        ("ep", [row.expert if row.expert > 1 else 0 for row in rows]),
        ("etp", [row.expert_shards if row.expert_shards > 1 else 0 for row in rows]),
        ("ZeRO", [row.zero for row in rows]),
        ("in 2 parts", [row.sliced_microbatches for row in rows]),
        ("idle devices", [len(row.idle_devices) for row in rows]),
    ]
    return [
        *(places if len({row.placement for row in rows}) > 1 else []),
        *(cuts if comparison.batch is None else []),
        *(copies if len({row.replicas for row in rows}) > 1 else []),
        *(Column(name, [str(count or "-") for count in counts]) for name, counts in others if any(counts)),
        Column("backward", [_backward(split=row.split_backward, recompute=row.recompute) for row in rows], words=True),
        Column("iteration", [format_ns(row.iteration_ns) for row in rows]),
        *after,
        *rate_columns([comparison.throughput(row) for row in rows]),
        Column("bubble rate", [f"{row.bubble_rate:.2%}" for row in rows]),
        Column("by busiest device span", [f"{row.bubble_rate_span:.2%}" for row in rows]),
        Column("peak memory", [format_bytes(max(row.peak_memory_bytes)) for row in rows]),
        Column("gap", ["-" if row.gap is None else f"{row.gap:.2%}" for row in rows]),
    ]


def rate_columns(found: Sequence[Throughput]) -> list[Column]:
    """What is known of some iterations' throughput; where there is little room, tokens go first, then utilisation."""
    utilisation = [each.model_flops_utilisation for each in found]
    columns = [
        ("samples/s", [each.samples_per_second for each in found], format_rate, 0),
        ("tokens/s", [each.tokens_per_second for each in found], format_rate, 2),
        ("MFU", utilisation, "{:.1%}".format, 1),
    ]
    return [
        Column(title, ["-" if value is None else text(value) for value in values], spare=spare)
        for title, values, text, spare in columns
        if any(value is not None for value in values)
    ]


def _backward(*, split: bool, recompute: bool | str) -> str:
    return ("split" if split else "whole") + (", recomputed" if recompute else "")


def _range(ends: tuple[int, int]) -> str:
    """The least and the most, once where they are equal."""
    return "-".join(map(str, dict.fromkeys(ends)))


_MAX_RANKS = 20


def print_ranking(rows: Sequence[TuningRow], file: TextIO | None = None) -> None:
    """Print the first rows as a table, to stdout unless ``file`` is given."""
    console, shown = console_for(file), rows[:_MAX_RANKS]
    sizes = [("tp", [row.shards for row in shown]), ("cp", [row.context for row in shown])]
    columns = [
        Column("rank", [str(rank) for rank in range(1, len(shown) + 1)], key=True),
        Column("pp", [str(row.depth) for row in shown]),
        Column("dp", [str(row.replicas) for row in shown]),
        *(Column(name, list(map(str, counts))) for name, counts in sizes if max(counts) > 1),
        Column("samples", [str(row.microbatch_size) for row in shown]),
        Column("per replica", [_range(row.samples_per_replica) for row in shown]),
        Column("placement", [row.placement for row in shown], words=True),
        Column("rules", [row.rules for row in shown], words=True),
        Column("backward", [_backward(split=row.split, recompute=row.recompute) for row in shown], words=True),
        Column("iteration", [format_ns(row.iteration_ns) for row in shown]),
        Column("bubble rate", [f"{row.bubble_rate:.2%}" for row in shown]),
        Column("peak memory", [format_bytes(row.peak_memory_bytes) for row in shown]),
    ]
    console.print(*tables(columns, console.width), sep="\n")
    if len(rows) > _MAX_RANKS:
        console.print(f"and {len(rows) - _MAX_RANKS} more", style="dim")


# Measured beside predicted ------------------------------------------------------------------------------------------

_MAX_DEVICES = 15
_MESSAGE_NAMES = {"SEND_F": "send outputs", "RECV_F": "wait for outputs"}
_MESSAGE_NAMES |= {"SEND_B": "send gradients", "RECV_B": "wait for gradients"}


def print_measured(
    simulation: Simulation,
    comparison: MeasuredComparison | LoggedComparison,
    file: TextIO | None = None,
    width: int | None = None,
) -> None:
    """Print the tables, to stdout unless ``file`` is given; ``width`` as in :func:`console_for`."""
    from pipeplan.simulator.measured_times import LoggedComparison

    console = console_for(file, width)
    if isinstance(comparison, LoggedComparison):
        parts = _logged(simulation, comparison, console.width)
    else:
        parts = _measured(simulation, comparison, console.width)
    for part in parts:
        console.print(part)


def _logged(simulation: Simulation, comparison: LoggedComparison, width: int) -> Iterator[Text | Table]:
    """A run of another tool: iterations, and what there is of actions and devices."""
    steps = len(comparison.iterations_ns)
    left = "; first (warm-up) step excluded" if comparison.num_left_out else ""
    text = f": {comparison.tool}, {counted(steps, 'step')} by {comparison.by}{left}"
    yield flowed(Text.assemble((simulation.plan.name, "bold"), text), width)
    least, most = min(comparison.iterations_ns), max(comparison.iterations_ns)
    spread = "" if least == most else f", median of {format_ns(least)} to {format_ns(most)}"
    rows = [
        ("predicted", format_ns(comparison.predicted_ns)),
        ("measured", f"{format_ns(comparison.measured_ns)}  {_percent(comparison.ratio)}{spread}"),
    ]
    for each in comparison.across_ranks:
        for limit, own, found in zip(("least", "most"), each.predicted_ns, each.measured_ns, strict=True):
            if limit == "most" or each.measured_ns[0] < each.measured_ns[1]:
                beside = f"  {_percent(found / own)}" if own else ""
                rows.append(
                    (f"{each.role}, {limit} of all ranks", f"{format_ns(found)}{beside}, predicted {format_ns(own)}")
                )
    yield labelled(rows, width)
    if comparison.kinds:
        yield from _kinds(comparison.kinds, width)
    if comparison.stages:
        yield from _logged_stages(comparison, width)
    if comparison.devices:
        yield from _logged_devices(comparison, width)


def _logged_stages(comparison: LoggedComparison, width: int) -> list[Table]:
    """What an action of each stage takes, beside the prediction."""
    stages = comparison.stages
    return tables(
        [
            Column("stage", [str(each.stage) for each in stages], key=True),
            Column("action", [each.role for each in stages]),
            Column("predicted", [format_ns(each.predicted_ns) for each in stages]),
            Column("measured", [format_ns(each.measured_ns) for each in stages]),
            Column("", [_percent(each.measured_ns / each.predicted_ns) for each in stages]),
        ],
        width,
    )


def _logged_devices(comparison: LoggedComparison, width: int) -> list[Table]:
    """Forward, backward and peak memory of each device that the log names, beside the prediction."""
    devices = comparison.devices
    columns = [Column("device", [str(each.device) for each in devices], key=True)]
    for title in ("forward", "backward", "peak"):
        key, form = ("peak_bytes", format_bytes) if title == "peak" else (f"{title}_ns", format_ns)
        predicted = [getattr(each, f"predicted_{key}") for each in devices]
        found = [getattr(each, key) for each in devices]
        if any(value is not None for value in found):
            beside = list(zip(found, predicted, strict=True))
            name = f"{title}, {comparison.memory}" if title == "peak" else title
            columns += [
                Column(f"{title}, predicted", list(map(form, predicted))),
                Column(name, ["" if value is None else form(value) for value in found]),
                Column("", ["" if value is None or not own else _percent(value / own) for value, own in beside]),
            ]
    return tables(columns, width)


def _measured(simulation: Simulation, comparison: MeasuredComparison, width: int) -> Iterator[Text | Table]:
    """A run of the plan itself."""
    yield flowed(_measured_headline(simulation, comparison), width)
    yield _measured_figures(comparison, width)
    yield from _kinds(comparison.kinds, width)
    yield from _measured_devices(comparison, width)


def _measured_headline(simulation: Simulation, comparison: MeasuredComparison) -> Text:
    steps = len(comparison.iterations_ns)
    how = "emulated" if comparison.emulated else "measured"
    left = "; first (warm-up) step excluded" if comparison.num_left_out else ""
    stretched = "" if comparison.stretch == 1 else _stretched(comparison)
    text = f": {how} in {counted(steps, 'step')}{left}{stretched}"
    return Text.assemble((simulation.plan.name, "bold"), text)


def _stretched(comparison: MeasuredComparison) -> str:
    """A note that the wall clock showed other times than these."""
    clock = format_ns(round(comparison.measured_ns * comparison.stretch))
    return f"; times are the plan's, which the run stretched {comparison.stretch:.3g} times, to {clock} by the clock"


def _measured_figures(comparison: MeasuredComparison, width: int) -> Table:
    least, most = min(comparison.iterations_ns), max(comparison.iterations_ns)
    spread = "" if least == most else f", median of {format_ns(least)} to {format_ns(most)}"
    replayed = f"{_percent(comparison.replayed_ns / comparison.predicted_ns)}, if every action only lasts as measured"
    rows = [
        ("predicted", comparison.predicted_ns, f"bubble rate {comparison.predicted_bubble_rate:.2%}"),
        (
            "measured",
            comparison.measured_ns,
            f"{_percent(comparison.ratio)}, bubble rate {comparison.bubble_rate:.2%}{spread}",
        ),
        ("replayed", comparison.replayed_ns, replayed),
    ]
    wide = max(len(format_ns(time)) for _, time, _ in rows)
    figures = [(name, f"{format_ns(time):{wide}}  {more}") for name, time, more in rows]
    return labelled([*figures, ("verdict", comparison.verdict)], width)


def _kinds(kinds: Sequence[KindTimes], width: int) -> list[Table]:
    columns = [
        Column("kind", [_named(kind.kind) for kind in kinds], words=True, key=True),
        Column("count", [str(kind.count) for kind in kinds]),
        Column("predicted", [format_ns(kind.predicted_ns) for kind in kinds]),
        Column("mean", [format_ns(kind.measured_ns) for kind in kinds]),
        Column("median", [format_ns(kind.median_ns) for kind in kinds]),
        # of messages the two are not the same thing
        Column("mean to predicted", ["" if kind.ratio is None else _percent(kind.ratio) for kind in kinds]),
    ]
    return tables(columns, width)


def _named(kind: str) -> str:
    """A kind in words: of actions, or of messages."""
    if "_" not in kind:
        from pipeplan.reporting.timeline import kind_name  # which simulates; a profile's table does not

        return kind.lower() if is_instruction(kind) else kind_name(kind)
    end, _, payload = kind.partition("_")
    return _MESSAGE_NAMES.get(kind) or f"{'send' if end == 'SEND' else 'wait for'} what {payload} made"


def _measured_devices(comparison: MeasuredComparison, width: int) -> list[Table]:
    busy, idle = ("busy, predicted", "busy", ""), ("idle, predicted", "idle")
    titles = (*busy, "waiting", "sending", "outside", "other", *idle)
    figures = zip(*(_device(comparison, device) for device in comparison.devices), strict=True)
    columns = [Column(title, cells) for title, cells in zip(titles, figures, strict=True)]
    return tables(shared_rows("device", columns, _MAX_DEVICES), width)


def _device(comparison: MeasuredComparison, device: DeviceTimes) -> list[str]:
    busy = device.predicted_busy_ns
    return [
        format_ns(busy),
        format_ns(device.busy_ns),
        _percent(device.busy_ns / busy) if busy else "",
        format_ns(device.waiting_ns),
        format_ns(device.sending_ns),
        format_ns(device.outside_ns),
        format_ns(device.other_ns),
        f"{1 - busy / comparison.predicted_ns:.1%}",
        f"{1 - device.busy_ns / comparison.measured_ns:.1%}",
    ]


def _percent(ratio: float) -> str:
    return f"{ratio - 1:+.1%}"
