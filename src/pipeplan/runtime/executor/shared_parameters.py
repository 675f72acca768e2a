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

import itertools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import zip_longest
from types import MappingProxyType
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.executor.channels import Ranks, groups_of
from pipeplan.runtime.executor.rank_program import Division, Held
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.parallel import Share
from pipeplan.runtime.parallel.sharding import ParameterPart
from pipeplan.runtime.parallel.weight_grads import gradient_format

Holder = tuple[str, str]
"""A block and the name of its parameter."""

Copy = tuple[str, str]
"""A parameter as ``block.name``, and what is the same of all its copies."""


@dataclass(frozen=True, slots=True, eq=False)
class _SharedParameter:
    """All there is of one parameter: blocks that have it, its whole shape, and who has which part of it.

    ``ranks_of`` [part] ascend; ``with_blocks`` [some of its blocks] are the ranks that have just these.
    """

    holders: tuple[Holder, ...]
    shape: tuple[int, ...]
    ranks_of: Mapping[ParameterPart, Ranks]
    with_blocks: _WithBlocks

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
        found: dict[tuple[int, ...], list[Ranks]] = defaultdict(list)
        for part, ranks in self.ranks_of.items():
            found[self.number(part)].append(ranks)
        return {number: _together(found[number]) for number in sorted(found)}

    def blocks_on(self, rank: int) -> tuple[str, ...]:
        """Those of its blocks that a rank has."""
        return next((blocks for blocks, ranks in self.with_blocks.items() if rank in ranks), ())

    def stores(self, part: ParameterPart, rank: int, divided: Mapping[int, Division]) -> bool:
        """Whether the part is this rank's to count: it is of the first kind, and this the first rank that has it.

        Where ranks divide it, the first that has these rows.
        """
        first, lowest = next(iter(self.ranks_of)), self.ranks_of[part][0]
        mine = rank in divided[lowest].ranks if lowest in divided else rank == lowest
        return part.kind == first.kind and part.adds and mine

    @property
    def of_experts(self) -> bool:
        """Whether devices share it as experts."""
        return any(part.of_experts for part in self.ranks_of)

    def divided(self, known: _Divisions) -> tuple[_Divided, bool]:
        """With whom ranks divide it, and whether all do so alike, so that each sums its rows alone.

        Where they do not, whole gradients are summed, and nothing but what an optimizer keeps is divided.
        """
        return known.of(self.with_blocks, self.of_experts, may=bool(self.shape), alike=self.alike)


_WithBlocks = Mapping[tuple[str, ...], frozenset[int]]
_Divided = Mapping[int, Division]


class _Divisions:
    """Who divides what; parameters that the same ranks have of the same blocks are looked at once."""

    def __init__(self, divisions: Sequence[Division]) -> None:
        self._all = [(division, frozenset(division.ranks)) for division in divisions]
        self._found: dict[tuple[int, bool, bool, bool], tuple[_Divided, bool]] = {}

    def of(self, with_blocks: _WithBlocks, of_experts: bool, *, may: bool, alike: bool) -> tuple[_Divided, bool]:
        """As :meth:`_SharedParameter.divided` of one that ``may`` be, and is split ``alike`` everywhere or not."""
        key = id(with_blocks), of_experts, may, alike
        if key not in self._found:
            met = [*self._whole(with_blocks, of_experts)] if may else []
            ways = {(division.level, len(division.ranks)) for division in met}
            all_do = sum(len(division.ranks) for division in met) == sum(map(len, with_blocks.values()))
            alike = alike and all_do and len(ways) == 1
            found = dict[int, Division]()
            for division in met:
                found.update(dict.fromkeys(division.ranks, division if alike else division._replace(level=1)))
            self._found[key] = found, alike
        return self._found[key]

    def _whole(self, with_blocks: _WithBlocks, of_experts: bool) -> Iterator[Division]:
        """Divisions that have all blocks ``with_blocks`` that their ranks have, which are in no others of these."""
        for blocks, ranks in with_blocks.items():
            left = {block: set(ranks) for block in blocks}  # those that the first divisions do not have
            for division, members in self._all:
                if division.of_experts != of_experts or left.keys().isdisjoint(division.blocks):
                    continue
                first = [block in division.blocks and members <= own for block, own in left.items()]
                for block in left.keys() & division.blocks:
                    left[block] -= members
                if all(first):
                    yield division


