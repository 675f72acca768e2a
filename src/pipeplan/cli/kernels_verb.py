"""``pipeplan kernels``: which kernel backend runs each block, from a profile that has their times."""

from __future__ import annotations

import json

import click

from pipeplan import _api
from pipeplan.cli.output import Outputs, say
from pipeplan.cli.shared import DURATION, FILE, NUMBER


@click.command("kernels")
@click.argument("profile_path", type=FILE, metavar="PROFILE")
@click.option(
    "--microbatch-size",
    type=NUMBER,
    help="Samples that the times are of.  [default: the largest at which every block can run]",
)
@click.option("--time-limit", type=DURATION, default="30s", help="Time for the proof that no cover is cheaper.")
@click.option("-o", "--output", type=FILE, metavar="COVER", help="Where to write the cover; - for stdout.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def kernels_command(
    profile_path: str, microbatch_size: int | None, time_limit: int, output: str | None, as_json: bool
) -> None:
    """Choose which kernel backend runs each block of PROFILE.

    PROFILE is what profile --backends wrote: it has what each backend takes for blocks and for groups of blocks that it
    runs at once. Printed are these times, and the cover of the model that takes least, changes of backend included.
    Nothing is run. PROFILE may be - for stdin.
    """
    from pipeplan.reporting.kernels import print_choice

    with Outputs({"-o": output}, as_json=as_json) as outputs:
        found = _api.choose_kernels(_api.read_profile(profile_path), microbatch_size, time_limit / 1e9)
        if output is not None:
            outputs.write(found.file, output)
        if as_json:
            say(json.dumps(found.figures()))
        elif not outputs.on_stdout:
            print_choice(found)
        outputs.say_written("cover", output)
