"""The search for a plan that a tool can run: inside its limits, and beside that, in the same time, without them.

A tool that reads orders gets one search; one with schedules of its own a search for each of them, of which the best is
the answer. What the limits cost is said against the best plan without them, and against the bound over everything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from pipeplan.catalog import export_target
from pipeplan.errors import InfeasibleError, PipeplanError, SearchTimeoutError, UsageError
from pipeplan.files import Plan
from pipeplan.partition.strategies import STRATEGIES
from pipeplan.planning.bounds import prompt_bound
from pipeplan.planning.build_plan import CacheCost, CandidateCounts, Result, TargetCost
from pipeplan.planning.infeasibility import most_telling
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.serving import Served, request_of, served, serving_of
from pipeplan.planning.start import busiest_ns, gain_said
from pipeplan.planning.steps import STEPS, search_plan
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.state import Progress, SearchStep, scheduler_words
from pipeplan.search_constants import (
    FEW_WRITTEN_FOR_TARGETS,
    FIRST_SECONDS,
    MOST_WRITTEN_FOR_TARGETS,
    TARGET_APART_SECONDS,
    TARGET_CHUNKED,
    TARGET_FREE,
    TARGET_LEAST,
)
from pipeplan.time_limit import Limit, TimeUpError
from pipeplan.units import MAX_BYTES, format_ns


@dataclass(slots=True)
class TimeParts:
    """The time of a search that is made of several, of which each gets a share."""

    request: Request
    whole: Limit
    how: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    failures: list[PipeplanError] = field(default_factory=list)
    spent: float = 0.0
    interrupted: bool = False

    @property
    def left(self) -> float:
        """Seconds left."""
        total = self.request.time_limit
        return total - self.spent if self.request.deterministic else min(total - self.spent, self.whole.left())

    @property
    def rest(self) -> Budget:
        """What is left, which no clock ends where work is counted."""
        seconds, deterministic = max(0.0, self.left), self.request.deterministic
        return Budget(seconds, deterministic=deterministic, whole=self.whole, clock=self.whole.clock)

    @contextmanager
    def spending(self, work: float) -> Iterator[None]:
        """What runs spends time: seconds by the clock, or so much ``work`` where that is counted."""
        begun = self.whole.clock()
        yield
        self.spent += work if self.request.deterministic else self.whole.clock() - begun

    def search(self, asked: Request, seconds: float, **how: Any) -> Result | None:
        """Search for so long; None where nothing was found."""
        if self.interrupted:
            return None
        begun = self.whole.clock()
        try:
            found = search_plan(replace(asked, time_limit=seconds), within=self.whole, **{**self.how, **how})
        except KeyboardInterrupt:
            self.interrupted = True
            return None
        except (InfeasibleError, SearchTimeoutError, UsageError) as error:
            self.failures.append(error)
            return None
        finally:
            self.spent += seconds if self.request.deterministic else self.whole.clock() - begun
        self.interrupted |= found.interrupted
        return found


def search_target(
    request: Request,
    *,
    progress: Progress | None = None,
    steps: Sequence[SearchStep] = STEPS,
    within: Limit | None = None,
    explain: bool = False,
    workers: int = 1,
    executor: Executor | None = None,
) -> Result:
    """The best plan of a request with a target, as :func:`.search_plan` has it of any other.

    Raises:
        KeyboardInterrupt: interrupted before there was a plan.
        SearchTimeoutError: time was up before there was one.
        InfeasibleError: nothing fits within the target's limits; the text says whether something does without them.
        UsageError: a request that the target cannot run.
    """
    only, free = request.only, request.free
    assert only is not None
    assert free is not None
    whole = within or Limit(math.inf if request.deterministic else request.time_limit)
    how = {"progress": progress, "steps": steps, "workers": workers, "executor": executor}
    parts = TimeParts(request, whole, how)
    if only.serves:
        return _served(request, parts, explain)
    variants = [*_variants(request)]
    weights = [_weight(asked) for asked in variants]
    for number, asked in enumerate(variants):
        seconds = max(0.0, parts.left - TARGET_FREE * request.time_limit) * weights[number] / sum(weights[number:])
        found = parts.search(asked, seconds, explain=explain)
        parts.results += [] if found is None else [found]
    failures, parts.failures = parts.failures, []
    without = None
    if parts.left > TARGET_LEAST * request.time_limit:
        without = parts.search(free, parts.left, progress=None)
    if not parts.results:
        if parts.interrupted:
            raise KeyboardInterrupt
        raise _nothing(only.title, failures, without)
    best = min(parts.results, key=lambda each: each.plan.predicted.iteration_ns)
    own = best.plan.predicted.iteration_ns
    with suppress(PipeplanError):
        bound = prompt_bound(free, whole) if without is None else without.lower_bound_ns
        met = None if without is None else without.plan.predicted.iteration_ns
        words = "" if without is None else _words(without)
        best = replace(best, cost=TargetCost(only.title, "iteration", own, min(bound, own), met, words))
    return _merged(request, best, parts, failures)


def _weight(asked: Request) -> int:
    """How much of the time one of several schedules gets: more with several stages on each rank, which are as many
    numbers of stages to look at, each with so many more actions.
    """
    assert asked.only is not None
    return TARGET_CHUNKED if any(STRATEGIES[each].chunked for each in asked.only.placements) else 1


def _merged(request: Request, best: Result, parts: TimeParts, failures: Sequence[PipeplanError]) -> Result:
    """The best of all parts, with what all of them have proved and looked at."""
    bounds = [each.lower_bound_ns for each in parts.results]
    if any(isinstance(error, SearchTimeoutError) for error in failures) or parts.interrupted:
        bounds.append(1)
    counts = [each.candidates for each in parts.results]
    started = next((each.start_ns for each in parts.results if each.start_ns is not None), None)
    return replace(
        best,
        seconds=parts.spent,
        interrupted=parts.interrupted,
        lower_bound_ns=min(*bounds, best.lower_bound_ns),
        candidates=CandidateCounts.of_all(counts),
        timed_out=any(each.timed_out for each in parts.results),
        notes=(
            *best.notes,
            *gain_said(started, best.plan.predicted.iteration_ns),
            *(() if best.cost is None else (best.cost.said,)),
        ),
        request=request,
        start_ns=started,
    )


def _variants(request: Request) -> Iterator[Request]:
    """The request once for each of the target's schedules, or as it is where orders are free.

    Raises:
        UsageError: a schedule is asked for that the target does not run, or not so.
    """
    only = request.only
    assert only is not None
    target = export_target(only.name)
    if target.schedules is None:
        yield request
        return
    if request.scheduler not in ("auto", *target.schedule_names):
        what = f"{target.title} runs {' or '.join(target.schedule_names)}, not {request.scheduler}"
        raise UsageError(f"for {target.title} (--for): {what}; leave --scheduler out")
    some = False
    for placement, names in target.schedules.items():
        for name in names:
            if request.placement in ("auto", placement) and request.scheduler in ("auto", name):
                some = True
                said = (*request.said, *(() if request.scheduler == name else (("scheduler", f"--for {only.name}"),)))
                allowed = replace(only, placements=(placement,))
                chunks = request.chunks if placement != "one-to-one" else None
                start = request.start if request.start is not None and _stands(request.start, placement) else None
                if request.chunks in (None, 1) or chunks is not None:
                    yield replace(request, scheduler=name, only=allowed, chunks=chunks, said=said, start=start)
    if not some:
        raise UsageError(
            f"--for: {target.title} does not run {request.scheduler} with --placement {request.placement}; leave one "
            "of them out"
        )


def _stands(plan: Plan, placement: str) -> bool:
    """Whether a plan's stages stand on its groups of devices as a placement has them, whatever the plan calls that."""
    groups = [*dict.fromkeys(stage.devices for stage in plan.stages)]
    ranks, chunks = [groups.index(stage.devices) for stage in plan.stages], len(plan.stages) // len(groups)
    strategy = STRATEGIES[placement]
    return strategy.chunked == (chunks > 1) and ranks == [*strategy.positions(len(groups), chunks)]


