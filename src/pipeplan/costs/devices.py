"""Devices: their speed by the maker's figures, and by rates fitted to measured blocks.

A preset has the maker's figures with their source, and the share of them that kernels reach, as curves over a kernel's
work.

A calibration has three rates that all blocks share: time per FLOP of matrix products, per byte moved by other kernels,
and per kernel, none negative, by least squares of relative errors. Then how far each block is from them, as a factor:
of the very block where it was measured, else of its kind of operator, else 1.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from pydantic import ConfigDict, TypeAdapter

from pipeplan.catalog import names, read_table, require_known
from pipeplan.errors import UsageError, choose_from
from pipeplan.files import Block, Cluster, CostRow, Profile


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch: floating-point operations, bytes to and from memory, and whether matrix units do the work.

    ``weights`` is whether it is a product with weights, or of their gradient: what recipes with FP8 run so. Where it is
    known ``product`` says rows, inner size and columns of how many alike products, and ``form`` what is not a product
    of one or several matrices: fused attention, with its ``head_size``, or products of groups of rows, of whose bytes
    ``expert_bytes`` are the groups' weights and their gradients.
    """

    flops: int
    moved_bytes: int
    matrix: bool = False
    weights: bool = False
    product: tuple[int, int, int, int] | None = None
    form: Literal["", "attention", "attention_backward", "grouped"] = ""
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
    return TypeAdapter(DevicePreset).validate_python(table)


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


# Calibration --------------------------------------------------------------------------------------------------------

Phase = Literal["forward_ns", "input_grad_ns", "weight_grad_ns"]
PHASES: tuple[Phase, ...] = ("forward_ns", "input_grad_ns", "weight_grad_ns")

Core = Literal["selective_ns"]
CORE: Core = "selective_ns"

Work = Mapping[Phase | Core, Sequence[Kernel]]
"""The kernels of F, I and W of a block for one micro-batch, and of F those of its attention core, if it has one."""

Likeness = tuple[str, tuple[tuple[str, int], ...], tuple[int, int, int]]
"""Operator, dimensions and parameters: equal for blocks that cost the same."""

_SWEEPS = 500


def likeness(block: Block) -> Likeness:
    """What a block has in common with those that cost the same."""
    counted = block.parameters + block.frozen_parameters > 0
    parameters = block.parameters, block.frozen_parameters, 0 if counted else block.parameter_bytes
    return block.operator, tuple(sorted(block.dimensions.items())), parameters


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """ns per FLOP of matrix kernels, per byte that others move, and per kernel."""

    flop_ns: float
    byte_ns: float
    kernel_ns: float

    def time_ns(self, kernels: Iterable[Kernel]) -> float:
        """The time of kernels that run one after another."""
        flops, moved, count = _features(kernels)
        return flops * self.flop_ns + moved * self.byte_ns + count * self.kernel_ns


def _features(kernels: Iterable[Kernel]) -> tuple[int, int, int]:
    flops = moved = count = 0
    for kernel in kernels:
        count += 1
        flops += kernel.flops if kernel.matrix else 0
        moved += 0 if kernel.matrix else kernel.moved_bytes
    return flops, moved, count


def fit_rates(samples: Sequence[tuple[Sequence[Kernel], int]]) -> DeviceRates:
    """The rates nearest to measured times in ns, by squares of relative errors; none is negative.

    Raises:
        UsageError: no sample takes time.
    """
    rows = [tuple(each / ns for each in _features(kernels)) for kernels, ns in samples if ns > 0 and kernels]
    if not rows:
        raise UsageError("the calibration has no times to fit to; measure at least one block of the model")
    scale = [max(max(column), 1e-30) for column in zip(*rows, strict=True)]
    scaled = [[value / unit for value, unit in zip(row, scale, strict=True)] for row in rows]
    found = [0.0, 0.0, 0.0]
    for _ in range(_SWEEPS):  # one unknown after the other, none below 0: converges, since the problem is convex
        for index in range(3):
            rest = [1 - sum(x * row[j] for j, x in enumerate(found) if j != index) for row in scaled]
            own = [row[index] for row in scaled]
            square = sum(value * value for value in own)
            found[index] = max(0.0, sum(a * b for a, b in zip(own, rest, strict=True)) / square) if square else 0.0
    return DeviceRates(*(value / unit for value, unit in zip(found, scale, strict=True)))


