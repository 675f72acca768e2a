"""When actions start if every device runs its list in order and each action starts as soon as it can.

The actions of a workload are numbered: micro-batch m of operation o is ``offsets[o] + m``. An *order* is, for
each device, the numbers of its compute actions in the order they run; an action of several devices stands in
each of their lists and starts on all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.errors import InvalidPlanError
from pipeplan.model.plan import Plan
from pipeplan.model.workload import Workload

__all__ = ["Orders", "TaskGraph", "earliest_starts", "orders_of", "task_graph"]

Orders = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """All actions of a workload as numbered tasks.

    ``offsets`` has one entry per operation and the total behind them. ``durations`` [task] in ns; ``devices``
    [task]; ``successors`` [task] has pairs (task, lag in ns); ``num_predecessors`` [task].
    """

    workload: Workload
    offsets: list[int]
    operation_of: list[int]
    durations: list[int]
    successors: list[list[tuple[int, int]]]
    num_predecessors: list[int]

    @property
    def num_tasks(self) -> int:
        """Number of actions."""
        return self.offsets[-1]

    def microbatch_size(self, operation: int) -> int:
        """Samples in one micro-batch of an operation, by its index."""
        return self.workload.stages[self.workload.operations[operation].stage].microbatch_size

    def devices_of(self, task: int) -> tuple[int, ...]:
        """The devices a task runs on."""
        return self.workload.stages[self.workload.operations[self.operation_of[task]].stage].devices

    def label(self, task: int) -> str:
        """The task as an action's text: ``2F0``."""
        operation = self.operation_of[task]
        return f"{self.workload.operations[operation].id}{task - self.offsets[operation]}"


def task_graph(workload: Workload) -> TaskGraph:
    """Number the actions of a workload and join them by its dependencies."""
    offsets = [0]
    operation_of: list[int] = []
    durations: list[int] = []
    for index, operation in enumerate(workload.operations):
        count = workload.num_instances(operation)
        offsets.append(offsets[-1] + count)
        operation_of += [index] * count
        durations += [operation.duration_ns] * count
    successors: list[list[tuple[int, int]]] = [[] for _ in durations]
    num_predecessors = [0] * len(durations)
    position = {operation.id: index for index, operation in enumerate(workload.operations)}
    for dependency in workload.dependencies:
        source, target = position[dependency.source], position[dependency.target]
        size = workload.stages[workload.operations[target].stage].microbatch_size
        source_size = workload.stages[workload.operations[source].stage].microbatch_size
        lag, base, source_base = dependency.lag_ns, offsets[target], offsets[source]
        for m in range(offsets[target + 1] - base):
            for n in range(m * size // source_size, -(-(m + 1) * size // source_size)):
                successors[source_base + n].append((base + m, lag))
                num_predecessors[base + m] += 1
    return TaskGraph(workload, offsets, operation_of, durations, successors, num_predecessors)


def earliest_starts(graph: TaskGraph, orders: Orders) -> list[int]:
    """Start of every task in ns, when devices run ``orders`` and nothing waits longer than it must.

    Cost is linear in tasks and dependencies.

    Raises:
        InvalidPlanError: the orders and the dependencies wait for each other; the text names stuck actions.
    """
    durations, successors = graph.durations, graph.successors
    waiting = graph.num_predecessors.copy()
    following: list[list[int]] = [[] for _ in durations]
    for order in orders:
        for before, after in zip(order, order[1:], strict=False):
            following[before].append(after)
            waiting[after] += 1
    starts = [0] * len(durations)
    ready = [task for task, count in enumerate(waiting) if count == 0]
    done = 0
    while ready:
        task = ready.pop()
        done += 1
        end = starts[task] + durations[task]
        for other in following[task]:
            if starts[other] < end:
                starts[other] = end
            waiting[other] -= 1
            if waiting[other] == 0:
                ready.append(other)
        for other, lag in successors[task]:
            if starts[other] < end + lag:
                starts[other] = end + lag
            waiting[other] -= 1
            if waiting[other] == 0:
                ready.append(other)
    if done < len(durations):
        stuck = [graph.label(task) for task, count in enumerate(waiting) if count > 0]
        raise InvalidPlanError(
            f"{len(stuck)} actions wait for each other and can never start, among them {', '.join(stuck[:5])}"
        )
    return starts


def orders_of(plan: Plan, graph: TaskGraph) -> list[list[int]]:
    """The compute actions of each device's program, as task numbers of the plan's own graph."""
    position = {operation.id: index for index, operation in enumerate(plan.operations)}
    orders: list[list[int]] = []
    for program in plan.programs:
        order = []
        for text in program:
            if "_" in text:  # a transfer: SEND_F, RECV_B, ...
                continue
            kind_at = next(index for index, letter in enumerate(text) if letter.isalpha())
            order.append(graph.offsets[position[text[: kind_at + 1]]] + int(text[kind_at + 1 :]))
        orders.append(order)
    return orders
