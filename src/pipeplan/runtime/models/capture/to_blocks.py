"""From a module to a model of blocks that compute the same, with what each does and which dimensions it has."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from pipeplan.errors import UsageError
from pipeplan.runtime.models.capture.block_module import BlockRecipe, BlockWriter
from pipeplan.runtime.models.capture.functionalize import CapturedGraph, OpNode
from pipeplan.runtime.models.capture.grouping import (
    ATTENTION,
    HEAVY,
    VIEWS,
    OpGroup,
    crossing_of,
    group_operations,
    joined_path,
    made_from,
    modules_of,
    needed_by,
)
from pipeplan.runtime.models.capture.tracing import trace
from pipeplan.runtime.models.names import aliases_of, first_names
from pipeplan.runtime.models.spec import (
    Batch,
    BlockSpec,
    Grain,
    Model,
    Output,
    batch_like,
    tied_groups,
)


def capture(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    name: str,
    grain: Grain = "half",
    batch: Callable[[int, int, int], dict[str, Tensor]] | None = None,
    predictions: Callable[[Batch], int] | None = None,
) -> Model:
    """Cut a module into blocks that train as it does: in the mode that each of its modules is in.

    The model says which of them are in evaluation mode and would do something else in training mode.

    Raises UsageError, which says what cannot be captured.

    Args:
        module: returns one tensor; a scalar is the loss, a sum or a mean over samples. On the meta device
            parameters get made-up numbers when a block is built.
        inputs: examples by the names of the forward's arguments, samples in the first dimension.
        name: of the model.
        grain: what a block is: an element of the module's outermost lists of modules, half of one, or an operator.
        batch: as :class:`Model` has it; without it random numbers like the examples.
        predictions: as :class:`Model` has it; without it the number of samples.
    """
    traced = trace(module, inputs, name)
    groups, free = group_operations(traced, module, grain)
    if not groups:
        raise UsageError(f"model {name!r} does no work that needs parameters; there is nothing to cut into blocks")
    recipes = _recipes(traced, groups, free, name)
    blocks = _blocks(groups, recipes, traced, grain, first_names(module))
    return Model(
        name,
        blocks,
        batch or partial(batch_like, {key: value.detach() for key, value in inputs.items()}),
        predictions or (lambda given: next(iter(given.values())).shape[0]),
        tied=tied_groups(
            (block.id, own, traced.tensors[name])
            for block, recipe in zip(blocks, recipes, strict=True)
            for own, name in recipe.parameters.items()
        ),
        switched_off=_switched_off(module, traced.num_dropouts),
        aliases=aliases_of(module, blocks),
        grain=grain,
    )


def _switched_off(module: nn.Module, num_dropouts: int) -> dict[str, int]:
    """Modules by class, and calls of functions, in evaluation mode that do something else in training mode: counted."""
    found = Counter(type(each).__name__ for each in module.modules() if _is_switched(each))
    return dict(found) | ({"dropout()": num_dropouts} if num_dropouts else {})


def _is_switched(module: nn.Module) -> bool:
    if module.training:
        return False
    rate = getattr(module, "p" if isinstance(module, _DropoutNd) else "dropout", 0.0)
    return isinstance(module, _NormBase) or (isinstance(module, _DROPPING) and rate > 0)


_DROPPING = (_DropoutNd, nn.MultiheadAttention, nn.RNNBase)


def _recipes(traced: CapturedGraph, groups: Sequence[OpGroup], free: set[OpNode], name: str) -> list[BlockRecipe]:
    owner = {op: index for index, group in enumerate(groups) for op in group.operations}
    given: list[dict[OpNode, None]] = [{} for _ in groups]
    needs = [needed_by(group, free) for group in groups]
    for wanted in needs:
        for source in crossing_of(wanted):
            _require_travelling(source, name)
            given[owner[source]][source] = None
    if traced.output not in owner:
        raise UsageError(f"model {name!r}: its output does not depend on its parameters")
    given[owner[traced.output]][traced.output] = None
    counting = next((op for op in traced.operations if op.kind == "input" and op.per_sample), None)
    known: dict[Hashable, tuple[BlockWriter, BlockRecipe]] = {}
    found: list[BlockRecipe] = []
    for group, wanted, out in zip(groups, needs, given, strict=True):
        writer = BlockWriter(group, wanted, tuple(out), counting)
        if writer.text in known:
            found.append(writer.like(*known[writer.text]))
        else:
            found.append(writer.recipe())
            known[writer.text] = writer, found[-1]
    return found


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
    groups: Sequence[OpGroup],
    recipes: Sequence[BlockRecipe],
    traced: CapturedGraph,
    grain: Grain,
    kept: Mapping[str, str],
) -> tuple[BlockSpec, ...]:
    operators = [operator_of(group, recipe.crossing, grain) for group, recipe in zip(groups, recipes, strict=True)]
    ids = block_ids(groups, operators, grain)
    modules = modules_of(groups)
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
            names={own: kept[name] for own, name in {**recipe.parameters, **recipe.buffers}.items() if name in kept},
            modules=own,
            form=recipe.form(traced.tensors),
        )
        for id_, operator, group, recipe, own in zip(ids, operators, groups, recipes, modules, strict=True)
    )


def parameters_of(block: BlockSpec) -> Mapping[str, str]:
    """For a captured block, its parameters' names in the captured module by their names now."""
    recipe = getattr(getattr(block.build, "func", None), "__self__", None)
    assert isinstance(recipe, BlockRecipe), f"block {block.id!r} was not captured"
    return recipe.parameters


