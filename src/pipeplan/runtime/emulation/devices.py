"""A device that only waits: its time, stages whose actions sleep, and messages that say when they arrive."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
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

from pipeplan.files import Plan
from pipeplan.runtime.executor.channels import Channels
from pipeplan.runtime.executor.message_graph import Hops, Message, Numbers, TensorKey
from pipeplan.runtime.executor.process_groups import (
    RankGroup,
)
from pipeplan.runtime.executor.rank_program import Program, ProgramStep
from pipeplan.runtime.executor.stage import MiniBatch
from pipeplan.runtime.executor.tensors import Produced, Received, TensorSpec
from pipeplan.workload.elements import Hop
from pipeplan.workload.program_network import ProgramNetwork

_CPU = torch.device("cpu")
_WORD_BYTES = 8
_LEAST_BYTES = 1024
"""Of a message whose bytes the plan does not know."""

_AT, _LATE = 0, 1
"""Words of a row: when it was made or has arrived, and how late its sender was when it was sent."""

_PR_SET_TIMERSLACK = 29
_COUNTS_BYTES = 64
"""Three numbers of a thread: ns that it ran, ns that it waited for a core, and how often it ran."""


_LONGEST_SLEEP_NS = 1 << 62
"""146 years: a system counts what a process sleeps in 64 bits."""


class Pace:
    """A device's time, in which its actions follow each other at once.

    As an accelerator's host does, its process interprets and posts messages while the device works, and is late only
    where that takes longer than the action. Sleeps that end late, and waits for one of too few cores, are this
    machine's doing: its own, its senders', and those of the threads that bring it messages. Other ranks that are late
    for messages count. ``offset_ns`` is how far the host's clock is ahead;
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
            time.sleep(min(left_ns, _LONGEST_SLEEP_NS) / 1e9)
        self._free_ns = end_ns


class Queued:
    """How long the threads that a process has now wait for one of the cores while they could run; Linux counts it."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        if sys.platform == "linux":
            for thread in os.listdir("/proc/self/task"):
                with contextlib.suppress(OSError):  # it has ended, or this kernel does not count
                    self._counts.append(os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY))

    def ns(self) -> list[int]:
        """Time of each thread so far, in ns; 0 if it has ended."""
        return [self._waited_ns(count) for count in self._counts]

    def close(self) -> None:
        """Close the system's counts."""
        while self._counts:
            os.close(self._counts.pop())

    def _waited_ns(self, count: int) -> int:
        with contextlib.suppress(OSError):
            return int(os.pread(count, _COUNTS_BYTES, 0).split()[1])
        return 0


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
        exchanged = 0 if step.part else self.network.exchange(step.action)
        start_ns = self.group.latest(max([self.pace.free_ns(), *needed, exchanged]))
        # an action that waited inside is from then on as far as if it had begun that much later
        self.network.begin(step.action, start_ns - self.pace.stretched(_begin_ns(self.plan, step)))
        end_ns = start_ns + self.pace.stretched(_duration_ns(self.plan, step))
        made = self._made(step, end_ns)
        self.pace.until(end_ns)
        return made

    def _made(self, step: ProgramStep, at_ns: int) -> Produced:
        found: dict[Numbers, dict[TensorKey, Tensor]] = defaultdict(dict)
        for message, own in step.gives:
            for name in self.tensors[message]:
                found[own][name] = _stamped(self.specs[name].of(len(own)), at_ns)
        return found


def _begin_ns(plan: Plan, step: ProgramStep) -> int:
    """When a part begins, in ns since its action does without waiting inside."""
    return plan.operation(step.action.operation).begin_ns(step.part) if step.part else 0


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
        self._queued = Queued()

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
        begin, blocked, queued = self._pace.now(), _blocks(), self._queued.ns()
        (rows,) = super().take(step)
        if _blocks() > blocked:  # else it was there
            more = sum(max(0, now - then) for now, then in zip(self._queued.ns(), queued, strict=True))
            self._pace.waited(begin, int(rows.numpy()[:, _LATE].max()) + more)
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

    def close(self) -> None:
        """Let go of the system's counts, too."""
        super().close()
        self._queued.close()

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
