"""Frozen TorchScript with oneDNN Graph: a trace with its weights as constants, fused when it first runs."""

import warnings

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning

from pipeplan.runtime.backends.building import BuiltGroup

DETERMINISTIC = True

_UNTIL_FUSED = 3
"""Runs: the first ones are watched for the sizes of tensors, and then compiled."""


def build(name: str, module: nn.Module, inputs: tuple[Tensor, ...], training: bool) -> BuiltGroup:
    """Trace, freeze and fuse. torch says that all of this is deprecated, which the rules' range of versions answers."""
    before = torch.jit.onednn_fusion_enabled()  # type: ignore[no-untyped-call]  # torch has no types here
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=TracerWarning)
        torch.jit.enable_onednn_fusion(True)
        try:
            traced = torch.jit.trace(module.eval(), inputs, check_trace=False)  # type: ignore[no-untyped-call]  # torch has no types here
            frozen = torch.jit.freeze(traced)
            for _ in range(_UNTIL_FUSED):
                frozen(*inputs)
        finally:
            torch.jit.enable_onednn_fusion(before)
    return BuiltGroup(frozen)
