"""The search for a plan: everything it tries, in order, and the plan that results.

Candidates get a first look as they come: bounds, and only known schedules. In turn with that, those that may still
become the best are searched, the more promising ones for more and more of the time. There is a plan from the first look
on. Changes that keep the orders of the best ones come last: no recomputation, forwards in two parts (AutoPipe III-C);
the latter are also tried along the way where they are quick.

A step is a frozen dataclass whose fields are its constants. A search takes the steps as an argument, so that each can
be left out: ``search_plan(request, steps=without({"windows"}))``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain

from pipeplan.costs.context import of_stages
from pipeplan.costs.zero import AUTO, WHOLE, Experts, Zero
from pipeplan.errors import (
    InfeasibleError,
    InvalidPlanError,
    NotApplicableError,
    PipeplanError,
    SearchTimeoutError,
    TooLargeError,
    TooLongError,
    UsageError,
)
from pipeplan.files import PlacedStage, Placement, Plan
from pipeplan.files.plan import AlternativeFigures
from pipeplan.partition.baselines import num_to_split
from pipeplan.partition.chain.costs import StageTimes
from pipeplan.partition.recomputation import choices_of, first_counts
from pipeplan.planning.alternatives import (
    DifferentPlans,
    EqualPlan,
    Explanation,
    explained,
    kept_alternatives,
    tied_with,
    trial_words,
    unexplained,
)
from pipeplan.planning.block_splits import OneStage, SplitFinalists
from pipeplan.planning.build_plan import CandidateCounts, Result, planned, said_of_choices
from pipeplan.planning.candidates import (
    UNDIVIDED,
    PlacementCandidate,
    Proposal,
    PublishedPlanners,
    RecomputedBlocks,
    StageGraphs,
    candidates,
    even_cuts,
    has_table,
    is_large,
    kept_choice,
    num_actions,
    placed,
    shorter_cuts,
)
from pipeplan.planning.choices import takes_long
from pipeplan.planning.device_orders import DeviceOrders
from pipeplan.planning.divided_state import DivideState
from pipeplan.planning.exchanging import Every, Tried, exchanged_placement, may_choose, quickest_every
from pipeplan.planning.expanding import of_blocks
from pipeplan.planning.infeasibility import ExplainShortage, most_telling
from pipeplan.planning.leanest import lean_cuts
from pipeplan.planning.moves import Moves
from pipeplan.planning.other_schedules import OtherSchedules
from pipeplan.planning.own_ways import OwnWays
from pipeplan.planning.partition_trials import StageWays
from pipeplan.planning.planners import AUTO_PLANNER, PLANNERS, require_planner
from pipeplan.planning.request import SUBMODULES, Request, first_layers_open
from pipeplan.planning.restrictions import layers_in
from pipeplan.planning.start import StartPlan, gain_said, require_start, with_orders
from pipeplan.planning.trials import (
    BackwardWays,
    MadePlan,
    PlanSearch,
    PlanStep,
    Trial,
    iteration_of,
    late_of,
    look_at,
    preferred,
    said_lost,
    workloads,
)
from pipeplan.planning.uniform_space import Choice
from pipeplan.planning.usual import USUAL
from pipeplan.planning.widths import EveryWidth
from pipeplan.planning.workers import Ahead, CandidateWorkers, workers_of
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.longer import ShorterRun
from pipeplan.schedule.search import PLAIN, SEARCHING, FewerBytes, FirstLook, first_look, search_schedule
from pipeplan.schedule.state import Progress, Schedule, SearchStep, named
from pipeplan.schedule.steps import STEPS as SCHEDULE_STEPS
from pipeplan.search_constants import (
    BESIDE_SECONDS,
    CHAINS_BETWEEN,
    CHAINS_FIRST,
    COUNTING_SECONDS,
    EASING_BEYOND,
    ENDING,
    EVEN_CUT_HURRY,
    EVEN_CUT_LEFT,
    EVEN_CUT_MOST,
    EVEN_CUT_SECONDS,
    EVEN_CUT_SHARE,
    EVEN_CUT_WORKING,
    EXPLAINING_SHARE,
    FEW_ENTRIES,
    FINALISTS,
    GIVING_UP,
    KEPT_SHARE,
    LARGE,
    LAST_PLAN_SECONDS,
    LAST_SLICES_SECONDS,
    LONG_MAKING_SECONDS,
    LOOK_LEAST,
    LOOK_SHARE,
    MAKING_SHARE,
    MAX_WRITTEN,
    MUCH_LARGER,
    SEARCHED_ROUNDS,
    SECONDS_PER_RETIMING,
    SLICED_FEW,
    WRITING_SHARE,
)
from pipeplan.time_limit import Limit, Telling, TimeUpError, checked, checkpoint, clock_of, shielded, time_is_up
from pipeplan.units import format_ns
from pipeplan.workload.bounds import weak_iteration_bound
from pipeplan.workload.elements import Recompute, Stage, recompute_of
from pipeplan.workload.exchanges import exchange_work
from pipeplan.workload.kinds import Role
from pipeplan.workload.slices import without_parts
from pipeplan.workload.workload import Workload


@dataclass(frozen=True)
class EaseRecomputation(PlanStep):
    """Blocks of stages of the best ``finalists`` that need not be recomputed after all.

    Where nothing is left of a time that counts work, it may take a part ``beyond`` of the limit all the same.
    """

    finalists: int = FINALISTS
    beyond: float = EASING_BEYOND
    name = "ease recomputation"
    when = "the best {finalists} plans; recomputation is open; orders still fit"

    def applies(self, search: PlanSearch) -> bool:
        request = search.request
        return request.recompute is None and (request.only is None or not request.only.alike)

    def run(self, search: PlanSearch) -> None:
        budget = search.budget
        with budget.share(max(budget.remaining, self.beyond * budget.seconds)) as share:
            for trial in search.finalists[: self.finalists]:
                _ease(search.request, trial, share, search.listen(trial))


def _ease(request: Request, trial: Trial, budget: Budget, progress: Progress | None) -> None:
    """Let stages recompute less, one after another, as far as the same orders still fit: longest first.

    Of all choices of a stage's blocks the quickest is taken that fits (:mod:`pipeplan.partition.recomputation`). What
    known schedules, and a search in the time that is left, make of the eased stages counts too.
    """
    assert trial.best is not None  # it is a finalist
    stages, work = trial.best.workload.stages, trial.best.workload.work_of_stages
    eased = False
    for index in sorted((i for i, stage in enumerate(stages) if stage.recomputes), key=lambda i: -work[i]):
        for placement, schedule in () if budget.expired else _eased(request, trial, index, budget):
            if schedule is not None and iteration_of(schedule) <= iteration_of(trial.best):
                trial.candidate = replace(trial.candidate, placement=placement)
                trial.best, trial.bounds = schedule, [schedule.bound_ns]
                eased = True
    if eased:
        trial.begin_again(request)
        if request.scheduler == "auto" and not budget.expired:
            trial.look(thorough=True)
            budget.charge(trial.look_seconds)
        if not budget.expired:
            with suppress(PipeplanError):  # there is a schedule
                trial.search(request, budget, budget.remaining, progress)


def _eased(request: Request, trial: Trial, index: int, budget: Budget) -> Iterator[tuple[Placement, Schedule | None]]:
    """The placement where a stage keeps everything, and else those on the way to the quickest choice that fits.

    Each with the trial's orders, where they fit. Less memory takes more time, so that halving finds it.
    """
    stage = trial.candidate.placement.stages[index]

    def tried(recompute: Recompute) -> tuple[Placement, Schedule | None]:
        placement = _changed(trial.candidate.placement, {index: {"recompute": recompute}})
        budget.charge(SECONDS_PER_RETIMING * trial.num_actions)
        return placement, _retimed(request, trial, placement, "")

    whole = tried(False)
    yield whole
    if whole[1] is not None or stage.configurations or budget.expired:
        return
    size = (stage.microbatch_size or trial.candidate.batch.microbatch_size) // stage.replicas
    profile = of_stages(request.profile, [stage])
    choices = choices_of(profile, stage.blocks, size, stage.shards, stage.context, Experts.of(stage))
    low, high = 1, choices.num_undominated
    while low < high and not budget.expired:
        middle = (low + high) // 2
        found = tried(choices.undominated(middle))
        yield found
        low, high = (middle + 1, high) if found[1] is None else (low, middle)


@dataclass(frozen=True)
class EaseFirstLayers(PlanStep):
    """The best ``finalists`` that recompute the first layers of each stage, as many in all, as Megatron-LM has it: with
    as few as still fit.

    Cuts choose how many by what a usual schedule holds, which true orders may not.
    """

    finalists: int = FINALISTS
    name = "ease first layers"
    when = "the best {finalists} plans; --for megatron; recomputation is open; first layers recompute"

    def applies(self, search: PlanSearch) -> bool:
        return first_layers_open(search.request)

    def run(self, search: PlanSearch) -> None:
        best = [] if search.best is None else [search.best]
        for trial in search.finalists[: self.finalists] or best:
            stages = () if trial.best is None else trial.best.workload.stages
            counts = [_layers_again(search.request, stage) for stage in stages]
            if all(count is not None for count in counts):
                self._ease(search, trial, max((count or 0 for count in counts), default=0))

    def _ease(self, search: PlanSearch, trial: Trial, high: int) -> None:
        """Fewer layers take less time and more memory, so that halving finds how few fit."""
        request, stages = search.request, trial.candidate.placement.stages
        numbers = [[*accumulate(_are_layers(request, stage.blocks))] for stage in stages]
        fewer = [count for count in first_counts(numbers) if count < high]
        while fewer and not search.budget.expired:
            middle = len(fewer) // 2
            first = [_first_again(request, stage.blocks, fewer[middle]) for stage in stages]
            changes = {index: {"recompute": again} for index, again in enumerate(first)}
            placement = _changed(trial.candidate.placement, changes)
            schedule = _retimed(request, trial, placement, "")
            if schedule is None:
                fewer = fewer[middle + 1 :]
                continue
            fewer = fewer[:middle]
            trial.candidate, trial.best = replace(trial.candidate, placement=placement), schedule
            trial.bounds = [schedule.bound_ns]
            trial.begin_again(request)
            search.report(trial)


def _layers_again(request: Request, stage: Stage) -> int | None:
    """How many layers of a stage recompute, which are its first ones; None where they are others, or not whole."""
    layers = _are_layers(request, stage.blocks)
    own = [(again, count) for again, count in zip(stage.again, layers, strict=True) if count]
    kinds, first = [again for again, _ in own], sum(again is True for again, _ in own)
    if kinds != [True] * first + [False] * (len(own) - first):
        return None
    return sum(count for _, count in own[:first])


def _first_again(request: Request, groups: Sequence[str], count: int) -> Recompute:
    """What the groups of a stage recompute where so many of its layers do."""
    layers = _are_layers(request, groups)
    found = zip(layers, accumulate(layers), strict=True)
    return recompute_of(tuple(bool(own) and number <= count for own, number in found))


def _are_layers(request: Request, groups: Sequence[str]) -> list[int]:
    """[group] how many layers it is."""
    assert request.joined is not None  # it is of a target
    return layers_in(request.joined, groups)


@dataclass(frozen=True)
class EaseSharding(PlanStep):
    """Stages of the best ``finalists`` that are quicker if replicas divide less, or in groups, where orders still fit.

    On rings the halves of an all-reduce take as long as the whole; measured links may say otherwise. What levels 2 and
    3 exchange with each micro-batch is all the less, the less they divide, and the nearer the replicas of a group are.
    """

    finalists: int = FINALISTS
    name = "ease sharding"
    when = "the best {finalists} plans; --zero auto; one route"

    def applies(self, search: PlanSearch) -> bool:
        request = search.request
        return request.zero == AUTO and request.cluster is not None and request.only is None

    def run(self, search: PlanSearch) -> None:
        for trial in search.finalists[: self.finalists]:
            _divide_less(search.request, trial)


def _divide_less(request: Request, trial: Trial) -> None:
    """Let replicas keep more of their state where that makes a shorter iteration with the same orders.

    Of each stage the quickest way first: a lower level, or groups of fewer replicas.
    """
    assert trial.best is not None  # it is a finalist
    divided, eased = trial.best.workload, False
    if divided.num_routes > 1:
        return
    for index, ways in _quicker_ways(request, trial.candidate, divided).items():
        for change in ways:
            placement = _changed(trial.candidate.placement, {index: change})
            schedule = _retimed(request, trial, placement, "")
            if schedule is not None and iteration_of(schedule) < iteration_of(trial.best):
                trial.candidate = replace(trial.candidate, placement=placement)
                trial.best, trial.bounds = schedule, [schedule.bound_ns]
                eased = True
                break
    if eased:
        trial.begin_again(request)


_Change = dict[str, object]


def _quicker_ways(request: Request, candidate: PlacementCandidate, divided: Workload) -> dict[int, list[_Change]]:
    """{stage: what its replicas may divide instead in less time, the quickest first; of equals what divides most}"""
    stages: dict[Zero, dict[int, _Change]] = {}
    for index, stage in enumerate(divided.stages):
        for zero in _less_divided(request, stage):
            stages.setdefault(zero, {})[index] = UNDIVIDED | zero.keys(stage.copies)
    split = replace(request, split_backward=divided.splits_backward)
    found: dict[int, list[tuple[int, int, Zero]]] = {}
    for zero, changes in checked(stages.items(), 1):
        other = workloads(split, replace(candidate, placement=_changed(candidate.placement, changes)))[0]
        for index in changes:
            if (time := _stage_ns(other, index)) < _stage_ns(divided, index):
                found.setdefault(index, []).append((time, -zero.level, zero))
    return {index: [stages[zero][index] for *_, zero in sorted(ways)] for index, ways in sorted(found.items())}


def _less_divided(request: Request, stage: Stage) -> Iterator[Zero]:
    """What replicas of a stage may divide instead: by its level or lower ones, in its groups or smaller ones."""
    if stage.sharers == 1:
        return
    yield WHOLE
    for level in range(1, stage.zero + 1):
        for group in range(2, stage.sharers + 1):
            fits = stage.sharers % group == 0 and request.zero_group in (None, group)
            if fits and (level, group) != (stage.zero, stage.sharers):
                yield Zero(level, group)


def _stage_ns(workload: Workload, index: int) -> int:
    """What a stage's devices compute and exchange in an iteration, one after the other."""
    stage = workload.stages[index]
    actions = workload.mini_batch // (stage.microbatch_size * workload.num_routes)
    exchanged = exchange_work(workload, index)
    return actions * workload.work_of_stages[index] + exchanged + stage.sync_ns + stage.gather_ns


