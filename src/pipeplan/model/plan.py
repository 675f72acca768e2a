"""Plan: the file with stages, schedule and a program per device; it is understood without the profile.

A plan is compact: an *operation* stands for all actions of one kind and stage, and says once what they have
in common (duration, memory effect, dependencies, transfers). The schedule gives the start of each action, the
programs give for each device the order of compute and communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from pipeplan.model.action import (
    ACTION_PATTERN,
    KIND_PATTERN,
    NUMBER_PATTERN,
    is_instruction,
    operation_of,
    payload_of,
)
from pipeplan.model.base import (
    MAX_DEVICES,
    Bytes,
    Count,
    CurrentVersion,
    File,
    FileModel,
    Index,
    Items,
    Name,
    Nanoseconds,
    PositiveNs,
)
from pipeplan.model.mesh import Mesh
from pipeplan.model.migrations import current_version
from pipeplan.model.placement import PlacedStage, Placement, mesh_of
from pipeplan.model.samples import Slots

__all__ = [
    "Attribute",
    "Dependency",
    "Device",
    "DeviceMemory",
    "Hop",
    "Operation",
    "Plan",
    "Predicted",
    "Provenance",
    "Repetend",
    "Stage",
]

OperationId = Annotated[str, StringConstraints(pattern=f"^{NUMBER_PATTERN}{KIND_PATTERN}$")]
ActionText = Annotated[str, StringConstraints(pattern=ACTION_PATTERN)]
TimeSum = Annotated[int, Field(ge=0, le=2**62)]

Scalar = str | int | float | bool
Attribute = Scalar | tuple[Scalar, ...]
"""What an instruction's function is told beside its tensors."""


class Device(FileModel):
    """A device the plan uses, and its memory (None is no limit)."""

    name: Name = "device"
    memory_bytes: Bytes | None = None


class Stage(FileModel):
    """A stage: blocks, device group, how it is split, and what it keeps on each of its devices.

    Replica r stands on devices ``r * shards`` to ``(r + 1) * shards - 1`` of ``devices`` and works on the r-th of
    equal shares of each micro-batch's samples.

    A stage of instructions has no blocks; its micro-batches say how often they run.
    """

    blocks: Items[Name]
    devices: Annotated[Items[Index], Field(min_length=1)]
    shards: Count = 1
    replicas: Count = 1
    configuration: Name | None = None
    configurations: Annotated[
        Items[Name], Field(description="how each block is split over the shards, such as samples2-shards2; none: all")
    ] = ()
    microbatch_size: Annotated[Count, Field(description="samples in one micro-batch of this stage")]
    recompute: bool = False
    route: Annotated[Index, Field(description="of the plan's routes, the one whose micro-batches come here")] = 0
    num_parted: Annotated[Index, Field(description="leading micro-batches whose forward runs in two parts")] = 0
    sync_ns: Annotated[Nanoseconds, Field(description="summing gradients over replicas and routes, at the end")] = 0
    parameter_bytes: Annotated[Bytes, Field(description="on each device of the stage, as the next two")] = 0
    gradient_bytes: Bytes = 0
    optimizer_bytes: Bytes = 0

    def mesh_of(self, index: int) -> Mesh:
        """How the devices of a replica stand for a block. Raises ValueError where ``check`` would refuse it."""
        return mesh_of(self.configurations, index, self.shards)


