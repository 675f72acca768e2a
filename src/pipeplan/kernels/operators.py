"""A model as a directed acyclic graph of operators, in which patterns and rules look for groups.

An operator is a block of the model, as small as it was captured: an operator of torch, half a layer or a layer.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pipeplan.graphs import topological_order

if TYPE_CHECKING:
    from pipeplan.files import Profile


@dataclass(frozen=True, slots=True)
class GraphOperator:
    """One operator: its ``kind`` such as ``attention`` or ``convolution``, what it takes, and attributes.

    ``inputs`` are ids of operators, in the order of its arguments; what comes from outside of the model is not among
    them. ``alike`` is equal for operators that cost the same; by default kind and attributes say so.
    """

    id: str
    kind: str
    inputs: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    alike: Hashable = None

    @property
    def likeness(self) -> Hashable:
        """Equal for operators that cost the same."""
        return self.alike if self.alike is not None else (self.kind, tuple(sorted(self.attributes.items())))


class OperatorDag:
    """Operators by what takes whose result. Raises ValueError where ids repeat, are not known, or form a cycle."""

    def __init__(self, operators: Iterable[GraphOperator]) -> None:
        given = list(operators)
        self._known = {each.id: each for each in given}
        if len(self._known) < len(given):
            raise ValueError("two operators have the same id")
        edges = [(source, each.id) for each in given for source in each.inputs]
        order = topological_order(list(self._known), edges)
        self.order: tuple[str, ...] = order
        """Ids, each after all that it takes."""
        users: dict[str, dict[str, None]] = {id_: {} for id_ in order}
        for source, target in edges:
            users[source].setdefault(target)
        self.users: Mapping[str, tuple[str, ...]] = {id_: tuple(found) for id_, found in users.items()}
        """{id: those that take its result}"""

    @classmethod
    def of(cls, profile: Profile) -> OperatorDag:
        """A profile's blocks and edges; dimensions are attributes."""
        taken: dict[str, list[str]] = {}
        for edge in profile.edges:
            taken.setdefault(edge.target, []).append(edge.source)
        return cls(
            GraphOperator(block.id, block.operator, tuple(taken.get(block.id, ())), block.dimensions)
            for block in profile.blocks
        )

    def __getitem__(self, id_: str) -> GraphOperator:
        return self._known[id_]

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[GraphOperator]:
        return iter(self._known[id_] for id_ in self.order)

    @cached_property
    def place(self) -> Mapping[str, int]:
        """{id: its place in ``order``}"""
        return {id_: place for place, id_ in enumerate(self.order)}

    @cached_property
    def post_dominator(self) -> Mapping[str, str | None]:
        """{id: the nearest operator through which all that comes of its result goes}; None: there is none."""
        found: dict[str, str | None] = {}
        depth: dict[str | None, int] = {None: 0}
        for id_ in reversed(self.order):
            users = self.users[id_]
            nearest: str | None = users[0] if users else None
            for other in users[1:]:
                nearest = self._common(nearest, other, found, depth)
            found[id_] = nearest
            depth[id_] = depth[nearest] + 1
        return found

    @staticmethod
    def _common(
        one: str | None, other: str | None, above: Mapping[str, str | None], depth: Mapping[str | None, int]
    ) -> str | None:
        """The nearest that post-dominates both."""
        while one != other:
            if depth[one] >= depth[other]:
                assert one is not None
                one = above[one]
            else:
                assert other is not None
                other = above[other]
        return one

    def between(self, source: str, sink: str) -> tuple[str, ...]:
        """Both ends and all on paths from one to the other, in order; empty where there is no path."""
        end, reached = self.place[sink], {source}
        waiting = [source]
        while waiting:
            for user in self.users[waiting.pop()]:
                if user not in reached and self.place[user] <= end:
                    reached.add(user)
                    waiting.append(user)
        if sink not in reached:
            return ()
        back, waiting = {sink}, [sink]
        while waiting:
            for each in self[waiting.pop()].inputs:
                if each in reached and each not in back:
                    back.add(each)
                    waiting.append(each)
        return self.ordered(back)

    def ordered(self, group: Collection[str]) -> tuple[str, ...]:
        """The group in the order of the graph."""
        return tuple(sorted(group, key=self.place.__getitem__))

    def given_by(self, group: Collection[str]) -> tuple[str, ...]:
        """Operators of a group whose results are taken outside of it, or by nobody."""
        inside = frozenset(group)
        return tuple(
            id_ for id_ in self.ordered(group) if not self.users[id_] or not inside.issuperset(self.users[id_])
        )

    def is_one_kernel(self, group: Collection[str]) -> bool:
        """Whether a group gives one result and needs nothing of its own from outside: a backend can run it at once.

        Groups of this kind that are disjoint never wait for each other in a circle: what leaves a group leaves it from
        its last operator, which waits for all others.
        """
        return len(self.given_by(group)) == 1 and self._is_convex(group)

    def _is_convex(self, group: Collection[str]) -> bool:
        """Whether no path leaves the group and comes back."""
        inside = frozenset(group)
        last = max(map(self.place.__getitem__, inside))
        seen = {user for id_ in inside for user in self.users[id_] if user not in inside}
        waiting = list(seen)
        while waiting:
            for user in self.users[waiting.pop()]:
                if user in inside:
                    return False
                if user not in seen and self.place[user] < last:
                    seen.add(user)
                    waiting.append(user)
        return True

    def likeness(self, group: Collection[str]) -> Hashable:
        """Equal for groups that cost the same: what their operators are, and what each takes of the others."""
        inside = {id_: number for number, id_ in enumerate(self.ordered(group))}
        outside: dict[str, int] = {}
        wiring = []
        for id_ in inside:
            taken = [
                inside[each] if each in inside else -1 - outside.setdefault(each, len(outside))
                for each in self[id_].inputs
            ]
            wiring.append((self[id_].likeness, tuple(taken)))
        return tuple(wiring)
