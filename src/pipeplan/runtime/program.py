"""From a plan and a model's graph to what one rank does: its instructions, and which tensors travel.

Nothing here needs torch. Blocks are matched by name; a plan whose stages exchange something else than the
model's edges say is refused before anything starts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pipeplan.errors import UsageError
from pipeplan.model import Action, Plan, payload_of

__all__ = ["Instruction", "Message", "Program", "StagePart", "programs_of", "require_runnable"]


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """What goes from one stage to another, once per micro-batch: outputs (``F``) or their gradients (``B``)."""

    payload: str
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """One entry of a rank's program. Transfers have the message and the rank at its other end."""

    counter: int
    action: Action
    message: Message | None = None
    peer: int = -1


@dataclass(frozen=True, slots=True)
class StagePart:
    """A stage as its rank sees it.

    ``inputs`` and ``outputs`` give, for each stage on the other end, the blocks whose outputs come in or go out;
    ``returns`` and ``awaits`` name those of them that get, or give, gradients. ``split`` is whether the stage
    runs I and W instead of B.
    """

    index: int
    blocks: tuple[str, ...]
    recompute: bool
    split: bool
    inputs: Mapping[int, tuple[str, ...]]
    outputs: Mapping[int, tuple[str, ...]]
    returns: frozenset[int]
    awaits: frozenset[int]


@dataclass(frozen=True, slots=True)
class Program:
    """Everything a rank needs of the plan.

    ``device_of`` [stage] is the rank a stage stands on, ``stage_of`` [block] the stage of any block; ``tensors``
    names the blocks whose outputs, or gradients of outputs, a message carries, in order.
    """

    rank: int
    num_microbatches: int
    microbatch_size: int
    texts: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    stages: Mapping[int, StagePart]
    device_of: tuple[int, ...]
    stage_of: Mapping[str, int]
    tensors: Mapping[Message, tuple[str, ...]]

    @property
    def remote(self) -> tuple[tuple[Message, int, int], ...]:
        """Messages this rank sends or receives, with source and target rank, sorted."""
        found = set()
        for instruction in self.instructions:
            if instruction.message is not None:
                ends = (self.device_of[instruction.message.source], self.device_of[instruction.message.target])
                found.add((instruction.message, *ends))
        return tuple(sorted(found))


def require_runnable(plan: Plan) -> None:
    """Refuse plans whose form this executor does not run yet.

    Raises:
        UsageError: a stage on several devices, or stages with unequal micro-batch sizes.
    """
    for index, stage in enumerate(plan.stages):
        if len(stage.devices) > 1:
            raise UsageError(
                f"stages[{index}] stands on {len(stage.devices)} devices ({stage.shards} shards x {stage.replicas} "
                "replicas); run executes stages of one device each: search with --placement one-to-one, circular or "
                "v-shape"
            )
        if stage.microbatch_size != plan.microbatch_size:
            raise UsageError(
                f"stages[{index}] has micro-batches of {stage.microbatch_size} samples and the plan of "
                f"{plan.microbatch_size}; run executes plans with one size: search with --microbatch-size"
            )


