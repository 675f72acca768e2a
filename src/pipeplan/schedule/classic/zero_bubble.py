"""Automatic zero-bubble schedules of chains with one stage per device (Qi et al., Zero Bubble, ICLR'24)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

from pipeplan.schedule.classic.base import Orders, makespan
from pipeplan.schedule.classic.ruled import by_rules
from pipeplan.schedule.list_scheduling import in_flight_limits, list_schedule, policies
from pipeplan.workload.memory import fits
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import TaskGraph

__all__ = ["automatic"]


def automatic(depth: int | None) -> Callable[[OneMicrobatch, TaskGraph], Orders]:
    """The automatic schedules (section 3): by true costs, the best of the rules' settings within the memory.

    The handcrafted schedules that fit are tried too, so that the automatic ones are never longer.

    ``depth`` times as many micro-batches' activations as there are devices are kept at most (ZB-1p, ZB-2p), even
    where the devices have more memory; None takes what they have. Forwards run ahead of the next device's by none, one
    or two at least.
    """

    def orders(problem: OneMicrobatch, graph: TaskGraph) -> Orders:
        bounded = problem if depth is None else replace(problem, capacity=_room(problem, depth))
        limits = [None, *(limit for limit in in_flight_limits(bounded) if len(set(limit)) == len(limit))]
        tried = islice(policies(limits[:3]), max(_LEAST_TRIED, _TASKS_TRIED // graph.num_tasks))
        found = [order for policy in tried if (order := list_schedule(bounded, policy)) is not None]
        return min([*found, *_handcrafted(problem, graph, depth)], key=lambda order: makespan(graph, order))

    return orders


def _handcrafted(problem: OneMicrobatch, graph: TaskGraph, depth: int | None) -> list[Orders]:
    """ZB-H2, which needs room for 2 D - 1 micro-batches, and ZB-H1 for D: those for which there is that much."""
    names = ["zb-h1"] if depth == 1 else ["zb-h2", "zb-h1"]
    written = [by_rules(name)(problem, graph) for name in names]
    return [orders for orders in written if depth is not None or fits(graph, orders)]


_TASKS_TRIED = 200_000
"""As many settings are tried as have so many actions together: all of them up to 5,000 actions ..."""

_LEAST_TRIED = 3
"""... and at least so many."""


def _room(problem: OneMicrobatch, depth: int) -> tuple[int | None, ...]:
    """[device] bytes of ``depth`` x D micro-batches, whatever the device has."""
    return tuple(
        sum(problem.acquire[x] for x in operations) * depth * problem.num_devices
        + max(problem.workspace[x] for x in operations)
        for operations in problem.on_device
    )
