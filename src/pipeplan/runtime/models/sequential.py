"""A plain ``nn.Sequential`` as a model: its children are the blocks, in order, followed by a loss.

Nothing is traced, so children may be any modules that take one tensor and return one, samples in the first dimension.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.models.names import aliases_of
from pipeplan.runtime.models.shapes import shaped_blocks
from pipeplan.runtime.models.spec import Batch, BlockSpec, Model, batch_like, tied_groups
from pipeplan.runtime.parallel.sharding import Cut, Shards, Split
from pipeplan.runtime.parallel.split_layers import HIDDEN, Tile, WordEmbedding
from pipeplan.runtime.parallel.weight_grads import is_plain_embedding

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of an output and targets: the sum over predictions."""

_IGNORED = -100  # as torch's losses do


def is_plain(module: object) -> bool:
    """Whether a module is an ``nn.Sequential`` that runs its children in order and does nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def sequential_model(
    name: str, children: nn.Sequential, input: Tensor, targets: Tensor | None = None, loss: Loss | None = None
) -> Model:
    """The model of a chain of modules. A child without parameters belongs to the block before it.

    Parameters start as they are in the children. Those that several children have are tied. Raises UsageError where
    there are no children, or the loss does not sum.

    Args:
        name: of the model.
        children: with names; a block has that of its first child.
        input: an example, samples in the first dimension.
        targets: examples of what the output is compared with; made up like them, as the input is.
        loss: without it cross-entropy over the last dimension where targets are integers, else the squared error. Of
            torch's modules a mean is taken as the sum, but for one by weights of classes. Without targets the last
            block may return the loss.
    """
    groups = _groups(children)
    if not groups:
        raise UsageError(f"model {name!r} is an nn.Sequential without modules; there is nothing to cut into blocks")
    blocks = [
        _split(
            BlockSpec(
                id_,
                type(children.get_submodule(id_)).__name__.lower(),
                partial(copy.deepcopy, parts[0] if len(parts) == 1 else nn.Sequential(*parts)),
                sources=(before,) if before else (),
                samples=() if before else ("input",),
                names=_names(parts, children),
                modules=tuple(name for name, child in _named(children) if any(child is part for part in parts)),
            ),
            parts,
        )
        for (id_, parts), before in zip(groups.items(), ["", *groups], strict=False)
    ]
    examples = {"input": input} if targets is None else {"input": input, "targets": targets}
    if targets is not None:
        compare = partial(_LossBlock, _summed(loss or _usual(targets), name))
        blocks.append(BlockSpec("loss", "loss", compare, (blocks[-1].id,), ("targets",), loss=True))
    model = Model(
        name,
        tuple(blocks),
        partial(batch_like, {key: each.detach() for key, each in examples.items()}),
        _predictions,
        tied=tied_groups(_named_parameters(groups)),
        aliases=aliases_of(children, blocks),
    )
    return model if targets is not None else _ending_in_loss(model)


def _groups(children: nn.Sequential) -> dict[str, list[nn.Module]]:
    """Children by block: those without parameters go with the one before, or with the first that has some."""
    groups: dict[str, list[nn.Module]] = {}
    leading: list[nn.Module] = []
    for name, child in _named(children):
        if next(child.parameters(), None) is not None:
            groups[name] = [*leading, child]
            leading = []
        elif groups:
            groups[next(reversed(groups))].append(child)
        else:
            leading.append(child)
    return groups or ({next(iter(_named(children)))[0]: leading} if leading else {})


def _names(parts: Sequence[nn.Module], children: nn.Sequential) -> dict[str, str]:
    """A block's parameters and buffers: their first names in the whole chain, by those in the block."""
    module = parts[0] if len(parts) == 1 else nn.Sequential(*parts)
    whole = {id(tensor): name for name, tensor in reversed(children.state_dict(keep_vars=True).items())}
    return {name: whole[id(tensor)] for name, tensor in module.state_dict(keep_vars=True).items()}


