"""Everything that a search for a plan tries, in order: placements, their schedules, changes to the best plans.

A step is a frozen dataclass whose fields are its constants. A search takes the steps as an argument, so that each can
be left out: ``search_plan(request, steps=without({"windows"}))``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pipeplan.schedule.state import ScheduleStep, SearchStep
from pipeplan.schedule.steps import STEPS as SCHEDULE_STEPS


@dataclass(frozen=True)
class LookAtCandidates(SearchStep):
    """Known schedules of placements as they come; with less than ``least`` of the limit left no more are looked at."""

    share: float = 0.5
    least: float = 0.1
    name = "look at candidates"
    when = "always, in turn with the search; once there is a plan, only with {least} of the limit left"
    of = "what is left"
    needed = True


@dataclass(frozen=True)
class SearchCandidates(SearchStep):
    """Search the most promising candidates: in each round (how many, their part of the time that is left)."""

    rounds: tuple[tuple[int, float], ...] = ((8, 0.4), (3, 0.5), (1, 1.0))
    name = "search candidates"
    when = "always, in turn with the looking; those that may become the best"
    needed = True


@dataclass(frozen=True)
class BackwardWays(SearchStep):
    """Each way of running backward gets a short look, then the better one the rest of the candidate's time."""

    share: float = 0.15
    name = "both ways of backward"
    when = "--split-backward is open, and the profile has costs for both"
    of = "the candidate's time, each"
    needed = True


@dataclass(frozen=True)
class EaseRecomputation(SearchStep):
    """Stages of the best ``finalists`` that need not recompute after all."""

    finalists: int = 3
    name = "ease recomputation"
    when = "the best {finalists} plans; recomputation is open; orders still fit"


@dataclass(frozen=True)
class SliceForwards(SearchStep):
    """Leading forwards in two parts: of the best ``finalists``, and of candidates with few actions times stages."""

    finalists: int = 3
    few: int = 30_000
    name = "slice forwards"
    when = "the best {finalists} plans, and candidates of at most {few} actions x stages; one stage per device"


@dataclass(frozen=True)
class ExplainShortage(SearchStep):
    """What would do where nothing fits, looked for in at least ``seconds``; memory is found to ``precision``."""

    seconds: float = 1.0
    precision: float = 1.01
    name = "explain what does not fit"
    when = "nothing fits into memory"


STEPS: tuple[SearchStep, ...] = (
    LookAtCandidates(),
    SearchCandidates(),
    BackwardWays(),
    *SCHEDULE_STEPS,
    EaseRecomputation(),
    SliceForwards(),
    ExplainShortage(),
)

AnyStep = TypeVar("AnyStep", bound=SearchStep)


def named(steps: Sequence[SearchStep], kind: type[AnyStep]) -> AnyStep | None:
    """The step of a kind; None where it is switched off."""
    return next((step for step in steps if isinstance(step, kind)), None)


def schedule_steps(steps: Sequence[SearchStep]) -> tuple[ScheduleStep, ...]:
    """The steps of the search for a schedule."""
    return tuple(step for step in steps if isinstance(step, ScheduleStep))


def without(names: Collection[str], steps: Sequence[SearchStep] = STEPS) -> tuple[SearchStep, ...]:
    """The steps without those of some names.

    Raises:
        ValueError: a name is not a step's, or that step is needed.
    """
    left_out = {step.name for step in steps if not step.needed} & set(names)
    if left_out != set(names):
        raise ValueError(f"{', '.join(sorted(set(names) - left_out))}: no step that can be switched off")
    return tuple(step for step in steps if step.name not in names)


def table(steps: Sequence[SearchStep] = STEPS) -> str:
    """The steps as a Markdown table: name, when it is tried, its share of the time."""
    rows = [("step", "tried when", "time, at most"), ("---", "---", "---"), *(step.row for step in steps)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
