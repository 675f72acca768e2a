"""Parameters that exist more than once: in blocks that share one, in replicas of a stage, on several routes.

On one rank blocks that share a parameter, such as GPT-2's token embedding and head, get one and the same, so their
gradients add by themselves. Between ranks every holder has a copy of equal value; after a step's programs the copies'
gradients are summed, each rank's once, and all make the same update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from pipeplan.errors import UsageError

__all__ = ["SharedParameters"]

Holder = tuple[str, str]
"""A block and the name of its parameter."""

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Shared:
    """Parameters that the same ranks have copies of, in the same order on each, and the group of these ranks."""

    parameters: list[nn.Parameter]
    group: dist.ProcessGroup


class SharedParameters:
    """The parameters of one rank that others have copies of, or that blocks share.

    Args:
        ties: groups of holders, in the same order on every rank.
        ranks_of: ranks of every block, ascending; blocks in the same order on every rank.
        modules: this rank's blocks; their tied parameters are made one.
        rank: this rank.
        transport: ``gloo`` or ``nccl``; groups of ranks are made here, which is a collective of all.
        timeout: longest wait for a sum.
    """

    def __init__(
        self,
        ties: Sequence[Sequence[Holder]],
        ranks_of: Mapping[str, Ranks],
        modules: Mapping[str, nn.Module],
        rank: int,
        transport: str,
        timeout: timedelta,
    ) -> None:
        tied = [_made_one([holder for holder in holders if holder[0] in modules], modules) for holders in ties]
        ranks = [tuple(sorted({r for block, _ in holders for r in ranks_of[block]})) for holders in ties]
        found: dict[Ranks, list[nn.Parameter]] = {group: [] for group in (*ranks, *ranks_of.values()) if len(group) > 1}
        for group, parameter in zip(ranks, tied, strict=True):
            if parameter is not None and group in found:
                found[group].append(parameter)
        seen = {id(parameter) for parameter in tied}
        for block, group in ranks_of.items():
            if block in modules and group in found:
                found[group] += [each for each in modules[block].parameters() if id(each) not in seen]
        groups = {group: dist.new_group(list(group), timeout=timeout, backend=transport) for group in sorted(found)}
        self._shared = [_Shared(found[group], _joined(made)) for group, made in groups.items() if rank in group]
        self._elsewhere = {id(each) for group in found if rank in group[1:] for each in found[group]}

    @property
    def across_ranks(self) -> bool:
        """Whether this rank shares a parameter with another."""
        return bool(self._shared)

    def counted(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those of this rank's parameters that are this rank's to count or to store: of copies, the first rank's."""
        return [parameter for parameter in parameters if id(parameter) not in self._elsewhere]

    def sum_gradients(self) -> None:
        """Sum the gradients of each shared parameter over its copies; one that no rank has stays absent.

        Raises:
            RuntimeError: as the transport does.
        """
        for shared in self._shared:
            _sum(shared)

    def close(self) -> None:
        """Drop the groups, which must not outlive the process group."""
        self._shared.clear()


def _sum(shared: _Shared) -> None:
    """Where one rank has a gradient all have to sum it, so they first tell each other."""
    trained = [parameter for parameter in shared.parameters if parameter.requires_grad]
    if not trained:
        return
    present = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
    present = present.to(trained[0].device)
    dist.all_reduce(present, dist.ReduceOp.MAX, group=shared.group)
    wanted = [parameter for parameter, anywhere in zip(trained, present.tolist(), strict=True) if anywhere]
    for parameter in wanted:
        given = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = given.contiguous()
    _wait(dist.all_reduce(parameter.grad, group=shared.group, async_op=True) for parameter in wanted)


def _wait(works: Iterable[dist.Work | None]) -> None:
    """Start all before the first is waited for."""
    for work in list(works):
        assert work is not None, "this rank is a member of the group"
        work.wait()


def _joined(made: dist.ProcessGroup | int | None) -> dist.ProcessGroup:
    assert isinstance(made, dist.ProcessGroup), "this rank is a member of the group"
    return made


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
