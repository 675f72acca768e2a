"""One micro-batch of a workload, in the numbers a search needs.

Operations are numbered 0..n-1 as in the workload. All micro-batches are alike, so one micro-batch's operations and
dependencies say everything; the same operation of different micro-batches may be taken to run in micro-batch order
(Tessel, Property 4.1), since exchanging equal micro-batches changes nothing. A link that can be busy is one more device
after the others, without memory, and each message on it one more operation (the items of
:mod:`pipeplan.workload.workload`).

Where devices run the same stages, or micro-batches are not all alike, a search looks at a *reduced* workload:

* Devices that run the same stages do the same at the same time, so each such *group* is one device. Its memory is the
  least of its devices', and of the messages between two groups only the slowest counts.
* A *round* is the least number of samples, whole micro-batches of the plan, after which all stages begin one together.
  What a stage runs in a round becomes as many stages as it has micro-batches there, on the same devices. Parameters
  are held by the first of them. Messages take their time but no link.

Nothing is taken away that a schedule could use, so what is proved about the reduced workload holds for the workload.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.graphs import connected_parts
from pipeplan.time_limit import checked, checked_by
from pipeplan.units import format_bytes, rounded_up
from pipeplan.workload.elements import Dependency, Device, Hop, Operation, Stage
from pipeplan.workload.kinds import MemoryBytes, Role
from pipeplan.workload.memory import capacities
from pipeplan.workload.samples import Slots
from pipeplan.workload.task_graph import Orders
from pipeplan.workload.workload import Hold, Workload

_NO_WAY = -(2**62)
"""So many ns that they stay negative whatever a way adds."""


@dataclass(frozen=True)
class OneMicrobatch:
    """What may run when, for one micro-batch, and on what: a view of a workload in which all micro-batches are alike.

    ``capacity`` [device, link] bytes left beside parameters, gradients and optimizer, None without limit. Where devices
    do the same, or micro-batches are not all alike, ``workload`` is what ``reduction`` made of the given one.
    """

    workload: Workload
    capacity: tuple[int | None, ...]
    reduction: Reduction | None = None

    @classmethod
    def of(cls, workload: Workload, *, require_room: bool = True) -> OneMicrobatch:
        """One micro-batch of a workload.

        Raises:
            InfeasibleError: a device cannot hold its parameters, gradients and optimizer state, or cannot run
                a single micro-batch beside them; not without ``require_room``.
            UsageError: the workload has forwards in parts.
        """
        reduction = Reduction.of(workload)
        workload = workload if reduction is None else reduction.reduced
        problem = cls(
            workload, (*capacities(workload), *[None] * (workload.num_resources - len(workload.devices))), reduction
        )
        rank = workload.rank
        assert all(rank(source) < rank(target) for source, target, _ in problem.edges)
        if require_room:
            problem._require_room()
        return problem

    @cached_property
    def durations(self) -> tuple[int, ...]:
        """[operation] ns."""
        return self.workload.durations

    @cached_property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """[operation] the devices that run it together."""
        return self.workload.resources

    @cached_property
    def edges(self) -> tuple[tuple[int, int, int], ...]:
        """What waits for what: (source, target, lag in ns)."""
        return self.workload.edges

    @property
    def returns(self) -> tuple[tuple[int, int, int, int], ...]:
        """What waits for an earlier micro-batch: (source, target, lag in ns, how many micro-batches later)."""
        return self.workload.returns

    @cached_property
    def acquire(self) -> tuple[int, ...]:
        """[operation] bytes taken on each of its devices at its start; those of holds :meth:`apart` left out."""
        taken = [effect.acquire for effect in self.workload.effects]
        for hold in self.workload.holds:
            taken[hold.source] -= 0 if self.workload.is_local(hold) else hold.size
        return tuple(taken)

    @cached_property
    def release(self) -> tuple[int, ...]:
        """[operation] bytes given back at its end."""
        return tuple(effect.release for effect in self.workload.effects)

    @cached_property
    def workspace(self) -> tuple[int, ...]:
        """[operation] bytes held while it runs."""
        return tuple(effect.workspace for effect in self.workload.effects)

    def apart_on(self, device: int) -> list[Hold]:
        """What a device holds until actions have ended that others run, or several: its order does not tell when."""
        return self._apart_on.get(device, [])

    @cached_property
    def _apart_on(self) -> dict[int, list[Hold]]:
        found: dict[int, list[Hold]] = {}
        for hold in self.workload.holds:
            if hold.targets and not self.workload.is_local(hold):
                for device in self.workload.holders[hold.source]:
                    found.setdefault(device, []).append(hold)
        return found

    def holds_on(self, device: int) -> list[Hold]:
        """What a device holds until one action has ended; what waits for several, or for none, searches leave out."""
        return self._holds_on.get(device, [])

    def held_between(self, device: int) -> int:
        """Bytes that a device holds of each micro-batch between its forwards and its backwards."""
        return sum(
            hold.size
            for hold in self.holds_on(device)
            if self.roles[hold.source] is Role.FORWARD
            and self.roles[hold.target] in (Role.BACKWARD, Role.INPUT_GRAD, Role.WEIGHT_GRAD)
            and device in self.devices[hold.source]
            and device in self.devices[hold.target]
        )

    @cached_property
    def _holds_on(self) -> dict[int, list[Hold]]:
        found: dict[int, list[Hold]] = {}
        for hold in self.workload.holds:
            if len(hold.targets) == 1:
                for device in self.workload.holders[hold.source]:
                    found.setdefault(device, []).append(hold)
        return found

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
        """The operations, each after everything it waits for."""
        return self.workload.items_in_order

    @cached_property
    def on_device(self) -> tuple[tuple[int, ...], ...]:
        """[device, link] operations that run there, ascending."""
        return self.workload.on_resource

    @cached_property
    def work(self) -> tuple[int, ...]:
        """[device, link] ns of work per micro-batch."""
        return self.workload.work

    @cached_property
    def time_unit(self) -> int:
        """Greatest common divisor of all durations and lags, in ns: earliest starts are its multiples."""
        lags = (lag for _, _, lag, *_ in (*self.edges, *self.returns))
        return math.gcd(*self.durations, *lags) or 1

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
    def stage_operations(self) -> tuple[tuple[int, ...], ...]:
        """[stage] its operations in the order they depend on each other: F, B or F, I, W."""
        found: list[list[int]] = [[] for _ in self.workload.stages]
        for index, operation in enumerate(self.workload.operations):
            found[operation.stage].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def one_last_forward(self) -> bool:
        """Whether each connected part of a micro-batch's graph has one forward that no other one follows."""
        waits = [(source, target) for source, target, _ in self.workload.lags]
        forwards = {x for x, role in enumerate(self.roles) if role is Role.FORWARD}
        last = forwards - {source for source, target in waits if target in forwards}
        return all(len(part & last) <= 1 for part in connected_parts(last, waits))

    def path(self, source: int, target: int) -> int:
        """Longest path from the start of one operation to the end of another in a micro-batch; -1 without one."""
        begin, end = self._places[source], self._places[target]
        longest = self._longest
        if begin > end or longest.parts[source] != longest.parts[target]:
            return -1
        if longest.entered[source] <= longest.entered[target] < longest.left[source]:
            return max(-1, longest.ends[target] - longest.ends[source] + self.durations[source])
        return max(-1, int(self._paths[end, begin]))

    @cached_property
    def _longest(self) -> _LongestWays:
        return _LongestWays.of(self)

    @cached_property
    def _places(self) -> list[int]:
        """[operation] its place in :attr:`order`."""
        places = [0] * self.num_operations
        for place, operation in enumerate(self.order):
            places[operation] = place
        return places

    @cached_property
    def _paths(self) -> NDArray[np.int64]:
        """[place of the target, of the source]: of thousands of stages from all operations at once.

        Nothing is said of what is after a target in the order, which leads nowhere; what is negative is no way.
        """
        found = np.empty((self.num_operations, self.num_operations), dtype=np.int64)
        for place, target in enumerate(checked(self.order, 16)):
            own = found[place, : place + 1]
            own.fill(_NO_WAY)
            own[place] = self.durations[target]
            for source, lag in self.incoming[target]:
                before = self._places[source] + 1
                through = found[self._places[source], :before] + (lag + self.durations[target])
                np.maximum(own[:before], through, out=own[:before])
        return found

    def needed_bytes(self, device: int) -> int:
        """What the device must hold at some moment of every schedule, beside its static memory.

        While an operation runs, everything is held that was taken by what it depends on and is given back by what
        depends on it.
        """
        here = self.holds_on(device)
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
            static, memory = self.workload.static_bytes(device), self.workload.devices[device].usable_bytes
            static += self.workload.exchanged_bytes[device]
            if capacity < 0:
                raise InfeasibleError(
                    f"{self._named(device)} has {format_bytes(memory or 0)}, but parameters, gradients and optimizer "
                    f"state take {format_bytes(static)}: {format_bytes(-capacity)} too much; raise --memory to "
                    f"{format_bytes(rounded_up(static + self.needed_bytes(device)))}"
                )
            needed = self.needed_bytes(device)
            if needed > capacity:
                raise InfeasibleError(
                    f"{self._named(device)} has {format_bytes(memory or 0)}, of which parameters, gradients and "
                    f"optimizer state take {format_bytes(static)}; one micro-batch needs {format_bytes(needed)} more, "
                    f"{format_bytes(needed - capacity)} too much; raise --memory to "
                    f"{format_bytes(rounded_up(static + needed))}"
                )

    def _named(self, device: int) -> str:
        """A device with its stages, as those who gave the workload know them."""
        given = self.workload if self.reduction is None else self.reduction.workload
        number = device if self.reduction is None else self.reduction.groups.index(device)
        stages = [f"stage {index}" for index, stage in enumerate(given.stages) if number in stage.devices]
        return f"device {number} ({', '.join(stages[:4])}{', ...' if len(stages) > 4 else ''})"


