"""A search for a plan of decode steps: its stages and ways to share are chosen, and its loop is scheduled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from pipeplan.costs import StageCost
from pipeplan.costs.cache_volumes import KEPT
from pipeplan.costs.decode_loop import ChunkCost, chunk_costs
from pipeplan.errors import InfeasibleError, SearchTimeoutError, UsageError
from pipeplan.files import Plan
from pipeplan.files.plan import Decode
from pipeplan.planning.build_plan import CandidateCounts, Result, number
from pipeplan.planning.decode_choice import DecodeChoice, DecodeSearch, DecodeStage, max_requests
from pipeplan.planning.decode_plan import decode_plan
from pipeplan.planning.decoding import DecodeAnswer, LayerVolume, SharedPoint, decoding_of
from pipeplan.planning.request import Request
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.state import Progress, Schedule
from pipeplan.search_constants import DECODE_CHOOSING, DECODE_FIRST_SECONDS
from pipeplan.texts import counted
from pipeplan.time_limit import Limit, TimeUpError, clock_of
from pipeplan.workload.kinds import MemoryBytes

_WIDTHS = {"float64": 8, "float32": 4}
"""Bytes of a number that layers exchange, by the profile's number format; all others have 16 bits."""


def search_decoding(
    request: Request, *, progress: Progress | None = None, within: Limit | None = None, explain: bool = False
) -> Result:
    """The plan of decode steps whose tokens follow each other soonest, for a request that :attr:`.Request.decodes`.

    With ``explain`` its answer has the frontier of one stage on all devices.

    Raises:
        KeyboardInterrupt: interrupted before there was a choice.
        SearchTimeoutError: time was up before there was one.
        InfeasibleError: the cache does not fit; the text says how many requests would.
        UsageError: the profile has no costs for what is asked.
    """
    clock = clock_of(within)
    budget = Budget(request.time_limit, request.seed, request.deterministic, whole=within, clock=clock)
    search = _asked(request)
    with request.reserve_said():
        choices, bound_ns, alone_ns = [_chosen(search, budget, progress)], 0.0, None
        if search.asked.prefill:
            steps = replace(search, asked=replace(search.asked, prefill=None), failures=[], least_ns={})
            with suppress(SearchTimeoutError):  # what is quickest without prompts may be so with them
                choices.append(_chosen(steps, budget, None))
                bound_ns, alone_ns = steps.bound_ns(choices[-1]), choices[-1].token_ns
        partition_seconds = budget.elapsed
        made = _planned(request, search, choices, budget)
        token_ns = float(made.choice.token_ns if made.plan.token_ns is None else made.plan.token_ns)
        bound_ns = min(token_ns, max(bound_ns, search.bound_ns(choices[0])))
    return Result(
        made.plan,
        made.schedule,
        budget.elapsed,
        partition_seconds,
        budget.interrupted,
        lower_bound_ns=max(1, math.floor(made.plan.predicted.lower_bound_ns * Fraction(bound_ns) / Fraction(token_ns))),
        placement_lower_bound_ns=made.plan.predicted.lower_bound_ns,
        candidates=CandidateCounts(search.looked_at, search.refuted, search.left),
        timed_out=search.left > 0 and not budget.interrupted,
        notes=tuple(_notes(search)),
        request=request,
        decode=_answer(search, made, bound_ns, alone_ns, explain=explain),
    )


class _PlannedChoice(NamedTuple):
    """What was chosen, and planned."""

    choice: DecodeChoice
    plan: Plan
    schedule: Schedule


def _planned(request: Request, search: DecodeSearch, choices: Sequence[DecodeChoice], budget: Budget) -> _PlannedChoice:
    """Of these the one whose tokens follow each other soonest. Raises InfeasibleError where chunks fit with none."""
    found, failures = list[_PlannedChoice](), list[InfeasibleError]()
    for chosen in choices:
        try:
            found.append(_made(request, search, chosen, budget))
        except InfeasibleError as error:
            failures.append(error)
    if not found:
        raise failures[0]
    return min(found, key=lambda each: each.plan.token_ns or math.inf)


def _made(request: Request, search: DecodeSearch, chosen: DecodeChoice, budget: Budget) -> _PlannedChoice:
    decode = Decode(
        batch=search.batch,
        groups=chosen.groups,
        context_tokens=search.context,
        kv=chosen.kv(request.profile),
        prefill_tokens=request.serving.prefill or 0,
        max_requests=max_requests(search, chosen),
    )
    own = request.memory_bytes is not None or request.reserve_bytes is not None
    plan, schedule = decode_plan(
        request.profile,
        chosen.placement(search.order),
        [_stage_cost(each, chosen.groups) for each in chosen.stages],
        chosen.cache_bytes,
        decode,
        budget=budget,
        prefill=_chunks(search, chosen) if decode.prefill_tokens else (),
        cluster=request.cluster,
        memory_bytes=request.whole_memory if own else None,
        reserve_bytes=request.reserve if own else None,
        options={name: value for name, value in (("dcp", search.asked.dcp),) if value is not None},
    )
    return _PlannedChoice(chosen, plan, schedule)