def programs_of(plan: Plan, blocks: Sequence[str], edges: Sequence[tuple[str, str]], model: str) -> tuple[Program, ...]:
    """The program of every rank.

    Args:
        plan: a plan that ``check`` accepts and :func:`require_runnable` too.
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
    tensors = {Message("F", source, target): names for (source, target), names in crossings.items()}
    tensors |= {Message("B", target, source): crossings[source, target] for source, target in gradients}
    return tuple(_program(plan, rank, crossings, gradients, tensors) for rank in range(len(plan.devices)))


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
    stage_of = {block: index for index, stage in enumerate(plan.stages) for block in stage.blocks}
    place = {block: index for stage in plan.stages for index, block in enumerate(stage.blocks)}
    found: dict[tuple[int, int], list[str]] = defaultdict(list)
    for source, target in edges:
        pair = (stage_of[source], stage_of[target])
        if pair[0] != pair[1]:
            if source not in found[pair]:
                found[pair].append(source)
        elif place[source] > place[target]:
            raise UsageError(
                f"stages[{pair[0]}] of the plan runs block {target!r} before {source!r}, whose output model {model!r} "
                "gives it"
            )
    return {pair: tuple(sorted(names, key=place.__getitem__)) for pair, names in sorted(found.items())}


def _gradients(plan: Plan, crossings: Collection[tuple[int, int]]) -> set[tuple[int, int]]:
    """Pairs (source stage, target stage) over which the plan carries gradients back."""
    back = {
        (int(dependency.target[:-1]), int(dependency.source[:-1]))
        for dependency in plan.dependencies
        if dependency.source[-1] in "BI" and dependency.target[-1] in "BI"
    }
    return back & set(crossings)


def _require_same_edges(plan: Plan, crossings: Collection[tuple[int, int]], model: str) -> None:
    """Stage pairs of forward dependencies are exactly those of the model's edges; backward ones among them."""
    planned = set()
    for dependency in plan.dependencies:
        source, target = int(dependency.source[:-1]), int(dependency.target[:-1])
        if source == target:
            continue
        forward = dependency.source[-1] == "F" and dependency.target[-1] == "F"
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
) -> Program:
    device_of = tuple(stage.devices[0] for stage in plan.stages)
    split = {operation.stage for operation in plan.operations if operation.kind == "I"}
    texts = plan.programs[rank]
    resolver = _Resolver(plan, rank)
    return Program(
        rank=rank,
        num_microbatches=plan.num_microbatches,
        microbatch_size=plan.microbatch_size,
        texts=texts,
        instructions=tuple(resolver.instruction(counter, Action.parse(text)) for counter, text in enumerate(texts)),
        stages={
            index: StagePart(
                index=index,
                blocks=stage.blocks,
                recompute=stage.recompute,
                split=index in split,
                inputs={source: names for (source, target), names in crossings.items() if target == index},
                outputs={target: names for (source, target), names in crossings.items() if source == index},
                returns=frozenset(source for source, target in gradients if target == index),
                awaits=frozenset(target for source, target in gradients if source == index),
            )
            for index, stage in enumerate(plan.stages)
            if device_of[index] == rank
        },
        device_of=device_of,
        stage_of={block: index for index, stage in enumerate(plan.stages) for block in stage.blocks},
        tensors=tensors,
    )


class _Resolver:
    """Finds which message a SEND or a RECV of one rank means."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._sent: dict[tuple[int, str], list[tuple[Message, int]]] = defaultdict(list)
        self._received: dict[tuple[int, str], list[tuple[Message, int]]] = defaultdict(list)
        for dependency in plan.dependencies:
            for hop in dependency.hops:
                payload = payload_of(dependency.source[-1])
                message = Message(payload, int(dependency.source[:-1]), int(dependency.target[:-1]))
                if hop.source_device == rank:
                    self._sent[message.source, payload].append((message, hop.target_device))
                if hop.target_device == rank:
                    self._received[message.target, payload].append((message, hop.source_device))

    def instruction(self, counter: int, action: Action) -> Instruction:
        """The action with its message and peer."""
        if action.is_compute:
            return Instruction(counter, action)
        if action.kind.startswith("SEND"):
            candidates = self._sent[action.stage, action.payload]
            fitting = [(m, peer) for m, peer in candidates if action.peer_stage in (None, m.target)]
        else:
            candidates = self._received[action.stage, action.payload]
            fitting = [(m, peer) for m, peer in candidates if action.peer_stage in (None, m.source)]
        fitting = [(m, peer) for m, peer in fitting if action.peer_device in (None, peer)]
        assert len(fitting) == 1, f"check accepts only transfers that mean one message, not {action}"
        return Instruction(counter, action, *fitting[0])
