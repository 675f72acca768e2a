"""Clusters of equal devices."""

from __future__ import annotations

from pipeplan.files import Cluster, DeviceKind, LinkLevel, Source


def cluster_of(
    count: int,
    *,
    memory_bytes: int | None = None,
    latency_ns: int = 7,
    bandwidth: int = 10**9,
    name: str = "small",
) -> Cluster:
    """Devices of one kind on one level of links; ``bandwidth`` in bytes per second."""
    return Cluster(
        name="test",
        source=Source(method="estimated"),
        devices=(DeviceKind(name=name, count=count, memory_bytes=memory_bytes),),
        levels=(
            LinkLevel(name="wire", group_size=max(2, count), latency_ns=latency_ns, bandwidth_bytes_per_s=bandwidth),
        ),
    )