def _nothing(title: str, failures: Sequence[PipeplanError], without: Result | None) -> PipeplanError:
    """Why there is no plan for the target, and whether there is one without its limits."""
    error = most_telling(list(failures))
    if without is not None and isinstance(error, InfeasibleError):
        text = str(error.args[0])
        error.args = (
            f"within {title}'s limits nothing fits: {text}; without --for there is a plan ({_words(without)}), which "
            f"{title} cannot run",
        )
    return error


def _words(found: Result) -> str:
    """A plan in a few words."""
    plan = found.plan
    stage, count = plan.stages[0], len({stage.devices for stage in plan.stages})
    recomputes = sum(stage.recomputes for stage in plan.stages)
    words = [f"pp {count}", f"dp {stage.replicas}", f"tp {stage.shards}", plan.placement]
    words += [f"ZeRO {stage.zero}"] * bool(stage.zero)
    words += [f"{recomputes} stages recompute"] * bool(recomputes)
    return ", ".join([*words, scheduler_words(plan.provenance.scheduler)])


# Tools that serve ----------------------------------------------------------------------------------------------------


def _served(request: Request, parts: TimeParts, explain: bool) -> Result:
    """One pipeline with the best cut, as a plan of forwards in order (of a profile of training, 1F1B)."""
    cut, batch = _cut(request, parts), _written(request)
    found = _planned(request, parts, replace(request_of(request, cut.placement), batch=batch), explain)
    parts.results.append(found)
    notes = [*found.notes, *_started_from(request, cut)]
    if batch != request.batch:
        notes.append(
            f"the plan has {batch.num_microbatches} of {request.batch.num_microbatches:,} micro-batches, as many as "
            "one pipeline of so many stages takes to write one by one; more of them run in the same way"
        )
    return _merged(request, replace(found, cost=_cost_of(request, cut, parts), notes=tuple(notes)), parts, ())


