"""The first screen of a report: the answer about each plan in ten lines, and which of several plans to run."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence

from pipeplan.files import Plan
from pipeplan.planning.frontier import FrontierPoint, FrontierResult
from pipeplan.reporting.answer import idle_clauses, memory_clauses, plan_clauses
from pipeplan.reporting.decoding import decode_clauses
from pipeplan.reporting.html.source import ReportSource, ShownPlan
from pipeplan.reporting.html.tables import ReportTable, TableCell, TableRow, count, ns, share, size, text
from pipeplan.reporting.layout import Clause
from pipeplan.reporting.timeline import kind_name
from pipeplan.simulator.measured_times import MeasuredComparison
from pipeplan.simulator.waits import CAUSES
from pipeplan.texts import counted, number_ranges, on_one_line
from pipeplan.units import format_bytes, format_ns, rounded_up
from pipeplan.workload.kinds import is_instruction

MORE = 0.1
"""The share of memory more that the answer is about."""

_TIE, _ESTIMATED_TIE = 0.01, 0.05
"""Differences of time below which two plans are a tie: of measured times; of estimated ones, which are as far off."""


def answer(report: ReportSource, shown: ShownPlan) -> list[tuple[str, str]]:
    """(what, words) of a plan, ten at most."""
    simulation = shown.simulation
    free = not shown.plan.provenance.cluster_sha256
    return [
        ("plan", _joined(plan_clauses(simulation, free_links=free))),
        ("speed", _speed(shown)),
        ("bound", _bound(shown)),
        ("memory", _joined(memory_clauses(simulation))),
        ("idle", _joined(idle_clauses(simulation))),
        ("busiest", _busiest(shown)),
        ("waits most", _waits(shown)),
        _memory_or_tokens(report, shown),
        ("prediction", _prediction(shown)),
        ("made by", shown.plan.provenance.command or "a command that the plan does not say"),
    ]


def _memory_or_tokens(report: ReportSource, shown: ShownPlan) -> tuple[str, str]:
    """What more memory would bring; of decode steps, whose memory is for requests, what is served."""
    simulation = shown.simulation
    if shown.plan.decode is not None:
        token_ns = simulation.token_ns
        return "tokens", decode_clauses(shown.plan, None if token_ns is None else round(token_ns))
    return "10 % more memory", _more_memory(report.frontier, shown.plan, simulation.iteration_ns)


def _joined(clauses: Sequence[Clause]) -> str:
    return "".join(words for words, _ in clauses)


def _speed(shown: ShownPlan) -> str:
    simulation = shown.simulation
    estimated = "estimated " if simulation.yardstick.estimated else ""
    rates = simulation.throughput.words
    samples = counted(simulation.workload.mini_batch, "sample")
    time = f"{estimated}{format_ns(simulation.iteration_ns)} per iteration of {samples}"
    return f"{time}, {rates}" if rates else time


def _bound(shown: ShownPlan) -> str:
    simulation = shown.simulation
    gap = "reached" if simulation.gap == 0 else f"{simulation.gap:.1%} away"
    return f"no schedule of these stages is below {format_ns(simulation.lower_bound_ns)} ({gap})"


def _busiest(shown: ShownPlan) -> str:
    """The device that computes longest, and with what."""
    simulation, workload = shown.simulation, shown.simulation.workload
    busy = simulation.rates.busy_ns
    device = busy.index(max(busy))
    times: Counter[str] = Counter()
    for item in workload.on_resource[device]:
        if item < len(workload.operations):
            times[workload.operations[item].kind] += workload.work_of(item)
    parts = [
        f"{kind if is_instruction(kind) else kind_name(kind)} {time / (busy[device] or 1):.0%}"
        for kind, time in times.most_common()
    ]
    stages = [number for number, stage in enumerate(workload.stages) if device in stage.devices]
    alike = [other for other, time in enumerate(busy) if time == busy[device]]
    more = len(alike) * workload.players_each - 1
    others = f" (as {counted(more, 'other')})" if more else ""
    which = f"stage{'s' * (len(stages) > 1)} {number_ranges(stages)}"
    time = f"{format_ns(busy[device])}, {busy[device] / (simulation.rates.makespan_ns or 1):.1%} of the time"
    return f"device {workload.first_playing(device)}{others}: {time}, with {which}: {', '.join(parts)}"


def _waits(shown: ShownPlan) -> str:
    """The device that idles longest, why, and for whom."""
    idle, first = shown.simulation.rates.idle_ns, shown.simulation.workload.first_playing
    device = idle.index(max(idle))
    if not idle[device]:
        return "nobody idles"
    waits = shown.waits[device]
    causes = sorted(waits.by_cause.items(), key=lambda each: -each[1])
    parts = [f"{format_ns(time)} {CAUSES[cause]}" for cause, time in causes if time][:2]
    whom = waits.longest
    mostly = f"; longest for device {first(whom[0])}, {format_ns(whom[1])}" if whom is not None else ""
    return f"device {first(device)} idles {format_ns(idle[device])}: {', '.join(parts)}{mostly}"


def _prediction(shown: ShownPlan) -> str:
    measured = shown.simulation.measured
    if measured is None:
        return (
            "not measured: pipeplan run PLAN --model MODEL --trace TRACE measures it (without a model: --emulate), and "
            "report PLAN --measured TRACE shows both"
        )
    how = "emulated" if isinstance(measured, MeasuredComparison) and measured.emulated else "measured"
    verdict = f"; {measured.verdict}" if isinstance(measured, MeasuredComparison) else ""
    return (
        f"{how} {format_ns(measured.measured_ns)}, {measured.ratio - 1:+.1%} to the {format_ns(measured.predicted_ns)} "
        f"that were predicted{verdict}"
    )


# What more memory brings ----------------------------------------------------------------------------------------------


def _more_memory(frontier: FrontierResult | None, plan: Plan, iteration_ns: int) -> str:
    """What a tenth more memory on each device brings, by a frontier; without one the command that answers it."""
    now = _memory_now(plan)
    more = round((1 + MORE) * now)
    if frontier is None:
        return f"not known here; {frontier_command(plan, more)} > frontier.json, then report --frontier frontier.json"
    count = plan.num_devices
    found = [
        (point.time_ns, number, point)
        for number, point in enumerate(frontier.points, 1)
        if point.num_devices == count and point.memory_bytes <= more
    ]
    where = f"up to {format_bytes(more)} on {counted(count, 'device')}"
    if not found:
        return f"the frontier has no point with {where}"
    if frontier.samples != plan.mini_batch:
        return f"the frontier is of {frontier.samples} samples, the plan of {plan.mini_batch}"
    time, number, point = min(found, key=lambda each: each[:2])
    return _gain(time, number, point, iteration_ns, now, where)


def _gain(time: int, number: int, point: FrontierPoint, iteration_ns: int, now: int, where: str) -> str:
    if time >= iteration_ns:
        return f"nothing: no point of the frontier with {where} is quicker than {format_ns(iteration_ns)}"
    gain = f"{1 - time / iteration_ns:.1%} shorter iterations: {format_ns(time)} with {where} (point {number})"
    if point.memory_bytes <= now:
        return f"{gain}; that point needs no more than the {format_bytes(now)} there are"
    return gain


def _memory_now(plan: Plan) -> int:
    """The least that a device has; without limits the most that one holds."""
    limits = [device.usable_bytes for device in plan.devices if device.usable_bytes is not None]
    return min(limits) if limits else max(memory.peak_bytes for memory in plan.predicted.memory)


def frontier_command(plan: Plan, memory_bytes: int) -> str:
    """The command that finds plans of the same samples on the same devices with up to so much memory."""
    try:
        words = shlex.split(plan.provenance.command)
    except ValueError:  # a text that somebody wrote
        words = []
    profile, cluster = "PROFILE", None
    if words[:2] == ["pipeplan", "search"] and len(words) > 2 and not words[2].startswith("-"):
        profile = words[2]
    if "--cluster" in words[:-1]:
        cluster = words[words.index("--cluster") + 1]
    parts = ["pipeplan", "frontier", profile, *(["--cluster", cluster] if cluster else [])]
    parts += ["--devices", str(plan.num_devices), "--memory", format_bytes(rounded_up(memory_bytes))]
    return shlex.join([*parts, "--mini-batch", str(plan.mini_batch), "--plans", "--json"])


# Which plan to run ----------------------------------------------------------------------------------------------------


def verdict(plans: Sequence[ShownPlan]) -> str:
    """Which of several plans to run, and why, in one line; before it that they may be of different models."""
    profiles = {each.plan.provenance.profile_sha256: each.plan.provenance.profile for each in plans}
    if len(profiles) > 1 and "" not in profiles:
        named = ", ".join(map(on_one_line, profiles.values()))
        return f"Made from different profiles ({named}), so compare only if these are of one model. {_which(plans)}"
    return _which(plans)


def _which(plans: Sequence[ShownPlan]) -> str:
    fitting = [each for each in plans if each.simulation.overflow is None]
    if not fitting:
        return "None of them: none fits into the memory of its devices."
    best, *others = sorted(fitting, key=_per_sample)
    unfit = [each.letter for each in plans if each.simulation.overflow is not None]
    left = f" {', '.join(unfit)} {'does' if len(unfit) == 1 else 'do'} not fit into memory." if unfit else ""
    if not others:
        return f"Run {best.name}: the others do not fit into memory."
    second = others[0]
    slower = _per_sample(second) / _per_sample(best) - 1
    estimated = any(each.simulation.yardstick.estimated for each in (best, second))
    memory = f"the fullest device of {best.letter} holds {_peak(best)}, that of {second.letter} {_peak(second)}"
    if slower < (_ESTIMATED_TIE if estimated else _TIE):
        least = min((best, second), key=_peak_bytes)
        why = "estimates are further off than that" if estimated else "that is within what runs differ by"
        tie = f"A tie: {best.letter} is {slower:.1%} quicker than {second.letter}, and {why}"
        return f"{tie}. Run {least.name}, which needs less memory: {_peak(least)}.{left}"
    sizes = [each.simulation.workload.num_devices for each in (best, second)]
    devices = f"; it has {counted(sizes[0], 'device')}, {second.letter} {sizes[1]}" if sizes[0] != sizes[1] else ""
    return f"Run {best.name}: {second.letter} takes {slower:.1%} longer per sample{devices}; {memory}.{left}"


def _per_sample(shown: ShownPlan) -> float:
    return shown.simulation.iteration_ns / shown.simulation.workload.mini_batch


def _peak_bytes(shown: ShownPlan) -> int:
    return max(memory.peak_bytes for memory in shown.simulation.memory)


def _peak(shown: ShownPlan) -> str:
    return format_bytes(_peak_bytes(shown))


def comparison(plans: Sequence[ShownPlan]) -> ReportTable:
    """Figures of the plans beside each other; with two of them also by how much the second is more."""
    columns = [[cell for _, cell in _figures(shown)] for shown in plans]
    names = [name for name, _ in _figures(plans[0])]
    rows = []
    for name, *cells in zip(names, *columns, strict=True):
        difference = [_difference(cells[0], cells[1])] if len(plans) == 2 else []
        rows.append(TableRow((text(name), *cells, *difference)))
    head = ("figure", *(shown.name for shown in plans), *(["B to A"] if len(plans) == 2 else []))
    return ReportTable("The plans side by side", head, tuple(rows))


def _figures(shown: ShownPlan) -> Iterator[tuple[str, TableCell]]:
    simulation = shown.simulation
    rates = simulation.rates
    yield "devices", count(simulation.workload.num_devices)
    yield "stages", count(sum(bool(stage.blocks) for stage in simulation.workload.stages))
    yield "micro-batches", count(simulation.workload.num_microbatches)
    yield "samples", count(simulation.workload.mini_batch)
    yield "iteration", ns(simulation.iteration_ns)
    yield "time per sample", ns(_per_sample(shown))
    yield "bubble rate of the iteration", share(rates.bubble_rate)
    yield "highest peak memory", size(_peak_bytes(shown))
    yield "fits into memory", text("yes" if simulation.overflow is None else "no")
    for cause, words in CAUSES.items():
        yield f"idle: {words}", ns(sum(waits.by_cause[cause] for waits in shown.waits))


def _difference(first: TableCell, second: TableCell) -> TableCell:
    """By how much the second is more; of numbers of things, and where the first is nothing, only whether it differs."""
    if not first.value or second.value is None or first == count(int(first.value)):
        return text("" if first.text == second.text else "differs")
    return TableCell(f"{second.value / first.value - 1:+.1%}", second.value / first.value)
