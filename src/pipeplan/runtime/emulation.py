"""Emulating a plan without its model: real processes and real messages, and waiting instead of computing.

An action takes what the plan says from when it can start: when its device is free and what it needs is there. What
one stage makes for another is rows of words that say when they were made, or when the plan's message with them would
have arrived; the receiver starts no earlier. Times are those of one clock of all ranks.
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan.model import Hop, Plan, sha256_of
from pipeplan.runtime.executor import Executor
from pipeplan.runtime.failures import lost_others
from pipeplan.runtime.messages import Channels, edges_of
from pipeplan.runtime.options import Link, OnStep, Report, RunOptions, RunResult, StepResult, run_job
from pipeplan.runtime.program import Instruction, Message, Numbers, OperationPart, Program, StagePart, planned_programs
from pipeplan.runtime.progress import Phase, Progress
from pipeplan.runtime.rows import TensorSpec
from pipeplan.runtime.stages import Samples
from pipeplan.runtime.together import TimedAction, Together, extent, iteration_of, require_alike

__all__ = [
    "EmulatedChannels",
    "EmulatedOperation",
    "EmulatedStage",
    "Pace",
    "emulate",
    "emulate_job",
    "hops_of",
    "specs_of",
]

_CPU = torch.device("cpu")
_WORD_BYTES = 8
_LEAST_BYTES = 1024
"""Of a message whose bytes the plan does not know."""

_PR_SET_TIMERSLACK = 29
_NO_SAMPLES = Samples({}, 1)

Hops = Mapping[tuple[Message, int, int], Hop]
"""[message, source rank, target rank]"""


def emulate_job(job: Report, link: Link) -> None:
    """The job of a rank that emulates."""
    run_job(emulate, RunOptions(**job["options"]), job, link)


def emulate(plan: Plan, options: RunOptions, progress: Progress, on_step: OnStep) -> RunResult:
    """Run the plan's programs as often as asked for; every rank of the process group calls this.

    ``on_step`` is called on every rank as steps end, with the same result.

    Raises:
        UsageError: ranks were started with different plans or options; the same on every rank.
        RankError: an action failed.
    """
    emulation = _Emulation(plan, options, progress)
    steps, timeline = [], []
    for step in range(options.num_steps):
        iteration_ns, actions = emulation.step(step)
        steps.append(StepResult(step, math.nan, iteration_ns, 0))
        if options.trace:
            timeline.append(tuple(tuple(told) for told in emulation.together.everyones(actions)))
        on_step(steps[-1])
    emulation.close()
    progress.begin(Phase.DONE)
    return RunResult(tuple(steps), (), {"torch": torch.__version__}, tuple(timeline))


class _Emulation:
    """One rank: its executor, whose stages and channels only take time."""

    def __init__(self, plan: Plan, options: RunOptions, progress: Progress) -> None:
        progress.begin(Phase.CONNECTING)
        timeout = timedelta(seconds=options.timeout_ns / 1e9)
        self._progress = progress
        self.together = Together(_CPU, progress, timeout)
        require_alike(self.together.everyones({"plan": sha256_of(plan), **options.as_json()}))
        programs, hops = planned_programs(plan), hops_of(plan)
        self._program = programs[progress.rank]
        self._sums_ns = sum(stage.sync_ns for stage in plan.stages if progress.rank in stage.devices)
        specs = specs_of(programs, hops, options.message_limit_bytes)
        self._pace = pace = Pace(self.together.clock.offset_ns)
        with lost_others(progress):
            groups = _groups_of(plan, timeout)
            channels = EmulatedChannels(
                self._program, edges_of(programs), specs, timeout, hops, pace, blocking=options.blocking
            )
        stages = {
            index: EmulatedStage(plan, self._program, part, specs, pace, _Company(groups[index], progress))
            for index, part in self._program.stages.items()
        }
        clock = self.together.clock
        operations = {
            index: EmulatedOperation(plan, self._program, part, specs, pace, _Company(groups[index], progress))
            for index, part in self._program.operations.items()
        }
        self._executor = Executor(self._program, stages, channels, specs, progress, clock, options.blocking, operations)

    def step(self, step: int) -> tuple[int, list[TimedAction]]:
        """Ns of the iteration, the same on all ranks, and when this rank's actions ran; sums last as predicted."""
        self._progress.step = step
        beginning = self.together.begin()
        self._pace.restart()
        actions = self.together.resolve(self._executor.run(_NO_SAMPLES), beginning)
        instructions = self._program.instructions
        computed = extent([action for action in actions if instructions[action[0]].action.is_compute])
        if computed is not None:
            computed = computed[0], computed[1] + self._sums_ns
        self._progress.begin(Phase.REPORTING)
        return iteration_of(self.together.everyones(computed)), actions

    def close(self) -> None:
        """Drop works and groups, which must not outlive the process group."""
        self._executor.channels.close()
        self.together.close()


