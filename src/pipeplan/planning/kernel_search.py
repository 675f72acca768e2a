"""The search for a plan whose stages kernel backends run, where that is quicker: ``search --kernels``.

Stages are cut twice: by what blocks take in eager torch, and by their parts of the model's cheapest cover. From both
plans each stage is run either way, as eager torch has weight gradients apart, which fill bubbles, and a compiled
segment has none; and blocks move between neighbours, of which each then has the cover of its own. What is best of all
that by known schedules is searched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise, product
from typing import Any, get_args

from pipeplan.costs.blocks import running_on
from pipeplan.errors import InfeasibleError, PipeplanError, SearchTimeoutError, UsageError
from pipeplan.files import PlacedStage, Placement
from pipeplan.planning.bounds import request_bound
from pipeplan.planning.build_plan import CandidateCounts, Result
from pipeplan.planning.candidates import PlacementCandidate
from pipeplan.planning.kernel_stages import By, StageKernels, may_cover
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.targeted import TimeParts
from pipeplan.planning.trials import Trial
from pipeplan.search_constants import (
    KERNELS_CUT,
    KERNELS_CUTS,
    KERNELS_EACH,
    KERNELS_LOOKED,
    KERNELS_SECONDS,
    KERNELS_STAGES,
    KERNELS_WAYS,
    SECONDS_PER_LOOK,
)
from pipeplan.time_limit import Limit
from pipeplan.units import format_ns
from pipeplan.workload.elements import Segment

Segments = tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class _Variant:
    """A placement some of whose stages backends run, for micro-batches of a size."""

    placement: Placement
    batch: Batch

    def request(self, asked: Request) -> Request:
        """What searches its schedules alone."""
        return replace(
            asked,
            profile=asked.block_profile,
            stated=asked.stated_profile,
            joined=None,
            kernels=None,
            placement=self.placement,
            batch=self.batch,
            sizes=(),
            chunks=None,
            start=None,
            recompute=False,
            zero=None,
            zero_group=None,
            num_parted=0,
            late_inputs=False,
        )

    def trial(self, asked: Request) -> Trial:
        """Its workloads, for a look. Raises UsageError as :func:`.build_workload`."""
        candidate = PlacementCandidate(self.placement, self.batch, False, "kernels")
        return Trial.of(self.request(asked), candidate)


@dataclass(slots=True)
class _KernelSearch:
    """What has been looked at: variants and their trials, with the shortest iteration."""

    request: Request
    kernels: StageKernels
    parts: TimeParts
    trials: dict[_Variant, Trial] = field(default_factory=dict)
    best_ns: int | None = None
    looked: int = 0

    @property
    def may_look(self) -> bool:
        """Whether there is time for another look."""
        return not self.parts.interrupted and self.parts.left > (1 - KERNELS_LOOKED) * self.request.time_limit

    def look(self, variant: _Variant) -> Trial | None:
        """Look at known schedules; None where none fits, or none can be better than what is known."""
        if variant in self.trials:
            return self.trials[variant]
        self.looked += 1
        with suppress(InfeasibleError, UsageError):
            trial = variant.trial(self.request)
            if self.best_ns is not None and trial.bound_ns >= self.best_ns:
                return None
            with self.parts.spending(SECONDS_PER_LOOK * trial.num_actions):
                trial.look()
            self.trials[variant] = trial
            if trial.value_ns is not None:
                self.best_ns = min(trial.value_ns, self.best_ns or trial.value_ns)
            return trial
        return None

    def variants(self, placement: Placement, batch: Batch) -> Iterator[_Variant]:
        """Of one placement: every set of stages by backends, or where there are many, first or last ones."""
        stages = placement.stages
        covers = [self._covers(stage, batch) for stage in stages]
        given = self.kernels.asked.cover is not None
        if given and not all(covers):
            return
        for chosen in [[own[0] for own in covers]] if given else _choices(covers):
            changed = tuple(
                stage.model_copy(update=_covered(segments) if segments else {"segments": ()})
                for stage, segments in zip(stages, chosen, strict=True)
            )
            yield _Variant(placement.model_copy(update={"stages": changed}), batch)

    def _covers(self, stage: PlacedStage, batch: Batch) -> list[Segments]:
        """The cheapest covers of a stage, by forward and backward together first; none where nothing may cover it.

        Of a cover that was asked for what it has, which may be eager torch alone.
        """
        given = self.kernels.asked.cover is not None
        if not may_cover(stage):
            return []
        size = (stage.microbatch_size or batch.microbatch_size) // stage.replicas
        ways: tuple[By, ...] = ("both",) if given or self.request.profile.is_inference else get_args(By)
        found = [self.kernels.segments(stage.blocks, size, by) for by in ways]
        return list(dict.fromkeys(each for each in found if each or (given and each is not None)))

    def all_of(self, placement: Placement, batch: Batch) -> None:
        """Look at the placement's variants, and those of others with its stages cut otherwise, as long as it pays."""
        self._look_at(placement, batch)
        order = self.request.block_profile.topological_order()
        if not _is_line(placement, order):
            return
        places = self._places(order)
        count = math.comb(len(places), len(placement.stages) - 1) * 2 ** len(placement.stages)
        if count <= KERNELS_CUTS:
            for cuts in combinations(places, len(placement.stages) - 1):
                self._look_at(_cut(placement, order, cuts), batch)
            return
        cuts, moved = _cuts_of(placement), set(_cuts_of(placement)) <= set(places)
        while moved and self.may_look:
            before, moved = self.best_ns, False
            for near in _near(cuts, places):
                self._look_at(_cut(placement, order, near), batch)
                if self.best_ns is not None and (before is None or self.best_ns < before):
                    cuts, moved = near, True
                    break

    def _places(self, order: Sequence[str]) -> list[int]:
        """Where stages may begin: nowhere inside of a group that a cover runs at once."""
        rank = {block: place for place, block in enumerate(order)}
        inside = set[int]()
        for group in self.kernels.asked.kept:
            ranks = [rank[block] for block in group]
            inside.update(range(min(ranks) + 1, max(ranks) + 1))
        return [place for place in range(1, len(order)) if place not in inside]

    def _look_at(self, placement: Placement, batch: Batch) -> None:
        for variant in self.variants(placement, batch):
            if self.may_look or not (self.trials or self.parts.interrupted):  # one, however late it is
                self.look(variant)

    def searched(self, best: Result | None) -> Result | None:
        """The best plan of the variants that were looked at, if better than a plan that is known."""
        known = sorted(self.trials.items(), key=lambda each: each[1].value_ns or math.inf)
        for number, (variant, trial) in enumerate(known):
            most = None if best is None else best.plan.predicted.iteration_ns
            late = self.parts.left <= 0 and (number > 0 or trial.value_ns is None)
            if self.parts.interrupted or late:
                break
            if most is not None and trial.bound_ns >= most:
                continue
            seconds = KERNELS_EACH * self.parts.left if number < len(known) - 1 else self.parts.left
            seconds = max(seconds, KERNELS_SECONDS)
            found = self.parts.search(variant.request(self.request), seconds)
            if found is not None and (most is None or found.plan.predicted.iteration_ns < most):
                best = found
        return best


