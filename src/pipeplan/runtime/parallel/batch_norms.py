"""Batch normalisation in training mode, which takes the mean and the variance of the micro-batch that it is given.

Running statistics change with every micro-batch that runs forward, and not when it is computed again. Where devices
share the samples of a micro-batch, :func:`normed_over_samples` takes the statistics of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from pipeplan.runtime.parallel.sharding import WHOLE, Shards

_again: ContextVar[bool] = ContextVar("again", default=False)
"""Whether what runs forward did so before."""

_sharers: ContextVar[Shards] = ContextVar("sharers", default=WHOLE)
"""A device's place among those that share the samples of what runs."""


@contextmanager
def samples_shared(sharers: Shards) -> Iterator[None]:
    """What runs inside has some of the samples, and the others have the rest."""
    token = _sharers.set(sharers)
    try:
        yield
    finally:
        _sharers.reset(token)


class _NormedOverSamples(torch.autograd.Function):
    """A batch norm of [samples, ..., channels], of which it saves the input and two numbers per channel.

    Statistics, and what backward needs of them, are sums over the devices that share the samples.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        sharers = _sharers.get()
        rows = input.flatten(0, -2)
        count = len(rows) * sharers.count
        mean = sharers.summed(rows.sum(0)) / count
        inverse = torch.rsqrt(sharers.summed((rows - mean).square().sum(0)) / count + epsilon)
        ctx.save_for_backward(input, weight, mean, inverse)
        ctx.sharers, ctx.count = sharers, count
        return (input - mean) * (inverse * weight) + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse = ctx.saved_tensors
        (gradient,) = gradients
        normed = (input - mean) * inverse
        own = torch.stack((gradient.flatten(0, -2).sum(0), (gradient * normed).flatten(0, -2).sum(0)))
        means = ctx.sharers.summed(own) / ctx.count
        input_grad = (gradient - means[0] - normed * means[1]) * (inverse * weight)
        return input_grad, own[1], own[0], None


def normed_over_samples(input: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """[samples, ..., channels] normalised over all else than channels, also of devices with the rest of the samples.

    There are no running statistics.
    """
    made: Tensor = _normed(input, weight, bias, epsilon)
    return made


_normed: Any = _NormedOverSamples.apply


def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """torch's operator [samples, channels, ...], whose running statistics stay where something is computed again.

    Without such statistics, and in evaluation mode, it takes a mean of 0 and a variance of 1.

    Raises:
        ValueError: one number per channel, of which there is no variance.
    """
    if training and input.numel() == input.shape[1]:
        raise ValueError(
            "batch normalisation has one number per channel, and its variance needs more: choose micro-batches of two "
            "samples or more"
        )
    if not training and (running_mean is None or running_var is None):
        running_mean, running_var = input.new_zeros(input.shape[1]), input.new_ones(input.shape[1])
    if training and not torch.compiler.is_compiling():  # a compiler cannot ask, and no stage that recomputes has one
        momentum = 0.0 if _again.get() else momentum
    given = input, weight, bias, running_mean, running_var
    return torch.batch_norm(*given, training, momentum, eps, cudnn_enabled)


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """Its modules that normalise by the statistics of a micro-batch while they are in training mode, as they are."""
    return [
        each
        for each in module.modules()
        if each.training and (getattr(each, "num_batch_norms", False) or isinstance(each, _BatchNorm))
    ]


def num_batch_norms(modules: list[nn.Module]) -> int:
    """How many layers of :func:`batch_norms` they have."""
    counts: list[int] = [getattr(each, "num_batch_norms", None) or 1 for each in modules]
    return sum(counts)


def recomputed(module: nn.Module, *arguments: Tensor) -> Any:
    """What a module makes, and once more in backward: with the same random numbers, and statistics left alone."""
    twice = partial(_first_and_again, module)
    return checkpoint(module, *arguments, use_reentrant=False, context_fn=twice)


def _first_and_again(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _statistics_kept(module, _sharers.get())


@contextmanager
def _statistics_kept(module: nn.Module, sharers: Shards) -> Iterator[None]:
    """Without momentum, so that the same tensors are saved as the first time."""
    norms = [each for each in batch_norms(module) if isinstance(each, _BatchNorm)]
    before = [(each, each.momentum, each.num_batches_tracked) for each in norms]
    token = _again.set(True)
    of_sharers = _sharers.set(sharers)
    for each in norms:
        each.momentum = 0.0
        if each.num_batches_tracked is not None:
            each.num_batches_tracked = each.num_batches_tracked.clone()
    try:
        yield
    finally:
        _again.reset(token)
        _sharers.reset(of_sharers)
        for each, momentum, tracked in before:
            each.momentum, each.num_batches_tracked = momentum, tracked
