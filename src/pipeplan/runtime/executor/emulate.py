"""Emulating a plan without its model: real processes and real messages, and waiting instead of computing.

An action takes what the plan says from when it can start: when its device is free and what it needs is there. What
one stage makes for another is rows of words that say when they were made, or when the plan's message with them would
have arrived; the receiver starts no earlier. Times are those of one clock of all ranks.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import statistics
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
from pipeplan.runtime.launch.status import Phase, Progress, lost_others, tell
from pipeplan.units import format_ns
from pipeplan.workload.elements import Hop
from pipeplan.workload.program_network import ProgramNetwork
from pipeplan.workload.tail import tail_at

_CPU = torch.device("cpu")
_CLOSE, _AIM = 0.03, 0.02
"""Shares of the predicted time: how much longer a step may take, and the target where it takes longer."""

_BARE_STEPS, _TRIALS = 4, 3
"""Steps whose actions take no time, the first of them as warm-up, and then steps that take their time."""

_TRIED_COPIES = 1_000
"""Of a loop's round, in such steps."""

_WORD_BYTES = 8
_LEAST_BYTES = 1024
"""Of a message whose bytes the plan does not know."""

_AT, _LATE = 0, 1
"""Words of a row: when it was made or has arrived, and how late its sender was when it was sent."""

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
    if any(stage.block_groups for stage in plan.stages):
        plan = plan.unrolled()  # a network goes through its exchanges one by one
    emulation = _Emulation(plan, options, progress)
    stretch = emulation.stretch(options.stretch)
    steps, timeline = [], []
    for step in range(options.num_steps):
        iteration_ns, actions = emulation.step(step)
        steps.append(StepResult(step, math.nan, iteration_ns, 0))
        if options.trace:
            planned = [(counter, round(start / stretch), round(end / stretch)) for counter, start, end in actions]
            timeline.append(tuple(tuple(own) for own in emulation.all_ranks.gather(planned)))
        on_step(steps[-1])
    emulation.close()
    progress.begin(Phase.DONE)
    return RunResult(tuple(steps), (), {"torch": torch.__version__}, tuple(timeline), stretch)


