"""One rank's interpreter: runs its program action by action, in exactly the plan's order.

A compute action waits for the messages it needs and for no others. What a stage makes is kept by sample for the
SENDs that follow in the program, and for the next stage where that stands on the same device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from pipeplan.runtime.clock import Clock, Mark
from pipeplan.runtime.failures import Cause, RankError
from pipeplan.runtime.messages import Channels, TransferError
from pipeplan.runtime.program import Instruction, Message, Numbers, Program, StagePart
from pipeplan.runtime.progress import Phase, Progress
from pipeplan.runtime.rows import Made, Rows, TensorSpec
from pipeplan.runtime.stages import Samples, StageError, StageRunner

__all__ = ["Executor", "Span"]

Span = tuple[int, Mark, Mark]
"""Program counter, start and end of an action. A SEND's is its posting; a RECV's is how long it was waited for."""


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
    _rows: Rows = field(init=False)
    _spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rows = Rows(self.program.tensors, self.specs)

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
        assert self._rows.empty, "every row made or sent is sent on or used in the program"
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
        (samples,) = instruction.samples
        if instruction.action.kind.startswith("RECV"):
            self.channels.receive(instruction)
            self._rows.put(message, samples, lambda: self._awaited(instruction))
            return
        self.progress.begin(Phase.WAITING, instruction.counter, instruction.peer)  # for room, if ever
        start = self.clock.mark()
        made = self._rows.take(message, samples)
        ready = [tensor.contiguous() for tensor in made.tensors]
        as_made = made.at is not None and all(tensor.is_contiguous() for tensor in made.tensors)
        self.channels.send(instruction, ready, made.at if as_made else self.channels.moment())
        self._spans.append((instruction.counter, start, self.clock.mark()))

    def _forward(self, instruction: Instruction, part: StagePart, samples: Samples) -> None:
        (own,) = instruction.samples
        received: dict[str, Tensor] = {}
        for source, names in part.inputs.items():
            made = self._rows.take(Message("F", source, part.index), own)
            received |= dict(zip(names, made.tensors, strict=True))
        self.progress.begin(Phase.RUNNING, instruction.counter)
        start = self.clock.mark()
        outputs = self.stages[part.index].forward(own, received, samples)
        self._require_declared(outputs, len(own))
        self._spans.append((instruction.counter, start, self.clock.mark()))
        for target, names in part.outputs.items():
            self._keep(Message("F", part.index, target), own, [outputs[name] for name in names])

    def _backward(self, instruction: Instruction, part: StagePart) -> None:
        """B or I: the same, except that with I the stage keeps its weight gradients for W."""
        gradients = {own: self._gradients(part, own) for own in instruction.samples}
        self.progress.begin(Phase.RUNNING, instruction.counter)
        start = self.clock.mark()
        made = self.stages[part.index].backward(instruction.action.microbatch, gradients)
        self._spans.append((instruction.counter, start, self.clock.mark()))
        for source, names in part.inputs.items():
            if source in part.returns:
                for own in instruction.samples:
                    self._keep(Message("B", part.index, source), own, [made[own][name] for name in names])

    def _gradients(self, part: StagePart, own: Numbers) -> list[tuple[str, Tensor]]:
        """Of the outputs for these samples, by block; a block whose output goes to several stages has several."""
        found: list[tuple[str, Tensor]] = []
        for target, names in part.outputs.items():
            if target in part.awaits:
                found += zip(names, self._rows.take(Message("B", target, part.index), own).tensors, strict=True)
        return found

    def _keep(self, message: Message, samples: Numbers, tensors: list[Tensor]) -> None:
        """Keep what was made for the SENDs, and for this rank's own actions, that take it."""
        made = Made(tensors, self.channels.moment())
        self._rows.put(message, samples, lambda: made)

    def _awaited(self, instruction: Instruction) -> Made:
        """A message's tensors, waited for."""
        self.progress.begin(Phase.WAITING, instruction.counter, instruction.peer)
        start = self.clock.mark()
        tensors = self.channels.take(instruction)
        self._spans.append((instruction.counter, start, self.clock.mark()))
        return Made(tensors)

    def _finish_sends(self) -> None:
        """Wait until all peers have taken what was sent to them."""
        for peer in self.channels.unfinished():
            self.progress.begin(Phase.WAITING, len(self.program.instructions) - 1, peer)
            try:
                self.channels.finish(peer)
            except TransferError as error:
                raise self._transfer_failed(error) from error

    def _require_declared(self, outputs: Mapping[str, Tensor], num_samples: int) -> None:
        """Receivers have made room for what the model declares; anything else would end in the transport."""
        for name, tensor in outputs.items():
            found = TensorSpec(tuple(tensor.shape), tensor.dtype, None).text(num_samples)
            if found != self.specs[name].text(num_samples):
                declared = self.specs[name].text(num_samples)
                raise StageError(f"block {name!r} made {found}, and the model declares {declared}")

    def _transfer_failed(self, error: TransferError) -> RankError:
        told = "got nothing from" if error.cause is Cause.TIMEOUT else "lost"
        text = f"rank {self.program.rank} {told} rank {error.peer} {self.progress.describe()}: {error}"
        return RankError(error.cause, text, error.peer)
