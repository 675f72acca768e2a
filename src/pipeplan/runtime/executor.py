"""One rank's interpreter: runs its program action by action, in exactly the plan's order.

A compute action waits for the messages it needs and for no others. What a stage makes is kept for the SENDs that
follow in the program, and for the next stage where that stands on the same device. Where everything is kept and what
every action takes is found when the executor is made, so that a step looks nothing up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from pipeplan.runtime.clock import Clock, Mark
from pipeplan.runtime.failures import Cause, RankError
from pipeplan.runtime.messages import Channels, TransferError
from pipeplan.runtime.program import Instruction, Message, Numbers, OperationPart, Program, StagePart
from pipeplan.runtime.progress import Phase, Progress
from pipeplan.runtime.rows import Made, Rows, Taking, TensorSpec
from pipeplan.runtime.stages import Runner, Samples, StageError

__all__ = ["Executor", "OperationRunner", "Span"]

Span = tuple[int, Mark, Mark]
"""Program counter, start and end of an action. A SEND's is its posting; a RECV's is how long it was waited for."""

_Names = tuple[str, ...]
_Step = Callable[[Samples], None]


class OperationRunner(Protocol):
    """What an executor asks of an instruction."""

    @property
    def part(self) -> OperationPart:
        """What the plan says of it."""

    def run(self, instruction: Instruction, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What later actions take of it here, by block, out of what this rank has of what it takes."""


