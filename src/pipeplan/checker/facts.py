"""A plan's operations by number, and which samples have to be brought where."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from pipeplan.files import Plan
from pipeplan.workload.elements import Dependency, Hop, Stage
from pipeplan.workload.samples import Slots

__all__ = ["Deliveries", "Facts", "Wait", "deliveries_of", "goes_with", "period_of", "replicas_of", "shares_evenly"]


Deliveries = dict[tuple[int, int], dict[int, int]]
"""{(target device, replica of the source): {micro-batch of the source: samples}}, of one period of both stages."""


def shares_evenly(stage: Stage) -> bool:
    """Whether its replicas have whole samples, equally many."""
    return stage.microbatch_size % stage.replicas == 0


def period_of(source: Stage, target: Stage) -> int:
    """After so many micro-batches of the source both stages begin one together again."""
    return math.lcm(source.microbatch_size, target.microbatch_size) // source.microbatch_size


def replicas_of(stage: Stage) -> dict[int, int]:
    """{device: the replica of the stage that stands there}."""
    return {device: index // stage.shards for index, device in enumerate(stage.devices)}


def deliveries_of(source: Stage, target: Stage) -> Deliveries:
    """What each device of the target works on and did not make itself as a device of the source.

    Both stages are on one route and share their micro-batches evenly over their replicas.
    """
    common, makers = _common_samples(source, target), replicas_of(source)
    found: Deliveries = defaultdict(dict)
    for device, user in replicas_of(target).items():
        for (maker, microbatch), samples in common[user].items():
            if maker != makers.get(device):
                found[device, maker][microbatch] = samples
    return dict(found)


def _common_samples(source: Stage, target: Stage) -> dict[int, Counter[tuple[int, int]]]:
    """{replica of the target: {(replica of the source, micro-batch of the source): samples that both have}}.

    The samples of a period, cut wherever a replica of either stage begins, fall into pieces that are each of one.
    """
    period = math.lcm(source.microbatch_size, target.microbatch_size)
    each, others = (stage.microbatch_size // stage.replicas for stage in (source, target))
    cuts = sorted({*range(0, period, each), *range(0, period, others), period})
    found: dict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
    for begin, end in itertools.pairwise(cuts):
        maker, user = begin // each % source.replicas, begin // others % target.replicas
        found[user][maker, begin // source.microbatch_size] += end - begin
    return found


def goes_with(hop: Hop, microbatches: Collection[int], period: int) -> bool:
    """Whether those of a period's micro-batches go by a hop, and no others, in every period."""
    if hop.run == hop.every:
        return len(microbatches) == period
    going = {m for m in range(period) if hop.first <= m % hop.every < hop.first + hop.run}
    return period % hop.every == 0 and going == set(microbatches)


