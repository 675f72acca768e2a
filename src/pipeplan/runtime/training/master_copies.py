"""Mixed precision: float32 copies of parameters that compute in 16 bits, and a loss scale for float16.

As in Micikevicius et al. (Mixed Precision Training, ICLR 2018, sections 3.1 and 3.2): forward and backward use a copy
of 16 bits, an optimizer steps the master copy with the gradients, which add up in the format that the recipe says
(torch's ``grad_dtype`` of a parameter), and the copy is rounded anew. Where replicas divide state, a rank has master
copies of its rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

MASTER = torch.float32


class MasterCopies:
    """What an optimizer steps of some parameters: a copy of each that is trained, with numbers that ``exact`` gives.

    Without ``exact`` there are no copies, and parameters are stepped themselves.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], exact: Callable[[nn.Parameter], Tensor] | None) -> None:
        trained = [each for each in parameters if each.requires_grad] if exact is not None else []
        self._copies = {id(each): (each, nn.Parameter(exact(each))) for each in trained if exact is not None}

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """What is stepped of a parameter."""
        found = self._copies.get(id(parameter))
        return parameter if found is None else found[1]

    def take_gradients(self, scale: float) -> None:
        """Give master copies the gradients of the parameters, which were made of a loss ``scale`` times as large."""
        for parameter, master in self._copies.values():
            if parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.to(MASTER), None
                if scale != 1:
                    master.grad.mul_(1 / scale)

    def are_finite(self) -> bool:
        """Whether all gradients are numbers."""
        found = [master.grad for _, master in self._copies.values() if master.grad is not None]
        return not found or bool(torch.stack([each.isfinite().all() for each in found]).all())

    def write(self) -> None:
        """Round the master copies into the parameters."""
        with torch.no_grad():
            for parameter, master in self._copies.values():
                parameter.copy_(master)


def narrowed(modules: Iterable[nn.Module], dtype: torch.dtype, gradients: torch.dtype) -> dict[int, Tensor]:
    """Convert modules to the format that computes, with gradients that add up in another; the numbers before.

    Returns them by the identity of parameters, which stay the same objects.
    """
    exact: dict[int, Tensor] = {}
    for module in modules:
        for each in module.parameters():
            exact.setdefault(id(each), each.data)
        module.to(dtype)
        for each in module.parameters():
            if each.requires_grad:
                each.grad_dtype = gradients
    return exact


@dataclass(slots=True)
class LossScale:
    """By how much losses are larger, so that gradients in float16 do not vanish, as ``torch.amp.GradScaler`` has it.

    It is halved when gradients overflow, a step that is left out then, and doubled after ``PATIENCE`` others.
    """

    value: float = 2.0**16
    good: int = 0

    PATIENCE = 2000

    def update(self, overflowed: bool) -> None:
        """Note how a step went."""
        self.good = 0 if overflowed else self.good + 1
        if overflowed:
            self.value /= 2
        elif self.good == self.PATIENCE:
            self.value, self.good = self.value * 2, 0

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps of it."""
        return asdict(self)

    def load(self, state: Mapping[str, float] | None) -> None:
        """Go on from a checkpoint. Raises ValueError where that has no scale."""
        if state is None:
            raise ValueError("it has no loss scale")
        self.value, self.good = state["value"], int(state["good"])
