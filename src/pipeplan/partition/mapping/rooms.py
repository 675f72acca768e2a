"""Which devices have the memory that groups need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.errors import InfeasibleError
from pipeplan.model import Cluster

__all__ = ["Rooms"]


@dataclass(frozen=True, slots=True)
class Rooms:
    """Sizes and needs of groups, and the memory of each device."""

    groups: tuple[int, ...]
    needs: tuple[int, ...]
    memory: tuple[float, ...]

    @staticmethod
    def of(groups: Sequence[int], needs: Sequence[int], cluster: Cluster) -> Rooms:
        """Whoever needs most chooses first: others may take what it leaves, so nobody can choose wrongly."""
        memory = tuple(math.inf if size is None else size for size in cluster.memory_bytes)
        if sum(groups) > len(memory):
            raise InfeasibleError(
                f"{len(groups)} groups take {sum(groups)} devices together, but cluster {cluster.name!r} has "
                f"{len(memory)}; add devices, or take fewer in each group"
            )
        largest, taken = sorted(memory, reverse=True), 0
        for group in sorted(range(len(groups)), key=lambda group: -needs[group]):
            taken += groups[group]
            if largest[taken - 1] < needs[group]:
                raise InfeasibleError(_shortage(group, groups, needs, largest, taken))
        return Rooms(tuple(groups), tuple(needs), memory)

    def fits(self, group: int, device: int) -> bool:
        """Whether a device has the memory that a group, or none (-1), needs."""
        return group < 0 or self.needs[group] <= self.memory[device]


def _shortage(group: int, groups: Sequence[int], needs: Sequence[int], largest: Sequence[float], taken: int) -> str:
    enough = sum(size >= needs[group] for size in largest)
    return (
        f"group {group} needs {needs[group]:,} bytes on each of its {groups[group]} devices; groups that need as much "
        f"or more take {taken} devices together, but only {enough} have so much memory, and the next has "
        f"{largest[taken - 1]:,.0f} bytes: {needs[group] - largest[taken - 1]:,.0f} are missing. Split the stage over "
        f"more devices or blocks, recompute activations, or take smaller micro-batches"
    )
