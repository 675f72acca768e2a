"""Closed forms per kind of operator: work, bytes moved, and what backward keeps. No torch.

An operator counts what autograd saves of its *input*, never its output: the next one counts that as its input. So the
operators of a block, and the blocks of a stage, add up. ``width`` is bytes per number of the 16-bit format; statistics
and the loss are in float32, indices in int64. A weight gradient is made, then added to the accumulated one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipeplan.costs.presets import DevicePreset
from pipeplan.model import CostRow

__all__ = [
    "Kernel",
    "Operator",
    "activation",
    "add",
    "attention_core",
    "concatenate",
    "convolution",
    "cost_row",
    "embedding",
    "linear",
    "max_pool",
    "norm",
    "relu",
    "sequence_of",
    "vocabulary_loss",
]

_FLOAT32 = 4
_INT64 = 8
_STATISTICS = 2 * _FLOAT32  # mean and reciprocal deviation of a token's norm


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch: floating-point operations, bytes to and from memory, and whether matrix units do the work."""

    flops: int
    moved_bytes: int
    matrix: bool = False


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator, or several in a row, for one micro-batch.

    ``saved_bytes`` are held from F to I or B, ``deferred_bytes`` from I to W: inputs and output gradients of what has
    weights. ``gradient_bytes`` are the gradients of its input and output, there at once; ``update_bytes`` is the
    most that making a weight gradient takes. ``parameters`` is a count.
    """

    parameters: int = 0
    forward: tuple[Kernel, ...] = ()
    input_grad: tuple[Kernel, ...] = ()
    weight_grad: tuple[Kernel, ...] = ()
    saved_bytes: int = 0
    deferred_bytes: int = 0
    gradient_bytes: int = 0
    update_bytes: int = 0

    @property
    def flops(self) -> int:
        """Of a forward."""
        return sum(kernel.flops for kernel in self.forward)


def sequence_of(*operators: Operator, residual_bytes: int = 0) -> Operator:
    """Operators one after another; ``residual_bytes`` is a gradient that waits beside them for its addition."""
    return Operator(
        parameters=sum(each.parameters for each in operators),
        forward=tuple(kernel for each in operators for kernel in each.forward),
        input_grad=tuple(kernel for each in reversed(operators) for kernel in each.input_grad),
        weight_grad=tuple(kernel for each in operators for kernel in each.weight_grad),
        saved_bytes=sum(each.saved_bytes for each in operators),
        deferred_bytes=sum(each.deferred_bytes for each in operators),
        gradient_bytes=max(each.gradient_bytes for each in operators) + residual_bytes,
        update_bytes=max(each.update_bytes for each in operators),
    )


def linear(tokens: int, inputs: int, outputs: int, width: int, *, bias: bool = True) -> Operator:
    """A matrix product with a weight: [tokens, inputs] to [tokens, outputs]; 2 FLOPs per multiply and add."""
    taken, given, weight = tokens * inputs * width, tokens * outputs * width, inputs * outputs * width
    product = Kernel(2 * tokens * inputs * outputs, taken + given + weight, matrix=True)
    parameters = inputs * outputs + (outputs if bias else 0)
    return Operator(
        parameters=parameters,
        forward=(product,),
        input_grad=(product,),
        weight_grad=(product, _accumulate(parameters, width)),
        saved_bytes=taken,
        deferred_bytes=taken + given,
        gradient_bytes=taken + given,
        update_bytes=parameters * width,
    )


def norm(tokens: int, hidden: int, width: int, *, bias: bool = True) -> Operator:
    """Layer norm (with ``bias``) or root-mean-square norm. Its small weight gradients are made with I."""
    numbers = tokens * hidden
    return Operator(
        parameters=(2 if bias else 1) * hidden,
        forward=(Kernel(8 * numbers, 2 * numbers * width),),
        input_grad=(Kernel(16 * numbers, 3 * numbers * width),),
        saved_bytes=numbers * width + (_STATISTICS if bias else _FLOAT32) * tokens,
        gradient_bytes=2 * numbers * width,
    )


def attention_core(
    samples: int, queries: int, keys: int, heads: int, head_size: int, width: int, *, causal: bool = False
) -> Operator:
    """Fused attention (FlashAttention-2): queries, keys and values to their mixture, scores never in memory.

    Forward has 2 matrix products, backward 5; a causal mask leaves half of each. Kept are the inputs and a float32
    per query and head; the output is kept by the projection after it.
    """
    product = 2 * samples * heads * queries * keys * head_size // (2 if causal else 1)
    query, key = samples * queries * heads * head_size * width, samples * keys * heads * head_size * width
    statistics = _FLOAT32 * samples * heads * queries
    taken = query + 2 * key
    return Operator(
        forward=(Kernel(2 * product, taken + query + statistics, matrix=True),),
        input_grad=(Kernel(5 * product, 2 * taken + 2 * query + statistics, matrix=True),),
        saved_bytes=taken + statistics,
        gradient_bytes=taken + query,
    )


def activation(numbers: int, width: int, *, gated: bool = False) -> Operator:
    """An element-wise function that keeps its input, such as GELU; gated, of two inputs that it multiplies."""
    inputs = 2 if gated else 1
    return Operator(
        forward=(Kernel(8 * numbers, (inputs + 1) * numbers * width),),
        input_grad=(Kernel(16 * numbers, (2 * inputs + 1) * numbers * width),),
        saved_bytes=inputs * numbers * width,
        gradient_bytes=(inputs + 1) * numbers * width,
    )


def add(numbers: int, width: int) -> Operator:
    """The sum of two tensors, as of a residual; backward adds the two gradients where the paths part."""
    kernel = Kernel(numbers, 3 * numbers * width)
    return Operator(forward=(kernel,), input_grad=(kernel,))


def relu(numbers: int, width: int) -> Operator:
    """A function whose backward needs its output, which the next operator keeps as its input."""
    return Operator(
        forward=(Kernel(numbers, 2 * numbers * width),),
        input_grad=(Kernel(numbers, 3 * numbers * width),),
        gradient_bytes=2 * numbers * width,
    )


def concatenate(numbers: int, width: int, *, kept: int = 0) -> Operator:
    """A copy of several tensors into one of so many ``numbers``; backward hands out views.

    It needs none of its inputs; ``kept`` is how many of them the operators before it need as their outputs.
    """
    return Operator(forward=(Kernel(0, 2 * numbers * width),), saved_bytes=kept * width, gradient_bytes=numbers * width)


def convolution(samples: int, side: int, inputs: int, outputs: int, width: int, *, kernel: int = 3) -> Operator:
    """A square convolution with bias that keeps the image's side: [inputs, side, side] to [outputs, side, side].

    Its weight gradient is made with I, as the executor does it.
    """
    pixels, weight = samples * side * side, kernel * kernel * inputs * outputs
    taken, given = pixels * inputs * width, pixels * outputs * width
    product = Kernel(2 * pixels * weight, taken + given + weight * width, matrix=True)
    parameters = weight + outputs
    return Operator(
        parameters=parameters,
        forward=(product,),
        input_grad=(product, product, _accumulate(parameters, width)),
        saved_bytes=taken,
        gradient_bytes=taken + given,
        update_bytes=parameters * width,
    )


def max_pool(samples: int, side: int, channels: int, width: int) -> Operator:
    """The largest of every 2 x 2 pixels; keeps its input and where the largest were, as int64."""
    taken = samples * side * side * channels
    given = taken // 4
    moved = (taken + given) * width + _INT64 * given
    return Operator(
        forward=(Kernel(taken, moved),),
        input_grad=(Kernel(given, moved),),
        saved_bytes=taken * width + _INT64 * given,
        gradient_bytes=(taken + given) * width,
    )


def embedding(
    samples: int, lookups: int, entries: int, hidden: int, width: int, *, positions: int = 0, types: int = 0
) -> Operator:
    """Rows of a table of ``entries``, ``lookups`` per sample, with learned ``positions`` and token ``types`` added.

    The weight gradient is dense, as torch makes it by default: as large as the table however few rows are hit.
    """
    tokens = samples * lookups
    rows, table = tokens * hidden * width, (entries + positions + types) * hidden
    place_rows = lookups * hidden * width if positions else 0
    place_indices = _INT64 * lookups if positions else 0
    summed = (Kernel(tokens * hidden, rows + place_rows),) if positions else ()
    indices = _INT64 * tokens + place_indices
    return Operator(
        parameters=table,
        forward=(Kernel(0, 2 * rows + indices), *([Kernel(tokens * hidden, 3 * rows)] if positions else [])),
        input_grad=summed,
        weight_grad=(Kernel(tokens * hidden, rows + table * width), _accumulate(table, width)),
        saved_bytes=indices,
        deferred_bytes=rows + place_rows + indices,
        gradient_bytes=rows + place_rows,
        update_bytes=entries * hidden * width + rows,
    )


def vocabulary_loss(tokens: int, vocabulary: int, width: int) -> Operator:
    """Cross-entropy of logits, in float32: they are converted, and the logarithm of their softmax is kept."""
    numbers = tokens * vocabulary
    return Operator(
        forward=(
            Kernel(0, (width + _FLOAT32) * numbers),
            Kernel(4 * numbers, 2 * _FLOAT32 * numbers),
        ),
        input_grad=(
            Kernel(3 * numbers, 2 * _FLOAT32 * numbers),
            Kernel(0, (width + _FLOAT32) * numbers),
        ),
        saved_bytes=_FLOAT32 * numbers + _INT64 * tokens,
        gradient_bytes=(width + _FLOAT32) * numbers,
    )


def cost_row(operator: Operator, microbatch_size: int, device: DevicePreset) -> CostRow:
    """The operator's row for a profile, with the device's times. Backward is I and W one after the other."""
    input_grad, weight_grad = _time_ns(operator.input_grad, device), _time_ns(operator.weight_grad, device)
    return CostRow(
        microbatch_size=microbatch_size,
        forward_ns=_time_ns(operator.forward, device),
        backward_ns=input_grad + weight_grad,
        input_grad_ns=input_grad,
        weight_grad_ns=weight_grad,
        activation_bytes=operator.saved_bytes,
        weight_grad_bytes=operator.deferred_bytes,
        workspace_bytes=max(operator.gradient_bytes, operator.update_bytes),
    )


def _accumulate(parameters: int, width: int) -> Kernel:
    return Kernel(parameters, 3 * parameters * width)


def _time_ns(kernels: Iterable[Kernel], device: DevicePreset) -> int:
    return round(sum(device.kernel_ns(each.flops, each.moved_bytes, matrix=each.matrix) for each in kernels))
