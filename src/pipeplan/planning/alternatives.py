"""The best different plans of a search with what limits each, and why common layouts are not the best.

From what a search knows at its end: schedules it has found, and the table of uniform layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby

from pipeplan.costs.zero import IN_ACTIONS
from pipeplan.errors import PipeplanError
from pipeplan.files import PlacedStage, Placement
from pipeplan.files.plan import AlternativeFigures
from pipeplan.planning.candidates import (
    PlacementCandidate,
    is_large,
    kept_choice,
    likely_choices,
    placed,
    strategy_choices,
)
from pipeplan.planning.planners import AUTO_PLANNER
from pipeplan.planning.request import Request
from pipeplan.planning.trials import MadePlan, PlanSearch, PlanStep, Trial
from pipeplan.planning.uniform_space import BoundedChoice, Choice
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.state import Schedule, scheduler_words
from pipeplan.search_constants import (
    DIFFERENT_MORE,
    DIFFERENT_SHARE,
    FORMS_ERROR,
    LAYOUT_BYTES,
    LONGEST_WHAT,
    MOST_ALTERNATIVES,
    MOST_KEPT_BYTES,
    MOST_SPLITS,
    NAMED_FROM,
    SECONDS_PER_CUT,
    TIED,
)
from pipeplan.texts import counted, shortened
from pipeplan.time_limit import TimeUpError
from pipeplan.units import format_bytes, format_ns
from pipeplan.workload.task_graph import earliest_starts
from pipeplan.workload.workload import Workload

ENDING_WORDS = "gradient all-reduces and the optimizer's step"
"""What follows the last action of an iteration, in words."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that was found, and how its iteration splits up, in ns.

    ``work_ns`` is what a device computes on average, all devices counted, ``recomputed`` the stages that recompute;
    ``uneven_ns`` what the busiest has more; ``messages_ns`` how much sooner all would end if messages took no time, of
    a long run about; ``bubble_ns`` what else the busiest waits; ``ending_ns`` what follows the last action. Bytes are
    those of the device with least left, and of what plans may use of its memory (None: no limit).
    """

    what: str
    iteration_ns: int
    work_ns: int
    uneven_ns: int
    messages_ns: int
    bubble_ns: int
    ending_ns: int
    recomputed: int
    peak_bytes: int
    memory_bytes: int | None

    @property
    def limits(self) -> str:
        """What makes it longer than its work, the most first, and how full memory is."""
        parts = [
            (self.uneven_ns, "uneven stages"),
            (self.messages_ns, "exposed messages"),
            (self.bubble_ns, "bubble"),
            (self.ending_ns, ENDING_WORDS),
        ]
        said = _shares(parts, self.iteration_ns, 0.0)
        if self.memory_bytes is not None:
            full = f"memory {self.peak_bytes / self.memory_bytes:.0%}"
            said.append(f"{full}, {counted(self.recomputed, 'stage')} recomputed" if self.recomputed else full)
        return "; ".join(said)


@dataclass(frozen=True)
class DifferentPlans(PlanStep):
    """As many different plans as an explanation shows: layouts, those first that should be quickest.

    A good plan refutes most layouts before there is a plan of them, and explains nothing by that. A row of the table is
    looked at while so many plans are not known, or, for a part ``more`` of the time, it should be quicker than the last
    of them. Where there is no table all that strategies leave open is.
    """

    share: float = DIFFERENT_SHARE
    more: float = DIFFERENT_MORE
    name = "different plans"
    of = "what is left, each turn; 0.1 once there are as many"
    when = (
        f"in turn with the search; --explain, until no other layout should be among the best {MOST_ALTERNATIVES}; no "
        "placement is given; --scheduler auto or a named schedule"
    )
    in_turn = True

    def run(self, search: PlanSearch) -> None:
        """Look at them: they stand beside the others, and are not searched on, but for what becomes the best.

        Where a planner is asked for by name, its own plan is the answer, however much longer it is.
        """
        request = search.request
        if not search.explains or search.best is None or isinstance(request.placement, Placement):
            return
        if request.scheduler != "auto" and not request.dictates:
            return  # how it is searched is said, which takes long for each
        self._look_at_all(search)

    def _look_at_all(self, search: PlanSearch) -> None:
        request, search.unexplained = search.request, True
        with search.budget.share(self.share * search.budget.remaining) as share, share.ended():
            every = [kept_choice(trial.candidate) for trial in (*search.done, *search.beside)]
            known = {_shape(own) for own in every if own is not None}
            for asked, choice, about_ns in _layouts(request):
                last = _last_shown_ns(search)
                enough = last < math.inf and share.used * self.share > self.more * share.seconds
                if about_ns >= last:
                    break
                if share.expired or enough:
                    return
                if _shape(choice) not in known and search.is_first((self.name, _shape(choice))):
                    search.as_cut[_shape(choice)] = math.inf
                    with suppress(PipeplanError):  # it does not fit
                        self._look(search, asked, choice, share)
            search.unexplained = False

    @staticmethod
    def _look(search: PlanSearch, request: Request, choice: Choice, share: Budget) -> None:
        """By known schedules, or by the one that is asked for."""
        candidate = placed(request, choice)
        if not isinstance(candidate, PlacementCandidate):
            return
        trial = Trial.where_quick(request, candidate, search.steps)
        share.charge(SECONDS_PER_CUT * is_large(request))
        search.as_cut[_shape(choice)] = trial.bound_ns
        if trial.bound_ns >= _last_shown_ns(search):
            return
        trial.look_within(request, share, candidate.usual, others=False)
        if trial.best is None:
            return
        best, any_planner = search.best, search.request.planner == AUTO_PLANNER
        if best is not None and any_planner and (trial.value_ns or 0) < (best.value_ns or 0):
            search.trials.append(trial)
            search.report(trial)
            search.secure()  # its plan, or time for it, before others are looked at
        else:
            search.beside.append(trial)


def _layouts(request: Request) -> Iterator[tuple[Request, Choice, float]]:
    """Layouts to look at, and ns that each should take, 0 where nobody knows; the quickest first."""
    table = [(level, each) for level in request.levels for each in likely_choices(level)]
    for level, each in sorted(table, key=lambda row: row[1].usual_ns):
        yield level, each.choice, each.usual_ns
    if not table:
        yield from ((level, choice, 0.0) for level in request.levels for choice in strategy_choices(level))


def _last_shown_ns(search: PlanSearch) -> float:
    """The iteration of the last plan that is shown; infinite while there is room for more."""
    shown = _best(search)
    return math.inf if len(shown) < MOST_ALTERNATIVES else shown[-1].value_ns or math.inf


def _shape(choice: Choice) -> tuple[object, ...]:
    """What a layout is, but for its cut and schedule."""
    split = choice.shards, choice.context, choice.expert, choice.expert_shards, choice.replicas, choice.zero.level
    return choice.strategy, choice.positions, choice.per_position, choice.batch, *split


@dataclass(frozen=True, slots=True)
class Common:
    """A common layout and why it is not the best: what the table of layouts knows of it."""

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What :func:`explained` finds; ``common`` is None where there was no time for it.

    The plan that was made is of the layout ``returned``, counted from 0; None where it is none of these. ``not_first``
    says why it is not the first, where that is shorter.
    """

    alternatives: tuple[Alternative, ...]
    common: tuple[Common, ...] | None
    returned: int | None = 0
    not_first: str = ""

    def figures(self) -> dict[str, object]:
        """As in JSON."""
        return {
            "alternatives": [
                asdict(each) | {"limits": each.limits, "returned": index == self.returned}
                for index, each in enumerate(self.alternatives)
            ],
            "common": [asdict(each) for each in self.common or ()],
        }


