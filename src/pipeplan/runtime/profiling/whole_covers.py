"""A whole model, group by group as a cover has it, timed as a whole or group by group: what covers are chosen by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import fmean, median

import torch
from torch import Tensor

from pipeplan.errors import ExecutionError
from pipeplan.runtime.backends.building import BuiltGroup, GroupModule
from pipeplan.runtime.backends.comparing import distance, in_one, require_same
from pipeplan.runtime.models.shapes import outputs_of
from pipeplan.runtime.parallel.device import Clock, Mark
from pipeplan.runtime.profiling.groups import GroupBenches, Output, WiredGroup
from pipeplan.runtime.profiling.instruments import steady, timed

Groups = Sequence[tuple[tuple[str, ...], str]]
"""Blocks and the backend that runs them, in an order in which they can run."""

_TIMED_NS = 500_000_000
"""Runs that are timed group by group, of models that run quickly: as many as there is time for in this,"""

_MOST_RUNS = 50
"""and no more than this."""

_HELD_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class _GroupCall:
    """A group in a run: where it takes from, what it gives, and what nobody takes after it."""

    blocks: tuple[str, ...]
    built: BuiltGroup
    taken: tuple[Output | str, ...]
    given: tuple[Output, ...]
    dropped: tuple[Output, ...]


@dataclass(slots=True)
class WholeCovers:
    """Times covers of a model at one micro-batch size. What is built once is built for all covers.

    In training a run is forward and backward of all losses, and adds to the gradients of the run before, as a
    micro-batch does: memory that is new in each run takes groups up to a third longer. What comes out of the model, and
    in training each parameter's gradient, is as in eager torch, to so much of the largest number, or as much as a
    backend allows itself.
    """

    benches: GroupBenches
    size: int
    repeats: int = 5
    tolerance: float = 1e-3
    _built: dict[tuple[tuple[str, ...], str], tuple[WiredGroup, BuiltGroup]] = field(default_factory=dict)
    _eager: dict[Output | str, Tensor] = field(default_factory=dict)

    def measure(self, groups: Groups) -> int:
        """Median ns of a run, after one that is not counted and that is compared with eager torch.

        Raises:
            ExecutionError: a backend cannot build or run a group, or the results are not eager torch's.
        """
        device = self.benches.device
        run, modules = self.runner(groups), self._modules(groups)
        with _failures(), steady(device), _gradients_of(modules):
            if self.benches.training:
                run()
            return round(median(timed(run, device)[1] for _ in range(self.repeats)))

    def times(self, groups: Groups) -> list[tuple[int, int]]:
        """Forward and backward of each group within runs, in ns: means over the middle half of the runs.

        There are ``repeats`` runs, or more in half a second. Of what other covers have built, no more than a gigabyte
        of parameters is kept.

        Raises:
            ExecutionError: as :meth:`measure`.
        """
        device, marks = self.benches.device, list[Mark]()
        clock = Clock(device)
        self._let_go(groups)
        with _failures():
            steps, modules = self._steps([self._way(*each) for each in groups])
            run = partial(self._run, steps)
            self._require_eager(groups, steps, modules)
            spans: list[list[int]] = []
            with steady(device), _gradients_of(modules):
                _, once = timed(run, device)
                for _ in range(max(self.repeats, min(_MOST_RUNS, _TIMED_NS // max(1, once)))):
                    marks.clear()
                    anchor = clock.anchor()
                    run(lambda: marks.append(clock.mark()))
                    clock.anchor()
                    at = [clock.resolve(mark, anchor) for mark in marks]
                    spans.append([after - before for before, after in pairwise(at)])
        spans.sort(key=sum)
        middle = spans[len(spans) // 4 : len(spans) - len(spans) // 4]
        means = [round(fmean(each)) for each in zip(*middle, strict=True)]
        forward, backward = means[: len(steps)], means[len(steps) :][::-1] or [0] * len(steps)
        return [*zip(forward, backward, strict=True)]

    def _let_go(self, groups: Groups) -> None:
        """Of what is built, what is not of these groups, where it is much."""
        kept = {(tuple(blocks), backend) for blocks, backend in groups}
        held = sum(each.nbytes for wired, _ in self._built.values() for each in wired.module.parameters())
        if held > _HELD_BYTES:
            self._built = {key: built for key, built in self._built.items() if key in kept}

    def runner(self, groups: Groups) -> Callable[[], object]:
        """What runs the model by a cover once; it has run, and gave what eager torch gives.

        Raises:
            ExecutionError: as :meth:`measure`.
        """
        with _failures():
            steps, modules = self._steps([self._way(*each) for each in groups])
            self._require_eager(groups, steps, modules)
        return partial(self._run, steps)

    def off_eager(self, groups: Groups) -> float:
        """The largest difference between what a cover gives and eager torch, relative to the largest number of each.

        Raises:
            ExecutionError: as :meth:`measure`.
        """
        with _failures():
            pairs = self._beside_eager(*self._steps([self._way(*each) for each in groups]))
            return max(distance(*pair) for pair in pairs)

    def _require_eager(self, groups: Groups, steps: Sequence[_GroupCall], modules: Sequence[GroupModule]) -> None:
        wanted, found = zip(*self._beside_eager(steps, modules), strict=True)
        tolerance = max(self.tolerance, *(self.benches.tolerance(name) for _, name in groups))
        require_same(wanted, found, tolerance, found[0].dtype)

    def _beside_eager(self, steps: Sequence[_GroupCall], modules: Sequence[GroupModule]) -> list[tuple[Tensor, Tensor]]:
        """What eager torch gives and what groups give: the model's results, and gradients of its parameters."""
        if not self._eager:
            wired = [self.benches.wired((id_,)) for id_ in self.benches.order]
            self._eager = self._numbers(*self._steps([(each, BuiltGroup(each.module)) for each in wired]))
        found = self._numbers(steps, modules)
        return [(tensor, found[each]) for each, tensor in self._eager.items()]

    def _numbers(self, steps: Sequence[_GroupCall], modules: Sequence[GroupModule]) -> dict[Output | str, Tensor]:
        """The results of one run, and in training the gradients of each block's parameters, in one, by its id."""
        found: dict[Output | str, Tensor] = {}
        with _gradients_of(modules):
            found.update((each, tensor.detach()) for each, tensor in self._run(steps).items())
            for step, module in zip(steps, modules, strict=True):
                for id_, block in zip(step.blocks, module.blocks, strict=True):
                    own = in_one(p.grad for p in block.parameters() if p.grad is not None)
                    found.update((id_, gradients) for gradients in own)
        return found

    def _modules(self, groups: Groups) -> list[GroupModule]:
        return [self._way(*each)[0].module for each in groups]

    def _way(self, blocks: tuple[str, ...], backend: str) -> tuple[WiredGroup, BuiltGroup]:
        key = tuple(blocks), backend
        if key not in self._built:
            wired = self.benches.wired(blocks)
            self._built[key] = wired, self.benches.built(wired, self.size, backend)
        return self._built[key]

    def _steps(self, ways: Sequence[tuple[WiredGroup, BuiltGroup]]) -> tuple[list[_GroupCall], list[GroupModule]]:
        """Groups one after the other, each of which lets go of what is not taken later, and their modules."""
        ends, last = self.benches.ends, dict[Output, int]()
        for number, (wired, _) in enumerate(ways):
            last |= dict.fromkeys((*wired.given, *wired.taken), number)
        dropped = defaultdict[int, list[Output]](list)
        for each, number in last.items():
            if each not in ends:
                dropped[number].append(each)
        steps = [
            _GroupCall(wired.blocks, built, (*wired.taken, *wired.samples), wired.given, tuple(dropped[number]))
            for number, (wired, built) in enumerate(ways)
        ]
        return steps, [wired.module for wired, _ in ways]

    def _run(self, steps: Sequence[_GroupCall], tick: Callable[[], None] = lambda: None) -> dict[Output, Tensor]:
        """One run of all groups, to the model's ends; in training back again, which adds to gradients.

        It is cut between groups, so that ``tick`` is called before the first and after each, and in training after
        backward of each again, the last first.
        """
        values: dict[Output | str, Tensor] = dict(self.benches.batch(self.size).items())
        back: list[tuple[BuiltGroup, list[Tensor], list[Tensor]]] = []
        tick()
        with torch.set_grad_enabled(self.benches.training):
            for step in steps:
                with step.built.around():
                    made = outputs_of(step.built.call(*[values[each] for each in step.taken]))
                if made is None:
                    raise ExecutionError("a group gives neither a tensor nor a tuple of tensors")
                if self.benches.training:
                    cut = [each.detach().requires_grad_(each.requires_grad) for each in made]
                    back.append((step.built, [*made], cut))
                    made = tuple(cut)
                values.update(zip(step.given, made, strict=True))
                for each in step.dropped:
                    del values[each]
                tick()
        ends = {each: tensor for each, tensor in values.items() if not isinstance(each, str)}
        for end in ends.values():
            if self.benches.training and end.requires_grad:
                end.grad = torch.ones_like(end)
        while back:
            built, given, cut = back.pop()
            pairs = [(one, two.grad) for one, two in zip(given, cut, strict=True) if two.grad is not None]
            if pairs:
                with built.around():
                    torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
            tick()
        return ends


@dataclass(slots=True)
class WholeRunner:
    """Runs the whole model by covers at any micro-batch size, and times their groups."""

    benches: GroupBenches
    _covers: WholeCovers | None = None

    def times(self, groups: Groups, size: int) -> list[tuple[int, int]]:
        """See :meth:`WholeCovers.times`. What other sizes have built is let go."""
        if self._covers is None or self._covers.size != size:
            self._covers = WholeCovers(self.benches, size, self.benches.repeats)
        return self._covers.times(groups)


@contextmanager
def _gradients_of(modules: Sequence[GroupModule]) -> Iterator[None]:
    """Runs whose gradients add up, to be let go of at the end; there are none at the beginning."""
    try:
        yield
    finally:
        for module in modules:
            module.zero_grad(set_to_none=True)


@contextmanager
def _failures() -> Iterator[None]:
    """Whatever a backend's library raises, as an ExecutionError."""
    try:
        yield
    except ExecutionError:
        raise
    except Exception as error:
        raise ExecutionError(f"{type(error).__name__}: {error}") from error
