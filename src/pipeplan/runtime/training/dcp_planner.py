"""Tensors of which ranks have pieces, for ``torch.distributed.checkpoint``: it writes pieces, and reads any others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from pipeplan.runtime.parallel.sharding import ParameterPart

__all__ = ["ChunkLoadPlanner", "ChunkSavePlanner", "OwnedParameter", "ParameterChunk", "whole_chunk"]


@dataclass(frozen=True, slots=True)
class ParameterChunk:
    """A part of a tensor of shape ``size``, from ``offsets`` on; ``tensor`` may be a view."""

    size: torch.Size
    offsets: torch.Size
    tensor: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Where it lies."""
        return ChunkStorageMetadata(self.offsets, self.tensor.size())


def whole_chunk(tensor: Tensor) -> ParameterChunk:
    """All of a tensor."""
    return ParameterChunk(tensor.size(), torch.Size([0] * tensor.dim()), tensor)


@dataclass(frozen=True, slots=True)
class OwnedParameter:
    """A parameter of one rank, which is a part of the whole of this shape.

    ``stored`` is whether this rank is the one to store its part.
    """

    name: str
    parameter: nn.Parameter
    whole: torch.Size
    part: ParameterPart
    stored: bool

    def pieces(self, tensor: Tensor) -> list[ParameterChunk]:
        """Where the parameter, or what an optimizer keeps of each of its numbers, lies; anything else is whole."""
        if tensor.shape != self.parameter.shape:
            return [whole_chunk(tensor)]
        places = self.part.places(tensor, self.whole)
        return [ParameterChunk(self.whole, torch.Size(offsets), each) for offsets, each in places]

    def room(self, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor for this rank's part of what an optimizer kept of the parameter."""
        return torch.empty(self.parameter.shape if size == self.whole else size, dtype=dtype)


Pieces = Mapping[str, Sequence[ParameterChunk]]
"""What one rank has, by name."""


class ChunkSavePlanner(DefaultSavePlanner):
    """Writes the pieces that the ranks have; of those that several have, one."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._at = {(name, piece.offsets): piece for name, found in pieces.items() for piece in found}

    def create_local_plan(self) -> SavePlan:
        """What this rank has to write."""
        self.plan = SavePlan([_written(name, piece) for (name, _), piece in self._at.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """A piece's tensor."""
        assert index.offset is not None, "pieces have offsets"
        return self._at[index.fqn, index.offset].tensor


class ChunkLoadPlanner(DefaultLoadPlanner):
    """Reads into the pieces that a rank has, whatever pieces were written."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def create_local_plan(self) -> LoadPlan:
        """What this rank has to read."""
        assert self.metadata is not None, "set up by load"
        items = []
        for name, found in self._pieces.items():
            kept = self.metadata.state_dict_metadata[name]
            assert isinstance(kept, TensorStorageMetadata), "only tensors are written"
            items += create_read_items_for_chunk_list(name, kept, [piece.chunk for piece in found])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Where a piece goes."""
        assert index.index is not None, "pieces are numbered"
        return self._pieces[index.fqn][index.index].tensor


def _written(name: str, piece: ParameterChunk) -> WriteItem:
    properties = TensorProperties.create_from_tensor(piece.tensor)
    return WriteItem(
        index=MetadataIndex(name, piece.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(piece.chunk, properties, piece.size),
    )
