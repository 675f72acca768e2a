"""What a block does and which dimensions it has, told from its operators."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pipeplan.runtime.capture.grouping import HEAVY, Group, name_of
from pipeplan.runtime.capture.operations import Operation
from pipeplan.runtime.loading import Grain

__all__ = ["block_ids", "dimensions_of", "operator_of"]

_LOSSES = {"cross_entropy_loss", "nll_loss", "nll_loss_nd", "mse_loss", "binary_cross_entropy_with_logits"}
_PRODUCTS = {"linear", "addmm", "mm", "matmul", "bmm", "baddbmm", "einsum"}


def operator_of(group: Group, crossing: Sequence[Operation], grain: Grain) -> str:
    """The kind of operator: attention, ffn, embedding, head and so on."""
    found = _operator_of(group, crossing)
    return "layer" if grain == "layer" and group.in_layer and found.endswith("attention") else found


def _operator_of(group: Group, crossing: Sequence[Operation]) -> str:
    names = [name_of(op) for op in group.operations]
    if _LOSSES & set(names):
        return "head"
    if _attends(names):
        memories = [op for op in crossing if op.needs_grad and op.per_sample and len(op.shape) == 3]
        return "cross-attention" if len(memories) > 1 and "linear" in names else "attention"
    if "embedding" in names or "embedding_bag" in names:
        return "embedding"
    if any(name.startswith("conv") for name in names):
        return "convolution"
    if "topk" in names:
        return "moe"
    if _PRODUCTS & set(names):
        return "ffn" if group.in_layer and sum(name in _PRODUCTS for name in names) > 1 else "linear"
    return _light(names)


def _attends(names: Sequence[str]) -> bool:
    return "scaled_dot_product_attention" in names or ("softmax" in names and sum(n in _PRODUCTS for n in names) > 2)


def _light(names: Sequence[str]) -> str:
    if any("norm" in name for name in names) or "rsqrt" in names:
        return "norm"
    if any("pool" in name for name in names):
        return "pool"
    return next((name for name in names if name == "cat"), "elementwise").replace("cat", "concatenation")


_WIDTHS = {"head": "vocabulary", "ffn": "ffn", "moe": "ffn", "layer": "ffn", "linear": "outputs"}
"""What the widest linear layer of a block is called."""


def dimensions_of(group: Group, operator: str) -> dict[str, int]:
    """Sizes that a configuration can split, where the operators show them."""
    found: dict[str, int] = _sequence(group)
    for op in group.operations:
        for key, size in _shown_by(op, operator).items():
            found[key] = max(found.get(key, 0), size)
    return found


def _shown_by(op: Operation, operator: str) -> dict[str, int]:
    name = name_of(op)
    weight = next((source for source in op.sources if source.kind == "parameter" and len(source.shape) == 2), None)
    if name == "scaled_dot_product_attention":
        return {"heads": op.sources[0].shape[1]}
    if name in ("linear", "addmm") and weight is not None:
        inputs, outputs = weight.shape if name == "addmm" else reversed(weight.shape)
        return {"hidden": min(inputs, outputs), **({_WIDTHS[operator]: outputs} if operator in _WIDTHS else {})}
    if name == "embedding" and weight is not None and operator == "embedding" and op.per_sample:
        return {"vocabulary": weight.shape[0], "hidden": weight.shape[1]}
    return {}


def _sequence(group: Group) -> dict[str, int]:
    """The second of three dimensions, where tensors of a block have three."""
    for op in group.operations:
        if isinstance(op.value, Tensor) and op.per_sample == 1 and len(op.shape) == 3 and name_of(op) in HEAVY:
            return {"sequence": op.shape[1]}
    for op in group.operations:
        if op.per_sample == 1 and len(op.shape) == 3:
            return {"sequence": op.shape[1]}
    return {}


def block_ids(groups: Sequence[Group], operators: Sequence[str], *, with_operator: bool) -> list[str]:
    """Names by module and operator, each once."""
    paths = [_shortened(group.path) for group in groups]
    counts: dict[str, int] = {}
    ids = []
    for group, path, operator in zip(groups, paths, operators, strict=True):
        base = path if group.in_layer and not with_operator else ".".join(filter(None, [path, operator]))
        counts[base] = counts.get(base, 0) + 1
        ids.append(base if counts[base] == 1 else f"{base}-{counts[base]}")
    return ids


def _shortened(path: str) -> str:
    """Without the names of wrappers that say nothing."""
    parts = path.split(".")
    while parts and parts[0] in ("model", "module", "transformer"):
        parts = parts[1:]
    return ".".join(parts)
