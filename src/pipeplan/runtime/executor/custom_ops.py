"""Custom ops: functions by their kind, and what each gets and returns.

A function runs on all ranks of its custom op at once. It gets the outputs that each of them has, of the samples of
its action, and returns on each what later actions there take: tensors by the names of blocks. Whatever the values,
gradients come back to the blocks as if it had only moved them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan.errors import UsageError
from pipeplan.files import Plan
from pipeplan.runtime.executor.message_graph import Numbers
from pipeplan.runtime.executor.process_groups import RankGroup
from pipeplan.runtime.executor.rank_program import CustomOpPart, Program, ProgramStep
from pipeplan.runtime.executor.stage import MiniBatch, StageError, stage_errors
from pipeplan.runtime.executor.tensors import Produced, Received, TensorSpec
from pipeplan.workload.action import is_instruction_word
from pipeplan.workload.elements import Attribute
from pipeplan.workload.kinds import is_instruction


@dataclass(frozen=True, slots=True)
class HeldOutput:
    """Output of a block that a rank has: its rows of these samples."""

    block: str
    rank: int
    samples: Numbers


class HeldInputs(dict[str, Tensor]):
    """Outputs that a rank has, by block; of another block, its error says where that is, by the ``parts``."""

    def __init__(self, found: Mapping[str, Tensor], place: str, parts: Iterable[HeldOutput]) -> None:
        super().__init__(found)
        self._place, self._parts = place, tuple(parts)

    def __missing__(self, block: str) -> Tensor:
        ranks = sorted({part.rank for part in self._parts if part.block == block})
        if not ranks:
            known = ", ".join(repr(block) for block in dict.fromkeys(part.block for part in self._parts))
            raise StageError(f"{self._place} asks for block {block!r}, and what comes to it is of {known or 'none'}")
        where = f"rank {', '.join(map(str, ranks))}"
        raise StageError(
            f"{self._place} asks for block {block!r} in context.inputs, which has it only on {where}; take it from "
            'context.brought(), which moves outputs, or let the plan send it: devices = "before"'
        )


@dataclass(frozen=True, slots=True)
class Context:
    """What a function gets.

    ``samples`` are the action's, by number in the mini-batch. ``rank`` is this one of ``ranks``, among which
    ``rank_group`` sums, gathers, broadcasts and sends. ``inputs`` are outputs of blocks that this rank has; ``parts``
    say which every rank has, and of which samples; ``takers`` on which ranks a block's output, of all samples, is taken
    by later actions. ``attributes`` are the plan's; ``specs`` shape and format of outputs.
    """

    action: str
    rank: int
    ranks: tuple[int, ...]
    samples: Numbers
    inputs: Mapping[str, Tensor]
    parts: tuple[HeldOutput, ...]
    takers: Mapping[str, tuple[int, ...]]
    attributes: Mapping[str, Attribute]
    rank_group: RankGroup
    specs: Mapping[str, TensorSpec]
    device: torch.device

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of ``ranks``; None of one rank."""
        return self.rank_group.group

    @property
    def wanted(self) -> tuple[str, ...]:
        """The blocks whose outputs are taken here."""
        return tuple(block for block, ranks in self.takers.items() if self.rank in ranks)

    def brought(self) -> dict[str, Tensor]:
        """The requested outputs, whole, moved from where they are; all ranks of the custom op call this together."""
        made = {}
        for block, takers in self.takers.items():
            for taker in takers:
                found = [
                    (part, self.rank_group.send(self.own(part), part.rank, taker))
                    for part in self.sources(block, taker)
                    if self.rank in (part.rank, taker)
                ]
                if taker == self.rank:
                    made[block] = self.joined(block, found)
        return made

    def own(self, part: HeldOutput) -> Tensor:
        """This rank's part, or room for another's."""
        return self.inputs[part.block] if part.rank == self.rank else self.empty(part)

    def sources(self, block: str, rank: int) -> list[HeldOutput]:
        """Parts that make up a block's output for a rank, which has its own: the same list on every rank."""
        needed, found = set(self.samples), []
        for part in sorted((part for part in self.parts if part.block == block), key=lambda part: part.rank != rank):
            if needed & set(part.samples):
                needed -= set(part.samples)
                found.append(part)
        return found

    def empty(self, part: HeldOutput) -> Tensor:
        """Room for a part."""
        spec = self.specs[part.block]
        return torch.empty(spec.of(len(part.samples)), dtype=spec.dtype, device=self.device)

    def joined(self, block: str, found: Iterable[tuple[HeldOutput, Tensor]]) -> Tensor:
        """A block's output of all samples, in their order, out of parts of it."""
        spec, pairs = self.specs[block], list(found)
        if (len(pairs) == 1 and pairs[0][0].samples == self.samples) or spec.axis is None:
            return pairs[0][1]
        rows = {
            sample: spec.rows(tensor, place, place + 1)
            for part, tensor in pairs
            for place, sample in enumerate(part.samples)
        }
        return torch.cat([rows[sample] for sample in self.samples], spec.axis)


