"""Stages that run all of their blocks in one way: what every run of blocks costs with each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipeplan.costs import group_costs
from pipeplan.costs.collectives import all_reduce_time
from pipeplan.errors import UsageError
from pipeplan.model import Cluster, Profile
from pipeplan.partition.runs import FloatArray, largest, none_empty, sums

__all__ = ["UniformRuns", "UniformWays", "Way"]


@dataclass(frozen=True, slots=True)
class Way:
    """How a device group runs all of its blocks."""

    replicas: int
    shards: int
    recompute: bool

    @property
    def num_devices(self) -> int:
        """Devices of the group."""
        return self.replicas * self.shards


@dataclass(frozen=True, slots=True)
class UniformRuns:
    """What a way costs for every run of blocks i..j-1: arrays [n + 1, n + 1], bytes per device and ns."""

    way: Way
    time: FloatArray
    static: FloatArray
    held: FloatArray
    workspace: FloatArray

    def memory(self, in_flight: int) -> FloatArray:
        """Bytes with so many micro-batches in flight."""
        return self.static + in_flight * self.held + self.workspace


@dataclass(frozen=True, slots=True)
class UniformWays:
    """What every run of blocks takes where all blocks run in one way."""

    profile: Profile
    order: tuple[str, ...]
    microbatch_size: int
    num_microbatches: int
    cluster: Cluster | None

    def possible(self, group: int, recompute: Sequence[bool]) -> Iterator[UniformRuns]:
        """Every way of a group that all blocks have costs for."""
        for split in sorted(set.intersection(*({row.shards for row in block.costs} for block in self.profile.blocks))):
            if group % split == 0 and self.microbatch_size % (group // split) == 0:
                for again in recompute:
                    try:
                        yield self._runs(Way(group // split, split, again))
                    except UsageError:  # this size was not profiled with so many shards
                        continue

    def _runs(self, way: Way) -> UniformRuns:
        size = self.microbatch_size // way.replicas
        alone = [[block] for block in self.order]
        given = group_costs(self.profile, alone, size, way.shards, recompute=way.recompute)
        peers = range(0, way.num_devices, way.shards)
        added_up = [all_reduce_time(self.cluster, peers, cost.parameter_bytes) for cost in given]
        shares = [-(-each // self.num_microbatches) for each in added_up]
        times = [cost.forward_ns + cost.backward_ns + share for cost, share in zip(given, shares, strict=True)]
        return UniformRuns(
            way,
            time=np.where(none_empty(len(given)), sums(times), np.inf),
            static=sums([2 * cost.parameter_bytes + cost.optimizer_bytes for cost in given]),
            held=sums([cost.activation_bytes for cost in given]),
            workspace=largest([cost.workspace_bytes for cost in given]),
        )
