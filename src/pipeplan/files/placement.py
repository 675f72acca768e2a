"""Placement: which blocks form a stage, and which devices each stage runs on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from pipeplan.files.base import SAID_ONLY, CurrentVersion, File, FileModel, current_version
from pipeplan.workload.elements import (
    CONTEXT,
    CONTEXT_EXCHANGE,
    EXPERT,
    EXPERT_SHARDS,
    REDUCE_EVERY,
    REMADE,
    SEGMENTS,
    UNSHARD_EVERY,
    ZERO,
    ZERO_GROUP,
    ContextExchange,
    Count,
    DeviceCount,
    Index,
    Items,
    Name,
    Recompute,
    Remade,
    Segment,
    ZeroLevel,
    context_problem,
    exchange_problem,
    expert_problem,
    group_problem,
    mesh_of,
    recompute_problem,
    remade_problem,
    segments_problem,
    sharing_problem,
)


def configuration_problem(configurations: tuple[str, ...], num_blocks: int, shards: int, samples: int) -> str | None:
    """What is wrong with how a stage splits its blocks, if anything; ``samples`` are those of a replica at a time."""
    if configurations and len(configurations) != num_blocks:
        return f"are {len(configurations)} for {num_blocks} blocks; give one for each, or none"
    for index, text in enumerate(configurations):
        try:
            mesh = mesh_of(configurations, index, shards)
        except ValueError as error:
            return str(error)
        if mesh.size != shards:
            return f"has {text!r} for {mesh.size} devices, and {shards} devices split each block"
        if samples % (own := mesh.of_samples.size):
            return f"has {text!r}, and {samples} samples cannot be shared evenly over {own} devices"
    return None


_SAID_ONLY = (
    "context_exchange",
    "expert_shards",
    "zero",
    "zero_group",
    "unshard_every",
    "reduce_every",
    "segments",
    "remade",
)


class PlacedStage(FileModel):
    """A stage and its device group: ``shards`` devices split each block, ``replicas`` groups split the samples.

    Inside each replica ``context`` groups of shards split the sequence of every sample.
    """

    blocks: Annotated[Items[Name], Field(min_length=1, description="block ids, in the order they run")]
    devices: Annotated[Items[Index], Field(min_length=1, description="the stage's device group")]
    shards: Annotated[Count, Field(description="devices that split each block (tensor parallel)")] = 1
    replicas: Annotated[Count, Field(description="groups that split the samples (data parallel)")] = 1
    context: Annotated[Count, Field(description=CONTEXT, json_schema_extra={SAID_ONLY: True})] = 1
    context_exchange: Annotated[
        ContextExchange | None,
        Field(description=f"{CONTEXT_EXCHANGE}; null: as a search chooses", json_schema_extra={SAID_ONLY: True}),
    ] = None
    expert: Annotated[Count, Field(description=EXPERT, json_schema_extra={SAID_ONLY: True})] = 1
    expert_shards: Annotated[
        Count | None,
        Field(
            description=f"{EXPERT_SHARDS}; null: the fewest that the profile has costs for",
            json_schema_extra={SAID_ONLY: True},
        ),
    ] = None
    microbatch_size: Annotated[
        Count | None, Field(description="samples in one micro-batch of this stage, if not the plan's")
    ] = None
    recompute: Annotated[
        Recompute | None,
        Field(
            description="of this stage, if it is not as in all others; selective: the attention cores of its blocks; "
            "a list: of each block in order"
        ),
    ] = None
    route: Annotated[Index, Field(description="of the placement's routes, the one this stage is on")] = 0
    num_parted: Annotated[Index, Field(description="leading micro-batches whose forward runs in two parts")] = 0
    configurations: Annotated[
        Items[Name], Field(description="how each block is split over the shards, such as samples2-shards2; none: all")
    ] = ()
    zero: Annotated[ZeroLevel, Field(description=ZERO, json_schema_extra={SAID_ONLY: True})] = 0
    zero_group: Annotated[Count | None, Field(description=ZERO_GROUP, json_schema_extra={SAID_ONLY: True})] = None
    unshard_every: Annotated[Count | None, Field(description=UNSHARD_EVERY, json_schema_extra={SAID_ONLY: True})] = None
    reduce_every: Annotated[Count | None, Field(description=REDUCE_EVERY, json_schema_extra={SAID_ONLY: True})] = None
    segments: Annotated[Items[Segment], Field(description=SEGMENTS, json_schema_extra={SAID_ONLY: True})] = ()
    remade: Annotated[Items[Remade], Field(description=REMADE, json_schema_extra={SAID_ONLY: True})] = ()

    @model_serializer(mode="wrap")
    def _without_what_is_not_divided(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Placements that divide nothing stay as they were, and so do fingerprints of profiles that have them."""
        found: dict[str, Any] = written(self)
        for key in ("context", "expert"):
            if found.get(key) == 1:
                del found[key]
        return {key: value for key, value in found.items() if value or key not in _SAID_ONLY}

    @property
    def copies(self) -> int:
        """How many times its parameters are there: every replica has them once for each part of a sequence."""
        return self.replicas * self.context

    @model_validator(mode="after")
    def _group_is_whole(self) -> PlacedStage:
        if len(set(self.devices)) != len(self.devices):
            raise ValueError("devices name a device twice")
        how = self.context_exchange, self.configurations
        if problem := group_problem(self.shards, self.context, self.replicas, len(self.devices), *how):
            raise ValueError(problem)
        if problem := expert_problem(
            self.expert, len(self.devices), bool(self.configurations), self.expert_shards or 1
        ):
            raise ValueError(problem)
        if len(set(self.blocks)) != len(self.blocks):
            raise ValueError("blocks name a block twice")
        size = self.microbatch_size
        samples = 0 if size is None else size // self.replicas  # without a size of its own it is not known yet
        if problem := sharing_problem(self.zero, self.zero_group, self.copies, bool(self.configurations)):
            raise ValueError(problem)
        if problem := exchange_problem(self.zero, self.copies, self.unshard_every, self.reduce_every, self.num_parted):
            raise ValueError(problem)
        if problem := configuration_problem(self.configurations, len(self.blocks), self.shards, samples):
            raise ValueError(f"configurations {problem}")
        if problem := recompute_problem(self.recompute, len(self.blocks)):
            raise ValueError(f"recompute {problem}")
        if problem := remade_problem(self.remade, self.blocks, self.configurations, bool(self.recompute)):
            raise ValueError(f"remade {problem}")
        whole = ("shards", "context", "expert", "recompute", "num_parted", "configurations")
        if problem := segments_problem(
            self.segments, self.blocks, {key: getattr(self, key) for key in whole}, self.zero
        ):
            raise ValueError(f"segments {problem}")
        return self


