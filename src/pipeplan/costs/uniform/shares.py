"""What a kind of device reaches of its peaks: fitted to published runs, and kept in the catalog of devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from pipeplan.costs.communication import LINK_CEILING
from pipeplan.costs.devices import PRESETS, Curve, DevicePreset, device_preset, preset_called
from pipeplan.costs.uniform.choices import choices
from pipeplan.costs.uniform.words import Machine
from pipeplan.files import Cluster


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the matrix units' peak, and of the bandwidth of memory and links; ``whose`` they are, and on how many layouts
    and runs they were fitted.
    """

    matrix: float
    bandwidth: float
    whose: str
    layouts: int = 0
    runs: int = 0

    @property
    def notes(self) -> str:
        """What a profile says of them."""
        return (
            f"Matrix units reach {self.matrix:.1%} of their peak, memory and links {self.bandwidth:.1%} of their "
            f"bandwidth, fitted on {self.runs} published runs of {self.whose} in {self.layouts} layouts."
        )


@cache
def catalog_shares() -> Mapping[str, Shares]:
    """Those of the catalog, by kind of device."""
    return {
        name: Shares(fitted.matrix, fitted.bandwidth, name, fitted.layouts, fitted.runs)
        for name in PRESETS
        if (fitted := device_preset(name).fitted) is not None
    }


def shares_for(kind: str, known: Mapping[str, Shares]) -> Shares:
    """A kind's own shares, else those of its nearest neighbour that has any."""
    seen: list[str] = []
    while kind not in known:
        seen.append(kind)
        kind = choices().neighbours.get(kind, "")
        if not kind or kind in seen:
            return Shares(*choices().unknown_shares, "nobody")
    return known[kind]


def shares_reached(device: DevicePreset) -> Shares:
    """What a device is taken to reach: what runs of its kind or a neighbour did, else where its own curves end."""
    fitted = shares_for(device.name, catalog_shares())
    return (
        fitted if fitted.runs else Shares(device.matrix_efficiency[-1][1], device.memory_efficiency[-1][1], device.name)
    )


def usual_attention(device: DevicePreset) -> str:
    """The fused attention that is usual on a device: cuDNN's from Hopper on, FlashAttention-2 before."""
    return "flash-2" if choices().generation(device.family) == "ampere" else "cudnn"


def machine_of(
    device: DevicePreset,
    shares: Shares,
    attention: str,
    *,
    node: int,
    link_bytes_per_s: float,
    adapter_bytes_per_s: float,
) -> Machine:
    """What the closed forms know of a device that reaches these shares, among others, with a kernel of attention."""
    forward, backward = choices().attention_shares(attention, device.family)
    return Machine(
        matrix_flops_per_s=device.matrix_flops_per_s,
        fp8_flops_per_s=device.fp8_flops_per_s or 0,
        multiprocessors=device.multiprocessors,
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s,
        memory_bytes=device.memory_bytes,
        node=node,
        link_bytes_per_s=link_bytes_per_s,
        adapter_bytes_per_s=adapter_bytes_per_s,
        matrix_share=shares.matrix,
        bandwidth_share=shares.bandwidth,
        attention_forward=forward,
        attention_backward=backward,
    )


def reaching(device: DevicePreset, shares: Shares) -> DevicePreset:
    """The device with curves that end at the shares, and links that reach theirs."""
    return replace(
        device,
        matrix_efficiency=_ending_at(device.matrix_efficiency, shares.matrix),
        memory_efficiency=_ending_at(device.memory_efficiency, shares.bandwidth),
        link_bytes_per_s=round(device.link_bytes_per_s * shares.bandwidth / LINK_CEILING),
    )


def as_reached(cluster: Cluster) -> Cluster:
    """A maker's cluster with links as fast as published runs found them, and as much in the way of compute.

    That is the share of their bandwidth that its devices reach, between nodes, too, and what a hidden message takes of
    compute. A cluster of devices that no preset has stays as it is.
    """
    preset = preset_called(cluster.devices[0].name)
    if preset is None or not cluster.levels:
        return cluster
    shares, contention = shares_for(preset.name, catalog_shares()), choices().contention

    def reached(rate: int | None) -> int | None:
        return None if rate is None else round(rate * shares.bandwidth)

    levels = [
        level.model_copy(update={name: reached(getattr(level, name)) for name in LINK_RATES})
        for level in cluster.levels
    ]
    notes = (
        f"{cluster.source.notes} Here links have {shares.bandwidth:.1%} of their nominal rates, and an exchange beside "
        f"compute slows it by {contention:g} of its time, as fitted on {shares.runs} published runs of {shares.whose} "
        f"in {shares.layouts} layouts (docs/benchmarks/published-runs.md)."
    )
    source = cluster.source.model_copy(update={"notes": notes})
    return cluster.model_copy(update={"levels": tuple(levels), "contention": contention, "source": source})


def faster_than_reached(cluster: Cluster) -> bool:
    """Whether a cluster has faster links than runs on its devices reach, nominal ones say, and none measured."""
    preset = preset_called(cluster.devices[0].name)
    if preset is None or not cluster.levels or cluster.measured:
        return False
    reached = preset.link_bytes_per_s * shares_for(preset.name, catalog_shares()).bandwidth
    return cluster.levels[0].bandwidth_bytes_per_s > _CLEARLY * reached


LINK_RATES = "bandwidth_bytes_per_s", "node_bandwidth_bytes_per_s"
"""Keys of a level."""

_CLEARLY = 1.05


def _ending_at(curve: Curve, share: float) -> Curve:
    """The curve with what its last point reaches changed to a share; what a kernel takes however small stays."""
    more = 1 / share - 1 / curve[-1][1]
    return tuple((work, 1 / (1 / reached + more)) for work, reached in curve)
