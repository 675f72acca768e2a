"""Cluster: the file with devices, their memory, and the links between them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeplan.files.base import MIGRATIONS, CurrentVersion, File, FileModel, Source, current_version, said_only
from pipeplan.units import MAX_PRICE, bytes_of, ns_of
from pipeplan.workload.elements import (
    MAX_DEVICES,
    SPEED,
    Bytes,
    Count,
    DeviceCount,
    Items,
    Name,
    Nanoseconds,
    PositiveNs,
    Speed,
)

Operation = Literal["send", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]

Overlap = Literal["none", "sums", "all"]
"""Which exchanges once an iteration run beside compute."""


class DeviceKind(FileModel):
    """``count`` equal devices, numbered on from the kinds before."""

    name: Name
    count: DeviceCount
    memory_bytes: Annotated[Bytes | None, Field(description="memory of each; none given is no limit")] = None
    price_per_hour: Annotated[
        float | None, Field(ge=0, le=MAX_PRICE, description="price of each, in any one currency")
    ] = None
    memory_reserve_bytes: Annotated[
        Bytes, Field(description="of that memory, what plans leave to context, communication buffers and allocator")
    ] = 0
    speed: Annotated[Speed, said_only(1.0, f"of each: {SPEED}")] = 1.0

    @model_validator(mode="after")
    def _reserves_of_its_memory(self) -> DeviceKind:
        if self.memory_reserve_bytes and self.memory_reserve_bytes >= (self.memory_bytes or 0):
            has = "no memory_bytes" if self.memory_bytes is None else f"memory_bytes {self.memory_bytes}"
            raise ValueError(f"memory_reserve_bytes {self.memory_reserve_bytes} leaves nothing of a device with {has}")
        return self


Bandwidth = Annotated[int, Field(ge=1, le=10**15)]


class LinkLevel(FileModel):
    """How two devices of one group talk, when no inner level holds both.

    Device ``d`` is in group ``d // group_size`` of the level. The bandwidth is that of one device.
    """

    name: Name
    group_size: Count
    latency_ns: Nanoseconds
    bandwidth_bytes_per_s: Bandwidth
    node_bandwidth_bytes_per_s: Annotated[
        Bandwidth | None,
        Field(description="for all together that leaves one group of the level inside; none given is the bandwidth"),
    ] = None
    oversubscription: Annotated[
        float | None,
        said_only(
            None,
            "of a tree: what all devices of one group of the level inside could send over this level together, divided "
            "by what its uplinks carry, such as 4 for 4:1; instead of node_bandwidth_bytes_per_s",
            ge=1,
            le=1000,
        ),
    ] = None
    rails: Annotated[
        bool,
        said_only(
            False,
            "whether the devices in the same place of each group of the level inside share a switch, and each such "
            "switch has uplinks of its own to the next level",
        ),
    ] = False

    @model_validator(mode="after")
    def _says_once_what_leaves(self) -> LinkLevel:
        if self.oversubscription is not None and self.node_bandwidth_bytes_per_s is not None:
            raise ValueError(
                f"level {self.name!r} has both oversubscription {self.oversubscription:g} and "
                f"node_bandwidth_bytes_per_s {self.node_bandwidth_bytes_per_s}, and both say what leaves a group of "
                "the level inside; leave one of them out"
            )
        return self


class FailureDomain(FileModel):
    """Devices that fail together: ``d`` is in domain ``d // group_size``, such as a node, a rack, a power supply."""

    name: Name
    group_size: Count


class MeasuredCurve(FileModel):
    """Measured times of one operation over sizes; it goes before latency and bandwidth."""

    operation: Operation
    level: Name
    num_devices: Count = 2
    points: Annotated[
        Items[tuple[Bytes, PositiveNs]],
        Field(min_length=1, description="pairs of bytes and ns, bytes ascending"),
    ]

    @model_validator(mode="after")
    def _ascends(self) -> MeasuredCurve:
        sizes = [size for size, _ in self.points]
        if any(after <= before for before, after in zip(sizes, sizes[1:], strict=False)):
            raise ValueError("points must have ascending bytes")
        return self