class _Emulation:
    """One rank: its executor, whose stages and channels only take time."""

    def __init__(self, plan: Plan, options: RunOptions, progress: Progress) -> None:
        progress.begin(Phase.CONNECTING)
        timeout = timedelta(seconds=options.timeout_ns / 1e9)
        self._progress, self._planned_ns, self._num_ranks = progress, plan.predicted.whole_ns, len(plan.devices)
        self.all_ranks = AllRanks(_CPU, progress, timeout)
        require_alike(self.all_ranks.gather({"plan": sha256_of(plan), **options.as_json()}))
        programs, hops = planned_programs(plan), hops_of(plan)
        self._program = programs[progress.rank]
        self._tail_ns = _after_actions(plan)[progress.rank]
        specs = specs_of(programs, hops, options.message_limit_bytes)
        self._pace = pace = Pace(self.all_ranks.clock.offset_ns)
        groups = ProcessGroups((stage.devices for stage in plan.stages), progress)
        with lost_others(progress):
            groups.connect("gloo", timeout)
            channels = EmulatedChannels(self._program, specs, timeout, hops, pace, blocking=options.blocking)
        self._network = network = ProgramNetwork(plan.stages, plan.programs[progress.rank], pace.stretched)
        runners = {
            index: EmulatedRunner(plan, self._program.tensors, specs, pace, groups.of(stage.devices), network)
            for index, stage in enumerate(plan.stages)
            if progress.rank in stage.devices
        }
        clock = self.all_ranks.clock
        self._executor = Executor(
            self._program, runners, channels, specs, progress, clock, options.blocking, traced=options.trace
        )
        self._tried_copies, self._tried_ns = self._trial(plan)

    def _trial(self, plan: Plan) -> tuple[int | None, int]:
        """How often a loop's round runs more while times are tried, and what such a step takes as planned, in ns."""
        loop = self._program.loop
        if loop is None or plan.loop is None or loop.repeats <= _TRIED_COPIES:
            return None, self._planned_ns
        return _TRIED_COPIES, self._planned_ns - (loop.repeats - _TRIED_COPIES) * plan.loop.round_ns

    def stretch(self, asked: float) -> float:
        """How many times as long as planned everything takes from now on; 0 asks for what this machine can keep.

        Steps whose actions take no time show how long the ranks need for all that the plan does not predict, one after
        another at worst: in less nothing can be kept. With times stretched to that, or as planned where that is longer,
        a step may still take too long. Where that is the machine's doing it does not depend on the times, so it is to
        be a small part of them; what grows with them, as waits of blocking transfers do, is the plan's own.
        """
        if asked or not self._planned_ns:
            return self._stretch(asked or 1.0)
        self._stretch(0.0)
        bare_ns = statistics.median([self.step(0, self._tried_copies)[0] for _ in range(_BARE_STEPS)][1:])
        least = max(1.0, bare_ns / self._tried_ns)
        over = self._over(least)
        if over > _CLOSE * least:
            over = 2 * over - self._over(2 * least)
        if over > _CLOSE * least:
            least = over / _AIM
        found = self._stretch(1.0 if least == 1 else math.ceil(round(10 * least, 3)) / 10)
        if self._progress.rank == 0 and found != 1:
            bare, late = (format_ns(round(ns)) for ns in (bare_ns, over * self._tried_ns))
            tell(
                f"{self._num_ranks} processes on {os.cpu_count()} cores take {bare} for a step whose actions take no "
                f"time, and end {late} late: the plan's actions are too short for them, and all times are stretched "
                f"{found:g} times (--stretch)"
            )
        return found

    def _over(self, factor: float) -> float:
        """How much longer steps take than they should when times are stretched by this, in predicted steps."""
        if self._progress.rank == 0 and (wait_s := _TRIALS * factor * self._tried_ns / 1e9) >= 1:
            tell(f"measuring what this machine can keep: about {wait_s:.0f} s (not with --stretch {factor:.3g})")
        self._stretch(factor)
        return statistics.median(self.step(0, self._tried_copies)[0] for _ in range(_TRIALS)) / self._tried_ns - factor

    def _stretch(self, factor: float) -> float:
        self._pace.stretch = factor
        return factor

    def step(self, step: int, copies: int | None = None) -> tuple[int, list[TimedAction]]:
        """Ns of the iteration, the same on all ranks, and when this rank's actions ran; what follows is as predicted.

        ``copies`` are those of a loop's round, if not as many as planned.
        """
        self._progress.step = step
        self.all_ranks.begin()
        self._pace.restart()
        self._network.restart(self._pace.now())
        actions = self.all_ranks.resolve(self._executor.run(_NO_SAMPLES, copies))
        texts = self._program.texts
        computed = extent([action for action in actions if "_" not in texts[action[0]]])  # a message is 1SEND_F0
        if computed is not None:
            computed = computed[0], computed[1] + self._pace.stretched(self._tail_ns)
        self._progress.begin(Phase.REPORTING)
        return iteration_of(self.all_ranks.gather(computed)), actions

    def close(self) -> None:
        """Drop works and groups, which must not outlive the process group."""
        self._executor.channels.close()
        self.all_ranks.close()


def _after_actions(plan: Plan) -> list[int]:
    """[device] ns between the end of its last action and of all that follows, as predicted."""
    tail = tail_at(plan.workload, plan.starts_ns, plan.loop)
    return [after - acted for after, acted in zip(tail.ended_ns, tail.acted_ns, strict=True)]


class Pace:
    """A device's time, in which its actions follow each other at once.

    As an accelerator's host does, its process interprets and posts messages while the device works, and is late only
    where that takes longer than the action. Sleeps that end late, and waits for one of too few cores, are this
    machine's doing. Other ranks that are late for messages count. ``offset_ns`` is how far the host's clock is ahead;
    times of the plan are ``stretch`` times as long.
    """

    def __init__(self, offset_ns: int) -> None:
        self._offset_ns = offset_ns
        self._free_ns: int | None = None
        self.stretch = 1.0
        if sys.platform == "linux":  # else the system adds up to 50 us to every sleep
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def now(self) -> int:
        """Ns of the common clock."""
        return time.monotonic_ns() - self._offset_ns

    def stretched(self, planned_ns: int) -> int:
        """How long something takes."""
        return round(planned_ns * self.stretch)

    def restart(self) -> None:
        """The device is free when it is first asked for something."""
        self._free_ns = None

    def free_ns(self) -> int:
        """When the device could start something new."""
        if self._free_ns is None:
            self._free_ns = self.now()
        return self._free_ns

    def late_ns(self) -> int:
        """How much later it is than on the device."""
        return max(0, self.now() - self.free_ns())

    def waited(self, since_ns: int, late_ns: int = 0) -> None:
        """Others were waited for, who sent ``late_ns`` late: in time it would have ended that much sooner.

        But no sooner than the wait began, or the device was free.
        """
        earliest_ns = since_ns if self._free_ns is None else self._free_ns
        self._free_ns = max(earliest_ns, self.now() - late_ns)

    def until(self, end_ns: int) -> None:
        """Sleep; the device is free at the end."""
        left_ns = end_ns - self.now()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)
        self._free_ns = end_ns


