"""In which order an executor posts what stands in its program between two actions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from builders.loops import looped_plans
from builders.shapes import shape_workload
from pipeplan.runtime.emulation.devices import specs_of
from pipeplan.runtime.executor.interpreter import Executor
from pipeplan.runtime.executor.message_graph import hops_of
from pipeplan.runtime.executor.rank_program import Program, ProgramStep, planned_programs
from pipeplan.runtime.executor.stage import MiniBatch
from pipeplan.runtime.executor.tensors import Produced, Received, TensorSpec
from pipeplan.runtime.launch.status import Progress
from pipeplan.runtime.parallel.device import Clock
from runtime_support.threads import CPU, board_of_one


class RecordedChannels:
    """Notes the counter of everything it is asked to do; what is taken is there."""

    def __init__(self, program: Program, specs: dict[str, TensorSpec]) -> None:
        self._program, self._specs = program, specs
        self.posted: list[int] = []

    def send(self, step: ProgramStep, tensors: Sequence[Tensor], made: object) -> None:
        self.posted.append(step.counter)

    def receive(self, step: ProgramStep) -> None:
        self.posted.append(step.counter)

    def take(self, step: ProgramStep) -> list[Tensor]:
        names = self._program.keys(step.message)
        return [torch.zeros(self._specs[name].of(len(step.samples[0])), dtype=torch.int64) for name in names]

    def deliver(self, step: ProgramStep) -> None: ...

    def moment(self) -> None: ...

    def unfinished(self) -> list[int]:
        return []


class RecordedStage:
    """Makes what it has to, and notes itself among the transfers."""

    idle = True

    def __init__(self, channels: RecordedChannels) -> None:
        self._channels = channels

    def run(self, step: ProgramStep, inputs: Received, samples: MiniBatch) -> Produced:
        channels = self._channels
        channels.posted.append(step.counter)
        made: dict[tuple[int, ...], dict[object, Tensor]] = {}
        for message, own in step.gives:
            for name in channels._program.keys(message, made=True):
                made.setdefault(own, {})[name] = torch.zeros(channels._specs[name].of(len(own)), dtype=torch.int64)
        return made


@pytest.mark.parametrize("repeated", [False, True], ids=["written out", "as a loop"])
@pytest.mark.parametrize(("first", "blocking"), [(True, False), (False, False), (True, True)])
def test_receives_are_posted_before_the_sends_next_to_them(repeated: bool, first: bool, blocking: bool) -> None:
    """Where that is asked for and none waits; else all is posted as the program says."""
    plan = looped_plans(shape_workload("v", 4), 12, 60)["1f1b"]
    plan = plan if repeated else plan.unrolled()
    programs = planned_programs(plan)
    specs = specs_of(programs, hops_of(plan), 1024)
    moved = 0
    for program in programs:
        assert (program.loop is not None) == repeated
        channels = RecordedChannels(program, specs)
        runners = dict.fromkeys(program.stages, RecordedStage(channels))
        progress = Progress(board_of_one(), 0)
        executor = Executor(
            program, runners, channels, specs, progress, Clock(CPU), blocking=blocking, receives_first=first
        )
        executor.run({})
        expected: list[int] = []
        texts = list(enumerate(program.texts))
        for is_compute, run in itertools.groupby(texts, lambda each: each[1][1:5] not in ("SEND", "RECV")):
            counters = list(run)
            if not is_compute and first and not blocking:
                counters.sort(key=lambda each: each[1][1:5] == "SEND")
            expected += [counter for counter, _ in counters]
        moved += expected != sorted(expected)
        assert channels.posted == expected
    assert bool(moved) == (first and not blocking)
