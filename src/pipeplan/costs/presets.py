"""Devices and the papers' testbeds as data of the catalog.

Devices as data: what each can compute and move per second, and how near to that a kernel of some size comes.

One file each in the catalog: the maker's figures with their source, and the share of them that kernels reach, as
curves over a kernel's work, with the source of these.

The machines that the papers measured on, as clusters: one file each in the catalog.

A paper gives number and kind of devices and at most the names of links. What is nominal or assumed beyond that is
said in the notes of each file's source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from pydantic import ConfigDict, TypeAdapter

from pipeplan.catalog.reading import names, read_text
from pipeplan.errors import UsageError
from pipeplan.files import Cluster, parse

__all__ = ["PRESETS", "TESTBEDS", "DevicePreset", "cluster_of_paper", "device_preset"]


PRESETS = names("devices")
"""Every preset by name."""

Curve = tuple[tuple[int, float], ...]
"""Pairs of a kernel's work and the share of the peak it reaches, work ascending."""


@dataclass(frozen=True, slots=True)
class DevicePreset:
    """What a device can do at most. Sizes in bytes, decimal as its maker states them; rates per second.

    ``dtype`` is the 16-bit format of its matrix units, ``matrix_flops_per_s`` their peak in it without sparsity,
    ``float32_flops_per_s`` the peak of everything else. ``link_bytes_per_s`` is what its link to the devices of its
    machine carries each way. ``matrix_efficiency`` is over the FLOPs of a matrix product, ``memory_efficiency`` over
    the bytes that a kernel moves.
    """

    name: str
    title: str
    memory_bytes: int
    bandwidth_bytes_per_s: int
    dtype: str
    matrix_flops_per_s: int
    float32_flops_per_s: int
    link_bytes_per_s: int
    matrix_efficiency: Curve
    memory_efficiency: Curve
    source: str
    efficiency_source: str

    __pydantic_config__ = ConfigDict(extra="forbid")

    def kernel_ns(self, flops: int, moved_bytes: int, *, matrix: bool) -> float:
        """Time of one kernel in ns: the slower of computing and moving, each at the share that its size reaches."""
        if matrix:
            computing = _time_ns(flops, self.matrix_flops_per_s, self.matrix_efficiency)
        else:
            computing = 1e9 * flops / self.float32_flops_per_s
        return max(computing, _time_ns(moved_bytes, self.bandwidth_bytes_per_s, self.memory_efficiency))


def _time_ns(work: int, peak: int, curve: Curve) -> float:
    """Work at the share of the peak that the curve has for it; less than its first point takes as long as that."""
    most = max(work, curve[0][0])
    return 1e9 * most / (peak * _share(most, curve))


def _share(work: int, curve: Curve) -> float:
    """The curve at some work, interpolated in the logarithms of both; beyond its last point that one's share holds."""
    for (low, low_share), (high, high_share) in zip(curve, curve[1:], strict=False):
        if work < high:
            place = math.log(work / low) / math.log(high / low)
            return low_share * math.pow(high_share / low_share, place)
    return curve[-1][1]


@cache
def device_preset(name: str) -> DevicePreset:
    """The preset of this name.

    Raises:
        UsageError: there is none.
    """
    if name not in PRESETS:
        raise UsageError(f"--device {name!r} is not a preset; choose from {', '.join(PRESETS)}")
    return TypeAdapter(DevicePreset).validate_json(read_text("devices", name))


TESTBEDS = names("clusters")
"""Every testbed by name."""


def cluster_of_paper(name: str, num_devices: int | None = None) -> Cluster:
    """The cluster of a paper; with ``num_devices`` nodes are left out or added, and the last one may be partly used.

    Raises:
        UsageError: there is no testbed of this name, or the number of devices is not one.
    """
    if name not in TESTBEDS:
        raise UsageError(f"there is no testbed {name!r}; choose from {', '.join(TESTBEDS)}")
    cluster = parse(read_text("clusters", name), Cluster, f"{name}.json")
    return cluster if num_devices in (None, cluster.num_devices) else _resized(cluster, num_devices)


def _resized(cluster: Cluster, num_devices: int) -> Cluster:
    """The same nodes and links, but more or fewer of them: levels are cut to the devices and the last one holds all."""
    if num_devices < 1:
        raise UsageError(f"{num_devices} devices are no cluster; give 1 or more")
    *inner, outermost = cluster.levels
    levels = [level for level in inner if level.group_size < num_devices]
    last = outermost if len(levels) == len(inner) else inner[len(levels)]
    size = levels[-1].group_size if levels else 1
    levels.append(last.model_copy(update={"group_size": -(-num_devices // size) * size}))
    notes = f"{num_devices} devices instead of the paper's {cluster.num_devices}. {cluster.source.notes}"
    resized = cluster.model_copy(
        update={
            "name": f"{cluster.name}-{num_devices}",
            "devices": (cluster.devices[0].model_copy(update={"count": num_devices}),),
            "levels": tuple(levels),
            "source": cluster.source.model_copy(update={"notes": notes}),
        }
    )
    return Cluster.model_validate(resized.model_dump())  # a copy is not validated by itself
