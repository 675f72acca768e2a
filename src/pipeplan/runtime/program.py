"""From a plan and a model's graph to what one rank does: its instructions, and which tensors and samples travel.

Nothing here needs torch. Blocks are matched by name; a plan whose stages exchange something else than the
model's edges say is refused before anything starts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeplan.errors import UsageError
from pipeplan.model import COPIES, PLACES, SAMPLES, SHARDS, Action, Axis, Mesh, Plan, Stage, is_instruction
from pipeplan.model.plan import Attribute
from pipeplan.runtime.flow import Flow, Message, model_flow, planned_flow
from pipeplan.runtime.holdings import Holdings, Numbers
from pipeplan.runtime.share import Share

__all__ = [
    "Instruction",
    "Message",
    "Numbers",
    "OperationPart",
    "Program",
    "StagePart",
    "planned_programs",
    "programs_of",
]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One entry of a rank's program. Transfers have the message and the rank at its other end.

    ``samples`` are those that this rank computes on, or that are sent. A backward has those of each of its forwards,
    one after another: two where the micro-batch's forward ran in parts. An instruction's ``held`` says of all that it
    takes which of its ranks have which samples of it, as (message, rank, samples).
    """

    counter: int
    action: Action
    samples: tuple[Numbers, ...]
    message: Message | None = None
    peer: int = -1
    held: tuple[tuple[Message, int, Numbers], ...] = ()


@dataclass(frozen=True, slots=True)
class StagePart:
    """A stage as its rank sees it.

    ``inputs`` and ``outputs`` give, for each stage on the other end, the blocks whose outputs come in or go out;
    ``returns`` and ``awaits`` name those of them that get, or give, gradients. ``takes`` are the messages that bring a
    forward what comes in, ``gives`` those that take what goes out: straight, or to and from instructions. ``split`` is
    whether the stage runs I and W instead of B. ``shares`` says for each of the blocks what this rank has of it,
    ``meshes`` how the ranks of its replica, ``group``, stand for it; this one is number ``place`` of them.
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
    takes: tuple[Message, ...] = ()
    gives: tuple[Message, ...] = ()

    @property
    def counts_loss(self) -> bool:
        """Whether the stage's loss is this rank's to count: of devices that split a block, the first one's."""
        return self.place == 0

    def line(self, axis: Axis) -> tuple[int, ...]:
        """The ranks along an axis of the group, in order."""
        return tuple(self.group[number] for number in axis.of(self.place))


