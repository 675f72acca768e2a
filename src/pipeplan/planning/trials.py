"""The state of a search for a plan: the candidates tried so far, and the schedules found for each.

A candidate's devices are chosen among a cluster's, so that what talks much is near. A first look says what it is worth;
a search of its schedules takes a share of the time.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import cmp_to_key
from typing import ClassVar

from pipeplan.costs import build_workload, can_split
from pipeplan.costs.late_inputs import with_late_inputs
from pipeplan.costs.zero import AUTO, GATHERED, IN_ACTIONS, Zero
from pipeplan.errors import InfeasibleError, InvalidPlanError, PipeplanError, UsageError
from pipeplan.files import Placement, Plan
from pipeplan.partition.mapping import device_orders, mapped
from pipeplan.partition.strategies import STRATEGIES
from pipeplan.planning.bounds import least_state_bytes, prompt_bound, request_bound
from pipeplan.planning.candidates import (
    BoundedProposal,
    CandidateOrError,
    PlacementCandidate,
    Proposal,
    has_table,
    in_turns,
    is_large,
    placed,
)
from pipeplan.planning.choices import takes_long
from pipeplan.planning.exchanging import exchanging_workload
from pipeplan.planning.form_errors import FormErrors
from pipeplan.planning.request import Request
from pipeplan.planning.uniform_space import BoundedChoice
from pipeplan.planning.usual import Usual
from pipeplan.planning.workers import Ahead, Given, LostError
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.longer import ShorterRun
from pipeplan.schedule.rules import with_instructions
from pipeplan.schedule.rules.language import naming
from pipeplan.schedule.search import PLAIN, SEARCHING, FirstLook, first_look, plain_look, search_schedule
from pipeplan.schedule.state import Progress, Schedule, SearchStep, complexity, first_by, named, noted
from pipeplan.schedule.steps import STEPS, RepetendSearch
from pipeplan.search_constants import (
    BACKWARD_WAYS_SHARE,
    DIVIDED_AFTER,
    ENDING,
    FEW_ACTIONS,
    FIRST_SECONDS,
    LATE,
    LATE_SHARE,
    LONG_LOOK,
    MOST_ENDED,
    MOST_ENTRIES,
    NEAR,
    REPETEND_SHARE_KEPT,
    SECONDS_PER_CUT,
    SECONDS_PER_LOOK,
)
from pipeplan.time_limit import shielded
from pipeplan.units import format_bytes
from pipeplan.workload.bounds import weak_iteration_bound
from pipeplan.workload.elements import Stage
from pipeplan.workload.folding import of_devices
from pipeplan.workload.kinds import GRADIENTS, PARAMETERS
from pipeplan.workload.one_microbatch import device_groups
from pipeplan.workload.task_graph import Orders
from pipeplan.workload.workload import Workload


def may_move(request: Request, candidate: PlacementCandidate) -> bool:
    """Whether other devices may be nearer: not where the placement was given, stays, or all are equally near.

    Devices that split blocks stay neighbours, as their collectives are priced; stages on all devices have no choice.
    Among devices of different speeds stages are cut for those that they stand on.
    """
    cluster, stages = request.cluster, candidate.placement.stages
    if request.uneven or candidate.stay:
        return False
    if cluster is None or len(cluster.levels) < 2 or isinstance(request.placement, Placement):
        return False
    everywhere = candidate.placement.num_devices
    return not any(
        max(stage.shards * stage.context, stage.expert) > 1
        and (stage.replicas > 1 or stage.shards * stage.context < everywhere)
        for stage in stages
    )


def keeps_devices(request: Request) -> bool:
    """Whether positions stay where they are: on other devices none of them would be nearer, or it was given."""
    cluster, given = request.cluster, isinstance(request.placement, Placement)
    return given or request.uneven or request.only is not None or cluster is None or len(cluster.levels) < 2


def may_turn(request: Request, candidate: PlacementCandidate) -> bool:
    """Whether the order of positions and replicas is chosen before a look: among alike devices below shared uplinks.

    Elsewhere orders differ by little, and only those of the best plans are tried.
    """
    cluster = request.cluster
    if cluster is None or candidate.stay or keeps_devices(request) or len(set(request.memory)) > 1:
        return False
    return any((level.oversubscription or 1) > 1 for level in cluster.levels)


def elsewhere(request: Request, candidate: PlacementCandidate, *, folded: bool) -> list[PlacementCandidate]:
    """The candidate on other devices of the cluster: in orders of positions and replicas, and as links are least busy.

    Orders are of devices with equally much memory. Mapping takes long for many devices, and ``folded`` ones would
    seldom stay so. It is seldom the quickest for alike positions: where few replicas talk over slow links, all wait for
    those. So alike positions that are folded are not mapped.
    """
    if request.cluster is None:
        return []
    placement, orders = candidate.placement, list[PlacementCandidate]()
    if len(set(request.memory)) == 1:
        orders = [replace(candidate, placement=each) for each in device_orders(placement, request.cluster)]
    alike = len({(len(stage.devices), stage.replicas) for stage in placement.stages}) == 1
    mapped_on = None if alike and folded else on_cluster(request, candidate)
    return orders if mapped_on is None else [*orders, mapped_on]


def on_cluster(request: Request, candidate: PlacementCandidate) -> PlacementCandidate | None:
    """The candidate with its groups of devices where the cluster's links are least busy.

    Devices with the same stages are a group and stay one. None where that changes nothing.
    """
    cluster = request.cluster
    if cluster is None or not may_move(request, candidate):
        return None
    workload = build_workload(
        request.profile,
        candidate.placement,
        num_microbatches=candidate.batch.num_microbatches,
        microbatch_size=candidate.batch.microbatch_size,
        recompute=candidate.recompute,
        given=candidate.given,
    )
    group_of = device_groups(workload)
    sizes = Counter(of_devices(workload.players, group_of))
    traffic: Counter[tuple[int, int]] = Counter()
    for dependency in workload.dependencies:
        for hop in dependency.hops:
            ends = group_of[hop.source_device], group_of[hop.target_device]
            if ends[0] != ends[1]:
                traffic[ends] += hop.bytes * len(workload.messages(dependency, hop)) * workload.players_each
    sync = [0] * len(sizes)
    for stage in workload.stages:
        if stage.copies > 1:
            sync[group_of[stage.devices[0]]] += _summed_bytes(stage, workload)
    static = [workload.static_bytes(group_of.index(group)) for group in range(len(sizes))]
    try:
        found = mapped(
            [sizes[group] for group in range(len(sizes))],
            traffic,
            cluster.first(request.num_devices),
            sync=sync,
            needs=static,
        )
    except PipeplanError:  # what does not fit is said where it is searched
        return None
    places = [iter(devices) for devices in found]
    device_of = [next(places[group]) for group in of_devices(workload.players, group_of)]
    if device_of == list(range(len(device_of))):
        return None
    stages = tuple(
        stage.model_copy(update={"devices": tuple(device_of[device] for device in stage.devices)})
        for stage in candidate.placement.stages
    )
    return replace(candidate, placement=candidate.placement.model_copy(update={"stages": stages}))


def _summed_bytes(stage: Stage, workload: Workload) -> int:
    """Bytes of the sums of all copies of a stage that take as long as all that these exchange in an iteration.

    By levels 2 and 3 (:mod:`pipeplan.costs.zero`) half of a sum is exchanged of gradients with each micro-batch, and of
    parameters before its forward and before its backward.
    """
    zero, gradients = Zero.of(stage), stage.state[GRADIENTS]
    if zero.level < IN_ACTIONS:
        return gradients
    gathered = stage.state[PARAMETERS] if zero.level >= GATHERED else 0
    actions = workload.mini_batch // (stage.microbatch_size * workload.num_routes)
    return actions * zero.group * (gradients + 2 * gathered) // 2


@dataclass(frozen=True)
class BackwardWays(SearchStep):
    """Each way of running backward gets a short look, then the better one the rest of the candidate's time."""

    share: float = BACKWARD_WAYS_SHARE
    name = "both ways of backward"
    when = "--split-backward is open, and the profile has costs for both"
    of = "the candidate's time, each"
    needed = True


