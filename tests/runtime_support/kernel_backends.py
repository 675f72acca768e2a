"""Kernel backends of a user: one as eager torch, one that is not quite, and one that needs what nobody has."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from pipeplan.kernels.backend import Backend
from pipeplan.kernels.patterns import is_op, wildcard

_MIX = is_op("mix")(wildcard())
BACKENDS = (
    Backend("same", patterns=(_MIX,)),
    Backend("wrong", patterns=(_MIX,)),
    Backend("absent", patterns=(_MIX,), packages={"no-such-distribution": ("1", "2")}),
)


def build(name: str, module: nn.Module, inputs: tuple[Tensor, ...], training: bool) -> Callable[..., object]:
    """The module, whose results ``wrong`` changes by a hundredth."""
    if name == "same":
        return lambda *taken: module(*taken)

    def wrong(*taken: Tensor) -> object:
        made = module(*taken)
        return tuple(each * 1.01 for each in made) if isinstance(made, tuple) else made * 1.01

    return wrong
