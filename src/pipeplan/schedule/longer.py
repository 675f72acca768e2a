"""Very long runs: a shorter run is scheduled, and a round in its middle is repeated as often as needed.

What is searched, written and checked so does not grow with the number of micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.errors import InvalidPlanError
from pipeplan.schedule.state import Schedule, SearchStep
from pipeplan.search_constants import (
    LOOPED_MORE,
    MAX_WRITTEN,
    SHORTER_MOST,
    SHORTER_TASKS,
    SHORTER_UNROLL,
    SHORTER_UNROLLS,
    SHORTEST_ROUNDS,
)
from pipeplan.time_limit import checked
from pipeplan.workload.engine import with_links
from pipeplan.workload.exchanges import microbatches_alike
from pipeplan.workload.kinds import Role
from pipeplan.workload.memory import fits
from pipeplan.workload.one_microbatch import OneMicrobatch, microbatches_per_round, num_working
from pipeplan.workload.steady_state.loop import LoopedOrders, counts_of, looped
from pipeplan.workload.steady_state.pace import paced_run, phases_of
from pipeplan.workload.steady_state.rate import CutOrders
from pipeplan.workload.steady_state.repetend import repeating_part, repeating_phases
from pipeplan.workload.task_graph import Orders, TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload


@dataclass(frozen=True)
class ShorterRun(SearchStep):
    """A very long run: a shorter one is searched, and a round of what was found there runs more often.

    Runs of more than ``most`` actions are planned about ``tasks`` actions long, but with two micro-batches per device,
    and with fewer micro-batches by a multiple of ``unrolls`` and of the devices: rounds of 1, 2, 3, 4 and 6
    micro-batches then come out at the whole number, and schedules for multiples of the devices stay such. Repeated are
    rounds of at most ``most_unroll`` micro-batches.
    """

    most: int = SHORTER_MOST
    tasks: int = SHORTER_TASKS
    unrolls: int = SHORTER_UNROLLS
    most_unroll: int = SHORTER_UNROLL
    name = "shorter run, repeated"
    when = "more than {most} actions, and twice as many as in the shorter run"
    needed = True

    def shorter(self, workload: Workload) -> Workload | None:
        """The shorter run, of whole rounds of all stages; None where the workload is not so long."""
        whole = OneMicrobatch.of(workload, require_room=False)
        actions = sum(map(len, workload.slots))
        alike = microbatches_alike(workload)
        if actions <= self.most or counts_of(workload, alike * whole.microbatches_per_round) is None:
            return None
        rounds, step = whole.num_microbatches, math.lcm(self.unrolls, alike)
        if rounds >= 2 * whole.num_devices * self.unrolls:
            step = math.lcm(step, whole.num_devices)
        fewer = max(self.tasks // whole.num_operations, 2 * whole.num_devices)
        fewer += (rounds - fewer) % step
        if 2 * fewer > rounds:
            return None
        return workload.with_microbatches(fewer * whole.microbatches_per_round)

    def shortest(self, workload: Workload) -> Workload:
        """The shortest run in which one micro-batch after another shows what repeats."""
        return workload.with_microbatches(SHORTEST_ROUNDS * microbatches_per_round(workload))

    def actions(self, workload: Workload) -> int:
        """How many actions are scheduled for it."""
        return sum(map(len, (self.shorter(workload) or workload).slots))

    def lengthened(self, found: Schedule, workload: Workload, most_written: int = MAX_WRITTEN) -> Schedule | None:
        """A schedule of the shorter run as one of the whole workload; None if no round of it can be repeated."""
        run = self.repeated(found.graph, found.orders, workload.num_microbatches, most_written)
        if run is None or not fits(run.graph, run.orders, run.loop):
            return None
        return found.running(run, workload)

    def repeating(
        self, found: Schedule, workload: Workload, most_written: int = MAX_WRITTEN, *, grouped: bool = True
    ) -> Schedule | None:
        """A schedule of a shorter run as one of the whole workload: a part that repeats, or all of it, is repeated.

        Of so few micro-batches that no device has two of each in a pipeline, no part is looked for. Unless ``grouped``,
        all of it is repeated only then: where a part was looked for and none repeats, there is None.
        """
        rounds = found.graph.workload.num_microbatches // microbatches_per_round(workload)
        steady = rounds >= 2 * num_working(workload)
        steady |= phases_of(found.graph, found.orders) is not None
        longer = self.lengthened(found, workload, most_written) if steady else None
        return longer or (self.in_groups(found, workload) if grouped or not steady else None)

    def in_groups(self, found: Schedule, workload: Workload) -> Schedule | None:
        """The shorter run again and again: each device begins the next group of micro-batches after the one before.

        Whether a part of the run repeats does not matter, and no more is held than in the run itself. What is left of
        the micro-batches is a smaller group, and comes first. None where micro-batches do not begin anew together.
        """
        graph, group = found.graph, found.graph.workload.num_microbatches
        rest = workload.num_microbatches % group
        begins, counts = (counts_of(workload, number) for number in (rest, group))
        if begins is None or counts is None or workload.num_microbatches < group:
            return None
        larger = task_graph(workload.with_microbatches(rest + group))
        orders = []
        for order in checked(graph.on_devices(found.orders), 4):
            entries = [(item, task - graph.offsets[item]) for task in order for item in (graph.operation_of[task],)]
            first = [larger.offsets[item] + number for item, number in entries if number < begins[item]]
            orders.append([*first, *(larger.offsets[item] + begins[item] + number for item, number in entries)])
        run = looped(larger, orders, begins, group, workload.num_microbatches, LOOPED_MORE * larger.num_tasks)
        if run is None or not fits(run.graph, run.orders, run.loop):
            return None
        return found.running(run, workload, "+groups")

    def repeated(
        self, given: TaskGraph, orders: Orders, num_microbatches: int, most_written: int = MAX_WRITTEN
    ) -> LoopedOrders | None:
        """Orders of the shorter run for more micro-batches, whether they fit or not; None if no round repeats.

        Where all forwards run before all backwards, they repeat apart, in two rounds, and of one stage per device at
        the pace of the slowest (:mod:`~pipeplan.workload.steady_state.pace`). What links carry goes first come, first
        served. Times are to repeat within ``most_written`` actions.
        """
        in_phases = phases_of(given, orders)
        if in_phases is not None:
            return paced_run(given.workload.with_microbatches(num_microbatches), in_phases, most_written)
        problem = OneMicrobatch.of(given.workload, require_room=False)
        devices = given.on_devices(orders)
        own = devices if problem.reduction is None else problem.reduction.to_reduced(devices)
        graph = given if problem.reduction is None else task_graph(problem.workload)
        try:
            complete = with_links(graph, own)
            starts = earliest_starts(graph, complete)
            found = repeating_part(graph, complete, starts, self.most_unroll, most_written)
            rounds: list[int] | None = None
            if found is not None:
                first, unroll = found
                begins = CutOrders.of(problem.workload, complete, first, unroll).begins
            else:
                phases = [int(operation.role is not Role.FORWARD) for operation in graph.workload.operations]
                parts = repeating_phases(graph, complete, starts, phases, self.most_unroll)
                if parts is None:
                    return None
                begins, unroll = parts
                rounds = [int(operation.role is not Role.FORWARD) for operation in given.workload.operations]
            microbatches = unroll * problem.microbatches_per_round
            microbatches = math.lcm(microbatches, microbatches_alike(given.workload))
            begins = _begins(problem, begins)
            return looped(given, devices, begins, microbatches, num_microbatches, most_written, rounds)
        except InvalidPlanError:
            return None


def _begins(problem: OneMicrobatch, begins: Sequence[int]) -> list[int]:
    """[operation of the workload] what is before a cut, of what is before it of the problem's."""
    if problem.reduction is None:
        return list(begins)
    firsts = problem.reduction.firsts
    return [sum(begins[first:after]) for first, after in zip(firsts, firsts[1:], strict=False)]
