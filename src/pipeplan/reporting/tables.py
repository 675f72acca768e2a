"""Results as tables: comparisons of schedules, rankings of an auto-tuning, profiles, predicted beside measured."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeplan.costs.inspection import SUMMED, Inspection, alike, cautions, counts, operator_shares, sums
from pipeplan.files import CostRow, Profile
from pipeplan.planning.comparison import OURS, Comparison, ComparisonRow
from pipeplan.planning.tuning_cells import TuningRow
from pipeplan.reporting.timeline import kind_name
from pipeplan.simulator.measured import DeviceTimes, MeasuredComparison
from pipeplan.simulator.simulation import Simulation
from pipeplan.units import format_bytes, format_ns
from pipeplan.workload.kinds import is_instruction

_PLAIN_WIDTH = 120


def console_for(file: TextIO | None, width: int | None = None, *, plain_width: int = _PLAIN_WIDTH) -> Console:
    """Where tables go: to ``file``, or stdout without one, at ``width`` columns if given.

    Without a width it is the terminal's, or ``plain_width`` where there is none.
    """
    console = Console(file=file, highlight=False)
    if width is not None or not console.is_terminal:
        console = Console(file=file, highlight=False, width=width or plain_width)
    return console


def new_table(titles: Iterable[str], left: Container[str] = (), *, no_wrap: bool = False) -> Table:
    """A table without rows; columns are justified to the right, but for those named in ``left``."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="left" if title in left else "right", no_wrap=no_wrap)
    return table


def shown_rows(count: int, most: int) -> list[int | None]:
    """All rows, or the first and the last with None for those between."""
    if count <= most:
        return list(range(count))
    half = most // 2
    return [*range(half), None, *range(count - half, count)]


def counted(count: int, noun: str, plural: str = "s") -> str:
    """A number of things in words: ``1 device``, ``2 devices``."""
    return f"{count} {noun}{'' if count == 1 else plural}"


# Comparisons of schedules -----------------------------------------------------------------------------------------


def print_comparison(comparison: Comparison, file: TextIO | None = None) -> None:
    """Print the table and what there is no row for, to stdout unless ``file`` is given."""
    console = console_for(file)
    memory = {limit for limit in comparison.memory_bytes if limit is not None}
    limits = [format_bytes(limit) for limit in sorted(memory)] or ["no limit"]
    console.print(
        Text.assemble(
            (comparison.name, "bold"),
            f": {comparison.num_devices} devices, {comparison.num_microbatches} micro-batches of "
            f"{comparison.microbatch_size}, memory {' or '.join(limits)}",
        )
    )
    console.print(_comparison_table(comparison))
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


def _comparison_table(comparison: Comparison) -> Table:
    """One line per row; what all rows have in common has no column."""
    several = len({row.placement for row in comparison.rows}) > 1
    names = ("schedule", *(["placement"] if several else []), "backward", "fits")
    figures = ("iteration", "bubble rate", "by busiest device span", "peak memory", "gap")
    table = new_table((*names[:-1], *figures, names[-1]), left=names)
    for row in comparison.rows:
        table.add_row(
            row.schedule,
            *([row.placement] if several else []),
            _backward(split=row.split_backward, recompute=row.recompute),
            format_ns(row.makespan_ns),
            f"{row.bubble_rate:.2%}",
            f"{row.bubble_rate_span:.2%}",
            format_bytes(max(row.peak_memory_bytes)),
            "-" if row.gap is None else f"{row.gap:.2%}",
            "yes" if row.fits else "no",
            style="bold" if row.schedule == OURS else None,
        )
    return table


def _backward(*, split: bool, recompute: bool) -> str:
    return ("split" if split else "whole") + (", recomputed" if recompute else "")


_RANKING_WIDTH = 160
_MAX_RANKS = 20


