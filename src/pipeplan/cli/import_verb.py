"""``pipeplan import``: what another tool runs, as a plan."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from pipeplan import _api
from pipeplan.cli.output import Outputs, say, say_notes
from pipeplan.cli.search_verbs import print_result
from pipeplan.cli.shared import (
    BYTES,
    DURATION,
    FILE,
    NUM_DEVICES,
    NUMBER,
    RECOMPUTE_OPTION,
    SCHEDULER,
    asked_recompute,
    given_file,
    limited,
)

if TYPE_CHECKING:
    from pipeplan._api import Limit, Request, Result


@click.command("import")
@click.argument("source_path", type=FILE, metavar="SOURCE")
@click.option(
    "--from",
    "source",
    required=True,
    metavar="torch|megatron|layers",
    help="What SOURCE is: a schedule's CSV as torch's _PipelineScheduleRuntime reads it, a pipeline layout of "
    "Megatron-LM (its arguments may follow, one per line), or a list of layers per stage, as vLLM takes it.",
)
@click.option("--profile", "profile_path", type=FILE, required=True, metavar="FILE", help="The model's profile.")
@click.option(
    "--modules",
    "modules_path",
    type=FILE,
    metavar="FILE",
    help="For torch: which modules each stage is.  [default: SOURCE.modules.json, where it is there]",
)
@click.option("--devices", type=NUM_DEVICES, help="Number of devices.  [default: one per pipeline rank]")
@click.option("--cluster", "cluster_path", type=FILE, metavar="FILE", help="Cluster file: devices, memory, links.")
@click.option("--memory", type=BYTES, help="Memory of each device, such as 16GB or 16GiB.  [default: the cluster's]")
@click.option("--microbatch-size", type=NUMBER, help="Samples per micro-batch, over all replicas.")
@click.option("--microbatches", type=NUMBER, help="Micro-batches per iteration, where SOURCE does not say.")
@click.option(
    "--scheduler", type=SCHEDULER, help="Schedule by name, instead of SOURCE's own order.  [default for layers: 1f1b]"
)
@RECOMPUTE_OPTION
@click.option("--time-limit", type=DURATION, default="30s", help="Stop after this long.")
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Write the plan; - for stdout.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
def import_command(output: str | None, as_json: bool, time_limit: int, **flags: Any) -> None:
    """Read what another tool runs today as a plan: to check, simulate, compare, and improve (search --start PLAN).

    Stages stand and actions run as SOURCE has them; what it does not say is assumed, and said. SOURCE may be - for
    stdin.
    """
    with Outputs({"-o": output}, as_json=as_json) as outputs, limited(time_limit / 1e9, "search") as limit:
        request, result = import_result({**flags, "time_limit": time_limit}, limit)
        if output is not None:
            outputs.write_plan(result.plan, output)
        if as_json or outputs.on_stdout:
            say_notes(result.notes)
        if as_json:
            say(json.dumps(result.figures()))
        elif not outputs.on_stdout:
            written = output if output is not None and outputs.has(output) else None
            print_result(request, result, None, written, details=False)
        outputs.say_written("plan", None if as_json else output)


def import_result(flags: Mapping[str, Any], within: Limit | None = None) -> tuple[Request, Result]:
    """The plan that the flags ask for, and the request that it was made by. Raises as the verb does."""
    source, modules = flags["source_path"], flags["modules_path"]
    beside = f"{source}{_api.MODULES_ENDING}"
    if modules is None and flags["source"] == "torch" and os.path.exists(beside):
        modules = beside
    found = _api.imported(
        _api.read_source(source),
        flags["source"],
        given_file("profile", flags["profile_path"]),
        devices=flags["devices"],
        num_microbatches=flags["microbatches"],
        microbatch_size=flags["microbatch_size"],
        scheduler=flags["scheduler"],
        modules=None if modules is None else _api.read_modules(modules),
        recompute=asked_recompute(flags) or False,
        cluster=given_file("cluster", flags["cluster_path"]),
        memory_bytes=flags["memory"],
        time_limit=flags["time_limit"] / 1e9,
    )
    result = _api.search(found.request, within=within)
    return found.request, replace(result, notes=(*found.notes, *result.notes))