@dataclass(slots=True)
class Trial:
    """A candidate, its workload for each way of running backward, and what is known of their schedules.

    ``bounds`` [way] ns that no schedule's iteration is below; ``best`` the schedule with the shortest iteration;
    ``parted`` the same with leading forwards in parts, if that is shorter or asked for, and ``parted_bound`` ns that
    none with forwards in parts is below; ``late_bound`` the same of actions that wait inside. ``steps`` are those of a
    search, ``notes`` what went wrong in them.
    ``searched`` says that schedules were not only looked at.
    """

    candidate: PlacementCandidate
    ways: list[Workload]
    bounds: list[int]
    best: Schedule | None = None
    parted: Schedule | None = None
    parted_bound: int | None = None
    late_bound: int | None = None
    steps: Sequence[SearchStep] = STEPS
    notes: list[str] = field(default_factory=list)
    searched: bool = False

    @classmethod
    def of(cls, request: Request, candidate: PlacementCandidate, steps: Sequence[SearchStep] = STEPS) -> Trial:
        """The candidate's workloads, with bounds from only work and dependencies.

        Raises:
            UsageError: split backward is asked for, and the profile has no costs for it.
        """
        ways = workloads(request, candidate)
        return cls(candidate, ways, list(map(weak_iteration_bound, ways)), steps=steps)

    @classmethod
    def where_quick(cls, request: Request, candidate: PlacementCandidate, steps: Sequence[SearchStep] = STEPS) -> Trial:
        """The same on the devices of the cluster that should be quickest: those with the least bound.

        Of equal ones where a replica's stages are near each other. Where there are many actions the candidate's own.

        Raises:
            UsageError: as for :meth:`of`.
        """
        own = cls.of(request, candidate, steps)
        if own.num_actions > FEW_ACTIONS or not (may_move(request, candidate) or may_turn(request, candidate)):
            return own
        others = [cls.of(request, each, steps) for each in elsewhere(request, candidate, folded=own.is_folded)]
        return min([*reversed(others), own], key=lambda trial: (trial.bound_ns, not trial.is_folded))

    @property
    def bound_ns(self) -> int:
        """No iteration is shorter: of actions that take all their inputs first, unless those of the best do not."""
        bounds = self.bounds if self.parted_bound is None else [*self.bounds, self.parted_bound]
        waits_inside = self.best is not None and self.best.workload.has_parts
        return min(bounds) if self.late_bound is None or not waits_inside else min(*bounds, self.late_bound)

    @property
    def least_ns(self) -> int:
        """A bound on the iteration over everything that the request leaves open."""
        return self.bound_ns if self.late_bound is None else min(self.bound_ns, self.late_bound)

    @property
    def value_ns(self) -> int | None:
        """The shortest iteration found; None before any."""
        found = self.parted or self.best
        return None if found is None else iteration_of(found)

    def hopeless(self, best: Trial | None) -> bool:
        """Whether no schedule can have a shorter iteration than the best trial."""
        return best is not None and best.value_ns is not None and self.bound_ns >= best.value_ns

    def worse(self, best: Trial | None) -> bool:
        """Whether every schedule has a longer iteration than the best trial; what has an equal one may be preferred."""
        return best is not None and best.value_ns is not None and self.bound_ns > best.value_ns

    def begin_again(self, request: Request) -> None:
        """The candidate has changed and its best schedule is one of the changed workload: take that one for a way."""
        assert self.best is not None
        ways = workloads(request, self.candidate)
        self.ways = [self.best.workload if way == self.best.workload else way for way in ways]
        self.bounds = list(map(weak_iteration_bound, self.ways))

    @property
    def num_actions(self) -> int:
        """Those of the way of running backward that has most."""
        return max(sum(map(len, way.slots)) for way in self.ways)

    @property
    def is_folded(self) -> bool:
        """Whether devices share programs."""
        return bool(self.ways[0].players)

    @property
    def look_seconds(self) -> float:
        """What a look at its known schedules counts where seconds are deterministic."""
        return SECONDS_PER_LOOK * sum(map(ShorterRun().actions, self.ways))

    def look_plainly(self, names: Sequence[str] = PLAIN, *, grouped: bool = True) -> None:
        """Only GPipe and 1F1B, which takes a time linear in the actions; of programs no longer than a first plan's."""
        for workload in self.ways:
            self.offer(plain_look(workload, MOST_ENTRIES, names, grouped=grouped))

    def look(self, *, thorough: bool = False, usual: Usual | None = None, others: bool = True) -> None:
        """Only known schedules, which takes no solver: all, or those of the ``usual`` one's strategy.

        Where none of these fits all ``others`` are looked at, too, unless there are more than :data:`FEW_ACTIONS`.
        """
        look, found = named(self.steps, FirstLook) or FirstLook(), False
        for workload in self.ways:
            names = () if usual is None else usual.names(workload.splits_backward)
            if usual is None or names:
                schedule = first_look(workload, look, thorough=thorough, names=names)
                self.offer(schedule)
                found |= schedule is not None
        if usual is not None and not found and others and self.num_actions <= FEW_ACTIONS:
            self.look(thorough=thorough)

    def look_within(self, request: Request, share: Budget, usual: Usual | None = None, *, others: bool = True) -> None:
        """The same in a share of the time, or a search where the schedule is one that is asked for; it is charged."""
        if request.dictates:
            self.search(request, share, share.remaining)
        else:
            self.look(usual=usual, others=others)
        share.charge(self.look_seconds)

    def search(self, request: Request, budget: Budget, seconds: float, progress: Progress | None = None) -> None:
        """Search for so long, over the ways of running backward.

        Where there are two, each gets a short look. One whose bound is no less than what the other has found is out;
        the better of the others gets the time that is left.

        Raises:
            InfeasibleError: no schedule fits.
            UsageError: a scheduler that does not apply.
        """
        with budget.share(seconds) as share:
            self._search(request, share, progress)

    def _search(self, request: Request, share: Budget, progress: Progress | None) -> None:
        found: dict[int, Schedule] = {}
        failures: list[PipeplanError] = []
        looking = named(self.steps, BackwardWays) or BackwardWays()
        for way, workload in enumerate(self.ways):
            if self._hopeless(way) or (found and share.interrupted):
                continue
            seconds = share.remaining * (looking.share if len(self.ways) > 1 else 1.0)
            try:
                found[way] = self._searched(request, workload, share, seconds, self._known(workload), progress)
            except (InfeasibleError, UsageError) as error:  # a classic schedule may apply to only one way
                failures.append(error)
                continue
            self._learn(way, found[way])
        if not found:
            if failures:
                raise failures[0]
            return
        best = min(found, key=lambda way: found[way].iteration_ns)
        more = request.scheduler in SEARCHING and len(self.ways) > 1
        if more and not found[best].optimal and not share.expired:
            again = self._searched(request, self.ways[best], share, share.remaining, found[best], progress)
            self._learn(best, again)

    def search_equals(self, request: Request, budget: Budget) -> None:
        """Search what only a look has proved best, for a schedule as short that is preferred.

        As it is proved, little but the search for a repetend applies: it may take half of the time.
        """
        assert self.best is not None
        longer = [
            replace(step, share=REPETEND_SHARE_KEPT) if isinstance(step, RepetendSearch) else step
            for step in self.steps
        ]
        workload = self.best.workload
        self.offer(self._searched(request, workload, budget, budget.remaining, self.best, None, longer))

    def _searched(
        self,
        request: Request,
        workload: Workload,
        budget: Budget,
        seconds: float,
        known: Schedule | None,
        progress: Progress | None,
        steps: Sequence[SearchStep] | None = None,
    ) -> Schedule:
        """Search a workload's schedule with a part of the budget, from what is known, by its own steps or others."""
        self.searched = True
        with budget.share(seconds) as share:
            found = search_schedule(
                workload,
                share,
                scheduler=request.scheduler,
                rules=request.rules,
                unroll=request.unroll,
                max_span=request.max_span,
                known=known,
                progress=progress,
                steps=self.steps if steps is None else steps,
            )
        self.notes += found.notes
        return found

    def _hopeless(self, way: int) -> bool:
        """Whether this way of running backward cannot be better than what another one has found."""
        return self.best is not None and self.bounds[way] >= self.best.iteration_ns

    def _known(self, workload: Workload) -> Schedule | None:
        """The best schedule, if it is one of this workload."""
        return self.best if self.best is not None and self.best.workload is workload else None

    def _learn(self, way: int, schedule: Schedule) -> None:
        self.bounds[way] = max(self.bounds[way], schedule.bound_ns)
        self.offer(schedule)

    def offer(self, schedule: Schedule | None) -> None:
        """Take a schedule for the best, unless that is preferred; of the same once more what is newly known of it.

        Its orders stay those that a plan may have been made of, and comparing it with itself would take seconds of a
        long one.
        """
        with shielded():  # what was found while there was time
            if schedule is None:
                return
            best = self.best
            if best is not None and _is_same(best, schedule):
                self.best = replace(schedule, orders=best.orders)
            elif best is None or not preferred(best, schedule):
                self.best = schedule

    @property
    def settled(self) -> Schedule:
        """The best schedule, with what is proved for every way of running backward, and forwards in parts.

        Of actions that take all their inputs first, if its own do, else of those that wait inside.
        """
        found = self.parted or self.best
        assert found is not None
        return replace(found, bound_ns=min(found.iteration_ns, self.bound_ns))