def print_ranking(rows: Sequence[TuningRow], file: TextIO | None = None) -> None:
    """Print the first rows as a table, to stdout unless ``file`` is given."""
    console = console_for(file, plain_width=_RANKING_WIDTH)
    names = ("placement", "rules", "backward")
    table = new_table(("rank", "pp", "dp", "size", *names, "iteration", "bubble rate", "peak memory"), left=names)
    for rank, row in enumerate(rows[:_MAX_RANKS], 1):
        table.add_row(
            *map(str, (rank, row.depth, row.replicas, row.microbatch_size)),
            row.placement,
            row.rules,
            _backward(split=row.split, recompute=row.recompute),
            format_ns(row.iteration_ns),
            f"{row.bubble_rate:.2%}",
            format_bytes(row.peak_memory_bytes),
        )
    console.print(table)
    if len(rows) > _MAX_RANKS:
        console.print(f"and {len(rows) - _MAX_RANKS} more", style="dim")


# Profiles -----------------------------------------------------------------------------------------------------------

_MAX_KINDS = 40
_MAX_CAUTIONS = 12


def print_inspection(inspection: Inspection, file: TextIO | None = None) -> None:
    """Print blocks, sums, shares and warnings, to stdout unless ``file`` is given."""
    console, profile = console_for(file), inspection.profile
    print_blocks(profile, file)
    console.print(_about(profile))
    console.print(_totals(profile))
    if sizes := profile.microbatch_sizes:
        console.print(f"shares at micro-batch size {sizes[-1]}; states are parameters, gradients and optimizer")
        console.print(_shares(profile, sizes[-1]))
    found = cautions(profile, inspection.asked)
    console.print(Text(counted(len(found), "warning") if found else "no warnings", style="bold"))
    for caution in found[:_MAX_CAUTIONS]:
        console.print(Text.assemble(("warning: ", "yellow"), caution.text))
    if len(found) > _MAX_CAUTIONS:
        console.print(f"... and {len(found) - _MAX_CAUTIONS} more; --json has them all")


def print_blocks(profile: Profile, file: TextIO | None = None) -> None:
    """Print where the profile comes from and a row for each kind of block and case, identical blocks folded."""
    table = new_table(
        ("block", "alike", "samples", "forward", "backward", "I", "W", "spread", "held", "for W", "workspace"),
        left=("block",),
    )
    kinds = alike(profile)
    for index in shown_rows(len(kinds), _MAX_KINDS):
        if index is None:
            table.add_row("...", str(len(kinds) - _MAX_KINDS))
            continue
        blocks = kinds[index]
        for row in sorted(blocks[0].costs, key=lambda row: row.key[:2]):
            table.add_row(blocks[0].id, str(len(blocks)), _case(row), *_costs(row))
    console = console_for(file)
    source = profile.source
    origin = " ".join(filter(None, (source.method, f"on {source.device}" if source.device else "", source.reference)))
    console.print(Text.assemble((profile.name, "bold"), f": {', '.join(filter(None, (origin, source.dtype)))}"))
    console.print(table)


def _case(row: CostRow) -> str:
    """What the row is for: samples, and shards, configuration and recomputation where it has them."""
    shards = f"{row.shards} shards" if row.shards > 1 else ""
    recompute = "recompute" if row.recompute else ""
    return " ".join(filter(None, (str(row.microbatch_size), shards, row.configuration, recompute)))


def _costs(row: CostRow) -> list[str]:
    times = (row.forward_ns, row.backward_ns, row.input_grad_ns, row.weight_grad_ns)
    spread = f"{max(row.spread.values()):.1%}" if row.spread else "-"
    sizes = (row.activation_bytes, row.weight_grad_bytes, row.workspace_bytes)
    return [*map(_time, times), spread, *map(format_bytes, sizes)]


def _time(ns: int | None) -> str:
    return "-" if ns is None else format_ns(ns)


def _about(profile: Profile) -> str:
    found = counts(profile)
    return (
        f"{found['num_blocks']} blocks of {found['num_kinds']} kinds, {found['num_edges']} edges, parameters "
        f"{format_bytes(found['parameter_bytes'])}, optimizer {format_bytes(found['optimizer_bytes'])}"
    )


def _totals(profile: Profile) -> Table:
    """Sums over all blocks, a row for each micro-batch size."""
    table = new_table(
        ("all blocks", "forward", "backward", "I", "W", "held", "for W", "largest workspace"), left=("all blocks",)
    )
    for size in profile.microbatch_sizes:
        found = sums(profile, size)
        times = [_time(found[field]) for field in SUMMED[:4]]
        held = [format_bytes(found[field] or 0) for field in (*SUMMED[4:], "workspace_bytes")]
        table.add_row(counted(size, "sample"), *times, *held)
    return table


