"""From a plan and a model's graph to what one rank does: its instructions, and which tensors and samples travel.

Nothing here needs torch. Blocks are matched by name; a plan whose stages exchange something else than the
model's edges say is refused before anything starts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pipeplan.errors import UsageError
from pipeplan.model import COPIES, SAMPLES, SHARDS, Action, Axis, Dependency, Mesh, Plan, Stage
from pipeplan.model.plan import slots_of
from pipeplan.model.samples import replica_samples

__all__ = [
    "Instruction",
    "Message",
    "Numbers",
    "Program",
    "Share",
    "StagePart",
    "planned_programs",
    "programs_of",
]

Numbers = tuple[int, ...]
"""Samples of the mini-batch by number, ascending: row i of a tensor is that of the i-th."""


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """What goes from one stage to another, micro-batch by micro-batch.

    Outputs (``F``), their gradients (``B``), or what an instruction made (its kind).
    """

    payload: str
    source: int
    target: int

    @classmethod
    def of(cls, dependency: Dependency) -> Message:
        """What a dependency's hops carry."""
        return cls(dependency.payload, dependency.source_stage, dependency.target_stage)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One entry of a rank's program. Transfers have the message and the rank at its other end.

    ``samples`` are those that this rank computes on, or that are sent. A backward has those of each of its forwards,
    one after another: two where the micro-batch's forward ran in parts.
    """

    counter: int
    action: Action
    samples: tuple[Numbers, ...]
    message: Message | None = None
    peer: int = -1


@dataclass(frozen=True, slots=True, order=True)
class Share:
    """What a rank has of a block: all of it, or number ``index`` of as many shares as there are ``partners``.

    ``partners`` are the ranks that split the block, this one among them, in the order of their shares: they stand on
    a mesh of these ``axes``, names and sizes, where it is not split in the usual way alone.
    """

    block: str
    index: int = 0
    partners: tuple[int, ...] = ()
    axes: tuple[tuple[str, int], ...] = ()

    @property
    def count(self) -> int:
        """How many devices split the block."""
        return max(1, len(self.partners))

    @property
    def mesh(self) -> Mesh:
        """How the partners stand."""
        return Mesh(self.axes or ((SHARDS, self.count),))

    def along(self, axis: str) -> tuple[int, ...]:
        """The partners from which this rank differs along one axis alone, in order."""
        return tuple(self.partners[place] for place in self.mesh.axis(axis).of(self.index))

    def __str__(self) -> str:
        way = f" {self.mesh}" if self.axes else ""
        return f"{self.block}[{self.index}/{self.count}{way}]" if self.partners else self.block


@dataclass(frozen=True, slots=True)
class StagePart:
    """A stage as its rank sees it.

    ``inputs`` and ``outputs`` give, for each stage on the other end, the blocks whose outputs come in or go out;
    ``returns`` and ``awaits`` name those of them that get, or give, gradients. ``split`` is whether the stage
    runs I and W instead of B. ``shares`` says for each of the blocks what this rank has of it, ``meshes`` how the
    ranks of its replica, ``group``, stand for it; this one is number ``place`` of them.
    """

    index: int
    blocks: tuple[str, ...]
    recompute: bool
    split: bool
    inputs: Mapping[int, tuple[str, ...]]
    outputs: Mapping[int, tuple[str, ...]]
    returns: frozenset[int]
    awaits: frozenset[int]
    shares: tuple[Share, ...] = ()
    meshes: tuple[Mesh, ...] = ()
    group: tuple[int, ...] = ()
    place: int = 0

    @property
    def counts_loss(self) -> bool:
        """Whether the stage's loss is this rank's to count: of devices that split a block, the first one's."""
        return self.place == 0

    def line(self, axis: Axis) -> tuple[int, ...]:
        """The ranks along an axis of the group, in order."""
        return tuple(self.group[number] for number in axis.of(self.place))


@dataclass(frozen=True, slots=True)
class Program:
    """Everything a rank needs of the plan.

    ``holders`` are the plan's shares with the rank that has each, in the same order on every rank; ``tensors`` names
    the blocks whose outputs, or gradients of outputs, a message carries, in order. ``lines`` are sets of ranks, of all
    the plan, that exchange something while they run an action together.
    """

    rank: int
    mini_batch: int
    microbatch_size: int
    texts: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    stages: Mapping[int, StagePart]
    holders: tuple[tuple[Share, int], ...]
    tensors: Mapping[Message, tuple[str, ...]]
    lines: frozenset[tuple[int, ...]] = frozenset()

    @property
    def remote(self) -> tuple[tuple[Message, int, int], ...]:
        """Messages this rank sends or receives, with source and target rank, sorted."""
        found = set()
        for instruction in self.instructions:
            if instruction.message is not None:
                ends = (self.rank, instruction.peer)
                sends = instruction.action.sends
                found.add((instruction.message, *(ends if sends else reversed(ends))))
        return tuple(sorted(found))