_LOSSES = {
    "cross_entropy_loss", "nll_loss", "nll_loss_nd", "mse_loss", "binary_cross_entropy_with_logits", "word_losses",
}  # fmt: skip
_PRODUCTS = {"linear", "addmm", "mm", "matmul", "bmm", "baddbmm", "einsum"}


def operator_of(group: OpGroup, crossing: Sequence[OpNode], grain: Grain) -> str:
    """The kind of operator: attention, ffn, embedding, head and so on.

    A layer is one that has attention and more: as asked for, or where both take the same input (Phi, GPT-NeoX, Falcon).
    """
    found = _operator_of(group, crossing)
    if not group.in_layer or not found.endswith("attention"):
        return found
    return "layer" if grain == "layer" or _has_more_than_attention(group) else found


def _has_more_than_attention(group: OpGroup) -> bool:
    """Whether another part of a layer than the one that attends has products, too."""
    parts = [(_part(op, group), op.operator) for op in group.operations]
    attending = {part for part, name in parts if name in {*ATTENTION, "softmax"}}
    return "" not in attending and sum(name in _PRODUCTS for part, name in parts if part not in attending) > 1


def _part(op: OpNode, group: OpGroup) -> str:
    """The name of the module directly in a layer that runs an operator; empty for the layer's own."""
    return op.path.removeprefix(f"{group.path}.").partition(".")[0] if op.path != group.path else ""


def _operator_of(group: OpGroup, crossing: Sequence[OpNode]) -> str:
    names = [op.operator for op in group.operations]
    if _LOSSES & set(names):
        return "head" if _PRODUCTS & set(names) else "loss"
    if ATTENTION.isdisjoint(names) and {"topk", "routed_experts", *_GROUPED} & set(names):
        return "moe"
    if _attends(names):
        return "cross-attention" if _attends_to_another(group, crossing) else "attention"
    if "embedding" in names or "embedding_bag" in names:
        return "embedding"
    if any(name.startswith("conv") for name in names):
        return "convolution"
    if _PRODUCTS & set(names):
        return "ffn" if group.in_layer and sum(name in _PRODUCTS for name in names) > 1 else "linear"
    return _light(names)


def _attends(names: Sequence[str]) -> bool:
    return not ATTENTION.isdisjoint(names) or ("softmax" in names and sum(n in _PRODUCTS for n in names) > 2)


def _attends_to_another(group: OpGroup, crossing: Sequence[OpNode]) -> bool:
    """Whether queries and keys are made in the block of different tensors."""
    own = set(group.operations)
    for op in group.operations:
        if op.operator in _SCORES and all(source in own for source in op.sources[:2]) and len(op.sources) > 1:
            query, key = (_origins(source, own, set(crossing)) for source in op.sources[:2])
            return bool(query and key) and not query & key
    return False


_SCORES = {*ATTENTION, "matmul", "bmm", "baddbmm", "einsum"}
"""What multiplies queries and keys."""


def _origins(op: OpNode, own: set[OpNode], crossing: set[OpNode]) -> set[OpNode]:
    """What of other blocks, or of the batch, it is made of."""
    sources = (source for each in made_from(op, own) for source in each.sources)
    return {source for source in sources if source in crossing or source.kind == "input"}


def _light(names: Sequence[str]) -> str:
    if {"lstm", "gru", "rnn_tanh", "rnn_relu"} & set(names):
        return "recurrent"
    if any("norm" in name for name in names) or "rsqrt" in names:
        return "norm"
    if any("pool" in name for name in names):
        return "pool"
    return next((name for name in names if name == "cat"), "elementwise").replace("cat", "concatenation")


_WIDTHS = {"head": "vocabulary", "ffn": "ffn", "layer": "ffn", "linear": "outputs"}
"""What the widest linear layer of a block is called."""


