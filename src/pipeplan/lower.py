"""From a schedule to one program per device, with messages inserted and ordered so that they cannot deadlock."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from pipeplan.time_limit import checked
from pipeplan.workload.action import Action
from pipeplan.workload.elements import Dependency, Hop, Loop, Round
from pipeplan.workload.exchanges import texts_around
from pipeplan.workload.steady_state.loop import LoopCut
from pipeplan.workload.task_graph import NEVER, Orders, TaskGraph

_Words = tuple[str, str]

_Event = tuple[int, int, int, int, str]  # time, 0 for a message and 1 for compute, tie-breaks, text


def programs(
    graph: TaskGraph, orders: Orders, starts: Sequence[int], cut: LoopCut | None = None
) -> tuple[tuple[tuple[str, ...], ...], Loop | None]:
    """Each device's compute and communication in order, as action texts; and where in them the round of a loop stands.

    ``orders`` [device, link] and ``starts`` [task] are those of :func:`pipeplan.workload.task_graph.earliest_starts`.
    All programs are in the order of one time, so that a moment cuts them all.
    """
    events: list[list[_Event]] = [
        [(starts[task], 1, task, 0, graph.label(task)) for task in checked(order, 1024)]
        for order in graph.on_devices(orders)
    ]
    _add_messages(graph, _emissions(graph, orders, starts), events)
    for device_events in checked(events, 1):
        device_events.sort()
    found = _texts(events)
    places: Sequence[Sequence[int]] = [range(len(each) + 1) for each in events]
    if graph.workload.exchanges:
        found, places = _with_exchanges(graph, starts, events)
    return found, None if cut is None else _loop(cut, events, places)


def _texts(events: Sequence[Sequence[_Event]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(text for *_, text in device_events) for device_events in checked(events, 1))


def _with_exchanges(
    graph: TaskGraph, starts: Sequence[int], events: Sequence[Sequence[_Event]]
) -> tuple[tuple[tuple[str, ...], ...], list[list[int]]]:
    """The programs of devices' events, with what exchanges state right before and after the actions it is for.

    And where the entries of each event begin in its program; the last position is after all of them.
    """
    before, after = texts_around(graph.workload, graph.networks_at(starts))
    found, places = [], list[list[int]]()
    for device, device_events in enumerate(events):
        program, begins = list[str](), list[int]()
        for _, is_compute, task, _, text in device_events:
            own = task if is_compute else NEVER
            begins.append(len(program))
            program += [*before[device].get(own, ()), text, *after[device].get(own, ())]
        places.append([*begins, len(program)])
        found.append((*program, *before[device].get(None, ())))
    return tuple(found), places


def _loop(cut: LoopCut, events: Sequence[Sequence[_Event]], places: Sequence[Sequence[int]]) -> Loop:
    """``places`` [device][event] are where an event's entries begin in its program."""
    rounds = []
    for begin_ns, time in cut.moments:
        begins, ends = (
            tuple(
                own[bisect_left(device_events, moment, key=lambda event: event[0])]
                for device_events, own in zip(events, places, strict=True)
            )
            for moment in (begin_ns, begin_ns + time)
        )
        rounds.append(Round(round_ns=time, begins=begins, ends=ends))
    return Loop(copies=cut.copies, microbatches=cut.microbatches, rounds=tuple(rounds))


def _emissions(graph: TaskGraph, orders: Orders, starts: Sequence[int]) -> list[tuple[int, int]]:
    """[task] when an action's messages are made and leave; for a message its own emission and start. In ns.

    A message whose turn on its link has come earlier than its link is free is emitted all the same: an executor that
    posts it late, after an action that began meanwhile, would lose that time.
    """
    emissions = [(start + time, start + time) for start, time in zip(starts, graph.durations, strict=True)]
    workload, offsets = graph.workload, graph.offsets
    for order in orders[len(workload.devices) :]:
        latest = 0
        for message in checked(order, 1024):
            item = graph.operation_of[message]
            source = workload.transfers[item - len(workload.operations)].source
            samples = workload.slots[item].samples(message - offsets[item])
            target = workload.transfers[item - len(workload.operations)].target
            latest = max(latest, _made(graph, emissions, source, samples) - _left(graph, source, target))
            emissions[message] = latest, starts[message]
    return emissions