@dataclass(frozen=True, slots=True)
class LookAhead:
    """A proposal to be made, and the known schedules of it to be looked at, without anything that was found before.

    ``looks`` says that schedules are looked at, and not only the candidate made; of a ``large`` request only those that
    it was cut for. What cannot be shorter than ``best_ns`` is not looked at: whoever asks has found that, or less.
    """

    request: Request
    propose: Proposal
    steps: Sequence[SearchStep]
    looks: bool
    large: bool
    best_ns: int | None = None


@dataclass(frozen=True, slots=True)
class LookedAt:
    """What came of a look: the candidate, or why there is none; its trial and best schedule, where there is one."""

    candidate: CandidateOrError | None
    trial: Trial | None = None
    found: Schedule | None = None


def look_at(look: LookAhead) -> LookedAt:
    """Make a proposal and look at its known schedules, if any may be worth it: deterministic, whoever runs it."""
    candidate = look.propose()
    if not look.looks or not isinstance(candidate, PlacementCandidate):
        return LookedAt(candidate)
    try:
        trial = Trial.where_quick(look.request, candidate, look.steps)
        if look.best_ns is not None and trial.bound_ns > look.best_ns:
            return LookedAt(candidate)
        trial.look(usual=candidate.usual if look.large else None)
    except PipeplanError:  # which whoever asks finds out
        return LookedAt(candidate)
    found, trial.best = trial.best, None
    return LookedAt(candidate, trial, found)


