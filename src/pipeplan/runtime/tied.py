"""Parameters that exist more than once: in blocks that share one, in replicas of a stage, on several routes.

On one rank blocks that share a parameter, such as GPT-2's token embedding and head, get one and the same, so their
gradients add by themselves. Between ranks every holder has a copy of equal value; after a step's programs the copies'
gradients are summed, each rank's once, and all make the same update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn

from pipeplan.errors import UsageError

__all__ = ["SharedParameters", "require_equal_copies"]

Holder = tuple[str, str]
"""A block and the name of its parameter."""

Copy = tuple[str, str]
"""A parameter as ``block.name``, and what is the same of all its copies."""

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Shared:
    """Parameters that the same ranks have copies of, in the same order on each, and the group of these ranks."""

    ranks: Ranks
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
        self._shared = [_Shared(group, found[group], _joined(made)) for group, made in groups.items() if rank in group]
        self._names = {
            id(each): f"{block}.{name}" for block, module in modules.items() for name, each in module.named_parameters()
        }
        self._elsewhere = {id(each) for group in found if rank in group[1:] for each in found[group]}

    @property
    def across_ranks(self) -> bool:
        """Whether this rank shares a parameter with another."""
        return bool(self._shared)

    def counted(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those of this rank's parameters that are this rank's to count or to store: of copies, the first rank's."""
        return [parameter for parameter in parameters if id(parameter) not in self._elsewhere]

    def copies(self) -> dict[Ranks, list[Copy]]:
        """What this rank's copies are like, for :func:`require_equal_copies`, by the ranks that have some, too."""
        return {
            shared.ranks: [(self._names[id(each)], _fingerprint(each)) for each in shared.parameters]
            for shared in self._shared
        }

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


def require_equal_copies(told: Sequence[Mapping[Ranks, Sequence[Copy]]]) -> None:
    """Refuse models that are not the same on all ranks: their copies would stay different, or not fit each other.

    Args:
        told: [rank] what its copies are like.

    Raises:
        UsageError: two copies differ; the same error on every rank.
    """
    for rank, copies in enumerate(told):
        for ranks, own in copies.items():
            for (name, found), (first, expected) in zip_longest(own, told[ranks[0]][ranks], fillvalue=("", "nothing")):
                if found != expected:
                    raise UsageError(
                        f"ranks {ranks[0]} and {rank} do not start with the same parameters: {first or 'beyond them'} "
                        f"is {expected} and {name or 'beyond them'} is {found}; the model must be the same on all "
                        "ranks, and take random numbers from torch's default generator alone"
                    )


def _fingerprint(parameter: nn.Parameter) -> str:
    """Format, shape, and a checksum of the values."""
    values = parameter.detach().reshape(-1).cpu().view(torch.uint8).numpy()
    return (
        f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)} with checksum {crc32(values.data):08x}"
    )


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
