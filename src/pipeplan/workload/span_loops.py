"""The loop of :class:`~pipeplan.workload.least_span.LeastSpan` compiled: see there for what it does and why.

Imported only by :mod:`pipeplan.workload.compiled_span`, where the arrays are described, since that takes half a second,
and seconds where nothing is compiled yet.
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit, uint64

from pipeplan.workload.compiled_span import (
    AT,
    BEFORE,
    BEGUN,
    BESIDE,
    BOUND,
    COMPLETE,
    COPIES,
    DURATION,
    END_PLACE,
    END_WAIT,
    FIRST_PLACE,
    FIRST_WAIT,
    HEAD,
    LABELS,
    LEAST,
    LONG,
    LOOKED_AT,
    NET,
    NEWEST,
    OLDER,
    OPEN,
    SPANS,
    STATE,
    STATES,
    SUPERFLUOUS,
    TAIL,
    TAKES,
    TIMES,
    TOTAL,
    Ints,
    Shorts,
    SpanFacts,
    SpanStore,
)
from pipeplan.workload.task_graph import NEVER

GOES_ON, DONE, FULL = 0, 1, 2
"""What :func:`advance` ends with: so many labels looked at, nothing left to do, or no room for more."""


@njit(cache=True, nogil=True)
def _place(counts: Ints, states: Shorts, table: Shorts) -> tuple[np.int64, np.int64]:
    """The state with some counts, -1: there is none yet, and its place in the table."""
    number = uint64(14695981039346656037)
    for x in range(len(counts)):
        number = (number ^ uint64(counts[x])) * uint64(1099511628211)
        number = number ^ (number >> uint64(29))
    at = int64(number & uint64(len(table) - 1))
    while table[at] >= 0:
        state, same = int64(table[at]), True
        for x in range(len(counts)):
            if states[state, x] != counts[x]:
                same = False
                break
        if same:
            return state, at
        at = (at + 1) & (len(table) - 1)
    return int64(-1), at


@njit(cache=True, nogil=True)
def enter(num_states: int, states: Shorts, table: Shorts) -> None:
    """Put all states into an empty table."""
    counts = np.empty(states.shape[1] - 2, np.int64)
    for state in range(num_states):
        counts[:] = states[state, :-2]
        table[_place(counts, states, table)[1]] = state


@njit(cache=True, nogil=True)
def _sooner(a: int, b: int, labels: Ints, states: Shorts, times: Ints) -> bool:
    """Whether a label is looked at before another: by least end, how many have begun, counts and times."""
    if labels[a, LEAST] != labels[b, LEAST]:
        return labels[a, LEAST] < labels[b, LEAST]
    if labels[a, BEGUN] != labels[b, BEGUN]:
        return labels[a, BEGUN] < labels[b, BEGUN]
    one, other = labels[a, STATE], labels[b, STATE]
    if one != other:
        for x in range(states.shape[1] - 2):
            if states[one, x] != states[other, x]:
                return states[one, x] < states[other, x]
    for n in range(states[one, LONG]):
        first, second = times[labels[a, AT] + n], times[labels[b, AT] + n]
        if first != second:
            return first < second
    return False


@njit(cache=True, nogil=True)
def _push(label: int, heap: Shorts, labels: Ints, states: Shorts, times: Ints, sizes: Ints) -> None:
    at = sizes[OPEN]
    sizes[OPEN] += 1
    while at > 0 and _sooner(label, heap[(at - 1) >> 1], labels, states, times):
        heap[at] = heap[(at - 1) >> 1]
        at = (at - 1) >> 1
    heap[at] = label


@njit(cache=True, nogil=True)
def _pop(heap: Shorts, labels: Ints, states: Shorts, times: Ints, sizes: Ints) -> int:
    top, at = heap[0], 0
    sizes[OPEN] -= 1
    num = sizes[OPEN]
    last = heap[num]
    while 2 * at + 1 < num:
        child = 2 * at + 1
        if child + 1 < num and _sooner(heap[child + 1], heap[child], labels, states, times):
            child += 1
        if not _sooner(heap[child], last, labels, states, times):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = last
    return top


@njit(cache=True, nogil=True)
def _arrivals(counts: Ints, kinds: Ints, waits: Ints, num_places: int, begins: Ints, waiting: Ints) -> int:
    """Where the arrivals of each kind begin in a label, and how many wait; how long the label is."""
    at = num_places
    for x in range(len(counts)):
        num = 0
        for n in range(kinds[x, FIRST_WAIT], kinds[x, END_WAIT]):
            before = counts[waits[n, 0]]
            num = num + before if kinds[x, COPIES] > 1 else max(num, before)
        waits_for_none = kinds[x, FIRST_WAIT] == kinds[x, END_WAIT] and kinds[x, COPIES] == 1
        waiting[x] = 0 if waits_for_none else num - counts[x]
        begins[x] = at
        at += waiting[x]
    return at


@njit(cache=True, nogil=True)
def _start(x: int, label: Ints, kinds: Ints, places: Ints, begins: Ints, waiting: Ints) -> int:
    """When the next of a kind may start: after its head, when its devices are free and what it waits for is there."""
    start = kinds[x, HEAD]
    for n in range(kinds[x, FIRST_PLACE], kinds[x, END_PLACE]):
        start = max(start, label[places[n]])
    if waiting[x] > 0:
        start = max(start, label[begins[x]])
    return start


@njit(cache=True, nogil=True)
def _held(counts: Ints, memory: Ints, held: Ints) -> None:
    """Bytes on each kept device."""
    held[:] = 0
    for x in range(len(counts)):
        for place in range(len(held)):
            held[place] += memory[x, place, NET] * counts[x]


@njit(cache=True, nogil=True)
def _least(
    counts: Ints,
    label: Ints,
    kinds: Ints,
    places: Ints,
    waits: Ints,
    memory: Ints,
    spans: Ints,
    by_tail: Ints,
    rooms: Ints,
    begins: Ints,
    waiting: Ints,
    starts: Ints,
    held: Ints,
) -> int:
    """As :meth:`.LeastSpan._least`."""
    num_kinds = len(counts)
    for x in range(num_kinds):
        starts[x] = NEVER
        if counts[x] == kinds[x, TOTAL]:
            continue
        start = _start(x, label, kinds, places, begins, waiting)
        if kinds[x, COPIES] == 1:
            for n in range(kinds[x, FIRST_WAIT], kinds[x, END_WAIT]):
                y = waits[n, 0]
                if counts[y] == counts[x]:
                    start = max(start, starts[y] + kinds[y, DURATION] + waits[n, 1])
        elif waiting[x] == 0:
            soonest = NEVER
            for n in range(kinds[x, FIRST_WAIT], kinds[x, END_WAIT]):
                y = waits[n, 0]
                soonest = min(soonest, starts[y] + kinds[y, DURATION] + waits[n, 1])
            start = max(start, soonest)
        starts[x] = start
    _held(counts, memory, held)
    for x in range(num_kinds):
        if counts[x] == kinds[x, TOTAL]:
            continue
        for n in range(kinds[x, FIRST_PLACE], kinds[x, END_PLACE]):
            place = places[n]
            room = rooms[place]
            if room < 0 or held[place] + memory[x, place, TAKES] + memory[x, place, BESIDE] <= room:
                continue
            soonest = NEVER
            for y in range(num_kinds):
                if memory[y, place, NET] < 0 and counts[y] < kinds[y, TOTAL]:
                    soonest = min(soonest, starts[y] + kinds[y, DURATION])
            starts[x] = max(starts[x], soonest)
    least = 0
    for x in range(num_kinds):
        left = kinds[x, TOTAL] - counts[x]
        if left == 0:
            continue
        least = max(least, starts[x] + left * kinds[x, DURATION] + kinds[x, TAIL])
        if waiting[x] > 1:
            last = label[begins[x] + waiting[x] - 1]
            least = max(least, last + (left - waiting[x] + 1) * kinds[x, DURATION] + kinds[x, TAIL])
        if kinds[x, SPANS] >= 0:
            least = max(least, starts[x] + spans[kinds[x, SPANS] + left])
    for place in range(len(rooms)):
        work, soonest = 0, NEVER
        for n in range(1, by_tail[place, 0] + 1):
            x = by_tail[place, n]
            left = kinds[x, TOTAL] - counts[x]
            if left > 0:
                work += left * kinds[x, DURATION]
                soonest = min(soonest, starts[x])
                least = max(least, soonest + work + kinds[x, TAIL])
    return least


@njit(cache=True, nogil=True)
def _able(
    x: int,
    counts: Ints,
    kinds: Ints,
    places: Ints,
    waits: Ints,
    memory: Ints,
    rooms: Ints,
    held: Ints,
    waiting: Ints,
) -> bool:
    """Whether one of a kind may start: there are some left, what it waits for has begun, and there is room."""
    if counts[x] == kinds[x, TOTAL]:
        return False
    if kinds[x, COPIES] > 1:
        if waiting[x] <= 0:
            return False
    else:
        for n in range(kinds[x, FIRST_WAIT], kinds[x, END_WAIT]):
            if counts[waits[n, 0]] <= counts[x]:
                return False
    for n in range(kinds[x, FIRST_PLACE], kinds[x, END_PLACE]):
        place = places[n]
        taken = memory[x, place, TAKES] + memory[x, place, BESIDE]
        if rooms[place] >= 0 and held[place] + taken > rooms[place]:
            return False
    return True


@njit(cache=True, nogil=True)
def _harmless(x: int, kinds: Ints, places: Ints, memory: Ints, by_tail: Ints, rooms: Ints, held: Ints) -> bool:
    """As :meth:`.LeastSpan._harmless`."""
    for n in range(kinds[x, FIRST_PLACE], kinds[x, END_PLACE]):
        place = places[n]
        room, taken, most = rooms[place], memory[x, place, TAKES], 0
        if room < 0 or taken == 0:
            continue
        for m in range(1, by_tail[place, 0] + 1):
            y = by_tail[place, m]
            if y != x:
                if memory[y, place, TAKES] != 0:
                    return False
                most = max(most, memory[y, place, BESIDE])
        if held[place] + taken + most > room:
            return False
    return True


@njit(cache=True, nogil=True)
def _ends_first(x: int, other: int, starts: Ints, kinds: Ints) -> bool:
    """Which of two ends first; of equal ones that which takes time, and then that of the lower number."""
    end, others = starts[x] + kinds[x, DURATION], starts[other] + kinds[other, DURATION]
    return end < others or (end == others and kinds[x, DURATION] > 0 and kinds[other, DURATION] == 0)


@njit(cache=True, nogil=True)
def _leaves(x: int, other: int, starts: Ints, kinds: Ints) -> bool:
    """Whether starting a kind next leaves a gap in which another could have been completed."""
    if other < 0 or other == x:
        return False
    end = starts[other] + kinds[other, DURATION]
    return end < starts[x] or (end == starts[x] and (kinds[other, DURATION] > 0 or other < x))


@njit(cache=True, nogil=True)
def _label(
    x: int,
    start: int,
    after: Ints,
    label: Ints,
    kinds: Ints,
    places: Ints,
    follows: Ints,
    num_places: int,
    begins: Ints,
    waiting: Ints,
    new_begins: Ints,
    new_waiting: Ints,
    new: Ints,
) -> None:
    """As :meth:`.LeastSpan._label`."""
    end = start + kinds[x, DURATION]
    for place in range(num_places):
        new[place] = max(label[place], start)
    for n in range(kinds[x, FIRST_PLACE], kinds[x, END_PLACE]):
        new[places[n]] = end
    for y in range(len(after)):
        num = new_waiting[y]
        if num == 0:
            continue
        to, first = new_begins[y], begins[y] + (y == x)
        kept = max(begins[y] + waiting[y] - first, 0)
        for n in range(kept):
            new[to + n] = label[first + n]
        lag = follows[x, y]
        if kinds[y, COPIES] > 1:
            if lag != -NEVER:
                at = kept
                while at > 0 and new[to + at - 1] > end + lag:
                    new[to + at] = new[to + at - 1]
                    at -= 1
                new[to + at] = end + lag
        else:
            for n in range(kept, num):
                new[to + n] = 0
            if lag != -NEVER:
                at = to + after[x] - 1 - after[y]
                new[at] = max(new[at], end + lag)
        time = kinds[y, HEAD]
        for n in range(kinds[y, FIRST_PLACE], kinds[y, END_PLACE]):
            time = max(time, new[places[n]])
        for n in range(num):
            new[to + n] = max(new[to + n], time)
            time = new[to + n] + kinds[y, DURATION]


@njit(cache=True, nogil=True)
def _covers(a: Ints, at: int, b: Ints, other: int, num: int) -> bool:
    """Whether times are nowhere later than others."""
    n = 0
    while n < num and a[at + n] <= b[other + n]:
        n += 1
    return n == num


@njit(cache=True, nogil=True)
def _superfluous(new: Ints, state: np.int64, states: Shorts, labels: Ints, times: Ints) -> bool:
    """Whether a label of the same state covers a new one; if not, those that it covers go."""
    num, label = states[state, LONG], int64(states[state, NEWEST])
    while label >= 0:
        if _covers(times, labels[label, AT], new, 0, num):
            return True
        label = labels[label, OLDER]
    label, newer = int64(states[state, NEWEST]), int64(-1)
    while label >= 0:
        if not _covers(new, 0, times, labels[label, AT], num):
            newer = label
        elif newer < 0:
            labels[label, SUPERFLUOUS], states[state, NEWEST] = 1, labels[label, OLDER]
        else:
            labels[label, SUPERFLUOUS], labels[newer, OLDER] = 1, labels[label, OLDER]
        label = labels[label, OLDER]
    return False


@njit(cache=True, nogil=True)
def _add(
    least: int,
    begun: int,
    before: int,
    counts: Ints,
    new: Ints,
    long: int,
    states: Shorts,
    table: Shorts,
    labels: Ints,
    times: Ints,
    heap: Shorts,
    sizes: Ints,
) -> None:
    """Keep a label that another one does not make superfluous."""
    state, at = _place(counts, states, table)
    if state < 0:
        state = sizes[STATES]
        sizes[STATES] += 1
        states[state, :-2] = counts
        states[state, LONG], states[state, NEWEST], table[at] = long, -1, state
    elif _superfluous(new, state, states, labels, times):
        return
    label, first = sizes[LABELS], sizes[TIMES]
    sizes[LABELS] += 1
    sizes[TIMES] += long
    times[first : first + long] = new[:long]
    labels[label, LEAST], labels[label, BEGUN], labels[label, STATE], labels[label, AT] = least, begun, state, first
    labels[label, OLDER], labels[label, SUPERFLUOUS], states[state, NEWEST] = states[state, NEWEST], 0, label
    labels[label, BEFORE] = before
    _push(label, heap, labels, states, times, sizes)


@njit(cache=True, nogil=True)
def begin(first: Ints, facts: SpanFacts, store: SpanStore, sizes: Ints) -> None:
    """The label with which everything begins: devices that are free from so many ns on."""
    kinds, places, waits, _, memory, spans, by_tail, rooms = facts
    states, table, labels, times, heap = store
    counts, starts = np.zeros(len(kinds), np.int64), np.empty(len(kinds), np.int64)
    begins, waiting, held = np.empty_like(counts), np.empty_like(counts), np.empty_like(rooms)
    long = _arrivals(counts, kinds, waits, len(rooms), begins, waiting)
    least = _least(counts, first, kinds, places, waits, memory, spans, by_tail, rooms, begins, waiting, starts, held)
    if least < NEVER:
        _add(least, 0, -1, counts, first, long, states, table, labels, times, heap, sizes)


@njit(cache=True, nogil=True)
def advance(num_labels: int, below: int, entry: int, facts: SpanFacts, store: SpanStore, sizes: Ints) -> int:
    """As :meth:`.LeastSpan.advance`, as long as there is room."""
    kinds, places, waits, follows, memory, spans, by_tail, rooms = facts
    states, table, labels, times, heap = store
    num_kinds, num_places = len(kinds), len(rooms)
    most = num_places + kinds[:, TOTAL].sum()
    counts, starts, earliest = np.empty((3, num_kinds), np.int64)
    begins, waiting, new_begins, new_waiting = np.empty((4, num_kinds), np.int64)
    held, other = np.empty((2, num_places), np.int64)
    able, new = np.empty(num_kinds, np.bool_), np.empty(most + 1, np.int64)
    for _ in range(num_labels):
        if sizes[OPEN] == 0 or labels[heap[0], LEAST] >= below:
            sizes[BOUND] = max(sizes[BOUND], below)
            return DONE
        if (
            sizes[STATES] + num_kinds >= len(states)
            or sizes[LABELS] + num_kinds >= len(labels)
            or sizes[TIMES] + num_kinds * most >= len(times)
            or sizes[OPEN] + num_kinds >= len(heap)
        ):
            return FULL
        looked_at = _pop(heap, labels, states, times, sizes)
        least_here, begun, state, at = labels[looked_at, :4]
        sizes[BOUND] = max(sizes[BOUND], least_here)
        counts[:] = states[state, :-2]
        if (counts == kinds[:, TOTAL]).all() or (entry >= 0 and counts[entry] == kinds[entry, TOTAL]):
            sizes[COMPLETE] = looked_at
            return DONE
        sizes[LOOKED_AT] += 1
        if labels[looked_at, SUPERFLUOUS]:
            continue
        label = times[at : at + states[state, LONG]]
        _arrivals(counts, kinds, waits, num_places, begins, waiting)
        _held(counts, memory, held)
        # Of what may be completed in a gap at no loss, the two that end first.
        first, second = -1, -1
        for x in range(num_kinds):
            able[x] = _able(x, counts, kinds, places, waits, memory, rooms, held, waiting)
            if not able[x]:
                continue
            earliest[x] = _start(x, label, kinds, places, begins, waiting)
            if not _harmless(x, kinds, places, memory, by_tail, rooms, held):
                continue
            if first < 0 or _ends_first(x, first, earliest, kinds):
                first, second = x, first
            elif second < 0 or _ends_first(x, second, earliest, kinds):
                second = x
        for x in range(num_kinds):
            if not able[x] or _leaves(x, first, earliest, kinds) or _leaves(x, second, earliest, kinds):
                continue
            end = earliest[x] + kinds[x, DURATION]
            rest = end + kinds[x, TAIL] + (kinds[x, TOTAL] - counts[x] - 1) * kinds[x, DURATION]
            if rest >= below:
                continue
            counts[x] += 1
            long = _arrivals(counts, kinds, waits, num_places, new_begins, new_waiting)
            _label(
                x,
                earliest[x],
                counts,
                label,
                kinds,
                places,
                follows,
                num_places,
                begins,
                waiting,
                new_begins,
                new_waiting,
                new,
            )
            least = _least(
                counts,
                new,
                kinds,
                places,
                waits,
                memory,
                spans,
                by_tail,
                rooms,
                new_begins,
                new_waiting,
                starts,
                other,
            )
            least = max(least, max(rest, least_here))
            if least < below:
                _add(least, begun + 1, looked_at, counts, new, long, states, table, labels, times, heap, sizes)
            counts[x] -= 1
    return GOES_ON
