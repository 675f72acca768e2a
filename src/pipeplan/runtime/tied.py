"""Parameters that several blocks share, such as GPT-2's token embedding and head, wherever the blocks stand.

On one rank the blocks get one and the same parameter, so their gradients add by themselves. Between ranks every
holder has a copy of equal value; after a step's programs their gradients are summed, and all make the same update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from pipeplan.errors import UsageError

__all__ = ["TiedParameters"]

Holder = tuple[str, str]
"""A block and the name of its parameter."""


class TiedParameters:
    """The tied parameters of one rank.

    Args:
        ties: groups of holders, in the same order on every rank.
        rank_of: rank of every block.
        modules: this rank's blocks; their tied parameters are made one.
        rank: this rank.
        transport: ``gloo`` or ``nccl``; groups of ranks are made here, which is a collective of all.
        timeout: longest wait for a sum.
    """

    def __init__(
        self,
        ties: Sequence[Sequence[Holder]],
        rank_of: Mapping[str, int],
        modules: Mapping[str, nn.Module],
        rank: int,
        transport: str,
        timeout: timedelta,
    ) -> None:
        self._shared: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        for holders in ties:
            parameter = _made_one([holder for holder in holders if holder[0] in modules], modules)
            ranks = sorted({rank_of[block] for block, _ in holders})
            if len(ranks) == 1:
                continue
            group = dist.new_group(ranks, timeout=timeout, backend=transport)
            if rank in ranks:
                assert parameter is not None
                assert isinstance(group, dist.ProcessGroup)
                self._shared.append((parameter, group))

    @property
    def across_ranks(self) -> bool:
        """Whether this rank shares a parameter with another."""
        return bool(self._shared)

    def sum_gradients(self) -> None:
        """Sum the gradients of each shared parameter over its holders. Raises RuntimeError as the transport does."""
        for parameter, group in self._shared:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
            dist.all_reduce(gradient, group=group)
            parameter.grad = gradient

    def close(self) -> None:
        """Drop the groups, which must not outlive the process group."""
        self._shared.clear()


def _made_one(holders: Sequence[Holder], modules: Mapping[str, nn.Module]) -> nn.Parameter | None:
    """Let all holders on this rank use the first one's parameter."""
    if not holders:
        return None
    first = modules[holders[0][0]].get_parameter(holders[0][1])
    for block, name in holders[1:]:
        if modules[block].get_parameter(name).shape != first.shape:
            raise UsageError(
                f"the model ties {name!r} of block {block!r} to {holders[0][1]!r} of block {holders[0][0]!r}, "
                f"but their shapes are {list(modules[block].get_parameter(name).shape)} and {list(first.shape)}"
            )
        path, _, leaf = name.rpartition(".")
        setattr(modules[block].get_submodule(path), leaf, first)
    return first