def _choices(covers: Sequence[Sequence[Segments]]) -> Iterator[Sequence[Segments]]:
    """[stage] what runs it: the cheapest covers of all first.

    Where there are few ways in all each stage is run by each of its covers or by eager torch; else by the cheapest of
    them or not, all sets of few stages, of more those from one end.
    """
    if math.prod(1 + len(own) for own in covers) <= KERNELS_WAYS:
        yield from product(*([*own, ()] for own in covers))
        return
    able = [number for number, own in enumerate(covers) if own]
    for chosen in _sets(able):
        yield [own[0] if number in chosen else () for number, own in enumerate(covers)]


def _sets(able: Sequence[int]) -> Iterator[Sequence[int]]:
    """Sets of stages: all first."""
    if len(able) <= KERNELS_STAGES:
        flags = product((True, False), repeat=len(able))
        yield from ([number for number, flag in zip(able, each, strict=True) if flag] for each in flags)
        return
    yield able
    for place in range(1, len(able)):
        yield able[place:]
        yield able[:-place]
    yield []


def _covered(segments: Segments) -> dict[str, Any]:
    """What a stage says that backends run, with blocks in the order of its segments."""
    return {"segments": segments, "blocks": tuple(block for each in segments for block in each.blocks)}


def _is_line(placement: Placement, order: Sequence[str]) -> bool:
    """Whether stages are parts of the model one after another, each with devices of its own, that are alike."""
    stages = placement.stages
    blocks = [block for stage in stages for block in stage.blocks]
    devices = [device for stage in stages for device in stage.devices]
    plain = {(stage.shards, stage.replicas, stage.microbatch_size, stage.zero) for stage in stages}
    able = all(map(may_cover, stages))
    return able and len(plain) == 1 and set(blocks) == set(order) and len(set(devices)) == len(devices)


def _cuts_of(placement: Placement) -> tuple[int, ...]:
    ends, at = [], 0
    for stage in placement.stages:
        at += len(stage.blocks)
        ends.append(at)
    return tuple(ends[:-1])


