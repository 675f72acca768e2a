"""What schedules of stage graphs ask of a task graph, and trial runs under limits of samples in flight."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from pipeplan.partition.graph.in_flight import KFKB, samples_in_flight
from pipeplan.workload.kinds import BACKWARD_ROLES, Role
from pipeplan.workload.task_graph import Orders, TaskGraph

__all__ = ["NEVER", "Rule", "Stages", "TrialRun", "samples_held"]


NEVER = 2**62
"""More than any time in ns, or any number of samples."""


_RANKS = {Role.FORWARD: 2, Role.WEIGHT_GRAD: 3}


@dataclass
class Stages:
    """What is said of the stages of a task graph, in samples and micro-batches; and how many actions trials started."""

    graph: TaskGraph
    num_starts: int = 0

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.graph.workload.stages)

    @cached_property
    def sizes(self) -> list[int]:
        """[stage] samples in a micro-batch."""
        return [stage.microbatch_size for stage in self.graph.workload.stages]

    @cached_property
    def counts(self) -> list[int]:
        """[stage] micro-batches in an iteration."""
        workload = self.graph.workload
        return [workload.mini_batch // (size * workload.num_routes) for size in self.sizes]

    @cached_property
    def roles(self) -> list[Role]:
        """[operation]"""
        return [operation.role for operation in self.graph.workload.operations]

    @cached_property
    def ranks(self) -> list[int]:
        """[operation] what goes first where several could run: backwards, forwards, weight gradients."""
        return [_RANKS.get(role, 1) for role in self.roles]

    @cached_property
    def stage_of(self) -> list[int]:
        """[operation]"""
        return [operation.stage for operation in self.graph.workload.operations]

    @cached_property
    def operation_of(self) -> dict[tuple[int, Role], int]:
        """{(stage, role): operation}"""
        return {pair: x for x, pair in enumerate(zip(self.stage_of, self.roles, strict=True))}

    @cached_property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """[operation]"""
        return self.graph.workload.resources[: len(self.roles)]

    @cached_property
    def on_device(self) -> list[list[int]]:
        """[device] its operations."""
        devices = range(len(self.graph.workload.devices))
        return [[x for x, there in enumerate(self.devices) if device in there] for device in devices]

    @cached_property
    def after(self) -> list[list[int]]:
        """[stage] the stages its outputs go to."""
        edges = [
            (each.source_stage, each.target_stage)
            for each in self.graph.workload.dependencies
            if each.source_role is each.target_role is Role.FORWARD
        ]
        return [sorted({target for source, target in edges if source == stage}) for stage in range(self.count)]

    @cached_property
    def before(self) -> list[list[int]]:
        """[stage] the stages its inputs come from."""
        return [[other for other in range(self.count) if stage in self.after[other]] for stage in range(self.count)]

    @cached_property
    def depths(self) -> list[int]:
        """[stage] stages before it on the longest way there."""
        found = [0] * self.count
        for stage in range(self.count):
            for other in self.after[stage]:
                found[other] = max(found[other], found[stage] + 1)
        return found

    @cached_property
    def totals(self) -> list[int]:
        """[stage] samples in an iteration."""
        return [size * count for size, count in zip(self.sizes, self.counts, strict=True)]

    @cached_property
    def room(self) -> list[int]:
        """[stage] samples that its devices could hold the activations of if they held no other stage's."""
        return [min(total, self._room(stage)) for stage, total in enumerate(self.totals)]

    def _room(self, stage: int) -> int:
        workload = self.graph.workload
        own = [operation for operation in workload.operations if operation.stage == stage]
        each = sum(operation.acquire_bytes for operation in own)
        workspace = max(operation.workspace_bytes for operation in own)
        limits = ((device, workload.devices[device].memory_bytes) for device in workload.stages[stage].devices)
        left = (memory - workload.static_bytes(device) - workspace for device, memory in limits if memory is not None)
        return max(1, min(left, default=NEVER) // max(1, each)) * self.sizes[stage]

    @cached_property
    def taken(self) -> list[int]:
        """[action] samples that it brings into flight."""
        return list(self._samples(Role.FORWARD))

    @cached_property
    def given(self) -> list[int]:
        """[action] samples that are no longer in flight after it."""
        return list(self._samples(Role.BACKWARD, Role.WEIGHT_GRAD))

    @cached_property
    def needs(self) -> list[int]:
        """[action, message] ns from its start to the end of the iteration, at the least.

        What its operation has left, what depends on it; and for a forward all that its stage has left, since that ends
        with a backward (or I).
        """
        graph, workload = self.graph, self.graph.workload
        needs = [0] * graph.num_tasks
        for item in sorted(range(len(workload.durations)), key=workload.rank, reverse=True):
            behind = left = 0
            is_forward = item < len(self.roles) and self.roles[item] is Role.FORWARD
            for task in reversed(range(*graph.offsets[item : item + 2])):
                ways = [lag + needs[other] for other, lag in graph.successors[task]]
                left += graph.durations[task]
                needs[task] = graph.durations[task] + max([behind, *ways])
                if is_forward:
                    needs[task] = max(needs[task], left + self._backwards_left(item, task, needs))
                behind = needs[task]
        return needs

    def _backwards_left(self, forward: int, task: int, needs: Sequence[int]) -> int:
        """Ns of the backwards that come after a forward, and of the way of the last one's gradients."""
        stage, graph = self.stage_of[forward], self.graph
        backward = next((x for role in BACKWARD_ROLES if (x := self.operation_of.get((stage, role))) is not None), 0)
        microbatch, _ = graph.workload.slots[forward].name(task - graph.offsets[forward])
        last = graph.offsets[backward + 1] - 1
        return (self.counts[stage] - microbatch - 1) * graph.durations[last] + needs[last]

    def _samples(self, *roles: Role) -> Iterator[int]:
        for role, slots in zip(self.roles, self.graph.workload.slots, strict=False):
            for number in range(len(slots)):
                begin, end = slots.samples(number)
                yield end - begin if role in roles else 0

    def of_task(self, task: int) -> int:
        """The stage of an action."""
        return self.stage_of[self.graph.operation_of[task]]

    def needed(self, stage: int, k: int, ks: Sequence[int], held: Sequence[int]) -> int:
        """Samples in flight of a stage by Table 3.2, given those of the stages after it."""
        own = KFKB(k, self.sizes[stage])
        after = ((KFKB(ks[other], self.sizes[other]), held[other]) for other in self.after[stage])
        return min(self.totals[stage], max((samples_in_flight(own, *flow) for flow in after), default=own.samples))

    def tasks(self, stage: int, word: Iterable[Role]) -> Iterator[int]:
        """The actions of a stage in the order of forwards and backwards, which mean whole micro-batches."""
        back = (*BACKWARD_ROLES, Role.WEIGHT_GRAD)
        forward = iter(self._by_microbatch(stage, Role.FORWARD))
        backwards = [iter(self._by_microbatch(stage, role)) for role in back if (stage, role) in self.operation_of]
        for turn in word:
            for tasks in [forward] if turn is Role.FORWARD else backwards:
                yield from next(tasks)

    def _by_microbatch(self, stage: int, role: Role) -> list[list[int]]:
        """[micro-batch] its actions of this role: one, or two parts."""
        operation = self.operation_of[stage, role]
        slots, first = self.graph.workload.slots[operation], self.graph.offsets[operation]
        numbers = groupby(range(len(slots)), key=lambda number: slots.name(number)[0])
        return [[first + number for number in group] for _, group in numbers]


def samples_held(graph: TaskGraph, orders: Orders) -> list[int]:
    """[stage] the most samples in flight when devices run in this order."""
    stages = Stages(graph)
    held, most = [0] * stages.count, [0] * stages.count
    for device, order in enumerate(graph.on_devices(orders)):
        for task in order:
            stage = stages.of_task(task)
            if device == graph.workload.stages[stage].devices[0]:
                held[stage] += stages.taken[task]
                most[stage] = max(most[stage], held[stage])
                held[stage] -= stages.given[task]
    return most


_END, _TRY = 0, 1


@dataclass(frozen=True, slots=True)
class Rule:
    """When a stage may run a forward: if it then has at most so many samples in flight.

    With ``forward_first`` a forward goes before a backward that could run as well.
    """

    samples: int
    forward_first: bool = False


class TrialRun:
    """All devices in time. Whatever of its actions can run first by the rules, a device runs as soon as it is free.

    ``orders`` of the devices; ``makespan`` in ns, very large where it would be over ``limit`` or where the rules leave
    too few samples for a stage with larger micro-batches; ``most_held`` [stage] samples.
    """

    def __init__(self, stages: Stages, rules: list[Rule], limit: int = NEVER) -> None:
        graph = stages.graph
        self.rules = rules
        self.orders: list[list[int]] = [[] for _ in graph.workload.devices]
        self.makespan = 0
        self.most_held = [0] * stages.count
        self._stages, self._graph, self._limit = stages, graph, limit
        self._held = [0] * stages.count
        self._next = graph.offsets[:-1]
        self._waiting = graph.num_predecessors.copy()
        self._arrival = [0] * graph.num_tasks
        self._free = [0] * graph.workload.num_resources
        self._ranked = [sorted(operations, key=self._rank) for operations in stages.on_device]
        self._events = [(0, _TRY, device) for device in range(len(self.orders))]
        self._run()

    def _rank(self, operation: int) -> tuple[int, int, int]:
        """Sort key of what goes first: backwards, forwards, weight gradients; then by depth."""
        stage, rank = self._stages.stage_of[operation], self._stages.ranks[operation]
        if rank == _RANKS[Role.FORWARD] and self.rules[stage].forward_first:
            rank = 0
        return rank, -self._stages.depths[stage], operation

    def _run(self) -> None:
        done = 0
        while self._events and self.makespan <= self._limit:
            now, what, number = heapq.heappop(self._events)
            if what == _END:
                self._end(number, now)
                done += 1
            elif self._free[number] <= now:
                self._choose(number, now)
        self._stages.num_starts += done
        if done < self._graph.num_actions:
            self.makespan = NEVER

    def _choose(self, device: int, now: int) -> None:
        """Start the first of a device's actions that can run; if its other devices are busy, wait for them."""
        for operation in self._ranked[device]:
            task = self._next[operation]
            if task < self._graph.offsets[operation + 1] and self._can_run(task, operation, now):
                devices = self._stages.devices[operation]
                if all(self._free[other] <= now for other in devices):
                    self._start(task, operation, devices, now)
                return

    def _can_run(self, task: int, operation: int, now: int) -> bool:
        if self._waiting[task] or self._arrival[task] > now:
            return False
        stage, taken = self._stages.stage_of[operation], self._stages.taken[task]
        return not taken or self._held[stage] + taken <= self.rules[stage].samples

    def _start(self, task: int, operation: int, devices: Iterable[int], now: int) -> None:
        end = now + self._graph.durations[task]
        self.makespan = max(self.makespan, now + self._stages.needs[task])
        stage = self._stages.stage_of[operation]
        self._next[operation] = task + 1
        self._held[stage] += self._stages.taken[task]
        self.most_held[stage] = max(self.most_held[stage], self._held[stage])
        for device in devices:
            self._free[device] = end
            self.orders[device].append(task)
        heapq.heappush(self._events, (end, _END, task))

    def _end(self, task: int, now: int) -> None:
        operation = self._graph.operation_of[task]
        self._held[self._stages.stage_of[operation]] -= self._stages.given[task]
        for device in self._stages.devices[operation]:
            heapq.heappush(self._events, (now, _TRY, device))
        for other, lag in self._graph.successors[task]:
            if other < self._graph.num_actions:
                self._arrive(other, now + lag)
            else:
                self._carry(other, now)

    def _arrive(self, task: int, time: int) -> None:
        """One of the things an action waits for is there at ``time``."""
        self._arrival[task] = max(self._arrival[task], time)
        self._waiting[task] -= 1
        if self._waiting[task] == 0:
            for device in self._stages.devices[self._graph.operation_of[task]]:
                if self._free[device] <= self._arrival[task]:
                    heapq.heappush(self._events, (self._arrival[task], _TRY, device))

    def _carry(self, message: int, made: int) -> None:
        """A message takes its link when it is made, or when the link is free."""
        (link,) = self._graph.devices_of(message)
        self._free[link] = max(self._free[link], made) + self._graph.durations[message]
        for other, lag in self._graph.successors[message]:
            self._arrive(other, self._free[link] + lag)