@dataclass(frozen=True, slots=True)
class _LongestWays:
    """One longest way to each operation, as a tree: of those on it the way from one to another is the longest, too.

    In a chain all are on it, and nothing else has to be known. ``ends`` [operation] ns, if nothing else delays it.
    ``entered`` and ``left`` [operation]: when a walk through the tree comes to it, and when it has been to all that is
    behind it. ``parts`` [operation] are equal where edges join them, whichever way they point.
    """

    ends: list[int]
    entered: list[int]
    left: list[int]
    parts: list[int]

    @classmethod
    def of(cls, problem: OneMicrobatch) -> _LongestWays:
        """Those of a problem. Raises TimeUpError."""
        count = problem.num_operations
        ends, entered, left, parts = list(problem.durations), [0] * count, [0] * count, [0] * count
        behind: list[list[int]] = [[] for _ in range(count)]
        roots = []
        for target in checked(problem.order):
            ways = [(ends[source] + lag, source) for source, lag in problem.incoming[target]]
            if ways:
                arrival, last = max(ways)
                ends[target] += arrival
                behind[last].append(target)
            else:
                roots.append(target)
        moment = 0
        for root in roots:
            walk = [root]
            while walk:
                here = walk.pop()
                if here < 0:
                    left[~here] = moment
                    continue
                entered[here], moment = moment, moment + 1
                walk += [~here, *behind[here]]
        for number, part in enumerate(connected_parts(range(count), ((edge[0], edge[1]) for edge in problem.edges))):
            for operation in part:
                parts[operation] = number
        return cls(ends, entered, left, parts)