@dataclass(frozen=True)
class ExchangeByActions(PlanStep):
    """Sharded state of the best ``finalists`` is exchanged by actions of programs, where orders fit and are quicker.

    Of small requests each candidate is tried so from the beginning (:mod:`.exchanging`).
    """

    finalists: int = FINALISTS
    name = "exchanges by actions"
    when = f"more than {LARGE} blocks x devices; the best {{finalists}} plans whose replicas divide gradients"

    def applies(self, search: PlanSearch) -> bool:
        return is_large(search.request)

    def run(self, search: PlanSearch) -> None:
        best = [] if search.best is None else [search.best]
        for trial in search.finalists[: self.finalists] or best:
            if trial.best is not None and may_choose(search.request, trial.candidate, trial.best.workload):
                self._try(search, trial)

    def _try(self, search: PlanSearch, trial: Trial) -> None:
        placement, base = trial.candidate.placement, trial.best
        assert base is not None

        def tried(every: Every) -> Tried[Schedule] | None:
            found = _retimed(search.request, trial, exchanged_placement(placement, every), "")
            return None if found is None else (iteration_of(found), found.most_bytes, every, found)

        found = quickest_every(base.workload, tried)
        if found is not None and found[0] < iteration_of(base):
            trial.candidate = replace(trial.candidate, placement=exchanged_placement(placement, found[2]))
            trial.best, trial.bounds = found[3], [found[3].bound_ns]
            trial.begin_again(search.request)
            search.report(trial)


