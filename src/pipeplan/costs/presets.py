"""Devices as data: what each can compute and move per second, and how near to that a kernel of some size comes.

The figures of a device are its maker's, one file each in ``devices/``, with the source. How much of them a kernel gets
is an assumption, the same for all devices: see :data:`MATRIX_CEILING` and the constants after it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from pipeplan.errors import UsageError

__all__ = ["PRESETS", "DevicePreset", "device_preset"]

PRESETS = (
    "v100-16gb",
    "v100-32gb",
    "a100-40gb",
    "a100-80gb",
    "a800-80gb",
    "h100-80gb",
    "h200-141gb",
    "rtx3090-24gb",
)
"""Every preset by name."""

MATRIX_CEILING = 0.7
"""Share of the peak that a very large matrix product reaches. Assumed."""

BANDWIDTH_CEILING = 0.85
"""Share of the memory bandwidth that a very large kernel reaches. Assumed."""

RAMP_NS = 5_000
"""A kernel with as much work as takes this long at the ceiling runs at half of it. Assumed; includes the launch."""


@dataclass(frozen=True, slots=True)
class DevicePreset:
    """What a device can do at most. Sizes in bytes, decimal as its maker states them; rates per second.

    ``dtype`` is the 16-bit format of its matrix units, ``matrix_flops_per_s`` their peak in it without sparsity,
    ``float32_flops_per_s`` the peak of everything else. ``link_bytes_per_s`` is what its link to the devices of its
    machine carries each way.
    """

    name: str
    title: str
    memory_bytes: int
    bandwidth_bytes_per_s: int
    dtype: str
    matrix_flops_per_s: int
    float32_flops_per_s: int
    link_bytes_per_s: int
    source: str

    def kernel_ns(self, flops: int, moved_bytes: int, *, matrix: bool) -> float:
        """Time of one kernel in ns: the roofline with an efficiency that grows with the kernel's size.

        The slower of computing and moving, each at its ceiling, plus ``RAMP_NS``: so the efficiency is the ceiling
        times t / (t + ramp) for a kernel that would take t at the ceiling.
        """
        rate = MATRIX_CEILING * self.matrix_flops_per_s if matrix else float(self.float32_flops_per_s)
        moving = moved_bytes / (BANDWIDTH_CEILING * self.bandwidth_bytes_per_s)
        return 1e9 * max(flops / rate, moving) + RAMP_NS


@cache
def device_preset(name: str) -> DevicePreset:
    """The preset of this name.

    Raises:
        UsageError: there is none.
    """
    if name not in PRESETS:
        raise UsageError(f"--device {name!r} is not a preset; choose from {', '.join(PRESETS)}")
    text = files("pipeplan.costs").joinpath("devices", f"{name}.json").read_text(encoding="utf-8")
    return DevicePreset(**json.loads(text))
