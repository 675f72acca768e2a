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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pipeplan.files import Plan, sha256_of
from pipeplan.runtime.executor.channels import Channels
from pipeplan.runtime.executor.interpreter import Executor
from pipeplan.runtime.executor.message_graph import Hops, Message, Numbers, hops_of
from pipeplan.runtime.executor.process_groups import (
    AllRanks,
    ProcessGroups,
    RankGroup,
    TimedAction,
    extent,
    iteration_of,
    require_alike,
)
from pipeplan.runtime.executor.rank_program import Program, ProgramStep, planned_programs
from pipeplan.runtime.executor.stage import MiniBatch
from pipeplan.runtime.executor.tensors import Produced, Received, TensorSpec
from pipeplan.runtime.launch.job import OnStep, RankContext, Report, RunOptions, RunResult, StepResult, run_job
from pipeplan.runtime.launch.status import Phase, Progress, lost_others
from pipeplan.workload.elements import Hop

_CPU = torch.device("cpu")
_WORD_BYTES = 8
_LEAST_BYTES = 1024
"""Of a message whose bytes the plan does not know."""

_PR_SET_TIMERSLACK = 29
_NO_SAMPLES = MiniBatch({}, 1)


def emulate_job(job: Report, context: RankContext) -> None:
    """The job of a rank that emulates."""
    run_job(emulate, RunOptions(**job["options"]), job, context)


def emulate(plan: Plan, options: RunOptions, progress: Progress, on_step: OnStep) -> RunResult:
    """Run the plan's programs as often as asked for; every rank of the process group calls this.

    ``on_step`` is called on every rank as steps end, with the same result. Raises RankError where an action fails, and
    UsageError, on every rank, where they were started with different plans or options.
    """
    emulation = _Emulation(plan, options, progress)
    steps, timeline = [], []
    for step in range(options.num_steps):
        iteration_ns, actions = emulation.step(step)
        steps.append(StepResult(step, math.nan, iteration_ns, 0))
        if options.trace:
            timeline.append(tuple(tuple(own) for own in emulation.all_ranks.gather(actions)))
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
        self.all_ranks = AllRanks(_CPU, progress, timeout)
        require_alike(self.all_ranks.gather({"plan": sha256_of(plan), **options.as_json()}))
        programs, hops = planned_programs(plan), hops_of(plan)
        self._program = programs[progress.rank]
        self._sums_ns = plan.workload.sums_ns[progress.rank]
        specs = specs_of(programs, hops, options.message_limit_bytes)
        self._pace = pace = Pace(self.all_ranks.clock.offset_ns)
        groups = ProcessGroups((stage.devices for stage in plan.stages), progress)
        with lost_others(progress):
            groups.connect("gloo", timeout)
            channels = EmulatedChannels(self._program, specs, timeout, hops, pace, blocking=options.blocking)
        runners = {
            index: EmulatedRunner(plan, self._program.tensors, specs, pace, groups.of(stage.devices))
            for index, stage in enumerate(plan.stages)
            if progress.rank in stage.devices
        }
        clock = self.all_ranks.clock
        self._executor = Executor(self._program, runners, channels, specs, progress, clock, options.blocking)

    def step(self, step: int) -> tuple[int, list[TimedAction]]:
        """Ns of the iteration, the same on all ranks, and when this rank's actions ran; sums last as predicted."""
        self._progress.step = step
        self.all_ranks.begin()
        self._pace.restart()
        actions = self.all_ranks.resolve(self._executor.run(_NO_SAMPLES))
        steps = self._program.steps
        computed = extent([action for action in actions if steps[action[0]].action.is_compute])
        if computed is not None:
            computed = computed[0], computed[1] + self._sums_ns
        self._progress.begin(Phase.REPORTING)
        return iteration_of(self.all_ranks.gather(computed)), actions

    def close(self) -> None:
        """Drop works and groups, which must not outlive the process group."""
        self._executor.channels.close()
        self.all_ranks.close()


