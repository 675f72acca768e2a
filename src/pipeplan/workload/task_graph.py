"""When actions start if every device runs its list in order and each action starts as soon as it can.

The actions of a workload are numbered: micro-batch m of operation o is ``offsets[o] + m``. An *order* is, for
each device, the numbers of its compute actions in the order they run; an action of several devices stands in
each of their lists and starts on all of them together.

Messages that may have to wait for their link are tasks, too, numbered after the actions. The lists of the links, in
the order in which they carry their messages, come after those of the devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import add

from pipeplan.errors import InvalidPlanError
from pipeplan.graphs import in_circle, short_cycle
from pipeplan.time_limit import checked, checkpoint
from pipeplan.workload.exchanges import networks_of
from pipeplan.workload.tail import NOTHING, ExchangeEnds, best_tail, exchanged_by
from pipeplan.workload.workload import Workload

Orders = Sequence[Sequence[int]]

NEVER = 2**62
"""More than any time in ns, or any number of samples."""


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """All actions of a workload as numbered tasks, and after them the messages that may have to wait for a link.

    ``offsets`` has one entry per operation and transfer (:attr:`~pipeplan.workload.workload.Workload.transfers`), and
    the total after them; ``operation_of`` [task] is the number of that operation or transfer. ``durations`` [task] in
    ns; ``successors`` [task] has pairs (task, lag in ns); ``num_predecessors`` [task].
    """

    workload: Workload
    offsets: list[int]
    operation_of: list[int]
    durations: list[int]
    successors: list[list[tuple[int, int]]]
    num_predecessors: list[int]

    @property
    def num_tasks(self) -> int:
        """Number of actions, and of messages that may have to wait."""
        return self.offsets[-1]

    @property
    def num_actions(self) -> int:
        """Number of compute actions: the tasks below it."""
        return self.offsets[len(self.workload.operations)]

    def devices_of(self, task: int) -> tuple[int, ...]:
        """The devices a task runs on; for a message its link's number after the devices."""
        return self.workload.resources[self.operation_of[task]]

    def label(self, task: int) -> str:
        """The task as an action's text: ``2F0``."""
        operation = self.operation_of[task]
        return self.workload.label(operation, task - self.offsets[operation])

    def microbatch_text(self, task: int) -> str:
        """The end of an action's text: its micro-batch, and its part where it has one: ``3``, ``0.1``."""
        operation = self.operation_of[task]
        return self.workload.slots[operation].text(task - self.offsets[operation])

    def on_devices(self, orders: Orders) -> Orders:
        """Only the orders of the devices, without those of links."""
        return orders[: len(self.workload.devices)]

    def makespan(self, starts: Sequence[int]) -> int:
        """When the last action ends, in ns."""
        return max(map(add, starts, self.durations), default=0)

    def last_ends(self, starts: Sequence[int], later_ns: int = 0) -> list[int]:
        """[operation] ns at which the last of its actions ends; a loop makes all of them ``later_ns`` later."""
        workload, found = self.workload, []
        for item in range(len(workload.operations)):
            begin, end = self.offsets[item : item + 2]
            whole = begin + 2 * workload.slots[item].num_parted
            last = max(starts[whole:end], default=-workload.durations[item]) + workload.durations[item]
            if whole > begin:
                last = max(last, max(starts[begin:whole]) + workload.part_durations[item])
            found.append(last + later_ns)
        return found

    def iteration(self, starts: Sequence[int], later_ns: int = 0) -> int:
        """When the iteration ends with the best order of sums that is found, in buckets or not (:mod:`.tail`), in ns.

        A loop makes all ``later_ns`` later.
        """
        if not self.workload.has_tail:
            return self.makespan(starts) + later_ns
        return best_tail(self.workload, self.last_ends(starts, later_ns), self.exchanged(starts, later_ns))[
            1
        ].iteration_ns

    def summed_best(self, starts: Sequence[int], later_ns: int = 0) -> TaskGraph:
        """The same, whose workload sums gradients as :meth:`iteration` has it: as a plan says it."""
        if not self.workload.has_tail:
            return self
        ends, exchanged = self.last_ends(starts, later_ns), self.exchanged(starts, later_ns)
        return replace(self, workload=best_tail(self.workload, ends, exchanged)[0])

    def exchanged(self, starts: Sequence[int], later_ns: int = 0) -> ExchangeEnds:
        """What networks exchange for actions."""
        return exchanged_by(self, starts, later_ns) if self.workload.exchanges else NOTHING