@dataclass(frozen=True)
class LessMemoryOfBest(FewerBytes, PlanStep):
    """The best plan, where it is proved, once more in less memory."""

    def applies(self, search: PlanSearch) -> bool:
        """Only what searches make may change, not a schedule that is asked for by name."""
        request = search.request
        return request.scheduler in SEARCHING and request.max_span is None and not search.budget.expired

    def run(self, search: PlanSearch) -> None:
        trial = search.best
        if trial is None or trial.best is None or trial.parted is not None or not trial.settled.optimal:
            return
        if trial.best.loop is not None:
            return
        with search.budget.share(self.share * search.budget.seconds) as share:
            if not trial.searched:
                with suppress(PipeplanError):  # there is a schedule
                    trial.search_equals(search.request, share)
            found = self.lowered(trial.best, share)
        if found is not None and preferred(found, trial.best):
            trial.best = found
            search.report(trial)


@dataclass(frozen=True)
class LateInputs(PlanStep):
    """Actions that begin before all their inputs are there: of the best ``finalists``, where that is open and shorter.

    With the orders there are, which takes next to nothing, and as long as there is time with known schedules made for
    that. Bounds are then of both.
    """

    finalists: int = FINALISTS
    name = "late inputs"
    when = "--late-inputs auto; the best {finalists} plans, of stages that are a graph"

    def applies(self, search: PlanSearch) -> bool:
        return search.request.late_inputs is None and search.request.max_span is None

    def after_all(self, search: PlanSearch) -> bool:
        return True  # what is proved holds only beside it

    def run(self, search: PlanSearch) -> None:
        best = [] if search.best is None else [search.best]
        given = search.trials if isinstance(search.request.placement, Placement) else []
        tried: list[Trial] = []
        for trial in [*(search.finalists[: self.finalists] or best), *given]:
            if not any(trial is other for other in tried):
                tried.append(trial)
                self._try(search, trial)

    def _try(self, search: PlanSearch, trial: Trial) -> None:
        base = trial.best
        if base is None or (late := late_of(search.request, base.workload)) is base.workload:
            return
        with shielded():
            trial.late_bound = weak_iteration_bound(late)
            found = [with_orders(base, late, "")]
        if not search.budget.expired:
            with suppress(PipeplanError):
                found.append(self._anew(search, late))
        for schedule in found:
            if schedule is not None and iteration_of(schedule) < (trial.value_ns or 0):
                trial.best, trial.parted = replace(schedule, pattern=None), None
                search.report(trial)

    @staticmethod
    def _anew(search: PlanSearch, late: Workload) -> Schedule | None:
        """A known schedule, or the one that is asked for by name."""
        request, budget = search.request, search.budget
        if not _is_named(request):
            return first_look(late) if request.scheduler == "auto" else None
        with budget.share(budget.remaining) as share:
            return search_schedule(late, share, scheduler=request.scheduler, rules=request.rules, unroll=request.unroll)


@dataclass(frozen=True)
class SliceForwards(PlanStep):
    """Leading forwards in two parts: of the best ``finalists``, and of candidates with few actions times stages.

    Those take but some tenths of a second, so they are tried at once.
    """

    finalists: int = FINALISTS
    few: int = SLICED_FEW
    name = "slice forwards"
    when = "the best {finalists} plans, and candidates of at most {few} actions x stages; one stage per device"

    def after_all(self, search: PlanSearch) -> bool:
        return bool(search.request.num_parted)  # what was asked for is not a matter of time

    def run(self, search: PlanSearch) -> None:
        best = [] if search.best is None else [search.best]
        for trial in search.finalists[: self.finalists] or best:
            if self.after_all(search) and _takes_little(search, trial.best):
                with shielded():
                    slice_forwards(search.request, trial)
            else:  # a plan that is made of it later has them all the same, if there is time for that
                with suppress(TimeUpError), search.budget.finishing(LAST_SLICES_SECONDS):
                    slice_forwards(search.request, trial)

    def expect(self, request: Request, trial: Trial) -> None:
        """Lower the bound of a new trial to what forwards in parts may make of it, if they are to be tried at once."""
        if self._quick(trial.ways[0]):
            _expect_parts(request, trial)

    def at_once(self, request: Request, trial: Trial) -> None:
        """Slice what was found of a trial, where that is open and quick."""
        trial.parted = None
        if request.num_parted is None and trial.best is not None and self._quick(trial.best.workload):
            slice_forwards(request, trial)

    def _quick(self, workload: Workload) -> bool:
        return len(workload.stages) * sum(map(len, workload.slots)) <= self.few


def _expect_parts(request: Request, trial: Trial) -> None:
    workload = trial.ways[0]
    if request.num_parted is not None or _reason_against_parts(workload) is not None:
        return
    candidate = replace(trial.candidate, placement=_parted(trial, workload, workload.num_microbatches))
    with suppress(UsageError):  # no costs for half the samples
        trial.parted_bound = min(map(weak_iteration_bound, workloads(request, candidate)))


def placement_bound(request: Request, candidate: PlacementCandidate) -> int:
    """Least iteration in ns on a candidate's stages, by work and dependencies, whatever else the request leaves open.

    Raises:
        UsageError: the profile has no costs for what is asked.
    """
    trial = Trial.of(request, candidate)
    _expect_parts(request, trial)
    return trial.bound_ns


def slice_forwards(request: Request, trial: Trial) -> None:
    """Run leading forwards of the trial's best schedule in parts: of as many micro-batches as asked for, or as helps.

    Sliced micro-batch m is cut in two on every stage except the last m, where its forward is no longer warmup. On the
    last stage that cuts it its parts are sent together. It is for one stage per device and one size of micro-batch.
    Where more are asked for than have a forward in the warmup, these are sliced. By AutoPipe's formula there are as
    many as it has, and none where it does not apply.

    Raises:
        UsageError: a number is asked for that the placement or the profile does not allow.
    """
    trial.parted = None
    whole = trial.best
    if request.num_parted == 0 or whole is None:
        return
    reason = _reason_against_parts(whole.workload)
    by_formula = request.num_parted == "autopipe"
    if reason is None and by_formula:
        reason = None if _depth(whole.workload) == len(whole.workload.stages) else "its stages are no chain"
    wanted = request.num_parted if request.num_parted != "autopipe" else 0 if reason else num_by_formula(whole.workload)
    if reason is not None or (wanted == 0 and by_formula):
        if wanted is not None and not by_formula:
            raise UsageError(f"--slices {wanted} does not apply: {reason}")
        return
    most = min(1 + max(whole.workload.stage_depths), whole.workload.num_microbatches)
    for count in [min(wanted, most)] if wanted is not None else range(1, most + 1):
        try:
            schedule = _retimed(request, trial, _parted(trial, whole.workload, count), "+slices")
        except UsageError:  # no costs for half the samples
            if wanted is not None:
                raise
            return
        if schedule is not None and (wanted is not None or iteration_of(schedule) < (trial.value_ns or 0)):
            trial.parted = replace(schedule, pattern=None)


def num_by_formula(workload: Workload) -> int:
    """How many leading micro-batches AutoPipe slices on a chain of stages (Algorithm 2), whatever that brings.

    It knows one time for all transfers, for which the longest stands.
    """
    times: dict[Role, dict[int, int]] = {Role.FORWARD: {}, Role.BACKWARD: {}}
    for operation in workload.operations:  # input and weight gradient together are a backward
        own = times[Role.FORWARD if operation.role is Role.FORWARD else Role.BACKWARD]
        depth = workload.stage_depths[operation.stage]
        own[depth] = own.get(depth, 0) + operation.duration_ns
    forwards, backwards = ([own[depth] for depth in sorted(own)] for own in times.values())
    transfer = max((lag for _, _, lag in workload.edges), default=0)
    return num_to_split(StageTimes(tuple(forwards), tuple(backwards), transfer))


