"""What a traced block does and holds where its element-wise work runs in fused kernels.

Torch runs operator by operator, each of which reads and writes memory. Compilers, and the kernels that large models are
trained with, run all that stands between two products as one. Here that is made of an operator-by-operator trace:

* Element-wise operators and reductions that follow each other are one kernel, also around a product that the one does
  not wait for, or that does not wait for the other. It reads once what comes from outside and writes once what others
  take.
* A product adds its result to another one's, or to a gradient, by itself (``beta = 1`` of a GEMM).
* What only element-wise kernels of backward take of forward is not held where it can be made again, element by element,
  of what is held anyway or takes fewer bytes: both SiLU and float32 copies inside of norms and losses, but not what a
  product takes. What is small, such as a row's statistics, is held.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeplan.costs.devices import Kernel
from pipeplan.runtime.profiling.instruments import Usage
from pipeplan.workload.kinds import Role, role_of

_SMALL = 16
"""An operator's results are statistics of its inputs if these have at least this many times their bytes."""


@dataclass(frozen=True, slots=True)
class View:
    """A part of a storage, in bytes; equal parts of it are the same."""

    storage: int
    part: Hashable
    size: int


@dataclass(frozen=True, slots=True)
class Step:
    """An operator of a trace: when, in which phase, what it reads, writes and makes.

    Without a ``kernel`` it stands for a message, whose time is known elsewhere; that of one is ``moved``, tensor by
    tensor, in bytes. It ``fuses`` with its neighbours, ``adds`` two tensors of one shape, makes nothing that can be
    made again where it is ``random``, and is of an attention ``core``.
    """

    at: int
    phase: int
    kernel: Kernel | None
    reads: tuple[View, ...]
    writes: tuple[View, ...]
    made: frozenset[int]
    fuses: bool
    adds: bool
    random: bool
    core: bool
    moved: tuple[int, ...] = ()


@dataclass(slots=True)
class BlockTrace:
    """What was noted of a block that ran: ``sizes`` of storages, ``born`` [storage made inside] and ``dead`` when,
    and ``phases`` with their names, begin and end. ``outputs`` are what others take of it.
    """

    steps: list[Step] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    born: dict[int, int] = field(default_factory=dict)
    dead: dict[int, int] = field(default_factory=dict)
    phases: list[tuple[str, int, int]] = field(default_factory=list)
    outputs: set[int] = field(default_factory=set)
    now: int = 0

    def tick(self) -> int:
        """The next moment."""
        self.now += 1
        return self.now

    def last(self, name: str) -> int:
        """The number of the last phase of a name."""
        return max(number for number, (known, *_) in enumerate(self.phases) if known == name)

    def lives(self, storage: int, moment: int) -> bool:
        """Whether a storage made inside is there."""
        return self.born[storage] <= moment < self.dead.get(storage, self.now + 1)


@dataclass(slots=True)
class _Joint:
    """Steps that run as one kernel: a product with what it adds, or what fuses."""

    phase: int
    steps: list[Step]
    fuses: bool
    added: set[int] = field(default_factory=set)

    @property
    def made(self) -> set[int]:
        """Storages that it makes."""
        return {storage for step in self.steps for storage in step.made}

    @property
    def given(self) -> set[int]:
        """Storages that it reads, its own among them."""
        return {view.storage for step in self.steps for view in step.reads}


