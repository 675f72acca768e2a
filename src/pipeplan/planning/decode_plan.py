"""The plan of a decoding loop: its workload scheduled, said as a plan, and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from pipeplan.checker import check
from pipeplan.costs.blocks import StageCost
from pipeplan.costs.decode_loop import ChunkCost, decode_workload
from pipeplan.errors import InfeasibleError
from pipeplan.files import Cluster, Placement, Plan, Profile
from pipeplan.files.plan import Decode
from pipeplan.planning.build_plan import assemble, provenance_of
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.decode_loop import decode_schedule, enough_bytes
from pipeplan.schedule.state import Schedule
from pipeplan.search_constants import DECODE_STEPS
from pipeplan.texts import counted
from pipeplan.units import format_bytes
from pipeplan.workload.workload import Workload


class DecodePlanned(NamedTuple):
    """The plan of a decoding loop, and the schedule that it says."""

    plan: Plan
    schedule: Schedule


def decode_plan(
    profile: Profile,
    placement: Placement,
    given: Sequence[StageCost],
    cache_bytes: Sequence[int],
    decode: Decode,
    *,
    budget: Budget,
    prefill: Sequence[ChunkCost] = (),
    cluster: Cluster | None = None,
    memory_bytes: Sequence[int | None] | None = None,
    reserve_bytes: Sequence[int] | None = None,
    options: Mapping[str, Any] | None = None,
) -> DecodePlanned:
    """The plan in which a request's tokens follow each other soonest, of stages whose steps are ``given``.

    Its repetend is a step of every group, and lasts ``plan.token_ns``; ``predicted.period_lower_bound_ns`` is what is
    proved of that, per group. Arguments are those of :func:`~pipeplan.costs.decode_loop.decode_workload`; ``options``
    go into its provenance.

    Raises:
        InfeasibleError: the cache of so many requests does not fit, and how many would.
        UsageError: the profile or the stages are none of a decoding loop.
        SearchTimeoutError: the budget ran out before anything was found.
    """
    workload = decode_workload(
        profile,
        placement,
        given,
        cache_bytes,
        decode,
        steps=DECODE_STEPS,
        prefill=prefill,
        cluster=cluster,
        memory_bytes=memory_bytes,
        reserve_bytes=reserve_bytes,
    )
    require_cache(workload, decode)
    schedule = decode_schedule(workload, budget)
    said = {"kv": decode.kv, "batch": decode.batch, "context": decode.context_tokens, "groups": decode.groups}
    made = provenance_of(profile, cluster, {**said, **(options or {})}, budget.seed, ortools=version("ortools"))
    plan = assemble(
        schedule.graph,
        schedule.orders,
        schedule.bound_ns,
        schedule.period_bound_ns,
        schedule.scheduler,
        recipe=profile.recipe,
        modules=profile.modules,
        # a sample is a request's next token, and what that takes grows with its text
        provenance=made.model_copy(update={"tokens_per_sample": 1, "forward_flops_per_sample": None}),
        where=profile.where,
        cut=schedule.repetend,
        decode=decode,
    )
    stated = cluster if memory_bytes is None and reserve_bytes is None else None
    check(plan, profile, stated).require("the plan that was found")
    return DecodePlanned(plan, schedule)


def require_cache(workload: Workload, decode: Decode) -> None:
    """What requests have cached fits beside parameters, a step's results and its work. Raises InfeasibleError."""
    worst: tuple[int, int, int] | None = None
    for number, device in enumerate(workload.devices):
        there = [each for each in workload.stages if number in each.devices]
        cached = sum(each.cached.total for each in there)
        if device.usable_bytes is None or not cached:
            continue
        steps = [each for each in workload.operations if number in workload.stages[each.stage].devices]
        beside = (
            workload.static_bytes(number) - cached + max(each.acquire_bytes + each.workspace_bytes for each in steps)
        )
        over = beside + cached - device.usable_bytes
        if over > 0 and (worst is None or over > worst[0]):
            worst = over, number, cached
    if worst is None:
        return
    over, number, cached = worst
    fitting = max(0, (cached - over) * decode.batch // cached)
    memory = workload.devices[number].memory_bytes or 0
    raise InfeasibleError(
        f"device {number} has {format_bytes(memory)}, and the cache of {counted(decode.batch, 'request')} with "
        f"{decode.context_tokens:,} tokens takes {format_bytes(cached)} there, {format_bytes(over)} too much beside "
        f"parameters and a step's work: {counted(fitting, 'request')} would fit; lower --batch or --context, or raise "
        f"--memory to {format_bytes(enough_bytes(workload)[number])}"
    )
