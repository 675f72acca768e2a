"""Stages that run all of their blocks in one way: what every run of blocks costs with each of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipeplan.costs import group_costs
from pipeplan.costs.collectives import all_reduce_time
from pipeplan.errors import UsageError
from pipeplan.model import Cluster, Profile
from pipeplan.partition.chain_costs import ChainCosts, FloatArray, over_all

__all__ = ["UniformRuns", "UniformWay", "UniformWays"]


@dataclass(frozen=True, slots=True)
class UniformWay:
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
    """What a way costs for every run of blocks, with a share of the gradients' all-reduce in each micro-batch.

    ``time`` [begin, end] in ns is infinite where there is no run.
    """

    way: UniformWay
    costs: ChainCosts
    time: FloatArray


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
                        yield self._runs(UniformWay(group // split, split, again))
                    except UsageError:  # this size was not profiled with so many shards
                        continue

    def _runs(self, way: UniformWay) -> UniformRuns:
        size = self.microbatch_size // way.replicas
        alone = [[block] for block in self.order]
        given = group_costs(self.profile, alone, size, way.shards, recompute=way.recompute)
        peers = range(0, way.num_devices, way.shards)
        added_up = [all_reduce_time(self.cluster, peers, cost.parameter_bytes) for cost in given]
        shares = [-(-each // self.num_microbatches) for each in added_up]
        each = zip(given, shares, strict=True)
        costs = ChainCosts.of([replace(cost, backward_ns=cost.backward_ns + share) for cost, share in each])
        return UniformRuns(way, costs, over_all(len(given), costs.time, math.inf))