@dataclass(frozen=True, slots=True)
class EqualPlan:
    """A plan of fewer stages that takes hardly longer than the best: by what part, and the flags that ask for it.

    ``left_bytes`` are what its fullest device has left, None without a limit.
    """

    flags: str
    longer: float
    num_stages: int
    left_bytes: int | None


def tied_with(search: PlanSearch, best: Trial) -> EqualPlan | None:
    """The plan with the fewest stages that estimates cannot tell from the best; the quickest, if any has fewer."""
    value, stages = best.value_ns or 0, len(best.candidate.placement.stages)
    if search.request.profile.source.method != "estimated" or search.request.scheduler != "auto":
        return None
    near = [
        trial
        for trial in search.done
        if (trial.value_ns or 0) <= (1 + TIED) * value and len(trial.candidate.placement.stages) < stages
    ]
    if not near:
        return None
    simplest = min(near, key=lambda trial: (len(trial.candidate.placement.stages), trial.value_ns))
    choice, schedule = kept_choice(simplest.candidate), simplest.parted or simplest.best
    if choice is None or schedule is None:
        return None
    peak, limit = schedule.fullest
    flags = f"--pp {choice.positions} --dp {choice.replicas}"
    flags += "".join(f" --{name} {size}" for name, size in (("tp", choice.shards), ("cp", choice.context)) if size > 1)
    flags += f" --vp {choice.chunks}" if choice.chunks is not None else ""
    flags += f" --zero {choice.zero.level}" if choice.zero.level else ""
    longer = schedule.iteration_ns / value - 1
    left = None if limit is None else limit - peak
    return EqualPlan(flags, longer, len(simplest.candidate.placement.stages), left)