@dataclass(frozen=True, slots=True)
class Divided:
    """A parameter that this rank divides with others, and its ``blocks`` that have it.

    Where others have it divided in another way, whole gradients are summed first, and it is not ``scattered``.
    """

    whole: nn.Parameter
    blocks: tuple[str, ...]
    division: Division
    scattered: bool


@dataclass(frozen=True, slots=True)
class _GradientSum:
    """A parameter whose gradients are summed: what this rank has of it; the whole's shape where parts are unlike."""

    name: str
    held: dict[ParameterPart, nn.Parameter]
    shape: tuple[int, ...] | None

    @property
    def first(self) -> nn.Parameter:
        return next(iter(self.held.values()))

    @property
    def likeness(self) -> str:
        """What is the same of all copies: of parts that are unlike, only the whole's shape."""
        return _fingerprint(self.first) if self.shape is None else f"a part of {list(self.shape)}"

    @property
    def _format(self) -> torch.dtype:
        return gradient_format(self.first)

    def given(self) -> Tensor:
        """This rank's summand."""
        if self.shape is None:
            found = self.first.grad
            return torch.zeros_like(self.first, dtype=self._format) if found is None else found.contiguous()
        whole = self.first.new_zeros(self.shape, dtype=self._format)
        for part, parameter in self.held.items():
            if parameter.grad is not None and part.adds:
                part.spread(parameter.grad, whole)
        return whole

    def take(self, total: Tensor) -> None:
        """The sum becomes the gradient."""
        for part, parameter in self.held.items():
            parameter.grad = total if self.shape is None else part.within(total).clone()


class SummedOnce(ABC):
    """Gradients that ranks sum together, which may begin when nothing more is added to them in an iteration.

    That is when :meth:`done` has been called for each of ``num_blocks`` that have them; ``left`` are those to come.
    """

    level = 0
    num_blocks = left = 0

    def done(self) -> None:
        """Nothing more comes of one of the blocks."""
        self.left -= 1
        if not self.left:
            self.reduce()

    @abstractmethod
    def reduce(self) -> None:
        """Begin to sum."""

    @abstractmethod
    def reduced(self) -> None:
        """Wait until that is done."""


class _SumBucket(SummedOnce):
    """Sums over the same ranks; of ``blocks``, which one stage of the plan alone has, or else of any."""

    def __init__(self, blocks: tuple[str, ...]) -> None:
        self.blocks = blocks
        self.sums: list[_GradientSum] = []
        self.group: dist.ProcessGroup | None = None
        self._begun: list[tuple[Tensor, dist.Work]] = []

    @property
    def _trained(self) -> list[_GradientSum]:
        return [each for each in self.sums if each.first.requires_grad]

    def reduce(self) -> None:
        """Begin to sum them, and in how many ranks there is a gradient at all: where none has one, none gets one."""
        trained = self._trained
        if not trained:
            return
        present = [any(each.grad is not None for each in one.held.values()) for one in trained]
        everywhere = torch.tensor(present, dtype=torch.int32).to(trained[0].first.device)
        for total in (everywhere, *(one.given() for one in trained)):
            work = dist.all_reduce(total, group=self.group, async_op=True)
            assert work is not None, "this rank is a member of the group"
            self._begun.append((total, work))

    def reduced(self) -> None:
        """Wait, and take the sums."""
        for _, work in self._begun:
            work.wait()
        everywhere, *totals = [total for total, _ in self._begun] or [torch.empty(0)]
        for one, total, anywhere in zip(self._trained if totals else (), totals, everywhere.tolist(), strict=True):
            if anywhere:
                one.take(total)
        self._begun = []


