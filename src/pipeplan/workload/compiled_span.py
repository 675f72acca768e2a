"""The search for a least span by a compiled loop, and when there is one.

Compiling takes some seconds, once for each machine, and importing what is compiled half a second. So a process of its
own does it, begun once there is enough to do, while the search goes on as it is.
"""

from __future__ import annotations

import atexit
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeplan.time_limit import checkpoint
from pipeplan.workload.few_devices import FewDevices, KeptKind
from pipeplan.workload.task_graph import NEVER

Ints: TypeAlias = NDArray[np.int64]
Shorts: TypeAlias = NDArray[np.int32]
Number = TypeVar("Number", np.int32, np.int64)


DURATION, HEAD, TAIL, COPIES, TOTAL, FIRST_PLACE, END_PLACE, FIRST_WAIT, END_WAIT, SPANS = range(10)
"""Columns of :attr:`SpanFacts.kinds`."""

TAKES, BESIDE, NET = range(3)
"""Columns of :attr:`SpanFacts.memory`, in bytes."""

LEAST, BEGUN, STATE, AT, OLDER, SUPERFLUOUS, BEFORE = range(7)
"""Columns of :attr:`SpanStore.labels`."""

LONG, NEWEST = -2, -1
"""The last columns of :attr:`SpanStore.states`."""

STATES, LABELS, TIMES, OPEN, BOUND, LOOKED_AT, COMPLETE = range(7)
"""What is where in the sizes of a search: as in :class:`SpanSizes`, what is proved, how many labels were looked at, and
one with which everything has begun, -1: none."""


class SpanFacts(NamedTuple):
    """What does not change in a search.

    ``kinds`` are as :class:`~pipeplan.workload.few_devices.KeptKind` has them, with how many begin in all, and where
    their ``places`` and ``waits`` (a kind, and ns) begin and end, and their ``spans`` begin, -1: there are none.
    ``follows`` [kind, later kind] are ns, ``-NEVER`` where that does not wait for it; ``memory`` is of [kind, kept
    device]. ``by_tail`` [kept device] is the number of its kinds, and then they, those with the longest tails first;
    ``rooms`` are bytes, -1: no limit.
    """

    kinds: Ints
    places: Ints
    waits: Ints
    follows: Ints
    memory: Ints
    spans: Ints
    by_tail: Ints
    rooms: Ints

    @classmethod
    def of(cls, few: FewDevices, spans: Mapping[int, Sequence[int]], entry: int | None) -> SpanFacts:
        """Those of a relaxation; ``spans`` and ``entry`` are :class:`~pipeplan.workload.least_span.LeastSpan`'s."""
        kinds, totals = few.kinds if entry is None else few.until(entry), few.totals(entry)
        rows, places, waits, known = list[list[int]](), list[int](), list[tuple[int, int]](), list[int]()
        follows = np.full((len(kinds), len(kinds)), -NEVER, np.int64)
        for x, kind in enumerate(kinds):
            first_place, first_wait = len(places), len(waits)
            places += kind.places
            waits += kind.waits
            row = [kind.duration, kind.head, kind.tail, kind.copies, totals[x], first_place, len(places)]
            rows.append([*row, first_wait, len(waits), len(known) if x in spans else -1])
            known += spans.get(x, ())
            for source, lag in kind.waits:
                follows[source, x] = lag
        by_tail = np.zeros((len(few.rooms), len(kinds) + 1), np.int64)
        for place in range(len(few.rooms)):
            here = [x for x, kind in enumerate(kinds) if place in kind.places]
            by_tail[place, : len(here) + 1] = len(here), *sorted(here, key=lambda x: -kinds[x].tail)
        return cls(
            np.array(rows, np.int64),
            np.array(places, np.int64),
            np.array(waits, np.int64).reshape(-1, 2),
            follows,
            np.array([[*zip(kind.takes, kind.beside, kind.net, strict=True)] for kind in kinds], np.int64),
            np.array(known, np.int64),
            by_tail,
            np.array([-1 if room is None else room for room in few.rooms], np.int64),
        )


class SpanStore(NamedTuple):
    """What a search knows so far.

    ``states`` are the counts of kinds that have begun, how long their labels are, and the newest of these, -1: none;
    ``table`` finds one by its counts. ``labels`` have their least end, how many have begun, their state, where their
    ``times`` begin, the older one of the same state, and the one that they follow, -1: none. ``heap`` are those to be
    looked at.
    """

    states: Shorts
    table: Shorts
    labels: Ints
    times: Ints
    heap: Shorts

    @classmethod
    def empty(cls, num_kinds: int) -> SpanStore:
        """Without anything, and room for nothing."""
        none = np.zeros(0, np.int32)
        return cls(
            np.zeros((0, num_kinds + 2), np.int32), none, np.zeros((0, 7), np.int64), np.zeros(0, np.int64), none
        )

    def larger(self, used: SpanSizes, more: SpanSizes) -> SpanStore:
        """With room for ``more`` states, labels, times and open labels; twice as much where there was too little.

        The table is empty if it is a new one.
        """
        store = SpanStore(
            _with_room(self.states, used.states, more.states),
            self.table,
            _with_room(self.labels, used.labels, more.labels),
            _with_room(self.times, used.times, more.times),
            _with_room(self.heap, used.open, more.open),
        )
        if len(self.table) >= 2 * len(store.states):
            return store
        return store._replace(table=np.full(1 << (2 * len(store.states)).bit_length(), -1, np.int32))

    @property
    def num_bytes(self) -> int:
        """What all of it takes."""
        return sum(array.nbytes for array in self)


