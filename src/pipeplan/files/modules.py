"""Modules: which modules of a model form each stage of a plan, and who runs it; written beside a schedule's CSV."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeplan.files.base import CurrentVersion, File, FileModel, current_version, said_only
from pipeplan.workload.elements import (
    CONTEXT,
    CONTEXT_EXCHANGE,
    EXPERT,
    EXPERT_SHARDS,
    GATHERED_CONTEXT,
    ZERO,
    ZERO_GROUP,
    ContextExchange,
    Count,
    Index,
    Items,
    Name,
    Recompute,
    ZeroLevel,
)


class StageModules(FileModel):
    """A stage: its rank in the pipeline, that rank's devices, and what the stage is made of.

    ``modules`` are names in the model that is cut (``layers.3``), all of them together the whole model; null where a
    stage ends inside of one.
    """

    rank: Annotated[Index, Field(description="of the pipeline, as rows of the CSV are numbered")]
    devices: Annotated[Items[Index], Field(min_length=1, description="the plan's devices that are this rank")]
    blocks: Annotated[Items[Name], Field(min_length=1, description="block ids, in the order they run")]
    modules: Annotated[
        Items[Name] | None, Field(description="the same as names of modules; null: a block is part of one")
    ] = None
    microbatch_size: Annotated[Count, Field(description="samples in one micro-batch, of all replicas together")]
    shards: Annotated[Count, Field(description="devices that split each block (tensor parallel)")] = 1
    replicas: Annotated[Count, Field(description="groups that split the samples (data parallel)")] = 1
    context: Annotated[Count, said_only(1, CONTEXT)] = 1
    context_exchange: Annotated[ContextExchange, said_only(GATHERED_CONTEXT, CONTEXT_EXCHANGE)] = GATHERED_CONTEXT
    expert: Annotated[Count, said_only(1, EXPERT)] = 1
    expert_shards: Annotated[Count, said_only(1, EXPERT_SHARDS)] = 1
    zero: Annotated[ZeroLevel, said_only(0, ZERO)] = 0
    zero_group: Annotated[Count | None, said_only(None, ZERO_GROUP)] = None
    recompute: Annotated[Recompute, Field(description="what backward computes again of it, as in a plan")] = False


class Modules(File):
    """The stages of a plan in their order, as what reads a schedule in a CSV needs them."""

    schema_version: Annotated[int, CurrentVersion("modules")] = current_version("modules")
    kind: Literal["modules"] = "modules"
    name: Annotated[Name, Field(description="the plan's")]
    placement: Annotated[Name, Field(description="the plan's strategy: one-to-one, circular, v-shape, ...")]
    num_ranks: Annotated[Count, Field(description="of the pipeline")]
    num_microbatches: Count
    stages: Annotated[Items[StageModules], Field(min_length=1)]

    @model_validator(mode="after")
    def _ranks_are_there(self) -> Modules:
        found = sorted({stage.rank for stage in self.stages})
        if found != [*range(self.num_ranks)]:
            raise ValueError(f"stages are on ranks {', '.join(map(str, found))}, and num_ranks is {self.num_ranks}")
        return self
