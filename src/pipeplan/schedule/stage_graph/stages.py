"""What the schedules of stage graphs ask of a task graph: sizes, neighbours, samples in flight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from pipeplan.partition.in_flight import KFKB, samples_in_flight
from pipeplan.simulate.timing import Orders, TaskGraph

__all__ = ["NEVER", "Stages", "samples_held"]

NEVER = 2**62
"""More than any time in ns, or any number of samples."""


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
    def kinds(self) -> list[str]:
        """[operation]"""
        return [operation.kind for operation in self.graph.workload.operations]

    @cached_property
    def stage_of(self) -> list[int]:
        """[operation]"""
        return [operation.stage for operation in self.graph.workload.operations]

    @cached_property
    def operation_of(self) -> dict[tuple[int, str], int]:
        """{(stage, kind): operation}"""
        return {pair: x for x, pair in enumerate(zip(self.stage_of, self.kinds, strict=True))}

    @cached_property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """[operation]"""
        return self.graph.workload.resources[: len(self.kinds)]

    @cached_property
    def on_device(self) -> list[list[int]]:
        """[device] its operations."""
        devices = range(len(self.graph.workload.devices))
        return [[x for x, there in enumerate(self.devices) if device in there] for device in devices]

    @cached_property
    def after(self) -> list[list[int]]:
        """[stage] the stages its outputs go to."""
        ends = ((d.source, d.target) for d in self.graph.workload.dependencies)
        edges = [(int(source[:-1]), int(target[:-1])) for source, target in ends if source[-1] == target[-1] == "F"]
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
        return list(self._samples("F"))

    @cached_property
    def given(self) -> list[int]:
        """[action] samples that are no longer in flight after it."""
        return list(self._samples("BW"))

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
            for task in reversed(range(*graph.offsets[item : item + 2])):
                ways = [lag + needs[other] for other, lag in graph.successors[task]]
                left += graph.durations[task]
                needs[task] = graph.durations[task] + max([behind, *ways])
                if item < len(self.kinds) and self.kinds[item] == "F":
                    needs[task] = max(needs[task], left + self._backwards_left(item, task, needs))
                behind = needs[task]
        return needs

    def _backwards_left(self, forward: int, task: int, needs: Sequence[int]) -> int:
        """Ns of the backwards that come after a forward, and of the way of the last one's gradients."""
        stage, graph = self.stage_of[forward], self.graph
        backward = self.operation_of.get((stage, "B"), self.operation_of.get((stage, "I"), 0))
        microbatch, _ = graph.workload.slots[forward].name(task - graph.offsets[forward])
        last = graph.offsets[backward + 1] - 1
        return (self.counts[stage] - microbatch - 1) * graph.durations[last] + needs[last]

    def _samples(self, kinds: str) -> Iterator[int]:
        for kind, slots in zip(self.kinds, self.graph.workload.slots, strict=False):
            for number in range(len(slots)):
                begin, end = slots.samples(number)
                yield end - begin if kind in kinds else 0

    def of_task(self, task: int) -> int:
        """The stage of an action."""
        return self.stage_of[self.graph.operation_of[task]]

    def needed(self, stage: int, k: int, ks: Sequence[int], held: Sequence[int]) -> int:
        """Samples in flight of a stage by Table 3.2, given those of the stages after it."""
        own = KFKB(k, self.sizes[stage])
        after = ((KFKB(ks[other], self.sizes[other]), held[other]) for other in self.after[stage])
        return min(self.totals[stage], max((samples_in_flight(own, *flow) for flow in after), default=own.samples))

    def tasks(self, stage: int, word: Iterable[str]) -> Iterator[int]:
        """The actions of a stage in the order of ``"F"`` and ``"B"``, which mean whole micro-batches."""
        forward = iter(self._by_microbatch(stage, "F"))
        backwards = [iter(self._by_microbatch(stage, kind)) for kind in "BIW" if (stage, kind) in self.operation_of]
        for letter in word:
            for tasks in [forward] if letter == "F" else backwards:
                yield from next(tasks)

    def _by_microbatch(self, stage: int, kind: str) -> list[list[int]]:
        """[micro-batch] its actions of this kind: one, or two parts."""
        operation = self.operation_of[stage, kind]
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
