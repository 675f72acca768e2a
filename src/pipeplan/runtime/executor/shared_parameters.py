"""Parameters with several copies: in blocks that share one, replicas of a stage, several routes, and shares.

Blocks of one rank that share a parameter, such as GPT-2's token embedding and head, get one and the same, so their
gradients add by themselves. Between ranks every holder has a copy; after a step's programs the copies' gradients are
summed, each rank's once, and all make the same update. Equal shares of split blocks are copies of each other, too.
Where a parameter is split in one stage and whole, or split otherwise, in another, gradients are assembled into whole
ones, summed over all ranks, and each takes its part.

torch's DistributedDataParallel sums, too, but over one set of ranks for a whole module, and in hooks, which weight
gradients that wait for W do not call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import zip_longest
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.executor.channels import Ranks, groups_of
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.parallel import Share
from pipeplan.runtime.parallel.sharding import ParameterPart

Holder = tuple[str, str]
"""A block and the name of its parameter."""

Copy = tuple[str, str]
"""A parameter as ``block.name``, and what is the same of all its copies."""


@dataclass(frozen=True, slots=True)
class _SharedParameter:
    """All there is of one parameter: blocks that have it, its whole shape, and who has which part of it."""

    holders: tuple[Holder, ...]
    shape: tuple[int, ...]
    ranks_of: Mapping[ParameterPart, Ranks]

    @property
    def name(self) -> str:
        """The first of its names."""
        return ".".join(self.holders[0])

    @property
    def alike(self) -> bool:
        """Whether it is split in one way everywhere, so that copies of a part are all there is to sum."""
        return len({part.kind for part in self.ranks_of}) == 1

    def number(self, part: ParameterPart) -> tuple[int, ...]:
        """Parts of one number are summed: of one share where all are alike, else all."""
        return part.number if self.alike else ()

    @property
    def groups(self) -> dict[tuple[int, ...], Ranks]:
        """Ranks whose gradients are summed, by the number of their parts."""
        found: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for part, ranks in self.ranks_of.items():
            found[self.number(part)].update(ranks)
        return {number: tuple(sorted(found[number])) for number in sorted(found)}

    def stores(self, part: ParameterPart, rank: int) -> bool:
        """Whether the part is this rank's to count: it is of the first kind, and this the first rank that has it."""
        first = next(iter(self.ranks_of))
        return part.kind == first.kind and part.adds and rank == min(self.ranks_of[part])


@dataclass(frozen=True, slots=True)
class _GradientSum:
    """A parameter whose gradients are summed: what this rank has of it; the whole's shape where parts are unlike."""

    name: str
    held: Mapping[ParameterPart, nn.Parameter]
    shape: tuple[int, ...] | None

    @property
    def first(self) -> nn.Parameter:
        return next(iter(self.held.values()))

    @property
    def likeness(self) -> str:
        """What is the same of all copies: of parts that are unlike, only the whole's shape."""
        return _fingerprint(self.first) if self.shape is None else f"a part of {list(self.shape)}"

    def given(self) -> Tensor:
        """This rank's summand."""
        if self.shape is None:
            return torch.zeros_like(self.first) if self.first.grad is None else self.first.grad.contiguous()
        whole = self.first.new_zeros(self.shape)
        for part, parameter in self.held.items():
            if parameter.grad is not None and part.adds:
                part.spread(parameter.grad, whole)
        return whole

    def take(self, total: Tensor) -> None:
        """The sum becomes the gradient."""
        for part, parameter in self.held.items():
            parameter.grad = total if self.shape is None else part.within(total).clone()