@dataclass(frozen=True, slots=True)
class OperationPart:
    """An instruction as its rank sees it: what it is called and told, on which ranks it runs, what comes and goes.

    ``takers`` are the ranks that need what a message takes along, ``gives`` the messages for which this one is.
    """

    index: int
    kind: str
    devices: tuple[int, ...]
    attributes: Mapping[str, Attribute]
    takes: tuple[Message, ...]
    gives: tuple[Message, ...]
    takers: Mapping[Message, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Program:
    """Everything a rank needs of the plan.

    ``holders`` are the plan's shares with the rank that has each, in the same order on every rank; ``tensors`` names
    the blocks whose outputs, or gradients of outputs, a message carries, in order. ``lines`` are sets of ranks, of all
    the plan, that exchange something while they run an action together. ``operations`` [stage] are the instructions
    that run here.
    """

    rank: int
    mini_batch: int
    microbatch_size: int
    texts: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    stages: Mapping[int, StagePart]
    holders: tuple[tuple[Share, int], ...]
    tensors: Mapping[Message, tuple[str, ...]]
    operations: Mapping[int, OperationPart]
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
    return _programs(plan, model_flow(plan, edges, model))


def planned_programs(plan: Plan) -> tuple[Program, ...]:
    """The program of every rank where no model is known: a stage gives each other one tensor, named ``0>1``.

    Args:
        plan: a plan that ``check`` accepts.

    Raises:
        UsageError: gradients come from a stage to which no outputs go.
    """
    return _programs(plan, planned_flow(plan))


def _programs(plan: Plan, flow: Flow) -> tuple[Program, ...]:
    shares, everyone = Holdings(plan), _Everyone(_holders(plan), _lines(plan))
    return tuple(_program(plan, rank, flow, shares, everyone) for rank in range(len(plan.devices)))


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


def _program(plan: Plan, rank: int, flow: Flow, shares: Holdings, everyone: _Everyone) -> Program:
    texts = plan.programs[rank]
    resolver = _Resolver(plan, rank, shares, flow)
    here = [index for index, stage in enumerate(plan.stages) if rank in stage.devices]
    return Program(
        rank=rank,
        mini_batch=plan.mini_batch,
        microbatch_size=plan.microbatch_size,
        texts=texts,
        instructions=tuple(resolver.instruction(counter, Action.parse(text)) for counter, text in enumerate(texts)),
        stages={index: _stage_part(plan, index, rank, flow) for index in here if plan.stages[index].blocks},
        holders=everyone.holders,
        tensors=flow.tensors,
        operations={index: _operation_part(plan, index, rank, flow) for index in here if not plan.stages[index].blocks},
        lines=everyone.lines,
    )


def _stage_part(plan: Plan, index: int, rank: int, flow: Flow) -> StagePart:
    stage, crossings, gradients = plan.stages[index], flow.crossings, flow.gradients
    return StagePart(
        index=index,
        blocks=stage.blocks,
        shares=_shares_of(stage, rank),
        meshes=_meshes_of(stage),
        group=_group_of(stage, rank),
        place=stage.devices.index(rank) % stage.shards,
        recompute=stage.recompute,
        split=any(operation.stage == index and operation.kind == "I" for operation in plan.operations),
        inputs={source: names for (source, target), names in crossings.items() if target == index},
        outputs={target: names for (source, target), names in crossings.items() if source == index},
        returns=frozenset(source for source, target in gradients if target == index),
        awaits=frozenset(target for source, target in gradients if source == index),
        takes=flow.takes(index),
        gives=flow.gives(index),
    )


def _group_of(stage: Stage, rank: int) -> tuple[int, ...]:
    """The devices of a rank's replica."""
    first = stage.devices.index(rank) // stage.shards * stage.shards
    return stage.devices[first : first + stage.shards]


def _meshes_of(stage: Stage) -> tuple[Mesh, ...]:
    return tuple(stage.mesh_of(index) for index in range(len(stage.blocks)))


def _operation_part(plan: Plan, index: int, rank: int, flow: Flow) -> OperationPart:
    (operation,) = [operation for operation in plan.operations if operation.stage == index]
    gives = {message: _takers(plan, message) for message in flow.gives(index)}
    return OperationPart(
        index=index,
        kind=operation.kind,
        devices=plan.stages[index].devices,
        attributes=operation.attributes,
        takes=flow.takes(index),
        gives=tuple(message for message, takers in gives.items() if rank in takers),
        takers={message: takers for message, takers in gives.items() if takers},
    )


def _takers(plan: Plan, message: Message) -> tuple[int, ...]:
    """Of an instruction's devices, those that need what a message carries: for its target there, or to send it."""
    senders = {hop.source_device for each in plan.dependencies if Message.of(each) == message for hop in each.hops}
    needing = senders | set(plan.stages[message.target].devices)
    return tuple(device for device in plan.stages[message.source].devices if device in needing)


def _shares_of(stage: Stage, rank: int) -> tuple[Share, ...]:
    """What a rank has of a stage's blocks. Devices that share samples alone have the same share."""
    group = _group_of(stage, rank)
    return tuple(
        _share(block, mesh, group, group.index(rank))
        for block, mesh in zip(stage.blocks, _meshes_of(stage), strict=True)
    )


def _share(block: str, mesh: Mesh, group: tuple[int, ...], place: int) -> Share:
    places = mesh.axis(PLACES).of(place) if mesh.size_of(PLACES) > 1 else ()
    inner, numbers = mesh.plane_without((SAMPLES, PLACES), place)
    if inner.size == 1:
        return Share(block, places=tuple(group[n] for n in places))
    return Share(
        block,
        numbers.index(place),
        tuple(group[n] for n in numbers),
        () if inner.axes == ((SHARDS, inner.size),) else inner.axes,
        tuple(group[n] for n in places),
    )


def _lines(plan: Plan) -> frozenset[tuple[int, ...]]:
    """All sets of ranks over which tensors of a stage may be cut or gathered, that split a block along an axis, or run
    an instruction together.
    """
    found = {stage.devices for stage in plan.stages if not stage.blocks and len(stage.devices) > 1}
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


class _Resolver:
    """Finds which samples an action of one rank is about, and which message a SEND or a RECV means."""

    def __init__(self, plan: Plan, rank: int, shares: Holdings, flow: Flow) -> None:
        self._plan, self._rank, self._shares, self._flow = plan, rank, shares, flow
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
            held = tuple(self._held(action, samples[0])) if is_instruction(action.kind) else ()
            return Instruction(counter, action, samples, held=held)
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

    def _held(self, action: Action, own: Numbers) -> Iterator[tuple[Message, int, Numbers]]:
        """What an instruction takes, by the ranks that have it."""
        for message in self._flow.takes(action.stage):
            for rank in self._plan.stages[action.stage].devices:
                there = self._shares.held(message, rank)
                samples = tuple(sample for sample in own if sample in there)
                if samples:
                    yield message, rank, samples
