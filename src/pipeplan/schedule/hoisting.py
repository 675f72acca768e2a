"""Schedules with the outermost blocks of all devices hoisted: all of the first before the rest, all of the last after.

What every device runs together, before all or after all else of a micro-batch, and what holds no memory, may as well
run for all micro-batches at once: no schedule becomes longer by that, where messages take no time
(:mod:`pipeplan.workload.shared_time`). What is left is a pipeline alone, of which good schedules are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipeplan.schedule.state import ScheduleStep, SearchState, origin_of
from pipeplan.search_constants import HOISTED_SHARE
from pipeplan.workload.bounds import strong_iteration_bound
from pipeplan.workload.elements import Device
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import task_graph


class Outermost(NamedTuple):
    """Operations that may be hoisted to the start, and to the end, and the others; in the order of dependencies."""

    first: list[int]
    last: list[int]
    inner: list[int]

    @classmethod
    def of(cls, problem: OneMicrobatch) -> Outermost | None:
        """None where there are none, or nothing else."""
        workload = problem.workload
        used = {device for devices in problem.devices[: len(workload.operations)] for device in devices}

        def outer(order: Sequence[int], before: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
            found: list[int] = []
            for x in order:
                free = problem.acquire[x] == problem.release[x] == problem.workspace[x] == 0
                if free and set(problem.devices[x]) == used and all(y in found for y, _ in before[x]):
                    found.append(x)
            return found

        first, last = outer(problem.order, problem.incoming), outer(problem.order[::-1], problem.outgoing)[::-1]
        inner = [x for x in range(len(workload.operations)) if x not in first and x not in last]
        apart = {workload.operations[x].stage for x in (*first, *last)}
        if any(workload.operations[x].stage in apart for x in inner):  # schedules are of whole stages
            return None
        return cls(first, last, inner) if inner and (first or last) and len(used) > 1 else None

    def without(self, problem: OneMicrobatch) -> OneMicrobatch:
        """What is left of a problem, and of its stages."""
        workload = problem.workload
        operations = [workload.operations[x] for x in self.inner]
        stages = sorted({each.stage for each in operations})
        number = {stage: index for index, stage in enumerate(stages)}
        moved = [replace(each, stage=number[each.stage]) for each in operations]
        names = {each.id: now.id for each, now in zip(operations, moved, strict=True)}
        left = replace(
            workload,
            stages=tuple(workload.stages[stage] for stage in stages),
            operations=tuple(moved),
            dependencies=tuple(
                replace(each, source=names[each.source], target=names[each.target])
                for each in workload.dependencies
                if each.source in names and each.target in names
            ),
            tied=(),
        )
        rooms = problem.capacity[: problem.num_devices]
        own = [room if room is None else room + left.static_bytes(device) for device, room in enumerate(rooms)]
        left = replace(left, devices=tuple(Device(memory_bytes=memory) for memory in own))
        return OneMicrobatch(left, (*rooms, *[None] * (left.num_resources - len(rooms))))

    def around(self, orders: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """[device] orders of what is left as those of everything."""
        first = [x * count + m for x in self.first for m in range(count)]
        last = [x * count + m for x in self.last for m in range(count)]
        return [
            [*first, *(self.inner[task // count] * count + task % count for task in order), *last] if order else []
            for order in orders
        ]


@dataclass(frozen=True)
class Hoisted(ScheduleStep):
    """The outermost blocks of all devices all at once, and the best that ``steps`` find of what is left between."""

    steps: tuple[ScheduleStep, ...] = ()
    share: float = HOISTED_SHARE
    name = "hoisted blocks"
    when = "auto; nothing proved best; blocks on all devices are first or last and hold nothing; the span is open"

    def applies(self, state: SearchState) -> bool:
        known = state.scheduler == "auto" and state.max_span is None and not state.finished
        return known and not state.problem.workload.needs and Outermost.of(state.problem) is not None

    def run(self, state: SearchState) -> None:
        outermost = Outermost.of(state.problem)
        assert outermost is not None
        problem = outermost.without(state.problem)
        graph = task_graph(problem.workload)
        with state.budget.share(state.budget.seconds * self.share) as budget:
            inner = SearchState(problem, graph, budget, None, strong_iteration_bound(problem))
            for step in self.steps:
                if not budget.expired and (inner.best is None or not inner.proved) and step.applies(inner):
                    step.run(inner)
        if inner.best is not None:
            orders = outermost.around(inner.best.orders[: problem.num_devices], problem.num_microbatches)
            state.offer(state.candidate(orders, f"{origin_of(inner.best.scheduler)}+hoisted"))
