"""The part of ``pipeplan profile`` that is about links: measure them, or read what nccl-tests printed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeplan import _api
from pipeplan.errors import FileError, UsageError
from pipeplan.units import format_bytes

if TYPE_CHECKING:
    from pipeplan._api import Cluster, LinkPoint, LinkResult

__all__ = ["INTERRUPTED", "add_communication", "measure_communication"]

INTERRUPTED = 130


def measure_communication(ctx: click.Context) -> None:
    """Measure links as one of torchrun's ranks, or between processes started here, and write the cluster.

    Rank 0 writes whenever a curve is whole, so that an interruption keeps those before it.
    """
    given = ctx.params
    output: str = given["output"]
    options = _api.LinkOptions(
        smallest_bytes=given["min_bytes"],
        largest_bytes=given["max_bytes"],
        **{name: given[name] for name in ("repeats", "warmup", "device")},
    )
    base = _api.read_cluster(given["cluster"]) if given["cluster"] else None
    written: list[Cluster] = []

    def keep(cluster: Cluster) -> None:
        if output != "-":
            _api.write_file(cluster, output)
        written.append(cluster)

    try:
        if given["processes"]:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        else:
            _require_ranks()
        found = _api.measure_links(options, given["processes"], base, on_point=_tell, keep=keep)
    except KeyboardInterrupt:
        kept = f"{len(written[-1].measured)} curves are in {output}" if written and output != "-" else "nothing is kept"
        click.echo(f"pipeplan: interrupted while measuring links; {kept}", err=True)
        ctx.exit(INTERRUPTED)
    if found is None:  # not rank 0
        return
    if output == "-":
        _api.write_file(found.cluster, output)
    _print_curves(found, output, as_json=given["as_json"])


def _tell(point: LinkPoint) -> None:
    if sys.stderr.isatty():
        click.echo(f"{point.operation} of {point.size} bytes: {point.ns / 1000:.1f} us", err=True)


def _require_ranks() -> None:
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise UsageError(
            "no ranks here: start them with torchrun --nproc-per-node N -m pipeplan profile --communication ..., or "
            "give --processes N to start them on this machine"
        )


def add_communication(given: Mapping[str, Any]) -> None:
    """Read measured link times, write the cluster with them, and say how well each curve tells what it has not seen."""
    cluster = _api.read_cluster(given["cluster"])
    printed = {path: _read_text(path) for path in given["communication_from"]}
    found = _api.add_links(cluster, printed, given["level"])
    _api.write_file(found.cluster, given["output"])
    _print_curves(found, given["output"], as_json=given["as_json"])


def _print_curves(found: LinkResult, output: str, *, as_json: bool) -> None:
    figures = found.figures()
    if as_json:
        click.echo(json.dumps(figures))
    elif output != "-":
        for curve in figures["curves"]:
            click.echo(_curve_line(curve))
        click.echo(f"cluster written to {output}", err=True)


def _curve_line(curve: dict[str, Any]) -> str:
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
