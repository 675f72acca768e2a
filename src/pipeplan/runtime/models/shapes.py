"""The shapes of what a model's blocks produce, found on the meta device, where tensors have no data."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import get_args

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from pipeplan.errors import UsageError
from pipeplan.runtime.models.spec import BlockSpec, Grain, Model
from pipeplan.runtime.parallel.device import Autocast

_Call = Callable[[nn.Module, Sequence[Tensor]], object]


@dataclass(frozen=True, slots=True)
class ShapedBlock:
    """One block's turn in :func:`shaped_blocks`: everything is on the meta device, and has shapes but no data.

    ``inputs`` are the tensors of its sources, as the leaves of a graph of the block's own. Blocks of one form that take
    the same forms of inputs have one ``module``, which has run for the first of them alone.
    """

    spec: BlockSpec
    module: nn.Module
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def num_whole(spec: BlockSpec, name: str, count: int) -> int:
    """How many of a parameter's ``count`` numbers each device that splits the block has: all that its cut leaves out.

    Of a block that does not say how it is split it is not known, and taken to be none.
    """
    if spec.split is None:
        return 0
    if (cut := spec.split.cuts.get(name)) is None:
        return count
    ratio = (1,) * cut.parts if isinstance(cut.parts, int) else cut.parts
    return count * sum(ratio[len(ratio) - cut.whole :]) // sum(ratio)  # the last of its parts


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
    known: dict[Hashable, ShapedBlock] = {}
    for block in model.blocks:
        inputs = tuple(values[source][index] for source, index in block.inputs)
        like = (block.form, block.samples, tuple(map(_form, inputs)), tuple(map(block.inputs.index, block.inputs)))
        if block.form is not None and like in known:
            step = known[like]
            yield ShapedBlock(block, step.module, inputs, step.outputs)
            values[block.id] = _leaves(step.outputs)
            continue
        try:
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
        known[like] = ShapedBlock(block, module, inputs, outputs)
        yield known[like]
        values[block.id] = _leaves(outputs)


def _form(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _leaves(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What a block made, as others take it."""
    return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs)


def several_remedy(model: Model) -> str:
    """What to do about blocks of which others take several tensors."""
    others = [grain for grain in get_args(Grain) if grain != model.grain]
    shown = f"{', '.join(others[:-1])} or {others[-1]}"
    return (
        f"cut the model otherwise (--granularity {shown}, the same for profile and run), or move what runs between "
        "layers into one of their modules"
    )


def output_shapes(
    model: Model, num_samples: int, dtype: torch.dtype = torch.float32, autocast: Autocast | None = None
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every block's one output, found without computing. Raises UsageError."""
    found = {}
    for block in shaped_blocks(model, num_samples, dtype, autocast):
        if len(block.outputs) != 1:
            raise UsageError(
                f"model {model.name!r}: block {block.spec.id!r} returns {len(block.outputs)} tensors; "
                f"only models whose blocks return one each can run: {several_remedy(model)}"
            )
        found[block.spec.id] = tuple(block.outputs[0].shape), block.outputs[0].dtype
    return found


def tokens_per_sample(
    model: Model, dtype: torch.dtype, num_samples: int = 2, steps: Iterable[ShapedBlock] = ()
) -> int | None:
    """Tokens of a sample: all that the model takes, but for its losses, is one sequence of numbers, place by place.

    ``steps`` are the blocks' turns with ``num_samples``, if they are known. Raises UsageError as
    :func:`shaped_blocks`.
    """
    batch = model.mini_batch(num_samples, 0, 0, dtype=dtype, device="meta")
    name, *others = {name for block in model.blocks if not block.loss for name in block.samples} or {""}
    numbers = batch.get(name)
    if others or numbers is None or numbers.ndim != 2 or numbers.is_floating_point() or numbers.dtype == torch.bool:
        return None
    takers = [step for step in steps or shaped_blocks(model, num_samples, dtype) if name in step.spec.samples]
    made = [output for step in takers if not step.spec.loss for output in step.outputs]
    by_place = all(tensor.ndim > 2 and tensor.shape[:2] == numbers.shape for tensor in made)
    return numbers.shape[1] if by_place else None


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