class PlanStep(SearchStep, ABC):
    """A step of the search for a plan. Those ``in_turn`` are repeated, the others run once at the end if they apply."""

    in_turn: ClassVar[bool] = False

    def after_all(self, search: PlanSearch) -> bool:
        """Whether it runs at the end even if there is no time left."""
        return False

    def reserved(self, search: PlanSearch) -> float:
        """Seconds that are kept for it while there is no plan."""
        return 0.0

    def applies(self, search: PlanSearch) -> bool:
        """Whether the precondition holds."""
        return True

    @abstractmethod
    def run(self, search: PlanSearch) -> None:
        """Add to what is known."""


@dataclass(frozen=True, slots=True)
class _Coming:
    """A proposal that may have been handed to a worker; calling it makes it here."""

    given: Given[LookAhead, LookedAt]

    def __call__(self) -> CandidateOrError | None:
        return self.given.item.propose()


@dataclass(frozen=True, slots=True)
class MadePlan:
    """The plan of a schedule, in how many seconds it was made, and ns that no iteration of its placement is below.

    ``orders`` are those of the trial that it was made of: of blocks where stages are of groups of blocks, too. That one
    may be what ``stands_in`` for the plan of a planner by name. ``layout`` says in words what it is of, as a trial.
    """

    schedule: Schedule
    plan: Plan
    seconds: float
    bound_ns: int
    orders: Orders
    stands_in: bool = False
    layout: str = ""


