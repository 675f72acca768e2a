"""A workload of which only a few devices are real: the others take their time, but do any amount of work at once.

Keep some devices as they are, one action at a time in their memory, and let all others be latency alone. What a
schedule of the workload does on those that are kept is a schedule of this *relaxation*, so that no schedule of the
workload is shorter than the best of the relaxation, which :mod:`pipeplan.workload.least_span` finds. With all devices
kept it is the workload itself, as far as links are free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import NEVER


@dataclass(frozen=True, slots=True)
class KeptKind:
    """What the kept devices do of one operation for each micro-batch, or of ``copies`` operations that are alike.

    ``places`` are numbers of kept devices. ``head`` and ``tail`` are the longest ways in ns from a micro-batch's first
    start to this one's start, and from its end to the end of all. ``waits`` are pairs: the number of a kind before it,
    and the ns from the end of that to this one's start that pass elsewhere. Of alike ones each is for one of ``waits``.
    ``takes``, ``gives`` and ``beside`` [kept device] are bytes: taken at the start, given back at the end, and held
    while it runs.
    """

    duration: int
    places: tuple[int, ...]
    head: int
    tail: int
    waits: tuple[tuple[int, int], ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    beside: tuple[int, ...]
    copies: int = 1

    @property
    def net(self) -> tuple[int, ...]:
        """[kept device] bytes that it leaves taken."""
        return tuple(taken - given for taken, given in zip(self.takes, self.gives, strict=True))


@dataclass(frozen=True, slots=True)
class FewDevices:
    """The relaxation. ``kinds`` come after all that they wait for; ``rooms`` [kept device] are bytes, None: no limit.

    ``entries`` [kept device] is the kind that all others of that device follow, None where there is no such kind.
    ``operations`` [kind] are those of the problem that it stands for, each beside one of its ``waits`` if there are
    several. ``outer`` are the operations left out that may be first of all, and last.
    """

    kinds: tuple[KeptKind, ...]
    rooms: tuple[int | None, ...]
    entries: tuple[int | None, ...]
    count: int
    operations: tuple[tuple[int, ...], ...]
    outer: tuple[tuple[int, ...], tuple[int, ...]]

    @classmethod
    def of(cls, problem: OneMicrobatch, devices: Sequence[int], more: Sequence[int] = ()) -> FewDevices | None:
        """Keep these devices of a problem. None where an action may begin before another that it waits for has begun.

        (That is so where actions wait inside of themselves for messages.) Of ``more`` devices only the actions that
        others wait for are kept, without their memory: far fewer states, and nearly as much is proved.
        """
        everything = (*devices, *more)
        number = {device: place for place, device in enumerate(everything)}
        whole, (first, last) = frozenset(devices), _moments_at_ends(problem)
        kept = [
            x
            for x in problem.order
            if x not in first
            and x not in last
            and not number.keys().isdisjoint(problem.devices[x])
            and (problem.outgoing[x] or not whole.isdisjoint(problem.devices[x]))
        ]
        waits = _waits(problem, kept)
        if any(lag <= -problem.durations[source] and lag < 0 for each in waits.values() for source, lag in each):
            return None
        place = {x: index for index, x in enumerate(kept)}
        memory = [_memory(problem, device, place.keys() if device in whole else ()) for device in everything]
        kinds = [
            KeptKind(
                problem.durations[x],
                tuple(number[device] for device in problem.devices[x] if device in number),
                problem.workload.heads[x],
                problem.workload.tails[x],
                tuple((place[source], lag) for source, lag in waits[x]),
                tuple(takes.get(x, 0) for takes, _ in memory),
                tuple(gives.get(x, 0) for _, gives in memory),
                tuple(problem.workspace[x] if device in problem.devices[x] else 0 for device in everything),
            )
            for x in kept
        ]
        pooled, groups = _pooled(kinds)
        rooms = (*(problem.capacity[device] for device in devices), *[None] * len(more))
        operations = tuple(tuple(kept[number] for number in group) for group in groups)
        outer = first, tuple(x for x in last if x not in first)
        return cls(pooled, rooms, _entries(pooled, len(rooms)), problem.num_microbatches, operations, outer)

    def with_count(self, count: int) -> FewDevices:
        """The same for another number of micro-batches."""
        return replace(self, count=count)

    def orders(self, problem: OneMicrobatch, sequence: Iterable[int]) -> list[list[int]]:
        """[device] tasks of the problem where its kinds begin in a sequence, and what is left out is first or last.

        Of operations that are alike that is next of which what it waits for began first.
        """
        found: list[list[int]] = [[] for _ in range(problem.num_devices)]
        begun = [0] * problem.num_operations
        waiting: list[list[int]] = [[] for _ in self.kinds]

        def run(x: int) -> None:
            for device in problem.devices[x]:
                if device < problem.num_devices:
                    found[device].append(x * self.count + begun[x])
            begun[x] += 1

        def run_all(operations: Iterable[int]) -> None:
            for x in operations:
                for _ in range(self.count):
                    run(x)

        run_all(self.outer[0])
        for number in sequence:
            operations = self.operations[number]
            run(operations[0] if len(operations) == 1 else waiting[number].pop(0))
            for later, kind in enumerate(self.kinds):
                if kind.copies > 1:
                    own = zip(self.operations[later], kind.waits, strict=True)
                    waiting[later] += [x for x, (source, _) in own if source == number]
        run_all(self.outer[1])
        return found

    def totals(self, entry: int | None = None) -> tuple[int, ...]:
        """[kind] actions that begin in all; one more of an ``entry``, whose last start is looked for."""
        return tuple(self.count * kind.copies + (x == entry) for x, kind in enumerate(self.kinds))

    def until(self, entry: int) -> tuple[KeptKind, ...]:
        """The kinds where only an ``entry`` counts, and when it starts."""
        return tuple(replace(kind, tail=-kind.duration if x == entry else -NEVER) for x, kind in enumerate(self.kinds))

    def after(self, entry: int) -> FewDevices:
        """The same where nothing waits for more than what follows an ``entry``, such as for other branches.

        These may be ahead by the time a later micro-batch enters, so that only without them the first micro-batches
        take as long as any later ones.
        """
        ways: dict[int, int] = {}
        kinds = list[KeptKind]()
        for number, kind in enumerate(self.kinds):
            after = [ways[source] + self.kinds[source].duration + lag for source, lag in kind.waits if source in ways]
            if number == entry or after:
                ways[number] = self.kinds[entry].head if number == entry else max(after)
            kinds.append(replace(kind, head=min(kind.head, ways.get(number, kind.head))))
        return replace(self, kinds=tuple(kinds))


def _moments_at_ends(problem: OneMicrobatch) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Operations without time and memory that may all be first of all, and last: they change nothing."""
    found: list[tuple[int, ...]] = []
    heads, tails = problem.workload.heads, problem.workload.tails
    for order, before, way in (
        (problem.order, problem.incoming, heads),
        (problem.order[::-1], problem.outgoing, tails),
    ):
        outer: set[int] = set()
        for x in order:
            size = problem.acquire[x] + problem.release[x] + problem.workspace[x]
            if not (problem.durations[x] or size or way[x]) and all(y in outer for y, _ in before[x]):
                outer.add(x)
        found.append(tuple(x for x in problem.order if x in outer))
    return found[0], found[1]


