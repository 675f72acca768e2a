"""``pipeplan profile``: measure a model block by block and write the profile; show a profile; read link times."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pipeplan.errors import FileError, UsageError

if TYPE_CHECKING:
    from pipeplan.model import Cluster, Profile

__all__ = ["command"]

INTERRUPTED = 130


def _sizes(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Micro-batch sizes from ``1,2,4``: ascending, each once."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isascii() and part.isdecimal() and 1 <= int(part) <= 1_000_000 for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of micro-batch sizes; write numbers from 1 on, as 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


@click.command("profile", short_help="Measure a model block by block and write the profile.")
@click.argument("name", metavar="[MODEL]", required=False)
@click.option("--microbatch", "sizes", callback=_sizes, default="1,2,4", show_default=True, help="Samples per run.")
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
        _add_communication(measured, str(cluster), level, str(output), as_json)
    else:
        options = _Options(sizes, sequence, dtype, device, repeats, warmup, seed)
        _measure_and_write(ctx, str(name), options, threads, str(output), as_json)


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


def _add_communication(paths: tuple[str, ...], cluster: str, level: str | None, output: str, as_json: bool) -> None:
    """Read measured link times, write the cluster with them, and say how well each curve tells what it has not seen."""
    from pipeplan.costs.nccl_tests import parse_nccl_tests, with_runs
    from pipeplan.model import read_cluster, write_file

    _require_stdout_once(output, as_json)
    found = read_cluster(cluster)
    for path in paths:
        found = with_runs(found, parse_nccl_tests(_read_text(path), path), level, Path(path).name)
    write_file(found, output)
    curves = _curves(found)
    if as_json:
        click.echo(json.dumps({"cluster": found.name, "curves": curves}))
    elif output != "-":
        for curve in curves:
            click.echo(_curve_line(curve))
        click.echo(f"cluster written to {output}", err=True)


def _curves(cluster: Cluster) -> list[dict[str, Any]]:
    """The cluster's curves in figures."""
    from pipeplan.costs.links import leave_one_out_error

    return [
        {
            "operation": curve.operation,
            "level": curve.level,
            "num_devices": curve.num_devices,
            "num_points": len(curve.points),
            "smallest_bytes": curve.points[0][0],
            "largest_bytes": curve.points[-1][0],
            "leave_one_out_error": leave_one_out_error(curve.points),
        }
        for curve in cluster.measured
    ]


def _curve_line(curve: dict[str, Any]) -> str:
    from pipeplan.units import format_bytes

    error = curve["leave_one_out_error"]
    told = "too few points to tell" if error is None else f"{error:.1%} median error of points left out"
    sizes = f"{format_bytes(curve['smallest_bytes'])} to {format_bytes(curve['largest_bytes'])}"
    where = f"on {curve['level']}, {curve['num_devices']} devices"
    return f"{curve['operation']} {where}: {curve['num_points']} points, {sizes}, {told}"


def _read_text(path: str) -> str:
    """A file's text, whatever bytes a program's output has; - is stdin."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from None
    return data.decode(errors="replace")


def _require_stdout_once(output: str, as_json: bool) -> None:
    if output == "-" and as_json:
        raise UsageError("-o - and --json would both print to stdout; write the file somewhere else with -o FILE")


@dataclass(frozen=True, slots=True)
class _Options:
    """How to measure."""

    sizes: tuple[int, ...]
    sequence: int | None
    dtype: str
    device: str
    repeats: int
    warmup: int
    seed: int


def _measure_and_write(
    ctx: click.Context, name: str, options: _Options, threads: int | None, output: str, as_json: bool
) -> None:
    _require_stdout_once(output, as_json)
    _require_torch()
    _require_writable(output)
    from pipeplan.model import write_file
    from pipeplan.report.inspection import print_blocks

    begin = time.monotonic()
    shown = _Shown()
    try:
        with _threads(threads), _warnings_told(), shown:
            profile = _measure(name, options, shown.update)
    except KeyboardInterrupt:
        click.echo(f"pipeplan: interrupted while measuring {shown.what}; nothing is written", err=True)
        ctx.exit(INTERRUPTED)
    write_file(profile, output)
    _tell_missing(profile, options.sizes)
    if as_json:
        click.echo(json.dumps(_summary(profile, time.monotonic() - begin)))
    elif output != "-":
        print_blocks(profile)
        click.echo(f"profile written to {output}", err=True)


def _measure(name: str, options: _Options, progress: Callable[[int, int, str], None]) -> Profile:
    import torch

    from pipeplan.runtime.model import load_model
    from pipeplan.runtime.profiler import profile_model

    return profile_model(
        load_model(name, sequence=options.sequence),
        options.sizes,
        repeats=options.repeats,
        warmup=options.warmup,
        dtype=getattr(torch, options.dtype),
        device=options.device,
        seed=options.seed,
        progress=progress,
    )


def _require_torch() -> None:
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise UsageError("profile needs torch, which is not installed: pip install 'pipeplan[torch]'")


def _require_writable(path: str) -> None:
    """Find out before minutes of measuring."""
    folder = Path(path).absolute().parent
    if path == "-":
        return
    if not folder.is_dir():
        raise FileError(f"{path}: cannot be written: there is no folder {folder}")
    if Path(path).is_dir() or not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise FileError(f"{path}: cannot be written; choose another file with -o")


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Set the threads of CPU operators, and put them back."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _warnings_told() -> Iterator[None]:
    """Pipeplan's own warnings in the form of its other messages, on stderr when all is measured."""
    with warnings.catch_warnings(record=True) as caught:
        yield
    for text in dict.fromkeys(str(warning.message) for warning in caught if warning.category is UserWarning):
        click.echo(f"pipeplan: warning: {text}", err=True)


class _Shown:
    """A progress bar on stderr; nothing unless it is a terminal. ``what`` runs now."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.what = "nothing yet"
        console = Console(stderr=True)
        columns = (
            BarColumn(),
            TextColumn("{task.percentage:3.0f}%"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[what]}"),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("measuring", total=None, what="")

    def __enter__(self) -> _Shown:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, done: int, total: int, what: str) -> None:
        """Called before each run."""
        self.what = what
        self._progress.update(self._task, completed=done, total=total, what=what)


def _tell_missing(profile: Profile, sizes: tuple[int, ...]) -> None:
    missing = [str(size) for size in sizes if size not in profile.microbatch_sizes]
    if missing:
        click.echo(f"pipeplan: not measured: micro-batch sizes {', '.join(missing)}. {profile.source.notes}", err=True)


def _summary(profile: Profile, seconds: float) -> dict[str, object]:
    """Sums over all blocks, for each micro-batch size."""
    from pipeplan.report.inspection import alike, sums

    return {
        "profile": profile.name,
        "device": profile.source.device,
        "dtype": profile.source.dtype,
        "num_blocks": len(profile.blocks),
        "num_kinds": len(alike(profile)),
        "parameter_bytes": sum(block.parameter_bytes for block in profile.blocks),
        "optimizer_bytes": sum(block.optimizer_bytes for block in profile.blocks),
        "sizes": [{"microbatch_size": size, **sums(profile, size)} for size in profile.microbatch_sizes],
        "seconds": round(seconds, 3),
    }
