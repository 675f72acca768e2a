"""A search beside an enumeration of layouts: it finds the best of them, and no bound is above what is there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeplan.errors import InfeasibleError
from pipeplan.files import Plan
from pipeplan.planning.bounds import request_bound
from pipeplan.planning.candidates import PlacementCandidate, placed, uniform_layouts
from pipeplan.planning.request import Request
from pipeplan.planning.steps import search_plan
from pipeplan.planning.trials import Trial

FIXED: dict[str, Any] = {
    "scheduler": "1f1b",
    "num_parted": 0,
    "split_backward": False,
    "time_limit": 1.0,
    "deterministic": True,
    "sizes": (1, 2),
}
"""What enumerations leave open is not searched."""


def require_best(request: Request, best_ns: int) -> Plan:
    """The iteration found is that of the best layout, and neither the answer's bound nor the request's is above it."""
    found = search_plan(request)
    assert found.plan.predicted.iteration_ns == best_ns
    assert found.lower_bound_ns <= best_ns
    assert request_bound(request) <= best_ns
    return found.plan


def require_best_or_none(request: Request, best_ns: int | None) -> None:
    """The same; and where no layout fits (None) nothing is found."""
    if best_ns is not None:
        require_best(request, best_ns)
        return
    with pytest.raises(InfeasibleError):
        search_plan(request)


def require_rows_below_plans(request: Request) -> None:
    """Each row of the table of uniform layouts, and the request's bound, beside every known schedule of the layout."""
    request = replace(request, scheduler="auto", positions=None)
    seen = 0
    for row in uniform_layouts(request):
        candidate = placed(request, row.choice)
        if isinstance(candidate, PlacementCandidate):
            trial = Trial.of(request, candidate)
            trial.look(thorough=True)
            if trial.value_ns is not None:
                seen += 1
                assert row.least_ns <= trial.value_ns
                assert request_bound(request) <= trial.bound_ns
    assert seen
