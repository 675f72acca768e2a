"""Emulating a plan without its model: real processes and real messages, and waiting instead of computing.

An action takes what the plan says from when it can start: when its device is free and what it needs is there. What
one stage makes for another is rows of words that say when they were made, or when the plan's message with them would
have arrived; the receiver starts no earlier. Times are those of one clock of all ranks.
"""

from __future__ import annotations

import math
import os
import statistics

import torch

from pipeplan.files import Plan, sha256_of
from pipeplan.files.folded import in_place_0, on_device
from pipeplan.runtime.emulation.devices import EmulatedChannels, EmulatedRunner, Pace, specs_of
from pipeplan.runtime.executor.interpreter import Executor
from pipeplan.runtime.executor.message_graph import hops_of
from pipeplan.runtime.executor.process_groups import (
    AllRanks,
    ProcessGroups,
    TimedAction,
    extent,
    iteration_of,
    require_alike,
)
from pipeplan.runtime.executor.rank_program import planned_program, planned_programs
from pipeplan.runtime.executor.stage import MiniBatch
from pipeplan.runtime.launch.job import (
    OnEvent,
    RankContext,
    Report,
    RunOptions,
    RunResult,
    StepResult,
    longest_wait,
    run_job,
)
from pipeplan.runtime.launch.status import Phase, Progress, lost_others, tell
from pipeplan.units import format_ns
from pipeplan.workload.action import StateAction
from pipeplan.workload.elements import program_of
from pipeplan.workload.program_network import ProgramNetwork
from pipeplan.workload.tail import tail_at

_CPU = torch.device("cpu")
_CLOSE, _AIM = 0.03, 0.02
"""Shares of the predicted time: how much longer a step may take, and the target where it takes longer."""

_BARE_STEPS, _TRIALS = 4, 3
"""Steps whose actions take no time, the first of them as warm-up, and then steps that take their time."""

_TRIED_COPIES = 1_000
"""Of a loop's round, in such steps."""

_NO_SAMPLES = MiniBatch({}, 1)


def emulate_job(job: Report, context: RankContext) -> None:
    """The job of a rank that emulates."""
    run_job(emulate, RunOptions(**job["options"]), job, context)


def emulate(plan: Plan, options: RunOptions, progress: Progress, on_event: OnEvent) -> RunResult:
    """Run the plan's programs as often as asked for; every rank of the process group calls this.

    ``on_event`` is called on every rank as steps end, with the same result. Raises RankError where an action fails, and
    UsageError, on every rank, where they were started with different plans or options.
    """
    emulation = _Emulation(plan, options, progress)
    stretch = emulation.stretch(options.stretch)
    steps, timeline = [], []
    for step in range(options.num_steps):
        iteration_ns, actions = emulation.step(step)
        steps.append(StepResult(step, math.nan, iteration_ns, 0))
        if options.trace:
            planned = [(counter, round(start / stretch), round(end / stretch)) for counter, start, end in actions]
            timeline.append(tuple(tuple(own) for own in emulation.all_ranks.gather(planned)))
        on_event(steps[-1])
    emulation.close()
    progress.begin(Phase.DONE)
    return RunResult(tuple(steps), (), {"torch": torch.__version__}, tuple(timeline), stretch)


class _Emulation:
    """One rank: its executor, whose stages and channels only take time."""

    def __init__(self, plan: Plan, options: RunOptions, progress: Progress) -> None:
        progress.begin(Phase.CONNECTING)
        timeout = longest_wait(options.timeout_ns, progress.board.machines)
        self._progress, self._planned_ns, self._num_ranks = progress, plan.predicted.whole_ns, plan.num_devices
        self.all_ranks = AllRanks(_CPU, progress, timeout)
        with lost_others(progress):
            require_alike({"plan": sha256_of(plan), **options.as_json()})
        folded, rank = plan.players, progress.rank
        self._tail_ns = _after_actions(plan)[program_of(folded, rank)[0] if folded else rank]
        # rows of a message are as long on all ranks: as the players in one place of all programs send them
        programs = [planned_program(plan, own.first) for own in folded] if folded else planned_programs(plan)
        specs = specs_of(programs, hops_of(in_place_0(plan)), options.message_limit_bytes)
        self._program = planned_program(plan, rank) if folded else programs[rank]
        plan = on_device(plan, rank)
        hops = hops_of(plan)
        self._pace = pace = Pace(self.all_ranks.clock.offset_ns)
        groups = ProcessGroups((stage.devices for stage in plan.stages), progress)
        with lost_others(progress):
            groups.connect("gloo", timeout)
            channels = EmulatedChannels(self._program, specs, timeout, hops, pace, blocking=options.blocking)
        self._network = network = ProgramNetwork(plan.stages, pace.stretched)
        runners = {
            index: EmulatedRunner(plan, self._program.tensors, specs, pace, groups.of(stage.devices), network)
            for index, stage in enumerate(plan.stages)
            if progress.rank in stage.devices
        }
        clock = self.all_ranks.clock
        self._executor = Executor(
            *(self._program, runners, channels, specs, progress, clock, options.blocking),
            receives_first=True,
            traced=options.trace,
            exchange=lambda step: network.ask(StateAction(step.action.stage, step.action.kind, step.action.part)),
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
                f"{self._num_ranks} processes on {os.cpu_count()} cores take {bare} for a step without any computing, "
                f"and a step with the plan's times ends {late} late: all are stretched {found:g} times (--stretch)"
            )
        return found

    def _over(self, factor: float) -> float:
        """How much longer steps take than they should when times are stretched by this, in predicted steps."""
        if self._progress.rank == 0 and (wait_s := _TRIALS * factor * self._tried_ns / 1e9) >= 1:
            tell(
                f"timing {_TRIALS} steps, to see how near the plan's times this machine comes: about {wait_s:.0f} s "
                f"(--stretch {factor:.3g} skips that)"
            )
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
    """[program] ns between the end of its last action and of all that follows, as predicted."""
    tail = tail_at(plan.workload, plan.starts_ns, plan.loop)
    return [after - acted for after, acted in zip(tail.ended_ns, tail.acted_ns, strict=True)]
