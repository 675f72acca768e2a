"""Bounds by what a few devices can do at best, one device alone first: they close what others leave under memory.

What one device does of n micro-batches takes at least ``span(n)``, from its first action to the end of everything, and
its entry, the action that all others there follow, starts for micro-batch n at least ``start(n)`` after that for the
first. Micro-batches from a on have done nothing there when theirs starts, so that

    start(a + b) >= start(a) + start(b)        span(a + b) >= start(a) + span(b)

if heads are ways from the entry alone (:meth:`.FewDevices.after`). Few of both, found exactly by
:class:`~pipeplan.workload.least_span.LeastSpan`, are so bounds for any number of micro-batches, ``start(n) / n`` is one
on the period, for any unroll, and both lead the exact search for all of them.

Of many, room says as much: where c micro-batches fit beside each other from the entry on to what gives that back, which
takes t, the (n + c)-th enters when n + 1 have given it back, so that start(n + c) >= start(n) + t.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from types import ModuleType
from typing import NamedTuple

from pipeplan.search_constants import (
    COMPILED_FROM_LABELS,
    FEW_KINDS,
    FEW_LABELS,
    FEW_TASKS,
    FIRST_ALONE,
    FIRST_ROUND,
    LABEL_ROUNDS,
    LABELS_ALONE,
    LABELS_AT_ONCE,
    LABELS_MORE,
    LEAST_GROUPS,
    MOST_ALONE,
    MOST_KNOWN,
    MOST_SEARCHED,
    MOST_STORED_BYTES,
    NEARLY_PROVED,
    SMALL_GROUP,
    SMALL_GROUP_TOGETHER,
    TOGETHER_MORE,
    TOGETHER_SOON,
)
from pipeplan.workload.compiled_span import CompiledSpan, compiled_loops
from pipeplan.workload.few_devices import FewDevices
from pipeplan.workload.least_span import LeastSpan
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.shared_time import WithoutSharedTime
from pipeplan.workload.task_graph import NEVER

Devices = tuple[int, ...]


class KeptDevices(NamedTuple):
    """Devices that are kept as they are, and ``more``, of which only what others wait for is."""

    whole: Devices
    more: Devices = ()


class Stay(NamedTuple):
    """How many micro-batches fit on a device at once, and for how many ns each stays from its entry on, at least."""

    num_microbatches: int
    ns: int


class DeviceAlone:
    """What is known about a device alone: exactly for few micro-batches, as bounds for any number."""

    def __init__(self, few: FewDevices, entry: int, stays: Sequence[Stay] = ()) -> None:
        self.few, self.entry = few.after(entry), entry
        self.head = few.kinds[entry].head
        self.most_labels = FEW_LABELS * FEW_KINDS // max(FEW_KINDS, len(few.kinds))
        self._stays = [stay for stay in stays if 0 < stay.num_microbatches <= MOST_SEARCHED]
        self._works = [*self._worked()]
        self._starts, self._spans = [0], [0]
        self._many: tuple[list[int], list[int]] | None = None

    def learn(self) -> int:
        """Start and span of one micro-batch more, or what is known of them soon; how many labels that took."""
        few = self.few.with_count(len(self._spans))
        begun = LeastSpan(few, {self.entry: [0, *self._starts, 0]}, self.entry)
        begun.advance(2 * self.most_labels, NEVER)
        ended = LeastSpan(few, {self.entry: [*self._spans, 0]})
        ended.advance(2 * self.most_labels, NEVER)
        self._starts.append(begun.bound - self.head)
        self._spans.append(ended.bound - self.head)
        self._many = None
        return begun.num_labels + ended.num_labels

    @property
    def period(self) -> Fraction:
        """Ns per micro-batch that no pattern is below, of any unroll."""
        return max((Fraction(ns, n) for n, ns in self._again()), default=Fraction(0))

    def span(self, num_microbatches: int) -> int:
        """Ns from the first start here to the end of everything, at least."""
        if num_microbatches < len(self._spans):
            return self._spans[num_microbatches]
        again, ns = max(self._again(), key=lambda each: Fraction(each[1], each[0]))
        times = max(0, -(-(num_microbatches - MOST_SEARCHED) // again))
        return times * ns + self.spans(num_microbatches - times * again)[-1]

    def spans(self, num_microbatches: int) -> list[int]:
        """[micro-batches] the same, up to a number of them."""
        starts, spans = self._many or (self._starts[:], self._spans[:])
        self._many, known = (starts, spans), range(1, len(self._starts))
        for n in range(len(spans), num_microbatches + 1):
            stays = [stay for stay in self._stays if stay.num_microbatches <= n]
            starts.append(
                max(
                    max(starts[few] + starts[n - few] for few in known),
                    max((starts[n - fit] + ns for fit, ns in stays), default=0),
                )
            )
            spans.append(
                max(
                    max(starts[few] + spans[n - few] for few in known),
                    max((spans[n - fit] + ns for fit, ns in stays), default=0),
                    max(n * work + beside for work, beside in self._works),
                )
            )
        return spans[: num_microbatches + 1]

    def _again(self) -> list[Stay]:
        """How long it takes from a micro-batch's entry to that of so many later."""
        return [*(Stay(n, self._starts[n]) for n in range(1, len(self._starts))), *self._stays]

    def _worked(self) -> Iterator[tuple[int, int]]:
        """Ns of a micro-batch's work of kinds with the longest tails, or heads, and the least before and after it."""
        for kinds in (
            sorted(self.few.kinds, key=lambda kind: -kind.tail),
            sorted(self.few.kinds, key=lambda kind: -kind.head),
        ):
            before, work, after = NEVER, 0, NEVER
            for kind in kinds:
                before, work = min(before, kind.head), work + kind.copies * kind.duration
                after = min(after, kind.tail)
                yield work, before - self.head + after


