"""TorchInductor: the group as one graph, compiled for these sizes."""

import warnings
from importlib import import_module

import torch
from torch import Tensor, nn

from pipeplan.runtime.backends.building import BuiltGroup

DETERMINISTIC = True


def build(name: str, module: nn.Module, inputs: tuple[Tensor, ...], training: bool) -> BuiltGroup:
    """Compile now, not when it first runs; of a training group backward, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own: the compiler imports methods in TorchScript
        import_module("torch.utils.mkldnn")
    torch._dynamo.reset()  # what was compiled before counts against the limit of graphs for one function
    compiled = torch.compile(module, backend="inductor", fullgraph=True, dynamic=False)
    if not training:
        with torch.no_grad():
            compiled(*inputs)
    return BuiltGroup(compiled)
