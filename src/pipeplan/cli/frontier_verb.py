"""``pipeplan frontier``: time against memory against devices, for splits of a whole model or for whole plans."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pipeplan import _api
from pipeplan.cli.output import Outputs, failure_as_json, say, say_notes
from pipeplan.cli.shared import (
    BYTES,
    DETERMINISTIC,
    DEVICE,
    DEVICE_COUNTS,
    DURATION,
    EXECUTOR,
    FILE,
    FOLDER,
    LARGE_NUMBER,
    MEMORY_RESERVE,
    PLACED,
    PROFILE_FOR,
    SEED,
    SPARES,
    FiniteRange,
    OneOf,
    RenamedOption,
    Status,
    asked_profile,
    asked_sizes,
    given_file,
    limited,
    recipe_options,
    require_folder,
    require_one_kind_of_workers,
    seldom_collected,
    size_options,
    zero_options,
)
from pipeplan.errors import PipeplanError, UsageError

if TYPE_CHECKING:
    from pipeplan._api import FrontierResult, Mode, Request

_ONLY_SPLITS = {
    "split_level": "--split-level",
    "device": "--device",
    "data_parallel_loading": "--data-parallel-loading",
    "tolerance": "--tolerance",
    "only": "--only",
    "mesh_dimensions": "--mesh-dimensions",
}
_ONLY_PLANS = {
    "profile_for": "--profile-for",
    "shards": "--tp",
    "positions": "--pp",
    "replicas": "--dp",
    "context": "--cp",
    "context_exchange": "--cp-exchange",
    "zero_exchange": "--zero-exchange",
    "expert": "--ep",
    "expert_shards": "--etp",
    "chunks": "--vp",
    "recompute": "--recompute",
    "uniform": "--uniform",
    "seed": "--seed",
    "deterministic": "--deterministic",
    "workers": "--workers",
    "executor": "--executor",
    "placement": "--placement",
}
_PLANNING = ("uniform", "seed", "deterministic", "placement")
"""Fields of the request that are flags of whole plans, beside sizes."""

_DEVICES = (
    "Numbers of devices to consider; with --mode min-devices a single number is the maximum.  [default: the cluster's; "
    "also the powers of two below it with --plans, --mode profile or --mode min-devices; with --plans and "
    "no cluster the placement's]"
)
_MINI_BATCH = (
    "Global batch size: samples per iteration, on any number of devices.  [default: the largest profiled size "
    "times the "
    "largest number of devices; four times that with --plans]"
)
_TIME_LIMIT = (
    "Stop after this long, as on Ctrl-C. With --plans you get what was found; without, the rest is finished at "
    "--tolerance 0.01.  [default: 60s with --plans]"
)
_MODES = ("all", "min-time", "min-devices", "profile")


@click.command("frontier")
@click.argument("profile_path", type=FILE, metavar="PROFILE")
@click.option("--devices", type=DEVICE_COUNTS, metavar="D,...", help=_DEVICES)
@click.option(
    "--cluster", "cluster_path", type=FILE, metavar="FILE", help="Cluster file: devices, memory, links, prices."
)
@SPARES
@PROFILE_FOR
@click.option("--memory", type=BYTES, help="Memory limit of each device, such as 16GB.  [default: the cluster's]")
@MEMORY_RESERVE
@recipe_options
@PLACED
@zero_options
@size_options
@click.option(
    "--mode",
    type=OneOf(_MODES),
    default="all",
    help="Which points within --memory to show: all; all, with the fastest chosen (min-time); those on the "
    "fewest devices; or the fastest for each number of devices (profile).",
)
@click.option(
    "--plans",
    is_flag=True,
    help="Consider pipelines as well, and make every point a plan, instead of one stage on all devices.",
)
@click.option(
    "--uniform",
    is_flag=True,
    help="With --plans: only layouts that trainers take as settings, with the same tensor, context, expert and data "
    "parallel sizes for every stage.",
)
@click.option(*("--mini-batch", "--global-batch-size", "mini_batch"), type=LARGE_NUMBER, help=_MINI_BATCH)
@click.option(
    "--split-level",
    cls=RenamedOption,
    was=("--grain",),
    type=OneOf(["block", "operator"]),
    default="block",
    help="What is split as a unit: whole blocks, the way plans run them, or each operator on its own.",
)
@click.option(
    "--device",
    type=DEVICE,
    metavar="PRESET",
    help="Device to estimate split times for.  [default: the profile's]",
)
@click.option("--data-parallel-loading", is_flag=True, help="Inputs arrive already split by samples over all devices.")
@click.option(
    "--tolerance",
    cls=RenamedOption,
    was=("--within",),
    type=FiniteRange(0),
    default=0.0,
    help="Without --plans: how far points may be off the frontier; 0.01 is 1 % of memory and time, 0 is exact.",
)
@click.option(
    "--only",
    type=OneOf(["data-parallel", "optcnn", "tofu", "mesh-tensorflow"]),
    help="Without --plans: only what a published planner looks at, to compare with.  [default: every strategy]",
)
@click.option(
    "--mesh-dimensions",
    type=click.IntRange(1, 3),
    default=3,
    help="Without --plans: most dimensions of the mesh of devices that splits a block or operator.",
)
@click.option("--time-limit", type=DURATION, help=_TIME_LIMIT)
@SEED
@DETERMINISTIC
@click.option(
    "--workers",
    type=click.IntRange(min=1, max=1024),
    help="With --plans: processes that evaluate the candidates of its searches.  [default: 1]",
)
@EXECUTOR
@click.option(
    "--point",
    type=LARGE_NUMBER,
    metavar="N",
    help="Choose the N-th point, for -o. A search that ends early may number points differently next time.",
)
@click.option("--svg", type=FILE, metavar="FILE", help="Draw time against memory as SVG.")
@click.option(
    *("-o", "--output"),
    type=FILE,
    metavar="FILE",
    help="Write the chosen plan; with --mode all, the one at the knee for the largest number of devices.",
)
@click.option(
    "--output-all",
    type=FOLDER,
    metavar="DIRECTORY",
    help="Write the plan of every point shown to a folder: point-1.json, point-2.json ...",
)
@click.option("--details", is_flag=True, help="Print up to 24 points instead of 8.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
@click.pass_context
@seldom_collected()
def frontier_command(
    ctx: click.Context,
    /,
    mode: Mode,
    point: int | None,
    svg: str | None,
    output: str | None,
    output_all: str | None,
    workers: int | None,
    executor: str | None,
    details: bool,
    as_json: bool,
    **_: Any,
) -> None:
    """Show what more memory and more devices buy: every strategy for PROFILE that no other beats in memory and time.

    Without --plans the model is one stage on all devices, each block split in its own way. With --plans it may be a
    pipeline, and every point is a plan.
    """
    from pipeplan.reporting.frontier import frontier_svg, print_frontier

    writes = "-o" if output is not None else "--output-all" if output_all is not None else None
    if writes is not None and ctx.params["split_level"] == "operator" and not ctx.params["plans"]:
        raise UsageError(
            f"{writes} writes plans, and these run whole blocks; leave out --split-level operator, or profile a model "
            "whose blocks are operators, as gpt2-124m-operators"
        )
    outputs = Outputs({"-o": output, "--svg": svg}, as_json=as_json)
    request = frontier_request(ctx)
    require_one_kind_of_workers(request, workers, executor)
    written = float("inf") if output_all is not None else int(output is not None)
    how: Any = {"mode": mode, "point": point, "workers": workers or 1, "executor": executor, "written": written}
    if output_all is not None:
        require_folder(output_all, "point-*.json", "--output-all")
    with outputs, limited(request.time_limit, "frontier") as limit:
        with failure_as_json(as_json), Status() as progress:
            found = _api.frontier(request, progress=progress, within=limit, **how)
        if found.stopped:
            say("pipeplan: interrupted; these are the best points so far", err=True)
        # signals are still heard: one that comes now takes no file away
        if as_json or outputs.on_stdout:
            say_notes(_api.frontier_notes(request))
        if svg is not None:
            outputs.write_text(frontier_svg(found), svg)
        try:  # the table first: it says what there is even where a plan cannot be made
            if as_json:
                say(json.dumps(found.figures()))
            elif not outputs.on_stdout:
                print_frontier(found, sys.stdout, written=output, details=details)
        finally:  # also where nobody reads it any more
            if output is not None:
                outputs.write_plan(found.plan(), output)
                if outputs.has(output):
                    say(f"pipeplan: {found.written} is in {'stdout' if output == '-' else output}", err=True)
            if output_all is not None:
                _write_all(found, output_all, outputs)


@seldom_collected()
def frontier_request(ctx: click.Context) -> Request:
    """The request that the flags make. Raises UsageError, also for those that would do nothing."""
    flags = ctx.params
    for parameter, flag in _ONLY_SPLITS.items() if flags["plans"] else ():
        if ctx.get_parameter_source(parameter) is ParameterSource.COMMANDLINE:
            raise UsageError(f"{flag} has no effect with --plans; leave out {flag} or --plans")
    for parameter, flag in () if flags["plans"] else _ONLY_PLANS.items():
        if ctx.get_parameter_source(parameter) is ParameterSource.COMMANDLINE:
            raise UsageError(f"{flag} is for pipelines, not for a single stage; add --plans, or leave {flag} out")
    splitting = _api.Splitting(
        device=flags["device"],
        whole_blocks=flags["split_level"] != "operator",
        data_parallel_loading=flags["data_parallel_loading"],
        within=flags["tolerance"],
        only=flags["only"],
        mesh_dimensions=flags["mesh_dimensions"],
    )
    cluster = given_file("cluster", flags["cluster_path"])
    return _api.frontier_request(
        asked_profile(flags, cluster),
        devices=flags["devices"],
        cluster=cluster,
        spares=flags["spares"] or 0,
        memory_bytes=flags["memory"],
        reserve_bytes=flags["memory_reserve"],
        mini_batch=flags["mini_batch"],
        zero=flags["zero"],
        zero_group=flags["zero_group"],
        time_limit=None if flags["time_limit"] is None else flags["time_limit"] / 1e9,
        mode=flags["mode"],
        splitting=None if flags["plans"] else splitting,
        **(asked_sizes(flags) | {name: flags[name] for name in _PLANNING} if flags["plans"] else {}),
    )


def _write_all(found: FrontierResult, folder: str, outputs: Outputs) -> None:
    """Write the plans of all points that have one, by their numbers. Raises UsageError where some have none."""
    refused, num_written, count = [], 0, len(found.points)
    for number in range(1, count + 1):
        try:
            plan = found.plan(number)
        except PipeplanError as error:
            refused.append(f"point {number}: {error}")
        else:
            path = f"{folder}/point-{number}.json"
            outputs.write_plan(plan, path)
            num_written += outputs.has(path)
    say(f"pipeplan: {num_written} of {count} points are in {folder}", err=True)
    if refused:
        raise UsageError(f"{len(refused)} of {count} points cannot be written as plans, as {refused[0]}")