@dataclass(frozen=True, slots=True)
class Reduction:
    """A workload and what it was reduced to.

    ``groups`` [device of the workload] is the device of ``reduced`` that stands for it, or ``IDLE`` where it runs
    nothing: then it is no part of what is scheduled. ``copies`` [operation of the
    workload] is how many micro-batches it has in a round, ``firsts`` [operation] the number of the first of them among
    the operations of ``reduced``.
    """

    workload: Workload
    reduced: Workload
    groups: tuple[int, ...]
    copies: tuple[int, ...]
    firsts: tuple[int, ...]

    @classmethod
    def of(cls, workload: Workload) -> Reduction | None:
        """Reduce a workload; None where that changes nothing.

        Raises:
            UsageError: it has forwards in parts, which is what becomes of a schedule, not what one is searched for.
        """
        if any(stage.num_parted for stage in workload.stages):
            raise UsageError("a schedule is searched for whole micro-batches; leave out num_parted of the stages")
        if "reduction" not in workload.elsewhere:
            found = cls._found(workload)
            workload.elsewhere["reduction"] = found and (found.reduced, found.groups, found.copies, found.firsts)
        known = workload.elsewhere["reduction"]
        if known is None:
            return None
        reduced, *rest = known
        return cls(workload, reduced.with_microbatches(workload.mini_batch // reduced.microbatch_size), *rest)

    @classmethod
    def _found(cls, workload: Workload) -> Reduction | None:
        """The same, found out."""
        groups = _working(workload)
        num_groups = len(set(groups) - {IDLE})
        folded = workload if num_groups == len(groups) else _folded(workload, groups)
        ones = (1,) * len(workload.operations)
        if workload.is_uniform:
            firsts = tuple(range(len(ones) + 1))
            return None if folded is workload else cls(workload, folded, groups, ones, firsts)
        round_size = workload.microbatch_size * microbatches_per_round(workload)
        copies = tuple(round_size // slots.stride for slots in workload.slots[: len(ones)])
        expanded = _in_rounds(folded, round_size)
        return cls(workload, expanded, groups, copies, tuple(accumulate(copies, initial=0)))

    @property
    def microbatches_per_round(self) -> int:
        """How many of the workload's own micro-batches one of the reduced workload's is."""
        return self.reduced.microbatch_size // self.workload.microbatch_size

    def to_reduced(self, orders: Orders) -> list[list[int]]:
        """Orders of the workload's devices as those of the reduced workload's."""
        where = self._tasks()
        members = [self.groups.index(group) for group in range(len(self.reduced.devices))]
        return _numbered(where, [orders[device] for device in members])

    def from_reduced(self, orders: Orders) -> list[list[int]]:
        """Orders of the reduced workload's devices as those of the workload's."""
        tasks = self._tasks()
        back = np.empty_like(tasks)
        back[tasks] = np.arange(len(tasks))
        return _numbered(back, [[] if group == IDLE else orders[group] for group in self.groups])

    def _tasks(self) -> NDArray[np.int64]:
        """[task of the workload] the task of the reduced workload that it is."""
        count = self.reduced.num_microbatches
        numbers = {copies: np.arange(count * copies) for copies in {*self.copies}}
        found: NDArray[np.int64] = np.concatenate(
            [
                (first + numbers[copies] % copies) * count + numbers[copies] // copies
                for first, copies in zip(self.firsts, self.copies, strict=False)
            ]
        )
        return found


def _numbered(numbers: NDArray[np.int64], orders: Orders) -> list[list[int]]:
    """Orders of tasks that have other numbers."""
    return [numbers[np.array(order, dtype=np.int64)].tolist() for order in checked_by(orders, len, _AT_ONCE)]


IDLE = -1
"""The group of devices that run nothing."""

_AT_ONCE = 1 << 16
"""Tasks renumbered between two looks at the time."""


def microbatches_per_round(workload: Workload) -> int:
    """How many micro-batches of a workload are a round: one where all are alike."""
    if workload.is_uniform:
        return 1
    return math.lcm(workload.microbatch_size, *(slots.stride for slots in workload.slots)) // workload.microbatch_size


def num_working(workload: Workload) -> int:
    """How many groups of devices run something: of one, all run the same stages."""
    return len(set(_working(workload)) - {IDLE})


def _working(workload: Workload) -> tuple[int, ...]:
    """[device] the number of its group among those that run something."""
    busy = {device for stage in workload.stages for device in stage.devices}
    numbers: dict[int, int] = {}
    return tuple(
        numbers.setdefault(group, len(numbers)) if device in busy else IDLE
        for device, group in enumerate(device_groups(workload))
    )


def device_groups(workload: Workload) -> tuple[int, ...]:
    """[device] the number of its group: devices with the same stages have the same."""
    own: list[list[int]] = [[] for _ in workload.devices]
    for index, stage in enumerate(workload.stages):
        for device in stage.devices:
            own[device].append(index)
    numbers: dict[tuple[int, ...], int] = {}
    return tuple(numbers.setdefault(tuple(stages), len(numbers)) for stages in own)


def _folded(workload: Workload, groups: Sequence[int]) -> Workload:
    """One device for each group: it keeps what the one does that keeps most, slowed by sums as the most slowed is."""
    memory: list[list[int]] = [[] for _ in set(groups) - {IDLE}]
    slowed = [0.0] * len(memory)
    fullest: dict[int, int] = {}
    for device, (group, each) in enumerate(zip(groups, workload.devices, strict=True)):
        if group == IDLE:
            continue
        memory[group] += [] if each.usable_bytes is None else [each.usable_bytes]
        slowed[group] = max(slowed[group], each.contention)
        fullest[group] = max(fullest.get(group, device), device, key=workload.static_bytes)
    return replace(
        workload,
        devices=tuple(
            Device(memory_bytes=min(limits, default=None), contention=contention)
            for limits, contention in zip(memory, slowed, strict=True)
        ),
        stages=tuple(
            replace(stage, devices=tuple(sorted({groups[device] for device in stage.devices})))
            for stage in workload.stages
        ),
        dependencies=tuple(_folded_dependency(dependency, groups) for dependency in workload.dependencies),
        tied=tuple(
            replace(each, devices=tuple(_members(devices, groups, fullest) for devices in each.devices))
            for each in workload.tied
        ),
    )


def _members(devices: Iterable[int], groups: Sequence[int], chosen: Mapping[int, int]) -> tuple[int, ...]:
    """The groups of those devices that are chosen for theirs."""
    return tuple(groups[device] for device in devices if chosen[groups[device]] == device)


def _folded_dependency(dependency: Dependency, groups: Sequence[int]) -> Dependency:
    """Between two groups the slowest message; inside one it takes no link."""
    slowest: dict[tuple[int, int], Hop] = {}
    for hop in dependency.hops:
        ends = groups[hop.source_device], groups[hop.target_device]
        if ends not in slowest or slowest[ends].duration_ns < hop.duration_ns:
            slowest[ends] = hop
    hops = tuple(
        replace(_over_free_link(hop) if ends[0] == ends[1] else hop, source_device=ends[0], target_device=ends[1])
        for ends, hop in slowest.items()
    )
    return replace(dependency, hops=hops)


def _in_rounds(workload: Workload, round_size: int) -> Workload:
    """As many stages for each as it has micro-batches in a round."""
    per_stage = [round_size // (stage.microbatch_size * workload.num_routes) for stage in workload.stages]
    firsts = [0, *accumulate(per_stage)]
    return replace(
        workload,
        num_microbatches=workload.mini_batch // round_size,
        microbatch_size=round_size,
        num_routes=1,
        stages=tuple(
            _copy(stage, round_size, index)
            for stage, count in zip(workload.stages, per_stage, strict=True)
            for index in range(count)
        ),
        operations=tuple(
            _moved(operation, firsts[operation.stage] + index)
            for operation in workload.operations
            for index in range(per_stage[operation.stage])
        ),
        dependencies=_dependencies(workload, round_size, firsts),
        tied=tuple(
            replace(each, stages=tuple(firsts[stage] for stage in each.stages)) for each in workload.tied
        ),  # the first of a stage's copies has its parameters
    )


def _moved(operation: Operation, stage: int) -> Operation:
    return operation if operation.stage == stage else replace(operation, stage=stage)


def _copy(stage: Stage, round_size: int, index: int) -> Stage:
    """A stage for one of its micro-batches in a round; the first has its parameters.

    The others have its buckets, too: a sum waits for the last action of all of them.
    """
    copy = replace(stage, microbatch_size=round_size, route=0)
    if index == 0:
        return copy
    return replace(copy.with_state(MemoryBytes()), sync_ns=0, step_ns=0, gather_ns=0, block_groups=())


def _dependencies(workload: Workload, round_size: int, stage_firsts: Sequence[int]) -> tuple[Dependency, ...]:
    """Between micro-batches of a round that share samples."""
    position = {operation.id: index for index, operation in enumerate(workload.operations)}
    assert not workload.returns, "what returns is between micro-batches that are all alike"
    found: list[Dependency] = []
    rounds = {slots: _in_round(slots, round_size) for slots in {*workload.slots[: len(position)]}}
    for dependency in checked(workload.dependencies, 64):
        source, target = position[dependency.source], position[dependency.target]
        own, others = (rounds[workload.slots[end]] for end in (source, target))
        hops = tuple(_over_free_link(hop) for hop in dependency.hops)
        found += [
            Dependency(
                source=_id(workload, source, stage_firsts, index),
                target=_id(workload, target, stage_firsts, other),
                hops=hops,
                source_part=dependency.source_part,
                target_part=dependency.target_part,
            )
            for index in range(len(own))
            for other in others.sharing(own.samples(index))
        ]
    return tuple(found)


def _in_round(slots: Slots, round_size: int) -> Slots:
    return replace(slots, count=round_size // slots.stride)


def _id(workload: Workload, operation: int, stage_firsts: Sequence[int], index: int) -> str:
    found = workload.operations[operation]
    return f"{stage_firsts[found.stage] + index}{found.kind}"


def _over_free_link(hop: Hop) -> Hop:
    """The message without the link: of its micro-batches none has to wait for another."""
    return replace(hop, latency_ns=hop.duration_ns, occupancy_ns=0, every=1, run=1, first=0)
