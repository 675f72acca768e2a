"""``pipeplan profile``: measure a model block by block and write the profile; show a profile; read link times."""

from __future__ import annotations

import json

import click
from click.core import ParameterSource

from pipeplan.cli.types import COUNTS

__all__ = ["command"]


@click.command("profile", short_help="Measure a model block by block and write the profile.")
@click.argument("name", metavar="[MODEL]", required=False)
@click.option("--microbatch", "sizes", type=COUNTS, default="1,2,4", show_default=True, help="Samples per run.")
@click.option("--sequence", type=click.IntRange(min=1), help="Shorter sequences for a model of the zoo.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float64"]), default="float32", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--threads", type=click.IntRange(1, 4096), help="Threads of CPU operators.  [default: torch's choice]")
@click.option("--repeats", type=click.IntRange(1, 100_000), default=10, show_default=True, help="Timed runs.")
@click.option("--warmup", type=click.IntRange(0, 100_000), default=3, show_default=True, help="Runs before them.")
@click.option("--seed", type=click.IntRange(min=0, max=2**31 - 1), default=0, show_default=True)
@click.option("-o", "--output", metavar="FILE", help="Where to write the profile, or the cluster; - for stdout.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--show", metavar="PROFILE", help="Measure nothing: print a profile, and what makes plans from it wrong.")
@click.option(
    *("--communication-from", "measured"),
    multiple=True,
    metavar="FILE",
    help="Measure nothing: put what nccl-tests printed, text or JSON, into a cluster. May be repeated.",
)
@click.option("--cluster", metavar="CLUSTER", help="The cluster that it was measured on.")
@click.option("--level", metavar="NAME", help="The cluster's level that it was measured on.  [default: by devices]")
@click.pass_context
def command(
    ctx: click.Context,
    name: str,
    sizes: tuple[int, ...],
    sequence: int | None,
    dtype: str,
    device: str,
    threads: int | None,
    repeats: int,
    warmup: int,
    seed: int,
    output: str | None,
    as_json: bool,
    show: str | None,
    measured: tuple[str, ...],
    cluster: str | None,
    level: str | None,
) -> None:
    """Measure MODEL block by block: times of forward and backward, and what memory they hold.

    MODEL is a name of the zoo (gpt2-tiny, gpt2-124m, gpt2-345m) or pkg.mod:factory, a function that returns a
    pipeplan.runtime.model.Model. Use a quiet machine: every number is a median, and the profile says how far the
    runs behind it lie apart. What was measured before an interruption is kept, and the same command goes on with it.

    Two more uses need no model and no torch: --show PROFILE looks a profile over, with --microbatch for those sizes;
    --communication-from FILE --cluster CLUSTER -o FILE puts measured link times into a cluster.
    """
    _require_one_use(ctx)
    if show is not None:
        asked = sizes if _given(ctx, "sizes") else ()
        _show(show, asked, as_json)
    elif measured:
        from pipeplan.cli.links import add_communication

        add_communication(measured, str(cluster), level, str(output), as_json)
    else:
        from pipeplan.cli.measuring import MeasureOptions, measure_and_write

        options = MeasureOptions(sizes, sequence, dtype, device, repeats, warmup, seed)
        measure_and_write(ctx, str(name), options, threads, str(output), as_json)


_USES = {
    "show": ({"show"}, {"sizes", "as_json"}),
    "measured": ({"measured", "cluster", "output"}, {"level", "as_json"}),
    "name": (
        {"name", "output"},
        {"sizes", "sequence", "dtype", "device", "threads", "repeats", "warmup", "seed", "as_json"},
    ),
}
"""What says which use is meant -> the parameters it needs, and those it may have."""


def _given(ctx: click.Context, parameter: str) -> bool:
    return ctx.get_parameter_source(parameter) is ParameterSource.COMMANDLINE


def _require_one_use(ctx: click.Context) -> None:
    """Every parameter belongs to the one use that is meant, and none that it needs is missing."""
    named = {parameter.name: parameter for parameter in ctx.command.params}
    given = [name for name in named if name and _given(ctx, name)]
    use = next((use for use in _USES if use in given), "name")
    needed, possible = _USES[use]
    if missing := [parameter for name, parameter in named.items() if name in needed and name not in given]:
        raise click.MissingParameter(ctx=ctx, param=missing[0])
    if extra := [name for name in given if name not in needed | possible]:
        raise click.UsageError(f"{_written(named[extra[0]])} does not go with {_written(named[use])}", ctx)


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