def _asked(request: Request) -> DecodeSearch:
    """What a request asks. Raises UsageError."""
    decoding = decoding_of(request.profile, request.serving, limited=False)
    assert decoding is not None
    if request.uneven or request.by_kinds or set(request.speeds) != {1.0}:
        raise UsageError(
            "decode steps are planned for devices that are all as fast as the profile's; give --devices and --memory, "
            "or a --cluster of one kind of devices without a speed"
        )
    return DecodeSearch(
        request.profile,
        request.num_devices,
        decoding.batch,
        decoding.context,
        request.serving,
        request.least_memory,
        request.cluster,
        request.positions,
        request.shards,
        request.replicas,
    )


def _chosen(search: DecodeSearch, budget: Budget, progress: Progress | None) -> DecodeChoice:
    def look(found: DecodeChoice, groups: int) -> None:
        assert progress is not None
        looked = f"decode steps of {counted(groups, 'group')} of requests"
        progress(looked, found.token_ns, math.floor(search.bound_ns(found)), budget.elapsed)

    limit = Limit(math.inf) if budget.deterministic else Limit.part_of(budget, DECODE_CHOOSING * budget.remaining)
    try:
        limit.wait(0.0, DECODE_FIRST_SECONDS)
        with limit.enforced():
            return search.best(limit, None if progress is None else look)
    except TimeUpError:
        if budget.interrupted:
            raise KeyboardInterrupt from None
        raise SearchTimeoutError(
            f"no stages were found in {budget.elapsed:.1f} s; raise --time-limit, or give --pp or --kv"
        ) from None


def _stage_cost(stage: DecodeStage, groups: int) -> StageCost:
    """A step of the largest group."""
    choice = stage.choice
    return StageCost(
        forward_ns=max(1, choice.step_ns),
        backward_ns=0,
        activation_bytes=choice.given_bytes // groups,
        workspace_bytes=choice.working_bytes,
        state=sum((cost.state for cost in choice.costs), MemoryBytes()),
    )


def _chunks(search: DecodeSearch, chosen: DecodeChoice) -> list[ChunkCost]:
    """What every stage takes in of prompts as long as texts are by the last step, beside each group's step.

    A prompt is one request's, so that only devices that split a block share it.
    """
    stages = [
        [
            (name, cost.way.shards)
            for name, cost in zip(search.order[each.begin : each.end], each.choice.costs, strict=True)
        ]
        for each in chosen.stages
    ]
    return chunk_costs(search.profile, stages, search.context, search.asked.prefill or 0)


def _answer(
    search: DecodeSearch, made: _PlannedChoice, bound_ns: float, alone_ns: float | None, *, explain: bool
) -> DecodeAnswer:
    chosen, plan = made.choice, made.plan
    token_ns = Fraction(chosen.token_ns) if plan.token_ns is None else plan.token_ns
    pieces = {cost.way.cache for stage in chosen.stages for cost in stage.choice.costs}
    assert plan.decode is not None
    return DecodeAnswer(
        kv=chosen.kv(search.profile),
        dcp=max(pieces),
        batch=search.batch,
        context=search.context,
        groups=chosen.groups,
        token_ns=number(token_ns),
        token_lower_bound_ns=min(bound_ns, number(token_ns)),
        prefill_tokens=search.asked.prefill or 0,
        alone_token_ns=alone_ns,
        cache_bytes=plan.cache_bytes,
        max_requests=plan.decode.max_requests,
        volumes=tuple(_volumes(search, chosen)),
        frontier=tuple(_frontier(search)) if explain else (),
    )


def _frontier(search: DecodeSearch) -> Iterator[SharedPoint]:
    """Of one stage on all devices, for all requests as one group."""
    for choice in search.one_stage():
        counts = Counter(str(cost.way.mesh) for cost in choice.costs)
        blocks = ", ".join(f"{count} {mesh}" for mesh, count in counts.most_common())
        yield SharedPoint(blocks, choice.memory_bytes, choice.turn_ns)


def _volumes(search: DecodeSearch, chosen: DecodeChoice) -> Iterator[LayerVolume]:
    """Of the first block with a cache, on as many devices as the largest group has."""
    devices = max(stage.devices for stage in chosen.stages)
    block = next((each for each in search.profile.blocks if each.cache_bytes_per_token), None)
    if devices > 1 and block is not None:
        width = _WIDTHS.get(search.profile.source.dtype, 2)
        for kept in KEPT:
            yield LayerVolume.of(kept, block, width, chosen.at.largest, devices)


def _notes(search: DecodeSearch) -> Iterator[str]:
    if not search.links.known:
        device = search.profile.source.device
        yield (
            f"links among devices take no time: {f'{device!r} is' if device else 'the profile names'} no device that "
            "is known by its links, and there is no --cluster"
        )
    if search.left:
        yield f"{search.left} numbers of groups of requests were not looked at; raise --time-limit"
