"""What a check found, and the predicted figures recomputed."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from fractions import Fraction

from pipeplan.checker.facts import Facts
from pipeplan.errors import InvalidPlanError

__all__ = ["RULES", "Figures", "Findings", "Report", "Violation", "check_figures", "figures_of"]


RULES = (
    *("stages", "dependencies", "hops", "balance"),
    *("actions", "transfers", "transfer-order", "fifo", "deadlock"),
    *("inputs", "links", "exclusive", "order", "earliest"),
    *("memory", "figures", "repetend", "profile", "cluster"),
)
"""Every rule; docs/check.md says each."""

MAX_PER_RULE = 100
"""Problems of one rule that a report lists; the rest are only counted."""

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule: which (as in docs/check.md), where in the file, and what is wrong, with the numbers."""

    rule: str
    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message} [{self.rule}]"


@dataclass(frozen=True, slots=True)
class Figures:
    """What the plan comes to by its stated start times and programs; times in ns, sizes in bytes.

    Rates are those of design section 2; ``iteration_ns`` is the makespan, and then gradients summed. ``period_ns``
    (per micro-batch, when the repetend is repeated without end) and ``bubble_rate_steady`` are None without a valid
    repetend, ``peak_memory_bytes`` [device] is empty where the programs lack actions.
    """

    num_devices: int
    num_actions: int
    num_transfers: int
    makespan_ns: int
    iteration_ns: int
    bubble_rate: float
    bubble_rate_span: float
    bubble_rate_steady: float | None
    period_ns: float | None
    peak_memory_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The answer of :func:`pipeplan.checker.check`.

    ``problems`` lists at most 100 of each rule, ``num_problems`` counts all; ``recomputed`` is what the plan comes to.
    """

    problems: tuple[Violation, ...]
    num_problems: int
    recomputed: Figures

    @property
    def valid(self) -> bool:
        """Whether nothing is wrong."""
        return self.num_problems == 0

    def figures(self) -> dict[str, object]:
        """The object of ``check --json``."""
        return {
            "valid": self.valid,
            "num_problems": self.num_problems,
            "problems": [asdict(problem) for problem in self.problems],
            **asdict(self.recomputed),
        }

    def require(self, where: str = "the plan") -> None:
        """Raise if something is wrong.

        Raises:
            InvalidPlanError: the first problems, and how many there are.
        """
        if self.valid:
            return
        lines = [str(problem) for problem in self.problems[:_SHOWN]]
        if self.num_problems > len(lines):
            lines.append(f"... and {self.num_problems - len(lines)} more")
        plural = "s" if self.num_problems > 1 else ""
        raise InvalidPlanError(f"{where}: not a valid plan, {self.num_problems} problem{plural}:", lines)


@dataclass(slots=True)
class Findings:
    """Collects problems while a plan is checked."""

    problems: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, rule: str, place: str, message: str) -> None:
        """Note a problem; beyond a hundred of one rule it is only counted."""
        assert rule in RULES, rule
        self.counts[rule] += 1
        if self.counts[rule] <= MAX_PER_RULE:
            self.problems.append(Violation(rule, place, message))

    def has(self, *rules: str) -> bool:
        """Whether one of these rules is broken."""
        return any(self.counts[rule] for rule in rules)


TOLERANCE = 1e-9
"""Relative and absolute: a float of a file against the exact figure."""


def figures_of(facts: Facts, copy_ns: Fraction | None, peaks: tuple[int, ...]) -> Figures:
    """The figures of the plan's start times; ``copy_ns`` is the time from one repetend to the next."""
    plan = facts.plan
    makespan = max(_last_end(facts, operation) for operation in range(len(facts.ids)))
    busy = facts.busy()
    unroll = plan.repetend.unroll if plan.repetend is not None else 1
    steady = None
    if copy_ns is not None:
        per_copy = Fraction(sum(facts.busy_whole()) * unroll, plan.num_microbatches)
        steady = float(1 - per_copy / (len(busy) * copy_ns))
    return Figures(
        num_devices=len(plan.devices),
        num_actions=facts.num_actions,
        num_transfers=sum(
            len(facts.messages(dependency, hop)) for dependency in plan.dependencies for hop in dependency.hops
        ),
        makespan_ns=makespan,
        iteration_ns=_iteration(facts),
        bubble_rate=float(1 - Fraction(sum(busy), len(busy) * makespan)),
        bubble_rate_span=_bubble_rate_span(facts, busy),
        bubble_rate_steady=steady,
        period_ns=None if copy_ns is None else float(copy_ns / unroll),
        peak_memory_bytes=peaks,
    )


