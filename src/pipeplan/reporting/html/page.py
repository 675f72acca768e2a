"""The page: a template filled with tables, the drawing and its data, and what a browser may do with it.

Nothing from outside is allowed: the page's policy names its one script and its one style by their sha256, so that no
other script runs even if a text of a file got into the page unescaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from pipeplan.planning.frontier import FrontierResult
from pipeplan.reporting.drawing.model import DrawnRun, measured_run, predicted_run
from pipeplan.reporting.drawing.payload import drawing_data
from pipeplan.reporting.drawing.svg import COLOURS, in_figures, page_scale, run_height, stacked
from pipeplan.reporting.frontier import frontier_svg
from pipeplan.reporting.html import figures
from pipeplan.reporting.html.answer import answer, comparison, verdict
from pipeplan.reporting.html.source import ReportSource, ShownPlan
from pipeplan.reporting.html.tables import ReportTable, TableRow, count, ns, size, text
from pipeplan.simulator.simulation import Simulation
from pipeplan.texts import on_one_line
from pipeplan.units import format_ns

MOST_SVG = 4_000
"""Bars up to which the drawing is an SVG; above, a canvas."""

Section = tuple[str, Sequence[ReportTable]]


def page(report: ReportSource) -> str:
    """The text of the HTML file."""
    several = len(report.plans) > 1
    return _rendered(
        "report.html",
        " / ".join(on_one_line(shown.plan.name) for shown in report.plans),
        [run for shown in report.plans for run in _runs(shown)],
        plans=report.plans,
        answers={shown.letter: answer(report, shown) for shown in report.plans},
        verdict=verdict(report.plans) if several else "",
        comparison=comparison(report.plans) if several else None,
        sections={shown.letter: [*_sections(shown)] for shown in report.plans},
        frontier=None if report.frontier is None else _frontier_table(report.frontier),
        frontier_svg="" if report.frontier is None else Markup(frontier_svg(report.frontier, "#point-")),
        command=report.command,
    )


def frame(simulation: Simulation) -> str:
    """A page of the drawing alone, for a frame inside of another page."""
    run = predicted_run(simulation, simulation.plan.name, in_figures(simulation), memory=True)
    return _rendered("frame.html", on_one_line(simulation.plan.name), [run])


_TEMPLATES = {
    "report.html": "html/report.html",
    "frame.html": "drawing/frame.html",
    "drawing.html": "drawing/drawing.html",
}


_SCRIPT = ("drawing/drawing.js", "drawing/svg.js", "drawing/canvas.js", "drawing/data.js", "html/report.js")
"""The page's one script, in parts that a reader can hold in mind."""


def _rendered(template: str, title: str, runs: Sequence[DrawnRun], **parts: Any) -> str:
    """A template filled with a drawing and with parts of its own, every text of which is escaped."""
    script = "".join(map(_read, _SCRIPT))
    style = _colours() + _read("html/report.css")
    loader = DictLoader({name: _read(path) for name, path in _TEMPLATES.items()})
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(
        title=title,
        policy=_policy(script, style),
        style=Markup(style),
        script=Markup(script),
        data=Markup(data_text(drawing_data(runs))),
        drawing=Markup(drawing_markup(runs)),
        **parts,
    )


def _read(name: str) -> str:
    return files("pipeplan.reporting").joinpath(*name.split("/")).read_text(encoding="utf-8")


def _policy(script: str, style: str) -> str:
    """The Content-Security-Policy of a page with these and nothing else."""
    hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in (script, style)]
    return (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; base-uri 'none'; "
        "form-action 'none'"
    )


def _colours() -> str:
    """Colours of bars as variables of the style, so that the canvas has those of the SVG."""
    pairs = (f"--{kind}: {plain}; --{kind}-odd: {odd};" for kind, (plain, odd) in COLOURS.items())
    rules = (
        f".{kind} {{ fill: var(--{kind}); background: var(--{kind}); }} .{kind}.odd {{ fill: var(--{kind}-odd); }}"
        for kind in COLOURS
    )
    return "\n".join([f":root {{ {' '.join(pairs)} }}", *rules, ""])


def data_text(data: dict[str, Any]) -> str:
    """JSON that may stand in a script element, whatever texts it has."""
    found = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return found.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _runs(shown: ShownPlan) -> Iterator[DrawnRun]:
    """The lanes of a plan as predicted, and as measured."""
    simulation = shown.simulation
    yield predicted_run(simulation, shown.name, in_figures(simulation), memory=True, links=True, plan=shown.letter)
    if shown.trace is not None and shown.step is not None and simulation.measured is not None:
        how = "emulated" if shown.trace.emulated else "measured"
        taken = f"step {shown.step} of {len(shown.trace.steps)}; median {format_ns(simulation.measured.measured_ns)}"
        yield measured_run(simulation, shown.trace, shown.step, f"{shown.name}, {how}", taken, shown.letter)


def drawing_markup(runs: Sequence[DrawnRun]) -> str:
    """The SVG of the runs, without its style, or the canvas on which the script draws as many bars."""
    if sum(run.num_bars for run in runs) > MOST_SVG:
        return '<canvas aria-hidden="true"></canvas><div class="space"></div>'
    scale = page_scale(runs)
    height = sum(map(run_height, runs))
    begin = f'<svg class="timeline" aria-hidden="true" width="{scale.width}" height="{height}" '
    return f'{begin}viewBox="0 0 {scale.width} {height}">{"".join(stacked(runs, scale))}</svg>'


def _sections(shown: ShownPlan) -> Iterator[Section]:
    """What is below the timeline, of one plan."""
    yield "Waiting", [figures.waits_table(shown)]
    yield "Computing", [figures.kinds_table(shown)]
    yield "Memory", [figures.memory_table(shown)]
    yield "Stages", [figures.stages_table(shown)]
    links = figures.links_table(shown)
    yield "Critical path", [figures.path_table(shown), *([links] if links is not None else [])]
    if measured := [*figures.measured_tables(shown)]:
        yield "Measured", measured
    if (alternatives := figures.alternatives_table(shown)) is not None:
        yield "Alternatives", [alternatives]
    yield "Provenance", [figures.provenance_table(shown)]


def _frontier_table(frontier: FrontierResult) -> ReportTable:
    rows = [
        TableRow(
            (
                text(number),
                count(point.num_devices),
                size(point.memory_bytes),
                ns(point.time_ns),
                text(", ".join(["knee"] * point.turning_point + ["chosen"] * point.chosen)),
                text(point.what),
            ),
            f"point-{number}",
            point.chosen,
        )
        for number, point in enumerate(frontier.points, 1)
    ]
    head = ("point", "devices", "memory per device", "iteration", "", "how")
    title = f"Frontier of {frontier.name}: {frontier.of}, {frontier.samples} samples; {frontier.proved}"
    note = "pipeplan frontier with the same arguments and --point N -o plan.json writes the plan of a point."
    return ReportTable(title, head, tuple(rows), (note,))
