"""The scheduling problem: a workload reduced to the numbers a search needs.

Operations are numbered 0..n-1 as in the workload. All micro-batches are alike, so one micro-batch's
operations and dependencies say everything; the same operation of different micro-batches may be taken to run in
micro-batch order (Tessel, Property 4.1), since exchanging equal micro-batches changes nothing.

A link that can be busy is one more device behind the others, without memory, and each message on it one more operation,
of kind SEND, behind the others (the items of :mod:`pipeplan.workload.workload`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from pipeplan.errors import InfeasibleError
from pipeplan.schedule.reduction import Reduction
from pipeplan.units import format_bytes
from pipeplan.workload.kinds import Role
from pipeplan.workload.memory import capacities
from pipeplan.workload.workload import Workload

__all__ = ["Problem"]


@dataclass(frozen=True)
class Problem:
    """What may run when, for one micro-batch, and on what.

    ``durations`` [operation] ns; ``devices`` [operation] devices that run it together; ``acquire``, ``release``,
    ``workspace`` [operation] bytes on each of its devices; ``edges`` triples (source, target, lag in
    ns); ``capacity`` [device] bytes left beside parameters, gradients and optimizer, None without limit. Where
    devices do the same, or micro-batches are not all alike, ``workload`` is what ``reduction`` made of the given one.
    """

    workload: Workload
    durations: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    acquire: tuple[int, ...]
    release: tuple[int, ...]
    workspace: tuple[int, ...]
    edges: tuple[tuple[int, int, int], ...]
    capacity: tuple[int | None, ...]
    reduction: Reduction | None = None

    @classmethod
    def of(cls, workload: Workload, *, require_room: bool = True) -> Problem:
        """The problem of a workload.

        Raises:
            InfeasibleError: a device cannot hold its parameters, gradients and optimizer state, or cannot run
                a single micro-batch beside them; not without ``require_room``.
            UsageError: the workload has forwards in parts.
        """
        reduction = Reduction.of(workload)
        workload = workload if reduction is None else reduction.reduced
        rank = workload.rank
        problem = cls(
            workload,
            workload.durations,
            workload.resources,
            tuple(effect.acquire for effect in workload.effects),
            tuple(effect.release for effect in workload.effects),
            tuple(effect.workspace for effect in workload.effects),
            workload.edges,
            tuple(capacities(workload)) + (None,) * len(workload.links),
            reduction,
        )
        assert all(rank(source) < rank(target) for source, target, _ in problem.edges)
        if require_room:
            problem._require_room()
        return problem

    @property
    def microbatches_per_round(self) -> int:
        """The workload's own micro-batches in one of the problem's: 1 where all are alike."""
        return 1 if self.reduction is None else self.reduction.microbatches_per_round

    @property
    def num_operations(self) -> int:
        """Operations of one micro-batch, messages that may have to wait among them."""
        return len(self.durations)

    @property
    def num_devices(self) -> int:
        """Devices of the workload, without links."""
        return len(self.workload.devices)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the workload."""
        return self.workload.num_microbatches

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """[operation] what it is for; a message is NETWORK."""
        roles = [operation.role for operation in self.workload.operations]
        return (*roles, *[Role.NETWORK] * (self.num_operations - len(roles)))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The operations, each behind everything it waits for."""
        return tuple(sorted(range(self.num_operations), key=self.workload.rank))

    @cached_property
    def ordered_edges(self) -> tuple[tuple[int, int, int], ...]:
        """The edges, those into an operation before those out of it."""
        place = {x: index for index, x in enumerate(self.order)}
        return tuple(sorted(self.edges, key=lambda edge: place[edge[0]]))

    @cached_property
    def on_device(self) -> tuple[tuple[int, ...], ...]:
        """[device, link] operations that run there, ascending."""
        found: list[list[int]] = [[] for _ in self.capacity]
        for operation, devices in enumerate(self.devices):
            for device in devices:
                found[device].append(operation)
        return tuple(map(tuple, found))

    @cached_property
    def work(self) -> tuple[int, ...]:
        """[device, link] ns of work per micro-batch."""
        return tuple(sum(self.durations[operation] for operation in operations) for operations in self.on_device)

    @cached_property
    def time_unit(self) -> int:
        """Greatest common divisor of all durations and lags, in ns: earliest starts are its multiples."""
        return math.gcd(*self.durations, *(lag for _, _, lag in self.edges)) or 1

    @cached_property
    def incoming(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """[operation] what it waits for: pairs (operation, lag in ns)."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.durations]
        for source, target, lag in self.edges:
            found[target].append((source, lag))
        return tuple(map(tuple, found))

    @cached_property
    def outgoing(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """[operation] what waits for it: pairs (operation, lag in ns)."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.durations]
        for source, target, lag in self.edges:
            found[source].append((target, lag))
        return tuple(map(tuple, found))

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """[operation] longest path from a micro-batch's first start to the operation's start, in ns."""
        heads = [0] * self.num_operations
        for source, target, lag in self.ordered_edges:
            heads[target] = max(heads[target], heads[source] + self.durations[source] + lag)
        return tuple(heads)

    @cached_property
    def tails(self) -> tuple[int, ...]:
        """[operation] longest path from the operation's end to a micro-batch's last end, in ns."""
        tails = [0] * self.num_operations
        for source, target, lag in reversed(self.ordered_edges):
            tails[source] = max(tails[source], lag + self.durations[target] + tails[target])
        return tuple(tails)

    @cached_property
    def stage_operations(self) -> tuple[tuple[int, ...], ...]:
        """[stage] its operations in the order they depend on each other: F, B or F, I, W."""
        found: list[list[int]] = [[] for _ in self.workload.stages]
        for index, operation in enumerate(self.workload.operations):
            found[operation.stage].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def one_last_forward(self) -> bool:
        """Whether each connected part of a micro-batch's graph has one forward that no other one follows."""
        part = list(range(self.num_operations))

        def find(operation: int) -> int:
            while part[operation] != operation:
                part[operation] = part[part[operation]]
                operation = part[operation]
            return operation

        forwards = {x for x, role in enumerate(self.roles) if role is Role.FORWARD}
        waits = [(source, target) for source, target, _ in self.workload.lags]
        last = forwards - {source for source, target in waits if target in forwards}
        for source, target in waits:
            part[find(target)] = find(source)
        return len({find(x) for x in last}) == len(last)

    def path(self, source: int, target: int) -> int:
        """Longest path from the start of one operation to the end of another in a micro-batch; -1 without one."""
        return self._paths[source][target]

    @cached_property
    def _paths(self) -> list[list[int]]:
        paths = []
        for source in range(self.num_operations):
            ends = [-1] * self.num_operations
            ends[source] = self.durations[source]
            for middle in self.order:
                if ends[middle] >= 0:
                    for target, lag in self.outgoing[middle]:
                        ends[target] = max(ends[target], ends[middle] + lag + self.durations[target])
            paths.append(ends)
        return paths

    def number_of(self, device: int) -> int:
        """What stands here for a device of the workload as it was given."""
        return device if self.reduction is None else self.reduction.groups[device]

    def needed_bytes(self, device: int) -> int:
        """What the device must hold at some moment of every schedule, beside its static memory.

        While an operation runs, everything is held that was taken by what it depends on and is given back by what
        depends on it.
        """
        here = [hold for hold in self.workload.holds if device in self.devices[hold.source]]
        return max(
            (
                self.workspace[x]
                + sum(hold.size for hold in here if self.path(hold.source, x) >= 0 and self.path(x, hold.target) >= 0)
                for x in self.on_device[device]
            ),
            default=0,
        )

    def _require_room(self) -> None:
        """Each device must have room for what every schedule needs."""
        for device, capacity in enumerate(self.capacity):
            if capacity is None:
                continue
            static, memory = self.workload.static_bytes(device), self.workload.devices[device].memory_bytes
            if capacity < 0:
                raise InfeasibleError(
                    f"{self._named(device)} has {format_bytes(memory or 0)}, but parameters, gradients and optimizer "
                    f"state take {format_bytes(static)}: {format_bytes(-capacity)} too much; raise --memory or "
                    "--devices"
                )
            needed = self.needed_bytes(device)
            if needed > capacity:
                raise InfeasibleError(
                    f"{self._named(device)} has {format_bytes(memory or 0)}, of which parameters, gradients and "
                    f"optimizer state take {format_bytes(static)}; one micro-batch needs {format_bytes(needed)} more, "
                    f"{format_bytes(needed - capacity)} too much; raise --memory to {format_bytes(static + needed)} "
                    "or --devices, or lower --microbatch-size"
                )

    def _named(self, device: int) -> str:
        """A device with its stages, as those who gave the workload know them."""
        given = self.workload if self.reduction is None else self.reduction.workload
        number = device if self.reduction is None else self.reduction.groups.index(device)
        stages = [f"stage {index}" for index, stage in enumerate(given.stages) if number in stage.devices]
        return f"device {number} ({', '.join(stages[:4])}{', ...' if len(stages) > 4 else ''})"
