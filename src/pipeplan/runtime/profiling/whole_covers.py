"""A whole model, group by group as a cover has it, timed: what the graph level of covers is chosen by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from pipeplan.errors import ExecutionError
from pipeplan.runtime.backends.building import BuiltGroup
from pipeplan.runtime.backends.comparing import require_same
from pipeplan.runtime.models.shapes import outputs_of
from pipeplan.runtime.profiling.groups import GroupBenches, Output, WiredGroup
from pipeplan.runtime.profiling.instruments import steady, timed

Groups = Sequence[tuple[tuple[str, ...], str]]
"""Blocks and the backend that runs them, in an order in which they can run."""


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
        try:
            ways = [self._way(*each) for each in groups]
            with steady(device):
                found = self._run(ways)
                ends = [each for each in found if each in self._ends()]
                wanted, made = ([of[each].detach() for each in ends] for of in (self._eager, found))
                require_same(wanted, made, self.tolerance, made[0].dtype)
                return round(median(timed(lambda: self._run(ways), device)[1] for _ in range(self.repeats)))
        except ExecutionError:
            raise
        except Exception as error:
            raise ExecutionError(f"{type(error).__name__}: {error}") from error

    def _way(self, blocks: tuple[str, ...], backend: str) -> tuple[WiredGroup, BuiltGroup]:
        key = tuple(blocks), backend
        if key not in self._built:
            if not self._eager:
                self._eager = self._run_eager()
            wired = self.benches.wired(blocks)
            self._built[key] = wired, self.benches.built(wired, self._eager, self.size, backend)
        return self._built[key]

    def _run_eager(self) -> dict[Output, Tensor]:
        """What every block gives in eager torch, with gradients in training as its users take it."""
        ways = []
        for id_ in self.benches.order:
            wired = self.benches.wired((id_,))
            ways.append((wired, BuiltGroup(wired.module)))
        found = self._run(ways)
        return {each: tensor.detach().requires_grad_(tensor.requires_grad) for each, tensor in found.items()}

    def _ends(self) -> frozenset[Output]:
        return self.benches.ends

    def _run(self, ways: Sequence[tuple[WiredGroup, BuiltGroup]]) -> dict[Output, Tensor]:
        """One run of all groups; in training back again, whose gradients are let go."""
        values: dict[Output, Tensor] = {}
        batch = self.benches.batch(self.size)
        with torch.set_grad_enabled(self.benches.training):
            for wired, built in ways:
                with built.around():
                    taken = (values[each] for each in wired.taken)
                    made = outputs_of(built.call(*taken, *(batch[name] for name in wired.samples)))
                if made is None:
                    raise ExecutionError("a group gives neither a tensor nor a tuple of tensors")
                values.update(zip(wired.given, made, strict=True))
        if self.benches.training:
            ends = [values[each] for each in values if each in self._ends() and values[each].requires_grad]
            torch.autograd.backward(ends, [torch.ones_like(each) for each in ends])
            for wired, _ in ways:
                wired.module.zero_grad(set_to_none=True)
        return values
