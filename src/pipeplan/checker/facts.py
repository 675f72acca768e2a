"""A plan in numbers, the problems found with it, and its figures, recomputed."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np

from pipeplan.checker.columns import ActionColumns, Wait
from pipeplan.display import Displayed
from pipeplan.errors import InvalidPlanError
from pipeplan.files import Plan
from pipeplan.time_limit import checked
from pipeplan.workload.elements import Dependency, Hop, Loop, Stage
from pipeplan.workload.folding import of_devices
from pipeplan.workload.kinds import Role
from pipeplan.workload.samples import Slots

Deliveries = dict[tuple[int, int], dict[int, int]]
"""{(target device, copy of the source): {micro-batch of the source: samples}}, of one period of both stages."""


def shares_evenly(stage: Stage) -> bool:
    """Whether its replicas have whole samples, equally many."""
    return stage.microbatch_size % stage.replicas == 0


def period_of(source: Stage, target: Stage) -> int:
    """Number of micro-batches of the source after which both stages begin one together again."""
    return math.lcm(source.microbatch_size, target.microbatch_size) // source.microbatch_size


def copies_of(stage: Stage) -> dict[int, int]:
    """{device: the copy of the stage that stands there}: of replica r with context c those from number r * c on."""
    return {device: index // stage.shards for index, device in enumerate(stage.devices)}


def one_place(stage: Stage, players: int) -> Stage:
    """Of a stage on programs that so many devices play each, those in one place: for each other all there are.

    They are some of its replicas, or, where all stages are split alike, one part of one replica.
    """
    if players == 1:
        return stage
    if stage.shards * stage.context * stage.replicas == len(stage.devices) * players and stage.replicas % players == 0:
        return replace(stage, replicas=stage.replicas // players, microbatch_size=stage.microbatch_size // players)
    return replace(
        stage, shards=1, context=1, replicas=1, microbatch_size=stage.microbatch_size // stage.replicas, zero_group=None
    )


def deliveries_of(source: Stage, target: Stage) -> Deliveries:
    """What each device of the target works on and did not make itself as a device of the source.

    Both stages are on one route and share their micro-batches evenly over their replicas, and sequences over as many
    parts: a device works on the part that stands in the same place in its own replica.
    """
    sizes = ((stage.microbatch_size, stage.replicas) for stage in (source, target))
    common, makers = _common_samples(*sizes), copies_of(source)
    found: Deliveries = defaultdict(dict)
    for device, copy in copies_of(target).items():
        user, part = divmod(copy, target.context)
        for (replica, microbatch), samples in common.get(user, {}).items():
            maker = replica * source.context + part
            if maker != makers.get(device):
                found[device, maker][microbatch] = samples
    return dict(found)


@lru_cache(maxsize=64)
def _common_samples(source: tuple[int, int], target: tuple[int, int]) -> dict[int, Counter[tuple[int, int]]]:
    """{replica of the target: {(replica of the source, micro-batch of the source): samples that both have}}.

    Of both stages the size of a micro-batch and the replicas. The samples of a period, cut wherever a replica of either
    stage begins, fall into pieces that are each of one.
    """
    period = math.lcm(source[0], target[0])
    each, others = (size // replicas for size, replicas in (source, target))
    cuts = sorted({*range(0, period, each), *range(0, period, others), period})
    found: dict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
    for begin, end in itertools.pairwise(cuts):
        maker, user = begin // each % source[1], begin // others % target[1]
        found[user][maker, begin // source[0]] += end - begin
    return dict(found)


def goes_with(hop: Hop, microbatches: Collection[int], period: int) -> bool:
    """Whether those of a period's micro-batches go by a hop, and no others, in every period."""
    if hop.run == hop.every:
        return len(microbatches) == period
    going = {m for m in range(period) if hop.first <= m % hop.every < hop.first + hop.run}
    return period % hop.every == 0 and going == set(microbatches)


