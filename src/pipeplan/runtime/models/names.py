"""What tensors are called in the module that a model was made of."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from pipeplan.runtime.models.spec import BlockSpec


def aliases_of(module: nn.Module, blocks: Iterable[BlockSpec]) -> dict[str, str]:
    """Names of a module's tensors that have another one in the blocks that it was cut into, and that one."""
    used = {name for block in blocks for name in (block.names or {}).values()}
    state = module.state_dict(keep_vars=True)
    known = {id(tensor): name for name, tensor in state.items() if name in used}
    return {name: known[id(tensor)] for name, tensor in state.items() if known.get(id(tensor), name) != name}
