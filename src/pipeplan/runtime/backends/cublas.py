"""One of the two libraries of products, preferred."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from pipeplan.runtime.backends.building import BuiltGroup

DETERMINISTIC = True


def build(name: str, module: nn.Module, inputs: tuple[Tensor, ...], training: bool) -> BuiltGroup:
    """The module as it is, with torch's preference set around it; what the library has not, the other runs."""
    return BuiltGroup(module, partial(_preferred, name))


@contextmanager
def _preferred(name: str) -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
