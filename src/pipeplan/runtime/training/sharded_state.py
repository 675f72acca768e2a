"""State that replicas of a stage divide (ZeRO): a rank updates some rows of each parameter, and gets the others.

What blocks of a rank hold together is exchanged together, in a :class:`StateUnit`. By level 1 a unit's gradients are
reduced and scattered in a stage's last action, as soon as nothing more is added to them, in the plan's buckets, or at
its end; whole gradients of replicas (level 0) are summed at the same moments. Updated rows are gathered after the step.
By level 2 gradients are reduced during the programs; by level 3 parameters have no memory either, but from when they
are gathered until they are given up. Programs say when, in UNSHARD, RESHARD and REDUCE_GRAD; the action before a
RESHARD gives a group of blocks up as soon as it is through with it. Where programs do not say, blocks are gathered and
reduced one by one inside of actions, the next one's parameters while one computes.

torch's ``fully_shard`` keeps its own rows beside whole parameters, which levels 1 and 2 have no memory for. A program
could drive it at level 3 (``benchmarks/torch_sharding.py``); all levels are here, for they share when exchanges begin
and end, buckets, and sums over stages that have a parameter in common.
``ZeroRedundancyOptimizer`` gives ranks whole parameters, of uneven sizes, and sums whole gradients.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import sub

import torch
from torch import Tensor, nn

from pipeplan.runtime.executor.interpreter import Runner
from pipeplan.runtime.executor.process_groups import Pending, ProcessGroups, RankGroup
from pipeplan.runtime.executor.rank_program import Program, ProgramStep, StagePart
from pipeplan.runtime.executor.shared_parameters import Divided, SummedOnce
from pipeplan.runtime.executor.stage import MiniBatch
from pipeplan.runtime.executor.tensors import Produced, Received
from pipeplan.runtime.parallel.sharding import range_of
from pipeplan.runtime.parallel.weight_grads import WeightGradQueue, gradient_format
from pipeplan.workload.kinds import PARAMETER_ROLES, RESHARD, UNSHARD

IN_ACTIONS, GATHERED = 2, 3
"""The levels from which on gradients are reduced after each action, and parameters gathered for each use."""


class _Rows:
    """The rows of a parameter that each rank of a division updates; ``own`` are this one's, which optimizers step."""

    def __init__(self, whole: nn.Parameter, count: int, index: int, *, apart: bool) -> None:
        if apart or not whole.is_contiguous():  # memory of its own, which can be given up, and rows one after another
            whole.data = whole.data.clone(memory_format=torch.contiguous_format)
        self.whole, self.shape = whole, whole.shape
        self.count = count
        self.width = whole[:1].numel()
        self.size = -(-whole.shape[0] // count) * self.width  # of the largest share
        begin, end = range_of(whole.shape[0], count, index)
        rows = whole.data[begin:end]
        self.own = nn.Parameter(rows.clone() if apart else rows, requires_grad=whole.requires_grad)
        if whole.requires_grad:
            self.own.grad_dtype = whole.grad_dtype
        self.begin = begin

    @property
    def place(self) -> tuple[int, torch.Size]:
        """The first of this rank's rows, and the shape of the parameter that they are of."""
        return self.begin, self.shape

    def put(self, gradient: Tensor, parts: Tensor) -> None:
        """Fill ``parts`` [rank, size] with each rank's rows."""
        for own, part in self._views(gradient.contiguous(), parts):
            part.copy_(own)

    def take(self, parts: Tensor) -> None:
        """Fill the whole parameter from such parts."""
        for own, part in self._views(self.whole.data, parts):
            own.copy_(part)

    def _views(self, whole: Tensor, parts: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of both the same rows, one rank's after another's, or all at once where each has as many."""
        if whole.shape[0] % self.count == 0:
            yield whole.view(parts.shape), parts
            return
        for number, part in enumerate(parts):
            begin, end = range_of(whole.shape[0], self.count, number)
            yield whole[begin:end].view(-1), part[: (end - begin) * self.width]


class StateUnit(SummedOnce):
    """Parameters that are exchanged together by the ranks of a division."""

    def __init__(self, divided: Sequence[Divided], group: RankGroup, index: int) -> None:
        first = divided[0]
        self.level, self.scattered, self.blocks = first.division.level, first.scattered, first.blocks
        self._count, self._group = len(first.division.ranks), group
        self._apart = self.level >= GATHERED
        self.rows = [_Rows(each.whole, self._count, index, apart=self._apart) for each in divided]
        self._size = sum(each.size for each in self.rows)
        self._uses = 0
        self._gathering: Pending | None = None
        self._reducing: Pending | None = None
        if self._apart:
            self._free()

    def unshard(self) -> None:
        """Begin to gather parameters, unless they are there, or are coming, already.

        What comes has its memory from here on; it is copied to where parameters are when it is needed.
        """
        if self._apart and self._uses == 0:
            self.gather()
        self._uses += 1

    def reshard(self) -> None:
        """Give the gathered parameters up, when nobody needs them any more."""
        self._uses -= 1
        if self._apart and self._uses == 0:
            if self._gathering is not None:  # nobody needed it
                self._group.finish(self._gathering, self.rows[0].own.device)
                self._gathering = None
            self._free()

    @property
    def has_memory(self) -> bool:
        """Whether parameters have memory, or what comes of them has."""
        return self._gathering is not None or any(each.whole.untyped_storage().size() for each in self.rows)

    def gather(self) -> None:
        """Begin to gather what ranks have of whole parameters."""
        flat = self.rows[0].own.new_empty(self._size)  # of smaller shares nobody reads the rest
        for each, at in self._places():
            flat[at : at + each.own.numel()] = each.own.data.reshape(-1)
        self._gathering = self._group.start_gather(flat)

    def ready(self) -> None:
        """Wait until parameters are whole; no graph takes notice, to which they are what they were."""
        if self._gathering is not None:
            parts = self._group.finish(self._gathering, self.rows[0].own.device).view(self._count, self._size)
            for each, at in self._places():
                if self._apart:
                    each.whole.untyped_storage().resize_(each.whole.nbytes)
                each.take(parts[:, at : at + each.size])
            self._gathering = None

    def reduce(self) -> None:
        """Begin to sum gradients, of which each rank keeps its rows: those of parameters that have one on some rank."""
        self.reduced()
        trained = [each for each, _ in self._places() if each.whole.requires_grad]
        if not trained:
            return
        format_ = gradient_format(trained[0].own)
        flat = trained[0].own.new_empty(self._count, self._size + len(self.rows), dtype=format_)
        for number, (each, at) in enumerate(self._places()):
            gradient, parts = each.whole.grad, flat[:, at : at + each.size]
            flat[:, self._size + number] = gradient is not None
            if gradient is None:  # others may have one
                parts.zero_()
            else:
                each.put(gradient, parts)
            each.whole.grad = None
        self._reducing = self._group.start_scatter(flat)

    def reduced(self) -> None:
        """Wait until that is done; sums add up."""
        if self._reducing is None:
            return
        part = self._group.finish(self._reducing, self.rows[0].own.device)
        self._reducing = None
        there = part[self._size :].tolist()
        for number, (each, at) in enumerate(self._places()):
            if there[number]:
                own = part[at : at + each.own.numel()].view(each.own.shape)
                each.own.grad = own if each.own.grad is None else each.own.grad + own

    def _places(self) -> list[tuple[_Rows, int]]:
        """Where each parameter's rows begin in what is exchanged."""
        found, at = [], 0
        for each in self.rows:
            found.append((each, at))
            at += each.size
        return found

    def _free(self) -> None:
        for each in self.rows:
            each.whole.untyped_storage().resize_(0)


class ShardedState:
    """All that this rank divides with others; parameters of level 3 lose their memory here."""

    def __init__(
        self,
        divided: Iterable[Divided],
        groups: ProcessGroups,
        rank: int,
        sums: Iterable[tuple[tuple[str, ...], SummedOnce]] = (),
    ) -> None:
        """``sums`` are those of whole gradients, which begin as those of divided ones do, by their blocks."""
        together: dict[object, list[Divided]] = defaultdict(list)
        for each in divided:
            together[each.blocks, each.division, each.scattered, each.whole.dtype].append(each)
        self.units: list[StateUnit] = []
        self._units_of: dict[str, list[StateUnit]] = defaultdict(list)
        for found in together.values():
            ranks = found[0].division.ranks
            unit = StateUnit(found, groups.of(ranks), ranks.index(rank))
            self.units.append(unit)
            for block in found[0].blocks:
                self._units_of[block].append(unit)
        self._sums_of: dict[str, list[SummedOnce]] = defaultdict(list)
        once = [unit for unit in self.units if unit.scattered and unit.level < IN_ACTIONS]
        for blocks, bucket in (*sums, *((unit.blocks, unit) for unit in once)):
            for block in blocks:
                self._sums_of[block].append(bucket)
        self.rows = {id(each.whole): each for unit in self.units for each in unit.rows}

    def own(self, parameter: nn.Parameter) -> nn.Parameter:
        """What this rank updates of a parameter."""
        found = self.rows.get(id(parameter))
        return parameter if found is None else found.own

    def reduce(self) -> None:
        """Reduce what was not during the programs, and wait for all that was."""
        for unit in self.units:
            if unit.scattered and unit.level == 1 and unit.left == unit.num_blocks:
                unit.reduce()  # by actions, or where no program says when
            unit.left = unit.num_blocks
        for unit in self.units:
            unit.reduced()
            left = unit.scattered and any(each.whole.grad is not None for each in unit.rows)
            assert not left, "all that adds to gradients is followed by their reduction"

    def take_sums(self) -> None:
        """Keep this rank's rows of gradients that were summed whole."""
        for unit in self.units:
            for each in unit.rows if not unit.scattered else ():
                if each.whole.grad is not None:
                    each.own.grad = each.whole.grad[each.begin : each.begin + len(each.own)].clone()
                    each.whole.grad = None

    def gather(self) -> None:
        """Make parameters whole after their rows have changed, where they are kept whole."""
        units = [unit for unit in self.units if unit.level < GATHERED]
        for unit in units:
            unit.gather()
        for unit in units:
            unit.ready()

    def stage(self, part: StagePart, num_gradients: int) -> ShardedStage | None:
        """What a stage exchanges during the programs, in which so many of its actions add to gradients."""
        units = [self._units_of[block] for block in part.blocks]
        sums = [self._sums_of[block] for block in part.blocks]
        for each in itertools.chain.from_iterable(sums):
            each.num_blocks += 1
            each.left += 1
        if not any(sums) and not any(unit.level > 1 for own in units for unit in own):
            return None
        return ShardedStage(part, units, sums, num_gradients)


@dataclass(slots=True)
class ShardedStage:
    """What a stage exchanges during the programs; ``units`` [block] are those that have its parameters.

    ``sums`` [block] are of gradients that are summed once, during the last of ``num_gradients`` actions that add to
    them.
    Where actions of the program exchange, blocks only wait, and the last action before a RESHARD gives up what it is
    through with. Autograd runs all of a block, which was made later, before all of the blocks before it, so that when
    it comes to a block, the ones that it was at before are done with.
    """

    part: StagePart
    units: Sequence[Sequence[StateUnit]]
    sums: Sequence[Sequence[SummedOnce]]
    num_gradients: int
    _added: int = 0
    _unsummed: int = field(init=False)
    _starts: frozenset[int] = field(init=False)
    _exchanges: bool = field(init=False)
    _gathers: bool = field(init=False)
    _bounds: Sequence[int] = field(init=False)
    _lent: frozenset[int] = field(init=False)
    _ending: frozenset[int] = frozenset()
    _given_up: set[int] = field(default_factory=set)
    _open: set[int] = field(default_factory=set)
    _at: int | None = None
    _owed: list[StateUnit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._unsummed = len(self.sums)
        starts = itertools.accumulate(self.part.buckets, sub, initial=len(self.part.blocks))
        self._starts = frozenset(itertools.islice(starts, 1, None))
        highest = max((unit.level for own in self.units for unit in own), default=0)
        self._exchanges, self._gathers = highest >= IN_ACTIONS, highest >= GATHERED
        self._bounds = (0, *itertools.accumulate(self.part.block_groups))
        rows = (row for own in self.units for unit in own if unit.level >= GATHERED for row in unit.rows)
        self._lent = frozenset(row.whole.untyped_storage()._cdata for row in rows)  # the same when it is resized

    def run(self, step: ProgramStep) -> None:
        """UNSHARD, RESHARD or REDUCE_GRAD of a group of blocks."""
        group = step.action.part or 0
        if step.action.kind == RESHARD:
            self._give_up({group})
            self._given_up.remove(group)
            return
        for unit in self._units_of(group):
            if step.action.kind == UNSHARD:
                unit.unshard()
            elif unit.scattered:
                unit.reduce()

    def begin(self, step: ProgramStep) -> None:
        """An action, or a part of one, begins, which is the last that needs some groups for the time being."""
        self._ending = frozenset(step.last_of)

    def enter(self, number: int) -> None:
        """A forward comes to a block."""
        self._inside(number, number + 1)
        for unit in self.units[number]:
            unit.ready()

    def leave(self, number: int) -> None:
        """It is done with it."""
        if not self.part.block_groups:
            self._close({number + 1})
        self._give_up({group for group in self._ending if self._bounds[group + 1] <= number + 1})

    def watch(self, number: int, made: Tensor) -> Tensor:
        """Let a backward that comes to a block's output see to what it needs, and to what it has done.

        Of an output that is on gathered parameters there is a copy, for these go before it does.
        """
        enter, wanted = self._enter_backward, len(self._starts) > 1 or (self._exchanges and self.units[number])
        if self.part.block_groups:
            enter, wanted = self._pass_backward, self._gathers
        if self._lent and made.untyped_storage()._cdata in self._lent:
            made = made.clone()
        if made.requires_grad and wanted:
            hook: Callable[[Tensor], None] = partial(enter, number)
            made.register_hook(hook)  # type: ignore[no-untyped-call]  # torch has it without types
        return made

    def begin_backward(self, *, adds: bool) -> None:
        """Gradients are added to, and have to be reduced before; it waits for parameters when it comes to them."""
        self._added += adds
        for unit in _once(self.units) if self.part.block_groups else ():
            unit.reduced()

    def end_backward(self) -> None:
        """A backward is done with its last block."""
        if self.part.block_groups and self._at is not None:
            self._leave_backward(self._at)
            self._at = None
        if not self.part.block_groups:
            self._done()
            self._close(set())
        if self._added == self.num_gradients:
            self._sum(0)
            self._added, self._unsummed = 0, len(self.sums)

    def _sum(self, begin: int) -> None:
        """Nothing more is added by blocks from ``begin`` on: backward, the same on all ranks that sum with this one."""
        for number in reversed(range(begin, self._unsummed)):
            for each in self.sums[number]:
                each.done()
        self._unsummed = min(begin, self._unsummed)

    def _units_of(self, group: int) -> list[StateUnit]:
        return _once(self.units[self._bounds[group] : self._bounds[group + 1]])

    def _give_up(self, groups: set[int]) -> None:
        """Let go of groups that are not needed any more; their RESHARD, which is still to come, finds it done."""
        for group in sorted(groups - self._given_up):
            self._given_up.add(group)
            for unit in self._units_of(group):
                unit.reshard()

    def _leave_backward(self, begin: int) -> None:
        """It is done with all blocks from ``begin`` on."""
        self._give_up({group for group in self._ending if self._bounds[group] >= begin})

    def _pass_backward(self, number: int, _: Tensor) -> None:
        """It comes to a block, where actions exchange."""
        self._leave_backward(number + 1)
        self._at = number
        for unit in self.units[number]:
            unit.ready()

    def _enter_backward(self, number: int, _: Tensor) -> None:
        if self._at != number:
            self._done()
            self._at = number
        self._close({number, number - 1})
        self._inside(number, number - 1)
        for unit in self.units[number]:
            unit.ready()

    def _inside(self, *numbers: int) -> None:
        """Have blocks gathered, the one after this one meanwhile."""
        for number in numbers:
            if not self.part.block_groups and 0 <= number < len(self.units) and number not in self._open:
                self._open.add(number)
                for unit in self.units[number]:
                    unit.unshard()

    def _close(self, keep: set[int]) -> None:
        for number in sorted(self._open - keep):
            self._open.remove(number)
            for unit in self.units[number]:
                unit.reshard()

    def _done(self) -> None:
        """Reduce what the last block's backward made, or when its W has made it."""
        if self._at is None:
            return
        reduce, self._at = partial(self._reduce, self._at), None
        queue = WeightGradQueue.active()
        if queue is None:
            reduce()
        else:
            queue.put(reduce, ())

    def _reduce(self, number: int) -> None:
        if self._added == self.num_gradients and number in self._starts:
            self._sum(number)
        for unit in self._owed:
            unit.reduced()
        self._owed = [unit for unit in self.units[number] if unit.level > 1 and unit.scattered]
        for unit in self._owed:
            unit.reduce()


@dataclass(frozen=True, slots=True)
class ExchangingStage:
    """A stage whose state is told which of its actions begins."""

    runner: Runner
    state: ShardedStage

    @property
    def idle(self) -> bool:
        """As the stage."""
        return self.runner.idle

    def run(self, step: ProgramStep, inputs: Received, samples: MiniBatch) -> Produced:
        """As the stage."""
        self.state.begin(step)
        return self.runner.run(step, inputs, samples)


def with_last_uses(program: Program) -> Program:
    """The same, in which F, B and I know of which groups of blocks a RESHARD comes before the next of them.

    In a loop's round where that is so whatever comes next, the round once more or what is after it. Not of a backward
    of two forwards, for autograd comes to each block twice.
    """
    found = _last_uses(program.steps, defaultdict(set))
    for begin, end in () if program.loop is None else program.loop.rounds:
        next_round: dict[int, set[int]] = defaultdict(set)
        _last_uses(program.steps[begin:end], next_round)
        for counter, groups in _last_uses(program.steps[begin:end], next_round).items():
            found[counter] &= groups
    steps = (replace(step, last_of=tuple(sorted(found.get(step.counter, ())))) for step in program.steps)
    return replace(program, steps=tuple(steps)) if any(found.values()) else program


def _last_uses(steps: Sequence[ProgramStep], after: dict[int, set[int]]) -> dict[int, set[int]]:
    """{counter of an action: groups that it is the last to need}; ``after`` [stage] are given up next, there and here.

    It changes to what is so before the first of these steps.
    """
    found: dict[int, set[int]] = {}
    for step in reversed(steps):
        action = step.action
        if action.kind == RESHARD:
            after[action.stage].add(action.part or 0)
        elif action.role in PARAMETER_ROLES and step.counter not in found:  # else a part of an action
            groups = after.pop(action.stage, set())
            found[step.counter] = groups if len(step.samples) == 1 else set()
    return found


def _once(units: Iterable[Iterable[StateUnit]]) -> list[StateUnit]:
    """Those of level 2 and 3, each once."""
    return list(dict.fromkeys(unit for own in units for unit in own if unit.level > 1))
