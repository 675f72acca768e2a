"""Predicted against measured, for people."""

from __future__ import annotations

from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pipeplan.reporting.terminal import console_for, shown_rows
from pipeplan.reporting.timeline import kind_name
from pipeplan.simulator.measured import DeviceTimes, KindTimes, MeasuredComparison
from pipeplan.simulator.simulation import Simulation
from pipeplan.units import format_ns
from pipeplan.workload.kinds import is_instruction

__all__ = ["print_comparison"]

_MAX_ROWS = 16
_MESSAGE_NAMES = {"SEND_F": "send outputs", "RECV_F": "wait for outputs"}
_MESSAGE_NAMES |= {"SEND_B": "send gradients", "RECV_B": "wait for gradients"}


def print_comparison(
    simulation: Simulation, comparison: MeasuredComparison, file: TextIO | None = None, width: int | None = None
) -> None:
    """Print the tables, to stdout unless ``file`` is given; ``width`` as in ``print_simulation``."""
    console = console_for(file, width)
    for part in (_headline(simulation, comparison), _figures(comparison), _kinds(comparison), _devices(comparison)):
        console.print(part)


def _headline(simulation: Simulation, comparison: MeasuredComparison) -> RenderableType:
    steps = len(comparison.iterations_ns)
    how = "emulated" if comparison.emulated else "measured"
    left = "; the first one, which warms up, is left out" if comparison.num_left_out else ""
    text = f": {how} in {steps} step{'' if steps == 1 else 's'}{left}"
    return Text.assemble((simulation.plan.name, "bold"), text)


def _figures(comparison: MeasuredComparison) -> Table:
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
    table = _table("kind", "count", "predicted", "mean", "median", "mean to predicted")
    for kind in comparison.kinds:
        table.add_row(
            _named(kind.kind),
            str(kind.count),
            format_ns(kind.predicted_ns),
            format_ns(kind.measured_ns),
            format_ns(kind.median_ns),
            _ratio(kind),
        )
    return table


def _named(kind: str) -> str:
    """A kind in words: of actions, or of messages."""
    if "_" not in kind:
        return kind.lower() if is_instruction(kind) else kind_name(kind)
    end, _, payload = kind.partition("_")
    return _MESSAGE_NAMES.get(kind) or f"{'send' if end == 'SEND' else 'wait for'} what {payload} made"


def _devices(comparison: MeasuredComparison) -> Table:
    shares = ["waiting", "sending", "outside", "other"]
    table = _table("device", "busy, predicted", "busy", "", *shares, "idle, predicted", "idle")
    for row in shown_rows(len(comparison.devices), _MAX_ROWS):
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


def _table(first: str, *others: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, justify="left", no_wrap=True)
    for title in others:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _ratio(kind: KindTimes) -> str:
    """Of messages the two are not the same thing."""
    return "" if kind.ratio is None else _percent(kind.ratio)


def _percent(ratio: float) -> str:
    return f"{ratio - 1:+.1%}"