def _depth(workload: Workload) -> int:
    return 1 + max(workload.stage_depths)


def _parted(trial: Trial, workload: Workload, count: int) -> Placement:
    """The trial's placement with ``count`` micro-batches in parts."""
    depth = _depth(workload)
    parts = {index: {"num_parted": min(count, depth - place)} for index, place in enumerate(workload.stage_depths)}
    return _changed(trial.candidate.placement, parts)


def _retimed(request: Request, trial: Trial, placement: Placement, mark: str) -> Schedule | None:
    """The same orders on a changed placement; None if they do not fit there.

    Raises:
        UsageError: the profile has no costs for it.
    """
    base = trial.best
    assert base is not None
    splits = base.workload.splits_backward
    split = request if request.split_backward is splits else replace(request, split_backward=splits)
    (workload,) = workloads(split, replace(trial.candidate, placement=placement))
    return with_orders(base, workload, mark)


def _changed(placement: Placement, changes: Mapping[int, Mapping[str, object]]) -> Placement:
    stages: tuple[PlacedStage, ...] = tuple(
        stage.model_copy(update=changes.get(index, {})) for index, stage in enumerate(placement.stages)
    )
    return placement.model_copy(update={"stages": stages})


def _reason_against_parts(workload: Workload) -> str | None:
    if workload.has_parts:
        return "its actions wait inside for messages, for which they have all samples (--late-inputs no)"
    devices = [device for stage in workload.stages for device in stage.devices]
    if len(set(devices)) < len(devices):
        return "it needs one stage per device"
    if not workload.is_uniform:
        return "it needs one micro-batch size and one route"
    if any(stage.microbatch_size % (2 * stage.replicas) for stage in workload.stages):
        return f"micro-batches of {workload.microbatch_size} samples cannot be halved on every replica"
    return None


@dataclass(frozen=True)
class EvenCut(PlanStep):
    """A first plan: cut evenly, with 1F1B or GPipe, or the schedule that is asked for by name.

    Of the strategy, the replicas and what is recomputed of the first plan every other size of micro-batches is looked
    at as plainly, before anything is searched: between sizes there are factors, between schedules of one there are not.

    Where there is none after ``seconds`` that is said, and for a ``share`` of the time that is left it is looked for
    all the same, and until the process has worked ``working`` seconds, or half of what is left. Of a large request a
    cut that is begun then, while nothing else is known, is given up only when ``most`` of what was left is over: the
    work for it would be lost on a busy machine, and whatever follows takes longer. Where no more than ``hurry`` seconds
    are left it takes so little that it is made however late it is. If nothing fits with what replicas may divide by
    default, something with more of it is kept for when nothing else is found. Where no even cut fits, one for little
    memory is looked for, but of a large request. Where a published planner is asked for by name, whatever is found here
    only stands in for its plan, until there is one; and so does GPipe or 1F1B in a large request where rules are given,
    or a repetend is asked for.
    """

    seconds: float = EVEN_CUT_SECONDS
    share: float = EVEN_CUT_SHARE
    working: float = EVEN_CUT_WORKING
    most: float = EVEN_CUT_MOST
    hurry: float = EVEN_CUT_HURRY
    name = "even cut"
    when = (
        "first, once; any strategy, with --scheduler auto or a named schedule, and for more than "
        f"{LARGE} blocks x devices whatever is asked for; with --deterministic only for these. Of "
        "such requests a cut that is begun has {most} of what is left"
    )
    of = "what is left"
    in_turn = True

    def run(self, search: PlanSearch) -> None:
        request = search.request
        if search.begun or isinstance(request.placement, Placement) or request.spread:
            return
        if request.scheduler != "auto" and not _is_named(request) and _plain_instead(search) is None:
            return
        search.begun = True
        if search.budget.deterministic:
            if is_large(request):
                self._in_time(search)
        elif search.budget.left() <= self.hurry and not is_large(request):
            with shielded():
                self._look(search, request)
                _secure(search)
        else:
            self._in_time(search)
        _secure(search)

    def _in_time(self, search: PlanSearch) -> None:
        plain, auto = _plain_instead(search), search.request.scheduler == "auto"
        what = "even cut with the schedule" if plain is None and not auto else "even cut with GPipe or 1F1B"

        def tell() -> None:
            if search.answer is None:
                search.say(f"no {what} was found yet that fits: the search goes on")

        telling = Telling(self.seconds, clock=search.budget.clock, tell=tell)
        limit, begin = self._limit(search)

        def goes_on() -> bool:
            return search.answer is None and (search.budget.deterministic or not telling.told)

        with limit.ended(), telling.enforced():
            begin()
            if plain is not None:
                with suppress(PipeplanError):  # what was asked for may be for other stages
                    self._look(search, plain, begin)
                _secure(search)
            if plain is not None and not _is_named(search.request):
                return
            short = self._look(search, search.request, begin)
            if search.answer is None and search.may_divide:
                levels = search.request.with_any_level().levels  # the table has the first by default
                for level in levels[1:] if has_table(search.request) else levels:
                    if goes_on():
                        self._look(search, level, begin)
            if search.answer is None and auto and plain is None:
                self._look(search, search.request, begin, held=1)
            if search.answer is None and not is_large(search.request):
                self._look_lean(search, begin)
            if search.answer is None and not telling.told and short:
                search.say(f"no {what} was found that fits: the search goes on")

    def _limit(self, search: PlanSearch) -> tuple[Limit, Callable[[], None]]:
        """The step's limit, and what is to be called before each cut is begun; none where work is counted."""
        if search.budget.deterministic:
            return Limit(), lambda: None
        remaining = search.budget.remaining
        limit = Limit(max(self.seconds, self.share * remaining), clock=search.budget.clock)
        until = limit.worked() + min(self.working, EVEN_CUT_LEFT * remaining)
        late = max(0.0, self.most * remaining - limit.seconds) if is_large(search.request) else 0.0

        def begin() -> None:
            if search.answer is None and late:
                limit.wait(0.0, math.inf, late)
            else:
                limit.wait(0.0, until - limit.worked())
            if limit.left() <= 0.0 and limit.worked() >= until:
                raise TimeUpError(limit)

        return limit, begin

    def _look(
        self,
        search: PlanSearch,
        request: Request,
        begin: Callable[[], None] = lambda: None,
        held: int | None = None,
    ) -> bool:
        """The first that fits, and then the same with other sizes, which come next; ``begin`` is called before each.

        What fits has room for what 1F1B has in flight, or for so many micro-batches ``held``.

        Returns whether others do not fit, of those that there are sizes and a place in the schedule for.
        """
        if held is None:
            self._look_shorter(search, request, begin)
        unsuited, most, short, asked = set[str](), math.inf, False, 0

        def wanted(choice: Choice) -> bool:
            nonlocal asked
            suits = choice.strategy not in unsuited and num_actions(request, choice) <= most
            asked += suits
            return suits

        cuts, instead = even_cuts(request, begin, wanted, held=held), takes_long(request) != takes_long(search.request)
        for candidate in cuts:
            trial = Trial.of(request if instead else search.request, candidate, search.steps)
            try:
                if _is_named(request):
                    trial.search(request, search.budget, search.budget.remaining)
                elif candidate.placement.strategy == "one-to-one" or is_large(request):
                    trial.look_plainly()
                else:
                    trial.look(usual=candidate.usual)
            except TooLongError:
                most, short = MAX_WRITTEN, True  # all of those that may not repeat either come later
                continue
            except NotApplicableError:
                unsuited.add(candidate.placement.strategy)
                continue
            except SearchTimeoutError:  # which says nothing of what fits
                continue
            except PipeplanError:
                short = True
                continue
            if trial.best is not None:
                spare = request is not search.request
                search.found_first(trial, spare=spare, stands_in=instead or _by_planner(request))
                if not spare and not _is_named(request) and not has_table(request):
                    self._other_sizes(search, candidate, cuts)
                return short
            short = True
        return short or (asked > 0 and not unsuited and request.least_memory is not None)

    @staticmethod
    def _look_lean(search: PlanSearch, begin: Callable[[], None]) -> None:
        """The first of those cut so that little memory does for which a known schedule fits."""
        request = search.request
        for candidate in lean_cuts(request):
            begin()
            with suppress(PipeplanError):  # it does not fit
                trial = Trial.of(search.request, candidate, search.steps)
                if _is_named(request):
                    trial.search(request, search.budget, search.budget.remaining)
                else:
                    trial.look()
                if trial.best is not None:
                    every = candidate.placement.stages
                    spare = search.may_divide and any(Zero.of(each) != request.sharing(each.copies) for each in every)
                    search.found_first(trial, spare=spare, stands_in=_by_planner(request))
                    return

    @staticmethod
    def _look_shorter(search: PlanSearch, request: Request, begin: Callable[[], None]) -> None:
        """A first plan of a shorter pipeline, where those that are asked for have so many stages that they take long.

        Not of schedules by name, of which what is written depends on other things.
        """
        if request.scheduler != "auto" or request is not search.request:
            return
        for candidate in shorter_cuts(request, begin):
            with suppress(PipeplanError):  # it does not fit
                trial = Trial.of(request, candidate, search.steps)
                trial.look_plainly()
                if trial.best is not None:
                    search.found_first(trial, stands_in=_by_planner(request))
                    _secure(search)
                    return

    @staticmethod
    def _other_sizes(search: PlanSearch, first: PlacementCandidate, cuts: Iterator[PlacementCandidate]) -> None:
        _secure(search)
        for candidate in cuts:
            if _but_for_size(candidate) != _but_for_size(first):
                return
            checkpoint()
            search.sizes.add(candidate.size_per_replica)
            with suppress(PipeplanError):  # it does not fit
                trial = Trial.of(search.request, candidate, search.steps)
                if not trial.worse(search.answer):
                    trial.look_plainly()
                if trial.best is not None:
                    search.found_first(trial, stands_in=_by_planner(search.request))


