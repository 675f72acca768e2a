"""Rules as a source of schedules: one set, or all built-in ones tried.

The built-in rules, all tried (FlexPipe, section 6): what the rules by themselves find on a placement.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.pattern import memory_in_turn
from pipeplan.schedule.rules.engine import schedule_by_rules, unseparated
from pipeplan.schedule.rules.language import First, Rules, StageTraversal, TypeTraversal, naming
from pipeplan.schedule.rules.separation import Joined, Timed, separated
from pipeplan.schedule.rules.settings import Resolved
from pipeplan.schedule.rules.values import Limit
from pipeplan.schedule.state import Schedule
from pipeplan.search_constants import SECONDS_PER_RULES, SEPARATED
from pipeplan.time_limit import TimeUpError, checked
from pipeplan.units import format_bytes, rounded_up
from pipeplan.workload.bounds import strong_iteration_bound, weak_iteration_bound
from pipeplan.workload.engine import with_links
from pipeplan.workload.memory import fits, overflow
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import TaskGraph, task_graph
from pipeplan.workload.workload import Workload


def schedule_of_rules(workload: Workload, rules: Rules | None, budget: Budget) -> Schedule:
    """The schedule that rules make of a workload; without rules the shortest of those of the built-in ones.

    Raises:
        InfeasibleError: the rules get stuck, or do not fit into memory; the text names them.
        UsageError: they do not apply to the workload.
    """
    graph = task_graph(workload)
    if rules is not None:
        return _schedule(graph, run_rules(graph, rules), budget)
    tried = built_in_rules(workload)
    found = sweep(workload, _while_there_is_time(tried, budget, graph.num_tasks), graph=graph)
    if not found:
        enough = format_bytes(memory_in_turn(OneMicrobatch.of(workload, require_room=False)))
        raise InfeasibleError(
            f"none of the {len(tried)} built-in rules makes a schedule that fits into memory; one micro-batch after "
            f"another needs {enough} per device: raise --memory to {enough}, or let --scheduler auto search"
        )
    return _schedule(graph, found[0], budget)


def _while_there_is_time(tried: list[Rules], budget: Budget, num_tasks: int) -> Iterator[Rules]:
    """The rules one by one, the first in any case."""
    for number, rules in enumerate(tried):
        if number and budget.expired:
            return
        yield rules
        budget.charge(num_tasks * SECONDS_PER_RULES)


def _schedule(graph: TaskGraph, swept: Swept, budget: Budget) -> Schedule:
    bound = min(swept.iteration_ns, _bound(graph.workload))
    return Schedule(
        graph.workload,
        graph,
        swept.orders,
        swept.starts,
        graph.makespan(swept.starts),
        bound,
        f"rules: {swept.rules.name}",
        seconds=budget.elapsed,
        interrupted=budget.interrupted,
    )


def _bound(workload: Workload) -> int:
    """Ns that no schedule is below: the searches' own bound, which is proved for forwards and backwards of whole
    micro-batches; only work and dependencies where there are instructions or parts."""
    plain = weak_iteration_bound(workload)
    if workload.instructions or any(slots.num_parted for slots in workload.slots):
        return plain
    return max(plain, strong_iteration_bound(OneMicrobatch.of(workload, require_room=False)))


_LIMITS: tuple[Limit | None, ...] = (None, "S - s", "2 * (S - s) - 1")
"""Micro-batches in flight per stage: no limit, 1F1B's, and twice as many less one, as zero-bubble schedules have."""

_TIMES: tuple[Literal["unit", "true"], ...] = ("unit", "true")
_FIRSTS: tuple[First, ...] = ("bwd-first", "interleaved")


@dataclass(frozen=True, slots=True)
class Swept:
    """Rules, and the schedule that they give: orders of devices and links, starts and iteration in ns."""

    rules: Rules
    orders: list[list[int]]
    starts: list[int]
    iteration_ns: int


def sweep(workload: Workload, rules: Iterable[Rules] | None = None, *, graph: TaskGraph | None = None) -> list[Swept]:
    """What the built-in rules (or those given) make of a workload, the shortest first; of equals, the simpler one.

    Rules that get stuck, or whose schedule does not fit into memory, are left out. Where the time of a limit that is
    enforced is up, there are those until then.
    """
    graph = graph or task_graph(workload)
    best: dict[Rules, Swept] = {}
    try:
        for swept in sweeping(graph, built_in_rules(workload) if rules is None else rules):
            known = best.get(swept.rules)
            if known is None or swept.iteration_ns < known.iteration_ns:
                best[swept.rules] = swept
    except TimeUpError:
        if not best:
            raise
    return sorted(best.values(), key=lambda swept: swept.iteration_ns)


def sweeping(graph: TaskGraph, rules: Iterable[Rules]) -> Iterator[Swept]:
    """One set of rules after another, gradients separated in one way; then the best few again, in all ways.

    Of rules with the same orders only the first is kept.
    """
    found: list[tuple[int, int, Rules, list[list[int]]]] = []
    for each, orders in _distinct(graph, rules):
        swept = _finished(graph, each, orders, 1)
        if swept is not None:
            yield swept
            found.append((swept.iteration_ns, len(found), each, orders))
    for _, _, each, orders in heapq.nsmallest(SEPARATED, found):
        swept = _finished(graph, each, orders, None) if each.separate else None
        if swept is not None:
            yield swept


