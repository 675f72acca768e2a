"""oneDNN's kernels in eager torch, on and off."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from pipeplan.runtime.backends.building import BuiltGroup

DETERMINISTIC = True


def build(name: str, module: nn.Module, inputs: tuple[Tensor, ...], training: bool) -> BuiltGroup:
    """The module as it is, with torch's switch set around it."""
    return BuiltGroup(module, partial(_switched, on=name == "onednn"))


@contextmanager
def _switched(*, on: bool) -> Iterator[None]:
    """The switch alone: torch's own context sets all of oneDNN's flags, which warns of those of other devices."""
    (before, *_) = torch.backends.mkldnn.set_flags(_enabled=on)  # type: ignore[no-untyped-call]  # torch has no types here
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before)  # type: ignore[no-untyped-call]  # torch has no types here