def _but_for_size(candidate: PlacementCandidate) -> Hashable:
    """Equal for candidates of one strategy, with as many replicas, that recompute the same."""
    placement = candidate.placement
    return placement.strategy, placement.stages[0].replicas, len(placement.stages), candidate.recompute


def _by_planner(request: Request) -> bool:
    """Whether a published planner is asked for by name, which alone chooses the stages."""
    return request.planner != AUTO_PLANNER


def _plain_instead(search: PlanSearch) -> Request | None:
    """The large request with GPipe or 1F1B, which stand in for rules or a repetend until there is a plan of these.

    None where that is not asked for, or what is takes no longer.
    """
    request = search.request
    known = takes_long(request) is None or _by_planner(request) or request.placement == SUBMODULES
    if known or not is_large(request):
        return None
    return replace(request, scheduler="auto", rules=None, unroll=None, max_span=None)


def _plain_names(request: Request) -> tuple[str, ...]:
    """GPipe or 1F1B or both, as they are asked for."""
    return tuple(name for name in PLAIN if request.scheduler in ("auto", name))


def _is_named(request: Request) -> bool:
    """Whether one schedule is asked for: that of a name, or of rules."""
    return request.scheduler not in SEARCHING and not request.tunes


@dataclass(frozen=True)
class LookAtCandidates(PlanStep):
    """Known schedules of placements as they come; once there is a plan, only while ``least`` of the limit is left.

    ``chains_between`` and ``chains_first`` are as in :func:`pipeplan.planning.candidates.candidates`. Of the chains of
    a large request only the schedules are looked at for which they were cut. What becomes the best, and recomputes, is
    tried without that at once (:class:`KeepAll`).
    """

    share: float = LOOK_SHARE
    least: float = LOOK_LEAST
    chains_between: int = CHAINS_BETWEEN
    chains_first: int = CHAINS_FIRST
    name = "look at candidates"
    when = "always, in turn with the search; once there is a plan, only while more than {least} of the limit is left"
    of = "what is left"
    needed = True
    in_turn = True

    def run(self, search: PlanSearch) -> None:
        budget = search.budget
        until = budget.used + self.share * budget.remaining
        while search.best is None or (budget.used < until and not budget.interrupted):
            checkpoint()
            candidate = search.take()
            search.all_seen |= search.gives_way
            if search.all_seen:
                return
            if candidate is not None:
                before, keep = search.best, named(search.steps, KeepAll)
                self._try(search, candidate)
                if keep is not None and search.best is not before:
                    keep.run(search)
        search.all_seen = budget.remaining <= self.least * budget.seconds

    def _try(self, search: PlanSearch, candidate: PlacementCandidate) -> None:
        """Only known schedules, unless the candidate cannot be better, or must be searched in any case."""
        request, slicing, best = search.request, named(search.steps, SliceForwards), search.best
        try:
            if best is not None and self._refuted(request.unlinked, candidate, best, slicing):
                search.looked_at += 1
                search.refuted += 1
                return  # wherever its devices are
            trial = search.trial_of(candidate)
            if slicing is not None:
                slicing.expect(request, trial)
        except PipeplanError as error:
            search.failures.append(error)
            return
        search.trials.append(trial)
        search.looked_at += 1
        given = isinstance(request.placement, Placement)
        few, at_once = trial.num_actions <= FEW_ENTRIES, all(_writes_little(request, way) for way in trial.ways)
        if given and not at_once:
            self._look_plainly(search, trial)
        if _is_named(request) and (few or is_large(request)) and not given and not trial.worse(best):
            (named(search.steps, SearchCandidates) or SearchCandidates()).search(search, trial, search.budget.remaining)
        if request.scheduler != "auto" or (given and at_once) or trial.worse(best):
            return  # what is given is searched in any case: of few actions that finds known schedules as soon
        search.unfinished += 1
        with search.noting(f"known schedules of {candidate.placement.strategy}"):
            search.look(trial, candidate)
            search.learn(trial)
        search.unfinished -= not time_is_up()
        _secure(search)
        if slicing is not None:
            slicing.at_once(request, trial)
        search.budget.charge(trial.look_seconds)
        search.report(trial)

    @staticmethod
    def _look_plainly(search: PlanSearch, trial: Trial) -> None:
        """A first plan on stages that are given, of many actions: GPipe or 1F1B, group by group where they are long.

        Where one of the two is asked for and would be refused, as nothing in it repeats, no other is made instead.
        """
        if names := _plain_names(search.request):
            with search.noting("a first look"):
                trial.look_plainly(names=names, grouped=not _is_named(search.request))
            search.report(trial)
            _secure(search)

    def _refuted(
        self, request: Request, candidate: PlacementCandidate, best: Trial, slicing: SliceForwards | None
    ) -> bool:
        """Whether every schedule is longer than the best, also with what forwards in parts may make of it."""
        trial = Trial.of(request, candidate)
        if slicing is not None and trial.worse(best):
            slicing.expect(request, trial)
        return trial.worse(best)


