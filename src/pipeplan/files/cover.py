"""Cover: which kernel backend runs each block of a profile, as ``pipeplan kernels -o`` writes it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeplan.files.base import CurrentVersion, File, FileModel, current_version
from pipeplan.workload.elements import Count, Items, Name, Nanoseconds, Text


class CoveredGroup(FileModel):
    """Blocks that one backend runs at once, and what that takes of forward, and of backward in training."""

    blocks: Annotated[Items[Name], Field(min_length=1, description="block ids, in the order they run")]
    backend: Name
    ns: Nanoseconds


class Cover(File):
    """Groups with every block of a profile once, in an order in which they can run."""

    schema_version: Annotated[int, CurrentVersion("cover")] = current_version("cover")
    kind: Literal["cover"] = "cover"
    name: Annotated[Name, Field(description="the model's")]
    profile_sha256: Annotated[Text, Field(description="fingerprint of the profile that it was chosen from")]
    microbatch_size: Annotated[Count, Field(description="samples that the times are of")]
    predicted_ns: Annotated[Nanoseconds, Field(description="all groups, with what changes of backend take")]
    cover: Annotated[Items[CoveredGroup], Field(min_length=1)]

    @model_validator(mode="after")
    def _blocks_are_there_once(self) -> Cover:
        seen: dict[str, int] = {}
        for index, group in enumerate(self.cover):
            for id_ in group.blocks:
                if id_ in seen:
                    raise ValueError(f"cover[{index}] has block {id_!r}, which cover[{seen[id_]}] has")
                seen[id_] = index
        return self
