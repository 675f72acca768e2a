"""One rank's interpreter: runs its program action by action, in exactly the plan's order.

A compute action waits for the messages it needs and for no others. What a stage makes is kept for the SENDs that
follow in the program, and for this rank's own actions. Where everything is kept and what every action takes is found
when the executor is made, so that a step looks nothing up. Of a loop that is one copy of the round: all others are made
from it as they come, so that memory does not grow with their number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from pipeplan.runtime.executor.channels import Channels, TransferError
from pipeplan.runtime.executor.message_graph import Numbers, TensorKey
from pipeplan.runtime.executor.rank_program import Program, ProgramLoop, ProgramStep, Turn, moved
from pipeplan.runtime.executor.stage import MiniBatch, StageError
from pipeplan.runtime.executor.tensors import Made, Produced, Received, Taking, TensorSlots, TensorSpec, spec_of
from pipeplan.runtime.launch.status import Cause, Phase, Progress, RankError
from pipeplan.runtime.parallel.device import Clock, Mark, Span
from pipeplan.workload.kinds import Role

_Taken = tuple[Numbers, tuple[TensorKey, ...], Taking]
"""Samples, blocks, and where their tensors are."""

_Given = tuple[Numbers, tuple[TensorKey, ...], int, bool]
"""Samples, blocks, the slot for their tensors, and whether these are taken from there."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A step, and where it finds and keeps what it takes and makes."""

    step: ProgramStep
    takes: Sequence[_Taken]
    gives: Sequence[_Given]

    def later(self, turn: Turn, loop: ProgramLoop, num_slots: Sequence[int]) -> _Prepared:
        """The same some copies of a loop's round later, which need ``num_slots`` [round] each."""
        by, slots = turn.copies * loop.samples, turn.more(num_slots)
        return _Prepared(
            self.step.later(turn, loop),
            [(moved(own, by), names, taking.later(slots)) for own, names, taking in self.takes],
            [(moved(own, by), names, slot + slots, taken) for own, names, slot, taken in self.gives],
        )


class Runner(Protocol):
    """What an executor asks of a stage or a custom op."""

    @property
    def idle(self) -> bool:
        """Whether nothing waits for an action that has still to come."""

    def run(self, step: ProgramStep, inputs: Received, samples: MiniBatch) -> Produced:
        """Run an action."""