@dataclass(slots=True)
class PlanSearch:
    """Trials in the order they were made, and why other candidates are not among them.

    ``open`` makes the candidates not yet looked at, of which those that are a ``fallback`` are for now, or the others;
    no more will be once ``all_seen``. ``looked_at`` counts those there was a look at, ``unfinished`` those of them that
    had too little time, ``refuted`` those that became no trials, since no schedule of theirs can be better. ``others``
    {key: ns} are bounds of what is none of the trials: of all that the request leaves open (None), of candidates that
    are not tried or were given up. ``sizes`` are the micro-batches per replica that were looked at. ``finalists`` are
    the trials with a schedule at the end, best first. ``notes`` say what went wrong, ``made`` is the plan that was made
    last, by which it is known how long that takes: that much time is reserved for it. ``making_seconds`` is what
    making plans has taken; the first was ``given_up`` if there was no time. The ``spare`` trial is for want of any
    other: its replicas divide more than they do by default. One that ``stands_in`` is cut evenly, and known as long as
    the planner that was asked for has none. Where the search ``explains`` what it found, ``beside`` are trials that
    only stand beside the best, ``as_cut`` has the bound in ns of what stands nowhere, infinite where it does not fit;
    layouts that there was no time for are left ``unexplained``. Of a large request
    proposals are ``put_off`` whose ``row`` of the table should take long by what ``forms`` of its kind were off.
    To ``secure`` is to make the best trial's plan, or to keep time for it; ``not_made`` says why it was not made.
    ``lost`` are candidates whose workers died of them: of what.
    """

    request: Request
    budget: Budget
    progress: Progress | None
    steps: Sequence[SearchStep]
    trials: list[Trial] = field(default_factory=list)
    failures: list[PipeplanError] = field(default_factory=list)
    open: Iterator[Proposal] = field(default_factory=lambda: iter(()))
    others: dict[Hashable, int] = field(default_factory=dict)
    looked_at: int = 0
    unfinished: int = 0
    refuted: int = 0
    fallback: bool = False
    all_seen: bool = False
    finalists: list[Trial] = field(default_factory=list)
    partition_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    sizes: set[int] = field(default_factory=set)
    begun: bool = False
    started: bool = False
    start_ns: int | None = None
    making_seconds: float = 0.0
    made: MadePlan | None = None
    given_up: bool = False
    spare: Trial | None = None
    explains: bool = False
    beside: list[Trial] = field(default_factory=list)
    as_cut: dict[Hashable, float] = field(default_factory=dict)
    unexplained: bool = False
    stands_in: Trial | None = None
    ahead: Ahead[LookAhead, LookedAt] | None = None
    lost: list[str] = field(default_factory=list)
    forms: FormErrors | None = field(default_factory=FormErrors)
    row: BoundedChoice | None = None
    put_off: list[Proposal] = field(default_factory=list)
    not_made: str = ""
    secure: Callable[[], None] = lambda: None
    _looked: LookedAt | None = None
    _seen: set[Hashable] = field(default_factory=set)
    _said: tuple[int, str, bool] | None = None
    _told: str = ""
    _bounded: bool = field(init=False)

    def __post_init__(self) -> None:
        self._bounded = isinstance(self.request.placement, Placement)

    def run(self, candidates: Callable[[Request], Iterator[Proposal]]) -> None:
        """Repeat the steps that go in turn until all candidates have been looked at or time is up; then all others.

        What is only a fallback comes if there is nothing else; last, unless the request says whether they may, replicas
        that divide what they keep. Whatever runs ends when time is up, or at Ctrl-C.
        """
        steps = [step for step in self.steps if isinstance(step, PlanStep)]
        self.budget.wait(max(0.0, self.lateness - ENDING), FIRST_SECONDS)
        self.budget.reserved = sum(step.reserved(self) for step in steps)
        left = steps
        with self.budget.hearing_interrupts(), self.budget.ended():
            if not self._bounded:
                self.others[None] = 1  # the least a bound is; it takes longer than the first plan to find out more
            in_turn = [step for step in steps if step.in_turn]
            unfit = unfit_by_state(self.request)
            if unfit is not None:
                self.failures.append(unfit)
            else:
                self._try_all(candidates, in_turn)
            short = unfit is None and self.best is None and self.may_divide
            if short and (self.gives_way or any(isinstance(e, InfeasibleError) for e in self.failures)):
                self.request, self.begun = self.request.with_any_level(), (self.spare or self.stands_in) is not None
                self.trials += [] if self.spare is None else [self.spare]
                self._try_all(candidates, in_turn)
            self.finalists = sorted(self.done, key=cmp_to_key(_compared))
            left = [step for step in steps if not step.in_turn]
            while left:
                step = left.pop(0)
                with self.noting(step.name):
                    if step.applies(self):
                        step.run(self)
        if not (self.given_up and self.budget.interrupted) and self.answer is not None and not self._bounded:
            with self.noting("a bound"):
                self.others[None], self._bounded = prompt_bound(self.request, self.budget), True
        for step in left:
            with self.noting(step.name):
                if step.after_all(self) and step.applies(self):
                    step.run(self)

    @property
    def lateness(self) -> float:
        """Seconds by which the search may be late: none where it is a part of something that goes on after it."""
        whole = self.budget.whole
        alone = whole is None or self.budget.seconds >= whole.seconds
        return max(LATE, LATE_SHARE * self.budget.seconds) if alone else 0.0

    def _bound(self) -> None:
        """Find out once, when there is a plan, what no plan that the request leaves open is below."""
        if self.answer is not None and not self._bounded:
            self.others[None] = request_bound(self.request)
            self._bounded = True

    def _try_all(self, candidates: Callable[[Request], Iterator[Proposal]], steps: Sequence[PlanStep]) -> None:
        for fallback in (False, True) if isinstance(self.request.placement, Placement) else (False,):
            self.open = self._given_away(in_turns([candidates(each) for each in self.request.levels]))
            self.fallback, self.all_seen = fallback, False
            self.forms, self.put_off = FormErrors(), []
            self._repeat(steps)
            if self.best is not None:
                return

    @property
    def may_divide(self) -> bool:
        """Whether there may be replicas, in limited memory, that may divide more than has been looked at."""
        request = self.request
        seen = request.zero is not None and (request.zero != AUTO or request.knows_links or request.any_level)
        if seen or request.least_memory is None:
            return False
        if isinstance(request.placement, Placement):
            return any(stage.copies > 1 and not stage.zero for stage in request.placement.stages)
        return request.num_devices > 1 and request.replicas != 1

    @property
    def gives_way(self) -> bool:
        """Whether the rest of the time is for replicas that divide what they keep: without a plan, once half of it is
        over, or where the first plan did not fit unless they do; but a table of layouts has such replicas among all
        others where links are known."""
        if self.best is not None or not self.may_divide:
            return False
        late = self.budget.used > DIVIDED_AFTER * self.budget.seconds
        return late or (self.spare is not None and not (self.request.knows_links and has_table(self.request)))

    def _repeat(self, steps: Sequence[PlanStep]) -> None:
        """In turn until all candidates are seen or steps have often ended with an error, and only repeat it."""
        ended = 0
        while not self.all_seen and ended < MOST_ENDED:
            for step in steps:
                ended += 1
                with self.noting(step.name):
                    step.run(self)
                    ended -= 1
                with self.noting("a bound"):
                    self._bound()

    def noting(self, what: str) -> AbstractContextManager[None]:
        """What goes wrong inside is only noted once there is a plan, as :func:`pipeplan.schedule.state.noted` says.

        That nothing fits is the answer all the same where a plan only stands in.
        """

        def is_something(error: Exception) -> bool:
            return (self.best if isinstance(error, InfeasibleError) else self.answer) is not None

        return noted(what, self.notes, is_something)

    @property
    def best(self) -> Trial | None:
        """The trial with the shortest iteration, and of equals the one whose schedule is preferred."""
        least = min((trial.value_ns for trial in self.done if trial.value_ns is not None), default=None)
        equal = [trial for trial in self.done if trial.value_ns == least]
        return min(equal, key=cmp_to_key(_compared)) if equal else None

    @property
    def answer(self) -> Trial | None:
        """The best trial, or for want of one the spare, or what stands in for a planner's."""
        return self.best or self.spare or self.stands_in

    @property
    def done(self) -> list[Trial]:
        """Trials with a schedule."""
        return [trial for trial in self.trials if trial.best is not None]

    @property
    def live(self) -> list[Trial]:
        """Trials that may become the best, the most promising first."""
        best = self.best
        live = [trial for trial in self.trials if not trial.hopeless(best)]
        return sorted(live, key=lambda trial: (trial.best is None, (trial.value_ns or 0) + trial.bound_ns))

    def take(self) -> PlacementCandidate | None:
        """The next candidate; None where there is none, it was seen before, or that were all."""
        begun = self.budget.elapsed
        propose = next(self.open, None)
        if propose is None and self.put_off:
            self.open, self.put_off, self.forms = iter(self.put_off), [], None
            return None
        if propose is not None and self.refutes(propose):
            self.looked_at += 1
            self.refuted += 1
            return None
        self.row = propose.row if isinstance(propose, BoundedProposal) else None
        if propose is not None and self._puts_off():
            self.put_off.append(propose)
            return None
        if self.row is not None:
            self.is_first(self.row.choice)
        candidate = None if propose is None else self._made(propose)
        if propose is not None and is_large(self.request):
            self.budget.charge(SECONDS_PER_CUT)
        self.partition_seconds += self.budget.elapsed - begun
        if propose is None:
            self.all_seen = True
        elif isinstance(candidate, PipeplanError):
            self.failures.append(candidate)
            if isinstance(candidate, InfeasibleError):
                self.learn(None)
        elif candidate is not None and candidate.fallback != self.fallback:
            if not self.fallback:
                self._leave(candidate)
        elif candidate is not None and self.is_new(candidate):
            self.sizes.add(candidate.size_per_replica)
            self.others.pop(candidate.key, None)
            return candidate
        return None

    def is_new(self, candidate: PlacementCandidate) -> bool:
        """Whether nothing was made of a candidate yet, which is so once."""
        return self.is_first(candidate.key)

    def is_first(self, key: Hashable) -> bool:
        """Whether nothing was tried under this key yet, which is so once."""
        new = key not in self._seen
        self._seen.add(key)
        return new

    def _given_away(self, proposals: Iterator[Proposal]) -> Iterator[Proposal]:
        """The proposals in their order, which workers make ahead, where there are some."""
        if self.ahead is None:
            yield from proposals
            return
        request, given = self.request, isinstance(self.request.placement, Placement)
        looks, large = request.scheduler == "auto" and not given, is_large(request)

        def best_ns() -> int | None:
            return None if self.best is None else self.best.value_ns

        items = (LookAhead(request, propose, self.steps, looks, large, best_ns()) for propose in proposals)
        for each in self.ahead.over(items, lambda look: not self.refutes(look.propose)):
            own = each.item.propose
            coming = _Coming(each)
            yield replace(own, propose=coming) if isinstance(own, BoundedProposal) else coming

    def _made(self, propose: Proposal) -> CandidateOrError | None:
        """The candidate, which a worker may have made, with what it has looked at."""
        coming = propose.propose if isinstance(propose, BoundedProposal) else propose
        if not isinstance(coming, _Coming) or self.ahead is None:
            return propose()
        try:
            looked = self.ahead.found(coming.given)
        except LostError as lost:
            self.unfinished += 1
            self.lost.append(str(lost))
            return None
        if looked is None:
            return propose()
        self._looked = looked
        return looked.candidate

    def trial_of(self, candidate: PlacementCandidate) -> Trial:
        """The trial of a candidate that was taken last.

        Raises:
            PipeplanError: there is none, as its costs say.
        """
        looked = self._looked
        if looked is not None and looked.candidate is candidate and looked.trial is not None:
            return looked.trial
        return Trial.where_quick(self.request, candidate, self.steps)

    def look(self, trial: Trial, candidate: PlacementCandidate) -> None:
        """Look at known schedules of its trial, unless a worker has."""
        looked = self._looked
        if looked is not None and looked.trial is trial:
            trial.offer(looked.found)
        else:
            trial.look(usual=candidate.usual if is_large(self.request) else None)
        if trial.best is None and self.best is None and trial.num_actions > FEW_ACTIONS:
            trial.look()  # whatever it takes: any plan is better than none

    def try_row(self, row: BoundedChoice, share: Budget) -> None:
        """Look at a row of a table of layouts before its turn; it is a trial if it is the best."""
        request, best = self.request, self.best
        if not self.is_first(row.choice):
            return
        candidate = placed(request, row.choice)
        if is_large(request):
            share.charge(SECONDS_PER_CUT)
        if best is None or not isinstance(candidate, PlacementCandidate) or not self.is_new(candidate):
            return
        with suppress(PipeplanError):  # it does not fit, or has no such schedule
            trial = self.trial_of(candidate)
            self.looked_at += 1
            if trial.hopeless(best):
                self.refuted += 1
                return
            trial.look_within(request, share, candidate.usual if is_large(request) else None)
            if trial.value_ns is not None and trial.value_ns < (best.value_ns or 0):
                self.trials.append(trial)
                self.report(trial)

    def refutes(self, propose: Proposal) -> bool:
        """Whether it is known of a proposal, before it is made, that every iteration of it is longer than the best."""
        value = None if self.best is None else self.best.value_ns
        return isinstance(propose, BoundedProposal) and value is not None and propose.least_ns > value

    def _puts_off(self) -> bool:
        """Whether others come before the row whose turn it is, by what looks at rows of its kind have found."""
        return self.row is not None and self.is_put_off(self.row)

    def is_put_off(self, row: BoundedChoice) -> bool:
        """Whether others come before a row of a large request.

        They do where it should take longer than the best by what is known of its kind: by little, if a look takes long.
        """
        best = self.best
        if best is None or best.value_ns is None or self.forms is None or not is_large(self.request):
            return False
        if row.choice.actions_looked_at > LONG_LOOK and self.forms.likely_ns(row) > best.value_ns:
            return True
        return self.forms.expected_ns(row) > NEAR * best.value_ns

    def learn(self, trial: Trial | None) -> None:
        """What the row whose turn it is turned out to be; None where nothing of it fits.

        Schedules that are not usual for it are only looked at where those do not fit.
        """
        if self.row is None or self.forms is None:
            return
        usual, found = self.row.choice.usual, None if trial is None else trial.best
        names = () if found is None or usual is None else usual.names(found.workload.splits_backward)
        fits = found is not None and found.scheduler.partition("+")[0] in names
        self.forms.learn(self.row, None if found is None or not fits else iteration_of(found))

    def _leave(self, candidate: PlacementCandidate) -> None:
        """A fallback that is not tried where there is something else: what it could be at best is known."""
        with suppress(PipeplanError):
            self.others[candidate.key] = Trial.of(self.request, candidate).bound_ns

    @property
    def bound_ns(self) -> int:
        """No plan that the request leaves open has a shorter iteration."""
        given = isinstance(self.request.placement, Placement)
        return min([*self.others.values(), *(trial.least_ns for trial in self.trials if given)], default=0)

    def say(self, what: str) -> None:
        """Report that no plan is known yet; once, though all is tried again with replicas that divide more."""
        if self.progress is not None and self._told != what:
            self._told = what
            self.progress(what, 0, 0, self.budget.elapsed)

    def found_first(self, trial: Trial, *, spare: bool = False, stands_in: bool = False) -> None:
        """Keep a first trial with a schedule; as the ``spare`` if its replicas divide more than they do by default.

        The best of those that only stand in for what was asked for is kept apart.
        """
        self.looked_at += 1
        self.sizes.add(trial.candidate.size_per_replica)
        if stands_in:
            known = self.stands_in
            self.stands_in = trial if known is None or _compared(trial, known) < 0 else known
        elif spare:
            self.spare = trial
        else:
            self.trials.append(trial)
        self.report(trial)

    def give_up(self, trial: Trial, error: InvalidPlanError) -> None:
        """Go on without a trial whose plan is not valid, which costs nothing but its candidate.

        On stages that were given it may have another schedule, which can still be found.
        """
        placement = trial.candidate.placement
        text = f"a plan of {trial.candidate.source} {placement.strategy} is not valid and was left out: {error}"
        warnings.warn(text, stacklevel=2)
        self.notes.append(text)
        self.failures.append(error)
        self.spare = None if self.spare is trial else self.spare
        self.stands_in = None if self.stands_in is trial else self.stands_in
        if isinstance(self.request.placement, Placement):
            trial.best = trial.parted = None
        else:
            self.trials = [each for each in self.trials if each is not trial]
            self.others[trial.candidate.key] = trial.least_ns

    def report(self, trial: Trial) -> None:
        """Report the best and the bound after a look at a trial."""
        until = f" until {takes_long(self.request)} has one" if trial is self.stands_in else ""
        self._say(f"{trial.candidate.source} {trial.candidate.placement.strategy}{until}", self.answer)

    def listen(self, trial: Trial) -> Progress | None:
        """The progress callback of a trial's schedule search: it reports the best and the bound of the whole search."""
        if self.progress is None:
            return None

        def heard(what: str, iteration_ns: int, bound_ns: int, seconds: float) -> None:
            if self.answer is None and not iteration_ns and self.progress is not None:
                self.progress(what, 0, bound_ns, self.budget.elapsed)
            else:
                own = self.best or self.spare  # what stands in for a planner's is none of its own
                self._say(what, own if iteration_ns else self.answer, iteration_ns or None)

        return heard

    def _say(self, what: str, best: Trial | None, other_ns: int | None = None) -> None:
        values = [value for value in (other_ns, None if best is None else best.value_ns) if value is not None]
        if self.progress is not None and values:
            standing = best is not None and best is self.stands_in
            known = self._said
            if known is None or (known[2] and not standing) or (known[2] == standing and min(values) < known[0]):
                self._said = known = min(values), what, standing
            value, made_by, _ = known
            now = what if what == made_by else f"{what}; the best is from {made_by}"
            self.progress(now, value, min(self.bound_ns, value), self.budget.elapsed)


