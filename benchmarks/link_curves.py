"""How well times of links are told: curves beside latency and bandwidth, by the median error of points left out.

    python benchmarks/link_curves.py                   # prints the table of docs/communication.md

Processes on this machine over gloo, and the figures that people have published of nccl-tests on GPUs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tables import machine, markdown, note

from pipeplan.costs.communication import leave_one_out_error, time_on_line
from pipeplan.runtime.profiling.links import LinkOptions, measure_local

Points = tuple[tuple[int, int], ...]

PUBLISHED: dict[str, Points] = {
    # https://github.com/NVIDIA/nccl-tests/issues/44: all_reduce_perf -g 2, out of place
    "2 x RTX 2080 Ti, NVLink bridge, NCCL 2.6 [^1] | all_reduce | 2": tuple(
        (32768 << index, round(us * 1000))
        for index, us in enumerate(
            (13.39, 16.57, 23.07, 31.38, 36.00, 47.38, 70.44, 120.1, 212.5, 418.5, 817.8, 1568.3, 3298.6)
        )
    ),
    # https://github.com/NVIDIA/nccl-tests/issues/128: out of place; the bus bandwidth's factor 7/8 is reduce_scatter's
    "2 hosts of 4 GPUs, InfiniBand [^2] | reduce_scatter | 8": tuple(
        (65536 << index, round(us * 1000))
        for index, us in enumerate(
            (33.50, 48.62, 81.99, 88.70, 106.2, 152.5, 252.5, 461.2, 885.2, 1737.1, 3461.9, 6913.0, 13882)
        )
    ),
}


def percent(error: float | None) -> str:
    return "-" if error is None else f"{error:.1%}"


def by_bandwidth(points: Sequence[tuple[int, int]], size: int) -> int:
    """Size over the bandwidth of the largest message, as TensorOpt 5.2 says that others do."""
    largest, ns = points[-1]
    return round(size * ns / largest)


def row(where: str, points: Points) -> list[str]:
    errors = (
        leave_one_out_error(points),
        leave_one_out_error(points, time_on_line),
        leave_one_out_error(points, by_bandwidth),
    )
    return [*where.split(" | "), str(len(points)), *map(percent, errors)]


def measured(num_processes: int, options: LinkOptions) -> list[list[str]]:
    cluster = measure_local(
        num_processes,
        options,
        on_point=lambda point: note(f"{num_processes} {point}"),
        keep=lambda cluster: None,
    )
    return [
        row(f"{num_processes} processes here, gloo | {curve.operation} | {curve.num_devices}", curve.points)
        for curve in cluster.measured
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--max-bytes", type=int, default=1 << 26)
    asked = parser.parse_args()
    options = LinkOptions(repeats=asked.repeats, largest_bytes=asked.max_bytes)
    rows = [each for count in asked.processes for each in measured(count, options)]
    rows += [row(where, points) for where, points in PUBLISHED.items()]
    header = ["where", "operation", "devices", "points", "curve", "latency + size / bandwidth", "size / bandwidth"]
    print(machine())
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