def dimensions_of(group: OpGroup, operator: str) -> dict[str, int]:
    """Sizes that a configuration can split, where the operators show them."""
    found: dict[str, int] = _sequence(group)
    for op in group.operations:
        for key, size in _shown_by(op, operator).items():
            found[key] = max(found.get(key, 0), size)
    return found | (_experts(group) if operator in ("moe", "layer") else {})


_GROUPED = {"grouped_mm_fallback", "_grouped_mm"}
"""Products of rows by the weights of their group."""


def _experts(group: OpGroup) -> dict[str, int]:
    """Dimensions of a block with experts: how many there are and a token takes, their width, and the shared ones."""
    products = [op for op in group.operations if op.operator in _GROUPED]
    if not products:
        return {}
    experts, hidden, _ = products[0].sources[1].shape
    layers = [
        weight.shape
        for op in group.operations
        for weight in op.sources
        if op.operator == "linear" and weight.kind == "parameter" and len(weight.shape) == 2
    ]
    words = next((math.prod(op.shape[:-1]) for op in group.operations if op.per_sample == 1 and len(op.shape) == 3), 0)
    widths = {sum(shape) - hidden for shape in layers if hidden in shape} - {1, experts}
    found = {
        "hidden": hidden,
        "experts": experts,
        "ffn": products[-1].sources[1].shape[1],
    }
    if words:  # an operator alone does not show them
        found["experts_per_token"] = products[0].sources[0].shape[0] // words
    return found | ({"shared_ffn": max(widths)} if widths else {})


def _shown_by(op: OpNode, operator: str) -> dict[str, int]:
    name = op.operator
    weight = next((source for source in op.sources if source.kind == "parameter" and len(source.shape) == 2), None)
    if name in ATTENTION:
        return {"heads": op.sources[0].shape[1]}
    if name == "softmax" and len(op.shape) == 4 and operator.endswith(("attention", "layer")):
        return {"heads": op.shape[1]}
    if name.startswith("conv"):
        return {"channels": op.shape[1]}
    if name in ("linear", "addmm") and weight is not None:
        inputs, outputs = weight.shape if name == "addmm" else reversed(weight.shape)
        hidden = inputs if operator in ("linear", "moe") else min(inputs, outputs)
        return {"hidden": hidden, **({_WIDTHS[operator]: outputs} if operator in _WIDTHS else {})}
    if name == "embedding" and weight is not None and operator == "embedding" and op.per_sample:
        return {"vocabulary": weight.shape[0], "hidden": weight.shape[1]}
    return {}


def _sequence(group: OpGroup) -> dict[str, int]:
    """The second of three dimensions, where tensors of a block have three."""
    convolves = any(op.operator.startswith("conv") for op in group.operations)  # then places are last, at first
    for op in group.operations:
        if op.per_sample == 1 and len(op.shape) == 3 and op.operator in HEAVY and not convolves:
            return {"sequence": op.shape[1]}
    for op in reversed(group.operations) if convolves else group.operations:
        if op.per_sample == 1 and len(op.shape) == 3:
            return {"sequence": op.shape[1]}
    return {}


def block_ids(groups: Sequence[OpGroup], operators: Sequence[str], grain: Grain) -> list[str]:
    """Names by module and operator, each once."""
    bases = _modules_and_operators(groups) if grain == "operator" else _layers_and_parts(groups, operators, grain)
    counts: dict[str, int] = {}
    ids = []
    for base in bases:
        counts[base] = counts.get(base, 0) + 1
        ids.append(base if counts[base] == 1 else f"{base}-{counts[base]}")
    return ids


def _layers_and_parts(groups: Sequence[OpGroup], operators: Sequence[str], grain: Grain) -> list[str]:
    return [
        _shortened(group.path)
        if group.in_layer and "layer" in (grain, operator)
        else joined_path(_shortened(group.path), operator)
        for group, operator in zip(groups, operators, strict=True)
    ]


def _modules_and_operators(groups: Sequence[OpGroup]) -> list[str]:
    """The module where it runs a single operator, or else module and operator."""
    paths = [group.path for group in groups]
    shared = {path for path in paths if any(each.startswith(f"{path}.") for each in paths)} | {""}
    works = {(group.path, _work_of(group)) for group in groups}
    several = {path for path in paths if len([work for place, work in works if place == path]) > 1}
    return [
        joined_path(_shortened(group.path), _work_of(group))
        if group.path in shared | several
        else _shortened(group.path)
        for group in groups
    ]


def _work_of(group: OpGroup) -> str:
    """Name of the operator that computes, or else of the first."""
    names = [op.operator for op in group.operations]
    return next((name for name in names if name not in VIEWS), names[0])


def _shortened(path: str) -> str:
    """Without the names of wrappers that say nothing."""
    parts = path.split(".")
    while parts and parts[0] in ("model", "module", "transformer"):
        parts = parts[1:]
    return ".".join(parts)
