"""What tensors are called in the module that a model was made of."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from pipeplan.runtime.models.spec import BlockSpec


def first_names(module: nn.Module) -> dict[str, str]:
    """The first name of every parameter and kept buffer of a module, by all its names."""
    state = module.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    return {name: first[id(tensor)] for name, tensor in state.items()}


def aliases_of(module: nn.Module, blocks: Iterable[BlockSpec]) -> dict[str, str]:
    """Further names of the tensors that blocks of a module have, with the first."""
    used = {name for block in blocks for name in (block.names or {}).values()}
    return {name: first for name, first in first_names(module).items() if first in used and name != first}
