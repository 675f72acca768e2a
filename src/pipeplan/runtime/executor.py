"""One rank's interpreter: runs its program action by action, in exactly the plan's order.

A compute action waits for the messages it needs and for no others. What a stage makes is kept for the SEND that
follows in the program, or handed over at once where the next stage stands on the same device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeplan.runtime.clock import Clock, Mark
from pipeplan.runtime.failures import Cause, RankError
from pipeplan.runtime.messages import Channels, TensorSpec, TransferError
from pipeplan.runtime.program import Instruction, Message, Program, StagePart
from pipeplan.runtime.progress import Phase, Progress
from pipeplan.runtime.stages import Samples, StageError, StageRunner

__all__ = ["Executor", "Span"]

Span = tuple[int, Mark, Mark]
"""Program counter, start and end of an action. A SEND's is its posting; a RECV's is how long it was waited for."""


@dataclass(slots=True)
class _Made:
    """Tensors that wait for their SEND, and when they are ready (on NCCL)."""

    tensors: list[Tensor]
    at: torch.cuda.Event | None


@dataclass(slots=True)
class Executor:
    """Runs one rank's program, once per mini-batch.

    Args:
        program: what to run.
        stages: the rank's stages by index.
        channels: this rank's ends of the messages.
        specs: shape and format of the block outputs that leave their stage.
        progress: told about every action before it begins.
        clock: takes the times.
    """

    program: Program
    stages: Mapping[int, StageRunner]
    channels: Channels
    specs: Mapping[str, TensorSpec]
    progress: Progress
    clock: Clock
    _kept: dict[tuple[Message, int], list[Tensor]] = field(default_factory=dict)
    _made: dict[tuple[Message, int], _Made] = field(default_factory=dict)
    _posted: dict[tuple[Message, int], int] = field(default_factory=dict)
    _spans: list[Span] = field(default_factory=list)

    def run(self, samples: Samples) -> list[Span]:
        """Run the program on one mini-batch; gradients add up in the parameters. Returns when actions ran.

        Raises:
            RankError: an action failed; the text names rank, action and program counter.
        """
        self._spans = []
        for instruction in self.program.instructions:
            self.progress.begin(Phase.RUNNING, instruction.counter)
            try:
                self._execute(instruction, samples)
            except TransferError as error:
                raise self._transfer_failed(error) from error
            except StageError as error:
                where = self.progress.describe()
                raise RankError(Cause.RAISED, f"rank {self.program.rank} failed {where}: {error}") from error
        self._finish_sends()
        assert not self._kept, "every tensor handed over has its consumer in the program"
        assert not self._made, "every message made has its SEND in the program"
        assert all(stage.idle for stage in self.stages.values()), "every F has its B, or I and W, in the program"
        return self._spans

    def _execute(self, instruction: Instruction, samples: Samples) -> None:
        action, message = instruction.action, instruction.message
        if message is not None:
            self._transfer(instruction, message)
            return
        part = self.stages[action.stage].part
        if action.kind == "F":
            self._forward(instruction, part, samples)
        elif action.kind in "BI":
            self._backward(instruction, part)
        else:
            start = self.clock.mark()
            self.stages[action.stage].weight_gradients(action.microbatch)
            self._spans.append((instruction.counter, start, self.clock.mark()))

    def _transfer(self, instruction: Instruction, message: Message) -> None:
        """SEND what its producer made, or post a RECV; neither waits for the other side."""
        microbatch = instruction.action.microbatch
        if instruction.action.kind.startswith("RECV"):
            self.channels.receive(message, microbatch)
            self._posted[message, microbatch] = instruction.counter
            return
        self.progress.begin(Phase.WAITING, instruction.counter, instruction.peer)  # for room, if ever
        start = self.clock.mark()
        made = self._made.pop((message, microbatch))
        self.channels.send(message, microbatch, made.tensors, made.at)
        self._spans.append((instruction.counter, start, self.clock.mark()))

    def _forward(self, instruction: Instruction, part: StagePart, samples: Samples) -> None:
        microbatch = instruction.action.microbatch
        received: dict[str, Tensor] = {}
        for source, names in part.inputs.items():
            tensors = self._take(Message("F", source, part.index), microbatch)
            received |= dict(zip(names, tensors, strict=True))
        self.progress.begin(Phase.RUNNING, instruction.counter)
        start = self.clock.mark()
        outputs = self.stages[part.index].forward(microbatch, received, samples)
        self._require_declared(outputs)
        self._spans.append((instruction.counter, start, self.clock.mark()))
        for target, names in part.outputs.items():
            self._hand_over(Message("F", part.index, target), microbatch, [outputs[name] for name in names])

    def _backward(self, instruction: Instruction, part: StagePart) -> None:
        """B or I: the same, except that with I the stage keeps its weight gradients for W."""
        microbatch = instruction.action.microbatch
        gradients: list[tuple[str, Tensor]] = []
        for target, names in part.outputs.items():
            if target in part.awaits:
                tensors = self._take(Message("B", target, part.index), microbatch)
                gradients += zip(names, tensors, strict=True)
        self.progress.begin(Phase.RUNNING, instruction.counter)
        start = self.clock.mark()
        made = self.stages[part.index].backward(microbatch, gradients)
        self._spans.append((instruction.counter, start, self.clock.mark()))
        for source, names in part.inputs.items():
            if source in part.returns:
                self._hand_over(Message("B", part.index, source), microbatch, [made[name] for name in names])

    def _hand_over(self, message: Message, microbatch: int, tensors: list[Tensor]) -> None:
        if self.program.device_of[message.source] == self.program.device_of[message.target]:
            self._kept[message, microbatch] = tensors
        else:
            self._made[message, microbatch] = _Made(tensors, self.channels.moment())

    def _take(self, message: Message, microbatch: int) -> list[Tensor]:
        """A message's tensors: handed over on this device, or awaited from another."""
        if (message, microbatch) in self._kept:
            return self._kept.pop((message, microbatch))
        counter = self._posted.pop((message, microbatch))
        self.progress.begin(Phase.WAITING, counter, self.program.device_of[message.source])
        start = self.clock.mark()
        tensors = self.channels.take(message, microbatch)
        self._spans.append((counter, start, self.clock.mark()))
        return tensors

    def _finish_sends(self) -> None:
        """Wait until all peers have taken what was sent to them."""
        for peer in self.channels.unfinished():
            self.progress.begin(Phase.WAITING, len(self.program.instructions) - 1, peer)
            try:
                self.channels.finish(peer)
            except TransferError as error:
                raise self._transfer_failed(error) from error

    def _require_declared(self, outputs: Mapping[str, Tensor]) -> None:
        """Receivers have made room for what the model declares; anything else would end in the transport."""
        for name, tensor in outputs.items():
            found = TensorSpec(tuple(tensor.shape), tensor.dtype)
            if found != self.specs[name]:
                raise StageError(f"block {name!r} made {found}, and the model declares {self.specs[name]}")

    def _transfer_failed(self, error: TransferError) -> RankError:
        told = "got nothing from" if error.cause is Cause.TIMEOUT else "lost"
        text = f"rank {self.program.rank} {told} rank {error.peer} {self.progress.describe()}: {error}"
        return RankError(error.cause, text, error.peer)
