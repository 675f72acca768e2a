"""Which copy of a tensor stays for backward, where blocks take it in another layout than it was given in.

The other copy is made again when backward asks for it (TensorOpt section 4.2, tensor reuse): what a block saves of it
is replaced when it has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def alone(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where it is a part of more, which it would keep."""
    if tensor.untyped_storage().nbytes() <= tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@dataclass(slots=True, eq=False)
class KeptCopy:
    """A tensor of which operators save all or views: itself, until something ``makes`` it again for all of them."""

    tensor: Tensor | None
    makes: Callable[[], Tensor] | None = None
    _savers: int = 0
    _left: int = 0

    def replace(self, makes: Callable[[], Tensor]) -> None:
        """Let go of it: what makes it again gives one of the same form."""
        self.tensor, self.makes = None, makes

    def holds(self, view: Tensor) -> bool:
        """Whether a tensor is a view of it."""
        return self.tensor is not None and _place(self.tensor) == _place(view) != 0

    def saved(self, view: Tensor) -> Callable[[], Tensor]:
        """What an operator keeps in place of a view."""
        self._savers += 1
        form = view.shape, view.stride(), view.storage_offset()
        return lambda: self._given().as_strided(*form)

    def _given(self) -> Tensor:
        """Itself, made once for all that saved it."""
        if self.makes is not None and self._left == 0:
            with torch.no_grad():
                self.tensor, self._left = alone(self.makes()), self._savers
        tensor = self.tensor
        assert tensor is not None
        if self.makes is not None:
            self._left -= 1
            self.tensor = tensor if self._left else None
        return tensor


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def saving(inputs: Sequence[KeptCopy], *, outputs: bool = False) -> Iterator[list[KeptCopy]]:
    """What runs inside saves these through their copies, and with ``outputs`` all else through copies that it gives."""
    found = list(inputs)

    def pack(tensor: Tensor) -> object:
        copy = next((each for each in found if each.holds(tensor)), None)
        if copy is None and outputs and not isinstance(tensor, nn.Parameter):
            copy = KeptCopy(tensor.detach())
            found.append(copy)
        return tensor if copy is None else copy.saved(tensor)

    def unpack(saved: object) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        assert callable(saved)
        tensor: Tensor = saved()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield found