class Pace:
    """A device's time: what it does ends no earlier than it should.

    A sleep ends a little late, which is this machine's doing and no part of the plan. The device's next action counts
    from when the sleep should have ended; any other delay counts in full.

    Args:
        offset_ns: how far this host's clock is ahead of the common one.
    """

    def __init__(self, offset_ns: int) -> None:
        self._offset_ns = offset_ns
        self._late_ns = 0
        if sys.platform == "linux":  # else the system adds up to 50 us to every sleep
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def now(self) -> int:
        """Ns of the common clock."""
        return time.monotonic_ns() - self._offset_ns

    def restart(self) -> None:
        """Nothing is late any more."""
        self._late_ns = 0

    def waited(self, since_ns: int) -> None:
        """Others were waited for: of being late itself only what is more than that still counts."""
        self._late_ns = max(0, self._late_ns - (self.now() - since_ns))

    def free_ns(self) -> int:
        """When the device could start something new: now, but for having slept too long."""
        return self.now() - self._late_ns

    def until(self, end_ns: int) -> int:
        """Sleep, and return when that ended or should have: now where the end is past."""
        left_ns = end_ns - self.now()
        if left_ns <= 0:
            self._late_ns = 0
            return end_ns - left_ns
        time.sleep(left_ns / 1e9)
        self._late_ns = max(0, self.now() - end_ns)
        return end_ns


class _Company:
    """The devices of a stage, which start its actions together."""

    def __init__(self, group: dist.ProcessGroup | None, progress: Progress) -> None:
        self._group, self._progress = group, progress

    def latest(self, ns: int) -> int:
        """The latest of what they say; on several devices a collective."""
        if self._group is None:
            return ns
        told = torch.tensor([ns])
        with lost_others(self._progress):
            dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group)
        return int(told)


class _Sleeping:
    """Actions that sleep, from when all of their devices can start them.

    Args:
        specs: of the rows that are exchanged.
        pace: of the device.
        company: of the devices.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], pace: Pace, company: _Company) -> None:
        self._specs, self._pace, self._company = specs, pace, company

    def _end_ns(self, duration_ns: int, needed: Iterable[Tensor]) -> int:
        """When an action ends. Agreeing with the other devices on its start is part of its time, as collectives are."""
        start = max([self._pace.free_ns(), *map(_stamp, needed)])
        return self._company.latest(start) + duration_ns

    def _spend(self, end_ns: int, names: Mapping[Numbers, Sequence[str]]) -> dict[Numbers, dict[str, Tensor]]:
        """Run an action that makes these rows of these samples; what can be done before it ends is done by then."""
        made = self._made(end_ns, names)
        ended_ns = self._pace.until(end_ns)
        return made if ended_ns == end_ns else self._made(ended_ns, names)

    def _made(self, at_ns: int, names: Mapping[Numbers, Sequence[str]]) -> dict[Numbers, dict[str, Tensor]]:
        return {
            own: {name: _stamped(self._specs[name].of(len(own)), at_ns) for name in each} for own, each in names.items()
        }


class EmulatedOperation(_Sleeping):
    """An instruction that sleeps for as long as the plan says; arguments as for :class:`EmulatedStage`."""

    def __init__(
        self,
        plan: Plan,
        program: Program,
        part: OperationPart,
        specs: Mapping[str, TensorSpec],
        pace: Pace,
        company: _Company,
    ) -> None:
        super().__init__(specs, pace, company)
        self.part = part
        self._duration_ns = plan.operation(f"{part.index}{part.kind}").duration_ns
        self._names = [name for message in part.gives for name in program.tensors[message]]

    def run(self, instruction: Instruction, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rows for later actions, made at the end."""
        (own,) = instruction.samples
        return self._spend(self._end_ns(self._duration_ns, inputs.values()), {own: self._names})[own]


