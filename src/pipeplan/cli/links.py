"""The part of ``pipeplan profile`` that is about links: read what nccl-tests printed into a cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeplan.cli.outputs import require_stdout_once
from pipeplan.errors import FileError

if TYPE_CHECKING:
    from pipeplan.model import Cluster

__all__ = ["add_communication"]


def add_communication(paths: tuple[str, ...], cluster: str, level: str | None, output: str, as_json: bool) -> None:
    """Read measured link times, write the cluster with them, and say how well each curve tells what it has not seen."""
    from pipeplan.costs.nccl_tests import parse_nccl_tests, with_runs
    from pipeplan.model import read_cluster, write_file

    require_stdout_once(output, as_json)
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
