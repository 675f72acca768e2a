"""The repetend in the order of actions: replaying it for more micro-batches, and finding it in a schedule.

A repetend (Tessel III-C) is said by ``first`` and ``unroll``: on each device the *copy* is a contiguous run in
which every operation of the device occurs ``unroll`` times, on micro-batches ``first[operation]`` and on. What
runs before it is the prefix, what runs after it the suffix. With ``first[source] >= first[target]`` for every
dependency, nothing in a copy waits for a later copy, so prefix, any number of copies and suffix can be strung
together without deadlock. A copy gives back what it takes, so memory stays as it was.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, takewhile
from operator import eq, sub

from pipeplan.errors import InvalidPlanError, UsageError
from pipeplan.model.base import MAX_COUNT
from pipeplan.model.plan import Repetend
from pipeplan.model.workload import Workload
from pipeplan.simulate.timing import Orders, TaskGraph

__all__ = ["extend", "find_repetend", "repetend_time", "steady_bubble_rate", "work_bound"]

_STEADY_TASKS = 400_000
"""The longest replay, in actions, in which a repetend must become periodic to count as one."""

_SWEPT_UNROLL = 8
"""Unrolls up to this are looked for at every moment of a run, larger ones where a sample of moments shows them."""

_SAMPLES = 16


def extend(
    workload: Workload, orders: Orders, repetend: Repetend | None, num_microbatches: int
) -> tuple[Workload, list[list[int]]]:
    """The same schedule for more micro-batches, by repeating the repetend (Tessel III-C).

    Returns the larger workload and, per device, its order as task numbers of the larger workload's graph.

    Raises:
        UsageError: no repetend, fewer micro-batches than there are, or a number the unroll does not reach.
        InvalidPlanError: the orders do not contain the repetend as stated.
    """
    before = workload.num_microbatches
    if num_microbatches == before:
        return workload, [list(order) for order in orders]
    if repetend is None:
        raise UsageError(
            f"the plan has no repetend, so it holds for its {before} micro-batches only; search one for "
            f"{num_microbatches}: pipeplan search PROFILE --microbatches {num_microbatches}"
        )
    _require_cut(workload, repetend.first)
    copies = _num_copies(before, repetend.unroll, num_microbatches)
    larger = workload.with_microbatches(num_microbatches)
    return larger, [
        _extended(workload, device, order, repetend, copies, num_microbatches) for device, order in enumerate(orders)
    ]


def steady_bubble_rate(workload: Workload, repetend: Repetend) -> float:
    """``1 - sum over devices of busy time per repetend / (D * repetend)`` (Tessel Fig. 11, 12, Table II)."""
    busy = sum(_work(workload)) * repetend.unroll
    return 1 - busy / (len(workload.devices) * repetend.repetend_ns)


def work_bound(workload: Workload) -> int:
    """Work of the busiest device for one micro-batch, in ns: no period is shorter."""
    return max(_work(workload))


def repetend_time(
    workload: Workload, orders: Orders, first: Mapping[str, int], unroll: int, *, max_tasks: int = _STEADY_TASKS
) -> int | None:
    """Time from one repetition to the next, in ns, once a long replay of the copies has become periodic.

    This is by how much each copy more lengthens the makespan. None if consecutive copies do not come to equal
    distances within ``max_tasks`` actions, for instance when they alternate and only a multiple of the unroll is
    periodic.

    Raises:
        InvalidPlanError: the orders do not contain such a copy.
    """
    _require_cut(workload, first)
    runs = [_copy_of(workload, device, order, first, unroll)[1] for device, order in enumerate(orders)]
    begins = [first[operation.id] for operation in workload.operations]
    steady = _steady_state(workload, runs, begins, unroll, max_tasks)
    return steady[1] if steady is not None and steady[0] == 1 else None


def find_repetend(
    graph: TaskGraph, orders: Orders, starts: Sequence[int], max_unroll: int | None = None
) -> Repetend | None:
    """The repetend of a schedule, or None if it has none that reaches over at most half its micro-batches.

    A moment cuts every device's order in two, and no dependency points back over the cut. It begins a repetend
    if on every device the next actions contain every operation ``unroll`` times. Least time per micro-batch wins,
    then least unroll, then least span, then the earliest cut in the middle half of the run.

    Unrolls up to 8 are looked for at every moment; larger ones where one of 16 moments spread over the run
    shows them, which finds any that lasts a sixteenth of the run.
    """
    _require_equal_sizes(graph.workload)
    search = _Search.of(graph, orders, starts)
    if search is None:
        return None
    limit = graph.workload.num_microbatches // 2
    bound = work_bound(graph.workload)
    best, best_time = None, 0
    unrolls = search.unrolls(min(limit, max_unroll or limit))
    for unroll in unrolls:
        for cut in search.cuts(unroll):
            cycle, time = search.steady_state(cut)
            if cycle == 1 and (best is None or cut.rank(time) < best.rank(best_time)):
                best, best_time = cut, time
            elif cycle > 1 and unroll * cycle <= limit and unroll * cycle not in unrolls:
                insort(unrolls, unroll * cycle)  # distances alternate: periodic over that many copies
        if best is not None and best_time == bound * best.unroll:
            break  # nothing beats the work bound
    if best is None:
        return None
    ids = [operation.id for operation in graph.workload.operations]
    return Repetend(unroll=best.unroll, repetend_ns=best_time, first=dict(zip(ids, best.first, strict=True)))


# ---------------------------------------------------------------- extension


def _num_copies(before: int, unroll: int, wanted: int) -> int:
    """How many copies more give the wanted number of micro-batches."""
    if wanted < before:
        raise UsageError(
            f"the plan has {before} micro-batches and can be replayed with more, not with {wanted}; "
            f"search one for fewer: pipeplan search PROFILE --microbatches {wanted}"
        )
    copies, rest = divmod(wanted - before, unroll)
    if rest:
        raise UsageError(
            f"the plan's {before} micro-batches grow by {unroll} at a time (its repetend's unroll), so {wanted} "
            f"cannot be reached; the nearest are --microbatches {wanted - rest} and {wanted - rest + unroll}"
        )
    return copies


def _extended(
    workload: Workload, device: int, order: Sequence[int], repetend: Repetend, copies: int, num_microbatches: int
) -> list[int]:
    """Prefix, copy shifted by 0, U, ... kU micro-batches, suffix shifted by kU."""
    prefix, copy, suffix = _copy_of(workload, device, order, repetend.first, repetend.unroll)
    unroll = repetend.unroll
    renumbered = [operation * num_microbatches + m for operation, m in prefix]
    for k in range(copies + 1):
        renumbered += [operation * num_microbatches + m + k * unroll for operation, m in copy]
    renumbered += [operation * num_microbatches + m + copies * unroll for operation, m in suffix]
    return renumbered


_Entry = tuple[int, int]  # operation's index, micro-batch


def _copy_of(
    workload: Workload, device: int, order: Sequence[int], first: Mapping[str, int], unroll: int
) -> tuple[list[_Entry], list[_Entry], list[_Entry]]:
    """Prefix, copy and suffix of one device's order, as (operation, micro-batch).

    Raises:
        InvalidPlanError: the order is not made like that; the text names the first action out of place.
    """
    entries = [divmod(task, workload.num_microbatches) for task in order]
    here = sorted({operation for operation, _ in entries})
    begins = {operation: first[workload.operations[operation].id] for operation in here}
    begin = sum(begins.values())
    end = begin + unroll * len(here)
    parts = entries[:begin], entries[begin:end], entries[end:]
    for part, name, low, high in zip(
        parts, ("before", "inside", "after"), (0, 0, unroll), (0, unroll, None), strict=True
    ):
        for operation, m in part:
            at_least = 0 if name == "before" else begins[operation] + low
            below = workload.num_microbatches if high is None else begins[operation] + high
            if not at_least <= m < below:
                text = f"{workload.operations[operation].id}{m}"
                raise InvalidPlanError(
                    f"device {device} runs {text} {name} the repetend, where repetend.first "
                    f"{begins[operation]} and unroll {unroll} leave micro-batches {at_least} to {below - 1}"
                )
    return parts


def _require_cut(workload: Workload, first: Mapping[str, int]) -> None:
    """Equal micro-batch sizes, and no action of a copy that waits for a later copy."""
    _require_equal_sizes(workload)
    for dependency in workload.dependencies:
        source, target = dependency.source, dependency.target
        if first[source] < first[target]:
            raise InvalidPlanError(
                f"repetend.first has {target} from micro-batch {first[target]} and {source}, which it waits for, "
                f"from {first[source]}: a copy would wait for a later one"
            )


def _require_equal_sizes(workload: Workload) -> None:
    for index, stage in enumerate(workload.stages):
        if stage.microbatch_size != workload.microbatch_size:
            raise UsageError(
                f"a repetend needs one micro-batch size for all stages; stages[{index}] has "
                f"{stage.microbatch_size}, the plan {workload.microbatch_size}"
            )


def _work(workload: Workload) -> list[int]:
    """Work of each device for one micro-batch, in ns."""
    work = [0] * len(workload.devices)
    for operation in workload.operations:
        for device in workload.stages[operation.stage].devices:
            work[device] += operation.duration_ns
    return work


# ---------------------------------------------------------------- the steady state


def _steady_state(
    workload: Workload, runs: Sequence[Sequence[_Entry]], first: Sequence[int], unroll: int, max_tasks: int
) -> tuple[int, int] | None:
    """(cycle, time): every ``cycle`` copies shift by ``time`` ns when copies run without end.

    Starts obey a recurrence in (max, +), where a copy depends on the few before it. When over that many copies
    every start has moved on by the same amount per cycle, and none waits for one that moves faster, it stays so
    for ever, and the fastest growth is that of the makespan. ``runs`` [device] is one copy. None if that does not
    come about within ``max_tasks`` actions.
    """
    copy = _CopyGraph.of(workload, runs, first, unroll)
    if copy is None:
        return None
    starts: list[list[int]] = []
    num_copies = 2 * copy.reach + 12
    while num_copies * copy.num_tasks <= max_tasks:
        copy.run(starts, num_copies)
        for cycle in range(1, num_copies - copy.reach):
            shift = copy.steady_shift(starts, cycle)
            if shift is not None:
                return cycle, max(shift)
        num_copies *= 2
    return None


@dataclass(frozen=True, slots=True)
class _CopyGraph:
    """One copy as tasks, and what each waits for: (copies back, task, time from its start), in a runnable order."""

    order: list[int]
    waits: list[list[tuple[int, int, int]]]
    reach: int

    @property
    def num_tasks(self) -> int:
        return len(self.order)

    @classmethod
    def of(
        cls, workload: Workload, runs: Sequence[Sequence[_Entry]], first: Sequence[int], unroll: int
    ) -> _CopyGraph | None:
        """None if the actions of one copy wait for each other."""
        operations = workload.operations
        waits: list[list[tuple[int, int, int]]] = [[] for _ in range(len(operations) * unroll)]
        position = {operation.id: index for index, operation in enumerate(operations)}
        for dependency in workload.dependencies:
            source, target = position[dependency.source], position[dependency.target]
            delay = operations[source].duration_ns + dependency.lag_ns
            for u in range(unroll):
                ahead, back = divmod(first[target] + u - first[source], unroll)
                waits[target * unroll + u].append((-ahead, source * unroll + back, delay))
        for run in runs:
            tasks = [operation * unroll + m - first[operation] for operation, m in run]
            for before, after in zip(tasks, tasks[1:], strict=False):
                waits[after].append((0, before, operations[before // unroll].duration_ns))
            if tasks:
                waits[tasks[0]].append((1, tasks[-1], operations[tasks[-1] // unroll].duration_ns))
        order = _topological(waits)
        reach = max((back for wait in waits for back, _, _ in wait), default=0)
        return None if order is None else cls(order, waits, max(1, reach))

    def run(self, starts: list[list[int]], num_copies: int) -> None:
        """Continue ``starts`` [copy][task] in ns to ``num_copies`` copies, each task as soon as it can."""
        for k in range(len(starts), num_copies):
            now = [0] * self.num_tasks
            for task in self.order:
                begin = 0
                for back, other, delay in self.waits[task]:
                    if back == 0:
                        ready = now[other] + delay
                    elif back <= k:
                        ready = starts[k - back][other] + delay
                    else:
                        continue
                    if ready > begin:
                        begin = ready
                now[task] = begin
            starts.append(now)

    def steady_shift(self, starts: Sequence[Sequence[int]], cycle: int) -> list[int] | None:
        """Shift of each task over ``cycle`` copies if it will stay as it is, in ns; else None."""
        shift = [after - before for before, after in zip(starts[-1 - cycle], starts[-1], strict=True)]
        for k in range(len(starts) - self.reach - cycle, len(starts) - 1):
            moved = map(sub, starts[k], starts[k - cycle])
            if not all(map(eq, moved, shift)):
                return None
        if any(shift[other] > shift[task] for task in self.order for _, other, _ in self.waits[task]):
            return None
        return shift


def _topological(waits: Sequence[Sequence[tuple[int, int, int]]]) -> list[int] | None:
    """Tasks of one copy so that none comes before one of the same copy it waits for; None if there is a cycle."""
    waiting = [sum(back == 0 for back, _, _ in wait) for wait in waits]
    followers: list[list[int]] = [[] for _ in waits]
    for task, wait in enumerate(waits):
        for back, other, _ in wait:
            if back == 0:
                followers[other].append(task)
    order = [task for task, count in enumerate(waiting) if count == 0]
    for task in order:
        for other in followers[task]:
            waiting[other] -= 1
            if waiting[other] == 0:
                order.append(other)
    return order if len(order) == len(waits) else None


# ---------------------------------------------------------------- detection


@dataclass(frozen=True, slots=True)
class _Line:
    """One device's order, prepared for looking up windows.

    ``entries`` and ``times`` [position]. ``balance`` [position] is equal at two positions exactly if between them
    every operation occurs equally often: it numbers the vectors of counts relative to the first operation's.
    """

    entries: list[_Entry]
    times: list[int]
    balance: list[int]
    num_operations: int

    @classmethod
    def of(cls, entries: list[_Entry], times: list[int]) -> _Line | None:
        """None if an operation does not run its micro-batches in turn: then first and unroll say nothing."""
        place = {operation: index for index, operation in enumerate(sorted({operation for operation, _ in entries}))}
        done = [0] * len(place)
        numbers: dict[tuple[int, ...], int] = {}
        balance = [numbers.setdefault(tuple(done), 0)]
        for operation, m in entries:
            index = place[operation]
            if m != done[index]:
                return None
            done[index] += 1
            relative = tuple(count - done[0] for count in done)
            balance.append(numbers.setdefault(relative, len(numbers)))
        return cls(entries, times, balance, len(place))

    def window(self, position: int, unroll: int) -> list[_Entry]:
        """The next actions, ``unroll`` for each operation."""
        return self.entries[position : position + unroll * self.num_operations]

    def is_balanced(self, position: int, unroll: int) -> bool:
        """Whether the window at a position holds every operation ``unroll`` times."""
        end = position + unroll * self.num_operations
        return end < len(self.balance) and self.balance[position] == self.balance[end]

    def repeats(self, position: int, unroll: int) -> int:
        """For how many micro-batches of each operation the order goes on as in the window of this unroll."""
        width = unroll * self.num_operations
        if width == 0:
            return MAX_COUNT
        operations = [operation for operation, _ in islice(self.entries, position, None)]
        same = map(eq, operations, islice(operations, width, None))
        return unroll + sum(1 for _ in takewhile(bool, same)) // self.num_operations

    def balanced(self, unroll: int) -> list[bool]:
        """The same for all positions."""
        found = list(map(eq, self.balance, islice(self.balance, unroll * self.num_operations, None)))
        return found + [False] * (len(self.balance) - len(found))


@dataclass(frozen=True, slots=True)
class _Cut:
    """A moment at which a repetend begins: ``positions`` [device] in the orders, ``first`` [operation]."""

    unroll: int
    moment: int
    positions: tuple[int, ...]
    first: tuple[int, ...]
    off_middle: bool

    @property
    def place(self) -> tuple[int, bool, int]:
        """Of cuts with equal time and unroll, the smaller is the better: span, then where in the run it is."""
        return (max(self.first) - min(self.first) + self.unroll, self.off_middle, self.moment)

    def rank(self, time: int) -> tuple[Fraction, int, tuple[int, bool, int]]:
        """Of all cuts, the smaller is the better; ``time`` is that of the repetend, in ns."""
        return (Fraction(time, self.unroll), self.unroll, self.place)


@dataclass(frozen=True, slots=True)
class _Search:
    """A schedule in which repetends are looked for; ``steps`` are its distinct moments with who starts then."""

    workload: Workload
    lines: list[_Line]
    steps: list[tuple[int, list[int]]]
    makespan: int
    steady: dict[object, tuple[int, int]]

    @classmethod
    def of(cls, graph: TaskGraph, orders: Orders, starts: Sequence[int]) -> _Search | None:
        """None if some operation does not run its micro-batches in turn."""
        n = graph.workload.num_microbatches
        lines = []
        for order in orders:
            line = _Line.of([divmod(task, n) for task in order], [starts[task] for task in order])
            if line is None:
                return None
            lines.append(line)
        steps: dict[int, list[int]] = {}
        for device, line in enumerate(lines):
            for time in line.times:
                steps.setdefault(time, []).append(device)
        makespan = max(start + duration for start, duration in zip(starts, graph.durations, strict=True))
        return cls(graph.workload, lines, sorted(steps.items()), makespan, {})

    def unrolls(self, limit: int) -> list[int]:
        """Unrolls worth a sweep, ascending."""
        shown = set(range(1, min(limit, _SWEPT_UNROLL) + 1))
        stride = max(1, len(self.steps) // _SAMPLES)
        positions = [0] * len(self.lines)
        for index, (_, devices) in enumerate(self.steps):
            if index % stride == 0:
                shown.update(self._unrolls_at(positions, limit))
            for device in devices:
                positions[device] += 1
        return sorted(shown)

    def _unrolls_at(self, positions: Sequence[int], limit: int) -> Iterator[int]:
        """Unrolls of repetends that begin at a cut, without those that only repeat a smaller one.

        One that goes on for a quarter of the run is the steady state: larger ones add nothing.
        """
        smaller: list[tuple[int, int]] = []
        for unroll in range(1, limit + 1):
            if any(unroll % small == 0 and unroll <= reach for small, reach in smaller):
                continue
            if all(line.is_balanced(at, unroll) for line, at in zip(self.lines, positions, strict=True)):
                reach = min(line.repeats(at, unroll) for line, at in zip(self.lines, positions, strict=True))
                smaller.append((unroll, reach))
                yield unroll
                if reach >= max(2 * unroll, self.workload.num_microbatches // 4):
                    return

    def cuts(self, unroll: int) -> Iterator[_Cut]:
        """Moments at which a repetend begins, the best of each run of consecutive ones.

        Between moments a device moves on by at most one action. If its windows are balanced at both, the second
        is the first without its first action and with that action's next repetition: both continue to the same
        endless order, so all moments of a run have the same time.
        """
        balanced = [line.balanced(unroll) for line in self.lines]
        if not all(map(any, balanced)):
            return
        home = [self.workload.stages[operation.stage].devices[0] for operation in self.workload.operations]
        positions, first = [0] * len(self.lines), [0] * len(home)
        missing = sum(not flags[0] for flags in balanced)
        best: _Cut | None = None
        until = -1
        in_middle = False
        for moment, devices in self.steps:
            if missing == 0:
                if best is None or in_middle != self._in_middle(moment):
                    in_middle = self._in_middle(moment)
                    until = first[0] + unroll  # cuts after one repetition are like those before
                if first[0] <= until:
                    cut = _Cut(unroll, moment, tuple(positions), tuple(first), not in_middle)
                    best = cut if best is None or cut.place < best.place else best
            elif best is not None:
                yield best
                best = None
            for device in devices:
                at = positions[device]
                operation = self.lines[device].entries[at][0]
                first[operation] += home[operation] == device
                missing += balanced[device][at] - balanced[device][at + 1]
                positions[device] = at + 1
        if best is not None:
            yield best

    def _in_middle(self, moment: int) -> bool:
        return self.makespan <= 4 * moment <= 3 * self.makespan

    def steady_state(self, cut: _Cut) -> tuple[int, int]:
        """(cycle, time in ns) of the repetend, once for cuts that continue to the same endless order.

        Cycle 0 says that the replay does not become periodic.
        """
        windows = [line.window(at, cut.unroll) for line, at in zip(self.lines, cut.positions, strict=True)]
        key = tuple(_endless(window, cut.unroll) for window in windows)
        if key not in self.steady:
            found = _steady_state(self.workload, windows, cut.first, cut.unroll, _STEADY_TASKS)
            self.steady[key] = found or (0, 0)
        return self.steady[key]


def _endless(window: Sequence[_Entry], unroll: int) -> tuple[_Entry, ...]:
    """The endless order a window continues to, read from micro-batch 0 of its first operation."""
    if not window:
        return ()
    anchor = min(operation for operation, _ in window)
    at = next(index for index, (operation, m) in enumerate(window) if operation == anchor and m % unroll == 0)
    base = window[at][1]
    return tuple(
        (operation, m - base + (unroll if index < at else 0))
        for index, (operation, m) in (*islice(enumerate(window), at, None), *islice(enumerate(window), at))
    )
