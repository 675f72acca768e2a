"""What a traced block comes to, also at sizes at which it was not traced: other micro-batches, and pieces of sequences.

Every number of such a trace is a product: of the block's own sizes, of samples or not, and of places once, twice (as
scores and masks are) or not at all. Two traces that differ in both, by factors of which no two products are equal, tell
for each number which of these it is, and so what it is at any other size, to the byte. Where a number is none of them,
or operators differ, there are no closed forms (:class:`NoClosedForm`), and the block has to be traced at every size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import NamedTuple

from pipeplan.costs.devices import CORE, Kernel, Work
from pipeplan.files import CostRow
from pipeplan.runtime.profiling.benches import RowKey, needs_of, workspace_of
from pipeplan.runtime.profiling.build_profile import SavedTensors
from pipeplan.runtime.profiling.fusion import BlockTrace, FusedTrace, Step, View


class NoClosedForm(Exception):
    """Two traces do not tell what a block comes to at other sizes; the text says why."""


class Extent(NamedTuple):
    """How much of a mini-batch a trace is of: ``samples``, of each one of ``parts`` of its sequence."""

    samples: int
    parts: int

    def over(self, other: Extent) -> tuple[Fraction, Fraction]:
        """By which factors it has more samples than another one, and more places of each."""
        return Fraction(self.samples, other.samples), Fraction(other.parts, self.parts)


_PLACES = (0, 1, 2)
"""How often places are factors of a number."""

Scale = Callable[[int, int], int]
"""From a number of both traces to the same at another extent. Raises NoClosedForm."""


class Growth:
    """How numbers grow from ``one`` extent to an ``other``, of which no two kinds grow alike.

    Raises:
        ValueError: some do.
    """

    def __init__(self, one: Extent, other: Extent) -> None:
        self._one = one
        samples, places = other.over(one)
        self._kinds: dict[Fraction, tuple[int, int]] = {}
        for kind in product((0, 1) if samples != 1 else (0,), _PLACES if places != 1 else (0,)):
            if self._kinds.setdefault(samples ** kind[0] * places ** kind[1], kind) != kind:
                raise ValueError(f"{one} and {other} do not tell samples from places")

    def at(self, extent: Extent) -> Scale:
        """What numbers are at another extent, by what they are at both."""
        samples, places = extent.over(self._one)
        known: dict[tuple[int, int], int] = {}

        def scaled(one: int, other: int) -> int:
            if one == other:
                return one
            if (one, other) not in known:
                kind = self._kinds.get(Fraction(other, one)) if one else None
                if kind is None:
                    raise NoClosedForm(f"{one} and {other} are no multiples of samples and places")
                found = one * samples ** kind[0] * places ** kind[1]
                if found.denominator != 1:
                    raise NoClosedForm(f"{one} is not whole at {extent}")
                known[one, other] = int(found)
            return known[one, other]

        return scaled


class CountedBlock(NamedTuple):
    """A block at one size: its ``row``, whose times are not known yet, and the ``work`` that takes them.

    ``shared_bytes`` are those of keys and values that its attention cores take, which have ``heads`` heads,
    ``mixed_bytes`` what these make; ``saved`` which inputs and outputs its backward needs.
    """

    key: RowKey
    row: CostRow
    work: Work
    shared_bytes: int
    mixed_bytes: int
    heads: int
    saved: SavedTensors


class TracedCore(NamedTuple):
    """The attention cores of a forward: what they ``made`` that only they need, and what they were ``given`` that is
    not held, as storages of the trace.
    """

    made: tuple[int, ...]
    given: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TracedBlock:
    """A block that was traced, forward and backward, with what training holds of it, as storages of the trace.

    ``held`` is what autograd holds after F, beside what the block's module has as its ``own``; of it ``given`` storages
    were there before. ``deferred`` waits for W. ``gradient_bytes`` are those of each output's gradient, ``core`` is
    None where there is none, or all is computed again. Of what is held backward has ``needed`` some; ``inputs`` are the
    storages of each, none of those that nothing reads, and ``outputs`` that of each, -1 of those.
    """

    trace: BlockTrace
    held: tuple[int, ...]
    own: frozenset[int]
    given: frozenset[int]
    deferred: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    core: TracedCore | None
    shared_bytes: int
    mixed_bytes: int
    heads: int
    needed: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    eager: bool

    def counted(self, key: RowKey) -> CountedBlock:
        """Bytes and kernels, for the row of a ``key``."""
        done, sizes = FusedTrace(self.trace, eager=self.eager), self.trace.sizes
        held = {storage: sizes[storage] for storage in self.held if storage not in self.own}
        kept = done.held(held, self.own)
        activation, deferred = sum(kept.values()), self._bytes(self.deferred)
        given = sum(size for storage, size in kept.items() if storage in self.given)
        used = done.held({storage: sizes[storage] for storage in self.needed if storage not in self.own}, self.own)
        needs = [not used.keys().isdisjoint(each) for each in self.inputs]
        saved = SavedTensors(
            needs_of(needs, bool(self.needed)), tuple("yes" if each in used else "no" for each in self.outputs)
        )
        apart = (
            {storage for each in self.inputs for storage in each if storage not in used} if not key.recompute else ()
        )
        unsaved = sum(kept.get(storage, 0) for storage in apart)
        row = CostRow(
            microbatch_size=key.size,
            shards=key.shards,
            context=key.context,
            expert=key.expert,
            recompute=key.recompute,
            forward_ns=0,
            backward_ns=0,
            input_grad_ns=0,
            weight_grad_ns=0,
            activation_bytes=activation,
            weight_grad_bytes=deferred,
            workspace_bytes=workspace_of(done.usage, activation, deferred, given, sum(self.gradient_bytes), unsaved),
        )
        kernels = done.kernels
        work: Work = {"forward_ns": kernels["F"], "input_grad_ns": kernels["I"], "weight_grad_ns": kernels["W"]}
        if self.core is not None:
            less = max(0, self._bytes(self.core.made) - self._bytes(self.core.given))
            row = row.model_copy(update={CORE: 0, "selective_activation_bytes": activation - less})
            work = {**work, CORE: done.core}
        return CountedBlock(key, row, work, self.shared_bytes, self.mixed_bytes, self.heads, saved)

    def _bytes(self, storages: Sequence[int]) -> int:
        return sum(self.trace.sizes[each] for each in storages)

    def scaled(self, other: TracedBlock, scale: Scale) -> TracedBlock:
        """The same at another extent, by how numbers of this and an ``other`` grow. Raises NoClosedForm."""
        if self._form != other._form or len(self.trace.steps) != len(other.trace.steps):
            raise NoClosedForm("they do not run the same operators, or hold other tensors")
        steps = [_scaled_step(*pair, scale) for pair in zip(self.trace.steps, other.trace.steps, strict=True)]
        sizes = {each: scale(size, other.trace.sizes[each]) for each, size in self.trace.sizes.items()}
        gradients = tuple(map(scale, self.gradient_bytes, other.gradient_bytes))
        return replace(
            self,
            trace=replace(self.trace, steps=steps, sizes=sizes),
            gradient_bytes=gradients,
            shared_bytes=scale(self.shared_bytes, other.shared_bytes),
            mixed_bytes=scale(self.mixed_bytes, other.mixed_bytes),
        )

    @property
    def _form(self) -> object:
        """Equal for blocks whose traces differ in sizes alone, but for their steps."""
        trace = self.trace
        of_trace = trace.born, trace.dead, trace.phases, trace.outputs, trace.now, trace.sizes.keys()
        held = self.held, self.own, self.given, self.deferred, self.core, self.needed, self.inputs, self.outputs
        return of_trace, held, len(self.gradient_bytes), self.heads, self.eager


def _scaled_step(one: Step, other: Step, scale: Scale) -> Step:
    kernel = None
    if _form_of(one) != _form_of(other):
        raise NoClosedForm("they do not run the same operators")
    moved = tuple(map(scale, one.moved, other.moved))
    if one.kernel is not None and other.kernel is not None:
        kernel = _scaled_kernel(one.kernel, other.kernel, sum(moved), scale)
    reads = tuple(_scaled_view(*pair, scale) for pair in zip(one.reads, other.reads, strict=True))
    writes = tuple(_scaled_view(*pair, scale) for pair in zip(one.writes, other.writes, strict=True))
    return replace(one, kernel=kernel, reads=reads, writes=writes, moved=moved)


def _form_of(step: Step) -> object:
    kernel = step.kernel
    views = [[view.storage for view in views] for views in (step.reads, step.writes)]
    of_kernel = kernel and (kernel.matrix, kernel.weights, kernel.form, kernel.head_size, kernel.product is None)
    flags = step.fuses, step.adds, step.random, step.core
    return step.at, step.phase, views, step.made, flags, len(step.moved), of_kernel


def _scaled_view(one: View, other: View, scale: Scale) -> View:
    return View(one.storage, one.part, scale(one.size, other.size))


def _scaled_kernel(one: Kernel, other: Kernel, moved_bytes: int, scale: Scale) -> Kernel:
    sizes = None
    if one.product is not None and other.product is not None:
        (rows, inner, columns, count), sides = one.product, other.product
        sizes = scale(rows, sides[0]), scale(inner, sides[1]), scale(columns, sides[2]), scale(count, sides[3])
    return replace(
        one,
        flops=scale(one.flops, other.flops),
        moved_bytes=moved_bytes,
        product=sizes,
        expert_bytes=scale(one.expert_bytes, other.expert_bytes),
    )