CustomFunction = Callable[[Context], Mapping[str, Tensor]]
"""What a custom op does: returns, on every rank, at least the :attr:`Context.wanted` outputs of all samples."""

_CUSTOM_OPS: dict[str, CustomFunction] = {}


def register(kind: str, function: CustomFunction) -> CustomFunction:
    """Say what custom ops of a kind, 3 to 24 capital letters, do. Returns the function. Raises UsageError."""
    if not is_instruction_word(kind):
        raise UsageError(f"{kind!r} cannot be an instruction: write 3 to 24 capital letters, not SEND or RECV")
    known = _CUSTOM_OPS.setdefault(kind, function)
    if known is not function:
        raise UsageError(f"instruction {kind} is already {known.__module__}.{known.__qualname__}; choose another word")
    return function


def custom_ops_of(plan: Plan) -> Mapping[str, CustomFunction]:
    """[kind] what the plan's custom ops do. Raises UsageError where nobody has registered a kind."""
    for operation in plan.operations:
        if is_instruction(operation.kind) and operation.kind not in _CUSTOM_OPS:
            raise UsageError(
                f"the plan runs {operation.id}0, and nothing says what {operation.kind} does; call "
                f'pipeplan.runtime.executor.custom_ops.register("{operation.kind}", function) in a module and give '
                f"--instructions MODULE (known are {', '.join(sorted(_CUSTOM_OPS))})"
            )
    return dict(_CUSTOM_OPS)


@dataclass(frozen=True, slots=True)
class CustomOpRunner:
    """One rank's end of a custom op: ``part`` is what the plan says of it, ``specs`` of outputs that travel."""

    part: CustomOpPart
    program: Program
    function: CustomFunction
    group: RankGroup
    specs: Mapping[str, TensorSpec]
    device: torch.device
    idle: ClassVar[bool] = True

    def run(self, step: ProgramStep, inputs: Received, samples: MiniBatch) -> Produced:
        """What later actions take of it here. Raises StageError where the function fails, and TransferError."""
        given = itertools.chain.from_iterable(inputs.values())  # all of it whole, by the names of blocks
        context = self._context(step, {str(key): tensor for key, tensor in given})
        with stage_errors(f"instruction {self.part.kind}"), torch.no_grad():
            made = self.function(context)
        missing = [block for block in context.wanted if not isinstance(made.get(block), Tensor)]
        if missing:
            raise StageError(
                f"instruction {self.part.kind} returned no tensor for block {missing[0]!r}, which a later action takes "
                f"on rank {context.rank}"
            )
        return {context.samples: {block: made[block].detach() for block in context.wanted}}

    def _context(self, step: ProgramStep, inputs: Mapping[str, Tensor]) -> Context:
        tensors, part = self.program.tensors, self.part
        takers: dict[str, set[int]] = {}
        for message, ranks in part.takers.items():
            for block in tensors[message]:
                takers.setdefault(block, set()).update(ranks)
        held = {
            (block, rank): HeldOutput(block, rank, samples)
            for message, rank, samples in step.held
            for block in tensors[message]
        }
        return Context(
            action=str(step.action),
            rank=self.program.rank,
            ranks=part.devices,
            samples=step.samples[0],
            inputs=HeldInputs(inputs, f"instruction {part.kind}", held.values()),
            parts=tuple(held.values()),
            takers={block: tuple(rank for rank in part.devices if rank in ranks) for block, ranks in takers.items()},
            attributes=part.attributes,
            rank_group=self.group,
            specs=self.specs,
            device=self.device,
        )


def _all_gather(context: Context) -> dict[str, Tensor]:
    """ALLGATHER: every rank gets all outputs."""
    blocks = dict.fromkeys(part.block for part in context.parts)
    return {block: context.joined(block, _broadcast(context, block)) for block in blocks}


def _broadcast(context: Context, block: str) -> Iterable[tuple[HeldOutput, Tensor]]:
    for part in context.sources(block, rank=-1):
        yield part, context.rank_group.broadcast(context.own(part), part.rank)


register("ALLGATHER", _all_gather)
register("GATHER", Context.brought)