def _waits(problem: OneMicrobatch, kept: Iterable[int]) -> dict[int, list[tuple[int, int]]]:
    """{kept operation: (kept operation before it, most ns that pass elsewhere between the two)}."""
    own = set(kept)
    passed: list[dict[int, int]] = [{} for _ in range(problem.num_operations)]
    for x in problem.order:
        for middle, lag in problem.incoming[x]:
            if middle in own:
                passed[x][middle] = max(passed[x].get(middle, lag), lag)
                continue
            for source, before in passed[middle].items():
                time = before + problem.durations[middle] + lag
                passed[x][source] = max(passed[x].get(source, time), time)
    return {x: sorted(passed[x].items()) for x in own}


def _memory(problem: OneMicrobatch, device: int, kept: Iterable[int]) -> tuple[dict[int, int], dict[int, int]]:
    """{operation: bytes} that a device takes at its start and gives back at its end; what others end is left out."""
    takes, gives = defaultdict[int, int](int), defaultdict[int, int](int)
    there = {x for x in kept if device in problem.devices[x]}
    for hold in problem.holds_on(device):
        if hold.source in there and hold.target in there:
            takes[hold.source] += hold.size
            gives[hold.target] += hold.size
    return takes, gives


def _pooled(kinds: Sequence[KeptKind]) -> tuple[tuple[KeptKind, ...], list[list[int]]]:
    """Kinds that nothing waits for and that are alike but for what they wait for, as one; and which are."""
    before = {source for kind in kinds for source, _ in kind.waits}
    alike: dict[object, list[int]] = {}
    for number, kind in enumerate(kinds):
        free = number not in before and len(kind.waits) == 1
        alike.setdefault(replace(kind, waits=(), head=0) if free else number, []).append(number)
    groups = sorted(alike.values(), key=lambda group: group[-1])
    place = {number: index for index, group in enumerate(groups) for number in group}
    pooled = tuple(
        replace(
            kinds[group[0]],
            head=min(kinds[number].head for number in group),
            waits=tuple((place[source], lag) for number in group for source, lag in kinds[number].waits),
            copies=len(group),
        )
        for group in groups
    )
    return pooled, groups


def _entries(kinds: Sequence[KeptKind], num_places: int) -> tuple[int | None, ...]:
    after: list[set[int]] = []
    for kind in kinds:
        after.append({source for source, _ in kind.waits}.union(*(after[source] for source, _ in kind.waits)))
    found: list[int | None] = []
    for place in range(num_places):
        here = [number for number, kind in enumerate(kinds) if place in kind.places]
        first = here[:1] if all(here[0] in after[number] for number in here[1:]) else []
        found.append(first[0] if first else None)
    return tuple(found)
