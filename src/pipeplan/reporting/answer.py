"""The first screen of a search: what was found, how good it is and what to do next, in ten lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.text import Text

from pipeplan.costs.throughput import one_device_ns
from pipeplan.files import Placement
from pipeplan.planning.bounds import bound_is_over, open_bound
from pipeplan.planning.build_plan import Result
from pipeplan.planning.choices import takes_long
from pipeplan.planning.next_steps import cannot_train, next_steps
from pipeplan.planning.request import Request
from pipeplan.reporting.layout import (
    Clause,
    Row,
    console_for,
    fitted,
    flowed,
    idle_devices,
    labelled,
)
from pipeplan.reporting.terminal import Bottleneck, recomputed_words, zero_words
from pipeplan.schedule.state import scheduler_words
from pipeplan.simulator.simulation import Simulation
from pipeplan.texts import counted, number_ranges, printable
from pipeplan.units import format_bytes, format_ns
from pipeplan.workload.elements import GATHERED_CONTEXT, RING, Stage
from pipeplan.workload.slices import parts_words
from pipeplan.workload.workload import Workload

LINES = 10
"""Lines of the answer where the terminal has at least 80 columns."""

_STEPS = 2
"""Next steps that are shown."""

_REASONS = 2
"""Reasons for idling that are always shown."""


def print_answer(
    request: Request,
    result: Result,
    simulation: Simulation,
    written: str | None = None,
    file: TextIO | None = None,
    keep: str = "-o plan.json",
) -> None:
    """Print the answer, to stdout unless ``file`` is given.

    ``written`` is the plan's file, if there is one; ``keep`` is what would write it.
    """
    console = console_for(file)
    name, ended = result.plan.name, _heading(request, simulation, result)
    heading = [
        *idle_devices(simulation.workload.idle_devices, simulation.workload.num_devices, console.width),
        flowed(Text.assemble((name, "bold"), f": {ended}"), console.width),
    ]
    most = LINES - sum(1 + text.plain.count("\n") for text in heading)
    rows = fitted(list(_rows(request, result, simulation, written, keep)), console.width, most)
    console.print(*heading, sep="\n")
    console.print(labelled(rows, console.width))
    console.print()


def _heading(request: Request, simulation: Simulation, result: Result) -> str:
    """How the search ended; of a schedule that was asked for by its name, that it is that one."""
    limits = sorted({device.memory_bytes for device in simulation.workload.devices if device.memory_bytes is not None})
    memory = f" of {' or '.join(map(format_bytes, limits))}" if limits else ""
    if result.status == "optimal":
        ended = "optimal"
    else:
        found = "found" if not result.timed_out else "within the time limit"
        ended = f"best {'stages' if request.dictates else 'plan'} {'so far' if result.interrupted else found}"
    if request.imported:
        own = request.rules is not None
        made = "" if own else f"{scheduler_words(result.plan.provenance.scheduler)} on "
        ended = f"as {request.imported} runs it," if own else f"{made}the stages of {request.imported},"
    elif result.stands_in and request.planner == "auto":
        ended = f"{scheduler_words(result.plan.provenance.scheduler)}, cut evenly: {takes_long(request)} had none"
    elif request.dictates:
        made = f"{scheduler_words(result.plan.provenance.scheduler)}, as given"
        searched = ended == "optimal" or not isinstance(request.placement, Placement)
        ended = f"{made}, {'on the ' * (ended != 'optimal')}{ended}" if searched else f"{made},"
    who = f", stages by --planner {request.planner}" if request.planner != "auto" else ""
    if result.stands_in and request.planner != "auto":
        who = f", stages cut evenly: --planner {request.planner} had none"
    return f"{ended} for {counted(simulation.workload.num_devices, 'device')}{memory}{who}"


def _rows(request: Request, result: Result, simulation: Simulation, written: str | None, keep: str) -> Iterator[Row]:
    yield "plan", plan_clauses(simulation, free_links=request.cluster is None)
    yield "speed", _speed(request, simulation)
    if bound := _bound(request, result):
        yield "bound", bound
    yield "memory", memory_clauses(simulation)
    yield "idle", idle_clauses(simulation)
    if lacks := cannot_train(simulation.plan, request.block_profile):
        said = f"training with {' and '.join(lacks)} is not built yet"
        trains = lacks == ["fp8-mixed"]  # one line of 80 columns
        said = f"{said}; --precision bf16-mixed is" if trains else f"emulates this plan; {said}"
        yield "run", [(said, 1)]
    for number, step in enumerate(next_steps(request, result, simulation, written, keep)[:_STEPS]):
        yield "" if number else "next", [(printable(f"{step.what}: {step.brings}"), 2 * number)]


def plan_clauses(simulation: Simulation, *, free_links: bool) -> list[Clause]:
    """Stages x replicas x tensor split, the schedule and the micro-batches."""
    plan, workload = simulation.plan, simulation.workload
    stages = [stage for stage in workload.stages if stage.blocks]
    most = max(_stages_per_device(workload))
    virtual = f" ({most} per device)" if most > 1 else ""
    replicas = _span([stage.replicas for stage in stages])
    free = " (links are free)" if replicas != "1" and free_links else ""
    split, context = _span([stage.shards for stage in stages]), _span([stage.context for stage in stages])
    expert, split_experts = (_span([getattr(stage, name) for stage in stages]) for name in ("expert", "expert_shards"))
    recomputed = recomputed_words(stages)
    count = counted(workload.num_microbatches, "micro-batch", "es")
    sizes = f"{count} of {workload.microbatch_words}{parts_words(workload)}"
    return [
        (f"{counted(len(stages), 'stage')}{virtual} x {replicas} replica{'' if replicas == '1' else 's'}{free}", 0),
        ("" if split == "1" else f" x {split}-way tensor split", 0),
        ("" if context == "1" else f" x {context}-way context split{_exchange(stages)}", 0),
        ("" if expert == "1" else f", experts {expert} ways", 0),
        ("" if split_experts == "1" else f" ({split_experts} split each)", 0),
        (f", {shared}" if (shared := zero_words(stages)) else "", 0),
        (f", {plan.placement}" if len(stages) > 1 else ", data parallel" if replicas != "1" else "", 3),
        (f"; {scheduler_words(plan.provenance.scheduler)}" if plan.provenance.scheduler else "", 0),
        (", backward split" if workload.splits_backward else "", 4),
        (f", {recomputed}" if recomputed else "", 1),
        (f"; {sizes}", 0),
    ]


def _exchange(stages: Sequence[Stage]) -> str:
    """How devices that share sequences have keys and values of all."""
    words = {RING: "ring", GATHERED_CONTEXT: "keys and values gathered"}
    found = dict.fromkeys(words[stage.context_exchange] for stage in stages if stage.context > 1)
    return f" ({', '.join(found)})"


def _stages_per_device(workload: Workload) -> list[int]:
    found = [0] * len(workload.devices)
    for stage in workload.stages:
        for device in stage.devices:
            found[device] += bool(stage.blocks)
    return found


def _span(values: Sequence[int]) -> str:
    """The least and the most, once where they are equal."""
    return "-".join(map(str, dict.fromkeys((min(values), max(values)))))


def _speed(request: Request, simulation: Simulation) -> list[Clause]:
    """The iteration, said to be estimated where nobody measured it, and how often it goes into one device's time."""
    rates, workload = simulation.throughput.words, simulation.workload
    estimated = "estimated " if simulation.yardstick.estimated else ""
    samples = counted(workload.mini_batch, "sample")
    alone = one_device_ns(request.block_profile, workload)
    faster = alone / simulation.iteration_ns if alone else 0.0  # more than there are devices: other costs per sample
    known = 0 < faster <= workload.num_devices
    times = f"; {faster:.1f} times as fast as one device" if known else ""
    return [
        (f"{estimated}{format_ns(simulation.iteration_ns)} per iteration of {samples}", 0),
        (f"{', ' if rates else ''}{rates}", 0),
        (times if workload.num_devices > 1 else "", 4),
    ]


