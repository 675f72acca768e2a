"""Closed forms per kind of operator: work, bytes moved, and what backward keeps. No torch.

An operator counts what autograd saves of its *input*, never its output: the next one counts that as its input. So the
operators of a block, and the blocks of a stage, add up. The exception is a block that ends with an operator whose
backward needs its output: the block counts it, and so does the block that takes it. ``width`` is bytes per number of
the 16-bit format; statistics and the loss are in float32, indices in int64. A weight gradient is made, then added to
the accumulated one.

One device's share of a split block has the forms of smaller operators, and :func:`exchange` between them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipeplan.costs.blocks import require_row
from pipeplan.costs.communication import Exchange, Prices, prices_of
from pipeplan.costs.devices import DevicePreset, Kernel
from pipeplan.files import CostRow
from pipeplan.files.row_messages import Combining

_FLOAT32 = 4
_INT64 = 8
_STATISTICS = 2 * _FLOAT32  # mean and reciprocal deviation of a token's norm


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator, or several in a row, for one micro-batch.

    ``saved_bytes`` are held from F to I or B, ``deferred_bytes`` from I to W: inputs and output gradients of what has
    weights. ``gradient_bytes`` are the gradients of its input and output, there at once; ``update_bytes`` is the
    most that making a weight gradient takes. ``parameters`` is a count, and each share has ``whole_parameters`` of them
    whole; ``masked_flops`` are what a causal mask saves a forward. Exchanges are with the devices that have the other
    shares, during F and during I.
    """

    parameters: int = 0
    forward: tuple[Kernel, ...] = ()
    input_grad: tuple[Kernel, ...] = ()
    weight_grad: tuple[Kernel, ...] = ()
    saved_bytes: int = 0
    deferred_bytes: int = 0
    gradient_bytes: int = 0
    update_bytes: int = 0
    forward_exchanges: tuple[Exchange, ...] = ()
    input_grad_exchanges: tuple[Exchange, ...] = ()
    masked_flops: int = 0
    whole_parameters: int = 0

    @property
    def flops(self) -> int:
        """Floating-point operations of a forward."""
        return sum(kernel.flops for kernel in self.forward)

    @property
    def product_flops(self) -> int:
        """Only of a forward's matrix products, attention whole where it is causal, too."""
        return self.masked_flops + sum(kernel.flops for kernel in self.forward if kernel.matrix)


def sequence_of(*operators: Operator, residual_bytes: int = 0) -> Operator:
    """Operators one after another; ``residual_bytes`` is a gradient that waits beside them for its addition."""
    return Operator(
        parameters=sum(each.parameters for each in operators),
        whole_parameters=sum(each.whole_parameters for each in operators),
        masked_flops=sum(each.masked_flops for each in operators),
        forward=tuple(kernel for each in operators for kernel in each.forward),
        input_grad=tuple(kernel for each in reversed(operators) for kernel in each.input_grad),
        weight_grad=tuple(kernel for each in operators for kernel in each.weight_grad),
        saved_bytes=sum(each.saved_bytes for each in operators),
        deferred_bytes=sum(each.deferred_bytes for each in operators),
        gradient_bytes=max(each.gradient_bytes for each in operators) + residual_bytes,
        update_bytes=max(each.update_bytes for each in operators),
        forward_exchanges=tuple(one for each in operators for one in each.forward_exchanges),
        input_grad_exchanges=tuple(one for each in reversed(operators) for one in each.input_grad_exchanges),
    )


def exchange(
    array_bytes: int,
    *,
    forward: Combining | None = None,
    input_grad: Combining | None = None,
) -> Operator:
    """Collectives over a whole array of ``array_bytes``, in forward and in backward."""
    return Operator(
        forward_exchanges=(Exchange(forward, array_bytes),) if forward else (),
        input_grad_exchanges=(Exchange(input_grad, array_bytes),) if input_grad else (),
    )


