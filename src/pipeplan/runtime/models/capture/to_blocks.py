"""From a module to a model of blocks that compute the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.models.capture.block_module import Recipe, recipe_of
from pipeplan.runtime.models.capture.export import trace
from pipeplan.runtime.models.capture.functionalize import CapturedGraph, OpNode
from pipeplan.runtime.models.capture.grouping import OpGroup, group_operations, taken_by
from pipeplan.runtime.models.capture.naming import block_ids, dimensions_of, operator_of
from pipeplan.runtime.models.shapes import outputs_of
from pipeplan.runtime.models.spec import Batch, BlockSpec, Grain, Model, Output
from pipeplan.runtime.models.synthetic_batches import batch_like

__all__ = ["capture", "parameters_of", "replay"]


def capture(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    name: str,
    grain: Grain = "half",
    batch: Callable[[int, int, int], dict[str, Tensor]] | None = None,
    predictions: Callable[[Batch], int] | None = None,
) -> Model:
    """Cut a module into blocks.

    Dropout is left out. A tensor that goes from one block to another has its samples in the first dimension, or is one
    for all samples.

    Args:
        module: returns one tensor; a scalar is taken as the sum of the losses of the samples. On the meta device
            parameters get made-up numbers when a block is built.
        inputs: examples by the names of the forward's arguments, samples in the first dimension.
        name: of the model.
        grain: what a block is: an element of the module's outermost lists of modules, half of one, or an operator.
        batch: as :class:`Model` has it; without it random numbers like the examples.
        predictions: as :class:`Model` has it; without it the number of samples.

    Raises:
        UsageError: it cannot be captured; the text says where and what to do.
    """
    traced = trace(module, inputs, name)
    groups, free = group_operations(traced, module, grain)
    if not groups:
        raise UsageError(f"model {name!r} does no work that needs parameters; there is nothing to cut into blocks")
    recipes = _recipes(traced, groups, free, name)
    blocks = _blocks(groups, recipes, traced, grain)
    return Model(
        name,
        blocks,
        batch or partial(batch_like, {key: value.detach() for key, value in inputs.items()}),
        predictions or (lambda given: next(iter(given.values())).shape[0]),
        tied=_tied(blocks, recipes, traced),
    )


def _recipes(traced: CapturedGraph, groups: Sequence[OpGroup], free: set[OpNode], name: str) -> list[Recipe]:
    owner = {op: index for index, group in enumerate(groups) for op in group.operations}
    given: list[dict[OpNode, None]] = [{} for _ in groups]
    for group in groups:
        for source in taken_by(group, free):
            _require_travelling(source, name)
            given[owner[source]][source] = None
    if traced.output not in owner:
        raise UsageError(f"model {name!r}: its output does not depend on its parameters")
    given[owner[traced.output]][traced.output] = None
    counting = next((op for op in traced.operations if op.kind == "input" and op.per_sample), None)
    return [recipe_of(group, list(out), free, counting) for group, out in zip(groups, given, strict=True)]


def _require_travelling(op: OpNode, name: str) -> None:
    if op.misplaced:
        raise UsageError(
            f"model {name!r}: a tensor of shape {list(op.shape)} for 2 samples, made in module {op.path!r}, goes from "
            "block to block and has its samples not in the first dimension; use batch_first, or a coarser --granularity"
        )
    if not isinstance(op.value, Tensor):
        raise UsageError(
            f"model {name!r}: module {op.path!r} hands a list of tensors to another block; use --granularity layer"
        )


def _blocks(
    groups: Sequence[OpGroup], recipes: Sequence[Recipe], traced: CapturedGraph, grain: Grain
) -> tuple[BlockSpec, ...]:
    operators = [operator_of(group, recipe.crossing, grain) for group, recipe in zip(groups, recipes, strict=True)]
    ids = block_ids(groups, operators, grain)
    places: dict[OpNode, Output] = {}
    for id_, recipe in zip(ids, recipes, strict=True):
        single = len(recipe.outputs) == 1
        places.update({op: id_ if single else (id_, index) for index, op in enumerate(recipe.outputs)})
    return tuple(
        BlockSpec(
            id_,
            operator,
            partial(recipe.build, traced.tensors),
            sources=tuple(places[op] for op in recipe.crossing),
            samples=tuple(op.name for op in recipe.inputs),
            loss=traced.output in recipe.outputs and traced.output.shape == (),
            dimensions=dimensions_of(group, operator),
        )
        for id_, operator, group, recipe in zip(ids, operators, groups, recipes, strict=True)
    )


def _tied(
    blocks: Sequence[BlockSpec], recipes: Sequence[Recipe], traced: CapturedGraph
) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Parameters that several blocks have, or that the module has by several names."""
    holders: dict[int, list[tuple[str, str]]] = {}
    for block, recipe in zip(blocks, recipes, strict=True):
        for own, name in recipe.parameters.items():
            holders.setdefault(id(traced.tensors[name]), []).append((block.id, own))
    return tuple(tuple(group) for group in holders.values() if len({id_ for id_, _ in group}) > 1)


def replay(model: Model, modules: Mapping[str, nn.Module], batch: Batch) -> Tensor:
    """Run all blocks of a model in one piece; returns what the last gives."""
    values: dict[str, tuple[Tensor, ...]] = {}
    for block in model.blocks:
        taken = [values[source][index] for source, index in block.inputs]
        made = outputs_of(modules[block.id](*taken, *(batch[key] for key in block.samples)))
        assert made is not None, f"block {block.id!r} returned no tensor"
        values[block.id] = made
    return values[model.blocks[-1].id][-1]


def parameters_of(block: BlockSpec) -> Mapping[str, str]:
    """Of a captured block: the names in the captured module that its parameters had, by those they have now."""
    recipe = getattr(getattr(block.build, "func", None), "__self__", None)
    assert isinstance(recipe, Recipe), f"block {block.id!r} was not captured"
    return recipe.parameters