def _any_plan(request: Request) -> str:
    """What the bound is for: any plan, or any with what was asked for and makes a difference to it."""
    given = "".join(f" {flag}" for flag in bound_is_over(request))
    runs = "" if request.only is None else f" that {request.only.title} can run"
    return f"for any plan{runs}{f' with{given}' if given else ''}"


def _bound(request: Request, result: Result) -> list[Clause]:
    if request.imported:
        bound = open_bound(request, result.plan)
        if bound is None:
            return []
        gap = result.plan.predicted.iteration_ns / bound - 1
        return [(f"{format_ns(bound)} for any plan on these devices ({_away(gap)})", 0)]
    if result.status == "optimal":
        return [(f"{format_ns(result.lower_bound_ns)}, reached: nothing that was left open is faster", 0)]
    found = [
        f"{format_ns(bound)} {of} ({_away(gap)})"
        for bound, of, gap in (
            (result.lower_bound_ns, _any_plan(request), result.gap),
            (result.placement_lower_bound_ns, "on this placement", result.placement_gap),
        )
    ]
    return [
        (", ".join(found), 0),
        (f"; {result.candidates.not_tried}" if result.candidates.left else "", 0),
    ]


def _away(gap: float) -> str:
    """How far above a bound something is."""
    return "reached" if gap == 0 else f"{gap:.1%} away" if gap < 1 else f"{1 + gap:.1f}x away"