@dataclass(frozen=True, slots=True)
class KnownRow:
    """A measured row of a block, and the work that took its times."""

    block: Block
    row: CostRow
    work: Work


@dataclass(frozen=True, slots=True)
class Calibration:
    """What turns work into times.

    ``blocks`` [likeness, phase] and ``operators`` [operator, phase] are factors on the rates' times, the former by
    micro-batch size; ``together`` [operator] is B over I and W. ``error`` is the median of how far the bare rates are
    from the measured times.
    """

    rates: DeviceRates
    blocks: Mapping[tuple[Likeness, Phase], Mapping[int, float]]
    operators: Mapping[tuple[str, Phase], float]
    together: Mapping[str, float]
    error: float

    def row(self, block: Block, row: CostRow, work: Work) -> CostRow:
        """An estimated row with the times that the measurement makes likely."""
        times: dict[str, int] = {
            phase: round(self.time_ns(block, phase, row.microbatch_size, work[phase])) for phase in PHASES
        }
        if CORE in work:
            times[CORE] = round(self.time_ns(block, "forward_ns", row.microbatch_size, work[CORE]))
        backward = (times["input_grad_ns"] + times["weight_grad_ns"]) * self.together.get(block.operator, 1.0)
        return row.model_copy(update={**times, "backward_ns": round(backward)})

    def time_ns(self, block: Block, phase: Phase, size: int, kernels: Sequence[Kernel]) -> float:
        """Time of one phase; the factor is that of the nearest measured size."""
        usual = self.operators.get((block.operator, phase), 1.0)
        by_size = self.blocks.get((likeness(block), phase), {})
        nearest = min(by_size, key=lambda known: abs(math.log(known / size)), default=0)
        return self.rates.time_ns(kernels) * by_size.get(nearest, usual)


def calibrate(known: Sequence[KnownRow]) -> Calibration:
    """Fit rates and factors to measured rows.

    Raises:
        UsageError: nothing is known.
    """
    samples = [
        (each, phase, ns) for each in known for phase in PHASES if (ns := getattr(each.row, phase)) and each.work[phase]
    ]
    rates = fit_rates([(each.work[phase], ns) for each, phase, ns in samples])
    blocks: dict[tuple[Likeness, Phase], dict[int, float]] = defaultdict(dict)
    operators: dict[tuple[str, Phase], list[float]] = defaultdict(list)
    for each, phase, ns in samples:
        factor = ns / max(rates.time_ns(each.work[phase]), 1e-9)
        blocks[likeness(each.block), phase][each.row.microbatch_size] = factor
        operators[each.block.operator, phase].append(factor)
    together: dict[str, list[float]] = defaultdict(list)
    for each in known:
        apart = (each.row.input_grad_ns or 0) + (each.row.weight_grad_ns or 0)
        if each.row.backward_ns and apart:
            together[each.block.operator].append(each.row.backward_ns / apart)
    return Calibration(
        rates,
        blocks,
        {key: statistics.geometric_mean(values) for key, values in operators.items()},
        {key: statistics.geometric_mean(values) for key, values in together.items()},
        statistics.median(abs(1 / factor - 1) for values in operators.values() for factor in values),
    )


def measured_rows(profile: Profile) -> list[tuple[Block, CostRow]]:
    """A row for each likeness and micro-batch size of unsplit blocks that keep their activations."""
    found: dict[tuple[Likeness, int], tuple[Block, CostRow]] = {}
    for block in profile.blocks:
        for row in block.rows():
            if row.shards == 1 and not row.recompute and row.configuration is None:
                found.setdefault((likeness(block), row.microbatch_size), (block, row))
    return list(found.values())
