"""What a check found: problems, each with its rule and place, and the figures it recomputed."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field

from pipeplan.errors import InvalidPlanError

__all__ = ["RULES", "Figures", "Findings", "Problem", "Report"]

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
class Problem:
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
    """The answer of :func:`pipeplan.check.check`.

    ``problems`` lists at most 100 of each rule, ``num_problems`` counts all; ``recomputed`` is what the plan comes to.
    """

    problems: tuple[Problem, ...]
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

    problems: list[Problem] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, rule: str, place: str, message: str) -> None:
        """Note a problem; beyond a hundred of one rule it is only counted."""
        assert rule in RULES, rule
        self.counts[rule] += 1
        if self.counts[rule] <= MAX_PER_RULE:
            self.problems.append(Problem(rule, place, message))

    def has(self, *rules: str) -> bool:
        """Whether one of these rules is broken."""
        return any(self.counts[rule] for rule in rules)
