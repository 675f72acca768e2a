"""The first screen of a report as Markdown, for a comment on a pull request.

Such comments show neither inline SVG nor ``data:`` addresses, so that the picture is of text: a bar for each device,
whose letters say what most of its time at that moment is. Names from files are escaped, or stand in code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pipeplan.reporting.html.answer import answer, comparison, verdict
from pipeplan.reporting.html.source import ReportSource, ShownPlan
from pipeplan.reporting.html.tables import ReportTable
from pipeplan.reporting.layout import shown_rows
from pipeplan.reporting.timeline import TimelineWindow, device_row
from pipeplan.texts import on_one_line
from pipeplan.units import format_ns
from pipeplan.workload.kinds import is_instruction

_CELLS = 72
_MOST_ROWS = 16
_IDLE = "\u00b7"


def markdown(report: ReportSource) -> str:
    """The first screen of each plan with a picture, and how they compare where there are several."""
    return "\n".join([*_parts(report), ""])


def _parts(report: ReportSource) -> Iterator[str]:
    several = len(report.plans) > 1
    if several:
        yield f"**{_escaped(verdict(report.plans))}**\n"
        yield from _table(comparison(report.plans))
    for shown in report.plans:
        yield f"\n### {_escaped(shown.name if several else shown.plan.name)}\n"
        yield "| | |\n|---|---|"
        for name, words in answer(report, shown):
            said = _code(words) if name == "made by" and words.startswith("pipeplan ") else _escaped(words)
            yield f"| {name} | {said} |"
        yield ""
        yield from _picture(shown)


def _table(table: ReportTable) -> Iterator[str]:
    yield f"| {' | '.join(map(_escaped, table.head))} |"
    yield f"|{'|'.join('---:' if numeric else '---' for numeric in table.numeric)}|"
    for row in table.rows:
        yield f"| {' | '.join(_escaped(cell.text) for cell in row.cells)} |"


def _picture(shown: ShownPlan) -> Iterator[str]:
    """Bars of text in a block of code."""
    simulation = shown.simulation
    window = TimelineWindow(0, simulation.written_ns, _CELLS)
    groups: dict[int, list[int]] = {}
    for device, leader in enumerate(simulation.workload.leaders):
        groups.setdefault(leader, []).append(device)
    leaders = list(groups)
    rows = shown_rows(len(leaders), _MOST_ROWS)
    names = [
        "..." if isinstance(row, range) else _name(simulation.workload.playing(groups[leaders[row]])) for row in rows
    ]
    width = max(map(len, names))
    yield "```text"
    for row, name in zip(rows, names, strict=True):
        bars = f"{len(row)} more" if isinstance(row, range) else _bars(shown, leaders[row], window)
        yield f"{name:>{width}} {bars}"
    end = format_ns(simulation.rates.makespan_ns)
    yield f"{'':{width}} 0{end:>{_CELLS - 1}}"
    yield "```\n"
    yield f"{_IDLE} idle, F forward, B backward, I input gradient, W weight gradient, * an instruction"


def _name(devices: Sequence[int]) -> str:
    if len(devices) == 1:
        return f"device {devices[0]}"
    return f"{len(devices)} devices, {devices[0]}.."


def _bars(shown: ShownPlan, device: int, window: TimelineWindow) -> str:
    cells = device_row(shown.simulation, device, window)
    return "".join(_IDLE if cell.kind is None else "*" if is_instruction(cell.kind) else cell.kind for cell in cells)


_SPECIAL = re.compile(r"[\\`*_\[\]<>#|~&@]|(?<=:)//|(?<=www)\.")


def _escaped(words: str) -> str:
    """Text that Markdown shows as it is: no mark-up, no HTML, no link, nobody and nothing that is referred to."""
    return _SPECIAL.sub(lambda found: _ENTITIES.get(found[0], f"\\{found[0]}"), on_one_line(words))


_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;", "@": "&#64;", "//": "&#47;&#47;", ".": "&#46;"}


def _code(words: str) -> str:
    """Text as code, in a table."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", words)), default=0))
    return f"{fence} {on_one_line(words)} {fence}".replace("|", "\\|")