@dataclass(frozen=True, slots=True)
class Wait:
    """What an operation waits for: another, ``lag_ns`` after its end; ``part_ns`` from a part of one to one's part.

    ``dependency`` is the number of the dependency that says so. ``needs`` [action], where there is such a list, is how
    many of the other's first actions it waits for; otherwise for those that hold its samples.
    """

    source: int
    lag_ns: int
    part_ns: int
    dependency: int
    needs: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Facts:
    """Operations are numbered as in the plan, and the actions of each by their samples; lists are [operation].

    ``groups`` are ``devices`` as sets; ``slots`` say which samples each action holds, ``counts`` how many there are.
    ``durations`` are of whole micro-batches, ``part_durations`` of the parts of those that run in two.
    """

    plan: Plan
    ids: list[str]
    position: dict[str, int]
    devices: list[tuple[int, ...]]
    groups: list[frozenset[int]]
    durations: list[int]
    part_durations: list[int]
    slots: list[Slots]
    counts: list[int]
    starts: list[tuple[int, ...]]
    waits: list[list[Wait]]

    @classmethod
    def of(cls, plan: Plan) -> Facts:
        """Number the operations of a plan."""
        ids = [operation.id for operation in plan.operations]
        position = {id_: index for index, id_ in enumerate(ids)}
        groups = [frozenset(stage.devices) for stage in plan.stages]
        slots = [plan.slots(id_) for id_ in ids]
        return cls(
            plan=plan,
            ids=ids,
            position=position,
            devices=[plan.devices_of(id_) for id_ in ids],
            groups=[groups[operation.stage] for operation in plan.operations],
            durations=[operation.duration_ns for operation in plan.operations],
            part_durations=[operation.part_ns or 0 for operation in plan.operations],
            slots=slots,
            counts=[len(each) for each in slots],
            starts=[plan.starts_ns[id_] for id_ in ids],
            waits=_waits(plan, position),
        )

    @property
    def num_actions(self) -> int:
        """Number of compute actions; one of several devices counts once."""
        return sum(self.counts)

    def label(self, operation: int, number: int) -> str:
        """The action's text: ``2F0``."""
        return f"{self.ids[operation]}{self.slots[operation].text(number)}"

    def is_part(self, operation: int, number: int) -> bool:
        """Whether an action runs one of two parts of a micro-batch."""
        return number < 2 * self.slots[operation].num_parted

    def duration(self, operation: int, number: int) -> int:
        """How long an action takes, in ns."""
        return (self.part_durations if self.is_part(operation, number) else self.durations)[operation]

    def end(self, operation: int, number: int) -> int:
        """When an action ends, in ns."""
        return self.starts[operation][number] + self.duration(operation, number)

    def acquired(self, operation: int, number: int) -> int:
        """Bytes an action takes at its start: of two parts each a half, the first the larger one."""
        taken = self.plan.operations[operation].acquire_bytes
        if not self.is_part(operation, number):
            return taken
        return taken // 2 if number % 2 else -(-taken // 2)

    def sharing(self, operation: int, number: int, other: int) -> range:
        """The actions of another operation that hold samples of this action."""
        own, others = self.slots[operation], self.slots[other]
        return range(number, number + 1) if own == others else others.sharing(own.samples(number))

    def inputs(self, operation: int, number: int) -> Iterator[tuple[Wait, int, int]]:
        """What an action waits for: (wait, action of its source, ns between that one's end and this one's start)."""
        part = self.is_part(operation, number)
        for wait in self.waits[operation]:
            waited_for = (
                self.sharing(operation, number, wait.source) if wait.needs is None else range(wait.needs[number])
            )
            for n in waited_for:
                yield wait, n, wait.part_ns if part and self.is_part(wait.source, n) else wait.lag_ns

    def messages(self, dependency: Dependency, hop: Hop) -> Slots:
        """The messages of a hop: one per micro-batch of its source that goes there, two where both ends have parts."""
        source, target = (self.slots[self.position[id_]] for id_ in (dependency.source, dependency.target))
        parted = min(source.num_parted, target.num_parted)
        return replace(source, num_parted=parted, every=hop.every, run=hop.run, first=hop.first)

    def busy(self) -> list[int]:
        """Time that each device computes in one iteration [device], in ns."""
        return self._per_device([self._work(operation) for operation in range(len(self.ids))])

    def busy_whole(self) -> list[int]:
        """The same, if all micro-batches ran whole."""
        return self._per_device(
            [duration * slots.count for duration, slots in zip(self.durations, self.slots, strict=True)]
        )

    def _work(self, operation: int) -> int:
        slots = self.slots[operation]
        whole = (len(slots) - 2 * slots.num_parted) * self.durations[operation]
        return whole + 2 * slots.num_parted * self.part_durations[operation]

    def _per_device(self, times: Sequence[int]) -> list[int]:
        """The sum of operations' times on each device."""
        total = [0] * len(self.plan.devices)
        for devices, time in zip(self.devices, times, strict=True):
            for device in devices:
                total[device] += time
        return total


def _waits(plan: Plan, position: dict[str, int]) -> list[list[Wait]]:
    """Of dependencies that stand there twice (which is refused) only the slower counts."""
    slowest: dict[tuple[int, int], Wait] = {}
    for number, dependency in enumerate(plan.dependencies):
        pair = position[dependency.target], position[dependency.source]
        if pair not in slowest or slowest[pair].lag_ns < dependency.lag_ns:
            part_ns = max((hop.part.duration_ns for hop in dependency.hops), default=0)
            slowest[pair] = Wait(pair[1], dependency.lag_ns, part_ns, number, dependency.needs)
    waits: list[list[Wait]] = [[] for _ in position]
    for (target, _), wait in slowest.items():
        waits[target].append(wait)
    return waits
