"""Samples in flight under kFkB schedules with micro-batch sizes of their own (GraphPipe, Table 3.2).

A stage that runs kFkB starts with some forwards, then runs k backwards and k forwards in turn, and ends with the
backwards that are left. How many samples it holds at most follows from those of the stages after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pipeplan.workload.kinds import Role

__all__ = ["KFKB", "Flow", "best_k", "flows", "kfkb_word", "samples_in_flight"]


@dataclass(frozen=True, slots=True)
class KFKB:
    """Of a stage: how many forwards and backwards run in turn, and samples in a micro-batch."""

    k: int
    microbatch_size: int

    @property
    def samples(self) -> int:
        """Samples in k micro-batches."""
        return self.k * self.microbatch_size


Flow = tuple[KFKB, int]
"""What a stage runs, and how many samples it has in flight."""


def samples_in_flight(stage: KFKB, successor: KFKB, of_successor: int) -> int:
    """Samples in flight at a stage, given a stage after it that has ``of_successor`` in flight (Table 3.2).

    One micro-batch size divides the other. The last stage has ``stage.samples`` in flight.
    """
    size, larger = stage.microbatch_size, max(stage.microbatch_size, successor.microbatch_size)
    own, others = stage.samples, successor.samples
    if others < size:
        return of_successor + own - others + size
    if own < successor.microbatch_size:
        return of_successor + successor.microbatch_size
    if own <= others:
        return of_successor + larger * (1 if own == larger else 2)
    return of_successor + (own if others == larger else own - others + 2 * larger)


def best_k(microbatch_size: int, successors: Sequence[Flow], choices: Sequence[int]) -> Flow:
    """The k that leaves fewest samples in flight before the stages after this one (3.10.2); of equals the first.

    Without successors it is the smallest k.
    """

    def held(k: int) -> int:
        stage = KFKB(k, microbatch_size)
        return max((samples_in_flight(stage, *successor) for successor in successors), default=stage.samples)

    chosen = min(choices, key=held)
    return KFKB(chosen, microbatch_size), held(chosen)


def flows(sizes: Sequence[int], edges: Iterable[tuple[int, int]], mini_batch: int) -> list[int]:
    """[stage] samples in flight with 1F1B, for stages in topological order with these micro-batch sizes."""
    held = list(sizes)
    for source, target in sorted(edges, reverse=True):
        needed = samples_in_flight(KFKB(1, sizes[source]), KFKB(1, sizes[target]), held[target])
        held[source] = min(mini_batch, max(held[source], needed))
    return held


def kfkb_word(stage: KFKB, in_flight: int, mini_batch: int) -> Iterator[Role]:
    """Forwards and backwards in the order of a stage's schedule; each role goes through the micro-batches in order."""
    count = mini_batch // stage.microbatch_size
    forwards = min(count, -(-in_flight // stage.microbatch_size))
    backwards = 0
    yield from itertools.repeat(Role.FORWARD, forwards)
    while backwards < count:
        some = min(stage.k, count - backwards)
        yield from itertools.repeat(Role.BACKWARD, some)
        backwards += some
        more = min(stage.k, count - forwards)
        yield from itertools.repeat(Role.FORWARD, more)
        forwards += more