@dataclass(frozen=True)
class SearchCandidates(PlanStep):
    """Search the most promising candidates: in each round (how many, their part of the time that is left).

    As long as there may be more candidates, only the first round.
    """

    rounds: tuple[tuple[int, float], ...] = SEARCHED_ROUNDS
    name = "search candidates"
    when = "always, in turn with the looking; those that may become the best"
    needed = True
    in_turn = True

    def run(self, search: PlanSearch) -> None:
        named_one = _is_named(search.request)
        for most, part in self.rounds if search.all_seen else self.rounds[:1]:
            live = [trial for trial in search.live if not (named_one and trial.searched)][:most]
            seconds = search.budget.remaining * (part if len(live) > 1 else 1.0)
            for trial in live:
                if not any(each is trial for each in search.trials):
                    continue  # given up since
                best = search.best
                if best is None or not (trial.hopeless(best) or search.budget.expired):
                    self.search(search, trial, seconds / len(live))

    def search(self, search: PlanSearch, trial: Trial, seconds: float) -> None:
        """Search a trial for so long; one without any schedule is given up."""
        slicing = named(search.steps, SliceForwards)
        _keep_for_whole(search, trial)
        try:
            trial.search(search.request, search.budget, seconds, search.listen(trial))
            _secure(search)
            if slicing is not None:
                slicing.at_once(search.request, trial)
        except PipeplanError as error:
            search.failures.append(error)
            if isinstance(error, TooLongError):
                trial.best = None  # group by group it is another schedule than the one that was asked for
            if trial.best is None:
                search.trials.remove(trial)
                one_does_not_fit = isinstance(error, InfeasibleError) and search.request.scheduler not in SEARCHING
                if isinstance(error, SearchTimeoutError) or one_does_not_fit:  # others may, which the bound is for, too
                    search.others[trial.candidate.key] = trial.bound_ns


@dataclass(frozen=True)
class KeepAll(PlanStep):
    """The sizes of the best plan, if it recomputes, cut once more as if there were memory for everything.

    What a cut recomputes is chosen for the memory of one usual schedule. Another one of the same stages may need less,
    and then nothing has to be recomputed, nor stages to be uneven for that.
    """

    name = "keep all"
    when = "in turn with the search; the best plan recomputes; recomputation and splits of blocks are open"
    in_turn = True

    def run(self, search: PlanSearch) -> None:
        best, request = search.best, search.request
        if best is None or request.recompute is not None or request.scheduler != "auto" or not has_table(request):
            return
        choice = kept_choice(best.candidate) if _recomputes(best) else None
        candidate = None if choice is None else placed(request, choice)
        own = next((each for each in USUAL if choice is not None and each.strategy == choice.strategy), None)
        if not isinstance(candidate, PlacementCandidate) or not search.is_new(candidate):
            return
        with suppress(PipeplanError):  # there is a plan
            trial = search.trial_of(candidate)
            if not trial.worse(best):
                how = best.candidate.usual or own if is_large(request) else None
                trial.look(thorough=True, usual=how, others=False)
                search.budget.charge(trial.look_seconds)
            if trial.best is not None:
                search.trials.append(trial)
                search.report(trial)
                _secure(search)


def _recomputes(trial: Trial) -> bool:
    return trial.best is not None and any(stage.recomputes for stage in trial.best.workload.stages)


STEPS: tuple[SearchStep, ...] = (
    StartPlan(),
    EvenCut(),
    LookAtCandidates(),
    OtherSchedules(),
    DivideState(),
    KeepAll(),
    OwnWays(),
    Moves(),
    DifferentPlans(),
    EveryWidth(),
    RecomputedBlocks(),
    StageGraphs(),
    PublishedPlanners(),
    StageWays(),
    OneStage(),
    FirstLook(),
    SearchCandidates(),
    BackwardWays(),
    *SCHEDULE_STEPS,
    SplitFinalists(),
    EaseRecomputation(),
    EaseFirstLayers(),
    EaseSharding(),
    DeviceOrders(),
    ExchangeByActions(),
    SliceForwards(),
    LateInputs(),
    LessMemoryOfBest(),
    ExplainShortage(),
)


def without(names: Collection[str], steps: Sequence[SearchStep] = STEPS) -> tuple[SearchStep, ...]:
    """The steps without those of some names.

    Raises:
        ValueError: a name is not a step's, or that step is needed.
    """
    left_out = {step.name for step in steps if not step.needed} & set(names)
    if left_out != set(names):
        raise ValueError(f"{', '.join(sorted(set(names) - left_out))}: no step that can be switched off")
    return tuple(step for step in steps if step.name not in names)


