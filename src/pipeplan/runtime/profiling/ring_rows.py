"""What a measured block takes where keys and values go around a ring, instead of being gathered before its attention.

One device alone computes all steps of the ring, with copies of its own keys and values for those that would come. What
it would wait for hops, which is what they take longer than a step, is known where links are: :mod:`pipeplan.costs`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from pipeplan.costs.context import SharedCore
from pipeplan.files import CostRow, RingCosts
from pipeplan.runtime.parallel.context import Ring
from pipeplan.runtime.parallel.context_attention import causal_attention
from pipeplan.runtime.profiling.instruments import timed

RingTimes = tuple[int, int, int, int]
"""In ns: forward and backward of a block's attention cores alone, to gathered keys and values, and around a ring."""


class AroundRing(TorchFunctionMode):
    """Attention of pieces inside is that of a ring."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run a function."""
        if func is causal_attention:
            query, key, value, place = args
            return causal_attention(query, key, value, Ring.of(place), **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def timed_both_ways(cores: Sequence[partial[Any]], device: torch.device) -> RingTimes:
    """Of attention cores, each of which is a call as it was made."""
    gathered = _timed(cores, device)
    with AroundRing():
        return *gathered, *_timed(cores, device)


def _timed(cores: Sequence[partial[Any]], device: torch.device) -> tuple[int, int]:
    ahead = back = 0
    for call in cores:
        own = [each.detach().requires_grad_() for each in call.args[:3]]
        made, more = timed(partial(call.func, *own, *call.args[3:], **call.keywords), device)
        gradient = made.detach().clone()
        _, longer = timed(partial(torch.autograd.grad, made, own, gradient), device)
        ahead, back = ahead + more, back + longer
    return ahead, back


class MeasuredRing(NamedTuple):
    """How much ``more`` a block takes without waiting for hops, and what its cores take, of all steps, in ns."""

    more: RingCosts
    core_ns: int
    core_grad_ns: int

    @classmethod
    def of(cls, times: Sequence[RingTimes], more_bytes: int) -> MeasuredRing:
        """By medians of runs in which both ways took turns."""
        forward, input_grad, ahead, back = (
            round(statistics.median(each))
            for each in zip(*((ring - own, back - grad, ring, back) for own, grad, ring, back in times), strict=True)
        )
        return cls(RingCosts(forward_ns=forward, input_grad_ns=input_grad, workspace_bytes=more_bytes), ahead, back)

    def beside(self, row: CostRow, gather_ns: int, back_ns: int) -> RingCosts:
        """How much more than ``row``, of which devices wait so long for a gather in F, and for ``back_ns`` in I.

        It is never less than nothing, however unsteady times are.
        """
        waited = SharedCore(row.context, self.core_ns, self.core_grad_ns, gather_ns, 0, 0, 0, 0).ring
        ahead = self.more.forward_ns + round(float(waited.forward_ns)) - gather_ns
        back = self.more.input_grad_ns + round(float(waited.input_grad_ns)) - back_ns
        ahead = max(ahead, -row.forward_ns, -row.forward_ns if row.selective_ns is None else -row.selective_ns)
        shortest = min(each for each in (row.input_grad_ns, row.backward_ns) if each is not None)
        return RingCosts(
            forward_ns=ahead,
            input_grad_ns=max(back, -shortest - ahead * row.recompute, -shortest),
            workspace_bytes=max(-row.workspace_bytes, self.more.workspace_bytes),
        )