class EmulatedStage(_Sleeping):
    """A stage whose actions sleep for as long as the plan says, from when all of its devices can start them.

    Args:
        plan: says how long.
        program: this rank's.
        part: the stage.
        specs: of the rows that stages exchange.
        pace: of the device.
        company: of the stage's devices.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        part: StagePart,
        specs: Mapping[str, TensorSpec],
        pace: Pace,
        company: _Company,
    ) -> None:
        super().__init__(specs, pace, company)
        self.part = part
        self._given = [name for message in part.gives for name in program.tensors[message]]
        self._forward_ns = _forward_ns(plan, program, part.index)
        self._backward_ns = plan.operation(f"{part.index}{'I' if part.split else 'B'}").duration_ns
        self._weight_ns = plan.operation(f"{part.index}W").duration_ns if part.split else 0

    @property
    def idle(self) -> bool:
        """Nothing is kept."""
        return True

    def forward(self, own: Numbers, received: Mapping[str, Tensor], samples: Samples) -> dict[str, Tensor]:
        """Rows for the other stages, made at the end."""
        end_ns = self._end_ns(self._forward_ns[own], received.values())
        return self._spend(end_ns, {own: self._given})[own]

    def backward(
        self, microbatch: int, gradients: Mapping[Numbers, Sequence[tuple[str, Tensor]]]
    ) -> dict[Numbers, dict[str, Tensor]]:
        """Rows as gradients of what came in, made at the end."""
        needed = [tensor for given in gradients.values() for _, tensor in given]
        end_ns = self._end_ns(self._backward_ns, needed)
        names = [name for source in self.part.returns for name in self.part.inputs[source]]
        return self._spend(end_ns, dict.fromkeys(gradients, names))

    def weight_gradients(self, microbatch: int) -> None:
        """Only the time."""
        self._spend(self._end_ns(self._weight_ns, ()), {})


class EmulatedChannels(Channels):
    """Messages that take what the plan says, or longer where the transport does.

    A link carries one message at a time, in the order of the SENDs. The time starts when the message was made; where
    transfers block, when both ends have come to it.

    Args:
        hops: the plan's time of each message.
        pace: of the device.
        blocking: whether transfers block.
    """

    def __init__(
        self,
        program: Program,
        edges: Sequence[tuple[int, int]],
        specs: Mapping[str, TensorSpec],
        timeout: timedelta,
        hops: Hops,
        pace: Pace,
        *,
        blocking: bool,
    ) -> None:
        super().__init__(program, edges, specs, _CPU, "gloo", timeout)
        self._hops, self._pace, self._blocking = hops, pace, blocking
        self._link_free_ns: defaultdict[int, int] = defaultdict(int)

    def send(self, instruction: Instruction, tensors: Sequence[Tensor], made: torch.cuda.Event | None) -> None:
        """Send rows that say when they arrive."""
        hop, peer = self._hop(instruction), instruction.peer
        if hop.duration_ns and not self._blocking:  # else they arrive when they are made, as they say
            (rows,) = tensors
            self._link_free_ns[peer] = max(_stamp(rows), self._link_free_ns[peer]) + hop.occupancy_ns
            tensors = [_stamped(rows.shape, self._link_free_ns[peer] + hop.latency_ns)]
        super().send(instruction, tensors, made)

    def take(self, instruction: Instruction) -> list[Tensor]:
        """Rows, not before they would have arrived."""
        begin = self._pace.now()
        (rows,) = super().take(instruction)
        self._pace.waited(begin)
        arrival = self._carried(instruction) if self._blocking else _stamp(rows)
        if arrival > self._pace.now():
            self._pace.until(arrival)
        return [rows]

    def deliver(self, instruction: Instruction) -> None:
        """Wait as long as the receiver does."""
        begin = self._pace.now()
        super().deliver(instruction)
        self._pace.waited(begin)
        self._pace.until(self._carried(instruction))

    def _carried(self, instruction: Instruction) -> int:
        """When a message has arrived whose two ends have come to it now."""
        return self._pace.now() + self._hop(instruction).duration_ns

    def _hop(self, instruction: Instruction) -> Hop:
        ends = (self._program.rank, instruction.peer)
        source, target = ends if instruction.action.sends else reversed(ends)
        assert instruction.message is not None
        hop = self._hops[instruction.message, source, target]
        return hop if instruction.action.part is None else hop.part


def _stamp(rows: Tensor) -> int:
    """The latest time that rows [sample, word] bear; numpy needs a tenth of torch's time for so little."""
    return int(rows.numpy()[:, 0].max())