@dataclass(slots=True)
class Executor:
    """Runs one rank's program, once per mini-batch.

    Args:
        program: what to run.
        stages: what runs the rank's stages, by index.
        channels: this rank's ends of the messages.
        specs: shape and format of the block outputs that leave their stage.
        progress: told about every action before it begins.
        clock: takes the times.
        blocking: every SEND and RECV waits until its message is there, as without transfers beside computing
            (Tessel IV-D, Fig. 7a): for comparison.
        operations: what runs the rank's instructions, by stage.
    """

    program: Program
    stages: Mapping[int, Runner]
    channels: Channels
    specs: Mapping[str, TensorSpec]
    progress: Progress
    clock: Clock
    blocking: bool = False
    operations: Mapping[int, OperationRunner] = field(default_factory=dict)
    _steps: list[_Step] = field(init=False)
    _slots: list[Made | None] = field(init=False)
    _taken: frozenset[int] = field(init=False)
    _posted: dict[int, Instruction] = field(default_factory=dict)
    _spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        rows = Rows(self.program.tensors, self.specs)
        self._steps = [self._step(instruction, rows) for instruction in self.program.instructions]
        self._taken = rows.taken
        assert self._taken.issuperset(self._posted), "every message is used in the program"
        self._slots = [None] * rows.num_slots

    def run(self, samples: Samples) -> list[Span]:
        """Run the program on one mini-batch; gradients add up in the parameters. Returns when actions ran.

        Raises:
            RankError: an action failed; the text names rank, action and program counter.
        """
        self._spans = []
        try:
            for step in self._steps:
                step(samples)
            self._finish_sends()
        except TransferError as error:
            raise self._transfer_failed(error) from error
        except StageError as error:
            where = self.progress.describe()
            raise RankError(Cause.RAISED, f"rank {self.program.rank} failed {where}: {error}") from error
        assert all(stage.idle for stage in self.stages.values()), "every F has its B, or I and W, in the program"
        return self._spans

    # What an action does is put together before anything runs

    def _step(self, instruction: Instruction, rows: Rows) -> _Step:
        action, message = instruction.action, instruction.message
        if message is not None:
            return self._transfer(instruction, message, rows)
        if action.stage in self.operations:
            return self._operation(instruction, self.operations[action.stage], rows)
        stage = self.stages[action.stage]
        make = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._weight_gradients}
        return make[action.kind](instruction, stage, rows)

    def _transfer(self, instruction: Instruction, message: Message, rows: Rows) -> _Step:
        """SEND what its producer made, or post a RECV; neither waits for the other side unless it is blocking."""
        (own,) = instruction.samples
        if instruction.action.kind.startswith("RECV"):
            slot = rows.put(message, own)
            self._posted[slot] = instruction
            return lambda _: self._receive(instruction, slot)
        taking = rows.take(message, own)
        return lambda _: self._send(instruction, taking)

    def _forward(self, instruction: Instruction, stage: Runner, rows: Rows) -> _Step:
        (own,) = instruction.samples
        part, counter = stage.part, instruction.counter
        tensors = self.program.tensors
        takings = [(tensors[message], rows.take(message, own)) for message in part.takes]
        keepings = [(tensors[message], rows.put(message, own)) for message in part.gives]
        declared = self._declared(keepings, own)

        def run(samples: Samples) -> None:
            self.progress.begin(Phase.RUNNING, counter)
            received = dict(self._named(takings, counter))
            start = self.clock.mark()
            outputs = stage.forward(own, received, samples)
            self._require_declared(outputs, declared)
            self._spans.append((counter, start, self.clock.mark()))
            self._keep(keepings, outputs)

        return run

    def _backward(self, instruction: Instruction, stage: Runner, rows: Rows) -> _Step:
        """B or I: the same, except that with I the stage keeps its weight gradients for W."""
        counter, microbatch = instruction.counter, instruction.action.microbatch
        takings = {own: self._awaited_by(stage.part, own, rows) for own in instruction.samples}
        keepings = {own: self._returned_by(stage.part, own, rows) for own in instruction.samples}

        def run(samples: Samples) -> None:
            self.progress.begin(Phase.RUNNING, counter)
            gradients = {own: self._named(each, counter) for own, each in takings.items()}
            start = self.clock.mark()
            made = stage.backward(microbatch, gradients)
            self._spans.append((counter, start, self.clock.mark()))
            for own, keeping in keepings.items():
                self._keep(keeping, made[own])

        return run

    def _operation(self, instruction: Instruction, runner: OperationRunner, rows: Rows) -> _Step:
        """An instruction: on what this rank has of what it takes, giving what this rank's later actions take of it."""
        (own,) = instruction.samples
        part, counter, tensors = runner.part, instruction.counter, self.program.tensors
        takings = [
            (tensors[message], rows.take(message, samples))
            for message, rank, samples in instruction.held
            if rank == self.program.rank
        ]
        keepings = [(tensors[message], rows.put(message, own)) for message in part.gives]
        declared = self._declared(keepings, own)

        def run(samples: Samples) -> None:
            self.progress.begin(Phase.RUNNING, counter)
            inputs = dict(self._named(takings, counter))
            start = self.clock.mark()
            made = runner.run(instruction, inputs)
            self._require_declared(made, declared)
            self._spans.append((counter, start, self.clock.mark()))
            self._keep(keepings, made)

        return run

    def _declared(self, keepings: Sequence[tuple[_Names, int]], own: Numbers) -> list[tuple[str, torch.Size]]:
        """What is made of these samples, and its shapes."""
        return [(name, torch.Size(self.specs[name].of(len(own)))) for names, _ in keepings for name in names]

    def _weight_gradients(self, instruction: Instruction, stage: Runner, rows: Rows) -> _Step:
        counter, microbatch = instruction.counter, instruction.action.microbatch

        def run(samples: Samples) -> None:
            self.progress.begin(Phase.RUNNING, counter)
            start = self.clock.mark()
            stage.weight_gradients(microbatch)
            self._spans.append((counter, start, self.clock.mark()))

        return run

    def _awaited_by(self, part: StagePart, own: Numbers, rows: Rows) -> list[tuple[_Names, Taking]]:
        """Gradients of the outputs for these samples; a block whose output goes to several stages has several."""
        return [
            (names, rows.take(Message("B", target, part.index), own))
            for target, names in part.outputs.items()
            if target in part.awaits
        ]

    def _returned_by(self, part: StagePart, own: Numbers, rows: Rows) -> list[tuple[_Names, int]]:
        """Gradients of the inputs for these samples, and where they are kept."""
        return [
            (names, rows.put(Message("B", part.index, source), own))
            for source, names in part.inputs.items()
            if source in part.returns
        ]

    # What actions do while the program runs

    def _receive(self, instruction: Instruction, slot: int) -> None:
        self.progress.begin(Phase.RUNNING, instruction.counter)
        self.channels.receive(instruction)
        if self.blocking:
            self._slots[slot] = self._awaited(instruction)

    def _send(self, instruction: Instruction, taking: Taking) -> None:
        self.progress.begin(Phase.WAITING, instruction.counter, instruction.peer)  # for room, if ever
        start = self.clock.mark()
        made = self._made(taking, instruction.counter)
        ready = [tensor.contiguous() for tensor in made.tensors]
        as_made = made.at is not None and all(tensor.is_contiguous() for tensor in made.tensors)
        self.channels.send(instruction, ready, made.at if as_made else self.channels.moment())
        if self.blocking:
            self.channels.deliver(instruction)
        self._spans.append((instruction.counter, start, self.clock.mark()))

    def _named(self, takings: Sequence[tuple[_Names, Taking]], counter: int) -> list[tuple[str, Tensor]]:
        """The tensors of several messages, by block."""
        return [
            pair for names, taking in takings for pair in zip(names, self._made(taking, counter).tensors, strict=True)
        ]

    def _made(self, taking: Taking, counter: int) -> Made:
        """What an action takes; the last one to take something lets go of it."""
        found = taking.of(lambda slot: self._here(slot, counter))
        for slot in taking.frees:
            self._slots[slot] = None
        return found

    def _here(self, slot: int, counter: int) -> Made:
        """What is in a slot; a message is waited for when it is first needed."""
        made = self._slots[slot]
        if made is None:
            made = self._slots[slot] = self._awaited(self._posted[slot])
            self.progress.begin(Phase.RUNNING, counter)
        return made

    def _awaited(self, instruction: Instruction) -> Made:
        """A message's tensors, waited for."""
        self.progress.begin(Phase.WAITING, instruction.counter, instruction.peer)
        start = self.clock.mark()
        tensors = self.channels.take(instruction)
        self._spans.append((instruction.counter, start, self.clock.mark()))
        return Made(tensors)

    def _keep(self, keepings: Sequence[tuple[_Names, int]], made: Mapping[str, Tensor]) -> None:
        """Keep what was made for the SENDs, and for this rank's own actions, that take it."""
        if keepings:
            at = self.channels.moment()
            for names, slot in keepings:
                if slot in self._taken:
                    self._slots[slot] = Made([made[name] for name in names], at)

    def _finish_sends(self) -> None:
        """Wait until all peers have taken what was sent to them."""
        for peer in self.channels.unfinished():
            self.progress.begin(Phase.WAITING, len(self.program.instructions) - 1, peer)
            self.channels.finish(peer)

    def _require_declared(self, outputs: Mapping[str, Tensor], declared: Sequence[tuple[str, torch.Size]]) -> None:
        """Receivers have made room for what the model declares; anything else would end in the transport."""
        for name, shape in declared:
            tensor, spec = outputs[name], self.specs[name]
            if tensor.shape != shape or tensor.dtype != spec.dtype:
                found = TensorSpec(tuple(tensor.shape), tensor.dtype, None).text(0)
                wanted = TensorSpec(tuple(shape), spec.dtype, None).text(0)
                raise StageError(f"block {name!r} made {found}, and the model declares {wanted}")

    def _transfer_failed(self, error: TransferError) -> RankError:
        told = "got nothing from" if error.cause is Cause.TIMEOUT else "lost"
        text = f"rank {self.program.rank} {told} {error.who} {self.progress.describe()}: {error}"
        return RankError(error.cause, text, error.peer)