class SharedParameters:
    """The parameters of one rank that others have copies or shares of, or that blocks share.

    ``holders`` say who has which share of every block, in the same order on every rank. Tied parameters of ``modules``,
    this rank's blocks, are made one. Construction makes groups of ranks, which is a collective of all. ``divided`` are
    those of which ranks keep rows each, by ``divisions``: of their rows gradients are summed after :meth:`divide`.
    ``stage_of`` are blocks that one stage alone has: copies of its replicas are summed in ``buckets``, by block.
    ``alone``: ``holders`` are only those of shares of this rank, and of what its parameters are tied to.
    """

    def __init__(
        self,
        model: Model,
        holders: Iterable[Held],
        modules: Mapping[Share, nn.Module],
        rank: int,
        transport: str,
        timeout: timedelta,
        divisions: Sequence[Division] = (),
        stage_of: Mapping[str, int] = MappingProxyType({}),
        *,
        alone: bool = False,
    ) -> None:
        known, same_rows = _Divisions(divisions), _SameRows()
        families = {family: family.divided(known) for family in _families(model, holders)}
        self._groups = groups_of(
            set(_summed_over(families, same_rows, rank if alone else None)),
            transport,
            timeout,
            rank if alone else None,
        )
        self._sums: dict[tuple[Ranks, tuple[str, ...]], _SumBucket] = {}
        self._copies: dict[Ranks, list[_GradientSum]] = defaultdict(list)
        self._elsewhere: set[int] = set()
        self.divided: list[Divided] = []
        for family, (shared, alike) in families.items():
            held = _made_one(family, model, modules)
            self._elsewhere |= {id(each) for part, each in held.items() if not family.stores(part, rank, shared)}
            if held and rank in shared:
                blocks, division = family.blocks_on(rank), shared[rank]
                self.divided += (Divided(each, blocks, division, alike) for each in dict.fromkeys(held.values()))
            for number, ranks in family.groups.items() if held else ():
                own = {part: each for part, each in held.items() if family.number(part) == number}
                if own and len(ranks) > 1:
                    found = _GradientSum(family.name, own, None if family.alike else family.shape)
                    self._copies[ranks].append(found)
                    if len(across := same_rows.of(ranks, shared, rank) if alike else ranks) > 1:
                        early = _replicated(family, stage_of) if rank not in shared and family.alike else ()
                        self._sums.setdefault((across, early), _SumBucket(early)).sums.append(found)
        for (ranks, _), bucket in self._sums.items():
            bucket.group = self._groups[ranks]

    @property
    def buckets(self) -> list[tuple[tuple[str, ...], SummedOnce]]:
        """Sums that may begin when nothing more is added by some blocks, with these."""
        return [(blocks, bucket) for (_, blocks), bucket in self._sums.items() if blocks]

    @property
    def across_ranks(self) -> bool:
        """Whether this rank shares a parameter with another."""
        return bool(self._copies)

    def counted(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those that are this rank's to count or to store: of copies, the first rank's; of shares, every one."""
        return [parameter for parameter in parameters if id(parameter) not in self._elsewhere]

    def copies(self) -> dict[Ranks, list[Copy]]:
        """What this rank's copies are like, for :func:`require_equal_copies`, by the ranks that have some, too."""
        return {ranks: [(each.name, each.likeness) for each in sums] for ranks, sums in self._copies.items()}

    def divide(self, own: Callable[[nn.Parameter], nn.Parameter]) -> None:
        """From now on sum what each rank keeps of a gradient, where all divide it alike."""
        alike = {id(each.whole) for each in self.divided if each.scattered}
        for one in itertools.chain.from_iterable(bucket.sums for bucket in self._sums.values()):
            one.held.update({part: own(each) for part, each in one.held.items() if id(each) in alike})
        self._elsewhere |= {id(own(each.whole)) for each in self.divided if id(each.whole) in self._elsewhere}

    def sum_gradients(self) -> None:
        """Sum the gradients of each shared parameter over its copies. Raises RuntimeError as the transport does.

        Few ranks first: what is tied, which many have, would keep replicas of a stage waiting for other stages' ranks.
        """
        for (_, blocks), bucket in sorted(self._sums.items(), key=lambda each: (len(each[0][0]), each[0])):
            if not blocks or bucket.left == bucket.num_blocks:  # else it has begun, and is waited for
                bucket.reduce()
            bucket.left = bucket.num_blocks
            bucket.reduced()

    def close(self) -> None:
        """Drop the groups, which must not outlive the process group."""
        self._sums.clear()
        self._copies.clear()
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


def _families(model: Model, holders: Iterable[Held]) -> list[_SharedParameter]:
    """All parameters of the model, each once, in the same order on every rank."""
    ranks_of: dict[str, dict[Share, set[int]]] = defaultdict(lambda: defaultdict(set))
    for share, ranks in holders:
        ranks_of[share.block][_whoever(share)].update(ranks)
    blocks_of = {block: set[int]().union(*shares.values()) for block, shares in ranks_of.items()}
    here = dict[tuple[str, ...], _WithBlocks]()
    ascending = dict[tuple[int, ...], Ranks]()
    shapes = model.parameter_shapes()
    tied = {holder for group in model.tied for holder in group}
    found = []
    for group in (*model.tied, *((holder,) for holder in shapes if holder not in tied)):
        parts: dict[ParameterPart, list[set[int]]] = defaultdict(list)
        for block, name in group:
            for share, each in ranks_of.get(block, {}).items():
                parts[model.part_of(share, name)].append(each)
        if not parts:  # none of what this rank knows of
            continue
        blocks = tuple(block for block, _ in group)
        if blocks not in here:
            here[blocks] = _with_blocks(blocks, blocks_of)
        for sets in parts.values():
            if (key := tuple(map(id, sets))) not in ascending:
                ascending[key] = tuple(sorted(set[int]().union(*sets)))
        of_part = {part: ascending[tuple(map(id, sets))] for part, sets in parts.items()}
        found.append(_SharedParameter(group, shapes[group[0]], of_part, here[blocks]))
    return found


def _together(sets: Sequence[Ranks]) -> Ranks:
    """All ranks of some sets, ascending, as those of each are."""
    return sets[0] if len(sets) == 1 else tuple(sorted(set().union(*sets)))


def _whoever(share: Share) -> Share:
    """A share without the ranks that have it, or others of its block."""
    partners = tuple(range(share.count)) if share.partners else ()
    experts, each = (tuple(range(len(line))) for line in (share.experts, share.expert_parts))
    alike = replace(share, partners=partners, experts=experts, expert_parts=each)
    return replace(alike, places=(), context=(), ring=False)


def _with_blocks(blocks: Sequence[str], ranks_of: Mapping[str, set[int]]) -> _WithBlocks:
    """{some of the blocks: ranks that have just these}; ``ranks_of`` [block] are those that have it."""
    found = dict[tuple[str, ...], frozenset[int]]()
    for block in dict.fromkeys(blocks):
        own = frozenset(ranks_of.get(block, ()))
        more = {(*before, block): ranks & own for before, ranks in found.items()}
        rest = {before: ranks - own for before, ranks in found.items()}
        alone = {(block,): own.difference(*found.values())}
        found = {each: ranks for each, ranks in (rest | more | alone).items() if ranks}
    return found


class _SameRows:
    """Ranks that keep the same rows of what they divide: of each set that sums something found once."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int, int], tuple[Ranks, _Divided, Ranks]] = {}

    def of(self, ranks: Ranks, divided: _Divided, rank: int) -> Ranks:
        """Among ranks that share a part in equal divisions, those that keep the same rows as this one."""
        key = id(ranks), id(divided), rank
        if key not in self._found:
            number = divided[rank].ranks.index(rank)
            met = dict(zip(map(id, divided.values()), divided.values(), strict=True)).values()  # long to compare
            same = {division.ranks[number] for division in met}
            self._found[key] = tuple(sorted(same.intersection(ranks))), divided, ranks  # kept, as ids are of these
        return self._found[key][0]


def _summed_over(
    families: Mapping[_SharedParameter, tuple[_Divided, bool]], same_rows: _SameRows, only: int | None
) -> Iterator[Ranks]:
    """All sets of ranks that sum something, or those with this one ``only``."""
    for family, (divided, alike) in families.items():
        for ranks in family.groups.values():
            own = ranks if only is None else ranks[:0] if only not in ranks else (only,)
            for rank in own if alike else own[:1]:
                across = same_rows.of(ranks, divided, rank) if alike else ranks
                if len(across) > 1:
                    yield across


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


def _replicated(family: _SharedParameter, stage_of: Mapping[str, int]) -> tuple[str, ...]:
    """The blocks that have a parameter, if one stage has them all, and no other any."""
    blocks = tuple(dict.fromkeys(block for block, _ in family.holders))
    stages = {stage_of.get(block) for block in blocks}
    return blocks if len(stages) == 1 and None not in stages else ()
