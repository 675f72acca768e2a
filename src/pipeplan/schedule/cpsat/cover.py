"""The cheapest cover of a model by groups that backends run, and the proof that none is cheaper."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from pipeplan.errors import InfeasibleError, SearchTimeoutError
from pipeplan.kernels.covers import KernelCover, KernelMatch
from pipeplan.kernels.operators import OperatorDag
from pipeplan.schedule.cpsat.solver import Budget, load_solver, solve
from pipeplan.time_limit import TimeUpError, checked

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


def exact_cover(
    graph: OperatorDag,
    matches: Collection[KernelMatch],
    change_ns: int,
    budget: Budget,
    start: KernelCover | None = None,
) -> tuple[KernelCover, int]:
    """A cover, ``proved`` if it is the cheapest, and what every cover takes at least, in ns.

    One variable for each match, each operator in exactly one that is chosen. That a result goes to another backend is a
    variable too, one for each result and backend that may take it: on if one of those that take it is on that backend,
    and the operator is not.

    Args:
        graph: of the model.
        matches: groups with backends and times, of which those of one group may be several.
        change_ns: what one change of backend takes.
        budget: time, seed and workers.
        start: a cover that is known, to begin with and to return where nothing better is found in time.

    Raises:
        InfeasibleError: no cover exists.
        SearchTimeoutError: time was up before one was found.
    """
    known = list(matches)
    try:
        with budget.enforced():
            load_solver()
            model, chosen = _model(graph, known, change_ns, start)
    except TimeUpError:
        if start is None:
            raise SearchTimeoutError(_TIME_IS_UP) from None
        return start, 0
    answer = solve(model, budget, budget.remaining, linear=True)
    if answer.feasible is False:
        raise InfeasibleError("no groups that backends run have every block once")
    if not answer.feasible:
        if start is None:
            raise SearchTimeoutError(_TIME_IS_UP)
        return start, answer.bound or 0
    found = [match for match, variable in zip(known, chosen, strict=True) if answer.value(variable)]
    cover = KernelCover.of(graph, found, change_ns, proved=answer.optimal)
    better = start if start is not None and start.total_ns < cover.total_ns else cover
    return better, cover.total_ns if answer.optimal else max(0, answer.bound or 0)


def _model(
    graph: OperatorDag, known: Sequence[KernelMatch], change_ns: int, start: KernelCover | None
) -> tuple[cp_model.CpModel, list[cp_model.IntVar]]:
    """The model, and the variables of the matches. Raises TimeUpError."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    chosen = [model.new_bool_var("") for _ in known]
    of: dict[tuple[str, str], list[cp_model.IntVar]] = defaultdict(list)
    for match, variable in checked(zip(known, chosen, strict=True), 256):
        for id_ in match.blocks:
            of[id_, match.backend].append(variable)
    backends: dict[str, list[str]] = {id_: [] for id_ in graph.order}
    for id_, backend in of:
        backends[id_].append(backend)
    for id_ in checked(graph.order, 64):
        model.add_exactly_one([variable for backend in backends[id_] for variable in of[id_, backend]])
    changes = []
    for id_ in checked(graph.order if change_ns else (), 64):
        for backend in dict.fromkeys(each for user in graph.users[id_] for each in backends[user]):
            change = model.new_bool_var("")
            changes.append(change)
            for user in graph.users[id_]:
                if (user, backend) in of:
                    model.add(change >= sum(of[user, backend]) - sum(of.get((id_, backend), ())))
    times = sum(match.ns * variable for match, variable in zip(known, chosen, strict=True))
    model.minimize(times + change_ns * sum(changes))
    if start is not None:
        _hint(model, known, chosen, start)
    return model, chosen


_TIME_IS_UP = "time was up before a cover was found; give more --time-limit"


def _hint(model: object, known: Sequence[KernelMatch], chosen: Sequence[object], start: KernelCover) -> None:
    """Let the solver begin with a cover."""
    own = set(start.matches)
    for match, variable in zip(known, chosen, strict=True):
        model.add_hint(variable, match in own)  # type: ignore[attr-defined]  # of the solver, imported in functions
