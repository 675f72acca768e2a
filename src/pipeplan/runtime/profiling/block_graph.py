"""A model's graph as the profile has it, without computing: which blocks are alike, and what travels between them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeplan.files import Edge
from pipeplan.runtime.models.shapes import ShapedBlock, shaped_blocks
from pipeplan.runtime.models.spec import BlockSpec, Model

__all__ = ["BlockGraph", "BlockNode", "block_graph_of"]

_NUM_SAMPLES, _MORE_SAMPLES = 3, 5  # what grows between them is of samples, the rest is shared by all


@dataclass(frozen=True, slots=True)
class BlockNode:
    """What is known of a block before it runs.

    ``kind`` is the id of the first block like it, and ``likeness`` equal for all of them, those of other models
    included; ``input_needs_grad`` is by source; ``roots`` are the outputs, by index, that backward starts from;
    ``trainable`` and ``trainable_bytes`` are the numbers, and their bytes, in parameters that get a gradient; ``tied``
    names its group of shared parameters.
    """

    spec: BlockSpec
    kind: str
    likeness: Hashable
    input_needs_grad: tuple[bool, ...]
    roots: tuple[int, ...]
    parameter_bytes: int
    trainable: int
    trainable_bytes: int
    tied: str | None


@dataclass(frozen=True, slots=True)
class BlockGraph:
    """The blocks of a model in topological order, and its edges."""

    blocks: tuple[BlockNode, ...]
    edges: tuple[Edge, ...]

    @property
    def kinds(self) -> dict[str, list[str]]:
        """Blocks by the first of their kind, which stands for them."""
        found: dict[str, list[str]] = {}
        for block in self.blocks:
            found.setdefault(block.kind, []).append(block.spec.id)
        return found

    @property
    def fingerprint(self) -> str:
        """Equal for models whose blocks have the same names, dimensions, parameters, likeness and edges."""
        blocks = [
            (
                block.spec.id,
                block.spec.operator,
                sorted(block.spec.dimensions.items()),
                block.spec.samples,
                block.kind,
                block.input_needs_grad,
                (block.parameter_bytes, block.trainable_bytes, block.tied),
            )
            for block in self.blocks
        ]
        edges = [edge.model_dump_json() for edge in self.edges]
        return hashlib.sha256(repr((blocks, edges)).encode()).hexdigest()[:16]


def block_graph_of(model: Model, dtype: torch.dtype) -> BlockGraph:
    """Look a model over.

    Blocks are alike that have the same operator, dimensions, modules, parameters and inputs. A block that shares
    parameters with others counts them as its own, since it may stand on a device without the others.

    Raises:
        UsageError: a block cannot be built or called.
    """
    tied = {id_: f"{group[0][0]}.{group[0][1]}" for group in model.tied for id_, _ in group}
    read = {each for block in model.blocks for each in block.inputs}
    steps = tuple(shaped_blocks(model, _NUM_SAMPLES, dtype))
    kinds: dict[Hashable, str] = {}
    blocks: list[BlockNode] = []
    for step in steps:
        id_, parameters = step.spec.id, list(step.module.parameters())
        trained = [tensor for tensor in parameters if tensor.requires_grad]
        roots = _roots(step, read)
        likeness = _likeness(step, roots)
        blocks.append(
            BlockNode(
                step.spec,
                kinds.setdefault(likeness, id_),
                likeness,
                tuple(tensor.requires_grad for tensor in step.inputs),
                roots,
                sum(tensor.nbytes for tensor in parameters),
                sum(tensor.numel() for tensor in trained),
                sum(tensor.nbytes for tensor in trained),
                tied.get(id_),
            )
        )
    pairs = zip(steps, shaped_blocks(model, _MORE_SAMPLES, dtype), strict=True)
    readers = Counter(each for block in model.blocks for each in set(block.inputs))
    return BlockGraph(tuple(blocks), tuple(edge for few, more in pairs for edge in _edges(few, more, readers)))


def _roots(step: ShapedBlock, read: Collection[tuple[str, int]]) -> tuple[int, ...]:
    """The outputs that others read; of a block that nobody reads, all."""
    indices = range(len(step.outputs))
    return tuple(index for index in indices if (step.spec.id, index) in read) or tuple(indices)


def _edges(few: ShapedBlock, more: ShapedBlock, readers: Mapping[tuple[str, int], int]) -> Iterator[Edge]:
    """An edge for each tensor; what the block takes twice travels once. Those that others read, too, have a name."""
    taken = dict(zip(few.spec.inputs, zip(few.inputs, more.inputs, strict=True), strict=True))
    counts = Counter(source for source, _ in taken)
    for (source, index), tensors in taken.items():
        size, broadcast = _bytes(*tensors)
        yield Edge(
            source=source,
            target=few.spec.id,
            tensor=str(index) if readers[source, index] > 1 or counts[source] > 1 else None,
            bytes_per_sample=size,
            gradient=tensors[0].requires_grad,
            broadcast=broadcast,
        )


def _bytes(few: Tensor, more: Tensor) -> tuple[int, bool]:
    """Bytes for each sample, and False; of a tensor that does not grow with samples, all its bytes, and True."""
    growth = more.nbytes - few.nbytes
    return (growth // (_MORE_SAMPLES - _NUM_SAMPLES), False) if growth > 0 else (few.nbytes, True)


def _likeness(step: ShapedBlock, roots: tuple[int, ...]) -> Hashable:
    """Equal for blocks that cost the same."""
    spec = step.spec
    return (
        spec.operator,
        tuple(sorted(spec.dimensions.items())),
        spec.samples,
        spec.loss,
        _structure(step.module),
        tuple(_form(tensor) for tensor in step.inputs),
        tuple(spec.inputs.index(each) for each in spec.inputs),  # which of them are the same tensor
        roots,
    )


def _structure(module: nn.Module) -> Hashable:
    return (
        type(module),
        repr(module),
        tuple((name, _form(tensor)) for name, tensor in module.named_parameters()),
        tuple((name, _form(tensor)) for name, tensor in module.named_buffers()),
    )


def _form(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad
