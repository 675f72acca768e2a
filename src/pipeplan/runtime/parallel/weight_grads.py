"""Weight gradients that can wait: backward split into I (input gradients) and W (weight gradients).

Modules that multiply by a weight queue its gradient while a :class:`WeightGradQueue` is active, and compute it at
once otherwise, by the same operations: split and full backward agree bit for bit where a weight is used once.

Deferred are ``nn.Linear`` (weight and bias) and ``nn.Embedding``. Everything else computes its weight gradients
with I: normalisations and convolutions, subclasses, whose forward may be their own, and weights that are themselves
computed, as under a parametrization. Hooks on a deferred parameter are not called by W.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.runtime.parallel.sharding import kept_for


class WeightGradQueue:
    """Collects the weight gradients of the backward that runs while it, and no other, is active."""

    _active: WeightGradQueue | None = None  # not thread-local: CUDA runs backward on threads of its own

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[], None], tuple[Tensor, ...]]] = deque()
        self._copies: dict[object, tuple[Tensor, Tensor]] = {}

    @classmethod
    def active(cls) -> WeightGradQueue | None:
        """The queue that collects now, if any."""
        return cls._active

    def __enter__(self) -> WeightGradQueue:
        assert WeightGradQueue._active is None, "weight gradients are already being collected"
        WeightGradQueue._active = self
        return self

    def __exit__(self, *error: object) -> None:
        WeightGradQueue._active = None
        self._copies.clear()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, work: Callable[[], None], held: tuple[Tensor, ...]) -> None:
        """Queue a gradient's computation and the tensors it holds until then."""
        self._waiting.append((work, held))

    def own(self, gradient: Tensor) -> Tensor:
        """What may wait: it, or where it is a view of more, as of a concatenation's, one copy for all that ask."""
        if gradient.untyped_storage().nbytes() <= gradient.nbytes:
            return gradient
        key = gradient.data_ptr(), gradient.shape, gradient.stride()  # of memory that is in use until backward ends
        return self._copies.setdefault(key, (gradient, gradient.clone()))[1]

    @property
    def held(self) -> tuple[Tensor, ...]:
        """The tensors that wait for :meth:`run`: inputs and output gradients of the deferred modules."""
        return tuple(tensor for _, held in self._waiting for tensor in held)

    @property
    def held_bytes(self) -> int:
        """Bytes of their storages, each counted once."""
        storages = (tensor.untyped_storage() for tensor in self.held)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def run(self) -> None:
        """Add every queued gradient to its parameter's ``grad``, letting go of what each held as soon as it can."""
        with torch.no_grad():
            while self._waiting:
                work, _ = self._waiting.popleft()
                work()
                del work, _


class DeferredLinear(nn.Linear):
    """``nn.Linear`` whose weight and bias gradients can be deferred."""

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Linear``: [..., in_features] to [..., out_features]."""
        return linear(input, self.weight, self.bias)


class DeferredEmbedding(nn.Embedding):
    """``nn.Embedding`` whose weight gradient can be deferred."""

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Embedding``: indices [...] to [..., embedding_dim]."""
        return embedding(input, self.weight, self.padding_idx)


def defer_weight_gradients(module: nn.Module) -> nn.Module:
    """Let weight gradients of every linear and embedding layer inside wait, but compiled ones; returns it."""
    for child in _outside_compiled(module):
        if type(child) is nn.Linear:
            child.__class__ = DeferredLinear
        elif type(child) is nn.Embedding and is_plain_embedding(child):
            child.__class__ = DeferredEmbedding
    return module


def warn_if_compiled(queue: WeightGradQueue, module: nn.Module, name: str) -> None:
    """Warn if a part of a module, of which a backward filled ``queue``, is compiled, as is seen or as nothing waits."""
    weights = (weight for child in module.modules() for weight in deferrable(child))
    nothing_waits = len(queue) == 0 and any(weight.requires_grad for weight in weights)
    if nothing_waits or any(map(_is_compiled, module.modules())):
        warnings.warn(
            f"{name} is compiled, or a part of it: weight gradients of what is compiled are computed with I instead of "
            "W; leave torch.compile out to split backward",
            stacklevel=2,
        )


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As ``F.linear``, with weight [out, in] and bias gradients that can be deferred."""
    if _is_traced() or torch.is_inference_mode_enabled():  # in which there are no gradients, and few words a step
        return F.linear(input, weight, bias)
    return _linear(input, weight, bias, False, *_kept(input, weight))


def addmm(bias: Tensor | None, input: Tensor, weight: Tensor) -> Tensor:
    """``input @ weight + bias`` with weight [in, out] and bias gradients that can be deferred."""
    if _is_traced() or torch.is_inference_mode_enabled():
        return F.linear(input, weight.t(), bias)
    return _linear(input, weight, bias, True, *_kept(input, weight))


def embedding(indices: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """As ``F.embedding``, with a weight gradient that can be deferred."""
    if _is_traced():
        return F.embedding(indices, weight, padding_idx)
    return _embedding(indices, weight, padding_idx)


def _is_traced() -> bool:
    """Whether what runs is noted to be run by something else, which knows torch's own operators."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]  # torch's


def deferrable(module: nn.Module) -> tuple[Tensor, ...]:
    """The module's weights whose gradients can wait; modules that call the functions here name theirs."""
    if isinstance(module, DeferredLinear | DeferredEmbedding):
        return (module.weight,)
    named: tuple[Tensor, ...] = getattr(module, "deferred_weights", ())
    return named


def _outside_compiled(module: nn.Module) -> Iterator[nn.Module]:
    """The module and all inside it, but nothing compiled."""
    if not _is_compiled(module):
        yield module
        for child in module.children():
            yield from _outside_compiled(child)


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def is_plain_embedding(embedding: nn.Embedding) -> bool:
    """Whether its gradient is the dense sum over indices, and nothing else."""
    return embedding.max_norm is None and not embedding.sparse and not embedding.scale_grad_by_freq


class _LinearFunction(torch.autograd.Function):
    """y = x W^T + b, or x W + b if ``transposed``; saves x only for the gradient of W, and W only for that of x.

    With ``kept``, of which ``whole`` makes x again, it saves that in place of x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transposed: bool,
        kept: Tensor | None,
        whole: Callable[[Tensor], Tensor],
    ) -> Tensor:
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        saved = input if kept is None else kept
        ctx.save_for_backward(saved if needs_weight else None, weight if needs_input else None)
        ctx.parameters, ctx.how = (weight, bias), (transposed, whole, input.dtype)
        return F.linear(input, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        input, saved_weight = ctx.saved_tensors
        weight, bias = ctx.parameters
        transposed, whole, input_dtype = ctx.how  # what waits must not hold on to ctx, which has the graph
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        input_grad = None
        if needs_input:  # under autocast the gradient has another type than input and weight
            factor = saved_weight.t() if transposed else saved_weight
            input_grad = _in(input_dtype, gradient @ _in(gradient.dtype, factor))

        def weight_grad() -> Tensor:
            taken = whole(input)
            pair = (gradient, taken) if transposed else (taken, gradient)
            return _in(weight.dtype, _weight_grad(*pair))

        def bias_grad() -> Tensor:
            return _in(bias.dtype, gradient.reshape(-1, gradient.shape[-1]).sum(0))

        queue = WeightGradQueue.active()
        if queue is None or not weight.is_leaf or (bias is not None and not bias.is_leaf):
            found = weight_grad() if needs_weight else None, bias_grad() if needs_bias else None
            return input_grad, *found, None, None, None

        def work() -> None:
            if needs_weight:
                _accumulate(weight, weight_grad())
            if needs_bias:
                _accumulate(bias, bias_grad())

        if needs_weight:
            input = input.detach()  # with its graph it would keep the gradient of the stage's input, too
        if needs_weight or needs_bias:
            gradient = queue.own(gradient)
            queue.put(work, (input, gradient) if needs_weight else (gradient,))
        return input_grad, None, None, None, None, None


class _EmbeddingFunction(torch.autograd.Function):
    """Rows of a weight by index; the gradient of the weight is the sum of the rows' gradients."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.parameter, ctx.padding_idx = weight, -1 if padding_idx is None else padding_idx
        return F.embedding(indices, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        (indices,) = ctx.saved_tensors
        parameter, padding_idx = ctx.parameter, ctx.padding_idx

        def weight_grad() -> Tensor:
            result: Tensor = torch.ops.aten.embedding_dense_backward(
                gradient, indices, parameter.shape[0], padding_idx, False
            )
            return result

        queue = WeightGradQueue.active()
        if queue is None or not parameter.is_leaf:
            return None, weight_grad(), None
        gradient = queue.own(gradient)
        queue.put(lambda: _accumulate(parameter, weight_grad()), (indices, gradient))
        return None, None, None


_linear: Callable[..., Tensor] = _LinearFunction.apply
_embedding: Callable[..., Tensor] = _EmbeddingFunction.apply


def _weight_grad(input: Tensor, gradient: Tensor) -> Tensor:
    """[out, in] from input [..., in] and gradient [..., out]; the other way round, its transpose."""
    left, right = gradient.reshape(-1, gradient.shape[-1]).t(), input.reshape(-1, input.shape[-1])
    return left @ _in(left.dtype, right)


def _kept(input: Tensor, weight: Tensor) -> tuple[Tensor | None, Callable[[Tensor], Tensor]]:
    """What to keep in place of an input for a weight's gradient, and what makes that of it again."""
    found = kept_for(input)
    if found is not None:
        found.takers += weight.requires_grad
        return found.share, found.gather
    shown = input._base
    found = kept_for(shown) if shown is not None and shown.numel() == input.numel() else None
    if found is None or not input.is_contiguous():
        return None, lambda kept: kept
    found.takers += weight.requires_grad
    gather, shape = found.gather, input.shape
    return found.share, lambda share: gather(share).view(shape)


def gradient_format(parameter: Tensor) -> torch.dtype:
    """The format that its gradients add up in."""
    found: torch.dtype | None = parameter.grad_dtype
    return parameter.dtype if found is None else found


def accumulate_later(weight: Tensor, gradient: Callable[[], Tensor], held: tuple[Tensor, ...]) -> bool:
    """Put a weight's gradient off, which needs what is ``held``; whether it waits, as where backward is split."""
    queue = WeightGradQueue.active()
    if queue is None or not weight.is_leaf:
        return False
    queue.put(lambda: _accumulate(weight, gradient()), held)
    return True


def _in(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """The tensor in a number format; asking first costs less than a conversion to its own."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = _in(gradient_format(parameter), gradient)
    else:
        parameter.grad.add_(gradient)
