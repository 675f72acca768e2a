"""When actions start if every device runs its list in order and each action starts as soon as it can.

The actions of a workload are numbered: micro-batch m of operation o is ``offsets[o] + m``. An *order* is, for
each device, the numbers of its compute actions in the order they run; an action of several devices stands in
each of their lists and starts on all of them together.

Messages that may have to wait for their link are tasks, too, numbered after the actions. The lists of the links, in
the order in which they carry their messages, come after those of the devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeplan.errors import InvalidPlanError
from pipeplan.graphs import in_circle, short_cycle
from pipeplan.time_limit import checked, checkpoint
from pipeplan.workload.columns import IntArray, Lines, column
from pipeplan.workload.exchanges import Networks, finished, networks_at, networks_if, networks_of
from pipeplan.workload.pairs import TaskPairs
from pipeplan.workload.tail import NOTHING, ExchangeEnds, best_tail, exchanged_by
from pipeplan.workload.wide_starts import may_be_wide, wide_starts
from pipeplan.workload.workload import Workload

Orders = Sequence[Sequence[int]]

NEVER = 2**62
"""More than any time in ns, or any number of samples."""


@dataclass(frozen=True)
class TaskGraph:
    """All actions of a workload as numbered tasks, and after them the messages that may have to wait for a link.

    ``offsets`` has one entry per operation and transfer (:attr:`~pipeplan.workload.workload.Workload.transfers`), and
    the total after them; ``operation_of`` [task] is the number of that operation or transfer. ``durations`` [task] in
    ns. ``at_once``: what one task makes for another is there when it ends, as if messages took no time.
    """

    workload: Workload
    offsets: list[int]
    operation_of: list[int]
    durations: list[int]
    at_once: bool = False

    @cached_property
    def pairs(self) -> TaskPairs:
        """Every task that waits for another."""
        found = TaskPairs.of(self.workload, self.offsets)
        return replace(found, lags=np.zeros_like(found.lags)) if self.at_once else found

    @cached_property
    def successors(self) -> list[list[tuple[int, int]]]:
        """[task] pairs (a task that waits for it, lag in ns)."""
        found: list[list[tuple[int, int]]] = [[] for _ in checked(self.durations, 65_536)]
        pairs = self.pairs
        for begin in checked(range(0, len(pairs.sources), 65_536), 1):
            some = slice(begin, begin + 65_536)
            columns = (each[some].tolist() for each in (pairs.sources, pairs.targets, pairs.lags))
            for source, target, lag in zip(*columns, strict=True):
                found[source].append((target, lag))
        return found

    @cached_property
    def num_predecessors(self) -> list[int]:
        """[task] how many tasks it waits for."""
        return list(np.bincount(self.pairs.targets, minlength=len(self.durations)).tolist())

    @cached_property
    def items(self) -> IntArray:
        """[task] the number of its operation or transfer."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    @cached_property
    def numbers(self) -> IntArray:
        """[task] which of its item's it is."""
        found: IntArray = np.arange(len(self.durations)) - np.array(self.offsets)[self.items]
        return found

    @cached_property
    def times(self) -> IntArray:
        """[task] its duration in ns."""
        return column(self.durations, 4 + len(self.durations))

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
        return max(self._ends(starts, len(self.offsets) - 1), default=0)

    def last_ends(self, starts: Sequence[int], later_ns: int = 0) -> list[int]:
        """[operation] ns at which the last of its actions ends; a loop makes all of them ``later_ns`` later."""
        return [end + later_ns for end in self._ends(starts, len(self.workload.operations))]

    def _ends(self, starts: Sequence[int], count: int) -> Iterator[int]:
        """When the last task of each of the first so many operations and transfers ends, in ns; 0 where it has none."""
        workload = self.workload
        for item in range(count):
            begin, end = self.offsets[item], self.offsets[item + 1]
            parted = workload.slots[item].num_parted
            if end > begin and not parted:
                yield max(starts[begin:end]) + workload.durations[item]
                continue
            whole = begin + 2 * parted
            last = max(starts[whole:end], default=-workload.durations[item]) + workload.durations[item]
            part = workload.part_durations[item]
            yield max(last, max(starts[begin:whole], default=-part) + part)

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
        if not self.workload.exchanges:
            return NOTHING
        return exchanged_by(self.workload, self.networks_at(starts), later_ns)

    @cached_property
    def _followed(self) -> dict[tuple[int, ...], Networks]:
        """The networks of the last starts that were asked for: every figure of a schedule asks for the same ones."""
        return {}

    def networks_at(self, starts: Sequence[int]) -> Networks:
        """What exchanges state for actions that start at ``starts`` [task] in ns."""
        found = self._followed.get(asked := tuple(starts))
        return self.remember(asked, networks_at(self, asked)) if found is None else found

    def remember(self, starts: Sequence[int], networks: Networks) -> Networks:
        """Networks that have followed all actions, and are asked for again by these starts."""
        self._followed.clear()
        self._followed[tuple(starts)] = networks
        return networks


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
    return TaskGraph(workload, offsets, operation_of, durations)