def _near(cuts: Sequence[int], places: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Cuts of which one is in the next place, or in that before."""
    for number, cut in enumerate(cuts):
        at = places.index(cut)
        for place in (*places[max(0, at - 1) : at], *places[at + 1 : at + 2]):
            found = (*cuts[:number], place, *cuts[number + 1 :])
            if all(one < other for one, other in pairwise(found)):
                yield found


def _cut(placement: Placement, order: Sequence[str], cuts: Sequence[int]) -> Placement:
    """The placement with stages that begin there."""
    ranges = pairwise((0, *cuts, len(order)))
    stages = tuple(
        stage.model_copy(update={"blocks": tuple(order[begin:end]), "segments": ()})
        for stage, (begin, end) in zip(placement.stages, ranges, strict=True)
    )
    return placement.model_copy(update={"stages": stages})


def search_kernels(request: Request, *, within: Limit | None = None, **how: Any) -> Result:
    """The best plan whose stages kernel backends run as ``request.kernels`` asks, where that is quicker.

    Never slower than that of eager torch alone, if no cover is asked for. ``how`` is as in :func:`.search_plan`.

    Raises:
        KeyboardInterrupt: interrupted before there was a plan.
        SearchTimeoutError: time was up before there was one.
        InfeasibleError: nothing fits.
        UsageError: the profile has no times of the backends; what backends were not measured with is asked for.
    """
    asked = request.kernels
    assert asked is not None
    _require_measured_so(request)
    kernels = StageKernels(request.block_profile, asked)
    whole = within or Limit(math.inf if request.deterministic else request.time_limit)
    parts = TimeParts(request, whole, how)
    search = _KernelSearch(request, kernels, parts)
    plain = replace(request, kernels=None)
    eager = None if asked.cover is not None else parts.search(plain, KERNELS_CUT * request.time_limit)
    bases = [] if eager is None else [eager]
    if request.joined is None and not isinstance(request.placement, Placement):
        by_covers = replace(plain, profile=kernels.covered(), stated=None)
        found = parts.search(by_covers, KERNELS_CUT * request.time_limit)
        bases += [] if found is None else [found]
    elif eager is None:
        found = parts.search(plain, KERNELS_CUT * request.time_limit)
        bases += [] if found is None else [found]
    for base in bases:
        batch = Batch(base.plan.num_microbatches, base.plan.microbatch_size)
        search.all_of(base.plan.placed.whole, batch)
    best = search.searched(eager)
    if best is None:
        if parts.interrupted:
            raise KeyboardInterrupt
        raise _nothing(parts, bases)
    return _answer(request, kernels, search, best, eager, bases)


def _require_measured_so(request: Request) -> None:
    """Refuse what backends were not measured with. Raises UsageError."""
    profile = request.block_profile
    beside = {
        "--launch-overhead": request.launch_overhead_ns > 0,
        "--profile-for": bool(profile.of_kinds),
        f"the recipe {profile.recipe.name}, by which parameters are cast when they are used": any(
            running_on(block, profile.recipe, 1) for block in profile.kinds
        ),
    }
    if odd := next((what for what, there in beside.items() if there), None):
        raise UsageError(f"--kernels is not for {odd}: backends were measured without; leave out one of them")


def _nothing(parts: TimeParts, bases: Sequence[Result]) -> PipeplanError:
    if parts.failures and not bases:
        return parts.failures[0]
    if parts.left <= 0:
        return SearchTimeoutError("time was up before there was a plan with --kernels; raise --time-limit")
    return next(
        iter(parts.failures),
        InfeasibleError(
            "no stages that were found have whole groups of the cover of --kernels; choose one of single blocks, or "
            "give --kernels auto"
        ),
    )


def _answer(
    request: Request,
    kernels: StageKernels,
    search: _KernelSearch,
    best: Result,
    eager: Result | None,
    bases: Sequence[Result],
) -> Result:
    plan, iteration = best.plan, best.plan.predicted.iteration_ns
    bound = best.lower_bound_ns
    if not (isinstance(request.placement, Placement) and kernels.asked.cover is not None):
        several = len(request.placement.stages) > 1 if isinstance(request.placement, Placement) else False
        profile = kernels.least(several=several or (request.positions or 1) > 1)
        least = replace(request, profile=profile, stated=None, joined=None, kernels=None)
        bound = min(iteration, request_bound(least))
    options = {**plan.provenance.options, "kernels": kernels.asked.said}
    chosen = {**(bases[0].plan.provenance.choices if bases else {}), "kernels": f"--kernels {kernels.asked.said}"}
    provenance = plan.provenance.model_copy(update={"options": options, "choices": chosen})
    counts = [each.candidates for each in bases]
    return replace(
        best,
        plan=plan.model_copy(update={"provenance": provenance}),
        seconds=search.parts.spent,
        lower_bound_ns=bound,
        candidates=CandidateCounts.of_all([*counts, CandidateCounts(search.looked, 0, 0)]),
        interrupted=search.parts.interrupted,
        notes=(*best.notes, _said(best, eager)),
        request=request,
    )


def _said(best: Result, eager: Result | None) -> str:
    """How many stages backends run, and what eager torch alone takes."""
    stages = [stage for stage in best.plan.stages if stage.blocks]
    names = dict.fromkeys(name for stage in stages for name in stage.backends if name != "eager")
    count = sum(bool(stage.segments) for stage in stages)
    ran = f"{count} of {len(stages)} stages have segments of {', '.join(names)}" if count else "eager torch runs all"
    alone = "" if eager is None else f"; eager torch alone: {format_ns(eager.plan.predicted.iteration_ns)}"
    return f"kernels: {ran}{alone}"
