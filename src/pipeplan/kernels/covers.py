"""Covers of a model by groups that backends run, and Algorithm 1 of the thesis (section 2.4.2), which finds cheap ones.

A cover has every operator in one group. It costs what its groups were measured to take, and a constant for each change
of backend: for every result, one for each other backend that takes it. On a chain that is the number of times at which
the backend changes. (The thesis charges its constant with every group; where backends share memory, as ours do, one
that goes on has nothing to switch.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeplan.errors import InfeasibleError
from pipeplan.kernels.operators import OperatorDag
from pipeplan.time_limit import checked


@dataclass(frozen=True, slots=True)
class KernelMatch:
    """A group that a backend runs as one kernel, and the ns that this takes."""

    blocks: tuple[str, ...]
    backend: str
    ns: int


@dataclass(frozen=True, slots=True)
class KernelCover:
    """Disjoint matches with all operators, in the order of the graph. ``proved``: no other cover costs less."""

    matches: tuple[KernelMatch, ...]
    num_changes: int
    total_ns: int
    proved: bool = False

    @classmethod
    def of(
        cls, graph: OperatorDag, matches: Iterable[KernelMatch], change_ns: int, *, proved: bool = False
    ) -> KernelCover:
        """The cover of these matches. Raises ValueError where an operator is missing, or in two of them."""
        found = sorted(matches, key=lambda match: min(map(graph.place.__getitem__, match.blocks)))
        backend = {id_: match.backend for match in found for id_ in match.blocks}
        if len(backend) < len(graph) or sum(len(match.blocks) for match in found) > len(graph):
            raise ValueError("these matches are no cover: an operator is missing, or in two of them")
        changes = num_changes(graph, backend)
        return cls(tuple(found), changes, sum(match.ns for match in found) + changes * change_ns, proved)

    def as_runs(self, graph: OperatorDag) -> tuple[KernelMatch, ...]:
        """The matches in an order in which they can run."""
        of = {id_: match for match in self.matches for id_ in match.blocks}
        last = {match: max(map(graph.place.__getitem__, match.blocks)) for match in self.matches}
        return tuple(sorted(dict.fromkeys(of.values()), key=last.__getitem__))


def num_changes(graph: OperatorDag, backend: Mapping[str, str]) -> int:
    """For every result, how many other backends take it; ``backend`` is that of each operator."""
    return sum(
        len({backend[user] for user in graph.users[id_]} - {backend[id_]}) for id_ in graph.order if graph.users[id_]
    )


_Taken = frozenset[str]
"""The backends that take a result."""


@dataclass(frozen=True, slots=True)
class _Covered:
    """A subgraph that is covered: what that costs, the last match, and the state before it."""

    cost: int
    covered: int
    taken: tuple[tuple[int, _Taken], ...]
    match: KernelMatch | None
    before: _Covered | None


MOST_STATES = 200
"""Subgraphs that wait at an operator; the thesis saw fewer in all of its models (S < 200)."""


def algorithm_1(
    graph: OperatorDag, matches: Collection[KernelMatch], change_ns: int = 0, most_states: int | None = MOST_STATES
) -> KernelCover:
    """A cheap cover: the thesis's dynamic programme over operators in post-order.

    Each operator comes after all that take its result; the next that no match has yet is the frontier. It is the root
    of the match that is put there: C(s + g) = C(s) + M(g), with the changes of backend at the root's result. Subgraphs
    s that are the same differ in cost, and in the backends by which results that wait are taken: the cheapest is kept,
    and others only if what takes their results may make up for what they cost more. Where no more than ``most_states``
    ever wait, no other cover is cheaper. Else those are kept at each operator whose cost, with the least that the rest
    can take, is lowest.

    Raises:
        InfeasibleError: an operator is in no match, or no matches are disjoint and have all operators.
    """
    order = _post_order(graph)
    position = {id_: number for number, id_ in enumerate(order)}
    rooted = _by_root(graph, matches, position)
    least = _least_shares(order, matches)
    bound = sum(least.values())
    waiting: dict[int, dict[tuple[int, tuple[tuple[int, _Taken], ...]], _Covered]] = defaultdict(dict)
    waiting[0][0, ()] = _Covered(0, 0, (), None, None)
    pruned = False
    for at in checked(range(len(order)), 16):
        states = _undominated(waiting.pop(at, {}).values(), change_ns)
        if most_states is not None and len(states) > most_states:
            states, pruned = _kept(states, order, least, bound, most_states), True
        for state in states:
            for match, mask in rooted.get(at, ()):
                if state.covered & mask:
                    continue
                found = _joined(state, match, mask, at, graph, order, position, change_ns)
                next_ = _first_open(found.covered)
                known = waiting[next_].get((found.covered, found.taken))
                if known is None or found.cost < known.cost:
                    waiting[next_][found.covered, found.taken] = found
    ends = waiting.get(len(order), {}).values()
    if not ends:
        if most_states is not None:  # what was left out may have led to one
            return algorithm_1(graph, matches, change_ns, None)
        raise InfeasibleError(_no_cover(graph, matches))
    end: _Covered | None = min(ends, key=lambda each: each.cost)
    chosen = []
    while end is not None and end.match is not None:
        chosen.append(end.match)
        end = end.before
    return KernelCover.of(graph, chosen, change_ns, proved=not pruned)


def _no_cover(graph: OperatorDag, matches: Iterable[KernelMatch]) -> str:
    known = {id_ for match in matches for id_ in match.blocks}
    missing = [id_ for id_ in graph.order if id_ not in known]
    if missing:
        return f"no backend runs {missing[0]!r} ({len(missing)} such blocks); profile with a backend that does"
    return "no groups that backends run have every block once; profile with a backend that runs each block alone"


def _post_order(graph: OperatorDag) -> tuple[str, ...]:
    """Operators each after all that take its result, in that of two such orders in which fewer results wait at once.

    As a depth-first walk along the edges leaves them, one branch after the other; or the model's own order backwards,
    where operators take what is near.
    """
    return min(_walked(graph), tuple(reversed(graph.order)), key=lambda order: _most_waiting(graph, order))


def _most_waiting(graph: OperatorDag, order: Sequence[str]) -> int:
    """The most results that are taken by operators before a place of the order, of operators after it."""
    waiting, most = set[str](), 0
    for id_ in order:
        waiting.discard(id_)
        waiting.update(graph[id_].inputs)
        most = max(most, len(waiting))
    return most


def _walked(graph: OperatorDag) -> tuple[str, ...]:
    left: dict[str, None] = {}
    for root in graph.order:
        if graph[root].inputs or root in left:
            continue
        stack = [(root, iter(graph.users[root]))]
        entered = {root}
        while stack:
            id_, users = stack[-1]
            user = next((each for each in users if each not in left and each not in entered), None)
            if user is None:
                stack.pop()
                left[id_] = None
            else:
                entered.add(user)
                stack.append((user, iter(graph.users[user])))
    return tuple(left)


def _by_root(
    graph: OperatorDag, matches: Iterable[KernelMatch], position: Mapping[str, int]
) -> dict[int, list[tuple[KernelMatch, int]]]:
    """{place of the operator that no other of the match comes before: matches with their operators as bits}"""
    found: dict[int, list[tuple[KernelMatch, int]]] = defaultdict(list)
    for match in checked(matches, 64):
        places = [position[id_] for id_ in match.blocks]
        found[min(places)].append((match, sum(1 << place for place in places)))
    return found


def _least_shares(order: Sequence[str], matches: Iterable[KernelMatch]) -> dict[int, float]:
    """{place: the least that its operator can be said to cost}: of every match, each of its operators the same."""
    found: dict[str, float] = {}
    for match in matches:
        share = match.ns / len(match.blocks)
        for id_ in match.blocks:
            found[id_] = min(found.get(id_, share), share)
    return {place: found.get(id_, 0.0) for place, id_ in enumerate(order)}


def _undominated(states: Iterable[_Covered], change_ns: int) -> list[_Covered]:
    """Without those of which another, with the same operators, is cheaper however the rest is covered.

    What waits in both is the same. A backend that takes a result in one and not in the other is one more change of
    backend at most.
    """
    kept: dict[int, list[_Covered]] = defaultdict(list)
    for state in sorted(states, key=lambda each: each.cost):
        own = kept[state.covered]
        if all(other.cost + change_ns * _taken_beyond(other, state) > state.cost for other in own):
            own.append(state)
    return [state for own in kept.values() for state in own]


def _taken_beyond(one: _Covered, other: _Covered) -> int:
    """How many backends take results in one that do not in the other."""
    return sum(len(own - rest) for (_, own), (_, rest) in zip(one.taken, other.taken, strict=True))


def _kept(
    states: Iterable[_Covered], order: Sequence[str], least: Mapping[int, float], bound: float, most: int
) -> list[_Covered]:
    """The states that can become the cheapest."""

    def rank(state: _Covered) -> float:
        covered = state.covered
        done = sum(least[place] for place in range(covered.bit_length()) if covered >> place & 1)
        return state.cost + bound - done

    return sorted(states, key=rank)[:most]


def _first_open(covered: int) -> int:
    """The place of the lowest bit that is not set."""
    return (~covered & (covered + 1)).bit_length() - 1


def _joined(
    state: _Covered,
    match: KernelMatch,
    mask: int,
    at: int,
    graph: OperatorDag,
    order: Sequence[str],
    position: Mapping[str, int],
    change_ns: int,
) -> _Covered:
    """The state with one more match, whose root is the operator in a place."""
    taken = dict(state.taken)
    covered = state.covered | mask
    changes = 0
    for id_ in match.blocks:
        changes += len(taken.pop(position[id_], frozenset()) - {match.backend})
    for id_ in match.blocks:
        for source in graph[id_].inputs:
            place = position[source]
            if not covered >> place & 1:
                taken[place] = taken.get(place, frozenset()) | {match.backend}
    return _Covered(state.cost + match.ns + changes * change_ns, covered, tuple(sorted(taken.items())), match, state)
