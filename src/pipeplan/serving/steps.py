"""What a decode step takes on each device: kernels, collectives, and the work of the host that keeps the block table.

One layer is a decoder's as Llama has it; a model is so many of them. Dense products read all weights whatever the
batch is, and attention reads the cache; both take what estimated profiles say of such kernels, attention longer where a
device has few tokens of a request, or few heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pipeplan.catalog import read_table
from pipeplan.costs.cache_volumes import AttentionShape, Kept, step_volume
from pipeplan.costs.devices import DevicePreset, Kernel
from pipeplan.costs.operators import Operator, activation, add, linear, norm, sequence_of
from pipeplan.costs.uniform.shares import shares_reached
from pipeplan.costs.uniform.traced import FusedRates, of_few_rows
from pipeplan.errors import InfeasibleError
from pipeplan.serving.paged_cache import blocks_of
from pipeplan.units import format_bytes

Table = tuple[tuple[int, float], ...]
"""Pairs of a size and the share of full speed there, sizes ascending."""


@dataclass(frozen=True, slots=True)
class EngineConstants:
    """What an engine takes beside kernels: as in ``catalog/serving``, where each has its source.

    Nobody is let in where less than the ``watermark``, a share of all blocks, would stay free. ``table_ns`` and
    ``table_bytes`` are for an entry of the block table, which every step makes anew and copies; ``attention`` is by
    cached tokens of a request on the device, ``heads`` by heads of a device of 32.
    """

    block_tokens: int
    watermark: float
    table_ns: float
    table_bytes: int
    host_bytes_per_s: float
    links_bytes_per_s: float
    step_ns: float
    launch_ns: float
    attention: Table
    heads: Table


def engine_constants(name: str = "vllm") -> EngineConstants:
    """Those of an engine in the catalog."""
    table = read_table("serving", name)
    known = {each.name: table[each.name] for each in fields(EngineConstants)}
    for each in ("attention", "heads"):
        known[each] = tuple((size, share) for size, share in known[each])
    return EngineConstants(**known)


@dataclass(frozen=True, slots=True)
class ServedLayer:
    """A decoder layer with a gated feed-forward, ``width`` bytes a number, and how many ``layers`` the model has.

    ``beside_bytes`` are weights outside of the layers: the table of tokens and the head.
    """

    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    layers: int = 1
    width: int = 2
    beside_bytes: int = 0

    @property
    def shape(self) -> AttentionShape:
        """Its attention."""
        return AttentionShape.of(self.hidden, self.heads, self.kv_heads)

    @property
    def weight_bytes(self) -> int:
        """Of all layers and what is beside them."""
        shape, hidden = self.shape, self.hidden
        numbers = hidden * (2 * shape.queries + 2 * shape.keys + 3 * self.feed_forward + 2)
        return self.layers * numbers * self.width + self.beside_bytes

    @property
    def cached_bytes(self) -> int:
        """Of a token in all layers, on all devices together that split it."""
        return self.layers * 2 * self.shape.keys * self.width

    def dense(self, requests: int, shards: int) -> Operator:
        """All but the attention core of one layer, for a token of each request, of a device's share."""
        shape, hidden, width = self.shape, self.hidden, self.width
        inner = self.feed_forward // shards
        return sequence_of(
            norm(requests, hidden, width, bias=False),
            linear(requests, hidden, (shape.queries + 2 * shape.keys) // shards, width, bias=False),
            linear(requests, shape.queries // shards, hidden, width, bias=False),
            add(requests * hidden, width),
            norm(requests, hidden, width, bias=False),
            linear(requests, hidden, 2 * inner, width, bias=False),
            activation(requests * inner, width, gated=True),
            linear(requests, inner, hidden, width, bias=False),
            add(requests * hidden, width),
        )


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """Ns of a step on a device: kernels, collectives, and the host's work before them."""

    compute_ns: float = 0.0
    communication_ns: float = 0.0
    host_ns: float = 0.0

    @property
    def total_ns(self) -> float:
        """One after another, as an engine without overlap runs them."""
        return self.compute_ns + self.communication_ns + self.host_ns

    def __add__(self, other: DecodeTime) -> DecodeTime:
        return DecodeTime(
            self.compute_ns + other.compute_ns,
            self.communication_ns + other.communication_ns,
            self.host_ns + other.host_ns,
        )

    def times(self, count: float) -> DecodeTime:
        """So many of them."""
        return DecodeTime(self.compute_ns * count, self.communication_ns * count, self.host_ns * count)


class StepWork(NamedTuple):
    """What a step does, whatever an engine's constants are; arrays of these numbers are of that many steps.

    Ns of all but attention, and of attention at full speed, in all layers; bytes sent, sends one after another and
    collectives; cached tokens of a request on the device, and entries of the block table.
    """

    dense_ns: float
    sent_bytes: float
    sends: float
    collectives: float
    full_ns: float
    tokens: float
    entries: float


@dataclass(frozen=True)
class StepCosts:
    """A model on ``devices`` that share its decode steps as ``kept`` says; of ``dp`` each is an engine of its own."""

    kept: Kept
    layer: ServedLayer
    devices: int
    device: DevicePreset
    constants: EngineConstants
    _known: dict[int, tuple[float, float, int, int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def rates(self) -> FusedRates:
        """How long the device takes for kernels, as in estimated profiles."""
        return FusedRates.of(self.device, shares_reached(self.device))

    @property
    def shards(self) -> int:
        """Devices that split heads and weights."""
        return self.devices if self.kept == "tp" else 1

    @property
    def pieces(self) -> int:
        """Devices that each have a piece of every request's cache."""
        return self.devices if self.kept in ("cp", "cp-q") else 1

    @property
    def cache_bytes(self) -> int:
        """Bytes for the cache on each device: what weights and the reserve leave.

        Raises:
            InfeasibleError: weights leave nothing.
        """
        weights = self.layer.weight_bytes // self.shards
        left = self.device.memory_bytes - self.device.reserve_bytes - weights
        if left <= 0:
            raise InfeasibleError(
                f"weights of {format_bytes(weights)} leave no memory for a cache on {self.device.title}; split them "
                "over more devices (tp), or give devices with more memory"
            )
        return left

    @property
    def token_bytes(self) -> int:
        """Of a cached token, on a device that has it."""
        return self.layer.cached_bytes // self.shards

    def step(self, lengths: Sequence[int]) -> DecodeTime:
        """The time in which each of these requests, with so many tokens so far, writes another.

        They are all requests, but of ``dp``, where they are those of one device.
        """
        return self.time(self.work(len(lengths), max(lengths), sum(lengths)))

    def work(self, requests: int, longest: int, total: int) -> StepWork:
        """A step of so many requests, of which the longest and all together have so many tokens so far."""
        if requests not in self._known:
            volume = step_volume(self.kept, self.layer.shape, requests, self.devices)
            self._known[requests] = (
                self._dense_ns(-(-requests // self.pieces)),
                self.layer.layers * volume.bytes(self.layer.width),
                self.layer.layers * volume.steps,
                self.layer.layers * volume.collectives,
            )
        tokens = -(-total // self.pieces)
        # padded to the longest
        entries = requests * blocks_of(longest, self.pieces, self.constants.block_tokens)
        return StepWork(*self._known[requests], self._full_ns(tokens), tokens / requests, entries)

    def time(self, work: StepWork) -> DecodeTime:
        """What that takes with this engine's constants; of arrays, every step of them."""
        constants, heads = self.constants, self.layer.heads
        reached = share_at(constants.attention, work.tokens)
        reached *= share_at(constants.heads, 32 * heads // self.shards // heads)
        waiting = work.sends * constants.step_ns + work.collectives * constants.launch_ns
        entry = constants.table_ns + 1e9 * constants.table_bytes / constants.host_bytes_per_s
        carried = self.rates.machine.bandwidth_share * constants.links_bytes_per_s
        return DecodeTime(
            work.dense_ns + work.full_ns / reached,
            1e9 * work.sent_bytes / carried + waiting,
            work.entries * entry,
        )

    def moved_ns(self, tokens: int) -> float:
        """Ns to move a request's cache to host memory, or back; each device moves what it has."""
        held = -(-tokens // self.pieces) * self.token_bytes
        return 1e9 * held / self.constants.host_bytes_per_s

    def _dense_ns(self, requests: int) -> float:
        kernels = self.layer.dense(requests, self.shards).forward
        return self.layer.layers * sum(self.rates.kernel_ns(of_few_rows(each)) for each in kernels)

    def _full_ns(self, tokens: int) -> float:
        shape, width = self.layer.shape, self.layer.width
        read = 2 * tokens * shape.keys // self.shards * width
        flops = 4 * tokens * shape.queries // self.shards
        size = shape.queries // shape.heads
        core = Kernel(flops, read, matrix=True, form="attention", head_size=size)
        return self.layer.layers * self.rates.kernel_ns(core)


def share_at(table: Table, size: float) -> float:
    """The share of full speed at a size, between two of the table on a line in the logarithm of size."""
    sizes, shares = zip(*table, strict=True)
    found: float = np.interp(np.log(size), np.log(sizes), shares)
    return found