class Pace:
    """A device's time: what it does ends no earlier than it should.

    A sleep ends a little late, which is this machine's doing and no part of the plan: the next action counts from when
    it should have ended; any other delay counts in full. ``offset_ns`` is how far the host's clock is ahead.
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


@dataclass(frozen=True, slots=True)
class EmulatedRunner:
    """A stage or custom op whose actions sleep as long as the plan says, from when all of ``group`` can start."""

    plan: Plan
    tensors: Mapping[Message, Sequence[str]]
    specs: Mapping[str, TensorSpec]
    pace: Pace
    group: RankGroup
    idle: ClassVar[bool] = True

    def run(self, step: ProgramStep, inputs: Received, samples: MiniBatch) -> Produced:
        """Rows, made at the end. Agreeing with the other devices on the start is part of an action's time."""
        needed = [_stamp(rows) for given in inputs.values() for _, rows in given]
        start_ns = self.group.latest(max([self.pace.free_ns(), *needed]))
        end_ns = start_ns + _duration_ns(self.plan, step)
        made = self._made(step, end_ns)
        ended_ns = self.pace.until(end_ns)
        return made if ended_ns == end_ns else self._made(step, ended_ns)

    def _made(self, step: ProgramStep, at_ns: int) -> Produced:
        found: dict[Numbers, dict[str, Tensor]] = defaultdict(dict)
        for message, own in step.gives:
            for name in self.tensors[message]:
                found[own][name] = _stamped(self.specs[name].of(len(own)), at_ns)
        return found


def _duration_ns(plan: Plan, step: ProgramStep) -> int:
    """What an action takes; parts of a micro-batch have a time of their own."""
    operation = plan.operation(f"{step.action.stage}{step.action.kind}")
    return operation.duration_ns if step.action.part is None else operation.part_ns or operation.duration_ns


class EmulatedChannels(Channels):
    """Messages that take what the plan says in ``hops``, or longer where the transport does.

    A link carries one message at a time, in the order of the SENDs. The time starts when the message was made; where
    transfers are ``blocking``, when both ends have come to it.
    """

    def __init__(
        self,
        program: Program,
        specs: Mapping[str, TensorSpec],
        timeout: timedelta,
        hops: Hops,
        pace: Pace,
        *,
        blocking: bool,
    ) -> None:
        super().__init__(program, specs, _CPU, "gloo", timeout)
        self._hops, self._pace, self._blocking = hops, pace, blocking
        self._link_free_ns: defaultdict[int, int] = defaultdict(int)

    def send(self, step: ProgramStep, tensors: Sequence[Tensor], made: torch.cuda.Event | None) -> None:
        """Send rows that say when they arrive."""
        hop, peer = _hop(self._hops, self._program.rank, step), step.peer
        if hop.duration_ns and not self._blocking:  # else they arrive when they are made, as they say
            (rows,) = tensors
            self._link_free_ns[peer] = max(_stamp(rows), self._link_free_ns[peer]) + hop.occupancy_ns
            tensors = [_stamped(rows.shape, self._link_free_ns[peer] + hop.latency_ns)]
        super().send(step, tensors, made)

    def take(self, step: ProgramStep) -> list[Tensor]:
        """Rows, not before they would have arrived."""
        begin = self._pace.now()
        (rows,) = super().take(step)
        self._pace.waited(begin)
        arrival = self._carried(step) if self._blocking else _stamp(rows)
        if arrival > self._pace.now():
            self._pace.until(arrival)
        return [rows]

    def deliver(self, step: ProgramStep) -> None:
        """Wait as long as the receiver does."""
        begin = self._pace.now()
        super().deliver(step)
        self._pace.waited(begin)
        self._pace.until(self._carried(step))

    def _carried(self, step: ProgramStep) -> int:
        """When a message has arrived whose two ends have come to it now."""
        return self._pace.now() + _hop(self._hops, self._program.rank, step).duration_ns


def _hop(hops: Hops, rank: int, step: ProgramStep) -> Hop:
    """The plan's time of a rank's transfer; parts of a micro-batch have one of their own."""
    assert step.message is not None
    hop = hops[step.message, *((rank, step.peer) if step.action.sends else (step.peer, rank))]
    return hop if step.action.part is None else hop.part


def _stamp(rows: Tensor) -> int:
    """The latest time that rows [sample, word] bear; numpy needs a tenth of torch's time for so little."""
    return int(rows.numpy()[:, 0].max())


def _stamped(shape: Sequence[int], at_ns: int) -> Tensor:
    return torch.from_numpy(np.full(shape, at_ns, dtype=np.int64))


def specs_of(programs: Sequence[Program], hops: Hops, limit_bytes: int) -> dict[str, TensorSpec]:
    """Of the rows of every message: as long as makes its longest message the plan's bytes, up to the limit."""
    words = {name: 1 for program in programs for names in program.tensors.values() for name in names}
    for program in programs:
        for step in program.steps:
            if step.message is not None and step.action.sends:
                hop = _hop(hops, program.rank, step)
                size = min(max(hop.bytes, _LEAST_BYTES), limit_bytes)
                (name,) = program.tensors[step.message]
                words[name] = max(words[name], size // (_WORD_BYTES * len(step.samples[0])))
    return {name: TensorSpec((1, count), torch.int64) for name, count in words.items()}
