"""Results and files as HTML for notebooks, with timelines as SVG, and as text: the command line's tables."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterator
from html import escape
from typing import TextIO

from pipeplan.checker import Report
from pipeplan.costs.inspection import Inspection
from pipeplan.files import Cluster, Plan, Profile, to_json
from pipeplan.planning.build_plan import Result
from pipeplan.planning.comparison import Comparison
from pipeplan.planning.frontier import FrontierResult
from pipeplan.planning.tuning import Tuning
from pipeplan.reporting.frontier import frontier_svg, print_frontier
from pipeplan.reporting.tables import print_blocks, print_comparison, print_inspection, print_measured, print_ranking
from pipeplan.reporting.terminal import print_proof, print_simulation, print_stages
from pipeplan.reporting.timeline import timeline_svg
from pipeplan.simulator.simulation import Simulation, simulate

_MOST_DRAWN = 5_000
"""Actions up to which a timeline is drawn: one megabyte of SVG in a notebook's file."""


def html_of(shown: object) -> str:
    """What a notebook shows of an object."""
    return "\n".join(_parts(shown))


def text_of(shown: object) -> str:
    """What ``print`` shows of an object."""
    file = io.StringIO()
    _print(shown, file)
    return file.getvalue().rstrip()


def _print(shown: object, file: TextIO) -> None:
    match shown:
        case Simulation():
            _print_figures(shown, file)
        case Result():
            _print(simulate(shown.plan), file)
            print_proof(shown, file)
        case Tuning():
            print_ranking(shown.rows, file)
            _print(shown.result, file)
        case Comparison():
            print_comparison(shown, file)
        case FrontierResult():
            print_frontier(shown, file)
        case Inspection():
            print_inspection(shown, file)
        case Report():
            file.write("valid" if shown.valid else "\n".join(map(str, shown.problems)))
        case _:
            file.write(repr(shown))


def _parts(shown: object) -> Iterator[str]:
    match shown:
        case Plan():
            yield from _parts(simulate(shown))
        case Simulation():
            if shown.graph.num_actions <= _MOST_DRAWN:
                yield _inline(timeline_svg(shown))
            yield _text(lambda file: _print_figures(shown, file))
        case Result():
            yield from _parts(shown.plan)
            yield _text(lambda file: print_proof(shown, file))
        case Tuning():
            yield _text(lambda file: print_ranking(shown.rows, file))
            yield from _parts(shown.result)
        case Comparison():
            yield _text(lambda file: print_comparison(shown, file))
        case FrontierResult():
            yield _inline(frontier_svg(shown))
            yield _text(lambda file: print_frontier(shown, file))
        case Profile():
            yield _text(lambda file: print_blocks(shown, file))
        case Inspection():
            yield _text(lambda file: print_inspection(shown, file))
        case Cluster():
            yield _pre(to_json(shown))
        case Report():
            yield _pre("valid" if shown.valid else "\n".join(map(str, shown.problems)))
        case _:
            yield _pre(repr(shown))


def _print_figures(simulation: Simulation, file: TextIO) -> None:
    print_simulation(simulation, file)
    print_stages(simulation.workload, file)
    if simulation.measured is not None:
        print_measured(simulation, simulation.measured, file)


def _text(show: Callable[[TextIO], None]) -> str:
    file = io.StringIO()
    show(file)
    return _pre(file.getvalue())


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