_OF_SINGLE_NUMBERS = (nn.ELU, nn.GELU, nn.Hardswish, nn.Identity, nn.LeakyReLU, nn.ReLU, nn.Sigmoid, nn.SiLU, nn.Tanh)
"""Modules that make of each number one, so that they can be given a slice of them."""


def _split(block: BlockSpec, parts: Sequence[nn.Module]) -> BlockSpec:
    """A linear layer, and what follows it, can be split into tiles; an embedding by its words and its width."""
    first, *rest = parts
    if type(first) is nn.Linear and all(type(each) in _OF_SINGLE_NUMBERS for each in rest):
        tiles = Tile.ways(partial(_tiled, first, rest), "0" if rest else "", bias=first.bias is not None)
        return replace(block, splits=tiles)
    if type(first) is nn.Embedding and not rest and is_plain_embedding(first) and first.padding_idx is None:
        build = partial(WordEmbedding, first.num_embeddings, first.embedding_dim)
        by_width = Split(build, {"weight": Cut(1)}, gives=True)
        return replace(block, split=Split(build, {"weight": Cut(even=False)}), splits={HIDDEN: by_width})
    return block


def _tiled(layer: nn.Linear, rest: Sequence[nn.Module], shards: Shards) -> nn.Module:
    """The share of a linear layer and what follows it, under the same names."""
    tile = Tile(layer.in_features, layer.out_features, shards, bias=layer.bias is not None)
    return nn.Sequential(tile, *copy.deepcopy(list(rest))) if rest else tile


def _named(children: nn.Sequential) -> Iterator[tuple[str, nn.Module]]:
    """Children by name, including one that is registered twice."""
    for name, module in children.named_modules(remove_duplicate=False):
        if name and "." not in name:
            yield name, module


def _named_parameters(groups: Mapping[str, Sequence[nn.Module]]) -> Iterator[tuple[str, str, Tensor]]:
    """For every block: its id, and its parameters by their names in it."""
    for id_, parts in groups.items():
        module = parts[0] if len(parts) == 1 else nn.Sequential(*parts)
        yield from ((id_, name, parameter) for name, parameter in module.named_parameters())


def _ending_in_loss(model: Model) -> Model:
    """The model, whose last block has the loss if it makes a scalar."""
    *_, last = shaped_blocks(model, 2)
    ends = len(last.outputs) == 1 and last.outputs[0].ndim == 0
    return replace(model, blocks=(*model.blocks[:-1], replace(model.blocks[-1], loss=ends)))


class _LossBlock(nn.Module):
    """The sum of the losses of a micro-batch."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = copy.deepcopy(loss)

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        """Output and targets to a scalar."""
        return self.loss(output, targets)


def _usual(targets: Tensor) -> Loss:
    return _squared_error if targets.is_floating_point() else _cross_entropy


def _cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits [samples, ..., classes] and classes [samples, ...]."""
    return F.cross_entropy(output.flatten(0, -2), targets.flatten(), ignore_index=_IGNORED, reduction="sum")


def _squared_error(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets, reduction="sum")


def _summed(loss: Loss, name: str) -> Loss:
    """The loss, as a sum where it would take the mean over targets: so the losses of micro-batches add up."""
    reduction = getattr(loss, "reduction", "sum")
    if reduction == "none":
        raise UsageError(f"model {name!r}: its loss {type(loss).__name__} does not reduce; give it reduction='sum'")
    if reduction == "sum" or _is_by_class(loss):
        return loss  # such a mean is found out, as any other that is not over all targets
    summed = copy.deepcopy(loss)
    summed.reduction = "sum"  # type: ignore[attr-defined]  # one of torch's modules, which have it
    return summed


def _is_by_class(loss: Loss) -> bool:
    """Whether it is a mean by weights of classes."""
    return isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.weight is not None


def _predictions(batch: Batch) -> int:
    """Targets, but those that are left out; samples, if there are no targets."""
    targets = batch.get("targets")
    if targets is None:
        return batch["input"].shape[0]
    return targets.numel() if targets.is_floating_point() else int((targets != _IGNORED).sum())