class FewDeviceBounds:
    """The bounds of a problem, which grow as long as there is time.

    ``bound`` and ``period`` are proved so far: ns of the iteration, and per micro-batch. ``num_labels`` is the work
    that it took. To what is proved of the problem so many ns are added, in all and for each micro-batch. With
    ``compiled``, which needs numba, much is done by compiled loops, from a moment on that no one knows before. Of each
    device alone at most ``most_known`` micro-batches are learned exactly. ``orders`` [device] are the tasks of a
    schedule as short as any but for messages in shared time, once all devices together have one.
    """

    def __init__(
        self,
        problem: OneMicrobatch,
        added_ns: int = 0,
        added_each_ns: int = 0,
        compiled: bool = True,
        most_known: int = MOST_KNOWN,
    ) -> None:
        self._compiled, self._problem, self._added, self._added_each = compiled, problem, added_ns, added_each_ns
        self._most_known = most_known
        self._below = NEVER
        self._growing = self._grow()
        self._alone: dict[int, DeviceAlone] = {}
        self._searches: dict[KeptDevices, LeastSpan | CompiledSpan] = {}
        self._proved: dict[KeptDevices, int] = {}
        self._few: dict[KeptDevices, FewDevices | None] = {}
        self.bound = self.num_labels = 0
        self.period = Fraction(0)
        self.orders: list[list[int]] | None = None
        self._worth_compiling = 0
        everywhere = [len(devices) == problem.num_devices for devices in problem.devices]
        self._few_of_all = any(everywhere) and problem.num_devices <= SMALL_GROUP_TOGETHER

    @property
    def together(self) -> bool:
        """Whether few devices have actions of all of them, and little is left to be proved of all devices together."""
        return self._few_of_all and self._below + self._added <= NEARLY_PROVED * self.bound

    @property
    def most_devices(self) -> int:
        """How many devices at most were looked at together."""
        return max((len(whole) + len(more) for whole, more in self._proved), default=0)

    @classmethod
    def all_of(
        cls, problem: OneMicrobatch, compiled: bool = True, most_known: int = MOST_KNOWN
    ) -> list[FewDeviceBounds]:
        """Of a problem as it is, and without the time of operations on all devices: of those that say something."""
        left, whole = WithoutSharedTime.of(problem), cls(problem, 0, 0, compiled, most_known)
        if left is None:
            return [whole]
        cut = cls(left.problem, left.all_ns, left.each_ns, compiled, most_known)
        return [cut, whole] if any(lag for _, _, lag in problem.edges) else [cut]

    def grow(self, below: int = NEVER) -> bool:
        """Work for some milliseconds; False if no more is to be had. Nothing needs to be proved from ``below`` on."""
        self._below = below - self._added
        return next(self._growing, False)

    def _grow(self) -> Iterator[bool]:
        """All work, part by part.

        Devices with a limit alone come first, then all devices if they are few, and that whose own bound is best with
        one more, with two, and so on: in rounds, in which each is looked at several times as long as in the one before.
        Where actions are of all of few devices, all of them ``together`` come before that, compiled as soon as may be.
        """
        problem = self._problem
        if problem.workload.needs:
            return
        limited = filter(self._may_fill, range(problem.num_devices))
        for device in sorted(limited, key=self._share, reverse=True)[:MOST_ALONE]:
            yield from self._learn(device)
        if not self._proved or problem.num_microbatches > MOST_SEARCHED:
            return
        most = FIRST_ROUND
        if self.together:
            yield from self._search(KeptDevices(tuple(range(problem.num_devices))), most)
        yield from self._best_alone()
        for number in range(LABEL_ROUNDS):
            looked_at = set[KeptDevices]()
            for kept in self._subsets(number):
                looked_at.add(kept)
                yield from self._search(kept, most)
                if sum(search.num_bytes for search in self._searches.values()) > MOST_STORED_BYTES:
                    return
            for kept in self._searches.keys() - looked_at:
                if not self._searches[kept].done:
                    del self._searches[kept]
            most *= LABELS_MORE

    def _best_alone(self) -> Iterator[bool]:
        """The device whose own bound is best: half of them are left after each round, which takes twice as long."""
        left: list[KeptDevices] = sorted(self._proved)
        most = FIRST_ALONE
        while left:
            for kept in left:
                yield from self._search(kept, most if len(left) > 1 else LABELS_ALONE)
            left = sorted(left, key=lambda kept: -self._proved[kept])[: len(left) // 2]
            most *= 2

    def _subsets(self, number: int) -> Iterator[KeptDevices]:
        """Those of a round, which is the ``number``-th: the best half of what is left of each size, at least three.

        There is one device more once it is known what the best of a size is. What one proves early says little of its
        end; in chains the first device and the last but one have proved most of all pairs that were tried.
        """
        everything = tuple(range(self._problem.num_devices))
        alone = [each for each in self._proved if len(each.whole) == 1 and not each.more]
        chosen = max(alone, key=lambda each: self._proved[each])
        if len(everything) <= SMALL_GROUP or self.together:
            yield KeptDevices(everything)
        yield chosen
        while len(chosen.whole) + len(chosen.more) < len(everything):
            others = [device for device in everything if device not in chosen.whole + chosen.more]
            larger = [chosen._replace(more=tuple(sorted((*chosen.more, device)))) for device in others]
            left = [each for each in larger if each not in self._searches or not self._searches[each].done]
            left.sort(key=lambda each: (everything[-2] not in each.more, -self._proved.get(each, 0)))
            yield from left[: max(LEAST_GROUPS, len(larger) >> number)]
            chosen = max(larger, key=lambda each: self._proved.get(each, 0))
            if chosen not in self._searches or not self._searches[chosen].done:
                return

    def _may_fill(self, device: int) -> bool:
        """Whether a device has no room for all micro-batches at once."""
        problem, capacity = self._problem, self._problem.capacity[device]
        if capacity is None:
            return False
        beside = max((problem.workspace[x] for x in problem.on_device[device]), default=0)
        each = sum(hold.size for hold in problem.holds_on(device))
        return each > 0 and problem.num_microbatches * each + beside > capacity

    def _share(self, device: int) -> Fraction:
        """Least period in ns of a device by Little's law."""
        problem, capacity = self._problem, self._problem.capacity[device]
        area = sum(hold.size * problem.path(hold.source, hold.target) for hold in problem.holds_on(device))
        return Fraction(area, capacity) if capacity else Fraction(0)

    def _stays(self, device: int, entry: int) -> list[Stay]:
        """Those by what an entry takes: with what each part of it is held for, all that is held as long or longer."""
        problem, room = self._problem, self._problem.capacity[device]
        if room is None:
            return []
        holds = [hold for hold in problem.holds_on(device) if hold.source == entry]
        found = list[Stay]()
        for target in {hold.target: None for hold in holds}:
            size = sum(hold.size for hold in holds if hold.target == target or problem.path(target, hold.target) >= 0)
            ns = problem.path(entry, target)
            if size > 0 and ns > 0:
                found.append(Stay((room - problem.workspace[entry]) // size, ns))
        return found

    def _learn(self, device: int) -> Iterator[bool]:
        """Few micro-batches on a device alone."""
        few = FewDevices.of(self._problem, (device,))
        if few is None:
            return
        if few.entries[0] is None:
            # Micro-batches come in several ways, of which nothing is learned; a search can look at all of them.
            self._prove(KeptDevices((device,)), 0)
            return
        (entry,) = few.operations[few.entries[0]]
        known = DeviceAlone(few, few.entries[0], self._stays(device, entry))
        begun = self.num_labels
        for _ in range(min(self._most_known, self._problem.num_microbatches)):
            labels = known.learn()
            self.num_labels += labels
            self._worth_compiling += labels
            yield True
            if self.num_labels > begun + known.most_labels:
                break
        self._alone[device] = known
        self.period = max(self.period, self._added_each + known.period)
        self._prove(KeptDevices((device,)), known.head + known.span(self._problem.num_microbatches))

    def _search(self, kept: KeptDevices, most_labels: int) -> Iterator[bool]:
        """Go on with some devices, or begin, until so many labels of theirs are looked at."""
        if kept not in self._few:
            self._few[kept] = FewDevices.of(self._problem, *kept)
        few = self._few[kept]
        if few is None:
            return
        everything = len(kept.whole) == self._problem.num_devices
        if everything and self.together and self._problem.num_operations * self._problem.num_microbatches > FEW_TASKS:
            self._worth_compiling += COMPILED_FROM_LABELS
        search = self._searches.get(kept) or self._begun(kept, few)
        size = max(1, len(few.kinds) // FEW_KINDS) ** 2
        while search.num_labels < self._most(kept, most_labels) and not search.done:
            before = search.num_labels
            search.advance(LABELS_AT_ONCE, self._below)
            self.num_labels += search.num_labels - before
            self._worth_compiling += (search.num_labels - before) * size
            self._prove(kept, search.bound)
            if search.sequence is not None and everything:
                self.orders = few.orders(self._problem, search.sequence)
            yield True
            if isinstance(search, CompiledSpan) or search.done or not self._loops():
                continue
            if search.num_labels < self._most(kept, most_labels):
                begun, search = search.num_labels, self._begun(kept, few)
                while search.num_labels < begun:
                    search.advance(LABELS_AT_ONCE, self._below)
                    yield True

    def _most(self, kept: KeptDevices, most_labels: int) -> int:
        """Labels of some devices in a round: more of all where actions are of all, most once loops are compiled."""
        if not self.together or not self._compiled or len(kept.whole) < self._problem.num_devices:
            return most_labels
        return most_labels * (TOGETHER_MORE if self._loops() else TOGETHER_SOON)

    def _begun(self, kept: KeptDevices, few: FewDevices) -> LeastSpan | CompiledSpan:
        """A search with some devices at its beginning."""
        loops, spans = self._loops(), self._spans(few, kept)
        self._searches[kept] = LeastSpan(few, spans) if loops is None else CompiledSpan(loops, few, spans)
        return self._searches[kept]

    def _loops(self) -> ModuleType | None:
        """The compiled loops, where there is so much to do that they are worth it, and they are there."""
        return compiled_loops() if self._compiled and self._worth_compiling > COMPILED_FROM_LABELS else None

    def _spans(self, few: FewDevices, kept: KeptDevices) -> dict[int, list[int]]:
        """What each of some devices says alone, by its entry."""
        return {
            entry: self._alone[device].spans(few.count)
            for entry, device in zip(few.entries, kept.whole + kept.more, strict=True)
            if entry is not None and device in self._alone
        }

    def _prove(self, kept: KeptDevices, bound: int) -> None:
        self._proved[kept] = max(self._proved.get(kept, 0), bound)
        self.bound = max(self.bound, self._added + bound)