def programs_of(plan: Plan, blocks: Sequence[str], edges: Sequence[tuple[str, str]], model: str) -> tuple[Program, ...]:
    """The program of every rank.

    Args:
        plan: a plan that ``check`` accepts.
        blocks: the model's block names.
        edges: the model's edges as (source block, target block).
        model: the model's name, for errors.

    Raises:
        UsageError: blocks or edges of plan and model differ; the text names the first that does.
    """
    _require_same_blocks(plan, blocks, model)
    crossings = _crossings(plan, edges, model)
    gradients = _gradients(plan, crossings)
    _require_same_edges(plan, crossings, model)
    return _programs(plan, crossings, gradients)


def planned_programs(plan: Plan) -> tuple[Program, ...]:
    """The program of every rank where no model is known: a stage gives each other one tensor, named ``0>1``.

    Args:
        plan: a plan that ``check`` accepts.

    Raises:
        UsageError: gradients come from a stage to which no outputs go.
    """
    pairs = [(d.source_kind, d.source_stage, d.target_stage) for d in plan.dependencies]
    forward = {(source, target) for kind, source, target in pairs if kind == "F" and source != target}
    crossings = {(source, target): (f"{source}>{target}",) for source, target in sorted(forward)}
    for kind, source, target in pairs:
        if kind != "F" and source != target and (target, source) not in crossings:
            raise UsageError(
                f"the plan makes the backward of stage {target} wait for that of stage {source}, but no forward of "
                f"stage {source} waits for one of stage {target}: there is nothing to have a gradient"
            )
    return _programs(plan, crossings, _gradients(plan, crossings))


def _programs(
    plan: Plan, crossings: Mapping[tuple[int, int], tuple[str, ...]], gradients: Collection[tuple[int, int]]
) -> tuple[Program, ...]:
    shares, everyone = _Shares(plan), _Everyone(_holders(plan), _lines(plan))
    tensors = {Message("F", source, target): names for (source, target), names in crossings.items()}
    tensors |= {Message("B", target, source): crossings[source, target] for source, target in gradients}
    ranks = range(len(plan.devices))
    return tuple(_program(plan, rank, crossings, gradients, tensors, shares, everyone) for rank in ranks)


def _require_same_blocks(plan: Plan, blocks: Sequence[str], model: str) -> None:
    planned = {block: index for index, stage in enumerate(plan.stages) for block in stage.blocks}
    known = set(blocks)
    for block, stage in planned.items():
        if block not in known:
            raise UsageError(
                f"stages[{stage}] of the plan has block {block!r}, which model {model!r} has not "
                f"(the plan has {len(planned)} blocks, the model {len(known)}); give the --model the plan was made for"
            )
    for block in blocks:
        if block not in planned:
            raise UsageError(
                f"model {model!r} has block {block!r}, which no stage of the plan has (the plan has {len(planned)} "
                f"blocks, the model {len(known)}); give the --model the plan was made for"
            )


def _crossings(plan: Plan, edges: Sequence[tuple[str, str]], model: str) -> dict[tuple[int, int], tuple[str, ...]]:
    """For each pair of stages, the blocks of the first whose outputs the second takes."""
    stage_of = {(stage.route, block): index for index, stage in enumerate(plan.stages) for block in stage.blocks}
    found: dict[tuple[int, int], list[str]] = defaultdict(list)
    for (source, target), route in itertools.product(edges, range(plan.num_routes)):
        pair = (stage_of[route, source], stage_of[route, target])
        blocks = plan.stages[pair[0]].blocks
        if pair[0] != pair[1]:
            if source not in found[pair]:
                found[pair].append(source)
        elif blocks.index(source) > blocks.index(target):
            raise UsageError(
                f"stages[{pair[0]}] of the plan runs block {target!r} before {source!r}, whose output model {model!r} "
                "gives it"
            )
    return {pair: tuple(sorted(names, key=plan.stages[pair[0]].blocks.index)) for pair, names in sorted(found.items())}


def _gradients(plan: Plan, crossings: Collection[tuple[int, int]]) -> set[tuple[int, int]]:
    """Pairs (source stage, target stage) over which the plan carries gradients back."""
    back = {
        (dependency.target_stage, dependency.source_stage)
        for dependency in plan.dependencies
        if dependency.source_kind in "BI" and dependency.target_kind in "BI"
    }
    return back & set(crossings)


