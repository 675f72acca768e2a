"""The shortest schedule of a few devices, exactly: a best-first programme over counts, with dominance.

Micro-batches are alike, so that the n-th action of a kind may be taken for micro-batch n (Tessel, Property 4.1), and
what is held follows from how many actions of each kind have begun. A *label* is a way to have begun some, in the order
of their starts: when each device is free, and when what is under way arrives at kinds that wait for it. Of the same
counts a label that is nowhere later than another makes that one superfluous. Two more rules keep labels few:

* No action starts that leaves a gap in which another one could have been completed, if that one takes no memory that a
  third could have taken instead: it would do no harm in the gap.
* Labels are looked at in the order of what is then the least end of everything (:meth:`LeastSpan._least`), and of
  those by how many actions have begun. A label is so never looked at before one that makes it superfluous.

That least end only grows, so the bound is valid at any moment, and the first label that has begun everything is the
optimum (A*; Hart, Nilsson and Raphael 1968).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from operator import le
from typing import NamedTuple, TypeAlias

from pipeplan.search_constants import BYTES_PER_LABEL
from pipeplan.time_limit import checkpoint
from pipeplan.workload.few_devices import FewDevices
from pipeplan.workload.task_graph import NEVER

Counts = tuple[int, ...]
Label = tuple[int, ...]
_Begun: TypeAlias = "tuple[_Begun, int] | None"
"""What has begun before a kind, and that kind; None: nothing."""


class _Moment(NamedTuple):
    """What follows from how many actions of each kind have begun, whatever the times.

    ``able`` are the kinds of which one may start, ``harmless`` those that may do so in any gap. A label has the times
    of the devices, and then for each kind, from ``begins`` on, ``waiting`` arrivals. ``left`` [kind] have not begun.
    ``works`` are the kinds that are left on a device with the longest tails, and their work and least tail;
    ``blocked`` those that have no room, and what may give some back.
    """

    able: tuple[int, ...]
    harmless: tuple[int, ...]
    begins: tuple[int, ...]
    waiting: tuple[int, ...]
    left: tuple[int, ...]
    works: tuple[tuple[tuple[int, ...], int], ...]
    blocked: tuple[tuple[int, tuple[int, ...]], ...]


class LeastSpan:
    """The search for the least span of a relaxation.

    ``bound`` is in ns, and what is proved so far; ``done`` whether it is the optimum, or as much as was asked for;
    ``num_labels`` were looked at. ``spans`` {entry} [micro-batches] is known about fewer of them: ns from the first
    start of that kind to the end of everything. ``sequence`` are the kinds of a best schedule in the order in which
    they begin, once one is found.
    """

    def __init__(self, few: FewDevices, spans: Mapping[int, Sequence[int]], entry: int | None = None) -> None:
        self._few, self._spans, self._entry = few, spans, entry
        self._kinds = few.kinds if entry is None else few.until(entry)
        self._totals = few.totals(entry)
        self._numbers = range(len(few.kinds))
        self._follow = [
            {number: lag for number, kind in enumerate(few.kinds) for before, lag in kind.waits if before == source}
            for source in self._numbers
        ]
        self._here = [[x for x in self._numbers if place in few.kinds[x].places] for place in range(len(few.rooms))]
        self._nets = [
            [(x, net) for x in here if (net := self._kinds[x].net[place])] for place, here in enumerate(self._here)
        ]
        self._moments: dict[Counts, _Moment] = {}
        self._labels: dict[Counts, list[Label]] = {}
        self._open: list[tuple[int, int, Counts, Label, _Begun]] = []
        self.bound = self.num_labels = 0
        self._below = NEVER
        self.done = False
        self.sequence: list[int] | None = None
        first = tuple(min((few.kinds[x].head for x in here), default=0) for here in self._here)
        self._add(0, (0,) * len(few.kinds), first, None, NEVER)

    def advance(self, num_labels: int, below: int) -> None:
        """Look at so many labels more; nothing needs to be known about spans from ``below`` on, now and later."""
        self._below = below = min(below, self._below)
        for _ in range(num_labels):
            if not self._open or self._open[0][0] >= below:
                self.bound = max(self.bound, below)
                self._end()
                return
            least, _, counts, label, begun = heappop(self._open)
            self.bound = max(self.bound, least)
            if counts == self._totals or (self._entry is not None and not self._moments[counts].left[self._entry]):
                self.sequence = _sequence(begun)
                self._end()
                return
            if not self.num_labels % 64:
                checkpoint()
            self.num_labels += 1
            if label in self._labels[counts]:
                self._follow_up(least, begun, counts, label, below)

    def _end(self) -> None:
        self.done = True
        self._open, self._labels, self._moments = [], {}, {}

    @property
    def num_bytes(self) -> int:
        """What it keeps in memory, about."""
        return BYTES_PER_LABEL * len(self._open)

    def _follow_up(self, least: int, begun: _Begun, counts: Counts, label: Label, below: int) -> None:
        """All that may start next."""
        moment, kinds = self._moments[counts], self._kinds
        starts = {}
        for x in moment.able:
            kind = kinds[x]
            start = kind.head
            for place in kind.places:
                if label[place] > start:
                    start = label[place]
            if moment.waiting[x] and label[moment.begins[x]] > start:
                start = label[moment.begins[x]]
            starts[x] = start
        gaps = sorted((starts[z] + kinds[z].duration, not kinds[z].duration, z) for z in moment.harmless)
        for x, start in starts.items():
            for end, instant, z in gaps[:2]:
                if z != x and (end < start or (end == start and (not instant or z < x))):
                    break
            else:
                after = (*counts[:x], counts[x] + 1, *counts[x + 1 :])
                end = start + kinds[x].duration
                rest = end + kinds[x].tail + (moment.left[x] - 1) * kinds[x].duration
                if rest < below:
                    self._add(max(least, rest), after, self._label(counts, label, x, start, after), (begun, x), below)

    def _label(self, counts: Counts, label: Label, x: int, start: int, after: Counts) -> Label:
        """A label once an action of kind ``x`` starts, which nothing starts before any more."""
        moment, then = self._moments[counts], self._moment(after)
        end = start + self._kinds[x].duration
        new = [time if time > start else start for time in label[: len(self._here)]]
        for place in self._kinds[x].places:
            new[place] = end
        for y in self._numbers:
            waiting = then.waiting[y]
            if not waiting:
                continue
            kind, begin = self._kinds[y], moment.begins[y]
            arrivals = [*label[begin + (y == x) : begin + moment.waiting[y]]]
            lag = self._follow[x].get(y)
            if kind.copies > 1:
                if lag is not None:
                    insort(arrivals, end + lag)
            else:
                arrivals += [0] * (waiting - len(arrivals))
                if lag is not None:
                    arrivals[counts[x] - after[y]] = max(arrivals[counts[x] - after[y]], end + lag)
            time = max(kind.head, *[new[place] for place in kind.places])
            for n in range(waiting):
                if arrivals[n] < time:
                    arrivals[n] = time
                time = arrivals[n] + kind.duration
            new += arrivals
        return tuple(new)

    def _add(self, least: int, counts: Counts, label: Label, begun: _Begun, below: int) -> None:
        """Keep a label that another one does not make superfluous."""
        least = max(least, self._least(counts, label))
        if least >= below:
            return
        known = self._labels.get(counts)
        if known is None:
            self._labels[counts] = [label]
        else:
            for other in known:
                if all(map(le, other, label)):
                    return
            known[:] = [other for other in known if not all(map(le, label, other))]
            known.append(label)
        heappush(self._open, (least, sum(counts), counts, label, begun))

    def _least(self, counts: Counts, label: Label) -> int:
        """Ns at which everything ends at least.

        Of each kind the next action starts no sooner than its devices are free, its input arrives, and something gives
        back memory, if there is none. All that are left follow, and then a tail; on each device all kinds with long
        tails, and then the least of these; and what has not begun at all takes as long as it does alone.
        """
        moment, kinds = self._moments.get(counts) or self._moment(counts), self._kinds
        begins, waiting, left = moment.begins, moment.waiting, moment.left
        starts = [NEVER] * len(kinds)
        for x in self._numbers:
            if not left[x]:
                continue
            kind = kinds[x]
            start = kind.head
            for place in kind.places:
                if label[place] > start:
                    start = label[place]
            if waiting[x] and label[begins[x]] > start:
                start = label[begins[x]]
            if kind.copies == 1:
                for y, lag in kind.waits:
                    if counts[y] == counts[x] and starts[y] + kinds[y].duration + lag > start:
                        start = starts[y] + kinds[y].duration + lag
            elif not waiting[x]:
                start = max(start, min(starts[y] + kinds[y].duration + lag for y, lag in kind.waits))
            starts[x] = start
        for x, giving in moment.blocked:
            starts[x] = max(starts[x], min([starts[y] + kinds[y].duration for y in giving], default=NEVER))
        least = 0
        for x in self._numbers:
            if not left[x]:
                continue
            kind = kinds[x]
            least = max(least, starts[x] + left[x] * kind.duration + kind.tail)
            if waiting[x] > 1:
                last = label[begins[x] + waiting[x] - 1]
                least = max(least, last + (left[x] - waiting[x] + 1) * kind.duration + kind.tail)
            spans = self._spans.get(x)
            if spans is not None:
                least = max(least, starts[x] + spans[left[x]])
        for group, work in moment.works:
            least = max(least, min([starts[x] for x in group]) + work)
        return least

    def _moment(self, counts: Counts) -> _Moment:
        found = self._moments.get(counts)
        if found is None:
            found = self._moments[counts] = self._new_moment(counts)
        return found

    def _new_moment(self, counts: Counts) -> _Moment:
        rooms = self._few.rooms
        held = [sum([net * counts[x] for x, net in nets]) for nets in self._nets]
        left = tuple(total - count for total, count in zip(self._totals, counts, strict=True))
        waiting = tuple(self._arrived(x, counts) for x in self._numbers)
        begins, begin = [], len(rooms)
        for number in waiting:
            begins.append(begin)
            begin += number
        full = {x: self._full(x, held) for x in self._numbers if left[x]}
        able = tuple(x for x, places in full.items() if not places and self._ready(x, counts))
        return _Moment(
            able,
            tuple(x for x in able if self._harmless(x, held)),
            tuple(begins),
            waiting,
            left,
            tuple(self._works(left)),
            tuple(
                (x, tuple(y for y, net in self._nets[place] if net < 0 and left[y]))
                for x, places in full.items()
                for place in places
            ),
        )

    def _arrived(self, x: int, counts: Counts) -> int:
        """Actions of a kind for which something, if not everything, that they wait for has begun."""
        kind, before = self._kinds[x], [counts[y] for y, _ in self._kinds[x].waits]
        return (sum(before) if kind.copies > 1 else max(before, default=counts[x])) - counts[x]

    def _ready(self, x: int, counts: Counts) -> bool:
        kind = self._kinds[x]
        return self._arrived(x, counts) > 0 if kind.copies > 1 else all(counts[y] > counts[x] for y, _ in kind.waits)

    def _full(self, x: int, held: Sequence[int]) -> list[int]:
        """Kept devices that have no room for one more."""
        kind, rooms = self._kinds[x], self._few.rooms
        return [
            place
            for place in kind.places
            if (room := rooms[place]) is not None and held[place] + kind.takes[place] + kind.beside[place] > room
        ]

    def _harmless(self, x: int, held: Sequence[int]) -> bool:
        """Whether nothing has less room if an action runs earlier: it takes none, or is the only kind that does."""
        for place in self._kinds[x].places:
            room, taken = self._few.rooms[place], self._kinds[x].takes[place]
            if room is None or not taken:
                continue
            others = [self._kinds[y] for y in self._here[place] if y != x]
            if any(other.takes[place] for other in others):
                return False
            if held[place] + taken + max((other.beside[place] for other in others), default=0) > room:
                return False
        return True

    def _works(self, left: Sequence[int]) -> list[tuple[tuple[int, ...], int]]:
        found = []
        for here in self._here:
            kinds = sorted((x for x in here if left[x]), key=lambda x: -self._kinds[x].tail)
            work = 0
            for number, x in enumerate(kinds, 1):
                work += left[x] * self._kinds[x].duration
                found.append((tuple(kinds[:number]), work + self._kinds[x].tail))
        return found


def _sequence(begun: _Begun) -> list[int]:
    found = list[int]()
    while begun is not None:
        begun, kind = begun
        found.append(kind)
    return found[::-1]