def explained(search: PlanSearch, made: MadePlan) -> Explanation:
    """The best plans of a search that differ in more than their schedules, and common layouts beside them; which of
    them was ``made``.

    As many of them as there is time for, the best first.

    Raises:
        TimeUpError: there was none for the best.
    """
    shown, found = _best(search, made), list[Alternative]()
    returned = next((index for index, trial in enumerate(shown) if trial_words(trial) == made.layout), None)
    which = returned, _not_first(search, shown, made)
    try:
        for trial in shown:
            found.append(_alternative(trial))
        known = dict(zip(map(id, shown), found, strict=True))
        return Explanation(tuple(found), tuple(_common(search, found[0], known)), *which)
    except TimeUpError:
        if not found:
            raise
        return Explanation(tuple(found), None, *which)


def _not_first(search: PlanSearch, shown: Sequence[Trial], made: MadePlan) -> str:
    """Why what was made is longer than the first that is shown; empty where it is not."""
    own, least = made.plan.predicted.iteration_ns, shown[0].value_ns or 0
    if own <= least:
        return ""
    why = search.not_made or "no plan was made of it"
    if search.request.planner != AUTO_PLANNER:
        why = f"--planner {search.request.planner} was asked for"
    return f"the first is {1 - least / own:.1%} shorter, and {why}"


def unexplained(explanation: Explanation, *, ended: bool) -> list[str]:
    """What there was no time for: different plans, where looking for them has ``ended``, and common layouts."""
    said, count = list[str](), len(explanation.alternatives)
    lost = explanation.common is None
    if (ended or lost) and count < MOST_ALTERNATIVES:
        plans = counted(count, "different plan")
        said += [f"time ran out after {plans} of {MOST_ALTERNATIVES} that are explained: raise --time-limit for more"]
    if lost:
        said += ["there was no time to say why common layouts are not the best; raise --time-limit"]
    return said


def kept_alternatives(search: PlanSearch, made: MadePlan) -> Iterator[AlternativeFigures]:
    """The same plans as figures for the plan's file, what was ``made`` first, as many as ``MOST_KEPT_BYTES`` of JSON
    have room for.

    Unlike :class:`Alternative` it does not say what of the waiting is messages, which would be timed again.
    """
    size = 0
    for trial in sorted(_best(search, made), key=lambda trial: trial_words(trial) != made.layout):
        each = _kept(trial)
        size += len(each.model_dump_json()) + LAYOUT_BYTES
        if size > MOST_KEPT_BYTES:
            return
        yield each


def _kept(trial: Trial) -> AlternativeFigures:
    schedule, (mean, busiest) = _settled(trial), _work(trial)
    return AlternativeFigures(
        what=shortened(_words(trial), LONGEST_WHAT),
        iteration_ns=schedule.iteration_ns,
        work_ns=mean,
        uneven_ns=busiest - mean,
        waiting_ns=max(0, schedule.makespan_ns - busiest),
        ending_ns=max(0, schedule.iteration_ns - schedule.makespan_ns),
        recomputed=sum(stage.recomputes for stage in schedule.workload.stages),
        peak_bytes=schedule.fullest[0],
        memory_bytes=schedule.fullest[1],
    )


def _best(search: PlanSearch, made: MadePlan | None = None) -> list[Trial]:
    """The best trials that differ in more than their schedules, the best first; that of which a plan was ``made`` with
    the schedule that it has, as there may have been no time for the plan of a better one."""
    best: dict[str, Trial] = {}
    known = [*search.done, *search.beside] or ([] if search.answer is None else [search.answer])
    for trial in sorted(known, key=_value_ns):
        best.setdefault(trial_words(trial), trial)
    if made is not None and made.layout in best and _settled(best[made.layout]) is not made.schedule:
        best[made.layout] = replace(best[made.layout], best=made.schedule, parted=None)
    return sorted(best.values(), key=_value_ns)[:MOST_ALTERNATIVES]


def _value_ns(trial: Trial) -> float:
    return trial.value_ns or 0


def _settled(trial: Trial) -> Schedule:
    schedule = trial.parted or trial.best
    assert schedule is not None  # it is done
    return schedule


def _work(trial: Trial) -> tuple[int, int]:
    """Ns that a device computes on average, all counted, and the busiest."""
    workload = _settled(trial).workload
    devices = range(len(workload.devices))
    work = [sum(map(workload.work_of, workload.on_resource[device])) for device in devices]
    return workload.of_all(work) // workload.num_devices, max(work)