def task_graph(workload: Workload) -> TaskGraph:
    """Number the actions of a workload and join them by its dependencies."""
    counts = [len(slots) for slots in workload.slots]
    offsets = [0, *itertools.accumulate(counts)]
    operation_of: list[int] = []
    durations: list[int] = []
    items = zip(workload.slots, workload.durations, workload.part_durations, strict=True)
    for item, (slots, whole, part) in checked(enumerate(items), 16):
        operation_of += [item] * counts[item]
        durations += [part] * (2 * slots.num_parted) + [whole] * (len(slots) - 2 * slots.num_parted)
    successors: list[list[tuple[int, int]]] = [[] for _ in checked(durations, 65_536)]
    num_predecessors = [0] * len(durations)
    for source, target, lag in checked(workload.edges, 4):
        parts_end = offsets[source] + 2 * min(workload.slots[source].num_parted, workload.slots[target].num_parted)
        part_lag = workload.part_lags.get((source, target), lag)
        for task, before in _pairs(workload, offsets, source, target):
            successors[before].append((task, part_lag if before < parts_end else lag))
            num_predecessors[task] += 1
    for source, target, lag, later in workload.returns:
        for m in range(counts[target] - later):
            successors[offsets[source] + m].append((offsets[target] + m + later, lag))
            num_predecessors[offsets[target] + m + later] += 1
    return TaskGraph(workload, offsets, operation_of, durations, successors, num_predecessors)


def _pairs(workload: Workload, offsets: Sequence[int], source: int, target: int) -> Iterable[tuple[int, int]]:
    """(task of the target, task of the source) wherever the one waits for the other."""
    ours, theirs = range(offsets[target], offsets[target + 1]), range(offsets[source], offsets[source + 1])
    if workload.slots[target] == workload.slots[source] and (source, target) not in workload.needs:
        return zip(ours, theirs, strict=True)
    return ((task, theirs[number]) for m, task in enumerate(ours) for number in workload.inputs_of(source, target, m))


def earliest_starts(graph: TaskGraph, orders: Orders) -> list[int]:
    """Start of every task in ns, when devices and links run ``orders`` and nothing waits longer than it must.

    Cost is linear in tasks and dependencies. Links that may be busy need orders, too
    (:func:`~pipeplan.workload.engine.with_links`).

    Raises:
        InvalidPlanError: the orders and the dependencies wait for each other; the text names a shortest circle.
    """
    assert len(orders) == graph.workload.num_resources, "an order for each device and each link"
    durations, successors = graph.durations, graph.successors
    networks = networks_of(graph) if graph.workload.exchanges else []
    waiting = graph.num_predecessors.copy()
    following = _following(graph, orders, waiting)
    starts = [0] * len(durations)
    ready = [task for task, count in enumerate(waiting) if count == 0]
    done = 0
    while ready:
        task = ready.pop()
        done += 1
        if not done % 4096:
            checkpoint()
        if networks and task < graph.num_actions and (network := networks[graph.operation_of[task]]) is not None:
            starts[task] = network.start(task, starts[task])
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
        raise stuck_error(graph, orders, [task for task, count in enumerate(waiting) if count > 0])
    return starts


def _following(graph: TaskGraph, orders: Orders, waiting: list[int]) -> list[list[int]]:
    """[task] the tasks right after it in the orders; each then waits for one more."""
    following: list[list[int]] = [[] for _ in checked(graph.durations, 65_536)]
    for order in checked(orders, 4):
        for before, after in zip(order, order[1:], strict=False):
            following[before].append(after)
            waiting[after] += 1
    return following


def stuck_error(graph: TaskGraph, orders: Orders, stuck: Sequence[int]) -> InvalidPlanError:
    """The error that names actions which wait for each other, and where they run."""
    there = set(stuck)
    following = {task: [other for other, _ in graph.successors[task] if other in there] for task in stuck}
    for before, after in itertools.chain.from_iterable(map(itertools.pairwise, orders)):
        if before in there and after in there:
            following[before].append(after)
    circle = short_cycle(following)
    named = in_circle([f"{graph.label(task)} on {_where(graph, task)}" for task in circle], ", then ")
    return InvalidPlanError(
        f"{len(stuck)} actions wait for each other and can never start; in the shortest circle each waits for the one "
        f"before it: {named}"
    )


def _where(graph: TaskGraph, task: int) -> str:
    """The devices of an action, or the link of a message, in words."""
    places, workload = graph.devices_of(task), graph.workload
    if task >= graph.num_actions:
        return "link {} -> {}".format(*workload.links[places[0] - len(workload.devices)])
    return f"device{'s' if len(places) > 1 else ''} {', '.join(map(str, places))}"