MIGRATIONS["cluster", 1] = lambda cluster: cluster


class Cluster(File):
    """Devices and the levels of links between them, innermost first."""

    schema_version: Annotated[int, CurrentVersion("cluster")] = current_version("cluster")
    kind: Literal["cluster"] = "cluster"
    name: Name
    source: Source
    devices: Annotated[Items[DeviceKind], Field(min_length=1)]
    levels: Items[LinkLevel] = ()
    measured: Items[MeasuredCurve] = ()
    contention: Annotated[
        float,
        said_only(
            0.0,
            "by what part of its speed a device computes less while it exchanges sharded state over the innermost "
            "links; over slower ones less, as their bandwidth is",
            ge=0,
            le=1,
        ),
    ] = 0.0
    overlap: Annotated[
        Overlap,
        said_only(
            "sums",
            "which exchanges once an iteration run beside compute: sums of whole gradients, beside backward, as "
            "pipeplan run has it; all, also sums between groups that divide gradients, and gathers of parameters "
            "that a step updated, beside the next forward, as Megatron-LM and FSDP have it; none",
        ),
    ] = "sums"
    failure_domains: Annotated[
        Items[FailureDomain],
        said_only(
            (),
            "which devices fail together, smallest first; without any, a group of the innermost of several "
            "levels, else each device alone",
        ),
    ] = ()

    @model_validator(mode="after")
    def _levels_nest(self) -> Cluster:
        names = [level.name for level in self.levels]
        if len(set(names)) != len(names):
            raise ValueError("levels have a name twice")
        if self.num_devices > MAX_DEVICES:
            raise ValueError(f"devices add up to {self.num_devices}, more than the {MAX_DEVICES} a cluster may have")
        sizes = [level.group_size for level in self.levels]
        for before, after in zip(sizes, sizes[1:], strict=False):
            if after <= before or after % before:
                raise ValueError(f"levels must nest: group_size {after} is not a larger multiple of {before}")
        if sizes and sizes[-1] < self.num_devices:
            raise ValueError(f"the outermost level joins {sizes[-1]} devices, but the cluster has {self.num_devices}")
        for index, curve in enumerate(self.measured):
            if curve.level not in names:
                raise ValueError(f"measured[{index}].level {curve.level!r} is not a level")
        return self

    @model_validator(mode="after")
    def _trees_have_groups(self) -> Cluster:
        for index, level in enumerate(self.levels):
            if index == 0 and (level.rails or level.oversubscription is not None):
                key = "rails" if level.rails else "oversubscription"
                raise ValueError(
                    f"levels[0] ({level.name!r}) has {key}, but no level is inside it whose groups could have uplinks; "
                    "put the links inside a node first"
                )
        if len(rails := [level.name for level in self.levels if level.rails]) > 1:
            raise ValueError(f"levels {rails[0]!r} and {rails[1]!r} both have rails; only one level may")
        return self

    @model_validator(mode="after")
    def _domains_hold_each_other(self) -> Cluster:
        names = [domain.name for domain in self.failure_domains]
        if len(set(names)) != len(names):
            raise ValueError("failure_domains have a name twice")
        sizes = [domain.group_size for domain in self.failure_domains]
        for index, (before, size) in enumerate(zip(sizes, sizes[1:], strict=False), 1):
            if size < before or size % sizes[0]:
                raise ValueError(
                    f"failure_domains[{index}] ({names[index]!r}) has group_size {size}, which must be at least "
                    f"the {before} before it and whole domains of {sizes[0]}, the smallest"
                )
        return self

    @classmethod
    def of(
        cls,
        name: str,
        num_devices: int,
        *,
        memory: str | int | None = None,
        memory_reserve: str | int = 0,
        levels: Iterable[tuple[str, int, str | float, str | int]] = (),
        price_per_hour: float | None = None,
        device: str = "device",
    ) -> Cluster:
        """Equal devices and their links, in a few lines of Python.

        Example::

            levels = [("node", 8, "3us", "300GB"), ("rack", 16, "10us", "25GB")]
            cluster = Cluster.of("two-nodes", 16, memory="80GB", levels=levels)

        Args:
            name: of the cluster.
            num_devices: how many there are.
            memory: of each, as text with a unit or bytes; None is no limit.
            memory_reserve: of that, what plans leave alone.
            levels: of links, innermost first: name, devices that it joins, latency (text with a unit, or seconds), and
                bandwidth per second (text with a unit, or bytes). Without any, links cost nothing.
            price_per_hour: of each, in any one currency.
            device: what a device is called.

        Raises:
            UsageError: a time or a size is none.
            ValueError: levels do not nest, or the outermost does not join all devices; nothing is left of the memory.
        """
        kind = DeviceKind(
            name=device,
            count=num_devices,
            memory_bytes=None if memory is None else bytes_of(memory),
            price_per_hour=price_per_hour,
            memory_reserve_bytes=bytes_of(memory_reserve),
        )
        links = tuple(
            LinkLevel(name=level, group_size=size, latency_ns=ns_of(latency), bandwidth_bytes_per_s=bytes_of(bandwidth))
            for level, size, latency, bandwidth in levels
        )
        source = Source(method="estimated", notes="Made in Python.")
        return cls(name=name, source=source, devices=(kind,), levels=links)

    def __repr__(self) -> str:
        levels = ", ".join(level.name for level in self.levels) or "none"
        return f"<Cluster {self.name!r}: {self.num_devices} devices, levels {levels}>"

    @property
    def num_devices(self) -> int:
        """Devices of all kinds together."""
        return sum(kind.count for kind in self.devices)

    @cached_property
    def memory_bytes(self) -> tuple[int | None, ...]:
        """Memory of each device; None is no limit."""
        return tuple(kind.memory_bytes for kind in self.devices for _ in range(kind.count))

    @cached_property
    def reserve_bytes(self) -> tuple[int, ...]:
        """What plans leave alone of each device's memory."""
        return tuple(kind.memory_reserve_bytes for kind in self.devices for _ in range(kind.count))

    @cached_property
    def usable_bytes(self) -> tuple[int | None, ...]:
        """What plans may use of each device's memory; None is no limit."""
        reserved = zip(self.memory_bytes, self.reserve_bytes, strict=True)
        return tuple(None if size is None else size - reserve for size, reserve in reserved)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What kind of device each is."""
        return tuple(kind.name for kind in self.devices for _ in range(kind.count))

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """How much each device computes in the time in which one that a profile's times are of computes 1."""
        return tuple(kind.speed for kind in self.devices for _ in range(kind.count))

    @cached_property
    def is_tree(self) -> bool:
        """Whether groups of devices share uplinks, or devices in the same places a switch."""
        return any(level.rails or level.oversubscription is not None for level in self.levels)

    @property
    def node_size(self) -> int | None:
        """Devices of a node, which the innermost of several levels joins; None where there is no more than one."""
        return self.levels[0].group_size if len(self.levels) > 1 else None

    @property
    def domains(self) -> tuple[FailureDomain, ...]:
        """What fails together, smallest first: as said, else a node where there are several levels, else a device."""
        size = self.node_size or 1
        return self.failure_domains or (FailureDomain(name="node" if size > 1 else "device", group_size=size),)

    def first(self, num_devices: int) -> Cluster:
        """The first ``num_devices`` devices only, at least one, with the links between them."""
        left, kinds = num_devices, []
        for kind in self.devices:
            if left > 0:
                kinds.append(kind.model_copy(update={"count": min(kind.count, left)}))
            left -= kind.count
        return self.model_copy(update={"devices": tuple(kinds)})

    def level_between(self, source: int, target: int) -> LinkLevel | None:
        """The innermost level whose group holds both devices; None where links cost nothing."""
        for level in self.levels:
            if source // level.group_size == target // level.group_size:
                return level
        return None