def _shares(profile: Profile, size: int) -> Table:
    table = new_table(("operator", "blocks", "time", "share", "states", "share", "held", "share"), left=("operator",))
    for share in operator_shares(profile, size):
        table.add_row(
            share.operator,
            str(share.num_blocks),
            format_ns(share.time_ns),
            f"{share.time_share:.1%}",
            format_bytes(share.state_bytes),
            f"{share.state_share:.1%}",
            format_bytes(share.activation_bytes),
            f"{share.activation_share:.1%}",
        )
    return table


# Measured beside predicted ------------------------------------------------------------------------------------------

_MAX_DEVICES = 16
_MESSAGE_NAMES = {"SEND_F": "send outputs", "RECV_F": "wait for outputs"}
_MESSAGE_NAMES |= {"SEND_B": "send gradients", "RECV_B": "wait for gradients"}


def print_measured(
    simulation: Simulation, comparison: MeasuredComparison, file: TextIO | None = None, width: int | None = None
) -> None:
    """Print the tables, to stdout unless ``file`` is given; ``width`` as in :func:`console_for`."""
    console = console_for(file, width)
    for part in (
        _measured_headline(simulation, comparison),
        _measured_figures(comparison),
        _kinds(comparison),
        _measured_devices(comparison),
    ):
        console.print(part)


def _measured_headline(simulation: Simulation, comparison: MeasuredComparison) -> Text:
    steps = len(comparison.iterations_ns)
    how = "emulated" if comparison.emulated else "measured"
    left = "; first (warm-up) step excluded" if comparison.num_left_out else ""
    text = f": {how} in {counted(steps, 'step')}{left}"
    return Text.assemble((simulation.plan.name, "bold"), text)


def _measured_figures(comparison: MeasuredComparison) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row(
        "predicted", format_ns(comparison.predicted_ns), f"bubble rate {comparison.predicted_bubble_rate:.2%}"
    )
    least, most = min(comparison.iterations_ns), max(comparison.iterations_ns)
    spread = "" if least == most else f", median of {format_ns(least)} to {format_ns(most)}"
    table.add_row(
        "measured",
        format_ns(comparison.measured_ns),
        f"{_percent(comparison.ratio)}, bubble rate {comparison.bubble_rate:.2%}{spread}",
    )
    replayed = f"{_percent(comparison.replayed_ns / comparison.predicted_ns)}, if every action only lasts as measured"
    table.add_row("replayed", format_ns(comparison.replayed_ns), replayed)
    return table


def _kinds(comparison: MeasuredComparison) -> Table:
    table = new_table(
        ("kind", "count", "predicted", "mean", "median", "mean to predicted"), left=("kind",), no_wrap=True
    )
    for kind in comparison.kinds:
        table.add_row(
            _named(kind.kind),
            str(kind.count),
            format_ns(kind.predicted_ns),
            format_ns(kind.measured_ns),
            format_ns(kind.median_ns),
            "" if kind.ratio is None else _percent(kind.ratio),  # of messages the two are not the same thing
        )
    return table


def _named(kind: str) -> str:
    """A kind in words: of actions, or of messages."""
    if "_" not in kind:
        return kind.lower() if is_instruction(kind) else kind_name(kind)
    end, _, payload = kind.partition("_")
    return _MESSAGE_NAMES.get(kind) or f"{'send' if end == 'SEND' else 'wait for'} what {payload} made"


def _measured_devices(comparison: MeasuredComparison) -> Table:
    busy, idle = ("busy, predicted", "busy", ""), ("idle, predicted", "idle")
    titles = ("device", *busy, "waiting", "sending", "outside", "other", *idle)
    table = new_table(titles, left=("device",), no_wrap=True)
    for row in shown_rows(len(comparison.devices), _MAX_DEVICES):
        if row is None:
            table.add_row(*["..."] * 10)
        else:
            table.add_row(str(row), *_device(comparison, comparison.devices[row]))
    return table


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