def table(steps: Sequence[SearchStep] = STEPS) -> str:
    """The steps as a Markdown table: name, when it is tried, its share of the time."""
    rows = [("step", "tried when", "time, at most"), ("---", "---", "---"), *(step.row for step in steps)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def search_plan(
    request: Request,
    *,
    progress: Progress | None = None,
    steps: Sequence[SearchStep] = STEPS,
    within: Limit | None = None,
    explain: bool = False,
    workers: int = 1,
    executor: Executor | None = None,
) -> Result:
    """Search the best plan of a placement, a strategy, or with ``auto`` of all of them, for a mini-batch.

    With ``split_backward`` left open both ways get a short look and the better one the rest of the time, and the bound
    is for both. With ``auto`` micro-batches have any of the request's sizes per replica, and recomputation is a choice
    like others; otherwise it is tried only where nothing fits without. ``steps`` are what is tried; the search spends
    the time of ``within``, too, and ends with it. ``explain`` has the result say what else was found. It ends with the
    best plan when time is up, or at Ctrl-C, and early enough to make that plan in time.

    Candidates are made and looked at ahead by so many ``workers``, processes beside this one, where they are more than
    one, or by an ``executor``, which stays open. One that dies costs the candidate it died of, as a note says.

    Raises:
        KeyboardInterrupt: interrupted before there was a plan.
        SearchTimeoutError: time was up before there was one.
        InfeasibleError: nothing fits; the text names the device, the bytes and what to change.
        InvalidPlanError: no plan that was found is valid, which is a defect of this program.
        UsageError: a request that contradicts the profile; an executor of threads.
    """
    search = search_of(request, within, progress=progress, steps=steps, explain=explain)
    with request.reserve_said(), workers_of(workers, executor) as by:
        run_search(search, by)
        best = search.answer
        if best is None or (best is search.stands_in and _has_ended(search)):
            raise _nothing(search)
    ended = search.budget.expired  # what was kept of it for the last plan may be more than that takes
    last = _last_plan(search, best)
    best = search.answer or best
    schedule, plan = last.schedule, last.plan
    chosen = None if isinstance(request.placement, Placement) else search.partition_seconds
    refuted = sum(trial.hopeless(best) for trial in search.trials if trial is not best)
    left, all_counted = num_left(search)
    counts = CandidateCounts(
        search.looked_at,
        search.refuted + refuted,
        search.unfinished + left,
        at_least=not all_counted,
    )
    proved = min(last.bound_ns, plan.predicted.iteration_ns)
    notes = [*said_lost(search.lost), *search.notes, *(note for trial in search.trials for note in trial.notes)]
    beside = _BesidePlan.of(search, best, last, explain=explain)
    if beside.explanation is not None:
        notes += unexplained(beside.explanation, ended=search.unexplained)
    return Result(
        plan.with_alternatives(beside.alternatives),
        schedule,
        search.budget.elapsed,
        chosen,
        search.budget.interrupted,
        lower_bound_ns=min(search.bound_ns, proved),
        placement_lower_bound_ns=proved,
        candidates=counts,
        timed_out=(ended or search.budget.expired or counts.left > 0) and not search.budget.interrupted,
        notes=(
            *dict.fromkeys([*notes, *search.notes]),
            *_standing_in(search, last),
            *beside.said,
            *(gain_said(search.start_ns, plan.predicted.iteration_ns) if request.only is None else ()),
        ),
        start_ns=search.start_ns,
        explanation=beside.explanation,
        sizes_left=_sizes_left(search) if counts.left else (),
        tie=beside.tie,
        request=request,
    )


@dataclass(slots=True)
class _BesidePlan:
    """What is said beside a plan that is made: whatever goes wrong with it is noted, and it ends with the search."""

    alternatives: tuple[AlternativeFigures, ...] = ()
    said: tuple[str, ...] = ()
    tie: EqualPlan | None = None
    explanation: Explanation | None = None

    @classmethod
    def of(cls, search: PlanSearch, best: Trial, made: MadePlan, *, explain: bool) -> _BesidePlan:
        """All of it that there is a moment for."""
        found, request, workload = cls(), search.request, made.schedule.workload
        seconds = max(BESIDE_SECONDS, search.budget.remaining)
        with search.noting("plans beside the best"), search.budget.moment(seconds):
            for each in kept_alternatives(search, made):
                found.alternatives += (each,)
            found.tie = tied_with(search, best)
        with search.noting("what was asked of stages"):
            found.said = tuple(said_of_choices(request, workload, "what was found does not fit so"))
        if explain:
            seconds = max(BESIDE_SECONDS, search.budget.remaining)
            with search.noting("what is explained"), search.budget.moment(seconds):
                try:
                    found.explanation = explained(search, made)
                except TimeUpError:
                    search.notes.append("there was no time to explain what was found; raise --time-limit")
        return found


def search_of(
    request: Request,
    within: Limit | None = None,
    *,
    progress: Progress | None = None,
    steps: Sequence[SearchStep] = STEPS,
    explain: bool = False,
) -> PlanSearch:
    """The search of a request before it begins: in the request's time, and in that of ``within``, too.

    Raises:
        UsageError: a request that contradicts the profile.
    """
    clock = clock_of(within)
    budget = Budget(request.time_limit, request.seed, request.deterministic, whole=within, clock=clock)
    require_planner(request)
    if request.start is not None:
        require_start(request, request.start)
    search = PlanSearch(request, budget, progress, steps, explains=explain)
    search.secure = partial(_secure, search)
    return search


def run_search(search: PlanSearch, workers: CandidateWorkers | None = None) -> None:
    """Run it to its end. Every trial that it made stays in it, whatever ends it."""
    looking = named(search.steps, LookAtCandidates) or LookAtCandidates()
    with _looking_ahead(search, workers):
        search.run(lambda asked: _candidates(asked, search.steps, looking))


def _candidates(request: Request, steps: Sequence[SearchStep], looking: LookAtCandidates) -> Iterator[Proposal]:
    """What may be looked at: what a planner chooses that is asked for by name, else all that we know."""
    if _by_planner(request):
        return PLANNERS[request.planner].proposals(request)
    return candidates(request, steps, looking.chains_between, looking.chains_first)


@contextmanager
def _looking_ahead(search: PlanSearch, workers: CandidateWorkers | None) -> Iterator[None]:
    """Workers for the candidates of a search, where there are some."""
    if workers is None:
        yield
        return
    request, deterministic = search.request, search.budget.deterministic
    known = [each for each in (request, request.profile, request.cluster) if each is not None]
    left = (lambda: math.inf) if deterministic else search.budget.left
    search.ahead = Ahead(look_at, known, left, workers.window, workers.renew, workers.close, search.notes)
    try:
        yield
    finally:
        search.ahead.end()


def num_left(search: PlanSearch) -> tuple[int, bool]:
    """How many candidates there was no time for, as far as that is known without making them, which takes long; and
    whether these are all, or there was no time to count them: then there is at least one.
    """
    found, all_seen = 0, False
    with search.budget.moment(COUNTING_SECONDS):
        for propose in checked(chain(search.put_off, search.open)):
            found += not search.refutes(propose)
        all_seen = True
    return (found, True) if all_seen else (max(1, found), False)


def _sizes_left(search: PlanSearch) -> tuple[int, ...]:
    """Micro-batch sizes per replica that were open, and of which nothing was looked at."""
    request = search.request
    possible = [size for size in request.sizes if request.batch.mini_batch % size == 0]
    return tuple(size for size in possible if size not in search.sizes)


def _nothing(search: PlanSearch) -> BaseException:
    """Why there is no plan."""
    if search.budget.interrupted:
        return KeyboardInterrupt()
    if search.failures:
        return most_telling(search.failures)
    return SearchTimeoutError(
        f"no plan was found in {search.budget.elapsed:.1f} s, but there may be one; raise --time-limit"
    )


def _has_ended(search: PlanSearch) -> bool:
    """Whether a planner by name has said why it has no plan, and not only had no time for one."""
    said = any(not isinstance(why, SearchTimeoutError | TooLargeError) for why in search.failures)
    return said and not (search.budget.expired or search.budget.interrupted)


def _standing_in(search: PlanSearch, made: MadePlan) -> tuple[str, ...]:
    """That the plan is not what was asked for."""
    if not made.stands_in:
        return ()
    asked, how = takes_long(search.request), "" if _by_planner(search.request) else " with GPipe or 1F1B"
    remedy = next((str(why) for why in search.failures if isinstance(why, TooLargeError)), "raise --time-limit")
    text = f"{asked} had no plan when the search ended: this is an even cut{how} instead; {remedy}"
    warnings.warn(text, stacklevel=3)
    return (text,)


def _secure(search: PlanSearch) -> None:
    """Make the first plan at once, so that nothing can lose it, and keep as long for making the last one.

    How long that takes is taken to grow with the programs' entries; it is found out again when there are many more. A
    plan that takes long is also made again when there is a better one, as long as making plans takes little of the
    time: after an interruption there are only moments for it. At most half of what is left is kept, or what it takes
    to write it, but all of it for a better one that is not made yet: searching on would lose that.

    What has no valid plan is given up. Where work is counted it is a copy of the trial that is made a plan: the search
    goes on as if none had been.
    """
    best = search.answer
    if best is None or best.best is None:
        return
    if not search.budget.deterministic:
        try:
            _keep(search, best, best.best)
        except InvalidPlanError as error:
            search.give_up(best, error)
        return
    with suppress(PipeplanError):  # which it says at the end
        _keep(search, replace(best), best.best)


def _keep(search: PlanSearch, best: Trial, schedule: Schedule) -> None:
    """Keep a plan of the best trial, of this schedule, or time for it."""
    size, made = _entries(schedule), search.made
    if made is None or (made.stands_in and not _stands_in(search, best)):
        made = _first_made(search, best)
    else:
        expected = _expected(made, size)
        larger = size > MUCH_LARGER * _entries(made.schedule)
        cheap = search.making_seconds + expected <= MAKING_SHARE * search.budget.elapsed
        if larger or (_improves(best, made) and expected > LONG_MAKING_SECONDS and cheap):
            made = _made_late(search, best)
    search.budget.wait_no_longer()
    expected, left = _expected(made, size), max(0.0, search.budget.left() + search.budget.reserved)
    after = _after_making(search) * expected
    most = left if _improves(best, made) else max(after, KEPT_SHARE * left)
    search.budget.reserved = min(expected + after, most)


def _after_making(search: PlanSearch) -> float:
    """Time for what follows the last plan, by that to make it."""
    return WRITING_SHARE + EXPLAINING_SHARE * search.explains


def _keep_for_whole(search: PlanSearch, trial: Trial) -> None:
    """Keep time for the plan of what a search may find, which runs each action once where none of it is to be repeated.

    What was made before may be a part that is repeated, whose programs have far fewer entries.
    """
    made, shorter = search.made, named(search.steps, ShorterRun) or ShorterRun()
    sizes = [_entries_whole(way) for way in trial.ways if shorter.shorter(way) is None]
    if made is None or not sizes:
        return
    left = max(0.0, search.budget.left() + search.budget.reserved)
    expected = (1 + _after_making(search)) * _expected(made, max(sizes))
    search.budget.reserved = max(search.budget.reserved, min(expected, KEPT_SHARE * left))


def _expected(made: MadePlan, entries: float) -> float:
    """Seconds that a plan of so many entries is taken to need, by those of one that was made."""
    return made.seconds * entries / _entries(made.schedule)


def _entries(schedule: Schedule) -> float:
    """About how many the programs of its plan have, computing and messages."""
    return _entries_of(schedule.workload, schedule.graph.num_actions)


def _entries_of(workload: Workload, num_actions: int) -> float:
    return workload.entries * num_actions / len(workload.operations)


def _entries_whole(workload: Workload) -> float:
    """The same of a schedule that runs each action once."""
    return _entries_of(workload, sum(map(len, workload.slots[: len(workload.operations)])))


def _improves(trial: Trial, made: MadePlan) -> bool:
    """Whether its iteration is shorter than that of what was made of something else."""
    if trial.value_ns is None or trial.value_ns >= made.plan.predicted.iteration_ns:
        return False
    return trial.best is None or not _is_of(trial, made)


def _takes_little(search: PlanSearch, schedule: Schedule | None) -> bool:
    """Whether there is a schedule, of whose plan there is so little."""
    return schedule is not None and _is_little(search.request, _entries(schedule))


def _is_little(request: Request, entries: float) -> bool:
    return entries + len(request.profile.blocks) <= FEW_ENTRIES


def _writes_little(request: Request, workload: Workload) -> bool:
    """Whether there is so little of a plan whose schedule runs each action once."""
    return _is_little(request, _entries_whole(workload))


def _made(search: PlanSearch, trial: Trial) -> MadePlan:
    """The plan of a trial, made now."""
    begun = search.budget.elapsed
    own, schedule, plan = _plan_of(search, trial)
    seconds = search.budget.elapsed - begun
    search.making_seconds += seconds
    assert trial.best is not None
    bound = own.bound_ns if search.request.joined is None else schedule.bound_ns
    orders = (trial.parted or trial.best).orders
    search.made = MadePlan(schedule, plan, seconds, bound, orders, _stands_in(search, trial), trial_words(trial))
    return search.made


def _stands_in(search: PlanSearch, trial: Trial) -> bool:
    """Whether a trial is, or is a copy of, what only stands in for what was asked for."""
    return search.stands_in is not None and trial.best is search.stands_in.best


def _made_late(search: PlanSearch, trial: Trial) -> MadePlan:
    """The same, for which the search may be late: what ends in the middle is lost."""
    budget = search.budget
    budget.reserved = 0.0
    budget.patience = max(0.0, search.lateness - ENDING - GIVING_UP * (max(0.0, budget.left()) + search.lateness))
    try:
        return _made(search, trial)
    finally:
        budget.patience = 0.0


def _first_made(search: PlanSearch, trial: Trial) -> MadePlan:
    """The first plan, made in any case where that takes little; else while there is time, or a moment for it.

    Raises:
        TimeUpError: there was not, and there is not going to be.
    """
    assert trial.best is not None
    with shielded() if _takes_little(search, trial.best) else search.budget.finishing(LAST_PLAN_SECONDS):
        try:
            return _made(search, trial)
        except TimeUpError:
            search.given_up = True
            raise


def _last_plan(search: PlanSearch, best: Trial) -> MadePlan:
    """The best plan that is valid; one that was made before where there is no time to make it, which is noted.

    Raises:
        InvalidPlanError: none is valid.
        KeyboardInterrupt: interrupted, and there was no moment to make any.
        SearchTimeoutError: there was no time to make any.
    """
    while True:
        try:
            return _last_of(search, best)
        except InvalidPlanError as error:
            others = (*search.done, search.spare, search.stands_in)
            if all(trial is None or trial is best for trial in others):
                if search.made is None:
                    raise
                return _made_before(search, best, search.made, error)
            search.give_up(best, error)
        made, following = search.made, search.answer
        assert following is not None
        if made is not None and not made.stands_in and not _improves(following, made):
            return made
        best = following


def _last_of(search: PlanSearch, best: Trial) -> MadePlan:
    """The plan of the best, or the one before where there is no time or making it fails, unless it is not valid."""
    budget, before = search.budget, search.made
    if budget.deterministic and not budget.interrupted:
        try:
            with budget.finishing(LAST_PLAN_SECONDS):
                return _made(search, best)
        except Exception as error:
            if isinstance(error, InvalidPlanError) or (before is None and not isinstance(error, TimeUpError)):
                raise
    if before is None:
        try:
            if search.given_up and budget.interrupted:
                raise TimeUpError(budget)
            return _first_made(search, best)
        except TimeUpError:
            if budget.interrupted:
                raise KeyboardInterrupt from None
            raise SearchTimeoutError(
                f"a schedule was found in {budget.elapsed:.1f} s, but there was no time to make its plan; raise "
                "--time-limit"
            ) from None
    try:
        if _is_too_late(search, best, before):
            raise TimeUpError(budget)
        with budget.finishing(LAST_PLAN_SECONDS):
            return _made_late(search, best)
    except InvalidPlanError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        return _made_before(search, best, before, error)


def _is_too_late(search: PlanSearch, best: Trial, before: MadePlan) -> bool:
    """Whether a plan like the one before takes longer than what is left and the time the search may be late."""
    budget = search.budget
    assert best.best is not None
    if budget.deterministic or budget.interrupted or _is_of(best, before):
        return False
    size, left = _entries(best.best), max(0.0, budget.left() + budget.reserved)
    return size <= MUCH_LARGER * _entries(before.schedule) and _expected(before, size) > left + search.lateness


def _made_before(search: PlanSearch, best: Trial, before: MadePlan, error: BaseException) -> MadePlan:
    """What was made before, and a note on why it is not the best."""
    why, remedy = f"making its plan ended with {type(error).__name__}: {error}", ""
    if isinstance(error, KeyboardInterrupt | TimeUpError):
        why, remedy = "there was no time to make its plan", ": raise --time-limit"
    search.not_made = f"{why}{remedy.replace(': ', '; ')}"
    known, value = before.plan.predicted.iteration_ns, best.value_ns or 0
    shorter = f"{format_ns(known - value)} shorter," if value < known else "as long and otherwise better,"
    search.notes.append(
        f"a schedule of {format_ns(value)} was found, {shorter} and {why}; this one, of {format_ns(known)}, was made "
        f"before{remedy}"
    )
    return before


def _plan_of(search: PlanSearch, trial: Trial) -> tuple[Trial, Schedule, Plan]:
    """The settled schedule of a trial and its plan, which may have been made; and what it was made of."""
    assert trial.best is not None
    made, counted = search.made, search.budget.deterministic and not search.budget.interrupted
    if made is not None and not counted and _is_of(trial, made):
        if search.request.joined is not None or (search.request.num_parted and trial.parted is None):
            return trial, made.schedule, made.plan
        schedule = trial.settled
        known = made.plan.predicted
        proved = {"lower_bound_ns": schedule.bound_ns, "gap": known.iteration_ns / schedule.bound_ns - 1}
        return trial, schedule, made.plan.model_copy(update={"predicted": known.model_copy(update=proved)})
    own = _in_parts(search.request, trial)
    _finish(search.request, own)
    schedule = of_blocks(search.request, own.settled)
    return own, schedule, plan_of(search.request, own, schedule)


def _is_of(trial: Trial, made: MadePlan) -> bool:
    """Whether it was made of what is known of a trial."""
    assert trial.best is not None
    return (trial.parted or trial.best).orders is made.orders


def _in_parts(request: Request, trial: Trial) -> Trial:
    """The trial, or a copy with forwards in the parts that were asked for: their step comes after the search, for which
    there may be no time."""
    if not request.num_parted or trial.parted is not None:
        return trial
    own = replace(trial)
    with suppress(UsageError):  # which the step says
        slice_forwards(request, own)
    return own


def plan_of(request: Request, trial: Trial, schedule: Schedule) -> Plan:
    """The plan of a trial's schedule, whose stages have blocks where those of the trial may have groups of them."""
    assert trial.best is not None
    whole = trial.best.workload if request.joined is None else without_parts(schedule.workload)
    return planned(request, trial.candidate, schedule, whole)


def _finish(request: Request, trial: Trial) -> None:
    """Let the best trial's bounds be of forwards in parts, too, where they are open; only of these if asked for."""
    if request.num_parted and trial.parted is not None:
        trial.bounds, trial.parted_bound = [trial.parted.bound_ns], None
    else:
        _expect_parts(request, trial)