def _require_same_edges(plan: Plan, crossings: Collection[tuple[int, int]], model: str) -> None:
    """Stage pairs of forward dependencies are exactly those of the model's edges; backward ones among them."""
    planned = set()
    for dependency in plan.dependencies:
        source, target = dependency.source_stage, dependency.target_stage
        if source == target:
            continue
        forward = dependency.source_kind == "F" and dependency.target_kind == "F"
        pair = (source, target) if forward else (target, source)
        if forward:
            planned.add(pair)
        if pair not in crossings:
            raise UsageError(
                f"the plan makes {dependency.target} wait for {dependency.source}, but model {model!r} has no edge "
                f"from a block of stage {pair[0]} to one of stage {pair[1]}; give the --model the plan was made for"
            )
    for source, target in crossings:
        if (source, target) not in planned:
            raise UsageError(
                f"model {model!r} has an edge from stage {source} to stage {target} that the plan knows nothing of; "
                "profile this model and search again"
            )


def _program(
    plan: Plan,
    rank: int,
    crossings: Mapping[tuple[int, int], tuple[str, ...]],
    gradients: Collection[tuple[int, int]],
    tensors: Mapping[Message, tuple[str, ...]],
    shares: _Shares,
    everyone: _Everyone,
) -> Program:
    split = {operation.stage for operation in plan.operations if operation.kind == "I"}
    texts = plan.programs[rank]
    resolver = _Resolver(plan, rank, shares)
    return Program(
        rank=rank,
        mini_batch=plan.mini_batch,
        microbatch_size=plan.microbatch_size,
        texts=texts,
        instructions=tuple(resolver.instruction(counter, Action.parse(text)) for counter, text in enumerate(texts)),
        stages={
            index: StagePart(
                index=index,
                blocks=stage.blocks,
                shares=_shares_of(stage, rank),
                meshes=_meshes_of(stage),
                group=_group_of(stage, rank),
                place=stage.devices.index(rank) % stage.shards,
                recompute=stage.recompute,
                split=index in split,
                inputs={source: names for (source, target), names in crossings.items() if target == index},
                outputs={target: names for (source, target), names in crossings.items() if source == index},
                returns=frozenset(source for source, target in gradients if target == index),
                awaits=frozenset(target for source, target in gradients if source == index),
            )
            for index, stage in enumerate(plan.stages)
            if rank in stage.devices
        },
        holders=everyone.holders,
        tensors=tensors,
        lines=everyone.lines,
    )


def _group_of(stage: Stage, rank: int) -> tuple[int, ...]:
    """The devices of a rank's replica."""
    first = stage.devices.index(rank) // stage.shards * stage.shards
    return stage.devices[first : first + stage.shards]


def _meshes_of(stage: Stage) -> tuple[Mesh, ...]:
    return tuple(stage.mesh_of(index) for index in range(len(stage.blocks)))


def _shares_of(stage: Stage, rank: int) -> tuple[Share, ...]:
    """What a rank has of a stage's blocks. Devices that share samples alone have the same share."""
    group = _group_of(stage, rank)
    return tuple(
        _share(block, mesh, group, group.index(rank))
        for block, mesh in zip(stage.blocks, _meshes_of(stage), strict=True)
    )


def _share(block: str, mesh: Mesh, group: tuple[int, ...], place: int) -> Share:
    inner = mesh.without(SAMPLES)
    if inner.size == 1:
        return Share(block)
    numbers = mesh.line_without(SAMPLES, place)
    usual = inner.axes == ((SHARDS, inner.size),)
    return Share(block, numbers.index(place), tuple(group[n] for n in numbers), () if usual else inner.axes)


def _lines(plan: Plan) -> frozenset[tuple[int, ...]]:
    """All sets of ranks over which tensors of a stage may be cut or gathered, or that split a block along an axis."""
    found = set()
    for stage in plan.stages:
        axes = {mesh.axis(name) for mesh in _meshes_of(stage) for name, _ in mesh.axes if name != COPIES}
        behind = {axis.without(size) for axis in axes for size in range(1, axis.size) if axis.size % size == 0}
        for first in range(0, len(stage.devices), stage.shards):
            group = stage.devices[first : first + stage.shards]
            found |= {tuple(group[n] for n in axis.of(place)) for axis in behind for place in range(stage.shards)}
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class _Everyone:
    """What all ranks have to know of all."""

    holders: tuple[tuple[Share, int], ...]
    lines: frozenset[tuple[int, ...]]


def _holders(plan: Plan) -> tuple[tuple[Share, int], ...]:
    """All shares, each with its ranks; whole blocks stand on a rank once, however many stages have them there."""
    found = ((share, rank) for stage in plan.stages for rank in stage.devices for share in _shares_of(stage, rank))
    return tuple(dict.fromkeys(found))


