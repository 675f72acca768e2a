"""Devices: their speed by the maker's figures, and the work of blocks in kernels.

A preset has the maker's figures with their source, and the share of them that kernels reach, as curves over a kernel's
work. What a measured profile makes of them is in :mod:`pipeplan.costs.calibration`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from pydantic import ConfigDict, TypeAdapter

from pipeplan.catalog import names, read_table, require_known
from pipeplan.errors import UsageError, choose_from
from pipeplan.files import Cluster


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch: floating-point operations, bytes to and from memory, and whether matrix units do the work.

    ``weights`` is whether it is a product with weights, or of their gradient: what recipes with FP8 run so. Where it is
    known ``product`` says rows, inner size and columns of how many alike products, and ``form`` what is not a product
    of one or several matrices: fused attention, with its ``head_size``, products of groups of rows, of whose bytes
    ``expert_bytes`` are the groups' weights and their gradients, or rows of a table that are looked up or added to.
    """

    flops: int
    moved_bytes: int
    matrix: bool = False
    weights: bool = False
    product: tuple[int, int, int, int] | None = None
    form: Literal["", "attention", "attention_backward", "grouped", "rows"] = ""
    head_size: int = 0
    expert_bytes: int = 0


Kernels = Literal["fused", "eager"]
"""Those of an estimate: what is element-wise fused, or operator by operator."""


# Presets ------------------------------------------------------------------------------------------------------------

PRESETS = names("devices")
"""Every preset by name."""

Curve = tuple[tuple[int, float], ...]
"""Pairs of a kernel's work and the share of the peak it reaches, work ascending."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """What published runs reached on a device, of the peak of its ``matrix`` units and of the ``bandwidth`` of memory
    and links, fitted on a number of ``runs`` in different ``layouts``; ``source`` says which.
    """

    matrix: float
    bandwidth: float
    layouts: int
    runs: int
    source: str


@dataclass(frozen=True, slots=True)
class DevicePreset:
    """What a device can do at most. Sizes in bytes, decimal as its maker states them; rates per second.

    ``dtype`` is the 16-bit format of its matrix units, ``matrix_flops_per_s`` their peak in it without sparsity,
    ``fp8_flops_per_s`` that in FP8, None if they have none, ``float32_flops_per_s`` the peak of everything else.
    ``multiprocessors`` share a kernel's work among them. ``link_bytes_per_s`` is what its link to the devices of its
    machine carries each way. Of its memory plans leave ``reserve_bytes`` alone, for what ``reserve_source`` says.
    ``reported`` are the names that its driver gives it. ``matrix_efficiency`` is over the
    FLOPs of a matrix product, ``memory_efficiency`` over the bytes that a kernel moves.

    By the others people mean it: ``family`` (empty: never), ``forms`` it is built in, ``memory_kind`` where that sets
    it apart, and whether it is the ``usual`` one of several of its family and form.
    """

    name: str
    title: str
    memory_bytes: int
    bandwidth_bytes_per_s: int
    multiprocessors: int
    dtype: str
    matrix_flops_per_s: int
    float32_flops_per_s: int
    link_bytes_per_s: int
    matrix_efficiency: Curve
    memory_efficiency: Curve
    source: str
    efficiency_source: str
    reserve_bytes: int
    reserve_source: str
    reported: tuple[str, ...] = ()
    fp8_flops_per_s: int | None = None
    family: str = ""
    forms: tuple[str, ...] = ()
    memory_kind: str = ""
    usual: bool = False
    fitted: Fitted | None = None

    __pydantic_config__ = ConfigDict(extra="forbid")

    def kernel_ns(self, flops: int, moved_bytes: int, *, matrix: bool, fp8: bool = False) -> float:
        """Time of one kernel in ns: the slower of computing and moving, each at the share that its size reaches.

        With ``fp8`` matrix units compute in that format.

        Raises:
            UsageError: they do not have it.
        """
        if matrix:
            peak = self.fp8_peak() if fp8 else self.matrix_flops_per_s
            computing = _time_ns(flops, peak, self.matrix_efficiency)
        else:
            computing = 1e9 * flops / self.float32_flops_per_s
        return max(computing, _time_ns(moved_bytes, self.bandwidth_bytes_per_s, self.memory_efficiency))

    def fp8_peak(self) -> int:
        """FLOP/s of products in FP8. Raises UsageError where the device has none, or none that is known."""
        if self.fp8_flops_per_s is None:
            able = [each.name for each in map(device_preset, PRESETS) if each.fp8_flops_per_s is not None]
            raise UsageError(
                f"--device {self.name} has no FP8 peak, by which --precision fp8-mixed is estimated; choose one of "
                f"{', '.join(able)}, or --precision bf16-mixed"
            )
        return self.fp8_flops_per_s


def _time_ns(work: int, peak: int, curve: Curve) -> float:
    """Work at the share of the peak that the curve has for it; less than its first point takes as long as that."""
    most = max(work, curve[0][0])
    return 1e9 * most / (peak * _share(most, curve))


def _share(work: int, curve: Curve) -> float:
    """The curve at some work, interpolated in the logarithms of both; beyond its last point that one's share holds."""
    for (low, low_share), (high, high_share) in zip(curve, curve[1:], strict=False):
        if work < high:
            place = math.log(work / low) / math.log(high / low)
            return low_share * math.pow(high_share / low_share, place)
    return curve[-1][1]