class Operation(FileModel):
    """All actions of one kind and stage. They run on all devices of the stage together.

    A kind that is none of F, B, I and W is an instruction's: an upper-case word for which whoever runs the plan has a
    function, which gets the ``attributes``.
    """

    kind: Annotated[str, StringConstraints(pattern=f"^{KIND_PATTERN}$")]
    stage: Index
    duration_ns: PositiveNs
    acquire_bytes: Annotated[Bytes, Field(description="taken on each device at the start")] = 0
    release_bytes: Annotated[Bytes, Field(description="given back on each device at the end")] = 0
    workspace_bytes: Annotated[Bytes, Field(description="held on each device while running")] = 0
    part_ns: Annotated[PositiveNs | None, Field(description="of one part of a micro-batch that runs in two")] = None
    attributes: Annotated[dict[Name, Attribute], Field(description="of an instruction, for its function")] = {}

    def __hash__(self) -> int:
        return hash((self.id, self.duration_ns, self.acquire_bytes, self.release_bytes, self.workspace_bytes))

    @field_validator("kind")
    @classmethod
    def _is_free(cls, kind: str) -> str:
        operation_of(f"0{kind}")
        return kind

    @model_validator(mode="after")
    def _attributes_are_an_instructions(self) -> Operation:
        if self.attributes and not is_instruction(self.kind):
            raise ValueError(f"attributes are for instructions, not for {self.kind}")
        return self

    @property
    def id(self) -> str:
        """Stage and kind: ``2F``. With a micro-batch behind it, the text of an action."""
        return f"{self.stage}{self.kind}"