@lru_cache(maxsize=64)
def _longer(slots: Slots, samples: int) -> Slots:
    """The same actions with those of so many samples more."""
    return replace(slots, count=slots.count + samples // slots.stride)


@dataclass(frozen=True)
class Facts:
    """Operations are numbered as in the plan, and the actions of each by their samples; lists are [operation].

    Everything is of what is written, ``plan`` too, but ``num_microbatches``: all of them, also those that ``loop`` runs
    beside. ``groups`` are ``devices`` as sets; ``slots`` say which samples each action holds, ``counts`` how many there
    are. ``durations`` are of whole micro-batches, ``part_durations`` of the parts of those that run in two.
    """

    plan: Plan
    loop: Loop | None
    num_microbatches: int
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
        alike: dict[Slots, Slots] = {}
        slots = [alike.setdefault(each, each) for each in map(plan.slots, ids)]
        return cls(
            plan=plan.written,
            loop=plan.loop,
            num_microbatches=plan.num_microbatches,
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

    @cached_property
    def columns(self) -> ActionColumns:
        """The actions in columns."""
        return ActionColumns.of(self.slots, self.starts, (self.durations, self.part_durations), self.waits)

    @cached_property
    def on_device(self) -> list[list[int]]:
        """[device] the operations that run there."""
        found: list[list[int]] = [[] for _ in self.plan.devices]
        for operation, group in enumerate(self.groups):
            for device in group:
                found[device].append(operation)
        return found

    @cached_property
    def first_starts(self) -> list[int]:
        """[operation] when its first action starts, in ns."""
        return list(np.minimum.reduceat(self.columns.starts, self.columns.firsts[:-1]).tolist())

    @cached_property
    def last_ends(self) -> list[int]:
        """[operation] when its last action ends, of those that are written, in ns."""
        return list(np.maximum.reduceat(self.columns.ends, self.columns.firsts[:-1]).tolist())

    def repeated(self, slots: Slots) -> Slots:
        """The actions of an operation, or the messages of a hop, with all that a loop runs."""
        if self.loop is None:
            return slots
        return _longer(slots, self.loop.skipped * self.plan.microbatch_size)

    @property
    def skipped_ns(self) -> int:
        """By how much later than written a loop makes the end."""
        return 0 if self.loop is None else self.loop.skipped_ns

    @property
    def num_actions(self) -> int:
        """Number of compute actions; one of several devices counts once."""
        return sum(len(self.repeated(slots)) for slots in self.slots)

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
        return range(number, number + 1) if own is others else others.sharing(own.samples(number))

    def inputs(self, operation: int, number: int) -> Iterator[tuple[Wait, int, int]]:
        """What an action waits for: (wait, action of its source, ns between that one's end and this one's start)."""
        part = self.is_part(operation, number)
        for wait in self.waits[operation]:
            if wait.later:  # between micro-batches of one size
                waited_for = range(max(0, number - wait.later), max(0, number - wait.later + 1))
            elif wait.needs is None:
                waited_for = self.sharing(operation, number, wait.source)
            else:
                waited_for = range(wait.needs[number])
            for n in waited_for:
                yield wait, n, wait.part_ns if part and self.is_part(wait.source, n) else wait.lag_ns

    def messages(self, dependency: Dependency, hop: Hop) -> Slots:
        """The messages of a hop: one per micro-batch of its source that goes there, two where both ends have parts."""
        source, target = (self.slots[self.position[id_]] for id_ in (dependency.source, dependency.target))
        parted = min(source.num_parted, target.num_parted)
        count = max(0, source.count - dependency.later)  # the last ones of a run return to nobody
        if (count, parted, hop.every, hop.run, hop.first) == (source.count, source.num_parted, 1, 1, 0):
            return source
        return replace(source, count=count, num_parted=parted, every=hop.every, run=hop.run, first=hop.first)

    def busy(self) -> list[int]:
        """Time that each device computes in one iteration [device], in ns."""
        return self._per_device([self._work(operation) for operation in range(len(self.ids))])

    def busy_whole(self) -> list[int]:
        """The same, if all micro-batches ran whole."""
        return self._per_device(
            [duration * self.repeated(slots).count for duration, slots in zip(self.durations, self.slots, strict=True)]
        )

    def _work(self, operation: int) -> int:
        slots = self.repeated(self.slots[operation])
        whole = (len(slots) - 2 * slots.num_parted) * self.durations[operation]
        return whole + 2 * slots.num_parted * self.part_durations[operation]

    def _per_device(self, times: Sequence[int]) -> list[int]:
        """The sum of operations' times on each device."""
        total = [0] * len(self.plan.devices)
        for devices, time in zip(self.devices, times, strict=True):
            for device in devices:
                total[device] += time
        return total


def overlap(plan: Plan, dependency: Dependency) -> tuple[int, int]:
    """Ns that its source goes on after the part that makes it, and that its target runs before the part that needs it.

    A part that there is not is refused elsewhere.
    """
    if not dependency.has_parts:
        return 0, 0
    source, target = (plan.operation(id_) for id_ in (dependency.source, dependency.target))
    after = len(source.parts_ns) if dependency.source_part is None else dependency.source_part + 1
    return sum(source.parts_ns[after:]), sum(target.parts_ns[: dependency.target_part])


def _waits(plan: Plan, position: dict[str, int]) -> list[list[Wait]]:
    """All dependencies; of duplicates (which are refused) only the slower counts."""
    slowest: dict[tuple[int, int], Wait] = {}
    for number, dependency in enumerate(plan.dependencies):
        pair = position[dependency.target], position[dependency.source]
        left, begun = overlap(plan, dependency)
        lag = dependency.lag_ns - left - begun
        if pair not in slowest or slowest[pair].lag_ns < lag:
            part_ns = max((hop.part_ns for hop in dependency.hops), default=0)
            slowest[pair] = Wait(pair[1], lag, part_ns, number, dependency.needs, begun > 0, dependency.later)
    waits: list[list[Wait]] = [[] for _ in position]
    for (target, _), wait in slowest.items():
        waits[target].append(wait)
    for number, operation in enumerate(plan.operations):
        if operation.pace_ns is not None:
            waits[number].append(Wait(number, operation.pace_ns - operation.duration_ns, 0, None, None, later=1))
    return waits


# Findings -----------------------------------------------------------------------------------------------------------


RULES = (
    *("stages", "dependencies", "hops", "balance"),
    *("actions", "transfers", "transfer-order", "fifo", "deadlock"),
    *("inputs", "links", "exclusive", "order", "exchanges", "earliest"),
    *("memory", "figures", "repetend", "loop", "profile", "cluster"),
)
"""Every rule; docs/check.md says each."""

MAX_PER_RULE = 100
"""Problems of one rule that a report lists; the rest are only counted."""

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule: which (as in docs/check.md), where in the file, and what is wrong, with the numbers."""

    rule: str
    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message} [{self.rule}]"


@dataclass(frozen=True, slots=True)
class Figures:
    """What the plan comes to by its stated start times and programs; times in ns, sizes in bytes.

    Rates are as in ``docs/check.md``; ``iteration_ns`` until all ends that follows the actions, of which summing
    gradients, the optimizer's step and gathering parameters are ``exposed_...`` so far. ``period_ns``
    (per micro-batch, when the repetend is repeated without end) and ``bubble_rate_steady`` are None without a valid
    repetend, ``peak_memory_bytes`` [device] is empty where the programs lack actions.
    """

    num_devices: int
    num_actions: int
    num_transfers: int
    makespan_ns: int
    iteration_ns: int
    exposed_reduction_ns: int
    exposed_step_ns: int
    exposed_gather_ns: int
    bubble_rate: float
    bubble_rate_span: float
    bubble_rate_steady: float | None
    period_ns: float | None
    peak_memory_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report(Displayed):
    """The answer of :func:`pipeplan.checker.check`.

    ``problems`` lists at most 100 of each rule, ``num_problems`` counts all; ``recomputed`` is what the plan comes to.
    ``remarks`` are what no rule forbids and a reader must know.
    """

    problems: tuple[Violation, ...]
    num_problems: int
    recomputed: Figures
    remarks: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Report {'valid' if self.valid else f'{self.num_problems} problems'}>"

    @property
    def valid(self) -> bool:
        """Whether nothing is wrong."""
        return self.num_problems == 0

    def figures(self) -> dict[str, object]:
        """The object of ``check --json``."""
        return {
            "valid": self.valid,
            "num_problems": self.num_problems,
            "problems": [asdict(problem) for problem in self.problems],
            "remarks": list(self.remarks),
            **asdict(self.recomputed),
        }

    def require(self, where: str = "the plan") -> None:
        """Raise if something is wrong.

        Raises:
            InvalidPlanError: the first problems, and how many there are. Of many, those that differ only in the
                numbers of their places share a line.
        """
        if self.valid:
            return
        alike: dict[Hashable, list[Violation]] = {}
        for problem in self.problems:
            place = problem.place if self.num_problems <= _SHOWN else _NUMBER.sub("", problem.place)
            alike.setdefault((problem.rule, place, problem.message), []).append(problem)
        shown = list(alike.values())[:_SHOWN]
        lines = [_line(problems) for problems in shown]
        if left := self.num_problems - sum(map(len, shown)):
            lines.append(f"... and {left} more")
        plural = "s" if self.num_problems > 1 else ""
        raise InvalidPlanError(f"{where}: not a valid plan, {self.num_problems} problem{plural}:", lines)


_NUMBER = re.compile(r"\d+")


def _line(alike: Sequence[Violation]) -> str:
    """Problems that differ only in numbers of their places, as the first and the last."""
    if len(alike) == 1:
        return str(alike[0])
    places = f"{alike[0].place} to {alike[-1].place} ({len(alike)} alike)"
    return str(replace(alike[0], place=places))


@dataclass(slots=True)
class Findings:
    """Collects problems while a plan is checked."""

    problems: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, rule: str, place: str, message: str) -> None:
        """Note a problem; beyond a hundred of one rule it is only counted."""
        assert rule in RULES, rule
        self.counts[rule] += 1
        if self.counts[rule] <= MAX_PER_RULE:
            self.problems.append(Violation(rule, place, message))

    def has(self, *rules: str) -> bool:
        """Whether one of these rules is broken."""
        return any(self.counts[rule] for rule in rules)


TOLERANCE = 1e-9
"""Relative and absolute: a float of a file against the exact figure."""


def figures_of(
    facts: Facts,
    copy_ns: Fraction | None,
    peaks: tuple[int, ...],
    busy_ns: Sequence[int] = (),
    sums: Sequence[Sequence[tuple[int, int]]] = (),
) -> Figures:
    """The figures of the plan's start times; ``copy_ns`` is the time from one repetend to the next.

    ``busy_ns`` [device] is until when networks exchange state for actions, and ``sums`` when they reduce once an
    iteration; none: none does.
    """
    plan = facts.plan
    makespan = max(_last_end(facts, operation) for operation in range(len(facts.ids)))
    busy = facts.busy()
    unroll = plan.repetend.unroll if plan.repetend is not None else 1
    phases = _phases(facts, busy_ns, sums or [()] * len(busy))
    steady = None
    if copy_ns is not None:
        per_copy = Fraction(sum(of_devices(plan.players, facts.busy_whole())) * unroll, facts.num_microbatches)
        steady = float(1 - per_copy / (plan.num_devices * copy_ns))
    return Figures(
        num_devices=plan.num_devices,
        num_actions=facts.num_actions,
        num_transfers=plan.players_each * _num_messages(facts),
        makespan_ns=makespan,
        iteration_ns=phases[-1],
        exposed_reduction_ns=phases[1] - phases[0],
        exposed_step_ns=phases[2] - phases[1],
        exposed_gather_ns=phases[3] - phases[2],
        bubble_rate=float(1 - Fraction(sum(of_devices(plan.players, busy)), plan.num_devices * makespan)),
        bubble_rate_span=_bubble_rate_span(facts, busy),
        bubble_rate_steady=steady,
        period_ns=None if copy_ns is None else float(copy_ns / unroll),
        peak_memory_bytes=tuple(of_devices(plan.players, peaks)) if peaks else (),
    )


def _num_messages(facts: Facts) -> int:
    """The messages of all hops, also those of a loop that are not written."""
    known: dict[Slots, int] = {}
    total = 0
    for dependency in facts.plan.dependencies:
        for hop in dependency.hops:
            slots = facts.messages(dependency, hop)
            if slots not in known:
                known[slots] = len(facts.repeated(slots))
            total += known[slots]
    return total


def _last_end(facts: Facts, operation: int) -> int:
    """The end of its last action, which is in a loop or after it."""
    return facts.skipped_ns + facts.last_ends[operation]


def _phases(
    facts: Facts, busy_ns: Sequence[int], reduced: Sequence[Sequence[tuple[int, int]]]
) -> tuple[int, int, int, int]:
    """When all devices have ended actions, then sums of gradients, steps, gathers, in ns, as docs/check.md says."""
    plan, ends, gradients = facts.plan, [0] * len(facts.plan.devices), [0] * len(facts.plan.stages)
    for operation, devices in enumerate(facts.devices):
        end, stage = _last_end(facts, operation), plan.operations[operation].stage
        for device in devices:
            ends[device] = max(ends[device], end)
        if plan.operations[operation].role in (Role.BACKWARD, Role.WEIGHT_GRAD):
            gradients[stage] = max(gradients[stage], end)
    steps = [0] * len(ends)
    for each in plan.stages:
        for device in each.devices:
            steps[device] += each.step_ns
    sums = _sums(facts, gradients)
    order = plan.sum_order or sorted(range(len(sums)), key=lambda number: (sums[number][0], number))
    before = [(0, busy, frozenset((device,))) for device, busy in enumerate(busy_ns) if busy]
    jobs = [*before, *(sums[number] for number in order)]
    (job_ends, network), acted = _on_networks(jobs, len(ends)), max(ends)
    times = [(end - takes, end, devices) for end, (_, takes, devices) in zip(job_ends, jobs, strict=True)]
    for device, own in enumerate(plan.devices):
        if own.contention:
            summing = [(begun, ended) for begun, ended, devices in times[len(before) :] if device in devices]
            beside = sum(max(0, min(ended, ends[device]) - begun) for begun, ended in [*reduced[device], *summing])
            ends[device] += round(own.contention * beside)
    summed = max(*ends, *network)
    ends = [max(end, free) + step for end, free, step in zip(ends, network, steps, strict=True)]
    gathers = [
        (max(ends[device] for device in stage.devices), stage.gather_ns, frozenset(stage.devices))
        for stage in plan.stages
        if stage.gather_ns
    ]
    _, gathered = _on_networks(sorted(gathers, key=lambda each: each[0]), len(ends))
    return acted, summed, max(ends), max(*ends, *gathered)


_Job = tuple[int, int, frozenset[int]]
"""What occupies networks: ns from which on it may, ns it takes, the devices."""


def _sums(facts: Facts, gradients: Sequence[int]) -> list[_Job]:
    """The plan's sums of gradients, ready when those of the stages are: of stages that share blocks one, then tied.

    Of those that have the same blocks, in the same buckets, one for each bucket.
    """
    stages, found, seen = facts.plan.stages, list[_Job](), set[int]()
    if not (any(stage.sync_ns for stage in stages) or any(each.sync_ns for each in facts.plan.tied)):
        return []
    having: dict[str, set[int]] = defaultdict(set)
    for number, stage in enumerate(stages):
        for block in stage.blocks:
            having[block].add(number)
    for first in range(len(stages)):
        if first in seen:
            continue
        members, more = {first}, {first}
        while more := {n for other in more for block in stages[other].blocks for n in having[block]} - members:
            members |= more
        seen |= members
        devices = frozenset(device for n in members for device in stages[n].devices)
        cut = [(stages[n].blocks, [each.blocks for each in stages[n].buckets]) for n in members]
        if stages[first].buckets and all(each == cut[0] for each in cut):
            for place in range(len(stages[first].buckets)):
                own = [(gradients[n], stages[n].buckets[place]) for n in members]
                ready = max(end - bucket.ahead_ns for end, bucket in own)
                found.append((ready, max(bucket.sync_ns for _, bucket in own), devices))
        else:
            found.append((max(gradients[n] for n in members), max(stages[n].sync_ns for n in members), devices))
    for each in facts.plan.tied:
        found.append((max(gradients[n] for n in each.stages), each.sync_ns, each.all_devices))
    return [each for each in found if each[1]]


def _on_networks(jobs: Sequence[_Job], num_devices: int) -> tuple[list[int], list[int]]:
    """[job] when it ends, each after those before it that share a device; [device] when its network is free."""
    ends, free = list[int](), dict[int, int]()
    for ready, takes, devices in checked(jobs):
        end = max([ready, *(free.get(device, ready) for device in devices)]) + takes
        free.update(dict.fromkeys(devices, end))
        ends.append(end)
    return ends, [free.get(device, 0) for device in range(num_devices)]


def _bubble_rate_span(facts: Facts, busy: list[int]) -> float:
    """``1 - busy / span`` of the device with the longest time from first start to last end, the first of equals."""
    begins: list[float] = [math.inf] * len(busy)
    ends = [0] * len(busy)
    for operation, devices in enumerate(facts.devices):
        begin, end = facts.first_starts[operation], _last_end(facts, operation)
        for device in devices:
            begins[device] = min(begins[device], begin)
            ends[device] = max(ends[device], end)
    spans = [end - int(begin) if end else 0 for begin, end in zip(begins, ends, strict=True)]
    longest = spans.index(max(spans))
    return float(1 - Fraction(busy[longest], spans[longest]))


def check_figures(facts: Facts, figures: Figures, findings: Findings) -> None:
    """Makespan, iteration, bound and gap, bubble rates, period, as stated."""
    predicted = facts.plan.predicted
    _compare("makespan_ns", predicted.makespan_ns, figures.makespan_ns, findings)
    if predicted.iteration_ns:  # older plans do not say it
        _compare("iteration_ns", predicted.iteration_ns, figures.iteration_ns, findings)
    _compare("bubble_rate", predicted.bubble_rate, figures.bubble_rate, findings)
    _compare("bubble_rate_span", predicted.bubble_rate_span, figures.bubble_rate_span, findings)
    bound = predicted.lower_bound_ns
    if not 0 < bound <= figures.iteration_ns:
        text = f"is {bound}; a bound is at least 1 and at most the iteration, {figures.iteration_ns} ns"
        findings.add("figures", "predicted.lower_bound_ns", text)
    elif predicted.iteration_ns:
        _compare("gap", predicted.gap, figures.iteration_ns / bound - 1, findings)
    _check_period(facts, figures, findings)


def _check_period(facts: Facts, figures: Figures, findings: Findings) -> None:
    predicted, repetend = facts.plan.predicted, facts.plan.repetend
    if repetend is None:
        for name in ("period_ns", "bubble_rate_steady"):
            if getattr(predicted, name) is not None:
                text = f"is {getattr(predicted, name)}, but the plan has no repetend"
                findings.add("figures", f"predicted.{name}", text)
        return
    _compare("period_ns", predicted.period_ns, repetend.period_ns, findings)
    if figures.bubble_rate_steady is not None:
        _compare("bubble_rate_steady", predicted.bubble_rate_steady, figures.bubble_rate_steady, findings)
    work = max(facts.busy_whole()) / facts.num_microbatches
    if repetend.period_ns < work * (1 - TOLERANCE):
        text = f"is {repetend.period_ns:.9g} ns per micro-batch, less than the busiest device's work of {work:.9g} ns"
        findings.add("figures", "repetend.repetend_ns", text)
    if predicted.period_lower_bound_ns > repetend.period_ns * (1 + TOLERANCE):
        text = f"is {predicted.period_lower_bound_ns:.9g}, above the period itself, {repetend.period_ns:.9g} ns"
        findings.add("figures", "predicted.period_lower_bound_ns", text)


def _compare(name: str, stated: float | None, found: float, findings: Findings) -> None:
    """Integers must be equal, floats up to rounding."""
    exact = isinstance(found, int)
    if stated is None or (
        stated != found if exact else not math.isclose(stated, found, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    ):
        said = "missing" if stated is None else stated
        findings.add("figures", f"predicted.{name}", f"is {said}, the start times give {found}")
