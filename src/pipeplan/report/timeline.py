"""The timeline as rows of characters, one row per device: what is in each cell, without saying how it looks."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from pipeplan.report.figures import odd_stages
from pipeplan.simulate.simulation import Simulation

__all__ = ["Cell", "Window", "device_row", "repetend_time_range", "windows"]


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the run, from ``start_ns`` to ``end_ns``, drawn in ``num_cells`` cells."""

    start_ns: int
    end_ns: int
    num_cells: int

    def cell_of(self, time_ns: int) -> int:
        """The cell boundary nearest to a time, from 0 to ``num_cells``."""
        share = (time_ns - self.start_ns) / (self.end_ns - self.start_ns)
        return min(self.num_cells, max(0, round(share * self.num_cells)))


@dataclass(frozen=True, slots=True)
class Cell:
    """One character of a row: the kind that runs there (None is idle) and a letter or digit of the action, if any."""

    kind: str | None
    text: str = ""


def windows(simulation: Simulation, num_cells: int) -> list[Window]:
    """The whole run if an action of median length keeps a cell; otherwise its beginning, its repetend and its end.

    Without a repetend the middle part is from the middle of the run. In parts, an action of median length has
    room for its label, unless the repetend is longer than that. One cell is left between parts.
    """
    makespan = simulation.rates.makespan_ns
    median = statistics.median(simulation.graph.durations[: simulation.graph.num_actions])
    part_cells = (num_cells - 2) // 3
    length = max(1, round(part_cells * median / len(f"F{simulation.workload.num_microbatches - 1}")))
    repetend = repetend_time_range(simulation)
    if repetend is not None:
        length = max(length, repetend[1] - repetend[0])
    if makespan / median <= num_cells or 3 * length >= makespan:
        return [Window(0, makespan, num_cells)]
    middle = (makespan - length) // 2 if repetend is None else repetend[0]
    middle = min(max(middle, length), makespan - 2 * length)
    return [Window(start, start + length, part_cells) for start in (0, middle, makespan - length)]


def repetend_time_range(simulation: Simulation) -> tuple[int, int] | None:
    """From the first start of the repetend's first copy, for as long as a repetition takes, in ns."""
    if simulation.repetend is None or simulation.copies is None or simulation.period_ns is None:
        return None
    firsts = [order[copy[0]] for order, copy in zip(simulation.orders, simulation.copies, strict=True) if copy]
    start = min(simulation.starts[task] for task in firsts)
    return start, start + round(simulation.period_ns * simulation.repetend.unroll)


def device_row(simulation: Simulation, device: int, window: Window) -> list[Cell]:
    """The cells of one device in a window.

    A cell has the kind that takes most of its time, or is idle if nothing runs for half of it. Where an action
    has the cells, its kind and micro-batch stand at its beginning: ``F12``, or ``f12`` in every second stage of
    the device.
    """
    kinds, odd = _kinds(simulation, device, window), odd_stages(simulation, device)
    texts = [""] * window.num_cells
    graph = simulation.graph
    for task in _inside(simulation, device, window):
        start, end = simulation.starts[task], simulation.starts[task] + graph.durations[task]
        left, right = window.cell_of(start), window.cell_of(end)
        if start < window.start_ns:
            continue
        index = graph.operation_of[task]
        operation = graph.workload.operations[index]
        kind = operation.kind.lower() if operation.stage in odd else operation.kind
        label = f"{kind}{task - graph.offsets[index]}"
        shown = label if right - left >= len(label) else label[: min(1, right - left)]
        for offset, letter in enumerate(shown):
            texts[left + offset] = letter
    return [Cell(kind, text if kind else "") for kind, text in zip(kinds, texts, strict=True)]


def _inside(simulation: Simulation, device: int, window: Window) -> list[int]:
    """Tasks of the device that run in the window."""
    starts, durations = simulation.starts, simulation.graph.durations
    return [
        task
        for task in simulation.orders[device]
        if starts[task] < window.end_ns and starts[task] + durations[task] > window.start_ns
    ]


def _kinds(simulation: Simulation, device: int, window: Window) -> list[str | None]:
    """The kind that prevails in each cell."""
    graph = simulation.graph
    width = (window.end_ns - window.start_ns) / window.num_cells
    taken: list[dict[str, float]] = [{} for _ in range(window.num_cells)]
    for task in _inside(simulation, device, window):
        kind = graph.workload.operations[graph.operation_of[task]].kind
        begin = max(0.0, (simulation.starts[task] - window.start_ns) / width)
        end = min(float(window.num_cells), (simulation.starts[task] + graph.durations[task] - window.start_ns) / width)
        for cell in range(int(begin), min(window.num_cells, int(end) + 1)):
            share = min(end, cell + 1) - max(begin, cell)
            if share > 0:
                taken[cell][kind] = taken[cell].get(kind, 0.0) + share
    return [max(cell, key=cell.__getitem__) if sum(cell.values()) >= 0.5 else None for cell in taken]