class Placement(File):
    """Stages in a topological order of the stage graph, each on its devices.

    Micro-batches take the routes in turn; every route has a stage for each block. One route unless the strategy is
    one of the ``bidirectional`` ones.
    """

    schema_version: Annotated[int, CurrentVersion("placement")] = current_version("placement")
    kind: Literal["placement"] = "placement"
    strategy: Annotated[Name, Field(description="one-to-one, circular, v-shape, bidirectional, or a shape's name")]
    num_devices: DeviceCount
    num_routes: Count = 1
    stages: Annotated[Items[PlacedStage], Field(min_length=1)]

    @classmethod
    def of(
        cls, stages: Iterable[PlacedStage | Iterable[str]], *, devices: Iterable[int | Iterable[int]] | None = None
    ) -> Placement:
        """Stages on devices, in a line of Python.

        Example::

            Placement.of([["layer0", "layer1"], ["layer2"]], devices=[0, (1, 2)])

        Args:
            stages: the blocks of each, in the order they run; or :class:`PlacedStage`, which has its devices.
            devices: of each stage: one, or several that split each block; by default stage 0 is on device 0, and so on.

        Raises:
            ValueError: a block is in two stages, or there are more or fewer devices than stages.
        """
        known = list(stages)
        groups = [(each,) if isinstance(each, int) else tuple(each) for each in devices or range(len(known))]
        placed = tuple(
            stage
            if isinstance(stage, PlacedStage)
            else PlacedStage(blocks=tuple(stage), devices=group, shards=len(group))
            for stage, group in zip(known, groups, strict=True)
        )
        count = 1 + max((device for stage in placed for device in stage.devices), default=0)
        return cls(strategy="by-hand", num_devices=count, stages=placed)

    @property
    def whole(self) -> Placement:
        """The same without forwards in parts."""
        stages = tuple(stage.model_copy(update={"num_parted": 0}) for stage in self.stages)
        return self.model_copy(update={"stages": stages})

    @model_validator(mode="after")
    def _stages_are_disjoint(self) -> Placement:
        seen: dict[tuple[int, str], int] = {}
        for index, stage in enumerate(self.stages):
            if (last := max(stage.devices)) >= self.num_devices:
                raise ValueError(f"stages[{index}] stands on device {last}, but num_devices is {self.num_devices}")
            if stage.route >= self.num_routes:
                raise ValueError(f"stages[{index}] is on route {stage.route}, but num_routes is {self.num_routes}")
            for block in stage.blocks:
                if (stage.route, block) in seen:
                    raise ValueError(f"block {block!r} is in stages[{seen[stage.route, block]}] and in stages[{index}]")
                seen[stage.route, block] = index
        if len(seen) != self.num_routes * len({block for _, block in seen}):
            raise ValueError(f"each of the {self.num_routes} routes must have the same blocks")
        stages = self.stages
        unlike = (bool(stage.configurations) for stage in stages)
        if problem := context_problem((stage.context for stage in stages), unlike):
            raise ValueError(problem)
        return self