def said_lost(lost: Sequence[str]) -> tuple[str, ...]:
    """How many candidates were lost with their workers, and why, of which there may be none."""
    if not lost:
        return ()
    whose = "a candidate was lost with its worker"
    if len(lost) > 1:
        whose = f"{len(lost)} candidates were lost with their workers"
    return (f"{whose} ({'; '.join(dict.fromkeys(lost))})",)


def unfit_by_state(request: Request) -> InfeasibleError | None:
    """That nothing fits, where devices have less memory together than a model's state takes once.

    Only where there is a table of layouts: else a search finds that out as soon, and says of which stage.
    """
    limits = [limit for limit in request.memory if limit is not None]
    if len(limits) < request.num_devices or not has_table(request):
        return None
    state = least_state_bytes(request)
    if state <= sum(limits):
        return None
    return InfeasibleError(
        f"parameters, gradients and optimizer state take {format_bytes(state)}, each once, and "
        f"{request.num_devices} devices have {format_bytes(sum(limits))} together: nothing fits; --memory of less "
        f"than {format_bytes(state // request.num_devices)} cannot do, nor, of this size, fewer --devices than "
        f"{-(-state // max(limits))}"
    )


def iteration_of(schedule: Schedule) -> int:
    """Ns of a schedule's iteration, gradients summed."""
    return schedule.iteration_ns