def _finished(graph: TaskGraph, rules: Rules, orders: list[list[int]], tries: int | None) -> Swept | None:
    """The schedule that rules give with these orders before separation; None if it does not fit into memory."""
    found = separated(graph, orders, tries=tries) if rules.separate else Timed.of(graph, with_links(graph, orders))
    return Swept(rules, found.orders, found.starts, found.iteration) if fits(graph, found.orders) else None


def _distinct(graph: TaskGraph, rules: Iterable[Rules]) -> Iterator[tuple[Rules, list[list[int]]]]:
    """Rules and the orders of devices that they give, before separation; of rules with the same orders the first.

    Rules that get stuck, or do not apply, are passed over.
    """
    joined, seen = Joined.of(graph), set()
    for each in checked(rules, 1):
        try:
            orders = unseparated(joined.graph if each.separate else graph, each)
        except (InfeasibleError, UsageError):
            continue
        key = each.separate, hash(tuple(map(tuple, orders)))
        if key not in seen:
            seen.add(key)
            yield each, joined.apart(orders) if each.separate else orders


def run_rules(graph: TaskGraph, rules: Rules) -> Swept:
    """The schedule that rules give.

    Raises:
        InfeasibleError: they get stuck, or what they make does not fit into memory.
        UsageError: they do not apply to the workload.
    """
    orders = schedule_by_rules(graph, rules)
    with naming(rules):
        found = Timed.of(graph, with_links(graph, orders))
    over = overflow(graph, found.orders)
    if over is not None:
        less = "" if rules.order else "lower in_flight, set fit_memory, or "
        raise InfeasibleError(
            f"the schedule of rules {rules.name!r} does not fit: {over}; {less}raise --memory to "
            f"{format_bytes(rounded_up(over.peak_bytes))}"
        )
    return Swept(rules, found.orders, found.starts, found.iteration)


def built_in_rules(
    workload: Workload,
    *,
    forward_first: bool = False,
    limits: Sequence[Limit | None] = _LIMITS,
    times: Sequence[Literal["unit", "true"]] = _TIMES,
    separate: Sequence[bool] = (False, True),
) -> list[Rules]:
    """The rules of Table 2 within section 6's bounds, simple ones first, each in steps and in time.

    Units are 1. ``interval`` is the number of devices, and only for stages that stand on the devices in turn;
    forwards first only if asked for. Where no device has several stages, traversals are all alike and left out. Where
    memory is limited, forwards wait for room; where backward is split, there are all of them with separated gradients,
    too. ``limits``, ``times`` and ``separate`` are the values to try: the paper's own are no limit, steps, separated.
    """
    firsts: tuple[First, ...] = ("bwd-first", "interleaved", "fwd-first") if forward_first else _FIRSTS
    directions = _traversals(workload)
    fit = any(device.memory_bytes is not None for device in workload.devices)
    split = workload.splits_backward
    tried = (
        Rules(
            types=TypeTraversal(first),
            forward=forward,
            backward=backward,
            in_flight=limit,
            time=time,
            fit_memory=fit,
            separate=separated_,
        )
        for limit, time, separated_ in product(limits, times, separate if split else (False,))
        for first, forward, backward in product(firsts, directions, directions)
    )
    return [rules.but(name=", ".join(_words(rules))) for rules in tried]


def _traversals(workload: Workload) -> list[StageTraversal]:
    """The stage traversals that differ on this placement."""
    plain = [StageTraversal("breadth-first"), StageTraversal("depth-first")]
    stages_of = Counter(device for stage in workload.stages for device in stage.devices)
    if max(stages_of.values(), default=0) < 2:
        return plain[:1]
    chains = list(Resolved(workload, Rules()).chains())
    several = any(len(set(groups)) < len(groups) for groups in chains)
    if several and all(_in_turn(groups) for groups in chains):
        return [*plain, StageTraversal("breadth-first", "D"), StageTraversal("depth-first", "D")]
    return plain


def _in_turn(groups: Sequence[tuple[int, ...]]) -> bool:
    """Whether stages go round the devices several times (the circular placement)."""
    once = list(dict.fromkeys(groups))
    return list(groups) == once * (len(groups) // len(once))


def _words(rules: Rules) -> Iterator[str]:
    """What makes the rules different from the other built-in ones."""
    if rules.types is not None:
        yield str(rules.types.first)
    for traversal in (rules.forward, rules.backward):
        if traversal is not None:
            interval = "" if traversal.interval is None else f" by {traversal.interval}"
            yield f"{traversal.direction}{interval}"
    if rules.in_flight is not None:
        yield f"in flight {rules.in_flight}"
    if rules.time == "true":
        yield "true time"
    if rules.separate:
        yield "separated"