class FusedTrace:
    """The same with fused kernels: ``kernels`` [phase name] and those of attention ``core``, of the last such phase.

    Or, ``eager``, with one kernel for each operator.
    """

    def __init__(self, trace: BlockTrace, *, eager: bool = False) -> None:
        self._trace = trace
        self._readers: dict[int, list[Step]] = defaultdict(list)
        for step in trace.steps:
            for view in {view.storage: view for view in step.reads}.values():
                self._readers[view.storage].append(step)
        alone = (_Joint(step.phase, [step], fuses=False) for step in trace.steps)
        self._groups = list(alone if eager else self._grouped())
        self._of_step = {step.at: number for number, group in enumerate(self._groups) for step in group.steps}
        self._maker = {made: step for step in trace.steps for made in step.made}
        self._inside: set[int] = set()  # never written
        self._from: dict[int, frozenset[int]] = {}  # not held, and made again of these
        self._decide()

    @property
    def kernels(self) -> dict[str, list[Kernel]]:
        """[phase] of the last phase of each name."""
        return {
            name: list(self._kernels(self._trace.last(name), core=False))
            for name in {name for name, *_ in self._trace.phases}
        }

    @property
    def core(self) -> list[Kernel]:
        """Kernels of the attention cores of the last forward."""
        return list(self._kernels(self._trace.last(self._forward), core=True))

    @property
    def _forward(self) -> str:
        return next(name for name, *_ in self._trace.phases if role_of(name) is Role.FORWARD)

    def _kernels(self, phase: int, *, core: bool) -> Iterator[Kernel]:
        for group in self._groups:
            steps = [step for step in group.steps if step.core or not core]
            if group.phase == phase and steps and (made := self._kernel(group, steps)) is not None:
                yield made

    def held(self, held: Mapping[int, int], own: Container[int]) -> dict[int, int]:
        """What is held after the last forward, in bytes by storage, where torch holds this beside its ``own``."""
        kept = {
            storage: size for storage, size in held.items() if storage not in self._from and storage not in self._inside
        }
        for storage in held:
            kept |= {each: self._trace.sizes[each] for each in self._from.get(storage, ()) if each not in own}
        return kept

    @property
    def usage(self) -> dict[str, Usage]:
        """[phase] bytes in use, of what is made inside."""
        trace = self._trace
        ends = {storage: trace.dead.get(storage, trace.now + 1) for storage in trace.born}
        for group in self._groups:
            for storage in group.given:
                for source in self._from.get(storage, (storage,)):  # all of a kernel's operands are there until it ends
                    if source in ends:
                        ends[source] = max(ends[source], group.steps[-1].at + 1)
        changes = []
        for storage, begin in trace.born.items():
            if storage not in self._inside and storage not in self._from:
                changes += [(begin, trace.sizes[storage]), (ends[storage], -trace.sizes[storage])]
        changes.sort()
        found, used, next_ = {}, 0, 0
        for name, begin, end in trace.phases:
            while next_ < len(changes) and changes[next_][0] <= begin:
                used += changes[next_][1]
                next_ += 1
            start = peak = used
            while next_ < len(changes) and changes[next_][0] <= end:
                used += changes[next_][1]
                peak = max(peak, used)
                next_ += 1
            found[name] = Usage(start, peak)
        return found

    def _grouped(self) -> Iterator[_Joint]:
        """Steps by kernel, in order."""
        groups: list[_Joint] = []
        products: dict[int, _Joint] = {}  # of this phase, by what they make
        phase = -1
        for step in self._trace.steps:
            if step.phase != phase:
                phase, products = step.phase, {}
            host = self._adding(step, products) if step.adds else None
            if host is not None:
                host.added.add(next(view.storage for view in step.reads if products.get(view.storage) is host))
                host.steps.append(step)
                products.update(dict.fromkeys(step.made, host))
            elif step.fuses and groups and groups[-1].fuses and groups[-1].phase == phase:
                groups[-1].steps.append(step)
            else:
                groups.append(_Joint(phase, [step], step.fuses))
                if step.kernel is not None and step.kernel.matrix:
                    products.update(dict.fromkeys(step.made, groups[-1]))
        return self._joined(groups)

    def _joined(self, groups: Sequence[_Joint]) -> Iterator[_Joint]:
        """Those that fuse together with the last before them whose results they take, where nothing is in between."""
        found: list[_Joint] = []
        for group in groups:
            at = next((at for at in reversed(range(len(found))) if found[at].fuses), None)
            before = None if at is None else found[at]
            if not group.fuses or before is None or at is None or before.phase != group.phase:
                found.append(group)
                continue
            given, made = group.given, before.made
            between = found[at + 1 :]
            earlier = not any(given & each.made for each in between)
            later = not any(made & each.given for each in between)
            if not given & made or not (earlier or later):
                found.append(group)
                continue
            joined = replace(before, steps=[*before.steps, *group.steps])
            found[at:] = [joined, *between] if earlier else [*between, joined]
        return iter(found)

    def _adding(self, step: Step, products: dict[int, _Joint]) -> _Joint | None:
        """The product that adds its result to another one's or to what is there, if this is that."""
        given = list({view.storage: view for view in step.reads}.values())
        own = [view.storage for view in given if view.storage in products and len(self._readers[view.storage]) == 1]
        if len(given) != 2 or not own or given[0].size != given[1].size:
            return None
        in_place = not step.made and not {view.storage for view in step.writes} & set(own)
        return products[own[-1]] if in_place or len(own) == 2 else None  # both of a sum, or one and what is there

    def _decide(self) -> None:
        """What of what fused kernels make is written, made again, or only inside of one."""
        trace = self._trace
        for group in self._groups:
            self._inside |= group.added
        for step in trace.steps:
            group = self._groups[self._of_step[step.at]]
            if not group.fuses:
                continue
            for storage in step.made:
                elsewhere = [
                    self._groups[number]
                    for number in {self._of_step[each.at] for each in self._readers[storage]}
                    if self._groups[number] is not group
                ]
                _, _, end = trace.phases[step.phase]
                forward = role_of(trace.phases[step.phase][0]) is Role.FORWARD
                if storage in trace.outputs or any(
                    not each.fuses or each.phase == step.phase or not forward for each in elsewhere
                ):
                    continue  # written
                if not elsewhere:
                    if forward or not trace.lives(storage, end):
                        self._inside.add(storage)
                elif not step.random and not self._is_small(storage, group):
                    self._may_go(storage, group, end)

    def _may_go(self, storage: int, group: _Joint, end: int) -> None:
        """Not to hold a storage, where what it is made of takes less."""
        trace, sources = self._trace, self._sources(storage, group)
        more = sum(
            trace.sizes[each]
            for each in sources
            if each in trace.born and (each in self._inside or not trace.lives(each, end))
        )
        if more < trace.sizes[storage] and not sources & self._inside:
            self._from[storage] = sources

    def _sources(self, storage: int, group: _Joint) -> frozenset[int]:
        """From outside its kernel, or written by it, what a storage is made of."""
        inside = {made for step in group.steps for made in step.made}
        found: set[int] = set()
        open_, seen = [storage], {storage}
        while open_:
            maker = self._maker[open_.pop()]
            for view in maker.reads:
                each = view.storage
                if each in seen:
                    continue
                seen.add(each)
                if each in self._from:
                    found |= self._from[each]
                elif each in inside and not self._is_small(each, group):
                    open_.append(each)
                else:
                    found.add(each)
        return frozenset(found)

    def _is_small(self, storage: int, group: _Joint) -> bool:
        """Whether it is a statistic of what its kernel reads."""
        read = max((view.size for step in group.steps for view in step.reads), default=0)
        return self._trace.sizes[storage] * _SMALL <= read

    def _kernel(self, group: _Joint, steps: list[Step]) -> Kernel | None:
        """One kernel of steps of a group; None for a message."""
        first = steps[0].kernel
        if first is None or (len(steps) == 1 and not group.fuses):
            return first
        made = {storage for step in steps for storage in step.made}
        reads: set[View] = set()
        writes: set[View] = set()
        for step in steps:
            for view in step.reads:
                if view.storage in made or view.storage in group.added:
                    continue
                again = self._from.get(view.storage)
                if again is None:
                    reads.add(view)
                else:
                    reads |= {View(each, None, self._trace.sizes[each]) for each in again}
            writes |= {
                view for view in step.writes if view.storage not in self._inside and view.storage not in self._from
            }
        moved = self._bytes(reads) + self._bytes(writes)
        added = (
            sum(view.size for step in steps[1:] for view in step.reads if view in reads) if first.expert_bytes else 0
        )
        return replace(
            first,
            flops=sum(step.kernel.flops for step in steps if step.kernel),
            moved_bytes=moved,
            expert_bytes=min(moved, first.expert_bytes + added),
        )

    def _bytes(self, views: Iterable[View]) -> int:
        """Bytes of parts of storages, of none more than all of it."""
        sums: dict[int, int] = defaultdict(int)
        for view in views:
            sums[view.storage] += view.size
        return sum(min(size, self._trace.sizes[storage]) for storage, size in sums.items())
