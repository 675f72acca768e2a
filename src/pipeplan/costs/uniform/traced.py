"""Kernels that were traced, at the closed forms' rates: what published runs were predicted with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeplan.costs.devices import DevicePreset, Kernel
from pipeplan.costs.uniform.choices import choices
from pipeplan.costs.uniform.layer import attention_ns, product_ns
from pipeplan.costs.uniform.shares import Shares, machine_of, reaching, usual_attention
from pipeplan.costs.uniform.words import Machine


def of_few_rows(kernel: Kernel) -> Kernel:
    """A product of fewer rows than the lowest tile of training's kernels, as those made for decoding compute it.

    They have lower tiles, down to the rows that matrix units take at once, and keep all multiprocessors busy by cutting
    the inner dimension; so that they take as long as their work at the share of the peak that it reaches, or as reading
    the weights.
    """
    if kernel.product is None or kernel.product[0] >= min(height for height, *_ in choices().tiles):
        return kernel
    rows, padded = kernel.product[0], -(-kernel.product[0] // _MATRIX_ROWS) * _MATRIX_ROWS
    return replace(kernel, product=None, flops=kernel.flops * padded // rows)


_MATRIX_ROWS = 16
"""Rows that an instruction of matrix units takes at once (m16n8k16 of NVIDIA's PTX)."""


@dataclass(frozen=True, slots=True)
class FusedRates:
    """How long a device takes for kernels. ``device`` has curves that end at the shares that ``machine`` reaches."""

    device: DevicePreset
    machine: Machine

    @classmethod
    def of(cls, device: DevicePreset, shares: Shares, attention: str | None = None) -> FusedRates:
        """The rates of a device that reaches these shares, with a kernel of attention: by default the usual one."""
        link = device.link_bytes_per_s
        alone = {"node": 1, "link_bytes_per_s": link, "adapter_bytes_per_s": link}
        return cls(reaching(device, shares), machine_of(device, shares, attention or usual_attention(device), **alone))

    def kernel_ns(self, kernel: Kernel, *, fp8: bool = False) -> float:
        """One kernel: a product in waves of tiles, attention at its own share of the peak, no quicker than its bytes.

        Raises UsageError where the device has no FP8.
        """
        moving = self.device.kernel_ns(0, kernel.moved_bytes, matrix=False)
        peak = self.device.fp8_peak() if fp8 else self.machine.matrix_flops_per_s
        slower = choices().grouped if kernel.form == "grouped" else 1.0
        if kernel.product is not None:
            rows, inner, columns, copies = kernel.product
            return max(moving, float(product_ns(self.machine, peak * slower, rows, inner, columns, copies)))
        if kernel.form.startswith("attention"):
            backward = kernel.form == "attention_backward"
            return max(
                moving, float(attention_ns(self.machine, peak, kernel.flops, kernel.head_size, backward=backward))
            )
        return self.device.kernel_ns(round(kernel.flops / slower), kernel.moved_bytes, matrix=kernel.matrix, fp8=fp8)
