"""One device's share of blocks as it is measured: built as a stage of several devices runs it, without the others.

What the others would send is made up of what the device has itself. Where devices share sequences, attention of a
device's pieces is over keys and values of whole ones, for which its own stand; what devices exchange is counted on the
meta device.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from pipeplan.errors import UsageError
from pipeplan.runtime.models.shapes import shaped_blocks
from pipeplan.runtime.models.spec import BlockSpec, Collective, Model
from pipeplan.runtime.parallel.context import CONTEXT
from pipeplan.runtime.parallel.context_attention import causal_attention
from pipeplan.runtime.parallel.sharding import Shards

_SAMPLES, _FLOAT32_BYTES = 2, 4


def measured_share(model: Model, share: Model, context: int, shards: int) -> Model:
    """The ``share`` of a part of each sequence, whose blocks run as those of one of the devices that split them.

    ``model`` is the whole one; blocks of which it does not say how devices split them are as the share has them. Raises
    UsageError where it does not say how devices share sequences.
    """
    try:
        run_as = model.shared_by(context)
    except UsageError as error:
        raise UsageError(f"--context {context} measures blocks as they run: {error}") from None
    place = Shards(shards, 0, along={CONTEXT: Shards(context)} if context > 1 else {})
    blocks = []
    for block in share.blocks:
        split = run_as.block(block.id).split
        form = None if block.form is None else (CONTEXT, context, shards, block.form)
        blocks.append(block if split is None else replace(block, build=partial(split.build, place), form=form))
    made = replace(share, blocks=tuple(blocks))
    return _with_exchanges(made, context) if context > 1 else made


def _with_exchanges(model: Model, context: int) -> Model:
    """The model whose blocks say what devices exchange of keys and values: gathered, twice, and their gradients."""
    found, of_module = list[BlockSpec](), dict[int, int]()
    with _CountedPieces() as gathered:
        for step in shaped_blocks(model, _SAMPLES):
            numbers = of_module.setdefault(id(step.module), gathered.numbers)
            gathered.numbers, size = 0, numbers * context // _SAMPLES * _FLOAT32_BYTES
            more = tuple(Collective(*each, size, over="context") for each in _EXCHANGES if numbers)
            found.append(replace(step.spec, collectives=(*step.spec.collectives, *more)))
    return replace(model, blocks=tuple(found))


_Exchange = tuple[Literal["all_gather", "reduce_scatter"], Literal["F", "I"]]

_EXCHANGES: tuple[_Exchange, ...] = (("all_gather", "F"), ("all_gather", "I"), ("reduce_scatter", "I"))


class _CountedPieces(TorchFunctionMode):
    """Counts the ``numbers`` in a device's own keys and values."""

    numbers = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is causal_attention:
            key, value = args[1:3]
            assert isinstance(key, torch.Tensor)
            self.numbers += key.numel() + value.numel()
        return func(*args, **(kwargs or {}))