class _Shares:
    """Which samples each rank works on, and which it sends."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._num_parted = max(stage.num_parted for stage in plan.stages)
        self._all: dict[tuple[int, int], frozenset[int]] = {}

    def forwards(self, stage: int, rank: int, microbatch: int, part: int | None = None) -> tuple[Numbers, ...]:
        """A rank's samples of a micro-batch, or of a part of it: those of each of the forwards that ran it."""
        parted = part is None and microbatch < self._plan.stages[stage].num_parted
        parts = (0, 1) if parted else (part,)
        return tuple(self.of(stage, rank, microbatch, each) for each in parts)

    def of(self, stage: int, rank: int, microbatch: int, part: int | None) -> Numbers:
        """The samples of an action that a rank works on, or of a whole micro-batch that may have run in parts."""
        group = self._plan.stages[stage]
        begin, end = self._samples(group, microbatch, part)
        replica = group.devices.index(rank) // group.shards
        if part is None and microbatch < self._num_parted:
            order = _half_by_half(begin, end)
            begin, end = replica_samples((0, len(order)), group.replicas, replica)
            return tuple(sorted(order[begin:end]))
        return tuple(range(*replica_samples((begin, end), group.replicas, replica)))

    def sent(self, message: Message, ranks: tuple[int, int], microbatch: int, part: int | None) -> Numbers:
        """What a source rank has made of its stage's micro-batch or part, and the target rank works on."""
        needed = self._all_of(message.target, ranks[1])
        return tuple(sample for sample in self.of(message.source, ranks[0], microbatch, part) if sample in needed)

    def _all_of(self, stage: int, rank: int) -> frozenset[int]:
        """All samples of the mini-batch that a rank works on for a stage."""
        if (stage, rank) not in self._all:
            count = len(slots_of(self._plan.stages[stage], "B", self._plan.mini_batch, self._plan.num_routes))
            found = (sample for m in range(count) for sample in self.of(stage, rank, m, None))
            self._all[stage, rank] = frozenset(found)
        return self._all[stage, rank]

    def _samples(self, stage: Stage, microbatch: int, part: int | None) -> tuple[int, int]:
        slots = slots_of(stage, "B" if part is None else "F", self._plan.mini_batch, self._plan.num_routes)
        number = slots.number(microbatch, part)
        assert number is not None, "check accepts only actions that exist"
        return slots.samples(number)


def _half_by_half(begin: int, end: int) -> Numbers:
    """Samples of a micro-batch that some stage runs in parts, so ordered that neighbours are from both halves.

    Replicas share a whole micro-batch in this order: each then has its share of either half, in every stage.
    """
    middle = (begin + end) // 2
    return tuple(itertools.chain.from_iterable(zip(range(begin, middle), range(middle, end), strict=True)))


class _Resolver:
    """Finds which samples an action of one rank is about, and which message a SEND or a RECV means."""

    def __init__(self, plan: Plan, rank: int, shares: _Shares) -> None:
        self._rank, self._shares = rank, shares
        self._sent: dict[tuple[int, str], list[tuple[Message, int]]] = defaultdict(list)
        self._received: dict[tuple[int, str], list[tuple[Message, int]]] = defaultdict(list)
        for dependency in plan.dependencies:
            for hop in dependency.hops:
                message = Message.of(dependency)
                if hop.source_device == rank:
                    self._sent[message.source, message.payload].append((message, hop.target_device))
                if hop.target_device == rank:
                    self._received[message.target, message.payload].append((message, hop.source_device))

    def instruction(self, counter: int, action: Action) -> Instruction:
        """The action with its samples, message and peer."""
        if action.is_compute:
            samples = self._shares.forwards(action.stage, self._rank, action.microbatch, action.part)
            return Instruction(counter, action, samples)
        if action.sends:
            candidates = self._sent[action.stage, action.payload]
            fitting = [(m, peer) for m, peer in candidates if action.peer_stage in (None, m.target)]
        else:
            candidates = self._received[action.stage, action.payload]
            fitting = [(m, peer) for m, peer in candidates if action.peer_stage in (None, m.source)]
        fitting = [(m, peer) for m, peer in fitting if action.peer_device in (None, peer)]
        assert len(fitting) == 1, f"check accepts only transfers that mean one message, not {action}"
        ((message, peer),) = fitting
        ranks = (self._rank, peer) if action.sends else (peer, self._rank)
        sent = self._shares.sent(message, ranks, action.microbatch, action.part)
        return Instruction(counter, action, (sent,), message, peer)