def _stamped(shape: Sequence[int], at_ns: int) -> Tensor:
    return torch.from_numpy(np.full(shape, at_ns, dtype=np.int64))


def _forward_ns(plan: Plan, program: Program, stage: int) -> dict[Numbers, int]:
    """[samples] ns of a stage's forwards; parts of a micro-batch have their own."""
    operation = plan.operation(f"{stage}F")
    part_ns = operation.part_ns or operation.duration_ns
    return {
        instruction.samples[0]: operation.duration_ns if instruction.action.part is None else part_ns
        for instruction in program.instructions
        if instruction.action.stage == stage and instruction.action.kind == "F"
    }


def hops_of(plan: Plan) -> Hops:
    """The plan's messages, which ``check`` has found to be told apart by stages and ranks."""
    return {
        (
            Message.of(dependency),
            hop.source_device,
            hop.target_device,
        ): hop
        for dependency in plan.dependencies
        for hop in dependency.hops
    }


def specs_of(programs: Sequence[Program], hops: Hops, limit_bytes: int) -> dict[str, TensorSpec]:
    """Of the rows of every message: as long as makes its longest message the plan's bytes, up to the limit."""
    words = {name: 1 for program in programs for names in program.tensors.values() for name in names}
    for program in programs:
        for instruction in program.instructions:
            if instruction.message is not None and instruction.action.sends:
                hop = hops[instruction.message, program.rank, instruction.peer]
                hop = hop if instruction.action.part is None else hop.part
                size = min(max(hop.bytes, _LEAST_BYTES), limit_bytes)
                (name,) = program.tensors[instruction.message]
                words[name] = max(words[name], size // (_WORD_BYTES * len(instruction.samples[0])))
    return {name: TensorSpec((1, count), torch.int64) for name, count in words.items()}


def _groups_of(plan: Plan, timeout: timedelta) -> list[dist.ProcessGroup | None]:
    """[stage] the group of its devices, made by all ranks in the same order; None of one device."""
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for stage in plan.stages:
        ranks = tuple(sorted(stage.devices))
        if ranks not in made:
            made[ranks] = dist.new_group(list(ranks), timeout=timeout, backend="gloo") if len(ranks) > 1 else None
    return [made[tuple(sorted(stage.devices))] for stage in plan.stages]
