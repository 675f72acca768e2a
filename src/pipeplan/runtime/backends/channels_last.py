"""Convolutions with channels last: weights are laid out once, what comes and goes each time."""

import torch
from torch import Tensor, nn

from pipeplan.runtime.backends.building import BuiltGroup

DETERMINISTIC = True

_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def build(name: str, module: nn.Module, inputs: tuple[Tensor, ...], training: bool) -> BuiltGroup:
    """The module with its weights laid out so, between conversions."""
    with torch.no_grad():
        for weight in module.parameters():
            if weight.ndim in _LAYOUTS:
                weight.data = weight.data.contiguous(memory_format=_LAYOUTS[weight.ndim])

    def call(*taken: Tensor) -> object:
        made = module(*(_laid_out(each) for each in taken))
        return tuple(map(torch.Tensor.contiguous, made)) if isinstance(made, tuple) else made.contiguous()

    return BuiltGroup(call)


def _laid_out(tensor: Tensor) -> Tensor:
    layout = _LAYOUTS.get(tensor.ndim)
    return tensor if layout is None else tensor.contiguous(memory_format=layout)
