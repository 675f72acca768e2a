"""Weight gradients that can wait: backward split into I (input gradients) and W (weight gradients).

Modules that multiply by a weight queue its gradient while a :class:`WeightGradQueue` is active, and compute it at
once otherwise. Deferred are ``nn.Linear`` and ``nn.Embedding``; what normalisations and biases of other modules
need is small and is computed with I.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["DeferredEmbedding", "DeferredLinear", "WeightGradQueue", "defer_weight_gradients"]


class WeightGradQueue:
    """Collects the weight gradients of the backward that runs while it is active; :meth:`run` computes them.

    One queue per stage and micro-batch. Only one is active at a time in a process.
    """

    _active: WeightGradQueue | None = None  # not thread-local: CUDA runs backward on threads of its own

    def __init__(self) -> None:
        self._work: list[Callable[[], None]] = []
        self._held: list[Tensor] = []

    @classmethod
    def active(cls) -> WeightGradQueue | None:
        """The queue that collects now, if any."""
        return cls._active

    def __enter__(self) -> WeightGradQueue:
        assert WeightGradQueue._active is None, "weight gradients are already being collected"
        WeightGradQueue._active = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        WeightGradQueue._active = None

    def __len__(self) -> int:
        return len(self._work)

    def put(self, work: Callable[[], None], held: tuple[Tensor, ...]) -> None:
        """Queue a gradient's computation and the tensors it holds until then."""
        self._work.append(work)
        self._held += held

    @property
    def held(self) -> tuple[Tensor, ...]:
        """The tensors that wait for :meth:`run`: inputs and output gradients of the deferred modules."""
        return tuple(self._held)

    def run(self) -> None:
        """Add every queued gradient to its parameter's ``grad`` and let go of what was held."""
        with torch.no_grad():
            for work in self._work:
                work()
        self._work.clear()
        self._held.clear()


class DeferredLinear(nn.Linear):
    """``nn.Linear`` whose weight and bias gradients can be deferred."""

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Linear``: [..., in_features] to [..., out_features]."""
        result: Tensor = _Linear.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return result


class DeferredEmbedding(nn.Embedding):
    """``nn.Embedding`` whose weight gradient can be deferred."""

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Embedding``: indices [...] to [..., embedding_dim]."""
        result: Tensor = _Embedding.apply(input, self.weight, self.padding_idx)  # type: ignore[no-untyped-call]
        return result


def defer_weight_gradients(module: nn.Module) -> nn.Module:
    """Let the weight gradients of every ``nn.Linear`` and ``nn.Embedding`` inside be deferred; returns the module.

    Parameter names stay. Modules under ``torch.compile`` keep their own backward: their weight gradients are
    computed with I, of which a warning tells.
    """
    for name, child in module.named_modules():
        if _is_compiled(child):
            warnings.warn(
                f"{name or 'the module'} is compiled: its weight gradients cannot be deferred and are computed with "
                "I instead of W; leave torch.compile out to split backward",
                stacklevel=2,
            )
        elif type(child) is nn.Linear:
            child.__class__ = DeferredLinear
        elif type(child) is nn.Embedding and not (child.max_norm or child.sparse or child.scale_grad_by_freq):
            child.__class__ = DeferredEmbedding
    return module


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.parameters = (weight, bias)
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        input, weight = ctx.saved_tensors
        input_grad = gradient @ weight if ctx.needs_input_grad[0] else None
        queue = WeightGradQueue.active()
        parameter, bias = ctx.parameters
        needs_weight, needs_bias = ctx.needs_input_grad[1], bias is not None and ctx.needs_input_grad[2]
        if queue is None or not parameter.is_leaf or (bias is not None and not bias.is_leaf):
            return (
                input_grad,
                _weight_grad(input, gradient) if needs_weight else None,
                _bias_grad(gradient) if needs_bias else None,
            )
        if needs_weight or needs_bias:

            def work() -> None:
                if needs_weight:
                    _accumulate(parameter, _weight_grad(input, gradient))
                if needs_bias:
                    _accumulate(bias, _bias_grad(gradient))

            queue.put(work, (input, gradient))
        return input_grad, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.parameter = weight
        ctx.padding_idx = -1 if padding_idx is None else padding_idx
        return F.embedding(indices, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        (indices,) = ctx.saved_tensors
        parameter, padding_idx = ctx.parameter, ctx.padding_idx
        if not ctx.needs_input_grad[1]:
            return None, None, None

        def weight_grad() -> Tensor:
            result: Tensor = torch.ops.aten.embedding_dense_backward(
                gradient, indices, parameter.shape[0], padding_idx, False
            )
            return result

        queue = WeightGradQueue.active()
        if queue is None or not parameter.is_leaf:
            return None, weight_grad(), None
        queue.put(lambda: _accumulate(parameter, weight_grad()), (indices, gradient))
        return None, None, None


def _weight_grad(input: Tensor, gradient: Tensor) -> Tensor:
    """[out, in] from input [..., in] and gradient [..., out]."""
    return gradient.reshape(-1, gradient.shape[-1]).t() @ input.reshape(-1, input.shape[-1])


def _bias_grad(gradient: Tensor) -> Tensor:
    return gradient.reshape(-1, gradient.shape[-1]).sum(0)


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