def memory_clauses(simulation: Simulation) -> list[Clause]:
    """The device that has least left, then the one that has most."""
    peaks = [memory.peak_bytes for memory in simulation.memory]
    devices, first = simulation.workload.devices, simulation.workload.first_playing
    limits = [device.usable_bytes for device in devices]
    left = {device: limit - peaks[device] for device, limit in enumerate(limits) if limit is not None}
    if not left:
        fullest = peaks.index(max(peaks))
        return [(f"at most {format_bytes(peaks[fullest])}, on device {first(fullest)}; no limit given", 0)]
    fullest = min(left, key=lambda device: (left[device], device))
    least, emptiest = left[fullest], max(left, key=lambda device: (left[device], -device))
    reserve, whole = devices[fullest].reserve_bytes, devices[fullest].memory_bytes or 0
    taken = f"device {first(fullest)} with {format_bytes(peaks[fullest])} of {format_bytes(whole - reserve)}"
    beside = f", {format_bytes(whole)} less {format_bytes(reserve)} in reserve" if reserve else ""
    if least < 0:
        return [(f"does not fit: {taken}{beside}, {format_bytes(-least)} too much", 0)]
    limit = "" if limits[emptiest] == limits[fullest] else f" of {format_bytes(limits[emptiest] or 0)}"
    other = f"; emptiest device {first(emptiest)} with {format_bytes(peaks[emptiest])}{limit}"
    return [
        (f"fits: fullest {taken}", 0),
        (beside, 2),
        (f" ({format_bytes(least)} left)", 0),
        (other if left[emptiest] > least else "; all others alike" if simulation.workload.num_devices > 1 else "", 3),
    ]


def idle_clauses(simulation: Simulation) -> list[Clause]:
    """The share of device time and why, the largest part first, and the devices that idle most."""
    idle, rates, most = simulation.idle, simulation.rates, Bottleneck.of(simulation.workload)
    has = "have" if len(most.stages) > 1 else "has"
    reasons = [
        (idle.summing, "summing gradients"),
        (idle.stepping, "in the optimizer's step"),
        (idle.gathering, "gathering parameters"),
        (idle.unused, "on devices without a stage"),
        (idle.uneven, f"as {most.name} {has} {most.above:.1%} more work than the mean"),
        (idle.ramps, "filling and draining" if idle.waiting is not None else "filling, draining and waiting"),
        (idle.waiting or 0.0, "waiting for inputs"),
    ]
    shares = [(f"{share:.1%}", why) for share, why in sorted(reasons, reverse=True) if f"{share:.1%}" != "0.0%"]
    whole = f"{idle.total:.1%} of device time"
    if not shares:
        return [(whole, 0)]
    said = [" ".join(share) for share in shares]
    parts = f", {shares[0][1]}" if len(shares) == 1 else f": {', '.join(said[:_REASONS])}"
    longest = max(rates.idle_ns)
    where = simulation.workload.playing(device for device, time in enumerate(rates.idle_ns) if time == longest)
    name = "device" if len(where) == 1 else "devices"
    clauses: list[Clause] = [(whole + parts, 0), ("".join(f", {reason}" for reason in said[_REASONS:]), 2)]
    if longest > min(rates.idle_ns):
        clauses.append((f"; most on {name} {number_ranges(where)}", 5))
    return clauses
