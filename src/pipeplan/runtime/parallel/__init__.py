"""What lets a module run in parts: deferred weight gradients, shares of blocks and parameters, autocast, clocks.

Here: mechanisms that know only torch modules, and a rank's share of a block, which needs no torch: plans are lowered
with it. Not here: plans, programs, process groups (executor).
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.workload.mesh import SHARDS, Mesh


@dataclass(frozen=True, slots=True, order=True)
class Share:
    """What a rank has of a block: all of it, or number ``index`` of as many shares as there are ``partners``.

    ``partners`` are the ranks that split the block, this one among them, in the order of their shares: they stand on
    a mesh of these ``axes``, names and sizes, where it is not only split in the usual way. ``places`` are those that
    have the same share and other positions of a sequence, in order, this one among them, ``context`` those that have it
    and other pieces of every sequence that the stage is given; they send keys and values around a ``ring``, or gather
    them. ``experts`` are those that share the block's experts, in order, if it has any: of these this one has number
    ``expert`` of equal parts, or of those again number ``expert_part`` where ``expert_parts`` have the same experts.
    """

    block: str
    index: int = 0
    partners: tuple[int, ...] = ()
    axes: tuple[tuple[str, int], ...] = ()
    places: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    expert: int = 0
    expert_parts: tuple[int, ...] = ()
    expert_part: int = 0
    ring: bool = False

    @property
    def count(self) -> int:
        """How many devices split the block."""
        return max(1, len(self.partners))

    @property
    def mesh(self) -> Mesh:
        """How the partners are arranged."""
        return Mesh(self.axes or ((SHARDS, self.count),))

    def along(self, axis: str) -> tuple[int, ...]:
        """The partners from which this rank differs along only one axis, in order."""
        return tuple(self.partners[place] for place in self.mesh.axis(axis).of(self.index))

    def __str__(self) -> str:
        way = f" {self.mesh}" if self.axes else ""
        parts = [f"{self.index}/{self.count}{way}"] if self.partners else []
        within = f", part {self.expert_part}/{len(self.expert_parts)}" if self.expert_parts else ""
        parts += [f"experts {self.expert}/{len(self.experts)}{within}"] if self.experts else []
        return f"{self.block}[{', '.join(parts)}]" if parts else self.block
