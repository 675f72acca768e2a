"""From a plan and a model's graph to what one rank does: the steps of its program, and what each takes and gives.

Nothing here needs torch. Blocks are matched by name; a plan whose stages exchange something else than the
model's edges say is refused before anything starts.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from pipeplan.costs.experts import as_copies_of_experts
from pipeplan.errors import UsageError
from pipeplan.files import Plan
from pipeplan.files.folded import device_programs, on_device
from pipeplan.runtime.executor.message_graph import (
    Message,
    MessageGraph,
    Numbers,
    SampleOwnership,
    Slices,
    TensorKey,
    hops_of,
    model_messages,
    planned_messages,
)
from pipeplan.runtime.parallel import Share
from pipeplan.workload.action import Action, StateAction
from pipeplan.workload.elements import RING, Again, Attribute, Dependency, Loop, Remade, Segment, Stage
from pipeplan.workload.kinds import GRADIENT_ROLES, PARTED_ROLES, RESHARD, UNSHARD, Role, is_instruction
from pipeplan.workload.mesh import COPIES, EXPERTS, PLACES, SAMPLES, SHARDS, Mesh, MeshAxis

Rows = tuple[Message, Numbers]
"""What a message carries of these samples."""


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One entry of a rank's program. Transfers have the message and the rank at its other end.

    ``samples`` are those that this rank computes on, or that are sent. A backward has those of each of its forwards,
    one after another: two where the micro-batch's forward ran in two halves. ``takes`` and ``gives`` are what the step
    takes and makes on this rank. An action in parts, which may wait inside for messages, is a step for each ``part``,
    of which one ``is_last``. A custom op's ``held`` says of all that it takes which of its ranks have which samples of
    it, as (message, rank, samples). It is the ``last_of`` some groups of its stage's blocks before their RESHARD.
    """

    counter: int
    action: Action
    samples: tuple[Numbers, ...]
    takes: tuple[Rows, ...] = ()
    gives: tuple[Rows, ...] = ()
    message: Message | None = None
    peer: int = -1
    held: tuple[tuple[Message, int, Numbers], ...] = ()
    part: int | None = None
    is_last: bool = True
    last_of: tuple[int, ...] = ()

    def later(self, turn: Turn, loop: ProgramLoop) -> ProgramStep:
        """What this step is some copies of a loop's round later."""
        copies = turn.copies
        by = copies * loop.samples
        numbered = self.action.stage if self.message is None else self.message.source
        return replace(
            self,
            counter=self.counter + turn.more(loop.entries),
            action=replace(self.action, microbatch=self.action.microbatch + copies * loop.microbatches[numbered]),
            samples=tuple(moved(own, by) for own in self.samples),
            takes=tuple((message, moved(own, by)) for message, own in self.takes),
            gives=tuple((message, moved(own, by)) for message, own in self.gives),
            held=tuple((message, rank, moved(own, by)) for message, rank, own in self.held),
        )

    @property
    def is_forward(self) -> bool:
        """Whether it is needed where nothing goes back: forwards, their messages, and the parameters for them."""
        if self.message is not None:
            return not self.message.is_gradient
        return self.action.role in (Role.FORWARD, Role.CUSTOM) or self.action.kind in (UNSHARD, RESHARD)


def moved(samples: Numbers, by: int) -> Numbers:
    """Later samples."""
    return tuple(sample + by for sample in samples)


class Turn(NamedTuple):
    """A step of a loop, by its number ``step``, or one after it: the same step some copies of its round later.

    ``run`` [round] is how many copies of each have run beside those that are in the steps, its own one included.
    """

    step: int
    copies: int
    run: tuple[int, ...]

    def more(self, each: Sequence[int]) -> int:
        """The total over all those copies, with ``each`` [round] for one of them."""
        return sum(copies * own for copies, own in zip(self.run, each, strict=True))


@dataclass(frozen=True, slots=True)
class ProgramLoop:
    """Steps that a rank runs again, ``repeats`` times more: those of each of ``rounds``, as (begin, end), in turn.

    Each time they are of ``samples`` later samples, and ``microbatches`` [stage] later micro-batches; what stands
    after them, and is of their round as ``own`` [step] says, is then later, too. What they take was made in steps that
    are repeated as well. ``entries`` [round] are as many of the program's, of which an action in parts is one.
    """

    rounds: tuple[tuple[int, int], ...]
    repeats: int
    samples: int
    microbatches: tuple[int, ...]
    own: tuple[int, ...]
    entries: tuple[int, ...]

    @property
    def lengths(self) -> list[int]:
        """[round] its steps."""
        return [end - begin for begin, end in self.rounds]

    @property
    def begun(self) -> int:
        """How many steps run as they are."""
        return self.rounds[0][1]

    def turns(self, repeats: int | None = None) -> Iterator[Turn]:
        """What runs after these, with the remaining number of rounds, if it is given."""
        times = self.repeats if repeats is None else repeats
        for number, (begin, end) in enumerate(self.rounds):
            before, after = (times,) * number, (0,) * (len(self.rounds) - number - 1)
            if number:
                yield from (Turn(index, 0, (*before, 0, *after)) for index in range(begin, end))
            for copies in range(1, times + 1):
                run = (*before, copies, *after)
                yield from (Turn(index, copies, run) for index in range(begin, end))
            rest = range(end, self.rounds[number + 1][0] if after else len(self.own))
            run = (*before, times, *after)
            yield from (Turn(index, times if self.own[index] <= number else 0, run) for index in rest)