def _words(trial: Trial) -> str:
    return f"{trial_words(trial)}; {scheduler_words(_settled(trial).scheduler)}"


def trial_words(trial: Trial) -> str:
    """A trial's layout in words, by which plans differ that are shown."""
    placement, batch = trial.candidate.placement, trial.candidate.batch
    words = layout_words(placement.stages, trial.ways[0])
    return f"{words}, {placement.strategy}, {counted(batch.num_microbatches, 'micro-batch', 'es')}"


def layout_words(stages: Sequence[PlacedStage], workload: Workload) -> str:
    """Splits of stages in words; of stages that differ, those of all: in their order, where that is short."""
    splits = [
        (key, len(list(alike))) for key, alike in groupby((_split(each), each.replicas, each.zero) for each in stages)
    ]
    if len(splits) > MOST_SPLITS or len({key for key, _ in splits}) == 1:
        splits = [(key, 1) for key in dict.fromkeys(key for key, _ in splits)]
    positions = len({stage.devices for stage in workload.stages})
    of_each = len(workload.stages) // positions
    return (
        ", then ".join(
            (f"{count} x " if count > 1 else "") + f"{split} dp {dp}" + (f" ZeRO {zero}" if zero else "")
            for (split, dp, zero), count in splits
        )
        + f" pp {positions}"
        + (f" x {of_each}" if of_each > 1 else "")
    )


def _alternative(trial: Trial) -> Alternative:
    schedule, (mean, busiest) = _settled(trial), _work(trial)
    workload, makespan, (peak, limit) = schedule.workload, schedule.makespan_ns, schedule.fullest
    messages = min(_exposed(schedule, workload), max(0, makespan - busiest))
    return Alternative(
        what=_words(trial),
        iteration_ns=schedule.iteration_ns,
        work_ns=mean,
        uneven_ns=busiest - mean,
        messages_ns=messages,
        bubble_ns=max(0, makespan - busiest - messages),
        ending_ns=max(0, schedule.iteration_ns - makespan),
        recomputed=sum(stage.recomputes for stage in workload.stages),
        peak_bytes=peak,
        memory_bytes=limit,
    )


def _exposed(schedule: Schedule, workload: Workload) -> int:
    """Ns by which the same orders end sooner where messages take no time; of a repeated part as of what is written."""
    graph, actions = schedule.graph, schedule.graph.num_actions
    free = replace(
        graph,
        durations=[*graph.durations[:actions], *(0 for _ in graph.durations[actions:])],
        at_once=True,
    )
    sooner = graph.makespan(schedule.starts) - free.makespan(earliest_starts(free, schedule.orders))
    return max(0, sooner) * workload.num_microbatches // graph.workload.num_microbatches


def _common(search: PlanSearch, best: Alternative, explained_before: Mapping[int, Alternative]) -> list[Common]:
    """FSDP, 1F1B and interleaved 1F1B, each tensor- and expert-parallel size at its best, the quickest first: as they
    were scheduled, else by closed forms, where nothing is recomputed that need not be. The best plan is none of them.

    Trials that were ``explained_before`` are by their ids.
    """
    limit = min((size for size in search.request.memory if size is not None), default=None)
    scheduled = {
        (_shape(own), _settled(trial).scheduler): trial
        for trial in sorted((*search.done, *search.beside), key=lambda trial: -(trial.value_ns or 0))
        if (own := kept_choice(trial.candidate)) is not None
    }
    bounds = dict(search.as_cut)
    for tried in search.trials:
        if (own := kept_choice(tried.candidate)) is not None:
            bounds[_shape(own)] = min(bounds.get(_shape(own), math.inf), tried.bound_ns)
    found: dict[tuple[int, int, int, str], tuple[float, Common]] = {}
    for each in sorted(chain(*map(likely_choices, search.request.levels)), key=lambda each: each.usual_ns):
        choice, name = each.choice, _name(each.choice)
        if choice.usual is None or not name or (choice.usual.splits and not _is_fsdp(choice)):
            continue
        kind = choice.shards, choice.expert, choice.expert_shards, name
        if kind not in found:
            trial = scheduled.get((_shape(choice), choice.usual.name))
            if trial is None:
                about, why = each.usual_ns, _why(each, best, limit, bounds.get(_shape(choice)))
            else:
                known = explained_before.get(id(trial)) or _alternative(trial)
                about = known.iteration_ns
                why = "" if known == best else f"{format_ns(about)} as scheduled: {known.limits}"
            found[kind] = about, Common(choice_words(choice), why)
    return [each for _, each in sorted(found.values(), key=lambda one: one[0]) if each.why]


