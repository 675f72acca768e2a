"""Which tensors, of which samples, go from which stage to which, and by way of which custom ops.

Blocks give each other outputs along the model's edges. Where the plan leads a stage's forward to another's through
custom ops, these carry what the edges between the two stages do; gradients go straight back. Which samples a rank
works on for a stage decides what it has, and sends.

Nothing here needs torch.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeplan.errors import UsageError
from pipeplan.files import Plan
from pipeplan.workload.elements import Dependency, Hop, Stage, is_in_line, slots_of
from pipeplan.workload.kinds import BACKWARD_ROLES, Role, is_instruction, role_of
from pipeplan.workload.samples import replica_samples

_Pair = tuple[int, int]
_Names = tuple[str, ...]
_Following = Mapping[str, Sequence[Dependency]]
"""[operation] the dependencies along which its outputs go."""


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """What goes between stages: outputs (``F``), their gradients (``B``), or what a custom op made (its kind)."""

    payload: str
    source: int
    target: int

    @property
    def is_gradient(self) -> bool:
        """Whether it carries gradients of outputs."""
        return role_of(self.payload) is Role.BACKWARD

    @classmethod
    def of(cls, dependency: Dependency) -> Message:
        """What a dependency's hops carry."""
        return cls(dependency.payload, dependency.source_stage, dependency.target_stage)


TensorKey = str | tuple[str, int]
"""A block's output, or its gradient: all of it by the block's name, or one of so many slices of the sequence."""


@dataclass(frozen=True, slots=True)
class Slices:
    """What a message brings in slices, of which each rank of a replica of the ``receiver`` is sent its own of ``sent``.

    ``made`` [block] is of how many slices the ranks that make a tensor have one, from which what is sent is cut.
    """

    made: Mapping[str, int]
    sent: int
    receiver: Stage

    def keys(self, names: Sequence[str], *, made: bool) -> tuple[TensorKey, ...]:
        """The tensors as they are made, or as they are sent."""
        counts = [(self.made[name] if made else self.sent) if name in self.made else 1 for name in names]
        return tuple(name if count == 1 else (name, count) for name, count in zip(names, counts, strict=True))

    def piece(self, name: str, rank: int) -> tuple[int, int]:
        """Which part of a tensor as it is made a rank is sent, and of how many."""
        count = self.sent // self.made[name] if name in self.made else 1
        return self.receiver.devices.index(rank) % self.receiver.shards % count, count


Hops = Mapping[tuple[Message, int, int], Hop]
"""[message, source rank, target rank]"""


def hops_of(plan: Plan) -> Hops:
    """How the plan's messages go from rank to rank; ``check`` has found that stages and ranks distinguish them."""
    return {
        (Message.of(dependency), hop.source_device, hop.target_device): hop
        for dependency in plan.dependencies
        for hop in dependency.hops
    }


@dataclass(frozen=True, slots=True)
class MessageGraph:
    """The names of the tensors of every message.

    ``crossings`` names, for each pair of stages, the blocks of the first whose outputs the second takes, whichever way
    they come; over the pairs in ``gradients`` the plan carries gradients back. ``tensors`` names those of each message.
    """

    crossings: Mapping[_Pair, _Names]
    gradients: Collection[_Pair]
    tensors: Mapping[Message, _Names]

    def takes(self, stage: int, backward: bool = False) -> tuple[Message, ...]:
        """What brings a stage's forward or backward, or its custom op, what it works on."""
        return tuple(each for each in self.tensors if each.target == stage and each.is_gradient == backward)

    def gives(self, stage: int, backward: bool = False) -> tuple[Message, ...]:
        """What takes along what a stage's forward or backward, or its custom op, made."""
        return tuple(each for each in self.tensors if each.source == stage and each.is_gradient == backward)


def model_messages(plan: Plan, edges: Sequence[tuple[str, str]], model: str) -> MessageGraph:
    """How a model's tensors go under a plan that has its blocks. Raises UsageError where they differ."""
    crossings = _crossings(plan, edges, model)
    gradients = _gradients(plan, crossings)
    _require_same_edges(plan, crossings, model)
    tensors = _forward_messages(plan, crossings, model)
    for dependency in _watched(plan, tensors):
        leaving = dict.fromkeys(
            name for (source, _), names in crossings.items() if source == dependency.source_stage for name in names
        )
        tensors[Message.of(dependency)] = tuple(leaving)
    return _with_gradients(plan, crossings, gradients, tensors)