Held = tuple[Share, tuple[int, ...]]
"""A share, and the ranks that have it."""


class Division(NamedTuple):
    """Ranks, in ascending order, that divide what they keep of some blocks, by a ZeRO level.

    Or of those parts of them that devices share as experts: ``of_experts``.
    """

    blocks: tuple[str, ...]
    ranks: tuple[int, ...]
    level: int
    of_experts: bool = False


@dataclass(frozen=True, slots=True)
class StagePart:
    """A stage as its rank sees it.

    ``inputs`` and ``outputs`` give, for each stage on the other end, the blocks whose outputs come in or go out;
    ``returns`` and ``awaits`` name those of them that get, or give, gradients. ``split`` is whether the stage runs I
    and W instead of B. ``shares`` says for each of the blocks what this rank has of it, ``meshes`` how the ranks of
    its replica, ``group``, stand for it; this one is number ``place`` of them. Of those that have the same and other
    pieces of every sequence, ``context``, it is number ``piece``.
    ``again`` says for each of them what backward computes again, and ``cores`` are those of which the plan knows an
    attention core.
    ``buckets`` are of how many blocks gradients are summed together while it still makes those of blocks before them,
    from its last block on; empty where all are summed after its last action.
    ``parameter_bytes`` the plan expects on each device, and ``waiting_bytes`` held for a micro-batch's W; 0 if it says
    nothing of them. ``cuts`` are how many blocks run before each part of its forward but the first. Where actions
    exchange its state, ``block_groups`` are how many blocks they are of. ``segments`` are what kernel backends run,
    of so many ``samples`` at a time; ``remade`` are tensors between its blocks that backward makes again. ``leaving``
    says of outputs that go, or whose gradients come, in slices of the sequence, of how many they are wanted;
    ``returning`` the same of gradients.
    """

    index: int
    blocks: tuple[str, ...]
    again: tuple[Again, ...]
    split: bool
    inputs: Mapping[int, tuple[str, ...]]
    outputs: Mapping[int, tuple[str, ...]]
    returns: frozenset[int]
    awaits: frozenset[int]
    shares: tuple[Share, ...] = ()
    meshes: tuple[Mesh, ...] = ()
    group: tuple[int, ...] = ()
    place: int = 0
    context: tuple[int, ...] = ()
    piece: int = 0
    parameter_bytes: int = 0
    waiting_bytes: int = 0
    cores: frozenset[str] = frozenset()
    buckets: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()
    block_groups: tuple[int, ...] = ()
    segments: tuple[Segment, ...] = ()
    remade: tuple[Remade, ...] = ()
    samples: int = 0
    leaving: Mapping[str, frozenset[int]] = field(default_factory=dict)
    returning: Mapping[str, int] = field(default_factory=dict)

    @property
    def counts_loss(self) -> bool:
        """Whether the stage's loss is this rank's to count: of devices that split a block, the first one's."""
        return self.place == 0

    def line(self, axis: MeshAxis) -> tuple[int, ...]:
        """The ranks along an axis of the group, in order."""
        return tuple(self.group[number] for number in axis.of(self.place))