def _is_fsdp(choice: Choice) -> bool:
    """Whether replicas of the whole model divide gradients, or parameters, too."""
    return choice.positions == 1 and choice.zero.level >= IN_ACTIONS


def _name(choice: Choice) -> str:
    """What trainers call it: HSDP is FSDP within groups of replicas; else its schedule."""
    if _is_fsdp(choice):
        return "FSDP" if choice.zero.group == choice.copies else "HSDP"
    return "" if choice.usual is None else choice.usual.name


def _split(of: Choice | PlacedStage) -> str:
    """Tensor parallelism, and context and expert parallelism (with an expert tensor size) where there is some."""
    sizes = ("cp", of.context), ("ep", of.expert), ("etp", of.expert_shards or 1)
    more = [f" {name} {size}" for name, size in sizes if size > 1]
    return f"tp {of.shards}" + "".join(more)


def choice_words(choice: Choice) -> str:
    """A layout of the table in words."""
    zero = f" ZeRO {choice.zero.level}" if choice.zero.level else ""
    name = _name(choice)
    turns = f" x {choice.per_position}" if choice.per_position > 1 else ""
    return f"{_split(choice)} dp {choice.replicas}{zero} pp {choice.positions}{turns}{name and f', {name}'}"


def _shares(parts: Sequence[tuple[float, str]], of_ns: float, least: float) -> list[str]:
    """Parts of an iteration in words, the largest first: those of more than the ``least`` share."""
    return [f"{name} {ns / of_ns:.1%}" for ns, name in sorted(parts, reverse=True) if ns > least * of_ns]


def _why(each: BoundedChoice, best: Alternative, limit: int | None, as_cut: float | None = None) -> str:
    """Why it is not the best. Closed forms are a few percent off, so that they cannot tell what is nearer than that.

    What they have as shorter was looked at, if there was time: no schedule of it ``as_cut`` takes less than so many ns,
    infinite where it does not fit; None where it was not cut.
    """
    least = f", at least {format_ns(each.least_ns)}" if each.least_ns > best.iteration_ns else ""
    about = f"about {format_ns(round(each.usual_ns))}{least}"
    unfit = limit is not None and each.usual_bytes > limit
    short = f"{format_bytes(round(each.usual_bytes))} of {format_bytes(limit)}" if unfit and limit is not None else ""
    if unfit and not each.choice.levels:
        return f"{about}: it would hold {short}, which does not fit"
    recomputes = f"it recomputes blocks, as it would otherwise need {short}" if unfit else ""
    if each.usual_ns < (1 + FORMS_ERROR) * best.iteration_ns and not least:
        said = _against_form(each, best, as_cut)
        return f"{about} by closed form, {said}{unfit * '; '}{recomputes}"
    return f"{about}: {'; '.join([*_reasons(each, best), *([recomputes] if unfit else [])])}"


def _against_form(each: BoundedChoice, best: Alternative, as_cut: float | None) -> str:
    """What stands against a closed form that is no longer than the best."""
    if as_cut == math.inf:
        return "but as it is cut it does not fit"
    shorter = "no schedule of it that was tried is shorter"
    if as_cut is not None and as_cut > each.usual_ns:
        cut = f"but as it is cut at least {format_ns(round(as_cut))}"
        return cut if as_cut >= best.iteration_ns else f"{cut}, and {shorter}"
    if each.usual_ns >= (1 - FORMS_ERROR) * best.iteration_ns:
        return "a tie, as closed forms are a few percent off"
    if as_cut is None:
        return f"{1 - each.usual_ns / best.iteration_ns:.1%} shorter, but it was not looked at before the search ended"
    return f"but {shorter}"


def _reasons(each: BoundedChoice, best: Alternative) -> list[str]:
    """What it takes longer for than the best plan by closed forms, and the shares of its iteration for what else."""
    parts = each.parts
    said = []
    if parts.work > (1 + FORMS_ERROR) * best.work_ns:
        said.append(f"its blocks and what splits of them exchange take {parts.work / best.work_ns - 1:.1%} longer")
    named = [
        (parts.recomputed, "recomputing"),
        (parts.uneven, "uneven stages"),
        (parts.exchanged, "gathering parameters and reducing gradients on the way"),
        (parts.ending, ENDING_WORDS),
        (each.usual_ns - sum(parts), "bubble"),
    ]
    return said + (_shares(named, each.usual_ns, NAMED_FROM) or _shares(named, each.usual_ns, 0.0))[:3]
