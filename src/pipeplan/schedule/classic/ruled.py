"""Classic schedules that are rules files of the catalog (:mod:`pipeplan.schedule.rules`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from pipeplan.schedule.classic.base import Orders, makespan
from pipeplan.schedule.rules.engine import schedule_by_rules
from pipeplan.schedule.rules.files import named_rules
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import TaskGraph, task_graph
from pipeplan.workload.workload import Workload

__all__ = ["by_rules", "by_rules_in_units"]


def by_rules(name: str) -> Callable[[OneMicrobatch, TaskGraph], Orders]:
    """The orders by the catalog's rules ``name``; on unit steps they are remembered, as costs do not matter there."""

    def orders(problem: OneMicrobatch, graph: TaskGraph) -> Orders:
        rules = named_rules(name)
        if rules.time == "true":
            return schedule_by_rules(graph, rules)
        key = name, _structure(graph.workload)
        if key not in _remembered:
            _remembered[key] = schedule_by_rules(graph, rules)
        _remembered.move_to_end(key)
        found = _remembered[key]
        while len(_remembered) > 1 and sum(map(_size, _remembered.values())) > _MOST_REMEMBERED:
            _remembered.popitem(last=False)
        return [list(order) for order in found]

    return orders


def by_rules_in_units(name: str) -> Callable[[OneMicrobatch, TaskGraph], Orders]:
    """Units of D micro-batches one after another, each by the rules alone; or all at once, where that is shorter."""

    def orders(problem: OneMicrobatch, graph: TaskGraph) -> Orders:
        sizes = {min(problem.num_devices, problem.num_microbatches), problem.num_microbatches}
        return min((_in_units(problem, name, size) for size in sorted(sizes)), key=lambda found: makespan(graph, found))

    return orders


def _in_units(problem: OneMicrobatch, name: str, size: int) -> Orders:
    """Units of ``size`` micro-batches, the last one cut."""
    count = problem.num_microbatches
    unit = schedule_by_rules(task_graph(problem.workload.with_microbatches(size)), named_rules(name))
    return [
        [
            task // size * count + base + task % size
            for base in range(0, count, size)
            for task in order
            if base + task % size < count
        ]
        for order in unit
    ]


_remembered: OrderedDict[Hashable, Orders] = OrderedDict()
"""{(name, structure): orders}, those that were asked for last behind the others."""

_MOST_REMEMBERED = 200_000
"""Actions of all orders that are remembered; about 8 MB."""


def _size(orders: Orders) -> int:
    return sum(map(len, orders))


def _structure(workload: Workload) -> Hashable:
    """All of a workload that rules on unit steps look at."""
    return (
        workload.num_microbatches,
        len(workload.devices),
        workload.num_routes,
        tuple((stage.devices, stage.route, stage.microbatch_size, stage.num_parted) for stage in workload.stages),
        tuple((operation.kind, operation.stage) for operation in workload.operations),
        tuple((source, target) for source, target, _ in workload.edges),
        tuple((transfer.source, transfer.target, transfer.link) for transfer in workload.transfers),
    )
