"""Workload: everything that runs in one iteration, before a schedule says when.

A plan is a workload with a schedule. Planners take a workload, simulation replays one in a given order.

A *link* leads from one device to another and carries one message at a time, for the message's occupancy. Where
messages may have to wait for it, they are *transfers*: things to run as operations are, on links instead of devices.
Operations and transfers together are *items*, numbered: first the operations, then the transfers. Links
are numbered after the devices.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, compress
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from pipeplan.errors import InvalidPlanError
from pipeplan.graphs import longest_paths
from pipeplan.workload.action import Action
from pipeplan.workload.elements import (
    Dependency,
    Device,
    Hop,
    Operation,
    Players,
    Stage,
    TiedState,
    slots_of,
    speeds_of,
)
from pipeplan.workload.folding import each_played, num_playing, of_devices
from pipeplan.workload.kinds import (
    ACTIVATIONS,
    GRADIENT_ROLES,
    KEPT_KINDS,
    MemoryBytes,
    MemoryKind,
    Resource,
    Role,
    is_instruction,
    kind_of,
    payload_of,
)
from pipeplan.workload.network_jobs import NetworkJob, gathers_of, gradient_sums, steps_of
from pipeplan.workload.samples import Slots, size_in_words


@dataclass(frozen=True, slots=True)
class Transfer:
    """The messages of one hop on a link where they may have to wait: those of the source's micro-batches that go there.

    ``source`` and ``target`` number the operations at its ends, ``link`` is a number in :attr:`Workload.links`.
    """

    source: int
    target: int
    link: int
    hop: Hop


@dataclass(frozen=True, slots=True)
class Hold:
    """``size`` bytes kept for every micro-batch on each device of ``source``, an operation.

    From the start of its action on, to the end of the last of the actions of ``targets`` for that micro-batch; to the
    end of the iteration where there are none.
    """

    kind: MemoryKind
    size: int
    source: int
    targets: tuple[int, ...]

    @property
    def target(self) -> int:
        """The target of a hold that has only one."""
        (target,) = self.targets
        return target


Value = TypeVar("Value", covariant=True)


class lasting(cached_property[Value]):
    """A cached property of a workload that is the same whatever its number of micro-batches."""


class Effect(NamedTuple):
    """What an action does to each of its devices, in bytes: allocated at its start, workspace, freed at its end.

    The first ``num_parts`` actions of an operation run half a micro-batch each, and allocate half; ``release`` is what
    it frees as the only target of holds on its own devices.
    """

    acquire: int
    workspace: int
    release: int
    num_parts: int


@dataclass(frozen=True)
class Workload:
    """Stages on devices, their operations and dependencies, and how many micro-batches flow through.

    ``operations`` are ordered so that dependencies point forward. ``tied`` is what stages share of their state.
    ``sum_order`` are the numbers of :attr:`gradient_sums` in the order in which networks run them; empty: as they
    become ready. With ``players`` it is folded (:mod:`pipeplan.workload.folding`): ``devices``, and what stands on
    them, are programs, each of which as many devices play, or any number if no stage is on it.
    """

    name: str
    placement: str
    num_microbatches: int
    microbatch_size: int
    devices: tuple[Device, ...]
    stages: tuple[Stage, ...]
    operations: tuple[Operation, ...]
    dependencies: tuple[Dependency, ...]
    num_routes: int = 1
    tied: tuple[TiedState, ...] = ()
    sum_order: tuple[int, ...] = ()
    players: tuple[Players, ...] = ()

    @property
    def num_devices(self) -> int:
        """Devices of which there may be more than programs."""
        return num_playing(self.players) if self.players else len(self.devices)

    @property
    def players_each(self) -> int:
        """How many devices play each program that a stage is on; 1 where every device has its own."""
        return each_played(self.players, self.stages)

    @lasting
    def playing_each(self) -> tuple[int, ...]:
        """[program] how many devices play it; 1 where every device has its own."""
        return tuple(own.count for own in self.players) or (1,) * len(self.devices)

    def of_all(self, said: Iterable[int]) -> int:
        """The sum over all devices of what is ``said`` [program]."""
        return sum(each * count for each, count in zip(said, self.playing_each, strict=True))

    def playing(self, programs: Iterable[int]) -> list[int]:
        """The devices that play these programs, ascending; without players programs are devices."""
        if not self.players:
            return sorted(programs)
        return sorted(chain.from_iterable(self.players[program].devices for program in programs))

    def first_playing(self, program: int) -> int:
        """The first device that plays a program."""
        return self.players[program].first if self.players else program

    def with_microbatches(self, num_microbatches: int) -> Workload:
        """The same for another number of micro-batches, which knows already what of it does not depend on that."""
        found, known = replace(self, num_microbatches=num_microbatches), {"elsewhere": self.elsewhere, **self.__dict__}
        names = (name for name in known if isinstance(vars(Workload).get(name), lasting))
        found.__dict__.update((name, known[name]) for name in names)
        if "ways_to_sum" in self.__dict__:
            ways = (found if way is self else way.with_microbatches(num_microbatches) for way in self.ways_to_sum)
            found.__dict__["ways_to_sum"] = tuple(ways)
        return found

    @property
    def device_speeds(self) -> list[float]:
        """[device] how much it computes in the time in which one that the profile's times are of computes 1."""
        return of_devices(self.players, speeds_of(self.stages, len(self.devices)))

    @property
    def mini_batch(self) -> int:
        """Samples in one iteration."""
        return self.num_microbatches * self.microbatch_size

    @property
    def samples_per_replica(self) -> tuple[int, int]:
        """The least and the most samples of a stage's micro-batch that one of its replicas has."""
        shares = [stage.microbatch_size // stage.replicas for stage in self.stages if stage.blocks]
        return min(shares, default=self.microbatch_size), max(shares, default=self.microbatch_size)

    @property
    def microbatch_words(self) -> str:
        """The size of a micro-batch in words, as :func:`pipeplan.workload.samples.size_in_words` says it."""
        replicated = any(stage.replicas > 1 for stage in self.stages)
        return size_in_words(self.microbatch_size, self.samples_per_replica if replicated else None)

    def static_bytes(self, device: int) -> int:
        """State that a device keeps throughout."""
        return self.states[device].total

    @lasting
    def states(self) -> tuple[MemoryBytes, ...]:
        """[device] the state that it keeps throughout, by kind, and what a decode step's requests have cached."""
        found = [MemoryBytes()] * len(self.devices)
        for stage in self.stages:
            state = stage.state + stage.cached
            for device in stage.devices:
                found[device] += state
        for each in self.tied:
            state = each.state
            for device, stages in Counter(chain.from_iterable(each.devices)).items():
                found[device] -= state * (stages - 1)
        return tuple(found)

    @lasting
    def leaders(self) -> tuple[int, ...]:
        """[device] the first device with the same stages: whatever one of them does all of them do."""
        return self._first_with([stage.devices for stage in self.stages])

    @lasting
    def tail_leaders(self) -> tuple[int, ...]:
        """[device] the same of what follows the actions: the first with the same stages and the same tied sums.

        Each part of a tied table is summed by other devices of a stage, and in an order with the stage's own sum.
        """
        summed = [each.all_devices for each in self.tied if each.sync_ns]
        return self._first_with([*(stage.devices for stage in self.stages), *summed]) if summed else self.leaders

    def _first_with(self, having: Iterable[Iterable[int]]) -> tuple[int, ...]:
        """[device] the first device that is in the same of these."""
        own: list[list[int]] = [[] for _ in self.devices]
        for number, devices in enumerate(having):
            for device in devices:
                own[device].append(number)
        first: dict[tuple[int, ...], int] = {}
        return tuple(first.setdefault(tuple(each), device) for device, each in enumerate(own))

    @lasting
    def gradient_sums(self) -> tuple[NetworkJob, ...]:
        """The sums of gradients that take time: those of stages, by the first of them, then those of what is tied.

        Their devices are only the :attr:`tail_leaders`.
        """
        return self._led(gradient_sums(self.stages, self.tied))

    @lasting
    def gathers(self) -> tuple[NetworkJob, ...]:
        """The gatherings of stages' updated parameters that take time; their devices are only the
        :attr:`tail_leaders`."""
        return self._led(gathers_of(self.stages))

    def _led(self, jobs: Sequence[NetworkJob]) -> tuple[NetworkJob, ...]:
        found: dict[tuple[int, ...], tuple[int, ...]] = {}
        for each in jobs:
            if each.devices not in found:
                found[each.devices] = tuple(device for device in each.devices if self.tail_leaders[device] == device)
        return tuple(
            each if found[each.devices] == each.devices else replace(each, devices=found[each.devices]) for each in jobs
        )

    @lasting
    def steps_ns(self) -> tuple[int, ...]:
        """[device] ns of the optimizer's steps of all its stages."""
        return steps_of(self.stages, len(self.devices))

    @lasting
    def least_after(self) -> tuple[int, ...]:
        """[operation] ns between the end of any of its actions and the iteration's end, at least, whatever runs when.

        Every device of the action still has all steps of its stages to come, and then the gathers that its network
        takes one after another. If the action adds to gradients no sum that its stage is in has begun earlier than it
        may before the action's end, nor do these overlap on a network, and they end before that device's steps: those
        that may begin last have all of their time from the first of these moments on. In buckets or not, whatever is
        less.
        """
        if not self.has_tail:
            return (0,) * len(self.operations)
        later = list(self.steps_ns)
        for each in self.gathers:
            for device in each.devices:
                later[device] += each.duration_ns
        sums = [way.least_sums for way in self.ways_to_sum]
        return tuple(
            max(
                later[d] + min(way[each.stage][d] for way in sums) * (each.role in GRADIENT_ROLES)
                for d in self.stages[each.stage].devices
                if self.tail_leaders[d] == d
            )
            for each in self.operations
        )

    @lasting
    def least_sums(self) -> tuple[Counter[int], ...]:
        """[stage][leader] ns that the sums of a stage take there at least, after an action that adds to gradients."""
        found = tuple(Counter[int]() for _ in self.stages)
        left = tuple(Counter[int]() for _ in self.stages)
        ahead = [
            (ahead, each, n) for each in self.gradient_sums for n, ahead in zip(each.stages, each.ahead_ns, strict=True)
        ]
        for ns, each, stage in sorted(ahead, key=itemgetter(0)):
            for device in each.devices:
                left[stage][device] += each.duration_ns
                found[stage][device] = max(found[stage][device], left[stage][device] - ns)
        return found

    @cached_property
    def ways_to_sum(self) -> tuple[Workload, ...]:
        """The workload whose gradients are summed all at once for each stage, and itself where it has buckets.

        A search takes whichever is better; a plan says it.
        """
        if not any(stage.buckets for stage in self.stages):
            return (self,)
        return replace(self, stages=tuple(replace(stage, buckets=()) for stage in self.stages)), self

    @lasting
    def least_after_all(self) -> int:
        """Ns between the end of the last action of all and the iteration's end, at least.

        That action adds to gradients, as such an action follows every other of its stage; or its stage has none.
        """
        adding = {each.stage for each in self.operations if each.role in GRADIENT_ROLES}
        last = (each.role in GRADIENT_ROLES or each.stage not in adding for each in self.operations)
        return min(compress(self.least_after, last))

    @lasting
    def has_tail(self) -> bool:
        """Whether anything follows the last actions (:mod:`pipeplan.workload.tail`)."""
        return bool(self.exchanges or self.gradient_sums or self.gathers or any(self.steps_ns))

    @lasting
    def exchanges(self) -> bool:
        """Whether actions of programs exchange what replicas divide (:mod:`pipeplan.workload.exchanges`)."""
        return any(stage.block_groups for stage in self.stages)

    @lasting
    def exchanged_bytes(self) -> tuple[int, ...]:
        """[device] bytes that these actions have whole at most, beside state; searches leave so much room."""
        found = [0] * len(self.devices)
        for stage in self.stages:
            for device in stage.devices if stage.block_groups else ():
                found[device] += sum(each.gathered_bytes + each.reduced_bytes for each in stage.block_groups)
        return tuple(found)

    @lasting
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
        if self.has_parts:  # of which some are sent before the action that makes them ends
            left = {source: self._left(source) for source in sources}
            least = min(least - left[one] + min(left.values()) for one in sources) if len(sources) > 1 else least
        return len(sources) < len(messages) or max(occupancy for _, occupancy in messages) > least

    @lasting
    def transfers(self) -> tuple[Transfer, ...]:
        """The hops that occupy one of the links, in the order of the dependencies."""
        number = {link: index for index, link in enumerate(self.links)}
        return tuple(
            Transfer(source, target, number[hop.source_device, hop.target_device], hop)
            for source, target, hop in self._occupying_hops()
            if (hop.source_device, hop.target_device) in number
        )

    @lasting
    def item_of(self) -> dict[tuple[int, int, Hop], int]:
        """{(source operation, target operation, hop): item} of the transfers."""
        numbered = enumerate(self.transfers, len(self.operations))
        return {(transfer.source, transfer.target, transfer.hop): item for item, transfer in numbered}

    def _occupying_hops(self) -> Iterator[tuple[int, int, Hop]]:
        """(operation, operation, hop) of each message that occupies a link."""
        for source, target, dependency in self._ends:
            yield from ((source, target, hop) for hop in dependency.hops if hop.occupancy_ns and not dependency.later)

    @lasting
    def _position(self) -> dict[str, int]:
        return {operation.id: index for index, operation in enumerate(self.operations)}

    @lasting
    def _ends(self) -> tuple[tuple[int, int, Dependency], ...]:
        """Those of one micro-batch: :attr:`returns` are the others."""
        return tuple((self._position[d.source], self._position[d.target], d) for d in self.dependencies if not d.later)

    @lasting
    def returns(self) -> tuple[tuple[int, int, int, int], ...]:
        """What waits for an earlier micro-batch: (operation, operation, lag in ns, how many micro-batches later).

        Also the operations that keep a pace, each for itself.
        """
        position = self._position
        later = ((position[d.source], position[d.target], d.lag_ns, d.later) for d in self.dependencies if d.later)
        return (*later, *((x, x, self.operations[x].wait_ns, 1) for x in self.paced))

    @lasting
    def paced(self) -> tuple[int, ...]:
        """The operations that keep a pace."""
        return tuple(x for x, each in enumerate(self.operations) if each.pace_ns is not None)

    @lasting
    def step_microbatches(self) -> int:
        """Micro-batches of one decode step of all requests, after which all that returns meets itself; 1 without."""
        return math.lcm(*(later for *_, later in self.returns))

    @lasting
    def num_resources(self) -> int:
        """Devices, links on which messages may have to wait, and networks of devices."""
        return len(self.devices) + len(self.links) + len(self.networks)

    @lasting
    def networks(self) -> tuple[int, ...]:
        """Devices on whose network operations run, beside their compute; ascending. They are resources after the links.

        Schedulers and replays know them; programs of plans do not yet.
        """
        there = [each for each in self.operations if kind_of(each.kind).resource is Resource.NETWORK]
        return tuple(sorted({device for each in there for device in self.stages[each.stage].devices}))

    @lasting
    def durations(self) -> tuple[int, ...]:
        """[item] ns that it takes its devices, or its link, for a whole micro-batch."""
        compute = tuple(operation.duration_ns for operation in self.operations)
        return compute + tuple(transfer.hop.occupancy_ns for transfer in self.transfers)

    @lasting
    def part_durations(self) -> tuple[int, ...]:
        """[item] ns that one of two parts of a micro-batch takes, where it runs in parts."""
        compute = tuple(operation.part_ns or 0 for operation in self.operations)
        return compute + tuple(transfer.hop.part_occupancy_ns for transfer in self.transfers)

    @lasting
    def resources(self) -> tuple[tuple[int, ...], ...]:
        """[item] what it occupies: its devices, or their networks, or the number of its link after the devices."""
        if not self.networks:
            return self.holders
        number = {device: len(self.devices) + len(self.links) + index for index, device in enumerate(self.networks)}
        compute = tuple(
            devices if kind_of(each.kind).resource is Resource.COMPUTE else tuple(number[device] for device in devices)
            for each, devices in zip(self.operations, self.holders, strict=False)
        )
        return compute + self.holders[len(compute) :]

    @lasting
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """[item] whose memory it takes: its devices', or that of its link, which has none."""
        compute = tuple(self.stages[operation.stage].devices for operation in self.operations)
        return compute + tuple((len(self.devices) + transfer.link,) for transfer in self.transfers)

    @lasting
    def entries(self) -> int:
        """How many each micro-batch has in the programs of all devices together, computing and messages."""
        computing = sum(map(len, self.holders[: len(self.operations)]))
        return computing + sum(2 * len(dependency.hops) for dependency in self.dependencies)

    @lasting
    def on_resource(self) -> tuple[tuple[int, ...], ...]:
        """[device, link] the items that run there, ascending."""
        found: list[list[int]] = [[] for _ in range(self.num_resources)]
        for item, resources in enumerate(self.resources):
            for resource in resources:
                found[resource].append(item)
        return tuple(map(tuple, found))

    @lasting
    def work(self) -> tuple[int, ...]:
        """[device, link] ns of work for one whole micro-batch."""
        return tuple(sum(self.durations[item] for item in items) for items in self.on_resource)

    @lasting
    def idle_programs(self) -> tuple[int, ...]:
        """Programs, or devices without players, on which no stage stands, ascending."""
        used = {device for stage in self.stages for device in stage.devices}
        return tuple(device for device in range(len(self.devices)) if device not in used)

    @property
    def idle_devices(self) -> tuple[int, ...]:
        """Devices on which no stage stands, ascending."""
        return tuple(self.playing(self.idle_programs))

    @lasting
    def work_of_stages(self) -> tuple[int, ...]:
        """[stage] ns of its operations for one micro-batch, on each of its devices."""
        work = [0] * len(self.stages)
        for operation in self.operations:
            work[operation.stage] += operation.duration_ns
        return tuple(work)

    @cached_property
    def slots(self) -> tuple[Slots, ...]:
        """[item] which samples each of its actions, or messages, holds."""
        compute = tuple(
            slots_of(self.stages[operation.stage], operation.kind, self.mini_batch, self.num_routes)
            for operation in self.operations
        )
        return compute + tuple(
            _messages(compute[transfer.source], compute[transfer.target], transfer.hop) for transfer in self.transfers
        )

    def messages(self, dependency: Dependency, hop: Hop) -> Slots:
        """Which samples each message of a hop is about."""
        source, target = (self._position[id_] for id_ in (dependency.source, dependency.target))
        found = _messages(self.slots[source], self.slots[target], hop)
        return replace(found, count=max(0, found.count - dependency.later)) if dependency.later else found

    def work_of(self, item: int) -> int:
        """Ns that all actions, or messages, of an item take."""
        slots = self.slots[item]
        whole = (len(slots) - 2 * slots.num_parted) * self.durations[item]
        return whole + 2 * slots.num_parted * self.part_durations[item]

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all micro-batches are alike: one size, one route, no parts, no counts of their own."""
        whole = Slots(self.microbatch_size, self.microbatch_size, 0, self.num_microbatches)
        return not self.needs and all(slots == whole for slots in self.slots)

    @lasting
    def splits_backward(self) -> bool:
        """Whether some stage runs input and weight gradients apart."""
        return any(operation.role is Role.WEIGHT_GRAD for operation in self.operations)

    @lasting
    def is_inference(self) -> bool:
        """Whether it runs forwards alone, and instructions between them."""
        return all(operation.role in (Role.FORWARD, Role.CUSTOM) for operation in self.operations)

    @lasting
    def stage_edges(self) -> tuple[tuple[int, int], ...]:
        """(stage, stage) of forwards that wait for forwards."""
        return tuple(
            (each.source_stage, each.target_stage)
            for each in self.dependencies
            if each.source_role is each.target_role is Role.FORWARD
        )

    @lasting
    def stage_depths(self) -> tuple[int, ...]:
        """[stage] how many stages come before it, on the longest way."""
        stages = range(len(self.stages))
        depths = longest_paths(stages, ((source, target, 1) for source, target in self.stage_edges))
        return tuple(depths.values())

    @lasting
    def needs(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """{(source, target)} of dependencies that count: for each action of the target, how many of the source's."""
        return {(source, target): each.needs for source, target, each in self._ends if each.needs is not None}

    def inputs_of(self, source: int, target: int, number: int) -> range:
        """The actions, or messages, of item ``source`` that an action of item ``target`` waits for."""
        needs = self.needs.get((source, target))
        if needs is not None:
            return range(needs[number])
        own, others = self.slots[target], self.slots[source]
        return range(number, number + 1) if own == others else others.sharing(own.samples(number))

    @lasting
    def holds(self) -> tuple[Hold, ...]:
        """Everything that actions hold beside workspace, whatever it is for: what is acquired, what stages keep.

        Raises InvalidPlanError where an operation gives back more than is held.
        """
        own: list[list[int]] = [[] for _ in self.stages]
        for x, operation in enumerate(self.operations):
            own[operation.stage].append(x)
        kept = [self._kept(stage, numbers[0]) for stage, numbers in zip(self.stages, own, strict=True) if numbers]
        acquired = self._given_on() if self.is_inference else chain(*map(self._acquired, own))
        return tuple(chain(acquired, *kept))

    def _given_on(self) -> Iterator[Hold]:
        """What forwards alone give: each holds it until the last that waits for it has ended, wherever that runs.

        Of those that wait, one that another one waits for in turn ends before that; without any it is held while it is
        made.
        """
        takers: list[set[int]] = [set() for _ in self.operations]
        after: list[set[int]] = [set() for _ in self.operations]
        for source, target, _ in self._ends:
            takers[source].add(target)
        for x in reversed(range(len(self.operations))):
            after[x] = takers[x].union(*(after[taker] for taker in takers[x]))
            if size := self.operations[x].acquire_bytes:
                last = (taker for taker in sorted(takers[x]) if after[taker].isdisjoint(takers[x]))
                yield Hold(ACTIVATIONS, size, x, tuple(last) or (x,))

    def is_local(self, hold: Hold) -> bool:
        """Whether one action gives it back, on the devices that hold it, so that their order says when."""
        return len(hold.targets) == 1 and self.holders[hold.target] == self.holders[hold.source]

    def _acquired(self, operations: list[int]) -> Iterator[Hold]:
        """What a stage's operations acquire and release; of what a stage holds, the oldest is given back first.

        One micro-batch of a stage takes in F (and I) and gives back in B, or in I and W.
        """
        open_: list[list[int]] = []  # [operation, bytes left]
        for x in operations:
            operation = self.operations[x]
            if operation.acquire_bytes:
                open_.append([x, operation.acquire_bytes])
            left = operation.release_bytes
            while left:
                if not open_:
                    raise InvalidPlanError(
                        f"{operation.id} gives back {left} bytes more than stage {operation.stage} "
                        "has taken by then; lower its release_bytes, or raise acquire_bytes before it"
                    )
                given = min(left, open_[0][1])
                yield Hold(ACTIVATIONS, given, open_[0][0], (x,))
                left -= given
                open_[0][1] -= given
                if open_[0][1] == 0:
                    open_.pop(0)
        yield from (Hold(ACTIVATIONS, size, x, ()) for x, size in open_)

    def _kept(self, stage: Stage, first: int) -> Iterator[Hold]:
        """What a stage keeps for a micro-batch, from its first operation to the last ones on the stage's devices."""
        if not stage.kept.total:
            return
        near = [each.route == stage.route and not set(stage.devices).isdisjoint(each.devices) for each in self.stages]
        sizes = {(each.num_parted, each.microbatch_size) for each in compress(self.stages, near)}
        if sizes != {(0, stage.microbatch_size)}:
            raise InvalidPlanError("where a stage keeps memory, all stages need its micro-batch size, and no parts")
        there = {x for x, operation in enumerate(self.operations) if near[operation.stage]}
        before: set[int] = set()
        for source, target, _ in sorted(self._ends, key=itemgetter(0), reverse=True):
            if target in there or target in before:
                before.add(source)
        yield from (Hold(kind, stage.kept[kind], first, tuple(sorted(there - before))) for kind in KEPT_KINDS)

    @lasting
    def order_tells_memory(self) -> bool:
        """Whether what a device holds follows from its order: all it holds is activations that it gives back itself."""
        return not (self.networks or self.exchanges) and all(
            hold.kind is ACTIVATIONS and (not hold.targets or self.is_local(hold)) for hold in self.holds
        )

    @cached_property
    def effects(self) -> tuple[Effect, ...]:
        """[item] what each of its actions does to the memory of its devices; nothing where it is a transfer."""
        acquire, release = [0] * len(self.operations), [0] * len(self.operations)
        for hold in self.holds:
            acquire[hold.source] += hold.size
            if self.is_local(hold):
                release[hold.target] += hold.size
        workspace = [operation.workspace_bytes for operation in self.operations]
        num_parts = [2 * slots.num_parted for slots in self.slots]
        found = map(Effect, acquire, workspace, release, num_parts)
        return (*found, *[Effect(0, 0, 0, 0)] * len(self.transfers))

    @lasting
    def instructions(self) -> tuple[Operation, ...]:
        """The operations of kinds other than F, B, I and W."""
        return tuple(operation for operation in self.operations if is_instruction(operation.kind))

    @lasting
    def has_parts(self) -> bool:
        """Whether some action may wait inside for a message, or send one before it ends."""
        return any(dependency.has_parts for dependency in self.dependencies)

    def _overlap(self, source: int, target: int, dependency: Dependency) -> tuple[int, int]:
        """How long before its source's end a message leaves, and how long after its target's start it is needed."""
        if not dependency.has_parts:
            return 0, 0
        left = self.operations[source].left_ns(dependency.source_part)
        return left, self.operations[target].begin_ns(dependency.target_part)

    @lasting
    def made_ns(self) -> dict[tuple[int, int], int]:
        """{(operation, operation): ns after the first one's start at which what the other needs of it is made}."""
        return {
            (source, target): self.operations[source].duration_ns - self._overlap(source, target, dependency)[0]
            for source, target, dependency in self._ends
        }

    def _left(self, source: int) -> int:
        """How long before an operation's end its first message leaves, at most."""
        return max((self._overlap(one, other, each)[0] for one, other, each in self._ends if one == source), default=0)

    @lasting
    def lags(self) -> tuple[tuple[int, int, int], ...]:
        """What waits for what where every link is free: (operation, operation, lag in ns).

        A lag is negative where the source goes on after what is needed has left, or the target begins before it needs
        it: an action starts so late that none of its parts has to wait.
        """
        return tuple(
            (source, target, dependency.lag_ns - sum(self._overlap(source, target, dependency)))
            for source, target, dependency in self._ends
        )

    @lasting
    def edges(self) -> tuple[tuple[int, int, int], ...]:
        """What waits for what: (item, item, lag in ns). A transfer stands between the operations at its ends."""
        found: list[tuple[int, int, int]] = []
        for source, target, dependency in self._ends:
            alike = all(hop.run == hop.every for hop in dependency.hops)  # else some pairs have no message between them
            free = [hop.duration_ns for hop in (self._free_hops(dependency) if alike else dependency.hops)]
            if free or not dependency.hops:
                overlap = sum(self._overlap(source, target, dependency))
                found.append((source, target, max(free, default=0) - overlap))
        overlaps = {(source, target): self._overlap(source, target, each) for source, target, each in self._ends}
        for item, transfer in enumerate(self.transfers, len(self.operations)):
            left, begun = overlaps[transfer.source, transfer.target]
            found.append((transfer.source, item, -left))
            found.append((item, transfer.target, transfer.hop.latency_ns - begun))
        return tuple(found)

    @cached_property
    def part_lags(self) -> dict[tuple[int, int], int]:
        """{(operation, operation): lag in ns} of the edges between them where both run a micro-batch in parts."""
        return {
            (source, target): max((hop.part_ns for hop in self._free_hops(dependency)), default=0)
            for source, target, dependency in self._ends
            if self.slots[source].num_parted and self.slots[target].num_parted
        }

    @cached_property
    def least_durations(self) -> tuple[int, ...]:
        """[item] ns that its shortest action takes: a part, where it runs some micro-batches in parts."""
        timed = zip(self.durations, self.part_durations, self.slots, strict=True)
        return tuple(min(whole, part or whole) if slots.num_parted else whole for whole, part, slots in timed)

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """[item] longest path in ns from a micro-batch's first start to the item's start, whatever runs elsewhere.

        A dependency that counts is on the path if every action of its target waits for one of its source.
        """
        paths = longest_paths(
            self.items_in_order,
            (
                (source, target, self.least_durations[source] + self.part_lags.get((source, target), lag))
                for source, target, lag in self.edges
                if min(self.needs.get((source, target), (1,))) > 0
            ),
        )
        return tuple(paths[item] for item in range(len(paths)))

    @cached_property
    def tails(self) -> tuple[int, ...]:
        """[item] longest path in ns from the item's end to a micro-batch's last end, and what follows that at least.

        A dependency that counts is on the path if some action of its target waits for all of its source.
        """
        paths = longest_paths(
            self.items_in_order[::-1],
            (
                (target, source, self.least_durations[target] + self.part_lags.get((source, target), lag))
                for source, target, lag in self.edges
                if max(self.needs.get((source, target), (len(self.slots[source]),))) >= len(self.slots[source])
            ),
            dict(enumerate(self.least_after)),
        )
        return tuple(paths[item] for item in range(len(paths)))

    @lasting
    def items_in_order(self) -> tuple[int, ...]:
        """The items, each after everything it waits for."""
        return tuple(sorted(range(len(self.durations)), key=self.rank))

    @lasting
    def elsewhere(self) -> dict[str, Any]:
        """What other modules found out about it that is the same whatever its number of micro-batches."""
        return {}

    @lasting
    def _busy_links(self) -> frozenset[tuple[int, int]]:
        return frozenset(self.links)

    def _free_hops(self, dependency: Dependency) -> list[Hop]:
        """Messages that never wait for their link."""
        return [
            hop
            for hop in dependency.hops
            if not hop.occupancy_ns or (hop.source_device, hop.target_device) not in self._busy_links
        ]

    def rank(self, item: int) -> tuple[int, bool]:
        """Sort key by which what an item waits for comes before it: a transfer stands right after its source."""
        is_transfer = item >= len(self.operations)
        return (self.transfers[item - len(self.operations)].source if is_transfer else item, is_transfer)

    def label(self, item: int, number: int) -> str:
        """The text of an item's action: ``2F0``, or of a transfer's SEND with both ends: ``1SEND_F0>2@3``."""
        slots = self.slots[item]
        if item < len(self.operations):
            return f"{self.operations[item].id}{slots.text(number)}"
        transfer = self.transfers[item - len(self.operations)]
        source, target = self.operations[transfer.source], self.operations[transfer.target]
        kind = f"SEND_{payload_of(source.kind)}"
        microbatch, part = slots.name(number)
        return str(Action(source.stage, kind, microbatch, target.stage, transfer.hop.target_device, part))


def _messages(source: Slots, target: Slots, hop: Hop) -> Slots:
    """One message per micro-batch of the source; two where both ends run it in parts.

    What the source runs in parts and the target does not is sent together (AutoPipe III-C).
    """
    parted = min(source.num_parted, target.num_parted)
    if parted == source.num_parted and hop.every == 1:
        return source
    return replace(source, num_parted=parted, **hop.pattern)
