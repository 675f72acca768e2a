"""The actions of a plan as computing nodes of its ranks, and its messages between them.

An action that comes to something in its middle (messages of parts, groups of blocks, buckets) is as many nodes as that
takes, one right after the other: a node can only wait at its start, and be waited for at its end.

A plan's action starts together on all of its stage's devices. Where these come to it at one time anyway, as devices
with the same stages do, nothing is said of that; where they do not, they tell each other by messages of a byte.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import lcm

from pipeplan.errors import UsageError
from pipeplan.files import Plan
from pipeplan.interop.chakra.drafts import Before, DraftNode, Drafts
from pipeplan.lower import PeerNames
from pipeplan.workload.action import StateAction
from pipeplan.workload.elements import Dependency, Hop
from pipeplan.workload.exchanges import passes
from pipeplan.workload.kinds import GRADIENT_ROLES, PARAMETER_ROLES
from pipeplan.workload.network_jobs import NetworkJob
from pipeplan.workload.task_graph import Orders, TaskGraph


def micros(time_ns: int) -> int:
    """The nearest number of whole microseconds, which is what the schema has."""
    return (time_ns + 500) // 1000


class Actions:
    """Every action of a plan on each of its devices, cut where something else waits for it or it for something else."""

    def __init__(self, plan: Plan, graph: TaskGraph, orders: Orders, sums: Sequence[NetworkJob], to: Drafts) -> None:
        self.plan, self.graph, self._to = plan, graph, to
        self.orders = graph.on_devices(orders)
        self.adding = self._last_adding()
        cuts = self._cuts(sums)
        self._parts: dict[tuple[int, int], tuple[list[int], list[DraftNode]]] = {}
        for device, order in enumerate(self.orders):
            for task in order:
                self._add(device, task, cuts.get(task, cuts[-1 - graph.operation_of[task]]))
        links = orders[len(self.orders) :]
        self._meetings = [self._has_to_meet(number) for number in range(len(plan.stages))]
        self.meetings = 0
        sent = self._add_messages()
        for link in links[: len(graph.workload.links)]:
            for before, after in pairwise(link):
                sent[after].control.append(sent[before])
                sent[after].place = max(sent[after].place, sent[before].place)
        self._add_meetings()

    def _add(self, device: int, task: int, cuts: Sequence[int]) -> None:
        label, duration = self.graph.label(task), self.graph.durations[task]
        times = [0, *cuts, duration]
        names = [label] if not cuts else [f"{label} part {number}" for number in range(len(times) - 1)]
        own = [
            self._to.compute(device, name, micros(end) - micros(begin))
            for name, (begin, end) in zip(names, pairwise(times), strict=True)
        ]
        self._parts[task, device] = (times, own)

    def _cuts(self, sums: Sequence[NetworkJob]) -> dict[int, list[int]]:
        """{task, or -1 - operation: ns after its start at which something is waited for or made in its middle}."""
        workload = self.graph.workload
        found: dict[int, set[int]] = {}
        for item, operation in enumerate(workload.operations):
            stage = workload.stages[operation.stage]
            times = {end for _, _, end in passes(stage.block_groups, operation.role)}
            found[-1 - item] = times | {operation.begin_ns(part) for part in range(len(operation.parts_ns))}
        for job in sums:
            for stage_number, ahead in zip(job.stages, job.ahead_ns, strict=True):
                task = self.adding.get(stage_number)
                if task is not None and ahead:
                    own = found.setdefault(task, {*found[-1 - self.graph.operation_of[task]]})
                    own.add(self.graph.durations[task] - ahead)
        return {key: sorted(times - {0, self._duration(key)}) for key, times in found.items()}

    def _duration(self, key: int) -> int:
        return self.graph.durations[key] if key >= 0 else self.graph.workload.durations[-1 - key]

    def _last_adding(self) -> dict[int, int]:
        """{stage: the last of its actions that adds to gradients}"""
        workload, found = self.graph.workload, dict[int, int]()
        for order in self.orders:
            for task in order:
                operation = workload.operations[self.graph.operation_of[task]]
                if operation.role in GRADIENT_ROLES:
                    found[operation.stage] = task
        return found

    # When something of an action begins and ends ------------------------------------------------------------------

    def begin(self, task: int, device: int) -> Before:
        """What an action waits for before it begins."""
        first = self._parts[task, device][1][0]
        return first.control, first.data

    def from_moment(self, task: int, device: int, time_ns: int) -> DraftNode:
        """Of an action the node that begins so long after its start."""
        times, own = self._parts[task, device]
        return own[min(bisect_right(times, time_ns) - 1, len(own) - 1)]

    def until_moment(self, task: int, device: int, time_ns: int) -> list[DraftNode]:
        """What has ended when an action has run so long."""
        times, own = self._parts[task, device]
        number = bisect_left(times, time_ns)
        return [own[number - 1]] if number else [draft for part in self.begin(task, device) for draft in part]

    # Messages -----------------------------------------------------------------------------------------------------

    def _add_messages(self) -> dict[int, DraftNode]:
        """Every message; {task of a message that may have to wait for its link: its SEND}."""
        graph, plan = self.graph, self.plan
        workload = graph.workload
        position = {operation.id: index for index, operation in enumerate(workload.operations)}
        naming, entries = PeerNames(workload.dependencies), self._entries()
        found: dict[int, DraftNode] = {}
        for number, dependency in enumerate(plan.dependencies):
            self._require_said(number, dependency)
            source, target = position[dependency.source], position[dependency.target]
            for hop in dependency.hops:
                item, slots = workload.item_of.get((source, target, hop)), workload.messages(dependency, hop)
                sends, receives = naming.messages(dependency, hop)
                for index in range(len(slots)):
                    text, samples = slots.text(index), slots.samples(index)
                    makers = [graph.offsets[source] + n for n in workload.slots[source].sharing(samples)]
                    users = [graph.offsets[target] + n for n in workload.slots[target].sharing(samples)]
                    names = f"{sends[0]}{text}{sends[1]}", f"{receives[0]}{text}{receives[1]}"
                    size = (hop if slots.name(index)[1] is None else hop.part).bytes
                    send = self._message(dependency, hop, makers, users, names, size, entries)
                    if item is not None:
                        found[graph.offsets[item] + index] = send
        return found

    def _message(
        self,
        dependency: Dependency,
        hop: Hop,
        makers: Sequence[int],
        users: Sequence[int],
        names: tuple[str, str],
        size: int,
        entries: Sequence[dict[str, int]],
    ) -> DraftNode:
        workload, operation_of = self.graph.workload, self.graph.operation_of
        made: list[DraftNode] = []
        for task in makers:
            left = workload.operations[operation_of[task]].left_ns(dependency.source_part)
            made += self.until_moment(task, hop.source_device, self.graph.durations[task] - left)
        ends = hop.source_device, hop.target_device
        send, receive = self._to.message(ends, names, size, ((), made), entries[ends[0]].get(names[0], 0))
        for task in users:
            begin = workload.operations[operation_of[task]].begin_ns(dependency.target_part)
            self.from_moment(task, hop.target_device, begin).data.append(receive)
        return send

    def _entries(self) -> list[dict[str, int]]:
        """[device] {text of a SEND: where it stands in the program}"""
        return [
            {text: number for number, text in enumerate(program) if "SEND_" in text} for program in self.plan.programs
        ]

    # Starting together --------------------------------------------------------------------------------------------

    def _has_to_meet(self, number: int) -> bool:
        """Whether the devices of a stage may come to an action at different times, however fast messages are."""
        stages, devices = self.plan.stages, self.plan.stages[number].devices
        if len(devices) == 1:
            return False
        own = frozenset(devices)
        if any(own != (other := frozenset(each.devices)) and own & other for each in stages):
            return True
        into = (each for each in self.plan.dependencies if each.target_stage == number)
        return any(not self._covers(each, device) for each in into for device in devices)

    def _covers(self, dependency: Dependency, device: int) -> bool:
        """Whether a device itself has, or is sent, something of every action of a dependency's source."""
        return device in self.plan.stages[dependency.source_stage].devices or _complete(
            [hop for hop in dependency.hops if hop.target_device == device]
        )

    def _require_said(self, number: int, dependency: Dependency) -> None:
        """Refuse what waits for an action of another rank without a message from there. Raises UsageError."""
        sources = self.plan.stages[dependency.source_stage].devices
        targets = self.plan.stages[dependency.target_stage].devices
        if not set(sources).isdisjoint(targets) or _complete(dependency.hops):
            return
        raise UsageError(
            f"dependencies[{number}]: {dependency.target} waits for {dependency.source}, which runs on other devices "
            "and sends it nothing; a Chakra trace has dependencies between the nodes of one rank, and messages"
        )

    def _add_meetings(self) -> None:
        for device, order in enumerate(self.orders):
            for task in order:
                operation = self.graph.workload.operations[self.graph.operation_of[task]]
                stage = self.plan.stages[operation.stage]
                if self._meetings[operation.stage] and device == stage.devices[0]:
                    for number in self._parts_that_wait(task, stage.devices):
                        own = {each: self._parts[task, each][1][number] for each in stage.devices}
                        come = self._to.meet(
                            own[device].name, {each: (part.control, part.data) for each, part in own.items()}
                        )
                        self.meetings += 1
                        for each, part in own.items():
                            part.data += come[each]

    def _parts_that_wait(self, task: int, devices: Sequence[int]) -> Iterator[int]:
        for number, parts in enumerate(zip(*(self._parts[task, each][1] for each in devices), strict=True)):
            if not number or any(part.data for part in parts):
                yield number


def _complete(hops: Sequence[Hop]) -> bool:
    """Whether every micro-batch of the source goes by one of some hops."""
    period = lcm(*(hop.every for hop in hops))
    return bool(hops) and all(
        any(hop.first <= m % hop.every < hop.first + hop.run for hop in hops) for m in range(min(period, 10**6))
    )


def uses_of(actions: Actions) -> dict[tuple[int, bool], list[int]]:
    """{(stage, whether they add to gradients): its tasks that do, or that compute with parameters, in order}"""
    workload, found = actions.graph.workload, defaultdict[tuple[int, bool], list[int]](list)
    for device, order in enumerate(actions.orders):
        for task in order:
            operation = workload.operations[actions.graph.operation_of[task]]
            if workload.stages[operation.stage].devices[0] == device:
                if operation.role in PARAMETER_ROLES:
                    found[operation.stage, False].append(task)
                if operation.role in GRADIENT_ROLES:
                    found[operation.stage, True].append(task)
    return found


def programs_without_exchanges(plan: Plan) -> list[list[str]]:
    """[device] its actions, without what exchanges state and without messages."""
    return [
        [text for text in program if "_" not in text and StateAction.read(text) is None] for program in plan.programs
    ]