class SpanSizes(NamedTuple):
    """How many states, labels, times of labels, and labels to be looked at."""

    states: int
    labels: int
    times: int
    open: int


class CompiledSpan:
    """As :class:`~pipeplan.workload.least_span.LeastSpan`, with the same labels in the same order, and faster."""

    def __init__(
        self, loops: ModuleType, few: FewDevices, spans: Mapping[int, Sequence[int]], entry: int | None = None
    ) -> None:
        self._loops, self._facts = loops, SpanFacts.of(few, spans, entry)
        self._entry, self._below, self.done = -1 if entry is None else entry, NEVER, False
        self._sizes = np.zeros(7, np.int64)
        self._sizes[COMPLETE] = -1
        self.sequence: list[int] | None = None
        num_kinds, num_places = len(few.kinds), len(few.rooms)
        longest = num_places + sum(few.totals(entry))
        self._step = SpanSizes(num_kinds + 1, num_kinds + 1, num_kinds * longest + 1, num_kinds + 1)
        self._store = SpanStore.empty(num_kinds)
        self._make_room()
        first = [
            min((kind.head for kind in few.kinds if place in kind.places), default=0) for place in range(num_places)
        ]
        loops.begin(np.array(first, np.int64), self._facts, self._store, self._sizes)

    @property
    def bound(self) -> int:
        """Ns proved so far."""
        return int(self._sizes[BOUND])

    @property
    def num_labels(self) -> int:
        """Labels looked at."""
        return int(self._sizes[LOOKED_AT])

    @property
    def num_bytes(self) -> int:
        """What it keeps in memory."""
        return self._store.num_bytes

    def advance(self, num_labels: int, below: int) -> None:
        """Look at so many labels more; nothing needs to be known about spans from ``below`` on, now and later."""
        self._below = below = min(below, self._below)
        left = num_labels
        while left > 0 and not self.done:
            checkpoint()
            before = self.num_labels
            told = self._loops.advance(min(left, _AT_ONCE), below, self._entry, self._facts, self._store, self._sizes)
            left -= self.num_labels - before
            if told == self._loops.DONE:
                self.done, self.sequence = True, self._sequence()
                self._store = SpanStore.empty(len(self._facts.kinds))
            elif told == self._loops.FULL:
                self._make_room()

    def _sequence(self) -> list[int] | None:
        """The kinds in the order in which they begin, if everything has begun."""
        label, found = int(self._sizes[COMPLETE]), list[int]()
        if label < 0:
            return None
        states, labels = self._store.states, self._store.labels
        while (before := int(labels[label, BEFORE])) >= 0:
            begun = states[labels[label, STATE], :LONG] - states[labels[before, STATE], :LONG]
            found.append(int(begun.argmax()))
            label = before
        return found[::-1]

    def _make_room(self) -> None:
        used = SpanSizes(*(int(each) for each in self._sizes[:4]))
        larger = self._store.larger(used, self._step)
        if larger.table is not self._store.table:
            self._loops.enter(used.states, larger.states, larger.table)
        self._store = larger


_AT_ONCE = 2_000
"""Labels between two looks at the time: some milliseconds."""


def _with_room(array: NDArray[Number], used: int, more: int) -> NDArray[Number]:
    if used + more < len(array):
        return array
    larger = np.zeros((2 * (used + more), *array.shape[1:]), array.dtype)
    larger[:used] = array[:used]
    return larger


def compiled_loops() -> ModuleType | None:
    """The compiled loops, once they are there; the first call begins to compile them. None without numba, an extra."""
    process = _compiling()
    return _loops() if process is not None and process.poll() == 0 else None


@cache
def _compiling() -> subprocess.Popen[bytes] | None:
    """A process that compiles the loops, or finds them compiled."""
    if find_spec("numba") is None:
        return None
    command = [sys.executable, "-c", f"from {__name__} import compile_loops; compile_loops()"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    atexit.register(process.kill)
    return process


def compile_loops() -> ModuleType:
    """Compile the loops for this machine, and keep them there, unless that was done before.

    Raises:
        RuntimeError: there is nowhere to keep them.
    """
    loops = import_module("pipeplan.workload.span_loops")
    kind = KeptKind(1, (0,), 0, 0, (), (1,), (1,), (0,))
    CompiledSpan(loops, FewDevices((kind,), (1,), (0,), 1, ((0,),), ((), ())), {0: (0, 1)}).advance(9, NEVER)
    return loops


_loops = cache(compile_loops)
