"""How fast the optimizer's step goes through the state of a model's parameters: measured, or of a device.

Both are bytes per second, of those that :func:`pipeplan.costs.recipes.step_bytes` counts: a step only moves memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from pipeplan.costs.devices import DevicePreset
from pipeplan.costs.recipes import bytes_per_parameter, step_bytes, unnamed_bytes
from pipeplan.errors import InfeasibleError
from pipeplan.files import Recipe
from pipeplan.files.recipe import ADAMW
from pipeplan.runtime.profiling.build_profile import BlockGraph
from pipeplan.runtime.profiling.instruments import blamed, steady, timed
from pipeplan.workload.kinds import GRADIENTS, MASTER, STATE_KINDS, MemoryBytes

_FLOAT32_BYTES = 4


def measured_rate(
    graph: BlockGraph, recipe: Recipe, dtype: torch.dtype, device: torch.device, *, repeats: int, warmup: int
) -> int | None:
    """Bytes per second of steps of the parameters of one block of each kind: the median of ``repeats``.

    They are of torch's optimizer as it is by default, on tensors of as many numbers as each kind of block trains, in
    the formats of the recipe: gradients are cast for a master copy, which is copied to what computes.

    None where nothing is trained, or memory runs out for it.
    """
    sizes = [*{block.kind: block.trainable for block in graph.blocks if block.trainable}.values()]
    if not sizes:
        return None
    moved = sum(step_bytes(_state(recipe, dtype, size), recipe) for size in sizes)
    try:
        with steady(device), blamed("the optimizer's step"):
            step = _step(sizes, recipe, dtype, device)
            times = [timed(step, device)[1] for _ in range(warmup + repeats)][warmup:]
    except InfeasibleError:
        return None
    return max(1, round(1e9 * moved / max(1, statistics.median(times))))


def estimated_rate(graph: BlockGraph, recipe: Recipe, dtype: torch.dtype, device: DevicePreset) -> int | None:
    """Bytes per second that a device's memory moves of the state of all of a model's parameters; None without any."""
    moved = step_bytes(_state(recipe, dtype, sum(block.trainable for block in graph.blocks)), recipe)
    return max(1, round(1e9 * moved / device.kernel_ns(0, moved, matrix=False))) if moved else None


def _state(recipe: Recipe, dtype: torch.dtype, count: int) -> MemoryBytes:
    """The state of this many parameters: by the recipe, or as a plain loop keeps it in a format without a recipe."""
    if recipe.is_custom:
        return MemoryBytes({kind: unnamed_bytes(dtype.itemsize, count)[kind.key] for kind in STATE_KINDS})
    return bytes_per_parameter(recipe) * count


def _step(sizes: list[int], recipe: Recipe, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """What is timed."""
    each = _state(recipe, dtype, 1)
    wide = torch.float32 if each[GRADIENTS] == _FLOAT32_BYTES else dtype

    def tensors(of: torch.dtype) -> list[Tensor]:  # steps of zeros took a processor 1.3 times as long
        return [torch.full((size,), 0.01, dtype=of, device=device) for size in sizes]

    computing, gradients = tensors(dtype), tensors(wide)
    changed = tensors(torch.float32) if each[MASTER] else computing
    if recipe.optimizer == ADAMW:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(changed)
    else:
        optimizer = torch.optim.SGD(changed, lr=0.01, momentum=0.9 * (recipe.optimizer == "momentum"))

    def step() -> None:
        for own, gradient in zip(changed, gradients, strict=True):
            own.grad = gradient.to(own.dtype)
        optimizer.step()
        for copy, own in zip(computing, changed, strict=True):
            if copy is not own:
                copy.copy_(own)

    return step