def _made(graph: TaskGraph, emissions: Sequence[tuple[int, int]], operation: int, samples: tuple[int, int]) -> int:
    """When all actions of an operation that hold some of these samples have ended."""
    offset = graph.offsets[operation]
    shared = graph.workload.slots[operation].sharing(samples)
    if len(shared) == 1:
        return emissions[offset + shared[0]][0]
    return max(emissions[offset + number][0] for number in shared)


def _left(graph: TaskGraph, source: int, target: int) -> int:
    """How long an operation's action goes on when what another needs of it is made, in ns."""
    workload = graph.workload
    return workload.operations[source].duration_ns - workload.made_ns[source, target] if workload.has_parts else 0


def _add_messages(graph: TaskGraph, emissions: Sequence[tuple[int, int]], events: list[list[_Event]]) -> None:
    """A SEND and a RECV for every message; of those emitted at a time, the ones go first that leave first."""
    workload = graph.workload
    position = {operation.id: index for index, operation in enumerate(workload.operations)}
    naming = PeerNames(workload.dependencies)
    number = 0
    for dependency in workload.dependencies:
        source = position[dependency.source]
        left = _left(graph, source, position[dependency.target])
        for hop in dependency.hops:
            item = workload.item_of.get((source, position[dependency.target], hop))
            slots = workload.messages(dependency, hop)
            sends, receives = naming.messages(dependency, hop)
            for index in checked(range(len(slots)), 1024):
                made = leaves = _made(graph, emissions, source, slots.samples(index)) - left
                if item is not None:
                    made, leaves = emissions[graph.offsets[item] + index]
                text = slots.text(index)
                events[hop.source_device].append((made, 0, leaves, number, f"{sends[0]}{text}{sends[1]}"))
                events[hop.target_device].append((made, 0, leaves, number, f"{receives[0]}{text}{receives[1]}"))
                number += 1


class PeerNames:
    """Says which stage or device is at the other end where more than one could be meant."""

    def __init__(self, dependencies: Sequence[Dependency]) -> None:
        self._targets: Counter[tuple[int, str, int]] = Counter()  # source stage, payload, device
        self._target_devices: Counter[tuple[int, str, int, int]] = Counter()  # ... and target stage
        self._sources: Counter[tuple[int, str, int]] = Counter()  # target stage, payload, device
        self._source_devices: Counter[tuple[int, str, int, int]] = Counter()  # ... and source stage
        for dependency in dependencies:
            source, payload, target = _ends(dependency)
            for device in {hop.source_device for hop in dependency.hops}:
                self._targets[source, payload, device] += 1
            for hop in dependency.hops:
                self._target_devices[source, payload, hop.source_device, target] += 1
                self._sources[target, payload, hop.target_device] += 1
                self._source_devices[target, payload, hop.target_device, source] += 1

    def messages(self, dependency: Dependency, hop: Hop) -> tuple[_Words, _Words]:
        """The text before and after the micro-batch in the SENDs and RECVs of a hop."""
        source, payload, target = _ends(dependency)
        send = Action(
            source,
            f"SEND_{payload}",
            0,
            target if self._targets[source, payload, hop.source_device] > 1 else None,
            hop.target_device if self._target_devices[source, payload, hop.source_device, target] > 1 else None,
        )
        receive = Action(
            target,
            f"RECV_{payload}",
            0,
            source if self._sources[target, payload, hop.target_device] > 1 else None,
            hop.source_device if self._source_devices[target, payload, hop.target_device, source] > 1 else None,
        )
        return _around_microbatch(send), _around_microbatch(receive)


def _around_microbatch(action: Action) -> _Words:
    return action.operation, str(action)[len(action.operation) + 1 :]


def _ends(dependency: Dependency) -> tuple[int, str, int]:
    return dependency.source_stage, dependency.payload, dependency.target_stage
