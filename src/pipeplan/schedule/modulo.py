"""Repetends by modulo list scheduling: a pattern of a given repetend time in milliseconds, where one is easily found.

Software pipelining's list scheduler (Rau, "Iterative modulo scheduling", MICRO 1994), with a look ahead instead of
eviction: each device has a table of one repetend time, and an operation starts as soon as its inputs are there and what
is still to come on its devices fits into the gaps that are left. What several devices run together comes first, one
after the other, since it has to stand at the same place in all of their tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, permutations

from pipeplan.schedule.pattern import Pattern, has_room
from pipeplan.search_constants import MODULO_ORDERS, MODULO_TASKS
from pipeplan.workload.one_microbatch import OneMicrobatch


def modulo_schedule(problem: OneMicrobatch, repetend_ns: int) -> Pattern | None:
    """A pattern of unroll 1 and this repetend time; None where none is found, which proves nothing.

    Of those found it is the one with the shortest way through, so that few micro-batches are in flight.
    """
    if max(problem.work) > repetend_ns or max(map(len, problem.on_device)) > MODULO_TASKS:
        return None
    found = (_scheduled(problem, repetend_ns, places) for places in _places_of_shared(problem))
    patterns = [pattern for pattern in found if pattern is not None and has_room(problem, pattern)]
    return min(patterns, key=lambda pattern: pattern.latency(problem), default=None)


def _places_of_shared(problem: OneMicrobatch) -> Iterator[dict[int, int]]:
    """Where in the repetend time the operations of several devices may start: side by side, in several orders."""
    shared = [x for x in problem.order if len(problem.devices[x]) > 1]
    for order in islice(permutations(shared[1:]), MODULO_ORDERS):
        places, end = {}, 0
        for x in (*shared[:1], *order):
            places[x] = end
            end += problem.durations[x]
        yield places


class _DeviceTable:
    """One repetend time of a device: the gaps between what has a place, and the durations of what has none yet."""

    def __init__(self, repetend_ns: int, durations: Sequence[int]) -> None:
        self._repetend = repetend_ns
        self._gaps: list[tuple[int, int]] = [(0, repetend_ns)]
        self._whole = True
        self._left = sorted(durations, reverse=True)

    def offsets(self, early: int, duration: int) -> Iterator[int]:
        """How long after ``early`` (ns) something may start: at once, or at either end of a gap it fits into."""
        for begin, length in self._gaps:
            if length >= duration:
                yield (begin - early) % self._repetend
                yield (begin + length - duration - early) % self._repetend
        yield 0

    def has_room(self, start: int, duration: int) -> bool:
        """Whether something may start then, and all that is left still fits into the gaps, longest first."""
        gaps = self._after(start, duration)
        if gaps is None:
            return False
        room = sorted(length for _, length in gaps)
        left = self._left.copy()
        left.remove(duration)
        for each in left:
            least = next((place for place, length in enumerate(room) if length >= each), None)
            if least is None:
                return False
            room[least] -= each
            room.sort()
        return True

    def put(self, start: int, duration: int) -> None:
        """Something starts then."""
        gaps = self._after(start, duration)
        assert gaps is not None
        self._gaps, self._whole = gaps, False
        self._left.remove(duration)

    def _after(self, start: int, duration: int) -> list[tuple[int, int]] | None:
        """The gaps that are left beside something; None if it would overlap with what has a place."""
        if self._whole:  # a table of which nothing is taken goes round
            end = (start + duration) % self._repetend
            return [(end, self._repetend - duration)] if duration < self._repetend else []
        for number, (begin, length) in enumerate(self._gaps):
            before = (start - begin) % self._repetend
            if before + duration <= length:
                rest = [(begin, before), ((start + duration) % self._repetend, length - before - duration)]
                return [*self._gaps[:number], *((at, free) for at, free in rest if free), *self._gaps[number + 1 :]]
        return None


def _scheduled(problem: OneMicrobatch, repetend_ns: int, places: Mapping[int, int]) -> Pattern | None:
    """Operations in order, each as soon as it may; those with given places at the next such moment."""
    durations, devices = problem.durations, problem.devices
    tables = [_DeviceTable(repetend_ns, [durations[x] for x in there if durations[x]]) for there in problem.on_device]
    for x, place in places.items():
        for device in devices[x] if durations[x] else ():
            if not tables[device].has_room(place, durations[x]):
                return None
            tables[device].put(place, durations[x])
    incoming: list[list[tuple[int, int]]] = [[] for _ in durations]
    for source, target, lag in problem.edges:
        incoming[target].append((source, lag))
    starts = [0] * len(durations)
    for x in problem.order:
        early = max((starts[source] + durations[source] + lag for source, lag in incoming[x]), default=0)
        if x in places:
            starts[x] = early + (places[x] - early) % repetend_ns
        elif not durations[x]:
            starts[x] = early
        else:
            (device,) = devices[x]
            table = tables[device]
            offsets = sorted(set(table.offsets(early, durations[x])))
            offset = next((each for each in offsets if table.has_room(early + each, durations[x])), None)
            if offset is None:
                return None
            starts[x] = early + offset
            table.put(starts[x], durations[x])
    for source, target, lag, later in problem.returns:
        if starts[source] + durations[source] + lag > starts[target] + later * repetend_ns:
            return None
    first = min(starts)
    return Pattern(1, repetend_ns, tuple((start - first,) for start in starts))