class SharedParameters:
    """The parameters of one rank that others have copies or shares of, or that blocks share.

    ``holders`` say who has which share of every block, in the same order on every rank. Tied parameters of ``modules``,
    this rank's blocks, are made one. Construction makes groups of ranks, which is a collective of all.
    """

    def __init__(
        self,
        model: Model,
        holders: Iterable[tuple[Share, int]],
        modules: Mapping[Share, nn.Module],
        rank: int,
        transport: str,
        timeout: timedelta,
    ) -> None:
        families = _families(model, holders)
        sets = {ranks for family in families for ranks in family.groups.values() if len(ranks) > 1}
        self._groups = groups_of(sets, transport, timeout)
        self._sums: dict[Ranks, list[_GradientSum]] = defaultdict(list)
        self._elsewhere: set[int] = set()
        for family in families:
            held = _made_one(family, model, modules)
            self._elsewhere |= {id(each) for part, each in held.items() if not family.stores(part, rank)}
            for number, ranks in family.groups.items() if held else ():
                own = {part: each for part, each in held.items() if family.number(part) == number}
                if own and len(ranks) > 1:
                    self._sums[ranks].append(_GradientSum(family.name, own, None if family.alike else family.shape))

    @property
    def across_ranks(self) -> bool:
        """Whether this rank shares a parameter with another."""
        return bool(self._sums)

    def counted(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those that are this rank's to count or to store: of copies, the first rank's; of shares, every one."""
        return [parameter for parameter in parameters if id(parameter) not in self._elsewhere]

    def copies(self) -> dict[Ranks, list[Copy]]:
        """What this rank's copies are like, for :func:`require_equal_copies`, by the ranks that have some, too."""
        return {ranks: [(each.name, each.likeness) for each in sums] for ranks, sums in self._sums.items()}

    def sum_gradients(self) -> None:
        """Sum the gradients of each shared parameter over its copies. Raises RuntimeError as the transport does.

        Few ranks first: what is tied, which many have, would keep replicas of a stage waiting for other stages' ranks.
        """
        for ranks, sums in sorted(self._sums.items(), key=lambda each: (len(each[0]), each[0])):
            _sum([each for each in sums if each.first.requires_grad], self._groups[ranks])

    def close(self) -> None:
        """Drop the groups, which must not outlive the process group."""
        self._sums.clear()
        self._groups.clear()


def require_equal_copies(copies_of: Sequence[Mapping[Ranks, Sequence[Copy]]]) -> None:
    """Refuse models that are not the same on all ranks: their copies would stay different, or not fit each other.

    ``copies_of`` [rank] says what its copies are like. Raises UsageError, the same on every rank.
    """
    for rank, copies in enumerate(copies_of):
        for ranks, own in copies.items():
            for (name, found), (first, expected) in zip_longest(
                own, copies_of[ranks[0]][ranks], fillvalue=("", "nothing")
            ):
                if found != expected:
                    raise UsageError(
                        f"ranks {ranks[0]} and {rank} do not start with the same parameters: {first or 'beyond them'} "
                        f"is {expected} and {name or 'beyond them'} is {found}; the model must be the same on all "
                        "ranks, and take random numbers only from torch's default generator"
                    )


def _fingerprint(parameter: nn.Parameter) -> str:
    """Format, shape, and a checksum of the values."""
    values = parameter.detach().reshape(-1).cpu().view(torch.uint8).numpy()
    return (
        f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)} with checksum {crc32(values.data):08x}"
    )


def _families(model: Model, holders: Iterable[tuple[Share, int]]) -> list[_SharedParameter]:
    """All parameters of the model, each once, in the same order on every rank."""
    ranks_of: dict[str, dict[Share, set[int]]] = defaultdict(lambda: defaultdict(set))
    for share, rank in holders:
        partners = tuple(range(share.count)) if share.partners else ()  # whoever they are
        alike = replace(share, partners=partners, places=())
        ranks_of[share.block][alike].add(rank)
    shapes = model.parameter_shapes()
    tied = {holder for group in model.tied for holder in group}
    found = []
    for group in (*model.tied, *((holder,) for holder in shapes if holder not in tied)):
        parts: dict[ParameterPart, set[int]] = defaultdict(set)
        for block, name in group:
            for share, ranks in ranks_of[block].items():
                parts[model.part_of(share, name)] |= ranks
        found.append(
            _SharedParameter(group, shapes[group[0]], {part: tuple(sorted(each)) for part, each in parts.items()})
        )
    return found


def _made_one(
    family: _SharedParameter, model: Model, modules: Mapping[Share, nn.Module]
) -> dict[ParameterPart, nn.Parameter]:
    """What this rank has of a parameter; holders of equal parts use the first one's."""
    held: dict[ParameterPart, nn.Parameter] = {}
    for block, name in family.holders:
        for share, module in modules.items():
            if share.block == block:
                first = held.setdefault(model.part_of(share, name), module.get_parameter(name))
                path, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(path), leaf, first)
    return held


def _sum(sums: Sequence[_GradientSum], group: dist.ProcessGroup) -> None:
    """Where one rank has a gradient all have to sum it, so they first exchange which have one."""
    if not sums:
        return
    present = [any(each.grad is not None for each in one.held.values()) for one in sums]
    everywhere = torch.tensor(present, dtype=torch.int32).to(sums[0].first.device)
    dist.all_reduce(everywhere, dist.ReduceOp.MAX, group=group)
    wanted = [one for one, anywhere in zip(sums, everywhere.tolist(), strict=True) if anywhere]
    totals = [one.given() for one in wanted]
    for work in [dist.all_reduce(total, group=group, async_op=True) for total in totals]:
        assert work is not None, "this rank is a member of the group"
        work.wait()
    for one, total in zip(wanted, totals, strict=True):
        one.take(total)