def planned_messages(plan: Plan) -> MessageGraph:
    """As :func:`model_messages`, where no model is known: each message has one tensor, named ``0>1`` by its ends."""
    following, stages = _following_of(plan), range(len(plan.stages))
    crossings = {
        (source, target): (f"{source}>{target}",)
        for source, target in itertools.product(stages, stages)
        if any(_ways(following, source, target))
    }
    for each in plan.dependencies:
        pair = each.target_stage, each.source_stage
        if (
            not each.has_instruction
            and each.source_role is not Role.FORWARD
            and pair[0] != pair[1]
            and pair not in crossings
        ):
            raise UsageError(
                f"the plan makes the backward of stage {pair[0]} wait for that of stage {pair[1]}, but no forward of "
                f"stage {pair[1]} waits for one of stage {pair[0]}: there is nothing to have a gradient"
            )
    forward = [each for each in plan.dependencies if _carries_forward(each)]
    tensors = {Message.of(each): (f"{each.source_stage}>{each.target_stage}",) for each in forward}
    return _with_gradients(plan, crossings, _gradients(plan, crossings), tensors)


def _with_gradients(
    plan: Plan, crossings: Mapping[_Pair, _Names], gradients: Collection[_Pair], tensors: Mapping[Message, _Names]
) -> MessageGraph:
    """The graph, with the gradients' messages, too. Raises UsageError where a hop has nothing to carry."""
    waiting = {
        Message.of(each): ()
        for each in plan.dependencies
        if each.hops and not each.has_instruction and _only_waits(plan, each)
    }
    tensors = waiting | dict(tensors)
    found = {**tensors, **{Message("B", target, source): crossings[source, target] for source, target in gradients}}
    for number, dependency in enumerate(plan.dependencies):
        carries = _carries_forward(dependency) and found.get(Message.of(dependency))
        if dependency.hops and dependency.has_instruction and not carries:
            raise UsageError(
                f"dependencies[{number}] of the plan sends something from {dependency.source} to {dependency.target}, "
                "but instructions send and receive only outputs of forwards; leave out its hops"
            )
    return MessageGraph(crossings, gradients, dict(sorted(found.items())))


def _crossings(plan: Plan, edges: Sequence[tuple[str, str]], model: str) -> dict[_Pair, _Names]:
    """For each pair of stages, the blocks of the first whose outputs the second takes."""
    stage_of = {(stage.route, block): index for index, stage in enumerate(plan.stages) for block in stage.blocks}
    found: dict[_Pair, list[str]] = defaultdict(list)
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


def _gradients(plan: Plan, crossings: Collection[_Pair]) -> set[_Pair]:
    """Pairs (source stage, target stage) over which the plan carries gradients back."""
    back = {
        (dependency.target_stage, dependency.source_stage)
        for dependency in plan.dependencies
        if dependency.source_role in BACKWARD_ROLES and dependency.target_role in BACKWARD_ROLES
    }
    return back & set(crossings)


def _forward_messages(plan: Plan, crossings: Mapping[_Pair, _Names], model: str) -> dict[Message, _Names]:
    """What carries each crossing: one message, or the chain of them through custom ops."""
    following = _following_of(plan)
    found: dict[Message, dict[str, None]] = defaultdict(dict)
    for (source, target), names in crossings.items():
        ways = list(_ways(following, source, target))
        if not ways:
            raise UsageError(
                f"model {model!r} has an edge from stage {source} to stage {target} that the plan knows nothing of; "
                "profile this model and search again"
            )
        if len(ways) > 1:
            through = " and ".join(ways[number][0].target for number in range(2))
            raise UsageError(
                f"outputs of stage {source} come to stage {target} by way of {through}; let one of these instructions "
                "stand after the other"
            )
        for message in ways[0]:
            found[Message.of(message)].update(dict.fromkeys(names))
    return {message: tuple(names) for message, names in found.items()}


def _ways(following: _Following, source: int, target: int) -> Iterator[tuple[Dependency, ...]]:
    """The chains of dependencies from a stage's forward to another's: the direct one, else those of custom ops."""
    ends = f"{target}F"
    left: list[tuple[Dependency, ...]] = [(each,) for each in following.get(f"{source}F", ())]
    direct = next((way for way in left if way[0].target == ends), None)
    if direct is not None:
        yield direct
        return
    while left:
        way = left.pop(0)
        if way[-1].target == ends:
            yield way
        elif is_instruction(way[-1].target_kind):
            left += [(*way, each) for each in following.get(way[-1].target, ())]


