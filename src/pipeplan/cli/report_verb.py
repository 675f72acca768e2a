"""``pipeplan report``: plans as a page that people look at, as Markdown for a comment, and as a picture."""

from __future__ import annotations

import click

from pipeplan import _api
from pipeplan.cli.output import Outputs, command_line, say
from pipeplan.cli.shared import FILE, seldom_collected
from pipeplan.errors import UsageError


@click.command("report")
@click.argument("plan_paths", type=FILE, metavar="PLAN...", nargs=-1, required=True)
@click.option(
    "--measured",
    "measured_paths",
    type=FILE,
    multiple=True,
    metavar="FILE",
    help="Show a run of one of the plans beside it: the trace that run --trace wrote, or of one plan what simulate "
    "--measured reads.",
)
@click.option(
    "--frontier",
    "frontier_path",
    type=FILE,
    metavar="FILE",
    help="Show what more memory and more devices bring: what frontier --plans --json printed.",
)
@click.option("--markdown", is_flag=True, help="Print the first screen with a picture of text, for a comment.")
@click.option("--svg", "svg_path", type=FILE, metavar="FILE", help="Write the timelines as SVG; - for stdout.")
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Where to write the page (HTML); - for stdout.")
@seldom_collected()
def report_command(
    plan_paths: tuple[str, ...],
    measured_paths: tuple[str, ...],
    frontier_path: str | None,
    markdown: bool,
    svg_path: str | None,
    output: str | None,
) -> None:
    """Write a report on one to four PLANs: an HTML page that needs no network.

    It has the answer in ten lines, an interactive timeline, what each device waits for, memory, stages, the critical
    path, and the best alternatives that the search kept in the plan. Several plans share one time axis, and so do
    measured runs. One of the files may be - for stdin.
    """
    if output is None and svg_path is None and not markdown:
        raise UsageError("say what to make: -o report.html, --markdown or --svg FILE")
    require_one_stdin([*plan_paths, *measured_paths, frontier_path])
    with Outputs({"-o": output, "--svg": svg_path}) as outputs:
        if markdown and outputs.on_stdout:
            raise UsageError("--markdown prints to stdout as well; give a file instead of -")
        found = _api.report(
            [_api.read_plan(path) for path in plan_paths],
            measured_paths,
            None if frontier_path is None else _api.read_frontier(frontier_path),
            command_line(),
        )
        if svg_path is not None:
            outputs.write_text(found.svg, svg_path)
        if output is not None:
            outputs.write_text(found.html, output)
            outputs.say_written("report", output)
        if markdown:
            _api.write_text(found.markdown, "-")
        for each in found.notes:
            say(f"pipeplan: {each}", err=True, wrap=True)


def require_one_stdin(paths: list[str | None]) -> None:
    """Require that at most one of some files is ``-``. Raises UsageError."""
    if paths.count("-") > 1:
        raise UsageError("only one file can be read from stdin; give a file for the others")
