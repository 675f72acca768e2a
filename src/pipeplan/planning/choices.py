"""Who made each choice of a plan, or of a compared row: a flag, a planner or rules that were named, or the search."""

from __future__ import annotations

from collections.abc import Mapping

from pipeplan.files import Placement
from pipeplan.planning.request import Request
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.search import PLAIN

SEARCHED = "searched"

EVEN = "even"
"""What made stages that are cut evenly."""

_OF_DEVICES = ("replicas", "shards", "context", "expert", "expert_shards", "positions", "chunks")
_SIZES = (*_OF_DEVICES, "context_exchange", "zero", "zero_group", "spread")


def choices_of(request: Request, source: str, scheduler: str, *, late_inputs: bool = False) -> dict[str, str]:
    """Each choice that a plan needs, and who made it; sizes only where they were said.

    ``source`` is what made the stages, ``scheduler`` what made the schedule, as plans say both. ``late_inputs`` is
    whether actions wait inside for messages, which is left out where it is neither so nor said.
    """
    said = dict(request.said)
    named = _schedule_named(request)
    whole = SEARCHED if named is None else named
    found = {
        "placement": _placement_by(request, source),
        **{name: said[name] for name in _SIZES if name in said},
        "microbatch": said.get("microbatch") or _microbatch_by(request, source),
        "schedule": _stood_in(request, source, scheduler) or named or _search_of(request, scheduler),
        "recompute": said.get("recompute", SEARCHED),
        "backward": said.get("split_backward", whole),
        "slices": said.get("num_parted") or _slices_by(request, whole),
    }
    if request.profile.is_inference:  # there is nothing to choose
        found = {name: by for name, by in found.items() if name not in ("recompute", "backward", "slices")}
    if late_inputs or "late_inputs" in said:
        found["late_inputs"] = said.get("late_inputs", SEARCHED)
    return found


def choices_of_known(
    searched: Mapping[str, str], schedule: str, split_backward: bool, *, varied: bool
) -> dict[str, str]:
    """Of a known schedule on stages that a search chose: all as there (``searched``) but what a schedule decides.

    ``schedule`` is its name in a comparison; ``varied`` where backward runs another way than it is defined.
    """
    flag = f"--rules {schedule.removeprefix(OF_RULES)}" if schedule.startswith(OF_RULES) else f"--scheduler {schedule}"
    backward = f"--split-backward {'yes' if split_backward else 'no'}" if varied else flag
    own = {"schedule": flag, "backward": backward, "slices": flag}
    return {**searched, **{name: by for name, by in own.items() if name in searched}}


def found_as(searched: Mapping[str, str], schedule: str) -> dict[str, str]:
    """Of a search that found nothing shorter than a known schedule, which is then its answer."""
    return {**searched, "schedule": f"{SEARCHED} ({schedule})"}


OF_RULES = "rules: "
"""What stands before the name of rules where they stand beside named schedules."""


def choices_of_splits(request: Request, only: str | None) -> dict[str, str]:
    """Of one stage on all devices, of which each block is split in a way of its own."""
    said = dict(request.said)
    return {
        "placement": "one stage on all devices",
        "splits": f"{SEARCHED} (frontier)" if only is None else f"--only {only}",
        "microbatch": said.get("microbatch") or _microbatch_by(request, ""),
        "schedule": "the only order there is",
    }


def _placement_by(request: Request, source: str) -> str:
    """A strategy says where stages stand, and not which they are."""
    if _cut_stands_in(request, source):
        return f"an even cut, for want of --planner {request.planner}'s"
    if request.planner != "auto":
        return f"--planner {request.planner}"
    stated = dict(request.said).get("placement")
    if isinstance(request.placement, Placement):
        return stated or "as given"
    made = f"{SEARCHED} ({source})"
    return made if stated is None else f"{stated}, stages {made}"


def takes_long(request: Request) -> str | None:
    """The flag that asks for what may be found late, so that an even cut stands in for it until then; None without."""
    if request.planner != "auto":
        return f"--planner {request.planner}"
    if request.rules is not None:
        return f"--rules {request.rules.name}"
    return f"--scheduler {request.scheduler}" if request.scheduler == "repetend" else None


def stands_in(request: Request, source: str, scheduler: str) -> bool:
    """Whether a plan is an even cut with GPipe or 1F1B because what :func:`takes_long` was not there in time.

    ``source`` and ``scheduler`` made its stages and schedule.
    """
    return _cut_stands_in(request, source) or _stood_in(request, source, scheduler) is not None


def _cut_stands_in(request: Request, source: str) -> bool:
    """Whether stages are cut evenly because the planner that was asked for had none when time was up."""
    return request.planner != "auto" and source == EVEN


def _stood_in(request: Request, source: str, scheduler: str) -> str | None:
    """The schedule that stands in for another one that was asked for, in words; None where none does."""
    plain = request.planner == "auto" and source == EVEN and scheduler.removesuffix("+groups") in PLAIN
    asked = takes_long(request)
    return f"{scheduler}, for want of {asked}'s" if plain and asked is not None else None


def _microbatch_by(request: Request, source: str) -> str:
    """Planners choose sizes with their stages, where there is more than one."""
    if len(request.sizes) < 2:
        return "the only size there is"
    own = request.planner != "auto" and not _cut_stands_in(request, source)
    return f"--planner {request.planner}" if own else SEARCHED


def _schedule_named(request: Request) -> str | None:
    """The flag that says the schedule; None where one is searched or tuned."""
    if request.rules is not None:
        return f"--rules {request.rules.name}"
    if (by := dict(request.said).get("scheduler")) is not None:
        return by
    return f"--scheduler {request.scheduler}" if request.scheduler in CLASSIC else None


def _search_of(request: Request, scheduler: str) -> str:
    """What kind of search found a schedule, and what it was."""
    said = dict(request.said)
    flags = [] if request.scheduler == "auto" else [f"--scheduler {request.scheduler}"]
    flags += [said[name] for name in ("unroll", "max_span") if name in said]
    return ", ".join([f"{SEARCHED} ({scheduler})", *flags])


def _slices_by(request: Request, whole: str) -> str:
    """What needs whole forwards leaves nothing to slice."""
    said = dict(request.said)
    if request.max_span is not None:
        return said.get("max_span", whole)
    return said["late_inputs"] if request.late_inputs and "late_inputs" in said else whole