def _following_of(plan: Plan) -> _Following:
    found: dict[str, list[Dependency]] = defaultdict(list)
    for each in plan.dependencies:
        if _carries_forward(each):
            found[each.source].append(each)
    return found


def _carries_forward(dependency: Dependency) -> bool:
    """Whether outputs go along a dependency: from a forward or a custom op to a forward or a custom op."""
    return {dependency.source_role, dependency.target_role} <= {Role.FORWARD, Role.CUSTOM}


def _watched(plan: Plan, tensors: Collection[Message]) -> list[Dependency]:
    """Dependencies of custom ops on stages of which they carry nothing on: they see all that leaves the stage."""
    return [
        each
        for each in plan.dependencies
        if each.source_role is Role.FORWARD and is_instruction(each.target_kind) and Message.of(each) not in tensors
    ]


def _require_same_edges(plan: Plan, crossings: Collection[_Pair], model: str) -> None:
    """Dependencies between stages of blocks are along the model's edges, or against them."""
    for dependency in plan.dependencies:
        source, target = dependency.source_stage, dependency.target_stage
        if source == target or dependency.has_instruction:
            continue
        if _only_waits(plan, dependency):
            continue
        forward = dependency.source_role is dependency.target_role is Role.FORWARD
        pair = (source, target) if forward else (target, source)
        if pair not in crossings:
            raise UsageError(
                f"the plan makes {dependency.target} wait for {dependency.source}, but model {model!r} has no edge "
                f"from a block of stage {pair[0]} to one of stage {pair[1]}; give the plan's --model and --granularity"
            )


def _only_waits(plan: Plan, dependency: Dependency) -> bool:
    """Whether a message has no tensors: of neighbours in a line of stages that no edge joins."""
    return is_in_line(plan.placement) and not any(hop.bytes for hop in dependency.hops)


Numbers = tuple[int, ...]
"""Samples of the mini-batch by number, ascending: row i of a tensor is that of the i-th."""


class SampleOwnership:
    """Which samples each rank of a plan works on for a stage, has, and sends."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._hops = plan, hops_of(plan)
        self._num_parted = max(stage.num_parted for stage in plan.stages)
        self._all: dict[tuple[int, int], frozenset[int]] = {}
        self._places: dict[tuple[int, int], int] = {}
        self._held: dict[tuple[Message, int], frozenset[int]] = {}

    def forwards(self, stage: int, rank: int, microbatch: int, part: int | None = None) -> tuple[Numbers, ...]:
        """A rank's samples of a micro-batch, or of a part of it: those of each of the forwards that ran it."""
        parted = part is None and microbatch < self._plan.stages[stage].num_parted
        parts = (0, 1) if parted else (part,)
        return tuple(self.of(stage, rank, microbatch, each) for each in parts)

    def of(self, stage: int, rank: int, microbatch: int, part: int | None) -> Numbers:
        """The samples of an action that a rank works on, or of a whole micro-batch that may have run in parts."""
        group = self._plan.stages[stage]
        begin, end = self._samples(group, microbatch, part)
        replica = self._place_of(group.devices, rank) // (group.shards * group.context)
        if part is None and microbatch < self._num_parted:
            order = _half_by_half(begin, end)
            begin, end = replica_samples((0, len(order)), group.replicas, replica)
            return tuple(sorted(order[begin:end]))
        return tuple(range(*replica_samples((begin, end), group.replicas, replica)))

    def _place_of(self, devices: tuple[int, ...], rank: int) -> int:
        """The place of a rank among a stage's, looked for once."""
        key = id(devices), rank
        if key not in self._places:
            self._places[key] = devices.index(rank)
        return self._places[key]

    def held(self, message: Message, rank: int) -> frozenset[int]:
        """Samples of a message's source that a rank has: made there, or sent there."""
        if (message, rank) not in self._held:
            makers = {source for carried, source, target in self._hops if (carried, target) == (message, rank)}
            makers |= {rank} & set(self._plan.stages[message.source].devices)
            self._held[message, rank] = frozenset().union(*(self._all_of(message.source, maker) for maker in makers))
        return self._held[message, rank]

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
