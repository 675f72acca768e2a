"""``pipeplan profile``: costs of a model, measured or estimated; times of links; a look at a profile."""

from __future__ import annotations

import json
from typing import Any

import click
from click.core import ParameterSource

from pipeplan.cli.types import BYTES, COUNTS

__all__ = ["command"]


@click.command("profile", short_help="Measure or estimate a model block by block and write the profile.")
@click.argument("name", metavar="[MODEL]", required=False)
@click.option("--microbatch", type=COUNTS, default="1,2,4", show_default=True, help="Samples per run.")
@click.option("--sequence", type=click.IntRange(min=1), help="Length of sequences, for the zoo and configurations.")
@click.option(
    "--grain",
    type=click.Choice(["layer", "half", "operator"]),
    help="What a block of a captured model is.  [default: half]",
)
@click.option("--shared", multiple=True, metavar="BLOCK", help="Blocks for all devices, by id or operator; * matches.")
@click.option("--shards", type=COUNTS, default="1", show_default=True, help="Devices that split each block.")
@click.option("--recompute", is_flag=True, help="Costs with activation checkpointing, too.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16", "float64"]),
    help="Number format.  [default: float32; of an estimate the preset's]",
)
@click.option("--device", metavar="cpu|cuda|PRESET", default="cpu", show_default=True, help="Preset of an estimate.")
@click.option("--threads", type=click.IntRange(1, 4096), help="Threads of CPU operators.  [default: torch's choice]")
@click.option("--repeats", type=click.IntRange(1, 100_000), default=10, show_default=True, help="Timed runs.")
@click.option("--warmup", type=click.IntRange(0, 100_000), default=3, show_default=True, help="Runs before them.")
@click.option("--seed", type=click.IntRange(min=0, max=2**31 - 1), default=0, show_default=True)
@click.option("--estimate", is_flag=True, help="Run nothing: count bytes and work, and take a device's rates.")
@click.option("--calibrate", metavar="PROFILE", help="Measured profile that an estimate's times are fitted to.")
@click.option("--show", metavar="PROFILE", help="Measure nothing: print a profile, and what makes plans from it wrong.")
@click.option(
    *("--communication-from", "communication_from"),
    multiple=True,
    metavar="FILE",
    help="Measure nothing: put what nccl-tests printed, text or JSON, into a cluster. May be repeated.",
)
@click.option("--communication", is_flag=True, help="Measure links, under torchrun or with --processes.")
@click.option("--processes", type=click.IntRange(2, 64), help="Start so many processes here to measure links between.")
@click.option("--min-bytes", type=BYTES, default="1KiB", show_default=True, help="Smallest message.")
@click.option("--max-bytes", type=BYTES, default="64MiB", show_default=True, help="Largest message.")
@click.option("--cluster", metavar="CLUSTER", help="Cluster to put link times into, or to take collectives from.")
@click.option("--level", metavar="NAME", help="The cluster's level that was measured.  [default: by devices]")
@click.option("-o", "--output", metavar="FILE", help="Where to write the profile, or the cluster; - for stdout.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.pass_context
def command(ctx: click.Context, /, **_: Any) -> None:
    """Measure MODEL block by block: times of forward and backward, and what memory they hold.

    MODEL is a name of the zoo (gpt2-tiny, gpt2-124m, tessel-mt5-tiny, mmt and others: docs/models.md), a Hugging Face
    configuration (a config.json or 'LlamaConfig(num_hidden_layers=4)'), or pkg.mod:factory, a function that returns a
    model or a module with example inputs. Use a quiet machine: every number is a median, and the profile says how far
    the runs behind it lie apart.

    What was measured before an interruption is kept, and the same command goes on with it.

    --estimate runs nothing and takes the rates of a --device such as a100-80gb. --communication measures links and
    writes a cluster. Two more uses need no torch: --show PROFILE looks a profile over, with --microbatch for those
    sizes; --communication-from FILE --cluster CLUSTER -o FILE puts nccl-tests' times into a cluster.
    """
    use = _require_one_use(ctx)
    given = ctx.params
    if use == "show":
        _show(given["show"], given["microbatch"] if _given(ctx, "microbatch") else (), given["as_json"])
    elif use == "communication_from":
        from pipeplan.cli.links import add_communication

        paths, target = given["communication_from"], given["output"]
        add_communication(paths, given["cluster"], given["level"], target, given["as_json"])
    elif use == "communication":
        from pipeplan.cli.links import measure_communication

        measure_communication(ctx)
    elif use == "estimate":
        from pipeplan.cli.estimating import estimate_and_write

        estimate_and_write(given)
    else:
        from pipeplan.cli.measuring import measure_and_write

        measure_and_write(ctx)


_MODEL = {"name", "microbatch", "sequence", "grain", "shared", "shards", "recompute", "dtype", "device", "output"}
_USES = {
    "show": ({"show"}, {"microbatch", "as_json"}),
    "communication_from": ({"communication_from", "cluster", "output"}, {"level", "as_json"}),
    "communication": (
        {"communication", "output"},
        {"processes", "min_bytes", "max_bytes", "repeats", "warmup", "device", "cluster", "level", "as_json"},
    ),
    "estimate": ({"name", "output", "estimate"}, _MODEL | {"calibrate", "cluster", "as_json"}),
    "name": ({"name", "output"}, _MODEL | {"threads", "repeats", "warmup", "seed", "cluster", "as_json"}),
}
"""What says which use is meant -> the parameters it needs, and those it may have."""


def _given(ctx: click.Context, parameter: str) -> bool:
    return ctx.get_parameter_source(parameter) is ParameterSource.COMMANDLINE


def _require_one_use(ctx: click.Context) -> str:
    """The use that is meant: every parameter belongs to it, and none that it needs is missing."""
    named = {parameter.name: parameter for parameter in ctx.command.params}
    given = [name for name in named if name and _given(ctx, name)]
    use = next((use for use in _USES if use in given), "name")
    needed, possible = _USES[use]
    if missing := [parameter for name, parameter in named.items() if name in needed and name not in given]:
        raise click.MissingParameter(ctx=ctx, param=missing[0])
    if extra := [name for name in given if name not in needed | possible]:
        raise click.UsageError(f"{_written(named[extra[0]])} does not go with {_written(named[use])}", ctx)
    return use


def _written(parameter: click.Parameter) -> str:
    return parameter.opts[-1] if isinstance(parameter, click.Option) else "MODEL"


def _show(path: str, asked: tuple[int, ...], as_json: bool) -> None:
    from pipeplan.model import read_profile
    from pipeplan.report.inspection import inspection_as_dict, print_inspection

    profile = read_profile(path)
    if as_json:
        click.echo(json.dumps(inspection_as_dict(profile, asked)))
    else:
        print_inspection(profile, asked)
