"""CUDA graphs: a group recorded with places for what it takes and gives, which are copied in and out."""

import torch
from torch import Tensor, nn

from pipeplan.runtime.backends.building import BuiltGroup

DETERMINISTIC = True

_UNTIL_RECORDED = 3
"""Runs: libraries choose their kernels and take their memory in the first ones, which must not be recorded."""


def build(name: str, module: nn.Module, inputs: tuple[Tensor, ...], training: bool) -> BuiltGroup:
    """Run aside, as torch asks, then record."""
    module, places = module.eval(), tuple(each.detach().clone() for each in inputs)
    aside: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types here
    graph = torch.cuda.CUDAGraph()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside), torch.no_grad():
        for _ in range(_UNTIL_RECORDED):
            module(*places)
    torch.cuda.current_stream().wait_stream(aside)
    with torch.cuda.graph(graph), torch.no_grad():
        made = module(*places)

    def call(*taken: Tensor) -> object:
        for place, tensor in zip(places, taken, strict=True):
            place.copy_(tensor)
        graph.replay()
        return tuple(map(Tensor.clone, made)) if isinstance(made, tuple) else made.clone()

    return BuiltGroup(call)