def _blocks() -> int:
    """How often this thread has waited for something; where the system does not count, as if always."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if sys.platform == "linux" else time.monotonic_ns()


@dataclass(frozen=True, slots=True)
class EmulatedRunner:
    """A stage or custom op whose actions sleep as long as the plan says, from when all of ``group`` can start."""

    plan: Plan
    tensors: Mapping[Message, Sequence[str]]
    specs: Mapping[str, TensorSpec]
    pace: Pace
    group: RankGroup
    network: ProgramNetwork
    idle: ClassVar[bool] = True

    def run(self, step: ProgramStep, inputs: Received, samples: MiniBatch) -> Produced:
        """Rows, made at the end. Agreeing with the other devices on the start is part of an action's time."""
        needed = [_stamp(rows) for given in inputs.values() for _, rows in given]
        exchanged = self.network.exchange(step.counter, step.action)
        start_ns = self.group.latest(max([self.pace.free_ns(), *needed, exchanged]))
        self.network.begin(step.action, start_ns)
        end_ns = start_ns + self.pace.stretched(_duration_ns(self.plan, step))
        made = self._made(step, end_ns)
        self.pace.until(end_ns)
        return made

    def _made(self, step: ProgramStep, at_ns: int) -> Produced:
        found: dict[Numbers, dict[str, Tensor]] = defaultdict(dict)
        for message, own in step.gives:
            for name in self.tensors[message]:
                found[own][name] = _stamped(self.specs[name].of(len(own)), at_ns)
        return found


def _duration_ns(plan: Plan, step: ProgramStep) -> int:
    """What an action takes; parts of a micro-batch have a time of their own."""
    operation = plan.operation(f"{step.action.stage}{step.action.kind}")
    if step.part is not None:
        return operation.parts_ns[step.part]
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
        (rows,) = tensors
        arrival_ns = _stamp(rows)
        if hop.duration_ns and not self._blocking:  # else they arrive when they are made, as they say
            self._link_free_ns[peer] = max(arrival_ns, self._link_free_ns[peer]) + self._pace.stretched(
                hop.occupancy_ns
            )
            arrival_ns = self._link_free_ns[peer] + self._pace.stretched(hop.latency_ns)
        super().send(step, [_stamped(rows.shape, arrival_ns, self._pace.late_ns())], made)

    def take(self, step: ProgramStep) -> list[Tensor]:
        """Rows, not before they would have arrived."""
        begin, blocked = self._pace.now(), _blocks()
        (rows,) = super().take(step)
        if _blocks() > blocked:  # else it was there
            self._pace.waited(begin, int(rows.numpy()[:, _LATE].max()))
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
        """When a message arrives whose two ends have both reached it now."""
        return self._pace.now() + self._pace.stretched(_hop(self._hops, self._program.rank, step).duration_ns)


def _hop(hops: Hops, rank: int, step: ProgramStep) -> Hop:
    """The plan's time of a rank's transfer; parts of a micro-batch have one of their own."""
    assert step.message is not None
    hop = hops[step.message, *((rank, step.peer) if step.action.sends else (step.peer, rank))]
    return hop if step.action.part is None else hop.part


def _stamp(rows: Tensor) -> int:
    """The latest time that rows [sample, word] bear; numpy needs a tenth of torch's time for so little."""
    return int(rows.numpy()[:, _AT].max())


def _stamped(shape: Sequence[int], at_ns: int, late_ns: int = 0) -> Tensor:
    rows = np.full(shape, at_ns, dtype=np.int64)
    rows[:, _LATE] = late_ns
    return torch.from_numpy(rows)


def specs_of(programs: Sequence[Program], hops: Hops, limit_bytes: int) -> dict[str, TensorSpec]:
    """Of the rows of every message: as long as makes its longest message the plan's bytes, up to the limit."""
    words = {name: 1 + max(_AT, _LATE) for program in programs for names in program.tensors.values() for name in names}
    for program in programs:
        for step in program.steps:
            if step.message is not None and step.action.sends:
                hop = _hop(hops, program.rank, step)
                size = min(max(hop.bytes, _LEAST_BYTES), limit_bytes)
                (name,) = program.tensors[step.message]
                words[name] = max(words[name], size // (_WORD_BYTES * len(step.samples[0])))
    return {name: TensorSpec((1, count), torch.int64) for name, count in words.items()}
