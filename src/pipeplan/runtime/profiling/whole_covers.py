"""A whole model, group by group as a cover has it, timed: what the graph level of covers is chosen by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from pipeplan.errors import ExecutionError
from pipeplan.runtime.backends.building import BuiltGroup
from pipeplan.runtime.backends.comparing import require_same
from pipeplan.runtime.models.shapes import outputs_of
from pipeplan.runtime.profiling.groups import GroupBenches, Output, WiredGroup
from pipeplan.runtime.profiling.instruments import steady, timed

Groups = Sequence[tuple[tuple[str, ...], str]]
"""Blocks and the backend that runs them, in an order in which they can run."""


@dataclass(frozen=True, slots=True)
class _GroupCall:
    """A group in a run: where it takes from, what it gives, and what nobody takes after it."""

    built: BuiltGroup
    taken: tuple[Output | str, ...]
    given: tuple[Output, ...]
    dropped: tuple[Output, ...]


@dataclass(slots=True)
class WholeCovers:
    """Times covers of a model at one micro-batch size. What is built once is built for all covers.

    In training a run is forward and backward of all losses; what its groups give is as in eager torch, to so much of
    the largest number.
    """

    benches: GroupBenches
    size: int
    repeats: int = 5
    tolerance: float = 1e-3
    _built: dict[tuple[tuple[str, ...], str], tuple[WiredGroup, BuiltGroup]] = field(default_factory=dict)
    _eager: dict[Output, Tensor] = field(default_factory=dict)

    def measure(self, groups: Groups) -> int:
        """Median ns of a run, after one that is not counted and that is compared with eager torch.

        Raises:
            ExecutionError: a backend cannot build or run a group, or the results are not eager torch's.
        """
        device = self.benches.device
        run = self.runner(groups)
        with _failures(), steady(device):
            return round(median(timed(run, device)[1] for _ in range(self.repeats)))

    def runner(self, groups: Groups) -> Callable[[], object]:
        """What runs the model by a cover once; it has run, and gave what eager torch gives.

        Raises:
            ExecutionError: as :meth:`measure`.
        """
        with _failures():
            run = partial(self._run, *self._steps([self._way(*each) for each in groups]))
            self._require_eager(run())
        return run

    def _require_eager(self, found: Mapping[Output, Tensor]) -> None:
        if not self._eager:
            wired = [self.benches.wired((id_,)) for id_ in self.benches.order]
            self._eager = self._run(*self._steps([(each, BuiltGroup(each.module)) for each in wired]))
            self._eager = {each: tensor.detach() for each, tensor in self._eager.items()}
        made = [found[each].detach() for each in self._eager]
        require_same([*self._eager.values()], made, self.tolerance, made[0].dtype)

    def _way(self, blocks: tuple[str, ...], backend: str) -> tuple[WiredGroup, BuiltGroup]:
        key = tuple(blocks), backend
        if key not in self._built:
            wired = self.benches.wired(blocks)
            self._built[key] = wired, self.benches.built(wired, self.size, backend)
        return self._built[key]

    def _steps(self, ways: Sequence[tuple[WiredGroup, BuiltGroup]]) -> tuple[list[_GroupCall], list[nn.Module]]:
        """Groups one after the other, each of which lets go of what is not taken later, and their modules."""
        ends, last = self.benches.ends, dict[Output, int]()
        for number, (wired, _) in enumerate(ways):
            last |= dict.fromkeys((*wired.given, *wired.taken), number)
        dropped = defaultdict[int, list[Output]](list)
        for each, number in last.items():
            if each not in ends:
                dropped[number].append(each)
        steps = [
            _GroupCall(built, (*wired.taken, *wired.samples), wired.given, tuple(dropped[number]))
            for number, (wired, built) in enumerate(ways)
        ]
        return steps, [wired.module for wired, _ in ways]

    def _run(self, steps: Sequence[_GroupCall], modules: Sequence[nn.Module]) -> dict[Output, Tensor]:
        """One run of all groups, to the model's ends; in training back again, whose gradients are let go."""
        values: dict[Output | str, Tensor] = dict(self.benches.batch(self.size).items())
        with torch.set_grad_enabled(self.benches.training):
            for step in steps:
                with step.built.around():
                    made = outputs_of(step.built.call(*[values[each] for each in step.taken]))
                if made is None:
                    raise ExecutionError("a group gives neither a tensor nor a tuple of tensors")
                values.update(zip(step.given, made, strict=True))
                for each in step.dropped:
                    del values[each]
        ends = {each: tensor for each, tensor in values.items() if not isinstance(each, str)}
        if self.benches.training:
            roots = [each for each in ends.values() if each.requires_grad]
            torch.autograd.backward(roots, [torch.ones_like(each) for each in roots])
            for module in modules:
                module.zero_grad(set_to_none=True)
        return ends


@contextmanager
def _failures() -> Iterator[None]:
    """Whatever a backend's library raises, as an ExecutionError."""
    try:
        yield
    except ExecutionError:
        raise
    except Exception as error:
        raise ExecutionError(f"{type(error).__name__}: {error}") from error