def earliest_starts(graph: TaskGraph, orders: Orders, likely: Sequence[int] | None = None) -> list[int]:
    """Start of every task in ns, when devices and links run ``orders`` and nothing waits longer than it must.

    Cost is linear in tasks and dependencies. Links that may be busy need orders, too
    (:func:`~pipeplan.workload.engine.with_links`). With ``likely`` [action] starts, such as a plan states, it is less
    where these are the right ones.

    Raises:
        InvalidPlanError: the orders and the dependencies wait for each other; the text names a shortest circle.
    """
    assert len(orders) == graph.workload.num_resources, "an order for each device and each link"
    if likely is not None and (found := _if_earliest(graph, orders, likely)) is not None:
        return found
    if may_be_wide(graph.num_tasks, len(orders)) and not graph.workload.exchanges:
        wide = wide_starts(graph.times, graph.pairs, orders)
        if wide is not None:
            return wide
    durations, successors = graph.durations, graph.successors
    networks = networks_of(graph) if graph.workload.exchanges else []
    waiting = graph.num_predecessors.copy()
    behind = right_behind(graph, orders, waiting)
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
        for other in behind[task]:
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
    if networks:
        graph.remember(starts, finished(networks))
    return starts


def _if_earliest(graph: TaskGraph, orders: Orders, starts: Sequence[int]) -> list[int] | None:
    """[task] the earliest starts, if those of actions are ``starts``; None where that does not follow from them alone.

    Each must be the latest of 0, the ends of what stands right before it, and the arrivals of its inputs. Where
    everything arrives after the start of what makes it, no circle of tasks can have such starts, and without circles
    there is only one way: by induction in the order of time. Exchanges of state may let actions start later than that,
    by what their devices did before: these start when their networks, followed in that order, let them.
    """
    if len(starts) != graph.num_actions:
        return None
    pairs, times, found = graph.pairs, graph.times, column(starts, 4)
    after = times[pairs.sources] + pairs.lags
    if object in (times.dtype, found.dtype) or min(after.min(initial=1), times.min(initial=1)) <= 0:
        return None
    lines = Lines.of(orders)
    found = _with_messages(graph, lines, found)
    before, behind = lines.tasks[lines.followers - 1], lines.tasks[lines.followers]
    ready = np.zeros_like(found)
    np.maximum.at(ready, pairs.targets, found[pairs.sources] + after)
    np.maximum.at(ready, behind, found[before] + times[before])
    if not graph.workload.exchanges:
        earliest: list[int] | None = found.tolist() if np.array_equal(ready, found) else None
        return earliest
    exact: list[int] = found.tolist()
    networks = networks_if(graph, exact, ready.tolist())
    if networks is None:
        return None
    graph.remember(exact, networks)
    return exact


def _with_messages(graph: TaskGraph, lines: Lines, starts: IntArray) -> IntArray:
    """[task] starts of actions, and those of messages that follow from them: one after another on each link."""
    found = np.zeros(graph.num_tasks, np.int64)
    found[: len(starts)] = starts
    to_messages = np.flatnonzero(graph.pairs.targets >= len(starts))
    sources, targets = graph.pairs.sources[to_messages], graph.pairs.targets[to_messages]
    np.maximum.at(found, targets, found[sources] + graph.times[sources] + graph.pairs.lags[to_messages])
    first = len(graph.workload.devices)
    for line in range(first, first + len(graph.workload.links)):
        messages = lines.tasks[lines.begins[line] : lines.begins[line + 1]]
        before = np.cumsum(graph.times[messages]) - graph.times[messages]
        found[messages] = np.maximum.accumulate(found[messages] - before) + before
    return found


def right_behind(graph: TaskGraph, orders: Orders, waiting: list[int]) -> list[list[int]]:
    """[task] the tasks right after it in the orders; each then waits for one more."""
    found: list[list[int]] = [[] for _ in checked(graph.durations, 65_536)]
    for order in checked(orders, 4):
        for before, after in checked(itertools.pairwise(order), 65_536):
            found[before].append(after)
            waiting[after] += 1
    return found


def stuck_error(graph: TaskGraph, orders: Orders, stuck: Sequence[int]) -> InvalidPlanError:
    """The error that names actions which wait for each other, and where they run."""
    there = set(stuck)
    waiting = checked(stuck, 4096)
    following = {task: [other for other, _ in graph.successors[task] if other in there] for task in waiting}
    for before, after in checked(itertools.chain.from_iterable(map(itertools.pairwise, orders)), 65_536):
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
