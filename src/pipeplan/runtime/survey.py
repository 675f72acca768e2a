"""A model's graph as the profile has it, without computing: which blocks are alike, and what travels between them."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeplan.model import Edge
from pipeplan.runtime.model import BlockSpec, Model, Rehearsed

__all__ = ["Survey", "SurveyedBlock", "survey"]

_NUM_SAMPLES = 3  # tells tensors with samples in the first dimension from those that all samples share


@dataclass(frozen=True, slots=True)
class SurveyedBlock:
    """What is known of a block before it runs.

    ``kind`` is the id of the first block like it; ``input_needs_grad`` is by source; ``trainable_bytes`` are those
    of the parameters that get a gradient; ``tied`` names its group of shared parameters.
    """

    spec: BlockSpec
    kind: str
    input_needs_grad: tuple[bool, ...]
    parameter_bytes: int
    trainable_bytes: int
    tied: str | None


@dataclass(frozen=True, slots=True)
class Survey:
    """The blocks of a model in topological order, and its edges."""

    blocks: tuple[SurveyedBlock, ...]
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


def survey(model: Model, dtype: torch.dtype) -> Survey:
    """Look a model over.

    Blocks are alike that have the same operator, dimensions, modules, parameters and inputs. A block that shares
    parameters with others counts them as its own, since it may stand on a device without the others.

    Raises:
        UsageError: a block cannot be built or called.
    """
    tied = {id_: f"{group[0][0]}.{group[0][1]}" for group in model.tied for id_, _ in group}
    kinds: dict[Hashable, str] = {}
    blocks: list[SurveyedBlock] = []
    edges: list[Edge] = []
    for step in model.rehearse(_NUM_SAMPLES, dtype):
        id_, parameters = step.spec.id, list(step.module.parameters())
        blocks.append(
            SurveyedBlock(
                step.spec,
                kinds.setdefault(_likeness(step), id_),
                tuple(tensor.requires_grad for tensor in step.inputs),
                sum(tensor.nbytes for tensor in parameters),
                sum(tensor.nbytes for tensor in parameters if tensor.requires_grad),
                tied.get(id_),
            )
        )
        inputs = dict(zip(step.spec.inputs, step.inputs, strict=True))
        edges += [_edge(source, id_, tensor) for (source, _), tensor in inputs.items()]
    return Survey(tuple(blocks), tuple(edges))


def _edge(source: str, target: str, tensor: Tensor) -> Edge:
    by_sample = tensor.ndim > 0 and tensor.shape[0] == _NUM_SAMPLES
    return Edge(
        source=source,
        target=target,
        bytes_per_sample=tensor.nbytes // _NUM_SAMPLES if by_sample else tensor.nbytes,
        gradient=tensor.requires_grad,
        broadcast=not by_sample,
    )


def _likeness(step: Rehearsed) -> Hashable:
    """Equal for blocks that cost the same."""
    spec = step.spec
    return (
        spec.operator,
        tuple(sorted(spec.dimensions.items())),
        spec.samples,
        spec.loss,
        _structure(step.module),
        tuple(_form(tensor) for tensor in step.inputs),
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
