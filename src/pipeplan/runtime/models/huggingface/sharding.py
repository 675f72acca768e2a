"""One device's share of a model whose weights are split over several (tensor parallelism).

Ways of splitting a layer, as transformers names them: ``colwise`` splits its outputs, ``rowwise`` its inputs, so that
its output is a sum over the devices; ``packed_colwise`` splits each of the parts that its outputs consist of. The
bias of a ``rowwise`` layer is whole on every device. Attention between the two has a share of the heads.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pipeplan.errors import UsageError

__all__ = ["COLUMNS", "ROWS", "WORDS", "require_divisible", "share_of", "split_weights", "widths_of"]

COLUMNS = ("colwise", "packed_colwise")
ROWS = ("rowwise",)
WORDS = "words"
"""Rows of a table, one for each word; the last device's may be fewer."""

_PARTS = {"c_attn": 3}  # query, key and value
_USUAL_PARTS = 2  # gate and input
_COUNTS = ("all_head_size", "inner_dim", "n_heads", "num_attention_heads", "num_heads", "split_size")
"""Attributes of attention modules that count what is split."""


def split_weights(module: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """The way each split parameter is split, by its name; the plan has patterns of modules' or parameters' names."""
    found = {}
    for pattern, way in plan.items():
        matcher = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+") + r"(\.weight|\.bias)?")
        for name, _ in module.named_parameters(remove_duplicate=False):
            if way in (*COLUMNS, *ROWS, WORDS) and matcher.fullmatch(name) and not _is_whole(name, way):
                found[name] = way
    return found


def _is_whole(name: str, way: str) -> bool:
    return way in ROWS and name.endswith(".bias")


def share_of(module: nn.Module, ways: Mapping[str, str], num_devices: int, rank: int = 0) -> nn.Module:
    """A copy of the module with one device's share of the parameters; tied ones stay tied, whole ones are copies.

    Args:
        module: it is left as it is.
        ways: of :func:`split_weights`.
        num_devices: how many share it.
        rank: which of them.

    Raises:
        UsageError: a parameter does not divide by so many.
    """
    shares: dict[int, object] = {}  # by the identity of the whole one, as deepcopy wants it
    for name, way in ways.items():
        parameter = module.get_parameter(name)
        if id(parameter) not in shares:
            cut = _cut(module, name, parameter.detach(), way, num_devices, rank).clone()
            shares[id(parameter)] = nn.Parameter(cut, parameter.requires_grad)
    made = copy.deepcopy(module, shares)
    layers = {name.rpartition(".")[0]: way for name, way in ways.items() if name.endswith(".weight")}
    for name in layers:
        _resize(made.get_submodule(name))
    for name in {name.rpartition(".")[0] for name, way in layers.items() if way in COLUMNS}:
        _count_anew(made.get_submodule(name), num_devices)
    return made


def _cut(module: nn.Module, name: str, whole: Tensor, way: str, num_devices: int, rank: int) -> Tensor:
    """One device's part of a parameter."""
    owner = module.get_submodule(name.rpartition(".")[0])
    dimension = _dimension(owner, whole, way)
    if way == WORDS:
        return whole.chunk(num_devices, dimension)[rank]
    last = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    parts = _PARTS.get(last, _USUAL_PARTS) if way == "packed_colwise" else 1
    if whole.shape[dimension] % (parts * num_devices):
        raise UsageError(
            f"{name} of shape {list(whole.shape)} cannot be split over {num_devices} devices: "
            f"{whole.shape[dimension] // parts} is not a multiple of {num_devices}; choose a number that divides it"
        )
    pieces = (part.chunk(num_devices, dimension)[rank] for part in whole.chunk(parts, dimension))
    return torch.cat(list(pieces), dimension)


def _dimension(owner: nn.Module, whole: Tensor, way: str) -> int:
    """The dimension of a parameter that is split."""
    if whole.ndim == 1 or way == WORDS:
        return 0
    return whole.ndim - 2 if (way in COLUMNS) != _is_turned(owner) else whole.ndim - 1


def _is_turned(owner: nn.Module) -> bool:
    """Whether weights are [inputs, outputs]: tables, and GPT-2's layers."""
    return type(owner).__name__ == "Conv1D" or isinstance(owner, nn.Embedding)


def widths_of(module: nn.Module, name: str) -> tuple[int, int]:
    """Inputs and outputs of the layer with the weight of that name."""
    first, second = module.get_parameter(name).shape[-2:]
    turned = _is_turned(module.get_submodule(name.rpartition(".")[0]))
    return (first, second) if turned else (second, first)


def _resize(layer: nn.Module) -> None:
    """Let a layer know the sizes that its weight has now."""
    weight = layer.get_parameter("weight")
    if isinstance(layer, nn.Embedding):
        layer.num_embeddings, layer.embedding_dim = weight.shape
        if layer.padding_idx is not None and layer.padding_idx >= layer.num_embeddings:
            layer.padding_idx = None
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = weight.shape
    else:  # GPT-2's, the other way round
        for name, size in zip(("nx", "nf"), weight.shape, strict=True):
            setattr(layer, name, size)


def _count_anew(module: nn.Module, num_devices: int) -> None:
    """Divide what a module counts of its heads and widths."""
    for name in _COUNTS:
        if isinstance(getattr(module, name, None), int):
            setattr(module, name, getattr(module, name) // num_devices)


def require_divisible(counts: Mapping[str, int], num_devices: int, name: str) -> None:
    """Check that all counts divide by the number of devices.

    Raises:
        UsageError: one does not.
    """
    for what, count in counts.items():
        if count % num_devices:
            raise UsageError(
                f"{name} has {count} {what}, which cannot be split over {num_devices} devices; choose a number that "
                "divides them"
            )