_SIMPLE_FIRST: dict[str, int] = {name: place for place, name in enumerate(STRATEGIES)}

_PREFERENCES: tuple[Callable[[Schedule], int], ...] = (
    iteration_of,
    lambda schedule: schedule.most_bytes,
    lambda schedule: not schedule.repeats,
    lambda schedule: len(schedule.workload.stages),
    lambda schedule: complexity(schedule.scheduler),
    lambda schedule: _SIMPLE_FIRST.get(schedule.workload.placement, len(STRATEGIES)),
)


def _is_same(one: Schedule, other: Schedule) -> bool:
    """Whether two schedules of a workload run the same actions in the same order, and are said to be made alike."""
    own = one.workload, one.iteration_ns, one.scheduler, one.loop, one.orders
    return own == (other.workload, other.iteration_ns, other.scheduler, other.loop, other.orders)


def preferred(one: Schedule, other: Schedule) -> bool:
    """Whether the first has the shorter iteration; of equals fewer peak bytes, a repetend, fewer or simpler parts."""
    return first_by(_PREFERENCES, one, other)


def _compared(one: Trial, other: Trial) -> int:
    here, there = one.parted or one.best, other.parted or other.best
    assert here is not None
    assert there is not None
    return preferred(there, here) - preferred(here, there)