def _last_end(facts: Facts, operation: int) -> int:
    return max(facts.end(operation, number) for number in range(facts.counts[operation]))


def _iteration(facts: Facts) -> int:
    """When each device has ended its last action and then summed the gradients of its stages, in ns."""
    ends, syncs = [0] * len(facts.plan.devices), [0] * len(facts.plan.devices)
    for operation, devices in enumerate(facts.devices):
        end = _last_end(facts, operation)
        for device in devices:
            ends[device] = max(ends[device], end)
    for stage in facts.plan.stages:
        for device in stage.devices:
            syncs[device] += stage.sync_ns
    return max(map(sum, zip(ends, syncs, strict=True)))


def _bubble_rate_span(facts: Facts, busy: list[int]) -> float:
    """``1 - busy / span`` of the device with the longest time from first start to last end, the first of equals."""
    begins: list[float] = [math.inf] * len(busy)
    ends = [0] * len(busy)
    for operation, devices in enumerate(facts.devices):
        begin, end = min(facts.starts[operation]), _last_end(facts, operation)
        for device in devices:
            begins[device] = min(begins[device], begin)
            ends[device] = max(ends[device], end)
    spans = [end - int(begin) if end else 0 for begin, end in zip(begins, ends, strict=True)]
    longest = spans.index(max(spans))
    return float(1 - Fraction(busy[longest], spans[longest]))


def check_figures(facts: Facts, figures: Figures, findings: Findings) -> None:
    """Makespan, iteration, bound and gap, bubble rates, period (design section 2), as stated."""
    predicted = facts.plan.predicted
    _compare("makespan_ns", predicted.makespan_ns, figures.makespan_ns, findings)
    if predicted.iteration_ns:  # older plans do not say it
        _compare("iteration_ns", predicted.iteration_ns, figures.iteration_ns, findings)
    _compare("bubble_rate", predicted.bubble_rate, figures.bubble_rate, findings)
    _compare("bubble_rate_span", predicted.bubble_rate_span, figures.bubble_rate_span, findings)
    bound = predicted.lower_bound_ns
    if not 0 < bound <= figures.makespan_ns:
        text = f"is {bound}; a bound is at least 1 and at most the makespan, {figures.makespan_ns} ns"
        findings.add("figures", "predicted.lower_bound_ns", text)
    else:
        _compare("gap", predicted.gap, figures.makespan_ns / bound - 1, findings)
    _check_period(facts, figures, findings)


def _check_period(facts: Facts, figures: Figures, findings: Findings) -> None:
    predicted, repetend = facts.plan.predicted, facts.plan.repetend
    if repetend is None:
        for name in ("period_ns", "bubble_rate_steady"):
            if getattr(predicted, name) is not None:
                text = f"is {getattr(predicted, name)}, but the plan has no repetend"
                findings.add("figures", f"predicted.{name}", text)
        return
    _compare("period_ns", predicted.period_ns, repetend.period_ns, findings)
    if figures.bubble_rate_steady is not None:
        _compare("bubble_rate_steady", predicted.bubble_rate_steady, figures.bubble_rate_steady, findings)
    work = max(facts.busy_whole()) / facts.plan.num_microbatches
    if repetend.period_ns < work * (1 - TOLERANCE):
        text = f"is {repetend.period_ns:.9g} ns per micro-batch, less than the busiest device's work of {work:.9g} ns"
        findings.add("figures", "repetend.repetend_ns", text)
    if predicted.period_lower_bound_ns > repetend.period_ns * (1 + TOLERANCE):
        text = f"is {predicted.period_lower_bound_ns:.9g}, above the period itself, {repetend.period_ns:.9g} ns"
        findings.add("figures", "predicted.period_lower_bound_ns", text)


def _compare(name: str, stated: float | None, found: float, findings: Findings) -> None:
    """Integers must be equal, floats up to rounding."""
    exact = isinstance(found, int)
    if stated is None or (
        stated != found if exact else not math.isclose(stated, found, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    ):
        said = "missing" if stated is None else stated
        findings.add("figures", f"predicted.{name}", f"is {said}, the start times give {found}")
