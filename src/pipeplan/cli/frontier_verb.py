"""``pipeplan frontier``: time against memory against devices, for splits of a whole model or for whole plans."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from pipeplan import _api
from pipeplan.cli.output import Outputs, say, say_notes
from pipeplan.cli.shared import (
    BYTES,
    COUNTS,
    DEVICE,
    DURATION,
    FILE,
    FOLDER,
    OneOf,
    RenamedOption,
    Status,
    limited,
    require_folder,
    require_stdout_once,
)
from pipeplan.errors import PipeplanError, UsageError

if TYPE_CHECKING:
    from pipeplan._api import FrontierResult, Mode

_ONLY_SPLITS = {
    "split_level": "--split-level",
    "device": "--device",
    "data_parallel_loading": "--data-parallel-loading",
    "tolerance": "--tolerance",
}
_DEVICES = (
    "Numbers of devices to consider; for --mode min-devices a single number is the maximum.  "
    "[default: the cluster's, and with --plans, profile and min-devices powers of two below]"
)
_MINI_BATCH = (
    "Samples per iteration, on any number of devices.  "
    "[default: the largest profiled size times the most devices; with --plans four times that]"
)
_TIME_LIMIT = (
    "Stop after this long, as Ctrl-C does: with --plans at what was found, else finishing at --tolerance 0.01.  "
    "[default: 60s with --plans]"
)
_MODES = ("all", "min-time", "min-devices", "profile")


@click.command("frontier")
@click.argument("profile_path", type=FILE, metavar="PROFILE")
@click.option("--devices", type=COUNTS, metavar="D,...", help=_DEVICES)
@click.option(
    "--cluster", "cluster_path", type=FILE, metavar="FILE", help="Cluster file: devices, memory, links, prices."
)
@click.option("--memory", type=BYTES, help="Memory limit of each device, such as 16GB.  [default: the cluster's]")
@click.option(
    "--mode",
    type=OneOf(_MODES),
    default="all",
    help="Which points within --memory: all; all, choosing the fastest; those on the fewest devices; or the fastest "
    "for each number of devices.",
)
@click.option("--plans", is_flag=True, help="Whole plans with pipelines, instead of one stage on all devices.")
@click.option(*("--mini-batch", "--global-batch-size", "mini_batch"), type=click.IntRange(min=1), help=_MINI_BATCH)
@click.option(
    "--split-level",
    cls=RenamedOption,
    was=("--grain",),
    type=OneOf(["block", "operator"]),
    default="block",
    help="What is split as a unit: whole blocks, as plans run them, or every operator on its own.",
)
@click.option(
    "--device",
    type=DEVICE,
    metavar="PRESET",
    help="Device to estimate the times of splits for.  [default: the profile's]",
)
@click.option("--data-parallel-loading", is_flag=True, help="Inputs arrive already split by samples over all devices.")
@click.option(
    "--tolerance",
    cls=RenamedOption,
    was=("--within",),
    type=click.FloatRange(min=0),
    default=0.0,
    help="Without --plans: how far points may be from the frontier; 0.01 is 1 % of memory and time, 0 is exact.",
)
@click.option("--time-limit", type=DURATION, help=_TIME_LIMIT)
@click.option(
    "--point",
    type=click.IntRange(min=1),
    metavar="N",
    help="Choose the N-th point shown, for -o; a search that ends early may show other points the next time.",
)
@click.option("--svg", type=FILE, metavar="FILE", help="Draw time against memory as SVG.")
@click.option(
    *("-o", "--output"),
    type=FILE,
    metavar="FILE",
    help="Write the chosen plan; with --mode all, the one at the knee for the most devices.",
)
@click.option(
    "--output-all",
    type=FOLDER,
    metavar="DIRECTORY",
    help="Write the plan of every point shown to a folder: point-1.json, point-2.json ...",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
@click.pass_context
def frontier_command(
    ctx: click.Context,
    profile_path: str,
    devices: tuple[int, ...] | None,
    cluster_path: str | None,
    memory: int | None,
    mode: Mode,
    plans: bool,
    mini_batch: int | None,
    split_level: str,
    device: str | None,
    data_parallel_loading: bool,
    tolerance: float,
    time_limit: int | None,
    point: int | None,
    svg: str | None,
    output: str | None,
    output_all: str | None,
    as_json: bool,
) -> None:
    """Show what PROFILE gains from more memory and devices: all strategies that no other beats in memory and time.

    Without --plans the model is one stage on all devices, and each block is split in its own way. With --plans it may
    be a pipeline, and every point is a plan.
    """
    from pipeplan.reporting.frontier import frontier_svg, print_frontier

    _refuse_idle(ctx, plans)
    if output is not None:
        require_stdout_once(output, as_json)
    writes = "-o" if output is not None else "--output-all" if output_all is not None else None
    if writes is not None and split_level == "operator" and not plans:
        raise UsageError(
            f"{writes} writes plans, and these run whole blocks; leave out --split-level operator, or profile a model "
            "whose blocks are operators, as gpt2-124m-operators"
        )
    splitting = _api.Splitting(
        device=device,
        whole_blocks=split_level == "block",
        data_parallel_loading=data_parallel_loading,
        within=tolerance,
    )
    outputs = Outputs({"-o": output, "--svg": svg})
    request = _api.frontier_request(
        _api.read_profile(profile_path),
        devices=devices,
        cluster=_api.read_cluster(cluster_path) if cluster_path is not None else None,
        memory_bytes=memory,
        mini_batch=mini_batch,
        time_limit=None if time_limit is None else time_limit / 1e9,
        mode=mode,
        splitting=None if plans else splitting,
    )
    if output_all is not None:
        require_folder(output_all, "point-*.json", "--output-all")
    if as_json or output == "-":
        say_notes(_api.request_notes(request))
    with outputs:
        with Status() as progress, limited(request.time_limit) as limit:
            found = _api.frontier(request, mode=mode, point=point, progress=progress, within=limit)
        if svg is not None:
            outputs.write_text(frontier_svg(found), svg)
        if as_json:
            say(json.dumps(found.figures()))
        elif output != "-":
            print_frontier(found, file=sys.stdout)
        if output is not None:  # the table first: it says what there is even where a plan cannot be made
            outputs.write(found.plan(), output)
            if outputs.has(output):
                say(f"pipeplan: {found.written} is in {'stdout' if output == '-' else output}", err=True)
        if output_all is not None:
            _write_all(found, output_all, outputs)


def _write_all(found: FrontierResult, folder: str, outputs: Outputs) -> None:
    """Write the plans of all points that have one, by their numbers. Raises UsageError where some have none."""
    refused, count = [], len(found.points)
    for number in range(1, count + 1):
        try:
            plan = found.plan(number)
        except PipeplanError as error:
            refused.append(f"point {number}: {error}")
        else:
            outputs.write(plan, f"{folder}/point-{number}.json")
    say(f"pipeplan: {count - len(refused)} of {count} points are in {folder}", err=True)
    if refused:
        raise UsageError(f"{len(refused)} of {count} points cannot be written as plans, as {refused[0]}")


def _refuse_idle(ctx: click.Context, plans: bool) -> None:
    """Refuse flags that would have no effect. Raises UsageError."""
    for parameter, flag in _ONLY_SPLITS.items() if plans else ():
        if ctx.get_parameter_source(parameter) is ParameterSource.COMMANDLINE:
            raise UsageError(f"{flag} has no effect with --plans; leave out {flag} or --plans")