class Hop(FileModel):
    """One message of a dependency, once per micro-batch: a SEND on one device and a RECV on another.

    It carries those samples of the source's micro-batch that the target device works on. Where stages have replicas
    or micro-batches of different sizes, those of some micro-batches alone may go this way: of every ``every`` the
    ``run`` from number ``first`` on. A micro-batch that both stages run in parts is two messages of half the bytes
    and occupancy.
    """

    source_device: Index
    target_device: Index
    every: Count = 1
    run: Count = 1
    first: Index = 0
    bytes: Bytes = 0
    latency_ns: Annotated[Nanoseconds, Field(description="time that occupies no link")] = 0
    occupancy_ns: Annotated[Nanoseconds, Field(description="time that occupies the link")] = 0

    @property
    def duration_ns(self) -> int:
        """Time from the producer's end until the consumer may start, on an idle link."""
        return self.latency_ns + self.occupancy_ns

    @property
    def pattern(self) -> dict[str, int]:
        """The fields of :class:`~pipeplan.model.samples.Slots` that say which micro-batches go this way."""
        return {"every": self.every, "run": self.run, "first": self.first}

    @property
    def part(self) -> Hop:
        """The message of one part."""
        half = -(-self.occupancy_ns // 2)
        return self.model_copy(update={"bytes": -(-self.bytes // 2), "occupancy_ns": half})


class Dependency(FileModel):
    """Actions of ``target`` start after the ``source`` actions that hold their samples, and after the hops.

    Which samples an action holds is said in :mod:`pipeplan.model.samples`; between stages of equal size and route
    micro-batch m depends on micro-batch m. Where an instruction is at one of the ends, ``needs`` may say otherwise.
    """

    source: OperationId
    target: OperationId
    hops: Items[Hop] = ()
    needs: Annotated[
        tuple[Index, ...] | None,
        Field(description="for each action of the target, how many of the source's first ones it waits for"),
    ] = None

    @property
    def source_stage(self) -> int:
        """Number of the source's stage."""
        return operation_of(self.source)[0]

    @property
    def source_kind(self) -> str:
        """The source's kind."""
        return operation_of(self.source)[1]

    @property
    def target_stage(self) -> int:
        """Number of the target's stage."""
        return operation_of(self.target)[0]

    @property
    def target_kind(self) -> str:
        """The target's kind."""
        return operation_of(self.target)[1]

    @property
    def payload(self) -> str:
        """What its messages carry: the source's outputs (F), gradients (B) or an instruction's results."""
        return payload_of(self.source_kind)

    @property
    def has_instruction(self) -> bool:
        """Whether an instruction is at either end."""
        return is_instruction(self.source_kind) or is_instruction(self.target_kind)

    @property
    def lag_ns(self) -> int:
        """Time between the source's end and the target's start: its slowest hop, 0 without hops."""
        return max((hop.duration_ns for hop in self.hops), default=0)


class Repetend(FileModel):
    """The part of the programs that repeats (Tessel III-C).

    On each device it is a contiguous run of compute actions in which every operation of the device occurs
    ``unroll`` times, on micro-batches ``first[operation]``, ``first[operation] + 1``, ...
    """

    unroll: Annotated[Count, Field(description="micro-batches that finish per repetend")]
    repetend_ns: Annotated[PositiveNs, Field(description="time from one repetition to the next")]
    first: Annotated[dict[OperationId, Index], Field(min_length=1)]

    @property
    def span(self) -> int:
        """How many micro-batches a repetend reaches over (Tessel's N_R)."""
        return max(self.first.values()) - min(self.first.values()) + self.unroll

    @property
    def period_ns(self) -> float:
        """Time per micro-batch."""
        return self.repetend_ns / self.unroll


class DeviceMemory(FileModel):
    """Memory of one device at the moment it holds most: the five parts add up to ``peak_bytes``."""

    parameter_bytes: Bytes
    gradient_bytes: Bytes
    optimizer_bytes: Bytes
    activation_bytes: Bytes
    workspace_bytes: Bytes
    peak_bytes: Bytes


class Predicted(FileModel):
    """What the plan's programs take when every action lasts as stated and starts as soon as it can."""

    makespan_ns: TimeSum
    lower_bound_ns: Annotated[TimeSum, Field(description="proved: no schedule of this placement is shorter")]
    gap: Annotated[float, Field(ge=0, description="makespan / lower_bound - 1")]
    iteration_ns: Annotated[TimeSum, Field(description="makespan, then gradients summed over replicas")] = 0
    period_ns: Annotated[float | None, Field(ge=0, description="per micro-batch, of the repetend")] = None
    period_lower_bound_ns: Annotated[float, Field(ge=0)] = 0.0
    bubble_rate: Annotated[float, Field(ge=0, le=1, description="of the iteration")]
    bubble_rate_span: Annotated[float, Field(ge=0, le=1, description="by span")]
    bubble_rate_steady: Annotated[float | None, Field(ge=0, le=1, description="of the repetend")] = None
    memory: Items[DeviceMemory]


class Provenance(FileModel):
    """What the plan was made from, and with."""

    profile: str = ""
    profile_sha256: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    cluster_sha256: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    scheduler: str = ""
    options: dict[str, str | int | float | bool | None] = {}
    seed: int = 0
    versions: dict[str, str] = {}


class Plan(File):
    """A placement, a schedule and a program per device for one mini-batch."""

    schema_version: Annotated[int, CurrentVersion("plan")] = current_version("plan")
    kind: Literal["plan"] = "plan"
    name: Name
    placement: Annotated[Name, Field(description="strategy: one-to-one, circular, v-shape, ...")]
    num_microbatches: Count
    microbatch_size: Annotated[Count, Field(description="mini-batch / num_microbatches")]
    num_routes: Annotated[Count, Field(description="ways through the stages that micro-batches take in turn")] = 1
    devices: Annotated[Items[Device], Field(min_length=1, max_length=MAX_DEVICES)]
    stages: Annotated[Items[Stage], Field(min_length=1)]
    operations: Annotated[Items[Operation], Field(min_length=1)]
    dependencies: Items[Dependency]
    starts_ns: Annotated[dict[OperationId, Items[TimeSum]], Field(description="start of each micro-batch's action")]
    split_overhead_ns: Annotated[Nanoseconds, Field(description="in each I and W beside the profile's time")] = 0
    programs: Annotated[Items[Items[ActionText]], Field(description="per device, compute and communication")]
    repetend: Repetend | None = None
    predicted: Predicted
    provenance: Provenance = Provenance()

    @model_validator(mode="after")
    def _refers_to_what_is_there(self) -> Plan:
        """Everything named exists and every list has its length; :mod:`pipeplan.check` does the rest."""
        for number in range(len(self.stages)):
            self._require_stage(number)
        self._require_blocks_first()
        self._require_operations()
        groups = [frozenset(stage.devices) for stage in self.stages]
        for number in range(len(self.dependencies)):
            self._require_dependency(number, groups)
        self._require_starts()
        self._require_one_per_device("programs", len(self.programs))
        self._require_one_per_device("predicted.memory", len(self.predicted.memory))
        if self.repetend is not None and set(self.repetend.first) != set(self._by_id):
            odd = sorted(set(self.repetend.first) ^ set(self._by_id))[0]
            raise ValueError(f"repetend.first must name every operation once; {odd} is missing or unknown")
        return self

    def _require_stage(self, number: int) -> None:
        stage = self.stages[number]
        for device in stage.devices:
            if device >= len(self.devices):
                raise ValueError(
                    f"stages[{number}] stands on device {device}, but the plan has {len(self.devices)} devices"
                )
        if len(set(stage.devices)) != len(stage.devices):
            raise ValueError(f"stages[{number}].devices name a device twice")
        if stage.shards * stage.replicas != len(stage.devices):
            raise ValueError(f"stages[{number}]: shards x replicas must equal its {len(stage.devices)} devices")
        if stage.route >= self.num_routes:
            raise ValueError(f"stages[{number}] is on route {stage.route}, but the plan has {self.num_routes}")
        if self.mini_batch % (stage.microbatch_size * self.num_routes):
            routes = f" on each of {self.num_routes} routes" if self.num_routes > 1 else ""
            raise ValueError(
                f"stages[{number}].microbatch_size {stage.microbatch_size}{routes} does not divide the mini-batch of "
                f"{self.mini_batch}"
            )
        if stage.num_parted:
            self._require_parts(number)

    def _require_blocks_first(self) -> None:
        """Stages without blocks are numbered last, so that a placement numbers the others as the plan does."""
        empty = [number for number, stage in enumerate(self.stages) if not stage.blocks]
        behind = [number for number, stage in enumerate(self.stages) if stage.blocks and empty and number > empty[0]]
        if behind:
            raise ValueError(f"stages[{empty[0]}] has no blocks and stands before stages[{behind[0]}], which has some")

    def _require_parts(self, number: int) -> None:
        """Parts are halves of equal micro-batches, so that a part of one stage is a part of the next."""
        stage = self.stages[number]
        if stage.num_parted > self.num_microbatches:
            raise ValueError(
                f"stages[{number}].num_parted {stage.num_parted} is more than the {self.num_microbatches} micro-batches"
            )
        if self.num_routes > 1 or any(other.microbatch_size != self.microbatch_size for other in self.stages):
            raise ValueError(f"stages[{number}].num_parted: parts need one route, and one micro-batch size")
        if stage.microbatch_size % (2 * stage.replicas):
            raise ValueError(
                f"stages[{number}].num_parted: micro-batches of {stage.microbatch_size} samples cannot be halved "
                f"for {stage.replicas} replicas"
            )

    def _require_operations(self) -> None:
        seen: set[str] = set()
        for number, operation in enumerate(self.operations):
            if operation.stage >= len(self.stages):
                raise ValueError(
                    f"operations[{number}] is of stage {operation.stage}, but there are {len(self.stages)} stages"
                )
            if operation.id in seen:
                raise ValueError(f"operations[{number}] repeats operation {operation.id}")
            seen.add(operation.id)
            parted = operation.kind == "F" and self.stages[operation.stage].num_parted > 0
            if parted != (operation.part_ns is not None):
                raise ValueError(f"operations[{number}].part_ns is for forwards of stages with num_parted, and for all")

    def _require_dependency(self, number: int, groups: Sequence[frozenset[int]]) -> None:
        """``groups`` [stage] are the devices of the stages."""
        dependency = self.dependencies[number]
        for end in (dependency.source, dependency.target):
            if end not in self._by_id:
                raise ValueError(f"dependencies[{number}] names {end}, which is not an operation")
        if dependency.source == dependency.target:
            raise ValueError(f"dependencies[{number}] joins {dependency.source} to itself")
        if dependency.needs is not None:
            self._require_needs(number)
        sources, targets = groups[dependency.source_stage], groups[dependency.target_stage]
        for index, hop in enumerate(dependency.hops):
            place = f"dependencies[{number}].hops[{index}]"
            if hop.source_device not in sources:
                raise ValueError(
                    f"{place} leaves from device {hop.source_device}, where {dependency.source} does not run"
                )
            if hop.target_device not in targets:
                raise ValueError(f"{place} ends on device {hop.target_device}, where {dependency.target} does not run")
            if hop.first + hop.run > hop.every:
                raise ValueError(f"{place}: first {hop.first} + run {hop.run} must be at most every {hop.every}")

    def _require_needs(self, number: int) -> None:
        """One count per action of the target, of actions that the source has."""
        dependency, place = self.dependencies[number], f"dependencies[{number}].needs"
        needs, have = dependency.needs or (), self.num_instances(dependency.source)
        if not dependency.has_instruction or dependency.hops:
            raise ValueError(f"{place} is for dependencies of instructions, and for such without hops")
        if len(needs) != self.num_instances(dependency.target):
            raise ValueError(
                f"{place} has {len(needs)} entries for {self.num_instances(dependency.target)} actions of "
                f"{dependency.target}"
            )
        if max(needs) > have:
            raise ValueError(
                f"{place}[{needs.index(max(needs))}] is {max(needs)}, but {dependency.source} has {have} actions"
            )

    def _require_starts(self) -> None:
        for id_ in self.starts_ns:
            if id_ not in self._by_id:
                raise ValueError(f"starts_ns names {id_}, which is not an operation")
        for id_ in self._by_id:
            if id_ not in self.starts_ns:
                raise ValueError(f"starts_ns leaves out operation {id_}")
            stated, count = len(self.starts_ns[id_]), self.num_instances(id_)
            if stated != count:
                raise ValueError(f"starts_ns[{id_}] has {stated} starts for {count} micro-batches")

    def _require_one_per_device(self, name: str, number: int) -> None:
        if number != len(self.devices):
            raise ValueError(f"{name} has {number} entries for {len(self.devices)} devices")

    @property
    def mini_batch(self) -> int:
        """Samples in one iteration."""
        return self.num_microbatches * self.microbatch_size

    @cached_property
    def _by_id(self) -> dict[str, Operation]:
        return {operation.id: operation for operation in self.operations}

    @property
    def placed(self) -> Placement:
        """Where the plan's stages stand, as a placement says it; stages of instructions are not a placement's.

        Raises:
            ValueError: the stages are not ones of a placement, for example because two have a block.
        """
        return Placement(
            strategy=self.placement,
            num_devices=len(self.devices),
            num_routes=self.num_routes,
            stages=tuple(
                PlacedStage(**{name: getattr(stage, name) for name in PlacedStage.model_fields})
                for stage in self.stages
                if stage.blocks
            ),
        )

    def operation(self, id_: str) -> Operation:
        """The operation with this id, such as ``2F``."""
        return self._by_id[id_]

    def stage_of(self, id_: str) -> Stage:
        """The stage of an operation."""
        return self.stages[operation_of(id_)[0]]

    def devices_of(self, id_: str) -> tuple[int, ...]:
        """The devices an operation runs on, all at once."""
        return self.stage_of(id_).devices

    def slots(self, id_: str) -> Slots:
        """Which samples each action of an operation holds."""
        return slots_of(self.stage_of(id_), operation_of(id_)[1], self.mini_batch, self.num_routes)

    def num_instances(self, id_: str) -> int:
        """How many actions an operation has: one per micro-batch of its stage, and one more for each in two parts."""
        return len(self.slots(id_))


def slots_of(stage: Stage, kind: str, mini_batch: int, num_routes: int) -> Slots:
    """Which samples each action of an operation of this kind and stage holds."""
    size = stage.microbatch_size
    return Slots(
        size=size,
        stride=size * num_routes,
        offset=size * stage.route,
        count=mini_batch // (size * num_routes),
        num_parted=stage.num_parted if kind == "F" else 0,
    )
