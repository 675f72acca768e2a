"""Whose requests, and which words of their caches, each device of a stage has: by the configuration of every block.

Devices are the digits of a number along the axes ``samples``, ``cache`` (or ``cacheq``, where queries alone are
gathered), ``experts`` and ``shards``, the last fastest. Each along all but the last has its own requests; those along
``cache`` have pieces of the caches of all their requests, those along ``experts`` some of the block's experts, to which
they send each other their words, and those along ``shards`` a part of the block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from pipeplan.errors import UsageError
from pipeplan.files.placement import PlacedStage
from pipeplan.workload.elements import Stage
from pipeplan.workload.mesh import CACHE, CACHE_BY_QUERIES, COPIES, EXPERTS, SAMPLES, SHARDS, Mesh, MeshAxis

_KNOWN = (SAMPLES, CACHE, CACHE_BY_QUERIES, EXPERTS, SHARDS, COPIES)


Placed = PlacedStage | Stage
"""A stage as a placement or a plan has it."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How the devices of a stage stand for a block."""

    mesh: Mesh

    @classmethod
    def of(cls, stage: Placed, number: int) -> BlockLayout:
        """That of block ``number`` of a stage. Raises UsageError where it is none of decoding."""
        if not stage.configurations:
            return cls(Mesh(((SAMPLES, stage.replicas), (SHARDS, stage.shards))))
        text = stage.configurations[number]
        mesh = Mesh.parse(text)
        if mesh.size_of(EXPERTS) > 1 and {name for name, size in mesh.axes if size > 1} - {SAMPLES, EXPERTS}:
            raise UsageError(
                f"configuration {text!r} has experts on several devices and splits the block, too, which no run of "
                "decode steps does; share its requests alone, as in samples2-experts2"
            )
        if unknown := [name for name, _ in mesh.axes if name not in _KNOWN]:
            raise UsageError(f"configuration {text!r} splits by {unknown[0]!r}, which no decode step does")
        return cls(Mesh((*mesh.axes, *(((SAMPLES, stage.replicas),) if stage.replicas > 1 else ()))))

    @property
    def pieces(self) -> MeshAxis:
        """Along which devices have pieces of caches."""
        return _pieces(self.mesh)

    @property
    def by_queries(self) -> bool:
        """Whether new keys and values go to those that keep them alone."""
        return self.mesh.size_of(CACHE_BY_QUERIES) > 1

    @property
    def owners(self) -> int:
        """How many devices have requests of their own."""
        return self.mesh.size_of(SAMPLES) * self.pieces.size * self.mesh.size_of(EXPERTS)

    def slots(self, device: int, total: int) -> range:
        """The places, of ``total``, of a device's own requests."""
        owner = self.mesh.axis(SAMPLES).place(device) * self.pieces.size + self.pieces.place(device)
        owner = owner * self.mesh.size_of(EXPERTS) + self.mesh.axis(EXPERTS).place(device)
        return range(owner * total // self.owners, (owner + 1) * total // self.owners)

    def line(self, device: int) -> tuple[int, ...]:
        """The devices that have the pieces of this one's caches, in order."""
        return self.pieces.of(device)

    def cached(self, device: int, total: int) -> range:
        """The places of the requests of which a device has a piece of the cache, or all of it."""
        line = self.line(device)
        return range(self.slots(line[0], total).start, self.slots(line[-1], total).stop)

    def shards(self, device: int) -> tuple[int, ...]:
        """The devices among which the block is split, of those that have this one's requests."""
        return self.mesh.axis(SHARDS).of(device)

    def experts(self, device: int) -> tuple[int, ...]:
        """The devices that share the block's experts with this one, in the order of these."""
        return self.mesh.axis(EXPERTS).of(device)


@cache
def _pieces(mesh: Mesh) -> MeshAxis:
    """Asked for again and again in every step."""
    return mesh.axis(CACHE_BY_QUERIES if mesh.size_of(CACHE_BY_QUERIES) > 1 else CACHE)


class Route(NamedTuple):
    """Rows ``begin`` to ``end`` of a pass go from one device to another, by their numbers."""

    source: int
    target: int
    begin: int
    end: int


def positions(slots: Sequence[int], own: range) -> range:
    """Which of the rows at these slots are a device's."""
    return range(bisect_left(slots, own.start), bisect_left(slots, own.stop))


def routes(have: Sequence[range], want: Sequence[range], own: Sequence[int | None]) -> list[Route]:
    """How each that wants rows gets them from those that have them; ``own`` [target] is what it is as a source.

    What it has itself it takes from there, and else from the next one that has it, so that all give as much.
    """
    found = []
    for target, wanted in enumerate(want):
        at = wanted.start
        first = own[target] if own[target] is not None else target % len(have)
        assert first is not None
        order = [(first + turn) % len(have) for turn in range(len(have))]
        while at < wanted.stop:
            source = next(each for each in order if at in have[each])
            end = min(wanted.stop, have[source].stop)
            found.append(Route(source, target, at, end))
            at = end
    return found