@dataclass(frozen=True, slots=True)
class CustomOpPart:
    """A custom op as its rank sees it; ``takers`` are its ``devices`` that need what a message takes along."""

    index: int
    kind: str
    devices: tuple[int, ...]
    attributes: Mapping[str, Attribute]
    takers: Mapping[Message, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Program:
    """Everything a rank needs of the plan.

    ``holders`` are the plan's shares with the ranks that have each, in the same order on every rank; ``tensors`` names
    the blocks whose outputs, or gradients of outputs, a message carries, in order. ``lines`` are sets of ranks, of all
    the plan, that exchange something while they run an action together, ``edges`` its pairs of source and target ranks
    of messages. ``stages`` and ``custom_ops`` are those that run here, by the plan's index. With a ``loop``, ``steps``
    are what it is made of, while ``texts`` and ``mini_batch`` are of everything that it runs. ``divisions`` are all of
    the plan's, in the same order on every rank. ``stage_of`` has the blocks that one stage of the plan alone has.
    Where it ``is_alone`` all that is said of other ranks is only of those with which this one has something in common.
    ``pieces`` [stage][rank] are which pieces of every sequence ranks have, of stages where not all have all.
    """

    rank: int
    mini_batch: int
    microbatch_size: int
    texts: Sequence[str]
    steps: tuple[ProgramStep, ...]
    stages: Mapping[int, StagePart]
    holders: tuple[Held, ...]
    tensors: Mapping[Message, tuple[str, ...]]
    custom_ops: Mapping[int, CustomOpPart]
    lines: frozenset[tuple[int, ...]] = frozenset()
    edges: tuple[tuple[int, int], ...] = ()
    loop: ProgramLoop | None = None
    divisions: tuple[Division, ...] = ()
    stage_of: Mapping[str, int] = field(default_factory=dict)
    slices: Mapping[Message, Slices] = field(default_factory=dict)
    is_alone: bool = False
    pieces: Mapping[int, Mapping[int, int]] = field(default_factory=dict)

    def piece(self, stage: int, rank: int) -> int:
        """Which pieces of every sequence a rank has in a stage."""
        return self.pieces[stage][rank] if stage in self.pieces else 0

    def num_gradients(self, stage: int) -> int:
        """How many steps of an iteration add to gradients of a stage's parameters."""
        found = [step.action.stage == stage and step.action.role in GRADIENT_ROLES for step in self.steps]
        again = 0 if self.loop is None else self.loop.repeats * sum(sum(found[i:j]) for i, j in self.loop.rounds)
        return sum(found) + again

    def forwards(self) -> Program:
        """What goes forward alone, in the same order, which cannot deadlock as the whole does not."""
        before = [0, *itertools.accumulate(step.is_forward for step in self.steps)]
        loop = self.loop and replace(
            self.loop,
            rounds=tuple((before[begin], before[end]) for begin, end in self.loop.rounds),
            own=tuple(own for own, step in zip(self.loop.own, self.steps, strict=True) if step.is_forward),
        )
        return replace(self, steps=tuple(step for step in self.steps if step.is_forward), loop=loop)

    def keys(self, message: Message, *, made: bool = False) -> tuple[TensorKey, ...]:
        """The tensors of a message as they are sent, or as they are made."""
        names, slices = self.tensors[message], self.slices.get(message)
        return names if slices is None else slices.keys(names, made=made)

    @property
    def remote(self) -> tuple[tuple[Message, int, int], ...]:
        """Messages this rank sends or receives, with source and target rank, sorted."""
        found = set()
        for step in self.steps:
            if step.message is not None:
                ends = (self.rank, step.peer) if step.action.sends else (step.peer, self.rank)
                found.add((step.message, *ends))
        return tuple(sorted(found))


Divides = Callable[[str, int], bool]
"""(block, shards) -> whether these devices divide what the block takes and gives along the sequence."""


def programs_of(
    plan: Plan,
    blocks: Sequence[str],
    edges: Sequence[tuple[str, str]],
    model: str,
    divides: Divides = lambda block, shards: False,
) -> tuple[Program, ...]:
    """The program of every rank of a plan that ``check`` accepts.

    ``edges`` are the model's, as (source block, target block); ``model`` is its name, for errors. Raises UsageError for
    the first block or edge in which plan and model differ.
    """
    _require_same_blocks(plan, blocks, model)
    graph = model_messages(plan, edges, model)
    return _programs(plan, graph, _slices_of(plan, graph, edges, divides))


def program_of(
    plan: Plan,
    rank: int,
    blocks: Sequence[str],
    edges: Sequence[tuple[str, str]],
    model: str,
    divides: Divides = lambda block, shards: False,
    tied: Iterable[Collection[str]] = (),
) -> Program:
    """As :func:`programs_of` for one rank of a folded plan; the work does not grow with the number of ranks.

    What it says of other ranks is of those alone that share blocks or parameters with this one; ``tied`` are sets of
    blocks that share some.
    """
    _require_same_blocks(plan, blocks, model)
    graph = model_messages(plan, edges, model)
    slices_of = partial(_slices_of, graph=graph, edges=edges, divides=divides)
    return _program_of(plan, rank, graph, slices_of, tied)


def planned_program(plan: Plan, rank: int) -> Program:
    """As :func:`program_of`, where no model is known: a stage gives each other one tensor, named ``0>1``."""
    return _program_of(plan, rank, planned_messages(plan), lambda _, here: {})


def _program_of(
    plan: Plan,
    rank: int,
    graph: MessageGraph,
    slices_of: Callable[..., Mapping[Message, Slices]],
    tied: Iterable[Collection[str]] = (),
) -> Program:
    copies = _copies_apart(plan)
    short = on_device(plan if plan.loop is None else plan.with_copies(copies).unrolled(), rank)
    here = {number for number, stage in enumerate(short.stages) if rank in stage.devices}
    lowering = _Lowering(short, rank, graph, SampleOwnership(short), slices_of(short, here=here))
    shared = _shared_blocks(short, here, tied)
    holders = _by_share(_holders_with(short, rank, here, shared))
    others = {number for number, stage in enumerate(short.stages) if not shared.isdisjoint(stage.blocks)}
    program = lowering.program(holders, _lines_with(short, rank, here), tuple(_divisions(short, here | others)))
    if plan.loop is None:
        return program
    own = on_device(plan, rank)
    assert own.loop is not None
    return _looped(own, own.loop, program, copies, device_programs(plan)[rank])


def _shared_blocks(plan: Plan, here: Collection[int], tied: Iterable[Collection[str]]) -> set[str]:
    """Blocks of a rank's stages that are in several stages, or that share parameters with others, and these."""
    own = {block for number in here for block in plan.stages[number].blocks}
    counts = Counter(block for stage in plan.stages for block in stage.blocks)
    found = {block for block in own if counts[block] > 1}
    return found | {block for blocks in tied if len(blocks) > 1 and not own.isdisjoint(blocks) for block in blocks}


def _holders_with(plan: Plan, rank: int, here: Collection[int], every: Collection[str]) -> Iterator[Held]:
    """The shares of a rank's blocks, each with the ranks that have it; of ``every`` shared block all shares."""
    for number, stage in enumerate(plan.stages):
        if number in here:
            for shares, others in _with_shares(stage, rank):
                yield from ((share, others) for share in shares if share.block not in every)
        if any(block in every for block in stage.blocks):
            for shares, others in _with_shares(stage, rank if number in here else stage.devices[0]):
                yield from ((share, others) for share in shares if share.block in every)


def _with_shares(stage: Stage, rank: int) -> Iterator[tuple[tuple[Share, ...], tuple[int, ...]]]:
    """A stage's shares with their ranks: one for all that have the same parts, by their places among others.

    Ranks with other parts have some parameters as this one has them, such as norms, or the same experts. Of all with
    the same parts as ``rank`` its own shares are said, of others those of the first.
    """
    every = math.lcm(stage.shards, stage.expert)
    own = stage.devices.index(rank) % every
    for place, first in enumerate(stage.devices[:every]):
        yield _shares_of(stage, rank if place == own else first), stage.devices[place::every]


def _by_share(found: Iterable[Held]) -> tuple[Held, ...]:
    """Each share once, with all ranks that have it."""
    every: dict[Share, list[tuple[int, ...]]] = {}
    for share, ranks in found:
        every.setdefault(share, []).append(ranks)
    return tuple(
        (share, each[0] if len(each) == 1 else tuple(sorted(set(itertools.chain.from_iterable(each)))))
        for share, each in every.items()
    )


def _lines_with(plan: Plan, rank: int, here: Collection[int]) -> frozenset[tuple[int, ...]]:
    """Of :func:`_lines` those with this rank."""
    own = [plan.stages[number] for number in here]
    alone = partial(replace, context=1, expert=1, expert_shards=1)
    groups = (alone(stage, devices=_group_of(stage, rank)) for stage in own)
    found = {line for group in groups for line in _lines_of(group) if rank in line}
    further = (_context_of, _experts_of, _expert_parts_of)
    return frozenset(found | {line(stage, rank) for line in further for stage in own} - {()})


def _slices_of(
    plan: Plan,
    graph: MessageGraph,
    edges: Sequence[tuple[str, str]],
    divides: Divides,
    here: Collection[int] | None = None,
) -> dict[Message, Slices]:
    """What messages bring in slices: what both the plan says, and all blocks of the receiver take so.

    Only of those that come from or go to some stages, if these are given.
    """
    found = {}
    for each in plan.dependencies:
        message = Message.of(each)
        if each.slices == 1 or message not in graph.tensors:
            continue
        if here is not None and message.source not in here and message.target not in here:
            continue
        sender, receiver = plan.stages[message.source], plan.stages[message.target]
        taking, making = (sender, receiver) if message.is_gradient else (receiver, sender)
        made = {}
        for name in graph.tensors[message]:
            takers = [block for source, block in edges if source == name and block in taking.blocks]
            taken = all(divides(block, taking.shards) for block in takers)
            given = divides(name, making.shards)
            held, kept = (taken, given) if message.is_gradient else (given, taken)
            if kept:
                made[name] = math.gcd(sender.shards if held else 1, each.slices)
        found[message] = Slices(made, each.slices, receiver)
    return found


def planned_programs(plan: Plan) -> tuple[Program, ...]:
    """As :func:`programs_of`, where no model is known: a stage gives each other one tensor, named ``0>1``."""
    return _programs(plan, planned_messages(plan), {})


def _programs(plan: Plan, graph: MessageGraph, slices: Mapping[Message, Slices]) -> tuple[Program, ...]:
    holders, lines, copies = _holders(plan), _lines(plan), _copies_apart(plan)
    short = plan if plan.loop is None else plan.with_copies(copies).unrolled()
    ownership = SampleOwnership(short)
    ranks = range(len(plan.devices))
    found = [_Lowering(short, rank, graph, ownership, slices).program(holders, lines) for rank in ranks]
    if plan.loop is None:
        return tuple(found)
    texts = plan.whole_programs
    return tuple(_looped(plan, plan.loop, program, copies, texts[program.rank]) for program in found)


def _copies_apart(plan: Plan) -> int:
    """How many copies of a loop's round are lowered, so that the last takes nothing from before the first.

    That depends on how far apart the stages' operations are: by how many samples one is further before the round.
    """
    loop = plan.loop
    if loop is None:
        return 1
    before: list[int] = []
    for operation in plan.operations:
        device, slots = plan.devices_of(operation.id)[0], plan.slots(operation.id)
        texts = (plan.programs[device][each.begins[device] : each.ends[device]] for each in loop.rounds)
        every = itertools.chain.from_iterable(texts)
        here = (Action.parse(text) for text in every if StateAction.read(text) is None)
        microbatch = min(action.microbatch for action in here if action.operation == operation.id)
        before.append(slots.offset + microbatch * slots.stride)
    apart = -(-(max(before) - min(before)) // (loop.microbatches * plan.microbatch_size))
    parts = any(stage.cuts for stage in plan.stages)  # one may run in the copy after its action's
    return min(loop.copies, 2 + apart + parts)


def _looped(plan: Plan, loop: Loop, program: Program, copies: int, texts: Sequence[str]) -> Program:
    """A program of several copies as one in which the last of them is repeated."""
    rounds: list[tuple[int, int]] = []
    entries: list[int] = []
    first = _first_steps(program.steps, len(program.texts))
    later = 0
    for each in loop.rounds:
        begin, end = each.begins[program.rank], each.ends[program.rank]
        later += (copies - 1) * (end - begin)
        rounds.append((first[begin + later], first[end + later]))
        entries.append(end - begin)
    named = [(step.action.operation, step.message, step.peer) for step in program.steps]
    own = {name: number for number, (begin, end) in enumerate(rounds) for name in named[begin:end]}
    repeated = ProgramLoop(
        tuple(rounds),
        loop.copies - copies,
        loop.microbatches * plan.microbatch_size,
        tuple(plan.per_round(stage) for stage in range(len(plan.stages))),
        tuple(own.get(name, 0) for name in named),  # what exchanges state once an iteration is the same in any copy
        tuple(entries),
    )
    return replace(program, mini_batch=plan.mini_batch, texts=texts, loop=repeated if repeated.repeats else None)


def _first_steps(steps: Sequence[ProgramStep], num_entries: int) -> list[int]:
    """[entry] the number of its first step, or of the first after it if it has none; and of what comes after all.

    A part of an action that runs before an entry is counted as the entry's: it runs because that is next.
    """
    found = [0] * (num_entries + 1)
    for index, step in enumerate(steps):
        if not step.part:
            found[step.counter + 1] = index + 1
    return list(itertools.accumulate(found, max))


def _require_same_blocks(plan: Plan, blocks: Sequence[str], model: str) -> None:
    planned = {block: index for index, stage in enumerate(plan.stages) for block in stage.blocks}
    counts = (
        f"(the plan has {len(planned)} blocks, the model {len(set(blocks))}); give the plan's --model and --granularity"
    )
    for block, stage in planned.items():
        if block not in blocks:
            raise UsageError(
                f"stages[{stage}] of the plan has block {block!r}, which is not in model {model!r} {counts}"
            )
    for block in blocks:
        if block not in planned:
            raise UsageError(f"model {model!r} has block {block!r}, which no stage of the plan has {counts}")


class _Lowering:
    """What a plan means to one rank."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        graph: MessageGraph,
        ownership: SampleOwnership,
        slices: Mapping[Message, Slices],
    ) -> None:
        self._plan, self._rank, self._graph, self._ownership, self._hops = plan, rank, graph, ownership, hops_of(plan)
        self._slices = slices
        self._sent: dict[tuple[int, str], list[tuple[Message, int]]] = defaultdict(list)
        self._received: dict[tuple[int, str], list[tuple[Message, int]]] = defaultdict(list)
        for message, source, target in self._hops:
            if source == rank:
                self._sent[message.source, message.payload].append((message, target))
            if target == rank:
                self._received[message.target, message.payload].append((message, source))
        self._ends = {Message.of(each): self._parts_of(each) for each in plan.dependencies}
        self._later = Counter({Message.of(each): each.later * plan.microbatch_size for each in plan.dependencies})
        here = [index for index, stage in enumerate(plan.stages) if rank in stage.devices]
        self._stages = {index: self._stage(index) for index in here if plan.stages[index].blocks}
        self._custom_ops = {index: self._custom_op(index) for index in here if not plan.stages[index].blocks}

    def _parts_of(self, dependency: Dependency) -> tuple[int, int]:
        """The part of its source that makes it, and the part of its target that waits for it."""
        last = len(self._plan.stages[dependency.source_stage].cuts)
        made = last if dependency.source_part is None else dependency.source_part
        return made, dependency.target_part

    def program(
        self,
        holders: tuple[Held, ...],
        lines: frozenset[tuple[int, ...]],
        divisions: tuple[Division, ...] | None = None,
    ) -> Program:
        """The program; with its own ``divisions`` it knows only of ranks that have to do with this one."""
        plan, texts = self._plan, self._plan.programs[self._rank]
        known = {self._rank, *(rank for _, *ends in self._hops for rank in ends)}
        return Program(
            rank=self._rank,
            mini_batch=plan.mini_batch,
            microbatch_size=plan.microbatch_size,
            texts=texts,
            steps=tuple(self._steps(texts)),
            stages=self._stages,
            holders=holders,
            tensors=self._graph.tensors,
            custom_ops=self._custom_ops,
            lines=lines,
            edges=tuple(sorted({(source, target) for _, source, target in self._hops})),
            divisions=tuple(_divisions(plan)) if divisions is None else divisions,
            is_alone=divisions is not None,
            stage_of=_stage_of(plan),
            slices=self._slices,
            pieces={
                index: {rank: _piece_of(stage, rank) for rank in stage.devices if rank in known}
                for index, stage in enumerate(plan.stages)
                if stage.context > 1
            },
        )

    def _in_slices(self, index: int) -> tuple[dict[str, frozenset[int]], dict[str, int]]:
        """Of how many slices a stage's outputs are wanted, and the gradients that it gives, where not all are whole."""
        leaving: dict[str, set[int]] = defaultdict(set)
        returning: dict[str, int] = {}
        for message, names in self._graph.tensors.items():
            made = self._slices[message].made if message in self._slices else {}
            if message.source == index and message.is_gradient:
                returning |= made
            elif message.source == index:
                for name in names:
                    leaving[name].add(made.get(name, 1))
        back = {name for m, each in self._slices.items() if m.target == index and m.is_gradient for name in each.made}
        return {name: frozenset(own) for name, own in leaving.items() if own != {1} or name in back}, returning

    def _stage(self, index: int) -> StagePart:
        stage, crossings, gradients = self._plan.stages[index], self._graph.crossings, self._graph.gradients
        operations = [each for each in self._plan.operations if each.stage == index]
        leaving, returning = self._in_slices(index)
        return StagePart(
            index=index,
            blocks=stage.blocks,
            shares=_shares_of(stage, self._rank),
            meshes=_meshes_of(stage),
            group=_group_of(stage, self._rank),
            place=stage.devices.index(self._rank) % stage.shards,
            context=_context_of(stage, self._rank),
            piece=_piece_of(stage, self._rank),
            again=stage.again,
            cores=_cores_of(stage),
            buckets=tuple(each.blocks for each in stage.buckets),
            cuts=stage.cuts,
            block_groups=tuple(each.blocks for each in stage.block_groups),
            segments=stage.segments,
            remade=stage.remade,
            samples=stage.microbatch_size // stage.replicas,
            split=any(each.role is Role.INPUT_GRAD for each in operations),
            inputs={source: names for (source, target), names in crossings.items() if target == index},
            outputs={target: names for (source, target), names in crossings.items() if source == index},
            returns=frozenset(source for source, target in gradients if target == index),
            awaits=frozenset(target for source, target in gradients if source == index),
            parameter_bytes=self._plan.held_parameters(stage),
            waiting_bytes=sum(each.release_bytes for each in operations if each.role is Role.WEIGHT_GRAD),
            leaving=leaving,
            returning=returning,
        )

    def _custom_op(self, index: int) -> CustomOpPart:
        (operation,) = [each for each in self._plan.operations if each.stage == index]
        takers = {message: self._takers(message) for message in self._graph.gives(index)}
        return CustomOpPart(
            index=index,
            kind=operation.kind,
            devices=self._plan.stages[index].devices,
            attributes=operation.attributes,
            takers={message: ranks for message, ranks in takers.items() if ranks},
        )

    def _takers(self, message: Message) -> tuple[int, ...]:
        """The devices of a custom op that need what a message carries: for its target there, or to send it."""
        senders = {source for carried, source, _ in self._hops if carried == message}
        needing = senders.union(self._plan.stages[message.target].devices)
        return tuple(device for device in self._plan.stages[message.source].devices if device in needing)

    def _steps(self, texts: Sequence[str]) -> Iterator[ProgramStep]:
        """The program's steps; the later parts of an action stand where they are first needed: before the SEND of what
        they make, or before the next action.
        """
        running: list[ProgramStep] = []
        for counter, text in enumerate(texts):
            if (state := StateAction.read(text)) is not None:
                running.append(ProgramStep(counter, Action(state.stage, state.kind, 0, part=state.group), ()))
                if len(running) == 1:  # else after the parts of the action before it, which wait for what comes later
                    yield running.pop()
                continue
            step = self._step(counter, Action.parse(text))
            if step.message is None:
                yield from running
                first, *running = self._in_parts(step)
                yield first
                continue
            while step.action.sends and any(self._makes(each, step) for each in running):
                yield running.pop(0)
            yield step
        yield from running

    def _in_parts(self, step: ProgramStep) -> list[ProgramStep]:
        """A step for each part of an action."""
        cuts = self._plan.stages[step.action.stage].cuts
        if not cuts or step.action.role not in PARTED_ROLES:
            return [step]
        return [
            replace(
                step,
                part=part,
                is_last=part == len(cuts),
                takes=tuple(each for each in step.takes if self._ends[each[0]][1] == part),
                gives=tuple(each for each in step.gives if self._ends[each[0]][0] == part),
            )
            for part in range(len(cuts) + 1)
        ]

    @staticmethod
    def _makes(part: ProgramStep, sent: ProgramStep) -> bool:
        """Whether what is sent is made by a part of an action."""
        return any(message == sent.message and not set(own).isdisjoint(sent.samples[0]) for message, own in part.gives)

    def _step(self, counter: int, action: Action) -> ProgramStep:
        if not action.is_compute:
            return self._transfer(counter, action)
        samples = self._ownership.forwards(action.stage, self._rank, action.microbatch, action.part)
        if is_instruction(action.kind):
            return self._custom_step(counter, action, samples[0])
        if action.role is Role.WEIGHT_GRAD:
            return ProgramStep(counter, action, samples)
        backward = action.role is not Role.FORWARD
        takes, gives = self._graph.takes(action.stage, backward), self._graph.gives(action.stage, backward)
        return ProgramStep(
            counter,
            action,
            samples,
            takes=tuple((m, moved(own, -self._later[m])) for own in samples for m in takes if own[0] >= self._later[m]),
            gives=tuple(each for own in samples for each in self._given(gives, own)),
        )

    def _given(self, messages: Iterable[Message], own: Numbers) -> Iterator[tuple[Message, Numbers]]:
        """The messages with these samples that somebody takes: of what returns to later ones not the last of a run."""
        return ((m, own) for m in messages if own[-1] + self._later[m] < self._plan.mini_batch)

    def _custom_step(self, counter: int, action: Action, own: Numbers) -> ProgramStep:
        held = tuple(self._held(action, own))
        takers = self._custom_ops[action.stage].takers
        return ProgramStep(
            counter,
            action,
            (own,),
            takes=tuple((message, samples) for message, rank, samples in held if rank == self._rank),
            gives=tuple(self._given((message for message, ranks in takers.items() if self._rank in ranks), own)),
            held=held,
        )

    def _held(self, action: Action, own: Numbers) -> Iterator[tuple[Message, int, Numbers]]:
        """What a custom op takes, by the ranks that have it."""
        for message in self._graph.takes(action.stage):
            for rank in self._plan.stages[action.stage].devices:
                there = self._ownership.held(message, rank)
                samples = tuple(sample for sample in own if sample in there)
                if samples:
                    yield message, rank, samples

    def _transfer(self, counter: int, action: Action) -> ProgramStep:
        known = (self._sent if action.sends else self._received)[action.stage, action.payload]
        ((message, peer),) = [
            (message, peer)
            for message, peer in known
            if action.peer_stage in (None, message.target if action.sends else message.source)
            and action.peer_device in (None, peer)
        ]  # check accepts only transfers that mean one message
        ranks = (self._rank, peer) if action.sends else (peer, self._rank)
        rows = (message, self._ownership.sent(message, ranks, action.microbatch, action.part))
        takes, gives = ((rows,), ()) if action.sends else ((), (rows,))
        return ProgramStep(counter, action, (rows[1],), takes, gives, message, peer)


def _cores_of(stage: Stage) -> frozenset[str]:
    """Blocks of which the plan says one by one that their attention core is computed again."""
    each = zip(stage.blocks, stage.again, strict=True) if isinstance(stage.recompute, tuple) else ()
    return frozenset(block for block, again in each if again == "selective")


def _group_of(stage: Stage, rank: int) -> tuple[int, ...]:
    """The devices that split what a rank has: of its replica those with the same pieces of sequences."""
    first = stage.devices.index(rank) // stage.shards * stage.shards
    return stage.devices[first : first + stage.shards]


def _context_of(stage: Stage, rank: int) -> tuple[int, ...]:
    """The devices of a rank's replica with the same share, in the order of their pieces; none where all have all."""
    if stage.context == 1:
        return ()
    replica, own = divmod(stage.devices.index(rank), stage.shards * stage.context)
    first = replica * stage.shards * stage.context + own % stage.shards
    return stage.devices[first : first + stage.shards * stage.context : stage.shards]


def _piece_of(stage: Stage, rank: int) -> int:
    """Which pieces of every sequence a rank has."""
    return stage.devices.index(rank) // stage.shards % stage.context


def _meshes_of(stage: Stage) -> tuple[Mesh, ...]:
    return tuple(stage.mesh_of(index) for index in range(len(stage.blocks)))


def _shares_of(stage: Stage, rank: int) -> tuple[Share, ...]:
    """What a rank has of a stage's blocks. Devices that share only samples have the same share."""
    group, context = _group_of(stage, rank), _context_of(stage, rank)
    experts, parts = _experts_of(stage, rank), _expert_parts_of(stage, rank)
    found = (
        _share(block, mesh, group, group.index(rank))
        for block, mesh in zip(stage.blocks, _meshes_of(stage), strict=True)
    )
    place, part = (line.index(rank) if line else 0 for line in (experts, parts))
    own = partial(replace, context=context, ring=stage.context_exchange == RING)
    if experts:
        own = partial(own, experts=experts, expert=place, expert_parts=parts, expert_part=part)
    return tuple(map(own, found))


def _experts_of(stage: Stage, rank: int) -> tuple[int, ...]:
    """The devices that share experts with a rank, one of each few that split the same; none where each has all."""
    if stage.expert == 1:
        return ()
    first, place = divmod(stage.devices.index(rank), stage.expert)
    begin = first * stage.expert
    return stage.devices[begin + place % stage.expert_shards : begin + stage.expert : stage.expert_shards]


def _expert_parts_of(stage: Stage, rank: int) -> tuple[int, ...]:
    """The devices that have parts of the same experts; none where they are whole."""
    first = stage.devices.index(rank) // stage.expert_shards * stage.expert_shards
    return stage.devices[first : first + stage.expert_shards] if stage.expert_shards > 1 else ()


def _share(block: str, mesh: Mesh, group: tuple[int, ...], place: int) -> Share:
    places, experts = (
        tuple(group[n] for n in mesh.axis(name).of(place)) if mesh.size_of(name) > 1 else ()
        for name in (PLACES, EXPERTS)
    )
    found = Share(block, places=places, experts=experts, expert=mesh.axis(EXPERTS).place(place))
    inner, numbers = mesh.plane_without((SAMPLES, PLACES, EXPERTS), place)
    if inner.size == 1:
        return found
    axes = () if inner.axes == ((SHARDS, inner.size),) else inner.axes
    return replace(found, index=numbers.index(place), partners=tuple(group[n] for n in numbers), axes=axes)


def _lines(plan: Plan) -> frozenset[tuple[int, ...]]:
    """All sets of ranks over which tensors of a stage may be cut or gathered, that split a block along an axis, or run
    a custom op together.
    """
    found = {stage.devices for stage in plan.stages if not stage.blocks and len(stage.devices) > 1}
    found.update(*map(_lines_of, plan.stages))
    return frozenset(found)


def _lines_of(stage: Stage) -> Iterator[tuple[int, ...]]:
    """Those of a stage's blocks."""
    meshes = set(_meshes_of(stage))
    axes = {mesh.axis(name) for mesh in meshes for name, _ in mesh.axes if name != COPIES}
    axes |= {mesh.of_samples for mesh in meshes}
    inner = {axis.without(size) for axis in axes for size in range(1, axis.size) if axis.size % size == 0}
    for first in range(0, len(stage.devices), stage.shards):
        group = stage.devices[first : first + stage.shards]
        yield from {tuple(group[n] for n in axis.of(place)) for axis in inner for place in range(stage.shards)}
    lines = (_context_of, _experts_of, _expert_parts_of)
    yield from {line(stage, rank) for line in lines for rank in stage.devices} - {()}


def _stage_of(plan: Plan) -> dict[str, int]:
    """The stage of each block that only one has."""
    counts = Counter(block for stage in plan.stages for block in stage.blocks)
    return {block: n for n, stage in enumerate(plan.stages) for block in stage.blocks if counts[block] == 1}


def _divisions(plan: Plan, of: Collection[int] | None = None) -> Iterator[Division]:
    """For every stage, or ``of`` some, its replicas, or groups of them, with the same shares, or the same experts."""
    for number, stage in enumerate(plan.stages):
        if of is None or number in of:
            yield from _dividing(stage, of_experts=False)
            if stage.expert > 1:
                yield from _dividing(as_copies_of_experts(stage), of_experts=True)


def _dividing(stage: Stage, *, of_experts: bool) -> Iterator[Division]:
    size = stage.sharers * stage.shards
    for begin in range(0, len(stage.devices) if stage.sharers > 1 else 0, size):
        for place in range(begin, begin + stage.shards):
            ranks = stage.devices[place : begin + size : stage.shards]
            yield Division(stage.blocks, tuple(sorted(ranks)), stage.zero, of_experts)


def _holders(plan: Plan) -> tuple[Held, ...]:
    """All shares, each with its ranks; a whole block counts once on a rank, however many of its stages have it."""
    each = ((_shares_of(stage, rank), (rank,)) for stage in plan.stages for rank in stage.devices)
    return _by_share((share, ranks) for shares, ranks in each for share in shares)
