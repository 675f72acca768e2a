"""Number formats under autocast: parameters stay as they are, operators that gain from it compute in a short format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

__all__ = ["Autocast", "Pretending", "called", "precise"]


@dataclass(frozen=True, slots=True)
class Autocast:
    """``torch.autocast`` for blocks on a kind of device; calling it gives a context to run one in."""

    device: str
    dtype: torch.dtype

    def __call__(self) -> torch.autocast:
        """A context in which a block runs.

        Weights cast once are not kept for the next use: those cast while gradients are off, as in the forward of
        modules whose weight gradients wait, would be taken where they are on, and their gradients be lost.
        """
        return torch.autocast(self.device, dtype=self.dtype, cache_enabled=False)


def called(module: nn.Module, arguments: Sequence[Tensor]) -> object:
    """What a module makes of its arguments."""
    return module(*arguments)


class Pretending:
    """Calls modules of the meta device under autocast, of which that device knows nothing.

    Tensors without data that say they are on autocast's device stand for arguments, parameters and buffers.
    """

    def __init__(self, autocast: Autocast) -> None:
        self._autocast = autocast
        self._mode = FakeTensorMode()

    def __call__(self, module: nn.Module, arguments: Sequence[Tensor]) -> object:
        """What the module makes; as it, on autocast's device and without data."""
        with self._mode, self._autocast():
            state = {name: self._stand_in(held) for name, held in _state(module)}
            return functional_call(module, state, tuple(self._stand_in(each) for each in arguments))

    def _stand_in(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "meta":
            return tensor
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._autocast.device)
        return made.requires_grad_(tensor.requires_grad)


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def precise(tensor: Tensor) -> Tensor:
    """The tensor in float32 at least, in which losses and norms are added up."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
