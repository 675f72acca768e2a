"""Weights of 8 and 4 bits, and caches of 8, as estimates of inference have them.

A kernel that multiplies by such weights reads fewer bytes, and computes in the 16-bit format, to which it converts them
on the way (as LLM inference kernels for GPTQ and AWQ do); only in ``fp8`` products run in the format of the weights,
where a device has it. Embedding and head stay as they are, as in what is published in these formats, and so do norms
and biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pipeplan.costs.blocks import NEVER_AGAIN
from pipeplan.costs.devices import Kernel

Weights = Literal["int8", "int4", "fp8"]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a weight is kept: ``bits`` a number, and ``scale_bytes`` for every ``group`` of them along its inputs.

    Without a ``group`` a whole column has one scale. ``products``: they run in this format where a device can.
    """

    title: str
    bits: int
    scale_bytes: int
    group: int | None = None
    products: bool = False

    def bytes_of(self, numbers: int, inputs: int) -> int:
        """Bytes of a weight of so many numbers, whose columns have ``inputs`` of them each."""
        scales = -(-numbers // min(self.group or inputs, inputs))
        return -(-numbers * self.bits // 8) + scales * self.scale_bytes


WEIGHTS: Mapping[Weights, WeightFormat] = {
    "int8": WeightFormat("8-bit integers with a 16-bit scale for each output", 8, 2),
    "int4": WeightFormat("4-bit integers with a 16-bit scale for every 128 (GPTQ, AWQ)", 4, 2, group=128),
    "fp8": WeightFormat("FP8 with a float32 scale for each output", 8, 4, products=True),
}


def is_quantized(operator: str) -> bool:
    """Whether the weights of blocks of this kind are kept in fewer bits."""
    return operator not in NEVER_AGAIN


def with_weights(kernel: Kernel, weights: WeightFormat, width: int) -> Kernel:
    """The kernel if what it multiplies by, of ``width`` bytes a number, is kept so."""
    if kernel.product is None or not (kernel.weights or kernel.expert_bytes):
        return kernel
    _, inputs, columns, _ = kernel.product
    whole = kernel.expert_bytes or inputs * columns * width
    kept = weights.bytes_of(whole // width, inputs)
    return replace(
        kernel,
        moved_bytes=max(0, kernel.moved_bytes - whole + kept),
        expert_bytes=kept if kernel.expert_bytes else 0,
    )


CACHES: Mapping[str, int] = {"fp8": 1}
"""Bytes of a number of the cache, by what vLLM, SGLang and TensorRT-LLM call its format; a scale or two a layer."""
