"""TorchInductor: the group as one graph, compiled for these sizes."""

import warnings
from collections.abc import Callable
from importlib import import_module
from types import FunctionType

import torch
from torch import Tensor, nn

from pipeplan.runtime.backends.building import BuiltGroup

DETERMINISTIC = True


def build(name: str, module: nn.Module, inputs: tuple[Tensor, ...], training: bool) -> BuiltGroup:
    """Compile now, not when it first runs; of a training group backward, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own: the compiler imports methods in TorchScript
        import_module("torch.utils.mkldnn")
    compiled = torch.compile(_own_code(module), backend="inductor", fullgraph=True, dynamic=False)
    if not training:
        with torch.no_grad():
            compiled(*inputs)
    return BuiltGroup(compiled)


def _own_code(module: nn.Module) -> Callable[..., object]:
    """A function that runs the module, with code of its own: torch limits how many graphs one code may have."""

    def run(*taken: Tensor) -> object:
        return module(*taken)

    return FunctionType(run.__code__.replace(), run.__globals__, "run", None, run.__closure__)