@dataclass(slots=True)
class Executor:
    """Runs one rank's program, once per mini-batch; ``runners`` run its stages and custom ops, by index.

    ``specs`` are shape and format of the block outputs that leave their stage. If ``blocking``, every SEND and RECV
    waits until its message is there, as without transfers beside computing (Tessel IV-D, Fig. 7a): for comparison.
    Else, with ``receives_first``, the RECVs that follow a SEND are posted before it: gloo's word that a receiver is
    ready waits behind all that the receiver is sending to that peer. What is not ``traced`` keeps no time for every
    action. ``exchange`` runs what exchanges the state of stages.
    """

    program: Program
    runners: Mapping[int, Runner]
    channels: Channels
    specs: Mapping[str, TensorSpec]
    progress: Progress
    clock: Clock
    blocking: bool = False
    receives_first: bool = False
    traced: bool = True
    exchange: Callable[[ProgramStep], None] | None = None
    _steps: list[_Prepared] = field(init=False)
    _actions: list[Callable[[MiniBatch], None]] = field(init=False)
    _slots_per_copy: list[int] = field(init=False, default_factory=list)
    _slots: dict[int, Made] = field(default_factory=dict)
    _posted: dict[int, ProgramStep] = field(default_factory=dict)
    _unsent: list[tuple[ProgramStep, Taking]] = field(default_factory=list)
    _begun: Mark | None = None
    _spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        program, loop = self.program, self.program.loop
        slots = TensorSlots(program.tensors, self.specs, program.slices)
        given: list[tuple[ProgramStep, list[_Taken], list[tuple[Numbers, tuple[TensorKey, ...], int]]]] = []
        before = [slots.count]
        for step in self.program.steps:
            taker, made = program.rank if step.message is None else step.peer, step.message is None
            takes = [
                (own, program.keys(message), slots.take(message, own, taker, program.piece(message.target, taker)))
                for message, own in step.takes
            ]
            gives = [
                (own, program.keys(message, made=made), slots.put(message, own, made=made, piece=piece))
                for message, own in step.gives
                for piece in [program.piece(message.source if made else message.target, program.rank)]
            ]
            given.append((step, takes, gives))
            before.append(slots.count)
        if loop is not None:
            self._slots_per_copy = [before[end] - before[begin] for begin, end in loop.rounds]
        taken = slots.taken
        self._steps = [
            _Prepared(step, takes, [(own, names, slot, slot in taken) for own, names, slot in gives])
            for step, takes, gives in given
        ]
        for each in self._steps:
            received = each.step.message is not None and not each.step.action.sends
            assert not received or each.gives[0][3], "every message is used in the program"
        whole = self._steps if loop is None else self._steps[: loop.begun]
        self._actions = [self._action(each) for each in whole]

    def run(self, samples: MiniBatch, repeats: int | None = None) -> list[Span]:
        """Run the program on one mini-batch, with a loop's round only so often more, if that is said.

        Returns when actions ran; where not ``traced``, of computing actions the first and the last. Raises RankError,
        which names the action.
        """
        self._spans = []
        try:
            for action in self._actions:
                action(samples)
            self._repeat(samples, repeats)
            self._send_all()
            self._finish_sends()
        except TransferError as error:
            raise self._transfer_failed(error) from error
        except StageError as error:
            where = self.progress.describe()
            raise RankError(Cause.RAISED, f"rank {self.program.rank} failed {where}: {error}") from error
        assert all(runner.idle for runner in self.runners.values()), "every F has its B, or I and W, in the program"
        return self._spans

    def _repeat(self, samples: MiniBatch, repeats: int | None) -> None:
        """The other copies of a loop's round, and what is after them."""
        loop = self.program.loop
        if loop is None:
            return
        for turn in loop.turns(repeats):
            self._action(self._steps[turn.step].later(turn, loop, self._slots_per_copy))(samples)

    def _action(self, prepared: _Prepared) -> Callable[[MiniBatch], None]:
        """What a step does, put together before it runs."""
        step, takes, gives = prepared.step, prepared.takes, prepared.gives
        if step.action.role is Role.STATE:
            return lambda _: self._exchange(step)
        if step.message is None:
            return lambda samples: self._compute(step, takes, gives, samples)
        if step.action.sends:
            later = self.receives_first and not self.blocking
            sent = step, takes[0][2]
            return lambda _: self._unsent.append(sent) if later else self._send(*sent)
        slot = gives[0][2]
        return lambda _: self._receive(step, slot)

    def _compute(self, step: ProgramStep, takes: Sequence[_Taken], gives: Sequence[_Given], samples: MiniBatch) -> None:
        self._send_all()
        self.progress.begin(Phase.RUNNING, step.counter)
        inputs: dict[Numbers, list[tuple[TensorKey, Tensor]]] = defaultdict(list)
        for own, names, taking in takes:
            inputs[own] += zip(names, self._made(taking, step.counter).tensors, strict=True)
        start = self.clock.mark()
        made = self.runners[step.action.stage].run(step, inputs, samples)
        self._note_action(step, start)
        self._keep(gives, made)

    def _exchange(self, step: ProgramStep) -> None:
        """Begin to gather or to reduce a stage's state; what needs that waits for it."""
        self._send_all()
        self.progress.begin(Phase.RUNNING, step.counter)
        if self.exchange is not None:
            self.exchange(step)

    def _receive(self, step: ProgramStep, slot: int) -> None:
        """Post a RECV; it waits for its message only if it is blocking."""
        self.progress.begin(Phase.RUNNING, step.counter)
        self.channels.receive(step)
        if self.blocking:
            self._slots[slot] = self._awaited(step)
        else:
            self._posted[slot] = step

    def _send_all(self) -> None:
        """SEND what was put off for the RECVs after it."""
        for step, taking in self._unsent:
            self._send(step, taking)
        self._unsent.clear()

    def _send(self, step: ProgramStep, taking: Taking) -> None:
        """SEND what its producer made; it waits for the other side only if it is blocking."""
        self.progress.begin(Phase.WAITING, step.counter, step.peer)  # for room, if ever
        start = self.clock.mark()
        made = self._made(taking, step.counter)
        ready = [tensor.contiguous() for tensor in made.tensors]
        as_made = made.at is not None and all(tensor.is_contiguous() for tensor in made.tensors)
        self.channels.send(step, ready, made.at if as_made else self.channels.moment())
        if self.blocking:
            self.channels.deliver(step)
        self._note(step, start)

    def _made(self, taking: Taking, counter: int) -> Made:
        """What an action takes; the last one to take something lets go of it."""
        found = taking.of(lambda slot: self._here(slot, counter))
        for slot in taking.frees:
            del self._slots[slot]
        return found

    def _here(self, slot: int, counter: int) -> Made:
        """What is in a slot; a message is waited for when it is first needed."""
        made = self._slots.get(slot)
        if made is None:
            made = self._slots[slot] = self._awaited(self._posted.pop(slot))
            self.progress.begin(Phase.RUNNING, counter)
        return made

    def _awaited(self, step: ProgramStep) -> Made:
        """A message's tensors, waited for."""
        self.progress.begin(Phase.WAITING, step.counter, step.peer)
        start = self.clock.mark()
        tensors = self.channels.take(step)
        self._note(step, start)
        return Made(tensors)

    def _note_action(self, step: ProgramStep, start: Mark) -> None:
        """Keep when an action ran; one in parts from its first on, until its last one has run."""
        if step.part == 0:
            self._begun = start
        if step.part is None or step.is_last:
            self._note(step, start if step.part is None or self._begun is None else self._begun)

    def _note(self, step: ProgramStep, start: Mark) -> None:
        """Keep when a step ran, until now."""
        span = step.counter, start, self.clock.mark()
        if self.traced or (step.message is None and len(self._spans) < 2):
            self._spans.append(span)
        elif step.message is None:
            self._spans[1] = span

    def _keep(self, gives: Sequence[_Given], made: Produced) -> None:
        """Keep what was made for the SENDs, and for this rank's own actions, that take it."""
        at = self.channels.moment() if gives else None
        for own, names, slot, taken in gives:
            tensors = [self._declared(name, made[own][name], len(own)) for name in names]
            if taken:
                self._slots[slot] = Made(tensors, at)

    def _declared(self, key: TensorKey, tensor: Tensor, num_samples: int) -> Tensor:
        """Receivers have made room for what the model declares; anything else would end in the transport."""
        spec = spec_of(self.specs, key)
        if tensor.shape != spec.of(num_samples) or tensor.dtype != spec.dtype:
            found = TensorSpec(tuple(tensor.shape), tensor.dtype, None).text(0)
            name = key if isinstance(key, str) else key[0]
            raise StageError(f"block {name!r} made {found}, and the model declares {spec.text(num_samples)}")
        return tensor

    def _finish_sends(self) -> None:
        """Wait until all peers have taken what was sent to them."""
        for peer in self.channels.unfinished():
            self.progress.begin(Phase.WAITING, len(self.program.texts) - 1, peer)
            self.channels.finish(peer)

    def _transfer_failed(self, error: TransferError) -> RankError:
        happened = "got nothing from" if error.cause is Cause.TIMEOUT else "lost"
        text = f"rank {self.program.rank} {happened} {error.who} {self.progress.describe()}: {error}"
        return RankError(error.cause, text, error.peer)