def _written(request: Request) -> Batch:
    """As many micro-batches as a plan of forwards alone has, in which a round repeats only once the pipeline is full.

    On each device a micro-batch has a forward, and a message before and after it.
    """
    batch, each = request.batch, 3 * request.num_devices
    if not request.profile.is_inference or each * batch.num_microbatches <= MOST_WRITTEN_FOR_TARGETS:
        return batch
    return replace(batch, num_microbatches=max(1, FEW_WRITTEN_FOR_TARGETS // each))


def _cut(request: Request, parts: TimeParts) -> Served:
    """The best cut, in the time that there is.

    Raises:
        KeyboardInterrupt: interrupted before it was found.
        SearchTimeoutError: time was up before.
    """
    limit = parts.rest
    limit.wait(0.0, FIRST_SECONDS)
    try:
        with limit.enforced():
            return served(request)
    except TimeUpError as up:
        if up.limit is not limit:
            raise
        if limit.interrupted:
            raise KeyboardInterrupt from None
        raise SearchTimeoutError(f"no cut was found in {limit.seconds:.1f} s; raise --time-limit") from None


def _planned(request: Request, parts: TimeParts, asked: Request, explain: bool) -> Result:
    """The plan of a cut. Where that of a cache fits by itself, and whole samples at once do not, without a limit."""
    found = parts.search(asked, parts.left, explain=explain)
    if found is None and not parts.interrupted and serving_of(request) is not None:
        found = parts.search(asked.within(MAX_BYTES), parts.left, explain=explain)
        if found is not None:
            note = (
                "weights and cache fit; forwards of whole samples, which the plan has, do not: it has no memory limit"
            )
            found = replace(found, notes=(*found.notes, note))
    if found is None:
        if parts.interrupted:
            raise KeyboardInterrupt
        raise most_telling(parts.failures)
    return found


def _cost_of(request: Request, cut: Served, parts: TimeParts) -> TargetCost | CacheCost:
    """What the cut has, beside blocks that are cut anywhere, where there is time for that."""
    only, free, apart = request.only, request.free, None
    assert only is not None
    assert free is not None
    limit = parts.rest
    limit.wait(0.0, TARGET_APART_SECONDS)
    with suppress(PipeplanError), limit.ended():
        one: dict[str, Any] = {"replicas": 1, "expert": 1, "expert_shards": None}
        alone = replace(free, batch=request.batch, only=only, serving=request.serving, **one)
        apart = served(alone)
    decoding = cut.decoding
    if decoding is not None and decoding.objective == "cache" and cut.tokens is not None:
        block_tokens = export_target(only.name).cache_block_tokens
        return CacheCost(
            only.title,
            cut.tokens,
            max(cut.tokens, cut.even_tokens or 0),
            None if apart is None else apart.tokens,
            decoding.context,
            decoding.batch,
            cut.busiest_ns,
            block_tokens,
        )
    measure = "busiest stage" if decoding is None else "decode step"
    anywhere = None if apart is None else apart.busiest_ns
    return TargetCost(only.title, measure, cut.busiest_ns, cut.even_ns, anywhere, "blocks cut anywhere")


def _started_from(request: Request, cut: Served) -> Iterator[str]:
    """What the busiest stage of the plan of --start takes, if its micro-batches are as large."""
    start = request.start
    if start is None or cut.decoding is not None or start.microbatch_size != request.batch.microbatch_size:
        return
    own = busiest_ns(request, start)
    less = f"{1 - cut.busiest_ns / own:.1%} less than" if cut.busiest_ns < own else "as much as"
    if cut.busiest_ns <= own:
        yield f"the busiest stage takes {less} that of the plan of --start, {format_ns(own)}"