def workloads(request: Request, candidate: PlacementCandidate) -> list[Workload]:
    """The workload of a candidate for each way of running backward that is asked for: split first.

    Raises:
        UsageError: split backward is asked for, and the profile has no costs for it.
    """
    rules = request.rules
    found = [exchanging_workload(request, candidate, split_backward=split) for split in _backward_ways(request)]
    if request.late_inputs:  # else the best are tried so at the end
        found = [late_of(request, each) for each in found]
    if rules is None or not rules.instructions:
        return found
    with naming(rules):
        return [with_instructions(workload, rules.instructions, request.cluster) for workload in found]


def late_of(request: Request, workload: Workload) -> Workload:
    """The workload whose actions may wait inside for messages; the same where none would, or may."""
    if request.late_inputs is False or request.num_parted or (request.rules and request.rules.instructions):
        return workload
    return with_late_inputs(request.profile, workload, request.cluster)


def _backward_ways(request: Request) -> list[bool]:
    possible = can_split(request.profile)
    if request.split_backward and not possible:
        raise UsageError(
            "--split-backward yes needs input_grad_ns and weight_grad_ns, which no block of profile "
            f"{request.profile.name!r} has"
        )
    if request.split_backward is None:
        return [True, False] if possible else [False]
    return [request.split_backward]
