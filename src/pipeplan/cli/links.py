"""The part of ``pipeplan profile`` that is about links: measure them, or read what nccl-tests printed."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeplan.cli.outputs import require_stdout_once, require_writable
from pipeplan.errors import FileError, UsageError

if TYPE_CHECKING:
    from pipeplan.model import Cluster

__all__ = ["add_communication", "measure_communication"]

INTERRUPTED = 130


def measure_communication(ctx: click.Context) -> None:
    """Measure links as one of torchrun's ranks, or between processes started here, and write the cluster.

    Rank 0 writes whenever a curve is whole, so that an interruption keeps those before it.
    """
    from pipeplan.cli.measuring import require_torch

    given = ctx.params
    output: str = given["output"]
    require_stdout_once(output, given["as_json"])
    require_torch()
    require_writable(output)
    from pipeplan.model import read_cluster, write_file
    from pipeplan.runtime.communication import LinkOptions, LinkPoint, measure_links, measure_local

    options = LinkOptions(
        given["min_bytes"], given["max_bytes"], 4, given["repeats"], given["warmup"], device=given["device"]
    )
    base = read_cluster(given["cluster"]) if given["cluster"] else None
    written: list[Cluster] = []

    def keep(cluster: Cluster) -> None:
        if output != "-":
            write_file(cluster, output)
        written.append(cluster)

    def tell(point: LinkPoint) -> None:
        if sys.stderr.isatty():
            click.echo(f"{point.operation} of {point.size} bytes: {point.ns / 1000:.1f} us", err=True)

    try:
        if given["processes"]:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            cluster: Cluster | None = measure_local(given["processes"], options, base, on_point=tell, keep=keep)
        else:
            _require_ranks()
            cluster = measure_links(options, base, on_point=tell, keep=keep)
    except KeyboardInterrupt:
        kept = f"{len(written[-1].measured)} curves are in {output}" if written and output != "-" else "nothing is kept"
        click.echo(f"pipeplan: interrupted while measuring links; {kept}", err=True)
        ctx.exit(INTERRUPTED)
    if cluster is None:  # not rank 0
        return
    if output == "-":
        write_file(cluster, output)
    _print_curves(cluster, output, as_json=given["as_json"])


def _require_ranks() -> None:
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise UsageError(
            "no ranks here: start them with torchrun --nproc-per-node N -m pipeplan profile --communication ..., or "
            "give --processes N to start them on this machine"
        )


def add_communication(paths: tuple[str, ...], cluster: str, level: str | None, output: str, as_json: bool) -> None:
    """Read measured link times, write the cluster with them, and say how well each curve tells what it has not seen."""
    from pipeplan.costs.nccl_tests import parse_nccl_tests, with_runs
    from pipeplan.model import read_cluster, write_file

    require_stdout_once(output, as_json)
    found = read_cluster(cluster)
    for path in paths:
        found = with_runs(found, parse_nccl_tests(_read_text(path), path), level, Path(path).name)
    write_file(found, output)
    _print_curves(found, output, as_json=as_json)


def _print_curves(cluster: Cluster, output: str, *, as_json: bool) -> None:
    curves = _curves(cluster)
    if as_json:
        click.echo(json.dumps({"cluster": cluster.name, "curves": curves}))
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
