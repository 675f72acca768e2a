"""What classic schedules are made of: where one applies, sort keys, and scripts of a device's actions.

A schedule is an order per device: task numbers ``operation * N + micro-batch``, as in
:mod:`pipeplan.workload.task_graph`. Classic schedules do not look at memory unless they say so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pipeplan.workload import task_graph as timing
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import TaskGraph, earliest_starts, task_graph, with_links
from pipeplan.workload.workload import Workload

__all__ = [
    "Classic",
    "Orders",
    "Script",
    "all_of",
    "as_given",
    "chains",
    "is_chain",
    "is_split",
    "makespan",
    "one_stage_each",
    "scripted",
    "sorted_by",
]

Orders = list[list[int]]


@dataclass(frozen=True, slots=True)
class Classic:
    """A classic schedule: where it applies, and its orders.

    ``applies`` returns None, or why the schedule has no meaning for a problem's placement. ``automatic`` ones try many
    orders and take their time.
    """

    applies: Callable[[OneMicrobatch], str | None]
    orders: Callable[[OneMicrobatch, TaskGraph], Orders]
    automatic: bool = False


def all_of(*conditions: Callable[[OneMicrobatch], str | None]) -> Callable[[OneMicrobatch], str | None]:
    """Applies where all conditions hold; else the first reason."""
    return lambda problem: next((reason for condition in conditions if (reason := condition(problem))), None)


def chains(problem: OneMicrobatch) -> list[list[int]]:
    """The stages in the order in which forwards follow each other, one list per first stage."""
    ends = [(d.source, d.target) for d in problem.workload.dependencies]
    following = {int(source[:-1]): int(target[:-1]) for source, target in ends if source[-1] == target[-1] == "F"}
    found = []
    for first in sorted(set(range(len(problem.workload.stages))) - set(following.values())):
        chain = [first]
        while chain[-1] in following:
            chain.append(following[chain[-1]])
        found.append(chain)
    return found


def is_chain(
    devices_of: Callable[[int, int], list[int]], what: str, *, chunks: str
) -> Callable[[OneMicrobatch], str | None]:
    """A chain of single-device stages on ``devices_of(num_devices, chunks)``, with ``chunks`` per device.

    ``chunks`` is ``one``, ``two``, ``several`` (two or more) or ``even``.
    """
    allowed = {
        "one": lambda c: c == 1,
        "two": lambda c: c == 2,
        "several": lambda c: c > 1,
        "even": lambda c: c % 2 == 0,
    }

    def applies(problem: OneMicrobatch) -> str | None:
        groups = [stage.devices for stage in problem.workload.stages]
        per_device = len(groups) // problem.num_devices
        expected = [(device,) for device in devices_of(problem.num_devices, per_device)]
        if not allowed[chunks](per_device) or groups != expected:
            return f"it needs {what}"
        return None if chains(problem) == [list(range(len(groups)))] else "it needs a chain of stages"

    return applies


def is_split(problem: OneMicrobatch) -> str | None:
    """Input and weight gradients apart on every stage."""
    if all(len(operations) == 3 for operations in problem.stage_operations):
        return None
    return "it needs input and weight gradients apart (--split-backward)"


def one_stage_each(problem: OneMicrobatch) -> str | None:
    """No device has two stages; micro-batches may have different sizes."""
    workload = problem.workload if problem.reduction is None else problem.reduction.workload
    devices = [device for stage in workload.stages for device in stage.devices]
    return None if len(set(devices)) == len(devices) else "it needs one stage per device"


def as_given(make: Callable[[Workload, TaskGraph], timing.Orders]) -> Callable[[OneMicrobatch, TaskGraph], Orders]:
    """Orders that are made for a workload as it is, with micro-batches of any sizes."""

    def orders(problem: OneMicrobatch, graph: TaskGraph) -> Orders:
        if problem.reduction is None or problem.reduction.workload.is_uniform:
            return [list(order) for order in make(problem.workload, graph)]
        workload = problem.reduction.workload
        return problem.reduction.to_reduced(make(workload, task_graph(workload)))

    return orders


def sorted_by(problem: OneMicrobatch, key: Callable[[int, int], tuple[int, ...]]) -> Orders:
    """Every device's actions by key(operation, micro-batch)."""
    count = problem.num_microbatches
    return [
        [x * count + m for x, m in sorted(((x, m) for x in operations for m in range(count)), key=lambda xm: key(*xm))]
        for operations in problem.on_device[: problem.num_devices]
    ]


class Script:
    """A device's actions, written as words: ``F0`` is the next forward of its first chunk, ``F1`` of its second.

    ``B0`` is the whole backward, W right behind I where they are apart; ``I0`` its input gradient (or the whole
    backward), ``W0`` the weight gradient of the chunk's oldest micro-batch that still owes one, ``W`` that of the
    oldest of all chunks. A word with nothing left to do is passed over, so that schedules need no ends.
    """

    def __init__(self, problem: OneMicrobatch, device: int) -> None:
        self._count = problem.num_microbatches
        self._chunks = [
            operations
            for stage, operations in zip(problem.workload.stages, problem.stage_operations, strict=True)
            if stage.devices == (device,)
        ]
        self._next = {(kind, chunk): 0 for kind in "FI" for chunk in range(len(self._chunks))}
        self._owed: deque[tuple[int, int]] = deque()  # (chunk, micro-batch) with an input but no weight gradient
        self.order: list[int] = []

    @property
    def num_chunks(self) -> int:
        """Stages of the device."""
        return len(self._chunks)

    def add(self, words: str, times: int = 1) -> Script:
        """Append the words, in order, so many times."""
        for _ in range(times):
            for word in words.split():
                self._word(word[0], int(word[1:]) if len(word) > 1 else None)
        return self

    def finish(self) -> list[int]:
        """The order, with the weight gradients that are left behind it."""
        return self.add("W", self._count * self.num_chunks).order

    def _word(self, kind: str, chunk: int | None) -> None:
        if kind == "W":
            self._weight(chunk)
            return
        assert chunk is not None
        m = self._next["F" if kind == "F" else "I", chunk]
        if m == self._count:
            return
        self._next["F" if kind == "F" else "I", chunk] = m + 1
        operations = self._chunks[chunk]
        self.order.append(operations[0 if kind == "F" else 1] * self._count + m)
        if kind == "B":
            self.order += [x * self._count + m for x in operations[2:]]
        elif kind == "I" and len(operations) > 2:
            self._owed.append((chunk, m))

    def _weight(self, chunk: int | None) -> None:
        owed = next((entry for entry in self._owed if chunk is None or entry[0] == chunk), None)
        if owed is not None:
            self._owed.remove(owed)
            self.order.append(self._chunks[owed[0]][2] * self._count + owed[1])


def scripted(write: Callable[[Script, int, OneMicrobatch], object]) -> Callable[[OneMicrobatch, TaskGraph], Orders]:
    """Orders from what ``write(script, device, problem)`` adds to each device's script."""

    def orders(problem: OneMicrobatch, graph: TaskGraph) -> Orders:
        scripts = [Script(problem, device) for device in range(problem.num_devices)]
        for device, script in enumerate(scripts):
            write(script, device, problem)
        return [script.finish() for script in scripts]

    return orders


def makespan(graph: TaskGraph, orders: Orders) -> int:
    """Length of the orders in ns when every action starts as soon as it can."""
    return max(map(sum, zip(earliest_starts(graph, with_links(graph, orders)), graph.durations, strict=True)))
