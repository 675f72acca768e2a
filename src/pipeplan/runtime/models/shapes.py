"""The shapes of what a model's blocks produce, found on the meta device, where tensors have no data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from pipeplan.errors import UsageError
from pipeplan.runtime.models.spec import BlockSpec, Model
from pipeplan.runtime.parallel.device import Autocast

_Call = Callable[[nn.Module, Sequence[Tensor]], object]


@dataclass(frozen=True, slots=True)
class ShapedBlock:
    """One block's turn in :func:`shaped_blocks`: everything is on the meta device, and has shapes but no data.

    ``inputs`` are the tensors of its sources, as the leaves of a graph of the block's own.
    """

    spec: BlockSpec
    module: nn.Module
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def shaped_blocks(
    model: Model, num_samples: int, dtype: torch.dtype = torch.float32, autocast: Autocast | None = None
) -> Iterator[ShapedBlock]:
    """Run all blocks in order on the meta device: shapes, formats and who needs gradients, without computing.

    With ``autocast`` blocks run under it, and what they make says that it is on its device. Raises UsageError, which
    names the block that cannot be built or called this way.
    """
    batch = model.mini_batch(num_samples, 0, 0, dtype=dtype, device="meta")
    call: _Call = (lambda module, arguments: module(*arguments)) if autocast is None else _OnItsDevice(autocast)
    values: dict[str, tuple[Tensor, ...]] = {}
    for block in model.blocks:
        try:
            inputs = tuple(values[source][index] for source, index in block.inputs)
            with torch.device("meta"):
                module = block.build().to("meta", dtype)
            with torch.enable_grad():
                made = call(module, (*inputs, *(batch[name] for name in block.samples)))
        except Exception as error:
            raise UsageError(
                f"model {model.name!r}: block {block.id!r} cannot be built and called on the meta device, which "
                f"shows shapes without computing: {type(error).__name__}: {error}"
            ) from error
        outputs = outputs_of(made)
        if outputs is None:
            raise UsageError(
                f"model {model.name!r}: block {block.id!r} returned {type(made).__name__}; "
                "a block returns one tensor, or a tuple of tensors"
            )
        yield ShapedBlock(block, module, inputs, outputs)
        values[block.id] = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs)


def output_shapes(
    model: Model, num_samples: int, dtype: torch.dtype = torch.float32, autocast: Autocast | None = None
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every block's one output, found without computing. Raises UsageError."""
    found = {}
    for block in shaped_blocks(model, num_samples, dtype, autocast):
        if len(block.outputs) != 1:
            raise UsageError(
                f"model {model.name!r}: block {block.spec.id!r} returns {len(block.outputs)} tensors; "
                "only models whose blocks return one each can run"
            )
        found[block.spec.id] = tuple(block.outputs[0].shape), block.outputs[0].dtype
    return found


def outputs_of(made: object) -> tuple[Tensor, ...] | None:
    """What a block returned, as a tuple of tensors; None if it is not one tensor or a tuple of some."""
    found = made if isinstance(made, tuple) else (made,)
    tensors = tuple(each for each in found if isinstance(each, Tensor))
    return tensors if tensors and len(tensors) == len(found) else None


class _OnItsDevice:
    """Calls modules of the meta device under autocast, of which that device knows nothing.

    Tensors without data that say they are on autocast's device stand for arguments, parameters and buffers.
    """

    def __init__(self, autocast: Autocast) -> None:
        self._autocast = autocast
        self._mode = FakeTensorMode()

    def __call__(self, module: nn.Module, arguments: Sequence[Tensor]) -> object:
        with self._mode, self._autocast():
            named = chain(module.named_parameters(), module.named_buffers())
            state = {name: self._stand_in(tensor) for name, tensor in named}
            return functional_call(module, state, tuple(self._stand_in(each) for each in arguments))

    def _stand_in(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "meta":
            return tensor
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._autocast.device)
        return made.requires_grad_(tensor.requires_grad)
