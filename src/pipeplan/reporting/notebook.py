"""Results and files as HTML for notebooks, with timelines as SVG, and as the text that the command line prints."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterator
from html import escape
from typing import TextIO

from pipeplan.checker import Report
from pipeplan.costs.inspection import Inspection
from pipeplan.display import Displayed
from pipeplan.errors import in_python
from pipeplan.files import Cluster, Plan, Profile, to_json
from pipeplan.planning.build_plan import Result
from pipeplan.planning.comparison import Comparison
from pipeplan.planning.frontier import FrontierResult
from pipeplan.planning.tuning import Tuning
from pipeplan.reporting.answer import print_answer
from pipeplan.reporting.decoding import print_decoding
from pipeplan.reporting.drawing.svg import timeline_svg
from pipeplan.reporting.frontier import frontier_svg, print_frontier, print_points
from pipeplan.reporting.frontier_answer import print_frontier_answer
from pipeplan.reporting.html.page import MOST_SVG, frame
from pipeplan.reporting.html.report import PlanReport
from pipeplan.reporting.profile import print_blocks, print_inspection
from pipeplan.reporting.tables import print_comparison, print_measured, print_ranking
from pipeplan.reporting.terminal import print_proof, print_simulation, print_stages, print_timeline
from pipeplan.simulator.simulation import Simulation, simulate

_KEEP = "pipeplan.write(result.plan, 'plan.json')"
"""What writes the plan of a search."""

_MOST_FRAMED = 100_000
"""Actions up to which a timeline is drawn, about one megabyte in a notebook's file."""


def html_of(shown: object) -> str:
    """What a notebook shows of an object."""
    return "\n".join(_parts(shown))


def text_of(shown: object) -> str:
    """What the command line prints of an object, with arguments for flags."""
    file = io.StringIO()
    match shown:
        case Plan():
            _print_figures(simulate(shown), file)
        case Simulation():
            _print_figures(shown, file)
        case Result():
            _print_result(shown, file)
        case Tuning():
            _print_result(shown.result, file)
            print_ranking(shown.rows, file)
        case Comparison():
            print_comparison(shown, file)
        case FrontierResult():
            print_frontier(shown, file)
        case Profile():
            print_blocks(shown, file)
        case Inspection():
            print_inspection(shown, file)
        case Cluster():
            file.write(to_json(shown))
        case Report():
            file.write(_verdict(shown))
        case PlanReport():
            file.write(shown.markdown)
        case Displayed():
            file.write("\n".join(shown.lines()))
        case _:
            file.write(repr(shown))
    return "\n".join(line.rstrip() for line in in_python(file.getvalue()).rstrip().splitlines())


def _verdict(report: Report) -> str:
    return "valid" if report.valid else "\n".join(map(str, report.problems))


def _print_result(result: Result, file: TextIO) -> None:
    simulation = simulate(result.plan)
    _print_answer(result, simulation, file)
    if result.decode is None:
        print_timeline(simulation, file)


def _print_answer(result: Result, simulation: Simulation, file: TextIO) -> None:
    """The first screen of the command line, of decode steps their own."""
    if result.decode is not None:
        print_decoding(result, file=file, keep=_KEEP)
    elif result.request is not None:
        print_answer(result.request, result, simulation, file=file, keep=_KEEP)


def _parts(shown: object) -> Iterator[str]:
    match shown:
        case Plan():
            yield from _parts(simulate(shown))
        case Simulation():
            yield from _drawn(shown)
            yield _text(lambda file: _print_figures(shown, file))
        case Result():
            yield from _result(shown)
        case Tuning():
            yield from _result(shown.result)
            yield _folded("ranking", lambda file: print_ranking(shown.rows, file))
        case Comparison():
            yield _text(lambda file: print_comparison(shown, file))
        case FrontierResult():
            yield _text(
                lambda file: print_frontier_answer(
                    shown, None, file, f"pipeplan.write(found.plan({shown.chosen}), 'plan.json')"
                )
            )
            yield _inline(frontier_svg(shown))
            yield _folded("points", lambda file: print_points(shown, file, details=True))
        case Profile():
            yield _text(lambda file: print_blocks(shown, file))
        case Inspection():
            yield _text(lambda file: print_inspection(shown, file))
        case Cluster():
            yield _pre(to_json(shown))
        case Report():
            yield _pre(_verdict(shown))
        case PlanReport():
            yield _framed(shown.html, "report")
        case Displayed():
            yield _pre("\n".join(shown.lines()))
        case _:
            yield _pre(repr(shown))


def _result(result: Result) -> Iterator[str]:
    """The command line's first screen with the timeline drawn, and all its tables folded below."""
    simulation = simulate(result.plan)
    if result.request is not None:
        yield _text(lambda file: _print_answer(result, simulation, file))
    yield from _drawn(simulation)
    yield _folded("devices, stages, critical path", lambda file: _print_figures(simulation, file))
    if result.decode is None:
        yield _folded("what is proved", lambda file: print_proof(result, file))


def _drawn(simulation: Simulation) -> Iterator[str]:
    """The timeline: as SVG, or on a canvas in a frame of its own where that would be too much for one."""
    if simulation.graph.num_actions <= MOST_SVG:
        yield _inline(timeline_svg(simulation))
    elif simulation.graph.num_actions <= _MOST_FRAMED:
        yield _framed(frame(simulation), simulation.plan.name)


def _framed(page: str, title: str) -> str:
    """A page in a frame that may run its script and nothing else."""
    look = 'width="100%" height="640" style="border: 0"'
    return f'<iframe sandbox="allow-scripts" title="{escape(title)}" {look} srcdoc="{escape(page)}"></iframe>'


def _print_figures(simulation: Simulation, file: TextIO) -> None:
    print_simulation(simulation, file)
    print_stages(simulation.workload, file)
    if simulation.measured is not None:
        print_measured(simulation, simulation.measured, file)


def _folded(title: str, show: Callable[[TextIO], None]) -> str:
    return f"<details><summary>{escape(title)}</summary>{_text(show)}</details>"


def _text(show: Callable[[TextIO], None]) -> str:
    file = io.StringIO()
    show(file)
    return _pre(in_python(file.getvalue()))


def _pre(text: str) -> str:
    return f'<pre style="line-height: 1.2; overflow-x: auto">{escape(text.rstrip())}</pre>'


def _inline(svg: str) -> str:
    """An SVG whose style is its own: rules of one on a page hold for all others, so they get a name before them."""
    name = f"pipeplan-{hashlib.sha256(svg.encode()).hexdigest()[:12]}"
    style = re.search(r"<style>(.*?)</style>", svg, re.DOTALL)
    if style is None:
        return svg
    scoped = re.sub(r"(^|\})\s*([^{}]+)\{", lambda rule: f"{rule[1]} {_scoped(rule[2], name)} {{", style[1])
    return svg.replace(style[1], scoped).replace("<svg ", f'<svg id="{name}" ', 1)


def _scoped(selectors: str, name: str) -> str:
    return ", ".join(f"#{name} {each.strip()}" for each in selectors.split(","))