def linear(tokens: int, inputs: int, outputs: int, width: int, *, bias: bool = True) -> Operator:
    """A matrix product with a weight: [tokens, inputs] to [tokens, outputs]; 2 FLOPs per multiply and add."""
    taken, given, weight = tokens * inputs * width, tokens * outputs * width, inputs * outputs * width
    work, moved = 2 * tokens * inputs * outputs, taken + given + weight
    product = Kernel(work, moved, matrix=True)
    ahead = Kernel(work, moved, matrix=True, weights=True, product=(tokens, inputs, outputs, 1))
    parameters = inputs * outputs + (outputs if bias else 0)
    return Operator(
        parameters=parameters,
        forward=(ahead,),
        input_grad=(product,),
        weight_grad=(product, _accumulate(parameters, width)),
        saved_bytes=taken,
        deferred_bytes=taken + given,
        gradient_bytes=taken + given,
        update_bytes=parameters * width,
    )


def norm(tokens: int, hidden: int, width: int, *, bias: bool = True) -> Operator:
    """Layer norm (with ``bias``) or root-mean-square norm. Its small weight gradients are made with I."""
    numbers, parameters = tokens * hidden, (2 if bias else 1) * hidden
    return Operator(
        parameters=parameters,
        whole_parameters=parameters,
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
    whole = 2 * samples * heads * queries * keys * head_size
    product = whole // (2 if causal else 1)
    query, key = samples * queries * heads * head_size * width, samples * keys * heads * head_size * width
    statistics = _FLOAT32 * samples * heads * queries
    taken = query + 2 * key
    return Operator(
        masked_flops=2 * (whole - product),
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


def relu(numbers: int, width: int, *, ends: bool = False) -> Operator:
    """A function whose backward needs its output, which the next operator keeps as its input.

    It counts where it ``ends`` a block, since the next block may be on another device.
    """
    return Operator(
        forward=(Kernel(numbers, 2 * numbers * width),),
        input_grad=(Kernel(numbers, 3 * numbers * width),),
        saved_bytes=numbers * width if ends else 0,
        gradient_bytes=2 * numbers * width,
    )


def concatenate(numbers: int, width: int) -> Operator:
    """A copy of several tensors into one of ``numbers`` elements; backward needs none of them and hands out views."""
    return Operator(forward=(Kernel(0, 2 * numbers * width),), gradient_bytes=numbers * width)


def convolution(
    samples: int,
    side: int,
    inputs: int,
    outputs: int,
    width: int,
    *,
    kernel: int = 3,
    stride: int = 1,
    bias: bool = True,
) -> Operator:
    """A square convolution, padded so that [inputs, side, side] becomes [outputs, side / stride, side / stride].

    Its weight gradient is made with I, as the executor does it.
    """
    pixels, weight = samples * (side // stride) ** 2, kernel * kernel * inputs * outputs
    taken, given = samples * side * side * inputs * width, pixels * outputs * width
    product = Kernel(2 * pixels * weight, taken + given + weight * width, matrix=True)
    parameters = weight + (outputs if bias else 0)
    return Operator(
        parameters=parameters,
        forward=(product,),
        input_grad=(product, product, _accumulate(parameters, width)),
        saved_bytes=taken,
        gradient_bytes=taken + given,
        update_bytes=parameters * width,
    )


def batch_norm(samples: int, side: int, channels: int, width: int) -> Operator:
    """A norm of each channel over all samples and pixels; keeps its input and two float32 per channel."""
    numbers = samples * side * side * channels
    return Operator(
        parameters=2 * channels,
        forward=(Kernel(8 * numbers, 3 * numbers * width),),  # read for the statistics, and again to apply them
        input_grad=(Kernel(16 * numbers, 5 * numbers * width),),
        saved_bytes=numbers * width + _STATISTICS * channels,
        gradient_bytes=2 * numbers * width,
    )


def max_pool(samples: int, side: int, channels: int, width: int) -> Operator:
    """The largest around every second pixel of every second row; keeps its input and where they were, as int64."""
    taken = samples * side * side * channels
    given = taken // 4
    moved = (taken + given) * width + _INT64 * given
    return Operator(
        forward=(Kernel(taken, moved),),
        input_grad=(Kernel(given, moved),),
        saved_bytes=taken * width + _INT64 * given,
        gradient_bytes=(taken + given) * width,
    )


def average_pool(samples: int, side: int, channels: int, width: int) -> Operator:
    """The mean of each channel's pixels; keeps nothing."""
    taken, given = samples * side * side * channels, samples * channels
    kernel = Kernel(taken, (taken + given) * width)
    return Operator(forward=(kernel,), input_grad=(kernel,), gradient_bytes=(taken + given) * width)


def recurrent(
    samples: int,
    steps: int,
    inputs: int,
    cells: int,
    width: int,
    *,
    shards: int = 1,
    first: bool = False,
    state_inputs: int | None = None,
) -> Operator:
    """An LSTM layer over ``steps`` of each sample: one product for all inputs, one per step for the state.

    It keeps its input and, of every step, the state before it (output and cell), the four gates and the cell's
    hyperbolic tangent; the outputs are the next operator's input. All weight gradients are made with I. A share has
    ``cells / shards``, and the outputs of every step are gathered. The ``first`` layer gives no input gradient. A share
    that takes only part of the state takes ``state_inputs`` elements of it.
    """
    tokens, own = samples * steps, -(-cells // shards)
    taken = cells if state_inputs is None else state_inputs
    of_inputs = linear(tokens, inputs, 4 * own, width)
    of_state = linear(samples, taken, 4 * own, width, bias=False)
    numbers = samples * own
    gates = Kernel(30 * numbers, (2 * 4 + 3) * numbers * width)  # read and written, cells and tangent beside
    back = Kernel(30 * numbers, (3 * 4 + 5) * numbers * width)
    state_grad = linear(tokens, taken, 4 * own, width, bias=False).weight_grad
    gathered = Exchange("all_gather", samples * cells * width), Exchange("reduce_scatter", samples * cells * width)
    return Operator(
        parameters=of_inputs.parameters + of_state.parameters,
        forward=(*of_inputs.forward, *steps * (*of_state.forward, gates)),
        input_grad=(
            *steps * (back,),
            *(steps - 1) * of_state.input_grad,  # nothing is before the first state
            *(() if first else of_inputs.input_grad),
            *of_inputs.weight_grad,
            *state_grad,
        ),
        saved_bytes=(tokens * (inputs + taken) + 6 * tokens * own) * width,
        gradient_bytes=tokens * (inputs + taken + 4 * own) * width,
        update_bytes=max(of_inputs.parameters, of_state.parameters) * width,
        forward_exchanges=steps * gathered[:1] if shards > 1 else (),
        input_grad_exchanges=steps * gathered[1:] if shards > 1 else (),
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
        whole_parameters=(positions + types) * hidden,
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


def cost_row(
    operator: Operator,
    microbatch_size: int,
    device: DevicePreset,
    *,
    shards: int = 1,
    prices: Prices | None = None,
    where: str = "an operator",
) -> CostRow:
    """The operator's row for a profile, with the device's times. Backward is I and W one after the other.

    Exchanges take what ``prices`` say, by default what the device's own links allow; the operator is one of
    ``shards``.

    Raises:
        SumError: it comes to more than a profile may state; the text says ``where``.
    """
    price = prices or prices_of(device)
    exchanged = sum(price(each, shards) for each in operator.forward_exchanges)
    returned = sum(price(each, shards) for each in operator.input_grad_exchanges)
    input_grad = round(_time_ns(operator.input_grad, device) + returned)
    weight_grad = round(_time_ns(operator.weight_grad, device))
    row = {
        "microbatch_size": microbatch_size,
        "shards": shards,
        "forward_ns": round(_time_ns(operator.forward, device) + exchanged),
        "backward_ns": input_grad + weight_grad,
        "input_grad_ns": input_grad,
        "weight_grad_ns": weight_grad,
        "activation_bytes": operator.saved_bytes,
        "weight_grad_bytes": operator.deferred_bytes,
        "workspace_bytes": max(operator.gradient_bytes, operator.update_bytes),
    }
    require_row(where, row)
    return CostRow.model_validate(row)


def _accumulate(parameters: int, width: int) -> Kernel:
    return Kernel(parameters, 3 * parameters * width)


def _time_ns(kernels: Iterable[Kernel], device: DevicePreset) -> float:
    return sum(device.kernel_ns(each.flops, each.moved_bytes, matrix=each.matrix) for each in kernels)
