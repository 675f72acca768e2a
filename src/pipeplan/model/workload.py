"""Workload: everything there is to run in one iteration, before anybody says when.

A plan is a workload with a schedule. Planners take a workload, simulation replays one in a given order.

A *link* leads from one device to another and carries one message at a time, for the message's occupancy. Where
messages may have to wait for it, they are *transfers*: things to run as operations are, on links instead of devices.
Operations and transfers together are *items*, numbered: first the operations, then the transfers. Links
are numbered behind the devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from pipeplan.model.action import PAYLOAD, Action
from pipeplan.model.plan import Dependency, Device, Hop, Operation, Plan, Stage

__all__ = ["Transfer", "Workload"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """The messages of one hop on a link where they may have to wait, one for each micro-batch of the source.

    ``source`` and ``target`` number the operations at its ends, ``link`` is a number in :attr:`Workload.links`.
    """

    source: int
    target: int
    link: int
    hop: Hop


@dataclass(frozen=True)
class Workload:
    """Stages on devices, their operations and dependencies, and how many micro-batches flow through.

    The fields are those of :class:`~pipeplan.model.plan.Plan` with the same names. ``operations`` are ordered
    so that dependencies point forward.
    """

    name: str
    placement: str
    num_microbatches: int
    microbatch_size: int
    devices: tuple[Device, ...]
    stages: tuple[Stage, ...]
    operations: tuple[Operation, ...]
    dependencies: tuple[Dependency, ...]

    @classmethod
    def of(cls, plan: Plan) -> Workload:
        """The workload of a plan."""
        return cls(
            plan.name,
            plan.placement,
            plan.num_microbatches,
            plan.microbatch_size,
            plan.devices,
            plan.stages,
            plan.operations,
            plan.dependencies,
        )

    def with_microbatches(self, num_microbatches: int) -> Workload:
        """The same for another number of micro-batches."""
        return replace(self, num_microbatches=num_microbatches)

    def num_instances(self, operation: Operation) -> int:
        """How many actions an operation has: one per micro-batch of its stage."""
        return self.num_microbatches * self.microbatch_size // self.stages[operation.stage].microbatch_size

    def static_bytes(self, device: int) -> int:
        """Parameters, gradients and optimizer state that a device keeps throughout."""
        return sum(
            stage.parameter_bytes + stage.gradient_bytes + stage.optimizer_bytes
            for stage in self.stages
            if device in stage.devices
        )

    @cached_property
    def links(self) -> tuple[tuple[int, int], ...]:
        """(source device, target device) of the links on which messages may have to wait, ascending.

        All messages of a link are made on one device, one after another. They never meet if each is made by
        another operation and all operations that make them last at least as long as any occupies the link.
        """
        uses: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for source, _, hop in self._occupying_hops():
            uses[hop.source_device, hop.target_device].append((source, hop.occupancy_ns))
        return tuple(sorted(link for link, messages in uses.items() if self._may_meet(messages)))

    def _may_meet(self, messages: list[tuple[int, int]]) -> bool:
        """Whether messages of one link, pairs (operation, occupancy in ns), may be under way at the same time."""
        sources = {source for source, _ in messages}
        least = min(self.operations[source].duration_ns for source in sources)
        return len(sources) < len(messages) or max(occupancy for _, occupancy in messages) > least

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """The hops that occupy one of the links, in the order of the dependencies."""
        number = {link: index for index, link in enumerate(self.links)}
        return tuple(
            Transfer(source, target, number[hop.source_device, hop.target_device], hop)
            for source, target, hop in self._occupying_hops()
            if (hop.source_device, hop.target_device) in number
        )

    @cached_property
    def item_of(self) -> dict[tuple[int, int, Hop], int]:
        """{(source operation, target operation, hop): item} of the transfers."""
        numbered = enumerate(self.transfers, len(self.operations))
        return {(transfer.source, transfer.target, transfer.hop): item for item, transfer in numbered}

    def _occupying_hops(self) -> Iterator[tuple[int, int, Hop]]:
        """(operation, operation, hop) of each message that occupies a link."""
        for source, target, dependency in self._ends:
            yield from ((source, target, hop) for hop in dependency.hops if hop.occupancy_ns)

    @cached_property
    def _ends(self) -> tuple[tuple[int, int, Dependency], ...]:
        position = {operation.id: index for index, operation in enumerate(self.operations)}
        return tuple((position[d.source], position[d.target], d) for d in self.dependencies)

    @cached_property
    def num_resources(self) -> int:
        """Devices, and links on which messages may have to wait."""
        return len(self.devices) + len(self.links)

    @cached_property
    def durations(self) -> tuple[int, ...]:
        """[item] ns that it takes its devices, or its link."""
        compute = tuple(operation.duration_ns for operation in self.operations)
        return compute + tuple(transfer.hop.occupancy_ns for transfer in self.transfers)

    @cached_property
    def resources(self) -> tuple[tuple[int, ...], ...]:
        """[item] its devices, or the number of its link behind the devices."""
        compute = tuple(self.stages[operation.stage].devices for operation in self.operations)
        return compute + tuple((len(self.devices) + transfer.link,) for transfer in self.transfers)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """[item] samples in one of its micro-batches."""
        compute = tuple(self.stages[operation.stage].microbatch_size for operation in self.operations)
        return compute + tuple(compute[transfer.source] for transfer in self.transfers)

    @cached_property
    def lags(self) -> tuple[tuple[int, int, int], ...]:
        """What waits for what where every link is free: (operation, operation, lag in ns)."""
        return tuple((source, target, dependency.lag_ns) for source, target, dependency in self._ends)

    @cached_property
    def edges(self) -> tuple[tuple[int, int, int], ...]:
        """What waits for what: (item, item, lag in ns). A transfer stands between the operations at its ends."""
        links = set(self.links)
        found: list[tuple[int, int, int]] = []
        for source, target, dependency in self._ends:
            free = [
                hop.duration_ns
                for hop in dependency.hops
                if not hop.occupancy_ns or (hop.source_device, hop.target_device) not in links
            ]
            if free or not dependency.hops:
                found.append((source, target, max(free, default=0)))
        for item, transfer in enumerate(self.transfers, len(self.operations)):
            found.append((transfer.source, item, 0))
            found.append((item, transfer.target, transfer.hop.latency_ns))
        return tuple(found)

    def rank(self, item: int) -> tuple[int, bool]:
        """Sort key by which what an item waits for comes before it: a transfer stands right behind its source."""
        is_transfer = item >= len(self.operations)
        return (self.transfers[item - len(self.operations)].source if is_transfer else item, is_transfer)

    def label(self, item: int, microbatch: int) -> str:
        """The action's text: ``2F0``, or a transfer's SEND with both ends: ``1SEND_F0>2@3``."""
        if item < len(self.operations):
            return f"{self.operations[item].id}{microbatch}"
        transfer = self.transfers[item - len(self.operations)]
        source, target = self.operations[transfer.source], self.operations[transfer.target]
        kind = f"SEND_{PAYLOAD.get(source.kind, '')}"
        return str(Action(source.stage, kind, microbatch, target.stage, transfer.hop.target_device))