@cache
def device_preset(name: str) -> DevicePreset:
    """The preset of this name.

    Raises:
        UsageError: there is none.
    """
    if name not in PRESETS:
        raise UsageError(f"--device {name!r} is not a preset; {choose_from(name, PRESETS)}")
    table = read_table("devices", name)
    require_known(table, DevicePreset, f"{name}.json")
    return _adapter().validate_python(table)


@cache
def _adapter() -> TypeAdapter[DevicePreset]:
    """What reads presets: it takes longer to make than one is read in, and whoever asks for a device reads all."""
    return TypeAdapter(DevicePreset)


def peak_flops_per_s(device: str, dtype: str) -> int | None:
    """The maker's peak for a number format, without sparsity, of a device as profiles name it; None if not known.

    Known only for formats of 8 and 16 bits: whether float32 products run as such or as TF32 is a setting, which
    profiles do not say. Matrix units that take bfloat16 are as fast in float16.
    """
    preset = preset_called(device)
    if preset is not None and dtype.startswith("float8"):
        return preset.fp8_flops_per_s
    return preset.matrix_flops_per_s if preset is not None and dtype in {preset.dtype, "float16"} else None


def preset_called(device: str) -> DevicePreset | None:
    """The preset that has this name, as drivers and profiles say it; None where none has, and for processors."""
    presets = map(device_preset, PRESETS)
    return next((each for each in presets if each.family and device in (each.name, each.title, *each.reported)), None)


_REMARK = re.compile(r"\([^()]*\)|\[[^\[\]]*\]")
_WORD = re.compile(r"[a-z]+\d+[a-z]*|\d+[a-z]*|[a-z]+")
_JOINED = re.compile(r"(sxm\d?|pcie|rtx|geforce)")
_GIGABYTES = re.compile(r"(\d+)gi?b")
_OTHERS = {"ti", "super", "laptop", "mobile", "max", "d"}
"""Words that make a card of the same number another one."""


def device_meant(text: str, memory_gb: float | None = None) -> DevicePreset | None:
    """The preset that free text means by its family and form; None for a family that has none.

    What stands in brackets is a remark, of which the kind of memory alone counts. ``A100-class (...)`` is the usual
    A100, ``V100 SXM2`` a V100, any H100 with HBM2e the one of 96 GB. Of several the one counts whose memory is nearest
    to ``memory_gb``, or to what the text says; where neither says, the usual one.
    """
    words = _WORD.findall(_JOINED.sub(r" \1 ", _REMARK.sub(" ", text).lower()))
    family = [each for each in map(device_preset, PRESETS) if each.family and each.family in words]
    if not family or (family[0].family.isdecimal() and _OTHERS & set(words)):
        return None
    kinds = set(_WORD.findall(text.lower()))
    found = [each for each in family if each.memory_kind in kinds]
    if not found:
        plain = [each for each in family if not each.memory_kind]
        found = [each for each in plain if set(each.forms) & set(words)] or plain
    stated = [int(size) for word in words if (size := "".join(_GIGABYTES.findall(word)))]
    gigabytes = memory_gb if memory_gb is not None else next(iter(stated), None)

    def unlike(preset: DevicePreset) -> tuple[float, bool]:
        missing = 0.0 if gigabytes is None else abs(preset.memory_bytes / 1e9 - gigabytes)
        return missing, not preset.usual

    return min(found, key=unlike)


def other_device(
    device: str, cluster: Cluster, num_devices: int | None = None, apart: Collection[str] = ()
) -> str | None:
    """What to say where times are of ``device``, as profiles name it, and a cluster has another; None where it has not.

    Of the cluster's first ``num_devices``, or of all. Names that mean no preset are not compared, nor kinds that have
    another speed, or are ``apart``, with a profile of their own.
    """
    if not device:
        return None
    kinds = cluster.devices if num_devices is None else cluster.first(min(num_devices, cluster.num_devices)).devices
    meant = {
        kind.name: device_meant(kind.name, kind.memory_bytes and kind.memory_bytes / 1e9)
        for kind in kinds
        if kind.speed == 1 and kind.name not in apart
    }
    own = device_meant(device)
    unlike = [name for name, preset in meant.items() if preset is not None and preset != own]
    if not unlike:
        return None
    return (
        f"times are those of {device}, the cluster has {' and '.join(unlike)}: its links and memory count, the times "
        "stay; profile the model for its devices"
    )


# Work ---------------------------------------------------------------------------------------------------------------

Phase = Literal["forward_ns", "input_grad_ns", "weight_grad_ns"]
PHASES: tuple[Phase, ...] = ("forward_ns", "input_grad_ns", "weight_grad_ns")

Core = Literal["selective_ns"]
CORE: Core = "selective_ns"

Work = Mapping[Phase | Core, Sequence[Kernel]]
"""The kernels of F, I and W of a block for one micro-batch, and of F those of its attention core, if it has one."""
